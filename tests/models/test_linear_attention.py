"""Linear attention: the quadratic formula, gradients, masks, concatenated samples, memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import torchrope as tr
from torchrope.linear_attention import elu_plus_one, linear_attention

WIDE = dict(dtype=torch.float64)
NAMES = ["none", "axial", "mixed", "liere:4", "comrope-ld:4", "comrope-ap:2", "string", "golden", "dinov3", "mrope"]


def quadratic(q: Tensor, k: Tensor, v: Tensor, turns: Tensor, key_turns: Tensor, seen: Tensor) -> Tensor:
    """RoFormer, equation 19, pair by pair; `turns` are R `(heads, tokens, d, d)`, `seen` says who sees whom."""
    of_q, of_k = functional.elu(q) + 1, functional.elu(k) + 1
    turned_q = torch.einsum("...htij,...htj->...hti", turns, of_q)
    turned_k = torch.einsum("...htij,...htj->...hti", key_turns, of_k)
    rotated = torch.einsum("bhmi,bhni->bhmn", turned_q, turned_k) * seen
    plain = torch.einsum("bhmi,bhni->bhmn", of_q, of_k) * seen
    return torch.einsum("bhmn,bhnj->bhmj", rotated, v) / plain.sum(dim=-1, keepdim=True)


def encoding_of(name: str, num_axes: int = 2) -> tr.Encoding:
    return tr.encodings.parse_encoding(name).rotary(num_axes=num_axes, num_heads=2, head_dim=8).double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_linear_attention_equals_the_quadratic_formula(name: str, causal: bool) -> None:
    tokens = 11
    q, k, v = torch.randn(3, 2, 2, tokens, 8, **WIDE)
    rotation = encoding_of(name)(3 * torch.randn(2, tokens, 2, **WIDE))
    seen = torch.ones(tokens, tokens, **WIDE).tril() if causal else torch.ones(tokens, tokens, **WIDE)
    expected = quadratic(q, k, v, rotation.matrix().double(), rotation.matrix().double(), seen)
    mixed = linear_attention(q, k, v, rotation, causal=causal, chunk_size=4)
    assert (mixed - expected).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["axial", "liere:4", "string"])
def test_cross_attention_equals_the_quadratic_formula(name: str) -> None:
    encoding = encoding_of(name)
    q, (k, v) = torch.randn(2, 2, 5, 8, **WIDE), torch.randn(2, 2, 2, 9, 8, **WIDE)
    here, there = encoding(torch.randn(5, 2, **WIDE)), encoding(torch.randn(2, 9, 2, **WIDE))
    expected = quadratic(q, k, v, here.matrix().double(), there.matrix().double(), torch.ones(5, 9, **WIDE))
    assert (linear_attention(q, k, v, here, key_rotation=there) - expected).abs().max() < 1e-10


def test_attention_without_rotation_equals_katharopoulos() -> None:
    q, k, v = torch.randn(3, 2, 2, 7, 8, **WIDE)
    identity = torch.eye(8, **WIDE).expand(2, 7, 8, 8)
    expected = quadratic(q, k, v, identity, identity, torch.ones(7, 7, **WIDE))
    assert (linear_attention(q, k, v) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 13, 64])
def test_chunk_size_does_not_change_results(chunk_size: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 13, 8, **WIDE)
    rotation = encoding_of("mixed")(torch.randn(13, 2, **WIDE))
    expected = quadratic(
        q, k, v, rotation.matrix().double(), rotation.matrix().double(), torch.ones(13, 13, **WIDE).tril()
    )
    mixed = linear_attention(q, k, v, rotation, causal=True, chunk_size=chunk_size)
    assert (mixed - expected).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_may_have_any_values(causal: bool) -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 8, **WIDE)
    rotation = encoding_of("mixed")(torch.randn(6, 2, **WIDE))
    mask = torch.rand(2, 6) > 0.4
    mask[:, 0] = True
    seen = mask[:, None, None].to(**WIDE) * (torch.ones(6, 6, **WIDE).tril() if causal else 1)
    expected = quadratic(q, k, v, rotation.matrix().double(), rotation.matrix().double(), seen)
    unseen = ~mask[:, None, :, None]
    k = k.masked_fill(unseen, torch.nan).requires_grad_()
    v = v.masked_fill(unseen, torch.inf).requires_grad_()
    mixed = linear_attention(q, k, v, rotation, key_mask=mask, causal=causal, chunk_size=4)
    assert (mixed - expected).abs().max() < 1e-10
    mixed.sum().backward()
    for gradient in (k.grad, v.grad):
        assert not gradient[unseen.expand_as(gradient)].any()


def test_fully_masked_queries_give_zero() -> None:
    q, k, v = torch.randn(3, 2, 2, 4, 8)
    assert not linear_attention(q, k, v, key_mask=torch.zeros(2, 4, dtype=torch.bool)).any()
    assert linear_attention(q, k[..., :0, :], v[..., :0, :]).eq(0).all()
    assert linear_attention(*torch.randn(3, 2, 2, 0, 8), causal=True).shape == (2, 2, 0, 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["axial", "mixed", "liere:4", "comrope-ld:4", "string"])
def test_gradients_are_exact(name: str, causal: bool) -> None:
    encoding = encoding_of(name)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 5, 8, **WIDE).unbind())
    positions = torch.randn(5, 2, **WIDE).requires_grad_()
    learned = list(encoding.parameters())

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *_: Tensor) -> Tensor:
        return linear_attention(q, k, v, encoding(positions), causal=causal, chunk_size=2)

    assert torch.autograd.gradcheck(attend, (q, k, v, positions, *learned), fast_mode=True)


def test_feature_map_is_elu_plus_one_and_positive() -> None:
    x = torch.tensor([-30.0, -3.0, -1e-6, 0.0, 1e-6, 4.0], **WIDE).requires_grad_()
    assert torch.allclose(elu_plus_one(x), functional.elu(x) + 1, rtol=0, atol=1e-15)
    assert (elu_plus_one(x.float()) > 0).all()
    assert torch.autograd.gradcheck(elu_plus_one, (torch.tensor([-3.0, -0.1, 0.1, 4.0], **WIDE).requires_grad_(),))
    (at_zero,) = torch.autograd.grad(elu_plus_one(x)[3], x)
    assert at_zero[3] == 1


def test_module_applies_the_function_between_projections() -> None:
    module, x = tr.LinearAttention(16, 2).double(), torch.randn(3, 6, 16, **WIDE)
    rotation = encoding_of("mixed")(torch.randn(6, 2, **WIDE))
    q, k, v = module.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    expected = module.proj(linear_attention(q, k, v, rotation).transpose(1, 2).flatten(2))
    assert torch.equal(module(x, rotation), expected)
    softmax = tr.Attention(16, 2)
    assert {name: p.shape for name, p in module.named_parameters()} == {
        name: p.shape for name, p in softmax.named_parameters()
    }


@pytest.mark.parametrize("kind", [tr.Attention, tr.LinearAttention])
def test_context_equal_to_the_tokens_is_self_attention(kind: type) -> None:
    for bias in (True, False):
        attention = kind(16, 2, qkv_bias=bias).double()
        x = torch.randn(2, 6, 16, **WIDE)
        rotation = encoding_of("liere:4")(torch.randn(6, 2, **WIDE))
        across = attention(x, rotation, context=x, key_rotation=rotation)
        assert (across - attention(x, rotation)).abs().max() < 1e-12
        assert (attention(x, context=x) - attention(x)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [tr.Attention, tr.LinearAttention, partial(tr.LinearAttention, causal=True)])
def test_concatenated_samples_equal_separate_samples(kind: type) -> None:
    attention, encoding = kind(16, 2).double(), encoding_of("mixed")
    lengths = (4, 1, 6)
    x, positions = torch.randn(1, 11, 16, **WIDE), torch.randn(11, 2, **WIDE)
    packed = attention(x, encoding(positions), lengths=lengths)
    alone = [
        attention(tokens, encoding(places))
        for tokens, places in zip(x.split(lengths, dim=1), positions.split(lengths), strict=True)
    ]
    assert (packed - torch.cat(alone, dim=1)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [tr.Attention, tr.LinearAttention])
def test_concatenated_samples_attend_to_their_context(kind: type) -> None:
    attention, encoding = kind(16, 2).double(), encoding_of("string")
    lengths, key_lengths = (2, 3), (4, 1)
    x, context = torch.randn(1, 5, 16, **WIDE), torch.randn(1, 5, 16, **WIDE)
    here, there = torch.randn(2, 5, 2, **WIDE)
    packed = attention(
        x, encoding(here), context=context, key_rotation=encoding(there), lengths=lengths, key_lengths=key_lengths
    )
    alone = [
        attention(own, encoding(place), context=other, key_rotation=encoding(elsewhere))
        for own, place, other, elsewhere in zip(
            x.split(lengths, 1),
            here.split(lengths),
            context.split(key_lengths, 1),
            there.split(key_lengths),
            strict=True,
        )
    ]
    assert (packed - torch.cat(alone, dim=1)).abs().max() < 1e-12


def test_weights_to_a_context_equal_those_used() -> None:
    attention, encoding = tr.Attention(16, 2).double(), encoding_of("mixed")
    x, context = torch.randn(2, 3, 16, **WIDE), torch.randn(2, 5, 16, **WIDE)
    turns = dict(rotation=encoding(torch.randn(3, 2, **WIDE)), key_rotation=encoding(torch.randn(5, 2, **WIDE)))
    weights = attention.weights(x, context=context, **turns)
    values = attention.qkv(context).unflatten(-1, (3, 2, -1))[:, :, 2].transpose(1, 2)
    expected = attention.proj((weights @ values).transpose(1, 2).flatten(2))
    assert (attention(x, context=context, **turns) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 3000, 8)
    rotation = tr.AxialRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(3000, spacing=0.01))
    half = linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), rotation)
    exact = linear_attention(q.to(dtype).float(), k.to(dtype).float(), v.to(dtype).float(), rotation)
    assert half.dtype == dtype
    assert torch.equal(half, exact.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_attention(q, k, v, rotation), linear_attention(q, k, v, rotation))


HEADS = torch.zeros(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tr.LinearAttention(10, 4), "dim must be divisible by num_heads = 4, got 10"),
        (
            lambda: linear_attention(HEADS, HEADS[..., :3, :], HEADS[..., :3, :], causal=True),
            "causal attention needs as many keys as queries, got 3 and 4",
        ),
        (lambda: linear_attention(HEADS, HEADS, HEADS, chunk_size=0), "chunk_size must be 1 or more, got 0"),
        (
            lambda: tr.LinearAttention(16, 2)(torch.zeros(1, 4, 16), bias=torch.zeros(4, 4)),
            r"must be a boolean mask of keys \(batch, 1, 1, keys\), got torch.float32 \(4, 4\)",
        ),
        (
            lambda: tr.LinearAttention(16, 2, causal=True)(torch.zeros(1, 4, 16), context=torch.zeros(1, 4, 16)),
            "causal attention must be self-attention, got a context",
        ),
        (
            lambda: tr.Attention(16, 2)(torch.zeros(1, 4, 16), context=torch.zeros(1, 5, 16), lengths=[4]),
            "tokens and context must both have lengths, got lengths of the tokens only",
        ),
        (
            lambda: tr.Attention(16, 2)(torch.zeros(1, 4, 16), key_lengths=[4]),
            "key_rotation and key_lengths must be None without a context, got key_lengths",
        ),
        (
            lambda: tr.Attention(16, 2)(
                torch.zeros(1, 4, 16), context=torch.zeros(1, 5, 16), lengths=[4], key_lengths=[2, 3]
            ),
            "tokens and their context must have as many samples, got 1 and 2",
        ),
    ],
)
def test_bad_input_raises_one_line_errors(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def step(attention: tr.LinearAttention, encoding: tr.Encoding, tokens: int) -> None:
    x, positions = torch.randn(1, tokens, 2 * encoding.head_dim), torch.rand(tokens, encoding.num_axes)
    attention(x, encoding(positions)).square().sum().backward()


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returns, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["mixed", "liere:4", "comrope-ld:4", "string"])
def test_tensors_grow_at_most_as_fast_as_the_tokens(name: str, causal: bool) -> None:
    attention, encoding = tr.LinearAttention(16, 2, causal=causal), encoding_of(name).float()
    largest = []
    for tokens in (512, 2048):
        with Largest() as seen:
            step(attention, encoding, tokens)
        largest.append(seen.elements)
    assert largest[1] == 4 * largest[0]


def test_benchmark_measures_every_kind(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    linear = pytest.importorskip("linear")  # uses the laboratory's timing
    tiny = dict(TOKENS=(256, 64), MOST_OF_SOFTMAX=64, ROUNDS=1, DIM=16, HEADS=2)
    for name, value in tiny.items():
        monkeypatch.setattr(linear, name, value)
    linear.main(["--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("tokens " in line for line in lines) == 3 + 2


def test_causal_attention_of_packed_samples_needs_as_many_keys_in_each() -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"in each sample, got \[3, 2\] and \[2, 3\]"):
        linear_attention(q, q, q, causal=True, lengths=[2, 3], key_lengths=[3, 2])


@pytest.mark.parametrize(
    ("heads", "mask", "message"),
    [
        (2, torch.ones(2, 4), r"key_mask must be torch.bool \(batch, keys\) = \(2, 4\), got torch.float32 \(2, 4\)"),
        (2, torch.ones(4, dtype=torch.bool), r"= \(2, 4\), got torch.bool \(4,\)"),
        (1, None, "q, k and v must have the same number of heads, got 2, 1 and 1"),
    ],
)
def test_wrong_masks_and_heads_are_one_line(heads: int, mask: Tensor | None, message: str) -> None:
    q, k, v = torch.randn(2, 2, 3, 8), torch.randn(2, heads, 4, 8), torch.randn(2, heads, 4, 8)
    with pytest.raises(ValueError, match=message):
        linear_attention(q, k, v, key_mask=mask)
