"""Tables of the pages from the laboratory's published.yaml: `python docs/tables.py` writes them.

They are the errata, the recipes with their published results, and what the papers report beside what was measured
here (results/papers.md).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchrope_lab import recipes
from torchrope_lab.engine.published import cite, claims, errata, published, results_of
from torchrope_lab.engine.registry import STUDIES
from torchrope_lab.report.tables import MISSING, FormattedCell, format_table, written
from torchrope_lab.results import StudyResult, Table

DOCS = Path(__file__).parent
START = "<!-- python docs/tables.py writes the rest -->\n"
RECIPES = re.compile("(?<=<!-- recipes:begin -->\n).*?(?=<!-- recipes:end -->)", re.DOTALL)


def with_errata(page: str) -> str:
    """Return docs/errata.md with the tables of errata by paper, and of counted claims."""
    papers: dict[str, list[list[str]]] = {}
    for erratum in errata():
        paper, _, place = erratum["source"].partition(", ")
        papers.setdefault(paper, []).append([place, *(erratum[key] for key in ("what", "printed", "correct", "why"))])
    parts = [
        f"## {cite(paper)}\n\n{_table(['place', 'what', 'printed', 'correct', 'why'], rows)}"
        for paper, rows in papers.items()
    ]
    counted: dict[str, list[list[str]]] = {}
    for claim in claims():
        paper, _, place = claim["source"].partition(", ")
        counted.setdefault(paper, []).append([place, *(claim[key] for key in ("what", "printed", "counted", "why"))])
    parts.append("## Numbers that were counted")
    parts += [
        f"### {cite(paper)}\n\n{_table(['place', 'what', 'printed', 'counted', 'remark'], rows)}"
        for paper, rows in counted.items()
    ]
    return page.partition(START)[0] + START + "\n" + "\n\n".join(parts) + "\n"


def with_recipes(page: str) -> str:
    """Return docs/recipes.md with the table of the recipes of papers."""
    of_papers = [recipe for recipe in map(recipes.find, recipes.names()) if recipe.source]
    rows = [[f"`{recipe.name}`", recipe.summary, "; ".join(_published(recipe)) or "–"] for recipe in of_papers]
    return RECIPES.sub(lambda _: _table(["recipe", "trains", "published"], rows) + "\n", page)


def _published(recipe: recipes.Recipe) -> list[str]:
    """Write the published results of a recipe's encoding."""
    written = []
    for measure, values in results_of(recipe).items():
        _, _, *named = recipe.published[measure].split(" | ")
        encoding = named[0] if named else recipe.settings["encoding"]
        written.append(f"{measure} `{encoding}` {values[encoding]:.1f}")
    return written


@dataclass(frozen=True)
class Measured:
    """A column of a committed result."""

    title: str
    file: str  # in docs/results/studies, without .json
    column: str
    table: str | int = 0  # its title or index in the file
    row: str = "name"  # column by which rows are found
    where: Mapping[str, str] = field(default_factory=dict)  # values of other columns


@dataclass(frozen=True)
class Question:
    """Tables of a paper beside committed results of the same question."""

    place: str  # in the paper
    asks: str
    title: str  # of the table in published.yaml
    columns: Sequence[str]  # of that table, by title
    measured: Sequence[Measured]
    differs: str  # what cannot be compared
    perturbed: bool = False  # the table's differences of rows with and without perturbation, instead of its rows


SMALL = "models of 0.1 to 0.5 million parameters here; digits and characters, not photographs"
OTHER_NAMES = {
    "liere:2": "mixed",
    "liere:2, shared": "mixed",
    "comrope-liere:8": "liere:8",
    "learned+comrope-liere:8": "learned+liere:8",
}
"""Encodings that were measured in place of those of the papers: the same functions with another initialisation."""
TOP1 = [
    Measured("digits", "accuracy-digits", "top1"),
    Measured("kanji, radicals", "accuracy-kanji-radical", "top1"),
    Measured("kanji, layouts", "accuracy-kanji-layout", "top1"),
]
LOSSES = [Measured(each.title, each.file, "val_loss") for each in TOP1]
SHARED = [
    Measured(f"digits, {name}", "sharing-digits", "top1", "Top-1 by what is shared", "shared", {"name": name})
    for name in ("mixed", "liere:8", "liere")
]
LOST = [Measured("digits, share lost", "shuffle-digits", "lost")]
SIZES = [
    *(Measured(f"digits at {n} ({n / 8:g} ×)", "resolution-digits", f"at{n}x{n}") for n in (8, 12, 16)),
    *(Measured(f"radicals at {n} ({n / 32:g} ×)", "resolution-kanji-radical", f"at{n}x{n}") for n in (32, 48, 64)),
]
CHANGES = [
    Measured(f"radicals at {n} ({n / 32:g} ×)", "resolution-kanji-radical", f"at{n}x{n}", "What perturbation changes")
    for n in (32, 48, 64)
]
QUESTIONS = [
    Question(
        "LieRE, table 1",
        "Which encoding is the most accurate?",
        "Top-1, LieRE's second version",
        ["CIFAR-100", "ImageNet-1k", "UCF101"],
        TOP1,
        f"{SMALL} or videos; 8 to 15 epochs instead of 200",
    ),
    Question(
        "LieRE, first version, tables 1 and 2",
        "Which encoding is the most accurate?",
        "Top-1, LieRE's first version",
        ["CIFAR-100", "ImageNet-1k", "UCF101", "RSNA"],
        TOP1,
        f"{SMALL}, videos or volumes; generators per layer and head here, one set for all there; no intervals there",
    ),
    Question(
        "LieRE, table 2",
        "May layers or heads share generators?",
        "Top-1 by what is shared, ViT-B on CIFAR-100",
        ["liere:2 (RoPE-Mixed)", "liere:8", "liere"],
        SHARED,
        "4 layers of 4 heads here, 12 of 12 there; `mixed` instead of `liere:2`; one training each",
    ),
    Question(
        "LieRE, table 3",
        "How much accuracy is lost with shuffled patches?",
        "Patches shuffled, second version",
        ["Drop, CIFAR-100", "Drop, UCF101"],
        LOST,
        "64 patches of one pixel of a digit here; what is lost depends on the data, so only the order counts",
    ),
    Question(
        "LieRE, first version, table 3",
        "How much accuracy is lost with shuffled patches?",
        "Patches shuffled, CIFAR-100, first version",
        ["Drop"],
        LOST,
        "as for table 3 of the second version; no intervals there",
    ),
    Question(
        "LieRE, table 6",
        "Which encoding has the lowest validation loss?",
        "Validation loss, LieRE's second version",
        ["CIFAR-100", "ImageNet-1k", "UCF101"],
        LOSSES,
        f"{SMALL} or videos: losses are of other classes, so only the order counts; no intervals here",
    ),
    Question(
        "ComRoPE, table 3",
        "Which encoding is the most accurate at larger inputs?",
        "Top-1 by inference size, UCF101, trained at 224",
        ["224", "320", "448"],
        SIZES[3:],
        "videos there, single characters here, drawn at each size; intervals only here",
    ),
    Question(
        "ComRoPE, table 3",
        "What do perturbed positions change, in points?",
        "Top-1 by inference size, UCF101, trained at 224",
        ["224", "320", "448"],
        CHANGES,
        "videos there, single characters here; differences of single trainings there",
        perturbed=True,
    ),
    Question(
        "ComRoPE, table 4",
        "What does an encoding add before fine-tuning?",
        "Top-1 on ImageNet of CLIP's ViT, fine-tuned for 4 epochs",
        ["Top-1"],
        [Measured("digits", "finetune-digits", "top1")],
        "a small ViT trained on the same digits here, CLIP's ViT-B there; one training each",
    ),
    Question(
        "RoPE-ViT, table 2",
        "Which encoding detects best?",
        "Box AP, MS-COCO, DINO-Swin, 12 epochs",
        ["bias (RPB)", "axial", "mixed", "bias+axial", "bias+mixed"],
        [],
        "nothing was measured here: a run needs COCO and eight GPUs (recipes `rope-vit-coco-dino-*`)",
    ),
    Question(
        "RoPE-ViT, table 5",
        "Which encoding is the most accurate at larger inputs?",
        "Top-1 by inference size, ImageNet-1k, ViT-S trained at 224",
        ["224", "288", "384", "448"],
        SIZES,
        f"{SMALL}; crops there, none on digits here; no ResFormer here; digits are resampled; intervals only here",
    ),
    Question(
        "RoPE-ViT, figures 4 to 6",
        "Which encoding is the most accurate at 384, trained at 224?",
        "Top-1 at 384 of the models trained at 224, ImageNet-1k",
        ["ViT-S", "ViT-B", "ViT-L", "Swin-T", "Swin-S", "Swin-B"],
        [SIZES[1], SIZES[4]],
        "the figures print no numbers, these are of the authors' repository, at 1.71 times the size; no Swin here",
    ),
]


def with_papers(page: str) -> str:
    """Return docs/results/papers.md: an overview, and for each question the table of the paper beside ours."""
    head, _, _ = page.partition(START)
    titles = [
        "table",
        "question",
        "the paper: highest (of losses lowest), and table or bias",
        "here: highest (of losses lowest), and table or bias",
        "cannot be compared",
    ]
    overview, sections = [], []
    for question in QUESTIONS:
        theirs, ours = _theirs(question), [_ours(each) for each in question.measured]
        anchor = re.sub(r"[^\w\- ]", "", f"{question.place} {question.asks}".lower()).replace(" ", "-")
        overview.append(
            [
                f"[{question.place}](#{anchor})",
                question.asks,
                _best(theirs, question) or MISSING,
                _best({each.title: column for each, column in zip(question.measured, ours, strict=True)}, question)
                or "not measured",
                question.differs,
            ]
        )
        columns = [*theirs.values(), *ours]
        rows = []
        for name in next(iter(theirs.values())):
            measured = [OTHER_NAMES[name] if name not in each and name in OTHER_NAMES else name for each in ours]
            here = [column.get(key) for column, key in zip(ours, measured, strict=True)]
            remarks = {f"here `{key}`" for key, cell in zip(measured, here, strict=True) if key != name and cell}
            remarks |= {"not trained here"} if not any(here) else set()
            cells = [*(column[name] for column in theirs.values()), *here]
            rows.append([f"`{name}`", *(str(cell or MISSING) for cell in cells), "; ".join(sorted(remarks)) or MISSING])
        heads = ["", *theirs, *(f"here: {each.title}" for each in question.measured), "cannot be compared"]
        assert len(heads) == len(columns) + 2
        sections.append(
            f"## {question.place}: {question.asks}\n\n{_table(heads, rows)}\n\nCannot be compared: {question.differs}."
        )
    return head + START + "\n" + "\n\n".join([_table(titles, overview), *sections]) + "\n"


def _theirs(question: Question) -> dict[str, dict[str, FormattedCell]]:
    """Return the columns of the paper's table, as cells by row, which are encodings."""
    tables = {each.title: each for study in STUDIES for each in published(study)}
    table = tables[question.title]
    keys = {column.title: column.key for column in table.columns}
    columns = {title: _cells(table, keys[title], "name") for title in question.columns}
    if table.columns[0].title == "Backbone":
        backbones = next(iter(columns.values()))
        return {each: {name.partition(" (")[0]: columns[name][each] for name in columns} for each in backbones}
    return {title: _changes(column) for title, column in columns.items()} if question.perturbed else columns


def _changes(column: Mapping[str, FormattedCell]) -> dict[str, FormattedCell]:
    """Return the differences of the rows with and without perturbation."""
    changes = {}
    for name in column:
        if f"{name}, perturbed" in column:
            before, after = column[name].sort, column[f"{name}, perturbed"].sort
            assert before is not None
            assert after is not None
            changes[name] = FormattedCell(written(after - before, 1), sort=after - before)
    return changes


def _ours(measured: Measured) -> dict[str, FormattedCell]:
    """Return a column of a committed result, as cells by row."""
    found = StudyResult.read(DOCS / f"results/studies/{measured.file}.json").findings.tables
    table = next(each for at, each in enumerate(found) if measured.table in (at, each.title))
    rows = [row for row in table.rows if all(row[key] == value for key, value in measured.where.items())]
    return _cells(Table(table.title, table.columns, rows), measured.column, measured.row)


def _cells(table: Table, key: str, row: str) -> dict[str, FormattedCell]:
    """Format a column; names of the papers in parentheses are left out."""
    place = [column.key for column in table.columns].index(key)
    names = [str(each[row]).partition(" (")[0] for each in table.rows]
    return {name: cells[place] for name, cells in zip(names, format_table(table).rows, strict=True)}


def _best(columns: Mapping[str, Mapping[str, FormattedCell]], question: Question) -> str:
    """Name the encoding of the highest value (the lowest loss) of each column, and the table or bias, with cells."""
    told = []
    for title, column in columns.items():
        cells = {name: cell for name, cell in column.items() if cell.sort is not None}
        order = min if "loss" in question.asks else max
        best = order(cells, key=lambda name: cells[name].sort)  # type: ignore[arg-type, return-value]
        base = [name for name in ("learned", "bias", "nothing") if name in cells and name != best][:1]
        told.append(f"{title}: " + ", ".join(f"`{name}` {cells[name]}" for name in (best, *base)))
    return "; ".join(told)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


PAGES = {"errata.md": with_errata, "recipes.md": with_recipes, "results/papers.md": with_papers}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write((DOCS / name).read_text(encoding="utf-8")), encoding="utf-8")
