"""Save models to and load them from folders and the Hugging Face Hub, by the mixin of huggingface_hub."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME
from torch import nn

from torchrope._version import __version__
from torchrope.checkpoints.saving import FILE, load, save
from torchrope.encodings import Encoding
from torchrope.files import write_whole

_CARD = """---
library_name: torchrope
tags:
- position-encoding
- model_hub_mixin
---

A {name}, written by torchrope {version}. In Python:

    import torchrope as tr

    model = {read}
"""
_DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")
"""Arguments that `ModelHubMixin` always passes, of `hf_hub_download`."""


class Hub(ModelHubMixin, library_name="torchrope"):
    """Save models to folders or the Hub, and load them: `torchrope.safetensors` of `torchrope.save`, and a model card.

    It supports every model that `torchrope.save` does. Files of the Hub are read like local ones: nothing is unpickled
    or executed, and settings are validated before use.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return a model card with the code that loads the model; needs no template engine."""
        name = type(self.model).__name__
        of_torchrope = type(self.model).__module__.startswith("torchrope.models.")
        read = f'tr.{name}.from_pretrained("...")' if of_torchrope else f'tr.load("{FILE}", into=model)'
        return ModelCard(_CARD.format(name=name, version=__version__, read=read))

    def _save_pretrained(self, save_directory: Path) -> None:
        save(self.model, save_directory / FILE)
        # The Hub counts downloads by this file; `load` never reads it.
        described = {"library_name": "torchrope", "architecture": type(self.model).__name__, "version": __version__}
        write_whole(save_directory / CONFIG_NAME, json.dumps(described, indent=1))

    @classmethod
    def _from_pretrained(  # type: ignore[override]
        cls,
        *,
        model_id: str,
        into: nn.Module | None = None,
        classes: Iterable[type[Encoding]] = (),
        kind: type[nn.Module] = nn.Module,
        **options: Any,
    ) -> nn.Module:
        """Load the model of a folder or a repository; `kind` is its required class."""
        download = {name: options.pop(name) for name in _DOWNLOAD}
        if options:
            raise ValueError(f"further arguments of from_pretrained must be into or classes, got {', '.join(options)}")
        folder = Path(model_id)
        file = folder / FILE if folder.is_dir() else hf_hub_download(model_id, FILE, **download)
        model = load(file, into=into, classes=classes)
        if not isinstance(model, kind):
            raise ValueError(f"{model_id} must hold a {kind.__name__}, got a {type(model).__name__}")
        return model
