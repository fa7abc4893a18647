"""Attention: masks, norms before the rotation, and attention weights."""

import math

import pytest
import torch
from torch import Tensor, nn

import torchrope as tr
from torchrope.attention import Windows


def attended(attention: tr.Attention, x: Tensor, weights: Tensor) -> Tensor:
    """The output for given weights `(batch, heads, tokens, tokens)`."""
    values = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1))[:, :, 2].transpose(1, 2)
    return attention.proj((weights @ values).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("kind", ["none", "bias", "of each head", "mask"])
def test_weights_equal_those_used_in_attention(kind: str, rotated: bool) -> None:
    attention, x = tr.Attention(16, 2), torch.randn(3, 6, 16)
    rotation = tr.LieRE(num_axes=1, num_heads=2, head_dim=8, block_size=4)(tr.grid(6)) if rotated else None
    bias = {
        "none": None,
        "bias": torch.randn(6, 6),
        "of each head": torch.randn(3, 2, 6, 6),
        "mask": torch.rand(6, 6).fill_diagonal_(1.0) > 0.5,
    }[kind]
    weights = attention.weights(x, rotation, bias=bias)
    assert weights.shape == (3, 2, 6, 6)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, 2, 6))
    torch.testing.assert_close(attention(x, rotation, bias=bias), attended(attention, x, weights), rtol=1e-4, atol=1e-5)


def test_mask_true_lets_a_query_attend_to_a_key() -> None:
    attention, x = tr.Attention(16, 2), torch.randn(1, 4, 16)
    seen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]).bool()
    weights = attention.weights(x, bias=seen)
    assert (weights[..., ~seen] == 0).all()
    assert (weights[..., seen] > 0).all()
    changed = x.clone()
    changed[:, 2:] += 1
    assert torch.equal(attention(x, bias=seen)[:, :2], attention(changed, bias=seen)[:, :2])


def test_weights_are_the_softmax_of_rotated_scores() -> None:
    attention, x = tr.Attention(16, 2), torch.randn(2, 5, 16)
    rotation = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(5))
    q, k, _ = attention.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    matrix, bias = rotation.matrix(), torch.randn(5, 5)
    turned = [torch.einsum("htij,bhtj->bhti", matrix, each) for each in (q, k)]
    scores = turned[0] @ turned[1].mT / math.sqrt(8) + bias
    torch.testing.assert_close(attention.weights(x, rotation, bias=bias), scores.softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_norms_are_applied_before_the_rotation(kind: type[nn.Module], rotated: bool) -> None:
    attention, x = tr.Attention(16, 2, qk_norm=kind), torch.randn(3, 6, 16)
    for norm in (attention.q_norm, attention.k_norm):
        nn.init.normal_(norm.weight)
    rotation = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(6)) if rotated else None
    q, k, _ = attention.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    q, k = attention.q_norm(q), attention.k_norm(k)
    turned = (q, k) if rotation is None else tr.rotate(q, k, rotation)
    weights = (turned[0] @ turned[1].mT / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(attention.weights(x, rotation), weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention(x, rotation), attended(attention, x, weights), rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(attended(attention, x, weights).square().sum(), attention.q_norm.weight)
    found = torch.autograd.grad(attention(x, rotation).square().sum(), attention.q_norm.weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_norms_with_hooks_are_called() -> None:
    attention, x, seen = tr.Attention(16, 2, qk_norm=nn.RMSNorm), torch.randn(3, 6, 16), []
    rotation = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(6))
    expected = attention(x, rotation)
    attention.k_norm.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(attention(x, rotation), expected)
    assert seen == [1]


def test_state_dict_without_norms_has_no_norm_weights() -> None:
    assert set(tr.Attention(16, 2).state_dict()) == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    added = set(tr.Attention(16, 2, qk_norm=nn.RMSNorm).state_dict()) - set(tr.Attention(16, 2).state_dict())
    assert added == {"q_norm.weight", "k_norm.weight"}


def test_weights_of_a_query_without_keys_are_zero() -> None:
    attention, x = tr.Attention(8, 2), torch.randn(1, 3, 8)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    weights = attention.weights(x, bias=mask)
    assert torch.equal(weights.sum(dim=-1).round(decimals=5), torch.tensor([1.0, 0.0, 1.0]).expand(1, 2, 3))
    added = torch.zeros(3, 3).masked_fill(~mask, -torch.inf)
    assert torch.equal(attention.weights(x, bias=added), weights)


def test_gradients_of_weights_are_finite_where_a_bias_leaves_no_key() -> None:
    attention, x = tr.Attention(8, 2), torch.randn(1, 3, 8)
    bias = torch.zeros(3, 3)
    bias[0] = -torch.inf
    attention.weights(x, bias=bias).square().sum().backward()
    assert attention.qkv.weight.grad.isfinite().all()


def test_windows_take_no_lengths() -> None:
    with pytest.raises(ValueError, match="window attention must be within one lattice, got lengths"):
        tr.Attention(8, 2)(torch.randn(1, 4, 8), lengths=[1, 3], within=Windows((4,), (2,), (0,)))
