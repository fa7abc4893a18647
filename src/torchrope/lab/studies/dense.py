"""Segmentation and detection, also at sizes not trained on: mIoU and box AP (RoPE-ViT tables 1 to 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.scenes import SIZES, Scenes
from torchrope.lab.results import (
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
from torchrope.lab.studies.engine.dense_estimates import DRAWS, Score, ranked, score, total
from torchrope.lab.studies.engine.dense_tasks import Detect, Segment, Task, examples, predictions
from torchrope.lab.studies.engine.estimates import OVER_SEEDS, by_encoding, caveat, not_told_apart, percent, told
from torchrope.lab.studies.engine.feasible import feasible
from torchrope.lab.studies.engine.grid import named
from torchrope.lab.studies.engine.pictures import picture
from torchrope.lab.studies.engine.published import ROPE_VIT, published
from torchrope.lab.studies.engine.runs import Run, Trained
from torchrope.lab.studies.engine.study import Lab, Study
from torchrope.lab.training.config import TASKS

SCALES = (1.0, 1.5, 2.0)
REFERENCE = "learned"
PICTURED = 2
"""Validation images shown at the size trained on; one fewer at the largest size."""
SAME = 0.005
"""What rounding may change in a measure."""

PUBLISHED = (
    published(
        "Box AP, MS-COCO, DINO-ViTDet, 12 epochs",
        f"{ROPE_VIT}, table 1",
        """
        ViT-B | 49.4 | 50.8 | 51.2 | 50.7 | 51.1
        ViT-L | 51.1 | 52.2 | 52.9 | 52.5 | 52.8
        """,
        ("Backbone", "learned (APE)", "axial", "mixed", "learned+axial", "learned+mixed"),
        note="Without intervals or number of trainings. The gain is put down to extrapolation in the layers of global "
        "attention, which no number here separates from the better pre-training.",
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
        note="Without intervals; most differences are 0.1 to 0.3 points. The text has it that the bias does little "
        "beside mixed, but bias+mixed is the best Swin-S and loses to mixed alone on Swin-T.",
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
        "on ViT-L they are 1.2 and 1.0, and axial is ahead of mixed there.",
    ),
    published(
        "mIoU, ADE20k, Mask2Former on Swin",
        f"{ROPE_VIT}, table 4",
        """
        Swin-S | 50.2 | 50.4 | 51.1 | 51.2 | 50.9
        Swin-B | 51.5 | 52.0 | 52.0 | 50.0 | 51.4
        """,
        ("Backbone", "bias (RPB)", "axial", "mixed", "bias+axial", "bias+mixed"),
        note="Without intervals. bias+axial is the best Swin-S by 1.0 points and the worst Swin-B by 1.5: one training "
        "each leaves open how much of any cell is luck.",
    ),
)


@dataclass(frozen=True)
class Place:
    """A size that models are evaluated at.

    Attributes:
        scale: Over that of the training.
        title: "96 × 96", or "1.5 times".
        data: Whose validation images are looked at.
        zoom: How much larger they are made first.
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
        """Within a sentence."""
        return "at the size trained on" if self.trained else f"at {self.scale:g} times the size trained on"


@dataclass(frozen=True)
class Outcome:
    """What came out of a task.

    Attributes:
        task: The task.
        scores: By encoding, one a place.
        trained: The runs, by encoding.
        measured: What was measured of each run, one a place, by encoding and seed.
    """

    task: Task
    scores: dict[str, list[Score]]
    trained: dict[str, list[Trained]]
    measured: dict[str, list[list[dict[str, Any]]]]

    def at(self, place: int) -> list[Score]:
        """Of all encodings at a place, by its number."""
        return [scores[place] for scores in self.scores.values()]

    def verdicts(self, place: int) -> dict[str, str]:
        """Whether each encoding is the best, tied or behind, by name, the best first."""
        return {each.name: verdict for each, verdict in ranked(self.at(place))}

    def best(self, place: int) -> list[Score]:
        """The best, and those not told apart from it."""
        return [each for each, verdict in ranked(self.at(place)) if verdict != "behind"]


def find(lab: Lab) -> Findings:
    """Train every encoding below a head for each task that the data has, and evaluate at several sizes."""
    tasks = [task for task in (Segment(), Detect()) if task.name in lab.data.tasks]
    sizes, notes = places(lab.data), []
    outcomes = []
    for task in tasks:
        runs, left_out = feasible(lab, runs_of(lab, task))
        notes += [f"{task.title}: {note}" for note in left_out]
        if runs:
            outcomes.append(measured(lab.train(runs), task, sizes))
    if not outcomes:
        return Findings("No encoding named can be trained here.", notes=notes)
    return Findings(
        answer=" ".join(_answer(outcome, sizes) for outcome in outcomes) + caveat(len(lab.seeds)),
        tables=[table for outcome in outcomes for table in _tables(outcome, sizes, len(lab.seeds))],
        figures=_figures(outcomes, sizes),
        pictures=[_pictures(outcome, sizes) for outcome in outcomes],
        published=PUBLISHED,
        checks=[check for outcome in outcomes for check in _checks(outcome, sizes)],
        notes=[*notes, *_notes(lab, outcomes)],
        advice=[advice for outcome in outcomes for advice in _advice(outcome, sizes, lab)],
    )


def runs_of(lab: Lab, task: Task) -> list[Run]:
    """A run of each encoding and seed below the head that the user names for a task, or the task's own."""
    asked = lab.config.model.head
    own = {} if TASKS[asked] == task.name else {"head": task.head, "num_queries": None}
    return lab.runs(lab.encodings, model=own)


def places(data: DataModule) -> list[Place]:
    """The size trained on and larger ones: larger canvases with more on them, of other data its images enlarged."""
    if not isinstance(data, Scenes):
        return [Place(scale, f"{scale:g} times", data, scale) for scale in SCALES]
    found = []
    for scale in SCALES:
        side = round(scale * data.input_size[0])
        if side <= SIZES[1]:
            there = data if scale == 1 else data.at_size(side)
            there.setup()
            found.append(Place(scale, f"{side} × {side}", there, 1.0))
    return found


def measured(trained: Sequence[Trained], task: Task, sizes: Sequence[Place]) -> Outcome:
    """Evaluate runs at several sizes."""
    name = "-".join([task.name, *(f"{place.scale:g}" for place in sizes), str(PICTURED)])
    groups = by_encoding(trained)
    found = {
        encoding: [each.measure(name, partial(evaluate, task=task, sizes=sizes))["places"] for each in runs]
        for encoding, runs in groups.items()
    }
    scores = {
        encoding: [_score(encoding, task, seeds, at) for at in range(len(sizes))] for encoding, seeds in found.items()
    }
    return Outcome(task, scores, groups, found)


def _score(encoding: str, task: Task, seeds: Sequence[Sequence[dict[str, Any]]], at: int) -> Score:
    kept = [seed[at]["records"] for seed in seeds]
    return score(encoding, task.measure, [task.weigh(records) for records in kept], len(kept[0]))


def evaluate(model: Any, _: DataModule, *, task: Task, sizes: Sequence[Place]) -> dict[str, Any]:
    """What is kept of a model's predictions at every size, and what is shown of the first ones.

    Returns:
        `{"places": [{"records": ..., "panels": ...}, ...]}`, one a size.
    """
    kept = []
    for place in sizes:
        records: list[dict[str, Any]] = []
        panels: list[dict[str, Any]] = []
        for image, target, found in predictions(model, task, place.data, place.zoom):
            records.append(task.record(found, target))
            if len(panels) < PICTURED:
                panels.append(asdict(task.panel("", image, found, place.data)))
        kept.append({"records": records, "panels": panels})
    return {"places": kept}


def _cells(place: int, value: float, low: float, high: float) -> dict[str, float]:
    return {f"at{place}": value, f"low{place}": low, f"high{place}": high}


def _columns(sizes: Sequence[Place], unit: str) -> list[Column]:
    return [Column(f"at{at}", place.title, unit, 1, low=f"low{at}", high=f"high{at}") for at, place in enumerate(sizes)]


def _in_percent(of: Score) -> tuple[float, float, float]:
    low, high = of.interval
    return 100 * of.mean, 100 * low, 100 * high


def _tables(outcome: Outcome, sizes: Sequence[Place], seeds: int) -> list[Table]:
    task, last = outcome.task, len(sizes) - 1
    at_first, at_last = outcome.verdicts(0), outcome.verdicts(last)
    rows = []
    for name in at_first:
        row: dict[str, Any] = {**named(name), "first": at_first[name], "last": at_last[name]}
        for at, of in enumerate(outcome.scores[name]):
            row |= _cells(at, *_in_percent(of))
        deviation = outcome.scores[name][0].spread
        rows.append({**row, "spread": None if deviation is None else 100 * deviation})
    names = [Column("encoding", "Encoding"), Column("name", "Name")]
    verdicts = [Column("first", f"Verdict at {sizes[0].title}")]
    verdicts += [Column("last", f"Verdict at {sizes[last].title}")] if last else []
    over = [OVER_SEEDS] if seeds > 1 else []
    tables = [
        Table(
            f"{task.title}: {task.measure} by size",
            [*names, *_columns(sizes, "%"), *over, *verdicts],
            rows,
            note=f"Trained at {sizes[0].title}. Intervals hold 95 % of {DRAWS:,} bootstrap resamples of the validation "
            "images. An encoding is tied with the best where the interval of the difference on the same images holds "
            f"0, at 5 % over all pairs of encodings.",
        )
    ]
    ahead = _ahead(outcome)
    if ahead:
        lines = []
        for name, contrasts in ahead.items():
            line: dict[str, Any] = {**named(name), "first": contrasts[0].verdict, "last": contrasts[last].verdict}
            for at, found in enumerate(contrasts):
                line |= _cells(at, found.value, found.low, found.high)
            lines.append(line)
        tables.append(
            Table(
                f"{task.title}: {task.measure} ahead of a learned absolute encoding",
                [*names, *_columns(sizes, "points"), *verdicts],
                lines,
                note="Differences on the same images of the same draws. Each interval holds 95 % on its own.",
            )
        )
    return tables


def _ahead(outcome: Outcome) -> dict[str, list[Any]]:
    """How far every encoding is ahead of a learned absolute one, one contrast a place."""
    base = outcome.scores.get(REFERENCE)
    if base is None:
        return {}
    return {
        name: [mine.against(theirs) for mine, theirs in zip(scores, base, strict=True)]
        for name, scores in outcome.scores.items()
        if name != REFERENCE
    }


def _figures(outcomes: Sequence[Outcome], sizes: Sequence[Place]) -> list[Figure]:
    rows: list[dict[str, Any]] = []
    leads: list[dict[str, Any]] = []
    for outcome in outcomes:
        panel = f"{outcome.task.title}, {outcome.task.measure}"
        for name, scores in outcome.scores.items():
            for place, of in zip(sizes, scores, strict=True):
                value, low, high = _in_percent(of)
                rows.append({"name": name, "panel": panel, "scale": place.scale, "size": place.title, "value": value,
                             "low": low, "high": high})  # fmt: skip
        for name, contrasts in _ahead(outcome).items():
            for place, found in zip(sizes, contrasts, strict=True):
                leads.append({"name": name, "panel": panel, "scale": place.scale, "size": place.title,
                              "value": found.value, "low": found.low, "high": found.high})  # fmt: skip
    x = Axis("scale", "Size over that of the training", "times")
    measures = told([outcome.task.measure for outcome in outcomes])
    count = len({row["name"] for row in rows})
    same = dict(kind="lines", x=x, series="name", panel="panel", low="low", high="high")
    figures = [
        Figure(
            name="measures-by-size",
            title=f"{measures} by size",
            alt=f"{measures} in percent at {told([place.title for place in sizes])}, one line for each of {count} "
            "encodings.",
            y=Axis("value", measures, "%"),
            rows=rows,
            caption=f"All are trained at {sizes[0].title}, 1 on the axis. Bands are 95 % intervals over images.",
            **same,  # type: ignore[arg-type]
        )
    ]
    if leads:
        figures.append(
            Figure(
                name="ahead-by-size",
                title="Ahead of a learned absolute encoding",
                alt=f"Points of {measures} ahead of a learned absolute encoding at each size, one line an encoding.",
                y=Axis("value", "Ahead", "points"),
                rows=leads,
                caption="Paired differences on the same images, with 95 % intervals; zero is the learned encoding.",
                **same,  # type: ignore[arg-type]
            )
        )
    return figures


def _pictures(outcome: Outcome, sizes: Sequence[Place]) -> Pictures:
    task, rows = outcome.task, []
    for at, place in ((0, sizes[0]), (len(sizes) - 1, sizes[-1])):
        shown = PICTURED if at == 0 else PICTURED - 1
        for index, (image, target) in enumerate(islice(examples(place.data), shown)):
            truth = task.panel("truth", image, task.truth(target), place.data)
            panels = [replace(truth, boxes=[replace(box, score=None) for box in truth.boxes])]
            panels += [_stored(name, seeds[0][at]["panels"][index]) for name, seeds in outcome.measured.items()]
            rows.append(picture(f"{place.title}, {target['name']}", image, panels))
    return Pictures(
        name=f"{task.name}-pictures",
        title=f"{task.title}: what is there, and what is predicted",
        alt=f"{len(rows)} validation images with what is true and what {told(list(outcome.scores))} predict on each.",
        classes=list(task.classes(sizes[0].data)),
        rows=rows,
        caption=f"The first validation images of each size, whatever came out. {task.shown}",
    )


def _stored(name: str, stored: Mapping[str, Any]) -> Panel:
    return Panel(name, [Box(**box) for box in stored["boxes"]], stored["map"])


def _answer(outcome: Outcome, sizes: Sequence[Place]) -> str:
    sentences = [_sentence(outcome, at, place) for at, place in enumerate(sizes) if at in (0, len(sizes) - 1)]
    return f"{outcome.task.title}: {' '.join(sentence[0].upper() + sentence[1:] for sentence in sentences)}"


def _sentence(outcome: Outcome, at: int, place: Place) -> str:
    first, *others = outcome.best(at)
    reached = f"{place.where} {first.name} reaches {percent(*_in_percent(first))} {outcome.task.measure}"
    apart = f"; {told([each.name for each in others])} cannot be told apart from it" if others else ""
    base = outcome.scores.get(REFERENCE)
    if base is None or first.name == REFERENCE:
        lead = ""
    else:
        found = first.against(base[at])
        measurably = "" if found.verdict == "better" else ", not measurably"
        lead = f"; it is {found} ahead of learned APE{measurably}"
    return f"{reached}{apart}{lead}."


def _checks(outcome: Outcome, sizes: Sequence[Place]) -> list[Check]:
    checks = [_truth_is_perfect(outcome.task, sizes[0].data), _as_at_the_end(outcome)]
    return [*checks, _adds_up(outcome)] if outcome.task.name == "segment" else checks


def _truth_is_perfect(task: Task, data: DataModule) -> Check:
    records = [task.record(task.truth(target), target) for _, target in examples(data)]
    reached = task.weigh(records)(np.ones((1, len(records))))
    law = f"{task.title}: the truth taken for a prediction has a {task.measure} of 100"
    return Check(law, abs(float(reached[0]) - 1) <= SAME, f"{100 * reached[0]:.2f} on {len(records)} images")


def _as_at_the_end(outcome: Outcome) -> Check:
    far = max(
        abs(float(reached) - each.curve[-1][outcome.task.curve])
        for name, runs in outcome.trained.items()
        for reached, each in zip(outcome.scores[name][0].seeds, runs, strict=True)
    )
    law = f"{outcome.task.title}: {outcome.task.measure} from records of each image is what the training ended with"
    return Check(law, far <= SAME, f"at most {100 * far:.2f} points apart")


def _adds_up(outcome: Outcome) -> Check:
    counts = [total(at["records"]) for seeds in outcome.measured.values() for seed in seeds for at in seed]
    wrong = sum(said != true for said, true in counts)
    law = f"{outcome.task.title}: over all classes as many pixels are predicted as have a true class"
    return Check(law, not wrong, f"{sum(true for _, true in counts):,} pixels, {wrong} of {len(counts)} counts differ")


def _notes(lab: Lab, outcomes: Sequence[Outcome]) -> list[str]:
    notes = [outcome.task.about for outcome in outcomes]
    heads = {outcome.task.name: next(iter(outcome.trained.values()))[0].run.config.model.head for outcome in outcomes}
    notes.append(
        "Backbones start from random weights, while the paper's were trained on ImageNet-1k before: what an encoding "
        "is worth there is in part what it was worth in that training."
    )
    if "detect" in heads:
        notes.append(
            f"The detector is {heads['detect']}; the paper's is DINO, of which transformers and torchvision have none. "
            "Its ViT attends within windows in most layers, here all layers see the whole image unless a window is set."
        )
    if "segment" in heads:
        notes.append(f"The segmenter is {heads['segment']}. Evaluation at several scales at once is left out.")
    if isinstance(lab.data, Scenes):
        notes.append(
            "A larger canvas holds more digits of the same sizes, so that nothing but the positions is new; in the "
            "paper larger images show larger objects. Each size has scenes of its own: values at one size are "
            "compared, not those of one encoding between sizes."
        )
    else:
        notes.append("Images are enlarged for larger sizes, and what is predicted is brought back to their own pixels.")
    return notes


def _advice(outcome: Outcome, sizes: Sequence[Place], lab: Lab) -> list[Advice]:
    if len(outcome.scores) < 2:
        return []
    found = []
    for at in sorted({0, len(sizes) - 1}):
        best = outcome.best(at)
        names = [each.name for each in best]
        reached = f"{names[0]} reaches {percent(*_in_percent(best[0]))} {outcome.task.measure} at {sizes[at].title}"
        because = f"{reached} on {lab.data.title}{not_told_apart(names)}"
        found.append(Advice(f"{outcome.task.title} {sizes[at].where}", names, because))
    return found


STUDY = Study(
    title="Segmentation and detection",
    question="Which encoding segments and detects best, and which keeps doing so on images larger than in training?",
    sources=tuple(f"{ROPE_VIT}, table {number}" for number in (1, 2, 3, 4)),
    find=find,
    tasks=("segment", "detect"),
    encodings=("learned", "bias", "axial", "mixed", "learned+axial", "learned+mixed", "liere:8", "comrope-ld"),
)
