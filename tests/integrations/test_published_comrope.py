"""ComRoPE's checkpoints: the logits of its published forward pass, rendered here in float64 from its formulas."""

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
from torchrope.models import QuickGELU

DEPTH, HEADS = 3, 2
WIDE, PATCH, SIDE = 48, 8, 4


def _comrope_state(
    kind: str, *, b: int = 4, axes: int = 2, frames: int = 1, with_table: bool = True, side: int = SIDE
) -> State:
    blocks = WIDE // HEADS // b
    shapes: Shapes = {
        "vision_model.embeddings.class_embedding": (WIDE,),
        "vision_model.embeddings.patch_embedding.weight": (WIDE, 3, PATCH, PATCH),
        **norm("vision_model.pre_layrnorm", WIDE),
        **norm("vision_model.post_layernorm", WIDE),
        **linear("classification_head", 5, WIDE),
    }
    if with_table:
        shapes["vision_model.embeddings.position_embedding"] = (frames, side, side, WIDE)
    for layer in range(DEPTH):
        name = f"vision_model.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{name}.self_attn.{part}", WIDE, WIDE)
        shapes |= norm(f"{name}.layer_norm1", WIDE) | norm(f"{name}.layer_norm2", WIDE)
        shapes |= linear(f"{name}.mlp.fc1", 64, WIDE) | linear(f"{name}.mlp.fc2", WIDE, 64)
        shapes[f"{name}.self_attn.freqs"] = (HEADS, 1, blocks, b, b)
        if kind == "ld":
            shapes[f"{name}.self_attn.multiplier"] = (1, axes, blocks, 1, 1)
    state = drawn(shapes)
    for name in state:
        if name.endswith(("freqs", "multiplier", "position_embedding")):
            state[name] = torch.randn_like(state[name])
    return state


def _comrope_generators(state: State, layer: int, axes: int) -> Tensor:
    """Blocks (P - P^T) times a factor per axis, shared by the heads, or times 1 for axis j mod N and 0 for others."""
    name = f"vision_model.encoder.layers.{layer}.self_attn"
    free = state[f"{name}.freqs"][:, 0]  # (heads, blocks, b, b)
    if f"{name}.multiplier" in state:
        factors = state[f"{name}.multiplier"][0]  # (axes, blocks, 1, 1)
    else:
        factors = functional.one_hot(torch.arange(free.shape[1]) % axes, axes).T.double()[..., None, None]
    return factors.unsqueeze(1) * (free - free.mT)


def _comrope_positions(lattice: tuple[int, ...]) -> Tensor:
    """Patch centres as shares of the image, frames too; the class token at 0.5 on every axis."""
    places = (tr.grid(*lattice, dtype=torch.float64) + 0.5) / lattice[-1]
    return torch.cat([torch.full((1, len(lattice)), 0.5, dtype=torch.float64), places])


def _looked_up(table: Tensor, position: Tensor) -> Tensor:
    """The table `(frames, side, side, dim)` as published: its last axis is read at the first coordinate, and so on.

    On two axes the first coordinate is 0, the middle of [-1, 1]. Linear between entries, the border beyond them.
    """
    places = [0.0] * (3 - len(position)) + [2 * p - 1 for p in position.tolist()]
    for place in places:  # the last remaining axis with the first coordinate
        axis = table.ndim - 2
        entries = table.shape[axis]
        where = min(max((place + 1) / 2 * (entries - 1), 0), entries - 1)
        low = min(int(where), max(entries - 2, 0))
        share = where - low
        high = min(low + 1, entries - 1)
        table = (1 - share) * table.select(axis, low) + share * table.select(axis, high)
    return table


def _comrope_forward(state: State, x: Tensor, lattice: tuple[int, ...], activation: str = "quick_gelu") -> Tensor:
    """CLIP's tower over frames `(batch, channels, frames, height, width)`, class token first."""
    state = {name: value.double() for name, value in state.items()}
    frames = x.double() if x.ndim == 5 else x.double().unsqueeze(2)
    tower = "vision_model"
    patches = [
        functional.conv2d(frame, state[f"{tower}.embeddings.patch_embedding.weight"], stride=PATCH).flatten(2)
        for frame in frames.unbind(2)
    ]
    tokens = torch.cat(patches, dim=2).mT
    front = state[f"{tower}.embeddings.class_embedding"].expand(len(x), 1, -1)
    tokens = torch.cat([front, tokens], dim=1)
    positions = _comrope_positions(lattice)
    if f"{tower}.embeddings.position_embedding" in state:
        table = state[f"{tower}.embeddings.position_embedding"]
        tokens = tokens + torch.stack([_looked_up(table, position) for position in positions])
    tokens = layer_norm(state, f"{tower}.pre_layrnorm", tokens)
    for layer in range(DEPTH):
        name = f"{tower}.encoder.layers.{layer}"
        rotations = exp_dense(_comrope_generators(state, layer, len(lattice)), positions, WIDE // HEADS)

        def project(part: str, inner: Tensor, name: str = name) -> Tensor:
            return functional.linear(inner, state[f"{name}.{part}.weight"], state[f"{name}.{part}.bias"])

        inner = layer_norm(state, f"{name}.layer_norm1", tokens)
        q, k, v = (split_heads(project(f"self_attn.{part}_proj", inner), HEADS) for part in "qkv")
        tokens = tokens + project("self_attn.out_proj", attend(q, k, v, rotations))
        inner = project("mlp.fc1", layer_norm(state, f"{name}.layer_norm2", tokens))
        inner = inner * torch.sigmoid(1.702 * inner) if activation == "quick_gelu" else functional.gelu(inner)
        tokens = tokens + project("mlp.fc2", inner)
    pooled = layer_norm(state, f"{tower}.post_layernorm", tokens[:, 0])
    if "classification_head.weight" not in state:
        return pooled
    return functional.linear(pooled, state["classification_head.weight"], state["classification_head.bias"])


@pytest.mark.parametrize("with_table", [True, False])
@pytest.mark.parametrize("b", [2, 4])
@pytest.mark.parametrize("kind", ["ap", "ld"])
def test_comrope_as_published(kind: str, b: int, with_table: bool, tmp_path: Path) -> None:
    state = _comrope_state(kind, b=b, with_table=with_table)
    options = {} if with_table else dict(input_size=32)
    model = load_within_lightning(state, tmp_path, **options)
    assert isinstance(model.encodings[0], tr.ComRoPEAP if kind == "ap" else tr.ComRoPELD)
    x = torch.randn(2, 3, 32, 32)
    agree(model, x, _comrope_forward(state, x, (4, 4)))
    agree(
        load_within_lightning(state, tmp_path, activation="gelu", **options),
        x,
        _comrope_forward(state, x, (4, 4), "gelu"),
    )


@pytest.mark.parametrize("kind", ["ap", "ld"])
def test_comrope_on_videos(kind: str, tmp_path: Path) -> None:
    state = _comrope_state(kind, axes=3, frames=5, side=3)
    x = torch.randn(1, 3, 5, 24, 24)
    agree(load_within_lightning(state, tmp_path), x, _comrope_forward(state, x, (5, 3, 3)))
    del state["vision_model.embeddings.position_embedding"]
    del state["classification_head.weight"], state["classification_head.bias"]
    with pytest.raises(ValueError, match="input_size= is required: the file has no position table"):
        load_within_lightning(state, tmp_path)
    agree(load_within_lightning(state, tmp_path, input_size=(5, 24, 24)), x, _comrope_forward(state, x, (5, 3, 3)))


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("kind", ["ap", "ld"])
def test_other_sizes_by_comropes_rule_have_the_published_logits(kind: str, frames: int, tmp_path: Path) -> None:
    axes = 2 if frames == 1 else 3
    state = _comrope_state(kind, axes=axes, with_table=False)
    before = (frames,) if axes == 3 else ()
    options = dict(input_size=(*before, 32, 32), positions="range")
    model = load_within_lightning(state, tmp_path, **options)
    for side in (SIDE, 2 * SIDE, SIDE - 1):
        x = torch.randn(2, 3, *before, PATCH * side, PATCH * side)
        agree(model, x, _comrope_forward(state, x, (*before, side, side)))
    trained = load_within_lightning(state, tmp_path, input_size=(*before, 32, 32))
    assert torch.equal(trained.positions((*before, SIDE, SIDE)), model.positions((*before, SIDE, SIDE)))
    moved = model.positions((*before, 2 * SIDE, 2 * SIDE))[1:] + 0.5
    assert 0 <= moved.min() <= moved.max() < 1


def test_backbone_starts_with_comrope_and_runs_past_its_lattice(tmp_path: Path) -> None:
    shape = dict(patch_size=PATCH, dim=WIDE, depth=DEPTH, num_heads=HEADS, norm_eps=1e-5, embedding_norm=True)
    vit = tr.ViT((64, 64), encoding="comrope-ld:4", mlp_dim=64, activation=QuickGELU, **shape)
    starts(
        tr.Features(vit), saved(_comrope_state("ld", with_table=False), tmp_path), [(32, 32), (48, 64)], input_size=32
    )


def test_blocks_with_zero_generators_of_comrope_ld_are_unchanged(tmp_path: Path) -> None:
    state = _comrope_state("ld")
    state[FREQS] = torch.zeros_like(state[FREQS])
    x = torch.randn(2, 3, 32, 32)
    agree(load_within_lightning(state, tmp_path), x, _comrope_forward(state, x, (4, 4)))


COMROPE = "^checkpoint of ComRoPE: "
FREQS = "vision_model.encoder.layers.0.self_attn.freqs"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({FREQS: torch.ones(2, 2, 6, 4, 4)}, {}, "its freqs are LieRE's, of 2 axes: their scale_factor is not in"),
        ({FREQS: torch.ones(2, 1, 5, 4, 4)}, {}, "must fill heads of 24 channels, got 5 blocks of 4$"),
        ({FREQS: None}, {}, "self_attn.freqs must be present; files of"),
        ({"classification_head.weight": None}, {}, "got unused classification_head.bias$"),
        ({"vision_model.encoder.layers.2.self_attn.q_proj.bias": None}, {}, r"2.self_attn.q_proj.bias is missing$"),
        (
            {
                FREQS.replace("freqs", f"{part}_proj.weight"): torch.ones(rows, WIDE)
                for part, rows in (("q", 49), ("k", 47))
            },
            {},
            r"0.self_attn.q_proj.weight must be \(48, 48\), got \(49, 48\)$",
        ),
        ({}, dict(activation="relu"), "activation must be quick_gelu or gelu, got 'relu'$"),
        ({}, dict(positions="unit"), "positions must be spacing or range, got 'unit'$"),
        ({}, dict(num_axes=4), "num_axes must be 2 or 3, got 4$"),
        ({}, dict(input_size=32), "because vision_model.embeddings.position_embedding determines it, got 32$"),
        ({"vision_model.embeddings.position_embedding": None}, dict(input_size=(32, 40)), r"got \(32, 40\)$"),
        (
            {"vision_model.embeddings.position_embedding": None},
            dict(input_size=32, num_axes=3),
            r"input_size must be \(frames, height, width\), because the file does not determine the frames, got 32$",
        ),
    ],
)
def test_comrope_refusals(
    change: dict[str, Tensor | None], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changed = {**_comrope_state("ap"), **change}
    state = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=COMROPE + ".*" + message) as caught:
        load_within_lightning(state, tmp_path, **options)
    assert "\n" not in str(caught.value)
