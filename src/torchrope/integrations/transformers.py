"""Adapters of `swap` for transformers' models."""

from torch import nn

from torchrope.integrations.rotary import Adapter
from torchrope.integrations.transformers_clips import clips
from torchrope.integrations.transformers_maps import maps
from torchrope.integrations.transformers_refused import refuse as refuse
from torchrope.integrations.transformers_rotating import rotating
from torchrope.integrations.transformers_towers import towers


def adapters(model: nn.Module) -> list[Adapter]:
    """Return an adapter for each supported part of a model."""
    return [*towers(model), *clips(model), *maps(model), *rotating(model)]
