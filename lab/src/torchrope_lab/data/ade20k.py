"""ADE20k: semantic segmentation with the 150 classes of the scene parsing challenge."""

import csv
from collections import Counter
from pathlib import Path

from torchrope_lab.data.config import ADE20kConfig
from torchrope_lab.data.images import existing_folder
from torchrope_lab.data.maps import MapModule, MapSet

FOLDER = "ADEChallengeData2016"
TABLE = "objectInfo150.txt"
PARTS = ("training", "validation")
LAYOUT = (
    f"{FOLDER} with images/training/*.jpg, annotations/training/*.png, the same two folders for validation, and {TABLE}"
)
SOURCE = "data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip"


class ADE20k(MapModule):
    """20,210 training and 2,000 validation images; every pixel has one of 150 classes or is unlabelled.

    In a mask, 0 is unlabelled and the classes are 1 to 150.

    Source: B. Zhou et al., Scene Parsing through ADE20K Dataset, CVPR 2017.

    Raises:
        ValueError: root is missing or has another layout.
    """

    name = "ade20k"
    title = "ADE20k"
    first = 1

    config: ADE20kConfig

    def __init__(self, config: ADE20kConfig) -> None:
        super().__init__(config)
        root = existing_folder(config.root, "ADE20k", f"{LAYOUT}; from {SOURCE}")
        self.root = root / FOLDER if (root / FOLDER).is_dir() else root
        folders = [self.root / kind / part for kind in ("images", "annotations") for part in PARTS]
        if not all(folder.is_dir() for folder in folders) or not (self.root / TABLE).is_file():
            raise ValueError(f"--data.root must hold {LAYOUT}; from {SOURCE}; got {str(root)!r}")
        self.classes = self.map_classes = read_classes(self.root / TABLE)
        self.description = (
            f"Photographs of ADE20k; every pixel has one of {len(self.classes)} classes or is unlabelled (scene "
            "parsing challenge, 2016)."
        )

    def datasets(self) -> tuple[MapSet, MapSet]:
        """List images and masks, and select `train_size` and `val_size` pairs."""
        (train, val), faults = self.pairs(
            [(self.root / "images" / part, self.root / "annotations" / part) for part in PARTS]
        )
        return self.sets(train, val, faults)


def read_classes(path: Path) -> tuple[str, ...]:
    """Read the class names of objectInfo150.txt, a tab-separated table.

    The column Idx counts from 1; the column Name lists synonyms separated by commas.

    Returns:
        The first synonym of every class, or all its synonyms if two classes have the same first one.

    Raises:
        ValueError: a column is missing, or Idx is not 1, 2, ...
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    names = [(row.get("Name") or "").strip() for row in rows]
    indices = [(row.get("Idx") or "").strip() for row in rows]
    if not all(names) or indices != [str(number) for number in range(1, len(rows) + 1)] or not 2 <= len(rows) <= 254:
        columns = f"{', '.join(map(str, rows[0]))}, Idx {', '.join(indices):.40}" if rows else "no rows"
        rule = f"{path.name} must have the tab-separated columns Idx (1, 2, ...) and Name, 2 to 254 rows"
        raise ValueError(f"{rule}, got {columns} in {path}")
    first = [name.split(",")[0].strip() for name in names]
    counts = Counter(first)
    return tuple(short if counts[short] == 1 else name for short, name in zip(first, names, strict=True))
