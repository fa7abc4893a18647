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
    beside = min(ACROSS, len(pictures.rows)) if most == 1 else 1  # rows of one panel are side by side
    width, y, bottom = max(across, beside) * (SIDE + GAP) - GAP, 0.0, 0.0
    rows = []
    for place, row in enumerate(pictures.rows):
        left, y = place % beside * (SIDE + GAP), y if place % beside else bottom
        scale = SIDE / max(row.size)
        wide, high = (scale * side for side in row.size)
        names = [[_cut(line, SIDE) for line in panel.split("\n")] for panel in row.panels]
        above = LINE * max(map(len, names), default=1)
        panels = [
            {"names": lines, "overlay": png, "x": left + index % across * (SIDE + GAP),
             "y": y + LINE + index // across * (high + above + GAP / 2)}
            for index, (lines, png) in enumerate(zip(names, row.panels.values(), strict=True))
        ]  # fmt: skip
        rows.append({"title": _cut(row.title, width / beside), "image": row.image, "x": left, "y": y, "width": wide,
                     "height": high, "above": above, "crisp": scale > 1.5, "panels": panels})  # fmt: skip
        bottom = max(bottom, y + LINE + math.ceil(len(panels) / across) * (high + above + GAP / 2) + GAP)
    y = bottom
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
