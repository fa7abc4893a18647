"""Select the runs whose model can be built for the data."""

from collections.abc import Iterable

from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.studies.engine.runs import Run
from torchrope_lab.studies.engine.study import Lab


def feasible(lab: Lab, runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """Leave out runs whose model cannot be built, for example because head_dim is not divisible by the block size.

    Args:
        lab: Lab of the study.
        runs: The requested runs.

    Returns:
        The feasible runs, in order, and a note for each encoding left out, with the reason.

    Raises:
        ValueError: a name is unknown.
    """
    feasible_runs, notes = [], {}
    for run in runs:
        resolve_encoding(run.encoding)
        try:
            lab.blueprint(run)
        except ValueError as error:
            notes[run.encoding] = f"{run.encoding} is left out: {error}."
        else:
            feasible_runs.append(run)
    lab.left_out |= dict.fromkeys(notes.values())
    return feasible_runs, list(notes.values())
