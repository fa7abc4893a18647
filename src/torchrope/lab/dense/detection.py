"""Faster R-CNN and Mask R-CNN of torchvision on the maps of this library's backbones, and what detectors share."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import LevelMapper

from torchrope.lab.dense import by_size
from torchrope.models.features import Features, LayerNorm2d, pad
from torchrope.tensors import wide_dtype

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
        with _learning(self.rpn, self.roi_heads), own_draws(images[0].device):
            return self._run(images, theirs)[1]

    def predict(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """The objects of each image, by falling score: `boxes` `(n, 4)` xyxy, `scores` and `labels` `(n,)`, n ≤ 100.

        Args:
            images: `(channels, height, width)` each, of any sizes.
        """
        return by_size(images, self._found)

    def _found(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        found, _ = self._run(images)
        return [self._as_ours(each, image_size(image)) for each, image in zip(found, images, strict=True)]

    def _run(
        self, images: Sequence[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections in evaluation, losses in training, as torchvision names them."""
        batch, mask = pad(images, self.divisor)
        sizes = [image_size(image) for image in images]
        named = self.neck(OrderedDict((str(index), each) for index, each in enumerate(self.backbone(batch, mask))))
        levels, names = self.top([widen(each) for each in named.values()], [], list(named))
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


def image_size(image: Tensor) -> tuple[int, int]:
    """Height and width."""
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
def own_draws(device: torch.device) -> Iterator[None]:
    """Draw the same numbers each time, and leave the generators of others as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _widened(_: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A hook: what a module returns, one tensor or nested ones, in float32 at least."""
    if isinstance(outputs, Tensor):
        return widen(outputs)
    return type(outputs)(_widened(_, inputs, each) for each in outputs)


def widen(x: Tensor) -> Tensor:
    """A tensor in float32 at least."""
    return x.to(wide_dtype(x))
