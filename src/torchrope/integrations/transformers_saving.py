"""`save_pretrained` and `push_to_hub` of swapped models of transformers."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from torchrope.files import write_whole
from torchrope.integrations.rotary import Replaced
from torchrope.integrations.saving import FILE, save


def own_saving(model: nn.Module, tower: nn.Module) -> list[Replaced]:
    """Put this module's functions in the place of those of all models of transformers that hold a swapped tower."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    owners = [owner for owner in models if any(part is tower for part in owner.modules())]
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
    """Write a swapped model as `torchrope.save` does: from_pretrained would drop its encodings and say little.

    The folder gets no configuration and no file that from_pretrained reads, so that it fails there; and an index by
    which a Trainer resumes.

    Args:
        model: The swapped model.
        save_directory: The folder, made if missing.
        is_main_process: Whether this process is the one that writes.
        state_dict: Refused unless it holds the model's own tensors.
        push_to_hub: Refused.
        kwargs: Left aside: how transformers cuts its files.

    Raises:
        ValueError: a folder that from_pretrained would read, and what `torchrope.save` refuses.
    """
    folder = Path(save_directory)
    if push_to_hub:
        refuse_hub()
    if (folder / CONFIG_NAME).exists():
        rule = "a swapped model needs a folder of its own, which from_pretrained refuses"
        raise ValueError(f"{rule}, got {folder} with a {CONFIG_NAME}")
    own = model.state_dict()
    if state_dict is not None and not _same_tensors(state_dict, own):
        raise ValueError("save_pretrained of a swapped model writes its own tensors, got a state_dict of others")
    if not is_main_process:
        return
    save(model, folder / FILE)
    # A Trainer that resumes reads the map alone; from_pretrained needs "metadata" too, and fails.
    index = {"torchrope": f"{FILE} is for torchrope.load", "weight_map": dict.fromkeys(own, FILE)}
    write_whole(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=1))


def refuse_hub(*args: Any, **kwargs: Any) -> None:
    """In place of push_to_hub."""
    raise ValueError("from_pretrained would drop the encodings of a swapped model: upload what torchrope.save writes")


def _same_tensors(some: dict[str, Tensor], own: dict[str, Tensor]) -> bool:
    return some.keys() == own.keys() and all(some[name].data_ptr() == own[name].data_ptr() for name in own)
