"""Positions and rotations in the layers of transformers' models that rotate by tables of cos and sin.

Positions travel as further columns of the first table, and each layer runs its own forward with another function in
the place of the one that rotates.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torchrope.integrations.rotary import OrderedRotation, Rotary


class Placed:
    """Behind the module that makes tables: positions become further columns of the first one.

    Each encoding that finds tokens elsewhere has columns of its own.

    Attributes:
        num_axes: Coordinates of a token.
        axes_first: Whether positions come as `(axes, batch, tokens)`, otherwise `(tokens, axes)` or `(batch, tokens)`.
    """

    def __init__(self, rotary: Rotary, num_axes: int, *, axes_first: bool) -> None:
        self.rotary = rotary
        self.num_axes = num_axes
        self.axes_first = axes_first

    def __call__(
        self, rope: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        ids = ids.movedim(0, -1) if self.axes_first else ids
        ids = ids.reshape(*tables[0].shape[:-1], self.num_axes).to(tables[0].device)
        return widened(tables, self.rotary.positions_at(ids, [1] * self.num_axes), self.rotary)


class PlacedOnLattice:
    """Behind Llama 4's table of complex numbers: two real ones, with the positions of patches, then a class token."""

    def __init__(self, rotary: Rotary, sizes: tuple[int, ...]) -> None:
        self.rotary = rotary
        self.sizes = sizes

    def __call__(self, rope: nn.Module, args: Any, kwargs: dict[str, Any], table: Tensor) -> tuple[Tensor, Tensor]:
        placed = [pad(where, (0, 0, 0, 1)) for where in self.rotary.positions(self.sizes, device=table.device)]
        cos_sin: Any = torch.view_as_real(table.squeeze(1)).unbind(-1)
        return widened(cos_sin, placed, self.rotary)


class Rotated:
    """The forward of an attention layer, with q and k rotated by an encoding."""

    def __init__(self, layer: Any, rotary: Rotary, index: int, num_axes: int) -> None:
        self.layer = layer
        self.rotary = rotary
        self.index = index
        self.num_axes = num_axes
        self.function = rotated_forward(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = argument_of(self.layer)
        if name in kwargs:
            kwargs = {**kwargs, name: self.with_rotation(kwargs[name])}
        else:
            at = own_forward(self.layer).__code__.co_varnames.index(name) - 1  # without self
            args = (*args[:at], self.with_rotation(args[at]), *args[at + 1 :])
        return self.function(self.layer, *args, **kwargs)

    def with_rotation(self, tables: tuple[Tensor, Tensor]) -> tuple["TableRotation", Tensor]:
        """Replace the first of the layer's tables by its rotation."""
        positions, own = narrowed(tables, self.rotary, self.index, self.num_axes)
        rotation = self.rotary.ordered_rotation(self.index, positions)
        return TableRotation(rotation, own if self.rotary.keep_rotation else None), tables[1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "function"}  # is not pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.function = rotated_forward(self.layer)


class TableRotation(NamedTuple):
    """The rotation of a layer, and its own tables if its own rotation is kept."""

    rotate: OrderedRotation
    own: tuple[Tensor, Tensor] | None


def widened(tables: tuple[Tensor, Tensor], placed: list[Tensor], rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Tables of cosines and sines `(..., channels)`, the first with the positions of each lattice behind it."""
    return torch.cat([tables[0], *(placed[index] for index in _distinct(rotary))], dim=-1), tables[1]


def narrowed(
    tables: tuple[Tensor, Tensor], rotary: Rotary, index: int, num_axes: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The positions of an encoding among columns of the first table, and the tables as they were."""
    distinct = _distinct(rotary)
    cos, sin = tables
    channels = cos.shape[-1] - len(distinct) * num_axes
    start = channels + distinct.index(rotary.alike[index]) * num_axes
    return cos[..., start : start + num_axes], (cos[..., :channels].to(sin.dtype), sin)


def heads_first(
    own: Callable[..., Any], query: Tensor, key: Tensor, cos: TableRotation, sin: Any, **kwargs: Any
) -> Any:
    """In the place of a function of q and k `(batch, heads, tokens, head_dim)`."""
    if cos.own is not None:
        query, key = own(query, key, *cos.own, **kwargs)
    return cos.rotate(query, key)


def tokens_first(own: Callable[..., Any], query: Tensor, key: Tensor, cos: TableRotation, sin: Any) -> Any:
    """In the place of a function of q and k `(tokens, heads, head_dim)`, or of a batch of them."""
    if cos.own is not None:
        query, key = own(query, key, *cos.own)
    query, key = cos.rotate(swapped(query), swapped(key))
    return swapped(query), swapped(key)


def complex_numbers(own: Callable[..., Any], query: Tensor, key: Tensor, freqs_ci: tuple[TableRotation, Tensor]) -> Any:
    """In the place of a function of q and k `(batch, tokens, heads, head_dim)` and of complex numbers."""
    rotation, sin = freqs_ci
    if rotation.own is not None:
        query, key = own(query, key, torch.complex(*rotation.own).unsqueeze(1))
    return tokens_first(own, query, key, rotation._replace(own=None), sin)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "apply_rotary_pos_emb": heads_first,
    "apply_rotary_pos_emb_2d": heads_first,
    "apply_rotary_pos_emb_vision": tokens_first,
    "vision_apply_rotary_emb": complex_numbers,
}
"""By which layers rotate, and what stands in their place after a swap."""


def own_forward(layer: Any) -> FunctionType:
    """The forward of a layer's class, without its decorators."""
    forward = inspect.unwrap(type(layer).forward)
    assert isinstance(forward, FunctionType)
    return forward


def function_of(layer: Any) -> str | None:
    """The one function of `FUNCTIONS` that a layer calls, or None."""
    forward = inspect.unwrap(type(layer).forward)
    if not isinstance(forward, FunctionType):
        return None
    called = [name for name in FUNCTIONS if name in forward.__code__.co_names and name in forward.__globals__]
    if len(called) != 1 or "cos" in list(inspect.signature(forward.__globals__[called[0]]).parameters)[:2]:
        return None  # one that rotates q and k separately has its tables second
    return called[0]


def argument_of(layer: Any) -> str:
    """The argument by which a layer gets its tables."""
    return "freqs_ci" if function_of(layer) == "vision_apply_rotary_emb" else "position_embeddings"


def rotated_forward(layer: Any) -> Callable[..., Any]:
    """The forward of a layer's class, with another function under the name of the one that rotates."""
    forward, name = own_forward(layer), function_of(layer)
    assert name is not None
    names = {**forward.__globals__, name: partial(FUNCTIONS[name], forward.__globals__[name])}
    del names["__name__"]  # a compiler would look the names up in the module of that name
    other = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    other.__kwdefaults__ = forward.__kwdefaults__
    return other


def _distinct(rotary: Rotary) -> list[int]:
    """The encodings that find tokens where no one before them does."""
    return sorted(set(rotary.alike))


def swapped(x: Tensor) -> Tensor:
    """Heads before tokens, or tokens before heads again."""
    return x.transpose(-2, -3)
