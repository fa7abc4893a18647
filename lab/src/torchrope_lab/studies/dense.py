"""Semantic segmentation and object detection, also at larger sizes: mIoU and box AP (RoPE-ViT tables 1 to 4)."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torchrope_lab.conclusion import NOT_DIFFERENT, Interval, caveat, join_names
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.dense_tasks import TASKS, Task, examples, predictions
from torchrope_lab.engine.drawings import Overlay, legend, picture
from torchrope_lab.engine.estimates import (
    NONE_POSSIBLE,
    OVER_SEEDS,
    SIMULTANEOUS,
    by_encoding,
    in_percent,
    name_columns,
    percent,
    rank,
    simultaneous_intervals,
    spread,
    table_of,
    verdict_of,
    with_interval,
)
from torchrope_lab.engine.figures import line_figure
from torchrope_lab.engine.reference import (
    WITH_SAME,
    all_but,
    described,
    mixed_counterparts,
    with_reference,
)
from torchrope_lab.engine.runs import Measure, Run, Trained
from torchrope_lab.engine.study import Lab, feasible
from torchrope_lab.results import Axis, Column, Figure, Findings, Pictures, Table
from torchrope_lab.settings.run_config import TASKS as TASK_OF_HEAD
from torchrope_lab.settings.study_config import LEARNED
from torchrope_lab.statistics import BootstrapEstimate, draw

Intervals = Mapping[str, Sequence[Interval]]
"""Percentages or their differences in points by encoding, one per size."""

MIXED = "RoPE-Mixed"
SCALES = (1.0, 1.5, 2.0)
PICTURED = 2
"""Validation images shown at the training size; one fewer at the largest size."""


class EvaluationSize(NamedTuple):
    """A size that models are evaluated at: its multiple of the training size, and its title, "1.5 times"."""

    scale: float
    title: str


SIZES = tuple(EvaluationSize(scale, f"{scale:g} times") for scale in SCALES)
"""The training size and larger ones, to which images are enlarged."""


class Outcome(NamedTuple):
    """Results of a task."""

    task: Task
    scores: dict[str, list[BootstrapEstimate]]  # by encoding, one per size
    trained: dict[str, list[Trained]]  # by encoding
    measured: dict[str, list[list[dict[str, Any]]]]  # stored results of each run, one per size, by encoding and seed

    def verdicts(self, size: int) -> dict[str, str]:
        """Return whether each encoding is best, tied or behind at a size, by name, the best first."""
        return rank({name: scores[size] for name, scores in self.scores.items()})

    def best(self, size: int) -> tuple[list[str], str]:
        """Return the best encoding and those tied with it, and the score of the best: "87.5 % [83.6, 90.8]"."""
        names = [name for name, verdict in self.verdicts(size).items() if verdict != "behind"]
        return names, percent(in_percent(self.scores[names[0]][size].interval()))

    def estimates(self, reference: str) -> dict[str, Intervals]:
        """Compute scores, as "", and leads over the reference and over RoPE-Mixed, by what they are compared with."""
        # Leads are at 5 % over all encodings at a size. Those over RoPE-Mixed are of encodings with learned generators.
        of_mixed = {name: other for name, other in mixed_counterparts(self.scores).items() if other != reference}
        at_sizes = [dict(zip(self.scores, scores, strict=True)) for scores in zip(*self.scores.values(), strict=True)]
        estimates: dict[str, Intervals] = {
            "": {name: [in_percent(score.interval()) for score in scores] for name, scores in self.scores.items()}
        }
        for title, others in ((described(reference), all_but(reference, self.scores)), (MIXED, of_mixed)):
            pairs = [(name, other) for name, other in others.items() if other in self.scores]
            leads = [
                simultaneous_intervals({name: scores[name] - scores[other] for name, other in pairs})
                for scores in at_sizes
            ]
            estimates[title] = {name: [in_percent(lead[name]) for lead in leads] for name, _ in pairs}
        return estimates


def find(lab: Lab) -> Findings:
    """Train every encoding with a head for each task of the data, and evaluate at several sizes."""
    tasks = [task for task in TASKS if task.name in lab.data.tasks]
    reference = lab.reference or LEARNED
    possible: list[tuple[Task, Sequence[Run]]] = []
    plans = [(task, runs_of(lab, task)) for task in tasks]  # a bad reference raises before any training
    for task, plan in plans:
        if runs := feasible(lab, plan, f"{task.title}: "):
            possible.append((task, runs))
    if not possible:
        return Findings(NONE_POSSIBLE)
    outcomes = measured(lab, possible)
    estimates = [outcome.estimates(reference) for outcome in outcomes]
    return Findings(
        answer=_answer(outcomes, len(lab.seeds)),
        tables=[
            _table(outcome, other, values)
            for outcome, of_task in zip(outcomes, estimates, strict=True)
            for other, values in of_task.items()
            if values
        ],
        figures=_figures(outcomes, reference, estimates),
        pictures=[_pictures(outcome, lab.data) for outcome in outcomes],
    )


def runs_of(lab: Lab, task: Task) -> list[Run]:
    """Plan a run of each encoding and seed, with the configured head if it is for the task, otherwise its default."""
    other = TASK_OF_HEAD[lab.config.model.head] != task.name
    head = {"head": task.head, "head_channels": None, "num_queries": None} if other else {}
    return lab.runs(with_reference(lab, model=head), model=head)


def measured(lab: Lab, plans: Sequence[tuple[Task, Sequence[Run]]]) -> list[Outcome]:
    """Train the runs of each task, and evaluate them at several sizes."""
    at_sizes = "-".join(["at", *(f"{size.scale:g}" for size in SIZES), f"{PICTURED}-drawn"])
    measures = {task.name: Measure(f"{task.name}-{at_sizes}", partial(evaluate, task=task)) for task, _ in plans}
    runs = [run for _, of_task in plans for run in of_task]
    trained = iter(lab.train(runs, lambda run: [measures[TASK_OF_HEAD[run.config.model.head]]]))
    outcomes = []
    for task, of_task in plans:
        groups = by_encoding([next(trained) for _ in of_task])
        name = measures[task.name].name
        stored = {encoding: [run.measured(name)["sizes"] for run in group] for encoding, group in groups.items()}
        scores = {}
        for encoding, seeds in stored.items():
            records = [[seed[at]["records"] for seed in seeds] for at in range(len(SIZES))]
            scores[encoding] = [draw([task.measure_of(seed) for seed in at], len(at[0])) for at in records]
        outcomes.append(Outcome(task, scores, groups, stored))
    return outcomes


def evaluate(model: Any, data: DataModule, *, task: Task) -> dict[str, Any]:
    """Return `{"sizes": [{"records", "overlays"}, ...]}`: records of images at every size, overlays of the first."""
    kept = []
    for size in SIZES:
        records: list[dict[str, Any]] = []
        overlays: list[Overlay] = []
        for image, target, found in predictions(model, task, data, size.scale):
            records.append(task.record(found, target))
            if len(overlays) < PICTURED:
                overlays.append(task.overlay(found, image, data))
        kept.append({"records": records, "overlays": overlays})
    return {"sizes": kept}


def _table(outcome: Outcome, other: str, values: Intervals) -> Table:
    """Build the table of scores by size, or of leads over another encoding."""
    task, scores = outcome.task, outcome.scores
    ends = {"first": 0, "last": len(SIZES) - 1}
    ranked = {at: outcome.verdicts(at) for at in ends.values()}
    columns: list[Any] = [*name_columns()]
    for at, size in enumerate(SIZES):
        column = with_interval(f"at{at}", size.title, "points" if other else "%", 1)
        columns.append((column, lambda name, at=at: values[name][at]))
    if not other and len(next(iter(scores.values()))[0].on_all) > 1:
        columns.append((OVER_SEEDS, lambda name: spread((100 * scores[name][0].on_all).tolist())))
    for key, at in ends.items():
        verdict = (lambda name, at=at: verdict_of(values[name][at])) if other else ranked[at].get
        columns.append((Column(key, f"Verdict at {SIZES[at].title}"), verdict))
    title = f"{task.title}: {task.measure} {f'ahead of {other}' if other else 'by size'}"
    if other:
        note = f"Differences on the same images. {SIMULTANEOUS}{f' {WITH_SAME}' if other == MIXED else ''}"
        return table_of(title, columns, values, note)
    note = (
        f"{task.about} Trained at {SIZES[0].title}. Intervals are 95 % over the validation images. Encodings are tied "
        "if the interval of the difference on the same images, simultaneous over all pairs, contains 0."
    )
    return table_of(title, columns, ranked[0], note)


def _figures(
    outcomes: Sequence[Outcome],
    reference: str,
    estimates: Sequence[Mapping[str, Intervals]],
) -> list[Figure]:
    measures, other = join_names([outcome.task.measure for outcome in outcomes]), described(reference)
    figures = (
        ("", "measures-by-size", f"{measures} by size", Axis("value", measures, "%"),
         f"All are trained at {SIZES[0].title}, 1 on the axis. Bands are 95 % intervals over images."),
        (other, "ahead-by-size", f"Ahead of {other}", Axis("value", "Ahead", "points"),
         f"Paired differences on the same images; zero is {described(reference, 'the')}."),
    )  # fmt: skip
    scale = Axis("scale", "Size over training size", "times")
    drawn = []
    for key, name, title, y, caption in figures:
        points = [
            (encoding, f"{outcome.task.title}, {outcome.task.measure}", size.scale, interval)
            for outcome, of_task in zip(outcomes, estimates, strict=True)
            for encoding, intervals in of_task[key].items()
            for size, interval in zip(SIZES, intervals, strict=True)
        ]
        drawn.append(line_figure(scale, y, points, panel="panel", name=name, title=title, caption=caption))
    return [figure for figure in drawn if figure.rows]


def _pictures(outcome: Outcome, data: DataModule) -> Pictures:
    task, rows = outcome.task, []
    drawn: list[Overlay] = []
    for at, size in ((0, SIZES[0]), (len(SIZES) - 1, SIZES[-1])):
        shown = PICTURED if at == 0 else PICTURED - 1
        for index, (image, target) in enumerate(islice(examples(data), shown)):
            truth = {key: value for key, value in task.truth(target).items() if key != "scores"}
            overlays = {"truth": task.overlay(truth, image, data)}
            overlays |= {name: Overlay(*seeds[0][at]["overlays"][index]) for name, seeds in outcome.measured.items()}
            drawn += overlays.values()
            panels = {name: overlay.png for name, overlay in overlays.items()}
            rows.append(picture(f"{size.title}, {target['name']}", image, panels))
    return Pictures(
        name=f"{task.name}-pictures",
        title=f"{task.title}: ground truth and predictions",
        alt=f"{len(rows)} validation images with the ground truth and the predictions with each encoding.",
        rows=rows,
        caption=f"The first validation images of each size. {task.shown}",
        legend=legend(getattr(data, task.classes), drawn),
    )


def _answer(outcomes: Sequence[Outcome], seeds: int) -> str:
    clauses = []
    for outcome in outcomes:
        (first, *others), score = outcome.best(-1)
        tied = f" ({len(others)} {NOT_DIFFERENT})" if others else ""
        clauses.append(f"{outcome.task.measure} is highest with {first}, {score}{tied}")
    return f"At {SCALES[-1]:g} times the training size {'; '.join(clauses)}.{caveat(seeds)}"
