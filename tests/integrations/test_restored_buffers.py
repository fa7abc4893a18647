"""A strict load of the state dictionary restores all outputs after `to_empty`, whatever the new memory holds."""

import copy
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import plain_towers
import pytest
import rotating
import swapped
import torch
from every_family import Family, every_family
from torch import Tensor

import torchrope as tr
from torchrope.encodings.names import ABSOLUTE, BIAS, ROTARY
from torchrope.integrations.rotary_embedding_torch import RotaryEmbedding

SIZES: dict[str, Any] = dict(patch_size=4, num_outputs=3)
MODELS: dict[str, Any] = {
    "vit": partial(tr.ViT, (16, 16), dim=96, depth=2, num_heads=2, **SIZES),
    "swin": partial(tr.Swin, (32, 32), window_size=4, dim=96, depths=(1, 1), num_heads=(2, 4), **SIZES),
    "features": lambda **encoding: tr.Features(tr.ViT((16, 16), dim=96, depth=1, num_heads=2, **SIZES, **encoding)),
    "transformer": partial(tr.Transformer, 5, num_axes=2, dim=96, depth=1, num_heads=2, num_outputs=3),
}
INPUTS = {
    "vit": (torch.rand(2, 3, 16, 24),),
    "swin": (torch.rand(2, 3, 32, 32),),
    "features": (torch.rand(2, 3, 16, 24),),
    "transformer": (torch.rand(2, 7, 5), torch.rand(2, 7, 2)),
}
FILLS = pytest.mark.parametrize("fill", [0.0, torch.nan, None])


def restored(model: Any, saved: Any, fill: float | None, theirs: Mapping[str, Tensor] | None = None) -> Any:
    """The model in new memory of one value, or in that of the state; `theirs` another library's loader restores."""
    if fill is None:
        model.load_state_dict(saved, assign=True)
        return model
    model.to_empty(device="cpu")
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.detach().fill_(fill if tensor.is_floating_point() or tensor.is_complex() else 0)
    for name, buffer in (theirs or {}).items():
        model.get_buffer(name).copy_(buffer)
    model.load_state_dict(saved)
    return model


@FILLS
@pytest.mark.parametrize("encoding", [*ROTARY, *ABSOLUTE, *BIAS])
@pytest.mark.parametrize("name", MODELS)
def test_models_built_on_meta(name: str, encoding: str, fill: float | None) -> None:
    if name == "transformer" and encoding in ("learned", "learned-jittered", *BIAS):
        pytest.skip("needs a lattice")
    model = MODELS[name](encoding=encoding).eval()
    with torch.device("meta"):
        empty = MODELS[name](encoding=encoding).eval()
    outputs, expected = (each(*INPUTS[name])[0] for each in (restored(empty, model.state_dict(), fill), model))
    assert torch.equal(outputs, expected)


@FILLS
@pytest.mark.parametrize("encoding", ["learned+axial", "sinusoidal+liere:8", "comrope-ld", "alibi+string"])
def test_frozen_models(encoding: str, fill: float | None) -> None:
    model = tr.freeze(MODELS["vit"](encoding=encoding), (16, 24))
    expected = model(*INPUTS["vit"])
    assert torch.equal(restored(model, copy.deepcopy(model.state_dict()), fill)(*INPUTS["vit"]), expected)


@FILLS
def test_xpos(fill: float | None) -> None:
    rotary, (q, k) = RotaryEmbedding(dim=8, use_xpos=True), torch.randn(2, 1, 2, 5, 8)
    with torch.device("meta"):
        empty = RotaryEmbedding(dim=8, use_xpos=True)
    outputs = restored(empty, rotary.state_dict(), fill).rotate_queries_and_keys(q, k)
    for output, expected in zip(outputs, rotary.rotate_queries_and_keys(q, k), strict=True):
        assert torch.equal(output, expected)


def families() -> list[Any]:
    """Those with a rotation and without; one of each kind in the quick suite."""
    found = list(every_family())
    for name, build in plain_towers.TOWERS.items():
        inputs = partial(lambda build, model: [build().given], build)
        found.append(
            Family("transformers", name, partial(lambda build: build().model, build), inputs, rotating.outputs)
        )
    for name in sorted(swapped.MODELS.keys() - set(swapped.ROTATING)):
        build, images = partial(swapped.strong, name), lambda model: [swapped.images(model)]
        found.append(Family("timm", name, build, images, lambda model, x: model(x)))
    marks = {"llama": (), "llama4": (), "dinov3": (), "flux": (), "swin": ()}
    return [
        pytest.param(each, id=f"{each.library}-{each}", marks=marks.get(str(each), pytest.mark.slow)) for each in found
    ]


@torch.no_grad()
@pytest.mark.parametrize("when", ["swapped", "swapped on meta"])
@pytest.mark.parametrize("family", families())
def test_swapped_models(family: Family, when: str) -> None:
    plain = family.build()
    given = family.inputs(plain)[0]
    kept = family.name == "vjepa2"  # whose rotation of single channels no encoding represents
    model = tr.swap(copy.deepcopy(plain), "mixed", keep_rotation=kept)
    for parameter in rotating.learned(model):
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    torch.manual_seed(0)  # for encoders that draw a mask
    expected = family.call(model, given)
    theirs = {name: buffer for name, buffer in plain.named_buffers() if name not in plain.state_dict()}
    saved = copy.deepcopy(model.state_dict())
    if when == "swapped on meta":
        if any(name.endswith("rope.freqs") for name, _ in plain.named_parameters()):
            pytest.skip("learned frequencies have no values on the meta device")
        model = tr.swap(plain.to("meta"), "mixed", keep_rotation=kept)
    theirs = {name: buffer.clone() for name, buffer in theirs.items() if name in dict(model.named_buffers())}
    for fill in (0.0, torch.nan):
        restored(model, saved, fill, theirs)
        torch.manual_seed(0)
        assert torch.equal(family.call(model, given), expected), f"memory of {fill}"
