"""Characters of KanjiVG as three data sources of one's own: images by radical or by layout, and points along strokes.

    pip install kanjivg
    torchrope compare --data examples/sources.py:radicals --model.patch_size 4 --optim.epochs 12
    torchrope compare --data examples/sources.py:layouts --data.size 64 --model.patch_size 8
    torchrope compare --data examples/sources.py:strokes --data.size 48

`--data FILE.py:FUNCTION` calls a function and trains on what it returns; its parameters are settings, as `--data.size`.

| source     | an example                                              | class                            |
|------------|---------------------------------------------------------|----------------------------------|
| `radicals` | image, float32 `(1, size, size)`, white on black        | the radical, 28 classes          |
| `layouts`  | the same                                                | arrangement of parts, 6 classes  |
| `strokes`  | points (t, x, y), with the pen's direction as features  | the radical, 28 classes          |

Settings are `--data.size` (of `strokes`: the largest number of points), `stroke_width` or `spacing`, `train_size` and
`val_size`. One in five characters is held out with `split_seed`.

KanjiVG (kanjivg.tagaini.net): copyright Ulrich Apel, Creative Commons Attribution-Share Alike 3.0.
"""

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor
from torch.utils.data import TensorDataset
from vl_convert import svg_to_png

CANVAS = 109
"""Width and height of a character, in the units of its strokes."""
IDEOGRAPHS = range(0x3400, 0x40000)
"""Code points of kanji; lower ones are letters, syllables and signs."""
MIN_CHARACTERS = 60
"""Characters of a class at least."""
PARTS = 5
"""One in this many characters is held out."""
MEAN, STD = 0.16, 0.3
"""Of the pixels of `radicals` at the default size, for all sizes: a model can be evaluated at another one."""
STEPS = 16
"""Segments of a curve, to measure its length."""
LAYOUTS = {
    "left-right": ("left", "right"),
    "top-bottom": ("top", "bottom"),
    "from upper left": ("tare", "tarec"),
    "from lower left": ("nyo", "nyoc"),
    "enclosed": ("kamae", "kamaec"),
}
"""KanjiVG's position names of each arrangement of parts."""
SINGLE = "single"
GROUP, PATH = "{http://www.w3.org/2000/svg}g", "{http://www.w3.org/2000/svg}path"
KVG = "{http://kanjivg.tagaini.net}"
COMMAND = re.compile(r"([A-DF-Za-df-z])([^A-DF-Za-df-z]*)")  # e is an exponent
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

Character = ElementTree.Element
"""The group of all strokes of a character, with a group for each part of it."""


# ---- the sources


def radicals(size: int = 32, stroke_width: float = 4.0, split_seed: int = 0) -> dict[str, Any]:
    """Images of 3,763 characters by the written form of their radical, such as 氵 or 水.

    Args:
        size: Pixels per side at which characters are rendered.
        stroke_width: Width of a stroke; a character is 109 wide at every size.
        split_seed: Seed of the split into training and validation characters.
    """
    return _images(radical_of, "radicals", size, stroke_width, split_seed)


def layouts(size: int = 32, stroke_width: float = 4.0, split_seed: int = 0) -> dict[str, Any]:
    """Images of 6,432 characters by the arrangement of their parts; 60.4 % are "left-right".

    Args:
        size: Pixels per side at which characters are rendered.
        stroke_width: Width of a stroke; a character is 109 wide at every size.
        split_seed: Seed of the split into training and validation characters.
    """
    return _images(layout_of, "layouts", size, stroke_width, split_seed)


def strokes(spacing: float = 16.0, split_seed: int = 0) -> dict[str, Any]:
    """The characters of `radicals` as points along their strokes, in the order in which they are written.

    A position is (t, x, y): x to the right and y down, in units of which a character is 109 wide and high, and t the
    length of the pen's path, also between strokes; each is relative to its minimum in the character. The features of a
    point are the pen's direction (vx, vy), of length 1.

    Args:
        spacing: Distance between points along a stroke; each stroke has points at both ends.
        split_seed: Seed of the split into training and validation characters.
    """
    characters, labels, classes = characters_by(radical_of)

    def part(indices: Tensor) -> list[tuple[Tensor, Tensor, int]]:
        clouds = [points_along(strokes_of(characters[index]), spacing) for index in indices.tolist()]
        return [
            (torch.from_numpy(directions), torch.from_numpy(places - places.min(0)), label)
            for (places, directions), label in zip(clouds, labels[indices].tolist(), strict=True)
        ]

    train, val = map(part, split(labels, split_seed))
    return {
        "train": train,
        "val": val,
        "classes": classes,
        "axes": ("t", "x", "y"),
        "features": ("vx", "vy"),
        "title": "Strokes of kanji, radicals",
        "description": f"{len(labels):,} characters of KanjiVG as points along their strokes, {spacing:g} of {CANVAS} "
        f"units apart; the class is the radical, one of {len(classes)}.",
    }


strokes.lattice = False  # type: ignore[attr-defined]


def _images(class_of: Callable[[Character], str], what: str, size: int, width: float, seed: int) -> dict[str, Any]:
    characters, labels, classes = characters_by(class_of)
    with ThreadPoolExecutor() as threads:
        drawn = threads.map(partial(draw, size=size, stroke_width=width), map(strokes_of, characters))
        images = (torch.stack(list(drawn))[:, None].float() / 255 - MEAN) / STD
    train, val = (TensorDataset(images[part], labels[part]) for part in split(labels, seed))
    return {
        "train": train,
        "val": val,
        "classes": classes,
        "title": f"Kanji, {what}",
        "description": f"{len(labels):,} characters of KanjiVG drawn from their strokes at {size}×{size} grey pixels; "
        f"classes are {what}, {len(classes)} of them.",
    }


# ---- characters and their classes


@cache
def read_characters() -> dict[int, Character]:
    """Read all characters of the package kanjivg, without variants, by code point.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        folder = Path(str(distribution("kanjivg").locate_file("kanji")))
    except PackageNotFoundError:
        raise ValueError("kanji require the package kanjivg (pip install kanjivg), which is not installed") from None
    paths = {int(path.stem, 16): path for path in sorted(folder.glob("?????.svg"))}
    return {code: read_character(path) for code, path in paths.items() if code in IDEOGRAPHS}


def read_character(path: Path) -> Character:
    """Read the group of all strokes of a character from its SVG file."""
    image = ElementTree.parse(path).getroot()
    return next(group for group in image if group.get("id", "").startswith("kvg:StrokePaths"))[0]


def characters_by(class_of: Callable[[Character], str]) -> tuple[list[Character], Tensor, tuple[str, ...]]:
    """Return the characters of classes with at least `MIN_CHARACTERS`, their labels, and the names of the classes."""
    named = [(character, class_of(character)) for character in read_characters().values()]
    counts = Counter(name for _, name in named)
    classes = sorted(name for name, count in counts.items() if name and count >= MIN_CHARACTERS)
    chosen = [(character, classes.index(name)) for character, name in named if name in classes]
    return [character for character, _ in chosen], torch.tensor([label for _, label in chosen]), tuple(classes)


def split(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Hold out one in `PARTS` characters of each class; return the indices of training and of validation characters."""
    everyone = range(len(labels))
    folds = StratifiedGroupKFold(PARTS, shuffle=True, random_state=seed).split(everyone, labels.numpy(), everyone)
    train, val = next(folds)
    return torch.from_numpy(train), torch.from_numpy(val)


def radical_of(character: Character) -> str:
    """Return the written form of the radical, "general" before "tradit"; "" if none is given."""
    found: dict[str, str] = {}
    for part in character.iter(GROUP):
        if element := part.get(f"{KVG}element"):
            found.setdefault(part.get(f"{KVG}radical", ""), element)
    return found.get("general") or found.get("tradit", "")


def layout_of(character: Character) -> str:
    """Return the arrangement of the outermost parts, a key of `LAYOUTS` or `SINGLE`."""
    positions = {part.get(f"{KVG}position") for part in character.findall(GROUP)}
    return next((name for name, names in LAYOUTS.items() if positions & {*names}), SINGLE)


def strokes_of(character: Character) -> tuple[str, ...]:
    """Return the SVG paths of all strokes in writing order."""
    return tuple(path.attrib["d"] for path in character.iter(PATH))


def draw(paths: Sequence[str], size: int, stroke_width: float) -> Tensor:
    """Draw strokes, white on black, with anti-aliasing: uint8 `(size, size)`."""
    drawn = "".join(f'<path d="{path}"/>' for path in paths)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" viewBox="0 0 {CANVAS} {CANVAS}">'
        f'<g fill="none" stroke="#fff" stroke-width="{stroke_width}" stroke-linecap="round" stroke-linejoin="round">'
        f"{drawn}</g></svg>"
    )
    with Image.open(io.BytesIO(svg_to_png(svg))) as image:
        return torch.from_numpy(np.array(image.getchannel("A")))


# ---- points along strokes


def points_along(strokes: Sequence[str], spacing: float) -> tuple[np.ndarray, np.ndarray]:
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
    for command, text in COMMAND.findall(path):
        numbers = [float(number) for number in NUMBER.findall(text)]
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
