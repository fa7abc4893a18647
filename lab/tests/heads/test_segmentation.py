"""Segmentation heads compared with transformers' models; test-time augmentation, mean IoU and training."""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from backbones import replace_backbone
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassJaccardIndex
from transformers import (
    BeitConfig,
    BeitForSemanticSegmentation,
    Mask2FormerForUniversalSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

import torchrope as tr
from torchrope.models.features import Features
from torchrope_lab.heads.prediction import MultiScale, SlidingWindows, mean_iou, per_image_counts, window_starts
from torchrope_lab.heads.segmentation import Mask2Former, SemanticModel, UperNet, _without_padding, enlarge
from torchrope_lab.settings.run_config import OptimConfig
from torchrope_lab.training.dense_modules import Segmenter

ENCODINGS = ["axial", "mixed", "liere:8", "comrope-ld", "learned", "none", "learned+mixed"]
CLASSES = ("background", "0", "1")
SMALL = dict(channels=32, queries=6, encoder_layers=1, decoder_layers=2, num_heads=2, encoder_mlp_dim=32, mlp_dim=32)


def vit(encoding: Any = "mixed", **settings: Any) -> tr.ViT:
    return tr.ViT((32, 32), patch_size=8, num_outputs=0, dim=32, depth=4, num_heads=2, encoding=encoding, **settings)


def swin(encoding: str = "bias") -> tr.Swin:
    sizes = dict(dim=16, depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2), window_size=4, drop_path=0.0)
    return tr.Swin((64, 64), num_outputs=0, encoding=encoding, **sizes)


def plain(encoding: Any = "mixed") -> Features:
    return Features(vit(encoding), indices=(1, 2, 3, 4))


def pyramid(encoding: str = "mixed") -> Features:
    return Features(vit(encoding), pyramid=True, out_channels=16)


def stages(encoding: str = "bias") -> Features:
    return Features(swin(encoding))


upernet = partial(UperNet, classes=CLASSES, channels=16, auxiliary_channels=8)
mask2former = partial(Mask2Former, classes=CLASSES, points=200, **SMALL)
MODELS = {
    **{f"upernet-vit-{encoding}": partial(lambda own: upernet(plain(own)), encoding) for encoding in ENCODINGS},
    "upernet-pyramid": lambda: upernet(pyramid()),
    "upernet-swin-bias": lambda: upernet(stages("bias")),
    "upernet-swin-bias+mixed": lambda: upernet(stages("bias+mixed")),
    "mask2former-swin-bias": lambda: mask2former(stages("bias")),
    "mask2former-swin-mixed": lambda: mask2former(stages("mixed")),
    "mask2former-pyramid": lambda: mask2former(pyramid("liere:8")),
    "mask2former-vit": lambda: mask2former(plain("axial")),
}
FEW = ["upernet-vit-liere:8", "upernet-swin-bias", "mask2former-swin-mixed", "mask2former-vit"]


def built(name: str) -> SemanticModel:
    torch.manual_seed(0)
    return MODELS[name]()


def scene(height: int, width: int, seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """Draw bands of three classes, each with its own colour, and a corner without a class."""
    generator = torch.Generator().manual_seed(seed)
    map = (torch.arange(width) * 3 // width).expand(height, width).clone()
    image = functional.one_hot(map, 3).permute(2, 0, 1) + 0.1 * torch.randn(3, height, width, generator=generator)
    map[: height // 4, : width // 4] = 255
    return image, {"map": map, "name": str(seed)}


def batch(*sizes: tuple[int, int]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    scenes = [scene(*size, seed) for seed, size in enumerate(sizes)]
    return [image for image, _ in scenes], [target for _, target in scenes]


def total(model: Any, images: list[Tensor], targets: list[dict[str, Any]]) -> Tensor:
    torch.manual_seed(1)  # for the points that Mask2Former samples
    return sum(model.losses(images, targets).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_reaches_all_parameters_and_lowers_the_loss(name: str) -> None:
    model, (images, targets) = built(name), batch((64, 64), (50, 61))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    losses = []
    for _ in range(3):
        loss = total(model, images, targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        idle = [of for of, part in model.named_parameters() if part.grad is None or not part.grad.abs().sum() > 0]
        assert not idle
        optimizer.step()
    assert losses[2] < losses[0]


@pytest.mark.parametrize("name", FEW)
def test_logits_have_their_images_size_and_ignore_the_batch(name: str) -> None:
    model = built(name).eval()
    images, _ = batch((64, 64), (50, 61), (64, 64), (7, 70))
    with torch.no_grad():
        together = model.predict(images)
        for image, found in zip(images, together, strict=True):
            assert found["logits"].shape == (3, *image.shape[1:])
            torch.testing.assert_close(found["logits"], model.predict([image])[0]["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_bfloat16_is_close_and_logits_are_float32(name: str) -> None:
    model, (images, targets) = built(name), batch((64, 64), (50, 61))
    exact = total(model, images, targets)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = total(model, images, targets)
        rounded.backward()
        found = model.eval().predict(images)[1]["logits"]
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert found.dtype == torch.float32
    assert all(part.grad.isfinite().all() for part in model.parameters() if part.grad is not None)


def test_mask2former_computes_offsets_in_full_precision() -> None:
    model, seen = built("mask2former-swin-mixed"), []
    for part in (model.head.pixel_decoder, model.head.criterion.matcher, model.head.transformer):
        part.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        total(model, *batch((64, 64)))
    assert seen[:3] == [False, True, False]  # pixels, queries, masks


@pytest.mark.parametrize("name", ["upernet-vit-mixed", "upernet-swin-bias"])
def test_upernet_loss_is_the_mean_over_labelled_pixels(name: str) -> None:
    model, (images, targets) = built(name), batch((64, 64), (50, 61))
    padded = torch.stack([functional.pad(image, (0, 64 - image.shape[2], 0, 64 - image.shape[1])) for image in images])
    mask = torch.zeros(2, 64, 64, dtype=torch.bool)
    for row, image in zip(mask, images, strict=True):
        row[: image.shape[1], : image.shape[2]] = True
    logits = model(padded, mask)
    inside = [each[:, : image.shape[1], : image.shape[2]] for each, image in zip(logits, images, strict=True)]
    pixels = torch.cat([each.flatten(1) for each in inside], dim=1).T
    truth = torch.cat([target["map"].flatten() for target in targets])
    expected = functional.cross_entropy(pixels[truth != 255], truth[truth != 255])
    torch.testing.assert_close(model.losses(images, targets)["cross_entropy"], expected)


@pytest.mark.parametrize("features", [pyramid, partial(stages, "bias+mixed")])
def test_upernet_equals_transformers(features: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, (images, targets) = upernet(features()), batch((64, 64), (64, 64))
    replace_backbone(UperNetForSemanticSegmentation, features(), monkeypatch)
    theirs = UperNetForSemanticSegmentation(UperNetConfig(hidden_size=16, auxiliary_channels=8, num_labels=3))
    theirs.backbone.load_state_dict(model.backbone.state_dict())
    theirs.decode_head.load_state_dict(model.head.state_dict())
    theirs.auxiliary_head.load_state_dict(model.auxiliary_head.state_dict())
    output = theirs(torch.stack(images), labels=torch.stack([target["map"] for target in targets]))
    torch.testing.assert_close(total(model, images, targets), output.loss)
    expected = theirs.eval()(torch.stack(images)).logits
    torch.testing.assert_close(model.eval()(torch.stack(images)), expected, rtol=1e-4, atol=1e-5)


def test_upernet_drops_channels_before_its_classifiers_in_training() -> None:
    model = upernet(pyramid(), dropout=0.4)
    for head in (model.head, model.auxiliary_head):
        ones = torch.ones(100, head.classifier.in_channels, 2, 2)
        features: list[Tensor] = []
        handle = head.classifier.register_forward_pre_hook(lambda _, inputs, to=features: to.append(inputs[0]))
        head.train().classifier(ones)
        head.eval().classifier(ones)
        handle.remove()
        dropped = features[0].flatten(2)
        assert 0.3 < (dropped == 0).float().mean() < 0.5
        assert (dropped == dropped[..., :1]).all()  # of whole channels, the others divided by 0.6
        torch.testing.assert_close(dropped.unique(), torch.tensor([0, 1 / 0.6]))
        assert torch.equal(features[1], ones)
    assert model.state_dict().keys() == upernet(pyramid()).state_dict().keys()


def test_upernet_on_a_plain_vit_equals_beit() -> None:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, num_labels=3)
    theirs = BeitForSemanticSegmentation(BeitConfig(out_indices=[1, 2, 3, 4], **sizes))
    model = UperNet(plain(), CLASSES, channels=32, auxiliary_channels=256)
    for mine, other in ((model.neck, theirs.fpn), (model.head, theirs.decode_head)):
        mine.load_state_dict(dict(zip(mine.state_dict(), other.state_dict().values(), strict=True)))
    auxiliary = theirs.auxiliary_head.state_dict().values()
    model.auxiliary_head.load_state_dict(dict(zip(model.auxiliary_head.state_dict(), auxiliary, strict=True)))
    x = torch.randn(2, 3, 64, 96)
    maps = theirs.fpn(tuple(model.backbone(x)))
    for found, expected in zip(model.maps(x), maps, strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.head(maps), theirs.decode_head(maps))
    torch.testing.assert_close(model.auxiliary_head(maps), theirs.auxiliary_head(maps))


@pytest.mark.parametrize("features", [pyramid, partial(stages, "bias+mixed")])
def test_mask2former_equals_transformers(features: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, (images, targets) = mask2former(features()), batch((64, 64), (64, 64))
    replace_backbone(Mask2FormerForUniversalSegmentation, features(), monkeypatch)
    theirs = Mask2FormerForUniversalSegmentation(model.head.config)
    parts = theirs.model.pixel_level_module
    parts.encoder.load_state_dict(model.backbone.state_dict())
    parts.decoder.load_state_dict(model.head.pixel_decoder.state_dict())
    theirs.model.transformer_module.load_state_dict(model.head.transformer.state_dict())
    theirs.class_predictor.load_state_dict(model.head.classifier.state_dict())
    labels = [torch.tensor([0, 1, 2]) for _ in targets]
    masks = [(target["map"] == torch.arange(3)[:, None, None]).float() for target in targets]
    torch.manual_seed(1)
    output = theirs(torch.stack(images), mask_labels=masks, class_labels=labels)
    torch.testing.assert_close(total(model, images, targets), output.loss.reshape(()))
    drawn = enlarge(output.masks_queries_logits, 64 / output.masks_queries_logits.shape[-1], (64, 64)).sigmoid()
    shares = torch.einsum("bqc,bqhw->bchw", output.class_queries_logits.softmax(-1)[..., :3], drawn)
    found = model.eval()(torch.stack(images))
    torch.testing.assert_close(found.softmax(1), shares / shares.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_enlarge_scales_by_stride_and_crops() -> None:
    columns = ((torch.arange(16.0).double() + 0.5) * 4).expand(1, 1, 13, 16)  # 13 cells of 4 cover 50 pixels and 2 more
    found = enlarge(columns, 4, (50, 61))
    assert found.shape == (1, 1, 50, 61)
    inside = torch.arange(2, 61)  # bilinear interpolation of a ramp is exact except half a cell at the edge
    torch.testing.assert_close(found[0, 0, 7, inside], inside + 0.5, check_dtype=False)


def test_mask_losses_exclude_padding() -> None:
    columns = (torch.arange(16.0) + 0.5) * 4  # pixels at which cells of stride 4 have their centres
    masks = columns.expand(2, 1, 16, 16).double()
    same, framed = _without_padding([masks], [(64, 64), (50, 40)], 4)[0]
    torch.testing.assert_close(same, masks[0])
    # within bilinear cells the ramp is linear: cell i of the resampled map samples pixel (i + 1/2) / 16 · 40
    torch.testing.assert_close(framed[0, 0, 1:], (torch.arange(16.0).double()[1:] + 0.5) / 16 * 40)
    assert _without_padding([masks], [(64, 64)] * 2, 4)[0] is masks


@pytest.mark.parametrize("name", FEW)
def test_losses_of_single_and_unlabelled_images_are_finite(name: str) -> None:
    model, (images, targets) = built(name), batch((50, 61))
    assert torch.isfinite(total(model, images, targets))
    assert all(part.training for part in model.modules())
    images, targets = batch((64, 64), (50, 61))
    for target in targets:
        target["map"].fill_(255)
    loss = total(model, images, targets)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(part.grad.isfinite().all() for part in model.parameters() if part.grad is not None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UperNet(plain(), ["sky"]), "classes must be 2 or more, got 1"),
        (lambda: upernet(Features(vit(), indices=(4,))), "UperNet needs three maps or more"),
        (lambda: mask2former(Features(vit(), indices=(3, 4))), "Mask2Former needs four maps, each of"),
        (lambda: mask2former(stages(), channels=48), "channels must be divisible by 32 and num_heads = 2, got 48"),
    ],
)
def test_unsupported_maps_raise_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# Inference


class Pointwise:
    """Model whose logits of a pixel depend on its colour alone, so that windows and flips have no effect."""

    def __init__(self, tilt: float = 0.0) -> None:
        self.weight = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self.tilt = tilt
        self.seen: list[tuple[int, ...]] = []

    def predict(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        self.seen += [tuple(image.shape[-2:]) for image in images]
        found = [torch.einsum("kc,chw->khw", self.weight, image) for image in images]
        return [{"logits": each + self.tilt * each.roll(1, -1)} for each in found]


@pytest.mark.parametrize(("size", "crop", "stride"), [((40, 70), 16, 11), ((16, 33), 16, 16), ((5, 17), 16, 1)])
def test_sliding_windows_of_a_pointwise_model_equal_one_pass(size: tuple[int, int], crop: int, stride: int) -> None:
    model, image = Pointwise(), torch.randn(3, *size, dtype=torch.float64)
    (found,) = SlidingWindows(model, crop=crop, stride=stride).predict([image])
    torch.testing.assert_close(found["logits"], Pointwise().predict([image])[0]["logits"])
    assert set(model.seen) == {tuple(min(extent, crop) for extent in size)}


def test_sliding_window_of_image_size_equals_one_pass() -> None:
    model, (images, _) = built("upernet-vit-mixed").eval(), batch((50, 61), (64, 64))
    with torch.no_grad():
        whole = model.predict(images)
        windows = SlidingWindows(model, crop=64, stride=32).predict(images)
    for one, other in zip(whole, windows, strict=True):
        torch.testing.assert_close(one["logits"], other["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 853, 854, 2000])
def test_windows_cover_every_pixel_and_end_at_the_edge(size: int) -> None:
    starts = window_starts(size, 512, 341)
    assert starts[0] == 0
    assert starts[-1] + min(size, 512) == size
    assert all(0 < later - earlier <= 341 for earlier, later in pairwise(starts))
    assert len(starts) == max(size - 512 + 341 - 1, 0) // 341 + 1  # mmsegmentation's count


def test_flip_does_not_change_an_equivariant_model() -> None:
    image = torch.randn(3, 20, 31, dtype=torch.float64)
    answers = {
        (tilt, flip): MultiScale(Pointwise(tilt), flip=flip).predict([image])[0]["logits"]
        for tilt in (0.0, 0.5)
        for flip in (True, False)
    }
    torch.testing.assert_close(answers[0.0, True], answers[0.0, False])
    assert not torch.allclose(answers[0.5, True], answers[0.5, False], atol=1e-2)


def test_multi_scale_averages_probabilities() -> None:
    image = torch.randn(3, 20, 31, dtype=torch.float64)
    model = Pointwise()
    (alone,) = MultiScale(model, scales=(1.0,), flip=False).predict([image])
    torch.testing.assert_close(alone["logits"].softmax(0), model.predict([image])[0]["logits"].softmax(0))
    model.seen.clear()
    (found,) = MultiScale(model, scales=(0.5, 2.0), flip=False).predict([image])
    assert model.seen == [(10, 16), (40, 62)]
    shares = []
    for size in list(model.seen):
        view = functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
        logits = model.predict([view])[0]["logits"]
        shares.append(functional.interpolate(logits[None], image.shape[1:], mode="bilinear")[0].softmax(0))
    torch.testing.assert_close(found["logits"].exp(), (shares[0] + shares[1]) / 2)
    torch.testing.assert_close(found["logits"].exp().sum(0), torch.ones(20, 31, dtype=torch.float64))
    (both,) = MultiScale(SlidingWindows(model, crop=16, stride=11), scales=(0.5, 2.0), flip=False).predict([image])
    torch.testing.assert_close(both["logits"], found["logits"])


def test_map_of_unknown_classes_raises() -> None:
    with pytest.raises(ValueError, match=r"below 2 or 255, got \[7\]"):
        per_image_counts(torch.zeros(1, 2), torch.tensor([[7, 255]]), 2)


# Counts


def test_per_image_counts_equal_a_manual_count() -> None:
    map = torch.tensor([[0, 0, 1], [1, 255, 255]])
    prediction = torch.tensor([[0, 1, 1], [1, 3, 0]])
    counts = per_image_counts(prediction, map, 4)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [[1, 2, 0, 0], [1, 3, 0, 0], [2, 2, 0, 0]]
    assert mean_iou(counts).item() == pytest.approx((1 / 2 + 2 / 3) / 2)  # classes 2 and 3 occur nowhere
    logits = functional.one_hot(prediction, 4).permute(2, 0, 1).float()
    assert torch.equal(per_image_counts(logits, map, 4), counts)
    wrong = per_image_counts(torch.full_like(map, 2), map, 4)
    assert mean_iou(wrong).item() == 0  # a false positive of a class that does not occur counts
    assert math.isnan(mean_iou(per_image_counts(prediction, torch.full_like(map, 255), 4)).item())


@pytest.mark.parametrize("seed", range(3))
def test_mean_iou_equals_torchmetrics(seed: int) -> None:
    torch.manual_seed(seed)
    metric = MulticlassJaccardIndex(6, ignore_index=255)
    counts = []
    for _ in range(5):
        map, prediction = torch.randint(0, 4, (9, 11)), torch.randint(0, 5, (9, 11))  # class 5 does not occur
        map[torch.rand(9, 11) < 0.3] = 255
        metric.update(prediction, map)
        counts.append(per_image_counts(prediction, map, 6))
    assert mean_iou(torch.stack(counts).sum(0)).item() == pytest.approx(metric.compute().item(), rel=1e-6)
    drawn = torch.stack(counts)[torch.randint(0, 5, (7, 5))]  # a bootstrap over images
    assert mean_iou(drawn.sum(1)).shape == (7,)


# Training


class Knows(nn.Module):
    """Model that returns given logits, at a fifth of the maps' resolution."""

    classes = CLASSES

    def predict(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [{"logits": 9 * image[:, ::5, ::5]} for image in images]


def test_segmenter_resizes_logits_to_the_maps() -> None:
    segmenter = Segmenter(Knows(), OptimConfig())
    images, targets = batch((64, 66), (30, 42))
    segmenter.validation_step((images, targets), 0)
    logits = [
        functional.interpolate(9 * image[None, :, ::5, ::5], image.shape[1:], mode="bilinear") for image in images
    ]
    counts = [per_image_counts(each[0], target["map"], 3) for each, target in zip(logits, targets, strict=True)]
    assert segmenter.val_miou.compute().item() == pytest.approx(mean_iou(sum(counts)).item(), rel=1e-6)
    assert 0.9 < segmenter.val_miou.compute() < 1
    pixels = torch.cat([each.flatten(2) for each in logits], dim=2)
    truth = torch.cat([target["map"].flatten() for target in targets])
    expected = functional.cross_entropy(pixels, truth[None], ignore_index=255)
    assert segmenter.val_loss.compute().item() == pytest.approx(expected.item(), rel=1e-5)


def test_segmenter_ignores_unlabelled_images() -> None:
    model, (images, targets) = built("upernet-vit-mixed"), batch((64, 64), (50, 61))
    segmenter = Segmenter(model, OptimConfig())
    loss = segmenter.training_step((images, targets), 0)["loss"]
    torch.testing.assert_close(loss, total(model, images, targets))
    assert segmenter.train_loss.compute() == loss
    assert segmenter.curve[-1] == "val_miou"
    model.eval()
    segmenter.validation_step((images, targets), 0)
    before = segmenter.val_loss.compute(), segmenter.val_miou.compute()
    nothing = {"map": torch.full((64, 64), 255)}
    segmenter.val_loss._computed = segmenter.val_miou._computed = None
    segmenter.validation_step((images[:1], [nothing]), 1)
    assert (segmenter.val_loss.compute(), segmenter.val_miou.compute()) == before


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
