"""What modules below use of integrations: swaps in files of `torchrope.save`, and the mixin of huggingface_hub."""

import json
import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from torchrope.checkpoints import saving
from torchrope.checkpoints import settings as kinds
from torchrope.checkpoints.saving import File, build, to_json
from torchrope.checkpoints.settings import budget, check, check_fits, errors_in_one_line, shown
from torchrope.encodings import Encoding
from torchrope.inference import Frozen
from torchrope.integrations.family import Adapter, AttentionShape, adapters
from torchrope.integrations.rotary import ATTRIBUTE, Rotary
from torchrope.integrations.swap import check_fit, install, remove
from torchrope.lattice import Lattice
from torchrope.models.layers import Shareable

_SWAP = {
    "encodings": kinds.PARTS,
    "keep_position_tables": kinds.FLAG,
    "keep_rotation": kinds.FLAG,
    "lattices": kinds.PARTS,
    "channels": kinds.each(kinds.each(kinds.WIDTH, most=2**16) | kinds.NOTHING, most=2**16),
}


def _adapters(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of the submodules that `swap` supports, by their names."""
    towers = {adapter.tower: adapter for adapter in adapters(model)}
    return {name: towers[part] for name, part in model.named_modules() if part in towers}


def describe_swaps(model: nn.Module) -> dict[str, Any]:
    """Return the settings of the swapped submodules of a model, by their names."""
    count = sum(isinstance(part, Rotary) for part in model.modules())
    rotaries = {name: adapter.rotary for name, adapter in _adapters(model).items()} if count else {}
    swaps = {name: _described(rotary) for name, rotary in rotaries.items() if rotary is not None}
    if len(swaps) != count:
        rule = "swapped parts must not be within another model that swap supports"
        raise ValueError(f"{rule}, got {count - len(swaps)} of {count}")
    return swaps


def _described(rotary: Rotary) -> dict[str, Any]:
    return {**{name: getattr(rotary, name) for name in _SWAP}, "encodings": list(rotary.encodings)}


def check_swaps(model: nn.Module, file: File) -> None:
    """Raise ValueError unless the settings of a file build encodings with the weights of a model's."""
    by_name = _adapters(model)
    for name, swap in file.header["swap"].items():
        with budget(file.manifest):
            again, *_ = _parts(file, swap, by_name[name].shapes(), torch.device("meta"))
        for encoding, would in zip(by_name[name].tower.rotary.encodings, again, strict=True):
            if not isinstance(encoding, Frozen):
                check_fits(would, encoding.state_dict())


def repeat_swaps(model: nn.Module, file: File, undone: ExitStack) -> None:
    """Swap a model as a file describes, without the weights; the stack gets callbacks that undo it."""
    by_name = _adapters(model)
    for name, swap in (file.header["swap"] or {}).items():
        if name not in by_name:
            received = shown(name) if name else "the model itself"
            raise ValueError(f"its swap must be of a submodule that swap supports, got {received}")
        rotary = by_name[name].rotary
        if rotary is None:
            with budget(file.manifest):
                _install(by_name[name], file, swap, undone)
        elif json.loads(to_json(_described(rotary))) != swap:
            raise ValueError(f"its swap must be that of the model, got another for {name or 'the model'}")


def _install(adapter: Adapter, file: File, swap: dict[str, Any], undone: ExitStack) -> None:
    """Build the described encodings and install them in a model."""
    device = next(adapter.tower.parameters()).device
    parts = _parts(file, swap, adapter.shapes(), device)
    with errors_in_one_line("the model rejects its encodings"):
        rotary = install(adapter, *parts, swap["keep_position_tables"], swap["keep_rotation"])
    undone.callback(remove, adapter, rotary)
    undone.callback(rotary._buffers.update, dict(rotary._buffers))
    for name, table in list(rotary._buffers.items()):  # a stored table may have another input size
        for shape in [tuple(part.shape) for key, part in file.manifest.items() if key.endswith(f"{ATTRIBUTE}.{name}")]:
            if table is not None and 0 not in shape and len(shape) == table.ndim and shape[-1:] == table.shape[-1:]:
                rotary._buffers[name] = torch.empty(shape, dtype=table.dtype, device=device)


def _parts(
    file: File, swap: dict[str, Any], sites: list[AttentionShape], device: torch.device
) -> tuple[list[Encoding], list[Lattice], list[tuple[int, ...] | None]]:
    """Check a swap and build its encodings, one per layer or one shared by all, with their lattices and channels."""
    check("its swap", swap, _SWAP, file.limits)
    count = len(swap["encodings"])
    check("its swap", {"encodings": count}, {"encodings": kinds.one_of(1, len(sites))}, file.limits)
    encodings, lattices, channels = [], [], []
    for stored, lattice, order, site in zip(swap["encodings"], swap["lattices"], swap["channels"], sites, strict=False):
        sizes = {"num_axes": len(site.lattice), "num_heads": site.num_heads, "head_dim": site.head_dim}
        encodings.append(build(stored, Encoding, sizes, file, device))
        check("each of the lattices of its swap", lattice, kinds.settable(Lattice), file.limits, partly=True)
        lattices.append(Lattice(**kinds.tuples(lattice)))
        with errors_in_one_line("the lattices of its swap must be of the model's axes"):
            lattices[-1].at(torch.zeros(1, len(site.lattice)), site.lattice)
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


def _mixin() -> Any:
    """Import the mixin lazily, as it needs optional packages."""
    try:
        from torchrope.integrations.hub import Hub
    except ModuleNotFoundError as error:
        raise ImportError(f"sharing models requires {error.name}: pip install huggingface_hub safetensors") from None
    return Hub


saving.swaps = sys.modules[__name__]
Shareable.mixin = staticmethod(_mixin)
