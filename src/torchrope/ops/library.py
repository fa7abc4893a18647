"""Registration of the kernels as PyTorch operators: schemas, fake implementations, gradients and vmap rules.

An operator runs the kernels of its tensors' device: `native` on a CPU, `gpu` on CUDA and ROCm.
Only the reference supports gradients of gradients.

`call` dispatches to the operators if a compiler, exporter, torch.func transform, dispatch mode or profiler must observe
them. Otherwise, on a CPU, it calls the kernels directly: dispatch takes longer than a kernel on small inputs.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchrope.ops import native
from torchrope.ops.backends import backend, current, runs_on_gpu
from torchrope.ops.shapes import require_fit, require_floats
from torchrope.tensors import empty_rows, exact_matmul, private, with_batch_dim

OPS = torch.ops.torchrope
"""Namespace of the registered operators."""


def kernels(like: Tensor) -> ModuleType:
    """Return the module with the kernels of a tensor's device."""
    return import_module("torchrope.ops.gpu") if runs_on_gpu(like) else native


def _operator(name: str, schema: str) -> Callable[[Callable], Callable]:
    """Define an operator; the decorated function implements it on every device that has kernels.

    Kernels trust their arguments, so these are checked first.
    """
    torch.library.define(f"torchrope::{name}", schema)
    arguments = schema[1 : schema.index(") ->")].split(", ")
    _PARAMETERS[name] = tuple(argument.split()[-1] for argument in arguments)

    def implement(run: Callable) -> Callable:
        def checked(*args: Any) -> Any:
            require_fit(name, _PARAMETERS[name], args)
            return run(*args)

        def dispatched(*args: Any) -> Any:
            require_floats(name, _PARAMETERS[name], args)
            return checked(*args)

        torch.library.impl(f"torchrope::{name}", ("cpu", "cuda"))(dispatched)
        _RUNS[name] = checked  # `call` has seen that all tensors are on the CPU, `takes_kernels` their dtypes
        return run

    return implement


def _fake(name: str) -> Callable[[Callable], Callable]:
    """Register the shapes that an operator returns; sizes are not compared, which would add guards to a graph."""

    def register(allocate: Callable) -> Callable:
        def checked(*args: Any) -> Any:
            require_floats(name, _PARAMETERS[name], args)
            return allocate(*args)

        torch.library.register_fake(f"torchrope::{name}", checked)
        return allocate

    return register


_RUNS: dict[str, Callable] = {}
_PARAMETERS: dict[str, tuple[str, ...]] = {}
FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}
"""Autograd functions of the operators with a gradient, which call the kernels without dispatch."""


def _differentiate(name: str, save: Callable, gradient: Callable) -> None:
    """Register the gradient of an operator, and the autograd function that `call` uses in place of the operator."""

    def save_with_backend(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.backend = current()
        save(ctx, inputs, output)

    def gradient_by_same_backend(ctx: Any, *grads: Tensor | None) -> Any:
        with backend(ctx.backend):
            return gradient(ctx, *grads)

    torch.library.register_autograd(f"torchrope::{name}", gradient_by_same_backend, setup_context=save_with_backend)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = _RUNS[name](*args)
            save_with_backend(ctx, args, output)
            return output

        backward = staticmethod(gradient_by_same_backend)

    FUNCTIONS[name] = Function


def call(name: str, *args: Any) -> Any:
    """Run an operator; without PyTorch's dispatcher if nothing observes it (`runs_directly`)."""
    if not runs_directly(*args):
        return getattr(OPS, name)(*args)
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        function = FUNCTIONS.get(name)
        return getattr(OPS, name)(*args) if function is None else function.apply(*args)
    return _RUNS[name](*args)


def runs_directly(*args: Any) -> bool:
    """Return whether dispatch can be skipped: all tensors are plain CPU tensors and nothing observes operators."""
    if torch.compiler.is_compiling() or is_observed():
        return False
    return all(map(is_plain, [arg for arg in args if isinstance(arg, Tensor)]))


def is_plain(x: Tensor) -> bool:
    """Return whether x is a dense CPU tensor: no subclass, no functorch wrapper, no lazy conjugate or negation."""
    kind = type(x)
    return (kind is Tensor or kind is nn.Parameter) and ((keys := _keys(x)) == _PLAIN or keys == _OF_INFERENCE)


def is_observed() -> bool:
    """Return whether a torch.func transform, a mode, a tracer, a profiler or forward-mode AD is active, or may be."""
    return (
        not _CAN_OBSERVE
        or _interpreter() is not None
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _tracing() is not None
        or _profiling()
        or getattr(forward_ad, "_current_level", 0) >= 0
    )


# A release of PyTorch may lack one of these private functions; then nothing runs directly.
_keys, _interpreter = private("_C._dispatch_keys"), private("_C._functorch.peek_interpreter_stack")
_dispatch_modes, _function_modes = private("_C._len_torch_dispatch_stack"), private("_C._len_torch_function_stack")
_tracing, _profiling = private("_C._get_tracing_state"), private("_C._autograd._profiler_enabled")
_CAN_OBSERVE = None not in (_keys, _interpreter, _dispatch_modes, _function_modes, _tracing, _profiling)
if _CAN_OBSERVE:
    _PLAIN = _keys(torch.empty(0, device="cpu"))
    with torch.inference_mode():
        _OF_INFERENCE = _keys(torch.empty(0, device="cpu"))


def _no_gradient(like: Tensor) -> Tensor:
    """Return the empty placeholder for a gradient that is not needed."""
    return like.new_empty(0, dtype=torch.float32)


def _vectors_like(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return empty_rows(q), empty_rows(k)


def _float_like(x: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32) if wanted else _no_gradient(x)


def _or_none(gradient: Tensor, wanted: bool) -> Tensor | None:
    return gradient if wanted else None


# Planar: q, k (batch, heads, tokens, head_dim), positions (1 or batch, tokens, axes), frequencies (axes, heads, pairs).


@_operator(
    "rotate_planar",
    "(Tensor q, Tensor k, Tensor positions, Tensor frequencies, Tensor? table, bool halves) -> (Tensor, Tensor)",
)
def _rotate_planar(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None, halves: bool
) -> tuple[Tensor, Tensor]:
    return kernels(q).rotate_planar(q, k, positions, frequencies, table, halves)


@_fake("rotate_planar")
def _(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None, halves: bool
) -> tuple[Tensor, Tensor]:
    return _vectors_like(q, k)


@_operator(
    "rotate_planar_backward",
    "(Tensor grad_q, Tensor grad_k, Tensor q, Tensor k, Tensor positions, Tensor frequencies, Tensor? table,"
    " bool halves, bool[2] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _rotate_planar_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    halves: bool,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    *vectors, d_positions, d_frequencies = kernels(q).rotate_planar_backward(
        grad_q, grad_k, q, k, positions, frequencies, table, halves, wanted
    )
    parameters = (_no_gradient(q) if gradient is None else gradient for gradient in (d_positions, d_frequencies))
    return (*vectors, *parameters)


@_fake("rotate_planar_backward")
def _(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    halves: bool,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    return (*_vectors_like(q, k), _float_like(positions, wanted[0]), _float_like(frequencies, wanted[1]))


def _save_planar(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.halves = inputs
    ctx.save_for_backward(*tensors)


def planar_gradient(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
    """Compute the gradients of `rotate_planar` with respect to its inputs."""
    wanted = list(ctx.needs_input_grad[2:4])
    q, k, positions, *angles = ctx.saved_tensors
    inputs = (q, k, with_batch_dim(positions, 3), *angles)
    dq, dk, d_positions, d_frequencies = call("rotate_planar_backward", grad_q, grad_k, *inputs, ctx.halves, wanted)
    return dq, dk, _or_none(d_positions, wanted[0]), _or_none(d_frequencies, wanted[1]), None, None


_differentiate("rotate_planar", _save_planar, planar_gradient)


# Normed: as planar, with weight and bias (head_dim,) of the norm of q and of that of k.


_NORMED = (
    "Tensor q, Tensor k, Tensor positions, Tensor frequencies, Tensor? table, bool halves, Tensor? q_weight,"
    " Tensor? q_bias, Tensor? k_weight, Tensor? k_bias, int[2] kinds, float[2] eps"
)


@_operator("rotate_normed", f"({_NORMED}) -> (Tensor, Tensor)")
def _rotate_normed(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *planar, q_weight, q_bias, k_weight, k_bias, kinds, eps = args
    return kernels(q).rotate_normed(q, k, *planar, (q_weight, q_bias, k_weight, k_bias), kinds, eps)


@_fake("rotate_normed")
def _(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _vectors_like(q, k)


@_operator(
    "rotate_normed_backward",
    f"(Tensor grad_q, Tensor grad_k, {_NORMED}, bool[6] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _rotate_normed_backward(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *planar, q_weight, q_bias, k_weight, k_bias, kinds, eps, wanted = args
    weights = (q_weight, q_bias, k_weight, k_bias)
    dq, dk, parameters = kernels(q).rotate_normed_backward(grad_q, grad_k, q, k, *planar, weights, kinds, eps, wanted)
    return (dq, dk, *(_no_gradient(q) if gradient is None else gradient for gradient in parameters))


@_fake("rotate_normed_backward")
def _(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    positions, frequencies, _, _, *weights, _, _, wanted = args
    returned = zip((positions, frequencies, *weights), wanted, strict=True)
    return (*_vectors_like(q, k), *(_no_gradient(q) if x is None else _float_like(x, needed) for x, needed in returned))


def _save_normed(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, halves, q_weight, q_bias, k_weight, k_bias, kinds, eps = inputs
    ctx.settings = halves, kinds, eps
    ctx.save_for_backward(*tensors, q_weight, q_bias, k_weight, k_bias)


def normed_gradient(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
    """Compute the gradients of `rotate_normed` with respect to its inputs."""
    halves, kinds, eps = ctx.settings
    *planar, q_weight, q_bias, k_weight, k_bias = ctx.saved_tensors
    weights = (q_weight, q_bias, k_weight, k_bias)
    wanted = [*ctx.needs_input_grad[2:4], *ctx.needs_input_grad[6:10]]
    dq, dk, *parameters = call("rotate_normed_backward", grad_q, grad_k, *planar, halves, *weights, kinds, eps, wanted)
    d_positions, d_frequencies, *of_weights = map(_or_none, parameters, wanted)
    return dq, dk, d_positions, d_frequencies, None, None, *of_weights, None, None


_differentiate("rotate_normed", _save_normed, normed_gradient)


# Commuting: factors (axes, heads, blocks), base and basis (heads, blocks, b, b), angular (heads, blocks, b / 2).


@_operator(
    "rotate_basis",
    "(Tensor q, Tensor k, Tensor positions, Tensor factors, Tensor base, Tensor basis, Tensor angular, bool outer)"
    " -> (Tensor, Tensor)",
)
def _rotate_basis(
    q: Tensor, k: Tensor, positions: Tensor, factors: Tensor, base: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, Tensor]:
    return kernels(q).rotate_basis(q, k, positions, factors, basis, angular, outer)


@_fake("rotate_basis")
def _(
    q: Tensor, k: Tensor, positions: Tensor, factors: Tensor, base: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, Tensor]:
    return _vectors_like(q, k)


@_operator(
    "rotate_basis_backward",
    "(Tensor grad_q, Tensor grad_k, Tensor q, Tensor k, Tensor positions, Tensor factors, Tensor basis,"
    " Tensor angular, bool outer, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _rotate_basis_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    factors: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    dq, dk, *parameters = kernels(q).rotate_basis_backward(
        grad_q, grad_k, q, k, positions, factors, basis, angular, outer, wanted
    )
    returned = zip(parameters, wanted, strict=True)
    return (dq, dk, *(gradient if needed else _no_gradient(q) for gradient, needed in returned))


@_fake("rotate_basis_backward")
def _(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    factors: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    return (
        *_vectors_like(q, k),
        *(_float_like(x, needed) for x, needed in zip((positions, factors, basis), wanted, strict=True)),
    )


def _save_basis(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, positions, factors, _, basis, angular, ctx.outer = inputs
    ctx.save_for_backward(q, k, positions, factors, basis, angular)


def _basis_gradient(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
    wanted = list(ctx.needs_input_grad[2:5])
    dq, dk, *parameters = call("rotate_basis_backward", grad_q, grad_k, *ctx.saved_tensors, ctx.outer, wanted)
    return (dq, dk, *map(_or_none, parameters, wanted), None, None, None)


_differentiate("rotate_basis", _save_basis, _basis_gradient)


@_operator("skew_eig", "(Tensor base) -> (Tensor, Tensor)")
def _skew_eig(base: Tensor) -> tuple[Tensor, Tensor]:
    basis, angular = kernels(base).skew_eig(base.flatten(0, -3))
    return basis.view(base.shape), angular.view(*base.shape[:-2], base.shape[-1] // 2)


@_fake("skew_eig")
def _(base: Tensor) -> tuple[Tensor, Tensor]:
    return base.new_empty(base.shape), base.new_empty((*base.shape[:-2], base.shape[-1] // 2))


# Block: table (1 or batch, heads, tokens, blocks, b, b), its gradient through the tangent.


@_operator("rotate_block", "(Tensor q, Tensor k, Tensor table, Tensor tangent) -> (Tensor, Tensor)")
def _rotate_block(q: Tensor, k: Tensor, table: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    return kernels(q).rotate_block(q, k, table)


@_fake("rotate_block")
def _(q: Tensor, k: Tensor, table: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    return _vectors_like(q, k)


@_operator(
    "rotate_block_backward",
    "(Tensor grad_q, Tensor grad_k, Tensor q, Tensor k, Tensor table, bool wanted) -> (Tensor, Tensor, Tensor)",
)
def _rotate_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, ...]:
    dq, dk, d_tangent = kernels(q).rotate_block_backward(grad_q, grad_k, q, k, table, wanted)
    return dq, dk, _no_gradient(q) if d_tangent is None else d_tangent


@_fake("rotate_block_backward")
def _(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool) -> tuple[Tensor, ...]:
    b = table.shape[-1]
    tangent = table.new_empty((*table.shape[:4], b * (b - 1) // 2)) if wanted else _no_gradient(q)
    return (*_vectors_like(q, k), tangent)


def _save_block(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:3])


def _block_gradient(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
    wanted = ctx.needs_input_grad[3]
    dq, dk, d_tangent = call("rotate_block_backward", grad_q, grad_k, *ctx.saved_tensors, wanted)
    return dq, dk, None, _or_none(d_tangent, wanted)


_differentiate("rotate_block", _save_block, _block_gradient)


# exp: positions (sets, tokens, axes), generators (axes, heads, blocks, b, b) to a table and its tangent.


def _table_and_tangent(positions: Tensor, generators: Tensor) -> tuple[Tensor, Tensor]:
    (sets, tokens, _), (_, heads, blocks, b, _) = positions.shape, generators.shape
    shape = (sets, heads, tokens, blocks)
    table = generators.new_empty((*shape, b, b), dtype=torch.float32).mT
    return table, _zero_tangent(generators, shape, b)


def _zero_tangent(like: Tensor, shape: tuple[int, ...], b: int) -> Tensor:
    return like.new_zeros((), dtype=torch.float32).expand(*shape, b * (b - 1) // 2)


@_operator("exp_generators", "(Tensor positions, Tensor generators) -> (Tensor, Tensor)")
def _exp_generators(positions: Tensor, generators: Tensor) -> tuple[Tensor, Tensor]:
    table = kernels(generators).exp_generators(positions, generators)
    return table, _zero_tangent(generators, table.shape[:4], table.shape[-1])


_fake("exp_generators")(_table_and_tangent)


@_operator(
    "exp_generators_backward",
    "(Tensor positions, Tensor generators, Tensor d_tangent, bool wanted) -> (Tensor, Tensor)",
)
def _exp_generators_backward(
    positions: Tensor, generators: Tensor, d_tangent: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    d_positions, d_generators = kernels(generators).exp_generators_backward(positions, generators, d_tangent, wanted)
    return _no_gradient(positions) if d_positions is None else d_positions, d_generators


@_fake("exp_generators_backward")
def _(positions: Tensor, generators: Tensor, d_tangent: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    return _float_like(positions, wanted), _float_like(generators, True)


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
    d_positions, d_generators = call("exp_generators_backward", positions, generators, d_tangent, wanted)
    return _or_none(d_positions, wanted), d_generators


def tangent_of(d_table: Tensor, table: Tensor) -> Tensor:
    """Compute the gradient with respect to Ω in exp(Ω) R at Ω = 0, above the diagonal:  X - X^T,  X = dL/dR R^T."""
    product = exact_matmul(d_table, table.mT)
    rows, columns = torch.triu_indices(table.shape[-1], table.shape[-1], 1, device=table.device)
    return (product - product.mT)[..., rows, columns]


_differentiate("exp_generators", _save_exponents, _exp_gradient)


@_operator("skew_exp", "(Tensor exponents) -> Tensor")
def _skew_exp(exponents: Tensor) -> Tensor:
    return kernels(exponents).skew_exp(exponents)


@_fake("skew_exp")
def _(exponents: Tensor) -> Tensor:
    return exponents.new_empty(exponents.shape).mT


@_operator("skew_exp_backward", "(Tensor exponents, Tensor d_tangent) -> Tensor")
def _skew_exp_backward(exponents: Tensor, d_tangent: Tensor) -> Tensor:
    return kernels(exponents).skew_exp_backward(exponents, d_tangent)


@_fake("skew_exp_backward")
def _(exponents: Tensor, d_tangent: Tensor) -> Tensor:
    return exponents.new_empty(exponents.shape)


def _save_exponent(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _skew_exp_gradient(ctx: Any, d_table: Tensor) -> Tensor:
    exponents, table = ctx.saved_tensors
    return call("skew_exp_backward", exponents, tangent_of(d_table, table))


_differentiate("skew_exp", _save_exponent, _skew_exp_gradient)


# Without this PyTorch would omit gradients of gradients with only a warning.


def _raise_on_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "kernels have no gradients of gradients: compute the forward pass in `with torchrope.backend('reference'):`"
    )


for _name in ("rotate_planar", "rotate_normed", "rotate_basis", "rotate_block", "exp_generators", "skew_exp"):
    torch.library.register_autograd(f"torchrope::{_name}_backward", _raise_on_double_backward)


# vmap: skew_exp flattens the mapped dimension into its batch of matrices; other operators run once per mapped index.


def _batched(info: Any, in_dims: tuple, exponents: Tensor) -> tuple[Tensor, int]:
    flat = exponents.movedim(in_dims[0], 0)
    return OPS.skew_exp(flat.flatten(0, 1)).unflatten(0, flat.shape[:2]), 0


def _batched_backward(info: Any, in_dims: tuple, exponents: Tensor, d_tangent: Tensor) -> tuple[Tensor, int]:
    flat, tangent = (
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip((exponents, d_tangent), in_dims, strict=True)
    )
    gradient = OPS.skew_exp_backward(flat.flatten(0, 1), tangent.flatten(0, 1))
    return gradient.unflatten(0, flat.shape[:2]), 0


def _looped(name: str) -> Callable:
    run = getattr(OPS, name)

    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple:
        results = [
            run(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return rule


torch.library.register_vmap("torchrope::skew_exp", _batched)
torch.library.register_vmap("torchrope::skew_exp_backward", _batched_backward)
for _name in ("rotate_planar", "rotate_normed", "rotate_basis", "rotate_block", "exp_generators"):
    torch.library.register_vmap(f"torchrope::{_name}", _looped(_name))
    torch.library.register_vmap(f"torchrope::{_name}_backward", _looped(f"{_name}_backward"))
torch.library.register_vmap("torchrope::skew_eig", _looped("skew_eig"))
