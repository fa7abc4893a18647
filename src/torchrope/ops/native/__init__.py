"""CPU kernels in C, called through ctypes on the memory of tensors, parallelised over `torch.get_num_threads()`.

One library is built for each instruction set that the compiler supports; the fastest one that the processor supports
is loaded. If none was built, `LIBRARY` is None and the reference computes.
"""

import ctypes
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from torchrope.tensors import empty_rows

_INTEGER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes of q and k in the kernels; rotations are float32."""

_CAPABILITY = {"AVX512": ("avx512", "avx2", "generic"), "AVX2": ("avx2", "generic")}


def load(path: str) -> ctypes.CDLL:
    """Load a library of kernels, to be assigned to `LIBRARY`."""
    library = ctypes.CDLL(path)
    library.torchrope_planar_again.argtypes = [_ADDRESS, _INTEGER]
    return library


def _load_fastest() -> ctypes.CDLL | None:
    for name in _CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ("generic",)):
        spec = find_spec(f"{__name__}._{name}")
        if spec is not None and spec.origin is not None:
            try:
                return load(spec.origin)
            except (OSError, AttributeError):  # OSError: built for another system; AttributeError: from other sources
                continue
    return None


LIBRARY = _load_fastest()
"""The library for this processor, or None."""


class _Rows(ctypes.Structure):
    _fields_ = [("data", _ADDRESS), ("stride", _INTEGER * 3), ("dtype", _INTEGER)]


class _Side(ctypes.Structure):
    _fields_ = [("batch", _INTEGER), ("heads", _INTEGER), ("x", _Rows), ("grad", _Rows), ("out", _Rows)]


def _integers(names: str) -> list[tuple[str, Any]]:
    return [(name, _INTEGER) for name in names.split()]


def _addresses(names: str) -> list[tuple[str, Any]]:
    return [(name, _ADDRESS) for name in names.split()]


class _Arguments(ctypes.Structure):
    """Arguments of a kernel, laid out as in the C sources; the first field, the size, detects a mismatched build."""

    kept: list[Tensor]

    def __init__(self) -> None:
        super().__init__(size=ctypes.sizeof(self))
        self.kept = []

    def set(self, **fields: int | bool | Tensor | None) -> None:
        """Set fields; for a tensor its address, after conversion to contiguous float32 if needed."""
        for name, value in fields.items():
            setattr(self, name, self.keep(value) if isinstance(value, Tensor) else value)

    def keep(self, tensor: Tensor) -> int:
        """Return the address of a tensor in contiguous float32, kept alive as long as this object."""
        self.kept.append(_contiguous_float(tensor))
        return self.kept[-1].data_ptr()

    def run(self, name: str, *settings: int, items: int = 1) -> None:
        """Call a kernel, unless `items` is 0: empty tensors have no address.

        Raises:
            MemoryError: the kernel cannot allocate its working memory.
            RuntimeError: the kernel was built from other sources than the installed ones.
        """
        status = _kernel(name)(ctypes.byref(self), *map(_INTEGER, settings)) if items else 0
        if status:
            _raise_for(name, status)


class _Sides(_Arguments):
    """Arguments of a kernel that rotates q and k."""

    sides: Any

    def set_sides(
        self, q: Tensor, k: Tensor, grad_q: Tensor | None = None, grad_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Set the inputs and allocate the outputs; return the outputs.

        Packed sizes and strides are cached by layout: packing them takes longer than a kernel on small inputs.
        """
        layout = _layout_of(q, k) if grad_q is None or grad_k is None else _layout_of(q, k, grad_q, grad_k)
        sides = _LAYOUTS.get(layout)
        if sides is None:
            return self._describe_sides(layout, q, k, grad_q, grad_k)
        ctypes.memmove(ctypes.byref(self, _SIDES_AT), sides, _SIDES.size)
        out_q, out_k = torch.empty_like(q), torch.empty_like(k)
        set_address = _ONE_ADDRESS.pack_into
        set_address(self, _Q_AT, q.data_ptr())
        set_address(self, _K_AT, k.data_ptr())
        set_address(self, _Q_AT + _OUT, out_q.data_ptr())
        set_address(self, _K_AT + _OUT, out_k.data_ptr())
        if grad_q is not None and grad_k is not None:
            set_address(self, _Q_AT + _GRAD, grad_q.data_ptr())
            set_address(self, _K_AT + _GRAD, grad_k.data_ptr())
        return out_q, out_k

    def _describe_sides(
        self, layout: tuple, q: Tensor, k: Tensor, grad_q: Tensor | None, grad_k: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Set inputs and outputs of a layout that is not cached; cache it unless a tensor is copied."""
        given = [x for x in (q, k, grad_q, grad_k) if x is not None]
        in_place = all(x.stride(-1) == 1 for x in given) and all(torch.empty_like(x).stride(-1) == 1 for x in (q, k))
        q, k = self._with_contiguous_channels(q), self._with_contiguous_channels(k)
        if grad_q is not None and grad_k is not None:
            grad_q, grad_k = self._with_contiguous_channels(grad_q), self._with_contiguous_channels(grad_k)
        out = empty_rows(q), empty_rows(k)
        _SIDES.pack_into(self, _SIDES_AT, *_side(q, grad_q, out[0]), *_side(k, grad_k, out[1]))
        if in_place:
            if len(_LAYOUTS) >= _MOST_LAYOUTS:
                _LAYOUTS.clear()
            _LAYOUTS[layout] = bytes(self)[_SIDES_AT : _SIDES_AT + _SIDES.size]
        return out

    def _with_contiguous_channels(self, x: Tensor) -> Tensor:
        if x.stride(-1) == 1:
            return x
        self.kept.append(x.contiguous())
        return self.kept[-1]


_LAYOUTS: dict[tuple, bytes] = {}
"""The sides of arguments by sizes, strides and dtypes of q, k and their gradients; addresses are set by each call."""

_MOST_LAYOUTS = 256
_SIDES = struct.Struct(f"{2 * ctypes.sizeof(_Side) // 8}q")
_SIDES_AT = _AFTER_SIZE = 8
_ONE_ADDRESS = struct.Struct("q")
_Q_AT = _SIDES_AT + _Side.x.offset
_K_AT = _Q_AT + ctypes.sizeof(_Side)
_GRAD, _OUT = _Side.grad.offset - _Side.x.offset, _Side.out.offset - _Side.x.offset
_ABSENT = (0, 0, 0, 0, 0)


def _side(x: Tensor, grad: Tensor | None, out: Tensor) -> tuple[int, ...]:
    """Return the fields of a `_Side` as numbers; packing them is many times faster than setting fields by name."""
    dtype = DTYPES[x.dtype]
    return (
        *(*x.shape[:2], x.data_ptr(), *x.stride()[:3], dtype),
        *(_ABSENT if grad is None else (grad.data_ptr(), *grad.stride()[:3], DTYPES[grad.dtype])),
        *(out.data_ptr(), *out.stride()[:3], dtype),
    )


class _Angles(ctypes.Structure):
    _fields_ = _integers("tokens axes heads pairs halves split") + _addresses("positions frequencies table")


class _Norm(ctypes.Structure):
    _fields_ = [("kind", _INTEGER), ("eps", ctypes.c_double), *_addresses("weight bias d_weight d_bias")]


class _Planar(_Sides):
    _fields_ = [
        ("size", _INTEGER),
        ("sides", _Side * 2),
        ("angles", _Angles),
        *_integers("head_dim sets threads"),
        *_addresses("d_frequencies d_positions"),
        ("norms", _Norm * 2),
    ]

    def set_norms(
        self, weights: Sequence[Tensor | None], kinds: Sequence[int], eps: Sequence[float], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Set the norms of q and k; return zeros for the gradients to those of their weights that are wanted."""
        gradients = [None if w is None else _gradient(w, needed) for w, needed in zip(weights, wanted, strict=True)]
        sides = (self._norm(side, weights, kinds[side], eps[side], gradients) for side in (0, 1))
        _NORMS.pack_into(self, _Planar.norms.offset, *(number for side in sides for number in side))
        return gradients

    def _norm(
        self, side: int, weights: Sequence[Tensor | None], kind: int, eps: float, gradients: Sequence[Tensor | None]
    ) -> tuple[int | float, ...]:
        """Return the fields of a `_Norm` as numbers."""
        if kind == 0:
            return 0, 0.0, 0, 0, 0, 0
        weight, bias = weights[2 * side : 2 * side + 2]
        weight = torch.ones(self.head_dim) if weight is None else weight
        of_bias = 0 if kind == 1 else self.keep(torch.zeros(self.head_dim) if bias is None else bias)
        d_weight, d_bias = (_address_of(gradient) or 0 for gradient in gradients[2 * side : 2 * side + 2])
        return kind, eps, self.keep(weight), of_bias, d_weight, d_bias


_NORMS = struct.Struct(2 * "qdqqqq")


class _Block(_Sides):
    _fields_ = [
        ("size", _INTEGER),
        ("sides", _Side * 2),
        *_integers("tokens heads blocks b head_dim sets threads"),
        ("table", _ADDRESS),
        ("table_stride", _INTEGER * 6),
        ("d_tangent", _ADDRESS),
    ]


class _Basis(_Sides):
    _fields_ = [
        ("size", _INTEGER),
        ("sides", _Side * 2),
        *_integers("tokens axes heads blocks b head_dim sets threads outer"),
        *_addresses("positions coefficients basis angular d_coefficients d_positions d_base"),
    ]


class _SkewExp(_Arguments):
    _fields_ = [
        *_integers("size heads blocks b axes sets tokens threads"),
        *_addresses("positions generators table tangent d_generators d_positions"),
    ]


class _SkewEig(_Arguments):
    _fields_ = _integers("size count b threads") + _addresses("base basis angular")


class _Skew(_Arguments):
    _fields_ = _integers("size count b threads") + _addresses("upper block")


class _PlanarCall(ctypes.Structure):
    """A call of the planar kernel: a cached layout, and the tensors of this call."""

    _fields_ = [
        ("size", _INTEGER),
        ("layout", ctypes.POINTER(_Planar)),
        *_addresses("positions frequencies table q k out_q out_k grad_q grad_k d_frequencies d_positions"),
        ("threads", _INTEGER),
    ]


_PACK_CALL = struct.Struct(f"{ctypes.sizeof(_PlanarCall) // 8}q").pack
_CALL_SIZE = ctypes.sizeof(_PlanarCall)
_DESCRIBED: dict[tuple, tuple[int, _Planar]] = {}
"""Cached layouts of calls, with their addresses, by sizes, strides and dtypes."""


class PlanarCall:
    """Kernel of planar rotations by given angles.

    Args:
        positions: `(tokens, axes)` or `(1 or batch, tokens, axes)`, float32.
        frequencies: `(axes, heads or 1, pairs)`, float32.
        table: cos and sin `(1 or batch, heads or 1, tokens, pairs, 2)`, read instead of computed if given.
        halves: Whether pair i is channels (i, i + pairs) instead of (2i, 2i + 1).
        head_dim: Channels per head.
        split: Whether the table is `(1 or batch, heads or 1, tokens, 2, pairs)`, all cos before all sin of a token.
    """

    def __init__(
        self,
        positions: Tensor,
        frequencies: Tensor,
        table: Tensor | None,
        halves: bool,
        head_dim: int,
        split: bool = False,
    ) -> None:
        *sets, tokens, axes = positions.shape
        _, heads, pairs = frequencies.shape
        self._sizes = tokens, axes, heads, pairs, int(halves), int(split)
        self._head_dim, self._sets = head_dim, sets[0] if sets else 1
        self._kept = [x if x is None else _contiguous_float(x) for x in (positions, frequencies, table)]
        self._addresses = tuple(_address_of(x) or 0 for x in self._kept)
        self._key = (*self._sizes, head_dim, self._sets)

    def __call__(self, q: Tensor, k: Tensor, layout: tuple) -> tuple[Tensor, Tensor]:
        """Rotate channel pairs of q and k, whose layout is their shapes, strides and dtypes."""
        described = _DESCRIBED.get((layout, self._key))
        if described is None:
            return self._describe_and_run(layout, q, k)
        out_q, out_k = torch.empty_like(q), torch.empty_like(k)
        self._run(described, 0, q.data_ptr(), k.data_ptr(), out_q.data_ptr(), out_k.data_ptr(), 0, 0, 0, 0)
        return out_q, out_k

    def backward(
        self,
        grad_q: Tensor,
        grad_k: Tensor,
        q: Tensor,
        k: Tensor,
        positions: Tensor | None,
        frequencies: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Compute the gradients of q, k, and of positions and frequencies if these are given."""
        layout = _layout_of(q, k, grad_q, grad_k)
        d_positions, d_frequencies = (None if x is None else _gradient(x, True) for x in (positions, frequencies))
        of_angles = _address_of(d_frequencies) or 0, _address_of(d_positions) or 0
        described = _DESCRIBED.get((layout, self._key))
        if described is None:
            out = self._describe_and_run(layout, q, k, grad_q, grad_k, of_angles)
        else:
            out = torch.empty_like(q), torch.empty_like(k)
            sides = q.data_ptr(), k.data_ptr(), out[0].data_ptr(), out[1].data_ptr()
            self._run(described, 1, *sides, grad_q.data_ptr(), grad_k.data_ptr(), *of_angles)
        return (*out, d_positions, d_frequencies)

    def _run(self, described: tuple[int, _Planar], backward: int, *addresses: int) -> None:
        call = _PACK_CALL(_CALL_SIZE, described[0], *self._addresses, *addresses, torch.get_num_threads())
        status = _kernel("torchrope_planar_again")(call, backward)
        if status:
            _raise_for("torchrope_planar", status)

    def _describe_and_run(
        self,
        layout: tuple,
        q: Tensor,
        k: Tensor,
        grad_q: Tensor | None = None,
        grad_k: Tensor | None = None,
        of_angles: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel; cache the layout if its tensors are read and written in place."""
        call = self._arguments()
        out = call.set_sides(q, k, grad_q, grad_k)
        call.d_frequencies, call.d_positions = of_angles
        call.run("torchrope_planar", int(grad_q is not None))
        if layout in _LAYOUTS:
            if len(_DESCRIBED) >= _MOST_LAYOUTS:
                _DESCRIBED.clear()
            _DESCRIBED[layout, self._key] = (ctypes.addressof(call), call)
        return out

    def normed(
        self, q: Tensor, k: Tensor, weights: Sequence[Tensor | None], kinds: Sequence[int], eps: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Normalise q and k, then rotate them, as `rotate_normed`."""
        call = self._arguments()
        call.set_norms(weights, kinds, eps, _NONE_WANTED)
        out = call.set_sides(q, k)
        call.run("torchrope_planar", 0)
        return out

    def normed_backward(
        self,
        grad_q: Tensor,
        grad_k: Tensor,
        q: Tensor,
        k: Tensor,
        positions: Tensor | None,
        frequencies: Tensor | None,
        weights: Sequence[Tensor | None],
        kinds: Sequence[int],
        eps: Sequence[float],
        wanted: Sequence[bool],
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Compute the gradients of q, k, of positions and frequencies if given, and of the weights in `wanted`."""
        call = self._arguments()
        of_weights = call.set_norms(weights, kinds, eps, wanted)
        out = call.set_sides(q, k, grad_q, grad_k)
        d_positions, d_frequencies = (None if x is None else _gradient(x, True) for x in (positions, frequencies))
        call.d_positions, call.d_frequencies = _address_of(d_positions), _address_of(d_frequencies)
        call.run("torchrope_planar", 1)
        return (*out, [d_positions, d_frequencies, *of_weights])

    def _arguments(self) -> _Planar:
        """Describe the angles to the kernel."""
        call = _Planar()
        call.head_dim, call.sets, call.threads = self._head_dim, self._sets, torch.get_num_threads()
        _ANGLES.pack_into(call, _Planar.angles.offset, *self._sizes, *self._addresses)
        return call


_NONE_WANTED = (False,) * 4


_ANGLES = struct.Struct("9q")


def rotate_planar(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None = None, halves: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate channel pairs by the angles  φ_i = sum_a p_a f_ai.

    Args:
        q: `(batch, heads, tokens, head_dim)`, float32, bfloat16 or float16.
        k: As q, with its own batch and heads.
        positions: `(1 or batch, tokens, axes)`, float32.
        frequencies: `(axes, heads or 1, pairs)`, float32.
        table: cos and sin `(1 or batch, heads or 1, tokens, pairs, 2)`, read instead of computed if given.
        halves: Whether pair i is channels (i, i + pairs) instead of (2i, 2i + 1).

    Returns:
        Rotated q and k, in the dtypes of the inputs.
    """
    return PlanarCall(positions, frequencies, table, halves, q.shape[3])(q, k, _layout_of(q, k))


def rotate_planar_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    halves: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute gradients to q, k, and if wanted to positions and frequencies."""
    call = PlanarCall(positions, frequencies, table, halves, q.shape[3])
    of_positions, of_frequencies = (positions if wanted[0] else None), (frequencies if wanted[1] else None)
    return call.backward(grad_q, grad_k, q, k, of_positions, of_frequencies)


def rotate_normed(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    halves: bool,
    weights: Sequence[Tensor | None],
    kinds: Sequence[int],
    eps: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Normalise q and k over head_dim, then rotate channel pairs as `rotate_planar` does.

    Args:
        q: As in `rotate_planar`, and so all arguments up to halves.
        weights: Weight and bias of the norm of q, then of that of k, each `(head_dim,)`; None for ones and zeros.
        kinds: Of the norms of q and k: 0 no norm, 1 RMSNorm, which has no bias, 2 LayerNorm.
        eps: Of the norms of q and k: added to the mean of squares or the variance.
    """
    return PlanarCall(positions, frequencies, table, halves, q.shape[3]).normed(q, k, weights, kinds, eps)


def rotate_normed_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    halves: bool,
    weights: Sequence[Tensor | None],
    kinds: Sequence[int],
    eps: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Compute gradients to q, k, and if wanted to positions, frequencies and the four weights."""
    call = PlanarCall(positions, frequencies, table, halves, q.shape[3])
    of_positions, of_frequencies = (positions if wanted[0] else None), (frequencies if wanted[1] else None)
    return call.normed_backward(grad_q, grad_k, q, k, of_positions, of_frequencies, weights, kinds, eps, wanted[2:])


def rotate_block(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply channel blocks by the matrices of a table `(1 or batch, heads, tokens, blocks, b, b)`, any strides."""
    call = _block_arguments(table, q.shape[3])
    out = call.set_sides(q, k)
    call.run("torchrope_block", 0)
    return out


def rotate_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute gradients to q, k and to the tangent `(1 or batch, heads, tokens, blocks, b (b - 1) / 2)`."""
    call = _block_arguments(table, q.shape[3])
    out = call.set_sides(q, k, grad_q, grad_k)
    b = table.shape[-1]
    tangent = q.new_empty((*table.shape[:4], b * (b - 1) // 2), dtype=torch.float32) if wanted else None
    call.set(d_tangent=_address_of(tangent))
    call.run("torchrope_block", 1)
    return (*out, tangent)


def _block_arguments(table: Tensor, head_dim: int) -> _Block:
    call = _Block()
    sets, heads, tokens, blocks, b, _ = table.shape
    call.set(tokens=tokens, heads=heads, blocks=blocks, b=b, head_dim=head_dim, sets=sets)
    call.set(threads=torch.get_num_threads(), table=table.data_ptr())
    call.table_stride[:] = table.stride()
    return call


def rotate_basis(
    q: Tensor, k: Tensor, positions: Tensor, coefficients: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, Tensor]:
    """Rotate in the planes of a basis:  U rot(s w) U^T x,  s = sum_a p_a c_a;  rot(s w) U^T x unless `outer`.

    Args:
        q: `(batch, heads, tokens, head_dim)`, float32, bfloat16 or float16.
        k: As q, with its own batch and heads.
        positions: `(1 or batch, tokens, axes)`.
        coefficients: `(axes, heads, blocks)`.
        basis: `(heads, blocks, b, b)`.
        angular: `(heads, blocks, b / 2)`.
        outer: Whether to multiply by the outer U; blocks that never rotate are always multiplied by it.

    Returns:
        Rotated q and k, in the dtypes of the inputs.
    """
    call = _basis_arguments(q, positions, coefficients, basis, angular, outer)
    out = call.set_sides(q, k)
    call.run("torchrope_basis", 0)
    return out


def rotate_basis_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    coefficients: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute gradients to q, k, and if wanted positions, coefficients and the base  U diag([[0, -w], [w, 0]]) U^T."""
    of_base = any(wanted)
    gradients = _gradient(coefficients, of_base), _gradient(positions, wanted[0]), _gradient(basis, of_base)
    call = _basis_arguments(q, positions, coefficients, basis, angular, outer, gradients)
    out = call.set_sides(q, k, grad_q, grad_k)
    call.run("torchrope_basis", 1)
    d_coefficients, d_positions, d_base = gradients
    return (*out, d_positions, d_coefficients, d_base)


def _basis_arguments(
    q: Tensor,
    positions: Tensor,
    coefficients: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    gradients: tuple[Tensor | None, ...] = (None, None, None),
) -> _Basis:
    call = _Basis()
    axes, heads, blocks = coefficients.shape
    _, _, tokens, head_dim = q.shape
    sizes = tokens, axes, heads, blocks, basis.shape[-1], head_dim, len(positions)
    addresses = map(call.keep, (positions, coefficients, basis, angular))
    of_gradients = (_address_of(x) or 0 for x in gradients)
    _BASIS.pack_into(call, _Basis.tokens.offset, *sizes, torch.get_num_threads(), outer, *addresses, *of_gradients)
    return call


_BASIS = struct.Struct("16q")


def exp_generators(positions: Tensor, generators: Tensor) -> Tensor:
    """Compute exp(sum_a p_a A_a): positions `(sets, tokens, axes)`, generators `(axes, heads, blocks, b, b)` to
    `(sets, heads, tokens, blocks, b, b)`, each block's transpose contiguous."""
    table = _table(positions, generators)
    call = _exponents(positions, generators, table)
    call.run("torchrope_skew_exp", 0, items=table.numel())
    return table.mT


def exp_generators_backward(
    positions: Tensor, generators: Tensor, tangent: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """Compute gradients to positions, if wanted, and generators from the gradient of the tangent."""
    call = _exponents(positions, generators, None)
    d_positions, d_generators = _gradient(positions, wanted), _gradient(generators, True)
    call.set(tangent=tangent, d_generators=_address_of(d_generators), d_positions=_address_of(d_positions))
    call.run("torchrope_skew_exp", 1, items=tangent.numel())
    return d_positions, d_generators  # type: ignore[return-value]


def skew_exp(exponents: Tensor) -> Tensor:
    """Compute exp of skew blocks `(count, b, b)`, each block's transpose contiguous."""
    table = torch.empty_like(exponents, memory_format=torch.contiguous_format)
    _exponents(None, exponents[None, :, None], table).run("torchrope_skew_exp", 0)
    return table.mT


def skew_exp_backward(exponents: Tensor, tangent: Tensor) -> Tensor:
    """Compute the skew gradient to the exponents from the gradient of the tangent `(count, b (b - 1) / 2)`."""
    call = _exponents(None, exponents[None, :, None], None)
    gradient = torch.empty_like(exponents, memory_format=torch.contiguous_format)
    call.set(tangent=tangent, d_generators=_address_of(gradient))
    call.run("torchrope_skew_exp", 1)
    return gradient


def _exponents(positions: Tensor | None, generators: Tensor, table: Tensor | None) -> _SkewExp:
    call = _SkewExp()
    axes, heads, blocks, b, _ = generators.shape
    sets, tokens = positions.shape[:2] if positions is not None else (1, 1)
    call.set(heads=heads, blocks=blocks, b=b, axes=axes, sets=sets, tokens=tokens, threads=torch.get_num_threads())
    call.set(positions=positions, generators=generators, table=_address_of(table))
    return call


def skew_eig(base: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose skew blocks `(count, b, b)`, b even, into planes, frequencies:  B = U diag([[0, -w], [w, 0]]) U^T."""
    count, b, _ = base.shape
    basis, angular = base.new_empty(count, b, b), base.new_empty(count, b // 2)
    call = _SkewEig()
    _SKEW_EIG.pack_into(call, _AFTER_SIZE, count, b, torch.get_num_threads(), *map(call.keep, (base, basis, angular)))
    call.run("torchrope_skew_eig")
    return basis, angular


_SKEW_EIG, _SKEW = struct.Struct("6q"), struct.Struct("5q")


def skew(upper: Tensor, block_size: int) -> Tensor:
    """Build skew blocks `(..., b, b)` from their strict upper triangles `(..., b (b - 1) / 2)`, row by row."""
    block = upper.new_empty(*upper.shape[:-1], block_size, block_size)
    _run_skew(upper, block, backward=False)
    return block


def skew_backward(d_block: Tensor) -> Tensor:
    """Compute the gradient to the strict upper triangles from that of the blocks."""
    b = d_block.shape[-1]
    d_upper = d_block.new_empty(*d_block.shape[:-2], b * (b - 1) // 2)
    _run_skew(d_upper, d_block, backward=True)
    return d_upper


def _run_skew(upper: Tensor, block: Tensor, *, backward: bool) -> None:
    call, b = _Skew(), block.shape[-1]
    count = block.numel() // b**2
    _SKEW.pack_into(call, _AFTER_SIZE, count, b, torch.get_num_threads(), call.keep(upper), call.keep(block))
    call.run("torchrope_skew", int(backward), items=upper.numel())


def _kernel(name: str) -> Any:
    return getattr(LIBRARY, name)


def _raise_for(name: str, status: int) -> None:
    if status == _OTHER_LAYOUT:
        rule = "kernels must be built from the installed sources: rebuild torchrope"
        raise RuntimeError(f"{rule}, got {name} with another argument layout")
    raise MemoryError(f"{name} needs working memory, which the system could not allocate")


_OTHER_LAYOUT = 2


def _gradient(like: Tensor, wanted: bool) -> Tensor | None:
    """Allocate a gradient as zeros, because a kernel skips empty inputs; None if not wanted."""
    return like.new_zeros(like.shape, dtype=torch.float32) if wanted else None


def _table(positions: Tensor, generators: Tensor) -> Tensor:
    (sets, tokens, _), (_, heads, blocks, b, _) = positions.shape, generators.shape
    return generators.new_empty((sets, heads, tokens, blocks, b, b), dtype=torch.float32)


def _contiguous_float(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float32 and tensor.is_contiguous():
        return tensor
    return tensor.detach().to(torch.float32).contiguous()


def _layout_of(q: Tensor, k: Tensor, *gradients: Tensor) -> tuple:
    """Return the shapes, strides and dtypes by which calls are cached."""
    layout: tuple = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype)
    for x in gradients:
        layout = (*layout, x.shape, x.stride(), x.dtype)
    return layout


def _address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
