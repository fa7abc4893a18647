"""Gradients of given angles by the kernels, second derivatives, others' tables; frequencies as arrays."""

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

import torchrope as tr
from torchrope.rotations import GivenAngles, from_angles

SHAPES = [(1, 5, 3), (4, 5, 3), (2, 1, 5, 3), (2, 4, 5, 3), (1, 4, 5, 3), (2, 2, 5, 3), (1, 2, 5, 3), (2, 5, 3)]


def _complex_oracle(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Multiply pairs (2i, 2i + 1) by e^(i angle)."""
    turned, rest = x[..., : 2 * angles.shape[-1]], x[..., 2 * angles.shape[-1] :]
    per_head = angles.repeat_interleave(x.shape[-3] // angles.shape[-3], dim=-3)
    product = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(per_head), per_head
    )
    return torch.cat([torch.view_as_real(product).flatten(-2), rest], dim=-1)


def _rotation(angles: torch.Tensor, interleaved: bool) -> GivenAngles:
    rotation = from_angles(angles, head_dim=8)
    return rotation if interleaved else rotation.in_halves()


def _learned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=True)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_complex_numbers(shape: tuple, interleaved: bool, backend: str) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    angles = (3 * torch.randn(shape, dtype=dtype)).requires_grad_()
    keys = shape[-3] if shape[-3] != 1 else 2  # fewer keys where heads allow it
    q, k = (torch.randn(2, heads, 5, 8, dtype=dtype, requires_grad=True) for heads in (4, keys))
    weights = [torch.randn_like(x) for x in (q, k)]
    order = torch.tensor([0, 3, 1, 4, 2, 5, 6, 7]) if not interleaved else torch.arange(8)
    with tr.backend(backend):
        rotated = tr.rotate(q, k, _rotation(angles, interleaved))
        ours = torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, rotated, strict=True)), (q, k, angles))
    expected = [_complex_oracle(x[..., order], angles)[..., order.argsort()] for x in (q, k)]
    theirs = torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, expected, strict=True)), (q, k, angles))
    atol = 1e-12 if backend == "reference" else 2e-5
    for one, other in zip((*rotated, *ours), (*expected, *theirs), strict=True):
        assert torch.allclose(one, other, atol=atol)


def test_gradcheck() -> None:
    angles = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    run = lambda a, x: tr.apply(x, from_angles(a, head_dim=6))  # noqa: E731
    assert torch.autograd.gradcheck(run, (angles, x))
    assert torch.autograd.gradgradcheck(run, (angles, x))


def test_tables_of_transformers() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8)
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(6).expand(2, -1) * torch.tensor([[1], [7]]))
    angles = torch.atan2(sin, cos)[..., None, :, :4]
    ours = tr.rotate(q, k, from_angles(angles).in_halves())
    for one, other in zip(ours, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 4])
def test_bfloat16_and_compilation(heads: int) -> None:
    angles, q = torch.randn(2, heads, 5, 4), torch.randn(2, 4, 5, 8)
    narrow = tr.apply(q.bfloat16(), from_angles(angles.bfloat16().float()))
    assert narrow.dtype == torch.bfloat16
    assert torch.allclose(narrow.float(), tr.apply(q, from_angles(angles.bfloat16().float())), atol=0.05)
    run = torch.compile(lambda a, x: tr.apply(x, from_angles(a)), fullgraph=True, backend="aot_eager")
    learned = angles.clone().requires_grad_()
    run(learned, q).square().mul(q).sum().backward()
    plain = angles.clone().requires_grad_()
    tr.apply(q, from_angles(plain)).square().mul(q).sum().backward()
    assert torch.allclose(learned.grad, plain.grad, atol=1e-5)


def test_empty_inputs() -> None:
    x = torch.randn(2, 4, 5, 8)
    assert torch.equal(tr.apply(x, from_angles(_learned(4, 5, 0), head_dim=8)), x)
    assert tr.apply(x[:, :, :0], from_angles(_learned(4, 0, 4))).shape == (2, 4, 0, 8)
    assert tr.apply(x[:0], from_angles(_learned(0, 4, 5, 4))).shape == (0, 4, 5, 8)
    assert torch.equal(tr.apply(x, from_angles(_learned(2, 4, 5, 4))), x)


@pytest.mark.parametrize(
    "name",
    [name for name in sorted(tr.encodings.ROTARY) if not name.startswith(("none", "liere", "comrope-a", "comrope-ld"))],
)
def test_frequencies_as_arrays_give_the_angles(name: str) -> None:
    axes = 3 if name in ("mrope", "mrope-interleaved", "mhrope", "videorope") else 2
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=axes, num_heads=6, head_dim=24)
    if not encoding.has_frequencies:
        pytest.skip("blocks, not pairs")
    frequencies = encoding.frequencies_per_axis().detach().numpy()  # (axes, heads or 1, pairs)
    positions = np.random.default_rng(0).normal(size=(7, axes)).astype(np.float32)
    rotation = encoding(torch.from_numpy(positions))
    rotation = getattr(rotation, "planar", rotation)
    angles = np.einsum("ta,ahp->htp", positions, frequencies)
    assert np.allclose(angles, rotation.angles().detach().numpy(), atol=1e-5)
