"""How soon each encoding is as good as a learned absolute one ends (LieRE figure 3; second version, figure 4b)."""

from collections.abc import Sequence
from math import ceil, isinf
from typing import Any

import numpy as np

from torchrope.lab.results import Advice, Axis, Column, Figure, Findings, Row, Table
from torchrope.lab.studies.engine.estimates import by_encoding, caveat, correct, ends, first_reach, resamples, told
from torchrope.lab.studies.engine.grid import ENCODING, named
from torchrope.lab.studies.engine.published import LIERE_1, LIERE_2, published
from torchrope.lab.studies.engine.runs import Trained
from torchrope.lab.studies.engine.study import Lab, Study

REFERENCE = "learned"
COLUMNS = (
    *ENCODING,
    Column("epochs", "Epochs", digits=1, low="epochs_low", high="epochs_high"),
    Column("steps", "Steps", digits=0, low="steps_low", high="steps_high"),
    Column("seconds", "Time", "s", 1, low="seconds_low", high="seconds_high"),
    Column("factor", "Fewer epochs than the whole training", "×", 1, low="factor_low", high="factor_high"),
    Column("time_factor", "Less time than the whole training", "×", 1, low="time_factor_low", high="time_factor_high"),
    Column("sooner", "Sooner than learned gets there", "×", 1, low="sooner_low", high="sooner_high"),
    Column("verdict", "Verdict"),
)
MEASURES = ("epochs", "steps", "seconds", "factor", "time_factor", "sooner")

PUBLISHED = (
    published(
        "Fewer epochs than the 200 of the absolute encoding, CIFAR-100, as the texts say",
        f"{LIERE_1}, section 5.4 and figure 3; {LIERE_2}, section 5.4 and figure 4b",
        """
        liere, first version | 3.5
        liere, second version | 3.9
        """,
        ("Encoding", "Factor"),
        unit="×",
        note="Other encodings are in the figures alone, without numbers. The second version's conclusion still says "
        "3.5. Neither says when the absolute encoding itself first reaches its final top-1.",
    ),
)


def find(lab: Lab) -> Findings:
    """Read the learning curves of the runs that accuracy trains too."""
    names = list(dict.fromkeys([REFERENCE, *lab.encodings]))
    groups = by_encoding(lab.train(lab.runs(names)))
    reached = {name: _Reached(runs, groups[REFERENCE]) for name, runs in groups.items()}
    steps = _steps_per_epoch(lab)
    rows = [_row(name, each, reached[REFERENCE], steps) for name, each in reached.items()]
    epochs = lab.config.optim.epochs
    return Findings(
        answer=_answer(rows, epochs) + caveat(len(lab.seeds)),
        tables=[Table("When the final top-1 of a learned absolute encoding is reached", COLUMNS, rows, note=_note())],
        figures=[_curves(groups, reached[REFERENCE]), _factors(rows)],
        published=PUBLISHED,
        notes=[
            f"All learning rates fall over the same {epochs} epochs. A training planned to be shorter would let them "
            "fall sooner, and may get there sooner still, or not at all.",
            "Times are those of the machine that trained, with whatever else it did; epochs and steps do not depend on "
            "it.",
        ],
        advice=_advice(rows, lab),
    )


class _Reached:
    """Where the curve of an encoding first reaches the reference's end, measured and drawn anew.

    Every draw takes seeds and validation examples anew. Of a run's epochs only the last one has its predictions kept:
    what a draw of examples does to its top-1 it does to all epochs of that run, in proportion to their standard errors.

    Args:
        runs: Of the encoding, over seeds.
        reference: Runs to be as good as.
    """

    def __init__(self, runs: Sequence[Trained], reference: Sequence[Trained]) -> None:
        curves, target = _top1_curves(runs), _top1_curves(reference)
        self.seconds = np.cumsum([[epoch["seconds"] for epoch in run.curve] for run in runs], axis=1).mean(axis=0)
        self.epochs = np.arange(1.0, curves.shape[1] + 1)
        self.target = float(target[:, -1].mean())
        again = resamples(runs[0].correct.size)
        drawn = _draw_seeds(curves, len(again)) + _shifts(runs, again)
        wanted = _draw_seeds(target, len(again)) + _shifts(reference, again)
        [self.measured] = first_reach(self.epochs, curves.mean(axis=0)[None], target.mean(axis=0)[None, -1])
        self.draws = first_reach(self.epochs, drawn, wanted[:, -1])

    def time(self, epochs: np.ndarray) -> np.ndarray:
        """Seconds until so many epochs; infinite where they never come."""
        known = np.concatenate([[0.0], self.seconds])
        return np.where(np.isinf(epochs), np.inf, np.interp(epochs, np.arange(len(known)), known))


def _top1_curves(runs: Sequence[Trained]) -> np.ndarray:
    """Top-1 after every epoch, `(seeds, epochs)`; 0 where a run had lost its numbers."""
    return np.nan_to_num(np.array([[epoch["val_top1"] for epoch in run.curve] for run in runs], dtype=float))


def _draw_seeds(curves: np.ndarray, draws: int) -> np.ndarray:
    """Mean curves of seeds drawn with replacement, `(draws, epochs)`."""
    chosen = np.random.default_rng(0).integers(len(curves), size=(draws, len(curves)))
    return curves[chosen].mean(axis=1)


def _shifts(runs: Sequence[Trained], again: np.ndarray) -> np.ndarray:
    """What drawing examples anew adds to the top-1 of every epoch, `(draws, epochs)`."""
    right = correct(runs).mean(axis=0)
    errors = _standard_error(_top1_curves(runs).mean(axis=0), len(right))
    return (again @ right - right.mean())[:, None] * (errors / errors[-1])


def _standard_error(top1: np.ndarray, examples: int) -> np.ndarray:
    """Of shares of so many examples; two more, one right and one wrong, keep it above zero."""
    share = (top1 * examples + 1) / (examples + 2)
    return np.sqrt(share * (1 - share) / examples)


def _steps_per_epoch(lab: Lab) -> int:
    batch = lab.config.optim.effective_batch or lab.config.data.batch_size
    return ceil(lab.data.counts[0] / batch)


def _row(name: str, reached: _Reached, reference: _Reached, steps: int) -> dict[str, Any]:
    if isinf(reached.measured):
        nothing = dict.fromkeys(key for each in MEASURES for key in (each, f"{each}_low", f"{each}_high"))
        never = isinf(ends(reached.draws)[0])
        return {**named(name), **nothing, "verdict": "does not reach it" if never else "cannot be told"}
    whole, last = len(reached.epochs), float(reference.seconds[-1])
    measured, draws = np.array([reached.measured]), reached.draws
    own = np.array([reference.measured])
    cells = {
        **_cells("epochs", measured, draws, most=whole),
        **_cells("steps", measured * steps, draws * steps, most=whole * steps),
        **_cells("seconds", reached.time(measured), reached.time(draws), most=float(reached.seconds[-1])),
        **_cells("factor", whole / measured, whole / draws, least=1.0),
        **_cells("time_factor", last / reached.time(measured), last / reached.time(draws)),
        **_cells("sooner", own / measured, reference.draws / draws),
    }
    return {**named(name), **cells, "verdict": _verdict(name, cells)}


def _cells(
    key: str, measured: np.ndarray, draws: np.ndarray, *, least: float = 0.0, most: float = np.inf
) -> dict[str, float]:
    low, high = (min(max(end, least), most) for end in ends(draws))
    return {key: float(measured[0]), f"{key}_low": low, f"{key}_high": high}


def _verdict(name: str, cells: dict[str, float]) -> str:
    if name == REFERENCE:
        return "the reference"
    if cells["sooner_low"] > 1:
        return "sooner"
    return "later" if cells["sooner_high"] < 1 else "cannot be told"


def _answer(rows: Sequence[dict[str, Any]], epochs: int) -> str:
    own, others = rows[0], rows[1:]
    sooner = sorted((row for row in others if row["verdict"] == "sooner"), key=lambda row: row["epochs"])
    said = []
    if not sooner:
        said.append("No encoding is measurably sooner where a learned absolute encoding ends.")
    else:
        each = [f"{row['name']} after {_told(row, 'epochs')}" for row in sooner]
        first = sooner[0]
        said.append(
            f"Of {epochs} epochs, what a learned absolute encoding ends with is reached by {told(each)}. For "
            f"{first['name']} that is {_told(first, 'factor')} times fewer than the whole training."
        )
    each = [f"{row['name']} is {_told(row, 'sooner')} times sooner" for row in sooner]
    itself = f"By the same rule the learned one itself is first there after {_told(own, 'epochs')} epochs"
    said.append(f"{itself}: {told(each)}." if each else f"{itself}.")
    unclear = [row["name"] for row in others if row["verdict"] == "cannot be told"]
    if unclear:
        said.append(f"Whether {told(unclear)} {'is' if len(unclear) == 1 else 'are'} sooner than it cannot be told.")
    for verdict, words in (("later", "Later than it"), ("does not reach it", "Not there by the end")):
        names = [row["name"] for row in others if row["verdict"] == verdict]
        said += [f"{words}: {told(names)}."] if names else []
    return " ".join(said)


def _told(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.1f} [{row[f'{key}_low']:.1f}, {row[f'{key}_high']:.1f}]"


def _note() -> str:
    return (
        "Where the curve of validation top-1 first reaches the learned absolute encoding's last value, straight "
        "between epochs. The factors of the papers divide the whole training by that. But a curve that rises and falls "
        "by luck reaches its own end before the end: the last factor, against the learned encoding's own first time, "
        "decides the verdict. Intervals hold 95 % of 2,000 draws of validation examples, and of seeds where there are "
        "several; a draw that does not get there within the training counts as all of it."
    )


def _curves(groups: dict[str, list[Trained]], reference: _Reached) -> Figure:
    means = {name: _top1_curves(runs).mean(axis=0) for name, runs in groups.items()}
    rows: list[Row] = [
        {"name": name, "epoch": epoch, "top1": 100 * float(value)}
        for name, values in means.items()
        for epoch, value in enumerate(values, start=1)
    ]
    mark: list[Row] = [
        {"name": "end of learned", "epoch": epoch, "top1": 100 * reference.target}
        for epoch in (1, len(reference.epochs))
    ]
    return Figure(
        name="top1-by-epoch",
        kind="lines",
        title="Top-1 while training, and where a learned absolute encoding ends",
        alt=f"Validation top-1 after every epoch of {len(groups)} encodings, and a level line at "
        f"{100 * reference.target:.1f} %, where the learned absolute encoding ends.",
        x=Axis("epoch", "Epoch"),
        y=Axis("top1", "Top-1", "%"),
        rows=rows + mark,
        series="name",
        caption="Mean over seeds.",
    )


def _factors(rows: Sequence[dict[str, Any]]) -> Figure:
    there = [row for row in rows if row["factor"] is not None]
    bars: list[Row] = [
        {"name": row["name"], "factor": row["factor"], "low": row["factor_low"], "high": row["factor_high"]}
        for row in there
    ]
    return Figure(
        name="factor",
        kind="bars",
        title="How many times fewer epochs than the whole training",
        alt="A bar for each encoding that reaches the learned absolute encoding's end, the learned one itself among "
        "them: " + ", ".join(f"{row['name']} {row['factor']:.1f}" for row in there) + ".",
        x=Axis("name", "Encoding", scale="category"),
        y=Axis("factor", "Fewer epochs", "×"),
        rows=bars,
        series="name",
        low="low",
        high="high",
        caption="The bar of the learned encoding shows what luck alone gives by this rule.",
    )


def _advice(rows: Sequence[dict[str, Any]], lab: Lab) -> list[Advice]:
    sooner = sorted((row for row in rows if row["verdict"] == "sooner"), key=lambda row: row["epochs"])
    if not sooner:
        return []
    best = sooner[0]
    why = f"{best['name']} is as good as a learned absolute encoding {_told(best, 'sooner')} times sooner"
    names = [row["name"] for row in sooner if row["epochs"] <= best["epochs_high"]]
    return [Advice("Little time to train", names, f"{why} than that encoding itself, on {lab.data.title}")]


STUDY = Study(
    title="Training efficiency",
    question="How much training does each encoding need for what a learned absolute one reaches?",
    sources=(f"{LIERE_1}, figure 3", f"{LIERE_2}, figure 4b"),
    find=find,
)
