"""Studies that evaluate trained runs: shuffled inputs, other input sizes, generators, attention."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from labs import SMALL, kept, lab
from miniatures import MINIATURES

from torchrope_lab.conclusion import Interval
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.transforms import resize
from torchrope_lab.engine.long_table import Cell, Quantity, RightOrWrong
from torchrope_lab.engine.other_sizes import METHODS
from torchrope_lab.engine.study import Lab, describe, feasible
from torchrope_lab.engine.trained_models import Measures, sites_of
from torchrope_lab.results import Column
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig
from torchrope_lab.studies import accuracy, attention, generators, resolution, shuffle
from torchrope_lab.training.models import TokenClassifier, build_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs shared by the tests, as studies share them."""
    return tmp_path_factory.mktemp("studies")


def moving(out: Path, *encodings: str, **settings: Any) -> Lab:
    data = data_config("motion", train_size=40, val_size=16)
    return lab(out, *encodings, data=data, model=ModelConfig(patch_size=[1, 4, 4], **SMALL), **settings)


def runs(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("runs/*/result.json")}


def test_encodings_refused_by_a_model_are_skipped_with_the_reason(out: Path) -> None:
    here = lab(out)
    wanted = [here.run(name, seed) for name in ("mixed", "liere:5") for seed in (0, 1)]
    assert feasible(here, wanted) == wanted[:2]
    [reason] = here.left_out
    assert reason.startswith("liere:5 is left out: head_dim must be divisible by block_size = 5")
    with pytest.raises(ValueError, match="did you mean"):
        feasible(here, [here.run("mixxed")])


def test_shuffling_separates_position_dependence(out: Path) -> None:
    found = kept(shuffle.find(lab(out, "none", "mixed", optim=OptimConfig(epochs=5, warmup_epochs=0, lr=1e-2))))
    [table] = found["tables"]
    none, mixed = sorted(table["rows"], key=lambda row: row["name"] != "none")
    assert none["before"] == none["after"]
    assert none["drop"] == 0
    assert none["drop_low"] < 0 < none["drop_high"]
    assert mixed["drop"] == pytest.approx(mixed["before"] - mixed["after"])
    assert mixed["lost"] == pytest.approx(100 * mixed["drop"] / mixed["before"])
    assert mixed["drop_low"] <= mixed["drop"] <= mixed["drop_high"]
    assert "these models, not encodings" in found["answer"]
    assert len(found["figures"][0]["rows"]) == 4


def test_chance_is_the_share_of_the_most_frequent_class(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = lab(out, "none", data=data_config(train_size=60, val_size=43))
    labels = [0] * 30 + [1] * 10
    answers = {"labels": labels, shuffle.INTACT: {"predicted": labels}, shuffle.PATCHES: {"predicted": labels}}
    models = SimpleNamespace(measure=lambda _: [Measures("none", "none", [answers])])
    monkeypatch.setattr(shuffle, "select_models", lambda *_: models)
    found = kept(shuffle.find(here))
    assert "Chance is 75.0 %" in found["tables"][0]["note"]
    assert "Chance is 75.0 %" in found["figures"][0]["caption"]
    counts = Counter(int(label) for _, label in here.data.datasets()[1])
    assert describe(here).chance == max(counts.values()) / 43


def test_shuffling_trains_what_accuracy_trains(out: Path) -> None:
    here = lab(out, "none", "learned")
    accuracy.find(here)
    before = runs(out)
    shuffle.find(lab(out, "none", "learned"))
    assert runs(out) == before


def test_frames_are_shuffled_where_there_is_time(out: Path) -> None:
    found = kept(shuffle.find(moving(out, "none", "mixed")))
    titles = [table["title"] for table in found["tables"]]
    assert titles == ["Top-1 with patches shuffled", "Top-1 with frames shuffled"]
    for table in found["tables"]:
        none = next(row for row in table["rows"] if row["name"] == "none")
        assert none["before"] == none["after"]
    kinds = (shuffle.INTACT, shuffle.PATCHES, shuffle.FRAMES)
    assert {row["inputs"] for row in found["figures"][0]["rows"]} == {shuffle.TITLES[kind] for kind in kinds}


@pytest.mark.parametrize(
    ("before", "after", "share"), [([1, 1, 1, 1], [1, 0, 0, 0], 75.0), ([1, 0, 1, 0], [1, 0, 1, 0], 0.0)]
)
def test_share_lost_is_of_what_was_right(before: list, after: list, share: float) -> None:
    found = lost(np.array(before, float), np.array(after, float))
    assert found.low <= found.estimate == share <= found.high


def test_share_lost_is_paired() -> None:
    """The exact same examples lost: an interval of unpaired ratios would hold 0 here."""
    rng = np.random.default_rng(0)
    before = (rng.random(200) < 0.5).astype(float)
    found = lost(before, before * (np.arange(200) % 5 > 0))
    assert 10 < found.low < found.high < 32


def lost(before: np.ndarray, after: np.ndarray) -> Interval:
    values = {Cell("mixed"): np.stack([before, after], axis=-1)[None]}
    return Quantity(values, Column("lost", "Lost", "%"), shuffle.share_lost).interval(Cell("mixed"))


@pytest.fixture(scope="module")
def sized(out: Path) -> dict[str, Any]:
    here = lab(out, "none", "mixed", "liere:8", "learned", "learned+mixed")
    return kept(resolution.find(here)) | {"lab": here}


def test_resolution_trains_the_runs_of_accuracy_and_names_additional_ones(out: Path, sized: dict[str, Any]) -> None:
    here = sized["lab"]
    shared = {here.run(name).name for name in here.encodings}
    own = [path for path in out.glob("runs/*/config.yaml") if "jitter: 1.0" in path.read_text()]
    assert shared <= runs(out)
    names = {path.parent.name.split("-seed")[0] for path in own}
    assert names == {"digits-mixed", "digits-liere-8", "digits-learned-and-mixed"}


def test_resolution_compares_each_change_with_the_encoding_without_it(sized: dict[str, Any]) -> None:
    main, *others = sized["tables"]
    sizes = [f"{side} × {side}" for side in (4, 6, 8, 10, 12, 16)]
    assert [column["title"] for column in main["columns"][2:]] == [*sizes, "Largest minus training size", "Verdict"]
    assert {table["title"] for table in others} == {
        "Effect of a second stage",
        "Effect of training across mixed sizes",
        "Effect of perturbation",
        "Effect of scaled frequencies",
        "Effect of positions in [0, 1]",
        "Effect of combining two encodings",
    }
    by_name = {row["name"]: row for row in main["rows"]}
    pairs = {(row["name"], row["what"]): row for row in others[-1]["rows"]}
    added = pairs["mixed", "learned added"]
    expected = by_name["learned+mixed"]["at16x16"] - by_name["mixed"]["at16x16"]
    assert added["at16x16"] == pytest.approx(expected)
    scaled = {(row["name"], row["what"]) for table in others for row in table["rows"] if "scaled" in table["title"]}
    assert scaled == {("mixed", how) for how in METHODS.values()} | {("liere:8", "interpolation")}
    for name, row in by_name.items():
        [trained] = sized["lab"].train([sized["lab"].run(name)])
        assert row["at8x8"] == pytest.approx(100 * trained.top1)  # as at the end of training
    assert "16 × 16 (2 times the training size)" in sized["answer"]


@pytest.mark.slow
def test_frames_are_kept_and_motion_has_no_second_stage(out: Path) -> None:
    here = moving(out, "mixed")
    found = kept(resolution.find(here))
    assert [column["title"] for column in found["tables"][0]["columns"][2:-2]] == [
        f"5 × {side} × {side}" for side in (8, 16, 20, 24, 32, 40)
    ]
    assert any(reason.startswith("No second stage") for reason in here.left_out)


@pytest.fixture(scope="module")
def learned(out: Path) -> dict[str, Any]:
    here = lab(out, "mixed", "liere:8", "comrope-ap:4", "comrope-ld", "learned")
    return kept(generators.find(here)) | {"lab": here}


def test_generators_separates_commuting_families(learned: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in learned["tables"][0]["rows"]}
    blocks = {name: row["block"] for name, row in rows.items()}
    assert blocks == {"mixed": 2, "liere:8": 8, "comrope-ap:4": 4, "comrope-ld": 8}
    commuting = {*rows} - {"liere:8"}
    assert {name for name, row in rows.items() if row["apart"] <= 1e-9} == commuting
    assert all(rows[name]["apart_start"] <= 1e-9 for name in commuting)
    assert "learned is left out: it has no learned generators." in learned["lab"].left_out
    assert "the distance from commuting" in learned["answer"]
    assert {name for name, row in rows.items() if row["verdict"] == "commutes"} == commuting
    for row in rows.values():
        assert row["end_low"] <= row["end"] <= row["end_high"]
    assert rows["mixed"]["patch"] == pytest.approx(rows["mixed"]["end"])  # its unit is the patch
    assert rows["liere:8"]["patch"] == pytest.approx(rows["liere:8"]["end"] / 4)  # four patches a side


def test_densities_hold_all_elements(learned: dict[str, Any]) -> None:
    _, linear, log = learned["figures"]
    rows = [row for row in linear["rows"] if row["name"] == "liere:8"]
    width = rows[1]["value"] - rows[0]["value"]
    assert sum(row["density"] for row in rows) * width == pytest.approx(1)
    assert {row["block"] for row in linear["rows"]} == {"Blocks of 2", "Blocks of 4", "Blocks of 8"}
    assert min(row["density"] for row in log["rows"]) > 0


def test_start_is_the_model_that_the_run_began_with(out: Path) -> None:
    here = lab(out)
    run = here.run("liere:8", seed=3, optim={"lr": 1e-12})
    [trained] = here.train([run])
    model, data = trained.load()
    start = generators.untrained(run, data)
    torch.testing.assert_close(start.encodings[0].upper, model.encodings[0].upper.cpu(), atol=1e-6, rtol=0)
    before, after = sites_of(start), sites_of(model)
    assert generators.relative_change(before, after) == pytest.approx([0, 0], abs=1e-6)
    with torch.no_grad():
        after[0].encoding.upper[:, 1] *= 1.5  # type: ignore[operator]
    assert generators.relative_change(before, after) == pytest.approx([0, 0.5], abs=1e-6)


def test_encodings_of_tokens_have_the_spacing_of_their_positions() -> None:
    settings: dict[str, Any] = dict(num_axes=2, num_outputs=3, dim=16, depth=2, num_heads=2, encoding="liere:4")
    sites = sites_of(TokenClassifier(5, input_size=4, **settings))
    assert [(site.sizes, site.spacing) for site in sites] == [((), (0.25, 0.25))] * 2
    one, other = (generators.summarise(found) for found in (sites[:1], sites))
    assert one["patch_moments"][0][2] == pytest.approx(one["moments"][0][2] / 16)
    assert other["layer"] == [1, 1, 2, 2]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_distance_from_commuting_reaches_its_bound_and_is_none_without_an_axis(size: int) -> None:
    a, b = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))
    if size == 3:  # cross products: [a×][b×] - [b×][a×] = [(a × b)×]
        a[0, 1], b[1, 2] = 1.0, 1.0
        bound = 1 / math.sqrt(2)
    else:  # the quaternions i and j: ij - ji = 2k
        a[0, 1], a[2, 3], b[0, 2], b[1, 3] = 1.0, 1.0, 1.0, -1.0
        bound = 1.0
    a, b = a - a.mT, b - b.mT
    [[ratio]] = generators.commutator_ratio(torch.stack([a, b])[:, None])
    assert ratio.item() == pytest.approx(bound)
    assert generators.commutator_ratio(torch.stack([a, 3 * a])[:, None]).item() == 0
    assert generators.commutator_ratio(torch.stack([a, 0 * a])[:, None]).item() == 0
    assert generators.commutator_ratio(a[None, None]).item() == 0
    assert generators.commutator_ratio(torch.stack([a, b, a])[:, None]).shape == (3, 1)


def test_deviation_is_that_of_all_elements() -> None:
    heads = [torch.randn(n, dtype=torch.float64) + shift for n, shift in ((50, 0.0), (200, 3.0), (10, -1.0))]
    moments = np.array([generators._moments(head) for head in heads])
    value, low, high = Quantity({Cell("mixed"): moments[None]}, Column("end", "σ"), generators.deviation).interval(
        Cell("mixed")
    )
    assert value == pytest.approx(torch.cat(heads).std(correction=0).item())
    assert low <= value <= high


def test_elements_are_those_that_can_be_other_than_zero() -> None:
    blocks = torch.zeros(2, 3, 4, 4)
    blocks[0, 1] = torch.ones(4, 4).triu(1) - torch.ones(4, 4).tril(-1)
    assert generators.strict_upper(blocks).tolist() == [1.0] * 6


def test_zero_blocks_are_counted_beside_the_others(learned: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in learned["tables"][0]["rows"]}
    half = rows["comrope-ap:4"]  # blocks of two axes in turn: half of them are zero
    assert half["with_zeros"] == pytest.approx(half["end"] / math.sqrt(2), rel=0.05)
    assert rows["liere:8"]["with_zeros"] == pytest.approx(rows["liere:8"]["end"])


def test_generators_of_clips_have_three_pairs_of_axes(out: Path) -> None:
    here = moving(out, "liere:4", "string:5")
    found = kept(generators.find(here))
    assert found["tables"][0]["rows"][0]["apart"] > 0
    assert any(reason.startswith("string:5 is left out") for reason in here.left_out)


def test_attention_is_measured_by_layer_at_each_size(out: Path) -> None:
    found = kept(attention.find(lab(out, "none", "learned", "mixed")))
    [table] = found["tables"]
    assert [(row["name"], row["size"]) for row in table["rows"][::3]] == [
        ("none", f"{side} × {side}") for side in (4, 8, 14)
    ]
    for row in table["rows"]:
        assert 0 < row["front"] < 100  # the class token
        assert row["distance_low"] <= row["distance"] <= row["distance_high"]
        assert row["distance"] <= math.sqrt(2) * (int(row["size"].split()[0]) // 2 - 1)  # the diagonal
    distance, entropy = found["figures"]
    assert {row["name"] for row in distance["rows"]} == {"none", "learned", "mixed", attention.UNIFORM}
    uniform = [row["entropy"] for row in entropy["rows"] if row["name"] == attention.UNIFORM]
    assert uniform == pytest.approx([math.log(4), math.log(16), math.log(49)])
    beside = {row["name"]: row["beside"] for row in table["rows"] if row["size"] == "8 × 8"}
    reach = {row["name"]: row["distance"] for row in table["rows"] if row["size"] == "8 × 8"}
    assert beside["learned"] is None
    assert beside["mixed"] == pytest.approx(reach["mixed"] - reach["learned"])
    assert "At 8 × 8 attention distance is largest with" in found["answer"]


@pytest.mark.parametrize("encoding", ["mixed", "liere:8", "string:8", "bias+comrope-ld", "none"])
def test_weights_are_those_that_attention_mixes_with(out: Path, encoding: str) -> None:
    here = lab(out)
    model = build_model(encoding, ModelConfig(patch_size=[2], **{**SMALL, "depth": 2}), here.data).eval()
    outputs: list[torch.Tensor] = []
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad(), attention.record_attention(model) as layers:
        given: list[torch.Tensor] = []
        for layer in model.layers:
            layer.attention.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
        model(torch.randn(3, 1, 8, 12))
        for layer, weights, x, output in zip(model.layers, layers(), given, outputs, strict=True):
            own = layer.attention
            v = own.qkv(x).chunk(3, dim=-1)[2].unflatten(-1, (2, 8)).transpose(1, 2)
            assert weights.shape == (3, 2, 25, 25)
            torch.testing.assert_close(own.proj((weights @ v).transpose(1, 2).flatten(2)), output)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_attention_to_every_patch_alike_has_the_distance_and_entropy_of_uniform_attention(out: Path, pool: str) -> None:
    here = lab(out)
    model = build_model("mixed", ModelConfig(patch_size=[2], pool=pool, **SMALL), here.data).eval()
    with torch.no_grad():
        model.layers[0].attention.qkv.weight.zero_()
    found = attention.attention_statistics(model, torch.randn(2, 1, 4, 6))
    # patches on 2 x 3: of 36 pairs 6 are the same, 14 neighbours, 8 diagonal, 4 two apart, 4 a knight's move
    mean = (14 + 8 * math.sqrt(2) + 4 * 2 + 4 * math.sqrt(5)) / 36
    torch.testing.assert_close(found["distance"], torch.full((1, 2), mean))
    torch.testing.assert_close(found["entropy"], torch.full((1, 2), math.log(6)))
    front = model.num_prefix
    torch.testing.assert_close(found["front"], torch.full((1, 2), front / (front + 6)))


def test_attention_to_itself_has_no_distance_or_entropy(out: Path) -> None:
    here = lab(out)
    model = build_model("bias", ModelConfig(patch_size=[2], pool="mean", **SMALL), here.data).eval()
    with torch.no_grad():
        table = model.biases[0].table
        table.fill_(-1e4)
        table[len(table) // 2] = 0  # no offset
    found = attention.attention_statistics(model, torch.randn(2, 1, 8, 8))
    torch.testing.assert_close(found["distance"], torch.zeros(1, 2), atol=1e-4, rtol=0)
    torch.testing.assert_close(found["entropy"], torch.zeros(1, 2), atol=1e-4, rtol=0)


def test_examples_are_chosen_evenly_over_batches(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = lab(out, data=data_config(train_size=60, val_size=50, batch_size=4))
    model = build_model("none", here.config.model, here.data)
    monkeypatch.setattr(attention, "EXAMPLES", 17)
    monkeypatch.setattr(attention, "SCORES", 2 * 17**2 * 3)  # three examples at a time
    batches, step = here.data.val_dataloader(), attention._step(here.data)
    chosen = [inputs for (inputs,) in attention._examples(model, batches, step, (8, 8))]
    every = torch.cat([inputs for inputs, _ in here.data.val_dataloader()])
    assert max(map(len, chosen)) <= 3
    assert torch.equal(torch.cat(chosen), every[::3])


def test_attention_at_other_sizes_reads_the_files(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = lab(out, data=data_config("images", root=str(MINIATURES["images"](tmp_path)), size=16))
    model = build_model("none", here.config.model, here.data).eval()
    measured: dict[int, list[torch.Tensor]] = {16: [], 32: []}

    def statistics(_: Any, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        measured[inputs.shape[-1]].append(inputs)
        return dict.fromkeys(attention.KEYS, torch.zeros(1, len(inputs)))

    monkeypatch.setattr(attention, "attention_statistics", statistics)
    attention.measure(model, here.data, sizes=[(16, 16), (32, 32)])
    small, large = (torch.cat(inputs) for inputs in measured.values())
    larger = here.data.at_size(32)
    assert larger is not None
    assert torch.equal(large, torch.cat([inputs for inputs, *_ in larger.val_dataloader()]))
    assert not torch.allclose(large, resize(small, (32, 32)), atol=0.1)


def test_attention_of_clips_keeps_the_frames_and_that_of_a_swin_is_left_out(out: Path) -> None:
    found = kept(attention.find(moving(out, "mixed")))
    assert [row["size"] for row in found["tables"][0]["rows"]] == ["5 × 12 × 12", "5 × 20 × 20", "5 × 36 × 36"]
    swin = lab(out, "mixed", model=ModelConfig(backbone="swin", patch_size=[2]))
    assert attention.find(swin).answer.startswith("Not measured")


def test_effects_are_paired_and_simultaneous_over_all_changes_at_a_size() -> None:
    right, change = np.array([[1.0, 0.0] * 50]), "perturbation"
    answers = {Cell(name, "8x8"): right for name in ("mixed", "liere", "axial")}
    answers |= {Cell("mixed", "8x8", change): np.ones((1, 100)), Cell("liere", "8x8", change): np.zeros((1, 100))}
    answers[Cell("axial", "8x8", change)] = right
    top1 = RightOrWrong(answers)
    pairs = {cell: cell._replace(variant="") for cell in answers if cell.variant}
    effects = {cell.arm: effect for cell, effect in top1.changes_by_level(pairs).items()}
    assert effects["mixed"].estimate == 50
    assert effects["mixed"].low > 0 > effects["liere"].high
    assert effects["axial"].low < 0 < effects["axial"].high
