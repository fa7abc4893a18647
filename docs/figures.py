"""Draw the figures of the README and of pages in docs/: `python docs/figures.py` writes docs/figures/*.svg.

Plain SVG, the same text every time. Colours follow the page: light where it is light, dark where it is dark.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from pathlib import Path

import torch
from torch import Tensor

import torchrope as tr

RESULTS = Path(__file__).parent / "results" / "studies"
STYLE = """
text { font: 13px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #24292f }
.small { font-size: 11px }
.title { font-weight: 600 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.light { fill: #fff }
.axis { stroke: #8a8f98; fill: none; stroke-width: 1 }
.frame { stroke: #8a8f98; fill: none; stroke-width: 0.75 }
.line { fill: none; stroke-width: 2 }
.dashed { stroke-dasharray: 6 3 }
.dotted { stroke-dasharray: 1.5 3 }
.first { stroke: #0072b2 } .first-fill { fill: #0072b2 }
.second { stroke: #d55e00 } .second-fill { fill: #d55e00 }
.third { stroke: #009e73 } .third-fill { fill: #009e73 }
@media (prefers-color-scheme: dark) {
  text { fill: #d7dae0 }
  .first { stroke: #56b4e9 } .first-fill { fill: #56b4e9 }
  .second { stroke: #f0915a } .second-fill { fill: #f0915a }
  .third { stroke: #3cc79e } .third-fill { fill: #3cc79e }
}
"""
COLOURS = ["first", "second", "third"]
DASHES = ["", "dashed", "dotted"]


def main(folder: Path) -> None:
    """Write every figure."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


def positions() -> str:
    """Three ways to place tokens: a lattice with a class token, a larger input, voxels of unequal size."""
    parts = _lattice(0, "grid(4, 4, spacing=1/4)", tr.prefix(tr.grid(4, 4, spacing=1 / 4), 1), unit="1")
    parts += _lattice(220, "a larger image runs past 1", tr.grid(6, 6, spacing=1 / 4), unit="1", trained=4)
    parts += _lattice(440, "grid(3, 6, spacing=(5, 2.5))", tr.grid(3, 6, spacing=(5, 2.5)) / 10, unit="10 mm")
    return _svg(650, 250, "Positions of a lattice with a class token, of a larger lattice, and in millimetres", parts)


def _lattice(left: float, title: str, places: Tensor, unit: str, trained: int | None = None) -> list[str]:
    """Tokens as dots, axis 0 downwards and axis 1 to the right; a unit is 100 wide."""
    x0, y0, scale = left + 30, 60, 110
    parts = [_text(left + 14, 22, title, "title small")]
    parts += [_line(x0, y0, x0 + 150, y0, "axis"), _line(x0, y0, x0, y0 + 150, "axis")]
    parts += [_text(x0 + scale, y0 - 14, unit, "small middle"), _line(x0 + scale, y0 - 5, x0 + scale, y0 + 5, "axis")]
    parts += [_text(x0 - 10, y0 + scale + 4, unit, "small end")] if unit == "1" else []
    parts += [_line(x0 - 5, y0 + scale, x0 + 5, y0 + scale, "axis")]
    parts += [_text(x0 + 155, y0 + 4, "p₁", "small"), _text(x0 - 18, y0 + 150, "p₀", "small")]
    for p in places.flip(0).tolist():
        known = trained is None or max(p) < 1
        parts.append(_dot(x0 + scale * p[1], y0 + scale * p[0], 4, "first-fill" if known else "second-fill"))
    if trained is None and len(places) % 2:
        parts += [_dot(x0, y0, 9, "second line"), _text(x0 + 10, y0 + 168, "in a ring: CLS, at the origin", "small")]
    if trained is not None:
        parts.append(_text(x0 + 40, y0 + 168, "trained", "small first-fill end"))
        parts.append(_text(x0 + 52, y0 + 168, "never seen in training", "small second-fill"))
    return parts


def generators() -> str:
    """The generators of one head of 8 channels and two axes, family by family."""
    families: list[tuple[str, Callable[..., tr.Encoding]]] = [
        ("RoPE-Axial", partial(tr.AxialRoPE, base=10.0)),
        ("RoPE-Mixed", tr.MixedRoPE),
        ("ComRoPE-AP, b = 4", partial(tr.ComRoPEAP, block_size=4)),
        ("ComRoPE-LD, b = 4", partial(tr.ComRoPELD, block_size=4)),
        ("LieRE, b = 4", partial(tr.LieRE, block_size=4)),
        ("STRING", tr.STRING),
    ]
    parts = []
    for number, (title, make) in enumerate(families):
        torch.manual_seed(1)
        encoding = make(num_axes=2, num_heads=1, head_dim=8)
        if isinstance(encoding, tr.STRING):  # its paper starts at the standard basis, where there is nothing to see
            torch.nn.init.normal_(encoding.upper, 0, 0.4)
        row, column = divmod(number, 3)
        parts += _family(20 + 222 * column, 30 + 150 * row, title, encoding)
    return _svg(680, 310, "Generators of six encodings as 8 × 8 matrices, one for each of two axes", parts)


def _family(left: float, top: float, title: str, encoding: tr.Encoding) -> list[str]:
    with torch.no_grad():
        blocks = encoding.generators()[:, 0]  # (axes, n, b, b)
    dense = torch.stack([torch.block_diag(*axis) for axis in blocks])  # (axes, 8, 8)
    dense = dense / dense.abs().max()
    parts = [_text(left, top - 6, title, "title small")]
    for axis, matrix in enumerate(dense):
        x = left + 98 * axis
        parts += [_matrix(x, top, 88 / 8, matrix), _text(x + 44, top + 102, f"A{'₀₁'[axis]}", "small middle")]
    return parts


def _matrix(left: float, top: float, cell: float, values: Tensor) -> str:
    """Signed numbers in [-1, 1] as squares: two colours for the sign, strength for the size."""
    squares = []
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            if abs(value) > 0.01:
                fill = "first-fill" if value > 0 else "second-fill"
                place = f'x="{_n(left + cell * column)}" y="{_n(top + cell * row)}"'
                strength = _n(0.12 + 0.88 * abs(value))
                squares.append(
                    f'<rect class="{fill}" {place} width="{_n(cell)}" height="{_n(cell)}" opacity="{strength}"/>'
                )
    side = _n(cell * len(values))
    frame = f'<rect class="frame" x="{_n(left)}" y="{_n(top)}" width="{side}" height="{side}"/>'
    return "".join(squares) + frame


def rotation() -> str:
    """A pair of channels of q at several places, and the angle between q and k before and after a common shift."""
    encoding = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=2)
    encoding.set_generators(torch.tensor([[0.0, -0.4], [0.4, 0.0]]).expand(1, 1, 1, 2, 2))
    q, k = torch.tensor([[1.0, 0.15], [0.75, 0.55]])

    def turned(x: Tensor, place: float) -> list[float]:
        with torch.no_grad():
            return tr.rotate(x.expand(1, 1, 1, 2), x.expand(1, 1, 1, 2), encoding(torch.tensor([[place]])))[0][
                0, 0, 0
            ].tolist()

    parts = [_text(20, 22, "q at p = 0, 1, ... 5", "title small")]
    parts += _plane(115, 140)
    for place in range(6):
        end = turned(q, place)
        parts += _arrow(115, 140, end, "first", 0.35 + 0.13 * place)
        parts.append(_text(115 + 96 * end[0], 144 - 96 * end[1], f"{place}", "small middle"))
    for left, (here, there) in ((340, (0, 3)), (560, (2, 5))):
        parts.append(_text(left - 95, 22, f"q at p = {here}, k at p′ = {there}", "title small"))
        parts += _plane(left, 140)
        for x, place, colour, name in ((q, here, "first", "q"), (k, there, "second", "k")):
            end = turned(x, place)
            parts += _arrow(left, 140, end, colour, 1)
            parts.append(_text(left + 98 * end[0], 144 - 98 * end[1], name, f"small middle {colour}-fill"))
        score = sum(a * b for a, b in zip(turned(q, here), turned(k, there), strict=True))
        parts.append(_text(left, 252, f"score {score:.2f}".replace("-", "−"), "small middle"))
    return _svg(670, 265, "A pair of channels turns with the position; a common shift keeps the score", parts)


def _plane(x: float, y: float) -> list[str]:
    return [_line(x - 90, y, x + 90, y, "axis"), _line(x, y - 90, x, y + 90, "axis")]


def _arrow(x: float, y: float, end: list[float], colour: str, opacity: float) -> list[str]:
    tip = (x + 82 * end[0], y - 82 * end[1])
    angle = math.atan2(-end[1], end[0])
    wings = [(tip[0] - 9 * math.cos(angle + side), tip[1] - 9 * math.sin(angle + side)) for side in (0.4, -0.4)]
    shape = " ".join(f"{_n(a)},{_n(b)}" for a, b in (tip, *wings))
    stem = _line(x, y, *tip, f"{colour} line", opacity)
    return [stem, f'<polygon class="{colour}-fill" points="{shape}" opacity="{_n(opacity)}"/>']


def scores() -> str:
    """The score of a vector with itself over the offset along the second axis, from three places."""
    families: list[tuple[str, Callable[..., tr.Encoding]]] = [
        ("RoPE-Axial", tr.AxialRoPE),
        ("RoPE-Mixed", tr.MixedRoPE),
        ("LieRE, b = 8", partial(tr.LieRE, block_size=8)),
    ]
    parts = []
    for column, (title, make) in enumerate(families):
        torch.manual_seed(0)
        encoding = make(num_axes=2, num_heads=1, head_dim=64)
        parts += _curves(48 + 215 * column, title, encoding, first=column == 0)
    for number, place in enumerate(STARTS):
        look = f"line {COLOURS[number]} {DASHES[number]}"
        parts.append(_line(190 + 130 * number, 232, 215 + 130 * number, 232, look))
        parts.append(_text(221 + 130 * number, 236, f"p = ({place}, {place})", "small"))
    parts.append(_text(48, 236, "from the token at", "small"))
    return _svg(680, 250, "Scores over offset: one curve for RoPE-Axial and RoPE-Mixed, three for LieRE", parts)


STARTS = (0, 4, 8)
OFFSETS = 8


def _curves(left: float, title: str, encoding: tr.Encoding, first: bool) -> list[str]:
    top, width, height = 40, 185, 140
    spacing = torch.as_tensor(encoding.lattice.spaced(16, 16)["spacing"])
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    x = x / x.norm()
    steps = torch.arange(0, OFFSETS + 0.01, 0.125)
    parts = [_text(left, 22, title, "title small")]
    parts += [
        _line(left, top + height, left + width, top + height, "axis"),
        _line(left, top, left, top + height, "axis"),
    ]
    parts.append(_line(left, top + height / 2, left + width, top + height / 2, "frame"))
    for offset in range(0, OFFSETS + 1, 2):
        parts.append(_text(left + width * offset / OFFSETS, top + height + 15, str(offset), "small middle"))
    parts.append(_text(left + width / 2, top + height + 31, "offset p′ − p, in patches", "small middle"))
    for value in (-1, 0, 1) if first else ():
        parts.append(_text(left - 8, top + height * (1 - value) / 2 + 4, str(value).replace("-", "−"), "small end"))
    for number, start in enumerate(STARTS):
        here = torch.full((1, 2), float(start))
        there = here + torch.stack([torch.zeros_like(steps), steps], dim=1)
        with torch.no_grad():
            queries = encoding(here * spacing).matrix()[0] @ x  # (1, 64)
            keys = encoding(there * spacing).matrix()[0] @ x  # (steps, 64)
        score = (keys @ queries[0]).tolist()
        points = [
            (left + width * s / OFFSETS, top + height * (1 - v) / 2) for s, v in zip(steps.tolist(), score, strict=True)
        ]
        parts.append(_path(points, f"line {COLOURS[number]} {DASHES[number]}"))
    return parts


def orders() -> str:
    """The orbit of a vector under one generator, and steps along two generators in either order."""
    parts = [_text(14, 22, "one generator", "title small"), *_sphere(115, 140)]
    about = torch.linalg.matrix_exp(torch.linspace(0, 2 * math.pi, 97)[:, None, None] * _cross(0.1, -0.5, 0.86))
    parts += _on_sphere(115, 140, about @ _START, "first line")
    parts += _on_sphere(115, 140, about[:17] @ _START, "second line")
    parts += [
        _dot(*_seen(115, 140, _START), 4, "first-fill"),
        _dot(*_seen(115, 140, about[16] @ _START), 4, "second-fill"),
    ]
    parts.append(_text(115, 256, "exp(pA) x goes around on a circle", "small middle"))

    parts.append(_text(240, 22, "two that commute", "title small"))
    parts += [_line(250, 220, 425, 220, "axis"), _line(250, 220, 250, 50, "axis")]
    parts += [_text(427, 236, "angle of pair 0", "small end"), _text(256, 46, "angle of pair 1", "small")]
    corner, along, across = (268.0, 206.0), (105.0, -36.0), (30.0, -96.0)
    moved = [(corner[0] + a * along[0] + b * across[0], corner[1] + a * along[1] + b * across[1]) for a, b in _SQUARE]
    parts += [_path([moved[0], moved[1], moved[3]], "line first"), _path([moved[0], moved[2], moved[3]], "line second")]
    parts += [_dot(*moved[0], 4, "first-fill"), _dot(*moved[3], 5, "third-fill")]
    parts.append(_text(340, 256, "both orders end in R(p) x", "small middle"))

    parts += [_text(466, 22, "two that do not commute", "title small"), *_sphere(565, 140)]
    first, second = _cross(0.0, 0.0, 1.2), _cross(-0.9, 0.3, 0.0)
    steps = torch.linspace(0, 1, 25)[:, None, None]
    for one, other, look in ((first, second, "line first"), (second, first, "line second")):
        turned = torch.linalg.matrix_exp(steps * one)
        path = torch.cat([turned @ _START, torch.linalg.matrix_exp(steps * other) @ turned[-1] @ _START])
        parts += _on_sphere(565, 140, path, look)
        parts.append(_dot(*_seen(565, 140, path[-1]), 4, f"{look.split()[1]}-fill"))
    direct = torch.linalg.matrix_exp(steps * (first + second)) @ _START
    parts += _on_sphere(565, 140, direct, "line third dashed")
    parts += [_dot(*_seen(565, 140, _START), 4, "first-fill"), _dot(*_seen(565, 140, direct[-1]), 5, "third-fill")]
    parts.append(_text(565, 256, "each order, and R(p) x, end elsewhere", "small middle"))
    return _svg(690, 270, "Paths of a vector under one generator, two that commute, and two that do not", parts)


_START = torch.tensor([-0.3, -0.85, 0.2]) / torch.tensor([-0.3, -0.85, 0.2]).norm()
_SQUARE = ((0, 0), (1, 0), (0, 1), (1, 1))


def _cross(x: float, y: float, z: float) -> Tensor:
    """The skew-symmetric matrix of a rotation about an axis, whose length is the angle."""
    return torch.tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])


def _sphere(x: float, y: float) -> list[str]:
    equator = torch.linspace(0, 2 * math.pi, 73)
    ring = torch.stack([equator.cos(), equator.sin(), torch.zeros_like(equator)], dim=1)
    return [f'<circle class="frame" cx="{_n(x)}" cy="{_n(y)}" r="90"/>', *_on_sphere(x, y, ring, "frame")]


def _seen(x: float, y: float, point: Tensor) -> tuple[float, float]:
    """A point of the unit sphere as it is seen from the front, 25 degrees above."""
    tilt = math.radians(25)
    a, b, c = point.tolist()
    return x + 90 * a, y - 90 * (c * math.cos(tilt) + b * math.sin(tilt))


def _on_sphere(x: float, y: float, points: Tensor, look: str) -> list[str]:
    return [_path([_seen(x, y, point) for point in points], look)]


def places() -> str:
    """The score of a vector with itself three patches to the right, over the place of the first."""
    families: list[tuple[str, Callable[..., tr.Encoding]]] = [
        ("RoPE-Mixed", tr.MixedRoPE),
        ("ComRoPE-LD, b = 8", partial(tr.ComRoPELD, block_size=8)),
        ("LieRE, b = 8", partial(tr.LieRE, block_size=8)),
    ]
    parts = []
    for column, (title, make) in enumerate(families):
        torch.manual_seed(0)
        encoding = make(num_axes=2, num_heads=1, head_dim=64)
        left = 30 + 222 * column
        score = _score_per_place(encoding)
        parts += [_text(left, 22, title, "title small"), _matrix(left, 34, 160 / 16, score)]
        spread = f"{score.min():.2f} to {score.max():.2f}".replace("-", "−")
        parts.append(_text(left + 80, 212, spread, "small middle"))
    return _svg(680, 225, "Scores at one offset over the place: constant where generators commute", parts)


def _score_per_place(encoding: tr.Encoding) -> Tensor:
    """q R(p)ᵀ R(p + (0, 3)) q for each p of 16 × 16 patches."""
    unit = torch.as_tensor(encoding.lattice.spaced(16, 16)["spacing"])
    here = tr.grid(16, 16)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    x = x / x.norm()
    with torch.no_grad():
        queries = encoding(here * unit).matrix()[0] @ x  # (256, 64)
        keys = encoding((here + torch.tensor([0.0, 3.0])) * unit).matrix()[0] @ x
    return (queries * keys).sum(dim=1).view(16, 16)


def probes() -> str:
    """What each encoding lets one layer of attention gather, measured: `torchrope study probes`."""
    found = json.loads((RESULTS / "probes.json").read_text(encoding="utf-8"))["findings"]
    table = found["tables"][0]
    columns = [column for column in table["columns"] if column["low"]]
    masks = {figure["name"]: figure for figure in found["figures"]}["masks"]["rows"]
    side = 1 + max(row["x"] for row in masks)
    left, top, cell, pixel = 110.0, 160.0, 42.0, 34.0 / side
    parts = []
    for index, column in enumerate(columns):
        x = left + cell * index
        weights = [row for row in masks if row["panel"] == column["title"]]
        largest = max((row["weight"] for row in weights), default=1.0)
        parts.append(f'<rect class="frame" x="{x + 4:g}" y="{top - 42:g}" width="34" height="34"/>')
        for row in weights:
            look = f'class="second-fill" fill-opacity="{row["weight"] / largest:.2f}"'
            place = f'x="{x + 4 + pixel * row["x"]:.1f}" y="{top - 42 + pixel * row["y"]:.1f}"'
            parts += [f'<rect {look} {place} width="{pixel:.1f}" height="{pixel:.1f}"/>'] if row["weight"] else []
        middle = side // 2 * pixel
        at = f'x="{x + 4 + middle:.1f}" y="{top - 42 + middle:.1f}"'
        parts.append(f'<rect class="axis" {at} width="{pixel:.1f}" height="{pixel:.1f}"/>')
        words = _text(0, 0, column["title"], "small")
        parts.append(f'<g transform="translate({x + 18:g} {top - 48:g}) rotate(-35)">{words}</g>')
    for line, row in enumerate(table["rows"]):
        y = top + 22 * line
        parts.append(_text(left - 8, y + 15, row["name"], "end"))
        for index, column in enumerate(columns):
            score = row[column["key"]]
            share, x = min(max(score / 100, 0.0), 1.0), left + cell * index
            box = f'x="{x:g}" y="{y:g}" width="{cell - 2:g}" height="20"'
            parts.append(f'<rect class="first-fill" fill-opacity="{share:.2f}" {box}/>')
            look = "small middle light" if share > 0.6 else "small middle"
            parts.append(_text(x + cell / 2 - 1, y + 14, f"{round(score) or 0}", look))
    width, height = round(left + cell * len(columns) + 120), round(top + 22 * len(table["rows"]) + 8)
    return _svg(width, height, "Share explained in percent, encodings in rows, abilities in columns", parts)


def demo() -> str:
    """Accuracy and cost of the encodings in the committed comparison of `make demo`, and one of its clips."""
    found = json.loads((RESULTS.parent / "demo/results.json").read_text(encoding="utf-8"))["findings"]
    clip = found["pictures"][0]["rows"][0]
    image = f'<image x="8" y="30" width="176" height="35" href="data:image/png;base64,{clip["image"]}"/>'
    parts = [_text(8, 20, f"clip of the class “{clip['title']}”", "small"), image]
    left, width, cost = 270.0, 200.0, 600.0
    parts += [_text(left, 20, "accuracy, %", "small"), _text(cost, 20, "training step, × learned", "small")]
    for line, row in enumerate(found["tables"][0]["rows"]):
        y, look = 44 + 24 * line, COLOURS[line % 3]
        parts.append(_text(left - 8, y + 4, row["name"], "end"))
        low, value, high = (left + width * row[key] / 100 for key in ("low", "top1", "high"))
        parts += [_line(left, y, left + width, y, "frame"), _line(low, y, high, y, f"line {look}")]
        accuracy = f"{row['top1']:.1f} [{row['low']:.1f}, {row['high']:.1f}]"
        ratio = f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
        parts += [_dot(value, y, 4, f"{look}-fill"), _text(left + width + 10, y + 4, accuracy, "small")]
        parts.append(_text(cost, y + 4, ratio, "small"))
    bottom = 44 + 24 * len(found["tables"][0]["rows"])
    parts += [_text(left + width * share / 100, bottom, f"{share}", "small middle") for share in (0, 50, 100)]
    return _svg(740, bottom + 8, "Accuracy with 95 % intervals, and cost, of three encodings on moving digits", parts)


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return f"{head}\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, words: str, look: str = "") -> str:
    return f'<text class="{look}" x="{_n(x)}" y="{_n(y)}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, look: str, opacity: float = 1) -> str:
    ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
    return f'<line class="{look}" {ends} opacity="{_n(opacity)}"/>'


def _dot(x: float, y: float, radius: float, look: str) -> str:
    return f'<circle class="{look}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>'


def _path(points: Iterable[tuple[float, float]], look: str) -> str:
    return f'<polyline class="{look}" points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}"/>'


def _n(value: float) -> str:
    """A number to a tenth, without a trailing zero; opacities to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 2 else f"{value:.1f}".removesuffix(".0")


FIGURES = {
    "positions": positions,
    "generators": generators,
    "rotation": rotation,
    "scores": scores,
    "orders": orders,
    "places": places,
    "probes": probes,
    "demo": demo,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "figures")
