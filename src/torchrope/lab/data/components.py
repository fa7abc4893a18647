"""Characters drawn from their strokes, with boxes, masks and a map of their components."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from torchrope.lab.data.config import KanjiComponentsConfig
from torchrope.lab.data.dense import DenseModule, boxes_of, choose_some, compose, large_scale_jitter
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
        config = self.config
        trained_on, held = split_by_character(self.characters, [0] * len(self.characters), config.split_seed)
        made = self._draw(choose_some(trained_on.tolist(), config.train_size, config.split_seed, "train_size"))
        made.normalise = Normalise(*byte_statistics(made.inputs))
        made.change = compose(large_scale_jitter(config.augment, config.size))
        held_out = self._draw(choose_some(held.tolist(), config.val_size, config.split_seed, "val_size"))
        held_out.normalise = made.normalise
        return made, held_out

    def at_size(self, size: int) -> "KanjiComponents":
        """The same characters held out, drawn at another size, for an evaluation; a single one to train on."""
        other = KanjiComponents(replace(self.config, size=size, train_size=1))
        train, val = other.datasets()
        val.normalise = self._made_datasets()[0].normalise  # type: ignore[attr-defined]
        other._datasets = (train, val)
        return other

    def _draw(self, chosen: list[int]) -> NumberedSet:
        of_each = [self.characters[index] for index in chosen]
        size, width = self.config.size, self.config.stroke_width
        pictures = draw_all([character.strokes for character in of_each], size, width)
        found = [find_objects(character, self.classes) for character in of_each]
        layers = [layer for each, character in zip(found, of_each, strict=True) for layer in layers_of(each, character)]
        drawn = iter(draw_all(layers, size, width).split([len(each) + 1 for each in found]))
        numbers, objects = zip(
            *(
                number_pixels(picture, next(drawn), [label for label, _ in each])
                for picture, each in zip(pictures, found, strict=True)
            ),
            strict=True,
        )
        names = [character.name for character in of_each]
        unknown = Normalise(torch.zeros(()), torch.ones(()))
        other = len(self.map_classes) - 1
        return NumberedSet(pictures[:, None], torch.stack(numbers), objects, names, unknown, other_class=other)


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
