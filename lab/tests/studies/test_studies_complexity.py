"""The study of complexity: counts against formulas, hand-computed values, and the papers' tables."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from labs import lab

from torchrope.models import ViT
from torchrope_lab.engine.published import claims, errata
from torchrope_lab.engine.study import Lab
from torchrope_lab.results import Findings
from torchrope_lab.studies import complexity
from torchrope_lab.studies.complexity import Counts, Size, costs, sizes, table_5_count
from torchrope_lab.training.cost import EXP_PRODUCTS
from torchrope_lab.training.models import build_model

NEEDED = {"liere-cifar100-vit-t", "liere-cifar100-vit-b", "liere-cifar100-vit-l", "liere-imagenet", "liere-ucf101"}
NEEDED |= {"liere-rsna", "motion"}
BY_NAME = {size.name: size for size in sizes()}
TINY, BASE, LARGE = (BY_NAME[recipe] for recipe in complexity.TABLE_5.values())


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab(tmp_path_factory.mktemp("studies"), "axial", "comrope-ap")


@pytest.fixture(scope="module")
def found(here: Lab) -> Findings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(complexity, "sizes", lambda: [size for size in BY_NAME.values() if size.name in NEEDED])
        return complexity.find(here)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "parameters"),
    [
        ("axial", 0),
        ("sinusoidal", 0),
        ("bias", 12 * 12 * 15 * 15),
        ("liere:8", 64_512),
        ("learned+mixed", 64 * 768 + 9_216),
        ("liere", 580_608),
        ("comrope-ap", 32_256),
        ("comrope-ld", 34_560),
        ("string", 12 * 24_960),
    ],
)
def test_parameters_are_counted(encoding: str, parameters: int) -> None:
    cost = costs(BASE, encoding)
    assert cost.encoding_parameters == parameters
    assert cost.parameters == 85_143_652 + parameters


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "b"), [("none", 0), ("mixed", 2), ("liere:8", 8), ("string", 64)])
def test_rotating_takes_two_block_products_a_layer(encoding: str, b: int) -> None:
    assert costs(BASE, encoding).rotating == 2 * 12 * 65 * 768 * b


@pytest.mark.slow
def test_rotating_in_windows_counts_every_window() -> None:
    places = [(56, 96, 2), (28, 192, 2), (14, 384, 6), (7, 768, 2)]  # side, channels, layers of each stage
    expected = sum(2 * layers * side**2 * dim * 2 for side, dim, layers in places)
    assert costs(BY_NAME["rope-swin-t"], "mixed").rotating == expected


def shape(size: Size, encoding: str = "none") -> tuple[int, int, int, int | None]:
    """Return layers, tokens with prefix tokens, channels, and block size of a ViT."""
    with torch.device("meta"):
        model = build_model(encoding, size.model, size.data)
    assert isinstance(model, ViT)
    tokens = math.prod(model.embed.lattice(size.input_size)) + model.num_prefix
    b = model.encodings[0].block_size if encoding != "none" else None
    return len(model.layers), tokens, model.prefix_tokens.shape[-1], b


def products_by_formula(size: Size) -> int:
    """Return n_p C |patch| d + L (4 n d² + 2 n² d + 2 n d m) + d classes, for MLP width m and n_p patches."""
    layers, n, d, _ = shape(size)
    with torch.device("meta"):
        model: Any = build_model("none", size.model, size.data)
    m = model.layers[0].mlp[0].out_features
    patches = (n - model.num_prefix) * model.embed.proj.in_features * d
    return patches + layers * (4 * n * d**2 + 2 * n**2 * d + 2 * n * d * m) + d * size.num_classes


COUNTED = ("digits", "motion", "liere-cifar100-vit-b")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COUNTED else pytest.mark.slow) for name in BY_NAME if "swin" not in name],
)
def test_products_are_those_of_the_formula(name: str) -> None:
    size = BY_NAME[name]
    assert costs(size, "none").flops == 2 * products_by_formula(size)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["liere:8", "liere"])
@pytest.mark.parametrize("size", [TINY, BASE, LARGE], ids=lambda size: size.title)
def test_liere_adds_the_operations_of_exponentials_and_of_rotating(size: Size, encoding: str) -> None:
    layers, n, d, b = shape(size, encoding)
    assert b is not None
    added = costs(size, encoding).flops - costs(size, "none").flops
    assert added == layers * n * d * (2 * EXP_PRODUCTS * b * b + 4 * b)


@pytest.mark.slow
def test_count_of_table_5_adds_norms_and_rotations() -> None:
    without, cost = (costs(BASE, name) for name in ("none", "liere"))
    assert cost.norms == 25 * 65 * 768
    assert table_5_count(without, cost) == without.flops // 2 + 5 * 25 * 65 * 768 + 2 * 12 * 65 * 768 * 64


@pytest.mark.slow
def test_cells_of_the_smallest_model_agree_with_table_5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complexity, "TABLE_5", {"ViT-Tiny": TINY.name})
    encodings = ("none", "learned", "visionllama", "liere:2", "liere:8", "liere")
    table = complexity.compare_table_5({("ViT-Tiny", encoding): costs(TINY, encoding) for encoding in encodings})
    assert [cell["name"] for cell in table.rows if cell["verdict"] == "differs"] == ["ViT-Tiny, liere"]


@pytest.mark.slow
def test_impossible_published_cells_are_reported(found: Findings) -> None:
    cells = {row["name"]: row for row in found.tables[1].rows}
    assert len(cells) == 15
    wrong = {name for name, row in cells.items() if row["verdict"] == "differs"}
    assert wrong == {"ViT-Tiny, liere", "ViT-Large, liere:8"}
    corrected = {erratum["what"]: erratum["correct"] for erratum in errata("complexity")}
    assert corrected["ViT-Tiny, liere"] == f"{cells['ViT-Tiny, liere']['ours']:.3f} G"
    assert cells["ViT-Base, liere"]["ours"] == pytest.approx(5.684, abs=5e-4)
    assert cells["ViT-Large, liere:8"]["ours_share"] == pytest.approx(0.129, abs=5e-4)


def millions(cost: Counts) -> str:
    return f"{cost.parameters / 1e6:.1f}M"


def giga(without: Counts, cost: Counts) -> str:
    return f"{table_5_count(without, cost) / 1e9:.3f} G"


def share_of_encoding(cost: Counts) -> str:
    return f"{100 * cost.encoding_parameters / cost.parameters:.4f} %"


CLAIMS: dict[str, Callable[[], str]] = {
    "LieRE's parameters, one set for all layers and heads": lambda: (
        f"{costs(BASE, 'liere', share_layers=True, share_heads=True).encoding_parameters:,}"
    ),
    "LieRE's parameters, ViT-Base": lambda: f"{costs(BASE, 'liere').encoding_parameters:,}",
    "parameters of ViT-Tiny": lambda: millions(costs(TINY, "none")),
    "parameters of ViT-Base, 2D": lambda: millions(costs(BASE, "none")),
    "parameters of ViT-Large": lambda: millions(costs(LARGE, "none")),
    "parameters of ViT-Base, 3D": lambda: millions(costs(BY_NAME["liere-ucf101"], "learned")),
    "operations where heads share the generators": lambda: giga(costs(BASE, "none"), costs(BASE, "liere")),
    "RoPE-Mixed's share of ViT-B's parameters": lambda: share_of_encoding(costs(BY_NAME["liere-imagenet"], "mixed")),
}


def test_claims_of_the_papers_are_all_counted() -> None:
    assert {claim["what"] for claim in claims()} == {*CLAIMS}


@pytest.mark.slow
@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim["what"])
def test_claim_is_compared_with_a_count(claim: dict[str, str]) -> None:
    assert claim["counted"] == CLAIMS[claim["what"]]()


@pytest.mark.slow
def test_sizes_that_an_encoding_refuses_are_left_out_with_the_reason(found: Findings, here: Lab) -> None:
    named = {row["name"] for row in found.tables[0].rows}
    assert "motion, 5x20x20, axial" in named
    assert "ViT-Base, 8x224x224, axial" in named  # the recipe of UCF101 rotates 60 of 64 channels
    assert "ViT-Base, 32x224x224, axial" not in named
    reason = next(reason for reason in here.left_out if reason.startswith("Left out, axial"))
    assert "2·num_axes = 6, got 64" in reason
    assert "ViT-Base, 32x224x224" in reason
    assert "ViT-Base, 8x224x224" not in reason


@pytest.mark.slow
def test_answer_names_the_most_parameters(found: Findings) -> None:
    assert "32,256 parameters with comrope-ap" in found.answer
    json.dumps(found.plain())
