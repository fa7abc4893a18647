"""How much training data each encoding needs: 30 % to all of it (LieRE figure 2b; second version, figure 3b)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrope.lab.results import Advice, Column, Findings, Table
from torchrope.lab.studies.engine.estimates import (
    about_intervals,
    at_best,
    caveat,
    correct,
    ends,
    first_reach,
    not_told_apart,
    resamples,
    told,
    trend,
)
from torchrope.lab.studies.engine.grid import (
    ENCODING,
    ONE_BY_ONE,
    Cells,
    Factor,
    Plan,
    contrast_table,
    direction,
    lead_figure,
    leads,
    named,
    top1_figure,
    top1_table,
    train_grid,
)
from torchrope.lab.studies.engine.published import LIERE_1, LIERE_2, published
from torchrope.lab.studies.engine.runs import Run
from torchrope.lab.studies.engine.study import Lab, Study

SHARES = (30, 50, 70, 90, 100)
REFERENCE = "learned"
FACTOR = Factor("share", "Training data", "%")

PUBLISHED = (
    published(
        "What the texts say; the figures print no numbers",
        f"{LIERE_1}, section 5.2 and figure 2b; {LIERE_2}, abstract and section 1.1",
        """
        liere ahead of the others with 40 % of CIFAR-100 | 4.47
        data with which liere outperforms absolute on all of CIFAR-100 | 70
        """,
        ("Claim", "Value"),
        digits=2,
        note="4.47 % does not say whether points or a ratio is meant. The first version compares the best epoch of "
        "each run on the validation set itself; here it is the last one.",
    ),
)


def find(lab: Lab) -> Findings:
    """Train every encoding on growing parts of the training data."""
    names = list(dict.fromkeys([REFERENCE, *lab.encodings]))
    sizes = _sizes(lab.data.counts[0], lab.data.num_classes)
    plan: Plan = {name: {share: _runs(lab, name, share, sizes[share]) for share in sizes} for name in names}
    cells, notes = train_grid(lab, plan)
    ahead = leads(cells, REFERENCE)
    needed = _needed(cells)
    seeds = len(lab.seeds)
    note = f"{about_intervals(seeds)} Smaller parts lie within larger ones, as many of each class as there can be."
    return Findings(
        answer=_answer(cells, needed) + caveat(seeds),
        tables=[
            _needed_table(needed),
            top1_table("Top-1 by part of the training data", cells, FACTOR, note),
            contrast_table("Ahead of a learned absolute encoding", ahead, FACTOR, "lead", "Ahead", ONE_BY_ONE),
        ],
        figures=[top1_figure(cells, FACTOR, _alt(cells)), lead_figure(FACTOR, ahead, "the same examples")],
        published=PUBLISHED,
        notes=[
            "All runs take the same number of epochs, so that less data also means fewer steps.",
            *_unmeasured(sizes),
            *notes,
        ],
        advice=[_advice(cells, lab)],
    )


def _sizes(total: int, classes: int) -> dict[float, int]:
    """Training examples by share; a part without every class is left out."""
    sizes = {share: round(share * total / 100) for share in SHARES}
    return {share: size for share, size in sizes.items() if size >= classes}


def _runs(lab: Lab, name: str, share: float, size: int) -> Sequence[Run]:
    part = {} if share == 100 else {"train_size": size}
    return lab.runs([name], data=part)


def _needed(cells: Cells) -> list[dict[str, Any]]:
    """The share of the data with which every encoding does what the reference does with all of it."""
    target = correct(cells[REFERENCE][100]).mean(axis=0)
    again = resamples(len(target))
    return [{**named(name), **_share(levels, target, again)} for name, levels in cells.items() if name != REFERENCE]


def _share(levels: dict, target: np.ndarray, again: np.ndarray) -> dict[str, Any]:
    shares = np.array(list(levels), dtype=float)
    right = np.stack([correct(runs).mean(axis=0) for runs in levels.values()])  # [shares, examples]
    [measured] = first_reach(shares, right.mean(axis=1)[None], target.mean()[None])
    low, high = ends(first_reach(shares, again @ right.T, again @ target))
    if np.isinf(measured):
        return {"needs": None, "low": None, "high": None, "verdict": "does not reach it"}
    verdict = "needs less" if high < 100 else "cannot be told"
    return {"needs": float(measured), "low": min(low, 100.0), "high": min(high, 100.0), "verdict": verdict}


def _needed_table(needed: Sequence[dict[str, Any]]) -> Table:
    column = Column("needs", "Data needed", "%", 0, low="low", high="high")
    note = (
        "The part of the data with which an encoding first reaches what the learned absolute one reaches with all of "
        "it, straight between the parts trained on. Both are drawn anew from the same validation examples for the "
        f"interval; its ends stay within {SHARES[0]} and 100, which stand for that or less and for that or more."
    )
    title = "Data needed for the top-1 of a learned absolute encoding with all of it"
    return Table(title, (*ENCODING, column, Column("verdict", "Verdict")), list(needed), note=note)


def _lead_trend(levels: dict, reference: dict) -> tuple[float, float, float]:
    """Points that the lead grows by with each halving of the data."""
    shared = [share for share in levels if share in reference]
    halvings = [-np.log2(share / 100) for share in shared]
    one, other = (np.stack([correct(each[share]).mean(axis=0) for share in shared]) for each in (levels, reference))
    return trend(halvings, (one - other)[:, None])


def _answer(cells: Cells, needed: Sequence[dict[str, Any]]) -> str:
    least = min(next(iter(cells.values())))
    equals, value = at_best({name: correct(levels[least]) for name, levels in cells.items() if least in levels})
    who = (
        f"{told(equals)} cannot be told apart and do best, with up to"
        if len(equals) > 1
        else f"{equals[0]} does best with"
    )
    said = [f"With {least:.0f} % of the training data {who} {value}."]
    less = [row for row in needed if row["verdict"] == "needs less"]
    if less:
        each = [f"{row['name']} {row['needs']:.0f} % [{row['low']:.0f}, {row['high']:.0f}]" for row in less]
        said.append(
            f"For what a learned absolute encoding reaches with all of it, {told(each)} of the data are enough."
        )
    others = [row["name"] for row in needed if row["verdict"] != "needs less"]
    if others:
        said.append(f"For {told(others)} no saving of data can be told.")
    said += _told_leads(cells)
    return " ".join(said)


def _told_leads(cells: Cells) -> list[str]:
    """Whether leads over the reference depend on how much data there is."""
    moved: list[str] = []
    flat: list[str] = []
    for name, levels in cells.items():
        if name == REFERENCE or len(set(levels) & set(cells[REFERENCE])) < 2:
            continue
        value, low, high = _lead_trend(levels, cells[REFERENCE])
        told_of = f"{name} ({value:+.1f} points [{low:.1f}, {high:.1f}])"
        (flat if direction(low, high) == "flat" else moved).append(told_of)
    if moved:
        changed = f"With each halving of the data the lead over a learned absolute encoding changes for {told(moved)}"
        return [changed + (f"; for {told(flat)} no change can be told." if flat else ".")]
    return ["No lead over a learned absolute encoding measurably depends on how much data there is."] if flat else []


def _alt(cells: Cells) -> str:
    return f"Top-1 in percent over the part of the training data, one line for each of {len(cells)} encodings."


def _unmeasured(sizes: dict[float, int]) -> list[str]:
    missing = [f"{share} %" for share in SHARES if share not in sizes]
    return [f"Left out: {told(missing)}, which would not hold an example of each class."] if missing else []


def _advice(cells: Cells, lab: Lab) -> Advice:
    least = min(next(iter(cells.values())))
    equals, value = at_best({name: correct(levels[least]) for name, levels in cells.items() if least in levels})
    examples = round(float(least) * lab.data.counts[0] / 100)
    return Advice(
        f"Little training data ({examples:,} examples of {lab.data.title})",
        equals,
        f"{equals[0]} reaches {value}{not_told_apart(equals)}",
    )


STUDY = Study(
    title="Data efficiency",
    question="How much training data does each encoding need?",
    sources=(f"{LIERE_1}, figure 2b", f"{LIERE_2}, figure 3b"),
    find=find,
    encodings=("learned", "axial", "mixed", "liere:8"),
)
