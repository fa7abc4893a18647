"""Swapped models of other libraries: their weights and swaps in a file, loaded into a model built the same way."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rotating import IMAGES
from swapped import awake, images, made, rewrite
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

import torchrope as tr


class Detector(nn.Module):
    """A tower with layers of one's own around it."""

    def __init__(self, name: str = "vit") -> None:
        super().__init__()
        self.backbone = made(name)
        self.boxes = nn.Linear(self.backbone.num_features, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.boxes(self.backbone.forward_features(x)[:, 0])


class TwoTowers(nn.Module):
    """Two towers of two libraries; each is swapped by itself."""

    def __init__(self) -> None:
        super().__init__()
        config = CLIPVisionConfig(**{**IMAGES, "image_size": 64, "patch_size": 16})
        self.left, self.right = made("vit"), CLIPVisionModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x).pooler_output], dim=-1)


def detector(*, seed: int = 0, **settings: Any) -> Detector:
    torch.manual_seed(seed)
    return awaken(tr.swap(Detector(), "liere:4", **settings)).eval()


def awaken(model: Any) -> Any:
    awake(next(part for part in model.modules() if hasattr(part, "rotary")))
    return model


@pytest.mark.parametrize(
    "settings", [{}, {"keep_position_tables": False, "init": "paper"}, {"spacing": 0.25, "origin": (1.0, 2)}]
)
def test_composite_comes_back_into_one_built_the_same_way(settings: dict, tmp_path: Path) -> None:
    model = detector(**settings)
    tr.save(model, tmp_path)
    torch.manual_seed(1)
    empty = Detector()
    before = next(empty.parameters())
    again = tr.load(tmp_path, into=empty)
    assert again is empty
    assert again.training
    assert next(again.parameters()) is before  # optimisers go on
    x = images(model.backbone)
    assert torch.equal(again.eval()(x), model(x))
    assert again.backbone.rotary.lattices == model.backbone.rotary.lattices
    untouched = copy.deepcopy(model)
    expected, came = tr.unswap(untouched)(x), tr.unswap(again)(x)
    assert torch.equal(came, expected)


def test_model_that_is_swapped_the_same_way_already(tmp_path: Path) -> None:
    model, other = detector(), detector(seed=1)
    tr.save(model, tmp_path)
    x = images(model.backbone)
    assert not torch.equal(other(x), model(x))
    assert torch.equal(tr.load(tmp_path, into=other)(x), model(x))


def test_several_towers_of_several_libraries(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TwoTowers().eval()
    awaken(tr.swap(model.left, "mixed"))
    awaken(tr.swap(model.right, tr.ComRoPELD(num_axes=2, num_heads=2, head_dim=16, block_size=4).zero_()))
    tr.save(model, tmp_path)
    again = tr.load(tmp_path, into=TwoTowers().eval())
    x = images(model.left)
    assert torch.equal(again(x), model(x))


def test_half_precision_keeps_its_dtypes(tmp_path: Path) -> None:
    model = detector().bfloat16()
    tr.save(model, tmp_path)
    again = tr.load(tmp_path, into=Detector().bfloat16().eval())
    assert {name: p.dtype for name, p in again.named_parameters() if "rotary" not in name} == {
        name: p.dtype for name, p in model.named_parameters() if "rotary" not in name
    }
    assert again.backbone.rotary.encodings[0].upper.dtype == torch.float32  # as `swap` puts them in


def refused(path: Path, model: Any, message: str) -> None:
    """A file is refused and leaves the model as it was: parts, numbers, what learns, outputs."""
    x = images(model.backbone)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    learned = {name: p.requires_grad for name, p in model.named_parameters()}
    expected = model(x)
    with pytest.raises(ValueError, match=message) as caught:
        tr.load(path, into=model)
    assert "\n" not in str(caught.value)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == learned
    assert torch.equal(model(x), expected)


def wider() -> Any:
    model = Detector()
    model.boxes = nn.Linear(32, 5)
    return model.eval()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (wider, r"boxes.weight of \(4, 32\) instead of \(5, 32\)"),
        (partial(Detector, "vit_avg"), "pos_embed of"),
        (lambda: tr.swap(Detector(), "mixed"), "its swap must be that of the model, got another for backbone"),
        (lambda: tr.swap(Detector(), "liere:4", spacing=2.0), "its swap must be that of the model"),
        (partial(Detector, "swin"), "encodings of its swap must be 1 or 4, got 2"),
    ],
)
@pytest.mark.parametrize("keep_position_tables", [True, False])
def test_mismatch_leaves_the_model_unchanged(
    build: Any, message: str, keep_position_tables: bool, tmp_path: Path
) -> None:
    tr.save(detector(keep_position_tables=keep_position_tables, init="paper"), tmp_path)
    refused(tmp_path, build().eval(), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: head.update(swap={"forward": head["swap"]["backbone"]}), "that swap supports, got 'forward'"),
        (lambda head: head.update(swap={"boxes": head["swap"]["backbone"]}), "got 'boxes'"),
        (lambda head: head.update(swap=dict.fromkeys(map(str, range(1000)))), "its swap must map up to"),
        (lambda head: head.update(swap={}), "rotary.encodings.0.upper, which is not in the model"),
        (lambda head: head["swap"]["backbone"].update(keep_position_tables=False), "table0"),
    ],
)
def test_files_that_were_tampered_with(change: Any, message: str, tmp_path: Path) -> None:
    tr.save(detector(), tmp_path / "m")
    rewrite(tmp_path / "m", change)
    refused(tmp_path / "m", Detector().eval(), message)


class Lambda(tr.MixedRoPE):
    def __init__(self, *, scale: Any = None, **head: Any) -> None:
        super().__init__(**head)
        self.scale = scale


class Forgetful(tr.MixedRoPE):
    def __init__(self, *, scale: float = 1.0, **head: Any) -> None:
        super().__init__(**head)


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        (partial(Lambda, scale=torch.sin), "will reject this Detector: save needs settings that JSON can represent"),
        (Forgetful, "will reject this Detector: .* got Forgetful without scale"),
    ],
)
def test_swap_warns_of_what_cannot_be_saved(encoding: Any, message: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=message):
        model = tr.swap(Detector(), encoding)
    with pytest.raises(ValueError, match=r"JSON|without scale"):
        tr.save(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_encodings_changed_by_hand_are_refused(tmp_path: Path) -> None:
    model = detector()
    model.backbone.rotary.encodings[1].upper = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"got upper of \(1,\) instead of"):
        tr.save(model, tmp_path / "m")


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Noted(Detector):
        def get_extra_state(self) -> dict:
            return {"steps": 3}

    with pytest.raises(ValueError, match="the state dict must hold tensors only, got _extra_state of dict"):
        tr.save(tr.swap(Noted(), "mixed"), tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "layer"),
    [("vit", "blocks.{}.attn."), ("rope_axial", "blocks.{}.attn."), ("swin", "layers.{}.blocks.0.attn.")],
)
def test_layer_decay_reaches_encodings(name: str, layer: str) -> None:
    """The encoding of a layer is in the group of the layer, of which timm's optimisers and the laboratory ask."""
    from timm.models import group_parameters

    model = made(name)
    own = model.group_matcher()
    tr.swap(model, "liere:4")
    for one in (model, copy.deepcopy(model)):
        levels = group_parameters(one, one.group_matcher(), reverse=True)
        encodings = [levels[key] for key in levels if key.startswith("rotary.encodings.")]
        assert encodings == sorted(set(encodings))
        assert len(encodings) == len(one.rotary.encodings) > 1
        assert levels["rotary.encodings.0.upper"] == levels[layer.format(0) + "qkv.weight"]
        assert max(levels.values()) > encodings[-1]
    assert one.group_matcher(coarse=True).keys() == own.keys()
    assert tr.unswap(model).group_matcher() == own


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_model_without_table_and_rotation_warns_that_it_ignores_positions(name: str) -> None:
    with pytest.warns(UserWarning, match="has no position information"):
        tr.swap(made(name), "mixed", keep_position_tables=False)
    tr.swap(made(name), "mixed", keep_position_tables=False, init="paper")
    tr.swap(made(name), "axial", init="paper", keep_position_tables=False)
    tr.swap(made(name), "none", keep_position_tables=False)  # as it was asked for
    tr.swap(made(name), "mixed")
