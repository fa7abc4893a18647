"""Build the rows of every table once: the page, the Markdown and the terminal show the same words."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrope.lab.report.load import Results, ranked

MISSING = "–"

Value = TypeVar("Value")


@dataclass(frozen=True)
class ResultRow:
    """One encoding's place, accuracy and cost, every number already text."""

    rank: str
    name: str
    label: str
    top1: str
    interval: str
    spread: str
    verdict: str
    why: str
    val_loss: str
    val_loss_spread: str
    shuffled: str
    drop: str
    encoding_parameters: str
    parameters: str
    mflops: str
    step_ms: str
    step_ratio: str
    memory_mb: str


@dataclass(frozen=True)
class EncodingRow:
    """What an encoding is: one line, its formula and where it comes from."""

    name: str
    label: str
    summary: str
    formula: str
    source: str
    kind: str


@dataclass(frozen=True)
class ResolutionTable:
    """Accuracy of every encoding at every input size; `trained` is the column of the training size."""

    sizes: list[str]
    trained: int | None
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Column:
    """A column of a text table: its heading, what it shows, and whether it is a number."""

    heading: str
    cell: Callable[[ResultRow], str]
    numeric: bool = True


def percent(share: float) -> str:
    """Write a share of one as a percentage: 0.9612 is 96.1."""
    return f"{100 * share:.1f}"


def signed_points(share: float) -> str:
    """Write a difference of shares in points with its sign: -0.75 is −75.0."""
    text = f"{100 * share:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def count(number: float) -> str:
    """Write a whole number with thousands apart: 210000 is 210,000."""
    return f"{number:,.0f}"


def loss(number: float) -> str:
    """Write a loss: 0.11329 is 0.113."""
    return f"{number:.3f}"


def significant(number: float) -> str:
    """Write three significant digits without an exponent: 0.031234 is 0.0312."""
    if number == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{decimals}f}"


def size(lengths: list[int]) -> str:
    """Write the lengths of the axes: [8, 8] is 8×8."""
    return "×".join(str(length) for length in lengths)


def duration(seconds: float) -> str:
    """Write a time a person can judge: 210 is 3 min 30 s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{significant(seconds)} s"


def result_rows(results: Results) -> list[ResultRow]:
    """Build one row per encoding, best first."""
    base = base_encoding(results)
    return [_result_row(entry, encoding, base) for entry, encoding in ranked(results)]


def base_encoding(results: Results) -> dict[str, Any] | None:
    """Find the encoding that the step times are compared with: none, or else the cheapest."""
    timed = [encoding for encoding in results["encodings"] if _cost(encoding, "step_seconds")]
    plain = [encoding for encoding in timed if encoding["name"] == "none"]
    return min(plain or timed, key=lambda encoding: _cost(encoding, "step_seconds"), default=None)


def ratio_heading(results: Results) -> str:
    """Name the comparison of step times: `× none`."""
    base = base_encoding(results)
    return f"× {base['name']}" if base else "×"


def encoding_rows(results: Results) -> list[EncodingRow]:
    """Build one row per encoding, in the order they were run."""
    return [
        EncodingRow(
            name=encoding["name"],
            label=encoding["label"],
            summary=encoding.get("summary") or MISSING,
            formula=encoding.get("formula") or MISSING,
            source=encoding.get("source") or MISSING,
            kind=_kind(encoding),
        )
        for encoding in results["encodings"]
    ]


def tested_sizes(results: Results) -> list[list[int]]:
    """List every input size that some encoding was tested at, smallest first."""
    sizes = {tuple(at["size"]) for encoding in results["encodings"] for at in encoding.get("resolutions") or []}
    return [list(lengths) for lengths in sorted(sizes, key=lambda lengths: (math.prod(lengths), lengths))]


def resolution_table(results: Results) -> ResolutionTable | None:
    """Build the accuracy at every input size, or None where only one size was tested."""
    sizes = tested_sizes(results)
    if len(sizes) < 2:
        return None
    trained = results["data"]["input_size"]
    return ResolutionTable(
        sizes=[size(lengths) for lengths in sizes],
        trained=sizes.index(trained) if trained in sizes else None,
        rows=[(encoding["name"], _accuracies(encoding, sizes)) for _, encoding in ranked(results)],
    )


def result_columns(results: Results) -> list[Column]:
    """List the columns of the full result table."""
    return [
        Column("Rank", lambda row: row.rank),
        Column("Encoding", lambda row: row.label, numeric=False),
        Column("Name", lambda row: row.name, numeric=False),
        Column("Top-1 %", lambda row: row.top1),
        Column("95 % interval", lambda row: row.interval),
        Column("± over seeds", lambda row: row.spread),
        Column("Verdict", lambda row: row.verdict, numeric=False),
        Column("Why", lambda row: row.why, numeric=False),
        Column("Val loss", lambda row: row.val_loss),
        Column("Shuffled %", lambda row: row.shuffled),
        Column("Drop, points", lambda row: row.drop),
        Column("Encoding parameters", lambda row: row.encoding_parameters),
        Column("All parameters", lambda row: row.parameters),
        Column("MFLOPs/input", lambda row: row.mflops),
        Column("ms/step", lambda row: row.step_ms),
        Column(ratio_heading(results), lambda row: row.step_ratio),
        Column("Peak MB", lambda row: row.memory_mb),
    ]


def terminal_columns() -> list[Column]:
    """List the columns that fit a terminal."""
    return [
        Column("rank", lambda row: row.rank),
        Column("encoding", lambda row: row.name, numeric=False),
        Column("top-1 % [95 %]", lambda row: f"{row.top1} [{row.interval}]"),
        Column("spread", lambda row: row.spread),
        Column("shuffled", lambda row: row.shuffled),
        Column("enc. params", lambda row: row.encoding_parameters),
        Column("MFLOPs", lambda row: row.mflops),
        Column("ms/step", lambda row: row.step_ms),
        Column("verdict", lambda row: row.verdict, numeric=False),
    ]


def plain_table(results: Results) -> str:
    """Lay the results out for a terminal, best first, without a final newline."""
    columns = terminal_columns()
    cells = [[column.cell(row) for column in columns] for row in result_rows(results)]
    return aligned_table([column.heading for column in columns], cells, [column.numeric for column in columns])


def aligned_table(headings: list[str], rows: list[list[str]], numeric: list[bool]) -> str:
    """Lay cells out in columns for a terminal, without a final newline."""
    texts = [[_one_line(cell) for cell in column] for column in zip(headings, *rows, strict=True)]
    aligned = [_align(cells, is_number) for cells, is_number in zip(texts, numeric, strict=True)]
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    rule = "  ".join("-" * len(cells[0]) for cells in aligned)
    return "\n".join([lines[0], rule, *lines[1:]])


def markdown_table(headings: list[str], rows: list[list[str]], numeric: list[bool]) -> str:
    """Lay cells out as a Markdown table; the text of every cell is escaped."""
    rule = ["---:" if is_number else "---" for is_number in numeric]
    escaped = [[escape_markdown(cell) for cell in cells] for cells in [headings, *rows]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [escaped[0], rule, *escaped[1:]])


def markdown_results(columns: list[Column], rows: list[ResultRow]) -> str:
    """Lay result rows out as a Markdown table with the given columns."""
    return markdown_table(
        [column.heading for column in columns],
        [[column.cell(row) for column in columns] for row in rows],
        [column.numeric for column in columns],
    )


def escape_markdown(text: str) -> str:
    """Put text on one line and keep Markdown from reading any of it as markup."""
    return "".join(f"\\{sign}" if sign in r"\`*_[]<>|#" else sign for sign in _one_line(text))


def _result_row(entry: dict[str, Any], encoding: dict[str, Any], base: dict[str, Any] | None) -> ResultRow:
    top1, val_loss = encoding["top1"], encoding.get("val_loss") or {}
    shuffled = (encoding.get("shuffled_top1") or {}).get("mean")
    step = _cost(encoding, "step_seconds")
    return ResultRow(
        rank=str(entry["rank"]),
        name=encoding["name"],
        label=encoding["label"],
        top1=percent(top1["mean"]),
        interval=_shown(top1.get("interval"), lambda ends: ", ".join(percent(end) for end in ends)),
        spread=_shown(top1.get("spread"), percent),
        verdict=entry["verdict"],
        why=entry.get("why") or "",
        val_loss=_shown(val_loss.get("mean"), loss),
        val_loss_spread=_shown(val_loss.get("spread"), loss),
        shuffled=_shown(shuffled, percent),
        drop=_shown(shuffled, lambda after: signed_points(after - top1["mean"])),
        encoding_parameters=_shown(_cost(encoding, "encoding_parameters"), count),
        parameters=_shown(_cost(encoding, "parameters"), count),
        mflops=_shown(_cost(encoding, "flops"), lambda flops: significant(flops / 1e6)),
        step_ms=_shown(step, lambda seconds: significant(1e3 * seconds)),
        step_ratio=_shown(step if base else None, lambda s: f"{s / _cost(base, 'step_seconds'):.2f}×"),
        memory_mb=_shown(_cost(encoding, "peak_memory_bytes"), lambda peak: significant(peak / 1e6)),
    )


def _shown(value: Value | None, write: Callable[[Value], str]) -> str:
    return MISSING if value is None else write(value)


def _cost(encoding: dict[str, Any] | None, key: str) -> Any:
    return ((encoding or {}).get("cost") or {}).get(key)


def _kind(encoding: dict[str, Any]) -> str:
    if not encoding.get("rotary"):
        return "not rotary"
    relative = {True: ", relative", False: ", not relative", None: ""}[encoding.get("relative")]
    return f"rotary{relative}"


def _accuracies(encoding: dict[str, Any], sizes: list[list[int]]) -> list[str]:
    means = {tuple(at["size"]): at.get("mean") for at in encoding.get("resolutions") or []}
    return [_shown(means.get(tuple(lengths)), percent) for lengths in sizes]


def _align(cells: list[str], numeric: bool) -> list[str]:
    width = max(len(cell) for cell in cells)
    return [cell.rjust(width) if numeric else cell.ljust(width) for cell in cells]


def _one_line(text: str) -> str:
    return " ".join(text.split())
