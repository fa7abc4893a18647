"""UCF101: real videos of 101 human actions, with the three official splits."""

from pathlib import Path
from typing import Any

from torchrope_lab.data.config import UCF101Config
from torchrope_lab.data.images import Sample, existing_folder, require_each
from torchrope_lab.data.videos import VideoModule

VIDEO_FOLDERS = ("UCF-101", "UCF101", "data", ".")
LIST_FOLDERS = ("ucfTrainTestlist", "UCF101TrainTestSplits-RecognitionTask/ucfTrainTestlist", "annotations", ".")
LAYOUT = (
    "root/UCF-101/<class>/*.avi and root/ucfTrainTestlist/*.txt; "
    "UCF101.rar and UCF101TrainTestSplits-RecognitionTask.zip of https://www.crcv.ucf.edu/data/UCF101.php, unpacked"
)
EXPECTED = f"UCF101 ({LAYOUT})"


class UCF101(VideoModule):
    """13,320 videos of 101 human actions, validated on the test list of the official split.

    Videos come in groups with the same people and backgrounds; the official lists put all videos of a group in the same
    part. Listed videos that do not exist are skipped and count towards max_skipped like damaged ones.

    Source: K. Soomro, A. Zamir, M. Shah, UCF101: A Dataset of 101 Human Actions Classes From Videos in The Wild,
    arXiv:1212.0402, 2012.

    Raises:
        ValueError: root, its videos or its lists are missing or have another format.
    """

    name = "ucf101"
    title = "UCF101"

    config: UCF101Config

    def __init__(self, config: UCF101Config) -> None:
        super().__init__(config)
        root = existing_folder(config.root, "UCF101", LAYOUT)
        self.split = config.split
        self.lists = _first_with(root, LIST_FOLDERS, "classInd.txt")
        self.classes = read_classes(self.lists / "classInd.txt")
        self.videos = _first_with(root, VIDEO_FOLDERS, self.classes[0])
        self.describe(0)

    def parts(self) -> tuple[Path, list[Sample], list[Sample]]:
        """Read the lists of the split; remove videos that are missing or cannot be opened."""
        train = read_list(self.lists / f"trainlist{self.split:02}.txt", self.classes)
        val = read_list(self.lists / f"testlist{self.split:02}.txt", self.classes)
        whole = set(self.openable(self.videos, train + val))
        train, val = ([sample for sample in part if sample in whole] for part in (train, val))
        require_each(train, self.classes, 1, "videos", f" in split {self.split}'s training list")
        if not val:
            raise ValueError(f"split {self.split}'s test list must name readable videos, got none in {self.videos}")
        return self.videos, train, val

    def groups(self, train: Any, val: Any) -> list[str]:
        """Return the video from which every clip was cut, as in v_Archery_g01."""
        return [name.rpartition("_c")[0] for part in (train, val) for name, _ in part.samples]

    def describe(self, count: int) -> None:
        """Set `description` from the number of videos."""
        frames, side, _ = self.input_size
        self.description = (
            f"{count or 13_320:,} real videos from the web (UCF101, split {self.split}), cut to {frames} frames of "
            f"{side}×{side} colour pixels; the class is one of {len(self.classes)} human actions."
        )


def read_classes(path: Path) -> tuple[str, ...]:
    """Read classInd.txt, "1 ApplyEyeMakeup" and so on, into the names in the order of their numbers."""
    numbered = dict(_two_words(line, path) for line in _lines(path))
    names = [numbered.get(str(number + 1)) for number in range(len(numbered))]
    if len(names) < 2 or None in names:
        raise ValueError(f"{path} must number two or more classes from 1 up, got {', '.join(numbered) or 'none'}")
    return tuple(name for name in names if name is not None)


def read_list(path: Path, classes: tuple[str, ...]) -> list[Sample]:
    """Read a list of videos, "<class>/<file>" with or without the number of the class after it.

    Raises:
        ValueError: the list cannot be read, is empty, or contains an unknown class, or a class with another number.
    """
    known = {name: label for label, name in enumerate(classes)}
    lines = [line.split() for line in _lines(path)]
    for video, *number in lines:
        if video.partition("/")[0] not in known:
            raise ValueError(f"{path} must name videos as <class>/<file> with a class of classInd.txt, got {video!r}")
        if number and number != [str(known[video.partition("/")[0]] + 1)]:
            raise ValueError(f"{path} must number classes as classInd.txt does, got {' '.join([video, *number])!r}")
    videos = [line[0] for line in lines]
    if not videos:
        raise ValueError(f"{path} must name videos, got none")
    return sorted((video, known[video.partition("/")[0]]) for video in videos)


def _first_with(root: Path, folders: tuple[str, ...], name: str) -> Path:
    for folder in folders:
        if (root / folder / name).exists():
            return root / folder
    raise ValueError(f"--data.root must hold {EXPECTED}, got {str(root)!r} without {name}")


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ValueError(f"{path} must be a readable list of {EXPECTED}, got: {reason}") from error


def _two_words(line: str, path: Path) -> tuple[str, str]:
    words = line.split()
    if len(words) != 2:
        raise ValueError(f"{path} must hold a number and a class in each line, got {line!r}")
    return words[0], words[1]
