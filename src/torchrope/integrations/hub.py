"""Models in folders and repositories of the Hugging Face Hub, by the mixin of huggingface_hub."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME
from torch import nn

from torchrope._version import __version__
from torchrope.encodings import Encoding
from torchrope.files import write_whole
from torchrope.integrations.saving import FILE, load, save

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


class Hub(ModelHubMixin, library_name="torchrope"):
    """Keep a model in a folder or on the Hub:  `torchrope.safetensors`, as `torchrope.save` writes it, and a card.

    `ViT`, `Swin` and `Features` call it by their own `save_pretrained`, `push_to_hub` and `from_pretrained`; it serves
    every model that `torchrope.save` takes. What comes from the Hub is read as any other file: nothing in it is
    pickled, nothing in it runs, its settings are of a closed list.

    Args:
        model: The model.

    Example:
        >>> import tempfile
        >>> from torchrope import ViT
        >>> model = ViT((8, 8), patch_size=4, num_classes=3, dim=32, depth=2, num_heads=2, encoding="mixed").eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Hub(model).save_pretrained(folder)
        ...     again = Hub.from_pretrained(folder)
        >>> type(again).__name__, again.encodings[0]
        ('ViT', MixedRoPE(num_axes=2, num_heads=2, head_dim=16, block_size=2))
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """A card that says how to read the model, without a template engine."""
        name = type(self.model).__name__
        own = type(self.model).__module__.startswith("torchrope.models.")
        read = f'tr.{name}.from_pretrained("...")' if own else f'tr.load("{FILE}")'
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
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        into: nn.Module | None = None,
        classes: Iterable[type[Encoding]] = (),
        kind: type[nn.Module] = nn.Module,
        **others: Any,
    ) -> nn.Module:
        """Read the file of a folder or of a repository.

        Args:
            model_id: A folder, or the name of a repository.
            revision: As huggingface_hub takes it, and so all up to `token`.
            cache_dir: Likewise.
            force_download: Likewise.
            local_files_only: Likewise.
            token: Likewise.
            into: As `torchrope.load` takes it.
            classes: Likewise.
            kind: What the model must be.
            others: Refused.

        Raises:
            ValueError: further arguments, what `torchrope.load` refuses, or a model of another kind.
        """
        if others:
            raise ValueError(f"from_pretrained takes into and classes for torchrope.load, got {', '.join(others)}")
        file = Path(model_id) / FILE
        if not Path(model_id).is_dir():
            file = Path(
                hf_hub_download(
                    model_id,
                    FILE,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                )
            )
        model = load(file, classes=classes) if into is None else load(file, into=into, classes=classes)
        if not isinstance(model, kind):
            raise ValueError(f"{model_id} must hold a {kind.__name__}, got a {type(model).__name__}")
        return model
