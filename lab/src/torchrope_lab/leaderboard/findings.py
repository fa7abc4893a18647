"""Ranks over data sets, tables, figures and advice of a leaderboard, from its entry."""

import re
from collections.abc import Sequence

import numpy as np

from torchrope_lab.conclusion import BASELINE, NOT_DIFFERENT, join_names, one_seed, signed
from torchrope_lab.leaderboard.claims import table_of_claims
from torchrope_lab.leaderboard.conditions import HOLM, TITLES, Contrast, Ranking, accuracies, contrasted, rank
from torchrope_lab.leaderboard.effects import effects
from torchrope_lab.leaderboard.entry import DataSetResults, Entry
from torchrope_lab.leaderboard.rates import order_changes, tables_of_rates
from torchrope_lab.results import Advice, Axis, Column, Figure, Findings, Row, Table
from torchrope_lab.statistics import accuracy_interval, ranks
from torchrope_lab.studies.engine.estimates import (
    NAMES,
    VERDICT,
    about_intervals,
    cells,
    in_percent,
    named,
    points,
    verdict_of,
    with_interval,
)

_RULE = (
    "A mean over data sets counts every set alike; differences are paired on the same examples and seeds of each set. "
    "These data sets only: variation between data sets is not included."
)
_NOT_SHOWN = (
    "Not shown: models of millions of parameters, pre-training, and training on more than thousands of examples.",
    "Not shown: photographs. The data sets are time series, drawn or handwritten characters and synthetic clips.",
    "Not shown: settings tuned for each encoding. Only the learning rate was chosen, the same for all encodings of a "
    "set, on examples held out for it.",
)


def find(entry: Entry, own: Sequence[str] = ()) -> Findings:
    """Build the findings of an entry.

    Args:
        entry: The entry.
        own: Encodings that the user added to the entries of others; the answer is about these.
    """
    ranking = rank(entry.sets)
    seeds = min(len(each.right) for found in entry.sets for each in found.encodings.values())
    if ranking is None:
        return Findings(
            answer=answer_on_own(entry.sets, None, own)
            or "Fewer than two encodings were trained on every data set, so that none can be ranked.",
            tables=[table_of_sets(entry.sets)],
            notes=notes_of(entry.sets),
        )
    tables, figures = effects(entry.sets, ranking.order)
    changes = order_changes(entry.sets)
    return Findings(
        answer=answer_on_own(entry.sets, ranking, own) or answer(ranking, seeds, epochs_of(entry.sets)),
        tables=[
            table_of_ranks(entry.sets, ranking),
            table_of_sets(entry.sets),
            *table_of_conditions(entry.sets, ranking.order),
            *tables,
            *table_of_claims(entry.sets),
            *tables_of_rates(entry.sets),
        ],
        figures=[
            figure_of_ranks(ranking),
            *figures,
            *figure_of_costs(entry.sets, ranking),
        ],
        notes=[
            _RULE,
            *edges_of_rates(entry.sets),
            *_same_on_one_axis(entry.sets),
            *_NOT_SHOWN,
            *([changes] if changes else []),
            *notes_of(entry.sets),
        ],
        advice=advice(entry.sets, ranking),
    )


# ---- sentences


def answer(ranking: Ranking, seeds: int, epochs: str = "") -> str:
    """Write the answer: how many encodings are not significantly different from the highest, and their gains."""
    best, tied, behind = ranking.best, ranking.tied, ranking.behind
    over = f"{epochs}over {ranking.sets} data sets" if ranking.sets > 1 else f"{epochs}on one data set"
    over = f"{over[0].upper()}{over[1:]}"
    count = len(ranking.order)
    if not behind:
        return f"{over} the {count} encodings are {NOT_DIFFERENT} on average.{one_seed(seeds)}"
    if not tied:
        lead = points(ranking.difference(best, behind[0]))
        return (
            f"{over} {best} is significantly ahead of all others on average, {lead} over {behind[0]}.{one_seed(seeds)}"
        )
    first = f"{over} {len(tied) + 1} of {count} encodings are {NOT_DIFFERENT} on average"
    unknown = f"the order among them is unknown.{one_seed(seeds)}"
    if BASELINE not in behind:
        return f"{first}; {unknown}"
    gains = sorted(ranking.difference(name, BASELINE).estimate for name in (best, *tied))
    low, high = signed(gains[0], 0), signed(gains[-1], 0)
    return f"{first}, {low if low == high else f'{low} to {high}'} points over {BASELINE}; {unknown}"


def answer_on_own(sets: Sequence[DataSetResults], ranking: Ranking | None, own: Sequence[str]) -> str:
    """Write the answer about an encoding that the user added: its place in the ranking, or on its sets; "" if none."""
    added = [name for name in own if any(name in found.encodings for found in sets)]
    if not added:
        return ""
    name = added[0]
    others = f" (and {len(added) - 1} more)" if added[1:] else ""
    if ranking is not None and name in ranking.order:
        low, high = ranks(ranking.order, ranking.pairs)[name]
        place = f"{name}{others}: {ranking.means[name]:.1f} % on average over {ranking.sets} data sets"
        place = f"{place}, possible ranks {low} to {high} of {len(ranking.order)}"
        other = ranking.order[1] if name == ranking.best else ranking.best
        gap = ranking.difference(name, other)
        verdict = verdict_of(gap, "significantly ahead of", "significantly behind", f"{NOT_DIFFERENT} from")
        return f"{place}; {verdict} {other}, the {'second' if name == ranking.best else 'highest'}: {points(gap)}."
    measured = [found for found in sets if name in found.encodings]
    on = [_on_set(found, name) for found in measured]
    shown = "; ".join(on[:3]) + (f"; {len(on) - 3} more in the tables" if on[3:] else "")
    missing = [found.name for found in sets if name not in found.encodings]
    because = f"not on {join_names(missing)}" if missing else "no other encoding is on all data sets"
    where = f"{name}{others} on {len(measured)} of {len(sets)} data sets, against the best of the others"
    return f"{where}: {shown}. No rank: {because}."


def _on_set(found: DataSetResults, name: str) -> str:
    """Compare an encoding with the best of the others on one data set."""
    rights = found.rights()
    others = {other: right for other, right in rights.items() if other != name}
    if not others:
        return f"alone on {found.name}"
    best = max(others, key=lambda other: float(others[other].mean()))
    [gap] = contrasted([Contrast(name, best, [found])])
    return f"{points(gap)} to {best} on {found.name}"


def epochs_of(sets: Sequence[DataSetResults]) -> str:
    """Return "after 5 to 24 epochs, " from the options of the data sets; empty if one has none."""
    found = [re.search(r"--(?:optim\.)?epochs[ =](\d+)", each.arguments) for each in sets]
    if not all(found):
        return ""
    counts = sorted(int(each[1]) for each in found if each)
    span = str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    return f"after {span} epoch{'' if span == '1' else 's'}, "


def edges_of_rates(sets: Sequence[DataSetResults]) -> list[str]:
    """Note the data sets whose learning rate is at the edge of its grid, so that a better one may lie outside."""
    grids = {found.name: {each.rate for e in found.encodings.values() for each in e.tuning} for found in sets}
    edge = [found.name for found in sets if len(grids[found.name]) > 1 and found.rate in _ends(grids[found.name])]
    if not edge:
        return []
    tuned = sum(len(grid) > 1 for grid in grids.values())
    rule = "the learning rate chosen is the lowest or highest of its grid: a better one may lie outside, and accuracies"
    return [f"On {len(edge)} of {tuned} tuned data sets ({', '.join(edge)}) {rule} may be below what is possible."]


def _ends(values: set[float]) -> tuple[float, float]:
    return min(values), max(values)


def _same_on_one_axis(sets: Sequence[DataSetResults]) -> list[str]:
    """Note encodings whose answers are the same on a data set: one result that is counted several times."""
    same: dict[str, list[str]] = {}
    for found in sets:
        by_answers: dict[tuple[str, ...], list[str]] = {}
        for name, each in found.encodings.items():
            by_answers.setdefault(tuple(each.right), []).append(name)
        for names in by_answers.values():
            if len(names) > 1:
                same.setdefault(", ".join(names), []).append(found.name)
    return [
        f"The same answers on {', '.join(where)}: one result that is counted once for each of {names}."
        for names, where in same.items()
    ]


def advice(sets: Sequence[DataSetResults], ranking: Ranking) -> list[Advice]:
    """Recommend encodings: overall, cheapest, for larger inputs, for few examples, and for three axes."""
    cases = [_choice(f"Any data: the mean of {ranking.sets} data sets", ranking), *_cheapest(sets, ranking)]
    three = [found for found in sets if len(found.data.axes) >= 3]
    for case, chosen in (
        ("Inputs larger than in training", rank(sets, "largest")),
        ("A share of the examples", rank(sets, "small")),
        ("Three axes", rank(three) if three else None),
    ):
        cases += [_choice(case, chosen)] if chosen else []
    return cases


def _choice(case: str, ranking: Ranking) -> Advice:
    behind = ranking.behind
    if not behind:
        return Advice(case, ranking.order, "no encoding is significantly ahead")
    first = behind[0]
    return Advice(
        case, [ranking.best, *ranking.tied], f"{points(ranking.difference(ranking.best, first))} over {first}"
    )


def _cheapest(sets: Sequence[DataSetResults], ranking: Ranking) -> list[Advice]:
    """Recommend the encoding with the fastest training step among those tied with the best."""
    steps = {name: step for name in (ranking.best, *ranking.tied) if (step := _step(sets, name)) is not None}
    if len(steps) < 2:
        return []
    least = min(steps, key=lambda name: steps[name])
    because = f"{steps[least]:.2f} times the step of {BASELINE}, and {NOT_DIFFERENT} from {ranking.best}"
    return [Advice("The least cost", [least], because)]


# ---- tables


def table_of_ranks(sets: Sequence[DataSetResults], ranking: Ranking) -> Table:
    """Build the table of ranks, gains, gaps and costs."""
    reach = ranks(ranking.order, ranking.pairs)
    with_baseline = BASELINE in ranking.order
    rows: list[Row] = []
    for name in ranking.order:
        gap = None if name == ranking.best else ranking.difference(ranking.best, name)
        gain = ranking.difference(name, BASELINE) if with_baseline and name != BASELINE else None
        rows.append(
            {
                **named(name),
                "rank": f"{reach[name][0]} to {reach[name][1]}",
                "mean": ranking.means[name],
                **cells("gain", gain),
                **cells("gap", gap),
                "verdict": "highest" if gap is None else verdict_of(gap, "behind", "ahead", NOT_DIFFERENT),
                "step": _step(sets, name),
            }
        )
    columns = [
        *NAMES,
        Column("rank", "Possible ranks"),
        Column("mean", "Mean top-1", "%", 1),
        *([with_interval("gain", "Gain over none", "points", 1)] if with_baseline else []),
        with_interval("gap", "Behind the highest", "points", 1),
        VERDICT,
        Column("step", "Step time, × none", digits=2),
    ]
    note = (
        f"{_RULE} {HOLM} Possible ranks: the best and the worst that the significant differences allow: with 1 to "
        "16 none is significantly ahead, but 15 others may be ahead. Step time: the median of the data sets' "
        "medians. "
        "Encodings that a data set cannot have, such as a learned table for points, are in the other tables."
    )
    return Table("Ranks over all data sets", columns, rows, note=note)


def table_of_sets(sets: Sequence[DataSetResults]) -> Table:
    """Build the table of top-1 by encoding and data set."""
    rows: list[Row] = []
    for name in _names(sets):
        row: dict[str, str | float | None] = dict(named(name))
        for found in sets:
            right = found.rights().get(name)
            row |= cells(found.name, None if right is None else in_percent(accuracy_interval(right)))
        rows.append(row)
    columns = (*NAMES, *(with_interval(found.name, _title(found), "%", 1) for found in sets))
    seeds = min(len(each.right) for found in sets for each in found.encodings.values())
    return Table("Top-1 on each data set", columns, rows, note=about_intervals(seeds))


def _names(sets: Sequence[DataSetResults]) -> list[str]:
    return list(dict.fromkeys(name for found in sets for name in found.encodings))


def _title(found: DataSetResults) -> str:
    axes = len(found.data.axes)
    return f"{found.data.title}, {axes} axes" if axes > 1 else f"{found.data.title}, 1 axis"


def table_of_conditions(sets: Sequence[DataSetResults], order: Sequence[str]) -> list[Table]:
    """Build the table of validation loss, and of top-1 under other conditions."""
    titles = {condition: title for condition, title in TITLES.items() if condition != "trained"}
    measured = {condition: [accuracies(found, condition) for found in sets] for condition in titles}
    rows: list[Row] = []
    for name in order:
        means = {
            key: [100 * float(each[name].mean()) for each in rights if name in each] for key, rights in measured.items()
        }
        conditions: dict[str, float | None] = {key: float(np.mean(e)) if e else None for key, e in means.items()}
        rows.append({**named(name), "loss": _loss(sets, name), **conditions})
    kept = [key for key in titles if any(row[key] is not None for row in rows)]
    if not kept:
        return []
    loss = Column("loss", "Validation loss, as trained", digits=2)
    columns = (*NAMES, loss, *(Column(key, titles[key], "%", 1) for key in kept))
    note = (
        "Means over the data sets that have it, otherwise top-1; other sizes are those of data on a lattice, without "
        "more training. Loss is cross entropy in nats."
    )
    return [Table("Under other conditions", columns, rows, note=note)]


def _loss(sets: Sequence[DataSetResults], name: str) -> float | None:
    """Compute the mean validation loss over seeds and data sets; None if one is not finite."""
    losses = [loss for found in sets if name in found.encodings for loss in found.encodings[name].losses]
    return None if None in losses else float(np.mean([loss for loss in losses if loss is not None]))


def _step(sets: Sequence[DataSetResults], name: str) -> float | None:
    steps = [found.encodings[name].steps for found in sets if name in found.encodings]
    medians = [float(np.median(each)) for each in steps if each]
    return float(np.median(medians)) if medians else None


# ---- figures


def figure_of_ranks(ranking: Ranking) -> Figure:
    """Build the figure of gaps to the highest mean, one row per encoding."""
    rows: list[Row] = [
        {
            "name": name,
            **cells("gap", (0.0, 0.0, 0.0) if name == ranking.best else ranking.difference(ranking.best, name)),
        }
        for name in ranking.order
    ]
    return Figure(
        name="behind-the-highest",
        kind="points",
        title=f"Behind the highest, mean over {ranking.sets} data sets",
        alt=f"Points of top-1 behind {ranking.best}, the mean over data sets, one row per encoding, with its interval.",
        x=Axis("gap", f"Behind {ranking.best}, the highest", "points"),
        y=Axis("name", "Encoding", scale="category"),
        rows=rows,
        low="gap_low",
        high="gap_high",
        caption=HOLM,
    )


def figure_of_costs(sets: Sequence[DataSetResults], ranking: Ranking) -> list[Figure]:
    """Build the figure of mean top-1 by step time; an empty list without costs."""
    steps = {name: _step(sets, name) for name in ranking.order}
    rows: list[Row] = [
        {"name": name, "step": step, "mean": ranking.means[name]} for name, step in steps.items() if step is not None
    ]
    if not rows:
        return []
    return [
        Figure(
            name="top1-by-cost",
            kind="points",
            title="Accuracy and cost",
            alt="Mean top-1 over data sets by the time of a training step relative to none.",
            x=Axis("step", "Step time", "× none"),
            y=Axis("mean", "Mean top-1", "%"),
            rows=rows,
            series="name",
        )
    ]


def notes_of(sets: Sequence[DataSetResults]) -> list[str]:
    """Write the notes: number and time of training runs, provenance of each data set, omissions."""
    trainings = sum(found.trainings for found in sets)
    hours = sum(found.seconds for found in sets) / 3600
    trained = [f"{trainings:,} training runs took {hours:.1f} hours in total."] if trainings else []
    from_where = [
        f"{found.name}: {found.arguments}; rate × {found.rate:g}; {found.date}, commit {found.commit or 'unknown'}, "
        f"{found.machine.get('cpu', 'unknown processor')}."
        for found in sets
    ]
    return [*trained, *from_where, *(f"{found.name}: {note}" for found in sets for note in found.notes)]
