"""LieRE's checkpoints: the logits of its published forward pass, rendered here in float64 from its formulas."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from published import (
    Shapes,
    State,
    agree,
    attend,
    drawn,
    exp_dense,
    layer_norm,
    linear,
    load_within_lightning,
    norm,
    saved,
    split_heads,
    starts,
)
from torch import Tensor
from torch.nn import functional

import torchrope as tr

DEPTH = 3
HEADS, DIM = 2, 128


def _liere_state(
    axes: int = 2, *, b: int = 8, layers: int = DEPTH, per_head: bool = True, patches: int = 16, entries: int = 48
) -> State:
    shapes: Shapes = {
        **linear("to_patch_embedding.1", DIM, entries),
        "cls_token": (1, 1, DIM),
        **norm("mlp_head.0", DIM),
        **linear("mlp_head.1", 5, DIM),
    }
    for layer in range(DEPTH):
        name = f"transformer.layers.{layer}"
        shapes |= norm(f"{name}.0.norm", DIM) | {f"{name}.0.fn.to_qkv.weight": (3 * DIM, DIM)}
        shapes |= linear(f"{name}.0.fn.to_out.0", DIM, DIM) | norm(f"{name}.1.norm", DIM)
        shapes |= linear(f"{name}.1.fn.net.0", 96, DIM) | linear(f"{name}.1.fn.net.3", DIM, 96)
    state = drawn(shapes) | {"pos_embedding": torch.zeros(1, patches + 1, DIM)}
    state["mlp_head.0.weight"] = torch.rand(DIM) + 0.5
    if b:
        blocks = 64 // b * (HEADS if per_head else 1)
        state["position_encoder.generator_raw_params"] = 2 * math.pi * torch.rand(axes, layers, blocks, b, b)
    return state


def _liere_positions(sizes: tuple[int, ...], trained: tuple[int, ...]) -> Tensor:
    """Of m patches where n were trained: from 0 to m / n in m steps, whatever the resolution."""
    lines = [torch.linspace(0, m / n, m, dtype=torch.float64) for m, n in zip(sizes, trained, strict=True)]
    return torch.cartesian_prod(*lines)


def _liere_rotations(state: State, positions: Tensor, layer: int) -> Tensor | None:
    """A = triu(W, 1) - triu(W, 1)^T of a layer; the class token, first, is not rotated."""
    if "position_encoder.generator_raw_params" not in state:
        return None
    upper = state["position_encoder.generator_raw_params"][:, layer].triu(1)
    blocks = (upper - upper.mT).unflatten(1, (-1, 64 // upper.shape[-1]))  # (axes, heads, n, b, b)
    return exp_dense(blocks, tr.prefix(positions, 1), 64)


def _visionllama_rotations(positions: Tensor) -> Tensor:
    axes = positions.shape[1]
    n = 64 // axes // 2
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    phases = torch.exp(-4 * torch.linspace(0, 1, n, dtype=torch.float64))
    blocks = torch.zeros(axes, 1, axes * n, 2, 2, dtype=torch.float64)
    for axis in range(axes):
        blocks[axis, 0, axis * n : (axis + 1) * n] = phases[:, None, None] * turn
    return exp_dense(blocks, tr.prefix(positions, 1), 64)


def _liere_forward(
    state: State, x: Tensor, patch: tuple[int, ...], rotations_of: Callable[[int], Tensor | None]
) -> Tensor:
    """Channels last in a patch; pre-norm layers; the class token, normalised, is classified."""
    state = {name: value.double() for name, value in state.items()}
    tokens = x.double()
    for axis, extent in enumerate(patch):
        tokens = tokens.unfold(2 + axis, extent, extent)  # (batch, channels, *lattice, *patch)
    tokens = tokens.flatten(2, 1 + len(patch)).movedim(1, -1).flatten(2)
    tokens = functional.linear(tokens, state["to_patch_embedding.1.weight"], state["to_patch_embedding.1.bias"])
    tokens = torch.cat([state["cls_token"].expand(len(x), -1, -1), tokens], dim=1)
    if tokens.shape[1] == state["pos_embedding"].shape[1]:
        tokens = tokens + state["pos_embedding"]
    for layer in range(DEPTH):
        name = f"transformer.layers.{layer}"
        inner = layer_norm(state, f"{name}.0.norm", tokens) @ state[f"{name}.0.fn.to_qkv.weight"].T
        q, k, v = (split_heads(part, HEADS) for part in inner.chunk(3, dim=-1))
        mixed = attend(q, k, v, rotations_of(layer))
        tokens = tokens + functional.linear(
            mixed, state[f"{name}.0.fn.to_out.0.weight"], state[f"{name}.0.fn.to_out.0.bias"]
        )
        inner = layer_norm(state, f"{name}.1.norm", tokens)
        inner = functional.linear(inner, state[f"{name}.1.fn.net.0.weight"], state[f"{name}.1.fn.net.0.bias"])
        inner = functional.gelu(inner)
        tokens = tokens + functional.linear(inner, state[f"{name}.1.fn.net.3.weight"], state[f"{name}.1.fn.net.3.bias"])
    pooled = layer_norm(state, "mlp_head.0", tokens[:, 0])
    return functional.linear(pooled, state["mlp_head.1.weight"], state["mlp_head.1.bias"])


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("stored", [1, DEPTH])
@pytest.mark.parametrize("b", [2, 8, 24, 64])
def test_liere_as_published(b: int, stored: int, per_head: bool, tmp_path: Path) -> None:
    state = _liere_state(b=b, layers=stored, per_head=per_head)
    model = load_within_lightning(state, tmp_path, layers="as published")
    x = torch.randn(2, 3, 16, 16)
    rotations = _liere_rotations(state, _liere_positions((4, 4), (4, 4)), 0)
    agree(model, x, _liere_forward(state, x, (4, 4), lambda layer: rotations))
    assert len(model.encodings) == 1
    assert model.encodings[0].block_size == b


def test_liere_per_layer_is_offered_and_differs(tmp_path: Path) -> None:
    state = _liere_state()
    x = torch.randn(2, 3, 16, 16)
    rotations_of = partial(_liere_rotations, state, _liere_positions((4, 4), (4, 4)))
    model = load_within_lightning(state, tmp_path, layers="per layer")
    expected = _liere_forward(state, x, (4, 4), rotations_of)
    agree(model, x, expected)
    with pytest.warns(UserWarning, match="generators for 3 layers, but LieRE's code uses those of layer 0") as warned:
        published = load_within_lightning(state, tmp_path)
    assert warned[0].filename == load_within_lightning.__code__.co_filename
    with torch.no_grad():
        assert (published(x) - expected).abs().max() > 1e-2
    with warnings.catch_warnings():  # one layer is no question
        warnings.simplefilter("error")
        load_within_lightning(_liere_state(layers=1), tmp_path)


def test_backbone_starts_with_liere_and_runs_past_its_lattice(tmp_path: Path) -> None:
    shape = dict(patch_size=4, dim=DIM, depth=DEPTH, num_heads=HEADS, mlp_dim=96, qkv_bias=False, norm_eps=1e-5)
    backbone = tr.Features(tr.ViT((32, 32), encoding="liere:8", **shape), indices=(1, DEPTH))
    starts(backbone, saved(_liere_state(), tmp_path), [(16, 16), (24, 32)], layers="as published")


def test_liere_at_another_size_needs_its_published_spacing(tmp_path: Path) -> None:
    state = _liere_state(layers=1)
    x = torch.randn(2, 3, 24, 24)
    rotations = _liere_rotations(state, _liere_positions((6, 6), (4, 4)), 0)
    expected = _liere_forward(state, x, (4, 4), lambda layer: rotations)
    agree(load_within_lightning(state, tmp_path, spacing=6 / 4 / 5), x, expected)
    with torch.no_grad():
        assert (load_within_lightning(state, tmp_path)(x) - expected).abs().max() > 1e-2


def test_liere_on_videos(tmp_path: Path) -> None:
    state = _liere_state(3, layers=1, patches=2 * 3 * 4, entries=3 * 2 * 4 * 4)
    with pytest.raises(ValueError, match="patch_size= is required: 96 numbers per patch do not determine it"):
        load_within_lightning(state, tmp_path)
    with pytest.raises(ValueError, match="input_size= is required: the 25 entries of pos_embedding"):
        load_within_lightning(state, tmp_path, patch_size=(2, 4, 4))
    model = load_within_lightning(state, tmp_path, patch_size=(2, 4, 4), input_size=(4, 12, 16))
    x = torch.randn(2, 3, 4, 12, 16)
    rotations = _liere_rotations(state, _liere_positions((2, 3, 4), (2, 3, 4)), 0)
    agree(model, x, _liere_forward(state, x, (2, 4, 4), lambda layer: rotations))


def test_lieres_published_video_needs_no_option(tmp_path: Path) -> None:
    model = load_within_lightning(_liere_state(3, layers=1, patches=4 * 14 * 14, entries=3 * 2 * 16 * 16), tmp_path)
    assert model.embed.patch_size == (2, 16, 16)
    assert model.position_map.spacing == (1 / 3, 1 / 13, 1 / 13)


@pytest.mark.parametrize("axes", [2, 3])
def test_lieres_visionllama(axes: int, tmp_path: Path) -> None:
    sizes, patch = ((16, 16), (4, 4)) if axes == 2 else ((4, 12, 16), (2, 4, 4))
    lattice = tuple(size // extent for size, extent in zip(sizes, patch, strict=True))
    state = _liere_state(b=0, patches=math.prod(lattice), entries=3 * math.prod(patch))
    model = load_within_lightning(state, tmp_path, input_size=sizes, patch_size=patch)
    x = torch.randn(2, 3, *sizes)
    rotations = _visionllama_rotations(_liere_positions(lattice, lattice))
    agree(model, x, _liere_forward(state, x, patch, lambda layer: rotations))


def test_lieres_absolute_baseline(tmp_path: Path) -> None:
    state = _liere_state(b=0) | {"pos_embedding": torch.randn(1, 17, DIM)}
    x = torch.randn(2, 3, 16, 16)
    agree(load_within_lightning(state, tmp_path), x, _liere_forward(state, x, (4, 4), lambda layer: None))


LIERE = "^checkpoint of LieRE: "


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"pos_embedding": torch.ones(1, 17, DIM)},
            {},
            "pos_embedding must be zero in a file with generators, got other values$",
        ),
        ({}, dict(layers="all"), "layers must be 'as published' or 'per layer', got 'all'$"),
        ({}, dict(input_size=32), r"input_size must give 16 patches of \(4, 4\), as in pos_embedding, got \(32, 32\)$"),
        ({}, dict(patch_size=5), r"patch_size must be 2 numbers that divide 48, got \(5, 5\)$"),
        (
            {"position_encoder.generator_raw_params": torch.ones(2, 2, 16, 8, 8)},
            {},
            r"must be \(axes, 1 or 3, blocks or blocks x 2 heads, b, b\), got \(2, 2, 16, 8, 8\)$",
        ),
        (
            {"transformer.layers.0.0.fn.to_qkv.weight": torch.ones(192, DIM)},
            {},
            "dim must equal the width of q and be divisible by 64, got 128 and 64$",
        ),
        ({"mlp_head.2.weight": torch.ones(3)}, {}, "got unused mlp_head.2.weight$"),
    ],
)
def test_liere_refusals(change: State, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=LIERE + ".*" + message):
        load_within_lightning(_liere_state(layers=1) | change, tmp_path, **options)
