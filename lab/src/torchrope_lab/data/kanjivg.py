"""Reading of KanjiVG's characters as strokes and components, and drawing them at any size.

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
from torchrope_lab.data.cache import cache_folder
from torchrope_lab.data.faults import check_regular

PACKAGE = "kanjivg"
CANVAS = 109
"""Width and height of a character, in the units of its strokes."""
ATTRIBUTION = "KanjiVG (kanjivg.tagaini.net), © Ulrich Apel, CC BY-SA 3.0"
IDEOGRAPHS = range(0x3400, 0x40000)
"""Code points of kanji; lower ones are letters, syllables and signs."""
_GROUP, _PATH = "{http://www.w3.org/2000/svg}g", "{http://www.w3.org/2000/svg}path"
_KVG = "{http://kanjivg.tagaini.net}"


@dataclass(frozen=True)
class Component:
    """A part of a character.

    Attributes:
        element: The character that the component looks like, "" if none.
        position: Position in the enclosing component, as "left", "top" or "kamae" (enclosing), "" if not given.
        radical: The dictionaries for which it is the radical: "general", "tradit", "nelson", "jis", or "".
        part: "1", "2", ... for the pieces of a component that is interrupted by strokes of others, else "".
        number: Distinguishes several such components with the same `element`.
        strokes: Index of its first stroke, and of its last one plus 1.
        parts: Its sub-components.
    """

    element: str
    position: str
    radical: str
    part: str
    number: str
    strokes: tuple[int, int]
    parts: tuple["Component", ...]

    def walk(self) -> Iterator["Component"]:
        """Iterate over this component and its descendants in pre-order."""
        yield self
        for part in self.parts:
            yield from part.walk()


@dataclass(frozen=True)
class Character:
    """A character, or a variant of it.

    Attributes:
        name: Name of its file, without ".svg".
        code: Code point, the same for all variants.
        strokes: SVG paths on a canvas of `CANVAS` x `CANVAS`, in writing order.
        root: Its component tree.
    """

    name: str
    code: int
    strokes: tuple[str, ...]
    root: Component


def find_folder(root: str | None) -> Path:
    """Return the folder of the SVG files: `root`, or that of the installed package.

    Raises:
        ValueError: the package is not installed, or the folder holds no characters.
    """
    if root is None:
        try:
            folder = Path(str(distribution(PACKAGE).locate_file("kanji")))
        except PackageNotFoundError:
            raise ValueError(
                "kanji requires the package kanjivg (pip install kanjivg) or KanjiVG's SVG files in "
                "--data.root, got neither"
            ) from None
    else:
        folder = Path(root).expanduser()
    if not any(folder.glob("?????.svg")):
        raise ValueError(f"--data.root must hold KanjiVG's files, such as 04e00.svg, found 0 in {str(folder)!r}")
    return folder


def read_characters(folder: Path, *, variants: bool = False) -> list[Character]:
    """Read all characters of a folder, in the order of their code points.

    Args:
        folder: Holds files such as 04e00.svg, and 04e00-Kaisho.svg for a variant of it.
        variants: Whether variants are read too.

    Raises:
        ValueError: a file is not in KanjiVG's format.
    """
    paths = sorted(folder.glob("*.svg" if variants else "?????.svg"))
    return [read_character(path) for path in paths if int(path.name[:5], 16) in IDEOGRAPHS]


def read_character(path: Path) -> Character:
    """Read a character from its SVG file.

    Raises:
        ValueError: the file is not in KanjiVG's format.
    """
    try:
        check_regular(path)
        image = ElementTree.parse(path).getroot()
        drawing = next(group for group in image if group.get("id", "").startswith("kvg:StrokePaths"))
        strokes: list[str] = []
        root = _read_component(drawing[0], strokes)
        return Character(path.stem, int(path.name[:5], 16), tuple(strokes), root)
    except (ElementTree.ParseError, StopIteration, IndexError, KeyError, ValueError, OSError) as error:
        raise ValueError(f"a character must be an SVG file of KanjiVG, got {path}: {error!r}") from None


def draw(strokes: Sequence[str], size: int, stroke_width: float) -> Tensor:
    """Draw strokes, white on black, with anti-aliasing.

    Args:
        strokes: SVG paths on a canvas of `CANVAS` x `CANVAS`.
        size: Pixels per side of the image.
        stroke_width: In units of the canvas, independent of `size`.

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
    with Image.open(io.BytesIO(svg_to_png(svg))) as image:
        return torch.from_numpy(np.array(image.getchannel("A")))


def draw_all(drawings: Sequence[Sequence[str]], size: int, stroke_width: float) -> Tensor:
    """Draw several images, or read them from the cache if they were drawn before.

    Returns:
        uint8 `(len(drawings), size, size)`.
    """
    key = hashlib.sha256(repr((distribution("vl-convert-python").version, stroke_width, drawings)).encode())
    file = cache_folder() / "kanji" / f"{key.hexdigest()[:24]}-{size}.npz"
    if (cached := _read_cache(file, (len(drawings), size, size))) is not None:
        return cached
    with ThreadPoolExecutor() as threads:
        images = torch.stack(list(threads.map(partial(draw, size=size, stroke_width=stroke_width), drawings)))
    content = io.BytesIO()
    np.savez_compressed(content, pictures=images.numpy())
    write_whole(file, content.getvalue())
    return images


def _read_cache(file: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return the cached images; None if they are missing or unreadable."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            images = torch.from_numpy(stored["pictures"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error):
        return None
    return images if images.shape == shape and images.dtype == torch.uint8 else None


def _read_component(group: ElementTree.Element, strokes: list[str]) -> Component:
    """Read a group of strokes as a component, and append the stroke paths to `strokes`."""
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
