"""A swapped model may run in several threads, each with an input of its own, as before the swap."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from diffusing import built, inputs, output
from every_family import Family, every_family
from swapped import MODELS
from torch import Tensor, nn

import torchrope as tr


def vit(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = tr.swap(MODELS["vit"](dynamic_img_size=True, **settings), "mixed", init="paper")
    return model.eval()


def flux() -> tuple[Any, Callable[[Any], Tensor]]:
    given = inputs("flux")
    return tr.swap(built("flux"), "mixed"), lambda model: output(model, given)


@torch.no_grad()
def run_in_threads(family: Family, rounds: int = 6) -> None:
    """Call a swapped model in three threads with three inputs at once, and compare with the outputs in one thread."""
    model = family.build()
    drawn = family.inputs(model)
    tr.swap(model, "mixed")
    expected = [family.call(model, one) for one in drawn]
    together = threading.Barrier(3)

    def run(number: int) -> list[Tensor]:
        found = []
        with torch.no_grad():
            for _ in range(rounds):
                together.wait(60)
                found.append(family.call(model, drawn[number]))
        return found

    with ThreadPoolExecutor(3) as pool:
        for outputs, truth in zip(pool.map(run, range(3)), expected, strict=True):
            for found in outputs:
                torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, id=one.name, marks=() if one.name in ("eva02", "flux", "llama") else pytest.mark.slow)
        for one in every_family()
    ],
)
def test_three_threads_with_three_sizes(family: Family) -> None:
    run_in_threads(family)


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
def test_both_are_right_wherever_the_second_thread_comes_in(call: str, part: str) -> None:
    model, x = vit(), torch.randn(1, 3, 64, 32)
    expected, of_other = getattr(model, call)(x), getattr(model, call)(x.mT)
    others: list[Tensor] = []

    def meanwhile() -> None:
        others.append(getattr(model, call)(x.mT))

    answer = while_inside(model, model.get_submodule(part), lambda: getattr(model, call)(x), meanwhile)
    assert torch.equal(answer, expected)
    assert torch.equal(others[0], of_other)


def test_diffusion_model_in_the_same_layer_of_two_threads() -> None:
    model, run = flux()
    expected, other = run(model), inputs("flux", 5, 4)
    of_other, others = output(model, other), []
    layer = model.transformer_blocks[0].attn.to_out[0]
    answer = while_inside(model, layer, lambda: run(model), lambda: others.append(output(model, other)))
    assert torch.equal(answer, expected)
    assert torch.equal(others[0], of_other)


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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_recomputed_in_the_thread_of_the_backward_pass(reentrant: bool, shared: bool) -> None:
    torch.manual_seed(0)
    encoding = tr.LieRE(num_axes=2, num_heads=2, head_dim=16, block_size=8) if shared else "liere:8"
    model = tr.swap(MODELS["vit"](dynamic_img_size=True), encoding, init="paper").train()
    small, large = torch.randn(1, 3, 64, 64), torch.randn(1, 3, 64, 96)
    (model(small).sum() + model(large).sum()).backward()
    expected = [parameter.grad.clone() for parameter in model.rotary.parameters()]
    model.zero_grad()

    def checkpointed(x: Tensor) -> Tensor:
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(x.requires_grad_())))
        for block in model.blocks:
            tokens = torch.utils.checkpoint.checkpoint(block, tokens, use_reentrant=reentrant)
        scores: Tensor = model.forward_head(model.norm(tokens)).sum()
        return scores

    scores = checkpointed(small) + checkpointed(large)
    with ThreadPoolExecutor(1) as pool:  # a GPU's backward pass has a thread of its own
        pool.submit(scores.backward).result(60)
    for parameter, truth in zip(model.rotary.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, truth, atol=1e-5 * truth.abs().max().item())


def test_input_that_is_used_again_with_other_positions() -> None:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([MODELS["vit"]().blocks[0].attn])

        def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
            for layer in self.layers:
                tokens = layer(tokens)
            return tokens

    tr.integrations.register_family(
        tr.integrations.ModelFamily(
            f"*.{Points.__qualname__}",
            layers="layers.*",
            shape=lambda model, layer: tr.integrations.AttentionShape(2, 16, (1, 1), sized=False),
            positions=tr.integrations.FromCoordinates("places", 1),
            meets=tr.integrations.AfterNorms(),
        )
    )
    model = tr.swap(Points(), "mixed", init="paper")
    tokens, first, second = torch.randn(1, 7, 32), torch.rand(1, 7, 2), torch.rand(1, 7, 2)
    before = model(tokens, second)
    model(tokens, first)
    assert torch.equal(model(tokens, second), before)
    with pytest.raises(ValueError, match="layers of a swapped model must be called through the model"):
        model.layers[0](tokens)


def test_lattice_of_one_axis_is_not_guessed() -> None:
    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv1d(1, 32, kernel_size=4, stride=4)
            self.layers = nn.ModuleList([MODELS["vit"]().blocks[0].attn])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](self.embed(x).mT)

    tr.integrations.register_family(
        tr.integrations.ModelFamily(
            f"*.{Series.__qualname__}",
            layers="layers.*",
            shape=lambda model, layer: tr.integrations.AttentionShape(2, 16, (8,)),
            positions=tr.integrations.FromPatches("embed"),
            meets=tr.integrations.AfterNorms(),
        )
    )
    model = tr.swap(Series(), "mixed", init="paper")
    with pytest.raises(ValueError, match=r"FromPatches\('embed'\) needs place= for data of one axis"):
        model(torch.randn(1, 1, 32))


class Patches(nn.Module):
    """Embeds tokens of rectangular patches; attention splits q, k and v along an axis."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(3, 32, (4, 16), (4, 16)), nn.Flatten(2), Transposed())
        self.layers = nn.ModuleList([Split(axis)])

    def forward(self, images: Tensor) -> Tensor:
        return self.layers[0](self.embed(images))


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Split(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).unflatten(-1, (3, 2, 16))
        q, k, v = (x.transpose(1, 2) for x in packed.movedim(2, self.axis).unbind(self.axis))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def family_of(kind: type, meets: Any) -> Any:
    return tr.integrations.ModelFamily(
        f"*.{kind.__qualname__}",
        layers="layers.*",
        shape=lambda model, layer: tr.integrations.AttentionShape(2, 16, (8, 2)),
        positions=tr.integrations.FromPatches("embed"),
        meets=meets,
    )


def test_tokens_of_rectangular_patches() -> None:
    tr.integrations.register_family(family_of(Patches, tr.integrations.Sdpa()))
    model, seen = tr.swap(Patches(), "mixed"), []
    model.rotary.encodings[0].register_forward_hook(lambda encoding, given, rotation: seen.append(given[0]))
    model.layers[0].forward = lambda x: x  # positions alone matter
    model(torch.randn(1, 3, 32, 32))
    assert torch.equal(seen[0], tr.grid(8, 2))
    model.embed[0].stride = (4, 8)  # patches overlap
    with pytest.raises(ValueError, match=r"FromPatches needs place=, got \(1, 24, 32\) for \(1, 3, 32, 32\)$"):
        model(torch.randn(1, 3, 32, 32))


def test_split_along_another_axis_is_refused() -> None:
    tr.integrations.register_family(family_of(Patches, tr.integrations.AfterSplit()))
    with pytest.raises(ValueError, match=r"qkv\.unbind\(0\), which .* got a Split that calls it 0 times$"):
        tr.swap(Patches(2), "mixed")


def test_what_is_no_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^family must be a ModelFamily, got 'timm'$"):
        tr.integrations.register_family("timm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^meets must be an object such as Sdpa\(\), or a function .*, got .*Sdpa'>$"):
        tr.integrations.register_family(family_of(Patches, tr.integrations.Sdpa))


@pytest.mark.slow
@pytest.mark.parametrize("build", [vit, lambda: flux()[0]])
def test_compiled_in_one_graph_and_eager_in_another_thread(build: Callable[[], Any]) -> None:
    model = build()
    run: Any = (lambda m: m(torch.ones(1, 3, 64, 64))) if hasattr(model, "patch_embed") else flux()[1]
    expected = run(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(run(compiled), expected)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(run, model).result(60), expected)


class Wrapper(nn.Module):
    """As peft's ModulesToSaveWrapper: the module and a trained copy, to which calls and attributes are forwarded."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save["default"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["modules_to_save"]["default"], name)


@pytest.mark.parametrize("name", ["timm", "transformers", "diffusers"])
def test_encodings_are_looked_up_in_the_model_at_every_call(name: str) -> None:
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
    tower.rotary = Wrapper(tower.rotary)
    assert torch.equal(run(model), expected)
    with torch.no_grad():
        for parameter in tower.rotary.modules_to_save["default"].parameters():
            parameter.mul_(3)
    changed = run(model)
    assert not torch.allclose(changed, expected)
    run(model).square().sum().backward()
    assert all(p.grad is not None for p in tower.rotary.modules_to_save["default"].parameters())
    assert all(p.grad is None for p in tower.rotary.original_module.parameters())
