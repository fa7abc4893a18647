"""Models that hand tables of cosines and sines to their attention layers, which then get positions in their place.

Such a model makes the tables once per call, by a module or in its caller, and hands them on as arguments. A swapped
model hands on positions as the same arguments, so that gradient checkpointing, compilation and patch dropout go on
working. A layer makes its rotation of them and turns q and k behind their norms; the rest of the layer, which then gets
no table, is as before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchrope.integrations.own_rotation import OwnRotation, exact, halves, interleaved
from torchrope.integrations.rotary import Adapter, Rotary, Site
from torchrope.ops import rotate_one
from torchrope.rotations import Planar, Rotation

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """How one family of models rotates.

    Attributes:
        layers: Attention layers that rotate, in order: the name of a list of blocks, and of the layer in a block.
        heads: Key heads of a tower, and channels of a head.
        frequencies: Of a tower, `(axes, heads or 1, pairs)`, radians per unit of its positions.
        divert: Makes a tower hand on positions in the place of tables; what is to be removed again.
        tokens: Positions of all tokens of a layer `(..., tokens, axes)`, from what came in the place of its tables, the
            layer, and the number of tokens in the other stream (the text's). Those of a stream with norms of its own
            come first.
        argument: Name of the tables among the arguments of a layer, and their place where they come without a name.
        norms: Names of the norms of q and k, and of those of the other stream's, where a layer has some.
        heads_first: Whether norms get `(batch, heads, tokens, head_dim)`, and not tokens before heads.
        across_halves: Whether a tower pairs channels j and j + head_dim / 2, and not neighbours.
        lattice: Tokens along each axis at the size that a tower was built for, None where it does not know.
        tables: Position tables that a tower has beside its rotation.
        coarse: Whether angles are so large that float32 rounds them visibly, such as LTX's of up to 15,708 radians by
            5e-4. The layers then take cosines of angles that PyTorch multiplied, rounded as the model's own; kernels
            round them otherwise, and outputs would differ by 4e-5 of their spread and more.
    """

    layers: tuple[tuple[str, str], ...]
    heads: Callable[[Any], tuple[int, int]]
    frequencies: Callable[[Any], Tensor]
    divert: Callable[[Any], Sequence[Any]]
    tokens: Callable[[Any, Any, int], Tensor]
    argument: tuple[str, int]
    norms: tuple[str, ...] = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    heads_first: bool = False
    across_halves: Callable[[Any], bool] = lambda tower: False
    lattice: Callable[[Any], tuple[int, ...]] | None = None
    tables: Callable[[Any], list[nn.Parameter]] = lambda tower: []
    coarse: bool = False


class OfTables(Adapter):
    """A model whose attention layers get positions as the argument that was tables."""

    keeps_rotation = False

    def __init__(self, tower: nn.Module, family: Family) -> None:
        super().__init__(tower)
        self.family = family

    def sites(self) -> list[Site]:
        heads, head_dim = self.family.heads(self.tower)
        lattice = None if self.family.lattice is None else self.family.lattice(self.tower)
        unknown = (1,) * len(self.family.frequencies(self.tower))
        return [Site(heads, head_dim, lattice or unknown, sized=lattice is not None) for _ in self._layers()]

    def tables(self) -> list[nn.Parameter]:
        return self.family.tables(self.tower)

    def rotates(self) -> bool:
        return True

    def own_rotations(self) -> list[OwnRotation]:
        _, head_dim = self.family.heads(self.tower)
        order = halves(head_dim) if self.family.across_halves(self.tower) else interleaved(head_dim)
        rotation = OwnRotation(exact(self.family.frequencies(self.tower)), order)
        return [rotation for _ in self._layers()]

    def attach(self, rotary: Rotary) -> None:
        handles: list[Any] = rotary.handles
        handles.extend(self.family.divert(self.tower))
        for index, layer in enumerate(self._layers()):
            turn = Turn(rotary, rotary.of_layer(index), self.family)
            handles.append(layer.register_forward_pre_hook(turn.begin, with_kwargs=True))
            handles.append(layer.register_forward_hook(turn.end))
            own, others = _norms(layer, self.family)
            handles.extend(norm.register_forward_hook(turn.turned) for norm in own)
            handles.extend(norm.register_forward_hook(turn.turned_of_other_stream) for norm in others)

    def _layers(self) -> list[Any]:
        layers = [getattr(block, name) for blocks, name in self.family.layers for block in getattr(self.tower, blocks)]
        for layer in layers:
            _check_can_rotate(layer, self.family)
        return layers


class Turn:
    """Rotate q and k of one layer by the positions that come in the place of its tables."""

    def __init__(self, rotary: Rotary, index: int, family: Family) -> None:
        self.rotary = rotary
        self.index = index
        self.family = family
        self.rotation: Rotation | None = None  # of the tokens of the present call
        self.of_other_stream: Rotation | None = None  # where it has norms of its own

    def begin(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Before the layer: make its rotation, and leave the layer itself no table."""
        came = argument(*self.family.argument, args, kwargs)
        if came is None:
            return args, kwargs
        _check_can_rotate(layer, self.family)
        other = argument("encoder_hidden_states", 1, args, kwargs)
        others = other.shape[1] if isinstance(other, Tensor) else 0
        positions = self.rotary.placed(self.index, self.family.tokens(came, layer, others))
        # One rotation for both streams: their q and k meet in one score, which leaves out a basis that both share.
        rotation = self.rotary.encodings[self.index](positions)
        if self.family.coarse and isinstance(rotation, Planar):
            rotation = rotation.tabulated()
        _, of_others = _norms(layer, self.family)
        self.rotation, self.of_other_stream = rotation, None
        if of_others:
            self.rotation, self.of_other_stream = rotation[..., others:], rotation[..., :others]
        return with_argument(*self.family.argument, args, kwargs, None)

    def end(self, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        """Behind the layer: leave nothing of this call."""
        self.rotation = self.of_other_stream = None

    def turned(self, norm: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor:
        """Behind the norm of q or k."""
        return self._turned(x, self.rotation)

    def turned_of_other_stream(self, norm: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor:
        """Behind the norm of q or k of the other stream."""
        return self._turned(x, self.of_other_stream)

    def _turned(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is None:
            return x
        if x.ndim == 3:  # (batch, tokens, heads head_dim)
            return self._turned(x.unflatten(-1, (-1, rotation.head_dim)), rotation).flatten(2)
        layout = "bhtd" if self.family.heads_first else "bthd"
        return rotate_one(self.rotary.in_pairs(x, self.index), rotation, layout=layout, scores_only=True)


def argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument by its name, or by its place; None where it is not given."""
    return kwargs[name] if name in kwargs else args[place] if len(args) > place else None


def with_argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
    """Arguments with another value of one of them."""
    if name not in kwargs and len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _norms(layer: Any, family: Family) -> tuple[list[Any], list[Any]]:
    """Those of q and k, and those of the other stream's, where it has some."""
    norms = [getattr(layer, name, None) for name in family.norms]
    return norms[:2], [norm for norm in norms[2:] if norm is not None]


def _check_can_rotate(layer: Any, family: Family) -> None:
    for name in family.norms[:2]:
        if getattr(layer, name, None) is None:
            raise ValueError(f"swap rotates q and k behind their norms, got a {type(layer).__name__} without {name}")
    processor = getattr(layer, "processor", None)
    if hasattr(processor, "to_k_ip"):
        rule = "swap rotates q behind its norm, where an IP-Adapter takes it unrotated: unload the adapter"
        raise ValueError(f"{rule}, got {type(processor).__name__}")
