"""Characters of KanjiVG as strokes and components, and images of them at any size.

Source: KanjiVG (kanjivg.tagaini.net), copyright Ulrich Apel, under Creative Commons Attribution-Share Alike 3.0.
"""

import hashlib
import io
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from xml.etree import ElementTree
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchrope.files import write_whole
from torchrope.lab.data.cache import cache_folder

PACKAGE = "kanjivg"
CANVAS = 109
"""Width and height of a character, in the units of its strokes."""
ATTRIBUTION = "KanjiVG (kanjivg.tagaini.net), © Ulrich Apel, CC BY-SA 3.0"
IDEOGRAPHS = range(0x3400, 0x40000)
"""Code points of characters; below them are letters, syllables and signs."""
_GROUP, _PATH = "{http://www.w3.org/2000/svg}g", "{http://www.w3.org/2000/svg}path"
_KVG = "{http://kanjivg.tagaini.net}"


@dataclass(frozen=True)
class Component:
    """A part of a character.

    Attributes:
        element: What it looks like, a character, "" where none does.
        position: Where it is in the part around it, as "left", "top" or "kamae" (enclosing), "" if not given.
        radical: Which dictionaries call it the radical: "general", "tradit", "nelson", "jis", or "".
        part: "1", "2", ... where strokes of others are written in between and it comes in several pieces, else "".
        number: Tells two such components of one `element` apart.
        strokes: First of its strokes, and one behind the last.
        parts: Its own components.
    """

    element: str
    position: str
    radical: str
    part: str
    number: str
    strokes: tuple[int, int]
    parts: tuple["Component", ...]

    def walk(self) -> Iterator["Component"]:
        """This component and all within it, each before its own parts."""
        yield self
        for part in self.parts:
            yield from part.walk()


@dataclass(frozen=True)
class Character:
    """A character, or another way to write it.

    Attributes:
        name: Name of its file, without ".svg".
        code: Code point, the same for all ways to write it.
        strokes: SVG paths on a canvas of `CANVAS` x `CANVAS`, in the order in which they are written.
        root: Its components.
    """

    name: str
    code: int
    strokes: tuple[str, ...]
    root: Component


def find_folder(root: str | None) -> Path:
    """Find the folder of the characters' files: `root`, or that of the installed package.

    Raises:
        ValueError: the package is not installed, or the folder holds no characters.
    """
    if root is None:
        try:
            folder = Path(str(distribution(PACKAGE).locate_file("kanji")))
        except PackageNotFoundError:
            raise ValueError(
                "kanji is drawn from the package kanjivg (pip install 'torchrope[kanji]'), got a machine without it; "
                "or --data.root names the folder of KanjiVG's SVG files"
            ) from None
    else:
        folder = Path(root).expanduser()
    if not any(folder.glob("?????.svg")):
        raise ValueError(f"--data.root must hold KanjiVG's files, as 04e00.svg, got {str(folder)!r} without")
    return folder


def read_characters(folder: Path, *, variants: bool = False) -> list[Character]:
    """Read all characters of a folder, in the order of their code points.

    Args:
        folder: Holds files such as 04e00.svg, and 04e00-Kaisho.svg for a variant of it.
        variants: Read other ways to write a character too.

    Raises:
        ValueError: a file is not as KanjiVG's are.
    """
    paths = sorted(folder.glob("*.svg" if variants else "?????.svg"))
    return [read_character(path) for path in paths if int(path.name[:5], 16) in IDEOGRAPHS]


def read_character(path: Path) -> Character:
    """Read a character from its SVG file.

    Raises:
        ValueError: the file is not as KanjiVG's are.
    """
    try:
        image = ElementTree.parse(path).getroot()
        drawing = next(group for group in image if group.get("id", "").startswith("kvg:StrokePaths"))
        strokes: list[str] = []
        root = _read_component(drawing[0], strokes)
        return Character(path.stem, int(path.name[:5], 16), tuple(strokes), root)
    except (ElementTree.ParseError, StopIteration, IndexError, KeyError, ValueError, OSError) as error:
        raise ValueError(f"a character must be an SVG file of KanjiVG, got {path}: {error!r}") from None


def draw(strokes: Sequence[str], size: int, stroke_width: float) -> Tensor:
    """Draw strokes in white on black, anti-aliased.

    Args:
        strokes: SVG paths on a canvas of `CANVAS` x `CANVAS`.
        size: Pixels per side of the image.
        stroke_width: In units of the canvas, at every size.

    Returns:
        uint8 `(size, size)`.
    """
    from vl_convert import svg_to_png

    paths = "".join(f'<path d="{stroke}"/>' for stroke in strokes)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" viewBox="0 0 {CANVAS} {CANVAS}">'
        f'<g fill="none" stroke="#fff" stroke-width="{stroke_width}" stroke-linecap="round" stroke-linejoin="round">'
        f"{paths}</g></svg>"
    )
    with Image.open(io.BytesIO(svg_to_png(svg))) as picture:
        return torch.from_numpy(np.array(picture.getchannel("A")))


def draw_all(drawings: Sequence[Sequence[str]], size: int, stroke_width: float) -> Tensor:
    """Draw each of several images, or read them from the cache where they have been drawn before.

    Returns:
        uint8 `(len(drawings), size, size)`.
    """
    key = hashlib.sha256(repr((distribution("vl-convert-python").version, stroke_width, drawings)).encode())
    file = cache_folder() / "kanji" / f"{key.hexdigest()[:24]}-{size}.npz"
    if (cached := _read_cache(file, (len(drawings), size, size))) is not None:
        return cached
    with ThreadPoolExecutor() as threads:
        pictures = torch.stack(list(threads.map(partial(draw, size=size, stroke_width=stroke_width), drawings)))
    content = io.BytesIO()
    np.savez_compressed(content, pictures=pictures.numpy())
    write_whole(file, content.getvalue())
    return pictures


def _read_cache(file: Path, shape: tuple[int, ...]) -> Tensor | None:
    """What was drawn before; None where there is nothing, or nothing that can be read."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            pictures = torch.from_numpy(stored["pictures"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error):
        return None
    return pictures if pictures.shape == shape and pictures.dtype == torch.uint8 else None


def _read_component(group: ElementTree.Element, strokes: list[str]) -> Component:
    """Read a group of strokes, whose paths go to `strokes`."""
    first, parts = len(strokes), []
    for child in group:
        if child.tag == _PATH:
            strokes.append(child.attrib["d"])
        elif child.tag == _GROUP:
            parts.append(_read_component(child, strokes))
    return Component(
        element=group.get(f"{_KVG}element", ""),
        position=group.get(f"{_KVG}position", ""),
        radical=group.get(f"{_KVG}radical", ""),
        part=group.get(f"{_KVG}part", ""),
        number=group.get(f"{_KVG}number", ""),
        strokes=(first, len(strokes)),
        parts=tuple(parts),
    )
