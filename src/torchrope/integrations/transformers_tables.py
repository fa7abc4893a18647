"""Pass positions to the attention layers of transformers' models with RoPE, and rotate q and k there.

Positions are appended to cos as further channels; each layer's forward runs with its rotation function replaced.
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


class AppendPositions:
    """Forward hook of a rotary embedding: append positions to cos, one group of channels per distinct lattice.

    Attributes:
        num_axes: Coordinates of a token.
        axes_first: Whether position_ids are `(axes, batch, tokens)`, otherwise `(tokens, axes)` or `(batch, tokens)`.
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
        return with_positions(tables, self.rotary.positions_at(ids, [1] * self.num_axes), self.rotary)


class AppendLatticePositions:
    """Forward hook of Llama 4's rotary embedding: return cos, with positions of patches and class token, and sin."""

    def __init__(self, rotary: Rotary, sizes: tuple[int, ...]) -> None:
        self.rotary = rotary
        self.sizes = sizes

    def __call__(self, rope: nn.Module, args: Any, kwargs: dict[str, Any], table: Tensor) -> tuple[Tensor, Tensor]:
        placed = [pad(where, (0, 0, 0, 1)) for where in self.rotary.positions(self.sizes, device=table.device)]
        cos_sin: Any = torch.view_as_real(table.squeeze(1)).unbind(-1)
        return with_positions(cos_sin, placed, self.rotary)


class RotatedForward:
    """Replacement for the forward of an attention layer, with q and k rotated by an encoding."""

    def __init__(self, layer: Any, rotary: Rotary, index: int, num_axes: int) -> None:
        self.layer = layer
        self.rotary = rotary
        self.index = index
        self.num_axes = num_axes
        self._copy_forward()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._follow_patches()
        name = argument_of(self.layer)
        if name in kwargs:
            kwargs = {**kwargs, name: self.with_rotation(kwargs[name])}
        else:
            at = own_forward(self.layer).__code__.co_varnames.index(name) - 1  # without self
            args = (*args[:at], self.with_rotation(args[at]), *args[at + 1 :])
        return self.function(self.layer, *args, **kwargs)

    def with_rotation(self, tables: tuple[Tensor, Tensor]) -> tuple["TableRotation", Tensor]:
        """Replace the first of the layer's tables by its rotation."""
        positions, own = split_positions(tables, self.rotary, self.index, self.num_axes)
        rotation = self.rotary.ordered_rotation(self.index, positions)
        return TableRotation(rotation, own if self.rotary.keep_rotation else None), tables[1]

    def _copy_forward(self) -> None:
        self.function = rotated_forward(self.layer)
        self.module_names = own_forward(self.layer).__globals__

    def _follow_patches(self) -> None:
        """Use what the names of the layer's module refer to now: others replace functions there after the swap."""
        names = self.function.__globals__
        for name in self.function.__code__.co_names:
            now = self.module_names.get(name)
            if name in FUNCTIONS and now is not None:
                if names[name].args[0] is not now:
                    names[name] = partial(FUNCTIONS[name], now)
            elif names.get(name) is not now:
                names[name] = now

    def __getstate__(self) -> dict[str, Any]:
        not_pickled = ("function", "module_names")
        return {name: value for name, value in vars(self).items() if name not in not_pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._copy_forward()


class TableRotation(NamedTuple):
    """The rotation of a layer by its encoding, and cos and sin of its built-in rotation if this is kept."""

    rotate: OrderedRotation
    own: tuple[Tensor, Tensor] | None


def with_positions(tables: tuple[Tensor, Tensor], placed: list[Tensor], rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Return cos and sin `(..., channels)`, cos with the positions of each distinct lattice appended."""
    return torch.cat([tables[0], *(placed[index] for index in _distinct(rotary))], dim=-1), tables[1]


def split_positions(
    tables: tuple[Tensor, Tensor], rotary: Rotary, index: int, num_axes: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the positions of one encoding from the channels of cos, and cos and sin without positions."""
    distinct = _distinct(rotary)
    cos, sin = tables
    channels = cos.shape[-1] - len(distinct) * num_axes
    start = channels + distinct.index(rotary.first_with_lattice[index]) * num_axes
    return cos[..., start : start + num_axes], (cos[..., :channels].to(sin.dtype), sin)


def rotate_heads_first(
    own: Callable[..., Any], query: Tensor, key: Tensor, cos: TableRotation, sin: Any, **kwargs: Any
) -> Any:
    """Replacement for a rotation function of q and k `(batch, heads, tokens, head_dim)`."""
    if cos.own is not None:
        query, key = own(query, key, *cos.own, **kwargs)
    return cos.rotate(query, key)


def rotate_tokens_first(own: Callable[..., Any], query: Tensor, key: Tensor, cos: TableRotation, sin: Any) -> Any:
    """Replacement for a rotation function of q and k `([batch,] tokens, heads, head_dim)`."""
    if cos.own is not None:
        query, key = own(query, key, *cos.own)
    query, key = cos.rotate(transposed(query), transposed(key))
    return transposed(query), transposed(key)


def rotate_complex(own: Callable[..., Any], query: Tensor, key: Tensor, freqs_ci: tuple[TableRotation, Tensor]) -> Any:
    """Replacement for a rotation function of q and k `(batch, tokens, heads, head_dim)` and complex numbers."""
    rotation, sin = freqs_ci
    if rotation.own is not None:
        query, key = own(query, key, torch.complex(*rotation.own).unsqueeze(1))
    return rotate_tokens_first(own, query, key, rotation._replace(own=None), sin)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "apply_rotary_pos_emb": rotate_heads_first,
    "apply_rotary_pos_emb_2d": rotate_heads_first,
    "apply_rotary_pos_emb_vision": rotate_tokens_first,
    "vision_apply_rotary_emb": rotate_complex,
}
"""Rotation functions of transformers by name, and their replacements in a swapped model."""


def own_forward(layer: Any) -> FunctionType:
    """Return the forward of a layer's class, without its decorators."""
    forward = inspect.unwrap(type(layer).forward)
    assert isinstance(forward, FunctionType)
    return forward


def function_of(layer: Any) -> str | None:
    """Return the name of the one function of `FUNCTIONS` that a layer calls, or None."""
    forward = inspect.unwrap(type(layer).forward)
    if not isinstance(forward, FunctionType):
        return None
    called = [name for name in FUNCTIONS if name in forward.__code__.co_names and name in forward.__globals__]
    if len(called) != 1 or "cos" in list(inspect.signature(forward.__globals__[called[0]]).parameters)[:2]:
        return None  # a function of one tensor, (x, cos, sin), is not supported
    return called[0]


def argument_of(layer: Any) -> str:
    """Return the name of the argument of a layer for cos and sin."""
    return "freqs_ci" if function_of(layer) == "vision_apply_rotary_emb" else "position_embeddings"


def rotated_forward(layer: Any) -> FunctionType:
    """Return the forward of a layer's class with its rotation function replaced."""
    forward, name = own_forward(layer), function_of(layer)
    assert name is not None
    names = {**forward.__globals__, name: partial(FUNCTIONS[name], forward.__globals__[name])}
    del names["__name__"]  # a compiler would look the names up in the module of that name
    other = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    other.__kwdefaults__ = forward.__kwdefaults__
    return other


def _distinct(rotary: Rotary) -> list[int]:
    """Return the index of the first encoding of each distinct lattice."""
    return sorted(set(rotary.first_with_lattice))


def transposed(x: Tensor) -> Tensor:
    """Exchange the dimensions of heads and tokens."""
    return x.transpose(-2, -3)
