"""Accuracy of each encoding with linear instead of softmax attention (RoFormer, section 3.3)."""

from torchrope_lab.results import Advice, Findings
from torchrope_lab.studies.engine.estimates import about_intervals, at_best, change_sentence
from torchrope_lab.studies.engine.grid import (
    Changes,
    Factor,
    Grid,
    Plan,
    changes,
    contrast_table,
    rights_at,
    top1_figure,
    top1_table,
    train_grid,
)
from torchrope_lab.studies.engine.study import Lab, Study

FACTOR = Factor("attention", "Attention", scale="category")
SOFTMAX, LINEAR = "softmax", "linear"


def find(lab: Lab) -> Findings:
    """Train every encoding with softmax attention, and with linear attention."""
    if lab.config.model.backbone != "transformer":
        rule = "Linear attention is a setting of the transformer for tokens at any positions"
        return Findings(answer=f"{rule}: with a {lab.config.model.backbone} there is nothing to compare.")
    plan: Plan = {
        name: {level: lab.runs([name], model={"attention": level}) for level in (SOFTMAX, LINEAR)}
        for name in lab.encodings
    }
    grid, notes = train_grid(lab, plan)
    moved = changes(grid, lambda _: SOFTMAX)
    by_name = {name: found for (name, _), found in moved.items()}
    seeds = len(lab.seeds)
    return Findings(
        answer=change_sentence("linear attention in place of softmax", "accuracy", by_name, seeds),
        tables=[
            contrast_table("Linear attention against softmax", moved, FACTOR, "Better by"),
            top1_table("Top-1 by the kind of attention", grid, FACTOR, about_intervals(seeds)),
        ],
        figures=[
            top1_figure(grid, FACTOR, f"Top-1 in percent of {len(grid)} encodings, with softmax and linear attention.")
        ],
        notes=[
            "Linear attention rotates positive features of queries and keys only in the numerator, so that weights "
            "may be negative and need not sum to 1. Terms added to scores (pape, pape-ri) do not exist in it.",
            *notes,
        ],
        advice=[_advice(grid, moved, lab)],
    )


def _advice(grid: Grid, moved: Changes, lab: Lab) -> Advice:
    better, worse = (sum(each) for each in zip(*((m.low > 0, m.high < 0) for m in moved.values()), strict=True))
    level = LINEAR if better > worse else SOFTMAX
    equals, value = at_best(rights_at(grid, level))
    because = f"linear attention is significantly better with {better} encodings and worse with {worse}"
    return Advice(f"Which attention on {lab.data.title}: {level}", equals, f"{because}; {equals[0]} reaches {value}")


STUDY = Study(
    title="Linear attention",
    question="How does linear attention change the accuracy of each encoding?",
    sources=("Su et al., RoFormer, section 3.3",),
    find=find,
)
