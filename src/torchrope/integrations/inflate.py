"""`inflate`: convert a vision transformer of images to one of volumes or clips."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

import torch
from torch import nn

from torchrope import encodings as families
from torchrope.checkpoints.convert import to_torchrope
from torchrope.checkpoints.settings import errors_in_one_line
from torchrope.encodings import Encoding, NoEncoding
from torchrope.encodings.names import built_as, takes
from torchrope.inference import require_unfrozen
from torchrope.lattice import Lattice
from torchrope.models import ViT
from torchrope.models.layers import PatchEmbed, choice_of, resolve
from torchrope.positions import per_axis, positive
from torchrope.tensors import counts_per_axis

_ANY_AXES = (NoEncoding, families.MixedRoPE, families.STRING, families.LieRE, families.ComRoPELD)
_TOWERS = ("ViTModel", "Dinov2Model", "Dinov2WithRegistersModel")  # of transformers, whose layers are a ViT's


def inflate(
    model: nn.Module,
    *,
    axes: int = 3,
    patch_size: int | Sequence[int] = 1,
    size: int | Sequence[int] | None = None,
    spacing: float | Sequence[float] = 1.0,
    weights: Literal["average", "center"] = "average",
    encoding: str | Callable[..., Encoding] | None = None,
) -> ViT:
    """Convert a vision transformer of images to one of volumes or clips, whose new axes come first.

        patches    W' = W / t on each of the t slices of a patch, or W on its middle slice only
        rotation   A' = 0 for a new axis, so that R'(z, y, x) = R(y, x) until it is trained
        table      e'(z, y, x) = e(y, x), and the same for a relative position bias

    A volume of one patch along each new axis whose slices all equal one image has the features of that image.

    Args:
        model: A `ViT`; a VisionTransformer or rope ViT (`vit_*_patch16_rope_*`) of timm; a ViT, DINOv2 or DINOv2 with
            registers of transformers, also with ViTForImageClassification's classifier. The latter two may be swapped.
        axes: Number of axes of the data for the copy.
        patch_size: Slices of a patch, one number or one per new axis.
        size: Slices of the training data, one number or one per new axis; default: one patch. The position table,
            which becomes a learned one, and the bias are repeated to this size.
        spacing: Distance between neighbouring slices in pixels of the images; or the size of a voxel along every axis
            of the data, new ones first, in mm or another unit:  (5.0, 0.8, 0.8) is 6.25 pixels.
        weights: "average" divides the patch weights evenly among slices, "center" assigns them to the middle slice.
        encoding: Rotary encoding of the copy, as in `ViT`, to which the generators are transferred. By default the
            model's family, except that families with fixed axes per block become learned ones that represent their
            rotation: blocks of 2 become `MixedRoPE`, `ComRoPEAP` becomes `ComRoPELD`.

    From a `ViT` the copy keeps dtypes, device, mode and head; from other models it is float32 on the CPU, evaluating.

    Raises:
        ValueError: an unsupported model, or one with parts that `ViT` lacks; axes not greater than its own; a family
            that cannot represent its rotation with zero generators for the new axes.

    References:
        Carreira and Zisserman, Quo Vadis, Action Recognition?, section 2.4, for repeated, divided weights. Arnab et
        al., ViViT, section 3.4, for weights on the middle frame and the repeated table.
    """
    source = _as_vit(model)
    old = len(source.embed.patch_size)
    new = axes - old
    if new < 1:
        raise ValueError(f"axes must be greater than the model's {old}, got {axes}")
    if weights not in ("average", "center"):
        raise ValueError(f"weights must be 'average' or 'center', got {weights!r}")
    depths = counts_per_axis("patch_size of new axes", patch_size, new)
    extents = depths if size is None else counts_per_axis("size of new axes", size, new)
    inflated, share = copy.deepcopy(source), source.arguments["share_layers"]
    _extend_patches(inflated.embed, depths, centred=weights == "center")
    ahead = inflated.embed.lattice((*extents, *source.embed.patch_size))[:new]
    encodings: list[Any] = list(inflated.encodings)
    biases = list(source.biases)
    if encoding is not None and len(encodings) == 1 and type(encodings[0]) is NoEncoding:
        # One that rotates nothing is shared only because all layers would have equal ones.
        encodings, biases, share = encodings * len(source.layers), biases * len(source.layers), False
    inflated.encodings = nn.ModuleList(_with_axes(part, new, encoding) for part in encodings)
    if source.absolute is not None:
        inflated.absolute = _repeated(source.absolute, ahead)
    inflated.biases = nn.ModuleList(_repeated(bias, ahead) for bias in biases)
    inflated.position_map = _with_slices(source, depths, spacing)
    sizes = (*extents, *source.arguments["input_size"])
    inflated.arguments = source.arguments | {"input_size": sizes, "patch_size": inflated.embed.patch_size}
    inflated.arguments |= {"positions": inflated.position_map, "share_layers": share, "encoding": choice_of(inflated)}
    return inflated


def _as_vit(model: nn.Module) -> ViT:
    """Return a `ViT` unchanged, or convert a model of timm or transformers to one that computes the same features."""
    require_unfrozen("inflate", model)
    kind = type(model).__name__
    if type(model) is ViT:
        return model
    tower: Any = getattr(model, "vit", model)  # of a classifier
    of_transformers = any(base.__name__ in _TOWERS for base in type(tower).__mro__)
    if not (of_transformers or hasattr(tower, "forward_features")):
        rule = "model must be a ViT, a VisionTransformer or rope ViT of timm, or one of transformers"
        raise ValueError(f"{rule}; inflate supports these models of transformers: {', '.join(_TOWERS)}, got {kind}")
    with errors_in_one_line(f"inflate needs a model with the parts of a ViT, got {kind}"):
        converted = to_torchrope(model)
    if not isinstance(converted, ViT):
        raise ValueError(f"model must be a ViT, got {kind}, which attends within windows")
    sizes = converted.embed.in_channels, *converted.arguments["input_size"]
    x = torch.rand(1, *sizes, generator=torch.Generator().manual_seed(0))
    like, tower = next(tower.parameters()), copy.deepcopy(tower).eval()
    with torch.no_grad():
        features = converted.features(x)
        if of_transformers:
            expected = tower(pixel_values=x.to(like)).last_hidden_state[:, 0].to(x)
        else:
            expected = tower.forward_head(tower.forward_features(x.to(like)), pre_logits=True).to(x)
    if features.shape != expected.shape:
        received = f"{tuple(expected.shape)} instead of {tuple(features.shape)}"
        raise ValueError(f"inflate needs a model whose features are those of its class token, got {received}")
    error = (features - expected).norm() / expected.norm()
    if not error < (1e-4 if like.dtype in (torch.float32, torch.float64) else 0.1):
        rule = "inflate needs a model equivalent to a ViT with exact GELU"
        raise ValueError(f"{rule}, got features of {kind} that differ by {error:.1%}")
    return converted


def _extend_patches(embed: PatchEmbed, depths: tuple[int, ...], *, centred: bool) -> None:
    """Extend the patches of an embedding over several slices."""
    before, old = embed.proj.weight, len(embed.patch_size)
    flat = before.detach().unflatten(1, (embed.in_channels, *(1,) * len(depths), *embed.patch_size))
    shares = flat.new_full(depths, 0.0 if centred else 1 / math.prod(depths))
    if centred:
        shares[tuple(depth // 2 for depth in depths)] = 1.0
    weight = (flat * shares.reshape(*depths, *(1,) * old)).flatten(1)
    embed.proj.weight, embed.proj.in_features = nn.Parameter(weight, before.requires_grad), weight.shape[1]
    embed.patch_size = (*depths, *embed.patch_size)


def _with_axes(encoding: Encoding, new: int, build: str | Callable[..., Encoding] | None) -> Encoding:
    """Return an encoding with new leading axes, whose generators are zero."""
    choice = resolve(_family(encoding) if build is None else build)
    if choice.absolute is not None or choice.bias is not None:
        raise ValueError(f"encoding must be a rotary encoding without table or bias, got {build!r}")
    generators = encoding.generators().detach()
    made = choice.build_rotary(num_axes=encoding.num_axes + new, **encoding.head_sizes).to(generators)
    made.set_generators(torch.cat([generators.new_zeros(new, *generators.shape[1:]), generators]))
    learns = build is not None or all(parameter.requires_grad for parameter in encoding.parameters())
    return made.train(encoding.training).requires_grad_(learns)


def _family(encoding: Encoding) -> Callable[..., Encoding]:
    """Return a function that builds an encoding of any number of axes that represents the rotation of this one."""
    same = built_as(encoding, "num_axes", "num_heads", "head_dim")
    if type(encoding) in _ANY_AXES or (encoding.block_size != 2 and not isinstance(encoding, families.ComRoPEAP)):
        return same
    family: Any = families.MixedRoPE if encoding.block_size == 2 else families.ComRoPELD
    kept = [name for name in ("block_size", "rotary_dim", "shared_heads") if takes(family, name)]
    return partial(family, **{name: value for name, value in same.keywords.items() if name in kept})


def _repeated(part: nn.Module, ahead: tuple[int, ...]) -> Any:
    """Return a position table that repeats the original for every slice, or a bias for every pair of slices."""
    build: Callable[..., Any]
    if isinstance(part, families.RelativePositionBias):
        build = partial(families.RelativePositionBias, num_heads=part.num_heads)
        table = part.table.detach().repeat(math.prod(2 * size - 1 for size in ahead), 1)
    elif isinstance(part, families.LearnedAPE | families.SinusoidalAPE):
        build = partial(families.LearnedAPE, dim=part.dim)
        if isinstance(part, families.LearnedAPE):
            build = partial(build, intensity=part.intensity, cell=(1.0,) * len(ahead) + part.cell)
        table = part(*part.sizes).detach().unflatten(0, part.sizes).repeat(*ahead, *(1,) * (len(part.sizes) + 1))
    else:
        rule = "inflate repeats position tables of LearnedAPE and SinusoidalAPE, and biases of RelativePositionBias"
        raise ValueError(f"{rule}, got {type(part).__name__}")
    with torch.device("meta"):
        made = build(sizes=(*ahead, *part.sizes))
    made.table = nn.Parameter(table, all(parameter.requires_grad for parameter in part.parameters()))
    return made.train(part.training)


def _with_slices(source: ViT, depths: tuple[int, ...], spacing: float | Sequence[float]) -> Lattice:
    """Return the lattice of the patches of a volume, whose slices have the positions of the source."""
    patch, old, new = source.embed.patch_size, len(source.embed.patch_size), len(depths)
    if isinstance(spacing, int | float):
        spacing = [*[spacing] * new, *[1.0] * old]
    voxels = positive("spacing", spacing, new + old)
    lattice = source.position_map
    within = lattice.spaced(*source.embed.lattice(source.arguments["input_size"]))["spacing"]
    # Positions per unit of length, averaged over the old axes.
    density = fmean(step / (extent * voxel) for step, extent, voxel in zip(within, patch, voxels[new:], strict=True))
    steps = tuple(density * depth * voxel for depth, voxel in zip(depths, voxels[:new], strict=True))
    before = lattice.settings()
    ahead: dict[str, Any] = dict.fromkeys(("origin", "offset", "cell"), (0.0,) * new)
    ahead |= {"spacing": steps, "per": ("one",) * new, "train_sizes": (1,) * new, "periods": (None,) * new}
    if lattice.unit is not None:  # positions in lengths, equal along all axes
        before["patch_size"] = lattice.patch_size
        ahead["patch_size"] = depths
        ahead |= {name: (fmean(per_axis(name, before[name], old)),) * new for name in ("spacing", "unit")}
    extended: dict[str, Any] = {}
    for name in ahead.keys() & before.keys():
        value = before[name]
        extended[name] = (*ahead[name], *(value if isinstance(value, tuple) else (value,) * old))
    if "per" in extended:  # axes whose tokens are counted, from the last one
        extended["per"] = tuple(rule % old - old if isinstance(rule, int) else rule for rule in extended["per"])
    return replace(lattice, **extended)
