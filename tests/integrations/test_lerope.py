"""Tests of LeRoPE in a text model: gradients and training are those of transformers with learnable frequencies."""

import inspect
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings import LeRoPE

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

HEAD_DIM = 8


def llama(**settings: Any) -> Any:
    """A Llama with two layers, and two query heads for each key head."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 16,
        "initializer_range": 0.2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, **settings}))


def learnable(model: Any) -> Tensor:
    """Make transformers' own rotary embedding compute its tables from e^α times its frequencies; return α."""
    rope = model.model.rotary_emb
    theta, alpha = rope.inv_freq.clone(), torch.zeros(HEAD_DIM // 2, requires_grad=True)
    plain = inspect.unwrap(type(rope).forward)  # without its no_grad

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.inv_freq = theta * alpha.exp()
        return plain(self, x, position_ids)

    rope.forward = MethodType(forward, rope)
    return alpha


def repeated(seed: int, count: int = 8) -> Tensor:
    """Sequences whose tokens repeat after 6: the next one depends on an offset alone."""
    drawn = torch.randint(0, 16, (count, 6), generator=torch.Generator().manual_seed(seed))
    return drawn.repeat(1, 4)


def groups(model: Any, scales: list[Tensor], rate: float) -> list[dict[str, Any]]:
    """Parameter groups: the frequencies have a learning rate of their own and no weight decay."""
    others = [p for p in model.parameters() if all(p is not scale for scale in scales)]
    return [{"params": others}, {"params": scales, "lr": rate, "weight_decay": 0.0}]


def train(model: Any, scale: Tensor, steps: int) -> list[float]:
    """Train by AdamW; return the loss of every step."""
    optimizer = torch.optim.AdamW(groups(model, [scale], 3e-2), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        ids = repeated(step)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_gradients_are_those_of_autograd_through_the_eager_model(theta: float) -> None:
    settings = {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    plain, swapped, ids = llama(**settings), llama(**settings), repeated(0)
    alpha = learnable(plain)
    encoding = LeRoPE(num_axes=1, head_dim=HEAD_DIM)
    tr.swap(swapped, encoding, init="model")
    torch.testing.assert_close(encoding.frequencies_per_axis().flatten(), plain.model.rotary_emb.inv_freq)
    losses = [model(ids, labels=ids).loss for model in (plain, swapped)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    assert alpha.grad.abs().max() > 1e-6
    torch.testing.assert_close(encoding.log_scale.grad, alpha.grad, atol=1e-7, rtol=1e-3)
    expected = dict(plain.named_parameters())
    for name, parameter in swapped.named_parameters():
        if "rotary" not in name:
            torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-4)


def test_mixed_has_the_gradients_of_the_frequencies_themselves() -> None:
    plain, swapped, ids = llama(), llama(), repeated(0)
    alpha = learnable(plain)
    mixed = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=HEAD_DIM)
    tr.swap(swapped, mixed, init="model")
    for model in (plain, swapped):
        model(ids, labels=ids).loss.backward()
    times_theta = mixed.frequencies.grad * mixed.frequencies.detach()  # d/dα = θ d/dθ at α = 0
    torch.testing.assert_close(times_theta.flatten(), alpha.grad, atol=1e-7, rtol=1e-3)


def test_training_takes_the_steps_of_the_eager_model_and_moves_the_frequencies() -> None:
    plain, swapped = llama(), llama()
    alpha = learnable(plain)
    encoding = LeRoPE(num_axes=1, head_dim=HEAD_DIM)
    tr.swap(swapped, encoding, init="model")
    before = encoding.frequencies_per_axis().detach().clone()
    losses = train(swapped, encoding.log_scale, 100)
    assert losses[:10] == pytest.approx(train(plain, alpha, 10), rel=1e-4)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    moved = encoding.frequencies_per_axis().detach() / before
    assert (moved > 0).all()
    assert (moved - 1).abs().max() > 0.1
    assert len({id(one) for one in swapped.model.rotary.encodings}) == 1  # shared by the layers


def test_a_step_of_adam_is_a_factor_also_of_the_lowest_frequency() -> None:
    lerope = LeRoPE(num_axes=1, head_dim=64)
    mixed = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=64)
    mixed.set_frequencies(lerope.frequencies_per_axis())
    for encoding, largest in ((lerope, 1.02), (mixed, 50.0)):
        before = encoding.frequencies_per_axis().detach().clone()
        optimizer = torch.optim.Adam(encoding.parameters(), lr=1e-2)
        (-encoding(tr.grid(100)).angles().sum()).backward()
        optimizer.step()
        factor = (encoding.frequencies_per_axis().detach() / before).max().item()
        assert factor < largest if encoding is lerope else factor > largest


def test_learned_factors_are_saved_scaled_and_kept_in_float32(tmp_path: Path) -> None:
    model, ids = llama().eval(), repeated(1)
    encoding = LeRoPE(num_axes=1, head_dim=HEAD_DIM)
    tr.swap(model, encoding, init="model")
    with torch.no_grad():
        encoding.log_scale.copy_(torch.tensor([0.1, -0.5, 1.0, -2.0]))
    expected = model(ids).logits
    tr.save(model, tmp_path / "model.safetensors")
    again = tr.load(tmp_path / "model.safetensors", into=llama().eval())
    torch.testing.assert_close(again(ids).logits, expected, atol=1e-5, rtol=0)
    assert again.model.rotary.encodings[0].log_scale.requires_grad
    larger = tr.extend(encoding, 4, method="interpolate")
    torch.testing.assert_close(larger.frequencies_per_axis(), encoding.frequencies_per_axis() / 4)
    assert not larger.log_scale.any()
    assert model.bfloat16().model.rotary.encodings[0].log_scale.dtype == torch.float32


def test_starts_as_rope_to_the_bit_on_any_number_of_axes() -> None:
    for axes in (1, 2, 3):
        sizes = {"num_axes": axes, "num_heads": 2, "head_dim": 12, "base": 300.0}
        lerope, axial = LeRoPE(**sizes), tr.AxialRoPE(**sizes)
        positions = torch.randn(5, axes)
        assert torch.equal(lerope(positions).matrix(), axial(positions).matrix())


def test_zeros_and_wrong_sizes_are_refused_in_one_line() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    with pytest.raises(
        ValueError, match=r"must not be zero: swap a model without RoPE by init='paper', got zero_\(\)$"
    ):
        tr.swap(vit, LeRoPE)
    with pytest.raises(ValueError, match=r"^head_dim must be divisible by 2·num_axes = 4, got 6"):
        LeRoPE(num_axes=2, head_dim=6)
    with pytest.raises(ValueError, match=r"^base must be above 0, got -1\.0$"):
        LeRoPE(num_axes=1, head_dim=8, base=-1.0)
    with pytest.raises(ValueError, match="LeRoPE needs the same generators in all heads"):
        LeRoPE(num_axes=1, num_heads=2, head_dim=4).set_frequencies(torch.tensor([[[1.0, 2.0], [1.0, 3.0]]]))
