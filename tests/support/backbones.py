"""`Features` in the place of backbones of transformers."""

import sys
from typing import Any

import pytest
from transformers.modeling_outputs import BackboneOutput

from torchrope.models import Features


def replace_backbone(head: type, features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of a class of transformers be built on features, with the output and method that they expect."""
    backbone: Any = features
    backbone.register_forward_hook(lambda _module, _inputs, maps: BackboneOutput(feature_maps=tuple(maps)))
    backbone.forward_with_filtered_kwargs = lambda pixels, **outputs: backbone(pixels)
    monkeypatch.setattr(sys.modules[head.__module__], "load_backbone", lambda config: backbone)
