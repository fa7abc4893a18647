"""Convert checkpoints of rope-vit's ViTs (Heo et al.) and of timm's `vit_*_patch16_rope_*` to `ViT`."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from torchrope.encodings import AxialRoPE, MixedRoPE, NoEncoding
from torchrope.encodings.base import planar
from torchrope.integrations.checkpoints.published import deit
from torchrope.integrations.checkpoints.published.tensors import Tensors
from torchrope.models import ViT

FAMILY = "rope-vit"
_BASE = 100.0  # of RoPE-Axial in rope-vit's code; not in the file
_FREQUENCIES = ("rope.freqs", "freqs")  # timm's name, rope-vit's


def recognises(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict has the names of DeiT III with layer scale, or of a ViT with learned frequencies."""
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
    """Build a `ViT` with `MixedRoPE` if the file has frequencies, otherwise with `AxialRoPE` of base 100.

    Args:
        state: The checkpoint.
        num_heads: Attention heads; 64 channels each by default.
        input_size: Training size, if the patches are not a square.
        encoding: "axial" or "none" for a file with a position table and no frequencies, which may be RoPE-Axial with
            APE or DeiT III; "axial", with a warning, by default.

    Raises:
        ValueError: a tensor that is missing, unused or of a wrong shape.
    """
    tensors = Tensors(FAMILY, state)
    learned = next((name for name in _FREQUENCIES if name in tensors), None)
    _check_encoding(tensors, encoding, learned)
    if "reg_token" in tensors:
        raise tensors.error("reg_token must be absent: models such as DINOv3 do not store their frequencies, got one")
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
            "the file may be RoPE-Axial with APE or DeiT III; assuming RoPE-Axial. "
            "Pass encoding='axial' to silence this, encoding='none' for DeiT III",
            stacklevel=4,
        )
    pairs = plan.dim // plan.num_heads // 2
    if pairs % 2:
        raise tensors.error(f"heads of RoPE-Axial must have a multiple of 4 channels, got {2 * pairs}")
    axial = [planar(axial_frequencies_by_halves(pairs)).unsqueeze(1)]
    return deit.load(tensors, plan, encoding=AxialRoPE, generators=axial, share_layers=True)


def axial_frequencies_by_halves(pairs: int, base: float = _BASE) -> Tensor:
    """Return frequencies `(2, pairs)` of (height, width): the first half of the pairs rotates along width."""
    half = pairs // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    zeros = torch.zeros_like(frequencies)
    return torch.stack([torch.cat([zeros, frequencies]), torch.cat([frequencies, zeros])]).float()


def _take_frequencies(tensors: Tensors, plan: deit.Plan, name: str) -> Tensor:
    """Return the learned frequencies `(2, depth, heads, pairs)` of (height, width); in the file width is first."""
    pairs = plan.dim // plan.num_heads // 2
    split = (plan.num_heads, pairs) if name == "rope.freqs" else (plan.num_heads * pairs,)
    frequencies = tensors.take(name, 2, plan.depth, *split)
    return frequencies.reshape(2, plan.depth, plan.num_heads, pairs).flip(0)


def _check_encoding(tensors: Tensors, encoding: str | None, learned: str | None) -> None:
    if encoding not in (None, "axial", "none"):
        raise tensors.error(f"encoding must be 'axial' or 'none', got {encoding!r}")
    if encoding is not None and learned is not None:
        raise tensors.error(f"encoding must be None for a file with {learned}, got {encoding!r}")
