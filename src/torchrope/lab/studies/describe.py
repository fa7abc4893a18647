"""What results say of their data and encodings, for people."""

from collections.abc import Mapping

from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.encodings import choose
from torchrope.lab.results import DataFacts


def describe_data(data: DataModule) -> DataFacts:
    """Name, sizes, counts and classes of data that is set up, and the files left out of it."""
    train, val = data.counts
    return DataFacts(
        name=data.name,
        title=data.title,
        description=data.description,
        axes=list(data.axes),
        input_size=list(data.input_size),
        num_classes=data.num_classes,
        train=train,
        val=val,
        classes=[str(name) for name in data.classes],
        chance=1 / data.num_classes if "classify" in data.tasks else None,
        skipped=describe_skipped(dict(data.skipped)),
    )


def describe_skipped(faults: Mapping[str, str]) -> list[str]:
    """Files that could not be read, each with the reason."""
    return [f"{path} ({reason})" for path, reason in faults.items()]


def label(encoding: str) -> str:
    """An encoding's name for people.

    Example:
        >>> label("learned+liere:8")
        'learned APE + LieRE, blocks of 8'
    """
    block = encoding.rpartition(":")[2]
    return " + ".join(map(_title, choose(encoding).parts)) + (f", blocks of {block}" if block.isdecimal() else "")


def _title(part: type) -> str:
    """The title of a class itself, not of its base class, or its name."""
    return vars(part).get("title") or part.__name__
