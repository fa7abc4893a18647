"""Tables, figures and pictures of a comparison."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import interpolate, pad

from torchrope.encodings import Encoding, NoEncoding
from torchrope_lab.conclusion import BASELINE
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.comparison import Comparison, accuracy_figures, main_table
from torchrope_lab.engine.descriptions import description_of, named_parts
from torchrope_lab.engine.drawings import picture
from torchrope_lab.engine.estimates import in_percent
from torchrope_lab.engine.figures import (
    ENCODING_AXIS,
    TOP1_AXIS,
    cells_figure,
    figure,
    line_figure,
    marks,
    over_epochs,
)
from torchrope_lab.engine.long_table import (
    Cell,
    Columns,
    RightOrWrong,
    at_levels,
    change_columns,
    name_columns,
    table_of,
    with_interval,
)
from torchrope_lab.engine.measured import Measured
from torchrope_lab.engine.study import Lab
from torchrope_lab.results import Axis, Column, Figure, Findings, Pictures, Table
from torchrope_lab.statistics import median_interval

CLASSES = 30
"""Largest number of classes that tables and figures show individually."""
EXAMPLES = 3
CONFUSIONS = 10


@dataclass(frozen=True)
class ComparisonResults:
    """Measurements of a comparison, finished or not."""

    comparison: Comparison  # finished runs, and the conclusion about them
    measured: Mapping[str, Measured]  # by name of a run
    costs: Mapping[str, Any]  # of a training step by encoding, of `measure_costs`; empty until all runs are finished
    relative: Mapping[str, np.ndarray]  # seconds of a step in each round over those of the base, by encoding
    lab: Lab

    @property
    def data(self) -> DataModule:
        """The data, set up."""
        return self.lab.data

    @property
    def cells(self) -> list[Cell]:
        """Encodings by decreasing accuracy."""
        return [*self.comparison.top1.values]

    @cached_property
    def groups(self) -> dict[Cell, list[Measured]]:
        """Measures of the runs by encoding, by decreasing accuracy."""
        groups = self.comparison.groups
        return {Cell(name): [self.measured[each.run.name] for each in runs] for name, runs in groups.items()}

    @cached_property
    def sizes(self) -> dict[tuple[int, ...], str]:
        """The level "8×8" of every input size, in increasing order; only the training size without a lattice."""
        others = next(iter(self.groups.values()))[0].sizes if self.data.lattice else ()
        return {size: "×".join(map(str, size)) for size in sorted({tuple(self.data.input_size), *others})}

    @cached_property
    def at_sizes(self) -> RightOrWrong:
        """The answers by encoding at every input size."""
        right = {}
        for size, level in self.sizes.items():
            for cell, group in self.groups.items():
                found = [each.sizes.get(size, each.trained.correct) for each in group]
                right[cell._replace(level=level)] = np.stack(found)
        return RightOrWrong(right)

    @property
    def cells_at_sizes(self) -> list[Cell]:
        """Encodings by decreasing accuracy if they are evaluated at other sizes."""
        return self.cells if len(self.sizes) > 1 else []

    @property
    def base(self) -> str:
        """The encoding that costs are relative to."""
        return BASELINE if BASELINE in self.relative else next(iter(self.relative), "")

    def ratio(self, cell: Cell) -> Sequence[float] | None:
        """Compute the median ratio of the time of a step to that of the base, with its interval."""
        return median_interval(self.relative[cell.arm]) if cell.arm in self.relative else None

    @property
    def ratio_column(self) -> tuple[Column, Callable[[Cell], Any]]:
        """The column of `ratio`, empty before costs are measured."""
        return with_interval("ratio", f"Step time, × {self.base}", digits=2), self.ratio


def findings(results: ComparisonResults) -> Findings:
    """Build the findings of a comparison."""
    comparison = results.comparison
    tables = (_main, _gains, _sizes, _costs, _classes, _confusions, _encodings)
    accuracy, *curves = accuracy_figures(comparison)
    return Findings(
        answer=comparison.conclusion.sentence(),
        tables=[table(results) for table in tables],
        figures=[accuracy, _by_cost(results), *curves, _losses(results), _by_size(results), _confusion(results)],
        pictures=_pictures(results),
    )


# ---- tables


def _main(results: ComparisonResults) -> Table:
    shuffled = {cell: np.stack([each.shuffled for each in group]) for cell, group in results.groups.items()}
    column = (with_interval("shuffled", "Shuffled", "%", 1), RightOrWrong(shuffled).interval)
    how = "patches in random order" if results.data.lattice else "the positions of an example permuted among its tokens"
    return main_table(results.comparison, "Results", [column, results.ratio_column], f"Shuffled: {how}.")


def _gains(results: ComparisonResults) -> Table:
    gains = {Cell(name): in_percent(gain) for name, gain in results.comparison.conclusion.gains.items()}
    note = "Intervals are simultaneous over all pairs of encodings, as in the first table."
    columns = (*name_columns(), *change_columns(gains, "Ahead"))
    return table_of("Gain over no positions", columns, gains, note)


def _sizes(results: ComparisonResults) -> Table:
    trained = results.sizes[tuple(results.data.input_size)]
    titles = {level: level for level in results.sizes.values()} | {trained: f"{trained} (trained)"}
    columns = at_levels(results.at_sizes.interval, titles, "%")
    note = f"The same inputs {_made_at(results.data)} sizes other than the training size, without further training."
    return table_of("Accuracy at other input sizes", [*name_columns(), *columns], results.cells_at_sizes, note)


def _made_at(data: DataModule) -> str:
    made = {"read": "read from their files at", "cropped": "cropped without resizing at", "resampled": "resampled to"}
    return made[data.other_sizes]


def _costs(results: ComparisonResults) -> Table:
    def of(key: str, unit: float = 1.0) -> Any:
        return lambda cell: results.costs[cell.arm][key] / unit

    columns: Columns = (
        *name_columns(),
        (Column("encoding_parameters", "Encoding parameters"), of("encoding_parameters")),
        (Column("parameters", "All parameters"), of("parameters")),
        (Column("mflops", "MFLOPs per input", digits=2), of("flops", 1e6)),
        (
            with_interval("ms", "Training step", "ms", 2),
            lambda cell: median_interval([1e3 * seconds for seconds in results.costs[cell.arm]["seconds"]]),
        ),
        results.ratio_column,
        (Column("memory", "Peak memory", "MB", 1), of("peak_memory_bytes", 1e6)),
    )
    note = (
        "Models are timed in one process in short interleaved rounds; ratios are within a round, medians with 95 % "
        "bootstrap intervals. Operations are matrix products, attention and exponentials. Larger models have smaller "
        "ratios."
    )
    return table_of("Costs", columns, [cell for cell in results.cells if cell.arm in results.costs], note)


def _classes(results: ComparisonResults) -> Table:
    names, labels = results.data.classes, results.comparison.labels

    def top1_of(right: np.ndarray) -> Any:
        return lambda kind: 100 * float(right[:, labels == kind].mean()) if (labels == kind).any() else None

    columns: Columns = (
        (Column("class", "Class"), lambda kind: str(names[kind])),
        (Column("examples", "Examples"), lambda kind: int((labels == kind).sum())),
        *(
            (Column(f"top1_{cell.arm}", cell.arm, "%", 1), top1_of(right))
            for cell, right in results.comparison.top1.values.items()
        ),
    )
    return table_of("Accuracy by class", columns, range(len(names) if 1 < len(names) <= CLASSES else 0))


def _pairs(results: ComparisonResults) -> dict[tuple[int, int], float]:
    """Compute the shares in percent of each class that the best encoding predicts to be of each, over all runs."""
    runs = next(iter(results.comparison.groups.values()))
    counts = Counter(pair for run in runs for pair in zip(run.labels, run.predicted, strict=True))
    of_class = Counter(runs[0].labels)
    return {pair: 100 * count / (len(runs) * of_class[pair[0]]) for pair, count in counts.most_common()}


def _confusions(results: ComparisonResults) -> Table:
    shares, names = _pairs(results), results.data.classes
    wrong = [pair for pair in shares if pair[0] != pair[1]]
    columns: Columns = (
        (Column("true", "Class"), lambda pair: str(names[pair[0]])),
        (Column("predicted", "Predicted"), lambda pair: str(names[pair[1]])),
        (Column("share", "Of its examples", "%", 1), lambda pair: shares[pair]),
    )
    return table_of(f"Most frequent confusions of {results.cells[0].arm}", columns, wrong[:CONFUSIONS])


def _encodings(results: ComparisonResults) -> Table:
    def joined(attribute: str, separator: str) -> Any:
        return lambda cell: separator.join(getattr(description_of(part), attribute) for part in named_parts(cell.arm))

    columns: Columns = (
        *name_columns(),
        (Column("summary", "Description"), joined("summary", " ")),
        (Column("formula", "Formula"), joined("formula", ";  ")),
        (Column("source", "Source"), joined("source", "; ")),
        (Column("kind", "Kind"), lambda cell: _kind(results, cell.arm)),
    )
    return table_of("The encodings", columns, results.cells)


def _kind(results: ComparisonResults, name: str) -> str:
    if not any(issubclass(part, Encoding) and part is not NoEncoding for part in resolve_encoding(name).parts):
        return "not rotary"
    model = results.lab.blueprint(results.comparison.groups[name][0].run)
    relative = next(module.relative for module in model.modules() if isinstance(module, Encoding))
    return "rotary, relative" if relative else "rotary, not relative"


# ---- figures


def _losses(results: ComparisonResults) -> Figure:
    return line_figure(
        Axis("epoch", "Epoch"),
        Axis("loss", "Loss"),
        [
            (part, name, epoch, found)
            for name, runs in results.comparison.groups.items()
            for part in ("training", "validation")
            for epoch, *found in over_epochs(runs, "train_loss" if part == "training" else "val_loss")
        ],
        panel="encoding",
        name="losses",
        title="Loss while training",
        caption="Training loss is the mean over an epoch, with augmentation; validation loss is at its end. Bands are "
        "from the lowest to the highest of the training runs.",
    )


def _by_size(results: ComparisonResults) -> Figure:
    trained = results.data.input_size[-1:]  # empty for tokens at any positions
    return line_figure(
        Axis("scale", "Size, as a multiple of the training size"),
        TOP1_AXIS,
        [
            (cell.arm, "", size[-1] / trained[0], results.at_sizes.interval(cell._replace(level=level)))
            for cell in results.cells_at_sizes
            for size, level in results.sizes.items()
        ],
        name="sizes",
        title="Accuracy at other input sizes",
        caption=f"The same inputs {_made_at(results.data)} each size, no further training. Bands are 95 % intervals.",
    )


def _by_cost(results: ComparisonResults) -> Figure:
    return figure(
        "costs",
        "Time of a training step",
        Axis("ratio", f"Time of a training step, × {results.base}", zero=True),
        ENCODING_AXIS,
        marks([cell for cell in results.cells if cell.arm in results.relative], [results.ratio_column]),
        "Medians of ratios within a round, with 95 % intervals. The axis starts at 0.",
        kind="points",
    )


def _confusion(results: ComparisonResults) -> Figure:
    names = [str(name) for name in results.data.classes]
    if not 1 < len(names) <= CLASSES or len(set(names)) < len(names):
        names = []
    shares = _pairs(results)
    x, y = Axis("predicted", "Predicted", scale="category"), Axis("true", "Class", scale="category")
    cells = [
        (to, of, shares.get((true, predicted), 0.0))
        for true, of in enumerate(names)
        for predicted, to in enumerate(names)
    ]
    title = f"Confusion table of {results.cells[0].arm}"
    of_class = Axis("share", "Of the class", "%")
    return cells_figure(x, y, of_class, cells, name="confusion", title=title, caption="Rows add up to 100 %.")


# ---- pictures


def _pictures(results: ComparisonResults) -> list[Pictures]:
    """Build pictures of the first validation examples, with the most frequent prediction with each encoding."""
    inputs = next(iter(results.data.val_dataloader()))[0][:EXAMPLES]
    if inputs.ndim not in (4, 5) or results.data.config.folds:  # with folds predictions are in another order
        return []
    rows = []
    for index, (image, label) in enumerate(zip(_images(inputs), results.comparison.labels, strict=False)):
        lines = []
        for name, runs in results.comparison.groups.items():
            [(predicted, count)] = Counter(run.predicted[index] for run in runs).most_common(1)
            lines.append(f"{name}: {results.data.classes[predicted]} ({count} of {len(runs)})")
        rows.append(picture(str(results.data.classes[label]), image, {"\n".join(lines): ""}))
    about = "The first validation examples, and the most frequent prediction with each encoding (of its training runs)."
    return [Pictures("examples", "Examples and predictions", about, rows, about)]


def _images(inputs: Tensor) -> Tensor:
    """Return images `(batch, 1 or 3, height, width)`, for clips and volumes strips of up to five frames or slices."""
    images = inputs if inputs.shape[1] in (1, 3) else inputs[:, :1]
    if images.ndim == 5:
        some = images[:, :, :: -(-images.shape[2] // 5)]
        images = pad(some, (1, 1), value=float(some.amax())).movedim(2, 3).flatten(3)  # white lines between frames
    larger = max(1, -(-40 // max(images.shape[-2:])))  # for a side of 8 pixels, each pixel is drawn as 5 by 5
    return interpolate(images.float(), scale_factor=larger)
