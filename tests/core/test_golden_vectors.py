"""Golden vectors, recomputed from the files alone by the formulas of the sheet, in numpy and SciPy."""

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

from numpy.polynomial import legendre
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
    if row["layout"] == "interleaved":
        return x[..., 0:d:2], x[..., 1:d:2]
    parts = len(row["axes"]) if row["layout"] == "halves of an axis" else 1
    halves = x[..., :d].reshape(*x.shape[:-1], parts, 2, d // (2 * parts))
    return halves[..., 0, :].reshape(*x.shape[:-1], -1), halves[..., 1, :].reshape(*x.shape[:-1], -1)


def planar(row: Sheet, x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    phi = np.einsum("ta,ahi->hti", positions, frequencies)
    u, v = pairs(row, x)
    first, second = (i.astype(int) for i in pairs(row, np.arange(x.shape[-1], dtype=float)))
    y = x.copy()
    y[..., first], y[..., second] = u * np.cos(phi) - v * np.sin(phi), u * np.sin(phi) + v * np.cos(phi)
    return y


def exponential(row: Sheet, x: np.ndarray, positions: np.ndarray, generators: np.ndarray) -> np.ndarray:
    blocks = linalg.expm(np.einsum("ta,ahjcd->htjcd", positions, generators))
    rotated = x[..., : row["rotary_dim"]].reshape(*x.shape[:-1], -1, row["block_size"])
    y = x.copy()
    y[..., : row["rotary_dim"]] = np.einsum("htjcd,shtjd->shtjc", blocks, rotated).reshape(*x.shape[:-1], -1)
    return y


def rotated(row: Sheet, of: Tensors) -> Tensors:
    turn, parameter = {"planar": (planar, "frequencies"), "matrix exponential": (exponential, "generators")}[
        row["kind"]
    ]
    return {f"rotated_{side}": turn(row, of[side], of["positions"], of[parameter]) for side in ("q", "k")}


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0.0)


def offsets(of: Tensors) -> np.ndarray:
    """(tokens of q, tokens of k, axes)"""
    return of["positions"][:, None] - of["positions"][None]


def scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return q @ k.swapaxes(-1, -2)


def harope(row: Sheet, of: Tensors) -> Tensors:
    d = row["arguments"]["head_dim"]
    u, v = np.zeros((2, row["arguments"]["num_heads"], d, d))
    for matrix, upper in ((u, of["left"]), (v, of["right"])):
        rows, columns = np.triu_indices(d, 1)
        matrix[:, rows, columns] = upper
    u, v = linalg.expm(u - u.swapaxes(-1, -2)), linalg.expm(v - v.swapaxes(-1, -2))
    maps = u * (softplus(of["scales"]) + 1e-6)[:, None] @ v.swapaxes(-1, -2)
    turned = dict(row, rotary_dim=d, layout="interleaved")
    frequencies = of["rotary.frequencies"][:, None]
    q = planar(turned, np.einsum("hij,nhtj->nhti", maps, of["q"]), of["positions"], frequencies)
    k = np.einsum("hij,nhtj->nhti", np.linalg.inv(maps).swapaxes(-1, -2), of["k"])
    return {"scores": scores(q, planar(turned, k, of["positions"], frequencies))}


def pape(row: Sheet, of: Tensors) -> Tensors:
    u = np.einsum("ta,ahi->hti", of["positions"], of["directions"])
    d = u[:, :, None] - u[:, None]  # (heads, tokens of q, tokens of k, parabolas)
    a, b = np.einsum("chid,nsd->cnhsi", of["weight"], of["tokens"])[..., None, :]
    return {"scores": scores(of["q"], of["k"]) + (b * d - softplus(a) * d**2).sum(-1)}


def pape_ri(row: Sheet, of: Tensors) -> Tensors:
    a = softplus(np.einsum("hd,nsd->nhs", of["weight"][0, :, 0], of["tokens"]))[..., None]
    squared = (offsets(of) ** 2).sum(-1)
    return {"scores": scores(of["q"], of["k"]) - a * of["scales"][:, None, None] ** 2 * squared}


def sphere(row: Sheet, of: Tensors) -> Tensors:
    p = of["positions"]
    if p.shape[-1] == 2:
        latitude, longitude = np.radians(p).T
        p = np.stack([np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)], -1)
    p = p / np.linalg.norm(p, axis=-1, keepdims=True)
    channels = np.arange(of["q"].shape[-1])
    degrees = np.rint(channels * row["arguments"]["max_degree"] / channels[-1]).astype(int)
    weights = legendre.legval(p @ p.T, np.eye(degrees.max() + 1))[degrees]  # (channels, tokens of q, tokens of k)
    return {"scores": np.einsum("nhsc,nhtc,cst->nhst", of["q"], of["k"], weights)}


def learned(row: Sheet, of: Tensors) -> Tensors:
    return {"vectors": of["table"][tuple(of["positions"].astype(int).T)]}


def sinusoidal(row: Sheet, of: Tensors) -> Tensors:
    (tokens, axes), dim = of["positions"].shape, row["arguments"]["dim"]
    n = dim // (2 * axes)
    x = (of["positions"][..., None] * 10000.0 ** -(np.arange(n) / n)).reshape(tokens, -1)
    vectors = np.zeros((tokens, dim))
    vectors[:, 0 : 2 * axes * n : 2], vectors[:, 1 : 2 * axes * n : 2] = np.sin(x), np.cos(x)
    return {"vectors": vectors}


def bias(row: Sheet, of: Tensors) -> Tensors:
    sizes = np.array(row["arguments"]["sizes"])
    index = tuple(np.moveaxis((offsets(of) + sizes - 1).astype(int), -1, 0))
    return {"bias": np.moveaxis(of["table"][np.ravel_multi_index(index, 2 * sizes - 1)], -1, 0)}


def alibi(row: Sheet, of: Tensors) -> Tensors:
    assert row["arguments"]["num_heads"] == 3
    slopes = 2.0 ** -np.array([4.0, 8.0, 2.0])  # of two heads, then the first of four
    return {"bias": -slopes[:, None, None] * np.linalg.norm(offsets(of), axis=-1)}


def fire(row: Sheet, of: Tensors) -> Tensors:
    d, c = np.linalg.norm(offsets(of), axis=-1), np.exp(of["log_scale"])
    x = np.log(c * d + 1) / np.log(c * d.max() * max(1.0, np.exp(of["log_threshold"])) + 1)
    hidden = np.maximum(x[..., None] * of["inner.weight"][:, 0] + of["inner.bias"], 0.0)
    return {"bias": np.moveaxis(hidden @ of["outer.weight"].T + of["outer.bias"], -1, 0)}


def lookhere(row: Sheet, of: Tensors) -> Tensors:
    heads, offset = row["arguments"]["num_heads"], -offsets(of)
    distance, maps = np.linalg.norm(offset, axis=-1), []
    for head in range(heads):
        if head >= heads - heads // 3:
            maps.append(-(4.0 ** -(1 + (head - heads + heads // 3) % 4)) * distance)
            continue
        axis, sign = divmod(head % (2 * offset.shape[-1]), 2)
        seen = (2 * sign - 1) * offset[..., axis] >= 0
        maps.append(np.where(seen, -(2.0 ** -(1 + head // 4)) * distance, -np.inf))
    return {"bias": np.stack(maps)}


FORMULAS = {
    "planar": rotated, "matrix exponential": rotated, "harope": harope, "pape": pape, "pape-ri": pape_ri,
    "sphere": sphere, "learned": learned, "sinusoidal": sinusoidal, "bias": bias, "alibi": alibi, "fire": fire,
    "lookhere": lookhere,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, _ in golden.vectors()])
def test_sheet_suffices_for_outputs_and_gradients(name: str, files: tuple[Sheet, Tensors]) -> None:
    sheet, tensors = files
    row = sheet["vectors"][name]
    of = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
    assert all(str(value.dtype) == row["dtype"] for value in of.values())
    assert len(row["axes"]) == of["positions"].shape[1]
    assert row["kind"] in sheet["formulas"]
    compute = FORMULAS[row["kind"]]
    for output, value in compute(row, of).items():
        np.testing.assert_allclose(of[output], value, atol=1e-12)

    def loss(**changed: np.ndarray) -> float:
        outputs = compute(row, of | changed)
        return sum(float((y * of[f"upstream_{key.removeprefix('rotated_')}"]).sum()) for key, y in outputs.items())

    random, step = np.random.default_rng(0), 2e-6
    leaves = [key.removeprefix("gradient_of_") for key in of if key.startswith("gradient_of_")]
    assert bool(leaves) != (row["kind"] in ("sinusoidal", "alibi", "lookhere"))
    for leaf in leaves:
        direction = random.standard_normal(of[leaf].shape)
        if leaf == "generators":
            direction = direction - direction.swapaxes(-1, -2)
        up, down = (loss(**{leaf: of[leaf] + sign * step * direction}) for sign in (1, -1))
        expected = (up - down) / (2 * step)
        assert (of[f"gradient_of_{leaf}"] * direction).sum() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", [name for name, vector in golden.vectors() if not vector.encoding])
def test_frequencies_of_blocks_are_those_of_the_sheet(name: str, files: tuple[Sheet, Tensors]) -> None:
    row, found = files[0]["vectors"][name], files[1][f"{name}/frequencies"][:, 0]
    start = 0
    for axis, channels, base, factor in row["arguments"]["blocks"]:
        expected = np.zeros((len(row["axes"]), channels // 2))
        expected[axis] = factor * base ** (-2 * np.arange(channels // 2) / channels)
        np.testing.assert_allclose(found[:, start : start + channels // 2], expected, rtol=1e-12)
        start += channels // 2
    assert 2 * start == row["rotary_dim"]


@pytest.mark.parametrize("name", [name for name, vector in golden.vectors() if vector.encoding.split(":")[0] in ROTARY])
def test_outputs_are_those_of_the_encoding(name: str, files: tuple[Sheet, Tensors]) -> None:
    row = files[0]["vectors"][name]
    torch.manual_seed(0)
    encoding = tr.parse_encoding(row["encoding"]).rotary(**row["arguments"]).double()
    q, k, positions = (torch.from_numpy(files[1][f"{name}/{part}"]) for part in ("q", "k", "positions"))
    rotation = encoding(positions)
    rotated = tr.rotate(q, k, rotation.in_halves() if row["layout"] == "halves" else rotation)
    for side, found in zip("qk", rotated, strict=True):
        np.testing.assert_allclose(found.detach().numpy(), files[1][f"{name}/rotated_{side}"], atol=1e-12)


FAMILIES = {
    "timm-rope_axial": "RoPE-ViT (axial)",
    "timm-eva02": "EVA-02, SAM 3",
    "transformers-sam3": "EVA-02, SAM 3",
    "timm-pe": "PE, Llama 4 (vision)",
    "transformers-llama4": "PE, Llama 4 (vision)",
    "transformers-qwen2_vl": "Qwen-VL, GLM-4V (vision)",
    "transformers-glm4v": "Qwen-VL, GLM-4V (vision)",
    "transformers-step3p7": "Step 3 (vision)",
    "transformers-pixtral": "Pixtral",
    "timm-gemma4": "Gemma 4 (vision)",
    "transformers-minimax_m3_vl": "MiniMax M3 (vision)",
    "diffusers-flux": "Flux, Qwen-Image",
    "diffusers-qwen": "Flux, Qwen-Image",
    "diffusers-flux2": "Flux 2",
    "diffusers-wan": "Wan, Lumina 2",
    "diffusers-lumina2": "Wan, Lumina 2",
    "diffusers-hunyuan": "HunyuanVideo",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_and_order_of_axes_are_those_of_the_models(family: str, files: tuple[Sheet, Tensors]) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("diffusers")
    from every_family import every_family

    from torchrope.integrations.family import adapters
    from torchrope.integrations.own_rotation import halves, interleaved

    name = f"family: {FAMILIES[family]}"
    row, frequencies = files[0]["vectors"][name], files[1][f"{name}/frequencies"][:, 0]
    model = next(known for known in every_family() if f"{known.library}-{known}" == family).build()
    own = adapters(model)[0].own_rotations()[0]
    rotated, parts = 2 * own.frequencies.shape[-1], len(row["axes"]) if row["layout"] == "halves of an axis" else 1
    channels = interleaved(rotated) if row["layout"] == "interleaved" else halves(rotated, parts)
    assert own.channels[:rotated] == channels

    def order(values: np.ndarray) -> list[int]:
        axes = (values != 0).argmax(axis=0)
        return [int(axis) for axis, before in zip(axes, [-1, *axes[:-1]], strict=True) if axis != before]

    assert order(own.frequencies[:, 0].numpy()) == order(frequencies)


def test_every_encoding_is_there(files: tuple[Sheet, Tensors]) -> None:
    named = {row["encoding"].partition(":")[0] for row in files[0]["vectors"].values() if row["encoding"]}
    assert named == BUILT_IN - {"learned-jittered"}  # without training the same as "learned"


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
