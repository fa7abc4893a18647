"""Draw the figures of a report as SVG text: no pyplot, no dates, the same bytes for the same results."""

import io
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import Bbox

from torchrope.lab.report.load import Results, ranked
from torchrope.lab.report.looks import encoding_looks
from torchrope.lab.report.tables import percent, significant, size, tested_sizes

STYLE: dict[str, Any] = {
    "axes.edgecolor": "#8a8a8a",
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "grid.color": "#e6e6e6",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "torchrope",
    # A dollar sign in a name is a dollar sign.
    "text.parse_math": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}

NAMES = ["accuracy-curves", "loss-curves", "cost", "resolutions", "shuffling"]
WIDTH, HEIGHT = 4.8, 4.0
FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"

Look = dict[str, Any]


@dataclass(frozen=True)
class Drawing:
    """A figure of the report: SVG, and the words that stand beside it or in its place."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str


def all_drawings(results: Results) -> list[Drawing]:
    """Draw every figure that the results have numbers for."""
    draw = [accuracy_curves, loss_curves, cost, resolutions, shuffling]
    return [drawing for figure in draw if (drawing := figure(results)) is not None]


def accuracy_curves(results: Results) -> Drawing | None:
    """Draw validation accuracy after every epoch, one line per encoding."""
    figure = _curves(results, "accuracy-curves", "val_top1", "validation top-1, %", scale=100)
    if figure is None:
        return None
    return Drawing(
        name="accuracy-curves",
        title="Accuracy while training",
        caption=f"Validation accuracy after every epoch.{_band_caption(results)}",
        alt=f"Line chart of validation top-1 over epochs. Top-1 of the results table: {_tops(results)}.",
        svg=figure,
    )


def loss_curves(results: Results) -> Drawing | None:
    """Draw validation loss after every epoch, on a logarithmic scale where it falls far."""
    figure = _curves(results, "loss-curves", "val_loss", "validation loss", scale=1)
    if figure is None:
        return None
    return Drawing(
        name="loss-curves",
        title="Loss while training",
        caption=f"Validation loss after every epoch.{_band_caption(results)}",
        alt=f"Line chart of validation loss over epochs for {_names(results)}.",
        svg=figure,
    )


def resolutions(results: Results) -> Drawing | None:
    """Draw accuracy at input sizes that were not trained on."""
    sizes = tested_sizes(results)
    if len(sizes) < 2:
        return None
    with house_style():
        figure, axes = canvas()
        for encoding, look in _looks(results):
            means = {tuple(at["size"]): at.get("mean") for at in encoding.get("resolutions") or []}
            tested = [(x, means.get(tuple(lengths))) for x, lengths in enumerate(sizes)]
            points = [(x, 100 * mean) for x, mean in tested if mean is not None]
            axes.plot(*_columns(points), label=encoding["name"], **look)
        axes.set(xlabel="input size at test time", ylabel="top-1, %")
        axes.set_xticks(range(len(sizes)), [size(lengths) for lengths in sizes])
        _mark_training_size(axes, sizes, results["data"]["input_size"])
        svg = finish(figure, "resolutions")
    return Drawing(
        name="resolutions",
        title="Accuracy at other input sizes",
        caption="The trained models, tested on smaller and larger inputs without further training.",
        alt=f"Line chart of top-1 at input sizes {', '.join(map(size, sizes))} for {_names(results)}.",
        svg=svg,
    )


def cost(results: Results) -> Drawing | None:
    """Draw accuracy, with its interval, against the time of a training step."""
    timed = [pair for pair in _looks(results) if (pair[0].get("cost") or {}).get("step_seconds")]
    if not timed:
        return None
    with house_style():
        figure, axes = canvas(height=4.4)
        points = [_point_with_interval(axes, encoding, {**look, "linestyle": "none"}) for encoding, look in timed]
        _time_axis(axes, [x for x, _ in points])
        axes.set(xlabel="milliseconds per training step", ylabel="top-1, %")
        labels = [(encoding["name"], look["color"]) for encoding, look in timed]
        _label_points(figure, axes, points, labels)
        svg = finish(figure, "cost", legend=False)
    return Drawing(
        name="cost",
        title="Accuracy against cost",
        caption="Up is more accurate, left is cheaper. Bars are 95 % intervals over the validation examples.",
        alt=f"Scatter chart of top-1 against milliseconds per training step: {_costs(timed)}.",
        svg=svg,
    )


def shuffling(results: Results) -> Drawing | None:
    """Draw accuracy before and after the tokens of every input are shuffled, with chance."""
    tested = [pair for pair in _looks(results) if _shuffled(pair[0]) is not None]
    if not tested:
        return None
    chance = 100 * results["data"]["chance"]
    with house_style():
        figure, axes = canvas(height=1.5 + 0.3 * len(tested))
        for y, (encoding, look) in enumerate(tested):
            before, after = 100 * encoding["top1"]["mean"], 100 * _shuffled(encoding)
            axes.plot([after, before], [y, y], color=look["color"], linewidth=1.6)
            axes.plot([after], [y], "o", color=look["color"], markersize=8, markerfacecolor="white")
            axes.plot([before], [y], "o", color=look["color"], markersize=5.5)
        axes.axvline(chance, color="#444444", linewidth=1, linestyle="--", zorder=1)
        axes.annotate(
            "chance", (chance, 1), (3, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
            fontsize=9, color="#444444",
        )  # fmt: skip
        axes.set_yticks(range(len(tested)), [encoding["name"] for encoding, _ in tested])
        axes.set(xlabel="top-1, %", xlim=(0, 103), ylim=(len(tested) - 0.4, -0.6))
        axes.grid(axis="y", visible=False)
        svg = finish(figure, "shuffling", legend=False)
    return Drawing(
        name="shuffling",
        title="What is lost when tokens are shuffled",
        caption="Filled: the validation inputs as they are. Hollow: the same with their tokens shuffled.",
        alt=f"Accuracy before and after shuffling, chance at {percent(results['data']['chance'])} %: "
        + "; ".join(
            f"{encoding['name']} {percent(encoding['top1']['mean'])} to {percent(_shuffled(encoding))}"
            for encoding, _ in tested
        )
        + ".",
        svg=svg,
    )


def looks(results: Results) -> dict[str, Look]:
    """Give every encoding one colour, marker and dash for all figures; `none` is always grey."""
    given = encoding_looks([encoding["name"] for encoding in results["encodings"]])
    return {
        name: {"color": look.colour, "marker": look.marker, "linestyle": look.linestyle} for name, look in given.items()
    }


def _looks(results: Results) -> list[tuple[dict[str, Any], Look]]:
    by_name = looks(results)
    return [(encoding, by_name[encoding["name"]]) for _, encoding in ranked(results)]


def _curves(results: Results, name: str, key: str, ylabel: str, scale: float) -> str | None:
    curves = [(encoding, look, _over_epochs(encoding, key, scale)) for encoding, look in _looks(results)]
    drawn = [(encoding, look, points) for encoding, look, points in curves if points]
    if not drawn:
        return None
    with house_style():
        figure, axes = canvas()
        for order, (encoding, look, points) in enumerate(drawn):
            epochs, means, lows, highs = _columns(points)
            # Markers of neighbouring lines fall on different epochs.
            every = max(1, len(points) // 6)
            axes.plot(
                epochs, means, label=encoding["name"], markevery=(order % every, every),
                zorder=3 - order / 100, **look,
            )  # fmt: skip
            if lows != highs:
                axes.fill_between(epochs, lows, highs, color=look["color"], alpha=0.15, linewidth=0)
        axes.set(xlabel="epoch", ylabel=ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        values = [value for _, _, points in drawn for point in points for value in point[1:]]
        if key == "val_loss" and max(values) > 3 * min(values) > 0:
            plain_log(axes, "y")
        return finish(figure, name)


def _over_epochs(encoding: dict[str, Any], key: str, scale: float) -> list[tuple[float, ...]]:
    by_epoch: dict[int, list[float]] = defaultdict(list)
    for seed in encoding.get("seeds") or []:
        for point in seed.get("curve") or []:
            if point.get(key) is not None:
                by_epoch[point["epoch"]].append(scale * point[key])
    return [(epoch, sum(v) / len(v), min(v), max(v)) for epoch, v in sorted(by_epoch.items())]


def _mark_training_size(axes: Axes, sizes: list[list[int]], trained: list[int]) -> None:
    if trained in sizes:
        axes.axvline(sizes.index(trained), color="#444444", linewidth=1, linestyle="--", zorder=1)
        axes.annotate(
            "trained at", (sizes.index(trained), 1), (0, 3), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", fontsize=9, color="#444444",
        )  # fmt: skip


def _point_with_interval(axes: Axes, encoding: dict[str, Any], look: Look) -> tuple[float, float]:
    x, y = 1e3 * encoding["cost"]["step_seconds"], 100 * encoding["top1"]["mean"]
    low, high = (100 * end for end in encoding["top1"].get("interval") or (y / 100, y / 100))
    axes.plot([x, x], [low, high], color=look["color"], linewidth=1.2, alpha=0.6)
    axes.plot([x], [y], **{**look, "markersize": 7})
    return x, y


def _time_axis(axes: Axes, times: list[float]) -> None:
    low, high = min(times), max(times)
    if high < 3 * low:
        axes.set_xlim(low - 0.12 * (high - low or low), high + 0.3 * (high - low or low))
    else:
        axes.set_xlim(low / 1.2, high * 1.7)
        plain_log(axes, "x")


def plain_log(axes: Axes, direction: str) -> None:
    """Make an axis logarithmic, with ticks at 1, 2, 3, 5 and their tenfolds written without exponents."""
    axes.set(**{f"{direction}scale": "log"})
    axis = {"x": axes.xaxis, "y": axes.yaxis}[direction]
    low, high = axis.get_view_interval()
    steps = [digit * 10.0**power for power in range(-6, 9) for digit in (1, 2, 3, 5)]
    axis.set_major_locator(FixedLocator([step for step in steps if low <= step <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _label_points(figure: Figure, axes: Axes, points: list[tuple[float, float]], labels: list[tuple[str, str]]) -> None:
    """Write every label beside its point, at the nearest place that covers nothing else."""
    figure.draw_without_rendering()
    pixels = axes.transData.transform(points)
    taken = [line.get_window_extent() for line in axes.lines]
    # Labels stand to the right where they can, so the rightmost point chooses first.
    for index in sorted(range(len(points)), key=lambda i: -pixels[i][0]):
        text, colour = labels[index]
        note = axes.annotate(
            text, points[index], (0, 0), textcoords="offset points", va="bottom", fontsize=9, zorder=4,
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        # A label never resizes the axes, else the places measured here would move.
        note.set_in_layout(False)
        extent = Text.get_window_extent(note)
        x, y = pixels[index]
        box = Bbox.from_bounds(x, y, extent.width, extent.height)
        offset = _free_offset(box, taken, axes.bbox)
        note.set_position((72 / figure.dpi * offset[0], 72 / figure.dpi * offset[1]))
        # A label that touches its point needs no line to it.
        if note.arrow_patch is not None:
            note.arrow_patch.set_visible(_distance(box.translated(*offset), x, y) > 12)
        taken.append(box.translated(*offset))


def _free_offset(box: Bbox, taken: list[Bbox], within: Bbox) -> tuple[float, float]:
    """Choose the pixel offset nearest to a point at which its label overlaps least."""
    width, height = box.width, box.height
    places = [
        offset
        for reach in range(10, 130, 6)
        for offset in (
            (reach, -height / 2 + 2), (reach, reach - 6), (reach, -height - reach + 10), (-width / 2, reach),
            (-width / 2, -height - reach), (-width - reach, -height / 2 + 2), (-width - reach, reach - 6),
            (-width - reach, -height - reach + 10),
        )
    ]  # fmt: skip

    def overlap(offset: tuple[float, float]) -> float:
        moved = box.translated(*offset)
        covered = sum(_shared_area(moved, other) for other in taken)
        return covered + width * height - _shared_area(moved, within)

    return min(places, key=lambda offset: round(overlap(offset), 3))


def _distance(box: Bbox, x: float, y: float) -> float:
    return math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))


def _shared_area(one: Bbox, other: Bbox) -> float:
    shared = Bbox.intersection(one, other)
    return shared.width * shared.height if shared is not None else 0.0


def house_style() -> Any:
    """The look of every figure, as a context."""
    return style.context(["default", STYLE])


def canvas(height: float = HEIGHT) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def finish(figure: Figure, name: str, legend: bool = True, legend_columns: int = 3) -> str:
    """Write a figure as SVG text whose ids begin with its name."""
    if legend:
        figure.legend(loc="outside lower center", ncols=legend_columns, columnspacing=1.2)
    text = io.StringIO()
    # Without metadata the file holds no date and no outside address.
    figure.savefig(text, format="svg", metadata=dict.fromkeys(["Date", "Creator", "Format", "Type"]))
    return _for_inlining(text.getvalue(), name)


def _for_inlining(svg: str, name: str) -> str:
    """Drop the prolog, shorten numbers, and make ids unique on a page of several figures."""
    svg = svg[svg.index("<svg") :].strip()
    parts = re.split(r"(>[^<]+</text>)", svg)
    return "".join(part if part.endswith("</text>") else _short_markup(part, name) for part in parts)


def _short_markup(markup: str, name: str) -> str:
    markup = re.sub(r'\bid="', f'id="{name}-', markup)
    markup = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", markup)
    markup = markup.replace("font-family: 'DejaVu Sans'", f"font-family: {FONTS}")
    return re.sub(r"(\d\.\d\d)\d+", r"\1", markup)


def _columns(rows: Sequence[tuple[float, ...]]) -> list[list[float]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[], []]


def _shuffled(encoding: dict[str, Any]) -> Any:
    return (encoding.get("shuffled_top1") or {}).get("mean")


def _band_caption(results: Results) -> str:
    several = any(len(encoding.get("seeds") or []) > 1 for encoding in results["encodings"])
    return " Lines are means over seeds; bands reach from the lowest to the highest seed." if several else ""


def _names(results: Results) -> str:
    return ", ".join(encoding["name"] for _, encoding in ranked(results))


def _tops(results: Results) -> str:
    return ", ".join(f"{e['name']} {percent(e['top1']['mean'])} %" for _, e in ranked(results))


def _costs(timed: list[tuple[dict[str, Any], Look]]) -> str:
    return "; ".join(
        f"{e['name']} {percent(e['top1']['mean'])} % at {significant(1e3 * e['cost']['step_seconds'])} ms"
        for e, _ in timed
    )
