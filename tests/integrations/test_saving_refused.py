"""What `save` supports, and what it or `swap` refuses in one line before anything is trained."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import timm
import torch
from safetensors.torch import save_file
from swapped import rewrite, stored
from torch import Tensor
from typing_extensions import Unpack

import torchrope as tr
from torchrope.encodings import ROTARY, HeadShape


def vit(**settings: Any) -> Any:
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=48, num_heads=2, **settings).eval()


def own(**settings: Any) -> tr.ViT:
    sizes = dict(in_channels=1, num_outputs=3, dim=24, depth=1, num_heads=2, encoding="mixed")
    return tr.ViT((4, 8, 8), patch_size=(1, 2, 2), **{**sizes, **settings}).eval()


@pytest.mark.parametrize("name", [{"comrope-ap": "comrope-ap:4"}.get(name, name) for name in ROTARY])
def test_every_encoding_that_swap_takes_is_saved(name: str, tmp_path: Path) -> None:
    model, x = tr.swap(vit(), name, init="paper"), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for tensor in (*model.rotary.parameters(), *model.rotary.buffers()):
            tensor.mul_(1.5)
    tr.save(model, tmp_path)
    assert torch.equal(tr.load(tmp_path, into=vit())(x), model(x))


@pytest.mark.parametrize(
    "positions",
    [
        tr.Lattice(spacing=(1.0, 0.5, 0.5), unit=8.0, patch_size=(1, 2, 2)),
        tr.Lattice(origin=0.5, unit=8.0, patch_size=(1, 2, 2)),
        tr.Lattice(0.25, per=1, train_sizes=(4, 4, 4)),
        tr.Lattice(2.0, -1.0, offset=0.5, per="longest"),
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


def test_lattices_of_swapped_models_in_mm_are_saved(tmp_path: Path) -> None:
    model = tr.swap(vit(), "mixed", init="paper")
    lattice = tr.Lattice(spacing=(1.0, 0.5), unit=8.0, patch_size=(16.0, 16.0), per=(-1, "one"), periods=(None, 2.0))
    model.rotary.lattices = [lattice]
    tr.save(model, tmp_path)
    assert tr.load(tmp_path, into=vit()).rotary.lattices == [lattice]


def described(kind: Any = "Block", **settings: Any) -> dict[str, Any]:
    return {"kind": kind, "settings": {"head_dim": 12, "num_heads": 2, **settings}}


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        ([1, 3, 64, 64], "frozen of its settings must be a mapping"),
        ("1, 3, 64, 64", "frozen of its settings must be a mapping"),
        (None, "table, which is not in the model"),
        ({"encodings.0": 1}, "frozen of its settings must be a mapping"),
        ({"encodings.0": {}}, "'encodings.0' of its frozen parts must be kind, settings, all of them, got no kind"),
        ({"encodings.0": described("Encoding")}, "kind of 'encodings.0' of its frozen parts must be 'Planar' or"),
        ({"encodings.0": described(head_dim="12")}, "settings of 'encodings.0' of its frozen parts must be"),
        ({"encodings.0": described(more=1)}, "'encodings.0' cannot be frozen: TypeError"),
        ({"encodings.0": described("Planar")}, "'encodings.0' cannot be frozen: "),
        ({"encodings.0": {"kind": "Block", "settings": {}}}, "'encodings.0' cannot be frozen: KeyError"),
        ({"encodings.0": described("FrozenAbsolute")}, "'encodings.0' cannot be frozen: KeyError"),
        ({"embed": described()}, "its frozen parts must be encodings of its model, got 'embed'"),
        ({"no.such": described()}, "its frozen parts must be encodings of its model, got 'no.such'"),
        ({"encodings.0": described("PatchEmbed")}, "its frozen parts must be encodings of its model"),
    ],
)
def test_frozen_parts_of_hostile_files_are_refused(frozen: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tr.save(tr.freeze(own(encoding="liere:4"), (4, 8, 8)), file)
    rewrite(file, lambda header: header.update(frozen=frozen))
    for into in (None, own(encoding="liere:4")):
        with pytest.raises(ValueError, match=message) as caught:
            tr.load(file, into=into)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["table", "frozen_at"])
def test_frozen_tensors_of_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tr.save(tr.freeze(own(encoding="liere:4"), (4, 8, 8)), file)
    header, tensors = stored(file)
    token = slice(1, None) if name == "frozen_at" else (slice(None), slice(1, None))
    tensors[f"encodings.0.{name}"] = tensors[f"encodings.0.{name}"][token].contiguous()
    save_file(tensors, file, metadata={"torchrope": json.dumps(header)})
    with pytest.raises(ValueError, match=r"'encodings\.0' cannot be frozen: it must have as many tokens as positions"):
        tr.load(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["recipe"]["arguments"]["positions"].update(name="Linear"), "must be settings of a Lattice, got"),
        (lambda h: h["recipe"]["arguments"]["positions"].update(unit="8"), "must be settings of a Lattice, got"),
        (lambda h: h["recipe"]["arguments"]["positions"].update(per="pixel"), "must be settings of a Lattice, got"),
        (lambda h: h["recipe"]["arguments"]["positions"].update(train_sizes=[4]), "train_sizes needs per='size'"),
        (
            lambda h: h["recipe"]["arguments"]["positions"].update(patch_size=[1]),
            "patch_size must be one number or one per axis",
        ),
        (lambda h: h["recipe"]["arguments"].update(positions=None), "must be settings of a Lattice, got None"),
        (lambda h: h["recipe"]["arguments"].update(positions="grid"), "must be settings of a Lattice, got 'grid'"),
    ],
)
def test_positions_of_hostile_files_are_refused(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    tr.save(own(positions=tr.Lattice(unit=8.0, patch_size=(1, 2, 2))), file)
    rewrite(file, change)
    with pytest.raises(ValueError, match=message):
        tr.load(file)(torch.randn(1, 1, 4, 8, 8), spacing=torch.ones(1, 3))


class Annotated(tr.encodings.MixedRoPE):
    """An encoding whose arguments a file may set by their annotations."""

    def __init__(
        self,
        *,
        mode: Literal["a{b}", "c"] = "c",
        axis: int = -1,
        weights: Sequence[float] | None = None,
        pair: tuple[int, bool] = (1, True),
        scales: dict[str, float] | None = None,
        free=None,  # type: ignore[no-untyped-def]
        **sizes: Unpack[HeadShape],
    ) -> None:
        super().__init__(**sizes)
        self.mode, self.axis, self.weights, self.pair, self.scales, self.free = mode, axis, weights, pair, scales, free


class Named(tr.encodings.MixedRoPE):
    """An encoding with a text, which a file must not set."""

    def __init__(self, *, name: str = "", **sizes: Unpack[HeadShape]) -> None:
        super().__init__(**sizes)
        self.name = name


ANNOTATED: dict[str, Any] = {
    "mode": "a{b}",
    "axis": -2,
    "weights": [0.5] * 100,
    "pair": (3, False),
    "scales": {"x": 2.0},
    "free": [None, 1, {"a": 0.5}],
}


@pytest.mark.parametrize("registered", [False, True])
def test_arguments_of_an_encoding_of_ones_own_come_back(registered: bool, tmp_path: Path) -> None:
    tr.save(tr.swap(vit(), partial(Annotated, **ANNOTATED)), tmp_path)
    if registered:
        tr.register_encoding("annotated", Annotated)
    try:
        again: Any = tr.load(tmp_path, into=vit(), classes=() if registered else [Annotated])
    finally:
        ROTARY.pop("annotated", None)
    given = {**ANNOTATED, "weights": (0.5,) * 100, "free": (None, 1, {"a": 0.5})}
    assert {name: getattr(again.rotary.encodings[0], name) for name in given} == given


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mode", "b", r"mode .* must be 'a\{b\}' or 'c', got 'b'"),
        ("axis", 10**9, "axis .* must be a whole number from -65536"),
        ("axis", 0.5, "axis .* must be a whole number"),
        ("weights", [0.5] * 1025, "weights .* must be a list of up to 1,024"),
        ("weights", ["x"], "weights .* must be a list"),
        ("pair", "12", "pair .* must be a list"),
        ("scales", {"x": "y"}, "scales .* must be a mapping"),
        ("free", "os.system", "free .* must be true, false, null or numbers"),
        ("free", [[10**12]], "free .* must be true, false, null or numbers"),
        ("name", "x", "that a file may set, got 'name'"),
    ],
)
def test_arguments_against_annotations_are_refused(name: str, value: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tr.save(tr.swap(vit(), partial(Annotated, **ANNOTATED)), file)
    rewrite(file, lambda header: header["swap"][""]["encodings"][0]["arguments"].update({name: value}))
    with pytest.raises(ValueError, match=message) as caught:
        tr.load(file, into=vit(), classes=[Annotated])
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:torchrope.save will reject")  # of `swap`, which tells it before
def test_text_of_an_encoding_of_ones_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arguments of Named must be among those that a file may set, got 'name'"):
        tr.save(tr.swap(vit(), Named), tmp_path)


def test_swap_tells_that_an_encoding_cannot_be_saved() -> None:
    shared = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=24).zero_()
    shared.init_scale = "large"  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"torchrope\.save will reject this VisionTransformer: init_scale of"):
        tr.swap(vit(), shared)
