"""Entries of the leaderboard: round trip, consistency checks, and merging."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchrope_lab.cli import main
from torchrope_lab.leaderboard.entry import (
    DataSetResults,
    EncodingResults,
    Entry,
    TuningRun,
    best_rates,
    digest,
    merge,
    pack,
    unpack,
    updated,
)
from torchrope_lab.leaderboard.run import write_results
from torchrope_lab.results import DataFacts, StudyResult

EXAMPLES, SEEDS = 101, 3


def of_encoding(accuracy: float, seed: int = 0, **others: Any) -> EncodingResults:
    right = np.random.default_rng(seed).random((SEEDS, EXAMPLES)) < accuracy
    return EncodingResults(
        right=[pack(row) for row in right],
        losses=[1.0] * SEEDS,
        seconds=[2.0] * SEEDS,
        runs=[f"run{index}" for index in range(SEEDS)],
        **others,
    )


def of_set(name: str = "digits", **others: Any) -> DataSetResults:
    encodings = {each: of_encoding(0.5 + 0.1 * index, index) for index, each in enumerate(("none", "axial", "mixed"))}
    return DataSetResults(
        **{
            "name": name,
            "arguments": "--data digits",
            "data": DataFacts("digits", "Digits", axes=["y", "x"], num_classes=10, train=1000, val=EXAMPLES),
            "fingerprint": "f00d",
            "chance": 0.11,
            "encodings": encodings,
            "command": "torchrope leaderboard",
            "commit": "abc",
            "date": "2026-01-01",
            "machine": {"cpu": "one"},
            "versions": {"torch": "2"},
            **others,
        }
    )


def altered(entry: Entry, path: Path, change: Callable[[Any], None]) -> Path:
    """An entry whose content was changed by somebody who knows how the digest is made."""
    entry.write(path)
    stored = json.loads(path.read_text())
    stored.pop("digest")
    change(stored["sets"][0])
    path.write_text(json.dumps({**stored, "digest": digest(stored)}))
    return path


def test_entry_round_trip(tmp_path: Path) -> None:
    tuned = of_encoding(
        0.9,
        5,
        rate=3.0,
        encoding_rate=10.0,
        epochs=8,
        half=of_encoding(0.6).right,
        tuning=[TuningRun(1.0, 0.5), TuningRun(3.0, 0.6), TuningRun(3.0, 0.7, 10.0)],
        sizes={"16×16": of_encoding(0.2).right},
    )
    entry = Entry("a plan", "me", [of_set(), of_set("other", encodings={"none": tuned, "axial": of_encoding(0.3)})])
    entry.write(tmp_path / "entry.json")
    Entry.read(tmp_path / "entry.json").write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads((tmp_path / "entry.json").read_text())
    for found, given in zip(Entry.read(tmp_path / "entry.json").sets, entry.sets, strict=True):
        assert {name: right.tolist() for name, right in found.rights().items()} == {
            name: right.tolist() for name, right in given.rights().items()
        }


@pytest.mark.parametrize("examples", [1, 7, 8, 9, 101])
def test_packed_answers_are_the_answers(examples: int) -> None:
    right = np.random.default_rng(examples).random((2, examples)) < 0.5
    assert np.array_equal(unpack([pack(row) for row in right], examples), right)


def test_altered_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "entry.json"
    Entry("a plan", "me", [of_set()]).write(file)
    text = file.read_text()
    at = text.index(of_set().encodings["mixed"].right[0])
    file.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    with pytest.raises(ValueError, match="digest must be that of the content"):
        Entry.read(file)


def _set(name: str, value: Any, encoding: str | None = None) -> Callable[[Any], None]:
    def change(stored: Any) -> None:
        (stored if encoding is None else stored["encodings"][encoding])[name] = value

    return change


def _two_seeds(stored: Any) -> None:
    of_none = stored["encodings"]["none"]
    of_none |= {name: of_none[name][:2] for name in ("right", "losses", "seconds", "runs")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set("losses", [0.01] * SEEDS, "none"),
            "none: a validation loss with .* right must be .* or more, got 0.01",
        ),
        (_set("losses", [-1.0] * SEEDS, "none"), "a validation loss with .* right must be .* or more, got -1.0"),
        (_set("right", ["/w=="] * SEEDS, "none"), "none: answers trained must hold 101 bits in 13 bytes, got 1 bytes"),
        (_set("right", [pack([1] * 104)] * SEEDS, "none"), "none: answers trained must have zeros after its 101 bits"),
        (_set("right", ["?" * 26] * SEEDS, "none"), "none: answers trained must be base64"),
        (_set("right", [], "none"), "losses must be one for each of 0 seeds, got 3"),
        (_two_seeds, "the same number of seeds for each encoding, one or more, got .*'none': 2"),
        (_set("seconds", [0.0] * SEEDS, "none"), r"seconds\[0\] must be above 0, got 0.0"),
        (_set("runs", ["one"], "none"), "runs must be one for each of 3 seeds, got 1"),
        (_set("half", [pack([1] * EXAMPLES)], "none"), "answers half must be of 3 seeds, got 1"),
        (_set("epochs", 0, "none"), "epochs must be 1 or more, got 0"),
        (_set("sizes", {"16×16": ["?" * 26] * SEEDS}, "none"), "answers 16×16 must be base64"),
        (_set("sizes", {"16×16": [pack([1] * EXAMPLES)]}, "none"), "answers 16×16 must be of 3 seeds, got 1"),
        (_set("tuning", [{"rate": 1.0, "top1": 1.5}], "none"), r"tuning\[0\].top1 must be between 0 and 1, got 1.5"),
        (
            _set("tuning", [{"rate": 1.0, "top1": 0.2}, {"rate": 3.0, "top1": 0.4}], "none"),
            r"rate and encoding_rate must be the best of tuning, \(3.0, 1.0\), got \(1.0, 1.0\)",
        ),
        (_set("chance", 0.05), "chance must be from 1 / 10 to below 1, got 0.05"),
        (_set("encodings", {}), "a set must have an encoding, got none"),
        (_set("encodings", {"none": 3}), "entry.sets\\[0\\].encodings.none must be an object, got 3"),
        (_set("fingerprint", None), "fingerprint must be text"),
    ],
)
def test_inconsistent_entry_is_refused_in_one_line(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    file = altered(Entry("a plan", "me", [of_set()]), tmp_path / "entry.json", change)
    with pytest.raises(ValueError, match=message) as raised:
        Entry.read(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "sets": [3]}', '{"schema": 3}', "\x00"]
)
def test_file_that_is_not_an_entry_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "entry.json").write_text(text)
    with pytest.raises(ValueError, match=r"entry\.json"):
        Entry.read(tmp_path / "entry.json")


def test_least_loss_is_that_of_wrong_answers_at_one_half() -> None:
    found = of_encoding(0.5)
    least = [float(each) * math.log(2) for each in 1 - unpack(found.right, EXAMPLES).mean(axis=1)]
    of_set(encodings={"none": replace(found, losses=least)})
    with pytest.raises(ValueError, match="a validation loss with"):
        of_set(encodings={"none": replace(found, losses=[0.99 * each for each in least])})


def test_entries_merge_by_data_set_and_encoding() -> None:
    one, other = of_set(), of_set("motion")
    more = of_set(encodings={"liere": of_encoding(0.7, 9), "none": one.encodings["none"]})
    merged = merge([Entry("a plan", "me", [one, other]), Entry("a plan", "you", [more])])
    assert [found.name for found in merged.sets] == ["digits", "motion"]
    assert {*merged.sets[0].encodings} == {"none", "axial", "mixed", "liere"}
    assert merged.author == "me, you"


def test_merged_trainings_count_once_and_provenance_of_all_is_kept() -> None:
    one = of_set(trainings=100, core_seconds=3600.0)
    mine = of_set(
        encodings={"golden": of_encoding(0.5, 7)}, trainings=5, core_seconds=60.0, commit="xyz", machine={"cpu": "two"}
    )
    [merged] = merge([Entry("a plan", "me", [mine]), Entry("a plan", "they", [one])]).sets
    assert (merged.trainings, merged.core_seconds) == (105, 3660.0)
    assert merged.source == "2026-01-01, commit xyz, two"
    assert "none, axial, mixed: 2026-01-01, commit abc, one." in merged.notes
    [twice] = merge([Entry("a plan", "me", [part]) for part in (mine, merged)]).sets
    assert [note for note in twice.notes if note.startswith("none")] == merged.notes
    for parts in ([one, one], [merged, one], [one, merged], [merged, mine]):
        [again] = merge([Entry("a plan", "me", [part]) for part in parts]).sets
        assert again.trainings == max(part.trainings for part in parts)


def test_encodings_trained_by_another_protocol_are_named() -> None:
    mine = of_set(encodings={"golden": of_encoding(0.5, 7)}, protocol="epochs up to × 4")
    for protocol, said in (("epochs up to × 2", True), ("epochs up to × 4", False), ("", False)):
        [merged] = merge([Entry("a plan", "they", [of_set(protocol=protocol)]), Entry("a plan", "me", [mine])]).sets
        note = "golden: trained by another protocol, epochs up to × 4 instead of epochs up to × 2."
        assert (note in merged.notes) == said


def test_new_numbers_of_an_encoding_replace_earlier_ones_of_the_folder() -> None:
    new = of_set(encodings={"axial": of_encoding(0.9, 7)})
    both = updated(new, of_set())
    assert [*both.encodings] == ["axial", "none", "mixed"]
    assert both.encodings["axial"] == new.encodings["axial"]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"fingerprint": "beef"}, "the same fingerprint, got 'f00d' and 'beef'"),
        ({"arguments": "--data digits --epochs 99"}, "the same arguments"),
        ({"encodings": {"none": of_encoding(0.9, 3)}}, "must have the same answers of none, got different ones"),
    ],
)
def test_entries_that_contradict_each_other_do_not_merge(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge([Entry("a plan", "me", [of_set()]), Entry("a plan", "you", [of_set(**others)])])


def test_best_rates_are_those_of_the_highest_accuracy_and_of_equal_ones_the_nearest_to_one() -> None:
    assert best_rates([TuningRun(0.3, 0.5), TuningRun(1.0, 0.6), TuningRun(1.0, 0.7, 10.0)]) == (1.0, 10.0)
    assert best_rates([TuningRun(0.1, 0.5), TuningRun(2.0, 0.5), TuningRun(2.0, 0.5, 0.1)]) == (2.0, 1.0)


VERSION_1 = Path(__file__).with_name("entry-version-1.json")
"""An entry that the first version of the format had: 32 encodings on eight data sets, one rate for all of a set."""


def test_entry_of_the_first_version_is_read_and_written_as_the_second(tmp_path: Path) -> None:
    stored = json.loads(VERSION_1.read_text())
    entry = Entry.read(VERSION_1)
    assert [found.name for found in entry.sets] == [each["name"] for each in stored["sets"]]
    for found, each in zip(entry.sets, stored["sets"], strict=True):
        assert found.core_seconds == each["seconds"]
        for name, results in found.encodings.items():
            assert list(results.right) == each["encodings"][name]["right"]
            assert results.rate == each["rate"]
            assert f"--epochs {results.epochs}" in found.arguments
    entry.write(tmp_path / "entry.json")
    again = Entry.read(tmp_path / "entry.json")
    again.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "entry.json").read_text()
    assert json.loads((tmp_path / "again.json").read_text())["schema"] == 2


def test_altered_entry_of_the_first_version_is_refused(tmp_path: Path) -> None:
    stored = json.loads(VERSION_1.read_text())
    stored["sets"][0]["rate"] = 9.0
    (tmp_path / "entry.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="digest must be that of the content"):
        Entry.read(tmp_path / "entry.json")


def test_entry_of_the_first_version_has_a_report_and_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["leaderboard", "--entries", str(VERSION_1), "--out", str(out)]) == 0, capsys.readouterr().err
    assert main(["report", str(out)]) == 0
    assert "RoPE-Mixed" in (out / "report" / "index.html").read_text()
    digits = replace(Entry.read(VERSION_1), sets=[each for each in Entry.read(VERSION_1).sets if each.name == "digits"])
    digits.write(tmp_path / "digits.json")
    assert main(["leaderboard", "--check", str(tmp_path / "digits.json")]) == 0
    assert "same data as on this machine" in capsys.readouterr().out


UNKNOWN = ("absent_package.turns:Isotropic", "learned+absent_package:Isotropic:8", "json:Absent")


def entry_files(folder: Path, *names: str) -> list[Path]:
    """Two entries of one set, the second with encodings that cannot be imported."""
    others = {name: of_encoding(0.9, seed) for seed, name in enumerate(names, 5)}
    mine = of_set(encodings={"axial": of_encoding(0.6, 1)} | others)
    Entry("a plan", "me", [of_set()]).write(folder / "a.json")
    Entry("a plan", "you", [mine]).write(folder / "b.json")
    return [folder / "a.json", folder / "b.json"]


def test_entry_with_encodings_that_cannot_be_imported_is_ranked(tmp_path: Path) -> None:
    entries = [Entry.read(file) for file in entry_files(tmp_path, *UNKNOWN)]
    result = StudyResult.read(write_results(tmp_path, None, entries, "torchrope leaderboard"))
    titles = {row["name"]: row["encoding"] for row in result.findings.tables[0].rows}
    assert [titles[name] for name in UNKNOWN] == ["Isotropic", "learned APE + Isotropic, blocks of 8", "Absent"]


@pytest.mark.slow
def test_entries_command_imports_no_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = ",".join(map(str, entry_files(tmp_path, UNKNOWN[0])))
    assert main(["leaderboard", "--entries", entries, "--out", str(tmp_path / "m")]) == 0, capsys.readouterr().err
    merged = Entry.read(tmp_path / "m" / "entry" / "entry.json")
    assert [*merged.sets[0].encodings] == ["axial", UNKNOWN[0], "none", "mixed"]
