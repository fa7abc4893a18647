"""Exports with opset 23: planar rotations are the operator RotaryEmbedding, and onnxruntime computes the same."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import rotating
import swapped
import torch
from symbolic import OWN, image
from torch import Tensor, nn

import torchrope as tr

if tr.tensors.private("onnx.ops.rotary_embedding") is None:
    pytest.skip("torch has no torch.onnx.ops before 2.8", allow_module_level=True)


class Rotating(nn.Module):
    """Queries and keys rotated at fixed positions."""

    def __init__(self, positions: Tensor, *, halves: bool = False, **sizes: Any) -> None:
        super().__init__()
        self.encoding = tr.MixedRoPE(num_axes=2, **sizes)
        self.positions, self.halves = positions, halves

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotation = self.encoding(self.positions)
        return tr.rotate(q, k, rotation.in_halves() if self.halves else rotation)


class First(nn.Module):
    """The first output of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return rotating.outputs(self.model, {"pixel_values": pixel_values})


Computed = tuple[Counter[str], Callable[..., list[Tensor]]]


def exported(model: nn.Module, *x: Tensor, opset_version: int | None = 23, **options: Any) -> Computed:
    """The operators of an exported model, counted, and a function that runs it."""
    options |= dict(dynamo=True, verbose=False, opset_version=opset_version)
    program: Any = torch.onnx.export(model.eval(), x, **options)
    proto = program.model_proto
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        return [
            torch.from_numpy(y) for y in session.run(None, dict(zip(names, map(Tensor.numpy, inputs), strict=True)))
        ]

    return Counter(node.op_type for node in proto.graph.node), run


GRID = tr.grid(2, 3)
SIZES: dict[str, Any] = dict(num_heads=2, head_dim=8)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "per head": (lambda: Rotating(GRID, **SIZES), (2, 2, 6, 8), (2, 2, 6, 8)),
    "shared by heads": (lambda: Rotating(GRID, **SIZES, shared_heads=True), (2, 2, 6, 8), (2, 2, 6, 8)),
    "grouped heads": (lambda: Rotating(GRID, **SIZES), (3, 6, 6, 8), (3, 2, 6, 8)),
    "halves": (lambda: Rotating(GRID, halves=True, **SIZES), (2, 2, 6, 8), (2, 2, 6, 8)),
    "part of a head": (lambda: Rotating(GRID, **SIZES, rotary_dim=4), (2, 2, 6, 8), (2, 2, 6, 8)),
    "part, halves": (lambda: Rotating(GRID, halves=True, **SIZES, rotary_dim=4), (2, 2, 6, 8), (2, 2, 6, 8)),
    "positions per sample": (
        lambda: Rotating(GRID * torch.tensor([1.0, 2.5])[:, None, None], **SIZES),
        (2, 2, 6, 8),
        (2, 2, 6, 8),
    ),
    "unequal batches": (lambda: Rotating(GRID, **SIZES), (2, 2, 6, 8), (1, 2, 6, 8)),
    "no batch": (lambda: Rotating(GRID, **SIZES), (2, 6, 8), (2, 6, 8)),
    "two batch dimensions": (lambda: Rotating(GRID, **SIZES), (2, 3, 2, 6, 8), (2, 3, 2, 6, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_rotates_as_the_library(name: str) -> None:
    build, of_q, of_k = CASES[name]
    model, q, k = build(), torch.randn(of_q), torch.randn(of_k)
    operators, run = exported(model, q, k)
    assert operators["RotaryEmbedding"] == 2
    assert not operators.keys() & {"Mul", "Sub", "Concat", "Cos"}  # angles are constants
    for found, expected in zip(run(q, k), model(q, k), strict=True):
        assert rotating.error(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("opset_version", "dtype", "head_dim"),
    [(None, torch.float32, 8), (18, torch.float32, 8), (23, torch.float64, 8), (23, torch.float32, 9)],
)
def test_arithmetic_stays_where_the_operator_is_not_defined(
    opset_version: int | None, dtype: torch.dtype, head_dim: int
) -> None:
    model = Rotating(GRID, num_heads=2, head_dim=head_dim, rotary_dim=4)
    q, k = torch.randn(2, 2, 2, 6, head_dim, dtype=dtype).unbind(0)
    operators, run = exported(model, q, k, opset_version=opset_version)
    assert "RotaryEmbedding" not in operators
    assert rotating.error(run(q, k)[0], model(q, k)[0]) < 1e-6


def test_rotations_outside_of_an_export_use_no_operator() -> None:
    model, q = Rotating(GRID, **SIZES), torch.randn(2, 2, 6, 8)
    program = torch.export.export(model, (q, q))
    assert "onnx" not in str(program.graph)


TOWERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "sam3": lambda: (First(tr.swap(rotating.sam3(), "mixed")), torch.randn(2, 3, 32, 32)),
    "eva02": lambda: (tr.swap(swapped.made("eva02"), "mixed"), torch.randn(2, 3, 56, 56)),
    "dinov3": lambda: (tr.swap(swapped.made("dinov3"), "mixed"), torch.randn(2, 3, 64, 64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_swapped_models_export_with_the_operator(name: str) -> None:
    model, x = TOWERS[name]()
    operators, run = exported(model, x)
    assert operators["RotaryEmbedding"] == 4  # q and k of two layers
    expected = model.eval()(x)
    assert (run(x)[0] - expected).norm() / expected.norm() < 1e-6
    with torch.no_grad():
        for frequencies in rotating.learned(model):
            frequencies.zero_()
    assert (model(x) - expected).norm() / expected.norm() > 1e-5  # what the test can see


@pytest.mark.slow
def test_sizes_stay_dynamic() -> None:
    model = OWN["own"]().eval()
    height, width = (torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    operators, run = exported(model, image(8, (4, 6)), dynamic_shapes=({0: "batch", 2: 8 * height, 3: 8 * width},))
    assert operators["RotaryEmbedding"] == 2
    for size in ((2, 3), (5, 4), (8, 8)):
        x = image(8, size)[:1]
        assert rotating.error(run(x)[0], model(x)) < 1e-6
