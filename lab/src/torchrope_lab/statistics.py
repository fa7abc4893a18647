"""Statistics of a comparison of encodings: confidence intervals, multiple comparisons and the conclusion.

`conclude` takes arrays of correct (1) and wrong (0) answers `(seeds, examples)` by name and returns a `Conclusion`,
whose kind is one of a closed set. `accuracy_interval`, `difference_interval`, `median_interval` and `draw` compute the
intervals that it and the studies use. Intervals of several differences, those of `conclude` and `differences`, are
simultaneous (Bonferroni). `conclude` decides by Holm's procedure, which rejects whatever such an interval excludes, and
may reject more. Accuracies, gaps and margins are shares of 1; a point is 0.01.

Variance. With S seeds and n examples, X `(S, n)` is 1 (correct) or 0 (wrong), or the difference of two encodings on the
same seeds and examples. Both seeds and examples are samples, so X follows a two-way random-effects model with one value
per cell, with mean squares M_seed, M_example and M_rest (Searle, Casella and McCulloch, Variance Components, 1992, ch.
4):

    effective examples = n S u / V,  V = max(M_seed + max(M_example - M_rest, 0), u),  M_seed = max(own, mean, M_rest),

with u the variance of one entry of X. These are n for seeds that agree on every example, n S for entries that are all
independent, and less than n if training runs differ by more than examples explain. `own` is the pair's mean square of
seeds. From 3 or 5 seeds it is too uncertain for many comparisons, so `mean` is the mean of own / M_rest over all pairs
of encodings, times the pair's M_rest; a single accuracy, and a single pair, use `own` only. For the mean squares two
examples are added to X, one right in all seeds and one wrong in all (for differences +1 and -1, as Agresti and Min do,
Statistics in Medicine 24, 2005), so that variances are not 0 if all answers are right.

Intervals. One accuracy: Wilson's (JASA 22, 1927). A difference: Tango's score interval for paired proportions
(Statistics in Medicine 17, 1998), which excludes 0 if McNemar's test rejects. Both use effective examples in place of
examples, as Korn and Graubard do for clustered samples (Survey Methodology 24, 1998), and the quantile of Student's t
with (k - 1) (S - 1) (V / M_seed)² degrees of freedom (Satterthwaite, Biometrics Bulletin 2, 1946), k the number of
encodings from which M_seed is estimated, and 2 for a single accuracy. With one seed they are Wilson's and Tango's
original intervals of n examples. They then hold for the models that were trained: variation between training runs is
not included.

`benchmarks/calibration.py` measures the coverage of these intervals; the tables are in `docs/statistics.md`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri, stdtrit
from scipy.stats import binom

from torchrope_lab.conclusion import (
    BASELINE,
    ERROR_RATE,
    STILL_RISING,
    Conclusion,
    Interval,
    Kind,
    Needed,
    can_show_learning,
    rise,
)
from torchrope_lab.mistakes import Mistake
from torchrope_lab.schema import ClosedUnit, OpenUnit, convert, short

POWER = 0.8
"""Power of the test at the gap `detectable` and at the sample size `needed`."""
MOST_SEEDS = 100
"""Largest number of seeds that `needed` proposes."""
UNEQUAL = 1.5
"""Size of the largest class relative to the smallest from which a conclusion has balanced accuracies."""
_MOST_WEIGHTS = 2**23
"""Weights of a block of bootstrap draws."""

Array = NDArray[np.float64]
Statistic = Callable[[np.ndarray], np.ndarray]
"""Maps weights of examples `(draws, examples)`, whole numbers, to values `(draws,)`."""


def conclude(
    correct: Mapping[str, ArrayLike],
    *,
    chance: float,
    margin: float = 0.01,
    costs: Mapping[str, ArrayLike] | None = None,
    curves: Mapping[str, Sequence[float]] | None = None,
    labels: ArrayLike | None = None,
) -> Conclusion:
    """Conclude what a comparison of encodings has shown. The first rule that holds decides the kind:

    1. "cannot-tell": there is only one name, or so few examples that a model which is right on all of them is not
       significantly above chance (4 examples of two classes): such a run cannot show that anything was learned.
    2. "nothing-learned": no accuracy is significantly above chance, by exact one-sided lower bounds (Clopper and
       Pearson's) of level 1 - 5 % / k: if all k models are at chance, the probability that any is called learned is at
       most 5 %.
    3. "position-irrelevant": "none" is among the names, and the 95 % interval of each other name's gain over none lies
       within ±margin. Each is a pair of one-sided tests at 2.5 % (Schuirmann, Journal of Pharmacokinetics and
       Biopharmaceutics 15, 1987), and all of them must reject, so that the claim is false in at most 2.5 % of runs
       without further correction (intersection-union, Berger, Technometrics 24, 1982). A gain that is not significant
       does not suffice.
    4. "best": all other names are behind the name of the highest accuracy. The best is chosen from the data, so all
       k (k - 1) / 2 pairs are tested, at 5 % in all by Holm's procedure (Scandinavian Journal of Statistics 6, 1979):
       the chance to call any of k equal encodings behind is at most 5 %.
    5. "tied", or "cheaper" if one of the tied costs significantly less than every other tied encoding: several are
       not significantly different from the best, and another is behind, or the 95 % intervals of all differences lie
       within ±margin.
    6. "cannot-tell": otherwise.

    With fewer than three seeds, or if an accuracy still rises at the end of training, its `scope` is not the encodings.

    Args:
        correct: Right (1) or wrong (0) by name, `(seeds, examples)`, or `(examples,)` for one seed; the same seeds and
            the same examples in the same order for all names.
        chance: Accuracy of the best constant prediction: the share of the most frequent class.
        margin: Differences within it count as irrelevant.
        costs: Costs of rounds relative to the same reference by name, `(rounds,)`, the same rounds for all, for all
            names or some. They are compared in pairs by the exact interval of the median ratio, at 5 % over all pairs.
            If one of the tied has no costs, "cheaper" is not claimed.
        curves: Accuracy after every epoch by name, the mean over seeds, for all names or some.
        labels: Class of every example, for balanced accuracies.

    Raises:
        ValueError: arrays are empty, not of zeros and ones, or of different shapes; chance or margin is out of range;
            costs are not positive; costs or curves are of unknown names; labels are not one per example.

    Example:
        >>> right = {"none": [1, 0] * 100, "mixed": [1] * 190 + [0] * 10, "axial": [1] * 188 + [0] * 12}
        >>> conclude(right, chance=0.1).kind
        'tied'
    """
    arrays = _arrays(correct)
    chance, margin = (convert(ClosedUnit, *each) for each in ((chance, "chance"), (margin, "margin")))
    charged = _costs(costs or {}, arrays)
    conclusion = _Comparison(arrays).conclude(chance, margin)
    if conclusion.kind == "tied" and (cheapest := _cheapest(conclusion, charged)):
        conclusion = replace(conclusion, kind="cheaper", cheapest=cheapest)
    rises = {name: rise(curve) for name, curve in _of_names(curves or {}, arrays, "curves").items()}
    return replace(
        conclusion,
        converged={name: risen <= STILL_RISING for name, risen in rises.items() if risen is not None},
        epochs=max(map(len, (curves or {}).values()), default=0) or None,
        balanced={} if labels is None else _balanced(arrays, labels),
    )


def accuracy_interval(correct: ArrayLike, *, level: float = 0.95) -> Interval:
    """Compute accuracy with Wilson's interval, over examples and, if there are several, seeds.

    Args:
        correct: Right (1) or wrong (0), `(seeds, examples)` or `(examples,)`.
        level: Confidence level.

    Raises:
        ValueError: the array is empty or not of zeros and ones, or the level is not between 0 and 1.

    Example:
        >>> accuracy_interval([1] * 48).low.__round__(3)
        0.926
    """
    right = _array(correct, "correct")
    tail = (1 - convert(OpenUnit, level, "level")) / 2
    spread = _accuracy_spread(_Sums(right[None]))
    low, high = _wilson(_Sums(right[None]).accuracy, spread.effective, spread.quantile(tail))
    return Interval(float(right.mean()), float(low[0]), float(high[0]))


def difference_interval(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Interval:
    """Compute the accuracy of a minus that of b with Tango's interval, paired over examples and seeds.

    Args:
        a, b: Right (1) or wrong (0), `(seeds, examples)` or `(examples,)`, of the same seeds and examples.
        level: Confidence level.

    Raises:
        ValueError: an array is empty or not of zeros and ones, shapes differ, or the level is not between 0 and 1.
    """
    tail = (1 - convert(OpenUnit, level, "level")) / 2
    sums = _Sums(np.stack(list(_arrays({"a": a, "b": b}).values())))
    return _Pairs(sums).intervals(tail)[0]


def differences(correct: Mapping[str, ArrayLike], pairs: Sequence[tuple[str, str]]) -> list[Interval]:
    """Compute the accuracy of the first of each pair minus that of the second.

    Args:
        correct: Right (1) or wrong (0) by name, as `conclude` takes it.
        pairs: Names, at least one pair.

    Returns:
        Tango's intervals, simultaneously of 95 % (Bonferroni): one excludes 0 if and only if its difference is
        significant at 5 % over all pairs.

    Raises:
        ValueError: arrays are empty, not of zeros and ones, or of different shapes.
    """
    arrays = _arrays(correct)
    names = [*arrays]
    first, second = (np.array([names.index(pair[side]) for pair in pairs]) for side in (0, 1))
    return _Pairs(_Sums(np.stack(list(arrays.values()))), first, second).intervals(ERROR_RATE / 2 / len(pairs))


def holm_intervals(intervals: Callable[[float], Sequence[Interval]]) -> list[Interval]:
    """Test several differences at 5 % over all of them by Holm's procedure; compute intervals of its last level.

    Args:
        intervals: Maps a level of confidence to the intervals of all differences, at least one.

    Returns:
        Intervals of the level of the last test: one excludes 0 if and only if its difference is significant. They are
        not simultaneous intervals: the more differences are significant, the less often all of them are right.
    """

    def differ(tail: float) -> NDArray[np.bool_]:
        return np.array([each.low > 0 or each.high < 0 for each in intervals(1 - 2 * tail)])

    tail, _ = _holm(len(intervals(1 - ERROR_RATE)), differ)
    return list(intervals(1 - 2 * tail))


def constant_accuracy(labels: ArrayLike) -> float:
    """Compute the accuracy of the best constant prediction: the share of the most frequent of `labels` `(examples,)`.

    Example:
        >>> constant_accuracy([0, 2, 2, 1])
        0.5
    """
    _, counts = np.unique(labels, return_counts=True)
    return float(counts.max() / counts.sum())


def median_interval(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Compute the median with its exact interval by order statistics, which assumes no distribution.

    Args:
        values: `(count,)`. Ends are infinite if there are too few for the level: fewer than 6 for 95 %.
        level: Confidence level.

    Raises:
        ValueError: there are none, one is not finite, or the level is not between 0 and 1.

    Source: Conover, Practical Nonparametric Statistics, 1999, section 3.2.
    """
    ordered = np.sort(_finite(values, "values"))
    left_out = int(binom.ppf((1 - convert(OpenUnit, level, "level")) / 2, len(ordered), 0.5)) - 1
    if left_out < 0:
        return Interval(float(np.median(ordered)), -math.inf, math.inf)
    return Interval(float(np.median(ordered)), float(ordered[left_out]), float(ordered[-1 - left_out]))


def mean_interval(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Compute the mean with Student's interval, for values that are close to normal, such as scores of seeds.

    Args:
        values: `(count,)`. Ends are infinite for one value.
        level: Confidence level.

    Raises:
        ValueError: there are none, one is not finite, or the level is not between 0 and 1.
    """
    numbers = _finite(values, "values")
    mean, tail, count = float(numbers.mean()), (1 - convert(OpenUnit, level, "level")) / 2, len(numbers)
    if count == 1:
        return Interval(mean, -math.inf, math.inf)
    half = float(_student(np.array(count - 1.0), tail) * numbers.std(ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half)


def draw(statistics: Sequence[Statistic], examples: int, *, draws: int = 1000, seed: int = 0) -> "BootstrapEstimate":
    """Compute a statistic without a closed form (mIoU, AP) on all examples and on bootstrap draws of them.

    Draws are the same for the same `examples` and `seed`, so that differences of two estimates are paired.

    Args:
        statistics: For each training run, maps weights of examples `(draws, examples)` to values `(draws,)`.
        examples: Number of examples.
        draws: Number of bootstrap draws.
        seed: Seed of the draws.

    Raises:
        ValueError: there are no statistics, or fewer than one example or two draws.
    """
    if not statistics or examples < 1 or draws < 2:
        rule = "a bootstrap needs at least one statistic, one example and two draws"
        raise Mistake(f"{rule}, got {len(statistics)}, {examples} and {draws}")
    blocks = [[each(weights) for each in statistics] for weights in resample(examples, draws=draws, seed=seed)]
    on_all = [float(each(np.ones((1, examples), dtype=int))[0]) for each in statistics]
    return BootstrapEstimate(np.array(on_all), np.concatenate(blocks, axis=1), examples)


def resample(examples: int, *, draws: int = 1000, seed: int = 0) -> Iterator[np.ndarray]:
    """Draw examples with replacement, in blocks of draws of at most 64 MiB, or one draw.

    Yields:
        How often each draw contains each example, `(draws of the block, examples)`.
    """
    random, shares = np.random.default_rng(seed), np.full(examples, 1 / examples)
    block = max(1, _MOST_WEIGHTS // examples)
    for first in range(0, draws, block):
        yield random.multinomial(examples, shares, min(block, draws - first))


@dataclass(frozen=True)
class BootstrapEstimate:
    """A statistic of each training run, on all examples and on bootstrap draws of them.

    Attributes:
        on_all: Values on all examples, `(seeds,)`.
        draws: Values in each draw of `resample`, `(seeds, draws)`; the same draws for all statistics of the same
            examples.
        examples: Number of examples.
    """

    on_all: Array
    draws: Array
    examples: int

    @property
    def mean(self) -> float:
        """Mean over training runs, on all examples."""
        return float(np.mean(self.on_all))

    def __sub__(self, other: "BootstrapEstimate") -> "BootstrapEstimate":
        """Return the paired difference to another on the same examples, over the seeds that both have."""
        seeds = min(len(self.on_all), len(other.on_all))
        return BootstrapEstimate(
            self.on_all[:seeds] - other.on_all[:seeds], self.draws[:seeds] - other.draws[:seeds], self.examples
        )

    def interval(self, level: float = 0.95) -> Interval:
        """Compute the mean over training runs with its bootstrap interval.

        With d the distance from the estimate to a percentile of the mean over seeds, drawn over examples, and V_draws
        the variance of the draws, an end of the interval is √(d² V_examples / V_draws + z² V_seeds) t / z away. V_seeds
        is the variance of the mean between training runs, V_examples the contribution of examples, and t Student's
        quantile with Satterthwaite's degrees of freedom. With one seed this is the expanded percentile interval
        (Hesterberg, American Statistician 69, 2015). If all draws are equal, as for a perfect score, the interval has
        zero width and carries no information.
        """
        tail = (1 - convert(OpenUnit, level, "level")) / 2
        mean, estimate, seeds = self.draws.mean(axis=0), self.mean, len(self.on_all)
        low, high = np.quantile(mean, (tail, 1 - tail))
        of_examples = float(mean.var()) * self.examples / max(self.examples - 1, 1)
        of_rest = float(self.draws.var(axis=1).mean() - mean.var()) / max(seeds - 1, 1)
        of_seeds = max(float(np.var(self.on_all, ddof=1)) / seeds, of_rest) if seeds > 1 else 0.0
        of_examples = max(of_examples - of_rest, 0.0)
        variance = of_seeds + of_examples
        if not variance:
            return Interval(estimate, estimate, estimate)
        share = (of_examples**2 / max(self.examples - 1, 1) + of_seeds**2 / max(seeds - 1, 1)) / variance**2
        normal = float(ndtri(1 - tail))
        wider = float(stdtrit(1 / share, 1 - tail)) / normal
        scale = of_examples / float(mean.var()) if of_examples else 0.0

        def distance(percentile: float) -> float:
            return wider * math.sqrt(scale * max(percentile, 0.0) ** 2 + of_seeds * normal**2)

        return Interval(
            estimate, estimate - distance(estimate - float(low)), estimate + distance(float(high) - estimate)
        )


# ---- variance


class _Sums:
    """Sums of right answers of k encodings `(k, seeds, examples)`, from which all means and mean squares follow."""

    def __init__(self, right: Array) -> None:
        self.names, self.seeds, self.examples = right.shape
        by_example = right.sum(axis=1)
        self.by_seed = right.sum(axis=2)
        self.right = self.by_seed.sum(axis=1)
        self.both = np.einsum("ase,bse->ab", right, right, optimize=True)
        """Number of answers that are right with both encodings of a pair, `(k, k)`."""
        self.products = by_example @ by_example.T
        """Products of the two encodings' numbers of seeds that are right, summed over examples, `(k, k)`."""

    @property
    def answers(self) -> int:
        return self.seeds * self.examples

    @property
    def accuracy(self) -> Array:
        return self.right / self.answers


@dataclass(frozen=True)
class _Spread:
    """Uncertainty of means: `effective` examples, degrees of freedom, and the mean squares, all `(means,)`."""

    effective: Array
    freedom: Array
    of_seeds: Array
    of_examples: Array
    of_rest: Array

    def quantile(self, tail: float) -> Array:
        """Return Student's quantile that is exceeded with this probability; the normal one with one seed."""
        return _student(self.freedom, tail)


def _student(freedom: Array, tail: float) -> Array:
    """Compute Student's quantile exceeded with this probability, the normal one for infinite degrees of freedom."""
    return -np.where(np.isinf(freedom), ndtri(tail), stdtrit(np.minimum(freedom, 1e9), tail))


def _spread(by_seed: Array, squares: Array, products: Array, examples: int, compared: int) -> _Spread:
    """Compute effective examples and degrees of freedom of means from sums that include the two added examples."""
    # by_seed: (means, seeds); squares of all entries, products: of sums over seeds, (means,); compared: encodings - 1
    seeds, held = by_seed.shape[1], examples + 2
    level = by_seed.sum(axis=1) ** 2 / (seeds * held)
    total = squares - level
    between = products / seeds - level
    entry = total / (seeds * (held - 1))
    if seeds == 1:
        zero = np.zeros_like(entry)
        return _Spread(np.full_like(entry, examples), np.full_like(entry, np.inf), zero, between / (held - 1), zero)
    of_examples = between / (held - 1)
    own = np.maximum((by_seed**2).sum(axis=1) / held - level, 0)
    of_rest = np.maximum(total - between - own, 0) / ((seeds - 1) * (held - 1))
    own = own / (seeds - 1)
    some = (of_rest > 1e-12 * entry) & (compared > 1)
    mean = np.mean(own[some] / of_rest[some]) if some.any() else 0.0
    of_seeds = np.maximum(np.maximum(own, of_rest), mean * of_rest)
    together = np.maximum(of_seeds + np.maximum(of_examples - of_rest, 0), entry)
    with np.errstate(divide="ignore"):
        freedom = compared * (seeds - 1) * (together / of_seeds) ** 2
    return _Spread(examples * seeds * entry / together, freedom, of_seeds, of_examples, of_rest)


def _accuracy_spread(sums: _Sums) -> _Spread:
    """Compute the spread of each accuracy separately, with the variance between its own seeds."""
    return _spread(
        sums.by_seed + 1,
        sums.right + sums.seeds,
        sums.products.diagonal() + sums.seeds**2,
        sums.examples,
        compared=1,
    )


class _Pairs:
    """Differences of pairs of encodings, by default all of them, `(pairs,)`: the first of a pair minus the second."""

    def __init__(
        self, sums: _Sums, first: NDArray[np.intp] | None = None, second: NDArray[np.intp] | None = None
    ) -> None:
        if first is None or second is None:
            first, second = np.triu_indices(sums.names, 1)
        self.first, self.second = one, other = first, second
        signs = np.eye(sums.names)
        both = sums.both[one, other]
        self.gained = (sums.right[one] - both) / sums.answers
        """Share of answers that are right with the first only."""
        self.lost = (sums.right[other] - both) / sums.answers
        squared = sums.products.diagonal()
        differences = signs[one] - signs[other]
        rank = int(np.linalg.matrix_rank(differences)) if differences.size else 0  # numpy 2.2 raises for none
        self.spread = _spread(
            sums.by_seed[one] - sums.by_seed[other],
            sums.right[one] + sums.right[other] - 2 * both + 2 * sums.seeds,
            squared[one] + squared[other] - 2 * sums.products[one, other] + 2 * sums.seeds**2,
            sums.examples,
            compared=rank,  # sums.names - 1 for all pairs
        )

    def __len__(self) -> int:
        return len(self.first)

    @property
    def difference(self) -> Array:
        return self.gained - self.lost

    @property
    def unequal(self) -> Array:
        """Share of answers that differ."""
        return self.gained + self.lost

    def differ(self, tail: float) -> NDArray[np.bool_]:
        """Return whether intervals with this tail probability at each end exclude 0: McNemar's test."""
        return self.difference**2 * self.spread.effective > self.unequal * self.spread.quantile(tail) ** 2

    def intervals(self, tail: float, which: slice = slice(None)) -> list[Interval]:
        """Compute Tango's intervals with this tail probability at each end, of all pairs or those of `which`."""
        quantile = self.spread.quantile(tail)[which]
        low, high = _tango(self.gained[which], self.lost[which], self.spread.effective[which], quantile)
        return [Interval(*map(float, each)) for each in zip(self.difference[which], low, high, strict=True)]

    def by_names(self, names: Sequence[str], tail: float) -> dict[tuple[str, str], Interval]:
        """Compute Tango's intervals of all pairs, in both orders of the names."""
        found = self.intervals(tail)
        forward = {(names[i], names[j]): each for i, j, each in zip(self.first, self.second, found, strict=True)}
        return forward | {(two, one): _negative(each) for (one, two), each in forward.items()}

    def detectable(self, tail: float) -> Array:
        """Compute the smallest difference that is shown with `POWER`; infinite if there is none."""
        noncentrality = (self.spread.quantile(tail) + self.spread.quantile(1 - POWER)) ** 2 / self.spread.effective
        gap = np.maximum(
            np.sqrt(noncentrality * self.unequal), noncentrality
        )  # [pairs]: answers that differ are at least the gap
        return np.where(gap <= 1, gap, np.inf)


def _wilson(share: Array, examples: Array, quantile: Array) -> tuple[Array, Array]:
    """Compute the ends of Wilson's interval."""
    squared = quantile**2 / examples
    centre = (share + squared / 2) / (1 + squared)
    half = np.sqrt(squared * (share * (1 - share) + squared / 4)) / (1 + squared)
    return np.where(share == 0, 0, np.maximum(centre - half, 0)), np.where(share == 1, 1, np.minimum(centre + half, 1))


def _tango(gained: Array, lost: Array, examples: Array, quantile: Array) -> tuple[Array, Array]:
    """Compute the ends of Tango's interval of gained - lost, by bisection of equation 10 of the paper."""
    difference = gained - lost

    def inside(at: Array) -> NDArray[np.bool_]:
        b = (2 - difference) * at - gained - lost
        root = np.sqrt(np.maximum(b**2 + 8 * lost * at * (1 - at), 0))
        variance = np.maximum((root - b) / 2 + at * (1 - at), 0)  # under the constrained maximum-likelihood estimate
        return examples * (difference - at) ** 2 <= quantile**2 * variance

    outer = np.array([np.full_like(difference, -1), np.full_like(difference, 1)])
    inner = np.array([difference, difference])
    for _ in range(32):
        middle = (inner + outer) / 2
        holds = inside(middle)
        inner, outer = np.where(holds, middle, inner), np.where(holds, outer, middle)
    return outer[0], outer[1]


def _holm(count: int, differ: Callable[[float], NDArray[np.bool_]]) -> tuple[float, NDArray[np.bool_]]:
    """Run Holm's procedure; return the tail at which it ends, and which of the differences are significant."""
    rejected = np.zeros(count, dtype=bool)
    while True:
        tail = ERROR_RATE / 2 / max(int((~rejected).sum()), 1)
        now = differ(tail)
        if now.sum() <= rejected.sum():
            return tail, rejected
        rejected = now


# ---- conclusions


class _Comparison:
    """Encodings by decreasing accuracy, and all differences between them."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        means = {name: float(right.mean()) for name, right in arrays.items()}
        self.names = sorted(arrays, key=lambda name: (-means[name], name))
        self.sums = _Sums(np.stack([arrays[name] for name in self.names]))
        self.pairs = _Pairs(self.sums)

    def conclude(self, chance: float, margin: float) -> Conclusion:
        tail, differ = _holm(len(self.pairs), self.pairs.differ)
        last = len(self.names) - 1
        behind = [name for name, differs in zip(self.names[1:], differ[:last], strict=True) if differs]
        simultaneous = ERROR_RATE / 2 / max(len(self.pairs), 1)
        gaps, tested = (
            dict(zip(self.names[1:], self.pairs.intervals(each, slice(last)), strict=True))
            for each in (simultaneous, tail)
        )  # the first `last` pairs are those of the best
        of_best = self.pairs.detectable(tail)[:last]
        unshown = of_best[~differ[:last]]
        detectable = float(np.median(unshown if unshown.size else of_best)) if last else math.inf
        kind = self._kind(chance, margin, behind)
        if kind in ("nothing-learned", "cannot-tell"):
            behind = []
        best = None if kind == "nothing-learned" else self.names[0]
        return Conclusion(
            kind=kind,
            best=best,
            tied=tuple(name for name in self.names if name != best and name not in behind),
            behind=tuple(behind),
            cheapest=None,
            intervals=self._accuracies(),
            gains=self._gains,
            gaps=gaps if best else {},
            detectable=detectable if math.isfinite(detectable) else None,
            needed=self._needed(tail, 2 * margin or 0.02) if kind == "cannot-tell" and last else None,
            examples=self.sums.examples,
            seeds=self.sums.seeds,
            chance=chance,
            margin=margin,
            tested=tested if best else {},
        )

    def _kind(self, chance: float, margin: float, behind: list[str]) -> Kind:
        if len(self.names) == 1 or not can_show_learning(self.sums.examples, len(self.names), chance):
            return "cannot-tell"
        if not self._learned(chance):
            return "nothing-learned"
        if BASELINE in self.names and _within(list(self._gains.values()), margin):
            return "position-irrelevant"
        if len(behind) == len(self.names) - 1:
            return "best"
        if behind or self._equivalent(margin):
            return "tied"
        return "cannot-tell"

    def _learned(self, chance: float) -> bool:
        spread = _accuracy_spread(self.sums)
        tail = ERROR_RATE / len(self.names)
        examples = spread.effective * (ndtri(tail) / spread.quantile(tail)) ** 2
        right = self.sums.accuracy * examples
        return bool((_lower_bound(right, examples, tail) > chance).any())

    def _equivalent(self, margin: float) -> bool:
        return bool((abs(self.pairs.difference) <= margin).all()) and _within(
            self.pairs.intervals(ERROR_RATE / 2), margin
        )

    def _accuracies(self) -> dict[str, tuple[float, float]]:
        spread = _accuracy_spread(self.sums)
        low, high = _wilson(self.sums.accuracy, spread.effective, spread.quantile(ERROR_RATE / 2))
        return {name: (float(low[i]), float(high[i])) for i, name in enumerate(self.names)}

    @cached_property
    def _gains(self) -> dict[str, Interval]:
        if BASELINE not in self.names:
            return {}
        by_names = self.pairs.by_names(self.names, ERROR_RATE / 2)
        return {name: by_names[name, BASELINE] for name in self.names if name != BASELINE}

    def _needed(self, tail: float, gap: float) -> Needed | None:
        """Compute the sample size that shows a gap, with the variance of the difference of the first and the last."""
        last, pairs, sums = len(self.names) - 2, self.pairs, self.sums
        if gap > 1 or not pairs.unequal[last] or float(pairs.detectable(tail)[last]) <= gap:
            return None  # equal answers tell nothing about the variance
        spread = _Spread(*(getattr(pairs.spread, field.name)[[last]] for field in fields(_Spread)))
        held = sums.examples + 2  # with the two added examples; below, components of variance
        of_rest = float(spread.of_rest[0])
        of_seeds = float(spread.of_seeds[0] - of_rest) / held
        of_examples = max(float(spread.of_examples[0]) - of_rest, 0) / sums.seeds
        now = of_seeds / sums.seeds + (of_examples + of_rest / sums.seeds) / held
        scale = max(float(pairs.unequal[last]), gap) / float(spread.effective[0]) / now

        def enough(quantiles: Array) -> Array:
            return (gap / quantiles) ** 2 / scale  # [counts]: the variance that shows the gap

        quantiles = spread.quantile(tail) + spread.quantile(1 - POWER)
        left = float(enough(quantiles)[0]) - of_seeds / sums.seeds
        examples = (of_examples + of_rest / sums.seeds) / left - held if left > 0 else math.inf
        seeds: int | None = None
        if sums.seeds > 1:
            counts = np.arange(sums.seeds + 1, MOST_SEEDS + 1)
            freedom = spread.freedom * (counts - 1) / (sums.seeds - 1)
            quantiles = _student(freedom, tail) + _student(freedom, 1 - POWER)
            variance = (of_seeds + of_rest / held) / counts + of_examples / held
            shown = counts[variance <= enough(quantiles)]
            seeds = int(shown[0]) - sums.seeds if len(shown) else None
        return Needed(gap, max(math.ceil(examples), 1) if examples < 1e12 else None, seeds)


def _lower_bound(right: ArrayLike, examples: ArrayLike, tail: float) -> Array:
    """Compute Clopper and Pearson's one-sided lower bound, also for fractional counts."""
    right, examples = np.asarray(right, dtype=float), np.asarray(examples, dtype=float)
    return np.where(right > 0, betaincinv(np.maximum(right, 1e-300), examples - right + 1, tail), 0.0)


def _within(intervals: Sequence[Interval], margin: float) -> bool:
    return bool(intervals) and all(-margin <= each.low and each.high <= margin for each in intervals)


def _negative(interval: Interval) -> Interval:
    return Interval(-interval.estimate, -interval.high, -interval.low)


def _cheapest(conclusion: Conclusion, costs: dict[str, Array]) -> str | None:
    """Return the one of the tied that costs significantly less than each other, if all have costs and there is one."""
    tied = [name for name in (conclusion.best, *conclusion.tied) if name is not None]
    if not all(name in costs for name in tied):
        return None
    level = 1 - ERROR_RATE / (len(tied) * (len(tied) - 1) / 2)

    def costs_less(one: str, other: str) -> bool:
        return median_interval(np.log(costs[one]) - np.log(costs[other]), level=level).high < 0

    return next((name for name in tied if all(costs_less(name, other) for other in tied if other != name)), None)


def _balanced(arrays: Mapping[str, Array], labels: ArrayLike) -> dict[str, float]:
    """Compute the mean over classes of the accuracy on each, by name; empty for classes of about equal sizes."""
    of_class = np.asarray(labels)
    examples = next(iter(arrays.values())).shape[1]
    if of_class.shape != (examples,):
        raise Mistake(f"labels must be one for each of {examples} examples, got {of_class.shape}")
    classes, counts = np.unique(of_class, return_counts=True)
    if counts.max() < UNEQUAL * counts.min():
        return {}
    by_example = {name: right.mean(axis=0) for name, right in arrays.items()}
    return {name: fmean(float(right[of_class == one].mean()) for one in classes) for name, right in by_example.items()}


# ---- input checks


def _arrays(correct: Mapping[str, ArrayLike]) -> dict[str, Array]:
    if not isinstance(correct, Mapping) or not correct:
        raise Mistake(f"correct answers must be a non-empty mapping of arrays by name, got {short(correct)}")
    for name in correct:
        if not isinstance(name, str) or not name:
            raise Mistake(f"names must be non-empty strings, got {short(name)}")
    arrays = {name: _array(right, name) for name, right in correct.items()}
    shapes = {right.shape for right in arrays.values()}
    if len(shapes) > 1:
        got = ", ".join(f"{name!r} {right.shape}" for name, right in arrays.items())
        raise Mistake(f"correct answers must be of the same seeds and examples, got {got}")
    return arrays


def _array(right: ArrayLike, name: str) -> Array:
    array = _real(right, f"answers of {name!r}")
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or not array.size:
        raise Mistake(f"answers of {name!r} must be (seeds, examples), one or more, got {array.shape}")
    wrong = array[(array != 0) & (array != 1)]
    if wrong.size:
        raise Mistake(f"answers of {name!r} must be zeros and ones, got {wrong[0]:g}")
    return array


def _real(values: ArrayLike, what: str) -> Array:
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise TypeError
        return array.astype(float)
    except (TypeError, ValueError, RuntimeError):
        raise Mistake(f"{what} must be an array of numbers, got {short(values)}") from None


def _finite(values: ArrayLike, what: str) -> Array:
    array = _real(values, what)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise Mistake(f"{what} must be a 1D array of finite numbers, got {short(values)}")
    return array


def _of_names(values: Mapping[str, Any], names: Mapping[str, Array], what: str) -> Mapping[str, Any]:
    if unknown := [name for name in values if name not in names]:
        raise Mistake(f"{what} must be of names that are compared, {', '.join(names)}, got {short(unknown[0])}")
    return values


def _costs(costs: Mapping[str, ArrayLike], names: Mapping[str, Array]) -> dict[str, Array]:
    charged = {name: _finite(cost, f"costs of {name!r}") for name, cost in _of_names(costs, names, "costs").items()}
    for name, cost in charged.items():
        if (cost <= 0).any():
            raise Mistake(f"costs of {name!r} must be above 0, got {cost.min():g}")
    if len(lengths := {len(cost) for cost in charged.values()}) > 1:
        raise Mistake(f"costs must be of the same rounds, got {' and '.join(map(str, sorted(lengths)))} rounds")
    return charged
