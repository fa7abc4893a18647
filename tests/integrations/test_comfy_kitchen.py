"""The functions that comfy-kitchen names: its eager results in float64, with gradients to q, k, scales and tables."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchrope.integrations import comfy_kitchen as ours

theirs = pytest.importorskip("comfy_kitchen.backends.eager.rope")
PAIRS = ("apply_rope", "apply_rope_split_half", "rms_rope", "rms_rope_split_half")
SINGLE = ("apply_rope1", "apply_rope_split_half1", "rms_rope1", "rms_rope_split_half1")


def table(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    angles = torch.randn(*shape, dtype=torch.float64)
    rows = [torch.stack([angles.cos(), -angles.sin()], -1), torch.stack([angles.sin(), angles.cos()], -1)]
    return torch.stack(rows, dim=-2).to(dtype)


def arguments(name: str, layout: str = "bhtd", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    q, k = (torch.randn(2, 3, 7, 8, dtype=dtype) for _ in range(2))
    freqs = table(2, 1, 7, 4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    if layout == "bthd":
        q, k, freqs = q.transpose(1, 2), k.transpose(1, 2), freqs.transpose(1, 2)
    scales = [1 + torch.randn(8, dtype=dtype) / 4 for _ in range(2)] if name.startswith("rms") else []
    whole = [q, k, freqs, *scales]
    if name in SINGLE:
        whole = [q, freqs, *scales[:1]]
    return [x.detach().requires_grad_() for x in whole]


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def by_formula(name: str, *inputs: Tensor, **settings: Any) -> list[Tensor]:
    """Their eager backend writes into a result that autograd needs if the table has a gradient: out of place here."""
    q, *rest = inputs
    k = rest.pop(0) if name in PAIRS else None
    freqs, *scales = rest
    rot_dim = settings.get("rot_dim") or q.shape[-1]
    results = []
    for x, scale in zip([q] if k is None else [q, k], (scales * 2)[: (len(scales) or 1)] or [None], strict=False):
        results.append(rotated(name, x, freqs, scale, rot_dim))
    if k is not None and len(results) == 1:
        results.append(rotated(name, k, freqs, scales[0] if scales else None, rot_dim))
    return results


def rotated(name: str, x: Tensor, freqs: Tensor, scale: Tensor | None, rot_dim: int) -> Tensor:
    if scale is not None:
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], scale, 1e-6)
    x, rest = x[..., :rot_dim], x[..., rot_dim:]
    half = rot_dim // 2
    pairs = torch.stack([x[..., :half], x[..., half:]], -1) if "half" in name else x.unflatten(-1, (-1, 2))
    turned = (freqs * pairs.unsqueeze(-2)).sum(-1)
    turned = turned.transpose(-1, -2).flatten(-2) if "half" in name else turned.flatten(-2)
    return torch.cat([turned, rest], dim=-1)


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("name", PAIRS + SINGLE)
def test_results_and_gradients(name: str, layout: str) -> None:
    inputs = arguments(name, layout)
    found, expected = listed(getattr(ours, name)(*inputs)), by_formula(name, *inputs)
    with torch.no_grad():
        torch.testing.assert_close(found, listed(getattr(theirs, name)(*inputs)), atol=1e-12, rtol=0)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    grown = [torch.randn_like(x) for x in expected]
    got, right = (torch.autograd.grad(results, inputs, grown) for results in (found, expected))
    # A rotation reads the first column of its table; the formula reads both, the second being the first turned.
    tables = 1 if name in SINGLE else 2
    for i, (one, other) in enumerate(zip(got, right, strict=True)):
        if i == tables:
            turned = torch.stack([other[..., 1, 1], -other[..., 0, 1]], dim=-1)
            one, other = one[..., 0], other[..., 0] + turned
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_parts_of_heads_and_one_scale() -> None:
    name = "rms_rope_split_half"
    q, k, _, scale, _ = arguments(name)
    freqs = table(1, 1, 7, 2)
    found = getattr(ours, name)(q, k, freqs, scale, rot_dim=4)
    with torch.no_grad():
        expected = getattr(theirs, name)(q, k, freqs, scale, rot_dim=4)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_grouped_heads_other_lengths_and_longer_tables() -> None:
    q, freqs = torch.randn(2, 4, 7, 8, dtype=torch.float64), table(1, 1, 9, 4)
    for k in (q[:, :2], q[:, :, :5], q[:, :3, :6]):
        found, expected = ours.apply_rope(q, k, freqs), theirs.apply_rope(q, k, freqs)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert ours.apply_rope(q, q[:, :0], freqs)[1].shape == (2, 0, 7, 8)


def test_tables_without_batch() -> None:
    q, freqs = torch.randn(2, 4, 7, 8, dtype=torch.float64), table(7, 4)
    torch.testing.assert_close(ours.apply_rope1(q, freqs), theirs.apply_rope1(q, freqs), atol=1e-12, rtol=0)


def test_bfloat16_is_rounded_once_and_stays_nan() -> None:
    q, k, freqs = (x.detach() for x in arguments("apply_rope", dtype=torch.bfloat16))
    q[0, 0, 0] = torch.nan
    found = ours.apply_rope(q, k, freqs)
    expected = theirs.apply_rope(q.double(), k.double(), freqs.double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, atol=0, rtol=2**-8, equal_nan=True)
    assert found[0].isnan().sum() == 8


@pytest.mark.parametrize("freqs", [table(7, 3), table(5, 4), table(3, 1, 7, 4), table(1, 7, 1, 7, 4)])
def test_tables_of_other_shapes_are_one_line(freqs: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^freqs_cis must be \(\.\.\., tokens or heads, 4, 2, 2\), .*, got "):
        ours.apply_rope1(torch.randn(2, 4, 7, 8), freqs)


def test_scales_of_other_shapes_are_one_line() -> None:
    q, freqs = torch.randn(2, 4, 7, 8), table(7, 4)
    for shape in ((2, 8), (6,)):
        with pytest.raises(ValueError, match=r"^the scale of a norm must be \(head_dim,\) = \(8,\), got "):
            ours.rms_rope1(q, freqs, torch.ones(shape))
