"""`rotate` with norms, against torch's norm in float64 followed by the rotation."""

from dataclasses import replace

import pytest
import torch
from parity import LAYOUTS, Inputs, MixedInHalves, assert_same_bits, judge, make_inputs, mixed_dtypes, outcome, under
from torch import Tensor, nn
from torch.nn import functional

import torchrope as tr
from torchrope.encodings import Encoding
from torchrope.ops import native

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NORMS = [nn.RMSNorm, nn.LayerNorm]
needs_kernels = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")


def norm_of(kind: type[nn.Module], width: int = 8, dtype: torch.dtype = F32, eps: float | None = 1e-5) -> nn.Module:
    norm = kind(width, eps=eps).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def by_hand(x: Tensor, norm: nn.Module) -> Tensor:
    """Either norm from its formula."""
    centred = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    unit = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    return unit + norm.bias if isinstance(norm, nn.LayerNorm) else unit


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("family", [tr.MixedRoPE, MixedInHalves, tr.LieRE])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_values_and_gradients_equal_norm_then_rotation(family, kind, layout, dtype) -> None:
    encoding = family(num_axes=2, num_heads=2, head_dim=8).to(dtype)
    turn, norms = encoding(tr.grid(3, 3).to(dtype)), (norm_of(kind, dtype=dtype), norm_of(kind, dtype=dtype))
    packed = torch.randn(2, 9, 3, 2, 8, dtype=dtype, requires_grad=True)
    q, k, _ = (x.transpose(1, 2) if layout == "bhtd" else x for x in packed.unbind(2))
    own = tr.rotate(q, k, turn, norm=norms, layout=layout)
    plain = under("reference", tr.rotate, by_hand(q, norms[0]), by_hand(k, norms[1]), turn, layout=layout)
    inputs = [packed, *norms[0].parameters(), *norms[1].parameters(), *encoding.parameters()]
    seeds = [torch.randn_like(x) for x in own]
    found = torch.autograd.grad(own, inputs, seeds, retain_graph=True)
    wanted = torch.autograd.grad(plain, inputs, seeds)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == F32 else {}
    for one, other in zip([*own, *found], [*plain, *wanted], strict=True):
        torch.testing.assert_close(one, other, **close)


def planar(width: int, halves: bool, *, turning: int | None = None, heads: int = 2, **settings: object) -> Encoding:
    family = MixedInHalves if halves else tr.MixedRoPE
    return family(num_axes=2, num_heads=heads, head_dim=width, rotary_dim=turning, **settings)


def with_norms(inputs: Inputs, *kinds: type[nn.Module] | None, eps: float | None = 1e-5) -> Inputs:
    width = inputs.q.shape[-1]
    return replace(inputs, norms=tuple(kind and norm_of(kind, width, eps=eps) for kind in kinds))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("width", "turning"), [(64, 64), (64, 32), (24, 16), (13, 10)])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_kernels_are_as_accurate_as_norm_then_rotation(kind, halves, width, turning, dtype) -> None:
    encoding = planar(width, halves, turning=turning)
    judge(encoding, with_norms(make_inputs(encoding, 37, dtype), kind, kind))


@pytest.mark.parametrize("kinds", [(nn.RMSNorm, None), (None, nn.LayerNorm), (nn.LayerNorm, nn.RMSNorm)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("halves", [False, True])
def test_queries_and_keys_may_differ_in_norm_and_dtype(halves, dtype, kinds) -> None:
    encoding = planar(64, halves)
    inputs = with_norms(make_inputs(encoding, 9, dtype), *kinds)
    judge(encoding, inputs)
    judge(encoding, mixed_dtypes(inputs, F16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_accept_any_strides(layout: str) -> None:
    encoding = planar(16, True)
    inputs = make_inputs(encoding, 19, batch=(3,), layout=layout, upstream_layout=layout)
    judge(encoding, with_norms(inputs, nn.RMSNorm, nn.LayerNorm))


@pytest.mark.parametrize("sets", [(), (3,)])
@pytest.mark.parametrize(("heads", "shared"), [((6, 2), False), ((6, 6), True)])
def test_heads_may_be_grouped_or_shared_and_positions_per_sample(heads, shared, sets) -> None:
    encoding = planar(8, False, heads=heads[1], shared_heads=shared)
    inputs = make_inputs(encoding, 9, batch=(3,), heads=heads, sets=sets)
    judge(encoding, with_norms(inputs, nn.RMSNorm, nn.LayerNorm))


@pytest.mark.parametrize("batch", [(), (0,), (4, 3)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_norms_accept_any_sizes(tokens: int, batch: tuple[int, ...]) -> None:
    encoding = planar(8, True)
    judge(encoding, with_norms(make_inputs(encoding, tokens, batch=batch), nn.RMSNorm, nn.LayerNorm))


@pytest.mark.parametrize("key_tokens", [0, 70])
def test_keys_may_have_other_positions(key_tokens: int) -> None:
    encoding = planar(8, True)
    judge(encoding, with_norms(make_inputs(encoding, 9, key_tokens=key_tokens), nn.RMSNorm, nn.LayerNorm))


def test_norm_applies_without_rotated_channels() -> None:
    encoding = planar(8, True, turning=0)
    judge(encoding, with_norms(make_inputs(encoding, 9), nn.RMSNorm, nn.LayerNorm))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("width", [8, 64])
def test_half_precision_is_rounded_once(width: int, dtype: torch.dtype) -> None:
    turn, norm = planar(width, False)(tr.grid(5, 1)), norm_of(nn.RMSNorm, width)
    x = torch.randn(3, 2, 5, width).to(dtype)
    found = tr.rotate(x, x, turn, norm=(norm, None))
    exact = tr.rotate(by_hand(x.double(), norm), x.double(), turn)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=2e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("kind", NORMS)
def test_rows_of_zeros_and_nan_do_not_affect_others(kind, width, dtype) -> None:
    encoding = planar(width, True)
    turn, norm = encoding(tr.grid(4, 1)), norm_of(kind, width)
    x = torch.randn(1, 2, 4, width).to(dtype)
    x[:, :, 0], x[:, :, 1, 2], x[:, :, 2, 1] = 0, torch.nan, torch.inf
    x.requires_grad_()
    turned = tr.rotate(x, x, turn, norm=(norm, norm))[0]
    of_zeros = turned.detach()[:, :, 0]
    expected = norm.bias if isinstance(norm, nn.LayerNorm) else torch.zeros(width)
    assert torch.equal(of_zeros, tr.apply(expected.to(dtype).expand(1, 2, 4, width), turn)[:, :, 0])
    assert turned[:, :, 1].isnan().all()
    assert turned[:, :, 2].isnan().any()
    (gradient,) = torch.autograd.grad(turned, x, torch.ones_like(turned))
    for each in (turned, gradient):
        assert each[:, :, [0, 3]].isfinite().all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1])
def test_nan_weights_give_nan_for_any_bit_pattern(bits: int) -> None:
    turn, norm = planar(64, True, turning=32)(tr.grid(4, 1)), norm_of(nn.RMSNorm, 64)
    norm.weight.data[40] = torch.tensor(bits, dtype=torch.int32).view(F32)
    x = torch.ones(1, 2, 4, 64, dtype=BF16)
    turned = tr.rotate(x, x, turn, norm=(norm, norm))[0]
    assert turned[..., 40].isnan().all()
    assert turned.isnan().sum() == 8
    turned = tr.rotate(x, x, planar(64, True)(tr.grid(4, 1)), norm=(norm, norm))[0]
    assert turned[..., [8, 40]].isnan().all()


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", NORMS)
def test_rows_whose_squares_overflow_are_normalised(kind, dtype) -> None:
    encoding = planar(64, True)
    turn, norm = encoding(tr.grid(4, 1)), norm_of(kind, 64)
    x = (torch.randn(1, 2, 4, 64) * torch.tensor([1e-18, 1e20, 1e30, 1e37])[:, None]).to(dtype)
    found = tr.rotate(x, x, turn, norm=(norm, norm))[0]
    exact = tr.rotate(by_hand(x.double(), norm), x.double(), turn)[0]
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_eps_defaults_to_that_of_torch() -> None:
    turn, x = planar(8, False, turning=0)(tr.grid(3, 1)), 1e-4 * torch.randn(2, 2, 3, 8)
    for dtype in (F32, BF16, F16):
        norm = norm_of(nn.RMSNorm, dtype=dtype, eps=None)
        found = tr.rotate(x.to(dtype), x.to(dtype), turn, norm=(norm, norm))[0]
        torch.testing.assert_close(found, norm(x.to(dtype)))


def test_weights_may_be_absent_fixed_or_narrow() -> None:
    encoding = planar(16, True)
    x, turn = torch.randn(2, 2, 9, 16).bfloat16(), encoding(tr.grid(3, 3))
    plain = nn.LayerNorm(16, elementwise_affine=False, eps=1e-5)
    assert_same_bits(
        {"R q": tr.rotate(x, x, turn, norm=(plain, None))[0]},
        {"R q": tr.rotate(x, x, turn, norm=(nn.LayerNorm(16, eps=1e-5), None))[0]},
    )
    narrow, wide = norm_of(nn.RMSNorm, 16, BF16), nn.RMSNorm(16, eps=1e-5)
    wide.weight.data = narrow.weight.data.float()
    found = [tr.rotate(x, x, turn, norm=(norm, None))[0].float().square().sum() for norm in (narrow, wide)]
    of_narrow, of_wide = (torch.autograd.grad(f, n.weight)[0] for f, n in zip(found, (narrow, wide), strict=True))
    assert of_narrow.dtype == BF16
    assert torch.equal(of_narrow, of_wide.bfloat16())
    wide.weight.requires_grad_(False)
    assert tr.rotate(x, x, turn, norm=(wide, wide))[0].requires_grad  # by the frequencies


@needs_kernels
def test_norm_and_rotation_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    find = native._kernel
    monkeypatch.setattr(native, "_kernel", lambda name: called.append(name) or find(name))
    monkeypatch.setattr(functional, "rms_norm", None)
    encoding = planar(8, True)
    outcome(encoding, with_norms(make_inputs(encoding, 9), nn.RMSNorm, nn.RMSNorm))
    assert called == ["torchrope_planar"] * 2


@needs_kernels
@pytest.mark.parametrize("heads", [1, 3])
def test_results_are_bit_identical_for_any_number_of_threads(heads: int) -> None:
    encoding = planar(16, True, heads=heads)
    inputs = [
        with_norms(make_inputs(encoding, 197, batch=(4,)), nn.RMSNorm, nn.LayerNorm),
        with_norms(make_inputs(encoding, 33, BF16, batch=(40,)), nn.LayerNorm, None),
    ]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append([outcome(encoding, one) for one in inputs])
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert_same_bits(one, other)


@needs_kernels
@pytest.mark.parametrize(("heads", "sets"), [(1, ()), (3, ()), (1, (6,))])
def test_weight_gradients_do_not_depend_on_threads_or_others(heads, sets) -> None:
    encoding = planar(16, True, heads=heads)
    norms = (norm_of(nn.RMSNorm, 16), norm_of(nn.LayerNorm, 16))
    inputs = make_inputs(encoding, 197, batch=(6,), heads=(6, 3), sets=sets)
    weights = [*norms[0].parameters(), *norms[1].parameters()]

    def gradients(*beside: Tensor) -> list[Tensor]:
        turned = tr.rotate(q, inputs.k, encoding(inputs.positions), norm=norms)
        return list(torch.autograd.grad(turned, [q, *weights, *beside], inputs.upstream))

    q = inputs.q.requires_grad_()
    beside_others = gradients(*encoding.parameters())
    encoding.requires_grad_(False)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3, 8):
            torch.set_num_threads(count)
            found.append(gradients())
    finally:
        torch.set_num_threads(threads)
    for one, other, expected in zip(found[0], found[1], beside_others, strict=False):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[2], strict=True))


def test_norms_compile_into_one_graph() -> None:
    encoding, norms = planar(8, True), (norm_of(nn.RMSNorm), norm_of(nn.LayerNorm))
    inputs = make_inputs(encoding, 9)
    sources = [inputs.q.requires_grad_(), *norms[0].parameters(), *norms[1].parameters(), *encoding.parameters()]

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return tr.rotate(q, k, encoding(inputs.positions), norm=norms)

    torch.compiler.reset()
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    turned, expected = compiled(inputs.q, inputs.k), turn(inputs.q, inputs.k)
    of_compiled = torch.autograd.grad(turned, sources, inputs.upstream)
    for one, other in zip(
        [*turned, *of_compiled], [*expected, *torch.autograd.grad(expected, sources, inputs.upstream)], strict=True
    ):
        torch.testing.assert_close(one, other)


def test_norms_support_vmap_over_inputs_and_weights() -> None:
    encoding, norm = planar(8, True), norm_of(nn.LayerNorm)
    inputs = make_inputs(encoding, 9, batch=(4, 3))
    rotation = encoding(inputs.positions)
    mapped = torch.vmap(lambda q, k: tr.rotate(q, k, rotation, norm=(norm, None)))(inputs.q, inputs.k)
    together = tr.rotate(inputs.q, inputs.k, rotation, norm=(norm, None))
    assert all(torch.equal(one, other) for one, other in zip(mapped, together, strict=True))
    parameters = {name: p.detach() for name, p in norm.named_parameters()}

    def score(parameters: dict[str, Tensor], q: Tensor, k: Tensor) -> Tensor:
        own = _Normed(encoding, norm)
        turned = torch.func.functional_call(own, {f"norm.{n}": p for n, p in parameters.items()}, (q, k))
        return (turned[0] @ turned[1].mT).tanh().sum()

    per_sample = torch.vmap(torch.func.grad(score), (None, 0, 0))(parameters, inputs.q, inputs.k)
    for i in range(4):
        own = torch.autograd.grad(score(dict(norm.named_parameters()), inputs.q[i], inputs.k[i]), norm.parameters())
        for all_of_them, expected in zip(per_sample.values(), own, strict=True):
            torch.testing.assert_close(all_of_them[i], expected, rtol=1e-3, atol=1e-3)


class _Normed(nn.Module):
    def __init__(self, encoding: Encoding, norm: nn.Module) -> None:
        super().__init__()
        self.encoding, self.norm = encoding, norm

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return tr.rotate(q, k, self.encoding(tr.grid(3, 3)), norm=(self.norm, self.norm))


@needs_kernels
def test_double_backward_raises() -> None:
    turn, norm, x = planar(8, True)(tr.grid(3, 3)), norm_of(nn.RMSNorm), torch.randn(1, 2, 9, 8, requires_grad=True)
    turned, _ = tr.rotate(x, x, turn, norm=(norm, norm))
    (gradient,) = torch.autograd.grad(turned.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="kernels have no gradients of gradients"):
        gradient.square().sum().backward()


def test_norms_with_hooks_or_own_forward_are_called() -> None:
    class Doubling(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    turn, x, seen = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(5)), torch.randn(3, 2, 5, 8), []
    hooked = norm_of(nn.RMSNorm)
    hooked.register_forward_hook(lambda *_: seen.append(1))
    turned, _ = tr.rotate(x, x, turn, norm=(Doubling(8), hooked))
    assert seen == [1]
    torch.testing.assert_close(turned, 2 * tr.rotate(x, x, turn)[0])


def test_poses_are_applied_after_norms() -> None:
    encoding = tr.geometry.PoseEncoding(num_heads=2, head_dim=8)
    poses = tr.geometry.Poses(torch.eye(3).expand(5, 3, 3), torch.zeros(5, 3))
    norm, x = norm_of(nn.RMSNorm), torch.randn(3, 2, 5, 8)
    turned, _ = tr.rotate(x, x, encoding(poses), norm=(norm, None))
    torch.testing.assert_close(turned, by_hand(x, norm))


def test_norm_over_another_shape_raises() -> None:
    turn, x = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(5)), torch.randn(3, 2, 5, 8)
    with pytest.raises(ValueError, match="norm of k must be over its head_dim 8, got one over"):
        tr.rotate(x, x, turn, norm=(None, nn.RMSNorm(4)))


@pytest.mark.parametrize("family", [MixedInHalves, tr.LieRE])
@pytest.mark.parametrize("kind", NORMS)
def test_rotate_one_normalises_and_rotates_as_rotate(kind, family) -> None:
    turn, norm = family(num_axes=2, num_heads=2, head_dim=8)(tr.grid(3, 3)), norm_of(kind)
    x = torch.randn(3, 9, 2, 8).bfloat16()
    one = tr.apply(x, turn, norm=norm, layout="bthd")
    both = tr.rotate(x, x, turn, norm=(norm, norm), layout="bthd")
    assert torch.equal(one, both[0])
    with pytest.raises(ValueError, match="norm of x must be over its head_dim 8, got one over"):
        tr.apply(x, turn, norm=nn.RMSNorm(4), layout="bthd")
