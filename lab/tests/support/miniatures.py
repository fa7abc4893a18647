"""Miniature data sets in exactly the formats of the real ones: functions by name that write one into a folder."""

import csv
import gzip
import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from video_files import ucf101_folder, video_folder
from volume_files import nifti_folder, rsna_folder

CIFAR_FOLDERS = {"10": "cifar-10-batches-py", "100": "cifar-100-python"}
WNIDS = ("n01440764", "n01443537", "n01484850", "n02084071")


def noise(count: int, side: int, seed: int = 0) -> np.ndarray:
    """Coloured noise around a grey of each picture's own, `(count, 3, side, side)` bytes."""
    rng = np.random.default_rng(seed)
    grey = rng.integers(30, 200, (count, 3, 1, 1))
    return (grey + rng.integers(0, 50, (count, 3, side, side))).astype(np.uint8)


def encoded(pixels: np.ndarray, kind: str = "JPEG") -> bytes:
    """A picture `(3, side, side)` as Pillow writes it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(buffer, kind)
    return buffer.getvalue()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def cifar_parts(kind: str) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Pictures and labels of every file of the python version: 40 to train on, 20 to validate."""
    files = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"] if kind == "10" else ["train", "test"]
    counts = [8] * 5 + [20] if kind == "10" else [40, 20]
    start = 0
    parts = {}
    for file, count in zip(files, counts, strict=True):
        labels = [(start + n) % 10 * (1 if kind == "10" else 11) for n in range(count)]
        parts[file] = (noise(count, 32, seed=start), labels)
        start += count
    return parts


def cifar_contents(kind: str) -> dict[str, bytes]:
    """The files, as bytes."""
    key = "labels" if kind == "10" else "fine_labels"
    meta = {"10": ("batches.meta", "label_names"), "100": ("meta", "fine_label_names")}[kind]
    contents = {meta[0]: pickle.dumps({meta[1]: ["a", "b"]}, protocol=2)}
    for file, (pixels, labels) in cifar_parts(kind).items():
        stored = {"batch_label": "x", key: labels, "data": pixels.reshape(len(pixels), -1)}
        contents[file] = pickle.dumps(stored, protocol=2)
    return contents


def cifar_archive(kind: str) -> bytes:
    """The files packed, the same bytes every time."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for file, content in cifar_contents(kind).items():
            add(archive, f"{CIFAR_FOLDERS[kind]}/{file}", content)
    return buffer.getvalue()


def cifar(folder: Path, kind: str, packed: bool = False) -> Path:
    """A root as the archive unpacks it, or with the archive in it."""
    if packed:
        write(folder / f"cifar-{kind}-python.tar.gz", cifar_archive(kind))
    else:
        for file, content in cifar_contents(kind).items():
            write(folder / CIFAR_FOLDERS[kind] / file, content)
    return folder


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def imagenet_train(root: Path, count: int = 6) -> Path:
    """root/train/<wnid>/<wnid>_<n>.JPEG of different sizes."""
    for label, wnid in enumerate(WNIDS):
        for number in range(count):
            write(root / "train" / wnid / f"{wnid}_{number}.JPEG", encoded(noise(1, 40 + 8 * number, label)[0]))
    return root


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}"


def imagenet(folder: Path, val: str = "folders") -> Path:
    """Folders of classes; validation in folders, or flat with Kaggle's table."""
    root = imagenet_train(folder)
    truth = [WNIDS[(3 * number) % 4] for number in range(12)]
    for number, wnid in enumerate(truth, start=1):
        below = Path(wnid) if val == "folders" else Path()
        write(root / "val" / below / f"{val_name(number)}.JPEG", encoded(noise(1, 48, number)[0]))
    if val == "kaggle":
        with (root / "LOC_val_solution.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["ImageId", "PredictionString"])
            table.writerows(reversed([[val_name(n), f"{w} 1 2 30 40 "] for n, w in enumerate(truth, start=1)]))
    return root


def imagenet_shards(folder: Path, shards: int = 3, per_shard: int = 8) -> Path:
    """Shards of jpg and cls in webdataset's format, classes in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, number_of_shards in (("train", shards), ("val", 2)):
        for shard in range(number_of_shards):
            with tarfile.open(folder / f"imagenet-{part}-{shard:06d}.tar", "w") as archive:
                for number in range(per_shard):
                    key = f"{part}/{shard:03d}{number:03d}"
                    add(archive, f"{key}.jpg", encoded(noise(1, 40 + number, seed=shard * 100 + number)[0]))
                    add(archive, f"{key}.cls", str((shard + number) % 4).encode())
                    add(archive, f"{key}.json", b"{}")
    return folder


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@cache
def published_sums() -> dict[str, dict[str, str]]:
    """The MD5 sums of the miniatures of CIFAR by kind, those of the archives too."""
    return {
        kind: {name: md5(content) for name, content in cifar_contents(kind).items()}
        | {"archive": md5(cifar_archive(kind))}
        for kind in ("10", "100")
    }


def images(folder: Path) -> Path:
    """root/<class>/<n>.png, two classes of 25."""
    for label, name in enumerate(("cat", "dog")):
        for number, pixels in enumerate(noise(25, 40, seed=label)):
            write(folder / name / f"{number}.png", encoded(pixels, "PNG"))
    return folder


def picture(height: int, width: int, seed: int) -> np.ndarray:
    return noise(1, max(height, width), seed)[0][:, :height, :width]


COCO_CATEGORIES = {1: "person", 3: "car", 18: "dog", 90: "toothbrush"}


def annotation(image: int, number: int, category: int, box: list[float], **others: Any) -> dict[str, Any]:
    """An object that fills its box."""
    left, top, wide, high = box
    outline = [left, top, left + wide, top, left + wide, top + high, left, top + high]
    told = {"segmentation": [outline], "area": wide * high, "iscrowd": 0, "image_id": image, "bbox": box}
    return {**told, "category_id": category, "id": number, **others}


def coco_content(first: int, sizes: list[tuple[int, int]], counts: list[int]) -> dict:
    """Annotations as COCO has them, on every third image with a crowd."""
    images, annotations = [], []
    for number, ((height, width), count) in enumerate(zip(sizes, counts, strict=True), start=first):
        name = f"{number:012d}.jpg"
        images.append({"license": 3, "file_name": name, "height": height, "width": width, "id": number})
        rng = np.random.default_rng(number)
        for index in range(count):
            high, wide = rng.uniform(8, 20, 2).round(2)
            left, top = (rng.uniform(0, (width - wide, height - high))).round(2)
            category, box = list(COCO_CATEGORIES)[(number + index) % 4], [left, top, wide, high]
            annotations.append(annotation(number, 100 * number + index, category, [float(side) for side in box]))
        if count and number % 3 == 0:
            crowd = {"segmentation": {"counts": [height * width], "size": [height, width]}, "iscrowd": 1}
            annotations.append(annotation(number, 900100000000 + number, 1, [3, 5, 27, 15], **crowd))
    categories = [{"supercategory": "thing", "id": number, "name": name} for number, name in COCO_CATEGORIES.items()]
    content = {"images": images, "annotations": annotations, "categories": categories}
    return {"info": {"year": 2017}, "licenses": [{"id": 3, "name": "a license"}], **content}


def coco(folder: Path) -> Path:
    """COCO 2017: six images to train on, one of them empty, and four to validate, one of them empty."""
    parts = {
        "train": coco_content(1, [(48, 64), (64, 48), (40, 40), (56, 72), (48, 48), (40, 64)], [2, 1, 3, 0, 4, 1]),
        "val": coco_content(11, [(48, 64), (40, 40), (64, 48), (36, 60)], [1, 2, 0, 3]),
    }
    for part, content in parts.items():
        write(folder / "annotations" / f"instances_{part}2017.json", json.dumps(content))
        write(folder / "annotations" / f"captions_{part}2017.json", json.dumps({"annotations": []}))
        for image in content["images"]:
            pixels = picture(image["height"], image["width"], image["id"])
            write(folder / f"{part}2017" / image["file_name"], encoded(pixels))
    return folder


def index_mask(height: int, width: int, classes: int, seed: int, first: int = 0) -> np.ndarray:
    """Blocks of 8 x 8 pixels of one class each."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(first, classes, (-(-height // 8), -(-width // 8)))
    return blocks.repeat(8, 0).repeat(8, 1)[:height, :width].astype(np.uint8)


def png(indices: np.ndarray, palette: bool = False) -> bytes:
    image = Image.fromarray(indices)
    if palette:
        image = image.convert("P")
        image.putdata(indices.flatten().tolist())
        image.putpalette([value for index in range(256) for value in (255 - index, index, 128)])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def ade20k(folder: Path) -> Path:
    """ADEChallengeData2016: five images to train on, three to validate, 150 classes."""
    base = folder / "ADEChallengeData2016"
    for part, short, count in (("training", "train", 5), ("validation", "val", 3)):
        for number in range(1, count + 1):
            height, width = 40 + 8 * (number % 3), 72 - 8 * (number % 2)
            name = f"ADE_{short}_{number:08d}"
            write(base / "images" / part / f"{name}.jpg", encoded(picture(height, width, number)))
            write(base / "annotations" / part / f"{name}.png", png(index_mask(height, width, 151, number)))
    rows = [(index, 0.1, 10, 2, 0, f"thing{index}, object{index}") for index in range(1, 151)]
    lines = ["\t".join(map(str, row)) for row in [("Idx", "Ratio", "Train", "Val", "Stuff", "Name"), *rows]]
    write(base / "objectInfo150.txt", "\n".join(lines) + "\n")
    return folder


def segments(folder: Path, parts: tuple[str, ...] = ("train", "val"), palette: bool = True) -> Path:
    """images/<part>/*.png and masks/<part>/*.png of three classes; below each an unlabelled corner."""
    for number, part in enumerate(parts):
        for index in range(5 - number):
            mask = index_mask(48, 40 + 8 * index, 3, 10 * number + index)
            mask[:4, :4] = 255
            pixels = picture(48, 40 + 8 * index, index)
            write(folder / "images" / part / f"scene{index}.jpg", encoded(pixels))
            write(folder / "masks" / part / f"scene{index}.png", png(mask, palette))
    return folder


def csv_text(columns: dict[str, np.ndarray]) -> str:
    """Columns as a .csv file, NaN as an empty cell."""
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    lines = [",".join("" if value != value else repr(value) for value in row) for row in rows]
    return "\n".join([",".join(columns), *lines]) + "\n"


def npz_content(**arrays: np.ndarray) -> bytes:
    """Arrays as a .npz file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def point_columns(seed: int, count: int = 12, tall: bool = False) -> dict[str, np.ndarray]:
    """Points in a box, which is higher than wide or wider than high, with a colour."""
    rng = np.random.default_rng(seed)
    places = rng.random((count, 3)) * ((1, 1, 4) if tall else (4, 4, 1))
    return {**dict(zip("xyz", places.T.round(3), strict=True)), "grey": rng.random(count).round(3)}


def points(folder: Path) -> Path:
    """<class>/* of two classes, in both formats, with 8 to 15 points each."""
    for number in range(54):
        columns = point_columns(number, 8 + number % 8, tall=number % 2 == 1)
        place = folder / ("tall" if number % 2 else "wide") / f"{number:02}"
        if number % 3:
            write(place.with_suffix(".npz"), npz_content(**columns))
        else:
            write(place.with_suffix(".csv"), csv_text(columns))
    return folder


def waves(folder: Path) -> Path:
    """<class>/*.csv: sines of one or two turns in 8 to 13 steps, with a second channel of noise."""
    for number in range(32):
        rng, length, turns = np.random.default_rng(number), 8 + number % 6, 1 + number % 2
        wave = np.sin(2 * np.pi * (turns * np.arange(length) / length + rng.random()))
        columns = {"time": np.arange(length), "wave": wave.round(4), "noise": rng.random(length).round(4)}
        write(folder / f"{turns} turns" / f"{number:02}.csv", csv_text(columns))
    return folder


MINIATURES: dict[str, Callable[[Path], Path]] = {
    "images": images,
    "cifar10": lambda folder: cifar(folder, "10"),
    "cifar100": lambda folder: cifar(folder, "100"),
    "imagenet": imagenet,
    "videos": lambda folder: video_folder(folder, 25),
    "ucf101": lambda folder: ucf101_folder(folder, clips=5),
    "volumes": lambda folder: nifti_folder(folder, 50),
    "rsna": lambda folder: rsna_folder(folder, 50),
    "points": points,
    "coco": coco,
    "ade20k": ade20k,
    "segments": segments,
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"frames": 2, "size": 16} for name in ("videos", "ucf101", "volumes", "rsna")}
}
