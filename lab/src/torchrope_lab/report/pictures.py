"""Draw images with boxes and segmentation maps as SVG: ground truth next to predictions, with one legend."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import escape

from torchrope_lab.report.looks import Look, numbered
from torchrope_lab.report.plots import FONT, INK, PAPER
from torchrope_lab.results import runs

SIDE, GAP, ACROSS = 256, 14, 4
LINE = 20  # of text
CHARACTER = 6.6  # mean width of one
MASK = 0.7  # opacity of maps
NAMED = 150  # smallest area of a region of a map that is labelled


def sheet(pictures: dict[str, Any], name: str) -> str:
    """Draw all rows and the legend below them, as SVG text whose ids begin with a name.

    Args:
        pictures: The dictionary of a `Pictures`.
        name: Unique on the page.
    """
    kinds = sorted(_kinds(pictures))
    across = _across(max((len(row["panels"]) for row in pictures["rows"]), default=1))
    width = across * (SIDE + GAP) - GAP
    colours = {kind: _Colour(numbered(place), place // 9, f"{name}-{place}") for place, kind in enumerate(kinds)}
    parts, y = [], 0.0
    for index, row in enumerate(pictures["rows"]):
        drawn, height = _row(row, across, f"{name}-image-{index}", colours, pictures["classes"])
        parts.append(f'<g transform="translate(0 {y:g})">{drawn}</g>')
        y += height
    legend, height = _legend([(colours[kind], pictures["classes"][kind]) for kind in kinds], width)
    parts.append(f'<g transform="translate(0 {y:g})">{legend}</g>')
    hatches = "".join(colour.hatch for colour in colours.values() if colour.round)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
        f'{y + height:g}" width="{width}" height="{y + height:g}" font-family="{escape(FONT)}" font-size="12">'
        f'<rect width="{width}" height="{y + height:g}" fill="{PAPER}"/>{f"<defs>{hatches}</defs>" if hatches else ""}'
        f"{''.join(parts)}</svg>"
    )


@dataclass(frozen=True)
class _Colour:
    """Colour of a class: after nine classes colours repeat, hatched or dashed."""

    look: Look
    round: int
    id: str

    @property
    def fill(self) -> str:
        return f'fill="url(#{self.id})"' if self.round else f'fill="{self.look.colour}" fill-opacity="{MASK}"'

    @property
    def stroke(self) -> str:
        dashes = f' stroke-dasharray="{" ".join(map(str, self.look.dash))}"' if self.round else ""
        return f'stroke="{self.look.colour}"{dashes}'

    @property
    def hatch(self) -> str:
        colour = self.look.colour
        return (
            f'<pattern id="{self.id}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({45 * self.round})"><rect width="6" height="6" fill="{colour}" '
            f'fill-opacity="0.35"/><rect width="2.5" height="6" fill="{colour}"/></pattern>'
        )


def _kinds(pictures: dict[str, Any]) -> set[int]:
    panels = [panel for row in pictures["rows"] for panel in row["panels"]]
    mapped = {kind for panel in panels for kind, _ in runs(panel["map"]) if kind is not None}
    return mapped | {box["kind"] for panel in panels for box in panel["boxes"]}


def _across(panels: int) -> int:
    """Return the number of panels per line that makes lines about equally long."""
    return math.ceil(panels / math.ceil(panels / ACROSS)) if panels else 1


def _row(
    row: dict[str, Any], across: int, image: str, colours: Mapping[int, _Colour], classes: Sequence[str]
) -> tuple[str, float]:
    scale = SIDE / max(row["width"], row["height"])
    width, height = row["width"] * scale, row["height"] * scale
    crisp = ' style="image-rendering: pixelated"' if scale > 1.5 else ""
    source = f"data:image/png;base64,{row['image']}"
    parts = [
        f'<defs><image id="{image}" width="{width:g}" height="{height:g}" preserveAspectRatio="none" '
        f'href="{escape(source)}"{crisp}/></defs>',
        _text(0, 14, row["title"], across * (SIDE + GAP), "600"),
    ]
    for index, panel in enumerate(row["panels"]):
        x, y = index % across * (SIDE + GAP), LINE + index // across * (height + LINE + GAP / 2)
        parts.append(_text(x, y + 14, panel["name"], SIDE))
        over = "".join(_map(panel["map"], row["width"], scale, colours, classes))
        over += "".join(_boxes(panel["boxes"], scale, width, colours, classes))
        parts.append(
            f'<svg x="{x:g}" y="{y + LINE:g}" width="{width:g}" height="{height:g}"><use href="#{image}"/>{over}</svg>'
        )
    lines = math.ceil(len(row["panels"]) / across)
    return "".join(parts), LINE + lines * (height + LINE + GAP / 2) + GAP


def _map(text: str, width: int, scale: float, colours: Mapping[int, _Colour], classes: Sequence[str]) -> Iterator[str]:
    """Yield one path per class, and its name on every region that is large enough."""
    bars = list(_bars(text, width))
    for kind in sorted({bar.kind for bar in bars}):
        path = "".join(
            f"M{_short(bar.x * scale)} {_short(bar.y * scale)}h{_short(bar.length * scale)}v{_short(scale)}"
            f"h-{_short(bar.length * scale)}z"
            for bar in bars
            if bar.kind == kind
        )
        yield f'<path d="{path}" {colours[kind].fill}>{_title(classes[kind])}</path>'
    for region in _regions(bars):
        if sum(bar.length for bar in region) * scale**2 >= NAMED:
            bar = region[len(region) // 2]
            x, y = (bar.x + bar.length / 2) * scale, (bar.y + 0.5) * scale + 4
            yield _over(x, y, _cut(classes[bar.kind], 12 * CHARACTER), "middle")


@dataclass(frozen=True)
class _Bar:
    """Adjacent pixels of one class in one line."""

    y: int
    x: int
    length: int
    kind: int


def _bars(text: str, width: int) -> Iterator[_Bar]:
    at = 0
    for kind, length in runs(text):
        end = at + length
        while kind is not None and at < end:
            y, x = divmod(at, width)
            yield _Bar(y, x, min(end - at, width - x), kind)
            at += min(end - at, width - x)
        at = end


def _regions(bars: Sequence[_Bar]) -> list[list[_Bar]]:
    """Group bars into connected regions of one class, each sorted from top to bottom."""
    region: dict[_Bar, list[_Bar]] = {}
    above: list[_Bar] = []
    for _, line in groupby(bars, key=lambda bar: bar.y):
        here = list(line)
        for bar in here:
            region[bar] = [bar]
            for other in above:
                touches = other.x < bar.x + bar.length and bar.x < other.x + other.length
                if touches and other.y == bar.y - 1 and other.kind == bar.kind and region[other] is not region[bar]:
                    joined = region[other] + region[bar]
                    region.update(dict.fromkeys(joined, joined))
        above = here
    unique = {id(each): each for each in region.values()}
    return [sorted(each, key=lambda bar: (bar.y, bar.x)) for each in unique.values()]


def _boxes(
    boxes: Sequence[dict[str, Any]],
    scale: float,
    width: float,
    colours: Mapping[int, _Colour],
    classes: Sequence[str],
) -> Iterator[str]:
    """Yield boxes with a white outline, and their names above them, or inside if they do not fit above."""
    names = []
    for box in boxes:
        x, y = box["left"] * scale, box["top"] * scale
        wide, high = max(0.0, box["right"] * scale - x), max(0.0, box["bottom"] * scale - y)
        frame = f'x="{_short(x)}" y="{_short(y)}" width="{_short(wide)}" height="{_short(high)}" fill="none"'
        name, score = classes[box["kind"]], box.get("score")
        tooltip = _title(name if score is None else f"{name}, {100 * score:.0f} %")
        yield f'<g><rect {frame} stroke="#fff" stroke-width="3.4" stroke-opacity="0.75"/>'
        stroke = f'{colours[box["kind"]].stroke} stroke-width="1.8"'
        yield f'<rect {frame} {stroke} pointer-events="all">{tooltip}</rect></g>'
        short = _cut(name, 12 * CHARACTER) + ("" if score is None else f" {100 * score:.0f}")
        left = max(1.0, min(x, width - CHARACTER * len(short)))
        names.append(_over(left, y - 3 if y > 13 else y + 12, short))
    yield from names


def _over(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Return text with a white outline, legible on any picture."""
    return (
        f'<text x="{_short(x)}" y="{_short(y)}" text-anchor="{anchor}" font-size="11" font-weight="600" fill="#000" '
        f'stroke="#fff" stroke-width="2.6" stroke-linejoin="round" paint-order="stroke" pointer-events="none">'
        f"{escape(text)}</text>"
    )


def _legend(entries: Sequence[tuple[_Colour, str]], width: float) -> tuple[str, float]:
    parts, x, y = [], 0.0, 0.0
    for colour, name in entries:
        shown = _cut(name, 160)
        wide = 22 + CHARACTER * len(shown) + 16
        if x and x + wide > width:
            x, y = 0.0, y + LINE
        swatch = f'<rect x="{x + 1:g}" y="{y + 3:g}" width="14" height="12" {colour.fill} {colour.stroke}/>'
        parts.append(swatch + _text(x + 21, y + 13, name, 160))
        x += wide
    return "".join(parts), y + LINE if entries else 0.0


def _text(x: float, y: float, text: str, width: float, weight: str = "400") -> str:
    shown = _cut(text, width)
    tooltip = _title(text) if shown != text else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{INK}" font-weight="{weight}">{escape(shown)}{tooltip}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _cut(text: str, width: float) -> str:
    most = max(2, int(width / CHARACTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
