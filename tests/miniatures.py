"""Miniature data sets in exactly the formats of the real ones: name -> what writes one below a folder."""

import csv
import gzip
import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

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


def cifar_contents(kind: str, binary: bool) -> dict[str, bytes]:
    """The files of a version, as bytes."""
    key = b"labels" if kind == "10" else b"fine_labels"
    contents = {}
    for file, (pixels, labels) in cifar_parts(kind).items():
        flat = pixels.reshape(len(pixels), -1)
        if binary:
            fine = np.array(labels, np.uint8)[:, None]
            front = fine if kind == "10" else np.concatenate([fine // 5, fine], axis=1)
            contents[f"{file}.bin"] = np.concatenate([front, flat], axis=1).tobytes()
        else:
            contents[file] = pickle.dumps({b"batch_label": b"x", key: labels, b"data": flat}, protocol=2)
    return contents


def cifar(folder: Path, kind: str, binary: bool = False, packed: bool = False) -> Path:
    """A root as the archive of a version unpacks it, or with the archive in it."""
    name = (
        f"cifar-{kind}-"
        + {
            ("10", False): "batches-py",
            ("10", True): "batches-bin",
            ("100", False): "python",
            ("100", True): "binary",
        }[kind, binary]
    )
    contents = cifar_contents(kind, binary)
    if not packed:
        for file, content in contents.items():
            write(folder / name / file, content)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"cifar-{kind}-{'binary' if binary else 'python'}.tar.gz", "w:gz") as archive:
        for file, content in contents.items():
            add(archive, f"{name}/{file}", content)
    return folder


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def tiny_imagenet(folder: Path) -> Path:
    """Tiny-ImageNet with its annotations: 4 classes, 24 to train on, 12 to validate."""
    root = folder / "tiny-imagenet-200"
    for label, wnid in enumerate(WNIDS):
        for number, pixels in enumerate(noise(6, 64, seed=label)):
            write(root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", encoded(pixels))
        write(root / "train" / wnid / f"{wnid}_boxes.txt", f"{wnid}_0.JPEG\t0\t0\t62\t62\n")
    rows = []
    for number, pixels in enumerate(noise(12, 64, seed=9)):
        write(root / "val" / "images" / f"val_{number}.JPEG", encoded(pixels))
        rows.append(f"val_{number}.JPEG\t{WNIDS[number % 4]}\t0\t0\t62\t62\n")
    write(root / "val" / "val_annotations.txt", "".join(rows))
    write(root / "wnids.txt", "\n".join(reversed(WNIDS)))
    return folder


def imagenet_train(root: Path, count: int = 6) -> Path:
    """root/train/<wnid>/<wnid>_<n>.JPEG of different sizes."""
    for label, wnid in enumerate(WNIDS):
        for number in range(count):
            write(root / "train" / wnid / f"{wnid}_{number}.JPEG", encoded(noise(1, 40 + 8 * number, label)[0]))
    return root


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}"


def imagenet(folder: Path, val: str = "folders") -> Path:
    """Folders of classes; validation in folders, or flat with Kaggle's table or the devkit's files."""
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
    if val == "devkit":
        from scipy.io import savemat

        # Numbers of the devkit follow no alphabet; the last synset is no leaf.
        kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
        numbers = {WNIDS[2]: 1, WNIDS[0]: 2, WNIDS[3]: 3, WNIDS[1]: 4}
        rows = [(number, wnid, wnid, 0) for wnid, number in numbers.items()] + [(5, "n00000000", "all", 4)]
        devkit = root / "ILSVRC2012_devkit_t12" / "data"
        devkit.mkdir(parents=True)
        savemat(devkit / "meta.mat", {"synsets": np.array(rows, dtype=kind)})
        lines = "".join(f"{numbers[wnid]}\n" for wnid in truth)
        write(devkit / "ILSVRC2012_validation_ground_truth.txt", lines)
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


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(header + values.astype(np.uint8).tobytes())


def fashion(folder: Path) -> Path:
    """The four files of Fashion-MNIST: 40 to train on, 20 to validate."""
    for part, count in (("train", 40), ("t10k", 20)):
        write(folder / f"{part}-images-idx3-ubyte.gz", idx(noise(count, 28)[:, 0]))
        write(folder / f"{part}-labels-idx1-ubyte.gz", idx(np.arange(count) % 10))
    return folder


def images(folder: Path) -> Path:
    """root/<class>/<n>.png, two classes of 25."""
    for label, name in enumerate(("cat", "dog")):
        for number, pixels in enumerate(noise(25, 40, seed=label)):
            write(folder / name / f"{number}.png", encoded(pixels, "PNG"))
    return folder


def videos(folder: Path) -> Path:
    from test_videos import video_folder

    return video_folder(folder, 25)


def ucf101(folder: Path) -> Path:
    from test_videos import ucf101_folder

    return ucf101_folder(folder, clips=5)


def volumes(folder: Path) -> Path:
    from test_volumes import nifti_folder

    return nifti_folder(folder, 50)


def rsna(folder: Path) -> Path:
    from test_volumes import rsna_folder

    return rsna_folder(folder, 50)


MINIATURES: dict[str, Callable[[Path], Path]] = {
    "fashion-mnist": fashion,
    "images": images,
    "cifar10": lambda folder: cifar(folder, "10"),
    "cifar100": lambda folder: cifar(folder, "100"),
    "tiny-imagenet": tiny_imagenet,
    "imagenet": imagenet,
    "videos": videos,
    "ucf101": ucf101,
    "volumes": volumes,
    "rsna": rsna,
}
OPTIONS: dict[str, dict[str, int]] = {
    name: {"frames": 2, "size": 16} for name in ("videos", "ucf101", "volumes", "rsna")
}
