"""A published checkpoint and the data to evaluate it on."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchrope.integrations.published import comrope, convert, family_of, options_of, rope_swin, rope_vit, timm_vit
from torchrope.integrations.published.files import read_state
from torchrope.lab.data.build import make_data
from torchrope.lab.data.config import ColourConfig, DataConfig
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.training.evaluate import keep_range
from torchrope.models import Swin, ViT

NORMALISED = {**dict.fromkeys((rope_vit, timm_vit, rope_swin), "imagenet"), comrope: "half"}
"""How inputs are normalised, by the family of the checkpoint: timm's default with DeiT's and Swin's, and ComRoPE's."""


def load_checkpoint(
    file: Path,
    config: DataConfig,
    *,
    given: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
    ranged: bool = False,
) -> tuple[ViT | Swin, DataModule]:
    """Read a published checkpoint, and set up data of its input size, normalised as its family is.

    Args:
        file: The checkpoint.
        config: Which data.
        given: Settings of the data that were chosen and stay: "size", "frames", "normalise".
        options: What `torchrope.load_published` is told.
        ranged: Whether positions at other sizes keep their range, see `keep_range`; ComRoPE's as its code has it.

    Returns:
        The model, on a GPU where there is one, and its data.

    Raises:
        FileNotFoundError: no such file.
        ValueError: what `load_published` refuses, data of other axes, channels, sizes or classes, or inputs of which
            nothing says how they are normalised.
    """
    state = read_state(file)
    family = family_of(state)
    told = {**(options or {}), **({"positions": "range"} if ranged and "positions" in options_of(family) else {})}
    model = convert(state, **told)
    assert isinstance(model, ViT | Swin)
    if ranged and "positions" not in told:
        keep_range(model)
    data = make_data(_fitted(config, model.arguments["input_size"], family, given))
    wanted = {"axes": len(model.embed.patch_size), "channels": model.arguments["in_channels"]}
    came = {"axes": data.num_axes, "channels": data.in_channels}
    for what, number in wanted.items():
        if came[what] != number:
            raise ValueError(f"--data must have the {number} {what} of the checkpoint, got {came[what]} of {data.name}")
    data.setup()
    classes = model.arguments["num_classes"]
    if classes != data.num_classes:
        raise ValueError(f"--data must have the {classes} classes of the checkpoint, got {data.num_classes}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), data


def _fitted(config: DataConfig, input_size: tuple[int, ...], family: Any, given: Collection[str]) -> DataConfig:
    """The data's settings with the size and the normalisation of a checkpoint."""
    *before, height, width = input_size
    if height != width:
        raise ValueError(f"--data has square pictures, got a checkpoint for {height} x {width} pixels")
    wanted: dict[str, Any] = {"size": width} | ({"frames": before[0]} if before and hasattr(config, "frames") else {})
    for name, value in wanted.items():
        if name in given and getattr(config, name) != value:
            rule = f"--data.{name} is that of the checkpoint, {value}"
            raise ValueError(f"{rule}; --sizes names others, got {getattr(config, name)}")
    if isinstance(config, ColourConfig) and "normalise" not in given:
        if family not in NORMALISED:
            rule = f"inputs must be normalised as in the training, which checkpoints of {family.FAMILY} do not tell"
            raise ValueError(f"{rule}; give --data.normalise, got none")
        wanted["normalise"] = NORMALISED[family]
    return replace(config, **wanted)
