"""Save a model with its encodings, and build it again from the file: safetensors, nothing pickled, nothing executed."""

import inspect
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrope import encodings as families
from torchrope._version import __version__
from torchrope.encodings import Encoding
from torchrope.files import write_whole
from torchrope.integrations.header import FORMAT, REBUILDERS, Header, read_header, tuples
from torchrope.integrations.layout import Layout, budget, check_fits, layout_of, layout_of_file, limits_of
from torchrope.integrations.own_rotation import Lattice
from torchrope.integrations.rotary import ATTRIBUTE, Rotary, Site
from torchrope.integrations.settings import (
    ENCODINGS,
    Limits,
    check,
    one_line,
    one_of,
    shown,
    told_in_one_line,
)
from torchrope.integrations.swap import adapt, check_fit, install, origins

FILE = "torchrope.safetensors"
"""The name of the file in a folder."""


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's weights and what rebuilds it around them into one safetensors file, whole or not at all.

    The file holds the state dict; its metadata the library, the architecture with its arguments, and the encodings.
    Before anything is written the model is rebuilt once without memory, so that what `load` could not give back is
    refused now.

    Args:
        model: Made by timm.create_model or one of transformers' supported classes; swapped, or not.
        path: A file, or a folder, which gets a file `torchrope.safetensors`.

    Raises:
        ValueError: a model that cannot be rebuilt: of another library, changed by hand since it was made, built with
            arguments that `load` does not take from files, or with encodings of a class that torchrope does not have.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save as to_bytes

    tensors = model.state_dict()
    text = _settings(model, layout_of(tensors))
    write_whole(_file(path), to_bytes(_own_memory(tensors), metadata={"torchrope": text}))


def load(path: str | os.PathLike[str], *, classes: Iterable[type[Encoding]] = ()) -> nn.Module:
    """Build the model that `save` wrote, on the CPU, in evaluation mode.

    A file names a class or an architecture that is installed, and arguments of a closed list: no weights are fetched,
    no other file is opened. What it names must fit its tensors before memory is taken.

    Args:
        path: The file, or the folder that holds `torchrope.safetensors`.
        classes: Encodings of your own that the model uses; no other code than theirs and the libraries' runs.

    Returns:
        The model, swapped if it was.

    Raises:
        ValueError: the file is missing, cut off, damaged or another's; its tensors do not fit the model it names.
    """
    from safetensors import SafetensorError

    file = _file(path)
    try:
        return _loaded(file, tuple(classes))
    except (OSError, SafetensorError, ValueError) as error:
        rule = "load needs a file that torchrope.save wrote"
        raise ValueError(f"{rule}, got {file}: {one_line(error)}") from None


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
    return _class_of(description, classes)(**tuples(description["arguments"]))


def _settings(model: nn.Module, layout: Layout) -> str:
    """What rebuilds a model around its tensors, as JSON that `load` takes."""
    library, rotary = _library(model), _rotary(model)
    own = {type(encoding) for encoding in rotary.encodings} if rotary is not None else set()
    recipe = import_module(REBUILDERS[library]).recipe(model)
    head = {"format": FORMAT, "torchrope": __version__, "library": library, "recipe": recipe, "swap": None}
    text, again = _rebuilt(head, layout, own)
    if rotary is not None and _rotary(again) is None:  # otherwise the recipe builds the encodings too
        text, again = _rebuilt({**head, "swap": _described(rotary)}, layout, own)
    _check_rebuilds(model, again)
    check_fits(again, layout)
    return text


def _rebuilt(head: dict[str, Any], layout: Layout, classes: Iterable[Any]) -> tuple[str, nn.Module]:
    """Settings as they are written, and the model that they give, without memory."""
    text = _written(head)
    return text, _built(read_header(text, limits_of(layout)), layout, tuple(classes), "meta")


def _loaded(file: Path, classes: tuple[type[Encoding], ...]) -> nn.Module:
    from safetensors import safe_open

    if file.exists() and not file.is_file():
        raise ValueError("it must be a file")
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get("torchrope")
        if text is None:
            raise ValueError("it has none of its settings")
        layout = layout_of_file(opened)
        header = read_header(text, limits_of(layout))
        check_fits(_built(header, layout, classes, "meta"), layout)
        tensors = {name: opened.get_tensor(name).clone() for name in layout}
    model = _built(header, layout, classes, "cpu")
    model.load_state_dict(tensors, assign=True)  # in the dtypes they were saved in
    return model.eval()


def _class_of(description: dict[str, Any], classes: Iterable[type[Encoding]]) -> type[Encoding]:
    name = description["class"]
    found = {one.__name__: one for one in classes}.get(name, getattr(families, name, None))
    if not (isinstance(found, type) and issubclass(found, Encoding)):
        raise ValueError(f"encodings of your own must be given as classes=[...], got a model with {name}")
    return found


def _library(model: nn.Module) -> str:
    """Which library builds a model; a model of timm's that is registered here is timm's."""
    known = origins(type(model))
    if known:
        return known[0]
    if type(model).__module__.startswith("torchrope."):
        return "torchrope"
    raise ValueError(f"save rebuilds models of {', '.join(REBUILDERS)}, got {type(model).__name__}")


def _described(rotary: Rotary) -> dict[str, Any]:
    return {
        "encodings": [describe(encoding) for encoding in rotary.encodings],
        "keep_ape": rotary.keep_ape,
        "keep_rotation": rotary.keep_rotation,
        "lattices": [asdict(lattice) for lattice in rotary.lattices],
        "channels": rotary.channels,
    }


def _written(head: dict[str, Any]) -> str:
    try:
        return json.dumps(head)
    except TypeError as error:
        raise ValueError(f"save writes settings as JSON, got a model built with another: {error}") from None


def _built(header: Header, layout: Layout, classes: tuple[type[Encoding], ...], device: str) -> nn.Module:
    """The model of a file's settings, its weights random; of no more parameters than its tensors explain."""
    with budget(layout):
        with told_in_one_line(f"{header.library} refuses its settings"):
            model: nn.Module = import_module(REBUILDERS[header.library]).rebuild(header.recipe, device)
        if header.swap is not None:
            _swap_again(model, header.swap, layout, classes)
    return model


def _swap_again(model: nn.Module, swap: dict[str, Any], layout: Layout, classes: tuple[type[Encoding], ...]) -> None:
    """Put the encodings that were described into a model, their weights as they come."""
    adapter = adapt(model)
    if getattr(adapter.tower, ATTRIBUTE, None) is not None:
        raise ValueError("its swap must be of a model that is built without encodings, got one that has some")
    sites, descriptions = adapter.sites(), swap["encodings"]
    if len(descriptions) not in (1, len(sites)):
        raise ValueError(f"encodings of its swap must be one, or {len(sites)} for the layers, got {len(descriptions)}")
    own = next(adapter.tower.parameters())
    pairs, limits = zip(descriptions, sites, strict=False), limits_of(layout)  # one alone is for all
    encodings = [_encoding(one, site, classes, own.device, limits) for one, site in pairs]
    if len(descriptions) == 1:
        for site in sites:
            check_fit(encodings[0], site)
    choices = {name: swap[name] for name in ("keep_ape", "keep_rotation")}
    lattices = [_lattice(one, len(sites[0].lattice)) for one in swap["lattices"]]
    channels = [_channels(one, site.head_dim) for one, site in zip(swap["channels"], sites, strict=False)]
    with told_in_one_line("the model refuses its encodings"):
        rotary = install(adapter, encodings, lattices, channels, **choices)
    for name, table in list(rotary._buffers.items()):  # one that was put aside may be of another input size
        shapes = [stored.shape for key, stored in layout.items() if key.endswith(f"{ATTRIBUTE}.{name}")]
        if table is not None and shapes and _resizes(table, shapes[0]):
            rotary._buffers[name] = torch.empty(shapes[0], dtype=table.dtype, device=own.device)


def _encoding(
    description: dict[str, Any],
    site: Site,
    classes: tuple[type[Encoding], ...],
    device: torch.device,
    limits: Limits,
) -> Encoding:
    """The encoding that was described for a layer; torchrope's on the device, others on the CPU, as they may need."""
    place = {
        "num_axes": one_of(len(site.lattice)),
        "num_heads": one_of(*{1, site.num_heads}),
        "head_dim": one_of(site.head_dim),
    }
    arguments, what = description["arguments"], f"the arguments of {description['class']}"
    if _class_of(description, classes) is getattr(families, description["class"], None):
        check(what, arguments, ENCODINGS | place, limits, partly=True)
    else:
        check(what, {name: arguments[name] for name in place if name in arguments}, place, limits, partly=True)
        device = torch.device("cpu")
    with device, told_in_one_line(f"{description['class']} refuses its settings"):
        encoding = build(description, classes)
    check_fit(encoding, site)
    return encoding


def _resizes(table: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a table of positions may have this shape at another input size."""
    return 0 not in shape and len(shape) == table.ndim and shape[-1:] == table.shape[-1:]


def _lattice(described: dict[str, Any], num_axes: int) -> Lattice:
    for name, value in described.items():
        if isinstance(value, list) and len(value) != num_axes:
            raise ValueError(f"{name} of its lattices must be one number or {num_axes}, got {shown(value)}")
    return Lattice(**{name: tuples(value) for name, value in described.items()})


def _channels(described: list[int] | None, head_dim: int) -> tuple[int, ...] | None:
    if described is None:
        return None
    if sorted(described) != list(range(head_dim)):
        rule = f"channels of its swap must be each of the {head_dim} of a head once"
        raise ValueError(f"{rule}, got {shown(described)}")
    return tuple(described)


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
