"""The study of complexity: counts against formulas, hand-computed values, and the papers' tables."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from torchrope_lab.cli import main
from torchrope_lab.results import Findings
from torchrope_lab.studies import complexity
from torchrope_lab.studies.complexity import costs, products_by_formula, sizes, table_5_count
from torchrope_lab.studies.engine.config import StudyConfig
from torchrope_lab.studies.engine.published import published
from torchrope_lab.studies.engine.study import Lab

NEEDED = {"liere-cifar100-vit-t", "liere-cifar100-vit-b", "liere-cifar100-vit-l", "liere-imagenet", "liere-ucf101"}
NEEDED |= {"liere-rsna", "motion"}
BY_NAME = {size.name: size for size in sizes()}


def lab(folder: Path, encodings: list[str]) -> Lab:
    return Lab(StudyConfig(encodings=encodings, out=str(folder)), [], Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(complexity, "sizes", lambda: [size for size in BY_NAME.values() if size.name in NEEDED])
        return complexity.find(lab(tmp_path_factory.mktemp("studies"), ["axial", "comrope-ap"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "parameters"),
    [
        ("none", 0),
        ("liere:8", 64_512),
        ("learned+mixed", 64 * 768 + 9_216),
        pytest.param("axial", 0, marks=pytest.mark.slow),
        pytest.param("sinusoidal", 0, marks=pytest.mark.slow),
        pytest.param("learned", 64 * 768, marks=pytest.mark.slow),
        pytest.param("bias", 12 * 12 * 15 * 15, marks=pytest.mark.slow),
        pytest.param("mixed", 9_216, marks=pytest.mark.slow),
        pytest.param("liere", 580_608, marks=pytest.mark.slow),
        pytest.param("comrope-ap", 32_256, marks=pytest.mark.slow),
        pytest.param("comrope-ld", 34_560, marks=pytest.mark.slow),
        pytest.param("string", 12 * 24_960, marks=pytest.mark.slow),
    ],
)
def test_parameters_are_counted_and_by_formula_the_same(encoding: str, parameters: int) -> None:
    cost = costs(BY_NAME["liere-cifar100-vit-b"], encoding)
    assert cost.encoding_parameters == cost.by_formula == parameters
    assert cost.parameters == 85_143_652 + parameters


WINDOWS = pytest.param("rope-swin-t", marks=pytest.mark.slow)  # test_rotating_in_windows counts them too


@pytest.mark.slow
@pytest.mark.parametrize("name", [WINDOWS, "motion", "digits"])
@pytest.mark.parametrize("encoding", ["learned", "bias", "mixed", "liere:8", "comrope-ld:4", "string:4"])
def test_formulas_hold_for_windows_three_axes_and_small_models(name: str, encoding: str) -> None:
    cost = costs(BY_NAME[name], encoding)
    assert cost.encoding_parameters == cost.by_formula > 0


ROTATED = [
    ("none", 0),
    ("liere:8", 8),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("axial", 2), ("mixed", 2), ("string", 64))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "b"), ROTATED)
def test_rotating_takes_two_block_products_a_layer(encoding: str, b: int) -> None:
    assert costs(BY_NAME["liere-cifar100-vit-b"], encoding).rotating == 2 * 12 * 65 * 768 * b


@pytest.mark.slow
def test_rotating_in_windows_counts_every_window() -> None:
    places = [(56, 96, 2), (28, 192, 2), (14, 384, 6), (7, 768, 2)]  # side, channels, layers of each stage
    expected = sum(2 * layers * side**2 * dim * 2 for side, dim, layers in places)
    assert costs(BY_NAME["rope-swin-t"], "mixed").rotating == expected


COUNTED = ("digits", "motion", "liere-cifar100-vit-b")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COUNTED else pytest.mark.slow) for name in BY_NAME if "swin" not in name],
)
def test_products_are_those_of_the_formula(name: str) -> None:
    size = BY_NAME[name]
    assert costs(size, "none").flops == 2 * products_by_formula(size)


@pytest.mark.slow
def test_count_of_table_5_adds_norms_and_rotations() -> None:
    without, cost = (costs(BY_NAME["liere-cifar100-vit-b"], name) for name in ("none", "liere"))
    assert cost.norms == 25 * 65 * 768
    assert table_5_count(without, cost) == without.flops // 2 + 5 * 25 * 65 * 768 + 2 * 12 * 65 * 768 * 64


@pytest.mark.slow
def test_cells_of_the_smallest_model_agree_with_table_5(monkeypatch: pytest.MonkeyPatch) -> None:
    column, name = complexity.TABLE_5[0]
    monkeypatch.setattr(complexity, "TABLE_5", [(column, name)])
    encodings = ("none", "learned", "axial", "mixed", "liere:8", "liere")
    cells = complexity.compare_table_5({(column, encoding): costs(BY_NAME[name], encoding) for encoding in encodings})
    assert [cell["name"] for cell in cells if not cell["agrees"]] == ["ViT-Tiny, liere"]


@pytest.mark.slow
def test_complexity_checks_hold(found: Findings) -> None:
    assert len(found.checks) == 5
    assert [check.rule for check in found.checks if not check.holds] == []


@pytest.mark.slow
def test_impossible_published_cells_are_reported(found: Findings) -> None:
    cells = {row["name"]: row for row in found.tables[2].rows}
    assert len(cells) == 15
    wrong = {name: row["verdict"] for name, row in cells.items() if row["verdict"] != "agrees"}
    assert set(wrong) == {"ViT-Tiny, liere", "ViT-Large, liere:8"}
    assert wrong["ViT-Tiny, liere"].startswith("cannot be right")
    assert cells["ViT-Base, liere"]["ours"] == pytest.approx(5.684, abs=5e-4)
    assert cells["ViT-Large, liere:8"]["ours_share"] == pytest.approx(0.129, abs=5e-4)


def test_published_cells_are_the_papers() -> None:
    flops, shares, formulas, costs = published("complexity")
    assert [row["value3"] for row in flops.rows] == [19.856, 19.856, 19.863, 19.882, 20.061]
    assert [row["value2"] for row in shares.rows] == [0.002, 0.036, 0.178, 1.375]
    assert formulas.rows[4]["value2"] == "L d (b/N + N/b)"
    assert costs.rows[0]["value1"] == 1.8


@pytest.mark.slow
def test_published_claims_are_compared_with_counts(found: Findings) -> None:
    claims = {row["name"]: row for row in found.tables[3].rows}
    one_set = claims["LieRE's parameters, one set for all layers and heads"]
    assert one_set["ours"] == one_set["published"] == "4,032"
    assert "5.6137 G" in claims["Operations where heads share the generators"]["verdict"]
    assert "88.7M" in claims["Parameters of ViT-Base, 3D"]["verdict"]
    assert claims["Parameters of ViT-Base, 3D"]["ours"] == "86.9M"
    rotating = claims["Operations that rotate, ViT-B at 224x224"]
    assert rotating["ours"].startswith("10.84 M, 0.06 %")
    one_head = torch.view_as_complex(torch.empty(196, 32, 2))  # of queries, or of keys
    assert f"= {2 * 12 * 12 * one_head.numel():,} complex products of queries and keys" in rotating["verdict"]
    assert 2 * 12 * 12 * one_head.numel() / 1e6 == pytest.approx(1.8, abs=0.05)  # as published


@pytest.mark.slow
def test_comropes_formula_for_ld_is_not_its_shapes(found: Findings) -> None:
    row = found.tables[1].rows[-1]
    assert (row["theirs"], row["shapes"], row["count"]) == (39_168, 76_032, 34_560)


@pytest.mark.slow
def test_sizes_that_an_encoding_refuses_are_left_out_with_a_note(found: Findings) -> None:
    named = {row["name"] for row in found.tables[0].rows}
    assert "motion, 5x20x20, axial" in named
    assert "ViT-Base, 8x224x224, axial" in named  # the recipe of UCF101 rotates 60 of 64 channels
    assert "ViT-Base, 32x224x224, axial" not in named
    note = next(note for note in found.notes if note.startswith("Left out, axial"))
    assert "2·num_axes = 6, got 64" in note
    assert "ViT-Base, 32x224x224" in note
    assert "ViT-Base, 8x224x224" not in note


@pytest.mark.slow
def test_answer_names_the_reproduced_cells(found: Findings) -> None:
    assert "32,256 parameters (comrope-ap" in found.answer
    assert "reproduce 13 of 15 cells of LieRE's table 5" in found.answer
    json.dumps(found.plain())


@pytest.mark.slow
def test_answer_without_learned_parameters(found: Findings) -> None:
    rows = [row for row in found.tables[0].rows if row["encoding"] == "axial"]
    assert complexity._answer(rows, []).startswith("The encodings have no learned parameters.")


def test_complexity_is_listed_with_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "--list"]) == 0
    assert "complexity" in capsys.readouterr().out
