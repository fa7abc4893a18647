"""Parameters and operations of each encoding, counted and by formula (LieRE table 5; ComRoPE table 7; RoPE-ViT)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrope.attention import Attention
from torchrope_lab import recipes
from torchrope_lab.conclusion import join_names
from torchrope_lab.engine.figures import figure
from torchrope_lab.engine.long_table import Columns, table_of
from torchrope_lab.engine.published import published
from torchrope_lab.engine.study import Lab
from torchrope_lab.results import Axis, Column, Figure, Findings, Row, Table
from torchrope_lab.settings.run_config import ModelConfig
from torchrope_lab.training.cost import count_encoding_parameters, count_flops
from torchrope_lab.training.models import build_model, on_lattice

NORM_OPERATIONS = 5
"""Operations that LieRE's counter, fvcore, counts for each output element of a LayerNorm."""
UNIT = 1.1e-3
"""A unit of the last digit in LieRE's table 5, in 10⁹ operations, with a margin for numbers cut off after it."""


@dataclass(frozen=True)
class Size:
    """A model, as its recipe has it without an encoding, and its input."""

    name: str  # of the recipe
    title: str
    input_size: tuple[int, ...]  # pixels, or frames and pixels
    num_classes: int
    in_channels: int = 3

    @cached_property
    def model(self) -> ModelConfig:
        """The model of the recipe, with an encoding of its own in each layer and head."""
        apart = dict.fromkeys(("checkpoint_layers", "share_heads", "share_layers"), False)
        return ModelConfig(**{**recipes.settings(self.name)["model"], **apart})

    @property
    def data(self) -> Any:
        """Properties of the data that determine a model."""
        axes = ("time", "height", "width")[-len(self.input_size) :]
        return SimpleNamespace(**vars(self), axes=axes, tasks=("classify",), lattice=True)


TABLE_5 = {f"ViT-{name}": f"liere-cifar100-vit-{name[0].lower()}" for name in ("Tiny", "Base", "Large")}
"""Recipe of each column of LieRE's table 5: CIFAR-100, 32x32 pixels, patches of 4x4, a class token."""


def sizes() -> list[Size]:
    """List the models of the papers and of the recipes."""
    pixels, clip = (224, 224), (8, 224, 224)
    return [
        *(Size(recipe, f"{title}, 32x32", (32, 32), 100) for title, recipe in TABLE_5.items()),
        Size("rope-vit-s", "ViT-Small, 224x224", pixels, 1000),
        Size("liere-imagenet", "ViT-Base, 224x224", pixels, 1000),
        Size("rope-vit-l-224", "ViT-Large, 224x224", pixels, 1000),
        Size("rope-swin-t", "Swin-Tiny, 224x224", pixels, 1000),
        Size("rope-swin-s", "Swin-Small, 224x224", pixels, 1000),
        Size("rope-swin-b", "Swin-Base, 224x224", pixels, 1000),
        Size("liere-ucf101", "ViT-Base, 8x224x224", clip, 101),
        Size("liere-rsna", "ViT-Base, 32x224x224", (32, 224, 224), 2),
        Size("comrope-ucf101", "ComRoPE's ViT, 8x224x224", clip, 101),
        Size("digits", "digits, 8x8", (8, 8), 10, 1),
        Size("motion", "motion, 5x20x20", (5, 20, 20), 10, 1),
    ]


@dataclass(frozen=True)
class Counts:
    """Parameters and operations of a model."""

    parameters: int
    encoding_parameters: int
    flops: int  # of a forward pass, two per multiply-add: matrix products and exponentials
    rotating: int  # multiply-adds of rotating queries and keys, block by block
    norms: int  # output elements of all LayerNorms


def costs(size: Size, encoding: str, **settings: Any) -> Counts:
    """Count parameters and operations of a model, with some settings of the recipe replaced, on the meta device."""
    build = partial(build_model, encoding, replace(size.model, **settings), size.data)
    input_shape = torch.Size((1, size.in_channels, *size.input_size))
    with torch.device("meta"):
        model = on_lattice(build()).eval()
        rotating, norms = _work(model, torch.empty(input_shape))
    return Counts(
        parameters=sum(p.numel() for p in model.parameters()),
        encoding_parameters=count_encoding_parameters(model),
        flops=count_flops(build, input_shape),
        rotating=rotating,
        norms=norms,
    )


def _work(model: nn.Module, inputs: torch.Tensor) -> tuple[int, int]:
    """Count multiply-adds of rotations and output elements of LayerNorms in a forward pass."""
    rotating, norms = [], []

    def attended(_: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        tokens, rotation = args[0], args[1]
        samples, *sizes, _dim = tokens.shape
        if len(sizes) > 1:  # a lattice, rotated after it is cut into windows, padding included
            sizes = settings["within"].padded
        rotated = samples * math.prod(sizes) * rotation.heads * rotation.rotary_dim
        rotating.append(2 * rotated * rotation.blocks().shape[-1])

    def normed(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        norms.append(output.numel())

    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(attended, with_kwargs=True)
        elif isinstance(module, nn.LayerNorm):
            module.register_forward_hook(normed)
    model(inputs)
    return sum(rotating), sum(norms)


def table_5_count(without: Counts, with_encoding: Counts) -> int:
    """Count operations as in LieRE's table 5: 1 per multiply-add, 5 per LayerNorm output, 0 for exponentials."""
    # `without`: the model without a rotary encoding.
    return without.flops // 2 + NORM_OPERATIONS * with_encoding.norms + with_encoding.rotating


def compare_table_5(measured: Mapping[tuple[str, str], Counts]) -> Table:
    """Compare the cells of LieRE's table 5 with counts here, by column and encoding ("none" among them)."""
    # A cell agrees within a unit of its last digit, truncated or rounded.
    flops, percents = published("complexity")[:2]
    shares = {row["name"]: row for row in percents.rows}
    rows: list[Row] = []
    for index, column in enumerate(TABLE_5, start=1):
        base = table_5_count(measured[column, "none"], measured[column, "learned"])
        for row in flops.rows:
            encoding = str(row["name"]).partition(" ")[0]
            ours = table_5_count(measured[column, "none"], measured[column, encoding])
            if encoding == "visionllama":  # their cell counts no product for fixed frequencies
                ours -= measured[column, encoding].rotating
            theirs: Any = row[f"value{index}"]
            share: Any = shares.get(row["name"], {}).get(f"value{index}")
            close = share is None or abs(_share(ours, base) - share) < 100e9 * UNIT / base
            agrees = abs(ours / 1e9 - theirs) < UNIT and close
            verdict = "agrees" if agrees else "differs"
            rows.append({"name": f"{column}, {encoding}", "published": theirs, "ours": ours / 1e9,
                         "published_share": share, "ours_share": _share(ours, base), "verdict": verdict})  # fmt: skip
    columns = (
        Column("name", "Cell"),
        Column("published", "Published", "G", 3),
        Column("ours", "Counted here", "G", 4),
        Column("published_share", "Published, over absolute", "%", 3),
        Column("ours_share", "Counted here, over absolute", "%", 3),
        Column("verdict", "Verdict"),
    )
    note = (
        "A cell agrees if it differs by at most a unit of its last digit: published numbers are partly rounded "
        "and partly truncated, and percentages were computed from them. Fixed frequencies count as 0, as in the "
        "paper's row of VisionLlama; counted as the others they would have the operations of RoPE-Mixed."
    )
    return Table("LieRE's table 5, cell by cell", columns, rows, note=note)


def find(lab: Lab) -> Findings:
    """Count every size with every encoding, and compare published numbers with the counts."""
    counted: list[Counted] = []
    measured: dict[tuple[str, str], Counts] = {}
    refused: dict[str, list[str]] = {}
    columns = {recipe: column for column, recipe in TABLE_5.items()}
    needed = [str(row["name"]).partition(" ")[0] for row in published("complexity")[0].rows]
    for size in sizes():
        without = costs(size, "none")
        for encoding in dict.fromkeys(["none", *lab.encodings, *(needed if size.name in columns else [])]):
            try:
                cost = without if encoding == "none" else costs(size, encoding)
            except ValueError as error:
                refused.setdefault(f"{encoding}: {error}", []).append(size.title)
                continue
            measured[columns.get(size.name, size.name), encoding] = cost
            if encoding in lab.encodings:
                counted.append(Counted(size.title, encoding, without, cost))
    lab.leave_out(*(f"Left out, {encoding} ({join_names(where)})" for encoding, where in refused.items()))
    title = "Parameters and operations by size and encoding"
    table = table_of(title, COLUMNS, counted, _NOTE, keys=lambda at: {"size": at.size, "encoding": at.encoding})
    answer = "The encodings have no learned parameters."
    if learned := [at for at in counted if at.size == sizes()[1].title and at.cost.encoding_parameters]:
        most = max(learned, key=lambda at: at.cost.encoding_parameters)
        share = 100 * most.cost.encoding_parameters / most.cost.parameters
        count = f"{most.cost.encoding_parameters:,} parameters with {most.encoding}, {share:.2f} % of the model"
        answer = f"In {most.size} pixels encodings learn up to {count}."
    return Findings(answer, [table, compare_table_5(measured)], _figures(table.rows))


class Counted(NamedTuple):
    """An encoding in a model: title of the size, and the counts without and with it."""

    size: str
    encoding: str
    without: Counts
    cost: Counts


def _share(value: float, base: float) -> float:
    """Return by how many percent a value exceeds its base."""
    return 100 * (value - base) / base


COLUMNS: Columns = (
    (Column("name", "Size and encoding"), lambda at: f"{at.size}, {at.encoding}"),
    (Column("parameters", "Parameters", digits=0), lambda at: at.cost.parameters),
    (Column("own", "Of the encoding", digits=0), lambda at: at.cost.encoding_parameters),
    (Column("own_share", "Share", "%", 4), lambda at: 100 * at.cost.encoding_parameters / at.cost.parameters),
    (Column("macs", "Multiply-adds", "G", 4), lambda at: table_5_count(at.without, at.cost) / 1e9),
    (
        Column("macs_share", "Over none", "%", 3),
        lambda at: _share(table_5_count(at.without, at.cost), table_5_count(at.without, at.without)),
    ),
    (Column("flops", "FLOPs with exponentials", "G", 4), lambda at: at.cost.flops / 1e9),
    (Column("flops_share", "Over none", "%", 3), lambda at: _share(at.cost.flops, at.without.flops)),
)
_NOTE = (
    "For one example. Multiply-adds are counted as in LieRE's table 5: 1 each, 5 per LayerNorm output, 2 L n d b to "
    "rotate queries and keys, 0 for building rotations. FLOPs are 2 per multiply-add of matrix products, including "
    "exponentials, without LayerNorms and element-wise operations, such as rotations by angles. Rotations are built "
    "once per batch: with more examples their share decreases."
)


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    keys = ("size", "encoding", "own", "own_share", "macs_share")
    shown = [{key: row[key] for key in keys} for row in rows if row["encoding"] != "none"]
    by_size = Axis("size", "Size", scale="category")
    counted = "Counted as in LieRE's table 5, without building the rotations; exact."
    parts = (
        ("parameters-by-size", "The encoding's share of the parameters", "own_share", "Of all parameters",
         "Counted, exact."),
        ("operations-by-size", "Additional multiply-adds of rotating", "macs_share", "Over no encoding", counted),
    )  # fmt: skip
    return [
        figure(name, title, Axis(key, heading, "%"), by_size, shown, caption, kind="points", series="encoding")
        for name, title, key, heading, caption in parts
    ]
