"""Settings of model and optimiser, as plain values: imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torchrope.data.config import DataConfig


@dataclass
class ModelConfig:
    """The vision transformer around the encoding.

    Attributes:
        size: The papers' sizes by name; dim, depth, num_heads and mlp_dim below then override it one by one.
        dim: Channels of a token.
        depth: Layers.
        num_heads: Attention heads.
        mlp_dim: Channels inside the MLP.
        patch_size: Extent of a patch along each axis; one number means all axes.
        pool: "cls" reads a class token at the origin, "mean" averages the patches.
        num_registers: Extra tokens without a place.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping a channel.
        attention_dropout: Probability of dropping an attention weight.
        drop_path: Probability of skipping a branch in the last layer.
        layer_scale: Initial factor on each branch; none by default.
        share_layers: One encoding for all layers.
        share_heads: One set of generators for all heads.
        spacing: Distance between patches for the encoding, one number or one per axis; by default the convention
            of each encoding's paper.
        origin: Position of the first patch, likewise.
    """

    size: Literal["tiny", "small", "base", "large"] | None = None
    dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    mlp_dim: int | None = None
    patch_size: list[int] = field(default_factory=lambda: [1])
    pool: Literal["cls", "mean"] = "cls"
    num_registers: int = 0
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    share_layers: bool = False
    share_heads: bool = False
    spacing: list[float] | None = None
    origin: list[float] | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "depth", "num_heads", "mlp_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if not self.patch_size or min(self.patch_size) < 1:
            raise ValueError(f"patch_size must be 1 or more along each axis, got {self.patch_size}")
        if self.num_registers < 0:
            raise ValueError(f"num_registers must be 0 or more, got {self.num_registers}")
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")

    @property
    def patch(self) -> int | list[int]:
        """The patch as `ViT` takes it."""
        return self.patch_size[0] if len(self.patch_size) == 1 else self.patch_size


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and cosine decay to zero.

    Attributes:
        epochs: Passes over the training data.
        lr: Highest learning rate.
        weight_decay: Decay of weight matrices; never of encodings, norms, biases or tokens.
        betas: Averaging of gradients and of their squares.
        warmup_epochs: Epochs of linear warm-up, at most half of all.
        clip: Largest norm of a gradient; 0 does not clip.
        label_smoothing: Share of the label that is spread over all classes.
    """

    epochs: int = 15
    lr: float = 2e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_epochs: float = 2.0
    clip: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        self.betas = tuple(self.betas)  # type: ignore[assignment]  # YAML has lists alone
        if self.epochs < 1:
            raise ValueError(f"epochs must be 1 or more, got {self.epochs}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        for name in ("weight_decay", "warmup_epochs", "clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")


@dataclass
class RunConfig:
    """One model to train.

    Attributes:
        encoding: A name such as "mixed", "liere:8" or "learned+axial".
        seed: Decides initial weights, the order of the data and dropout.
        data: Which data.
        model: The model around the encoding.
        optim: The optimiser.
    """

    encoding: str = "mixed"
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


def plain(config: Any) -> dict[str, Any]:
    """A configuration as dicts, lists, numbers and strings, as YAML and JSON keep it."""
    return json.loads(json.dumps(asdict(config)))


def differences(theirs: dict[str, Any], mine: dict[str, Any], *, but: Sequence[str] = ()) -> str:
    """Say which settings differ, as "optim.lr 0.001 instead of 0.002"; nothing where they agree.

    Args:
        theirs: A stored configuration.
        mine: The present one.
        but: Settings that may differ.
    """
    old, new = _flat(theirs), _flat(mine)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name) and name not in but]
    told = [f"{name} {old.get(name)} instead of {new.get(name)}" for name in names]
    return "; ".join(told[:3]) + ("; ..." if len(told) > 3 else "")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dict of dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
