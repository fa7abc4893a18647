"""Videos from a folder with one sub-folder per class."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import av
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data.cache import ExampleCache, index_of, read_files
from torchrope_lab.data.clips import crop_corners, test_frames, training_frames
from torchrope_lab.data.crops import CropTransform, centre, random_crop
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.faults import warn_skipped
from torchrope_lab.data.folders import warn_unread
from torchrope_lab.data.images import (
    Sample,
    compose_on_white,
    existing_folder,
    find_classes,
    list_samples,
    select_examples,
    split_parts,
)
from torchrope_lab.data.streamed import StreamedSet
from torchrope_lab.data.tensors import Normalise, normalisation
from torchrope_lab.mistakes import Mistake

CROP_SCALE = (0.08, 1.0)
VIDEO_EXTENSIONS = (".avi", ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".gif")
SEEK_MARGINS = (4, 64)  # frames; where B-frames are reordered, an AVI seeks a little too far
MISSING_FRAMES = 0.05  # of those that the header counts; some writers count too many
LARGEST_CACHED = 2**28  # bytes of all frames of a video; of a longer one the frames of each clip are decoded

ReadClips = Callable[[Path], Tensor]


@dataclass(frozen=True)
class RandomClip:
    """Reader of one random clip of a video with one random crop for all frames, from torch's global generator."""

    # All frames of a video are decoded at once and cached, unless they are too many or one is damaged. Frames are
    # decoded with a shorter side of twice the crop's size if they are larger.

    frames: int
    stride: int  # frames of the video for each of the clip
    crop: CropTransform
    cache: ExampleCache

    def __call__(self, path: Path) -> Tensor:
        """Return a clip, uint8 `(3, frames, size, size)`."""
        side = 2 * self.crop.decoded
        whole = self.cache.get([path], ("upright frames", av.__version__, side), partial(self._decode, path, side))
        if whole is None:
            (clip,) = read_clips(path, lambda count: [self._choose(count)], side)
        else:
            clip = whole[self._choose(len(whole))].movedim(-1, 1)  # in memory as decoded: resizing rounds by layout
        return self.crop.transform(clip).movedim(0, 1)

    def _choose(self, count: int) -> list[int]:
        return training_frames(count, self.frames, self.stride)

    def _decode(self, path: Path, side: int) -> Tensor | None:
        """Decode all frames `(frames, height, width, 3)` if they can be cached."""
        with suppress(ValueError, av.error.FFmpegError), open_video(path) as video:
            nbytes = 3 * video.count * math.prod(reduced(video.height, video.width, side))
            if nbytes <= LARGEST_CACHED and self.cache.has_room(nbytes):
                return video.read(range(video.count), side).movedim(1, -1)
        return None


@dataclass(frozen=True)
class FixedClips:
    """Reader of evenly spaced clips and crops of a video: temporal segments × crops."""

    frames: int
    stride: int  # frames of the video for each of the clip
    size: int  # pixels per side of a crop
    resized: int  # pixels to which the shorter side is resized before cropping
    views: tuple[int, int]  # (segments, crops); (1, 1) is the central clip and crop
    cache: ExampleCache

    def __call__(self, path: Path) -> Tensor:
        """Return one clip, uint8 `(3, frames, size, size)`, or several, `(segments · crops, 3, frames, size, size)`."""
        settings = ("upright clips", av.__version__, self.frames, self.stride, self.size, self.resized, self.views)
        return self.cache.get([path], settings, partial(self._decode, path))

    def _decode(self, path: Path) -> Tensor:
        segments, crops = self.views
        clips = []
        for clip in read_clips(path, lambda count: test_frames(count, self.frames, self.stride, segments)):
            small = image_ops.resize(clip, [self.resized], antialias=True)  # the shorter side
            corners = crop_corners(small.shape[-2], small.shape[-1], self.size, crops)
            clips += [image_ops.crop(small, *corner, self.size, self.size).movedim(0, 1) for corner in corners]
        return clips[0].contiguous() if segments * crops == 1 else torch.stack(clips)  # as from the cache: sums round


class ClipSet(StreamedSet):
    """Clips of videos, decoded on access; `samples` are (path below root, label), `read` reads the clips of a path."""

    def __init__(self, root: Path, samples: Sequence[Sample], read: ReadClips, max_skipped: int) -> None:
        super().__init__(samples, max_skipped, "videos")
        self.root = root
        self.read = read

    def load(self, index: int) -> Tensor:
        """Decode the clips of a video."""
        return self.read(self.root / self.samples[index][0])

    def files(self, index: int) -> list[Path]:
        """Return the path of a video."""
        return [self.root / self.samples[index][0]]


class Videos(DataModule):
    """Videos from `root`, either root/train/<class>/* with root/val/<class>/*, or root/<class>/*."""

    # Without train and val, a fifth of each class is held out by a hash of path and `split_seed`. Training clips start
    # at a random frame and are random crops of 8 to 100 % of the area; they are flipped only if `augment.flip` is set,
    # because direction may define classes. Every file is opened once in `setup`; files that cannot be opened, or are
    # found damaged during training, are skipped, up to `max_skipped`.

    name = "videos"
    axes = ("time", "height", "width")
    in_channels = 3
    other_sizes = "read"

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.input_size = (config.frames, config.size, config.size)
        self.views = math.prod(config.test_views)
        self.cache = ExampleCache(config.cache_gib)
        self.shorter_sides: dict[str, int] = {}
        self.root = self.find_root()

    def find_root(self) -> Path:
        """Return the folder that paths are relative to, and set classes and title."""
        root = existing_folder(self.config.root, "videos")
        self.folders, self.classes = find_classes(root)
        self.title = f"Videos in {root.name}"
        return root

    def parts(self) -> tuple[list[Sample], list[Sample]]:
        """List (path, label) of the videos of every class; split them if the folder has no split."""
        listed = {
            part: list_samples(self.root, folder, self.classes, VIDEO_EXTENSIONS)
            for part, folder in self.folders.items()
        }
        paths = [path for samples in listed.values() for path, _ in samples]
        self.unread = warn_unread(self.root, paths, f"videos of a class ({' '.join(VIDEO_EXTENSIONS)})")
        return split_parts(self.openable(listed), self.classes, self.config.split_seed, "videos")

    def describe(self, count: int) -> None:
        """Set `description` from the number of videos."""
        frames, side, _ = self.input_size
        self.description = (
            f"{count:,} videos from the folder {self.root.name}, cut to {frames} frames of {side}×{side} colour "
            "pixels; the class is the sub-folder."
        )

    def datasets(self) -> tuple[ClipSet, ClipSet]:
        """Open every file once, choose `train_size` and `val_size` of them, measure mean and std."""
        config = self.config
        train, val = self.parts()
        train = select_examples(train, config.train_size, config.split_seed, "train_size")
        val = select_examples(val, config.val_size, config.split_seed, "val_size")
        self.describe(len(train) + len(val))
        centred, val_set = (ClipSet(self.root, part, self.fixed_clips(), config.max_skipped) for part in (train, val))
        normalise = normalisation(config.normalise, centred.statistics)
        normalise = Normalise(*(value.view(3, 1, 1, 1) for value in vars(normalise).values()))
        crop = random_crop(config.augment, config.size, CROP_SCALE)
        clips = RandomClip(config.frames, config.frame_stride, crop, self.cache)
        return centred.changed(read=clips, normalise=normalise), val_set.changed(normalise=normalise)

    def fixed_clips(self, views: tuple[int, int] = (1, 1)) -> FixedClips:
        """Return the reader of the clips of validation."""
        config = self.config
        return FixedClips(config.frames, config.frame_stride, config.size, self._resized, views, self.cache)

    @property
    def enlarged(self) -> int:
        """Number of validation videos whose shorter side is upsampled."""
        _, val = self._made_datasets()
        return sum(self.shorter_sides[path] < self._resized for path, _ in val.samples)  # type: ignore[attr-defined]

    @property
    def _resized(self) -> int:
        return centre(self.config.size, self.config.crop_ratio).resized

    def at_size(self, size: int) -> "Videos":
        """Return the centre clips of the validation videos, read again, resized and cropped to another size."""
        _, val = self._made_datasets()
        other = self._with_validation(size, val)
        assert isinstance(val, ClipSet)
        other._datasets = (self._made_datasets()[0], val.changed(read=other.fixed_clips()))
        return other

    def test_dataloader(self) -> DataLoader:
        """Return the loader of `test_views` of the validation videos: (batch, views, channels, time, height, width)."""
        _, val = self._made_datasets()
        assert isinstance(val, ClipSet)
        batches = BatchSampler(range(len(val)), self.config.batch_size, drop_last=False)
        return self._loader(val.changed(read=self.fixed_clips(self.config.test_views)), batches)

    def openable(self, parts: Mapping[str, list[Sample]]) -> dict[str, list[Sample]]:
        """Remove videos that cannot be opened; they are listed in `skipped`."""

        def read(path: Path) -> int:
            with open_video(path) as video:
                return min(video.height, video.width)

        paths = [path for samples in parts.values() for path, _ in samples]
        index, version = index_of(self.root, "videos"), f"1 {av.__version__}"
        self.shorter_sides, self.skipped = read_files(
            self.root, paths, read, index, version=version, doing="Opening videos"
        )
        warn_skipped(self.skipped, len(paths), self.config.max_skipped, "videos")
        return {part: [s for s in samples if s[0] in self.shorter_sides] for part, samples in parts.items()}


def read_clips(path: Path, choose_frames: Callable[[int], list[list[int]]], side: int | None = None) -> list[Tensor]:
    """Decode clips, uint8 `(frames, 3, height, width)`, from the keyframe before each to its last frame."""
    # `choose_frames` maps the number of frames to the indices of each clip's frames, never decreasing. Frames of at
    # least twice `side` are reduced to that shorter side, and rotated as the file says.
    with open_video(path) as video:
        return [video.read(indices, side) for indices in choose_frames(video.count)]


def reduced(height: int, width: int, side: int | None) -> tuple[int, int]:
    """Return the size to which a frame is reduced: a shorter side of at least twice `side` becomes `side`."""
    shorter = min(height, width)
    if side is None or shorter < 2 * side:  # converting colours without scaling is several times faster
        return height, width
    return round(height * side / shorter), round(width * side / shorter)


class OpenVideo:
    """The video stream of an open file."""

    # `count` is that of the header, or of packets if the header lacks it; `height` and `width` are those of a frame as
    # it is stored, before the rotation that the file asks for.

    def __init__(self, container: Any) -> None:
        if not container.streams.video:
            raise Mistake("a video file must contain a video stream, got 0")
        self.container = container
        self.stream = container.streams.video[0]
        self.stream.codec_context.thread_count = 1  # worker processes run in parallel already
        self.height, self.width = self.stream.codec_context.height, self.stream.codec_context.width
        self.count = self.stream.frames or self._count_packets()
        if not self.count:
            raise Mistake("a video must have 1 frame or more, got 0")

    def _count_packets(self) -> int:
        count = sum(packet.size > 0 for packet in self.container.demux(self.stream))
        self.container.seek(0)
        return count

    @cached_property
    def _first(self) -> int:
        """Time of the first frame; it may differ from the stream's start if frames are reordered."""
        self.container.seek(0)
        for frame in self.container.decode(self.stream):
            return frame.pts or 0
        raise Mistake("a video must have 1 frame or more that can be decoded, got 0")

    def read(self, indices: Sequence[int], side: int | None = None) -> Tensor:
        """Decode the frames at `indices`, in gaps the next existing one: uint8 `(frames, 3, height, width)`."""
        pictures: list[Tensor] = []
        at, frame = -1, None
        for at, frame in self._decode_before(indices[0]):
            if frame.is_corrupt:
                raise Mistake(f"frames must be complete, got frame {at} of {self.count} damaged")
            while len(pictures) < len(indices) and at >= indices[len(pictures)]:
                pictures.append(_pixels(frame, side))
            if len(pictures) == len(indices):
                return torch.stack(pictures).movedim(-1, 1)
        if frame is None or indices[-1] - at > max(1, MISSING_FRAMES * self.count):
            raise Mistake(f"a video must have frame {indices[-1]}, got {at + 1} of {self.count} frames")
        pictures += [_pixels(frame, side)] * (len(indices) - len(pictures))
        return torch.stack(pictures).movedim(-1, 1)

    def _decode_before(self, index: int) -> Iterator[tuple[int, Any]]:
        """Decode from a keyframe at or before `index`."""
        if self.container.format.name == "gif":  # few frames of different durations: they are counted
            self.container.seek(0)
            return enumerate(self.container.decode(self.stream))
        for margin in SEEK_MARGINS:
            decoded = self._decode_from(max(0, index - margin))
            head = next(decoded, None)
            if head is not None and head[0] <= index:
                return chain([head], decoded)
        return self._decode_from(0)

    def _decode_from(self, index: int) -> Iterator[tuple[int, Any]]:
        stream = self.stream
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        first, per_frame = self._first, 1 / (rate * stream.time_base)
        self.container.seek((stream.start_time or 0) + int(index * per_frame), stream=stream)
        for number, frame in enumerate(self.container.decode(stream)):
            timeless = number if index == 0 else sys.maxsize  # frames without times can be counted only from the start
            yield (timeless if frame.pts is None else round((frame.pts - first) / per_frame)), frame


@contextmanager
def open_video(path: Path) -> Iterator[OpenVideo]:
    """Open a video file."""
    try:
        with av.open(str(path)) as container:
            yield OpenVideo(container)
    except av.error.InvalidDataError as error:
        raise Mistake("a video must be a complete video file, got a damaged file or another format") from error


def _pixels(frame: Any, side: int | None) -> Tensor:
    """Return the RGB bytes `(height, width, 3)`, upright, reduced to a shorter side, transparent pixels on white."""
    size = dict(zip(("height", "width"), reduced(frame.height, frame.width, side), strict=True))
    if not any(component.is_alpha for component in frame.format.components):
        pixels = torch.from_numpy(frame.to_ndarray(format="rgb24", **size))
    else:
        image = Image.fromarray(frame.to_ndarray(format="rgba", **size))
        pixels = image_ops.pil_to_tensor(compose_on_white(image)[0]).movedim(0, -1)
    turns = round(frame.rotation / 90) % 4  # counterclockwise
    return pixels.rot90(turns).contiguous() if turns else pixels
