"""What results say of their data and encodings, for people."""

from collections.abc import Mapping
from typing import Any

from torchrope.encodings import choose
from torchrope.lab.data.datamodule import DataModule


def describe_data(data: DataModule) -> dict[str, Any]:
    """Name, sizes, counts and classes of data that is set up, and the files left out of it."""
    train, val = data.counts
    return {
        "name": data.name,
        "title": data.title,
        "description": data.description,
        "axes": list(data.axes),
        "input_size": list(data.input_size),
        "num_classes": data.num_classes,
        "train": train,
        "val": val,
        "chance": 1 / data.num_classes if "classify" in data.tasks else None,
        "skipped": describe_skipped(dict(data.skipped)),
    }


def describe_skipped(faults: Mapping[str, str]) -> list[str]:
    """Files that could not be read, each with the reason."""
    return [f"{path} ({reason})" for path, reason in faults.items()]


def label(encoding: str) -> str:
    """An encoding's name for people.

    Example:
        >>> label("learned+liere:8")
        'learned APE + LieRE, blocks of 8'
    """
    block = encoding.rpartition(":")[2] if ":" in encoding else ""
    return " + ".join(part.title for part in choose(encoding).parts) + (f", blocks of {block}" if block else "")
