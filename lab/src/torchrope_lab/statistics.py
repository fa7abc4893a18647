"""Statistics of a comparison of encodings: two engines of confidence intervals, and the conclusion.

`conclude` takes arrays of correct (1) and wrong (0) answers `(seeds, examples)` by name and returns a `Conclusion`,
whose kind is one of a closed set. Accuracies, differences and margins are shares of 1; a point is 0.01.

Right or wrong: score intervals. A difference has Tango's for paired proportions (Statistics in Medicine 17, 1998),
which excludes 0 if McNemar's test rejects; an accuracy has Wilson's (JASA 22, 1927). Seeds and examples are both
samples. With S seeds, n examples and X `(S, n)` an answer, or the difference of two, they take in place of n, as Korn
and Graubard do for clustered samples (Survey Methodology 24, 1998),

    effective examples = n S u / V,  V = max(M_seed + max(M_example - M_rest, 0), u),  M_seed = max(own, mean, M_rest),

u the variance of an entry of X and M the mean squares of its two-way layout (Searle, Casella and McCulloch, Variance
Components, 1992, ch. 4): n for seeds that agree on every example, n S for independent entries, less than n if training
runs differ by more than examples explain. `own` is the mean square between the seeds of X. A few seeds tell it badly,
so `mean` is own / M_rest over all pairs times M_rest of the pair; a single accuracy or pair has `own` only. Two
examples are added to X, right and wrong in all seeds (differences: +1 and -1, Agresti and Min, Statistics in Medicine
24, 2005), so that no variance is 0. With one seed intervals are of the trained models: they know no variation between
runs.

Everything else (mIoU, AP, slopes, ratios, scores of seeds): one bootstrap, `draw`, the same draws of examples and seeds
for all estimates of a study. Examples are resampled. Seeds are too few for that: a draw moves each run's value by a
normal deviate. Deviations are divided by the root of a mean square drawn with the degrees of freedom of its estimate,
so that intervals of a few examples or seeds are as wide as those of a normal sample's mean.

Several differences: max-T. The quantile of an interval is that of the largest |T| of all of them in bootstrap draws of
the accuracies, examples with normal multipliers (Chernozhukov, Chetverikov and Kato, Annals of Statistics 41, 2013),
seeds as above, but with no less variance than M_rest, which many answers tell. A difference by itself has the quantile
of its own |T|. Over all pairs this covers the comparison with a best that is chosen from the same data.

`benchmarks/calibration.py` measures coverage and error rates; `docs/statistics.md` has them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, chdtri, ndtri
from scipy.stats import rankdata

from torchrope_lab.conclusion import BASELINE, ERROR_RATE, Conclusion, Interval, Kind, can_show_learning
from torchrope_lab.mistakes import Mistake
from torchrope_lab.schema import ClosedUnit, OpenUnit, convert, short

CHEAPER = 0.05
"""Share of a training step by which an encoding must be shown to cost less, to be called cheaper."""
DRAWS = 2000
"""Draws of every bootstrap."""
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
) -> Conclusion:
    """Conclude what a comparison of encodings has shown. The first rule that holds decides the kind:

    1. "cannot-tell": there is only one name, or so few examples that a model which is right on all of them is not
       significantly above chance (4 examples of two classes): such a run cannot show that anything was learned.
    2. "nothing-learned": no accuracy of the trained models is significantly above chance, by exact one-sided lower
       bounds (Clopper and Pearson's) of level 1 - 5 % / k for k encodings.
    3. "position-irrelevant": "none" is among the names, and the interval of each other name's gain over none lies
       within ±margin. A gain that is not significant does not suffice.
    4. "best": all other names are behind the name of the highest accuracy: the intervals of its gaps exclude 0.
    5. "tied", or "cheaper" if one of the tied costs at least 5 % less than every other: several are not significantly
       different from the best, and another is behind, or the intervals of all differences lie within ±margin.
    6. "cannot-tell": otherwise.

    Intervals of gaps and gains are simultaneous over all pairs of names (max-T), nominally of 95 %.

    Args:
        correct: Right (1) or wrong (0) by name, `(seeds, examples)`, or `(examples,)` for one seed; the same seeds and
            the same examples in the same order for all names.
        chance: Accuracy of the best constant prediction: the share of the most frequent class.
        margin: Differences within it count as irrelevant.
        costs: Costs of rounds relative to the same reference by name, `(rounds,)`, the same rounds for all, for all
            names or some. "cheaper" needs 95 % intervals of its median ratio to each other tied name below 0.95, and
            costs of all the tied.

    Raises:
        ValueError: arrays are empty, not of zeros and ones, or of different shapes; chance or margin is out of range;
            costs are not positive or of unknown names.

    Example:
        >>> right = {"none": [1, 0] * 100, "mixed": [1] * 190 + [0] * 10, "axial": [1] * 188 + [0] * 12}
        >>> conclude(right, chance=0.1).kind
        'tied'
    """
    arrays = _arrays(correct)
    chance, margin = (convert(ClosedUnit, *each) for each in ((chance, "chance"), (margin, "margin")))
    charged = _costs(costs or {}, arrays)
    names = sorted(arrays, key=lambda name: (-float(arrays[name].mean()), name))
    sums = _Sums(np.stack([arrays[name] for name in names]))
    pairs = _all_pairs(sums, names)
    gains = {name: pairs[name, BASELINE] for name in names if (name, BASELINE) in pairs}
    gaps = {name: pairs[names[0], name] for name in names[1:]}
    behind = [name for name, gap in gaps.items() if gap.low > 0]
    kind: Kind = "cannot-tell"
    if not gaps or not can_show_learning(sums.examples, len(names), chance):
        behind = []
    elif not _learned(sums, chance):
        kind, behind = "nothing-learned", []
    elif _within(gains.values(), margin):
        kind = "position-irrelevant"
    elif len(behind) == len(gaps):
        kind = "best"
    elif behind or _within(pairs.values(), margin):
        kind = "tied"
    best = None if kind == "nothing-learned" else names[0]
    tied = [name for name in names if name != best and name not in behind]
    cheapest = _cheapest([names[0], *tied], charged) if kind == "tied" else None
    low, high = sums.accuracies().wilson(ERROR_RATE / 2)
    return Conclusion(
        kind="cheaper" if cheapest else kind,
        best=best,
        tied=tuple(tied),
        behind=tuple(behind),
        cheapest=cheapest,
        intervals={name: (float(low[i]), float(high[i])) for i, name in enumerate(names)},
        gains=gains,
        gaps=gaps if best else {},
        examples=sums.examples,
        seeds=sums.seeds,
        chance=chance,
        margin=margin,
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
    low, high = _Sums(right[None]).accuracies().wilson((1 - convert(OpenUnit, level, "level")) / 2)
    return Interval(float(right.mean()), float(low[0]), float(high[0]))


def difference_interval(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Interval:
    """Compute the accuracy of a minus that of b with Tango's interval, paired over examples and seeds.

    Args:
        a, b: Right (1) or wrong (0), `(seeds, examples)` or `(examples,)`, of the same seeds and examples.
        level: Confidence level.

    Raises:
        ValueError: an array is empty or not of zeros and ones, shapes differ, or the level is not between 0 and 1.
    """
    found = _Sums(np.stack(list(_arrays({"a": a, "b": b}).values()))).differences([0], [1])
    return found.tango(found.quantile((1 - convert(OpenUnit, level, "level")) / 2))[0]


def differences(correct: Mapping[str, ArrayLike], pairs: Sequence[tuple[str, str]]) -> list[Interval]:
    """Compute the accuracy of the first of each pair minus that of the second.

    Args:
        correct: Right (1) or wrong (0) by name, as `conclude` takes it.
        pairs: Names, at least one pair.

    Returns:
        Tango's intervals, simultaneous over all pairs (max-T, nominally 95 %): a difference is significant if its
        interval excludes 0.

    Raises:
        ValueError: arrays are empty, not of zeros and ones, or of different shapes.
    """
    arrays = _arrays(correct)
    first, second = ([[*arrays].index(pair[side]) for pair in pairs] for side in (0, 1))
    found = _Sums(np.stack(list(arrays.values()))).differences(first, second)
    return found.tango(found.simultaneous_quantile())


def constant_accuracy(labels: ArrayLike) -> float:
    """Compute the accuracy of the best constant prediction: the share of the most frequent of `labels` `(examples,)`.

    Example:
        >>> constant_accuracy([0, 2, 2, 1])
        0.5
    """
    _, counts = np.unique(labels, return_counts=True)
    return float(counts.max() / counts.sum())


def balanced_accuracy(correct: ArrayLike, labels: ArrayLike) -> float:
    """Compute the mean over classes of the accuracy on each, from right or wrong `(seeds, examples)` and classes.

    Example:
        >>> balanced_accuracy([1, 1, 0], [0, 0, 1])
        0.5
    """
    right, classes = np.atleast_2d(correct).mean(axis=0), np.asarray(labels)
    return float(np.mean([right[classes == one].mean() for one in np.unique(classes)]))


def median_interval(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Compute the median with its bootstrap interval.

    Args:
        values: `(count,)`. Ends are infinite for fewer than 6, which show no interval of 95 %.
        level: Confidence level.

    Raises:
        ValueError: there are none, one is not finite, or the level is not between 0 and 1.
    """
    numbers, tail = np.sort(_finite(values, "values")), (1 - convert(OpenUnit, level, "level")) / 2
    if len(numbers) < 6:
        return Interval(float(np.median(numbers)), -math.inf, math.inf)
    medians = np.median(np.random.default_rng(0).choice(numbers, (DRAWS, len(numbers))), axis=1)
    return Interval(float(np.median(numbers)), *map(float, np.quantile(medians, (tail, 1 - tail))))


def draw(statistics: Sequence[Statistic], examples: int, *, draws: int = DRAWS) -> "BootstrapEstimate":
    """Compute a statistic without a closed form (mIoU, AP) on all examples and on bootstrap draws of them.

    Draws are the same for the same number of examples, so that differences of two estimates are paired.

    Args:
        statistics: For each training run, maps weights of examples `(draws, examples)` to values `(draws,)`.
        examples: Number of examples.
        draws: Number of bootstrap draws.

    Raises:
        ValueError: there are no statistics, or fewer than one example or two draws.
    """
    if not statistics or examples < 1 or draws < 2:
        rule = "a bootstrap needs at least one statistic, one example and two draws"
        raise Mistake(f"{rule}, got {len(statistics)}, {examples} and {draws}")
    blocks = [[each(weights) for each in statistics] for weights in resample(examples, draws=draws)]
    on_all = [float(each(np.ones((1, examples), dtype=int))[0]) for each in statistics]
    return BootstrapEstimate(np.array(on_all), np.concatenate(blocks, axis=1), examples)


def resample(examples: int, *, draws: int = DRAWS) -> Iterator[np.ndarray]:
    """Draw examples with replacement, in blocks of draws of at most 64 MiB, or one draw.

    Yields:
        How often each draw contains each example, `(draws of the block, examples)`.
    """
    weights, block = _drawn_examples(examples, draws), max(1, _MOST_WEIGHTS // examples)
    yield from (weights[first : first + block].astype(int) for first in range(0, draws, block))


@lru_cache(maxsize=1)
def _drawn_examples(examples: int, draws: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(0)
    drawn = (random.integers(examples, size=examples) for _ in range(draws))
    return np.stack([np.bincount(each, minlength=examples).astype(np.uint8) for each in drawn])


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

    @cached_property
    def drawn(self) -> Array:
        """The mean over training runs in each draw of examples and seeds, `(draws,)`."""
        # Values of runs differ by examples too: what each run's examples contribute is counted once, between runs.
        (seeds, count), mean = self.draws.shape, self.draws.mean(axis=0)
        moved = (mean - self.mean) / np.sqrt(_mean_squares(self.examples - 1, count) * (1 - 1 / max(self.examples, 2)))
        if seeds == 1:
            return self.mean + moved
        own, variance = float(np.var(self.on_all, ddof=1)) / seeds, float(mean.var())
        rest = max(float(self.draws.var(axis=1).mean()) - variance, 0.0) / (seeds - 1)
        if own and variance:
            moved = moved * math.sqrt(max(1 - rest / variance, 0.0))
        return self.mean + moved + max(1.0, math.sqrt(rest / own) if own else 0.0) * moved_by_seeds(self.on_all, count)

    def interval(self, level: float = 0.95) -> Interval:
        """Compute the mean over training runs with the percentiles of `drawn`; infinite for one seed and example.

        If all draws are equal, as for a perfect score, the interval has zero width and carries no information.
        """
        tail = (1 - convert(OpenUnit, level, "level")) / 2
        if self.examples == len(self.on_all) == 1:
            return Interval(self.mean, -math.inf, math.inf)
        return Interval(self.mean, *map(float, np.quantile(self.drawn, (tail, 1 - tail))))


@lru_cache(maxsize=16)
def _mean_squares(freedom: int, draws: int) -> Array:
    """Draw mean squares with degrees of freedom, relative to what they estimate, `(draws,)`; 1 for none."""
    if freedom < 1:
        return np.ones(draws)
    drawn = chdtri(freedom, (np.arange(draws) + 0.5) / draws) / freedom
    return np.random.default_rng(freedom).permutation(drawn)


@lru_cache(maxsize=16)
def _normal(columns: int, draws: int, seed: int) -> Array:
    """Draw normal deviates `(draws, columns)` whose columns each have the normal quantiles."""
    quantiles = np.tile(ndtri((np.arange(draws) + 0.5) / draws), (columns, 1))
    return np.random.default_rng(seed).permuted(quantiles, axis=1).T


def moved_by_seeds(values: Array, draws: int = DRAWS) -> Array:
    """Draw how far means over seeds are from those of all seeds: of values `(seeds, ...)`, `(draws, ...)`."""
    seeds, half = len(values), (draws + 1) // 2
    if seeds == 1:
        return np.zeros((draws, *values.shape[1:]))
    weights = _normal(seeds, half, 1) / np.sqrt(_mean_squares(seeds - 1, half) * seeds * (seeds - 1))[:, None]
    moved = np.tensordot(weights, values - values.mean(axis=0), axes=1)
    return np.concatenate([moved, -moved])[:draws]  # symmetric


def simultaneous_level(drawn: Sequence[Array]) -> float:
    """Compute the level at which percentile intervals of estimates with draws `(draws,)` together hold 95 % of draws.

    Source: Beran, Annals of Statistics 18, 1990.
    """
    known = [each for each in drawn if not np.isnan(each).any()]
    if not known:
        return 1 - ERROR_RATE
    rows = np.stack(known)
    below, above = (rankdata(sign * rows, method="max", axis=1) for sign in (1, -1))
    outside = 2 * np.minimum(below, above).min(axis=0) / rows.shape[1]  # of the least likely end that a draw reaches
    return float(np.clip(1 - np.quantile(outside, ERROR_RATE), 1 - ERROR_RATE, 1 - 1e-9))


# ---- variance


class _Sums:
    """Sums of right answers of k encodings `(k, seeds, examples)`, from which all means and mean squares follow."""

    def __init__(self, right: Array) -> None:
        self.names, self.seeds, self.examples = right.shape
        by_example, flat = right.sum(axis=1), right.reshape(self.names, -1)
        self.by_seed = right.sum(axis=2)
        self.right = self.by_seed.sum(axis=1)
        self.both = flat @ flat.T  # answers that are right with both encodings of a pair, `(k, k)`
        self.products = by_example @ by_example.T  # of their numbers of seeds that are right, summed over examples

    def accuracies(self) -> "_Means":
        """Return all accuracies, each by itself."""
        return _Means(self, np.eye(self.names), compared=1)

    def differences(self, first: ArrayLike, second: ArrayLike) -> "_Means":
        """Return the accuracies of the first of pairs of encodings minus those of the second."""
        one, other = (np.eye(self.names)[np.asarray(each, dtype=int)] for each in (first, second))
        contrasts = one - other
        rank = int(np.linalg.matrix_rank(contrasts)) if contrasts.size else 0  # numpy 2.2 raises for none
        return _Means(self, contrasts, compared=rank)  # k - 1 for all pairs


class _Means:
    """Accuracies or differences, `contrasts` `(means, k)` of encodings, with their effective examples `(means,)`.

    Runs contribute the share `of_runs` to the variance, as estimated between runs with `freedom` degrees of freedom, 0
    for one seed, and `of_rest` at least: what single answers leave.
    """

    def __init__(self, sums: _Sums, contrasts: Array, compared: int) -> None:
        self.sums, self.contrasts, self.answers = sums, contrasts, sums.seeds * sums.examples
        self.right = contrasts @ sums.right
        self.squares = self._of_contrasts(sums.both)  # of entries, summed: answers that are right, or that differ
        self.effective = np.full(len(contrasts), float(sums.examples))
        self.of_runs = self.of_rest = np.zeros(len(contrasts))
        self.freedom, seeds, held = compared * (sums.seeds - 1), sums.seeds, sums.examples + 2
        if seeds == 1:
            return
        kind = contrasts.sum(axis=1)  # 1 of an accuracy, to which 1 and 0 are added; 0 of a difference: 1 and -1
        by_seed = contrasts @ sums.by_seed + kind[:, None]
        level = by_seed.sum(axis=1) ** 2 / (seeds * held)
        total = self.squares + (2 - kind) * seeds - level
        between = self._of_contrasts(sums.products) / seeds + (2 - kind) * seeds - level
        entry, of_examples = total / (seeds * (held - 1)), between / (held - 1)
        own = np.maximum((by_seed**2).sum(axis=1) / held - level, 0)
        of_rest = np.maximum(total - between - own, 0) / ((seeds - 1) * (held - 1))
        own = own / (seeds - 1)
        some = (of_rest > 1e-12 * entry) & (compared > 1)
        of_runs = np.maximum(own, np.mean(own[some] / of_rest[some]) * of_rest if some.any() else 0)
        together = np.maximum(np.maximum(of_runs, of_rest) + np.maximum(of_examples - of_rest, 0), entry)
        self.effective = self.answers * entry / together
        self.of_runs, self.of_rest = of_runs / together, of_rest / together

    def _of_contrasts(self, products: Array) -> Array:
        return np.asarray((self.contrasts @ products * self.contrasts).sum(axis=1))

    @property
    def of_examples(self) -> Array:
        return 1 - np.maximum(self.of_runs, self.of_rest)

    def _drawn_of_runs(self) -> Array:
        """Draw what runs may contribute, given its estimate, `(DRAWS, means)`."""
        return np.maximum(self.of_runs / _mean_squares(self.freedom, DRAWS)[:, None], self.of_rest)

    def quantile(self, tail: float) -> Array:
        """Return the quantile of each |T| by itself that is exceeded with this probability at either end."""
        normal = -float(ndtri(tail))
        if not self.freedom:
            return np.full_like(self.effective, normal)
        drawn = abs(_normal(1, DRAWS, 0)) * np.sqrt(self.of_examples + self._drawn_of_runs())
        return np.maximum(np.quantile(drawn, 1 - 2 * tail, axis=0), normal)

    def simultaneous_quantile(self) -> Array:
        """Return the quantile of the largest |T| (max-T), for all."""
        if len(self.contrasts) < 2:
            return self.quantile(ERROR_RATE / 2)
        covariance = self.sums.products - np.outer(self.sums.right, self.sums.right) / self.sums.examples  # of examples
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
        variance = self._of_contrasts(covariance)
        differ = variance > 1e-9 * self.sums.examples
        scale = np.where(differ, np.sqrt(self.of_examples / np.where(differ, variance, 1)), 0)
        drawn = _normal(self.sums.names, DRAWS, 0) @ (root @ self.contrasts.T * scale)
        if self.freedom:
            runs = _normal(self.sums.names, DRAWS, 1) @ (self.contrasts.T / math.sqrt(2))
            drawn += runs * np.sqrt(self._drawn_of_runs())
        quantile = float(np.quantile(abs(drawn).max(axis=1), 1 - ERROR_RATE))
        return np.full(len(differ), max(quantile, -float(ndtri(ERROR_RATE / 2))))

    def wilson(self, tail: float) -> tuple[Array, Array]:
        """Compute the ends of Wilson's intervals of accuracies."""
        share, squared = self.right / self.answers, self.quantile(tail) ** 2 / self.effective
        centre = (share + squared / 2) / (1 + squared)
        half = np.sqrt(squared * (share * (1 - share) + squared / 4)) / (1 + squared)
        low, high = np.maximum(centre - half, 0), np.minimum(centre + half, 1)
        return np.where(share == 0, 0, low), np.where(share == 1, 1, high)

    def tango(self, quantile: Array) -> list[Interval]:
        """Compute Tango's intervals of differences."""
        gained, lost = ((self.squares + sign * self.right) / 2 / self.answers for sign in (1, -1))
        low, high = _tango(gained, lost, self.effective, quantile)
        return [Interval(*map(float, each)) for each in zip(self.right / self.answers, low, high, strict=True)]


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


# ---- conclusions


def _all_pairs(sums: _Sums, names: Sequence[str]) -> dict[tuple[str, str], Interval]:
    """Compute the simultaneous intervals of all differences, in both orders of the names."""
    ends = np.triu_indices(len(names), 1)
    found = sums.differences(*ends)
    gaps = zip(*(each.tolist() for each in ends), found.tango(found.simultaneous_quantile()), strict=True)
    pairs = {(names[i], names[j]): gap for i, j, gap in gaps}
    return pairs | {(two, one): Interval(-gap[0], -gap[2], -gap[1]) for (one, two), gap in pairs.items()}


def _learned(sums: _Sums, chance: float) -> bool:
    """Return whether the trained models of an encoding are significantly above chance, as if seeds were one."""
    return bool((_lower_bound(sums.right / sums.seeds, sums.examples, ERROR_RATE / sums.names) > chance).any())


def _lower_bound(right: ArrayLike, examples: ArrayLike, tail: float) -> Array:
    """Compute Clopper and Pearson's one-sided lower bound, also for fractional counts."""
    right, examples = np.asarray(right, dtype=float), np.asarray(examples, dtype=float)
    return np.where(right > 0, betaincinv(np.maximum(right, 1e-300), examples - right + 1, tail), 0.0)


def _within(intervals: Iterable[Interval], margin: float) -> bool:
    found = [*intervals]
    return bool(found) and all(-margin <= each.low and each.high <= margin for each in found)


def _cheapest(tied: Sequence[str], costs: dict[str, Array]) -> str | None:
    """Return the one of the tied that is shown to cost less than each other by `CHEAPER`, if all have costs."""
    if not all(name in costs for name in tied):
        return None

    def costs_less(one: str, other: str) -> bool:
        return median_interval(costs[one] / costs[other]).high < 1 - CHEAPER

    return next((name for name in tied if all(costs_less(name, other) for other in tied if other != name)), None)


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


def _costs(costs: Mapping[str, ArrayLike], names: Mapping[str, Array]) -> dict[str, Array]:
    charged = {name: _finite(cost, f"costs of {name!r}") for name, cost in costs.items()}
    for name, cost in charged.items():
        if name not in names:
            raise Mistake(f"costs must be of names that are compared, {', '.join(names)}, got {short(name)}")
        if (cost <= 0).any():
            raise Mistake(f"costs of {name!r} must be above 0, got {cost.min():g}")
    if len(lengths := {len(cost) for cost in charged.values()}) > 1:
        raise Mistake(f"costs must be of the same rounds, got {' and '.join(map(str, sorted(lengths)))} rounds")
    return charged
