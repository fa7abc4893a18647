"""Names, dtypes and shapes of the tensors of a file, and checks that a model matches them."""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from torchrope.integrations.checkpoints.settings import Limits, shown

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_NAMED = dict(zip(("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"), DTYPES, strict=True))

# Lower bounds of the budget while a model is built, which exceeds the file because feature models drop layers; they
# suffice for the largest models of timm and for their buffers, which are not saved.
_MOST_TENSORS = 4096
_MOST_PARAMETERS = 2**28
_MOST_BUFFERS = 2**25


class Stored(NamedTuple):
    """Dtype and shape of a tensor, as in the header of a file."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]


Layout = Mapping[str, Stored | Tensor]
"""Tensors by name, of which only dtypes and shapes are used."""


def layout_of_file(opened: Any) -> Layout:
    """Return the layout of an open safetensors file without reading tensors.

    Raises:
        ValueError: a name that is not printable or too long.
    """
    layout = {}
    for name in opened.keys():  # noqa: SIM118, not a dict
        check_name(name)
        part = opened.get_slice(name)
        layout[name] = Stored(_NAMED.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))
    return layout


def limits_of(layout: Layout) -> Limits:
    """Return the largest values allowed in settings of a model with these tensors."""
    filled = [stored.shape for stored in layout.values() if 0 not in stored.shape]  # empty tensors may claim any extent
    count, longest = len(layout), max((extent for shape in filled for extent in shape), default=0)
    return Limits(count, longest, max(count, Limits.layers), max(longest, Limits.width))


def check_name(name: Any) -> None:
    """Raise ValueError if a tensor's name is not printable or too long."""
    if not is_name(name, most=500):
        raise ValueError(f"names of tensors must be printable text of up to 500 characters, got {shown(name)}")


def is_name(name: Any, most: int) -> bool:
    """Return whether a value is printable text of bounded length."""
    return isinstance(name, str) and name.isprintable() and len(name) <= most


@contextmanager
def budget(layout: Layout) -> Iterator[None]:
    """Limit the tensors and elements that models register in this thread, relative to the layout.

    Raises:
        ValueError: when a limit is exceeded, with the limit.
    """
    stored = sum(math.prod(tensor.shape) for tensor in layout.values())
    limits = {
        "tensors": max(_MOST_TENSORS, 4 * len(layout)),
        "numbers in parameters": max(_MOST_PARAMETERS, 32 * stored),
        "numbers in buffers": max(_MOST_BUFFERS, 4 * stored),
    }
    spent = dict.fromkeys(limits, 0)
    thread = threading.get_ident()

    def spend(tensor: Tensor | None, category: str) -> None:
        if tensor is None or threading.get_ident() != thread:
            return
        spent["tensors"] += 1
        spent[category] += tensor.numel()
        for what, limit in limits.items():
            if spent[what] > limit:
                held = f"a file of {len(layout)} tensors with {stored:,} numbers"
                raise ValueError(f"a model for {held} must have at most {limit:,} {what}, got more")

    with (
        register_module_parameter_registration_hook(lambda _, __, tensor: spend(tensor, "numbers in parameters")),
        register_module_buffer_registration_hook(lambda _, __, tensor: spend(tensor, "numbers in buffers")),
    ):
        yield


def check_fits(model: nn.Module, layout: Layout) -> None:
    """Check that tensors match a model's in name, shape and dtype; floating-point dtypes may differ.

    Raises:
        ValueError: the first three mismatches.
    """
    expected = model.state_dict()
    misfits = []
    for name in {**expected, **layout}:
        part, stored = expected.get(name), layout.get(name)
        if stored is None:
            misfits.append(f"no {name}")
        elif part is None:
            misfits.append(f"{name}, which is not in the model")
        elif part.shape != stored.shape:
            misfits.append(f"{name} of {tuple(stored.shape)} instead of {tuple(part.shape)}")
        elif part.dtype != stored.dtype and not {part.dtype, stored.dtype} <= {*FLOATS}:
            misfits.append(f"{name} of {stored.dtype} instead of {part.dtype}")
    if misfits:
        more = f"; and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        raise ValueError(f"its tensors must be those of its model, got {'; '.join(misfits[:3])}{more}")
