"""Studies over a grid of runs: the runs they plan, and findings computed from known predictions."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import labs
import numpy as np
import pytest

from torchrope_lab.conclusion import Interval
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.estimates import (
    NOT_COMPARED,
    contrasts,
    drawn_mean,
    ends,
    first_reach,
    rank,
    trend,
    verdict,
    verdict_of,
)
from torchrope_lab.engine.grid import Factor, Results, slopes, train_cells
from torchrope_lab.engine.long_table import Cell, RightOrWrong, change_sentence, row_of
from torchrope_lab.engine.reference import mixed_counterparts
from torchrope_lab.engine.runs import Run, Trained
from torchrope_lab.engine.study import Lab, find_study
from torchrope_lab.results import Findings, Table
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig
from torchrope_lab.statistics import conclude

EXAMPLES = 200
Told = Callable[[Run], float | Trained]


class FakeLab(Lab):
    """Asks for runs as the lab does; a function of the run tells how much it gets right, or all that it has learned."""

    def __init__(self, told: Told, encodings: Sequence[str] = (), **changes: object) -> None:
        given = {
            "data": data_config(train_size=100, val_size=20),
            "model": ModelConfig(dim=32, depth=1, num_heads=2, mlp_dim=8, patch_size=[4], pool="mean"),
            "optim": OptimConfig(epochs=8, warmup_epochs=1),
        }
        super().__init__(labs.settings(Path("nowhere"), **{**given, **changes}), encodings, labs.QUIET)
        self.told = told
        self.asked: list[Run] = []

    def train(self, runs: Sequence[Run], *_: object, **__: object) -> list[Trained]:
        self.asked += runs
        told = [(run, self.told(run)) for run in runs]
        return [answer if isinstance(answer, Trained) else faked(run, answer) for run, answer in told]


def faked(run: Run, share: float) -> Trained:
    """Right on the first so many examples; its curve rises evenly to there, a second an epoch."""
    labels = np.arange(EXAMPLES) % 10
    predicted = np.where(np.arange(EXAMPLES) < round(share * EXAMPLES), labels, labels + 1)
    epochs = run.config.optim.epochs
    curve = [{"epoch": e, "val_top1": share * e / epochs, "seconds": 1.0} for e in range(1, epochs + 1)]
    return Trained(run, Path("nowhere"), labels.tolist(), predicted.tolist(), 1.0, curve, float(epochs))


def found(name: str, told: Told, encodings: Sequence[str] = (), **settings: object) -> tuple[Findings, FakeLab]:
    study = find_study(name)
    lab = FakeLab(told, encodings or study.encodings, **settings)
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


def test_trend_is_the_slope_of_a_line_through_the_means() -> None:
    random = np.random.default_rng(0)
    x = [1.0, 2.0, 4.0, 5.0]
    rights = [random.random((1, 600)) < 0.5 + 0.08 * at for at in x]
    value, low, high = trend(x, rights).interval()
    assert value == pytest.approx(100 * np.polyfit(x, [right.mean() for right in rights], 1)[0])
    assert low < value < high
    assert low > 0
    assert high < 16


def test_curves_reach_a_target_between_points() -> None:
    x = np.array([1.0, 2.0, 4.0])
    curves = np.array([[0.2, 0.4, 0.8], [0.2, 0.1, 0.8], [0.6, 0.7, 0.8], [0.1, 0.2, 0.3], [0.5, 0.5, 0.5]])
    reached = first_reach(x, curves, np.array([0.5, 0.2, 0.5, 0.5, 0.5]))
    assert reached == pytest.approx([2.5, 1.0, 1.0, np.inf, 1.0])


def hits(*shares: float) -> np.ndarray:
    """Right on the first so many of 100 examples, with each seed."""
    return np.stack([np.arange(100) < 100 * share for share in shares]).astype(float)


def test_contrast_that_seeds_explain_is_none() -> None:
    def found(one: np.ndarray, other: np.ndarray) -> str:
        return verdict_of(contrasts({"": (one, other)})[""])

    assert found(hits(0.9), hits(0.8)) == "better"
    assert found(hits(0.8), hits(0.9)) == "worse"
    assert found(hits(0.9), hits(0.9)) == "not significant"
    assert found(hits(1.0, 0.8), hits(0.8, 0.8)) == "not significant"
    assert contrasts({}) == {}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ((5.1, 0.1, 9.0), "better"),
        ((-5.1, -9.0, -0.1), "worse"),
        ((5.1, 0.0, 9.0), "not significant"),
        ((-5.1, -9.0, 0.0), "not significant"),
        ((float("nan"), float("nan"), float("nan")), "not significant"),
    ],
)
def test_intervals_that_reach_zero_are_ties(found: tuple[float, float, float], verdict: str) -> None:
    assert verdict_of(Interval(*found)) == verdict


def test_top1_is_in_percent_over_seeds_and_examples() -> None:
    two, one = Cell("two"), Cell("one")
    top1 = RightOrWrong({two: np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]), one: np.ones((1, 3))})
    assert top1.interval(two).estimate == pytest.approx(50)
    assert top1.spread(two) == pytest.approx(100 * (0.5**2 / 2) ** 0.5)  # of 75 and 25
    assert row_of(top1.columns, one) == {
        "top1": 100.0,
        "low": pytest.approx(100 * 3 / (3 + 1.959964**2)),  # Wilson's interval of 3 of 3
        "high": 100.0,
        "spread": None,
    }


def test_ends_leave_two_and_a_half_percent_on_either_side() -> None:
    assert ends(np.random.default_rng(0).permutation(np.arange(1, 1001))) == (25.0, 975.0)
    assert ends(np.array([1.0] * 960 + [np.inf] * 40)) == (1.0, np.inf)


def test_single_encoding_has_no_verdict() -> None:
    assert rank({"mixed": drawn_mean(hits(0.9))}) == {"mixed": NOT_COMPARED}
    for chance in (0.1, 0.99):
        assert verdict(conclude({"mixed": hits(0.9)}, chance=chance), "mixed") == NOT_COMPARED


def test_cells_that_cannot_be_are_left_out_with_the_reason() -> None:
    lab = FakeLab(lambda run: 0.5)
    trained = train_cells(lab, {Cell("liere", b): [lab.run(f"liere:{b}")] for b in (2, 3, 16)})
    assert list(trained) == [Cell("liere", 2), Cell("liere", 16)]
    [reason] = lab.left_out
    assert reason.startswith("At 3: liere:3 is left out")
    with pytest.raises(ValueError, match="block_size"):
        train_cells(lab, {Cell("liere", 3): [lab.run("liere:3")]})
    with pytest.raises(ValueError, match="did you mean 'mixed'"):
        train_cells(lab, {Cell("mixt", 1): [lab.run("mixt")], Cell("mixed", 2): [lab.run("mixed")]})


def test_trends_have_intervals_and_seeds_widen_them() -> None:
    def share(run: Run) -> float:
        doublings = np.log2(run.config.data.train_size / 25) * (run.encoding == "mixed")
        return 0.5 + (0.1 + 0.05 * (2 * (run.seed % 2) - 1)) * doublings

    lab = FakeLab(share)

    def of_seeds(seeds: int) -> dict[str, Interval]:
        plan = {
            Cell(name, size): [lab.run(name, seed, data={"train_size": size}) for seed in range(seeds)]
            for name in ("mixed", "axial")
            for size in (25, 50)
        }
        found = slopes(Results(lab, train_cells(lab, plan), Factor("size", "Size")))
        return {cell.arm: slope for cell, slope in found.items()}

    one, two = of_seeds(1), of_seeds(2)
    assert one["mixed"].low > 0
    assert one["axial"] == (0, 0, 0)
    assert two["mixed"].estimate == pytest.approx(10)
    assert two["mixed"].low < 0  # 5 and 15 points: two seeds do not show a slope


def test_sentence_counts_significant_changes_and_names_the_largest() -> None:
    moved = {Cell("a"): Interval(9, 5, 13), Cell("b"): Interval(-12, -20, -4), Cell("c"): Interval(30, -1, 61)}
    said = change_sentence("sharing", "accuracy", moved, seeds=3)
    assert said == (
        "Sharing significantly raises accuracy in 1 of 3 cases and lowers it in 1; "
        "the largest change is −12.0 points [−20.0, −4.0], with b. With 3 seeds, this is provisional."
    )
    unclear = change_sentence("sharing", "accuracy", {Cell("c"): moved[Cell("c")]}, seeds=1)
    assert unclear.startswith("This run cannot tell whether sharing changes accuracy")
    assert "one training each" in unclear


class TestDataEfficiency:
    @staticmethod
    def hits(run: Run) -> float:
        share = (run.config.data.train_size or 100) / 100
        return {"learned": 0.5 * share + 0.2, "mixed": 0.9, "axial": 0.1}[run.encoding]

    def test_parts_of_the_data_are_trained_on_and_all_of_it_is_shared(self) -> None:
        findings, lab = found("data-efficiency", self.hits, ["mixed", "axial"])
        assert shared_with_accuracy(lab) == ["learned", "mixed", "axial"]
        sizes = {run.config.data.train_size for run in lab.asked}
        assert sizes == {30, 40, 50, 60, 70, 80, 90, 100}
        assert len(titled(findings, "Top-1").rows) == 24

    def test_data_needed_is_where_the_curve_crosses(self) -> None:
        findings, _ = found("data-efficiency", self.hits, ["mixed", "axial"])
        needed = by(titled(findings, "Data needed"), "name")
        assert needed[("mixed",)]["needs"] == 30
        assert needed[("mixed",)]["verdict"] == "needs less"
        assert needed[("axial",)]["needs"] is None
        assert needed[("axial",)]["verdict"] == "does not reach it"
        assert findings.answer.startswith("1 of 2 encodings significantly reach the final accuracy of a learned")
        assert "with less data than it does, mixed by a factor of 3.3 [" in findings.answer
        assert needed[("learned",)]["verdict"] == "the reference"

    def test_encodings_that_need_no_less_than_the_reference_itself_cannot_be_told(self) -> None:
        """All are right on all examples, or on as many as always the same class, with any share of the data."""
        findings, _ = found("data-efficiency", lambda run: 1.0, ["mixed", "axial"])
        assert {row["verdict"] for row in titled(findings, "Data needed").rows} == {"the reference", "not significant"}
        assert findings.answer.startswith("This run cannot tell")
        findings, _ = found("data-efficiency", lambda run: 0.1, ["mixed", "axial"])
        assert "learned, is not significantly better than always predicting" in findings.answer

    @pytest.mark.slow
    def test_encoding_equal_to_the_reference_seldom_needs_less(self) -> None:
        """With three seeds and the model of docs/statistics.md, on a learning curve that rises."""
        random = np.random.default_rng(0)

        def verdict(lead: float, examples: int = 4000) -> str:
            easy = random.standard_normal(examples) * 0.75**0.5
            shared: dict[str, np.ndarray] = {}

            def simulated(run: Run) -> Trained:
                share = (run.config.data.train_size or 100) / 100
                level = share + 0.05 * random.standard_normal() + lead * (run.encoding == "axial")
                own = shared.setdefault(run.encoding, random.standard_normal(examples) * 0.05**0.5)
                right = easy + own + random.standard_normal(examples) * 0.2**0.5 < level - 0.5
                labels = np.arange(examples) % 10
                predicted = np.where(right, labels, labels + 1)
                return replace(faked(run, 0.5), labels=labels.tolist(), predicted=predicted.tolist())

            findings, _ = found("data-efficiency", simulated, ["axial"], seeds=3)
            return str(by(titled(findings, "Data needed"), "name")[("axial",)]["verdict"])

        assert [verdict(lead=0.0) for _ in range(25)].count("needs less") <= 1
        assert [verdict(lead=0.5) for _ in range(4)] == ["needs less"] * 4

    def test_full_data_size_is_the_run_without_a_size(self) -> None:
        _, lab = found("data-efficiency", lambda run: 0.5, ["mixed"], data=data_config(val_size=20))
        assert shared_with_accuracy(lab) == ["learned", "mixed"]

    def test_best_epoch_is_beside_the_last(self) -> None:
        def falling(run: Run) -> Trained:
            trained = faked(run, self.hits(run))
            peak = 0.6 + 0.1 * run.seed
            trained.curve = [{**row, "val_top1": peak if row["epoch"] == 2 else 0.5} for row in trained.curve]
            return trained

        findings, lab = found("data-efficiency", falling, ["mixed", "axial"])
        row = by(titled(findings, "Top-1"), "name", "share")[("mixed", 100)]
        assert row["top1"] == pytest.approx(90)
        assert row["best_epoch"] == pytest.approx(100 * (0.6 + 0.1 * np.mean(lab.seeds)))

    def test_lead_that_shrinks_with_data_rises_with_halvings(self) -> None:
        findings, _ = found("data-efficiency", self.hits, ["mixed"])
        leads = by(titled(findings, "Ahead"), "name", "share")
        assert leads[("mixed", 30)]["change"] == pytest.approx(55)
        assert leads[("mixed", 100)]["change"] == pytest.approx(20)
        [slope] = titled(findings, "Slope of the lead").rows
        assert slope["verdict"] == "rises"

    def test_parts_without_every_class_are_left_out(self) -> None:
        small = data_config(train_size=15, val_size=20)
        _, lab = found("data-efficiency", lambda run: 0.5, ["mixed"], data=small)
        assert {run.config.data.train_size for run in lab.asked} == {10, 12, 14, 15}
        assert any("Left out: 30 %, 40 %, 50 % and 60 %" in reason for reason in lab.left_out)


class TestTrainingEfficiency:
    @staticmethod
    def hits(run: Run) -> float:
        return {"learned": 0.4, "mixed": 0.8, "axial": 0.3, "string": 0.41}[run.encoding]

    def test_epochs_and_seconds_are_read_from_the_curves(self) -> None:
        findings, lab = found("training-efficiency", self.hits, ["mixed", "axial"])
        assert shared_with_accuracy(lab) == ["learned", "mixed", "axial"]
        rows = by(findings.tables[0], "name")
        mixed = rows[("mixed",)]
        assert mixed["epochs"] == pytest.approx(4)  # half as high, half as soon
        assert mixed["seconds"] == pytest.approx(4)
        assert mixed["factor"] == mixed["sooner"] == pytest.approx(2)
        assert 1.5 < mixed["sooner_low"] < 2 < mixed["sooner_high"] < 2.5
        assert rows[("learned",)]["epochs"] == 8
        assert rows[("axial",)]["epochs"] is None
        assert rows[("axial",)]["verdict"] == "does not reach it"
        assert findings.answer.startswith("1 of 2 encodings significantly reach")
        assert "mixed by a factor of 2.0 [" in findings.answer

    def test_differences_explained_by_examples_are_not_sooner(self) -> None:
        findings, _ = found("training-efficiency", self.hits, ["string"])
        [_, row] = findings.tables[0].rows
        assert row["sooner"] > 1
        assert findings.answer.startswith("This run cannot tell")

    def test_seeds_that_differ_widen_the_interval(self) -> None:
        def hits(run: Run) -> float:
            return 0.4 if run.encoding == "learned" else (0.5, 0.9)[run.seed]

        def mean_hits(run: Run) -> float:
            return 0.4 if run.encoding == "learned" else 0.7

        [_, alone] = found("training-efficiency", mean_hits, ["mixed"])[0].tables[0].rows
        [_, both] = found("training-efficiency", hits, ["mixed"], seeds=2)[0].tables[0].rows
        assert both["epochs"] == pytest.approx(alone["epochs"])
        assert both["epochs_high"] - both["epochs_low"] > 2 * (alone["epochs_high"] - alone["epochs_low"])

    def test_learned_curve_that_peaks_early_takes_the_papers_factor_apart(self) -> None:
        def flat(run: Run) -> Trained:
            trained = faked(run, 0.4)
            trained.curve = [{**row, "val_top1": 0.4 * min(1.0, row["epoch"] / 2)} for row in trained.curve]
            return trained

        [_, row] = found("training-efficiency", flat, ["mixed"])[0].tables[0].rows
        assert row["factor"] == pytest.approx(4)
        assert row["sooner"] == pytest.approx(1)


class TestCapacity:
    @staticmethod
    def hits(run: Run) -> float:
        block = 16 if run.encoding == "liere" else int(run.encoding.rpartition(":")[2])
        return 0.4 + 0.1 * np.log2(block) * run.encoding.startswith("liere")

    def test_blocks_that_divide_a_head_are_trained_and_the_whole_head_is_shared(self) -> None:
        findings, lab = found("capacity", self.hits)
        asked = [run.encoding for run in lab.asked]
        assert asked[:4] == ["liere:2", "liere:4", "liere:8", "liere"]
        assert asked[4:] == [f"comrope-ld:{b}" for b in (2, 4, 8, 16)]
        assert set(shared_with_accuracy(lab)) == set(asked)
        parameters = by(titled(findings, "Learned parameters"), "name", "block_size")
        for block in (2, 4, 8, 16):  # one layer, two heads of 16, two axes
            assert parameters[("liere", block)]["parameters"] == 2 * 2 * 16 * (block - 1) / 2
        assert any("blocks of 32, 48 and 64, which are larger" in reason for reason in lab.left_out)

    def test_slopes_are_per_doubling(self) -> None:
        findings, _ = found("capacity", self.hits)
        slopes = by(titled(findings, "Slope"), "name")
        assert slopes[("liere",)]["trend"] == pytest.approx(10)
        assert slopes[("comrope-ld",)]["verdict"] == "not significant"
        assert "raises accuracy in 1 of 2 cases" in findings.answer
        assert "10.0 points [" in findings.answer
        against = by(titled(findings, "Against"), "name", "block_size")
        assert against[("liere", 16)]["change"] == pytest.approx(30)

    def test_heads_of_48_channels_have_blocks_of_48_and_of_no_32(self) -> None:
        model = ModelConfig(dim=48, depth=1, num_heads=1, mlp_dim=8, patch_size=[4])
        _, lab = found("capacity", lambda run: 0.5, ["liere", "mixed"], model=model)
        assert [run.encoding for run in lab.asked] == ["liere:2", "liere:4", "liere:8", "liere:16", "liere"]
        assert any("blocks of 32, which do not divide" in reason for reason in lab.left_out)
        assert any("mixed, which have no choice" in reason for reason in lab.left_out)

    def test_blocks_of_48_rotate_48_of_64_channels(self) -> None:
        model = ModelConfig(dim=64, depth=1, num_heads=1, mlp_dim=8, patch_size=[4])
        findings, lab = found("capacity", lambda run: 0.5, ["liere"], model=model)
        assert [run.encoding for run in lab.asked] == [*(f"liere:{b}" for b in (2, 4, 8, 16, 32, 48)), "liere"]
        assert [run.config.model.rotary_dim for run in lab.asked] == [None] * 5 + [48, None]
        parameters = by(titled(findings, "Learned parameters"), "name", "block_size")
        assert parameters[("liere", 48)]["parameters"] == 2 * 48 * 47 / 2  # two axes

    def test_three_axes(self) -> None:
        motion = data_config(name="motion", train_size=20, val_size=20)
        model = ModelConfig(dim=24, depth=1, num_heads=1, mlp_dim=8, patch_size=[1, 10, 10])
        _, lab = found("capacity", lambda run: 0.5, ["comrope-ap"], data=motion, model=model)
        assert [run.encoding for run in lab.asked] == ["comrope-ap:2", "comrope-ap:4", "comrope-ap:8"]
        assert any(reason.startswith("At 24: comrope-ap:24 is left out") for reason in lab.left_out)


class TestSharing:
    def test_runs_without_sharing_are_shared_with_accuracy(self) -> None:
        findings, lab = found("sharing", lambda run: 0.5)
        assert shared_with_accuracy(lab) == ["mixed", "liere:8", "liere"]
        assert len({run.key for run in lab.asked}) == 12
        assert findings.answer.startswith("This run cannot tell whether sharing")

    def test_shared_encodings_have_as_many_fewer_numbers(self) -> None:
        model = ModelConfig(dim=32, depth=3, num_heads=2, mlp_dim=8, patch_size=[4])
        findings, _ = found("sharing", lambda run: 0.5, ["mixed"], model=model)
        rows = by(titled(findings, "Learned parameters"), "shared")
        counts = [rows[(level,)]["parameters"] for level in ("nothing", "heads", "layers", "heads and layers")]
        assert counts == [counts[0], counts[0] / 2, counts[0] / 3, counts[0] / 6]

    def test_costs_and_gains_of_sharing_are_counted(self) -> None:
        def hits(run: Run) -> float:
            model = run.config.model
            return 0.5 - 0.2 * model.share_heads + (0.1 if run.encoding == "mixed" else 0) * model.share_layers

        findings, lab = found("sharing", hits, ["mixed", "liere:8", "axial", "learned", "bias"])
        rows = by(titled(findings, "Compared with"), "name", "shared")
        assert rows[("mixed", "heads")]["change"] == pytest.approx(-20)
        assert rows[("mixed", "heads and layers")]["change"] == pytest.approx(-10)
        assert rows[("liere:8", "layers")]["verdict"] == "not significant"
        assert "in 1 of 6 cases and lowers it in 4" in findings.answer
        assert "−20.0 points [" in findings.answer
        assert any("axial, learned and bias, which have no" in reason for reason in lab.left_out)


class TestModelSize:
    @staticmethod
    def hits(run: Run) -> float:
        width = run.config.model.dim or 64
        return 0.4 + (0.1 * np.log2(width / 16) if run.encoding == "mixed" else 0)

    @pytest.mark.parametrize(("heads", "wanted"), [(1, [1, 2, 4]), (3, [1, 2, 3]), (4, [1, 2, 4]), (12, [3, 6, 12])])
    def test_heads_keep_their_channels(self, heads: int, wanted: list[int]) -> None:
        model = ModelConfig(dim=16 * heads, depth=1, num_heads=heads, mlp_dim=24 * heads, patch_size=[4])
        _, lab = found("model-size", lambda run: 0.5, ["mixed"], model=model)
        models = [run.config.model for run in lab.asked if run.encoding == "mixed"]
        assert [each.num_heads for each in models] == wanted
        assert all(each.dim == 16 * each.num_heads and each.mlp_dim == 24 * each.num_heads for each in models)
        assert shared_with_accuracy(lab) == ["learned", "mixed"]

    @pytest.mark.slow
    def test_sizes_by_name_where_one_is_named(self) -> None:
        model = ModelConfig(size="base", patch_size=[4])
        findings, lab = found("model-size", lambda run: 0.5, ["mixed"], model=model)
        assert [run.config.model.size for run in lab.asked[:3]] == ["tiny", "base", "large"]
        assert shared_with_accuracy(lab) == ["learned", "mixed"]
        assert [row["width"] for row in titled(findings, "The models").rows] == [384, 768, 1024]

    def test_swin_is_scaled_in_all_stages(self) -> None:
        model = ModelConfig(backbone="swin", dim=32, depths=[1, 1], stage_heads=[2, 4], window_size=[2], patch_size=[2])
        _, lab = found("model-size", lambda run: 0.5, ["mixed"], model=model)
        asked = [(run.config.model.dim, run.config.model.stage_heads) for run in lab.asked[:3]]
        assert asked == [(32, [2, 4]), (64, [4, 8]), (128, [8, 16])]

    def test_leads_that_grow_with_the_width_rise(self) -> None:
        model = ModelConfig(dim=64, depth=1, num_heads=4, mlp_dim=8, patch_size=[4])
        findings, _ = found("model-size", self.hits, ["mixed", "axial"], model=model)
        lead = by(titled(findings, "Slope of the lead"), "name")
        assert lead[("mixed",)]["trend"] == pytest.approx(10)
        assert lead[("axial",)]["verdict"] == "not significant"
        verdicts = {row["verdict"] for row in titled(findings, "Top-1").rows if row["name"] == "mixed"}
        assert verdicts == {"not significantly different", "best (provisional)"}
        assert "raises the lead over a learned absolute encoding in 1 of 2 cases" in findings.answer


def texts(findings: Findings) -> str:
    """All that a study says itself, without what it quotes."""
    return json.dumps({**findings.plain(), "published": []}, ensure_ascii=False)


WITH_REFERENCE = ("accuracy", "data-efficiency", "training-efficiency", "model-size", "capacity")


class TestReference:
    @staticmethod
    def hits(run: Run) -> float:
        encoding = run.encoding.partition(":")[0]
        return {"learned": 0.4, "axial": 0.5, "mixed": 0.6, "liere": 0.7, "string": 0.55}.get(encoding, 0.5)

    @pytest.mark.parametrize("name", WITH_REFERENCE)
    def test_reference_is_trained_in_place_of_learned(self, name: str) -> None:
        findings, lab = found(name, self.hits, ["liere"], reference="axial")
        assert {run.encoding.partition(":")[0] for run in lab.asked} == {"liere", "axial"}
        assert "learned absolute" not in texts(findings)
        assert "Ahead of axial" in texts(findings) or name == "training-efficiency"

    @pytest.mark.parametrize("name", WITH_REFERENCE)
    def test_runs_are_the_same_with_any(self, name: str) -> None:
        _, with_axial = found(name, self.hits, ["axial", "mixed", "liere"], reference="axial")
        _, with_mixed = found(name, self.hits, ["axial", "mixed", "liere"], reference="mixed")
        keys = [{run.key for run in lab.asked} for lab in (with_axial, with_mixed)]
        own = {lab.run(lab.reference or "").key for lab in (with_axial, with_mixed)}
        assert keys[0] - own == keys[1] - own

    def test_reference_is_the_base_of_leads(self) -> None:
        def hits(run: Run) -> float:
            return self.hits(run) - (0.2 if run.encoding == "axial" and run.config.data.train_size != 100 else 0)

        findings, _ = found("data-efficiency", hits, ["learned", "liere"], reference="axial")
        leads = by(titled(findings, "Ahead of axial"), "name", "share")
        assert leads[("liere", 40)]["change"] == pytest.approx(40)
        assert leads[("learned", 100)]["change"] == pytest.approx(-10)
        assert findings.answer.startswith("1 of 2 encodings significantly reach the final accuracy of axial with less")
        assert "Ahead of axial" in {figure.title for figure in findings.figures}

    def test_reference_sets_the_target_of_times(self) -> None:
        findings, _ = found("training-efficiency", self.hits, ["learned", "liere"], reference="axial")
        rows = by(findings.tables[0], "name")
        assert rows[("axial",)]["verdict"] == "the reference"
        assert rows[("liere",)]["epochs"] == pytest.approx(8 * 0.5 / 0.7)
        assert rows[("learned",)]["verdict"] == "does not reach it"
        assert {row["name"] for row in findings.figures[0].rows} == {"axial", "learned", "liere", "end of axial"}

    def test_reference_is_compared_with_block_sizes(self) -> None:
        findings, lab = found("capacity", self.hits, ["liere"], reference="mixed")
        rows = by(titled(findings, "Ahead of mixed"), "name", "block_size")
        assert list(rows) == [("liere", size) for size in (2, 4, 8, 16)]
        assert rows[("liere", 8)]["change"] == pytest.approx(10)
        assert "mixed" in shared_with_accuracy(lab)
        one_of_them, _ = found("capacity", self.hits, ["liere"], reference="liere:8")
        assert ("liere", 8) not in by(titled(one_of_them, "Ahead of liere:8"), "name", "block_size")

    @pytest.mark.parametrize("name", WITH_REFERENCE)
    def test_reference_the_model_lacks_is_refused_before_training(self, name: str) -> None:
        lab = FakeLab(self.hits, ["mixed"], reference="liere:5")
        rule = "^--reference must be an encoding that the model supports, got liere:5: "
        with pytest.raises(ValueError, match=rule):
            find_study(name).find(lab)
        assert not lab.asked


class TestAgainstMixed:
    hits = staticmethod(TestReference.hits)

    def test_mixed_counterparts_share_the_other_parts(self) -> None:
        names = ["none", "axial", "mixed", "liere:8", "mixed+learned", "learned+string", "bias+liere", "comrope-ap:2"]
        counterparts = {"liere:8": "mixed", "learned+string": "mixed+learned", "comrope-ap:2": "mixed"}
        assert mixed_counterparts(names) == counterparts
        assert mixed_counterparts(["axial", "liere"]) == {}

    @pytest.mark.parametrize("name", ["accuracy", "data-efficiency", "model-size"])
    def test_differences_are_paired(self, name: str) -> None:
        findings, _ = found(name, self.hits, ["learned", "mixed", "liere", "string"])
        rows = titled(findings, "Ahead of RoPE-Mixed").rows
        changes = {(row["name"], round(row["change"]), row["verdict"]) for row in rows}
        assert changes == {("liere", 10, "better"), ("string", -5, "worse")}

    def test_times_are_compared_where_both_reach_the_end(self) -> None:
        findings, _ = found("training-efficiency", self.hits, ["mixed", "liere", "string"])
        rows = by(titled(findings, "Sooner than RoPE-Mixed"), "name")
        assert rows[("liere",)]["sooner"] == pytest.approx(0.7 / 0.6)
        assert rows[("liere",)]["verdict"] == "sooner"
        assert rows[("string",)]["verdict"] == "later"
        never, _ = found(
            "training-efficiency", lambda run: 0.3 if run.encoding == "mixed" else self.hits(run), ["mixed", "liere"]
        )
        assert not any(table.title.startswith("Sooner than RoPE-Mixed") for table in never.tables)

    def test_mixed_table_is_absent_without_mixed_or_if_reference(self) -> None:
        for settings in ({"encodings": ["liere"]}, {"encodings": ["mixed", "liere"], "reference": "mixed"}):
            findings, _ = found("accuracy", self.hits, **settings)
            assert not any(table.title == "Ahead of RoPE-Mixed" for table in findings.tables)


class TestTrainingLoss:
    def test_train_loss_is_of_the_last_epoch_over_seeds(self) -> None:
        def with_losses(run: Run) -> Trained:
            trained = faked(run, 0.5)
            last = float("nan") if run.encoding == "liere" else 1.0 + run.seed
            trained.curve = [{**row, "train_loss": 9.0} for row in trained.curve[:-1]]
            trained.curve.append({"epoch": 8, "val_top1": 0.5, "seconds": 1.0, "train_loss": last})
            return trained

        table = found("accuracy", with_losses, ["mixed", "liere"], seeds=2)[0].tables[0]
        rows = by(table, "name")
        assert rows[("mixed",)]["train_loss"] == pytest.approx(1.5)
        assert rows[("mixed",)]["train_spread"] == pytest.approx(0.5**0.5)
        assert rows[("liere",)]["train_loss"] is rows[("liere",)]["train_spread"] is None
        assert "augmented and regularised" in table.note


class TestPooling:
    def test_run_shared_with_accuracy_is_reused(self) -> None:
        findings, lab = found("pooling", lambda run: 0.4 + 0.3 * (run.config.model.pool == "mean"), ["none", "mixed"])
        assert shared_with_accuracy(lab) == ["none", "mixed"]
        assert {run.config.model.pool for run in lab.asked} == {"cls", "mean"}
        assert [row["change"] for row in findings.tables[0].rows] == pytest.approx([30, 30])
        assert "raises accuracy in 2 of 2 cases" in findings.answer

    def test_swin_has_nothing_to_compare(self) -> None:
        model = ModelConfig(backbone="swin", dim=8, depths=[1], stage_heads=[1], window_size=[2], patch_size=[4])
        findings, lab = found("pooling", lambda run: 0.5, ["mixed"], model=model)
        assert not lab.asked
        assert "nothing to compare" in findings.answer


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Lab]:
    lab = labs.lab(
        tmp_path_factory.mktemp("studies"),
        *("none", "axial", "learned+mixed", "liere:8", "sinusoidal"),
        data=data_config(train_size=200, val_size=60),
        model=ModelConfig(dim=16, depth=1, num_heads=1, mlp_dim=16, patch_size=[2], pool="mean"),
        optim=OptimConfig(epochs=5, warmup_epochs=1, lr=5e-3),
    )
    return find_study("finetune").find(lab), lab


class TestFinetune:
    def test_encodings_are_added_to_the_trained_model(self, tuned: tuple[Findings, Lab]) -> None:
        findings, lab = tuned
        rows = by(findings.tables[0], "name")
        assert list(rows) == [("learned",), ("learned+axial",), ("learned+mixed",), ("learned+liere:8",)]
        assert rows[("learned",)]["gain"] is None
        assert rows[("learned+axial",)]["angle"] == pytest.approx(3)  # one rad a patch, pairs of an axis each
        assert 0 < rows[("learned+mixed",)]["angle"] < 1  # it has moved from zero
        assert any("sinusoidal, which are not rotary" in reason for reason in lab.left_out)

    def test_fine_tuning_starts_from_the_same_run_for_all(self, tuned: tuple[Findings, Lab]) -> None:
        _, lab = tuned
        files = lab.store.folder.glob("*/curve.csv")
        curves = {file.parent.name: len(file.read_text().splitlines()) - 1 for file in files}
        assert sorted(curves.values()) == [1, 1, 1, 1, 5]
