"""`rotate`: apply a rotation to queries and keys, by a kernel or by the reference."""

import torch
from torch import Tensor, nn

from torchrope.ops import reference
from torchrope.ops.backends import takes_kernels
from torchrope.ops.direct import rotate_directly
from torchrope.ops.layouts import heads_first, warn_of_two_layouts
from torchrope.ops.library import call
from torchrope.ops.native import DTYPES
from torchrope.ops.norms import Norm, Norms, as_arguments, called, normalise, read
from torchrope.rotations import Action, Block, Commuting, Expansion, Planar, PlanarInBasis, Rotation
from torchrope.tensors import can_read, wide_dtype, with_sets, without_autocast


def rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation | Action,
    *,
    key_rotation: Rotation | Action | None = None,
    norm: Norms | None = None,
    layout: str | None = None,
    backend: str = "auto",
    scores_only: bool = False,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys:  q' = R(p) q,  k' = R(p) k,  or R(p) norm(q) and R(p) norm(k).

    The score of tokens at p and p' becomes q^T R(p)^T R(p') k, which depends on p' - p alone where the
    encoding's generators commute.

    Args:
        q: Queries `(batch, heads, tokens, head_dim)`, any strides, any number of leading dimensions; parts of a packed
            projection are such views, `q, k, v = qkv.unbind(2)`. A tensor of `torch.nested` that is jagged in its
            tokens rotates by the positions of all its tokens end to end, as `Packed` has them.
        k: Keys, same layout. Heads may be fewer (grouped queries): then each key head serves as many query heads,
            and the encoding was built with num_heads = the key heads, or its heads share one rotation.
        rotation: What an encoding returned for the positions of q, and of k where `key_rotation` is not given; of an
            `Action`, as `PoseEncoding` returns it, q' = A^-T q and k' = A k.
        key_rotation: The rotation of k, where queries and keys sit at other positions.
        norm: The norms of q and of k over head_dim, None for one without, which come before the rotation. A plain
            `nn.RMSNorm` or `nn.LayerNorm` is computed in float32 or wider and rounded once, behind the rotation, by
            the kernel that rotates where that is one of planar rotations; any other module, or one with hooks, is
            called.
        layout: "bhtd" for `(batch, heads, tokens, head_dim)`, "bthd" for `(batch, tokens, heads, head_dim)`; by default
            the first, with a warning where heads and tokens are equal in number and it cannot be checked.
        backend: "auto" takes the fastest path that serves; "native" (CPU), "triton" (GPU) and "reference" (plain
            PyTorch, any device, differentiable any number of times) name one.
        scores_only: Allow an orthogonal basis that q and k share to be left out, because only q'^T k' matters.
        tokens: What queries were projected from, `(batch, tokens, dim)`; `PaPE` alone needs them.

    Returns:
        Rotated q and k, each in the layout and dtype it came in. The arithmetic is float32, or float64 for float64.
        Of an encoding that is no rotation (`SphereHarmonics`, `HARoPE`, `PaPE`) q and k of the scores, whose channels
        may be more; divide scores by the root of head_dim, not of their number.

    Raises:
        ValueError: q or k and their rotation disagree on batch, heads, tokens or head_dim; a backend that is
            unknown or cannot serve; a norm over another shape than head_dim.

    Example:
        >>> import torch, torchrope as tr
        >>> q = k = torch.randn(1, 2, 9, 8)
        >>> rotation = tr.AxialRoPE(num_axes=2, num_heads=2, head_dim=8)(tr.grid(3, 3))
        >>> torch.allclose(rotate(q, k, rotation)[0].norm(dim=-1), q.norm(dim=-1))
        True
    """
    if isinstance(rotation, Action) or isinstance(key_rotation, Action):
        of_q, of_k = (q, k) if norm is None else (normalise("q", q, norm[0]), normalise("k", k, norm[1]))
        acted_q, acted_k = _act(of_q, of_k, rotation, key_rotation, layout, backend)
        return acted_q.to(q.dtype), acted_k.to(k.dtype)
    if layout is not None or q.is_nested or k.is_nested:
        (of_q, restore_q), (of_k, restore_k) = heads_first("q", q, layout), heads_first("k", k, layout)
        turned_q, turned_k = _rotate_normed(of_q, of_k, rotation, key_rotation, norm, backend, scores_only, tokens)
        return restore_q(turned_q), restore_k(turned_k)
    warn_of_two_layouts("q", q, layout)
    return _rotate_normed(q, k, rotation, key_rotation, norm, backend, scores_only, tokens)


def _act(
    q: Tensor,
    k: Tensor,
    action: Rotation | Action,
    key_action: Rotation | Action | None,
    layout: str | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    of_keys = action if key_action is None else key_action
    if not (isinstance(action, Action) and isinstance(of_keys, Action)):
        kinds = f"{type(action).__name__} and {type(of_keys).__name__}"
        raise ValueError(f"queries and keys must both have poses, or neither, got {kinds}")
    action.require_same_frame(of_keys)
    return action.queries(q, layout=layout, backend=backend), of_keys.keys(k, layout=layout, backend=backend)


def _rotate_normed(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    key_rotation: Rotation | None,
    norm: Norms | None,
    backend: str,
    scores_only: bool,
    tokens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if norm is None:
        return _rotate(q, k, rotation, key_rotation, backend, scores_only, tokens)
    norms = read("q", q, norm[0]), read("k", k, norm[1])
    of_q, of_k = (
        x if own is not None else called(name, x, module)
        for name, x, own, module in zip("qk", (q, k), norms, norm, strict=True)
    )
    if backend == "auto" and type(rotation) is Planar and key_rotation is None and any(norms):
        turned = rotate_directly(of_q, of_k, rotation, norms)
        if turned is not None:
            return turned[0].to(q.dtype), turned[1].to(k.dtype)
    of_keys = rotation if key_rotation is None else key_rotation
    _check("q", q, rotation)
    _check("k", k, of_keys)
    _check_heads(q, k, rotation, of_keys)
    if any(norms) and _fuses(backend, of_q, of_k, rotation, of_keys, norms):
        if key_rotation is None:
            turned = _rotate_fused(of_q, of_k, rotation, *norms)
        else:
            turned = _rotate_fused_alone(of_q, rotation, norms[0]), _rotate_fused_alone(of_k, of_keys, norms[1])
        return turned[0].to(q.dtype), turned[1].to(k.dtype)
    of_q, of_k = (x if own is None else own.wide(x) for x, own in zip((of_q, of_k), norms, strict=True))
    wide = torch.promote_types(of_q.dtype, of_k.dtype)  # kernels for GPUs take one dtype
    turned_q, turned_k = _rotate(of_q.to(wide), of_k.to(wide), rotation, key_rotation, backend, scores_only, tokens)
    return turned_q.to(q.dtype), turned_k.to(k.dtype)


def _fuses(
    backend: str,
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    key_rotation: Rotation,
    norms: tuple[Norm | None, Norm | None],
) -> bool:
    """Whether one kernel normalises and rotates: planar rotations, and weights that it reads."""
    if not (isinstance(rotation, Planar) and isinstance(key_rotation, Planar)):
        return False
    if rotation.rotary_dim == 0 or key_rotation.rotary_dim == 0:
        return False
    given = [x for norm in norms if norm is not None for x in (norm.weight, norm.bias) if x is not None]
    narrow = all(x.dtype in DTYPES and x.device.type == q.device.type for x in given)
    return narrow and _takes_kernels(backend, q, k, rotation, key_rotation)


def _rotate_fused_alone(x: Tensor, rotation: Rotation, norm: Norm | None) -> Tensor:
    return _rotate_fused(x, _no_samples(x), rotation, norm, None)[0]


def _rotate_fused(
    q: Tensor, k: Tensor, rotation: Rotation, q_norm: Norm | None, k_norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate both by the kernel, which knows one dimension of samples and weights in float32."""
    assert isinstance(rotation, Planar)
    weights, kinds, eps = as_arguments((q_norm, k_norm))
    table = None if rotation.table is None else with_sets(rotation.table, 5)
    turned = call(
        "rotate_normed",
        _with_samples(q),
        _with_samples(k),
        with_sets(rotation.positions, 3),
        rotation.frequencies,
        table,
        rotation.halves,
        *(None if x is None else x.to(torch.float32) for x in weights),
        kinds,
        eps,
    )
    return turned[0].reshape(q.shape), turned[1].reshape(k.shape)


def _rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    key_rotation: Rotation | None,
    backend: str,
    scores_only: bool,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    of_keys = rotation if key_rotation is None else key_rotation
    if backend == "auto" and type(rotation) is Planar and key_rotation is None:
        turned = rotate_directly(q, k, rotation)
        if turned is not None:
            return turned
    _check("q", q, rotation)
    _check("k", k, of_keys)
    _check_heads(q, k, rotation, of_keys)
    if isinstance(rotation, Expansion) or isinstance(of_keys, Expansion):
        return _expand(q, k, rotation, of_keys, backend, tokens)
    if isinstance(rotation, PlanarInBasis) or isinstance(of_keys, PlanarInBasis):
        return _rotate_in_bases(q, k, rotation, key_rotation, backend, scores_only)
    if not _takes_kernels(backend, q, k, rotation, of_keys):
        return _rotate_wide(q, rotation), _rotate_wide(k, of_keys)
    if key_rotation is None:
        return _rotate_fast(q, k, rotation, scores_only)
    inside = scores_only and _share_a_basis(rotation, of_keys)
    return _rotate_alone(q, rotation, inside), _rotate_alone(k, of_keys, inside)


def rotate_one(
    x: Tensor,
    rotation: Rotation,
    *,
    norm: nn.Module | Norm | None = None,
    layout: str | None = None,
    backend: str = "auto",
    scores_only: bool = False,
) -> Tensor:
    """Rotate one tensor:  x' = R(p) x,  or R(p) norm(x).  Queries or keys alone, values, or what attention returns.

    Args:
        x: `(batch, heads, tokens, head_dim)`, any strides, any number of leading dimensions, or jagged in its tokens.
        rotation: What an encoding returned for the positions of x.
        norm: As one of `rotate`'s.
        layout: As `rotate`'s.
        backend: As `rotate`'s.
        scores_only: As `rotate`'s; queries and keys must agree on it, and share the rotation.

    Returns:
        Rotated x, in the layout and dtype it came in.

    Raises:
        ValueError: as `rotate`.
    """
    if layout is not None or x.is_nested:
        own, restore = heads_first("x", x, layout)
        return restore(_rotate_one_normed(own, rotation, norm, backend, scores_only))
    warn_of_two_layouts("x", x, layout)
    return _rotate_one_normed(x, rotation, norm, backend, scores_only)


def _rotate_one_normed(
    x: Tensor, rotation: Rotation, norm: nn.Module | Norm | None, backend: str, scores_only: bool
) -> Tensor:
    if norm is None:
        return _rotate_one(x, rotation, backend, scores_only)
    own = read("x", x, norm)
    if own is None:
        return _rotate_one(called("x", x, norm), rotation, backend, scores_only).to(x.dtype)
    _check_one(x, rotation)
    if _fuses(backend, x, x, rotation, rotation, (own, None)):
        return _rotate_fused_alone(x, rotation, own)
    return _rotate_one(own.wide(x), rotation, backend, scores_only).to(x.dtype)


def _check_one(x: Tensor, rotation: Rotation) -> None:
    _check("x", x, rotation)
    if isinstance(rotation, Expansion):
        raise ValueError(f"one tensor alone needs a rotation, got {type(rotation).__name__}, which is none")
    if rotation.shape[-2] != 1 and x.shape[-3] % rotation.heads:
        raise ValueError(f"heads of x must be a multiple of the rotation's {rotation.heads}, got {x.shape[-3]}")


def _rotate_one(x: Tensor, rotation: Rotation, backend: str, scores_only: bool) -> Tensor:
    _check_one(x, rotation)
    if isinstance(rotation, PlanarInBasis):
        wide = torch.promote_types(wide_dtype(x), rotation.dtype)
        with without_autocast(x):
            inner = reference.into_basis(x.to(wide), rotation.basis)
            turned = _rotate_one(inner, rotation.planar, backend, False)
            outer = turned if scores_only else x + reference.out_of_basis(turned - inner, rotation.basis)
        return outer.to(x.dtype)
    if not _takes_kernels(backend, x, x, rotation, rotation):
        return _rotate_wide(x, rotation)
    return _rotate_alone(x, rotation, scores_only)


def _expand(
    q: Tensor, k: Tensor, rotation: Rotation, of_keys: Rotation, backend: str, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries and keys of an encoding that is no rotation, by plain PyTorch."""
    if type(rotation) is not type(of_keys):
        came = f"{type(rotation).__name__} and {type(of_keys).__name__}"
        raise ValueError(f"queries and keys must be encoded by one family, got {came}")
    if backend not in ("auto", "reference"):
        raise ValueError(f"backend {backend!r} supports rotations, got {type(rotation).__name__}")
    assert isinstance(rotation, Expansion)
    assert isinstance(of_keys, Expansion)
    wide = torch.promote_types(wide_dtype(q, k), rotation.dtype)
    with without_autocast(q):
        told = None if tokens is None else tokens.to(wide)
        return rotation.of_queries(q.to(wide), told).to(q.dtype), of_keys.of_keys(k.to(wide)).to(k.dtype)


def _rotate_in_bases(
    q: Tensor, k: Tensor, rotation: Rotation, key_rotation: Rotation | None, backend: str, scores_only: bool
) -> tuple[Tensor, Tensor]:
    """Rotate both as  x + P (rot y - y),  y = P^T x,  so that what does not turn stays as it is; P = I for other kinds.

    Scores need rot y alone where q and k share P.
    """
    of_keys = rotation if key_rotation is None else key_rotation
    basis, planar = _split(rotation)
    key_basis, key_planar = _split(of_keys)
    # float32 or wider for all steps: rounding in between would be one time too many.
    wide = torch.promote_types(wide_dtype(q, k), torch.promote_types(rotation.dtype, of_keys.dtype))
    with without_autocast(q):
        inner_q, inner_k = reference.into_basis(q.to(wide), basis), reference.into_basis(k.to(wide), key_basis)
        elsewhere = None if key_rotation is None else key_planar
        turned_q, turned_k = _rotate(inner_q, inner_k, planar, elsewhere, backend, False)
        if not (scores_only and _share_a_basis(rotation, of_keys)):
            turned_q = q + reference.out_of_basis(turned_q - inner_q, basis)
            turned_k = k + reference.out_of_basis(turned_k - inner_k, key_basis)
    return turned_q.to(q.dtype), turned_k.to(k.dtype)


def _share_a_basis(one: Rotation, other: Rotation) -> bool:
    """Whether the basis of both may be left out, as for two rotations of one encoding."""
    if isinstance(one, Commuting) and isinstance(other, Commuting):
        # Kernels come back from the basis in blocks that never rotate: factors and frequencies must agree too.
        return all(_equal(getattr(one, name), getattr(other, name)) for name in ("factors", "angular", "basis"))
    if isinstance(one, PlanarInBasis) and isinstance(other, PlanarInBasis):
        # Gradients to two bases that only happen to be equal need both to be applied.
        learned = one.basis.requires_grad or other.basis.requires_grad
        return one.basis is other.basis or (not learned and _equal(one.basis, other.basis))
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, or have equal values where these can be read."""
    return one is other or (can_read(one) and can_read(other) and torch.equal(one, other))


def _split(rotation: Rotation) -> tuple[Tensor | None, Rotation]:
    """The basis of a rotation that has one of its own, and what turns inside."""
    return (rotation.basis, rotation.planar) if isinstance(rotation, PlanarInBasis) else (None, rotation)


def _rotate_wide(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate in the wider dtype of x, the rotation and float32; give back x's own."""
    if rotation.rotary_dim == 0:
        return x
    wide = torch.promote_types(wide_dtype(x), rotation.dtype)
    with without_autocast(x):
        return reference.rotate_one(x.to(wide), rotation.to(wide)).to(x.dtype)


def _rotate_alone(x: Tensor, rotation: Rotation, scores_only: bool) -> Tensor:
    return _rotate_fast(x, _no_samples(x), rotation, scores_only)[0]


def _no_samples(like: Tensor) -> Tensor:
    return like.new_empty((*like.shape[:-4], 0, *like.shape[-3:]))


def _rotate_fast(q: Tensor, k: Tensor, rotation: Rotation, scores_only: bool) -> tuple[Tensor, Tensor]:
    """Rotate both by the kernels, which know one dimension of samples."""
    if rotation.rotary_dim == 0:
        return q, k
    flat = (_with_samples(q), _with_samples(k))
    if isinstance(rotation, Planar):
        positions = with_sets(rotation.positions, 3)
        table = None if rotation.table is None else with_sets(rotation.table, 5)
        turned = call("rotate_planar", *flat, positions, rotation.frequencies, table, rotation.halves)
    elif isinstance(rotation, Commuting):
        turned = call(
            "rotate_basis",
            *flat,
            with_sets(rotation.positions, 3),
            rotation.factors,
            rotation.base,
            rotation.basis,
            rotation.angular,
            not scores_only,
        )
    else:
        assert isinstance(rotation, Block)
        table = with_sets(rotation.table.to(torch.float32), 6)
        tangent = table.new_empty(0) if rotation.tangent is None else with_sets(rotation.tangent, 5)
        turned = call("rotate_block", *flat, table.detach(), tangent)
    return turned[0].reshape(q.shape), turned[1].reshape(k.shape)


def _with_samples(x: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, -4)


def _inputs(rotation: Rotation) -> tuple[Tensor, ...]:
    if isinstance(rotation, Planar):
        return rotation.positions, rotation.frequencies
    if isinstance(rotation, Commuting):
        return rotation.positions, rotation.factors, rotation.base
    return (rotation.table,) if isinstance(rotation, Block) else (rotation.blocks(),)


def _takes_kernels(backend: str, q: Tensor, k: Tensor, rotation: Rotation, key_rotation: Rotation) -> bool:
    """Whether kernels rotate; a backend named explicitly raises where they cannot."""
    if not takes_kernels(backend, q, k, *_inputs(rotation), *_inputs(key_rotation)):
        return False
    leading = max(q.ndim, k.ndim) - 3
    reason = _beyond_kernels(rotation, leading) or _beyond_kernels(key_rotation, leading)
    if q.dtype != k.dtype and q.device.type != "cpu":
        reason = f"needs q and k of one dtype, got {q.dtype} and {k.dtype}"
    if reason is not None and backend != "auto":
        raise ValueError(f"backend {backend!r} {reason}")
    return reason is None


def _beyond_kernels(rotation: Rotation, leading: int) -> str | None:
    """Why no kernel supports a rotation, or None."""
    *batch, _, _ = rotation.shape
    if not isinstance(rotation, (Planar, Commuting, Block)):
        return f"supports Planar, Commuting and Block rotations, got {type(rotation).__name__}"
    if len(batch) > 1 or (leading > 1 and batch not in ([], [1])):
        return f"needs positions that samples share, or one leading dimension of both, got {tuple(batch)}"
    learned = isinstance(rotation, (Planar, Block)) and rotation.table is not None and rotation.table.requires_grad
    if learned and getattr(rotation, "tangent", None) is None:
        return "has no gradient to a table that the caller made"
    return None


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
    """Key heads divide query heads; a rotation has the heads of q, or those of k and rotates each group alike."""
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
