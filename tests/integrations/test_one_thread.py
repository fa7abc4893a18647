"""A swapped model whose hooks keep the rotation of a forward refuses a second thread, and nothing else."""

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from diffusing import built, inputs, output
from swapped import MODELS
from torch import Tensor, nn

import torchrope as tr
from torchrope.integrations.rotary import OneThread

MESSAGE = "a swapped timm model runs in one thread at a time; use one copy per thread"


def vit(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = tr.swap(MODELS["vit"](dynamic_img_size=True, **settings), "mixed", init="paper")
    return model.eval()


def flux() -> tuple[Any, Callable[[Any], Tensor]]:
    given = inputs("flux")
    return tr.swap(built("flux"), "mixed"), lambda model: output(model, given)


def while_inside(
    model: nn.Module, layer: nn.Module, run: Callable[[], Tensor], meanwhile: Callable[[], None]
) -> Tensor:
    """Run a model in a second thread, and call `meanwhile` in this one while the other is in a layer."""
    inside, go_on = threading.Event(), threading.Event()
    other: list[int] = []

    def wait(*_: Any) -> None:
        if threading.get_ident() in other:
            inside.set()
            go_on.wait(60)

    def first() -> Tensor:
        other.append(threading.get_ident())
        return run().detach()

    handle = layer.register_forward_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(first)
        assert inside.wait(60)
        try:
            meanwhile()
        finally:
            go_on.set()
        answer = result.result(60)
    handle.remove()
    return answer


@pytest.mark.parametrize("call", ["forward", "forward_features"])
@pytest.mark.parametrize("part", ["patch_embed", "pos_drop", "blocks.0.attn.qkv", "blocks.0", "blocks.1.mlp"])
def test_second_thread_inside_a_timm_model_raises_and_the_first_is_right_or_raises(call: str, part: str) -> None:
    model, x = vit(), torch.randn(1, 3, 64, 32)
    expected = getattr(model, call)(x)
    refused: list[str] = []

    def meanwhile() -> None:
        try:
            getattr(model, call)(x.mT)
        except RuntimeError as error:
            refused.append(str(error))

    try:
        answer = while_inside(model, model.get_submodule(part), lambda: getattr(model, call)(x), meanwhile)
        assert torch.equal(answer, expected)
    except RuntimeError as error:
        refused.append(str(error))
    assert refused
    assert all(message.startswith(MESSAGE) for message in refused)
    assert torch.equal(getattr(model, call)(x), expected)


def test_second_thread_inside_a_diffusion_model_raises_and_the_first_is_right() -> None:
    model, run = flux()
    expected = run(model)

    def meanwhile() -> None:
        with pytest.raises(RuntimeError, match="a swapped diffusers model runs in one thread at a time"):
            run(model)

    layer = model.transformer_blocks[0].attn.to_out[0]
    assert torch.equal(while_inside(model, layer, lambda: run(model), meanwhile), expected)
    copied = copy.deepcopy(model)
    own: list[Tensor] = []
    while_inside(model, layer, lambda: run(model), lambda: own.append(run(copied)))
    assert torch.equal(own[0], expected)


def test_threads_one_after_the_other_and_forwards_that_raise() -> None:
    model, x = vit(), torch.randn(1, 3, 64, 64)
    expected = model(x)
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        model(x[:, :2])
    handle = model.blocks[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    with pytest.raises(ZeroDivisionError):
        model.forward_features(x)
    handle.remove()
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(model, x).result(60), expected)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_recomputed_in_the_thread_of_the_backward_pass(reentrant: bool) -> None:
    model = vit().train()
    x = torch.randn(1, 3, 64, 64)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.rotary.parameters()]
    model.zero_grad()
    x.requires_grad_()
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    for block in model.blocks:
        tokens = torch.utils.checkpoint.checkpoint(block, tokens, use_reentrant=reentrant)
    scores = model.forward_head(model.norm(tokens))
    with ThreadPoolExecutor(1) as pool:  # a GPU's backward pass has a thread of its own
        pool.submit(scores.sum().backward).result(60)
    for parameter, truth in zip(model.rotary.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, truth, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("build", [vit, lambda: flux()[0]])
def test_compiled_in_one_graph_without_the_lock(build: Callable[[], Any]) -> None:
    model = build()
    run: Any = (lambda m: m(torch.ones(1, 3, 64, 64))) if hasattr(model, "patch_embed") else flux()[1]
    expected = run(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(run(compiled), expected)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(run, model).result(60), expected)


def test_lock_is_not_copied() -> None:
    one = OneThread("timm")
    one.enter(nn.Identity(), None)
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other.enter, nn.Identity(), None).result(60)


class Wrapper(nn.Module):
    """As peft's ModulesToSaveWrapper: the module and a trained copy of it, which its forward calls."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save["default"](*args, **kwargs)


@pytest.mark.parametrize("name", ["timm", "transformers", "diffusers"])
def test_rotary_wrapped_by_peft_is_refused_with_the_line_that_works(name: str) -> None:
    if name == "diffusers":
        model, run = flux()
        tower = model
    elif name == "timm":
        model, run = vit(), lambda m: m(torch.ones(1, 3, 64, 64))
        tower = model
    else:
        from rotating import decoder, tokens

        model, words = tr.swap(decoder("llama"), "mixed"), tokens()
        tower, run = model.model, lambda m: m(words).logits
    expected = run(model)
    installed = tower.rotary
    tower.rotary = Wrapper(installed)
    with pytest.raises(
        ValueError, match=r'got Wrapper; .* modules_to_save=\[f"encodings.{i}" for i in range\(depth\)\]'
    ):
        run(model)
    tower.rotary = installed
    for index, encoding in enumerate(installed.encodings):
        installed.encodings[index] = Wrapper(encoding)
    if name != "transformers":
        with torch.no_grad():
            installed.encodings[0].modules_to_save["default"].frequencies.mul_(3)
        assert not torch.allclose(run(model), expected)
