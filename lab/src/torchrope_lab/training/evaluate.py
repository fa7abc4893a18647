"""Evaluation of a trained classifier: accuracy and loss, also with shuffled patches and at other resolutions."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.functional.classification import binary_auroc

from torchrope.lattice import Lattice
from torchrope.models import Swin, ViT
from torchrope.tensors import counts_per_axis
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.transforms import resize, shuffle_patches, shuffle_positions
from torchrope_lab.mistakes import Mistake
from torchrope_lab.statistics import accuracy_interval
from torchrope_lab.training.models import Model, TokenClassifier
from torchrope_lab.training.sizes import KEPT_AXES

Transform = Callable[[Tensor], Tensor]
WindowSize = int | Literal["grow"]
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class SizeResult:
    """Accuracy of a model on the validation set at one input size."""

    size: tuple[int, ...]  # extent along every axis
    inputs: Literal["trained", "read", "cropped", "resampled"]  # at the training size, or as `DataModule.other_sizes`
    correct: np.ndarray  # 1.0 if the prediction is correct, else 0.0, `(examples,)`
    enlarged: int = 0  # examples whose originals have fewer pixels than this size

    @property
    def top1(self) -> float:
        """Share of correct predictions."""
        return float(self.correct.mean())

    def measures(self) -> dict[str, Any]:
        """Return the measures as JSON stores them."""
        return {
            "size": list(self.size),
            "inputs": self.inputs,
            "enlarged": self.enlarged,
            "top1": self.top1,
            "interval": list(accuracy_interval(self.correct)[1:]),
        }


@dataclass(frozen=True)
class Evaluation:
    """Measures of one trained model on the validation set."""

    labels: list[int]  # true class of every example
    predicted: list[int]  # class of every example
    val_loss: float  # mean cross-entropy
    shuffled_top1: float  # patches, or positions of tokens, of every example randomly permuted
    resolutions: list[SizeResult]  # at each input size, including the training size
    of_classes: dict[str, Any]  # `class_measures`

    @property
    def top1(self) -> float:
        """Share of correct predictions."""
        return float(self.correct.mean())

    def measures(self) -> dict[str, Any]:
        """Return the measures, without labels and predictions, as JSON stores them."""
        return {
            "top1": self.top1,
            "interval": list(accuracy_interval(self.correct)[1:]),
            "val_loss": self.val_loss,
            **self.of_classes,
            "shuffled_top1": self.shuffled_top1,
            "resolutions": [at.measures() for at in self.resolutions],
        }

    @property
    def correct(self) -> np.ndarray:
        """1.0 if the prediction is correct, else 0.0, `(examples,)`."""
        return np.equal(self.labels, self.predicted).astype(float)


def evaluate(
    model: Model, data: DataModule, sizes: Iterable[tuple[int, ...]] = (), window_size: WindowSize | None = None
) -> Evaluation:
    """Measure a trained model on the validation set, also at `sizes`, with windows of a Swin as of `windows_at`."""
    # If an example has several `views`, accuracy and loss are of the logits averaged over them; shuffling and other
    # sizes are measured on one view.
    labels, logits = predict(model, data, views=data.views)
    trained = SizeResult(tuple(data.input_size), "trained", _correct(labels, logits), data.enlarged)
    others = [_measured_at(model, data, size, window_size) for size in sizes if tuple(size) != trained.size]
    return Evaluation(
        labels=labels.tolist(),
        predicted=logits.argmax(dim=-1).tolist(),
        val_loss=functional.cross_entropy(logits, labels).item(),
        shuffled_top1=float(np.mean(correct_shuffled(model, data))),
        resolutions=sorted([trained, *others], key=lambda at: at.size),
        of_classes=class_measures(labels, logits, data.classes),
    )


def class_measures(labels: Tensor, logits: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """Return `auroc` and `sensitivity`, which show what accuracy hides where some classes are rare."""
    # `auroc`: area under the ROC curve of each class against all others, mean over the classes with examples (macro);
    # None if there is one class, or if logits are not finite. `sensitivity`: share of correct predictions among the
    # examples of each class, by name.
    present, correct = labels.unique().tolist(), logits.argmax(dim=-1) == labels
    sensitivity = {classes[index]: correct[labels == index].float().mean().item() for index in present}
    if len(present) < 2 or not logits.isfinite().all():
        return {"auroc": None, "sensitivity": sensitivity}
    areas = [binary_auroc(_ranks(logits.double(), index), (labels == index).long()) for index in present]
    return {"auroc": torch.stack(areas).mean().item(), "sensitivity": sensitivity}


def _ranks(logits: Tensor, index: int) -> Tensor:
    """Return the ranks of the probabilities of a class, in [0, 1], from its log-odds: probabilities round to 1."""
    others = logits.index_fill(1, torch.tensor([index]), -math.inf)
    values, ranks = (logits[:, index] - others.logsumexp(dim=1)).unique(return_inverse=True)
    return ranks.double() / max(1, len(values) - 1)


def correct_shuffled(model: Model, data: DataModule) -> list[bool]:
    """Return whether each validation example is classified correctly with its patches, or positions, permuted."""
    return _right(*predict(model, data, shuffler(model, SHUFFLE_SEED)))


def shuffler(model: Model, seed: int) -> Transform:
    """Return a function that randomly permutes the patches of a batch, or the positions of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, TokenClassifier):
        return partial(shuffle_positions, channels=model.channels, generator=generator)
    return partial(shuffle_patches, patch_size=model.embed.patch_size, generator=generator)


def correct_at(model: Model, data: DataModule, scales: Iterable[float]) -> dict[tuple[int, ...], list[bool]]:
    """Return whether each validation example is classified correctly, at other multiples of the training size."""
    if isinstance(model, TokenClassifier):
        return {}
    sizes = scaled_sizes(data, model.embed.patch_size, scales)
    return {size: _right(*predict_at(model, data, size)) for size in sizes if size != tuple(data.input_size)}


def keep_range(model: Model) -> None:
    """Scale the positions of inputs of other sizes to the range of the training, as ComRoPE's code does."""
    if not isinstance(model, ViT):
        what = "a Swin, whose positions are in its windows" if isinstance(model, Swin) else "tokens at any positions"
        raise Mistake(f"the model must be a ViT to keep the range of positions, got {what}")
    lattice = model.position_map
    if lattice.unit is not None or lattice.per != "one":
        raise Mistake(f"positions must be those of a lattice with a spacing to keep their range, got {lattice}")
    trained = model.embed.lattice(model.arguments["input_size"])
    model.position_map = Lattice(lattice.spacing, lattice.origin, per="size", train_sizes=trained)


def windows_at(model: Model, size: Sequence[int], window_size: WindowSize | None) -> list[int] | None:
    """Return the window size of a Swin at an input size, in tokens per axis; None for the training window."""
    # A number is for all axes but time. "grow" is the training's, scaled like the input and rounded (RoPE-ViT, ECCV
    # 2024, figures 5 and 6).
    if window_size is None:
        return None
    if not isinstance(model, Swin):
        kind = "ViT" if isinstance(model, ViT) else "Transformer"
        raise Mistake(f"window_size is for a Swin, got {window_size} for a {kind}, which has no windows")
    inputs = model.arguments["input_size"]
    trained = counts_per_axis("window_size", model.arguments["window_size"], len(inputs))
    pairs = list(zip(trained, size, inputs, strict=True))
    if window_size == "grow":
        return [max(1, round(window * extent / before)) for window, extent, before in pairs]
    return [window if axis < len(pairs) - 2 else window_size for axis, (window, _, _) in enumerate(pairs)]


def predict_at(model: nn.Module, data: DataModule, size: tuple[int, ...], **options: Any) -> tuple[Tensor, Tensor]:
    """Compute labels and logits as `predict` does, of inputs read at a size if possible, else resampled."""
    return predict(model, data_at_size(data, size) or data, partial(resize, size=size), **options)


def data_at_size(data: DataModule, size: tuple[int, ...]) -> DataModule | None:
    """Return the data with validation examples read at a size; None if they can only be resampled."""
    if tuple(size) == tuple(data.input_size):
        return data
    other = None if data.other_sizes == "resampled" else data.at_size(size[-1])
    return other if other is not None and tuple(other.input_size) == tuple(size) else None


def cache_suffix(data: DataModule) -> str:
    """Return the suffix of the cache name of measures at other sizes, as "-read" if inputs are read at that size."""
    return "" if data.other_sizes == "resampled" else f"-{data.other_sizes}"


@torch.no_grad()
def predict(
    model: nn.Module, data: DataModule, change: Transform = lambda inputs: inputs, *, views: int = 1, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute labels `(examples,)` and logits `(examples, classes)` of the validation set with transformed inputs."""
    # With several views, those of `test_dataloader`, logits are averaged over them.
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    all_labels, all_logits = [], []
    for inputs, labels, *spacings in data.val_dataloader() if views == 1 else data.test_dataloader():
        changed = change(inputs if views == 1 else inputs.flatten(0, 1))  # (batch, views, channels, *sizes)
        extra = [resampled_spacing(spacing, inputs, changed).to(device) for spacing in spacings]
        all_labels.append(labels)
        logits = model(changed.to(device), *extra, **options).float()
        all_logits.append(logits.unflatten(0, (-1, views)).mean(1).cpu() if views > 1 else logits.cpu())
    model.train(was_training)
    return torch.cat(all_labels), torch.cat(all_logits)


def scaled_sizes(data: DataModule, patch_size: Sequence[int], scales: Iterable[float]) -> list[tuple[int, ...]]:
    """Return input sizes with about `scale` times the training's patches along every axis but time and depth."""
    sizes = {tuple(data.input_size)}
    for scale in scales:
        lattice = [
            size // patch if axis in KEPT_AXES else max(1, round(scale * size / patch))
            for axis, size, patch in zip(data.axes, data.input_size, patch_size, strict=True)
        ]
        sizes.add(tuple(n * patch for n, patch in zip(lattice, patch_size, strict=True)))
    return sorted(sizes)


def _measured_at(model: Model, data: DataModule, size: tuple[int, ...], window_size: WindowSize | None) -> SizeResult:
    made, windows = data_at_size(data, size), windows_at(model, size, window_size)
    options: dict[str, Any] = {} if windows is None else {"window_size": windows}
    correct = _correct(*predict(model, made or data, partial(resize, size=size), **options))
    if made is None:
        return SizeResult(size, "resampled", correct)
    return SizeResult(size, made.other_sizes, correct, made.enlarged)


def resampled_spacing(spacing: Tensor, inputs: Tensor, changed: Tensor) -> Tensor:
    """Compute voxel spacings `(batch, axes)` of resampled inputs, whose extent in mm does not change."""
    return spacing * torch.tensor(inputs.shape[2:]) / torch.tensor(changed.shape[2:])


def _correct(labels: Tensor, logits: Tensor) -> np.ndarray:
    return np.array(_right(labels, logits), dtype=float)


def _right(labels: Tensor, logits: Tensor) -> list[bool]:
    return (logits.argmax(dim=-1) == labels).tolist()
