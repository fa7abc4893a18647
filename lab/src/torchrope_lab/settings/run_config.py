"""Configuration dataclasses of a run: model, optimiser, precision and logging. Does not import torch."""

import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from torchrope_lab.data.data_config import DataConfig, data_config
from torchrope_lab.mistakes import Mistake
from torchrope_lab.modules import load_module
from torchrope_lab.schema import (
    DISTINCT,
    NOT_EMPTY,
    Fraction,
    NonNegativeFloat,
    OpenUnit,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
    at_least,
    build,
)

CONFIG = "config.yaml"
"""File in a run's folder that holds its configuration."""

OptimizerName = Literal["adamw", "adam", "lamb"]
HeadName = Literal["classify", "upernet", "mask2former", "dino"]
TASKS: dict[str, str] = {
    "classify": "classify",
    **dict.fromkeys(("upernet", "mask2former"), "segment"),
    "dino": "detect",
}
"""Task of each head."""

_READ_BY = {
    **dict.fromkeys(("depth", "num_heads", "mlp_dim"), ("backbone", "vit", "transformer")),
    **dict.fromkeys(("layer_scale", "share_layers", "norm_eps", "activation"), ("backbone", "vit", "transformer")),
    **dict.fromkeys(("jitter", "unit_mm", "weight_init", "embedding_norm"), ("backbone", "vit")),
    **dict.fromkeys(("depths", "stage_heads"), ("backbone", "swin")),
    **dict.fromkeys(("patch_size", "spacing", "input_size", "drop_path_schedule"), ("backbone", "vit", "swin")),
    "attention": ("backbone", "transformer"),
    "head_channels": ("head", "upernet", "mask2former", "dino"),
    "num_queries": ("head", "mask2former", "dino"),
    "head_dropout": ("head", "upernet"),
}
"""Settings that only some backbones, or some heads, have: "backbone" or "head", and their names."""


@dataclass
class ModelConfig(Settings):
    """Architecture of the model: backbone, head and position encoding's settings.

    Attributes:
        backbone: "vit" or "swin"; "transformer" for tokens at any positions ("points").
        head: Head on the backbone: "classify"; "upernet" or "mask2former" for semantic segmentation; "dino" for object
            detection.
        size: "tiny" to "large": sizes of DeiT ("tiny": LieRE) or Swin. dim, depth, num_heads and mlp_dim override
            its values.
        dim: Channels of a token.
        depth: Number of layers.
        num_heads: Attention heads.
        mlp_dim: Hidden channels of the MLP.
        patch_size: Extent of a patch along each axis; one number means all axes.
        depths: Layers of each stage of a Swin; by default those of `size`.
        stage_heads: Attention heads of each stage of a Swin; by default those of `size`.
        window_size: Tokens of a Swin's window along each axis, 7 by default; one number means all axes. For a ViT with
            a head for segmentation or detection: its layers use window attention of this size, as in ViTDet.
        global_layers: Layers of such a ViT with global attention, counted from 1; by default the last layer of each
            quarter of the layers.
        head_channels: Channels of a head for segmentation or detection; by default those of the head.
        head_dropout: Probability of dropping a channel before the classifier of "upernet" (0.1 in mmsegmentation).
        num_queries: Object queries of "mask2former" and "dino"; by default those of the head.
        pool: "cls" classifies a class token at the origin, "mean" the mean of the patches; Swin and Transformer always
            use the mean.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Dropout probability after the embedding, the attention projection and in the MLP.
        drop_path: Stochastic depth: probability of skipping a residual branch, with the schedule "linear" that of the
            last layer.
        drop_path_schedule: Probabilities of the layers: "linear" from 0 in the first to drop_path in the last
            (Swin, BEiT, ViTDet), or "constant" (DeiT III).
        layer_scale: Initial value of LayerScale on each residual branch; by default no LayerScale.
        activation: Activation of the MLP: "gelu", or "quick_gelu" (CLIP).
        embedding_norm: Whether all tokens of a ViT are normalised before the first layer, as in CLIP.
        norm_eps: Added to the variance in every norm of a ViT; 1e-6 by default, LieRE and CLIP have 1e-5.
        weight_init: Initialisation of a ViT: "xavier" as in the first ViT, "truncated-normal" with standard deviation
            0.02 as in DeiT, or "torch" as in LieRE: PyTorch's for linear layers, N(0, 1) for tokens and learned table.
        share_layers: Use one encoding for all layers.
        share_heads: Use one set of generators for all heads.
        rotary_dim: Channels of a head to rotate if the encoding does not fit the head, such as 60 of 64 with three
            axes; encodings that fit the head rotate all of it.
        spacing: Distance between the positions of patches, one number or one per axis; by default the convention
            of each encoding's paper.
        input_size: Input size that defines the unit of position, instead of the data's. Set it to the first stage's
            size for fine-tuning at a larger size: positions then extend beyond the range of the first stage.
        jitter: Standard deviation of random position shifts in training, in units of half the patch spacing, clipped to
            the patch (ComRoPE's perturbation intensity); none along time. "learned-jittered" samples its table at
            positions shifted in the same way, with deviation 1 if this is 0.
        unit_mm: Place the patches of each volume by its own voxel spacing in mm, instead of on one lattice for all, at
            spacing · index · patch · voxel / unit_mm: if patches are unit_mm apart, positions equal those of a
            model without this setting.
        attention: Attention of a Transformer: "softmax", or "linear" (RoFormer, section 3.3), at a cost linear in the
            number of tokens.
        checkpoint_layers: Activation checkpointing: keep only the input of each layer, and compute the layer again for
            its gradient; the same numbers with less memory, for about a third more time.
    """

    backbone: Literal["vit", "swin", "transformer"] = "vit"
    head: HeadName = "classify"
    size: Literal["tiny", "small", "base", "large"] | None = None
    dim: PositiveInt | None = None
    depth: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    mlp_dim: PositiveInt | None = None
    patch_size: Annotated[list[PositiveInt], NOT_EMPTY] = field(default_factory=lambda: [1])
    depths: list[int] | None = None
    stage_heads: list[int] | None = None
    window_size: list[int] | None = None
    global_layers: list[int] | None = None
    head_channels: PositiveInt | None = None
    head_dropout: Probability = 0.0
    num_queries: PositiveInt | None = None
    pool: Literal["cls", "mean"] = "cls"
    qkv_bias: bool = True
    dropout: Probability = 0.0
    drop_path: Probability = 0.0
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    layer_scale: float | None = None
    activation: Literal["gelu", "quick_gelu"] = "gelu"
    embedding_norm: bool = False
    norm_eps: PositiveFloat | None = None
    weight_init: Literal["xavier", "truncated-normal", "torch"] = "xavier"
    share_layers: bool = False
    share_heads: bool = False
    rotary_dim: PositiveInt | None = None
    spacing: list[float] | None = None
    input_size: list[int] | None = None
    jitter: NonNegativeFloat = 0.0
    unit_mm: PositiveFloat | None = None
    attention: Literal["softmax", "linear"] = "softmax"
    checkpoint_layers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit_mm is not None and self.jitter:
            raise Mistake(f"jitter must be 0 with unit_mm, got {self.jitter}")
        self._check_head()
        for one in fields(self):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            kind, *readers = _READ_BY.get(one.name, ("backbone", self.backbone))
            if getattr(self, one.name) != default and getattr(self, kind) not in readers:
                rule = f"{one.name} is a setting of {kind} {' and '.join(readers)} only"
                raise Mistake(f"{rule}, got {getattr(self, one.name)}")

    def _check_head(self) -> None:
        """Raise ValueError for settings that the head does not have."""
        if self.backbone == "transformer" and self.task != "classify":
            raise Mistake(f"head must be classify with backbone transformer, got {self.head!r}")
        windowed = self.backbone == "swin" or self.task != "classify"
        if self.window_size is not None and not windowed:
            rule = "window_size is a setting of backbone swin, or of vit with another head than classify"
            raise Mistake(f"{rule}, got {self.window_size}")
        if self.global_layers is not None and (self.backbone == "swin" or self.window_size is None):
            raise Mistake(f"global_layers is for a vit with window_size, got {self.global_layers}")

    @property
    def task(self) -> str:
        """Task of the head: "classify", "segment" or "detect"."""
        return TASKS[self.head]

    @property
    def patch(self) -> int | list[int]:
        """The patch size as backbones take it."""
        return self.patch_size[0] if len(self.patch_size) == 1 else self.patch_size

    @property
    def window(self) -> int | list[int] | None:
        """The window size as backbones take it."""
        return self.window_size[0] if self.window_size and len(self.window_size) == 1 else self.window_size


@dataclass
class OptimConfig(Settings):
    """Optimiser, loss and learning-rate schedule: linear warm-up, then decay.

    Attributes:
        epochs: Passes over the training data.
        lr: Maximum learning rate.
        weight_decay: Weight decay of matrices; norms and biases have none.
        decay_encodings: Whether weight decay applies to encodings, class token and registers too, as in the Trainer of
            transformers (ComRoPE).
        eps: Added to the root of the average square of a gradient; by default 1e-8, for "lamb" timm's 1e-6.
        warmup_epochs: Epochs of linear warm-up, at most half of all.
        clip: Maximum gradient norm; 0 disables clipping.
        label_smoothing: Share of the label that is spread over all classes.
        loss: "cross-entropy", or "bce": binary cross-entropy with target 1 for every class in the (mixed) label
            (DeiT III).
        optimizer: "adamw"; "adam" (LieRE), whose weight decay is added to the gradient; or "lamb" (DeiT III).
        warmup_share: Warm-up as a share of all steps, in place of warmup_epochs.
        min_lr: Learning rate at the end.
        layer_decay: Factor on the learning rate from each layer to the one below it.
        schedule: Decay of the learning rate after the warm-up: "cosine", "linear" or "polynomial" (linear to the power
            0.9, as in Mask2Former) to min_lr, or "step", to a tenth at each milestone.
        milestones: Epochs after which "step" reduces the learning rate.
        backbone_lr: Factor on the learning rate of the backbone of a model for segmentation or detection.
        encoding_lr: Factor on the learning rate of the generators of rotary encodings, and of score biases; 0 keeps
            their initial values.
        ema_decay: Decay of an exponential moving average (EMA) of the weights, which is evaluated and saved as the
            model; by default no EMA.
        effective_batch: Examples of one optimiser step over all devices, by gradient accumulation. By default one batch
            of every device.
        train_sizes: Pixels per side, one of which is drawn for the inputs of every step (training across resolutions:
            Tian et al., ResFormer, arXiv:2212.00776); by default all steps have the data's size. Inputs are
            resampled to that size after augmentation. The length along time or depth does not change. Validation and
            cost measurements use the data's size.
    """

    epochs: PositiveInt = 15
    lr: PositiveFloat = 2e-3
    weight_decay: NonNegativeFloat = 0.05
    decay_encodings: bool = False
    eps: PositiveFloat | None = None
    warmup_epochs: NonNegativeFloat = 2.0
    clip: NonNegativeFloat = 1.0
    label_smoothing: Probability = 0.0
    loss: Literal["cross-entropy", "bce"] = "cross-entropy"
    optimizer: OptimizerName = "adamw"
    warmup_share: Annotated[float, at_least(0, 0.5)] | None = None
    min_lr: NonNegativeFloat = 0.0
    layer_decay: Fraction | None = None
    schedule: Literal["cosine", "linear", "polynomial", "step"] = "cosine"
    milestones: list[float] = field(default_factory=list)
    backbone_lr: NonNegativeFloat = 1.0
    encoding_lr: NonNegativeFloat = 1.0
    ema_decay: OpenUnit | None = None
    effective_batch: PositiveInt | None = None
    train_sizes: Annotated[list[PositiveInt], DISTINCT] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "bce" and self.label_smoothing:
            raise Mistake(f"label_smoothing is for cross-entropy only, got {self.label_smoothing} with loss bce")
        if self.min_lr > self.lr:
            raise Mistake(f"min_lr must be between 0 and lr = {self.lr}, got {self.min_lr}")
        if bool(self.milestones) != (self.schedule == "step"):
            rule = "milestones must be given with schedule step, and with no other"
            raise Mistake(f"{rule}, got {self.milestones} with {self.schedule}")
        if any(not 0 < epoch < self.epochs for epoch in self.milestones):
            raise Mistake(f"milestones must be between 0 and epochs = {self.epochs}, got {self.milestones}")


@dataclass
class ExecutionConfig(Settings):
    """Precision, checkpoints, divergence and logging of a run. All but precision may change when a run resumes.

    Attributes:
        precision: "bf16" is mixed precision: matrix products in bfloat16; weights, norms, angles and sums in float32.
        compile: Whether to compile the model with torch.compile.
        checkpoint_every: Optimiser steps between checkpoints within an epoch; by default there is one at the end of
            every epoch.
        on_nan: Action if the loss or a gradient is not finite, or the loss diverges: "stop" raises an error that
            names the step and the last good checkpoint; "skip" skips the step and counts it; "ignore" continues. A
            loss of a classifier diverges above 10 times log(classes), the loss of a uniform prediction.
        logs: Loggers of settings and metrics: "csv", "tensorboard", "wandb", "mlflow".
    """

    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    checkpoint_every: PositiveInt | None = None
    on_nan: Literal["stop", "skip", "ignore"] = "stop"
    logs: list[Literal["csv", "tensorboard", "wandb", "mlflow"]] = field(default_factory=list)


PLACES = ("data.root", "data.labels")
"""Settings that say where the data is; examples elsewhere must be the same."""
MAY_CHANGE = (
    *(f"run.{name}" for name in ("compile", "checkpoint_every", "on_nan", "logs")),
    *(f"data.{name}" for name in ("workers", "cache_gib", "max_skipped")),
    "model.checkpoint_layers",
    *PLACES,
)
"""Settings that change no number of a run, so that another value finds and resumes it; some decide whether it fails."""


@dataclass
class RunConfig(Settings):
    """Configuration of a training run.

    Attributes:
        encoding: A name such as "mixed", "liere:8" or "learned+axial".
        seed: Seed of initial weights, order of the data, augmentation and dropout.
        data: The data.
        model: The architecture.
        optim: The optimiser.
        run: Precision, checkpoints and logging.
        init: Weights that initialise the model, or the backbone of one for segmentation or detection: the folder of a
            run, the file of a published checkpoint, "timm:NAME", or "hf:FOLDER_OR_NAME" of transformers. A rotary
            encoding that they lack starts at zero, which equals no encoding (ComRoPE, supplement, section B.2).
        trainer: Options of Lightning's Trainer that were given and may change results.
    """

    encoding: str = "mixed"
    seed: int = 0
    data: DataConfig = field(default_factory=data_config)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: ExecutionConfig = field(default_factory=ExecutionConfig)
    init: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init is not None:
            path = os.path.abspath(os.path.expanduser(self.init))
            # A path is absolute, so that it does not depend on the working directory; timm:NAME and hf:NAME are none.
            self.init = path if ":" not in self.init or os.path.exists(path) else self.init
        check_spacing(self.model, self.data)
        if self.optim.train_sizes and self.model.task != "classify":
            rule = "--optim.train_sizes requires model.head classify"
            raise Mistake(f"{rule}, got {', '.join(map(str, self.optim.train_sizes))} with {self.model.head}")


@dataclass
class EvaluationConfig:
    """Configuration of the evaluation of a published checkpoint.

    Attributes:
        data: The data to evaluate on.
    """

    data: DataConfig = field(default_factory=data_config)


def check_spacing(model: ModelConfig, data: DataConfig) -> None:
    """Raise ValueError if `unit_mm` is set but the data has no voxel spacings, or Mixup or CutMix is on."""
    if model.unit_mm is None:
        return
    if data.name not in ("volumes", "rsna"):
        raise Mistake(f"--model.unit_mm is for --data volumes and rsna only, got --data {data.name}")
    for name in ("mixup", "cutmix"):
        if getattr(data.augment, name):
            rule = "--model.unit_mm needs one voxel spacing per volume, which a mix of two does not have"
            raise Mistake(f"{rule}, got --data.augment.{name} {getattr(data.augment, name)}")


def plain(config: Any) -> dict[str, Any]:
    """Convert a configuration to dicts, lists, numbers and strings, as YAML and JSON store it."""
    return json.loads(json.dumps(asdict(config)))


def differences(stored: dict[str, Any], current: dict[str, Any], *, ignored: Sequence[str] = ()) -> str:
    """List the first three settings that differ, as "optim.lr 0.001 instead of 0.002"; "" if none does."""
    old, new = flat(stored), flat(current)
    names = [name for name in changed(stored, current) if name not in ignored]
    changes = [f"{name} {old.get(name)} instead of {new.get(name)}" for name in names]
    return "; ".join(changes[:3]) + ("; ..." if len(changes) > 3 else "")


def changed(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return the full names of settings that differ."""
    old, new = flat(stored), flat(current)
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to one dict with dotted names."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        named |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return named


def read_config(stored: Any, allow: Sequence[str] = ()) -> RunConfig:
    """Convert a stored configuration to dataclasses; a source of data is imported if `allow` names its module."""
    required = ("encoding", "seed", "data", "model", "optim")
    if missing := [name for name in required if name not in stored]:
        raise Mistake(f"{CONFIG} must be the configuration of a torchrope run, got one without {missing[0]}")
    load_module(str(stored["data"].get("name")) if isinstance(stored["data"], dict) else "", allow)
    known = {f.name: stored[f.name] for f in fields(RunConfig) if f.name in stored}
    return build(RunConfig, known, CONFIG, strict=True)
