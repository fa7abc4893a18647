"""Exports to ONNX: which models go as they are, which are frozen first, and that the error says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import rotating
import torch
from swapped import awake, made
from torch import Tensor, nn

import torchrope as tr

SMALL: dict[str, Any] = dict(patch_size=4, num_outputs=5, dim=32, depth=1, num_heads=2)


def ours(encoding: str) -> nn.Module:
    return tr.ViT((16, 8), **SMALL, encoding=encoding).eval()


def swapped(encoding: str) -> nn.Module:
    return awake(tr.swap(made("vit", depth=1), encoding, init="paper" if encoding == "axial" else None)).eval()


def said(error: BaseException | None) -> str:
    """All that an error and its causes say; the exporter wraps what a model raises."""
    told = []
    while error is not None:
        told.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(told)


def refuses(model: Any, path: Path, *, dynamo: bool) -> None:
    with pytest.raises(Exception, match=r"^") as caught:
        torch.onnx.export(model, (torch.randn(1, 3, 16, 8),), path, dynamo=dynamo, verbose=False)
    line = next(line for line in said(caught.value).splitlines() if "torchrope.freeze(model, input_size)" in line)
    assert type(model.encodings[0]).__name__ in line


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("encoding", ["liere:4", "liere", "comrope-ld:4", "comrope-ap:4", "string:4"])
def test_error_says_that_freeze_comes_first(encoding: str, tmp_path: Path) -> None:
    refuses(ours(encoding), tmp_path / "m.onnx", dynamo=False)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["liere:4", "string:4"])
def test_error_of_the_exporter_of_graphs_too(encoding: str, tmp_path: Path) -> None:
    refuses(ours(encoding), tmp_path / "m.onnx", dynamo=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "freezes"),
    [
        (lambda: (ours("learned+mixed"), torch.randn(1, 3, 16, 8)), False),
        (lambda: (ours("string:4"), torch.randn(1, 3, 16, 8)), True),
        (lambda: (swapped("axial"), torch.randn(1, 3, 64, 64)), False),
        (lambda: (swapped("liere:4"), torch.randn(1, 3, 64, 64)), True),
        (lambda: (tr.inflate(ours("comrope-ld:4"), patch_size=2, size=4), torch.randn(1, 3, 4, 16, 8)), True),
    ],
)
def test_code_of_the_guide_runs(build: Any, freezes: bool, tmp_path: Path) -> None:
    model, x = build()
    expected = model(x)
    if freezes:
        model = tr.freeze(model, x)
    torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (came,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(came), expected, atol=1e-4, rtol=1e-4)


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


def exported(model: nn.Module, *x: Tensor, **options: Any) -> Callable[..., list[Tensor]]:
    """A function that runs an exported model."""
    program: Any = torch.onnx.export(model.eval(), x, dynamo=True, verbose=False, **options)
    model_bytes = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(model_bytes, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        return [
            torch.from_numpy(y) for y in session.run(None, dict(zip(names, map(Tensor.numpy, inputs), strict=True)))
        ]

    return run


GRID = tr.grid(2, 3)
SIZES: dict[str, Any] = dict(num_heads=2, head_dim=8)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "per head": (lambda: Rotating(GRID, **SIZES), (2, 2, 6, 8), (2, 2, 6, 8)),
    "shared by heads": (lambda: Rotating(GRID, **SIZES, shared_heads=True), (2, 2, 6, 8), (2, 2, 6, 8)),
    "grouped heads": (lambda: Rotating(GRID, **SIZES), (3, 6, 6, 8), (3, 2, 6, 8)),
    "part, halves": (lambda: Rotating(GRID, halves=True, **SIZES, rotary_dim=4), (2, 2, 6, 8), (2, 2, 6, 8)),
    "positions per sample": (
        lambda: Rotating(GRID * torch.tensor([1.0, 2.5])[:, None, None], **SIZES),
        (2, 2, 6, 8),
        (2, 2, 6, 8),
    ),
    "two batch dimensions": (lambda: Rotating(GRID, **SIZES), (2, 3, 2, 6, 8), (2, 3, 2, 6, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("opset_version", [None, 23])
@pytest.mark.parametrize("name", CASES)
def test_exported_rotations_equal_the_librarys(name: str, opset_version: int | None) -> None:
    build, of_q, of_k = CASES[name]
    model, q, k = build(), torch.randn(of_q), torch.randn(of_k)
    run = exported(model, q, k, opset_version=opset_version)
    for found, expected in zip(run(q, k), model(q, k), strict=True):
        assert rotating.error(found, expected) < 1e-6


TOWERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "sam3": lambda: (First(tr.swap(rotating.sam3(), "mixed")), torch.randn(2, 3, 32, 32)),
    "eva02": lambda: (tr.swap(made("eva02"), "mixed"), torch.randn(2, 3, 56, 56)),
    "dinov3": lambda: (tr.swap(made("dinov3"), "mixed"), torch.randn(2, 3, 64, 64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_swapped_towers_export(name: str) -> None:
    model, x = TOWERS[name]()
    run = exported(model, x)
    expected = model.eval()(x)
    assert (run(x)[0] - expected).norm() / expected.norm() < 1e-6
    with torch.no_grad():
        for frequencies in rotating.learned(model):
            frequencies.zero_()
    assert (model(x) - expected).norm() / expected.norm() > 1e-5  # what the test can see
