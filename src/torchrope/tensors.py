"""Tensor utilities: dtypes for angles, modules that keep them, disabling autocast, and whether values can be read."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import get_annotations
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from typing_extensions import Self, dataclass_transform


def private(path: str) -> Any:
    """Return a private function or class of torch by its path, or None if this release lacks it."""
    attribute: Any = torch
    for name in path.split("."):
        attribute = getattr(attribute, name, None)
    return attribute


_is_wrapped = private("_C._functorch.is_functorch_wrapped_tensor")


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the promoted dtype of tensors, at least float32."""
    wide = torch.float32
    for tensor in tensors:
        if tensor.dtype != wide:
            wide = torch.promote_types(wide, tensor.dtype)
    return wide


def wide_positions(positions: Tensor, unread: torch.dtype = torch.float64) -> Tensor:
    """Convert positions to float32 or wider, integers above 2^24 to float64; those that cannot be read to `unread`."""
    if positions.is_floating_point() or positions.dtype.itemsize < 4:
        return positions.to(wide_dtype(positions))
    if not can_read(positions):
        return positions.to(torch.float32 if positions.device.type == "mps" else unread)  # which has no float64
    wide = _as_narrow_as_exact(positions.double())
    if wide.dtype == torch.float64 and wide.abs().max() >= 2**53:
        rule = "integer positions must be below 2^53, from which on float64 skips some: subtract the first one"
        raise ValueError(f"{rule}, got up to {wide.abs().max():.3g}")
    return wide


def require_unrounded(positions: Tensor) -> None:
    """Raise if positions reach where their dtype skips integers; where they cannot be read, warn once."""
    if not is_narrow(positions) or torch.compiler.is_compiling():
        return
    limit = 2 / torch.finfo(positions.dtype).eps
    rule = f"positions above {limit:.0f} must be integers, float32 or float64, as {positions.dtype} skips integers"
    fix = "give integers, which mixed precision leaves, or switch off its cast of inputs (FSDP: cast_forward_inputs)"
    if not can_read(positions):
        warn_once(f"{rule}: {fix}")
    elif positions.numel() and positions.abs().max() > limit:
        raise ValueError(f"{rule}: {fix}, got up to {positions.abs().max():.0f}")


def as_numbers(values: Any, like: torch.dtype = torch.float32) -> Tensor:
    """Convert an array, or nested lists of numbers, to a tensor as wide as given, `like` it and PyTorch's default."""
    numbers = torch.as_tensor(values)
    if not numbers.is_floating_point() or hasattr(values, "dtype"):
        return numbers
    exact = torch.as_tensor(values, dtype=torch.float64)
    return exact if torch.float64 in (like, torch.get_default_dtype()) else _as_narrow_as_exact(exact)


def _as_narrow_as_exact(wide: Tensor) -> Tensor:
    """Return float64 numbers as float32, unless some are above 2^24, where float32 skips integers."""
    return wide if wide.numel() and wide.abs().max() > 2**24 else wide.float()


@cache
def warn_once(message: str) -> None:
    """Warn, once per process for each message."""
    warnings.warn(message, stacklevel=3)


def is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor is floating point with less precision than float32."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


@dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True)
class Value:
    """Immutable fields, as annotated, by keyword: no dataclass, whose tensors FSDP and DDP cast among inputs."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = (*cls._fields, *(name for name in get_annotations(cls) if name not in cls._fields))

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name not in self._fields:
                raise TypeError(f"{type(self).__name__} has {', '.join(self._fields)}, got {name}")
            object.__setattr__(self, name, value)
        self._values()  # raises if one without a default is missing

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable, got a new {name}")

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def _with(self, **changed: Any) -> Self:
        return type(self)(**{**self._values(), **changed})  # torch 2.6 cannot compile `|` of dictionaries


class Float32Module(nn.Module):
    """Module whose parameters and buffers stay float32 or float64: casts to less precision change their device only.

    At position 4,000 a frequency of 1 rounded to bfloat16 gives an angle that is wrong by up to 8 radians. Empty
    buffers are cast as usual.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            exact = tensor.is_floating_point() and not is_narrow(tensor)
            loses_precision = tensor.numel() and exact and is_narrow(converted)
            return tensor.to(converted.device) if loses_precision else converted

        return super()._apply(convert, recurse)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, converted to float32 if it has less precision, as by a default dtype of bfloat16."""
        if param is not None and is_narrow(param):
            param = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        super().register_parameter(name, param)


def without_autocast(like: Tensor) -> AbstractContextManager:
    """Return a context manager that disables autocast on the device of a tensor; the meta device has none."""
    kind = like.device.type  # torch 2.6 cannot compile `is_meta`, nor 2.11 torch.amp.is_autocast_available
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def can_read(x: Tensor) -> bool:
    """Whether Python may branch on the values of a tensor: a plain CPU tensor, neither traced nor transformed.

    Reading from a GPU would synchronise; tensors in a compiled graph or under `torch.vmap` have no values.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter):
        return False
    return _is_wrapped is not None and not _is_wrapped(x)


def contiguous_channels(x: Tensor) -> Tensor:
    """Return x with channels contiguous in memory, copied only if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_rows(like: Tensor) -> Tensor:
    """Allocate a tensor like another, in its memory order if its last stride is 1, else contiguous."""
    empty = torch.empty_like(like)
    return empty if empty.stride(-1) == 1 else like.new_empty(like.shape)


def with_batch_dim(x: Tensor, ndim: int) -> Tensor:
    """Add a batch dimension of 1 to a tensor that all samples share."""
    return x if x.ndim == ndim else x.unsqueeze(0)


def exact_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Compute x @ y in the dtype of both, also if float32 products may be rounded to TensorFloat-32 or bfloat16."""
    return exact_einsum("...ij,...jk->...ik", x, y) if _rounds_products(x) else x @ y


def exact_einsum(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """Compute an einsum of two tensors as `exact_matmul`; each index of an operand must be in the result or the other.

    If products may be rounded, both operands are split into three parts that bfloat16 represents: x = x0 + x1 + x2.
    Products of parts are exact, and the sum of the six largest is as exact as a product in float32.
    """
    if not _rounds_products(x):
        return torch.einsum(equation, x, y)
    # Through the parts, tangents are exact, but gradients are rounded.
    return _sum_of_products(equation, x, y) if in_forward_mode() else _ExactProduct.apply(equation, x, y)


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active, outside of torch.compile."""
    return not torch.compiler.is_compiling() and getattr(forward_ad, "_current_level", -1) >= 0


def _rounds_products(x: Tensor) -> bool:
    return x.dtype == torch.float32 and _allows_rounding(x.device.type)


def _allows_rounding(kind: str) -> bool:
    """Return whether `torch.set_float32_matmul_precision` or a newer setting allows rounding on a kind of device."""
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(kind)
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)  # since torch 2.9
    if precision is not None:
        return precision not in ("none", "ieee")
    return torch.get_float32_matmul_precision() != "highest"


# torch.compile must evaluate this while tracing; graphs are compiled anew if the setting changes.
_allows_rounding._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _ExactProduct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(equation: str, x: Tensor, y: Tensor) -> Tensor:
        return _sum_of_products(equation, x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.equation, x, y = inputs
        ctx.shapes = x.shape, y.shape
        of_x, of_y = ctx.needs_input_grad[1:]
        ctx.save_for_backward(x if of_y else None, y if of_x else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        operands, result = ctx.equation.split("->")
        of_x, of_y = operands.split(",")
        grad_x = None if y is None else exact_einsum(f"{result},{of_y}->{of_x}", grad, y).sum_to_size(ctx.shapes[0])
        grad_y = None if x is None else exact_einsum(f"{result},{of_x}->{of_y}", grad, x).sum_to_size(ctx.shapes[1])
        return None, grad_x, grad_y


def _sum_of_products(equation: str, x: Tensor, y: Tensor) -> Tensor:
    (x0, x1, x2), (y0, y1, y2) = _parts(x), _parts(y)
    pairs = (x2, y0), (x1, y1), (x0, y2), (x1, y0), (x0, y1), (x0, y0)  # smallest first
    terms = [torch.einsum(equation, *pair) for pair in pairs]
    return sum(terms[1:], start=terms[0])


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = x.bfloat16().float()
    second = (x - first).bfloat16().float()
    return first, second, x - first - second


def block_diagonal(blocks: Tensor, size: int) -> Tensor:
    """Place blocks `(..., n, b, b)` on the diagonal of a `size` x `size` matrix; the rest of the diagonal is 1."""
    *batch, n, b, _ = blocks.shape
    dense = torch.eye(size, dtype=blocks.dtype, device=blocks.device).repeat(*batch, 1, 1)
    cells = dense[..., : n * b, : n * b].unflatten(-1, (n, b)).unflatten(-3, (n, b))  # (..., n, b, n, b)
    cells.diagonal(dim1=-4, dim2=-2).copy_(blocks.movedim(-3, -1))  # (..., b, b, n)
    return dense


def require_module(name: str, model: object) -> None:
    """Raise ValueError if a function, by its name, is called with anything else than a model."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ValueError(f"{name} needs a model, an instance of torch.nn.Module, got {kind}")


def require_tensor(name: str, x: object) -> None:
    """Raise ValueError if x is no tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {shown(x)}")


def shown(x: object) -> str:
    """Describe a value in an error message: the shape of a tensor, with its dtype unless that is float32."""
    if x is None or isinstance(x, bool | int | float | str):
        return repr(x)
    if isinstance(x, tuple):
        return f"({', '.join(map(shown, x))})"
    if not isinstance(x, Tensor):
        return type(x).__name__
    dtype = "" if x.dtype == torch.float32 else f"{str(x.dtype).removeprefix('torch.')} "
    return f"{dtype}{tuple(x.shape)}"


def require_counts(least: int = 1, **numbers: Any) -> None:
    """Raise ValueError unless numbers, by their names, are integers, `least` or more."""
    for name, number in numbers.items():
        if not hasattr(number, "__index__"):
            raise ValueError(f"{name} must be an integer, got {shown(number)}")
        if number < least:
            raise ValueError(f"{name} must be {least} or more, got {number}")


def counts_per_axis(name: str, value: int | Sequence[int], num_axes: int) -> tuple[int, ...]:
    """Return one integer, 1 or more, for each axis; a single one is repeated for all axes."""
    numbers = tuple(value) if isinstance(value, Sequence) else (value,) * num_axes
    if len(numbers) != num_axes or not all(hasattr(number, "__index__") and number >= 1 for number in numbers):
        raise ValueError(f"{name} must be 1 or more, one integer or one per axis ({num_axes}), got {shown(value)}")
    return numbers
