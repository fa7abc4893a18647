"""Tests of the command line."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from labs import OPTIONS, Run

from torchrope.encodings import ABSOLUTE, BIAS, ROTARY
from torchrope.files import UNFINISHED, write_whole
from torchrope_lab import cli
from torchrope_lab.cli import main
from torchrope_lab.conclusion import Conclusion
from torchrope_lab.data.data_config import options, settings_of
from torchrope_lab.files import read_curve
from torchrope_lab.results import Row, StudyResult, Table
from torchrope_lab.settings.run_config import ExecutionConfig, RunConfig
from torchrope_lab.training.run import train

SMALL = [*OPTIONS, "--seeds=1", "--scales=[1.0,1.5]"]
TRAIN = ["train", *OPTIONS, "--trainer.enable_progress_bar=false"]


def configuration(run: Run, *arguments: object) -> dict[str, Any]:
    """The settings that a command would use."""
    return yaml.safe_load(run(*arguments, "--print_config")[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of "none" alone, trained once; tests that change it take a copy."""
    out = tmp_path_factory.mktemp("trained") / "out"
    torch.manual_seed(0)
    assert main(["compare", *SMALL, "--encodings=none", f"--out={out}"]) == 0
    return out


@pytest.fixture
def compared(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "compared"))


def rows_of(curve: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(curve.read_text().splitlines()))


def tables_of(results: StudyResult) -> dict[str, Table]:
    return {table.title: table for table in results.findings.tables}


def named_rows(table: Table) -> dict[str, Row]:
    return {str(row["name"]): row for row in table.rows}


def folder_of(out: Path, encoding: str, seed: int = 0) -> Path:
    """Where a comparison keeps a run of the digits."""
    [found] = (out / "runs").glob(f"digits-{encoding}-seed{seed}-*")
    return found


def test_compare_leaves_a_report_that_agrees_with_its_plain_files(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    status, printed, _ = run("compare", *SMALL, "--encodings", "none,learned+liere:4", "--seeds", 2, "--out", out)
    assert status == 0
    assert f"report: {out}/report/index.html" in printed
    assert "run 4 of 4: learned+liere:4 seed 1: top-1" in printed
    estimates = [re.sub(r"[\d:]+ (?=to|elapsed)", "T ", line) for line in printed.splitlines() if "to train)" in line]
    assert estimates[0].startswith("0 of 4 runs done: none seed 0, epoch 1/1, top-1 ")
    assert len(estimates) == 1 + 3  # the first epoch, and each run but the last
    assert all(line.count("about T to train") == 1 for line in estimates)
    assert "measuring the costs of a training step of 2 models" in printed.splitlines()

    results = StudyResult.read(out / "results.json")
    page = (out / "report" / "index.html").read_text()
    shown, costs = (named_rows(table) for table in (results.findings.tables[0], tables_of(results)["Costs"]))
    assert set(shown) == {"none", "learned+liere:4"}
    stored = {}
    for path in (out / "runs").glob("*/result.json"):
        config = yaml.safe_load((path.parent / "config.yaml").read_text())
        stored[config["encoding"], config["seed"]] = json.loads(path.read_text())
        assert len(rows_of(path.parent / "curve.csv")) == 1
    assert set(stored) == {(name, seed) for name in shown for seed in (0, 1)}
    for name, row in shown.items():
        right = [np.equal(stored[name, seed]["labels"], stored[name, seed]["predicted"]) for seed in (0, 1)]
        assert row["top1"] == pytest.approx(100 * np.mean(right))
        assert row["low"] <= row["top1"] <= row["high"]
        assert f"{row['top1']:.1f}" in page
    sizes = [column.title for column in tables_of(results)["Accuracy at other input sizes"].columns[2:]]
    assert sizes == ["8×8 (trained)", "12×12"]
    assert costs["learned+liere:4"]["encoding_parameters"] == 16 * 16 + 2 * 4 * 6
    kinds = {row["name"]: row["kind"] for row in tables_of(results)["The encodings"].rows}
    assert kinds == {"none": "not rotary", "learned+liere:4": "rotary, not relative"}
    assert Conclusion.from_dict(results.conclusion).sentence() == results.findings.answer
    assert results.run.config["data"]["train_size"] == 80
    assert results.run.command.startswith("torchrope compare --epochs=1")
    assert results.unfinished == []


@pytest.mark.slow
def test_compare_skips_finished_runs_and_adds_encodings_and_seeds(tmp_path: Path, run: Run) -> None:
    first = run("compare", *SMALL, "--encodings", "none", "--out", tmp_path)
    again = run("compare", *SMALL, "--encodings", "none", "--out", tmp_path)
    assert "run 1 of 1" in first[1]
    (folder_of(tmp_path, "none") / "skipped.json").write_text('{"a.png": "truncated"}')  # of an earlier start
    assert not [line for line in again[1].splitlines() if line.startswith("run ")]
    _, grown, _ = run("compare", *SMALL, "--encodings", "none,mixed", "--seeds", 2, "--out", tmp_path)
    ended = [line for line in grown.splitlines() if "elapsed" in line]
    assert [line[:10] for line in ended] == [f"run {number} of 4" for number in (2, 3, 4)]
    results = StudyResult.read(tmp_path / "results.json")
    assert set(named_rows(results.findings.tables[0])) == {"none", "mixed"}
    assert results.conclusion["seeds"] == 2
    assert results.data.skipped == ["a.png (truncated)"]


@pytest.mark.slow
def test_interrupted_comparison_reports_its_finished_runs(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["compare", *SMALL, "--encodings=none,axial,mixed", "--out", tmp_path]
    calls, written = iter(range(10)), []

    def stop(*arguments: object, **settings: object) -> object:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return train(*arguments, **settings)

    from torchrope_lab.studies import compare  # here, as another order of imports changes how Lightning's types read 1

    find = compare.findings
    monkeypatch.setattr(compare, "findings", lambda results: written.append(len(results.measured)) or find(results))
    with monkeypatch.context() as stopping:
        stopping.setattr("torchrope_lab.engine.runs.train", stop)
        assert run(*command)[0] == 130
    status, printed, _ = run("report", tmp_path)
    assert status == 0
    assert "not finished yet: mixed seed 0" in printed
    assert written == [2]
    assert StudyResult.read(tmp_path / "results.json").unfinished == ["mixed seed 0"]
    _, printed, _ = run(*command)
    assert "run 3 of 3: mixed seed 0" in printed
    assert StudyResult.read(tmp_path / "results.json").unfinished == []
    run(*command)
    assert written == [2, 3, 3]  # once a call, not after every run


def test_compare_refuses_a_folder_of_another_configuration(compared: Path, run: Run) -> None:
    before = {path: path.read_bytes() for path in compared.rglob("*") if path.is_file()}
    status, _, error = run("compare", *SMALL, "--encodings", "none", "--optim.lr", 0.5, "--out", compared)
    assert status == 2
    assert "--out must be a new folder or one of the same configuration" in error
    assert "optim.lr 0.002 instead of 0.5" in error
    assert {path: path.read_bytes() for path in compared.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("command", "file"), [("compare", "thesis.txt"), ("train", "config.yaml")])
def test_folder_with_unrelated_files_is_refused(command: str, file: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / file).write_text("thesis: years of work\n")
    status, _, error = run(command, *OPTIONS, "--out", tmp_path)
    assert (status, error.count("\n")) == (2, 1)
    rule = "--out must be a new folder, an empty one, or one of torchrope compare"
    assert rule in error or command == "train"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {file: "thesis: years of work\n"}


def test_train_resumes_and_evaluate_reads_the_run(tmp_path: Path, run: Run) -> None:
    command = [*TRAIN, "--encoding=liere:4", "--out", tmp_path]
    assert run(*command)[0] == 0
    status, printed, _ = run("evaluate", tmp_path, "--json")
    assert status == 0
    measured = json.loads(printed)
    assert 0 <= measured["interval"][0] <= measured["top1"] <= measured["interval"][1] <= 1
    assert json.loads((tmp_path / "evaluation.json").read_text()) == measured
    status, trained, _ = run(*command)
    assert status == 0
    assert json.loads(run("evaluate", tmp_path, "--json")[1]) == measured
    status, printed, _ = run("evaluate", tmp_path)
    low, high = (100 * end for end in measured["interval"])
    cells = [" ".join(line.split()) for line in printed.splitlines()]
    assert cells[2].startswith(f"8×8 (trained) – {100 * measured['top1']:.1f} [{low:.1f}, {high:.1f}]")
    assert cells[3].startswith(f"8×8, patches shuffled – {100 * measured['shuffled_top1']:.1f}")
    assert [line.split()[0] for line in printed.splitlines()[4:9]] == ["4×4", "6×6", "10×10", "12×12", "16×16"]
    assert printed.endswith(f"numbers: {tmp_path / 'evaluation.json'}\n")
    assert printed[printed.index("AUROC") : printed.index("\n\nnumbers")] in trained  # with the sensitivity of classes
    assert [" ".join(line.split()) for line in trained.splitlines()[2:4]] == cells[2:4]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == measured

    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, _, error = run(*TRAIN, "--encoding=mixed", "--seed=3", "--out", tmp_path)
    assert status == 2
    assert "a run's folder must be new or of the same configuration" in error
    assert "encoding liere:4 instead of mixed; seed 0 instead of 3" in error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


class Enough(Exception):
    """Raised in place of training."""


def test_compare_applies_execution_settings_and_resumes_older_folders(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: RunConfig, _: object, folder: Path, **__: object) -> None:
        write_whole(folder / "checkpoint.ckpt", b"")
        raise Enough(config.run)

    monkeypatch.setattr("torchrope_lab.engine.runs.train", stop)
    out, mine = tmp_path / "out", tmp_path / "mine.yaml"
    mine.write_text("run: {precision: bf16, checkpoint_every: 5}\n")
    command = ["compare", *SMALL, "--encodings=none", "--out", out]
    with pytest.raises(Enough) as trained:
        run(*command)
    assert trained.value.args[0] == ExecutionConfig(on_nan="ignore")
    stored = yaml.safe_load((out / "config.yaml").read_text())
    del stored["run"]  # as an older version wrote it
    (out / "config.yaml").write_text(yaml.safe_dump(stored))
    with pytest.raises(Enough) as trained:
        run(*command, "--run.checkpoint_every=7")
    assert trained.value.args[0] == ExecutionConfig(on_nan="ignore", checkpoint_every=7)
    status, _, error = run(*command, "--config", mine)
    assert status == 2
    assert "run.precision float32 instead of bf16" in error
    with pytest.raises(Enough) as trained:
        run("compare", *SMALL, "--encodings=none", "--config", mine, "--out", tmp_path / "other")
    assert trained.value.args[0] == ExecutionConfig(on_nan="ignore", precision="bf16", checkpoint_every=5)


class Killed(BaseException):
    """Raised in place of SIGKILL."""


def die_in_write(monkeypatch: pytest.MonkeyPatch, number: int, *, behind: bool) -> None:
    """End in the write of that number as a killed process does: before its file is there whole, or right behind."""
    done = iter(range(1, 1000))

    def dying(move: Callable[[str, Path], None]) -> Callable[[str, Path], None]:
        def die(unfinished: str, path: Path) -> None:
            last = next(done) == number
            if not last or behind:
                move(unfinished, path)
            if last:
                if os.path.exists(unfinished):
                    shutil.copy(unfinished, f"{unfinished}-left")  # a killed process removes nothing
                raise Killed

        return die

    monkeypatch.setattr("os.replace", dying(os.replace))
    monkeypatch.setattr("os.link", dying(os.link))  # of new files


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_compare_killed_during_an_early_write_resumes(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, number: int, behind: bool
) -> None:
    def train(*_: object, **__: object) -> None:
        raise Enough

    monkeypatch.setattr("pytorch_lightning.Trainer.fit", train)
    out = tmp_path / "out"
    command = ["compare", *SMALL, "--encodings=none,mixed", "--out", out]
    with monkeypatch.context() as killing:
        die_in_write(killing, number, behind=behind)
        with pytest.raises(Killed):
            run(*command)
    with pytest.raises(Enough):
        run(*command)
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {name for name in written if ".locks" not in name} == set()  # it failed before a checkpoint


@pytest.mark.slow
def test_compare_removes_temporary_files_of_killed_writes(compared: Path, run: Run) -> None:
    command = ["compare", *SMALL, "--encodings=none", "--out", compared]
    for name in ("runs/costs.json", "runs/*/result.json", "runs/*/measures/*.json"):
        [file] = compared.glob(name)
        file.unlink()
    folders = {path.parent for path in compared.rglob("*") if path.is_file()}
    folders = {folder for folder in folders if folder.name != ".locks"}  # where nothing is replaced
    for folder in folders:
        (folder / f"{UNFINISHED}abcdefgh").write_text("half")
    assert len(folders) == 4
    assert run(*command)[0] == 0
    assert not list(compared.rglob(f"{UNFINISHED}*"))


COMMAS = "--data=cifar10 --model.patch_size 4,2 --optim.train_sizes=8,16 --run.logs csv,wandb"
POLICY = "timm:rand-m9-mstd0.5-inc1"


@pytest.mark.parametrize(
    ("typed", "setting", "value"),
    [
        (f"compare {COMMAS}", "model.patch_size", [4, 2]),
        (f"train {COMMAS}", "optim.train_sizes", [8, 16]),
        (f"train {COMMAS}", "run.logs", ["csv", "wandb"]),
        ("compare --data=cifar10 --data.augment.randaugment 2,9", "data.augment.randaugment", [2, 9]),
        (f"train --data=cifar10 --data.augment.randaugment {POLICY}", "data.augment.randaugment", POLICY),
        ("compare --scales 0.75,1", "scales", [0.75, 1.0]),
        ("compare --encodings mixed,liere:8", "encodings", ["mixed", "liere:8"]),
        ("train --model.spacing [0.5,1.0]", "model.spacing", [0.5, 1.0]),
        ("compare --model.spacing -1,0", "model.spacing", [-1.0, 0.0]),
        ("compare --model.spacing=-1,0", "model.spacing", [-1.0, 0.0]),
        ("compare --model.patch_size 4", "model.patch_size", [4]),
        ("compare --model.window_size null", "model.window_size", None),
        ("compare --model.size=small --model.depth=1", "model.dim", None),  # not the recipe's
        ("compare --model.size=small --model.depth=1", "model.depth", 1),
        ("study fourier --checkpoint a --seeds=3 --checkpoint=b,c", "checkpoint", ["a", "b", "c"]),
    ],
)
def test_values_are_read_as_typed(typed: str, setting: str, value: object, run: Run) -> None:
    found: Any = configuration(run, *typed.split())
    for name in setting.split("."):
        found = found[name]
    assert found == value


def test_evaluate_names_the_runs_of_a_comparison(trained: Path, run: Run) -> None:
    status, _, error = run("evaluate", trained)
    rule = f"{trained} holds several runs; name one of them, as {folder_of(trained, 'none')}"
    assert (status, error) == (2, f"torchrope evaluate: {rule}\n")


def test_report_rebuilds_the_page(compared: Path, run: Run) -> None:
    page = compared / "report" / "index.html"
    written = page.read_bytes()
    page.unlink()
    assert run("report", compared)[0] == 0
    assert page.read_bytes() == written


DAMAGED = ["config.yaml", "runs/costs.json", "runs/*/result.json", "runs/*/measures/*.json"]
OTHERS = [(name, text) for name in DAMAGED[:3] for text in ('{"none": 1, "sizes": 7}', "{}")]
OTHERS += [(name, "[1]") for name in DAMAGED]
CASES = [*((name, "{{{:") for name in DAMAGED), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]


@pytest.mark.parametrize(("name", "content"), CASES)
def test_damaged_file_of_a_comparison_is_named_in_one_line(name: str, content: str, compared: Path, run: Run) -> None:
    [file] = compared.glob(name)
    file.write_text(content)
    status, _, error = run("compare", *SMALL, "--encodings", "none", "--out", compared)
    if file.name == "costs.json" and content[:2] in ("{}", '{"'):  # nothing measured yet
        assert status == 0
        return
    assert (status, error.count("\n")) == (2, 1)
    assert file.name in error or str(compared) in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    ["learned,comrope-ap", pytest.param("none,sinusoidal,axial,mixed,liere,comrope-ld", marks=pytest.mark.slow)],
)
def test_model_whose_layers_and_heads_share_compares_every_encoding(names: str, tmp_path: Path, run: Run) -> None:
    shared = ["--model.share_heads=true", "--model.share_layers=true", "--model.dim=32", "--model.num_heads=2"]
    assert run("compare", *SMALL, *shared, "--encodings", names, "--out", tmp_path)[0] == 0


@pytest.mark.parametrize("command", ["compare", "train", "study accuracy"])
def test_missing_package_of_the_laboratory_is_one_line(
    command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library needs torch alone, but its wheel has the command."""
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    status, _, error = run(*command.split(), "--out", tmp_path / "out")
    assert status == 2
    rule = "jsonargparse is not installed (in a clone of torchrope: pip install . ./lab)"
    assert error == f"torchrope {command.split()[0]}: {rule}\n"
    assert not list(tmp_path.iterdir())


WITHOUT_POSIX = """
import os, sys
import psutil, subprocess  # they use these functions, but not on Windows
sys.modules["fcntl"] = None
for name in ("sysconf", "sched_getaffinity", "getloadavg", "fork", "killpg", "setsid"):
    if hasattr(os, name):
        delattr(os, name)
"""


@pytest.mark.slow
def test_comparison_needs_no_function_that_windows_lacks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_POSIX)
    command = [sys.executable, "-m", "torchrope_lab", "compare", *SMALL, "--encodings=none,axial", "--parallel=2"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, "--out=out"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report" / "index.html").exists()


@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "digits"], ["--help"], ["study", "--list"]])
def test_closed_output_pipe_exits_with_141(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchrope_lab", *arguments]
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=usual)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_broken_pipe_other_than_stdout_is_reported(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def broken(_: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setitem(cli._COMMANDS, "recipes", broken)
    assert run("recipes")[::2] == (2, "torchrope recipes: [Errno 32] Broken pipe\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_shows_the_commands(arguments: list[str], run: Run) -> None:
    status, printed, _ = run(*arguments)
    assert status == 0
    for command in ("compare", "study", "train", "evaluate", "report"):
        assert f"\n  {command} " in printed


def test_help_has_the_defaults_of_the_data(run: Run) -> None:
    status, printed, _ = run("compare", "--data", "motion", "--help")
    assert status == 0
    assert "all axes (1,4,4)\n" in printed


@pytest.mark.parametrize("command", ["compare", "train", "study"])
def test_help_is_short_and_names_the_sections_that_have_all(command: str, run: Run) -> None:
    def helped(*section: str) -> tuple[str, set[str]]:
        status, printed, _ = run(command, "--help", *section)
        assert status == 0
        return printed, {*re.findall(r"^  (?:-\w, )?(--[\w.]+)", printed, re.MULTILINE)}

    (common, few), (_, every) = helped(), helped("all")
    assert common.count("\n") < 45
    assert len(every) <= 80 or command != "compare"
    assert few < every
    assert {"--config", "--recipe", "--data", "--epochs", "--out"} <= few
    sections = common.rpartition("--help all; of one group: --help ")[2].rstrip(".\n").split(", ")
    assert {"data", "model", "optim", "run"} <= {*sections}
    for section in sections:
        shown = helped(section)[1] - {f"--{section}", "--epochs", "--folds"}
        assert len(shown) > 2
        assert all(option.startswith(f"--{section}.") for option in shown)
        assert shown < every


@pytest.mark.parametrize("arguments", ["--help", "compare --help", "--version"])
def test_help_imports_no_heavy_package(arguments: str) -> None:
    script = (
        "import sys, torchrope_lab.cli\n"
        f"try: torchrope_lab.cli.main({arguments.split()})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torchrope', 'numpy', 'pytorch_lightning', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_help_names_every_encoding(run: Run) -> None:
    told = run("compare", "--help")[1].partition("Encodings:")[2].partition(";")[0]
    assert {name.strip() for name in told.split(",")} == {*ROTARY, *ABSOLUTE, *BIAS}


def test_library_imports_only_torch_and_quickly() -> None:
    script = (
        "import sys, time, torch\n"
        "before, started = set(sys.modules), time.process_time()\n"
        "import torchrope\n"
        "seconds = time.process_time() - started\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "assert new <= {'torchrope', 'torch'}, new\n"
        "assert seconds < 0.5, seconds\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("command", ["compare", "train", "study"])
def test_help_shows_the_settings_of_the_data_set_named(run: Run, command: str) -> None:
    hidden = {"data.augment"} | ({"data.fold"} if command == "compare" else set())
    studies = ["accuracy"] if command == "study" else []
    _, printed, _ = run(command, *studies, "--data", "volumes", "--help", "data")
    shown = re.findall(r"^  (?:--\w+(?: \w+)?, )?--(data\.[\w.]+)", printed, re.MULTILINE)
    assert {*shown} == {f"data.{setting}" for setting in options(settings_of("volumes"))} - hidden


def test_file_names_the_data_set_whose_recipe_and_settings_apply(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {name: motion, train_size: 24}\noptim: {epochs: 1}\n")
    found = configuration(run, "compare", "--config", tmp_path / "mine.yaml", "--model.depth=1")
    assert (found["data"]["name"], found["data"]["train_size"], found["optim"]["epochs"]) == ("motion", 24, 1)
    assert (found["model"]["depth"], found["model"]["patch_size"]) == (1, [1, 4, 4])  # typed, and of the recipe
    (tmp_path / "mine.yaml").write_text("data: {name: volumes, frames: 4}\n")
    assert configuration(run, "compare", "--config", tmp_path / "mine.yaml")["data"]["frames"] == 4


def test_settings_of_other_studies_are_refused_unless_they_are_defaults(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrope_lab.engine.study.run_study", lambda *_, **__: None)
    status, _, told = run("study", "accuracy,shuffle", "--probes.steps", "3", "--dry-run")
    assert status == 2
    assert told == "torchrope study: --probes.steps is for the studies probes, got accuracy, shuffle\n"
    assert run("study", "accuracy,probes", "--probes.steps", "3", "--dry-run")[0] == 0
    file = tmp_path / "all.yaml"  # with the settings of other studies
    file.write_text(run("study", "accuracy", "--print_config")[1])
    assert run("study", "accuracy", "--config", file, "--dry-run")[0] == 0


def test_compare_counts_encodings_and_seeds(run: Run, tmp_path: Path) -> None:
    _, printed, _ = run("compare", *SMALL, "--encodings=none,mixed", "--folds=3", "--dry-run", "--out", tmp_path)
    assert printed.startswith("comparing 2 encodings x 1 seed x 3 folds on digits; ")


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_every_command_has_debug_in_its_help(command: str, run: Run) -> None:
    assert "\n  --debug " in run(command, "--help")[1]


@pytest.mark.parametrize("arguments", ["train --epochs many", "evaluate /nowhere", "recipes digit"])
def test_debug_shows_the_traceback_of_a_mistake_above_its_line(arguments: str, run: Run) -> None:
    status, _, line = run(*arguments.split())
    assert status == 2
    assert "Traceback" not in line
    status, _, error = run(*arguments.split(), "--debug")
    assert status == 2
    assert error.startswith("Traceback (most recent call last):")
    assert error.endswith(f"\n{line}")


@pytest.mark.parametrize(
    "bug",
    [lambda _: int("x"), lambda _: np.zeros(3).reshape(2), lambda _: {}["x"], lambda _: len(3), lambda _: [].x],
    ids=["ValueError", "ValueError of numpy", "KeyError", "TypeError", "AttributeError"],
)
def test_bug_keeps_its_traceback(
    bug: Callable[[object], int], run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli._COMMANDS, "recipes", bug)
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError)):
        run("recipes")
    assert capsys.readouterr().err == ""


def test_options_of_the_trainer_that_change_results_are_stored_and_checked(run: Run, tmp_path: Path) -> None:
    command = [*TRAIN, "--encoding=none", "--out", tmp_path / "run"]
    assert run(*command, "--trainer.limit_train_batches=1")[0] == 0
    config = tmp_path / "run" / "config.yaml"
    assert yaml.safe_load(config.read_text())["trainer"] == {"limit_train_batches": 1}
    status, _, error = run(*command)
    assert status == 2
    assert "trainer.limit_train_batches 1 instead of None" in error
    again = ["train", "--config", config, "--out", tmp_path / "run"]
    assert run(*again, "--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=3")[0] == 0


@pytest.mark.parametrize(
    "limit", ["max_steps 0", "max_steps 1", "max_time 00:00:00:00", "limit_train_batches 0", "limit_train_batches 0.0"]
)
def test_training_without_a_finished_epoch_is_one_line(limit: str, run: Run, tmp_path: Path) -> None:
    option, value = f"--trainer.{limit}".split()
    command = [*TRAIN, "--data.batch_size=5", "--encoding=none", "--out", tmp_path / "run"]
    status, told, error = run(*command, option, value)
    rule = f"training must finish one epoch or more, got none with {option} {value}"
    assert (status, error) == (2, f"torchrope train: {rule}\n")
    assert "trained:" not in told
    if limit != "max_steps 1":  # without a checkpoint other settings may start in the folder
        assert run(*command)[0] == 0


def test_epoch_that_max_steps_cuts_has_no_row_of_the_validation_before_it(run: Run, tmp_path: Path) -> None:
    command = [*TRAIN, "--data.batch_size=5", "--epochs=2", "--encoding=none", "--out", tmp_path / "run"]
    status, _, error = run(*command, "--trainer.max_steps=17")
    assert status == 0, error
    assert [row["epoch"] for row in read_curve(tmp_path / "run" / "curve.csv")] == [1]
