"""Convert between layouts of queries and keys as views: heads before tokens, tokens before heads, jagged."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("bhtd", "bthd")
"""Heads before tokens `(batch, heads, tokens, head_dim)`, as scaled_dot_product_attention takes them, and tokens before
heads `(batch, tokens, heads, head_dim)`, as a projection leaves them and FlashAttention takes them."""

Restore = Callable[[Tensor], Tensor]


def heads_first(name: str, x: Tensor, layout: str | None) -> tuple[Tensor, Restore]:
    """View x as `(..., heads, tokens, head_dim)`, and return the function that restores the layout of x.

    Args:
        name: Name of x in error messages.
        x: In one of the `LAYOUTS`, with any number of leading dimensions; or nested and jagged in its tokens, in
            which case the result is its values: the tokens of all samples in one sequence, without a batch dimension.
        layout: One of `LAYOUTS`; None means "bhtd", or, for a jagged tensor, the layout whose token
            dimension is the jagged one.

    Raises:
        ValueError: an unknown layout; a nested tensor that is not jagged, has gaps, or is jagged in another dimension.
    """
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if x.is_nested:
        return _values_of(name, x, layout)
    if layout == "bthd":
        _check_dimensions(name, x)
        return x.transpose(-3, -2), _transposed
    return x, _unchanged


def require_same_lengths(q: Tensor, k: Tensor) -> None:
    """Raise ValueError unless q and k, which share one rotation, are both jagged with the same lengths, or both not."""
    rule = "q and k must have the same number of tokens in each sample unless key_rotation is given"
    if q.is_nested != k.is_nested:
        raise ValueError(f"{rule}, got a jagged {'q' if q.is_nested else 'k'} only")
    jagged: Any = (q, k)  # whose methods Tensor does not declare
    if not q.is_nested or q.shape[_jagged_dim(q)] == k.shape[_jagged_dim(k)]:  # the same offsets tensor
        return
    if torch.compiler.is_compiling():
        raise ValueError(f"{rule}, got jagged tensors with two offsets tensors, which a compiled graph cannot compare")
    lengths, key_lengths = (x.offsets().diff().tolist() for x in jagged)
    if len(lengths) != len(key_lengths):
        raise ValueError(f"{rule}, got {len(lengths)} and {len(key_lengths)} samples")
    for sample, (length, key_length) in enumerate(zip(lengths, key_lengths, strict=True)):
        if length != key_length:
            raise ValueError(f"{rule}, got {length} and {key_length} in sample {sample}")


def _jagged_dim(x: Tensor) -> int:
    jagged: Any = x
    return int(jagged._ragged_idx)


def _values_of(name: str, x: Tensor, layout: str | None) -> tuple[Tensor, Restore]:
    if x.layout != torch.jagged or x.ndim != 4:
        raise ValueError(f"{name} must be jagged with 4 dimensions if it is nested, got {x.ndim} of {x.layout}")
    jagged: Any = x  # whose methods Tensor does not declare
    if jagged.lengths() is not None:
        raise ValueError(f"{name} must be a jagged tensor without gaps, got one with lengths; call contiguous()")
    tokens = _jagged_dim(x)
    expected = {"bhtd": 2, "bthd": 1}.get(layout or "", tokens)
    if tokens not in (1, 2) or tokens != expected:
        raise ValueError(
            f"{name} must be jagged in its tokens, dimension {expected}"
            f"{f' of layout {layout}' if layout else ' or 1'}, got {tokens}"
        )
    offsets = jagged.offsets()

    def restore(values: Tensor) -> Tensor:
        own = values.transpose(0, 1) if tokens == 1 else values
        return torch.nested.nested_tensor_from_jagged(own, offsets, jagged_dim=tokens)

    values = x.values()  # (total, heads, head_dim), or with tokens in dimension 2 (heads, total, head_dim)
    return (values.transpose(0, 1) if tokens == 1 else values), restore


def _check_dimensions(name: str, x: Tensor) -> None:
    if x.ndim < 3:
        raise ValueError(f"{name} must be (batch, tokens, heads, head_dim) in layout bthd, got {tuple(x.shape)}")


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-3, -2)


def _unchanged(x: Tensor) -> Tensor:
    return x
