"""timm's plain ViTs, and what shares their names: ViT, DeiT, DeiT III as timm has it, DINO, DINOv2 with registers."""

from collections.abc import Mapping

from torch import Tensor

from torchrope.encodings import NoEncoding
from torchrope.integrations.published import deit
from torchrope.integrations.published.tensors import Tensors
from torchrope.models import ViT

FAMILY = "timm's ViT"


def recognises(state: Mapping[str, Tensor]) -> bool:
    """Whether it has a patch embedding, a learned position table and blocks of attention."""
    return all(name in state for name in ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"))


def convert(
    state: Mapping[str, Tensor],
    *,
    num_heads: int | None = None,
    input_size: deit.InputSize | None = None,
) -> ViT:
    """Make a `ViT` with `LearnedAPE`; what the table says of the class token is added to the class token.

    Args:
        state: The checkpoint.
        num_heads: Attention heads; as published by default, 64 channels each for most.
        input_size: Training size, where the position table is no square.

    Raises:
        ValueError: what is missing, misshapen or left over.
    """
    tensors = Tensors(FAMILY, state)
    plan = deit.plan(tensors, num_heads=num_heads, input_size=input_size)
    return deit.load(tensors, plan, encoding=NoEncoding, share_layers=True)
