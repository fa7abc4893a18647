"""Which differences are wins, and what is recommended."""

from dataclasses import dataclass

import numpy as np
import pytest

from torchrope.lab.studies.ranking import Accuracy, not_behind, rank


def hits(*shares: float, examples: int = 400) -> np.ndarray:
    """Right answers `(seeds, examples)`: each seed has the given share right, the first ones."""
    return np.stack([np.arange(examples) < share * examples for share in shares]).astype(float)


def test_a_large_difference_is_a_win_and_a_small_one_is_not() -> None:
    coin = np.random.default_rng(0).permuted(hits(0.905), axis=1)
    places = rank([Accuracy("far", hits(0.5)), Accuracy("near", coin), Accuracy("top", hits(0.91))])
    assert [(p.name, p.rank, p.verdict) for p in places] == [
        ("top", 1, "best"),
        ("near", 2, "tied"),
        ("far", 3, "behind"),
    ]
    assert places[1].gap == pytest.approx(0.005)
    assert "0.5 points behind, within the sampling error" in places[1].why
    assert places[2].why.startswith("41.0 points behind (95 % interval 3")


def test_the_comparison_is_paired_over_the_same_examples() -> None:
    # 2 points apart, on the same examples: unpaired intervals overlap, paired ones do not hold zero.
    places = rank([Accuracy("a", hits(0.90)), Accuracy("b", hits(0.88))])
    assert places[1].verdict == "behind"


def test_a_difference_smaller_than_the_spread_over_seeds_is_called_that() -> None:
    places = rank([Accuracy("a", hits(0.96, 0.84)), Accuracy("b", hits(0.92, 0.82))])
    assert places[1].gap == pytest.approx(0.03)
    assert places[1].verdict == "tied"
    assert "within the spread over seeds of 11.0 points" in places[1].why
    steady = rank([Accuracy("a", hits(0.901, 0.899)), Accuracy("b", hits(0.871, 0.869))])
    assert steady[1].verdict == "behind"


@dataclass(frozen=True)
class Known:
    """What is reached, and the interval of any difference to another."""

    name: str
    mean: float
    spread: float | None = None
    ahead: tuple[float, float] = (0.01, 0.5)
    measure: str = "top-1"

    def ahead_of(self, other: "Known") -> tuple[float, float]:
        return self.ahead


@pytest.mark.parametrize(("low", "verdict"), [(-0.01, "tied"), (0.0, "tied"), (1e-9, "behind")])
def test_rank_ties_where_the_interval_reaches_zero(low: float, verdict: str) -> None:
    places = rank([Known("best", 0.75, ahead=(low, 0.5)), Known("other", 0.5)])
    assert places[1].verdict == verdict
    assert places[1].why.startswith("25.0 points behind")
    assert f"(95 % interval {100 * low:.1f} to 50.0)" in places[1].why


@pytest.mark.parametrize(
    ("spreads", "verdict"),
    [
        ((0.15, 0.2), "tied"),
        ((0.25, None), "tied"),
        ((None, 0.25), "tied"),
        ((0.15, 0.199), "behind"),
        ((0.2, 0.1), "behind"),
    ],
)
def test_rank_ties_where_both_spreads_together_are_as_large_as_the_gap(
    spreads: tuple[float | None, float | None], verdict: str
) -> None:
    places = rank([Known("best", 0.75, spreads[0]), Known("other", 0.5, spreads[1])])
    assert places[1].gap == 0.25
    assert places[1].verdict == verdict
    assert not_behind(places) == (["best", "other"] if verdict == "tied" else ["best"])


def test_a_difference_is_between_means_over_seeds() -> None:
    a = Accuracy("a", np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]))
    b = Accuracy("b", np.array([[0.0, 0.0, 0.0, 0.0]]))
    assert a.ahead_of(b) == (0.5, 0.5)  # of every example
    assert b.ahead_of(a) == (-0.5, -0.5)


def test_mean_and_spread_are_over_seeds() -> None:
    accuracy = Accuracy("a", hits(0.9, 0.8, 0.7))
    assert accuracy.mean == pytest.approx(0.8)
    assert accuracy.spread == pytest.approx(0.1)
    assert Accuracy("b", hits(0.9)).spread is None
