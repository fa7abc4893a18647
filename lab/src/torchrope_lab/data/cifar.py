"""CIFAR-10 and CIFAR-100, read by torchvision from the published files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import check_integrity, extract_archive

from torchrope_lab.data.cache import cache_folder
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.faults import reason
from torchrope_lab.data.in_memory import InMemory
from torchrope_lab.mistakes import Mistake

IMAGE_SIZE = 32
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
    # training size is below 32, validation at other sizes resamples the original images. The archive and its files,
    # which are pickles, are read only if their MD5 sums are the published ones.

    in_channels = 3
    source: ClassVar[type[datasets.CIFAR10]]

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.other_sizes = "read" if config.size < IMAGE_SIZE else "resampled"

    def examples(self, size: int, *parts: str) -> list[tuple[Tensor, Tensor]]:
        """Read, select and resample the images of each part, as bytes."""
        with self._folder() as folder:
            return [self.select(*self._read(folder, train=part == "train"), part, size) for part in parts]

    @property
    def enlarged(self) -> int:
        """Number of validation images if they are upsampled, else 0."""
        return self.counts[1] if self.input_size[0] > IMAGE_SIZE else 0

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Yield the folder that holds torchvision's; an archive is unpacked to a temporary one."""
        source, files = self.source, f"{self.source.base_folder}/ or {self.source.filename} from {self.source.url}"
        if self.config.root is None:
            try:
                source(str(cache_folder()), download=True)
            except (OSError, RuntimeError) as error:
                rule = f"{self.title} must be downloadable, or --data.root must hold {files}"
                raise Mistake(f"{rule}, got: {reason(error)}") from error
            yield cache_folder()
            return
        root = Path(self.config.root)
        folder = root if root.name == source.base_folder else root / source.base_folder
        archive = root if root.name == source.filename else root / source.filename
        if folder.is_dir():
            yield folder.parent
            return
        if not archive.is_file():
            raise Mistake(f"--data.root must be or hold {files}, got {str(root)!r}")
        if not check_integrity(archive, source.tgz_md5):
            raise Mistake(f"{archive} must be {source.url} with the MD5 sum {source.tgz_md5}, got another file")
        with TemporaryDirectory() as unpacked:
            extract_archive(archive, unpacked)
            yield Path(unpacked)

    def _read(self, folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
        try:
            stored = self.source(folder, train=train)
        except RuntimeError as error:
            meta = (self.source.meta["filename"], self.source.meta["md5"])
            sums = [*self.source.train_list, *self.source.test_list, meta]
            held = folder / self.source.base_folder
            wrong = [name for name, md5 in sums if not check_integrity(held / name, md5)]
            rule = f"{held} must hold the files of {self.source.url}, with their MD5 sums"
            raise Mistake(f"{rule}, got a missing or different {', '.join(wrong)}") from error
        return torch.from_numpy(stored.data).permute(0, 3, 1, 2), torch.tensor(stored.targets)


class Cifar10(Cifar):
    """CIFAR-10: images of ten classes."""

    name = "cifar10"
    title = "CIFAR-10"
    description = "60,000 photographs of 32×32 colour pixels (CIFAR-10) in ten classes."
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    source = datasets.CIFAR10


class Cifar100(Cifar):
    """CIFAR-100: images of 100 classes, the fine labels."""

    name = "cifar100"
    title = "CIFAR-100"
    description = "60,000 photographs of 32×32 colour pixels (CIFAR-100) in 100 classes."
    classes = tuple(FINE_CLASSES.split())
    source = datasets.CIFAR100
