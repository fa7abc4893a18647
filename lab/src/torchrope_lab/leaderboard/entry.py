"""Entry of the leaderboard: the measurements of one run, as JSON that others can check, merge and rank."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchrope_lab.files import read_mapping
from torchrope_lab.results import DataFacts, write_json
from torchrope_lab.schema import (
    ClosedUnit,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    build,
    require,
    short,
)

SCHEMA = 2
Rights = Sequence[str]
"""For each seed, whether each validation example is right: one bit each, in base64."""
Condition = Literal["trained", "half", "shuffled", "largest"]
"""How models were trained and evaluated: as the table says, with half of these epochs, with shuffled patches or
positions, at the largest input size."""


@dataclass(frozen=True)
class TuningRun:
    """One training run for choosing learning rates.

    Attributes:
        rate: Factor on the learning rate of the set.
        top1: Accuracy on the held-out training examples.
        encoding_rate: Factor on the set's `optim.encoding_lr`.
    """

    rate: PositiveFloat
    top1: ClosedUnit
    encoding_rate: PositiveFloat = 1.0


@dataclass(frozen=True)
class EncodingResults:
    """Measurements of one encoding on one data set.

    Attributes:
        right: Answers after training, packed.
        losses: Validation losses of the same runs; None for a loss that is not finite.
        seconds: Training times of the same runs.
        runs: Names of their folders.
        epochs: Epochs of each; None if unknown.
        rate, encoding_rate: Factors on the set's learning rate and on its `optim.encoding_lr`.
        half: Answers after half the epochs; empty if these were not trained.
        shuffled: Answers with shuffled patches or positions.
        sizes: Answers at other input sizes, by size as "48×48".
        tuning: Runs for choosing the learning rates.
        steps: Seconds of a training step over those of "none", in each round.
    """

    right: Rights
    losses: Sequence[float | None]
    seconds: Sequence[PositiveFloat]
    runs: Sequence[str]
    epochs: PositiveInt | None = None
    rate: PositiveFloat = 1.0
    encoding_rate: PositiveFloat = 1.0
    half: Rights = ()
    shuffled: Rights = ()
    sizes: Mapping[str, Rights] = field(default_factory=dict)
    tuning: Sequence[TuningRun] = ()
    steps: Sequence[PositiveFloat] = ()

    def __post_init__(self) -> None:
        seeds = len(self.right)
        for name in ("losses", "seconds", "runs"):
            count = len(getattr(self, name))
            require(count == seeds, f"{name} must be one for each of {seeds} seeds", count)
        for name, rights in self.answers().items():
            require(len(rights) in (0, seeds), f"answers {name} must be of {seeds} seeds", len(rights))
        chosen = (self.rate, self.encoding_rate)
        best = best_rates(self.tuning) if self.tuning else chosen
        require(best == chosen, f"rate and encoding_rate must be the best of tuning, {best}", chosen)

    def answers(self) -> dict[str, Rights]:
        """Return the packed answers by condition, and by size for other sizes; empty where they were not measured."""
        largest = max(self.sizes, key=lambda size: math.prod(map(int, re.findall(r"\d+", size))), default="")
        conditions = {"trained": self.right, "half": self.half, "shuffled": self.shuffled}
        return {**self.sizes, **conditions, "largest": self.sizes.get(largest, ())}


@dataclass(frozen=True)
class DataSetResults:
    """Measurements on one data set.

    Attributes:
        name: Name in the plan.
        arguments: The options that set data, model and schedule.
        data: Description of the data.
        fingerprint: Hash of the sample names and labels, see `DataModule.fingerprint`.
        chance: Accuracy of the best constant prediction.
        encodings: Measurements of each encoding, by name.
        command, commit, date: Provenance of the numbers.
        machine, versions: The machine and the package versions that they were measured with.
        notes: Omissions, with reasons.
        protocol: What was tried and trained for each encoding, in words; "" if unknown.
        trainings, core_seconds: Number of training runs, including those for tuning and with fewer epochs, and their
            total training time multiplied by the number of threads of each. Of merged sets that share some encodings
            they are upper bounds.

    Raises:
        ValueError: numbers contradict each other or are impossible.
    """

    name: str
    arguments: str
    data: DataFacts
    fingerprint: str
    chance: float
    encodings: Mapping[str, EncodingResults]
    command: str
    commit: str | None
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    notes: Sequence[str] = ()
    protocol: str = ""
    trainings: NonNegativeInt = 0
    core_seconds: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        classes, seeds = self.data.num_classes or 0, {name: len(each.right) for name, each in self.encodings.items()}
        shown = f"{self.examples} of {classes}"
        require(self.examples > 0 and classes > 1, "a set must have examples of two classes or more", shown)
        in_range = 1 / classes - 1e-9 <= self.chance < 1
        require(in_range, f"chance must be from 1 / {classes} to below 1", self.chance)
        require(bool(seeds), "a set must have an encoding", "none")
        one_number = len({*seeds.values()}) == 1 and min(seeds.values()) > 0
        require(one_number, "a set must have the same number of seeds for each encoding, one or more", seeds)
        for name, each in self.encodings.items():
            for condition, rights in each.answers().items():
                unpack(rights, self.examples, f"{name}: answers {condition}")
            for share, loss in zip(unpack(each.right, self.examples).mean(axis=1), each.losses, strict=True):
                # The true class of a wrong answer has at most probability 1/2: a cross-entropy of at least ln 2.
                least = (1 - share) * math.log(2)
                rule = f"{name}: a validation loss with {100 * share:.1f} % right must be {least:.4g} or more"
                require(loss is None or least - 1e-6 <= loss < math.inf, rule, loss)

    @property
    def examples(self) -> int:
        """Number of validation examples."""
        return self.data.val or 0

    @property
    def seeds(self) -> int:
        """Training runs of each encoding."""
        return len(next(iter(self.encodings.values())).right)

    @property
    def source(self) -> str:
        """Date, commit and processor of the measurements."""
        return f"{self.date}, commit {self.commit or 'unknown'}, {self.machine.get('cpu', 'unknown processor')}"

    def rights(self, condition: Condition = "trained") -> dict[str, np.ndarray]:
        """Return correct (1) and wrong (0) answers `(seeds, examples)` by encoding, of those that have them."""
        packed = {name: each.answers().get(condition) for name, each in self.encodings.items()}
        return {name: unpack(rights, self.examples) for name, rights in packed.items() if rights}


@dataclass(frozen=True)
class Entry:
    """A run of a plan.

    Attributes:
        title: Title of its plan.
        author: Name of the person or group who ran it.
        sets: Measurements, by data set.
    """

    title: str
    author: str
    sets: Sequence[DataSetResults]

    def write(self, path: Path) -> None:
        """Write JSON with a digest, atomically."""
        stored = {"schema": SCHEMA, **asdict(self)}
        write_json(path, {**stored, "digest": digest(stored)})

    @staticmethod
    def read(path: Path) -> "Entry":
        """Read an entry that `write` wrote, and check everything that does not need its data.

        Raises:
            ValueError: it is not an entry, was altered, or is inconsistent; the message names the file and the set.
        """
        stored = read_mapping(path, "an entry")
        try:
            require(stored.get("schema") in (1, SCHEMA), f"schema must be 1 or {SCHEMA}", stored.get("schema"))
            stored_digest = stored.pop("digest", None)
            rule = "digest must be that of the content, which was altered or cut"
            content = {**stored}
            entry = build(Entry, _as_version_2(stored) if stored["schema"] == 1 else stored, "entry")
            require(stored_digest == digest(content), rule, stored_digest)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return entry


def _as_version_2(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry in which all encodings of a set have one learning rate and one number of epochs.

    Answers after training on a subset and at an encoding's own rate have no place in version 2.
    """

    def converted(results: Any) -> Any:
        if not isinstance(results, dict) or not isinstance(results.get("encodings"), dict):
            return results
        found = re.search(r"--(?:optim\.)?epochs[ =](\d+)", str(results.get("arguments")))
        common: dict[str, Any] = {"rate": results.get("rate"), "epochs": int(found[1]) if found else None, "tuning": []}
        encodings = {
            name: {**each, **common} if isinstance(each, dict) else each for name, each in results["encodings"].items()
        }
        return {**results, "encodings": encodings, "core_seconds": results.get("seconds")}

    sets = stored.get("sets")
    return {**stored, "sets": [converted(results) for results in sets] if isinstance(sets, list) else sets}


def pack(right: Sequence[Any] | np.ndarray) -> str:
    """Pack right (1) or wrong (0) of every example into one bit each, in base64.

    Example:
        >>> pack([1, 0, 1, 1])
        'sA=='
    """
    return base64.b64encode(np.packbits(np.asarray(right, dtype=bool)).tobytes()).decode("ascii")


def unpack(packed: Rights, examples: int, what: str = "answers") -> np.ndarray:
    """Unpack what `pack` returned for each seed, to zeros and ones `(seeds, examples)`.

    Raises:
        ValueError: text is not base64 or does not hold one bit for each example and zeros after them; the message
            begins with `what`.
    """
    whole = math.ceil(examples / 8)
    rows = np.zeros((len(packed), 8 * whole))
    for row, text in zip(rows, packed, strict=True):
        try:
            held = base64.b64decode(text, validate=True)
        except ValueError:
            raise ValueError(f"{what} must be base64, got {short(text)}") from None
        require(len(held) == whole, f"{what} must hold {examples} bits in {whole} bytes", f"{len(held)} bytes")
        row[:] = np.unpackbits(np.frombuffer(held, dtype=np.uint8))
    require(not rows[:, examples:].any(), f"{what} must have zeros after its {examples} bits", "others")
    return rows[:, :examples]


def digest(stored: Mapping[str, Any]) -> str:
    """Compute SHA-256 of the content: it detects accidental changes, not forgery."""
    text = json.dumps(stored, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()


def best_rates(tuning: Sequence[TuningRun]) -> tuple[float, float]:
    """Return the factors on both learning rates of the highest accuracy; of equal ones, those nearest to 1."""

    def order(run: TuningRun) -> tuple[float, ...]:
        return -round(run.top1, 9), abs(math.log(run.rate)) + abs(math.log(run.encoding_rate)), run.rate

    best = min(tuning, key=order)
    return best.rate, best.encoding_rate


def merge(entries: Sequence[Entry]) -> Entry:
    """Merge entries into one: all data sets, with the encodings of all entries.

    Provenance of a data set is that of the first entry; notes say that of encodings which others add.

    Raises:
        ValueError: two have the same set with other data, options or seeds, or other numbers of the same encoding.
    """
    if not entries:
        raise ValueError("entries must be 1 or more, got 0")
    sets: dict[str, DataSetResults] = {}
    for entry in entries:
        for each in entry.sets:
            sets[each.name] = _joined(sets[each.name], each) if each.name in sets else each
    authors = dict.fromkeys(entry.author for entry in entries)
    return Entry(entries[0].title, ", ".join(authors), list(sets.values()))


def updated(new: DataSetResults, earlier: DataSetResults) -> DataSetResults:
    """Add encodings of an earlier measurement of a set to a new one, whose numbers replace the earlier ones."""
    kept = {
        name: each
        for name, each in earlier.encodings.items()
        if name not in new.encodings or each.right == new.encodings[name].right
    }
    both = _joined(new, replace(earlier, encodings=kept)) if kept else new
    return replace(both, encodings={**new.encodings, **both.encodings})


def _joined(one: DataSetResults, other: DataSetResults) -> DataSetResults:
    for what in ("fingerprint", "arguments", "seeds"):
        require_same(one.name, what, getattr(one, what), getattr(other, what))
    for name in {*one.encodings} & {*other.encodings}:
        same = one.encodings[name].right == other.encodings[name].right
        require(same, f"entries of set {one.name} must have the same answers of {name}", "different ones")
    added = [name for name in other.encodings if name not in one.encodings]
    if not added:
        return replace(one, notes=[*dict.fromkeys([*one.notes, *other.notes])])
    apart = {*one.encodings} - {*other.encodings}
    told = {name for note in other.notes for name in note.partition(": ")[0].split(", ")}  # provenance of merged ones
    new = [name for name in added if name not in told]
    source = [f"{', '.join(new)}: {other.source}."] if new else []
    if new and one.protocol and other.protocol and one.protocol != other.protocol:
        source.append(f"{', '.join(new)}: trained by another protocol, {other.protocol} instead of {one.protocol}.")
    return replace(
        one,
        encodings={**other.encodings, **one.encodings},
        notes=[*dict.fromkeys([*one.notes, *source, *other.notes])],
        trainings=other.trainings + (one.trainings if apart else 0),
        core_seconds=other.core_seconds + (one.core_seconds if apart else 0.0),
    )


def require_same(data_set: str, what: str, one: object, other: object) -> None:
    """Raise ValueError if two entries of a data set cannot be compared."""
    require(one == other, f"entries of set {data_set} must have the same {what}", f"{short(one)} and {short(other)}")
