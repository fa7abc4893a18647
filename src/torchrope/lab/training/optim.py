"""The optimiser of a run: what decays, how fast each layer learns, and the schedule."""

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torchrope.encodings import AbsoluteEncoding, Encoding, RelativePositionBias
from torchrope.lab.training.config import OptimConfig
from torchrope.lab.training.lamb import LAMB

_OPTIMIZERS: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "lamb": LAMB}


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimiser of a configuration; encodings, norms, biases and tokens do not decay."""
    groups = decay_groups(model, config.weight_decay)
    if config.layer_decay is not None:
        groups = [part for group in groups for part in by_depth(model, group, config.lr, config.layer_decay)]
    if config.backbone_lr != 1:
        groups = [part for group in groups for part in apart(model, group, config.lr, config.backbone_lr)]
    return _OPTIMIZERS[config.optimizer](groups, lr=config.lr, betas=config.betas)


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, total: int) -> LambdaLR:
    """Warm up linearly, then decay as the configuration says, over `total` steps."""
    share = config.warmup_epochs / config.epochs if config.warmup_share is None else config.warmup_share
    warmup = round(total * min(share, 0.5))
    if config.schedule == "step":
        milestones = [round(total * epoch / config.epochs) for epoch in config.milestones]
        return LambdaLR(optimizer, partial(warmup_steps, warmup=warmup, milestones=milestones))
    decay = {"cosine": warmup_cosine, "linear": warmup_linear}[config.schedule]
    return LambdaLR(optimizer, partial(decay, warmup=warmup, total=total, floor=config.min_lr / config.lr))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters: weight matrices decay; encodings, norms, biases and prefix tokens do not."""
    spared = {
        parameter
        for module in model.modules()
        if isinstance(module, Encoding | AbsoluteEncoding | RelativePositionBias)
        for parameter in module.parameters()
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        spare = parameter in spared or parameter.ndim < 2 or name.endswith("prefix_tokens")
        (others if spare else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def by_depth(model: nn.Module, group: dict[str, Any], lr: float, decay: float) -> list[dict[str, Any]]:
    """Split a group by depth; what lies k levels below the head learns at  lr · decay^k.

    Args:
        model: A `ViT` or `Swin` of ours, alone or as `backbone.model` of what reads its maps.
        group: Parameters of it, with settings that all parts keep.
        lr: Learning rate of the head and the last norm.
        decay: Factor from one layer to the one below it.

    References:
        Bao et al., BEiT, section 3.2 of the appendix on fine-tuning; Clark et al., ELECTRA, before it.
    """
    depths = layer_depths(model)
    top = max(depths.values())
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts: dict[int, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        parts.setdefault(depths[names[parameter]], []).append(parameter)
    return [{**group, "params": parts[depth], "lr": lr * decay ** (top - depth)} for depth in sorted(parts)]


def layer_depths(model: nn.Module) -> dict[str, int]:
    """The level of every parameter: 0 for the embedding, 1 to n for layers, n + 1 for the last norm and the head.

    A layer's encoding and bias are on its level, a Swin's merging on that of the layer after it. What all layers share
    is on the first layer's. Of a model with a backbone all but the backbone's own layers is on the head's.
    """
    below = getattr(model, "backbone", None)
    body, at = (model, "") if below is None else (below.model, "backbone.model.")
    firsts, count = [0], 0
    for stage in getattr(body, "stages", [body]):
        count += len(stage.layers)
        firsts.append(count)
    top = firsts[-1] + 1
    names = [name for name, _ in model.named_parameters()]
    return {name: _level(name.removeprefix(at), firsts) if name.startswith(at) else top for name in names}


def apart(model: nn.Module, group: dict[str, Any], lr: float, factor: float) -> list[dict[str, Any]]:
    """Split a group into what is not of the backbone and what is, which learns at `factor` times its rate."""
    inside = {parameter for name, parameter in model.named_parameters() if name.startswith("backbone.model.")}
    others = [parameter for parameter in group["params"] if parameter not in inside]
    own = [parameter for parameter in group["params"] if parameter in inside]
    slower = {**group, "params": own, "lr": factor * group.get("lr", lr)}
    return [part for part in ({**group, "params": others}, slower) if part["params"]]


def warmup_cosine(step: int, *, warmup: int, total: int, floor: float = 0.0) -> float:
    """Factor on the learning rate: linear up to 1 at `warmup`, then a half cosine down to `floor` at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def warmup_linear(step: int, *, warmup: int, total: int, floor: float = 0.0) -> float:
    """Factor on the learning rate: linear up to 1 at `warmup`, then linear down to `floor` at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    return floor + (1 - floor) * (1 - min(1.0, (step - warmup) / max(1, total - warmup)))


def warmup_steps(step: int, *, warmup: int, milestones: Sequence[int]) -> float:
    """Factor on the learning rate: linear up to 1 at `warmup`, then a tenth of it from each milestone on."""
    return min(1.0, (step + 1) / max(1, warmup)) * 0.1 ** sum(step >= milestone for milestone in milestones)


def _level(name: str, firsts: list[int]) -> int:
    stage, rest = re.fullmatch(r"(?:stages\.(\d+)\.)?(.*)", name).groups()  # type: ignore[union-attr]
    layer = re.match(r"(?:layers|encodings|biases)\.(\d+)\.", rest)
    if layer is not None:
        return firsts[int(stage or 0)] + int(layer[1]) + 1
    if stage is not None:
        return firsts[int(stage)] + 1
    return firsts[-1] + 1 if rest.startswith(("norm.", "head.")) else 0
