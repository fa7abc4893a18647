"""`rotate` and `apply`: rotate queries and keys by the rotation of their positions."""

from torch import Tensor

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
    rotated_q, rotated_k = in_layout(rotated_q, layout), in_layout(rotated_k, layout)
    if rotated_q.dtype != q.dtype or rotated_k.dtype != k.dtype:
        return rotated_q.to(q.dtype), rotated_k.to(k.dtype)
    return rotated_q, rotated_k


def apply(
    x: Tensor,
    rotation: Rotation,
    *,
    layout: str = "bhtd",
    scores_only: bool = False,
) -> Tensor:
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
