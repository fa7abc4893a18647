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
