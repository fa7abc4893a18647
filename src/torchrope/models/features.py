"""Multi-scale feature maps for segmentation and detection: a ViT's layers or simple feature pyramid, Swin's stages."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.attention import fit_window
from torchrope.models.layers import Shareable, keeps_arguments
from torchrope.models.swin import Stage, Swin
from torchrope.models.vit import ViT
from torchrope.positions import per_axis
from torchrope.tensors import counts_per_axis, require_counts

_SCALES = (4, 2, 1, 1 / 2)  # cells of each level of the pyramid along a patch
_EPS = 1e-6  # of ViTDet's norms


class Features(Shareable, nn.Module):
    """Compute the feature maps of a ViT or a Swin for images of any size; padding is masked.

        ViT           outputs of selected layers, all at the patch's stride
        ViT, pyramid  last layer, at strides of 1/4, 1/2, 1 and 2 patches:  resize -> 1x1 -> norm -> 3x3 -> norm
        Swin          norm(output of each stage), at the stage's stride

    The maps of an image do not depend on the other images of its batch, with two exceptions: the relative position bias
    of a ViT is resized to the lattice of the batch, and a Swin shifts its windows only if that lattice is larger than
    one window.

    Args:
        model: For images, with square patches. It is modified in-place: the head, the last norm and the layers that
            no map needs are removed; with windows also its class token and registers, as in ViTDet.
        indices: Layers of a ViT, counted from 1, 0 the embedded patches, -1 the last; by default the last of each
            quarter. Stages of a Swin, or levels of a pyramid, counted from 0; all by default.
        pyramid: Whether a ViT gives a simple feature pyramid.
        out_channels: Channels of each level of the pyramid.
        window_size: Patches along a window, or one number per axis; a ViT attends within windows except in
            `global_layers`, with the positions of the whole image. By default a ViT attends globally, and a Swin
            within windows of the training size.
        global_layers: Layers that attend globally, counted as above; the last of each quarter by default. Those of
            ViTDet's code, 2, 5, 8, 11 of 12, counted from 0, are 3, 6, 9, 12 here.

    Attributes:
        channels: Number of channels of each map.
        strides: Pixels from one cell of each map to the next.
        feature_info: Channels and strides in the form of timm's `feature_info`.
        size_divisor: Height and width are padded to a multiple of it.

    Raises:
        ValueError: a model for other data than images, indices out of range, `pyramid` or `global_layers` for a Swin,
            or a level with more than one cell per pixel.

    References:
        Li et al., Exploring Plain Vision Transformer Backbones for Object Detection, section 3. Liu et al., Swin
        Transformer; its detection code applies a norm to the output of each stage.

    Example:
        >>> from torchrope import Features, ViT
        >>> vit = ViT((32, 32), patch_size=8, dim=32, depth=4, num_heads=2, encoding="mixed")
        >>> backbone = Features(vit, pyramid=True, out_channels=16, window_size=2, global_layers=(2, 4))
        >>> [tuple(map.shape) for map in backbone(torch.randn(1, 3, 50, 70))]
        [(1, 16, 25, 35), (1, 16, 13, 18), (1, 16, 7, 9), (1, 16, 4, 5)]
        >>> backbone.strides, backbone.channels
        ((2, 4, 8, 16), (16, 16, 16, 16))
    """

    channels: tuple[int, ...]
    strides: tuple[int | float, ...]
    indices: tuple[int, ...]
    levels: nn.ModuleList  # of a pyramid
    norms: nn.ModuleList  # of a Swin
    arguments: dict[str, Any]

    @keeps_arguments("model")
    def __init__(
        self,
        model: ViT | Swin,
        *,
        indices: Sequence[int] | None = None,
        pyramid: bool = False,
        out_channels: int = 256,
        window_size: int | Sequence[int] | None = None,
        global_layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.pyramid = pyramid
        self.out_channels = out_channels
        self.size_divisor = _patch_side(model)
        self.window_size = None if window_size is None else counts_per_axis("window_size", window_size, 2)
        self.global_layers: tuple[int, ...] | None = None
        if isinstance(model, Swin):
            if pyramid or global_layers is not None:
                received = "pyramid=True" if pyramid else f"global_layers={global_layers}"
                raise ValueError(f"pyramid and global_layers must not be set for a Swin, got {received}")
            self._take_stages(model, indices)
        else:
            self._take_windows(model, global_layers)
            if pyramid:
                self._take_pyramid(model, indices)
            else:
                self._take_layers(model, indices)
        model.norm, model.head = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Compute the maps.

        Args:
            x: Images `(batch, channels, height, width)` of any size, padded with zeros on the right and at the bottom
                to whole patches.
            mask: Valid pixels, `(batch, height, width)`, boolean: each image starts at the upper left corner, the rest
                is padding. By default all pixels are valid.

        Returns:
            One `(batch, channels, ceil(height / stride), ceil(width / stride))` per stride, 0 in padding.

        Raises:
            ValueError: a mask that is not boolean or not of the images' size.
        """
        height, width = x.shape[-2:]
        if mask is not None:
            _check_mask(mask, x)
            x = _zeroed(x, mask.unsqueeze(1))
        x = functional.pad(x, (0, -width % self.size_divisor, 0, -height % self.size_divisor))
        maps = self._maps(x, None if mask is None else _cells(mask, self.size_divisor))
        valid = [None if mask is None else _cells(mask, stride).unsqueeze(1) for stride in self.strides]
        if self.pyramid:
            patches = None if mask is None else _cells(mask, self.size_divisor).unsqueeze(1)
            sizes = [(math.ceil(height / stride), math.ceil(width / stride)) for stride in self.strides]
            maps = [
                level(maps[0], size, patches, cells)
                for level, size, cells in zip(self.levels, sizes, valid, strict=True)
            ]
        return [_zeroed(map, cells) for map, cells in zip(maps, valid, strict=True)]

    @property
    def feature_info(self) -> "FeatureInfo":
        """Channels and strides of the maps, in the form of timm's `feature_info`."""
        return FeatureInfo(self.channels, self.strides)

    def get_extra_state(self) -> Tensor:
        """Return the spacing and origin of each stage's lattice, `(stages, 2, axes)`, to save with the weights."""
        lattices = [part.position_map for part in getattr(self.model, "stages", [self.model])]
        return torch.tensor(
            [[per_axis(name, getattr(lattice, name), 2) for name in ("spacing", "origin")] for lattice in lattices],
            dtype=torch.float64,
        )

    def set_extra_state(self, state: Tensor) -> None:
        """Set the spacing and origin of each stage's lattice from a checkpoint."""
        for part, (spacing, origin) in zip(getattr(self.model, "stages", [self.model]), state.tolist(), strict=True):
            part.position_map = replace(part.position_map, spacing=spacing, origin=origin)

    def extra_repr(self) -> str:
        """Describe the maps."""
        return f"strides={self.strides}, channels={self.channels}"

    def _take_windows(self, vit: ViT, global_layers: Sequence[int] | None) -> None:
        if self.window_size is None:
            if global_layers is not None:
                raise ValueError(f"global_layers must be None without a window_size, got {tuple(global_layers)}")
            return
        depth = len(vit.layers)
        self.global_layers = _from_front("global_layers", global_layers, range(depth + 1), _quarters(depth))
        if 0 in self.global_layers:
            raise ValueError(f"global_layers are counted from 1, got {tuple(global_layers or ())}")
        vit.drop_prefix()

    def _take_layers(self, vit: ViT, indices: Sequence[int] | None) -> None:
        depth = len(vit.layers)
        self.indices = _from_front("indices", indices, range(depth + 1), _quarters(depth))
        deepest = max(self.indices)
        vit.layers = vit.layers[:deepest]
        for of_layers in ("encodings", "biases"):
            if len(getattr(vit, of_layers)) > 1:
                setattr(vit, of_layers, getattr(vit, of_layers)[:deepest])
        self.channels = (vit.embed.proj.out_features,) * len(self.indices)
        self.strides = (self.size_divisor,) * len(self.indices)

    def _take_pyramid(self, vit: ViT, indices: Sequence[int] | None) -> None:
        levels = range(len(_SCALES))
        self.indices = _from_front("indices", indices, levels, tuple(levels))
        strides = [self.size_divisor / _SCALES[index] for index in self.indices]
        if min(strides) < 1:
            rule = "a level of the pyramid must have a stride of 1 pixel or more"
            raise ValueError(f"{rule}, got {min(strides)} for patches of {self.size_divisor}; leave it out of indices")
        dim = vit.embed.proj.out_features
        self.levels = nn.ModuleList(Level(dim, _SCALES[index], self.out_channels) for index in self.indices)
        self.strides = tuple(int(stride) if stride == int(stride) else stride for stride in strides)
        self.channels = (self.out_channels,) * len(strides)

    def _take_stages(self, swin: Swin, indices: Sequence[int] | None) -> None:
        stages = range(len(swin.stages))
        self.indices = _from_front("indices", indices, stages, tuple(stages))
        swin.stages = swin.stages[: max(self.indices) + 1]
        dim = swin.embed.proj.out_features
        self.channels = tuple(dim * 2**index for index in self.indices)
        self.strides = tuple(self.size_divisor * 2**index for index in self.indices)
        self.norms = nn.ModuleList(LayerNorm2d(channels) for channels in self.channels)

    def _maps(self, x: Tensor, valid_mask: Tensor | None) -> list[Tensor]:
        """Compute the maps of the model, before the pyramid, from images of whole patches."""
        if isinstance(self.model, ViT):
            return self.model.feature_maps(
                x,
                [-1] if self.pyramid else self.indices,
                norm=False,
                valid_mask=valid_mask,
                window_size=self.window_size,
                global_layers=self.global_layers or (),
            )
        if valid_mask is None and not self._windows_fill(self.model.embed.lattice(x.shape[2:])):
            valid_mask = torch.ones(1, *self.model.embed.lattice(x.shape[2:]), dtype=torch.bool, device=x.device)
        stages = self.model.feature_maps(x, window_size=self.window_size, valid_mask=valid_mask)
        return [norm(stages[index]) for index, norm in zip(self.indices, self.norms, strict=True)]

    def _windows_fill(self, sizes: tuple[int, ...]) -> bool:
        """Return whether whole windows cover the lattice of every stage of a Swin."""
        for stage in cast(Swin, self.model).stages:
            window = fit_window(self.window_size or cast(Stage, stage).window, sizes)
            if any(size % part for size, part in zip(sizes, window, strict=True)):
                return False
            sizes = tuple(-(-size // 2) for size in sizes)
        return True


class FeatureInfo:
    """Channels and strides of maps, with the interface of timm's `FeatureInfo`; maps are numbered from 0.

    Args:
        channels: Of each map.
        strides: Of each map, in pixels.

    References:
        timm, models/_features.py.
    """

    def __init__(self, channels: Sequence[int], strides: Sequence[int | float]) -> None:
        self.info: list[dict[str, Any]] = [
            {"num_chs": count, "reduction": stride, "module": f"maps.{index}", "index": index}
            for index, (count, stride) in enumerate(zip(channels, strides, strict=True))
        ]
        self.out_indices = tuple(range(len(self.info)))

    def get(self, key: str, idx: int | Sequence[int] | None = None) -> Any:
        """Return one property of all maps, of one map or of several."""
        if isinstance(idx, int):
            return self.info[idx][key]
        return [self.info[index][key] for index in (self.out_indices if idx is None else idx)]

    def get_dicts(self, keys: Sequence[str] | None = None, idx: int | Sequence[int] | None = None) -> Any:
        """Return several properties, all by default, for the maps that `get` takes."""
        chosen = [{key: info[key] for key in keys or info} for info in self.info]
        if isinstance(idx, int):
            return chosen[idx]
        return [chosen[index] for index in (self.out_indices if idx is None else idx)]

    def channels(self, idx: int | Sequence[int] | None = None) -> Any:
        """Return the numbers of channels."""
        return self.get("num_chs", idx)

    def reduction(self, idx: int | Sequence[int] | None = None) -> Any:
        """Return the strides."""
        return self.get("reduction", idx)

    def module_name(self, idx: int | Sequence[int] | None = None) -> Any:
        """Return the names, "maps.0" and so on."""
        return self.get("module", idx)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.info[index]

    def __len__(self) -> int:
        return len(self.info)


class LayerNorm2d(nn.LayerNorm):
    """Normalise the channels of each cell of a map `(batch, channels, height, width)`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a map; the shape is unchanged."""
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class Level(nn.Module):
    """One level of a simple feature pyramid:  resize -> 1x1 convolution -> norm -> 3x3 convolution -> norm.

    Args:
        dim: Channels of the patch map.
        scale: Cells per patch along each axis: 4, 2, 1 or 1/2.
        out_channels: Channels of the level.
    """

    def __init__(self, dim: int, scale: float, out_channels: int) -> None:
        super().__init__()
        self.halves = scale < 1
        half, quarter = dim // 2, dim // 4
        twice: list[nn.Module] = [nn.ConvTranspose2d(dim, half, 2, stride=2)] if scale > 1 else []
        again = (
            [LayerNorm2d(half, _EPS), nn.GELU(), nn.ConvTranspose2d(half, quarter, 2, stride=2)] if scale > 2 else []
        )
        self.enlarge = nn.Sequential(*twice, *again)
        enlarged = quarter if again else half if twice else dim
        self.project = nn.Sequential(nn.Conv2d(enlarged, out_channels, 1, bias=False), LayerNorm2d(out_channels, _EPS))
        self.smooth = nn.Sequential(
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False), LayerNorm2d(out_channels, _EPS)
        )

    def forward(self, x: Tensor, size: tuple[int, int], patches: Tensor | None, cells: Tensor | None) -> Tensor:
        """Compute this level from the patch map.

        Args:
            x: `(batch, dim, height, width)`.
            size: Height and width of the level; the map is cropped to it.
            patches: Valid patches, `(batch, 1, height, width)`.
            cells: Valid cells of the level, `(batch, 1, *size)`.
        """
        if self.halves:
            low = x if patches is None else x.masked_fill(~patches, torch.finfo(x.dtype).min)
            x = _zeroed(functional.max_pool2d(low, 2, ceil_mode=True), cells)
        x = self.enlarge(x)[..., : size[0], : size[1]]
        return self.smooth(_zeroed(self.project(x), cells))


def pad(images: Sequence[Tensor], divisor: int = 1) -> tuple[Tensor, Tensor]:
    """Pad images of several sizes to one size with zeros, on the right and at the bottom.

    Args:
        images: Each `(channels, height, width)`, one or more.
        divisor: Height and width of the batch are multiples of it.

    Returns:
        The batch `(batch, channels, height, width)` and the mask of valid pixels, `(batch, height, width)`, boolean.

    Raises:
        ValueError: no images, images with different numbers of channels, or a divisor below 1.

    Example:
        >>> batch, mask = pad([torch.ones(3, 4, 2), torch.ones(3, 2, 5)], 4)
        >>> batch.shape, mask.sum(dim=(1, 2)).tolist()
        (torch.Size([2, 3, 4, 8]), [8, 10])
    """
    if not images or any(image.ndim != 3 or image.shape[0] != images[0].shape[0] for image in images):
        shapes = [tuple(image.shape) for image in images]
        raise ValueError(f"pad needs one or more images (channels, height, width) of the same channels, got {shapes}")
    require_counts(divisor=divisor)
    height, width = (math.ceil(max(image.shape[axis] for image in images) / divisor) * divisor for axis in (1, 2))
    batch = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    mask = torch.zeros(len(images), height, width, dtype=torch.bool, device=batch.device)
    for index, image in enumerate(images):
        batch[index, :, : image.shape[1], : image.shape[2]] = image
        mask[index, : image.shape[1], : image.shape[2]] = True
    return batch, mask


def _quarters(depth: int) -> tuple[int, ...]:
    """Return the last layer of each quarter, counted from 1."""
    return tuple(sorted({depth * quarter // 4 for quarter in (1, 2, 3, 4)} - {0}))


def _from_front(name: str, chosen: Sequence[int] | None, valid: range, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the chosen indices counted from the front, or the default if None."""
    if chosen is None:
        return default
    if not chosen or any(index not in range(-len(valid), len(valid)) for index in chosen):
        raise ValueError(f"{name} must be between {-len(valid)} and {len(valid) - 1}, one or more, got {tuple(chosen)}")
    return tuple(valid[index] for index in chosen)


def _patch_side(model: ViT | Swin) -> int:
    patch = model.embed.patch_size
    if len(patch) != 2 or patch[0] != patch[1]:
        raise ValueError(f"the model must have two axes and square patches, got patches of {patch}")
    return patch[0]


def _check_mask(mask: Tensor, x: Tensor) -> None:
    expected = (x.shape[0], *x.shape[-2:])
    if mask.dtype != torch.bool or tuple(mask.shape) != expected:
        raise ValueError(
            f"mask must be boolean {expected}, the size of the images, got {mask.dtype} {tuple(mask.shape)}"
        )


def _cells(mask: Tensor, stride: int | float) -> Tensor:
    """Return the valid cells of a map: those whose first pixel is valid, because images start at the upper left."""
    rows, columns = (
        (torch.arange(math.ceil(size / stride), device=mask.device) * stride).long() for size in mask.shape[-2:]
    )
    return mask[:, rows][:, :, columns]


def _zeroed(map: Tensor, cells: Tensor | None) -> Tensor:
    return map if cells is None else map.masked_fill(~cells, 0)
