"""Processes that compute one call at a time, and that no end of this process leaves behind."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from torchrope_lab.training.signals import EXIT_INTERRUPTED, Interrupted


@contextmanager
def processes(number: int, call: Callable[..., Any], prepare: Callable[[int], None]) -> Iterator[list[Connection]]:
    """Start processes for a block; behind it none is left.

    If `Interrupted` is raised in the block, they get SIGTERM and may save before they end. After any other exception
    they end at once: all watch a pipe that is closed here, or when this process dies.

    Args:
        number: Number of processes.
        call: Called in a process with the arguments sent to it, a tuple; it can be pickled, as its results.
        prepare: Called first in each process with its number.

    Returns:
        The connection of each process: send the arguments, then use `receive`.
    """
    context, method = multiprocessing.get_context("spawn"), multiprocessing.get_start_method()
    watched, stop = context.Pipe(duplex=False)
    connections: list[Connection] = []
    started = []
    try:
        with _ctrl_c_ignored():  # inherited by the processes, from their first moment
            for index in range(number):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, watched, call, prepare, index, method))
                process.start()
                theirs.close()  # the connection ends with the process
                connections.append(ours)
                started.append(process)
        yield connections
    except Interrupted:
        for process in started:
            process.terminate()
        raise
    except BaseException:
        stop.close()
        raise
    finally:
        try:
            for connection in connections:
                connection.close()  # ends processes that wait
            for process in started:
                process.join()
        finally:
            stop.close()


def receive(connection: Connection, what: str) -> Any:
    """Return the result of a call, or raise its error.

    Args:
        connection: Connection of its process.
        what: The call in words, for messages.

    Raises:
        ValueError: the call raised ValueError or OSError.
        RuntimeError: it raised another exception, whose traceback is in the message.
        ChildProcessError: its process was killed.
    """
    try:
        answer = connection.recv()
    except (EOFError, OSError):
        received = "a killed one, perhaps for lack of memory; the same command resumes"
        raise ChildProcessError(f"the process must live until the end of {what}, got {received}") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only that may change it
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(
    connection: Connection,
    watched: Connection,
    call: Callable[..., Any],
    prepare: Callable[[int], None],
    number: int,
    method: str,
) -> None:
    """Send the results of the calls whose arguments are received, until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _end(EXIT_INTERRUPTED))  # a run in training replaces it, to save
    multiprocessing.set_start_method(method, force=True)  # of processes that load data; a spawned one would spawn them
    threading.Thread(target=_end_when_closed, args=(watched,), daemon=True).start()
    prepare(number)
    with suppress(EOFError, OSError):
        while True:
            connection.send(_answer(call, connection.recv()))


def _answer(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the result of a call, or its error as one that can be pickled."""
    try:
        return call(*arguments)
    except Interrupted:
        _end(EXIT_INTERRUPTED)
    except (ValueError, OSError) as error:
        return ValueError(str(error))
    except Exception:
        return RuntimeError(traceback.format_exc())


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
