"""Characters drawn from their strokes, with boxes, masks and a map of their components."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from torchrope.lab.data.config import KanjiComponentsConfig
from torchrope.lab.data.dense import DenseModule, boxes_of, compose, large_scale_jitter, select_some
from torchrope.lab.data.kanji import characters, split_by_character
from torchrope.lab.data.kanjivg import ATTRIBUTION, Character, Component, draw_all
from torchrope.lab.data.numbered import OTHER, NumberedSet
from torchrope.lab.data.tensors import Normalise, byte_statistics

FEWEST = 100
"""Characters that a component must be in to be a class."""
STROKES = 2
"""That a component must have: a single line or dot is no object."""
INK = 64
"""Brightness from which a pixel belongs to what is drawn there."""


class KanjiComponents(DenseModule):
    """Characters of KanjiVG in white on black, one grey channel, with the components that are to be found in them.

    Classes are the components of two strokes or more that stand in 100 characters or more, as they are written. Of
    components within each other the outermost is the object. A pixel belongs to the component whose ink is strongest
    there, from a quarter of full brightness on; a component that comes in several pieces is one object. In a map,
    strokes of no object are a class of their own, "other strokes". Characters without an object are left out. A fifth
    of the characters is held out with `split_seed`; all ways to write a character are on one side.

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
            f"to find are boxes, masks and classes of {len(self.classes)} kinds of components. Source: {ATTRIBUTION}."
        )

    def datasets(self) -> tuple[NumberedSet, NumberedSet]:
        """Split, choose `train_size` and `val_size` of them, and draw them with their components."""
        train, val = self._split
        made = self._draw(train)
        made.change = compose(large_scale_jitter(self.config.augment, self.config.size))
        return made, self._draw(val, made.normalise)

    def at_size(self, size: int) -> "KanjiComponents":
        """The same characters held out, drawn at another size; they are normalised as those of this size are."""
        other = KanjiComponents(replace(self.config, size=size))
        train, _ = self._made_datasets()
        assert isinstance(train, NumberedSet)
        other._datasets = (train, other._draw(self._split[1], train.normalise))
        return other

    @cached_property
    def _split(self) -> tuple[list[Character], list[Character]]:
        """The characters that are trained on, and those held out."""
        config = self.config
        train, val = split_by_character(self.characters, [0] * len(self.characters), config.split_seed)
        return (
            self._choose(train, config.train_size, "train_size"),
            self._choose(val, config.val_size, "val_size"),
        )

    def _choose(self, part: Tensor, size: int | None, name: str) -> list[Character]:
        return [self.characters[index] for index in select_some(part.tolist(), size, self.config.split_seed, name)]

    def _draw(self, drawn: list[Character], normalise: Normalise | None = None) -> NumberedSet:
        """Draw characters and number their pixels; without `normalise` by mean and deviation of the pictures."""
        size, width = self.config.size, self.config.stroke_width
        pictures = draw_all([character.strokes for character in drawn], size, width)[:, None]  # [n, 1, size, size]
        found = [find_objects(character, self.classes) for character in drawn]
        layers = [layer for each, character in zip(found, drawn, strict=True) for layer in layers_of(each, character)]
        inks = draw_all(layers, size, width).split([len(each) + 1 for each in found])
        numbered = [
            number_pixels(picture, ink, [label for label, _ in each])
            for picture, ink, each in zip(pictures[:, 0], inks, found, strict=True)
        ]
        return NumberedSet(
            pictures,
            torch.stack([numbers for numbers, _ in numbered]),
            [objects for _, objects in numbered],
            [character.name for character in drawn],
            normalise or Normalise(*byte_statistics(pictures)),
            other_class=len(self.map_classes) - 1,
        )


Found = list[tuple[int, frozenset[int]]]
"""Class and strokes of each object."""


def find_objects(character: Character, classes: tuple[str, ...]) -> Found:
    """The outermost components of some classes, those in several pieces put together."""
    pieces: dict[tuple, set[int]] = {}
    for component in outermost(character.root, frozenset(classes)):
        key = (component.element, component.number if component.part else component.strokes)
        pieces.setdefault(key, set()).update(range(*component.strokes))
    return [(classes.index(element), frozenset(strokes)) for (element, _), strokes in pieces.items()]


def outermost(component: Component, elements: frozenset[str]) -> Iterator[Component]:
    """The components of some elements that are in no other of them; the whole character does not count."""
    for part in component.parts:
        if part.element in elements:
            yield part
        else:
            yield from outermost(part, elements)


def layers_of(found: Found, character: Character) -> list[list[str]]:
    """Strokes to draw apart: those of no object, then those of each object."""
    of_objects = frozenset().union(*(strokes for _, strokes in found))
    rest = {*range(len(character.strokes))} - of_objects
    return [[character.strokes[index] for index in sorted(layer)] for layer in (rest, *(each for _, each in found))]


def number_pixels(picture: Tensor, layers: Tensor, labels: list[int]) -> tuple[Tensor, Tensor]:
    """Give every pixel of a picture to the layer with the strongest ink.

    Args:
        picture: uint8 `(size, size)`.
        layers: uint8 `(1 + objects, size, size)`: other strokes, then each object.
        labels: Class of each object.

    Returns:
        Numbers, uint8 `(size, size)`, and class and box of every object, int64 `(objects, 5)`; an object that has no
        pixel of its own is left out.
    """
    owner = layers.argmax(0)
    owner[picture < INK] = -1
    masks = owner == torch.arange(1, len(layers))[:, None, None]
    seen = masks.flatten(1).any(1)
    masks, kept = masks[seen], torch.tensor(labels)[seen]
    numbers = torch.where(owner >= 0, OTHER, 0).to(torch.uint8)
    for number, mask in enumerate(masks, 1):
        numbers[mask] = number
    return numbers, torch.cat([kept[:, None], boxes_of(masks).long()], dim=1)


@lru_cache(maxsize=2)
def characters_with_objects(root: str | None, variants: bool) -> tuple[tuple[str, ...], list[Character]]:
    """The classes, and the characters that have an object of one."""
    everyone = characters(root, variants)
    within = Counter(element for character in everyone for element in _elements_within(character))
    classes = tuple(sorted(element for element, count in within.items() if count >= FEWEST))
    return classes, [character for character in everyone if find_objects(character, classes)]


def _elements_within(character: Character) -> set[str]:
    components = (component for part in character.root.parts for component in part.walk())
    return {each.element for each in components if each.element and each.strokes[1] - each.strokes[0] >= STROKES}
