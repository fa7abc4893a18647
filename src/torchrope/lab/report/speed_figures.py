"""Figures of benchmark results: time of a step, and how it grows."""

from typing import Any

from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from torchrope.lab.report.figures import Drawing, canvas, finish, house_style, plain_log
from torchrope.lab.report.looks import COLOURS, MARKERS, PLAIN
from torchrope.lab.report.speed import OURS, setting_line


def step_times(bench: dict[str, Any]) -> Drawing:
    """Draw milliseconds of a step, a line per encoding and a mark for everybody who did it."""
    encodings = bench["encodings"]
    own = {compared["encoding"] for compared in encodings}
    names = dict.fromkeys(e["name"] for compared in encodings for e in compared["timed"] if e["name"] not in own)
    looks = {name: _look(index, name) for index, name in enumerate(names)}
    with house_style():
        figure, axes = canvas(height=1.9 + 0.34 * len(encodings))
        drawn = set()
        for y, compared in enumerate(encodings):
            for entry in compared["timed"]:
                name, times = entry["name"], entry["milliseconds"]
                if name in own:
                    continue
                label = None if name in drawn else name
                drawn.add(name)
                axes.plot([times["low"], times["high"]], [y, y], color=looks[name]["color"], linewidth=1.2, alpha=0.6)
                axes.plot([times["median"]], [y], linestyle="none", label=label, **looks[name])
        axes.set_yticks(range(len(encodings)), [compared["encoding"] for compared in encodings])
        axes.set(xlabel="milliseconds per step, forward and backward", ylim=(len(encodings) - 0.5, -0.5))
        plain_log(axes, "x")
        svg = finish(figure, "bench", legend_columns=2)
    return Drawing(
        name="bench",
        title="Time of a step",
        caption=f"Bars are quartiles. {setting_line(bench)}.",
        alt=f"Dot chart of milliseconds per step for {', '.join(c['encoding'] for c in encodings)}.",
        svg=svg,
    )


def growth(suite: dict[str, Any], over: str) -> Drawing | None:
    """Draw the time of a step over tokens or batch, both axes logarithmic; None where it was not measured."""
    grown = [entry for entry in suite["growth"] if entry["over"] == over]
    if not grown:
        return None
    sizes = grown[0]["sizes"]
    with house_style():
        figure, axes = canvas()
        for index, entry in enumerate(grown):
            medians = [at["median"] for at in entry["milliseconds"]]
            look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            axes.plot(entry["sizes"], medians, label=f"{entry['encoding']}, exponent {entry['slope']:.2f}", **look)
        axes.set(xlabel=over, ylabel="milliseconds per step")
        plain_log(axes, "y")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_major_formatter(FixedFormatter([str(size) for size in sizes]))
        axes.xaxis.set_minor_locator(NullLocator())
        svg = finish(figure, f"growth-{over}", legend_columns=2)
    return Drawing(
        name=f"growth-{over}",
        title=f"Time over {over}",
        caption="Both axes are logarithmic: a straight line of slope 1 is linear growth.",
        alt=f"Line chart of milliseconds per step over {over} {sizes[0]} to {sizes[-1]}.",
        svg=svg,
    )


def _look(index: int, name: str) -> dict[str, Any]:
    if name == OURS:
        return {"color": COLOURS[0], "marker": "o", "markersize": 7}
    if name == "reference":
        return {"color": PLAIN, "marker": "x", "markersize": 6}
    return {"color": COLOURS[1 + index % (len(COLOURS) - 1)], "marker": MARKERS[1 + index % (len(MARKERS) - 1)]}
