"""`python -m torchrope verify`, in Triton's interpreter: right kernels are recorded, wrong ones are not."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import torchrope as tr
from torchrope.ops import native, record
from torchrope.verify import _rotation, main, speedup

SUPPORT = Path(__file__).parent / "support"

# A wrong kernel errs by 1 %, as a careless approximation would. "then NAME" verifies the right one first.
SCRIPT = """
import sys
from pathlib import Path
from interpreted import checked
from torchrope.ops import gpu
from torchrope.verify import main

record, wrong, *arguments = sys.argv[1:]
arguments += ["--record", record, "--device", "cpu"]

def spoil(x):
    return [spoil(y) for y in x] if isinstance(x, (tuple, list)) else x if x is None else 1.01 * x

with checked():
    if wrong.startswith("then "):
        print("exit", main(arguments), Path(record).read_text())
    if wrong := wrong.removeprefix("then "):
        right = getattr(gpu, wrong)
        setattr(gpu, wrong, lambda *args: spoil(right(*args)))
    sys.exit(main(arguments))
"""


def verify(wrong: str, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-c", SCRIPT, str(path), wrong, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def recorded(text: str) -> set[tuple[str, str]]:
    return {(entry["kernel"], entry["architecture"]) for entry in json.loads(text)["kernels"]}


@pytest.mark.slow
def test_right_kernel_is_recorded_and_a_wrong_one_is_removed_again(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"kernels": [vars(entry("skew_exp", "sm_90"))]}))
    ran = verify("then skew_exp", path, "--kernels", "skew_exp")
    _, exited, rest = ran.stdout.partition("exit 0 ")
    assert exited, ran.stdout + ran.stderr
    first, wrong = rest[: rest.rindex("}") + 1], rest[rest.rindex("}") + 1 :]
    assert recorded(first) == {("skew_exp", "sm_90"), ("skew_exp", "interpreter")}
    assert ran.returncode == 1
    assert "skew_exp: WRONG, not recorded" in wrong
    assert recorded(path.read_text()) == {("skew_exp", "sm_90")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "missing"),
    [
        ("", set()),
        ("rotate_planar", {"rotate_planar"}),
        ("rotate_basis", {"skew_eig", "rotate_basis"}),
        ("rotate_block", {"exp_generators", "rotate_block"}),
        ("skew_eig", {"skew_eig", "rotate_basis"}),
    ],
)
def test_every_kernel_is_verified(wrong: str, missing: set[str], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    every = {
        "rotate_planar",
        "skew_eig",
        "rotate_basis",
        "exp_generators",
        "rotate_block",
        "skew_exp",
    }
    path = tmp_path / "record.json"
    names = ["--kernels", min(missing)] if missing else []
    ran = verify(wrong, path, *names)
    assert ran.returncode == bool(wrong), ran.stdout + ran.stderr
    assert recorded(path.read_text()) == {(name, "interpreter") for name in ([] if missing else every)}


def entry(kernel: str, architecture: str, **changes: str) -> record.Verified:
    digest, triton = record.source_digest(), record.triton_version()
    return record.Verified(
        **{**dict(kernel=kernel, architecture=architecture, triton=triton, source=digest, error=0.1), **changes}
    )


@pytest.mark.parametrize(
    ("changes", "listed"),
    [({}, True), ({"source": "0"}, False), ({"triton": "2.0"}, False), ({"architecture": "sm_80"}, False)],
)
def test_only_the_same_kernel_on_the_same_gpu_with_the_same_triton_is_verified(
    changes: dict[str, str], listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "record.json"
    monkeypatch.setattr(record, "users", lambda: path)
    monkeypatch.setattr(record, "architecture", lambda device: "sm_90")
    record.forget()
    assert not record.is_verified("rotate_planar", 0)
    path.write_text(record.merged(path, [entry("rotate_planar", **{"architecture": "sm_90", **changes})], [], "sm_90"))
    record.forget()
    assert record.is_verified("rotate_planar", 0) == listed
    assert not record.is_verified("rotate_block", 0)
    record.forget()


def test_committed_record_lists_only_the_committed_kernels() -> None:
    pytest.importorskip("triton")
    assert all(listed.source == record.source_digest() for listed in record.read(record.COMMITTED))


@pytest.mark.parametrize("text", ["", "[]", '{"kernels": [{"kernel": 1}]}', "[" * 100_000])
def test_damaged_record_is_ignored_with_a_warning(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="verify them again") as warned:
        assert record.read(path) == []
    assert "\n" not in str(warned[0].message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_machines_without_a_gpu_get_one_line(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["--device", device, "--record", str(tmp_path / "record.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchrope verify: verify requires a GPU")
    assert error.count("\n") == 1
    assert not (tmp_path / "record.json").exists()


def test_speedup_is_a_ratio_to_the_compiled_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward) or forward)
    build = partial(tr.MixedRoPE, num_axes=2, head_dim=8)
    step = _rotation(torch.device("cpu"), 4, build, torch.bfloat16, fixed=True)
    assert speedup(step, "native" if native.LIBRARY is not None else "reference", repetitions=5) > 0
    assert compiled == [step.forward]


@pytest.mark.parametrize(("name", "message"), [("gpu", "device must be a GPU, .* got 'gpu'"), ("mps", "got mps")])
def test_device_without_kernels_is_one_line(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)
