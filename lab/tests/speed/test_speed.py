"""`torchrope speed`: parity, other implementations, interleaved rounds."""

import math
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from parity import under
from torch import Tensor

from torchrope.ops import native
from torchrope.ops.backends import current
from torchrope.rotations import Block, Rotation
from torchrope.testing import assert_close
from torchrope_lab import timing
from torchrope_lab.cli import main
from torchrope_lab.results import StudyResult
from torchrope_lab.speed import peers
from torchrope_lab.speed.config import Setting, nearest_to_cube
from torchrope_lab.speed.findings import not_measured, speed_result
from torchrope_lab.speed.parity import ParityError, require_parity
from torchrope_lab.speed.peers import PEERS, Unavailable, available_peers, make_step, make_task, reference
from torchrope_lab.speed.results import EncodingTimes, Source, SpeedResults, StepTime
from torchrope_lab.speed.run import measure_speed
from torchrope_lab.timing import Quartiles, interleaved_seconds, quartiles, ratio

SMALL = Setting(batch=2, heads=2, tokens=10, head_dim=8)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        status = main(["speed", *map(str, arguments)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def not_compiled(task: peers.Task) -> peers.Peer:
    raise Unavailable("costs seconds")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, peers.COMPILED, not_compiled)


@pytest.mark.slow
def test_bench_command_writes_results_table_and_report(tmp_path: Path, run: Run) -> None:
    status, printed, _ = run("--shape=2,2,10,8", "--encodings=mixed", "--rounds=3", "--threads=1", "--out", tmp_path)
    assert status == 0
    assert printed.index("parity") < printed.index("measuring")

    found = StudyResult.read(tmp_path / "speed.json")
    assert found.run.command is not None
    assert found.run.command.startswith("torchrope speed --shape=2,2,10,8")
    assert found.run.config == {"encodings": ["mixed"], **asdict(SMALL), "rounds": 3, "threads": 1}
    times = {row["implementation"]: row for row in found.findings.figures[0].rows}
    assert {"torchrope", "reference", "compiled reference", "timm", "complex multiply"} <= set(times)
    for row in times.values():
        assert 0 < row["milliseconds low"] <= row["milliseconds"] <= row["milliseconds high"]
    (measured,) = found.findings.tables[0].rows
    assert measured["torchrope"] == times["torchrope"]["milliseconds"]

    table = [line.split("  ") for line in printed.splitlines() if line.startswith(("Encoding", "mixed"))]
    headings, row = ([cell.strip() for cell in cells if cell.strip()] for cells in table)
    assert headings[:4] == ["Encoding", "Backend", "torchrope, ms", "reference, ×"]
    assert float(dict(zip(headings, row, strict=True))["timm, ×"]) == pytest.approx(measured["timm"], rel=0.01)
    assert "matrix_exp was not measured" in printed
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "gradients of mixed agree with the reference in float64" in page
    assert ElementTree.parse(tmp_path / "report" / "figures" / "speed-speed.svg").getroot().tag.endswith("svg")
    assert "complex multiply, ×" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


def measured(rounds: int, **ratios: Quartiles) -> SpeedResults:
    """Build the result of a benchmark of mixed with given ratios to other implementations."""
    one = Quartiles(1, 1, 1)
    timed = [StepTime("torchrope", one, one), *(StepTime(name, ratio, ratio) for name, ratio in ratios.items())]
    source = Source("torchrope speed", "2026-01-01", None, "0.2.0", {}, {}, 1)
    return SpeedResults(SMALL, rounds, (EncodingTimes("mixed", "native", tuple(timed), {}),), {}, source, 0.25)


def test_answer_claims_only_separated_quartiles() -> None:
    ratios = {
        "reference": Quartiles(1.9, 2.0, 2.1), "timm": Quartiles(0.9, 1.2, 1.4), "matrix_exp": Quartiles(0.2, 0.5, 0.9)
    }  # fmt: skip
    answer = speed_result(measured(21, **ratios)).findings.answer
    assert "faster in 1 of 3 comparisons and slower in 1" in answer
    assert "0.5 [0.2, 0.9] (matrix_exp with mixed) to 2 [1.9, 2.1] (reference with mixed)" in answer
    assert len(answer.split()) <= 50
    few = speed_result(measured(16, **ratios)).findings.answer
    assert "No difference is claimed" in few
    assert "faster" not in few


def test_result_has_the_largest_parity_error() -> None:
    (check,) = speed_result(measured(21, reference=Quartiles(1, 2, 3))).findings.checks
    assert check.holds
    assert "0.25 of the allowed one" in check.measured


def test_report_shows_a_bench_with_studies_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = speed_result(measured(21, reference=Quartiles(1, 2, 3)))
    replace(study, study="capacity", title="Size of blocks").write(tmp_path / "capacity.json")
    study.write(tmp_path / "speed.json")
    assert main(["report", str(tmp_path)]) == 0
    assert "capacity: torchrope is" in capsys.readouterr().out
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert page.index('id="study-capacity"') < page.index('id="study-speed"')


def wrong_value(turned: Tensor) -> Tensor:
    return turned * 1.001


def not_a_number(turned: Tensor) -> Tensor:
    return turned * torch.nan


def wrong_gradient(turned: Tensor) -> Tensor:
    return turned + 0.01 * (turned - turned.detach())


def refusal(turned: Tensor) -> Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("spoil", "first", "failures"),
    [
        (wrong_value, "mixed: rotated q: error", 5),
        (not_a_number, "mixed: rotated q: error nan", 5),
        (wrong_gradient, "mixed: gradient of q: error", 3),
        (refusal, "mixed: auto raised RuntimeError: no such kernel", 1),
    ],
)
def test_failed_parity_writes_no_results(
    spoil: Callable[[Tensor], Tensor],
    first: str,
    failures: int,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = peers.rotate

    def rotate(q: Tensor, k: Tensor, rotation: object, *, layout: str) -> tuple[Tensor, ...]:
        turned = under("reference", right, q, k, rotation)
        return turned if current() == "reference" else tuple(map(spoil, turned))

    monkeypatch.setattr(peers, "rotate", rotate)
    status, printed, error = run("--shape=2,2,10,8", "--encodings=mixed", "--out", tmp_path / "out")
    reason, *lines = error.splitlines()
    assert status == 1
    assert reason == f"torchrope speed: nothing was measured: {failures} results differ from the float64 reference:"
    assert lines[0].startswith(first)
    assert len(lines) == failures
    assert "measuring" not in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_parity_of_all_encodings(dtype: str) -> None:
    names = ("axial", "mixed", "liere:4", "liere", "comrope-ap:4", "comrope-ld:4")
    assert 0 <= require_parity(names, replace(SMALL, dtype=dtype)) <= 1


def test_parity_error_names_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.rotate

    def rotate(q: Tensor, k: Tensor, rotation: Rotation, *, layout: str) -> tuple[Tensor, Tensor]:
        backwards = current() == "auto" and isinstance(rotation, Block)
        return under("reference", right, q, k, rotation.inverse() if backwards else rotation)

    monkeypatch.setattr(peers, "rotate", rotate)
    with pytest.raises(ParityError) as raised:
        require_parity(("axial", "liere:4"), SMALL)
    assert {line.split(":")[0] for line in raised.value.failures} == {"liere"}


PAIRS = [
    ("axial", peers.TIMM, SMALL),
    ("axial", peers.TIMM, replace(SMALL, tokens=9, head_dim=16)),
    ("axial", peers.ROTARY_EMBEDDING, SMALL),
    ("axial", peers.ROTARY_EMBEDDING, replace(SMALL, axes=3, head_dim=12, tokens=24)),
    ("axial", peers.COMPLEX, SMALL),
    ("mixed", peers.TIMM, SMALL),
    ("mixed", peers.TIMM, replace(SMALL, tokens=6)),
    ("mixed", peers.COMPLEX, replace(SMALL, axes=3, dtype="float64")),
    ("liere:2", peers.COMPLEX, SMALL),
    ("liere:4", peers.MATRIX_EXP, SMALL),
    ("liere:8", peers.MATRIX_EXP, replace(SMALL, axes=1)),
    ("comrope-ap:4", peers.MATRIX_EXP, SMALL),
    ("comrope-ld:4", peers.MATRIX_EXP, replace(SMALL, dtype="float64")),
    ("comrope-ld:4", peers.MATRIX_EXP, replace(SMALL, dtype="bfloat16")),
]


@pytest.mark.parametrize(("name", "who", "setting"), PAIRS)
def test_implementations_agree(name: str, who: str, setting: Setting) -> None:
    task = make_task(name, setting)
    try:
        peer = PEERS[who](task)
    except Unavailable as reason:
        pytest.skip(f"{who}: {reason}")
    turned, gradients = make_step(task, peer)()
    same, expected = make_step(task, reference(task))()
    channels = slice(None) if peer.channels is None else peer.channels
    for one, other in zip((*turned, *gradients[:2]), (*same, *expected[:2]), strict=True):
        assert_close(one, other[..., channels], f"{who} - reference")
    for one, other in zip(gradients[2:], expected[2:], strict=True):
        scale = other.abs().max()
        assert_close((one / scale).flatten(), (other / scale).flatten(), f"{who} gradient", task.q.dtype)


@pytest.mark.parametrize(
    ("name", "setting", "who", "reason"),
    [
        ("mixed", replace(SMALL, axes=3), peers.TIMM, "timm supports two axes and a head_dim divisible by 4"),
        ("liere:4", SMALL, peers.TIMM, "timm has no such encoding"),
        ("mixed", SMALL, peers.MATRIX_EXP, "matrix_exp is for blocks larger than 2"),
        ("liere:4", SMALL, peers.COMPLEX, "a complex multiply rotates channel pairs only"),
        ("mixed", SMALL, peers.ROTARY_EMBEDDING, "rotary-embedding-torch has no such encoding"),
    ],
)
@pytest.mark.usefixtures("uncompiled")
def test_unavailable_implementations_have_a_reason(name: str, setting: Setting, who: str, reason: str) -> None:
    measured, left_out = available_peers(make_task(name, setting))
    assert left_out[who] == reason
    assert who not in {peer.name for peer in measured}


def test_missing_packages_and_compilers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    monkeypatch.setitem(sys.modules, "timm.layers", None)
    _, left_out = available_peers(make_task("mixed", SMALL))
    assert left_out[peers.COMPILED] == "torch.compile failed: RuntimeError"
    assert left_out[peers.TIMM] == "not installed"


@pytest.mark.usefixtures("uncompiled")
def test_encodings_that_do_not_fit_are_reported() -> None:
    bench = measure_speed(replace(SMALL, head_dim=6), rounds=1, log=lambda line: None)
    assert [compared.encoding for compared in bench.encodings] == ["mixed", "liere"]
    assert "head_dim must be divisible by block_size = 8, got 6" in bench.not_fitting["liere:8"]
    assert set(bench.not_fitting) == {"axial", "liere:8", "comrope-ap", "comrope-ld"}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", "native" if native.LIBRARY is not None else "reference"), ("float64", "reference")],
)
@pytest.mark.parametrize("name", ["mixed", "liere:8", "comrope-ld:4"])
def test_serving_backend_is_the_one_that_auto_uses(name: str, dtype: str, expected: str) -> None:
    assert peers.serving_backend(make_task(name, replace(SMALL, dtype=dtype))) == expected


def test_rounds_interleave_and_rotate_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MOST_REPEATS", 1)
    calls: list[str] = []
    works = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = interleaved_seconds(works, rounds=3, device="cpu")
    assert "".join(calls[-9:]) == "abcbcacab"
    assert {name: len(own) for name, own in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_computed_per_round() -> None:
    slow_moment = ratio([2.0, 20.0, 2.0, 2.0, 2.0], [1.0, 10.0, 1.0, 1.0, 1.0])
    assert asdict(slow_moment) == {"low": 2, "median": 2, "high": 2}
    assert asdict(quartiles([1.0, 2.0, 3.0, 4.0, 5.0])) == {"low": 2, "median": 3, "high": 4}


@pytest.mark.parametrize(
    ("tokens", "axes", "lattice", "front"),
    [
        (65, 2, (8, 8), 1),
        (64, 2, (8, 8), 0),
        (785, 2, (28, 28), 1),
        (4096, 2, (64, 64), 0),
        (513, 3, (8, 8, 8), 1),
        (17, 4, (2, 2, 2, 2), 1),
        (1, 2, (1, 1), 0),
        (2, 2, (1, 1), 1),
        (61, 2, (6, 10), 1),
        (100, 1, (100,), 0),
    ],
)
def test_lattice_is_nearest_to_a_cube(tokens: int, axes: int, lattice: tuple[int, ...], front: int) -> None:
    setting = replace(SMALL, tokens=tokens, axes=axes)
    assert (setting.lattice, setting.prefix) == (lattice, front)
    assert math.prod(nearest_to_cube(tokens, axes)) == tokens
    assert make_task("mixed", setting).positions.shape == (tokens, axes)


def test_package_that_is_not_installed_has_no_other_reason() -> None:
    bench = measured(21, reference=Quartiles(1, 2, 3))
    [mixed] = bench.encodings
    one = replace(mixed, left_out={"other": "other has no such encoding"})
    two = replace(mixed, encoding="axial", left_out={"other": "not installed"})
    told = not_measured(replace(bench, encodings=(one, two)))
    assert told == ["other was not measured: not installed"]


def test_missing_vl_convert_keeps_results_without_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    speed_result(measured(21, reference=Quartiles(1, 2, 3))).write(tmp_path / "speed.json")
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "no page: vl_convert is not installed" in printed
    assert "reference, ×" in printed
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dvice cpu", "there is no option --dvice; did you mean '--device'?"),
        ("--device cdua", "must be one of cpu, cuda, got 'cdua'; did you mean 'cuda'?"),
        ("--dtype float23", "got 'float23'; did you mean 'float32'?"),
        ("--encodings lier", "got 'lier'; did you mean 'liere'?"),
        ("--encodings mixed,mixed", "--encodings must be different values, got mixed,mixed"),
        ("--encodings ,", "--encodings must be one value or more, got []"),
        ("--encodings learned", "torchrope speed measures rotary encodings, got 'learned'"),
        ("--encodings none", "torchrope speed measures rotary encodings, got 'none'"),
        ("--encodings liere:7", "head_dim must be divisible by block_size = 7, got 64"),
        ("--shape 1,2,3", "--shape must be 4 values, got [1, 2, 3]"),
        ("--shape 1,2,0,8", "tokens must be 1 or more, got 0"),
        ("--shape 1,2,3,1", "the shape must fit an encoding, got"),
        ("--axes 0", "--axes must be 1 or more, got 0"),
        ("--rounds 0", "--rounds must be 1 or more, got 0"),
        ("--threads 0", "--threads must be 1 or more, got 0"),
        ("--rounds many", "--rounds"),
        ("--out /dev/null", "--out must be a folder, got the file /dev/null"),
    ],
)
def test_bench_command_reports_errors_in_one_line(
    arguments: str, message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, error = run(*arguments.split())
    assert status == 2
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_raises(run: Run) -> None:
    assert run("--device", "cuda")[2].startswith("torchrope speed: --device cuda requires a GPU")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["speed", "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    for option in ("--device", "--shape", "--axes", "--dtype", "--encodings", "--threads", "--rounds", "--out"):
        assert option in printed
