"""What only a GPU shows of the Triton kernels: compiled models, CUDA graphs, streams, sizes beyond 32 bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torchrope as tr

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"
NAMES = ["axial", "mixed", "comrope-ld:8", "comrope-ap:8", "liere:8", "liere:32"]


def model_of(name: str) -> tr.ViT:
    torch.manual_seed(0)
    sizes = dict(patch_size=4, dim=64, depth=2, num_heads=2, mlp_dim=64, num_outputs=10)
    return tr.ViT((16, 24), encoding=name, **sizes).to(DEVICE)


def step(model: torch.nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> dict[str, Tensor]:
    """Return logits and all gradients of a training step."""
    model.zero_grad(set_to_none=True)
    logits = run(images)
    functional.cross_entropy(logits.float(), torch.arange(len(images), device=images.device) % 10).backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": logits.detach().clone(), **gradients}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        error = (found[name].float() - truth.float()).abs().max().item()
        assert error <= tolerance * max(1e-3, truth.float().abs().max().item()), f"{name}: error {error:.3g}"


@pytest.mark.parametrize("name", NAMES)
def test_training_step_equals_the_reference_also_compiled(name: str) -> None:
    model, images = model_of(name), torch.randn(6, 3, 16, 24, device=DEVICE)
    with tr.backend("reference"):
        expected = step(model, model, images)
    with tr.backend("triton"):
        assert_near(step(model, model, images), expected, 2e-4)
        compiled = torch.compile(model, fullgraph=True)
        assert_near(step(model, compiled, images), expected, 2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_cuda_graph_computes_with_new_inputs(name: str) -> None:
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=32).to(DEVICE)
    positions = tr.grid(3, 5).to(DEVICE)
    q, k = torch.randn(2, 4, 2, 15, 32, device=DEVICE)
    upstream = torch.randn(2, 4, 2, 15, 32, device=DEVICE)
    leaves = [q.requires_grad_(), k.requires_grad_(), *encoding.parameters()]

    def run() -> list[Tensor]:
        turned = tr.rotate(q, k, encoding(positions))
        return [*turned, *torch.autograd.grad(turned, leaves, list(upstream))]

    with tr.backend("triton"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = run()
    with torch.no_grad():
        for x in leaves:
            x.mul_(0.5)
    graph.replay()
    with tr.backend("reference"):
        expected = run()
    names = [str(index) for index in range(len(expected))]
    assert_near(dict(zip(names, recorded, strict=True)), dict(zip(names, expected, strict=True)), 2e-4)


@pytest.mark.parametrize("name", ["mixed", "comrope-ld:8", "liere:8"])
def test_vectors_beyond_32_bits(name: str) -> None:
    """Offsets of the last samples exceed 2^31 elements."""
    batch, tokens, heads, head_dim = 11000, 256, 12, 64
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB")
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=heads, head_dim=head_dim).to(DEVICE)
    q = torch.randn(batch, heads, tokens, head_dim, device=DEVICE, dtype=torch.bfloat16)
    assert q.numel() > 2**31
    with tr.backend("triton"), torch.no_grad():
        rotation = encoding(tr.grid(16, 16).to(DEVICE))
        turned = tr.apply(q, rotation)
        for part in (slice(0, 32), slice(-32, None)):  # enough for the same kernels
            assert torch.equal(turned[part], tr.apply(q[part].contiguous(), rotation))
