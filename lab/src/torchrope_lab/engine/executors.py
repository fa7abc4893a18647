"""Calls in this process, in processes of this machine or as Slurm jobs, with handles that are polled and cancelled."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from torchrope_lab.mistakes import Mistake, is_mistake
from torchrope_lab.training.signals import EXIT_INTERRUPTED, Interrupted

Item = TypeVar("Item")

GRACE_SECONDS = 30.0
"""Time in which a cancelled call may save, between SIGTERM and SIGKILL."""
_PENDING = object()


class Handle(Protocol):
    """A submitted call; the jobs of submitit are handles too."""

    def done(self) -> bool:
        """Whether it has ended."""

    def result(self) -> Any:
        """Return its result, or `Failure`."""

    def cancel(self) -> object:
        """Stop it, or do not start it."""


class Postponed:
    """A call in this process, which starts when its result is asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result = call

    def done(self) -> bool:
        """Whether asking for the result waits for no other process."""
        return True

    def cancel(self) -> None:
        """Do nothing: it has not started."""


@dataclass(frozen=True)
class Failure:
    """An error in another process, as its result."""

    error: BaseException  # a user's mistake or a signal as it was; a bug as RuntimeError with its traceback
    trace: str = ""  # of a mistake in the other process


class RemoteTraceback(Exception):
    """The traceback of an error in another process, for `__cause__`."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class LocalHandle:
    """A call of a `LocalExecutor`."""

    def __init__(self, executor: "LocalExecutor", call: Callable[[], Any]) -> None:
        self.executor = executor
        self.call = call
        self.answer: Any = _PENDING

    def done(self) -> bool:
        """Whether it has ended; starts no call, as that of an ended one may have failed."""
        self.executor.collect(0)
        return self.answer is not _PENDING

    def result(self) -> Any:
        """Return the result of the call, or `Failure`."""
        while not self.done():
            self.executor.wait(1)
        return self.answer

    def cancel(self) -> None:
        """Remove the call from the queue, or send SIGTERM to its process, which may save before it ends."""
        self.executor.cancel(self)


class LocalExecutor(AbstractContextManager["LocalExecutor"]):
    """Runs calls in processes of this machine, which live for many calls."""

    # Before it imports torch, each process gets one GPU of those that this process may use, or its share of the cores.
    # It leads a process group, so that Ctrl-C reaches this process alone. If the block is left by an
    # exception, all processes get SIGTERM, and SIGKILL after `GRACE_SECONDS` or at another Ctrl-C; they also end if
    # this process dies.

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.waiting: deque[LocalHandle] = deque()
        self.running: dict[Connection, LocalHandle] = {}
        self.workers: dict[Connection, Any] = {}
        self.slots: dict[Connection, int] = {}
        self.stopping: list[Any] = []
        self._context = multiprocessing.get_context("spawn")
        self._watched, self._stop = self._context.Pipe(duplex=False)

    def submit(self, call: Callable[[], Any]) -> LocalHandle:
        """Queue a call; it and its result can be pickled."""
        handle = LocalHandle(self, call)
        self.waiting.append(handle)
        return handle

    def wait(self, seconds: float) -> None:
        """Start queued calls, and wait until one has ended, at most for so many seconds."""
        while self.waiting and len(self.running) < self.processes:
            idle = next((connection for connection in self.workers if connection not in self.running), None)
            connection = self._start() if idle is None else idle
            handle = self.running[connection] = self.waiting.popleft()
            with suppress(BrokenPipeError):  # its process has ended, which is noticed below
                connection.send(handle.call)
        self.collect(seconds)

    def collect(self, seconds: float) -> None:
        """Wait until a running call has ended, at most for so many seconds, and store its result."""
        ready = wait([*self.running], seconds)
        for connection in [each for each in self.running if each in ready]:
            handle = self.running.pop(connection)
            try:
                handle.answer = connection.recv()
            except (EOFError, OSError):
                process = self.workers.pop(connection)
                process.join()
                killed = "a killed one, perhaps for lack of memory: lower --parallel; the same command resumes"
                rule = f"the process of a run must not be killed before its end, got {killed}"
                stopped = process.exitcode == EXIT_INTERRUPTED
                handle.answer = Failure(Interrupted(EXIT_INTERRUPTED) if stopped else ChildProcessError(rule))

    def cancel(self, handle: LocalHandle) -> None:
        """Remove a call from the queue, or send SIGTERM to its process."""
        if handle in self.waiting:
            self.waiting.remove(handle)
        for connection, running in list(self.running.items()):
            if running is handle:
                del self.running[connection]
                process = self.workers.pop(connection)
                process.terminate()
                self.stopping.append(process)
        if handle.answer is _PENDING:
            handle.answer = Failure(CancelledError())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in [*self.waiting, *self.running.values()]:
            handle.cancel()
        for connection in self.workers:
            connection.close()  # ends processes that wait
        end = time.monotonic() + GRACE_SECONDS
        try:
            for process in (*self.workers.values(), *self.stopping):
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in (*self.workers.values(), *self.stopping):
                if process.is_alive():
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                process.join()
            self._stop.close()

    def _start(self) -> Connection:
        """Start a process with its devices, threads and a connection."""
        ours, theirs = self._context.Pipe()
        taken = {self.slots[connection] for connection in self.workers}
        self.slots[ours] = next(slot for slot in range(self.processes) if slot not in taken)
        arguments = (theirs, self._watched, multiprocessing.get_start_method())
        process = self._context.Process(target=_serve, args=arguments)
        with _environment(**_share(self.slots[ours], self.processes)), _ctrl_c_ignored():
            process.start()
        theirs.close()  # the connection ends with the process
        self.workers[ours] = process
        return ours


def run_all(
    handles: dict[Handle, Item],
    on_result: Callable[[Item, Any], None],
    *,
    wait: Callable[[], object],
    on_poll: Callable[[Sequence[Item]], None] = lambda _: None,
) -> None:
    """Pass each call's subject and result to `on_result`; an error or a signal cancels calls that have not ended."""
    left = dict(handles)
    try:
        while left:
            on_poll(list(left.values()))
            ended = [handle for handle in left if handle.done()]
            for handle in ended:
                on_result(left.pop(handle), result_of(handle))
            if left and not ended:
                wait()
    except BaseException:
        for handle in left:
            handle.cancel()
        raise


def result_of(handle: Handle) -> Any:
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
        if not is_mistake(error):
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


def _serve(connection: Connection, watched: Connection, method: str) -> None:
    """Answer the calls that are received, until the connection is closed."""
    with suppress(OSError, AttributeError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _end(EXIT_INTERRUPTED))  # a run in training replaces it, to save
    multiprocessing.set_start_method(method, force=True)  # of processes that load data; a spawned one would spawn them
    threading.Thread(target=_end_when_closed, args=(watched,), daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            connection.send(_run_or_end(connection.recv()))


def _run_or_end(call: Callable[[], Any]) -> Any:
    """Return what `run_in_job` returns; end this process if a signal stopped the call."""
    try:
        return run_in_job(call)
    except Interrupted:
        _end(EXIT_INTERRUPTED)


def _end_when_closed(watched: Connection) -> None:
    """End this process when the other end of a pipe is closed."""
    with suppress(EOFError, OSError):
        watched.recv()
    _end(1)


def _end(status: int) -> NoReturn:
    """End this process and its own processes, which load data, at once."""
    try:
        for child in multiprocessing.active_children():
            child.kill()  # not joined: their death would raise in the main thread, which prints it
    finally:
        os._exit(status)
