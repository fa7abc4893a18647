"""Repeated augmentation: the examples of each step, for any number of processes and accumulated batches."""

import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DistributedSampler

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.repeated import Repeated, example_of

SIZE, STEP = 9000, 2048  # examples of the set, and of one step of the optimiser


def global_order(size: int = SIZE) -> DistributedSampler:
    return DistributedSampler(range(size), num_replicas=1, rank=0, shuffle=True, seed=0)  # type: ignore[arg-type]


def parts(replicas: int, batch_size: int, size: int = SIZE, repeats: int = 3) -> list[list[int]]:
    """Draw the indices of an epoch in every process."""
    return [list(Repeated(global_order(size), repeats, size, batch_size, replicas, rank)) for rank in range(replicas)]


@pytest.mark.parametrize(
    ("replicas", "batch_size"), [(8, 256), (64, 32), (1, 256), (2, 256), (1, 2048)], ids=lambda number: str(number)
)
def test_steps_hold_the_examples_of_deits_sampler(replicas: int, batch_size: int) -> None:
    accumulated = STEP // (replicas * batch_size)
    ours = parts(replicas, batch_size)
    theirs = [list(RepeatAugSampler(range(SIZE), 8, rank)) for rank in range(8)]  # 8 processes with batches of 256
    for step in range(SIZE // STEP):
        rows = slice(step * accumulated * batch_size, (step + 1) * accumulated * batch_size)
        drawn = [index for part in ours for index in part[rows]]
        assert len(set(drawn)) == STEP, "an image occurs twice with the same augmentation"
        examples = sorted(example_of(index, SIZE) for index in drawn)
        assert examples == sorted(index for part in theirs for index in part[step * 256 : (step + 1) * 256])
        assert len(set(examples)) in (683, 684)
        if step == 0:
            assert len(set(examples)) == 683


@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
@pytest.mark.parametrize("size", [1000, 1024, 70])
def test_epoch_keeps_its_length_and_draws_no_index_twice(replicas: int, size: int) -> None:
    drawn = parts(replicas, 16, size)
    assert {len(part) for part in drawn} == {len(DistributedSampler(range(size), replicas, 0))}  # type: ignore[arg-type]
    everything = [index for part in drawn for index in part]
    assert len(set(everything)) == len(everything)
    examples = {example_of(index, size) for index in everything}
    assert len(examples) == -(-len(everything) // 3)


@pytest.mark.parametrize(("replicas", "batch_size"), [(1, 256), (8, 256), (64, 32)])
def test_mixup_mixes_no_image_with_its_copy_and_copies_with_different_images(replicas: int, batch_size: int) -> None:
    """Mixup takes the previous image of the batch."""
    same_pairs = pairs = 0
    for part in parts(replicas, batch_size):
        for start in range(0, len(part) - batch_size, batch_size):
            batch = [example_of(index, SIZE) for index in part[start : start + batch_size]]
            neighbours = [(example, batch[number - 1]) for number, example in enumerate(batch)]
            assert all(example != other for example, other in neighbours)
            pairs += batch_size
            same_pairs += batch_size - len(set(neighbours))
    assert same_pairs < 0.02 * pairs


def digits(batch_size: int = 30, **settings: object) -> DataModule:
    data = make_data(data_config(batch_size=batch_size, augment={"repeats": 3, "flip": True}, **settings))
    data.run_seed = 4
    data.setup()
    return data


def test_resumed_epoch_continues_in_the_middle() -> None:
    whole = list(digits(train_size=200).train_dataloader())
    data = digits(train_size=200)
    data.resume_at = (0, 3)
    rest = list(data.train_dataloader())
    assert len(rest) == len(whole) - 3 == 4
    for ours, expected in zip(rest, whole[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_copies_differ_in_augmentation_at_equal_epoch_length() -> None:
    data = digits(train_size=60, batch_size=60)
    (inputs, labels), *others = data.train_dataloader()
    assert (len(inputs), others) == (60, [])
    [batch] = data.train_dataloader().batch_sampler
    examples = [example_of(index, 60) for index in batch]
    kinds = set()
    for example in set(examples):
        first, *copies = (index for index, other in enumerate(examples) if other == example)
        assert len(copies) == 2
        for copy in copies:
            assert labels[copy] == labels[first]
            mirrored, same = torch.equal(inputs[copy].flip(-1), inputs[first]), torch.equal(inputs[copy], inputs[first])
            assert mirrored or same
            kinds.add(same)
    assert kinds == {True, False}
