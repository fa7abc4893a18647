"""Studies over a grid of trainings: which runs they ask for, and that what they say follows from the numbers."""

import json
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from torchrope.data.config import DataConfig
from torchrope.studies.lab.config import StudyConfig
from torchrope.studies.lab.estimates import contrast, first_reach, resamples, trend
from torchrope.studies.lab.grid import tell_trends, train_grid, trends
from torchrope.studies.lab.results import Findings, Table
from torchrope.studies.lab.runs import Run, Trained
from torchrope.studies.lab.study import Lab, find_study
from torchrope.training.config import ModelConfig, OptimConfig

QUIET = Console(file=StringIO())
EXAMPLES = 200
Hits = Callable[[Run], float]


class FakeLab(Lab):
    """Asks for runs as the lab does; what they get right is told by a function of the run."""

    def __init__(self, hits: Hits, encodings: Sequence[str] = (), **settings: object) -> None:
        given = {
            "data": DataConfig(train_size=100, val_size=20),
            "model": ModelConfig(dim=32, depth=1, num_heads=2, mlp_dim=8, patch_size=[4], pool="mean"),
            "optim": OptimConfig(epochs=8, warmup_epochs=1),
            "out": "nowhere",
        }
        super().__init__(StudyConfig(**{**given, **settings}), encodings, QUIET)
        self.hits = hits
        self.asked: list[Run] = []

    def train(self, runs: Sequence[Run]) -> list[Trained]:
        self.asked += runs
        return [faked(run, self.hits(run)) for run in runs]


def faked(run: Run, share: float) -> Trained:
    """Right on the first so many examples; its curve rises evenly to there, a second an epoch."""
    right = (np.arange(EXAMPLES) < round(share * EXAMPLES)).astype(int).tolist()
    epochs = run.config.optim.epochs
    curve = [{"epoch": e, "val_top1": share * e / epochs, "seconds": 1.0} for e in range(1, epochs + 1)]
    return Trained(run, Path("nowhere"), [1] * EXAMPLES, right, 1.0, curve, float(epochs))


def found(name: str, hits: Hits, encodings: Sequence[str] = (), **settings: object) -> tuple[Findings, FakeLab]:
    study = find_study(name)
    lab = FakeLab(hits, encodings or study.encodings, **settings)
    findings = study.find(lab)
    assert findings.plain() == json.loads(json.dumps(findings.plain(), allow_nan=False))
    return findings, lab


def shared_with_accuracy(lab: FakeLab) -> list[str]:
    """Encodings of the runs that accuracy asks for too."""
    return [run.encoding for run in lab.asked if run.key == lab.run(run.encoding, run.seed).key]


def by(table: Table, *keys: str) -> dict:
    return {tuple(row[key] for key in keys): row for row in table.rows}


def titled(findings: Findings, start: str) -> Table:
    return next(table for table in findings.tables if table.title.startswith(start))


def test_a_trend_is_the_slope_of_a_line_through_the_means() -> None:
    random = np.random.default_rng(0)
    x = [1.0, 2.0, 4.0, 5.0]
    rights = [random.random((2, 300)) < 0.5 + 0.08 * at for at in x]
    value, low, high = trend(x, rights)
    assert value == pytest.approx(100 * np.polyfit(x, [right.mean() for right in rights], 1)[0])
    assert low < value < high
    assert low > 0
    assert high < 16


def test_curves_reach_a_target_between_points() -> None:
    x = np.array([1.0, 2.0, 4.0])
    curves = np.array([[0.2, 0.4, 0.8], [0.2, 0.1, 0.8], [0.6, 0.7, 0.8], [0.1, 0.2, 0.3], [0.5, 0.5, 0.5]])
    reached = first_reach(x, curves, np.array([0.6, 0.2, 0.5, 0.5, 0.5]))
    assert reached == pytest.approx([3.0, 1.0, 1.0, np.inf, 1.0])


def test_a_resample_draws_as_many_examples_as_there_are() -> None:
    shares = resamples(50, draws=300)
    assert shares.sum(axis=1) == pytest.approx(np.ones(300))
    right = np.arange(50) < 20
    assert (shares @ right).std() == pytest.approx(np.sqrt(0.4 * 0.6 / 50), rel=0.2)


def test_a_contrast_that_seeds_explain_is_none() -> None:
    def hits(*shares: float) -> np.ndarray:
        return np.stack([np.arange(100) < 100 * share for share in shares]).astype(float)

    assert contrast(hits(0.9), hits(0.8)).verdict == "better"
    assert contrast(hits(0.8), hits(0.9)).verdict == "worse"
    assert contrast(hits(0.9), hits(0.9)).verdict == "tied"
    assert contrast(hits(1.0, 0.8), hits(0.9, 0.7)).verdict == "tied"
    assert str(contrast(hits(0.9), hits(0.9))) == "0.0 points [0.0, 0.0]"


def test_cells_that_cannot_be_are_left_out_and_told() -> None:
    lab = FakeLab(lambda run: 0.5)
    cells, notes = train_grid(lab, {"liere": {b: [lab.run(f"liere:{b}")] for b in (2, 3, 16)}})
    assert list(cells["liere"]) == [2, 16]
    assert len(notes) == 1
    assert notes[0].startswith("Left out: liere:3")
    with pytest.raises(ValueError, match="block_size"):
        train_grid(lab, {"liere": {3: [lab.run("liere:3")]}})


def test_trends_are_told_with_their_intervals() -> None:
    lab = FakeLab(lambda run: 0.5 + 0.1 * np.log2(run.config.data.train_size / 25) * (run.encoding == "mixed"))
    plan = {
        name: {size: [lab.run(name, data={"train_size": size})] for size in (25, 50, 100)}
        for name in ("mixed", "axial")
    }
    rows = trends(train_grid(lab, plan)[0])
    assert [row["verdict"] for row in rows] == ["rises", "flat"]
    assert rows[0]["trend"] == pytest.approx(10)
    text = tell_trends(rows, "the data")
    assert text.startswith("A doubling of the data adds 10.0 points [")
    assert text.endswith("it makes no measurable difference for axial (+0.0 points [0.0, 0.0]).")
    assert "changes nothing for axial" in tell_trends(rows[1:], "the data")


class TestDataEfficiency:
    @staticmethod
    def hits(run: Run) -> float:
        share = (run.config.data.train_size or 100) / 100
        return {"learned": 0.5 * share + 0.2, "mixed": 0.9, "axial": 0.1}[run.encoding]

    def test_parts_of_the_data_are_trained_on_and_all_of_it_is_shared(self) -> None:
        findings, lab = found("data-efficiency", self.hits, ["mixed", "axial"])
        assert shared_with_accuracy(lab) == ["learned", "mixed", "axial"]
        sizes = {run.config.data.train_size for run in lab.asked}
        assert sizes == {30, 50, 70, 90, 100}
        assert len(titled(findings, "Top-1").rows) == 15

    def test_data_needed_is_where_the_curve_crosses(self) -> None:
        findings, _ = found("data-efficiency", self.hits, ["mixed", "axial"])
        needed = by(titled(findings, "Data needed"), "name")
        assert needed[("mixed",)]["needs"] == 30
        assert needed[("mixed",)]["verdict"] == "needs less"
        assert needed[("axial",)]["needs"] is None
        assert needed[("axial",)]["verdict"] == "does not reach it"
        assert "With 30 % of the training data mixed does best with 90.0 % [" in findings.answer
        assert "mixed 30 % [30, 30] of the data are enough" in findings.answer
        assert "For axial no saving of data can be told" in findings.answer

    def test_a_lead_that_shrinks_with_data_is_told(self) -> None:
        findings, _ = found("data-efficiency", self.hits, ["mixed"])
        leads = by(titled(findings, "Ahead"), "name", "share")
        assert leads[("mixed", 30)]["lead"] == pytest.approx(55)
        assert leads[("mixed", 100)]["lead"] == pytest.approx(20)
        assert "changes for mixed (+" in findings.answer

    def test_parts_without_every_class_are_left_out(self) -> None:
        small = DataConfig(train_size=15, val_size=20)
        findings, lab = found("data-efficiency", lambda run: 0.5, ["mixed"], data=small)
        assert {run.config.data.train_size for run in lab.asked} == {10, 14, 15}
        assert any("Left out: 30 % and 50 %" in note for note in findings.notes)
        assert "With 70 % of the training data" in findings.answer


class TestTrainingEfficiency:
    @staticmethod
    def hits(run: Run) -> float:
        return {"learned": 0.4, "mixed": 0.8, "axial": 0.3, "string": 0.41}[run.encoding]

    def test_epochs_steps_and_seconds_are_read_from_the_curves(self) -> None:
        findings, lab = found("training-efficiency", self.hits, ["mixed", "axial"])
        assert shared_with_accuracy(lab) == ["learned", "mixed", "axial"]
        rows = by(findings.tables[0], "name")
        mixed = rows[("mixed",)]
        assert mixed["epochs"] == pytest.approx(4)  # half as high, half as soon
        assert mixed["steps"] == pytest.approx(8)  # 100 examples in batches of 64
        assert mixed["seconds"] == pytest.approx(4)
        assert mixed["factor"] == mixed["time_factor"] == mixed["sooner"] == pytest.approx(2)
        assert 1.5 < mixed["sooner_low"] < 2 < mixed["sooner_high"] < 2.5
        assert rows[("learned",)]["epochs"] == 8
        assert rows[("axial",)]["epochs"] is None
        assert "mixed after 4.0 [" in findings.answer
        assert "Not there by the end: axial." in findings.answer
        assert list(findings.advice[0].encodings) == ["mixed"]

    def test_what_examples_can_explain_is_not_told_as_sooner(self) -> None:
        findings, _ = found("training-efficiency", self.hits, ["string"])
        [_, row] = findings.tables[0].rows
        assert row["sooner"] > 1
        assert "No encoding is measurably sooner" in findings.answer
        assert not findings.advice

    def test_seeds_that_differ_widen_the_interval(self) -> None:
        def hits(run: Run) -> float:
            return 0.4 if run.encoding == "learned" else (0.5, 0.9)[run.seed]

        def mean_hits(run: Run) -> float:
            return 0.4 if run.encoding == "learned" else 0.7

        [_, alone] = found("training-efficiency", mean_hits, ["mixed"])[0].tables[0].rows
        [_, both] = found("training-efficiency", hits, ["mixed"], seeds=2)[0].tables[0].rows
        assert both["epochs"] == pytest.approx(alone["epochs"])
        assert both["epochs_high"] - both["epochs_low"] > 2 * (alone["epochs_high"] - alone["epochs_low"])

    def test_a_learned_curve_that_peaks_early_takes_the_papers_factor_apart(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flat(run: Run, share: float) -> Trained:
            trained = faked(run, share)
            trained.curve = [{**row, "val_top1": share * min(1.0, row["epoch"] / 2)} for row in trained.curve]
            return trained

        lab = FakeLab(lambda run: 0.4, ["mixed"])
        monkeypatch.setattr(lab, "train", lambda runs: [flat(run, 0.4) for run in runs])
        row = find_study("training-efficiency").find(lab).tables[0].rows[1]
        assert row["factor"] == pytest.approx(4)
        assert row["sooner"] == pytest.approx(1)
