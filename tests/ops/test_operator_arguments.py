"""Operators with one argument of other sizes, order, strides, dtype or device: refused in one line, or right.

`make sanitize` runs this under the sanitizers, where no wrong one may touch foreign memory either.
"""

from collections.abc import Iterator

import pytest
import torch
from test_integration import operator_calls
from torch import Tensor

from torchrope.ops import native
from torchrope.ops.library import OPS

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")


def changed(x: Tensor) -> Iterator[Tensor]:
    for dim in range(x.ndim):
        for size in (0, 1, x.shape[dim] - 1, x.shape[dim] + 1, 2 * x.shape[dim]):
            yield torch.randn(*x.shape[:dim], size, *x.shape[dim + 1 :]).to(x.dtype)
        yield x.select(dim, 0)
        yield x.unsqueeze(dim)
        yield x.transpose(dim, dim - 1)
        yield x.transpose(dim, -1).contiguous().transpose(dim, -1)
        yield x.narrow(dim, 0, 1).expand_as(x)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64, torch.bool):
        yield x.to(dtype)
    yield x.to("meta")
    yield torch.stack([x, x], dim=-1)[..., 0]
    yield torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def results(name: str, args: list) -> list[Tensor]:
    found = getattr(OPS, name)(*args)
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("name", operator_calls() if native.LIBRARY is not None else [])
@torch.no_grad()
def test_changed_arguments_are_refused_or_right(name: str) -> None:
    torch.manual_seed(0)
    args = list(operator_calls()[name])
    right, messages = 0, []
    for index in [index for index, x in enumerate(args) if isinstance(x, Tensor)]:
        for x in changed(args[index].detach()):
            call = [*args[:index], x, *args[index + 1 :]]
            try:
                found = results(name, call)
            except ValueError as error:
                messages.append(str(error))
                continue
            plain = [y.float().contiguous() if isinstance(y, Tensor) else y for y in call]
            for one, other in zip(found, results(name, plain), strict=True):
                steps = 0.05 if torch.bfloat16 in (x.dtype, one.dtype) else 5e-3
                torch.testing.assert_close(one.float(), other, rtol=steps, atol=steps, equal_nan=True)
            right += 1
    assert right
    assert messages
    assert not [message for message in messages if "\n" in message]
