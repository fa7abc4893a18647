"""Save a model with its encodings, and build it again from the file: safetensors, nothing pickled, nothing executed."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from torchrope import encodings as families
from torchrope._version import __version__
from torchrope.encodings import Encoding
from torchrope.files import write_whole
from torchrope.integrations.describing import class_of, describe, written
from torchrope.integrations.header import FORMAT, REBUILDERS, Header, read_header, tuples
from torchrope.integrations.layout import Layout, budget, check_fits, layout_of, layout_of_file, limits_of
from torchrope.integrations.own_rotation import Lattice
from torchrope.integrations.rotary import ATTRIBUTE, Adapter, Rotary, Site
from torchrope.integrations.settings import (
    ENCODINGS,
    Limits,
    check,
    one_line,
    one_of,
    shown,
    told_in_one_line,
)
from torchrope.integrations.swap import adapt, adapters, check_fit, install, origins

Model = TypeVar("Model", bound=nn.Module)

FILE = "torchrope.safetensors"
"""The name of the file in a folder."""

_HEAD = {"format": FORMAT, "torchrope": __version__}


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's weights and what rebuilds it around them into one safetensors file, whole or not at all.

    The file holds the state dict; its metadata the library, the architecture with its arguments, and the encodings.
    Before anything is written the model is rebuilt once without memory. A model with swapped parts that no library
    builds again, a composite or one of your own, is written with a description of its swaps alone, and loaded into a
    model built the same way:  `load(path, into=model)`. What `load` could not give back is refused.

    Args:
        model: Of timm.create_model, one of transformers' supported classes, a `ViT`, `Swin` or `Features`, swapped or
            not; or any module with swapped parts.
        path: A file, or a folder, which gets a file `torchrope.safetensors`.

    Raises:
        ValueError: a model without swapped parts that cannot be rebuilt: of another library, changed by hand since it
            was made, or built with arguments that `load` does not take from files; encodings that cannot be described
            by the arguments of their class; state that is no tensor.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save as to_bytes

    tensors = model.state_dict()
    foreign = next((name for name, value in tensors.items() if not isinstance(value, Tensor)), None)
    if foreign is not None:
        raise ValueError(f"save writes tensors, got {foreign} of {type(tensors[foreign]).__name__}")
    text = _settings(model, layout_of(tensors))
    write_whole(_file(path), to_bytes(_own_memory(tensors), metadata={"torchrope": text}))


@overload
def load(path: str | os.PathLike[str], *, classes: Iterable[type[Encoding]] = ()) -> nn.Module: ...
@overload
def load(path: str | os.PathLike[str], *, into: Model, classes: Iterable[type[Encoding]] = ()) -> Model: ...
def load(
    path: str | os.PathLike[str], *, into: nn.Module | None = None, classes: Iterable[type[Encoding]] = ()
) -> nn.Module:
    """Build the model that `save` wrote, on the CPU, in evaluation mode; or fill a model built the same way.

    A file names a class or an architecture that is installed, and arguments of a closed list: no weights are fetched,
    no other file is opened. What it names must fit its tensors before memory is taken.

    Args:
        path: The file, or the folder that holds `torchrope.safetensors`.
        into: A model built like the one that was saved, not swapped, or swapped in the same way. It is swapped where
            the file says so and gets the weights in its own dtypes, where it is, in the mode it is in. A file that does
            not fit leaves it as it was.
        classes: Encodings of your own that the model uses; no other code than theirs and the libraries' runs.

    Returns:
        The model, swapped if it was.

    Raises:
        ValueError: the file is missing, cut off, damaged or another's; its tensors do not fit the model it names, or
            the one given; it names none and none is given.
    """
    from safetensors import SafetensorError

    file = _file(path)
    try:
        return _loaded(file, tuple(classes), into)
    except (OSError, SafetensorError, ValueError) as error:
        rule = "load needs a file that torchrope.save wrote"
        like = "" if into is None else f" of a model built like the {type(into).__name__} given"
        raise ValueError(f"{rule}{like}, got {file}: {one_line(error)}") from None


def _settings(model: nn.Module, layout: Layout) -> str:
    """What rebuilds a model around its tensors, as JSON that `load` takes."""
    swapped = _swapped(model)
    try:
        return _with_recipe(model, layout)
    except ValueError:
        if not swapped:
            raise
    return _without_recipe(model, swapped, layout)


def _with_recipe(model: nn.Module, layout: Layout) -> str:
    """Settings of which `load` builds the whole model."""
    library, rotary = _library(model), next(iter(_swapped(model).values()), None)
    own = {type(encoding) for encoding in rotary.encodings} if rotary is not None else set()
    recipe = import_module(REBUILDERS[library]).recipe(model)
    head = {**_HEAD, "library": library, "recipe": recipe, "swap": None}
    text, again = _rebuilt(head, layout, own)
    if rotary is not None and not _swapped(again):  # otherwise the recipe builds the encodings too
        text, again = _rebuilt({**head, "swap": _described(rotary)}, layout, own)
    _check_rebuilds(model, again)
    check_fits(again, layout)
    return text


def _without_recipe(model: nn.Module, swapped: dict[str, Rotary], layout: Layout) -> str:
    """Settings by which `load` swaps a model that it is given."""
    swaps = {name: _described(rotary) for name, rotary in swapped.items()}
    text = written({**_HEAD, "library": None, "recipe": None, "swap": swaps})
    limits = limits_of(layout)
    header = read_header(text, limits)
    for name, rotary in swapped.items():
        own: Any = tuple({type(encoding) for encoding in rotary.encodings})
        sites = _adapter_of(model, name).sites()
        with budget(layout):
            again = _encodings(header.towers[name], sites, own, torch.device("meta"), limits)
        for was, would in zip(rotary.encodings, again, strict=True):
            check_fits(would, layout_of(was.state_dict()))
    return text


def _rebuilt(head: dict[str, Any], layout: Layout, classes: Iterable[Any]) -> tuple[str, nn.Module]:
    """Settings as they are written, and the model that they give, without memory."""
    text = written(head)
    return text, _built(read_header(text, limits_of(layout)), layout, tuple(classes), "meta")


def _loaded(file: Path, classes: tuple[type[Encoding], ...], into: nn.Module | None) -> nn.Module:
    from safetensors import safe_open

    if file.exists() and not file.is_file():
        raise ValueError("it must be a file")
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get("torchrope")
        if text is None:
            raise ValueError("it has none of its settings")
        layout = layout_of_file(opened)
        header = read_header(text, limits_of(layout))
        if into is None:
            check_fits(_built(header, layout, classes, "meta"), layout)
        tensors = {name: opened.get_tensor(name).clone() for name in layout}
    if into is not None:
        _fill(into, header, layout, tensors, classes)
        return into
    model = _built(header, layout, classes, "cpu")
    model.load_state_dict(tensors, assign=True)  # in the dtypes they were saved in
    return model.eval()


def _library(model: nn.Module) -> str:
    """Which library builds a model; a model of timm's that is registered here is timm's."""
    known = [library for library in origins(type(model)) if library in REBUILDERS]
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


def _built(header: Header, layout: Layout, classes: tuple[type[Encoding], ...], device: str) -> nn.Module:
    """The model of a file's settings, its weights random; of no more parameters than its tensors explain."""
    if header.library is None:
        raise ValueError("it holds weights and swaps alone: build its model and load(path, into=model)")
    with budget(layout):
        with told_in_one_line(f"{header.library} refuses its settings"):
            model: nn.Module = import_module(REBUILDERS[header.library]).rebuild(header.recipe, device)
        if header.swap is not None:
            _swap_again(adapt(model), header.swap, layout, classes)
    return model


def _fill(
    model: nn.Module, header: Header, layout: Layout, tensors: dict[str, Tensor], classes: tuple[type[Encoding], ...]
) -> None:
    """Swap a model as a file says and give it the file's weights; leave it as it was if they do not fit."""
    swaps = header.towers if header.swap is None else {_name_of(adapt(model).tower, model): header.swap}
    undone: list[Callable[[], None]] = []
    try:
        for name, swap in swaps.items():
            adapter = _adapter_of(model, name)
            there = getattr(adapter.tower, ATTRIBUTE, None)
            if there is None:
                undone.append(_undo(adapter))
                with budget(layout):
                    _swap_again(adapter, swap, layout, classes)
            elif json.loads(written(_described(there))) != swap:
                raise ValueError(f"its swap must be that of the model, got another for {name or 'the model'}")
        check_fits(model, layout)
    except BaseException:
        for undo in undone:
            undo()
        raise
    model.load_state_dict(tensors)


def _undo(adapter: Adapter) -> Callable[[], None]:
    """What takes out what will be swapped into a model, and gives its tables their values back."""
    before = [(table, table.detach().clone(), table.requires_grad) for table in adapter.tables()]

    def undo() -> None:
        rotary = getattr(adapter.tower, ATTRIBUTE, None)
        if rotary is None:
            return
        adapter.detach(rotary)
        delattr(adapter.tower, ATTRIBUTE)
        for table, values, learned in before:
            with torch.no_grad():
                table.copy_(values)
            table.requires_grad_(learned)

    return undo


def _swap_again(adapter: Adapter, swap: dict[str, Any], layout: Layout, classes: tuple[type[Encoding], ...]) -> None:
    """Put the encodings that were described into a model, their weights as they come."""
    if getattr(adapter.tower, ATTRIBUTE, None) is not None:
        raise ValueError("its swap must be of a model that is built without encodings, got one that has some")
    sites, own = adapter.sites(), next(adapter.tower.parameters())
    encodings = _encodings(swap, sites, classes, own.device, limits_of(layout))
    choices = {name: swap[name] for name in ("keep_ape", "keep_rotation")}
    lattices = [_lattice(one, len(sites[0].lattice)) for one in swap["lattices"]]
    channels = [_channels(one, site.head_dim) for one, site in zip(swap["channels"], sites, strict=False)]
    with told_in_one_line("the model refuses its encodings"):
        rotary = install(adapter, encodings, lattices, channels, **choices)
    for name, table in list(rotary._buffers.items()):  # one that was put aside may be of another input size
        shapes = [stored.shape for key, stored in layout.items() if key.endswith(f"{ATTRIBUTE}.{name}")]
        if table is not None and shapes and _resizes(table, shapes[0]):
            rotary._buffers[name] = torch.empty(shapes[0], dtype=table.dtype, device=own.device)


def _encodings(
    swap: dict[str, Any],
    sites: list[Site],
    classes: tuple[type[Encoding], ...],
    device: torch.device,
    limits: Limits,
) -> list[Encoding]:
    """The encodings that were described for a model's layers: one for each, or one for all."""
    descriptions = swap["encodings"]
    if len(descriptions) not in (1, len(sites)):
        raise ValueError(f"encodings of its swap must be one, or {len(sites)} for the layers, got {len(descriptions)}")
    pairs = zip(descriptions, sites, strict=False)  # one alone is for all
    encodings = [_encoding(one, site, classes, device, limits) for one, site in pairs]
    if len(descriptions) == 1:
        for site in sites:
            check_fit(encodings[0], site)
    return encodings


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
    if class_of(description, classes) is getattr(families, description["class"], None):
        check(what, arguments, ENCODINGS | place, limits, partly=True)
    else:
        check(what, {name: arguments[name] for name in place if name in arguments}, place, limits, partly=True)
        device = torch.device("cpu")
    with device, told_in_one_line(f"{description['class']} refuses its settings"):
        encoding = class_of(description, classes)(**tuples(arguments))
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


def _swapped(model: nn.Module) -> dict[str, Rotary]:
    """The encodings of each swapped part of a model, by the name of the part."""
    parts = {name: module for name, module in model.named_modules() if isinstance(module, Rotary)}
    return {name.rpartition(".")[0]: rotary for name, rotary in parts.items()}


def _adapter_of(model: nn.Module, name: str) -> Adapter:
    """What swap needs for the part of a model that has this name."""
    tower = dict(model.named_modules()).get(name)
    found = [adapter for adapter in adapters(model) if adapter.tower is tower]
    if not found:
        raise ValueError(f"its swap must be of a part that swap knows, got {shown(name)}, which the model has not")
    return found[0]


def _name_of(part: nn.Module, model: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


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
