"""Figures of benchmark results: the time of a step, and how it grows."""

from dataclasses import asdict
from typing import Any

from torchrope.lab.report.looks import Look, numbered
from torchrope.lab.report.plots import plot, svg
from torchrope.lab.report.speed import OURS, setting_line
from torchrope.lab.results import Axis, Figure

_STEP = Axis("milliseconds", "Milliseconds per step, forward and backward", scale="log")


def draw(figure: Figure) -> str:
    """Draw a figure as SVG.

    Raises:
        ImportError: vl-convert-python is not installed.
    """
    return svg(plot(asdict(figure), {OURS: numbered(0), "reference": Look(-1, "x", "--")}), figure.name)


def step_times(bench: dict[str, Any]) -> Figure:
    """Milliseconds of a step, a row per encoding and a mark for each implementation that was measured."""
    encodings = bench["encodings"]
    own = {compared["encoding"] for compared in encodings}
    rows = [
        {"encoding": compared["encoding"], "implementation": timed["name"], **_quartiles(timed["milliseconds"])}
        for compared in encodings
        for timed in compared["timed"]
        if timed["name"] not in own
    ]
    return Figure(
        name="bench",
        kind="points",
        title="Time of a step",
        caption=f"Bars are quartiles. {setting_line(bench)}.",
        alt=f"Milliseconds per step for {', '.join(compared['encoding'] for compared in encodings)}.",
        x=_STEP,
        y=Axis("encoding", "Encoding", scale="category"),
        rows=rows,
        series="implementation",
        low="low",
        high="high",
    )


def growth(suite: dict[str, Any], over: str) -> Figure | None:
    """The time of a step over tokens or batch, both axes logarithmic; None where it was not measured."""
    grown = [entry for entry in suite["growth"] if entry["over"] == over]
    if not grown:
        return None
    rows = [
        {"encoding": f"{entry['encoding']}, exponent {entry['slope']:.2f}", over: size, **_quartiles(times)}
        for entry in grown
        for size, times in zip(entry["sizes"], entry["milliseconds"], strict=True)
    ]
    sizes = grown[0]["sizes"]
    return Figure(
        name=f"growth-{over}",
        kind="lines",
        title=f"Time over {over}",
        caption="Both axes are logarithmic: a straight line of slope 1 is linear growth.",
        alt=f"Milliseconds per step over {over} {sizes[0]} to {sizes[-1]}.",
        x=Axis(over, over.capitalize(), scale="log"),
        y=_STEP,
        rows=rows,
        series="encoding",
        low="low",
        high="high",
    )


def _quartiles(times: dict[str, float]) -> dict[str, float]:
    return {"milliseconds": times["median"], "low": times["low"], "high": times["high"]}
