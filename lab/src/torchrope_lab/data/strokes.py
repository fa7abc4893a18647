"""Characters as points along their strokes; positions are time and the location on paper."""

import re
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchrope_lab.data.config import KanjiStrokesConfig
from torchrope_lab.data.images import Sample
from torchrope_lab.data.kanji import QUESTIONS, TITLES, split_by_character, task_characters
from torchrope_lab.data.kanjivg import ATTRIBUTION, CANVAS, Character
from torchrope_lab.data.tensors import balanced_subset
from torchrope_lab.data.tokens import Cloud, TokensModule, point_counts

STEPS = 16
"""Number of segments of a curve, to measure its length."""
_COMMAND = re.compile(r"([A-DF-Za-df-z])([^A-DF-Za-df-z]*)")  # e is an exponent
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class KanjiStrokes(TokensModule):
    """Characters of KanjiVG as points along their strokes, in the order in which they are written.

    A position is (t, x, y): x to the right and y down, in units of which a character is `CANVAS` wide and high, and t
    the path length of the pen, including movements between strokes. Each coordinate is relative to its minimum in the
    character. Features are the direction of the pen, (vx, vy) of length 1. Classes and the split are those of `kanji`.

    Source: KanjiVG, by Ulrich Apel, CC BY-SA 3.0.

    Raises:
        ValueError: KanjiVG's files are missing, or a stroke is not a path of curves.
    """

    name = "kanji-strokes"
    axes = ("t", "x", "y")
    features = ("vx", "vy")

    config: KanjiStrokesConfig

    def __init__(self, config: KanjiStrokesConfig) -> None:
        super().__init__(config)
        self.title = f"Strokes of kanji, {TITLES[config.task]}"
        self.characters, self.labels, self.classes = task_characters(config.root, config.variants, config.task)
        self.description = (
            f"{len(self.labels):,} characters as points along their strokes; the class is {QUESTIONS[config.task]}, "
            f"one of {len(self.classes)}. Source: {ATTRIBUTION}."
        )

    @property
    def slug(self) -> str:
        """The name and the task."""
        return f"{self.name}-{self.config.task}"

    def clouds(self) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Split, choose `train_size` and `val_size` of them, and sample points along their strokes."""
        config, labels = self.config, torch.tensor(self.labels)
        train, val = split_by_character(self.characters, self.labels, config.split_seed)
        train = train[balanced_subset(labels[train], config.train_size, config.split_seed, "train_size")]
        val = val[balanced_subset(labels[val], config.val_size, config.split_seed, "val_size")]
        made = [[self._cloud(self.characters[index]) for index in part.tolist()] for part in (train, val)]
        named = [
            [(self.characters[index].name, self.labels[index]) for index in part.tolist()] for part in (train, val)
        ]
        self.description = (
            f"{len(train) + len(val):,} characters as {point_counts([*made[0], *made[1]])} along their strokes, "
            f"{self.config.spacing:g} of {CANVAS} units apart, in the order in which they are written; features "
            f"are the direction of the pen; the class is {QUESTIONS[config.task]}, one of {len(self.classes)}. "
            f"Source: {ATTRIBUTION}."
        )
        return made[0], named[0], made[1], named[1]

    def groups(self, train: Any, val: Any) -> list[str]:
        """Return the code point of every character, the same for its variants."""
        return [name.partition("-")[0] for part in (train, val) for name, _ in part.samples]

    def _cloud(self, character: Character) -> Cloud:
        try:
            places, directions = points_along(character.strokes, self.config.spacing)
        except ValueError as error:
            raise ValueError(f"strokes of {character.name} must be paths of curves: {error}") from None
        return Cloud.of(torch.from_numpy(places), torch.from_numpy(directions))


@lru_cache(maxsize=2**15)
def points_along(strokes: tuple[str, ...], spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """Sample points along strokes, equidistant as far as their lengths allow, including both ends of each stroke.

    Args:
        strokes: SVG paths.
        spacing: Approximate distance between points along a stroke.

    Returns:
        (t, x, y) of each, and the direction (vx, vy) there; a stroke of no length has direction (0, 0).

    Raises:
        ValueError: there are no strokes, or one is no path of curves.
    """
    controls = [curves(stroke) for stroke in strokes]
    if not controls:
        raise ValueError("a character must have 1 stroke or more, got 0")
    line = sample_cubics(
        np.array([curve for stroke in controls for curve in stroke], np.float64)
    )  # [curves, STEPS + 1, 2]
    way = np.linalg.norm(np.diff(line.reshape(-1, 2), axis=0), axis=1)  # including the movement between strokes
    time = np.concatenate([[0.0], way.cumsum()]).reshape(line.shape[:2])
    ends = np.cumsum([len(stroke) for stroke in controls])
    first, last = time[ends - [len(stroke) for stroke in controls], 0], time[ends - 1, -1]
    counts = np.maximum(np.rint((last - first) / spacing), 1).astype(int) + 1
    at = np.concatenate([np.linspace(*given) for given in zip(first, last, counts, strict=True)])
    first, last = np.repeat(first, counts), np.repeat(last, counts)

    def place(when: np.ndarray) -> np.ndarray:
        return np.stack([np.interp(when, time.ravel(), line[..., axis].ravel()) for axis in (0, 1)], axis=1)

    steps = place(np.minimum(at + spacing / 2, last)) - place(np.maximum(at - spacing / 2, first))
    norms = np.linalg.norm(steps, axis=1, keepdims=True)
    directions = np.divide(steps, norms, out=np.zeros_like(steps), where=norms > 0)
    return np.concatenate([at[:, None], place(at)], axis=1), directions


def sample_cubics(controls: np.ndarray) -> np.ndarray:
    """Sample cubic Bézier curves `(curves, 4, 2)` at STEPS + 1 parameters, `(curves, STEPS + 1, 2)`."""
    u = np.linspace(0, 1, STEPS + 1)
    weights = np.stack([(1 - u) ** 3, 3 * (1 - u) ** 2 * u, 3 * (1 - u) * u**2, u**3], axis=1)
    return weights @ controls


def curves(path: str) -> list[list[tuple[float, float]]]:
    """Return the control points of a path's cubic curves; its commands may be M, C, S, m, c and s, as in KanjiVG.

    Raises:
        ValueError: it has other commands, or numbers are missing.
    """
    cubics: list[list[tuple[float, float]]] = []
    here, control = (0.0, 0.0), None
    for command, text in _COMMAND.findall(path):
        numbers = [float(number) for number in _NUMBER.findall(text)]
        size = {"M": 2, "C": 6, "S": 4}.get(command.upper())
        if size is None or not numbers or len(numbers) % size:
            rule = "path commands must be M, C or S with complete coordinates"
            raise ValueError(f"{rule}, got {command} with {len(numbers)} numbers in {path[:40]!r}")
        for start in range(0, len(numbers), size):
            dx, dy = here if command.islower() else (0.0, 0.0)
            x, y = numbers[start : start + size : 2], numbers[start + 1 : start + size : 2]
            points = [(a + dx, b + dy) for a, b in zip(x, y, strict=True)]
            if size == 4:  # the first control point is the last one mirrored
                before = here if control is None else control
                points.insert(0, (2 * here[0] - before[0], 2 * here[1] - before[1]))
            if size > 2:
                cubics.append([here, *points])
            here, control = points[-1], points[-2] if size > 2 else None
    if not cubics:
        raise ValueError(f"a stroke needs a curve, got {path[:40]!r}")
    return cubics
