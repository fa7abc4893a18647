"""`save` and `load`: models with their encodings in safetensors files, without pickle or code execution."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from torchrope._version import __version__
from torchrope.checkpoints import recipes
from torchrope.checkpoints import settings as kinds
from torchrope.checkpoints.recipes import build, build_of, describe, freeze_again, frozen_parts, to_json
from torchrope.checkpoints.settings import Layout, budget, check, check_fits, errors_in_one_line, shown
from torchrope.encodings import AbsoluteEncoding, Encoding, ScoreBias
from torchrope.files import write_whole
from torchrope.inference import Frozen
from torchrope.integrations.family import Adapter, AttentionShape, adapters
from torchrope.integrations.rotary import ATTRIBUTE, Rotary
from torchrope.integrations.swap import check_fit, install
from torchrope.lattice import Lattice

Model = TypeVar("Model", bound=nn.Module)

FILE = "torchrope.safetensors"
_SWAP = {
    "encodings": kinds.PARTS,
    "keep_position_tables": kinds.FLAG,
    "keep_rotation": kinds.FLAG,
    "lattices": kinds.PARTS,
    "channels": kinds.each(kinds.each(kinds.WIDTH, most=2**16) | kinds.NOTHING, most=2**16),
}


class _File(NamedTuple):
    """Contents of a file, apart from the values of its tensors, and the custom encodings that it may use."""

    header: dict[str, Any]
    layout: Layout
    classes: tuple[type[Encoding], ...]


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's weights and a description of its encodings to one safetensors file, atomically.

    The file holds the state dict; its metadata hold the class and arguments of a `ViT`, `Swin`, `Transformer` or
    `Features` and of its encodings, absorbed, extended or frozen as they are, which `load(path)` rebuilds; or the swaps
    of a model of another library, which `load(path, into=model)` repeats in a model built the same way. Before writing,
    what `load` would build is built once on the meta device, and an error is raised if it differs.

    Args:
        model: A `ViT`, `Swin`, `Transformer` or `Features`, or any module with swapped parts.
        path: A file, or a folder, which gets a file `torchrope.safetensors`.

    Raises:
        ValueError: a model of another library without swapped parts; one of torchrope modified since it was built, or
            with arguments that `load` rejects; encodings that arguments of their class do not describe; a state dict
            with values that are not tensors, or of an unusual dtype.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save as to_bytes

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


def _settings(model: nn.Module, layout: Layout) -> str:
    """Return the description from which `load` rebuilds a model, or swaps one that is built the same way, as JSON."""
    swapped = {name.rpartition(".")[0]: part for name, part in model.named_modules() if isinstance(part, Rotary)}
    shapes = {adapter.rotary: adapter.shapes() for adapter in adapters(model)}
    described = {
        "format": recipes.FORMAT,
        "torchrope": __version__,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "frozen": frozen_parts(model),
        "recipe": None if swapped else recipes.recipe(model),
        "swap": {name: _described(rotary) for name, rotary in swapped.items()} or None,
    }
    text = to_json(described)
    parts = [part for part in model.modules() if isinstance(part, Encoding | AbsoluteEncoding | ScoreBias | Frozen)]
    classes: Any = tuple({build_of(part).func for part in parts})
    file = _File(recipes.read_header(text, kinds.limits_of(layout)), layout, classes)
    if not swapped:
        _check_equal(model, file)
    for name, rotary in swapped.items():
        with budget(layout):
            sites = shapes.get(rotary) or _adapter(model, name).shapes()
            again, *_ = _parts(file, file.header["swap"][name], sites, torch.device("meta"))
        for was, would in zip(rotary.encodings, again, strict=True):
            if not isinstance(was, Frozen):
                check_fits(would, was.state_dict())
    return text


def _check_equal(model: nn.Module, file: _File) -> None:
    """Raise ValueError unless the description of a model of torchrope builds one that equals it."""
    again = _built(file, "meta")
    parts, rebuilt = ({name: _shown(part) for name, part in one.named_modules()} for one in (model, again))
    for name in [*parts, *rebuilt]:
        if parts.get(name) != rebuilt.get(name):
            rule = "save needs a model that was not modified since it was built"
            raise ValueError(f"{rule}, got {name or 'the model'}: {parts.get(name)} instead of {rebuilt.get(name)}")
    check_fits(again, file.layout)


def _shown(part: nn.Module) -> str:
    """Return the class of a part and the settings that its `repr` shows, without those of training alone."""
    described = isinstance(part, nn.Dropout | Encoding | AbsoluteEncoding | ScoreBias)
    return f"{type(part).__name__}({'' if described else part.extra_repr()}){getattr(part, 'position_map', '')}"


def _loaded(path: Path, classes: tuple[type[Encoding], ...], into: nn.Module | None) -> nn.Module:
    from safetensors import safe_open

    if path.exists() and not path.is_file():
        raise ValueError("it must be a file")
    with safe_open(path, framework="pt") as opened:
        text = (opened.metadata() or {}).get("torchrope")
        if text is None:
            raise ValueError("it has no settings of torchrope")
        layout = kinds.layout_of_file(opened)
        file = _File(recipes.read_header(text, kinds.limits_of(layout)), layout, classes)
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
        "encodings": [describe(encoding) for encoding in rotary.encodings],
        "keep_position_tables": rotary.keep_position_tables,
        "keep_rotation": rotary.keep_rotation,
        "lattices": [lattice.settings() for lattice in rotary.lattices],
        "channels": rotary.channels,
    }


def _built(file: _File, device: str) -> nn.Module:
    """Build the model of a file's settings with random weights; its size is limited by the file's tensors."""
    if file.header["recipe"] is None:
        rule = f"it holds weights and encodings of a {file.header['model']}"
        raise ValueError(f"{rule}: build that model, without encodings, and call load(path, into=model)")
    with budget(file.layout), errors_in_one_line("torchrope rejects its settings"):
        model = recipes.rebuild(file.header["recipe"], device, file.classes, kinds.limits_of(file.layout))
        freeze_again(model, file.header["frozen"] or {}, file.layout)
    return model


def _fill(file: _File, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Swap a model as a file describes and load the file's weights; restore the model if they do not fit."""
    swaps = [(_adapter(model, name), name, swap) for name, swap in (file.header["swap"] or {}).items()]
    with ExitStack() as undone:
        for adapter, name, swap in swaps:
            rotary = adapter.rotary
            if rotary is None:
                before = [(table, table.detach().clone(), table.requires_grad) for table in adapter.tables()]
                undone.callback(_undo, adapter, before)
                with budget(file.layout):
                    _swap_again(file, adapter, swap)
            elif json.loads(to_json(_described(rotary))) != swap:
                raise ValueError(f"its swap must be that of the model, got another for {name or 'the model'}")
        for part in list(model.modules()):
            undone.callback(vars(part).update, vars(part) | {"_modules": dict(part._modules)})
        freeze_again(model, file.header["frozen"] or {}, file.layout)
        check_fits(model, file.layout)
        undone.pop_all()
    model.load_state_dict(tensors)


def _undo(adapter: Adapter, tables: list[tuple[nn.Parameter, Tensor, bool]]) -> None:
    """Undo the swap of a model, if it came that far, and restore its position tables."""
    if adapter.rotary is not None:
        adapter.detach()
        for table, values, learned in tables:
            table.requires_grad_(False).copy_(values).requires_grad_(learned)


def _swap_again(file: _File, adapter: Adapter, swap: dict[str, Any]) -> None:
    """Build the described encodings and install them in a model; their weights are not loaded."""
    device = next(adapter.tower.parameters()).device
    parts = _parts(file, swap, adapter.shapes(), device)
    with errors_in_one_line("the model rejects its encodings"):
        rotary = install(adapter, *parts, swap["keep_position_tables"], swap["keep_rotation"])
    for name, table in list(rotary._buffers.items()):  # a stored table may have another input size
        for shape in [tuple(one.shape) for key, one in file.layout.items() if key.endswith(f"{ATTRIBUTE}.{name}")]:
            if table is not None and 0 not in shape and len(shape) == table.ndim and shape[-1:] == table.shape[-1:]:
                rotary._buffers[name] = torch.empty(shape, dtype=table.dtype, device=device)


def _parts(
    file: _File, swap: dict[str, Any], sites: list[AttentionShape], device: torch.device
) -> tuple[list[Encoding], list[Lattice], list[tuple[int, ...] | None]]:
    """Check a swap and build its encodings, one per layer or one shared by all, with their lattices and channels."""
    limits = kinds.limits_of(file.layout)
    check("its swap", swap, _SWAP, limits)
    count = len(swap["encodings"])
    check("its swap", {"encodings": count}, {"encodings": kinds.one_of(1, len(sites))}, limits)
    encodings, lattices, channels = [], [], []
    for one, lattice, order, site in zip(swap["encodings"], swap["lattices"], swap["channels"], sites, strict=False):
        sizes = {"num_axes": len(site.lattice), "num_heads": site.num_heads, "head_dim": site.head_dim}
        encodings.append(build(one, Encoding, sizes, file.classes, limits, device))
        check("each of the lattices of its swap", lattice, kinds.settable(Lattice), limits, partly=True)
        for name, value in lattice.items():
            if isinstance(value, list) and len(value) != len(site.lattice):
                rule = f"{name} of its lattices must be one number or {len(site.lattice)}"
                raise ValueError(f"{rule}, got {shown(value)}")
        lattices.append(Lattice(**kinds.tuples(lattice)))
        if order is not None and sorted(order) != list(range(site.head_dim)):
            rule = f"channels of its swap must be each of the {site.head_dim} of a head once"
            raise ValueError(f"{rule}, got {shown(order)}")
        channels.append(kinds.tuples(order))
    for name in ("lattices", "channels"):
        if len(swap[name]) != count:
            rule = f"{name} of its swap must be one for each encoding"
            raise ValueError(f"{rule}, got {len(swap[name])} for {count} encodings")
    for index, site in enumerate(sites):
        check_fit(encodings[index % count], site)
    return encodings, lattices, channels


def _adapter(model: nn.Module, name: str) -> Adapter:
    """Return the adapter of the submodule with this name."""
    tower = dict(model.named_modules()).get(name)
    for adapter in adapters(model):
        if adapter.tower is tower:
            return adapter
    received = shown(name) if name else "the model itself"
    raise ValueError(f"its swap must be of a submodule that swap supports, got {received}")


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)
