"""`python -m torchrope golden`: write inputs, outputs and gradients of encodings in float64, to test other code.

The JSON sheet states all conventions; the safetensors file holds the tensors of each vector under `name/tensor`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding
from torchrope.encodings.names import BUILT_IN, ROTARY, parse_encoding
from torchrope.files import write_whole
from torchrope.ops.backends import backend
from torchrope.ops.reference import combine
from torchrope.ops.skew_exp import exponential
from torchrope.rotating import rotate
from torchrope.rotations import Block, Planar

TENSORS, SHEET = "golden.safetensors", "golden.json"
AXES = {1: ["time"], 2: ["height", "width"], 3: ["time", "height", "width"]}
SIZES: dict[str, int] = {"num_heads": 3, "head_dim": 24}
SAMPLES, TOKENS = 1, 3
FORMULAS = {
    "planar": "phi[h,t,i] = sum_a positions[t,a] * frequencies[a,h,i]; channels (u, v) of pair i become (u cos phi - "
    "v sin phi, u sin phi + v cos phi)",
    "matrix exponential": "block j of head h, b consecutive channels, is multiplied by the matrix exponential of "
    "sum_a positions[t,a] * generators[a,h,j]",
}
CONVENTIONS = {
    "shapes": {
        "q, k, rotated_*, upstream_*": "(samples, heads, tokens, head_dim)",
        "positions": "(tokens, axes), shared by samples and heads",
        "frequencies": "(axes, heads or 1, pairs), radians per unit of position; 1 is shared by all heads",
        "generators": "(axes, heads or 1, blocks, b, b), skew-symmetric",
    },
    "layout": {
        "interleaved": "pair i is channels (2i, 2i + 1)",
        "halves": "pair i is channels (i, i + rotary_dim / 2)",
    },
    "partial": "channels from rotary_dim on are unchanged",
    "gradients": "gradient_of_x is the gradient of sum(rotated_q * upstream_q) + sum(rotated_k * upstream_k) to x; of "
    "generators its skew part, (G - transpose(G)) / 2",
}


class Vector(NamedTuple):
    """A rotation to write.

    Attributes:
        encoding: Name of the encoding.
        num_axes: Number of axes.
        halves: Whether pairs are channels (i, i + rotary_dim / 2).
        settings: Further arguments of the encoding.
    """

    encoding: str
    num_axes: int
    halves: bool = False
    settings: Mapping[str, Any] = MappingProxyType({})


FAMILIES = {
    "Llama, Mistral, Qwen2, Qwen3": Vector("axial", 1, True, {"base": 10000.0}),
    "GPT-NeoX": Vector("axial", 1, True, {"rotary_dim": 6}),
    "GPT-J, GLM-4": Vector("axial", 1, False, {"rotary_dim": 12}),
    "Qwen2-VL, Qwen2.5-VL": Vector("mrope", 3, True, {"sections": (2, 5, 5)}),
    "Qwen3-VL": Vector("mrope-interleaved", 3, True, {"sections": (4, 4, 4)}),
    "DINOv3": Vector("dinov3", 2, True),
    "RoPE-ViT (mixed)": Vector("mixed", 2),
}
"""Conventions of model families: layout of pairs, part of the head, pairs of each axis."""


def vectors() -> Iterator[tuple[str, Vector]]:
    """Yield the vectors to write by name: every rotary encoding on the axes that it supports, and model families."""
    blocks = ("liere:4", "comrope-ap:4", "comrope-ld:4", "string:4")
    for name in (*(name for name in ROTARY if name in BUILT_IN), *blocks):
        for axes in (2,) if name == "spiral" else (1, 2, 3):
            partial = {"rotary_dim": 16} if (name, axes) == ("comrope-ap", 2) else {}  # a multiple of axes * block_size
            yield f"{name}, {axes} axes", Vector(name, axes, settings=partial)
    for name, vector in FAMILIES.items():
        yield f"family: {name}", vector


def compute(vector: Vector) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the row of the sheet and the tensors of a vector, from seed 0."""
    with torch.random.fork_rng(devices=[]), backend("reference"):
        torch.manual_seed(0)
        build = parse_encoding(vector.encoding).rotary
        encoding: Encoding = build(num_axes=vector.num_axes, **SIZES, **vector.settings).double()
        shape = (SAMPLES, SIZES["num_heads"], TOKENS, SIZES["head_dim"])
        positions = 4 * torch.rand(TOKENS, vector.num_axes, dtype=torch.float64) - 1
        q, k, upstream_q, upstream_k = torch.randn(4, *shape, dtype=torch.float64).unbind()
        leaves = {"q": q, "k": k, "positions": positions}
        kind = "planar" if encoding.has_frequencies and encoding.basis() is None else "matrix exponential"
        parameter = "frequencies" if kind == "planar" else "generators"
        values = encoding.frequencies_per_axis() if kind == "planar" else encoding.generators()
        values = values[:, :1] if values.shape[1] > 1 and (values == values[:, :1]).all() else values
        leaves[parameter] = values.detach().clone()
        for leaf in leaves.values():
            leaf.requires_grad_()
        rotation: Planar | Block
        if kind == "planar":
            rotation = Planar(
                positions=positions, frequencies=leaves[parameter], interleaved=not vector.halves, **encoding.head_sizes
            )
        else:
            rotation = Block(table=exponential(combine(positions, leaves[parameter])), **encoding.head_sizes)
        rotated_q, rotated_k = rotate(q, k, rotation)
        gradients = torch.autograd.grad((rotated_q, rotated_k), [*leaves.values()], (upstream_q, upstream_k))
    tensors = {**leaves, "rotated_q": rotated_q, "rotated_k": rotated_k}
    tensors |= {"upstream_q": upstream_q, "upstream_k": upstream_k}
    for name, gradient in zip(leaves, gradients, strict=True):
        tensors[f"gradient_of_{name}"] = (gradient - gradient.mT) / 2 if name == "generators" else gradient
    row = {
        "encoding": vector.encoding, "arguments": {"num_axes": vector.num_axes, **SIZES, **vector.settings},
        "rotation": kind, "rotary_dim": encoding.rotary_dim, "layout": "halves" if vector.halves else "interleaved",
        "axes": AXES[vector.num_axes], "block_size": encoding.block_size, "dtype": "float64",
    }  # fmt: skip
    return row, {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def write(folder: Path) -> None:
    """Write golden vectors of all rotary encodings and of model families to `golden.safetensors` and `golden.json`.

    The same version of torchrope and torch writes the same bytes on one machine.

    Args:
        folder: The folder, created if missing.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the files cannot be written.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise ImportError("golden vectors need safetensors: pip install safetensors") from None
    rows: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for name, vector in vectors():
        rows[name], of_vector = compute(vector)
        tensors |= {f"{name}/{part}": tensor for part, tensor in of_vector.items()}
    write_whole(folder / TENSORS, save(tensors))
    sheet = {"formulas": FORMULAS, "conventions": CONVENTIONS, "vectors": rows}
    write_whole(folder / SHEET, json.dumps(sheet, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 if the files are written, 2 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m torchrope golden", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for golden.safetensors and golden.json")
    given = parser.parse_args(arguments)
    try:
        write(given.folder)
    except (ImportError, OSError) as error:
        print(f"torchrope golden: {error}", file=sys.stderr)
        return 2
    return 0
