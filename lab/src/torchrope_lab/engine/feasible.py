"""Select the runs whose model can be built for the data."""

from collections.abc import Iterable

from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.runs import Run
from torchrope_lab.engine.study import Lab


def feasible(lab: Lab, runs: Iterable[Run], where: str = "") -> list[Run]:
    """Return the runs whose model can be built; `lab.left_out` gets a reason, beginning with `where`, for others."""
    feasible_runs = []
    for run in runs:
        resolve_encoding(run.encoding)
        try:
            lab.blueprint(run)
        except ValueError as error:
            lab.leave_out(f"{where}{run.encoding} is left out: {error}.")
        else:
            feasible_runs.append(run)
    return feasible_runs
