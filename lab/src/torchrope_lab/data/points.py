"""Sets of points in tables, one file or one group of rows each; the class is the sub-folder or a column's value."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.faults import find_faults, reason, warn_skipped
from torchrope_lab.data.folders import files_below, subfolders, warn_unread
from torchrope_lab.data.images import (
    PARTS,
    Sample,
    check_parts,
    existing_folder,
    find_classes,
    require_each,
    split_by_group,
    split_parts,
)
from torchrope_lab.data.table_files import READERS, Columns, check_columns, read_table
from torchrope_lab.data.tokens import Cloud, CloudSet, TokensModule, classes_of, point_counts
from torchrope_lab.mistakes import Mistake

EXTENSIONS = tuple(READERS)
TIMES, SPACE = ("t", "time", "timestamp"), ("x", "y", "z")
"""Columns, in any case, that are positions if none are named; of several times the first one is."""
LAYOUT = "root/<class>/* or root/train/<class>/* with root/val/<class>/*; with --data.label without <class>"
KIND = f"sets of points ({' '.join(EXTENSIONS)})"


class Example(NamedTuple):
    """The points of an example, its file, the name of its class, and its value in the column `example`."""

    cloud: Cloud
    path: str
    label: str
    group: str = ""


class Points(TokensModule):
    """Sets of points from `root`, in class folders as for `images`, or with a column `label`."""

    # A file is one set, or with a column `example` several: the rows with one value. Positions are the columns t (or
    # time, timestamp), x, y, z, or `axes`; features are the other columns, or `features`. Positions are relative to the
    # minimum along each axis of an example. Points with a missing position (NaN or empty cell) are dropped; missing
    # features are flagged in the input. Every file is read once in `setup` and held in memory; files and examples that
    # cannot be used are left out, named in one warning and listed in `skipped`. Without val a fifth of each class is
    # held out, by a hash of path and `split_seed`, or of the value in `example`, whose examples are in one part or
    # fold.

    name = "points"

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        named = [*(config.axes or ()), *(config.features or ()), *filter(None, [config.label, config.example])]
        if config.axes == [] or len(set(named)) < len(named):
            rule = "--data.axes must name one column or more, and no column twice with features, label and example"
            raise Mistake(f"{rule}, got {','.join(named) or 'none'}")
        self.root = existing_folder(config.root, KIND, LAYOUT)
        if config.label is None:
            try:
                self.folders, self.classes = find_classes(self.root)
            except Mistake as error:
                columns = "--data.label names a column of classes, and --data.example one of examples"
                raise Mistake(f"{error}; without class folders {columns}") from None
        else:
            names = subfolders(self.root)
            check_parts(self.root, names, with_folders=False)
            whole = {*PARTS} <= {*names}
            self.folders = {part: self.root / part for part in PARTS} if whole else {"": self.root}
        self.title = f"Points in {self.root.name}"

    @property
    def with_coordinates(self) -> bool:
        """Whether tokens include coordinates: `config.coordinates`, by default only if there are no features."""
        chosen = self.config.coordinates
        return not self.features if chosen is None else chosen

    def clouds(self) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Read every file once, split, choose `train_size` and `val_size` of the examples."""
        config = self.config
        paths = {part: self._paths(folder) for part, folder in self.folders.items()}
        examples = self._read([path for listed in paths.values() for path in listed])
        if config.label is not None:
            labels = [example.label for example in examples.values()]
            self.classes = classes_of(labels, f"--data.root {str(self.root)!r}: column {config.label}")
        part_of = {path: part for part, listed in paths.items() for path in listed}
        parts: dict[str, list[Sample]] = {part: [] for part in paths}
        for name, example in examples.items():
            parts[part_of[example.path]].append((name, self.classes.index(example.label)))
        if config.example is None:
            samples = split_parts(parts, self.classes, config.split_seed, "sets of points")
        else:
            self.group_of = {name: example.group for name, example in examples.items()}
            grouped = {name: (label, self.group_of[name], part) for part in parts for name, label in parts[part]}
            samples = split_by_group(grouped, config.split_seed, config.example)
            require_each(samples[0], self.classes, 1, "sets of points", " to train on")
            require_each(samples[1], self.classes, 1, "sets of points", " to validate on")
        selected = self.select({name: example.cloud for name, example in examples.items()}, *samples)
        shown = [*selected[0], *selected[2]]
        features = f"{', '.join(self.features)} at each" if self.features else "no features"
        of_class = "the sub-folder" if config.label is None else f"column {config.label}"
        self.description = (
            f"{len(shown):,} sets of points from the folder {self.root.name}, {point_counts(shown)} along "
            f"{', '.join(self.axes)} with {features}; the class is {of_class}."
        )
        return selected

    def groups(self, train: CloudSet, val: CloudSet) -> list[str] | None:
        """Return the value of every example in the column `example`, which files may share; None without it."""
        if self.config.example is None:
            return None
        return [self.group_of[name] for part in (train, val) for name, _ in part.samples]

    def _paths(self, folder: Path) -> list[str]:
        if self.config.label is not None:
            return files_below(folder, self.root, EXTENSIONS)
        return sorted(path for name in self.classes for path in files_below(folder / name, self.root, EXTENSIONS))

    def _read(self, paths: Sequence[str]) -> dict[str, Example]:
        """Return the examples by name; files and examples that cannot be used are added to `skipped`."""
        config = self.config
        self.unread = warn_unread(self.root, paths, KIND)
        text = [name for name in (config.label, config.example) if name is not None]
        needed = None if config.features is None else {*config.features, *(config.axes or (*TIMES, *SPACE))}
        tables: dict[str, Columns] = {}

        def read(path: str) -> None:
            tables[path] = read_table(self.root / path, text, needed)

        faults = find_faults(paths, read)
        readable = [path for path in paths if path in tables]
        if readable:
            self.axes, self.features = self._columns(tables[readable[0]], readable[0])
        examples: dict[str, Example] = {}
        for path in readable:
            table = tables.pop(path)
            try:
                groups = self._groups(path, table)
            except ValueError as error:
                faults.append((path, reason(error)))
                continue
            for name, rows in groups.items():
                try:
                    group = "" if config.example is None else str(table[config.example][rows[0]])
                    examples[name] = self._example(path, table, rows)._replace(group=group)
                except ValueError as error:
                    faults.append((name, reason(error)))
        self.skipped = sorted(faults)
        warn_skipped(self.skipped, len(examples) + len(faults), config.max_skipped, "sets of points")
        return examples

    def _columns(self, table: Columns, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the position columns and of the feature columns."""
        config = self.config
        known = {name.lower(): name for name in table}
        time = next((known[name] for name in TIMES if name in known), None)
        axes = tuple(config.axes or [*filter(None, [time]), *(known[name] for name in SPACE if name in known)])
        if not axes:
            rule = f"--data.axes must name the columns of positions where none is called {', '.join((*TIMES, *SPACE))}"
            raise Mistake(f"{rule}, got {', '.join(table)} in {path}")
        others = [name for name in table if name not in (*axes, config.label, config.example)]
        return axes, tuple(others if config.features is None else config.features)

    def _groups(self, path: str, table: Columns) -> dict[str, np.ndarray]:
        """Return the rows of every example by name: all of them, or those with one value in the column `example`."""
        config = self.config
        check_columns((*self.axes, *self.features), table)
        count = len(table[self.axes[0]])
        if not count:
            raise Mistake("a table must have 1 row or more, got 0")
        for name in filter(None, [config.label, config.example]):
            if len(table[name]) == 1:  # one value in a .npz file
                table[name] = table[name].repeat(count)
            elif len(table[name]) != count:
                raise Mistake(f"column {name} must have a value for each of {count} points, got {len(table[name])}")
        if config.example is None:
            return {path: np.arange(count)}
        names, example = np.unique(table[config.example], return_inverse=True)
        if not all(names):
            raise Mistake(f"column {config.example} must name the example of every row, got an empty cell")
        groups = np.split(example.argsort(kind="stable"), np.bincount(example).cumsum()[:-1])
        return {f"{path}, {config.example} {name}": group for name, group in zip(names, groups, strict=True)}

    def _example(self, path: str, table: Columns, rows: np.ndarray) -> Example:
        positions, features = (
            np.stack([table[name][rows] for name in names], axis=1) if names else np.empty((len(rows), 0))
            for names in (self.axes, self.features)
        )
        cloud = Cloud.of(torch.from_numpy(positions), torch.from_numpy(features))
        name = self.config.label
        if name is None:  # the class folder, below train and val
            return Example(cloud, path, Path(path).parts[len(self.folders) - 1])
        values = np.unique(table[name][rows]).tolist()
        if len(values) != 1 or not values[0]:
            of = "a file" if self.config.example is None else "an example"
            raise Mistake(f"column {name} must have one value in {of}, got {', '.join(values[:3]) or 'none'}")
        return Example(cloud, path, values[0])
