"""Check an entry against its data on this machine: examples, split and classes must be the same."""

import shlex

from torchrope_lab.data.build import make_data
from torchrope_lab.leaderboard.entry import DataSetResults
from torchrope_lab.options import parse
from torchrope_lab.studies.engine.config import StudyConfig


def check_against_data(measured: DataSetResults) -> str:
    """Compare an entry's data set with the same data on this machine.

    Returns:
        The outcome in words: the data is the same, or the reason why it was not checked.

    Raises:
        ValueError: the data on this machine differs.
    """
    try:
        data = make_data(parse("leaderboard", "", StudyConfig, shlex.split(measured.arguments)).config.data)
        data.setup()
    except (ValueError, OSError, ImportError) as error:
        return f"not checked, because the data set cannot be loaded here: {' '.join(str(error).split())}"
    of_entry = {
        "fingerprint": measured.fingerprint,
        "validation examples": measured.data.val,
        "classes": measured.data.num_classes,
    }
    local = {"fingerprint": data.fingerprint, "validation examples": data.counts[1], "classes": data.num_classes}
    for name, value in of_entry.items():
        if value != local[name]:
            raise ValueError(f"set {measured.name}: {name} must be {local[name]} as in the local data, got {value}")
    return "same data as on this machine"
