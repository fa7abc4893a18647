"""Accuracy with a class token or the mean over patches as input of the head (LieRE's second version, appendix B)."""

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
from torchrope_lab.studies.engine.published import LIERE_2
from torchrope_lab.studies.engine.study import Lab, Study

FACTOR = Factor("pool", "Pooling", scale="category")
TOKEN, MEAN = "class token", "mean"
LEVELS = {TOKEN: "cls", MEAN: "mean"}


def find(lab: Lab) -> Findings:
    """Train every encoding with a class token, and with the mean of all patches."""
    if lab.config.model.backbone == "swin":
        return Findings(answer="A Swin always pools by the mean over its last stage: there is nothing to compare.")
    plan: Plan = {
        name: {level: lab.runs([name], model={"pool": pool}) for level, pool in LEVELS.items()}
        for name in lab.encodings
    }
    grid, notes = train_grid(lab, plan)
    moved = changes(grid, lambda _: TOKEN)
    by_name = {name: found for (name, _), found in moved.items()}
    seeds = len(lab.seeds)
    return Findings(
        answer=change_sentence("mean pooling instead of a class token", "accuracy", by_name, seeds),
        tables=[
            contrast_table("Mean compared with class token", moved, FACTOR, "Better by"),
            top1_table("Top-1 by pooling", grid, FACTOR, about_intervals(seeds)),
        ],
        figures=[
            top1_figure(grid, FACTOR, f"Top-1 in percent of {len(grid)} encodings, with a class token or the mean.")
        ],
        notes=[
            f"{LIERE_2}, appendix B, uses the class token and reports without numbers that the mean is substantially "
            "better with LieRE.",
            "The class token has position 0, where a rotary encoding is the identity: its scores depend on positions "
            "relative to that corner, or to the centre for encodings whose paper has the origin at the centre.",
            *notes,
        ],
        advice=[_advice(grid, moved, lab)],
    )


def _advice(grid: Grid, moved: Changes, lab: Lab) -> Advice:
    better, worse = (sum(each) for each in zip(*((m.low > 0, m.high < 0) for m in moved.values()), strict=True))
    level = MEAN if better >= worse else TOKEN
    equals, value = at_best(rights_at(grid, level))
    because = f"the mean is significantly better with {better} encodings and worse with {worse}"
    return Advice(f"Pooling on {lab.data.title}: the {level}", equals, f"{because}; {equals[0]} reaches {value}")


STUDY = Study(
    title="Pooling",
    question="Is a class token or the mean over all patches better for classification?",
    sources=(f"{LIERE_2}, appendix B",),
    find=find,
    needs_lattice=True,
)
