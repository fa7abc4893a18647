"""The one verb of the library."""

from torch import Tensor

from torchrope.ops import reference
from torchrope.ops.precision import wide_dtype, without_autocast
from torchrope.rotations import Rotation

BACKENDS = ("auto", "reference")


def rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    *,
    key_rotation: Rotation | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys:  q' = R(p) q,  k' = R(p) k.

    The score of tokens at p and p' becomes q^T R(p)^T R(p') k, which depends on p' - p alone where the
    encoding's generators commute.

    Args:
        q: Queries `(batch, heads, tokens, head_dim)`, any strides, any number of leading dimensions.
        k: Keys, same layout. Heads may be fewer (grouped queries): then each key head serves as many query heads,
            and the encoding was built with num_heads = the key heads, or its heads share one rotation.
        rotation: What an encoding returned for the positions of q, and of k where `key_rotation` is not given.
        key_rotation: The rotation of k, where queries and keys sit at other positions.
        backend: "auto" or "reference".

    Returns:
        Rotated q and k, each in the dtype it came in. The arithmetic is float32, or float64 for float64.

    Raises:
        ValueError: q or k and their rotation disagree on batch, heads, tokens or head_dim; an unknown backend.

    Example:
        >>> import torch, torchrope as tr
        >>> q = k = torch.randn(1, 2, 9, 8)
        >>> rotation = tr.AxialRoPE(num_axes=2, num_heads=2, head_dim=8)(tr.grid(3, 3))
        >>> torch.allclose(rotate(q, k, rotation)[0].norm(dim=-1), q.norm(dim=-1))
        True
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    of_keys = rotation if key_rotation is None else key_rotation
    _check("q", q, rotation)
    _check("k", k, of_keys)
    _check_heads(q, k, rotation, of_keys)
    return _rotate_wide(q, rotation), _rotate_wide(k, of_keys)


def _rotate_wide(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate in the wider dtype of x, the rotation and float32; give back x's own."""
    if rotation.rotary_dim == 0:
        return x
    wide = wide_dtype(x, rotation.table)
    with without_autocast(x):
        return reference.rotate_one(x.to(wide), rotation.to(wide)).to(x.dtype)


def _check(name: str, x: Tensor, rotation: Rotation) -> None:
    if x.ndim < 3 or not x.is_floating_point():
        raise ValueError(
            f"{name} must be floating point (batch, heads, tokens, head_dim), got {x.dtype} {tuple(x.shape)}"
        )
    *batch, _, tokens, head_dim = x.shape
    *rotation_batch, _, rotation_tokens = rotation.shape
    if head_dim != rotation.head_dim:
        raise ValueError(f"head_dim of {name} must be the rotation's {rotation.head_dim}, got {head_dim}")
    if tokens != rotation_tokens:
        raise ValueError(f"{name} must have the rotation's {rotation_tokens} tokens, got {tokens}")
    aligned = batch[len(batch) - len(rotation_batch) :] if len(rotation_batch) <= len(batch) else None
    if aligned is None or any(own not in (1, of_x) for own, of_x in zip(rotation_batch, aligned, strict=True)):
        raise ValueError(
            f"positions must have no batch or the batch of {name} {tuple(batch)}, got {tuple(rotation_batch)}"
        )


def _check_heads(q: Tensor, k: Tensor, rotation: Rotation, key_rotation: Rotation) -> None:
    """Key heads divide query heads; a rotation knows the heads of q, or those of k and turns each group alike."""
    heads, key_heads = q.shape[-3], k.shape[-3]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"heads of q must be a multiple of the heads of k, got {heads} and {key_heads}")
    for name, made_for, shared in (
        ("q", rotation.heads, rotation.shape[-2] == 1),
        ("k", key_rotation.heads, key_rotation.shape[-2] == 1),
    ):
        if made_for not in (1, heads, key_heads):
            raise ValueError(f"heads must be the rotation's {made_for}, got {heads} of q and {key_heads} of k")
        if name == "k" and not shared and made_for != key_heads:
            hint = f"for grouped queries build the encoding with num_heads={key_heads} or shared_heads=True"
            raise ValueError(f"heads of k must be the rotation's {made_for}, got {key_heads}; {hint}")
