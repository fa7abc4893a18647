"""Attention weights that an encoding makes possible in one layer, on tasks whose optimum is known (in no paper)."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import resources
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from rich.progress import Progress

from torchrope.files import write_whole
from torchrope.positions import grid
from torchrope_lab.conclusion import Interval, join_names
from torchrope_lab.encodings import load_modules
from torchrope_lab.engine.descriptions import label
from torchrope_lab.engine.dry_run import NotTrained
from torchrope_lab.engine.estimates import in_percent, simultaneous_intervals
from torchrope_lab.engine.figures import cells_figure, map_figure
from torchrope_lab.engine.long_table import SIMULTANEOUS, name_columns, table_of, with_interval
from torchrope_lab.engine.published import cite
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.workers import run_calls
from torchrope_lab.files import read_mapping
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import Axis, Column, Figure, Findings, Table
from torchrope_lab.settings.probes_config import ProbesConfig
from torchrope_lab.statistics import over_seeds
from torchrope_lab.studies.probes.abilities import ABILITIES, Ability, weights_of
from torchrope_lab.studies.probes.layer import CONDITIONS, TRAINED, Probe, score, train_probe

VERSION = 1
"""Raised when the numbers of a probe change."""
_EXPLAINED = Axis("score", "Explained", "%")
DEFAULT_ABILITIES = ("far", "pair", "diagonal", "ellipse", "ring", "place")


@dataclass(frozen=True)
class Job:
    """A probe to train and to score: names of encoding and ability, channels of a head, seed."""

    encoding: str
    ability: str
    head_dim: int
    seed: int

    def file(self, folder: Path, config: ProbesConfig) -> Path:
        """Return the file of its scores."""
        shared = {name: value for name, value in vars(config).items() if name not in ("abilities", "head_dims")}
        text = json.dumps([VERSION, vars(self), shared], sort_keys=True)
        return folder / f"{self.ability}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def run_job(job: Job, folder: Path, config: ProbesConfig) -> None:
    """Train a probe and write its scores."""
    load_modules([job.encoding])  # allowed: the parent process has loaded them
    started, ability = time.monotonic(), ABILITIES[job.ability]
    probe = train_probe(job.encoding, ability, config, job.head_dim, job.seed)
    scores = {condition.name: score(probe, ability, condition, config.examples) for condition in CONDITIONS}
    content = {**vars(job), "seconds": time.monotonic() - started, "scores": scores}
    write_whole(job.file(folder, config), json.dumps(content))


class Contrast(NamedTuple):
    """Two encodings that are compared in an ability."""

    higher: str
    lower: str
    ability: str


@dataclass(frozen=True)
class Results:
    """Scores of all probes."""

    encodings: Sequence[str]
    abilities: Sequence[Ability]
    head_dim: int  # of the main tables
    seeds: int
    measured: Mapping[Job, Mapping[str, Any]]  # `scores` of each probe, by condition, None where it does not apply

    def of(self, encoding: str, ability: str, condition: str = TRAINED.name, head_dim: int | None = None) -> np.ndarray:
        """Return the scores over seeds; NaN where the condition does not apply."""
        jobs = [Job(encoding, ability, head_dim or self.head_dim, seed) for seed in range(self.seeds)]
        values = [self.measured[job]["scores"][condition] for job in jobs]
        return np.array([nan if value is None or not isfinite(value) else value for value in values])

    def interval(self, encoding: str, ability: str, **at: Any) -> Interval | None:
        """Return the mean over seeds with its interval; None where the condition does not apply."""
        values = self.of(encoding, ability, **at)
        return None if np.isnan(values).any() else over_seeds(values).interval()

    def percent(self, encoding: str, ability: str, **at: Any) -> Interval | None:
        """Return `interval` in percent."""
        interval = self.interval(encoding, ability, **at)
        return interval and in_percent(interval)

    def leads(self, contrasts: Sequence[Contrast]) -> dict[Contrast, Interval]:
        """Return how many points one encoding is ahead of another, paired by seed, with simultaneous intervals."""
        gaps = {each: self.of(each.higher, each.ability) - self.of(each.lower, each.ability) for each in contrasts}
        found = simultaneous_intervals({contrast: over_seeds(gap) for contrast, gap in gaps.items()})
        return {contrast: in_percent(interval) for contrast, interval in found.items()}

    @cached_property
    def means(self) -> np.ndarray:
        """Mean scores over seeds, `(abilities, encodings)`."""
        rows = [[self.of(name, each.name).mean() for name in self.encodings] for each in self.abilities]
        return np.array(rows)

    @property
    def having_one(self) -> np.ndarray:
        """Which encodings have one of the abilities or more."""
        return self.means.max(axis=0) >= _threshold()


def find(lab: Lab) -> Findings:
    """Train and score a probe for each encoding, ability, number of channels and seed."""
    config = lab.config.probes  # type: ignore[attr-defined]
    abilities = [ABILITIES[name] for name in config.abilities or DEFAULT_ABILITIES]
    if too_many := [ability.name for ability in abilities if ability.axes > config.axes]:
        if config.abilities:
            rule = f"--probes.abilities {too_many[0]} needs {ABILITIES[too_many[0]].axes} axes or more"
            raise Mistake(f"{rule}, got --probes.axes {config.axes}")
        abilities = [ability for ability in abilities if ability.name not in too_many]
    encodings = _buildable(lab, config)
    jobs = [
        Job(encoding, ability.name, head_dim, seed)
        for seed in lab.seeds
        for ability in abilities
        for encoding in encodings
        for head_dim in config.channels
    ]
    measured = _run(lab, jobs, config)
    diverged = {job.encoding: job for job, each in measured.items() if not isfinite(each["scores"][TRAINED.name])}
    for name, job in diverged.items():
        lab.leave_out(f"{label(name)} is left out: its training diverged ({job.ability}, seed {job.seed}).")
    if not (encodings := [name for name in encodings if name not in diverged]):
        raise Mistake(f"none of the encodings can be probed: {' '.join(lab.left_out)}")
    results = Results(encodings, abilities, config.channels[0], len(lab.seeds), measured)
    predicted = _predictions(results)
    return Findings(
        answer=_answer(results, predicted),
        tables=[
            *_tables(results),
            *_capacity(results, config),
            *_of_predictions(predicted),
            *_claims(results),
        ],
        figures=[_matrix(results), *_transfer(results), *_masks(results, config), *_correlation(results)],
    )


def _buildable(lab: Lab, config: ProbesConfig) -> list[str]:
    """Return the encodings that a probe can have."""
    built = []
    for encoding in lab.encodings:
        try:
            with torch.device("meta"):
                for head_dim in config.channels:
                    Probe(encoding, config.sizes, head_dim, config.num_heads)
            built.append(encoding)
        except ValueError as error:
            lab.leave_out(f"{label(encoding)} is left out: {error}.")
    if not built:
        raise Mistake(f"none of the encodings can be probed: {' '.join(lab.left_out) or 'none is given'}")
    return built


def _run(lab: Lab, jobs: Sequence[Job], config: ProbesConfig) -> dict[Job, dict[str, Any]]:
    """Return what is measured of all jobs, of finished ones from their files."""
    folder = Path(lab.config.out) / "probes"
    missing = [job for job in jobs if not job.file(folder, config).exists()]
    if lab.dry_run:
        lab.console.print(f"probes to train: {len(missing)} of {len(jobs)}")
        raise NotTrained
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(console=lab.console, transient=True) as progress:
        task = progress.add_task("probes", total=len(missing))
        calls = [(job, partial(run_job, job, folder, config)) for job in missing]
        run_calls(calls, lab.config, lambda *_: progress.advance(task))
    return {job: read_mapping(job.file(folder, config), "scores of a probe") for job in jobs}


# ---- what is measured


def _matrix(results: Results) -> Figure:
    cells = [
        (ability.title, label(encoding), round(100 * interval.estimate, 2))
        for encoding in results.encodings
        for ability in results.abilities
        if (interval := results.interval(encoding, ability.name))
    ]
    title, caption = (
        "What each encoding lets attention gather",
        "0 % is attention without positions, 100 % the optimum.",
    )
    return cells_figure(_names("ability"), _names("encoding"), _EXPLAINED, cells, name="matrix", title=title,
                        caption=caption)  # fmt: skip


def _names(key: str) -> Axis:
    return Axis(key, key.capitalize(), scale="category")


def _tables(results: Results) -> list[Table]:
    scores = [one["scores"] for one in results.measured.values()]
    applying = [each for each in CONDITIONS if any(score[each.name] is not None for score in scores)]
    titles = {each: "Explained" if each is TRAINED else "Explained without more training" for each in applying}
    return [_table(results, f"{title}: {each.title.lower()}", each.name) for each, title in titles.items()]


def _table(results: Results, title: str, condition: str) -> Table:
    def value(ability: Ability) -> Callable[[str], Any]:
        return lambda encoding: results.percent(encoding, ability.name, condition=condition)

    columns = [
        *name_columns(str),
        *((with_interval(ability.name, ability.title, "%", 0), value(ability)) for ability in results.abilities),
    ]
    return table_of(title, columns, results.encodings, "Means over seeds with 95 % intervals.")


def _transfer(results: Results) -> list[Figure]:
    """Show the mean over the abilities that an encoding has, under each condition."""
    cells = []
    for encoding in results.encodings:
        able = [each.name for each in results.abilities if results.of(encoding, each.name).mean() >= _threshold()]
        for condition in CONDITIONS if able else ():
            values = np.array([results.of(encoding, name, condition.name) for name in able])
            if not np.isnan(values).any():
                share = 100 * float(np.clip(values, 0, 1).mean())
                cells.append((condition.title, label(encoding), round(share, 2)))
    title = "What is kept without more training"
    caption = f"Mean over the abilities of which an encoding explains {100 * _threshold():.0f} % or more in training."
    axes = (_names("condition"), _names("encoding"), replace(_EXPLAINED, key="kept"))
    return [cells_figure(*axes, cells, name="transfer", title=title, caption=caption)] if cells else []


def _capacity(results: Results, config: ProbesConfig) -> list[Table]:
    """Show the scores by the number of channels of a head."""
    if len(config.channels) == 1:
        return []
    items = [(encoding, ability) for encoding in results.encodings for ability in results.abilities]

    def value(head_dim: int) -> Callable[[tuple[str, Ability]], Any]:
        return lambda item: results.percent(item[0], item[1].name, head_dim=head_dim)

    columns = [
        *name_columns(lambda item: item[0]),
        (Column("ability", "Ability"), lambda item: item[1].title),
        *((with_interval(f"d{size}", f"{size} channels", "%", 0), value(size)) for size in sorted(config.channels)),
    ]
    return [table_of("Explained by the number of channels of a head", columns, items)]


def _masks(results: Results, config: ProbesConfig) -> list[Figure]:
    """Show what each ability asks of a query in the middle of the lattice, with two axes."""
    if config.axes != 2:
        return []
    places = grid(*config.sizes, dtype=torch.float64)
    middle = (config.sizes[0] // 2) * config.sizes[1] + config.sizes[1] // 2
    maps = {
        ability.title: weights_of(ability, places)[middle].view(config.sizes).numpy()
        for ability in results.abilities
        if not ability.marked
    }
    if not maps:
        return []
    x, y, colour = Axis("x", "x"), Axis("y", "y"), Axis("weight", "Weight")
    middle_of = f"Of the query at row and column {config.sizes[0] // 2}, counted from 0."
    return [map_figure(x, y, colour, maps, name="masks", title="What is gathered", caption=middle_of)]


def _correlation(results: Results) -> list[Figure]:
    """Show which abilities order the encodings alike, those aside that have none of them."""
    means = results.means[:, results.having_one]
    if len(means) < 2 or means.shape[1] < 4:
        return []
    varied = [index for index, row in enumerate(means) if row.std() > 0]
    correlation = np.corrcoef(means[varied])
    cells = [
        (results.abilities[i].title, results.abilities[j].title, round(float(correlation[a, b]), 3))
        for a, i in enumerate(varied)
        for b, j in enumerate(varied)
    ]
    x, y = (Axis(key, "Ability", scale="category") for key in ("one", "other"))
    colour, title = Axis("r", "Correlation over encodings"), "Correlation of abilities over encodings"
    caption = f"Of encodings that explain {100 * _threshold():.0f} % or more of one ability."
    return [cells_figure(x, y, colour, cells, name="correlation", title=title, caption=caption)]


# ---- predictions


@cache
def _file() -> dict[str, Any]:
    return yaml.safe_load(
        resources.files("torchrope_lab.studies.probes").joinpath("predictions.yaml").read_text("utf-8")
    )


def _threshold() -> float:
    return _file()["threshold"]


@dataclass(frozen=True)
class Prediction:
    """What theory says of an encoding's ability and why, and the mean score over seeds with its interval."""

    encoding: str
    ability: Ability
    can: bool
    because: str
    measured: Interval

    @property
    def verdict(self) -> str:
        """Whether the measured interval lies on the predicted side of the threshold."""
        above, below = self.measured.low > _threshold(), self.measured.high < _threshold()
        if not above and not below:
            return "undecided"
        return "as predicted" if above == self.can else "not as predicted"


def _predictions(results: Results) -> list[Prediction]:
    family = {encoding: family for family in _file()["families"] for encoding in family["encodings"]}
    return [
        Prediction(encoding, ability, ability.name in family[encoding]["can"], family[encoding]["because"], measured)
        for encoding in results.encodings
        if encoding in family
        for ability in results.abilities
        if ability.name in (*family[encoding]["can"], *family[encoding]["cannot"])
        and (measured := results.interval(encoding, ability.name))
    ]


def _of_predictions(predicted: Sequence[Prediction]) -> list[Table]:
    if not predicted:
        return []
    columns = [
        *name_columns(lambda item: item.encoding),
        (Column("ability", "Ability"), lambda item: item.ability.title),
        (Column("predicted", "Predicted"), lambda item: "can" if item.can else "cannot"),
        (with_interval("score", "Explained", "%", 0), lambda item: in_percent(item.measured)),
        (Column("verdict", "Verdict"), lambda item: item.verdict),
        (Column("because", "Because"), lambda item: item.because),
    ]
    ordered = sorted(predicted, key=lambda item: item.verdict, reverse=True)  # those that failed come second
    note = (
        f"Written before the runs. ‘Can’ means that an encoding explains {100 * _threshold():.0f} % or more. "
        "Each verdict is at 5 % by itself: of many, some are wrong by chance."
    )
    return [table_of("Predictions", columns, ordered, note)]


def _claims(results: Results) -> list[Table]:
    """Compare claims of papers with what was measured."""
    names = {ability.name for ability in results.abilities}
    claims = [
        claim
        for claim in _file()["claims"]
        if claim["ability"] in names and {claim["higher"], claim["lower"]} <= {*results.encodings}
    ]
    if not claims:
        return []

    contrasts = [Contrast(claim["higher"], claim["lower"], claim["ability"]) for claim in claims]
    leads = results.leads(contrasts)
    columns = [
        (Column("claim", "Claim"), lambda item: item[0]["says"]),
        (Column("source", "Source"), lambda item: cite(item[0]["source"])),
        (Column("ability", "Ability"), lambda item: ABILITIES[item[1].ability].title),
        (Column("pair", "Difference of"), lambda item: f"{label(item[1].higher)} − {label(item[1].lower)}"),
        (with_interval("points", "Difference", "points", 0), lambda item: leads[item[1]]),
    ]
    items = [*zip(claims, contrasts, strict=True)]
    note = f"Paired by seed. {SIMULTANEOUS}"
    return [table_of("Claims of papers", columns, items, note)]


# ---- words


def _answer(results: Results, predicted: Sequence[Prediction]) -> str:
    """Name the ability in which the encodings differ most and who has it, and how many predictions failed."""
    text = _most_different(results) if len(results.encodings) > 1 else _abilities_of(results)
    wrong = sum(item.verdict == "not as predicted" for item in predicted)
    return f"{text} Of {len(predicted)} predictions {wrong} failed." if predicted else text


def _most_different(results: Results) -> str:
    scores = np.clip(results.means, 0, 1)
    tell = scores[:, results.having_one].std(axis=1) if results.having_one.any() else scores.std(axis=1)
    widest = int(tell.argmax())
    able = [name for name, mean in zip(results.encodings, scores[widest], strict=True) if mean >= _threshold()]
    low, high = 100 * scores[widest].min(), 100 * scores[widest].max()
    verb = f"explain{'s' if len(able) == 1 else ''} {100 * _threshold():.0f} % or more"
    who = f"{join_names([label(name) for name in able])} {verb}" if able else "none has it"
    return f"“{results.abilities[widest].title}” differs most between encodings, {low:.0f} to {high:.0f} %: {who}."


def _abilities_of(results: Results) -> str:
    scores = zip(results.abilities, results.means[:, 0], strict=True)
    able = [f"“{ability.title}”" for ability, mean in scores if mean >= _threshold()]
    of = f"{len(able)} of {len(results.abilities)} abilities"
    which = f": {join_names(able)}" if able else ""
    return f"{label(results.encodings[0])} explains {100 * _threshold():.0f} % or more of {of}{which}."
