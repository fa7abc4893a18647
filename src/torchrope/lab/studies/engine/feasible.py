"""Which runs a model and its data allow."""

from collections.abc import Iterable

from torchrope.lab.encodings import choose
from torchrope.lab.studies.engine.runs import Run
from torchrope.lab.studies.engine.study import Lab


def feasible(lab: Lab, runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """Leave out what a model refuses, such as blocks that do not fill its heads.

    Args:
        lab: Of the study.
        runs: Wanted.

    Returns:
        Those that can be, in their order, and a note for each encoding left out, with the reason.

    Raises:
        ValueError: an unknown name.
    """
    kept, notes = [], {}
    for run in runs:
        choose(run.encoding)
        try:
            lab.blueprint(run)
        except ValueError as error:
            notes[run.encoding] = f"{run.encoding} is left out: {error}."
        else:
            kept.append(run)
    return kept, list(notes.values())
