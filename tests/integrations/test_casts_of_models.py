"""Swapped models that are cast to half precision, before the swap or after it: angles stay exact."""

from typing import Any

import pytest
import timm
import torch
import transformers
from diffusing import built
from rotating import decoder, dinov3, qwen2_5_vl, shared, tokens
from swapped import MODELS
from torch import Tensor, nn

import torchrope as tr
from torchrope.encodings import Encoding
from torchrope.tensors import warn_once


@pytest.fixture(autouse=True)
def _nothing_warned_of() -> None:
    warn_once.cache_clear()


def encodings(model: nn.Module) -> list[Encoding]:
    return [module for module in model.modules() if isinstance(module, Encoding)]


def generators(model: nn.Module) -> list[Tensor]:
    return [encoding.generators().detach() for encoding in encodings(model)]


def angle_error(model: Any, exact: list[Tensor], position: float) -> float:
    """Largest error of an angle of the first encoding, in radians modulo full turns, via sines and cosines."""
    encoding = encodings(model)[0]
    rotation = encoding(torch.full((1, encoding.num_axes), position)).matrix().detach().double()
    truth = torch.linalg.matrix_exp(position * exact[0].double().sum(dim=0).unsqueeze(1))  # (heads, 1, pairs, 2, 2)
    return float((rotation[..., 0, 0:2, 0:2] - truth[:, 0, 0]).abs().max())


@pytest.mark.parametrize("when", ["after the swap", "before the swap", "at loading"])
def test_llama_rotates_exactly_at_position_4000(when: str, tmp_path: Any) -> None:
    model = decoder("llama")
    exact = generators(tr.swap(decoder("llama"), "mixed"))
    if when == "at loading":
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = tr.swap(model.bfloat16(), "mixed") if when != "after the swap" else tr.swap(model, "mixed").bfloat16()
    assert model.dtype == torch.bfloat16
    for actual, truth in zip(generators(model), exact, strict=True):
        assert 4_000 * (actual - truth).abs().max() < 1e-3
    assert angle_error(model, exact, 4_000.0) < 1e-3
    assert model(tokens()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "build",
    [
        lambda: shared("qwen2_5_vl"),
        lambda: qwen2_5_vl()[0].model.language_model,
        lambda: decoder("llama3"),
        lambda: decoder("Gemma3"),
        dinov3,
    ],
)
def test_frequencies_of_a_cast_model_are_those_of_its_configuration(build: Any) -> None:
    exact = generators(tr.swap(build(), "mixed"))
    for actual, truth in zip(generators(tr.swap(build().half(), "mixed")), exact, strict=True):
        assert torch.equal(actual, truth)


def test_frequencies_that_no_configuration_tells_give_one_warning() -> None:
    model = decoder("llama").bfloat16()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.warns(UserWarning, match="swap before casting the model, got torch.bfloat16") as warned:
        tr.swap(model, "mixed")
    learned = timm.create_model("vit_small_patch16_rope_mixed_224", img_size=32, depth=2).half()
    with pytest.warns(UserWarning, match="swap before casting the model, got torch.float16") as warned_again:
        tr.swap(learned, "mixed")
    assert len(warned) == len(warned_again) == 1


@pytest.mark.parametrize("name", ["rope_axial", "dinov3", "naflex_mrope", "gemma4"])
def test_frequencies_of_a_cast_timm_model_are_exact(name: str) -> None:
    exact = generators(tr.swap(MODELS[name](), "mixed"))
    for model in (tr.swap(MODELS[name]().bfloat16(), "mixed"), tr.swap(MODELS[name](), "mixed").bfloat16()):
        assert all(torch.equal(actual, truth) for actual, truth in zip(generators(model), exact, strict=True))


def test_frequencies_of_a_cast_diffusion_model_are_exact() -> None:
    exact = generators(tr.swap(built("flux"), "mixed"))
    for model in (tr.swap(built("flux").half(), "mixed"), tr.swap(built("flux"), "mixed").half()):
        assert all(torch.equal(actual, truth) for actual, truth in zip(generators(model), exact, strict=True))


class Own(transformers.PreTrainedModel):
    """A model of transformers with encodings of torchrope in it."""

    config_class = transformers.ViTConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.project = nn.Linear(8, 8)
        self.mixed = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)
        self.axial = tr.AxialRoPE(num_axes=2, num_heads=2, head_dim=8)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


def test_own_model_loaded_in_bfloat16_keeps_float32_frequencies(tmp_path: Any) -> None:
    model = Own(transformers.ViTConfig())
    model.save_pretrained(tmp_path)
    again = Own.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.project.weight.dtype == torch.bfloat16
    for encoding in (again.mixed, again.axial):
        assert encoding(tr.grid(2, 2)).dtype == encoding.frequencies.dtype == torch.float32
