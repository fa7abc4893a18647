"""DINO as a detector, and average precision, compared with transformers and pycocotools."""

import contextlib
import io
import json
from collections.abc import Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.ops import box_iou
from transformers import DeformableDetrConfig
from transformers.loss.loss_deformable_detr import DeformableDetrForObjectDetectionLoss

from torchrope.models import Swin, ViT
from torchrope.models.features import Features
from torchrope_lab.heads import by_size
from torchrope_lab.heads.average_precision import average_precisions, match
from torchrope_lab.heads.detr import DINO, training_objects
from torchrope_lab.settings.run_config import OptimConfig
from torchrope_lab.training.dense_modules import Detector

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")

CLASSES = ("cat", "dog", "owl")
SIZES: dict[str, int] = dict(
    channels=64, queries=20, encoder_layers=1, decoder_layers=2, num_heads=4, mlp_dim=32, denoising_queries=6
)


def built(backbone: Features | None = None) -> DINO:
    torch.manual_seed(0)
    if backbone is None:
        vit = ViT((64, 64), patch_size=16, dim=32, depth=2, num_heads=2, encoding="liere:8")
        backbone = Features(vit, pyramid=True, out_channels=16)
    return DINO(backbone, CLASSES, **SIZES)


def image(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(3, height, width, generator=torch.Generator().manual_seed(seed))


def target(boxes: Sequence[Sequence[float]], labels: Sequence[int], crowd: Any = None) -> Any:
    placed = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    there = torch.tensor(crowd or [False] * len(placed), dtype=torch.bool)
    return {"boxes": placed, "labels": torch.tensor(labels, dtype=torch.int64), "crowd": there}


def batch() -> tuple[list[Tensor], list[Any]]:
    """Images of several sizes, one without objects."""
    sizes = [(64, 64), (40, 56), (64, 96)]
    boxes = [[[4, 4, 20, 24], [30, 30, 60, 50]], [], [[10, 20, 80, 60]]]
    images = [image(*size, seed) for seed, size in enumerate(sizes)]
    targets = [target(own, range(len(own))) for own in boxes]
    return images, targets


def swin() -> Features:
    sizes = dict(dim=16, depths=(1, 1, 1), num_heads=(1, 2, 4), window_size=4)
    return Features(Swin((64, 64), patch_size=4, encoding="mixed", **sizes))


def without_objects() -> tuple[list[Tensor], list[Any]]:
    return [image(64, 64), image(32, 64)], [target([], []), target([], [])]


@pytest.mark.parametrize("backbone", [lambda: None, swin], ids=["vit", "swin"])
@pytest.mark.parametrize("examples", [batch, without_objects])
def test_gradients_reach_every_parameter(backbone: Any, examples: Any) -> None:
    model = built(backbone())
    losses = model.losses(*examples())
    assert all(torch.isfinite(loss) for loss in losses.values())
    sum(losses.values()).backward()
    assert [path for path, weight in model.named_parameters() if weight.grad is None] == []  # DDP needs each
    taught = ("embed", "encodings", "levels") if examples is batch else ("embed",)
    for path, weight in model.backbone.named_parameters():
        assert weight.grad.abs().sum() > 0 or not any(part in path for part in taught), path
    assert len(model.eval().predict([image(64, 64)])) == 1


def sum_of(losses: dict[str, Tensor], part: str) -> Tensor:
    return sum(losses[f"{part}{name}"] for name in ("class", "box", "overlap"))  # type: ignore[return-value]


@pytest.mark.slow
def test_detector_overfits_one_image() -> None:
    model = built()
    images = [image(48, 80)]
    images[0][:, 10:40, 20:70] += 3
    targets = [target([[20, 10, 70, 40]], [2])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    record = []
    for _ in range(30):
        losses = model.losses(images, targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        record.append([sum_of(losses, part).item() for part in ("", "denoising_", "first_")])
    assert min(map(sum, record[-5:])) < sum(record[0]) / 2
    for first, *last in zip(record[0], *record[-5:], strict=True):  # of the decoder, of denoising and of the encoder
        assert min(last) < 0.9 * first
    with torch.no_grad():
        [found] = model.eval().predict(images)
    assert found["labels"][0] == 2
    assert box_iou(found["boxes"][:1], targets[0]["boxes"]).item() > 0.5


@torch.no_grad()
def test_detections_lie_in_their_image_and_ignore_the_batch() -> None:
    model = built().double().eval()
    images = [each.double() for each in batch()[0]]
    together = model.predict(images)
    for alone, found, own in zip([model.predict([each])[0] for each in images], together, images, strict=True):
        assert found.keys() == alone.keys()
        assert 0 < len(found["boxes"]) <= 100
        for key, value in found.items():
            torch.testing.assert_close(value, alone[key], atol=1e-6, rtol=0)  # transformers embeds boxes in float32
        height, width = own.shape[1:]
        assert (found["boxes"] >= 0).all()
        assert (found["boxes"] <= torch.tensor([width, height, width, height])).all()
        assert (found["scores"].diff() <= 0).all()
        assert found["labels"].min() >= 0
        assert found["labels"].max() < len(CLASSES)


def test_crowds_and_empty_boxes_do_not_change_losses() -> None:
    model = built().eval()
    boxes = [[4, 4, 20, 24], [30, 30, 60, 50], [7, 7, 7, 20]]
    with_crowd = target(boxes, [0, 1, 2], crowd=[False, True, False])
    without = {key: value[:1] for key, value in with_crowd.items()}
    losses = [model.losses([image(64, 64)], [each]) for each in (with_crowd, without)]
    assert losses[0] == losses[1]


def test_losses_in_evaluation_mode_are_deterministic() -> None:
    model = built().eval()
    first = model.losses(*batch())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert model.losses(*batch()) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())


def test_backbone_gets_the_padding_mask() -> None:
    model = built()
    masks = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: masks.append(inputs[1]))
    images, targets = batch()
    model.losses(images, targets)
    assert masks[0].dtype == torch.bool
    assert masks[0].sum(dim=(1, 2)).tolist() == [each.shape[1] * each.shape[2] for each in images]


@pytest.mark.slow
def test_bfloat16_applies_to_matrix_products_only() -> None:
    model = built()
    with torch.autocast("cpu", torch.bfloat16):
        losses = model.losses(*batch())
        found = model.eval().predict(batch()[0])
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())
    for each in found:
        assert each["boxes"].dtype == each["scores"].dtype == torch.float32
        rounded = each["boxes"].bfloat16().float()
        assert (each["boxes"] != rounded).float().mean() > 0.5


@torch.no_grad()
def test_boxes_and_losses_equal_transformers() -> None:
    model = built().eval()
    torch.manual_seed(1)
    for head in (*model.detr.decoder.class_embed, *model.detr.decoder.bbox_embed):
        for weight in head.parameters():
            nn.init.normal_(weight, std=0.5)
    images = [image(64, 64), image(64, 64, 1)]
    boxes = [[4, 4, 20, 24], [30, 30, 60, 50], [0, 0, 64, 64], [8, 0, 16, 64]]
    targets = [target(boxes, [0, 2, 1, 1]), target([], [])]
    centres = torch.tensor([[12.0, 14, 16, 20], [45, 40, 30, 20], [32, 32, 64, 64], [12, 32, 8, 64]]) / 64
    labels = [
        {"boxes": centres, "class_labels": targets[0]["labels"]},
        {"boxes": torch.zeros(0, 4), "class_labels": targets[1]["labels"]},
    ]
    layers: list[Any] = []
    model.criterion.matcher.register_forward_pre_hook(lambda _, inputs: layers.append(inputs[0]))
    losses = model.losses(images, targets)
    first, last = layers[:2]  # of decoder layers; then of the encoder
    config = DeformableDetrConfig(num_labels=len(CLASSES), auxiliary_loss=True, class_cost=2)
    assert (config.bbox_cost, config.giou_cost) == (5, 2)  # with class_cost 2 DINO's, in detrex
    logits, shares = (torch.stack([first[key], last[key]]) for key in ("logits", "pred_boxes"))
    expected, *_ = DeformableDetrForObjectDetectionLoss(
        last["logits"], labels, torch.device("cpu"), last["pred_boxes"], config, logits, shares
    )
    torch.testing.assert_close(sum_of(losses, ""), expected.reshape(()))

    for found, logits, shares in zip(model.predict(images), last["logits"], last["pred_boxes"], strict=True):
        scores, order = logits.sigmoid().flatten().sort(descending=True)
        x, y, width, height = (shares[order // 3] * 64).unbind(1)
        edges = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], dim=1).clamp(0, 64)
        torch.testing.assert_close(found["scores"], scores)
        torch.testing.assert_close(found["boxes"], edges, atol=1e-3, rtol=0)  # pixels
        assert torch.equal(found["labels"], order % 3)


def test_maps_agree_on_box_locations() -> None:
    model = built()
    inputs = {}
    model.detr.encoder.register_forward_pre_hook(lambda _, args, kwargs: inputs.update(kwargs), with_kwargs=True)
    model.losses([image(40, 56), image(128, 128)], [target([], []), target([], [])])
    # The coarsest map has cells of 64 pixels, so that the first image counts as 64x64 of 128x128.
    assert inputs["valid_ratios"].tolist() == [[[0.5, 0.5]] * 5, [[1.0, 1.0]] * 5]


def test_invalid_arguments_raise() -> None:
    backbone = built().backbone
    with pytest.raises(ValueError, match="channels must be 64 or more and divisible by 32, got 80"):
        DINO(backbone, CLASSES, channels=80)
    few = DINO(backbone, CLASSES, channels=64, queries=342, encoder_layers=1, decoder_layers=1)
    few.predict([image(65, 9)])
    with pytest.raises(ValueError, match="at most the cells of all maps, 341 in an image of 64x64, got 342"):
        few.predict([image(9, 9)])


def test_objects_drop_crowds_and_by_size_groups() -> None:
    kept = training_objects(target([[0, 0, 4, 4], [1, 1, 1, 9]], [1, 2]))
    assert kept["labels"].tolist() == [1]
    assert kept["boxes"].tolist() == [[0, 0, 4, 4]]
    seen = []

    def find(group: list[Tensor]) -> list[dict[str, Tensor]]:
        seen.append(len(group))
        return [{"sum": each.sum()} for each in group]

    images = [torch.full((1, 2, size), float(index)) for index, size in enumerate([2, 3, 2])]
    assert [found["sum"].item() for found in by_size(images, find)] == [0, 6, 8]
    assert seen == [2, 1]


@cache
def drawn(seed: int, images: int = 25) -> tuple[list[Any], list[Any]]:
    """Draw random objects, some of them crowds, and detections: hits, near misses, duplicates, wrong classes."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.rand, generator=generator)
    targets, found = [], []
    for _ in range(images):
        count = int(random(()) * 6) * int(random(()) > 0.2)
        corner = random(count, 2) * 30
        boxes = torch.cat([corner, corner + 3 + random(count, 2) * 15], dim=1)
        labels = (random(count) * 3).long()
        crowd = (random(count) < 0.2).tolist()
        targets.append(target(boxes.round().tolist(), labels.tolist(), crowd))
        times = (random(count) * 4).long()
        near = (boxes.repeat_interleave(times, dim=0) + random(int(times.sum()), 4) * 3).round()
        guessed = torch.where(random(len(near)) < 0.2, (random(len(near)) * 3).long(), labels.repeat_interleave(times))
        each = target(near.tolist(), guessed.tolist())
        found.append({**{key: each[key] for key in ("boxes", "labels")}, "scores": random(len(near))})
    return found, targets


def of_pycocotools(found: list[Any], targets: list[Any]) -> np.ndarray:
    def listed(images: list[Any]) -> COCO:
        annotations = []
        for index, each in enumerate(images):
            for row in range(len(each["labels"])):
                left, top, right, bottom = each["boxes"][row].tolist()
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": index,
                        "category_id": each["labels"][row].item(),
                        "bbox": [left, top, right - left, bottom - top],
                        "area": (right - left) * (bottom - top),
                        "iscrowd": int(each["crowd"][row]) if "crowd" in each else 0,
                        "score": each["scores"][row].item() if "scores" in each else None,
                    }
                )
        index = COCO()
        index.dataset = {
            "images": [{"id": number, "height": 48, "width": 48} for number in range(len(images))],
            "categories": [{"id": number} for number in range(3)],
            "annotations": annotations,
        }
        index.createIndex()
        return index

    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(listed(targets), listed(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats


def average_precision(records: list[Any], weights: Any = None, iou: float | None = None) -> float:
    weights = np.ones(len(records)) if weights is None else np.asarray(weights, dtype=float)
    return float(average_precisions(records, weights[None], iou=iou)[0])


@pytest.mark.parametrize("seed", range(6))
def test_average_precision_equals_pycocotools(seed: int) -> None:
    found, targets = drawn(seed)
    records = json.loads(json.dumps(match(found, targets)))
    every, at_50, at_75, *_ = of_pycocotools(found, targets)
    assert 0.02 < every < 0.9
    assert average_precision(records) == pytest.approx(every, abs=1e-12)
    assert average_precision(records, iou=0.5) == pytest.approx(at_50, abs=1e-12)
    assert average_precision(records, iou=0.75) == pytest.approx(at_75, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_integer_weights_equal_copies_of_images(seed: int) -> None:
    found, targets = drawn(seed)
    records = match(found, targets)
    weights = np.random.default_rng(seed).integers(0, 4, (3, len(records)))
    together = average_precisions(records, weights.astype(float))
    for row, measured in zip(weights, together, strict=True):
        more = [list(chain(*([each] * times for each, times in zip(part, row, strict=True)))) for part in drawn(seed)]
        assert measured == pytest.approx(of_pycocotools(*more)[0], abs=1e-12)
        assert measured == average_precision(records, row)
        assert average_precision(records, row * 0.25) == pytest.approx(measured, abs=1e-12)


def test_average_precision_of_edge_cases() -> None:
    _, targets = drawn(0)
    perfect = [{**each, "scores": torch.ones(len(each["labels"]))} for each in map(training_objects, targets)]
    nothing = [{key: value[:0] for key, value in each.items()} for each in perfect]
    assert average_precision(match(perfect, targets)) == pytest.approx(1)
    assert average_precision(match(nothing, targets)) == 0
    empty = [training_objects(target([], []))] * len(perfect)
    assert np.isnan(average_precision(match(perfect, empty)))
    assert np.isnan(average_precision(match(nothing, empty)))
    assert np.isnan(average_precision(match(perfect, targets), [0.0] * len(targets)))


@pytest.mark.parametrize("right_first", [False, True])
def test_detections_of_equal_score_are_ordered_by_image(right_first: bool) -> None:
    there, elsewhere = [0.0, 0, 8, 8], [8.0, 8, 16, 16]
    targets = [target([there], [1]), target([there], [1])]
    places = [there, elsewhere] if right_first else [elsewhere, there]
    found = [{**training_objects(target([place], [1])), "scores": torch.tensor([0.5])} for place in places]
    assert average_precision(match(found, targets)) == pytest.approx(51 / 101 * (1 if right_first else 1 / 2))
    assert average_precision(match(found, targets)) == pytest.approx(of_pycocotools(found, targets)[0])


def test_average_precision_uses_the_best_100_detections() -> None:
    there = target([[0, 0, 8, 8]], [1])
    boxes = torch.tensor([[8.0, 8, 16, 16]] * 100 + [[0.0, 0, 8, 8]])
    found = {"boxes": boxes, "labels": torch.ones(101, dtype=torch.int64), "scores": torch.linspace(1, 0.5, 101)}
    assert average_precision(match([found], [there])) == 0


class Memory(nn.Module):
    """Model that returns the given detections for the nth image of a validation."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.found = found

    def no_weight_decay(self) -> set[str]:
        return set()

    def losses(self, images: list[Tensor], targets: list[Any]) -> dict[str, Tensor]:
        return {"a": self.weight.sum() + len(images), "b": torch.tensor(0.5)}

    def predict(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.found[int(each[0, 0, 0])] for each in images]


def paired(examples: list[Any]) -> list[Any]:
    return list(zip(*examples, strict=True))


def loader(images: list[Tensor], targets: list[Any], size: int) -> DataLoader:
    return DataLoader(paired([images, targets]), batch_size=size, collate_fn=paired)  # type: ignore[arg-type]


def fitted(module: Detector, train: DataLoader, val: DataLoader) -> Any:
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", num_sanity_val_steps=0, **quiet)  # type: ignore[arg-type]
    trainer.fit(module, train, val)
    return trainer.callback_metrics


def test_detector_logs_precision_over_all_images() -> None:
    found, targets = drawn(1)
    images = [torch.full((3, 48, 48), float(index)) for index in range(len(targets))]
    module = Detector(Memory(found), OptimConfig(epochs=1, warmup_epochs=0, lr=1e-9))
    metrics = fitted(module, loader(images, targets, 10), loader(images, targets, 4))
    assert metrics["val_ap"].item() == pytest.approx(average_precision(match(found, targets)), abs=1e-6)
    losses = [4 + 0.5] * 24 + [1 + 0.5]  # of each image's batch
    assert metrics["val_loss"].item() == pytest.approx(sum(losses) / 25, abs=1e-5)
    assert module.train_loss.compute().item() == pytest.approx((10.5 * 20 + 5.5 * 5) / 25, abs=1e-5)


def test_detector_uses_cocos_float64_recalls() -> None:
    boxes = [[4.0 * place, 0, 4.0 * place + 4, 8] for place in range(10)]
    targets = [target(boxes, [0] * 10)]
    found = [{**{key: targets[0][key][:7] for key in ("boxes", "labels")}, "scores": torch.ones(7)}]
    module = Detector(Memory(found), OptimConfig(epochs=1, warmup_epochs=0))
    images = loader([torch.zeros(3, 48, 48)], targets, 1)
    # COCO's recalls are 0, 0.01, ..., 0.69, 0.7000000000000001, ...; torchmetrics' own are rounded to float32.
    assert of_pycocotools(found, targets)[0] == pytest.approx(70 / 101)
    assert fitted(module, images, images)["val_ap"].item() == pytest.approx(70 / 101)
    assert not module.val_precision.update_called  # reset for the next epoch


def test_detector_trains() -> None:
    model = built()
    before = model.backbone.model.embed.proj.weight.clone()
    images, targets = batch()
    module = Detector(model, OptimConfig(epochs=1, warmup_epochs=0))
    metrics = fitted(module, loader(images, targets, 2), loader(images, targets, 3))
    assert not torch.equal(model.backbone.model.embed.proj.weight, before)
    assert 0 <= metrics["val_ap"] <= 1
    assert metrics["val_loss"].isfinite()
