"""`python -m torchrope verify`, in Triton's interpreter: right specialisations are recorded, wrong ones are not."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import torchrope as tr
from torchrope.ops import backends, record
from torchrope.ops.record import Specialisation
from torchrope.verify import all_shapes, common_shapes, completed, main, merged

pytest.importorskip("triton")
SUPPORT = Path(__file__).parent / "support"

# A wrong kernel errs by 1 %, as a careless approximation would, where a condition holds.
SCRIPT = """
import sys
import torch
from interpreted import checked
from torchrope.ops import gpu
from torchrope.ops.gpu import launch
from torchrope.verify import main

wrong, condition, *arguments = sys.argv[1:]

def spoil(x):
    return [spoil(y) for y in x] if isinstance(x, (tuple, list)) else x if x is None else 1.01 * x

if wrong:
    right, holds = getattr(gpu, wrong), eval(f"lambda *args: {condition}")
    setattr(gpu, wrong, lambda *args: spoil(right(*args)) if holds(*args) else right(*args))
with checked():
    sys.exit(main([*arguments, "--device", "cpu"]))
"""

PLANAR = Specialisation("rotate_planar", "float32", 6, 2, 2, 1, False, "frequencies")
BLOCK = Specialisation("rotate_block", "float16", 8, 2, 4, 2, False, "table")
BASIS = Specialisation("rotate_basis", "float32", 8, 2, 4, 2)
EXP = Specialisation("skew_exp", b=3)


def verify(path: Path, *shapes: Specialisation, wrong: str = "", when: str = "True") -> tuple[set[str], str]:
    """Verify shapes, with an operator made wrong where a condition on `args` holds; return records and output."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    of_shapes = [argument for shape in shapes for argument in ("--shape", str(shape))]
    command = [sys.executable, "-c", SCRIPT, wrong, when, "--record", str(path), *of_shapes]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == ("WRONG" in ran.stdout), ran.stdout + ran.stderr
    return {entry["specialisation"] for entry in json.loads(path.read_text())["kernels"]}, ran.stdout


@pytest.mark.slow
def test_right_kernel_is_recorded_and_a_wrong_one_is_removed_again(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"kernels": [entry(EXP, "sm_90")._asdict()]}))
    assert verify(path, EXP)[0] == {str(EXP)}
    assert [x.architecture for x in record.read(path)] == ["interpreter", "sm_90"]
    assert f"{EXP}: WRONG, not recorded" in verify(path, EXP, wrong="skew_exp")[1]
    assert [x.architecture for x in record.read(path)] == ["sm_90"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "when"),
    [
        ("rotate_planar_backward", "not args[-2] and args[0].dtype == torch.bfloat16"),
        ("rotate_planar", "not args[-1] and args[0].dtype == torch.bfloat16 and not launch._splits"),  # later rows
    ],
)
def test_kernel_that_is_wrong_for_one_specialisation_is_refused_for_that_one_alone(
    wrong: str, when: str, tmp_path: Path
) -> None:
    halves = PLANAR._replace(halves=True)
    shapes = [PLANAR, halves, PLANAR._replace(dtype="bfloat16"), halves._replace(dtype="bfloat16")]
    assert verify(tmp_path / "record.json", *shapes, wrong=wrong, when=when)[0] == {str(shape) for shape in shapes[:3]}


@pytest.mark.slow
def test_gradient_that_is_wrong_is_refused_where_it_is_wanted(tmp_path: Path) -> None:
    wanted = [PLANAR._replace(wanted=x) for x in ("", "positions", "frequencies", "positions+frequencies")]
    recorded, _ = verify(tmp_path / "record.json", *wanted, wrong="rotate_planar_backward", when="args[-1][1]")
    assert recorded == {str(x) for x in wanted[:2]}


OF_BASIS = {str(Specialisation("skew_eig", blocks=2, b=4, axes=2)), str(BASIS)}
OF_BLOCK = {str(Specialisation("exp_generators", blocks=2, b=4, axes=2)), str(BLOCK._replace(axes=0))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "missing"),
    [
        ("", set()),
        ("rotate_basis_backward", OF_BASIS),
        ("skew_eig", OF_BASIS),
        ("rotate_block_backward", OF_BLOCK),
        ("exp_generators_backward", OF_BLOCK),
    ],
)
def test_operators_that_need_each_other_are_verified_together(wrong: str, missing: set[str], tmp_path: Path) -> None:
    assert verify(tmp_path / "record.json", BASIS, BLOCK, wrong=wrong)[0] == (OF_BASIS | OF_BLOCK) - missing


@pytest.mark.parametrize("shapes", [common_shapes, all_shapes])
def test_shapes_are_complete_and_survive_the_command_line(shapes: object) -> None:
    for shape in shapes():  # type: ignore[operator]
        assert completed(shape) == [shape]
        assert Specialisation.parse(str(shape)) == shape
    assert {*common_shapes()} <= {*all_shapes()}


@pytest.mark.parametrize("text", ["rotate_planar", "kernel=rotate_planar,heads=2", "kernel=rotate_planar,axes=x"])
def test_shape_that_is_none_is_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", text]) == 2
    error = capsys.readouterr().err
    assert "a shape must be kernel=NAME and some of dtype=, channels=" in error
    assert error.count("\n") == 1


def entry(shape: Specialisation, architecture: str, **changes: str) -> record.Verified:
    keys = dict(source=record.digest(shape.kernel), triton=record.triton_version(), error=0.1)
    return record.Verified(**{**dict(specialisation=str(shape), architecture=architecture), **keys, **changes})


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make "auto" decide on a CPU as it does on an H100, without running kernels; return the user's record."""
    monkeypatch.setattr(record, "user_record", lambda: tmp_path / "record.json")
    monkeypatch.setattr(record, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(record, "_TOLD", [])
    monkeypatch.setattr(backends.native, "LIBRARY", None)
    monkeypatch.setattr(backends, "_reason", lambda kernel, name, *args: backends._unverified(kernel, *args))
    record.forget()
    yield tmp_path / "record.json"
    record.forget()


@pytest.mark.filterwarnings("ignore:torchrope rotates in plain PyTorch on this GPU")
@pytest.mark.parametrize(
    ("changes", "listed"),
    [({}, True), ({"source": "0"}, False), ({"triton": "2.0"}, False), ({"architecture": "sm_80"}, False)],
)
def test_only_the_same_kernel_on_the_same_gpu_with_the_same_triton_is_verified(
    changes: dict[str, str], listed: bool, like_a_gpu: Path
) -> None:
    assert not record.is_verified(0, *PLANAR)
    changed = entry(PLANAR, **{"architecture": "sm_90", **changes})
    like_a_gpu.write_text(merged(like_a_gpu, [changed], [], "sm_90"))
    record.forget()
    assert record.is_verified(0, *PLANAR) == listed
    for other in (dict(kernel="rotate_block"), dict(dtype="float16"), dict(channels=8), dict(wanted=""), dict(axes=2)):
        assert not record.is_verified(0, *PLANAR._replace(**other))


@pytest.mark.filterwarnings("ignore:torchrope rotates in plain PyTorch on this GPU")
def test_encoding_that_does_not_know_q_asks_for_any_dtype(like_a_gpu: Path) -> None:
    of_block = BLOCK._replace(axes=0)
    like_a_gpu.write_text(merged(like_a_gpu, [entry(of_block, "sm_90")], [], "sm_90"))
    unknown = of_block._replace(dtype="", channels=0, wanted="")
    assert record.is_verified(0, *unknown)
    assert not record.is_verified(0, *unknown._replace(blocks=1))


@pytest.mark.parametrize(
    ("encoding", "shape"),
    [
        (tr.MixedRoPE, "kernel=rotate_planar,dtype=bfloat16,channels=8,blocks=4,axes=2,wanted=frequencies"),
        (tr.LieRE, "kernel=exp_generators,blocks=1,b=8,axes=2"),
        (tr.ComRoPELD, "kernel=skew_eig,blocks=1,b=8,axes=2"),
    ],
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_first_rotation_on_a_gpu_says_once_what_is_used_and_what_changes_it(
    encoding: type[tr.Encoding], shape: str, compiled: bool, like_a_gpu: Path
) -> None:
    made, q = encoding(num_axes=2, num_heads=2, head_dim=8), torch.randn(1, 2, 9, 8).bfloat16()

    def rotated() -> torch.Tensor:
        return tr.rotate(q, q, made(tr.grid(3, 3)))[0]

    run = torch.compile(rotated, fullgraph=True, backend="eager", dynamic=True) if compiled else rotated
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with tr.backend("reference"):
            run()
        assert warned == []
        run()
        run()
    (told,) = [str(x.message) for x in warned]
    assert told.startswith("torchrope rotates in plain PyTorch on this GPU (sm_90), for which no Triton kernel is ver")
    assert told.endswith(f": python -m torchrope verify --shape {shape}")
    assert all(x.dtype and x.channels == 8 for x in completed(Specialisation.parse(shape)))


def test_committed_record_lists_only_the_committed_kernels() -> None:
    for listed in record.read(record.COMMITTED):
        assert listed.source == record.digest(Specialisation.parse(listed.specialisation).kernel)


def test_digest_is_of_a_kernel_and_of_what_it_calls() -> None:
    assert record.sources("planar").keys() == {"planar", "launch"}
    assert record.sources("basis").keys() == {"basis", "block", "launch", "products"}
    assert record.digest("rotate_planar") != record.digest("rotate_block")


@pytest.mark.parametrize("text", ["", "[]", '{"kernels": [{"kernel": 1}]}', "[" * 100_000])
def test_damaged_record_is_ignored_with_a_warning(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="verify them again") as warned:
        assert record.read(path) == []
    assert "\n" not in str(warned[0].message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "verify requires a GPU that PyTorch can use"),
        ("cpu", "verify requires a GPU; on a CPU set TRITON_INTERPRET=1"),
        ("mps", "verify requires a GPU of NVIDIA or AMD, named cuda, got mps"),
        ("gpu", "device must be a GPU, such as cuda or cuda:1, got 'gpu'"),
    ],
)
def test_device_without_kernels_is_one_line(
    device: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", device, "--record", str(tmp_path / "record.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"torchrope verify: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "record.json").exists()
