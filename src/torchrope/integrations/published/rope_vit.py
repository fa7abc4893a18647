"""rope-vit's ViTs (Heo et al.), under its own names and under timm's `vit_*_patch16_rope_*`."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from torchrope.encodings import AxialRoPE, MixedRoPE, NoEncoding
from torchrope.encodings.base import planar
from torchrope.integrations.published import deit
from torchrope.integrations.published.tensors import Tensors
from torchrope.models import ViT

FAMILY = "rope-vit"
_BASE = 100.0  # of RoPE-Axial: it is written in the code, not in the file
_FREQUENCIES = ("rope.freqs", "freqs")  # timm's name, rope-vit's


def recognises(state: Mapping[str, Tensor]) -> bool:
    """Whether it has DeiT III's blocks, with layer scale, or a ViT's with learned frequencies."""
    if "patch_embed.proj.weight" not in state or "blocks.0.attn.qkv.weight" not in state:
        return False
    return "blocks.0.gamma_1" in state or any(name in state for name in _FREQUENCIES)


def convert(
    state: Mapping[str, Tensor],
    *,
    num_heads: int | None = None,
    input_size: deit.InputSize | None = None,
    encoding: str | None = None,
) -> ViT:
    """Make a `ViT` with `MixedRoPE` where the file has frequencies, with `AxialRoPE` of base 100 where not.

    Args:
        state: The checkpoint.
        num_heads: Attention heads; 64 channels each by default.
        input_size: Training size, where the positions are no square.
        encoding: "axial" or "none" for a file with a position table and no frequencies, which may be RoPE-Axial with
            APE or DeiT III; "axial", with a warning, by default.

    Raises:
        ValueError: what is missing, misshapen or left over.
    """
    tensors = Tensors(FAMILY, state)
    learned = next((name for name in _FREQUENCIES if name in tensors), None)
    _check_encoding(tensors, encoding, learned)
    if "reg_token" in tensors:
        raise tensors.refusal("it has a reg_token: DINOv3's, for one, whose frequencies are not in the file")
    if learned == "rope.freqs":
        num_heads = deit.heads_of(
            tensors,
            tensors.shape("patch_embed.proj.weight", 4)[0],
            num_heads,
            stated=tensors.shape(learned, 4)[2],
            by=learned,
        )
    plan = deit.plan(tensors, num_heads=num_heads, input_size=input_size)
    tensors.drop("freqs_t_x", "freqs_t_y")  # the column and row of each patch at the training size
    if learned is not None:
        frequencies = _take_frequencies(tensors, plan, learned)
        generators = [planar(layer) for layer in frequencies.unbind(1)]
        return deit.load(tensors, plan, encoding=MixedRoPE, generators=generators)
    if encoding == "none":
        return deit.load(tensors, plan, encoding=NoEncoding, share_layers=True)
    if encoding is None and plan.table_prefix is not None:
        warnings.warn(
            "RoPE-Axial with APE and DeiT III leave the same names; taken for RoPE-Axial: "
            "say load_published(path, encoding='axial'), or encoding='none' for DeiT III",
            stacklevel=4,
        )
    pairs = plan.dim // plan.num_heads // 2
    if pairs % 2:
        raise tensors.refusal(f"RoPE-Axial needs heads of a multiple of 4 channels, got {2 * pairs}")
    axial = [planar(axial_frequencies(pairs)).unsqueeze(1)]
    return deit.load(tensors, plan, encoding=AxialRoPE, generators=axial, share_layers=True)


def axial_frequencies(pairs: int, base: float = _BASE) -> Tensor:
    """Frequencies `(2, pairs)` of height and width: the first half of the pairs is rotated by the column."""
    half = pairs // 2
    ladder = base ** (-torch.arange(half, dtype=torch.float64) / half)
    still = torch.zeros_like(ladder)
    return torch.stack([torch.cat([still, ladder]), torch.cat([ladder, still])]).float()


def _take_frequencies(tensors: Tensors, plan: deit.Plan, name: str) -> Tensor:
    """Learned frequencies `(2, depth, heads, pairs)`, height before width, unlike the file's."""
    pairs = plan.dim // plan.num_heads // 2
    split = (plan.num_heads, pairs) if name == "rope.freqs" else (plan.num_heads * pairs,)
    frequencies = tensors.take(name, 2, plan.depth, *split)
    return frequencies.reshape(2, plan.depth, plan.num_heads, pairs).flip(0)


def _check_encoding(tensors: Tensors, encoding: str | None, learned: str | None) -> None:
    if encoding not in (None, "axial", "none"):
        raise tensors.refusal(f"encoding must be 'axial' or 'none', got {encoding!r}")
    if encoding is not None and learned is not None:
        raise tensors.refusal(f"{learned} in it says that its encoding is mixed, got encoding={encoding!r}")
