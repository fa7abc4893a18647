"""CIFAR-10 and CIFAR-100, from the published Python files (read by torchvision) or binary files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import check_integrity, extract_archive

from torchrope_lab.data.cache import cache_folder
from torchrope_lab.data.config import Cifar10Config
from torchrope_lab.data.in_memory import InMemory
from torchrope_lab.mistakes import Mistake

IMAGE_SIZE = 32
PIXELS = 3 * IMAGE_SIZE * IMAGE_SIZE
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


class Cifar(InMemory):
    """50,000 training and 10,000 validation images of 32x32 colour pixels, kept in memory as bytes."""

    # Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, University of Toronto, 2009. If the
    # training size is below 32, validation at other sizes resamples the original images. Archives and the files of the
    # Python version, which are pickles, are read only if their MD5 sums are the published ones.

    in_channels = 3
    source: ClassVar[type[datasets.CIFAR10]]
    binary_folder: str
    binary_archive: str
    binary_md5: str
    label_bytes: int  # bytes before each image in the binary version; the last of them is the label

    config: Cifar10Config

    def __init__(self, config: Cifar10Config) -> None:
        super().__init__(config)
        self.other_sizes = "read" if config.size < IMAGE_SIZE else "resampled"

    def examples(self, size: int, *parts: str) -> list[tuple[Tensor, Tensor]]:
        """Read, select and resample the images of each part, as bytes."""
        with self._data_folder() as folder:
            read = self._read_binary if folder.name == self.binary_folder else self._read_python
            return [self.select(*read(folder, train=part == "train"), part, size) for part in parts]

    @property
    def enlarged(self) -> int:
        """Number of validation images if they are upsampled, else 0."""
        return self.counts[1] if self.input_size[0] > IMAGE_SIZE else 0

    @contextmanager
    def _data_folder(self) -> Iterator[Path]:
        """Yield the folder of either version; an archive is unpacked to a temporary folder."""
        if self.config.root is None:
            files = f"{self.source.base_folder}/ or {self.source.filename} from {ADDRESS}"
            rule = f"{self.title} must be downloadable, or --data.root must hold {files}"
            yield download(self.source, rule) / self.source.base_folder
            return
        root, source = Path(self.config.root), self.source
        versions = (
            (source.base_folder, source.filename, source.tgz_md5),
            (self.binary_folder, self.binary_archive, self.binary_md5),
        )
        for name, archive, md5 in versions:
            folder = root if root.name == name else root / name
            packed = root if root.name == archive else root / archive
            if folder.is_dir():
                yield folder
                return
            if packed.is_file():
                if not check_integrity(packed, md5):
                    raise Mistake(f"{packed} must be {ADDRESS}/{archive} with the MD5 sum {md5}, got another file")
                with TemporaryDirectory() as unpacked:
                    extract_archive(packed, unpacked)
                    yield Path(unpacked, name)
                return
        names = ", ".join(f"{name}/ or {archive}" for name, archive, _ in versions)
        raise Mistake(f"--data.root must be or hold {names}, from {ADDRESS}, got {str(root)!r}")

    def _read_python(self, folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
        try:
            stored = self.source(folder.parent, train=train)
        except RuntimeError as error:
            meta = (self.source.meta["filename"], self.source.meta["md5"])
            sums = [*self.source.train_list, *self.source.test_list, meta]
            wrong = [name for name, md5 in sums if not check_integrity(folder / name, md5)]
            rule = f"{folder} must hold the files of {self.source.url}, with their MD5 sums"
            raise Mistake(f"{rule}, got a missing or different {', '.join(wrong)}") from error
        return torch.from_numpy(stored.data).permute(0, 3, 1, 2), torch.tensor(stored.targets)

    def _read_binary(self, folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
        names = [f"{name}.bin" for name, _ in (self.source.train_list if train else self.source.test_list)]
        parts = [read_records(folder / name, self.label_bytes + PIXELS) for name in names]
        rows = torch.cat(parts)
        labels = rows[:, self.label_bytes - 1].long()
        if int(labels.max()) >= self.num_classes:
            rule = f"labels of {', '.join(names)} in {folder} must be below {self.num_classes}"
            raise Mistake(f"{rule}, got {int(labels.max())}")
        return rows[:, self.label_bytes :].reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE), labels


class Cifar10(Cifar):
    """CIFAR-10: images of ten classes."""

    name = "cifar10"
    title = "CIFAR-10"
    description = "60,000 photographs of 32×32 colour pixels (CIFAR-10) in ten classes."
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    source = datasets.CIFAR10
    binary_folder = "cifar-10-batches-bin"
    binary_archive = "cifar-10-binary.tar.gz"
    binary_md5 = "c32a1d4ab5d03f1284b67883e8d87530"
    label_bytes = 1


class Cifar100(Cifar):
    """CIFAR-100: images of 100 classes, the fine labels."""

    name = "cifar100"
    title = "CIFAR-100"
    description = "60,000 photographs of 32×32 colour pixels (CIFAR-100) in 100 classes."
    classes = tuple(FINE_CLASSES.split())
    source = datasets.CIFAR100
    binary_folder = "cifar-100-binary"
    binary_archive = "cifar-100-binary.tar.gz"
    binary_md5 = "03b5dce01913d631647c71ecec9e9cb8"
    label_bytes = 2


def read_records(path: Path, width: int) -> Tensor:
    """Read a binary file as rows of `width` bytes: uint8 `(rows, width)`."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise Mistake(f"{path} must be a readable file, got: {error.strerror}") from error
    if not len(content) or len(content) % width:
        raise Mistake(f"{path} must hold rows of {width} bytes, got {len(content)} bytes")
    return torch.from_numpy(content).view(-1, width)


def download(source: Any, rule: str) -> Path:
    """Download a data set of torchvision into the cache folder, and return this folder; `rule` begins the error."""
    try:
        source(str(cache_folder()), download=True)
    except (OSError, RuntimeError) as error:
        raise Mistake(f"{rule}, got: {' '.join(str(error).split())}") from error
    return cache_folder()
