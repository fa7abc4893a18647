"""ImageNet in folders and in shards: layouts, labels, order, what is broken, and training."""

import logging
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from data_sets import load_data, refused
from miniatures import WNIDS, add, encoded, imagenet, imagenet_shards, noise
from webdataset.tariterators import group_by_keys, tar_file_iterator

from torchrope_lab.data import shards as module
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.faults import TooManyFaults
from torchrope_lab.data.shards import SHARDS_AT_ONCE, ShardOrder, index_shards
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.run import train


def load(root: Path, **options):
    return make_data(data_config("imagenet", root=str(root), **{"size": 32, **options}))


def train_two_steps(root: Path, folder: Path, **options):
    """Train a tiny transformer on two batches."""
    data = load_data("imagenet", root, size=32, batch_size=12, **options)
    model = ModelConfig(dim=32, depth=2, num_heads=2, mlp_dim=32, patch_size=[8], pool="mean")
    settings = RunConfig("mixed", data=data.config, model=model, optim=OptimConfig(epochs=1, warmup_epochs=0))
    return data, *train(settings, data, folder)


# Folders


@pytest.mark.parametrize("layout", ["folders", "kaggle"])
def test_validation_layouts_give_equal_labels(tmp_path, layout):
    data = load(imagenet(tmp_path, layout))
    train, val = data.datasets()
    assert data.classes == WNIDS
    assert {path.split("/")[1]: label for path, label in train.samples} == dict(zip(WNIDS, range(4), strict=True))
    truth = {f"ILSVRC2012_val_{n:08d}.JPEG": 3 * (n - 1) % 4 for n in range(1, 13)}
    assert {Path(path).name: label for path, label in val.samples} == truth


def test_kaggle_folders_are_found(tmp_path):
    imagenet(tmp_path / "ILSVRC" / "Data" / "CLS-LOC", "kaggle")
    (tmp_path / "ILSVRC" / "Data" / "CLS-LOC" / "LOC_val_solution.csv").rename(tmp_path / "LOC_val_solution.csv")
    assert load(tmp_path).counts == (24, 12)


def test_broken_images_are_skipped_while_training(tmp_path, caplog):
    imagenet(tmp_path)
    for wnid in WNIDS[:2]:
        (tmp_path / "train" / wnid / f"{wnid}_0.JPEG").write_bytes(b"no picture")
    with caplog.at_level(logging.WARNING):
        data, _, _ = train_two_steps(tmp_path, tmp_path / "run")
    assert [path for path, _ in data.skipped] == [f"train/{wnid}/{wnid}_0.JPEG" for wnid in WNIDS[:2]]
    assert len([text for text in caplog.messages if text.startswith("skipped train/")]) == 2
    with refused(r"^at most --data.max_skipped = 1 images .* got 2: train/n01440764/n01440764_0", TooManyFaults):
        list(load(tmp_path, max_skipped=1).train_dataloader())


# Shards


def test_shards_match_webdataset(tmp_path):
    root = imagenet_shards(tmp_path)
    data = load(root)
    train, _ = data.datasets()
    assert data.counts == (24, 16)
    assert data.classes == ("0", "1", "2", "3")
    theirs = []
    for shard in sorted(root.glob("*train*.tar")):
        with shard.open("rb") as file:
            theirs += group_by_keys({**part, "__url__": shard.name} for part in tar_file_iterator(file))
    assert len(theirs) == len(train)
    for index, sample in enumerate(theirs):
        assert train.open(index).read() == sample["jpg"]
        assert train.samples[index][1] == int(sample["cls"])
        assert train.samples[index][0].endswith(f"{sample['__key__']}.jpg")


def test_shards_are_indexed_once_and_again_where_one_changed(tmp_path, monkeypatch):
    root = imagenet_shards(tmp_path / "data")
    first = load(root).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(module, "index_shard", None)
        assert load(root).fingerprint == first
    imagenet_shards(root, per_shard=9)
    assert load(root).counts == (27, 18)


def test_shards_in_train_and_val_folders_are_read(tmp_path):
    imagenet_shards(tmp_path)
    for part in ("train", "val"):
        (tmp_path / f"{part}ing").mkdir()
        for number, shard in enumerate(sorted(tmp_path.glob(f"*-{part}-*.tar"))):
            shard.rename(tmp_path / f"{part}ing" / f"{number}.tar")
    (tmp_path / "LOC_synset_mapping.txt").write_text("".join(f"{wnid} a name\n" for wnid in WNIDS))
    data = load(tmp_path)
    assert data.counts == (24, 16)
    assert data.classes[0] == "n01440764 a name"


def order(shards: torch.Tensor, epoch: int = 0, replicas: int = 1, rank: int = 0, seed: int = 0) -> list[int]:
    return list(ShardOrder(shards, seed, epoch, replicas, rank))


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_shard_order_gives_ranks_equal_parts(replicas):
    shards = torch.arange(7).repeat_interleave(torch.tensor([3, 1, 4, 1, 5, 9, 3]))
    parts = [order(shards, 2, replicas, rank) for rank in range(replicas)]
    assert {len(part) for part in parts} == {-(-26 // replicas)}
    counted = Counter(index for part in parts for index in part)
    assert set(counted) == set(range(26))
    assert sum(counted.values()) - 26 < replicas


def test_shard_order_reads_few_shards_at_a_time():
    shards = torch.arange(4 * SHARDS_AT_ONCE).repeat_interleave(10)
    first = order(shards)
    window = 10 * SHARDS_AT_ONCE
    for start in range(0, len(first), window):
        assert len(set(shards[first[start : start + window]].tolist())) == SHARDS_AT_ONCE
    assert first == order(shards)
    orders = [first, order(shards, epoch=1), order(shards, seed=1_000_003)]
    assert len({tuple(indices) for indices in orders}) == 3
    in_file = sum(b == a + 1 for a, b in pairwise(first))
    assert in_file < len(first) / 10, "examples of a shard stay in the order of the file"


def test_truncated_shard_is_named_and_partly_used(tmp_path, caplog):
    shard = imagenet_shards(tmp_path) / "imagenet-train-000001.tar"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    data = load(tmp_path)
    data.setup()
    assert [name for name, _ in data.skipped] == ["imagenet-train-000001.tar"]
    assert 16 < data.counts[0] < 24
    assert caplog.messages[0].startswith("skipped 1 of ")
    assert len(list(data.train_dataloader().dataset)) == data.counts[0]
    with refused(r"got 1: imagenet-train-000001\.tar", TooManyFaults):
        load(tmp_path, max_skipped=0).setup()


def test_image_without_label_is_named(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(3):
            add(archive, f"{number}.jpg", encoded(noise(1, 40)[0]))
            add(archive, f"{number}.{'txt' if number == 1 else 'cls'}", b"0")
    samples, _, faults = index_shards([path])
    assert faults == [("a.tar/1.jpg", "no label")]
    assert len(samples) == 2


def test_shards_without_images_are_rejected(tmp_path):
    for part in ("train", "val"):
        (tmp_path / f"{part}.tar").write_bytes(b"no tar")
    with refused(r"^shards must hold images with labels .*, found 0: train.tar \("):
        load(tmp_path).setup()


# Training


@pytest.mark.parametrize("write", [imagenet, imagenet_shards], ids=["folders", "shards"])
def test_imagenet_trains_two_steps(tmp_path, write):
    augment = {"flip": True, "randaugment": [1, 5], "mixup": 0.8, "cutmix": 1.0}
    _, classifier, history = train_two_steps(write(tmp_path / "data"), tmp_path / "run", augment=augment)
    assert classifier.trainer.global_step == 2
    assert history.rows[0]["train_loss"] > 0
