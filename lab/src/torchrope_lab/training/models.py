"""Build the model of a configuration: a ViT, a Swin, or a Transformer for tokens at any positions."""

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrope.encodings import Choice, Encoding, FixedFrequencies, NoEncoding, built_class, takes
from torchrope.lattice import Lattice
from torchrope.models import ACTIVATIONS, SIZES, SWIN_SIZES, Swin, Transformer, ViT
from torchrope.positions import per_axis
from torchrope.tensors import can_read
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.mistakes import Mistake, as_mistake
from torchrope_lab.settings.run_config import TASKS, ModelConfig

MANY_TOKENS = 256
"""Tokens of an example above which patches of 1 are probably not meant."""

logger = logging.getLogger(__name__)


class TokenClassifier(Transformer):
    """A Transformer whose tokens, of `channels`, and positions are one input tensor, for data without a lattice."""

    def __init__(self, channels: int, **settings: Any) -> None:
        super().__init__(channels, **settings)
        self.arguments = {"mlp_dim": None, **settings}
        self.channels = channels

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Compute logits `(batch, classes)` of tokens and positions `(batch, n, channels + axes)`; padding is NaN."""
        tokens, positions = inputs.tensor_split([self.channels], dim=-1)
        valid = ~positions.isnan().any(dim=-1)
        unpadded = can_read(valid) and bool(valid.all())  # attention is faster without a mask
        logits = super().forward(tokens, positions, mask=None if unpadded else valid)
        assert isinstance(logits, Tensor)
        return logits


Model = ViT | Swin | TokenClassifier


def on_lattice(model: Model) -> ViT | Swin:
    """Return the model if its tokens are patches on a lattice."""
    if isinstance(model, TokenClassifier):
        raise Mistake("a model must be one of patches on a lattice, got one of tokens at any positions")
    return model


@as_mistake()
def build_model(encoding: str, config: ModelConfig, data: DataModule) -> Model:
    """Build the model of a configuration for a data set, which determines input size, channels and classes."""
    check_backbone(config, data)
    if config.task not in data.tasks:
        heads = ", ".join(head for head, task in TASKS.items() if task in data.tasks)
        raise Mistake(f"{data.name} is for model.head {heads}, got {config.head!r}")
    build: dict[str, Callable[..., Model]] = {"vit": build_vit, "swin": build_swin, "transformer": build_transformer}
    return build[config.backbone](encoding, config, data)


def check_backbone(config: ModelConfig, data: DataModule) -> None:
    """Raise ValueError if the backbone needs a lattice and the data have none, or the other way round."""
    if data.lattice == (config.backbone == "transformer"):
        fitting = "vit or swin" if data.lattice else "transformer"
        raise Mistake(f"--model.backbone must be {fitting} for --data {data.name}, got {config.backbone}")


def check_patches(config: ModelConfig, data: DataModule) -> None:
    """Check, before any data are read, that the backbone fits the data and that patches divide the inputs."""
    check_backbone(config, data)
    if not data.lattice:
        return
    sizes = config.input_size or data.input_size
    patch = config.patch_size * len(sizes) if len(config.patch_size) == 1 else config.patch_size
    fits = len(patch) == len(sizes) and not any(size % side for size, side in zip(sizes, patch, strict=True))
    if config.task == "classify" and not fits:
        rule, received = "input sizes must be multiples of --model.patch_size", ", ".join(map(str, sizes))
        raise Mistake(f"{rule} {', '.join(map(str, patch))}, got {received} ({', '.join(data.axes)} of {data.name})")
    if max(patch) == 1 and (tokens := math.prod(sizes)) > MANY_TOKENS:
        divisors = (side for side in range(2, min(sizes) + 1) if not any(size % side for size in sizes))
        fewer = next((side for side in divisors if tokens <= MANY_TOKENS * side ** len(sizes)), max(sizes))
        rule = f"patches of 1 give {tokens} tokens, which train slowly"
        logger.warning("%s; --model.patch_size %d gives %d", rule, fewer, tokens // fewer ** len(sizes))


def build_vit(encoding: str, config: ModelConfig, data: DataModule) -> ViT:
    """Build the vision transformer of a configuration, as `build_model` does."""
    choice = resolve_encoding(encoding)
    build = partial(
        ViT,
        config.input_size or data.input_size,
        in_channels=data.in_channels,
        num_outputs=data.num_classes,
        encoding=replace(choice, rotary=_rotary(choice, config), absolute=_absolute(choice, config, data)),
        **_arguments(ViT, config, SIZES),
    )
    return build(positions=_positions(build, config, data))


def build_swin(encoding: str, config: ModelConfig, data: DataModule) -> Swin:
    """Build the Swin of a configuration, as `build_model` does; it pools by the mean and ignores `pool`."""
    choice = resolve_encoding(encoding)
    arguments = {**_arguments(Swin, config, SWIN_SIZES), "window_size": config.window or 7}
    if config.stage_heads is not None:
        arguments["num_heads"] = config.stage_heads
    return Swin(
        config.input_size or data.input_size,
        in_channels=data.in_channels,
        num_outputs=data.num_classes,
        encoding=replace(choice, rotary=_rotary(choice, config), absolute=_absolute(choice, config, data)),
        positions=Lattice(_one_or_all(config.spacing)),
        **arguments,
    )


def build_transformer(encoding: str, config: ModelConfig, data: DataModule) -> TokenClassifier:
    """Build the transformer of a configuration for tokens at any positions, as `build_model` does."""
    # Encodings are initialised as in their papers, for one token per unit of the data's extent along each axis.
    choice = resolve_encoding(encoding)
    return TokenClassifier(
        data.in_channels,
        num_axes=data.num_axes,
        num_outputs=data.num_classes,
        encoding=replace(choice, rotary=_rotary(choice, config)),
        positions=Lattice(unit=data.scale, periods=data.periods),
        input_size=data.extent,
        **_arguments(Transformer, config, SIZES),
    )


class AtReferenceSpacing(nn.Module):
    """A model with positions in mm, called without voxel spacings, to measure costs: patches are `unit_mm` apart."""

    # `spacing` is the distance between voxels along each axis, in mm.

    def __init__(self, model: ViT, spacing: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        self.spacing = spacing

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute logits `(batch, classes)`."""
        return self.model(inputs, inputs.new_tensor(self.spacing).expand(len(inputs), -1))


def build_for_costs(encoding: str, config: ModelConfig, data: DataModule) -> nn.Module:
    """Build the model of a configuration so that it takes only inputs, to measure its costs."""
    model = build_model(encoding, config, data)
    if not isinstance(model, ViT) or config.unit_mm is None:
        return model
    return AtReferenceSpacing(model, [config.unit_mm / side for side in model.embed.patch_size])


def _positions(build: Callable[[], ViT], config: ModelConfig, data: DataModule) -> Lattice:
    """Return the positions of patches: on one lattice for all samples, jittered in training, or in mm."""
    lattice = Lattice(_one_or_all(config.spacing))
    if config.unit_mm is not None:
        return replace(lattice, unit=config.unit_mm, patch_size=_one_or_all(config.patch_size))
    if not config.jitter:
        return lattice
    sizes = [
        size // side for size, side in zip(config.input_size or data.input_size, itertools.cycle(config.patch_size))
    ]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        paper = cast(Encoding, build().encodings[0]).lattice.spaced(*sizes)
    spacing = lattice.completed(**paper).spacing
    assert spacing is not None
    widths = per_axis("spacing", spacing, len(sizes))
    cell = tuple(0.0 if axis == "time" else width for axis, width in zip(data.axes, widths, strict=True))
    return replace(lattice, cell=cell, intensity=config.jitter)


def _rotary(choice: Choice, config: ModelConfig) -> Any:
    """Return the rotary encoding's constructor with the configured settings."""
    build: Any = choice.rotary
    if config.share_heads and issubclass(built_class(build) or Encoding, FixedFrequencies | NoEncoding):
        build = partial(_build_for_one_head, build)
    elif config.share_heads:
        if not takes(build, "shared_heads"):
            raise Mistake(f"share_heads is for encodings that take shared_heads, got {choice.name}")
        build = partial(build, shared_heads=True)
    if config.rotary_dim is not None and takes(build, "rotary_dim"):
        build = partial(_build_with_fallback, build, config.rotary_dim)
    return build


def _build_for_one_head(build: Any, **head: int) -> Encoding:
    """Build an encoding without parameters that rotates all heads alike."""
    return build(**{**head, "num_heads": 1})


def _build_with_fallback(build: Any, rotary_dim: int, **head: int) -> Encoding:
    """Build an encoding of the full head, or of `rotary_dim` channels if the full head does not fit."""
    try:
        return build(**head)
    except ValueError:
        return build(**head, rotary_dim=rotary_dim)


def _absolute(choice: Choice, config: ModelConfig, data: DataModule) -> Any:
    """Return the absolute encoding's constructor; a perturbed one gets the jitter of the positions, none along time."""
    if choice.absolute is None or "intensity" not in getattr(choice.absolute, "keywords", {}):
        return choice.absolute
    cell = [0.0 if axis == "time" else 1.0 for axis in data.axes]
    return partial(choice.absolute, cell=cell, **({"intensity": config.jitter} if config.jitter else {}))


def _arguments(model: type, config: ModelConfig, sizes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of a model that are settings; those override the sizes, by name, of `config.size`."""
    names = inspect.signature(model).parameters.keys() & vars(config).keys() - {"input_size"}
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    special = {"patch_size": config.patch, "activation": ACTIVATIONS[config.activation]}
    return {**sizes.get(config.size or "", {}), **given, **{name: special[name] for name in names & special.keys()}}


def _one_or_all(values: Sequence[Any] | None) -> Any:
    return values[0] if values and len(values) == 1 else values
