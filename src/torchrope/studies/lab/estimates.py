"""Numbers with their uncertainty, from trained runs."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from torchrope.encodings import choose
from torchrope.studies.lab.results import Column
from torchrope.studies.lab.runs import Trained
from torchrope.studies.ranking import Accuracy, Place, rank, spread
from torchrope.training.evaluate import interval

TOP1 = Column("top1", "Top-1", "%", 1, low="low", high="high")
OVER_SEEDS = Column("spread", "± over seeds", "%", 1)


def by_encoding(trained: Iterable[Trained]) -> dict[str, list[Trained]]:
    """Runs of each encoding, in the order in which encodings come."""
    groups: dict[str, list[Trained]] = {}
    for each in trained:
        groups.setdefault(each.encoding, []).append(each)
    return groups


def correct(runs: Sequence[Trained]) -> np.ndarray:
    """Right or not, `(seeds, examples)`."""
    return np.stack([each.correct for each in runs])


def top1(right: np.ndarray) -> dict[str, Any]:
    """Top-1 in percent with its 95 % interval over validation examples, and its deviation over seeds.

    Args:
        right: Right or not, `(seeds, examples)`.

    Returns:
        top1, low, high, spread: the cells of `TOP1` and `OVER_SEEDS`; spread is None where there is one seed.
    """
    low, high = interval(right.mean(axis=0))
    deviation = spread(right.mean(axis=1).tolist())
    return {
        "top1": 100 * float(right.mean()),
        "low": 100 * low,
        "high": 100 * high,
        "spread": None if deviation is None else 100 * deviation,
    }


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """How much better one is than another on the same examples, in points, with its 95 % interval.

    Args:
        one, other: Right or not, `(seeds, examples)` each; numbers of seeds may differ.

    Returns:
        Difference, low, high.
    """
    paired = one.mean(axis=0) - other.mean(axis=0)
    low, high = interval(paired)
    return 100 * float(paired.mean()), 100 * low, 100 * high


def places(groups: dict[str, list[Trained]]) -> list[Place]:
    """Encodings from best to worst; differences that seeds or examples can explain are ties."""
    return rank([Accuracy(name, correct(runs)) for name, runs in groups.items()])


def label(encoding: str) -> str:
    """An encoding's name for people: "LieRE, blocks of 8"."""
    block = encoding.rpartition(":")[2] if ":" in encoding else ""
    return " + ".join(part.title for part in choose(encoding).parts) + (f", blocks of {block}" if block else "")


def points(value: float, low: float, high: float) -> str:
    """ "1.2 points [0.3, 2.1]"."""
    return f"{value:.1f} points [{low:.1f}, {high:.1f}]"


def told(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
