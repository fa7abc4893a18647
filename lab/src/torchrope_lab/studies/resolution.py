"""Accuracy at other input sizes, and methods to improve it (LieRE fig. 2, ComRoPE table 3, RoPE-ViT figs. 4-6)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from torchrope.encodings import NoEncoding
from torchrope.models import Swin, ViT
from torchrope_lab.conclusion import Interval, join_names, one_seed
from torchrope_lab.data.build import make_data
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Advice, Axis, Check, Column, Figure, Findings, Table
from torchrope_lab.statistics import accuracy_interval
from torchrope_lab.studies.engine.estimates import (
    HOLM,
    NAMES,
    NONE_POSSIBLE,
    VERDICT,
    at_best,
    by_encoding,
    cells,
    concluded,
    contrasts,
    in_percent,
    named,
    points,
    tied_with,
    verdict,
    verdict_of,
    with_interval,
)
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.published import COMROPE, LIERE_2, LIERE_REVIEWS, ROPE_VIT, published
from torchrope_lab.studies.engine.runs import Measure, Run, Trained
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.studies.other_sizes import (
    METHODS,
    InWindows,
    extended_for,
    fixed_position_range,
    methods_for,
    rescaled_for,
    window_at,
)
from torchrope_lab.training.evaluate import cache_suffix, predict_at, scaled_sizes
from torchrope_lab.training.models import on_lattice
from torchrope_lab.training.sizes import size_of

Size = tuple[int, ...]
Right = dict[Size, np.ndarray]  # correct (1) or wrong (0), (seeds, examples)
Adapt = Callable[[Any, Size], nn.Module]
Adaptations = dict[str, tuple[Adapt, Sequence[Size]]]
"""How a trained model is adapted to which sizes, by the key of its measures."""
AS_TRAINED, WINDOWS, RANGE = "top1", "windows", "rescaled"
"""Maps a trained model and a size to the model that is evaluated at that size."""

SCALES = (0.5, 0.75, 1.25, 1.5, 2.0)
MIXED_SCALES = (0.75, 1.0, 1.25)
STAGE_SCALE = 256 / 224
STAGE_SHARE = 30 / 200  # of the first stage's epochs
STAGE_LR = 0.1  # of the first stage's
JITTER = 1.0
MIXED, RESCALED, GROWN = "mixed sizes", "positions in", "larger windows"
TITLES = {
    **dict.fromkeys(METHODS.values(), "Effect of scaled frequencies"),
    MIXED: "Effect of training across mixed sizes",
    GROWN: "Effect of windows that grow with the input",
}
"""Titles of the tables of changes, for changes whose name does not fit into the default title."""
HOW_SIZED = {
    "drawn": "are rendered at every size, so that larger ones have more detail",
    "read": "are read from their files at every size, so that larger ones have the detail of the files",
    "resampled": "of other sizes are resampled from it, so that larger ones have no more detail, unlike in papers",
}
TABLE_IN_PAPERS = (
    "RoPE-ViT finds the opposite at every size above the training size (figure 4; 80.9 against 77.6 % at twice the "
    "size, table 5), and LieRE no loss at twice the size (section 5.1; 71.7 after 69.3 %), both trained on "
    "random-resized crops and evaluated on photographs with detail at that size."
)
STAGED = ("learned", "axial", "mixed", "liere:8", "comrope-ld")
JITTERED = ("mixed", "liere:8", "comrope-ld")
LARGER_FIELD = ("motion",)  # larger inputs show more, not the same enlarged
SAME = 0.005  # share of the predictions that rounding may change

PUBLISHED = (
    published(
        "Top-1 by inference size, ImageNet-1k, trained at 224",
        f"{LIERE_REVIEWS}, resolutions",
        """
        liere | 64.6 (64.1-65.0) | 69.3 (68.9-69.7) | 71.4 (71.0-71.8) | 73.2 (72.8-73.6) | 73.1 (72.7-73.5) | 71.7 (71.3-72.1)
        liere, second stage | 64.0 (63.5-64.4) | 68.7 (68.3-69.1) | 71.5 (71.1-71.9) | 73.8 (73.4-74.2) | 74.0 (73.6-74.3) | 73.3 (72.9-73.6)
        mixed | 63.7 (63.3-64.2) | 68.8 (68.4-69.2) | 71.1 (70.7-71.5) | 72.5 (72.1-72.9) | 72.1 (71.7-72.5) | 69.7 (69.3-70.1)
        mixed, second stage | 63.1 (62.7-63.5) | 68.2 (67.8-68.6) | 71.2 (70.8-71.6) | 73.3 (72.9-73.6) | 73.3 (72.9-73.7) | 71.7 (71.3-72.1)
        """,  # noqa: E501
        ("Encoding", "192", "224", "256", "320", "384", "448"),
        note="The answer to reviewers gives 240 as the size of the second stage, the paper 256; the paper gives 196 "
        "for 192. RoPE-Mixed is called naver there.",
    ),
    published(
        "Top-1 by inference size, UCF101, trained at 224",
        f"{COMROPE}, table 3",
        """
        absolute, perturbed | 48.10 | 55.25 | 76.50 | 93.10 | 76.70 | 71.48 | 74.36 | 62.23 | 53.18
        absolute | 45.54 | 55.18 | 76.48 | 92.87 | 75.91 | 70.70 | 73.70 | 60.43 | 48.79
        axial (vanilla RoPE), perturbed | 47.28 | 54.96 | 75.69 | 93.79 | 77.66 | 72.53 | 74.72 | 65.19 | 57.34
        axial (vanilla RoPE) | 48.12 | 55.21 | 76.47 | 94.12 | 76.72 | 71.59 | 74.47 | 62.28 | 53.99
        liere, perturbed | 48.97 | 56.15 | 77.33 | 94.43 | 78.35 | 73.20 | 77.33 | 65.74 | 58.23
        liere | 48.75 | 55.46 | 78.16 | 94.24 | 78.91 | 72.92 | 76.86 | 65.35 | 56.85
        comrope-ap, perturbed | 50.14 | 55.63 | 77.47 | 94.37 | 79.27 | 73.56 | 76.66 | 67.68 | 59.34
        comrope-ap | 48.06 | 55.63 | 75.72 | 94.26 | 75.75 | 70.93 | 74.72 | 64.91 | 57.98
        comrope-ld, perturbed | 49.89 | 56.60 | 79.21 | 94.24 | 80.27 | 74.22 | 78.60 | 67.46 | 60.39
        comrope-ld | 48.70 | 56.46 | 78.30 | 94.48 | 79.27 | 74.58 | 76.86 | 66.02 | 57.68
        """,
        ("Encoding", "112", "128", "192", "224", "256", "320", "384", "448", "512"),
        digits=2,
        note="Without intervals. At 320 the paper marks 74.22 as the best although 74.58 is higher. Accuracy increases "
        "from 320 to 384 in every row. In the published code the absolute encoding is part of every variant by "
        "default; it does not distinguish columns of images, but does for these clips.",
    ),
    published(
        "Top-1 by inference size, ImageNet-1k, ViT-S trained at 224",
        f"{ROPE_VIT}, table 5",
        """
        ResFormer-S | 57.8 | 71.4 | 77.0 | 79.6 | 80.8 | 81.4 | 80.7 | 79.3 | 77.7
        absolute (ViT-S) | 35.4 | 69.3 | 76.1 | 79.1 | 80.4 | 80.9 | 79.4 | 77.6 | 75.4
        mixed | 55.7 | 70.6 | 76.6 | 79.6 | 80.9 | 82.0 | 81.8 | 80.9 | 79.1
        learned+mixed | 58.5 | 71.4 | 76.7 | 79.5 | 80.9 | 82.3 | 81.7 | 80.5 | 78.5
        """,
        ("Encoding", "96", "128", "160", "192", "224", "288", "384", "448", "512"),
        note="Without intervals; figures 4 to 6 print no numbers.",
    ),
)


@dataclass(frozen=True)
class Sizes:
    """The input sizes that models are evaluated at.

    Attributes:
        all: Sizes in increasing order.
        trained: The training size, one of them.
        axis: The axis whose size defines the scale, the first other than time.
    """

    all: tuple[Size, ...]
    trained: Size
    axis: int

    @classmethod
    def of(cls, data: DataModule, patch_size: Sequence[int], asked: Sequence[int] = ()) -> "Sizes":
        """Choose sizes of about half to twice the training size along every axis except time, in whole patches.

        Args:
            data: The data, with the training size.
            patch_size: Extent of a patch along each axis.
            asked: Pixels per side of the sizes to use instead.

        Raises:
            ValueError: the patch size does not divide a size, or only the training size is given.
        """
        trained = tuple(data.input_size)
        axis = next((index for index, name in enumerate(data.axes) if name != "time"), 0)
        if not asked:
            return cls(tuple(scaled_sizes(data, patch_size, SCALES)), trained, axis)
        others = {size_of(pixels, data, patch_size, "--sizes") for pixels in asked}
        if others == {trained}:
            raise ValueError(f"--sizes must include one other than the training size, got {trained[-1]}")
        return cls(tuple(sorted({*others, trained})), trained, axis)

    @property
    def others(self) -> tuple[Size, ...]:
        """All sizes except the training size."""
        return tuple(size for size in self.all if size != self.trained)

    @property
    def larger(self) -> tuple[Size, ...]:
        """Sizes above the training size."""
        return tuple(size for size in self.all if size > self.trained)

    @property
    def farthest(self) -> Size:
        """The size of the answer: the largest, or the smallest if none is above the training size."""
        return self.all[-1] if self.larger else self.all[0]

    def scale(self, size: Size) -> float:
        """Return a size as a multiple of the training size."""
        return size[self.axis] / self.trained[self.axis]


@dataclass(frozen=True)
class Change:
    """A modification of an encoding, and the results with and without it.

    Attributes:
        what: Name: "a second stage", "perturbation", "NTK".
        name: The encoding.
        right: With it.
        base: Without it.
    """

    what: str
    name: str
    right: Right
    base: Right


def find(lab: Lab) -> Findings:
    """Evaluate the runs of the accuracy study and modified ones at several sizes."""
    plain, notes = feasible(lab, lab.runs(lab.encodings))
    if not plain:
        return Findings(NONE_POSSIBLE, notes=notes)
    names = list(dict.fromkeys(run.encoding for run in plain))
    patch_size = on_lattice(lab.blueprint(plain[0])).embed.patch_size
    sizes = Sizes.of(lab.data, patch_size, lab.sizes)
    staged, stage_notes = second_stages(lab, names)
    mixed, mixed_notes = mixed_sizes(lab, names, patch_size)
    jittered, jitter_notes = perturbed(lab, names)
    adapted = {run.key: adaptations(lab, run, sizes) for run in plain}
    as_trained: Adaptations = {AS_TRAINED: (unchanged, sizes.all)}
    trained = lab.train(
        [*plain, *staged, *mixed, *jittered],
        lambda run: [
            Measure(_name(key, size, lab.data), partial(_predictions, size=size, adapt=adapt), data=lab.config.data)
            for key, (adapt, at) in adapted.get(run.key, as_trained).items()
            for size in at
        ],
    )
    first, second, across, third = _parts(trained, [len(runs) for runs in (plain, staged, mixed, jittered)])
    right = measured(first, lab, sizes)
    extended, left_out = extensions(first, lab, sizes)
    changes = [
        *_changes("a second stage", measured(second, lab, sizes), right),
        *_changes(MIXED, measured(across, lab, sizes), right),
        *_changes("perturbation", measured(third, lab, sizes), right),
        *(Change(METHODS[how], name, found, right[name]) for (name, how), found in extended.items()),
        *(Change(what, name, found, right[name]) for (name, what), found in rescaled(first, lab, sizes).items()),
        *_changes(GROWN, grown(first, lab, sizes), right),
        *_together(right),
    ]
    effects = _effects(changes)
    return Findings(
        answer=_answer(right, effects, sizes, len(lab.seeds)),
        tables=_tables(right, effects, sizes, how_sized(lab.data, sizes)),
        figures=_figures(right, effects, sizes),
        published=PUBLISHED,
        checks=_checks(first, right, lab, sizes),
        notes=[
            *contradictions(right, effects, sizes),
            *notes,
            *stage_notes,
            *mixed_notes,
            *jitter_notes,
            *left_out,
            *_notes(lab, sizes, effects),
        ],
        advice=_advice(right, changes, sizes, lab),
    )


def second_stages(lab: Lab, names: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Plan runs that continue at a larger size, for a share of the epochs, with a smaller learning rate.

    Args:
        lab: Lab of the study.
        names: Encodings that can be trained.

    Returns:
        The runs, and a note on them or on the reason why there are none.
    """
    data, optim = lab.data, lab.config.optim
    if data.name in LARGER_FIELD:
        return [], [f"No second stage: larger inputs of {data.name} show a larger field, not the same one enlarged."]
    *_, height, width = data.input_size if len(data.input_size) > 1 else (0, 1)
    patch = on_lattice(lab.blueprint(lab.run(names[0]))).embed.patch_size[-1]
    if height != width:
        return [], [f"No second stage: it needs square inputs, got {_key(data.input_size)}."]
    side = patch * max(width // patch + 1, round(STAGE_SCALE * width / patch))
    try:
        make_data(lab.run(names[0], data={"size": side}).config.data)
    except ValueError as error:
        return [], [f"No second stage: {error}."]
    lr = STAGE_LR * optim.lr
    settings: dict[str, Any] = dict(
        data={"size": side},
        model={"input_size": list(lab.config.model.input_size or data.input_size)},
        optim={
            "epochs": max(1, round(STAGE_SHARE * optim.epochs)),
            "lr": lr,
            "min_lr": min(optim.min_lr, lr),
            "warmup_epochs": 0.0,
            "warmup_share": None,
        },
    )
    runs = [
        lab.run(first.encoding, first.seed, **settings, after=first) for first in lab.runs(_chosen(lab, names, STAGED))
    ]
    epochs = settings["optim"]["epochs"]
    duration = f"{epochs} more epoch{'s' if epochs > 1 else ''}"
    note = (
        f"The second stage has {duration} at {side} pixels per side, with {STAGE_LR:g} of the learning rate; positions "
        "continue beyond those of the first stage."
    )
    return runs, [note] if runs else []


def mixed_sizes(lab: Lab, names: Sequence[str], patch_size: Sequence[int]) -> tuple[list[Run], list[str]]:
    """Plan runs that draw one of three sizes at every step: about 0.75, 1 and 1.25 times the training size.

    Args:
        lab: Lab of the study.
        names: Encodings that can be trained.
        patch_size: Extent of a patch along each axis.

    Returns:
        The runs, and a note on them or on the reason why there are none.

    References:
        Tian et al., ResFormer, arXiv:2212.00776, whose batches contain every image at all sizes, with a consistency
        loss between them; a reviewer of LieRE at ICLR 2025 asked for data of varying sizes, and the authors answered
        with a second stage.
    """
    if lab.config.optim.train_sizes:
        return [], ["No comparison with mixed sizes: --optim.train_sizes trains all runs across mixed sizes."]
    if lab.data.axes[-1] == "time":
        return [], ["No training across mixed sizes: the length in time is not changed."]
    patch = patch_size[-1]
    sides = sorted({patch * max(1, round(scale * lab.data.input_size[-1] / patch)) for scale in MIXED_SCALES})
    side_names = [str(side) for side in sides]
    if len(sides) < len(MIXED_SCALES):
        return [], [
            f"No training across mixed sizes: with patches of {patch} the only size is {join_names(side_names)}."
        ]
    runs = lab.runs(_chosen(lab, names, STAGED), optim={"train_sizes": sides})
    note = (
        f"Mixed sizes: every training step draws one of {join_names(side_names)} pixels per side, with the same number "
        "of steps; ResFormer (Tian et al., CVPR 2023) has all sizes in a batch and a loss between them."
    )
    return runs, [note] if runs else []


def perturbed(lab: Lab, names: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Plan runs with positions jittered within their patches in training, as ComRoPE's perturbation of intensity 1."""
    if lab.config.model.backbone == "swin" or lab.config.model.jitter:
        return [], ["No perturbation: it is compared on a ViT with model.jitter 0."]
    rotary = [name for name in _chosen(lab, names, JITTERED) if resolve_encoding(name).rotary is not NoEncoding]
    runs = lab.runs(rotary, model={"jitter": JITTER})
    note = (
        "Perturbation changes the positions of rotary encodings; unlike in ComRoPE, absolute encodings are unperturbed."
    )
    return runs, [note] if runs else []


def unchanged(model: ViT | Swin, _: Size) -> nn.Module:
    """Return the model as it was trained, for any size."""
    return model


def in_windows(model: Swin, size: Size, trained: Size) -> nn.Module:
    """Return a Swin with windows scaled by the input size."""
    return InWindows(model, window_at(model, size, trained))


def adaptations(lab: Lab, run: Run, sizes: Sizes) -> Adaptations:
    """Return how a run of the accuracy study is adapted to which sizes, by the key of its measures."""
    model = on_lattice(lab.blueprint(run))
    adapted: Adaptations = {AS_TRAINED: (unchanged, sizes.all)}
    if isinstance(model, Swin):
        return adapted | {WINDOWS: (partial(in_windows, trained=sizes.trained), sizes.others)}
    for method in methods_for(model, run.encoding):
        adapted[method] = (partial(extended_for, trained=sizes.trained, method=method), sizes.larger)
    if fixed_position_range(model, sizes.trained) is not None:
        adapted[RANGE] = (rescaled_for, sizes.others)
    return adapted


def measured(trained: Sequence[Trained], lab: Lab, sizes: Sizes) -> dict[str, Right]:
    """Return answers at every size, by encoding."""
    return {name: _right(runs, lab, AS_TRAINED, sizes.all) for name, runs in by_encoding(trained).items()}


def extensions(trained: Sequence[Trained], lab: Lab, sizes: Sizes) -> tuple[dict[tuple[str, str], Right], list[str]]:
    """Return answers at the larger sizes with scaled frequencies, by encoding and method, and notes."""
    if lab.config.model.backbone == "swin":
        return {}, ["Scaled frequencies are left out: positions of a Swin are those within a window."]
    found: dict[tuple[str, str], Right] = {}
    notes = []
    for name, runs in by_encoding(trained).items() if sizes.larger else ():
        for method in methods_for(on_lattice(lab.blueprint(runs[0].run)), name):
            try:
                found[name, method] = _right(runs, lab, method, sizes.larger)
            except ValueError as error:
                notes.append(f"{METHODS[method]} of {name} is left out: {error}.")
    if found:
        notes.append(
            "NTK and YaRN need frequencies, which blocks of 2 and STRING have; larger blocks are only interpolated. "
            "YaRN includes its temperature. All methods are without training."
        )
    return found, notes


def rescaled(trained: Sequence[Trained], lab: Lab, sizes: Sizes) -> dict[tuple[str, str], Right]:
    """Return answers at other sizes with positions rescaled to the training range, by encoding and range.

    References:
        Yu et al., ComRoPE, table 3 of the supplement, whose code divides positions by the number of patches.
    """
    found = {}
    for name, runs in by_encoding(trained).items():
        model = lab.blueprint(runs[0].run)
        if isinstance(model, ViT) and (ends := fixed_position_range(model, sizes.trained)) is not None:
            found[name, f"{RESCALED} {ends}"] = _right(runs, lab, RANGE, sizes.others)
    return found


def grown(trained: Sequence[Trained], lab: Lab, sizes: Sizes) -> dict[str, Right]:
    """Return answers at other sizes with a Swin's windows scaled by the input size, by encoding.

    References:
        Heo et al., RoPE-ViT, figures 5 and 6.
    """
    if lab.config.model.backbone != "swin":
        return {}
    return {name: _right(runs, lab, WINDOWS, sizes.others) for name, runs in by_encoding(trained).items()}


def _right(runs: Sequence[Trained], lab: Lab, key: str, sizes: Sequence[Size]) -> Right:
    """Return the answers of runs of one encoding at sizes, with the model adapted to each size.

    Raises:
        ValueError: the model cannot be adapted.
    """
    found = {}
    for size in sizes:
        at = [run.measured(_name(key, size, lab.data)) for run in runs]
        if refused := next((each["refused"] for each in at if "refused" in each), None):
            raise ValueError(refused)
        found[size] = np.stack([np.equal(each["labels"], each["predicted"]).astype(float) for each in at])
    return found


def _name(key: str, size: Size, data: DataModule) -> str:
    return f"{key}-at-{_key(size)}{cache_suffix(data)}"


def _predictions(model: ViT | Swin, data: DataModule, size: Size, adapt: Adapt) -> dict[str, Any]:
    """Return true and predicted classes of the validation set at a size, or the reason why adaptation is impossible."""
    try:
        adapted = adapt(model, size)
    except ValueError as error:
        return {"refused": str(error)}
    labels, logits = predict_at(adapted, data, size)
    return {"labels": labels.tolist(), "predicted": logits.argmax(dim=-1).tolist()}


def _chosen(lab: Lab, names: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Select the trainable default encodings; all, if the user named encodings."""
    return list(names) if lab.config.encodings else [name for name in names if name in usual]


def _parts(trained: list[Trained], lengths: Sequence[int]) -> list[list[Trained]]:
    ends = np.cumsum(lengths).tolist()
    return [trained[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _key(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _shown(size: Size) -> str:
    return " × ".join(map(str, size))


def _changes(what: str, found: Mapping[str, Right], right: Mapping[str, Right]) -> list[Change]:
    return [Change(what, name, each, right[name]) for name, each in found.items()]


def _together(right: dict[str, Right]) -> list[Change]:
    """List the changes by adding an absolute encoding or bias to a rotary encoding, and the reverse."""
    changes = []
    for name, found in right.items():
        absolute, _, rotary = name.partition("+")
        changes += [
            Change(f"{added} added", base, found, right[base])
            for base, added in ((rotary, absolute), (absolute, rotary))
            if rotary and base in right
        ]
    return changes


Effects = dict[tuple[str, str], dict[Size, Interval]]
"""Effect of a change in points, by its name and the encoding, at each size."""


def _effects(changes: Sequence[Change]) -> Effects:
    """Compute paired differences to the encoding without the change, at 5 % over all changes at a size (Holm)."""
    found: Effects = {(change.what, change.name): {} for change in changes}
    for size in dict.fromkeys(size for change in changes for size in change.right):
        at = [change for change in changes if size in change.right]
        intervals = contrasts([(change.right[size], change.base[size]) for change in at])
        for change, interval in zip(at, intervals, strict=True):
            found[change.what, change.name][size] = interval
    return found


def _columns(sizes: Sequence[Size], unit: str) -> list[Column]:
    return [with_interval(f"at{_key(size)}", _shown(size), unit, 1) for size in sizes]


def _cells(size: Size, found: Interval) -> dict[str, float | None]:
    return cells(f"at{_key(size)}", found)


def _top1(right: np.ndarray) -> Interval:
    return in_percent(accuracy_interval(right))


def _tables(right: dict[str, Right], effects: Effects, sizes: Sizes, how: str) -> list[Table]:
    farthest = sizes.farthest
    which = "largest" if sizes.larger else "smallest"
    conclusion = concluded({name: found[farthest] for name, found in right.items()})
    kept = contrasts([(found[farthest], found[sizes.trained]) for found in right.values()])
    rows = []
    for (name, found), lost in sorted(
        zip(right.items(), kept, strict=True), key=lambda row: -row[0][1][farthest].mean()
    ):
        row: dict[str, Any] = {**named(name), **cells("kept", lost), "verdict": verdict(conclusion, name)}
        for size in sizes.all:
            row |= _cells(size, _top1(found[size]))
        rows.append(row)
    columns = [
        *NAMES,
        *_columns(sizes.all, "%"),
        with_interval("kept", f"{which.capitalize()} minus training size", "points", 1),
        VERDICT,
    ]
    note = f"{how} Verdicts are at the {which} size. {which.capitalize()} minus training size: {HOLM}"
    tables = [Table("Top-1 by inference size", columns, rows, note=note)]
    for title in dict.fromkeys(_title(what) for what, _ in effects):
        chosen = {key: found for key, found in effects.items() if _title(key[0]) == title}
        at = [size for size in sizes.all if all(size in found for found in chosen.values())]
        lines = []
        for (what, name), effect in chosen.items():
            line: dict[str, Any] = {**named(name), "what": what, "verdict": verdict_of(effect[farthest])}
            for size in at:
                line |= _cells(size, effect[size])
            lines.append(line)
        columns = [*NAMES, Column("what", "With"), *_columns(at, "points"), VERDICT]
        note = "Paired differences of top-1 to the encoding without it, at 5 % over all changes at a size (Holm)."
        tables.append(Table(title, columns, lines, note=f"{note} Verdicts are at the {which} size."))
    return tables


def _title(what: str) -> str:
    if what.startswith(RESCALED):
        return f"Effect of {what}"
    return "Effect of combining two encodings" if what.endswith(" added") else TITLES.get(what, f"Effect of {what}")


def _figures(right: dict[str, Right], effects: Effects, sizes: Sizes) -> list[Figure]:
    lines = [
        {"name": name, "scale": sizes.scale(size), "size": _shown(size), **cells("top1", _top1(found[size]))}
        for name, found in right.items()
        for size in sizes.all
    ]
    changed = [
        {"name": name, "what": what, "scale": sizes.scale(size), **cells("points", interval)}
        for (what, name), found in effects.items()
        for size, interval in found.items()
    ]
    figures = (
        ("top1-by-size", "Top-1 by inference size", Axis("top1", "Top-1", "%"), lines, None,
         f"All are trained at {_shown(sizes.trained)}, 1 on the axis. Bands are 95 % intervals."),
        ("changes-by-size", "Effect of changes by size", Axis("points", "Change of top-1", "points"), changed, "what",
         "Paired differences to the same encoding without the change; above zero the change improves accuracy."),
    )  # fmt: skip
    return [
        Figure(
            name=name,
            kind="lines",
            title=title,
            alt=f"{title}, {len(sizes.all)} sizes from {_shown(sizes.all[0])} to {_shown(sizes.all[-1])}, one line per "
            "encoding.",
            x=Axis("scale", "Input size over training size", "times"),
            y=y,
            rows=rows,
            series="name",
            panel=panel,
            low=f"{y.key}_low",
            high=f"{y.key}_high",
            caption=caption,
        )
        for name, title, y, rows, panel, caption in figures
        if rows
    ]


def _answer(right: dict[str, Right], effects: Effects, sizes: Sizes, seeds: int) -> str:
    farthest = sizes.farthest
    (best, *others), value = _at_best(right, farthest)
    reached = f"At {_shown(farthest)} ({sizes.scale(farthest):.3g} times the training size) {best} reaches {value}"
    better = {key: found[farthest] for key, found in effects.items() if farthest in found and found[farthest].low > 0}
    clause = ""
    if effects:
        clause = f"; {len(better)} of {len(effects)} changes significantly help"
    if better:
        what, name = max(better, key=lambda key: better[key].estimate)
        clause += f", most {what} for {name}"
    return f"{reached}{tied_with(others)}{clause}.{one_seed(seeds)}"


def _at_best(right: dict[str, Right], size: Size) -> tuple[list[str], str]:
    return at_best({name: found[size] for name, found in right.items()})


def _checks(trained: Sequence[Trained], right: dict[str, Right], lab: Lab, sizes: Sizes) -> list[Check]:
    if lab.data.views > 1:
        return []
    now = np.concatenate([right[name][sizes.trained].ravel() for name in right])
    stored: dict[str, list[np.ndarray]] = {}
    for each in trained:
        stored.setdefault(each.encoding, []).append(each.correct)
    before = np.concatenate([np.concatenate(stored[name]) for name in right])
    changed = int((now != before).sum())
    rule = "At the training size predictions are those at the end of training, up to ties within rounding"
    return [Check(rule, changed <= SAME * len(before), f"{changed} of {len(before)} differ")]


def _advice(right: dict[str, Right], changes: list[Change], sizes: Sizes, lab: Lab) -> list[Advice]:
    if len(right) < 2 or not sizes.larger:
        return []
    largest = sizes.all[-1]
    case = f"Inputs {sizes.scale(largest):.3g} times as large as in training"
    where = f"at {_shown(largest)} on {lab.data.title}, trained at {_shown(sizes.trained)}"
    found = []
    for state, candidates in (
        (", as trained", _alone(right)),
        (", with any change", _alone(right) | _changed(changes)),
    ):
        equals, value = _at_best({name: each for name, (_, each) in candidates.items()}, largest)
        encodings = list(dict.fromkeys(candidates[name][0] for name in equals))
        found.append(Advice(case + state, encodings, f"{equals[0]} reaches {value} {where}"))
    return found if changes else found[:1]


def _alone(right: dict[str, Right]) -> dict[str, tuple[str, Right]]:
    return {name: (name, found) for name, found in right.items()}


def _changed(changes: list[Change]) -> dict[str, tuple[str, Right]]:
    """Map changed encodings by name to the encoding and its results; combinations have names of their own already."""
    alone = [change for change in changes if not change.what.endswith(" added")]
    return {f"{change.name} with {change.what}": (change.name, change.right) for change in alone}


def how_sized(data: DataModule, sizes: Sizes) -> str:
    """Describe in a sentence how inputs of other sizes are made."""
    return f"Trained at {_shown(sizes.trained)}; inputs {HOW_SIZED[data.other_sizes]}."


def contradictions(right: dict[str, Right], effects: Effects, sizes: Sizes) -> list[str]:
    """Write a note for each claim of a paper on larger inputs that these results significantly contradict."""
    if not sizes.larger:
        return []
    return [note for note in (_table_ahead(right, sizes), _rescaling_ahead(effects, sizes)) if note]


def _table_ahead(right: dict[str, Right], sizes: Sizes) -> str:
    """Write a note if a resampled learned table is ahead of rotary encodings at the largest size."""
    largest, table = sizes.farthest, right.get("learned")
    rotary = [name for name in right if "+" not in name and resolve_encoding(name).rotary is not NoEncoding]
    if table is None or not rotary:
        return ""
    gaps = dict(zip(rotary, contrasts([(table[largest], right[name][largest]) for name in rotary]), strict=True))
    behind = [name for name in rotary if gaps[name].low > 0]
    if not behind:
        return ""
    nearest = min(behind, key=lambda name: gaps[name].estimate)
    return (
        f"This contradicts the papers: at {_shown(largest)} learned, a resampled table, is ahead of "
        f"{len(behind)} of {len(rotary)} rotary encodings, of the closest, {nearest}, by {points(gaps[nearest])}. "
        f"{TABLE_IN_PAPERS}"
    )


def _rescaling_ahead(effects: Effects, sizes: Sizes) -> str:
    """Write a note if LieRE or RoPE-Mixed are better at the largest size with positions rescaled to the range."""
    gains: dict[str, Interval] = {}
    for (what, name), found in effects.items():
        is_theirs = name == "mixed" or name.partition(":")[0] == "liere"
        is_rescaling = what.startswith(RESCALED) or what == METHODS["interpolate"]
        if is_theirs and is_rescaling and found[sizes.farthest].low > 0:
            gains.setdefault(name, found[sizes.farthest])
    if not gains:
        return ""
    added = join_names([f"{points(gain)} to {name}" for name, gain in gains.items()])
    return (
        "This contradicts LieRE, section 5.1, where positions beyond the training range are better than "
        f"positions rescaled to a fixed range: at {_shown(sizes.farthest)} rescaling adds {added}."
    )


def _notes(lab: Lab, sizes: Sizes, effects: Effects) -> list[str]:
    notes = [how_sized(lab.data, sizes)]
    if any(what.startswith(RESCALED) for what, _ in effects):
        notes.append(
            "ComRoPE's code rescales positions to a fixed range at every size; here they otherwise exceed the training "
            "range. At larger sizes [0, 1] is interpolation."
        )
    if "time" in lab.data.axes:
        notes.append("The number of frames is unchanged.")
    if lab.data.views > 1:
        notes.append("Other sizes are measured on one view of each example.")
    if lab.config.model.backbone == "swin":
        notes.append("A Swin's windows keep their training size; RoPE-ViT grows windows with the input.")
    return notes


STUDY = Study(
    title="Input size",
    question="Which encodings keep their accuracy at other input sizes than in training, and which methods improve it?",
    sources=(
        f"{LIERE_2}, figure 2",
        f"{LIERE_REVIEWS}, resolutions",
        f"{COMROPE}, table 3",
        f"{ROPE_VIT}, figures 4 to 6 and table 5",
        "Tian et al., ResFormer (CVPR 2023), for training across mixed sizes",
    ),
    find=find,
    needs_lattice=True,
    optional_settings=("sizes",),
    encodings=(
        "none",
        "learned",
        "axial",
        "mixed",
        "learned+axial",
        "learned+mixed",
        "bias",
        "bias+mixed",
        "liere:8",
        "liere",
        "comrope-ld",
    ),
)
