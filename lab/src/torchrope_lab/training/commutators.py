"""Learned generators of rotary encodings during training: size, and distance from commuting."""

import torch
from torch import nn

from torchrope.encodings import Encoding, commutator_ratio


@torch.no_grad()
def generator_measures(model: nn.Module) -> dict[str, float]:
    """Return mean Frobenius norm and mean distance from commuting of learned generators; {} if there are none."""
    generators = [encoding.generators() for encoding in _learned(model)]
    if not generators:
        return {}
    norms = [torch.linalg.matrix_norm(one).mean() for one in generators]
    ratios = [commutator_ratio(one).mean() for one in generators]
    return {
        "generator_norm": torch.stack(norms).mean().item(),
        "commutator": torch.stack(ratios).mean().item(),
    }


def _learned(model: nn.Module) -> list[Encoding]:
    """Return the rotary encodings that learn."""
    encodings = [part for part in model.modules() if isinstance(part, Encoding)]
    return [encoding for encoding in encodings if next(encoding.parameters(), None) is not None]
