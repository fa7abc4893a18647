"""Models of images as models of volumes: features kept, axes that begin to turn when they are trained."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from swapped import awake, made
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import torchrope as tr
from torchrope.encodings import parse_encoding

OURS: dict[str, Any] = dict(patch_size=4, num_outputs=5, dim=32, depth=2, num_heads=2)
ENCODINGS = [
    "none",
    "mixed",
    "liere:4",
    "liere",
    "string:4",
    "comrope-ld:4",
    "comrope-ap:4",
    "axial",
    "golden",
    "dinov3",
    "mrope",
]
HF: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
)
OF_TRANSFORMERS = {
    "vit": lambda: ViTModel(ViTConfig(**HF)),
    "vit-classes": lambda: ViTForImageClassification(ViTConfig(**HF, num_labels=3)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**HF)),
    "dinov2-registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**HF)),
}


def shaken(model: Any) -> Any:
    """No parameter is still at a start that hides something."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def ours(encoding: Any = "learned+mixed", **settings: Any) -> tr.ViT:
    torch.manual_seed(0)
    return shaken(tr.ViT((16, 8), **{**OURS, "encoding": encoding, **settings}))


def stacked(image: Tensor, slices: int) -> Tensor:
    return image.unsqueeze(2).expand(-1, -1, slices, -1, -1)


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("depth", "weights"), [(1, "average"), (4, "average"), (4, "center"), (3, "center")])
def test_volume_of_one_patch_of_equal_slices_gives_the_features_of_the_image(
    encoding: str, depth: int, weights: Any
) -> None:
    source = ours(encoding)
    model = tr.inflate(source, patch_size=depth, weights=weights, spacing=2.5)
    image = torch.randn(2, 3, 16, 8)
    same(model(stacked(image, depth)), source(image))
    larger = torch.randn(2, 3, 20, 16)
    same(model.features(stacked(larger, depth)), source.features(larger))


@pytest.mark.parametrize(
    "settings",
    [
        {"encoding": "learned+liere:4", "pool": "mean"},
        {"encoding": "bias+mixed", "num_registers": 2},
        {"encoding": "sinusoidal"},
        {"encoding": "mixed", "share_layers": True, "layer_scale": 0.1, "embedding_norm": True},
        {"encoding": partial(tr.MixedRoPE, shared_heads=True, rotary_dim=8)},
        {"encoding": partial(tr.AxialRoPE, rotary_dim=8)},
        {"encoding": "dinov3", "positions": tr.Lattice(1.0, 0.0)},
        {"encoding": "learned", "pool": "mean", "qkv_bias": False},
    ],
)
def test_other_parts_of_a_vit_are_preserved(settings: dict) -> None:
    source = ours(**settings)
    model = tr.inflate(source, patch_size=2, size=6)
    image = torch.randn(2, 3, 16, 8)
    same(model(stacked(image, 2)), source(image))
    assert model(torch.randn(2, 3, 6, 16, 8)).shape == (2, 5)


@pytest.mark.parametrize("encoding", ["mixed", "liere:4", "string:4", "comrope-ld:4", "axial", "comrope-ap:4"])
def test_new_axis_rests_and_learns(encoding: str) -> None:
    source = ours(encoding)
    before = copy.deepcopy(source.state_dict())
    model = tr.inflate(source, patch_size=1)
    was, now = source.encodings[0].generators(), model.encodings[0].generators()
    assert not now[0].any()
    torch.testing.assert_close(now[1:], was.expand_as(now[1:]), atol=1e-5, rtol=1e-5)
    volume = torch.randn(2, 3, 3, 16, 8)
    swapped_slices = volume[:, :, [2, 0, 1]]
    same(model(volume), model(swapped_slices))
    model(volume).square().sum().backward()
    torch.optim.SGD(model.encodings.parameters(), 1e-1).step()
    assert model.encodings[0].generators()[0].abs().max() > 0
    assert not torch.allclose(model(volume), model(swapped_slices), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())


@pytest.mark.parametrize("voxels", [1.0, 2.5, (5.0, 0.8, 0.8), (3.0, 0.5, 1.0)])
def test_spacing_places_the_slices(voxels: Any) -> None:
    source = ours("liere:4")
    model = tr.inflate(source, patch_size=2, spacing=voxels)
    depth, *plane = (voxels, 1.0, 1.0) if isinstance(voxels, float) else voxels
    per_unit = [step / (4 * voxel) for step, voxel in zip(source.position_map.spacing, plane, strict=True)]
    assert model.position_map.spacing[0] == pytest.approx(2 * depth * sum(per_unit) / 2)
    assert model.position_map.spacing[1:] == tuple(source.position_map.spacing)
    places = model.positions((3, 4, 2))[1:].reshape(3, 4, 2, 3)
    torch.testing.assert_close(places[0, ..., 1:].flatten(0, 1), source.positions((4, 2))[1:])
    torch.testing.assert_close(places[:, 0, 0, 0], torch.arange(3) * model.position_map.spacing[0])


def test_scores_move_with_the_spacing() -> None:
    """Twice the distance of slices turns twice as far, and an isotropic voxel turns alike along all axes."""
    near, far = (tr.inflate(ours("mixed"), spacing=(mm, 0.8, 0.8)) for mm in (2.0, 4.0))
    for model in (near, far):
        with torch.no_grad():
            model.encodings[0].frequencies[0] = model.encodings[0].frequencies[1]  # z turns as y does
    q, k = torch.randn(2, 1, 2, 10, 16).unbind()

    def scores(model: tr.ViT, slices: int, sites: list[int]) -> Tensor:
        rotation = model.encodings[0](model.positions((slices, 5, 1))[1:][sites])
        turned = tr.rotate(q[..., : len(sites), :], k[..., : len(sites), :], rotation)
        return turned[0] @ turned[1].mT

    along = [0, 5, 10]  # the first patch of slices 0, 1, 2
    twice = [0, 10, 20]
    same(scores(far, 3, along), scores(near, 5, twice))
    cubes = tr.inflate(ours("mixed"), patch_size=4, spacing=(0.8, 0.8, 0.8))
    with torch.no_grad():
        cubes.encodings[0].frequencies[0] = cubes.encodings[0].frequencies[1]
    same(scores(cubes, 3, along), scores(cubes, 1, [0, 1, 2]))


def test_voxels_of_every_sample() -> None:
    place = tr.Lattice(unit=4.0, patch_size=(4, 4))
    source = ours("mixed", positions=place)
    model = tr.inflate(source, patch_size=2)
    image = torch.randn(2, 3, 16, 8)
    plane = torch.tensor([[0.5, 0.5], [1.0, 2.0]])
    millimetres = torch.cat([torch.tensor([[5.0], [2.0]]), plane], dim=1)
    same(model(stacked(image, 2), spacing=millimetres), source(image, spacing=plane))
    where = model.positions((2, 1, 1), spacing=millimetres)[:, 2, 0]
    torch.testing.assert_close(where, torch.tensor([2.5, 1.0]))


def test_tables_get_entries_for_each_slice() -> None:
    source = ours("learned+mixed")
    model = tr.inflate(source, patch_size=2, size=6)
    assert model.absolute.table.shape == (3, 4, 2, 32)
    assert torch.equal(model.absolute.table[2], source.absolute.table)
    biased = tr.inflate(ours("bias+mixed"), size=3)
    assert biased.biases[0].table.shape == (5 * 7 * 3, 2)


def test_other_numbers_of_axes() -> None:
    sequence = shaken(tr.ViT((8,), **OURS, encoding="learned+mixed"))
    clip = tr.inflate(sequence, axes=3, patch_size=(2, 1))
    x = torch.randn(2, 3, 8)
    same(clip(x[:, :, None, None].expand(-1, -1, 2, 1, -1)), sequence(x))


@pytest.mark.parametrize("family", ["mixed", "liere:2", "liere:4", "string:4"])
def test_another_family_takes_the_rotation_over(family: str) -> None:
    source = ours("axial")
    model = tr.inflate(source, encoding=family)
    image = torch.randn(2, 3, 16, 8)
    same(model(stacked(image, 1)), source(image))
    assert type(model.encodings[0]) is type(parse_encoding(family).rotary(num_axes=3, num_heads=2, head_dim=16))


@pytest.mark.parametrize("encoding", ["learned+mixed", "liere:4", "none", "bias+comrope-ld:4", "axial"])
def test_copy_can_be_saved(encoding: str, tmp_path: Path) -> None:
    model = tr.inflate(ours(encoding), patch_size=2, size=4, spacing=3.0)
    tr.save(model, tmp_path)
    again: Any = tr.load(tmp_path)
    volume = torch.randn(1, 3, 4, 16, 8)
    assert torch.equal(again(volume), model(volume))


def test_dtype_mode_and_what_learns_are_kept() -> None:
    source = ours("learned+liere:4").train().to(torch.float64)
    source.absolute.requires_grad_(False)
    source.embed.requires_grad_(False)
    source.head = nn.Linear(32, 9, dtype=torch.float64)
    model = tr.inflate(source)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in source.named_parameters()
    }
    image = torch.randn(1, 3, 16, 8, dtype=torch.float64)
    torch.testing.assert_close(model.eval()(stacked(image, 1)), source.eval()(image), atol=1e-12, rtol=1e-12)


# other libraries' models

TIMM = ["vit", "deit_tiny", "dinov2_registers", "rope_axial", "rope_mixed_ape"]


def of_timm(name: str) -> Any:
    if name == "deit_tiny":
        return shaken(timm.create_model("deit3_small_patch16_224", img_size=64, embed_dim=32, depth=2, num_heads=2))
    return made(name).eval()


@pytest.mark.parametrize("name", TIMM)
def test_models_of_timm(name: str) -> None:
    source = of_timm(name)
    height, width = source.patch_embed.img_size
    image = torch.randn(2, 3, height, width)
    model = tr.inflate(source, patch_size=2, size=8)
    same(model.features(stacked(image, 2)), source.forward_head(source.forward_features(image), pre_logits=True))
    same(model(stacked(image, 2)), source(image))


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    source = shaken(OF_TRANSFORMERS[name]())
    image = torch.randn(2, 3, 32, 32)
    model = tr.inflate(source, patch_size=2)
    tower = getattr(source, "vit", source)
    same(model.features(stacked(image, 2)), tower(pixel_values=image).last_hidden_state[:, 0])
    if hasattr(source, "classifier"):
        same(model(stacked(image, 2)), source(pixel_values=image).logits)


@pytest.mark.parametrize(
    "settings", [{}, {"keep_position_tables": False, "init": "paper"}, {"spacing": 0.5, "origin": 1.0}]
)
@pytest.mark.parametrize("name", ["vit", "rope_axial", "rope_mixed_ape", "vit-classes", "dinov2-registers"])
def test_swapped_models(name: str, settings: dict) -> None:
    torch.manual_seed(0)
    source = shaken(OF_TRANSFORMERS[name]()) if name in OF_TRANSFORMERS else made(name).eval()
    if name.startswith("rope") and settings:  # which goes on from its own rotation by default
        with pytest.warns(UserWarning, match="outputs change"):
            tr.swap(source, "liere:4", **{"init": "zeros", **settings})
    else:
        tr.swap(source, "liere:4", **settings)
    awake(getattr(source, "vit", source))
    side = 32 if name in OF_TRANSFORMERS else 64
    image = torch.randn(2, 3, side, side)
    before = {key: value.clone() for key, value in source.state_dict().items()}
    expected = source(image)
    model = tr.inflate(source)
    came = model(stacked(image, 1))
    if isinstance(expected, Tensor):
        same(came, expected)
    elif "logits" in expected:
        same(came, expected.logits)
    else:
        same(came, expected.last_hidden_state[:, 0])
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())


@pytest.mark.parametrize(
    "source",
    [partial(of_timm, "vit"), partial(ours, "none", share_layers=True), partial(ours, "bias", share_layers=True)],
)
def test_family_for_a_model_without_rotation_is_one_per_layer(source: Any, tmp_path: Path) -> None:
    source = source()
    model = tr.inflate(source, encoding="mixed")
    assert [type(one) for one in model.encodings] == [tr.MixedRoPE] * len(model.layers)
    assert len({id(one) for one in model.encodings}) == len(model.layers) > 1
    size = model.arguments["input_size"][1:]
    image = torch.randn(2, 3, *size)
    same(model(stacked(image, 1)), source(image))
    shaken(model.encodings)
    tr.save(model, tmp_path)
    volume = torch.randn(1, 3, 2, *size)
    again: Any = tr.load(tmp_path)
    assert torch.equal(again(volume), model(volume))
    assert len(tr.inflate(ours("axial", share_layers=True), encoding="mixed").encodings) == 1


def frozen_swapped() -> nn.Module:
    return tr.freeze(tr.swap(made("vit"), "mixed"), torch.randn(1, 3, 64, 64))


def clip() -> Any:
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    return CLIPVisionModel(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (partial(tr.Swin, (32, 32), dim=16, depths=(2,), num_heads=(1,), window_size=4), "must be a ViT, .* got Swin"),
        (lambda: tr.Features(ours("mixed")), "got Features"),
        (partial(nn.Linear, 2, 2), "got Linear"),
        (clip, "inflate supports these models of transformers: .*, got CLIPVisionModel"),
        (partial(made, "swin"), "parts of a ViT, got SwinTransformer|attends within windows"),
        (partial(made, "vit_avg"), "cls_token must be present"),
        (partial(made, "vit_qk_norm"), "all tensors must be used, got unused blocks.0.attn.k_norm"),
        (partial(made, "dinov3"), "got Eva"),
        (partial(made, "vit", act_layer="relu"), "equivalent to a ViT with exact GELU, got .* that differ by"),
        (partial(made, "vit", global_pool=""), r"features are those of its class token, got \(1, 17, 32\)"),
        (lambda: tr.freeze(ours("mixed"), (16, 8)), "^inflate needs a model that is not frozen, got a frozen ViT$"),
        (frozen_swapped, "^inflate needs a model that is not frozen, got a frozen VisionTransformer$"),
        (lambda: ours("learned+alibi"), "and biases of RelativePositionBias, got ALiBi$"),
        (lambda: ours("fire"), "and biases of RelativePositionBias, got FIRE$"),
        (
            lambda: ours(tr.encodings.Choice(tr.MixedRoPE, bias=tr.encodings.LookHere)),
            "and biases of RelativePositionBias, got LookHere$",
        ),
        (lambda: tr.inflate(ours("mixed")), "axes must be greater than the model's 3, got 3"),
        (lambda: tr.swap(made("rope_axial"), "mixed", keep_rotation=True), "keep_rotation=True"),
    ],
)
def test_unsupported_input_raises_one_line(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tr.inflate(model())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axes": 2}, "axes must be greater than the model's 2, got 2"),
        ({"patch_size": 0}, "patch_size of new axes must be 1 or more, .* got 0"),
        ({"patch_size": (1, 2)}, r"one integer or one per axis \(1\), got \(1, 2\)"),
        ({"patch_size": 2, "size": 3}, "multiples of the patch"),
        ({"spacing": 0.0}, "spacing must be above 0 and finite, got"),
        ({"spacing": (1.0, 2.0)}, r"spacing must be one number or one per axis \(3\), got 2"),
        ({"spacing": math.inf}, "spacing must be above 0"),
        ({"weights": "middle"}, "weights must be 'average' or 'center', got 'middle'"),
        ({"encoding": "axial"}, "head_dim must be divisible by"),
        ({"encoding": "learned+mixed"}, "must be a rotary encoding"),
        ({"encoding": "golden"}, "Golden|generators|divisible"),
    ],
)
def test_bad_arguments_get_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tr.inflate(ours("liere:4"), **arguments)
