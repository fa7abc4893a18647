"""Conditions under which a leaderboard measures encodings, and differences of encodings over data sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from torchrope_lab.conclusion import Interval
from torchrope_lab.leaderboard.entry import DataSetResults, EncodingResults, Rights, unpack
from torchrope_lab.statistics import differences_over_sets
from torchrope_lab.studies.engine.estimates import in_percent

Condition = Literal["trained", "small", "shuffled", "smallest", "largest"]
TITLES: dict[Condition, str] = {
    "trained": "As trained",
    "small": "Fewer examples",
    "shuffled": "Shuffled patches or positions",
    "smallest": "Smallest size",
    "largest": "Largest size",
}
"""Sizes are those of data on a lattice, evaluated without more training."""
HOLM = (
    "An interval excludes 0 if and only if the difference is significant at 5 % over the whole table, by Holm's "
    "procedure; the intervals are not simultaneous ones."
)


def accuracies(found: DataSetResults, condition: Condition) -> dict[str, np.ndarray]:
    """Return correct (1) and wrong (0) answers `(seeds, examples)` by encoding under a condition.

    Encodings that were not measured under it are omitted.
    """
    packed = {name: _packed(each, condition) for name, each in found.encodings.items()}
    return {name: unpack(rights, found.examples) for name, rights in packed.items() if rights}


def _packed(each: EncodingResults, condition: Condition) -> Rights:
    if condition in ("smallest", "largest"):
        in_order = sorted(each.sizes, key=lambda size: int(np.prod([int(side) for side in size.split("×")])))
        return each.sizes[in_order[0 if condition == "smallest" else -1]] if in_order else ()
    return {"trained": each.right, "small": each.small, "shuffled": each.shuffled}[condition]


@dataclass(frozen=True)
class Ranking:
    """Encodings in the order of their mean accuracy over data sets, and how each pair differs.

    Attributes:
        order: Names, the highest mean first.
        means: Top-1 in percent by name, the mean over data sets.
        pairs: Differences in points, the mean over data sets, at 5 % over all pairs (Holm).
        sets: Number of data sets.
    """

    order: Sequence[str]
    means: Mapping[str, float]
    pairs: Mapping[tuple[str, str], Interval]
    sets: int

    def difference(self, one: str, other: str) -> Interval:
        """Return top-1 of one minus that of the other, in percentage points."""
        if (one, other) in self.pairs:
            return self.pairs[one, other]
        estimate, low, high = self.pairs[other, one]
        return Interval(-estimate, -high, -low)

    @property
    def best(self) -> str:
        """The encoding with the highest mean."""
        return self.order[0]

    @property
    def tied(self) -> list[str]:
        """Names that are not significantly behind the best, which is not among them."""
        return [name for name in self.order[1:] if self.difference(self.best, name).low <= 0]

    @property
    def behind(self) -> list[str]:
        """Names that are significantly behind the best."""
        return [name for name in self.order[1:] if self.difference(self.best, name).low > 0]


def rank(sets: Sequence[DataSetResults], condition: Condition = "trained") -> Ranking | None:
    """Rank the encodings that all data sets have, over those data sets that were measured under the condition.

    Returns:
        None if fewer than two encodings are on all data sets, or no data set has the condition.
    """
    measured = [rights for found in sets if (rights := accuracies(found, condition))]
    names = [name for name in measured[0] if all(name in rights for rights in measured)] if measured else []
    if len(names) < 2:
        return None
    pairs = list(combinations(names, 2))
    common = [{name: rights[name] for name in names} for rights in measured]
    everywhere = [(*pair, range(len(common))) for pair in pairs]
    differences = dict(zip(pairs, map(in_percent, differences_over_sets(common, everywhere)), strict=True))
    means = {name: 100 * float(np.mean([rights[name].mean() for rights in common])) for name in names}
    return Ranking(sorted(names, key=lambda name: (-means[name], name)), means, differences, len(measured))


@dataclass(frozen=True)
class Contrast:
    """Two encodings to compare over data sets.

    Attributes:
        one, other: Their names.
        sets: Data sets that have both under the condition.
        condition: Condition under which they are compared.
    """

    one: str
    other: str
    sets: Sequence[DataSetResults]
    condition: Condition = "trained"


def contrasted(contrasts: Sequence[Contrast]) -> list[Interval]:
    """Compute differences of top-1 in points, the mean over sets, with intervals at 5 % over all contrasts (Holm)."""
    if not contrasts:
        return []
    keys = list(dict.fromkeys((found.name, each.condition) for each in contrasts for found in each.sets))
    by_key = {(found.name, each.condition): found for each in contrasts for found in each.sets}
    rights = [accuracies(by_key[key], key[1]) for key in keys]
    requested = [
        (each.one, each.other, [keys.index((found.name, each.condition)) for found in each.sets]) for each in contrasts
    ]
    return [in_percent(interval) for interval in differences_over_sets(rights, requested)]


def sets_with(
    sets: Sequence[DataSetResults], names: Sequence[str], condition: Condition = "trained"
) -> list[DataSetResults]:
    """Return the data sets on which all given encodings were measured under a condition."""
    return [found for found in sets if {*names} <= {*accuracies(found, condition)}]
