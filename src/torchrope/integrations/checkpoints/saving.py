"""`save` and `load`: models with their encodings in safetensors files, without pickle or code execution."""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from torchrope import encodings as families
from torchrope._version import __version__
from torchrope.encodings import Encoding
from torchrope.files import write_whole
from torchrope.inference import Frozen, FrozenAbsolute
from torchrope.integrations.checkpoints.describing import class_of, describe, to_json
from torchrope.integrations.checkpoints.header import FORMAT, REBUILDERS, read_header, tuples
from torchrope.integrations.checkpoints.layout import Layout, budget, check_fits, layout_of, layout_of_file, limits_of
from torchrope.integrations.checkpoints.settings import (
    Limits,
    UnknownModel,
    check,
    errors_in_one_line,
    kinds_of,
    one_line,
    one_of,
    shown,
)
from torchrope.integrations.rotary import ATTRIBUTE, Adapter, Rotary, Site
from torchrope.integrations.swap import adapt, adapters, check_fit, install, origins
from torchrope.lattice import Lattice
from torchrope.models import Swin, ViT

Model = TypeVar("Model", bound=nn.Module)

FILE = "torchrope.safetensors"
"""Name of the file in a folder."""

_HEAD = {"format": FORMAT, "torchrope": __version__}


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's weights and a description that rebuilds it to one safetensors file, atomically.

    The file holds the state dict; its metadata hold the library, the architecture with its arguments, and the
    encodings. Before writing, the model is rebuilt once on the meta device, and an error is raised if `load` could not
    restore it. For a model with swapped parts that no library rebuilds (a composite or custom model) only the swaps are
    described; it is loaded into a model built the same way:  `load(path, into=model)`.

    Args:
        model: Of timm.create_model, one of transformers' supported classes, a `ViT`, `Swin` or `Features`, swapped or
            not; or any module with swapped parts.
        path: A file, or a folder, which gets a file `torchrope.safetensors`.

    Raises:
        ValueError: a model without swapped parts that cannot be rebuilt: of another library, modified since it
            was built, or built with arguments that `load` does not accept from files; encodings that cannot be
            described by the arguments of their class; a frozen model other than a `ViT` or `Swin`; a state dict with
            values that are not tensors.
        OSError: the file cannot be written.

    Warns:
        UserWarning: a swapped model whose architecture cannot be described, with the reason.
    """
    from safetensors.torch import save as to_bytes

    frozen = next((part for part in model.modules() if isinstance(part, (Frozen, FrozenAbsolute))), None)
    if frozen is not None and not isinstance(model, ViT | Swin):
        rule = "save needs a ViT, a Swin, or a model as it was before tr.freeze; keep the state dict of others"
        raise ValueError(f"{rule}, got {type(model).__name__} with {type(frozen).__name__}")
    tensors = model.state_dict()
    foreign = next((name for name, value in tensors.items() if not isinstance(value, Tensor)), None)
    if foreign is not None:
        raise ValueError(f"the state dict must hold tensors only, got {foreign} of {type(tensors[foreign]).__name__}")
    text = _settings(model, layout_of(tensors))
    write_whole(_file(path), to_bytes(_own_memory(tensors), metadata={"torchrope": text}))


@overload
def load(path: str | os.PathLike[str], *, classes: Iterable[type[Encoding]] = ()) -> nn.Module: ...
@overload
def load(path: str | os.PathLike[str], *, into: Model, classes: Iterable[type[Encoding]] = ()) -> Model: ...
def load(
    path: str | os.PathLike[str], *, into: nn.Module | None = None, classes: Iterable[type[Encoding]] = ()
) -> nn.Module:
    """Rebuild the model that `save` wrote, on the CPU in evaluation mode; or load into a model built the same way.

    A file names an installed class or architecture and arguments from a fixed list: no weights are downloaded and no
    other file is opened. The description is checked against the tensors before memory is allocated.

    Args:
        path: The file, or the folder that holds `torchrope.safetensors`.
        into: A model built like the one that was saved, not swapped, or swapped in the same way. It is swapped as the
            file describes and gets the weights; its dtypes, device and mode are kept. If the file does not fit, it is
            unchanged.
        classes: Custom encodings that the model uses; no code other than theirs and the libraries' is run.

    Returns:
        The model, swapped if it was.

    Raises:
        ValueError: the file is missing, truncated, damaged or not written by `save`; its tensors do not fit the model
            it describes, or `into`; it describes no model and `into` is None.
    """
    from safetensors import SafetensorError

    file = _file(path)
    try:
        return _loaded(file, tuple(classes), into)
    except (OSError, RecursionError, SafetensorError, ValueError) as error:
        rule = "load needs a file that torchrope.save wrote"
        like = "" if into is None else f" from a model built like the given {type(into).__name__}"
        raise ValueError(f"{rule}{like}, got {file}: {one_line(error)}") from None


def _settings(model: nn.Module, layout: Layout) -> str:
    """Return the description from which `load` rebuilds a model, as JSON."""
    swapped = _swapped(model)
    try:
        return _with_recipe(model, layout)
    except ValueError as error:
        if not swapped:
            raise
        if not isinstance(error, UnknownModel):
            rule = "the file has weights and encodings but no architecture, so load needs into=model"
            warnings.warn(f"{rule}: {one_line(error)}", stacklevel=3)
    return _without_recipe(model, swapped, layout)


def _with_recipe(model: nn.Module, layout: Layout) -> str:
    """Return settings from which `load` rebuilds the whole model."""
    library, rotary = _library(model), next(iter(_swapped(model).values()), None)
    own = {type(encoding) for encoding in rotary.encodings} if rotary is not None else set()
    recipe = import_module(REBUILDERS[library]).recipe(model)
    head = {**_HEAD, "library": library, "recipe": recipe, "swap": None}
    text, again = _rebuilt(head, layout, own)
    if rotary is not None and not _swapped(again):  # otherwise the recipe already builds the encodings
        text, again = _rebuilt({**head, "swap": _described(rotary)}, layout, own)
    _check_rebuilds(model, again)
    check_fits(again, layout)
    return text


def _without_recipe(model: nn.Module, swapped: dict[str, Rotary], layout: Layout) -> str:
    """Return settings by which `load` swaps the model passed as `into`."""
    swaps = {name: _described(rotary) for name, rotary in swapped.items()}
    text = to_json({**_HEAD, "library": None, "recipe": None, "swap": swaps})
    limits = limits_of(layout)
    header = read_header(text, limits)
    for name, rotary in swapped.items():
        own: Any = tuple({type(encoding) for encoding in rotary.encodings})
        sites = _adapter_of(model, name).sites()
        with budget(layout):
            again = _encodings(header["swap"][name], sites, own, torch.device("meta"), limits)
        for was, would in zip(rotary.encodings, again, strict=True):
            check_fits(would, layout_of(was.state_dict()))
    return text


def _rebuilt(head: dict[str, Any], layout: Layout, classes: Iterable[Any]) -> tuple[str, nn.Module]:
    """Return settings as JSON, and the model rebuilt from them on the meta device."""
    text = to_json(head)
    return text, _built(read_header(text, limits_of(layout)), layout, tuple(classes), "meta")


def _loaded(file: Path, classes: tuple[type[Encoding], ...], into: nn.Module | None) -> nn.Module:
    from safetensors import safe_open

    if file.exists() and not file.is_file():
        raise ValueError("it must be a file")
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get("torchrope")
        if text is None:
            raise ValueError("it has no settings of torchrope")
        layout = layout_of_file(opened)
        header = read_header(text, limits_of(layout))
        if into is None:
            check_fits(_built(header, layout, classes, "meta"), layout)
        tensors = {name: opened.get_tensor(name).clone() for name in layout}
    if into is not None:
        _fill(into, header, layout, tensors, classes)
        return into
    model = _built(header, layout, classes, "cpu")
    dtype = _main_dtype(tensors.values())
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if not buffer.numel():  # not saved; encodings without parameters take the model's dtype from it
                part._buffers[name] = buffer.to(dtype)
    model.load_state_dict(tensors, assign=True)  # in the dtypes they were saved in
    return model.eval()


def _main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of most floating-point numbers, float32 if there are none."""
    counts = Counter({torch.float32: 0})
    for tensor in tensors:
        if tensor.is_floating_point():
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0]


def _library(model: nn.Module) -> str:
    """Return the library that builds a model: timm also for the timm models that torchrope registers."""
    known = [library for library in origins(type(model)) if library in REBUILDERS]
    if known:
        return known[0]
    if type(model).__module__.startswith("torchrope."):
        return "torchrope"
    raise UnknownModel(f"model must be of {', '.join(REBUILDERS)}, got {type(model).__name__}")


def _described(rotary: Rotary) -> dict[str, Any]:
    return {
        "encodings": [describe(encoding) for encoding in rotary.encodings],
        "keep_position_tables": rotary.keep_position_tables,
        "keep_rotation": rotary.keep_rotation,
        "lattices": [lattice.settings() for lattice in rotary.lattices],
        "channels": rotary.channels,
    }


def _built(header: dict[str, Any], layout: Layout, classes: tuple[type[Encoding], ...], device: str) -> nn.Module:
    """Build the model of a file's settings with random weights; its size is limited by the file's tensors."""
    library = header["library"]
    if library is None:
        rule = "it must hold an architecture, got weights and swaps only"
        raise ValueError(f"{rule}: build its model and call load(path, into=model)")
    with budget(layout):
        with errors_in_one_line(f"{library} rejects its settings"):
            model: nn.Module = import_module(REBUILDERS[library]).rebuild(header["recipe"], device)
        if header["swap"] is not None:
            _swap_again(adapt(model), header["swap"], layout, classes)
    return model


def _fill(
    model: nn.Module,
    header: dict[str, Any],
    layout: Layout,
    tensors: dict[str, Tensor],
    classes: tuple[type[Encoding], ...],
) -> None:
    """Swap a model as a file describes and load the file's weights; restore the model if they do not fit."""
    swap = header["swap"]
    if header["library"] is None:
        swaps = [(name, _adapter_of(model, name), one) for name, one in swap.items()]
    else:
        swaps = [] if swap is None else [("the model", adapt(model), swap)]
    undone: list[Callable[[], None]] = []
    try:
        for name, adapter, one in swaps:
            rotary = getattr(adapter.tower, ATTRIBUTE, None)
            if rotary is None:
                undone.append(_undo(adapter))
                with budget(layout):
                    _swap_again(adapter, one, layout, classes)
            elif json.loads(to_json(_described(rotary))) != one:
                raise ValueError(f"its swap must be that of the model, got another for {name}")
        check_fits(model, layout)
    except BaseException:
        for undo in undone:
            undo()
        raise
    model.load_state_dict(tensors)


def _undo(adapter: Adapter) -> Callable[[], None]:
    """Return a function that undoes the next swap of a model and restores its position tables."""
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
    """Build the described encodings and install them in a model; their weights are not loaded."""
    if getattr(adapter.tower, ATTRIBUTE, None) is not None:
        raise ValueError("its swap must be null for a model that is built with encodings, got a swap")
    sites, own = adapter.sites(), next(adapter.tower.parameters())
    if not sites:
        raise ValueError("its model must have attention layers to swap, got none")
    encodings = _encodings(swap, sites, classes, own.device, limits_of(layout))
    choices = {name: swap[name] for name in ("keep_position_tables", "keep_rotation")}
    lattices = [_lattice(one, len(sites[0].lattice)) for one in swap["lattices"]]
    channels = [_channels(one, site.head_dim) for one, site in zip(swap["channels"], sites, strict=False)]
    with errors_in_one_line("the model rejects its encodings"):
        rotary = install(adapter, encodings, lattices, channels, **choices)
    for name, table in list(rotary._buffers.items()):  # a stored table may have another input size
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
    """Build the described encodings of a model's layers: one per layer, or one shared by all."""
    descriptions = swap["encodings"]
    if len(descriptions) not in (1, len(sites)):
        raise ValueError(f"encodings of its swap must be 1 or {len(sites)}, got {len(descriptions)}")
    pairs = zip(descriptions, sites, strict=False)  # a single encoding is shared
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
    """Build the described encoding of a layer: torchrope's on the device, custom ones on the CPU."""
    shape = {
        "num_axes": one_of(len(site.lattice)),
        "num_heads": one_of(*{1, site.num_heads}),
        "head_dim": one_of(site.head_dim),
    }
    name, arguments, build = description["class"], description["arguments"], class_of(description, classes)
    check(f"the arguments of {name}", arguments, kinds_of(build) | shape, limits, partly=True)
    device = device if build is getattr(families, name, None) else torch.device("cpu")
    with device, errors_in_one_line(f"{name} rejects its settings"):
        encoding = build(**tuples(arguments))
    check_fit(encoding, site)
    return encoding


def _resizes(table: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a position table may have this shape at another input size."""
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
    """Return the encodings of each swapped submodule, by the name of the submodule."""
    parts = {name: module for name, module in model.named_modules() if isinstance(module, Rotary)}
    return {name.rpartition(".")[0]: rotary for name, rotary in parts.items()}


def _adapter_of(model: nn.Module, name: str) -> Adapter:
    """Return the adapter of the submodule with this name."""
    tower = dict(model.named_modules()).get(name)
    found = [adapter for adapter in adapters(model) if adapter.tower is tower]
    if not found:
        raise ValueError(
            f"its swap must be of a submodule that swap supports, got {shown(name)}, which the model lacks"
        )
    return found[0]


def _check_rebuilds(model: nn.Module, again: nn.Module) -> None:
    """Raise ValueError if the rebuilt model differs in submodules or shapes."""
    parts, rebuilt = ({name: type(part) for name, part in one.named_modules()} for one in (model, again))
    shapes, shapes_again = ({name: part.shape for name, part in one.state_dict().items()} for one in (model, again))
    for was, would in ((parts, rebuilt), (shapes, shapes_again)):
        for name in [*was, *would]:
            if was.get(name) != would.get(name):
                rule = "save needs a model that was not modified since it was built"
                raise ValueError(f"{rule}, got {name or 'the model'}: {was.get(name)} instead of {would.get(name)}")


def _own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, cloning those that share storage."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        on_cpu = tensor.detach().cpu().contiguous()
        separate[name] = on_cpu.clone() if on_cpu.untyped_storage().data_ptr() in seen else on_cpu
        seen.add(on_cpu.untyped_storage().data_ptr())
    return separate


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)
