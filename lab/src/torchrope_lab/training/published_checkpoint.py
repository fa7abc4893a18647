"""Load a published checkpoint together with data of its input size and normalisation."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchrope.checkpoints.published import comrope, convert, family_of, options_of, rope_swin, rope_vit, timm_vit
from torchrope.integrations import read_state
from torchrope.models import Swin, ViT
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.mistakes import Mistake, as_mistake
from torchrope_lab.training.evaluate import keep_range

NORMALISATION = {**dict.fromkeys((rope_vit, timm_vit, rope_swin), "imagenet"), comrope: "half"}
"""Input normalisation of each family of checkpoints: timm's default for ImageNet, or ComRoPE's."""


@as_mistake()
def load_checkpoint(
    file: Path,
    config: DataConfig,
    *,
    given: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
    ranged: bool = False,
) -> tuple[ViT | Swin, DataModule]:
    """Read a published checkpoint, and set up data of its input size, normalised as its family is."""
    # `given` are settings of the data that the user chose, which do not change: "size", "frames", "normalise".
    # With `ranged`, positions at other sizes are scaled to the training range, for ComRoPE's by their own option.
    state = read_state(file)
    family = family_of(state)
    options = {**(options or {}), **({"positions": "range"} if ranged and "positions" in options_of(family) else {})}
    model = convert(state, **options)
    assert isinstance(model, ViT | Swin)
    if ranged and "positions" not in options:
        keep_range(model)
    data = make_data(_fitted(config, model.arguments["input_size"], family, given))
    required = {"axes": len(model.embed.patch_size), "channels": model.arguments["in_channels"]}
    actual = {"axes": data.num_axes, "channels": data.in_channels}
    for what, number in required.items():
        if actual[what] != number:
            raise Mistake(f"--data must have the {number} {what} of the checkpoint, got {actual[what]} of {data.name}")
    data.setup()
    classes = model.arguments["num_outputs"]
    if classes != data.num_classes:
        raise Mistake(f"--data must have the {classes} classes of the checkpoint, got {data.num_classes}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), data


def _fitted(config: DataConfig, input_size: tuple[int, ...], family: Any, given: Collection[str]) -> DataConfig:
    """Return the data's settings with the size and the normalisation of a checkpoint."""
    *leading, height, width = input_size
    if height != width:
        raise Mistake(f"a checkpoint must be for square images, got {height} x {width} pixels")
    changes: dict[str, Any] = {"size": width}
    if leading and hasattr(config, "frames"):
        changes["frames"] = leading[0]
    for name, value in changes.items():
        if name in given and getattr(config, name) != value:
            rule = f"--data.{name} must be that of the checkpoint, {value}"
            raise Mistake(f"{rule} (for other sizes give --sizes), got {getattr(config, name)}")
    if hasattr(config, "normalise") and "normalise" not in given:
        if family not in NORMALISATION:
            rule = f"--data.normalise is required for {family.FAMILY}, whose checkpoints do not store it"
            raise Mistake(f"{rule}: imagenet, half, liere or measured")
        changes["normalise"] = NORMALISATION[family]
    return replace(config, **changes)
