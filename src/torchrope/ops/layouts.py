"""Convert between layouts of queries and keys as views: heads before tokens, tokens before heads, jagged."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("bhtd", "bthd")
"""Heads before tokens `(batch, heads, tokens, head_dim)`, as scaled_dot_product_attention takes them, and tokens before
heads `(batch, tokens, heads, head_dim)`, as a projection leaves them and FlashAttention takes them."""

Restore = Callable[[Tensor], Tensor]


def heads_first(name: str, x: Tensor, layout: str) -> tuple[Tensor, Restore]:
    """View x as `(..., heads, tokens, head_dim)`, and return the function that restores the layout of x.

    Args:
        name: Name of x in error messages.
        x: In one of the `LAYOUTS`, with any number of leading dimensions; or nested and jagged in its tokens, in
            which case the result is its values: the tokens of all samples in one sequence, without a batch dimension.
        layout: One of `LAYOUTS`.

    Raises:
        ValueError: an unknown layout; a nested tensor that is not jagged, has gaps, or is jagged in another dimension.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if x.is_nested:
        return _values_of(name, x, layout)
    if layout == "bthd":
        _check_dimensions(name, x)
        return x.transpose(-3, -2), _transposed
    return x, _unchanged


def require_same_offsets(q: Tensor, k: Tensor | None, offsets: Tensor | None) -> None:
    """Raise unless jagged q and k, which share one rotation, have the same tokens in each sample as its positions.

    Args:
        q: Queries, jagged or not.
        k: Keys, None if they have another rotation.
        offsets: Offsets of the samples among the positions of the rotation, None if these were not jagged.

    Raises:
        ValueError: other numbers of tokens; only one of q and k is jagged.
    """
    rule = "q and k must have the same number of tokens in each sample unless key_rotation is given"
    if k is not None and q.is_nested != k.is_nested:
        raise ValueError(f"{rule}, got a jagged {'q' if q.is_nested else 'k'} only")
    if not q.is_nested:
        return
    of_q: Any = q  # whose methods Tensor does not declare
    if k is not None and q.shape[_jagged_dim(q)] != k.shape[_jagged_dim(k)]:  # another offsets tensor
        of_k: Any = k
        _compare(of_q.offsets(), of_k.offsets(), rule)
    if offsets is not None and not torch.compiler.is_compiling():
        _compare(offsets, of_q.offsets(), "positions and tokens must have the same number of tokens in each sample")


def _compare(offsets: Tensor, others: Tensor, rule: str) -> None:
    if offsets is others:
        return
    if torch.compiler.is_compiling():
        raise ValueError(f"{rule}, got jagged tensors with two offsets tensors, which a compiled graph cannot compare")
    lengths, other_lengths = offsets.diff().tolist(), others.diff().tolist()
    if len(lengths) != len(other_lengths):
        raise ValueError(f"{rule}, got {len(lengths)} and {len(other_lengths)} samples")
    for sample, (length, other) in enumerate(zip(lengths, other_lengths, strict=True)):
        if length != other:
            raise ValueError(f"{rule}, got {length} and {other} in sample {sample}")


def _jagged_dim(x: Tensor) -> int:
    jagged: Any = x
    return int(jagged._ragged_idx)


def _values_of(name: str, x: Tensor, layout: str) -> tuple[Tensor, Restore]:
    if x.layout != torch.jagged or x.ndim != 4:
        raise ValueError(f"{name} must be jagged with 4 dimensions if it is nested, got {x.ndim} of {x.layout}")
    jagged: Any = x  # whose methods Tensor does not declare
    if jagged.lengths() is not None:
        raise ValueError(f"{name} must be a jagged tensor without gaps, got one with lengths; call contiguous()")
    tokens = _jagged_dim(x)
    expected = {"bhtd": 2, "bthd": 1}[layout]
    if tokens != expected:
        hint = '; pass layout="bthd"' if tokens == 1 else ""
        raise ValueError(
            f"{name} must be jagged in its tokens, dimension {expected} of layout {layout}, got {tokens}{hint}"
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
