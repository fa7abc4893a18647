"""The study of segmentation and detection: measures with intervals, sizes, pictures and answers."""

import json
import pickle
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import labs
import numpy as np
import pytest
import torch
from miniatures import MINIATURES
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex

from torchrope_lab.conclusion import NOT_DIFFERENT
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine import long_table
from torchrope_lab.engine.dense_tasks import DETECT, SEGMENT, examples, mean_iou, predictions
from torchrope_lab.engine.estimates import rank, spread, verdict_of
from torchrope_lab.engine.long_table import Cell
from torchrope_lab.engine.published import published
from torchrope_lab.engine.runs import MeasuresOf, Trained
from torchrope_lab.engine.study import Lab, find_study, run_study
from torchrope_lab.settings.run_config import ModelConfig
from torchrope_lab.statistics import BootstrapEstimate, draw
from torchrope_lab.studies import dense
from torchrope_lab.studies.dense import evaluate, measured

CLASSES = 4


def maps(images: int = 6, noise: float = 0.3, ignored: float = 0.1) -> tuple[Tensor, Tensor]:
    """Predicted and true classes, `(images, 5, 7)` each."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(0, CLASSES, (images, 5, 7), generator=generator)
    other = torch.randint(0, CLASSES, truth.shape, generator=generator)
    predicted = torch.where(torch.rand(truth.shape, generator=generator) < noise, other, truth)
    truth[torch.rand(truth.shape, generator=generator) < ignored] = 255
    return predicted, truth


def count_pixels(predicted: Tensor, truth: Tensor) -> dict[str, Any]:
    return json.loads(json.dumps(SEGMENT.record({"map": predicted}, {"map": truth})))


def counted(predicted: Tensor, truth: Tensor) -> list[dict[str, Any]]:
    return [count_pixels(*pair) for pair in zip(predicted, truth, strict=True)]


def whole(weigh: Any, images: int) -> float:
    return float(weigh(np.ones((1, images)))[0])


def test_miou_of_records_is_that_of_torchmetrics_and_ignores_classes_in_no_image() -> None:
    predicted, truth = maps()
    predicted, truth = predicted.clamp(max=1), torch.where(truth == 255, truth, truth.clamp(max=1))
    theirs = MulticlassJaccardIndex(2, ignore_index=255)(predicted, truth)
    assert whole(mean_iou(counted(predicted, truth)), 6) == pytest.approx(theirs.item(), abs=1e-7)
    assert np.isnan(whole(mean_iou([{}, {}]), 2))


def test_weight_of_two_is_an_image_twice() -> None:
    predicted, truth = maps()
    weights = np.array([[2, 0, 1, 1, 0, 2], [1, 1, 1, 1, 1, 1]])
    found = mean_iou(counted(predicted, truth))(weights)
    for row, reached in zip(weights, found, strict=True):
        again = torch.arange(6).repeat_interleave(torch.tensor(row))
        assert reached == pytest.approx(whole(mean_iou(counted(predicted[again], truth[again])), len(again)))


def test_as_many_pixels_are_predicted_as_are_true() -> None:
    predicted, truth = maps()
    _, named, true = np.sum([pixels for record in counted(predicted, truth) for pixels in record.values()], axis=0)
    assert named == true == int((truth != 255).sum())
    assert count_pixels(predicted[0], torch.full((5, 7), 255)) == {}


def of_images(*seeds: Any) -> BootstrapEstimate:
    """The mean of a number of each image."""

    def mean(values: Any, weights: np.ndarray) -> np.ndarray:
        return weights @ values / weights.sum(axis=1)

    return draw([partial(mean, np.asarray(values)) for values in seeds], len(seeds[0]))


def test_classes_that_are_predicted_alone_count_against() -> None:
    assert count_pixels(torch.tensor([[0, 2]]), torch.tensor([[0, 0]])) == {"0": [1, 1, 2], "2": [0, 1, 0]}
    records = [count_pixels(torch.tensor([[0, 2]]), torch.tensor([[0, 0]]))]
    assert mean_iou(records)(np.ones((1, 1)))[0] == pytest.approx((1 / 2 + 0) / 2)


def test_differences_are_paired_over_images() -> None:
    values = np.random.default_rng(0).random(50)
    one, other = of_images(values + 0.05), of_images(values)
    assert one.interval().low < other.interval().high  # unpaired, they overlap
    found = (one - other).interval()
    assert (verdict_of(found), round(found.estimate, 6)) == ("better", 0.05)
    assert verdict_of((other - one).interval()) == "worse"
    assert list(rank({"b": other, "a": one}).items()) == [("a", "best"), ("b", "behind")]


@pytest.mark.slow
def test_equal_scores_are_rarely_called_behind() -> None:
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(100):
        scores = {name: of_images(random.random(50)) for name in "abcde"}
        wrong += "behind" in rank(scores).values()
    assert wrong <= 10


def test_differences_explained_by_noise_are_ties() -> None:
    random = np.random.default_rng(0)
    one, other = of_images(random.random(50)), of_images(random.random(50))
    assert verdict_of((one - other).interval()) == "not significant"
    apart, close = of_images(np.full(50, 0.9), np.full(50, 0.7)), of_images(np.full(50, 0.75), np.full(50, 0.65))
    assert apart.mean == pytest.approx(0.8)
    assert spread(apart.on_all.tolist()) == pytest.approx(0.1 * 2**0.5)
    assert verdict_of((apart - close).interval()) == "not significant"
    assert list(rank({"a": apart, "b": close}).values()) == [NOT_DIFFERENT, NOT_DIFFERENT]


def test_measure_of_nan_is_never_best() -> None:
    nan, other = (BootstrapEstimate(np.array([value]), np.full((1, 10), value), 10) for value in (np.nan, 0.5))
    assert verdict_of((nan - other).interval()) == "not significant"
    assert rank({"a": nan, "b": other, "c": other})["a"] == NOT_DIFFERENT


@pytest.mark.parametrize(
    ("number", "gains"),
    [
        (0, [[1.4, 1.8, 1.3, 1.7], [1.1, 1.8, 1.4, 1.7]]),
        (1, [[0.3, 0.5, 0.4, 0.3], [0.1, 0.3, 0.5, 0.6], [0.2, 0.3, 0.5, 0.3]]),
        (2, [[1.3, 1.9, 1.8, 2.3], [1.5, 2.3, 2.1, 2.5], [1.0, 0.7, 0.8, 1.2], [1.0, 0.7, 0.8, 1.0]]),
        (3, [[0.2, 0.9, 1.0, 0.7], [0.5, 0.5, -1.5, -0.1]]),
    ],
)
def test_published_cells_have_the_gains_printed_beside_them(number: int, gains: list[list[float]]) -> None:
    table = published("dense")[number]
    assert f"table {number + 1}" in table.source
    for row, printed in zip(table.rows, gains, strict=True):
        found = [row[f"value{column}"] - row["value1"] for column in range(2, 6)]
        assert found == pytest.approx(printed, abs=1e-9)


class Knowing(nn.Module):
    """Predicts what is true of the images of some data, in their order, as well as asked, in pixels of what it sees."""

    def __init__(self, data: Any, good: float = 1.0, scaled: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.good, self.scaled = good, scaled
        self.examples = cycle(list(examples(data)))

    def predict(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.say(image) for image in images]

    def say(self, enlarged: Tensor) -> dict[str, Tensor]:
        image, target = next(self.examples)
        found = {}
        if "map" in target:
            logits = nn.functional.one_hot(target["map"] % 255, 11).permute(2, 0, 1).float()
            logits[:, : round((1 - self.good) * logits.shape[1])] = 0
            size = enlarged.shape[1:] if self.scaled else target["map"].shape
            found["logits"] = nn.functional.interpolate(logits[None], size, mode="nearest")[0]
        if "boxes" in target:
            height, width = (here / there for here, there in zip(enlarged.shape[1:], image.shape[1:], strict=True))
            kept = round(self.good * len(target["labels"]))
            found["boxes"] = (target["boxes"] * torch.tensor([width, height, width, height]))[:kept]
            found["labels"] = target["labels"][:kept]
            found["scores"] = torch.linspace(0.9, 0.2, len(target["labels"]))[:kept]
        return found


class Photographs:
    """Data of one image, with boxes and a map of half its size."""

    name, title, tasks = "coco", "Photographs", ("segment", "detect")
    classes, map_classes = tuple("0123456789"), ("background", *"0123456789")

    def __init__(self, height: int = 37, width: int = 51) -> None:
        truth = torch.zeros(height, width, dtype=torch.int64)
        truth[5:20, 10:30], truth[25:, :] = 3, 255
        image = torch.randn(3, 2 * height, 2 * width, generator=torch.Generator().manual_seed(0))
        boxes, labels = torch.tensor([[10.0, 5, 30, 20], [1, 1, 9, 30]]), torch.tensor([2, 7])
        crowd = torch.tensor([False, True])
        self.batch = [image], [{"map": truth, "boxes": boxes, "labels": labels, "crowd": crowd, "name": "a.jpg"}]

    def val_dataloader(self) -> list[Any]:
        return [self.batch]


@pytest.mark.parametrize("zoom", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("task", [SEGMENT, DETECT], ids=lambda task: task.name)
def test_prediction_of_an_enlarged_image_is_scaled_back(task: Any, zoom: float) -> None:
    data: Any = Photographs()
    [(image, target, found)] = predictions(Knowing(data), task, data, zoom)
    assert image.shape == (3, 74, 102)
    if task.name == "segment":
        assert found["map"].shape == (37, 51)
        assert (found["map"] == target["map"])[:25].float().mean() > 0.95
    else:
        assert torch.allclose(found["boxes"], target["boxes"], atol=1e-4)
        assert whole(task.measure_of([task.record(found, target)]), 1) == pytest.approx(1)


def test_tasks_can_be_sent_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps((SEGMENT, DETECT))) == (SEGMENT, DETECT)


def test_truth_is_shown_without_crowds_and_backgrounds() -> None:
    data: Any = Photographs()
    image, [target] = data.batch[0][0], data.batch[1]
    truth = DETECT.truth(target)
    assert DETECT.overlay(truth, image, data).classes == [2]
    assert truth["boxes"].tolist() == [[10, 5, 30, 20]]
    assert SEGMENT.overlay(SEGMENT.truth(target), image, data).classes == [3]


def test_boxes_that_are_not_sure_are_not_drawn() -> None:
    found = {"boxes": torch.rand(2, 4), "labels": torch.tensor([1, 2]), "scores": torch.tensor([0.6, 0.4])}
    overlay = DETECT.overlay(found, torch.zeros(1, 9, 9), Photographs())  # type: ignore[arg-type]
    assert overlay.classes == [1]


MODELS: dict[str, ModelConfig] = {
    name: ModelConfig(**head, patch_size=[8], dim=16, depth=4, num_heads=2, mlp_dim=16)
    for name, head in {
        "segments": dict(head="upernet", head_channels=8),
        "coco": dict(head="dino", head_channels=64, num_queries=20),
    }.items()
}


def lab(folder: Path, *encodings: str, data: str = "segments", **changes: Any) -> Lab:
    source = data_config(data, root=str(MINIATURES[data](folder / data)), size=32, batch_size=4)
    return labs.lab(folder / "out", *encodings, **{"data": source, "model": MODELS[data], **changes})


def faked(here: Lab, monkeypatch: pytest.MonkeyPatch, goods: dict[str, float]) -> None:
    """Have the lab give runs whose models know the truth, to the extent that their encoding says."""

    def train(runs: Any, measures: MeasuresOf) -> list[Trained]:
        trained = []
        for run in runs:
            model = Knowing(here.data, goods[run.encoding], scaled=False)
            task = {"upernet": SEGMENT, "dino": DETECT}[run.config.model.head]
            kept = evaluate(model, here.data, task=task)["sizes"][0]["records"]
            reached = whole(task.measure_of(kept), len(kept))
            one = Trained(run, Path("nowhere"), [], [], 1.0, [{"epoch": 1, task.curve: reached}], 1.0)
            [measure] = measures(run)
            found = json.loads(json.dumps(measure.compute(model, here.data)))
            one.measured = lambda name, found=found: found  # type: ignore[method-assign]
            trained.append(one)
        return trained

    monkeypatch.setattr(here, "train", train)
    monkeypatch.setattr(long_table, "draw", partial(draw, draws=50))
    monkeypatch.setattr(dense, "feasible", lambda lab, runs, where: list(runs))


@pytest.mark.slow
@pytest.mark.parametrize(("data", "title"), [("segments", "Segmentation: mIoU"), ("coco", "Detection: box AP")])
def test_findings_rank_encodings_and_show_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, title: str
) -> None:
    here = lab(tmp_path, "learned", "mixed", "axial", data=data)
    faked(here, monkeypatch, {"learned": 0.4, "mixed": 1.0, "axial": 1.0})
    found = dense.find(here)
    json.dumps(found.plain(), allow_nan=False)
    by_size, ahead_of_learned = found.tables
    assert by_size.title == f"{title} by size"
    assert ahead_of_learned.title == f"{title} ahead of a learned absolute encoding"
    rows = {row["name"]: row for row in by_size.rows}
    assert rows["mixed"]["at1.0"] == rows["mixed"]["at2.0"] == pytest.approx(100, abs=1e-12)
    assert rows["learned"]["at1.0_low"] <= rows["learned"]["at1.0"] <= rows["learned"]["at1.0_high"] < 100
    assert [rows[name]["last"] for name in ("mixed", "axial", "learned")] == [NOT_DIFFERENT, NOT_DIFFERENT, "behind"]
    ahead = {row["name"]: row for row in ahead_of_learned.rows}
    assert set(ahead) == {"mixed", "axial"}
    assert ahead["mixed"]["at2.0_low"] > 0
    assert ahead["mixed"]["at2.0"] == pytest.approx(100 - by_size.rows[-1]["at2.0"])
    assert [len(figure.rows) for figure in found.figures] == [3 * 3, 2 * 3]
    highest = title.partition(": ")[2]
    assert f"{highest} is highest with axial, 100.0 % [100.0, 100.0], {NOT_DIFFERENT} from mixed" in found.answer
    assert "one training each" in found.answer
    [pictures] = found.pictures
    assert [row.title.partition(",")[0] for row in pictures.rows] == ["1 times", "1 times", "2 times"]
    assert list(pictures.rows[0].panels) == ["truth", "learned", "mixed", "axial"]
    truth, learned, mixed, axial = pictures.rows[1].panels.values()
    assert mixed == axial != learned
    assert truth != mixed  # which has no unlabelled pixels, or scores


@pytest.mark.slow
def test_leads_are_over_the_reference_named_and_over_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = lab(tmp_path, "mixed", "liere:8", "learned+mixed", "learned+liere:8", reference="axial")
    goods = {"mixed": 0.4, "liere:8": 1.0, "learned+mixed": 1.0, "learned+liere:8": 0.4, "axial": 0.4}
    faked(here, monkeypatch, goods)
    found = dense.find(here)
    assert "learned absolute" not in json.dumps({**found.plain(), "published": [], "pictures": []})
    of_reference, of_mixed = (
        {row["name"]: row for table in found.tables if table.title == f"Segmentation: mIoU ahead of {other}"
         for row in table.rows}
        for other in ("axial", "RoPE-Mixed")
    )  # fmt: skip
    assert set(of_reference) == set(goods) - {"axial"}
    assert {name: row["first"] for name, row in of_mixed.items()} == {"liere:8": "better", "learned+liere:8": "worse"}
    assert found.figures[1].title == "Ahead of axial"


def test_reference_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--reference must be an encoding that the model supports, got liere:5: "):
        dense.find(lab(tmp_path, "mixed", reference="liere:5"))


def test_head_that_is_named_is_taken_for_its_task(tmp_path: Path) -> None:
    model = ModelConfig(head="mask2former", num_queries=20, head_channels=32, patch_size=[8])
    here = lab(tmp_path, "learned", "mixed", model=model)
    maps, boxes = ([run.config.model for run in dense.runs_of(here, task)] for task in (SEGMENT, DETECT))
    assert [(model.head, model.num_queries, model.head_channels) for model in maps] == [("mask2former", 20, 32)] * 2
    assert [(model.head, model.num_queries, model.head_channels) for model in boxes] == [("dino", None, None)] * 2


@pytest.mark.slow
def test_seeds_are_means_with_a_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = lab(tmp_path, "learned", "mixed", data="coco", seeds=2)
    faked(here, monkeypatch, {"learned": 0.5, "mixed": 1.0})
    [outcome] = measured(here, [(DETECT, here.runs(["learned"]))])
    assert outcome.scores.estimates[Cell("learned", 1.0)].on_all.shape == (2,)
    table = dense.find(here).tables[0]
    assert "spread" in [column.key for column in table.columns]


@pytest.mark.slow
@pytest.mark.parametrize("data", MODELS)
def test_real_study_of_a_few_images(tmp_path: Path, data: str) -> None:
    here = lab(tmp_path, "learned", "mixed", data=data)
    file = run_study(find_study("dense"), here.config, command="torchrope study dense", console=labs.QUIET)
    found = json.loads(file.read_text())
    assert found["data"]["chance"] is None
    task = SEGMENT if data == "segments" else DETECT
    [outcome] = measured(here, [(task, dense.runs_of(here, task))])
    for run in map(here.store.get, dense.runs_of(here, task)):
        score = outcome.scores.estimates[Cell(run.encoding, 1.0)]
        assert score.mean == pytest.approx(run.curve[-1][task.curve], abs=0.005)
    if task is SEGMENT:  # over all classes as many pixels are predicted as there are
        records = [at["records"] for seeds in outcome.measured.values() for seed in seeds for at in seed]
        for images in records:
            counts = [pixels for record in images for pixels in record.values()]
            assert sum(named for _, named, _ in counts) == sum(true for *_, true in counts)
    assert {row["name"] for row in found["findings"]["tables"][0]["rows"]} == {"learned", "mixed"}
    assert len(found["findings"]["pictures"]) == 1
