"""Deformable DETR and DINO on the maps of this library's backbones, made of transformers' parts."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

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

from torchrope.lab.dense import by_size
from torchrope.lab.dense.detection import MOST, Target, image_size, objects, own_draws, widen
from torchrope.models.features import Features, pad
from torchrope.tensors import without_autocast


class DeformableDETR(nn.Module):
    """Find objects with transformers' Deformable DETR, with two stages and boxes refined by every layer of the decoder.

        maps (+ one of half the size) -> encoder -> the likeliest places -> decoder -> class and box of each

    Queries, losses and their weights (class 1, box 5, overlap 2; 2, 5, 2 where boxes are matched), widths without
    dropout are those of `DINO`, which says how it differs. Each layer has its own heads, and the first stage has a
    loss, as in the code of Zhu et al.; in transformers 5.23's `DeformableDetrForObjectDetection` it has none.

    Boxes are shares of the image rounded up to whole cells of the coarsest map, so that all maps agree where a box is.
    What is found in an image does not depend on what it comes with: `predict` takes those of one size together.

    Args:
        backbone: Gives the maps.
        classes: Names of the classes.
        channels: Of tokens, a multiple of 32 from 64 on.
        queries: Objects that are looked for; an image must have as many places.
        encoder_layers: Layers of the encoder.
        decoder_layers: Layers of the decoder.
        num_heads: Attention heads of both.
        mlp_dim: Channels inside the MLP of a layer.
        score_threshold: Detections that are less sure are left out; 0 leaves the best 100.

    References:
        Zhu et al., Deformable DETR, arXiv:2010.04159, appendix A.4.

    Example:
        >>> from torchrope import ViT
        >>> vit = ViT((32, 32), patch_size=8, dim=32, depth=2, num_heads=2, encoding="mixed")
        >>> backbone = Features(vit, pyramid=True, out_channels=16)
        >>> model = DeformableDETR(backbone, "0123456789", channels=64, queries=20, encoder_layers=1, decoder_layers=2)
        >>> model = model.eval()
        >>> [found] = model.predict([torch.randn(3, 32, 48)])
        >>> len(found["boxes"])
        100
    """

    finds: ClassVar[tuple[str, ...]] = ("boxes",)

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
        score_threshold: float = 0.0,
    ) -> None:
        super().__init__()
        if channels < 64 or channels % 32:  # its norms have 32 groups, which need two values even in a map of one cell
            raise ValueError(f"channels must be 64 or more and divisible by 32, got {channels}")
        self.backbone = backbone
        self.classes = tuple(classes)
        self.queries = queries
        self.score_threshold = score_threshold
        self.stride = int(2 * backbone.strides[-1])
        self.divisor = max(backbone.size_divisor, self.stride)
        config = DeformableDetrConfig(
            backbone_config=_stand_in(backbone),
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
        self.detr.backbone = _Maps(backbone, self.stride)
        # One of each for every layer of the decoder, and the encoder's behind them, where the model looks for them.
        count = decoder_layers + 1
        self.detr.decoder.class_embed = nn.ModuleList(_rare(nn.Linear(channels, len(classes))) for _ in range(count))
        self.detr.decoder.bbox_embed = nn.ModuleList(_still(channels) for _ in range(count))
        self.criterion = _criterion(DeformableDetrHungarianMatcher(class_cost=2, bbox_cost=5, giou_cost=2), classes)

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """The losses of a batch, which are summed: class, box and overlap, of the decoder's layers and of the encoder.

        Args:
            images: `(channels, height, width)` each, of any sizes.
            targets: Of each `boxes` `(n, 4)` xyxy and `labels` `(n,)` from 0; where `crowd` `(n,)` is True, an object
                teaches nothing.
        """
        layers, first = self._run(images)
        theirs = self._shares(images, targets)
        anything = [{**each, "class_labels": torch.zeros_like(each["class_labels"])} for each in theirs]
        return {
            **_losses(self.criterion, layers, theirs),
            **_named("first", _losses(self.criterion, [first], anything)),
        }

    def predict(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """The objects of each image, by falling score: `boxes` `(n, 4)` xyxy, `scores` and `labels` `(n,)`, n ≤ 100.

        Args:
            images: `(channels, height, width)` each, of any sizes.
        """
        return by_size(images, self._found)

    def _found(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        layers, _ = self._run(images)
        last = layers[-1]
        classes = last["logits"].shape[2]
        scores, places = last["logits"].sigmoid().flatten(1).topk(min(MOST, last["logits"][0].numel()))
        boxes = box_convert(last["pred_boxes"], "cxcywh", "xyxy") * self._extents(images).repeat(1, 2)[:, None]
        found = []
        for image, score, place, box in zip(images, scores, places, boxes, strict=True):
            sure = score >= self.score_threshold
            inside = clip_boxes_to_image(box[place // classes], image_size(image))
            found.append({"boxes": inside[sure], "scores": score[sure], "labels": (place % classes)[sure]})
        return found

    def _run(self, images: Sequence[Tensor]) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Logits and boxes of every layer of the decoder, and of the encoder."""
        batch, mask = self._padded(images)
        output = self.detr(batch, pixel_mask=mask)
        before = [output.init_reference_points, *output.intermediate_reference_points.unbind(1)]
        states = output.intermediate_hidden_states.unbind(1)
        heads = zip(states, before, self.detr.decoder.class_embed, self.detr.decoder.bbox_embed, strict=False)
        with without_autocast(batch):  # a logit of a box is a place
            wide = ((widen(state), widen(reference), *head) for state, reference, *head in heads)
            layers = [_outputs(classify(x), move(x) + inverse_sigmoid(at)) for x, at, classify, move in wide]
        return layers, _outputs(output.enc_outputs_class, output.enc_outputs_coord_logits)

    def _padded(self, images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Images as one batch, and where they are in it."""
        batch, mask = pad(images, self.divisor)
        height, width = batch.shape[2:]
        strides = (*self.backbone.strides, self.stride)
        places = sum(math.ceil(height / stride) * math.ceil(width / stride) for stride in strides)
        if self.queries > places:
            rule = f"queries must be at most the cells of all maps, {places} in an image of {height}x{width}"
            raise ValueError(f"{rule}, got {self.queries}")
        return batch, mask

    def _extents(self, images: Sequence[Tensor]) -> Tensor:
        """What boxes are shares of, `(batch, 2)` (x, y)."""
        extents = [[math.ceil(size / self.stride) * self.stride for size in image.shape[:0:-1]] for image in images]
        return images[0].new_tensor(extents)

    def _shares(self, images: Sequence[Tensor], targets: Sequence[Target]) -> list[dict[str, Tensor]]:
        """Objects as transformers has them, boxes as centres and sizes in shares of the image."""
        learned = [objects(target) for target in targets]
        extents = self._extents(images).repeat(1, 2)
        boxes = [box_convert(each["boxes"].to(extents.dtype), "xyxy", "cxcywh") for each in learned]
        return [
            {"boxes": box / extent, "class_labels": each["labels"]}
            for box, extent, each in zip(boxes, extents, learned, strict=True)
        ]


class DINO(DeformableDETR):
    """Find objects with DINO: Deformable DETR with denoising, mixed queries and boxes that look forward twice.

        maps (+ one of half the size) -> encoder -> the likeliest places -> decoder -> class and box of each

    It is made of the layers, heads and losses of transformers' Deformable DETR and the noise of its RT-DETR, and
    differs from `DeformableDETR` as its paper says:

    * contrastive denoising: the decoder is also given objects of the batch with noise on label and box, in groups. It
      learns to restore those with less noise, and to refuse those with more. No group sees another one, and queries
      that are matched see none; prediction has none.
    * mixed query selection: boxes of queries are the encoder's, their contents are learned.
    * look forward twice: where h_i is what the head of layer i gives, ℓ_i = h_i + stop(ℓ_{i-1}), and `stop` passes no
      gradient, the box of the layer is σ(h_i + ℓ_{i-1}), and not σ(ℓ_i): its loss reaches the head of the layer before.
    * the encoder tells classes apart, and is taught at the chosen places alone.
    * where a query is enters each layer anew, from its box there.

    As in detrex, layers share no heads. Its second norm behind each layer of the decoder, which that ends with one, is
    left out, and places of queries are shares of their image where detrex has shares of the padded batch.

    Losses in evaluation have the same noise each time.

    Args:
        backbone: Gives the maps.
        classes: Names of the classes.
        channels: Of tokens, a multiple of 32 from 64 on.
        queries: Objects that are looked for; an image must have as many places.
        denoising_queries: Queries with less noise; as many have more. They are groups, each with all objects of an
            image: denoising_queries // n, at least one, where n is the largest number of objects in an image of the
            batch. 0 is no denoising.
        label_noise: Twice the share of noised objects that get a random label.
        box_noise: How far an edge is moved at most, in halves of the box's extent, where there is less noise; where
            there is more, from that far to twice as far.
        **settings: Of `DeformableDETR`.

    Raises:
        ValueError: denoising_queries below 0, label_noise below 0 or above 2, box_noise not above 0.

    References:
        Zhang et al., DINO: DETR with Improved DeNoising Anchor Boxes for End-to-End Object Detection, arXiv:2203.03605,
        sections 3.3 to 3.5; its numbers are those of IDEA-Research/detrex, projects/dino.

    Example:
        >>> from torchrope import ViT
        >>> vit = ViT((32, 32), patch_size=8, dim=32, depth=2, num_heads=2, encoding="mixed")
        >>> backbone = Features(vit, pyramid=True, out_channels=16)
        >>> model = DINO(backbone, "0123456789", channels=64, queries=20, encoder_layers=1, decoder_layers=2)
        >>> target = {"boxes": torch.tensor([[4.0, 8, 20, 24]]), "labels": torch.tensor([7])}
        >>> losses = model.losses([torch.randn(3, 32, 48)], [target])
        >>> [name for name in losses if name.startswith("denoising")]
        ['denoising_class', 'denoising_box', 'denoising_overlap']
    """

    def __init__(
        self,
        backbone: Features,
        classes: Sequence[str],
        *,
        channels: int = 256,
        queries: int = 900,
        denoising_queries: int = 100,
        label_noise: float = 0.5,
        box_noise: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(backbone, classes, channels=channels, queries=queries, **settings)
        if denoising_queries < 0:
            raise ValueError(f"denoising_queries must be 0 or more, got {denoising_queries}")
        if not 0 <= label_noise <= 2:
            raise ValueError(f"label_noise must be at least 0 and at most 2, got {label_noise}")
        if not box_noise > 0:
            raise ValueError(f"box_noise must be above 0, got {box_noise}")
        self.noise = {
            "num_denoising_queries": denoising_queries,
            "label_noise_ratio": label_noise,
            "box_noise_scale": box_noise,
        }
        del self.detr.pos_trans, self.detr.pos_trans_norm
        self.contents = nn.Embedding(queries, channels)
        self.labels = nn.Embedding(len(classes) + 1, channels, padding_idx=len(classes))
        self.place = DeformableDetrMLPPredictionHead(2 * channels, channels, output_dim=channels, num_layers=2)
        self.denoising_criterion = _criterion(_Known(), classes)

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """The losses of a batch, which are summed: of matched queries, of noised ones, and of the encoder.

        Args:
            images: `(channels, height, width)` each, of any sizes.
            targets: Of each `boxes` `(n, 4)` xyxy and `labels` `(n,)` from 0; where `crowd` `(n,)` is True, an object
                teaches nothing.
        """
        theirs = self._shares(images, targets)
        noised = self._noised(theirs)
        layers, first = self._run(images, noised)
        count = 0 if noised is None else noised.contents.shape[1]
        matched = [{name: each[:, count:] for name, each in layer.items()} for layer in layers]
        restored = [{name: each[:, :count] for name, each in layer.items()} for layer in layers]
        return {
            **_losses(self.criterion, matched, theirs),
            **_named("denoising", self._denoising_losses(restored, noised, theirs)),
            **_named("first", _losses(self.criterion, [first], theirs)),
        }

    def _denoising_losses(
        self, layers: list[dict[str, Tensor]], noised: "_Noised | None", targets: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """What noised queries teach, on average over groups."""
        if noised is None:
            nothing = 0 * self.labels.weight.sum()  # DDP waits for the gradient of every parameter
            return {"class": nothing, "box": nothing, "overlap": nothing}
        losses = _losses(self.denoising_criterion, [{**layer, "known": noised.known} for layer in layers], targets)
        return {name: loss / noised.groups for name, loss in losses.items()}

    def _noised(self, targets: list[dict[str, Tensor]]) -> "_Noised | None":
        """Noised objects as queries, if there are objects."""
        drawn = nullcontext() if self.training else own_draws(self.contents.weight.device)
        with drawn:
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
        """Logits and boxes of every layer of the decoder, noised queries first, and of the encoder at chosen places."""
        tokens = self._encode(*self._padded(images))
        first = self._choose(tokens)
        contents = self.contents.weight.expand(len(images), -1, -1)
        anchors = inverse_sigmoid(first["pred_boxes"].detach())
        if noised is None:
            return self._decode(tokens, contents, anchors), first
        contents = torch.cat([noised.contents, contents], dim=1)
        anchors = torch.cat([noised.anchors, anchors], dim=1)
        return self._decode(tokens, contents, anchors, noised.mask), first

    def _encode(self, batch: Tensor, mask: Tensor) -> "_Tokens":
        """Tokens of all maps, as transformers' model has them before it chooses queries."""
        detr = self.detr
        maps = [each for each, _ in detr.backbone(batch, mask)]
        maps = [project(each) for project, each in zip(detr.input_proj, [*maps, maps[-1]], strict=True)]
        masks = _cells(mask, self.stride, maps)
        inside = torch.cat([each.flatten(1) for each in masks], dim=1)
        ratios = torch.stack([detr.get_valid_ratio(each, dtype=batch.dtype) for each in masks], dim=1)
        sizes = [(each.shape[2], each.shape[3]) for each in maps]
        shapes = torch.tensor(sizes, device=batch.device)
        starts = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
        layout = {"spatial_shapes": shapes, "spatial_shapes_list": sizes, "level_start_index": starts}
        embed = detr.position_embedding
        places = [
            embed(shape=each.shape, device=each.device, dtype=batch.dtype, mask=own) + level[:, None, None]
            for each, own, level in zip(maps, masks, detr.level_embed, strict=True)
        ]
        states = detr.encoder(
            inputs_embeds=_flat(maps),
            attention_mask=inside,
            spatial_position_embeddings=_flat(places),
            valid_ratios=ratios,
            **layout,
        ).last_hidden_state
        return _Tokens(widen(states), inside, ratios, layout)

    def _choose(self, tokens: "_Tokens") -> dict[str, Tensor]:
        """Logits and boxes at the places where a class is the likeliest."""
        classify, move = self.detr.decoder.class_embed[-1], self.detr.decoder.bbox_embed[-1]
        with without_autocast(tokens.states):
            features, places = self.detr.gen_encoder_output_proposals(
                tokens.states, ~tokens.inside, tokens.layout["spatial_shapes_list"]
            )
            logits = classify(features)
            chosen = logits.detach().amax(dim=2).topk(self.queries, dim=1).indices[..., None]
            features, places, logits = (torch.take_along_dim(each, chosen, 1) for each in (features, places, logits))
            return _outputs(logits, move(features) + places)

    def _decode(
        self, tokens: "_Tokens", contents: Tensor, anchors: Tensor, mask: Tensor | None = None
    ) -> list[dict[str, Tensor]]:
        """Logits and boxes of every layer, from logits of boxes; `mask` is True where a query sees another one."""
        decoder = self.detr.decoder
        ratios = tokens.ratios.repeat(1, 1, 2)[:, None]  # (batch, 1, maps, 4)
        states, here, before = contents, anchors, anchors
        layers = []
        for layer, classify, move in zip(decoder.layers, decoder.class_embed, decoder.bbox_embed, strict=False):
            states = layer(
                states,
                self.place(self.detr.get_proposal_pos_embed(here)),
                here.sigmoid()[:, :, None] * ratios,
                encoder_hidden_states=tokens.states,
                encoder_attention_mask=tokens.inside,
                attention_mask=mask,
                **tokens.layout,
            )
            with without_autocast(states):
                moved = move(widen(states))
                layers.append(_outputs(classify(widen(states)), before + moved))
            before = here + moved  # this layer's box, to which the next layer's loss passes a gradient
            here = before.detach()
        return layers


class _Tokens(NamedTuple):
    """Tokens of all maps."""

    states: Tensor  # (batch, tokens, channels)
    inside: Tensor  # (batch, tokens), True in the image, False in padding
    ratios: Tensor  # (batch, maps, 2), the image's share of the batch (x, y)
    layout: dict[str, Any]  # where each map begins, and its size


class _Noised(NamedTuple):
    """Noised objects as queries, group after group: all objects with less noise, then with more."""

    contents: Tensor  # (batch, noised, channels)
    anchors: Tensor  # (batch, noised, 4), logits
    mask: Tensor  # (1, 1, noised + queries, noised + queries), True where a row sees a column
    known: list[tuple[Tensor, Tensor]]  # of each image: queries with less noise, and their objects
    groups: int


class _Known(nn.Module):
    """A matcher where it is known which object a query was made of."""

    def forward(self, outputs: dict[str, Any], _: Any) -> list[tuple[Tensor, Tensor]]:
        return outputs["known"]


class _Maps(nn.Module):
    """A backbone as Deformable DETR calls it: maps with masks of their cells, which count where a coarsest cell does.

    The backbone is another module's part, and not this one's too: weights have one name.
    """

    def __init__(self, backbone: Features, stride: int) -> None:
        super().__init__()
        self.held = (backbone,)
        self.stride = stride

    def forward(self, pixels: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        maps = self.held[0](pixels, mask)
        return list(zip(maps, _cells(mask, self.stride, maps), strict=True))


def _model(config: DeformableDetrConfig) -> Any:
    return DeformableDetrModel(config)


def _stand_in(backbone: Features) -> ResNetConfig:
    """A backbone of as many maps and channels, for transformers to build around before ours takes its place."""
    maps = len(backbone.channels)
    sizes = dict(embedding_size=8, hidden_sizes=list(backbone.channels), depths=[1] * maps, layer_type="basic")
    return ResNetConfig(**sizes, out_indices=list(range(1, maps + 1)))  # type: ignore[arg-type, call-arg]


def _rare(classify: nn.Linear, share: float = 0.01) -> nn.Linear:
    """Start with this probability of every class, as focal loss needs it."""
    nn.init.constant_(classify.bias, -math.log((1 - share) / share))
    return classify


def _still(channels: int) -> nn.Module:
    """A head that starts by moving no box."""
    head: Any = DeformableDetrMLPPredictionHead(channels, channels, output_dim=4, num_layers=3)
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)
    return head


def _outputs(logits: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    """What the losses take."""
    return {"logits": widen(logits), "pred_boxes": widen(boxes).sigmoid()}


def _criterion(matcher: nn.Module, classes: Sequence[str]) -> Any:
    return DeformableDetrImageLoss(matcher, len(classes), focal_alpha=0.25, losses=["labels", "boxes"])


def _losses(criterion: Any, layers: Sequence[dict[str, Any]], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The losses of outputs by kind, weighted and summed over layers."""
    told = [criterion(layer, targets) for layer in layers]
    weights = {"class": ("loss_ce", 1), "box": ("loss_bbox", 5), "overlap": ("loss_giou", 2)}
    return {kind: weight * torch.stack([each[name] for each in told]).sum() for kind, (name, weight) in weights.items()}


def _named(part: str, losses: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}_{name}": loss for name, loss in losses.items()}


def _cells(mask: Tensor, stride: int, maps: Sequence[Tensor]) -> list[Tensor]:
    """Where the cells of each map lie in the image: where the cell of `stride` does that holds them."""
    coarse = mask[:, None, ::stride, ::stride].float()
    return [functional.interpolate(coarse, size=each.shape[2:])[:, 0] > 0 for each in maps]


def _flat(maps: Sequence[Tensor]) -> Tensor:
    """Maps `(batch, channels, height, width)` as tokens `(batch, tokens, channels)`."""
    return torch.cat([each.flatten(2).transpose(1, 2) for each in maps], dim=1)
