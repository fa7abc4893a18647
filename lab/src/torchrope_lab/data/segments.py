"""Semantic segmentation data from folders of images and masks of class indices."""

from pathlib import Path

from torchrope_lab.data.config import SegmentsConfig
from torchrope_lab.data.dense import IGNORED
from torchrope_lab.data.folders import warn_unread
from torchrope_lab.data.images import existing_folder, hold_out
from torchrope_lab.data.maps import MapModule, MapSet, Pair, largest_index, require_pairs

LAYOUT = (
    "images/train/* with masks/train/*.png of the same names and the same for val, or images/* with masks/*.png; "
    "optional: classes.txt with the name of each index, one per line"
)
CLASSES = "classes.txt"


class Segments(MapModule):
    """Images below root/images, each with a palette or greyscale PNG of class indices below root/masks.

    255 in a mask is unlabelled. classes.txt names the classes from index 0 on, one per line; without it, the names are
    the indices up to the largest in the masks. Without val, a fifth of the images is held out by a hash of path and
    `split_seed`.

    Raises:
        ValueError: root is missing or has another layout, or there is only one class.
    """

    name = "segments"
    first = 0

    config: SegmentsConfig

    def __init__(self, config: SegmentsConfig) -> None:
        super().__init__(config)
        self.root = existing_folder(config.root, "segments", LAYOUT)
        if not (self.root / "images").is_dir() or not (self.root / "masks").is_dir():
            raise ValueError(f"--data.root must hold {LAYOUT}; got {str(self.root)!r}")
        self.parts = [part for part in ("train", "val") if (self.root / "images" / part).is_dir()] or [""]
        if self.parts == ["val"]:
            raise ValueError(f"--data.root must hold {LAYOUT}; got val without train in {str(self.root)!r}")
        names = self.root / CLASSES
        self.classes = self.map_classes = read_names(names) if names.is_file() else ()
        self.title = f"Segments in {self.root.name}"
        self.description = f"Images from the folder {self.root.name}, with a class for every pixel."

    def datasets(self) -> tuple[MapSet, MapSet]:
        """Pair images and masks, find the classes, split, and select `train_size` and `val_size` pairs."""
        parts, faults = self.pairs([(self.root / "images" / part, self.root / "masks" / part) for part in self.parts])
        paired = [path for pairs in parts for pair in pairs for path in pair]
        warn_unread(self.root, [*paired, *(path for path, _ in faults), CLASSES], "images, masks (.png) or classes.txt")
        if not self.map_classes:
            largest, unreadable = largest_index(self.root, [mask for pairs in parts for _, mask in pairs])
            broken = {mask for mask, _ in unreadable}
            parts = [[pair for pair in pairs if pair[1] not in broken] for pairs in parts]
            faults = faults + unreadable
            for pairs, part in zip(parts, self.parts, strict=True):
                require_pairs(pairs, faults, self.root / "images" / part)
            self.classes = self.map_classes = tuple(str(index) for index in range(largest + 1))
        if len(self.map_classes) < 2:
            rule = f"masks must have indices of at least two classes ({IGNORED} is unlabelled)"
            raise ValueError(f"{rule}, got only 0 in {str(self.root)!r}")
        train, val = parts if len(parts) == 2 else self._split(parts[0])
        return self.sets(train, val, faults)

    def _split(self, pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
        masks = dict(pairs)
        if len(pairs) < 2:
            raise ValueError(f"images must number at least 2, one to train on and one to hold out, got {len(pairs)}")
        train, val = hold_out([(image, 0) for image in masks], self.config.split_seed)
        return [(image, masks[image]) for image, _ in train], [(image, masks[image]) for image, _ in val]


def read_names(path: Path) -> tuple[str, ...]:
    """Read class names, one per line.

    Raises:
        ValueError: there are fewer than 2 or more than 255 names, a name occurs twice, or a line is empty.
    """
    names = [name.strip() for name in path.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    if not 2 <= len(names) <= IGNORED or len(set(names)) < len(names) or "" in names:
        faults = ", some twice or empty" if len(set(names)) < len(names) or "" in names else ""
        rule = f"{path.name} must name 2 to {IGNORED} different classes, one per line"
        raise ValueError(f"{rule}, got {len(names)}{faults}")
    return tuple(names)
