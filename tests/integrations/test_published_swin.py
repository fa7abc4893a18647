"""Checkpoints of Swin: the logits of timm's model, its attention rotated as rope-vit's for checkpoints of that."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from published import randomised, refused, saved
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from torch import Tensor, nn

import torchrope as tr

WINDOW = 4
small = dict(img_size=64, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=WINDOW, num_classes=5)


def _timm(**settings: Any) -> nn.Module:
    return randomised(SwinTransformer(**{**small, "strict_img_size": False, **settings}))


def _drawn_frequencies(kind: str, heads: int, pairs: int) -> Tensor:
    """rope-vit's (2, heads, pairs), x before y: random, or its ladder of base 50 without a random turn."""
    if kind == "mixed":
        return torch.randn(2, heads, pairs)
    ladder = 50.0 ** -(torch.arange(pairs // 2) / (pairs // 2))
    x = torch.cat([ladder, ladder * torch.tensor(torch.pi / 2).cos()])  # zero but for rounding, as published
    y = torch.cat([ladder * 0, ladder])
    return torch.stack([x, y]).unsqueeze(1).expand(-1, heads, -1).contiguous()


def _rotated_attention(
    attention: WindowAttention, frequencies: Tensor, x: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Pairs of channels of q and k as complex numbers, times e^(i (f_x column + f_y row)) within the window."""
    places = torch.arange(WINDOW * WINDOW)
    column, row = places % WINDOW, places // WINDOW
    angles = frequencies[0].unsqueeze(1) * column.unsqueeze(1) + frequencies[1].unsqueeze(1) * row.unsqueeze(1)
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = (
        torch.view_as_real(
            torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * angles)
        ).flatten(-2)
        for h in (q, k)
    )
    scores = q @ k.mT * attention.scale + attention._get_rel_pos_bias()
    if mask is not None:
        scores = scores.unflatten(0, (-1, len(mask))) + mask.unsqueeze(1)
        scores = scores.flatten(0, 1)
    return attention.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


def _rope_vits(kind: str, with_bias: bool, with_buffers: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """timm's model made to rotate, and its weights as rope-vit writes them."""
    model = _timm()
    extra: dict[str, Tensor] = {}
    for name, attention in model.named_modules():
        if isinstance(attention, WindowAttention):
            heads = attention.num_heads
            frequencies = _drawn_frequencies(kind, heads, attention.qkv.in_features // heads // 2)
            extra[f"{name}.rope_freqs"] = frequencies
            if with_buffers:
                extra[f"{name}.rope_t_x"] = torch.arange(WINDOW * WINDOW) % WINDOW
                extra[f"{name}.rope_t_y"] = torch.arange(WINDOW * WINDOW) // WINDOW
            if not with_bias:
                nn.init.zeros_(attention.relative_position_bias_table)
            attention.forward = partial(_rotated_attention, attention, frequencies)
    state = {
        name: value
        for name, value in model.state_dict().items()
        if with_bias or not name.endswith("relative_position_bias_table")
    }
    return model, state | extra


def _agree(mine: nn.Module, theirs: nn.Module, *sizes: tuple[int, int]) -> None:
    for size in sizes:
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            assert (mine(x) - theirs(x)).abs().max() < 1e-4, size


@pytest.mark.parametrize("settings", [{}, dict(qkv_bias=False), dict(num_classes=0), dict(mlp_ratio=2.0)])
def test_timms_swin(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = _timm(**settings)
    _agree(tr.load_published(saved({"model": theirs.state_dict()}, tmp_path)), theirs, (64, 64), (48, 80))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["mixed", "axial"])
def test_rope_vits_swin(kind: str, with_bias: bool, tmp_path: Path) -> None:
    theirs, state = _rope_vits(kind, with_bias, with_buffers=True)
    mine = tr.load_published(saved({"model": state}, tmp_path))
    encoding = mine.stages[0].encodings[0]
    assert isinstance(encoding, tr.MixedRoPE if kind == "mixed" else tr.AxialRoPE)
    assert len(mine.stages[0].biases) == 2 * with_bias
    _agree(mine, theirs, (64, 64), (48, 80))


def test_window_that_the_file_does_not_tell_is_given(tmp_path: Path) -> None:
    theirs, state = _rope_vits("mixed", with_bias=False, with_buffers=False)
    path = saved(state, tmp_path)
    _agree(tr.load_published(path, window_size=WINDOW), theirs, (64, 64))
    assert tr.load_published(path).stages[0].window == (7, 7)


LOOKS = "^checkpoint of Swin: "


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, dict(window_size=7), LOOKS + "window_size must be 4, as in its tables, got 7$"),
        ({}, dict(input_size=(30, 32)), LOOKS + r"input_size must be 2 multiples of the patch \(4, 4\), got"),
        ({"absolute_pos_embed": torch.ones(1, 64, 16)}, {}, "must be used, got unused absolute_pos_embed$"),
        ({"norm.bias": torch.ones(31)}, {}, LOOKS + r"norm.bias must be \(32,\), got \(31,\)$"),
    ],
)  # fmt: skip
def test_conflicting_files_are_named(
    change: dict[str, Tensor], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(saved(_timm().state_dict() | change, tmp_path), message, **options)


def test_frequencies_of_another_shape_are_refused(tmp_path: Path) -> None:
    _, state = _rope_vits("mixed", with_bias=True, with_buffers=True)
    name = "layers.1.blocks.0.attn.rope_freqs"
    path = saved(state | {name: torch.ones(2, 4, 3)}, tmp_path)
    refused(path, LOOKS + rf"{name} must be \(2, 4, 4\), got \(2, 4, 3\)$")
