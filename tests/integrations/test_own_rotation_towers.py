"""Vision towers of transformers that rotate by tables: the same outputs after a swap, gradients, and the way back."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rotating import IMAGE_TOWERS, SHARED, error, learned, llava, outputs, packed, qwen2_5_vl, shared, tower
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchrope as tr

OFTEN = ("qwen2_5_vl", "kimi_k25", "minimax_m3_vl", *IMAGE_TOWERS)  # one of each kind of layout
ALL = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in (*SHARED, *IMAGE_TOWERS)]


def unrotated(model: Any) -> Any:
    with pytest.warns(UserWarning, match="^outputs change, .* init='model' preserves it, got "):
        return tr.swap(copy.deepcopy(model), "mixed", init="zeros")


def rotary_of(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("rotary"))


@pytest.mark.parametrize("name", ALL)
def test_outputs_are_those_of_before_frequencies_learn_and_unswap_gives_the_model_back(name: str) -> None:
    model, images = tower(name)
    expected, names = outputs(model, images), model.state_dict().keys()
    assert error(outputs(unrotated(model), images), expected) > 0.05
    assert torch.equal(outputs(tr.swap(model, "mixed", keep_rotation=True), images), expected)
    tr.swap(tr.unswap(model), "mixed")
    assert error(outputs(model, images), expected) < 1e-5
    outputs(model, images).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learned(model))
    assert torch.equal(outputs(tr.unswap(model), images), expected)
    assert model.state_dict().keys() == names


@pytest.mark.parametrize("encoding", ["liere:4", "string:8", "comrope-ap:4", "comrope-ld:2"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "pixtral"])
def test_own_rotation_is_continued_by_encodings_that_can_represent_it(name: str, encoding: str) -> None:
    model, images = tower(name)
    expected = outputs(model, images)
    assert error(outputs(tr.swap(model, encoding), images), expected) < 1e-5


def test_table_of_towers_is_that_of_the_package() -> None:
    models = Path(transformers.__file__).parent / "models"
    by_code = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if "\ndef apply_rotary_pos_emb_vision(" in path.read_text(encoding="utf8")
    }
    assert by_code - {"mlcd"} == set(SHARED)
    page = (Path(tr.__file__).parents[2] / "docs" / "use-it-in-your-model.md").read_text(encoding="utf8")
    listed = re.search(r"use `apply_rotary_pos_emb_vision`[^:]*: ([^.]*)\.", page)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(SHARED)


class Synchronisations(TorchDispatchMode):
    """Counts the operators that wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal")
        self.count += str(func).startswith(waits)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "pixtral"])
def test_packed_sequences_are_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrope.encodings.base.can_read", lambda _: False)  # as on a device
    model, images = tower(name)
    counts = []
    for one in (model, tr.swap(copy.deepcopy(model), "mixed")):
        with torch.no_grad(), Synchronisations() as mode:
            outputs(one, images)
        counts.append(mode.count)
    assert counts[0] == counts[1]


def test_images_of_a_pack_are_those_alone() -> None:
    model = tr.swap(shared("qwen2_5_vl"), "mixed")
    with torch.no_grad():
        for parameter in learned(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    both = packed("qwen2_5_vl", (1, 4, 8), (1, 8, 4))
    together = model(**both).pooler_output
    second = {"hidden_states": both["hidden_states"][32:], "grid_thw": both["grid_thw"][1:]}
    assert error(together[8:], model(**second).pooler_output) < 1e-5


def test_encodings_that_find_tokens_elsewhere_have_positions_of_their_own() -> None:
    model, images = tower("qwen2_5_vl")
    families = iter([tr.MixedRoPE, tr.LieRE])
    with pytest.warns(UserWarning, match="outputs change"):
        tr.swap(model, lambda **head: next(families)(**head))
    rotary = rotary_of(model)
    assert rotary.lattices[0] != rotary.lattices[1]
    shown: list[Tensor] = []
    for encoding in rotary.encodings:
        encoding.register_forward_pre_hook(lambda _, args: shown.append(args[0]))
    outputs(model, images)
    scales = [[tr.positions.per_axis("", one, 2) for one in (where.origin, where.spacing)] for where in rotary.lattices]
    indices = [
        (where - torch.tensor(origin)) / torch.tensor(spacing)
        for where, (origin, spacing) in zip(shown, scales, strict=True)
    ]
    assert torch.allclose(indices[0], indices[1], atol=1e-4)
    assert int(indices[0].max()) == 7


@pytest.mark.parametrize("build", [qwen2_5_vl, llava])
def test_swap_of_a_multimodal_model_swaps_the_vision_tower(build: Any) -> None:
    model, given = build()
    expected, words = outputs(model, given), model.generate(**given, max_new_tokens=6, do_sample=False)
    tr.swap(model, "mixed")
    inside = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
    assert inside.rotary.encodings[0].num_axes == 2
    assert error(outputs(model, given), expected) < 1e-5
    assert torch.equal(model.generate(**given, max_new_tokens=6, do_sample=False), words)
    tr.swap(model.model.language_model, "mixed")
    assert error(outputs(model, given), expected) < 2e-5
    tr.unswap(model.model.language_model)
    assert torch.equal(outputs(tr.unswap(model), given), expected)


@pytest.mark.filterwarnings("ignore:outputs change")
def test_tower_without_table_and_rotation_ignores_positions() -> None:
    model, images = tower("llama4")
    with pytest.warns(UserWarning, match="^Llama4VisionModel has no position information: the position table"):
        tr.swap(model, "mixed", init="zeros", keep_position_tables=False)
    table = model.positional_embedding_vlm
    assert not table.any()
    assert not table.requires_grad
    pixels = images["pixel_values"]
    tokens = model.patch_embedding(pixels).shape[1]
    seen: list[Tensor] = []
    model.layernorm_post.register_forward_hook(lambda _m, _a, out: seen.append(out))
    model(pixels)
    model(pixels.roll(4, dims=-1))  # one patch further
    patches = [out[:, :tokens].unflatten(1, (8, 8)) for out in seen]
    assert error(patches[1], patches[0].roll(1, dims=2)) < 1e-5


@pytest.mark.parametrize("encoding", ["mixed", "string:8"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "minimax_m3_vl", *IMAGE_TOWERS])
def test_swapped_tower_is_saved_and_loaded_into_one_built_the_same_way(
    name: str, encoding: str, tmp_path: Path
) -> None:
    model, images = tower(name)
    tr.swap(model, encoding)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    expected = outputs(model, images)
    model.save_pretrained(tmp_path)
    again = tr.load(tmp_path, into=tower(name)[0])
    assert torch.equal(outputs(again, images), expected)
    assert rotary_of(again).lattices == rotary_of(model).lattices
    tr.load(tmp_path, into=tr.swap(tower(name)[0], encoding))
    with pytest.raises(ValueError, match=r"weights and encodings of a .*: build that model, .* into=model\)"):
        tr.load(tmp_path)


def test_whole_model_is_saved_and_loaded_with_both_of_its_parts_swapped(tmp_path: Path) -> None:
    model, given = qwen2_5_vl()
    tr.swap(model, "mixed")
    tr.swap(model.model.language_model, "string:8")
    tr.save(model, tmp_path)
    again = tr.load(tmp_path, into=qwen2_5_vl()[0])
    assert torch.equal(outputs(again, given), outputs(model, given))


def small_mlcd() -> Any:
    config = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    return transformers.MLCDVisionModel(transformers.MLCDVisionConfig(**config, image_size=32, patch_size=8))


def test_mlcd_is_refused_with_the_way_by_hand() -> None:
    message = (
        r"^swap needs attention that rotates q and k by positions, but MLCD rotates a token by learned angles; "
        r"torchrope\.rotate\(q, k, .*\) in a MLCDAttention of your own takes any positions, got MLCDVisionModel$"
    )
    with pytest.raises(ValueError, match=message):
        tr.swap(small_mlcd(), "mixed")
