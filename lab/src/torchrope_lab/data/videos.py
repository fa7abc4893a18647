"""Videos from a folder with one sub-folder per class."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import av
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data.clips import crop_corners, test_frames, training_frames
from torchrope_lab.data.config import CropAugment, VideosConfig
from torchrope_lab.data.crops import centre, random_crop
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.faults import check_regular, find_faults, warn_skipped
from torchrope_lab.data.folders import warn_unread
from torchrope_lab.data.images import (
    Sample,
    compose_on_white,
    existing_folder,
    find_classes,
    hold_out,
    list_samples,
    select_examples,
)
from torchrope_lab.data.streamed import StreamedSet
from torchrope_lab.data.tensors import normalisation

CROP_SCALE = (0.08, 1.0)
VIDEO_EXTENSIONS = (".avi", ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".gif")
SEEK_MARGINS = (4, 64)  # frames; where B-frames are reordered, an AVI seeks a little too far
MISSING_FRAMES = 0.05  # of those that the header counts; some writers count too many

ChooseFrames = Callable[[int], list[list[int]]]  # from the number of frames to the indices of every clip


@dataclass(frozen=True)
class ClipShape:
    """Clips and crops of a video.

    Attributes:
        frames: Frames of a clip.
        stride: Frames of the video for each of the clip.
        size: Pixels per side.
    """

    frames: int
    stride: int
    size: int


class TrainingClips(StreamedSet):
    """One clip per video: random start, and one random resized crop for all frames.

    Both are drawn from torch's global generator.

    Args:
        root: Folder that the paths are relative to.
        samples: (path below root, label) of every video.
        shape: Frames, stride and size.
        augment: Settings of the random crop.
        max_skipped: Maximum number of unreadable videos.
    """

    def __init__(
        self, root: Path, samples: Sequence[Sample], shape: ClipShape, augment: CropAugment, max_skipped: int
    ) -> None:
        super().__init__(samples, max_skipped, "videos")
        self.root = root
        self.shape = shape
        self.crop = random_crop(augment, shape.size, CROP_SCALE).transform

    def load(self, index: int) -> Tensor:
        """Decode a random clip, uint8 `(3, frames, size, size)`."""
        shape = self.shape
        (clip,) = read_clips(
            self.root / self.samples[index][0],
            lambda count: [training_frames(count, shape.frames, shape.stride)],
        )
        return self.crop(clip).movedim(0, 1)


class TestClips(StreamedSet):
    """Deterministic clips of every video: temporal segments × crops, shorter side resized to size / crop_ratio.

    Args:
        root: Folder that the paths are relative to.
        samples: (path below root, label) of every video.
        shape: Frames, stride and size.
        views: (segments, crops); (1, 1) is the central clip and crop.
        max_skipped: Maximum number of unreadable videos.
        crop_ratio: Side of the crop as a fraction of the shorter side.
    """

    __test__ = False  # keeps pytest from collecting it

    def __init__(
        self,
        root: Path,
        samples: Sequence[Sample],
        shape: ClipShape,
        views: tuple[int, int],
        max_skipped: int,
        crop_ratio: float = 1.0,
    ) -> None:
        super().__init__(samples, max_skipped, "videos")
        self.root = root
        self.shape = shape
        self.views = views
        self.crop_ratio = crop_ratio
        self._enlarged = torch.zeros(len(samples), dtype=torch.bool).share_memory_()  # shared by all worker processes

    @property
    def enlarged(self) -> int:
        """Number of videos read so far whose shorter side was upsampled."""
        return int(self._enlarged.sum())

    def with_examples(self, sets: Sequence[StreamedSet], indices: Tensor) -> "TestClips":
        """Return videos of several sets, numbered consecutively, with the clips of this one."""
        same = super().with_examples(sets, indices)
        same._enlarged = torch.zeros(len(indices), dtype=torch.bool).share_memory_()
        return same

    def load(self, index: int) -> Tensor:
        """Decode one clip, uint8 `(3, frames, size, size)`, or several `(segments · crops, 3, frames, size, size)`."""
        shape, (segments, crops) = self.shape, self.views
        resized = centre(shape.size, self.crop_ratio).resized
        choose_frames = partial(_test_frames, shape=shape, segments=segments)
        clips = []
        for clip in read_clips(self.root / self.samples[index][0], choose_frames):
            self._enlarged[index] = min(clip.shape[-2:]) < resized
            small = image_ops.resize(clip, [resized], antialias=True)  # the shorter side
            corners = crop_corners(small.shape[-2], small.shape[-1], shape.size, crops)
            clips += [image_ops.crop(small, *corner, shape.size, shape.size).movedim(0, 1) for corner in corners]
        return clips[0] if segments * crops == 1 else torch.stack(clips)


class VideoModule(DataModule):
    """Base class of video data: files are decoded with PyAV during training, by seeking to each clip.

    Subclasses implement `parts` and `describe`. Every file is opened once in `setup`; files that cannot be opened, or
    are found damaged during training, are skipped, up to `max_skipped`.
    """

    axes = ("time", "height", "width")
    in_channels = 3
    other_sizes = "read"

    config: VideosConfig

    def __init__(self, config: VideosConfig) -> None:
        super().__init__(config)
        self.shape = ClipShape(config.frames, config.frame_stride, config.size)
        self.input_size = (self.shape.frames, self.shape.size, self.shape.size)
        segments, crops = config.test_views
        self.test_views = (segments, crops)
        self.views = segments * crops

    @abstractmethod
    def parts(self) -> tuple[Path, list[Sample], list[Sample]]:
        """Find the folder that paths are relative to, and (path, label) of the training and the validation videos."""

    def datasets(self) -> tuple[TrainingClips, TestClips]:
        """Open every file once, choose `train_size` and `val_size` of them, measure mean and std."""
        config = self.config
        root, train, val = self.parts()
        train = select_examples(train, config.train_size, config.split_seed, "train_size")
        val = select_examples(val, config.val_size, config.split_seed, "val_size")
        self.describe(len(train) + len(val))
        limit = config.max_skipped
        normalise = normalisation(config.normalise, self._clips(root, train, self.shape).statistics)
        mean, std = (value.view(3, 1, 1, 1) for value in (normalise.mean, normalise.std))
        return (
            TrainingClips(root, train, self.shape, config.augment, limit).normalised(mean, std),
            self._clips(root, val, self.shape).normalised(mean, std),
        )

    def at_size(self, size: int) -> "VideoModule":
        """Return the centre clips of the validation videos, read again, resized and cropped to another size."""
        _, val = self._made_datasets()
        assert isinstance(val, TestClips)
        other = self._clips(val.root, val.samples, replace(self.shape, size=size))
        return self._with_validation(size, _normalised_as(val, other))

    def _clips(
        self, root: Path, samples: Sequence[Sample], shape: ClipShape, views: tuple[int, int] = (1, 1)
    ) -> TestClips:
        return TestClips(root, samples, shape, views, self.config.max_skipped, self.config.crop_ratio)

    @abstractmethod
    def describe(self, count: int) -> None:
        """Set `description` once the number of videos is known."""

    def test_dataloader(self) -> DataLoader:
        """Return the loader of `test_views` of the validation videos: (batch, views, channels, time, height, width)."""
        _, val = self._made_datasets()
        assert isinstance(val, TestClips)
        several = self._clips(val.root, val.samples, val.shape, self.test_views)
        return self._loader(_normalised_as(val, several), self.config.batch_size)

    def openable(self, root: Path, samples: list[Sample]) -> list[Sample]:
        """Remove videos that cannot be opened; they are listed in `skipped`."""
        faults = find_faults([path for path, _ in samples], lambda path: count_frames(root / path))
        self.skipped = faults
        if len(faults) == len(samples):
            named = f": {faults[0][0]} ({faults[0][1]}), ..." if faults else ""
            rule = f"--data.root must hold readable videos ({' '.join(VIDEO_EXTENSIONS)})"
            raise ValueError(f"{rule}, got none in {str(root)!r}{named}")
        warn_skipped(faults, len(samples), self.config.max_skipped, "videos")
        left_out = {path for path, _ in faults}
        return [sample for sample in samples if sample[0] not in left_out]


class Videos(VideoModule):
    """Videos from `root`, either root/train/<class>/* with root/val/<class>/*, or root/<class>/*.

    Without train and val, a fifth of each class is held out by a hash of path and `split_seed`. Training clips start at
    a random frame and are random crops of 8 to 100 % of the area; they are flipped only if `augment.flip` is set,
    because direction may define classes. Validation uses the central clip and crop.

    Raises:
        ValueError: root is missing, is not a readable folder, or has another layout.
    """

    name = "videos"

    config: VideosConfig

    def __init__(self, config: VideosConfig) -> None:
        super().__init__(config)
        self.root = existing_folder(config.root, "videos")
        self.folders, self.classes = find_classes(self.root)
        self.title = f"Videos in {self.root.name}"
        self.describe(0)

    def parts(self) -> tuple[Path, list[Sample], list[Sample]]:
        """List the videos of every class; split them if the folder has no split."""
        listed = {
            part: list_samples(self.root, folder, self.classes, VIDEO_EXTENSIONS)
            for part, folder in self.folders.items()
        }
        samples = [sample for samples in listed.values() for sample in samples]
        warn_unread(self.root, [path for path, _ in samples], f"videos of a class ({' '.join(VIDEO_EXTENSIONS)})")
        whole = set(self.openable(self.root, samples))
        kept = {part: [sample for sample in samples if sample in whole] for part, samples in listed.items()}
        if len(kept) == 2:
            require_each(kept["train"], self.classes, 1, "readable videos", " in train")
            require_each(kept["val"], self.classes, 1, "readable videos", " in val")
            return self.root, kept["train"], kept["val"]
        require_each(kept[""], self.classes, 2, "readable videos", ", one to train on and one to hold out")
        return self.root, *hold_out(kept[""], self.config.split_seed)

    def describe(self, count: int) -> None:
        """Set `description` from the number of videos."""
        frames, side, _ = self.input_size
        number = f"{count:,} videos" if count else "Videos"
        self.description = (
            f"{number} from the folder {self.root.name}, cut to {frames} frames of {side}×{side} colour "
            "pixels; the class is the sub-folder."
        )


def require_each(samples: Sequence[Sample], classes: Sequence[str], fewest: int, what: str, purpose: str) -> None:
    """Raise ValueError if a class has fewer than `fewest` samples."""
    labels = [label for _, label in samples]
    for label, name in enumerate(classes):
        if labels.count(label) < fewest:
            raise ValueError(
                f"{what} of each class must number at least {fewest}{purpose}, got {labels.count(label)} for {name!r}"
            )


def count_frames(path: Path) -> int:
    """Return the number of frames of a video: from its header, or by counting packets if the header lacks it.

    Raises:
        ValueError: it is not a video, is damaged, or has no frames.
        OSError: it cannot be opened.
    """
    with _opened(path) as (container, stream):
        return _frame_count(container, stream)


def read_clips(path: Path, choose_frames: ChooseFrames) -> list[Tensor]:
    """Decode clips of a video, from the keyframe before each clip to its last frame.

    Args:
        path: The video.
        choose_frames: Maps the number of frames to the indices of each clip's frames, never decreasing.

    Returns:
        uint8 `(frames, 3, height, width)` for every clip.

    Raises:
        ValueError: the file is not a video, or frames are missing or damaged.
        OSError: it cannot be opened.
    """
    with _opened(path) as (container, stream):
        count = _frame_count(container, stream)
        wanted = choose_frames(count)
        first = _first_time(container, stream)
        return [_read_frames(container, stream, indices, count, first) for indices in wanted]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    check_regular(path)
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError("a video file must contain a video stream, got none")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # worker processes run in parallel already
            yield container, stream
    except av.error.InvalidDataError as error:
        raise ValueError("a video must be a complete video file, got another or damaged one") from error


def _frame_count(container: Any, stream: Any) -> int:
    count = stream.frames
    if not count:
        count = sum(packet.size > 0 for packet in container.demux(stream))
        container.seek(0)
    if not count:
        raise ValueError("a video must have frames, got none")
    return count


def _first_time(container: Any, stream: Any) -> int:
    """Return the time of the first frame; it may differ from the stream's start if frames are reordered."""
    for frame in container.decode(stream):
        return frame.pts or 0
    raise ValueError("a video must have a frame that can be decoded, got none")


def _read_frames(container: Any, stream: Any, indices: list[int], count: int, first: int) -> Tensor:
    """Return the frames at `indices`; if the container's times have gaps, the next existing frame."""
    pictures: list[Tensor] = []
    at, picture = -1, None
    for at, frame in _decode_before(container, stream, indices[0], first):
        if frame.is_corrupt:
            raise ValueError(f"frames must be complete, got frame {at} of {count} damaged")
        picture = frame
        while at >= indices[len(pictures)]:
            pictures.append(_pixels(frame))
            if len(pictures) == len(indices):
                return torch.stack(pictures).movedim(-1, 1)
    if picture is None or indices[-1] - at > max(1, MISSING_FRAMES * count):
        raise ValueError(f"a video must have frame {indices[-1]}, got {at + 1} of {count} frames")
    last = _pixels(picture)
    return torch.stack(pictures + [last] * (len(indices) - len(pictures))).movedim(-1, 1)


def _pixels(frame: Any) -> Tensor:
    """Return the RGB bytes of a frame, transparent pixels composed on white: `(height, width, 3)`."""
    if not any(component.is_alpha for component in frame.format.components):
        return torch.from_numpy(frame.to_ndarray(format="rgb24"))
    image = Image.fromarray(frame.to_ndarray(format="rgba"))
    return image_ops.pil_to_tensor(compose_on_white(image)[0]).movedim(0, -1)


def _decode_before(container: Any, stream: Any, index: int, first: int) -> Iterator[tuple[int, Any]]:
    """Decode from a keyframe at or before `index`."""
    if container.format.name == "gif":  # few frames of different durations: they are counted
        container.seek(0)
        return enumerate(container.decode(stream))
    for margin in SEEK_MARGINS:
        decoded = _decode_from(container, stream, max(0, index - margin), first)
        head = next(decoded, None)
        if head is not None and head[0] <= index:
            return chain([head], decoded)
    return _decode_from(container, stream, 0, first)


def _decode_from(container: Any, stream: Any, index: int, first: int) -> Iterator[tuple[int, Any]]:
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    per_frame = 1 / (rate * stream.time_base)
    container.seek((stream.start_time or 0) + int(index * per_frame), stream=stream)
    for number, frame in enumerate(container.decode(stream)):
        timeless = number if index == 0 else sys.maxsize  # frames without times can be counted only from the start
        yield (timeless if frame.pts is None else round((frame.pts - first) / per_frame)), frame


def _normalised_as(clips: TestClips, others: TestClips) -> TestClips:
    assert isinstance(clips.mean, Tensor)
    assert isinstance(clips.std, Tensor)
    return others.normalised(clips.mean, clips.std)


def _test_frames(count: int, shape: ClipShape, segments: int) -> list[list[int]]:
    return test_frames(count, shape.frames, shape.stride, segments)
