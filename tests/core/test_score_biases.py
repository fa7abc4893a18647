"""Biases of offsets and distances: formulas, other sizes, points, and `score_mod` equal to the stored bias."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import torchrope as tr
from torchrope.encodings import FIRE, ALiBi, LookHere, OffsetBias, RelativePositionBias

KINDS = (ALiBi, FIRE, LookHere, RelativePositionBias)
SIZES = [(7,), (3, 5), (2, 3, 4)]


def _bias(kind: type[OffsetBias], sizes: tuple[int, ...], heads: int = 6) -> OffsetBias:
    torch.manual_seed(0)
    return kind(sizes=sizes, num_heads=heads).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
def test_score_mod_is_the_stored_bias(kind: type[OffsetBias], sizes: tuple[int, ...], prefix: int) -> None:
    bias = _bias(kind, sizes)
    larger = tuple(size + 1 for size in sizes)
    tokens = math.prod(larger) + prefix
    q, k, v = torch.randn(3, 2, 6, tokens, 8, dtype=torch.float64)
    stored = torch.nn.functional.pad(bias(*larger), (prefix, 0, prefix, 0))
    with torch.no_grad():
        output = flex_attention(q, k, v, score_mod=bias.score_mod(*larger, prefix=prefix))
    torch.testing.assert_close(output, scaled_dot_product_attention(q, k, v, attn_mask=stored.detach()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_flex_attention_has_the_stored_bias(kind: type[OffsetBias]) -> None:
    bias = _bias(kind, (4, 4)).float()
    q, k, v = torch.randn(3, 2, 6, 35, 16)
    with torch.no_grad():
        output = torch.compile(flex_attention)(q, k, v, score_mod=bias.score_mod(5, 7))
    torch.testing.assert_close(output, scaled_dot_product_attention(q, k, v, attn_mask=bias(5, 7).detach()))


def test_score_mod_gives_fire_the_gradients_of_the_stored_bias() -> None:
    bias = _bias(FIRE, (3, 4))
    weights = torch.randn(6, 12, 12, dtype=torch.float64)
    head, query, key = torch.meshgrid(torch.arange(6), torch.arange(12), torch.arange(12), indexing="ij")
    zeros = torch.zeros(6, 12, 12, dtype=torch.float64)
    by_index = bias.score_mod(3, 4)(zeros, torch.tensor(0), head, query, key)
    parameters = [*bias.parameters()]
    expected = torch.autograd.grad((weights * bias(3, 4)).sum(), parameters)
    torch.testing.assert_close(torch.autograd.grad((weights * by_index).sum(), parameters), expected)
    assert all(gradient.abs().sum() > 0 for gradient in expected[2:])


@pytest.mark.parametrize("sizes", SIZES)
def test_alibi_is_a_multiple_of_the_distance(sizes: tuple[int, ...]) -> None:
    places = tr.grid(*sizes, dtype=torch.float64)
    bias = _bias(ALiBi, sizes, heads=8)(*sizes)
    slopes = 2.0 ** -torch.arange(1.0, 9.0, dtype=torch.float64)
    torch.testing.assert_close(bias, -slopes[:, None, None] * torch.cdist(places, places))


@pytest.mark.parametrize(
    ("heads", "exponents"), [(1, [8]), (2, [4, 8]), (3, [4, 8, 2]), (6, [2, 4, 6, 8, 1, 3]), (12, None)]
)
def test_alibi_slopes(heads: int, exponents: list[float] | None) -> None:
    if exponents is None:  # Press et al.: of the next lower power of two, then every other of the next higher
        exponents = [*range(1, 9), 0.5, 1.5, 2.5, 3.5]
    expected = torch.tensor([2.0**-exponent for exponent in exponents])
    torch.testing.assert_close(ALiBi(sizes=(3,), num_heads=heads).slopes, expected)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("factor", [1, 2])
def test_fire_is_the_formula_of_the_paper(sizes: tuple[int, ...], factor: int) -> None:
    bias = _bias(FIRE, sizes)
    assert isinstance(bias, FIRE)
    larger = [factor * size for size in sizes]
    places = tr.grid(*larger, dtype=torch.float64)
    distance = torch.cdist(places, places)
    trained = math.hypot(*(size - 1 for size in sizes))
    share = (0.1 * distance + 1).log() / math.log(0.1 * max(float(distance.max()), trained) + 1)
    hidden = torch.relu(torch.nn.functional.linear(share.unsqueeze(-1), bias.inner.weight, bias.inner.bias))
    expected = torch.nn.functional.linear(hidden, bias.outer.weight, bias.outer.bias).movedim(-1, 0)
    torch.testing.assert_close(bias(*larger), expected)


def test_fire_of_smaller_inputs_is_that_of_training() -> None:
    bias = _bias(FIRE, (5, 5))
    torch.testing.assert_close(bias.by_offset(3, 3), bias.by_offset(5, 5)[:, 2:7, 2:7])


@pytest.mark.parametrize("kind", [ALiBi, FIRE])
def test_biases_of_distance_take_points(kind: type[ALiBi] | type[FIRE]) -> None:
    bias = kind(sizes=(4, 4), num_heads=2).double()
    places = tr.grid(4, 4, dtype=torch.float64)
    torch.testing.assert_close(bias.of_distance(torch.cdist(places, places)), bias(4, 4))
    assert bias.of_distance(torch.zeros(0, 3, dtype=torch.float64)).shape == (2, 0, 3)
    assert bias.of_distance(torch.zeros(2, 2, dtype=torch.float64)).isfinite().all()
    with pytest.raises(ValueError, match="needs 2 sizes, one per axis, got 1"):
        bias.score_mod(3)


def test_fire_needs_hidden_units() -> None:
    with pytest.raises(ValueError, match="hidden_dim must be 1 or more, got 0"):
        FIRE(sizes=(2,), num_heads=1, hidden_dim=0)


def test_autocast_does_not_round_a_learned_function_of_the_distance() -> None:
    bias = FIRE(sizes=(4, 4), num_heads=3)
    expected = bias(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bias(4, 4), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_field_of_view_is_the_same_in_all_dtypes(dtype: torch.dtype) -> None:
    bias = LookHere(sizes=(40, 40), num_heads=6, fov=90)
    in_view = bias.by_offset(40, 40) > -math.inf
    other = bias.to(dtype).by_offset(40, 40)
    assert other.dtype == dtype
    assert torch.equal(other > -math.inf, in_view)
