"""`ModelFamily` describes how `swap` adds encodings to the models of one class; `register_family` adds one."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from torchrope.encodings import AbsoluteEncoding, Encoding, ScoreBias
from torchrope.integrations.forward import ForwardState
from torchrope.integrations.layer import Interception, SwappedLayer
from torchrope.integrations.own_rotation import OwnRotation
from torchrope.integrations.positions import FromArgument, FromLayer, FromPatches
from torchrope.integrations.rotary import ATTRIBUTE, FrozenParameters, Replaced, Rotary
from torchrope.tensors import require_module

OLDEST = {"timm": "1.0.31", "transformers": "5.23", "diffusers": "0.42"}
"""Oldest releases that the families are tested with, as in pyproject.toml; they call functions that older ones lack."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one attention layer, from which an encoding for it is built.

    Attributes:
        lattice: Tokens along each axis at the size the model was built for; of one window for windowed attention.
        grows: Whether a larger input gives a larger lattice.
        sized: Whether that size is known; if the model was built for no particular size, the lattice is all ones.
    """

    num_heads: int
    head_dim: int
    lattice: tuple[int, ...]
    grows: bool = True
    sized: bool = True


@dataclass(frozen=True)
class BuiltInRotation:
    """The rotation that models of a family have of their own, and whether one is `present`.

    Functions of a model and its layers: `read` returns the rotation of each, or raises ValueError; `remove` makes them
    not rotate and returns handles that undo it, None if it can only be replaced.
    """

    read: Callable[[Any, Sequence[Any]], list[OwnRotation]]
    remove: Callable[[Any, Sequence[Any]], list[Any]] | None = None
    present: Callable[[Any], bool] = lambda tower: True


@dataclass(frozen=True)
class ModelFamily:
    """How `swap` adds encodings to the models of one class, and of its subclasses.

    docs/use-it-in-your-model.md adds a model in 20 lines.

    Attributes:
        model: Name of the class with its module, as a pattern of `fnmatch`: "timm.*.VisionTransformer".
        layers: Names of the attention layers in a model, in order, as a pattern: "blocks.*.attn", where * is one part
            of a name. Or a function that returns the layers of a model; none if it is not of the family.
        shape: Returns the `AttentionShape` of a layer, from the model and the layer.
        positions: Where positions come from: a class of `torchrope.integrations.positions`.
        intercept: How q and k are rotated in a layer: a class of `torchrope.integrations.layer`; or a function of
            the layer that returns it.
        rotation: The rotation that models have of their own, if any.
        position_tables: Names of the parameters that keep_position_tables=False sets to zero, as patterns whose *
            stands for any text.
        attach: Returns further handles, from a model, the model that contains it and the `Rotary`.
        of_text: Whether it is a text model; `swap` prefers a vision tower if a model has both.
        grown: Growth of the number of tokens if axes are longer by the given factors.
    """

    model: str
    layers: str | Callable[[Any], list[Any]]
    shape: Callable[[Any, Any], AttentionShape]
    positions: FromPatches | FromLayer | FromArgument
    intercept: Interception | Callable[[Any], Interception]
    rotation: BuiltInRotation | None = None
    position_tables: Sequence[str] = ()
    attach: Callable[[Any, nn.Module, Rotary], list[Any]] = lambda tower, model, rotary: []
    of_text: bool = False
    grown: Callable[[Sequence[float]], float] = math.prod

    def attention_layers(self, tower: nn.Module) -> list[Any]:
        """Return the attention layers of a model, in order; empty if it is not of the family."""
        if not isinstance(self.layers, str):
            return self.layers(tower)
        wanted = _pattern(self.layers, r"[^.]+")
        return [module for name, module in tower.named_modules() if wanted.fullmatch(name)]


@dataclass(eq=False)
class Adapter:
    """A model of a family, `tower`, within the one passed to `swap`, to whose layers encodings are attached."""

    family: ModelFamily
    tower: Any  # holds the attention layers and the tables, and gets `rotary`
    model: nn.Module  # that was passed to `swap` and contains it
    layers: list[Any]

    @property
    def rotary(self) -> Rotary | None:
        """The encodings that `swap` added to the model, if any; ValueError if another library wraps them."""
        rotary = getattr(self.tower, ATTRIBUTE, None)
        if not isinstance(rotary, Rotary | None):
            rule = "encodings of a swapped model must not be wrapped; model.merge_and_unload() ends peft's wrapping"
            raise ValueError(f"{rule}, got a {type(rotary).__name__}")
        return rotary

    def shapes(self) -> list[AttentionShape]:
        """Return the shape of each attention layer, in order."""
        return [self.family.shape(self.tower, layer) for layer in self.layers]

    def tables(self) -> dict[str, nn.Parameter]:
        """Return the position tables or biases by name."""
        patterns = [_pattern(name, ".*") for name in self.family.position_tables]
        named = self.tower.named_parameters()
        return {name: table for name, table in named if any(pattern.fullmatch(name) for pattern in patterns)}

    def rotates(self) -> bool:
        """Return whether the model has a built-in rotation of q and k."""
        return self.family.rotation is not None and self.family.rotation.present(self.tower)

    def own_rotations(self) -> list[OwnRotation]:
        """Return the built-in rotation of each attention layer, in order; ValueError if it cannot be read."""
        if self.family.rotation is None or not self.rotates():
            raise ValueError(f"init='model' needs a model with a built-in rotation, got {type(self.tower).__name__}")
        return self.family.rotation.read(self.tower, self.layers)

    def attach(self, rotary: Rotary) -> None:
        """Make the layers rotate q and k by encodings."""
        family, state = self.family, ForwardState(self.tower)
        setattr(self.tower, ATTRIBUTE, rotary)
        self.tower._rotary_state = state
        handles = state.handles
        handles.extend(family.attach(self.tower, self.model, rotary))
        if not rotary.keep_position_tables:
            handles.append(FrozenParameters(self.tower, list(self.tables().values())))
            handles.append(self.tower.register_load_state_dict_pre_hook(partial(_keep_zero, list(self.tables()))))
        remove = None if family.rotation is None else family.rotation.remove
        if remove is not None and self.rotates() and not rotary.keep_rotation:
            handles.extend(remove(self.tower, self.layers))
        handles.extend(family.positions.attach(state, self.layers))
        for index, (layer, shape) in enumerate(zip(self.layers, self.shapes(), strict=True)):
            intercept: Any = family.intercept if hasattr(family.intercept, "attach") else family.intercept(layer)
            swapped = SwappedLayer(state, index, shape.num_heads, layer, family.positions, intercept)
            handles.extend([*intercept.attach(layer, swapped), Replaced(layer, "forward", swapped.forward)])

    def detach(self) -> None:
        """Undo `attach`."""
        for handle in reversed(self.tower._rotary_state.handles):
            handle.remove()
        del self.tower._rotary_state
        delattr(self.tower, ATTRIBUTE)


def _keep_zero(names: Sequence[str], tower: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of `load_state_dict`: load a plain model's position tables, zero here, into the copies for `unswap`."""
    for index, name in enumerate(names):
        table, original = f"{prefix}{name}", f"{prefix}{ATTRIBUTE}.table{index}"
        if table in state and original not in state:
            state[original] = state[table]
            state[table] = torch.zeros_like(state[table])


_registered: list[ModelFamily] = []


def register_family(family: ModelFamily) -> None:
    """Add a family of models to those that `swap` and the functions that build on it support, before earlier ones.

    ValueError if it is no `ModelFamily`, or its `intercept` is a class.
    """
    if not isinstance(family, ModelFamily):
        raise ValueError(f"family must be a ModelFamily, got {family!r}")
    if isinstance(family.intercept, type):
        raise ValueError(f"intercept must be an object like Sdpa() or a function of a layer, got {family.intercept!r}")
    _registered.insert(0, family)
    _families_of.cache_clear()


def adapters(model: nn.Module) -> list[Adapter]:
    """Return adapters of the outermost submodules that `swap` supports; ImportError for libraries before `OLDEST`."""
    require_module("swap", model)
    supported: list[Adapter] = []
    within: set[int] = set()
    for module in model.modules():
        if id(module) in within:  # its blocks may be another library's
            continue
        for family in _families_of(type(module)):  # type: ignore[arg-type]
            layers = family.attention_layers(module)
            if layers:
                _check_version(type(module))
                supported.append(Adapter(family, module, model, layers))
                within.update(map(id, module.modules()))
                break
    return supported


@cache
def _families_of(kind: type) -> list[ModelFamily]:
    """Return the families of a class, those of the class itself before those of its bases."""
    from torchrope.integrations.families import FAMILIES

    return [
        family for name in names_of(kind) for family in (*_registered, *FAMILIES) if fnmatchcase(name, family.model)
    ]


def _check_version(kind: type) -> None:
    for library in OLDEST.keys() & {base.__module__.partition(".")[0] for base in kind.__mro__}:
        installed = getattr(sys.modules.get(library), "__version__", OLDEST[library])
        if TorchVersion(installed) < OLDEST[library]:
            raise ImportError(f"swap needs {library} {OLDEST[library]} or newer, got {installed}")


@cache
def _pattern(text: str, star: str) -> re.Pattern[str]:
    return re.compile(star.join(map(re.escape, text.split("*"))))


def names_of(kind: type) -> list[str]:
    """Return the names of a class and its bases, after those of their modules."""
    return [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of a model into groups for an optimiser, so that position encodings do not decay.

    Decay shrinks learned frequencies: 10,000 steps of rate 1e-4 and decay 0.1 leave 0.905 of each. Exempt are encodings
    and biases, also swapped and nested ones, position tables, what the `no_weight_decay()` of the model or of a part
    names, and, as in timm, parameters of at most one dimension or called "bias".

    Args:
        model: Any model, wrapped or not.
        weight_decay: That of the other parameters.

    Returns:
        The group without decay and the group with it, each with `params` and `weight_decay`.

    Raises:
        ValueError: weight_decay below 0 or not finite; a model in FSDP1, which flattens parameters.

    Example:
        >>> import torch, torchrope as tr
        >>> model = tr.ViT((8, 8), patch_size=4, num_outputs=2, dim=32, depth=2, num_heads=2, encoding="mixed")
        >>> optimizer = torch.optim.AdamW(tr.parameter_groups(model, 0.05), lr=1e-3)
    """
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be 0 or more and finite, got {weight_decay}")
    require_module("parameter_groups", model)
    exempt: set[nn.Parameter] = set()
    for part in model.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise ValueError("parameter_groups needs parameters in their shapes: use FSDP2's fully_shard, got FSDP1")
        if isinstance(part, Encoding | AbsoluteEncoding | ScoreBias):
            exempt.update(part.parameters())
        if isinstance(getattr(part, ATTRIBUTE, None), Rotary):
            exempt.update(adapters(part)[0].tables().values())
        if callable(getattr(part, "no_weight_decay", None)):
            without_decay = part.no_weight_decay()  # type: ignore[operator]
            exempt.update(parameter for name, parameter in part.named_parameters() if name in without_decay)
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith(".bias") and parameter not in exempt
            (decayed if decays else undecayed).append(parameter)
    return [{"params": undecayed, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]


def shard_groups(model: nn.Module) -> list[list[nn.Module]]:
    """Return the encodings with parameters of any model, for FSDP2: each for a `fully_shard` of its own in float32.

    A policy with param_dtype=torch.bfloat16 would round frequencies, which moves tokens far from the origin. Shard
    these groups first, then blocks and the model.
    """
    encodings = [part for part in model.modules() if isinstance(part, Encoding | AbsoluteEncoding | ScoreBias)]
    return [[part] for part in encodings if next(part.parameters(), None) is not None]
