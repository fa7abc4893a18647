"""Fashion-MNIST: the published files, from a folder, from Debian's package, or downloaded."""

import gzip
import hashlib
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torchvision import datasets

from torchrope_lab.data.cache import cache_folder
from torchrope_lab.data.config import FashionConfig
from torchrope_lab.data.in_memory import InMemory, download

IMAGE_SIZE = 28
LARGEST = 60_000 * IMAGE_SIZE**2 + 16
"""Bytes of the largest file, uncompressed."""
# MD5 sums of the uncompressed files, since Debian's package compresses them again.
FILES = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
BELOW_ROOT = Path("FashionMNIST/raw")  # torchvision's layout
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


class FashionMNIST(InMemory):
    """70,000 grey images of clothes: 60,000 for training, the 10,000 of the published test set for validation.

    Read from `root` if given, else from Debian's package dataset-fashion-mnist, else downloaded once into torch's cache
    folder.

    Source: H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017.
    """

    name = "fashion-mnist"
    title = "Fashion-MNIST"
    description = "70,000 photographs of clothes in 28×28 grey pixels; the class is the kind of garment."
    classes = tuple(datasets.FashionMNIST.classes)

    config: FashionConfig

    def examples(self, size: int, *parts: str) -> list[tuple[Tensor, Tensor]]:
        """Read the two files of each part, and select and resample its images."""
        files = find_files(self.config.root)
        values = {part: map(read_values, files[:2] if part == "train" else files[2:]) for part in parts}
        return [
            self.select(pixels.view(-1, 1, IMAGE_SIZE, IMAGE_SIZE).float() / 255, labels.long(), part, size)
            for part, (pixels, labels) in values.items()
        ]


def find_files(root: str | None) -> list[Path]:
    """Find the four files, uncompressed or .gz, in the order of `FILES`.

    Raises:
        ValueError: root lacks a file, or root is None and the download fails.
    """
    if root is None:
        rule = (
            f"Fashion-MNIST must be in {DEBIAN_FOLDER} (apt install dataset-fashion-mnist), in --data.root "
            f"({', '.join(FILES)}, uncompressed or .gz), or be downloadable"
        )
        return files_in(DEBIAN_FOLDER) or files_in(cache_folder()) or files_in(download(datasets.FashionMNIST, rule))
    paths = files_in(Path(root).expanduser())
    if not paths:
        raise ValueError(
            f"--data.root must hold the four files {', '.join(FILES)} (uncompressed or .gz), directly or in "
            f"{BELOW_ROOT} (apt install dataset-fashion-mnist, or leave out --data.root to download them), got {root!r}"
        )
    return paths


def files_in(folder: Path) -> list[Path]:
    """List the four files in `folder` or its FashionMNIST/raw; empty if any is missing."""
    for parent in (folder, folder / BELOW_ROOT):
        candidates = [(parent / name, parent / f"{name}.gz") for name in FILES]
        existing = [next(filter(Path.is_file, pair), None) for pair in candidates]
        if None not in existing:
            return [path for path in existing if path is not None]
    return []


def read_values(path: Path) -> Tensor:
    """Read the values of one of `FILES`, decompressing .gz: uint8 `(values,)`.

    Raises:
        ValueError: the file cannot be read, or its MD5 sum differs from the published one.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            content = file.read(LARGEST + 1)  # a small .gz file can decompress to any size
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be a readable, complete file, got: {error}") from error
    published, actual = FILES[path.name.removesuffix(".gz")], hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != published:
        raise ValueError(f"{path} must be the published file, with MD5 sum {published} uncompressed, got {actual}")
    header = 4 + 4 * content[3]  # the fourth byte of an idx file is the number of its axes
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header)
