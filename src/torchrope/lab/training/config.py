"""Settings of model and optimiser, as plain values: imports no torch."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from torchrope.lab.data.config import DataConfig, DigitsConfig, VolumesConfig, data_config

CONFIG = "config.yaml"
"""The file of a run's folder that holds its configuration."""

OptimizerName = Literal["adamw", "adam", "lamb"]
HeadName = Literal["classify", "upernet", "mask2former", "faster-rcnn", "mask-rcnn", "deformable-detr", "dino"]
TASKS: dict[str, str] = {
    "classify": "classify",
    **dict.fromkeys(("upernet", "mask2former"), "segment"),
    **dict.fromkeys(("faster-rcnn", "mask-rcnn", "deformable-detr", "dino"), "detect"),
}
"""What each head does."""

_READ_BY = {
    **dict.fromkeys(("depth", "num_heads", "mlp_dim"), ("vit", "transformer")),
    **dict.fromkeys(("layer_scale", "share_layers", "norm_eps"), ("vit", "transformer")),
    **dict.fromkeys(("num_registers", "jitter", "unit_mm", "weight_init"), ("vit",)),
    **dict.fromkeys(("depths", "stage_heads"), ("swin",)),
    **dict.fromkeys(("patch_size", "spacing", "origin", "input_size", "drop_path_schedule"), ("vit", "swin")),
    **dict.fromkeys(("latents", "attention"), ("transformer",)),
}
"""Settings of a model that not all backbones have."""

_CHOICES = {
    "attention": ("softmax", "linear"),
    "drop_path_schedule": ("linear", "constant"),
    "weight_init": ("xavier", "truncated-normal", "torch"),
}


@dataclass
class ModelConfig:
    """The transformer around the encoding.

    Attributes:
        backbone: "vit" or "swin"; "transformer" for tokens at any positions ("points", "series", "kanji-strokes").
        head: What reads it: "classify"; "upernet" or "mask2former" for semantic segmentation; "faster-rcnn",
            "mask-rcnn", "deformable-detr" or "dino" for object detection.
        size: The papers' sizes by name; dim, depth, num_heads and mlp_dim below then override it one by one.
        dim: Channels of a token.
        depth: Layers.
        num_heads: Attention heads.
        mlp_dim: Channels inside the MLP.
        patch_size: Extent of a patch along each axis; one number means all axes.
        depths: Layers of each stage of a Swin, which its size by name says otherwise.
        stage_heads: Attention heads of each stage of a Swin, likewise.
        window_size: Tokens of a Swin's window along each axis, 7 by default; one number means all axes. Of a ViT below
            a head for segmentation or detection: its layers attend in such windows, as ViTDet's.
        global_layers: Layers of such a ViT that attend everywhere, counted from 1; by default the last one of each
            quarter.
        head_channels: Channels of a head for segmentation or detection; None is the head's own.
        num_queries: Objects that "mask2former", "deformable-detr" and "dino" look for; None is the head's own.
        pool: "cls" reads a class token at the origin, "mean" averages the patches; a Swin and a Transformer always do.
        num_registers: Extra tokens without a place.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping a channel.
        attention_dropout: Probability of dropping an attention weight.
        drop_path: Probability of skipping a branch; with the schedule "linear" that of the last layer.
        drop_path_schedule: Stochastic depth of the layers: "linear" from 0 in the first to drop_path in the last
            (Swin, BEiT, ViTDet), or "constant" (DeiT III).
        layer_scale: Initial factor on each branch; none by default.
        norm_eps: Added to the variance in every norm of a ViT; 1e-6 by default, LieRE and CLIP have 1e-5.
        weight_init: How the weights of a ViT start: "xavier" as the first ViT's, "truncated-normal" with deviation 0.02
            as DeiT's, or "torch" as linear layers of PyTorch, tokens and learned table N(0, 1), as LieRE's.
        share_layers: One encoding for all layers.
        share_heads: One set of generators for all heads.
        encoding_scale: Factor on the generators of a rotary encoding at the start; for encodings that start at random.
        rotary_dim: Channels of a head that rotate where the encoding does not fit the head, such as 60 of 64 on three
            axes; encodings that fit it rotate all.
        spacing: Distance between patches for the encoding, one number or one per axis; by default the convention
            of each encoding's paper.
        origin: Position of the first patch, likewise.
        input_size: Extent along each axis that positions are laid out for, in place of the data's: a second stage on
            larger images keeps that of the first, whose lattice it runs past.
        jitter: Move patches at random in training, with this deviation in halves of a cell (ComRoPE's perturbation
            intensity); never along time. "learned-jittered" is looked up so, too: by 1 where this is 0.
        unit_mm: Place the patches of every volume by the mm between its own voxels, in place of one lattice for all, at
            origin + spacing · index · patch · voxel / unit_mm: where patches are unit_mm apart, positions are those of
            a model without it, for every encoding.
        latents: How many learned latents read the tokens of a Transformer, at a cost linear in their number; they then
            attend to one another. 0: tokens attend to one another.
        attention: Of a Transformer: "softmax", or "linear" (RoFormer, section 3.3), at a cost linear in the number of
            tokens.
        encoding_seed: Draw the start of the rotary encodings from this seed in place of the run's, all else the same.
        checkpoint_layers: Keep the input of each layer alone and compute the layer again for its gradient: the same
            numbers with less memory, for about a third more time.
    """

    backbone: Literal["vit", "swin", "transformer"] = "vit"
    head: HeadName = "classify"
    size: Literal["tiny", "small", "base", "large"] | None = None
    dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    mlp_dim: int | None = None
    patch_size: list[int] = field(default_factory=lambda: [1])
    depths: list[int] | None = None
    stage_heads: list[int] | None = None
    window_size: list[int] | None = None
    global_layers: list[int] | None = None
    head_channels: int | None = None
    num_queries: int | None = None
    pool: Literal["cls", "mean"] = "cls"
    num_registers: int = 0
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    layer_scale: float | None = None
    norm_eps: float | None = None
    weight_init: Literal["xavier", "truncated-normal", "torch"] = "xavier"
    share_layers: bool = False
    share_heads: bool = False
    encoding_scale: float = 1.0
    rotary_dim: int | None = None
    spacing: list[float] | None = None
    origin: list[float] | None = None
    input_size: list[int] | None = None
    jitter: float = 0.0
    unit_mm: float | None = None
    latents: int = 0
    attention: Literal["softmax", "linear"] = "softmax"
    encoding_seed: int | None = None
    checkpoint_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "depth", "num_heads", "mlp_dim", "rotary_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if not self.patch_size or min(self.patch_size) < 1:
            raise ValueError(f"patch_size must be 1 or more along each axis, got {self.patch_size}")
        for name in ("num_registers", "latents"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.norm_eps is not None and not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be above 0, got {self.norm_eps}")
        if not 0 < self.encoding_scale < math.inf:
            raise ValueError(f"encoding_scale must be above 0 and finite, got {self.encoding_scale}")
        if not self.jitter >= 0:
            raise ValueError(f"jitter must be 0 or more, got {self.jitter}")
        if self.unit_mm is not None and not self.unit_mm > 0:
            raise ValueError(f"unit_mm must be above 0, got {self.unit_mm}")
        if self.unit_mm is not None and self.jitter:
            raise ValueError(f"jitter is for one lattice of all samples, got {self.jitter} with unit_mm")
        if self.head not in TASKS:
            raise ValueError(f"head must be one of {', '.join(TASKS)}, got {self.head!r}")
        self._check_head()
        for one in fields(self):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            readers = _READ_BY.get(one.name, (self.backbone,))
            if getattr(self, one.name) != default and self.backbone not in readers:
                rule = f"{one.name} is read by backbone {' and '.join(readers)} alone"
                raise ValueError(f"{rule}, got {getattr(self, one.name)}")
        if self.attention == "linear" and self.attention_dropout:
            rule = "attention_dropout is for softmax attention alone"
            raise ValueError(f"{rule}, got {self.attention_dropout} with attention linear")

    def _check_head(self) -> None:
        """Refuse settings that no head, or another one, reads."""
        if self.backbone == "transformer" and self.task != "classify":
            raise ValueError(f"head must be classify above backbone transformer, got {self.head!r}")
        windowed = self.backbone == "swin" or self.task != "classify"
        if self.window_size is not None and not windowed:
            rule = "window_size is read by backbone swin alone, or by a vit below another head than classify"
            raise ValueError(f"{rule}, got {self.window_size}")
        if self.global_layers is not None and (self.backbone == "swin" or self.window_size is None):
            raise ValueError(f"global_layers is for a vit with window_size, got {self.global_layers}")
        for name in ("head_channels", "num_queries"):
            value = getattr(self, name)
            if value is not None and (value < 1 or self.task == "classify"):
                raise ValueError(f"{name} must be 1 or more, below another head than classify, got {value}")
        if self.num_queries is not None and self.head not in ("mask2former", "deformable-detr", "dino"):
            rule = "num_queries is read by mask2former, deformable-detr and dino alone"
            raise ValueError(f"{rule}, got {self.num_queries}")

    @property
    def task(self) -> str:
        """What the head does: "classify", "segment" or "detect"."""
        return TASKS[self.head]

    @property
    def patch(self) -> int | list[int]:
        """The patch as `ViT` takes it."""
        return self.patch_size[0] if len(self.patch_size) == 1 else self.patch_size

    @property
    def window(self) -> int | list[int] | None:
        """The window as backbones take it."""
        return self.window_size[0] if self.window_size and len(self.window_size) == 1 else self.window_size


@dataclass
class OptimConfig:
    """The optimiser, with linear warm-up and decay.

    Attributes:
        epochs: Passes over the training data.
        lr: Highest learning rate.
        weight_decay: Decay of weight matrices; never of norms and biases.
        decay_encodings: Whether the parameters of encodings, class token and registers decay too, as in a Trainer of
            transformers (ComRoPE).
        betas: Averaging of gradients and of their squares.
        warmup_epochs: Epochs of linear warm-up, at most half of all.
        clip: Largest norm of a gradient; 0 does not clip.
        label_smoothing: Share of the label that is spread over all classes.
        loss: "cross-entropy", or "bce": each class is there or not, those of mixed labels all are (DeiT III).
        optimizer: "adamw"; "adam" (LieRE), where decay is part of the gradient; or "lamb" (DeiT III).
        warmup_share: Warm-up as a share of all steps, in place of warmup_epochs.
        min_lr: Learning rate at the end.
        layer_decay: Factor on the learning rate from each layer to the one below it.
        schedule: How the rate goes down after the warm-up: along a "cosine" or a "linear" line to min_lr, or by "step",
            to a tenth at each milestone.
        milestones: Epochs after which "step" goes down.
        backbone_lr: Factor on the learning rate of the backbone below a head for segmentation or detection.
        encoding_lr: Factor on the learning rate of the generators of rotary encodings; 0 leaves them as they start.
        ema_decay: Keep an average of the weights, this much of it staying at every step; it is evaluated and kept.
        effective_batch: Examples in one step of the optimiser over all devices: gradients of several batches add up
            to it, whatever the number of devices. By default one batch of every device.
        sizes: Pixels per side, one of which is drawn for the inputs of every step (training across resolutions: Tian et
            al., ResFormer, arXiv:2212.00776); by default all steps have the size of the data. Inputs are drawn at that
            size where the data can be ("kanji"), else resampled behind their augmentation. Along time nothing changes.
            Validation and costs are of the size of the data.
    """

    epochs: int = 15
    lr: float = 2e-3
    weight_decay: float = 0.05
    decay_encodings: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_epochs: float = 2.0
    clip: float = 1.0
    label_smoothing: float = 0.0
    loss: Literal["cross-entropy", "bce"] = "cross-entropy"
    optimizer: OptimizerName = "adamw"
    warmup_share: float | None = None
    min_lr: float = 0.0
    layer_decay: float | None = None
    schedule: Literal["cosine", "linear", "step"] = "cosine"
    milestones: list[float] = field(default_factory=list)
    backbone_lr: float = 1.0
    encoding_lr: float = 1.0
    ema_decay: float | None = None
    effective_batch: int | None = None
    sizes: list[int] = field(default_factory=list)

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
        if self.loss == "bce" and self.label_smoothing:
            raise ValueError(f"label_smoothing is for cross-entropy alone, got {self.label_smoothing} with loss bce")
        if self.optimizer not in get_args(OptimizerName):
            raise ValueError(f"optimizer must be one of {', '.join(get_args(OptimizerName))}, got {self.optimizer!r}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr must be between 0 and lr = {self.lr}, got {self.min_lr}")
        if self.warmup_share is not None and not 0 <= self.warmup_share <= 0.5:
            raise ValueError(f"warmup_share must be between 0 and 0.5, got {self.warmup_share}")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay must be above 0 and at most 1, got {self.layer_decay}")
        if self.schedule not in ("cosine", "linear", "step"):
            raise ValueError(f"schedule must be one of cosine, linear, step, got {self.schedule!r}")
        if bool(self.milestones) != (self.schedule == "step"):
            raise ValueError(f"milestones are what schedule step needs, got {self.milestones} with {self.schedule}")
        if any(not 0 < epoch < self.epochs for epoch in self.milestones):
            raise ValueError(f"milestones must lie between 0 and epochs = {self.epochs}, got {self.milestones}")
        for name in ("backbone_lr", "encoding_lr"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be above 0 and below 1, got {self.ema_decay}")
        if self.effective_batch is not None and self.effective_batch < 1:
            raise ValueError(f"effective_batch must be 1 or more, got {self.effective_batch}")
        if any(size < 1 for size in self.sizes) or len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"sizes must be 1 or more, each named once, got {', '.join(map(str, self.sizes))}")


@dataclass
class ScaleConfig:
    """How a run is computed and watched. All but precision may change from one start of a run to the next.

    Attributes:
        precision: "bf16" multiplies matrices in bfloat16 (mixed: weights, norms, angles and sums stay float32).
        compile: Whether torch.compile makes the model faster, after a while at the start.
        checkpoint_every: Steps of the optimiser between checkpoints within an epoch; by default there is one at the end
            of every epoch.
        on_nan: What to do when the loss or a gradient is not finite, or the loss explodes: "stop" says where and which
            checkpoint is good; "skip" leaves the step out and counts it; "ignore" goes on.
        explosion: A loss above this many times that of guessing, log(classes), counts as exploded.
        logs: Where measures go as the run proceeds: "csv", "tensorboard", "wandb".
        peak_tflops: What one device can compute at most, in 10¹² operations a second at this precision; with it the log
            says which share of it the model gets.
    """

    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    checkpoint_every: int | None = None
    on_nan: Literal["stop", "skip", "ignore"] = "stop"
    explosion: float = 10.0
    logs: list[Literal["csv", "tensorboard", "wandb"]] = field(default_factory=list)
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every must be 1 or more, got {self.checkpoint_every}")
        for name in ("explosion", "peak_tflops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


MAY_CHANGE = tuple(
    f"scale.{name}" for name in ("compile", "checkpoint_every", "on_nan", "explosion", "logs", "peak_tflops")
)
"""Settings that a run may change when it goes on; those of on_nan only matter once something is wrong."""


@dataclass
class RunConfig:
    """One model to train.

    Attributes:
        encoding: A name such as "mixed", "liere:8" or "learned+axial".
        seed: Decides initial weights, the order of the data and dropout.
        data: Which data.
        model: The model around the encoding.
        optim: The optimiser.
        scale: How it is computed and watched.
        start_from: Folder of a run whose weights this one starts with; a rotary encoding that they lack starts at
            zero, as none (ComRoPE, supplement B.2).
        backbone_from: What a backbone below a head for segmentation or detection starts with: the folder of a run
            that classified, the file of a published checkpoint, or "timm:NAME".
    """

    encoding: str = "mixed"
    seed: int = 0
    data: DataConfig = field(default_factory=DigitsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    start_from: str | None = None
    backbone_from: str | None = None

    def __post_init__(self) -> None:
        if self.start_from is not None:
            self.start_from = os.path.abspath(os.path.expanduser(self.start_from))  # the same from anywhere
        if self.backbone_from is not None:
            if self.model.task == "classify":
                raise ValueError(f"backbone_from is for another head than classify, got {self.backbone_from!r}")
            if not self.backbone_from.startswith("timm:"):
                self.backbone_from = os.path.abspath(os.path.expanduser(self.backbone_from))
        check_spacing(self.model, self.data)
        if self.optim.sizes and self.model.task != "classify":
            rule = "--optim.sizes is for model.head classify (others train on pictures of any size)"
            raise ValueError(f"{rule}, got {', '.join(map(str, self.optim.sizes))} with {self.model.head}")


@dataclass
class EvaluationConfig:
    """What a published checkpoint is evaluated on.

    Attributes:
        data: Which data.
    """

    data: DataConfig = field(default_factory=DigitsConfig)


def check_spacing(model: ModelConfig, data: DataConfig) -> None:
    """Refuse positions in mm where samples have no spacing, or would have two."""
    if model.unit_mm is None:
        return
    if not isinstance(data, VolumesConfig):
        raise ValueError(f"--model.unit_mm is for volumes, rsna alone, got --data {data.name}")
    for name in ("mixup", "cutmix"):
        if getattr(data.augment, name):
            rule = "--model.unit_mm places each volume by its own voxels, which a mix of two has not"
            raise ValueError(f"{rule}, got --data.augment.{name} {getattr(data.augment, name)}")


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
    old, new = flat(theirs), flat(mine)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name) and name not in but]
    told = [f"{name} {old.get(name)} instead of {new.get(name)}" for name in names]
    return "; ".join(told[:3]) + ("; ..." if len(told) > 3 else "")


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dict of dotted names."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        named |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return named


def read_config(stored: Any) -> RunConfig:
    """Turn a stored configuration back into its dataclasses."""
    try:
        return RunConfig(
            encoding=stored["encoding"],
            seed=stored["seed"],
            data=data_config(**stored["data"]),
            model=ModelConfig(**stored["model"]),
            optim=OptimConfig(**stored["optim"]),
            scale=ScaleConfig(**stored.get("scale", {})),
            start_from=stored.get("start_from"),
            backbone_from=stored.get("backbone_from"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{CONFIG} must be that of a torchrope run, got something else: {error!r}") from None
