"""Convert checkpoints of rope-vit's ViTs (Heo et al.) and of timm's `vit_*_patch16_rope_*` to `ViT`."""

import math
import warnings

from torch import Tensor

from torchrope.checkpoints.published import timm_vit
from torchrope.checkpoints.published.key_map import Checkpoint, Extents, State
from torchrope.encodings import AxialRoPE, Choice, MixedRoPE
from torchrope.encodings.axial import along_axes
from torchrope.encodings.base import planar
from torchrope.encodings.fixed import geometric_sequence
from torchrope.models import ViT

FAMILY = "rope-vit"
_BASE = 100.0  # of RoPE-Axial in rope-vit's code; not in the file
_FREQUENCIES = ("rope.freqs", "freqs")  # timm's name, rope-vit's
MARKS = (("patch_embed.proj.weight",), ("blocks.0.attn.qkv.weight",), ("blocks.0.gamma_1", *_FREQUENCIES))


def convert(
    state: State, *, num_heads: int | None = None, input_size: Extents = None, encoding: str | None = None
) -> ViT:
    """Build a `ViT` with `MixedRoPE` if the file has frequencies, otherwise with `AxialRoPE` of base 100."""
    source = Checkpoint(FAMILY, state, timm_vit.keys(state))
    learned = next((name for name in _FREQUENCIES if name in source), None)
    source.require(encoding in (None, "axial", "none"), f"encoding must be 'axial' or 'none', got {encoding!r}")
    rule = f"encoding must be None for a file with {learned}, got {encoding!r}"
    source.require(encoding is None or learned is None, rule)
    rule = "reg_token must be absent: models such as DINOv3 do not store their frequencies, got one"
    source.require("reg_token" not in source, rule)
    dim, _, *patch = source.shape("patch_embed.proj.weight", 4)
    if learned == "rope.freqs":
        stated = source.shape(learned, 4)[2]
        source.require(num_heads in (None, stated), f"num_heads must be {stated}, as in {learned}, got {num_heads}")
        num_heads = stated
    if input_size is None and "freqs_t_x" in source and "pos_embed" not in source:
        (count,) = source.shape("freqs_t_x", 1)
        side = math.isqrt(count)
        if side**2 == count:
            input_size = (side * patch[0], side * patch[1])
    source.drop("freqs_t_[xy]")  # the column and row of each patch at the training size
    settings, absolute = timm_vit.arguments(source, num_heads=num_heads, input_size=input_size)
    depth, heads = settings["depth"], settings["num_heads"]
    pairs = dim // heads // 2
    if learned is not None:
        split = (heads, pairs) if learned == "rope.freqs" else (heads * pairs,)
        frequencies = source.take(learned, (2, depth, *split)).float().reshape(2, depth, heads, pairs)
        generators = [planar(layer) for layer in frequencies.flip(0).unbind(1)]  # in the file width is first
        return source.load(ViT, generators, encoding=Choice(MixedRoPE, absolute), **settings)
    if encoding == "none":
        return source.load(ViT, encoding=Choice(absolute=absolute), share_layers=True, **settings)
    if encoding is None and absolute is not None:
        warnings.warn(
            "the file may be RoPE-Axial with APE or DeiT III; assuming RoPE-Axial. "
            "Pass encoding='axial' to silence this, encoding='none' for DeiT III",
            stacklevel=4,
        )
    source.require(pairs % 2 == 0, f"heads of RoPE-Axial must have a multiple of 4 channels, got {2 * pairs}")
    axial = planar(axial_frequencies_by_halves(pairs)).unsqueeze(1)
    return source.load(ViT, [axial], encoding=Choice(AxialRoPE, absolute), share_layers=True, **settings)


def axial_frequencies_by_halves(pairs: int) -> Tensor:
    """Return frequencies `(2, pairs)` of (height, width): the first half of the pairs rotates along width."""
    return along_axes(geometric_sequence(pairs // 2, _BASE), 2, grouped=True).flip(0).float()
