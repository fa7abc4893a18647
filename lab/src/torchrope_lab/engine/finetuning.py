"""Runs that start from a trained model after a rotary encoding was added to it."""

import math
from statistics import fmean
from typing import Any

import torch

from torchrope.encodings import Encoding
from torchrope.models import Swin, ViT
from torchrope.positions import per_axis
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.estimates import Columns
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


def _angle(cell: Any) -> float | None:
    if cell.name == BASELINE:
        return None
    angles = [each.measured(TURN.name)["radians"] for each in cell.runs]
    return None if None in angles else fmean(angles)


ANGLE_COLUMN: Columns = ((Column("angle", "Angle across the input", "rad", 2), _angle),)
"""Column of `angle_across` for cells; empty for the model without an encoding."""
