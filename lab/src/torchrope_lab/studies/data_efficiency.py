"""Accuracy with 30 % to 100 % of the training data (LieRE figure 2b; second version, figure 3b)."""

from math import log2

import numpy as np

from torchrope_lab.conclusion import Interval, join_names
from torchrope_lab.engine.estimates import simultaneous_intervals
from torchrope_lab.engine.grid import (
    Accuracy,
    AgainstMixed,
    AgainstReference,
    Factor,
    Levels,
    OneFactor,
    Results,
    Section,
    Slope,
)
from torchrope_lab.engine.long_table import (
    TOP1,
    VERDICT,
    Cell,
    Quantity,
    name_columns,
    not_learned,
    table_of,
    with_interval,
)
from torchrope_lab.engine.reach import Reach, factors, reach_sentence, reach_verdict
from torchrope_lab.engine.reference import all_but, described
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
    lab, reference, top1 = results.lab, results.reference, results.top1
    whole, trained = Cell(reference, 100), results.levels(reference)
    if missing := [f"{share} %" for share in SHARES if share not in trained]:
        lab.leave_out(f"Left out: {join_names(missing)}, with too few examples for one of each class.")
    if top1.interval(whole).low <= 100 * results.chance:
        return Section(answer=f"{not_learned(f'The reference, {reference},', results.chance)}.")
    drawn = {cell: each.drawn for cell, each in Quantity(top1.values, TOP1).estimates.items()}  # of the same draws
    reach = {}
    for arm in results.arms:
        cells = [cell for cell in results.runs if cell.arm == arm]
        curve = np.array([top1.values[cell].mean() for cell in cells])
        draws = np.stack([drawn[cell] for cell in cells], axis=1)
        shares = np.array([cell.level for cell in cells], dtype=float)
        reach[arm] = Reach.of(shares, curve, top1.values[whole].mean(), draws, drawn[whole])
    less, share = factors(reach, all_but(reference, reach)), simultaneous_intervals(reach)

    def needed(cell: Cell) -> Interval | None:
        estimate, low, high = share[cell.arm]
        return None if reach[cell.arm].missed else Interval(estimate, low, min(high, 100.0))

    columns = (
        *name_columns(),
        (with_interval("needs", "Data needed", "%", 0), needed),
        (VERDICT, lambda cell: reach_verdict(reach, less, cell, ("needs less", "needs more"))),
    )
    note = (
        f"Share of the data at which top-1 first reaches that of {described(reference, 'the')} trained on all of it, "
        f"interpolated. Intervals are simultaneous over all rows, with ends clipped to {SHARES[0]} and 100."
    )
    title = f"Data needed for the top-1 of {described(reference)} with all of it"
    return Section(
        answer=reach_sentence("with less data", reference, less, len(reach) - 1, len(lab.seeds)),
        tables=[table_of(title, columns, map(Cell, reach), note)],
    )


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
