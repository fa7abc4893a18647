"""Detectors of torchvision and transformers on the maps of this library's backbones."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import (
    FeaturePyramidNetwork,
    MultiScaleRoIAlign,
    box_convert,
    clip_boxes_to_image,
)
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import LevelMapper
from transformers import DeformableDetrConfig, DeformableDetrModel, ResNetConfig
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss
from transformers.models.deformable_detr.modeling_deformable_detr import (
    DeformableDetrMLPPredictionHead,
    inverse_sigmoid,
)

from torchrope.lab.dense import by_size
from torchrope.models.features import Features, LayerNorm2d, pad
from torchrope.tensors import wide_dtype, without_autocast

Target = Mapping[str, Any]
MOST = 100  # detections of an image, as COCO counts them


class FasterRCNN(nn.Module):
    """Find objects with torchvision's Faster R-CNN, its heads those of ViTDet.

        maps (+ every second cell of the last one) -> regions that may hold objects -> RoIAlign -> class and box

    Maps of one width, as those of a simple feature pyramid, are taken as they are; others, as a Swin's stages, go
    through a feature pyramid network. A region has two convolutions, a box four and a layer, with norms over channels
    in between. Anchors are squares of 8 strides and rectangles of the same area, 1:2 and 2:1.

    Images come normalised and are neither resized nor normalised again. What is found in an image does not depend on
    what it comes with: `predict` takes those of one size together, and pads none to the size of others.

    Args:
        backbone: Gives the maps.
        classes: Names of the classes, without the background, which is torchvision's class 0 inside.
        channels: Of the heads' convolutions, and of the pyramid where it is a network.
        mlp_dim: Channels of the layer before class and box.
        regions: Regions of an image that a step learns from, of about four times as many that are proposed; about twice
            as many are looked at in evaluation.
        score_threshold: Detections that are less sure are left out.

    References:
        Ren et al., Faster R-CNN; Li et al., Exploring Plain Vision Transformer Backbones for Object Detection (ViTDet),
        section 4 and appendix A.2.

    Example:
        >>> from torchrope import ViT
        >>> vit = ViT((32, 32), patch_size=8, dim=32, depth=2, num_heads=2, encoding="mixed")
        >>> backbone = Features(vit, pyramid=True, out_channels=16)
        >>> model = FasterRCNN(backbone, "0123456789", channels=16, mlp_dim=32).eval()
        >>> [found] = model.predict([torch.randn(3, 32, 48)])
        >>> sorted(found)
        ['boxes', 'labels', 'scores']
    """

    finds: ClassVar[tuple[str, ...]] = ("boxes",)

    def __init__(
        self,
        backbone: Features,
        classes: Sequence[str],
        *,
        channels: int = 256,
        mlp_dim: int = 1024,
        regions: int = 512,
        score_threshold: float = 0.05,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes = tuple(classes)
        strides = backbone.strides
        if any(after != 2 * before for before, after in pairwise(strides)):
            raise ValueError(f"each map must have twice the stride of the one before, got {strides}")
        one_width = len(set(backbone.channels)) == 1
        self.neck = nn.Identity() if one_width else FeaturePyramidNetwork(list(backbone.channels), channels)
        self.top = LastLevelMaxPool()
        top = int(2 * strides[-1])
        self.divisor = max(backbone.size_divisor, top)  # powers of two apart: the cells of every map are whole
        width = backbone.channels[0] if one_width else channels
        anchors = [(8 * stride,) for stride in (*strides, top)]
        parts = self._parts(
            width,
            channels,
            strides,
            rpn_anchor_generator=AnchorGenerator(anchors, ((0.5, 1.0, 2.0),) * len(anchors)),
            rpn_head=RPNHead(width, 3, conv_depth=2),
            **{f"rpn_{when}_nms_top_n_train": 2000 * regions // 512 for when in ("pre", "post")},
            **{f"rpn_{when}_nms_top_n_test": 1000 * regions // 512 for when in ("pre", "post")},
            box_roi_pool=_pool(strides, 7),
            box_head=FastRCNNConvFCHead((width, 7, 7), [channels] * 4, [mlp_dim], norm_layer=LayerNorm2d),
            box_predictor=FastRCNNPredictor(mlp_dim, len(classes) + 1),
            box_batch_size_per_image=regions,
            box_score_thresh=score_threshold,
            box_detections_per_img=MOST,
        )
        self.rpn, self.roi_heads = parts.rpn, parts.roi_heads
        for part in (self.rpn.head, self.roi_heads.box_predictor, self.roi_heads.mask_predictor):
            if part is not None:  # torchvision has places in the dtype of what says them: in bfloat16, 4 pixels of 1024
                part.register_forward_hook(_widened)

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """The losses of a batch, which are summed: of regions and of their classes and boxes (and masks).

        Anchors and regions are drawn by torch's generator; in evaluation by one of their own, the same ones each time.

        Args:
            images: `(channels, height, width)` each, of any sizes.
            targets: Of each `boxes` `(n, 4)` xyxy and `labels` `(n,)` from 0; where `crowd` `(n,)` is True, an object
                teaches nothing.
        """
        theirs = [{name: self._as_theirs(name, value) for name, value in objects(target).items()} for target in targets]
        if self.training:
            return self._run(images, theirs)[1]
        with _learning(self.rpn, self.roi_heads), _own_draws(images[0].device):
            return self._run(images, theirs)[1]

    def predict(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """The objects of each image, by falling score: `boxes` `(n, 4)` xyxy, `scores` and `labels` `(n,)`, n ≤ 100.

        Args:
            images: `(channels, height, width)` each, of any sizes.
        """
        return by_size(images, self._found)

    def _found(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        found, _ = self._run(images)
        return [self._as_ours(each, _size(image)) for each, image in zip(found, images, strict=True)]

    def _run(
        self, images: Sequence[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections in evaluation, losses in training, as torchvision names them."""
        batch, mask = pad(images, self.divisor)
        sizes = [_size(image) for image in images]
        named = self.neck(OrderedDict((str(index), each) for index, each in enumerate(self.backbone(batch, mask))))
        levels, names = self.top([_wide(each) for each in named.values()], [], list(named))
        maps = OrderedDict(zip(names, levels, strict=True))
        regions, of_regions = self.rpn(ImageList(batch, sizes), maps, targets)
        found, of_objects = self.roi_heads(maps, regions, sizes, targets)
        return found, {**of_regions, **of_objects}

    def _parts(self, width: int, channels: int, strides: Sequence[float], **settings: Any) -> Any:
        """The model of torchvision whose parts are taken; its own way of resizing and normalising is left behind."""
        return detection.FasterRCNN(_Told(width), **settings)

    def _as_theirs(self, name: str, value: Tensor) -> Tensor:
        return value + 1 if name == "labels" else value

    def _as_ours(self, found: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        return {**found, "labels": found["labels"] - 1}


class MaskRCNN(FasterRCNN):
    """Find objects and their outlines with torchvision's Mask R-CNN; all else is as in `FasterRCNN`.

    `losses` needs `masks` bool `(n, height, width)` of every target, `predict` gives them.

    Args:
        backbone: Gives the maps.
        classes: Names of the classes, without the background.
        channels: Of the heads' convolutions, and of the pyramid where it is a network.
        mlp_dim: Channels of the layer before class and box.
        regions: Regions of an image that a step learns from.
        score_threshold: Detections that are less sure are left out.

    References:
        He et al., Mask R-CNN; ViTDet's heads as in `FasterRCNN`.
    """

    finds = ("boxes", "masks")

    def _parts(self, width: int, channels: int, strides: Sequence[float], **settings: Any) -> Any:
        return detection.MaskRCNN(
            _Told(width),
            mask_roi_pool=_pool(strides, 14),
            mask_head=MaskRCNNHeads(width, [channels] * 4, dilation=1, norm_layer=LayerNorm2d),
            mask_predictor=MaskRCNNPredictor(channels, channels, len(self.classes) + 1),
            **settings,
        )

    def _as_theirs(self, name: str, value: Tensor) -> Tensor:
        return value.to(torch.uint8) if name == "masks" else super()._as_theirs(name, value)

    def _as_ours(self, found: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        """Masks of boxes become masks of the image."""
        masks = paste_masks_in_image(found["masks"], found["boxes"], size)[:, 0] > 0.5
        return {**super()._as_ours(found, size), "masks": masks}


class DeformableDETR(nn.Module):
    """Find objects with transformers' Deformable DETR, with two stages and boxes refined by every layer of the decoder.

        maps (+ one of half the size) -> encoder -> the likeliest places -> decoder -> class and box of each

    It is the nearest relative of the papers' detector, DINO, in a library that is kept up. It differs from DINO so:

    * no contrastive denoising: DINO's decoder also learns to mend boxes to which noise was added, and to refuse those
      with more noise; here nothing but matching teaches it. It needs longer for the same precision.
    * no mixed query selection: DINO takes the boxes of queries from the encoder, and learns their contents; here both
      come from the encoder's boxes.
    * boxes look forward once: DINO's box of a layer learns from the next layer's loss too; here it is constant there.
    * the encoder tells objects from background; DINO's tells classes apart, and is taught at the chosen places alone.

    Queries, losses and their weights (class 1, box 5, overlap 2; 2, 5, 2 where boxes are matched), widths without
    dropout are DINO's. Each layer has its own heads, and the first stage has a loss, as in the code of Zhu et al.; in
    transformers 5.23's `DeformableDetrForObjectDetection` the first stage has none.

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
        Zhu et al., Deformable DETR, arXiv:2010.04159, appendix A.4; Zhang et al., DINO, arXiv:2203.03605, section 3;
        detrex, projects/dino.

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
        matcher = DeformableDetrHungarianMatcher(class_cost=2, bbox_cost=5, giou_cost=2)
        self.criterion = DeformableDetrImageLoss(matcher, len(classes), focal_alpha=0.25, losses=["labels", "boxes"])

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """The losses of a batch, which are summed: class, box and overlap, of the decoder's layers and of the encoder.

        Args:
            images: `(channels, height, width)` each, of any sizes.
            targets: Of each `boxes` `(n, 4)` xyxy and `labels` `(n,)` from 0; where `crowd` `(n,)` is True, an object
                teaches nothing.
        """
        layers, first, extents = self._run(images)
        theirs = [_shares(objects(target), extent) for target, extent in zip(targets, extents, strict=True)]
        told = [self._weighted(layer, theirs) for layer in layers]
        summed = {name: torch.stack([each[name] for each in told]).sum() for name in told[0]}
        anything = [{**each, "class_labels": torch.zeros_like(each["class_labels"])} for each in theirs]
        of_first = self._weighted(first, anything)
        return {**summed, **{f"first_{name}": loss for name, loss in of_first.items()}}

    def predict(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """The objects of each image, by falling score: `boxes` `(n, 4)` xyxy, `scores` and `labels` `(n,)`, n ≤ 100.

        Args:
            images: `(channels, height, width)` each, of any sizes.
        """
        return by_size(images, self._found)

    def _found(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        layers, _, extents = self._run(images)
        last = layers[-1]
        classes = last["logits"].shape[2]
        scores, places = last["logits"].sigmoid().flatten(1).topk(min(MOST, last["logits"][0].numel()))
        boxes = box_convert(last["pred_boxes"], "cxcywh", "xyxy") * extents.repeat(1, 2)[:, None]
        found = []
        for image, score, place, box in zip(images, scores, places, boxes, strict=True):
            sure = score >= self.score_threshold
            inside = clip_boxes_to_image(box[place // classes], _size(image))
            found.append({"boxes": inside[sure], "scores": score[sure], "labels": (place % classes)[sure]})
        return found

    def _run(self, images: Sequence[Tensor]) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], Tensor]:
        """Logits and boxes of every layer and of the encoder, and what their shares are of, `(batch, 2)` (x, y)."""
        batch, mask = pad(images, self.divisor)
        self._check_places(batch)
        output = self.detr(batch, pixel_mask=mask)
        before = [output.init_reference_points, *output.intermediate_reference_points.unbind(1)]
        states = output.intermediate_hidden_states.unbind(1)
        heads = zip(states, before, self.detr.decoder.class_embed, self.detr.decoder.bbox_embed, strict=False)
        with without_autocast(batch):  # a logit of a box is a place
            wide = ((_wide(state), _wide(reference), *head) for state, reference, *head in heads)
            layers = [_outputs(classify(x), move(x) + inverse_sigmoid(at)) for x, at, classify, move in wide]
        extents = [[math.ceil(size / self.stride) * self.stride for size in image.shape[:0:-1]] for image in images]
        first = _outputs(output.enc_outputs_class, output.enc_outputs_coord_logits)
        return layers, first, batch.new_tensor(extents)

    def _weighted(self, outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        losses = self.criterion(outputs, targets)
        return {"class": losses["loss_ce"], "box": 5 * losses["loss_bbox"], "overlap": 2 * losses["loss_giou"]}

    def _check_places(self, batch: Tensor) -> None:
        height, width = batch.shape[2:]
        strides = (*self.backbone.strides, self.stride)
        places = sum(math.ceil(height / stride) * math.ceil(width / stride) for stride in strides)
        queries = self.detr.config.two_stage_num_proposals
        if queries > places:
            rule = f"queries must be at most the cells of all maps, {places} in an image of {height}x{width}"
            raise ValueError(f"{rule}, got {queries}")


class _Maps(nn.Module):
    """A backbone as Deformable DETR calls it: maps with masks of their cells, which count where a coarsest cell does.

    The backbone is another module's part, and not this one's too: weights have one name.
    """

    def __init__(self, backbone: Features, stride: int) -> None:
        super().__init__()
        self.held = (backbone,)
        self.stride = stride

    def forward(self, pixels: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        coarse = mask[:, None, :: self.stride, :: self.stride].float()
        maps = self.held[0](pixels, mask)
        return [(each, functional.interpolate(coarse, size=each.shape[2:])[:, 0] > 0) for each in maps]


class _Told(nn.Module):
    """All that torchvision asks of a backbone when it builds a model."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = channels


def objects(target: Target) -> dict[str, Tensor]:
    """Boxes, labels and masks of what a detector learns: no crowd, no box without an area."""
    boxes = target["boxes"]
    keep = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    if "crowd" in target:
        keep = keep & ~target["crowd"]
    return {name: target[name][keep] for name in ("boxes", "labels", "masks") if name in target}


def _size(image: Tensor) -> tuple[int, int]:
    return image.shape[1], image.shape[2]


def _pool(strides: Sequence[float], size: int) -> MultiScaleRoIAlign:
    """RoIAlign that is told the scales of the maps; left alone, it infers them from the first batch that it sees."""
    pool = MultiScaleRoIAlign([str(index) for index in range(len(strides))], size, sampling_ratio=2)
    pool.scales = [1 / stride for stride in strides]
    pool.map_levels = LevelMapper(0, len(strides) - 1, canonical_scale=14 * strides[0], canonical_level=0)
    return pool


@contextmanager
def _learning(*parts: nn.Module) -> Iterator[None]:
    """Have parts without dropout or statistics compute losses."""
    for part in parts:
        part.train()
    try:
        yield
    finally:
        for part in parts:
            part.eval()


@contextmanager
def _own_draws(device: torch.device) -> Iterator[None]:
    """Draw the same numbers each time, and leave the generators of others as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


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
    return {"logits": _wide(logits), "pred_boxes": _wide(boxes).sigmoid()}


def _widened(_: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A hook: what a module returns, one tensor or nested ones, in float32 at least."""
    if isinstance(outputs, Tensor):
        return _wide(outputs)
    return type(outputs)(_widened(_, inputs, each) for each in outputs)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))


def _shares(target: dict[str, Tensor], extent: Tensor) -> dict[str, Tensor]:
    """Objects as transformers has them, boxes as centres and sizes in shares of the image."""
    boxes = box_convert(target["boxes"].to(extent.dtype), "xyxy", "cxcywh") / extent.repeat(2)
    return {"boxes": boxes, "class_labels": target["labels"]}
