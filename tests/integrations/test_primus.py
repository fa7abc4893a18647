"""nnU-Net's Primus: the outputs after a swap, gradients to frequencies, larger volumes, and the way back.

dynamic-network-architectures 0.4.4, which has Primus, takes timm below 1.0.23; with the timm of these tests its
constructor fails. So its EVA is described here: timm's blocks, and the table of timm's `build_rotary_pos_embed` on
three axes, which hands on what the package's class hands on. Where the package can be built the tests run on it too.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import PatchDropout, build_rotary_pos_embed
from timm.models.eva import EvaBlock
from torch import Tensor, nn

import torchrope as tr

SIZES, HEADS, HEAD_DIM = (2, 3, 4), 2, 24


class Rope(nn.Module):
    """timm's RotaryEmbeddingCat, of any number of axes."""

    def __init__(self, dim: int, feat_shape: tuple[int, ...], ref_feat_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.dim, self.temperature, self.in_pixels = dim, 10000.0, False
        self.grid_offset, self.grid_indexing = 0.0, "ij"
        self.feat_shape, self.ref_feat_shape = feat_shape, ref_feat_shape
        settings = {"dim": dim, "in_pixels": False, "ref_feat_shape": list(ref_feat_shape)}
        table = torch.cat(build_rotary_pos_embed(list(feat_shape), **settings), -1)
        self.register_buffer("pos_embed", table, persistent=False)

    def get_embed(self) -> Tensor:
        return self.pos_embed


class Eva(nn.Module):
    """What Primus holds under `eva`."""

    def __init__(self, registers: int, reference: tuple[int, ...], drop: float) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.num_prefix_tokens = registers
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 24 + registers, dim))
        self.rope = Rope(round(HEAD_DIM / 1.5), SIZES, reference)
        self.patch_drop = PatchDropout(drop, num_prefix_tokens=registers) if drop else None
        blocks = [EvaBlock(dim, HEADS, qkv_fused=False, swiglu_mlp=True, num_prefix_tokens=registers) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x, rope = x + self.pos_embed, self.rope.get_embed()
        if self.patch_drop is not None and self.training:
            x, rope = x[:, :-4], rope[:-4]
        for block in self.blocks:
            x = block(x, rope=rope)
        return x


Eva.__module__ = "dynamic_network_architectures.building_blocks.eva"


class Described(nn.Module):
    def __init__(self, registers: int = 0, reference: tuple[int, ...] = SIZES, drop: float = 0.0) -> None:
        super().__init__()
        self.eva = Eva(registers, reference, drop)


def described(**settings: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = strong(Described(**settings))
    return model, torch.randn(2, *model.eva.pos_embed.shape[1:])


def strong(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                spread = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                parameter.normal_(0, spread / parameter.shape[1] ** 0.5)
    return model.eval()


def outputs(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model.eva(x)
    return result


def error(came: Tensor, expected: Tensor) -> float:
    return float((came - expected).detach().abs().max() / expected.detach().std())


@pytest.mark.parametrize("encoding", ["mixed", "string:4", "liere:4", "comrope-ap:4", "comrope-ld:2"])
@pytest.mark.parametrize("settings", [{}, {"registers": 2, "reference": (4, 6, 2)}])
def test_swap_continues_the_own_rotation_and_learns(settings: dict[str, Any], encoding: str) -> None:
    model, x = described(**settings)
    expected = outputs(model, x)
    with pytest.warns(UserWarning, match="outputs change"):
        still = tr.swap(copy.deepcopy(model), encoding, init="zeros")
    assert error(outputs(still, x), expected) > 0.1
    tr.swap(model, encoding)
    came = outputs(model, x)
    assert error(came, expected) < 1e-5
    came.square().sum().backward()
    learned = [parameter for name, parameter in model.named_parameters() if ".encodings." in name]
    assert len(learned) >= 2
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learned)
    assert torch.equal(outputs(tr.unswap(model), x), expected)


def test_dropped_patches_keep_their_places_and_the_table_can_be_silent() -> None:
    model, x = described(drop=0.5)
    expected = outputs(model.train(), x)
    tr.swap(model, "mixed")
    assert error(outputs(model, x), expected) < 1e-5
    tr.unswap(model)
    tr.swap(model, "mixed", keep_position_tables=False)
    assert not model.eva.pos_embed.any()
    assert torch.equal(outputs(tr.unswap(model), x), expected)


def test_larger_and_saved(tmp_path: Path) -> None:
    model, x = described()
    squeezed = copy.deepcopy(model)
    squeezed.eva.rope = Rope(squeezed.eva.rope.dim, SIZES, tuple(size / 2 for size in SIZES))
    expected = outputs(squeezed, x)
    assert error(outputs(tr.extend(model, 2, method="interpolate"), x), expected) < 1e-5
    assert not torch.equal(outputs(tr.extend(model, 2, method="yarn"), x), outputs(model, x))
    tr.swap(model, "liere:4")
    tr.save(model, tmp_path / "primus.safetensors")
    again, _ = described()
    tr.load(tmp_path / "primus.safetensors", into=again)
    assert torch.equal(outputs(again, x), outputs(model, x))


def test_model_without_a_rotation_is_refused() -> None:
    model, _ = described()
    model.eva.rope = None
    with pytest.raises(
        ValueError, match=r"^a Primus must have rotary embeddings to be swapped, got Eva built with use_rot"
    ):
        tr.swap(model, "mixed")


def test_package_itself_where_it_can_be_built() -> None:
    primus = pytest.importorskip("dynamic_network_architectures.architectures.primus")
    settings = {"eva_depth": 2, "eva_numheads": 2, "input_shape": (16, 24, 32), "num_register_tokens": 2}
    try:
        model = primus.Primus(1, 48, (8, 8, 8), 2, **settings)
    except RuntimeError as error_of_timm:
        pytest.skip(f"timm refuses three axes: {error_of_timm}")
    strong(model)
    x = torch.randn(1, 1, 16, 24, 32)
    expected = model(x)
    tr.swap(model, "mixed")
    assert error(model(x), expected) < 1e-5
    assert torch.equal(tr.unswap(model)(x), expected)
