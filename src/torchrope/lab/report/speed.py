"""Words and tables of benchmark results: the terminal, and docs/speed.md between its markers.

Results are what `torchrope bench` and `benchmarks/cpu.py` write, read as JSON.
"""

from typing import Any

from torchrope.lab.report.readme import insert_between_markers
from torchrope.lab.report.tables import MISSING, aligned_table, markdown_table, significant

OURS = "torchrope"
REACHED, SHORT, BEYOND, UNMEASURED = "reached", "NOT reached", "reached, and the further goal", "not measured"
NOTHING_YET = "Nothing measured yet: `make bench` measures and writes this."

_COLUMNS = {"reference": "× reference", "compiled reference": "× compiled"}


def terminal_table(bench: dict[str, Any]) -> str:
    """Lay a comparison out for a terminal: how many times as fast torchrope is as each of the others."""
    headings, rows = _bench_table(bench)
    return aligned_table(headings, rows, [False, False] + [True] * (len(headings) - 2))


def bench_notes(bench: dict[str, Any]) -> list[str]:
    """What the table leaves out, a line each."""
    reasons: dict[str, set[str]] = {}
    for compared in bench["encodings"]:
        for name, reason in compared["left_out"].items():
            reasons.setdefault(name, set()).add(reason)
    absent = sorted(name for name in reasons if name not in _names(bench))
    notes = [f"{name} was not measured: {'; '.join(sorted(reasons[name]))}" for name in absent]
    return notes + [f"{name} was not measured: {reason}" for name, reason in bench["not_fitting"].items()]


def setting_line(bench: dict[str, Any]) -> str:
    """Shape, threads, rounds and machine in one line."""
    source = bench["source"]
    return (
        f"{_shape(bench['setting'])}, tokens on {_lattice(bench)}; threads: {source['threads']}; median of "
        f"{bench['rounds']} rounds; {_machine(source)}"
    )


def render_docs(text: str, suite: dict[str, Any] | None) -> str:
    """Put the tables of a suite between the markers of docs/speed.md; a line instead where there is none.

    Raises:
        ValueError: the text does not hold each marker once.
    """
    blocks = {name: NOTHING_YET if suite is None else write(suite) for name, write in _BLOCKS.items()}
    for name, block in blocks.items():
        text = insert_between_markers(text, name, block)
    return text


def render_data_docs(text: str, suite: dict[str, Any] | None) -> str:
    """Put the table of how fast data comes between the markers of docs/data.md; a line instead where there is none."""
    nothing = "Nothing measured yet: `python benchmarks/data.py` measures and writes this."
    return insert_between_markers(text, "loading", nothing if suite is None else _loading_block(suite))


def verdict(row: dict[str, Any]) -> str:
    """Whether a promise was kept, by the median."""
    if row["value"] is None:
        return f"{UNMEASURED} ({row['why_not']})"
    median, sign = row["value"]["median"], -1 if row["at_most"] else 1

    def met(goal: float | None) -> bool:
        return goal is not None and sign * median >= sign * goal

    must, reach = row["must"], row["reach"]
    if must is None:
        return REACHED if met(reach) else SHORT
    if not met(must):
        return SHORT
    return BEYOND if met(reach) else REACHED


def _rows_block(suite: dict[str, Any]) -> str:
    headings = ["Row", "Measured", "Quartiles", "Must", "Reach for", "Verdict"]
    rows = [
        [row["what"], *_value(row), _goal(row, row["must"]), _goal(row, row["reach"]), verdict(row)]
        for row in suite["rows"]
    ]
    table = markdown_table(headings, rows, [False, True, True, True, True, False])
    return f"{table}\n\n{_provenance(suite['bench'])}"


def _bench_block(suite: dict[str, Any]) -> str:
    headings, rows = _bench_table(suite["bench"])
    table = markdown_table(headings, rows, [False, False] + [True] * (len(headings) - 2))
    notes = "".join(f"\n- {note}" for note in bench_notes(suite["bench"]))
    return f"{table}\n{notes}\n\n![Time of a step](speed/bench.svg)"


def _training_block(suite: dict[str, Any]) -> str:
    training = suite["training"]
    rows = [
        [o["encoding"], _number(o["milliseconds"]["median"]), *_percents(o["share"])] for o in training["overheads"]
    ]
    table = markdown_table(["Encoding", "ms", "Over none", "Quartiles"], rows, [False, True, True, True])
    model = (
        f"A ViT of {training['depth']} layers, {training['dim']} channels and {training['num_heads']} heads on images "
        f"{training['input_size']} wide, patch {training['patch_size']}, batch {training['batch']}; forward, backward "
        f"and AdamW, median of {training['rounds']} rounds, one step of each encoding in turn."
    )
    return f"{model}\n\n{table}"


def _memory_block(suite: dict[str, Any]) -> str:
    headings = ["Encoding", "Tokens", "Batch", "Step", "Peak MB", "Rotation MB", "Outputs MB", "Peak / rotation"]
    rows = [
        [
            peak["encoding"],
            str(peak["setting"]["tokens"]),
            str(peak["setting"]["batch"]),
            "training" if peak["training"] else "inference",
            *(_number(peak[key] / 1e6) for key in ("peak_bytes", "rotation_bytes", "output_bytes")),
            f"{peak['peak_bytes'] / peak['rotation_bytes']:.2f}×",
        ]
        for peak in suite["memory"]
    ]
    return markdown_table(headings, rows, [False, True, True, False, True, True, True, True])


def _growth_block(suite: dict[str, Any]) -> str:
    parts = []
    for over in ("tokens", "batch"):
        grown = [growth for growth in suite["growth"] if growth["over"] == over]
        if not grown:
            continue
        sizes = grown[0]["sizes"]
        rows = [
            [growth["encoding"], *(_number(at["median"]) for at in growth["milliseconds"]), f"{growth['slope']:.2f}"]
            for growth in grown
        ]
        headings = [f"ms at {over}", *map(str, sizes), "exponent"]
        parts.append(markdown_table(headings, rows, [False] + [True] * (len(sizes) + 1)))
        parts.append(f"![Time of a step over {over}](speed/growth-{over}.svg)")
    return "\n\n".join(parts)


def _loading_block(suite: dict[str, Any]) -> str:
    headings = ["Data", "Shape", "Changed by", "Processes", "Examples/s", "Quartiles", "A GPU takes", "GPUs fed"]
    rows = []
    for row in suite["rows"]:
        low, median, high = (row["examples_per_second"][key] for key in ("low", "median", "high"))
        taken = row["taken_per_second"]
        rows.append(
            [
                row["data"],
                "×".join(map(str, row["shape"])),
                row["augment"],
                str(row["workers"]),
                f"{median:,.0f}",
                f"{low:,.0f} to {high:,.0f}",
                f"{taken:,.0f}",
                _number(median / taken),
            ]
        )
    table = markdown_table(headings, rows, [False, False, False, True, True, True, True, True])
    source = suite["source"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    told = (
        f"Measured on the CPU, with the start of loading processes, median of {suite['rounds']} epochs; threads: "
        f"{source['threads']}; {_machine(source)}. What a GPU takes is computed: {suite['utilisation']:.0%} of "
        f"{suite['peak_tflops']:g} TFLOP/s (H100 or H200, bfloat16) over three times the forward operations of the "
        f"recipe's ViT-B. {versions}, torchrope {source['torchrope']} at commit {source['commit'] or 'unknown'}, "
        f"{source['date']}, by `{source['command']}`."
    )
    return f"{table}\n\n{told}"


_BLOCKS = {
    "rows": _rows_block,
    "bench": _bench_block,
    "training": _training_block,
    "memory": _memory_block,
    "growth": _growth_block,
}


def _bench_table(bench: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = [name for name in _names(bench) if name != OURS]
    rows = []
    for compared in bench["encodings"]:
        timed = {entry["name"]: entry for entry in compared["timed"]}
        own = _number(timed[OURS]["milliseconds"]["median"])
        rows.append([compared["encoding"], compared["backend"], own, *(_ratio(timed.get(name)) for name in names)])
    return ["encoding", "backend", "ms", *(_COLUMNS.get(name, f"× {name}") for name in names)], rows


def _names(bench: dict[str, Any]) -> list[str]:
    """Everybody who was measured at least once, in order, without encodings that only kept another company."""
    encodings = {compared["encoding"] for compared in bench["encodings"]}
    names = [entry["name"] for compared in bench["encodings"] for entry in compared["timed"]]
    ordered = [name for name in dict.fromkeys(names) if name not in encodings]
    return sorted(ordered, key=lambda name: [OURS, *_COLUMNS].index(name) if name in (OURS, *_COLUMNS) else 9)


def _ratio(entry: dict[str, Any] | None) -> str:
    return MISSING if entry is None else f"{_number(entry['ratio']['median'])}"


def _value(row: dict[str, Any]) -> list[str]:
    value = row["value"]
    if value is None:
        return [MISSING, MISSING]
    low, median, high = (f"{_number(value[key])}{row['unit']}" for key in ("low", "median", "high"))
    return [median, MISSING if low == high else f"{low} to {high}"]


def _goal(row: dict[str, Any], goal: float | None) -> str:
    if goal is None:
        return MISSING
    return f"{'at most' if row['at_most'] else 'at least'} {goal:g}{row['unit']}"


def _percents(share: dict[str, Any]) -> list[str]:
    low, median, high = (f"{100 * share[key]:.1f} %" for key in ("low", "median", "high"))
    return [median, f"{low} to {high}"]


def _number(value: float) -> str:
    """Three significant digits, two after the point at most."""
    return f"{value:.2f}" if abs(value) < 100 else significant(value)


def _shape(setting: dict[str, Any]) -> str:
    return (
        f"Batch {setting['batch']}, {setting['heads']} heads of {setting['head_dim']}, {setting['tokens']} tokens with "
        f"{setting['axes']} axes, {setting['dtype']}, {setting['device']}"
    )


def _lattice(bench: dict[str, Any]) -> str:
    lattice = "×".join(map(str, bench["lattice"]))
    return f"a lattice of {lattice}" + (" and one at the origin in front" if bench["prefix"] else "")


def _machine(source: dict[str, Any]) -> str:
    machine = source["machine"]
    return f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores, {machine.get('device', '')}"


def _provenance(bench: dict[str, Any]) -> str:
    source = bench["source"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    commit = source["commit"] or "unknown"
    return (
        f"{setting_line(bench)}. {versions}, torchrope {source['torchrope']} at commit {commit}, {source['date']}, "
        f"by `{source['command']}`."
    )
