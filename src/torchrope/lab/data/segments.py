"""Images with masks of class indices, from folders."""

from pathlib import Path

from torchrope.lab.data.config import SegmentsConfig
from torchrope.lab.data.dense import IGNORED
from torchrope.lab.data.folders import warn_unread
from torchrope.lab.data.images import existing_folder, hold_out
from torchrope.lab.data.maps import MapModule, MapSet, Pair, largest_index, require_pairs

LAYOUT = (
    "images/train/* and masks/train/*.png of the same names, both of val too, or without train and val; "
    "classes.txt with a name for each index, one a line, is optional"
)
CLASSES = "classes.txt"


class Segments(MapModule):
    """Images below root/images with a PNG of class indices for each below root/masks, with a palette or in grey.

    255 in a mask is without a label. Names of classes come from classes.txt, one a line and the first that of 0;
    without it they are numbers, as many as the masks have. Where there is no val, a fifth of the images is held out
    by a hash of path and `split_seed`.

    Raises:
        ValueError: root is missing or not laid out so, or there is one class alone.
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
        named = self.root / CLASSES
        self.classes = self.map_classes = read_names(named) if named.is_file() else ()
        self.title = f"Segments in {self.root.name}"
        self.description = f"Pictures from a folder of one's own, {self.root.name}, with a class for every pixel."

    def datasets(self) -> tuple[MapSet, MapSet]:
        """Pair images and masks, find the classes, split, and choose `train_size` and `val_size` of them."""
        parts, faults = self.pairs([(self.root / "images" / part, self.root / "masks" / part) for part in self.parts])
        paired = [path for pairs in parts for pair in pairs for path in pair]
        warn_unread(self.root, [*paired, *(path for path, _ in faults), CLASSES], "images, masks (.png) or classes.txt")
        if not self.map_classes:
            most, unreadable = largest_index(self.root, [mask for pairs in parts for _, mask in pairs])
            broken = {mask for mask, _ in unreadable}
            parts = [[pair for pair in pairs if pair[1] not in broken] for pairs in parts]
            faults = faults + unreadable
            for pairs, part in zip(parts, self.parts, strict=True):
                require_pairs(pairs, faults, self.root / "images" / part)
            self.classes = self.map_classes = tuple(str(index) for index in range(most + 1))
        if len(self.map_classes) < 2:
            rule = f"masks must have indices of at least two classes ({IGNORED} is without a label)"
            raise ValueError(f"{rule}, got 0 alone in {str(self.root)!r}")
        train, val = parts if len(parts) == 2 else self._split(parts[0])
        return self.sets(train, val, faults)

    def _split(self, pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
        masks = dict(pairs)
        if len(pairs) < 2:
            raise ValueError(f"images must number at least 2, one to train on and one to hold out, got {len(pairs)}")
        train, val = hold_out([(image, 0) for image in masks], self.config.split_seed)
        return [(image, masks[image]) for image, _ in train], [(image, masks[image]) for image, _ in val]


def read_names(path: Path) -> tuple[str, ...]:
    """Read names of classes, one a line.

    Raises:
        ValueError: there are not 2 to 255, two are the same, or a line between is empty.
    """
    names = [name.strip() for name in path.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    if not 2 <= len(names) <= IGNORED or len(set(names)) < len(names) or "" in names:
        raise ValueError(f"{path.name} must name 2 to {IGNORED} different classes, one a line, got {len(names)}")
    return tuple(names)
