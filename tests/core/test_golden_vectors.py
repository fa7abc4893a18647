"""Golden vectors, recomputed from the files alone: by numpy where rotations are planar, else by SciPy's exponential."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("scipy")

from safetensors.numpy import load_file
from scipy import linalg

import torchrope as tr
from torchrope import golden
from torchrope.encodings.names import BUILT_IN, ROTARY

Sheet = dict[str, Any]
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sheet, Tensors]:
    folder = tmp_path_factory.mktemp("golden")
    golden.write(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3e6
    return json.loads((folder / golden.SHEET).read_text()), load_file(folder / golden.TENSORS)


def pairs(row: Sheet, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of the first and second channels of all pairs."""
    d = row["rotary_dim"]
    return (x[..., 0:d:2], x[..., 1:d:2]) if row["layout"] == "interleaved" else (x[..., : d // 2], x[..., d // 2 : d])


def planar(row: Sheet, x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    phi = np.einsum("ta,ahi->hti", positions, frequencies)
    y = x.copy()
    (u, v), (first, second) = pairs(row, x), pairs(row, y)
    first[...], second[...] = u * np.cos(phi) - v * np.sin(phi), u * np.sin(phi) + v * np.cos(phi)
    return y


def exponential(row: Sheet, x: np.ndarray, positions: np.ndarray, generators: np.ndarray) -> np.ndarray:
    blocks = linalg.expm(np.einsum("ta,ahjcd->htjcd", positions, generators))
    rotated = x[..., : row["rotary_dim"]].reshape(*x.shape[:-1], -1, row["block_size"])
    y = x.copy()
    y[..., : row["rotary_dim"]] = np.einsum("htjcd,shtjd->shtjc", blocks, rotated).reshape(*x.shape[:-1], -1)
    return y


KINDS = {"planar": (planar, "frequencies"), "matrix exponential": (exponential, "generators")}


@pytest.mark.parametrize("name", [name for name, _ in golden.vectors()])
def test_sheet_suffices_for_outputs_and_gradients(name: str, files: tuple[Sheet, Tensors]) -> None:
    sheet, tensors = files
    row = sheet["vectors"][name]
    of = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
    assert all(str(value.dtype) == row["dtype"] for value in of.values())
    assert len(row["axes"]) == of["positions"].shape[1]
    rotate, parameter = KINDS[row["rotation"]]

    def rotated(x: np.ndarray, **changed: np.ndarray) -> np.ndarray:
        given = of | changed
        return rotate(row, x, given["positions"], given[parameter])

    for side in ("q", "k"):
        np.testing.assert_allclose(rotated(of[side]), of[f"rotated_{side}"], atol=1e-12)
        back = rotated(of[f"upstream_{side}"], positions=-of["positions"])  # R is orthogonal: its transpose is R(-p)
        np.testing.assert_allclose(back, of[f"gradient_of_{side}"], atol=1e-12)

    def loss(**changed: np.ndarray) -> float:
        return sum(float((rotated(of[side], **changed) * of[f"upstream_{side}"]).sum()) for side in ("q", "k"))

    random, step = np.random.default_rng(0), 1e-5
    for leaf in ("positions", parameter):
        direction = random.standard_normal(of[leaf].shape)
        if leaf == "generators":
            direction = direction - direction.swapaxes(-1, -2)
        up, down = (loss(**{leaf: of[leaf] + sign * step * direction}) for sign in (1, -1))
        expected = (up - down) / (2 * step)
        assert (of[f"gradient_of_{leaf}"] * direction).sum() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", [name for name, _ in golden.vectors()])
def test_outputs_are_those_of_the_encoding(name: str, files: tuple[Sheet, Tensors]) -> None:
    row = files[0]["vectors"][name]
    torch.manual_seed(0)
    encoding = tr.parse_encoding(row["encoding"]).rotary(**row["arguments"]).double()
    q, k, positions = (torch.from_numpy(files[1][f"{name}/{part}"]) for part in ("q", "k", "positions"))
    rotation = encoding(positions)
    rotated = tr.rotate(q, k, rotation.in_halves() if row["layout"] == "halves" else rotation)
    for side, found in zip("qk", rotated, strict=True):
        np.testing.assert_allclose(found.detach().numpy(), files[1][f"{name}/rotated_{side}"], atol=1e-12)


def test_every_rotary_encoding_is_there(files: tuple[Sheet, Tensors]) -> None:
    named = {row["encoding"].partition(":")[0] for row in files[0]["vectors"].values()}
    assert named == BUILT_IN & ROTARY.keys()


def test_convention_of_llama_is_that_of_transformers(files: tuple[Sheet, Tensors]) -> None:
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    name = next(name for name in files[0]["vectors"] if "Llama" in name)
    q, k, positions, frequencies = (
        torch.from_numpy(files[1][f"{name}/{part}"]) for part in ("q", "k", "positions", "frequencies")
    )
    theirs = 10000.0 ** -(torch.arange(12, dtype=torch.float64) / 12)
    torch.testing.assert_close(frequencies[0, 0], theirs, rtol=1e-6, atol=0)
    angles = torch.cat([positions * frequencies[0, 0]] * 2, dim=-1)[None]
    expected = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    for side, found in zip("qk", expected, strict=True):
        np.testing.assert_allclose(found.numpy(), files[1][f"{name}/rotated_{side}"], atol=1e-12)


@pytest.mark.slow
def test_command_writes_the_same_bytes_again(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        subprocess.run([sys.executable, "-m", "torchrope", "golden", tmp_path / folder], check=True)
    for file in (golden.TENSORS, golden.SHEET):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_file_in_place_of_the_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    assert golden.main([str(tmp_path / "taken")]) == 2
    assert capsys.readouterr().err.startswith("torchrope golden: cannot write ")
