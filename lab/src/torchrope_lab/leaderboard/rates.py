"""Effect of a separately tuned learning rate on each encoding's accuracy and on the order of encodings."""

from collections.abc import Sequence

import numpy as np

from torchrope_lab.leaderboard.entry import DataSetResults
from torchrope_lab.results import Column, Row, Table
from torchrope_lab.studies.engine.estimates import (
    NAMES,
    SIMULTANEOUS,
    VERDICT,
    cells,
    contrasts,
    named,
    verdict_of,
    with_interval,
)


def tables_of_rates(sets: Sequence[DataSetResults]) -> list[Table]:
    """Build the tables of the order at the common and at the own learning rate, and of the gain on each data set."""
    return [*_order(sets), *_gains(sets)]


def order_changes(sets: Sequence[DataSetResults]) -> str | None:
    """Describe how separately tuned learning rates change the order; None if fewer than two encodings were tuned."""
    means = _means(sets)
    if len(means) < 2:
        return None
    common, own = _ordered(means, 0), _ordered(means, 1)
    if common == own:
        return f"With learning rates of their own the {len(means)} tuned encodings keep their order: {', '.join(own)}."
    return f"At the common learning rate the order is {', '.join(common)}; at rates of their own {', '.join(own)}."


def _means(sets: Sequence[DataSetResults]) -> dict[str, tuple[float, float]]:
    """Compute mean top-1 in percent at the common and at the own rate, for encodings tuned on all data sets."""
    names = [name for name in sets[0].encodings if all(_tuned(found, name) for found in sets)]
    found: dict[str, tuple[float, float]] = {}
    for name in names:
        common = [each.rights()[name].mean() for each in sets]
        own = [each.rights("own").get(name, each.rights()[name]).mean() for each in sets]
        found[name] = (100 * float(np.mean(common)), 100 * float(np.mean(own)))
    return found


def _tuned(found: DataSetResults, name: str) -> bool:
    return name in found.encodings and bool(found.encodings[name].tuning)


def _ordered(means: dict[str, tuple[float, float]], at: int) -> list[str]:
    return sorted(means, key=lambda name: (-means[name][at], name))


def _order(sets: Sequence[DataSetResults]) -> list[Table]:
    means = _means(sets)
    if len(means) < 2:
        return []
    common, own = _ordered(means, 0), _ordered(means, 1)
    rows: list[Row] = [
        {
            **named(name),
            "common": means[name][0],
            "common_place": common.index(name) + 1,
            "own": means[name][1],
            "own_place": own.index(name) + 1,
        }
        for name in common
    ]
    columns = (
        *NAMES,
        Column("common", "Mean top-1 at the common rate", "%", 1),
        Column("common_place", "Place", digits=0),
        Column("own", "Mean top-1 at its own rate", "%", 1),
        Column("own_place", "Place", digits=0),
    )
    note = "Means over all data sets. If the own rate is the common one, both means are of the same runs."
    return [Table("The order at the common learning rate and at learning rates of their own", columns, rows, note=note)]


def _gains(sets: Sequence[DataSetResults]) -> list[Table]:
    rows: list[Row] = []
    for found in sets:
        own, common = found.rights("own"), found.rights()
        gains = contrasts([(own[name], common[name]) for name in own])
        for name, gain in zip(own, gains, strict=True):
            row: Row = {"set": found.data.title, "common": found.rate, "rate": found.encodings[name].own_rate}
            rows.append({**named(name), **row, **cells("gain", gain), "verdict": verdict_of(gain)})
    if not rows:
        return []
    columns = (
        *NAMES,
        Column("set", "Data set"),
        Column("common", "Common rate", "×", 2),
        Column("rate", "Own rate", "×", 2),
        with_interval("gain", "Gain at its own rate", "points", 1),
        VERDICT,
    )
    return [Table("A learning rate of its own", columns, rows, note=f"{SIMULTANEOUS} Of each data set separately.")]
