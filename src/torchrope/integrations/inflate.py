"""`inflate`: convert a vision transformer of images to one of volumes or clips."""

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchrope.encodings import (
    STRING,
    ComRoPEAP,
    ComRoPELD,
    Encoding,
    LearnedAPE,
    LieRE,
    MixedRoPE,
    NoEncoding,
    RelativePositionBias,
    SinusoidalAPE,
    parse_encoding,
)
from torchrope.integrations.checkpoints.describing import describe
from torchrope.integrations.checkpoints.pretrained import as_own
from torchrope.integrations.checkpoints.published import timm_vit
from torchrope.integrations.checkpoints.settings import errors_in_one_line
from torchrope.integrations.family import adapters
from torchrope.integrations.rotary import ATTRIBUTE, Rotary
from torchrope.integrations.swap import unswap
from torchrope.lattice import Lattice, spaced
from torchrope.models import ViT
from torchrope.models.layers import PatchEmbed
from torchrope.positions import grid, per_axis

# The parameter of each family that has an axis dimension; zeros in it are zero generators.
_OF_AXES: dict[type[Encoding], str] = {
    MixedRoPE: "frequencies",
    STRING: "frequencies",
    LieRE: "upper",
    ComRoPELD: "factors",
}
_NAMES = {MixedRoPE: "mixed", STRING: "string", LieRE: "liere", ComRoPELD: "comrope-ld", NoEncoding: "none"}

_CLASSIFIER = "ViTForImageClassification"
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
            registers of transformers, with the classifier of ViTForImageClassification. Models of timm and
            transformers may be swapped.
        axes: Number of axes of the data for the copy.
        patch_size: Slices of a patch, one number or one per new axis.
        size: Slices of the training data, one number or one per new axis; default: one patch. The position table,
            which becomes a learned one, and the bias are repeated to this size.
        spacing: Distance between neighbouring slices in pixels of the images; or the size of a voxel along every axis
            of the data, new ones first, in mm or another unit:  (5.0, 0.8, 0.8) is 6.25 pixels. Equal distances between
            patches along new and old axes give equal distances in position.
        weights: "average" divides the patch weights evenly among slices, "center" assigns them to the middle slice.
        encoding: Rotary encoding of the copy, as in `ViT`, to change the family; the generators are transferred, and a
            model without rotation gets one encoding per layer. By default the model's family, except that families with
            fixed axes per block become learned ones that represent their rotation exactly: blocks of 2 become
            `MixedRoPE`, `ComRoPEAP` becomes `ComRoPELD`.

    Returns:
        A `ViT`. From a `ViT` it keeps dtypes, device, mode and head; from models of other libraries it is float32 on
        the CPU, in evaluation mode, without dropout.

    Raises:
        ValueError: an unsupported model, or one with parts that `ViT` lacks; axes not greater than its own; a family
            that cannot represent its rotation with zero generators for the new axes.

    References:
        Carreira and Zisserman, Quo Vadis, Action Recognition?, section 2.4, for repeated, divided weights. Arnab et
        al., ViViT, section 3.4, for weights on the middle frame and the repeated table.

    Example:
        >>> from torchrope import ViT, inflate
        >>> images = ViT((8, 8), patch_size=4, dim=32, depth=2, num_heads=2, encoding="learned+mixed").eval()
        >>> volumes = inflate(images, patch_size=2, size=16, spacing=(5.0, 0.8, 0.8))
        >>> image = torch.randn(1, 3, 8, 8)
        >>> slices = image.unsqueeze(2).expand(-1, -1, 2, -1, -1)
        >>> torch.allclose(volumes.features(slices), images.features(image), atol=1e-5)
        True
    """
    source = _as_vit(model)
    old = len(source.embed.patch_size)
    new = axes - old
    if new < 1:
        raise ValueError(f"axes must be greater than the model's {old}, got {axes}")
    if weights not in ("average", "center"):
        raise ValueError(f"weights must be 'average' or 'center', got {weights!r}")
    depths = _integers("patch_size", patch_size, new)
    extents = depths if size is None else _integers("size", size, new)
    inflated = copy.deepcopy(source)
    inflated.embed = _patches(source.embed, depths, centred=weights == "center")
    ahead = inflated.embed.lattice((*extents, *source.embed.patch_size))[:new]
    encodings: list[Any] = list(source.encodings)
    biases, share = list(source.biases), source.arguments["share_layers"]
    if encoding is not None and len(encodings) == 1 and type(encodings[0]) is NoEncoding:
        # One that rotates nothing is shared only because all layers would have equal ones.
        encodings, biases, share = encodings * len(source.layers), biases * len(source.layers), False
    inflated.encodings = nn.ModuleList(_with_axes(one, new, encoding) for one in encodings)
    if source.absolute is not None:
        inflated.absolute = _repeated(source.absolute, ahead)
    inflated.biases = nn.ModuleList(_repeated(one, ahead) for one in biases)
    steps = _steps(source, depths, spacing)
    inflated.position_map = _with_slices(source, depths, steps)
    inflated.arguments = {
        **source.arguments,
        "input_size": (*extents, *source.arguments["input_size"]),
        "patch_size": inflated.embed.patch_size,
        "positions": inflated.position_map,
        "share_layers": share,
        **_choice(inflated),
    }
    return inflated


class Stacked(nn.Module):
    """Compute positions of the patches of a volume from a function for slices that is no `Lattice`, and their distance.

    Args:
        place: Function from the sizes of a slice and `device=` to positions of its patches.
        steps: Positions between neighbouring patches along each new axis.
    """

    def __init__(self, place: Callable[..., Tensor], steps: Sequence[float]) -> None:
        super().__init__()
        self.place = place
        self.steps = tuple(steps)

    def forward(self, *sizes: int, device: torch.device | str | None = None) -> Tensor:
        """Return positions `(patches, axes)` of a lattice of these sizes."""
        new = len(self.steps)
        within = self.place(*sizes[new:], device=device).unsqueeze(-3)  # ([batch,] 1, patches of a slice, axes)
        along = grid(*sizes[:new], spacing=self.steps, device=device).to(within).unsqueeze(1)  # (slices, 1, new axes)
        shape = (*within.shape[:-3], len(along), within.shape[-2], -1)
        return torch.cat([along.expand(shape), within.expand(shape)], dim=-1).flatten(-3, -2)


def _as_vit(model: nn.Module) -> ViT:
    """Return a `ViT` unchanged, or convert a model of timm or transformers to one."""
    if type(model) is ViT:
        foreign = next((one for one in model.encodings if not isinstance(one, Encoding)), None)
        if foreign is not None:
            rule = "inflate must be called before freeze, since it needs generators"
            raise ValueError(f"{rule}, got {type(foreign).__name__}")
        return model
    found = [one for one in adapters(model) if one.tower is model or type(model).__name__ == _CLASSIFIER]
    if not found:
        rule = "model must be a ViT, a VisionTransformer or rope ViT of timm, or a ViT or DINOv2 of transformers"
        raise ValueError(f"{rule}, got {type(model).__name__}")
    rotary = getattr(found[0].tower, ATTRIBUTE, None)
    plain = model if rotary is None else _without_encodings(model, rotary)
    tower = next(one.tower for one in adapters(plain) if type(one.tower) is type(found[0].tower))
    with errors_in_one_line(f"inflate needs a model with the parts of a ViT, got {type(model).__name__}"):
        own = _of_transformers(plain, tower) if _is_of_transformers(tower) else as_own(tower)
    if not isinstance(own, ViT):
        raise ValueError(f"model must be a ViT, got {type(model).__name__}, which attends within windows")
    _set_eps(own, tower)
    _check_same(tower, own)
    return own if rotary is None else _with_encodings(own, rotary)


def _is_of_transformers(tower: nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(tower).__mro__)


def _without_encodings(model: nn.Module, rotary: Rotary) -> nn.Module:
    """Return an unswapped copy, without the tables and rotation that the swap disabled."""
    if rotary.keep_rotation:
        raise ValueError("inflate needs a model with a single rotation, got one swapped with keep_rotation=True")
    plain = unswap(copy.deepcopy(model))
    adapter = adapters(plain)[0]
    if not rotary.keep_position_tables:
        for table in adapter.tables():
            nn.init.zeros_(table)
    if getattr(adapter.tower, "rope", None) is not None:
        adapter.tower.rope = None
    return plain


def _with_encodings(model: ViT, rotary: Rotary) -> ViT:
    """Copy the encodings of a swapped model into a ViT without encodings."""
    first, *others = rotary.lattices
    if any(other != first for other in others):
        raise ValueError("inflate needs equal token positions in all layers, got a swapped model whose lattices differ")
    model.encodings = nn.ModuleList(copy.deepcopy(one) for one in rotary.encodings)
    if first.per == "one":
        model.position_map = Lattice(**first.spaced(*model.embed.lattice(model.arguments["input_size"])))
    else:  # its spacing depends on the size of the input
        model.position_map = replace(first, shift=0.0, stretch=1.0, rescale=1.0)
    model.arguments["share_layers"] = len(rotary.encodings) == 1
    for index, layer in enumerate(model.layers):
        _reorder(layer, rotary.channels[index % len(rotary.channels)])
    return model.eval()


@torch.no_grad()
def _reorder(layer: Any, order: Sequence[int] | None) -> None:
    """Permute the query and key channels of a layer so that the channels of a pair are adjacent."""
    if order is None:
        return
    for parameter in (layer.attention.qkv.weight, layer.attention.qkv.bias):
        if parameter is not None:
            of_qk = parameter.unflatten(0, (3, layer.attention.num_heads, -1))[:2]
            of_qk.copy_(of_qk[:, :, list(order)])


def _of_transformers(model: nn.Module, tower: Any) -> ViT:
    """Convert a ViT or DINOv2 of transformers."""
    if not any(base.__name__ in _TOWERS for base in type(tower).__mro__):
        rule = f"inflate supports these models of transformers: {', '.join(_TOWERS)}"
        raise ValueError(f"{rule}, got {type(tower).__name__}")
    state = tower.state_dict()
    if type(model).__name__ == _CLASSIFIER and isinstance(model.classifier, nn.Linear):
        state |= model.classifier.state_dict(prefix="classifier.")
    unused = re.compile(r"pooler\.|embeddings\.mask_token$")
    state = {name: tensor.detach().cpu() for name, tensor in state.items() if not unused.match(name)}
    config = tower.config
    return timm_vit.convert(state, num_heads=config.num_attention_heads, input_size=config.image_size)


def _set_eps(own: ViT, tower: Any) -> None:
    eps = (tower.layernorm if _is_of_transformers(tower) else tower.norm).eps
    own.arguments["norm_eps"] = eps
    for norm in own.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.eps = eps


def _check_same(tower: Any, own: ViT) -> None:
    """Raise ValueError if the converted ViT computes other features than the original model."""
    like = next(tower.parameters())
    x = torch.rand(1, own.embed.in_channels, *own.arguments["input_size"], generator=torch.Generator().manual_seed(0))
    modes = [(part, part.training) for part in tower.modules()]
    tower.eval()
    try:
        with torch.no_grad():
            if _is_of_transformers(tower):
                expected = tower(pixel_values=x.to(like)).last_hidden_state[:, 0]
            else:
                expected = tower.forward_head(tower.forward_features(x.to(like)), pre_logits=True)
            features, expected = own.features(x), expected.to(x)
    finally:
        for part, mode in modes:
            part.training = mode
    if features.shape != expected.shape:
        received = f"{tuple(expected.shape)} instead of {tuple(features.shape)}"
        raise ValueError(f"inflate needs a model whose features are those of its class token, got {received}")
    error = (features - expected).norm() / expected.norm()
    if not error < (1e-4 if like.dtype in (torch.float32, torch.float64) else 0.1):
        rule = "inflate needs a model equivalent to a ViT with exact GELU"
        raise ValueError(f"{rule}, got features of {type(tower).__name__} that differ by {error:.1%}")


def _integers(name: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    numbers = (value,) * count if isinstance(value, int) else tuple(value)
    if len(numbers) != count or min(numbers) < 1:
        raise ValueError(f"{name} must be 1 or more, one number or one per new axis = {count}, got {value}")
    return numbers


def _patches(embed: PatchEmbed, depths: tuple[int, ...], *, centred: bool) -> PatchEmbed:
    """Return the embedding of patches that extend over several slices."""
    channels, dim, patch = embed.in_channels, embed.proj.out_features, embed.patch_size
    made = PatchEmbed((*depths, *patch), channels, dim, num_axes=len(depths) + len(patch))
    made.to(embed.proj.weight).train(embed.training)
    flat = embed.proj.weight.detach().unflatten(1, (channels, *patch))  # (dim, channels, *patch)
    flat = flat.reshape(dim, channels, *(1,) * len(depths), *patch)
    if centred:
        full = flat.new_zeros(dim, channels, *depths, *patch)
        full[(slice(None), slice(None), *(slice(depth // 2, depth // 2 + 1) for depth in depths))] = flat
    else:
        full = (flat / math.prod(depths)).expand(dim, channels, *depths, *patch)
    with torch.no_grad():
        made.proj.weight.copy_(full.flatten(1))
        if embed.proj.bias is None:
            made.proj.register_parameter("bias", None)
        else:
            made.proj.bias.copy_(embed.proj.bias)
    return _learning_as(made, embed)


def _with_axes(encoding: Encoding, new: int, build: str | Callable[..., Encoding] | None) -> Encoding:
    """Return an encoding with new leading axes, whose generators are zero."""
    axes = encoding.num_axes + new
    name = _OF_AXES.get(type(encoding))
    if build is None and (name is not None or type(encoding) is NoEncoding):
        with torch.device("meta"):  # leaves the random state unchanged
            made = type(encoding)(**{**describe(encoding)["arguments"], "num_axes": axes})
        like = next(iter([*encoding.parameters(), *encoding.buffers()]))
        made.to_empty(device=like.device).to(like.dtype)
        state = {key: value.clone() for key, value in encoding.state_dict().items()}
        if name is not None:
            state[name] = torch.cat([state[name].new_zeros(new, *state[name].shape[1:]), state[name]])
        made.load_state_dict(state)
        return _learning_as(made.train(encoding.training), encoding)
    generators = encoding.generators().detach()
    family = _family(encoding) if build is None else _rotary(build)
    made = family(num_axes=axes, num_heads=encoding.num_heads, head_dim=encoding.head_dim).to(generators.device)
    made.set_generators(torch.cat([generators.new_zeros(new, *generators.shape[1:]), generators]))
    return made.train(encoding.training)


def _rotary(build: str | Callable[..., Encoding]) -> Callable[..., Encoding]:
    if not isinstance(build, str):
        return build
    choice = parse_encoding(build)
    if choice.absolute is not None or choice.bias is not None:
        raise ValueError(f"encoding must be a rotary encoding without table or bias, got {build!r}")
    return choice.rotary


def _family(encoding: Encoding) -> Callable[..., Encoding]:
    """Return a function that builds an encoding of any number of axes that represents the rotation of this one."""
    further = _further(encoding)
    kept = {name: further[name] for name in ("rotary_dim", "shared_heads") if name in further}
    if encoding.block_size == 2:
        return partial(MixedRoPE, **kept)
    if isinstance(encoding, ComRoPEAP):
        return partial(ComRoPELD, block_size=encoding.block_size, **kept)
    return partial(type(encoding), **further)


def _further(encoding: nn.Module) -> dict[str, Any]:
    """Return the constructor arguments that do not depend on the model, such as block_size."""
    known = describe(encoding)["arguments"]
    return {name: value for name, value in known.items() if name not in ("num_axes", "num_heads", "head_dim")}


def _repeated(part: nn.Module, ahead: tuple[int, ...]) -> Any:
    """Return a position table that repeats the original for every slice, or a bias for every pair of slices."""
    build: Callable[..., Any]
    with torch.no_grad():
        if isinstance(part, RelativePositionBias):
            build = partial(RelativePositionBias, num_heads=part.num_heads)
            table = part.table.repeat(math.prod(2 * size - 1 for size in ahead), 1)
        elif isinstance(part, LearnedAPE | SinusoidalAPE):
            build = partial(LearnedAPE, dim=part.dim)
            table = part(*part.sizes).reshape(*part.sizes, part.dim).repeat(*ahead, *(1,) * (len(part.sizes) + 1))
        else:
            raise ValueError(f"the position table must be LearnedAPE or SinusoidalAPE, got {type(part).__name__}")
    with torch.device("meta"):
        made = build(sizes=(*ahead, *part.sizes))
    made.table = nn.Parameter(table)
    return _learning_as(made.train(part.training), part)


def _learning_as(made: Any, source: nn.Module) -> Any:
    """Copy requires_grad from the source, by parameter name."""
    learned = {name: parameter.requires_grad for name, parameter in source.named_parameters()}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(learned.get(name, True))
    return made


def _steps(source: ViT, depths: tuple[int, ...], spacing: float | Sequence[float]) -> tuple[float, ...]:
    """Return the distance in position between neighbouring patches along each new axis."""
    patch, new = source.embed.patch_size, len(depths)
    given = [spacing] * new if isinstance(spacing, int | float) else list(spacing)
    voxels = given if len(given) == new + len(patch) else [*given, *(1.0,) * len(patch)]
    if len(voxels) != new + len(patch) or not all(0 < one < math.inf for one in voxels):
        rule = f"spacing must be above 0, one number, or the size of a voxel along each of {new + len(patch)} axes"
        raise ValueError(f"{rule}, got {spacing}")
    own = _spacing(source)
    # Positions per unit of length, averaged over the old axes.
    density = sum(step / (extent * voxel) for step, extent, voxel in zip(own, patch, voxels[new:], strict=True))
    return tuple(density / len(patch) * depth * voxel for depth, voxel in zip(depths, voxels[:new], strict=True))


def _spacing(source: ViT) -> list[float]:
    """Return the distance in position between neighbouring patches of an image of the training size."""
    return spaced(source.position_map, source.embed.lattice(source.arguments["input_size"]))["spacing"]


def _with_slices(source: ViT, depths: tuple[int, ...], steps: tuple[float, ...]) -> Callable[..., Tensor]:
    """Return the positions of the patches of a volume, whose slices have the positions of the source."""
    lattice, old, new = source.position_map, len(source.embed.patch_size), len(depths)
    if not isinstance(lattice, Lattice):
        return Stacked(lattice, steps)

    def ahead(name: str, first: Sequence[float]) -> tuple[float, ...]:
        return (*first, *per_axis(name, getattr(lattice, name), old))

    settings: dict[str, Any] = {"spacing": ahead("spacing", steps), "origin": ahead("origin", (0.0,) * new)}
    if lattice.unit is not None:
        own = _spacing(source)
        settings["spacing"] = (*(sum(own) / old,) * new, *own)
        settings["patch_size"] = (*depths, *source.embed.patch_size)
    if lattice.per != "one":
        rules = lattice.per if isinstance(lattice.per, tuple) else (lattice.per,) * old
        settings["per"] = (*("one",) * new, *(rule % old - old if isinstance(rule, int) else rule for rule in rules))
    if lattice.train_sizes is not None:
        settings["train_sizes"] = (*(1,) * new, *lattice.train_sizes)
    if lattice.periods is not None:
        settings["periods"] = (*(None,) * new, *lattice.periods)
    if isinstance(lattice.unit, tuple):
        settings["unit"] = (*(sum(lattice.unit) / old,) * new, *lattice.unit)
    for name in ("offset", "cell"):
        if getattr(lattice, name) != 0:
            settings[name] = ahead(name, (0.0,) * new)
    return replace(lattice, **settings)


def _choice(model: ViT) -> dict[str, Any]:
    """Return constructor arguments that rebuild the encodings; a name if one describes them fully."""
    encodings: list[Any] = list(model.encodings)
    parts = ["learned"] * (model.absolute is not None) + ["bias"] * bool(len(model.biases))
    name = _named(encodings[0])
    if name is not None and all(_named(one) == name for one in encodings):
        return {"encoding": "+".join([*parts, name]), "absolute": None, "bias": None}
    family: Callable[..., Encoding] = type(encodings[0])
    return {
        "encoding": partial(family, **_further(encodings[0])),
        "absolute": None if model.absolute is None else LearnedAPE,
        "bias": RelativePositionBias if len(model.biases) else None,
    }


def _named(encoding: Encoding) -> str | None:
    """Return the name that builds an equal encoding, or None if there is none."""
    name = _NAMES.get(type(encoding))
    if name is None or encoding.shared_heads:
        return None
    if "block_size" in describe(encoding)["arguments"]:
        name = f"{name}:{encoding.block_size}"
    with torch.device("meta"):
        again = parse_encoding(name).rotary(
            num_axes=encoding.num_axes, num_heads=encoding.num_heads, head_dim=encoding.head_dim
        )
    return name if (repr(again), again.interval) == (repr(encoding), encoding.interval) else None
