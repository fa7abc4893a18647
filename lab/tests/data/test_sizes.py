"""Tests of validation at other input sizes, which reads the original files like torchvision and timm."""

from pathlib import Path

import numpy as np
import pytest
import torch
from data_sets import load_data as load
from data_sets import refused
from miniatures import MINIATURES, WNIDS, cifar, imagenet_shards
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from video_files import encode

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config, with_crop_ratio
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.videos import read_clips
from torchrope_lab.training.evaluate import data_at_size

pytestmark = pytest.mark.usefixtures("published_miniatures")

HEIGHT, WIDTH = 96, 128


def stripes(path: Path, shift: int, height: int = HEIGHT, width: int = WIDTH) -> None:
    """Stripes of one pixel, which vanish at half the size, on a brightness gradient."""
    rows, columns = np.mgrid[:height, :width]
    pixels = (60 + columns // 2 + 60 * ((rows + shift) % 2)).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.stack([pixels, 255 - pixels, pixels // 2], -1)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """train/<class>/*.png and val/<class>/*.png of 96 x 128 pixels."""
    for part, count in (("train", 3), ("val", 2)):
        for shift, name in enumerate(WNIDS[:2]):
            for number in range(count):
                stripes(tmp_path / part / name / f"{number}.png", shift + number)
    return tmp_path


def validated(data: DataModule) -> torch.Tensor:
    return torch.cat([inputs for inputs, _ in data.val_dataloader()])


def in_bytes(data: DataModule) -> torch.Tensor:
    """Validation images before normalisation."""
    val = data._made_datasets()[1].raw
    return torch.stack([val[index][0] for index in range(len(val))])


KINDS = [("images", InterpolationMode.BILINEAR, 1.0), ("imagenet", InterpolationMode.BICUBIC, 0.875)]


@pytest.mark.parametrize("ratio", [None, 1.0, 0.75, "native"])
@pytest.mark.parametrize("size", [48, 96, 113])
@pytest.mark.parametrize(("name", "interpolation", "usual"), KINDS)
def test_at_size_matches_torchvision_on_the_files(root, name, interpolation, usual, size, ratio):
    data = load(name, root, size=48, **({} if ratio is None else {"crop_ratio": ratio}))
    resized = 0 if ratio == "native" else round(size / (usual if ratio is None else ratio))
    scaled = [v2.Resize(resized, interpolation)] if resized else []
    theirs = v2.Compose([*scaled, v2.CenterCrop(size), v2.PILToTensor()])
    other = data if size == 48 else data.at_size(size)
    files = [path for path, _ in data._made_datasets()[1].samples]
    assert torch.equal(in_bytes(other), torch.stack([theirs(Image.open(root / path)) for path in files]))
    assert other.input_size == (size, size)
    assert other.enlarged == (len(files) if resized > HEIGHT else 0)
    assert data.other_sizes == ("read" if resized else "cropped")


@pytest.mark.parametrize("name", ["images", pytest.param("imagenet", marks=pytest.mark.slow), "webdataset:{}"])
def test_native_crops_show_more_of_a_picture_at_larger_sizes(tmp_path, name):
    rows, columns = np.mgrid[:375, :500]
    numbered = np.stack([columns % 256, rows % 256, 16 + columns // 256 + 2 * (rows // 256)], -1).astype(np.uint8)
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(numbered).save(tmp_path / place / "0.png")
    data = load(name.format(tmp_path), tmp_path, size=224, crop_ratio="native")
    crops = {size: in_bytes(data.at_size(size))[0] for size in (224, 320, 448)}
    seen = {size: len({*map(tuple, crop.flatten(1).T.tolist())} - {(0, 0, 0)}) for size, crop in crops.items()}
    assert [round(100 * pixels / numbered[..., 0].size) for pixels in seen.values()] == [27, 55, 90]
    assert (crops[448] == 0).all(0).float().mean().item() == pytest.approx(1 - 375 / 448)


def test_at_size_keeps_labels_and_normalisation(root):
    data = load("images", root, size=48)
    assert data_at_size(data, (48, 48)) is data
    larger, (train, val) = data.at_size(96), data._made_datasets()
    assert larger._made_datasets()[0] is train
    assert larger._made_datasets()[1].samples == val.samples
    assert larger._made_datasets()[1].normalise is val.normalise
    assert torch.equal(validated(data.at_size(48)), validated(data))
    assert data.input_size == (48, 48)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_enlarged_images_are_counted_in_all_workers(root, workers):
    stripes(root / "val" / WNIDS[0] / "small.png", 0, 40, 200)
    data = load("images", root, size=32, workers=workers)
    validated(data)
    assert data.enlarged == 0
    larger = data.at_size(64)
    validated(larger)
    assert (larger.enlarged, data.enlarged) == (1, 0)


@pytest.mark.parametrize("ratio", [0.1, "native"])
def test_jpeg_draft_keeps_the_resolution_of_narrow_crops(tmp_path, ratio):
    rng = np.random.default_rng(0)
    for number in range(4):
        path = tmp_path / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        smooth = Image.fromarray(rng.integers(0, 255, (12, 16, 3), np.uint8)).resize((320, 240))
        smooth.save(path, quality=95)
    data = load("images", tmp_path, size=16, crop_ratio=ratio)
    scaled = [] if ratio == "native" else [v2.Resize(160)]
    theirs = v2.Compose([*scaled, v2.CenterCrop(16), v2.PILToTensor()])
    files = [path for path, _ in data._made_datasets()[1].samples]
    expected = torch.stack([theirs(Image.open(tmp_path / path)) for path in files])
    assert (in_bytes(data).int() - expected.int()).abs().float().mean() < 2
    assert data.enlarged == 0


def test_shards_are_read_at_other_sizes(tmp_path):
    data = load("imagenet", imagenet_shards(tmp_path / "data"), size=16)
    val = data._made_datasets()[1]
    theirs = v2.Compose([v2.Resize(37, InterpolationMode.BICUBIC), v2.CenterCrop(32), v2.PILToTensor()])
    expected = torch.stack([theirs(Image.open(val.open(index))) for index in range(len(val))])
    assert torch.equal(in_bytes(data.at_size(32)), expected)


def test_sets_in_memory_reread_larger_files(tmp_path):
    large, small = (load("cifar10", cifar(tmp_path, "10"), size=size) for size in (32, 16))
    assert large.at_size(64) is None
    assert data_at_size(large, (64, 64)) is None
    read = small.at_size(32)
    assert (small.other_sizes, large.other_sizes) == ("read", "resampled")
    assert torch.equal(in_bytes(read), in_bytes(large))
    assert read._made_datasets()[1].normalise is small._made_datasets()[1].normalise
    assert (read.enlarged, small.at_size(40).enlarged) == (0, large.counts[1])


@pytest.mark.parametrize("name", ["digits", "motion"])
def test_other_data_sets_are_resampled(name):
    data = make_data(data_config(name))
    assert data.other_sizes == "resampled"
    assert data.at_size(64) is None


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_videos_are_read_at_other_sizes(tmp_path, ratio):
    for number in range(2):
        for green, name in ((20, "run"), (220, "walk")):
            encode(tmp_path / name / f"{number}.mp4", green=green)  # 24 x 32 pixels
    options = {"normalise": "half", "crop_ratio": ratio, "test_views": [1, 2]}
    data = load("videos", tmp_path, size=8, frames=2, **options)
    larger = data.at_size(16)
    val = larger._made_datasets()[1]
    assert larger.input_size == (2, 16, 16)
    clip = read_clips(tmp_path / val.samples[0][0], lambda count: [[4, 8]])[0]  # the middle
    expected = v2.Compose([v2.Resize(round(16 / ratio)), v2.CenterCrop(16)])(clip).movedim(0, 1)
    assert torch.equal(val.raw[0][0], expected)
    torch.testing.assert_close(val[0][0], (expected / 255 - 0.5) / 0.5)
    assert larger.enlarged == (len(val) if ratio == 0.5 else 0)
    views = next(iter(larger.test_dataloader()))[0]
    assert views.shape == (2, 2, 3, 2, 16, 16)


@pytest.mark.parametrize("name", ["images", "imagenet", "cifar10"])
@pytest.mark.parametrize(
    ("normalise", "mean", "std"),
    [("half", [0.5] * 3, [0.5] * 3), ("imagenet", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])],
)
def test_normalise_setting_selects_mean_and_std(tmp_path, name, normalise, mean, std):
    data = load(name, MINIATURES[name](tmp_path), normalise=normalise)
    val = data._made_datasets()[1]
    expected = v2.functional.normalize(val.raw[0][0] / 255, mean, std)
    torch.testing.assert_close(val[0][0], expected)


def test_crop_ratio_of_an_evaluation_names_the_option_that_was_typed() -> None:
    assert with_crop_ratio(data_config("images"), 0.5).crop_ratio == 0.5
    with refused(r"^--crop-ratio is for images, .*, ucf101, got data set digits$"):
        with_crop_ratio(data_config("digits"), 0.5)
    with refused(r"^--crop-ratio native is for images, imagenet, got data set videos$"):
        with_crop_ratio(data_config("videos"), "native")
