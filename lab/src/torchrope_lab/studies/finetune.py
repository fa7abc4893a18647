"""Gain of adding a rotary encoding to a model trained without one, after short fine-tuning (ComRoPE table 4)."""

import math
from statistics import fmean
from typing import Any

import torch

from torchrope.encodings import Encoding, NoEncoding
from torchrope.models import Swin, ViT
from torchrope.positions import per_axis
from torchrope_lab.conclusion import join_names
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.figures import top1_by_encoding
from torchrope_lab.engine.grid import OneFactor, Results, Section
from torchrope_lab.engine.long_table import SIMULTANEOUS, Cell, change_columns
from torchrope_lab.engine.runs import Measure, Run
from torchrope_lab.engine.study import Lab
from torchrope_lab.results import Column

BASELINE = "learned"
"""Encoding of the trained model."""
SHARE_OF_EPOCHS = 0.25
SHARE_OF_LR = 0.3
"""ComRoPE fine-tunes with 3e-4, where it trains from scratch with 1e-3 (supplement B.2 and table 5)."""


def fine_tuned(lab: Lab, name: str) -> list[Run]:
    """Plan runs over seeds of a quarter of the epochs, at a lower rate, from the trained model without the encoding."""
    pretraining = lab.config.optim
    lr = SHARE_OF_LR * pretraining.lr
    shorter = {
        "epochs": max(1, round(SHARE_OF_EPOCHS * pretraining.epochs)),
        "lr": lr,
        "min_lr": min(pretraining.min_lr, lr),
        "warmup_epochs": SHARE_OF_EPOCHS * pretraining.warmup_epochs,
    }
    return [lab.run(name, seed, optim=shorter, after=lab.run(BASELINE, seed)) for seed in lab.seeds]


def angle_across(model: ViT | Swin, data: DataModule) -> dict[str, Any]:
    """Compute the largest rotation angle between opposite corners of the input, mean over layers and heads."""
    sizes = model.embed.lattice(data.input_size)
    angles = []
    for encoding in (each for each in model.modules() if isinstance(each, Encoding)):
        generators = encoding.generators().detach()  # [axes, heads, blocks, b, b]
        spacing = per_axis("spacing", encoding.lattice.spaced(*sizes)["spacing"], len(sizes))
        across = [width * (size - 1) for width, size in zip(spacing, sizes, strict=True)]
        exponent = torch.einsum("n,n...->...", generators.new_tensor(across), generators)
        finite = bool(exponent.isfinite().all())  # not those of a model that diverged
        angles.append(torch.linalg.matrix_norm(exponent, ord=2).amax(dim=-1).mean().item() if finite else math.nan)
    return {"radians": fmean(angles)}


TURN = Measure("turn", angle_across)


def _swaps(lab: Lab) -> list[str]:
    """Combine rotary encodings with the pretrained model's absolute one."""
    names, others = [], []
    for name in lab.encodings:
        choice = resolve_encoding(name)
        if choice.rotary is NoEncoding or choice.bias is not None:
            others.append(name)
        else:
            rotary = next(part for part in name.split("+") if resolve_encoding(part).absolute is None)
            names.append(f"{BASELINE}+{rotary}")
    if left_out := [name for name in others if name not in ("none", BASELINE)]:
        lab.leave_out(f"Left out: {join_names(left_out)}, which are not rotary or have a bias.")
    return [BASELINE, *(dict.fromkeys(names) or [f"{BASELINE}+mixed"])]


def _gains(results: Results) -> Section:
    """Compare fine-tuning with and without an encoding."""
    gains = results.top1.changes(results.against(BASELINE))

    def angle(cell: Cell) -> float | None:
        angles = [each.measured(TURN.name)["radians"] for each in results.runs[cell]]
        return None if cell.arm == BASELINE or None in angles else fmean(angles)

    columns = (
        *results.top1.columns,
        *change_columns(gains, "Ahead of fine-tuning without it", "gain"),
        (Column("angle", "Angle across the input", "rad", 2), angle),
    )
    note = (
        f"{results.about_top1} Gains: {SIMULTANEOUS} The angle is the largest rotation angle between opposite corners, "
        "mean over layers and heads."
    )
    table = results.table("After fine-tuning", columns, note)
    return Section(changes=gains, tables=[table], figures=[top1_by_encoding(results.top1, results.chance)])


find = OneFactor(
    sections=[_gains],
    claim="adding a rotary encoding before fine-tuning",
    arms=_swaps,
    runs=lambda lab, name, *_: fine_tuned(lab, name),
    measures=lambda _: [TURN],
)
