"""Accuracy gains of encodings over a model without positions, by axes and by number of training examples."""

from collections.abc import Mapping, Sequence

from torchrope_lab.conclusion import BASELINE, Interval
from torchrope_lab.leaderboard.conditions import HOLM, Condition, Contrast, contrasted, sets_with
from torchrope_lab.leaderboard.entry import DataSetResults
from torchrope_lab.results import Axis, Figure, Row, Table
from torchrope_lab.studies.engine.estimates import NAMES, cells, named, with_interval


def by_axes(sets: Sequence[DataSetResults]) -> dict[str, list[DataSetResults]]:
    """Group data sets by the names of their axes, such as "height × width"."""
    groups: dict[str, list[DataSetResults]] = {}
    for found in sets:
        groups.setdefault(" × ".join(found.data.axes), []).append(found)
    return groups


def effects(sets: Sequence[DataSetResults], order: Sequence[str]) -> tuple[list[Table], list[Figure]]:
    """Build tables of gains by axes and by number of examples, and a heat map of gains by data set.

    Args:
        sets: Data sets; without those that lack "none" nothing is returned.
        order: Encodings in the order of rows; those that it lacks follow.
    """
    if not all(BASELINE in found.encodings for found in sets):
        return [], []
    others = dict.fromkeys(name for found in sets for name in found.encodings if name != BASELINE)
    names = [*(name for name in order if name in others), *(name for name in others if name not in order)]
    axes = _gains(names, {key: (group, "trained") for key, group in by_axes(sets).items()})
    amounts: dict[str, tuple[Sequence[DataSetResults], Condition]] = {
        "all": (sets, "trained"),
        "small": (sets, "small"),
    }
    tables = [
        _table("Gain over none, by the axes of the data", names, axes, {key: key for key in axes}),
        *_by_amount(names, _gains(names, amounts)),
    ]
    return tables, [_map(sets, names)]


Gains = Mapping[str, Mapping[str, Interval]]


def _gains(names: Sequence[str], groups: Mapping[str, tuple[Sequence[DataSetResults], Condition]]) -> Gains:
    """Compute gains over "none" in points, by group, for encodings measured on all data sets of the group."""
    contrasts = {
        (key, name): Contrast(name, BASELINE, sets, condition)
        for key, (sets, condition) in groups.items()
        for name in names
        if len(sets_with(sets, (name, BASELINE), condition)) == len(sets)
    }
    gains: dict[str, dict[str, Interval]] = {key: {} for key in groups}
    for (key, name), gain in zip(contrasts, contrasted(list(contrasts.values())), strict=True):
        gains[key][name] = gain
    return gains


def _table(title: str, names: Sequence[str], gains: Gains, titles: Mapping[str, str]) -> Table:
    keys = {key: f"gain{at}" for at, key in enumerate(gains)}
    rows: list[Row] = []
    for name in names:
        row: dict[str, str | float | None] = dict(named(name))
        for key, column in keys.items():
            row |= cells(column, gains[key].get(name))
        rows.append(row)
    columns = (*NAMES, *(with_interval(column, titles[key], "points", 1) for key, column in keys.items()))
    return Table(title, columns, rows, note=HOLM)


def _by_amount(names: Sequence[str], gains: Gains) -> list[Table]:
    if not gains["small"]:
        return []
    ranked = [name for name in names if name in gains["small"]]
    titles = {"all": "All examples", "small": "Fewer examples"}
    return [_table("Gain over none, by the number of examples to train on", ranked, gains, titles)]


def _map(sets: Sequence[DataSetResults], names: Sequence[str]) -> Figure:
    rows: list[Row] = []
    for found in sets:
        rights = found.rights()
        for name in names:
            if name in rights:
                gain = 100 * float(rights[name].mean() - rights[BASELINE].mean())
                rows.append({"set": found.data.title, "name": name, "gain": round(gain, 2)})
    return Figure(
        name="gain-by-set",
        kind="cells",
        title="Gain over none on each data set",
        alt="Top-1 of each encoding minus that of the model without positions, rows: encodings, columns: data sets.",
        x=Axis("set", "Data set", scale="category"),
        y=Axis("name", "Encoding", scale="category"),
        colour=Axis("gain", "Gain over none", "points"),
        rows=rows,
        caption="Estimates without intervals; those are in the tables.",
    )
