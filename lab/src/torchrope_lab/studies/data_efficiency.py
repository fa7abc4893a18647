"""Accuracy with 30 % to 100 % of the training data (LieRE figure 2b; second version, figure 3b)."""

from math import log2

import numpy as np

from torchrope_lab.conclusion import Interval, caveat, join_names
from torchrope_lab.engine.estimates import (
    VERDICT,
    drawn_means,
    estimate_in,
    format_interval,
    not_learned,
    simultaneous_intervals,
    table_of,
    top1,
    with_interval,
)
from torchrope_lab.engine.grid import (
    NAME_COLUMNS,
    Accuracy,
    AgainstMixed,
    AgainstReference,
    Cell,
    Factor,
    Levels,
    OneFactor,
    Results,
    Section,
    Slope,
)
from torchrope_lab.engine.reach import Reach
from torchrope_lab.engine.reference import described
from torchrope_lab.engine.study import Lab

SHARES = (30, 40, 50, 60, 70, 80, 90, 100)


def _levels(lab: Lab) -> Levels:
    """Return the shares with an example of every class or more, the largest of all data as configured."""
    total, classes = lab.data.counts[0], lab.data.num_classes
    sizes = {share: round(share * total / 100) for share in SHARES}
    settings = {share: {"data": {} if share == 100 else {"train_size": size}} for share, size in sizes.items()}
    return {share: settings[share] for share, size in sizes.items() if size >= classes}


def _data_needed(results: Results) -> Section:
    """Estimate the share of the data with which every encoding reaches the reference trained on all of it."""
    lab, reference = results.lab, results.reference
    rights = {(cell.name, cell.level): cell.right for cell in results.cells}
    if top1(rights[reference, 100]).low <= 100 * results.chance:
        return Section(answer=f"{not_learned(f'The reference, {reference},', results.chance)}.")
    drawn_right = dict(zip(rights, drawn_means([*rights.values()]).T, strict=True))  # of the same draws
    target, drawn_target = rights[reference, 100].mean(), drawn_right[reference, 100]
    reached = {}
    for name in results.grid:
        keys = [key for key in rights if key[0] == name]
        shares = np.array([share for _, share in keys], dtype=float)
        curve = np.array([rights[key].mean() for key in keys])
        draws = np.stack([drawn_right[key] for key in keys], axis=1)
        reached[name] = Reach.of(shares, curve, target, draws, drawn_target)
    own, others = reached[reference], {name: reach for name, reach in reached.items() if name != reference}
    found = simultaneous_intervals(reached)
    spared = simultaneous_intervals({name: reach.log_ratio(own) for name, reach in others.items() if not reach.missed})

    def needed(cell: Cell) -> Interval | None:
        estimate, low, high = found[cell.name]
        return None if reached[cell.name].missed else Interval(estimate, low, min(high, 100.0))

    def verdict(cell: Cell) -> str:
        if cell.name == reference:
            return "the reference"
        if cell.name not in spared:
            return "does not reach it"
        return "needs less" if spared[cell.name].low > 0 else "not significant"

    note = (
        f"Share of the data at which top-1 first reaches that of {described(reference, 'the')} trained on all of it, "
        "interpolated between the shares trained on. Bootstrap over validation examples and seeds, the same for both; "
        f"intervals are simultaneous over all rows. Ends are clipped to {SHARES[0]} and 100. Verdicts compare with the "
        "share at which the reference itself first reaches that."
    )
    columns = (*NAME_COLUMNS, (with_interval("needs", "Data needed", "%", 0), needed), (VERDICT, verdict))
    title = f"Data needed for the top-1 of {described(reference)} with all of it"
    table = table_of(title, columns, map(Cell, found, found), note)
    less = sorted((row for row in table.rows if row["verdict"] == "needs less"), key=lambda row: row["needs"])  # type: ignore[arg-type, return-value]
    to_match = f"to match {described(reference)} with all of it"
    answer = f"This run cannot tell whether any encoding needs less data {to_match}"
    if less:
        share = format_interval(estimate_in(less[0], "needs"), " %", 0)
        answer = f"{len(less)} of {len(others)} encodings significantly need less data {to_match}, {less[0]['name']} "
        answer += f"the least with {share}"
    trained = results.grid[reference]
    if missing := [f"{share} %" for share in SHARES if share not in trained]:
        lab.leave_out(f"Left out: {join_names(missing)}, with too few examples for one of each class.")
    return Section(answer=f"{answer}.{caveat(len(lab.seeds))}", tables=[table])


find = OneFactor(
    factor=Factor("share", "Training data", "%"),
    levels=_levels,
    sections=[
        _data_needed,
        AgainstReference("the same examples"),
        AgainstMixed(),
        Slope(
            "Slope of the lead over the amount of data",
            "Lead gained per halving of the data",
            x=lambda share: -log2(share / 100),
            of_lead=True,
        ),
        Accuracy(
            "Smaller subsets are contained in larger ones, with balanced classes. The best epoch is chosen on the "
            "validation set itself, as in the first version of LieRE, which favours encodings whose curves vary most.",
            best_epoch=True,
        ),
    ],
    reference=True,
)
