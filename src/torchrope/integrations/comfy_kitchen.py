"""The rotations of comfy-kitchen by the same names and arguments, with gradients: `apply_rope`, `rms_rope`, variants.

Forms with "1" take one tensor instead of q and k, forms with "split_half" rotate channels (i, i + pairs) instead of
(2i, 2i + 1). Tables are one 2 x 2 matrix per pair, [[cos, -sin], [sin, cos]], `(..., pairs, 2, 2)` with
`...` broadcast against q without its channels, as in Flux, `(batch or 1, 1, tokens, pairs, 2, 2)` for q
`(batch, heads, tokens, head_dim)`, or `(batch or 1, tokens, 1, pairs, 2, 2)` for q `(batch, tokens, heads, head_dim)`.
Their first column is read. Gradients reach q, k, the scales and the tables. Forms that write into their inputs
(`apply_rope_` and others) have none and are left out.
"""

from torch import Tensor

from torchrope.integrations.tables import planar_from_tables
from torchrope.ops.norms import RMS_NORM, Norm
from torchrope.rotating import apply, rotate
from torchrope.rotations import Planar


def apply_rope(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by tables of adjacent pairs.

    Args:
        xq: `(batch, heads, tokens, head_dim)` or `(batch, tokens, heads, head_dim)`.
        xk: The same layout; perhaps fewer heads, or other tokens of the same table.
        freqs_cis: One 2 x 2 matrix per pair, `(..., head_dim / 2, 2, 2)`; see the module. For x of more than one
            token in the layout `(batch, heads, tokens, head_dim)`, tokens of a table beyond those of x are not read.

    Returns:
        Rotated q and k, in their dtypes.

    Raises:
        ValueError: a table of other shapes.
    """
    return _rotated_pair(xq, xk, freqs_cis, interleaved=True)


def apply_rope1(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate one tensor by tables of adjacent pairs; see `apply_rope`."""
    return _rotated(x, freqs_cis, interleaved=True)


def apply_rope_split_half(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by tables of pairs (i, i + head_dim / 2); see `apply_rope`."""
    return _rotated_pair(xq, xk, freqs_cis, interleaved=False)


def apply_rope_split_half1(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate one tensor by tables of pairs (i, i + head_dim / 2); see `apply_rope`."""
    return _rotated(x, freqs_cis, interleaved=False)


def rms_rope(
    q: Tensor, k: Tensor, freqs_cis: Tensor, q_scale: Tensor, k_scale: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Normalise queries and keys by their root mean square over channels, then rotate them, in one pass.

    Args:
        q: As xq of `apply_rope`.
        k: As xk of `apply_rope`.
        freqs_cis: As of `apply_rope`.
        q_scale: Weight of the norm of q, `(head_dim,)`.
        k_scale: Weight of the norm of k; None for q_scale.
        epsilon: Added to the mean square.

    Returns:
        R(p) norm(q) and R(p) norm(k), in their dtypes, rounded once.

    Raises:
        ValueError: a table or scale of other shapes.
    """
    norms = _norms(q, k, q_scale, k_scale, epsilon)
    return _rotated_pair(q, k, freqs_cis, interleaved=True, norms=norms)


def rms_rope1(x: Tensor, freqs_cis: Tensor, scale: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Normalise and rotate one tensor; see `rms_rope`."""
    return _rotated(x, freqs_cis, interleaved=True, norm=_norm(x, scale, epsilon))


def rms_rope_split_half(
    q: Tensor,
    k: Tensor,
    freqs_cis: Tensor,
    q_scale: Tensor,
    k_scale: Tensor | None = None,
    epsilon: float = 1e-6,
    rot_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """Normalise queries and keys, then rotate the pairs (i, i + pairs) of their first rot_dim channels, 0 for all.

    The other arguments are those of `rms_rope`; the table has rot_dim / 2 pairs.
    """
    norms = _norms(q, k, q_scale, k_scale, epsilon)
    return _rotated_pair(q, k, freqs_cis, interleaved=False, norms=norms, rot_dim=rot_dim)


def rms_rope_split_half1(x: Tensor, freqs_cis: Tensor, scale: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Normalise and rotate one tensor by pairs (i, i + head_dim / 2); see `rms_rope`."""
    return _rotated(x, freqs_cis, interleaved=False, norm=_norm(x, scale, epsilon))


def _rotated_pair(
    q: Tensor,
    k: Tensor,
    freqs_cis: Tensor,
    *,
    interleaved: bool,
    norms: tuple[Norm, Norm] | None = None,
    rot_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    rotation, layout = _rotation(q, freqs_cis, interleaved, rot_dim)
    tokens, heads = (-2, -3) if layout == "bhtd" else (-3, -2)
    if q.shape[tokens] == k.shape[tokens] and k.shape[heads] and q.shape[heads] % k.shape[heads] == 0:
        return rotate(q, k, rotation, norm=norms, layout=layout)
    q_norm, k_norm = norms or (None, None)
    key_rotation, key_layout = _rotation(k, freqs_cis, interleaved, rot_dim)
    return apply(q, rotation, norm=q_norm, layout=layout), apply(k, key_rotation, norm=k_norm, layout=key_layout)


def _rotated(x: Tensor, freqs_cis: Tensor, *, interleaved: bool, norm: Norm | None = None) -> Tensor:
    rotation, layout = _rotation(x, freqs_cis, interleaved)
    return apply(x, rotation, norm=norm, layout=layout)


def _rotation(x: Tensor, freqs_cis: Tensor, interleaved: bool, rot_dim: int = 0) -> tuple[Planar, str]:
    """Return the rotation of a table for x, and the layout of x that its shape implies."""
    pairs = (rot_dim or x.shape[-1]) // 2
    rule = f"freqs_cis must be (..., tokens or heads, {pairs}, 2, 2), broadcast against q without its channels"
    if x.ndim != 4 or freqs_cis.shape[-3:] != (pairs, 2, 2) or freqs_cis.ndim > 6:
        raise ValueError(f"{rule}, got {tuple(freqs_cis.shape)} for {tuple(x.shape)}")
    table = freqs_cis[(None,) * (6 - freqs_cis.ndim)]
    if table.shape[2] > x.shape[2] != 1:
        table = table[:, :, : x.shape[2]]
    if any(size not in (1, of_x) for size, of_x in zip(table.shape[:3], x.shape[:3], strict=True)):
        raise ValueError(f"{rule}, got {tuple(freqs_cis.shape)} for {tuple(x.shape)}")
    layout = "bthd" if table.shape[2] == 1 != x.shape[2] else "bhtd"
    if layout == "bthd":
        table = table.transpose(1, 2)
    tokens = x.shape[1 if layout == "bthd" else 2]
    cos, sin = table[..., 0].expand(-1, -1, tokens, -1, -1).unbind(-1)
    return planar_from_tables(cos, sin, x.shape[-1], interleaved=interleaved), layout


def _norms(q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor | None, epsilon: float) -> tuple[Norm, Norm]:
    return _norm(q, q_scale, epsilon), _norm(k, q_scale if k_scale is None else k_scale, epsilon)


def _norm(x: Tensor, scale: Tensor, epsilon: float) -> Norm:
    if scale.shape != x.shape[-1:]:
        raise ValueError(f"the scale of a norm must be (head_dim,) = {tuple(x.shape[-1:])}, got {tuple(scale.shape)}")
    return Norm(RMS_NORM, scale, None, epsilon)
