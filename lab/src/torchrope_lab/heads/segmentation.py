"""Semantic segmentation with UperNet and Mask2Former on torchrope's backbones, built from transformers' modules."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
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

from torchrope.models import Features, pad
from torchrope.tensors import wide_dtype, without_autocast
from torchrope_lab.heads import IGNORED, DenseModel, Target, per_device
from torchrope_lab.mistakes import Mistake

AUXILIARY_WEIGHT = 0.4
"""Weight of the loss of UperNet's auxiliary head."""


class SemanticModel(DenseModel):
    """Base class of UperNet and Mask2Former."""

    # Four maps of one stride, as of layers of a plain ViT, go through `Rescale`. Classes are in the order of label
    # maps.

    def __init__(self, backbone: Features, classes: Sequence[str]) -> None:
        super().__init__(backbone, classes)
        if len(classes) < 2:
            raise Mistake(f"classes must be 2 or more, got {len(classes)}")
        plain = len(backbone.strides) == 4 and len(set(backbone.strides)) == 1
        self.neck = Rescale(backbone.channels) if plain else nn.Identity()
        self.strides = tuple(Rescale.strides(backbone.strides)) if plain else tuple(map(float, backbone.strides))

    def maps(self, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Compute the head's input maps of images `(batch, channels, height, width)`; `mask` is False in padding."""
        return self.neck(self.backbone(images, mask))

    @abstractmethod
    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute logits `(batch, classes, height, width)` of images of one size."""

    def predict_same_size(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        return [{"logits": each} for each in self(torch.stack(list(images)))]


class UperNet(SemanticModel):
    """Segment with a feature pyramid and pooling at four scales of the last map (transformers' `UperNetHead`).

    For a plain ViT, use the maps of four layers, as in BEiT v2's recipe, which RoPE-ViT (table 3) follows:
    `Features(vit, indices=layers_of_plain_vit(12))`; learned deconvolutions convert them to a pyramid (`Rescale`). The
    simple feature pyramid (`pyramid=True`) and the stages of a Swin are used unchanged.

    Args:
        backbone: Computes three maps or more, from fine to coarse.
        classes: Names of the classes.
        channels: Channels of the head; BEiT v2 has the backbone's width, mmsegmentation 512.
        auxiliary_channels: Channels of the auxiliary head on the third map, for a second loss in training.
        dropout: Probability of dropping a channel before the classifier of either head; mmsegmentation has 0.1.

    Raises:
        ValueError: fewer than 3 maps, or fewer than 2 classes.

    References:
        Xiao et al., Unified Perceptual Parsing for Scene Understanding, section 3. Peng et al., BEiT v2, supplement.

    Example:
        >>> from torchrope import ViT
        >>> vit = ViT((32, 32), patch_size=8, dim=32, depth=4, num_heads=2, encoding="liere:8")
        >>> model = UperNet(Features(vit, indices=(1, 2, 3, 4)), ["sky", "sea"], channels=16).eval()
        >>> [tuple(each["logits"].shape) for each in model.predict([torch.randn(3, 32, 40), torch.randn(3, 30, 50)])]
        [(2, 32, 40), (2, 30, 50)]
    """

    def __init__(
        self,
        backbone: Features,
        classes: Sequence[str],
        *,
        channels: int = 512,
        auxiliary_channels: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(backbone, classes)
        if len(backbone.channels) < 3:
            raise Mistake(f"UperNet needs three maps or more, got strides {backbone.strides}")
        names = dict(enumerate(classes))
        config = UperNetConfig(id2label=names, hidden_size=channels, auxiliary_channels=auxiliary_channels)
        self.head = UperNetHead(config, in_channels=backbone.channels)
        self.auxiliary_head = UperNetFCNHead(config, in_channels=backbone.channels)
        if dropout:
            for head in (self.head, self.auxiliary_head):  # a hook keeps the names of transformers' weights
                head.classifier.register_forward_pre_hook(partial(_drop_channels, dropout))

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        return enlarge(self.head(self.maps(images, mask)), self.strides[0], images.shape[-2:])

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """Compute the cross-entropy of the head, and that of the auxiliary head times its weight."""
        # Both are means over the labelled pixels of the batches of all devices. For a batch of one image, such as the
        # last of an epoch, batch norms use their running statistics: the statistics of one image pooled to one cell
        # would be those of a single value.
        batch, mask = pad(images, self.backbone.size_divisor)
        truth = _padded_maps(targets, batch.shape[-2:])
        with _running_statistics(self) if len(images) == 1 else nullcontext():
            maps = self.maps(batch, mask)
            logits, coarse = self.head(maps), self.auxiliary_head(maps)
        pixels = per_device((truth != IGNORED).sum(), self.training)
        auxiliary = _cross_entropy(coarse, self.strides[self.auxiliary_head.in_index], truth) / pixels
        return {
            "cross_entropy": _cross_entropy(logits, self.strides[0], truth) / pixels,
            "auxiliary": AUXILIARY_WEIGHT * auxiliary,
        }


class Mask2Former(SemanticModel):
    """Segment with queries that each predict a class and a mask (transformers' Mask2Former).

    The softmax of its logits is the share of each class in  Σ over queries  p(class | query) · p(pixel in mask).

    Args:
        backbone: Computes four maps, each of half the resolution of the one before, or all of one stride.
        classes: Names of the classes.
        channels: Channels of pixel decoder, queries and masks, a multiple of 32.
        queries: Number of queries.
        encoder_layers: Layers of deformable attention in the pixel decoder.
        decoder_layers: Layers of the transformer decoder.
        num_heads: Attention heads of both.
        encoder_mlp_dim: Hidden channels of the MLP of the pixel decoder's layers.
        mlp_dim: Hidden channels of the MLP of the transformer decoder's layers.
        points: Points per mask at which the losses are computed.

    Raises:
        ValueError: maps of other strides, channels not divisible by 32 and `num_heads`, or fewer than 2 classes.

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
            rule = "Mask2Former needs four maps, each of half the resolution of the one before or all of one stride"
            raise Mistake(f"{rule}, got strides {backbone.strides}")
        if channels % 32 or channels % num_heads:
            raise Mistake(f"channels must be divisible by 32 and num_heads = {num_heads}, got {channels}")
        config = Mask2FormerConfig(
            id2label=dict(enumerate(classes)),
            feature_size=channels,
            mask_feature_size=channels,
            hidden_dim=channels,
            encoder_feedforward_dim=encoder_mlp_dim,
            dim_feedforward=mlp_dim,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers + 1,  # transformers also counts the masks of the initial queries
            num_attention_heads=num_heads,
            num_queries=queries,
            train_num_points=points,
        )
        self.head = _Mask2FormerHead(config, backbone.channels, len(classes))

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        classes, masks = self.head(self.maps(images, mask))
        in_mask = enlarge(masks[-1], self.strides[0], images.shape[-2:]).sigmoid()
        with without_autocast(images):
            shares = torch.einsum("bqc,bqhw->bchw", classes[-1].softmax(-1)[..., :-1], in_mask)
        return shares.clamp_min(torch.finfo(shares.dtype).tiny).log()

    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """Compute cross-entropy of the queries' classes, cross-entropy and Dice of their masks, summed over layers."""
        # Losses of an image do not include the padding of the batch. As in Mask2Former's training, pixels without a
        # class count as outside of every mask, and the loss of classes is averaged on each device.
        batch, mask = pad(images, self.backbone.size_divisor)
        classes, masks = self.head(self.maps(batch, mask))
        sizes = [tuple(image.shape[-2:]) for image in images]
        unpadded = _without_padding(masks, sizes, self.strides[0])
        maps = _of_one_size([target["map"] for target in targets])
        present = [_present(target["map"]) for target in targets]
        true_masks = [(map == labels[:, None, None]).float() for map, labels in zip(maps, present, strict=True)]
        return self.head.losses(classes, unpadded, present, true_masks)


class Rescale(nn.Module):
    """Rescale four maps of one stride to a pyramid: 4x and 2x by deconvolution, 1x, and 1/2 by max pooling (BEiT)."""

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
        """Compute the strides of the rescaled maps."""
        return [stride * factor for stride, factor in zip(strides, (0.25, 0.5, 1.0, 2.0), strict=True)]

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Rescale four maps `(batch, channels, height, width)`; the result is ordered from fine to coarse."""
        return [level(map) for level, map in zip(self.levels, maps, strict=True)]


def layers_of_plain_vit(depth: int) -> tuple[int, int, int, int]:
    """Return the layers whose maps UperNet uses, at a third, half, two thirds and all of the depth, as in BEiT.

    >>> layers_of_plain_vit(12), layers_of_plain_vit(24)
    ((4, 6, 8, 12), (8, 12, 16, 24))
    """
    return (round(depth / 3), round(depth / 2), round(2 * depth / 3), depth)


def enlarge(logits: Tensor, stride: float, size: Sequence[int]) -> Tensor:
    """Resize a map, with cells of `stride` pixels, bilinearly to its image, and crop cells beyond the image's edge."""
    padded_size = [round(cells * stride) for cells in logits.shape[-2:]]
    wide = logits.to(wide_dtype(logits))
    return functional.interpolate(wide, padded_size, mode="bilinear")[..., : size[0], : size[1]]


class _Mask2FormerHead(Mask2FormerPreTrainedModel):
    """Mask2Former without its backbone, initialised as by transformers."""

    def __init__(self, config: Mask2FormerConfig, channels: Sequence[int], num_classes: int) -> None:
        super().__init__(config)
        self.pixel_decoder = Mask2FormerPixelDecoder(config, feature_channels=channels)
        self.transformer = Mask2FormerTransformerModule(in_features=config.feature_size, config=config)
        self.classifier = nn.Linear(config.hidden_dim, num_classes + 1)
        weights = {"cross_entropy": config.class_weight, "mask": config.mask_weight, "dice": config.dice_weight}
        self.criterion = _MasksOfAllDevices(config, weights)
        self.post_init()

    def forward(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Compute classes `(batch, queries, classes + 1)` and masks `(batch, queries, height, width)` per layer."""
        with without_autocast(maps[0]):  # offsets of deformable attention need float32
            decoded = self.pixel_decoder([map.to(wide_dtype(map)) for map in maps])
        output = self.transformer(decoded.multi_scale_features, decoded.mask_features, output_hidden_states=True)
        classes = [self.classifier(queries.transpose(0, 1)) for queries in output.intermediate_hidden_states]
        wide = wide_dtype(*classes)
        return [each.to(wide) for each in classes], [each.to(wide) for each in output.masks_queries_logits]

    def losses(
        self, classes: list[Tensor], masks: list[Tensor], present: list[Tensor], true_masks: list[Tensor]
    ) -> dict[str, Tensor]:
        """Compute the losses by kind, weighted and summed over layers; true masks are `(n, height, width)`."""
        earlier = [
            {"masks_queries_logits": of_masks, "class_queries_logits": of_classes}
            for of_masks, of_classes in zip(masks[:-1], classes[:-1], strict=True)
        ]
        with without_autocast(masks[-1]):
            terms = self.criterion(masks[-1], classes[-1], true_masks, present, earlier)
        weights: dict[str, float] = self.criterion.weight_dict
        return {
            kind: weight * torch.stack([loss for name, loss in terms.items() if name.startswith(f"loss_{kind}")]).sum()
            for kind, weight in weights.items()
        }


class _MasksOfAllDevices(Mask2FormerLoss):
    """Mask2Former's loss, with losses of masks divided by the number of masks on all devices, as by its authors."""

    def get_num_masks(self, class_labels: Any, device: torch.device) -> Tensor:
        """Return the mean number of masks on a device."""
        return per_device(torch.tensor(float(sum(map(len, class_labels))), device=device), self.training)


@contextmanager
def _running_statistics(model: nn.Module) -> Iterator[None]:
    """Use running statistics in BatchNorm2d; SyncBatchNorm, whose batch is that of all processes, does not change."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d) and module.training]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def _drop_channels(probability: float, module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Forward pre-hook that drops channels of a module's input in training."""
    return functional.dropout2d(inputs[0], probability, module.training)


def _cross_entropy(logits: Tensor, stride: float, truth: Tensor) -> Tensor:
    """Compute the cross-entropy, summed over labelled pixels."""
    logits = enlarge(logits, stride, truth.shape[-2:])
    return functional.cross_entropy(logits, truth, ignore_index=IGNORED, reduction="sum")


def _padded_maps(targets: Sequence[Target], size: Sequence[int]) -> Tensor:
    maps = [target["map"] for target in targets]
    paddings = [(0, size[1] - map.shape[1], 0, size[0] - map.shape[0]) for map in maps]
    return torch.stack(
        [functional.pad(map, padding, value=IGNORED) for map, padding in zip(maps, paddings, strict=True)]
    )


def _present(map: Tensor) -> Tensor:
    """Return the classes that occur in a map, `(n,)`."""
    labels = map.unique()
    return labels[labels != IGNORED]


def _of_one_size(maps: list[Tensor]) -> list[Tensor]:
    """Resize label maps `(height, width)` to the largest height and width, by nearest neighbour."""
    largest = [max(map.shape[axis] for map in maps) for axis in (0, 1)]
    resized = [functional.interpolate(map[None, None].float(), largest, mode="nearest-exact") for map in maps]
    return [each[0, 0].long() for each in resized]


def _without_padding(masks: list[Tensor], sizes: Sequence[Sequence[int]], stride: float) -> list[Tensor]:
    """Resample maps so that each image without its padding fills the map, `(batch, channels, height, width)`."""
    shares = [
        [extent / (cells * stride) for extent, cells in zip(size, masks[0].shape[-2:], strict=True)] for size in sizes
    ]
    if all(share == 1 for of_image in shares for share in of_image):
        return masks
    theta = masks[0].new_zeros(len(sizes), 2, 3)
    for row, (high, wide) in zip(theta, shares, strict=True):
        row[0, 0], row[0, 2], row[1, 1], row[1, 2] = wide, wide - 1, high, high - 1  # corner stays at -1
    grid = functional.affine_grid(theta, [len(sizes), 1, *masks[0].shape[-2:]], align_corners=False)
    return [functional.grid_sample(each, grid, padding_mode="border", align_corners=False) for each in masks]
