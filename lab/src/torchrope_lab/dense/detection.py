"""Object detection with torchvision's Faster R-CNN and Mask R-CNN on torchrope backbones, and helpers of detectors."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
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

from torchrope.models import Features, LayerNorm2d, pad
from torchrope.tensors import wide_dtype
from torchrope_lab.dense import DenseModel, Target

MAX_DETECTIONS = 100  # per image, as in COCO's evaluation


class FasterRCNN(DenseModel):
    """Detect objects with torchvision's Faster R-CNN and the heads of ViTDet.

        maps (+ the last one subsampled by 2) -> region proposals -> RoIAlign -> class and box

    Feature maps of equal width, such as those of a simple feature pyramid, are used unchanged; others, such as the
    stages of a Swin, go through a feature pyramid network. The region proposal head has two convolutions, the box head
    four and a linear layer, with layer norms over channels in between. Anchors are squares with sides of 8 strides, and
    rectangles of the same area, 1:2 and 2:1.

    Args:
        backbone: Computes the feature maps.
        classes: Names of the classes, without the background, which is class 0 inside torchvision.
        channels: Channels of the heads' convolutions, and of the feature pyramid network if there is one.
        mlp_dim: Channels of the layer before class and box.
        regions: Regions per image that contribute to the loss, out of about four times as many proposals; in evaluation
            there are about twice as many proposals.
        score_threshold: Smallest score of a detection.

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

    outputs: ClassVar[tuple[str, ...]] = ("boxes",)

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
        super().__init__(backbone, classes)
        strides = backbone.strides
        if any(after != 2 * before for before, after in pairwise(strides)):
            raise ValueError(f"each map must have twice the stride of the one before, got {strides}")
        one_width = len(set(backbone.channels)) == 1
        self.neck = nn.Identity() if one_width else FeaturePyramidNetwork(list(backbone.channels), channels)
        self.top = LastLevelMaxPool()
        top = int(2 * strides[-1])
        self.divisor = max(backbone.size_divisor, top)  # strides differ by powers of two: every map has whole cells
        width = backbone.channels[0] if one_width else channels
        anchors = [(8 * stride,) for stride in (*strides, top)]
        model = self._build(
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
            box_detections_per_img=MAX_DETECTIONS,
        )
        self.rpn, self.roi_heads = model.rpn, model.roi_heads
        for module in (self.rpn.head, self.roi_heads.box_predictor, self.roi_heads.mask_predictor):
            if module is not None:  # boxes have the dtype of the head's output; bfloat16 resolves 4 pixels at 1024
                module.register_forward_hook(_widen_outputs)

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """Compute the losses of region proposals, and of classes and boxes (and masks).

        Anchors and regions are sampled with torch's random generator; in evaluation mode with a fixed seed.
        """
        converted = [
            {name: self._to_torchvision(name, value) for name, value in training_objects(target).items()}
            for target in targets
        ]
        if self.training:
            return self._run(images, converted)[1]
        with _training_mode(self.rpn, self.roi_heads), fixed_seed(images[0].device):
            return self._run(images, converted)[1]

    def predict_same_size(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        detections, _ = self._run(images)
        return [
            self._from_torchvision(of_image, image_size(image))
            for of_image, image in zip(detections, images, strict=True)
        ]

    def _run(
        self, images: Sequence[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Compute detections in evaluation, losses in training, with torchvision's names."""
        batch, mask = pad(images, self.divisor)
        sizes = [image_size(image) for image in images]
        named = self.neck(OrderedDict((str(index), each) for index, each in enumerate(self.backbone(batch, mask))))
        levels, names = self.top([widen(each) for each in named.values()], [], list(named))
        maps = OrderedDict(zip(names, levels, strict=True))
        regions, region_losses = self.rpn(ImageList(batch, sizes), maps, targets)
        detections, object_losses = self.roi_heads(maps, regions, sizes, targets)
        return detections, {**region_losses, **object_losses}

    def _build(self, width: int, channels: int, strides: Sequence[float], **settings: Any) -> Any:
        """Build torchvision's model, of which only `rpn` and `roi_heads` are used: no resizing, no normalisation."""
        return detection.FasterRCNN(_BackboneWidth(width), **settings)

    def _to_torchvision(self, name: str, value: Tensor) -> Tensor:
        return value + 1 if name == "labels" else value

    def _from_torchvision(self, detections: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        return {**detections, "labels": detections["labels"] - 1}


class MaskRCNN(FasterRCNN):
    """Detect objects and their masks with torchvision's Mask R-CNN; everything else is as in `FasterRCNN`.

    `losses` needs `masks` bool `(n, height, width)` in every target, and `predict` returns them.

    References:
        He et al., Mask R-CNN; ViTDet's heads as in `FasterRCNN`.
    """

    outputs = ("boxes", "masks")

    def _build(self, width: int, channels: int, strides: Sequence[float], **settings: Any) -> Any:
        return detection.MaskRCNN(
            _BackboneWidth(width),
            mask_roi_pool=_pool(strides, 14),
            mask_head=MaskRCNNHeads(width, [channels] * 4, dilation=1, norm_layer=LayerNorm2d),
            mask_predictor=MaskRCNNPredictor(channels, channels, len(self.classes) + 1),
            **settings,
        )

    def _to_torchvision(self, name: str, value: Tensor) -> Tensor:
        return value.to(torch.uint8) if name == "masks" else super()._to_torchvision(name, value)

    def _from_torchvision(self, detections: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        """Paste the masks of boxes into masks of the image."""
        masks = paste_masks_in_image(detections["masks"], detections["boxes"], size)[:, 0] > 0.5
        return {**super()._from_torchvision(detections, size), "masks": masks}


class _BackboneWidth(nn.Module):
    """Placeholder with the one attribute of a backbone that torchvision reads when it builds a model."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = channels


def training_objects(target: Target) -> dict[str, Tensor]:
    """Return boxes, labels and masks of the objects to train on: no crowds, no boxes without an area."""
    boxes = target["boxes"]
    keep = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    if "crowd" in target:
        keep = keep & ~target["crowd"]
    return {name: target[name][keep] for name in ("boxes", "labels", "masks") if name in target}


def image_size(image: Tensor) -> tuple[int, int]:
    """Return height and width of an image `(channels, height, width)`."""
    return image.shape[1], image.shape[2]


def _pool(strides: Sequence[float], size: int) -> MultiScaleRoIAlign:
    """Build RoIAlign with the scales of the maps, which it would otherwise infer from its first batch."""
    pool = MultiScaleRoIAlign([str(index) for index in range(len(strides))], size, sampling_ratio=2)
    pool.scales = [1 / stride for stride in strides]
    pool.map_levels = LevelMapper(0, len(strides) - 1, canonical_scale=14 * strides[0], canonical_level=0)
    return pool


@contextmanager
def _training_mode(*modules: nn.Module) -> Iterator[None]:
    """Set modules without dropout or running statistics to training mode, in which they compute losses."""
    for module in modules:
        module.train()
    try:
        yield
    finally:
        for module in modules:
            module.eval()


@contextmanager
def fixed_seed(device: torch.device) -> Iterator[None]:
    """Use a fixed random seed, and restore the states of torch's random generators afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _widen_outputs(_: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Forward hook that converts a module's outputs, one tensor or nested ones, to at least float32."""
    if isinstance(outputs, Tensor):
        return widen(outputs)
    return type(outputs)(_widen_outputs(_, inputs, each) for each in outputs)


def widen(x: Tensor) -> Tensor:
    """Convert a tensor to at least float32."""
    return x.to(wide_dtype(x))
