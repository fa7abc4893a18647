"""`detect_family`: transformers of diffusers without a family are accepted if `swap` reproduces them, else refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr

pytest.importorskip("diffusers")
from diffusers import DiTTransformer2DModel
from diffusing import Inputs, built, inputs
from variants import sample, variant

from torchrope.integrations import detect_family, family

FAST = ("BriaTransformer2DModel", "WanVACETransformer3DModel", "HunyuanVideoFramepackTransformer3DModel")
REFUSED = (
    "AnyFlowTransformer3DModel",
    "CogView4Transformer2DModel",
    "EasyAnimateTransformer3DModel",
    "HeliosTransformer3DModel",
    "HunyuanVideoFramepackTransformer3DModel",
    "MochiTransformer3DModel",
    "SanaVideoTransformer3DModel",
)
IMAGES, VIDEOS = (3, 7), (2, 4, 12)
ACCEPTED = {
    "BriaTransformer2DModel": IMAGES,
    "BriaFiboTransformer2DModel": IMAGES,
    "ChromaTransformer2DModel": IMAGES,
    "ChronoEditTransformer3DModel": VIDEOS,
    "ConsisIDTransformer3DModel": VIDEOS,
    "Flux3Transformer2DModel": IMAGES,
    "HunyuanImageTransformer2DModel": VIDEOS,
    "HunyuanVideo15Transformer3DModel": VIDEOS,
    "Krea2Transformer2DModel": IMAGES,
    "LongCatImageTransformer2DModel": IMAGES,
    "MotifVideoTransformer3DModel": VIDEOS,
    "OvisImageTransformer2DModel": IMAGES,
    "SkyReelsV2Transformer3DModel": VIDEOS,
    "WanAnimateTransformer3DModel": VIDEOS,
    "WanVACETransformer3DModel": VIDEOS,
}
"""Classes, and another size that their swapped models must reproduce too."""


def marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in names]


def output(model: Any, given: Inputs) -> Tensor:
    with torch.no_grad():
        predicted: Tensor = model(**given, return_dict=False)[0]
    return predicted


def error(came: Tensor, expected: Tensor) -> float:
    return float((came - expected).abs().max() / expected.abs().max())


def attributes(model: Any) -> list[dict[str, Any]]:
    """Everything that the parts of a model hold, hooks and methods of instances too."""
    parts = map(vars, model.modules())
    return [{name: dict(v) if isinstance(v, dict) else v for name, v in part.items()} for part in parts]


def refusal(model: Any, given: Inputs) -> str:
    before = list(family._registered)
    with pytest.raises(ValueError, match="detect_family") as caught:
        detect_family(model, given)
    assert family._registered == before
    assert not family.adapters(model)
    assert not hasattr(model, "rotary")
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", marked(ACCEPTED))
def test_accepted_class_is_swapped_with_the_same_outputs(name: str) -> None:
    model, given, others = variant(name), sample(name), sample(name, *ACCEPTED[name])
    expected, at_other_size = output(model, given), output(model, others)
    state, parts = {key: value.clone() for key, value in model.state_dict().items()}, attributes(model)
    found = detect_family(model, given)
    assert attributes(model) == parts
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert family._registered == [found]
    assert found.model.endswith(f".{name}")
    assert torch.equal(output(model, given), expected)
    assert error(output(tr.swap(model, "mixed"), given), expected) < 1e-5
    assert error(output(model, others), at_other_size) < 1e-5
    assert len(family.adapters(model)[0].layers) >= 2
    tr.unswap(model)
    assert torch.equal(output(model, given), expected)
    another = variant(name, seed=1)
    expected = output(another, given)
    assert error(output(tr.swap(another, "mixed"), given), expected) < 1e-5


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("name", marked(REFUSED))
def test_other_class_is_refused_in_one_line(name: str) -> None:
    message = refusal(variant(name), sample(name))
    assert "\n" not in message
    assert f"no family that reproduces {name}: write a ModelFamily" in message
    assert "tried FluxTransformer2DModel" in message


def test_other_outputs_are_refused() -> None:
    model = variant("SkyReelsV2Transformer3DModel")
    model.rope.freqs_cos[2:] = 1  # not a rotation, from the third row on
    message = refusal(model, sample("SkyReelsV2Transformer3DModel"))
    assert "WanTransformer3DModel: outputs differ by" in message


def test_sample_of_one_token_cannot_tell() -> None:
    model, given = variant("SkyReelsV2Transformer3DModel"), sample("SkyReelsV2Transformer3DModel", 1, 2, 2)
    assert "cannot tell from this sample: its outputs are the same without rotation" in refusal(model, given)


@pytest.mark.parametrize("names", [(".to_v", ".add_v"), ("proj_out",)], ids=["attention", "output"])
def test_layers_without_effect_cannot_tell(names: tuple[str, ...]) -> None:
    model, given = variant("BriaTransformer2DModel"), sample("BriaTransformer2DModel")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(name in path for name in names):
                parameter.zero_()
    assert "its outputs are the same without rotation" in refusal(model, given)


def test_family_of_a_supported_model_is_returned() -> None:
    model = built("wan")
    found = detect_family(model, inputs("wan"))
    assert found.model == "diffusers.*.WanTransformer3DModel"
    assert not family._registered


def test_twice_is_once() -> None:
    model, given = variant("BriaTransformer2DModel"), sample("BriaTransformer2DModel")
    assert detect_family(model, given) is detect_family(tr.swap(model, "mixed"), given)
    assert len(family._registered) == 1


def test_model_in_training_mode_or_in_half_precision_is_refused() -> None:
    model, given = variant("BriaTransformer2DModel"), sample("BriaTransformer2DModel")
    assert "in training mode" in refusal(model.train(), given)
    given = {name: value.bfloat16() if name.endswith("states") else value for name, value in given.items()}
    assert "needs a model in float32" in refusal(model.eval().bfloat16(), given)


def test_errors_of_the_model_are_raised() -> None:
    given = sample("BriaTransformer2DModel")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        detect_family(variant("BriaTransformer2DModel"), {**given, "hidden_states": given["hidden_states"][..., :2]})
    assert not family._registered


def test_first_tensor_is_compared_wherever_it_is() -> None:
    model, given = variant("BriaTransformer2DModel"), sample("BriaTransformer2DModel")
    forward = model.forward
    model.forward = lambda **inputs: None
    assert "returns a tensor, got NoneType" in refusal(model, given)
    model.forward = forward
    assert detect_family(model, {**given, "return_dict": False}) is detect_family(model, given)


def test_swapped_model_of_a_detected_class_is_saved(tmp_path: Path) -> None:
    model, given = variant("BriaTransformer2DModel"), sample("BriaTransformer2DModel")
    detect_family(model, given)
    expected = output(model, given)
    tr.save(tr.swap(model, "mixed"), tmp_path / "model.safetensors")
    loaded = tr.load(tmp_path / "model.safetensors", into=variant("BriaTransformer2DModel", seed=1))
    assert error(output(loaded, given), expected) < 1e-5


def test_refusal_of_swap_names_the_detector() -> None:
    model = DiTTransformer2DModel(num_attention_heads=1, attention_head_dim=4, num_layers=1, norm_num_groups=1)
    with pytest.raises(ValueError, match=r"tr\.integrations\.detect_family\(model, inputs\)"):
        tr.swap(model, "mixed")
