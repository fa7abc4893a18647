"""Names, dtypes and shapes of the tensors of a file, and checks that a model matches them."""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from torchrope.integrations.checkpoints.settings import Limits, shown

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_NAMED = dict(zip(("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"), DTYPES, strict=True))


class Stored(NamedTuple):
    """Dtype and shape of a tensor, as in the header of a file."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]


Layout = Mapping[str, Stored | Tensor]
"""Tensors by name, of which only dtypes and shapes are used."""


def layout_of_file(opened: Any) -> Layout:
    """Return the layout of an open safetensors file without reading tensors."""
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
    if not isinstance(name, str) or not name.isprintable() or len(name) > 500:
        raise ValueError(f"names of tensors must be printable text of up to 500 characters, got {shown(name)}")


@contextmanager
def budget(layout: Layout) -> Iterator[None]:
    """Raise ValueError if models register more tensors or numbers in this thread than the layout permits."""
    stored = sum(math.prod(tensor.shape) for tensor in layout.values())
    # More than the file holds, because `Features` drops layers once built, and buffers may not be saved.
    limits = {
        "tensors": max(4096, 4 * len(layout)),
        "numbers in parameters": max(2**28, 32 * stored),
        "numbers in buffers": max(2**25, 4 * stored),
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
        modules.register_module_parameter_registration_hook(lambda _, __, one: spend(one, "numbers in parameters")),
        modules.register_module_buffer_registration_hook(lambda _, __, one: spend(one, "numbers in buffers")),
    ):
        yield


def check_fits(model: nn.Module, layout: Layout) -> None:
    """Raise ValueError unless tensors match a model's in name, shape and dtype; floating-point dtypes may differ."""
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
