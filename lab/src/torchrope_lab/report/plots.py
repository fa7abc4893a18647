"""Convert a study's figure to a Vega-Lite specification, and render it as SVG."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrope_lab.report.looks import Look, numbered
from torchrope_lab.report.tables import with_unit
from torchrope_lab.results import Axis, Column, Figure, Table

Spec = dict[str, Any]

FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"
# The page's CSS matches these values to recolour figures in dark mode.
PAPER, INK, SOFT, GRID = "#ffffff", "#1f2328", "#8a8a8b", "#e6e6e7"
WIDTH, HEIGHT, PANEL_HEIGHT = 640, 320, 200
MARKED = 24  # lines over more points have no markers
_TEXT = {"labelColor": INK, "titleColor": INK, "labelFontSize": 12}
_TITLE = {"titleFontSize": 12, "titleFontWeight": "normal"}
CONFIG: Spec = {
    "font": FONT,
    "aria": False,
    "view": {"stroke": None},
    "axis": {
        **_TEXT, **_TITLE, "domainColor": SOFT, "tickColor": SOFT, "gridColor": GRID, "labelLimit": 170,
        "titleLimit": 420, "labelOverlap": "greedy", "labelSeparation": 5,
    },
    "legend": {**_TEXT, **_TITLE, "labelLimit": 190, "titleLimit": 300, "symbolSize": 70, "symbolOpacity": 1},
    "header": {**_TEXT, "labelLimit": 260},
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A Vega-Lite specification of a figure, and its data."""

    spec: Spec  # of fields `c0`, `c1`, ...; user-given names are values in it, never code
    columns: list[tuple[str, str]]  # key and title of every field, in order
    rows: list[list[Any]]  # one list per mark
    panels: int  # number of small figures side by side; 0 for one large figure
    hover: Spec | None  # transparent marks with tooltips, for the page alone; None if the marks have them

    def as_json(self) -> str:
        """Return JSON for the page's script, escaped so that it cannot close the script element."""
        text = json.dumps(vars(self), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda sign: f"\\u{ord(sign[0]):04x}", text)

    def table(self, title: str) -> Table:
        """Return the data as a table."""
        keys = [key for key, _ in self.columns]
        rows = [dict(zip(keys, row, strict=True)) for row in self.rows]
        return Table(title, [Column(*column) for column in self.columns], rows)


def plot(figure: Figure, looks: Mapping[str, Look]) -> Plot:
    """Build the specification of a figure; series without a look of their own get unused ones."""
    chart = _Chart(figure)
    layers, hover = ([chart.cells()], None) if figure.kind == "cells" else chart.layers(looks)
    spec: Spec = {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "background": PAPER, "config": CONFIG}
    panels = chart.distinct("panel")
    if panels:
        across = min(len(panels), 3)
        facet = {"field": chart.fields["panel"], "type": "nominal", "sort": panels, "title": None}
        unit = {"width": chart.panel_width(across), "height": chart.height(), "layer": layers}
        spec |= {"facet": facet, "columns": across, "spacing": 18, "spec": unit}
        if figure.kind == "cells":
            spec["resolve"] = {"scale": {"x": "independent", "y": "independent"}}
    else:
        size = {"width": WIDTH, "height": chart.height(), "autosize": {"type": "fit-x", "contains": "padding"}}
        spec |= {**size, "layer": layers}
    rows = [[row.get(key) for key in chart.keys] for row in figure.rows]
    return Plot(spec, chart.columns(), rows, len(panels), hover)


def svg(drawn: Plot, name: str) -> str:
    """Render a plot as SVG text whose ids begin with a name; the output is deterministic."""
    import vl_convert

    values = [{f"c{index}": value for index, value in enumerate(row)} for row in drawn.rows]
    text = vl_convert.vegalite_to_svg({**drawn.spec, "data": {"values": values}}, allowed_base_urls=[])
    return _for_inlining(text[text.index("<svg") :].strip(), name)


def slug(*parts: str) -> str:
    """Build a file name or an id from names: lower-case letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")[:80].strip("-") or "figure"


class _Chart:
    """The marks and channels of a figure, in terms of fields `c0`, `c1`, ..., which contain no user-given text."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.axes: dict[str, Axis] = {"x": figure.x, "y": figure.y}
        if figure.colour:
            self.axes["colour"] = figure.colour
        parts = {part: axis.key for part, axis in self.axes.items()}
        parts |= {part: key for part in ("series", "panel", "low", "high") if (key := getattr(figure, part))}
        self.keys = list(dict.fromkeys([*parts.values(), *(key for row in figure.rows for key in row)]))
        self.fields = {part: f"c{self.keys.index(key)}" for part, key in parts.items()}
        self.values = {part: [row[key] for row in figure.rows] for part, key in parts.items()}
        # The axis of the intervals: y, or x if y is categorical.
        self.along = "x" if self._is_category("y") and not self._is_category("x") else "y"

    def distinct(self, part: str) -> list[Any]:
        """Return the distinct values of a part in the order of the rows; empty if the figure does not have it."""
        return list(dict.fromkeys(self.values.get(part, ())))

    def columns(self) -> list[tuple[str, str]]:
        """Return key and title of every field."""
        titles = {self.figure.low: "low end", self.figure.high: "high end"}
        titles |= {axis.key: with_unit(axis) for axis in reversed(self.axes.values())}
        return [(key, titles.get(key) or key) for key in self.keys]

    def layers(self, looks: Mapping[str, Look]) -> tuple[list[Spec], Spec | None]:
        """Return the layers of lines, points or bars with intervals, and the layer of tooltips."""
        figure, across = self.figure, "y" if self.along == "x" else "x"
        base = {"x": self._position("x"), "y": self._position("y"), **self._offset(across)}
        colour, shape, dash = self._series(looks)
        shown = {**base, **colour, "opacity": self._faded(1, 0.12)}
        size = 60 if figure.kind == "points" else 34
        points = {"mark": {"type": "point", "filled": True, "size": size, "strokeWidth": 1.6},
                  "encoding": {**shown, **shape}}  # fmt: skip
        interval = self._interval(base, colour)
        hover = {"type": "point", "size": 260, "opacity": 0, "filled": True, "tooltip": {"content": "data"}}
        if figure.kind == "bars":
            orient = "vertical" if self.along == "y" else "horizontal"
            bar = {"mark": {"type": "bar", "orient": orient, "tooltip": {"content": "data"}},
                   "encoding": {**shown, **self._from_floor(base)}}  # fmt: skip
            return [self._with_params(bar), *interval], None
        if figure.kind == "points":
            return [*interval, self._with_params(points)], {"mark": hover, "encoding": base}
        line = {"mark": {"type": "line", "strokeWidth": 1.8, "clip": True}, "encoding": {**shown, **dash}}
        markers = [points] if len(self.distinct("x")) <= MARKED else []
        return [*interval, self._with_params(line), *markers], {"mark": hover, "encoding": base}

    def cells(self) -> Spec:
        """Return the layer of coloured cells."""
        channels: Spec = {}
        for part in ("x", "y"):
            values = self.distinct(part)
            shown: Spec = {"labelAngle": 0, "grid": False, "ticks": False, "domain": False}
            if self._is_category(part):
                shown |= {"labelAngle": self._angle(part), "labelOverlap": False}
            else:
                values = sorted((value for value in values if value is not None), reverse=part == "y")
                shown |= {"format": ".4~g"}
            channels[part] = {**self._channel(part), "type": "ordinal", "sort": values, "axis": shown,
                              "scale": {"padding": 0}}  # fmt: skip
        colour = self._channel("colour")
        if self._is_category("colour"):
            values = self.distinct("colour")
            ranges = [numbered(place).colour for place in range(len(values))]
            colour |= {"type": "nominal", "scale": {"domain": values, "range": ranges}, "legend": {"orient": "bottom"}}
        else:
            legend = {"orient": "right", "gradientLength": 140}
            colour |= {"type": "quantitative", "scale": self._colour_scale(), "legend": legend}
        return {"mark": {"type": "rect", "tooltip": {"content": "data"}}, "encoding": {**channels, "color": colour}}

    def height(self) -> float:
        """Return the height in pixels, of a panel if there are several."""
        panels = len(self.distinct("panel"))
        if self.figure.kind == "cells":
            across, down = (max(1, len(self.distinct(part))) for part in ("x", "y"))
            width = self.panel_width(min(3, panels)) if panels else 480
            named = 17 * down if self._is_category("y") else 60  # every name is shown
            return max(named, min(420, round(width * down / across)))
        if self._is_category("y"):
            lanes = len(self.distinct("series")) if self._offset("y") else 1
            return max(60, len(self.distinct("y")) * max(24, 9 * lanes))
        return PANEL_HEIGHT if panels else HEIGHT

    def panel_width(self, across: int) -> int:
        """Return the width in pixels of each of several panels side by side."""
        beside, between = (80, 50) if self.figure.kind == "cells" else (45, 18)
        return max(80, round((WIDTH - beside) / across - between))

    def _is_category(self, part: str) -> bool:
        return self.axes[part].scale == "category"

    def _numbers(self, *parts: str) -> list[float]:
        values = [value for part in parts for value in self.values.get(part, ())]
        return [value for value in values if isinstance(value, int | float)]

    def _channel(self, part: str) -> Spec:
        return {"field": self.fields[part], "title": with_unit(self.axes[part])}

    def _position(self, part: str) -> Spec:
        """Return the channel of x or y."""
        axis, numbers, kind = self.axes[part], self._numbers(part), self.figure.kind
        if axis.scale == "category":
            shown = {"labelAngle": self._angle(part), "grid": kind != "bars" and part == "y"}
            return {**self._channel(part), "type": "nominal", "sort": self.distinct(part), "axis": shown}
        channel = {**self._channel(part), "type": "quantitative"}
        if axis.scale == "log":
            ends = self._numbers("low", "high") if part == self.along else []
            return {**channel, **_log_axis(numbers + ends)}
        ticks: Spec = {"tickMinStep": 1} if all(float(value).is_integer() for value in numbers) else {}
        if kind == "lines" and part == "x" and len(set(numbers)) <= 8:
            ticks |= {"values": sorted(set(numbers)), "format": ".6~g"}
        near_ends = kind == "points" and not axis.zero  # markers at the ends are whole
        scale = {"zero": kind == "bars" or axis.zero, "padding": 5 * near_ends, "nice": not near_ends}
        return {**channel, "scale": scale, "axis": ticks, "stack": None}

    def _angle(self, part: str) -> int:
        """Return the angle of names below an axis: slanted if they do not fit beside each other."""
        crowded = sum(len(str(value)) for value in self.distinct(part)) > (16 if "panel" in self.fields else 70)
        return -35 if part == "x" and crowded else 0

    def _series(self, looks: Mapping[str, Look]) -> tuple[Spec, Spec, Spec]:
        """Return the channels of colour, shape and dashes."""
        if "series" not in self.fields:
            single = numbered(0)
            return {"color": {"value": single.colour}}, {"shape": {"value": single.shape}}, {}
        chosen, field = choose(self.distinct("series"), looks), self.fields["series"]
        named = field in (self.fields[part] for part in ("x", "y") if self._is_category(part))
        legend = None if named else {"orient": "bottom", "title": None, "columns": 4, "symbolStrokeWidth": 1.8}

        def channel(styles: Sequence[Any]) -> Spec:
            scale = {"domain": list(chosen), "range": styles}
            return {"field": field, "type": "nominal", "legend": legend, "scale": scale}

        return (
            {"color": channel([look.colour for look in chosen.values()])},
            {"shape": channel([look.shape for look in chosen.values()])},
            {"strokeDash": channel([look.dash for look in chosen.values()])},
        )

    def _offset(self, part: str) -> Spec:
        """Return an offset channel that places the series of a category side by side."""
        field = self.fields.get("series", self.fields[part])
        if field == self.fields[part] or not self._is_category(part) or self.figure.kind == "lines":
            return {}
        return {f"{part}Offset": {"field": field, "type": "nominal", "sort": self.distinct("series")}}

    def _interval(self, base: Spec, colour: Spec) -> list[Spec]:
        """Return the layer of intervals, bands of lines over numbers and rules elsewhere."""
        if not {"low", "high"} <= set(self.fields):
            return []
        ends = {self.along: {**base[self.along], "field": self.fields["low"]},
                f"{self.along}2": {"field": self.fields["high"]}}  # fmt: skip
        band = self.figure.kind == "lines" and not self._is_category("x")
        mark = {"type": "area"} if band else {"type": "rule", "strokeWidth": 1.6}
        colour = {"color": {"value": INK}} if self.figure.kind == "bars" else colour
        shown = {**base, **ends, **colour, "opacity": self._faded(0.14 if band else 0.8, 0.03)}
        return [{"mark": {**mark, "clip": True}, "encoding": shown}]

    def _faded(self, value: float, others: float) -> Spec:
        """Return an opacity, lower for the series that are not picked in the legend."""
        if "series" not in self.fields:
            return {"value": value}
        return {"condition": {"param": "picked", "value": value}, "value": others}

    def _from_floor(self, base: Spec) -> Spec:
        """Let bars on a logarithmic axis, which has no zero, begin at a power of ten below all values."""
        if self.axes[self.along].scale != "log":
            return base
        numbers = [value for value in self._numbers(self.along, "low") if value > 0]
        floor = 10.0 ** math.floor(math.log10(min(numbers)) - 0.01) if numbers else 1.0
        scale = {**base[self.along]["scale"], "domainMin": floor, "nice": False}
        return {**base, self.along: {**base[self.along], "scale": scale}, f"{self.along}2": {"datum": floor}}

    def _with_params(self, layer: Spec) -> Spec:
        """Add picking series in the legend, and zooming by the wheel with Ctrl and moving by dragging."""
        params: list[Spec] = []
        if "series" in self.fields:
            select: Spec = {"type": "point", "fields": [self.fields["series"]]}
            params.append({"name": "picked", "select": select, "bind": "legend"})
        numeric = [part for part in ("x", "y") if not self._is_category(part)]
        if numeric and self.figure.kind != "bars":
            moved = "[mousedown, window:mouseup] > window:mousemove!"
            select = {"type": "interval", "encodings": numeric, "zoom": "wheel![event.ctrlKey]", "translate": moved}
            params.append({"name": "zoom", "select": select, "bind": "scales"})
        return {"params": params, **layer} if params else layer

    def _colour_scale(self) -> Spec:
        """Return a colour scale, diverging if values lie on both sides of zero."""
        numbers = self._numbers("colour")
        low, high = min(numbers, default=0), max(numbers, default=1)
        if self.axes["colour"].scale == "log":
            return {"type": "log", "scheme": "viridis"}
        if low < 0 < high:
            return {"scheme": "blueorange", "domain": [-max(-low, high), max(-low, high)]}
        return {"scheme": "viridis", "zero": False}


def choose(names: Sequence[Any], looks: Mapping[str, Look]) -> dict[Any, Look]:
    """Return the looks of a figure's series: those of encodings, and unused ones for other names."""
    known = {name: looks[name] for name in names if name in looks}
    free = (look for place in range(90) if (look := numbered(place)) not in known.values())
    return {name: known[name] if name in known else next(free) for name in names}


def _log_axis(numbers: Sequence[float]) -> Spec:
    drawn = sorted({value for value in numbers if value > 0}) or [1, 10]
    low, high = drawn[0], drawn[-1]
    wide = (high / low) ** 0.04 if high > low else 2
    axis: Spec = {"format": ".3~s" if low >= 1 else ",.3~r" if low >= 1e-4 and high < 1e6 else ".3~g"}
    if len(drawn) <= 8:
        axis["values"] = drawn
    return {"scale": {"type": "log", "domain": [low / wide, high * wide], "nice": False}, "axis": axis}


def _for_inlining(text: str, name: str) -> str:
    """Shorten numbers, and make ids deterministic and unique within a page."""
    ids = {found: f"{name}-{index}" for index, found in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]+)"', text)))}

    def shorten(markup: str) -> str:
        markup = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{ids[found[1]]}"', markup)
        markup = re.sub(r'(href="#|url\(#)([^")]+)', lambda found: found[1] + ids.get(found[2], found[2]), markup)
        return re.sub(r"(\d\.\d\d)\d+", r"\1", markup)

    parts = re.split(r"(>[^<]+</text>)", text)
    return "".join(part if part.endswith("</text>") else shorten(part) for part in parts)
