"""Which encoding classifies best: top-1 and loss with intervals (LieRE tables 1, 2 and 6; ComRoPE table 3)."""

from collections import Counter
from typing import Any

from torchrope.lab.conclusion import Conclusion
from torchrope.lab.results import Advice, Column, Findings, Table
from torchrope.lab.studies.engine.estimates import (
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
    loss,
    named,
    percent,
    top1,
    verdict,
    with_interval,
)
from torchrope.lab.studies.engine.figures import top1_by_encoding, top1_curves
from torchrope.lab.studies.engine.published import COMROPE, LIERE_1, LIERE_2, published
from torchrope.lab.studies.engine.study import Lab, Study

COLUMNS = (
    *NAMES,
    TOP1,
    OVER_SEEDS,
    Column("val_loss", "Validation loss", digits=3),
    with_interval("gap", "Behind the best", "points", 1),
    VERDICT,
)

PUBLISHED = (
    published(
        "Top-1, LieRE's second version",
        f"{LIERE_2}, table 1",
        """
        absolute | 63.9 (62.9-65.8) | 66.1 (65.7-66.5) | 40.9 (40.5-41.3)
        axial (VisionLlama RoPE) | 65.5 (64.6-66.5) | 65.4 (65.0-65.8) | 45.0 (44.6-45.4)
        mixed (RoPE-Mixed) | 68.8 (67.9-69.7) | 68.8 (68.4-69.2) | 46.3 (45.9-46.7)
        liere:8 | 70.3 (69.4-71.2) | - | 47.0 (46.6-47.4)
        liere | 70.0 (69.1-70.9) | 69.3 (68.9-69.7) | 44.7 (44.3-45.1)
        """,
        ("Encoding", "CIFAR-100", "ImageNet-1k", "UCF101"),
        note="The interval of the absolute encoding on CIFAR-100 is not even about its value: 64.8 may be meant. "
        "ImageNet's cell of LieRE with blocks of 8 is left open in the paper.",
    ),
    published(
        "Top-1, LieRE's first version",
        f"{LIERE_1}, tables 1 and 2",
        """
        absolute | 63.9 | 66.1 | 44.4 | 80.7
        axial (VisionLlama RoPE) | 65.8 | - | - | -
        mixed (RoPE-Mixed) | 66.7 | 68.5 | 48.6 | 81.9
        liere | 69.4 | 68.8 | 51.1 | 82.7
        """,
        ("Encoding", "CIFAR-100", "ImageNet-1k", "UCF101", "RSNA"),
    ),
)


def find(lab: Lab) -> Findings:
    """Train every encoding with every seed and rank them."""
    trained = lab.train(lab.runs(lab.encodings))
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
                **cells("gap", gap and in_percent(gap)),
                "verdict": verdict(conclusion, name),
            }
        )
    return Findings(
        answer=conclusion.sentence(),
        tables=[Table("Top-1 and loss on the validation set", COLUMNS, rows, note=_note(len(lab.seeds)))],
        figures=[top1_by_encoding(rights, conclusion.chance), top1_curves(groups)],
        published=PUBLISHED,
        advice=_advice(conclusion, rows, lab),
    )


def _advice(conclusion: Conclusion, rows: list[dict[str, Any]], lab: Lab) -> list[Advice]:
    if conclusion.kind not in ("best", "tied") or conclusion.best is None:
        return []
    best = next(row for row in rows if row["name"] == conclusion.best)
    reached = percent([best["top1"], best["low"], best["high"]])
    case = f"Classification over {' × '.join(lab.data.axes)}, at the size trained on"
    because = f"{conclusion.best} reaches {reached} on {lab.data.title}"
    return [Advice(case, [conclusion.best, *conclusion.tied], because)]


def _note(seeds: int) -> str:
    rule = "An encoding is behind where the interval of the paired difference excludes 0, at 5 % over all pairs (Holm)."
    return f"{about_intervals(seeds)} {rule}"


STUDY = Study(
    title="Accuracy",
    question="Which encoding classifies best, all else equal?",
    sources=(f"{LIERE_1}, tables 1 and 2", f"{LIERE_2}, tables 1 and 6", f"{COMROPE}, table 3"),
    find=find,
)
