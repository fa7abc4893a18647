"""Videos: real files, the frames and crops that are taken of them, their splits, and what damaged ones do."""

import logging
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from data_sets import load_data, place, refused
from PIL import Image
from torch import nn
from video_files import HEIGHT, WIDTH, encode, ucf101_folder, video_folder

from torchrope_lab import recipes
from torchrope_lab.data import videos
from torchrope_lab.data.build import make_data
from torchrope_lab.data.clips import crop_corners, test_frames, training_frames
from torchrope_lab.data.data_config import AugmentConfig, data_config
from torchrope_lab.data.draws import seeded
from torchrope_lab.data.faults import TooManyFaults
from torchrope_lab.data.videos import ClipSet, OpenVideo, open_video, read_clips
from torchrope_lab.settings.compare_config import ENCODINGS
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.evaluate import evaluate, predict
from torchrope_lab.training.models import build_vit
from torchrope_lab.training.run import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SUFFIXES = ".avi .mp4 .m4v .mov .mkv .webm .mpg .mpeg .wmv .flv .gif"
MODEL = ModelConfig(dim=48, depth=1, num_heads=2, mlp_dim=32, patch_size=[2, 8, 8], pool="mean")


def blot(path: Path) -> None:
    """Overwrite the pictures, and leave a header that can be read."""
    content = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.pos]
    for start, size in packets:
        content[start : start + size] = b"\x55" * size
    path.write_bytes(content)


load = partial(load_data, frames=4, frame_stride=2, size=16, batch_size=4)


def everything(data, epochs=(0,)) -> list[torch.Tensor]:
    """All training batches of some epochs."""
    return [inputs for epoch in epochs for inputs, _ in place(data, epoch).train_dataloader()]


# Which frames and crops


def published_training_frames(count: int, frames: int, stride: int, end: int | None) -> list[int]:
    """VideoMAE's formula in NumPy, with the last frame's number given."""
    span = frames * stride
    if count <= span:
        index = np.concatenate([np.linspace(0, count, num=count // stride), np.full(frames - count // stride, count)])
        return np.clip(index, 0, count - 1).astype(np.int64).tolist()
    index = np.linspace(end - span, end, num=frames)
    return np.clip(index, end - span, end - 1).astype(np.int64).tolist()


@pytest.mark.parametrize(("frames", "stride"), [(8, 4), (16, 4), (32, 2), (4, 1)])
@pytest.mark.parametrize("count", [1, 3, 30, 64, 65, 300])
def test_training_frames_are_videomaes(count, frames, stride):
    torch.manual_seed(3)
    span = frames * stride
    possible = (
        [published_training_frames(count, frames, stride, end) for end in range(span, count)]
        if count > span
        else [published_training_frames(count, frames, stride, None)]
    )
    drawn = [training_frames(count, frames, stride) for _ in range(20)]
    assert all(clip in possible for clip in drawn)
    assert len({tuple(clip) for clip in drawn}) > 1 or len(possible) <= 2


@pytest.mark.parametrize(("frames", "stride", "segments"), [(8, 4, 5), (16, 4, 2), (4, 3, 3)])
@pytest.mark.parametrize("count", [1, 10, 64, 300])
def test_test_frames_are_videomaes(count, frames, stride, segments):
    strided = list(range(0, count, stride))
    strided += [strided[-1]] * max(0, frames - len(strided))
    step = max((len(strided) - frames) / (segments - 1), 0)
    expected = [strided[int(place * step) :][:frames] for place in range(segments)]
    assert test_frames(count, frames, stride, segments) == expected


def test_single_segment_and_crop_are_the_middle():
    assert test_frames(40, 4, 2, 1) == [[16, 18, 20, 22]]
    assert crop_corners(24, 32, 16, 1) == [(4, 8)]


@pytest.mark.parametrize(("height", "width"), [(16, 40), (40, 16), (16, 16)])
def test_crops_go_from_end_to_end(height, width):
    corners = crop_corners(height, width, 16, 3)
    step = (max(height, width) - 16) / 2
    ways = [(int(step * place), 0) if height >= width else (0, int(step * place)) for place in range(3)]
    assert corners == ways


# Decoding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.avi", "mpeg4", {"g": 7, "bf": 2}),
        ("a.avi", "mpeg4", {"g": 7}),
        ("a.mp4", "libx264", {"g": 7}),
        ("a.mkv", "libx264", {"g": 50}),
    ],
)
@pytest.mark.parametrize("margins", [videos.SEEK_MARGINS, (0, 64), (0, 1)])
def test_any_frames_are_those_of_the_whole_video(tmp_path, monkeypatch, name, codec, options, margins):
    monkeypatch.setattr(videos, "SEEK_MARGINS", margins)
    path = encode(tmp_path / name, 40, codec=codec, **options)
    with av.open(str(path)) as container:
        whole = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    with open_video(path) as video:
        assert video.count == len(whole) == 40
    asked = [[0, 1, 2], [9, 9, 15], [20, 30, 39], [39], [38, 39, 39]]
    clips = read_clips(path, lambda count: asked)
    for clip, indices in zip(clips, asked, strict=True):
        expected = np.stack([whole[index] for index in indices])
        assert np.array_equal(clip.movedim(1, -1).numpy(), expected)


def test_clip_is_decoded_from_a_keyframe_near_it_and_not_from_the_start(tmp_path, monkeypatch):
    path = encode(tmp_path / "long.mp4", 200, codec="libx264", g=10)
    decoded = []
    decode_from = OpenVideo._decode_from

    def counting(*arguments):
        for frame in decode_from(*arguments):
            decoded.append(frame)
            yield frame

    monkeypatch.setattr(OpenVideo, "_decode_from", counting)
    read_clips(path, lambda count: [[180, 184]])
    assert len(decoded) <= 20


@pytest.mark.parametrize("rotation", [90, 180, -90])
@pytest.mark.parametrize("side", [None, 10])
def test_frames_are_rotated_as_the_file_says(tmp_path, rotation, side):
    upright, rotated = (
        read_clips(encode(tmp_path / f"{angle}.mp4", rotation=angle), lambda _: [[0, 7, 19]], side)[0]
        for angle in (0, rotation)
    )
    assert torch.equal(rotated, upright.rot90(rotation // 90, dims=(-2, -1)))


def test_training_and_validation_clips_of_a_phone_are_upright(tmp_path):
    for number in range(5):
        for green, name in ((20, "run"), (220, "walk")):
            encode(tmp_path / name / f"{number}.mp4", green=green, rotation=-90)
    data = load("videos", tmp_path)
    for _ in range(2):  # decoded, then from the cache
        for clips, _ in (next(iter(data.train_dataloader())), next(iter(data.val_dataloader()))):
            blue = clips[:, 2].mean(dim=(0, 1))
            assert (blue[-1] - blue[0] > 0.5).all(), "blue grows downwards"
            assert blue.std(dim=1).max() < 0.1


@pytest.mark.parametrize("delays", [40, 0, [20] * 11 + [3000]])
def test_frames_of_a_gif_are_counted_however_long_each_is_shown(tmp_path, delays):
    frames = [Image.new("RGB", (WIDTH, HEIGHT), (20 * number, 100, 50)) for number in range(12)]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=delays, loop=0)
    with open_video(path) as video:
        assert video.count == 12
    for indices in ([0, 1, 2, 3], [8, 9, 10, 11], [0, 4, 7, 11], [5, 5, 5, 5]):
        (clip,) = read_clips(path, lambda _, indices=indices: [indices])
        assert clip.shape == (4, 3, HEIGHT, WIDTH)
        assert clip[:, 0, 0, 0].tolist() == [20 * index for index in indices]


def test_frames_that_a_header_counts_and_that_are_not_there_are_damage(tmp_path):
    path = encode(tmp_path / "a.mkv", 40)
    assert len(read_clips(path, lambda count: [[39, 41]])[0]) == 2, "some writers count a frame too many"
    with refused("a video must have frame 60, got 40 of 40 frames"):
        read_clips(path, lambda count: [[39, 60]])


# Folders of videos


def test_folder_of_classes_is_split_and_read(tmp_path):
    data = load("videos", video_folder(tmp_path, 5))
    train, val = data.datasets()
    assert data.axes == ("time", "height", "width")
    assert data.classes == ("run", "walk")
    assert data.counts == (8, 2)
    assert {path for path, _ in train.samples}.isdisjoint(path for path, _ in val.samples)
    inputs, label = train[0]
    assert inputs.shape == (3, *data.input_size) == (3, 4, 16, 16)
    assert inputs.dtype == torch.float32
    assert type(label) is int
    assert data.description.startswith("10 videos")


def test_clips_are_normalised_with_what_training_videos_measure(tmp_path):
    data = load("videos", video_folder(tmp_path, 3))
    train, _ = data.datasets()
    centres = ClipSet(train.root, train.samples, data.fixed_clips(), 0).changed(normalise=train.normalise)
    inputs = torch.stack([centres[index][0] for index in range(len(centres))])
    torch.testing.assert_close(inputs.mean((0, 2, 3, 4)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3, 4), correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_time_and_space_lie_on_their_axes(tmp_path):
    val = load("videos", video_folder(tmp_path, 2)).datasets()[1]
    red, _, blue = val[0][0]  # [time, height, width]
    assert (red.mean((1, 2)).diff() > 0).all()
    assert (blue.mean((0, 1)).diff() > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("flip", [False, True])
def test_training_clips_are_mirrored_only_if_set(tmp_path, flip):
    data = load("videos", video_folder(tmp_path, 2), augment=AugmentConfig(flip=flip))
    rises = []
    for clips in everything(data, epochs=range(12)):
        blue = clips[0, 2].mean((0, 1))
        rises.append(bool(blue[-1] > blue[0]))
    assert set(rises) == ({True, False} if flip else {True})


@pytest.mark.slow
def test_batch_depends_on_seed_epoch_and_video_alone(tmp_path):
    root = video_folder(tmp_path, 4)
    runs = []
    for workers, seed in ((0, 1), (2, 1), (0, 2)):
        data = load("videos", root, workers=workers)
        data.run_seed = seed
        torch.manual_seed(workers)
        runs.append(torch.cat(everything(data, epochs=(0, 1))))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    first, second = runs[0].chunk(2)
    assert not any(torch.equal(clip, other) for clip in first for other in second), "an epoch repeats another's clips"


# Damage


def test_videos_that_cannot_be_opened_are_named_and_left_out(tmp_path, caplog):
    root = video_folder(tmp_path, 4)
    (root / "run" / "1.mp4").write_bytes(b"RIFF" + bytes(2000))
    (root / "walk" / "empty.avi").touch()
    (root / "walk" / "text.avi").write_bytes(b"this is no video")
    (root / "walk" / "notes.txt").write_text("not looked at")
    with caplog.at_level(logging.WARNING):
        data = load("videos", root)
    assert [path for path, _ in data.skipped] == ["run/1.mp4", "walk/empty.avi", "walk/text.avi"]
    rule = "a video must (be a complete video file|have frames|contain a video stream), got .*"
    assert all(re.fullmatch(rule, why) for _, why in data.skipped)
    others, skipped = caplog.messages
    assert others == f"1 .txt not read because they are not videos of a class ({SUFFIXES}): walk/notes.txt"
    assert skipped.startswith("skipped 3 of 10 videos: run/1.mp4 (a video must be a complete video file, got")
    assert sum(data.counts) == 7


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_video_found_damaged_while_training_is_replaced_by_the_next(tmp_path, workers, caplog):
    root = video_folder(tmp_path, 4)
    data = load("videos", root, workers=workers)
    train, _ = data.datasets()
    blot(root / train.samples[2][0])
    with seeded(1):
        _, label = train[2]
    assert label == train.samples[3][1]
    assert caplog.messages[0].startswith(f"skipped {train.samples[2][0]} (")
    assert data.skipped == []
    first = torch.cat(everything(data))
    assert [path for path, _ in data.skipped] == [train.samples[2][0]]
    assert torch.equal(torch.cat(everything(data)), first), "what is known to be damaged changes what is drawn"


def test_missing_decoder_raises_one_line_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torchrope_lab.data.videos")
    monkeypatch.setitem(sys.modules, "av", None)
    with refused(r"^videos requires av \(pip install av\),"):
        make_data(data_config("videos", root=str(tmp_path)))


# UCF101


@pytest.mark.slow
def test_three_splits_are_the_lists(tmp_path):
    root = ucf101_folder(tmp_path)
    tests = []
    for split in (1, 2, 3):
        data = load("ucf101", root, split=split)
        train, val = ([path for path, _ in part.samples] for part in data.datasets())
        assert data.classes == ("ApplyEyeMakeup", "Biking")
        assert set(train).isdisjoint(val)
        groups = [{path.split("_")[2] for path in part} for part in (train, val)]
        assert groups[0].isdisjoint(groups[1]), "a group of people is in both parts"
        assert Counter(label for _, label in data.datasets()[1].samples) == {0: 2, 1: 2}
        tests += val
    assert len(set(tests)) == len(tests) == 12
    assert load("ucf101", root).fingerprint == load("ucf101", root, split=1).fingerprint


def test_labels_of_ucf101_are_those_of_the_list(tmp_path):
    train, _ = load("ucf101", ucf101_folder(tmp_path)).datasets()
    assert all(label == (not path.startswith("Apply")) for path, label in train.samples)
    green = [train[index][0][1].mean() for index in range(len(train))]
    assert (green[0] < green[-1]) == (train.samples[0][1] < train.samples[-1][1])


def test_videos_of_ucf101_that_are_missing_are_named(tmp_path, caplog):
    root = ucf101_folder(tmp_path)
    (root / "UCF-101" / "Biking" / "v_Biking_g02_c01.avi").unlink()
    data = load("ucf101", root)
    assert [path for path, _ in data.skipped] == ["Biking/v_Biking_g02_c01.avi"]
    with refused(r"--data.max_skipped = 0 videos .* Biking/v_Biking_g02_c01.avi \(.*No such file", TooManyFaults):
        load("ucf101", root, max_skipped=0)


# Several views


class MeanColour(nn.Module):
    """Logits that are the mean of each channel."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.mean((2, 3, 4))


def test_views_are_segments_by_crops(tmp_path):
    data = load("videos", video_folder(tmp_path, 2), test_views=[2, 3])
    views, labels = next(iter(data.test_dataloader()))
    assert views.shape == (2, 6, 3, 4, 16, 16)
    assert labels.tolist() == [0, 1]
    red, blue = views[0, :, 0].mean((1, 2, 3)), views[0, :, 2].mean((1, 2, 3))
    assert red[3] > red[0] + 0.1, "the second segment is not later"
    assert (blue[:3].diff() > 0).all(), "crops do not go from left to right"


def test_logits_are_averaged_over_views():
    views = torch.randn(5, 3, 3, 2, 4, 4)
    batches = [(views[:3], torch.arange(3)), (views[3:], torch.arange(2))]
    labels, logits = predict(MeanColour(), SimpleNamespace(test_dataloader=lambda: batches), views=3)
    torch.testing.assert_close(logits, views.mean((1, 3, 4, 5)))
    assert labels.tolist() == [0, 1, 2, 0, 1]


# Training


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), [("videos", lambda root: video_folder(root, 5)), ("ucf101", ucf101_folder)])
def test_training_takes_two_steps_and_evaluates_over_views(tmp_path, name, make):
    data = load(name, make(tmp_path / "data"), test_views=[2, 3])
    config = RunConfig("axial", data=data.config, model=MODEL, optim=OptimConfig(epochs=1))
    classifier, history = train(config, data, tmp_path / "run", max_steps=2)
    assert np.isfinite(history.rows[0]["train_loss"])
    averaged = evaluate(classifier.model, data)
    labels, logits = predict(classifier.model, data, views=6)
    assert averaged.predicted == logits.argmax(-1).tolist()
    assert averaged.labels == labels.tolist()


@pytest.mark.slow
def test_videos_are_compared_from_the_command_line(tmp_path, capsys):
    from torchrope_lab.cli import main

    video_folder(tmp_path / "data", 3)
    asked = f"compare --data videos --data.root {tmp_path / 'data'} --data.size 16 --data.frames 2 --epochs 1"
    shape = "--model.patch_size [1,8,8] --model.dim 48 --model.depth 1 --model.num_heads 2 --model.mlp_dim 32"
    extent = f"--encodings axial --scales [1.0] --out {tmp_path / 'out'}"
    assert main(f"{asked} {shape} {extent}".split()) == 0, capsys.readouterr().err
    assert "A single encoding cannot be compared" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["videos", "ucf101", "volumes", "rsna"])
def test_recipes_hold_for_every_encoding(name):
    recipe = recipes.settings(name)
    config = RunConfig(
        data=data_config(name, **recipe["data"]),
        model=ModelConfig(**recipe["model"]),
        optim=OptimConfig(**recipe["optim"]),
    )
    side = config.data.size
    extent = {"input_size": (8 if name in ("videos", "ucf101") else 32, side, side), "in_channels": 3, "num_classes": 2}
    for encoding in ENCODINGS:
        with torch.device("meta"):
            build_vit(encoding, config.model, SimpleNamespace(**extent))
