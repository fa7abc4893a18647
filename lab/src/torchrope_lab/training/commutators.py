"""Learned generators of rotary encodings during training: size, distance from commuting, and a penalty on it."""

import torch
from torch import Tensor, nn

from torchrope.encodings import Encoding, commutator_ratio


def commutator_penalty(model: nn.Module) -> Tensor:
    """Compute the mean of  ‖AB - BA‖² / (‖A‖² ‖B‖²)  over encodings, pairs of axes, heads and blocks."""
    # Encodings that commute by construction are not counted; without others it is 0.
    free = [encoding for encoding in _learned(model) if not encoding.relative]
    ratios = [commutator_ratio(encoding.generators()).square().mean() for encoding in free]
    return torch.stack(ratios).mean() if ratios else torch.zeros(())


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
