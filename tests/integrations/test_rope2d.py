"""`RoPE2D`: its formula in float64, gradients, graphs, and what it leaves alone."""

import copy

import pytest
import torch
from torch import Tensor, nn

import torchrope as tr
from torchrope.integrations.rope2d import PointROPE, RoPE2D
from torchrope.ops import native


def by_formula(tokens: Tensor, positions: Tensor, freq: float = 100.0, f0: float = 1.0) -> Tensor:
    """Pair by pair, in float64."""
    x = tokens.double()
    turned = x.clone()
    m = x.shape[-1] // 2
    for axis in (0, 1):
        for i in range(m // 2):
            one, other = axis * m + i, axis * m + i + m // 2
            angle = positions[:, None, :, axis].double() * f0 / freq ** (2 * i / m)
            turned[..., one] = x[..., one] * angle.cos() - x[..., other] * angle.sin()
            turned[..., other] = x[..., one] * angle.sin() + x[..., other] * angle.cos()
    return turned


def drawn(batch: int = 2, side: int = 32, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> tuple:
    positions = tr.grid(side, side).long().expand(batch, -1, -1)
    return torch.randn(batch, 3, side * side, head_dim, dtype=dtype), positions


def relative(error: Tensor, to: Tensor) -> float:
    return (error.double().norm() / to.double().norm()).item()


@pytest.mark.parametrize(("freq", "f0"), [(100.0, 1.0), (10.0, 0.3), (10_000.0, 2.0)])
@pytest.mark.parametrize("head_dim", [4, 48, 64])
def test_equals_the_formula(freq: float, f0: float, head_dim: int) -> None:
    rope = RoPE2D(freq, f0)
    tokens, positions = drawn(head_dim=head_dim)
    assert relative(rope(tokens, positions) - by_formula(tokens, positions, freq, f0), tokens) < 1e-6
    exact = tokens.double()
    torch.testing.assert_close(rope(exact, positions), by_formula(exact, positions, freq, f0), atol=1e-12, rtol=0)


def test_float32_is_the_formula_evaluated_in_float32() -> None:
    """Models trained with float32 tables of the halves layout see the angles of their training."""
    tokens, positions = drawn()
    inverse = 1.0 / (100.0 ** (torch.arange(0, 32, 2).float() / 32))
    halves = []
    for half, where in zip(tokens.chunk(2, dim=-1), positions.unbind(-1), strict=True):
        angles = (where.unsqueeze(-1) * inverse).repeat(1, 1, 2).unsqueeze(1)
        low, high = half.chunk(2, dim=-1)
        halves.append(half * angles.cos() + torch.cat([-high, low], dim=-1) * angles.sin())
    torch.testing.assert_close(RoPE2D()(tokens, positions), torch.cat(halves, dim=-1), atol=1e-6, rtol=0)


def test_scores_see_differences_of_positions_alone() -> None:
    q, positions = drawn(side=5, dtype=torch.float64)
    k, rope = torch.randn_like(q), RoPE2D()
    moved = positions + torch.tensor([7, -3])
    torch.testing.assert_close(rope(q, moved) @ rope(k, moved).mT, rope(q, positions) @ rope(k, positions).mT)


def test_rows_turn_the_first_half_and_columns_the_second() -> None:
    tokens, rope = torch.ones(1, 1, 1, 8), RoPE2D()
    along_y = rope(tokens, torch.tensor([[[1, 0]]]))
    along_x = rope(tokens, torch.tensor([[[0, 1]]]))
    assert torch.equal(along_y[..., 4:], tokens[..., 4:])
    assert torch.equal(along_x[..., :4], tokens[..., :4])
    assert torch.equal(along_y[..., :4], along_x[..., 4:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    tokens, positions = drawn(dtype=dtype)
    turned, exact = RoPE2D()(tokens, positions), by_formula(tokens, positions)
    assert turned.dtype == dtype
    assert relative(turned - exact, exact) < 0.5 * torch.finfo(dtype).eps
    tabulated = with_rounded_table(tokens, positions)
    assert relative(turned - exact, exact) < 0.7 * relative(tabulated - exact, exact)


def with_rounded_table(tokens: Tensor, positions: Tensor) -> Tensor:
    """The formula with cos and sin rounded to the dtype of the tokens beforehand, and products in it."""
    pairs = tokens.shape[-1] // 4
    angles = positions[:, None, :, :, None] * 100.0 ** (-torch.arange(pairs) / pairs)
    cos, sin = angles.cos().to(tokens.dtype), angles.sin().to(tokens.dtype)
    first, second = tokens.unflatten(-1, (2, 2, pairs)).unbind(-2)
    return torch.stack([cos * first - sin * second, sin * first + cos * second], dim=-2).flatten(-3)


def test_autocast_does_not_round_the_angles() -> None:
    tokens, positions = drawn(side=4)
    with torch.autocast("cpu", torch.bfloat16):
        cast = RoPE2D()(tokens, positions)
    assert torch.equal(cast, RoPE2D()(tokens, positions))


def test_input_is_unchanged_and_gets_a_gradient() -> None:
    tokens, positions = drawn(side=2, head_dim=8, dtype=torch.float64)
    before = tokens.clone()
    RoPE2D()(tokens, positions)
    assert torch.equal(tokens, before)
    assert torch.autograd.gradcheck(lambda x: RoPE2D()(x, positions), tokens.requires_grad_())


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic: bool) -> None:
    rope = RoPE2D()
    compiled = torch.compile(rope, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for side in (3, 5):
        tokens, positions = drawn(side=side, head_dim=16)
        assert torch.equal(compiled(tokens, positions), rope(tokens, positions))


def test_positions_are_never_read() -> None:
    """The meta device has no values: what looked at one would raise."""
    tokens, positions = (x.to("meta") for x in drawn(side=3))
    assert RoPE2D()(tokens, positions).shape == tokens.shape


def test_positions_of_any_kind_and_no_tokens() -> None:
    tokens, positions = drawn(side=3, head_dim=8)
    rope = RoPE2D()
    turned = rope(tokens, positions)
    for same in (positions.int(), positions.double(), positions.to(torch.uint8)):
        assert torch.equal(rope(tokens, same), turned)
    torch.testing.assert_close(rope(tokens, positions[:1]), turned, atol=1e-6, rtol=0)  # shared, by another kernel
    torch.testing.assert_close(rope(turned, -positions), tokens, atol=1e-6, rtol=1e-5)
    for shape in ((0, 3, 9, 8), (2, 3, 0, 8), (2, 0, 9, 8), (2, 3, 9, 0)):
        empty = torch.randn(shape)
        assert rope(empty, torch.zeros(shape[0], shape[2], 2, dtype=torch.long)).shape == shape
    strided = tokens.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(rope(strided, positions), turned)


def test_nan_affects_its_token_only() -> None:
    tokens, positions = drawn(batch=1, side=2, head_dim=8)
    tokens[0, 1, 2] = torch.nan
    turned = RoPE2D()(tokens, positions)
    assert turned[0, 1, 2].isnan().all()
    assert turned.isnan().sum() == 8


def test_rotation_has_no_state_and_is_not_cast() -> None:
    model = nn.Sequential(RoPE2D())
    assert not model.state_dict()
    again = copy.deepcopy(model).bfloat16()[0]
    tokens, positions = drawn(side=3)
    assert torch.equal(again(tokens, positions), RoPE2D()(tokens, positions))


@pytest.mark.parametrize(
    ("tokens", "positions", "message"),
    [
        (torch.zeros(1, 1, 2, 6), torch.zeros(1, 2, 2), "head_dim must be divisible by 4, .* got 6"),
        (torch.zeros(1, 2, 8), torch.zeros(1, 2, 2), r"\(batch, heads, n, head_dim\), got .*\(1, 2, 8\)"),
        (torch.zeros(1, 1, 2, 8).long(), torch.zeros(1, 2, 2), "floating point .* got torch.int64"),
        (torch.zeros(2, 1, 2, 8), torch.zeros(2, 2, 3), r"must be y and x, \(2, 2, 2\) or .* got \(2, 2, 3\)"),
        (torch.zeros(2, 1, 2, 8), torch.zeros(3, 2, 2), r"got \(3, 2, 2\)"),
        (torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, 2) > 0, "real numbers, got torch.bool"),
    ],
)
def test_bad_input_gets_one_line(tokens: Tensor, positions: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoPE2D()(tokens, positions)


@pytest.mark.parametrize("settings", [{"freq": 0.0}, {"F0": -1.0}, {"freq": float("nan")}])
def test_bad_settings_get_one_line(settings: dict) -> None:
    with pytest.raises(ValueError, match="freq and F0 must be above 0, got"):
        RoPE2D(**settings)


@pytest.mark.parametrize("f0", [1.0, 0.5])
def test_points_are_rotated_by_their_coordinates(f0: float) -> None:
    """Channel d of the first, d + 6 of the second half of each third, as in LitePT's loop."""
    tokens = torch.randn(2, 3, 7, 36, dtype=torch.float64, requires_grad=True)
    positions = torch.randint(0, 500, (2, 7, 3))
    expected = tokens.clone()
    for axis in range(3):
        for d in range(6):
            angle = (f0 * positions[..., axis] / 100.0 ** (d / 6)).double().unsqueeze(1)
            u, v = tokens[..., 12 * axis + d], tokens[..., 12 * axis + 6 + d]
            expected[..., 12 * axis + d] = u * angle.cos() - v * angle.sin()
            expected[..., 12 * axis + 6 + d] = v * angle.cos() + u * angle.sin()
    found = PointROPE(freq=100.0, F0=f0)(tokens, positions)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)  # the angles of the loop are float32
    exact = PointROPE(freq=100.0, F0=f0)(tokens.detach(), positions.double())
    torch.testing.assert_close(found.detach(), exact, atol=1e-12, rtol=0)
    grown = torch.randn_like(found)
    one, other = (torch.autograd.grad(x, tokens, grown, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_points_of_other_shapes_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"^head_dim must be divisible by 6, a pair for each of x, y and z, got 8"):
        PointROPE()(torch.randn(1, 2, 3, 8), torch.zeros(1, 3, 3))
    with pytest.raises(ValueError, match=r"^positions must be x, y and z, \(1, 3, 3\) or \(1, 3, 3\), got \(1, 3, 2\)"):
        PointROPE()(torch.randn(1, 2, 3, 12), torch.zeros(1, 3, 2))
    assert PointROPE()(torch.zeros(0, 2, 0, 12), torch.zeros(0, 0, 3)).shape == (0, 2, 0, 12)


@pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")
@pytest.mark.parametrize("samples", [1, 3])
def test_kernels_rotate_positions_of_each_sample_and_shared_ones(samples: int) -> None:
    q, positions = torch.randn(3, 4, 6, 16), torch.randint(0, 9, (samples, 6, 2))
    rope = RoPE2D()
    with tr.backend("reference"):
        expected = rope(q, positions)
    with tr.backend("native"):
        torch.testing.assert_close(rope(q, positions), expected)
