"""What `save` supports, and what it or `swap` refuses in one line before anything is trained."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import torchrope as tr


def vit(**settings: Any) -> Any:
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=48, num_heads=2, **settings).eval()


def own(**settings: Any) -> tr.ViT:
    sizes = dict(in_channels=1, num_outputs=3, dim=24, depth=1, num_heads=2, encoding="mixed")
    return tr.ViT((4, 8, 8), patch_size=(1, 2, 2), **{**sizes, **settings}).eval()


@pytest.mark.parametrize("name", ["drope", "spiral", "mhrope"])
def test_every_encoding_that_swap_takes_is_saved(name: str, tmp_path: Path) -> None:
    model, x = tr.swap(vit(), name), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for tensor in (*model.rotary.parameters(), *model.rotary.buffers()):
            tensor.mul_(1.5)
    tr.save(model, tmp_path)
    assert torch.equal(tr.load(tmp_path)(x), model(x))


@pytest.mark.parametrize(
    "positions",
    [
        tr.Lattice(spacing=(1.0, 0.5, 0.5), unit=8.0, patch_size=(1, 2, 2)),
        tr.Lattice(origin=0.5, unit=8.0, patch_size=(1, 2, 2)),
        tr.Lattice(0.25, per=1, train_sizes=(4, 4, 4)),
        tr.positions.patch_centers,
        partial(tr.positions.patch_centers, normalize="max"),
    ],
)
def test_positions_of_torchrope_are_saved(positions: Any, tmp_path: Path) -> None:
    model, x = own(positions=positions), torch.randn(2, 1, 4, 8, 8)
    in_mm: dict[str, Tensor] = {}
    if getattr(positions, "unit", None) is not None:
        in_mm["spacing"] = torch.tensor([[2.0, 0.7, 0.7], [5.0, 1.0, 1.0]])
    tr.save(model, tmp_path)
    again = tr.load(tmp_path)
    assert torch.equal(again(x, **in_mm), model(x, **in_mm))
    assert repr(again.position_map) == repr(model.position_map)


def test_inflated_model_in_mm_is_saved(tmp_path: Path) -> None:
    images = tr.ViT((8, 8), patch_size=2, in_channels=1, num_outputs=3, dim=16, depth=1, num_heads=2, encoding="mixed")
    in_mm = tr.ViT(**{**images.arguments, "positions": tr.Lattice(unit=8.0, patch_size=(2, 2))}).eval()
    volumes = tr.inflate(in_mm, patch_size=2, size=4, spacing=2.0).eval()
    tr.save(volumes, tmp_path)
    x, spacing = torch.randn(1, 1, 4, 8, 8), torch.tensor([[3.0, 1.0, 1.0]])
    assert torch.equal(tr.load(tmp_path)(x, spacing=spacing), volumes(x, spacing=spacing))


def test_other_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save supports positions of Lattice, patch_centers, got"):
        tr.save(own(positions=lambda *sizes, device=None: tr.grid(*sizes, device=device)), tmp_path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 3, 64, 32], "the model cannot be frozen for an input of"),
        ([1, 64, 64], "the model cannot be frozen for an input of"),
        ([2**24] * 4, "must have up to 67,108,864 numbers"),
        ([1, 3, -64, 64], "frozen of its settings must be a list of up to 8"),
        ("1, 3, 64, 64", "frozen of its settings must be a list of up to 8"),
        (None, "table, which is not in the model"),
    ],
)
def test_frozen_inputs_of_hostile_files_are_refused(shape: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tr.save(tr.freeze(tr.swap(vit(), "mixed"), torch.randn(1, 3, 64, 64)), file)
    _rewritten(file, lambda header: header.update(frozen=shape))
    with pytest.raises(ValueError, match=message) as caught:
        tr.load(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ([4, 8, 16], r"got encodings\.0\.positions of \(65, 3\) instead of \(129, 3\)"),
        ([4, 8, 9], "input sizes must be multiples of the patch"),
        ([4, 8], "input sizes must be multiples of the patch"),
        ([2**24, 2**24, 2**24], "."),
        (None, r"frozen of its recipe must be a list of up to 8 of \(a whole number"),
        ("4, 8, 8", r"frozen of its recipe must be a list of up to 8 of \(a whole number"),
    ],
)
def test_frozen_sizes_of_hostile_files_are_refused(size: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tr.save(tr.freeze(own(), (4, 8, 8)), file)
    _rewritten(file, lambda header: header["recipe"].update(frozen=size))
    with pytest.raises(ValueError, match=message) as caught:
        tr.load(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["recipe"]["arguments"]["positions"].update(name="Linear"), "name of positions must be"),
        (lambda h: h["recipe"]["arguments"]["positions"].update(name=["patch_centers"]), "name of positions must be"),
        (
            lambda h: h["recipe"]["arguments"]["positions"]["arguments"].update(unit="8"),
            "unit of the arguments of Lattice",
        ),
        (
            lambda h: h["recipe"]["arguments"]["positions"]["arguments"].update(patch_size=[1]),
            "patch_size must be one number or one per axis",
        ),
        (lambda h: h["recipe"]["arguments"].update(positions=None), "positions"),
        (lambda h: h["recipe"]["arguments"]["positions"].pop("arguments"), "must be name, arguments, all of them"),
    ],
)
def test_positions_of_hostile_files_are_refused(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    tr.save(own(positions=tr.Lattice(unit=8.0, patch_size=(1, 2, 2))), file)
    _rewritten(file, change)
    with pytest.raises(ValueError, match=message):
        tr.load(file)(torch.randn(1, 1, 4, 8, 8), spacing=torch.ones(1, 3))


def test_file_of_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tr.save(tr.swap(vit(), "mixed"), file)
    _rewritten(file, lambda header: header["recipe"]["arguments"].update(depth=0))
    with pytest.raises(ValueError, match="its model must have attention layers to swap, got none"):
        tr.load(file)


class Bound(tr.encodings.MixedRoPE):
    """An encoding with an argument that JSON has no form of."""

    def __init__(self, *, units: Any = (), **sizes: Any) -> None:
        super().__init__(**sizes)
        self.units = units


def test_swap_tells_that_an_encoding_cannot_be_saved() -> None:
    with pytest.warns(UserWarning, match=r"torchrope\.save will reject this VisionTransformer: save needs settings"):
        tr.swap(vit(), partial(Bound, units=torch.zeros(1)))
    shared = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=24).zero_()
    shared.init_scale = "large"  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"torchrope\.save will reject this VisionTransformer: init_scale of"):
        tr.swap(vit(), shared)


def _rewritten(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        header = json.loads(opened.metadata()["torchrope"])
    change(header)
    save_file(tensors, file, metadata={"torchrope": json.dumps(header)})
