"""Fashion-MNIST, from a folder, from Debian's package, or from the network."""

import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from torchrope.lab.data.cache import cache_folder
from torchrope.lab.data.config import FashionConfig
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.gzipped import LimitedGzip
from torchrope.lab.data.tensors import TensorSet, balanced_subset, normalised_sets
from torchrope.lab.data.transforms import resize

IMAGE_SIZE = 28
UNPACKED = 2 * 60_000 * IMAGE_SIZE**2
"""Bytes that a file may hold, twice as many as the largest does."""
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
BELOW_ROOT = Path("FashionMNIST/raw")  # where torchvision puts them
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
UNSIGNED_BYTE = 8  # the idx format's code


class FashionMNIST(DataModule):
    """70,000 grey pictures of clothes: 60,000 to train on, the 10,000 of the published test set to validate.

    Read from `root` where it is given; else from Debian's package dataset-fashion-mnist; else downloaded once
    into torch's cache folder.

    Source: H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017.
    """

    name = "fashion-mnist"
    title = "Fashion-MNIST"
    description = "70,000 real pictures of clothes in 28×28 grey pixels; the class is the kind of garment."
    axes = ("height", "width")
    in_channels = 1
    classes = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )

    config: FashionConfig

    def __init__(self, config: FashionConfig) -> None:
        super().__init__(config)
        side = config.size
        self.input_size = (side, side)

    def datasets(self) -> tuple[TensorSet, TensorSet]:
        """Find the files, read `train_size` and `val_size` of them, resample to `input_size`, normalise."""
        config = self.config
        paths = find_files(config.root)
        train = self._part(paths[0], paths[1], config.train_size, "train_size")
        val = self._part(paths[2], paths[3], config.val_size, "val_size")
        return normalised_sets(*train, *val)

    def _part(self, images_path: Path, labels_path: Path, size: int | None, name: str) -> tuple[Tensor, Tensor]:
        images, labels = read_idx(images_path, axes=3), read_idx(labels_path, axes=1).long()
        if len(images) != len(labels):
            raise ValueError(f"{labels_path} must hold one label per image = {len(images)}, got {len(labels)}")
        if int(labels.max()) >= self.num_classes:
            raise ValueError(f"{labels_path} must hold labels below {self.num_classes}, got {int(labels.max())}")
        chosen = balanced_subset(labels, size, self.config.split_seed, name)
        inputs = images[chosen, None].float() / 255  # [n, 1, 28, 28]
        return resize(inputs, self.input_size), labels[chosen]


def find_files(root: str | None) -> list[Path]:
    """Find the four files, in the order of `FILES`, each plain or with .gz.

    Raises:
        ValueError: root lacks them, or none are on this machine and the download fails.
    """
    if root is None:
        return files_in(DEBIAN_FOLDER) or files_in(cache_folder()) or download(cache_folder())
    paths = files_in(Path(root).expanduser())
    if not paths:
        raise ValueError(
            f"root must hold the four files {', '.join(FILES)} (plain or .gz), itself or in {BELOW_ROOT}; "
            f"from apt install dataset-fashion-mnist, or downloaded where root is not given; got {root!r}"
        )
    return paths


def files_in(folder: Path) -> list[Path]:
    """List the four files in `folder` or its FashionMNIST/raw; empty unless all are there."""
    for place in (folder, folder / BELOW_ROOT):
        candidates = [(place / name, place / f"{name}.gz") for name in FILES]
        found = [next(filter(Path.is_file, pair), None) for pair in candidates]
        if None not in found:
            return [path for path in found if path is not None]
    return []


def download(folder: Path) -> list[Path]:
    """Fetch the four files with torchvision into `folder`."""
    from torchvision import datasets

    try:
        datasets.FashionMNIST(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"Fashion-MNIST must be in {DEBIAN_FOLDER} (apt install dataset-fashion-mnist), in the folder "
            f"that root names ({', '.join(FILES)}, plain or .gz), or be downloadable, got: {reason}"
        ) from error
    return files_in(folder)


def read_idx(path: Path, axes: int) -> Tensor:
    """Read a file of unsigned bytes in the idx format: 0, 0, 8, axes, big-endian extents, then the values.

    Args:
        path: The file; decompressed first where its name ends in .gz.
        axes: Number of axes that it must have.

    Returns:
        uint8 with the shape that the file states.

    Raises:
        ValueError: the file cannot be read, or is not what its header states.
    """
    try:
        content = _unpack(path) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} must be a readable, whole file, got: {error}") from error
    start = 4 + 4 * axes
    if len(content) < start or content[:4] != bytes([0, 0, UNSIGNED_BYTE, axes]):
        raise ValueError(f"{path} must be an idx file of bytes with {axes} axes, got {content[:4].hex() or 'nothing'}")
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) - start != math.prod(shape) or not math.prod(shape):
        raise ValueError(f"{path} must hold the {math.prod(shape)} values of its header, got {len(content) - start}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def _unpack(path: Path) -> bytes:
    with LimitedGzip(path, UNPACKED) as file:
        return file.read()
