"""Replacements for `save_pretrained` and `push_to_hub` of swapped transformers models."""

import copy
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from torchrope.checkpoints.saving import FILE, save
from torchrope.files import write_whole
from torchrope.integrations.rotary import Replaced

BASE_CONFIG = "base_config.json"
"""Name of the file with the true configuration of a swapped model."""
_HINT = (
    "none, because from_pretrained would drop the encodings: "
    f"build the model of {BASE_CONFIG} and call torchrope.load(folder, into=model)"
)
# from_pretrained shows the first in an error, as the version of a configuration; the second is for other releases.
_CONFIG = json.dumps({"configuration_files": [f"config.{_HINT}.json"], "model_type": _HINT}, indent=1)


def replace_saving(model: nn.Module, tower: nn.Module) -> list[Replaced]:
    """Replace both methods in every PreTrainedModel that contains the swapped tower; return handles that undo it."""
    owners = [part for part in model.modules() if isinstance(part, PreTrainedModel) and tower in part.modules()]
    writing = [Replaced(owner, "save_pretrained", partial(save_pretrained, owner)) for owner in owners]
    return [*writing, *(Replaced(owner, "push_to_hub", refuse_hub) for owner in owners)]


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Write a swapped model by `torchrope.save`, because from_pretrained would drop its encodings.

    The folder gets the model's configuration as base_config.json, a config.json by which from_pretrained raises an
    error that says so, and an index with which a Trainer resumes. Sharding options are ignored. ValueError for
    push_to_hub=True, a config.json of another model, other tensors, and what `torchrope.save` does not support.
    """
    folder = Path(save_directory)
    config = folder / CONFIG_NAME
    if push_to_hub:
        refuse_hub()
    if config.exists() and config.read_text(encoding="utf-8") != _CONFIG:
        rule = f"save_directory must have no {CONFIG_NAME}, so that from_pretrained does not load it without encodings"
        raise ValueError(f"{rule}, got {folder}")
    state = model.state_dict()
    if state_dict is not None and _pointers(state_dict) != _pointers(state):
        raise ValueError("state_dict must hold the tensors of the swapped model, got other names or shapes")
    if not is_main_process:
        return
    save(model, folder / FILE)
    base = copy.deepcopy(model.config)
    base.architectures, base.dtype = [type(model).__name__], model.dtype
    write_whole(folder / BASE_CONFIG, base.to_json_string())
    write_whole(config, _CONFIG)
    # A Trainer that resumes reads only the map; from_pretrained(config=...) also needs "metadata", and raises.
    index = {"torchrope": f"{FILE} is for torchrope.load(folder, into=model)", "weight_map": dict.fromkeys(state, FILE)}
    write_whole(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=1))


def refuse_hub(*args: Any, **kwargs: Any) -> None:
    """Replacement for push_to_hub that raises ValueError."""
    raise ValueError("a swapped model must be uploaded as a file of torchrope.save, got push_to_hub")


def _pointers(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
