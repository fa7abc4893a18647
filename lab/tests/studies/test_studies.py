"""Studies: runs trained once and shared, in this or other processes, and results stored as JSON."""

import itertools
import json
import os
import re
import sys
from dataclasses import replace
from functools import partial, partialmethod
from io import StringIO
from pathlib import Path
from typing import Any

import labs
import pytest
from labs import QUIET
from labs import Run as RunCommand
from rich.console import Console

from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine import runs
from torchrope_lab.engine.dry_run import NotTrained
from torchrope_lab.engine.provenance import machine
from torchrope_lab.engine.published import cite, errata, published, table_of_entry
from torchrope_lab.engine.registry import STUDIES, Study
from torchrope_lab.engine.runs import Measure, Run, dependency_rounds
from torchrope_lab.engine.study import Lab, facts_of, find_study, run_study
from torchrope_lab.report.chapters import run_facts
from torchrope_lab.results import Column, Findings, Table
from torchrope_lab.settings.run_config import ExecutionConfig, ModelConfig, OptimConfig, RunConfig
from torchrope_lab.studies.shuffle import shuffled

SMALL: dict[str, Any] = {
    "data": data_config(train_size=60, val_size=20),
    "model": ModelConfig(dim=8, depth=1, num_heads=1, mlp_dim=8, patch_size=[4], pool="mean"),
}
config = partial(labs.settings, **SMALL)
lab = partial(labs.lab, **SMALL)


def stamps(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}


def test_run_is_trained_once_for_all_studies(tmp_path: Path) -> None:
    first = lab(tmp_path)
    [none, mixed] = first.train([first.run("none"), first.run("mixed")])
    before = stamps(tmp_path)
    second = lab(tmp_path, optim=OptimConfig(epochs=1, warmup_epochs=0))
    [again, other] = second.train([second.run("mixed"), second.run("mixed", seed=1)])
    after = stamps(tmp_path)
    assert before.items() < after.items()
    assert len(after) == 3
    assert again == mixed
    assert again.top1 == sum(map(int.__eq__, again.labels, again.predicted)) / 20
    assert other.run.seed == 1
    assert none.curve[0]["epoch"] == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"encoding": "liere"},
        {"model": ModelConfig(dim=16)},
        {"data": data_config(train_size=10)},
        {"optim": OptimConfig(lr=1e-5)},
        {"run": ExecutionConfig(precision="bf16")},
    ],
)
def test_run_key_depends_on_settings_that_change_results(changed: dict) -> None:
    assert Run(replace(RunConfig(), **changed)).name != Run(RunConfig()).name


def test_initial_run_is_trained_first_and_is_part_of_the_run(tmp_path: Path) -> None:
    here = lab(tmp_path)
    start = here.run("learned")
    tuned = here.run("learned+mixed", optim={"lr": 1e-4}, after=start)
    rounds = [[run.encoding for run in each] for each in dependency_rounds([tuned, start, tuned])]
    assert rounds == [["learned"], ["learned+mixed"]]
    [trained] = here.train([tuned])
    assert len(stamps(tmp_path)) == 2
    assert trained.run.key != here.run("learned+mixed", optim={"lr": 1e-4}).key
    model, _ = trained.load()
    first, _ = here.train([start])[0].load()
    moved = (model.head.weight - first.head.weight).abs().max()
    assert 0 < moved < 0.01  # it began where the other ended


def test_changed_default_and_changed_numerics_train_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = lab(tmp_path)
    name = here.run("mixed").name
    with monkeypatch.context() as patch:
        patch.setattr(runs, "NUMERICS", runs.NUMERICS + 1)
        assert lab(tmp_path).run("mixed").name != name
    assert lab(tmp_path).run("mixed").name == name
    monkeypatch.setattr(OptimConfig, "__init__", partialmethod(OptimConfig.__init__, label_smoothing=0.9))
    assert lab(tmp_path).run("mixed").name != name


def test_results_say_where_their_runs_were_trained(tmp_path: Path) -> None:
    here = lab(tmp_path, seeds=2)
    trained = here.train(here.runs(["none"]))
    assert trained[0].provenance["machine"] == machine()
    elsewhere = {**trained[0].provenance, "machine": {"cpu": "another"}, "date": "2026-01-01"}
    provenances = [trained[0].provenance, elsewhere, {**elsewhere, "date": "2026-01-03"}]
    facts = facts_of("torchrope study", {}, provenances)
    assert [group.runs for group in facts.trained] == [1, 2]
    text = dict(run_facts(facts))["Training"]
    assert text.endswith("; 2 runs, on another, 2026-01-01 to 2026-01-03")
    assert text.startswith(f"1 run, {trained[0].provenance['date']}")


def test_measure_is_computed_once(tmp_path: Path) -> None:
    here = lab(tmp_path)
    asked: list[str] = []

    def count(model: object, data: object) -> dict[str, int]:
        asked.append("once")
        return {"parameters": sum(p.numel() for p in model.parameters())}  # type: ignore[attr-defined]

    def measured(name: str) -> dict[str, Any]:
        [trained] = here.train([here.run("mixed")], lambda _: [Measure(name, count)])
        return trained.measured(name)

    [first] = here.train([here.run("mixed")])
    stamp = stamps(tmp_path)
    assert measured("size") == measured("size") == {"parameters": sum(p.numel() for p in first.load()[0].parameters())}
    assert asked == ["once"]
    assert measured("again") == measured("size")
    assert asked == ["once", "once"]
    assert stamps(tmp_path) == stamp  # the run was trained once


def parameter_sum(model: Any, data: Any) -> dict[str, Any]:
    """A measure that other processes can import."""
    return {"sum": sum(float(each.detach().sum()) for each in model.parameters()), "process": os.getpid()}


@pytest.mark.slow
def test_measures_are_computed_where_runs_train(tmp_path: Path) -> None:
    """In the process that trains a run, with its weights in memory; a missing measure of a finished run also there."""
    here = lab(tmp_path, parallel=2)
    first = Measure("first", parameter_sum)
    runs = [here.run("none"), here.run("mixed")]
    for measures in ([first], [first, Measure("second", parameter_sum)]):
        trained = here.train(runs, lambda _, measures=measures: measures)
    for each in trained:
        one, other = each.measured("first"), each.measured("second")
        assert one["sum"] == other["sum"] == parameter_sum(*each.load())["sum"]
        assert os.getpid() not in (one["process"], other["process"])


def test_measure_is_on_the_data_that_it_names(tmp_path: Path) -> None:
    """As a second stage at a larger size, which is evaluated on the data of the study."""
    here = lab(tmp_path)

    def size(model: object, data: Any) -> dict[str, Any]:
        return {"size": list(data.input_size)}

    measures = [Measure("own", size), Measure("of-the-study", size, data=here.config.data)]
    [trained] = here.train([here.run("none", data={"size": 12})], lambda _: measures)
    assert [trained.measured(measure.name)["size"] for measure in measures] == [[12, 12], [8, 8]]


def test_measure_with_the_weights_in_memory_equals_that_of_the_stored_model(tmp_path: Path) -> None:
    measure = Measure("predictions", partial(shuffled, kinds=["patches"]))
    here = lab(tmp_path, optim=OptimConfig(epochs=2, warmup_epochs=0, ema_decay=0.5))
    [trained] = here.train([here.run("mixed")], lambda _: [measure])
    stored = json.loads(json.dumps(shuffled(*trained.load(here.data), kinds=["patches"])))
    assert trained.measured("predictions") == stored
    assert trained.measured("predictions")["intact"]["predicted"] == trained.predicted


def test_dry_run_lists_runs_and_trains_nothing(tmp_path: Path) -> None:
    out = StringIO()
    console = Console(file=out, width=80)
    settings = config(tmp_path, seeds=2, encodings=["none", "mixed", "liere:5"])
    assert run_study(find_study("shuffle"), settings, command="", console=console, dry_run=True) is None
    lines = out.getvalue().removeprefix("shuffle:\n").splitlines()
    epochs = settings.optim.epochs
    named = [line.partition(" (")[0] for line in lines[:4]]
    assert named == [f"{name} seed {seed}" for name in ("none", "mixed") for seed in (0, 1)]
    assert all(line.endswith(f": 0 of {epochs} epochs done") for line in lines[:4])
    assert re.fullmatch(r"runs to train or measure: 4 of 4, about \d+ minutes to train", lines[4])
    warnings = "\n".join(lines[5:])
    assert "liere:5 is left out" in warnings
    assert "--seeds 2: verdicts are provisional below 5 seeds" in warnings
    assert f"{settings.data.val_size} validation examples" in warnings
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("study", "settings", "further"),
    [
        ("capacity", {"encodings": ["liere"]}, False),
        ("capacity", {"encodings": ["liere"], "reference": "none"}, True),
        ("accuracy", {"encodings": ["none"], "reference": "mixed"}, False),
    ],
)
def test_dry_run_says_whether_further_runs_follow(study: str, settings: dict, further: bool, tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=80)
    run_study(find_study(study), config(tmp_path, **settings), command="", console=console, dry_run=True)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("\nfurther runs follow these and are not estimated\n" in told) == further


def test_dry_run_says_what_is_finished_and_takes_its_times(tmp_path: Path) -> None:
    here = lab(tmp_path)
    [trained] = here.train([here.run("none")])
    trained.curve[-1]["seconds"] = 240.0
    (trained.folder / "curve.csv").write_text("epoch,val_top1,seconds\n1,0.5,240.0\n")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    out = StringIO()
    there = Lab(config(tmp_path), ("none",), Console(file=out, width=80), dry_run=True)
    with pytest.raises(NotTrained):
        there.train(there.runs(["none", "mixed"]))
    lines = out.getvalue().splitlines()
    assert lines[0].endswith(": finished")
    assert re.fullmatch(r"runs to train or measure: 1 of 2, about [45] minutes to train", lines[2])
    there.train(there.runs(["none"]))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_bad_run_is_refused_before_any_trains(tmp_path: Path) -> None:
    here = lab(tmp_path)
    with pytest.raises(ValueError, match="block_size"):
        here.train([here.run("none"), here.run("liere:5")])
    assert not stamps(tmp_path)


def test_study_on_a_machine_without_slurm_names_its_own_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    here = lab(tmp_path / "out", slurm="time=1")
    with pytest.raises(ValueError, match=r"^Slurm not found \(no srun\); --parallel N runs the jobs on this machine$"):
        here.train([here.run("none")])


def test_slurm_without_submitit_raises_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    here = lab(tmp_path, slurm="partition=gpu,time=5")
    with pytest.raises(ValueError, match=r"^--slurm requires submitit"):
        here.train([here.run("none")])


def test_study_writes_what_it_found(tmp_path: Path) -> None:
    table = Table("t", [Column("name", "Name"), Column("x", "X", "%", 1)], [{"name": "a", "x": float("nan")}])
    study = Study(
        name="own",
        title="Title",
        question="Question?",
        sources="liere-1, table 1; a paper, table 2",
        find=lambda here: Findings(answer=str(here.seeds), tables=[table]),
    )
    file = run_study(study, config(tmp_path, seeds=3), command="torchrope study", console=QUIET)
    written = json.loads(file.read_text())
    assert file == tmp_path / "own-digits.json"
    assert written["schema"] == 1
    assert written["sources"] == [cite("liere-1, table 1"), "a paper, table 2"]
    assert written["data"]["train"] == 60
    assert written["findings"]["answer"] == "range(0, 3)"
    assert written["findings"]["tables"][0]["rows"] == [{"name": "a", "x": None}]
    assert written["run"]["config"]["encodings"][0] == "none"


def test_list_names_every_study_with_its_question(run: RunCommand) -> None:
    status, printed, _ = run("study", "--list")
    assert status == 0
    assert all(f"{name}\n  {study.question}\n" in printed for name, study in STUDIES.items())


def test_published_cells_are_read_as_printed() -> None:
    rows = "a | 63.9 (62.9-65.8) | -\n b | - | 1,024"
    entry = {"title": "t", "source": "liere-1, table 1; comrope", "columns": ["Name", "A", "B"], "rows": rows}
    table = table_of_entry(entry)
    assert table.source.endswith("(arXiv:2406.10322v1), table 1; Yu et al., ComRoPE, CVPR 2025, supplement")
    assert table.rows[0] == {
        "name": "a",
        "value1": 63.9,
        "low1": 62.9,
        "high1": 65.8,
        **dict.fromkeys(("value2", "low2", "high2")),
    }
    assert table.rows[1]["value2"] == 1024
    assert (table.columns[1].low, table.columns[2].low) == ("low1", None)


def test_drops_that_contradict_their_accuracies_are_errata() -> None:
    wrong = []
    for table in published("shuffle"):
        for row, first in itertools.product(table.rows, range(1, len(table.columns), 3)):
            before, after, drop = (row[f"value{first + offset}"] for offset in range(3))
            correct = f"{100 * (before - after) / before:.1f}"  # type: ignore[operator]
            if correct != f"{drop:.1f}":
                wrong.append((f"{drop:.1f}", correct))
    assert wrong == [(erratum["printed"], erratum["correct"]) for erratum in errata("shuffle")]


def test_intervals_that_are_not_around_their_values_are_errata() -> None:
    for study in ("accuracy", "model-size", "resolution"):
        wrong = []
        for table in published(study):
            for row, column in itertools.product(table.rows, table.columns[1:]):
                value, low, high = (row[key] if key else None for key in (column.key, column.low, column.high))
                digits = column.digits or 0
                if high is not None and abs(high + low - 2 * value) > 2.5 * 10**-digits:  # type: ignore[operator]
                    wrong.append(f"{value:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})")
        printed = [erratum["printed"] for erratum in errata(study) if "interval" in erratum["why"]]
        assert wrong == [cell for cell in printed if "(" in cell], study


def test_files_that_a_run_could_not_read_are_listed(tmp_path: Path) -> None:
    here = lab(tmp_path)
    [trained] = here.train([here.run("none")])
    assert here.skipped == {}
    (trained.folder / "skipped.json").write_text(json.dumps({"a.png": "truncated"}))
    later = lab(tmp_path)
    later.train([later.run("none")])
    assert later.skipped == {"a.png": "truncated"}


def test_key_is_of_equal_settings() -> None:
    """A recipe or a file may write 1 where the command line gives 1.0."""
    optims = [OptimConfig(epochs=2, warmup_epochs=one, train_sizes=[8]) for one in (1, 1.0)]
    keys = [Run(RunConfig(data=data_config(), optim=optim)).key for optim in optims]
    assert keys[0] == keys[1]


def test_key_is_of_resolved_settings() -> None:
    def key(**data: object) -> str:
        return Run(RunConfig("liere:8", seed=1, data=data_config(**data))).key

    volumes = dict(name="volumes", size=112, batch_size=8)
    assert key(**volumes) == key(**volumes, frames=32) == key(**volumes, root="/x", workers=3)
    keys = [key(**volumes), key(**volumes, frames=16), key(name="digits"), key(name="digits", augment={"flip": True})]
    assert len(set(keys)) == 4


@pytest.mark.parametrize("settings", [{}, {"train_size": 40}, {"tuning": True}])
def test_finished_runs_on_other_examples_are_refused(settings: dict[str, object], tmp_path: Path) -> None:
    """Also on a part of the data, which differs from that of the study."""
    first = lab(tmp_path)
    [trained] = first.train([first.run("none", data=settings)])
    file = trained.folder / "result.json"
    stored = json.loads(file.read_text())
    again = lab(tmp_path)
    assert again.train([again.run("none", data=settings)]) == [trained]
    file.write_text(json.dumps({**stored, "fingerprint": "of other data"}))
    with pytest.raises(ValueError, match="the data must be what the runs in --out were trained on"):
        again.train([again.run("none", data=settings)])


DIVERGING = "--data.train_size 60 --data.val_size 20 --model.depth 1 --model.dim 16 --epochs 1 --optim.lr 1e9 --seeds 1"
NOTHING = "No model is significantly better than always predicting"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        pytest.param("compare --encodings none,mixed", NOTHING, marks=pytest.mark.slow),
        pytest.param("compare --encodings none,mixed --data.folds 2", NOTHING, marks=pytest.mark.slow),
        ("study accuracy --encodings none,mixed", NOTHING),
        pytest.param("study learning --encodings mixed", "", marks=pytest.mark.slow),
        pytest.param("study finetune --encodings mixed", "", marks=pytest.mark.slow),
        ("study shuffle --encodings mixed", "All runs diverged."),
        pytest.param("study generators --encodings mixed", "All runs diverged.", marks=pytest.mark.slow),
        pytest.param("study attention --encodings mixed", "All runs diverged.", marks=pytest.mark.slow),
    ],
)
def test_runs_that_diverge_are_a_result(command: str, answer: str, tmp_path: Path, run: RunCommand) -> None:
    for _ in range(2):  # finished runs are read again
        status, printed, error = run(*command.split(), *DIVERGING.split(), "--out", tmp_path)
        assert status == 0, error
        assert answer in printed


def test_encodings_measured_instead_are_named(tmp_path: Path) -> None:
    here = lab(tmp_path, encodings=["axial"])
    for name, instead in (("capacity", "liere"), ("sharing", "mixed")):
        assert instead in find_study(name).find.arms(here)  # type: ignore[union-attr]
        assert any(reason.startswith("Measured instead: ") and instead in reason for reason in here.left_out)


def test_evaluation_of_a_run_that_diverged_is_json(tmp_path: Path, run: RunCommand) -> None:
    options = DIVERGING.replace("--seeds 1", "--epochs 3 --run.on_nan ignore").split()
    assert run("train", "--encoding", "mixed", *options, "--out", tmp_path)[0] == 0
    assert run("evaluate", tmp_path)[0] == 0
    measures = json.loads((tmp_path / "evaluation.json").read_text(), parse_constant=pytest.fail)
    assert measures["val_loss"] is None
