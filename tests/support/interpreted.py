"""Triton's interpreter, made to check what kernels do to memory; set TRITON_INTERPRET=1 before triton is imported."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
    _get_np_dtype,
    _patch_lang,
    interpreter_builder,
)

from torchrope.verify import poisoned

LAUNCHED: set[str] = set()
"""Kernels launched inside `checked`, with what they also did: "planar._rotate_kernel BACK"."""

ALSO = ("BACK", "tangent")
"""Arguments that make a kernel do more."""


class OutOfBounds(Exception):
    """A kernel reads or writes memory that belongs to none of its tensors."""


@contextmanager
def checked() -> Iterator[None]:
    """Check every load and store of the interpreter, and fill memory that PyTorch does not initialise with NaN.

    A load or store must hit an element of a tensor that the kernel was launched with, whatever memory lies between the
    elements; lanes that a mask switches off do not count. Elements that no kernel writes show as NaN.

    The interpreter keeps bfloat16 as integers, which it cuts off instead of rounding, and multiplies as integers: here
    they are rounded, and their products are exact. Their sums are truncated after every 16, as tensor cores do, which
    gives the errors of an H200. It also prepares Triton's language for each call of a function in a
    kernel, instead of once, and checks all integers for overflow, which takes half of the time.

    Raises:
        triton.runtime.errors.InterpreterError: from `OutOfBounds`, which names kernel, element and extent.
    """
    current: list[_Launch] = []
    launch, cast = GridExecutor.__call__, InterpreterBuilder.cast_impl
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def checked_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        name = f"{self.fn.__module__.split('.')[-1]}.{self.fn.__name__}"
        current.append(_Launch(name, [_Extent(n, x) for n, x in given.items() if isinstance(x, Tensor)]))
        LAUNCHED.add(" ".join([name, *(argument for argument in ALSO if on(given.get(argument)))]))
        try:
            launch(self, *args, **kwargs)
        finally:
            current.pop()

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        current[-1].check("loads", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current[-1].check("stores", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module not in current[-1].prepared:
            current[-1].prepared.add(module)
            _patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    def truncating_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        a, b = (rounding_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        sums = total.data.astype(np.float32)
        for first in range(0, a.data.shape[-1], 16):
            terms = a.data[..., first : first + 16].astype(np.float64), b.data[..., first : first + 16, :]
            sums = _truncated(sums + np.matmul(*terms))
        return TensorHandle(sums, tl.float32)

    def rounding_cast(self: Any, x: Any, to: Any) -> Any:
        kinds = x.dtype.scalar, to.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16)
            return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)
        return cast(self, x, to)

    with (
        patch.object(GridExecutor, "__call__", checked_launch),
        patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        patch.object(InterpreterBuilder, "create_masked_store", checked_store),
        patch.object(InterpreterBuilder, "create_dot", truncating_dot),
        patch.object(InterpreterBuilder, "cast_impl", rounding_cast),
        patch.object(InterpretedFunction, "__call__", call_function),
        patch.object(interpreter_builder, "options", InterpreterOptions(sanitize_overflow=False)),
        poisoned(),
    ):
        yield


def on(argument: Any) -> bool:
    return argument is not None and (isinstance(argument, Tensor) or bool(argument))


def _truncated(exact: np.ndarray) -> np.ndarray:
    """Convert float64 to float32, towards zero."""
    near = exact.astype(np.float32)
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)


class _Extent:
    """The elements of a tensor by their distance from its first, in elements."""

    def __init__(self, name: str, x: Tensor) -> None:
        self.name, self.start, self.item = name, x.data_ptr(), x.element_size()
        furthest = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        self.elements = np.zeros(furthest + 1 if x.numel() else 0, dtype=bool)
        if x.numel():
            torch.from_numpy(self.elements).as_strided(x.shape, x.stride()).fill_(True)
        self.end = self.start + self.elements.size * self.item

    def holds(self, addresses: np.ndarray) -> np.ndarray:
        """Return for each address whether it is an element of the tensor."""
        if not self.elements.size:
            return np.zeros(addresses.shape, dtype=bool)
        index, rest = np.divmod(addresses - self.start, self.item)
        near = (rest == 0) & (index >= 0) & (index < self.elements.size)
        return near & self.elements[np.where(near, index, 0)]

    def distance(self, address: int) -> int:
        return max(self.start - address, address - self.end, 0)


@dataclass
class _Launch:
    """A kernel while it runs."""

    kernel: str
    extents: list[_Extent]
    prepared: set[str] = field(default_factory=set)

    def check(self, does: str, pointers: Any, mask: Any) -> None:
        on = np.broadcast_to(mask.data, pointers.data.shape)
        addresses = pointers.data[on].astype(np.int64)
        item = _get_np_dtype(pointers.get_element_ty()).itemsize
        if not addresses.size:
            return
        start = int(addresses[0])
        for extent in sorted(self.extents, key=lambda extent: extent.distance(start)):
            if extent.item == item:
                addresses = addresses[~extent.holds(addresses)]
            if not addresses.size:
                return
        address = int(addresses[0])
        near = min(self.extents, key=lambda extent: extent.distance(address))
        element, size = (address - near.start) // near.item, near.elements.size
        rule = f"whose elements are among 0 to {size - 1}" if size else "which has no elements"
        raise OutOfBounds(f"{self.kernel} {does} element {element} of {near.name}, {rule}")
