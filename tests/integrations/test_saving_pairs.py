"""What the library returns it saves: published files, and two operations in any order, with equal outputs."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from published import randomised, saved
from rotating import decoder
from swapped import made
from test_published_comrope import _comrope_state as comrope
from test_published_liere import _liere_state as liere
from test_published_swin import _rope_vits as swin
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

import torchrope as tr


def of_timm(name: str, **settings: Any) -> dict[str, Tensor]:
    small = dict(img_size=64, embed_dim=48, depth=2, num_heads=2, num_classes=5)
    state = randomised(timm.create_model(name, **{**small, **settings})).state_dict()
    return {re.sub(r"ls(\d)\.gamma", r"gamma_\1", key) if "deit3" in name else key: one for key, one in state.items()}


HEADS = {"num_heads": 2}
PUBLISHED: dict[str, tuple[Callable[[], dict[str, Tensor]], dict[str, Any]]] = {
    "rope-vit-mixed": (partial(of_timm, "vit_small_patch16_rope_mixed_ape_224"), {}),
    "rope-vit-axial": (partial(of_timm, "vit_small_patch16_rope_ape_224"), HEADS | {"encoding": "axial"}),
    "deit-iii": (partial(of_timm, "deit3_small_patch16_224"), HEADS | {"encoding": "none"}),
    "dinov2": (partial(of_timm, "vit_small_patch14_reg4_dinov2", img_size=56), HEADS),
    "clip": (partial(of_timm, "vit_base_patch16_clip_quickgelu_224"), HEADS | {"activation": "quick_gelu"}),
    "swin-mixed": (lambda: swin("mixed", with_bias=True, with_buffers=True)[1], {}),
    "swin-axial": (lambda: swin("axial", with_bias=False, with_buffers=True)[1], {}),
    "liere": (partial(liere, layers=1), {}),
    "liere-per-layer": (partial(liere, per_head=False), {"layers": "per layer"}),
    "liere-visionllama": (partial(liere, b=0), {}),
    "liere-table": (lambda: liere(b=0) | {"pos_embedding": torch.randn(1, 17, 128)}, {}),
    "comrope-ap": (partial(comrope, "ap"), {}),
    "comrope-ld": (partial(comrope, "ld", frames=2, axes=3), {"positions": "range"}),
}


def outputs(model: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        out = model.eval()(*inputs)
    out = getattr(out, "logits", getattr(out, "last_hidden_state", out))
    return out if isinstance(out, Tensor) else torch.cat([one.flatten() for one in out])


def come_back(model: Any, inputs: tuple[Tensor, ...], folder: Path, into: Any = None) -> Any:
    """Save a model, load it alone or into another, compare outputs and dtypes, and return the loaded one."""
    tr.save(model, folder / "model.safetensors")
    again: Any = tr.load(folder / "model.safetensors", into=into)
    assert torch.equal(outputs(again, inputs), outputs(model, inputs))
    dtypes, expected = ({name: one.dtype for name, one in each.state_dict().items()} for each in (again, model))
    assert dtypes == expected or into is not None
    return again


def attempt(message: str | None, call: Callable[[], Any]) -> Any:
    """Return what a call returns; None if it must be refused, for this reason in one line."""
    if message is None:
        return call()
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    return None


ALONE: dict[str, Callable[[Any], Any]] = {
    "load": lambda model: model,
    "extend": lambda model: tr.extend(model, 2, method="interpolate"),
    "absorb": tr.absorb,
    "freeze": lambda model: tr.freeze(model, model.arguments["input_size"]),
    "inflate": lambda model: tr.inflate(model, axes=len(model.embed.patch_size) + 1, patch_size=2),
    "features": tr.Features,
}
CANNOT = {
    ("absorb", "swin"): "^absorb needs a ViT, got Swin",
    ("absorb", "liere"): "^absorb needs generators that commute, got LieRE",
    ("extend", "plain"): "^model must rotate q and k, .*; swap supports",
    ("inflate", "swin"): "^model must be a ViT, .* got Swin",
    ("features", "volumes"): "^the model must have two axes and square patches",
}
KINDS = {"deit-iii": "plain", "dinov2": "plain", "clip": "plain", "liere-table": "plain", "comrope-ld": "volumes"}
KINDS |= {"swin-mixed": "swin", "swin-axial": "swin", "liere": "liere", "liere-per-layer": "liere"}


@pytest.mark.parametrize("name", ["load", *(pytest.param(name, marks=pytest.mark.slow) for name in [*ALONE][1:])])
@pytest.mark.parametrize("published", PUBLISHED)
def test_published_models_are_saved(published: str, name: str, tmp_path: Path) -> None:
    build, options = PUBLISHED[published]
    torch.manual_seed(0)
    source: Any = tr.load_published(saved(build(), tmp_path), **options)
    x = torch.randn(1, source.embed.in_channels, *(2,) * (name == "inflate"), *source.arguments["input_size"])
    model = attempt(CANNOT.get((name, KINDS.get(published, ""))), lambda: ALONE[name](source))
    if model is not None:
        come_back(model, (x,), tmp_path)


def vit(encoding: Any, **settings: Any) -> tr.ViT:
    sizes: Any = dict(patch_size=4, num_outputs=5, dim=48, depth=2, num_heads=2)
    return tr.ViT((16, 16), **sizes, encoding=encoding, **settings).eval()


def tower() -> ViTModel:
    sizes: Any = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    return ViTModel(ViTConfig(image_size=64, patch_size=16, **sizes), add_pooling_layer=False).eval()


def points(periods: Any = None) -> tr.Transformer:
    lattice = tr.Lattice(unit=2.0, periods=periods)
    sizes: Any = dict(num_outputs=5, dim=48, depth=2, num_heads=2, input_size=20.0, activation=nn.SiLU)
    return tr.Transformer(3, num_axes=2, encoding="sinusoidal+axial", positions=lattice, **sizes).eval()


PLAIN: dict[str, Callable[[], Any]] = {
    "timm": partial(made, "vit"),
    "timm-swin": partial(made, "swin"),
    "transformers": tower,
    "llama": partial(decoder, "llama"),
}
MODELS: dict[str, Callable[[], Any]] = {
    "vit": partial(vit, "learned-jittered+comrope-ld:4", weight_init="torch", drop_path=0.1, layer_scale=0.5),
    "vit-bias": partial(vit, "bias+string:4", share_layers=True, qkv_bias=False),
    "vit-periodic": lambda: vit(lambda **head: tr.encodings.Periodic(tr.MixedRoPE(**head), (4.0, None))),
    "swin": partial(tr.Swin, (32, 32), dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, encoding="bias+liere:4"),
    "transformer": points,
    "transformer-periodic": partial(points, (24.0, None)),
    "timm": lambda: tr.swap(made("vit"), "comrope-ld:4", init="paper"),
    "timm-swin": lambda: tr.swap(made("swin"), "liere:4", init="paper", keep_position_tables=False),
    "transformers": lambda: tr.swap(tower(), tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16), init="paper"),
    "llama": lambda: tr.swap(decoder("llama"), "mixed"),
}
INPUTS: dict[str, tuple[Any, ...]] = {
    "vit": (torch.randn(2, 3, 16, 16),),
    "swin": (torch.randn(2, 3, 32, 32),),
    "transformer": (torch.randn(2, 6, 3), 20 * torch.rand(2, 6, 2)),
    "timm": (torch.randn(2, 3, 64, 64),),
    "timm-swin": (torch.randn(2, 3, 56, 56),),
    "transformers": (torch.randn(2, 3, 64, 64),),
    "llama": (torch.randint(50, (2, 7)),),
}


def inputs_of(kind: str, model: Any) -> tuple[Tensor, ...]:
    """Return inputs in the dtype of the model, positions last and never rounded."""
    first, *others = INPUTS[kind if kind in INPUTS else kind.partition("-")[0]]
    for _ in range(isinstance(model, tr.ViT) and len(model.embed.patch_size) - 2):
        first = first.unsqueeze(2)
    return (first.to(next(model.parameters()).dtype) if first.is_floating_point() else first, *others)


def load(model: Any, kind: str, folder: Path) -> Any:
    """Load a model alone, or into a plain one, whose dtypes are kept."""
    into = PLAIN[kind]() if kind in PLAIN and not isinstance(model, tr.ViT) else None
    return come_back(model, inputs_of(kind, model), folder, into and into.to(next(model.parameters()).dtype))


def freeze(model: Any, kind: str, folder: Path) -> Any:
    inputs = inputs_of(kind, model)
    frozen = tr.freeze(model, inputs[0].shape[2:] if isinstance(model, tr.ViT | tr.Swin) else inputs)
    tolerance = 1e-4 if next(model.parameters()).dtype == torch.float32 else 0.1
    torch.testing.assert_close(outputs(frozen, inputs), outputs(model, inputs), atol=tolerance, rtol=tolerance)
    return frozen


OPERATIONS: dict[str, Callable[[Any, str, Path], Any]] = {
    "load": load,
    "freeze": freeze,
    "extend": lambda model, *_: tr.extend(model, 2, method="interpolate"),
    "absorb": lambda model, *_: tr.absorb(model),
    "inflate": lambda model, *_: (
        tr.inflate(model, axes=len(getattr(model, "embed", model).patch_size) + 1)
        if isinstance(model, tr.ViT)
        else tr.inflate(model)
    ),
    "swap": lambda model, *_: tr.swap(model, "mixed"),
    "bfloat16": lambda model, *_: model.bfloat16(),
}


def reason(name: str, done: list[str], kind: str) -> str | None:
    """Return the pattern of the refusal that is expected of an operation, None if it must work."""
    is_vit = kind.startswith("vit") or "inflate" in done
    if name == "absorb" and not is_vit:
        return "^absorb needs a ViT, got "
    if "freeze" in done and name in ("absorb", "extend", "freeze", "inflate"):
        return f"^{name} needs a model that is not frozen, got a frozen "
    if name == "swap":
        return "^swap (needs a model that is not swapped|supports the models in docs)"
    if name == "inflate" and not is_vit and kind not in ("timm", "transformers"):
        return "^(model must be a ViT|inflate needs a model with the parts of a ViT)"
    if name == "extend" and "periodic" in kind and not {"absorb", "inflate"} & {*done}:
        return "^generators of Periodic must have integer turns per period"
    return None


PAIRS = [  # a ViT has every pair; every model each operation first and second, once after "load"
    pytest.param(kind, first, second, marks=() if first == "load" or kind == "vit" else pytest.mark.slow)
    for i, kind in enumerate(MODELS)
    for j, first in enumerate(OPERATIONS)
    for k, second in enumerate(OPERATIONS)
    if first == "load" or kind == "vit" or k == (i + 2 * j) % len(OPERATIONS)
]


@pytest.mark.parametrize(("kind", "first", "second"), PAIRS)
def test_two_operations_in_any_order(kind: str, first: str, second: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, done = MODELS[kind](), []
    for name in (first, second):
        made_of = attempt(reason(name, done, kind), partial(OPERATIONS[name], model, kind, tmp_path))
        if made_of is not None:
            model = made_of
            done.append(name)
    load(model, kind, tmp_path)
