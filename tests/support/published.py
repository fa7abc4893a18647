"""Helpers for tests of published checkpoints: random weights, files, expected errors, attention in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchrope as tr
from torchrope.checkpoints.convert import load_backbone

State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def randomised(model: nn.Module, spread: float = 0.2) -> nn.Module:
    """Every parameter random, the frequencies of rotations included, so that none is hidden by its start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.5 if "freqs" in name else spread)
    return model.eval()


def saved(state: object, folder: Path, name: str = "weights.pth") -> Path:
    torch.save(state, folder / name)
    return folder / name


def refused(path: Path, message: str, **options: Any) -> None:
    """Loading must fail for the reason given, in one line."""
    with pytest.raises(ValueError, match=message) as caught:
        tr.load_published(path, **options)
    assert "\n" not in str(caught.value)


def drawn(shapes: Shapes) -> State:
    """Random weights, in the float32 of a checkpoint."""
    return {
        name: torch.rand(shape) + 0.5 if "norm" in name and name.endswith("weight") else 0.2 * torch.randn(shape)
        for name, shape in shapes.items()
    }


def linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, dim: int) -> Shapes:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def load_within_lightning(state: State, folder: Path, **options: Any) -> tr.ViT:
    path = folder / "last.ckpt"
    # What Lightning writes around it.
    torch.save({"state_dict": {"model." + name: value for name, value in state.items()}, "epoch": 3}, path)
    model = tr.load_published(path, **options)
    assert isinstance(model, tr.ViT)
    return model


def attend(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor | None) -> Tensor:
    """Attention of `(batch, heads, tokens, 64)` with dense rotations `(heads or 1, tokens, 64, 64)`."""
    if rotations is not None:
        q, k = (torch.einsum("htij,bhtj->bhti", rotations.expand(q.shape[1], -1, -1, -1), x) for x in (q, k))
    scores = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
    return (scores @ v).transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def exp_dense(generators: Tensor, positions: Tensor, head_dim: int) -> Tensor:
    """exp(sum p A) of blocks `(axes, heads, n, b, b)` at positions `(tokens, axes)`, dense; the rest is I."""
    exponents = torch.einsum("ta,ahnij->htnij", positions, generators.double()).contiguous()
    rotations = [
        torch.stack([torch.block_diag(*blocks) for blocks in torch.matrix_exp(head).unbind(0)]) for head in exponents
    ]
    dense = torch.eye(head_dim, dtype=torch.float64).repeat(len(rotations), len(positions), 1, 1)
    rotary = rotations[0].shape[-1]
    dense[..., :rotary, :rotary] = torch.stack(rotations)
    return dense


def layer_norm(state: State, name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-5)


def agree(model: tr.ViT, x: Tensor, expected: Tensor) -> None:
    """In float64 but for the positions, so that random weights as wild as these may be told apart from mistakes."""
    with torch.no_grad():
        assert (model.double()(x.double()) - expected).abs().max() < 1e-4


def starts(backbone: tr.Features, path: Path, sizes: list[tuple[int, int]], **options: Any) -> None:
    """A backbone that started with a file must give the maps of the model that the file is read into."""
    whole = tr.load_published(path, **options)
    assert isinstance(whole, tr.ViT)
    load_backbone(backbone, whole)
    for size in sizes:
        x = torch.randn(1, 3, *size)
        expected = whole.feature_maps(x, backbone.indices, norm=False)
        for map, other in zip(backbone.eval()(x), expected, strict=True):
            assert (map - other).abs().max() < 1e-4 * max(1, other.abs().max())
