"""Model families of each library that `swap` supports, one row each, and models that it refuses for a known reason."""

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torchrope.integrations.families import diffusers, primus, timm, transformers
from torchrope.integrations.families.transformers import by_hand, is_attention
from torchrope.integrations.family import names_of
from torchrope.integrations.rebound import names_in

FAMILIES = (*timm.FAMILIES, *transformers.FAMILIES, *diffusers.FAMILIES, *primus.FAMILIES)
"""All families by the classes of their models, whose libraries are not imported before one is swapped."""

_POOLED = "queries are max-pooled over several tokens"
_MEMORY = "memory mixes keys with and without rotation"
_REFUSED = {
    "timm.*.Hiera": f"Hiera's {_POOLED}",
    "timm.*.HieraDet": f"Hiera's {_POOLED}",
    "transformers.*.HieraMaskUnitAttention": f"Hiera's {_POOLED}",
    "transformers.*.Sam2MultiScaleAttention": f"the queries of SAM 2's Hiera {_POOLED.removeprefix('queries ')}",
    "transformers.*.EomtDinov3Attention": "EoMT puts queries before the patches in its last layers alone",
    "transformers.*.EdgeTamVideoRoPECrossAttention": f"EdgeTAM's {_MEMORY}",
    "transformers.*.EdgeTamVideoRoPESelfAttention": f"EdgeTAM's {_MEMORY}",
    "transformers.*.Sam2VideoRoPEAttention": f"SAM 2's {_MEMORY}",
    "transformers.*.Sam3TrackerVideoRoPEAttention": f"SAM 3's {_MEMORY}",
}
"""Classes of models and layers by pattern, and why `swap` refuses a model with them."""


def refuse(model: nn.Module) -> None:
    """Raise ValueError for a model whose attention rotates or pools q and k in another way, if it is known."""
    for module in model.modules():
        kind, names = type(module).__name__, names_of(type(module))
        reasons = [why for name in names for pattern, why in _REFUSED.items() if fnmatchcase(name, pattern)]
        if _rotates(module) and is_attention(module):
            reasons.append(f"no module called with position_ids makes the cos and sin of {kind}")
        elif _rotates(module):
            reasons.append(f"{kind} does not rotate q and k by one function of q, k, cos and sin")
        if reasons:
            rule = f"swap needs attention that rotates q and k by positions, but {reasons[0]}"
            raise ValueError(f"{rule}; {by_hand(kind)}, got {type(model).__name__}")
        if "diffusers.models.modeling_utils.ModelMixin" in names:
            supported = ", ".join(family.model.rpartition(".")[2] for family in diffusers.FAMILIES)
            processor = "a custom attention processor can call torchrope.rotate(q, k, rotation) with any positions"
            rule = f"swap supports these transformers of diffusers: {supported}"
            raise ValueError(f"{rule}; {processor} (model.set_attn_processor), got {kind}")


def _rotates(module: Any) -> bool:
    """Return whether a module is attention of transformers that calls a rotation function."""
    is_attention = type(module).__module__.startswith("transformers.") and "Attention" in type(module).__name__
    return is_attention and any("rotary" in name for name in names_in(module))
