"""CIFAR-10 and CIFAR-100: the pickles, read without running them, or the binary version, packed or not."""

import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torchrope.lab.data.cache import cache_folder
from torchrope.lab.data.config import Cifar10Config
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.gzipped import LimitedGzip
from torchrope.lab.data.pickles import read_arrays
from torchrope.lab.data.tensors import TensorSet, balanced_subset, byte_sets
from torchrope.lab.data.transforms import resize_bytes

IMAGE_SIZE = 32
PIXELS = 3 * IMAGE_SIZE * IMAGE_SIZE
UNPACKED = 2 * 60_000 * (PIXELS + 2)
"""Bytes that an archive may hold, twice as many as any of the four does."""
LARGEST_LABEL = 99

ADDRESS = "https://www.cs.toronto.edu/~kriz"
FINE_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

Read = Callable[[str], bytes]


class Cifar(DataModule):
    """Pictures of 32x32 colour pixels, kept in memory as bytes: 50,000 to train on, 10,000 to validate.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, University of Toronto, 2009.

    Attributes:
        folders: Folders of the python and of the binary version, as their archives name them.
        archives: The archives, likewise.
        md5: Of the python version's archive.
        train_files: Files of the python version to train on; those of the binary version end in .bin.
        val_files: Likewise, to validate.
        label_key: What the python version calls a label.
        label_bytes: Bytes in front of a picture in the binary version; the last one is the label.
    """

    axes = ("height", "width")
    in_channels = 3
    folders: tuple[str, str]
    archives: tuple[str, str]
    md5: str
    train_files: tuple[str, ...]
    val_files: tuple[str, ...]
    label_key: str
    label_bytes: int

    config: Cifar10Config

    def __init__(self, config: Cifar10Config) -> None:
        super().__init__(config)
        side = config.size
        self.input_size = (side, side)

    def datasets(self) -> tuple[TensorSet, TensorSet]:
        """Find the files, read `train_size` and `val_size` of them, resample to `input_size`; bytes all the way."""
        config = self.config
        read, binary = self._find()
        train = self._part(read, binary, self.train_files, config.train_size, "train_size")
        val = self._part(read, binary, self.val_files, config.val_size, "val_size")
        return byte_sets(*train, *val)

    def _part(
        self, read: Read, binary: bool, files: tuple[str, ...], size: int | None, name: str
    ) -> tuple[Tensor, Tensor]:
        try:
            if binary:
                parts = [read_binary(read(f"{file}.bin"), self.label_bytes, f"{file}.bin") for file in files]
            else:
                parts = [read_python(read(file), self.label_key, file) for file in files]
        except ValueError as error:
            raise ValueError(f"{error}; whole ones are in {ADDRESS}/{self.archives[binary]}") from error
        images, labels = (torch.cat(several) for several in zip(*parts, strict=True))
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"labels of {', '.join(files)} must lie below {self.num_classes}, got {found}")
        chosen = balanced_subset(labels, size, self.config.split_seed, name)
        return resize_bytes(images[chosen], self.input_size), labels[chosen]

    def _find(self) -> tuple[Read, bool]:
        """Find the files in root, or in the cache, or fetch them there; say how to read one, and if they are binary."""
        root = self.config.root
        folder = cache_folder() if root is None else Path(root)
        found = self._look(folder)
        if found is None and root is None:
            self._download(folder)
            found = self._look(folder)
        if found is None:
            raise ValueError(f"root must be or hold {self._expected()}, got {str(folder)!r}")
        return found

    def _look(self, folder: Path) -> tuple[Read, bool] | None:
        for binary, (name, archive) in enumerate(zip(self.folders, self.archives, strict=True)):
            needed = [f"{file}.bin" if binary else file for file in (*self.train_files, *self.val_files)]
            for place in (folder, folder / name):
                if all((place / file).is_file() for file in needed):
                    return lambda file, place=place: (place / file).read_bytes(), bool(binary)
            packed = folder if folder.name == archive else folder / archive
            if packed.is_file():
                return unpack(packed, needed).__getitem__, bool(binary)
        return None

    def _expected(self) -> str:
        python, binary = self.folders
        names = ", ".join((*self.train_files, *self.val_files))
        return f"{python}/ ({names}), {self.archives[0]}, {binary}/ or {self.archives[1]}, all from {ADDRESS}"

    def _download(self, folder: Path) -> None:
        from torchvision.datasets.utils import download_url

        name = self.archives[0]
        try:
            download_url(f"{ADDRESS}/{name}", str(folder), name, self.md5)
        except (OSError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise ValueError(
                f"{self.title} must be downloadable, or root must be or hold {self._expected()}, got: {why}"
            ) from error


class Cifar10(Cifar):
    """CIFAR-10: ten kinds of things."""

    name = "cifar10"
    title = "CIFAR-10"
    description = "60,000 real pictures of 32×32 colour pixels (CIFAR-10); the class is one of ten kinds."
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    folders = ("cifar-10-batches-py", "cifar-10-batches-bin")
    archives = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")
    train_files = tuple(f"data_batch_{number}" for number in range(1, 6))
    val_files = ("test_batch",)
    md5 = "c58f30108f718f92721af3b95e74349a"
    label_key = "labels"
    label_bytes = 1


class Cifar100(Cifar):
    """CIFAR-100: a hundred kinds of things, the fine labels."""

    name = "cifar100"
    title = "CIFAR-100"
    description = (
        "60,000 real pictures of 32×32 colour pixels (CIFAR-100); the class is one of a hundred kinds of things."
    )
    classes = tuple(FINE_CLASSES.split())
    folders = ("cifar-100-python", "cifar-100-binary")
    archives = ("cifar-100-python.tar.gz", "cifar-100-binary.tar.gz")
    train_files = ("train",)
    val_files = ("test",)
    md5 = "eb9058c3a382ffc7106e4002c42a8d85"
    label_key = "fine_labels"
    label_bytes = 2


def unpack(archive: Path, files: list[str]) -> dict[str, bytes]:
    """Read files from an archive into memory, whatever folder it has them in; nothing is written to disk.

    Raises:
        ValueError: it cannot be read, holds more than CIFAR does, or lacks one.
    """
    found: dict[str, bytes] = {}
    try:
        with LimitedGzip(archive, UNPACKED) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as opened:
            for member in opened:
                name = member.name.rpartition("/")[2]
                content = opened.extractfile(member) if member.isfile() and name in files else None
                if content is not None:
                    found[name] = content.read()
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"{archive} must be a readable, whole archive, as at {ADDRESS}, got: {error}") from error
    missing = [file for file in files if file not in found]
    if missing:
        raise ValueError(f"{archive} must hold {', '.join(files)}, got none of the name {', '.join(missing)}")
    return found


def read_python(content: bytes, label_key: str, file: str) -> tuple[Tensor, Tensor]:
    """Read a pickle of pictures without running what it asks for.

    Returns:
        uint8 `(n, 3, 32, 32)` and int64 labels `(n,)`.

    Raises:
        ValueError: it is damaged, asks for anything but an array of bytes, or lacks pictures or labels.
    """
    stored = read_arrays(content, file)
    images, labels = stored.get("data"), stored.get(label_key)
    if not isinstance(images, Tensor) or images.ndim != 2 or images.shape[1] != PIXELS:
        shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"{file} must hold 'data', an array (pictures, {PIXELS}) of bytes, got {shape}")
    if not isinstance(labels, list) or len(labels) != len(images) or {type(label) for label in labels} - {int}:
        count = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"{file} must hold {label_key!r}, one number per picture = {len(images)}, got {count}")
    if any(not 0 <= label <= LARGEST_LABEL for label in labels):
        raise ValueError(f"{file} must hold {label_key!r} between 0 and {LARGEST_LABEL}, got others")
    return images.view(-1, 3, IMAGE_SIZE, IMAGE_SIZE), torch.tensor(labels, dtype=torch.int64)


def read_binary(content: bytes, label_bytes: int, file: str) -> tuple[Tensor, Tensor]:
    """Read rows of labels and pixels, red first.

    Returns:
        uint8 `(n, 3, 32, 32)` and int64 labels `(n,)`.

    Raises:
        ValueError: the file is no whole number of rows.
    """
    row = label_bytes + PIXELS
    if not content or len(content) % row:
        raise ValueError(f"{file} must hold rows of {row} bytes, got {len(content)} bytes")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, row)
    images = rows[:, label_bytes:].reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE)
    return images, rows[:, label_bytes - 1].long()
