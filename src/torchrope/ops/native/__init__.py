"""CPU kernels in C, called through ctypes on the memory of tensors, parallelised over `torch.get_num_threads()`.

One library is built for each instruction set that the compiler supports; the fastest one that the processor supports
is loaded. If none was built, `LIBRARY` is None and the reference computes. Each function has the arguments and results
of the operator of its name (`ops/library.py`), which checks them.
"""

import ctypes
import re
import struct
import threading
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from torchrope.tensors import contiguous_channels, empty_rows

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes of q and k in the kernels; rotations are float32."""

_SIDE = "2q" + 3 * "P4q"  # batch, heads; x, grad and out: address, strides of batch, heads and tokens, dtype
_ANGLES = "5q3P"  # tokens, axes, heads, pairs, halves; positions, frequencies, table
STRUCTS = {
    "torchrope_planar": struct.Struct(f"q{2 * _SIDE}{_ANGLES}3q2P"),
    "torchrope_block": struct.Struct(f"q{2 * _SIDE}7qP6qP"),
    "torchrope_basis": struct.Struct(f"q{2 * _SIDE}9q7P"),
    "torchrope_skew_exp": struct.Struct("8q6P"),
    "torchrope_skew_eig": struct.Struct("4q3P"),
}
"""The structure of arguments of each kernel, fields as in the C sources: integers (q) and addresses (P). The first
field, the size, detects a library that was built from other sources."""

_CAPABILITY = {"AVX512": ("avx512", "avx2", "generic"), "AVX2": ("avx2", "generic")}
_OTHER_LAYOUT = 2


def kinds(kernel: str) -> str:
    """Return the kind of each argument of a kernel, q or P."""
    return re.sub(r"(\d+)(.)", lambda part: int(part[1]) * part[2], STRUCTS[kernel].format)


def load(path: str) -> ctypes.CDLL:
    """Load a library of kernels, to be assigned to `LIBRARY`."""
    library = ctypes.CDLL(path)
    for name in STRUCTS:
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_int64]
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


RECORD = threading.local()
"""`calls`: a list to which a thread that has one adds the kernels that it calls, with their arguments."""


def _run(kernel: str, fields: Sequence[int], backward: bool = False) -> None:
    """Call a kernel with the fields of its arguments after the size."""
    structure = STRUCTS[kernel]
    call(kernel, structure.pack(structure.size, *fields), backward)


def call(kernel: str, arguments: bytes, backward: bool = False) -> None:
    """Call a kernel; MemoryError, or RuntimeError for an old build."""
    if hasattr(RECORD, "calls"):
        RECORD.calls.append((kernel, arguments))
    status = getattr(LIBRARY, kernel)(arguments, backward)
    if status == _OTHER_LAYOUT:
        rule = "kernels must be built from the installed sources: rebuild torchrope"
        raise RuntimeError(f"{rule}, got {kernel} with another argument layout")
    if status:
        raise MemoryError(f"{kernel} needs working memory, which the system could not allocate")


class _Sides:
    """q, k and gradients with contiguous channels, their results, and their description for a kernel."""

    __slots__ = ("_kept", "fields", "outputs")

    def __init__(self, q: Tensor, k: Tensor, grad_q: Tensor | None = None, grad_k: Tensor | None = None) -> None:
        of_q, out_q, *kept_q = _side(q, grad_q)
        of_k, out_k, *kept_k = _side(k, grad_k)
        self.fields = of_q + of_k
        self.outputs = out_q, out_k
        self._kept = kept_q, kept_k


def _side(x: Tensor, grad: Tensor | None) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor | None]:
    """Return the fields that describe a side, its result, and the tensors to be kept until the kernel has run."""
    batch, heads, _, _ = x.shape
    x = contiguous_channels(x)
    out = empty_rows(x)
    if grad is None:
        return (batch, heads, *_rows(x), 0, 0, 0, 0, 0, *_rows(out)), out, x, None
    grad = contiguous_channels(grad.to(x.dtype))  # channels that are not rotated are copied bit by bit
    return (batch, heads, *_rows(x), *_rows(grad), *_rows(out)), out, x, grad


def _rows(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return the address, the strides of batch, heads and tokens, and the code of the dtype."""
    batch, heads, tokens, _ = x.stride()
    return x.data_ptr(), batch, heads, tokens, DTYPES[x.dtype]


def _float(x: Tensor) -> Tensor:
    """Return a tensor in contiguous float32."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.detach().to(torch.float32).contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _gradient(like: Tensor, wanted: bool) -> Tensor:
    """Allocate a gradient as zeros, because a kernel skips empty inputs; empty, at address 0, if it is not wanted."""
    return _floats(*like.shape).zero_() if wanted else _floats(0)


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def rotate_planar(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate as `torchrope.ops.dispatch.rotate_planar`, of `(batch, heads, tokens, head_dim)` and float32 positions."""
    sides = _Sides(q, k)
    _run_planar(sides, q.shape[3], (positions, frequencies, table), interleaved)
    return sides.outputs


def rotate_planar_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    interleaved: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions and frequencies, else empty tensors."""
    sides, gradients = _Sides(q, k, grad_q, grad_k), tuple(map(_gradient, (positions, frequencies), wanted))
    _run_planar(sides, q.shape[3], (positions, frequencies, table), interleaved, gradients)
    return (*sides.outputs, *gradients)


def _run_planar(
    sides: _Sides,
    head_dim: int,
    angles: tuple[Tensor, Tensor, Tensor | None],
    interleaved: bool,
    gradients: tuple[Tensor, ...] = (),
) -> None:
    positions, frequencies, table = _float(angles[0]), _float(angles[1]), angles[2]
    axes, heads, pairs = frequencies.shape
    if table is not None:
        table = _float(table)
    elif not axes:
        table = torch.stack([positions.cos(), positions.sin()], dim=-2)
    *sets, tokens, _ = positions.shape if axes else positions[..., 0, :, :].shape
    addresses = positions.data_ptr(), frequencies.data_ptr(), 0 if table is None else table.data_ptr()
    d_positions, d_frequencies = (x.data_ptr() for x in gradients) if gradients else (0, 0)
    of_call = head_dim, sets[0] if sets else 1, torch.get_num_threads(), d_frequencies, d_positions
    sizes = tokens, axes, heads, pairs, not interleaved
    _run("torchrope_planar", (*sides.fields, *sizes, *addresses, *of_call), bool(gradients))


def rotate_block(q: Tensor, k: Tensor, table: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply channel blocks by the matrices of a table `([1 or batch,] heads, tokens, blocks, b, b)`, any strides.

    The tangent, `(0,)` or `([1 or batch,] heads, tokens, blocks, b (b - 1) / 2)`, has no influence on the result.
    """
    sides = _Sides(q, k)
    _run_block(sides, q.shape[3], table, None)
    return sides.outputs


def rotate_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients to q, k and, if wanted, to the tangent."""
    b = table.shape[-1]
    d_tangent = _floats(*table.shape[:-2], b * (b - 1) // 2) if wanted else _floats(0)
    sides = _Sides(q, k, grad_q, grad_k)
    _run_block(sides, q.shape[3], table, d_tangent)
    return (*sides.outputs, d_tangent)


def _run_block(sides: _Sides, head_dim: int, table: Tensor, d_tangent: Tensor | None) -> None:
    *sets, heads, tokens, blocks, b, _ = table.shape
    sizes = tokens, heads, blocks, b, head_dim, sets[0] if sets else 1, torch.get_num_threads()
    strides = table.stride() if sets else (0, *table.stride())
    fields = (*sides.fields, *sizes, table.data_ptr(), *strides, _address(d_tangent))
    _run("torchrope_block", fields, d_tangent is not None)


def rotate_basis(
    q: Tensor, k: Tensor, positions: Tensor, factors: Tensor, base: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, Tensor]:
    """Rotate as `torchrope.ops.dispatch.rotate_basis`, with the outer U if `outer`; base is for its gradient alone."""
    sides = _Sides(q, k)
    _run_basis(sides, q.shape[3], (positions, factors, basis, angular), outer)
    return sides.outputs


def rotate_basis_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    factors: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted positions, factors and the base  U diag([[0, -w], [w, 0]]) U^T."""
    computed = wanted[0], any(wanted), any(wanted)  # the kernel computes those of factors and base together
    gradients = tuple(map(_gradient, (positions, factors, basis), computed))
    sides = _Sides(q, k, grad_q, grad_k)
    _run_basis(sides, q.shape[3], (positions, factors, basis, angular), outer, gradients)
    return (*sides.outputs, *(x if needed else _floats(0) for x, needed in zip(gradients, wanted, strict=True)))


def _run_basis(
    sides: _Sides, head_dim: int, tensors: tuple[Tensor, ...], outer: bool, gradients: tuple[Tensor, ...] = ()
) -> None:
    kept = tuple(map(_float, tensors))
    positions, factors, basis, _ = tensors
    axes, heads, blocks = factors.shape
    *sets, tokens, _ = positions.shape
    d_positions, d_factors, d_base = map(_address, gradients or (None,) * 3)
    of_call = head_dim, sets[0] if sets else 1, torch.get_num_threads(), outer
    sizes = tokens, axes, heads, blocks, basis.shape[-1], *of_call
    fields = (*sides.fields, *sizes, *map(_address, kept), d_factors, d_positions, d_base)
    _run("torchrope_basis", fields, bool(gradients))


def exp_generators(positions: Tensor, generators: Tensor) -> Tensor:
    """Compute exp(sum_a p_a A_a): positions `([sets,] tokens, axes)`, generators `(axes, heads, blocks, b, b)` to
    `([sets,] heads, tokens, blocks, b, b)`, each block's transpose contiguous."""
    (*sets, tokens, _), (_, heads, blocks, b, _) = positions.shape, generators.shape
    table = _floats(*sets, heads, tokens, blocks, b, b)
    _run_exp(positions, generators, table)
    return table.mT


def exp_generators_backward(
    positions: Tensor, generators: Tensor, d_tangent: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Compute gradients to positions, if wanted, and generators from the gradient of the tangent."""
    d_positions, d_generators = _gradient(positions, wanted), _gradient(generators, True)
    _run_exp(positions, generators, None, d_tangent, d_generators, d_positions)
    return d_positions, d_generators


def skew_exp(exponents: Tensor) -> Tensor:
    """Compute exp of skew blocks `(count, b, b)`, each block's transpose contiguous."""
    table = _floats(*exponents.shape)
    _run_exp(None, exponents[None, :, None], table)
    return table.mT


def skew_exp_backward(exponents: Tensor, d_tangent: Tensor) -> Tensor:
    """Compute the skew gradient to the exponents from the gradient of the tangent `(count, b (b - 1) / 2)`."""
    gradient = _floats(*exponents.shape)
    _run_exp(None, exponents[None, :, None], None, d_tangent, gradient)
    return gradient


def _run_exp(
    positions: Tensor | None,
    generators: Tensor,
    table: Tensor | None,
    d_tangent: Tensor | None = None,
    d_generators: Tensor | None = None,
    d_positions: Tensor | None = None,
) -> None:
    axes, heads, blocks, b, _ = generators.shape
    sets, tokens = (1, 1) if positions is None else (positions.shape[:-2].numel(), positions.shape[-2])
    nonempty = table if d_tangent is None else d_tangent
    if nonempty is None or not nonempty.numel():
        return  # empty tensors have no address
    kept = tuple(None if x is None else _float(x) for x in (positions, generators, table, d_tangent))
    sizes = heads, blocks, b, axes, sets, tokens, torch.get_num_threads()
    fields = (*sizes, *map(_address, kept), _address(d_generators), _address(d_positions))
    _run("torchrope_skew_exp", fields, d_tangent is not None)


def skew_eig(base: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose skew blocks `(..., b, b)`, b even, into planes, frequencies:  B = U diag([[0, -w], [w, 0]]) U^T."""
    kept, b = _float(base), base.shape[-1]
    basis, angular = _floats(*base.shape), _floats(*base.shape[:-2], b // 2)
    addresses = map(_address, (kept, basis, angular))
    _run("torchrope_skew_eig", (base.numel() // (b * b), b, torch.get_num_threads(), *addresses))
    return basis, angular
