"""Descriptions of data and encodings for results."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchrope.encodings import Encoding, takes
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import user_defined_parts
from torchrope_lab.engine.descriptions import TITLES, description_of, named_parts, title_of
from torchrope_lab.results import DataFacts
from torchrope_lab.statistics import constant_accuracy


def describe_data(data: DataModule) -> DataFacts:
    """Return name, sizes, counts and classes of data that is set up, and the files skipped."""
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
        chance=constant_accuracy(data.val_labels) if "classify" in data.tasks else None,
        skipped=describe_skipped(dict(data.skipped)),
    )


def describe_skipped(faults: Mapping[str, str]) -> list[str]:
    """List files that could not be read, each with the reason."""
    return [f"{path} ({reason})" for path, reason in faults.items()]


def label(encoding: str) -> str:
    """Return the display name of an encoding; nothing is imported, a class that is not loaded has its name."""
    parts = [part.strip() for part in encoding.split("+")]
    try:
        known = named_parts(encoding)
    except ValueError:
        if not user_defined_parts(encoding):
            raise
        return " + ".join(_label_of_name(part) for part in parts)
    return " + ".join(description_of(part).title for part in known) + _blocks(encoding)


def _label_of_name(part: str) -> str:
    """Return the display name of one part of an encoding's name, by its class name if it is user-defined."""
    user_defined = user_defined_parts(part)
    return f"{user_defined[0][1]}{_blocks(part)}" if user_defined else label(part)


def _blocks(encoding: str) -> str:
    block = encoding.rpartition(":")[2]
    return f", blocks of {block}" if block.isdecimal() else ""


def label_of(model: nn.Module, rotary: Encoding | None) -> str:
    """Return the display name of a model's rotary encoding, absolute encoding and bias; of other libraries' models too.

    Example:
        >>> import torchrope as tr
        >>> model = tr.ViT((8, 8), patch_size=2, dim=32, depth=1, num_heads=2, encoding="learned+liere:8")
        >>> label_of(model, model.encodings[0])
        'learned APE + LieRE, blocks of 8'
    """
    biases: Any = getattr(model, "biases", None) or [
        bias for stage in getattr(model, "stages", []) for bias in getattr(stage, "biases", [])
    ]
    parts = [getattr(model, "absolute", None), *biases[:1], rotary]
    titles = [title_of(part) for part in parts if part is not None] or [TITLES["none"]]
    sized = rotary is not None and takes(type(rotary), "block_size")
    return " + ".join(titles) + (f", blocks of {rotary.block_size}" if rotary is not None and sized else "")
