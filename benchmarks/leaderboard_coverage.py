"""Simulate leaderboards, and print the coverage of their intervals and the size of their equivalence tests.

    python benchmarks/leaderboard_coverage.py

Answers of trainings are drawn as in `calibration.py`. On five data sets of the sizes of the plan two-cores, the true
gaps of eight encodings are those of a population of data sets plus normal deviations of 2 points. For equivalence,
half of the encodings of a data set are exactly 1 point ahead of the others. The exit status is 1 if a guarantee does
not hold.
"""

import argparse
import math
import sys
from dataclasses import dataclass, fields

import numpy as np
from calibration import FALSE, SPREAD, Case
from calibration import simulate as simulate_answers

from torchrope_lab.leaderboard.answers import EQUIVALENT, MARGIN, Answers, Comparison, compare_on, compare_over
from torchrope_lab.leaderboard.entry import DataSetResults, EncodingResults, pack
from torchrope_lab.results import DataFacts

SEEDS = 5
SETS = ((0.93, 360), (0.85, 600), (0.77, 752), (0.80, 752), (0.90, 1287))
"""Accuracy and number of validation examples of each data set."""
GAPS = (-20.0, -4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0)
"""Mean gaps over all data sets, in points, by encoding; the first is "none"."""
BETWEEN_SETS = 2.0
"""Standard deviation of an encoding's gap between data sets, in points."""
AT_MARGIN = Case("at the margin", (0.9,) * 4 + (0.9 + MARGIN / 100,) * 4, SEEDS, 20_000, (0.01,) * 8)
"""Trainings that agree and examples enough to show equivalence where there is any."""


@dataclass(frozen=True)
class Coverage:
    """Rates over simulated leaderboards.

    Attributes:
        runs: Number of leaderboards.
        covered_sets: Share of data sets of which all gaps between encodings are within their intervals.
        covered_means: Share of leaderboards of which all means over data sets are within their intervals.
        false_equivalence: Share of data sets with any verdict "equivalent" on a pair that differs by 1 point.
        true_equivalence: Share of pairs without a difference that are found equivalent there.
    """

    runs: int
    covered_sets: float
    covered_means: float
    false_equivalence: float
    true_equivalence: float

    def violations(self) -> list[str]:
        """Return the guarantees that do not hold, beyond what the number of leaderboards explains."""
        most = FALSE + 3 * math.sqrt(FALSE * (1 - FALSE) / self.runs)
        missed = {
            "covered_sets": 1 - self.covered_sets,
            "covered_means": 1 - self.covered_means,
            "false_equivalence": self.false_equivalence,
        }
        return [
            f"{name}: {100 * share:.1f} % above {100 * most:.1f} %" for name, share in missed.items() if share > most
        ]


def results_of(name: str, right: np.ndarray) -> DataSetResults:
    """Store answers `(encodings, seeds, examples)` as a leaderboard does."""
    encodings = {}
    for at, answers in enumerate(right):
        rights, losses = [pack(seed) for seed in answers], [5.0 + at] * len(answers)
        names = [f"{at}-{seed}" for seed in range(len(answers))]
        encodings["none" if at == 0 else f"encoding{at}"] = EncodingResults(rights, losses, [1.0] * len(answers), names)
    facts = DataFacts(name, name, axes=["y", "x"], num_classes=10, train=1, val=right.shape[-1])
    return DataSetResults(name, "", facts, "", 0.1, encodings, "", None, "", {}, {})


def simulate(runs: int, seed: int) -> Coverage:
    """Simulate leaderboards of the plan's size, and one data set at the margin for each."""
    random, counts = np.random.default_rng(seed), np.zeros(4)
    for _ in range(runs):
        results, true = [], []
        for at, (accuracy, examples) in enumerate(SETS):
            gaps = np.array(GAPS) + BETWEEN_SETS * random.standard_normal(len(GAPS))
            shares = np.clip(accuracy + gaps / 100, 0.02, 0.995)
            case = Case("leaderboard", tuple(shares.tolist()), SEEDS, examples, (SPREAD,) * len(GAPS))
            results.append(results_of(f"set{at}", simulate_answers(case, 1, random)[0][0]))
            true.append(100 * shares)
        answers = Answers(results)
        names = answers.names
        covered = [
            _covers(compare_on(answers, name), dict(zip(names, shares, strict=True)))
            for name, shares in zip(answers.sets, true, strict=True)
        ]
        over = compare_over(answers)
        margin = Answers([results_of("margin", simulate_answers(AT_MARGIN, 1, random)[0][0])])
        truth = dict(zip(names, AT_MARGIN.accuracies, strict=True))
        verdicts = compare_on(margin, "margin").pairs
        equal = {pair: truth[pair[0]] == truth[pair[1]] for pair in verdicts}
        found_equal = {pair: each.verdict == EQUIVALENT for pair, each in verdicts.items()}
        false = any(found_equal[pair] and not equal[pair] for pair in equal)
        power = np.mean([found_equal[pair] for pair in equal if equal[pair]])
        counts += [np.mean(covered), _covers(over, dict(zip(names, GAPS, strict=True))), false, power]
    return Coverage(runs, *(counts / runs).tolist())


def _covers(comparison: Comparison | None, true: dict[str, float]) -> bool:
    assert comparison is not None
    return all(
        each.gap.low <= true[one] - true[other] <= each.gap.high for (one, other), each in comparison.pairs.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="simulated leaderboards (default: 1,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulation (default: 0)")
    options = parser.parse_args()
    found = simulate(options.runs, options.seed)
    for each in fields(found):
        value = getattr(found, each.name)
        print(f"{each.name:20s} {value if each.name == 'runs' else f'{100 * value:.1f} %'}")
    print(*found.violations(), sep="\n")
    return 1 if found.violations() else 0


if __name__ == "__main__":
    sys.exit(main())
