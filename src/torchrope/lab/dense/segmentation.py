"""Semantic segmentation on any backbone: UperNet and Mask2Former, made of transformers' parts.

A batch is two lists, images `(channels, height, width)` of any sizes and targets with `"map"`, the class of every pixel
`(height, width)`, 255 where there is none.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Mask2FormerConfig, UperNetConfig
from transformers.models.mask2former.modeling_mask2former import (
    Mask2FormerLoss,
    Mask2FormerPixelDecoder,
    Mask2FormerPreTrainedModel,
    Mask2FormerTransformerModule,
)
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from torchrope.lab.dense import IGNORED, by_size
from torchrope.models.features import Features, pad
from torchrope.tensors import wide_dtype, without_autocast

Target = dict[str, Any]


class SemanticModel(nn.Module, ABC):
    """What both models share: a backbone, names of classes, prediction image by image.

    Args:
        backbone: Gives the maps. Four of one stride, as layers of a plain ViT give them, go through `Rescale`.
        classes: Names of the classes, in the order of a map's numbers.
    """

    def __init__(self, backbone: Features, classes: Sequence[str]) -> None:
        super().__init__()
        if len(classes) < 2:
            raise ValueError(f"classes must be 2 or more, got {len(classes)}")
        self.backbone = backbone
        self.classes = tuple(classes)
        plain = len(backbone.strides) == 4 and len(set(backbone.strides)) == 1
        self.neck = Rescale(backbone.channels) if plain else nn.Identity()
        self.strides = tuple(Rescale.strides(backbone.strides)) if plain else tuple(map(float, backbone.strides))

    def maps(self, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The maps that the head reads, of images `(batch, channels, height, width)`; `mask` is True inside of them."""
        return self.neck(self.backbone(images, mask))

    @abstractmethod
    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits `(batch, classes, height, width)` of images of one size."""

    @abstractmethod
    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """The parts of the loss, to be summed."""

    def predict(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """`{"logits": (classes, height, width)}` of every image, in its own pixels.

        Images of one size go through the model together; none is padded to another's size, so that what is said of an
        image depends on no other.
        """
        return by_size(images, lambda alike: [{"logits": each} for each in self(torch.stack(alike))])


class UperNet(SemanticModel):
    """Segment by a pyramid of maps with pooling at four scales on top (transformers' `UperNetHead`).

    On a plain ViT give it four layers' maps, as in BEiT v2's recipe, which the RoPE-ViT paper's table 3 follows:
    `Features(vit, indices=layers_of_plain_vit(12))`; learned deconvolutions make a pyramid of them
    (`Rescale`). The simple feature pyramid (`pyramid=True`) and a Swin's stages are read as they are.

    Args:
        backbone: Gives three maps or more, from fine to coarse.
        classes: Names of the classes.
        channels: Channels inside the head; BEiT v2 has the backbone's width, mmsegmentation 512.
        auxiliary_channels: Channels of the head that reads the third map for a second loss in training.
        auxiliary_weight: Weight of that loss.
        pool_scales: Cells along each axis that the last map is averaged into.

    Raises:
        ValueError: fewer maps, fewer than 2 classes.

    References:
        Xiao et al., Unified Perceptual Parsing for Scene Understanding, section 3. Peng et al., BEiT v2, supplement.

    Example:
        >>> from torchrope import ViT
        >>> vit = ViT((32, 32), patch_size=8, dim=32, depth=4, num_heads=2, encoding="liere:8")
        >>> model = UperNet(Features(vit, indices=(1, 2, 3, 4)), ["sky", "sea"], channels=16).eval()
        >>> [tuple(found["logits"].shape) for found in model.predict([torch.randn(3, 32, 40), torch.randn(3, 30, 50)])]
        [(2, 32, 40), (2, 30, 50)]
    """

    def __init__(
        self,
        backbone: Features,
        classes: Sequence[str],
        *,
        channels: int = 512,
        auxiliary_channels: int = 256,
        auxiliary_weight: float = 0.4,
        pool_scales: Sequence[int] = (1, 2, 3, 6),
    ) -> None:
        super().__init__(backbone, classes)
        if len(backbone.channels) < 3:
            raise ValueError(f"UperNet reads three maps or more, got strides {backbone.strides}")
        config = UperNetConfig(
            id2label=dict(enumerate(classes)),
            hidden_size=channels,
            auxiliary_channels=auxiliary_channels,
            pool_scales=tuple(pool_scales),
        )
        self.auxiliary_weight = auxiliary_weight
        self.head = UperNetHead(config, in_channels=backbone.channels)
        self.auxiliary_head = UperNetFCNHead(config, in_channels=backbone.channels)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        return enlarge(self.head(self.maps(images, mask)), self.strides[0], images.shape[-2:])

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """Cross-entropy of the head, and of the auxiliary head by its weight, over pixels that have a class.

        An image alone, as the last batch of an epoch may be, is normed as in evaluation: the mean of one value is the
        value.
        """
        batch, mask = pad(images, self.backbone.size_divisor)
        truth = _padded_maps(targets, batch.shape[-2:])
        with _evaluated_norms(self) if len(images) == 1 else nullcontext():
            maps = self.maps(batch, mask)
            logits, coarse = self.head(maps), self.auxiliary_head(maps)
        auxiliary = _cross_entropy(coarse, self.strides[self.auxiliary_head.in_index], truth)
        return {
            "cross_entropy": _cross_entropy(logits, self.strides[0], truth),
            "auxiliary": self.auxiliary_weight * auxiliary,
        }


class Mask2Former(SemanticModel):
    """Segment by queries that each name a class and draw a mask (transformers' Mask2Former).

    The softmax of its logits is the share of each class in  Σ over queries  p(class | query) · p(pixel in mask).

    Args:
        backbone: Gives four maps, each of half the resolution of the one before, or of one stride.
        classes: Names of the classes.
        channels: Channels of pixel decoder, queries and masks, a multiple of 32.
        queries: Masks that are proposed.
        encoder_layers: Layers of the pixel decoder, of deformable attention.
        decoder_layers: Layers that the queries go through.
        num_heads: Attention heads of both.
        encoder_mlp_dim: Channels inside the MLP of the pixel decoder's layers.
        mlp_dim: Channels inside the MLP of the queries' layers.
        points: Points of a mask that a loss looks at.

    Raises:
        ValueError: other maps, channels that norm and heads do not divide, fewer than 2 classes.

    References:
        Cheng et al., Masked-attention Mask Transformer for Universal Image Segmentation, section 3; losses, their
        weights (2, 5, 5) and points as in section 4.1.

    Example:
        >>> from torchrope import Swin
        >>> swin = Swin((64, 64), dim=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), window_size=4, encoding="mixed")
        >>> small = dict(channels=32, queries=5, encoder_layers=1, decoder_layers=1, num_heads=2)
        >>> model = Mask2Former(Features(swin), ["sky", "sea"], **small).eval()
        >>> model.predict([torch.randn(3, 50, 64)])[0]["logits"].shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        backbone: Features,
        classes: Sequence[str],
        *,
        channels: int = 256,
        queries: int = 100,
        encoder_layers: int = 6,
        decoder_layers: int = 9,
        num_heads: int = 8,
        encoder_mlp_dim: int = 1024,
        mlp_dim: int = 2048,
        points: int = 12544,
    ) -> None:
        super().__init__(backbone, classes)
        if len(self.strides) != 4 or any(b != 2 * a for a, b in zip(self.strides, self.strides[1:], strict=False)):
            rule = "Mask2Former reads four maps, each of half the resolution of the one before or all of one stride"
            raise ValueError(f"{rule}, got strides {backbone.strides}")
        if channels % 32 or channels % num_heads:
            raise ValueError(f"channels must be divisible by 32 and num_heads = {num_heads}, got {channels}")
        config = Mask2FormerConfig(
            id2label=dict(enumerate(classes)),
            feature_size=channels,
            mask_feature_size=channels,
            hidden_dim=channels,
            encoder_feedforward_dim=encoder_mlp_dim,
            dim_feedforward=mlp_dim,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers + 1,  # transformers counts the masks of the queries as they begin, too
            num_attention_heads=num_heads,
            num_queries=queries,
            train_num_points=points,
        )
        self.head = _Mask2FormerHead(config, backbone.channels, len(classes))

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        classes, masks = self.head(self.maps(images, mask))
        there = enlarge(masks[-1], self.strides[0], images.shape[-2:]).sigmoid()
        with without_autocast(images):
            shares = torch.einsum("bqc,bqhw->bchw", classes[-1].softmax(-1)[..., :-1], there)
        return shares.clamp_min(torch.finfo(shares.dtype).tiny).log()

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """Cross-entropy of the queries' classes, cross-entropy and Dice of their masks, of all layers together.

        Every image is looked at in its own frame, whatever the batch was padded to. As in Mask2Former's training,
        pixels without a class count as outside of every mask.
        """
        batch, mask = pad(images, self.backbone.size_divisor)
        classes, masks = self.head(self.maps(batch, mask))
        sizes = [tuple(image.shape[-2:]) for image in images]
        framed = _in_own_frames(masks, sizes, self.strides[0])
        maps = _of_one_size([target["map"] for target in targets])
        present = [_present(target["map"]) for target in targets]
        drawn = [(map == own[:, None, None]).float() for map, own in zip(maps, present, strict=True)]
        return self.head.losses(classes, framed, present, drawn)


class Rescale(nn.Module):
    """Make a pyramid of four maps of one stride: 4x and 2x by deconvolutions, 1x, and 1/2 by the maximum, as BEiT does.

    Args:
        channels: Channels of each of the four maps.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        first, second, *_ = channels
        self.levels = nn.ModuleList(
            [
                nn.Sequential(
                    nn.ConvTranspose2d(first, first, kernel_size=2, stride=2),
                    nn.BatchNorm2d(first),
                    nn.GELU(),
                    nn.ConvTranspose2d(first, first, kernel_size=2, stride=2),
                ),
                nn.ConvTranspose2d(second, second, kernel_size=2, stride=2),
                nn.Identity(),
                nn.MaxPool2d(kernel_size=2, stride=2, ceil_mode=True),
            ]
        )

    @staticmethod
    def strides(strides: Sequence[float]) -> list[float]:
        """The strides that maps of these strides have afterwards."""
        return [stride * factor for stride, factor in zip(strides, (0.25, 0.5, 1.0, 2.0), strict=True)]

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Four maps `(batch, channels, height, width)` to four of different sizes, from fine to coarse."""
        return [level(map) for level, map in zip(self.levels, maps, strict=True)]


def layers_of_plain_vit(depth: int) -> tuple[int, int, int, int]:
    """The layers whose maps UperNet reads, a third, half, two thirds and all of the way up, as BEiT's.

    >>> layers_of_plain_vit(12), layers_of_plain_vit(24)
    ((4, 6, 8, 12), (8, 12, 16, 24))
    """
    return (round(depth / 3), round(depth / 2), round(2 * depth / 3), depth)


def enlarge(logits: Tensor, stride: float, size: Sequence[int]) -> Tensor:
    """Bring a map of a stride to the pixels of its image, bilinearly; cells beyond the image's edge are cut off.

    Args:
        logits: `(batch, channels, ceil(height / stride), ceil(width / stride))`.
        stride: Pixels between cells.
        size: Height and width of the image.
    """
    whole = [round(cells * stride) for cells in logits.shape[-2:]]
    wide = logits.to(wide_dtype(logits))
    return functional.interpolate(wide, whole, mode="bilinear")[..., : size[0], : size[1]]


class _Mask2FormerHead(Mask2FormerPreTrainedModel):
    """Mask2Former from the maps on, its weights drawn as transformers draws them."""

    def __init__(self, config: Mask2FormerConfig, channels: Sequence[int], num_classes: int) -> None:
        super().__init__(config)
        self.pixel_decoder = Mask2FormerPixelDecoder(config, feature_channels=channels)
        self.transformer = Mask2FormerTransformerModule(in_features=config.feature_size, config=config)
        self.classifier = nn.Linear(config.hidden_dim, num_classes + 1)
        weights = {"cross_entropy": config.class_weight, "mask": config.mask_weight, "dice": config.dice_weight}
        self.criterion = Mask2FormerLoss(config, weights)
        self.post_init()

    def forward(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Classes `(batch, queries, classes + 1)` and masks `(batch, queries, height, width)` after every layer."""
        with without_autocast(maps[0]):  # offsets of deformable attention
            decoded = self.pixel_decoder([map.to(wide_dtype(map)) for map in maps])
        found = self.transformer(decoded.multi_scale_features, decoded.mask_features, output_hidden_states=True)
        classes = [self.classifier(queries.transpose(0, 1)) for queries in found.intermediate_hidden_states]
        wide = wide_dtype(*classes)
        return [each.to(wide) for each in classes], [each.to(wide) for each in found.masks_queries_logits]

    def losses(
        self, classes: list[Tensor], masks: list[Tensor], present: list[Tensor], drawn: list[Tensor]
    ) -> dict[str, Tensor]:
        """The losses by kind, weighted and summed over layers.

        Args:
            classes: What `forward` gives.
            masks: Likewise.
            present: Classes of each image `(n,)`.
            drawn: Their masks `(n, height, width)`.
        """
        earlier = [
            {"masks_queries_logits": of_masks, "class_queries_logits": of_classes}
            for of_masks, of_classes in zip(masks[:-1], classes[:-1], strict=True)
        ]
        with without_autocast(masks[-1]):
            found = self.criterion(masks[-1], classes[-1], drawn, present, earlier)
        weights: dict[str, float] = self.criterion.weight_dict
        return {
            kind: weight * torch.stack([loss for name, loss in found.items() if name.startswith(f"loss_{kind}")]).sum()
            for kind, weight in weights.items()
        }


@contextmanager
def _evaluated_norms(model: nn.Module) -> Iterator[None]:
    """Batch norms by their running statistics; those that processes share see more than one batch."""
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d) and part.training]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def _cross_entropy(logits: Tensor, stride: float, truth: Tensor) -> Tensor:
    """The mean over pixels that have a class; 0 where none has."""
    logits = enlarge(logits, stride, truth.shape[-2:])
    total = functional.cross_entropy(logits, truth, ignore_index=IGNORED, reduction="sum")
    return total / (truth != IGNORED).sum().clamp_min(1)


def _padded_maps(targets: Sequence[Target], size: Sequence[int]) -> Tensor:
    maps = [target["map"] for target in targets]
    rest = [(0, size[1] - map.shape[1], 0, size[0] - map.shape[0]) for map in maps]
    return torch.stack([functional.pad(map, own, value=IGNORED) for map, own in zip(maps, rest, strict=True)])


def _present(map: Tensor) -> Tensor:
    """The classes of a map `(n,)`."""
    found = map.unique()
    return found[found != IGNORED]


def _of_one_size(maps: list[Tensor]) -> list[Tensor]:
    """Maps `(height, width)` drawn to the largest height and width of all."""
    largest = [max(map.shape[axis] for map in maps) for axis in (0, 1)]
    drawn = [functional.interpolate(map[None, None].float(), largest, mode="nearest-exact") for map in maps]
    return [each[0, 0].long() for each in drawn]


def _in_own_frames(masks: list[Tensor], sizes: Sequence[Sequence[int]], stride: float) -> list[Tensor]:
    """Maps of padded images drawn as if each image filled the map, `(batch, channels, height, width)` as before."""
    shares = [[own / (cells * stride) for own, cells in zip(size, masks[0].shape[-2:], strict=True)] for size in sizes]
    if all(share == 1 for of_image in shares for share in of_image):
        return masks
    theta = masks[0].new_zeros(len(sizes), 2, 3)
    for row, (high, wide) in zip(theta, shares, strict=True):
        row[0, 0], row[0, 2], row[1, 1], row[1, 2] = wide, wide - 1, high, high - 1  # corner stays at -1
    grid = functional.affine_grid(theta, [len(sizes), 1, *masks[0].shape[-2:]], align_corners=False)
    return [functional.grid_sample(each, grid, padding_mode="border", align_corners=False) for each in masks]
