"""Poses of cameras and bodies: invariance, accuracy far from the origin, and invalid input."""

from functools import partial

import pytest
import torch
from parity import under
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import torchrope as tr
from torchrope.geometry.poses import from_quaternions

HEADS, HEAD_DIM, VIEWS, TOKENS_PER_VIEW = 2, 20, 5, 4
WIDE = torch.float64
EPS = {torch.float32: 1e-5, torch.float64: 1e-10}


def turns(*shape: int) -> Tensor:
    return from_quaternions(torch.randn(*shape, 4, dtype=WIDE))


def cameras(*batch: int, intrinsics: bool = True) -> tr.geometry.Poses:
    sharp = torch.tensor([[500.0, 2.0, 330.0], [0.0, 450.0, 240.0], [0.0, 0.0, 1.0]])
    places = torch.randn(*batch, VIEWS, 3, dtype=WIDE)
    return tr.geometry.Poses(
        turns(*batch, VIEWS), places, sharp if intrinsics else None, (480, 640) if intrinsics else None
    )


def encoding(pixels: str | None = "axial", **settings: float) -> tr.geometry.PoseEncoding:
    made = tr.parse_encoding(pixels).rotary(num_axes=2, num_heads=HEADS, head_dim=8) if pixels else None
    settings = settings if pixels else {"pose_dim": 12, **settings}
    return tr.geometry.PoseEncoding(num_heads=HEADS, head_dim=HEAD_DIM, pixels=made, **settings)


def places() -> Tensor:
    return tr.grid(2, 2).repeat(VIEWS, 1)


def states(dtype: torch.dtype, batch: int = 3) -> Tensor:
    return torch.randn(3, batch, HEADS, VIEWS * TOKENS_PER_VIEW, HEAD_DIM, dtype=dtype)


def attend(action: tr.geometry.PoseAction, qkv: Tensor, **options: str) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    rotated_q, rotated_k = tr.rotate(q, k, action, **options)
    mixed = scaled_dot_product_attention(rotated_q, rotated_k, action.values(v, **options))
    return rotated_q @ rotated_k.mT, action.outputs(mixed, **options)


def by_the_papers(poses: tr.geometry.Poses, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute GTA's equation for every pair of views from the relative pose P_m P_n^-1, in float64, without pixels."""
    forward, _ = poses.matrices(torch.zeros(1, 3, dtype=WIDE))
    forward = forward.repeat_interleave(TOKENS_PER_VIEW, dim=-3)
    relative = forward.unsqueeze(-3) @ torch.linalg.inv(forward).unsqueeze(-4)  # (batch, queries, keys, 4, 4)
    dense = torch.eye(HEAD_DIM, dtype=WIDE).repeat(*relative.shape[:-2], 1, 1)
    for start in (0, 4, 8):
        dense[..., start : start + 4, start : start + 4] = relative
    scores = torch.einsum("bhmc,bmncd,bhnd->bhmn", q, dense, k) / HEAD_DIM**0.5
    return torch.einsum("bhmn,bmncd,bhnd->bhmc", scores.softmax(dim=-1), dense, v)


def test_pose_attention_matches_the_papers_for_every_pair() -> None:
    poses, qkv = cameras(3), states(WIDE)
    action = encoding(None)(poses, tokens_per_view=TOKENS_PER_VIEW)
    torch.testing.assert_close(attend(action, qkv)[1], by_the_papers(poses, *qkv), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("far", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("pixels", ["axial", "liere:8", "none", None])
def test_pose_attention_is_invariant_to_world_motions(pixels: str | None, dtype: torch.dtype, far: float) -> None:
    made, poses, qkv = encoding(pixels), cameras(3), states(dtype)
    given = dict(pixels=places().to(dtype)) if pixels else dict(tokens_per_view=TOKENS_PER_VIEW)
    moved = poses.moved(turns(3), far * torch.randn(3, 3, dtype=WIDE))  # a different motion per sample
    for first, second in zip(attend(made(poses, **given), qkv), attend(made(moved, **given), qkv), strict=True):
        assert (first - second).abs().max() <= EPS[dtype] * first.abs().max()


def test_pose_attention_depends_on_each_view() -> None:
    poses, qkv = cameras(3), states(WIDE)
    one = torch.zeros(VIEWS, 3, dtype=WIDE)
    one[2, 0] = 0.1
    other = tr.geometry.Poses(poses.rotation, poses.translation + one, poses.intrinsics)
    pairs = zip(attend(encoding()(poses, places()), qkv), attend(encoding()(other, places()), qkv), strict=True)
    assert all((first - second).abs().max() > 1e-3 for first, second in pairs)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e4])
def test_pose_attention_is_accurate_in_any_unit_of_length(unit: float) -> None:
    small, qkv = cameras(3), states(WIDE)
    far = unit * torch.tensor([1e4, -1e4, 1e4], dtype=WIDE)
    world = tr.geometry.Poses(small.rotation, unit * small.translation, small.intrinsics).moved(torch.eye(3), far)
    exact = attend(encoding(unit=1.0)(small, places()), qkv)
    for dtype, share in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        actual = attend(encoding(unit=unit)(world, places()), qkv.to(dtype))
        for first, second in zip(exact, actual, strict=True):
            assert second.dtype == dtype
            assert (first - second).abs().max() <= share * first.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pose_actions_round_half_precision_once(dtype: torch.dtype) -> None:
    action, (q, k, v) = encoding()(cameras(3), places()), states(dtype)
    rotated_q, rotated_k = (lambda x: tr.rotate(x, k, action)[0]), (lambda x: tr.rotate(q, x, action)[1])
    for apply, x in ((rotated_q, q), (rotated_k, k), (action.values, v), (action.outputs, v)):
        torch.testing.assert_close(apply(x), apply(x.float()).to(dtype), rtol=0, atol=0)


def test_pose_kernels_match_the_reference() -> None:
    action, inputs, weight = encoding()(cameras(3), places()), states(torch.float32), states(torch.float32)
    for apply in (lambda x: tr.rotate(x, x, action)[0], lambda x: tr.rotate(x, x, action)[1], action.outputs):
        leaves = [inputs[0].clone().requires_grad_() for _ in range(2)]
        for x, backend in zip(leaves, ("native", "reference"), strict=True):
            (under(backend, apply, x) * weight[0]).sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(under("native", apply, inputs[0]), under("reference", apply, inputs[0]))


def test_pose_gradients_reach_tokens_and_poses() -> None:
    q, k, v = torch.randn(3, 1, HEADS, 3, HEAD_DIM, dtype=WIDE)
    made = partial(encoding(None), tokens_per_view=1)

    def run(quaternion: Tensor, translation: Tensor, sharp: Tensor, *qkv: Tensor) -> Tensor:
        return attend(made(tr.geometry.Poses(quaternion, translation, sharp)), torch.stack(qkv))[1]

    sharp = torch.eye(3, dtype=WIDE) + 0.1 * torch.rand(1, 3, 3, 3, dtype=WIDE)
    given = (torch.randn(1, 3, 4, dtype=WIDE), torch.randn(1, 3, 3, dtype=WIDE), sharp, q, k, v)
    assert torch.autograd.gradcheck(run, [x.detach().clone().requires_grad_() for x in given], fast_mode=True)


def test_pose_of_a_view_equals_a_pose_per_token() -> None:
    poses, qkv = cameras(3), states(WIDE)
    each = tr.geometry.Poses(
        *(x.repeat_interleave(TOKENS_PER_VIEW, dim=1) for x in (poses.rotation, poses.translation, poses.intrinsics))
    )
    both = [attend(encoding()(given, places()), qkv) for given in (poses, each)]
    torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=1e-12)


def test_poses_are_shared_by_samples_or_per_sample() -> None:
    poses, qkv = cameras(), states(WIDE)
    each = tr.geometry.Poses(
        poses.rotation.expand(3, -1, -1, -1), poses.translation.expand(3, -1, -1), poses.intrinsics[0]
    )
    both = [attend(encoding()(given, places()), qkv)[1] for given in (poses, each)]
    torch.testing.assert_close(both[0], both[1])


def test_quaternions_of_any_length_are_accepted() -> None:
    quaternion = torch.randn(7, 4, dtype=WIDE)
    rotation = tr.geometry.Poses(quaternion, torch.zeros(7, 3)).rotation
    for factor in (-1.0, 1e-200, 1e200):
        torch.testing.assert_close(tr.geometry.Poses(factor * quaternion, torch.zeros(7, 3)).rotation, rotation)
    turn = tr.geometry.Poses(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.zeros(1, 3)).rotation[0]  # 90 degrees about z
    torch.testing.assert_close(turn @ torch.tensor([1.0, 0.0, 0.0]).double(), torch.tensor([0.0, 1.0, 0.0]).double())


def test_poses_make_rounded_matrices_orthogonal() -> None:
    rotation = tr.geometry.Poses(turns(50).half(), torch.zeros(50, 3)).rotation
    assert (rotation.mT @ rotation - torch.eye(3)).abs().max() < 1e-14


def test_pose_actions_accept_both_layouts_and_grouped_heads() -> None:
    action, (q, k, _) = encoding("none")(cameras(3), places()), states(WIDE)
    swapped = tr.rotate(q.transpose(1, 2), k.transpose(1, 2), action, layout="bthd")
    torch.testing.assert_close([x.transpose(1, 2) for x in swapped], list(tr.rotate(q, k, action)))
    torch.testing.assert_close(tr.rotate(q, k[:, :1], action)[1], tr.rotate(q, k, action)[1][:, :1])


def test_attention_applies_actions_to_values_and_outputs() -> None:
    attention, x = (
        tr.Attention(HEADS * HEAD_DIM, HEADS).double(),
        torch.randn(3, VIEWS * TOKENS_PER_VIEW, HEADS * HEAD_DIM).double(),
    )
    action = encoding()(cameras(3), places().double())
    qkv = attention.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    expected = attention.proj(attend(action, qkv)[1].transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, action), expected)
    torch.testing.assert_close(attention(x, action, context=x, key_rotation=action), expected)
    weights = attention.weights(x, action)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))


def test_pose_keys_of_another_set_need_the_same_origin() -> None:
    made, poses, qkv = encoding(), cameras(3), states(WIDE)
    action, theirs = made(poses, places()), made(cameras(3), places())
    with pytest.raises(ValueError, match=r"origin=action\.origin"):
        tr.rotate(qkv[0], qkv[1], action, key_rotation=theirs)
    same = tr.rotate(qkv[0], qkv[1], action, key_rotation=made(poses, places(), origin=action.origin))
    torch.testing.assert_close(same, tr.rotate(qkv[0], qkv[1], action))


TURN, PLACE = torch.eye(3).expand(VIEWS, 3, 3), torch.zeros(VIEWS, 3)
BAD = {
    "not a rotation": (dict(rotation=2 * TURN), "orthogonal with determinant 1.* got 5 of 5"),
    "a mirror": (dict(rotation=-TURN), "orthogonal with determinant 1"),
    "zero quaternion": (dict(rotation=torch.zeros(VIEWS, 4)), "must not be zero, got 5 of 5"),
    "NaN": (dict(translation=PLACE / 0), "translations must be finite.* in 5 of 5"),
    "NaN rotated": (dict(rotation=TURN * torch.nan), "rotations must be finite"),
    "singular": (dict(intrinsics=torch.diag(torch.tensor([1.0, 0.0, 1.0]))), "invertible, got singular ones in 1 of 1"),
    "shapes": (dict(rotation=TURN[:4]), r"got \(4, 3, 3\) and \(5, 3\)"),
    "planar translations": (dict(translation=PLACE[:, :2]), r"got \(5, 3, 3\) and \(5, 2\)"),
    "shape of intrinsics": (dict(intrinsics=torch.eye(4)), r"intrinsics must be .*got \(4, 4\)"),
    "image size": (dict(intrinsics=torch.eye(3), image_size=(0, 5)), "image_size must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_poses_refuse_invalid_values_in_one_line(case: str) -> None:
    given, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        tr.geometry.Poses(**{"rotation": TURN, "translation": PLACE, **given})
    assert "\n" not in str(error.value)


def test_pose_encoding_refuses_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        tr.geometry.PoseEncoding(num_heads=2, head_dim=10)
    with pytest.raises(ValueError, match="2 heads of 8 channels, got 3 of 8"):
        tr.geometry.PoseEncoding(num_heads=2, head_dim=16, pixels=tr.AxialRoPE(num_axes=2, num_heads=3, head_dim=8))
    with pytest.raises(ValueError, match="got None"):
        encoding()(cameras())
    with pytest.raises(ValueError, match="divisible among 5 views, got 4"):
        encoding()(cameras(), tr.grid(2, 2))
    (q, k, _), action = states(torch.float32), encoding()(cameras(), places())
    rotation = tr.AxialRoPE(num_axes=2, num_heads=2, head_dim=20)(places())
    with pytest.raises(ValueError, match="must be encoded by the same class of encoding, got PoseAction and Planar"):
        tr.rotate(q, k, action, key_rotation=rotation)


def test_pose_actions_accept_no_samples_and_one_token() -> None:
    poses = tr.geometry.Poses(turns(0, 1), torch.zeros(0, 1, 3))
    q = torch.zeros(0, HEADS, 1, HEAD_DIM)
    assert tr.rotate(q, q, encoding("none")(poses, torch.zeros(1, 2)))[0].shape[0] == 0
    one = encoding(None)(tr.geometry.Poses(turns(1), torch.randn(1, 3)))
    v = torch.randn(1, HEADS, 1, HEAD_DIM, dtype=WIDE)
    torch.testing.assert_close(one.outputs(one.values(v)), v)  # attention to itself only


VIEWED = dict(num_axes=2, num_outputs=3, dim=32, depth=2, num_heads=2, encoding="axial")


def test_transformer_of_views_is_invariant_and_masks_padding() -> None:
    model = tr.Transformer(5, poses="action", **VIEWED).double()
    x, poses = torch.randn(2, VIEWS * TOKENS_PER_VIEW, 5, dtype=WIDE), cameras(2, intrinsics=False)
    answer = model(x, places(), poses=poses)
    change = (answer - model(x, places(), poses=poses.moved(turns(2), torch.randn(2, 3)))).abs().max()
    assert change < 1e-10
    order = torch.randperm(VIEWS)
    permuted = tr.geometry.Poses(poses.rotation[:, order], poses.translation[:, order])
    by_view = x.unflatten(1, (VIEWS, TOKENS_PER_VIEW))[:, order].flatten(1, 2)
    torch.testing.assert_close(model(by_view, places(), poses=permuted), answer)

    mask = torch.ones(2, VIEWS * TOKENS_PER_VIEW, dtype=torch.bool)
    mask[0, 2 * TOKENS_PER_VIEW :] = False
    two = tr.geometry.Poses(poses.rotation[:1, :2], poses.translation[:1, :2])
    alone = model(x[:1, : 2 * TOKENS_PER_VIEW], places()[: 2 * TOKENS_PER_VIEW], poses=two)
    torch.testing.assert_close(model(x, places(), mask=mask, poses=poses)[:1], alone)


def test_transformer_refuses_invalid_poses() -> None:
    model = tr.Transformer(5, poses="action", **VIEWED)
    x = torch.randn(2, VIEWS * TOKENS_PER_VIEW, 5)
    with pytest.raises(ValueError, match=r"poses must be given for a model with poses='.*', got None"):
        model(x, places())
    with pytest.raises(ValueError, match="views divide 19 tokens"):
        model(x[:, 1:], places()[1:], poses=cameras(2))
    with pytest.raises(ValueError, match="poses must be None with latents, a context or linear attention"):
        tr.Transformer(5, poses="action", latents=4, **VIEWED)
    with pytest.raises(ValueError, match="linear attention needs a Rotation"):
        tr.LinearAttention(40, 2)(torch.randn(3, VIEWS * TOKENS_PER_VIEW, 40), encoding()(cameras(3), places()))
