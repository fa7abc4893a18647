"""Rays of cameras: invariance, the formula for every pair of views, points at infinity, and invalid input."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import torchrope as tr
from torchrope.geometry.poses import from_quaternions

HEADS, HEAD_DIM, VIEWS, TOKENS_PER_VIEW, BATCH = 2, 24, 3, 4, 2
TOKENS = VIEWS * TOKENS_PER_VIEW
WIDE = torch.float64
EPS = {torch.float32: 1e-5, torch.float64: 1e-10}


def cameras(*batch: int, intrinsics: bool = True) -> tr.geometry.Poses:
    intrinsics_matrix = torch.tensor([[500.0, 2.0, 330.0], [0.0, 450.0, 240.0], [0.0, 0.0, 1.0]])
    turns = from_quaternions(torch.randn(*batch, VIEWS, 4, dtype=WIDE))
    translation = torch.randn(*batch, VIEWS, 3, dtype=WIDE)
    return tr.geometry.Poses(
        turns, translation, intrinsics_matrix if intrinsics else None, (480, 640) if intrinsics else None
    )


def places(dtype: torch.dtype = WIDE) -> Tensor:
    return torch.rand(TOKENS, 2, dtype=dtype) - 0.5


def encoding(name: str = "mixed", **settings: float) -> tr.geometry.RayEncoding:
    made = tr.parse_encoding(name).rotary(num_axes=6, num_heads=HEADS, head_dim=HEAD_DIM)
    return tr.geometry.RayEncoding(made.double(), **settings)


def attend(action: tr.geometry.RayAction, qkv: Tensor, **options: str) -> Tensor:
    q, k, v = qkv
    rotated_q, rotated_k = tr.rotate(q, k, action, **options)
    return action.outputs(scaled_dot_product_attention(rotated_q, rotated_k, action.values(v, **options)), **options)


def expected_ray(
    poses: tr.geometry.Poses, made: tr.geometry.RayEncoding, view: Tensor, index: int, u: Tensor, depth: Tensor
) -> Tensor:
    """Compute s of one token of camera `index` in the frame of `view` by the formula, through world coordinates."""
    rotation, along = poses.rotation, poses.translation
    intrinsics_matrix = torch.eye(3, dtype=WIDE) if poses.intrinsics is None else poses.intrinsics[index]
    ray = torch.linalg.solve(intrinsics_matrix, torch.cat([u, u.new_ones(1)]))
    point = rotation[index].mT @ (depth * ray - along[index])
    centre = -rotation[index].mT @ along[index]
    own = torch.eye(3, dtype=WIDE) if poses.intrinsics is None else poses.intrinsics[view]
    p = own @ (rotation[view] @ point + along[view])
    far = made.max_depth * made.length_unit
    direction = p[:2] / p.norm() / made.angle_unit
    return torch.cat(
        [
            (rotation[view] @ centre + along[view]) / made.length_unit,
            direction,
            p[2:].clamp(-far, far) / made.length_unit,
        ]
    )


@pytest.mark.parametrize("name", ["mixed", "axial", "liere:8", "comrope-ld"])
@pytest.mark.parametrize("intrinsics", [True, False])
def test_ray_attention_matches_each_view_separately(name: str, intrinsics: bool) -> None:
    poses, made, u, depth = (
        cameras(intrinsics=intrinsics),
        encoding(name, length_unit=0.7),
        places(),
        torch.rand(TOKENS).double() + 0.5,
    )
    qkv = torch.randn(3, 1, HEADS, TOKENS, HEAD_DIM, dtype=WIDE)
    outputs = attend(made(poses, u, depth), qkv)
    for view in range(VIEWS):
        tokens = range(view * TOKENS_PER_VIEW, (view + 1) * TOKENS_PER_VIEW)
        positions = torch.stack(
            [expected_ray(poses, made, view, n // TOKENS_PER_VIEW, u[n], depth[n]) for n in range(TOKENS)]
        )
        matrices = _dense(made.encoding(positions))
        q, k, v = (torch.einsum("hnij,hnj->hni", matrices, x[0]) for x in qkv)
        mixed = scaled_dot_product_attention(q[:, tokens], k, v)
        expected = torch.einsum("hnji,hnj->hni", matrices[:, tokens], mixed)
        torch.testing.assert_close(outputs[0, :, tokens], expected, rtol=1e-10, atol=1e-10)


def _dense(rotation: tr.Rotation) -> Tensor:
    """Compute R of each head and token, `(heads, tokens, head_dim, head_dim)`, column by column."""
    columns = torch.eye(HEAD_DIM, dtype=WIDE)[:, None, None].expand(-1, HEADS, TOKENS, -1)
    return torch.stack([tr.apply(column[None], rotation, layout="bhtd")[0] for column in columns], dim=-1)


@pytest.mark.parametrize("far", [0.0, 1e2])
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", ["mixed", "liere:8"])
def test_ray_attention_is_invariant_to_world_motions(name: str, dtype: torch.dtype, far: float) -> None:
    made, poses, u = encoding(name), cameras(BATCH), places(dtype)
    made = made.to(dtype)
    depth, qkv = torch.rand(BATCH, TOKENS) + 0.5, torch.randn(3, BATCH, HEADS, TOKENS, HEAD_DIM, dtype=dtype)
    moved = poses.moved(from_quaternions(torch.randn(BATCH, 4, dtype=WIDE)), far * torch.randn(BATCH, 3, dtype=WIDE))
    first, second = (attend(made(each, u, depth), qkv) for each in (poses, moved))
    assert (first - second).abs().max() <= EPS[dtype] * first.abs().max()
    one = torch.zeros(VIEWS, 3, dtype=WIDE)
    one[1, 0] = 0.5
    other = tr.geometry.Poses(poses.rotation, poses.translation + one, poses.intrinsics)
    assert (attend(made(other, u, depth), qkv) - first).abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_ray_points_of_two_cameras_agree() -> None:
    poses, made, depth = cameras(1), encoding(max_depth=100.0), torch.full((1, TOKENS), 2.0)
    point = torch.tensor([0.3, -0.2, 0.1], dtype=WIDE)
    to_view = poses.rotation[0] @ point + poses.translation[0]
    pixels = (poses.intrinsics[0] @ to_view.unsqueeze(-1)).squeeze(-1)
    u = (pixels[:, :2] / pixels[:, 2:]).repeat_interleave(TOKENS_PER_VIEW, dim=0)
    depth = to_view[:, 2].abs().repeat_interleave(TOKENS_PER_VIEW)[None]
    in_front = (to_view[:, 2] > 0).repeat_interleave(TOKENS_PER_VIEW)
    positions = made.positions(poses, u, depth)[0, :, in_front]
    torch.testing.assert_close(positions[..., 3:], positions[:, :1, 3:].expand_as(positions[..., 3:]))


def test_ray_depth_infinity_encodes_the_direction() -> None:
    made, poses, u = encoding(), cameras(BATCH), places()
    directions = made.positions(poses, u, torch.full((TOKENS,), torch.inf))
    far = made.positions(poses, u, torch.full((TOKENS,), 1e12))
    torch.testing.assert_close(directions, far, rtol=1e-9, atol=1e-9)
    assert set(directions[..., 5].abs().unique().tolist()) == {made.max_depth}


def test_ray_depths_have_gradients() -> None:
    made, poses, u = encoding(), cameras(BATCH), places()
    depth = (torch.rand(BATCH, TOKENS, dtype=WIDE) + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda d: made.positions(poses, u, d), depth)
    qkv = torch.randn(3, BATCH, HEADS, TOKENS, HEAD_DIM, dtype=WIDE)
    (gradient,) = torch.autograd.grad(attend(made(poses, u, depth), qkv).square().sum(), depth)
    assert gradient.isfinite().all()
    assert (gradient != 0).all()
    infinite = torch.full((TOKENS,), torch.inf, dtype=WIDE).requires_grad_()
    (gradient,) = torch.autograd.grad(made.positions(poses, u, infinite).sum(), infinite)
    assert gradient.isfinite().all()


def test_ray_actions_accept_both_layouts() -> None:
    action = encoding()(cameras(BATCH), places(), torch.ones(BATCH, TOKENS))
    qkv = torch.randn(3, BATCH, HEADS, TOKENS, HEAD_DIM, dtype=WIDE)
    q, k, _ = qkv.transpose(2, 3)
    rotated = tr.rotate(q, k, action, layout="bthd")
    for ours, theirs in zip(rotated, tr.rotate(*qkv[:2], action, layout="bhtd"), strict=True):
        torch.testing.assert_close(ours.transpose(1, 2), theirs)
    torch.testing.assert_close(action.outputs(rotated[0], layout="bthd"), q)


def test_attention_accepts_rays_with_a_mask() -> None:
    attention = tr.Attention(HEADS * HEAD_DIM, HEADS).double()
    action = encoding()(cameras(BATCH), places(), torch.ones(BATCH, TOKENS))
    x = torch.randn(BATCH, TOKENS, HEADS * HEAD_DIM, dtype=WIDE)
    mask = torch.rand(BATCH, 1, 1, TOKENS) > 0.3
    mask[..., 0] = True
    for each in (mask, mask.expand(-1, HEADS, TOKENS, -1)):
        weights = attention.weights(x, action, bias=each)
        assert weights.shape == (BATCH, HEADS, TOKENS, TOKENS)
        assert not weights.masked_select(~mask.expand_as(weights)).any()
        assert attention(x, action, bias=each).shape == x.shape
    seen_alone = attention(x.masked_fill(~mask[:, 0, 0, :, None], 7.0), action, bias=mask)
    valid = mask[:, 0, 0]
    torch.testing.assert_close(seen_alone[valid], attention(x, action, bias=mask)[valid])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(pixels=torch.zeros(TOKENS, 3)), "pixels must be .* got torch.float32 \\(12, 3\\)"),
        (dict(pixels=torch.zeros(TOKENS + 1, 2)), "tokens must be divisible among 3 views, got 13"),
        (dict(depth=torch.ones(5)), "depth must be \\(12\\) or \\(batch, 12\\), got \\(5,\\)"),
        (dict(depth=torch.zeros(TOKENS)), "depth must be above 0, got 12 of 12"),
        (dict(depth=torch.full((TOKENS,), torch.nan)), "depth must be above 0, got 12 of 12"),
        (dict(depth=torch.ones(5, TOKENS)), "the same batch size, got 2, 5"),
    ],
)
def test_ray_encoding_refuses_invalid_input_in_one_line(given: dict[str, Tensor], message: str) -> None:
    usual = dict(poses=cameras(BATCH), pixels=places(), depth=torch.ones(TOKENS))
    with pytest.raises(ValueError, match=message):
        encoding()(**{**usual, **given})


def test_ray_encoding_checks_axes_and_batch() -> None:
    with pytest.raises(ValueError, match="6 axes, got 2"):
        tr.geometry.RayEncoding(tr.MixedRoPE(num_axes=2, num_heads=1, head_dim=8))
    with pytest.raises(ValueError, match="length_unit must be above 0"):
        encoding(length_unit=0.0)
    first, second = (encoding()(cameras(1), places(), torch.ones(TOKENS)) for _ in range(2))
    q = torch.randn(2, HEADS, TOKENS, HEAD_DIM)
    with pytest.raises(ValueError, match="must be \\(1, heads, 12, head_dim\\), got"):
        tr.rotate(q, q, first)
    with pytest.raises(ValueError, match="must have the RayAction of the queries"):
        tr.rotate(q[:1], q[:1], first, key_rotation=second)


@pytest.mark.parametrize("shape", [(), (1,), (HEADS,), (BATCH, 1)])
def test_bias_of_fewer_dimensions_broadcasts(shape: tuple[int, ...]) -> None:
    attention = tr.Attention(HEADS * HEAD_DIM, HEADS).double()
    action = encoding()(cameras(BATCH), places(), torch.ones(BATCH, TOKENS))
    x, bias = torch.randn(BATCH, TOKENS, HEADS * HEAD_DIM, dtype=WIDE), torch.randn(*shape, TOKENS, TOKENS, dtype=WIDE)
    whole = bias[(None,) * (4 - bias.ndim)]
    assert torch.equal(attention(x, action, bias=bias), attention(x, action, bias=whole))
    assert torch.equal(attention.weights(x, action, bias=bias), attention.weights(x, action, bias=whole))
