"""From a file to a state dict: nothing in the file is executed, prefixes of wrappers are taken off."""

import os
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CONTAINERS = ("model", "state_dict", "model_state_dict", "module")
_WRAPPERS = ("module.", "model.", "_orig_mod.")
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")


def read_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint file, by name.

    Args:
        path: A file of `torch.save` or of safetensors (by its ending): a state dict, or a checkpoint that holds one
            under "model", "state_dict", "model_state_dict" or "module".

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is neither, is cut short, holds objects that are not tensors, or has no state dict.
    """
    path = Path(path)
    read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
    return _without_wrappers(_find_state(read(path), path.name))


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is no whole safetensors file: {_first_line(error)}") from error


def _read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():  # torch tells of its own old formats; the caller cannot change the file
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise ValueError(_why_unreadable(path.name, error)) from error


def _why_unreadable(name: str, error: Exception) -> str:
    refused = _REFUSED.search(str(error))
    if refused:
        return (
            f"torchrope reads pickles without running their code, got {refused[1]} in {name}; "
            "save its state dict alone to load it"
        )
    if isinstance(error, pickle.UnpicklingError) and "Unsupported" in str(error):
        return (
            f"torchrope reads pickles without running their code, got an instruction in {name} that tensors never need"
        )
    return f"{name} is no whole file of torch.save: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".")


def _find_state(content: Any, name: str) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise ValueError(f"a checkpoint must be a dictionary, got {type(content).__name__} in {name}")
    for key in _CONTAINERS:
        if isinstance(content.get(key), Mapping):
            return _find_state(content[key], name)
    foreign = [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    if foreign or not content:
        places = ", ".join(_CONTAINERS)
        found = ", ".join(sorted(foreign)[:4]) or "nothing"
        raise ValueError(
            f"a checkpoint must be tensors by name, or hold them under one of {places}, got {found} in {name}"
        )
    return {str(key): value.detach() for key, value in content.items()}


def _without_wrappers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take off what DistributedDataParallel, torch.compile and Lightning modules put before every name."""
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in state):
            return _without_wrappers({name.removeprefix(wrapper): value for name, value in state.items()})
    return state
