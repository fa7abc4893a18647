"""Layer steps of benchmarks/suite.py: parity with float64 before any number, and other implementations."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cpu
import peers
import pytest
import suite
import torch
from parity import under
from parity_gate import ParityError, require_parity
from peers import PEERS, Unavailable, available_peers, make_step, make_task, reference
from render import not_measured
from setting import Setting, nearest_to_cube
from suite_results import EncodingTimes, Source, SpeedResults, StepTime
from torch import Tensor

from torchrope.ops import native
from torchrope.ops.backends import current
from torchrope.rotations import Block, Rotation
from torchrope.testing import assert_close
from torchrope_lab.training.timing import Quartiles

SMALL = Setting(batch=2, heads=2, tokens=10, head_dim=8)


def not_compiled(task: peers.Task) -> peers.Peer:
    raise Unavailable("costs seconds")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, peers.COMPILED, not_compiled)


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
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = peers.rotate

    def rotate(q: Tensor, k: Tensor, rotation: object, *, layout: str) -> tuple[Tensor, ...]:
        turned = under("reference", right, q, k, rotation)
        return turned if current() == "reference" else tuple(map(spoil, turned))

    monkeypatch.setattr(peers, "rotate", rotate)
    monkeypatch.setattr(suite, "BENCH_ENCODINGS", ("mixed",))
    monkeypatch.setattr(cpu, "standard_plan", lambda: replace(suite.standard_plan(), setting=SMALL))
    monkeypatch.setattr(sys, "argv", ["cpu.py", f"--out={tmp_path / 'cpu.json'}", f"--docs={tmp_path}"])
    assert cpu.main() == 1
    printed = capsys.readouterr()
    reason, *lines = printed.err.splitlines()
    assert reason == f"no numbers, {failures} results differ from the float64 reference:"
    assert lines[0].startswith(first)
    assert len(lines) == failures
    assert "measuring" not in printed.out
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", "native" if native.LIBRARY is not None else "reference"), ("float64", "reference")],
)
@pytest.mark.parametrize("name", ["mixed", "liere:8", "comrope-ld:4"])
def test_serving_backend_is_the_one_that_auto_uses(name: str, dtype: str, expected: str) -> None:
    assert peers.serving_backend(make_task(name, replace(SMALL, dtype=dtype))) == expected


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
    ours = StepTime("torchrope", Quartiles(1, 1, 1), Quartiles(1, 1, 1))
    one = EncodingTimes("mixed", "native", (ours,), {"other": "other has no such encoding"})
    two = EncodingTimes("axial", "native", (ours,), {"other": "not installed"})
    source = Source("make bench", "2026-01-01", None, "0.2.0", {}, {}, 1)
    told = not_measured(SpeedResults(SMALL, 21, (one, two), source))
    assert told == ["other was not measured: not installed"]
