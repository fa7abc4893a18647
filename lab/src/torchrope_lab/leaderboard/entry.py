"""Entry of the leaderboard: the measurements of one run, as JSON that others can check, merge and rank."""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchrope_lab.files import parse_json
from torchrope_lab.results import DataFacts, write_json
from torchrope_lab.schema import build, check_type, short

SCHEMA = 1
Rights = Sequence[str]
"""For each seed, whether each validation example is right: one bit each, in base64."""


@dataclass(frozen=True)
class Tuned:
    """One training run for choosing the learning rate.

    Attributes:
        rate: Factor on the learning rate of the set.
        top1: Accuracy on the held-out training examples.
    """

    rate: float
    top1: float


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
    """

    right: Rights
    losses: Sequence[float | None]
    seconds: Sequence[float]
    runs: Sequence[str]
    shuffled: Rights = ()
    sizes: Mapping[str, Rights] = field(default_factory=dict)
    small: Rights = ()
    tuning: Sequence[Tuned] = ()
    own_rate: float | None = None
    own: Rights = ()
    steps: Sequence[float] = ()
    parameters: int = 0


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
    trainings: int = 0
    seconds: float = 0.0

    @property
    def examples(self) -> int:
        """Number of validation examples."""
        return self.data.val or 0

    def rights(self, what: str = "right") -> dict[str, np.ndarray]:
        """Return correct (1) and wrong (0) answers `(seeds, examples)` by encoding, of encodings that have them."""
        found = {name: getattr(each, what) for name, each in self.encodings.items()}
        return {name: unpack(each, self.examples) for name, each in found.items() if each}


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
        try:
            stored = parse_json(path.read_text(encoding="utf-8"))
            check_type(stored, dict, "entry")
            if stored.get("schema") != SCHEMA:
                raise ValueError(f"schema must be {SCHEMA}, got {short(stored.get('schema'))}")
            entry = build(Entry, stored, "entry")
            stored_digest = stored.pop("digest", None)
            if stored_digest != digest(stored):
                raise ValueError(
                    f"digest must be that of the content, which was altered or cut, got {short(stored_digest)}"
                )
            for each in entry.sets:
                check_set(each)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: {error}") from None
        return entry


def pack(right: Sequence[Any] | np.ndarray) -> str:
    """Pack right (1) or wrong (0) of every example into one bit each, in base64.

    Example:
        >>> pack([1, 0, 1, 1])
        'sA=='
    """
    return base64.b64encode(np.packbits(np.asarray(right, dtype=bool)).tobytes()).decode("ascii")


def unpack(packed: Rights, examples: int) -> np.ndarray:
    """Unpack what `pack` returned for each seed, to zeros and ones `(seeds, examples)`."""
    rows = [np.frombuffer(base64.b64decode(row), dtype=np.uint8) for row in packed]
    return np.stack([np.unpackbits(row)[:examples] for row in rows]).astype(float)


def digest(stored: Mapping[str, Any]) -> str:
    """Compute SHA-256 of the content: it detects accidental changes, not forgery."""
    text = json.dumps(stored, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()


def check_set(found: DataSetResults) -> None:
    """Raise ValueError if the numbers of a data set contradict each other or are impossible."""
    where = f"set {found.name}"
    classes = found.data.num_classes or 0
    if found.examples < 1 or classes < 2:
        raise ValueError(f"{where} must have examples of two classes or more, got {found.examples} of {classes}")
    if not 1 / classes - 1e-9 <= found.chance < 1:
        raise ValueError(f"{where}: chance must be from 1 / {classes} to below 1, got {found.chance}")
    if not found.encodings:
        raise ValueError(f"{where} must have an encoding, got none")
    if not (found.trainings >= 0 and 0 <= found.seconds < math.inf):
        raise ValueError(f"{where}: trainings and seconds must be 0 or more, got {found.trainings}, {found.seconds}")
    counts = {name: len(each.right) for name, each in found.encodings.items()}
    if len(set(counts.values())) > 1 or not min(counts.values()):
        raise ValueError(f"{where} must have the same number of seeds for each encoding, got {short(counts)}")
    for name, each in found.encodings.items():
        _check_encoding(f"{where}, {name}", each, found.examples)
    chosen = common_rate(found.encodings)
    if chosen is not None and chosen != found.rate:
        raise ValueError(f"{where}: rate must be the best of tuning, {chosen:g}, got {found.rate:g}")


def _check_encoding(where: str, each: EncodingResults, examples: int) -> None:
    seeds = len(each.right)
    for what in ("losses", "seconds", "runs"):
        if len(getattr(each, what)) != seeds:
            raise ValueError(f"{where}: {what} must be one for each of {seeds} seeds, got {len(getattr(each, what))}")
    of_all = {"right": each.right, "shuffled": each.shuffled, "small": each.small, "own": each.own}
    for what, rows in {**of_all, **{f"sizes.{size}": rows for size, rows in each.sizes.items()}}.items():
        if rows and len(rows) != seeds:
            raise ValueError(f"{where}: {what} must be of {seeds} seeds, got {len(rows)}")
        for row in rows:
            _check_bits(f"{where}: {what}", row, examples)
    if not all(0 < second < math.inf for second in each.seconds):
        raise ValueError(f"{where}: seconds must be above 0, got {short(list(each.seconds))}")
    if each.steps and not all(0 < step < math.inf for step in each.steps):
        raise ValueError(f"{where}: steps must be above 0, got {short(list(each.steps))}")
    if (each.own_rate is None) != (not each.own):
        received = "own" if each.own else "own_rate"
        raise ValueError(f"{where}: own and own_rate must be given together, got {received} only")
    for tuned in each.tuning:
        if not 0 <= tuned.top1 <= 1 or not 0 < tuned.rate < math.inf:
            raise ValueError(f"{where}: tuning must be shares at rates above 0, got {short(asdict(tuned))}")
    for right, loss in zip(unpack(each.right, examples), each.losses, strict=True):
        # The true class of a misclassified example has a probability of at most 1/2: a cross-entropy of at least ln 2.
        least = (1 - right.mean()) * math.log(2)
        if loss is not None and not least - 1e-6 <= loss < math.inf:
            raise ValueError(
                f"{where}: a validation loss of {loss:.4g} cannot be with {100 * right.mean():.1f} % right: "
                f"each wrong answer adds ln 2 or more, {least:.4g} in all"
            )


def _check_bits(where: str, row: str, examples: int) -> None:
    try:
        held = base64.b64decode(row, validate=True)
    except ValueError:
        raise ValueError(f"{where} must be base64, got {short(row)}") from None
    whole = math.ceil(examples / 8)
    if len(held) != whole:
        raise ValueError(f"{where} must hold {examples} bits in {whole} bytes, got {len(held)} bytes")
    if np.unpackbits(np.frombuffer(held, dtype=np.uint8))[examples:].any():
        raise ValueError(f"{where} must have zeros after its {examples} bits, got others")


def common_rate(encodings: Mapping[str, EncodingResults]) -> float | None:
    """Return the rate of the highest mean accuracy over the tuned encodings, None without any; ties: nearest to 1."""
    tuned = [{each.rate: each.top1 for each in found.tuning} for found in encodings.values() if found.tuning]
    return best_rate(tuned) if tuned else None


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
    for what in ("fingerprint", "arguments", "rate"):
        if getattr(one, what) != getattr(other, what):
            received = f"{short(getattr(one, what))} and {short(getattr(other, what))}"
            raise ValueError(f"entries of set {one.name} must have the same {what}, got {received}")
    for name in {*one.encodings} & {*other.encodings}:
        if one.encodings[name].right != other.encodings[name].right:
            raise ValueError(f"entries of set {one.name} must have the same answers of {name}, got different ones")
    seeds = {len(each.right) for found in (one, other) for each in found.encodings.values()}
    if len(seeds) > 1:
        raise ValueError(f"entries of set {one.name} must have the same number of seeds, got {sorted(seeds)}")
    return replace(
        one,
        encodings={**other.encodings, **one.encodings},
        notes=[*dict.fromkeys([*one.notes, *other.notes])],
        trainings=one.trainings + other.trainings,
        seconds=one.seconds + other.seconds,
    )
