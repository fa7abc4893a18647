"""Exports to ONNX: which models go as they are, which are frozen first, and that the error says so."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from swapped import awake, made
from torch import nn

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
@pytest.mark.parametrize("encoding", ["liere:4", "string:4"])
def test_other_exports_and_graphs_are_not_concerned(encoding: str) -> None:
    model, x = ours(encoding), torch.randn(1, 3, 16, 8)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-5)


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
