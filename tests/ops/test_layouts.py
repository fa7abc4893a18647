"""Layouts: bthd and packed projections give the results of bhtd."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr

SIZES: dict[str, Any] = dict(num_axes=2, num_heads=2, head_dim=8)
FAMILIES = {
    "mixed": tr.MixedRoPE,
    "liere:4": partial(tr.LieRE, block_size=4),
    "comrope-ld:4": partial(tr.ComRoPELD, block_size=4),
    "string": tr.STRING,
}


def made(family: str, dtype: torch.dtype = torch.float64) -> tr.Encoding:
    return FAMILIES[family](**SIZES).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bthd_layout_gives_the_same_values_and_gradients(family: str, dtype: torch.dtype) -> None:
    encoding = made(family, torch.promote_types(dtype, torch.float32))
    qkv = torch.randn(3, 7, 3, 2, 8, dtype=dtype, requires_grad=True)  # (batch, tokens, 3, heads, head_dim)
    q, k, _ = qkv.unbind(2)
    positions = torch.randn(3, 7, 2, dtype=encoding.generators().dtype)
    turned = tr.rotate(q, k, encoding(positions), layout="bthd")
    expected = tr.rotate(q.transpose(1, 2), k.transpose(1, 2), encoding(positions), layout="bhtd")
    alone = tr.apply(q, encoding(positions), layout="bthd")
    weight = torch.randn(2, 3, 7, 2, 8, dtype=dtype)
    gradients = []
    for pair in (turned, [x.transpose(1, 2) for x in expected]):
        loss = (torch.stack(list(pair)) * weight).sum()
        gradients.append(torch.autograd.grad(loss, [qkv, *encoding.parameters()]))
    for mine, other in zip(turned, expected, strict=True):
        assert torch.equal(mine, other.transpose(1, 2))
    assert torch.equal(alone, turned[0])
    assert all(map(torch.equal, *gradients))


def test_results_have_the_memory_order_of_their_inputs() -> None:
    rotation = made("mixed", torch.float32)(torch.randn(7, 2))
    q, k, _ = torch.randn(3, 7, 3, 2, 8).unbind(2)
    assert all(x.is_contiguous() for x in tr.rotate(q, k, rotation, layout="bthd"))
    across = torch.randn(3, 2, 8, 7).mT  # neighbouring channels are apart in memory
    assert torch.equal(tr.apply(across, rotation), tr.apply(across.contiguous(), rotation))


def test_heads_come_first_by_default_also_if_both_layouts_fit() -> None:
    rotation = made("mixed", torch.float32)(torch.randn(2, 2))
    q = torch.randn(1, 2, 2, 8)
    heads_first, tokens_first = (tr.rotate(q, q, rotation, layout=layout)[0] for layout in ("bhtd", "bthd"))
    assert not torch.allclose(heads_first, tokens_first)
    assert torch.equal(tr.rotate(q, q, rotation)[0], heads_first)
    assert torch.equal(tr.apply(q, rotation), heads_first)


@pytest.mark.parametrize(
    ("x", "layout", "message"),
    [
        (torch.zeros(5, 8), "bthd", r"x must be \(batch, tokens, heads, head_dim\) in layout bthd, got \(5, 8\)"),
        (torch.zeros(1, 2, 5, 8), "bthd", "x must have the rotation's 5 tokens, got 2"),
        (torch.zeros(1, 5, 2, 8), "bhtd", "x must have the rotation's 5 tokens, got 2"),
        (torch.nested.nested_tensor([torch.zeros(5, 2, 8)], layout=torch.jagged), "bthd", "got a nested tensor"),
    ],
)
def test_wrong_layout_raises_one_line_error(x: Tensor, layout: str, message: str) -> None:
    rotation = made("mixed", torch.float32)(torch.randn(5, 2))
    with pytest.raises(ValueError, match=message):
        tr.apply(x, rotation, layout=layout)
