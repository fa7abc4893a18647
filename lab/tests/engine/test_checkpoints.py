"""Studies of trained models that are read from files: frequencies, generators and attention."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import labs
import numpy as np
import pytest
import timm
import torch
from labs import kept, rows_of
from published import Shapes, drawn, linear, norm, randomised, saved

import torchrope as tr
from torchrope_lab.cli import main
from torchrope_lab.engine.runs import Trained
from torchrope_lab.engine.trained_models import Site, encodings_of_runs, read_checkpoints
from torchrope_lab.settings.run_config import ModelConfig
from torchrope_lab.studies import attention, fourier, generators

SMALL = dict(dim=32, depth=2, num_heads=2, mlp_dim=16)
MODEL = ModelConfig(patch_size=[2], **SMALL)
lab = partial(labs.lab, model=MODEL)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def run(out: Path) -> Trained:
    """A finished run, which others read from its folder."""
    here = lab(out)
    return here.train([here.run("liere:8")])[0]


def vit(folder: Path, name: str, encoding: str, size: int = 8, **settings: Any) -> Path:
    torch.manual_seed(1)
    given = {**SMALL, "patch_size": 2, "in_channels": 1, "num_outputs": 10, **settings}
    tr.save(tr.ViT((size, size), encoding=encoding, **given), folder / name)
    return folder / name


def rope_vit(folder: Path) -> Path:
    """RoPE-Mixed as its authors publish it: frequencies of all layers in one tensor, under "model"."""
    model = timm.create_model(
        "vit_small_patch16_rope_mixed_224", img_size=64, embed_dim=128, depth=2, num_heads=2, num_classes=5
    )
    state = dict(randomised(model).state_dict())
    state["freqs"] = state.pop("rope.freqs").flatten(2)
    state["freqs_t_x"], state["freqs_t_y"] = torch.arange(16.0) % 4, torch.arange(16) // 4
    return saved({"model": state}, folder, "rope_mixed.pth")


def liere(folder: Path) -> Path:
    """LieRE as its authors publish it: the generators of each layer and head in blocks of 8, over 14x14 patches."""
    shapes: Shapes = {**linear("to_patch_embedding.1", 128, 768), "cls_token": (1, 1, 128)}
    shapes |= norm("mlp_head.0", 128) | linear("mlp_head.1", 5, 128)
    for layer in range(2):
        name = f"transformer.layers.{layer}"
        shapes |= norm(f"{name}.0.norm", 128) | {f"{name}.0.fn.to_qkv.weight": (384, 128)}
        shapes |= linear(f"{name}.0.fn.to_out.0", 128, 128) | norm(f"{name}.1.norm", 128)
        shapes |= linear(f"{name}.1.fn.net.0", 96, 128) | linear(f"{name}.1.fn.net.3", 128, 96)
    state = drawn({**shapes, "position_encoder.generator_raw_params": (2, 2, 16, 8, 8)})
    return saved({"state_dict": {**state, "pos_embedding": torch.zeros(1, 197, 128)}}, folder, "liere.ckpt")


def test_names_are_the_shortest_that_differ_and_hold_no_blanks(tmp_path: Path) -> None:
    for folder in ("one", "two", "mixed"):
        (tmp_path / folder).mkdir()
    one, two = vit(tmp_path / "one", "a b.st", "mixed"), vit(tmp_path / "two", "a b.st", "mixed")
    tr.save(tr.load(one), tmp_path / "mixed")
    assert [each.name for each in read_checkpoints([str(one)])] == ["a-b.st"]
    assert [each.name for each in read_checkpoints([str(one), str(two)])] == ["one/a-b.st", "two/a-b.st"]
    [folder] = read_checkpoints([str(tmp_path / "mixed")], others=["mixed", "axial"])
    assert folder.name == f"{tmp_path.name}/mixed"
    with pytest.raises(ValueError, match=r"^--checkpoint must not name a model twice, got "):
        read_checkpoints([str(one), str(tmp_path / "two" / ".." / "one" / "a b.st")])


def test_titles_are_those_of_the_encodings(tmp_path: Path, run: Trained) -> None:
    swin = tr.Swin(
        (32, 32), num_outputs=5, dim=16, depths=(1, 1), num_heads=(1, 2), window_size=4, encoding="bias+mixed"
    )
    tr.save(swin, tmp_path / "swin.safetensors")
    paths = [vit(tmp_path, "a", "learned+comrope-ld:4"), vit(tmp_path, "b", "learned"), vit(tmp_path, "c", "none")]
    paths += [tmp_path / "swin.safetensors", run.folder, rope_vit(tmp_path)]
    assert [each.title for each in read_checkpoints(list(map(str, paths)))] == [
        "learned APE + ComRoPE-LD, blocks of 4",
        "learned APE",
        "none",
        "relative position bias + RoPE-Mixed",
        "LieRE, blocks of 8",
        "RoPE-Mixed",
    ]


@pytest.mark.slow
def test_frequencies_of_files_are_those_of_their_models(tmp_path: Path, out: Path, run: Trained) -> None:
    published = rope_vit(tmp_path)
    paths = [published, run.folder, vit(tmp_path, "ape.safetensors", "learned")]
    here = lab(out, checkpoint=[str(path) for path in paths])
    found = kept(fourier.find(here))
    rows = {row["encoding"]: row for row in found["tables"][0]["rows"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "rope_mixed.pth": "checkpoint, 4x4 tokens",
        run.folder.name: "checkpoint, 4x4 tokens",
    }
    model = tr.load_published(published)
    site = Site(model.encodings[0], (4, 4), model.position_map.spacing, model.position_map.origin)
    expected = fourier.heads_of([site], "", "")
    outside = [100 * head["outside"] for head in expected.sharpness["fit"]]
    assert rows["rope_mixed.pth"]["fit_outside"] == pytest.approx(np.mean(outside))
    assert rows["rope_mixed.pth"]["heads"] == len(expected.blocks)
    assert "ape.safetensors left out: it has no rotary encoding." in here.left_out
    assert any(
        row["panel"].startswith("rope_mixed.pth (RoPE-Mixed), checkpoint") for row in found["figures"][0]["rows"]
    )


def test_generators_of_a_run_are_those_of_its_folder_without_their_start(out: Path, run: Trained) -> None:
    weights = str(run.folder / "weights.safetensors")  # its folder by another name
    found = generators.find(lab(out, "liere:8", checkpoint=[weights]))
    rows = rows_of(kept(found))
    own, read = rows["liere:8"], rows[run.folder.name]
    for key in ("end", "end_low", "patch", "patch_high", "apart", "block"):
        assert read[key] == pytest.approx(own[key])
    assert {read[key] for key in ("start", "apart_start", "moved", "moved_low", "path")} == {None}
    assert read["verdict"] == "start unknown"
    assert "liere:8" in found.answer
    by_layer = kept(found)["figures"][0]["rows"]
    assert {row["when"] for row in by_layer if row["name"] == run.folder.name} == {"Trained"}
    assert {row["when"] for row in by_layer if row["name"] == "liere:8"} == {"At the start", "Trained"}


def test_files_without_runs_train_nothing_and_have_distinct_names(
    tmp_path: Path, out: Path, run: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [rope_vit(tmp_path), run.folder, vit(tmp_path, "axial.safetensors", "axial")]
    here = lab(out, checkpoint=[str(path) for path in paths])
    monkeypatch.setattr(here, "train", lambda runs: pytest.fail("trained"))
    found = generators.find(here)
    assert {name: row["verdict"] for name, row in rows_of(kept(found)).items()} == {
        "rope_mixed.pth": "commutes",
        run.folder.name: "start unknown",
    }
    assert found.answer.startswith(f"The distance from commuting is largest with {run.folder.name}, 0.")
    assert "axial.safetensors is left out: it has no learned generators." in here.left_out
    fixed = generators.find(lab(out, checkpoint=[str(paths[-1])]))
    assert fixed.answer == "None of the encodings has learned generators."
    commuting = generators.find(lab(out, checkpoint=[str(paths[0])]))
    assert commuting.answer.startswith("All generators commute by construction")


def test_generators_of_a_published_file_are_those_that_it_holds(tmp_path: Path, out: Path) -> None:
    path = liere(tmp_path)
    with pytest.warns(UserWarning, match="the file has generators for 2 layers"):
        found = generators.find(lab(out, checkpoint=[str(path)]))
    [row] = rows_of(kept(found)).values()
    raw = torch.load(path)["state_dict"]["position_encoder.generator_raw_params"][:, 0].triu(1).double()  # layer 0's
    elements = raw[raw != 0]
    assert row["end"] == pytest.approx(elements.std(correction=0).item(), rel=1e-5)
    a, b = raw - raw.mT
    ratios = torch.linalg.matrix_norm(a @ b - b @ a) / (torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(b))
    assert row["apart"] == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert (row["encoding"], row["block"]) == ("LieRE, blocks of 8", 8)


@pytest.mark.slow
def test_attention_of_a_run_is_that_of_its_folder(tmp_path: Path, out: Path, run: Trained) -> None:
    deeper = vit(tmp_path, "deeper.safetensors", "learned", depth=3)
    found = kept(attention.find(lab(out, "liere:8", checkpoint=[str(run.folder), str(deeper)], reference="none")))
    rows = {(row["name"], row["size"]): row for row in found["tables"][0]["rows"]}
    for size in ("4 × 4", "8 × 8", "14 × 14"):
        own, read = rows["liere:8", size], rows[run.folder.name, size]
        for key in ("distance", "entropy", "front", "beside"):
            assert read[key] == pytest.approx(own[key], rel=1e-4)
        assert rows["none", size]["beside"] is None
    assert rows["deeper.safetensors", "8 × 8"]["encoding"] == "learned APE"
    assert max(row["layer"] for row in found["figures"][0]["rows"]) == 3
    assert [column["title"] for column in found["tables"][0]["columns"]][5] == "Further than none"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (dict(size=16), r"--data digits, 1 channel of 8 × 8, got 1 channel of 16 × 16 in "),
        (dict(in_channels=3), r"--data digits, 1 channel of 8 × 8, got 3 channels of 8 × 8 in "),
        (dict(patch_size=4), r"must have the same patches, 2 × 2, got 4 × 4 in "),
    ],
    ids=str,
)
def test_attention_refuses_what_does_not_fit(made: dict[str, int], message: str, tmp_path: Path, out: Path) -> None:
    path = vit(tmp_path, "other.safetensors", "mixed", **made)
    here = lab(tmp_path / "out", "none", checkpoint=[str(path)])
    with pytest.raises(ValueError, match=message) as refused:
        attention.find(here)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()  # before anything is trained


def test_attention_refuses_a_swin(tmp_path: Path, out: Path) -> None:
    swin = tr.Swin((8, 8), patch_size=1, in_channels=1, dim=8, depths=(1,), num_heads=(1,), encoding="bias")
    tr.save(swin, tmp_path / "swin")
    with pytest.raises(ValueError, match=r"^--checkpoint must contain a ViT for attention, got a Swin in "):
        attention.find(lab(out, checkpoint=[str(tmp_path / "swin")]))


def test_unreadable_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pth").write_text("no weights")
    for name, rule in (
        ("empty", "a folder must contain"),
        ("text.pth", "text.pth"),
        ("gone", "existing file or folder"),
    ):
        with pytest.raises(ValueError, match=rule) as refused:
            read_checkpoints([str(tmp_path / name)])
        assert str(refused.value).startswith("--checkpoint ")
        assert "\n" not in str(refused.value)


def test_runs_of_segmentation_are_refused(run: Trained, tmp_path: Path) -> None:
    text = (run.folder / "config.yaml").read_text().replace("head: classify", "head: upernet")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"a run must be of model\.head classify, got upernet"):
        read_checkpoints([str(tmp_path)])


def test_encodings_of_runs_are_known_before_they_are_imported(run: Trained, tmp_path: Path) -> None:
    text = (run.folder / "config.yaml").read_text().replace("liere:8", "mine.own:Spiral")
    (tmp_path / "config.yaml").write_text(text)
    ape = vit(tmp_path, "ape.safetensors", "learned")
    assert encodings_of_runs([str(tmp_path), str(ape), str(run.folder)]) == ["mine.own:Spiral", "liere:8"]


@pytest.mark.slow
def test_command_reads_several_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [vit(tmp_path, name, "mixed").name for name in ("a.st", "b.st", "3")]
    assert main(["study", "fourier", "--checkpoint", "a.st,b.st", f"--checkpoint={names[2]}", "--out", "out"]) == 0
    assert "(checkpoint, 4x4 tokens)" in capsys.readouterr().out
    stored = json.loads((tmp_path / "out" / "fourier.json").read_text())
    assert [row["encoding"] for row in stored["findings"]["tables"][0]["rows"]] == names
    assert (tmp_path / "out" / "report" / "index.html").exists()
    assert not os.path.exists(tmp_path / "out" / "runs")
