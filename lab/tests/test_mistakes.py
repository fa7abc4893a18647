"""Errors on the command line and in files: one line on stderr that names the option as the user wrote it."""

from pathlib import Path

import pytest
from labs import Run

FILES = {
    "empty.yaml": "",
    "list.yaml": "- a\n- b\n",
    "broken.yaml": "data: {name: [digits\n",
    "type.yaml": "optim: {epochs: many}\n",
    "key.yaml": "optim: {epoch: 3}\n",
    "scalar.yaml": "optim: 3\n",
    "range.yaml": "optim: {lr: -1}\n",
    "data.yaml": "data: {name: digit}\n",
    "encodings.yaml": "encodings: [mixd]\n",
    "encoding.yaml": "encoding: mixd\n",
    "callback.yaml": "trainer: {callbacks: [{class_path: os.system}]}\n",
    "binary.yaml": "\xff\xfe\0",
    "setting.yaml": "data: {name: volumes, framess: 4}\n",
    "windows.yaml": "data: {windows: [[1, 2]]}\n",
}

# What is typed behind the command, the option as the message must name it, the value, and the name it must suggest.
OF_TRAINING: list[tuple[str, str, str, str]] = [
    ("--zzz 3", "--zzz", "--zzz", ""),
    ("--epoch 3", "--epoch", "--epoch", "--epochs"),
    ("--lr 3", "--lr", "--lr", "--optim.lr"),
    ("--optim.weight-decay 0", "--optim.weight-decay", "--optim.weight-decay", "--optim.weight_decay"),
    ("--optim.epoch 3", "--optim.epoch", "--optim.epoch", "--optim.epochs"),  # no abbreviations
    ("--epochs many", "--epochs", "'many'", ""),
    ("--epochs -3", "--epochs", "got -3", ""),
    ("--epochs", "--epochs", "requires a value", ""),
    ("--model.depth --epochs=1", "--model.depth", "requires a value", ""),
    ("--model mine.yaml", "no option --model", "", "--model.dim"),
    ("--optim.optimizer adamww", "--optim.optimizer", "'adamww'", "adamw"),
    ("--run.logs csv,tensorbord", "--run.logs[1]", "'tensorbord'", "tensorboard"),
    ("--model.share_heads perhaps", "--model.share_heads", "'perhaps'", ""),
    ("--model.patch_size 0", "--model.patch_size", "[0]", ""),
    ("--data digit", "--data", "'digit'", "digits"),
    ("--data.frames 4", "--data.frames", "digits", ""),
    ("--data cifar10 --data.augment.erasing 2", "--data.augment.erasing", "got 2", ""),
    ("--recipe digit", "--recipe", "'digit'", "digits"),
    ("--recipe liere-cifar100-vit-b --data digits", "in recipe liere-cifar100-vit-b", "ucf101, got --data digits", ""),
    ("digits", "options begin with --", "'digits'", ""),
    ("--config missing.yaml", "--config", "missing.yaml", ""),
    ("--config empty.yaml", "--config", "empty.yaml with nothing", ""),
    ("--config=list.yaml", "--config", "list.yaml with list", ""),
    ("--config broken.yaml", "--config", "broken.yaml", ""),
    ("--config type.yaml", "optim.epochs in type.yaml", "'many'", ""),
    ("--config key.yaml", "optim.epoch in key.yaml", "optim.epoch", "optim.epochs"),
    ("--config scalar.yaml", "optim in scalar.yaml", "got 3", ""),
    ("--config range.yaml", "optim.lr in range.yaml", "got -1", ""),
    ("--config range.yaml --optim.lr=-2", "--optim.lr", "got -2", ""),  # what comes last counts
    ("--config data.yaml", "data.name in data.yaml", "'digit'", "digits"),
    ("--config binary.yaml", "--config", "binary.yaml", ""),
    ("--config setting.yaml", "no setting data.framess in setting.yaml", "", "data.frames"),
    ("--config windows.yaml", "data.windows in windows.yaml is for volumes, rsna", "got --data digits", ""),
    ("--data volumes --data.framess 3", "there is no option --data.framess", "", "--data.frames"),
    ("--data digits --data.root x", "--data.root is for images, ", "", ""),
    ("--data videos --data.windows [[1,2]]", "--data.windows is for volumes, rsna", "got --data videos", ""),
    ("--model.drop_path 1.5", "--model.drop_path must be at least 0 and below 1", "got 1.5", ""),
]
OF_SEVERAL = [
    ("--seed 1", "--seed", "--seed", "--seeds"),
    ("--encoding mixed", "--encoding", "--encoding", "--encodings"),
    ("--encodings mixd", "--encodings", "'mixd'", "mixed"),
    ("--encodings mixed,mixed", "--encodings", "mixed,mixed", ""),
    ("--encodings liere:8,liere:08", "block size must be a whole number of 2 or more", "'liere:08'", ""),
    ("--config encodings.yaml", "encodings in encodings.yaml", "'mixd'", "mixed"),
    ("--slurm time", "--slurm", "'time'", ""),
]
OF_ONE = [
    ("--encoding mixd", "--encoding", "'mixd'", "mixed"),
    ("--encodings mixed", "--encodings", "--encodings", "--encoding"),
    ("--config encoding.yaml", "encoding in encoding.yaml", "'mixd'", "mixed"),
    ("--config encodings.yaml", "encodings in encodings.yaml", "encodings", "encoding"),
    ("--config callback.yaml", "trainer.callbacks in callback.yaml", "'os.system'", ""),
    ("--trainer.devicess 3", "--trainer.devicess", "--trainer.devicess", "--trainer.devices"),
    ("--trainer.precision 16-mixed", "--trainer.precision", "use --run.precision", ""),
    ("--trainer.devices 5 --trainer.accelerator gpu", "--trainer options must fit this machine", "", ""),
    ("--trainer.limit_val_batches 2", "there is no option --trainer.limit_val_batches", "", ""),  # nor parts of epochs
    ("--trainer.check_val_every_n_epoch 2", "there is no option --trainer.check_val_every_n_epoch", "", ""),
    ("--data images --data.root /nowhere", "root", "/nowhere", ""),
]
OTHERS: list[tuple[str, str, str, str]] = [
    ("trian", "torchrope: commands are", "'trian'", "train"),
    ("study", "the name of a study", "got none", ""),
    ("study --epochs 3", "the name of a study", "--epochs 3", ""),
    ("study accurac", "studies are", "'accurac'", "accuracy"),
    ("study accuracy --reference mixd", "--reference", "'mixd'", "mixed"),
    ("study sharing,pooling --reference mixed", "--reference", "sharing, pooling", ""),
    ("study accuracy --checkpoint x", "--checkpoint", "accuracy", ""),
    ("study fourier --checkpoint nowhere", "--checkpoint", "nowhere", ""),
    ("study fourier --checkpoint a --checkpoint b,a", "--checkpoint", "a,b,a", ""),
    ("study fourier --checkpoint a --checkpoint", "--checkpoint", "requires a value", ""),
    ("study accuracy,shuffle --data images --data.root /nowhere", "root", "/nowhere", ""),
    ("study accuracy --sizes 16", "--sizes is for the studies resolution", "got accuracy", ""),
    ("study resolution --sizes 16,0", "--sizes[1] must be 1 or more", "got 0", ""),
    ("study complexity --seeds 7", "--seeds", "is for a study that trains on data", ""),
    ("study fourier --data digits", "--data", "is for a study that trains on data", ""),
    ("study fourier,complexity --epochs 7", "--epochs", "is for a study that trains on data", ""),
    ("study probes --probes.axes 1 --probes.abilities far,ring", "ring needs 2 axes", "got --probes.axes 1", ""),
    ("study probes --probes.abilities nothing", "abilities", "nothing", ""),
    ("study probes --encodings nd", "none of the encodings can be probed", "nD-RoPE is left out", ""),
    ("compare --help dat", "--help takes all, data, model, optim, run or nothing", "'dat'", ""),
    ("compare --data images", "root", "", ""),
    ("compare --model.num_heads 7", "dim must be divisible by num_heads = 7", "got 64", ""),
    ("compare --encodings comrope-ap:16", "head_dim must be divisible by num_axes·block_size = 32", "got 16", ""),
    ("compare --data motion --model.patch_size [3]", "--model.patch_size 3, 3, 3", "got 5, 20, 20 (time, height,", ""),
    ("compare --out /dev/full", "--out", "/dev/full", ""),
    ("compare --encodings ,", "--encodings must name 1 or more", "an empty list", ""),
    ("compare --encodings none mixed", "lists are written as a,b", "'mixed'", ""),
    ("compare --model.head dino", "--model.head is not an option of torchrope compare", "", ""),
    ("compare --reference mixed", "--reference", "--reference", ""),
    ("evaluate", "folder", "required", ""),
    ("evaluate /nowhere", "folder", "/nowhere", ""),
    ("evaluate . --crop 0", "--crop", "got 0", ""),
    ("evaluate . --scales a,b", "--scales[0]", "'a'", ""),
    ("evaluate . --crp 3", "--crp", "--crp", "--crop"),
    ("evaluate . --json=3", "--json", "'3'", ""),
    ("report /nowhere", "report", "/nowhere", ""),
    ("report a b", "unrecognized arguments", "b", ""),
    ("recipes digit", "NAME", "'digit'", "digits"),
]
SHARED_BY_ALL = range(0, len(OF_TRAINING), 6)  # compare, study and train parse alike: the whole table by one of them
MISTAKES = [
    ("compare --data images --data.root /nowhere --out /proc/x", "--out must be a folder", "/proc/x", ""),
    ("train --data images --data.root /nowhere --out /dev/null/x", "--out must be a folder", "/dev/null/x", ""),
    ("study accuracy --data images --data.root /nowhere --out /proc", "--out must be a folder", "/proc", ""),
    *((f"compare {typed}", *told) for typed, *told in (*OF_TRAINING, *OF_SEVERAL)),
    *((f"train {typed}", *told) for typed, *told in (*(OF_TRAINING[at] for at in SHARED_BY_ALL), *OF_ONE)),
    *((f"study accuracy {typed}", *told) for typed, *told in (*(OF_TRAINING[at] for at in SHARED_BY_ALL), *OF_SEVERAL)),
    *OTHERS,
]


@pytest.mark.parametrize(("typed", "option", "value", "suggested"), MISTAKES, ids=[typed for typed, *_ in MISTAKES])
def test_mistake_is_one_line_with_the_option_as_typed_and_the_value(
    typed: str, option: str, value: str, suggested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    monkeypatch.chdir(tmp_path)
    status, printed, error = run(*typed.split())
    assert status == 2
    assert printed in ("", "probes:\n")  # the study that refuses what it alone knows
    assert error.startswith("torchrope")
    assert error.count("\n") == 1
    assert option in error
    assert value in error
    assert error.endswith(f"did you mean {suggested!r}?\n") if suggested else "did you mean" not in error
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
