"""Optimiser of a run: parameter groups for weight decay and learning rates, and learning-rate schedules."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.models import group_parameters
from timm.optim import Lamb, param_groups_weight_decay
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import torchrope as tr
from torchrope.encodings import Encoding, ScoreBias
from torchrope_lab.settings.run_config import OptimConfig

POLYNOMIAL_POWER = 0.9  # of DeepLab's decay, in mmsegmentation and detectron2

# timm's LAMB clips gradients to norm 1 by default; the Trainer clips them instead.
_OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "lamb": partial(Lamb, max_grad_norm=None),
}


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimiser of a configuration, with the groups of `parameter_groups`."""
    groups = parameter_groups(model, config)
    eps = {} if config.eps is None else {"eps": config.eps}
    return _OPTIMIZERS[config.optimizer](groups, lr=config.lr, **eps)


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, total: int) -> LambdaLR:
    """Build the schedule of a configuration over `total` steps: linear warm-up, then decay."""
    share = config.warmup_epochs / config.epochs if config.warmup_share is None else config.warmup_share
    warmup = round(total * min(share, 0.5))
    if config.schedule == "step":
        milestones = [round(total * epoch / config.epochs) for epoch in config.milestones]
        return LambdaLR(optimizer, partial(warmup_multistep, warmup=warmup, milestones=milestones))
    ends: dict[str, Any] = {"warmup": warmup, "total": total, "floor": config.min_lr / config.lr}
    if config.schedule == "cosine":
        return LambdaLR(optimizer, partial(warmup_cosine, **ends))
    power = POLYNOMIAL_POWER if config.schedule == "polynomial" else 1.0
    return LambdaLR(optimizer, partial(warmup_linear, power=power, **ends))


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups with `params`, `weight_decay` and `lr`."""
    # Weight matrices decay, norms and biases do not; encodings and prefix tokens do if `decay_encodings` is set.
    rates = learning_rates(model, config)
    split = param_groups_weight_decay if config.decay_encodings else tr.parameter_groups
    groups = []
    for group in split(model, config.weight_decay):
        by_rate: dict[float, list[nn.Parameter]] = {}
        for parameter in filter(torch.numel, group["params"]):  # an empty parameter cannot be trained
            by_rate.setdefault(rates[parameter], []).append(parameter)
        groups += [{**group, "params": parameters, "lr": rate} for rate, parameters in by_rate.items()]
    return groups


def learning_rates(model: nn.Module, config: OptimConfig) -> dict[nn.Parameter, float]:
    """Compute the highest learning rate of each parameter:  lr · layer_decay^k,  k levels below the head."""
    # Bao et al., BEiT, section 3.2 of the appendix on fine-tuning; before it, Clark et al., ELECTRA. Level 0 is the
    # embedding, 1 to n are the layers with their encodings, n + 1 the last norm and the head. Parameters that all
    # layers share have the level of the first layer. In a model with a backbone, everything but the backbone has the
    # head's level, and the rates of the backbone are multiplied by `backbone_lr`; those of rotary encodings and score
    # biases by `encoding_lr`.
    backbone, prefix = _backbone(model)
    highest = config.backbone_lr * config.lr if prefix else config.lr
    rates = {**dict.fromkeys(model.parameters(), config.lr), **dict.fromkeys(backbone.parameters(), highest)}
    if config.layer_decay is not None:
        levels = group_parameters(backbone, backbone.group_matcher(), reverse=True)
        top = max(levels.values()) + bool(prefix)  # a backbone ends with its last layer, without norm and head
        for name, parameter in backbone.named_parameters():
            rates[parameter] = highest * config.layer_decay ** (top - levels[name])
    return rates | {parameter: config.encoding_lr * rates[parameter] for parameter in encoding_parameters(backbone)}


def encoding_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose learning rate `encoding_lr` multiplies: of rotary encodings and score biases."""
    encodings = (module for module in model.modules() if isinstance(module, Encoding | ScoreBias))
    return {parameter for encoding in encodings for parameter in encoding.parameters()}


def warmup_cosine(step: int, *, warmup: int, total: int, floor: float = 0.0) -> float:
    """Compute the factor on the learning rate: linear to 1 at `warmup`, then a half cosine to `floor` at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def warmup_linear(step: int, *, warmup: int, total: int, floor: float = 0.0, power: float = 1.0) -> float:
    """Compute the factor on the learning rate: linear to 1 at `warmup`, then linear**power to `floor` at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    return floor + (1 - floor) * (1 - min(1.0, (step - warmup) / max(1, total - warmup))) ** power


def warmup_multistep(step: int, *, warmup: int, milestones: Sequence[int]) -> float:
    """Compute the factor on the learning rate: linear to 1 at `warmup`, then times 0.1 from each milestone on."""
    return min(1.0, (step + 1) / max(1, warmup)) * 0.1 ** sum(step >= milestone for milestone in milestones)


def _backbone(model: Any) -> tuple[Any, str]:
    """Return the `ViT` or `Swin` of a model, and the prefix of its parameters' names in the model."""
    return (model.backbone.model, "backbone.model.") if hasattr(model, "backbone") else (model, "")
