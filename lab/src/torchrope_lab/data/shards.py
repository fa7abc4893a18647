"""Image classification data in tar shards of webdataset's format (0001.jpg, 0001.cls, ...), with random access."""

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from torchrope_lab.data.cache import index_of, read_files
from torchrope_lab.data.faults import Fault, reason

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
SHARDS_AT_ONCE = 16  # examples of this many shards are shuffled together

Sample = tuple[str, int]  # path below root, label
Entry = tuple[str, int, int, int]  # name within the shard, label, offset, size


class Shards(NamedTuple):
    """Where the images of an `ImageSet` are in tar shards: (shard, offset, size), int64 `(images, 3)`."""

    paths: Sequence[Path]
    places: Tensor

    def open(self, index: int) -> BinaryIO:
        """Read an image's bytes."""
        shard, offset, size = self.places[index].tolist()
        with self.paths[shard].open("rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(size))


class ShardOrder(Sampler[int]):
    """Shuffle the shards, then the examples within groups of 16 shards, so that few shards are read at a time."""

    # The order depends on seed and epoch only. It is split into contiguous parts of equal length, one per process, so
    # that processes share at most the shards at the ends of their parts; for equal lengths, some examples are repeated.
    # Workers of a loader receive alternating batches, which keeps the order. `shards` is the index of every example.

    def __init__(self, shards: Tensor, seed: int, epoch: int, replicas: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(seed + epoch)
        shard_order = torch.randperm(int(shards.max()) + 1, generator=generator)[shards]
        within = torch.rand(len(shards), generator=generator, dtype=torch.float64)
        order = (shard_order // SHARDS_AT_ONCE + within).argsort()
        self.length = -(-len(order) // replicas)
        self.order = order[torch.arange(rank * self.length, (rank + 1) * self.length) % len(order)]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())


def index_shards(shards: Sequence[Path]) -> tuple[list[Sample], Tensor, list[Fault]]:
    """Return `samples` of an `ImageSet`, `places` of `Shards`, and faults, reading only headers and labels."""
    names = [str(shard) for shard in shards]
    index = index_of(shards[0], "shards")
    found, unread = read_files(Path(), names, index_shard, index, version="1", doing="Indexing shards")
    samples: list[Sample] = []
    places: list[tuple[int, int, int]] = []
    faults = [(Path(name).name, why) for name, why in unread]
    for number, name in enumerate(names):
        entries, broken = found.get(name, ([], []))
        samples += [(f"{shards[number].name}/{inner}", label) for inner, label, _, _ in entries]
        places += [(number, offset, size) for _, _, offset, size in entries]
        faults += [(f"{shards[number].name}{inner}", why) for inner, why in broken]
    return samples, torch.tensor(places, dtype=torch.int64).view(-1, 3), faults


def index_shard(shard: Path) -> tuple[list[Entry], list[Fault]]:
    """List name, label, offset and size of every image of a shard, and the faults."""
    labels: dict[str, int] = {}
    images: dict[str, tuple[str, int, int]] = {}
    faults: list[Fault] = []
    length = shard.stat().st_size
    try:
        with tarfile.open(shard, "r:") as opened:
            for member in opened:
                path = PurePosixPath(member.name)
                key, _, extension = path.name.partition(".")
                key = str(path.with_name(key))
                if not member.isfile() or member.offset_data + member.size > length:
                    continue
                if extension.lower() in IMAGE_EXTENSIONS:
                    images[key] = (member.name, member.offset_data, member.size)
                elif extension.lower() == "cls":
                    content = opened.extractfile(member)
                    labels[key] = int(content.read()) if content is not None else -1
    except (tarfile.TarError, ValueError) as error:  # images before it are read
        faults.append(("", reason(error)))
    faults += [(f"/{name}", "no label") for key, (name, _, _) in images.items() if labels.get(key, -1) < 0]
    entries = [(name, labels[key], at, size) for key, (name, at, size) in images.items() if labels.get(key, -1) >= 0]
    return entries, faults
