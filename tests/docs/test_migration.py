"""The page of migration names every former name of the library, and places and options that exist."""

import inspect
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import torchrope as tr
from torchrope_lab.cli import main

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text(encoding="utf-8")
NAMES, ARGUMENTS, COMMANDS = (
    [row.strip("| ").split(" | ") for row in table.splitlines()[2:] if row.startswith("|")]
    for table in re.split(r"\n\n(?=\| )", PAGE)[1:]
)


def quoted(cell: str) -> list[str]:
    """Return what stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def places() -> dict[str, str]:
    """Return each former name of the page with its place."""
    found = {}
    for old, new in NAMES:
        names, targets = quoted(old), [target for target in quoted(new) if "=" not in target]
        if targets[0].endswith("…"):
            targets = [targets[0].replace("…", name) for name in names]
        elif len(targets) == 1:
            targets *= len(names)
        found.update(zip(names, targets, strict=True))
    return found


def test_former_names_are_those_that_the_library_knows() -> None:
    assert places() == tr._MOVED


@pytest.mark.parametrize(("name", "place"), places().items())
def test_former_name_raises_and_its_place_exists(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=rf"^torchrope\.{name} is torchrope\.{re.escape(place)}$"):
        getattr(tr, name)
    assert reduce(getattr, place.split("."), tr) is not None


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (tr.ViT, ("num_classes", "spacing", "origin"), ("num_outputs", "positions")),
        (tr.Transformer, ("dim_in", "scale", "periods", "extent"), ("in_channels", "positions", "input_size")),
        (tr.Lattice, (), ("spacing", "origin", "unit", "periods", "per", "train_sizes", "cell", "patch_size")),
        (tr.encodings.GoldenGateRoPE, ("resting",), ("zero_fraction",)),
        (tr.swap, ("keep_ape",), ("init", "keep_position_tables")),
        (tr.rotations.Planar, ("halves",), ("interleaved",)),
        (tr.rotate, (), ("layout",)),
    ],
)
def test_arguments_are_renamed_as_the_page_says(function: Any, old: tuple[str, ...], new: tuple[str, ...]) -> None:
    arguments = {*inspect.signature(function).parameters}
    assert {*new} <= arguments
    assert not {*old} & arguments
    said = " ".join(old_cell + new_cell for old_cell, new_cell in ARGUMENTS)
    assert all(re.search(rf"\b{name}\b", said) for name in (*old, *new))


@pytest.mark.parametrize("name", ["zero_", "load_generators", "check_positions"])
def test_attributes_of_encodings_exist(name: str) -> None:
    assert any(f"`{name}" in new for _, new in ARGUMENTS)
    assert any(hasattr(kind, name) for kind in (tr.Encoding, tr.encodings.AbsoluteEncoding, tr.encodings.ScoreBias))


def helped(*arguments: str) -> int | str | None:
    """Return the exit status of a command."""
    try:
        return main([*arguments])
    except SystemExit as end:
        return end.code


def test_options_are_renamed_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert helped("train", "--data", "points", "--help", "all") in (0, None)
    known = capsys.readouterr().out
    pairs = [pair for row in COMMANDS for pair in zip(*map(quoted, row), strict=False) if pair[0].startswith("--")]
    assert len(pairs) == 4
    for old, new in pairs:
        assert re.search(rf"{re.escape(new)}(?!\w)" if "*" not in new else re.escape(new[:-1]), known), new
        assert old.rstrip("*") not in known, old


@pytest.mark.parametrize("command", ["benchmark", "bench", "leaderboard", "speed"])
def test_commands_are_renamed_as_the_page_says(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    is_new = f"`torchrope {command}`" in COMMANDS[0][1]
    assert (helped(command, "--help") in (0, None)) == is_new
    assert (f"usage: torchrope {command}" in capsys.readouterr().out) == is_new
