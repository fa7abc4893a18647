"""Classification accuracy and loss of each encoding (LieRE tables 1, 2 and 6; ComRoPE table 3)."""

from collections import Counter
from typing import Any

import numpy as np

from torchrope_lab.conclusion import Conclusion
from torchrope_lab.results import Advice, Column, Findings, Table, curves_of
from torchrope_lab.studies.engine.estimates import (
    ABOUT_TRAIN_LOSS,
    NAMES,
    OVER_SEEDS,
    TOP1,
    VERDICT,
    about_intervals,
    by_encoding,
    cells,
    concluded,
    correct,
    in_percent,
    last_train_loss,
    loss,
    named,
    percent,
    top1,
    verdict,
    with_interval,
)
from torchrope_lab.studies.engine.figures import top1_by_encoding, top1_curves
from torchrope_lab.studies.engine.published import COMROPE, LIERE_1, LIERE_2
from torchrope_lab.studies.engine.reference import (
    AHEAD_OF_MIXED,
    WITH_SAME,
    all_but,
    check_reference,
    described,
    difference_tables,
    differences_from,
    mixed_counterparts,
    mixed_notes,
)
from torchrope_lab.studies.engine.study import Lab, Study

COLUMNS = (
    *NAMES,
    TOP1,
    OVER_SEEDS,
    Column("val_loss", "Validation loss", digits=3),
    Column("train_loss", "Training loss, last epoch", digits=3),
    Column("train_spread", "± over seeds", digits=3),
    with_interval("gap", "Behind the best", "points", 1),
    VERDICT,
)


def find(lab: Lab) -> Findings:
    """Train every encoding with every seed and rank them."""
    if lab.reference:
        check_reference(lab, lab.reference)
    names = list(dict.fromkeys([*lab.encodings, *([lab.reference] if lab.reference else [])]))
    trained = lab.train(lab.runs(names))
    groups = by_encoding(trained)
    labels = trained[0].labels
    rights = {name: correct(runs) for name, runs in groups.items()}
    conclusion = concluded(rights, chance=max(Counter(labels).values()) / len(labels))
    rows: list[dict[str, Any]] = []
    for name in sorted(rights, key=lambda name: (-rights[name].mean(), name)):
        gap = conclusion.gaps.get(name)
        rows.append(
            {
                **named(name),
                **top1(rights[name]),
                "val_loss": loss(groups[name]),
                **last_train_loss(groups[name]),
                **cells("gap", gap and in_percent(gap)),
                "verdict": verdict(conclusion, name),
            }
        )
    over_mixed = differences_from(
        rights, {name: other for name, other in mixed_counterparts(rights).items() if other != lab.reference}
    )
    figures = [top1_by_encoding(rights, conclusion.chance), top1_curves(groups)]
    return Findings(
        answer=conclusion.sentence(curves_of(figures)),
        tables=[
            Table("Top-1 and loss", COLUMNS, rows, note=_note(len(lab.seeds))),
            *_ahead_of_reference(rights, lab.reference),
            *difference_tables(AHEAD_OF_MIXED, over_mixed, WITH_SAME),
        ],
        figures=figures,
        notes=mixed_notes(over_mixed.values()),
        advice=_advice(conclusion, rows, lab),
    )


def _advice(conclusion: Conclusion, rows: list[dict[str, Any]], lab: Lab) -> list[Advice]:
    if conclusion.kind not in ("best", "tied") or conclusion.best is None:
        return []
    best = next(row for row in rows if row["name"] == conclusion.best)
    reached = percent([best["top1"], best["low"], best["high"]])
    here = ", in this training" if conclusion.seeds == 1 else ""
    case = f"Classification over {' × '.join(lab.data.axes)}, at the training size{here}"
    because = f"{conclusion.best} reaches {reached} on {lab.data.title}"
    return [Advice(case, [conclusion.best, *conclusion.tied], because)]


def _ahead_of_reference(rights: dict[str, np.ndarray], reference: str | None) -> list[Table]:
    if reference is None:
        return []
    return difference_tables(f"Ahead of {described(reference)}", differences_from(rights, all_but(reference, rights)))


def _note(seeds: int) -> str:
    rule = (
        "The interval of a difference from the best excludes 0 if and only if the encoding is behind, at 5 % over all "
        "pairs (Holm)."
    )
    return f"{about_intervals(seeds)} {rule} Top-1 and validation loss are on the validation set. {ABOUT_TRAIN_LOSS}"


STUDY = Study(
    title="Accuracy",
    question="Which encoding gives the highest classification accuracy, all else equal?",
    sources=(f"{LIERE_1}, tables 1 and 2", f"{LIERE_2}, tables 1 and 6", f"{COMROPE}, table 3"),
    find=find,
    optional_settings=("reference", "folds"),
)
