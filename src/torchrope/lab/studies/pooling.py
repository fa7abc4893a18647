"""Whether a class token or the mean of all patches is read (LieRE's second version, appendix B)."""

from collections.abc import Sequence
from typing import Any

from torchrope.lab.results import Advice, Findings
from torchrope.lab.studies.engine.estimates import about_intervals, at_best, caveat, correct, told
from torchrope.lab.studies.engine.grid import (
    ONE_BY_ONE,
    Cells,
    Factor,
    Plan,
    better_or_not,
    changes,
    contrast_table,
    top1_figure,
    top1_table,
    train_grid,
)
from torchrope.lab.studies.engine.published import LIERE_2
from torchrope.lab.studies.engine.study import Lab, Study

FACTOR = Factor("pool", "What is read", scale="category")
TOKEN, MEAN = "class token", "mean"
LEVELS = {TOKEN: "cls", MEAN: "mean"}


def find(lab: Lab) -> Findings:
    """Train every encoding with a class token, and with the mean of all patches."""
    if lab.config.model.backbone == "swin":
        return Findings(answer="A Swin always reads the mean of its last stage: there is nothing to compare.")
    plan: Plan = {
        name: {level: lab.runs([name], model={"pool": pool}) for level, pool in LEVELS.items()}
        for name in lab.encodings
    }
    cells, notes = train_grid(lab, plan)
    moved = changes(cells, TOKEN)
    seeds = len(lab.seeds)
    return Findings(
        answer=_answer(moved) + caveat(seeds),
        tables=[
            contrast_table("The mean against the class token", moved, FACTOR, "change", "Better by", ONE_BY_ONE),
            top1_table("Top-1 by what is read", cells, FACTOR, about_intervals(seeds)),
        ],
        figures=[
            top1_figure(
                cells, FACTOR, f"Top-1 in percent of {len(cells)} encodings, read from a class token or the mean."
            )
        ],
        notes=[
            f"{LIERE_2}, appendix B, reads the class token and says without numbers that the mean does substantially "
            "better with LieRE.",
            "The class token sits at the origin, where a rotary encoding turns nothing: it sees where patches are "
            "relative to that corner, or to the centre where an encoding's paper puts the origin there.",
            *notes,
        ],
        advice=[_advice(cells, moved, lab)],
    )


def _answer(moved: Sequence[dict[str, Any]]) -> str:
    better, worse, tied = better_or_not(moved, "change")
    said = []
    if better:
        said.append(f"The mean of all patches is measurably better than a class token with {told(better)}.")
    if worse:
        said.append(f"The class token is measurably better than the mean with {told(worse)} (the mean against it).")
    if tied:
        said.append(f"No difference can be told with {told(tied)}.")
    return " ".join(said)


def _advice(cells: Cells, moved: Sequence[dict[str, Any]], lab: Lab) -> Advice:
    mean = sum(row["verdict"] == "better" for row in moved) >= sum(row["verdict"] == "worse" for row in moved)
    level = MEAN if mean else TOKEN
    equals, value = at_best({name: correct(levels[level]) for name, levels in cells.items()})
    better, worse, tied = better_or_not(moved, "change")
    count = (
        f"the mean is measurably better with {len(better)} encodings, worse with {len(worse)}, tied with {len(tied)}"
    )
    return Advice(f"What to read on {lab.data.title}: the {level}", equals, f"{count}; {equals[0]} reaches {value}")


STUDY = Study(
    title="Pooling",
    question="Is a class token or the mean of all patches the better summary?",
    sources=(f"{LIERE_2}, appendix B",),
    find=find,
)
