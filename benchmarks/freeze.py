"""Measure time and size of a model before and after `absorb` and `freeze`.

    python benchmarks/freeze.py --threads 2

A ViT at 224 pixels, patches of 16, for each encoding: forward passes of the model and of its copies alternate in one
process. Times are the minima over the rounds, ratios the quartiles of those within a round. Sizes are those of all
parameters and buffers. Writes benchmarks/results/freeze.json, which benchmarks/render.py renders. Run it on an idle
machine.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrope as tr
from torchrope.files import write_whole
from torchrope_lab.training.timing import Work, interleaved_seconds, ratio, threads

ENCODINGS = ("axial", "mixed", "comrope-ld", "string", "liere:8", "liere:64")
INPUT_SIZE = (224, 224)
TARGET = Path(__file__).parent / "results" / "freeze.json"


def copies(name: str, dim: int, depth: int) -> dict[str, nn.Module]:
    """Return a ViT with heads of 64 channels, and its copies: `absorb` is for commuting generators only."""
    sizes = dict(dim=dim, depth=depth, num_heads=dim // 64)
    model = tr.ViT(INPUT_SIZE, patch_size=16, num_outputs=0, encoding=name, **sizes).eval()
    absorbed = {"absorb": tr.absorb(model)} if model.encodings[0].relative else {}
    return {"model": model, **absorbed, "freeze": tr.freeze(model, INPUT_SIZE)}


def megabytes(model: nn.Module) -> float:
    """Return the size of all parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())) / 1e6


@torch.no_grad()
def measure(name: str, batch: int, dim: int, depth: int, rounds: int) -> dict[str, Any]:
    """Measure a model and its copies; print and return their times, ratios and sizes."""
    images = torch.randn(batch, 3, *INPUT_SIZE)
    models = copies(name, dim, depth)
    works: dict[str, Work] = {kind: lambda model=model: model(images) for kind, model in models.items()}  # type: ignore[misc]
    seconds = interleaved_seconds(works, rounds=rounds, device="cpu")
    kinds = {
        kind: {
            "milliseconds": 1e3 * min(seconds[kind]),
            "ratio": vars(ratio(seconds[kind], seconds["model"])),
            "megabytes": megabytes(model),
        }
        for kind, model in models.items()
    }
    for kind, of_kind in kinds.items():
        times = f"{of_kind['milliseconds']:8.2f} ms {[f'{value:.3f}' for value in of_kind['ratio'].values()]}"
        print(f"{name:<12}{kind:<8}{times} {of_kind['megabytes']:6.2f} MB", flush=True)
    return {"encoding": name, **kinds}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1, help="images of a forward pass")
    parser.add_argument("--dim", type=int, default=192, help="channels of a token, divisible by 64")
    parser.add_argument("--depth", type=int, default=4, help="layers")
    parser.add_argument("--rounds", type=int, default=51, help="samples of each model")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    options = vars(parser.parse_args(arguments))
    with threads(options.pop("threads")):
        setting = {**options, "threads": torch.get_num_threads(), "torch": torch.__version__}
        rows = [measure(name, **options) for name in ENCODINGS]
    write_whole(TARGET, json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
