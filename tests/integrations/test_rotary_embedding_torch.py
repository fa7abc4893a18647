"""`RotaryEmbedding` and its functions against the package rotary-embedding-torch, in float64 and with gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchrope.integrations import rotary_embedding_torch as ours

theirs = pytest.importorskip("rotary_embedding_torch.rotary_embedding_torch")


def both(**settings: Any) -> list[Any]:
    return [module.RotaryEmbedding(**settings) for module in (ours, theirs)]


def close(found: Any, expected: Any, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(theta=100, theta_rescale_factor=4.0),
        dict(freqs_for="pixel", max_freq=20),
        dict(freqs_for="constant", num_freqs=4),
        dict(custom_freqs=torch.tensor([1.0, 0.3, 2.0, 0.1])),
        dict(interpolate_factor=2.0),
        dict(seq_before_head_dim=True),
        dict(learned_freq=True),
    ],
)
@pytest.mark.parametrize("channels", [8, 12])
def test_queries_or_keys(settings: dict[str, Any], channels: int) -> None:
    one, other = both(dim=8, cache_if_possible=False, **settings)
    assert one.state_dict().keys() == other.state_dict().keys()
    assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in other.parameters()]
    one.load_state_dict(other.state_dict())
    t = torch.randn(2, 5, 3, channels, requires_grad=True)
    for offset in (0, 4):
        found, expected = (module.rotate_queries_or_keys(t, offset=offset) for module in (one, other))
        close(found, expected)
        wanted = [t, *(() if not settings.get("learned_freq") else (None,))]
        for module, result in ((one, found), (other, expected)):
            wanted[1:] = [module.freqs] if len(wanted) > 1 else []
            module.gradients = torch.autograd.grad(result.pow(3).sum(), wanted)
        close(one.gradients, other.gradients, atol=1e-4)


@pytest.mark.parametrize("before", [False, True])
def test_xpos(before: bool) -> None:
    settings = dict(dim=8, use_xpos=True, cache_if_possible=False, seq_before_head_dim=before)
    one, other = both(**settings)
    q, k = (torch.randn(2, 5, 5, 8, requires_grad=True) for _ in range(2))
    found, expected = (module.rotate_queries_and_keys(q, k) for module in (one, other))
    close(found, expected)
    for results in zip(
        *(torch.autograd.grad(sum(x.pow(3).sum() for x in pair), (q, k)) for pair in (found, expected)), strict=True
    ):
        close(*results, atol=1e-4)
    with pytest.raises(ValueError, match=r"^with use_xpos call rotate_queries_and_keys"):
        one.rotate_queries_or_keys(q)


@pytest.mark.parametrize("xpos", [False, True])
def test_cached_keys(xpos: bool) -> None:
    one, other = both(dim=8, use_xpos=xpos, cache_if_possible=False)
    q, k = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 6, 8)
    # Theirs centres the scales of queries on their own number of tokens if it is told to cut them first.
    rotated, keys = one.rotate_queries_with_cached_keys(q, k)
    expected, expected_keys = other.rotate_queries_with_cached_keys(q, k)
    close(keys, expected_keys)
    if not xpos:
        close(rotated, expected)
        return
    whole, _ = one.rotate_queries_and_keys(torch.cat([k[..., :-1, :], q], dim=-2), k)
    close(rotated, whole[..., -1:, :])


@pytest.mark.parametrize("freqs_for", ["lang", "pixel"])
@pytest.mark.parametrize("offsets", [None, (1, 0.5, 2)])
def test_axial(freqs_for: str, offsets: Any) -> None:
    one, other = both(dim=4, freqs_for=freqs_for, cache_if_possible=False)
    freqs, expected = (module.get_axial_freqs(3, 4, 2, offsets=offsets) for module in (one, other))
    close(freqs, expected)
    t = torch.randn(2, 3, 4, 2, 16)
    close(ours.apply_rotary_emb(freqs, t), theirs.apply_rotary_emb(expected, t))


def test_functions_in_float64() -> None:
    t, freqs = torch.randn(2, 3, 5, 12, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    twice = freqs.repeat_interleave(2, -1)
    for settings in ({}, dict(start_index=4), dict(scale=0.5), dict(freqs_seq_dim=0)):
        close(ours.apply_rotary_emb(twice, t, **settings), theirs.apply_rotary_emb(twice, t, **settings), atol=1e-12)
    close(ours.apply_rotary_emb(twice, t[0]), theirs.apply_rotary_emb(twice, t[0]), atol=1e-12)
    for ranges in (None, torch.tensor([1.0, 2.0], dtype=torch.float64)):
        arguments = freqs[:5], t, 0, ranges
        close(ours.apply_learned_rotations(*arguments), theirs.apply_learned_rotations(*arguments), atol=1e-12)

    def value(scale: Tensor, angles: Tensor, x: Tensor) -> Tensor:
        return ours.apply_rotary_emb(angles.repeat_interleave(2, -1), x, scale=scale)

    inputs = [torch.rand(5, 6).double(), freqs[:5].clone(), t[:1, :1].clone()]
    assert torch.autograd.gradcheck(value, [x.requires_grad_() for x in inputs])


def test_empty_and_nan() -> None:
    rotary = ours.RotaryEmbedding(8)
    assert rotary.rotate_queries_or_keys(torch.zeros(2, 3, 0, 8)).shape == (2, 3, 0, 8)
    q = torch.zeros(1, 1, 4, 8)
    q[..., 2, 0] = torch.nan
    assert rotary.rotate_queries_or_keys(q).isnan().sum() == 2


def test_half_precision_and_earlier_calls_change_no_angle() -> None:
    rotary = ours.RotaryEmbedding(64)
    q = torch.randn(1, 2, 3000, 64)
    expected = rotary.rotate_queries_or_keys(q.bfloat16().double())
    rotary.rotate_queries_or_keys(torch.randn(1, 2, 4000, 64).bfloat16())
    found = rotary.rotate_queries_or_keys(q.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=2**-8)


def test_mistakes_are_one_line() -> None:
    rotary, q = ours.RotaryEmbedding(16), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"^freqs must have an even number of entries, at most 8, got 16"):
        rotary.rotate_queries_or_keys(q)
    with pytest.raises(ValueError, match=r"^freqs_for must be lang, pixel or constant, got language"):
        ours.RotaryEmbedding(8, freqs_for="language")
    with pytest.raises(ValueError, match=r"^interpolate_factor must be 1 or more, got 0.5"):
        ours.RotaryEmbedding(8, interpolate_factor=0.5)
    with pytest.raises(ValueError, match=r"^offsets must be one per axis, 2, got 1"):
        rotary.get_axial_freqs(3, 4, offsets=(1,))
    with pytest.raises(ValueError, match=r"use_xpos=True, got False"):
        rotary.rotate_queries_and_keys(q, q)
    with pytest.raises(ValueError, match=r"^queries must be at most as many as keys, got 5 and 4"):
        rotary.rotate_queries_with_cached_keys(q, q[..., :4, :])


def test_cast_of_the_module_changes_no_angle() -> None:
    rotary, q = ours.RotaryEmbedding(32, use_xpos=True), torch.randn(1, 2, 4096, 32)
    expected = rotary.rotate_queries_and_keys(q, q)
    found = rotary.bfloat16().rotate_queries_and_keys(q, q)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
