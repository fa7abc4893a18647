"""A swapped model may run in several threads, each with an input of its own, as before the swap."""

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

    layer, second = model.get_submodule(part), lambda: others.append(getattr(model, call)(x.mT))
    answer = while_inside(model, layer, lambda: getattr(model, call)(x), second)
    assert torch.equal(answer, expected)
    assert torch.equal(others[0], of_other)


class Patches(nn.Module):
    """Embeds tokens of rectangular patches; attention splits q, k and v along an axis."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(3, 32, (4, 16), (4, 16)), nn.Flatten(2), Transposed())
        self.layers = nn.ModuleList([Split(axis), Split(axis)])

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():  # the embedding is frozen
            tokens = self.embed(images)
        return self.layers[0](tokens) + self.layers[1](tokens)


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


def family_of(kind: type, intercept: Any) -> Any:
    return tr.integrations.ModelFamily(
        f"*.{kind.__qualname__}",
        layers="layers.*",
        shape=lambda model, layer: tr.integrations.AttentionShape(2, 16, (8, 2)),
        positions=tr.integrations.FromPatches("embed"),
        intercept=intercept,
    )


def test_tokens_of_rectangular_patches() -> None:
    tr.integrations.register_family(family_of(Patches, tr.integrations.Sdpa()))
    model, seen = tr.swap(Patches(), "mixed"), []
    model.rotary.encodings[0].register_forward_hook(lambda encoding, given, rotation: seen.append(given[0]))
    model.layers[0].forward = model.layers[1].forward = lambda x: x  # positions alone matter
    model(torch.randn(1, 3, 32, 32))
    assert torch.equal(seen[0], tr.grid(8, 2))
    model.embed[0].stride = (4, 8)  # patches overlap
    with pytest.raises(ValueError, match=r"FromPatches needs locate=, got \(1, 24, 32\) for \(1, 3, 32, 32\)$"):
        model(torch.randn(1, 3, 32, 32))
    model.embed[0] = nn.Conv1d(3, 32, 4, 4)
    with pytest.raises(ValueError, match=r"FromPatches\('embed'\) needs locate= for data of one axis"):
        model(torch.randn(1, 3, 32))


@pytest.mark.parametrize("encoding", ["mixed", tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16).zero_()])
def test_encodings_learn_where_tokens_are_made_without_gradients(encoding: Any) -> None:
    tr.integrations.register_family(family_of(Patches, tr.integrations.Sdpa()))
    model = tr.swap(Patches(), encoding)
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    assert all(parameter.grad.any() for parameter in model.rotary.parameters())


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: model.load_state_dict({n: x * 0.9 for n, x in model.state_dict().items()}),
    "of one layer": lambda model: model.rotary.encodings[1].frequencies.data.mul_(2),
    "assigned": lambda model: model.load_state_dict({n: x * 0.9 for n, x in model.state_dict().items()}, assign=True),
    "encoding": lambda model: model.rotary.encodings[0].zero_(),
    "dtype": lambda model: model.double(),
    "hook": lambda model: model.rotary.encodings[0].register_forward_hook(lambda *given: given[-1].inverse()),
    "size": lambda model: None,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_rotations_of_earlier_forwards_follow_whatever_changes(change: str) -> None:
    model, x = vit(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = [model(x) for _ in range(4)]
        passed = {name: parameter.unsqueeze(0) for name, parameter in model.named_parameters()}
        mapped = torch.vmap(lambda one: torch.func.functional_call(model, one, (x,)))(passed)
    assert all(torch.equal(output, before[0]) for output in before)
    torch.testing.assert_close(mapped[0], before[0])
    CHANGES[change](model)
    x = torch.randn(2, 3, 32, 64) if change == "size" else x.to(next(model.parameters()).dtype)
    expected = model(x)  # with gradients, where nothing is kept
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert change in ("size", "dtype") or (expected - before[0]).abs().max() > 1e-5


def test_split_along_another_axis_is_refused() -> None:
    tr.integrations.register_family(family_of(Patches, tr.integrations.AfterSplit()))
    with pytest.raises(ValueError, match=r"qkv\.unbind\(0\), which .* got a Split that calls it 0 times$"):
        tr.swap(Patches(2), "mixed")


def test_what_is_no_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^family must be a ModelFamily, got 'timm'$"):
        tr.integrations.register_family("timm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^intercept must be an object like Sdpa\(\) or a function .*, got .*Sdpa'>$"):
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
