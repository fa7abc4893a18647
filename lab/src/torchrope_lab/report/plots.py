"""Convert a study's figure to a Vega-Lite specification, and render it as SVG."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrope_lab.report.looks import Look, numbered
from torchrope_lab.report.tables import with_unit

Spec = dict[str, Any]
Figure = dict[str, Any]

FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"
# The page's CSS matches these values to recolour figures in dark mode.
PAPER, INK, SOFT, GRID = "#ffffff", "#1f2328", "#8a8a8b", "#e6e6e7"
WIDTH, HEIGHT, PANEL_HEIGHT = 640, 320, 200
CONFIG: Spec = {
    "font": FONT,
    "aria": False,
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK, "titleColor": INK, "domainColor": SOFT, "tickColor": SOFT, "gridColor": GRID,
        "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 170, "titleLimit": 420,
        "labelOverlap": "greedy", "labelSeparation": 5,
    },
    "legend": {
        "labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
        "labelLimit": 190, "titleLimit": 300, "symbolSize": 70, "symbolOpacity": 1,
    },
    "header": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "labelLimit": 260},
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A Vega-Lite specification of a figure, and its data.

    Attributes:
        spec: A Vega-Lite specification of fields `c0`, `c1`, ...; user-given names are values in it, never code.
        columns: Key and title of every field, in order.
        rows: The numbers, one list per mark.
        panels: Number of small figures side by side; 0 for one large figure.
        zoom: Axes that can be zoomed, and their fields: ("x", "c0").
    """

    spec: Spec
    columns: list[tuple[str, str]]
    rows: list[list[Any]]
    panels: int
    zoom: list[tuple[str, str]]

    def with_data(self) -> Spec:
        """Return the specification with its data inline."""
        values = [{f"c{index}": value for index, value in enumerate(row)} for row in self.rows]
        return {**self.spec, "data": {"values": values}}

    def as_json(self) -> str:
        """Return JSON for the page's script, escaped so that it cannot close the script element."""
        text = json.dumps(vars(self), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda sign: f"\\u{ord(sign[0]):04x}", text)


def plot(figure: Figure, looks: Mapping[str, Look]) -> Plot:
    """Build the specification of a figure.

    Args:
        figure: The dictionary of a `Figure`.
        looks: Looks of the page's encodings, by name; other series get unused ones.
    """
    names = _Fields(figure)
    panels = names.distinct("panel")
    unit: Spec = {"layer": _layers(figure, names, looks)}
    spec: Spec = {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "background": PAPER, "config": CONFIG}
    height = _height(figure, names, bool(panels))
    if panels:
        across = min(len(panels), 3)
        facet = {"field": names["panel"], "type": "nominal", "sort": panels, "title": None}
        spec |= {
            "facet": facet, "columns": across, "spacing": 18,
            "spec": {"width": _panel_width(figure, across), "height": height, **unit},
        }  # fmt: skip
        if figure["kind"] == "cells":
            spec["resolve"] = {"scale": {"x": "independent", "y": "independent"}}
    else:
        spec |= {"width": WIDTH, "height": height, "autosize": {"type": "fit-x", "contains": "padding"}, **unit}
    return Plot(spec, names.columns(), names.rows(), len(panels), _zoomed(figure, names))


def svg(drawn: Plot, name: str) -> str:
    """Render a plot as SVG text whose ids begin with a name; the output is deterministic.

    Raises:
        ImportError: vl-convert-python is not installed.
    """
    import vl_convert

    text = vl_convert.vegalite_to_svg(_without_touch(drawn.with_data()), allowed_base_urls=[])
    return _for_inlining(text[text.index("<svg") :].strip(), name)


def _without_touch(spec: Spec) -> Spec:
    """Remove the transparent layers that only serve tooltips."""
    if "spec" in spec:
        return {**spec, "spec": _without_touch(spec["spec"])}
    return {**spec, "layer": [layer for layer in spec["layer"] if layer["mark"].get("opacity") != 0]}


def slug(*parts: str) -> str:
    """Build a file name or an id from names: lower-case letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")[:80].strip("-") or "figure"


class _Fields:
    """Maps the keys of a figure's rows to field names `c0`, `c1`, ..., which contain no user-given text."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        parts = ("x", "y", "colour", "series", "panel", "low", "high")
        given = [(part, figure[part]) for part in parts if figure.get(part)]
        self.keys = {part: value["key"] if isinstance(value, dict) else value for part, value in given}
        found = dict.fromkeys([*self.keys.values(), *(key for row in figure["rows"] for key in row)])
        self.order = list(found)

    def __getitem__(self, part: str) -> str:
        return f"c{self.order.index(self.keys[part])}"

    def __contains__(self, part: str) -> bool:
        return part in self.keys

    def distinct(self, part: str) -> list[Any]:
        """Return the distinct values of a part in the order of the rows; empty if the figure does not have it."""
        if part not in self:
            return []
        return list(dict.fromkeys(row[self.keys[part]] for row in self.figure["rows"]))

    def numbers(self, part: str) -> list[float]:
        """Return the numbers of a part."""
        values = (row[self.keys[part]] for row in self.figure["rows"]) if part in self else ()
        return [value for value in values if isinstance(value, int | float)]

    def columns(self) -> list[tuple[str, str]]:
        """Return key and title of every field."""
        axes = [self.figure[part] for part in ("x", "y", "colour") if self.figure.get(part)]
        titles = {axis["key"]: with_unit(axis) for axis in axes}
        ends = {self.keys.get("low"): "low end", self.keys.get("high"): "high end"}
        return [(key, titles.get(key) or ends.get(key) or key) for key in self.order]

    def rows(self) -> list[list[Any]]:
        """Return the numbers, one list per row."""
        return [[row.get(key) for key in self.order] for row in self.figure["rows"]]


def _layers(figure: Figure, names: _Fields, looks: Mapping[str, Look]) -> list[Spec]:
    if figure["kind"] == "cells":
        return [_cells(figure, names)]
    x, y = _channel(figure, names, "x"), _channel(figure, names, "y")
    colour, shape, dash = _series(figure, names, looks)
    along, picked = _along(figure), "series" in names
    offset = _offset(figure, names, "y" if along == "x" else "x")
    base = {"x": x, "y": y, **offset}
    faded = {"condition": {"param": "picked", "value": 1}, "value": 0.12} if picked else {"value": 1}
    interval = _interval(figure, names, along, base, colour, picked)
    shown = {**base, **colour, **shape, "opacity": faded}
    size = 60 if figure["kind"] == "points" else 34
    points = {"mark": {"type": "point", "filled": True, "size": size, "strokeWidth": 1.6}, "encoding": shown}
    if figure["kind"] == "bars":
        mark: Spec = {"mark": {"type": "bar", "orient": "vertical" if along == "y" else "horizontal"}}
        drawn = [{**mark, "encoding": {**_on_floor(figure, names, along, base), **colour, "opacity": faded}}]
    elif figure["kind"] == "lines":
        line = {"type": "line", "strokeWidth": 1.8, "clip": True}
        thinned = {**_thin_markers(names), **points}
        drawn = [{"mark": line, "encoding": {**base, **colour, **dash, "opacity": faded}}, thinned]
    else:
        drawn = [points]
    touched = {"mark": {"type": "point", "size": 260, "opacity": 0, "filled": True, "tooltip": True}, "encoding": base}
    layers = [*interval, *drawn, touched] if figure["kind"] != "bars" else [*drawn, *interval]
    if figure["kind"] == "bars":
        layers[0]["mark"]["tooltip"] = True
    return _with_params(layers, figure, names, picked)


def _thin_markers(names: _Fields) -> Spec:
    """Return a transform that keeps about eight markers of a long line."""
    few = math.ceil(len(names.distinct("x")) / 8)
    if few < 3:
        return {}
    groups = [names[part] for part in ("series", "panel") if part in names]
    counted = {"window": [{"op": "row_number", "as": "at"}], "groupby": groups, "sort": [{"field": names["x"]}]}
    return {"transform": [counted, {"filter": f"datum.at % {few} == 1"}]}


def _with_params(layers: list[Spec], figure: Figure, names: _Fields, picked: bool) -> list[Spec]:
    params: list[Spec] = []
    if picked:
        select = {"type": "point", "fields": [names["series"]]}
        params.append({"name": "picked", "select": select, "bind": "legend"})
    if _zoomed(figure, names):
        channels = [part for part in ("x", "y") if figure[part]["scale"] != "category"]
        select = {
            "type": "interval", "encodings": channels, "zoom": "wheel![event.ctrlKey]",
            "translate": "[mousedown, window:mouseup] > window:mousemove!",
        }  # fmt: skip
        params.append({"name": "zoom", "select": select, "bind": "scales"})
    first = next(index for index, layer in enumerate(layers) if layer["mark"]["type"] in ("line", "point", "bar"))
    layers[first] = {"params": params, **layers[first]} if params else layers[first]
    return layers


def _zoomed(figure: Figure, names: _Fields) -> list[tuple[str, str]]:
    if figure["kind"] not in ("lines", "points"):
        return []
    return [(part, names[part]) for part in ("x", "y") if figure[part]["scale"] != "category"]


def _channel(figure: Figure, names: _Fields, part: str) -> Spec:
    axis = figure[part]
    channel: Spec = {"field": names[part], "title": with_unit(axis)}
    if axis["scale"] == "category":
        grid = {"grid": figure["kind"] in ("points", "lines") and part == "y"}
        return {
            **channel,
            "type": "nominal",
            "sort": names.distinct(part),
            "axis": {"labelAngle": _angle(names, part), **grid},
        }
    if axis["scale"] == "log":
        return {**channel, "type": "quantitative", **_log_axis(names.numbers(part) + _ends(figure, names, part))}
    stacked = {"stack": None} if figure["kind"] == "bars" and part == _along(figure) else {}
    whole = all(float(value).is_integer() for value in names.numbers(part))
    ticks: Spec = {"tickMinStep": 1} if whole else {}
    if figure["kind"] == "lines" and part == "x" and len(set(names.numbers(part))) <= 8:
        ticks |= {"values": sorted(set(names.numbers(part))), "format": ".6~g"}
    return {
        **channel,
        "type": "quantitative",
        "scale": {"zero": figure["kind"] == "bars" or bool(axis.get("zero"))},
        "axis": ticks,
        **stacked,
    }


def _ends(figure: Figure, names: _Fields, part: str) -> list[float]:
    return names.numbers("low") + names.numbers("high") if part == _along(figure) else []


def _along(figure: Figure) -> str:
    """Return the axis of the intervals: y, or x if y is categorical."""
    return "x" if figure["y"]["scale"] == "category" and figure["x"]["scale"] != "category" else "y"


def _log_axis(numbers: Sequence[float]) -> Spec:
    drawn = sorted({value for value in numbers if value > 0}) or [1, 10]
    low, high = drawn[0], drawn[-1]
    wide = (high / low) ** 0.04 if high > low else 2
    axis: Spec = {"format": ".3~s" if low >= 1 else ",.3~r" if low >= 1e-4 and high < 1e6 else ".3~g"}
    if len(drawn) <= 8:
        axis["values"] = drawn
    return {"scale": {"type": "log", "domain": [low / wide, high * wide], "nice": False}, "axis": axis}


def _angle(names: _Fields, part: str) -> int:
    words = [str(value) for value in names.distinct(part)]
    crowded = sum(map(len, words)) > (70 if "panel" not in names else 16)
    return -35 if part == "x" and crowded else 0


def _series(figure: Figure, names: _Fields, looks: Mapping[str, Look]) -> tuple[Spec, Spec, Spec]:
    if "series" not in names:
        single = numbered(0)
        return {"color": {"value": single.colour}}, {"shape": {"value": single.shape}}, {}
    values = names.distinct("series")
    chosen = _chosen(values, looks)
    on_axis = names["series"] in (names[part] for part in ("x", "y") if figure[part]["scale"] == "category")
    legend = None if on_axis else {"orient": "bottom", "title": None, "columns": 4, "symbolStrokeWidth": 1.8}
    channel = {"field": names["series"], "type": "nominal", "legend": legend}

    def scaled(look: Any) -> Spec:
        return {**channel, "scale": {"domain": values, "range": [look(chosen[value]) for value in values]}}

    return (
        {"color": scaled(lambda look: look.colour)},
        {"shape": scaled(lambda look: look.shape)},
        {"strokeDash": scaled(lambda look: look.dash)},
    )


def _chosen(values: Sequence[Any], looks: Mapping[str, Look]) -> dict[Any, Look]:
    """Return the looks of a figure's series: those of encodings, and unused ones for other names."""
    known = {value: looks[value] for value in values if value in looks}
    free = (look for place in range(90) if (look := numbered(place)) not in known.values())
    return {value: known[value] if value in known else next(free) for value in values}


def _offset(figure: Figure, names: _Fields, part: str) -> Spec:
    """Return an offset channel that places the series of a category side by side."""
    if "series" not in names or figure[part]["scale"] != "category" or figure["kind"] == "lines":
        return {}
    if names["series"] == names[part]:
        return {}
    return {f"{part}Offset": {"field": names["series"], "type": "nominal", "sort": names.distinct("series")}}


def _interval(figure: Figure, names: _Fields, along: str, base: Spec, colour: Spec, picked: bool) -> list[Spec]:
    if "low" not in names or "high" not in names:
        return []
    ends = {along: {**base[along], "field": names["low"]}, f"{along}2": {"field": names["high"]}}
    area = figure["kind"] == "lines" and figure["x"]["scale"] != "category"
    strong = 0.14 if area else 0.8
    faded = {"condition": {"param": "picked", "value": strong}, "value": 0.03} if picked else {"value": strong}
    shown = {**base, **ends, **colour, "opacity": faded}
    if area:
        return [{"mark": {"type": "area", "clip": True}, "encoding": shown}]
    if figure["kind"] == "bars":
        shown |= {"color": {"value": INK}}
    return [{"mark": {"type": "rule", "strokeWidth": 1.6, "clip": True}, "encoding": shown}]


def _on_floor(figure: Figure, names: _Fields, along: str, base: Spec) -> Spec:
    """Set the baseline of bars on a logarithmic axis, which has no zero, to a power of ten below all values."""
    if figure[along]["scale"] != "log":
        return base
    numbers = [value for part in (along, "low") for value in names.numbers(part) if value > 0]
    floor = 10.0 ** math.floor(math.log10(min(numbers)) - 0.01) if numbers else 1.0
    scale = {**base[along]["scale"], "domainMin": floor, "nice": False}
    return {**base, along: {**base[along], "scale": scale}, f"{along}2": {"datum": floor}}


def _cells(figure: Figure, names: _Fields) -> Spec:
    channels = {}
    for part in ("x", "y"):
        axis, values = figure[part], names.distinct(part)
        if axis["scale"] != "category":
            values = sorted((value for value in values if value is not None), reverse=part == "y")
        shown: Spec = {"labelAngle": 0, "grid": False, "ticks": False, "domain": False}
        if axis["scale"] == "category":
            shown |= {"labelAngle": _angle(names, part), "labelOverlap": False}
        else:
            shown |= {"format": ".4~g"}
        channels[part] = {"field": names[part], "type": "ordinal", "sort": values, "title": with_unit(axis),
                          "axis": shown, "scale": {"padding": 0}}  # fmt: skip
    colour = figure["colour"]
    channel: Spec = {"field": names["colour"], "title": with_unit(colour)}
    if colour["scale"] == "category":
        values = names.distinct("colour")
        ranges = [numbered(place).colour for place in range(len(values))]
        channel |= {"type": "nominal", "scale": {"domain": values, "range": ranges}, "legend": {"orient": "bottom"}}
    else:
        channel |= {"type": "quantitative", "scale": _colour_scale(names.numbers("colour"), colour["scale"])}
        channel |= {"legend": {"orient": "right", "gradientLength": 140}}
    return {"mark": {"type": "rect", "tooltip": True}, "encoding": {**channels, "color": channel}}


def _colour_scale(numbers: Sequence[float], scale: str) -> Spec:
    low, high = min(numbers, default=0), max(numbers, default=1)
    if scale == "log":
        return {"type": "log", "scheme": "viridis"}
    if low < 0 < high:
        end = max(-low, high)
        return {"scheme": "blueorange", "domain": [-end, end]}
    return {"scheme": "viridis", "zero": False}


def _height(figure: Figure, names: _Fields, panel: bool) -> float:
    if figure["kind"] == "cells":
        across, down = max(1, len(names.distinct("x"))), max(1, len(names.distinct("y")))
        width = _panel_width(figure, min(3, len(names.distinct("panel")))) if panel else 480
        named = 17 * down if figure["y"]["scale"] == "category" else 60  # every name is shown
        return max(named, min(420, round(width * down / across)))
    if figure["y"]["scale"] == "category":
        lanes = len(names.distinct("series")) if _offset(figure, names, "y") else 1
        return max(60, len(names.distinct("y")) * max(24, 9 * lanes))
    return PANEL_HEIGHT if panel else HEIGHT


def _panel_width(figure: Figure, across: int) -> int:
    beside = 80 if figure["kind"] == "cells" else 45
    return max(80, round((WIDTH - beside) / across - (50 if figure["kind"] == "cells" else 18)))


def _for_inlining(text: str, name: str) -> str:
    """Shorten numbers, and make ids deterministic and unique within a page."""
    ids = {found: f"{name}-{index}" for index, found in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]+)"', text)))}
    parts = re.split(r"(>[^<]+</text>)", text)
    return "".join(part if part.endswith("</text>") else _short_markup(part, ids) for part in parts)


def _short_markup(markup: str, ids: Mapping[str, str]) -> str:
    markup = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{ids[found[1]]}"', markup)
    markup = re.sub(r'(href="#|url\(#)([^")]+)', lambda found: found[1] + ids.get(found[2], found[2]), markup)
    return re.sub(r"(\d\.\d\d)\d+", r"\1", markup)
