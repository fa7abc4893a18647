"""Rotations by given angles: slices, inverses, refusals. test_gradients_of_angles has values and gradients."""

import pytest
import torch

import torchrope as tr
from torchrope.rotations import Planar, from_angles


def _qk(heads: int = 4, tokens: int = 6, head_dim: int = 16) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 2, heads, tokens, head_dim, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["reference", None])
def test_angles_of_an_encoding_give_its_rotation(backend: str | None) -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=4, head_dim=16)
    own = encoding(tr.grid(2, 3)).detach()
    q, k = _qk().float()
    with tr.backend(backend or "auto"):
        for one, other in zip(tr.rotate(q, k, from_angles(own.angles())), tr.rotate(q, k, own), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(from_angles(own.angles()).matrix(), own.matrix())


def test_slices_and_inverse_have_the_angles_of_theirs() -> None:
    angles = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    rotation = from_angles(angles)
    torch.testing.assert_close(rotation[:, 1:3, 2:].angles(), angles[:, 1:3, 2:])
    torch.testing.assert_close(rotation[..., torch.tensor([4, 0])].angles(), angles[:, :, [4, 0]])
    q, k = _qk()
    turned = tr.rotate(*tr.rotate(q, k, rotation), rotation.inverse())
    torch.testing.assert_close(turned[0], q)
    shared = from_angles(angles[:, :1], num_heads=4)
    assert shared[:, 2:].heads == 2
    torch.testing.assert_close(tr.rotate(q[:, 2:], k[:, 2:], shared[:, 2:])[0], tr.rotate(q, k, shared)[0][:, 2:])
    assert isinstance(rotation.detach(), Planar)
    assert rotation.to(torch.float32).dtype is torch.float32


def test_empty_and_unequal() -> None:
    q, k = _qk(tokens=0)
    assert tr.rotate(q, k, from_angles(torch.zeros(0, 8, dtype=torch.float64)))[0].shape == q.shape
    with pytest.raises(ValueError, match="must have the rotation's 5 tokens, got 6"):
        tr.rotate(*_qk(), from_angles(torch.zeros(5, 8)))
    with pytest.raises(ValueError, match=r"angles must be .*, got \(8,\)$"):
        from_angles(torch.zeros(8))
    with pytest.raises(ValueError, match=r"got bfloat16 \(3, 8\)$"):
        from_angles(torch.zeros(3, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="head_dim must be 2 · 8 pairs or more, got 15"):
        from_angles(torch.zeros(3, 8), head_dim=15)
    with pytest.raises(ValueError, match="no frequencies"):
        from_angles(torch.zeros(3, 8)).at(torch.zeros(3, 1))
    assert tr.rotate(*_qk(), from_angles(torch.full((6, 8), torch.nan)))[0].isnan().any()


def test_angles_of_other_heads_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"angles must have 1 head or num_heads = 8, got \(4, 5, 2\)"):
        from_angles(torch.rand(4, 5, 2), num_heads=8)
    assert from_angles(torch.rand(1, 5, 2), num_heads=8).heads == 8
