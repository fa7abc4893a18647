"""The study of input sizes: sizes, changes for other sizes, and contradictions with the papers."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from labs import SMALL, kept, lab, rows_of

from torchrope.models import Swin, ViT
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.other_sizes import adaptations, extended_for, fixed_position_range, rescaled_for
from torchrope_lab.engine.study import find_study
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig
from torchrope_lab.studies import resolution
from torchrope_lab.training.models import build_model

SWIN = ModelConfig(backbone="swin", dim=8, depths=[1, 1], stage_heads=[1, 2], window_size=[2], patch_size=[2])
SIZES = resolution.Sizes(((8, 8), (16, 16)), (8, 8), 0)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resolution")


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    return kept(resolution.find(lab(out, "learned", "comrope-ld", sizes=[4, 16])))


def test_mixed_sizes_are_an_arm_with_paired_effects_at_every_size(out: Path, found: dict[str, Any]) -> None:
    plain = rows_of(found, "Top-1 by inference size")
    mixed = rows_of(found, "Effect of training across mixed sizes")
    assert {*mixed} == {"learned", "comrope-ld"}
    assert {row["what"] for row in mixed.values()} == {"mixed sizes"}
    configs = [path.read_text() for path in out.glob("runs/*/config.yaml")]
    assert sum("sizes:\n  - 6\n  - 8\n  - 10\n" in text for text in configs) == 2
    for key in ("at4x4", "at8x8", "at16x16"):
        for name, row in mixed.items():
            assert row[f"{key}_low"] <= row[key] <= row[f"{key}_high"]
            assert plain[name][key] + row[key] >= -1e-9  # what it is added to is the plain run's


def test_mixed_sizes_are_skipped_if_all_runs_are_mixed(out: Path) -> None:
    here = lab(out, "mixed", optim=OptimConfig(epochs=1, warmup_epochs=0, train_sizes=[6, 8]))
    settings, note = resolution._mixed_sizes(here, 2)
    assert not settings
    assert "--optim.train_sizes" in note
    settings, note = resolution._mixed_sizes(lab(out, "mixed"), 4)
    assert not settings
    assert note == "No training across mixed sizes: with patches of 4 the only size is 8."


def test_sizes_option_adds_to_the_training_size(found: dict[str, Any]) -> None:
    columns = [column["title"] for column in found["tables"][0]["columns"]]
    assert columns[2:] == ["4 × 4", "8 × 8", "16 × 16", "Largest minus training size", "Verdict"]
    assert "16 × 16 (2 times the training size)" in found["answer"]


def test_size_that_is_added_measures_itself_alone(out: Path, found: dict[str, Any]) -> None:
    def measures() -> dict[str, int]:
        files = out.glob("runs/*/measures/*.json")
        return {f"{file.parts[-3]}/{file.stem}": file.stat().st_mtime_ns for file in files}

    before = measures()
    assert {name.rpartition("-at-")[2] for name in before} == {"4x4", "8x8", "16x16"}
    again = kept(resolution.find(lab(out, "learned", "comrope-ld", sizes=[4, 12])))
    after = measures()
    assert {name: after[name] for name in before} == before
    assert {name.rpartition("-at-")[2] for name in {*after} - {*before}} == {"12x12"}
    for name, row in rows_of(again, "Top-1 by inference size").items():
        assert row["at4x4"] == rows_of(found, "Top-1 by inference size")[name]["at4x4"]


def test_only_smaller_sizes_are_answered_at_the_smallest(out: Path, found: dict[str, Any]) -> None:
    smaller = kept(resolution.find(lab(out, "learned", "comrope-ld", sizes=[4])))
    assert "4 × 4 (0.5 times the training size)" in smaller["answer"]
    assert "Effect of scaled frequencies" not in {table["title"] for table in smaller["tables"]}
    assert "Smallest minus training size" in {column["title"] for column in smaller["tables"][0]["columns"]}


@pytest.mark.parametrize(
    "study", ["resolution", "training-efficiency", pytest.param("data-efficiency", marks=pytest.mark.slow)]
)
def test_nothing_is_best_sooner_or_enough_at_the_level_of_chance(tmp_path: Path, study: str) -> None:
    at_chance = OptimConfig(epochs=1, warmup_epochs=0, lr=1e-9)
    here = lab(tmp_path, "learned", "mixed", sizes=[4] if study == "resolution" else [], optim=at_chance)
    result = kept(find_study(study).find(here))
    assert "not significantly better than always predicting the most frequent class" in result["answer"]
    verdicts = {row["verdict"] for table in result["tables"] for row in table["rows"] if "verdict" in row}
    assert verdicts <= {"nothing learned", "not significant", "the reference"}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([9], "--sizes must be multiples of the patch size, 2 pixels, got 9"),
        ([8], "--sizes must include one other than the training size, got 8"),
    ],
)
def test_sizes_invalid_are_refused_before_training(tmp_path: Path, sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        resolution.find(lab(tmp_path, "mixed", sizes=sizes))
    assert not list(tmp_path.rglob("*.ckpt"))


def vit(encoding: str, **settings: Any) -> ViT:
    data = make_data(data_config())
    model = build_model(encoding, ModelConfig(**{"patch_size": [2], "pool": "mean", **SMALL, **settings}), data)
    assert isinstance(model, ViT)
    return model.double().eval()


@pytest.mark.parametrize("encoding", ["comrope-ap:4", "comrope-ld", "liere:8", "learned+comrope-ld"])
@pytest.mark.parametrize("side", [4, 12, 32])
def test_rescaled_positions_are_comropes_at_every_size(encoding: str, side: int) -> None:
    """ComRoPE's code: the i-th of n patches is at (i + 1/2) / n; LieRE's unit image begins with a patch at 0."""
    model, _ = rescaled_for(vit(encoding), (side, side))
    count = side // 2
    line = (torch.arange(count) + (0.5 if "comrope" in encoding else 0.0)) / count
    torch.testing.assert_close(model.positions((count, count)), torch.cartesian_prod(line, line))


def test_rescaling_is_the_identity_at_the_training_size() -> None:
    model, x = vit("comrope-ld"), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    before = model(x)
    rescaled_for(model, (16, 16))
    assert torch.equal(model(x), before)
    assert torch.equal(rescaled_for(model, (8, 8))[0](x), before)


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("encoding", ["liere:8", "comrope-ld"])
def test_rescaling_at_larger_sizes_is_interpolation(encoding: str, pool: str) -> None:
    model, x = vit(encoding, pool=pool), torch.randn(2, 1, 16, 16, dtype=torch.float64)
    (one, _), (other, _) = rescaled_for(model, (16, 16)), extended_for(model, (16, 16), (8, 8), "interpolate")
    torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one(x), model(x), rtol=1e-3)


def test_only_lattices_of_a_fixed_range_are_rescaled() -> None:
    ends = {
        "comrope-ap:4": "[0, 1]",
        "liere": "[0, 1]",
        "dinov3": "[-1, 1]",
        "mixed": None,
        "axial": None,
        "none": None,
    }
    assert {name: fixed_position_range(vit(name), (8, 8)) for name in ends} == ends
    assert fixed_position_range(vit("comrope-ld", spacing=[0.5]), (8, 8)) is None  # where the user has put them
    assert fixed_position_range(vit("comrope-ld", jitter=1.0), (8, 8)) == "[0, 1]"
    jittered, still = (rescaled_for(vit("comrope-ld", jitter=jitter), (16, 16))[0] for jitter in (1.0, 0.0))
    torch.testing.assert_close(jittered.positions((8, 8)), still.positions((8, 8)))


def test_rescaled_positions_are_an_arm_at_every_other_size(found: dict[str, Any]) -> None:
    arm = rows_of(found, "Effect of positions in [0, 1]")
    assert {*arm} == {"comrope-ld"}
    assert {"at4x4", "at16x16"} < {*arm["comrope-ld"]}
    assert "at8x8" not in arm["comrope-ld"]


def swin(**settings: Any) -> Swin:
    small = dict(in_channels=1, num_outputs=3, dim=8, depths=(1, 1), num_heads=(1, 2), encoding="bias+mixed")
    return Swin((16, 16), **{**small, "patch_size": 2, "window_size": 4, **settings}).double().eval()


def grown(model: Swin, side: int) -> dict[str, Any]:
    _, adaptation = adaptations(model, "bias+mixed", resolution.Sizes(((16, 16), (32, 32)), (16, 16), 0))
    same, options = adaptation.adapt(model, (side, side))
    assert same is model
    return options


def test_adaptations_can_be_sent_to_other_processes() -> None:
    for found in (adaptations(swin(), "mixed", SIZES), adaptations(vit("comrope-ld"), "comrope-ld", SIZES)):
        assert [list(each.sizes) for each in found] == [list(SIZES.all), *([[(16, 16)]] * (len(found) - 1))]
        assert [each.key for each in pickle.loads(pickle.dumps(found))] == [each.key for each in found]


@pytest.mark.parametrize(("side", "window"), [(8, 2), (16, 4), (24, 6), (32, 8)])
def test_grown_windows_keep_their_number(side: int, window: int) -> None:
    model, x = swin(), torch.randn(2, 1, side, side, dtype=torch.float64)
    assert side // 2 // window == 2  # as many as in training
    assert torch.equal(model(x, **grown(model, side)), model(x, window_size=window))
    assert torch.allclose(model(x, **grown(model, side)), model(x)) == (side == 16)


def test_grown_windows_keep_covering_the_lattice() -> None:
    x = torch.randn(1, 1, 32, 32, dtype=torch.float64)
    for window, expected in ((7, 14), (8, 1000), (100, 1000)):  # lattices of 8 and 4
        model = swin(window_size=window)
        assert torch.equal(model(x, **grown(model, 32)), model(x, window_size=expected))


@pytest.mark.slow
def test_swin_has_grown_windows_and_mixed_sizes_as_arms(tmp_path: Path) -> None:
    found = kept(resolution.find(lab(tmp_path, "bias", "mixed", model=SWIN, sizes=[16])))
    titles = {table["title"] for table in found["tables"]}
    assert {"Effect of windows that grow with the input", "Effect of training across mixed sizes"} < titles
    assert {*rows_of(found, "Effect of windows that grow with the input")} == {"bias", "mixed"}
    assert not any(title.startswith(("Effect of positions", "Effect of scaled")) for title in titles)


def test_adaptations_that_a_model_refuses_are_left_out_with_the_reason(tmp_path: Path) -> None:
    def measured(name: str) -> dict[str, Any]:
        return {"refused": "keys are normalised"} if name == "yarn-at-16x16" else {"labels": [1], "predicted": [1]}

    here = lab(tmp_path, "mixed")
    arm, run = ("mixed", ""), here.run("mixed")
    trained: Any = SimpleNamespace(run=run, measured=measured)
    adapted = {arm: resolution._adaptations(here, arm, run, SIZES)}
    top1 = resolution._evaluate(here, {arm: [trained]}, adapted, SIZES)
    assert list(here.left_out) == ["YaRN of mixed is left out: keys are normalised."]
    assert {(cell.level, cell.variant) for cell in top1.values} == {
        ("8x8", ""), ("16x16", ""), ("16x16", "NTK"), ("16x16", "interpolation"),
    }  # fmt: skip
