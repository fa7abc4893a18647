"""`python -m torchrope golden`: write inputs, outputs and gradients of encodings in float64, to test other code.

The JSON sheet states all conventions; the safetensors file holds the tensors of each vector under `name/tensor`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrope.encodings.fixed import geometric_sequence
from torchrope.encodings.names import ABSOLUTE, BIAS, BUILT_IN, EXPANDING, ROTARY, parse_encoding
from torchrope.encodings.pape import ParabolicEncoding
from torchrope.files import write_whole
from torchrope.ops.backends import backend
from torchrope.ops.reference import combine
from torchrope.ops.skew_exp import exponential
from torchrope.positions import grid
from torchrope.rotating import rotate
from torchrope.rotations import Block, Planar

TENSORS, SHEET = "golden.safetensors", "golden.json"
AXES = {1: ["time"], 2: ["height", "width"], 3: ["time", "height", "width"], 4: ["time", "height", "width", "text"]}
LATTICES = {1: (5,), 2: (3, 2), 3: (2, 3, 2)}
SIZES: dict[str, int] = {"num_heads": 3, "head_dim": 24}
SAMPLES, TOKENS = 1, 3
_PARABOLAS = "u[h,t,i] = sum_a positions[t,a] * directions[a,h,i]; a[n,h,s,i] = softplus(weight[0,h,i] . tokens[n,s])"
FORMULAS = {
    "planar": "phi[h,t,i] = sum_a positions[t,a] * frequencies[a,h,i]; channels (u, v) of pair i become (u cos phi - "
    "v sin phi, u sin phi + v cos phi)",
    "matrix exponential": "block j of head h, b consecutive channels, is multiplied by the matrix exponential of "
    "sum_a positions[t,a] * generators[a,h,j]",
    "harope": "scores = (R(p_s) M q_s)^T (R(p_t) M^-T k_t); R is planar and interleaved, by rotary.frequencies (axes, "
    "pairs); M[h] = U diag(softplus(scales[h]) + 1e-6) V^T; U and V are the matrix exponentials of the skew matrices "
    "whose entries above the diagonal, row by row, are left[h] and right[h]",
    "pape": f"scores = q_s^T k_t + sum_i (b d - a d^2), d = u[h,s,i] - u[h,t,i]; {_PARABOLAS}; "
    "b[n,h,s,i] = weight[1,h,i] . tokens[n,s]",
    "pape-ri": "scores = q_s^T k_t - a scales[h]^2 |p_s - p_t|^2, a = softplus(weight[0,h,0] . tokens[n,s])",
    "sphere": "scores = sum_c q_sc k_tc P_l(cos gamma), P_l the Legendre polynomial of degree l = c max_degree / "
    "(head_dim - 1), rounded to the nearest integer, gamma the angle between p_s and p_t: latitude and longitude in "
    "degrees, or vectors from the centre",
    "learned": "vectors[t] = table[positions[t]], at the size of training",
    "sinusoidal": "vectors[t, 2 (a n + i)] = sin(x) and vectors[t, 2 (a n + i) + 1] = cos(x), x = positions[t,a] "
    "base^(-i / n), base 10000, n = dim div (2 axes); the remaining channels are 0",
    "bias": "bias[h,s,t] = table[row, h], at the size of training; row is the row-major index of p_s - p_t + sizes - 1 "
    "in a lattice of 2 sizes - 1",
    "alibi": "bias[h,s,t] = -m |p_s - p_t|, m = 2^(-8 (h + 1) / H) for H heads, a power of 2; for other H those of the "
    "next lower power of 2, then every other one, from the first, of the next higher",
    "fire": "bias[h,s,t] = sum_u outer.weight[h,u] relu(inner.weight[u,0] x + inner.bias[u]) + outer.bias[h], x = "
    "log(c |p_s - p_t| + 1) / log(c D max(1, exp(log_threshold)) + 1), c = exp(log_scale), D the largest distance",
    "lookhere": "bias[h,s,t] = -m |o|, o = p_t - p_s, if o . d >= cos(fov / 2) |o|, else -inf; fov is 180 degrees; of "
    "H heads the last H div 3 have no d and no -inf, and m = 4^-(1 + i mod 4) for the i-th of them; head h of the "
    "others has m = 2^-(1 + h div 4) and the direction d number h mod (2 axes) of -axis 0, +axis 0, -axis 1, ...",
}
CONVENTIONS = {
    "shapes": {
        "q, k, rotated_*, upstream_*": "(samples, heads, tokens, head_dim)",
        "positions": "(tokens, axes), shared by samples and heads",
        "frequencies": "(axes, heads or 1, pairs), radians per unit of position; 1 is shared by all heads",
        "generators": "(axes, heads or 1, blocks, b, b), skew-symmetric",
        "scores": "(samples, heads, tokens s of q, tokens t of k), before the division by sqrt(head_dim)",
        "tokens": "(samples, tokens, heads * head_dim), from which q is projected",
        "vectors": "(tokens, dim), added to the tokens of a lattice",
        "bias": "(heads, tokens s of q, tokens t of k), added to the scores",
    },
    "layout": {
        "interleaved": "pair i is channels (2i, 2i + 1)",
        "halves": "pair i is channels (i, i + rotary_dim / 2)",
        "halves of an axis": "as halves, within each of as many equal parts of the channels as there are axes",
    },
    "partial": "channels from rotary_dim on are unchanged",
    "blocks": "(axis, channels, base, factor) of consecutive pairs: pair j of a block has the frequency "
    "factor * base^(-2 j / channels) along its axis",
    "gradients": "gradient_of_x is the gradient of sum(output * upstream) over the outputs (rotated_q and rotated_k, "
    "scores, vectors, or bias) to x; of generators its skew part, (G - transpose(G)) / 2",
}


class Vector(NamedTuple):
    """An encoding, or a convention of model families, to write.

    Attributes:
        encoding: Name of the encoding, "" for frequencies given by blocks.
        num_axes: Number of axes.
        layout: One of `CONVENTIONS["layout"]`.
        settings: Further arguments of the encoding, or the blocks.
    """

    encoding: str
    num_axes: int
    layout: str = "interleaved"
    settings: Mapping[str, Any] = MappingProxyType({})


def _blocks(layout: str, *blocks: tuple[int, int, float, float] | tuple[int, int, float]) -> Vector:
    """Return the convention of blocks (axis, channels, base, factor or 1)."""
    whole = [(*block, 1.0) if len(block) == 3 else block for block in blocks]
    return Vector("", 1 + max(axis for axis, *_ in whole), layout, {"blocks": whole})


FAMILIES = {
    "Llama, Mistral, Qwen2, Qwen3, Gemma, Phi-3, OLMo, Falcon": Vector("axial", 1, "halves", {"base": 10000.0}),
    "GPT-NeoX, Phi, StableLM": Vector("axial", 1, "halves", {"rotary_dim": 6}),
    "GPT-J, GLM-4": Vector("axial", 1, "interleaved", {"rotary_dim": 12}),
    "Cohere": Vector("axial", 1, "interleaved", {"base": 10000.0}),
    "Qwen2-VL, Qwen2.5-VL": Vector("mrope", 3, "halves", {"sections": (2, 5, 5)}),
    "Qwen3-VL": Vector("mrope-interleaved", 3, "halves", {"sections": (4, 4, 4)}),
    "DINOv3": Vector("dinov3", 2, "halves"),
    "RoPE-ViT (mixed)": Vector("mixed", 2),
    "RoPE-ViT (axial)": _blocks("interleaved", (1, 12, 100.0), (0, 12, 100.0)),
    "EVA-02, SAM 3": _blocks("interleaved", (0, 12, 10000.0), (1, 12, 10000.0)),
    "PE, Llama 4 (vision)": _blocks("interleaved", (1, 12, 10000.0), (0, 12, 10000.0)),
    "Qwen-VL, GLM-4V (vision)": _blocks("halves", (0, 12, 10000.0), (1, 12, 10000.0)),
    "Step 3 (vision)": _blocks("halves", (1, 12, 10000.0), (0, 12, 10000.0)),
    "Pixtral": _blocks("halves", (0, 12, 10000.0), (1, 12, 10000.0, 10000.0 ** (-1 / 12))),
    "CroCo, DUSt3R": _blocks("halves of an axis", (0, 12, 100.0), (1, 12, 100.0)),
    "Gemma 4 (vision)": _blocks("halves of an axis", (1, 12, 100.0), (0, 12, 100.0)),
    "MiniMax M3 (vision)": _blocks("halves", (0, 6, 10000.0), (1, 6, 10000.0), (2, 6, 10000.0)),
    "Flux, Qwen-Image": _blocks("interleaved", (0, 4, 10000.0), (1, 10, 10000.0), (2, 10, 10000.0)),
    "Flux 2": _blocks("interleaved", *((axis, 6, 2000.0) for axis in range(4))),
    "Wan, Lumina 2": _blocks("interleaved", *((axis, 8, 10000.0) for axis in range(3))),
    "HunyuanVideo": _blocks("interleaved", (0, 4, 256.0), (1, 10, 256.0), (2, 10, 256.0)),
}
"""Conventions of model families: layout of pairs, part of the head, pairs and frequencies of each axis."""
_FEW = {"spiral": (2,), "sphere": (2, 3)}
"""Axes of encodings that do not support 1 to 3."""
_SETTINGS = {
    ("comrope-ap", 2): {"rotary_dim": 16},  # a multiple of axes * block_size
    ("lookhere", 2): {"num_heads": 6},  # all directions
    **{("sphere", axes): {"max_degree": 4} for axes in (2, 3)},
}


def vectors() -> Iterator[tuple[str, Vector]]:
    """Yield the vectors to write by name: every encoding on the axes that it supports, and model families."""
    names = [name for name in chain(ROTARY, EXPANDING, ABSOLUTE, BIAS) if name in BUILT_IN]
    names.remove("learned-jittered")  # at random in training, otherwise "learned"
    for name in (*names, "liere:4", "comrope-ap:4", "comrope-ld:4", "string:4"):
        for axes in _FEW.get(name, (1, 2, 3)):
            yield f"{name}, {axes} axes", Vector(name, axes, settings=_SETTINGS.get((name, axes), {}))
    for name, vector in FAMILIES.items():
        yield f"family: {name}", vector


_Tensors = dict[str, Tensor]
_Computed = tuple[dict[str, Any], _Tensors, _Tensors, _Tensors]
"""Row of the sheet, tensors with and without gradients, and outputs, of a vector."""
_random = partial(torch.randn, dtype=torch.float64)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _inputs(num_axes: int) -> dict[str, Tensor]:
    shape = (SAMPLES, SIZES["num_heads"], TOKENS, SIZES["head_dim"])
    positions = 4 * torch.rand(TOKENS, num_axes, dtype=torch.float64) - 1
    return {"q": _leaf(_random(shape)), "k": _leaf(_random(shape)), "positions": _leaf(positions)}


def _rotated(vector: Vector) -> _Computed:
    """Rotate q and k by an encoding or by blocks of frequencies."""
    arguments = {"num_axes": vector.num_axes, **SIZES, **vector.settings}
    block_size: int = 2
    head_sizes: Any = SIZES
    parameter, values = "frequencies", torch.empty(0)
    if vector.encoding:
        encoding = parse_encoding(vector.encoding).rotary(**arguments).double()
        block_size, head_sizes = encoding.block_size, encoding.head_sizes
        planar = encoding.has_frequencies and encoding.basis() is None
        parameter = "frequencies" if planar else "generators"
        values = encoding.frequencies_per_axis() if planar else encoding.generators()
        values = values[:, :1] if values.shape[1] > 1 and (values == values[:, :1]).all() else values
    else:
        axes = torch.eye(vector.num_axes, dtype=torch.float64)
        blocks = [
            axes[axis, :, None] * factor * geometric_sequence(channels // 2, base)
            for axis, channels, base, factor in arguments["blocks"]
        ]
        values = torch.cat(blocks, dim=-1).unsqueeze(1)
    leaves = {**_inputs(vector.num_axes), parameter: _leaf(values)}
    q, k, positions, values = leaves.values()
    rotation: Planar | Block
    if parameter == "frequencies":
        rotation = Planar(positions=positions, frequencies=values, **head_sizes)
    else:
        rotation = Block(table=exponential(combine(positions, values)), **head_sizes)
    rotary_dim = rotation.rotary_dim
    parts = {"interleaved": rotary_dim // 2, "halves": 1, "halves of an axis": vector.num_axes}[vector.layout]
    # The channels of all first and second halves of the parts in turn are adjacent pairs.
    pairs = torch.arange(rotary_dim).view(parts, 2, -1).mT.flatten() if rotary_dim else torch.arange(0)
    order = torch.cat([pairs, torch.arange(rotary_dim, SIZES["head_dim"])])
    rotated_q, rotated_k = (x[..., order.argsort()] for x in rotate(q[..., order], k[..., order], rotation))
    row = {
        "kind": "planar" if parameter == "frequencies" else "matrix exponential", "arguments": arguments,
        "rotary_dim": rotary_dim, "layout": vector.layout, "block_size": block_size,
    }  # fmt: skip
    return row, leaves, {}, {"rotated_q": rotated_q, "rotated_k": rotated_k}


def _scored(vector: Vector) -> _Computed:
    """Compute scores of an encoding that maps q and k to other channels."""
    arguments = {"num_axes": vector.num_axes, **SIZES, **vector.settings}
    encoding = _perturbed(parse_encoding(vector.encoding).rotary(**arguments))
    leaves, tokens = _inputs(vector.num_axes), None
    if vector.encoding == "sphere":
        leaves["positions"] = _leaf(30 * leaves["positions"])  # degrees
    if isinstance(encoding, ParabolicEncoding):
        tokens = leaves["tokens"] = _leaf(_random(SAMPLES, TOKENS, SIZES["num_heads"] * SIZES["head_dim"]))
    q, k = rotate(leaves["q"], leaves["k"], encoding(leaves["positions"]), tokens=tokens)
    leaves |= dict(encoding.named_parameters())
    row = {"kind": vector.encoding, "arguments": arguments}
    return row, leaves, dict(encoding.named_buffers()), {"scores": q @ k.mT}


def _on_lattice(vector: Vector) -> _Computed:
    """Compute the vectors or the bias of a lattice."""
    choice, sizes = parse_encoding(vector.encoding), LATTICES[vector.num_axes]
    width = {"dim": SIZES["head_dim"] + 2} if choice.absolute else {"num_heads": SIZES["num_heads"]}
    arguments = {"sizes": sizes, **width, **vector.settings}
    build: Any = choice.absolute or choice.bias
    encoding = _perturbed(build(**arguments))
    outputs = {"vectors" if choice.absolute else "bias": encoding(*sizes)}
    row = {"kind": vector.encoding, "arguments": arguments}
    return row, dict(encoding.named_parameters()), {"positions": grid(*sizes, dtype=torch.float64)}, outputs


def _perturbed(encoding: Any) -> Any:
    """Return an encoding in float64 with random parameters, as initial ones may have no effect."""
    with torch.no_grad():
        for parameter in encoding.double().parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return encoding


def compute(vector: Vector) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the row of the sheet and the tensors of a vector, from seed 0."""
    build = _scored if vector.encoding in EXPANDING else _rotated
    build = _on_lattice if vector.encoding in (*ABSOLUTE, *BIAS) else build
    with torch.random.fork_rng(devices=[]), backend("reference"):
        torch.manual_seed(0)
        row, leaves, constants, outputs = build(vector)
        tensors = {**leaves, **constants, **outputs}
        if leaves:
            upstream = {name: _random(output.shape) for name, output in outputs.items()}
            gradients = torch.autograd.grad([*outputs.values()], [*leaves.values()], [*upstream.values()])
            tensors |= {f"upstream_{name.removeprefix('rotated_')}": x for name, x in upstream.items()}
            for name, gradient in zip(leaves, gradients, strict=True):
                tensors[f"gradient_of_{name}"] = (gradient - gradient.mT) / 2 if name == "generators" else gradient
    row = {"encoding": vector.encoding or None, **row, "axes": AXES[vector.num_axes], "dtype": "float64"}
    return row, {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def write(folder: Path) -> None:
    """Write golden vectors of all encodings and of model families to `golden.safetensors` and `golden.json`.

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
