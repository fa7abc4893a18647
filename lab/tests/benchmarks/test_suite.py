"""The suite of benchmarks/cpu.py and the rows of docs/speed.md: targets, cold timing, memory, committed results."""

import ctypes
import json
import math
import resource
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from cold_timing import interleaved_cold_seconds
from measuring import peak_bytes, slope
from peers import COMPILED, PEERS, Peer, Task, Unavailable
from render import PAGES, RENDERED, figures, render_docs, verdict
from rows import ROWS, Measurements
from setting import Setting
from suite import Plan, run_suite
from suite_results import RowResult, Suite, Training, read_results, write_results
from torch import Tensor

from torchrope_lab.report.tables import written
from torchrope_lab.training import timing
from torchrope_lab.training.timing import Quartiles, interleaved_seconds

ROOT = Path(__file__).parents[3]


def not_compiled(task: Task) -> Peer:
    raise Unavailable("costs seconds")


@pytest.fixture(scope="module")
def suite() -> Suite:
    """Run the suite at small sizes."""
    plan = Plan(
        Setting(batch=1, heads=1, tokens=5, head_dim=64),
        Training(input_size=8, patch_size=4, batch=1, dim=64, depth=1, num_heads=1, rounds=1, overheads=()),
        rounds=1,
        call_rounds=1,
        memory_tokens=5,
        growth_tokens=(4, 8),
        growth_batches=(1, 2),
        growth_rounds=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PEERS, COMPILED, not_compiled)
        patch.setattr(timing, "_SHORTEST_SAMPLE", 1e-4)
        return run_suite(plan, command="make bench", log=lambda line: None)


def test_peak_bytes_counts_simultaneous_allocations() -> None:
    def work() -> Tensor:
        first = torch.ones(1000, 1000)
        second = first * 2
        del first
        return second * 2

    assert peak_bytes(work, "cpu") == pytest.approx(2 * 4e6, rel=1e-3)


def test_slope_is_the_exponent() -> None:
    assert slope((1, 2, 8), [3.0, 3.0 * 2**1.5, 3.0 * 8**1.5]) == pytest.approx(1.5)


def test_suite_has_every_row_and_measurement(suite: Suite, tmp_path: Path) -> None:
    assert [row.name for row in suite.rows] == [row.name for row in ROWS]
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.value is not None for row in suite.rows)
    none, *others = suite.training.overheads
    assert (none.encoding, none.share.median) == ("none", 0)
    assert all(math.isfinite(other.share.median) for other in others)
    for peak in suite.memory:
        assert peak.peak_bytes > peak.rotation_bytes == 5 * 64 * 64 * 4
    write_results(tmp_path / "cpu.json", suite)
    assert read_results(tmp_path / "cpu.json", Suite) == suite


def test_rows_select_their_measurements(suite: Suite) -> None:
    said = {row.name: row.value.median for row in suite.rows if row.value is not None}
    calls = {each.name: each for each in suite.operations if each.setting.dtype == "float32"}
    for name in ("comrope-ld:8 in attention / mixed", "comrope-ap:8 in attention / mixed"):
        assert said[name] == calls[name].hot.median
    assert said["one call on one token"] == calls["one call on one token"].microseconds.median
    slowest = min(1 / each.hot.median for each in suite.operations if each.name == "forward / complex multiply")
    assert said["forward / complex multiply"] == pytest.approx(slowest)
    timm = suite.bench.of("mixed").of("timm")
    assert timm is not None
    assert said["mixed / timm"] == timm.ratio.median
    for overhead in suite.training.overheads[1:]:
        assert said[f"training {overhead.encoding}"] == pytest.approx(100 * overhead.share.median)
    training, inference = suite.memory[0], suite.memory[2]
    assert training.training
    assert training.peak_bytes > inference.peak_bytes
    assert said["memory training, batch 1"] == (training.peak_bytes - training.output_bytes) / training.rotation_bytes
    assert (
        said["memory inference, batch 1"] == (inference.peak_bytes - inference.output_bytes) / inference.rotation_bytes
    )


def test_row_without_its_peer_has_a_reason(suite: Suite) -> None:
    mixed = suite.bench.of("mixed")
    alone = replace(mixed, timed=mixed.timed[:1], left_out={"timm": "not installed"})
    measurements = Measurements(
        suite.operations, replace(suite.bench, encodings=(alone,)), suite.training, suite.memory, suite.growth
    )
    judged = ROWS[0].judge(measurements)
    assert (judged.value, judged.why_not) == (None, "timm: not installed")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda plain: plain["rows"][0].pop("must"), "cpu.json.rows[0] must have 'must', got ["),
        (lambda plain: plain["bench"].update(rounds="many"), "bench.rounds must be a whole number, got 'many'"),
        (lambda plain: plain.update(schema=0), "benchmark results must have schema 1, got"),
    ],
)
def test_read_results_rejects_another_schema(
    damage: Callable[[dict], object], message: str, suite: Suite, tmp_path: Path
) -> None:
    plain = json.loads(json.dumps(asdict(suite)))
    damage(plain)
    (tmp_path / "cpu.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        read_results(tmp_path / "cpu.json", Suite)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("at_most", "must", "reach", "median", "expected"),
    [
        (False, 5, 8, 4.9, "not reached"),
        (False, 5, 8, 5.0, "target reached"),
        (False, 5, 8, 8.1, "both reached"),
        (True, 4, 2, 4.1, "not reached"),
        (True, 4, 2, 3.9, "target reached"),
        (True, 4, 2, -0.5, "both reached"),
        (True, None, 1.5, 1.6, "not reached"),
        (True, None, 1.5, 1.4, "target reached"),
        (False, 5, 8, float("nan"), "not reached"),
        (False, 5, 8, None, "not measured (timm: not installed)"),
    ],
)
def test_target_verdicts(at_most: bool, must: float | None, reach: float, median: float | None, expected: str) -> None:
    value = None if median is None else Quartiles(median, median, median)
    assert verdict(RowResult("", "", "×", at_most, must, reach, value, "timm: not installed")) == expected


def test_docs_equal_the_rendered_committed_results() -> None:
    suite = read_results(ROOT / "benchmarks" / "results" / "cpu.json", Suite)
    for name in PAGES:
        page = (ROOT / "docs" / name).read_text()
        assert render_docs(page, suite, name) == page
    for name in ("speed", "growth-tokens", "growth-batch"):
        assert (ROOT / "docs" / "speed" / f"{name}.svg").exists()


@pytest.mark.parametrize("name", RENDERED)
def test_pages_have_the_committed_numbers(name: str) -> None:
    place, rendered = RENDERED[name]
    page = (ROOT / "docs" / place).read_text()
    measured = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert rendered(page, measured) == page


def test_docs_show_every_row_and_every_number(suite: Suite) -> None:
    pages = {name: render_docs((ROOT / "docs" / name).read_text(), suite, name) for name in PAGES}
    assert all(render_docs(page, suite, name) == page for name, page in pages.items())
    rows = pages["results/speed.md"].split("<!-- rows:begin -->")[1].split("<!-- rows:end -->")[0]
    for row in suite.rows:
        lines = [line for line in rows.splitlines() if f"| {row.what} |" in line.replace("\\", "")]
        missed = verdict(row) not in ("target reached", "both reached")
        assert [f"| {verdict(row)} |" in line for line in lines] == [True] * missed
    for growing in suite.growth:
        ends = (growing.milliseconds[0], growing.milliseconds[-1])  # the figure has the others
        cells = [growing.encoding, *(written(time.median) for time in ends), written(growing.slope, 2)]
        assert f"| {' | '.join(cells)} |" in pages["speed.md"]


def test_figures_name_all_implementations_and_have_no_date(suite: Suite) -> None:
    drawings = figures(suite)
    assert [figure.name for figure in drawings] == ["speed", "growth-tokens", "growth-batch"]
    assert suite.bench.source.date not in json.dumps([asdict(figure) for figure in drawings])
    names = {row["implementation"] for row in drawings[0].rows}
    assert {"torchrope", "reference", "timm", "matrix_exp"} <= names
    assert [figure.name for figure in figures(replace(suite, growth=()))] == ["speed"]


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.fixture
def small_pages() -> Iterator[None]:
    """Have each page cost a fault, also where the kernel gives large pages unasked."""
    set_option, disable_large = getattr(ctypes.CDLL(None), "prctl", lambda *arguments: None), 41  # from prctl.h
    set_option(disable_large, 1, 0, 0, 0)
    yield
    set_option(disable_large, 0, 0, 0, 0)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc's memory is kept")
def test_hot_samples_use_memory_again_also_after_cold_ones() -> None:
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        torch.empty(2**20).fill_(1)

    interleaved_cold_seconds({"work": lambda: work}, rounds=2, device="cpu")
    faults = []
    for _ in range(3):  # the kernel may take pages back meanwhile
        calls, before = 0, page_faults()
        interleaved_seconds({"work": work}, rounds=2, device="cpu")
        faults.append((page_faults() - before) / calls)
    assert min(faults) < 100  # of 1024 pages


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc returns its memory")
@pytest.mark.usefixtures("small_pages")
def test_cold_samples_use_new_memory_also_after_hot_ones() -> None:
    faults = []

    def work() -> None:
        before = page_faults()
        torch.empty(2**20).fill_(1)
        faults.append(page_faults() - before)

    # Freed blocks of the heap below one in use, which raising the thresholds again does not return.
    interleaved_seconds({"work": work}, rounds=2, device="cpu")
    in_use = [torch.empty(2**21).fill_(0) for _ in range(4)]
    del in_use[::2]
    faults.clear()
    interleaved_cold_seconds({"work": lambda: work}, rounds=3, device="cpu")
    assert min(faults[1:]) > 900  # of 1024 pages; the first call only warms up
    assert len(in_use) == 2
