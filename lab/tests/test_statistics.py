"""Intervals, ties and conclusions of comparisons."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import calibration
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest, norm, studentized_range
from scipy.stats import t as student

from torchrope_lab import statistics
from torchrope_lab.conclusion import KINDS, Conclusion, Interval, signed
from torchrope_lab.statistics import (
    Statistic,
    accuracy_interval,
    balanced_accuracy,
    conclude,
    difference_interval,
    draw,
    median_interval,
)

Z = norm.ppf(0.975)


def answers(right: int, examples: int, wrong_first: int = 0) -> np.ndarray:
    """So many right answers, after so many that are wrong."""
    return (np.arange(examples) >= wrong_first) & (np.arange(examples) < wrong_first + right)


def noisy(accuracies: dict[str, float], seeds: int, examples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Encodings that find the same examples difficult."""
    random = np.random.default_rng(seed)
    difficulty = random.standard_normal(examples)
    return {
        name: difficulty + 0.5 * random.standard_normal((seeds, examples)) < norm.ppf(share) * math.sqrt(1.25)
        for name, share in accuracies.items()
    }


def mri() -> dict[str, np.ndarray]:
    """A comparison on real volumes: 140 held out, one seed; none 60.0, learned 58.6, mixed 65.7, liere:8 64.3."""
    difficulty = np.random.default_rng(0).standard_normal(140)
    found = {}
    for place, (name, right) in enumerate({"none": 84, "learned": 82, "mixed": 92, "liere:8": 90}.items()):
        order = np.argsort(difficulty + 0.8 * np.random.default_rng(place + 1).standard_normal(140))
        found[name] = np.isin(np.arange(140), order[:right])
    return found


# ---- one accuracy


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from([0.8, 0.95, 0.999]))
def test_interval_of_one_seed_is_wilsons(examples: int, share: float, level: float) -> None:
    right = round(share * examples)
    wilson = binomtest(right, examples).proportion_ci(level, method="wilson")
    found = accuracy_interval(answers(right, examples), level=level)
    assert found.estimate == right / examples
    assert found[1:] == pytest.approx((wilson.low, wilson.high), abs=1e-12)


@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
@pytest.mark.parametrize("examples", [1, 2, 6, 48, 1000])
def test_intervals_of_all_right_and_all_wrong_have_width(seeds: int, examples: int) -> None:
    all_right = accuracy_interval(np.ones((seeds, examples)))
    assert all_right.estimate == all_right.high == 1
    wilson = binomtest(examples, examples).proportion_ci(method="wilson").low
    assert all_right.low == pytest.approx(wilson), "seeds that agree are no further examples"
    all_wrong = accuracy_interval(np.zeros((seeds, examples)))
    assert all_wrong == pytest.approx((0, 0, 1 - wilson))


def test_seeds_that_agree_add_nothing() -> None:
    once, other = noisy({"a": 0.8, "b": 0.7}, 1, 100).values()
    again, others = np.repeat(once, 4, axis=0), np.repeat(other, 4, axis=0)
    assert accuracy_interval(again) == pytest.approx(accuracy_interval(once))
    assert difference_interval(again, others) == pytest.approx(difference_interval(once, other))


def test_seeds_that_are_independent_are_as_many_more_examples() -> None:
    right = np.random.default_rng(0).random((20, 500)) < 0.7
    low, high = binomtest(int(right.sum()), right.size).proportion_ci(method="wilson")
    found = accuracy_interval(right)
    assert high - low <= (found.high - found.low) * 1.001
    assert found.high - found.low < 1.25 * (high - low)


def test_interval_over_training_runs_is_students() -> None:
    shares = np.array([0.55, 0.6, 0.7])
    right = np.random.default_rng(0).random((3, 40_000)) < shares[:, None]
    half = student.ppf(0.975, 2) * shares.std(ddof=1) / math.sqrt(3)
    found = accuracy_interval(right)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.15)
    difference = difference_interval(right, np.zeros_like(right))
    assert (difference.high - difference.low) / 2 == pytest.approx(half, rel=0.15)


def two_way(x: np.ndarray) -> tuple[float, float, float, float]:
    """Mean squares of seeds, examples and the rest of x `(seeds, examples)`, and the variance of an entry."""
    seeds, examples = x.shape
    rest = x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + x.mean()
    return (
        examples * x.mean(axis=1).var(ddof=1),
        seeds * x.mean(axis=0).var(ddof=1),
        (rest**2).sum() / ((seeds - 1) * (examples - 1)),
        x.var() * examples / (examples - 1),
    )


@pytest.mark.parametrize("shares", [(0.7, 0.6), (0.7, 0.6, 0.8)])
def test_effective_examples_follow_from_the_two_way_layout(shares: tuple[float, ...]) -> None:
    right = np.stack([noisy({"a": share}, 3, 25, seed)["a"] for seed, share in enumerate(shares)]).astype(float)
    right[0, 0, :6] = 0  # a training that is worse
    sums = statistics._Sums(right)
    added = np.ones((3, 1))
    pairs = [np.hstack([a - b, added, -added]) for a, b in itertools.combinations(right, 2)]
    ratio = float(np.mean([own / rest for own, _, rest, _ in map(two_way, pairs)]))
    layouts = [
        (sums.differences(*np.triu_indices(len(shares), 1)), pairs, ratio, len(shares) - 1),
        (sums.accuracies(), [np.hstack([each, added, 0 * added]) for each in right], 0.0, 1),
    ]
    for spread, xs, mean, compared in layouts:
        for place, x in enumerate(xs):
            own, of_examples, rest, entry = two_way(x)
            of_runs = max(own, mean * rest)
            together = max(max(of_runs, rest) + max(of_examples - rest, 0), entry)
            assert spread.effective[place] == pytest.approx(25 * 3 * entry / together)
            assert spread.of_runs[place] == pytest.approx(of_runs / together)
            assert spread.of_rest[place] == pytest.approx(rest / together)
            assert spread.freedom == compared * 2


# ---- differences


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 25))
def test_interval_of_a_difference_of_one_seed_is_tangos(gained: int, lost: int, same: int) -> None:
    """By the score test at its ends, with the nearest model found by maximizing the likelihood."""
    n = max(gained + lost + same, 1)
    a, b = answers(gained, n), answers(lost, n, wrong_first=gained)
    found = difference_interval(a, b)
    assert found.estimate == pytest.approx((a.sum() - b.sum()) / n)
    for end in found[1:]:
        if abs(end) < 0.9999:
            only_b = nearest(int(a.sum()), int(b.sum()), n, end)
            score = abs(found.estimate - end) * math.sqrt(n) / math.sqrt(2 * only_b + end * (1 - end))
            assert score == pytest.approx(Z, rel=2e-3)
        else:
            assert abs(found.estimate) == 1


def nearest(gained: int, lost: int, n: int, difference: float) -> float:
    """The share that b alone has right, most likely among models of this difference."""

    def unlikely(only_b: float) -> float:
        only_a, rest = only_b + difference, 1 - 2 * only_b - difference
        terms = ((gained, only_a), (lost, only_b), (n - gained - lost, rest))
        return -sum(count * math.log(max(share, 1e-300)) for count, share in terms if count)

    low, high = max(0.0, -difference), (1 - difference) / 2
    return float(minimize_scalar(unlikely, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 200))
def test_difference_excludes_zero_where_mcnemars_test_rejects(gained: int, lost: int, same: int) -> None:
    n = gained + lost + same
    found = difference_interval(answers(gained, n), answers(lost, n, wrong_first=gained))
    rejects = (gained - lost) ** 2 > Z**2 * (gained + lost)
    assert (found.low > 0 or found.high < 0) == rejects


@pytest.mark.parametrize("seeds", [1, 3])
def test_differences_are_antisymmetric(seeds: int) -> None:
    a, b = noisy({"a": 0.8, "b": 0.7}, seeds, 50).values()
    there, back = difference_interval(a, b), difference_interval(b, a)
    assert back == pytest.approx((-there.estimate, -there.high, -there.low), abs=1e-8)


@pytest.mark.parametrize("seeds", [1, 3])
def test_differences_at_the_edges_have_width_and_are_in_range(seeds: int) -> None:
    ones, zeros = np.ones((seeds, 6)), np.zeros((seeds, 6))
    same = difference_interval(ones, ones)
    assert same.estimate == 0
    assert same.low == pytest.approx(-(Z**2) / (6 + Z**2), rel=1e-6)  # Wilson's of 0 of 6
    assert same.high == pytest.approx(-same.low)
    most = difference_interval(ones, zeros)
    assert most.estimate == most.high == 1
    assert 0 < most.low < 0.8


# ---- medians and the bootstrap


def test_interval_of_a_median_is_close_to_that_of_order_statistics() -> None:
    found = median_interval(range(1, 21))
    assert found.estimate == 10.5
    assert found[1:] == pytest.approx((6, 15), abs=1)  # Conover's table: ranks 6 and 15 of 20
    assert median_interval(range(5)) == (2, -math.inf, math.inf)
    assert median_interval([3.0]) == (3, -math.inf, math.inf)
    inside = [
        found.low <= 0 <= found.high for found in map(median_interval, np.random.default_rng(0).normal(size=(300, 15)))
    ]
    assert np.mean(inside) > 0.93


def mean_of(values: np.ndarray) -> Statistic:
    return lambda weights: weights @ values / weights.sum(axis=1)


def over_seeds(*scores: float) -> statistics.BootstrapEstimate:
    """Scores of seeds that no examples are behind."""
    return draw([mean_of(np.array([score])) for score in scores], 1)


def test_scores_of_seeds_have_students_interval() -> None:
    scores = np.array([0.3, 0.5, 0.9, 0.4])
    half = student.ppf(0.975, 3) * scores.std(ddof=1) / 2
    found = over_seeds(*scores).interval()
    assert found == pytest.approx((scores.mean(), scores.mean() - half, scores.mean() + half), rel=0.1)
    assert over_seeds(0.5).interval() == (0.5, -math.inf, math.inf)
    assert (over_seeds(*(scores + 0.1)) - over_seeds(*scores)).interval() == pytest.approx((0.1, 0.1, 0.1))


def bootstrap(statistics: Sequence[Statistic], examples: int, **settings: Any) -> Interval:
    return draw(statistics, examples, **settings).interval()


@pytest.mark.parametrize("examples", [4, 8, 40])
def test_bootstrap_of_a_mean_is_students_interval(examples: int) -> None:
    values = np.random.default_rng(0).standard_normal(examples)
    half = student.ppf(0.975, examples - 1) * values.std(ddof=1) / math.sqrt(examples)
    found = bootstrap([mean_of(values)], examples, draws=20_000)
    assert found.estimate == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert bootstrap([mean_of(values)], examples, draws=20_000) == found


def test_bootstrap_counts_variation_between_trainings() -> None:
    values = np.random.default_rng(0).standard_normal(400)
    alike = bootstrap([mean_of(values)] * 3, 400)
    assert alike == pytest.approx(bootstrap([mean_of(values)], 400), abs=1e-9)
    apart = bootstrap([mean_of(values + shift) for shift in (-1, 0, 1)], 400)
    assert apart.high - apart.estimate == pytest.approx(student.ppf(0.975, 2) / math.sqrt(3), rel=0.1)
    only = bootstrap([mean_of(np.full(9, shift)) for shift in (-1.0, 0.0, 1.0)], 9)
    assert only.high == pytest.approx(student.ppf(0.975, 2) / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize("shared", [0.0, 0.5, 2.0])
def test_bootstrap_agrees_with_the_closed_form(shared: float) -> None:
    random = np.random.default_rng(3)
    right = shared * random.standard_normal(500) + random.standard_normal((3, 500)) < 0
    closed = accuracy_interval(right)
    found = bootstrap([mean_of(each) for each in right.astype(float)], 500, draws=4000)
    assert found.estimate == pytest.approx(closed.estimate)
    assert found.high - found.low == pytest.approx(closed.high - closed.low, rel=0.15)


def test_bootstrap_of_many_examples_is_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def mean(weights: np.ndarray) -> np.ndarray:
        shapes.append(weights.shape)
        return weights @ np.arange(50.0) / weights.sum(axis=1)

    whole = bootstrap([mean], 50)
    monkeypatch.setattr(statistics, "_MOST_WEIGHTS", 7 * 50 + 1)
    assert bootstrap([mean], 50) == whole
    assert max(draws for draws, _ in shapes[2:]) == 7


def test_simultaneous_percentile_intervals_hold_95_percent_of_draws() -> None:
    random = np.random.default_rng(0)
    rows = [*random.standard_normal((6, 4000)), np.zeros(4000)]  # the last can only be inside
    level = statistics.simultaneous_level(rows)
    assert level == pytest.approx(0.95 ** (1 / 6), abs=2e-3)
    low, high = np.quantile(rows, ((1 - level) / 2, (1 + level) / 2), axis=1)
    inside = (low[:, None] <= rows) & (rows <= high[:, None])
    assert inside.all(axis=0).mean() == pytest.approx(0.95, abs=5e-3)
    assert statistics.simultaneous_level([rows[0], 3 * rows[0] + 1]) == pytest.approx(0.95, abs=1e-3)
    infinite = np.where(rows[1] > 0, np.inf, rows[1])
    assert 0.95 < statistics.simultaneous_level([rows[0], infinite]) < 0.98


# ---- conclusions


def test_conclude_few_volumes_is_cannot_tell() -> None:
    found = conclude(mri(), chance=0.125)
    assert found.kind == "cannot-tell"
    assert (found.best, found.tied, found.behind) == ("mixed", ("liere:8", "none", "learned"), ())
    assert "differences are uncertain by up to ± 13 points" in found.sentence()


def test_four_videos_at_chance_cannot_tell_whether_anything_was_learned() -> None:
    found = conclude({"none": [1, 1, 0, 0], "mixed": [1, 0, 1, 0]}, chance=0.5)
    assert found.kind == "cannot-tell"
    assert "whether anything was learned" in found.sentence()
    assert conclude({"none": [1] * 4, "mixed": [0] * 4}, chance=0.5).kind == "cannot-tell"


def test_many_examples_at_chance_are_not_learned() -> None:
    found = conclude(noisy({"none": 0.1, "mixed": 0.1, "axial": 0.1}, 3, 60), chance=0.1)
    assert (found.kind, found.best, found.behind, found.gaps) == ("nothing-learned", None, (), {})
    assert set(found.tied) == {"none", "mixed", "axial"}


@pytest.mark.parametrize("seeds", [1, 2, 5])
@pytest.mark.parametrize("k", [2, 8])
def test_learned_is_what_the_exact_test_rejects_at_five_percent_over_all_models(k: int, seeds: int) -> None:
    for right in range(15, 31):
        rejects = binomtest(right, 60, 0.3, alternative="greater").pvalue < 0.05 / k
        shifted = [answers(right, 60, wrong_first=seed) for seed in range(seeds)]  # each seed right on other examples
        others = {str(i): [answers(18, 60)] * seeds for i in range(1, k)}
        assert (conclude({"none": shifted} | others, chance=0.3).kind != "nothing-learned") == rejects


def test_below_chance_is_behind_nothing() -> None:
    found = conclude({"a": np.zeros(60), "b": answers(30, 60)}, chance=0.5)
    assert (found.kind, found.best, found.behind) == ("nothing-learned", None, ())


def test_gains_are_over_none_wherever_it_stands() -> None:
    right = noisy({"axial": 0.5, "none": 0.6, "mixed": 0.7}, 1, 100)
    gains = conclude(right, chance=0.1).gains
    assert set(gains) == {"axial", "mixed"}
    for name, gain in gains.items():
        alone = difference_interval(right[name], right["none"])
        assert gain.estimate == alone.estimate
        assert gain.low < alone.low < alone.high < gain.high
    assert gains["axial"].estimate < 0 < gains["mixed"].estimate
    assert conclude({name: right[name] for name in ("axial", "mixed")}, chance=0.1).gains == {}


def test_enough_examples_all_right_show_that_position_is_irrelevant() -> None:
    names = ("none", "learned", "mixed")
    enough = math.ceil(Z**2 * 0.99 / 0.01)
    assert conclude({name: np.ones(enough + 1) for name in names}, chance=0.5).kind == "position-irrelevant"
    assert conclude({name: np.ones(enough - 1) for name in names}, chance=0.5).kind == "cannot-tell"
    assert conclude({name: np.ones(60) for name in names}, chance=0.5, margin=0.1).kind == "position-irrelevant"
    one_gains = {"none": answers(4850, 5000)} | {name: np.ones(5000) for name in names[1:]}
    assert conclude(one_gains, chance=0.5).kind == "tied"


def test_gain_that_is_significant_and_within_the_margin_is_irrelevant() -> None:
    found = conclude({"none": answers(99_600, 100_000), "mixed": np.ones(100_000)}, chance=0.5)
    assert found.kind == "position-irrelevant"
    assert found.gains["mixed"].low > 0


def test_encoding_ahead_of_all_is_best() -> None:
    right = noisy({"none": 0.3, "axial": 0.8, "mixed": 0.9}, 3, 1000)
    found = conclude(right, chance=0.1)
    assert (found.kind, found.best, found.tied, found.behind) == ("best", "mixed", (), ("axial", "none"))
    assert all(gap.low > 0 for gap in found.gaps.values())


def test_several_ahead_are_tied_and_the_rest_is_behind() -> None:
    right = noisy({"none": 0.3, "axial": 0.9, "mixed": 0.9, "learned": 0.6}, 3, 300)
    found = conclude(right, chance=0.1)
    assert found.kind == "tied"
    assert {found.best, *found.tied} == {"axial", "mixed"}
    assert found.behind == ("learned", "none")
    assert found.gains["axial"].low > 0.4
    assert [name for name, gap in found.gaps.items() if gap.low <= 0] == list(found.tied)


def test_encodings_within_the_margin_are_tied_without_none() -> None:
    right = {"axial": answers(990, 1000), "mixed": answers(991, 1000)}
    assert conclude(right, chance=0.1).kind == "tied"
    assert conclude(right, chance=0.1, margin=0.001).kind == "cannot-tell"


def test_single_name_cannot_be_compared() -> None:
    found = conclude({"mixed": [1] * 100}, chance=0.1)
    assert (found.kind, found.best, found.tied, found.gaps) == ("cannot-tell", "mixed", (), {})


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("examples", [1, 2, 500])
@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_equal_answers_never_have_a_winner(k: int, seeds: int, examples: int, value: int, chance: float) -> None:
    names = ["none", "axial", "mixed"][:k]
    found = conclude({name: np.full((seeds, examples), value) for name in names}, chance=chance)
    assert not found.behind
    assert found.kind in ("cannot-tell", "nothing-learned", "position-irrelevant")
    assert Conclusion.from_dict(found.as_dict()) == found
    if chance == 1 or value == 0:
        assert found.kind in ("cannot-tell", "nothing-learned")


def test_orders_of_names_seeds_and_examples_do_not_matter() -> None:
    right = noisy({"none": 0.6, "axial": 0.7, "mixed": 0.72, "learned": 0.7}, 3, 120)
    found = conclude(right, chance=0.1).as_dict()
    examples = np.random.default_rng(1).permutation(120)
    for names in itertools.permutations(right):
        assert same(conclude({name: right[name] for name in names}, chance=0.1).as_dict(), found)
    moved = {name: each[[2, 0, 1]][:, examples] for name, each in right.items()}
    assert same(conclude(moved, chance=0.1).as_dict(), found)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == pytest.approx(other, abs=1e-9) if isinstance(one, float) else one == other


def test_equal_accuracies_are_in_order_of_names() -> None:
    found = conclude({name: answers(50, 60) for name in ("b", "c", "a")}, chance=0.1)
    assert (found.best, found.tied) == ("a", ("b", "c"))


def test_arrays_lists_and_tensors_are_taken_with_one_seed_or_several() -> None:
    import torch

    right = noisy({"a": 0.7, "b": 0.6}, 1, 50)
    found = conclude(right, chance=0.1)
    assert conclude({name: each[0] for name, each in right.items()}, chance=0.1) == found
    assert conclude({name: each.tolist() for name, each in right.items()}, chance=0.1) == found
    assert conclude({name: torch.tensor(each) for name, each in right.items()}, chance=0.1) == found


@pytest.mark.parametrize("seeds", [1, 3, 5])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_quantile_of_equal_encodings_is_tukeys(k: int, seeds: int) -> None:
    """That of the studentized range; with seeds, where they explain all variation."""
    random = np.random.default_rng(0)
    if seeds == 1:
        right, freedom = random.random((k, 1, 20_000)) < 0.5, np.inf
    else:
        shares = 0.5 + 0.1 * random.standard_normal((k, seeds, 1))
        right, freedom = random.random((k, seeds, 20_000)) < shares, (k - 1) * (seeds - 1)
    sums = statistics._Sums(right.astype(float))
    found = sums.differences(*np.triu_indices(k, 1)).simultaneous_quantile()
    assert found == pytest.approx(studentized_range.ppf(0.95, k, freedom) / math.sqrt(2), rel=0.05 if k > 2 else 0.08)


def test_one_interval_of_a_difference_decides_and_is_said() -> None:
    for seed in range(60):
        for seeds in (1, 3):
            right = noisy({"none": 0.6, "a": 0.7, "b": 0.74, "c": 0.72}, seeds, 150, seed)
            found = conclude(right, chance=0.1)
            if found.kind != "cannot-tell":
                assert {name for name, gap in found.gaps.items() if gap.low > 0} == set(found.behind)
            if found.best != "none":
                assert found.gaps["none"] == found.gains[found.best]
                _, low, high = (signed(100 * each) for each in found.gaps["none"])
                assert f"points [{low}, {high}]" in found.sentence()


def test_gaps_are_all_right_in_95_percent_of_runs() -> None:
    """Of 200 comparisons of eight models, most of which are far behind."""
    true = {"best": 0.9, **{f"m{at}": 0.8 - 0.08 * at for at in range(7)}}
    wrong = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        found = conclude({name: random.random(400) < share for name, share in true.items()}, chance=0.1)
        assert found.best == "best"
        wrong += not all(gap.low <= 0.9 - true[name] <= gap.high for name, gap in found.gaps.items())
    assert wrong <= 18  # 5 % of 200 and two standard deviations


def test_variation_between_trainings_makes_a_tie() -> None:
    seeds = np.array([0.94, 0.84, 0.80])[:, None] > (np.arange(2000) + 0.5) / 2000
    others = np.array([0.80, 0.82, 0.81])[:, None] > (np.arange(2000) + 0.5) / 2000
    assert conclude({"a": seeds, "b": others}, chance=0.1).kind == "cannot-tell"
    assert conclude({"a": seeds[0], "b": others[0]}, chance=0.1).kind == "best"


# ---- costs


def tied_with_costs(**costs: Any) -> Conclusion:
    right = noisy({"none": 0.3, "axial": 0.9, "mixed": 0.9}, 3, 300)
    return conclude(right, chance=0.1, costs=costs)


def rounds(ratio: float, noise: float = 0.02, count: int = 30, seed: int = 0) -> np.ndarray:
    return ratio * np.exp(noise * np.random.default_rng(seed).standard_normal(count))


def test_cost_that_is_significantly_lower_decides_a_tie() -> None:
    found = tied_with_costs(axial=rounds(1.05), mixed=rounds(1.15, seed=1), none=rounds(1.0, seed=2))
    assert (found.kind, found.cheapest) == ("cheaper", "axial"), "none is behind, so its cost does not matter"
    assert "axial" in found.sentence()
    assert {found.best, *found.tied} == {"axial", "mixed"}


@pytest.mark.parametrize(
    "costs",
    [
        {},
        {"axial": rounds(1.0)},
        {"axial": rounds(1.0, 0.3, seed=4), "mixed": rounds(1.02, 0.3, seed=5)},
        {"axial": rounds(1.0), "mixed": rounds(1.0)},
        {"axial": rounds(1.0, count=4), "mixed": rounds(2.0, count=4, seed=1)},
    ],
)
def test_cost_is_called_lower_only_if_its_interval_is(costs: dict[str, Any]) -> None:
    found = tied_with_costs(**costs)
    assert (found.kind, found.cheapest) == ("tied", None)


@pytest.mark.parametrize(("ratio", "claimed"), [(0.93, True), (0.949, False), (0.97, False)])
def test_cheaper_is_at_least_5_percent(ratio: float, claimed: bool) -> None:
    noise = rounds(1.0, 0.005, seed=1)
    found = tied_with_costs(axial=ratio * noise, mixed=rounds(1.0, 0.005, seed=2))
    assert (found.kind == "cheaper") == claimed


def test_costs_at_the_limit_are_rarely_called_lower() -> None:
    found = tied_with_costs()
    charged = [
        {name: rounds(0.95**j, 0.3, count=15, seed=3 * i + j) for j, name in enumerate(found.intervals)}
        for i in range(400)
    ]
    claims = [statistics._cheapest([found.best, *found.tied], costs) is not None for costs in charged]
    assert np.mean(claims) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_rounds_are_compared_in_pairs() -> None:
    busy = rounds(1.0, 0.5)
    assert tied_with_costs(axial=busy, mixed=1.06 * busy * rounds(1.0, 0.001, seed=3)).cheapest == "axial"


# ---- several comparisons


def test_differences_of_chosen_pairs_are_simultaneous() -> None:
    right = noisy({"a": 0.9, "b": 0.6, "c": 0.58}, 1, 400)
    found = statistics.differences(right, [("a", "b"), ("b", "c")])
    for interval, pair in zip(found, ("ab", "bc"), strict=True):
        alone, bonferroni = (
            difference_interval(*(right[name] for name in pair), level=level) for level in (0.95, 0.975)
        )
        assert alone.low > interval.low > bonferroni.low - 1e-3
    [reverse] = statistics.differences(right, [("b", "a")])
    alone = difference_interval(right["a"], right["b"], level=0.95)
    assert reverse == pytest.approx((-alone.estimate, -alone.high, -alone.low))


# ---- kinds, sentences, dictionaries


def every_kind() -> dict[str, Conclusion]:
    names = ["none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ap", "comrope-ld"]
    spread = dict.fromkeys(names, 0.9) | {"none": 0.2, "learned": 0.3}
    found = [
        conclude(noisy(spread | {"mixed": 0.99}, 1, 2000), chance=0.1),
        conclude(noisy(spread, 1, 100), chance=0.1),
        conclude(noisy(spread, 3, 100), chance=0.1, costs={n: rounds(1 + i, seed=i) for i, n in enumerate(names)}),
        conclude({name: np.ones(2000) for name in names}, chance=0.1),
        conclude(noisy(dict.fromkeys(names, 0.1), 1, 200), chance=0.1),
        conclude(noisy(dict.fromkeys(names, 0.5) | {"mixed": 0.55}, 3, 60), chance=0.1),
    ]
    return {each.kind: each for each in found}


OTHERS = [
    conclude(mri(), chance=0.125),
    conclude({"none": [1, 1, 0, 0], "mixed": [1, 1, 0, 0]}, chance=0.5),
    conclude({"none": [1] * 6, "mixed": [1] * 6}, chance=0.5),
    conclude({"mixed": [1] * 60}, chance=0.5),
    conclude({"a": [1] * 5000, "b": [1] * 5000}, chance=0.5),
    conclude({"a": [1] * 50, "b": [0] * 50}, chance=0.5),
    conclude(noisy({"none": 0.6, "mixed": 0.64}, 3, 50), chance=0.1),
]


def test_kinds_are_closed() -> None:
    assert tuple(every_kind()) == KINDS


@pytest.mark.parametrize("found", [*every_kind().values(), *OTHERS], ids=lambda each: each.kind)
def test_dictionary_keeps_everything(found: Conclusion) -> None:
    sentence = found.sentence()
    assert sentence.endswith(".")
    assert "None" not in sentence
    assert "\n" not in sentence
    again = Conclusion.from_dict(json.loads(json.dumps(found.as_dict(), allow_nan=False)))
    assert again == found
    assert again.sentence() == sentence
    assert sorted([*([found.best] if found.best else []), *found.tied, *found.behind]) == sorted(found.intervals)


@pytest.mark.parametrize("kind", ["best", "tied", "cheaper", "position-irrelevant", "cannot-tell"])
@pytest.mark.parametrize("seeds", [1, 2, 4, 5])
def test_verdict_of_fewer_than_five_seeds_is_provisional(kind: str, seeds: int) -> None:
    found = Conclusion.from_dict(every_kind()[kind].as_dict() | {"seeds": seeds})
    said = found.sentence()
    assert ("provisional" in said) == found.as_dict()["provisional"] == (found.condition != "") == (seeds < 5)
    assert ("these models, not encodings" in said) == (found.scope == "models") == (seeds == 1)


def right_where(*shares: tuple[int, int]) -> list[int]:
    """Right on examples from one number to another, of 200."""
    return [int(any(first <= at < last for first, last in shares)) for at in range(200)]


def test_no_gain_is_visible_where_none_is_tied() -> None:
    right = {"none": (0, 165), "mixed": (0, 170), "axial": (0, 168), "learned": (0, 20)}
    found = conclude({name: [right_where(each)] * 3 for name, each in right.items()}, chance=0.1)
    assert (found.kind, found.behind) == ("tied", ("learned",))
    assert "none" in found.tied
    assert "; no gain of mixed over none is visible, 2.5 points [" in found.sentence()
    assert found.gaps["none"].low <= 0


def test_a_tie_without_none_names_the_largest_difference() -> None:
    right = {"mixed": (0, 170), "axial": (0, 168), "learned": (0, 20)}
    found = conclude({name: [right_where(each)] * 3 for name, each in right.items()}, chance=0.1)
    assert found.kind == "tied"
    assert "; the largest difference, mixed over learned, is 75.0 points [" in found.sentence()


def test_balanced_accuracy_is_the_mean_over_classes() -> None:
    assert balanced_accuracy([[1] * 8 + [0] * 2, [1] * 8 + [1, 0]], [0] * 8 + [1] * 2) == pytest.approx((1 + 0.25) / 2)


@pytest.mark.parametrize("values", [None, [], "best", {}, {"kind": "best"}, {1: 2}])
def test_invalid_conclusion_raises_one_line(values: Any) -> None:
    with pytest.raises(ValueError, match=r"^conclusion must [^\n]*, got [^\n]*$"):
        Conclusion.from_dict(values)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: conclude({}, chance=0.1), "must be a non-empty mapping of arrays by name"),
        (lambda: conclude([1, 0], chance=0.1), "must be a non-empty mapping of arrays by name"),
        (lambda: conclude({1: [1]}, chance=0.1), "names must be non-empty strings"),
        (lambda: conclude({"": [1]}, chance=0.1), "names must be non-empty strings"),
        (lambda: conclude({"a": []}, chance=0.1), r"must be \(seeds, examples\)"),
        (lambda: conclude({"a": [[]]}, chance=0.1), r"must be \(seeds, examples\)"),
        (lambda: conclude({"a": 1}, chance=0.1), r"must be \(seeds, examples\)"),
        (lambda: conclude({"a": np.ones((1, 2, 3))}, chance=0.1), r"must be \(seeds, examples\)"),
        (lambda: conclude({"a": [[1, 0], [1]]}, chance=0.1), "must be an array of numbers"),
        (lambda: conclude({"a": ["1"]}, chance=0.1), "must be an array of numbers"),
        (lambda: conclude({"a": None}, chance=0.1), "must be an array of numbers"),
        (lambda: conclude({"a": [1, math.nan]}, chance=0.1), "must be zeros and ones, got nan"),
        (lambda: conclude({"a": [1, 0.5]}, chance=0.1), "must be zeros and ones, got 0.5"),
        (lambda: conclude({"a": [1, 0], "b": [1]}, chance=0.1), "the same seeds and examples"),
        (lambda: conclude({"a": [1]}, chance=1.1), "chance must be between 0 and 1, got 1.1"),
        (lambda: conclude({"a": [1]}, chance=math.nan), "chance must be"),
        (lambda: conclude({"a": [1]}, chance="0.1"), "chance must be"),
        (lambda: conclude({"a": [1]}, chance=True), "chance must be"),
        (lambda: conclude({"a": [1]}, chance=0.1, margin=-1), "margin must be between 0 and 1, got -1"),
        (lambda: conclude({"a": [1]}, chance=0.1, costs={"b": [1.0]}), "names that are compared, a, got 'b'"),
        (lambda: conclude({"a": [1]}, chance=0.1, costs={"a": [1.0, 0]}), "must be above 0, got 0"),
        (lambda: conclude({"a": [1]}, chance=0.1, costs={"a": []}), "finite numbers"),
        (lambda: conclude({"a": [1]}, chance=0.1, costs={"a": [math.inf]}), "finite numbers"),
        (lambda: conclude({"a": [1], "b": [1]}, chance=0.1, costs={"a": [1], "b": [1, 2]}), "the same rounds"),
        (lambda: accuracy_interval([]), r"must be \(seeds, examples\)"),
        (lambda: accuracy_interval([1], level=1), "level must be above 0 and below 1, got 1"),
        (lambda: difference_interval([1], [1, 0]), "the same seeds and examples"),
        (lambda: difference_interval([1], [2]), "must be zeros and ones, got 2"),
        (lambda: median_interval([]), "finite numbers"),
        (lambda: median_interval([math.nan]), "finite numbers"),
        (lambda: bootstrap([], 3), "needs at least one statistic"),
        (lambda: bootstrap([np.sum], 0), "needs at least one statistic"),
    ],
)
def test_wrong_calls_are_one_line(call: Callable[[], Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert ", got " in str(caught.value)


# ---- calibration


@pytest.mark.slow
def test_guarantees_hold_in_simulated_runs() -> None:
    measured = calibration.measure_all(list(calibration.few()), 400, 0, log=lambda _: None)
    assert calibration.violated(measured) == []
    assert measured[-1].best > 0.8, "and 5 points are seen in 1,000 examples"


@pytest.mark.slow
def test_violated_guarantee_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "ERROR_RATE", 0.5)
    violations = calibration.violated(calibration.measure_all(list(calibration.few()), 150, 0, log=lambda _: None))
    assert any("false 'behind'" in line for line in violations)
    assert any("covered" in line for line in violations)


def test_page_shows_the_committed_calibration() -> None:
    results = json.loads(calibration.RESULTS.read_text())
    measured = [
        calibration.Measured(**one | {"case": calibration.Case(**{k: _tuple(v) for k, v in one["case"].items()})})
        for one in results["measured"]
    ]
    assert calibration.violated(measured) == []
    page = Path(calibration.PAGE).read_text(encoding="utf-8")
    assert calibration.render(page, measured) == page


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
