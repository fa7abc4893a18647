"""Entry of the leaderboard: the measurements of one run, as JSON that others can check, merge and rank."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from torchrope_lab.files import read_mapping
from torchrope_lab.results import DataFacts, write_json
from torchrope_lab.schema import (
    ClosedUnit,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    at_least,
    build,
    require,
    short,
)

SCHEMA = 1
Rights = Sequence[str]
"""For each seed, whether each validation example is right: one bit each, in base64."""
Condition = Literal["trained", "small", "shuffled", "smallest", "largest", "own"]
"""How a model was trained and evaluated; `Answers` describes each."""


@dataclass(frozen=True)
class TuningRun:
    """One training run for choosing the learning rate.

    Attributes:
        rate: Factor on the learning rate of the set.
        top1: Accuracy on the held-out training examples.
    """

    rate: PositiveFloat
    top1: ClosedUnit


@dataclass(frozen=True)
class EncodingResults:
    """Measurements of one encoding on one data set.

    Attributes:
        right: Answers at the common learning rate, packed.
        losses: Validation losses of the same runs; None for a loss that is not finite.
        seconds: Training times of the same runs.
        runs: Names of their folders.
        shuffled: Answers with shuffled patches or positions.
        sizes: Answers at other input sizes, by size as "48×48".
        small: Answers after training on a subset.
        tuning: Runs for choosing the learning rate.
        own_rate: Best learning-rate factor for this encoding, None if it is the common one.
        own: Answers at own_rate.
        steps: Seconds of a training step over those of the first encoding, in each round.
        parameters: Number of parameters of the encoding.
        rise: How much the validation accuracy rose over the last fifth of epochs, the mean over seeds, as a share of 1;
            None if it was not recorded.
    """

    right: Rights
    losses: Sequence[float | None]
    seconds: Sequence[PositiveFloat]
    runs: Sequence[str]
    shuffled: Rights = ()
    sizes: Mapping[str, Rights] = field(default_factory=dict)
    small: Rights = ()
    tuning: Sequence[TuningRun] = ()
    own_rate: PositiveFloat | None = None
    own: Rights = ()
    steps: Sequence[PositiveFloat] = ()
    parameters: int = 0
    rise: Annotated[float, at_least(-1, 1)] | None = None

    def __post_init__(self) -> None:
        seeds = len(self.right)
        for name in ("losses", "seconds", "runs"):
            count = len(getattr(self, name))
            require(count == seeds, f"{name} must be one for each of {seeds} seeds", count)
        for name, rights in self.answers().items():
            require(len(rights) in (0, seeds), f"answers {name} must be of {seeds} seeds", len(rights))
        together = (self.own_rate is None) == (not self.own)
        require(together, "own and own_rate must be given together", f"{'own' if self.own else 'own_rate'} only")

    @property
    def tuned(self) -> dict[float, float]:
        """Accuracy on the held-out training examples by factor on the learning rate."""
        return {each.rate: each.top1 for each in self.tuning}

    def answers(self) -> dict[str, Rights]:
        """Return the packed answers by condition, and by size for other sizes; empty where they were not measured."""
        sizes = sorted(self.sizes, key=lambda size: math.prod(map(int, re.findall(r"\d+", size))))
        ends = {"smallest": self.sizes[sizes[0]], "largest": self.sizes[sizes[-1]]} if sizes else {}
        trained = {"trained": self.right, "small": self.small, "shuffled": self.shuffled, "own": self.own}
        return {**self.sizes, **trained, **ends}


@dataclass(frozen=True)
class DataSetResults:
    """Measurements on one data set.

    Attributes:
        name: Name in the plan.
        arguments: The options that set data, model and schedule.
        data: Description of the data.
        fingerprint: Hash of the sample names and labels, see `DataModule.fingerprint`.
        chance: Accuracy of the best constant prediction.
        rate: Factor on the learning rate, common to all encodings and chosen on held-out training examples.
        encodings: Measurements of each encoding, by name.
        command, commit, date: Provenance of the numbers.
        machine, versions: The machine and the package versions that they were measured with.
        notes: Omissions, with reasons.
        trainings, seconds: Number of training runs, including tuning, subsets and own rates, and their total training
            time.

    Raises:
        ValueError: numbers contradict each other or are impossible.
    """

    name: str
    arguments: str
    data: DataFacts
    fingerprint: str
    chance: float
    rate: float
    encodings: Mapping[str, EncodingResults]
    command: str
    commit: str | None
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    notes: Sequence[str] = ()
    trainings: NonNegativeInt = 0
    seconds: NonNegativeFloat = 0.0

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
        tuned = [each.tuned for each in self.encodings.values() if each.tuning]
        chosen = best_rate(tuned) if tuned else self.rate
        require(chosen == self.rate, f"rate must be the best of tuning, {chosen:g}", self.rate)

    @property
    def examples(self) -> int:
        """Number of validation examples."""
        return self.data.val or 0

    @property
    def epochs(self) -> int | None:
        """Epochs of each training; None if the options do not name them."""
        found = re.search(r"--(?:optim\.)?epochs[ =](\d+)", self.arguments)
        return int(found[1]) if found else None

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
            require(stored.get("schema") == SCHEMA, f"schema must be {SCHEMA}", stored.get("schema"))
            entry = build(Entry, stored, "entry")
            stored_digest = stored.pop("digest", None)
            rule = "digest must be that of the content, which was altered or cut"
            require(stored_digest == digest(stored), rule, stored_digest)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return entry


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


def best_rate(tuned: Sequence[Mapping[float, float]]) -> float:
    """Return the rate of the highest mean accuracy among those that all have; ties: nearest to 1."""
    rates = set.intersection(*(set(each) for each in tuned))
    if not rates:
        raise ValueError("tuning must have a rate that all encodings were trained with, got none")
    mean = {rate: round(sum(each[rate] for each in tuned) / len(tuned), 9) for rate in rates}
    return min(rates, key=lambda rate: (-mean[rate], abs(math.log(rate)), rate))


def merge(entries: Sequence[Entry]) -> Entry:
    """Merge entries into one: all data sets, with the encodings of all entries.

    Raises:
        ValueError: two have the same set with other data, options, seeds or learning rate, or other numbers of the same
            encoding.
    """
    if not entries:
        raise ValueError("entries must be one or more, got none")
    sets: dict[str, DataSetResults] = {}
    for entry in entries:
        for each in entry.sets:
            sets[each.name] = _joined(sets[each.name], each) if each.name in sets else each
    authors = dict.fromkeys(entry.author for entry in entries)
    return Entry(entries[0].title, ", ".join(authors), list(sets.values()))


def _joined(one: DataSetResults, other: DataSetResults) -> DataSetResults:
    rule = f"entries of set {one.name} must have the same"
    for what in ("fingerprint", "arguments", "rate"):
        values = [getattr(each, what) for each in (one, other)]
        require(values[0] == values[1], f"{rule} {what}", " and ".join(map(short, values)))
    for name in {*one.encodings} & {*other.encodings}:
        same = one.encodings[name].right == other.encodings[name].right
        require(same, f"{rule} answers of {name}", "different ones")
    seeds = {len(each.right) for found in (one, other) for each in found.encodings.values()}
    require(len(seeds) == 1, f"{rule} number of seeds", sorted(seeds))
    return replace(
        one,
        encodings={**other.encodings, **one.encodings},
        notes=[*dict.fromkeys([*one.notes, *other.notes])],
        trainings=one.trainings + other.trainings,
        seconds=one.seconds + other.seconds,
    )
