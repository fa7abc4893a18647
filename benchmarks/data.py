"""Measure data loading on the CPU, compare it with the estimated training throughput of a GPU, and render docs/data.md.

    python benchmarks/data.py --threads 2 --workers 2

Every row is a paper's recipe on data made here in the size and format of the real one: CIFAR-100 as bytes in memory,
ImageNet as JPEG files and as shards, UCF101 as videos, RSNA's CT as DICOM series. Times of epochs include the start of
loading processes. The throughput of a GPU is computed, not measured: 45 % of its peak over the operations of the
recipe's model. Run it on a machine that does nothing else; it needs 2 GiB of temporary space.
"""

import argparse
import csv
import io
import shlex
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import av
import numpy as np
import pydicom
import torch
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian
from render import DOCS, RESULTS, render_data
from suite_results import VERSION, DataSuite, Loading, Source, write_results
from torch.utils.data import DataLoader

from torchrope_lab import recipes
from torchrope_lab.data.augment import EpochSet
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import AugmentConfig, data_config
from torchrope_lab.data.loading import collate_once
from torchrope_lab.data.tensors import image_sets
from torchrope_lab.engine.provenance import provenance
from torchrope_lab.settings.run_config import RunConfig
from torchrope_lab.training.cost import count_flops
from torchrope_lab.training.models import build_model
from torchrope_lab.training.run import read_config
from torchrope_lab.training.timing import quartiles
from torchrope_lab.training.watch import BACKWARD_AND_FORWARD

PEAK_TFLOPS = 989.0
"""H100 and H200 (SXM), bfloat16 without sparsity, by NVIDIA's data sheets."""
UTILISATION = 0.45
CLASSES = 4
NOTHING = AugmentConfig()
DECODERS = ("torch", "torchvision", "pillow", "av", "pydicom")


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurements.

    Attributes:
        pictures: Number of 32x32 images in memory.
        files: Number of 500x375 JPEG files, in folders and in shards.
        videos: Number of 320x240 videos.
        frames: Frames per video.
        volumes: Number of DICOM series.
        slices: Slices per volume.
        side: Pixels per side of a slice.
        rounds: Epochs, over which medians and quartiles are computed.
        workers: Loading processes for files.
        threads: Threads of torch.
    """

    pictures: int = 50_000
    files: int = 2048
    videos: int = 256
    frames: int = 180
    volumes: int = 64
    slices: int = 34
    side: int = 512
    rounds: int = 5
    workers: int = 2
    threads: int = 2


def main() -> int:
    options = _options()
    plan = Plan(**{name: getattr(options, name) for name in asdict(Plan())})
    suite = measure(plan, shlex.join(["python", "benchmarks/data.py", *sys.argv[1:]]))
    write_results(options.out, suite)
    render_data(options.out, options.docs)
    print(f"{options.out} and {options.docs / 'data.md'}")
    return 0


def measure(plan: Plan, command: str) -> DataSuite:
    """Measure all rows and print each as it is measured."""
    torch.set_num_threads(plan.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in _rows(plan, Path(folder)):
            print(f"{row.examples_per_second.median:>10,.0f} a second  {row.data}, {row.augment}")
            rows.append(row)
    return DataSuite(VERSION, plan.rounds, PEAK_TFLOPS, UTILISATION, tuple(rows), _source(plan, command))


def _source(plan: Plan, command: str) -> Source:
    return Source(command=command, date=date.today().isoformat(), threads=plan.threads, **provenance(DECODERS))


def _rows(plan: Plan, folder: Path) -> Iterator[Loading]:
    yield from _in_memory(plan)
    files = _jpegs(folder / "files", plan.files)
    yield from _from_files("liere-imagenet", "JPEG files", files, plan)
    yield from _from_files("liere-imagenet", "shards of JPEG", _shards(files, folder / "shards"), plan)
    yield from _from_files("liere-ucf101", "videos", _videos(folder / "videos", plan), plan, name="videos")
    windows = [[40.0, 80.0], [80.0, 200.0], [40.0, 380.0]]
    series = _series(folder / "volumes", plan)
    yield from _from_files("liere-rsna", "DICOM series", series, plan, name="volumes", windows=windows)


def _in_memory(plan: Plan) -> Iterator[Loading]:
    config = _recipe("liere-cifar100-vit-b")
    pixels = torch.randint(256, (plan.pictures, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(plan.pictures) % 100
    train, _ = image_sets(pixels, labels, pixels[:100], labels[:100])
    flops = _forward_flops(config, (3, 32, 32))
    everything = replace(config.data.augment, mixup=0.8, cutmix=1.0)
    for changes in (NOTHING, config.data.augment, everything):
        epoch = EpochSet(train, changes, 100, seed=0)
        batch = min(config.optim.effective_batch or 64, plan.pictures)
        loader = DataLoader(epoch, batch, shuffle=True, collate_fn=collate_once)
        yield _row("CIFAR-100 in memory", changes, loader, flops, plan.rounds)


def _from_files(recipe: str, title: str, root: Path, plan: Plan, **options: Any) -> Iterator[Loading]:
    config, flops = _recipe(recipe), 0
    for changes in (NOTHING, config.data.augment):
        given = {"root": str(root), "workers": plan.workers, "augment": changes, **options}
        settings = {**vars(config.data), **given}
        settings.pop("split", None)  # of UCF101, whose settings other videos are read with here
        data = make_data(data_config(**settings))
        data.setup()
        flops = flops or _forward_flops(config, (data.in_channels, *data.input_size))
        yield _row(title, changes, data.train_dataloader(), flops, plan.rounds)


def _recipe(name: str) -> RunConfig:
    return read_config({"seed": 0, **recipes.settings(name)})


def _row(title: str, changes: AugmentConfig, loader: DataLoader, flops: int, rounds: int) -> Loading:
    rates, shape = [], ()
    for _ in range(rounds):
        start, count = time.perf_counter(), 0
        for inputs, labels in loader:
            count, shape = count + len(labels), tuple(inputs.shape[1:])
        rates.append(count / (time.perf_counter() - start))
    return Loading(
        data=title,
        shape=shape,
        augment=_describe(changes),
        batch=int(loader.batch_size or 0),
        workers=loader.num_workers,
        examples_per_second=quartiles(rates),
        gflops=flops / 1e9,
        taken_per_second=UTILISATION * PEAK_TFLOPS * 1e12 / (BACKWARD_AND_FORWARD * flops),
    )


def _forward_flops(config: RunConfig, shape: tuple[int, ...]) -> int:
    """Count the forward FLOPs of the recipe's model without encoding for one example."""
    sizes = shape[1:]
    axes = ("time", "height", "width")[-len(sizes) :]
    data: Any = argparse.Namespace(
        input_size=sizes, in_channels=shape[0], num_classes=100, axes=axes, tasks=("classify",), lattice=True
    )
    return count_flops(lambda: build_model("none", config.model, data), torch.Size((1, *shape)))


def _describe(changes: AugmentConfig) -> str:
    """Format the settings that are set as in a recipe."""
    plain = asdict(NOTHING)
    on = {name: value for name, value in asdict(changes).items() if value != plain[name]}
    return ", ".join(f"{name} {_written(value)}" for name, value in on.items()) or "nothing"


def _written(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value).lower()


def _picture(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Generate smooth noise with a decoding cost similar to photographs."""
    coarse = Image.fromarray(rng.integers(0, 255, (height // 8, width // 8, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def _jpegs(root: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    for number in range(count):
        picture = _picture(rng, 500, 375)
        for part in ("train", "val") if number < 2 * CLASSES else ("train",):
            path = root / part / f"n{number % CLASSES:08d}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, quality=90)
    return root


def _shards(files: Path, root: Path) -> Path:
    """Write the same files in webdataset's format."""
    root.mkdir(parents=True)
    for part in ("train", "val"):
        with tarfile.open(root / f"imagenet-{part}-000000.tar", "w") as archive:
            for number, path in enumerate(sorted((files / part).rglob("*.JPEG"))):
                label = str(int(path.parent.name[1:])).encode()
                for ending, content in (("jpg", path.read_bytes()), ("cls", label)):
                    member = tarfile.TarInfo(f"{number:06d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return root


def _videos(root: Path, plan: Plan) -> Path:
    """MPEG-4 in AVI, 320x240, 25 frames a second: UCF101's format, and its usual length of 7 seconds."""
    rng = np.random.default_rng(0)
    for number in range(plan.videos):
        path = root / f"class{number % CLASSES}" / f"{number}.avi"
        path.parent.mkdir(parents=True, exist_ok=True)
        wide = np.asarray(_picture(rng, 320 + 2 * plan.frames, 240))
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=25)
            stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
            for moved in range(0, 2 * plan.frames, 2):
                frame = np.ascontiguousarray(wide[:, moved : moved + 320])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
    return root


def _series(root: Path, plan: Plan) -> Path:
    """Series of CT slices, 16 bits without compression as RSNA's are, and the table of their labels."""
    rng = np.random.default_rng(0)
    rows = [("study", "label")]
    for number in range(plan.volumes):
        folder = root / f"{number:04d}"
        folder.mkdir(parents=True)
        study = f"1.2.3.{number}"
        for place in range(plan.slices):
            _slice(folder / f"{place}.dcm", rng.integers(0, 2000, (plan.side, plan.side), np.int16), study, place)
        rows.append((folder.name, f"class{number % 2}"))
    with (root / "labels.csv").open("w", newline="") as table:
        csv.writer(table).writerows(rows)
    return root


def _slice(path: Path, stored: np.ndarray, study: str, place: int) -> None:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = pydicom.uid.UID(f"{study}.1.{place}")
    dataset = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID, dataset.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID, dataset.PatientID = study, f"{study}.1", study
    dataset.ImagePositionPatient, dataset.ImageOrientationPatient = [0, 0, 5 * place], [1, 0, 0, 0, 1, 0]
    dataset.PixelSpacing, dataset.SliceThickness = [0.5, 0.5], 5
    dataset.RescaleSlope, dataset.RescaleIntercept = 1, -1024
    dataset.Rows, dataset.Columns = stored.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation, dataset.PixelRepresentation = 1, "MONOCHROME2", 1
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 16, 15
    dataset.PixelData = stored.tobytes()
    dataset.save_as(path, enforce_file_format=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    meanings = {
        "pictures": "in memory",
        "files": "JPEG files, in folders and in shards",
        "videos": "videos",
        "frames": "frames of a video",
        "volumes": "DICOM series",
        "slices": "slices of a series",
        "side": "pixels per side of a slice",
        "rounds": "epochs, over which medians are computed",
        "workers": "loading processes for files",
        "threads": "threads of torch",
    }
    for name, default in asdict(Plan()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meanings[name]} (default: {default})")
    parser.add_argument("--out", type=Path, default=RESULTS.with_name("data.json"), help="the JSON file")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of data.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
