"""Models and encodings as plain data: describe them, write and check the settings of files, build them again."""

import inspect
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from torchrope import encodings as families
from torchrope.checkpoints import settings as kinds
from torchrope.checkpoints.settings import Layout, Limits, check, errors_in_one_line, settable, shown
from torchrope.encodings import AbsoluteEncoding, Choice, Encoding, Periodic, ScoreBias
from torchrope.encodings.names import arguments_of, builders, built_as, built_class
from torchrope.inference import Frozen, FrozenAbsolute
from torchrope.lattice import Lattice
from torchrope.models import ACTIVATIONS, Features, Swin, Transformer, ViT
from torchrope.models.layers import PatchEmbed
from torchrope.rotations import Block, Commuting, GivenAngles, Planar, PlanarInBasis

FORMAT = 1

_LONGEST = 2**24
_ANY = kinds.Kind("", lambda value, _: True)  # validated separately
_HEADER = {
    "format": _ANY,
    "torchrope": kinds.LABEL,
    "model": kinds.matching(r"[\w.<>]{1,1000}", "the name of a class"),
    "recipe": _ANY,
    "swap": _ANY,
    "frozen": kinds.named(kinds.LABEL, kinds.MAPPING) | kinds.NOTHING,
}
_MODELS: dict[str, type[ViT | Swin | Transformer]] = {"ViT": ViT, "Swin": Swin, "Transformer": Transformer}
_ACTIVATIONS: dict[str, Any] = {**ACTIVATIONS, "relu": nn.ReLU, "silu": nn.SiLU}
_ROTATIONS = {kind.__name__: kind for kind in (Planar, GivenAngles, PlanarInBasis, Commuting, Block)}
_FROZEN = {
    "kind": kinds.one_of(*_ROTATIONS, "FrozenAbsolute", "PatchEmbed"),
    "settings": kinds.named(kinds.LABEL, kinds.DATA),
}
# Arguments whose annotations allow functions too, and numbers that must not add up to more layers than tensors.
_SPECIAL = {"positions": kinds.LATTICE, "depths": kinds.DEPTHS, "activation": kinds.one_of(*_ACTIVATIONS)}
_ENCODING = {"class": kinds.matching(r"\w{1,200}", "a name"), "arguments": kinds.MAPPING}
_PARTS = {"encodings": kinds.PARTS, "absolute": kinds.PART | kinds.NOTHING, "biases": kinds.PARTS}


def describe(part: Any) -> dict[str, Any]:
    """Return the class name and constructor arguments of an encoding or bias, or of the encoding that was frozen."""
    build = part if isinstance(part, partial) else build_of(part)
    cls: Any = build.func
    for name in arguments_of(cls):
        if name not in build.keywords:
            rule = "each constructor argument of an encoding must be an attribute of the same name"
            raise ValueError(f"{rule}, got {cls.__name__} without {name}")
    return {"class": cls.__name__, "arguments": build.keywords}


def build_of(part: nn.Module) -> partial[Any]:
    """Return the class of an encoding or bias, or of the encoding that was frozen, with its arguments."""
    return part.build if isinstance(part, Frozen | FrozenAbsolute) else built_as(part)


def to_json(settings: dict[str, Any]) -> str:
    """Serialise settings as JSON; ValueError if it cannot represent a value."""
    try:
        return json.dumps(settings, default=_plain)
    except TypeError as error:
        raise ValueError(f"save needs settings that JSON can represent, got: {error}") from None


def build(
    described: Any, kind: type, sizes: Mapping[str, Any], classes: Iterable[type], limits: Limits, device: Any
) -> Any:
    """Build an encoding or bias of these sizes, of torchrope or, with a device on the CPU, custom."""
    check("each of its encodings", described, _ENCODING, limits)
    name, arguments, known = described["class"], described["arguments"], getattr(families, described["class"], None)
    registered = [cls for cls in map(built_class, builders().values()) if cls is not None]
    cls = {cls.__name__: cls for cls in (*registered, *classes)}.get(name, known)
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise ValueError(f"custom encodings must be passed as classes=[...] or registered, got a model with {name}")
    choices = {key: sorted({1, value}) if key == "num_heads" else [value] for key, value in sizes.items()}
    allowed = settable(cls) | {key: kinds.one_of(*values) for key, values in choices.items()}
    check(f"the arguments of {name}", arguments, allowed, limits, partly=True)
    nested = [key for key in arguments if allowed[key] is kinds.PART]
    parts = {key: build(arguments[key], Encoding, sizes, classes, limits, device) for key in nested}
    place = nullcontext() if device is None else device if cls is known else torch.device("cpu")
    with place, errors_in_one_line(f"{name} rejects its settings"):
        lattices = {key: Lattice(**kinds.tuples(arguments[key])) for key in arguments if allowed[key] is kinds.LATTICE}
        return cls(**kinds.tuples(arguments) | lattices | parts)


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, Lattice):
        return value.settings()
    if isinstance(value, partial) and isinstance(value.func, type):  # an encoding within another
        return describe(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def recipe(model: Any) -> dict[str, Any]:
    """Return the class and non-default arguments of a model, and its encodings; of `Features` also its model's."""
    if type(model) is Features:
        return {**recipe(model.model), "features": model.arguments}
    name = type(model).__name__
    if _MODELS.get(name) is not type(model):
        raise ValueError(f"save supports {', '.join(_MODELS)}, Features and swapped models, got {name}")
    defaults = {key: parameter.default for key, parameter in inspect.signature(type(model)).parameters.items()}
    given = {key: value for key, value in model.arguments.items() if value is not defaults[key]}
    given = {key: value for key, value in given.items() if key not in ("encoding", "absolute", "bias")}
    if isinstance(model, ViT):
        given["positions"] = model.position_map
    if "positions" in given and type(given["positions"]) is not Lattice:
        raise ValueError(f"save supports positions of a Lattice, got a {type(given['positions']).__name__}")
    if "activation" in given:
        kind = type(model.get_submodule("layers.0.mlp.1"))
        given["activation"] = next((name for name, known in _ACTIVATIONS.items() if known is kind), kind.__name__)
    stages = list(getattr(model, "stages", [model]))
    encodings = [build_of(encoding) for stage in stages for encoding in stage.encodings]
    if isinstance(model, Transformer) and getattr(given.get("positions"), "periods", None) is not None:
        encodings = [one.keywords["encoding"] if one.func is Periodic else one for one in encodings]
    return {
        "class": name,
        "arguments": given,
        "encodings": list(map(describe, encodings)),
        "absolute": None if model.absolute is None else describe(model.absolute),
        "biases": [describe(bias) for stage in stages for bias in getattr(stage, "biases", ())],
    }


def read_header(text: str, limits: Limits) -> dict[str, Any]:
    """Parse the settings of a file and check them, except for its swaps, against limits from its tensors."""
    if len(text) > _LONGEST:
        raise ValueError(f"its settings must be up to {_LONGEST:,} characters, got {len(text):,}")
    reals = partial(_number, float)
    try:
        given = json.loads(text, parse_int=partial(_number, int), parse_float=reals, parse_constant=reals)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its settings must be JSON, got {error}") from None
    if isinstance(given, dict) and (type(given.get("format")) is not int or given["format"] != FORMAT):
        raise ValueError(f"its settings must be of format {FORMAT}, got format {shown(given.get('format'))}")
    check("its settings", given, _HEADER, limits)
    recipe, swap = given["recipe"], given["swap"]
    if recipe is not None:
        allowed = {"class": kinds.one_of(*_MODELS), "arguments": kinds.MAPPING, **_PARTS}
        allowed |= {"features": kinds.MAPPING} if isinstance(recipe, dict) and "features" in recipe else {}
        check("its recipe", recipe, allowed, limits)
        name, arguments = recipe["class"], recipe["arguments"]
        check(f"the arguments of {name}", arguments, settable(_MODELS[name]) | _SPECIAL, limits, partly=True)
        check("the arguments of Features", recipe.get("features", {}), settable(Features), limits, partly=True)
        check("its settings", {"swap": swap}, {"swap": kinds.NOTHING}, limits)
    elif not isinstance(swap, dict) or len(swap) > limits.layers:
        raise ValueError(f"its swap must map up to {limits.layers} names of submodules to swaps, got {shown(swap)}")
    return given


def _build_next(kind: type, described: deque[Any], classes: Iterable[type], limits: Limits, **sizes: Any) -> Any:
    """Build the first of the described parts of a model, and move it to the end."""
    described.rotate(-1)
    sizes = {name: list(value) if isinstance(value, tuple) else value for name, value in sizes.items()}
    return build(described[-1], kind, sizes, classes, limits, device=None)


def rebuild(recipe: dict[str, Any], device: str, classes: Iterable[type], limits: Limits) -> nn.Module:
    """Build the model of a recipe with randomly initialised weights."""
    arguments = kinds.tuples(recipe["arguments"])
    if "positions" in arguments:
        arguments["positions"] = Lattice(**arguments["positions"])
    if "activation" in arguments:
        arguments["activation"] = _ACTIVATIONS[arguments["activation"]]
    absolute, biases = recipe["absolute"], recipe["biases"]
    arguments["encoding"] = Choice(
        "",
        partial(_build_next, Encoding, deque(recipe["encodings"]), classes, limits),
        partial(_build_next, AbsoluteEncoding, deque([absolute]), classes, limits) if absolute else None,
        partial(_build_next, ScoreBias, deque(biases), classes, limits) if biases else None,
    )
    with torch.device(device):
        model: Any = _MODELS[recipe["class"]](**arguments)
        return Features(model, **kinds.tuples(recipe["features"])) if "features" in recipe else model


def frozen_parts(model: nn.Module) -> dict[str, Any] | None:
    """Return descriptions of the frozen parts of a model by name, None if there are none."""
    parts: dict[str, Any] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, FrozenAbsolute):
            parts[name] = {"kind": "FrozenAbsolute", "settings": {"sizes": part.sizes}}
        elif isinstance(part, Frozen):
            if part.kind.__name__ not in _ROTATIONS:
                raise ValueError(f"save supports rotations of {', '.join(_ROTATIONS)}, got {part.kind.__name__}")
            parts[name] = {"kind": part.kind.__name__, "settings": part.settings}
        elif isinstance(part, PatchEmbed) and part.frozen_size is not None:
            parts[name] = {"kind": "PatchEmbed", "settings": {"sizes": part.frozen_size}}
    return parts or None


def freeze_again(model: nn.Module, parts: dict[str, Any], layout: Layout) -> None:
    """Replace the encodings of a model by frozen ones, without values, as described and as large as the tensors."""
    limits, like = kinds.limits_of(layout), next(model.parameters())
    found = dict(model.named_modules(remove_duplicate=False))
    for name, described in parts.items():
        check(f"{shown(name)} of its frozen parts", described, _FROZEN, limits)
        kind, settings, part = described["kind"], kinds.tuples(described["settings"]), found.get(name)
        expected = PatchEmbed if kind == "PatchEmbed" else (Encoding, AbsoluteEncoding, Frozen, FrozenAbsolute)
        if not isinstance(part, expected):
            raise ValueError(f"its frozen parts must be encodings of its model, got {shown(name)}")
        stored = {key[len(name) + 1 :]: value for key, value in layout.items() if key.startswith(f"{name}.")}
        with errors_in_one_line(f"{shown(name)} cannot be frozen"):
            if isinstance(part, PatchEmbed):
                part.frozen_size = settings["sizes"]
                continue
            made: Frozen | FrozenAbsolute
            if kind == "FrozenAbsolute":
                made = FrozenAbsolute(build_of(part), settings["sizes"], like.new_empty(stored["table"].shape))
            else:
                wide = torch.promote_types(like.dtype, torch.float32)
                tensors = {key: like.new_empty(value.shape, dtype=wide) for key, value in stored.items()}
                made = Frozen(build_of(part), _ROTATIONS[kind], settings, tensors)
                if made.rotation().shape[-1:] != made.frozen_at.shape[-2:-1]:
                    raise ValueError("it must have as many tokens as positions")
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._modules[child] = made.eval()


def _number(kind: type, digits: str) -> Any:
    if len(digits) > 30 or not math.isfinite(float(digits)):
        raise ValueError(f"its settings must hold finite numbers of up to 30 characters, got {shown(digits)}")
    return kind(digits)
