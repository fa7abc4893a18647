"""What a trained classifier can do: accuracy, loss, and what shuffled positions and other resolutions leave of it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.attention import per_axis_window
from torchrope.lab.data.clips import predict_views
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.transforms import resize, shuffle_patches, shuffle_positions
from torchrope.lab.statistics import accuracy_interval
from torchrope.lab.training.models import Model, TokenClassifier
from torchrope.models import Swin, ViT
from torchrope.positions import FixedRangeLattice, JitteredLattice

Change = Callable[[Tensor], Tensor]
WindowSize = int | Literal["grow"]
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class AtSize:
    """What a model makes of the validation set at one input size.

    Attributes:
        size: Extent of every axis.
        inputs: What its inputs are: as "trained", "drawn" or "read" at that size, or "resampled".
        correct: 1.0 where the prediction is right, `(examples,)`.
        enlarged: Examples of originals with fewer pixels than are shown.
    """

    size: tuple[int, ...]
    inputs: Literal["trained", "drawn", "read", "resampled"]
    correct: np.ndarray
    enlarged: int = 0

    @property
    def top1(self) -> float:
        """Share of right predictions."""
        return float(self.correct.mean())

    def measures(self) -> dict[str, Any]:
        """Its measures, as JSON keeps them."""
        return {
            "size": list(self.size),
            "inputs": self.inputs,
            "enlarged": self.enlarged,
            "top1": self.top1,
            "interval": list(accuracy_interval(self.correct)[1:]),
        }


@dataclass(frozen=True)
class Evaluation:
    """Measures of one trained model on the validation set.

    Attributes:
        labels: True class of every example.
        predicted: Predicted class of every example.
        val_loss: Mean cross-entropy.
        shuffled_top1: Top-1 after every example's patches, or positions of tokens, have changed places at random.
        resolutions: What it can do at each input size, the training size among them.
    """

    labels: list[int]
    predicted: list[int]
    val_loss: float
    shuffled_top1: float
    resolutions: list[AtSize]

    @property
    def top1(self) -> float:
        """Share of right predictions."""
        return float(self.correct.mean())

    def measures(self) -> dict[str, Any]:
        """The measures alone, as JSON keeps them."""
        return {
            "top1": self.top1,
            "interval": list(accuracy_interval(self.correct)[1:]),
            "val_loss": self.val_loss,
            "shuffled_top1": self.shuffled_top1,
            "resolutions": [at.measures() for at in self.resolutions],
        }

    @property
    def correct(self) -> np.ndarray:
        """1.0 where the prediction is right, `(examples,)`."""
        return np.equal(self.labels, self.predicted).astype(float)


def evaluate(
    model: Model, data: DataModule, sizes: Iterable[tuple[int, ...]] = (), window_size: WindowSize | None = None
) -> Evaluation:
    """Measure a trained model on the validation set of its data.

    Args:
        model: Evaluated on the device that it is on.
        data: Its data. Where it has several `views` of an example, accuracy and loss are of the logits averaged
            over them; shuffling and other sizes are measured on one.
        sizes: Input sizes to evaluate at beside the training size, as `scaled_sizes` or `square_sizes` have them; none
            without a lattice.
        window_size: Windows of a Swin at other sizes, see `windows_at`.

    Raises:
        ValueError: a window size for a model without windows.
    """
    labels, logits = predict_views_or_one(model, data)
    trained = AtSize(tuple(data.input_size), "trained", _correct(labels, logits), data.enlarged)
    others = [_measured_at(model, data, size, window_size) for size in sizes if tuple(size) != trained.size]
    return Evaluation(
        labels=labels.tolist(),
        predicted=logits.argmax(dim=-1).tolist(),
        val_loss=functional.cross_entropy(logits, labels).item(),
        shuffled_top1=float(np.mean(correct_shuffled(model, data))),
        resolutions=sorted([trained, *others], key=lambda at: at.size),
    )


def correct_shuffled(model: Model, data: DataModule) -> list[bool]:
    """Whether each validation example is right after its patches, or positions, have changed places at random."""
    return _right(*predict(model, data, shuffler(model, SHUFFLE_SEED)))


def shuffler(model: Model, seed: int) -> Change:
    """What exchanges the patches of a batch at random, or the positions of its tokens, which stay where they are."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, TokenClassifier):
        return partial(shuffle_positions, channels=model.channels, generator=generator)
    return partial(shuffle_patches, patch_size=model.embed.patch_size, generator=generator)


def correct_at(model: Model, data: DataModule, scales: Iterable[float]) -> dict[tuple[int, ...], list[bool]]:
    """Whether each validation example is right at other sizes than the one trained at.

    Args:
        model: Evaluated on the device that it is on.
        data: Its data.
        scales: Sizes as multiples of the training size. Without a lattice there are none.
    """
    if isinstance(model, TokenClassifier):
        return {}
    sizes = scaled_sizes(data, model.embed.patch_size, scales)
    return {size: _right(*predict_at(model, data, size)) for size in sizes if size != tuple(data.input_size)}


def keep_range(model: Model) -> None:
    """Place the patches of inputs of other sizes in the range of positions that was trained, as ComRoPE's code does.

    Raises:
        ValueError: positions are those of a window, or not those of a lattice.
    """
    if not isinstance(model, ViT):
        what = "a Swin, whose positions are in its windows" if isinstance(model, Swin) else "tokens at any positions"
        raise ValueError(f"the range of positions is kept by a ViT alone, got {what}")
    lattice: Any = model if model.place is None else model.place
    if not isinstance(lattice, ViT | JitteredLattice):
        raise ValueError(f"the range of positions is kept on a lattice with a spacing, got {type(lattice).__name__}")
    trained = model.embed.lattice(model.arguments["input_size"])
    model.place = FixedRangeLattice(trained, lattice.spacing, lattice.origin)


def windows_at(model: Model, size: Sequence[int], window_size: WindowSize | None) -> list[int] | None:
    """Tokens of a Swin's window along each axis at an input size; None for those of the training.

    Args:
        model: The model.
        size: Of the input.
        window_size: A number for all axes but time; "grow": as many times those of the training as the input is of the
            training's, rounded (rope-vit's figures 5 and 6); None: those of the training.

    Raises:
        ValueError: a window size for a ViT.
    """
    if window_size is None:
        return None
    if not isinstance(model, Swin):
        kind = "ViT" if isinstance(model, ViT) else "Transformer"
        raise ValueError(f"window_size is for a Swin, got {window_size} for a {kind}, which has no windows")
    inputs = model.arguments["input_size"]
    trained = per_axis_window(model.arguments["window_size"], len(inputs))
    pairs = list(zip(trained, size, inputs, strict=True))
    if window_size == "grow":
        return [max(1, round(window * extent / before)) for window, extent, before in pairs]
    return [window if axis < len(pairs) - 2 else window_size for axis, (window, _, _) in enumerate(pairs)]


def predict_views_or_one(model: nn.Module, data: DataModule) -> tuple[Tensor, Tensor]:
    """Labels and logits as `predict`, averaged over the views of an example where its data has several."""
    return predict(model, data) if data.views == 1 else predict_views(model, data.test_dataloader())


def predict_at(model: nn.Module, data: DataModule, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Labels and logits as `predict`, of inputs that are drawn or read at a size where they can be, else resampled."""
    return predict(model, made_at(data, size) or data, partial(resize, size=size))


def made_at(data: DataModule, size: tuple[int, ...]) -> DataModule | None:
    """The data with validation examples drawn or read at a size; None where they can only be resampled."""
    if tuple(size) == tuple(data.input_size):
        return data
    other = None if data.other_sizes == "resampled" else data.at_size(size[-1])
    return other if other is not None and tuple(other.input_size) == tuple(size) else None


def of_other_sizes(data: DataModule) -> str:
    """What the name of a kept measure at other sizes ends with, so that one of resampled inputs is not taken for it."""
    return "-read" if data.other_sizes == "read" else ""


@torch.no_grad()
def predict(
    model: nn.Module, data: DataModule, change: Change = lambda inputs: inputs, **options: Any
) -> tuple[Tensor, Tensor]:
    """Labels `(examples,)` and logits `(examples, classes)` of the validation set, its inputs changed.

    Args:
        model: Evaluated on the device that it is on.
        data: The data.
        change: What is done to a batch of inputs.
        options: Handed to the model with each batch.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    all_labels, all_logits = [], []
    for inputs, labels, *spacings in data.val_dataloader():
        changed = change(inputs)
        told = [_resampled(spacing, inputs, changed).to(device) for spacing in spacings]
        all_labels.append(labels)
        all_logits.append(model(changed.to(device), *told, **options).float().cpu())
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


def square_sizes(data: DataModule, patch_size: Sequence[int], sides: Iterable[int]) -> list[tuple[int, ...]]:
    """Input sizes of so many pixels per side; time, or depth, stays as it is.

    Raises:
        ValueError: patches do not fill one.
    """
    chosen = sorted(set(sides))
    patch = math.lcm(*patch_size[-2:])
    for side in chosen:
        if side % patch:
            raise ValueError(f"sizes must be multiples of the patch, {patch} pixels, got {side}")
    return [(*data.input_size[:-2], side, side) for side in chosen]


def _measured_at(model: Model, data: DataModule, size: tuple[int, ...], window_size: WindowSize | None) -> AtSize:
    made, windows = made_at(data, size), windows_at(model, size, window_size)
    options = {} if windows is None else {"window_size": windows}
    right = _correct(*predict(model, made or data, partial(resize, size=size), **options))
    return AtSize(size, "resampled" if made is None else made.other_sizes, right, 0 if made is None else made.enlarged)


def _resampled(spacing: Tensor, inputs: Tensor, changed: Tensor) -> Tensor:
    """Distances between voxels `(batch, axes)` after inputs became larger or smaller: what they show stays as long."""
    return spacing * torch.tensor(inputs.shape[2:]) / torch.tensor(changed.shape[2:])


def _correct(labels: Tensor, logits: Tensor) -> np.ndarray:
    return np.array(_right(labels, logits), dtype=float)


def _right(labels: Tensor, logits: Tensor) -> list[bool]:
    return (logits.argmax(dim=-1) == labels).tolist()
