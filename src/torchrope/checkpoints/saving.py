"""`save` and `load`: models with their encodings in safetensors files, without pickle or code execution."""

import inspect
import json
import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from torchrope import encodings as families
from torchrope._version import __version__
from torchrope.checkpoints import settings as kinds
from torchrope.checkpoints.settings import Manifest, budget, check, check_fits, errors_in_one_line, settable, shown
from torchrope.encodings import AbsoluteEncoding, Choice, Encoding, Periodic, ScoreBias
from torchrope.encodings.names import arguments_of, builders, built_as, built_class
from torchrope.files import write_whole
from torchrope.inference import Frozen, FrozenAbsolute
from torchrope.lattice import Lattice
from torchrope.models import ACTIVATIONS, Features, Swin, Transformer, ViT
from torchrope.models.layers import PatchEmbed
from torchrope.rotations import Block, Commuting, GivenAngles, Planar, PlanarInBasis
from torchrope.tensors import require_module

Model = TypeVar("Model", bound=nn.Module)

FILE = "torchrope.safetensors"
_FORMAT = 1
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


class File(NamedTuple):
    """Contents of a file, and the custom encodings that it may use."""

    header: dict[str, Any]
    manifest: Manifest
    limits: kinds.Limits  # of values in its settings
    classes: tuple[type[Encoding], ...]


swaps: Any = None
"""`torchrope.integrations.entries`, which sets it: it describes swaps of models, checks and repeats those of files."""


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's weights and a description of its encodings to one safetensors file, atomically.

    The file holds the state dict; its metadata hold the class and arguments of a `ViT`, `Swin`, `Transformer` or
    `Features` and of its encodings, absorbed, extended or frozen as they are, which `load(path)` rebuilds; or the swaps
    of a model of another library, which `load(path, into=model)` repeats in a model built the same way. Before writing,
    what `load` would build is built once on the meta device, and an error is raised if it differs.

    Args:
        model: A `ViT`, `Swin`, `Transformer` or `Features`, or a module with swapped parts, also compiled or in DDP.
        path: A file, or a folder, which gets a file `torchrope.safetensors`.

    Raises:
        ValueError: a model of another library without swapped parts; one of torchrope modified since it was built, or
            with arguments that `load` rejects; encodings that arguments of their class do not describe; a state dict
            with values that are not tensors, or of an unusual dtype.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save as to_bytes

    require_module("save", model)
    model = _unwrapped(model)
    tensors = model.state_dict()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the state dict must hold tensors only, got {name} of {type(value).__name__}")
        if value.dtype not in kinds.DTYPES:
            raise ValueError(f"tensors must be of {', '.join(map(str, kinds.DTYPES))}, got {name} of {value.dtype}")
    text = _settings(model, tensors)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    uses = Counter(tensor.untyped_storage().data_ptr() for tensor in on_cpu.values())
    for name, tensor in on_cpu.items():
        if uses[tensor.untyped_storage().data_ptr()] > 1:  # safetensors refuses shared memory
            on_cpu[name] = tensor.clone()
    write_whole(_file(path), to_bytes(on_cpu, metadata={"torchrope": text}))


@overload
def load(path: str | os.PathLike[str], *, into: Model, classes: Iterable[type[Encoding]] = ()) -> Model: ...
@overload
def load(path: str | os.PathLike[str], *, into: None = None, classes: Iterable[type[Encoding]] = ()) -> nn.Module: ...
def load(
    path: str | os.PathLike[str], *, into: nn.Module | None = None, classes: Iterable[type[Encoding]] = ()
) -> nn.Module:
    """Rebuild the model that `save` wrote, on the CPU in evaluation mode; or load into a model built the same way.

    A file names a class of torchrope and values of its arguments: numbers, booleans, one of a few strings. No other
    file is opened. The description is checked against the tensors before memory is allocated.

    Args:
        path: The file, or the folder that holds `torchrope.safetensors`.
        into: A model built like the one that was saved, not swapped, or swapped in the same way; needed for all but
            `ViT`, `Swin`, `Transformer` and `Features`. It is swapped, and frozen, as the file describes, and gets the
            weights; its dtypes, device and mode are kept. If the file does not fit, it is unchanged.
        classes: Custom encodings that the model uses; no code other than theirs and torchrope's is run.

    Raises:
        ValueError: the file is missing, truncated, damaged or not written by `save`; its tensors do not fit the model
            it describes, or `into`; it is of a model of another library and `into` is None.
    """
    from safetensors import SafetensorError

    file = _file(path)
    try:
        return _loaded(file, tuple(classes), into)
    except (OSError, RecursionError, SafetensorError, ValueError) as error:
        rule = "load needs a file that torchrope.save wrote"
        like = "" if into is None else f" from a model built like the given {type(into).__name__}"
        raise ValueError(f"{rule}{like}, got {file}: {kinds.one_line(error)}") from None


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model within torch.compile and data-parallel wrappers, which rename its tensors."""
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner: Any = model.module if parallel else getattr(model, "_orig_mod", None)
    return model if inner is None else _unwrapped(inner)


def _settings(model: nn.Module, manifest: Manifest) -> str:
    """Return the description from which `load` rebuilds a model, or swaps one that is built the same way, as JSON."""
    swap = swaps.describe_swaps(model)
    described = {
        "format": _FORMAT,
        "torchrope": __version__,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "frozen": _frozen_parts(model),
        "recipe": None if swap else _recipe(model),
        "swap": swap or None,
    }
    text = to_json(described)
    parts = [part for part in model.modules() if isinstance(part, Encoding | AbsoluteEncoding | ScoreBias | Frozen)]
    classes: Any = tuple({_build_of(part).func for part in parts})
    file = _read(text, manifest, classes)
    (swaps.check_swaps if swap else _check_equal)(model, file)
    return text


def _check_equal(model: nn.Module, file: File) -> None:
    """Raise ValueError unless the description of a model of torchrope builds one that equals it."""
    again = _built(file, "meta")
    came, built = (
        {name: f"{kinds.described(part)}{getattr(part, 'position_map', '')}" for name, part in whole.named_modules()}
        for whole in (model, again)
    )
    differing = kinds.differences(came, built)
    if differing:
        raise ValueError(f"save needs a model that was not modified since it was built, got {differing[0]}")
    check_fits(again, file.manifest)


def _loaded(path: Path, classes: tuple[type[Encoding], ...], into: nn.Module | None) -> nn.Module:
    from safetensors import safe_open

    if path.exists() and not path.is_file():
        raise ValueError("it must be a file")
    with safe_open(path, framework="pt") as opened:
        text = (opened.metadata() or {}).get("torchrope")
        if text is None:
            raise ValueError("it has no settings of torchrope")
        mapped = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a dict
    file = _read(text, mapped, classes)
    if into is not None:
        _fill(file, _unwrapped(into))
        return into
    check_fits(_built(file, "meta"), mapped)
    model = _built(file, "cpu")
    numbers = Counter({torch.float32: 0})
    for tensor in mapped.values():
        numbers[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    model.to(max(numbers, key=numbers.__getitem__))  # the dtype of encodings without parameters
    in_memory = {name: tensor.clone() for name, tensor in mapped.items()}
    model.load_state_dict(in_memory, assign=True)  # in the dtypes they were saved in
    return model.eval()


def _built(file: File, device: str) -> nn.Module:
    """Build the model of a file's settings with random weights; its size is limited by the file's tensors."""
    recipe = file.header["recipe"]
    if recipe is None:
        rule = f"it holds weights and encodings of a {file.header['model']}"
        raise ValueError(f"{rule}: build that model, without encodings, and call load(path, into=model)")
    with budget(file.manifest), errors_in_one_line("torchrope rejects its settings"):
        arguments = kinds.tuples(recipe["arguments"])
        if "positions" in arguments:
            arguments["positions"] = Lattice(**arguments["positions"])
        if "activation" in arguments:
            arguments["activation"] = _ACTIVATIONS[arguments["activation"]]
        absolute, biases = recipe["absolute"], recipe["biases"]
        arguments["encoding"] = Choice(
            partial(_build_next, Encoding, deque(recipe["encodings"]), file),
            partial(_build_next, AbsoluteEncoding, deque([absolute]), file) if absolute else None,
            partial(_build_next, ScoreBias, deque(biases), file) if biases else None,
        )
        with torch.device(device):
            model: Any = _MODELS[recipe["class"]](**arguments)
            if "features" in recipe:
                model = Features(model, **kinds.tuples(recipe["features"]))
        _freeze_again(model, file)
    return model


def _build_next(kind: type, described: deque[Any], file: File, **sizes: Any) -> Any:
    """Build the first of the described parts of a model, and move it to the end."""
    described.rotate(-1)
    sizes = {name: list(value) if isinstance(value, tuple) else value for name, value in sizes.items()}
    return build(described[-1], kind, sizes, file, device=None)


def _fill(file: File, model: nn.Module) -> None:
    """Swap a model as a file describes and load the file's weights; restore the model if they do not fit."""
    with ExitStack() as undone:
        swaps.repeat_swaps(model, file, undone)
        for part in list(model.modules()):
            undone.callback(vars(part).update, vars(part) | {"_modules": dict(part._modules)})
        _freeze_again(model, file)
        check_fits(model, file.manifest)
        undone.pop_all()
    model.load_state_dict(file.manifest)


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def describe(part: Any) -> dict[str, Any]:
    """Return the class name and constructor arguments of an encoding or bias, or of the encoding that was frozen."""
    build = part if isinstance(part, partial) else _build_of(part)
    cls: Any = build.func
    for name in arguments_of(cls):
        if name not in build.keywords:
            rule = "each constructor argument of an encoding must be an attribute of the same name"
            raise ValueError(f"{rule}, got {cls.__name__} without {name}")
    return {"class": cls.__name__, "arguments": build.keywords}


def _build_of(part: nn.Module) -> partial[Any]:
    """Return the class of an encoding or bias, or of the encoding that was frozen, with its arguments."""
    return part.build if isinstance(part, Frozen | FrozenAbsolute) else built_as(part)


def to_json(settings: dict[str, Any]) -> str:
    """Serialise settings as JSON; ValueError if it cannot represent a value."""
    try:
        return json.dumps(settings, default=_plain)
    except TypeError as error:
        raise ValueError(f"save needs settings that JSON can represent, got: {error}") from None


def build(described: Any, kind: type, sizes: Mapping[str, Any], file: File, device: Any) -> Any:
    """Build an encoding or bias of these sizes, of torchrope or, with a device on the CPU, custom."""
    check("each of its encodings", described, _ENCODING, file.limits)
    name, arguments, known = described["class"], described["arguments"], getattr(families, described["class"], None)
    registered = [cls for cls in map(built_class, builders().values()) if cls is not None]
    cls = {cls.__name__: cls for cls in (*registered, *file.classes)}.get(name, known)
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise ValueError(f"custom encodings must be passed as classes=[...] or registered, got a model with {name}")
    choices = {key: sorted({1, value}) if key == "num_heads" else [value] for key, value in sizes.items()}
    allowed = settable(cls) | {key: kinds.one_of(*values) for key, values in choices.items()}
    check(f"the arguments of {name}", arguments, allowed, file.limits, partly=True)
    nested = [key for key in arguments if allowed[key] is kinds.PART]
    parts = {key: build(arguments[key], Encoding, sizes, file, device) for key in nested}
    default_device = nullcontext() if device is None else device if cls is known else torch.device("cpu")
    with default_device, errors_in_one_line(f"{name} rejects its settings"):
        lattices = {key: Lattice(**kinds.tuples(arguments[key])) for key in arguments if allowed[key] is kinds.LATTICE}
        return cls(**kinds.tuples(arguments) | lattices | parts)


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, Lattice):
        return value.settings()
    within_another = isinstance(value, partial) and isinstance(value.func, type)
    if within_another or isinstance(value, Encoding | Frozen):
        return describe(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _recipe(model: Any) -> dict[str, Any]:
    """Return the class and non-default arguments of a model, and its encodings; of `Features` also its model's."""
    if type(model) is Features:
        return {**_recipe(model.model), "features": model.arguments}
    name = type(model).__name__
    if _MODELS.get(name) is not type(model):
        raise ValueError(f"save supports {', '.join(_MODELS)}, Features and swapped models, got {name}")
    defaults = {key: parameter.default for key, parameter in inspect.signature(type(model)).parameters.items()}
    arguments = {key: value for key, value in model.arguments.items() if key != "encoding"}
    changed = {key: value for key, value in arguments.items() if value is not defaults[key]}
    if isinstance(model, ViT):
        changed["positions"] = model.position_map
    if "activation" in changed:
        kind = type(model.get_submodule("layers.0.mlp.1"))
        changed["activation"] = next((name for name, known in _ACTIVATIONS.items() if known is kind), kind.__name__)
    stages = list(getattr(model, "stages", [model]))
    encodings = [_build_of(encoding) for stage in stages for encoding in stage.encodings]
    if isinstance(model, Transformer) and getattr(changed.get("positions"), "periods", None) is not None:
        encodings = [built.keywords["encoding"] if built.func is Periodic else built for built in encodings]
    return {
        "class": name,
        "arguments": changed,
        "encodings": list(map(describe, encodings)),
        "absolute": None if model.absolute is None else describe(model.absolute),
        "biases": [describe(bias) for stage in stages for bias in getattr(stage, "biases", ())],
    }


def _read(text: str, manifest: Manifest, classes: tuple[type[Encoding], ...]) -> File:
    """Parse the settings of a file and check them, except for its swaps, against limits from its tensors."""
    limits = kinds.limits_of(manifest)
    if len(text) > _LONGEST:
        raise ValueError(f"its settings must be up to {_LONGEST:,} characters, got {len(text):,}")
    reals = partial(_number, float)
    try:
        header = json.loads(text, parse_int=partial(_number, int), parse_float=reals, parse_constant=reals)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its settings must be JSON, got {error}") from None
    if isinstance(header, dict) and (type(header.get("format")) is not int or header["format"] != _FORMAT):
        raise ValueError(f"its settings must be of format {_FORMAT}, got format {shown(header.get('format'))}")
    check("its settings", header, _HEADER, limits)
    recipe, swap = header["recipe"], header["swap"]
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
    return File(header, manifest, limits, classes)


def _frozen_parts(model: nn.Module) -> dict[str, Any] | None:
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


def _freeze_again(model: nn.Module, file: File) -> None:
    """Replace the encodings of a model by frozen ones, without values, as described and as large as the tensors."""
    modules, like = dict(model.named_modules(remove_duplicate=False)), next(model.parameters())
    for name, described in (file.header["frozen"] or {}).items():
        check(f"{shown(name)} of its frozen parts", described, _FROZEN, file.limits)
        kind, settings, part = described["kind"], kinds.tuples(described["settings"]), modules.get(name)
        expected = PatchEmbed if kind == "PatchEmbed" else (Encoding, AbsoluteEncoding, Frozen, FrozenAbsolute)
        if not isinstance(part, expected):
            raise ValueError(f"its frozen parts must be encodings of its model, got {shown(name)}")
        stored = {key[len(name) + 1 :]: value for key, value in file.manifest.items() if key.startswith(f"{name}.")}
        with errors_in_one_line(f"{shown(name)} cannot be frozen"):
            if isinstance(part, PatchEmbed):
                part.frozen_size = settings["sizes"]
                continue
            made: Frozen | FrozenAbsolute
            if kind == "FrozenAbsolute":
                made = FrozenAbsolute(_build_of(part), settings["sizes"], like.new_empty(stored["table"].shape))
            else:
                wide = torch.promote_types(like.dtype, torch.float32)
                tensors = {key: like.new_empty(value.shape, dtype=wide) for key, value in stored.items()}
                made = Frozen(_build_of(part), _ROTATIONS[kind], settings, tensors)
                if made.rotation().shape[-1:] != made.frozen_at.shape[-2:-1]:
                    raise ValueError("it must have as many tokens as positions")
        model.set_submodule(name, made.eval())


def _number(kind: type, digits: str) -> Any:
    if len(digits) > 30 or not math.isfinite(float(digits)):
        raise ValueError(f"its settings must hold finite numbers of up to 30 characters, got {shown(digits)}")
    return kind(digits)
