"""Arrange images with their overlays on a sheet with titles and a legend, as SVG."""

import math

from torchrope_lab.report.plots import FONT, INK, PAPER
from torchrope_lab.report.templates import fill
from torchrope_lab.results import Pictures

SIDE, GAP, ACROSS = 256, 14, 4
LINE = 20  # of text
CHARACTER = 6.6  # mean width of one


def sheet(pictures: Pictures, name: str) -> str:
    """Draw all rows and the legend below them, as SVG text whose ids begin with a name that is unique on the page."""
    most = max((len(row.panels) for row in pictures.rows), default=1) or 1
    across = math.ceil(most / math.ceil(most / ACROSS))  # lines of about equal length
    width, y = across * (SIDE + GAP) - GAP, 0.0
    rows = []
    for row in pictures.rows:
        scale = SIDE / max(row.size)
        wide, high = (scale * side for side in row.size)
        panels = [
            {"name": _cut(panel, SIDE), "overlay": png, "x": index % across * (SIDE + GAP),
             "y": y + LINE + index // across * (high + LINE + GAP / 2)}
            for index, (panel, png) in enumerate(row.panels.items())
        ]  # fmt: skip
        rows.append({"title": _cut(row.title, width), "image": row.image, "y": y, "width": wide, "height": high,
                     "crisp": scale > 1.5, "panels": panels})  # fmt: skip
        y += LINE + math.ceil(len(panels) / across) * (high + LINE + GAP / 2) + GAP
    entries, x = [], 0.0
    for text, colour in pictures.legend.items():
        shown = _cut(text, 160)
        wide = 38 + CHARACTER * len(shown)
        if x and x + wide > width:
            x, y = 0.0, y + LINE
        entries.append({"name": shown, "colour": colour, "x": x, "y": y})
        x += wide
    size = {"width": width, "height": y + LINE if entries else y}
    return fill(
        "pictures.svg", name=name, **size, rows=rows, entries=entries, line=LINE, font=FONT, ink=INK, paper=PAPER
    ).strip()


def _cut(text: str, width: float) -> str:
    most = max(2, int(width / CHARACTER))
    return text if len(text) <= most else text[: most - 1] + "…"
