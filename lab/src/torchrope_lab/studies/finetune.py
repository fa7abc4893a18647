"""Gain of adding a rotary encoding to a model trained without one, after short fine-tuning (ComRoPE table 4)."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from torchrope.encodings import Encoding, NoEncoding
from torchrope.models import Swin, ViT
from torchrope.positions import per_axis
from torchrope_lab.conclusion import Interval, join_names
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Advice, Axis, Check, Column, Figure, Findings, Row, Table
from torchrope_lab.studies.engine.estimates import (
    HOLM,
    NAMES,
    OVER_SEEDS,
    TOP1,
    VERDICT,
    about_intervals,
    cells,
    change_sentence,
    contrasts,
    correct,
    named,
    points,
    top1,
    verdict_of,
    with_interval,
)
from torchrope_lab.studies.engine.published import COMROPE, published
from torchrope_lab.studies.engine.runs import Measure, Run, Trained
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.training.cost import count_encoding_parameters
from torchrope_lab.training.evaluate import predict_views_or_one
from torchrope_lab.training.init_from import start_from
from torchrope_lab.training.models import build_model

BASELINE = "learned"
SHARE_OF_EPOCHS = 0.25
SHARE_OF_LR = 0.3
"""ComRoPE fine-tunes with 3e-4, where it trains from scratch with 1e-3 (supplement B.2 and table 5)."""

ABOUT_ANGLE = (
    "The angle is the largest rotation angle between opposite corners, mean over layers and heads; a zero-initialised "
    "encoding rotates little after few steps."
)

COLUMNS = (
    *NAMES,
    with_interval("swapped", "Right after the swap", "%", 1),
    TOP1,
    OVER_SEEDS,
    with_interval("gain", "Ahead of fine-tuning without it", "points", 1),
    VERDICT,
    Column("angle", "Angle across the input", "rad", 2),
)

PUBLISHED = (
    published(
        "Top-1 on ImageNet of CLIP's ViT, fine-tuned for 4 epochs",
        f"{COMROPE}, table 4",
        """
        absolute | 79.91
        axial (Vanilla RoPE) | 79.82
        liere | 80.12
        comrope-ap | 80.11
        comrope-ld | 80.17
        """,
        ("Encoding", "Top-1"),
        digits=2,
        note="One training each and no intervals: on 50,000 images the standard error of one number is about 0.18 "
        "points, so that unpaired the five are not significantly different.",
    ),
)


def find(lab: Lab) -> Findings:
    """Add rotary encodings to a trained model with a learned absolute one, and fine-tune with and without them."""
    names, left_out = _swaps(lab)
    plan = {name: [fine_tuned(lab, name, seed) for seed in lab.seeds] for name in [BASELINE, *names]}
    swaps = {run.key: [_swap(lab, name, run.seed) for name in names] for run in lab.runs([BASELINE])}
    starts = lab.train(lab.runs([BASELINE]), lambda run: swaps[run.key])
    trained = iter(lab.train([run for runs in plan.values() for run in runs], lambda _: [TURN]))
    groups = {name: [next(trained) for _ in runs] for name, runs in plan.items()}
    learn = [name for name in names if _learns(lab, name)]
    right_after = {name: _right_after(lab, name, starts) for name in names}
    without = correct(groups[BASELINE])
    gains = dict(zip(names, contrasts([(correct(groups[name]), without) for name in names]), strict=True))
    rows = [_row(name, runs, gains.get(name), right_after.get(name, correct(starts))) for name, runs in groups.items()]
    optim = groups[BASELINE][0].run.config.optim
    seeds = len(lab.seeds)
    return Findings(
        answer=change_sentence("adding a rotary encoding before fine-tuning", "accuracy", gains, seeds),
        tables=[
            Table(
                "Before and after fine-tuning",
                COLUMNS,
                rows,
                note=f"{about_intervals(seeds)} Gains: {HOLM} {ABOUT_ANGLE}",
            )
        ],
        figures=[_figure(rows)],
        published=PUBLISHED,
        checks=[_check(starts, {name: right_after[name] for name in learn})] if learn else [],
        notes=[
            f"Epochs of fine-tuning: {optim.epochs}, after {lab.config.optim.epochs}, at a rate of {optim.lr:.2g}. "
            "The learned absolute encoding remains in the model with every rotary encoding.",
            *left_out,
        ],
        advice=[_advice(gains, lab)],
    )


def _swaps(lab: Lab) -> tuple[list[str], list[str]]:
    """Combine rotary encodings with the pretrained model's absolute one, and note those that cannot be swapped in."""
    names, others = [], []
    for name in lab.encodings:
        choice = resolve_encoding(name)
        if choice.rotary is NoEncoding or choice.bias is not None:
            others.append(name)
        else:
            rotary = next(part for part in name.split("+") if resolve_encoding(part).absolute is None)
            names.append(f"{BASELINE}+{rotary}")
    left_out = [name for name in others if name not in ("none", BASELINE)]
    notes = [f"Left out: {join_names(left_out)}, which are not rotary or have a bias."] if left_out else []
    return list(dict.fromkeys(names)) or [f"{BASELINE}+mixed"], notes


def fine_tuned(lab: Lab, name: str, seed: int, **optim: Any) -> Run:
    """Plan a run of a quarter of the epochs, at a lower rate, from the trained model without the encoding.

    Args:
        lab: Lab of the study.
        name: "learned" or "learned+ROTARY".
        seed: Seed of both runs.
        optim: Further settings of the optimiser that differ.
    """
    pretraining = lab.config.optim
    lr = SHARE_OF_LR * pretraining.lr
    shorter = {
        "epochs": max(1, round(SHARE_OF_EPOCHS * pretraining.epochs)),
        "lr": lr,
        "min_lr": min(pretraining.min_lr, lr),
        "warmup_epochs": SHARE_OF_EPOCHS * pretraining.warmup_epochs,
    }
    return lab.run(name, seed, optim={**shorter, **optim}, after=lab.run(BASELINE, seed))


def _learns(lab: Lab, name: str) -> bool:
    return _parameters(lab, name) > _parameters(lab, BASELINE)


def _parameters(lab: Lab, name: str) -> int:
    return count_encoding_parameters(lab.blueprint(lab.run(name)))


def _right_after(lab: Lab, name: str, starts: Sequence[Trained]) -> np.ndarray:
    """Return answers with the encoding swapped in and no training: correct (1) or wrong (0), `(seeds, examples)`."""
    predicted = [start.measured(_swap(lab, name, start.seed).name)["predicted"] for start in starts]
    return np.stack([np.equal(start.labels, each).astype(float) for start, each in zip(starts, predicted, strict=True)])


def _swap(lab: Lab, name: str, seed: int) -> Measure:
    """Return the measure of a pretrained model's predictions with an encoding swapped in and no training."""
    run = fine_tuned(lab, name, seed)
    assert run.after is not None
    call = partial(_swapped, run=run, pretrained=lab.store.of(run.after))
    return Measure(f"swapped-{name.replace(':', '-')}", call)


def _swapped(model: ViT | Swin, data: DataModule, *, run: Run, pretrained: Path) -> dict[str, Any]:
    """Predict with the pretrained model after swapping an encoding in."""
    swapped = build_model(run.encoding, run.config.model, data)
    start_from(swapped, pretrained)
    _, logits = predict_views_or_one(swapped.to(next(model.parameters()).device).eval(), data)
    return {"predicted": logits.argmax(dim=-1).tolist()}


def _row(name: str, runs: Sequence[Trained], gain: Interval | None, before: np.ndarray) -> dict[str, Any]:
    swapped = top1(before)
    verdict = "the baseline" if gain is None else verdict_of(gain)
    return {
        **named(name),
        **cells("swapped", [swapped[key] for key in ("top1", "low", "high")]),
        **top1(correct(runs)),
        **cells("gain", gain),
        "verdict": verdict,
        "angle": None if gain is None else fmean(each.measured(TURN.name)["radians"] for each in runs),
    }


def angle_across(model: ViT | Swin, data: DataModule) -> dict[str, Any]:
    """Compute the largest rotation angle between opposite corners of the input, mean over layers and heads."""
    sizes = model.embed.lattice(data.input_size)
    angles = []
    for encoding in (each for each in model.modules() if isinstance(each, Encoding)):
        generators = encoding.generators().detach()  # [axes, heads, blocks, b, b]
        spacing = per_axis("spacing", encoding.lattice(*sizes)["spacing"], len(sizes))
        across = [width * (size - 1) for width, size in zip(spacing, sizes, strict=True)]
        exponent = torch.einsum("n,n...->...", generators.new_tensor(across), generators)
        angles.append(torch.linalg.matrix_norm(exponent, ord=2).amax(dim=-1).mean().item())
    return {"radians": fmean(angles)}


TURN = Measure("turn", angle_across)


def _check(starts: Sequence[Trained], right_after: dict[str, np.ndarray]) -> Check:
    before = correct(starts)
    changed = {name: int((after != before).sum()) for name, after in right_after.items()}
    return Check(
        rule="A zero-initialised rotary encoding does not change the pretrained model",
        holds=not any(changed.values()),
        measured="predictions that became right or wrong: "
        + ", ".join(f"{name} {count}" for name, count in changed.items()),
    )


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    marks: list[Row] = []
    for row in rows:
        before = {"top1": row["swapped"], "low": row["swapped_low"], "high": row["swapped_high"]}
        after = {key: row[key] for key in ("top1", "low", "high")}
        marks += [{"name": row["name"], "when": "right after the swap", **before}]
        marks += [{"name": row["name"], "when": "fine-tuned", **after}]
    return Figure(
        name="before-and-after",
        kind="points",
        title="Top-1 before and after fine-tuning",
        alt=f"Top-1 in percent of {len(rows)} models right after an encoding was swapped in, and after fine-tuning.",
        x=Axis("when", "When", scale="category"),
        y=Axis("top1", "Top-1", "%"),
        rows=marks,
        series="name",
        low="low",
        high="high",
        caption="Intervals are 95 % over validation examples.",
    )


def _advice(gains: Mapping[str, Interval], lab: Lab) -> Advice:
    better = sorted((name for name, gain in gains.items() if gain.low > 0), key=lambda name: -gains[name].estimate)
    case = f"A pretrained model with an absolute encoding, fine-tuned on {lab.data.title}"
    if not better:
        return Advice(case, [BASELINE], "no rotary encoding is significantly better than fine-tuning without one")
    because = f"{better[0]} gains {points(gains[better[0]])} over fine-tuning without a rotary encoding"
    return Advice(case, better, because)


STUDY = Study(
    title="Fine-tuning",
    question="Does adding a rotary encoding before fine-tuning improve a model that was trained without one?",
    sources=(f"{COMROPE}, table 4",),
    find=find,
    needs_lattice=True,
    encodings=("axial", "mixed", "liere:8", "liere", "comrope-ap", "comrope-ld"),
)
