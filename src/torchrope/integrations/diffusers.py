"""Encodings inside the transformers of diffusers: diffusion models of images and videos, which rotate by themselves."""

from typing import Any

from torch import nn

from torchrope.integrations.diffusers_rotation import FAMILIES
from torchrope.integrations.rotary import Adapter, Replaced, Rotary
from torchrope.integrations.tables import Family, OfTables


def adapters(model: nn.Module) -> list[Adapter]:
    """What swap needs for each transformer of diffusers inside a model."""
    found = [(module, _family(module)) for module in model.modules()]
    return [OfTransformer(module, family) for module, family in found if family is not None]


def refuse(model: nn.Module) -> None:
    """Say what to do with a transformer of diffusers that `swap` does not know.

    Raises:
        ValueError: a model that holds one.
    """
    for module in model.modules():
        if any(base.__module__ == "diffusers.models.modeling_utils" for base in type(module).__mro__):
            rule = f"swap knows the rotations of {', '.join(FAMILIES)}"
            by_hand = "in an attention processor of your own torchrope.rotate(q, k, rotation) takes any positions"
            raise ValueError(f"{rule}; {by_hand} (model.set_attn_processor), got {type(module).__name__}")


class OfTransformer(OfTables):
    """A transformer of diffusers, whose save_pretrained would lose the encodings."""

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        rotary.handles.append(Replaced(self.tower, "save_pretrained", refuse_save_pretrained))


def refuse_save_pretrained(*args: Any, **kwargs: Any) -> None:
    """In the place of save_pretrained."""
    rule = "from_pretrained of diffusers would drop the encodings of a swapped model"
    raise ValueError(f"{rule}: write it by torchrope.save, and read it by torchrope.load(path, into=model)")


def _family(module: nn.Module) -> Family | None:
    """The family of a transformer, or None where a module is none that is known."""
    names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("diffusers.")]
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)
