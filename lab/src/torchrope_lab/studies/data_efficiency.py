"""Accuracy with 30 % to 100 % of the training data (LieRE figure 2b; second version, figure 3b)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import Any

import numpy as np

from torchrope.encodings import LieRE
from torchrope_lab.conclusion import Interval, join_names, one_seed
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Table
from torchrope_lab.studies.engine.estimates import (
    NAMES,
    VERDICT,
    cells,
    contrasts,
    correct,
    drawn_means,
    ends,
    first_reach,
    format_interval,
    named,
    points,
    simultaneous_intervals,
    with_interval,
)
from torchrope_lab.studies.engine.grid import (
    AgainstMixed,
    AgainstReference,
    Compared,
    Extra,
    Factor,
    Grid,
    Level,
    Levels,
    OneFactor,
    Slope,
    advise_at,
    rights_at,
)
from torchrope_lab.studies.engine.published import LIERE_1, LIERE_2, published
from torchrope_lab.studies.engine.reference import described, reference_of
from torchrope_lab.studies.engine.study import Lab, Study

SHARES = (30, 40, 50, 60, 70, 80, 90, 100)
CLAIMED = 40
"""The share of the data, in percent, for which the first version of LieRE reports a lead."""

PUBLISHED = (
    published(
        "Claims in the texts; the figures print no numbers",
        f"{LIERE_1}, sections 4.2.1 and 5.2 and figure 2b; {LIERE_2}, abstract and section 1.1",
        """
        liere ahead of the others with 40 % of CIFAR-100 | 4.47
        data with which liere outperforms absolute on all of CIFAR-100 | 70
        """,
        ("Claim", "Value"),
        digits=2,
        note="It is not stated whether 4.47 % are points or a ratio. The first version compares the best epoch of "
        "each run on the validation set itself; here the last epoch is compared.",
    ),
)


def _levels(lab: Lab) -> Levels:
    """Return the shares with an example of every class or more, the largest of all data as configured."""
    sizes = _sizes(lab)
    return {share: {"data": {} if share == 100 else {"train_size": size}} for share, size in sizes.items()}


def _extra(lab: Lab, grid: Grid, compared: Compared) -> Extra:
    reference = reference_of(lab)
    needed = _needed(grid, reference)
    lead = _lead_as_claimed(grid)
    least = min(next(iter(grid.values())), key=float)
    examples = round(float(least) * lab.data.counts[0] / 100)
    return Extra(
        answer=_answer(needed, reference, lead, len(lab.seeds)),
        tables=[_needed_table(needed, reference)],
        notes=[*([lead.note] if lead else []), *_unmeasured(_sizes(lab))],
        advice=[advise_at(f"Little training data ({examples:,} examples of {lab.data.title})", grid, least)],
    )


@dataclass(frozen=True)
class _Lead:
    """Lead of LieRE with the share of the data for which its paper reports a lead.

    Attributes:
        name: The LieRE encoding whose smallest lead is largest.
        nearest: The encoding of another family with the smallest difference.
        found: Lead in points, at 5 % over all pairs.
        others: Encodings of other families.
    """

    name: str
    nearest: str
    found: Interval
    others: int

    @property
    def clause(self) -> str:
        """The end of an answer's first sentence; empty if the lead is not significant."""
        return f"; at {CLAIMED} % {self.name} leads all others by {points(self.found)}" if self.found.low > 0 else ""

    @property
    def note(self) -> str:
        """A sentence on the measured and the published lead."""
        return (
            f"With {CLAIMED} % of the data {self.name} is ahead of {self.nearest}, the nearest of {self.others} "
            f"encodings of other families, by {points(self.found)}, at 5 % over all pairs (Bonferroni). {LIERE_1}, "
            "section 5.2, reports a lead of 4.47 % over all comparable methods."
        )


def _lead_as_claimed(grid: Grid) -> _Lead | None:
    """Compute the lead of LieRE over all other families with 40 % of the data; None if either was not trained."""
    rights = rights_at(grid, CLAIMED)
    own = [name for name in rights if issubclass(resolve_encoding(name).parts[-1], LieRE)]
    others = [name for name in rights if name not in own]
    if not own or not others:
        return None
    pairs = [(name, other) for name in own for other in others]
    ahead = dict(zip(pairs, contrasts([(rights[one], rights[other]) for one, other in pairs]), strict=True))
    least = {name: min(others, key=lambda other: ahead[name, other].low) for name in own}
    best = max(own, key=lambda name: ahead[name, least[name]].low)
    return _Lead(best, least[best], ahead[best, least[best]], len(others))


def _sizes(lab: Lab) -> dict[float, int]:
    """Compute training examples by share; a subset without every class is left out."""
    total, classes = lab.data.counts[0], lab.data.num_classes
    sizes = {share: round(share * total / 100) for share in SHARES}
    return {share: size for share, size in sizes.items() if size >= classes}


def _needed(grid: Grid, reference: str) -> list[dict[str, Any]]:
    """Compute the share of the data with which every encoding reaches the reference trained on all of it."""
    target = correct(grid[reference][100]).mean(axis=0)
    compared = {name: levels for name, levels in grid.items() if name != reference}
    rights = [correct(runs).mean(axis=0) for levels in compared.values() for runs in levels.values()]
    target_means, *means = drawn_means(np.stack([target, *rights])).T  # of the same draws
    left = iter(means)
    reached = {
        name: _reached(levels, np.stack([next(left) for _ in levels], axis=1), target, target_means)
        for name, levels in compared.items()
    }
    spared = simultaneous_intervals({name: partial(_spared, *found) for name, found in reached.items()})
    return [_row(name, 100 - reached[name][0], spared[name]) for name in reached]


def _reached(
    levels: Mapping[Level, Any], means: np.ndarray, target: np.ndarray, target_means: np.ndarray
) -> tuple[float, np.ndarray]:
    """Compute the share of the data not needed, measured and in every draw; minus infinity if all is too little.

    Args:
        levels: Runs by share of the data in percent.
        means: Their top-1 in every draw of examples, `(draws, shares)`.
        target: Right answers of the reference, `(examples,)`.
        target_means: Its top-1 in every draw, `(draws,)`.
    """
    shares = np.array(list(levels), dtype=float)
    right = np.stack([correct(runs).mean(axis=0) for runs in levels.values()])  # [shares, examples]
    [measured] = first_reach(shares, right.mean(axis=1)[None], target.mean()[None])
    return 100 - float(measured), 100 - first_reach(shares, means, target_means)


def _spared(measured: float, draws: np.ndarray, level: float) -> Interval:
    return Interval(measured, *ends(draws, level))


def _row(name: str, needs: float, spared: Interval) -> dict[str, Any]:
    if np.isinf(needs):
        return {**named(name), **cells("needs", None), "verdict": "does not reach it"}
    low, high = (min(100 - end, 100.0) for end in (spared.high, spared.low))
    verdict = "needs less" if spared.low > 0 else "not significant"
    return {**named(name), **cells("needs", (needs, low, high)), "verdict": verdict}


def _needed_table(needed: Sequence[dict[str, Any]], reference: str) -> Table:
    note = (
        f"Share of the data at which top-1 first reaches that of {described(reference, 'the')} trained on all of it, "
        "interpolated between the shares trained on. Bootstrap over validation examples, the same for both; at 5 % "
        f"over all rows (Bonferroni). Ends are clipped to {SHARES[0]} and 100."
    )
    title = f"Data needed for the top-1 of {described(reference)} with all of it"
    return Table(title, (*NAMES, with_interval("needs", "Data needed", "%", 0), VERDICT), list(needed), note=note)


def _answer(needed: Sequence[dict[str, Any]], reference: str, lead: _Lead | None, seeds: int) -> str:
    less = sorted((row for row in needed if row["verdict"] == "needs less"), key=lambda row: row["needs"])
    target = f"to match {described(reference)} with all of it"
    end = f"{lead.clause if lead else ''}.{one_seed(seeds)}"
    if not less:
        return f"This run cannot tell whether any encoding needs less data {target}{end}"
    share = format_interval([less[0][key] for key in ("needs", "needs_low", "needs_high")], " %", 0)
    claim = f"{len(less)} of {len(needed)} encodings significantly need less data {target}"
    return f"{claim}, {less[0]['name']} the least with {share}{end}"


def _unmeasured(sizes: dict[float, int]) -> list[str]:
    missing = [f"{share} %" for share in SHARES if share not in sizes]
    return [f"Left out: {join_names(missing)}, with too few examples for one of each class."] if missing else []


def _halvings(share: float) -> float:
    return -log2(share / 100)


STUDY = Study(
    title="Data efficiency",
    question="How much training data does each encoding need?",
    sources=(f"{LIERE_1}, figure 2b", f"{LIERE_2}, figure 3b"),
    encodings=("learned", "axial", "mixed", "liere:8"),
    optional_settings=("reference",),
    find=OneFactor(
        factor=Factor("share", "Training data", "%"),
        levels=_levels,
        compare=[
            AgainstReference("the same examples"),
            AgainstMixed(),
            Slope(
                "Slope of the lead over the amount of data",
                "Lead gained per halving of the data",
                x=_halvings,
                of_lead=True,
            ),
        ],
        claim="less data",
        reference=True,
        extra=_extra,
        note="Smaller subsets are contained in larger ones, with balanced classes.",
        notes=["All runs have the same number of epochs, so that less data also means fewer steps."],
        published=PUBLISHED,
    ),
)
