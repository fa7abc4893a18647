"""Checkpoints of rope-vit and timm: the same logits as timm's models, and refusals that name what is in the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from published import randomised, refused, saved
from torch import Tensor, nn

import torchrope as tr
from torchrope.checkpoints.published import rope_vit, timm_vit
from torchrope.checkpoints.published.key_map import Checkpoint

small = dict(img_size=64, embed_dim=48, depth=2, num_heads=2, num_classes=5)
# Eva takes other sizes only if told at construction, and then its state is the same.
ROPE = ["vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224"]
ROPE_APE = ["vit_small_patch16_rope_ape_224", "vit_small_patch16_rope_mixed_ape_224"]
PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("vit_small_patch16_224", {}),
    ("vit_small_patch16_224", dict(reg_tokens=2)),
    ("vit_small_patch16_224", dict(qkv_bias=False, num_classes=0)),
    ("deit_tiny_patch16_224", {}),
    ("deit3_small_patch16_224", {}),
    ("vit_small_patch14_reg4_dinov2", dict(patch_size=16)),
]
SIZES = [(64, 64), (48, 96), (96, 32)]


def _timm(name: str, **settings: Any) -> nn.Module:
    return randomised(timm.create_model(name, **{**small, "dynamic_img_size": True, **settings}))


def _in_rope_vits_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's state as naver-ai/rope-vit writes it: flat frequencies, and the columns and rows of 64 pixels."""
    state = dict(state)
    if "rope.freqs" in state:
        state["freqs"] = state.pop("rope.freqs").flatten(2)
        state["freqs_t_x"], state["freqs_t_y"] = torch.arange(16.0) % 4, torch.arange(16) // 4
    return state


def _agree(mine: nn.Module, theirs: nn.Module, sizes: list[tuple[int, int]], tolerance: float = 1e-4) -> None:
    for size in sizes:
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            assert (mine(x) - theirs(x)).abs().max() < tolerance, size


@pytest.mark.parametrize("convert", [dict, _in_rope_vits_names], ids=["timm", "rope-vit"])
@pytest.mark.parametrize("name", ROPE + ROPE_APE)
def test_rope_vits_compute_what_timms_compute(
    name: str, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    theirs = _timm(name)
    path = saved({"model": convert(theirs.state_dict())}, tmp_path)
    given = dict(encoding="axial") if name == "vit_small_patch16_rope_ape_224" else {}
    mine = tr.load_published(path, num_heads=2, **given)
    assert not mine.training
    assert isinstance(mine.encodings[0], tr.MixedRoPE if "mixed" in name else tr.AxialRoPE)
    _agree(mine, theirs, SIZES)


@pytest.mark.parametrize(("name", "settings"), PLAIN)
def test_plain_vits_compute_what_timms_compute(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = _timm(name, **settings)
    _agree(tr.load_published(saved(theirs.state_dict(), tmp_path), num_heads=2), theirs, SIZES)


@pytest.mark.slow
def test_real_size_needs_no_option(tmp_path: Path) -> None:
    theirs = randomised(timm.create_model("vit_small_patch16_rope_mixed_224"), spread=0.05)
    path = saved(_in_rope_vits_names(theirs.state_dict()), tmp_path)
    mine = tr.load_published(path)
    assert mine.encodings[0].num_heads == 6
    _agree(mine, theirs, [(224, 224)])


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_huge_patch14_224",
        "vit_giant_patch14_224",
        "vit_gigantic_patch14_224",
        "vit_so400m_patch14_reg1_tipsv2",
    ],
)
def test_heads_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(name, depth=1)
    state = theirs.state_dict()
    source = Checkpoint("timm's ViT", state, timm_vit.keys(state))
    found, _ = timm_vit.arguments(source, num_heads=None, input_size=None)
    assert found["num_heads"] == theirs.blocks[0].attn.num_heads


def test_rectangular_training_size_is_given(tmp_path: Path) -> None:
    theirs = _timm("vit_small_patch16_rope_mixed_ape_224", img_size=(32, 96))
    path = saved(theirs.state_dict(), tmp_path)
    with pytest.raises(ValueError, match=r"input_size= is required: the 12 entries of pos_embed"):
        tr.load_published(path)
    _agree(tr.load_published(path, input_size=(32, 96)), theirs, [(32, 96), (64, 64)])
    with pytest.raises(ValueError, match=r"12 or 11 patches of \(16, 16\), as in pos_embed, got \(64, 64\)"):
        tr.load_published(path, input_size=64)


def test_deit_iii_is_distinguished_from_rope_axial(tmp_path: Path) -> None:
    theirs = _timm("deit3_small_patch16_224")
    state = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value for name, value in
             theirs.state_dict().items()}  # fmt: skip
    path = saved(state, tmp_path)
    _agree(tr.load_published(path, num_heads=2, encoding="none"), theirs, SIZES)
    with pytest.warns(UserWarning, match="assuming RoPE-Axial. Pass encoding=") as warned:
        mine = tr.load_published(path, num_heads=2)
    assert isinstance(mine.encodings[0], tr.AxialRoPE)
    assert warned[0].filename == __file__


def test_axial_frequencies_are_the_papers() -> None:
    rows, columns = rope_vit.axial_frequencies_by_halves(8)
    ladder = [100 ** (-t / 4) for t in range(4)]  # equation 13, theta_t = 100^(-t / (d_head / 4))
    assert columns.tolist() == pytest.approx([*ladder, 0, 0, 0, 0])
    assert rows.tolist() == pytest.approx([0, 0, 0, 0, *ladder])


@pytest.fixture(scope="module")
def timms() -> nn.Module:
    torch.manual_seed(1)
    return _timm("vit_small_patch16_rope_mixed_224")


LOOKS = "^checkpoint of rope-vit: "


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, dict(num_heads=3), LOOKS + "num_heads must be 2, as in rope.freqs, got 3$"),
        ({}, dict(encoding="axial"), LOOKS + "encoding must be None for a file with rope.freqs, got 'axial'$"),
        ({}, dict(encoding="mixed"), LOOKS + "encoding must be 'axial' or 'none', got 'mixed'$"),
        ({}, dict(input_size=50), LOOKS + r"input_size must be 2 multiples of the patch \(16, 16\), got \(50, 50\)$"),
        ({"norm.bias": None}, {}, LOOKS + "norm.bias is missing$"),
        ({"blocks.1.gamma_2": None}, {}, LOOKS + "blocks.1.gamma_2 is missing$"),
        ({"cls_token": None}, {}, LOOKS + "cls_token must be present, because pooling cannot be inferred"),
        (
            {"blocks.0.attn.q_norm.weight": torch.ones(24)},
            {},
            LOOKS + "all tensors must be used, got unused blocks.0.attn.q_norm.weight$",
        ),
        ({name: torch.ones(1) for name in "zyxwv"}, {}, LOOKS + "all tensors must be used, got unused v, w, x and 2 m"),
        ({"norm.weight": torch.ones(49)}, {}, LOOKS + r"norm.weight must be \(48,\), got \(49,\)$"),
        (
            {"norm.weight": torch.ones(48, dtype=torch.int8)},
            {},
            LOOKS + "norm.weight must be floating point, got torch.i",
        ),
        ({"rope.freqs": torch.ones(2, 2, 48)}, {}, LOOKS + r"rope.freqs must have 4 dimensions, got \(2, 2, 48\)$"),
    ],
)
def test_conflicting_files_are_named(
    timms: nn.Module, change: dict[str, Tensor | None], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changed = {**timms.state_dict(), **change}
    state = {name: value for name, value in changed.items() if value is not None}
    refused(saved(state, tmp_path), message, **options)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vit_small_patch16_224", {}, "num_heads= is required for 48 channels$"),
        ("vit_small_patch16_224", dict(num_heads=5), "num_heads must divide the 48 channels of its tokens, got 5$"),
        ("deit_tiny_distilled_patch16_224", dict(num_heads=2), "dist_token must be absent"),
        ("vit_small_patch16_dinov3", dict(num_heads=2), "reg_token must be absent: models such as DINOv3"),
        ("vit_base_patch16_gap_224", dict(num_heads=2), "cls_token must be present"),
        ("eva_large_patch14_196", dict(num_heads=2), "norm.weight is missing$"),
    ],
)
def test_models_that_are_not_ours_are_refused(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(saved(_timm(name, patch_size=16).state_dict(), tmp_path), message, **settings)
