"""STRING: the basis around a planar rotation, where it may be left out, and the way back from generators."""

from collections.abc import Callable
from functools import partial

import accuracy
import pytest
import torch
from parity import under
from torch import Tensor

import torchrope as tr
from torchrope.encodings import Encoding, planar, skew
from torchrope.encodings.skew_matrices import cayley, invariant_planes, inverse_cayley
from torchrope.ops import native
from torchrope.tensors import block_diagonal

KERNELS = pytest.param("native", marks=pytest.mark.skipif(native.LIBRARY is None, reason="no kernels built"))


def far_from_identity(**settings: object) -> tr.STRING:
    """Build a STRING whose basis mixes all channels of a block."""
    encoding = tr.STRING(**{**dict(num_axes=2, num_heads=2, head_dim=8), **settings})
    torch.nn.init.normal_(encoding.upper)
    return encoding


def vectors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, *shape, dtype=torch.float64).to(dtype).unbind(0)
    return q, k


def test_string_matches_equations_9_and_10_of_the_paper() -> None:
    encoding = far_from_identity(block_size=4).double()
    identity = torch.eye(4, dtype=torch.float64)
    s = skew(encoding.upper, 4)
    basis = block_diagonal((identity - s) @ torch.linalg.inv(identity + s), 8)
    positions = torch.randn(5, 2, dtype=torch.float64)
    rope = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8).double()
    rope.set_generators(planar(encoding.frequencies))
    truth = basis.unsqueeze(1) @ rope(positions).matrix() @ basis.mT.unsqueeze(1)
    assert (encoding(positions).matrix() - truth).abs().max() < 1e-12


def test_string_has_the_number_of_parameters_of_the_paper() -> None:
    d, axes = 64, 3
    encoding = tr.STRING(num_axes=axes, num_heads=1, head_dim=d)
    assert sum(p.numel() for p in encoding.parameters()) == axes * d // 2 + d * (d - 1) // 2


def test_string_starts_near_mixed() -> None:
    torch.manual_seed(3)
    encoding = tr.STRING(num_axes=2, num_heads=16, head_dim=32)
    torch.manual_seed(3)
    mixed = tr.MixedRoPE(num_axes=2, num_heads=16, head_dim=32)
    assert torch.equal(encoding.frequencies, mixed.frequencies)
    assert encoding.upper.std().item() == pytest.approx(0.02, rel=0.05)


def test_string_scores_need_only_the_inner_rotation() -> None:
    encoding = far_from_identity(num_axes=2, rotary_dim=6)
    rotation = encoding(tr.grid(3, 3))
    q, k = vectors(2, 2, 9, 8)
    whole, inner = (tr.rotate(q, k, rotation, scores_only=alone) for alone in (False, True))
    assert not torch.allclose(whole[0], inner[0], atol=1e-2)
    assert (whole[0] @ whole[1].mT - inner[0] @ inner[1].mT).abs().max() < 1e-4
    assert torch.equal(inner[0][..., 6:], q[..., 6:])


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_string_with_zero_frequencies_keeps_outputs_and_learns(pool: str) -> None:
    build = partial(tr.ViT, (8, 8), patch_size=2, in_channels=1, num_outputs=5, dim=48, depth=2, num_heads=2, pool=pool)
    plain, rotated = build(encoding="none"), build(encoding="string")
    for encoding in rotated.encodings:
        encoding.zero_()
    assert not rotated.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(rotated(x), plain(x))
    rotated(x).square().sum().backward()
    assert all(encoding.frequencies.grad.abs().sum() > 0 for encoding in rotated.encodings)


@pytest.mark.parametrize("backend", ["auto", "reference", KERNELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_heads", [False, True])
def test_string_rotates_grouped_heads_and_other_key_positions(
    backend: str, dtype: torch.dtype, shared_heads: bool
) -> None:
    encoding = far_from_identity(head_dim=10, rotary_dim=8, block_size=4, shared_heads=shared_heads)
    query_rotation, key_rotation = encoding(tr.grid(3, 2)), encoding(tr.grid(2, 2).expand(3, -1, -1))
    q, k = torch.randn(3, 6, 6, 10).to(dtype), torch.randn(3, 2, 4, 10).to(dtype)
    rotated_q, rotated_k = under(backend, tr.rotate, q, k, query_rotation, key_rotation=key_rotation, layout="bhtd")
    assert rotated_q.dtype == rotated_k.dtype == dtype
    by_query_head = query_rotation.matrix().repeat_interleave(3, dim=0)
    for rotated, x, matrix in ((rotated_q, q, by_query_head), (rotated_k, k, key_rotation.matrix())):
        tr.testing.assert_close(rotated, (matrix.double() @ x.double().unsqueeze(-1)).squeeze(-1), "rotated")


def test_string_keys_with_another_basis_keep_it() -> None:
    encoding, other = far_from_identity(), far_from_identity()
    q, k = vectors(1, 2, 4, 8)
    here, there = encoding(tr.grid(2, 2)), other(tr.grid(2, 2))
    for key_rotation in (there, tr.ComRoPELD(num_axes=2, num_heads=2, head_dim=8)(tr.grid(2, 2))):
        for pair in ((here, key_rotation), (key_rotation, here)):
            whole, scores = (
                tr.rotate(q, k, pair[0], key_rotation=pair[1], scores_only=alone) for alone in (False, True)
            )
            assert (whole[0] @ whole[1].mT - scores[0] @ scores[1].mT).abs().max() < 1e-4


def test_string_kernel_gradients_match_the_reference() -> None:
    encoding = far_from_identity()
    q, k = vectors(2, 2, 9, 8)
    upstream = torch.randn(2, 2, 9, 8)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        free = [x.clone().requires_grad_() for x in (q, k)]
        turned = under(backend, tr.rotate, *free, encoding(tr.grid(3, 3)))
        return torch.autograd.grad([*turned], [*free, *encoding.parameters()], [upstream, upstream])

    for fast, plain in zip(gradients("auto"), gradients("reference"), strict=True):
        assert torch.allclose(fast, plain, atol=1e-4)
    assert all(gradient.abs().min() > 0 for gradient in gradients("auto")[2:])


def commuting() -> dict[str, Callable[[], Encoding]]:
    sizes = dict(num_axes=2, num_heads=2, head_dim=16)
    return {
        "itself": partial(far_from_identity, **sizes),
        "smaller blocks of its own": partial(far_from_identity, **sizes, block_size=4),
        "mixed": partial(tr.MixedRoPE, **sizes),
        "axial": partial(tr.AxialRoPE, **sizes),
        "comrope-ap": partial(tr.ComRoPEAP, **sizes, block_size=4),
        "comrope-ld": partial(tr.ComRoPELD, **sizes, block_size=8),
        "odd blocks": partial(tr.ComRoPELD, num_axes=2, num_heads=2, head_dim=16, block_size=15, rotary_dim=15),
        "one axis": partial(tr.LieRE, num_axes=1, num_heads=2, head_dim=16),
        "zero_fraction pairs": partial(tr.encodings.GoldenGateRoPE, **sizes, zero_fraction=0.5),
    }


@pytest.mark.parametrize("name", commuting())
def test_string_accepts_any_commuting_generators(name: str) -> None:
    source = commuting()[name]().double()
    dense = block_diagonal(source.generators().detach(), source.rotary_dim).unsqueeze(2)
    dense = torch.nn.functional.pad(dense, (0, source.rotary_dim % 2) * 2)  # a zero channel makes it even
    encoding = tr.STRING(num_axes=source.num_axes, num_heads=2, head_dim=16).double()
    encoding.set_generators(dense)
    assert (encoding.generators() - dense).abs().max() < 1e-10


def test_common_planes_with_equal_frequencies_are_found() -> None:
    basis = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    frequencies = torch.tensor([[1.0, 1, 1, 0, 3, 2], [2.0, -2, 2, 0, 2, 3], [0.0, 0, 0, 1e-6, 0, 0]]).double()
    generators = basis @ block_diagonal(planar(frequencies), 12) @ basis.mT
    generators = ((generators - generators.mT) / 2)[:, None, None]
    encoding = tr.STRING(num_axes=3, num_heads=1, head_dim=12).double()
    encoding.set_generators(generators)
    assert (encoding.generators() - generators).abs().max() < 1e-12


@pytest.mark.parametrize("seed", [0, 5, 8])  # with a single linear combination, seed 5 fails
def test_common_planes_of_a_large_head_are_not_mixed_by_rounding(seed: int) -> None:
    torch.manual_seed(seed)
    source = far_from_identity(num_heads=1, head_dim=64)
    encoding = tr.STRING(num_axes=2, num_heads=1, head_dim=64)
    encoding.set_generators(source.generators())
    assert (encoding.generators() - source.generators()).abs().max() < 2e-5


@pytest.mark.parametrize("b", [2, 3, 5, 8, 16, 33, 64])
def test_planes_of_blocks_of_any_rank_are_found(b: int) -> None:
    for kind, make in accuracy.KINDS.items():
        for base in make(3, b).double():
            basis, angular = invariant_planes(base)
            inside = torch.zeros(b, b, dtype=torch.float64)
            even = torch.arange(0, b - 1, 2)
            inside[even + 1, even], inside[even, even + 1] = angular, -angular
            assert (angular >= 0).all(), kind
            assert (basis.mT @ basis - torch.eye(b)).abs().max() <= 1e-12, kind
            assert (basis @ inside @ basis.mT - base).abs().max() <= 1e-12 * max(base.abs().max().item(), 1.0), kind


def test_string_refuses_generators_that_do_not_commute() -> None:
    sizes = dict(num_axes=2, num_heads=2, head_dim=8)
    encoding = tr.STRING(**sizes)
    with pytest.raises(ValueError, match="generators of STRING must commute, got some without common planes"):
        encoding.set_generators(tr.LieRE(**sizes).generators())
    with pytest.raises(ValueError, match="generators of STRING must be zero outside blocks of 4"):
        tr.STRING(**sizes, block_size=4).set_generators(far_from_identity().generators())
    with pytest.raises(ValueError, match=r"^block_size must be even, .* got 3$"):
        tr.STRING(num_axes=2, num_heads=2, head_dim=9, block_size=3)


@pytest.mark.parametrize("determinant", [1, -1])
def test_inverse_cayley_exists_for_every_basis_up_to_signs(determinant: int) -> None:
    rotated = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    swap = torch.eye(6, dtype=torch.float64)[[1, 0, 3, 2, 5, 4]]
    for basis in (-torch.eye(6, dtype=torch.float64), swap, rotated):
        basis = basis * torch.tensor([determinant, 1, 1, 1, 1, 1])
        found, signs = inverse_cayley(basis)
        assert torch.equal(found, -found.mT)
        assert (cayley(found) - basis * signs).abs().max() < 1e-12


def test_string_model_freezes_and_absorbs_with_any_basis() -> None:
    model = tr.ViT(
        (8, 8), patch_size=2, in_channels=1, num_outputs=5, dim=32, depth=2, num_heads=2, encoding="string:8"
    )
    for encoding in model.encodings:
        torch.nn.init.normal_(encoding.upper)
    model, x = model.eval(), torch.randn(2, 1, 8, 8)
    for cheaper in (tr.absorb(model), tr.freeze(model, (8, 8)), tr.freeze(tr.absorb(model), (8, 8))):
        assert (cheaper(x) - model(x)).abs().max() < 1e-4
    assert all(type(encoding) is tr.MixedRoPE for encoding in tr.absorb(model).encodings)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_cayley_and_its_two_derivatives_equal_those_of_a_solve(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start, weight = (torch.randn(3, 6, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    identity = torch.eye(6, dtype=torch.float64)

    def solve(skew: Tensor) -> Tensor:
        return torch.linalg.solve(identity + skew, identity - skew)

    def derivatives(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        skew = (scale * (start - start.mT)).requires_grad_()
        value = function(skew)
        (gradient,) = torch.autograd.grad((value.sin() * weight).sum(), skew, create_graph=True)
        (second,) = torch.autograd.grad((gradient * weight).sum(), skew)
        return value, gradient, second

    for ours, expected in zip(derivatives(cayley), derivatives(solve), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def test_frequencies_of_another_shape_are_refused() -> None:
    encoding = tr.STRING(num_axes=2, num_heads=2, head_dim=8)
    encoding.set_frequencies(torch.full((2, 1, 4), 0.5))
    for shape in ((4,), (2, 2, 5)):
        with pytest.raises(ValueError, match=r"frequencies must be \(2, 2 or 1, 4\), got"):
            encoding.set_frequencies(torch.ones(shape))
    assert torch.equal(encoding.frequencies, torch.full((2, 2, 4), 0.5))
