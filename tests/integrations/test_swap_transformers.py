"""Encodings in transformers' vision models: outputs kept at zero generators, rotated as in the formula otherwise."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import load_sharded_checkpoint

import torchrope as tr
from torchrope import load, save, swap, unswap

# Of DINOv3, which rotates, most tests here replace its rotation; those of test_own_rotation_dinov3 continue it.
pytestmark = pytest.mark.filterwarnings("ignore:outputs change, .* got DINOv3")

WIDTHS = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
VISION = dict(**WIDTHS, intermediate_size=48, image_size=32, patch_size=8)
TEXT = dict(**WIDTHS, intermediate_size=48, vocab_size=20, max_position_embeddings=8, bos_token_id=0, eos_token_id=1)
DINOV2 = dict(**WIDTHS, mlp_ratio=2, image_size=32, patch_size=8)
STAGES = dict(out_features=["stage1", "stage2"])


def make(name: str, config: Callable[..., Any], *parts: Any, **settings: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = getattr(transformers, name)(config(**settings))
        for parameter in model.parameters():  # large enough that scores depend on q and k
            nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return build


clip_whole = partial(transformers.CLIPConfig, vision_config=VISION, text_config=TEXT, projection_dim=16)
siglip_whole = partial(transformers.SiglipConfig, vision_config=VISION, text_config={**TEXT, "projection_size": 32})

TOWERS = {
    "clip": make("CLIPVisionModel", transformers.CLIPVisionConfig, **VISION),
    "vit": make("ViTModel", transformers.ViTConfig, **VISION),
    "dinov2": make("Dinov2Model", transformers.Dinov2Config, **DINOV2),
    "dinov2-registers": make(
        "Dinov2WithRegistersModel", transformers.Dinov2WithRegistersConfig, num_register_tokens=3, **DINOV2
    ),
    "dinov3": make("DINOv3ViTModel", transformers.DINOv3ViTConfig, num_register_tokens=2, **VISION),
    "siglip": make("SiglipVisionModel", transformers.SiglipVisionConfig, **VISION),
}
PREFIX = {"clip": 1, "vit": 1, "dinov2": 1, "dinov2-registers": 4, "dinov3": 3, "siglip": 0}
MODELS = {
    **TOWERS,
    "clip-projection": make("CLIPVisionModelWithProjection", transformers.CLIPVisionConfig, **VISION),
    "clip-classes": make("CLIPForImageClassification", clip_whole),
    "clip-whole": make("CLIPModel", clip_whole),
    "vit-classes": make("ViTForImageClassification", transformers.ViTConfig, **VISION),
    "dinov2-classes": make("Dinov2ForImageClassification", transformers.Dinov2Config, **DINOV2),
    "dinov2-backbone": make("Dinov2Backbone", transformers.Dinov2Config, **DINOV2, **STAGES),
    "dinov2-registers-classes": make(
        "Dinov2WithRegistersForImageClassification", transformers.Dinov2WithRegistersConfig, **DINOV2
    ),
    "dinov2-registers-backbone": make(
        "Dinov2WithRegistersBackbone", transformers.Dinov2WithRegistersConfig, **DINOV2, **STAGES
    ),
    "dinov3-backbone": make("DINOv3ViTBackbone", transformers.DINOv3ViTConfig, **VISION, **STAGES),
    "siglip-classes": make("SiglipForImageClassification", siglip_whole),
    "siglip-whole": make("SiglipModel", siglip_whole),
}
LEARNED = ["mixed", "liere", "liere:8", "comrope-ap:4", "comrope-ld:4", "string:8"]


def run(model: Any, pixels: Tensor, **settings: Any) -> list[Tensor]:
    """Everything that a model says of images, drawing the same in training."""
    torch.manual_seed(1)
    if pixels.shape[-2:] != (32, 32) and "Dino" not in type(model).__name__ and "DINO" not in type(model).__name__:
        settings["interpolate_pos_encoding"] = True
    whole = hasattr(model, "get_image_features")
    output = model.get_image_features(pixels, **settings) if whole else model(pixels, **settings)
    tensors: list[Tensor] = []
    for value in output.to_tuple():
        tensors.extend(value if isinstance(value, tuple) else [value])
    return tensors


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def close(some: list[Tensor], others: list[Tensor], tolerance: float = 1e-4) -> bool:
    return all((one - other).abs().max() < tolerance for one, other in zip(some, others, strict=True))


def rotary_of(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("rotary"))


def turn(model: nn.Module, std: float = 1.0) -> None:
    """Give the encodings generators that are not zero."""
    for parameter in rotary_of(model).parameters():
        nn.init.normal_(parameter, std=std)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (32, 32)))


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        pytest.param(
            name,
            encoding,
            marks=() if encoding == "mixed" or (name, encoding) == ("vit", "liere:8") else pytest.mark.slow,
        )
        for name in MODELS
        for encoding in LEARNED
    ],
)
def test_zero_generators_keep_outputs_to_the_bit_and_learn(name: str, encoding: str) -> None:
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    swap(model, encoding, keep_rotation=True)
    for mode in (True, False):
        for pixels in (images(), images(48, 40)):
            model.train(mode), plain.train(mode)
            assert same(run(model, pixels), run(plain, pixels))
    state, before = model.state_dict(), plain.state_dict()
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert all("rotary." in key for key in state.keys() - before.keys())
    sum(tensor.square().sum() for tensor in run(model, images())).backward()
    assert len(rotary_of(model).encodings) == 2
    for encoder in rotary_of(model).encodings:
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in encoder.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_unswap_gives_the_model_back(name: str) -> None:
    model = MODELS[name]()
    pixels = images()
    before, keys = run(model, pixels), list(model.state_dict())
    insides = {part: set(vars(module)) for part, module in model.named_modules()}
    swap(model, "liere:8", init="paper", keep_position_tables=False)
    assert not close(run(model, pixels), before)
    assert unswap(model) is model
    assert same(run(model, pixels), before)
    assert list(model.state_dict()) == keys
    for part, module in model.named_modules():
        assert set(vars(module)) == insides[part]
        assert not module._forward_pre_hooks
        assert not hasattr(getattr(module, "config", None), "plain")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("encoding", ["axial", *LEARNED])
@pytest.mark.parametrize("name", TOWERS)
def test_scores_are_those_of_rotated_queries_and_keys(name: str, encoding: str, attention: str) -> None:
    model = TOWERS[name]().double()
    model.set_attn_implementation(attention)
    swap(model, encoding, init="paper")
    turn(model)
    layers = [module for module in model.modules() if hasattr(module, "q_proj")]
    seen: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        for part in ("q_proj", "k_proj", "v_proj"):
            getattr(layer, part).register_forward_hook(
                lambda _m, _i, out, key=f"{part}{index}": seen.update({key: out})
            )
        last = layer.out_proj if hasattr(layer, "out_proj") else layer.o_proj
        last.register_forward_pre_hook(lambda _m, args, key=f"mixed{index}": seen.update({key: args[0]}))
    run(model, images(32, 48).double())
    for index in range(2):
        q, k, v = (
            seen[f"{part}{index}"].unflatten(-1, (2, 16)).transpose(1, 2) for part in ("q_proj", "k_proj", "v_proj")
        )
        encoder = rotary_of(model).encodings[index]
        positions = tr.prefix(tr.grid(4, 6, **encoder.lattice.spaced(4, 4)), PREFIX[name]).double()
        exponent = torch.einsum("ta,ahnij->htnij", positions, encoder.generators())
        blocks = torch.linalg.matrix_exp(exponent.contiguous())
        matrix = torch.stack([torch.block_diag(*token) for token in blocks.flatten(0, 1)]).unflatten(
            0, blocks.shape[:2]
        )
        turned = [torch.einsum("htij,bhtj->bhti", matrix, x) for x in (q, k)]
        weights = (turned[0] @ turned[1].mT / 4).softmax(dim=-1)
        expected = (weights @ v).transpose(1, 2).flatten(2)
        assert (seen[f"mixed{index}"] - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["clip", "vit", "dinov2", "siglip"])
def test_model_without_its_table_equals_one_with_a_zero_table(name: str) -> None:
    model, pixels = TOWERS[name](), images(48, 32)
    zeroed = copy.deepcopy(model)
    [table] = [value for key, value in zeroed.named_parameters() if "position_embedding" in key]
    table.data.zero_()
    swap(model, "none", keep_position_tables=False)
    assert same(run(model, pixels), run(zeroed, pixels))
    [table] = [value for key, value in model.named_parameters() if "position_embedding" in key]
    assert not table.requires_grad


@pytest.mark.parametrize("name", ["clip-whole", "vit-classes", "dinov2", "dinov3", "siglip-classes"])
def test_attention_is_chosen_afterwards_too(name: str) -> None:
    model, pixels = MODELS[name](), images()
    plain = run(model, pixels)
    swap(model, "liere:8", init="paper")
    by_sdpa = run(model, pixels)
    model.set_attn_implementation("eager")
    by_eager = run(model, pixels, output_attentions=True)
    weights = by_eager[-2:]
    assert close(by_eager[: len(by_sdpa)], by_sdpa, 1e-3)
    assert not close(by_sdpa, plain)
    assert all(torch.allclose(layer.sum(dim=-1), torch.ones(())) for layer in weights)
    model.set_attn_implementation("sdpa")
    assert same(run(model, pixels), by_sdpa)


@pytest.mark.parametrize("name", TOWERS)
def test_attention_of_the_registry_is_called_by_the_models_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transformers.AttentionInterface()["sdpa"]
    names = []

    def another(layer: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(layer.config._attn_implementation)  # as FlashAttention does
        return plain(layer, *args, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "another", another)
    model, pixels = swap(TOWERS[name](), "mixed", init="paper"), images()
    by_sdpa = run(model, pixels)
    model.set_attn_implementation("another")
    assert same(run(model, pixels), by_sdpa)
    assert names == ["another", "another"]


@pytest.mark.parametrize("name", ["clip-whole", "siglip-whole"])
def test_text_towers_are_left_alone(name: str) -> None:
    model, words, pixels = MODELS[name](), torch.tensor([[0, 5, 6, 1]]), images()
    text, picture = model.get_text_features(words).pooler_output, run(model, pixels)
    swap(model, "liere:8", init="paper")
    assert torch.equal(model.get_text_features(words).pooler_output, text)
    assert not close(run(model, pixels), picture)
    assert model(input_ids=words, pixel_values=pixels).logits_per_image.shape == (2, 1)


@pytest.mark.parametrize("name", ["dinov2", "dinov2-registers", "dinov3"])
def test_masked_patches_work_after_swap(name: str) -> None:
    model, pixels, mask = TOWERS[name](), images(), torch.rand(2, 16) > 0.5
    before = run(model, pixels, bool_masked_pos=mask)
    assert same(run(swap(model, "mixed", keep_rotation=True), pixels, bool_masked_pos=mask), before)
    assert not close(before, run(model, pixels))


@pytest.mark.parametrize("name", TOWERS)
def test_masks_work_after_swap(name: str) -> None:
    model, pixels = TOWERS[name](), images()
    tokens = 16 + PREFIX[name]
    mask = torch.zeros(2, 1, tokens, tokens)
    mask[..., ::2] = -torch.inf
    before = run(model, pixels, attention_mask=mask)
    assert same(run(swap(model, "mixed", keep_rotation=True), pixels, attention_mask=mask), before)
    assert not close(before, run(model, pixels))


@pytest.mark.parametrize("encoding", [pytest.param("axial", marks=pytest.mark.slow), "comrope-ld:4"])
@pytest.mark.parametrize("name", MODELS)
def test_saving_loses_nothing(name: str, encoding: str, tmp_path: Path) -> None:
    model, pixels = swap(MODELS[name](), encoding, keep_position_tables=False, init="paper"), images()
    turn(model)
    model.save_pretrained(tmp_path)
    base = type(model.config).from_json_file(str(tmp_path / "base_config.json"))
    again = load(tmp_path, into=type(model)(base).eval())
    assert same(run(again, pixels), run(model, pixels))
    assert same(run(unswap(again), pixels), run(unswap(model), pixels))


@pytest.mark.parametrize("name", ["vit-classes", "clip-whole", "dinov2-backbone"])
def test_from_pretrained_refuses_what_it_would_cut(name: str, tmp_path: Path) -> None:
    model = swap(MODELS[name](), "mixed")
    for _ in range(2):  # a Trainer writes to its folder again
        model.save_pretrained(tmp_path / "swapped")
    with pytest.raises(KeyError, match="metadata"):
        type(model).from_pretrained(tmp_path / "swapped", config=model.config)
    for cls in (type(model), transformers.AutoModel, transformers.AutoConfig):
        rule = (
            r"drop the encodings: build the model of base_config\.json and call torchrope\.load\(folder, into=model\)"
        )
        with pytest.raises(ValueError, match=rule) as caught:
            cls.from_pretrained(str(tmp_path / "swapped"))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=rf"weights and encodings of a .*\.{type(model).__name__}: build that model"):
        load(tmp_path / "swapped")
    base = transformers.AutoConfig.from_pretrained(str(tmp_path / "swapped" / "base_config.json"))
    assert type(base) is type(model.config)
    assert base.architectures == [type(model).__name__]
    transformers.PreTrainedConfig.from_json_file(str(tmp_path / "swapped" / "config.json"))  # as a Trainer that resumes
    unswap(model).save_pretrained(tmp_path / "plain")
    assert same(run(type(model).from_pretrained(tmp_path / "plain"), pixels := images()), run(model, pixels))
    with pytest.raises(ValueError, match=r"save_directory must have no config\.json, "):
        swap(model, "mixed").save_pretrained(tmp_path / "plain")


def test_models_around_the_tower_refuse() -> None:
    model = swap(MODELS["vit-classes"](), "mixed")
    for part in (model, model.vit):
        with pytest.raises(ValueError, match=r"must be uploaded as a file of torchrope\.save"):
            part.push_to_hub("somewhere")
        with pytest.raises(ValueError, match=r"must be uploaded as a file of torchrope\.save"):
            part.save_pretrained("somewhere", push_to_hub=True)
    unswap(model.vit)  # the way back may start anywhere
    assert not {"save_pretrained", "push_to_hub"} & {*vars(model), *vars(model.vit)}


def test_trainer_resumes_from_what_save_pretrained_wrote(tmp_path: Path) -> None:
    model, pixels = swap(MODELS["vit-classes"](), "liere:8"), images()
    turn(model)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    fresh = swap(MODELS["vit-classes"](), "liere:8")
    load_sharded_checkpoint(fresh, tmp_path, strict=True)
    assert same(run(fresh, pixels), run(model, pixels))
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not (tmp_path / "second").exists()
    with pytest.raises(ValueError, match="state_dict must hold the tensors of the swapped model, got other names"):
        model.save_pretrained(tmp_path, state_dict=fresh.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_saving_keeps_dtypes_and_those_that_differ(dtype: torch.dtype, tmp_path: Path) -> None:
    TOWERS["dinov3"]().save_pretrained(tmp_path / "plain")

    def kept() -> Any:
        return transformers.DINOv3ViTModel.from_pretrained(tmp_path / "plain", dtype=dtype)

    def cast() -> Any:
        return transformers.DINOv3ViTModel.from_pretrained(tmp_path / "plain").to(dtype)

    assert kept().rope_embeddings.inv_freq.dtype != cast().rope_embeddings.inv_freq.dtype
    for build in (kept, cast):
        model = swap(build(), "mixed", keep_rotation=True)
        turn(model)
        save(model, tmp_path)
        again = load(tmp_path, into=build())
        assert {name: value.dtype for name, value in again.state_dict().items()} == {
            name: value.dtype for name, value in model.state_dict().items()
        }
        pixels = images().to(dtype)
        assert same(run(again, pixels), run(model, pixels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["vit-classes", "clip", "dinov3"])
def test_frozen_model_comes_back_into_the_one_of_its_base_config(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, pixels = swap(MODELS[name]().to(dtype), "comrope-ld:4", init="paper"), images().to(dtype)
    frozen = tr.freeze(model, pixels)
    frozen.save_pretrained(tmp_path)
    base = transformers.AutoConfig.from_pretrained(str(tmp_path / "base_config.json"))
    plain = getattr(transformers, *base.architectures)._from_config(base).eval()
    assert plain.dtype == dtype
    assert same(run(load(tmp_path, into=plain), pixels), run(frozen, pixels))
