"""Rotations on CPUs that bypass PyTorch's dispatcher: direct calls of the kernels and of their gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from torchrope.ops import native
from torchrope.ops.library import FUNCTIONS, is_observed, is_plain, normed_gradient, planar_gradient
from torchrope.ops.native import DTYPES, PlanarCall
from torchrope.ops.norms import Norm, as_arguments
from torchrope.ops.shapes import basis_fits, planar_fits
from torchrope.rotations import Commuting, Planar
from torchrope.tensors import with_batch_dim


def rotate_directly(
    q: Tensor, k: Tensor, rotation: Planar, norms: tuple[Norm | None, Norm | None] | None = None
) -> tuple[Tensor, Tensor] | None:
    """Rotate q and k, normalised first if `norms` is given, by the CPU kernel.

    Returns None if the inputs need the checks or the dispatch of `rotate`.
    """
    if torch.compiler.is_compiling() or is_observed() or not (is_plain(q) and is_plain(k)):
        return None
    checked = rotation.__dict__.get(_CACHED)
    if checked is None or not checked.is_current():
        checked = _CheckedPlanar.find(rotation)
        rotation.__dict__[_CACHED] = checked
    layout = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype)
    if checked is None or not checked.supports(q, k, layout):
        return None
    if norms is not None:
        return _normalise_and_rotate(q, k, rotation, checked, norms, layout)
    if not torch.is_grad_enabled():
        return checked.kernel_for(q, k, layout)(q, k, layout)
    positions, frequencies, table = rotation.positions, rotation.frequencies, rotation.table
    if table is not None and table.requires_grad:
        return None
    if not (q.requires_grad or k.requires_grad or positions.requires_grad or frequencies.requires_grad):
        return checked.kernel_for(q, k, layout)(q, k, layout)
    positions = with_batch_dim(positions, 3) if positions.requires_grad else positions
    return _Rotate.apply(q, k, positions, frequencies, table, rotation.halves, checked.kernel, layout)


def rotate_in_basis_directly(
    q: Tensor, k: Tensor, rotation: Commuting, scores_only: bool
) -> tuple[Tensor, Tensor] | None:
    """Rotate q and k by the CPU kernel, without the outer basis if `scores_only`.

    Returns None if the inputs need the checks or the dispatch of `rotate`.
    """
    if torch.compiler.is_compiling() or is_observed() or native.LIBRARY is None:
        return None
    positions, factors, base = rotation.positions, rotation.factors, rotation.base
    basis, angular = rotation.basis, rotation.angular
    of_rotation = positions, factors, base, basis, angular
    if not (is_plain(q) and is_plain(k) and all(map(_is_ready, of_rotation))):
        return None
    if not basis_fits(*of_rotation, rotation.head_dim):
        return None
    *sets, tokens, _ = positions.shape
    own_heads = base.shape[0]
    size = _Size(sets[0] if sets else 1, rotation.heads, own_heads, tokens, rotation.head_dim)
    if not size.fits(q, k):
        return None
    positions = with_batch_dim(positions, 3)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, positions, factors, base)):
        of_basis = FUNCTIONS["rotate_basis"]
        return of_basis.apply(q, k, positions, factors, base, basis, angular, not scores_only)
    return native.rotate_basis(q, k, positions, factors, basis, angular, not scores_only)


def _normalise_and_rotate(
    q: Tensor,
    k: Tensor,
    rotation: Planar,
    checked: "_CheckedPlanar",
    norms: tuple[Norm | None, Norm | None],
    layout: tuple,
) -> tuple[Tensor, Tensor] | None:
    """Normalise and rotate by the kernel, with a gradient if needed.

    Returns None if a weight is unsupported, or a gradient is needed and the table requires one.
    """
    weights, kinds, eps = as_arguments(norms)
    given = [x for x in weights if x is not None]
    if not all(is_plain(x) and x.dtype == torch.float32 for x in given):
        return None
    positions, frequencies, table = rotation.positions, rotation.frequencies, rotation.table
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, positions, frequencies, *given))):
        return checked.kernel_for(q, k, layout).normed(q, k, weights, kinds, eps)
    if table is not None and table.requires_grad:
        return None
    planar = (with_batch_dim(positions, 3), frequencies, table, rotation.halves)
    return _NormaliseAndRotate.apply(q, k, *planar, *weights, kinds, eps, checked.kernel)


class _Rotate(torch.autograd.Function):
    """Rotate by the kernel; gradients of gradients go through the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        frequencies: Tensor,
        table: Tensor | None,
        halves: bool,
        kernel: PlanarCall,
        layout: tuple,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, positions, frequencies, table)
        ctx.halves, ctx.kernel = halves, kernel
        return kernel(q, k, layout)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
        if torch.is_grad_enabled() or is_observed() or not (is_plain(grad_q) and is_plain(grad_k)):
            return *planar_gradient(ctx, grad_q, grad_k), None, None
        q, k, positions, frequencies, _ = ctx.saved_tensors
        _, _, needs_positions, needs_frequencies, *_ = ctx.needs_input_grad
        wanted = (positions if needs_positions else None, frequencies if needs_frequencies else None)
        return *ctx.kernel.backward(grad_q, grad_k, q, k, *wanted), None, None, None, None


class _NormaliseAndRotate(torch.autograd.Function):
    """Normalise and rotate by the kernel; gradients of gradients go through the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        frequencies: Tensor,
        table: Tensor | None,
        halves: bool,
        q_weight: Tensor | None,
        q_bias: Tensor | None,
        k_weight: Tensor | None,
        k_bias: Tensor | None,
        kinds: Sequence[int],
        eps: Sequence[float],
        kernel: PlanarCall,
    ) -> tuple[Tensor, Tensor]:
        weights = (q_weight, q_bias, k_weight, k_bias)
        ctx.save_for_backward(q, k, positions, frequencies, table, *weights)
        ctx.settings, ctx.kernel = (halves, kinds, eps), kernel
        return kernel.normed(q, k, weights, kinds, eps)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
        if torch.is_grad_enabled() or is_observed() or not (is_plain(grad_q) and is_plain(grad_k)):
            return *normed_gradient(ctx, grad_q, grad_k), None
        q, k, positions, frequencies, _, *weights = ctx.saved_tensors
        _, kinds, eps = ctx.settings
        needed = ctx.needs_input_grad
        of_planar = (positions if needed[2] else None, frequencies if needed[3] else None)
        dq, dk, parameters = ctx.kernel.normed_backward(
            grad_q, grad_k, q, k, *of_planar, weights, kinds, eps, needed[6:10]
        )
        return dq, dk, *parameters[:2], None, None, *parameters[2:], None, None, None


_CACHED = "_checked_planar"


class _Size(NamedTuple):
    """Sizes of a rotation that q and k must fit.

    Attributes:
        sets: Sets of positions: 1, or one per sample.
        heads: Heads that the rotation was built for.
        own_heads: Heads with separate generators, 1 if all share them.
        tokens: Tokens per set.
        head_dim: Channels per head.
    """

    sets: int
    heads: int
    own_heads: int
    tokens: int
    head_dim: int

    def fits(self, q: Tensor, k: Tensor) -> bool:
        """Return whether the kernels support q and k and their shapes fit."""
        shape, key_shape = q.shape, k.shape
        if len(shape) != 4 or len(key_shape) != 4 or q.dtype not in DTYPES or k.dtype not in DTYPES:
            return False
        batch, heads, tokens, head_dim = shape
        key_batch, key_heads, key_tokens, key_dim = key_shape
        return (
            head_dim == key_dim == self.head_dim
            and tokens == key_tokens == self.tokens
            and key_heads > 0
            and heads % key_heads == 0
            and (key_heads == self.heads or (self.own_heads == 1 and self.heads in (1, heads)))
            and (self.sets == 1 or batch == key_batch == self.sets)
        )


class _CheckedPlanar:
    """A planar rotation whose inputs were checked once, with its prepared kernel.

    Attributes:
        kernel: The kernel with the rotation's arguments.
        tabulated: The kernel with a precomputed table of cos and sin, by `split`. Used from the second call on if each
            angle rotates at most `_FEW_ROWS` rows (samples times heads); layers with the same rotation share the table.
        size: Sizes that q and k must fit.
        supported: The chosen kernel, None before the second use, by layout of q and k (shapes, strides, dtypes) that
            fits.
        state: The rotation's tensors, with their addresses and version counters when it was checked; inference tensors
            have no counter, and must not be modified in-place.
    """

    def __init__(self, rotation: Planar) -> None:
        self.rotation = ref(rotation)
        self.kernel = _kernel_of(rotation)
        self.tabulated: dict[bool, PlanarCall] = {}
        self.uses = 0
        self.supported: dict[tuple, PlanarCall | None] = {}
        *sets, tokens, _ = rotation.positions.shape
        own_heads = rotation.frequencies.shape[1]
        self.size = _Size(sets[0] if sets else 1, rotation.heads, own_heads, tokens, rotation.head_dim)
        tensors = (rotation.positions, rotation.frequencies, rotation.table)
        self.state = [(x, x.data_ptr(), None if x.is_inference() else x._version) for x in tensors if x is not None]

    @classmethod
    def find(cls, rotation: Planar) -> "_CheckedPlanar | None":
        """Check a rotation; return None if the kernel does not support it or would need a copy of its tensors."""
        positions, frequencies, table = rotation.positions, rotation.frequencies, rotation.table
        if native.LIBRARY is None or not planar_fits(positions, frequencies, table, rotation.head_dim):
            return None
        if not (_is_ready(positions) and _is_ready(frequencies) and (table is None or _is_ready(table))):
            return None
        return cls(rotation)

    def is_current(self) -> bool:
        """Return whether the rotation's tensors are unchanged since it was checked."""
        for x, address, version in self.state:
            if x.data_ptr() != address or (version is not None and x._version != version):
                return False
        return True

    def supports(self, q: Tensor, k: Tensor, layout: tuple) -> bool:
        """Return whether the kernel supports q and k and their shapes fit the rotation."""
        if layout in self.supported:
            return True
        if not self.size.fits(q, k):
            return False
        if len(self.supported) >= _MOST_LAYOUTS:
            self.supported.clear()
        self.supported[layout] = None
        return True

    def kernel_for(self, q: Tensor, k: Tensor, layout: tuple) -> PlanarCall:
        """Return the kernel; from the second use on, with a table if each angle rotates few rows."""
        chosen = self.supported.get(layout)
        if chosen is not None:
            return chosen
        self.uses += 1
        if self.uses < 2:
            return self.kernel
        self.supported[layout] = chosen = self._choose(q, k)
        return chosen

    def _choose(self, q: Tensor, k: Tensor) -> PlanarCall:
        rows = (len(q) * q.shape[1] + len(k) * k.shape[1]) // max(self.size.sets * self.size.own_heads, 1)
        rotation = self.rotation()
        if rows > _FEW_ROWS or rotation is None or rotation.table is not None:
            return self.kernel
        split = rotation.halves or q.dtype == torch.bfloat16
        if split not in self.tabulated:
            self.tabulated[split] = _kernel_of(rotation, _cos_and_sin(rotation, split), split)
        return self.tabulated[split]


_MOST_LAYOUTS = 256
_FEW_ROWS = 16
"""Largest number of rows per angle for which reading cos and sin is faster than computing them."""


def _is_ready(x: Tensor) -> bool:
    """Return whether the kernel can read a rotation's tensor in place."""
    return is_plain(x) and x.dtype == torch.float32 and x.is_contiguous()


def _kernel_of(rotation: Planar, table: Tensor | None = None, split: bool = False) -> PlanarCall:
    own = table if rotation.table is None else rotation.table
    return PlanarCall(rotation.positions, rotation.frequencies, own, rotation.halves, rotation.head_dim, split)


def _cos_and_sin(rotation: Planar, split: bool) -> Tensor:
    """Compute cos and sin `(sets, heads, tokens, pairs, 2)`, or if split `(sets, heads, tokens, 2, pairs)`, with the
    kernel, by rotating pairs (1, 0)."""
    positions, frequencies = with_batch_dim(rotation.positions, 3).detach(), rotation.frequencies.detach()
    pairs = frequencies.shape[2]
    units = frequencies.new_zeros(len(positions), frequencies.shape[1], positions.shape[1], 2 * pairs)
    units[..., slice(pairs) if split else slice(None, None, 2)] = 1
    return native.rotate_planar(units, units[:0], positions, frequencies, halves=split)[0]
