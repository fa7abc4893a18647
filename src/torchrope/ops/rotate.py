"""`rotate`: apply a rotation to queries and keys, by a kernel or by the reference."""

import torch
from torch import Tensor, nn

from torchrope.ops import reference
from torchrope.ops.backends import current, recomputed, refuse, takes_kernels
from torchrope.ops.direct import rotate_directly, rotate_in_basis_directly
from torchrope.ops.layouts import heads_first, require_same_lengths
from torchrope.ops.library import call
from torchrope.ops.native import DTYPES
from torchrope.ops.norms import Norm, Norms, as_arguments, called, normalise, read
from torchrope.rotations import Action, Block, Commuting, Expansion, Planar, PlanarInBasis, Rotation
from torchrope.tensors import can_read, wide_dtype, with_batch_dim, without_autocast


def rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation | Action,
    *,
    key_rotation: Rotation | Action | None = None,
    norm: Norms | None = None,
    layout: str | None = None,
    scores_only: bool = False,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys:  q' = R(p) q,  k' = R(p) k,  or R(p) norm(q) and R(p) norm(k).

    The score of tokens at p and p' becomes q^T R(p)^T R(p') k, which depends on p' - p alone where the
    encoding's generators commute.

    Args:
        q: Queries `(batch, heads, tokens, head_dim)`, any strides, any number of leading dimensions; views of a packed
            projection work, `q, k, v = qkv.unbind(2)`. A `torch.nested` tensor that is jagged in its tokens is rotated
            by the concatenated positions of all its tokens, as in `Packed`.
        k: Keys, same layout. It may have fewer heads (grouped-query attention): then each key head serves the same
            number of query heads, and the encoding must have num_heads = key heads, or heads that share one rotation.
        rotation: The rotation that an encoding returned for the positions of q, and of k without `key_rotation`.
            For an `Action`, which `PoseEncoding` returns, q' = A^-T q and k' = A k.
        key_rotation: The rotation of k, if keys have other positions than queries.
        norm: The norms of q and of k over head_dim, applied before the rotation; None for no norm. A plain
            `nn.RMSNorm` or `nn.LayerNorm` is computed in float32 or wider and rounded once, after the rotation; for
            planar rotations it is fused into the rotation kernel. Any other module, or one with hooks, is called.
        layout: "bhtd" for `(batch, heads, tokens, head_dim)`, the default; "bthd" for
            `(batch, tokens, heads, head_dim)`. By default the jagged dimension of a nested tensor is its tokens.
        scores_only: Whether only q'^T k' is used. The results may then be expressed in another orthogonal basis than
            R q and R k, the same for both, which is cheaper; do not combine them with other rotated tensors.
        tokens: The tokens that queries were projected from, `(batch, tokens, dim)`; only `PaPE` and `PaPERI` need them.

    Returns:
        Rotated q and k, each in the layout and dtype of the input. The arithmetic is float32, or float64 for float64.
        An encoding that is not a rotation (`SphereHarmonics`, `HARoPE`, `PaPE`) may return more channels; scale the
        scores by 1 / sqrt(head_dim) of the input, not of the output.

    Raises:
        ValueError: q or k and their rotation disagree on batch, heads, tokens or head_dim; inputs that the chosen
            `torchrope.backend` does not support; a norm over another shape than head_dim, or that changes the shape;
            an unknown layout or unsupported nested tensor; jagged q and k of different lengths without key_rotation;
            q and k encoded by different classes; an `Action` for one of them only, or with another frame.

    Example:
        >>> import torch, torchrope as tr
        >>> q = k = torch.randn(1, 2, 9, 8)
        >>> rotation = tr.AxialRoPE(num_axes=2, num_heads=2, head_dim=8)(tr.grid(3, 3))
        >>> torch.allclose(rotate(q, k, rotation)[0].norm(dim=-1), q.norm(dim=-1))
        True
    """
    if (backend := recomputed(rotation)) is not None:
        with backend:
            return rotate(
                q, k, rotation, key_rotation=key_rotation, norm=norm, layout=layout, scores_only=scores_only,
                tokens=tokens,
            )  # fmt: skip
    if layout in _HEADS_FIRST and key_rotation is norm is None and current() == "auto":
        rotated = _without_dispatch(q, k, rotation, scores_only)
        if rotated is not None:
            return rotated
    if isinstance(rotation, Action) or isinstance(key_rotation, Action):
        of_q, of_k = (q, k) if norm is None else (normalise("q", q, norm[0]), normalise("k", k, norm[1]))
        acted_q, acted_k = _act(of_q, of_k, rotation, key_rotation, layout)
        return acted_q.to(q.dtype), acted_k.to(k.dtype)
    if layout is not None or q.is_nested or k.is_nested:
        (of_q, restore_q), (of_k, restore_k) = heads_first("q", q, layout), heads_first("k", k, layout)
        if key_rotation is None:
            require_same_lengths(q, k)
        rotated_q, rotated_k = _rotate_normed(of_q, of_k, rotation, key_rotation, norm, scores_only, tokens)
        return restore_q(rotated_q), restore_k(rotated_k)
    return _rotate_normed(q, k, rotation, key_rotation, norm, scores_only, tokens)


_HEADS_FIRST = (None, "bhtd")
MANY_PREFIX_TOKENS = 32
"""Up to so many tokens more than positions are taken for class and register tokens in errors."""


def _without_dispatch(
    q: Tensor, k: Tensor, rotation: Rotation | Action, scores_only: bool
) -> tuple[Tensor, Tensor] | None:
    """Rotate by a CPU kernel without PyTorch's dispatcher; None if the rotation or the inputs do not allow it."""
    if type(rotation) is Planar:
        return rotate_directly(q, k, rotation)
    if type(rotation) is Commuting:
        return rotate_in_basis_directly(q, k, rotation, scores_only)
    return None


def _act(
    q: Tensor,
    k: Tensor,
    action: Rotation | Action,
    key_action: Rotation | Action | None,
    layout: str | None,
) -> tuple[Tensor, Tensor]:
    of_keys = action if key_action is None else key_action
    if not (isinstance(action, Action) and isinstance(of_keys, Action)):
        kinds = f"{type(action).__name__} and {type(of_keys).__name__}"
        raise ValueError(f"queries and keys must both be transformed by an Action, or neither, got {kinds}")
    action.require_same_frame(of_keys)
    return action.queries(q, layout=layout), of_keys.keys(k, layout=layout)


def _rotate_normed(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    key_rotation: Rotation | None,
    norm: Norms | None,
    scores_only: bool,
    tokens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Apply the norms, then rotate: in one kernel if `_fuses`, else one after the other in float32 or wider."""
    if norm is None:
        return _rotate(q, k, rotation, key_rotation, scores_only, tokens)
    norms = read("q", q, norm[0]), read("k", k, norm[1])
    of_q, of_k = (
        x if own is not None else called(name, x, module)
        for name, x, own, module in zip("qk", (q, k), norms, norm, strict=True)
    )
    if current() == "auto" and type(rotation) is Planar and key_rotation is None and any(norms):
        rotated = rotate_directly(of_q, of_k, rotation, norms)
        if rotated is not None:
            return rotated[0].to(q.dtype), rotated[1].to(k.dtype)
    of_keys = rotation if key_rotation is None else key_rotation
    _check("q", q, rotation)
    _check("k", k, of_keys)
    _check_heads(q, k, rotation, of_keys)
    if any(norms) and _fuses(of_q, of_k, rotation, of_keys, norms):
        if key_rotation is None:
            rotated = _rotate_fused(of_q, of_k, rotation, *norms)
        else:
            rotated = _rotate_one_fused(of_q, rotation, norms[0]), _rotate_one_fused(of_k, of_keys, norms[1])
        return rotated[0].to(q.dtype), rotated[1].to(k.dtype)
    of_q, of_k = (x if own is None else own.wide(x) for x, own in zip((of_q, of_k), norms, strict=True))
    wide = torch.promote_types(of_q.dtype, of_k.dtype)  # kernels for GPUs take one dtype
    rotated_q, rotated_k = _rotate(of_q.to(wide), of_k.to(wide), rotation, key_rotation, scores_only, tokens)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)


def _fuses(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    key_rotation: Rotation,
    norms: tuple[Norm | None, Norm | None],
) -> bool:
    """Return whether one kernel can normalise and rotate: planar rotations, weights of a supported dtype and device."""
    if not (isinstance(rotation, Planar) and isinstance(key_rotation, Planar)):
        return False
    if rotation.rotary_dim == 0 or key_rotation.rotary_dim == 0:
        return False
    given = [x for norm in norms if norm is not None for x in (norm.weight, norm.bias) if x is not None]
    narrow = all(x.dtype in DTYPES and x.device.type == q.device.type for x in given)
    return narrow and _takes_kernels("rotate_normed", q, k, rotation, key_rotation)


def _rotate_one_fused(x: Tensor, rotation: Rotation, norm: Norm | None) -> Tensor:
    return _rotate_fused(x, _empty_batch(x), rotation, norm, None)[0]


def _rotate_fused(
    q: Tensor, k: Tensor, rotation: Rotation, q_norm: Norm | None, k_norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate q and k by the kernel, which takes one batch dimension and weights in float32."""
    assert isinstance(rotation, Planar)
    weights, kinds, eps = as_arguments((q_norm, k_norm))
    table = None if rotation.table is None else with_batch_dim(rotation.table, 5)
    rotated = call(
        "rotate_normed",
        _flatten_batch(q),
        _flatten_batch(k),
        with_batch_dim(rotation.positions, 3),
        rotation.frequencies,
        table,
        rotation.halves,
        *(None if x is None else x.to(torch.float32) for x in weights),
        kinds,
        eps,
    )
    return rotated[0].reshape(q.shape), rotated[1].reshape(k.shape)


def _rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    key_rotation: Rotation | None,
    scores_only: bool,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    of_keys = rotation if key_rotation is None else key_rotation
    if current() == "auto" and key_rotation is None:
        rotated = _without_dispatch(q, k, rotation, scores_only)  # of other layouts, or normalised by a module
        if rotated is not None:
            return rotated
    _check("q", q, rotation)
    _check("k", k, of_keys)
    _check_heads(q, k, rotation, of_keys)
    if isinstance(rotation, Expansion) or isinstance(of_keys, Expansion):
        return _expand(q, k, rotation, of_keys, tokens)
    if isinstance(rotation, PlanarInBasis) or isinstance(of_keys, PlanarInBasis):
        return _rotate_in_bases(q, k, rotation, key_rotation, scores_only)
    if not _takes_kernels(_kernel(rotation, of_keys), q, k, rotation, of_keys):
        return _rotate_wide(q, rotation), _rotate_wide(k, of_keys)
    if key_rotation is None:
        return _rotate_fast(q, k, rotation, scores_only)
    inside = scores_only and _share_a_basis(rotation, of_keys)
    return _rotate_one_fast(q, rotation, inside), _rotate_one_fast(k, of_keys, inside)


def rotate_one(
    x: Tensor,
    rotation: Rotation,
    *,
    norm: nn.Module | Norm | None = None,
    layout: str | None = None,
    scores_only: bool = False,
) -> Tensor:
    """Rotate one tensor:  x' = R(p) x,  or R(p) norm(x).  For queries, keys, values or the output of attention.

    Args:
        x: `(batch, heads, tokens, head_dim)`, any strides, any number of leading dimensions, or jagged in its tokens.
        rotation: The rotation that an encoding returned for the positions of x.
        norm: The norm of x over head_dim, as one of `rotate`'s.
        layout: As `rotate`'s.
        scores_only: As `rotate`'s; must be equal for queries and keys, which must share the rotation.

    Returns:
        Rotated x, in the layout and dtype of the input.

    Raises:
        ValueError: as `rotate`.
    """
    if (backend := recomputed(rotation)) is not None:
        with backend:
            return rotate_one(x, rotation, norm=norm, layout=layout, scores_only=scores_only)
    if layout is not None or x.is_nested:
        own, restore = heads_first("x", x, layout)
        return restore(_rotate_one_normed(own, rotation, norm, scores_only))
    return _rotate_one_normed(x, rotation, norm, scores_only)


def _rotate_one_normed(x: Tensor, rotation: Rotation, norm: nn.Module | Norm | None, scores_only: bool) -> Tensor:
    if norm is None:
        return _rotate_one(x, rotation, scores_only)
    own = read("x", x, norm)
    if own is None:
        return _rotate_one(called("x", x, norm), rotation, scores_only).to(x.dtype)
    _check_one(x, rotation)
    if _fuses(x, x, rotation, rotation, (own, None)):
        return _rotate_one_fused(x, rotation, own)
    return _rotate_one(own.wide(x), rotation, scores_only).to(x.dtype)


def _check_one(x: Tensor, rotation: Rotation) -> None:
    _check("x", x, rotation)
    if isinstance(rotation, Expansion):
        raise ValueError(f"rotate_one must get a rotation, not an Expansion, got {type(rotation).__name__}")
    if rotation.shape[-2] != 1 and x.shape[-3] % rotation.heads:
        raise ValueError(f"heads of x must be a multiple of the rotation's {rotation.heads}, got {x.shape[-3]}")


def _rotate_one(x: Tensor, rotation: Rotation, scores_only: bool) -> Tensor:
    _check_one(x, rotation)
    if isinstance(rotation, PlanarInBasis):
        wide = torch.promote_types(wide_dtype(x), rotation.dtype)
        with without_autocast(x):
            inner = reference.into_basis(x.to(wide), rotation.basis)
            rotated = _rotate_one(inner, rotation.planar, False)
            outer = rotated if scores_only else x + reference.out_of_basis(rotated - inner, rotation.basis)
        return outer.to(x.dtype)
    if not _takes_kernels(_kernel(rotation, rotation), x, x, rotation, rotation):
        return _rotate_wide(x, rotation)
    return _rotate_one_fast(x, rotation, scores_only)


def _expand(
    q: Tensor, k: Tensor, rotation: Rotation, of_keys: Rotation, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Encode queries and keys by an encoding that is not a rotation, in plain PyTorch."""
    if type(rotation) is not type(of_keys):
        families = f"{type(rotation).__name__} and {type(of_keys).__name__}"
        raise ValueError(f"queries and keys must be encoded by the same class of encoding, got {families}")
    if current() != "reference":
        refuse(f"supports rotations, got {type(rotation).__name__}")
    assert isinstance(rotation, Expansion)
    assert isinstance(of_keys, Expansion)
    wide = torch.promote_types(wide_dtype(q, k), rotation.dtype)
    with without_autocast(q):
        wide_tokens = None if tokens is None else tokens.to(wide)
        return rotation.of_queries(q.to(wide), wide_tokens).to(q.dtype), of_keys.of_keys(k.to(wide)).to(k.dtype)


def _rotate_in_bases(
    q: Tensor, k: Tensor, rotation: Rotation, key_rotation: Rotation | None, scores_only: bool
) -> tuple[Tensor, Tensor]:
    """Rotate both as  x + P (rot y - y),  y = P^T x,  so that unrotated channels are unchanged; P = I for other kinds.

    If q and k share P, scores need only rot y.
    """
    of_keys = rotation if key_rotation is None else key_rotation
    basis, planar = _split(rotation)
    key_basis, key_planar = _split(of_keys)
    # float32 or wider for all steps, so that the result is rounded once.
    wide = torch.promote_types(wide_dtype(q, k), torch.promote_types(rotation.dtype, of_keys.dtype))
    with without_autocast(q):
        inner_q, inner_k = reference.into_basis(q.to(wide), basis), reference.into_basis(k.to(wide), key_basis)
        planar_of_keys = None if key_rotation is None else key_planar
        rotated_q, rotated_k = _rotate(inner_q, inner_k, planar, planar_of_keys, False)
        if not (scores_only and _share_a_basis(rotation, of_keys)):
            rotated_q = q + reference.out_of_basis(rotated_q - inner_q, basis)
            rotated_k = k + reference.out_of_basis(rotated_k - inner_k, key_basis)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)


def _share_a_basis(one: Rotation, other: Rotation) -> bool:
    """Return whether q and k share a basis that may be omitted, as two rotations of one encoding do."""
    if isinstance(one, Commuting) and isinstance(other, Commuting):
        # Kernels apply U also to blocks that never rotate, so these must be the same: compare factors and w too.
        return all(_equal(getattr(one, name), getattr(other, name)) for name in ("factors", "angular", "basis"))
    if isinstance(one, PlanarInBasis) and isinstance(other, PlanarInBasis):
        # Two learned bases with equal values must both be applied, to get both gradients.
        learned = one.basis.requires_grad or other.basis.requires_grad
        return one.basis is other.basis or (not learned and _equal(one.basis, other.basis))
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same object, or have equal values if these can be read."""
    return one is other or (can_read(one) and can_read(other) and torch.equal(one, other))


def _split(rotation: Rotation) -> tuple[Tensor | None, Rotation]:
    """Split a rotation into its basis, None if it has none, and the rotation in that basis."""
    return (rotation.basis, rotation.planar) if isinstance(rotation, PlanarInBasis) else (None, rotation)


def _rotate_wide(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate in the widest dtype of x, the rotation and float32; return the dtype of x."""
    if rotation.rotary_dim == 0:
        return x
    wide = torch.promote_types(wide_dtype(x), rotation.dtype)
    with without_autocast(x):
        return reference.rotate_one(x.to(wide), rotation.to(wide)).to(x.dtype)


def _rotate_one_fast(x: Tensor, rotation: Rotation, scores_only: bool) -> Tensor:
    return _rotate_fast(x, _empty_batch(x), rotation, scores_only)[0]


def _empty_batch(like: Tensor) -> Tensor:
    return like.new_empty((*like.shape[:-4], 0, *like.shape[-3:]))


def _rotate_fast(q: Tensor, k: Tensor, rotation: Rotation, scores_only: bool) -> tuple[Tensor, Tensor]:
    """Rotate q and k by the kernels, which take one batch dimension."""
    if rotation.rotary_dim == 0:
        return q, k
    flat = (_flatten_batch(q), _flatten_batch(k))
    if isinstance(rotation, Planar):
        positions = with_batch_dim(rotation.positions, 3)
        table = None if rotation.table is None else with_batch_dim(rotation.table, 5)
        rotated = call("rotate_planar", *flat, positions, rotation.frequencies, table, rotation.halves)
    elif isinstance(rotation, Commuting):
        rotated = call(
            "rotate_basis",
            *flat,
            with_batch_dim(rotation.positions, 3),
            rotation.factors,
            rotation.base,
            rotation.basis,
            rotation.angular,
            not scores_only,
        )
    else:
        assert isinstance(rotation, Block)
        table = with_batch_dim(rotation.table.to(torch.float32), 6)
        tangent = table.new_empty(0) if rotation.tangent is None else with_batch_dim(rotation.tangent, 5)
        rotated = call("rotate_block", *flat, table.detach(), tangent)
    return rotated[0].reshape(q.shape), rotated[1].reshape(k.shape)


def _flatten_batch(x: Tensor) -> Tensor:
    """Flatten all leading dimensions into one batch dimension."""
    return x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, -4)


def _inputs(rotation: Rotation) -> tuple[Tensor, ...]:
    if isinstance(rotation, Planar):
        return rotation.positions, rotation.frequencies
    if isinstance(rotation, Commuting):
        return rotation.positions, rotation.factors, rotation.base
    return (rotation.table,) if isinstance(rotation, Block) else (rotation.blocks(),)


def _takes_kernels(kernel: str, q: Tensor, k: Tensor, rotation: Rotation, key_rotation: Rotation) -> bool:
    """Return whether a kernel rotates; an explicitly chosen backend raises if it cannot."""
    if not takes_kernels(kernel, q, k, *_inputs(rotation), *_inputs(key_rotation)):
        return False
    leading = max(q.ndim, k.ndim) - 3
    reason = _unsupported_reason(rotation, leading) or _unsupported_reason(key_rotation, leading)
    if q.dtype != k.dtype and q.device.type != "cpu":
        reason = f"needs q and k of one dtype, got {q.dtype} and {k.dtype}"
    if reason is not None:
        refuse(reason)
    return reason is None


def _kernel(rotation: Rotation, key_rotation: Rotation) -> str:
    """Name the operator of a rotation; of two kinds that differ, of neither: the reference computes."""
    names = {Planar: "rotate_planar", Commuting: "rotate_basis", Block: "rotate_block"}
    name = names.get(type(rotation), "")
    return name if type(rotation) is type(key_rotation) else ""


def _unsupported_reason(rotation: Rotation, leading: int) -> str | None:
    """Return why no kernel supports a rotation, or None if one does."""
    *batch, _, _ = rotation.shape
    if not isinstance(rotation, (Planar, Commuting, Block)):
        return f"supports Planar, Commuting and Block rotations, got {type(rotation).__name__}"
    if len(batch) > 1 or (leading > 1 and batch not in ([], [1])):
        return f"needs positions shared by all samples, or one batch dimension in both, got {tuple(batch)}"
    learned = isinstance(rotation, (Planar, Block)) and rotation.table is not None and rotation.table.requires_grad
    if learned and getattr(rotation, "tangent", None) is None:
        return "needs a table without requires_grad, or with a tangent, got one that requires a gradient"
    return None


def _check(name: str, x: Tensor, rotation: Rotation) -> None:
    if not isinstance(rotation, Rotation):
        rule = "rotation must be encoding(positions), what an encoding returns when it is called with positions"
        raise ValueError(f"{rule}, got {type(rotation).__name__}")
    if x.ndim < 3 or not x.is_floating_point():
        raise ValueError(
            f"{name} must be floating point (batch, heads, tokens, head_dim), got {x.dtype} {tuple(x.shape)}"
        )
    *batch, _, tokens, head_dim = x.shape
    *rotation_batch, _, rotation_tokens = rotation.shape
    if head_dim != rotation.head_dim:
        raise ValueError(f"head_dim of {name} must be the rotation's {rotation.head_dim}, got {head_dim}")
    if tokens != rotation_tokens:
        rule = f"{name} must have the rotation's {rotation_tokens} tokens, got {tokens}"
        raise ValueError(f"{rule}{_hint_of_tokens(x, rotation_tokens)}")
    aligned = batch[len(batch) - len(rotation_batch) :] if len(rotation_batch) <= len(batch) else None
    if aligned is None or any(own not in (1, of_x) for own, of_x in zip(rotation_batch, aligned, strict=True)):
        raise ValueError(
            f"positions must have no batch dimension or that of {name}, {tuple(batch)}, got {tuple(rotation_batch)}"
        )


def _hint_of_tokens(x: Tensor, expected: int) -> str:
    """Return the likely cause of another number of tokens than the rotation's."""
    more = x.shape[-2] - expected
    if x.shape[-3] == expected:
        layouts = 'layout="bthd" is (batch, tokens, heads, head_dim), "bhtd" (batch, heads, tokens, head_dim)'
        return f"; it has as many heads: {layouts}"
    if 1 <= more <= MANY_PREFIX_TOKENS:
        return f"; for {more} more in front (CLS, registers) pass positions through tr.prefix(positions, {more})"
    return ""


def _check_heads(q: Tensor, k: Tensor, rotation: Rotation, key_rotation: Rotation) -> None:
    """Raise unless key heads divide query heads, and rotations have 1 head, the heads of q or the heads of k."""
    heads, key_heads = q.shape[-3], k.shape[-3]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"heads of q must be a multiple of the heads of k, got {heads} and {key_heads}")
    for name, made_for, shared in (
        ("q", rotation.heads, rotation.shape[-2] == 1),
        ("k", key_rotation.heads, key_rotation.shape[-2] == 1),
    ):
        if made_for not in (1, heads, key_heads):
            raise ValueError(f"heads of q or k must be the rotation's {made_for}, got {heads} and {key_heads}")
        if name == "k" and not shared and made_for != key_heads:
            hint = f"for grouped queries build the encoding with num_heads={key_heads} or shared_heads=True"
            raise ValueError(f"heads of k must be the rotation's {made_for}, got {key_heads}; {hint}")
