"""What a trained classifier can do: accuracy, loss, and what shuffled patches and other resolutions leave of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.lab.data.clips import predict_views
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.transforms import resize, shuffle_patches
from torchrope.models import Swin, ViT

Change = Callable[[Tensor], Tensor]
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Evaluation:
    """Measures of one trained model on the validation set.

    Attributes:
        labels: True class of every example.
        predicted: Predicted class of every example.
        val_loss: Mean cross-entropy.
        shuffled_top1: Top-1 after every example's patches have changed places at random.
        resolutions: Top-1 by input size, the training size among them.
    """

    labels: list[int]
    predicted: list[int]
    val_loss: float
    shuffled_top1: float
    resolutions: list[tuple[tuple[int, ...], float]]

    @property
    def top1(self) -> float:
        """Share of right predictions."""
        return float(self.correct.mean())

    def measures(self) -> dict[str, Any]:
        """The measures alone, as JSON keeps them."""
        return {
            "top1": self.top1,
            "val_loss": self.val_loss,
            "shuffled_top1": self.shuffled_top1,
            "resolutions": [{"size": list(size), "top1": top1} for size, top1 in self.resolutions],
        }

    @property
    def correct(self) -> np.ndarray:
        """1.0 where the prediction is right, `(examples,)`."""
        return np.equal(self.labels, self.predicted).astype(float)


def evaluate(model: ViT | Swin, data: DataModule, scales: Iterable[float]) -> Evaluation:
    """Measure a trained model on the validation set of its data.

    Args:
        model: Evaluated on the device that it is on.
        data: Its data. Where it has several `views` of an example, accuracy and loss are of the logits averaged
            over them; shuffling and other sizes are measured on one.
        scales: Sizes to evaluate at beside the training size, as multiples of it.
    """
    labels, logits = predict_views_or_one(model, data)
    at = {size: _share(right) for size, right in correct_at(model, data, scales).items()}
    return Evaluation(
        labels=labels.tolist(),
        predicted=logits.argmax(dim=-1).tolist(),
        val_loss=functional.cross_entropy(logits, labels).item(),
        shuffled_top1=_share(correct_shuffled(model, data)),
        resolutions=sorted({**at, tuple(data.input_size): _share(_correct(labels, logits))}.items()),
    )


def correct_shuffled(model: ViT | Swin, data: DataModule) -> list[bool]:
    """Whether each validation example is right after its patches have changed places at random."""
    return _correct(*predict(model, data, _shuffler(model.embed.patch_size)))


def correct_at(model: ViT | Swin, data: DataModule, scales: Iterable[float]) -> dict[tuple[int, ...], list[bool]]:
    """Whether each validation example is right at other sizes than the one trained at.

    Args:
        model: Evaluated on the device that it is on.
        data: Its data.
        scales: Sizes as multiples of the training size.
    """
    sizes = scaled_sizes(data, model.embed.patch_size, scales)
    return {size: _correct(*predict_at(model, data, size)) for size in sizes if size != tuple(data.input_size)}


def predict_views_or_one(model: nn.Module, data: DataModule) -> tuple[Tensor, Tensor]:
    """Labels and logits as `predict`, averaged over the views of an example where its data has several."""
    return predict(model, data) if data.views == 1 else predict_views(model, data.test_dataloader())


def predict_at(model: nn.Module, data: DataModule, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Labels and logits as `predict`, of inputs of a size: drawn at it where the data can be, else resampled."""
    return predict(model, data.drawn_at(size) or data, partial(resize, size=size))


@torch.no_grad()
def predict(model: nn.Module, data: DataModule, change: Change = lambda inputs: inputs) -> tuple[Tensor, Tensor]:
    """Labels `(examples,)` and logits `(examples, classes)` of the validation set, its inputs changed."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    all_labels, all_logits = [], []
    for inputs, labels, *spacings in data.val_dataloader():
        changed = change(inputs)
        told = [_resampled(spacing, inputs, changed).to(device) for spacing in spacings]
        all_labels.append(labels)
        all_logits.append(model(changed.to(device), *told).float().cpu())
    model.train(was_training)
    return torch.cat(all_labels), torch.cat(all_logits)


def scaled_sizes(data: DataModule, patch_size: Sequence[int], scales: Iterable[float]) -> list[tuple[int, ...]]:
    """Input sizes whose lattice of patches is about `scale` times the trained one along every axis but time."""
    sizes = {tuple(data.input_size)}
    for scale in scales:
        lattice = [
            size // patch if axis == "time" else max(1, round(scale * size / patch))
            for axis, size, patch in zip(data.axes, data.input_size, patch_size, strict=True)
        ]
        sizes.add(tuple(n * patch for n, patch in zip(lattice, patch_size, strict=True)))
    return sorted(sizes)


def _resampled(spacing: Tensor, inputs: Tensor, changed: Tensor) -> Tensor:
    """Distances between voxels `(batch, axes)` after inputs became larger or smaller: what they show stays as long."""
    return spacing * torch.tensor(inputs.shape[2:]) / torch.tensor(changed.shape[2:])


def _shuffler(patch_size: Sequence[int]) -> Change:
    generator = torch.Generator().manual_seed(SHUFFLE_SEED)
    return lambda inputs: shuffle_patches(inputs, patch_size, generator)


def _correct(labels: Tensor, logits: Tensor) -> list[bool]:
    return (logits.argmax(dim=-1) == labels).tolist()


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)
