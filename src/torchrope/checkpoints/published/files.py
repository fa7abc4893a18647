"""Read a state dict from a file: nothing in the file is executed, prefixes of wrappers are removed."""

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.checkpoints.settings import DTYPES, check_name, shown

_CONTAINERS = ("model", "state_dict", "model_state_dict", "module")
_WRAPPERS = ("module.", "model.", "_orig_mod.")
_MAX_DEPTH = 8  # containers within containers
_MAX_EXPANSION = 4  # bytes of all tensors / bytes of the file; above 1 if tensors share storage
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")


def read_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a file of `torch.save` or safetensors by name; ValueError for other or damaged files."""
    path = Path(path)
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"a checkpoint must be a file, got {path}")
    read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
    state = _find_state(read(path, size), path.name)
    for name, tensor in state.items():
        dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
        if not dense or tensor.is_meta or tensor.dtype not in DTYPES:
            kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
            rule = "tensors of a checkpoint must be dense, of floats of 16 to 64 bits, integers or booleans"
            raise ValueError(f"{rule}, got {name} of {kind}, {tensor.dtype} in {path.name}")
    held = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if held > _MAX_EXPANSION * size:
        rule = f"tensors must take no more than {_MAX_EXPANSION} times the {size:,} bytes of their file"
        raise ValueError(f"{rule}, got {held:,} in {path.name}")
    return _without_wrappers({name: tensor.detach() for name, tensor in state.items()})


def _read_safetensors(path: Path, size: int) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        rule = "a checkpoint must be a complete safetensors file"
        raise ValueError(f"{rule}, got {path.name}: {_first_line(error)}") from error


def _read_pickle(path: Path, size: int) -> Any:
    with path.open("rb") as file:  # errors of the disk are raised here
        archived = file.read(4) == b"PK\x03\x04"  # the test of torch.load
    try:
        if archived:
            with zipfile.ZipFile(path) as archive:
                claimed = sum(record.file_size for record in archive.infolist())
            if claimed > size:  # torch.save never compresses
                raise ValueError(f"its records must fit its {size:,} bytes, got {claimed:,} bytes of them")
        with warnings.catch_warnings():  # torch warns of its own old formats; the caller cannot change the file
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may fail in any way
        raise ValueError(_why_unreadable(path.name, error)) from error


def _why_unreadable(name: str, error: Exception) -> str:
    rule, refused = "torchrope reads pickles without running their code", _REFUSED.search(str(error))
    if refused:
        return f"{rule}, got {refused[1]} in {name}; save its state dict alone to load it"
    if isinstance(error, pickle.UnpicklingError) and "Unsupported" in str(error):
        return f"{rule}, got an unsupported instruction in {name}"
    return f"a checkpoint must be a complete file of torch.save, got {name}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".")


def _find_state(content: Any, name: str) -> dict[str, Tensor]:
    """Return the tensors by name, from the innermost container."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(content, Mapping):
            raise ValueError(f"a checkpoint must be a dictionary, got {type(content).__name__} in {name}")
        held = next((content[key] for key in _CONTAINERS if isinstance(content.get(key), Mapping)), None)
        if held is None:
            break
        content = held
    else:
        raise ValueError(f"a checkpoint must hold its tensors within {_MAX_DEPTH} dictionaries, got more in {name}")
    foreign = [key for key, value in content.items() if not isinstance(value, Tensor)]
    if foreign or not content:
        names = sorted(
            key if isinstance(key, str) and key.isprintable() and len(key) <= 100 else shown(key) for key in foreign
        )
        rule = f"a checkpoint must be tensors by name, or hold them under one of {', '.join(_CONTAINERS)}"
        raise ValueError(f"{rule}, got {', '.join(names[:4]) or 'nothing'} in {name}")
    for key in content:
        check_name(key)
    return dict(content)


def _without_wrappers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the name prefixes of DistributedDataParallel, torch.compile and Lightning modules."""
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in state):
            return _without_wrappers({name.removeprefix(wrapper): value for name, value in state.items()})
    return state
