"""Tests of --parallel: a failed run, Ctrl-C, SIGTERM and a killed process end all processes, and keep what is done."""

import json
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trainings
from small_runs import lab_process

from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine import executors, workers
from torchrope_lab.mistakes import IN_ONE_LINE
from torchrope_lab.training.signals import EXIT_INTERRUPTED, Interrupted


@dataclass(frozen=True)
class Named:
    """A job of a run that is only a name."""

    run: str

    def __str__(self) -> str:
        return self.run


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Train runs in two processes; `on_poll` is called while they train."""
    monkeypatch.setattr(workers, "run_job", trainings.train_job)
    monkeypatch.setattr(executors, "POLL_SECONDS", 0.01)
    done: list[str] = []

    def start(*runs: str, on_poll: Callable[[], Any] = lambda: None) -> list[str]:
        store = SimpleNamespace(folder=tmp_path, curve=lambda _: [])
        progress = SimpleNamespace(follow=lambda *_: on_poll(), end=lambda *_: None)
        config = SimpleNamespace(slurm=None, parallel=2)
        jobs = [Named(run) for run in runs]
        workers.run_jobs(jobs, store, None, config, progress, done.append)  # type: ignore[arg-type]
        return done

    return start


def started(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.pid")}


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        multiprocessing.connection.wait([], 0.05)


def alive(folder: Path) -> list[str]:
    """Processes that train or load, by their files; those that load are killed, but not waited for."""
    loading = {path.name: int(path.read_text()) for path in folder.glob("*.loading")}
    with suppress(AssertionError):
        wait_until(lambda: not any(map(is_alive, loading.values())), 10)
    training = {path.name: int(path.read_text()) for path in folder.glob("*.pid")}
    return [name for name, pid in (loading | training).items() if is_alive(pid)]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def when_started(folder: Path, *runs: str, then: Callable[[], Any]) -> Callable[[], None]:
    """Call a function once when runs have started."""

    def look() -> None:
        if not look.called and {*runs} <= started(folder):  # type: ignore[attr-defined]
            look.called = True  # type: ignore[attr-defined]
            then()

    look.called = False  # type: ignore[attr-defined]
    return look


def test_processes_train_all_runs_one_after_the_other(train, tmp_path):
    names = [f"short-{number}" for number in range(5)]
    assert sorted(train(*names)) == names
    assert len({path.read_text() for path in tmp_path.glob("*.pid")}) <= 2
    assert alive(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("mistake", ValueError, r"^an encoding must be one of .*got 'mixd'"),
        pytest.param("bug", RuntimeError, r"KeyError: 'bug'", marks=pytest.mark.slow),
        pytest.param(
            "killed", ChildProcessError, "process of killed must not be killed before its end", marks=pytest.mark.slow
        ),
        pytest.param("stopped", Interrupted, r"^75$", marks=pytest.mark.slow),
    ],
)
def test_failed_run_stops_the_others_and_starts_none(train, tmp_path, wrong, error, message):
    with pytest.raises(error, match=message):
        train("short", "long", wrong, "short-2")
    assert started(tmp_path) - {"long"} == {"short", wrong}
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_processes_get_devices_and_threads_before_they_import_torch(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    with executors.Processes(2) as processes:
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        handles = [processes.submit(partial(trainings.environment, names), "environment") for _ in range(2)]
        assert sorted(handle.result() for handle in handles) == [("2", "3"), ("5", "3")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5,7"


@pytest.mark.slow
def test_jobs_of_submitit_are_handles(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", str(Path(trainings.__file__).parent), prepend=os.pathsep)
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=10)
    names = ["short-1", "short-2", "wrong"]
    calls = [partial(trainings.train, name, tmp_path) for name in names]
    jobs = dict(zip(executor.map_array(executors.run_in_job, calls), names, strict=True))
    monkeypatch.setattr(executors, "POLL_SECONDS", 0.05)
    done: list[str] = []
    with pytest.raises(RuntimeError, match="ValueError: dim must be divisible by 4, got 3"):
        executors.run_all(jobs, lambda name, _: done.append(name))
    assert set(done) <= {"short-1", "short-2"}
    for job in jobs:
        job.wait()
    assert "wrong" in started(tmp_path)


def as_in_a_process(call: Callable[[], Any]) -> Future[Any]:
    handle: Future[Any] = Future()
    handle.set_result(pickle.loads(pickle.dumps(executors.run_in_job(call))))
    return handle


@pytest.mark.parametrize(("name", "kind"), [("bug", "KeyError: 'bug'"), ("wrong", "ValueError: dim must be divis")])
def test_bug_in_a_process_is_shown_with_its_traceback(tmp_path, name, kind):
    """An error that no check of torchrope raised is a bug, also if it is a ValueError."""
    handle = as_in_a_process(partial(trainings.train, name, tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*trainings\.py") as raised:
        executors.result_of(handle)
    assert kind in str(raised.value)
    assert not isinstance(raised.value, IN_ONE_LINE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(resolve_encoding, "mixd"), "mixd"),
        (partial(open, "/nowhere/at-all"), "No such file or directory: '/nowhere/at-all'"),
    ],
)
def test_mistake_in_a_process_is_one_line_and_its_traceback_the_cause(call, message):
    with pytest.raises((ValueError, OSError), match=message) as raised:
        executors.result_of(as_in_a_process(call))
    assert isinstance(raised.value, IN_ONE_LINE)
    assert "\n" not in str(raised.value)
    assert "Traceback" in str(raised.value.__cause__)


@pytest.mark.slow
def test_ctrl_c_stops_all_processes_and_starts_none(train, tmp_path):
    interrupt = when_started(tmp_path, "long-1", "long-2", then=lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train("long-1", "long-2", "short", on_poll=interrupt)
    assert started(tmp_path) == {"long-1", "long-2"}
    assert alive(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_sigterm_lets_all_processes_save_and_starts_none(train, tmp_path, capsys, number):
    before = signal.getsignal(number)
    stop = when_started(tmp_path, "long-1", "long-2", then=lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted) as stopped:
        train("long-1", "long-2", "short", on_poll=stop)
    assert stopped.value.code == EXIT_INTERRUPTED == 75
    assert started(tmp_path) == {"long-1", "long-2"}
    assert {path.stem for path in tmp_path.glob("*.saved")} == {"long-1", "long-2"}
    assert alive(tmp_path) == []
    assert capsys.readouterr().err == "stopped by a signal; run the same command to resume\n"
    assert signal.getsignal(number) == before


# The whole command

SMALL = {"train_size": 80, "val_size": 40, "batch_size": 10, "workers": 1}
MODEL = {"dim": 16, "depth": 1, "num_heads": 2, "mlp_dim": 16}
ENDS = {
    "ctrl-c": (signal.SIGINT, False, 130),
    "ctrl-c of the group": (signal.SIGINT, True, 130),
    "sigterm": (signal.SIGTERM, False, 75),
    "sigterm of the group": (signal.SIGTERM, True, 75),
    "kill": (signal.SIGKILL, False, -signal.SIGKILL),
}


def of_session(pid: int) -> set[int]:
    """Living processes of a session: those that train lead groups of their own."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and int(session) == pid:
            found.add(int(stat.parent.name))
    return found


def compare(out: Path, *options: str, **of_process: Any) -> subprocess.Popen:
    """Start a small comparison."""
    small = [f"--data.{name}={value}" for name, value in SMALL.items()]
    small += [f"--model.{name}={value}" for name, value in MODEL.items()]
    return lab_process("compare", *small, "--seeds=1", f"--out={out}", *options, **of_process)


def finish(process: subprocess.Popen) -> None:
    printed, _ = process.communicate()
    assert process.returncode == 0, printed


def numbers(out: Path) -> dict[str, Any]:
    stored = {path.parent.name: json.loads(path.read_text()) for path in out.glob("runs/*/result.json")}
    return {name: (result["predicted"], pytest.approx(result["val_loss"], rel=1e-5)) for name, result in stored.items()}


@pytest.mark.slow
def test_killed_folds_resume_with_other_settings_that_change_no_number(tmp_path):
    asked = ["--encodings=none,axial", "--folds=2", "--epochs=3"]
    finish(compare(tmp_path / "whole", *asked))
    killed = compare(tmp_path / "killed", *asked, "--parallel=2", stdout=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.glob("killed/runs/*/curve.csv")))
    killed.kill()
    killed.wait()
    assert len(list(tmp_path.glob("killed/runs/*/result.json"))) < 4
    changed = ["--data.workers=0", "--parallel=3", "--run.logs=csv", "--run.checkpoint_every=2"]
    finish(compare(tmp_path / "killed", *asked, *changed))
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert len(numbers(tmp_path / "whole")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_stopped_comparison_leaves_no_process_and_resumes(tmp_path, name):
    number, whole_group, status = ENDS[name]
    options = ["--parallel=2", "--encodings=none,axial,mixed", "--epochs=4000"]
    process = compare(tmp_path, *options, stderr=subprocess.PIPE, start_new_session=True)
    try:
        curves = tmp_path / "runs"
        wait_until(lambda: len([path for path in curves.glob("*/curve.csv") if path.read_text().count("\n") > 1]) == 2)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        _, error = process.communicate(timeout=60)
        assert process.returncode == status, error
        wait_until(lambda: not of_session(process.pid), 20)  # those that load data notice the death of a killed one
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in error
    assert "leaked" not in error
    assert len(list(curves.iterdir())) - (curves / ".locks").exists() == 2
    assert ("to resume" in error) == (number != signal.SIGKILL)
    saved = list(curves.glob("*/within-epoch.ckpt"))  # unless the signal came at the end of an epoch
    assert len(saved) <= 2 if number != signal.SIGKILL else not saved
