"""The kernels for CPUs: compiled C without dependencies, called on tensors' memory, run by torch's own threads.

One library is built for each instruction set that this machine's compiler supports; the best that the processor runs
is loaded. Where none was built, `LIBRARY` is None and the plain reference takes over.
"""

import ctypes
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from torchrope.tensors import empty_rows

_ABSENT = (0, 0, 0, 0, 0)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What q and k may be; rotations are float32."""

_CAPABILITY = {"AVX512": ("avx512", "avx2", "generic"), "AVX2": ("avx2", "generic")}


def _load() -> ctypes.CDLL | None:
    for name in _CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ("generic",)):
        spec = find_spec(f"{__name__}._{name}")
        if spec is not None and spec.origin is not None:
            try:
                return ctypes.CDLL(spec.origin)
            except OSError:  # built for another system
                continue
    return None


LIBRARY = _load()
"""The library for this processor, or None."""


def rotate_planar(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None = None, halves: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn channel pairs:  a_i = sum_a p_a f_ai.

    Args:
        q: `(batch, heads, tokens, head_dim)`; k likewise, with its own batch and heads.
        positions: `(1 or batch, tokens, axes)`, float32.
        frequencies: `(axes, heads, pairs)`, float32.
        table: cos and sin `(1 or batch, heads, tokens, pairs, 2)`, to read instead of computing them.
        halves: Whether pair i is channels (i, i + pairs) in place of (2i, 2i + 1).
    """
    call = _Call()
    out = call.sides(q, k)
    call.planar(q, positions, _of_every_head(frequencies, k, table), table, halves)
    call.run("torchrope_planar", 0)
    return out


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
    """Gradients to q, k, and where wanted to positions and frequencies."""
    call = _Call()
    out = call.sides(q, k, grad_q, grad_k)
    of_heads = _of_every_head(frequencies, k, table)
    call.planar(q, positions, of_heads, table, halves)
    d_positions, d_frequencies = call.gradient(positions, wanted[0]), call.gradient(of_heads, wanted[1])
    call.fields += [_at(d_frequencies), _at(d_positions)]
    call.run("torchrope_planar", 1)
    if d_frequencies is not None and d_frequencies.shape != frequencies.shape:
        d_frequencies = d_frequencies.sum(1, keepdim=True)
    return (*out, d_positions, d_frequencies)


def rotate_block(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply channel blocks by the matrices of a table `(1 or batch, heads, tokens, blocks, b, b)`, any strides."""
    call = _Call()
    out = call.sides(q, k)
    call.block(q, table)
    call.run("torchrope_block", 0)
    return out


def rotate_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients to q, k and to the tangent `(1 or batch, heads, tokens, blocks, b (b - 1) / 2)`."""
    call = _Call()
    out = call.sides(q, k, grad_q, grad_k)
    call.block(q, table)
    b = table.shape[-1]
    tangent = q.new_empty((*table.shape[:4], b * (b - 1) // 2), dtype=torch.float32) if wanted else None
    call.fields += [_at(tangent)]
    call.run("torchrope_block", 1)
    return (*out, tangent)


def rotate_basis(
    q: Tensor, k: Tensor, positions: Tensor, coefficients: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, Tensor]:
    """Turn in the planes of a basis:  U rot(s w) U^T x,  s = sum_a p_a c_a;  without the first U unless `outer`.

    Args:
        q: `(batch, heads, tokens, head_dim)`; k likewise.
        positions: `(1 or batch, tokens, axes)`.
        coefficients: `(axes, heads, blocks)`.
        basis: `(heads, blocks, b, b)`.
        angular: `(heads, blocks, b / 2)`.
        outer: Whether to come back from the basis.
    """
    call = _Call()
    out = call.sides(q, k)
    call.basis(q, positions, coefficients, basis, angular, outer)
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
    """Gradients to q, k, and where wanted to positions, coefficients and the base  U diag([[0, -w], [w, 0]]) U^T."""
    call = _Call()
    out = call.sides(q, k, grad_q, grad_k)
    call.basis(q, positions, coefficients, basis, angular, outer)
    d_positions = call.gradient(positions, wanted[0])
    d_coefficients, d_base = (call.gradient(x, any(wanted)) for x in (coefficients, basis))
    call.fields += [_at(d_coefficients), _at(d_positions), _at(d_base)]
    call.run("torchrope_basis", 1)
    return (*out, d_positions, d_coefficients, d_base)


def exp_generators(positions: Tensor, generators: Tensor) -> Tensor:
    """exp(sum_a p_a A_a): positions `(sets, tokens, axes)`, generators `(axes, heads, blocks, b, b)` to
    `(sets, heads, tokens, blocks, b, b)`, each block's transpose contiguous."""
    table = _table(positions, generators)
    call = _Call()
    call.exponents(positions, generators, table)
    call.run("torchrope_skew_exp", 0, items=table.numel())
    return table.mT


def exp_generators_backward(
    positions: Tensor, generators: Tensor, tangent: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradients to positions, where wanted, and generators from that of the tangent."""
    call = _Call()
    call.exponents(positions, generators, None)
    d_positions, d_generators = call.gradient(positions, wanted), call.gradient(generators, True)
    call.fields += [call.keep(tangent), _at(d_generators), _at(d_positions)]
    call.run("torchrope_skew_exp", 1, items=tangent.numel())
    return d_positions, d_generators  # type: ignore[return-value]


def skew_exp(exponents: Tensor) -> Tensor:
    """exp of skew blocks `(count, b, b)`, each block's transpose contiguous."""
    table = torch.empty_like(exponents, memory_format=torch.contiguous_format)
    call = _Call()
    call.exponents(None, exponents[None, :, None], table)
    call.run("torchrope_skew_exp", 0)
    return table.mT


def skew_exp_backward(exponents: Tensor, tangent: Tensor) -> Tensor:
    """The skew gradient to the exponents from that of the tangent `(count, b (b - 1) / 2)`."""
    call = _Call()
    call.exponents(None, exponents[None, :, None], None)
    gradient = torch.empty_like(exponents, memory_format=torch.contiguous_format)
    call.fields += [call.keep(tangent), _at(gradient), None]
    call.run("torchrope_skew_exp", 1)
    return gradient


def skew_eig(base: Tensor) -> tuple[Tensor, Tensor]:
    """Planes and frequencies of skew blocks `(count, b, b)`, b even:  B = U diag([[0, -w], [w, 0]]) U^T."""
    count, b, _ = base.shape
    basis, angular = base.new_empty(count, b, b), base.new_empty(count, b // 2)
    call = _Call()
    call.fields = [count, b, call.threads, call.keep(base), _at(basis), _at(angular)]
    call.run("torchrope_skew_eig")
    return basis, angular


class _Call:
    """The fields of a kernel's structure in their order, and the tensors that must outlive the call."""

    def __init__(self) -> None:
        self.fields: list[int | None] = []
        self.kept: list[Tensor] = []
        self.threads = torch.get_num_threads()

    def keep(self, tensor: Tensor | None) -> int | None:
        """The address of a contiguous float32 copy, or of the tensor itself."""
        if tensor is None:
            return None
        self.kept.append(tensor.to(torch.float32).contiguous())
        return self.kept[-1].data_ptr()

    def sides(self, q: Tensor, k: Tensor, grad_q: Tensor | None = None, grad_k: Tensor | None = None) -> tuple:
        """Two `Side`s; returns what they write to."""
        out = []
        for x, grad in ((q, grad_q), (k, grad_k)):
            out.append(empty_rows(x))
            batch, heads, _, _ = x.shape
            self.fields += (batch, heads, *self._rows(x), *self._rows(grad), *self._rows(out[-1]))
        return tuple(out)

    def _rows(self, x: Tensor | None) -> Sequence[int]:
        if x is None:
            return _ABSENT
        if x.stride(-1) != 1:
            x = x.contiguous()
        self.kept.append(x)
        sample, head, token, _ = x.stride()
        return x.data_ptr(), sample, head, token, DTYPES[x.dtype]

    def planar(self, q: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None, halves: bool) -> None:
        axes, heads, pairs = frequencies.shape
        self.fields += [q.shape[2], axes, heads, pairs, q.shape[3], len(positions), self.threads, int(halves)]
        self.fields += [self.keep(positions), self.keep(frequencies), self.keep(table)]

    def block(self, q: Tensor, table: Tensor) -> None:
        sets, heads, tokens, blocks, b, _ = table.shape
        self.kept.append(table)
        self.fields += [tokens, heads, blocks, b, q.shape[3], sets, self.threads, table.data_ptr(), *table.stride()]

    def basis(
        self, q: Tensor, positions: Tensor, coefficients: Tensor, basis: Tensor, angular: Tensor, outer: bool
    ) -> None:
        axes, heads, blocks = coefficients.shape
        self.fields += [q.shape[2], axes, heads, blocks, basis.shape[-1], q.shape[3], len(positions), self.threads]
        self.fields += [int(outer), *map(self.keep, (positions, coefficients, basis, angular))]

    def exponents(self, positions: Tensor | None, generators: Tensor, table: Tensor | None) -> None:
        axes, heads, blocks, b, _ = generators.shape
        sets, tokens = positions.shape[:2] if positions is not None else (1, 1)
        self.fields += [heads, blocks, b, axes, sets, tokens, self.threads]
        self.fields += [self.keep(positions), self.keep(generators), _at(table)]

    def gradient(self, like: Tensor, wanted: bool) -> Tensor | None:
        """Zeros for the gradient of a tensor: a kernel without anything to do leaves them as they are."""
        return like.new_zeros(like.shape, dtype=torch.float32) if wanted else None

    def run(self, name: str, *settings: int, items: int = 1) -> None:
        """Call a kernel on the structure, unless there is nothing to do: empty tensors have no address.

        Raises:
            MemoryError: the system gives it no memory to work with.
        """
        if items and _kernel(name)(self._structure(), *map(ctypes.c_int64, settings)):
            raise MemoryError(f"{name} needs memory to work with, got none from the system")

    def _structure(self) -> bytes:
        """The structure: every field of it is 8 bytes wide. Fields still to come are zero."""
        fields = [field or 0 for field in self.fields]
        return struct.pack(f"{len(fields) + 4}q", *fields, 0, 0, 0, 0)


def _kernel(name: str) -> Any:
    return getattr(LIBRARY, name)


def _of_every_head(frequencies: Tensor, k: Tensor, table: Tensor | None) -> Tensor:
    """Frequencies that heads share, given to each: angles are cheaper than rows read in leaps from head to head."""
    if table is not None or frequencies.shape[1] != 1:
        return frequencies
    return frequencies.expand(-1, k.shape[1], -1)


def _table(positions: Tensor, generators: Tensor) -> Tensor:
    (sets, tokens, _), (_, heads, blocks, b, _) = positions.shape, generators.shape
    return generators.new_empty((sets, heads, tokens, blocks, b, b), dtype=torch.float32)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
