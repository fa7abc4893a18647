"""Adapters of `swap` for transformers' models with RoPE: vision encoders and text models.

Such a model has a rotary embedding module, which computes cos and sin `(tokens, channels)` from positions, and
attention layers that pass them to a function such as `apply_rotary_pos_emb(q, k, cos, sin)`. In a swapped model
positions are appended to cos as further channels, so that the model's own reordering of tokens (windows of Qwen2.5-VL)
applies to them too, and each layer's forward runs with that function replaced. Packed sequences, key caches and
FlashAttention work unchanged.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrope.integrations.own_rotation import (
    OwnRotation,
    exact,
    halves,
    interleaved,
    with_exact_frequencies,
)
from torchrope.integrations.rotary import Adapter, Replaced, Rotary, Site
from torchrope.integrations.transformers_refused import by_hand
from torchrope.integrations.transformers_saving import own_saving
from torchrope.integrations.transformers_tables import (
    FUNCTIONS,
    AppendLatticePositions,
    AppendPositions,
    RotatedForward,
    argument_of,
    function_of,
    own_forward,
    rotate_tokens_first,
    transposed,
)
from torchrope.lattice import Lattice
from torchrope.positions import grid
from torchrope.rotating import rotate

_TABLES = ("pos_embed", "position_embedding", "position_embeddings", "positional_embedding", "positional_embedding_vlm")
_CHANGING = ("dynamic", "longrope")  # types of rope whose frequencies depend on the length of the sequence


def rotating(model: nn.Module) -> list[Adapter]:
    """Return an adapter for each vision encoder and text model with RoPE inside a model.

    They are identified by structure, not by class: a tower is the smallest PreTrainedModel whose attention layers call
    one of `FUNCTIONS` and have a rotary embedding module.

    Raises:
        ValueError: a model that transforms q and k by something other than a rotation by positions.
    """
    towers = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [_kind(pairs[0])(tower, model, pairs) for tower in towers if (pairs := _pairs(tower))]


class RotaryLayer(NamedTuple):
    """An attention layer, and the rotary embedding module that computes its cosines and sines."""

    layer: Any
    rope: Any

    @property
    def kind(self) -> str | None:
        """The layer type if the rotary embedding has frequencies per type (Gemma 3, OLMo 3, ModernBERT), else None."""
        if hasattr(self.rope, "inv_freq"):
            return None
        kind: str = getattr(self.layer, "layer_type", None) or self.layer.config.layer_types[self.layer.layer_idx]
        return kind

    @property
    def inv_freq(self) -> Tensor:
        """Frequencies of the channel pairs, in radians per unit of position."""
        frequencies: Tensor = self._of_kind("inv_freq")
        return frequencies

    @property
    def scaling(self) -> float:
        """The factor on cos and sin (attention_scaling)."""
        return float(self._of_kind("attention_scaling", 1.0))

    @property
    def rope_type(self) -> str:
        """The rope_type of the frequencies in transformers."""
        named = getattr(self.rope, "rope_type", "default")
        return str(named if isinstance(named, str) else named[self.kind])

    def cos_sin(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the channels at positions."""
        cos, sin = self.rope(x, positions) if self.kind is None else self.rope(x, positions, self.kind)
        return cos, sin

    def _of_kind(self, name: str, *default: Any) -> Any:
        return getattr(self.rope, name if self.kind is None else f"{self.kind}_{name}", *default)


class RotatingAdapter(Adapter):
    """Adapter for a model whose attention layers take cos and sin as an argument.

    Attributes:
        num_axes: Coordinates of a token.
    """

    num_axes: int

    def __init__(self, tower: nn.Module, model: nn.Module, pairs: list[RotaryLayer]) -> None:
        super().__init__(tower)
        self.model = model
        self.pairs = pairs
        self._check()

    def tables(self) -> list[nn.Parameter]:
        named = self.tower.named_parameters()
        return [table for name, table in named if name.removesuffix(".weight").rpartition(".")[2] in _TABLES]

    def rotates(self) -> bool:
        return True

    def own_rotations(self) -> list[OwnRotation]:
        ropes = {pair.rope: with_exact_frequencies(pair.rope, self.tower._init_weights) for pair in self.pairs}
        return [self._own_rotation(pair._replace(rope=ropes[pair.rope])) for pair in self.pairs]

    def attention_layers(self) -> list[Any]:
        return [pair.layer for pair in self.pairs]

    def attach(self, rotary: Rotary) -> None:
        handles: list[Any] = rotary.handles
        ropes = {id(pair.rope): pair.rope for pair in self.pairs}.values()
        handles += [rope.register_forward_hook(self._placed(rotary), with_kwargs=True) for rope in ropes]
        for index, pair in enumerate(self.pairs):
            forward = RotatedForward(pair.layer, rotary, rotary.of_layer(index), self.num_axes)
            handles.append(Replaced(pair.layer, "forward", forward))
        handles += own_saving(self.model, self.tower)

    def _check(self) -> None:
        """Raise ValueError for a model of this structure that cannot be swapped."""

    def _placed(self, rotary: Rotary) -> Callable[..., Any]:
        """Return the forward hook of the rotary embedding that appends positions."""
        return AppendPositions(rotary, self.num_axes, axes_first=False)

    def _as_taken(self, positions: Tensor) -> Tensor:
        """Convert positions `(tokens, axes)` to the position_ids of the rotary embedding."""
        return positions

    def _own_rotation(self, pair: RotaryLayer) -> OwnRotation:
        if pair.rope_type in _CHANGING:
            rule = "init='model' needs frequencies that are the same at all lengths; init='zeros' replaces others"
            raise ValueError(f"{rule}, got {_name(self.tower)} with rope_type={pair.rope_type!r}")
        if pair.scaling != 1:
            rule = f"init='model' needs rotations without scaling, but rope_type={pair.rope_type!r} also scales q and k"
            hint = "load the model without it and apply YaRN by extend, or replace it by init='zeros'"
            raise ValueError(f"{rule}; {hint}, got {_name(self.tower)} with attention_scaling={pair.scaling:.6g}")
        for rotation in self._candidates(pair):
            if _matches(rotation, pair, self._as_taken):
                return rotation
        rule = "init='model' reads rotations of pairs of channels by positions times frequencies"
        raise ValueError(f"{rule}, got another of {_name(self.tower)}; init='zeros' and init='paper' replace it")

    def _candidates(self, pair: RotaryLayer) -> Iterator[OwnRotation]:
        """Yield candidate rotations: one for each channel layout that the tables are consistent with."""
        table, head_dim = self._frequencies(pair.rope), _head_dim(pair.layer)
        rotated = table.shape[-1]  # of (axes, rotated channels)
        if rotated > head_dim:
            return
        for paired in (halves(rotated), interleaved(rotated)):
            first, second = table[:, paired[0::2]], table[:, paired[1::2]]
            if torch.equal(first, second):
                yield OwnRotation(first.unsqueeze(1), (*paired, *range(rotated, head_dim)))

    @abstractmethod
    def _frequencies(self, rope: Any) -> Tensor:
        """Return the angle of each channel at one unit along each axis, `(axes, channels)`."""


class OfVision(RotatingAdapter):
    """Adapter for a vision encoder with positions (row, column): the Qwen-VL family, Pixtral.

    Attributes:
        grows: Whether images may be larger than the size the model was built for.
    """

    grows = True

    def __init__(self, tower: nn.Module, model: nn.Module, pairs: list[RotaryLayer]) -> None:
        self.num_axes = 3 if getattr(tower, "include_temporal", False) else 2
        super().__init__(tower, model, pairs)

    def sites(self) -> list[Site]:
        lattice = (*[1] * (self.num_axes - 2), *_lattice(self.tower.config))
        return [Site(_num_heads(layer), _head_dim(layer), lattice, self.grows) for layer, _ in self.pairs]

    def _check(self) -> None:
        if hasattr(self.tower, "class_pos_emb"):
            rule = "swap needs attention that rotates q and k by positions, but MLCD rotates a token by learned angles"
            raise ValueError(f"{rule}; {by_hand(_name(self.pairs[0].layer))}, got {_name(self.tower)}")

    def _frequencies(self, rope: Any) -> Tensor:
        units = torch.eye(self.num_axes, dtype=torch.float64)
        table: Tensor = rope.recomposition_frequencies(units.unsqueeze(-1) * exact(rope.inv_freq))
        return table.reshape(self.num_axes, -1)


class OfLlama4(OfVision):
    """Adapter for Llama 4's vision encoder: a complex table of one image size, positions from 1, class token last."""

    grows = False

    def _placed(self, rotary: Rotary) -> Callable[..., Any]:
        return AppendLatticePositions(rotary, _lattice(self.tower.config))

    def _own_rotation(self, pair: RotaryLayer) -> OwnRotation:
        theta, head_dim = self.tower.config.rope_parameters["rope_theta"], _head_dim(pair.layer)
        bands = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float64) / (head_dim // 2))
        frequencies = torch.block_diag(bands, bands).flip(0).unsqueeze(1)  # width has the first pairs
        rotation = OwnRotation(frequencies, interleaved(head_dim), Lattice(origin=1.0))
        rows = pair.rope.freqs_ci[:-1].squeeze(1).cpu()
        angles = rotation.lattice(*_lattice(self.tower.config), dtype=torch.float64) @ frequencies.squeeze(1)
        if rows.is_meta or not torch.allclose(rows, torch.polar(torch.ones_like(angles), angles).to(rows), atol=1e-3):
            raise ValueError(f"init='model' reads the table that {_name(self.tower)} was built with, got another")
        return rotation


class OfSam3(OfVision):
    """Adapter for SAM 3's image encoder, whose positions are in units of a window at every image size."""

    grows = False

    def sites(self) -> list[Site]:
        return [replace(site, lattice=(self.tower.config.window_size,) * 2) for site in super().sites()]


class OfDecoder(RotatingAdapter):
    """Adapter for a text model, whose tokens have one position each, or the three of M-RoPE: time, row, column.

    Keys are cached after rotation, as in the original model.
    """

    of_text = True

    def __init__(self, tower: nn.Module, model: nn.Module, pairs: list[RotaryLayer]) -> None:
        self.num_axes = 3 if hasattr(pairs[0].rope, "recomposition_frequencies") else 1
        super().__init__(tower, model, pairs)

    def sites(self) -> list[Site]:
        lattice = (self.tower.config.max_position_embeddings,) * self.num_axes
        return [Site(_num_heads(layer), _head_dim(layer), lattice) for layer, _ in self.pairs]

    def growth(self, factors: Sequence[float]) -> float:
        return max(factors)  # the three positions of a text token are equal

    def _placed(self, rotary: Rotary) -> Callable[..., Any]:
        return AppendPositions(rotary, self.num_axes, axes_first=self.num_axes == 3)

    def _as_taken(self, positions: Tensor) -> Tensor:
        return positions.mT if self.num_axes == 1 else positions.mT.unsqueeze(1)  # (1, tokens) or (axes, 1, tokens)

    def _candidates(self, pair: RotaryLayer) -> Iterator[OwnRotation]:
        if self.num_axes == 3:
            yield from super()._candidates(pair)
            return
        bands, head_dim = exact(pair.inv_freq).reshape(1, 1, -1), _head_dim(pair.layer)
        rotated = 2 * bands.shape[-1]
        if rotated <= head_dim:
            for paired in (halves(rotated), interleaved(rotated)):
                yield OwnRotation(bands, (*paired, *range(rotated, head_dim)))

    def _frequencies(self, rope: Any) -> Tensor:
        bands = exact(rope.inv_freq)
        units = torch.eye(3, dtype=torch.float64)[:, None, :, None] * bands  # (axes, 1, tokens, bands)
        table: Tensor = rope.recomposition_frequencies(units)
        return table.squeeze(0)


def _pairs(tower: PreTrainedModel) -> list[RotaryLayer]:
    """Return the attention layers of a tower with their rotary embeddings; empty if a layer has none."""
    inner = [module for module in tower.modules() if isinstance(module, PreTrainedModel) and module is not tower]
    taken = {id(part) for module in inner for part in module.modules()}
    layers = [part for part in tower.modules() if id(part) not in taken and _is_attention(part)]
    ropes = {id(layer): rope for layer, rope in _under(tower, None, taken) if _is_attention(layer)}
    if not layers or any(ropes.get(id(layer)) is None for layer in layers):
        return []
    return [RotaryLayer(layer, ropes[id(layer)]) for layer in layers]


def _under(module: nn.Module, rope: nn.Module | None, taken: set[int]) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield each submodule with the nearest rotary embedding among its siblings and those of its parents."""
    children = [child for child in module.children() if id(child) not in taken]
    rope = next((child for child in children if _makes_tables(child)), rope)
    for child in children:
        yield child, rope
        yield from _under(child, rope, taken)


def _is_attention(module: nn.Module) -> bool:
    if function_of(module) is None or not (hasattr(module, "head_dim") or hasattr(module, "head_size")):
        return False
    if not getattr(module, "use_rope", True):  # some layers of SmolLM3 do not rotate
        return False
    return argument_of(module) in inspect.signature(own_forward(module)).parameters


def _makes_tables(module: nn.Module) -> bool:
    if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
        return hasattr(module, "freqs_ci")
    arguments = list(inspect.signature(module.forward).parameters)
    return arguments in (["x", "position_ids"], ["x", "position_ids", "layer_type"])


def _kind(pair: RotaryLayer) -> type["RotatingAdapter"]:
    if hasattr(pair.rope, "freqs_ci"):
        return OfLlama4
    if function_of(pair.layer) == "apply_rotary_pos_emb_2d" and hasattr(pair.layer.config, "global_attn_indexes"):
        return OfSam3
    vision = hasattr(pair.rope, "recomposition_frequencies") and not getattr(pair.layer, "is_causal", False)
    return OfVision if vision else OfDecoder


def _matches(rotation: OwnRotation, pair: RotaryLayer, as_taken: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a candidate rotation gives the same scores as the layer's function, for random q and k."""
    positions = grid(*[4] * rotation.frequencies.shape[0])
    drawn = torch.Generator().manual_seed(0)
    shape = (1, 1, len(positions), _head_dim(pair.layer))
    query, key = torch.randn(2, *shape, generator=drawn)
    try:
        theirs = _rotated_by_layer(pair, query, key, as_taken(positions.long()))
    except (IndexError, RuntimeError):  # shapes that do not fit: another layout
        return False
    channels = list(rotation.channels)
    reading = rotation.at(positions.double())
    ours = rotate(query[..., channels].double(), key[..., channels].double(), reading, layout="bhtd")
    scores, expected = (q.double().squeeze() @ k.double().squeeze().mT for q, k in (ours, theirs))
    return bool((scores - expected).abs().max() < 1e-4 * expected.abs().max())


@torch.no_grad()
def _rotated_by_layer(pair: RotaryLayer, query: Tensor, key: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k `(1, 1, tokens, head_dim)`, rotated by the layer's own function."""
    name, device = function_of(pair.layer), pair.inv_freq.device
    assert name is not None
    own = own_forward(pair.layer).__globals__[name]
    cos, sin = (table.float().cpu() for table in pair.cos_sin(query.to(device), ids.to(device)))
    if FUNCTIONS[name] is rotate_tokens_first:
        query, key = own(transposed(query)[0], transposed(key)[0], cos, sin)
        return transposed(query), transposed(key)
    query, key = own(query, key, *(table.reshape(1, query.shape[-2], -1) for table in (cos, sin)))
    return query, key


def _head_dim(layer: Any) -> int:
    """Return the channels of a head that are passed to the rotation; Phi passes the rotated ones only."""
    dim: int = layer.head_size if hasattr(layer, "head_size") else getattr(layer, "rotary_ndims", layer.head_dim)
    return dim


def _num_heads(layer: Any) -> int:
    """Return the number of key heads of a layer."""
    if hasattr(layer, "num_kv_heads"):  # Falcon, which repeats them in one of its forms
        return int(layer.num_heads if layer.new_decoder_architecture else layer.num_kv_heads)
    names = ("num_heads", "num_attention_heads")
    own = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
    heads: int = layer.config.num_attention_heads if own is None else own
    return heads // getattr(layer, "num_key_value_groups", 1)


def _lattice(config: Any) -> tuple[int, int]:
    """Return the patches along each axis: of the position table, of the configured image size, else 32."""
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if getattr(config, "num_position_embeddings", None):
        return (math.isqrt(config.num_position_embeddings),) * 2
    if size is None or patch is None:
        return (32, 32)
    image, step = ((extent, extent) if isinstance(extent, int) else tuple(extent) for extent in (size, patch))
    return (image[0] // step[0], image[1] // step[1])


def _name(module: nn.Module) -> str:
    return type(module).__name__
