"""The tensors of a file by name, type and shape, and the models that they may fill."""

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

from torchrope.integrations.settings import Limits, shown

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

# What a model may register while it is built: several times what a file fills, for features drop layers again; and the
# largest models of timm and their buffers, which no file holds.
_MOST_TENSORS = 4096
_MOST_PARAMETERS = 2**28
_MOST_BUFFERS = 2**25


class Stored(NamedTuple):
    """A tensor as the header of a file describes it."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]


Layout = Mapping[str, Stored]


def layout_of_file(opened: Any) -> dict[str, Stored]:
    """The tensors of a safetensors file that is open; none is read.

    Raises:
        ValueError: a name that no line could show.
    """
    layout = {}
    for name in opened.keys():  # noqa: SIM118, it is no dict
        check_name(name)
        part = opened.get_slice(name)
        layout[name] = Stored(_DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))
    return layout


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """The tensors of a state dict."""
    return {name: Stored(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def limits_of(layout: Layout) -> Limits:
    """The largest numbers that settings of a model for these tensors may name."""
    filled = [stored.shape for stored in layout.values() if 0 not in stored.shape]  # of these the file has every number
    return Limits(tensors=len(layout), longest=max((extent for shape in filled for extent in shape), default=0))


def check_name(name: Any) -> None:
    """Refuse a tensor's name that no line could show."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 500:
        raise ValueError(f"names of tensors must be printable text of up to 500 characters, got {shown(name)}")


@contextmanager
def budget(layout: Layout) -> Iterator[None]:
    """Refuse, in this thread, to register more tensors and numbers than a model for these may take.

    Raises:
        ValueError: as soon as there are more, with the limit.
    """
    stored = sum(math.prod(tensor.shape) for tensor in layout.values())
    limits = {
        "tensors": max(_MOST_TENSORS, 4 * len(layout)),
        "numbers in parameters": max(_MOST_PARAMETERS, 32 * stored),
        "numbers in buffers": max(_MOST_BUFFERS, 4 * stored),
    }
    spent = dict.fromkeys(limits, 0)
    here = threading.get_ident()

    def spend(tensor: Tensor | None, where: str) -> None:
        if tensor is None or threading.get_ident() != here:
            return
        spent["tensors"] += 1
        spent[where] += tensor.numel()
        for what, limit in limits.items():
            if spent[what] > limit:
                held = f"a file of {len(layout)} tensors with {stored:,} numbers"
                raise ValueError(f"a model for {held} may take {limit:,} {what}, got settings of a larger one")

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
    """Refuse tensors that are not those of a model, each of its shape, floats for floats.

    Raises:
        ValueError: the first three of them.
    """
    wanted = layout_of(model.state_dict())
    wrong = [_misfit(name, wanted.get(name), layout.get(name)) for name in {**wanted, **layout}]
    told = [line for line in wrong if line]
    if told:
        more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
        raise ValueError(f"its tensors must be those of its model, got {'; '.join(told[:3])}{more}")


def _misfit(name: str, wanted: Stored | None, found: Stored | None) -> str | None:
    if found is None:
        return f"no {name}"
    if wanted is None:
        return f"{name}, which it has not"
    if wanted.shape != found.shape:
        return f"{name} of {found.shape} instead of {wanted.shape}"
    if wanted.dtype != found.dtype and not (wanted.dtype in FLOATS and found.dtype in FLOATS):
        return f"{name} of {found.dtype} instead of {wanted.dtype}"
    return None
