"""Descriptions of data and encodings for results."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchrope.encodings import Encoding, NoEncoding, PoseEncoding
from torchrope.encodings.names import takes
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.encodings import pose_use, resolve_encoding
from torchrope.lab.results import DataFacts


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
        chance=1 / data.num_classes if "classify" in data.tasks else None,
        skipped=describe_skipped(dict(data.skipped)),
    )


def describe_skipped(faults: Mapping[str, str]) -> list[str]:
    """List files that could not be read, each with the reason."""
    return [f"{path} ({reason})" for path, reason in faults.items()]


def label(encoding: str) -> str:
    """Return the display name of an encoding.

    Example:
        >>> label("learned+liere:8")
        'learned APE + LieRE, blocks of 8'
    """
    block = encoding.rpartition(":")[2]
    poses = {"action": [PoseEncoding.title], "numbers": ["numbers of cameras"], None: []}[pose_use(encoding)]
    others = [_title(part) for part in resolve_encoding(encoding).parts if not poses or part is not NoEncoding]
    return " + ".join([*poses, *others]) + (f", blocks of {block}" if block.isdecimal() else "")


def label_of(model: nn.Module, rotary: Encoding | None) -> str:
    """Return the display name of a model's encodings.

    Args:
        model: A `ViT` or `Swin`, whose absolute encoding and bias are included, or another library's.
        rotary: The rotary encoding.

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
    titles = [_title(type(part)) for part in parts if part is not None] or [_title(NoEncoding)]
    sized = rotary is not None and takes(type(rotary), "block_size")
    return " + ".join(titles) + (f", blocks of {rotary.block_size}" if rotary is not None and sized else "")


def _title(part: type) -> str:
    """Return the title that a class defines itself, not its base class, or its name."""
    return vars(part).get("title") or part.__name__
