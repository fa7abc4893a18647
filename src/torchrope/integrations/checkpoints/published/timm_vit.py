"""Convert checkpoints with timm's ViT parameter names and a position table (ViT, DeiT, DINO, DINOv2) to `ViT`."""

from collections.abc import Mapping

from torch import Tensor

from torchrope.encodings import NoEncoding
from torchrope.integrations.checkpoints.published import deit
from torchrope.integrations.checkpoints.published.tensors import Tensors
from torchrope.models import ViT

FAMILY = "timm's ViT"


def recognises(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict has a patch embedding, a learned position table and attention blocks."""
    return all(name in state for name in ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"))


def convert(
    state: Mapping[str, Tensor],
    *,
    num_heads: int | None = None,
    input_size: deit.InputSize | None = None,
) -> ViT:
    """Build a `ViT` with `LearnedAPE`; the table's entry for the class token is added to that token.

    Args:
        state: The checkpoint.
        num_heads: Attention heads; as published by default, 64 channels each for most.
        input_size: Training size, if the patches of the position table are not a square.

    Raises:
        ValueError: a tensor that is missing, unused or of a wrong shape.
    """
    tensors = Tensors(FAMILY, state)
    plan = deit.plan(tensors, num_heads=num_heads, input_size=input_size)
    return deit.load(tensors, plan, encoding=NoEncoding, share_layers=True)
