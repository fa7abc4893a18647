"""Every family in every wrapper: a swapped model does in it what it does alone, if the model itself can.

Threads are in test_threads.py.
"""

import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import Family, every_family
from rotating import error
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchrope as tr
from torchrope.integrations import proof
from torchrope.integrations.family import adapters

SUPPORT = Path(__file__).parents[1] / "support"
FAMILIES = {f"{family.library} {family.name}": family for family in every_family()}
FIRST = ("timm eva02", "transformers qwen2_5_vl", "transformers, text llama", "diffusers flux")
"""Families that the default suite runs too."""


def each_family(*, first: tuple[str, ...] = FIRST) -> pytest.MarkDecorator:
    cases = [
        pytest.param(family, id=name, marks=() if name in first else pytest.mark.slow)
        for name, family in FAMILIES.items()
    ]
    return pytest.mark.parametrize("family", cases)


@each_family()
def test_proof_of_swap_runs(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    compare = proof._difference
    monkeypatch.setattr(proof, "_difference", lambda *args: (calls.append(args), compare(*args))[1])
    tr.swap(family.build(), "mixed")
    assert calls or family.name in ("cogvideox", "lumina2")  # whose layers need the tokens of two streams


def swapped(family: Family, **settings: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = family.build()
    inputs = family.inputs(model)
    return tr.swap(model, "mixed", **settings), inputs


def rotary_of(model: Any) -> Any:
    return next(part for part in model.modules() if type(part).__name__ == "Rotary")


def gradients(model: Any, family: Family, inputs: list[Any]) -> list[Tensor]:
    """Gradients of the encodings after a backward pass through two forwards of different sizes."""
    model.zero_grad()
    torch.manual_seed(1)
    first, second = family.call(model, inputs[0]), family.call(model, inputs[1])
    (first.square().mean() + second.square().mean()).backward()
    return [parameter.grad.clone() for parameter in rotary_of(model).encodings.parameters()]


def close(came: list[Tensor], expected: list[Tensor], tolerance: float = 1e-4) -> bool:
    assert len(came) == len(expected) > 0
    return all(error(one, other) < tolerance for one, other in zip(came, expected, strict=True))


def enable_checkpointing(model: Any, family: Family, *, reentrant: bool) -> None:
    if family.library == "timm":
        import timm

        timm.layers.set_reentrant_ckpt(reentrant)
        tower = next(part for part in model.modules() if hasattr(part, "set_grad_checkpointing"))
        tower.set_grad_checkpointing(True)
    elif family.library == "diffusers":
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=reentrant))
    else:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})


def learns(plain: Any, family: Family, x: Any) -> bool:
    """Whether a model that is not swapped has gradients; Eva and Llama 4 pass keywords that reentrant ones lack."""
    try:
        family.call(plain, x).square().mean().backward()
    except ValueError:
        return False
    return any(parameter.grad is not None for parameter in adapters(plain)[0].layers[0].parameters())


@pytest.fixture
def _checkpointing_of_timm() -> Iterator[None]:
    import timm.layers

    before = timm.layers.use_reentrant_ckpt()
    yield
    timm.layers.set_reentrant_ckpt(before)


@each_family()
@pytest.mark.usefixtures("_checkpointing_of_timm")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family: Family, reentrant: bool) -> None:
    model, inputs = swapped(family)
    model.train()
    expected = gradients(model, family, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = family.build().train()
        try:
            enable_checkpointing(plain, family, reentrant=reentrant)
        except ValueError as failure:
            pytest.skip(f"the model itself is not checkpointed: {failure}")
        if not learns(plain, family, inputs[0]):
            pytest.skip("the model itself does not learn if it is checkpointed this way")
        enable_checkpointing(model, family, reentrant=reentrant)
        assert close(gradients(model, family, inputs), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@each_family(first=("timm eva02", "transformers, text llama"))
def test_compiled(family: Family) -> None:
    model, (x, *_) = swapped(family)
    expected = family.call(model, x)
    compiled: Any = torch.compile(model, backend="eager")
    assert error(family.call(compiled, x), expected) < 1e-5


class Called(nn.Module):
    def __init__(self, model: Any, family: Family) -> None:
        super().__init__()
        self.model = model
        self.family = family

    def forward(self, x: Any) -> Tensor:
        return self.family.call(self.model, x)


def exported(model: Any, family: Family, x: Any) -> Any:
    sizes = pytree.tree_map(
        lambda leaf: dict.fromkeys(range(leaf.ndim), torch.export.Dim.AUTO) if isinstance(leaf, Tensor) else None, x
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(Called(model, family), (x,), dynamic_shapes=(sizes,), strict=False).module()


@each_family(first=())
def test_exported_with_dynamic_sizes(family: Family) -> None:
    model, inputs = swapped(family)
    try:
        program = exported(family.build(), family, inputs[0])
        for x in inputs[1:]:
            program(x)
    except Exception as failure:
        pytest.skip(f"the model itself is not exported: {type(failure).__name__}")
    if family.name == "step3p7":  # its number of tokens is computed from values, as docs/use-it-in-your-model.md says
        with pytest.raises(Exception, match="Could not guard on data-dependent expression"):
            exported(model, family, inputs[0])
        return
    program = exported(model, family, inputs[0])
    for x in inputs:
        assert error(program(x), family.call(model, x)) < 1e-5


@each_family()
def test_pickled(family: Family) -> None:
    model, inputs = swapped(family)
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in rotary_of(again).encodings.parameters():
            parameter.mul_(2)
        for x in inputs:
            expected = family.call(model, x)
            assert error(family.call(again, x), expected) > 1e-6
        for parameter in rotary_of(again).encodings.parameters():
            parameter.div_(2)
        assert all(torch.equal(family.call(again, x), family.call(model, x)) for x in inputs)


@each_family()
def test_bfloat16(family: Family) -> None:
    model, inputs = swapped(family)
    torch.manual_seed(0)
    plain = family.build()
    with torch.no_grad():
        truth = family.call(plain, inputs[0])

        def halved(one: Any) -> Tensor:
            x = pytree.tree_map_only(Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, inputs[0])
            return family.call(one.bfloat16(), x).float()

        lost, of_swapped = error(halved(plain), truth), error(halved(model), truth)
    assert of_swapped < 2 * lost + 0.02
    assert all(parameter.dtype == torch.float32 for parameter in rotary_of(model).encodings.parameters())


def lora(model: Any, **settings: Any) -> Any:
    """The model with LoRA on the linear layers of its attention."""
    from peft import LoraConfig, get_peft_model

    names = {id(part): name for name, part in model.named_modules()}
    layers = adapters(model)[0].layers
    linear = sorted({names[id(part)] for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)})
    return get_peft_model(model, LoraConfig(target_modules=linear, r=2, init_lora_weights=False, **settings))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@each_family()
def test_lora_before_and_after(family: Family) -> None:
    pytest.importorskip("peft")
    outputs = []
    for before in (True, False):
        torch.manual_seed(0)
        model = family.build()
        inputs = family.inputs(model)
        if not before:
            tr.swap(model, "mixed")
        torch.manual_seed(1)
        tuned = lora(model)
        if before:
            tr.swap(tuned, "mixed")
        outputs.append(family.call(tuned, inputs[0]))
    assert error(*outputs) < 1e-5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@each_family()
def test_encodings_trained_by_peft(family: Family) -> None:
    pytest.importorskip("peft")
    model, inputs = swapped(family)
    tuned = lora(model, modules_to_save=["rotary"])
    family.call(tuned, inputs[0]).square().mean().backward()
    trained = {name: p for name, p in tuned.named_parameters() if "modules_to_save" in name and ".encodings." in name}
    assert trained
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    assert all(p.grad is None for name, p in tuned.named_parameters() if ".original_module." in name)
    before = family.call(tuned, inputs[0])
    with torch.no_grad():
        for parameter in trained.values():
            parameter.mul_(2)
    assert error(family.call(tuned, inputs[0]), before) > 1e-6


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", FIRST)
def test_encodings_that_peft_wraps_are_extended_and_saved_once_merged(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    family = FAMILIES[name]
    model, inputs = swapped(family)
    tuned = lora(model, modules_to_save=["rotary"])
    trained = [p for key, p in tuned.named_parameters() if "modules_to_save" in key and ".encodings." in key]
    with torch.no_grad():
        for parameter in trained:
            parameter.mul_(1.5)
    for call in (partial(tr.extend, factor=1), partial(tr.save, path=tmp_path / "m"), tr.unswap):
        with pytest.raises(ValueError, match=r"must not be wrapped; model\.merge_and_unload\(\) ends peft") as caught:
            call(tuned)
        assert "\n" not in str(caught.value)
    whole = tuned.merge_and_unload()
    assert all(map(torch.equal, rotary_of(whole).encodings.parameters(), trained))
    expected = family.call(whole, inputs[0])
    assert error(family.call(tr.extend(whole, 1), inputs[0]), expected) < 1e-4
    tr.save(whole, tmp_path / "m")
    assert error(family.call(tr.load(tmp_path / "m", into=family.build()), inputs[0]), expected) < 1e-4


ITSELF = {
    ("transformers dinov3_vit", "fsdp2"): "_chunk_cat expects non-empty tensor",
    ("timm eva02", "rounding"): "self and mat2 must have the same dtype",
}
"""What models do not do before a swap either: DINOv3 has a parameter without elements, and Eva tables in float32."""


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, str(SUPPORT / "sharded_families.py"), str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for process in processes:
        _, printed = process.communicate(timeout=900)
        assert process.returncode == 0, printed
    families = json.loads((tmp_path / "found.json").read_text())
    assert families.keys() == FAMILIES.keys()
    for name, found in families.items():
        for wrapper in ("ddp", "fsdp2"):
            reason = ITSELF.get((name, wrapper))
            if reason is not None:
                assert reason in found[wrapper]["error"]
            else:
                assert found[wrapper].get("worst", found[wrapper]) < 1e-4, name
                assert found[wrapper]["dtypes"] == ["torch.float32"]
        if (name, "rounding") in ITSELF:
            assert ITSELF[name, "rounding"] in found["rounding"]["error"]
        else:
            assert found["rounding"]["swapped"] < 1.5 * found["rounding"]["plain"] + 0.01, name
