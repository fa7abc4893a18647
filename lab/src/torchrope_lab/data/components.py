"""KanjiVG characters for object detection and semantic segmentation: boxes, masks and maps of their components."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from torchrope_lab.data.config import KanjiComponentsConfig
from torchrope_lab.data.dense import DenseModule, boxes_of, compose, large_scale_jitter, select_some
from torchrope_lab.data.kanji import characters, split_by_character
from torchrope_lab.data.kanjivg import ATTRIBUTION, Character, Component, draw_all
from torchrope_lab.data.numbered import OTHER, NumberedSet
from torchrope_lab.data.tensors import Normalise, byte_statistics

MIN_CHARACTERS = 100
"""Minimum number of characters with a component for it to be a class."""
STROKES = 2
"""Minimum number of strokes of an object; single lines and dots are not objects."""
MIN_BRIGHTNESS = 64
"""Minimum brightness of a pixel that belongs to a stroke."""


class KanjiComponents(DenseModule):
    """Characters of KanjiVG, white on black in one grey channel; the objects are their components.

    Classes are the components of two strokes or more that occur in 100 characters or more, by their written form. Of
    nested components the outermost is the object; a component in several pieces is one object. A pixel of at least a
    quarter of full brightness belongs to the component that is brightest there. In semantic maps, strokes of no object
    have the class "other strokes". Characters without an object are left out. A fifth of the characters is held out
    with `split_seed`; all variants of a character are in the same part.

    Source: KanjiVG, by Ulrich Apel, CC BY-SA 3.0.

    Raises:
        ValueError: KanjiVG's files are missing.
    """

    name = "kanji-components"
    title = "Components of kanji"
    in_channels = 1
    tasks = ("segment", "detect")
    other_sizes = "drawn"

    config: KanjiComponentsConfig

    def __init__(self, config: KanjiComponentsConfig) -> None:
        super().__init__(config)
        self.input_size = (config.size, config.size)
        self.classes, self.characters = characters_with_objects(config.root, config.variants)
        self.map_classes = ("background", *self.classes, "other strokes")
        self.description = (
            f"{len(self.characters):,} characters drawn from their strokes at {config.size}×{config.size} grey pixels; "
            f"the objects are components of {len(self.classes)} classes. Source: {ATTRIBUTION}."
        )

    def datasets(self) -> tuple[NumberedSet, NumberedSet]:
        """Split the characters, select `train_size` and `val_size`, and draw them with their components."""
        train, val = self._split
        train_set = self._draw(train)
        train_set.transform = compose(large_scale_jitter(self.config.augment, self.config.size))
        return train_set, self._draw(val, train_set.normalise)

    def at_size(self, size: int) -> "KanjiComponents":
        """Draw the validation characters at another size, with the normalisation of this size."""
        other = KanjiComponents(replace(self.config, size=size))
        train, _ = self._made_datasets()
        assert isinstance(train, NumberedSet)
        other._datasets = (train, other._draw(self._split[1], train.normalise))
        return other

    @cached_property
    def _split(self) -> tuple[list[Character], list[Character]]:
        """Training and validation characters."""
        config = self.config
        train, val = split_by_character(self.characters, [0] * len(self.characters), config.split_seed)
        return (
            self._select(train, config.train_size, "train_size"),
            self._select(val, config.val_size, "val_size"),
        )

    def _select(self, part: Tensor, size: int | None, name: str) -> list[Character]:
        return [self.characters[index] for index in select_some(part.tolist(), size, self.config.split_seed, name)]

    def _draw(self, characters: list[Character], normalise: Normalise | None = None) -> NumberedSet:
        """Draw characters and number their pixels; `normalise` defaults to the statistics of the images."""
        size, width = self.config.size, self.config.stroke_width
        images = draw_all([character.strokes for character in characters], size, width)[:, None]  # [n, 1, size, size]
        objects = [find_objects(character, self.classes) for character in characters]
        strokes = [
            layer
            for of_character, character in zip(objects, characters, strict=True)
            for layer in layers_of(of_character, character)
        ]
        layers = draw_all(strokes, size, width).split([len(of_character) + 1 for of_character in objects])
        numbered = [
            number_pixels(image, of_image, [label for label, _ in of_character])
            for image, of_image, of_character in zip(images[:, 0], layers, objects, strict=True)
        ]
        return NumberedSet(
            images,
            torch.stack([numbers for numbers, _ in numbered]),
            [rows for _, rows in numbered],
            [character.name for character in characters],
            normalise or Normalise(*byte_statistics(images)),
            other_class=len(self.map_classes) - 1,
        )


Objects = list[tuple[int, frozenset[int]]]
"""Class and stroke indices of each object."""


def find_objects(character: Character, classes: tuple[str, ...]) -> Objects:
    """Return the outermost components of the classes, with the pieces of a component merged."""
    pieces: dict[tuple, set[int]] = {}
    for component in outermost(character.root, frozenset(classes)):
        key = (component.element, component.number if component.part else component.strokes)
        pieces.setdefault(key, set()).update(range(*component.strokes))
    return [(classes.index(element), frozenset(strokes)) for (element, _), strokes in pieces.items()]


def outermost(component: Component, elements: frozenset[str]) -> Iterator[Component]:
    """Yield the components of `elements` that are not nested in another of them; the whole character is skipped."""
    for part in component.parts:
        if part.element in elements:
            yield part
        else:
            yield from outermost(part, elements)


def layers_of(objects: Objects, character: Character) -> list[list[str]]:
    """Return the strokes of each layer: those of no object, then those of each object."""
    of_objects = frozenset().union(*(strokes for _, strokes in objects))
    rest = {*range(len(character.strokes))} - of_objects
    layers = [rest, *(strokes for _, strokes in objects)]
    return [[character.strokes[index] for index in sorted(layer)] for layer in layers]


def number_pixels(image: Tensor, layers: Tensor, labels: list[int]) -> tuple[Tensor, Tensor]:
    """Assign every pixel of an image to its brightest layer.

    Args:
        image: uint8 `(size, size)`.
        layers: uint8 `(1 + objects, size, size)`: other strokes, then each object.
        labels: Class of each object.

    Returns:
        Numbers, uint8 `(size, size)`, and class and box of every object, int64 `(objects, 5)`; objects without a pixel
        are left out.
    """
    owner = layers.argmax(0)
    owner[image < MIN_BRIGHTNESS] = -1
    masks = owner == torch.arange(1, len(layers))[:, None, None]
    visible = masks.flatten(1).any(1)
    masks, classes = masks[visible], torch.tensor(labels)[visible]
    numbers = torch.where(owner >= 0, OTHER, 0).to(torch.uint8)
    for number, mask in enumerate(masks, 1):
        numbers[mask] = number
    return numbers, torch.cat([classes[:, None], boxes_of(masks).long()], dim=1)


@lru_cache(maxsize=2)
def characters_with_objects(root: str | None, variants: bool) -> tuple[tuple[str, ...], list[Character]]:
    """Return the classes, and the characters that have an object."""
    everything = characters(root, variants)
    counts = Counter(element for character in everything for element in _elements_within(character))
    classes = tuple(sorted(element for element, count in counts.items() if count >= MIN_CHARACTERS))
    return classes, [character for character in everything if find_objects(character, classes)]


def _elements_within(character: Character) -> set[str]:
    components = (component for part in character.root.parts for component in part.walk())
    return {part.element for part in components if part.element and part.strokes[1] - part.strokes[0] >= STROKES}
