"""Mistakes of the first hour: each error names the way out."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import torchrope as tr
from torchrope.encodings import Encoding, planar


class Mine(Encoding):
    """An encoding with a required argument."""

    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=2)
        self.frequencies = nn.Parameter(torch.randn(num_axes, num_heads, head_dim // 2))

    def generators(self) -> torch.Tensor:
        return planar(self.frequencies)


def encoding() -> tr.MixedRoPE:
    return tr.MixedRoPE(num_axes=2, num_heads=4, head_dim=16)


def heads(tokens: int = 96, heads: int = 4) -> torch.Tensor:
    return torch.randn(2, heads, tokens, 16)


def rotate(rotation: Any, x: torch.Tensor | None = None, **arguments: Any) -> Any:
    x = heads() if x is None else x
    return tr.rotate(x, x, rotation, **arguments)


def nested() -> Any:
    model = tr.Transformer(in_channels=3, dim=16, depth=1, num_heads=2, num_axes=2)
    samples = [torch.randn(n, 3) for n in (4, 6)]
    positions = [torch.randn(n, 2) for n in (4, 6)]
    return model(*(torch.nested.nested_tensor(x, layout=torch.jagged) for x in (samples, positions)))


def vit(**arguments: Any) -> tr.ViT:
    return tr.ViT((8, 8), patch_size=2, in_channels=1, num_outputs=3, dim=16, depth=1, num_heads=2, **arguments)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "rotate by positions": (
        lambda: rotate(tr.grid(8, 12)),
        "rotation must be encoding(positions), what an encoding returns when it is called with positions, got Tensor",
    ),
    "rotate by an encoding": (lambda: rotate(encoding()), "when it is called with positions, got MixedRoPE"),
    "rotate by a name": (lambda: rotate("mixed"), "when it is called with positions, got str"),
    "rotate one by positions": (
        lambda: tr.apply(heads(), tr.grid(8, 12)),  # type: ignore[arg-type]
        "rotation must be encoding(positions)",
    ),
    "tokens first": (
        lambda: rotate(encoding()(tr.grid(8, 12)), heads().transpose(1, 2)),
        "q must have the rotation's 96 tokens, got 4; it has as many heads: "
        'layout="bthd" is (batch, tokens, heads, head_dim), "bhtd" (batch, heads, tokens, head_dim)',
    ),
    "no positions of class and registers": (
        lambda: rotate(encoding()(tr.grid(8, 12)), heads(101)),
        "got 101; for 5 more in front (CLS, registers) pass positions through tr.prefix(positions, 5)",
    ),
    "unknown layout": (lambda: rotate(encoding()(tr.grid(8, 12)), layout="bnhd"), "layout must be one of bhtd, bthd"),
    "sizes in a tuple": (
        lambda: tr.grid((8, 12)),  # type: ignore[arg-type]
        "sizes must be one argument each, grid(8, 12) or grid(*sizes), got ((8, 12),)",
    ),
    "rope": (lambda: tr.encodings.parse_encoding("rope"), "did you mean 'axial'?"),
    "liere8": (lambda: tr.encodings.parse_encoding("liere8"), "did you mean 'liere:8'?"),
    "LieRE8": (lambda: tr.encodings.parse_encoding("learned+LieRE8"), "did you mean 'liere:8'?"),
    "leire:8": (lambda: tr.encodings.parse_encoding("leire:8"), "did you mean 'liere:8'?"),
    "unsupported model": (
        lambda: tr.swap(nn.TransformerEncoderLayer(8, 2), "mixed"),
        "in an attention of your own call tr.rotate(q, k, rotation), see docs/your-own-attention.md",
    ),
    "nested tensors": (nested, "must be lists of tensors, got a nested tensor"),
    "spacing without positions": (
        lambda: vit(encoding="mixed")(torch.randn(1, 1, 8, 8), spacing=torch.ones(1, 2)),
        "spacing needs positions in a unit of length, such as tr.Lattice(unit=16.0, patch_size=16)",
    ),
    "a tuple of spacings": (
        lambda: vit(positions=tr.Lattice(unit=1.0))(torch.randn(1, 1, 8, 8), spacing=(1.0, 2.0)),
        "spacing must be voxel spacings (batch, 2), a tensor, got (1.0, 2.0)",
    ),
    "units of other axes": (
        lambda: tr.Lattice(unit=(1.0, 2.0, 3.0))(2, 2, spacing=torch.ones(1, 2)),
        "unit must be one number or one per axis (2), got 3",
    ),
    "positions in place of a lattice": (
        lambda: vit(positions=tr.grid(4, 4)),
        "positions must be a Lattice or None, got (16, 2)",
    ),
    "a size without axes": (
        lambda: tr.ViT(32, patch_size=4),
        "input_size must be the extent of the data along each axis, got 32",
    ),  # type: ignore[arg-type]
    "no batch": (lambda: vit()(torch.randn(1, 8, 8)), "data must be (batch, channels, *sizes) of 2 sizes, got (8,)"),
    "a NumPy array": (
        lambda: vit()(torch.randn(1, 1, 8, 8).numpy()),
        "data must be a tensor, or a list of samples, got ndarray",
    ),
    "an encoding in place of a class": (
        lambda: vit(encoding=encoding()),
        "the rotary encoding must be built by a subclass of Encoding or a function, got an instance of MixedRoPE",
    ),
    "a table in place of a rotary encoding": (lambda: vit(encoding=tr.LearnedAPE), "or a function, got LearnedAPE"),
    "a name in a choice": (
        lambda: tr.encodings.Choice(tr.MixedRoPE, "learned"),  # type: ignore[arg-type]
        "the absolute encoding must be built by a subclass of AbsoluteEncoding or a function, got 'learned'",
    ),
    "a function that returns nothing": (
        lambda: vit(encoding=lambda **head: None),
        "a function that builds an encoding must return an Encoding, got NoneType",
    ),
    "a registered instance": (lambda: tr.register_encoding("made", encoding()), "got an instance of MixedRoPE"),
    "head_dim divided by /": (
        lambda: tr.MixedRoPE(num_axes=2, num_heads=4, head_dim=64 / 4),  # type: ignore[arg-type]
        "head_dim must be an integer, got 16.0",
    ),
    "generators of a class that only reads them": (
        lambda: Mine(num_axes=1, num_heads=1, head_dim=2).set_generators(torch.zeros(1, 1, 1, 2, 2)),
        "Mine cannot be set from generators, it must define load_generators(generators)",
    ),
    "sizes in place of positions": (
        lambda: encoding()((8, 12)),
        "got shape (2,); those of a lattice are tr.grid(*sizes), of one axis x[:, None]",
    ),
    "no keys": (lambda: tr.rotate(heads(), None, encoding()(tr.grid(8, 12))), "k must be a tensor, got None"),  # type: ignore[arg-type]
    "samples as lists": (lambda: tr.pack([[[0.0]]]), "positions of a sample must be a tensor, got list"),  # type: ignore[list-item]
    "an index of floats": (lambda: encoding()(tr.grid(8, 12))[:, torch.zeros(99)], "got (slice, (99,))"),
    "a class in place of a model": (
        lambda: tr.swap(nn.Linear, "mixed"),  # type: ignore[type-var]
        "swap needs a model, an instance of torch.nn.Module, got the class Linear",
    ),
    "a state dict in place of a model": (
        lambda: tr.save({}, "file"),
        "save needs a model, an instance of torch.nn.Module, got dict",
    ),  # type: ignore[arg-type]
    "parameters in place of a model": (
        lambda: tr.parameter_groups(vit().parameters(), 0.1),  # type: ignore[arg-type]
        "parameter_groups needs a model, an instance of torch.nn.Module, got generator",
    ),
    "queries on another device": (
        lambda: rotate(encoding()(tr.grid(8, 12)), heads().to("meta")),
        "q and its rotation must be on one device, got meta and cpu",
    ),
    "keys on another device": (
        lambda: tr.rotate(heads(), heads().to("meta"), encoding()(tr.grid(8, 12))),
        "k and its rotation must be on one device, got meta and cpu",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_error_names_the_way_out_in_one_line(name: str) -> None:
    call, way_out = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(way_out)) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["axial", "liere:4", "comrope-ld:4", "string", "golden"])
def test_positions_on_another_device_than_any_encoding(name: str) -> None:
    build = partial(tr.encodings.parse_encoding(name).rotary, num_axes=2, num_heads=2, head_dim=8)
    with pytest.raises(ValueError, match=r"positions are on meta, the encoding on cpu: tr\.grid\(\.\.\., device="):
        build()(tr.grid(3, 3, device="meta"))
    assert build().to("meta")(tr.grid(3, 3, device="meta")).shape[-1] == 9


def test_names_of_encodings_in_any_case() -> None:
    choice = tr.encodings.parse_encoding("Learned+LieRE:8")
    assert choice.name == "learned+liere:8"
    built = choice.rotary(num_axes=2, num_heads=2, head_dim=16)
    assert (type(built), built.block_size) == (tr.LieRE, 8)
    assert tr.encodings.parse_encoding(" learned + mixed").name == " learned + mixed"


def test_check_of_a_class_with_arguments_names_partial_and_dtypes_of_errors() -> None:
    way_out = "pass functools.partial(Mine, num_axes=2, num_heads=4, head_dim=16)"
    with pytest.raises(AssertionError, match=re.escape(way_out)):
        tr.testing.check(Mine)  # type: ignore[arg-type]
    assert str(tr.testing.Measured(0.0078, 0.04, torch.bfloat16)) == "error 0.0078 in bfloat16, allowed 0.04"
    rotates = tr.testing.PROPERTIES["rotate multiplies by the matrix"]
    assert "in bfloat16" in str(rotates(partial(Mine, num_axes=2, num_heads=2, head_dim=8)))
