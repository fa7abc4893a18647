"""Calls in processes of this machine or as Slurm jobs, with handles that are polled and cancelled."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from torchrope_lab.mistakes import IN_ONE_LINE, Mistake
from torchrope_lab.training.signals import EXIT_INTERRUPTED, Interrupted

Item = TypeVar("Item")

GRACE_SECONDS = 30.0
"""Time in which a stopped call may save, between SIGTERM and SIGKILL."""
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Failure:
    """An error in another process, as its result."""

    error: BaseException  # a user's mistake or a signal as it was; a bug as RuntimeError with its traceback
    trace: str = ""  # of a mistake in the other process


class RemoteTraceback(Exception):
    """The traceback of an error in another process, for `__cause__`."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Processes(AbstractContextManager["Processes"]):
    """Runs calls in processes of this machine, which live for many calls; a thread waits for each."""

    # Before it imports torch, each process gets one GPU of those that this process may use, or its share of the cores.
    # It leads a process group, so that Ctrl-C reaches this process alone. After a failure no call starts. If the block
    # is left by an exception, all processes get SIGTERM, and SIGKILL after `GRACE_SECONDS` or at another Ctrl-C; they
    # also end if this process dies.

    def __init__(self, count: int) -> None:
        self.count = count
        self.processes: list[Any] = []
        self.idle: SimpleQueue[tuple[Any, Connection]] = SimpleQueue()
        self.threads = ThreadPoolExecutor(count)
        self.stopped = False
        self._context = multiprocessing.get_context("spawn")

    def submit(self, call: Callable[[], Any], name: str) -> Future[Any]:
        """Queue a call, named in errors; it and its result can be pickled."""
        if len(self.processes) < self.count:
            self._start()
        return self.threads.submit(self._run, call, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        end = time.monotonic() + GRACE_SECONDS
        try:
            for process in self.processes:
                process.terminate()
            for process in self.processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in self.processes:
                if process.is_alive():
                    with suppress(ProcessLookupError, PermissionError, AttributeError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                process.join()

    def _start(self) -> None:
        """Start a process with its devices, threads and a connection."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, multiprocessing.get_start_method()))
        with _environment(**_share(len(self.processes), self.count)), _ctrl_c_ignored():
            process.start()
        theirs.close()  # the connection ends with the process
        self.processes.append(process)
        self.idle.put((process, ours))

    def _run(self, call: Callable[[], Any], name: str) -> Any:
        """Return the result of a call in an idle process, or `Failure`."""
        process, connection = self.idle.get()
        try:
            if self.stopped:
                return Failure(CancelledError())
            connection.send(call)
            result = connection.recv()
        except (EOFError, OSError):
            result = Failure(CancelledError() if self.stopped else _death(process, name))
        finally:
            self.idle.put((process, connection))
        self.stopped |= isinstance(result, Failure)
        return result


def run_all(
    handles: dict[Any, Item],
    on_result: Callable[[Item, Any], None],
    on_poll: Callable[[Sequence[Item]], None] = lambda _: None,
) -> None:
    """Pass each call's subject and result to `on_result`; an error or a signal cancels calls that have not ended."""
    # `handles` are futures, or jobs of submitit, which have the same methods.
    left = dict(handles)
    try:
        while left:
            on_poll(list(left.values()))
            ended = [handle for handle in left if handle.done()]
            for handle in ended:
                on_result(left.pop(handle), result_of(handle))
            if left and not ended:
                time.sleep(POLL_SECONDS)
    except BaseException:
        for handle in left:
            handle.cancel()
        raise


def _death(process: Any, name: str) -> BaseException:
    """Return the error of a process that ended before its call did."""
    process.join()
    if process.exitcode == EXIT_INTERRUPTED:
        return Interrupted(EXIT_INTERRUPTED)
    killed = "a killed one, perhaps for lack of memory: lower --parallel; the same command resumes"
    return ChildProcessError(f"the process of {name} must not be killed before its end, got {killed}")


def result_of(handle: Any) -> Any:
    """Return the result of a call, or raise its error: a user's mistake as ValueError, a bug with its traceback."""
    result = handle.result()
    if isinstance(result, Failure):
        raise result.error from (RemoteTraceback(result.trace) if result.trace else None)
    return result


def run_in_job(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or `Failure`, which can be pickled."""
    try:
        return call()
    except Exception as error:
        trace = traceback.format_exc()
        if not isinstance(error, IN_ONE_LINE):
            return Failure(RuntimeError(trace))
        with suppress(Exception):
            return pickle.loads(pickle.dumps(Failure(error, trace)))
        return Failure(Mistake(str(error)), trace)


def visible_devices() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count, chosen = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if chosen is None else chosen.split(",")[:count]


def _share(number: int, processes: int) -> dict[str, str]:
    """Return the environment of a process: a GPU if there are any, and its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = visible_devices()
    gpu = {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
    return {"OMP_NUM_THREADS": str(max(1, cores // processes)), **gpu}


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Ignore Ctrl-C in processes started in the block, from their first moment."""
    if threading.current_thread() is not threading.main_thread():  # only that may change it
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(connection: Connection, method: str) -> None:
    """Answer the calls that are received, until the connection is closed."""
    with suppress(OSError, AttributeError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _end(EXIT_INTERRUPTED))  # a run in training replaces it, to save
    multiprocessing.set_start_method(method, force=True)  # of processes that load data; a spawned one would spawn them
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            connection.send(_run_or_end(connection.recv()))


def _run_or_end(call: Callable[[], Any]) -> Any:
    """Return what `run_in_job` returns; end this process if a signal stopped the call."""
    try:
        return run_in_job(call)
    except Interrupted:
        _end(EXIT_INTERRUPTED)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    _end(1)


def _end(status: int) -> NoReturn:
    """End this process and its own processes, which load data, at once."""
    try:
        for child in multiprocessing.active_children():
            child.kill()  # not joined: their death would raise in the main thread, which prints it
    finally:
        os._exit(status)
