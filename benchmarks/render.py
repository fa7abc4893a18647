"""Write tables and figures of speed.md, use-it-in-your-model.md and others in docs from benchmarks/results/*.json."""

from collections import ChainMap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markers import insert_between_markers
from measuring import slope
from operation import FORWARD
from peers import COMPLEX, MATRIX_EXP, NOT_INSTALLED, OURS, PEERS, TIMM
from suite_results import DataSuite, Growth, Operation, RowResult, Source, SpeedResults, Suite, read_results

from torchrope.files import write_whole
from torchrope_lab.files import read_mapping
from torchrope_lab.report.plots import plot, svg
from torchrope_lab.report.tables import format_table, written
from torchrope_lab.results import Axis, Column, Figure, Row, Table, Value
from torchrope_lab.training.timing import Quartiles

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
DOCS = ROOT / "docs"
PAGES = {"speed.md": ("answers", "bench", "training", "memory", "growth"), "results/speed.md": ("rows", "operations")}
"""Markers of the tables of a suite, by page."""
STEP = Axis("milliseconds", "Milliseconds per step, forward and backward", scale="log")
REACHED, SHORT, BEYOND, UNMEASURED = "target reached", "not reached", "both reached", "not measured"


def render(results: Path, docs: Path) -> None:
    """Write the pages of speed and their figures from the numbers of `benchmarks/cpu.py`."""
    suite = read_results(results, Suite)
    for name in PAGES:
        write_whole(docs / name, render_docs((docs / name).read_text(encoding="utf-8"), suite, name))
    for figure in figures(suite):
        write_whole(docs / "speed" / f"{figure.name}.svg", svg(plot(figure, {}), figure.name) + "\n")


def render_data(results: Path, docs: Path) -> None:
    """Write the table of data.md from the numbers of `benchmarks/data.py`."""
    page = docs / "data.md"
    write_whole(page, render_data_docs(page.read_text(encoding="utf-8"), read_results(results, DataSuite)))


def exponentials(text: str, measured: dict[str, Any]) -> str:
    """Put the table of exponentials between the markers of docs/results/speed.md."""
    lines: dict[tuple[str, str], Row] = {}
    for row in measured["measured"]:
        key = (f"liere:{row['block']}", row["positions"])
        line = lines.setdefault(key, {"encoding": key[0], "positions": key[1]})
        line[f"{row['pass']} {row['tokens']}"] = row["milliseconds"]["median"]
    sizes = list(dict.fromkeys(row["tokens"] for row in measured["measured"]))
    passes = list(dict.fromkeys(row["pass"] for row in measured["measured"]))
    slopes = [slope(sizes, [line[f"{name} {size}"] for size in sizes]) for name in passes for line in lines.values()]
    columns = [Column("encoding", "Rotation"), Column("positions", "Positions"),
               *(Column(f"{name} {size}", f"{name.capitalize()}, {size:,} tokens, ms")
                 for name in passes for size in (sizes[0], sizes[-1]))]  # fmt: skip
    setting = ", ".join(f"{name} {value}" for name, value in measured["setting"].items() if name != "before")
    note = (
        f"Medians; one head of 64 channels; {setting}; by `python benchmarks/exponentials.py`. Times grow as the "
        f"number of tokens to the power of {min(slopes):.2f} to {max(slopes):.2f}."
    )
    return insert_between_markers(text, "exponentials", _markdown(Table("", columns, [*lines.values()], note=note)))


def checkpointing(text: str, measured: dict[str, Any]) -> str:
    """Put the tables of checkpointed training between the markers of docs/results/speed.md."""
    memory = [
        Column("case", "Pass"), Column("none", "Without encoding", "MB", 0), Column("encoding", "liere:64", "MB", 0),
        Column("rotations", "Rotations", "MB", 0),
    ]  # fmt: skip
    held: list[Row] = [
        {key: value if key == "case" else value / 1e6 for key, value in row.items()} for row in measured["memory"]
    ]
    time = [
        Column("batch", "Batch"),
        quartile_column("ms", "Checkpointed step", "ms", 0),
        quartile_column("rotations kept", "/ rotations kept", "×", 2),
        quartile_column("training", "/ training", "×", 2),
    ]
    taken: list[Row] = []
    for row in measured["time"]:
        cells = quartile_cells("ms", Quartiles(**row["milliseconds"]))
        for case, over in row["over"].items():
            cells |= quartile_cells(case, Quartiles(**over))
        taken.append({"batch": row["batch"], **cells})
    setting = ", ".join(f"{name} {value}" for name, value in measured["setting"].items())
    note = f"Medians and quartiles of ratios within rounds; {setting}; by `python benchmarks/checkpointing.py`."
    tables = Table("", memory, held), Table("", time, taken, note=note)
    return insert_between_markers(text, "checkpointing", "\n\n".join(map(_markdown, tables)))


def render_gpu(results: Path, docs: Path) -> None:
    """Write the table of GPUs in speed.md from the numbers of `benchmarks/gpu.py`."""
    measured, page = read_mapping(results, "results"), docs / "speed.md"
    table = insert_between_markers(page.read_text(encoding="utf-8"), "gpu", _markdown(_training_on_gpu(measured)))
    write_whole(page, table)


def _training_on_gpu(measured: dict[str, Any]) -> Table:
    """Build the table of training steps over those without an encoding."""
    rows: dict[str, Row] = {}
    for row in measured["rows"]:
        step, _, encoding = row["name"].removesuffix(" over none").partition(" with ")
        if step.startswith("training step") and encoding:
            name, _, plain = encoding.partition(" in ")
            used = ", ".join(filter(None, [step.removeprefix("training step").strip(" of"), plain or "kernels"]))
            rows.setdefault(used, {"": used})[name] = row["value"]
    names = dict.fromkeys(name for row in rows.values() for name in row if name)
    return Table("", [Column("", ""), *(Column(name, name, digits=2) for name in names)], [*rows.values()])


def freeze(text: str, measured: dict[str, Any]) -> str:
    """Put the table of `absorb` and `freeze` between the markers of docs/results/speed.md."""
    columns = [Column("encoding", "Encoding"), Column("mb", "Model, MB", digits=2)]
    for kind in ("absorb", "freeze"):
        columns += [quartile_column(kind, f"{kind}, time / model", digits=2), Column(f"{kind} mb", "MB", digits=2)]
    rows: list[Row] = []
    for measures in measured["rows"]:
        row = {"encoding": measures["encoding"], "mb": measures["model"]["megabytes"]}
        for kind in ("absorb", "freeze"):
            of_kind = measures.get(kind)  # absorb is for commuting generators
            row |= quartile_cells(kind, None if of_kind is None else Quartiles(**of_kind["ratio"]))
            row[f"{kind} mb"] = None if of_kind is None else of_kind["megabytes"]
        rows.append(row)
    setting = ", ".join(f"{name} {value}" for name, value in measured["setting"].items())
    note = f"Forward pass of a `ViT` at 224 pixels, median and quartiles of ratios; {setting}; `benchmarks/freeze.py`."
    return insert_between_markers(text, "freeze", _markdown(Table("", columns, rows, note=note)))


def render_docs(text: str, suite: Suite, page: str) -> str:
    """Put the tables of a suite between the markers of a page of `PAGES`.

    Raises:
        ValueError: the text does not hold each marker once.
    """
    notes = "\n".join(f"- {note}" for note in not_measured(suite.bench))
    blocks = {
        "answers": [_answers(suite)],
        "rows": [_markdown(_targets(suite.rows)), _setting_of_targets(suite.bench)],
        "operations": [_markdown(_operations(suite.operations))],
        "bench": [
            _markdown(ratio_table(suite.bench)),
            _setting_of_steps(suite.bench),
            notes,
            "![Time of a step](speed/speed.svg)",
        ],
        "training": [_markdown(_training(suite))],
        "memory": [_markdown(_memory(suite))],
        "growth": [block for over, grown in _grown(suite).items() for block in _growth_blocks(over, grown)],
    }
    for name in PAGES[page]:
        text = insert_between_markers(text, name, "\n\n".join(filter(None, blocks[name])))
    return text


def render_data_docs(text: str, suite: DataSuite) -> str:
    """Put the table of loading speeds between the markers of docs/data.md."""
    return insert_between_markers(text, "loading", f"{_markdown(_loading(suite))}\n\n{_origin(suite.source)}")


def figures(suite: Suite) -> list[Figure]:
    """Build the figures of step time and of its growth."""
    return [time_figure(suite.bench), *(_growth_figure(over, grown) for over, grown in _grown(suite).items())]


def ratio_table(results: SpeedResults) -> Table:
    """Build the table of the time of torchrope's step for each encoding, and its speed relative to the others."""
    others = _measured(results)[1:]
    rows = []
    for one in results.encodings:
        timed = {each.name: each for each in one.timed}
        ratios = (quartile_cells(name, timed[name].ratio if name in timed else None) for name in others)
        times = quartile_cells(OURS, timed[OURS].milliseconds)
        rows.append({"encoding": one.encoding, "backend": one.backend, **ChainMap(times, *ratios)})
    return Table(
        title="How many times as fast as others torchrope is",
        columns=[
            Column("encoding", "Encoding"),
            Column("backend", "Backend"),
            quartile_column(OURS, OURS, "ms"),
            *(quartile_column(name, name, "×") for name in others),
        ],
        rows=rows,
        # Of 17 values the quartiles are the 5th and the 13th: by order statistics a 95.1 % interval of the median.
        note="Medians and quartiles. Below 1 the other is faster. With 17 rounds or more, quartiles are a 95 % "
        "interval of the median.",
    )


def time_figure(results: SpeedResults) -> Figure:
    """Build the figure of milliseconds per step, with a row per encoding and a mark per implementation."""
    rows = [
        {"encoding": one.encoding, "implementation": timed.name, **quartile_cells(STEP.key, timed.milliseconds)}
        for one in results.encodings
        for timed in one.timed
        if timed.name in PEERS
    ]
    return Figure(
        name="speed",
        kind="points",
        title="Time of a step",
        caption="Lines reach from the lower to the upper quartile.",
        alt=f"Milliseconds per step for {', '.join(one.encoding for one in results.encodings)}.",
        x=STEP,
        y=Axis("encoding", "Encoding", scale="category"),
        rows=rows,
        series="implementation",
        low=f"{STEP.key} low",
        high=f"{STEP.key} high",
    )


def not_measured(results: SpeedResults) -> list[str]:
    """List the implementations that were not measured, with the reason, one line for each."""
    reasons: dict[str, set[str]] = {}
    for one in results.encodings:
        for name, reason in one.left_out.items():
            reasons.setdefault(name, set()).add(reason)
    measured = _measured(results)
    absent = {
        name: "; ".join(sorted(given & {NOT_INSTALLED} or given))  # what else it lacks does not matter then
        for name, given in sorted(reasons.items())
        if name not in measured
    }
    return [f"{name} was not measured: {reason}" for name, reason in absent.items()]


def describe_setting(results: SpeedResults) -> str:
    """Describe shape, threads, rounds and machine in one line."""
    machine = results.source.machine
    setting = results.setting.describe()
    return (
        f"{setting[0].upper()}{setting[1:]}; threads: {results.source.threads}; median of {results.rounds} rounds; "
        f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores, {machine.get('device', '')}"
    )


def quartile_column(key: str, title: str, unit: str = "", digits: int | None = None) -> Column:
    """Build the column of a median and its quartiles."""
    return Column(key, title, unit, digits, low=f"{key} low", high=f"{key} high")


def quartile_cells(key: str, value: Quartiles | None) -> dict[str, Value]:
    """Convert a median and its quartiles to cells of a row, None if nothing was measured."""
    low, median, high = (None, None, None) if value is None else (value.low, value.median, value.high)
    return {key: median, f"{key} low": low, f"{key} high": high}


def _measured(results: SpeedResults) -> list[str]:
    """List the implementations that were measured at least once, torchrope first."""
    return [name for name in PEERS if any(one.of(name) for one in results.encodings)]


def verdict(row: RowResult) -> str:
    """Return the verdict on a row, from its median."""
    if row.value is None:
        return f"{UNMEASURED} ({row.why_not})"
    sign = -1 if row.at_most else 1

    def met(goal: float | None) -> bool:
        return goal is not None and sign * row.value.median >= sign * goal

    if row.must is None:
        return REACHED if met(row.reach) else SHORT
    if not met(row.must):
        return SHORT
    return BEYOND if met(row.reach) else REACHED


def _markdown(table: Table) -> str:
    formatted = format_table(table)
    return "\n\n".join(filter(None, [formatted.markdown(), formatted.note]))


def _answers(suite: Suite) -> str:
    bench, training = suite.bench, suite.training
    added = [(each.encoding, 100 * each.share.median) for each in training.overheads[1:]]
    rows = {
        f"time added to the [training step of a ViT](#whole-training-steps) at {training.input_size} pixels, %": (
            _by_encoding(added)
        )
    }
    for name, other in ((TIMM, TIMM), (COMPLEX, COMPLEX), (MATRIX_EXP, "`torch.matrix_exp`")):
        measured = [(each.encoding, timed.ratio.median) for each in bench.encodings if (timed := each.of(name))]
        what = f"[forward and backward](#encodings-and-implementations), speed / {other}, ×"
        rows[what] = _by_encoding(measured) or "–"
    copies = [each.hot.median for each in suite.operations if each.name == FORWARD]
    rows["[`rotate`](results/speed.md#one-call) without gradients, time / copying q and k, ×"] = (
        f"{written(min(copies), 1)} to {written(max(copies), 1)}"
    )
    return "\n".join(["| what | median |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())])


def _setting_of_steps(bench: SpeedResults) -> str:
    setting = bench.setting
    return (
        f"Batch {setting.batch}, {setting.heads} heads of {setting.head_dim}, {setting.tokens} tokens on "
        f"{setting.axes} axes, {setting.dtype}; {bench.rounds} rounds."
    )


def _by_encoding(numbers: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"`{encoding}` {written(number, 1)}" for encoding, number in numbers)


def _targets(rows: Sequence[RowResult]) -> Table:
    """Return the targets that are not reached; the note counts the others."""
    columns = [
        Column("what", "Measurement"),
        quartile_column("value", "Measured"),
        Column("must", "Target"),
        Column("verdict", "Verdict"),
    ]
    missed = [row for row in rows if verdict(row) not in (REACHED, BEYOND)]
    cells = [
        {"what": row.what, **_of_rounds(row.value), "must": _goal(row, row.must), "verdict": verdict(row)}
        for row in missed
    ]
    note = (
        f"{len(rows) - len(missed)} of {len(rows)} targets are reached; `benchmarks/results/cpu.json` has all. "
        "Medians; in brackets quartiles, where there are several rounds."
    )
    return Table("Targets", columns, cells, note=note)


def _setting_of_targets(bench: SpeedResults) -> str:
    return (
        f"Speed relative to timm, to a complex multiply in PyTorch and to torch.matrix_exp: {describe_setting(bench)}. "
        "One call: the worst of the shapes and dtypes in the next section. Memory, training steps and growth: the "
        f"sizes in their sections. {_origin(bench.source)}"
    )


def _of_rounds(value: Quartiles | None) -> Row:
    cells = quartile_cells("value", value)
    several = value is not None and value.low < value.high
    return cells if several else {**quartile_cells("value", None), "value": cells["value"]}


def _goal(row: RowResult, limit: float | None) -> str | None:
    return None if limit is None else f"{'at most' if row.at_most else 'at least'} {limit:g}{row.unit}"


def _operations(operations: Sequence[Operation]) -> Table:
    """Return one row per call and dtype: ranges of medians over the shapes."""
    columns = [Column("name", "Call / other"), Column("dtype", "Dtype"), Column("us", "Time, µs"),
               Column("hot", "Hot, ×"), Column("cold", "Cold, ×")]  # fmt: skip
    kinds: dict[tuple[str, str], list[Operation]] = {}
    for each in sorted(operations, key=lambda each: each.name):
        kinds.setdefault((each.name, each.setting.dtype), []).append(each)
    rows: list[Row] = [
        {"name": name, "dtype": dtype, "us": _range([each.microseconds.median for each in measured], None),
         "hot": _range([each.hot.median for each in measured], 2),
         "cold": _range([each.cold.median for each in measured], 2)}
        for (name, dtype), measured in kinds.items()
    ]  # fmt: skip
    shapes = ", ".join(dict.fromkeys(f"{each.setting.shape}" for each in operations))
    note = (
        f"Medians, lowest to highest over these shapes (batch, heads, tokens, head_dim): {shapes}. Calls in attention "
        "and on one token have one shape. `benchmarks/results/cpu.json` has each with its quartiles."
    )
    return Table("One call", columns, rows, note=note)


def _range(values: Sequence[float], digits: int | None) -> str:
    ends = dict.fromkeys(written(value, digits) for value in (min(values), max(values)))
    return " to ".join(ends)


def _training(suite: Suite) -> Table:
    training = suite.training
    columns = [
        Column("encoding", "Encoding"),
        quartile_column("ms", "Step", "ms"),
        quartile_column("share", "Over none, hot", "%", 1),
        quartile_column("cold", "Over none, cold", "%", 1),
    ]
    rows: list[Row] = []
    for each in training.overheads:
        shares = quartile_cells("share", each.share) | quartile_cells("cold", each.cold)
        percent = {key: 100 * value for key, value in shares.items()}
        rows.append({"encoding": each.encoding, **quartile_cells("ms", each.milliseconds), **percent})
    note = (
        f"A ViT of {training.depth} layers, {training.dim} channels and {training.num_heads} heads on images of "
        f"{training.input_size}×{training.input_size} pixels, patch {training.patch_size}, batch {training.batch}; "
        f"forward, backward and AdamW, median of {training.rounds} rounds. "
        "Percentages are medians of ratios within rounds."
    )
    return Table("Training steps", columns, rows, note=note)


def _memory(suite: Suite) -> Table:
    columns = [
        Column("encoding", "Encoding"), Column("tokens", "Tokens"), Column("batch", "Batch"), Column("step", "Step"),
        Column("peak", "Peak", "MB"), Column("rotation", "Rotation", "MB"), Column("outputs", "Outputs", "MB"),
        Column("ratio", "Peak / rotation", "×", 2), Column("beyond", "(Peak − outputs) / rotation", "×", 2),
    ]  # fmt: skip
    rows = [
        {"encoding": peak.encoding, "tokens": peak.setting.tokens, "batch": peak.setting.batch,
         "step": "training" if peak.training else "inference", "peak": peak.peak_bytes / 1e6,
         "rotation": peak.rotation_bytes / 1e6, "outputs": peak.output_bytes / 1e6,
         "ratio": peak.peak_bytes / peak.rotation_bytes,
         "beyond": (peak.peak_bytes - peak.output_bytes) / peak.rotation_bytes}
        for peak in suite.memory
    ]  # fmt: skip
    return Table("Peak memory", columns, rows)


def _grown(suite: Suite) -> dict[str, list[Growth]]:
    grown: dict[str, list[Growth]] = {}
    for each in suite.growth:
        grown.setdefault(each.over, []).append(each)
    return grown


def _growth_blocks(over: str, grown: Sequence[Growth]) -> list[str]:
    sizes = grown[0].sizes
    columns = [Column("encoding", f"ms at {over}"), *(Column(f"{size}", f"{size}") for size in (sizes[0], sizes[-1]))]
    rows: list[Row] = []
    for each in grown:
        times = {f"{size}": time.median for size, time in zip(sizes, each.milliseconds, strict=True)}
        rows.append({"encoding": each.encoding, **times, "exponent": each.slope})
    table = Table("Growth", [*columns, Column("exponent", "exponent", digits=2)], rows)
    return [_markdown(table), f"![Time of a step over {over}](speed/growth-{over}.svg)"]


def _growth_figure(over: str, grown: Sequence[Growth]) -> Figure:
    sizes = grown[0].sizes
    return Figure(
        name=f"growth-{over}",
        kind="lines",
        title=f"Time over {over}",
        caption="Both axes are logarithmic: a straight line of slope 1 is linear growth.",
        alt=f"Milliseconds per step over {over} {sizes[0]} to {sizes[-1]}.",
        x=Axis(over, over.capitalize(), scale="log"),
        y=STEP,
        rows=[
            {"encoding": f"{each.encoding}, exponent {each.slope:.2f}", over: size, **quartile_cells(STEP.key, time)}
            for each in grown
            for size, time in zip(sizes, each.milliseconds, strict=True)
        ],
        series="encoding",
        low=f"{STEP.key} low",
        high=f"{STEP.key} high",
    )


def _loading(suite: DataSuite) -> Table:
    columns = [
        Column("data", "Data"), Column("shape", "Shape"), Column("augment", "Augmentation"),
        Column("workers", "Processes"), quartile_column("read", "Examples/s", digits=0),
        Column("taken", "Examples/s that a GPU trains", digits=0), Column("fed", "Loaded / trained", digits=2),
    ]  # fmt: skip
    rows = [
        {"data": row.data, "shape": "×".join(map(str, row.shape)), "augment": row.augment, "workers": row.workers,
         **quartile_cells("read", row.examples_per_second), "taken": row.taken_per_second,
         "fed": row.examples_per_second.median / row.taken_per_second}
        for row in suite.rows
    ]  # fmt: skip
    source = suite.source
    note = (
        f"Measured on the CPU, with the start of loading processes, median of {suite.rounds} epochs, in brackets "
        f"quartiles; threads: {source.threads}; {source.machine.get('cpu', '')}, {source.machine.get('cores', '?')} "
        f"cores. The speed of a GPU is computed, not measured: {suite.utilisation:.0%} of {suite.peak_tflops:g} "
        "TFLOP/s (H100 or H200, bfloat16) over three times the forward operations of the recipe's ViT-B on inputs of "
        "the row's shape."
    )
    return Table("Loading", columns, rows, note=note)


def _origin(source: Source) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    return (
        f"{versions}, torchrope {source.torchrope} at commit {source.commit or 'unknown'}, {source.date}, by "
        f"`{source.command}`."
    )


RENDERED = {
    "checkpointing": ("results/speed.md", checkpointing),
    "exponentials": ("results/speed.md", exponentials),
    "freeze": ("results/speed.md", freeze),
}
"""The page of a file of results, and the function that puts its numbers there, by the file's name."""

if __name__ == "__main__":
    render(RESULTS, DOCS)
    render_data(RESULTS.with_name("data.json"), DOCS)
    for name, (page, rendered) in RENDERED.items():
        measured = read_mapping(RESULTS.with_name(f"{name}.json"), f"measurements of {name}")
        write_whole(DOCS / page, rendered((DOCS / page).read_text(encoding="utf-8"), measured))
