"""Registration of the kernels as PyTorch operators: schemas, fake implementations and gradients.

The operators are the only way to the kernels: `native` on a CPU, `gpu` on CUDA and ROCm. Its functions have the names,
arguments and results of the operators; that of `exp_generators` has no tangent. Gradients that are not wanted are
returned empty. Only the reference supports gradients of gradients.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torchrope.ops import native
from torchrope.ops.backends import backend, current, is_plain, runs_on_gpu
from torchrope.ops.shapes import require_fit
from torchrope.tensors import empty_rows, exact_matmul

OPS = torch.ops.torchrope
"""Namespace of the registered operators."""

_PLANAR = "Tensor q, Tensor k, Tensor positions, Tensor frequencies, Tensor? table, bool interleaved"
_GRADIENTS = "Tensor grad_q, Tensor grad_k"

SCHEMAS = {
    # q, k (batch, heads, tokens, head_dim), each with its own batch and heads; positions ([1 or batch,] tokens, axes),
    # frequencies (axes, heads or 1, pairs), table ([1 or batch,] heads or 1, tokens, 2, pairs); without axes, positions
    # are the angles ([1 or batch,] heads or 1, tokens, pairs).
    "rotate_planar": f"({_PLANAR}) -> (Tensor, Tensor)",
    "rotate_planar_backward": f"({_GRADIENTS}, {_PLANAR}, bool[2] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    # factors (axes, heads, blocks), base and basis (heads, blocks, b, b), angular (heads, blocks, b / 2).
    "rotate_basis": "(Tensor q, Tensor k, Tensor positions, Tensor factors, Tensor base, Tensor basis, Tensor angular,"
    " bool outer) -> (Tensor, Tensor)",
    "rotate_basis_backward": f"({_GRADIENTS}, Tensor q, Tensor k, Tensor positions, Tensor factors, Tensor basis,"
    " Tensor angular, bool outer, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "skew_eig": "(Tensor base) -> (Tensor, Tensor)",
    # table ([1 or batch,] heads, tokens, blocks, b, b), with its gradient through the tangent.
    "rotate_block": "(Tensor q, Tensor k, Tensor table, Tensor tangent) -> (Tensor, Tensor)",
    "rotate_block_backward": f"({_GRADIENTS}, Tensor q, Tensor k, Tensor table, bool wanted)"
    " -> (Tensor, Tensor, Tensor)",
    # positions ([sets,] tokens, axes), generators (axes, heads, blocks, b, b) to a table and its tangent.
    "exp_generators": "(Tensor positions, Tensor generators) -> (Tensor, Tensor)",
    "exp_generators_backward": "(Tensor positions, Tensor generators, Tensor d_tangent, bool wanted)"
    " -> (Tensor, Tensor)",
    "skew_exp": "(Tensor exponents) -> Tensor",
    "skew_exp_backward": "(Tensor exponents, Tensor d_tangent) -> Tensor",
}


_COMPUTE: dict[str, Callable[..., Any]] = {}  # of plain tensors
_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}  # the same with gradients


def run(name: str, *args: Any, plain: bool | None = None) -> Any:
    """Call an operator with checked arguments; of plain tensors without the dispatcher, slower than a small kernel."""
    if not (is_plain(*[x for x in args if isinstance(x, Tensor)]) if plain is None else plain):
        return getattr(OPS, name)(*args)
    if not torch.is_grad_enabled() or not any([isinstance(x, Tensor) and x.requires_grad for x in args]):  # noqa: C419
        return _COMPUTE[name](*args)
    return _FUNCTIONS[name].apply(*args) if name in _FUNCTIONS else getattr(OPS, name)(*args)


def kernels(like: Tensor) -> ModuleType:
    """Return the module with the kernels of a tensor's device."""
    return import_module("torchrope.ops.gpu") if runs_on_gpu(like) else native


def _register(name: str, schema: str, fake: Callable[..., Any]) -> None:
    """Define an operator whose arguments are checked, without sizes in fake calls: these would add guards."""
    parameters = tuple(argument.split()[-1] for argument in schema[1 : schema.index(") ->")].split(", "))

    def compute(*args: Any) -> Any:
        result = getattr(kernels(args[0]), name)(*args)
        return (result, _tangent(result)) if name == "exp_generators" else result

    def check_and_compute(*args: Any) -> Any:
        require_fit(name, parameters, args)
        return compute(*args)

    def allocate(*args: Any) -> Any:
        require_fit(name, parameters, args, sizes=False)
        return fake(*args)

    torch.library.define(f"torchrope::{name}", schema)
    torch.library.impl(f"torchrope::{name}", ("cpu", "cuda"))(check_and_compute)
    # Rotations and encodings check what forward passes get; hooks may replace saved tensors before the backward ones.
    _COMPUTE[name] = check_and_compute if name.endswith("_backward") else compute
    torch.library.register_fake(f"torchrope::{name}", allocate)


def _tangent(table: Tensor) -> Tensor:
    """Return zeros in place of Ω in exp(Ω) R, above the diagonal, `(*, b (b - 1) / 2)`, for blocks `(*, b, b)`."""
    b = table.shape[-1]
    return table.new_zeros(()).expand(*table.shape[:-2], b * (b - 1) // 2)


def _vectors(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(q), empty_rows(k)


def _gradient(like: Tensor, wanted: bool, device: torch.device) -> Tensor:
    return torch.empty(like.shape if wanted else (0,), dtype=torch.float32, device=device)


def _fake_backward(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *tensors, wanted = args
    return (*_vectors(q, k), *(_gradient(x, needed, q.device) for x, needed in zip(tensors, wanted, strict=False)))


def _fake_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, ...]:
    b = table.shape[-1]
    return (*_vectors(q, k), table.new_empty((*table.shape[:-2], b * (b - 1) // 2) if wanted else (0,)))


def _fake_exp(positions: Tensor, generators: Tensor) -> tuple[Tensor, Tensor]:
    (*sets, tokens, _), (_, heads, blocks, b, _) = positions.shape, generators.shape
    table = generators.new_empty((*sets, heads, tokens, blocks, b, b), dtype=torch.float32).mT
    return table, _tangent(table)


def _fake_exp_backward(positions: Tensor, generators: Tensor, d_tangent: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    return _gradient(positions, wanted, positions.device), _gradient(generators, True, positions.device)


_FAKES: dict[str, Callable[..., Any]] = {
    "rotate_planar": _vectors,
    "rotate_planar_backward": _fake_backward,
    "rotate_basis": _vectors,
    "rotate_basis_backward": _fake_backward,
    "skew_eig": lambda base: (base.new_empty(base.shape), base.new_empty((*base.shape[:-2], base.shape[-1] // 2))),
    "rotate_block": _vectors,
    "rotate_block_backward": _fake_block_backward,
    "exp_generators": _fake_exp,
    "exp_generators_backward": _fake_exp_backward,
    "skew_exp": lambda exponents: exponents.new_empty(exponents.shape).mT,
    "skew_exp_backward": lambda exponents, d_tangent: exponents.new_empty(exponents.shape),
}

for _name, _schema in SCHEMAS.items():
    _register(_name, _schema, _FAKES[_name])


# Gradients.


def _differentiate(name: str, save: Callable, gradient: Callable) -> None:
    """Register the gradient of an operator; it uses the backend of the forward call."""

    def save_with_backend(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.backend = current()
        save(ctx, inputs, output)

    def gradient_by_same_backend(ctx: Any, *grads: Tensor | None) -> Any:
        with backend(ctx.backend):
            return gradient(ctx, *grads)

    torch.library.register_autograd(f"torchrope::{name}", gradient_by_same_backend, setup_context=save_with_backend)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = _COMPUTE[name](*inputs)
            save_with_backend(ctx, inputs, output)
            return output

        backward = staticmethod(gradient_by_same_backend)

    _FUNCTIONS[name] = Gradient


def _wanted(gradients: tuple[Tensor, ...], wanted: list[bool]) -> list[Tensor | None]:
    return [gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True)]


def _saved_rows(ctx: Any, q: Tensor, k: Tensor, of_rotation: slice) -> tuple[Tensor, ...]:
    """Return q and k if the gradient of the rotation needs them: that of q and k is the inverse rotation."""
    ctx.rows = any(ctx.needs_input_grad[of_rotation])
    return (q, k) if ctx.rows else ()


def _saved(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and the saved tensors of the rotation; gradients have the shapes of rows that nothing reads."""
    return ctx.saved_tensors if ctx.rows else (grad_q, grad_k, *ctx.saved_tensors)


def _save_planar(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, *tensors, ctx.interleaved = inputs
    ctx.save_for_backward(*_saved_rows(ctx, q, k, slice(2, 4)), *tensors)


def _planar_gradient(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
    wanted, saved = list(ctx.needs_input_grad[2:4]), _saved(ctx, grad_q, grad_k)
    dq, dk, *of_angles = run("rotate_planar_backward", grad_q, grad_k, *saved, ctx.interleaved, wanted)
    return (dq, dk, *_wanted(of_angles, wanted), None, None)


def _save_basis(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, positions, factors, _, basis, angular, ctx.outer = inputs
    ctx.save_for_backward(*_saved_rows(ctx, q, k, slice(2, 5)), positions, factors, basis, angular)


def _basis_gradient(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
    wanted, saved = list(ctx.needs_input_grad[2:5]), _saved(ctx, grad_q, grad_k)
    dq, dk, *parameters = run("rotate_basis_backward", grad_q, grad_k, *saved, ctx.outer, wanted)
    return (dq, dk, *_wanted(parameters, wanted), None, None, None)


def _save_block(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, table, _ = inputs
    ctx.save_for_backward(*_saved_rows(ctx, q, k, slice(3, 4)), table)


def _block_gradient(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
    wanted = ctx.needs_input_grad[3]
    dq, dk, d_tangent = run("rotate_block_backward", grad_q, grad_k, *_saved(ctx, grad_q, grad_k), wanted)
    return dq, dk, None, d_tangent if wanted else None


def _save_exponents(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # zeros for an unused table would double the cost
    ctx.save_for_backward(*inputs, output[0])


def _exp_gradient(ctx: Any, d_table: Tensor | None, d_tangent: Tensor | None) -> tuple:
    positions, generators, table = ctx.saved_tensors
    if d_table is not None:
        from_table = tangent_of(d_table, table)
        d_tangent = from_table if d_tangent is None else d_tangent + from_table
    if d_tangent is None:
        return None, None
    wanted = ctx.needs_input_grad[0]
    d_positions, d_generators = run("exp_generators_backward", positions, generators, d_tangent, wanted)
    return d_positions if wanted else None, d_generators


def tangent_of(d_table: Tensor, table: Tensor) -> Tensor:
    """Compute the gradient with respect to Ω in exp(Ω) R at Ω = 0, above the diagonal:  X - X^T,  X = dL/dR R^T."""
    product = exact_matmul(d_table, table.mT)
    rows, columns = torch.triu_indices(table.shape[-1], table.shape[-1], 1, device=table.device)
    return (product - product.mT)[..., rows, columns]


def _save_exponent(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _skew_exp_gradient(ctx: Any, d_table: Tensor) -> Tensor:
    exponents, table = ctx.saved_tensors
    return run("skew_exp_backward", exponents, tangent_of(d_table, table))


_DIFFERENTIABLE: dict[str, tuple[Callable, Callable]] = {
    "rotate_planar": (_save_planar, _planar_gradient),
    "rotate_basis": (_save_basis, _basis_gradient),
    "rotate_block": (_save_block, _block_gradient),
    "exp_generators": (_save_exponents, _exp_gradient),
    "skew_exp": (_save_exponent, _skew_exp_gradient),
}


def _raise_on_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "kernels have no gradients of gradients: compute the forward pass in `with torchrope.backend('reference'):`"
    )


for _name, _functions in _DIFFERENTIABLE.items():
    _differentiate(_name, *_functions)
    # Without this PyTorch would omit gradients of gradients with only a warning.
    torch.library.register_autograd(f"torchrope::{_name}_backward", _raise_on_double_backward)
