"""Tables, figures, pictures and notes of a comparison."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.utils import make_grid

from torchrope.encodings import Encoding, NoEncoding
from torchrope_lab.conclusion import BASELINE, Conclusion, rise
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.descriptions import description_of, named_parts
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import STILL_RISING, Advice, Axis, Column, Figure, Findings, Pictures, Row, Table
from torchrope_lab.statistics import accuracy_interval, median_interval
from torchrope_lab.studies.engine.estimates import (
    ABOUT_TRAIN_LOSS,
    NAMES,
    OVER_SEEDS,
    TOP1,
    VERDICT,
    cells,
    in_percent,
    last_train_loss,
    named,
    percent,
    top1,
    verdict,
    with_interval,
)
from torchrope_lab.studies.engine.figures import over_epochs, top1_by_encoding, top1_curves
from torchrope_lab.studies.engine.measured import Measured
from torchrope_lab.studies.engine.pictures import picture
from torchrope_lab.studies.engine.runs import Trained
from torchrope_lab.training.models import Model

CLASSES = 30
"""Largest number of classes that tables and figures show individually."""
SAMPLES = 16
CONFUSIONS = 10
UNEQUAL = 1.5
"""Size of the largest class relative to the smallest from which balanced accuracy is shown."""
_TOP1 = Axis("top1", "Top-1", "%")


@dataclass(frozen=True)
class Comparison:
    """Measurements of a comparison, finished or not.

    Attributes:
        conclusion: Conclusion of the comparison.
        done: Finished runs.
        rights: Right or wrong by encoding, `(seeds, examples)`, over the seeds that all have.
        costs: Costs of a training step by encoding, as `measure_costs` returns them; empty until all runs are finished.
        relative: Seconds of a step in each round over those of the base, by encoding.
        blueprints: Models on the meta device, by encoding.
        data: The data, set up.
    """

    conclusion: Conclusion
    done: Sequence[Measured]
    rights: Mapping[str, np.ndarray]
    costs: Mapping[str, Any]
    relative: Mapping[str, np.ndarray]
    blueprints: Mapping[str, Model]
    data: DataModule

    @property
    def ordered(self) -> list[str]:
        """Encodings by decreasing accuracy."""
        return sorted(self.rights, key=lambda name: (-self.rights[name].mean(), name))

    @property
    def groups(self) -> dict[str, list[Measured]]:
        """Finished runs by encoding, by decreasing accuracy."""
        return {name: [each for each in self.done if each.trained.encoding == name] for name in self.ordered}

    @property
    def trained(self) -> dict[str, list[Trained]]:
        """The runs of `groups`."""
        return {name: [each.trained for each in group] for name, group in self.groups.items()}

    @property
    def base(self) -> str:
        """The encoding that costs are relative to."""
        return BASELINE if BASELINE in self.relative else next(iter(self.relative), "")


def findings(comparison: Comparison) -> Findings:
    """Build the findings of a comparison."""
    return Findings(
        answer=comparison.conclusion.sentence(),  # StudyResult adds the learning curves and the balanced accuracy
        tables=tables(comparison),
        figures=figures(comparison),
        pictures=pictures(comparison),
        notes=notes(comparison),
        advice=advice(comparison),
    )


def tables(comparison: Comparison) -> list[Table]:
    """Build all tables, the main table first."""
    found = [
        _results(comparison),
        _gains(comparison),
        _sizes(comparison),
        _costs(comparison),
        _classes(comparison),
        _confusions(comparison),
    ]
    return [*(table for table in found if table is not None), _encodings(comparison)]


def figures(comparison: Comparison) -> list[Figure]:
    """Build the figures: accuracy, learning curves, other input sizes, costs, and confusions."""
    accuracy = [top1_by_encoding(comparison.rights, comparison.conclusion.chance), top1_curves(comparison.trained)]
    found = [*accuracy, _losses(comparison), _by_size(comparison), _by_cost(comparison), _confusion(comparison)]
    return [figure for figure in found if figure is not None]


def _results(comparison: Comparison) -> Table:
    rows: list[Row] = []
    for name, group in comparison.groups.items():
        shuffled = accuracy_interval(np.stack([each.shuffled for each in group]))
        gap = comparison.conclusion.gaps.get(name)
        rows.append(
            {
                **named(name),
                **top1(comparison.rights[name]),
                "balanced": _balanced(comparison, name),
                "verdict": verdict(comparison.conclusion, name),
                **cells("gap", gap and in_percent(gap)),
                **cells("shuffled", in_percent(shuffled)),
                "val_loss": _mean([each.trained.val_loss for each in group]),
                **last_train_loss([each.trained for each in group]),
                **_ratio(comparison, name),
            }
        )
    columns = [
        *NAMES,
        TOP1,
        *([OVER_SEEDS] if comparison.conclusion.seeds > 1 else []),
        *([Column("balanced", "Balanced accuracy", "%", 1)] if _unequal(comparison) else []),
        VERDICT,
        with_interval("gap", "Behind the best", "points", 1),
        with_interval("shuffled", "Shuffled", "%", 1),
        Column("val_loss", "Validation loss", digits=3),
        Column("train_loss", "Training loss, last epoch", digits=3),
        *([Column("train_spread", "± over seeds", digits=3)] if comparison.conclusion.seeds > 1 else []),
    ]
    if comparison.costs:
        columns.append(with_interval("ratio", f"Step time, × {comparison.base}", digits=2))
    note = _results_note(comparison.conclusion, comparison.data.lattice)
    if _unequal(comparison):
        note = f"{note} Balanced accuracy: the mean over classes of the accuracy on each."
    return Table("Results", columns, rows, note=note)


def _unequal(comparison: Comparison) -> bool:
    """Return whether the largest class has at least one and a half times the validation examples of the smallest."""
    counts = np.unique(comparison.done[0].trained.labels, return_counts=True)[1]
    return bool(counts.max() >= UNEQUAL * counts.min())


def _balanced(comparison: Comparison, name: str) -> float | None:
    """Compute the mean over classes of the accuracy on each, in percent; None if classes have about equal sizes."""
    if not _unequal(comparison):
        return None
    labels, right = np.asarray(comparison.done[0].trained.labels), comparison.rights[name].mean(axis=0)
    return 100 * fmean(float(right[labels == label].mean()) for label in np.unique(labels))


def _results_note(conclusion: Conclusion, lattice: bool) -> str:
    runs = "one training each" if conclusion.seeds == 1 else f"{conclusion.seeds} seeds each"
    shuffled = "patches in random order" if lattice else "the positions of an example permuted among its tokens"
    over = "examples" if conclusion.seeds == 1 else "examples and seeds"
    return (
        f"Intervals are 95 % over {over}, from {conclusion.examples:,} examples and {runs}. The interval of a paired "
        "difference from the best excludes 0 if and only if the encoding is behind, at 5 % over all pairs (Holm). "
        "Shuffled: "
        f"{shuffled}. {ABOUT_TRAIN_LOSS}"
    )


def _gains(comparison: Comparison) -> Table | None:
    gains = comparison.conclusion.gains
    if not gains:
        return None
    rows = [{**named(name), **cells("gain", in_percent(gains[name]))} for name in comparison.ordered if name in gains]
    return Table(
        "Gain over no positions",
        (*NAMES, with_interval("gain", "Gain over none", "points", 1)),
        rows,
        note="Paired differences of accuracy to the model without positions, each with a separate 95 % interval.",
    )


def _sizes(comparison: Comparison) -> Table | None:
    measured = _at_sizes(comparison)
    sizes = list(dict.fromkeys(row["size"] for row in measured))
    if len(sizes) < 2:
        return None
    rows: list[Row] = []
    for name in comparison.ordered:
        at = {row["size"]: row for row in measured if row["name"] == name}
        shares: dict[str, Any] = {}
        for size in sizes:
            shares |= cells(size, [at[size][end] for end in ("top1", "low", "high")])
        rows.append({**named(name), **shares})
    trained = "×".join(map(str, comparison.data.input_size))
    columns = [with_interval(size, f"{size} (trained)" if size == trained else size, "%", 1) for size in sizes]
    note = f"The same inputs {_made_at(comparison)} sizes other than the training size, without further training."
    return Table("Accuracy at other input sizes", (*NAMES, *columns), rows, note=note)


def _made_at(comparison: Comparison) -> str:
    return {"drawn": "rendered at", "read": "read from their files at", "resampled": "resampled to"}[
        comparison.data.other_sizes
    ]


def _at_sizes(comparison: Comparison) -> list[dict[str, Any]]:
    if not comparison.data.lattice:
        return []
    trained_at = tuple(comparison.data.input_size)
    rows: list[dict[str, Any]] = []
    for name, group in comparison.groups.items():
        found = {size: np.stack([each.sizes[size] for each in group]) for size in group[0].sizes}
        for size, right in sorted({**found, trained_at: comparison.rights[name]}.items()):
            rows.append(
                {
                    **named(name),
                    "size": "×".join(map(str, size)),
                    "scale": size[-1] / trained_at[-1],
                    "trained": size == trained_at,
                    **top1(right),
                }
            )
    return rows


def _costs(comparison: Comparison) -> Table | None:
    if not comparison.costs:
        return None
    rows: list[Row] = [
        {
            **named(name),
            "encoding_parameters": cost["encoding_parameters"],
            "parameters": cost["parameters"],
            "mflops": cost["flops"] / 1e6,
            **cells("ms", median_interval([1e3 * value for value in cost["seconds"]])),
            **_ratio(comparison, name),
            "memory": cost["peak_memory_bytes"] / 1e6,
        }
        for name in comparison.ordered
        if (cost := comparison.costs.get(name))
    ]
    columns = (
        *NAMES,
        Column("encoding_parameters", "Encoding parameters"),
        Column("parameters", "All parameters"),
        Column("mflops", "MFLOPs per input", digits=2),
        with_interval("ms", "Training step", "ms", 2),
        with_interval("ratio", f"Step time, × {comparison.base}", digits=2),
        Column("memory", "Peak memory", "MB", 1),
    )
    note = (
        "Models are timed in one process in short interleaved rounds; ratios are within a round, medians with exact "
        "95 % intervals. Operations are matrix products, attention and exponentials. Larger models have smaller ratios."
    )
    return Table("Costs", columns, rows, note=note)


def _classes(comparison: Comparison) -> Table | None:
    names = comparison.data.classes
    if not 1 < len(names) <= CLASSES:
        return None
    labels = np.asarray(comparison.done[0].trained.labels)
    rows: list[Row] = []
    for index, title in enumerate(names):
        of_class = labels == index
        shares = {
            f"top1_{name}": 100 * float(right[:, of_class].mean()) if of_class.any() else None
            for name, right in comparison.rights.items()
        }
        rows.append({"class": str(title), "examples": int(of_class.sum()), **shares})
    columns = [Column(f"top1_{name}", name, "%", 1) for name in comparison.ordered]
    return Table("Accuracy by class", (Column("class", "Class"), Column("examples", "Examples"), *columns), rows)


def _pairs(comparison: Comparison) -> Counter[tuple[int, int]]:
    """Count true and predicted classes with the best encoding, over its runs."""
    runs = [each.trained for each in comparison.groups[comparison.ordered[0]]]
    return Counter(pair for run in runs for pair in zip(run.labels, run.predicted, strict=True))


def _confusions(comparison: Comparison) -> Table | None:
    wrong = [(pair, count) for pair, count in _pairs(comparison).most_common() if pair[0] != pair[1]][:CONFUSIONS]
    if not wrong:
        return None
    names = comparison.data.classes
    counts = Counter(comparison.done[0].trained.labels)
    runs = len(comparison.groups[comparison.ordered[0]])
    rows: list[Row] = [
        {"true": str(names[true]), "predicted": str(names[predicted]), "share": 100 * count / (runs * counts[true])}
        for (true, predicted), count in wrong
    ]
    columns = (Column("true", "Class"), Column("predicted", "Predicted"), Column("share", "Of its examples", "%", 1))
    return Table(f"Most frequent confusions of {comparison.ordered[0]}", columns, rows)


def _encodings(comparison: Comparison) -> Table:
    rows: list[Row] = []
    for name in comparison.ordered:
        parts, told = resolve_encoding(name).parts, list(map(description_of, named_parts(name)))
        rows.append(
            {
                **named(name),
                "summary": " ".join(part.summary for part in told),
                "formula": ";  ".join(part.formula for part in told),
                "source": "; ".join(part.source for part in told),
                "kind": _kind(parts, comparison.blueprints[name]),
            }
        )
    columns = (
        *NAMES,
        Column("summary", "Description"),
        Column("formula", "Formula"),
        Column("source", "Source"),
        Column("kind", "Kind"),
    )
    return Table("The encodings", columns, rows)


def _kind(parts: Sequence[Any], blueprint: Model) -> str:
    if not any(issubclass(part, Encoding) and part is not NoEncoding for part in parts):
        return "not rotary"
    relative = next(module.relative for module in blueprint.modules() if isinstance(module, Encoding))
    return "rotary, relative" if relative else "rotary, not relative"


def _losses(comparison: Comparison) -> Figure:
    parts = {"train_loss": "training", "val_loss": "validation"}
    rows: list[Row] = [
        {"name": name, "part": part, "epoch": epoch, "loss": mean}
        for name, runs in comparison.trained.items()
        for key, part in parts.items()
        for epoch, mean, _, _ in over_epochs(runs, key)
    ]
    return Figure(
        name="losses",
        kind="lines",
        title="Loss while training",
        alt="Loss on training and validation examples after every epoch, a small figure for each encoding.",
        x=Axis("epoch", "Epoch"),
        y=Axis("loss", "Loss"),
        rows=rows,
        series="part",
        panel="name",
        caption="Training loss is the mean over an epoch, with augmentation; validation loss is at its end.",
    )


def _by_size(comparison: Comparison) -> Figure | None:
    rows = _at_sizes(comparison)
    if all(row["trained"] for row in rows):
        return None
    keys = ("name", "scale", "top1", "low", "high", "size")
    return Figure(
        name="sizes",
        kind="lines",
        title="Accuracy at other input sizes",
        alt="Top-1 over the size of the inputs, as a multiple of the training size, one line per encoding.",
        x=Axis("scale", "Size, as a multiple of the training size"),
        y=_TOP1,
        rows=[{key: row[key] for key in keys} for row in rows],
        series="name",
        low="low",
        high="high",
        caption=f"The same inputs {_made_at(comparison)} each size, no further training. Bands are 95 % intervals.",
    )


def _by_cost(comparison: Comparison) -> Figure | None:
    if not comparison.costs:
        return None
    rows: list[Row] = [
        {"name": name, "top1": 100 * float(comparison.rights[name].mean()), **_ratio(comparison, name)}
        for name in comparison.ordered
        if name in comparison.relative
    ]
    return Figure(
        name="costs",
        kind="points",
        title="Time of a training step",
        alt=f"Time of a training step of each encoding as a multiple of that of {comparison.base}, from 0.",
        x=Axis("ratio", f"Time of a training step, × {comparison.base}", zero=True),
        y=Axis("name", "Encoding", scale="category"),
        rows=rows,
        series="name",
        low="ratio_low",
        high="ratio_high",
        caption="Medians of ratios within a round, with 95 % intervals. The axis starts at 0.",
    )


def _confusion(comparison: Comparison) -> Figure | None:
    names = [str(name) for name in comparison.data.classes]
    if not 1 < len(names) <= CLASSES or len(set(names)) < len(names):
        return None
    pairs, counts = _pairs(comparison), Counter(comparison.done[0].trained.labels)
    runs = len(comparison.groups[comparison.ordered[0]])
    rows: list[Row] = [
        {
            "true": names[true],
            "predicted": names[predicted],
            "share": 100 * pairs[true, predicted] / max(1, runs * counts[true]),
        }
        for true in range(len(names))
        for predicted in range(len(names))
    ]
    return Figure(
        name="confusion",
        kind="cells",
        title=f"Confusion table of {comparison.ordered[0]}",
        alt="Share of each class's examples that are predicted to be of each class.",
        x=Axis("predicted", "Predicted", scale="category"),
        y=Axis("true", "Class", scale="category"),
        rows=rows,
        colour=Axis("share", "Of the class", "%"),
        caption="Rows add up to 100 %.",
    )


def pictures(comparison: Comparison) -> list[Pictures]:
    """Build a picture of training examples after augmentation."""
    inputs, labels, *_ = next(iter(comparison.data.train_dataloader()))
    if inputs.ndim not in (4, 5):
        return []
    shown = _frames(inputs[:SAMPLES])
    classes = labels[:SAMPLES].argmax(dim=-1) if labels.ndim > 1 else labels[:SAMPLES]
    titles = ", ".join(str(comparison.data.classes[index]) for index in classes.tolist())
    sheet = make_grid(shown, nrow=8, normalize=True, scale_each=True, padding=1)
    of_volume = ", the middle one of each" if inputs.ndim == 5 else ""
    return [
        Pictures(
            name="samples",
            title="Training examples after augmentation",
            alt=f"{len(shown)} training examples after augmentation.",
            rows=[picture("In reading order", sheet, {"inputs": ""})],
            caption=f"After augmentation{of_volume}. Classes in reading order: {titles}.",
        )
    ]


def _frames(inputs: Tensor) -> Tensor:
    """Select images `(batch, 1 or 3, height, width)`: the middle slice of clips and volumes, else the first channel."""
    images = inputs if inputs.ndim == 4 else inputs[:, :, inputs.shape[2] // 2]
    images = images if images.shape[1] in (1, 3) else images[:, :1]
    side = max(images.shape[-2:])
    larger = max(1, -(-40 // side))  # for a side of 8 pixels, each pixel is drawn as 5 by 5
    return torch.nn.functional.interpolate(images.float(), scale_factor=larger)


def notes(comparison: Comparison) -> list[str]:
    """Write the notes of a comparison."""
    found = [
        *_remarks(comparison),
        "All encodings have the same small model and training settings, tuned for none of them: larger models, "
        "longer training or other data may rank them differently.",
    ]
    if comparison.conclusion.seeds == 1:
        found.append(
            "One training each: answer and intervals are about these models. --seeds 3 compares encodings: it includes "
            "the variation between trainings."
        )
    return found


def _remarks(comparison: Comparison) -> list[str]:
    """Note encodings whose accuracy is still rising, and those that over-fit."""
    rising, over = [], []
    for name, runs in comparison.trained.items():
        risen = rise([100 * mean for _, mean, _, _ in over_epochs(runs, "val_top1")])
        loss = [mean for _, mean, _, _ in over_epochs(runs, "val_loss")]
        if risen is not None and risen > STILL_RISING:
            rising.append(name)
        if loss and loss[-1] > 1.1 * min(loss):
            over.append(name)
    found = []
    if rising:
        found.append(
            "Still rising by more than a point over the last fifth of training, so that longer training may change the "
            f"answer: {', '.join(rising)}."
        )
    if over:
        found.append(f"Over-fitted, the validation loss ends 10 % or more above its lowest: {', '.join(over)}.")
    return found


def advice(comparison: Comparison) -> list[Advice]:
    """Recommend encodings, if the conclusion names any; with one seed the advice is about that training."""
    conclusion = comparison.conclusion
    if conclusion.kind not in ("best", "tied", "cheaper"):
        return []
    first = conclusion.cheapest or conclusion.best or ""
    equal = [name for name in (conclusion.best, *conclusion.tied) if name and name != first]
    case = f"{comparison.data.title}, at the training size{', in this training' if conclusion.seeds == 1 else ''}"
    reached = percent(in_percent(accuracy_interval(comparison.rights[first])))
    return [Advice(case, [first, *equal], f"{first} reaches {reached}")]


def _ratio(comparison: Comparison, name: str) -> dict[str, float | None]:
    return cells("ratio", median_interval(comparison.relative[name]) if name in comparison.relative else None)


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return fmean(finite) if len(finite) == len(values) else None
