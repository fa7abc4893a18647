"""Sets of points, one file each; the class is the sub-folder or a column's value."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from torchrope_lab.data.config import PointsConfig
from torchrope_lab.data.faults import Fault, find_faults, name_some, reason, warn_skipped
from torchrope_lab.data.folders import files_below, subfolders, warn_unread
from torchrope_lab.data.images import PARTS, Sample, existing_folder, find_classes, select_examples, split_parts
from torchrope_lab.data.tables import READERS, Columns, read_table
from torchrope_lab.data.tokens import Cloud, TokensModule, point_counts

EXTENSIONS = tuple(READERS)
AXES = ("t", "x", "y", "z")
"""Columns that are positions if none are named."""
LAYOUT = "root/<class>/* or root/train/<class>/* with root/val/<class>/*; with --data.label without <class>"
KIND = f"sets of points ({' '.join(EXTENSIONS)})"


class Points(TokensModule):
    """Sets of points from `root`, one file per set, in class folders as for `images`, or with a column `label`.

    Column names are the first line of a .csv file, the array names of a .npz file, or the vertex properties of a .ply
    file. Positions are the columns t, x, y, z, or `axes`; features are the other columns, or `features`. Positions are
    relative to the minimum along each axis of an example. Points with a missing position (NaN or empty cell) are
    dropped; missing features are flagged in the input.

    Every file is read once in `setup` and held in memory; those that cannot be used are left out, named in one warning
    and listed in `skipped`. Without val a fifth of each class is held out, by a hash of path and `split_seed`.

    Raises:
        ValueError: root is missing, is not a readable folder, or has another layout.
    """

    name = "points"

    config: PointsConfig

    def __init__(self, config: PointsConfig) -> None:
        super().__init__(config)
        self.root = existing_folder(config.root, KIND, LAYOUT)
        if config.label is None:
            self.folders, self.classes = find_classes(self.root)
        else:
            whole = {*PARTS} <= {*subfolders(self.root)}
            self.folders = {part: self.root / part for part in PARTS} if whole else {"": self.root}
        self.title = f"Points in {self.root.name}"
        self.description = f"Sets of points from the folder {self.root.name}."

    @property
    def with_coordinates(self) -> bool:
        """Whether tokens include coordinates: `config.coordinates`, by default only if there are no features."""
        chosen = self.config.coordinates
        return not self.features if chosen is None else chosen

    def clouds(self) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Read every file once, split, choose `train_size` and `val_size` of them."""
        config = self.config
        found, labels = self._readable()
        if config.label is not None:
            self.classes = tuple(sorted({*labels.values()}, key=_sort_key))
            if len(self.classes) < 2:
                rule = f"column {config.label} must have two values or more over all files"
                raise ValueError(f"--data.root: {rule}, got {', '.join(self.classes)} in {str(self.root)!r}")
        parts = {
            part: [(path, self.classes.index(labels[path])) for path in self._paths(folder) if path in found]
            for part, folder in self.folders.items()
        }
        train, val = split_parts(parts, self.classes, config.split_seed, "sets of points")
        train = select_examples(train, config.train_size, config.split_seed, "train_size")
        val = select_examples(val, config.val_size, config.split_seed, "val_size")
        shown = [found[path] for path, _ in (*train, *val)]
        held = f"{', '.join(self.features)} at each" if self.features else "no features"
        of_class = "the sub-folder" if config.label is None else f"column {config.label}"
        self.description = (
            f"{len(shown):,} sets of points from the folder {self.root.name}, {point_counts(shown)} along "
            f"{', '.join(self.axes)} with {held}; the class is {of_class}."
        )
        return [found[path] for path, _ in train], train, [found[path] for path, _ in val], val

    def _paths(self, folder: Path) -> list[str]:
        if self.config.label is not None:
            return files_below(folder, self.root, EXTENSIONS)
        return sorted(path for name in self.classes for path in files_below(folder / name, self.root, EXTENSIONS))

    def _readable(self) -> tuple[dict[str, Cloud], dict[str, str]]:
        """Return examples and the names of their classes by path; files that cannot be used are added to `skipped`."""
        paths = [path for folder in self.folders.values() for path in self._paths(folder)]
        warn_unread(self.root, paths, KIND)
        tables: dict[str, Columns] = {}

        def read(path: str) -> None:
            tables[path] = read_table(self.root / path, self.config.label)

        faults = find_faults(paths, read)
        readable = [path for path in paths if path in tables]
        if readable:
            self.axes, self.features = self._columns(tables[readable[0]], readable[0])
        found: dict[str, Cloud] = {}
        labels: dict[str, str] = {}
        for path in readable:
            try:
                found[path], labels[path] = self._example(path, tables.pop(path))
            except ValueError as error:
                faults.append((path, reason(error)))
        self.skipped = sorted(faults)
        self._require_some(found, self.skipped)
        warn_skipped(self.skipped, len(paths), self.config.max_skipped, "sets of points")
        return found, labels

    def _columns(self, table: Columns, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the position columns and of the feature columns."""
        config = self.config
        axes = tuple(config.axes or (name for name in AXES if name in table))
        if not axes:
            rule = f"--data.axes must name the columns of positions where none is called {', '.join(AXES)}"
            raise ValueError(f"{rule}, got {', '.join(table)} in {path}")
        others = [name for name in table if name not in (*axes, config.label)]
        return axes, tuple(others if config.features is None else config.features)

    def _example(self, path: str, table: Columns) -> tuple[Cloud, str]:
        wanted = (*self.axes, *self.features)
        missing = [name for name in wanted if name not in table]
        if missing:
            raise ValueError(f"columns must include {', '.join(wanted)}, got none called {', '.join(missing)}")
        rows = len(table[self.axes[0]])
        positions = np.stack([table[name] for name in self.axes], axis=1)
        features = np.stack([table[name] for name in self.features], axis=1) if self.features else np.zeros((rows, 0))
        return Cloud.of(torch.from_numpy(positions), torch.from_numpy(features)), self._class_of(path, table)

    def _class_of(self, path: str, table: Columns) -> str:
        name = self.config.label
        if name is None:
            return Path(path).parts[len(self.folders) - 1]  # the class folder; one level deeper below train and val
        if name not in table:
            raise ValueError(f"columns must include {name}, the class, got {', '.join(table)}")
        values = sorted({*table[name].tolist()})
        if len(values) != 1 or not values[0]:
            raise ValueError(f"column {name} must have one value in a file, got {', '.join(values[:3]) or 'none'}")
        return values[0]

    def _require_some(self, found: dict[str, Cloud], faults: Sequence[Fault]) -> None:
        if not found:
            named = f": {name_some(faults)}" if faults else ""
            raise ValueError(f"--data.root must hold readable {KIND}, got none in {str(self.root)!r}{named}")


def _sort_key(name: str) -> tuple[float, str]:
    """Sort key: numbers in numerical order, then other names."""
    return (float(name), "") if name.replace(".", "", 1).isdecimal() else (float("inf"), name)
