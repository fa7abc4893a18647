"""Atomic file writes with killed and concurrent processes, and limits on nested and expanding content."""

import errno
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from torchrope.files import holds_files, parse_json, read_mapping, write_new, write_whole

WRITER = """
import os, sys
from pathlib import Path
from torchrope.files import write_whole
def stop(_):
    print("written", flush=True)
    sys.stdin.readline()
os.fsync = stop
write_whole(Path(sys.argv[1]), sys.argv[2])
"""


def stopped_writer(path: Path, content: str) -> "subprocess.Popen[str]":
    """Start a process that has written a temporary file and waits for input before it replaces the old one."""
    command = [sys.executable, "-c", WRITER, str(path), content]
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


def test_write_new_writes_a_file_once(tmp_path: Path) -> None:
    assert write_new(tmp_path / "new" / "a.txt", "first")
    assert not write_new(tmp_path / "new" / "a.txt", "second")
    assert (tmp_path / "new" / "a.txt").read_text() == "first"
    assert names(tmp_path / "new") == {"a.txt"}


def test_write_new_without_links_writes_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    test_write_new_writes_a_file_once(tmp_path)


def test_write_new_below_a_file_raises_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a file, not a folder")
    with pytest.raises(OSError, match=r"^cannot write .*b.txt: (File exists|Not a directory)$"):
        write_new(tmp_path / "a.txt" / "b.txt", "never written")


def test_one_of_several_threads_writes_a_new_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda number: write_new(tmp_path / "a.txt", str(number)), range(40)))
    assert sum(written) == 1
    assert (tmp_path / "a.txt").read_text() == str(written.index(True))
    assert names(tmp_path) == {"a.txt"}


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


def test_holds_files_ignores_interrupted_writes(tmp_path: Path) -> None:
    assert not holds_files(tmp_path / "missing")
    with stopped_writer(tmp_path / "a.txt", "half") as writer:
        assert not holds_files(tmp_path)
        writer.kill()
    assert names(tmp_path)
    assert not holds_files(tmp_path)
    (tmp_path / ".notes").write_text("mine")
    assert holds_files(tmp_path)


# Content


@pytest.mark.parametrize("wrapped", ["{}", '{"rows": %s}'])
@pytest.mark.parametrize("levels", [150, 100_000])
def test_parse_json_refuses_deep_nesting(wrapped: str, levels: int) -> None:
    text = wrapped.replace("{}", "%s") % ("[" * levels + "]" * levels)
    with pytest.raises(ValueError, match=r"^nesting must be at most 100 levels deep, got more$"):
        parse_json(text)


def test_parse_json_refuses_integers_above_64_bits() -> None:
    assert parse_json(f"[{2**63}, {-(2**63)}, true, 1e300, NaN]", lambda _: None) == [
        2**63,
        -(2**63),
        True,
        1e300,
        None,
    ]
    with pytest.raises(ValueError, match=r"^integers must fit into 64 bits, got one of 1329$"):
        parse_json('{"a": [{"b": 1' + 400 * "0" + "}]}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "a value must not contain itself, got an alias of an ancestor in line 1"),
        ("x: 1\na: &a {b: {c: *a}}", "a value must not contain itself, got an alias of an ancestor in line 2"),
        ("&a [[*a]]", "a value must not contain itself, got an alias of an ancestor in line 1"),
        ("a: " + "[" * 150 + "]" * 150, "nesting must be at most 100 levels deep, got more"),
        ("a: " + "[" * 5000 + "]" * 5000, "nesting must be at most 100 levels deep, got more"),
        ("a: 1" + 400 * "0", "integers must fit into 64 bits, got one of 1329"),
    ],
)
def test_read_mapping_refuses_unbounded_yaml_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"^settings must be valid JSON or YAML, got .*mine\.yaml: {message}$"):
        read_mapping(tmp_path / "mine.yaml", "settings")


@pytest.mark.parametrize("repeated", ["[%s]", "{<<: [%s]}"], ids=["lists", "merged"])
def test_read_mapping_refuses_aliases_that_multiply(tmp_path: Path, repeated: str) -> None:
    lines = ["l0: &l0 {name: lol}"]
    lines += [f"l{i}: &l{i} " + repeated % ", ".join(9 * [f"*l{i - 1}"]) for i in range(1, 30)]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"values must be at most 100000 with aliases expanded, got more$"):
        read_mapping(tmp_path / "mine.yaml", "settings")


def test_read_mapping_reads_aliases(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n")
    assert read_mapping(tmp_path / "mine.yaml", "settings") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }
