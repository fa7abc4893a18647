"""`rotate`: layouts, heads, precision, errors."""

import math

import pytest
import torch
from parity import under
from torch import zeros

import torchrope as tr
from torchrope.rotating import apply


def rotation(heads: int = 2, tokens: int = 9, head_dim: int = 8) -> tr.Rotation:
    return tr.MixedRoPE(num_axes=1, num_heads=heads, head_dim=head_dim)(tr.grid(tokens))


def test_planar_rotates_pairs_counter_clockwise() -> None:
    positions, frequencies = torch.full((1, 1), math.pi / 2), torch.ones(1, 1, 1)
    quarter = tr.rotations.Planar(positions=positions, frequencies=frequencies, head_dim=2)
    turned, _ = tr.rotate(torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1, 2), quarter)
    assert torch.allclose(turned, torch.tensor([[[0.0, 1.0]]]), atol=1e-6)


@pytest.mark.parametrize("family", [tr.MixedRoPE, tr.LieRE])
def test_grouped_queries_rotate_as_their_key_head(family: type[tr.Encoding]) -> None:
    turn = family(num_axes=2, num_heads=2, head_dim=8)(tr.grid(3, 3))
    q, k = torch.randn(2, 6, 9, 8), torch.randn(2, 2, 9, 8)
    turned_q, turned_k = tr.rotate(q, k, turn)
    assert torch.allclose(turned_k, tr.rotate(k, k, turn)[1])
    for head in range(6):
        own = q[:, head : head + 1].expand(-1, 2, -1, -1)
        assert torch.allclose(turned_q[:, head], tr.rotate(own, own, turn)[0][:, head // 3], atol=1e-6)


@pytest.mark.parametrize(
    "encoding",
    [
        tr.AxialRoPE(num_axes=2, num_heads=6, head_dim=8),
        tr.LieRE(num_axes=2, num_heads=6, head_dim=8, shared_heads=True),
    ],
)
def test_heads_that_share_a_rotation_serve_any_group(encoding: tr.Encoding) -> None:
    turn = encoding(tr.grid(3, 3))
    q, k = torch.randn(2, 6, 9, 8), torch.randn(2, 2, 9, 8)
    (turned_q, turned_k), dense = tr.rotate(q, k, turn), turn.matrix()
    assert dense.shape == (6, 9, 8, 8)
    for turned, x in ((turned_q, q), (turned_k, k)):
        assert torch.allclose(turned, (dense[0] @ x.unsqueeze(-1)).squeeze(-1), atol=1e-5)
    with pytest.raises(ValueError, match="heads of q or k must be the rotation's 6, got 8 and 4"):
        tr.rotate(torch.zeros(2, 8, 9, 8), torch.zeros(2, 4, 9, 8), turn)


def test_rotation_is_an_immutable_value() -> None:
    turn = rotation()
    with pytest.raises(AttributeError):
        turn.head_dim = 4  # type: ignore[misc]
    assert turn.to(torch.float64).matrix().dtype == torch.float64
    assert torch.equal(turn.to(torch.bfloat16).angles(), turn.angles())  # angles are never rounded
    assert turn.shape == (2, 9)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "name", ["none", "axial", "mixed", "golden", "comrope-ld:4", "comrope-ap:4", "comrope-ld:3", "string:4", "liere:4"]
)
def test_rotation_is_unchanged_when_its_inputs_change(name: str, backend: str) -> None:
    head_dim = 6 if name.endswith("3") else 8
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=head_dim)
    positions, q = torch.rand(9, 2), torch.randn(2, 2, 9, head_dim)
    turn = under(backend, encoding, positions)
    before, matrix = under(backend, tr.rotate, q, q, turn)[0].clone(), turn.matrix().clone()
    with torch.no_grad():
        positions.add_(1)
        for parameter in encoding.parameters():
            parameter.add_(1)
    assert torch.equal(under(backend, tr.rotate, q, q, turn)[0], before)
    assert torch.equal(turn.matrix(), matrix)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["mixed", "comrope-ld:4", "comrope-ap:3", "string:4", "liere:4", "liere:3"])
def test_positions_may_change_before_the_backward_pass(name: str, backend: str) -> None:
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=12)
    q, places, found = torch.randn(2, 2, 9, 12), torch.rand(9, 2), []
    for change in (0.0, 1.0):
        positions = places.clone()
        turned, _ = under(backend, tr.rotate, q, q, under(backend, encoding, positions))
        positions.add_(change)
        found.append(torch.autograd.grad((turned * q.roll(1)).sum(), list(encoding.parameters())))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.zeros(1, 2, 9, 6)), "head_dim of q must be the rotation's 8, got 6"),
        (dict(k=torch.zeros(1, 2, 7, 8)), "k must have the rotation's 9 tokens, got 7"),
        (dict(q=torch.zeros(1, 3, 9, 8)), "heads of q must be a multiple of the heads of k, got 3 and 2"),
        (dict(q=zeros(1, 6, 9, 8), k=zeros(1, 3, 9, 8)), "heads of q or k must be the rotation's 2, got 6 and 3"),
        (
            dict(k=torch.zeros(1, 1, 9, 8)),
            "heads of k must be the rotation's 2, got 1; for grouped queries build the encoding with num_heads=1",
        ),
        (dict(q=[torch.zeros(2, 9, 8)]), "got a nested tensor"),
        (dict(q=torch.zeros(9, 8)), r"q must be floating point \(batch, heads, tokens, head_dim\)"),
        (dict(k=torch.zeros(1, 2, 9, 8, dtype=torch.long)), "k must be floating point"),
        (
            dict(rotation=tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(torch.zeros(3, 9, 1))),
            r"positions must have no batch dimension or that of q, \(1,\), got \(3,\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@torch.no_grad()
def test_bad_input_raises_one_line_errors(change: dict, message: str) -> None:
    good = dict(q=torch.zeros(1, 2, 9, 8), k=torch.zeros(1, 2, 9, 8), rotation=rotation())
    for _ in range(4):  # from then on calls are repeated
        tr.rotate(**good)
    with pytest.raises(ValueError, match=message) as caught:
        tr.rotate(**{n: torch.nested.nested_tensor(x) if type(x) is list else x for n, x in {**good, **change}.items()})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["mixed", "liere:4", "comrope-ld:4", "string:4"])
def test_rotate_one_equals_rotate(name: str, backend: str) -> None:
    """And with fewer rotations than heads, each turns a group."""
    turn = under(backend, tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=8), tr.grid(3, 3))
    q, k = torch.randn(2, 6, 9, 8), torch.randn(2, 2, 9, 8)
    together = under(backend, tr.rotate, q, k, turn)
    for x, expected in zip((q, k), together, strict=True):
        assert torch.allclose(under(backend, apply, x, turn), expected, atol=1e-5)
    inner = [under(backend, apply, x, turn, scores_only=True) for x in (q[:, :2], k)]
    expected = under(backend, tr.rotate, q[:, :2], k, turn)
    assert torch.allclose(inner[0] @ inner[1].mT, expected[0] @ expected[1].mT, atol=1e-4)
    with pytest.raises(ValueError, match="heads of x must be a multiple of the rotation's 2, got 3"):
        apply(q[:, :3], turn)


@pytest.mark.parametrize("rotary_dim", [8, 10, 64])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_pairs_in_halves_equal_rotate_half_of_transformers(backend: str, rotary_dim: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    encoding = tr.AxialRoPE(num_axes=1, num_heads=3, head_dim=64, rotary_dim=rotary_dim)
    rotation = encoding(torch.arange(9.0)[:, None])
    q, k = torch.randn(2, 2, 3, 9, 64)
    angles = rotation.angles().repeat(1, 1, 2)  # (1, tokens, rotary_dim)
    expected = llama.apply_rotary_pos_emb(q[..., :rotary_dim], k[..., :rotary_dim], angles.cos(), angles.sin())
    for turned, wanted, x in zip(under(backend, tr.rotate, q, k, rotation.in_halves()), expected, (q, k), strict=True):
        torch.testing.assert_close(turned[..., :rotary_dim], wanted, atol=1e-5, rtol=0)
        assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])
    in_halves = rotation.in_halves()
    torch.testing.assert_close(
        (in_halves.matrix() @ q[..., None])[..., 0], tr.rotate(q, k, in_halves)[0], atol=1e-5, rtol=0
    )
    back = tr.rotate(*tr.rotate(q, k, in_halves), in_halves.inverse())
    torch.testing.assert_close(back[0], q, atol=1e-5, rtol=0)
