"""Convert the results of `torchrope speed` to the schema of all results: answer, table of ratios, figure of times."""

from collections import ChainMap
from dataclasses import asdict

from torchrope_lab.results import Axis, Check, Column, Figure, Findings, RunFacts, StudyResult, Table, Value
from torchrope_lab.speed.peers import NOT_INSTALLED, OURS, PEERS
from torchrope_lab.speed.results import SpeedResults
from torchrope_lab.timing import Quartiles

STEP = Axis("milliseconds", "Milliseconds per step, forward and backward", scale="log")
# Of 17 values the quartiles are the 5th and the 13th: by order statistics a 95.1 % interval of the median.
ROUNDS_FOR_CLAIMS = 17


def speed_result(results: SpeedResults) -> StudyResult:
    """Convert measured times to a result that the report can show."""
    source = results.source
    return StudyResult(
        study="speed",
        title="Speed",
        question="How fast does torchrope build and apply rotations, compared with its reference and other packages?",
        sources=(),
        findings=Findings(
            answer=_answer(results),
            tables=[ratio_table(results)],
            figures=[time_figure(results)],
            checks=[_parity(results)],
            notes=[
                f"{describe_setting(results)}.",
                "A step builds the rotation from its parameters, applies it to q and k, and computes the gradients to "
                "q, k and the parameters. Implementations are interleaved in one process; a ratio is of one round.",
                *not_measured(results),
            ],
        ),
        data=None,
        run=RunFacts(
            command=source.command,
            date=source.date,
            config={
                "encodings": [one.encoding for one in results.encodings],
                **asdict(results.setting),
                "rounds": results.rounds,
                "threads": source.threads,
            },
            torchrope=source.torchrope,
            commit=source.commit,
            versions=source.versions,
            machine=source.machine,
        ),
    )


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
        note="Medians and quartiles. Below 1 the other is faster. With "
        f"{ROUNDS_FOR_CLAIMS} rounds or more, quartiles are a 95 % interval of the median.",
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
    """List the implementations and encodings that were not measured, with the reason, one line for each."""
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
    return [f"{name} was not measured: {reason}" for name, reason in {**absent, **results.not_fitting}.items()]


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


def _answer(results: SpeedResults) -> str:
    if results.rounds < ROUNDS_FOR_CLAIMS:
        return f"No difference is claimed: {results.rounds} rounds are fewer than {ROUNDS_FOR_CLAIMS}."
    compared = [
        (timed.ratio, f"{timed.name} with {one.encoding}")
        for one in results.encodings
        for timed in one.timed
        if timed.name in PEERS and timed.name != OURS
    ]
    faster = sum(ratio.low > 1 for ratio, _ in compared)
    slower = sum(ratio.high < 1 for ratio, _ in compared)
    ordered = sorted(compared, key=lambda pair: pair[0].median)
    ends = (f"{r.median:.3g} [{r.low:.3g}, {r.high:.3g}] ({against})" for r, against in (ordered[0], ordered[-1]))
    return (
        f"torchrope is significantly faster in {faster} of {len(compared)} comparisons and slower in {slower}. Its "
        f"speed is {' to '.join(ends)} times that of the other."
    )


def _parity(results: SpeedResults) -> Check:
    encodings = ", ".join(one.encoding for one in results.encodings)
    largest = "" if results.parity is None else f"the largest error is {results.parity:.2f} of the allowed one, "
    return Check(
        f"Rotated q and k and all gradients of {encodings} agree with the reference in float64",
        True,
        f"{largest}allowed is twice the error of the reference in the same dtype plus eight rounding steps",
    )


def _measured(results: SpeedResults) -> list[str]:
    """List the implementations that were measured at least once, torchrope first."""
    return [name for name in PEERS if any(one.of(name) for one in results.encodings)]
