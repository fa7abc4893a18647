"""All answers of an entry in one table, and what is compared in it: encodings on a data set, and over data sets."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from string import ascii_letters

import numpy as np

from torchrope_lab.conclusion import BASELINE, ERROR_RATE, Interval
from torchrope_lab.leaderboard.entry import Condition, DataSetResults, EncodingResults
from torchrope_lab.statistics import differences, mean_interval
from torchrope_lab.studies.engine.estimates import in_percent

MARGIN = 1.0
"""Differences within it, in points, are irrelevant: the region of the equivalence tests."""
WORTH_DOUBLING = 0.005
"""Change of accuracy by twice the epochs, the mean over seeds, from which training has not converged."""


def has_converged(gain: float) -> bool:
    """Whether twice the epochs change accuracy by less than `WORTH_DOUBLING`; rounding errors do not count.

    A loss, as by a seed whose training fails, is no convergence either.
    """
    return abs(round(gain, 9)) < WORTH_DOUBLING


DIFFERENT, EQUIVALENT, UNKNOWN = "different", "equivalent", "cannot tell"
Pair = tuple[str, str]


@dataclass(frozen=True)
class Compared:
    """Two simultaneous intervals of a difference in points, both Bonferroni's over one family.

    Attributes:
        gap: The interval of 95 %; a difference is significant if it excludes 0.
        inner: The interval of 90 %. Within ±`MARGIN`, both one-sided tests of Schuirmann reject at 5 % over the family.
    """

    gap: Interval
    inner: Interval

    @property
    def verdict(self) -> str:
        """`DIFFERENT`, `EQUIVALENT` or `UNKNOWN`; a significant difference within the margin is equivalent."""
        if self.inner.low > -MARGIN and self.inner.high < MARGIN:
            return EQUIVALENT
        return DIFFERENT if self.gap.low > 0 or self.gap.high < 0 else UNKNOWN


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
            by_condition = {condition: results.rights(condition) for condition in _CONDITIONS}
            self.right |= {(results.name, condition): right for condition, right in by_condition.items() if right}

    def on(self, condition: Condition = "trained", *names: str) -> list[str]:
        """Return the data sets on which all these encodings, or any without names, were measured under a condition."""
        return [name for (name, at), right in self.right.items() if at == condition and {*names} <= {*right}]

    def mean(self, name: str, data_set: str, condition: Condition = "trained") -> float | None:
        """Compute top-1 of an encoding in percent; None if it was not measured."""
        right = self.right.get((data_set, condition), {}).get(name)
        return None if right is None else 100 * float(right.mean())

    def gain(self, name: str, data_set: str) -> float | None:
        """Compute the gain by the second half of the epochs in points; None if it was not measured."""
        after, half = self.mean(name, data_set), self.mean(name, data_set, "half")
        return None if after is None or half is None else after - half

    def converged(self, name: str, data_set: str) -> bool | None:
        """Return whether twice the epochs changed accuracy by less than half a point; None if they were not trained."""
        gain = self.gain(name, data_set)
        return None if gain is None else has_converged(gain / 100)

    def differences(self, contrasts: Sequence[tuple[str, str, str, Condition]]) -> list[Compared]:
        """Compare pairs of encodings on data sets, as one family.

        Encodings that are the same function on a data set count once: their difference there is 0, and the variance
        between seeds is of different functions.

        Args:
            contrasts: Data set, encoding, encoding to subtract, and condition.
        """
        stands = self._stands_for
        tests = [(at, condition, (stands(at, one), stands(at, other))) for at, one, other, condition in contrasts]
        family = len({(at, condition, frozenset(pair)) for at, condition, pair in tests if pair[0] != pair[1]})
        nothing = Interval(0.0, 0.0, 0.0)
        found = dict.fromkeys(tests, Compared(nothing, nothing))
        for at, condition in dict.fromkeys(test[:2] for test in tests):
            pairs = [pair for *key, pair in found if key == [at, condition] and pair[0] != pair[1]]
            right = {name: each for name, each in self.right[at, condition].items() if stands(at, name) == name}
            errors = [factor * ERROR_RATE * len(pairs) / family for factor in (1, 2) if pairs]
            for pair, *ends in zip(pairs, *(differences(right, pairs, error=error) for error in errors), strict=True):
                found[at, condition, pair] = Compared(*map(in_percent, ends))
        return [found[test] for test in tests]

    def _stands_for(self, data_set: str, name: str) -> str:
        return self.same[data_set].get(name, name)


_CONDITIONS: tuple[Condition, ...] = ("trained", "half", "shuffled", "largest")


def _same_functions(encodings: Mapping[str, EncodingResults]) -> dict[str, str]:
    # Different functions may have the same answers, but not the same losses to 16 digits with every seed, unless these
    # are 0 up to the rounding of float32.
    measured = {
        name: json.dumps([each.right, each.losses, each.shuffled, each.sizes], sort_keys=True)
        for name, each in encodings.items()
    }
    telling = {
        name for name, each in encodings.items() if all(loss is not None and loss > 1e-5 for loss in each.losses)
    }
    return _first_of_equal({name: text if name in telling else name for name, text in measured.items()})


def _first_of_equal(values: Mapping[str, object]) -> dict[str, str]:
    """Map each name to the shortest of the names with the same value, or to "none"."""
    ordered = sorted(values, key=lambda name: (name != BASELINE, len(name), name))
    first = {values[name]: name for name in reversed(ordered)}
    return {name: first[value] for name, value in values.items()}


@dataclass(frozen=True)
class Comparison:
    """All pairs of encodings, on one data set or over several.

    Attributes:
        order: Names, the highest mean first. Of encodings that are the same function one is among them.
        same: Name in the order by encoding.
        means: Top-1 in percent by name.
        pairs: The first minus the second, by pair, in the order of the names.
    """

    order: Sequence[str]
    same: Mapping[str, str]
    means: Mapping[str, float]
    pairs: Mapping[Pair, Compared]

    def between(self, one: str, other: str) -> Compared:
        """Return the first minus the second."""
        if (one, other) in self.pairs:
            return self.pairs[one, other]
        back = self.pairs[other, one]
        return Compared(*(Interval(-each.estimate, -each.high, -each.low) for each in (back.gap, back.inner)))

    @property
    def best(self) -> str:
        """The name with the highest mean."""
        return self.order[0]

    @property
    def tied(self) -> list[str]:
        """The best, and the names that are not significantly different from it or equivalent."""
        return [self.best, *(each for each in self.order[1:] if self.pairs[self.best, each].verdict != DIFFERENT)]

    def groups(self) -> dict[str, str]:
        """Assign letters, so that two names differ if and only if they share none (compact letter display).

        Source: Piepho, Journal of Computational and Graphical Statistics 13, 2004.
        """
        groups = [{*self.order}]
        for (one, other), compared in self.pairs.items():
            if compared.verdict == DIFFERENT:
                split = [part for group in groups for part in _apart(group, one, other)]
                groups = [part for part in split if not any(part < another for another in split)]
                groups = [part for at, part in enumerate(groups) if part not in groups[:at]]
        at = {name: place for place, name in enumerate(self.order)}
        groups.sort(key=lambda group: sorted(at[name] for name in group))
        return {name: "".join(_symbol(i) for i, group in enumerate(groups) if name in group) for name in self.order}


def _symbol(index: int) -> str:
    """Return a letter, from the 53rd group on with a number, so that no two groups share one."""
    turn, letter = divmod(index, len(ascii_letters))
    return f"{ascii_letters[letter]}{turn or ''}"


def _apart(group: set[str], one: str, other: str) -> list[set[str]]:
    return [group - {one}, group - {other}] if {one, other} <= group else [group]


def compare_on(answers: Answers, data_set: str) -> Comparison:
    """Compare all encodings on a data set, with intervals over its examples and seeds."""
    same = answers.same[data_set]

    def compared(pairs: Sequence[Pair]) -> list[Compared]:
        return answers.differences([(data_set, *pair, "trained") for pair in pairs])

    return _compare(same, {name: answers.mean(name, data_set) or 0.0 for name in {*same.values()}}, compared)


def compare_over(answers: Answers) -> Comparison | None:
    """Compare the encodings that all data sets have, with the data sets as a random sample:

        d ± t(S - 1) s / √S,   s the standard deviation of the differences d_s on S data sets.

    Returns:
        None for fewer than three data sets or two encodings.
    """
    over = [*answers.sets]
    names = [name for name in answers.names if answers.on("trained", name) == over]
    same = _first_of_equal({name: tuple(answers.same[each][name] for each in over) for name in names})
    tops = {name: np.array([answers.mean(name, each) or 0.0 for each in over]) for name in dict.fromkeys(same.values())}
    if len(over) < 3 or len(tops) < 2:
        return None

    def compared(pairs: Sequence[Pair]) -> list[Compared]:
        levels = [1 - factor * ERROR_RATE / len(pairs) for factor in (1, 2)]
        return [Compared(*(mean_interval(tops[a] - tops[b], level=level) for level in levels)) for a, b in pairs]

    return _compare(same, {name: float(each.mean()) for name, each in tops.items()}, compared)


def _compare(
    same: Mapping[str, str], means: Mapping[str, float], compared: Callable[[Sequence[Pair]], Sequence[Compared]]
) -> Comparison:
    order = sorted(means, key=lambda name: (-means[name], name))
    pairs = list(combinations(order, 2))
    return Comparison(order, same, means, dict(zip(pairs, compared(pairs), strict=True)))
