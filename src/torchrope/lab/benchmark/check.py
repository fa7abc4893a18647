"""Checks of an entry that need its data: the same examples, split and classes as they are here."""

import shlex

from torchrope.lab.benchmark.entry import OfSet
from torchrope.lab.data.build import make_data
from torchrope.lab.options import parse
from torchrope.lab.studies.engine.config import StudyConfig


def check_against_data(found: OfSet) -> str:
    """Compare an entry's data set with the same data here.

    Returns:
        What was found, for people: that it is the same, or why it was not checked.

    Raises:
        ValueError: the data is here and is other data.
    """
    try:
        data = make_data(parse("benchmark", "", StudyConfig, shlex.split(found.arguments)).config.data)
        data.setup()
    except (ValueError, OSError, ImportError) as error:
        return f"not checked against its data, which this machine lacks: {' '.join(str(error).split())}"
    told = {"fingerprint": found.fingerprint, "validation examples": found.data.val, "classes": found.data.num_classes}
    here = {"fingerprint": data.fingerprint, "validation examples": data.counts[1], "classes": data.num_classes}
    for name, value in told.items():
        if value != here[name]:
            raise ValueError(f"set {found.name}: {name} must be {here[name]}, those of the data here, got {value}")
    return "of the same data as here"
