"""Training at mixed input sizes: size of each step, rendering or resampling of inputs, and resuming."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from processes import data_of
from pytorch_lightning.callbacks import Callback
from small_runs import SWIN, AtBatch, Killed, changed, same_weights
from torch.utils.data import Dataset

from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.mixed_sizes import Resampled
from torchrope_lab.data.transforms import resize
from torchrope_lab.engine.runs import Run
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.run import load, train
from torchrope_lab.training.sizes import size_of, training_sizes

SIZES = [6, 8, 10]
small_run = partial(
    small_runs.small_run, encoding="learned+liere:4", train_size=60, patch_size=[2], dropout=0.1, train_sizes=SIZES
)


class InputRecorder(Callback):
    """Record the inputs of every batch."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, _: Any, batch: Any, *__: Any) -> None:
        self.inputs.append(batch[0].clone())

    @property
    def sides(self) -> list[int]:
        return [each.shape[-1] for each in self.inputs]


def trained(config: RunConfig, folder: Path) -> tuple[Any, InputRecorder]:
    seen = InputRecorder()
    module, _ = small_runs.trained(config, folder, callbacks=[seen])
    return module, seen


def test_sizes_are_drawn_per_step_and_not_in_validation(tmp_path: Path) -> None:
    data, seen = data_of(small_run()), InputRecorder()
    module, _ = train(small_run(epochs=6), data, tmp_path, callbacks=[seen])
    assert {*seen.sides} == {*SIZES}
    assert seen.sides[:6] != seen.sides[6:12]  # each epoch draws other sizes
    assert len(seen.sides) == 36
    assert len(seen.inputs[-1]) == 10
    assert {inputs.shape[2:] for inputs, _ in data.train_dataloader()} == {(8, 8)}  # later loaders have the data's size
    assert tuple(module.model.absolute.table.shape) == (4, 4, 16)
    assert load(tmp_path)[0].optim.train_sizes == SIZES


def test_drawn_sizes_depend_on_seed_and_not_on_encoding(tmp_path: Path) -> None:
    one, other = (trained(small_run(encoding=name), tmp_path / name)[1].sides for name in ("mixed", "learned"))
    again = trained(small_run(encoding="mixed", seed=2), tmp_path / "again")[1].sides
    assert one == other != again


def test_images_are_resampled_after_augmentation(tmp_path: Path) -> None:
    config = small_run(epochs=1, augment={"flip": True, "mixup": 0.4})
    mixed = trained(config, tmp_path / "mixed")[1].inputs
    plain = trained(changed(config, train_sizes=[]), tmp_path / "plain")[1].inputs
    assert {each.shape[-1] for each in plain} == {8}
    for one, other in zip(mixed, plain, strict=True):
        torch.testing.assert_close(one, resize(other, tuple(one.shape[2:])))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["learned+liere:4", "comrope-ld:4"])
def test_run_resumed_within_epoch_is_bit_identical(tmp_path: Path, encoding: str) -> None:
    config = small_run(encoding=encoding, ema_decay=0.9, checkpoint_every=1)
    whole, every = trained(config, tmp_path / "whole")
    with pytest.raises(Killed):
        small_runs.trained(config, tmp_path / "killed", callbacks=[AtBatch(10)])
    resumed, rest = trained(config, tmp_path / "killed")
    assert rest.sides == every.sides[9:]
    assert all(map(torch.equal, every.inputs[9:], rest.inputs))
    assert same_weights(whole, resumed)


def test_accumulated_batches_of_a_step_have_one_size(tmp_path: Path) -> None:
    whole, seen = trained(small_run(), tmp_path / "whole")
    parts, halves = trained(small_run(batch_size=5, effective_batch=10), tmp_path / "parts")
    assert halves.sides == [side for side in seen.sides for _ in range(2)]
    assert whole.model.head.weight.shape == parts.model.head.weight.shape


def test_processes_share_size_and_examples_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(small_run())
    data.train_sizes = training_sizes(OptimConfig(train_sizes=SIZES), small_run().model, data)
    alone = list(data.train_dataloader())
    data.config.batch_size = 5
    shares = []
    for rank in range(2):
        monkeypatch.setattr(data, "_position_in_training", lambda rank=rank: (0, 2, rank))
        shares.append(list(data.train_dataloader()))
    assert len({inputs.shape[-1] for inputs, _ in alone}) > 1
    for (inputs, labels), *parts in zip(alone, *shares, strict=True):
        together = torch.stack([part for part, _ in parts], dim=1).flatten(0, 1)  # interleaved
        assert torch.equal(together, inputs)
        assert torch.equal(torch.stack([own for _, own in parts], dim=1).flatten(), labels)


def test_inputs_do_not_depend_on_precision_or_workers(tmp_path: Path) -> None:
    one, other = (
        trained(small_run(epochs=1, **settings), tmp_path / str(number))[1].inputs
        for number, settings in enumerate([{}, {"workers": 1, "precision": "bf16"}])
    )
    assert len(one) == len(other) == 6
    assert all(map(torch.equal, one, other))


def test_swin_trains_across_sizes(tmp_path: Path) -> None:
    config = small_runs.small_run(encoding="bias+mixed", train_sizes=SIZES, model=SWIN)
    module, seen = trained(config, tmp_path)
    assert {*seen.sides} == {*SIZES}
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_size_of_keeps_time_and_depth_and_the_ratio_of_other_axes() -> None:
    data = make_data(data_config("motion"))
    assert size_of(24, data, (1, 4, 4), "--sizes") == (data.input_size[0], 24, 24)
    data.axes, data.input_size = ("depth", "height", "width"), (32, 224, 224)
    assert size_of(112, data, (4, 16, 16), "--sizes") == (32, 112, 112)
    data.axes, data.input_size = ("height", "width"), (32, 64)
    assert size_of(128, data, (16, 16), "--sizes") == (64, 128)
    assert size_of(96, data, (20, 16), "--sizes") == (40, 96)  # 48 pixels rounded to whole patches


def test_voxel_spacings_follow_the_size() -> None:
    class Volumes(Dataset):
        def __getitems__(self, indices: list[int]) -> tuple:
            count = len(indices)
            return torch.zeros(count, 1, 4, 8, 8), torch.zeros(count), torch.tensor([[5.0, 1.0, 0.5]]).expand(count, 3)

    inputs, _, spacing = Resampled(Volumes(), (2, 16, 16)).__getitems__([0, 1])
    assert inputs.shape == (2, 1, 2, 16, 16)
    assert spacing.tolist() == [[10.0, 0.5, 0.25]] * 2


def test_sizes_not_divisible_by_the_patch_raise_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--model.patch_size", "2", "--optim.train_sizes", "6,9", "--out", str(tmp_path / "out")]
    for command in (["train"], ["compare"], ["study", "accuracy"]):
        assert main([*command, *small]) == 2
        assert "--optim.train_sizes must be multiples of the patch size, 2 pixels, got 9" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sizes_raise_for_dense_heads_and_time_series() -> None:
    optim = OptimConfig(train_sizes=[64, 96])
    rule = r"^--optim.train_sizes requires model.head classify, got 64, 96 with upernet$"
    with pytest.raises(ValueError, match=rule):
        RunConfig(data=data_config("segments"), model=ModelConfig(head="upernet"), optim=optim)
    data = data_of(small_run())
    data.axes, data.input_size = ("time",), (8,)
    rule = r"^--optim.train_sizes is for data whose last axis is not time, got axes time$"
    with pytest.raises(ValueError, match=rule):
        training_sizes(OptimConfig(train_sizes=[8]), small_run().model, data)


def test_sizes_change_the_key_of_a_run_only_if_given() -> None:
    plain = replace(small_run(), optim=OptimConfig(epochs=2, warmup_epochs=1))
    assert Run(small_run()).key != Run(plain).key
    assert Run(small_run(train_sizes=[])).key == Run(plain).key
