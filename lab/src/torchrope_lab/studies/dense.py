"""Semantic segmentation and object detection, also at larger sizes: mIoU and box AP (RoPE-ViT tables 1 to 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np

from torchrope_lab.conclusion import NOT_DIFFERENT, Interval, join_names, one_seed
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.scenes import SIZES, Scenes
from torchrope_lab.results import (
    Advice,
    Axis,
    Box,
    Check,
    Column,
    Figure,
    Findings,
    Panel,
    Pictures,
    Table,
)
from torchrope_lab.statistics import BootstrapEstimate, draw
from torchrope_lab.studies.engine.config import LEARNED
from torchrope_lab.studies.engine.dense_estimates import total
from torchrope_lab.studies.engine.dense_tasks import Detect, Segment, Task, examples, predictions
from torchrope_lab.studies.engine.estimates import (
    HOLM,
    NAMES,
    NONE_POSSIBLE,
    OVER_SEEDS,
    by_encoding,
    cells,
    in_percent,
    named,
    named_holm_intervals,
    percent,
    rank,
    spread,
    verdict_of,
    with_interval,
)
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.pictures import picture
from torchrope_lab.studies.engine.published import ROPE_VIT, published
from torchrope_lab.studies.engine.reference import (
    WITH_SAME,
    all_but,
    check_reference,
    described,
    mixed_counterparts,
    mixed_notes,
)
from torchrope_lab.studies.engine.runs import Measure, Run, Trained
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.training.config import TASKS

SCALES = (1.0, 1.5, 2.0)
PICTURED = 2
"""Validation images shown at the training size; one fewer at the largest size."""
SAME = 0.005
"""Tolerance of measures for rounding."""

PUBLISHED = (
    published(
        "Box AP, MS-COCO, DINO-ViTDet, 12 epochs",
        f"{ROPE_VIT}, table 1",
        """
        ViT-B | 49.4 | 50.8 | 51.2 | 50.7 | 51.1
        ViT-L | 51.1 | 52.2 | 52.9 | 52.5 | 52.8
        """,
        ("Backbone", "learned (APE)", "axial", "mixed", "learned+axial", "learned+mixed"),
        note="Without intervals or number of training runs. The paper attributes the gain to extrapolation in the "
        "layers of global attention; no number here separates that from better pre-training.",
    ),
    published(
        "Box AP, MS-COCO, DINO-Swin, 12 epochs",
        f"{ROPE_VIT}, table 2",
        """
        Swin-T | 51.3 | 51.6 | 51.8 | 51.7 | 51.6
        Swin-S | 53.0 | 53.1 | 53.3 | 53.5 | 53.6
        Swin-B | 54.2 | 54.4 | 54.5 | 54.7 | 54.5
        """,
        ("Backbone", "bias (RPB)", "axial", "mixed", "bias+axial", "bias+mixed"),
        note="Without intervals; most differences are 0.1 to 0.3 points. The text says that the bias has little effect "
        "with mixed, but bias+mixed is the best Swin-S and behind mixed alone on Swin-T.",
    ),
    published(
        "mIoU, ADE20k, UperNet on ViT, 160,000 steps at 512",
        f"{ROPE_VIT}, table 3",
        """
        ViT-B | 47.7 | 49.0 | 49.6 | 49.5 | 50.0
        ViT-B, several scales | 48.4 | 49.9 | 50.7 | 50.5 | 50.9
        ViT-L | 50.8 | 51.8 | 51.5 | 51.6 | 52.0
        ViT-L, several scales | 51.6 | 52.6 | 52.3 | 52.4 | 52.6
        """,
        ("Backbone", "learned (APE)", "axial", "mixed", "learned+axial", "learned+mixed"),
        note="Without intervals. The text calls learned+mixed the best of three variants in all cases: there are four, "
        "and axial ties with it on ViT-L at several scales. The gains of 2.3 and 2.5 that it names are those of ViT-B; "
        "on ViT-L they are 1.2 and 1.0, where axial is ahead of mixed.",
    ),
    published(
        "mIoU, ADE20k, Mask2Former on Swin",
        f"{ROPE_VIT}, table 4",
        """
        Swin-S | 50.2 | 50.4 | 51.1 | 51.2 | 50.9
        Swin-B | 51.5 | 52.0 | 52.0 | 50.0 | 51.4
        """,
        ("Backbone", "bias (RPB)", "axial", "mixed", "bias+axial", "bias+mixed"),
        note="Without intervals. bias+axial is the best Swin-S by 1.0 points and the worst Swin-B by 1.5: with one "
        "training each, variation between training runs is unknown.",
    ),
)


@dataclass(frozen=True)
class EvaluationSize:
    """A size that models are evaluated at.

    Attributes:
        scale: Multiple of the training size.
        title: "96 × 96", or "1.5 times".
        data: Data with the validation images.
        zoom: Factor by which images are enlarged first.
    """

    scale: float
    title: str
    data: DataModule
    zoom: float

    @property
    def trained(self) -> bool:
        """Whether models were trained at this size."""
        return self.scale == 1

    @property
    def where(self) -> str:
        """Phrase within a sentence."""
        return "at the training size" if self.trained else f"at {self.scale:g} times the training size"


@dataclass(frozen=True)
class Outcome:
    """Results of a task.

    Attributes:
        task: The task.
        scores: Scores by encoding, one per size.
        trained: The runs, by encoding.
        measured: Stored results of each run, one per size, by encoding and seed.
    """

    task: Task
    scores: dict[str, list[BootstrapEstimate]]
    trained: dict[str, list[Trained]]
    measured: dict[str, list[list[dict[str, Any]]]]

    def at(self, size: int) -> dict[str, BootstrapEstimate]:
        """Return the scores of all encodings at a size, by its index."""
        return {name: scores[size] for name, scores in self.scores.items()}

    def verdicts(self, size: int) -> dict[str, str]:
        """Return whether each encoding is best, tied or behind, by name, the best first."""
        return rank(self.at(size))

    def best(self, size: int) -> list[str]:
        """Return the best encoding and those tied with it."""
        return [name for name, verdict in self.verdicts(size).items() if verdict != "behind"]

    def written(self, name: str, size: int) -> str:
        """Format the score of an encoding: "87.5 % [83.6, 90.8]"."""
        return percent(in_percent(self.scores[name][size].interval()))


def find(lab: Lab) -> Findings:
    """Train every encoding with a head for each task of the data, and evaluate at several sizes."""
    tasks = [task for task in (Segment(), Detect()) if task.name in lab.data.tasks]
    reference = lab.reference or LEARNED
    if lab.reference:
        for task in tasks:
            check_reference(lab, reference, model=_head_settings(lab, task))
    sizes, notes = sizes_of(lab.data), []
    outcomes = []
    for task in tasks:
        runs, left_out = feasible(lab, runs_of(lab, task))
        notes += [f"{task.title}: {note}" for note in left_out]
        if runs:
            outcomes.append(measured(lab, runs, task, sizes))
    if not outcomes:
        return Findings(NONE_POSSIBLE, notes=notes)
    return Findings(
        answer=_answer(outcomes, sizes[-1], len(lab.seeds)),
        tables=[table for outcome in outcomes for table in _tables(outcome, sizes, reference, len(lab.seeds))],
        figures=_figures(outcomes, sizes, reference),
        pictures=[_pictures(outcome, sizes) for outcome in outcomes],
        published=PUBLISHED,
        checks=[check for outcome in outcomes for check in _checks(outcome, sizes)],
        notes=[*notes, *_mixed_notes(outcomes, reference), *_notes(lab, outcomes)],
        advice=[advice for outcome in outcomes for advice in _advice(outcome, sizes, lab)],
    )


def runs_of(lab: Lab, task: Task) -> list[Run]:
    """Plan a run of each encoding and seed, with the configured head if it is for the task, otherwise its default."""
    names = dict.fromkeys([*lab.encodings, *([lab.reference] if lab.reference else [])])
    return lab.runs(list(names), model=_head_settings(lab, task))


def _head_settings(lab: Lab, task: Task) -> dict[str, Any]:
    """Return the model settings that select the head of a task."""
    return {} if TASKS[lab.config.model.head] == task.name else {"head": task.head, "num_queries": None}


@lru_cache(maxsize=1)
def sizes_of(data: DataModule) -> list[EvaluationSize]:
    """Return the training size and larger ones: for scenes larger canvases with more digits, else enlarged images."""
    if not isinstance(data, Scenes):
        return [EvaluationSize(scale, f"{scale:g} times", data, scale) for scale in SCALES]
    found = []
    for scale in SCALES:
        side = round(scale * data.input_size[0])
        if side <= SIZES[1]:
            larger = data if scale == 1 else data.at_size(side)
            larger.setup()
            found.append(EvaluationSize(scale, f"{side} × {side}", larger, 1.0))
    return found


def measured(lab: Lab, runs: Sequence[Run], task: Task, sizes: Sequence[EvaluationSize]) -> Outcome:
    """Train runs, and evaluate them at several sizes."""
    name = "-".join([task.name, "at", *(f"{size.scale:g}" for size in sizes), str(PICTURED)])
    measure = Measure(name, partial(evaluate, task=task))
    groups = by_encoding(lab.train(runs, lambda _: [measure]))
    found = {encoding: [each.measured(name)["sizes"] for each in group] for encoding, group in groups.items()}
    scores = {encoding: [_score(task, seeds, at) for at in range(len(sizes))] for encoding, seeds in found.items()}
    return Outcome(task, scores, groups, found)


def _score(task: Task, seeds: Sequence[Sequence[dict[str, Any]]], at: int) -> BootstrapEstimate:
    kept = [seed[at]["records"] for seed in seeds]
    return draw([task.measure_of(records) for records in kept], len(kept[0]))


def evaluate(model: Any, data: DataModule, *, task: Task) -> dict[str, Any]:
    """Compute per-image records of a model's predictions at every size, and panels of the first images.

    Returns:
        `{"sizes": [{"records": ..., "panels": ...}, ...]}`, one per size.
    """
    kept = []
    for size in sizes_of(data):
        records: list[dict[str, Any]] = []
        panels: list[dict[str, Any]] = []
        for image, target, found in predictions(model, task, size.data, size.zoom):
            records.append(task.record(found, target))
            if len(panels) < PICTURED:
                panels.append(asdict(task.panel("", image, found, size.data)))
        kept.append({"records": records, "panels": panels})
    return {"sizes": kept}


def _columns(sizes: Sequence[EvaluationSize], unit: str) -> list[Column]:
    return [with_interval(f"at{at}", size.title, unit, 1) for at, size in enumerate(sizes)]


def _at(found: Sequence[Interval]) -> dict[str, float | None]:
    """Return the cells of `_columns`."""
    return {key: value for at, each in enumerate(found) for key, value in cells(f"at{at}", in_percent(each)).items()}


def _tables(outcome: Outcome, sizes: Sequence[EvaluationSize], reference: str, seeds: int) -> list[Table]:
    task, last = outcome.task, len(sizes) - 1
    at_first, at_last = outcome.verdicts(0), outcome.verdicts(last)
    rows = []
    for name, scores in ((name, outcome.scores[name]) for name in at_first):
        deviation = spread((100 * scores[0].on_all).tolist())
        measures = _at([each.interval() for each in scores])
        rows.append({**named(name), **measures, "spread": deviation, "first": at_first[name], "last": at_last[name]})
    verdicts = [Column("first", f"Verdict at {sizes[0].title}")]
    verdicts += [Column("last", f"Verdict at {sizes[last].title}")] if last else []
    over = [OVER_SEEDS] if seeds > 1 else []
    tables = [
        Table(
            f"{task.title}: {task.measure} by size",
            [*NAMES, *_columns(sizes, "%"), *over, *verdicts],
            rows,
            note=f"Trained at {sizes[0].title}. Intervals are 95 % over the validation images. Encodings are tied "
            "if the interval of the difference on the same images contains 0, at 5 % over all pairs (Holm).",
        )
    ]
    comparisons = (
        (described(reference), _ahead(outcome, all_but(reference, outcome.scores)), ""),
        ("RoPE-Mixed", _ahead_of_mixed(outcome, reference), f" {WITH_SAME}"),
    )
    for other, ahead, note in comparisons:
        lines = [
            {**named(name), **_at(found), "first": verdict_of(found[0]), "last": verdict_of(found[last])}
            for name, found in ahead.items()
        ]
        title = f"{task.title}: {task.measure} ahead of {other}"
        columns = [*NAMES, *_columns(sizes, "points"), *verdicts]
        if lines:
            tables.append(Table(title, columns, lines, note=f"Differences on the same images. {HOLM}{note}"))
    return tables


def _ahead(outcome: Outcome, others: Mapping[str, str]) -> dict[str, list[Interval]]:
    """Compute the lead of encodings over their counterparts at each size, at 5 % over all encodings at a size."""
    scores = outcome.scores
    pairs = {name: other for name, other in others.items() if other in scores}
    at_sizes = [
        named_holm_intervals({name: (scores[name][at] - scores[other][at]).interval for name, other in pairs.items()})
        for at in range(len(next(iter(scores.values()))))
    ]
    return {name: [found[name] for found in at_sizes] for name in pairs}


def _ahead_of_mixed(outcome: Outcome, reference: str) -> dict[str, list[Interval]]:
    """Compute the lead of encodings that learn more than frequencies over RoPE-Mixed, unless it is the reference."""
    pairs = {name: other for name, other in mixed_counterparts(outcome.scores).items() if other != reference}
    return _ahead(outcome, pairs)


def _mixed_notes(outcomes: Sequence[Outcome], reference: str) -> list[str]:
    ahead = [_ahead_of_mixed(outcome, reference) for outcome in outcomes]
    return mixed_notes([interval for of_task in ahead for found in of_task.values() for interval in found])


def _figures(outcomes: Sequence[Outcome], sizes: Sequence[EvaluationSize], reference: str) -> list[Figure]:
    reached, ahead = (
        [
            {"name": name, "panel": f"{outcome.task.title}, {outcome.task.measure}", "scale": size.scale,
             "size": size.title, **cells("value", in_percent(interval))}
            for outcome in outcomes
            for name, found in of(outcome).items()
            for size, interval in zip(sizes, found, strict=True)
        ]
        for of in (_reached, lambda outcome: _ahead(outcome, all_but(reference, outcome.scores)))
    )  # fmt: skip
    measures = join_names([outcome.task.measure for outcome in outcomes])
    figures = (
        ("measures-by-size", f"{measures} by size", Axis("value", measures, "%"), reached,
         f"All are trained at {sizes[0].title}, 1 on the axis. Bands are 95 % intervals over images."),
        ("ahead-by-size", f"Ahead of {described(reference)}", Axis("value", "Ahead", "points"), ahead,
         f"Paired differences on the same images; zero is {described(reference, 'the')}."),
    )  # fmt: skip
    return [
        Figure(
            name=name,
            kind="lines",
            title=title,
            alt=f"{title}: {measures} at {len(sizes)} sizes, one line per encoding.",
            x=Axis("scale", "Size over training size", "times"),
            y=y,
            rows=rows,
            series="name",
            panel="panel",
            low="value_low",
            high="value_high",
            caption=caption,
        )
        for name, title, y, rows, caption in figures
        if rows
    ]


def _reached(outcome: Outcome) -> dict[str, list[Interval]]:
    """Return the score of every encoding at each size."""
    return {name: [each.interval() for each in scores] for name, scores in outcome.scores.items()}


def _pictures(outcome: Outcome, sizes: Sequence[EvaluationSize]) -> Pictures:
    task, rows = outcome.task, []
    for at, size in ((0, sizes[0]), (len(sizes) - 1, sizes[-1])):
        shown = PICTURED if at == 0 else PICTURED - 1
        for index, (image, target) in enumerate(islice(examples(size.data), shown)):
            truth = task.panel("truth", image, task.truth(target), size.data)
            panels = [replace(truth, boxes=[replace(box, score=None) for box in truth.boxes])]
            panels += [_stored(name, seeds[0][at]["panels"][index]) for name, seeds in outcome.measured.items()]
            rows.append(picture(f"{size.title}, {target['name']}", image, panels))
    return Pictures(
        name=f"{task.name}-pictures",
        title=f"{task.title}: ground truth and predictions",
        alt=f"{len(rows)} validation images with the ground truth and the predictions with each encoding.",
        classes=list(task.classes(sizes[0].data)),
        rows=rows,
        caption=f"The first validation images of each size. {task.shown}",
    )


def _stored(name: str, stored: Mapping[str, Any]) -> Panel:
    return Panel(name, [Box(**box) for box in stored["boxes"]], stored["map"])


def _answer(outcomes: Sequence[Outcome], size: EvaluationSize, seeds: int) -> str:
    clauses = []
    for outcome in outcomes:
        first, *others = outcome.best(-1)
        tied = f" ({len(others)} {NOT_DIFFERENT})" if others else ""
        clauses.append(f"{outcome.task.measure} is highest with {first}, {outcome.written(first, -1)}{tied}")
    where = size.where
    return f"{where[0].upper()}{where[1:]} {'; '.join(clauses)}.{one_seed(seeds)}"


def _checks(outcome: Outcome, sizes: Sequence[EvaluationSize]) -> list[Check]:
    checks = [_check_ground_truth(outcome.task, sizes[0].data), _check_against_training(outcome)]
    return [*checks, _check_pixel_totals(outcome)] if outcome.task.name == "segment" else checks


def _check_ground_truth(task: Task, data: DataModule) -> Check:
    records = [task.record(task.truth(target), target) for _, target in examples(data)]
    reached = task.measure_of(records)(np.ones((1, len(records))))
    rule = f"{task.title}: the ground truth as prediction has a {task.measure} of 100"
    return Check(rule, abs(float(reached[0]) - 1) <= SAME, f"{100 * reached[0]:.2f} on {len(records)} images")


def _check_against_training(outcome: Outcome) -> Check:
    far = max(
        abs(float(reached) - each.curve[-1][outcome.task.curve])
        for name, runs in outcome.trained.items()
        for reached, each in zip(outcome.scores[name][0].on_all, runs, strict=True)
    )
    rule = f"{outcome.task.title}: {outcome.task.measure} from per-image records equals that at the end of training"
    return Check(rule, far <= SAME, f"at most {100 * far:.2f} points apart")


def _check_pixel_totals(outcome: Outcome) -> Check:
    counts = [total(at["records"]) for seeds in outcome.measured.values() for seed in seeds for at in seed]
    wrong = sum(predicted != true for predicted, true in counts)
    rule = f"{outcome.task.title}: over all classes predicted and true pixels are equally many"
    return Check(rule, not wrong, f"{sum(true for _, true in counts):,} pixels, {wrong} of {len(counts)} counts differ")


def _notes(lab: Lab, outcomes: Sequence[Outcome]) -> list[str]:
    notes = [outcome.task.about for outcome in outcomes]
    heads = {outcome.task.name: next(iter(outcome.trained.values()))[0].run.config.model.head for outcome in outcomes}
    notes.append("Backbones are randomly initialised; the paper's were pretrained on ImageNet-1k.")
    if "detect" in heads:
        notes.append(
            f"The detector is {heads['detect']}; the paper's is DINO, whose ViT attends within windows in most layers. "
            "Here all layers attend to the whole image unless a window is set."
        )
    if "segment" in heads:
        notes.append(f"The segmenter is {heads['segment']}. Evaluation at several scales at once is left out.")
    if isinstance(lab.data, Scenes):
        notes.append(
            "A larger canvas contains more digits of the same sizes; in the paper larger images show larger objects. "
            "Each size has different scenes, so that values at different sizes cannot be compared."
        )
    else:
        notes.append("Images are enlarged for larger sizes, and predictions are resampled to their own pixels.")
    return notes


def _advice(outcome: Outcome, sizes: Sequence[EvaluationSize], lab: Lab) -> list[Advice]:
    if len(outcome.scores) < 2:
        return []
    found = []
    for at in sorted({0, len(sizes) - 1}):
        names = outcome.best(at)
        reached = f"{names[0]} reaches {outcome.written(names[0], at)} {outcome.task.measure} at {sizes[at].title}"
        found.append(Advice(f"{outcome.task.title} {sizes[at].where}", names, f"{reached} on {lab.data.title}"))
    return found


STUDY = Study(
    title="Segmentation and detection",
    question="Which encoding is best for segmentation and detection, also on images larger than in training?",
    sources=tuple(f"{ROPE_VIT}, table {number}" for number in (1, 2, 3, 4)),
    find=find,
    tasks=("segment", "detect"),
    encodings=("learned", "bias", "axial", "mixed", "learned+axial", "learned+mixed", "liere:8", "comrope-ld"),
    optional_settings=("reference",),
)
