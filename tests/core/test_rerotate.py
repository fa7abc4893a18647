"""Tests of `rerotate`: cached keys at new positions equal keys that are rotated anew."""

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings import DRoPE, Periodic

RELATIVE = {
    "axial": tr.AxialRoPE(num_axes=2, num_heads=3, head_dim=8),
    "mixed": tr.MixedRoPE(num_axes=2, num_heads=3, head_dim=8),
    "partial": tr.MixedRoPE(num_axes=2, num_heads=3, head_dim=8, rotary_dim=6),
    "liere:2": tr.LieRE(num_axes=2, num_heads=3, head_dim=8, block_size=2),
    "comrope-ap": tr.ComRoPEAP(num_axes=2, num_heads=3, head_dim=8, block_size=4),
    "comrope-ld": tr.ComRoPELD(num_axes=2, num_heads=3, head_dim=8, block_size=4),
    "string": tr.STRING(num_axes=2, num_heads=3, head_dim=8),
    "drope": DRoPE(num_axes=2, num_heads=3, head_dim=8),
    "periodic": Periodic(tr.MixedRoPE(num_axes=2, num_heads=3, head_dim=8), periods=(5.0, None)),
    "scaled": tr.extend(tr.AxialRoPE(num_axes=2, num_heads=3, head_dim=8), (1, 4), method="yarn", train_size=8),
    "none": tr.NoEncoding(num_axes=2, num_heads=3, head_dim=8),
}


def keys_of(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("name", RELATIVE)
def test_keys_are_those_rotated_at_the_new_positions(name: str, layout: str) -> None:
    encoding, positions = RELATIVE[name].double(), tr.grid(2, 3).double() + 7
    k = keys_of(2, 3, 6, 8) if layout == "bhtd" else keys_of(2, 6, 3, 8)
    for delta in [(-7.0, 2.5), torch.tensor([-7, 2]), torch.randn(6, 2).double(), torch.randn(2, 6, 2).double()]:
        cached = tr.apply(k, encoding(positions), layout=layout)
        moved = tr.rerotate(cached, encoding, delta, layout=layout)
        expected = tr.apply(k, encoding(positions + torch.as_tensor(delta).double()), layout=layout)
        torch.testing.assert_close(moved, expected, atol=1e-9, rtol=0)


def test_one_axis_takes_a_number_and_equals_multiplication_of_complex_numbers() -> None:
    encoding = tr.AxialRoPE(num_axes=1, num_heads=1, head_dim=8, base=100.0)
    k = keys_of(1, 2, 5, 8)
    turned = torch.view_as_complex(k.unflatten(-1, (4, 2))) * torch.exp(-3j * 100.0 ** -(torch.arange(4) / 4).double())
    torch.testing.assert_close(
        tr.rerotate(k, encoding.double(), -3), torch.view_as_real(turned).flatten(-2), atol=1e-7, rtol=0
    )


def test_blocks_of_one_axis_move_too_though_their_rotations_store_no_generators() -> None:
    encoding = tr.LieRE(num_axes=1, num_heads=1, head_dim=8, block_size=8).double()
    k = keys_of(1, 2, 5, 8)
    moved = tr.rerotate(tr.apply(k, encoding(tr.grid(5).double())), encoding, 4)
    torch.testing.assert_close(moved, tr.apply(k, encoding(tr.grid(5).double() + 4)), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["axial", "mixed", "partial", "drope"])
def test_blocks_of_two_move_after_scores_only_too(name: str) -> None:
    encoding, positions, k = RELATIVE[name].double(), tr.grid(2, 3).double(), keys_of(2, 3, 6, 8)
    cached, expected = (tr.apply(k, encoding(at), scores_only=True) for at in (positions, positions - 2))
    torch.testing.assert_close(tr.rerotate(cached, encoding, (-2, -2)), expected, atol=1e-9, rtol=0)


def test_moves_in_one_compiled_graph() -> None:
    encoding, k = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8), keys_of(1, 2, 5, 8, dtype=torch.float32)
    compiled = torch.compile(lambda x, delta: tr.rerotate(x, encoding, delta), fullgraph=True, backend="aot_eager")
    for delta in (-3, torch.arange(5.0).unsqueeze(-1)):
        torch.testing.assert_close(compiled(k, delta), tr.rerotate(k, encoding, delta))


def test_gradients_reach_keys_frequencies_and_delta() -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=3, head_dim=4).double()

    def moved(k: Tensor, delta: Tensor, frequencies: Tensor) -> Tensor:
        return torch.func.functional_call(encoding, {"frequencies": frequencies}, (delta,)).matrix() @ k.unsqueeze(-1)

    k, delta = keys_of(1, 3, 5, 4).requires_grad_(), keys_of(5, 2).requires_grad_()
    rotated = tr.rerotate(k, encoding, delta)
    upstream = torch.randn_like(rotated)
    found = torch.autograd.grad(rotated, [k, delta, encoding.frequencies], upstream)
    expected = moved(k, delta, encoding.frequencies).squeeze(-1)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [k, delta, encoding.frequencies], upstream))


def test_fewer_key_heads_no_tokens_and_half_precision() -> None:
    encoding = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)
    assert tr.rerotate(keys_of(1, 2, 0, 8), encoding, -1).shape == (1, 2, 0, 8)
    k = keys_of(3, 1, 2, 5, 8, dtype=torch.float32)  # more leading dimensions
    moved = tr.rerotate(k, encoding, 2.0)
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved[1], tr.rerotate(k[1], encoding, 2.0))
    rounded = tr.rerotate(k.bfloat16(), encoding, 2.0)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), tr.rerotate(k.bfloat16().float(), encoding, 2.0), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("encoding", "delta", "line"),
    [
        (
            tr.LieRE(num_axes=2, num_heads=2, head_dim=8),
            (1.0, 0.0),
            "cache the keys before they are rotated, got LieRE",
        ),
        (torch.nn.Linear(1, 1), 1.0, "for a model of another library call swap, got Linear"),
        (tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8), 1.0, "must have num_axes = 2 axes, got 1"),
        (tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8), float("nan"), "positions must be finite"),
        (
            tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8),
            torch.zeros(4, 1),
            "must have the rotation's 4 tokens, got 5",
        ),
        (tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8), torch.zeros(3, 5, 1), "no batch dimension or that of x"),
        (tr.MixedRoPE(num_axes=1, num_heads=4, head_dim=8), 1.0, "must be a multiple of the rotation's 4, got 2"),
        (tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=16), 1.0, "must be the rotation's 16, got 8"),
    ],
)
def test_refusals_are_one_line(encoding: tr.Encoding, delta: object, line: str) -> None:
    with pytest.raises(ValueError, match=line) as raised:
        tr.rerotate(torch.zeros(1, 2, 5, 8), encoding, delta)
    assert "\n" not in str(raised.value)
