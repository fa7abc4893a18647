"""Files that one of several processes writes, and limits on nested and expanding content."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchrope.files import UNFINISHED
from torchrope_lab.files import holds_files, read_mapping, write_new


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


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


def test_holds_files_ignores_interrupted_writes(tmp_path: Path) -> None:
    assert not holds_files(tmp_path / "missing")
    assert not holds_files(tmp_path)
    (tmp_path / f"{UNFINISHED}abcd1234").write_text("half")
    assert not holds_files(tmp_path)
    (tmp_path / ".notes").write_text("mine")
    assert holds_files(tmp_path)


def test_read_mapping_reads_aliases(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n")
    assert read_mapping(tmp_path / "mine.yaml", "settings") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }
