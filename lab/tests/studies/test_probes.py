"""Probes: weights with a known optimum, scores between ignorance and the optimum, and the study."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from labs import Run

from torchrope import grid
from torchrope_lab.engine.estimates import drawn_mean
from torchrope_lab.engine.long_table import Cell
from torchrope_lab.settings.probes_config import SIDES, ProbesConfig
from torchrope_lab.studies.probes import Job, layer, scores_of
from torchrope_lab.studies.probes.abilities import ABILITIES, nearest_weights, weights_of
from torchrope_lab.studies.probes.layer import CONDITIONS, TRAINED, Condition, Probe, score, train_probe

PROBES = ["study", "probes", "--seeds=1", "--probes.steps=3", "--probes.batch_size=2", "--probes.examples=4"]


def _places(axes: int) -> torch.Tensor:
    return grid(*(SIDES[axes],) * axes, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "axes"),
    [(name, axes) for name, each in ABILITIES.items() for axes in SIDES if axes >= each.axes and not each.marked],
)
def test_weights_are_shares_of_other_tokens_and_of_offsets_or_places(name: str, axes: int) -> None:
    places = _places(axes)
    weights = weights_of(ABILITIES[name], places)
    sums = weights.sum(dim=1)
    assert bool(((sums - 1).abs() < 1e-12).logical_or(sums == 0).all())
    assert bool((sums > 0).any())
    assert weights.min() >= 0
    assert weights.std() > 0  # not uniform attention
    if ABILITIES[name].of == "offset":
        assert bool((weights.diagonal() == 0).all())
        asked = weights > 0
        steps = [tuple(step) for step in (places - places.unsqueeze(1)).long().view(-1, axes).tolist()]
        by_offset: dict[tuple[int, ...], set[bool]] = {}
        for step, one in zip(steps, asked.flatten().tolist(), strict=True):
            by_offset.setdefault(step, set()).add(one)
        assert all(len(values) == 1 for values in by_offset.values())


def test_weights_of_abilities_differ() -> None:
    weights = {name: weights_of(each, _places(2)) for name, each in ABILITIES.items() if not each.marked}
    for one, other in itertools.combinations(weights, 2):
        assert not torch.allclose(weights[one], weights[other]), (one, other)


def test_nearest_marked_token_is_another_one_and_ties_share() -> None:
    places = grid(4, dtype=torch.float64)
    weights = nearest_weights(torch.tensor([[True, False, True, False]]), places)[0]
    torch.testing.assert_close(weights[1], torch.tensor([0.5, 0.0, 0.5, 0.0], dtype=torch.float64))
    torch.testing.assert_close(weights[0], torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64))
    assert nearest_weights(torch.zeros(1, 4, dtype=torch.bool), places).sum() == 0


@pytest.mark.parametrize("name", ["far", "ring", "place", "nearest"])
def test_score_is_1_for_the_optimum_and_0_for_uniform_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ability, probe = ABILITIES[name], Probe("none", (8, 8), 8, 1)

    def optimum(symbols: torch.Tensor, sizes: object, places: torch.Tensor) -> torch.Tensor:
        shown = torch.nn.functional.one_hot(symbols % layer.SYMBOLS, layer.SYMBOLS).double()
        if not ability.marked:
            return weights_of(ability, places.double()) @ shown
        return nearest_weights(symbols >= layer.SYMBOLS, places.double()) @ shown

    def uniform(symbols: torch.Tensor, sizes: object, places: torch.Tensor) -> torch.Tensor:
        shown = torch.nn.functional.one_hot(symbols % layer.SYMBOLS, layer.SYMBOLS).double()
        return shown.mean(dim=1, keepdim=True).expand_as(shown)

    monkeypatch.setattr(probe, "forward", optimum)
    assert score(probe, ability, TRAINED, 8) == pytest.approx(1, abs=1e-9)
    monkeypatch.setattr(probe, "forward", uniform)
    assert score(probe, ability, TRAINED, 8) == pytest.approx(0, abs=1e-9)


def test_relative_encodings_do_not_feel_a_shift_and_tables_cannot_be_shifted() -> None:
    config = ProbesConfig(steps=20, batch_size=8)
    shifted = next(each for each in CONDITIONS if each.name == "shifted")
    for encoding in ("mixed", "comrope-ld"):
        probe = train_probe(encoding, ABILITIES["far"], config, 16, 0)
        there, here = score(probe, ABILITIES["far"], shifted, 16), score(probe, ABILITIES["far"], TRAINED, 16)
        assert there == pytest.approx(here, abs=1e-4), encoding
    assert score(Probe("learned", (8, 8), 16, 2), ABILITIES["far"], shifted, 4) is None


def test_one_seed_draws_the_same_lattices_for_every_encoding_and_repeats() -> None:
    config, ability = ProbesConfig(steps=3, batch_size=4), ABILITIES["next"]
    state = torch.random.get_rng_state()
    first, again = (train_probe("mixed", ability, config, 16, 1) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_frozen_keeps_the_parameters_of_the_encoding() -> None:
    config = ProbesConfig(steps=3, batch_size=4, frozen=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = Probe("mixed", config.sizes, 16, config.num_heads)
    trained = train_probe("mixed", ABILITIES["next"], config, 16, 0)
    for one, other in zip(start.encoding_parameters(), trained.encoding_parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(start.head.weight, trained.head.weight)


def test_scaled_frequencies_leave_the_probe_as_it_is() -> None:
    probe = train_probe("axial", ABILITIES["next"], ProbesConfig(steps=2, batch_size=2), 16, 0)
    before = {name: value.clone() for name, value in probe.state_dict().items()}
    assert score(probe, ABILITIES["next"], Condition("", "", factor=2, method="yarn"), 4) is not None
    assert all(torch.equal(value, before[name]) for name, value in probe.state_dict().items())


def test_predictions_name_abilities_and_encodings_once() -> None:
    from torchrope_lab.encodings import resolve_encoding

    file = yaml.safe_load((Path(layer.__file__).parent / "predictions.yaml").read_text())
    encodings = [name for family in file["families"] for name in family["encodings"]]
    assert len(set(encodings)) == len(encodings)
    for name in encodings:
        resolve_encoding(name)
    for family in file["families"]:
        named = [*family["can"], *family["cannot"]]
        assert len(set(named)) == len(named)
        assert set(named) <= {*ABILITIES}
        assert family["because"]


def test_study_writes_a_report_and_resumes(tmp_path: Path, run: Run) -> None:
    command = [*PROBES, "--encodings", "none,axial,mixed,bias", "--out", tmp_path]
    assert "24 of 24" in run(*command, "--dry-run")[1]
    assert run(*command)[0] == 0
    result = json.loads((tmp_path / "probes.json").read_text())
    assert {"matrix", "masks"} <= {figure["name"] for figure in result["findings"]["figures"]}
    assert result["run"]["config"]["probes"]["steps"] == 3
    files = {path: path.read_text() for path in (tmp_path / "probes").iterdir()}
    assert len(files) == 24
    assert run(*PROBES, "--encodings", "mixed,string", "--out", tmp_path)[0] == 0
    assert all(path.read_text() == text for path, text in files.items())
    assert len(list((tmp_path / "probes").iterdir())) == 30
    assert "0 of 24" in run(*command, "--dry-run")[1]


@pytest.mark.slow
def test_diverged_probe_leaves_its_encoding_out(tmp_path: Path, run: Run) -> None:
    command = [*PROBES, "--encodings", "axial,mixed,bias", "--out", tmp_path]
    assert run(*command)[0] == 0
    files = {path: json.loads(path.read_text()) for path in (tmp_path / "probes").iterdir()}
    [(path, content)] = [
        (path, each) for path, each in files.items() if (each["encoding"], each["ability"]) == ("mixed", "ring")
    ]
    path.write_text(json.dumps(content | {"scores": content["scores"] | {"trained": float("nan")}}))
    assert run(*command)[0] == 0
    result = json.loads((tmp_path / "probes.json").read_text())
    assert {row["name"] for row in result["findings"]["tables"][0]["rows"]} == {"axial", "bias"}
    assert any("is left out: its training diverged (ring, seed 0)" in reason for reason in result["left_out"])
    for path, content in files.items():
        path.write_text(json.dumps(content | {"scores": content["scores"] | {"trained": float("-inf")}}))
    status, _, error = run(*command)
    assert status == 2
    assert "none of the encodings can be probed: " in error


def test_leads_are_paired_by_seed_and_have_simultaneous_intervals() -> None:
    drawn = np.random.default_rng(0).random((2, 2, 5))
    measured = {
        Job(name, ability, 32, seed): {"scores": {"trained": drawn[i, j, seed]}}
        for i, name in enumerate(("mixed", "axial"))
        for j, ability in enumerate(("far", "ring"))
        for seed in range(5)
    }
    found = scores_of(measured, 32).changes({Cell("mixed", at): Cell("axial", at) for at in ("far", "ring")})
    for j, lead in enumerate(found.values()):
        alone = drawn_mean(100 * (drawn[0, j] - drawn[1, j])[:, None]).interval()
        assert lead.estimate == pytest.approx(alone.estimate)
        assert lead.low < alone.low < alone.high < lead.high


@pytest.mark.parametrize("axes", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_other_numbers_of_axes_have_the_abilities_they_allow(tmp_path: Path, axes: int, run: Run) -> None:
    assert run(*PROBES, "--probes.axes", axes, "--encodings", "axial", "--out", tmp_path)[0] == 0
    [table, *_] = json.loads((tmp_path / "probes.json").read_text())["findings"]["tables"]
    assert ("diagonal" in table["rows"][0]) == (axes > 1)
    assert "far" in table["rows"][0]
