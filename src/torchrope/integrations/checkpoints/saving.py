"""`save` and `load`: models with their encodings in safetensors files, without pickle or code execution."""

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from torchrope._version import __version__
from torchrope.encodings import Encoding
from torchrope.files import write_whole
from torchrope.inference import Frozen
from torchrope.integrations.checkpoints import describing
from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.builders.torchrope import freeze_again
from torchrope.integrations.checkpoints.layout import Layout, budget, check_fits, layout_of_file, limits_of
from torchrope.integrations.checkpoints.settings import UnknownModel, check, errors_in_one_line, one_line, shown, tuples
from torchrope.integrations.family import Adapter, AttentionShape, adapters
from torchrope.integrations.rotary import ATTRIBUTE, Rotary
from torchrope.integrations.swap import adapt, check_fit, install
from torchrope.lattice import Lattice

Model = TypeVar("Model", bound=nn.Module)

FILE = "torchrope.safetensors"
"""Name of the file in a folder."""

_HEAD = {"format": describing.FORMAT, "torchrope": __version__}
_LIST = kinds.Kind("a list of up to {layers}", lambda value, at: isinstance(value, list) and len(value) <= at.layers)
_SWAP = {
    "encodings": _LIST,
    "keep_position_tables": kinds.FLAG,
    "keep_rotation": kinds.FLAG,
    "lattices": _LIST,
    "channels": kinds.each(kinds.each(kinds.WIDTH, most=2**16) | kinds.NOTHING, most=2**16),
}


class _File(NamedTuple):
    """Contents of a file, apart from the values of its tensors, and the custom encodings that it may use."""

    header: dict[str, Any]
    layout: Layout
    classes: tuple[type[Encoding], ...]


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
            described by the arguments of their class; a state dict with values that are not tensors.
        OSError: the file cannot be written.

    Warns:
        UserWarning: a swapped model whose architecture cannot be described, with the reason.
    """
    from safetensors.torch import save as to_bytes

    tensors = model.state_dict()
    foreign = next((name for name, value in tensors.items() if not isinstance(value, Tensor)), None)
    if foreign is not None:
        raise ValueError(f"the state dict must hold tensors only, got {foreign} of {type(tensors[foreign]).__name__}")
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

    A file names an installed class or architecture and values of its arguments: numbers, booleans, one of a few
    strings. No weights are downloaded and no other file is opened. The description is checked against the tensors
    before memory is allocated.

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
    classes: Any = tuple({describing.family_of(part) for rotary in swapped.values() for part in rotary.encodings})
    try:
        return _with_recipe(model, next(iter(swapped.values()), None), layout, classes)
    except ValueError as error:
        if not swapped:
            raise
        refusal = error
    swaps = {name: _described(rotary) for name, rotary in swapped.items()}
    text = describing.to_json({**_HEAD, "library": None, "recipe": None, "swap": swaps, "frozen": None})
    file = _File(describing.read_header(text, limits_of(layout)), layout, classes)
    for name, rotary in swapped.items():
        with budget(layout):
            again, *_ = _parts(file, file.header["swaps"][name], _adapter(model, name).shapes(), torch.device("meta"))
        for was, would in zip(rotary.encodings, again, strict=True):
            if not isinstance(was, Frozen):
                check_fits(would, was.state_dict())
    if not isinstance(refusal, UnknownModel):
        rule = "the file has weights and encodings but no architecture, so load needs into=model"
        warnings.warn(f"{rule}: {one_line(refusal)}", stacklevel=3)
    return text


def _with_recipe(model: nn.Module, rotary: Rotary | None, layout: Layout, classes: tuple[type[Encoding], ...]) -> str:
    """Return settings from which `load` rebuilds the whole model."""
    root, *roots = [base.__module__.partition(".")[0] for base in type(model).__mro__]
    known = [name for name in describing.LIBRARIES if name == root or (name in roots and name != "torchrope")]
    if not known:
        raise UnknownModel(f"model must be of {', '.join(describing.LIBRARIES)}, got {type(model).__name__}")
    library = known[0]  # timm also for the timm models that torchrope registers
    recipe, frozen = describing.builder_of(library).recipe(model), getattr(model, "frozen_input", None)
    head = {**_HEAD, "library": library, "recipe": recipe, "frozen": frozen}
    for swap in (None, rotary and _described(rotary)):  # a recipe may already build the encodings
        text = describing.to_json({**head, "swap": swap})
        again = _built(_File(describing.read_header(text, limits_of(layout)), layout, classes), "meta")
        if rotary is None or _swapped(again):
            break
    parts, rebuilt = ({name: type(part) for name, part in one.named_modules()} for one in (model, again))
    for name in [*parts, *rebuilt]:
        if parts.get(name) != rebuilt.get(name):
            rule = "save needs a model that was not modified since it was built"
            raise ValueError(f"{rule}, got {name or 'the model'}: {parts.get(name)} instead of {rebuilt.get(name)}")
    check_fits(again, layout)
    return text


def _loaded(path: Path, classes: tuple[type[Encoding], ...], into: nn.Module | None) -> nn.Module:
    from safetensors import safe_open

    if path.exists() and not path.is_file():
        raise ValueError("it must be a file")
    with safe_open(path, framework="pt") as opened:
        text = (opened.metadata() or {}).get("torchrope")
        if text is None:
            raise ValueError("it has no settings of torchrope")
        layout = layout_of_file(opened)
        file = _File(describing.read_header(text, limits_of(layout)), layout, classes)
        if into is None:
            check_fits(_built(file, "meta"), layout)
        tensors = {name: opened.get_tensor(name).clone() for name in layout}
    if into is not None:
        _fill(file, into, tensors)
        return into
    model = _built(file, "cpu")
    numbers = Counter({torch.float32: 0})
    for tensor in tensors.values():
        numbers[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    (dtype, _), *_ = numbers.most_common(1)
    for buffer in model.buffers():
        if not buffer.numel():  # not saved; encodings without parameters take the model's dtype from it
            buffer.data = buffer.to(dtype)
    model.load_state_dict(tensors, assign=True)  # in the dtypes they were saved in
    return model.eval()


def _described(rotary: Rotary) -> dict[str, Any]:
    return {
        "encodings": [describing.describe(encoding) for encoding in rotary.encodings],
        "keep_position_tables": rotary.keep_position_tables,
        "keep_rotation": rotary.keep_rotation,
        "lattices": [lattice.settings() for lattice in rotary.lattices],
        "channels": rotary.channels,
    }


def _built(file: _File, device: str) -> nn.Module:
    """Build the model of a file's settings with random weights; its size is limited by the file's tensors."""
    library, recipe, frozen = (file.header[name] for name in ("library", "recipe", "frozen"))
    if library is None:
        rule = "it must hold an architecture, got weights and swaps only"
        raise ValueError(f"{rule}: build its model and call load(path, into=model)")
    with budget(file.layout):
        with errors_in_one_line(f"{library} rejects its settings"):
            model: nn.Module = describing.builder_of(library).rebuild(recipe, device)
        for name, swap in file.header["swaps"].items():
            _swap_again(file, _adapter(model, name), swap)
        if frozen is not None and _swapped(model):
            with errors_in_one_line(f"the model cannot be frozen for an input of {tuple(frozen)}"):
                freeze_again(model, frozen, device)
    return model


def _fill(file: _File, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Swap a model as a file describes and load the file's weights; restore the model if they do not fit."""
    swaps = [(_adapter(model, name), name, swap) for name, swap in file.header["swaps"].items()]
    with ExitStack() as undone:
        for adapter, name, swap in swaps:
            rotary = getattr(adapter.tower, ATTRIBUTE, None)
            if rotary is None:
                before = [(table, table.detach().clone(), table.requires_grad) for table in adapter.tables()]
                undone.callback(_undo, adapter, before)
                with budget(file.layout):
                    _swap_again(file, adapter, swap)
            elif json.loads(describing.to_json(_described(rotary))) != swap:
                raise ValueError(f"its swap must be that of the model, got another for {name or 'the model'}")
        check_fits(model, file.layout)
        undone.pop_all()
    model.load_state_dict(tensors)


def _undo(adapter: Adapter, tables: list[tuple[nn.Parameter, Tensor, bool]]) -> None:
    """Undo the swap of a model, if it came that far, and restore its position tables."""
    rotary = getattr(adapter.tower, ATTRIBUTE, None)
    if rotary is not None:
        adapter.detach()
        for table, values, learned in tables:
            table.requires_grad_(False).copy_(values).requires_grad_(learned)


def _swap_again(file: _File, adapter: Adapter, swap: dict[str, Any]) -> None:
    """Build the described encodings and install them in a model; their weights are not loaded."""
    if getattr(adapter.tower, ATTRIBUTE, None) is not None:
        raise ValueError("its swap must be null for a model that is built with encodings, got a swap")
    sites, device = adapter.shapes(), next(adapter.tower.parameters()).device
    if not sites:
        raise ValueError("its model must have attention layers that swap supports, got a model without")
    parts = _parts(file, swap, sites, device)
    choices = {name: swap[name] for name in ("keep_position_tables", "keep_rotation")}
    with errors_in_one_line("the model rejects its encodings"):
        rotary = install(adapter, *parts, **choices)
    for name, table in list(rotary._buffers.items()):  # a stored table may have another input size
        stored = [tuple(one.shape) for key, one in file.layout.items() if key.endswith(f"{ATTRIBUTE}.{name}")]
        for shape in stored:
            if table is not None and 0 not in shape and len(shape) == table.ndim and shape[-1:] == table.shape[-1:]:
                rotary._buffers[name] = torch.empty(shape, dtype=table.dtype, device=device)


def _parts(
    file: _File, swap: dict[str, Any], sites: list[AttentionShape], device: torch.device
) -> tuple[list[Encoding], list[Lattice], list[tuple[int, ...] | None]]:
    """Check a swap and build its encodings, one per layer or one shared by all, with their lattices and channels."""
    limits = limits_of(file.layout)
    check("its swap", swap, _SWAP, limits)
    count = len(swap["encodings"])
    check("its swap", {"encodings": count}, {"encodings": kinds.one_of(1, len(sites))}, limits)
    encodings, lattices, channels = [], [], []
    for one, lattice, order, site in zip(swap["encodings"], swap["lattices"], swap["channels"], sites, strict=False):
        encodings.append(describing.build(one, site, file.classes, limits, device))
        check("each of the lattices of its swap", lattice, kinds.settable(Lattice), limits, partly=True)
        for name, value in lattice.items():
            if isinstance(value, list) and len(value) != len(site.lattice):
                rule = f"{name} of its lattices must be one number or {len(site.lattice)}"
                raise ValueError(f"{rule}, got {shown(value)}")
        lattices.append(Lattice(**tuples(lattice)))
        if order is not None and sorted(order) != list(range(site.head_dim)):
            rule = f"channels of its swap must be each of the {site.head_dim} of a head once"
            raise ValueError(f"{rule}, got {shown(order)}")
        channels.append(tuples(order))
    for name in ("lattices", "channels"):
        if len(swap[name]) != count:
            received = f"{len(swap[name])} for {count} encodings"
            raise ValueError(f"{name} of its swap must be one for each encoding, got {received}")
    for index, site in enumerate(sites):
        check_fit(encodings[index % count], site)
    return encodings, lattices, channels


def _swapped(model: nn.Module) -> dict[str, Rotary]:
    """Return the encodings of each swapped submodule, by the name of the submodule."""
    return {name.rpartition(".")[0]: part for name, part in model.named_modules() if isinstance(part, Rotary)}


def _adapter(model: nn.Module, name: str | None) -> Adapter:
    """Return the adapter of the submodule with this name, of the one that `swap` changes for None."""
    if name is None:
        return adapt(model)
    tower = dict(model.named_modules()).get(name)
    found = [adapter for adapter in adapters(model) if adapter.tower is tower]
    if not found:
        raise ValueError(f"its swap must be of a submodule that swap supports, got {shown(name)}")
    return found[0]


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)
