"""Accuracy at other input sizes, and methods to improve it (LieRE fig. 2, ComRoPE table 3, RoPE-ViT figs. 4-6)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from torchrope.encodings import NoEncoding
from torchrope_lab.conclusion import NOT_DIFFERENT, caveat, join_names
from torchrope_lab.data.build import make_data
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.estimates import concluded, verdict, verdict_of
from torchrope_lab.engine.figures import line_figure
from torchrope_lab.engine.long_table import (
    NONE_POSSIBLE,
    SIMULTANEOUS,
    VERDICT,
    Cell,
    Changes,
    Columns,
    RightOrWrong,
    at_levels,
    name_columns,
    not_learned,
    ranking,
    table_of,
    with_interval,
)
from torchrope_lab.engine.other_sizes import (
    GROWN,
    HOW_SIZED,
    METHODS,
    Adaptation,
    Sizes,
    adaptations,
    predict_adapted,
)
from torchrope_lab.engine.runs import Measure, Run, Trained
from torchrope_lab.engine.study import Lab, feasible
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import Axis, Column, Figure, Findings, Table
from torchrope_lab.statistics import constant_accuracy
from torchrope_lab.training.evaluate import cache_suffix, scaled_sizes
from torchrope_lab.training.models import on_lattice
from torchrope_lab.training.sizes import KEPT_AXES, Size, size_name, size_of, size_title

Arm = tuple[str, str]
"""An encoding and a change, the variant of its cells, "" for none."""

SCALES = (0.5, 0.75, 1.25, 1.5, 2.0)
MIXED_SCALES = (0.75, 1.0, 1.25)
STAGE_SCALE = 256 / 224
STAGE_SHARE = 30 / 200  # of the first stage's epochs
STAGE_LR = 0.1  # of the first stage's
LARGER_FIELD = ("motion",)  # larger inputs show more, not the same enlarged
STAGE, MIXED, JITTER, ADDED = "a second stage", "mixed sizes", "perturbation", " added"
TITLES = {
    **dict.fromkeys(METHODS.values(), "Effect of scaled frequencies"),
    MIXED: "Effect of training across mixed sizes",
    GROWN: "Effect of windows that grow with the input",
}
"""Titles of the tables of changes, for changes whose name does not fit into the default title."""


def _sizes_of(lab: Lab, patch_size: Sequence[int]) -> Sizes:
    """Return the sizes of --sizes, or of about half to twice the training size along all axes but time and depth."""
    data, trained = lab.data, tuple(lab.data.input_size)
    axis = next((index for index, name in enumerate(data.axes) if name not in KEPT_AXES), 0)
    if not lab.sizes:
        return Sizes(tuple(scaled_sizes(data, patch_size, SCALES)), trained, axis)
    others = {size_of(pixels, data, patch_size, "--sizes") for pixels in lab.sizes}
    if others == {trained}:
        raise Mistake(f"--sizes must include one other than the training size, got {trained[-1]}")
    return Sizes(tuple(sorted({*others, trained})), trained, axis)


# ---- changes of the training: settings of `Lab.run`, or none and the reason


def _second_stage(lab: Lab, patch: int) -> tuple[dict[str, Any], str]:
    """Continue at a larger size, for a share of the epochs, with a smaller learning rate."""
    data, optim = lab.data, lab.config.optim
    if data.name in LARGER_FIELD:
        return {}, f"No second stage: larger inputs of {data.name} show a larger field, not the same one enlarged."
    *_, height, width = data.input_size if len(data.input_size) > 1 else (0, 1)
    if height != width:
        return {}, f"No second stage: it needs square inputs, got {size_name(data.input_size)}."
    side = patch * max(width // patch + 1, round(STAGE_SCALE * width / patch))
    epochs, lr = max(1, round(STAGE_SHARE * optim.epochs)), STAGE_LR * optim.lr
    settings: dict[str, Any] = dict(
        data={"size": side},
        model={"input_size": list(lab.config.model.input_size or data.input_size)},
        optim=dict(epochs=epochs, lr=lr, min_lr=min(optim.min_lr, lr), warmup_epochs=0.0, warmup_share=None),
    )
    try:
        make_data(lab.run("none", data=settings["data"]).config.data)
    except ValueError as error:
        return {}, f"No second stage: {error}."
    return settings, ""


def _mixed_sizes(lab: Lab, patch: int) -> tuple[dict[str, Any], str]:
    """Draw one of three sizes at every step, as ResFormer; a reviewer of LieRE asked for data of varying sizes."""
    if lab.config.optim.train_sizes:
        return {}, "No comparison with mixed sizes: --optim.train_sizes trains all runs across mixed sizes."
    if lab.data.axes[-1] in KEPT_AXES:
        return {}, f"No training across mixed sizes: the length in {lab.data.axes[-1]} is not changed."
    sides = sorted({patch * max(1, round(scale * lab.data.input_size[-1] / patch)) for scale in MIXED_SCALES})
    if len(sides) < len(MIXED_SCALES):
        only = join_names([str(side) for side in sides])
        return {}, f"No training across mixed sizes: with patches of {patch} the only size is {only}."
    return {"optim": {"train_sizes": sides}}, ""


def _perturbation(lab: Lab, patch: int) -> tuple[dict[str, Any], str]:
    """Jitter positions within their patches in training, as ComRoPE with intensity 1."""
    if lab.config.model.backbone == "swin" or lab.config.model.jitter:
        return {}, "No perturbation: it is compared on a ViT with model.jitter 0."
    return {"model": {"jitter": 1.0}}, ""


STAGED = ("learned", "axial", "mixed", "liere:8", "comrope-ld")
JITTERED = ("mixed", "liere:8", "comrope-ld")
TRAINING_CHANGES = ((STAGE, _second_stage, STAGED), (MIXED, _mixed_sizes, STAGED), (JITTER, _perturbation, JITTERED))
"""Changes of the training: name in tables, settings, and the encodings that it is compared with by default."""


def _plan(lab: Lab, names: Sequence[str], patch: int) -> dict[Arm, list[Run]]:
    """Plan the runs over seeds of each arm, of all encodings if the user named encodings."""
    plan = {(name, ""): lab.runs([name]) for name in names}
    for what, settings_of, usual in TRAINING_CHANGES:
        settings, reason = settings_of(lab, patch)
        if not settings:
            lab.leave_out(reason)
            continue
        chosen = [name for name in names if lab.config.encodings or name in usual]
        chosen = [name for name in chosen if what != JITTER or resolve_encoding(name).rotary is not NoEncoding]
        for name in chosen:
            first = plan[name, ""]
            plan[name, what] = [
                lab.run(name, run.seed, **settings, after=run if what == STAGE else None) for run in first
            ]
    return plan


# ---- results


def find(lab: Lab) -> Findings:
    """Evaluate the runs of the accuracy study, and changed and adapted ones, at several sizes."""
    plain = feasible(lab, lab.runs(lab.encodings))
    if not plain:
        return Findings(NONE_POSSIBLE)
    patch_size = on_lattice(lab.blueprint(plain[0])).embed.patch_size
    sizes = _sizes_of(lab, patch_size)
    plan = _plan(lab, list(dict.fromkeys(run.encoding for run in plain)), patch_size[-1])
    adapted = {arm: _adaptations(lab, arm, runs[0], sizes) for arm, runs in plan.items()}
    measures = {
        run.key: [_measure(lab, adaptation, size) for adaptation in adapted[arm] for size in adaptation.sizes]
        for arm, runs in plan.items()
        for run in runs
    }
    trained = iter(lab.train([run for runs in plan.values() for run in runs], lambda run: measures.get(run.key, ())))
    groups = {arm: [next(trained) for _ in runs] for arm, runs in plan.items()}
    top1 = _evaluate(lab, groups, adapted, sizes)
    effects = top1.changes_by_level({cell: cell._replace(variant="") for cell in top1.values if cell.variant})
    return _findings(lab, top1, effects, sizes)


def _adaptations(lab: Lab, arm: Arm, run: Run, sizes: Sizes) -> list[Adaptation]:
    """List how the runs of an arm are adapted: only those without a change are."""
    name, what = arm
    return adaptations(on_lattice(lab.blueprint(run)), name, sizes)[: 1 if what else None]


def _measure(lab: Lab, adaptation: Adaptation, size: Size) -> Measure:
    """Return the measure of an adapted model's predictions at a size, on the data of the study."""
    name = f"{adaptation.key}-at-{size_name(size)}{cache_suffix(lab.data)}"
    return Measure(name, partial(predict_adapted, size=size, adapt=adaptation.adapt), data=lab.config.data)


def _evaluate(
    lab: Lab, groups: Mapping[Arm, Sequence[Trained]], adapted: Mapping[Arm, Sequence[Adaptation]], sizes: Sizes
) -> RightOrWrong:
    """Collect the answers of the runs of all arms at all sizes, as trained and adapted."""
    answers: dict[Cell, np.ndarray] = {}
    for (name, what), runs in sorted(groups.items(), key=lambda group: not group[0][1]):  # tables in this order
        for adaptation in adapted[name, what]:
            try:
                right = {size: _right(runs, lab, size, adaptation) for size in adaptation.sizes}
            except ValueError as error:
                lab.leave_out(f"{adaptation.what} of {name} is left out: {error}.")
            else:
                answers |= {Cell(name, size_name(size), adaptation.what or what): right[size] for size in right}
    for size in map(size_name, sizes.all):
        for name, what in groups:
            absolute, _, rotary = name.partition("+")
            for base, added in ((rotary, absolute), (absolute, rotary)):
                if rotary and not what and (base, "") in groups:
                    answers[Cell(base, size, f"{added}{ADDED}")] = answers[Cell(name, size)]
    return RightOrWrong(answers)


def _right(runs: Sequence[Trained], lab: Lab, size: Size, adaptation: Adaptation) -> np.ndarray:
    """Return the answers of an encoding's runs at a size; raise ValueError for models that cannot be adapted."""
    measured = [run.measured(_measure(lab, adaptation, size).name) for run in runs]
    if refused := next((found["refused"] for found in measured if "refused" in found), None):
        raise Mistake(refused)
    return np.stack([np.equal(answers["labels"], answers["predicted"]).astype(float) for answers in measured])


# ---- tables and figures


def _findings(lab: Lab, top1: RightOrWrong, effects: Changes, sizes: Sizes) -> Findings:
    """Compare the encodings, and every change with the encoding without it."""
    farthest, trained = size_name(sizes.farthest), size_name(sizes.trained)
    right = {cell: right for cell, right in top1.values.items() if cell.level == farthest and not cell.variant}
    arms = sorted(right, key=lambda cell: -right[cell].mean())
    kept = top1.changes({cell: cell._replace(level=trained) for cell in arms})
    conclusion = concluded({cell.arm: right[cell] for cell in arms}, constant_accuracy(lab.data.val_labels))
    verdicts = {cell: verdict(conclusion, cell.arm) for cell in arms}
    which = "largest" if sizes.larger else "smallest"
    about = f"Verdicts are at the {which} size."
    columns: Columns = (
        *name_columns(),
        *at_levels(top1.interval, {size_name(size): size_title(size) for size in sizes.all}, "%"),
        (with_interval("kept", f"{which.capitalize()} minus training size", "points", 1), kept.get),
        (VERDICT, verdicts.get),
    )
    how = f"Trained at {size_title(sizes.trained)}; inputs {HOW_SIZED[lab.data.other_sizes]}. {about}"
    note = f"{how} {which.capitalize()} minus training size: {SIMULTANEOUS}"
    tables = [table_of("Top-1 by inference size", columns, arms, note)]
    at_farthest = [cell for cell in effects if cell.level == farthest]
    for title, changed in _by_title(at_farthest).items():
        tables.append(_table_of_changes(title, changed, effects, sizes, about))
    where = f"At {size_title(sizes.farthest)} ({sizes.scale(sizes.farthest):.3g} times the training size)"
    best = [cell for cell in arms if cell.arm == conclusion.best]
    tied = dict.fromkeys(map(Cell, conclusion.tied), NOT_DIFFERENT)
    claim = (
        ranking(f"{where} top-1 is highest", {**dict.fromkeys(best, ""), **tied}, top1.interval)
        if best
        else f"{where} {not_learned('the best encoding', conclusion.chance)}"
    )
    return Findings(f"{claim}.{caveat(len(lab.seeds))}", tables, _figures(top1, arms, at_farthest, effects, sizes))


def _table_of_changes(title: str, changed: Sequence[Cell], effects: Changes, sizes: Sizes, about: str) -> Table:
    """Show paired differences of top-1 by size, of cells at the farthest size."""
    shared = [size for size in sizes.all if all(cell._replace(level=size_name(size)) in effects for cell in changed)]
    columns: Columns = (
        *name_columns(),
        (Column("what", "With"), lambda cell: cell.variant),
        *at_levels(effects.get, {size_name(size): size_title(size) for size in shared}, "points"),
        (VERDICT, lambda cell: verdict_of(effects[cell])),
    )
    note = "Paired differences of top-1 to the encoding without it, simultaneous over all changes at a size."
    return table_of(title, columns, changed, f"{note} {about}")


def _by_title(changed: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Group changes by the title of their table."""
    groups: dict[str, list[Cell]] = {}
    for cell in changed:
        what = cell.variant
        title = "Effect of combining two encodings" if what.endswith(ADDED) else f"Effect of {what}"
        groups.setdefault(TITLES.get(what, title), []).append(cell)
    return groups


def _figures(
    top1: RightOrWrong, arms: Sequence[Cell], changed: Sequence[Cell], effects: Changes, sizes: Sizes
) -> list[Figure]:
    scale = Axis("scale", "Input size over training size", "times")
    at_sizes = [(size, size_name(size)) for size in sizes.all]
    reached = [
        (cell.arm, size_title(size), sizes.scale(size), top1.interval(cell._replace(level=level)))
        for cell in arms
        for size, level in at_sizes
    ]
    moved = [
        (cell.arm, cell.variant, sizes.scale(size), effects[cell._replace(level=level)])
        for cell in changed
        for size, level in at_sizes
        if cell._replace(level=level) in effects
    ]
    return [
        line_figure(
            scale,
            Axis("top1", "Top-1", "%"),
            reached,
            panel="size",
            panels=False,
            name="top1-by-size",
            title="Top-1 by inference size",
            caption=f"All are trained at {size_title(sizes.trained)}, 1 on the axis. Bands are 95 % intervals.",
        ),
        line_figure(
            scale,
            Axis("points", "Change of top-1", "points"),
            moved,
            panel="what",
            name="changes-by-size",
            title="Effect of changes by size",
            caption="Paired differences to the same encoding without the change; above zero it improves accuracy.",
        ),
    ]
