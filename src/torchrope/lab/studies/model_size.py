"""Whether the size of the model changes what an encoding gains (LieRE's second version, table 4 and figure 3a)."""

from collections.abc import Sequence
from math import log2
from typing import Any

from torchrope.lab.results import Advice, Column, Findings, Table
from torchrope.lab.studies.engine.estimates import (
    about_intervals,
    at_best,
    caveat,
    correct,
    not_told_apart,
    points,
    told,
    trend,
)
from torchrope.lab.studies.engine.grid import (
    ENCODING,
    ONE_BY_ONE,
    Cells,
    Factor,
    Plan,
    contrast_table,
    direction,
    lead_figure,
    leads,
    named,
    top1_figure,
    top1_table,
    train_grid,
)
from torchrope.lab.studies.engine.published import LIERE_2, published
from torchrope.lab.studies.engine.study import Lab, Study
from torchrope.models import SIZES, SWIN_SIZES

REFERENCE = "learned"
FACTOR = Factor("width", "Width of the model", "channels", "log")
BY_NAME = ("tiny", "base", "large")

PUBLISHED = (
    published(
        "Top-1 by size of the ViT on CIFAR-100",
        f"{LIERE_2}, table 4",
        """
        absolute | 57.2 (56.2-58.1) | 63.9 (62.9-65.8) | 60.5 (59.5-61.4)
        axial (VisionLlama RoPE) | 58.2 (57.2-59.2) | 65.5 (64.6-66.5) | 62.3 (60.4-64.2)
        mixed (RoPE-Mixed) | 65.4 (64.5-66.4) | 68.8 (67.9-69.7) | 68.8 (67.9-69.7)
        liere:8 | 65.6 (64.7-66.6) | 70.3 (69.4-71.2) | 69.9 (68.9-70.8)
        liere | 65.3 (64.4-66.3) | 70.0 (69.1-69.7) | 68.9 (68.0-69.8)
        """,
        ("Encoding", "ViT-Tiny", "ViT-Base", "ViT-Large"),
        note="The interval printed for liere on ViT-Base, 69.1-69.7, does not hold its value; table 1 has 69.1-70.9. "
        "The cell of mixed on ViT-Large repeats that on ViT-Base. The text calls the lead of LieRE significant at all "
        "three sizes; the intervals of mixed and liere:8 overlap at each.",
    ),
)


def find(lab: Lab) -> Findings:
    """Train every encoding in models of three sizes."""
    names = list(dict.fromkeys([REFERENCE, *lab.encodings]))
    sizes = _sizes(lab)
    plan: Plan = {name: {width: lab.runs([name], model=model) for width, model in sizes.items()} for name in names}
    cells, notes = train_grid(lab, plan)
    ahead = leads(cells, REFERENCE)
    slopes = _lead_trends(cells)
    seeds = len(lab.seeds)
    return Findings(
        answer=_answer(cells, slopes) + caveat(seeds),
        tables=[
            top1_table("Top-1 by width of the model", cells, FACTOR, about_intervals(seeds)),
            contrast_table("Ahead of a learned absolute encoding", ahead, FACTOR, "lead", "Ahead", ONE_BY_ONE),
            _slope_table(slopes),
            _size_table(lab, cells),
        ],
        figures=[top1_figure(cells, FACTOR, _alt(cells)), lead_figure(FACTOR, ahead, "the same model")],
        published=PUBLISHED,
        notes=[_how(lab), *notes],
        advice=_advice(cells, lab),
    )


def _sizes(lab: Lab) -> dict[float, dict[str, Any]]:
    """What differs from the configured model, by width: sizes by name where one is named, else fewer heads or more."""
    model = lab.config.model
    if model.size is not None:
        table = SWIN_SIZES if model.backbone == "swin" else SIZES
        own = dict.fromkeys(("dim", "depth", "num_heads", "mlp_dim", "depths", "stage_heads"))
        return {table[size]["dim"]: {**own, "size": size} for size in BY_NAME}
    built = lab.blueprint(lab.run("none")).arguments
    return {built["dim"] * heads // _heads(built): _scaled(built, heads) for heads in _three(_heads(built))}


def _heads(built: dict[str, Any]) -> int:
    """Heads of the first stage."""
    heads = built["num_heads"]
    return heads if isinstance(heads, int) else heads[0]


def _three(heads: int) -> list[int]:
    """A quarter of the heads, half and all of them; where there are too few, all, twice and four times."""
    if heads < 3:
        return [heads, 2 * heads, 4 * heads]
    return [max(1, heads // 4), max(2, heads // 2), heads]


def _scaled(built: dict[str, Any], heads: int) -> dict[str, Any]:
    """Width, heads and the MLP in proportion, so that heads keep their channels; nothing where nothing changes."""
    whole = _heads(built)
    if heads == whole:
        return {}
    dim = built["dim"] * heads // whole
    if "depths" in built:
        return {"dim": dim, "stage_heads": [each * heads // whole for each in built["num_heads"]]}
    mlp_dim = built["mlp_dim"] or 4 * built["dim"]
    return {"dim": dim, "num_heads": heads, "mlp_dim": mlp_dim * heads // whole}


def _lead_trends(cells: Cells) -> list[dict[str, Any]]:
    """How leads over the reference change with each doubling of the width."""
    rows = []
    for name, levels in cells.items():
        shared = [width for width in levels if width in cells[REFERENCE]]
        if name != REFERENCE and len(shared) > 1:
            one, other = (
                [correct(each[width]).mean(axis=0) for width in shared] for each in (levels, cells[REFERENCE])
            )
            ahead = [(mine - theirs)[None] for mine, theirs in zip(one, other, strict=True)]
            value, low, high = trend([log2(float(width)) for width in shared], ahead)
            verdict = {"rises": "grows", "falls": "shrinks", "flat": "cannot be told"}[direction(low, high)]
            rows.append({**named(name), "trend": value, "low": low, "high": high, "verdict": verdict})
    return rows


def _answer(cells: Cells, slopes: Sequence[dict[str, Any]]) -> str:
    said = []
    for width in cells[REFERENCE]:
        equals, value = _best(cells, width)
        tied = f", not told apart from {told(equals[1:])}" if equals[1:] else ""
        said.append(f"{equals[0]} with {value}{tied} at {width:,} channels")
    text = "Best are " + "; ".join(said) + "."
    for verdict in ("grows", "shrinks"):
        each = [
            f"{row['name']} {points(row['trend'], row['low'], row['high'])}"
            for row in slopes
            if row["verdict"] == verdict
        ]
        if each:
            text += (
                f" With each doubling of the width the lead over a learned absolute encoding {verdict}: {told(each)}."
            )
    if slopes and all(row["verdict"] == "cannot be told" for row in slopes):
        text += " Whether leads over a learned absolute encoding depend on the width cannot be told."
    return text


def _best(cells: Cells, width: Any) -> tuple[list[str], str]:
    return at_best({name: correct(levels[width]) for name, levels in cells.items() if width in levels})


def _slope_table(slopes: Sequence[dict[str, Any]]) -> Table:
    slope = Column("trend", "Lead gained per doubling of the width", "points", 2, low="low", high="high")
    title = "How the lead over a learned absolute encoding depends on the width"
    return Table(title, (*ENCODING, slope, Column("verdict", "Lead")), list(slopes), note=ONE_BY_ONE)


def _size_table(lab: Lab, cells: Cells) -> Table:
    columns = (
        FACTOR.column,
        Column("heads", "Heads"),
        Column("depth", "Layers"),
        Column("parameters", "Parameters", digits=0),
    )
    rows = []
    for width, runs in cells[REFERENCE].items():
        model = lab.blueprint(runs[0].run)
        heads, depth = model.arguments["num_heads"], model.arguments.get("depth", model.arguments.get("depths"))
        rows.append(
            {
                "width": width,
                "heads": _listed(heads),
                "depth": _listed(depth),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
            }
        )
    return Table("The models, with a learned absolute encoding", columns, rows)


def _listed(value: Any) -> str:
    return str(value) if isinstance(value, int) else ", ".join(map(str, value))


def _alt(cells: Cells) -> str:
    return f"Top-1 in percent over the width of the model, one line for each of {len(cells)} encodings."


def _how(lab: Lab) -> str:
    if lab.config.model.size is not None:
        return (
            f"Sizes are {told(list(BY_NAME))}, as the library names them; they differ in width, and large in depth too."
        )
    return "Sizes differ in width, with heads as wide as configured and an MLP in proportion; not in depth."


def _advice(cells: Cells, lab: Lab) -> list[Advice]:
    found = []
    for width, size in ((min(cells[REFERENCE], key=float), "small"), (max(cells[REFERENCE], key=float), "large")):
        equals, value = _best(cells, width)
        tied = not_told_apart(equals)
        case = f"A {size} model ({width:,} channels) on {lab.data.title}"
        found.append(Advice(case, equals, f"{equals[0]} reaches {value}{tied}"))
    return found


STUDY = Study(
    title="Model size",
    question="Does the size of the model change what an encoding gains?",
    sources=(f"{LIERE_2}, table 4 and figure 3a",),
    find=find,
    encodings=("learned", "axial", "mixed", "liere:8", "liere"),
)
