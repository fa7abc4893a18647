"""Swap encodings into the transformers of diffusers: diffusion models of images and videos with built-in RoPE."""

from typing import Any

from torch import nn

from torchrope.integrations.diffusers_rotation import FAMILIES
from torchrope.integrations.rotary import Adapter, Replaced, Rotary
from torchrope.integrations.tables import Family, OfTables


def adapters(model: nn.Module) -> list[Adapter]:
    """Return an adapter for each supported transformer of diffusers inside a model."""
    found = [(module, _family(module)) for module in model.modules()]
    return [OfTransformer(module, family) for module, family in found if family is not None]


def refuse(model: nn.Module) -> None:
    """Raise an error for transformers of diffusers that `swap` does not support.

    Raises:
        ValueError: a model that contains one.
    """
    for module in model.modules():
        if any(base.__module__ == "diffusers.models.modeling_utils" for base in type(module).__mro__):
            rule = f"swap supports these transformers of diffusers: {', '.join(FAMILIES)}"
            by_hand = "a custom attention processor can call torchrope.rotate(q, k, rotation) with any positions"
            raise ValueError(f"{rule}; {by_hand} (model.set_attn_processor), got {type(module).__name__}")


class OfTransformer(OfTables):
    """Adapter for a transformer of diffusers; disables save_pretrained, which would lose the encodings."""

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        rotary.handles.append(Replaced(self.tower, "save_pretrained", refuse_save_pretrained))


def refuse_save_pretrained(*args: Any, **kwargs: Any) -> None:
    """Raise an error; replaces save_pretrained."""
    rule = "a swapped model must be saved by torchrope.save and loaded by torchrope.load(path, into=model)"
    raise ValueError(f"{rule}, got save_pretrained")


def _family(module: nn.Module) -> Family | None:
    """Return the family of a transformer, or None if the module is not a supported one."""
    names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("diffusers.")]
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)
