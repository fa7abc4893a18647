"""`swap` for models of transformers that rotate q and k by tables of cosines and sines: vision towers, text models.

Such a model has a module that makes two tables from the positions of tokens, `(tokens, channels)` each, and attention
layers that hand them to a function beside them, such as `apply_rotary_pos_emb(q, k, cos, sin)`. After a swap positions
travel as further columns of the first table, through whatever a tower does to its tables (Qwen2.5-VL sorts them into
windows), and each layer runs its own forward with another function in the place of theirs. What comes behind, such as
packed sequences, a cache of keys or FlashAttention, is the model's own.
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

from torchrope.integrations.own_rotation import Lattice, OwnRotation, exact, halves, interleaved
from torchrope.integrations.rotary import Adapter, Replaced, Rotary, Site
from torchrope.integrations.transformers_refused import by_hand
from torchrope.integrations.transformers_saving import own_saving
from torchrope.integrations.transformers_tables import (
    FUNCTIONS,
    Placed,
    PlacedOnLattice,
    Rotated,
    argument_of,
    function_of,
    own_forward,
    swapped,
    tokens_first,
)
from torchrope.ops import rotate
from torchrope.positions import grid

_TABLES = ("pos_embed", "position_embedding", "position_embeddings", "positional_embedding", "positional_embedding_vlm")
_CHANGING = ("dynamic", "longrope")  # types of rope whose frequencies depend on the length of the sequence


def rotating(model: nn.Module) -> list[Adapter]:
    """The vision towers and text models inside a model that rotate.

    They are found by their parts, not by name: a tower is the smallest model of transformers that holds attention
    layers which call one of `FUNCTIONS`, and for each of them a module that makes tables from positions.

    Raises:
        ValueError: a model that transforms q and k by something other than a rotation by positions.
    """
    towers = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [_kind(pairs[0])(tower, model, pairs) for tower in towers if (pairs := _pairs(tower))]


class Pair(NamedTuple):
    """An attention layer, and the module that makes the tables which it gets."""

    layer: Any
    rope: Any

    @property
    def kind(self) -> str | None:
        """Which kind of layer it is, where one module makes tables for several kinds: Gemma 3, OLMo 3, ModernBERT."""
        if hasattr(self.rope, "inv_freq"):
            return None
        kind: str = getattr(self.layer, "layer_type", None) or self.layer.config.layer_types[self.layer.layer_idx]
        return kind

    @property
    def inv_freq(self) -> Tensor:
        """Frequencies of its pairs, radians per unit of position."""
        frequencies: Tensor = self._of_kind("inv_freq")
        return frequencies

    @property
    def scaling(self) -> float:
        """What its tables are multiplied by."""
        return float(self._of_kind("attention_scaling", 1.0))

    @property
    def rope_type(self) -> str:
        """Where its frequencies come from, by their name in transformers."""
        named = getattr(self.rope, "rope_type", "default")
        return str(named if isinstance(named, str) else named[self.kind])

    def tables(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of its channels at positions."""
        cos, sin = self.rope(x, positions) if self.kind is None else self.rope(x, positions, self.kind)
        return cos, sin

    def _of_kind(self, name: str, *default: Any) -> Any:
        return getattr(self.rope, name if self.kind is None else f"{self.kind}_{name}", *default)


class OfTables(Adapter):
    """A model whose layers get tables of cosines and sines made from positions.

    Attributes:
        num_axes: Coordinates of a token.
    """

    num_axes: int

    def __init__(self, tower: nn.Module, model: nn.Module, pairs: list[Pair]) -> None:
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
        return [self._own_rotation(pair) for pair in self.pairs]

    def _layers(self) -> list[Any]:
        return [pair.layer for pair in self.pairs]

    def attach(self, rotary: Rotary) -> None:
        handles: list[Any] = rotary.handles
        ropes = {id(pair.rope): pair.rope for pair in self.pairs}.values()
        handles += [rope.register_forward_hook(self._placed(rotary), with_kwargs=True) for rope in ropes]
        for index, pair in enumerate(self.pairs):
            forward = Rotated(pair.layer, rotary, rotary.of_layer(index), self.num_axes)
            handles.append(Replaced(pair.layer, "forward", forward))
        handles += own_saving(self.model, self.tower)

    def _check(self) -> None:
        """Refuse what has these parts and cannot be swapped."""

    def _placed(self, rotary: Rotary) -> Callable[..., Any]:
        """What stands behind the module that makes tables."""
        return Placed(rotary, self.num_axes, axes_first=False)

    def _as_taken(self, positions: Tensor) -> Tensor:
        """Positions `(tokens, axes)` as the module that makes tables takes them."""
        return positions

    def _own_rotation(self, pair: Pair) -> OwnRotation:
        if pair.rope_type in _CHANGING:
            rule = "init='own' continues frequencies that are the same at all lengths; init='zeros' replaces others"
            raise ValueError(f"{rule}, got {_name(self.tower)} with rope_type={pair.rope_type!r}")
        if pair.scaling != 1:
            rule = f"init='own' continues rotations, and rope_type={pair.rope_type!r} stretches q and k besides"
            ways = "extend gives a model without it YaRN; init='zeros' replaces it"
            raise ValueError(f"{rule}; {ways}, got {_name(self.tower)} with attention_scaling={pair.scaling:.6g}")
        for rotation in self._readings(pair):
            if _explains(rotation, pair, self._as_taken):
                return rotation
        rule = "init='own' reads rotations of pairs of channels by positions times frequencies"
        raise ValueError(f"{rule}, got another of {_name(self.tower)}; init='zeros' and init='paper' replace it")

    def _readings(self, pair: Pair) -> Iterator[OwnRotation]:
        """What the tables of a layer may mean: each way in which channels may be paired."""
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
        """Angles of each channel one unit along each axis, `(axes, channels)`."""


class OfVision(OfTables):
    """A vision tower whose tables are made from rows and columns: the Qwen-VL family, Pixtral.

    Attributes:
        grows: Whether it takes images larger than those it was built for.
    """

    grows = True

    def __init__(self, tower: nn.Module, model: nn.Module, pairs: list[Pair]) -> None:
        self.num_axes = 3 if getattr(tower, "include_temporal", False) else 2
        super().__init__(tower, model, pairs)

    def sites(self) -> list[Site]:
        lattice = (*[1] * (self.num_axes - 2), *_lattice(self.tower.config))
        return [Site(_num_heads(layer), _head_dim(layer), lattice, self.grows) for layer, _ in self.pairs]

    def _check(self) -> None:
        if hasattr(self.tower, "class_pos_emb"):
            rule = "swap puts in rotations of q and k by positions, and MLCD's class token is rotated by learned angles"
            raise ValueError(f"{rule}; {by_hand(_name(self.pairs[0].layer))}, got {_name(self.tower)}")

    def _frequencies(self, rope: Any) -> Tensor:
        units = torch.eye(self.num_axes, dtype=torch.float64)
        table: Tensor = rope.recomposition_frequencies(units.unsqueeze(-1) * exact(rope.inv_freq))
        return table.reshape(self.num_axes, -1)


class OfLlama4(OfVision):
    """Llama 4's vision tower: complex numbers for the patches of one size, counted from 1, and a class token behind."""

    grows = False

    def _placed(self, rotary: Rotary) -> Callable[..., Any]:
        return PlacedOnLattice(rotary, _lattice(self.tower.config))

    def _own_rotation(self, pair: Pair) -> OwnRotation:
        theta, head_dim = self.tower.config.rope_parameters["rope_theta"], _head_dim(pair.layer)
        bands = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float64) / (head_dim // 2))
        frequencies = torch.block_diag(bands, bands).flip(0).unsqueeze(1)  # width has the first pairs
        rotation = OwnRotation(frequencies, interleaved(head_dim), Lattice(origin=1.0))
        rows = pair.rope.freqs_ci[:-1].squeeze(1).cpu()
        angles = rotation.lattice(*_lattice(self.tower.config), dtype=torch.float64) @ frequencies.squeeze(1)
        if rows.is_meta or not torch.allclose(rows, torch.polar(torch.ones_like(angles), angles).to(rows), atol=1e-3):
            raise ValueError(f"init='own' reads the table that {_name(self.tower)} was built with, got another")
        return rotation


class OfSam3(OfVision):
    """SAM 3's image tower: positions are in units of a window in all layers, whatever the size it was built for."""

    grows = False

    def sites(self) -> list[Site]:
        return [replace(site, lattice=(self.tower.config.window_size,) * 2) for site in super().sites()]


class OfDecoder(OfTables):
    """A text model. Its tokens have one position each, or the three of M-RoPE: time, row, column.

    Keys go into its cache rotated, as they did before.
    """

    of_text = True

    def __init__(self, tower: nn.Module, model: nn.Module, pairs: list[Pair]) -> None:
        self.num_axes = 3 if hasattr(pairs[0].rope, "recomposition_frequencies") else 1
        super().__init__(tower, model, pairs)

    def sites(self) -> list[Site]:
        lattice = (self.tower.config.max_position_embeddings,) * self.num_axes
        return [Site(_num_heads(layer), _head_dim(layer), lattice) for layer, _ in self.pairs]

    def growth(self, factors: Sequence[float]) -> float:
        return max(factors)  # the three positions of a word grow together

    def _placed(self, rotary: Rotary) -> Callable[..., Any]:
        return Placed(rotary, self.num_axes, axes_first=self.num_axes == 3)

    def _as_taken(self, positions: Tensor) -> Tensor:
        return positions.mT if self.num_axes == 1 else positions.mT.unsqueeze(1)  # (1, tokens) or (axes, 1, tokens)

    def _readings(self, pair: Pair) -> Iterator[OwnRotation]:
        if self.num_axes == 3:
            yield from super()._readings(pair)
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


def _pairs(tower: PreTrainedModel) -> list[Pair]:
    """The attention layers of a tower and what makes their tables; none where nothing does for one of them."""
    inner = [module for module in tower.modules() if isinstance(module, PreTrainedModel) and module is not tower]
    taken = {id(part) for module in inner for part in module.modules()}
    layers = [part for part in tower.modules() if id(part) not in taken and _is_attention(part)]
    ropes = {id(layer): rope for layer, rope in _under(tower, None, taken) if _is_attention(layer)}
    if not layers or any(ropes.get(id(layer)) is None for layer in layers):
        return []
    return [Pair(layer, ropes[id(layer)]) for layer in layers]


def _under(module: nn.Module, rope: nn.Module | None, taken: set[int]) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Each part of a module with the nearest module beside or above it that makes tables."""
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


def _kind(pair: Pair) -> type["OfTables"]:
    if hasattr(pair.rope, "freqs_ci"):
        return OfLlama4
    if function_of(pair.layer) == "apply_rotary_pos_emb_2d" and hasattr(pair.layer.config, "global_attn_indexes"):
        return OfSam3
    vision = hasattr(pair.rope, "recomposition_frequencies") and not getattr(pair.layer, "is_causal", False)
    return OfVision if vision else OfDecoder


def _explains(rotation: OwnRotation, pair: Pair, as_taken: Callable[[Tensor], Tensor]) -> bool:
    """Whether a reading gives the scores that the layer's own function and tables give, of q and k drawn at random."""
    positions = grid(*[4] * rotation.frequencies.shape[0])
    drawn = torch.Generator().manual_seed(0)
    shape = (1, 1, len(positions), _head_dim(pair.layer))
    query, key = torch.randn(2, *shape, generator=drawn)
    try:
        theirs = _turned_by_own(pair, query, key, as_taken(positions.long()))
    except (IndexError, RuntimeError):  # shapes that do not fit: another layout
        return False
    channels = list(rotation.channels)
    reading = rotation.at(positions.double())
    ours = rotate(query[..., channels].double(), key[..., channels].double(), reading, layout="bhtd")
    scores, expected = (q.double().squeeze() @ k.double().squeeze().mT for q, k in (ours, theirs))
    return bool((scores - expected).abs().max() < 1e-4 * expected.abs().max())


@torch.no_grad()
def _turned_by_own(pair: Pair, query: Tensor, key: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """q and k `(1, 1, tokens, head_dim)`, rotated by the layer's own function."""
    name, device = function_of(pair.layer), pair.inv_freq.device
    assert name is not None
    own = own_forward(pair.layer).__globals__[name]
    cos, sin = (table.float().cpu() for table in pair.tables(query.to(device), ids.to(device)))
    if FUNCTIONS[name] is tokens_first:
        query, key = own(swapped(query)[0], swapped(key)[0], cos, sin)
        return swapped(query), swapped(key)
    query, key = own(query, key, *(table.reshape(1, query.shape[-2], -1) for table in (cos, sin)))
    return query, key


def _head_dim(layer: Any) -> int:
    """Channels of a head that are passed to the rotation; Phi passes the rotated ones only."""
    dim: int = layer.head_size if hasattr(layer, "head_size") else getattr(layer, "rotary_ndims", layer.head_dim)
    return dim


def _num_heads(layer: Any) -> int:
    """Its key heads."""
    if hasattr(layer, "num_kv_heads"):  # Falcon, which repeats them in one of its forms
        return int(layer.num_heads if layer.new_decoder_architecture else layer.num_kv_heads)
    names = ("num_heads", "num_attention_heads")
    own = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
    heads: int = layer.config.num_attention_heads if own is None else own
    return heads // getattr(layer, "num_key_value_groups", 1)


def _lattice(config: Any) -> tuple[int, int]:
    """Patches along each axis at the size a tower was built for, or of its table; of towers for any size, 32."""
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if getattr(config, "num_position_embeddings", None):
        return (math.isqrt(config.num_position_embeddings),) * 2
    if size is None or patch is None:
        return (32, 32)
    rows, columns = ((extent, extent) if isinstance(extent, int) else tuple(extent) for extent in (size, patch))
    return (rows[0] // columns[0], rows[1] // columns[1])


def _name(module: nn.Module) -> str:
    return type(module).__name__
