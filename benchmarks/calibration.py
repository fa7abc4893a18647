"""Measure the coverage of intervals and the error rates of conclusions on simulated runs; render docs/statistics.md.

    python benchmarks/calibration.py

An answer of encoding m, seed s and example i is right where √0.75 d_i + √0.05 e_mi + √0.2 r_msi < a_m + z_ms, with
d, e and r standard normal and z normal of deviation 0.05: the population accuracy of a training is Φ(a_m + z_ms).
`docs/statistics.md` explains these numbers. The exit status is 1 if an error rate is above its nominal one.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
from markers import insert_between_markers
from scipy.stats import norm

from torchrope.files import write_whole
from torchrope_lab.conclusion import BASELINE, Conclusion
from torchrope_lab.engine.provenance import provenance
from torchrope_lab.statistics import conclude

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "calibration.json"
PAGE = ROOT / "docs" / "statistics.md"

SHARED, OWN = 0.75, 0.05
"""Variance shares of an answer: example effects common to all encodings, and example effects specific to one."""
SPREAD = 0.05
"""Standard deviation between training runs of one encoding, in the unit of the latent normal variable."""
NAMES = (2, 4, 8)
SEEDS = (1, 3, 5)
EXAMPLES = (20, 200, 1000, 10_000)
ACCURACIES = (0.12, 0.5, 0.99)
MARGIN = 0.01
AT_ONCE = 20_000_000  # answers in memory

FALSE = 0.05
"""Nominal rate of false claims."""
COVERED = 0.93
"""Required coverage of 95 % intervals, over cases with the same numbers of seeds and examples."""


@dataclass(frozen=True)
class Case:
    """Parameters of simulated runs.

    Attributes:
        scenario: Name, of `SCENARIOS`.
        accuracies: True accuracies, over all training runs and examples, by encoding; the first is "none".
        seeds: Training runs of each encoding.
        examples: Number of held-out examples.
        spread: Standard deviation between training runs, see `SPREAD`, by encoding.
        chance: Passed to `conclude`.
    """

    scenario: str
    accuracies: tuple[float, ...]
    seeds: int
    examples: int
    spread: tuple[float, ...]
    chance: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Rates over simulated runs.

    Attributes:
        covered: Fraction of accuracy intervals, each of 95 % by itself, that contain the true value.
        gains_covered: Fraction of runs in which all gains over "none" are in their intervals, of 95 % together.
        behind: Fraction of runs with a false "behind".
        best: Fraction of runs with kind "best".
        irrelevant: Fraction with kind "position-irrelevant".
        learned: Fraction with neither "nothing-learned" nor "cannot-tell".
    """

    case: Case
    runs: int
    covered: float
    gains_covered: float
    behind: float
    best: float
    irrelevant: float
    learned: float


def names_of(case: Case) -> list[str]:
    return [BASELINE, *(f"encoding{i}" for i in range(1, len(case.accuracies)))]


def simulate(case: Case, runs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Simulate answers `(runs, encodings, seeds, examples)` and true accuracies `(runs, encodings)`.

    With one seed these are of the trained models: Φ(a + z). With several, and for "one training", they are means over
    all training runs.
    """
    k, shape = len(case.accuracies), (runs, len(case.accuracies), case.seeds)
    spread = np.array(case.spread)
    at = norm.ppf(case.accuracies) * np.sqrt(1 + spread**2)
    trained = at[:, None] + spread[:, None] * random.standard_normal(shape)
    latent = random.standard_normal((*shape, case.examples), dtype=np.float32)
    latent *= math.sqrt(1 - SHARED - OWN)
    latent += math.sqrt(SHARED) * random.standard_normal((runs, 1, 1, case.examples), dtype=np.float32)
    latent += math.sqrt(OWN) * random.standard_normal((runs, k, 1, case.examples), dtype=np.float32)
    right = latent < trained[..., None]
    if case.seeds == 1 and case.scenario != "one training":
        return right, norm.cdf(trained[..., 0])
    return right, np.broadcast_to(case.accuracies, (runs, k))


def measure(case: Case, runs: int, random: np.random.Generator) -> Measured:
    names = names_of(case)
    most = max(1, AT_ONCE // (len(names) * case.seeds * case.examples))
    counts = np.zeros(6)
    for start in range(0, runs, most):
        right, truth = simulate(case, min(most, runs - start), random)
        for answers, true in zip(right, truth, strict=True):
            of = dict(zip(names, true.tolist(), strict=True))
            given = dict(zip(names, answers, strict=True))
            counts += _judged(conclude(given, chance=case.chance, margin=MARGIN), of)
    return Measured(case, runs, *(counts / runs).tolist())


def _judged(found: Conclusion, true: dict[str, float]) -> list[float]:
    base = true[BASELINE]
    covered = [low <= true[name] <= high for name, (low, high) in found.intervals.items()]
    gains = [gain.low <= true[name] - base <= gain.high for name, gain in found.gains.items()]
    wrong = found.best is not None and any(true[name] >= true[found.best] for name in found.behind)
    learned = found.kind not in ("nothing-learned", "cannot-tell")
    return [
        float(np.mean(covered)),
        float(all(gains)),
        float(wrong),
        float(found.kind == "best"),
        float(found.kind == "position-irrelevant"),
        float(learned),
    ]


# ---- scenarios


def _case(scenario: str, accuracies: tuple[float, ...], seeds: int, examples: int, chance: float = 0.0) -> Case:
    """Build a case. Runs do not vary with one seed, whose conclusions are about the trained models, nor by guessing."""
    spread = SPREAD if seeds > 1 and not chance else 0.0
    return Case(scenario, accuracies, seeds, examples, (spread,) * len(accuracies), chance)


def _cases(scenario: str, of: Callable[[int], tuple[float, ...]], fewest: int = 2, chance: float = 0.0) -> list[Case]:
    """Build the cases of a scenario, whose accuracies are a function of the number of encodings."""
    sizes = [(k, seeds, examples) for k in NAMES if k >= fewest for seeds in SEEDS for examples in EXAMPLES]
    return [_case(scenario, of(k), seeds, examples, chance) for k, seeds, examples in sizes]


def unequal_spreads() -> list[Case]:
    """Equal encodings of which one varies four times as much between training runs."""
    cases = [case for case in _cases("unequal spreads", lambda k: (0.5,) * k) if case.seeds > 1]
    return [replace(case, spread=(*case.spread[1:], 4 * SPREAD)) for case in cases]


def one_training() -> list[Case]:
    """Equal encodings with one training run each, whose variation one seed does not show."""
    cases = [case for case in _cases("one training", lambda k: (0.5,) * k) if case.seeds == 1]
    return [replace(case, spread=(SPREAD,) * len(case.accuracies)) for case in cases]


SCENARIOS = [
    # all equal: "behind" is false
    *(case for share in ACCURACIES for case in _cases("equal", lambda k, share=share: (share,) * k)),
    # two equal encodings 20 points ahead of the others: "best" is false
    *_cases("two best", lambda k: (0.7,) * (k - 2) + (0.9,) * 2, fewest=4),
    # one encoding gains exactly the margin, the others nothing: "position-irrelevant" is false
    *_cases("at the margin", lambda k: (0.9,) * (k - 1) + (0.9 + MARGIN + 1e-9,)),
    # guessing among ten classes: only "nothing-learned" and "cannot-tell" are true
    *_cases("at chance", lambda k: (0.1,) * k, chance=0.1),
    # one encoding is 5 points ahead of all others: "best" is true
    *_cases("5 points ahead", lambda k: (0.85,) * (k - 1) + (0.9,)),
    *one_training(),
    *unequal_spreads(),
]


def few() -> Iterator[Case]:
    """Yield cases for a quick check."""
    for k, seeds, examples, accuracy in ((2, 1, 60, 0.5), (8, 1, 200, 0.12), (8, 3, 200, 0.5), (4, 5, 60, 0.99)):
        yield _case("equal", (accuracy,) * k, seeds, examples)
    yield _case("two best", (0.7, 0.7, 0.9, 0.9), 3, 200)
    yield _case("at the margin", (0.9, 0.9 + MARGIN + 1e-9), 1, 1000)
    yield _case("at chance", (0.1,) * 4, 1, 60, chance=0.1)
    yield _case("5 points ahead", (0.85, 0.9), 1, 1000)


def measure_all(cases: list[Case], repeats: int, seed: int, log: Callable[[str], object]) -> list[Measured]:
    """Measure cases: half of the repeats in scenarios other than "equal", a quarter for 10,000 examples."""
    measured = []
    for place, case in enumerate(cases):
        runs = max(repeats // (4 if case.examples >= 10_000 else 1) // (1 if case.scenario == "equal" else 2), 1)
        measured.append(measure(case, runs, np.random.default_rng((seed, place))))
        if place % 20 == 19:
            log(f"{place + 1} of {len(cases)} cases")
    return measured


# ---- error rates


def violated(measured: list[Measured]) -> list[str]:
    """Return the rates that are not nominal, beyond what the number of simulated runs explains (3 standard errors)."""
    claims = {"equal": "behind", "two best": "best", "at the margin": "irrelevant", "at chance": "learned"}
    violations = []
    for one in measured:
        claim = claims.get(one.case.scenario)
        share = getattr(one, claim) if claim else 0.0
        if share > FALSE + 3 * math.sqrt(FALSE * (1 - FALSE) / one.runs):
            violations.append(f"false {claim!r} in {100 * share:.1f} % of runs: {one.case}")
    for seeds, examples in sorted({(one.case.seeds, one.case.examples) for one in measured}):
        own = _of(measured, "equal", seeds, examples)
        for what in ("covered", "gains_covered"):
            share = float(np.mean([getattr(one, what) for one in own])) if own else 1.0
            if share < COVERED:
                violations.append(f"{what} {100 * share:.1f} %: {seeds} seeds, {examples} examples")
    return violations


# ---- results


def tables(measured: list[Measured]) -> str:
    """Build Markdown tables of coverage and false "behind", of the other claims, and of powers."""
    sizes = [(seeds, examples) for seeds in SEEDS for examples in EXAMPLES]
    rows, claims, powers = [], [], []
    for seeds, examples in sizes:
        size = [str(seeds), f"{examples:,}"]

        def extreme(scenario: str, what: str, of: Callable[[Iterable[float]], float] = max) -> str:
            """Return the highest or lowest rate over k, each the mean over accuracies."""
            by_k: dict[int, list[float]] = {}
            for one in _of(measured, scenario, seeds, examples):  # noqa: B023
                by_k.setdefault(len(one.case.accuracies), []).append(getattr(one, what))
            return _percent(of(map(float, map(np.mean, by_k.values()))))

        spread = "one training" if seeds == 1 else "unequal spreads"
        covered = [extreme("equal", what, min) for what in ("covered", "gains_covered")]
        rows.append([*size, *covered, extreme("equal", "behind"), extreme(spread, "behind")])
        others = (("two best", "best"), ("at the margin", "irrelevant"), ("at chance", "learned"))
        claims.append([*size, *(extreme(*each) for each in others)])
        powers.append([*size, *(_percent(one.best) for one in _of(measured, "5 points ahead", seeds, examples))])
    head = ["seeds", "examples"]
    return "\n\n".join(
        [
            "Coverage of intervals, the lowest over k, and false “behind” among equal encodings, the highest over k, "
            "in percent, over accuracies of 12, 50 and 99 %. Last: false “behind” where the model does not hold: with "
            "one seed, of claims about encodings; with several, if one encoding varies four times as much.",
            _table([*head, "accuracies covered", "gains covered", "false “behind”", "model does not hold"], rows),
            "Other false claims in percent, the highest over k: “best” of two equal encodings ahead of the others, "
            "“position-irrelevant” if the true gain is the margin, a model above chance if all are at chance.",
            _table([*head, "false “best”", "false “position-irrelevant”", "false learning"], claims),
            "Power: how often an encoding 5 points ahead (90 against 85 %) is called “best”, in percent.",
            _table([*head, *(f"k = {k}" for k in NAMES)], powers),
        ]
    )


def _of(measured: list[Measured], scenario: str, seeds: int, examples: int) -> list[Measured]:
    wanted = (scenario, seeds, examples)
    return [one for one in measured if (one.case.scenario, one.case.seeds, one.case.examples) == wanted]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def render(page: str, measured: list[Measured]) -> str:
    """Return the page with the tables between its markers."""
    return insert_between_markers(page, "calibration", tables(measured))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000, help="simulated runs of a case (default: 1,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulation (default: 0)")
    parser.add_argument("--check", action="store_true", help="only check a few cases; write nothing")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="output file (default: benchmarks/results/calibration.json)"
    )
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be above 0, got {options.repeats}")
    cases = list(few()) if options.check else SCENARIOS
    measured = measure_all(cases, options.repeats, options.seed, lambda line: print(line, flush=True))
    failures = violated(measured)
    print(*failures, sep="\n", file=sys.stderr, end="\n" if failures else "")
    print(f"{sum(one.runs for one in measured)} simulated runs, {len(failures)} error rates above nominal")
    if options.check:
        return 1 if failures else 0
    command = shlex.join(["python", "benchmarks/calibration.py", *sys.argv[1:]])
    source = {"command": command, "date": date.today().isoformat(), **provenance(("numpy", "scipy"))}
    truth = {"shared": SHARED, "own": OWN, "spread": SPREAD, "margin": MARGIN}
    results = {"source": source, "truth": truth, "measured": [asdict(one) for one in measured]}
    write_whole(options.out, json.dumps(results, indent=1) + "\n")
    if options.out == RESULTS:
        write_whole(PAGE, render(PAGE.read_text(encoding="utf-8"), measured))
    print(tables(measured), str(options.out), sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
