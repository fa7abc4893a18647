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
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# Lower bounds of the budget while a model is built, which exceeds the file because feature models drop layers; they
# suffice for the largest models of timm and for their buffers, which are not saved.
_MOST_TENSORS = 4096
_MOST_PARAMETERS = 2**28
_MOST_BUFFERS = 2**25


class Stored(NamedTuple):
    """Dtype and shape of a tensor, as in the header of a file."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]


Layout = Mapping[str, Stored]


def layout_of_file(opened: Any) -> dict[str, Stored]:
    """Return the layout of an open safetensors file without reading tensors.

    Raises:
        ValueError: a name that is not printable or too long.
    """
    layout = {}
    for name in opened.keys():  # noqa: SIM118, not a dict
        check_name(name)
        part = opened.get_slice(name)
        layout[name] = Stored(_DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))
    return layout


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Return the layout of a state dict."""
    return {name: Stored(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def limits_of(layout: Layout) -> Limits:
    """Return the largest values allowed in settings of a model with these tensors."""
    filled = [stored.shape for stored in layout.values() if 0 not in stored.shape]  # empty tensors may claim any extent
    return Limits(tensors=len(layout), longest=max((extent for shape in filled for extent in shape), default=0))


def check_name(name: Any) -> None:
    """Raise ValueError if a tensor's name is not printable or too long."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 500:
        raise ValueError(f"names of tensors must be printable text of up to 500 characters, got {shown(name)}")


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

    handles = (
        register_module_parameter_registration_hook(lambda _, __, tensor: spend(tensor, "numbers in parameters")),
        register_module_buffer_registration_hook(lambda _, __, tensor: spend(tensor, "numbers in buffers")),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_fits(model: nn.Module, layout: Layout) -> None:
    """Check that tensors match a model's in name, shape and dtype; floating-point dtypes may differ.

    Raises:
        ValueError: the first three mismatches.
    """
    expected = layout_of(model.state_dict())
    differences = [_misfit(name, expected.get(name), layout.get(name)) for name in {**expected, **layout}]
    misfits = [line for line in differences if line]
    if misfits:
        more = f"; and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        raise ValueError(f"its tensors must be those of its model, got {'; '.join(misfits[:3])}{more}")


def _misfit(name: str, expected: Stored | None, stored: Stored | None) -> str | None:
    if stored is None:
        return f"no {name}"
    if expected is None:
        return f"{name}, which is not in the model"
    if expected.shape != stored.shape:
        return f"{name} of {stored.shape} instead of {expected.shape}"
    if expected.dtype != stored.dtype and not (expected.dtype in FLOATS and stored.dtype in FLOATS):
        return f"{name} of {stored.dtype} instead of {expected.dtype}"
    return None
