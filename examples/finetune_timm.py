"""Swap encodings into a trained timm ViT and fine-tune it, on CIFAR-10.

    python examples/finetune_timm.py                         # about a quarter of an hour on two cores
    python examples/finetune_timm.py --train-size 2000 --pretrain-epochs 2 --epochs 1 --out /tmp/finetune.json

One small ViT is trained with its learned position table. Then it is fine-tuned for a few epochs without an encoding
(the control), and with each encoding that `swap` adds at zero generators, which does not change its outputs.
CIFAR is downloaded (170 MB).
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import timm
from torch import nn

import torchrope as tr
from torchrope.files import write_whole
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.provenance import provenance
from torchrope_lab.settings.run_config import OptimConfig
from torchrope_lab.statistics import accuracy_interval, difference_interval
from torchrope_lab.training.classifier import Classifier
from torchrope_lab.training.evaluate import predict
from torchrope_lab.training.run import QUIET, lightning_quiet

IMAGES = ("cifar10", "cifar100", "digits")
"""Images that need no folder."""


def main() -> None:
    options = read_options()
    data = make_data(data_config(options.data, train_size=options.train_size, val_size=options.val_size))
    data.setup()
    pl.seed_everything(options.seed, verbose=False)
    plain = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=data.input_size,
        patch_size=options.patch_size,
        in_chans=data.in_channels,
        num_classes=data.num_classes,
        embed_dim=96,
        depth=4,
        num_heads=4,
    )
    fit(plain, data, lr=1e-3, epochs=options.pretrain_epochs, seed=options.seed)
    hits = {"trained": correct(plain, data)}
    print(f"{'model':22} top-1, % [95 % interval]   gain over trained, points [95 % interval]")
    print_accuracy("trained", hits)
    for encoding in [None, *options.encodings.split(",")]:
        model = copy.deepcopy(plain)
        if encoding is not None:
            tr.swap(model, encoding)
            assert np.array_equal(correct(model, data), hits["trained"])  # generators are zero
        fit(model, data, lr=options.lr, epochs=options.epochs, seed=options.seed)
        name = encoding or "without an encoding"
        hits[name] = correct(model, data)
        print_accuracy(name, hits)
    rows = [
        {"model": name, "top1": float(hit.mean()), "interval": list(accuracy_interval(hit)[1:])}
        for name, hit in hits.items()
    ]
    results = {"options": vars(options), "provenance": provenance(), "rows": rows}
    write_whole(Path(options.out), json.dumps(results, indent=1) + "\n")


def fit(model: nn.Module, data: DataModule, *, lr: float, epochs: int, seed: int) -> None:
    """Train with AdamW, warm-up and cosine decay, without weight decay for encodings."""
    pl.seed_everything(seed, verbose=False)
    optim = OptimConfig(lr=lr, epochs=epochs)
    with lightning_quiet():
        trainer = pl.Trainer(max_epochs=epochs, limit_val_batches=0, enable_checkpointing=False, **QUIET)
        trainer.fit(Classifier(model, data.num_classes, optim), datamodule=data)


def correct(model: nn.Module, data: DataModule) -> np.ndarray:
    """Return 1.0 for a correct and 0.0 for a wrong prediction, for every held-out example."""
    labels, logits = predict(model, data)
    return (logits.argmax(dim=-1) == labels).double().numpy()


def print_accuracy(name: str, hits: dict[str, np.ndarray]) -> None:
    """Print a row: accuracy, and the gain over the trained model, with 95 % intervals."""
    _, low, high = accuracy_interval(hits[name])
    gain, less, more = difference_interval(hits[name], hits["trained"])
    change = f"{100 * gain:+5.2f} [{100 * less:+5.2f}, {100 * more:+5.2f}]"
    print(
        f"{name:22} {100 * hits[name].mean():5.2f} [{100 * low:5.2f}, {100 * high:5.2f}]           {change}", flush=True
    )


def read_options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", choices=IMAGES)
    parser.add_argument("--train-size", type=int, default=12000)
    parser.add_argument("--val-size", type=int)
    parser.add_argument("--patch-size", type=int, default=4)
    parser.add_argument("--encodings", default="mixed,liere:8,comrope-ld:8", help="names joined by commas")
    parser.add_argument("--pretrain-epochs", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=6, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=3e-4, help="of fine-tuning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/finetune.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
