"""The study of reconstructed points: exact with all frequencies, sums over axes with axial ones, spans of blocks."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import labs
import pytest
import torch

import torchrope as tr
from torchrope.encodings import parse_encoding
from torchrope.positions import grid
from torchrope_lab.engine.trained_models import Site
from torchrope_lab.settings.run_config import ModelConfig
from torchrope_lab.studies import fourier
from torchrope_lab.studies.fourier import EXACT, Heads, best_fit, heads_of, sharpness, transform

lab = partial(labs.lab, model=ModelConfig(dim=16, depth=1, num_heads=2, mlp_dim=8, patch_size=[2]))


def heads(name: str, sizes: tuple[int, ...] = (4, 5), head_dim: int = 16, **settings: Any) -> Heads:
    shape = {"num_axes": len(sizes), "num_heads": 2, "head_dim": head_dim, **settings}
    encoding = parse_encoding(name).rotary(**shape)
    return on_lattice(encoding, sizes, name)


def on_lattice(encoding: tr.Encoding, sizes: tuple[int, ...], name: str = "") -> Heads:
    return heads_of([Site(encoding, sizes, **encoding.lattice.spaced(*sizes))], name, "start")


def all_frequencies(sizes: Sequence[int]) -> Heads:
    """One head with every frequency of a lattice's discrete Fourier transform, 2π k / size along each axis."""
    encoding = tr.MixedRoPE(num_axes=len(sizes), num_heads=1, head_dim=2 * math.prod(sizes)).double()
    waves = grid(*sizes, dtype=torch.float64) * 2 * math.pi / torch.tensor(sizes, dtype=torch.float64)
    encoding.set_generators(tr.encodings.planar(waves.mT.unsqueeze(1)))
    return heads_of([Site(encoding, tuple(sizes), 1.0, 0.0)], "all", "all frequencies")


def bend(reconstructions: torch.Tensor, sizes: Sequence[int]) -> float:
    """The largest mixed difference of neighbours over the last two axes, 0 for sums of functions of one axis."""
    lattice = reconstructions.unflatten(1, tuple(sizes))
    return float(lattice.diff(dim=-1).diff(dim=-2).abs().max())


@pytest.mark.parametrize("sizes", [(6,), (4, 5), (3, 2, 4)])
def test_all_frequencies_reconstruct_exactly(sizes: tuple[int, ...]) -> None:
    every = all_frequencies(sizes)
    identity = torch.eye(math.prod(sizes), dtype=torch.float64)
    fit, dimension = best_fit(every.functions[0])
    assert dimension == math.prod(sizes)
    torch.testing.assert_close(fit, identity, rtol=0, atol=EXACT)
    torch.testing.assert_close(transform(every.blocks[0], every.head_dim), identity, rtol=0, atol=EXACT)


def test_some_frequencies_of_the_lattice_are_a_masked_fourier_transform() -> None:
    kept = [0, 1, 3, 7]  # k of 8
    encoding = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=8).double()
    waves = 2 * math.pi * torch.tensor(kept, dtype=torch.float64) / 8
    encoding.set_generators(tr.encodings.planar(waves.view(1, 1, 4)))
    found = on_lattice(encoding, (8,))
    mask = torch.zeros(8)
    mask[kept] = 1
    point = torch.zeros(8, dtype=torch.float64)
    point[2] = 1
    expected = torch.fft.ifft(torch.fft.fft(point) * mask).real * 8 / 4
    torch.testing.assert_close(transform(found.blocks[0], 8)[2], expected)


def test_best_fit_is_least_squares_on_cosines_and_sines() -> None:
    found = heads("mixed", head_dim=8)
    encoding_angles = torch.atan2(found.blocks[0][..., 1, 0], found.blocks[0][..., 0, 0])  # (tokens, pairs)
    waves = torch.cat([encoding_angles.cos(), encoding_angles.sin()], dim=1)
    identity = torch.eye(20, dtype=torch.float64)
    expected = waves @ torch.linalg.lstsq(waves, identity, driver="gelsd").solution
    torch.testing.assert_close(best_fit(found.functions[0])[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["axial", "mixed", "liere:4", "liere", "comrope-ld", "string"])
def test_best_fit_projects_and_its_mean_peak_is_its_dimension(name: str) -> None:
    found = heads(name)
    for functions in found.functions:
        fit, dimension = best_fit(functions)
        torch.testing.assert_close(fit @ fit, fit)
        peak = sharpness(fit, found.sizes)["peak"]
        assert peak == pytest.approx(dimension / 20)
        assert sharpness(fit, found.sizes)["outside"] == pytest.approx(1 - peak, abs=0.2)
        assert dimension <= min(20, functions.shape[1])


def test_basis_of_its_own_changes_nothing() -> None:
    mixed = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16)
    string = tr.STRING(num_axes=2, num_heads=2, head_dim=16)
    string.frequencies.data.copy_(mixed.frequencies)
    one, other = (on_lattice(each, (4, 5)) for each in (mixed, string))
    for head in range(2):
        expected = transform(one.blocks[head], 16)
        torch.testing.assert_close(transform(other.blocks[head], 16), expected, rtol=0, atol=1e-6)
        assert best_fit(one.functions[head])[1] == best_fit(other.functions[head])[1]


@pytest.mark.parametrize("name", ["axial", "comrope-ap:4", "comrope-ap:2"])
def test_blocks_of_one_axis_reconstruct_sums(name: str) -> None:
    found = heads(name)
    assert bend(best_fit(found.functions[0])[0], found.sizes) < EXACT
    assert best_fit(found.functions[0])[1] <= 4 + 5 - 1


@pytest.mark.parametrize("name", ["mixed", "liere:4", "comrope-ld"])
def test_blocks_of_several_axes_are_not_sums(name: str) -> None:
    found = heads(name)
    assert bend(best_fit(found.functions[0])[0], found.sizes) > 1e-3


def test_blocks_that_do_not_commute_span_more_than_frequencies() -> None:
    assert best_fit(heads("liere", (6, 6)).functions[0])[1] > best_fit(heads("mixed", (6, 6)).functions[0])[1]


@pytest.mark.parametrize("settings", [{}, {"num_heads": 1}])
def test_absent_rotation_is_one_constant(settings: dict[str, Any]) -> None:
    found = heads("none", **settings)
    fit, dimension = best_fit(found.functions[0])
    assert dimension == 1
    torch.testing.assert_close(fit, torch.full((20, 20), 1 / 20, dtype=torch.float64))
    torch.testing.assert_close(transform(found.blocks[0], 16), torch.ones(20, 20, dtype=torch.float64))


def test_unrotated_channels_add_a_constant() -> None:
    found = heads("mixed", head_dim=16, rotary_dim=8)
    whole = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16)
    assert found.functions.shape[-1] == 4 * 4 + 1
    assert float(transform(found.blocks[0], 16)[0, 0]) == pytest.approx(1)
    assert on_lattice(whole, (4, 5)).functions.shape[-1] == 8 * 4


def test_sharpness_of_a_point_and_of_a_plain() -> None:
    point = sharpness(torch.eye(12, dtype=torch.float64), (3, 4))
    assert point == {"peak": 1.0, "outside": 0.0, "lines": 0.0, "width": 0.0}
    plain = sharpness(torch.full((9, 9), 1 / 9, dtype=torch.float64), (3, 3))
    assert plain["outside"] == pytest.approx(8 / 9)
    assert plain["lines"] == pytest.approx(4 / 8)


def test_findings_show_a_cross_for_axial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fourier, "LATTICE", (6, 7))
    monkeypatch.setattr(fourier, "HEADS", 3)
    monkeypatch.setattr(fourier, "HEAD_DIM", 16)
    here = lab(tmp_path, "learned", "axial", "mixed", "liere:8", "liere:32")
    found = fourier.find(here)
    rows = {row["encoding"]: row for row in found.tables[0].rows}
    assert set(rows) == {"axial", "mixed", "liere:8"}
    assert rows["axial"]["heads"] == 1
    assert rows["axial"]["fit_lines"] > rows["mixed"]["fit_lines_high"]
    assert rows["liere:8"]["fit_outside_high"] < rows["mixed"]["fit_outside_low"]
    plain, refused = here.left_out
    assert plain == "learned left out: not rotary."
    assert refused.startswith("liere:32 left out: head_dim must be divisible by block_size = 32")
    assert f"least energy outside a point with liere:8, {rows['liere:8']['fit_outside']:.1f} %" in found.answer
    cells = [row for row in found.figures[0].rows if row["panel"] == "RoPE-Axial, ViT-B, initialisation, best fit"]
    assert len(cells) == 42
    assert max(cells, key=lambda row: row["value"])["x"] == 3
    json.dumps(found.plain())


def test_absolute_encoding_without_rotation_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^fourier needs rotary encodings, got learned$"):
        fourier.find(lab(tmp_path, "learned"))
