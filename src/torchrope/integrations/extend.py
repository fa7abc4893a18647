"""`extend`: scale the frequencies of encodings and models for inputs larger than those trained on."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchrope.encodings import Encoding, NoEncoding
from torchrope.inference import require_unfrozen
from torchrope.integrations.families.shared import kind_of
from torchrope.integrations.family import Adapter, adapters
from torchrope.integrations.swap import swap
from torchrope.lattice import Lattice
from torchrope.models import Features, ViT
from torchrope.models.swin import Stage
from torchrope.positions import PerAxis
from torchrope.scaling import Method, Scaling, positive, scale_frequencies, scaling_of, yarn_temperature

Model = TypeVar("Model", bound=nn.Module)

# Attribute names of key projections and key norms in the attention layers of timm, transformers and diffusers; these
# may have a second norm, for text.
_KEYS = ("k_proj", "key", "k")
_FUSED = ("qkv", "qkv_proj")
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "qk_norm", "norm_k", "norm_added_k")


def extend(model: Model, factor: PerAxis, *, method: Method = "ntk", train_size: PerAxis | None = None) -> Model:
    """Copy a model, or an encoding, for inputs larger than those trained on, with frequencies scaled per axis.

    Nothing is trained, and at factor 1 outputs are the same. Position tables and biases are resampled by the model.
    A copy of a model with built-in RoPE gets "mixed" encodings that represent its rotation, as `swap` does. Layers that
    see only a window stay as they are, except in a Swin, where the factor is that of the windows: call the copy with a
    larger `window_size`. If a model normalises positions to the same interval at every size, as DINOv3 does,
    "interpolate" changes nothing, and a copy by another method is valid only for inputs larger by exactly `factor`.

    Args:
        model: An `Encoding`; a `ViT`, `Swin` or `Features`; a model that `swap` supports, swapped or with built-in
            RoPE; except for "yarn", any other that contains encodings.
        factor: How many times longer the input is than that of training, one number or one per axis.
        method: "interpolate", "ntk" or "yarn": the function on frequencies of this name. Or a function of frequencies
            `(axes, heads or 1, pairs)` and factor, such as `functools.partial(torchrope.scaling.yarn, train_size=13)`.
            Blocks larger than 2, but for `STRING`, have no frequencies and are only interpolated. In a model "yarn"
            also multiplies keys by the square of `yarn_temperature`, in the weights of their projection or norm.
        train_size: Extent of the training data in units of position, for "yarn"; in a model by default that of the size
            it was built for.

    Raises:
        ValueError: a model without rotation, with a vision tower and a text model, or swapped with keep_rotation=True;
            one for inputs of a fixed size; encodings of different numbers of axes, or without frequencies; an unknown
            method, a train_size that it requires or does not use; keys that cannot be scaled; an invalid factor.

    Example:
        >>> import torchrope as tr
        >>> encoding = tr.AxialRoPE(num_axes=2, num_heads=4, head_dim=16)
        >>> tr.extend(encoding, (1, 2)).frequencies[:, -2:].mul(1000).round().tolist()  # the slowest pairs
        [[32.0, 0.0], [0.0, 16.0]]
    """
    require_unfrozen("extend", model)
    if isinstance(model, Encoding):
        scaling = scaling_of(method, factor, train_size=train_size)
        extended = copy.deepcopy(model)
        scale_frequencies(extended, scaling, method)
        return extended
    larger = copy.deepcopy(model)
    if not _encodings(larger):
        _continue_own_rotation(larger)
    axes = sorted({encoding.num_axes for encoding in _encodings(larger)})
    if len(axes) > 1:
        rule = "all encodings must have the same number of axes; extend one part of the model at a time"
        raise ValueError(f"{rule}, got {kind_of(model)} with encodings of {' and '.join(map(str, axes))} axes")
    factors = positive("factor", factor, axes[0])
    parts = {part.encoding: part for part in _parts(larger, factors)}
    if not parts:
        rule = "model must support inputs of several sizes"
        raise ValueError(f"{rule}, got {kind_of(model)}, whose input size or windows are fixed")
    for encoding, part in parts.items():
        scaling = scaling_of(method, factors, train_size=train_size, extent=part.extent)
        scale_frequencies(encoding, partial(part.scaled, scaling), method)
    if method == "yarn":
        _scale_keys(parts.values(), yarn_temperature(max(part.growth for part in parts.values())) ** 2, larger)
    return larger


@dataclass(frozen=True)
class _Part:
    """An encoding of a model, with the layers and lattice that scaling methods need."""

    encoding: Encoding
    growth: float  # ratio of the numbers of tokens at the extended size and at the training size
    users: Sequence[Any] | None = None  # attention layers; None if unknown
    extent: tuple[float, ...] | None = None  # of the training data in units of position, per axis; None if unknown
    squeeze: Sequence[float] = (1.0,)  # ratio of distances of tokens at the training and the extended size, per axis

    def scaled(self, scaling: Scaling, frequencies: Tensor) -> Tensor:
        """Apply a scaling defined per token at the training size, for the positions of the larger input."""
        return scaling(frequencies) * frequencies.new_tensor(self.squeeze).reshape(-1, 1, 1)


def _encodings(model: nn.Module) -> list[Encoding]:
    """Return the rotary encodings of a model, without duplicates."""
    encodings = [module for module in model.modules() if isinstance(module, Encoding)]
    return [encoding for encoding in encodings if not isinstance(encoding, NoEncoding)]


def _continue_own_rotation(model: nn.Module) -> None:
    """Swap a model with built-in RoPE such that encodings represent its rotation."""
    towers = sorted(adapters(model), key=lambda adapter: not adapter.family.of_text)
    if len({adapter.family.of_text for adapter in towers}) > 1:
        names = {part: name for name, part in model.named_modules()}
        parts = " or ".join(f"model.{names[adapter.tower]}" for adapter in towers)
        rule = "extend needs one part of a model with a vision tower and a text model"
        raise ValueError(f"{rule}: pass {parts}, got {kind_of(model)}")
    try:
        swap(model, "mixed", init="model")
    except ValueError as error:
        rule = "model must rotate q and k, by encodings of torchrope or as swap supports"
        raise ValueError(f"{rule}; {error}") from None


def _parts(model: nn.Module, factors: Sequence[float]) -> Iterator[_Part]:
    """Yield every encoding of a lattice that can grow."""
    visited: set[nn.Module] = set()
    backbones: Any = [part for part in model.modules() if isinstance(part, Features)]
    windowed = {backbone.model: backbone.global_layers for backbone in backbones}
    swapped: dict[Any, Adapter] = {adapter.rotary: adapter for adapter in adapters(model)}
    for module in model.modules():
        if isinstance(module, ViT | Stage):
            sizes = module.window if isinstance(module, Stage) else module.embed.lattice(module.arguments["input_size"])
            attention = [layer.get_submodule("attention") for layer in module.layers]
            larger = [max(1, round(size * factor)) for size, factor in zip(sizes, factors, strict=True)]
            full = windowed.get(module) or range(1, len(attention) + 1)
            _require_one_per_layer(module.encodings, len(full) < len(attention), module)
            for index, encoding in enumerate(module.encodings):
                users = attention[index :: len(module.encodings)]
                if index + 1 in full:
                    yield _part(encoding, math.prod(factors), users, module.position_map, sizes, larger)
        elif module in swapped:
            yield from _parts_of_swapped(module, swapped[module], factors)
        else:  # or encodings of a part of a swapped model, whose layers are unknown
            continue
        visited.update(module.modules())
    for encoding in _encodings(model):
        if encoding not in visited:
            yield _Part(encoding, math.prod(factors))


def _parts_of_swapped(rotary: Any, adapter: Adapter, factors: Sequence[float]) -> Iterator[_Part]:
    if rotary.keep_rotation and adapter.rotates():
        rule = "extend scales the encodings of a swapped model"
        raise ValueError(f"{rule}, got keep_rotation=True, whose built-in rotation would remain unscaled")
    shapes, growth = adapter.shapes(), adapter.family.grown(factors)
    _require_one_per_layer(rotary.encodings, len({shape.grows for shape in shapes}) > 1, adapter.tower)
    for index, (encoding, lattice) in enumerate(zip(rotary.encodings, rotary.lattices, strict=True)):
        if shapes[index].grows:
            users, sizes = adapter.layers[index :: len(rotary.encodings)], shapes[index].lattice
            larger = [size * factor for size, factor in zip(sizes, factors, strict=True)]
            part = _part(encoding, growth, users, lattice, sizes, larger)
            yield part if shapes[index].sized else replace(part, extent=None)


def _require_one_per_layer(encodings: nn.ModuleList, is_windowed: bool, model: nn.Module) -> None:
    if len(encodings) == 1 and is_windowed:
        rule = "models with windowed layers must have an encoding for each layer"
        raise ValueError(f"{rule}, got one shared by all layers of a {kind_of(model)}")


def _part(encoding: Any, growth: float, users: Sequence[Any], lattice: Lattice, sizes: Any, larger: Any) -> _Part:
    """Describe an encoding of a lattice of tokens, whose positions may depend on its sizes."""
    if lattice.unit is not None:  # in mm at every size
        return _Part(encoding, growth, users)
    before, after = (lattice.spaced(*counts)["spacing"] for counts in (sizes, larger))
    extent = tuple(size * abs(step) for size, step in zip(sizes, before, strict=True))
    squeeze = [step / smaller if smaller else 1.0 for step, smaller in zip(before, after, strict=True)]
    return _Part(encoding, growth, users, extent, squeeze)


@torch.no_grad()
def _scale_keys(parts: Iterable[_Part], amount: float, model: nn.Module) -> None:
    """Multiply the keys, and therefore the scores, of attention layers; a bias computed from queries is unchanged."""
    norms: dict[Any, Any] = {}  # layers may share weights
    rows: dict[Tensor, slice] = {}
    for part in parts:
        if part.users is None:
            rule = "yarn also scales keys and needs a ViT, a Swin or a model that swap supports"
            way = "functools.partial(torchrope.scaling.yarn, train_size=...) scales frequencies only"
            raise ValueError(f"{rule}; {way}, got {kind_of(model)}")
        for layer in part.users:
            if getattr(layer, "logit_scale", None) is not None:
                rule = "method must not be 'yarn' for cosine attention, which normalises keys"
                raise ValueError(f"{rule}, got {kind_of(layer)}")
            norms_of_keys = [getattr(layer, name, None) for name in _KEY_NORMS]
            norms_of_keys = [norm for norm in norms_of_keys if not isinstance(norm, nn.Identity | None)]
            norms |= dict.fromkeys(norms_of_keys, layer)
            if not norms_of_keys:
                projection, keys = _projection_of_keys(layer)
                rows |= dict.fromkeys(projection.parameters(), keys)
    for norm, layer in norms.items():
        _scale_norm(norm, amount, layer)
    for parameter, keys in rows.items():
        parameter[keys] *= amount


def _scale_norm(norm: Any, amount: float, layer: Any) -> None:
    """Multiply the output of a norm by scaling its parameters; raise if the output is not linear in them."""
    weight, linear = getattr(norm, "weight", None), False
    if weight is not None:
        probe = torch.linspace(-1, 2, weight.numel()).to(weight).view_as(weight)
        before = norm.forward(probe)  # without hooks, which rotate
        for parameter in norm.parameters():
            parameter *= 2
        linear = torch.allclose(norm.forward(probe), 2 * before, rtol=1e-2)
    if not linear:
        rule = "yarn scales keys by the weights of their norm, whose output must be linear in its weights"
        raise ValueError(f"{rule}, got {kind_of(norm)} in {kind_of(layer)}")
    for parameter in norm.parameters():
        parameter *= amount / 2


def _projection_of_keys(layer: Any) -> tuple[Any, slice]:
    """Return the linear layer that computes keys, and the slice of its outputs that are keys."""
    names = (*_KEYS, *_FUSED, "in_proj")
    name = next((name for name in names if isinstance(getattr(layer, name, None), nn.Linear)), None)
    if name is None:
        rule = f"yarn needs keys computed by a linear layer named {', '.join(names[:-1])} or in_proj"
        raise ValueError(f"{rule}, got {kind_of(layer)} without")
    projection = getattr(layer, name)
    if name in _KEYS:
        return projection, slice(None)
    if name in _FUSED:
        heads = getattr(layer, "num_key_value_heads", None)  # grouped-query attention: fewer key heads than query heads
        keys = projection.out_features // 3 if heads is None else heads * layer.head_dim
        return projection, slice(-2 * keys, -keys)
    mlp, queries, keys, _ = layer.in_split
    return projection, slice(mlp + queries, mlp + queries + keys)
