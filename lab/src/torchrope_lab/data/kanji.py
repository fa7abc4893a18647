"""Image classification of KanjiVG characters, drawn from their strokes at any size."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor
from torch.utils.data import Dataset

from torchrope_lab.data.config import KanjiConfig
from torchrope_lab.data.crops import CropTransform, random_crop
from torchrope_lab.data.in_memory import InMemory
from torchrope_lab.data.kanjivg import ATTRIBUTION, Character, draw_all, find_folder, read_characters
from torchrope_lab.data.tensors import InMemorySet, Normalise, TensorSet, balanced_subset, split_for_tuning

MIN_CHARACTERS = 60
"""Minimum number of characters per class."""
PARTS = 5
"""One in this many characters is held out."""
CROP_FACTOR = 2
"""Random crops are taken from images rendered at this multiple of the size."""
LAYOUTS = {
    "left-right": ("left", "right"),
    "top-bottom": ("top", "bottom"),
    "from upper left": ("tare", "tarec"),
    "from lower left": ("nyo", "nyoc"),
    "enclosed": ("kamae", "kamaec"),
}
"""KanjiVG's position names of each arrangement of components."""
SINGLE = "single"
TITLES = {"radical": "radicals", "layout": "layouts", "strokes": "numbers of strokes"}
QUESTIONS = {"radical": "its radical", "layout": "how its components are arranged", "strokes": "its number of strokes"}


class Kanji(InMemory):
    """Characters of KanjiVG, white on black in one grey channel, drawn from their strokes at `size` pixels per side.

    Depending on `task`, the class is the written form of the radical (氵 and 水 are different), the arrangement of the
    components (`LAYOUTS`, or `SINGLE` if no position is given), or the number of strokes. Classes with fewer than 60
    characters are left out. A fifth of each class is held out with `split_seed`; all variants of a character are in the
    same part.

    Source: KanjiVG, by Ulrich Apel, CC BY-SA 3.0.

    Raises:
        ValueError: KanjiVG's files are missing.
    """

    name = "kanji"
    other_sizes = "drawn"

    config: KanjiConfig

    def __init__(self, config: KanjiConfig) -> None:
        super().__init__(config)
        self.title = f"Kanji, {TITLES[config.task]}"
        self.characters, labels, self.classes = task_characters(config.root, config.variants, config.task)
        self.labels = torch.tensor(labels)
        self.description = (
            f"{len(labels):,} characters drawn from their strokes at {config.size}×{config.size} grey pixels; the "
            f"class is {QUESTIONS[config.task]}, one of {len(self.classes)}. Source: {ATTRIBUTION}."
        )

    @property
    def slug(self) -> str:
        """Name of the data set and the task, as in `kanji-radical`."""
        return f"{self.name}-{self.config.task}"

    def examples(self, size: int, *parts: str) -> list[tuple[Tensor, Tensor]]:
        """Draw the characters of each part."""
        drawn = []
        for chosen in (self._split[part == "val"] for part in parts):
            drawings = [self.characters[index].strokes for index in chosen.tolist()]
            images = draw_all(drawings, size, self.config.stroke_width)[:, None]  # [n, 1, size, size]
            drawn.append((images, self.labels[chosen]))
        return drawn

    def datasets(self) -> tuple[Dataset, TensorSet]:
        """Draw the characters; with random crops, training characters are drawn larger and cropped."""
        train, val = super().datasets()
        return (self._cropped(self.config.size, val.normalise) if self.config.augment.crops else train), val

    def tuned(self, train: InMemorySet, val: Dataset) -> tuple[Dataset, Dataset]:
        """Return both sets unchanged: `_split` has applied `tuning` already."""
        return train, val

    def groups(self, train: Any, val: Any) -> list[int]:
        """Return the code point of every character, the same for its variants."""
        return [self.characters[index].code for index in torch.cat(self._split).tolist()]

    def train_at(self, size: tuple[int, ...]) -> InMemorySet:
        """Draw the training characters at another size, with the normalisation of this size."""
        (side,) = set(size)
        normalise = self._made_datasets()[1].normalise  # type: ignore[attr-defined]
        if self.config.augment.crops:
            return self._cropped(side, normalise)
        (train,) = self.examples(side, "train")
        return TensorSet(*train, normalise)

    def _cropped(self, size: int, normalise: Normalise | None) -> "CroppedSet":
        """Draw the training characters at `CROP_FACTOR` times a size, for random crops of this size."""
        (train,) = self.examples(CROP_FACTOR * size, "train")
        return CroppedSet(*train, random_crop(self.config.augment, size), normalise)

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        """Indices of the training and validation characters."""
        config = self.config
        train, val = split_by_character(self.characters, self.labels.tolist(), config.split_seed)
        train = train[balanced_subset(self.labels[train], config.train_size, config.split_seed, "train_size")]
        if config.tuning:
            codes = [self.characters[index].code for index in train.tolist()]
            first, second = split_for_tuning(self.labels[train], config.split_seed, codes)
            return train[first], train[second]
        return train, val[balanced_subset(self.labels[val], config.val_size, config.split_seed, "val_size")]


class CroppedSet(InMemorySet):
    """Images in memory, cropped at random on each access.

    Args:
        inputs: uint8 `(examples, 1, height, width)`.
        labels: int64 `(examples,)`.
        view: Crop of the images.
        normalise: Converts bytes to float32; None keeps bytes.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, view: CropTransform, normalise: Normalise | None) -> None:
        self.inputs = inputs
        self.labels = labels
        self.view = view
        self.normalise = normalise

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.view.transform(self.inputs[index])
        return image if self.normalise is None else self.normalise(image), int(self.labels[index])


def task_characters(root: str | None, variants: bool, task: str) -> tuple[list[Character], list[int], tuple[str, ...]]:
    """Select the characters of a task's classes.

    Returns:
        The characters, their labels, and the names of the classes, each with at least `MIN_CHARACTERS` characters.
    """
    class_of = {"radical": radical_of, "layout": layout_of, "strokes": strokes_of}[task]
    named = [(character, class_of(character)) for character in characters(root, variants)]
    counts = Counter({character.code: name for character, name in named}.values())
    classes = sorted((name for name, count in counts.items() if name and count >= MIN_CHARACTERS), key=_sort_key)
    chosen = [(character, classes.index(name)) for character, name in named if name in classes]
    return [character for character, _ in chosen], [label for _, label in chosen], tuple(classes)


@lru_cache(maxsize=4)  # a second of computation
def _split(codes: tuple[int, ...], labels: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    folds = StratifiedGroupKFold(PARTS, shuffle=True, random_state=seed)
    train, val = next(folds.split(codes, labels, codes))
    return torch.from_numpy(train), torch.from_numpy(val)


def split_by_character(chosen: Sequence[Character], labels: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Hold out one in `PARTS` characters of each class, with all variants of a character in the same part.

    Returns:
        Indices of the training and of the validation characters.
    """
    return _split(tuple(character.code for character in chosen), tuple(labels), seed)


def radical_of(character: Character) -> str:
    """Return the written form of the radical, "general" before "tradit"; "" if none is given."""
    radicals = {part.radical: part.element for part in reversed([*character.root.walk()]) if part.element}
    return radicals.get("general") or radicals.get("tradit", "")


def layout_of(character: Character) -> str:
    """Return the arrangement of the outermost components, a key of `LAYOUTS` or `SINGLE`."""
    positions = {part.position for part in character.root.parts}
    return next((name for name, names in LAYOUTS.items() if positions & {*names}), SINGLE)


def strokes_of(character: Character) -> str:
    """Return the number of strokes as a string."""
    return str(len(character.strokes))


def characters(root: str | None, variants: bool) -> list[Character]:
    """Return all characters of a folder, or of the installed package; cached."""
    return _read(find_folder(root), variants)


@lru_cache(maxsize=2)
def _read(folder: Path, variants: bool) -> list[Character]:
    return read_characters(folder, variants=variants)


def _sort_key(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (0, name)
