"""The study of kernels: scores by offset against brute force, and their absolute parts."""

import io
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import torchrope as tr
from torchrope_lab.data.config import data_config
from torchrope_lab.results import Findings
from torchrope_lab.studies import accuracy, kernel
from torchrope_lab.studies.engine.config import StudyConfig
from torchrope_lab.studies.engine.runs import Measure, MeasuresOf, Run, Trained
from torchrope_lab.studies.engine.study import Lab
from torchrope_lab.studies.kernel import kernels, pair_indices, projected, rotary_kernel, scalar_kernel
from torchrope_lab.training.config import ModelConfig
from torchrope_lab.training.models import build_model


def vit(encoding: str, sizes: Sequence[int] = (3, 4), dim: int = 48, **settings: Any) -> tr.ViT:
    return tr.ViT(
        sizes, patch_size=1, in_channels=1, num_outputs=2, dim=dim, depth=2, num_heads=2, encoding=encoding, **settings
    )


def rotations(tokens: int, d: int) -> Tensor:
    return torch.linalg.qr(torch.randn(tokens, d, d, dtype=torch.float64))[0]


def by_brute_force(matrices: Tensor, sizes: Sequence[int], left: Tensor, right: Tensor) -> dict[tuple, tuple]:
    """Mean score of equal contents, and the absolute part, with every pair written out."""
    places = list(itertools.product(*map(range, sizes)))
    pairs: dict[tuple, list[Tensor]] = {}
    for (i, p), (j, other) in itertools.product(enumerate(places), repeat=2):
        offset = tuple(b - a for a, b in zip(p, other, strict=True))
        pairs.setdefault(offset, []).append(left.mT @ matrices[i].mT @ matrices[j] @ right)
    found = {}
    for offset, scores in pairs.items():
        mean = sum(scores) / len(scores)
        away = sum(float((score - mean).norm() ** 2) for score in scores) / max(len(scores) - 1, 1)
        whole = sum(float(score.norm() ** 2) for score in scores) / len(scores)
        equal = float(mean.trace() / (left.norm() * right.norm()))
        found[offset] = (equal, math.sqrt(away / whole) if len(scores) > 1 else math.nan)
    return found


@pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 3, 2)])
def test_offsets_sort_all_pairs(sizes: tuple[int, ...]) -> None:
    places = tr.grid(*sizes).long()
    seen = set()
    for offset, queries, keys in pair_indices(sizes):
        assert (places[keys] - places[queries] == torch.tensor(offset)).all()
        assert len(queries) == math.prod(size - abs(step) for size, step in zip(sizes, offset, strict=True))
        seen |= set(zip(queries.tolist(), keys.tolist(), strict=True))
    assert len(seen) == math.prod(sizes) ** 2


@pytest.mark.parametrize("weighted", [False, True])
def test_means_and_absolute_parts_are_those_of_all_pairs(weighted: bool) -> None:
    sizes, d = (2, 3), 4
    matrices = rotations(6, d)
    left, right = (torch.randn(d, 7, dtype=torch.float64) for _ in range(2))
    if weighted:
        found = rotary_kernel(matrices, sizes, query_weight=left, key_weight=right)
    else:
        left = right = torch.eye(d, dtype=torch.float64)
        found = rotary_kernel(matrices, sizes)
    expected = by_brute_force(matrices, sizes, left, right)
    assert len(found.offsets) == len(expected)
    for offset, mean, absolute in zip(found.offsets.tolist(), found.mean, found.absolute, strict=True):
        assert (float(mean), float(absolute)) == pytest.approx(expected[tuple(offset)], rel=1e-9, nan_ok=True)


def test_rotations_without_rule_are_all_absolute() -> None:
    assert rotary_kernel(rotations(64, 12), (8, 8)).share == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("encoding", ["axial", "mixed", "liere:2", "comrope-ap:4", "comrope-ld", "string", "golden"])
@pytest.mark.parametrize("sizes", [(4, 5), (2, 3, 4)])
@pytest.mark.parametrize("projections", [False, True])
def test_commuting_encodings_have_no_absolute_part(encoding: str, sizes: tuple[int, ...], projections: bool) -> None:
    for layer in kernels(vit(encoding, sizes), sizes, projections=projections):
        assert max(head.share for head in layer) < kernel.EXACT


@pytest.mark.parametrize("encoding", ["liere:4", "liere", "learned"])
@pytest.mark.parametrize("sizes", [(4, 5), (2, 3, 4)])
def test_noncommuting_encodings_have_an_absolute_part_in_every_head(encoding: str, sizes: tuple[int, ...]) -> None:
    shares = [head.share for layer in kernels(vit(encoding, sizes), sizes) for head in layer]
    assert min(shares) > 0.01


def test_bias_is_relative_and_equals_its_kernel() -> None:
    model = vit("bias")
    for bias, layer in zip(model.biases, kernels(model, (3, 4)), strict=True):
        for head, found in enumerate(layer):
            table = bias.table[:, head].double()
            assert found.share < kernel.EXACT
            # p of the query minus p' of the key there, key minus query here
            torch.testing.assert_close(found.mean, table.flip(0) / table.abs().max())


def test_axial_scores_are_mean_cosines() -> None:
    model = vit("axial")
    frequencies = model.encodings[0].frequencies_per_axis()[:, 0].double()  # (axes, pairs)
    for head in kernels(model, (3, 4))[0]:
        torch.testing.assert_close(head.mean, (head.offsets.double() @ frequencies).cos().mean(dim=1))


def test_unrotated_channels_count() -> None:
    partial = tr.MixedRoPE(num_axes=2, num_heads=1, head_dim=8, rotary_dim=4)
    model = vit("none", dim=16)
    model.encodings = torch.nn.ModuleList([partial])
    frequencies = partial.frequencies[:, 0].detach().double()
    head = kernels(model, (3, 4))[0][0]
    torch.testing.assert_close(head.mean, 0.5 + (head.offsets.double() @ frequencies).cos().sum(dim=1) / 4)


def test_projections_carry_gains_and_biases() -> None:
    layer = vit("mixed").layers[0]
    torch.nn.init.normal_(layer.norm1.weight)
    torch.nn.init.normal_(layer.norm1.bias)
    torch.nn.init.normal_(layer.attention.qkv.bias)
    x = torch.randn(5, 48)
    q, k, _ = layer.attention.qkv(layer.norm1(x)).unflatten(-1, (3, 2, 24)).unbind(1)
    normed = (x - x.mean(dim=1, keepdim=True)) / (x.var(dim=1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    contents = torch.cat([normed, torch.ones(5, 1)], dim=1).double()
    found = torch.einsum("shdc,nc->snhd", projected(layer), contents)
    torch.testing.assert_close(found.float(), torch.stack([q, k]), rtol=1e-4, atol=1e-4)


def test_isotropic_projections_change_nothing() -> None:
    matrices, identity = rotations(6, 4), torch.eye(4, dtype=torch.float64)
    plain = rotary_kernel(matrices, (2, 3))
    through = rotary_kernel(matrices, (2, 3), query_weight=identity, key_weight=identity)
    torch.testing.assert_close(through.mean, plain.mean)
    torch.testing.assert_close(through.absolute, plain.absolute, equal_nan=True)
    assert through.share == pytest.approx(plain.share)


def test_scalars_are_sorted_by_offset() -> None:
    places = tr.grid(3, 4).double()
    relative = torch.cdist(places, places)
    found = scalar_kernel(relative, (3, 4))
    assert found.share < kernel.EXACT
    torch.testing.assert_close(found.mean, found.offsets.double().norm(dim=1))


class Untrained(Trained):
    """A run that nobody trained: its model is the one at the start."""

    measures: Sequence[Measure]

    def measured(self, name: str) -> dict[str, Any]:
        [measure] = self.measures
        assert name == measure.name
        return measure.compute(*self.load())

    def load(self, data: Any = None) -> tuple[Any, Any]:
        torch.manual_seed(1)
        data = data or self.lab.data
        return build_model(self.encoding, self.run.config.model, data), data


def study(
    folder: Path,
    encodings: list[str],
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    seeds: int = 1,
    losses: Sequence[float | None] = (1.0, 1.0),
) -> Lab:
    model = ModelConfig(dim=32, depth=2, num_heads=2, mlp_dim=8, patch_size=[2] if data == "digits" else [1, 10, 10])
    config = data_config(name=data, train_size=40, val_size=20)
    lab = Lab(
        StudyConfig(data=config, model=model, encodings=encodings, seeds=seeds, out=str(folder)),
        [],
        Console(file=io.StringIO()),
    )

    def train(runs: Sequence[Run], measures: MeasuresOf = lambda _: (), **__: object) -> list[Trained]:
        lab.asked = list(runs)
        trained = [Untrained(run, folder / run.name, [0, 1], [0, 0], losses[run.seed], [], 0.0) for run in runs]
        for each in trained:
            each.lab, each.measures = lab, measures(each.run)
        return trained

    monkeypatch.setattr(lab, "train", train)
    return lab


def test_findings_on_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = study(tmp_path, ["none", "learned", "mixed", "liere:8"], "digits", monkeypatch, seeds=2)
    found = kernel.find(lab)
    assert [check.holds for check in found.checks] == [True, True, True]
    rows = {row["name"]: row for row in found.tables[0].rows}
    assert len(rows) == 2 + 2 + 3 + 3
    assert rows["mixed, trained"]["absolute"] < 1e-7
    assert rows["mixed, trained"]["heads"] == 2 * 2 * 2
    free = rows["liere:8, initialisation"]
    assert 1 < free["absolute_low"] <= free["absolute"] <= free["absolute_high"] <= free["most"]
    assert "mixed depend only on the offset" in found.answer
    assert f"{rows['liere:8, trained']['absolute']:.1f} % [" in found.answer
    assert {figure.name for figure in found.figures} == {
        "kernel",
        "kernel-heads",
        "kernel-absolute",
        "absolute-by-distance",
    }
    panel = [row for row in found.figures[0].rows if row["panel"] == "RoPE-Mixed, trained"]
    assert {(row["x"], row["y"]) for row in panel} == set(itertools.product(range(-3, 4), repeat=2))
    assert next(row["value"] for row in panel if row["x"] == row["y"] == 0) == 1
    assert {row["panel"].partition(",")[0] for row in found.figures[2].rows} == {"learned APE", "LieRE"}
    json.dumps(found.plain())


def test_runs_are_those_of_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = study(tmp_path, ["none", "mixed"], "digits", monkeypatch, seeds=2)
    kernel.find(lab)
    mine = {run.key for run in lab.asked}
    accuracy.find(lab)
    assert {run.key for run in lab.asked} == mine


def test_findings_over_time_show_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Findings = kernel.find(study(tmp_path, ["mixed", "liere:8"], "motion", monkeypatch))
    assert all(check.holds for check in found.checks)
    panels = {row["panel"] for row in found.figures[0].rows}
    assert "LieRE, blocks of 8, trained, time 0" in panels
    assert "LieRE, blocks of 8, trained, time +1" in panels
    assert found.figures[0].x.title == "Offset along width"


def test_diverged_runs_are_left_out_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernel.find(study(tmp_path, ["none", "mixed"], "digits", monkeypatch, seeds=2, losses=[1.0, None]))
    assert {row["name"]: row["heads"] for row in found.tables[0].rows}["mixed, trained"] == 2 * 2
    assert found.notes[:2] == [f"{name}: 1 of 2 runs diverged and are left out." for name in ("none", "mixed")]
    nothing = kernel.find(study(tmp_path, ["mixed"], "digits", monkeypatch, seeds=2, losses=[None, math.nan]))
    assert nothing.answer.startswith("No rotary encoding was measured")
    assert nothing.notes[0] == "mixed: 2 of 2 runs diverged and are left out."


def test_encodings_refused_by_the_model_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernel.find(study(tmp_path, ["liere:12", "mixed"], "digits", monkeypatch))
    assert found.notes[0].startswith("liere:12 is left out: head_dim must be divisible by block_size = 12")
    assert {row["encoding"] for row in found.tables[0].rows} == {"mixed"}
    assert "absolute part" not in found.answer  # all commute
    assert "one training each" in found.answer
    with pytest.raises(ValueError, match=r"^kernel needs an encoding that the model supports, got liere:12$"):
        kernel.find(study(tmp_path, ["liere:12"], "digits", monkeypatch))


def test_swin_is_refused(tmp_path: Path) -> None:
    config = StudyConfig(model=ModelConfig(backbone="swin", size="tiny"), encodings=["mixed"], out=str(tmp_path))
    with pytest.raises(ValueError, match=r"^kernel needs model.backbone vit, got swin$"):
        kernel.find(Lab(config, [], Console(file=io.StringIO())))
