"""benchmarks/accuracy.py: blocks of any rank against float64, and precision far from the origin."""

import json

import accuracy
import pytest
import torch
from parity import under

import torchrope as tr
from torchrope.encodings import base
from torchrope.ops.library import run

BACKENDS = ("auto", "reference")


@pytest.mark.parametrize("family", [tr.ComRoPELD, tr.ComRoPEAP])
@pytest.mark.parametrize("b", [2, 3, 4, 6, 8, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_rotate_matches_float64_for_blocks_of_any_rank(b: int, family: type[tr.Encoding]) -> None:
    for kind in accuracy.KINDS:
        if (b == 64) <= (kind in ("one plane at rest", "rank 2", "repeated frequencies")):
            checked = accuracy.check_blocks(kind, b, family)
            assert checked.failures == 0, checked


@pytest.mark.slow
def test_rotate_matches_float64_for_ten_thousand_blocks() -> None:
    checked = accuracy.check_all(10_000, log=lambda _: None)
    assert sum(one.blocks for one in checked) >= 10_000
    assert {(one.kind, one.block_size) for one in checked} == {(k, b) for k in accuracy.KINDS for b in accuracy.SIZES}
    assert [one for one in checked if one.failures] == []


def test_check_blocks_detects_a_missing_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_last(name: str, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        basis, angular = run(name, *args)
        angular[..., -1] = 0
        return basis, angular

    assert accuracy.check_blocks("full", 8, tr.ComRoPELD).failures == 0
    monkeypatch.setattr(base, "run", without_last)
    assert accuracy.check_blocks("full", 8, tr.ComRoPELD).failures > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("mixed", 2),
        ("comrope-ld:8", 2),
        ("comrope-ap:8", 2),
        ("string:8", 2),
        ("liere:8", 3),
        ("liere:16", 1),
        ("liere:16", 2),
        pytest.param("liere", 3, marks=pytest.mark.slow),
    ],
)
def test_rotate_keeps_norms_at_large_positions(name: str, axes: int, backend: str) -> None:
    """Random positions and lattices, whose positions are multiples of each other, forward and backward."""
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=axes, num_heads=2, head_dim=64)
    side = {1: 40, 2: 7, 3: 4}[axes]
    for distance in (1.0, 30.0, 1e3, 1e4, 1e6, 1e12, 1e30):
        lattice = tr.grid(*[side] * axes, spacing=distance / (side - 1))
        scattered = (2 * torch.rand(20, axes) - 1) * distance
        positions = torch.cat([lattice, scattered])
        q = torch.randn(1, 2, len(positions), 64, requires_grad=True)
        rotated, _ = under(backend, tr.rotate, q, q, under(backend, encoding, positions))
        (back,) = torch.autograd.grad(rotated, q, q.detach())
        for x in (rotated, back):
            change = x.detach().double().norm(dim=-1) / q.detach().double().norm(dim=-1) - 1
            assert change.abs().max() <= 1e-5, distance


@pytest.mark.parametrize("name", ["liere:16", "liere"])
def test_rotate_keeps_norms_along_a_long_axis(name: str) -> None:
    """A kernel computes equally spaced tokens as powers of one matrix, whose errors could accumulate."""
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=1, num_heads=1, head_dim=32)
    q = torch.randn(1, 1, 4000, 32)
    rotated, _ = tr.rotate(q, q, encoding(tr.grid(4000, spacing=0.1)))
    assert (rotated.double().norm(dim=-1) / q.double().norm(dim=-1) - 1).abs().max() <= 1e-5


def test_gradients_are_bounded_at_large_positions() -> None:
    for name in ("liere:8", "liere", "comrope-ld:8"):
        encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=64)
        positions = (2 * torch.rand(20, 2) - 1) * 1e6
        q = torch.randn(1, 2, 20, 64)
        rotated, _ = tr.rotate(q, q, encoding(positions))
        rotated.square().cumsum(-1).sum().backward()
        for parameter in encoding.parameters():
            # bounded by sum_tokens |p| |g| |x|, since every Jacobian is an average over rotations
            assert 0 < parameter.grad.abs().max() < 1e6 * 20 * 64 * 64 * 16


def test_results_match_the_documentation_page() -> None:
    results = json.loads(accuracy.RESULTS.read_text(encoding="utf-8"))
    assert sum(one["blocks"] for one in results["blocks"]) >= 10_000
    assert sum(one["failures"] for one in results["blocks"]) == 0
    far = [accuracy.DistanceError(**one) for one in results["far"]]
    assert max(one.norm_change for one in far) <= 1e-5
    page = accuracy.PAGE.read_text(encoding="utf-8")
    assert accuracy.render(page, far) == page
