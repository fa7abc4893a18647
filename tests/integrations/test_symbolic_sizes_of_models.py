"""Sizes stay symbolic in swapped models: as many compiled graphs as before, one exported program, one ONNX file."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import timm
import torch
import transformers
from symbolic import OWN, SIZES, check_export, graphs, image
from torch import Tensor, nn

import torchrope as tr


class Hidden(nn.Module):
    """The tokens of a model of transformers."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, **self.options).last_hidden_state


# Without dynamic_img_pad timm checks that sizes are divisible, in an f-string that makes each size a constant.
TIMM: dict[str, Any] = dict(
    img_size=64, embed_dim=32, depth=1, num_heads=2, num_classes=5, dynamic_img_size=True, dynamic_img_pad=True
)
# A training size that is not among SIZES: these models compare sizes with it, so that their programs exclude it.
HF: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=80, patch_size=8
)


def of_transformers(name: str, **options: Any) -> Callable[[], nn.Module]:
    model, config = (getattr(transformers, name + part) for part in ("Model", "Config"))
    return lambda: Hidden(model(config(**HF)), **options)


INTERPOLATED = dict(interpolate_pos_encoding=True)
FOREIGN: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "vit": (16, partial(timm.create_model, "vit_tiny_patch16_224", **TIMM)),
    "dinov2": (14, partial(timm.create_model, "vit_small_patch14_reg4_dinov2", **{**TIMM, "img_size": 56})),
    "eva02": (14, partial(timm.create_model, "eva02_tiny_patch14_224", **{**TIMM, "img_size": 56})),
    "rope_axial": (16, partial(timm.create_model, "vit_small_patch16_rope_224", **TIMM)),
    "rope_mixed": (16, partial(timm.create_model, "vit_small_patch16_rope_mixed_224", **TIMM)),
    "dinov3": (16, partial(timm.create_model, "vit_small_patch16_dinov3", **TIMM)),
    "hf beit": (8, of_transformers("Beit")),
    "hf clip": (8, of_transformers("CLIPVision", **INTERPOLATED)),
    "hf deit": (8, of_transformers("DeiT", **INTERPOLATED)),
    "hf dinov2": (8, of_transformers("Dinov2")),
    "hf dinov2 registers": (8, of_transformers("Dinov2WithRegisters")),
    "hf dinov3": (8, of_transformers("DINOv3ViT")),
    "hf ijepa": (8, of_transformers("IJepa", **INTERPOLATED)),
    "hf siglip": (8, of_transformers("SiglipVision", **INTERPOLATED)),
    "hf vit": (8, of_transformers("ViT", **INTERPOLATED)),
}
"""Models that take images of any size: the extent of a patch, and how to build them."""

NOT_EXPORTED = ("hf dinov2 registers",)  # before the swap neither: it makes the sizes constant


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_swap_adds_no_graphs_and_keeps_the_export(name: str) -> None:
    patch, build = FOREIGN[name]
    model = build()
    before = graphs(model, patch)
    assert graphs(tr.swap(model, "mixed"), patch) <= before
    if name not in NOT_EXPORTED:
        check_export(model, patch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "ViT", "vit", "hf dinov2", "hf dinov3"])
def test_onnx_of_any_size(name: str, tmp_path: Path) -> None:
    patch, build = FOREIGN.get(name) or (8, OWN[name])
    model = build().eval() if name in OWN else tr.swap(build(), "mixed").eval()
    height, width = torch.export.Dim("height", min=2, max=64), torch.export.Dim("width", min=2, max=64)
    shapes = ({2: patch * height, 3: patch * width},)
    x = image(patch, (4, 6))
    torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for size in SIZES:
        x = image(patch, size)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x), atol=1e-3, rtol=1e-3)
