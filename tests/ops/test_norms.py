"""`rotate` with norms: against torch's norm in float64, then the rotation."""

import pytest
import torch
from torch import nn

import torchrope as tr


def norm_of(kind: type[nn.RMSNorm] | type[nn.LayerNorm], dtype: torch.dtype = torch.float64) -> nn.Module:
    norm = kind(8, eps=1e-5).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def by_hand(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """Either norm from its formula."""
    centred = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    unit = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    return unit + norm.bias if isinstance(norm, nn.LayerNorm) else unit


@pytest.mark.parametrize("family", [tr.MixedRoPE, tr.LieRE])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_values_and_gradients_are_those_of_norm_then_rotation(family, kind, layout) -> None:
    encoding = family(num_axes=2, num_heads=2, head_dim=8).double()
    turn, (q_norm, k_norm) = encoding(tr.grid(3, 3).double()), (norm_of(kind), norm_of(kind))
    heads_first = layout == "bhtd"
    packed = torch.randn(2, 9, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    q, k, _ = (x.transpose(1, 2) if heads_first else x for x in packed.unbind(2))
    own = tr.rotate(q, k, turn, norm=(q_norm, k_norm), layout=layout)
    plain = tr.rotate(by_hand(q, q_norm), by_hand(k, k_norm), turn, layout=layout, backend="reference")
    inputs = [packed, *q_norm.parameters(), *k_norm.parameters(), *encoding.parameters()]
    seeds = [torch.randn_like(x) for x in own]
    found = torch.autograd.grad(own, inputs, seeds, retain_graph=True)
    wanted = torch.autograd.grad(plain, inputs, seeds)
    for one, other in zip([*own, *found], [*plain, *wanted], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    turn, norm = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(5)), norm_of(nn.RMSNorm, torch.float32)
    x = torch.randn(3, 2, 5, 8).to(dtype)
    found = tr.rotate(x, x, turn, norm=(norm, None))
    exact = tr.rotate(by_hand(x.double(), norm), x.double(), turn)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=2e-6)


def test_zero_rows_stay_zero_and_nan_stays_in_its_row() -> None:
    turn, norm = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=8)(tr.grid(3)), norm_of(nn.RMSNorm, torch.float32)
    x = torch.zeros(1, 1, 3, 8)
    x[0, 0, 1, 2] = torch.nan
    turned = tr.rotate(x, x, turn, norm=(norm, norm))[0][0, 0]
    assert turned[1].isnan().all()
    assert not turned[[0, 2]].any()


def test_a_norm_with_hooks_or_a_forward_of_its_own_is_called() -> None:
    class Doubling(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    turn, x, seen = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(5)), torch.randn(3, 2, 5, 8), []
    hooked = norm_of(nn.RMSNorm, torch.float32)
    hooked.register_forward_hook(lambda *_: seen.append(1))
    turned, _ = tr.rotate(x, x, turn, norm=(Doubling(8), hooked))
    assert seen == [1]
    torch.testing.assert_close(turned, 2 * tr.rotate(x, x, turn)[0])


def test_a_norm_over_another_shape_is_refused() -> None:
    turn, x = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)(tr.grid(5)), torch.randn(3, 2, 5, 8)
    with pytest.raises(ValueError, match="norm of k must be over its head_dim 8, got one over"):
        tr.rotate(x, x, turn, norm=(None, nn.RMSNorm(4)))
