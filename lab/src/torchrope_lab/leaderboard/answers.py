"""All answers of an entry in one table, and what is compared in it: differences over data sets and rankings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from torchrope_lab.conclusion import BASELINE, Interval
from torchrope_lab.leaderboard.entry import Condition, DataSetResults, EncodingResults
from torchrope_lab.statistics import means_over_sets
from torchrope_lab.studies.engine.estimates import in_percent

TITLES: dict[Condition, str] = {
    "trained": "As trained",
    "small": "Fewer examples",
    "shuffled": "Shuffled patches or positions",
    "smallest": "Smallest size",
    "largest": "Largest size",
    "own": "At its own learning rate",
}
"""Sizes are those of data on a lattice, evaluated without more training."""
COMMON = " at the common learning rate"
"""End of the name of an encoding under the condition "own", where it is beside the same one at its own rate."""


class Contrast(NamedTuple):
    """Two encodings that were measured on the same data sets under a condition."""

    one: str
    other: str
    sets: Sequence[str]
    condition: Condition = "trained"


class Answers:
    """Right (1) or wrong (0) of every encoding, data set, condition, seed and example.

    Args:
        sets: Measurements, by data set.

    Attributes:
        sets: The same by name.
        names: Encodings that any of them has.
        seeds: Training runs of each encoding, the least of the data sets.
        same: By data set and encoding, the name of the encoding that stands for all that are the same function there:
            those with the same answers under every condition and the same finite losses.
        right: `(seeds, examples)` by encoding, by data set and condition, if any encoding was measured.
    """

    def __init__(self, sets: Sequence[DataSetResults]) -> None:
        self.sets = {results.name: results for results in sets}
        self.names = list(dict.fromkeys(name for results in sets for name in results.encodings))
        self.seeds = min((len(each.right) for results in sets for each in results.encodings.values()), default=0)
        self.same = {results.name: _same_functions(results.encodings) for results in sets}
        self.right: dict[tuple[str, Condition], dict[str, np.ndarray]] = {}
        for results in sets:
            by_condition = {condition: results.rights(condition) for condition in TITLES}
            trained, own = by_condition["trained"], by_condition["own"]
            tuned = {name: right for name, right in trained.items() if results.encodings[name].tuning}
            by_condition["own"] = tuned | own | {f"{name}{COMMON}": trained[name] for name in own}
            self.right |= {(results.name, condition): right for condition, right in by_condition.items() if right}

    def on(self, condition: Condition = "trained", *names: str) -> list[str]:
        """Return the data sets on which all these encodings, or any without names, were measured under a condition."""
        return [name for (name, at), right in self.right.items() if at == condition and {*names} <= {*right}]

    def mean(self, name: str, sets: Sequence[str], condition: Condition = "trained") -> float | None:
        """Compute top-1 of an encoding in percent, the mean over those of the data sets that have it."""
        right = [self.right.get((each, condition), {}).get(name) for each in sets]
        means = [float(each.mean()) for each in right if each is not None]
        return 100 * float(np.mean(means)) if means else None

    def lead(self, one: str, other: str, data_set: str, condition: Condition = "trained") -> float | None:
        """Compute top-1 of one minus that of another in points on a data set; None unless it has both."""
        right = self.right.get((data_set, condition), {})
        return 100 * float(right[one].mean() - right[other].mean()) if {one, other} <= {*right} else None

    def differences(self, contrasts: Sequence[Contrast]) -> list[Interval]:
        """Compute top-1 of the first minus that of the second in points, the mean over sets, as `means_over_sets`.

        Encodings that are the same function on a data set count once: their difference there is 0, and the number of
        differences tested and the variance between seeds are of different functions.
        """
        keys = list(dict.fromkeys((each, contrast.condition) for contrast in contrasts for each in contrast.sets))
        at = {key: index for index, key in enumerate(keys)}
        right = [
            {name: each for name, each in self.right[key].items() if self._stands_for(key[0], name) == name}
            for key in keys
        ]
        means = [
            [(at[each, condition], self._stands_for(each, one), self._stands_for(each, other)) for each in sets]
            for one, other, sets, condition in contrasts
        ]
        return [in_percent(each) for each in means_over_sets(right, means)] if means else []

    def _stands_for(self, data_set: str, name: str) -> str:
        return self.same[data_set].get(name, name)


def _same_functions(encodings: Mapping[str, EncodingResults]) -> dict[str, str]:
    # Different functions may have the same answers, but not the same losses to 16 digits with every seed.
    measured = {
        name: json.dumps([each.right, each.losses, each.small, each.shuffled, each.sizes], sort_keys=True)
        for name, each in encodings.items()
    }
    finite = {name for name, each in encodings.items() if None not in each.losses}
    return _first_of_equal({name: text if name in finite else name for name, text in measured.items()})


def _first_of_equal(values: Mapping[str, object]) -> dict[str, str]:
    """Map each name to the shortest of the names with the same value, or to "none"."""
    ordered = sorted(values, key=lambda name: (name != BASELINE, len(name), name))
    first = {values[name]: name for name in reversed(ordered)}
    return {name: first[value] for name, value in values.items()}


@dataclass(frozen=True)
class Ranking:
    """Encodings in the order of their mean accuracy over data sets, and how each pair differs.

    Attributes:
        order: Names, the highest mean first. Of encodings that are the same function on all sets one is among them.
        same: Name in the order by encoding.
        means: Top-1 in percent by name, the mean over data sets.
        pairs: Top-1 of the first minus that of the second in points, the mean over data sets, with simultaneous 95 %
            intervals; each pair in both orders.
        sets: Names of the data sets.
    """

    order: Sequence[str]
    same: Mapping[str, str]
    means: Mapping[str, float]
    pairs: Mapping[tuple[str, str], Interval]
    sets: Sequence[str]

    def better(self, name: str) -> list[str]:
        """Return the encodings that are significantly better."""
        return [other for other in self.order if other != name and self.pairs[other, name].low > 0]

    def worse(self, name: str) -> list[str]:
        """Return the encodings that are significantly worse."""
        return [other for other in self.order if other != name and self.pairs[name, other].low > 0]

    @property
    def best(self) -> str:
        """The encoding with the highest mean."""
        return self.order[0]

    @property
    def tied(self) -> list[str]:
        """Names that are not significantly behind the best, which is the first of them."""
        behind = self.worse(self.best)
        return [name for name in self.order if name not in behind]


def rank(answers: Answers, condition: Condition = "trained", sets: Sequence[str] | None = None) -> Ranking | None:
    """Rank the encodings that all data sets have, over those data sets that were measured under the condition.

    Args:
        answers: The answers.
        condition: How models were trained and evaluated.
        sets: Data sets; by default all.

    Returns:
        None if fewer than two encodings are on all data sets, or no data set has the condition.
    """
    over = [name for name in answers.on(condition) if sets is None or name in sets]
    names = [name for name in answers.names if over and {*over} <= {*answers.on(condition, name)}]
    same = _first_of_equal({name: tuple(answers.same[each][name] for each in over) for name in names})
    means = {name: answers.mean(name, over, condition) or 0.0 for name in dict.fromkeys(same.values())}
    if len(means) < 2:
        return None
    pairs = list(permutations(means, 2))
    differences = answers.differences([Contrast(*pair, over, condition) for pair in pairs])
    order = sorted(means, key=lambda name: (-means[name], name))
    return Ranking(order, same, means, dict(zip(pairs, differences, strict=True)), over)
