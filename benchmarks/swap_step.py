"""Time a step and a forward of a swapped ViT-S of timm relative to the plain one:  python benchmarks/swap_step.py

Models take turns in one process; each time is the smallest of its rounds.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import timm
import torch

import torchrope as tr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=4, help="layers of the model")
    parser.add_argument("--batch", type=int, default=4, help="images of 224 x 224 pixels")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.randn(options.batch, 3, 224, 224)
    models: dict[str, Any] = {}
    for name in ("plain", "axial", "mixed", "liere:8"):
        model = timm.create_model("vit_small_patch16_224", num_classes=10, depth=options.depth).train()
        models[name] = model if name == "plain" else tr.swap(model, name, init="paper")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, model in models.items():
            seconds[name].append((timed(lambda model=model: model(images).sum().backward()), forward(model, images)))
    step, inference = (min(times) for times in zip(*seconds["plain"], strict=True))
    print(f"{'encoding':<12}{'step, ms':>10}{'ratio':>8}{'forward, ms':>14}{'ratio':>8}")
    for name, times in seconds.items():
        own_step, own_forward = (min(one) for one in zip(*times, strict=True))
        print(
            f"{name:<12}{1e3 * own_step:>10.1f}{own_step / step:>8.3f}"
            f"{1e3 * own_forward:>14.1f}{own_forward / inference:>8.3f}"
        )


@torch.no_grad()
def forward(model: Any, images: torch.Tensor) -> float:
    """Seconds of a forward without gradients."""
    return timed(lambda: model(images))


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
