"""Object detection with DINO on torchrope's backbones, built from transformers' modules."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import box_convert, clip_boxes_to_image
from transformers import DeformableDetrConfig, DeformableDetrModel, ResNetConfig
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss
from transformers.loss.loss_rt_detr import RTDetrLoss
from transformers.models.deformable_detr.modeling_deformable_detr import (
    DeformableDetrMLPPredictionHead,
    inverse_sigmoid,
)
from transformers.models.rt_detr.modeling_rt_detr import get_contrastive_denoising_training_group

from torchrope.models import Features, pad
from torchrope.tensors import wide_dtype, without_autocast
from torchrope_lab.heads import DenseModel, Target, per_device
from torchrope_lab.heads.average_precision import MAX_DETECTIONS
from torchrope_lab.mistakes import Mistake


class DINO(DenseModel):
    """Detect objects with DINO: Deformable DETR with denoising, mixed query selection and look forward twice.

        maps (+ one of half the size) -> encoder -> top-scoring tokens as queries -> decoder -> class and box of each

    It is built from the layers and losses of transformers' Deformable DETR, with two stages and iterative refinement of
    boxes, and the noise of its RT-DETR. As in the paper:

    * contrastive denoising: in training, further queries of the decoder are objects of the batch with noise on label
      and box, in groups. Queries with less noise are trained to restore their object, those with more to predict no
      object. Queries of a group do not attend to other groups, nor matched queries to any group.
    * mixed query selection: boxes of queries come from the encoder, their contents are learned.
    * look forward twice: let h_i be the output of the box head of layer i, and ℓ_i = h_i + stop(ℓ_{i-1}), where `stop`
      blocks the gradient. The box of layer i is σ(h_i + ℓ_{i-1}), not σ(ℓ_i), so that its loss also trains the head of
      layer i - 1.
    * the encoder's head predicts classes, and its loss is computed only for the selected tokens.
    * the position embedding of a query is computed again in each layer, from its current box.

    Number of queries, losses with their weights (class 1, box 5, generalised IoU 2; in matching 2, 5, 2), widths and
    the absence of dropout are as in detrex, where layers share no heads either. Differences from detrex: no second norm
    after each decoder layer, which already ends with one; and positions of queries are fractions of their image, not of
    the padded batch. Sums of losses are divided by the number of objects, counted over all devices.

    Boxes are fractions of the image size rounded up to whole cells of the coarsest map, so that all maps agree on the
    location of a box. Losses in evaluation mode have the same noise each time.

    Args:
        backbone: Computes the feature maps.
        classes: Names of the classes.
        channels: Channels of tokens, a multiple of 32, at least 64.
        queries: Object queries; at most the number of cells of all maps of an image.
        encoder_layers: Layers of the encoder.
        decoder_layers: Layers of the decoder.
        num_heads: Attention heads of both.
        mlp_dim: Hidden channels of the MLP of a layer.
        denoising_queries: Number of queries with less noise; as many have more. They form groups, each with all objects
            of an image: denoising_queries // n, at least one, where n is the largest number of objects in an image of
            the batch. 0 disables denoising.
        label_noise: Twice the fraction of noised objects that get a random label.

    Raises:
        ValueError: channels do not fit.

    References:
        Zhang et al., DINO: DETR with Improved DeNoising Anchor Boxes for End-to-End Object Detection, arXiv:2203.03605,
        sections 3.3 to 3.5; its numbers are those of IDEA-Research/detrex, projects/dino. Zhu et al., Deformable DETR,
        arXiv:2010.04159, appendix A.4.

    Example:
        >>> from torchrope import ViT
        >>> vit = ViT((32, 32), patch_size=8, dim=32, depth=2, num_heads=2, encoding="mixed")
        >>> backbone = Features(vit, pyramid=True, out_channels=16)
        >>> model = DINO(backbone, "0123456789", channels=64, queries=20, encoder_layers=1, decoder_layers=2)
        >>> target = {"boxes": torch.tensor([[4.0, 8, 20, 24]]), "labels": torch.tensor([7])}
        >>> losses = model.losses([torch.randn(3, 32, 48)], [target])
        >>> [name for name in losses if name.startswith("denoising")]
        ['denoising_class', 'denoising_box', 'denoising_overlap']
        >>> [found] = model.eval().predict([torch.randn(3, 32, 48)])
        >>> len(found["boxes"])
        100
    """

    def __init__(
        self,
        backbone: Features,
        classes: Sequence[str],
        *,
        channels: int = 256,
        queries: int = 900,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        num_heads: int = 8,
        mlp_dim: int = 2048,
        denoising_queries: int = 100,
        label_noise: float = 0.5,
    ) -> None:
        super().__init__(backbone, classes)
        if channels < 64 or channels % 32:  # group norms of 32 groups need two values each, even for a map of one cell
            raise Mistake(f"channels must be 64 or more and divisible by 32, got {channels}")
        self.queries = queries
        self.noise = {
            "num_denoising_queries": denoising_queries,
            "label_noise_ratio": label_noise,
            "box_noise_scale": 1.0,  # edges move by up to half of the extent, or by half to all of it
        }
        self.stride = int(2 * backbone.strides[-1])
        self.divisor = max(backbone.size_divisor, self.stride)
        config = DeformableDetrConfig(
            backbone_config=_placeholder_backbone(backbone),
            num_feature_levels=len(backbone.channels) + 1,
            two_stage=True,
            with_box_refine=True,
            two_stage_num_proposals=queries,
            d_model=channels,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            encoder_attention_heads=num_heads,
            decoder_attention_heads=num_heads,
            encoder_ffn_dim=mlp_dim,
            decoder_ffn_dim=mlp_dim,
            dropout=0.0,
            disable_custom_kernels=True,
        )
        self.detr = _model(config)
        del self.detr.backbone, self.detr.pos_trans, self.detr.pos_trans_norm
        # One head per decoder layer, then the encoder's.
        count = decoder_layers + 1
        self.detr.decoder.class_embed = nn.ModuleList(
            _with_prior_bias(nn.Linear(channels, len(classes))) for _ in range(count)
        )
        self.detr.decoder.bbox_embed = nn.ModuleList(_zero_box_head(channels) for _ in range(count))
        matcher = DeformableDetrHungarianMatcher(class_cost=2, bbox_cost=5, giou_cost=2)
        self.criterion: Any = DeformableDetrImageLoss(matcher, len(classes), focal_alpha=0.25, losses=[])
        self.contents = nn.Embedding(queries, channels)
        self.labels = nn.Embedding(len(classes) + 1, channels, padding_idx=len(classes))
        self.place = DeformableDetrMLPPredictionHead(2 * channels, channels, output_dim=channels, num_layers=2)

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """Compute the losses of matched queries, of denoising queries, and of the encoder."""
        kept = [training_objects(target) for target in targets]
        extents = self._extents(images).repeat(1, 2)
        boxes = [box_convert(each["boxes"].to(extents.dtype), "xyxy", "cxcywh") for each in kept]
        normalized = [
            {"boxes": box / extent, "class_labels": each["labels"]}
            for box, extent, each in zip(boxes, extents, kept, strict=True)
        ]
        noised = self._noised(normalized)
        layers, proposals = self._run(images, noised)
        noise = 0 if noised is None else noised.contents.shape[1]
        matched = [{name: each[:, noise:] for name, each in layer.items()} for layer in layers]
        restored = [{name: each[:, :noise] for name, each in layer.items()} for layer in layers]
        count = per_device(extents.new_tensor(sum(map(len, boxes))), self.training)
        return {
            **self._losses(matched, normalized, count),
            **_prefixed("denoising", self._denoising_losses(restored, noised, normalized, count)),
            **_prefixed("first", self._losses([proposals], normalized, count)),
        }

    def predict_same_size(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        layers, _ = self._run(images)
        last = layers[-1]
        classes = last["logits"].shape[2]
        scores, indices = last["logits"].sigmoid().flatten(1).topk(min(MAX_DETECTIONS, last["logits"][0].numel()))
        boxes = box_convert(last["pred_boxes"], "cxcywh", "xyxy") * self._extents(images).repeat(1, 2)[:, None]
        detections = []
        for image, score, index, box in zip(images, scores, indices, boxes, strict=True):
            clipped = clip_boxes_to_image(box[index // classes], (image.shape[1], image.shape[2]))
            detections.append({"boxes": clipped, "scores": score, "labels": index % classes})
        return detections

    def _padded(self, images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Pad images to one batch; the mask is True inside the images."""
        batch, mask = pad(images, self.divisor)
        height, width = batch.shape[2:]
        strides = (*self.backbone.strides, self.stride)
        cells = sum(math.ceil(height / stride) * math.ceil(width / stride) for stride in strides)
        if self.queries > cells:
            rule = f"queries must be at most the cells of all maps, {cells} in an image of {height}x{width}"
            raise Mistake(f"{rule}, got {self.queries}")
        return batch, mask

    def _extents(self, images: Sequence[Tensor]) -> Tensor:
        """Compute the pixels by which box coordinates are divided, `(batch, 2)` (x, y)."""
        extents = [[math.ceil(size / self.stride) * self.stride for size in image.shape[:0:-1]] for image in images]
        return images[0].new_tensor(extents)

    def _losses(
        self, layers: Sequence[dict[str, Tensor]], targets: list[dict[str, Tensor]], count: Tensor, known: Any = None
    ) -> dict[str, Tensor]:
        """Compute the losses by kind, weighted and summed over layers, of `known` matches or the cheapest ones."""
        criterion, terms = self.criterion, []
        for layer in layers:
            matches = criterion.matcher(layer, targets) if known is None else known
            of_layer = (layer, targets, matches, count)
            terms.append({**criterion.loss_labels(*of_layer), **criterion.loss_boxes(*of_layer)})
        weights = {"class": ("loss_ce", 1), "box": ("loss_bbox", 5), "overlap": ("loss_giou", 2)}
        return {
            kind: weight * torch.stack([each[name] for each in terms]).sum() for kind, (name, weight) in weights.items()
        }

    def _denoising_losses(
        self,
        layers: list[dict[str, Tensor]],
        noised: "_Noised | None",
        targets: list[dict[str, Tensor]],
        count: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the losses of denoising queries, averaged over groups."""
        if noised is None:
            zero = 0 * self.labels.weight.sum()  # DDP needs a gradient of every parameter
            return {"class": zero, "box": zero, "overlap": zero}
        losses = self._losses(layers, targets, count, noised.known)
        return {name: loss / noised.groups for name, loss in losses.items()}

    def _noised(self, targets: list[dict[str, Tensor]]) -> "_Noised | None":
        """Build denoising queries; None if there are no objects or no denoising."""
        with nullcontext() if self.training else fixed_seed(self.contents.weight.device):
            contents, anchors, mask, meta = get_contrastive_denoising_training_group(
                targets, len(self.classes), self.queries, self.labels, **self.noise
            )
        if meta is None:
            return None
        known = RTDetrLoss.get_cdn_matched_indices(meta, targets)
        return _Noised(contents, anchors, mask[None, None] == 0, known, meta["dn_num_group"])

    def _run(
        self, images: Sequence[Tensor], noised: "_Noised | None" = None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Compute logits and boxes of every decoder layer, denoising queries first, and of the selected tokens."""
        tokens = self._encode(*self._padded(images))
        proposals = self._select(tokens)
        contents = self.contents.weight.expand(len(images), -1, -1)
        anchors = inverse_sigmoid(proposals["pred_boxes"].detach())
        if noised is None:
            return self._decode(tokens, contents, anchors), proposals
        contents = torch.cat([noised.contents, contents], dim=1)
        anchors = torch.cat([noised.anchors, anchors], dim=1)
        return self._decode(tokens, contents, anchors, noised.mask), proposals

    def _encode(self, batch: Tensor, mask: Tensor) -> "_Tokens":
        """Compute the encoder's tokens of all maps, as transformers' model does before it selects queries."""
        detr = self.detr
        maps = self.backbone(batch, mask)
        maps = [project(each) for project, each in zip(detr.input_proj, [*maps, maps[-1]], strict=True)]
        masks = _cells(mask, self.stride, maps)
        valid = torch.cat([each.flatten(1) for each in masks], dim=1)
        ratios = torch.stack([detr.get_valid_ratio(each, dtype=batch.dtype) for each in masks], dim=1)
        sizes = [(each.shape[2], each.shape[3]) for each in maps]
        shapes = torch.tensor(sizes, device=batch.device)
        starts = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
        layout = {"spatial_shapes": shapes, "spatial_shapes_list": sizes, "level_start_index": starts}
        embed = detr.position_embedding
        embeddings = [
            embed(shape=each.shape, device=each.device, dtype=batch.dtype, mask=of_map) + level[:, None, None]
            for each, of_map, level in zip(maps, masks, detr.level_embed, strict=True)
        ]
        states = detr.encoder(
            inputs_embeds=_flat(maps),
            attention_mask=valid,
            spatial_position_embeddings=_flat(embeddings),
            valid_ratios=ratios,
            **layout,
        ).last_hidden_state
        return _Tokens(widen(states), valid, ratios, layout)

    def _select(self, tokens: "_Tokens") -> dict[str, Tensor]:
        """Compute logits and boxes of the tokens with the highest class scores, one per query."""
        classify, offset = self.detr.decoder.class_embed[-1], self.detr.decoder.bbox_embed[-1]
        with without_autocast(tokens.states):
            features, boxes = self.detr.gen_encoder_output_proposals(
                tokens.states, ~tokens.valid, tokens.layout["spatial_shapes_list"]
            )
            logits = classify(features)
            selected = logits.detach().amax(dim=2).topk(self.queries, dim=1).indices[..., None]
            features, boxes, logits = (torch.take_along_dim(each, selected, 1) for each in (features, boxes, logits))
            return _outputs(logits, offset(features) + boxes)

    def _decode(
        self, tokens: "_Tokens", contents: Tensor, anchors: Tensor, mask: Tensor | None = None
    ) -> list[dict[str, Tensor]]:
        """Compute logits and boxes of every layer from box logits `anchors`; `mask` is True where queries attend."""
        decoder = self.detr.decoder
        ratios = tokens.ratios.repeat(1, 1, 2)[:, None]  # (batch, 1, maps, 4)
        states, reference, previous = contents, anchors, anchors
        layers = []
        for layer, classify, offset in zip(decoder.layers, decoder.class_embed, decoder.bbox_embed, strict=False):
            states = layer(
                states,
                self.place(self.detr.get_proposal_pos_embed(reference)),
                reference.sigmoid()[:, :, None] * ratios,
                encoder_hidden_states=tokens.states,
                encoder_attention_mask=tokens.valid,
                attention_mask=mask,
                **tokens.layout,
            )
            with without_autocast(states):
                delta = offset(widen(states))
                layers.append(_outputs(classify(widen(states)), previous + delta))
            previous = reference + delta  # this layer's box, to which the next layer's loss passes a gradient
            reference = previous.detach()
        return layers


class _Tokens(NamedTuple):
    """Encoder tokens of all maps."""

    states: Tensor  # (batch, tokens, channels)
    valid: Tensor  # (batch, tokens), True in the image, False in padding
    ratios: Tensor  # (batch, maps, 2), the image's share of the batch (x, y)
    layout: dict[str, Any]  # start and size of each map


class _Noised(NamedTuple):
    """Denoising queries, group after group: all objects with less noise, then with more."""

    contents: Tensor  # (batch, noised, channels)
    anchors: Tensor  # (batch, noised, 4), logits
    mask: Tensor  # (1, 1, noised + queries, noised + queries), True where a row attends to a column
    known: list[tuple[Tensor, Tensor]]  # for each image: queries with less noise, and their objects
    groups: int


def training_objects(target: Target) -> dict[str, Tensor]:
    """Return boxes and labels of the objects to train on: no crowds, no boxes without an area."""
    boxes = target["boxes"]
    keep = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    if "crowd" in target:
        keep = keep & ~target["crowd"]
    return {name: target[name][keep] for name in ("boxes", "labels")}


@contextmanager
def fixed_seed(device: torch.device) -> Iterator[None]:
    """Use a fixed random seed, and restore the states of torch's random generators afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def widen(x: Tensor) -> Tensor:
    """Convert a tensor to at least float32."""
    return x.to(wide_dtype(x))


def _model(config: DeformableDetrConfig) -> Any:  # Any: parts of other types are assigned to it
    return DeformableDetrModel(config)


def _placeholder_backbone(backbone: Features) -> ResNetConfig:
    """Configure a backbone with the same maps and channels, which is replaced once transformers has built the model."""
    maps = len(backbone.channels)
    sizes = dict(embedding_size=8, hidden_sizes=list(backbone.channels), depths=[1] * maps, layer_type="basic")
    return ResNetConfig(**sizes, out_indices=list(range(1, maps + 1)))  # type: ignore[arg-type, call-arg]


def _with_prior_bias(classify: nn.Linear, prior: float = 0.01) -> nn.Linear:
    """Initialise the bias so that every class has this probability, as focal loss needs."""
    nn.init.constant_(classify.bias, -math.log((1 - prior) / prior))
    return classify


def _zero_box_head(channels: int) -> nn.Module:
    """Build a box head whose initial output is zero."""
    head: Any = DeformableDetrMLPPredictionHead(channels, channels, output_dim=4, num_layers=3)
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)
    return head


def _outputs(logits: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    """Return class logits and boxes in the format of the losses."""
    return {"logits": widen(logits), "pred_boxes": widen(boxes).sigmoid()}


def _prefixed(prefix: str, losses: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}_{name}": loss for name, loss in losses.items()}


def _cells(mask: Tensor, stride: int, maps: Sequence[Tensor]) -> list[Tensor]:
    """Compute masks of each map's valid cells: those whose coarsest cell, of `stride`, begins inside the image."""
    coarse = mask[:, None, ::stride, ::stride].float()
    return [functional.interpolate(coarse, size=each.shape[2:])[:, 0] > 0 for each in maps]


def _flat(maps: Sequence[Tensor]) -> Tensor:
    """Flatten maps `(batch, channels, height, width)` to tokens `(batch, tokens, channels)`."""
    return torch.cat([each.flatten(2).transpose(1, 2) for each in maps], dim=1)
