"""UCF101: real videos of 101 human actions, with the three official splits."""

from pathlib import Path
from typing import Any

from torchrope_lab.data.images import Sample, existing_folder, require_each
from torchrope_lab.data.videos import Videos
from torchrope_lab.mistakes import Mistake

VIDEO_FOLDERS = ("UCF-101", "UCF101", "data", ".")
LIST_FOLDERS = ("ucfTrainTestlist", "UCF101TrainTestSplits-RecognitionTask/ucfTrainTestlist", "annotations", ".")
LAYOUT = (
    "root/UCF-101/<class>/*.avi and root/ucfTrainTestlist/*.txt; "
    "UCF101.rar and UCF101TrainTestSplits-RecognitionTask.zip of https://www.crcv.ucf.edu/data/UCF101.php, unpacked"
)
EXPECTED = f"UCF101 ({LAYOUT})"


class UCF101(Videos):
    """13,320 videos of 101 human actions, validated on the test list of the official split."""

    # Source: K. Soomro, A. Zamir, M. Shah, UCF101: A Dataset of 101 Human Actions Classes From Videos in The Wild,
    # arXiv:1212.0402, 2012. Videos come in groups with the same people and backgrounds; the official lists put all
    # videos of a group in the same part. Listed videos that do not exist are skipped and count towards max_skipped.

    name = "ucf101"
    title = "UCF101"

    def find_root(self) -> Path:
        """Return the folder of the videos, and read the classes."""
        root = existing_folder(self.config.root, "UCF101", LAYOUT)
        self.lists = _first_with(root, LIST_FOLDERS, "classInd.txt")
        self.classes = read_classes(self.lists / "classInd.txt")
        return _first_with(root, VIDEO_FOLDERS, self.classes[0])

    def parts(self) -> tuple[list[Sample], list[Sample]]:
        """Read the lists of the split; remove videos that are missing or cannot be opened."""
        split = self.config.split
        files = {"train": f"trainlist{split:02}.txt", "val": f"testlist{split:02}.txt"}
        listed = self.openable({part: read_list(self.lists / file, self.classes) for part, file in files.items()})
        require_each(listed["train"], self.classes, 1, "videos", f" in split {split}'s training list")
        if not listed["val"]:
            raise Mistake(f"split {split}'s test list must name readable videos, found 0 in {self.root}")
        return listed["train"], listed["val"]

    def groups(self, train: Any, val: Any) -> list[str]:
        """Return the video from which every clip was cut, as in v_Archery_g01."""
        return [name.rpartition("_c")[0] for part in (train, val) for name, _ in part.samples]

    def describe(self, count: int) -> None:
        """Set `description` from the number of videos."""
        frames, side, _ = self.input_size
        self.description = (
            f"{count:,} real videos from the web (UCF101, split {self.config.split}), cut to {frames} frames "
            f"of {side}×{side} colour pixels; the class is one of {len(self.classes)} human actions."
        )


def read_classes(path: Path) -> tuple[str, ...]:
    """Read classInd.txt, "1 ApplyEyeMakeup" and so on, into the names in the order of their numbers."""
    names = dict(line.split(maxsplit=1) for line in _lines(path))
    if len(names) < 2 or {*names} != {str(number + 1) for number in range(len(names))}:
        raise Mistake(f"{path} must number two or more classes from 1 up, got {', '.join(names) or 'none'}")
    return tuple(names[str(number + 1)] for number in range(len(names)))


def read_list(path: Path, classes: tuple[str, ...]) -> list[Sample]:
    """Read a list of videos, "<class>/<file>" with or without the number of the class after it."""
    samples = []
    for line in _lines(path):
        video, *number = line.split()
        name = video.partition("/")[0]
        if name not in classes or number not in ([], [str(classes.index(name) + 1)]):
            raise Mistake(f"{path} must name videos as <class>/<file>, with the number of classInd.txt, got {line!r}")
        samples.append((video, classes.index(name)))
    return sorted(samples)


def _first_with(root: Path, folders: tuple[str, ...], name: str) -> Path:
    for folder in folders:
        if (root / folder / name).exists():
            return root / folder
    raise Mistake(f"--data.root must hold {EXPECTED}, got {str(root)!r} without {name}")


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
