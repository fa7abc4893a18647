"""Accuracy with encodings shared across heads, layers or both (LieRE's second version, table 2)."""

from collections.abc import Sequence

from torchrope_lab.conclusion import join_names
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Advice, Findings
from torchrope_lab.studies.engine.estimates import about_intervals, change_sentence
from torchrope_lab.studies.engine.grid import (
    Changes,
    Factor,
    Grid,
    Plan,
    changes,
    contrast_table,
    parameter_table,
    top1_figure,
    top1_table,
    train_grid,
)
from torchrope_lab.studies.engine.published import LIERE_2, published
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.training.cost import count_encoding_parameters

FACTOR = Factor("shared", "Shared across", scale="category")
NOTHING = "nothing"
LEVELS = {
    NOTHING: {"share_heads": False, "share_layers": False},
    "heads": {"share_heads": True, "share_layers": False},
    "layers": {"share_heads": False, "share_layers": True},
    "heads and layers": {"share_heads": True, "share_layers": True},
}
DEFAULT = ("mixed", "liere:8", "liere")

PUBLISHED = (
    published(
        "Top-1 by what is shared, ViT-B on CIFAR-100",
        f"{LIERE_2}, table 2",
        """
        nothing (printed with both ticks) | 68.8 | 70.3 | 70.0
        layers | 68.7 | 69.8 | 69.5
        heads | 69.5 | 69.7 | 69.7
        heads and layers | 68.3 | 69.5 | 69.4
        """,
        ("Shared across", "mixed", "liere:8", "liere"),
        note="The first row is ticked as shared across layers and across heads, but has the numbers of table 1, where "
        "nothing is shared, and there is another row for all shared. Its FLOPs, 5.684 G as in the second row against "
        "5.613 G in the others, are those of separate heads. In the authors' published code all layers use the first "
        "layer's encoding: there, rows that differ only in layers are the same model.",
    ),
)


def find(lab: Lab) -> Findings:
    """Train every encoding that learns with each kind of sharing."""
    learned = [name for name in lab.encodings if _learns(lab, name)] or list(DEFAULT)
    levels = [NOTHING, "heads"] if lab.config.model.backbone == "swin" else list(LEVELS)
    plan: Plan = {name: {level: lab.runs([name], model=LEVELS[level]) for level in levels} for name in learned}
    grid, notes = train_grid(lab, plan)
    moved = changes(grid, lambda _: NOTHING)
    by_case = {f"{name} across {level}": found for (name, level), found in moved.items()}
    seeds = len(lab.seeds)
    return Findings(
        answer=change_sentence("sharing an encoding across heads or layers", "accuracy", by_case, seeds),
        tables=[
            contrast_table("Compared with no sharing", moved, FACTOR, "Better by"),
            top1_table("Top-1 by what is shared", grid, FACTOR, about_intervals(seeds)),
            parameter_table(lab, grid, FACTOR),
        ],
        figures=[top1_figure(grid, FACTOR, _alt(grid))],
        published=PUBLISHED,
        notes=[*_left_out(lab, learned), *notes],
        advice=[_advice(moved, lab)],
    )


def _learns(lab: Lab, name: str) -> bool:
    """Return whether its rotary part has learned parameters to share."""
    return count_encoding_parameters(lab.blueprint(lab.run(name))) > _absolute(lab, name)


def _absolute(lab: Lab, name: str) -> int:
    """Count the parameters of the absolute part, which sharing does not change."""
    absolute = [part for part in name.split("+") if resolve_encoding(part).absolute is not None]
    return count_encoding_parameters(lab.blueprint(lab.run(absolute[0]))) if absolute else 0


def _alt(grid: Grid) -> str:
    return f"Top-1 in percent with intervals for {join_names(list(grid))}, by what is shared."


def _left_out(lab: Lab, learned: Sequence[str]) -> list[str]:
    others = [name for name in lab.encodings if name not in learned]
    notes = [f"Left out: {join_names(others)}, which have no learned parameters to share."] if others else []
    if lab.config.model.backbone == "swin":
        notes.append("Left out: sharing across layers, whose windows and heads differ in a Swin.")
    return notes


def _advice(moved: Changes, lab: Lab) -> Advice:
    names = list(dict.fromkeys(name for name, _ in moved))
    worse = {name for (name, _), found in moved.items() if found.high < 0}
    free = [name for name in names if name not in worse]
    if not free:
        return Advice(f"Sharing an encoding on {lab.data.title}", names, "each loses accuracy with some sharing")
    because = "no sharing across heads, layers or both significantly costs accuracy"
    return Advice(f"Few parameters for the encoding on {lab.data.title}", free, because)


STUDY = Study(
    title="Sharing",
    question="Does sharing an encoding across heads or layers change accuracy?",
    sources=(f"{LIERE_2}, table 2",),
    find=find,
    encodings=DEFAULT,
)
