"""Where the positions of tokens come from in a model of another library.

Once per forward, from patches or coordinates (`FromPatches`, `FromCoordinates`); or for each layer, from its own input
(`FromLayer`) or from an argument in place of the tables of cosines and sines that it took (`FromArgument`).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.integrations.forward_state import ForwardState
from torchrope.integrations.rotary import Replaced
from torchrope.positions import grid

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Placed = tuple[Tensor, Sequence[int | Tensor]]
"""Lattice indices `([batch,] tokens, axes)`, and the tokens along each axis."""


@dataclass(frozen=True)
class FromPatches:
    """Positions of the patches of a lattice, computed once in a forward.

    Attributes:
        module: Name of the submodule that makes tokens of patches; "" is the model, before its forward.
        prefix: Leading tokens without position (class token, registers): their number, the name of the model's
            attribute with it, or a function of the model. They are at the origin.
        suffix: Number of trailing tokens without position.
        drop: Name of a submodule of timm that drops patches, if any.
        place: Function of the model, arguments and keyword arguments of the module and its output (None for "") that
            returns the `Placed` patches; by default those of an image from the number of its tokens.
    """

    module: str = ""
    prefix: int | str | Callable[[Any], int] = 0
    suffix: int = 0
    drop: str = ""
    place: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Placed | None] | None = None

    def attach(self, state: ForwardState, layers: Sequence[Any]) -> list[Any]:
        """Hook the functions that set positions into a model; return the handles that undo it."""
        tower, handles = state.tower, list[Any]()
        if self.module:
            module = tower.get_submodule(self.module)
            handles.append(module.register_forward_hook(_Enter(self, state), with_kwargs=True))
        else:
            handles.append(tower.register_forward_pre_hook(_Enter(self, state), with_kwargs=True))
        handles.append(tower.register_forward_hook(state.leave, always_call=True))
        dropout = getattr(tower, self.drop, None) if self.drop else None
        if type(dropout).__name__ in ("PatchDropout", "PatchDropoutWithIndices"):
            handles.append(Replaced(dropout, "forward", _KeepPositions(dropout, state, self.num_prefix(tower))))
        blocks = _blocks(tower, layers)
        handles.extend(block.register_forward_pre_hook(state.remember, with_kwargs=True) for block in blocks)
        parts = [part for block in blocks for part in block.children() if part not in blocks]
        handles.extend(part.register_forward_pre_hook(state.recall, with_kwargs=True) for part in parts)
        return handles + _begin_layers(state, layers, _BeginWithForward)

    def enter(self, state: ForwardState, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Set the positions of a forward."""
        place = self.place or partial(_patches_of_image, self.module)
        placed = place(state.tower, args, kwargs, output)
        if placed is not None:
            state.enter(*placed, self.num_prefix(state.tower), self.suffix)

    def num_prefix(self, tower: Any) -> int:
        """Return the number of leading tokens without position."""
        if isinstance(self.prefix, str):
            return int(getattr(tower, self.prefix))
        return self.prefix(tower) if callable(self.prefix) else self.prefix


@dataclass(frozen=True)
class FromCoordinates:
    """Positions that the caller passes to the model, as points of a cloud.

    Attributes:
        name: Name of the model's argument, `([batch,] tokens, axes)`.
        place: Its index as a positional argument.
        prefix: Leading tokens without position, as of `FromPatches`.
    """

    name: str
    place: int
    prefix: int | str | Callable[[Any], int] = 0

    def attach(self, state: ForwardState, layers: Sequence[Any]) -> list[Any]:
        """Hook the functions that set positions into a model; return the handles that undo it."""
        patches = FromPatches(prefix=self.prefix, place=partial(_coordinates, self.name, self.place))
        return patches.attach(state, layers)


@dataclass(frozen=True)
class FromLayer:
    """Positions that each layer computes from its own input, such as those in a window.

    Attributes:
        place: Function of a layer, its arguments and keyword arguments that returns the `Placed` tokens.
    """

    place: Callable[[Any, tuple[Any, ...], dict[str, Any]], Placed]

    def attach(self, state: ForwardState, layers: Sequence[Any]) -> list[Any]:
        """Hook the functions that set positions into a model; return the handles that undo it."""
        return _begin_layers(state, layers, partial(_BeginInLayer, self.place))


@dataclass(frozen=True)
class FromArgument:
    """Positions passed to each layer as an argument, in place of tables of cosines and sines.

    The model's own code selects, reorders and repeats them like the tables.

    Attributes:
        name: Name of the tables among the arguments of a layer.
        replace_tables: Makes a model pass positions in place of tables; returns handles that undo it.
        read: Returns the lattice indices of all tokens of a layer `(..., tokens, axes)` and the argument for the layer,
            from the argument received, the layer, and the number of tokens in the other (text) stream.
        other: Name of a layer's argument with the tokens of another stream, if any.
        streams: Returns whether a layer has separate norms for the other stream, whose tokens come first.
        exact: Whether cos and sin are computed by PyTorch, because angles are so large that kernels round differently.
        check: Raises ValueError for a layer that cannot rotate; called before each of its forwards.
    """

    name: str
    replace_tables: Callable[[Any], Sequence[Any]]
    read: Callable[[Any, Any, int], tuple[Tensor, Any]]
    other: str = ""
    streams: Callable[[Any], bool] | None = None
    exact: bool = False
    check: Callable[[Any], None] | None = None

    def attach(self, state: ForwardState, layers: Sequence[Any]) -> list[Any]:
        """Hook the functions that set positions into a model; return the handles that undo it."""
        names = [list(inspect.signature(type(layer).forward).parameters)[1:] for layer in layers]
        replaced = self.replace_tables(state.tower)
        return [
            *replaced,
            *_begin_layers(state, layers, lambda state, index: _BeginWithArgument(state, index, self, names[index])),
        ]


def argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an argument by keyword or position; None if absent."""
    return kwargs[name] if name in kwargs else args[place] if len(args) > place else None


def with_argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
    """Return the arguments with one value replaced."""
    if name not in kwargs and len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


class _Enter:
    """Forward hook of a submodule, or forward pre-hook of a model, that sets positions."""

    def __init__(self, source: FromPatches, state: ForwardState) -> None:
        self.source = source
        self.state = state

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        self.source.enter(self.state, args, kwargs, output)


class _BeginWithForward:
    """Forward pre-hook of a layer: rotate by the positions of the forward."""

    def __init__(self, state: ForwardState, index: int) -> None:
        self.state = state
        self.index = index

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.state.begin(self.index)


class _BeginInLayer(_BeginWithForward):
    """Forward pre-hook of a layer: rotate by the positions that a function computes from its input."""

    def __init__(self, place: Callable[..., Placed], state: ForwardState, index: int) -> None:
        super().__init__(state, index)
        self.place = place

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.state.begin(self.index, *self.place(layer, args, kwargs))


class _BeginWithArgument(_BeginWithForward):
    """Forward pre-hook of a layer: rotate by the positions that it receives, and pass the tables, if any, on."""

    def __init__(self, state: ForwardState, index: int, source: FromArgument, names: list[str]) -> None:
        super().__init__(state, index)
        self.source = source
        self.places = {name: names.index(name) if name in names else len(names) for name in (source.name, source.other)}

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = self.source
        received = argument(source.name, self.places[source.name], args, kwargs)
        if received is None:
            self.state.end(layer, args, None)  # an earlier call may have raised before its end
            return args, kwargs
        if source.check is not None:
            source.check(layer)
        other = argument(source.other, self.places[source.other], args, kwargs) if source.other else None
        others = other.shape[1] if isinstance(other, Tensor) else 0
        indices, passed = source.read(received, layer, others)
        has_streams = source.streams is not None and source.streams(layer)
        self.state.begin(self.index, indices, others=others if has_streams else 0, exact=source.exact)
        return with_argument(source.name, self.places[source.name], args, kwargs, passed)


class _KeepPositions:
    """Forward of timm's patch dropout that also selects positions."""

    def __init__(self, dropout: Any, state: ForwardState, num_prefix: int) -> None:
        self.dropout = dropout
        self.state = state
        self.num_prefix = num_prefix

    def __call__(self, tokens: Tensor) -> Any:
        from timm.layers import PatchDropout, PatchDropoutWithIndices

        tokens, kept = PatchDropoutWithIndices.forward(self.dropout, tokens)
        if kept is not None:
            self.state.keep(kept, self.num_prefix)
        return tokens if isinstance(self.dropout, PatchDropout) else (tokens, kept)


def _begin_layers(state: ForwardState, layers: Sequence[Any], begin: Callable[..., Any]) -> list[Any]:
    handles: list[Any] = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(begin(state, index), with_kwargs=True))
        handles.append(layer.register_forward_hook(state.end, always_call=True))
    return handles


def _blocks(tower: nn.Module, layers: Sequence[Any]) -> list[nn.Module]:
    """Return the elements of lists of modules that contain layers: gradient checkpointing runs them again."""
    parts = [
        part
        for module in tower.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for part in module.children()
    ]
    own = set(map(id, layers))
    return [part for part in dict.fromkeys(parts) if any(id(inner) in own for inner in part.modules())]


def _patches_of_image(name: str, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Placed:
    """Place the patches of an image, from the output of the module that made tokens of them."""
    image = args[0] if args else next(iter(kwargs.values()))
    sizes = image.shape[2:]
    if output.ndim == image.ndim:  # (batch, channels, *lattice)
        lattice = output.shape[2:]
    else:  # (batch, tokens, channels)
        patch = round((sizes.numel() / output.shape[1]) ** (1 / len(sizes)))
        lattice = [size // patch for size in sizes]
        if torch.Size(lattice).numel() != output.shape[1]:
            rule = f"the output of {name!r} must be (batch, channels, *lattice), or a token for each patch"
            raise ValueError(f"{rule}, or FromPatches needs place=, got {tuple(output.shape)} for {tuple(image.shape)}")
    return grid(*lattice, device=output.device), tuple(lattice)


def _coordinates(name: str, place: int, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Placed:
    coordinates: Tensor = argument(name, place, args, kwargs)
    return coordinates, (1,) * coordinates.shape[-1]
