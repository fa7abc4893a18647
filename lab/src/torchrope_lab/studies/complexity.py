"""Parameters and operations of each encoding, counted and by formula (LieRE table 5; ComRoPE table 7; RoPE-ViT)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torchrope.attention import Attention
from torchrope.encodings import AbsoluteEncoding, Encoding, RelativePositionBias
from torchrope.models import Swin, ViT
from torchrope.rotations import Block, Commuting, PlanarInBasis, Rotation
from torchrope_lab import recipes
from torchrope_lab.conclusion import join_names
from torchrope_lab.results import Axis, Check, Column, Figure, Findings, Row, Table
from torchrope_lab.studies.describe import label
from torchrope_lab.studies.engine.published import LIERE_1, LIERE_2, ROPE_VIT, published
from torchrope_lab.studies.engine.study import Lab
from torchrope_lab.training.config import ModelConfig
from torchrope_lab.training.cost import EXP_PRODUCTS, count_encoding_parameters, count_flops
from torchrope_lab.training.models import build_model, on_lattice

NORM_OPERATIONS = 5
"""Operations that LieRE's counter, fvcore, counts for each output element of a LayerNorm."""


@dataclass(frozen=True)
class Size:
    """A model and its input, without an encoding.

    Attributes:
        name: Name of its recipe.
        title: Title shown in the report.
        model: The model.
        data: Attributes of the data that a model needs: input_size, in_channels, num_classes, axes.
    """

    name: str
    title: str
    model: ModelConfig
    data: Any

    @property
    def input_shape(self) -> torch.Size:
        """Shape of a batch of one example."""
        return torch.Size((1, self.data.in_channels, *self.data.input_size))


def _size(recipe: str, title: str, input_size: tuple[int, ...], num_classes: int, in_channels: int = 3) -> Size:
    axes = ("time", "height", "width")[-len(input_size) :]
    data = SimpleNamespace(
        input_size=input_size,
        in_channels=in_channels,
        num_classes=num_classes,
        axes=axes,
        tasks=("classify",),
        lattice=True,
    )
    model = ModelConfig(**recipes.settings(recipe)["model"])
    return Size(recipe, title, replace(model, checkpoint_layers=False), data)


TABLE_5 = (
    ("ViT-Tiny", "liere-cifar100-vit-t"),
    ("ViT-Base", "liere-cifar100-vit-b"),
    ("ViT-Large", "liere-cifar100-vit-l"),
)
"""The columns of LieRE's table 5: CIFAR-100, 32x32 pixels, patches of 4x4, a class token."""


def sizes() -> list[Size]:
    """List the models of the papers and of the recipes."""
    pixels, clip = (224, 224), (8, 224, 224)
    return [
        *(_size(recipe, f"{title}, 32x32", (32, 32), 100) for title, recipe in TABLE_5),
        _size("rope-vit-s", "ViT-Small, 224x224", pixels, 1000),
        _size("liere-imagenet", "ViT-Base, 224x224", pixels, 1000),
        _size("rope-vit-l-224", "ViT-Large, 224x224", pixels, 1000),
        _size("rope-swin-t", "Swin-Tiny, 224x224", pixels, 1000),
        _size("rope-swin-s", "Swin-Small, 224x224", pixels, 1000),
        _size("rope-swin-b", "Swin-Base, 224x224", pixels, 1000),
        _size("liere-ucf101", "ViT-Base, 8x224x224", clip, 101),
        _size("liere-rsna", "ViT-Base, 32x224x224", (32, 224, 224), 2),
        _size("comrope-ucf101", "ComRoPE's ViT, 8x224x224", clip, 101),
        _size("digits", "digits, 8x8", (8, 8), 10, 1),
        _size("fashion-mnist", "fashion-mnist, 28x28", (28, 28), 10, 1),
        _size("motion", "motion, 5x20x20", (5, 20, 20), 10, 1),
    ]


@dataclass(frozen=True)
class Counts:
    """Parameters and operations of a model.

    Attributes:
        parameters: Learned parameters.
        encoding_parameters: Those of its encodings.
        by_formula: The same from `parameters_by_formula`.
        flops: Operations of a forward pass, two per multiply-add: matrix products and exponentials.
        rotating: Multiply-adds of rotating queries and keys, block by block.
        norms: Output elements of all LayerNorms.
    """

    parameters: int
    encoding_parameters: int
    by_formula: int
    flops: int
    rotating: int
    norms: int


def costs(size: Size, encoding: str) -> Counts:
    """Count parameters and operations on the meta device, without computing anything.

    Args:
        size: A model and its input.
        encoding: A name, as `torchrope.encodings.parse_encoding` takes it.

    Raises:
        ValueError: the encoding does not support the size.
    """
    build = partial(build_model, encoding, size.model, size.data)
    with torch.device("meta"):
        model = on_lattice(build()).eval()
        rotating, norms = _work(model, torch.empty(size.input_shape))
    return Counts(
        parameters=sum(p.numel() for p in model.parameters()),
        encoding_parameters=count_encoding_parameters(model),
        by_formula=parameters_by_formula(model),
        flops=count_flops(build, size.input_shape),
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
        rotating.append(2 * rotated * block_size_of(rotation))

    def normed(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        norms.append(output.numel())

    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(attended, with_kwargs=True)
        elif isinstance(module, nn.LayerNorm):
            module.register_forward_hook(normed)
    model(inputs)
    return sum(rotating), sum(norms)


def block_size_of(rotation: Rotation) -> int:
    """Return the block size of a rotation."""
    if isinstance(rotation, Block):
        return rotation.table.shape[-1]
    if isinstance(rotation, Commuting):
        return rotation.base.shape[-1]
    return rotation.basis.shape[-1] if isinstance(rotation, PlanarInBasis) else 2


def parameters_by_formula(model: ViT | Swin) -> int:
    """Compute the number of learned parameters of a model's encodings from its widths.

    For each encoding over N axes of d = heads · head_dim channels, blocks of b:

        RoPE-Mixed  N d / 2             LieRE       N d (b - 1) / 2
        ComRoPE-AP  d (b - 1) / 2       ComRoPE-LD  d (b - 1) / 2 + N d / b
        STRING      N d / 2 + d (b - 1) / 2

    A learned absolute encoding has n d for n positions, a bias heads Π (2 s - 1) for windows of s, others 0.
    """
    return sum(_learned(module) for module in model.modules())


def _learned(module: nn.Module) -> int:
    if isinstance(module, AbsoluteEncoding):
        return math.prod(module.sizes) * module.dim if type(module).__name__ == "LearnedAPE" else 0
    if isinstance(module, RelativePositionBias):
        return module.num_heads * math.prod(2 * size - 1 for size in module.sizes)
    if not isinstance(module, Encoding):
        return 0
    axes, b = module.num_axes, module.block_size
    d = module.rotary_dim * module.parameter_heads
    return {
        "MixedRoPE": axes * d // 2,
        "LieRE": axes * d * (b - 1) // 2,
        "ComRoPEAP": d * (b - 1) // 2,
        "ComRoPELD": d * (b - 1) // 2 + axes * d // b,
        "STRING": axes * d // 2 + d * (b - 1) // 2,
    }.get(type(module).__name__, 0)


def products_by_formula(size: Size) -> int:
    """Compute the multiply-adds of a ViT's matrix products without positions from its widths.

        n_p C |patch| d + L (4 n d² + 2 n² d + 2 n d m) + d classes

    for n_p patches, n tokens including prefix tokens, L layers, d channels, MLP width m.
    """
    with torch.device("meta"):
        model = build_model("none", size.model, size.data)
    assert isinstance(model, ViT)
    patches = math.prod(model.embed.lattice(size.data.input_size))
    tokens, d, depth = patches + model.num_prefix, model.prefix_tokens.shape[-1], len(model.layers)
    first: Any = model.layers[0]
    m = first.mlp[0].out_features
    layer = 4 * tokens * d**2 + 2 * tokens**2 * d + 2 * tokens * d * m
    return patches * model.embed.proj.in_features * d + depth * layer + d * size.data.num_classes


def table_5_count(without: Counts, with_encoding: Counts) -> int:
    """Count operations as in LieRE's table 5: 1 per multiply-add, 5 per LayerNorm output, 0 for exponentials.

    Args:
        without: Counts of the model without a rotary encoding.
        with_encoding: Counts of the model with it.
    """
    return without.flops // 2 + NORM_OPERATIONS * with_encoding.norms + with_encoding.rotating


PUBLISHED_FLOPS, PUBLISHED_SHARES = published("complexity")[:2]

REASONS = {
    ("ViT-Tiny", "liere"): "cannot be right: rotating 65 tokens takes 2 L n d b = 0.038 G, 3.98 %; "
    "the published 0.007 G corresponds to blocks of about 12",
    ("ViT-Large", "liere:8"): "operations agree; the percentage does not, 19.882 over 19.856 is 0.131 %",
}


def compare_table_5(measured: dict[tuple[str, str], Counts]) -> list[dict[str, Any]]:
    """Compare the cells of LieRE's table 5 with the same counts here.

    Args:
        measured: Counts by column of the table ("ViT-Base") and encoding, "none" among them.
    """
    rows = []
    shares = {row["name"]: row for row in PUBLISHED_SHARES.rows}
    for index, (column, _) in enumerate(TABLE_5, start=1):
        without = measured[column, "none"]
        base = table_5_count(without, measured[column, "learned"])
        base_published = PUBLISHED_FLOPS.rows[0][f"value{index}"]
        assert isinstance(base_published, float)
        for row in PUBLISHED_FLOPS.rows:
            encoding = str(row["name"]).partition(" ")[0]
            ours = table_5_count(without, measured[column, encoding])
            if encoding == "axial":  # their cell counts no product for fixed frequencies
                ours -= measured[column, encoding].rotating
            theirs, share = row[f"value{index}"], shares.get(row["name"], {}).get(f"value{index}")
            assert isinstance(theirs, float)
            ours_share = 100 * (ours - base) / base
            step = 1.1e-3  # a unit of the last printed digit, truncated or rounded
            fits = abs(ours / 1e9 - theirs) < step
            fits_share = not isinstance(share, float) or abs(ours_share - share) < 100 * step / base_published
            rows.append(
                {
                    "name": f"{column}, {row['name']}",
                    "published": theirs,
                    "ours": ours / 1e9,
                    "published_share": share,
                    "ours_share": ours_share,
                    "agrees": fits and fits_share,
                    "operations_agree": fits,
                    "verdict": "agrees" if fits and fits_share else REASONS.get((column, encoding), "differs"),
                }
            )
    return rows


def find(lab: Lab) -> Findings:
    """Count every size with every encoding, and compare published numbers with the counts."""
    rows: list[dict[str, Any]] = []
    measured: dict[tuple[str, str], Counts] = {}
    refused: dict[str, list[str]] = {}
    columns = {recipe: column for column, recipe in TABLE_5}
    needed = [str(row["name"]).partition(" ")[0] for row in PUBLISHED_FLOPS.rows]
    for size in sizes():
        without = costs(size, "none")
        wanted = list(dict.fromkeys(lab.encodings))
        for encoding in dict.fromkeys(["none", *wanted, *(needed if size.name in columns else [])]):
            try:
                cost = without if encoding == "none" else costs(size, encoding)
            except ValueError as error:
                refused.setdefault(f"{encoding}: {error}", []).append(size.title)
                continue
            measured[columns.get(size.name, size.name), encoding] = cost
            if encoding in wanted:
                rows.append(_row(size, encoding, without, cost))
    cells = compare_table_5(measured)
    claims = published_claims(measured)
    return Findings(
        answer=_answer(rows, cells),
        tables=[_table(rows), _formulas(), _table_5(cells), _claims(claims)],
        figures=[*_figures(rows), _capacity()],
        checks=_checks(rows, cells, measured),
        notes=[
            "Counts are exact, from the meta device, without training or timing.",
            "Exponentials are counted as five matrix products; kernels for commuting and small blocks cost less "
            "than that, by factoring each block once.",
            *(f"Left out, {encoding} ({join_names(where)})" for encoding, where in refused.items()),
        ],
    )


def _row(size: Size, encoding: str, without: Counts, cost: Counts) -> dict[str, Any]:
    base = table_5_count(without, without)
    count = table_5_count(without, cost)
    return {
        "name": f"{size.title}, {encoding}",
        "size": size.title,
        "encoding": encoding,
        "parameters": cost.parameters,
        "own": cost.encoding_parameters,
        "formula": cost.by_formula,
        "own_share": 100 * cost.encoding_parameters / cost.parameters,
        "macs": count / 1e9,
        "macs_share": 100 * (count - base) / base,
        "flops": cost.flops / 1e9,
        "flops_share": 100 * (cost.flops - without.flops) / without.flops,
    }


def _table(rows: Sequence[Row]) -> Table:
    return Table(
        "Parameters and operations by size and encoding",
        (
            Column("name", "Size and encoding"),
            Column("parameters", "Parameters", digits=0),
            Column("own", "Of the encoding", digits=0),
            Column("formula", "By formula", digits=0),
            Column("own_share", "Share", "%", 4),
            Column("macs", "Multiply-adds", "G", 4),
            Column("macs_share", "Over none", "%", 3),
            Column("flops", "FLOPs with exponentials", "G", 4),
            Column("flops_share", "Over none", "%", 3),
        ),
        rows,
        note="For one example. Multiply-adds are counted as in LieRE's table 5: 1 each, 5 per LayerNorm output, "
        "2 L n d b to rotate queries and keys, 0 for building rotations. FLOPs are 2 per multiply-add of matrix "
        "products, including exponentials, without LayerNorms and element-wise operations, such as rotations by "
        "angles. Rotations are built once per batch: with more examples their share decreases.",
    )


def _formulas() -> Table:
    """Evaluate ComRoPE's table 7 for ViT-Base, N = 2, blocks of 8."""
    size = next(each for each in sizes() if each.name == "liere-imagenet")
    depth, d, heads, axes, b = 12, 768, 12, 2, 8
    tokens = math.prod(side // 16 for side in size.data.input_size)
    families = (
        ("absolute", "learned", tokens * d, "n d"),
        ("RoPE", "axial", 0, "0"),
        ("LieRE", "liere:8", depth * axes * d * b, "L N d (b - 1)/2"),
        ("ComRoPE-AP", "comrope-ap:8", depth * d * b, "L d (b - 1)/2"),
        ("ComRoPE-LD", "comrope-ld:8", depth * d * b // axes + depth * d * axes // b, "L d ((b - 1)/2 + N/b)"),
    )
    rows: list[dict[str, Any]] = []
    for name, encoding, theirs, stored in families:
        rotary, block = name != "absolute", 2 if name == "RoPE" else b
        terms = depth * tokens * d * (block * axes + block**2 + d // heads) if rotary else tokens * d
        blockwise = depth * tokens * d * (block * axes + block**2 + block) if rotary else tokens * d
        shapes = depth * d * b + depth * d * axes // b if name == "ComRoPE-LD" else theirs
        count = costs(size, encoding).encoding_parameters
        rows.append(
            {
                "name": name,
                "theirs": theirs,
                "shapes": shapes,
                "stored": stored,
                "count": count,
                "terms": terms / 1e6,
                "blockwise": blockwise / 1e6,
            }
        )
    return Table(
        "ComRoPE's formulas at ViT-Base, 14x14 patches, blocks of 8 (RoPE: of 2)",
        (
            Column("name", "Encoding"),
            Column("theirs", "Parameters by its table 7", digits=0),
            Column("shapes", "By its own shapes", digits=0),
            Column("stored", "Formula here"),
            Column("count", "Counted here", digits=0),
            Column("terms", "Operations, L n d (bN + b² + d/h)", "M", 1),
            Column("blockwise", "Block by block, L n d (bN + b² + b)", "M", 1),
        ),
        rows,
        note="Learned here are the strict upper triangles, (b - 1)/2b of full blocks. The table's cell of ComRoPE-LD, "
        "L d (b/N + N/b), differs from the size of the shapes that the paper gives, L d (b + N/b). Operations are "
        "orders of growth with all constants 1.",
    )


def _table_5(cells: Sequence[Row]) -> Table:
    return Table(
        "LieRE's table 5, cell by cell",
        (
            Column("name", "Cell"),
            Column("published", "Published", "G", 3),
            Column("ours", "Counted here", "G", 4),
            Column("published_share", "Published, over absolute", "%", 3),
            Column("ours_share", "Counted here, over absolute", "%", 3),
            Column("verdict", "Verdict"),
        ),
        cells,
        note="A cell agrees if it differs by at most a unit of its last digit: published numbers are partly rounded "
        "and partly truncated, and percentages were computed from them. Fixed frequencies count as 0, as in the "
        "paper's row of VisionLlama; counted as the others they would have the operations of RoPE-Mixed.",
    )


def published_claims(measured: dict[tuple[str, str], Counts]) -> list[dict[str, Any]]:
    """Compare numbers in the texts of papers with counts.

    Args:
        measured: Counts as for `compare_table_5`, and by recipe for other sizes.
    """
    by_name = {size.name: size for size in sizes()}
    base = by_name["liere-cifar100-vit-b"]
    shared = replace(base, model=replace(base.model, share_layers=True, share_heads=True))
    wider = by_name["liere-cifar100-vit-t"]
    wider = replace(wider, model=replace(wider.model, mlp_dim=1536))
    text_mlp = replace(base, model=replace(base.model, mlp_dim=3096))
    clips, volumes = by_name["liere-ucf101"], by_name["liere-rsna"]
    volumes = replace(volumes, data=SimpleNamespace(**{**vars(volumes.data), "num_classes": 101}))
    without = {column: measured[column, "none"] for column, _ in TABLE_5}
    imagenet = by_name["liere-imagenet"]
    image = costs(imagenet, "mixed")
    with_class = costs(base, "liere")

    # fvcore multiplies the shape of the first factor, which is that of one head if heads share matrices.
    layers, tokens, head_dim = 12, 65, 64
    artefact = table_5_count(without["ViT-Base"], without["ViT-Base"]) + 2 * layers * tokens * head_dim * head_dim
    complex_products = 2 * 196 * (768 // 2) * 12  # of queries and keys, each a channel pair of a patch in a layer
    real = 6 * complex_products

    def claim(text: str, source: str, theirs: str, ours: str, verdict: str = "agrees") -> dict[str, Any]:
        return {"name": text, "source": source, "published": theirs, "ours": ours, "verdict": verdict}

    return [
        claim(
            "LieRE's parameters, one set for all layers and heads",
            f"{LIERE_1}, section 4.2.1",
            "4,032",
            f"{costs(shared, 'liere').encoding_parameters:,}",
        ),
        claim(
            "LieRE's parameters, ViT-Base",
            f"{LIERE_2}, section 5.3.2",
            "580k",
            f"{with_class.encoding_parameters:,}",
        ),
        claim(
            "Parameters of ViT-Tiny",
            f"{LIERE_2}, table 5",
            "22M",
            f"{without['ViT-Tiny'].parameters / 1e6:.1f}M",
            "cannot be right beside 0.963 G: an MLP of 1536 has "
            f"{costs(wider, 'none').parameters / 1e6:.1f}M and "
            f"{table_5_count(costs(wider, 'none'), costs(wider, 'none')) / 1e9:.3f} G",
        ),
        claim(
            "Parameters of ViT-Base, 2D",
            f"{LIERE_2}, table 1",
            "85.1M",
            f"{without['ViT-Base'].parameters / 1e6:.1f}M",
            "agrees with an MLP of 3072; that of 3096 in its appendix B has "
            f"{costs(text_mlp, 'none').parameters / 1e6:.1f}M",
        ),
        claim(
            "Parameters of ViT-Large",
            f"{LIERE_2}, table 5",
            "302M",
            f"{without['ViT-Large'].parameters / 1e6:.1f}M",
        ),
        claim(
            "Parameters of ViT-Base, 3D",
            f"{LIERE_2}, table 1",
            "88.7M",
            f"{costs(clips, 'learned').parameters / 1e6:.1f}M",
            "cannot be right for clips of 8x224x224 in patches of 2x16x16; 32 frames in patches of 4x16x16, the first "
            f"version's, have {costs(volumes, 'learned').parameters / 1e6:.1f}M with learned positions",
        ),
        claim(
            "Operations where heads share the generators",
            f"{LIERE_2}, table 2",
            "5.613 G",
            f"{table_5_count(without['ViT-Base'], with_class) / 1e9:.3f} G",
            f"an artefact of the counter: one head's matrices counted for all give {artefact / 1e9:.4f} G, the work is "
            "the same",
        ),
        claim(
            "RoPE-Mixed's share of ViT-B's parameters",
            f"{ROPE_VIT}, section 3.2",
            "about 0.01 %",
            f"{100 * image.encoding_parameters / image.parameters:.4f} %",
        ),
        claim(
            "Operations that rotate, ViT-B at 224x224",
            f"{ROPE_VIT}, section 3.3",
            "1.8 M, 0.01 % of 17.6 G",
            f"{real / 1e6:.2f} M, {100 * real / 17.6e9:.2f} % of 17.6 G",
            f"2 · 196 · 384 · 12 = {complex_products:,} complex products of queries and keys, one operation each; in "
            "real numbers each takes six",
        ),
    ]


def _claims(claims: Sequence[Row]) -> Table:
    return Table(
        "Other published numbers",
        (
            Column("name", "What"),
            Column("published", "Published"),
            Column("ours", "Counted here"),
            Column("verdict", "Verdict"),
            Column("source", "Source"),
        ),
        claims,
    )


def _answer(rows: Sequence[dict[str, Any]], cells: Sequence[Row]) -> str:
    base = [row for row in rows if row["size"] == sizes()[1].title and row["own"]]
    claim = "The encodings have no learned parameters."
    if base:
        most, slowest = (max(base, key=lambda row: row[key]) for key in ("own", "macs_share"))
        claim = (
            f"In ViT-Base at 32x32 pixels encodings learn up to {most['own']:,} parameters ({most['encoding']}, "
            f"{most['own_share']:.2f} % of the model), and rotating adds up to {slowest['macs_share']:.2f} % "
            f"multiply-adds ({slowest['encoding']})."
        )
    agree = sum(bool(row["agrees"]) for row in cells)
    return f"{claim} Counts reproduce {agree} of {len(cells)} cells of LieRE's table 5."


def _checks(
    rows: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]], measured: dict[tuple[str, str], Counts]
) -> list[Check]:
    base = [cell for cell in cells if str(cell["name"]).startswith("ViT-Base")]
    off = max(abs(cell["published"] - cell["ours"]) for cell in base)
    known = {"liere": 580_608, "liere:8": 64_512, "mixed": 9_216}
    counts = {encoding: measured["ViT-Base", encoding].encoding_parameters for encoding in known}
    differing = [row["name"] for row in rows if row["own"] != row["formula"]]
    formula = {column: products_by_formula(size) for (column, _), size in zip(TABLE_5, sizes(), strict=False)}
    counted = {column: measured[column, "none"].flops // 2 for column in formula}
    made = {
        (column, encoding): _rotation_flops(size, encoding)
        for (column, _), size in zip(TABLE_5, sizes(), strict=False)
        for encoding in ("liere:8", "liere")
    }
    extra = {(column, name): measured[column, name].flops - measured[column, "none"].flops for column, name in made}
    return [
        Check(
            "LieRE's table 5, column of ViT-Base, is reproduced within a unit of its last digit, 0.001 G",
            all(cell["agrees"] for cell in base),
            f"largest difference {off:.4f} G over {len(base)} cells",
        ),
        Check(
            "Encodings of ViT-Base have 580,608 parameters with LieRE, 64,512 in blocks of 8, 9,216 with RoPE-Mixed",
            counts == known,
            ", ".join(f"{name} {count:,}" for name, count in counts.items()),
        ),
        Check(
            "Counted parameters equal the formulas, for every size and encoding",
            not differing,
            f"{len(rows) - len(differing)} of {len(rows)} rows"
            + (f"; not {join_names(differing)}" if differing else ""),
        ),
        Check(
            "Counted products equal the formula, for every size of the table",
            formula == counted,
            ", ".join(f"{column} {count:,}" for column, count in counted.items()),
        ),
        Check(
            "LieRE's FLOPs over none are 10 L n d b² + 4 L n d b",
            made == extra,
            f"ViT-Base, blocks of 64: {extra['ViT-Base', 'liere']:,}",
        ),
    ]


def _rotation_flops(size: Size, encoding: str) -> int:
    """Compute the FLOPs of building and applying LieRE's rotations in a ViT."""
    with torch.device("meta"):
        model = build_model(encoding, size.model, size.data)
    assert isinstance(model, ViT)
    tokens = math.prod(model.embed.lattice(size.data.input_size)) + model.num_prefix
    d, b = model.prefix_tokens.shape[-1], model.encodings[0].block_size
    assert isinstance(b, int)
    return len(model.layers) * tokens * d * (2 * EXP_PRODUCTS * b * b + 4 * b)


def _figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    drawn = [row for row in rows if row["encoding"] != "none"]
    if not drawn:
        return []
    shown = [{key: row[key] for key in ("size", "encoding", "own", "own_share", "macs_share")} for row in drawn]
    figures = (
        ("parameters-by-size", "own_share", "The encoding's share of the parameters", "Of all parameters",
         "Counted, exact."),
        ("operations-by-size", "macs_share", "Additional multiply-adds of rotating", "Over no encoding",
         "Counted as in LieRE's table 5, without building the rotations; exact."),
    )  # fmt: skip
    return [
        Figure(
            name=name,
            kind="points",
            title=title,
            alt=f"{title}, in percent, for {len(shown)} models.",
            x=Axis(key, heading, "%"),
            y=Axis("size", "Size", scale="category"),
            rows=shown,
            series="encoding",
            caption=caption,
        )
        for name, key, title, heading, caption in figures
    ]


def _capacity() -> Figure:
    """Build a figure of parameters by block size in ViT-Base."""
    base = sizes()[1]
    rows: list[dict[str, Any]] = []
    for family in ("liere", "comrope-ap", "comrope-ld", "string"):
        for b in (2, 4, 8, 16, 32, 64):
            try:
                with torch.device("meta"):
                    count = count_encoding_parameters(build_model(f"{family}:{b}", base.model, base.data))
            except ValueError:
                continue  # the block size does not fit the number of axes
            rows.append({"family": label(f"{family}:{b}").partition(",")[0], "block": b, "parameters": count})
    return Figure(
        name="parameters-by-block",
        kind="lines",
        title="Parameters by block size, ViT-Base",
        alt="Parameters of the encodings of ViT-Base over 2D by block size from 2 to 64, one line per family.",
        x=Axis("block", "Block size", "channels", "log"),
        y=Axis("parameters", "Parameters", scale="log"),
        rows=rows,
        series="family",
        caption="Counted, exact.",
    )
