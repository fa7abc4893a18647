"""Atomic file writes with killed and concurrent processes."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchrope import files
from torchrope.files import write_whole

WRITER = """
import os, runpy, sys
from pathlib import Path
write_whole = runpy.run_path(sys.argv[3])["write_whole"]  # without torch, whose import takes seconds
def stop(_):
    print("written", flush=True)
    sys.stdin.readline()
os.fsync = stop
write_whole(Path(sys.argv[1]), sys.argv[2])
"""


def stopped_writer(path: Path, content: str) -> "subprocess.Popen[str]":
    """Start a process that has written a temporary file and waits for input before it replaces the old one."""
    command = [sys.executable, "-c", WRITER, str(path), content, files.__file__]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    return writer


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_write_whole_removes_files_of_killed_processes(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.txt", "old")
    for name in ("a.txt", "b.txt"):
        with stopped_writer(tmp_path / name, "half") as writer:
            writer.kill()
    assert len(names(tmp_path)) > 1
    assert (tmp_path / "a.txt").read_text() == "old"
    write_whole(tmp_path / "c.txt", "new")
    assert names(tmp_path) == {"a.txt", "c.txt"}


def test_write_whole_keeps_files_of_running_processes(tmp_path: Path) -> None:
    with stopped_writer(tmp_path / "a.txt", "theirs") as first, stopped_writer(tmp_path / "b.txt", "theirs") as second:
        write_whole(tmp_path / "a.txt", "mine")
        assert (tmp_path / "a.txt").read_text() == "mine"
        for writer in (first, second):
            writer.communicate("\n")
            assert writer.returncode == 0
    assert names(tmp_path) == {"a.txt", "b.txt"}
    assert (tmp_path / "a.txt").read_text() == (tmp_path / "b.txt").read_text() == "theirs"


def test_write_whole_retries_if_its_file_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, taken = fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        if not taken:  # another process cleaned up between creation and lock
            taken.append(file.name)
            os.unlink(file.name)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    write_whole(tmp_path / "a.txt", "whole")
    assert taken
    assert names(tmp_path) == {"a.txt"}
    assert (tmp_path / "a.txt").read_text() == "whole"


def test_write_whole_without_locks_keeps_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped_writer(tmp_path / "a.txt", "theirs") as writer:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
        write_whole(tmp_path / "a.txt", "mine")
        assert (tmp_path / "a.txt").read_text() == "mine"
        writer.communicate("\n")
        assert writer.returncode == 0
    assert (tmp_path / "a.txt").read_text() == "theirs"


def test_write_whole_cleans_up_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a.txt", "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"^cannot write .*a\.txt: No space left on device$"):
        write_whole(tmp_path / "a.txt", "new")
    assert names(tmp_path) == {"a.txt"}
    assert (tmp_path / "a.txt").read_text() == "old"
