"""Give the models of torchrope the mixin of huggingface_hub, which is imported when it is first used."""

from typing import Any

from torchrope.models.layers import Shareable


def _mixin() -> Any:
    try:
        from torchrope.integrations.hub import Hub
    except ModuleNotFoundError as error:
        raise ImportError(f"sharing models requires {error.name}: pip install huggingface_hub safetensors") from None
    return Hub


Shareable.mixin = staticmethod(_mixin)
