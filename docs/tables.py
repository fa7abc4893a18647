"""Tables of the pages from the laboratory's published.yaml: `python docs/tables.py` writes them.

They are the errata, and the published results beside the recipes.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from torchrope_lab.results import Table
from torchrope_lab.studies.engine.published import cite, claims, errata, published

DOCS = Path(__file__).parent
START = "<!-- python docs/tables.py writes the rest -->\n"
BESIDE_RECIPES = {
    "liere-cifar100-vit-t": ("Top-1 by size of the ViT on CIFAR-100", "liere:8", ("ViT-Tiny", "ViT-Base", "ViT-Large")),
    "liere-imagenet": ("Top-1, LieRE's second version", "liere", ("ImageNet-1k",)),
    "liere-ucf101": ("Top-1, LieRE's second version", "liere:8", ("UCF101",)),
    "liere-ucf101-v1": ("Top-1, LieRE's first version", "liere", ("UCF101",)),
    "liere-rsna": ("Top-1, LieRE's first version", "liere", ("RSNA",)),
    "comrope-ucf101": ("Top-1 by inference size, UCF101, trained at 224", "comrope-ld, perturbed", ("224",)),
    "comrope-finetune": ("Top-1 on ImageNet of CLIP's ViT, fine-tuned for 4 epochs", "comrope-ld", ("Top-1",)),
    "rope-vit-s": ("Top-1 at 224, ImageNet-1k", "mixed", ("ViT-S",)),
    "rope-vit-b-224": ("Top-1 at 224, ImageNet-1k", "mixed", ("ViT-B", "ViT-L")),
    "rope-swin-t": ("Top-1 at 224, ImageNet-1k", "mixed", ("Swin-T", "Swin-S", "Swin-B")),
    "rope-vit-ade20k-upernet-vit-b": (
        "mIoU, ADE20k, UperNet on ViT, 160,000 steps at 512",
        "mixed",
        ("ViT-B", "ViT-B, several scales"),
    ),
    "rope-vit-ade20k-upernet-vit-l": (
        "mIoU, ADE20k, UperNet on ViT, 160,000 steps at 512",
        "mixed",
        ("ViT-L", "ViT-L, several scales"),
    ),
    "rope-vit-ade20k-mask2former-swin-s": ("mIoU, ADE20k, Mask2Former on Swin", "mixed", ("Swin-S", "Swin-B")),
    "rope-vit-coco-dino-vit-b": ("Box AP, MS-COCO, DINO-ViTDet, 12 epochs", "mixed", ("ViT-B", "ViT-L")),
    "rope-vit-coco-dino-swin-t": ("Box AP, MS-COCO, DINO-Swin, 12 epochs", "mixed", ("Swin-T", "Swin-S", "Swin-B")),
}
"""By the first recipe in a row of docs/recipes.md: title of the published table, encoding, and models or data sets."""
STUDIES = ("accuracy", "model-size", "finetune", "resolution", "dense")


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
    counted = [
        [cite(claim["source"]), *(claim[key] for key in ("what", "printed", "counted", "why"))] for claim in claims()
    ]
    parts.append(
        f"## Numbers that were counted\n\n{_table(['source', 'what', 'printed', 'counted', 'remark'], counted)}"
    )
    return page.partition(START)[0] + START + "\n" + "\n\n".join(parts) + "\n"


def with_published(page: str) -> str:
    """Return docs/recipes.md with the last column of the rows in `BESIDE_RECIPES`."""

    def row(found: re.Match[str]) -> str:
        if found[2] not in BESIDE_RECIPES:
            return found[0]
        title, encoding, others = BESIDE_RECIPES[found[2]]
        [table] = [table for study in STUDIES for table in published(study) if table.title == title]
        name = encoding.partition(",")[0]
        return f"{found[1]}| `{name}` {', '.join(_cell(table, encoding, other) for other in others)} |"

    return re.sub(r"^(\| `([\w-]+)`[^|]*\|[^|]*)\|[^|]*\|$", row, page, flags=re.MULTILINE)


def _cell(table: Table, encoding: str, other: str) -> str:
    """Return the number of an encoding, which names a row or a column."""
    columns = {column.title: column for column in table.columns}
    name, column = (other, columns[encoding]) if encoding in columns else (encoding, columns[other])
    [value] = [row[column.key] for row in table.rows if str(row["name"]).partition(" (")[0] == name]
    return f"{value:.1f}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


PAGES = {"errata.md": with_errata, "recipes.md": with_published}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write((DOCS / name).read_text(encoding="utf-8")), encoding="utf-8")
