"""Ranks over data sets, tables, figures and advice of a benchmark, from its entry."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np

from torchrope.lab.benchmark.entry import Entry, OfEncoding, OfSet, Rights, unpack
from torchrope.lab.conclusion import BASELINE, Interval, join_names, one_seed
from torchrope.lab.results import Advice, Axis, Column, Figure, Findings, Row, Table
from torchrope.lab.statistics import accuracy_interval, differences_over_sets, ranks
from torchrope.lab.studies.engine.estimates import (
    HOLM,
    NAMES,
    VERDICT,
    about_intervals,
    cells,
    contrasts,
    in_percent,
    named,
    points,
    verdict_of,
    with_interval,
)

Pairs = Mapping[tuple[str, str], Interval]
_RULE = (
    "The mean over data sets of the difference on each, every set counting alike, on the same examples and seeds. "
    "It holds for these data sets: what another one would show is not in the interval."
)
_LEARNING = "The learning rate was chosen on training examples held out for it, the same for all encodings of a set."
_LIMITS = (
    "Models are small, trained from scratch on thousands of examples; what holds for large models on millions is not "
    "shown."
)


def find(entry: Entry) -> Findings:
    """All that an entry shows, its answer first."""
    everywhere = on_every_set(entry.sets)
    seeds = min(len(each.right) for found in entry.sets for each in found.encodings.values())
    if len(everywhere) < 2:
        return Findings(
            answer="Fewer than two encodings were trained on every data set, so that none can be ranked.",
            tables=[table_of_sets(entry.sets)],
            notes=notes_of(entry.sets),
        )
    pairs = differ(entry.sets, everywhere)
    order = ranked(entry.sets, everywhere)
    return Findings(
        answer=answer(order, pairs, len(entry.sets), seeds),
        tables=[
            table_of_ranks(entry.sets, order, pairs, seeds),
            table_of_sets(entry.sets),
            *table_of_conditions(entry.sets, order),
            *table_of_own_rates(entry.sets),
        ],
        figures=[figure_of_ranks(order, pairs), figure_of_sets(entry.sets), *figure_of_costs(entry.sets, order)],
        notes=[_RULE, _LEARNING, _LIMITS, *notes_of(entry.sets)],
        advice=[advice(order, pairs, len(entry.sets))],
    )


# ---- ranks


def on_every_set(sets: Sequence[OfSet]) -> list[str]:
    """Encodings that all data sets have."""
    return [name for name in sets[0].encodings if all(name in found.encodings for found in sets)]


def differ(sets: Sequence[OfSet], names: Sequence[str]) -> dict[tuple[str, str], Interval]:
    """Differences of all pairs in points, the mean over data sets, at 5 % over all pairs."""
    rights = [{name: right for name, right in found.rights().items() if name in names} for found in sets]
    pairs = list(combinations(names, 2))
    return dict(zip(pairs, map(in_percent, differences_over_sets(rights, pairs)), strict=True))


def ranked(sets: Sequence[OfSet], names: Sequence[str]) -> list[str]:
    """Names by their mean accuracy over data sets, the highest first."""
    means = mean_top1(sets)
    return sorted(names, key=lambda name: (-means[name], name))


def mean_top1(sets: Sequence[OfSet]) -> dict[str, float]:
    """Top-1 in percent, the mean over data sets, of the encodings that all of them have."""
    rights = [found.rights() for found in sets]
    return {name: 100 * float(np.mean([each[name].mean() for each in rights])) for name in on_every_set(sets)}


def between(pairs: Pairs, one: str, other: str) -> Interval:
    """The difference of one to another, whichever order it was computed in."""
    if (one, other) in pairs:
        return pairs[one, other]
    estimate, low, high = pairs[other, one]
    return Interval(-estimate, -high, -low)


def tied(order: Sequence[str], pairs: Pairs) -> list[str]:
    """Names that cannot be told apart from the first."""
    return [name for name in order[1:] if between(pairs, order[0], name).low <= 0]


# ---- sentences


def answer(order: Sequence[str], pairs: Pairs, sets: int, seeds: int) -> str:
    """Who leads over all data sets, by how much, and who cannot be told apart from it."""
    best, equals = order[0], tied(order, pairs)
    over = f"Over {sets} data sets" if sets > 1 else "On one data set"
    if len(equals) == len(order) - 1:
        return f"{over} the {len(order)} encodings cannot be told apart on average.{one_seed(seeds)}"
    behind = next(name for name in order if name not in (best, *equals))
    lead = points(between(pairs, best, behind))
    if not equals:
        return f"{over} {best} is measurably ahead of all others on average, {lead} over {behind}.{one_seed(seeds)}"
    apart = f"{over} {join_names([best, *equals])} cannot be told apart on average"
    return f"{apart}; {best} is ahead of {behind} by {lead}.{one_seed(seeds)}"


def advice(order: Sequence[str], pairs: Pairs, sets: int) -> Advice:
    """The best of all data sets and those not told apart from it."""
    equals = tied(order, pairs)
    behind = next((name for name in order if name not in (order[0], *equals)), None)
    because = (
        "no encoding is measurably ahead"
        if behind is None
        else f"{points(between(pairs, order[0], behind))} over {behind}"
    )
    return Advice(f"Small models, the mean of {sets} data sets", [order[0], *equals], because)


# ---- tables


def table_of_ranks(sets: Sequence[OfSet], order: Sequence[str], pairs: Pairs, seeds: int) -> Table:
    """Rank, lead over the model without positions, distance to the best, and cost."""
    reach, means = ranks(order, pairs), mean_top1(sets)
    rows: list[Row] = []
    for name in order:
        gap = None if name == order[0] else between(pairs, order[0], name)
        gain = between(pairs, name, BASELINE) if BASELINE in order and name != BASELINE else None
        step = _step(sets, name)
        rows.append(
            {
                **named(name),
                "rank": f"{reach[name][0]} to {reach[name][1]}",
                "mean": means[name],
                **cells("gain", gain),
                **cells("gap", gap),
                "verdict": "highest" if gap is None else verdict_of(gap, "behind", "ahead", "not told apart"),
                "step": step,
            }
        )
    columns = [
        *NAMES,
        Column("rank", "Rank"),
        Column("mean", "Mean top-1", "%", 1),
        *([with_interval("gain", "Gain over none", "points", 1)] if BASELINE in order else []),
        with_interval("gap", "Behind the highest", "points", 1),
        VERDICT,
        Column("step", "Step time, × none", digits=2),
    ]
    note = (
        f"{_RULE} An interval excludes 0 where the difference is measurable, at 5 % over all pairs (Holm). Rank: from "
        "the encodings measurably ahead to those measurably behind. Step time: the median of the data sets' medians."
    )
    return Table("Ranks over all data sets", columns, rows, note=note)


def table_of_sets(sets: Sequence[OfSet]) -> Table:
    """Top-1 of every encoding on every data set."""
    names = list(dict.fromkeys(name for found in sets for name in found.encodings))
    rows: list[Row] = []
    for name in names:
        row: dict[str, str | float | None] = dict(named(name))
        for found in sets:
            right = found.rights().get(name)
            row |= cells(found.name, None if right is None else in_percent(accuracy_interval(right)))
        rows.append(row)
    columns = (*NAMES, *(with_interval(found.name, _told(found), "%", 1) for found in sets))
    seeds = min(len(each.right) for found in sets for each in found.encodings.values())
    return Table("Top-1 on each data set", columns, rows, note=about_intervals(seeds))


def _told(found: OfSet) -> str:
    return (
        f"{found.data.title}, {len(found.data.axes)} axes"
        if len(found.data.axes) > 1
        else f"{found.data.title}, 1 axis"
    )


def table_of_conditions(sets: Sequence[OfSet], order: Sequence[str]) -> list[Table]:
    """Mean top-1 with fewer examples, in random order, and at the largest and the smallest other size."""
    conditions: dict[str, Callable[[OfEncoding], Rights]] = {
        "small": lambda each: each.small,
        "shuffled": lambda each: each.shuffled,
        "smallest": lambda each: _size(each.sizes, 0),
        "largest": lambda each: _size(each.sizes, -1),
    }
    rows: list[Row] = [
        {**named(name), **{key: _mean(sets, name, what) for key, what in conditions.items()}} for name in order
    ]
    titles = dict(small="Fewer examples", shuffled="In random order", smallest="Smallest size", largest="Largest size")
    kept = [key for key in titles if any(row[key] is not None for row in rows)]
    if not kept:
        return []
    columns = (*NAMES, *(Column(key, titles[key], "%", 1) for key in kept))
    note = (
        "Mean top-1 over the data sets that have it; other sizes are those of data on a lattice, without more training."
    )
    return [Table("Under other conditions", columns, rows, note=note)]


def _size(sizes: Mapping[str, Rights], at: int) -> Rights:
    """Right or wrong at the smallest (0) or the largest (-1) size."""
    in_order = sorted(sizes, key=lambda size: int(np.prod([int(side) for side in size.split("×")])))
    return sizes[in_order[at]] if in_order else ()


def _mean(sets: Sequence[OfSet], name: str, what: Callable[[OfEncoding], Rights]) -> float | None:
    rows = [(what(found.encodings[name]), found.examples) for found in sets]
    known = [100 * float(unpack(row, examples).mean()) for row, examples in rows if row]
    return float(np.mean(known)) if len(known) else None


def table_of_own_rates(sets: Sequence[OfSet]) -> list[Table]:
    """What a learning rate of its own brings each encoding, where tuning chose another than that of all."""
    keys = [(found, name) for found in sets for name, each in found.encodings.items() if each.own]
    if not keys:
        return []
    rows: list[Row] = []
    for found in sets:
        names = [name for own, name in keys if own is found]
        own, common = found.rights("own"), found.rights()
        gains = contrasts([(own[name], common[name]) for name in names])
        for name, gain in zip(names, gains, strict=True):
            each = found.encodings[name]
            rows.append(
                {
                    **named(name),
                    "set": found.data.title,
                    "common": found.rate,
                    "rate": each.own_rate,
                    **cells("gain", gain),
                    "verdict": verdict_of(gain),
                }
            )
    columns = (
        *NAMES,
        Column("set", "Data set"),
        Column("common", "Rate of all", "×", 2),
        Column("rate", "Own rate", "×", 2),
        with_interval("gain", "Gain at its own rate", "points", 1),
        VERDICT,
    )
    return [Table("A learning rate of its own", columns, rows, note=f"{HOLM} Of each data set by itself.")]


def _step(sets: Sequence[OfSet], name: str) -> float | None:
    medians = [float(np.median(found.encodings[name].steps)) for found in sets if found.encodings[name].steps]
    return float(np.median(medians)) if medians else None


# ---- figures


def figure_of_ranks(order: Sequence[str], pairs: Pairs) -> Figure:
    """Behind the highest, with intervals, one row an encoding."""
    rows: list[Row] = [
        {"name": name, **cells("gap", (0.0, 0.0, 0.0) if name == order[0] else between(pairs, order[0], name))}
        for name in order
    ]
    return Figure(
        name="behind-the-highest",
        kind="points",
        title="Behind the highest, mean over data sets",
        alt=f"Points of top-1 behind {order[0]}, the mean over data sets, one mark per encoding with its interval.",
        x=Axis("name", "Encoding", scale="category"),
        y=Axis("gap", "Behind the highest", "points"),
        rows=rows,
        low="gap_low",
        high="gap_high",
        caption="An interval that excludes 0 shows a measurable difference, at 5 % over all pairs (Holm).",
    )


def figure_of_sets(sets: Sequence[OfSet]) -> Figure:
    """Top-1 of every encoding on every data set."""
    rows: list[Row] = [
        {
            "set": found.data.title,
            "name": name,
            **dict(zip(("top1", "low", "high"), in_percent(accuracy_interval(right)), strict=True)),
        }
        for found in sets
        for name, right in found.rights().items()
    ]
    return Figure(
        name="top1-by-set",
        kind="points",
        title="Top-1 on each data set",
        alt="Top-1 in percent of every encoding, one small figure per data set.",
        x=Axis("name", "Encoding", scale="category"),
        y=Axis("top1", "Top-1", "%"),
        rows=rows,
        panel="set",
        low="low",
        high="high",
        caption="Intervals are 95 %.",
    )


def figure_of_costs(sets: Sequence[OfSet], order: Sequence[str]) -> list[Figure]:
    """Mean accuracy beside the time of a training step."""
    means, steps = mean_top1(sets), {name: _step(sets, name) for name in order}
    rows: list[Row] = [
        {"name": name, "step": step, "mean": means[name]} for name, step in steps.items() if step is not None
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


def notes_of(sets: Sequence[OfSet]) -> list[str]:
    """What was left out, by data set, and where each set's numbers are from."""
    from_where = [
        f"{found.name}: {found.arguments}; rate × {found.rate:g}; {found.date}, commit {found.commit or 'unknown'}, "
        f"{found.machine.get('cpu', 'unknown processor')}."
        for found in sets
    ]
    return [*from_where, *(f"{found.name}: {note}" for found in sets for note in found.notes)]
