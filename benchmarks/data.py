"""Measure the data path alone on the CPU, images a second, and write benchmarks/results/data.json.

    python benchmarks/data.py --threads 2

The pictures are noise in the shape of CIFAR (bytes in memory) and of ImageNet (JPEG files, written first).
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from render import RESULTS
from torch.utils.data import DataLoader

from torchrope.data.augment import EpochSet
from torchrope.data.build import make_data
from torchrope.data.config import AugmentConfig, DataConfig
from torchrope.data.datamodule import collate_once
from torchrope.data.tensors import byte_sets
from torchrope.files import write_whole
from torchrope.provenance import provenance

CHOICES = {
    "nothing": {},
    "crop and flip": {"crop_padding": 4, "flip": True},
    "crop, flip, RandAugment(2, 9), Mixup, CutMix": {
        "crop_padding": 4,
        "flip": True,
        "randaugment": (2, 9),
        "mixup": 0.8,
        "cutmix": 1.0,
    },
    "crop, flip, 3-Augment, jitter": {"crop_padding": 4, "flip": True, "three_augment": True, "color_jitter": 0.3},
}


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = [*_in_memory(options), *_from_files(options)]
    result = {
        "schema": 1,
        "command": shlex.join(["python", "benchmarks/data.py", *sys.argv[1:]]),
        "threads": options.threads,
        "rows": rows,
        **provenance(),
    }
    write_whole(options.out, json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['images_per_second']:>10,.0f} images/s  {row['data']}, {row['augment']}")
    print(options.out)
    return 0


def _in_memory(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    count = options.pictures
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(count) % 100
    train, _ = byte_sets(pixels, labels, pixels[:100], labels[:100])
    for name, choice in CHOICES.items():
        epoch = EpochSet(train, AugmentConfig(**choice), 100, seed=0)
        loader = DataLoader(epoch, options.batch, shuffle=True, collate_fn=collate_once)
        yield _row("32x32 in memory", name, loader, options.rounds)


def _from_files(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        root = _jpegs(Path(folder), options.files)
        for name in ("nothing", "crop, flip, RandAugment(2, 9), Mixup, CutMix"):
            config = DataConfig(
                "imagenet",
                root=str(root),
                batch_size=min(options.batch, 64),
                workers=options.workers,
                augment=AugmentConfig(**{**CHOICES[name], "crop_padding": 0}),
            )
            data = make_data(config)
            data.setup()
            yield _row("224x224 from JPEG files", name.replace("crop, ", ""), data.train_dataloader(), options.rounds)


def _row(data: str, name: str, loader: DataLoader, rounds: int) -> dict[str, Any]:
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        count = sum(len(labels) for _, labels in loader)
        rates.append(count / (time.perf_counter() - start))
    return {
        "data": data,
        "augment": name,
        "batch": loader.batch_size,
        "workers": loader.num_workers,
        "images_per_second": statistics.median(rates),
    }


def _jpegs(root: Path, count: int) -> Path:
    """Smooth noise of 500x375 pixels, as heavy to decode as photographs of that size."""
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 255, (47, 63, 3), np.uint8))
        for part in ("train", "val"):
            path = root / part / f"n{number % 4:08d}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
    return root


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--workers", type=int, default=0, help="loading processes for files (default: 0)")
    parser.add_argument("--pictures", type=int, default=50_000, help="in memory (default: 50000)")
    parser.add_argument("--files", type=int, default=512, help="JPEG files (default: 512)")
    parser.add_argument("--batch", type=int, default=512, help="pictures in a batch (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help="epochs, of which the median counts (default: 3)")
    parser.add_argument("--out", type=Path, default=RESULTS.with_name("data.json"), help="the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
