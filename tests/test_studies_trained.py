"""Studies that look into trained runs: shuffled inputs, other sizes, generators, attention."""

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from torchrope.data.config import DataConfig
from torchrope.data.transforms import shuffle_along
from torchrope.studies import accuracy, shuffle
from torchrope.studies.lab.config import StudyConfig
from torchrope.studies.lab.feasible import feasible
from torchrope.studies.lab.results import Findings
from torchrope.studies.lab.study import Lab
from torchrope.training.config import ModelConfig, OptimConfig

SMALL = dict(dim=16, depth=1, num_heads=2, mlp_dim=16)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs shared by the tests, as studies share them."""
    return tmp_path_factory.mktemp("studies")


def lab(out: Path, *encodings: str, **settings: Any) -> Lab:
    config = StudyConfig(
        **{
            "data": DataConfig(train_size=60, val_size=40),
            "model": ModelConfig(patch_size=[2], **SMALL),
            "optim": OptimConfig(epochs=1, warmup_epochs=0),
            "encodings": list(encodings),
            "out": str(out),
            **settings,
        }
    )
    return Lab(config, ("none", "mixed"), Console(file=StringIO()))


def moving(out: Path, *encodings: str, **settings: Any) -> Lab:
    data = DataConfig("motion", train_size=40, val_size=16)
    return lab(out, *encodings, data=data, model=ModelConfig(patch_size=[1, 4, 4], **SMALL), **settings)


def runs(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("runs/*/result.json")}


def kept(findings: Findings) -> dict[str, Any]:
    """As the report reads it: JSON keeps everything."""
    return json.loads(json.dumps(findings.plain(), allow_nan=False))


def test_what_a_model_refuses_is_left_out_with_the_reason(out: Path) -> None:
    here = lab(out)
    wanted = [here.run(name, seed) for name in ("mixed", "liere:5") for seed in (0, 1)]
    some, [note] = feasible(here, wanted)
    assert some == wanted[:2]
    assert note.startswith("liere:5 is left out: head_dim must be divisible by block_size = 5")
    with pytest.raises(ValueError, match="did you mean"):
        feasible(here, [here.run("mixxed")])


def test_frames_are_permuted_whole_and_each_clip_on_its_own() -> None:
    clips = torch.arange(8 * 6.0).reshape(8, 1, 6, 1).expand(-1, 2, -1, 3).contiguous()
    moved = shuffle_along(clips, axis=0, extent=2, generator=torch.Generator().manual_seed(0))
    assert moved.shape == clips.shape
    assert (moved == moved[:, :1, :, :1]).all()  # channels and pixels of a frame stay together
    assert torch.equal(moved.sort(dim=2).values, clips)
    pairs = moved[:, 0, :, 0].reshape(8, 3, 2)
    assert (pairs[..., 1] == pairs[..., 0] + 1).all()
    orders = {tuple((pair[:, 0] % 6).tolist()) for pair in pairs}
    assert len(orders) > 2
    with pytest.raises(ValueError, match="size along axis 0 must be divisible by extent = 4, got 6"):
        shuffle_along(clips, axis=0, extent=4, generator=torch.Generator())


def test_shuffling_tells_a_bag_of_patches_from_a_model_that_knows_places(out: Path) -> None:
    found = kept(shuffle.find(lab(out, "none", "mixed", optim=OptimConfig(epochs=5, warmup_epochs=0, lr=1e-2))))
    [check] = found["checks"]
    assert check["holds"], check
    assert check["measured"].startswith("0 of 40 predictions changed")
    [table] = found["tables"]
    none, mixed = sorted(table["rows"], key=lambda row: row["name"] != "none")
    assert none["before"] == none["after"]
    assert none["drop"] == none["drop_low"] == none["drop_high"] == 0
    assert mixed["drop"] == pytest.approx(mixed["before"] - mixed["after"])
    assert mixed["lost"] == pytest.approx(100 * mixed["drop"] / mixed["before"])
    assert mixed["drop_low"] <= mixed["drop"] <= mixed["drop_high"]
    assert "luck of the seed" in found["answer"]
    assert len(found["figures"][0]["rows"]) == 4


def test_a_model_that_places_matter_to_fails_the_check_of_none(out: Path) -> None:
    here = lab(out, "none")
    [trained] = here.train([here.run("none")])
    result = {shuffle.INTACT: {"predicted": [1, 2]}, shuffle.PATCHES: {"predicted": [1, 3], "apart": 0.1}}
    [check] = shuffle._checks([trained], {trained.run.key: result}, [shuffle.PATCHES])
    assert not check.holds
    assert check.measured.startswith("1 of 2 predictions changed")


def test_shuffling_trains_what_accuracy_trains(out: Path) -> None:
    here = lab(out, "none", "learned")
    accuracy.find(here)
    before = runs(out)
    shuffle.find(lab(out, "none", "learned"))
    assert runs(out) == before


def test_frames_are_shuffled_where_there_is_time(out: Path) -> None:
    found = kept(shuffle.find(moving(out, "none", "mixed")))
    assert [table["title"] for table in found["tables"]] == [
        "Top-1 with patches shuffled",
        "Top-1 with frames shuffled",
    ]
    assert found["checks"][0]["holds"]
    assert "0 of 32 predictions" in found["checks"][0]["measured"]
    assert {row["inputs"] for row in found["figures"][0]["rows"]} == set(shuffle.TITLES.values())


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [([1, 1, 1, 1], [1, 0, 0, 0], 75.0), ([1, 0, 1, 0], [1, 0, 1, 0], 0.0), ([0, 0], [0, 1], None)],
)
def test_the_share_lost_is_of_what_was_right(before: list, after: list, share: float | None) -> None:
    value, low, high = shuffle.share_lost(np.array(before, float), np.array(after, float))
    assert value == share
    if share is None:
        assert low is high is None
    else:
        assert low <= value <= high


def test_the_share_lost_is_paired() -> None:
    """The exact same examples lost: an interval of unpaired ratios would hold 0 here."""
    rng = np.random.default_rng(0)
    before = (rng.random(200) < 0.5).astype(float)
    after = before * (np.arange(200) % 5 > 0)
    _, low, high = shuffle.share_lost(before, after)
    assert 10 < low < high < 32


def test_published_shuffling_has_the_papers_cells() -> None:
    first, clips, second = shuffle.PUBLISHED
    assert first.rows[-1] == {
        "name": "liere",
        "value1": 69.4,
        "value2": 15.9,
        "value3": 77.1,
        **{f"{end}{n}": None for end in ("low", "high") for n in (1, 2, 3)},
    }
    assert clips.rows[0]["value2"] == 44.0
    assert [row["value5"] for row in second.rows] == [39.5, 37.0, 28.2, 27.8, 28.0]
    for row in (*first.rows, *second.rows):
        assert math.isclose(row["value3"], 100 * (1 - row["value2"] / row["value1"]), abs_tol=0.2)  # type: ignore[operator]
