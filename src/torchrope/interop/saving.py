"""Save a model with its encodings, and build it again from the file: safetensors, nothing pickled, nothing executed."""

import inspect
import json
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrope import encodings as families
from torchrope._version import __version__
from torchrope.encodings import Encoding
from torchrope.files import write_whole
from torchrope.interop.rotary import ATTRIBUTE, Rotary
from torchrope.interop.swap import LIBRARIES, adapt, install, origins

FILE = "torchrope.safetensors"
"""The name of the file in a folder."""

_FORMAT = 1
_REBUILDERS = {**LIBRARIES, "torchrope": "torchrope.interop.own"}


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's weights and what rebuilds it around them into one safetensors file, whole or not at all.

    The file holds the state dict; its metadata the library, the architecture with its arguments, and the encodings.
    Before anything is written the model is rebuilt once without memory, so that what `load` could not give back is
    refused now.

    Args:
        model: Made by timm.create_model or one of transformers' supported classes; swapped, or not.
        path: A file, or a folder, which gets a file `torchrope.safetensors`.

    Raises:
        ValueError: a model that cannot be rebuilt: of another library, changed by hand since it was made, or with
            encodings of a class that torchrope does not have.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save as to_bytes

    library = _library(model)
    recipe = _through_json(import_module(_REBUILDERS[library]).recipe(model))
    head = {"format": _FORMAT, "torchrope": __version__, "library": library, "recipe": recipe, "swap": None}
    rotary, tensors = _rotary(model), model.state_dict()
    again = _rebuilt(head, "meta")
    if rotary is not None and _rotary(again) is None:  # otherwise the recipe builds the encodings too
        head["swap"] = _through_json(_described(rotary))
        _swap_again(again, head["swap"], tensors, [type(encoding) for encoding in rotary.encodings])
    _check_rebuilds(model, again)
    write_whole(_file(path), to_bytes(_own_memory(tensors), metadata={"torchrope": json.dumps(head)}))


def load(path: str | os.PathLike[str], *, classes: Iterable[type[Encoding]] = ()) -> nn.Module:
    """Build the model that `save` wrote, on the CPU, in evaluation mode.

    Args:
        path: The file, or the folder that holds `torchrope.safetensors`.
        classes: Encodings of your own that the model uses; no other code than theirs and the libraries' runs.

    Returns:
        The model, swapped if it was.

    Raises:
        ValueError: the file is missing, cut off or another's; its tensors do not fit the model it names.
    """
    from safetensors import SafetensorError, safe_open

    file = _file(path)
    try:
        with safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {}).get("torchrope")
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118, it is no dict
    except (OSError, SafetensorError) as error:
        raise ValueError(f"load needs a file that torchrope.save wrote, got {file}: {error}") from None
    head = None if text is None else json.loads(text)
    if head is None or head.get("format") != _FORMAT:
        came = "none of its settings" if head is None else f"format {head.get('format')}"
        raise ValueError(f"load needs a file that torchrope.save wrote in format {_FORMAT}, got {file} with {came}")
    model = _rebuilt(head, "cpu")
    if head["swap"] is not None:
        _swap_again(model, head["swap"], tensors, classes)
    wrong = model.load_state_dict(tensors, strict=False, assign=True)  # in the dtypes they were saved in
    if wrong.missing_keys or wrong.unexpected_keys:
        rule = f"load needs the tensors of {head['recipe']}"
        raise ValueError(f"{rule}, got none of {wrong.missing_keys} and unknown {wrong.unexpected_keys} in {file}")
    return model.eval()


def describe(encoding: nn.Module) -> dict[str, Any]:
    """An encoding as plain data: its class and the arguments that build it."""
    accepted = {
        name: parameter
        for base in type(encoding).__mro__
        if issubclass(base, Encoding) and base is not Encoding and "__init__" in vars(base)
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    return {"class": type(encoding).__name__, "arguments": {name: getattr(encoding, name) for name in accepted}}


def build(description: dict[str, Any], classes: Iterable[type[Encoding]] = ()) -> Encoding:
    """The encoding that was described, of torchrope's classes and those given."""
    name = description["class"]
    own = {one.__name__: one for one in classes}
    found = own.get(name, getattr(families, name, None))
    if not (isinstance(found, type) and issubclass(found, Encoding)):
        raise ValueError(f"encodings of your own must be given as classes=[...], got a model with {name}")
    return found(**_tuples(description["arguments"]))


def _library(model: nn.Module) -> str:
    """Which library builds a model; a model of timm's that is registered here is timm's."""
    known = origins(type(model))
    if known:
        return known[0]
    if type(model).__module__.startswith("torchrope."):
        return "torchrope"
    raise ValueError(f"save rebuilds models of {', '.join(_REBUILDERS)}, got {type(model).__name__}")


def _described(rotary: Rotary) -> dict[str, Any]:
    return {
        "encodings": [describe(encoding) for encoding in rotary.encodings],
        "keep_ape": rotary.keep_ape,
        "keep_rotation": rotary.keep_rotation,
        "lattices": rotary.lattices,
    }


def _through_json(value: Any) -> Any:
    """A value as `load` will read it."""
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        raise ValueError(f"save writes settings as JSON, got a model built with another: {error}") from None


def _swap_again(model: nn.Module, swapped: dict[str, Any], tensors: dict[str, Tensor], classes: Iterable[Any]) -> None:
    """Put the encodings that were described into a model, their weights as they come."""
    own = tuple(classes)
    encodings = [build(description, own) for description in swapped["encodings"]]
    choices = {name: swapped[name] for name in ("keep_ape", "keep_rotation")}
    rotary = install(adapt(model), encodings, spacing=None, origin=None, **choices)
    rotary.lattices = list(_tuples(swapped["lattices"]))
    for name in list(rotary._buffers):  # a table that was put aside may be of another input size
        saved = [tensor for key, tensor in tensors.items() if key.endswith(f"{ATTRIBUTE}.{name}")]
        rotary._buffers[name] = torch.empty_like(saved[0], device=next(model.parameters()).device)


def _rebuilt(head: dict[str, Any], device: str) -> nn.Module:
    model: nn.Module = import_module(_REBUILDERS[head["library"]]).rebuild(_tuples(head["recipe"]), device)
    return model


def _rotary(model: nn.Module) -> Rotary | None:
    return next((module for module in model.modules() if isinstance(module, Rotary)), None)


def _check_rebuilds(model: nn.Module, again: nn.Module) -> None:
    """Refuse a model that its recipe does not give back."""
    parts, rebuilt = ({name: type(part) for name, part in one.named_modules()} for one in (model, again))
    shapes, shapes_again = ({name: part.shape for name, part in one.state_dict().items()} for one in (model, again))
    for was, would in ((parts, rebuilt), (shapes, shapes_again)):
        for name in [*was, *would]:
            if was.get(name) != would.get(name):
                rule = "save needs a model as it was built, so that load can build it again"
                raise ValueError(f"{rule}, got {name or 'the model'}: {was.get(name)} instead of {would.get(name)}")


def _own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, each in memory of its own."""
    alone: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        alone[name] = here.clone() if here.untyped_storage().data_ptr() in seen else here
        seen.add(here.untyped_storage().data_ptr())
    return alone


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _tuples(value: Any) -> Any:
    """JSON knows lists alone; sizes are tuples."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value
