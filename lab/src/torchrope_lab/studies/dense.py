"""Semantic segmentation and object detection, also at larger sizes: mIoU and box AP (RoPE-ViT tables 1 to 4)."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torchrope_lab.conclusion import caveat, join_names
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.dense_tasks import TASKS, Task, examples, predictions
from torchrope_lab.engine.drawings import Overlay, legend, picture
from torchrope_lab.engine.estimates import by_encoding, spread, verdict_of
from torchrope_lab.engine.figures import line_figure
from torchrope_lab.engine.long_table import (
    NONE_POSSIBLE,
    SIMULTANEOUS,
    Cell,
    Changes,
    Quantity,
    at_levels,
    name_columns,
    ranking,
    table_of,
)
from torchrope_lab.engine.reference import (
    WITH_SAME,
    all_but,
    described,
    mixed_counterparts,
    with_reference,
)
from torchrope_lab.engine.runs import Measure, Run
from torchrope_lab.engine.study import Lab, feasible
from torchrope_lab.results import Axis, Column, Figure, Findings, Pictures, Table
from torchrope_lab.settings.run_config import TASKS as TASK_OF_HEAD
from torchrope_lab.settings.study_config import LEARNED

MIXED = "RoPE-Mixed"
SCALES = (1.0, 1.5, 2.0)
"""Multiples of the training size, to which images are enlarged."""
TITLES = {scale: f"{scale:g} times" for scale in SCALES}
PICTURED = 2
"""Validation images shown at the training size; one fewer at the largest size."""


class Outcome(NamedTuple):
    """Results of a task."""

    task: Task
    scores: Quantity  # by encoding and multiple of the training size
    measured: dict[str, list[list[dict[str, Any]]]]  # stored results of each run, one per size, by encoding and seed

    def leads(self, others: Mapping[str, str]) -> Changes:
        """Compute scores minus those of other encodings, simultaneous over all encodings at a size."""
        return self.scores.changes_by_level(self.scores.against_arms(others))


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
    tables, leads = [], []
    for outcome in outcomes:
        names = [*outcome.measured]
        leads.append(outcome.leads(all_but(reference, names)))
        of_mixed = {name: other for name, other in mixed_counterparts(names).items() if other != reference}
        tables += [
            _table(outcome),
            _table_of_leads(outcome, described(reference), leads[-1]),
            _table_of_leads(outcome, MIXED, outcome.leads(of_mixed), WITH_SAME),
        ]
    said = []
    for outcome in outcomes:
        claim, verdicts = f"{outcome.task.measure} is highest", outcome.scores.ranks(SCALES[-1])
        said.append(ranking(claim, verdicts, outcome.scores.interval))
    return Findings(
        answer=f"At {TITLES[SCALES[-1]]} the training size {'; '.join(said)}.{caveat(len(lab.seeds))}",
        tables=tables,
        figures=_figures(outcomes, reference, leads),
        pictures=[_pictures(outcome, lab.data) for outcome in outcomes],
    )


def runs_of(lab: Lab, task: Task) -> list[Run]:
    """Plan a run of each encoding and seed, with the configured head if it is for the task, otherwise its default."""
    other = TASK_OF_HEAD[lab.config.model.head] != task.name
    head = {"head": task.head, "head_channels": None, "num_queries": None} if other else {}
    return lab.runs(with_reference(lab, model=head), model=head)


def measured(lab: Lab, plans: Sequence[tuple[Task, Sequence[Run]]]) -> list[Outcome]:
    """Train the runs of each task, and evaluate them at several sizes."""
    at_sizes = "-".join(["at", *(f"{scale:g}" for scale in SCALES), f"{PICTURED}-drawn"])
    measures = {task.name: Measure(f"{task.name}-{at_sizes}", partial(evaluate, task=task)) for task, _ in plans}
    runs = [run for _, of_task in plans for run in of_task]
    trained = iter(lab.train(runs, lambda run: [measures[TASK_OF_HEAD[run.config.model.head]]]))
    outcomes = []
    for task, of_task in plans:
        groups = by_encoding([next(trained) for _ in of_task])
        name = measures[task.name].name
        stored = {encoding: [run.measured(name)["sizes"] for run in group] for encoding, group in groups.items()}
        records = {
            Cell(encoding, scale): [seed[at]["records"] for seed in seeds]
            for encoding, seeds in stored.items()
            for at, scale in enumerate(SCALES)
        }
        outcomes.append(Outcome(task, scores_of(task, records), stored))
    return outcomes


def scores_of(task: Task, records: Mapping[Cell, Sequence[Any]]) -> Quantity:
    """Return a task's measure, in percent, from the records of images of each seed."""
    shown = Column(task.name, task.measure, "%", 1)
    return Quantity(records, shown, lambda seed, weights: task.measure_of(seed)(weights))


def evaluate(model: Any, data: DataModule, *, task: Task) -> dict[str, Any]:
    """Return `{"sizes": [{"records", "overlays"}, ...]}`: records of images at every size, overlays of the first."""
    kept = []
    for scale in SCALES:
        records: list[dict[str, Any]] = []
        overlays: list[Overlay] = []
        for image, target, found in predictions(model, task, data, scale):
            records.append(task.record(found, target))
            if len(overlays) < PICTURED:
                overlays.append(task.overlay(found, image, data))
        kept.append({"records": records, "overlays": overlays})
    return {"sizes": kept}


def _table(outcome: Outcome) -> Table:
    """Build the table of scores by size."""
    task, scores = outcome.task, outcome.scores
    verdicts = {scale: scores.ranks(scale) for scale in (SCALES[0], SCALES[-1])}
    columns = (
        *name_columns(),
        *at_levels(scores.interval, TITLES, "%"),
        (
            Column("spread", "± over seeds", "%", 1),
            lambda cell: spread((100 * scores.estimates[cell].on_all).tolist()),
        ),
        *(_verdict_column(scale, of_size) for scale, of_size in verdicts.items()),
    )
    note = (
        f"{task.about} Trained at {TITLES[SCALES[0]]}. Intervals are 95 % over the validation images. Encodings are "
        "tied if the interval of the difference on the same images, simultaneous over all pairs, contains 0."
    )
    return table_of(f"{task.title}: {task.measure} by size", columns, verdicts[SCALES[0]], note)


def _verdict_column(scale: float, verdicts: Mapping[Cell, str]) -> Any:
    key = "first" if scale == SCALES[0] else "last"
    return Column(key, f"Verdict at {TITLES[scale]}"), lambda cell: verdicts[cell._replace(level=scale)]


def _table_of_leads(outcome: Outcome, other: str, leads: Changes, about: str = "") -> Table:
    """Build the table of leads over another encoding by size."""
    verdicts = {cell: verdict_of(lead) for cell, lead in leads.items()}
    columns = (
        *name_columns(),
        *at_levels(leads.get, TITLES, "points"),
        *(_verdict_column(scale, verdicts) for scale in (SCALES[0], SCALES[-1])),
    )
    rows = [cell for cell in leads if cell.level == SCALES[0]]
    note = f"Differences on the same images. {SIMULTANEOUS} {about}".strip()
    return table_of(f"{outcome.task.title}: {outcome.task.measure} ahead of {other}", columns, rows, note)


def _figures(outcomes: Sequence[Outcome], reference: str, leads: Sequence[Changes]) -> list[Figure]:
    measures, other = join_names([outcome.task.measure for outcome in outcomes]), described(reference)
    scores = [{cell: outcome.scores.interval(cell) for cell in outcome.scores.values} for outcome in outcomes]
    figures = (
        (scores, "measures-by-size", f"{measures} by size", Axis("value", measures, "%"),
         f"All are trained at {TITLES[SCALES[0]]}, 1 on the axis. Bands are 95 % intervals over images."),
        (leads, "ahead-by-size", f"Ahead of {other}", Axis("value", "Ahead", "points"),
         f"Paired differences on the same images; zero is {described(reference, 'the')}."),
    )  # fmt: skip
    scale = Axis("scale", "Size over training size", "times")
    drawn = []
    for intervals, name, title, y, caption in figures:
        points = [
            (cell.arm, f"{outcome.task.title}, {outcome.task.measure}", float(cell.level), interval)
            for outcome, of_task in zip(outcomes, intervals, strict=True)
            for cell, interval in of_task.items()
        ]
        drawn.append(line_figure(scale, y, points, panel="panel", name=name, title=title, caption=caption))
    return drawn


def _pictures(outcome: Outcome, data: DataModule) -> Pictures:
    task, rows = outcome.task, []
    drawn: list[Overlay] = []
    for at, scale in ((0, SCALES[0]), (len(SCALES) - 1, SCALES[-1])):
        shown = PICTURED if at == 0 else PICTURED - 1
        for index, (image, target) in enumerate(islice(examples(data), shown)):
            truth = {key: value for key, value in task.truth(target).items() if key != "scores"}
            overlays = {"truth": task.overlay(truth, image, data)}
            overlays |= {name: Overlay(*seeds[0][at]["overlays"][index]) for name, seeds in outcome.measured.items()}
            drawn += overlays.values()
            panels = {name: overlay.png for name, overlay in overlays.items()}
            rows.append(picture(f"{TITLES[scale]}, {target['name']}", image, panels))
    return Pictures(
        name=f"{task.name}-pictures",
        title=f"{task.title}: ground truth and predictions",
        alt=f"{len(rows)} validation images with the ground truth and the predictions with each encoding.",
        rows=rows,
        caption=f"The first validation images of each size. {task.shown}",
        legend=legend(getattr(data, task.classes), drawn),
    )
