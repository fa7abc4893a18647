"""`rotate` and `apply`: rotate queries and keys by the rotation of their positions."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrope.ops import native
from torchrope.ops.backends import current, is_plain
from torchrope.ops.dispatch import QueriesKeys, absent
from torchrope.ops.layouts import heads_first, in_layout
from torchrope.rotations import Rotation


def rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    *,
    key_rotation: Rotation | None = None,
    layout: str = "bhtd",
    scores_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys:  q' = R(p) q,  k' = R(p) k.

    The score of tokens at p and p' becomes q^T R(p)^T R(p') k, which depends on p' - p alone where the
    encoding's generators commute.

    Args:
        q: Queries `(batch, heads, tokens, head_dim)`, any strides, any number of leading dimensions; views of a packed
            projection work, `q, k, v = qkv.unbind(2)`. For samples of several lengths see `torchrope.pack`.
        k: Keys, same layout. It may have fewer heads (grouped-query attention): then each key head serves the same
            number of query heads, and the encoding must have num_heads = key heads, or heads that share one rotation.
        rotation: The rotation that an encoding returned for the positions of q, and of k without `key_rotation`.
        key_rotation: The rotation of k, if keys have other positions than queries.
        layout: "bhtd" for `(batch, heads, tokens, head_dim)`, "bthd" for `(batch, tokens, heads, head_dim)`.
        scores_only: Whether only q'^T k' is used. The results may then be expressed in another orthogonal basis than
            R q and R k, the same for both, which is cheaper; do not combine them with other rotated tensors.

    Returns:
        Rotated q and k, each in the layout and dtype of the input. The arithmetic is float32, or float64 for float64.

    Raises:
        ValueError: q or k and their rotation disagree on batch, heads, tokens, head_dim or device; inputs that the
            chosen `torchrope.backend` does not support; an unknown layout; no tensor, or a nested one.

    Example:
        >>> import torch, torchrope as tr
        >>> q = k = torch.randn(1, 2, 9, 8)
        >>> rotation = tr.AxialRoPE(num_axes=2, num_heads=2, head_dim=8)(tr.grid(3, 3))
        >>> torch.allclose(rotate(q, k, rotation)[0].norm(dim=-1), q.norm(dim=-1))
        True
    """
    repeats = key_rotation is None and not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    known = getattr(rotation, "_repeated", None) if repeats else None
    if known is None:
        rotated = _rotated(q, k, rotation, key_rotation, layout, scores_only)
        if repeats:  # most rotations are used once
            object.__setattr__(rotation, "_repeated", (None, None))
        return rotated
    again = None
    if is_plain(q, k) and q.is_cpu and k.is_cpu:  # other tensors, and modes that have to see operators, need all
        rows = q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype
        call, repeat = (rows, layout, scores_only, current(), torch.get_num_threads()), known[1]
        if known[0] != call:
            object.__setattr__(rotation, "_repeated", (call, None))
        else:
            again = _recorded(q, k, rotation, call) if repeat is None else repeat(q, k)
    return _rotated(q, k, rotation, None, layout, scores_only) if again is None else again


def _rotated(
    q: Tensor, k: Tensor, rotation: Rotation, key_rotation: Rotation | None, layout: str, scores_only: bool
) -> tuple[Tensor, Tensor]:
    _require_rotation(rotation)
    if key_rotation is not None:
        _require_rotation(key_rotation)
    x = QueriesKeys(heads_first("q", q, layout), heads_first("k", k, layout), scores_only)
    if key_rotation is None:
        rotation.check("q", x.q, x.k)
        if x.q.shape != x.k.shape or x.q.dtype != x.k.dtype or x.q.device != x.k.device:
            rotation.check("k", x.k, x.q)
        rotated_q, rotated_k = rotation.rotate_vectors(x)
    else:
        rotation.check("q", x.q, x.k)
        key_rotation.check("k", x.k, x.q)
        x = QueriesKeys(x.q, x.k, scores_only and rotation.shares_basis(key_rotation, x))
        rotated_q, rotated_k = rotation.rotate_vectors(x.only_q())[0], key_rotation.rotate_vectors(x.only_k())[1]
    return in_layout(rotated_q, layout).to(q.dtype), in_layout(rotated_k, layout).to(k.dtype)


def _recorded(q: Tensor, k: Tensor, rotation: Rotation, call: Any) -> tuple[Tensor, Tensor]:
    """Rotate, and keep what repeats this call, which is described by all but the values."""
    calls: list[tuple[str, bytes]] = []
    native.RECORD.calls = calls
    try:
        rotated = _rotated(q, k, rotation, None, *call[1:3])
    finally:
        vars(native.RECORD).pop("calls", None)  # a rotation that calls `rotate` may have removed it
    one_call = len(calls) == 1 and type(rotation).rotate_vectors.__module__ == Rotation.__module__  # and nothing else
    repeat = _repeatable(*calls[0], (q, k, *rotated), rotation._tensors()) if one_call else None
    object.__setattr__(rotation, "_repeated", (call, repeat or (lambda q, k: None)))
    return rotated


def _repeatable(kernel: str, packed: bytes, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
    """Return a function that repeats a call of a kernel for other rows; None if it read more than rows and tensors."""
    arguments, addresses = array("q", packed), [x.data_ptr() for x in rows]
    held = [(x, x.data_ptr(), x.shape) for x in tensors]
    known = {0, *addresses, *(address for _, address, _ in held)}
    read = {argument for kind, argument in zip(native.kinds(kernel), arguments, strict=True) if kind == "P"}
    if {arguments.count(address) for address in addresses} != {1} or not read <= known:
        return None
    q_sizes, k_sizes = [(x.shape, x.stride()) for x in rows[2:]]
    at_q, at_k, at_rotated_q, at_rotated_k = map(arguments.index, addresses)
    function = getattr(native.LIBRARY, kernel)

    def repeat(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        for x, address, shape in held:
            if x.data_ptr() != address or x.shape != shape:
                return None
        rotated_q, rotated_k = q.new_empty_strided(*q_sizes), k.new_empty_strided(*k_sizes)
        changed = arguments[:]
        changed[at_q], changed[at_rotated_q] = q.data_ptr(), rotated_q.data_ptr()
        changed[at_k], changed[at_rotated_k] = k.data_ptr(), rotated_k.data_ptr()
        return None if function(changed.tobytes(), False) else (rotated_q, rotated_k)

    return repeat


def apply(x: Tensor, rotation: Rotation, *, layout: str = "bhtd", scores_only: bool = False) -> Tensor:
    """Rotate one tensor:  x' = R(p) x.  For queries, keys, values or the output of attention.

    Args:
        x: `(batch, heads, tokens, head_dim)`, any strides, any number of leading dimensions.
        rotation: The rotation that an encoding returned for the positions of x.
        layout: As `rotate`'s.
        scores_only: As `rotate`'s; must be equal for queries and keys, which must share the rotation, dtype and number
            of dimensions.

    Returns:
        Rotated x, in the layout and dtype of the input.

    Raises:
        ValueError: as `rotate`.
    """
    _require_rotation(rotation)
    x = heads_first("x", x, layout)
    rotation.check("x", x, None)
    pair = QueriesKeys(x, absent(x), scores_only)
    return in_layout(rotation.rotate_vectors(pair)[0], layout).to(x.dtype)


def _require_rotation(rotation: Rotation) -> None:
    if not hasattr(rotation, "rotate_vectors"):  # isinstance is slower, as Rotation is abstract
        rule = "rotation must be encoding(positions), what an encoding returns when it is called with positions"
        raise ValueError(f"{rule}, got {type(rotation).__name__}")
