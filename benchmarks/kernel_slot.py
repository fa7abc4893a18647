"""Time a training step of a text model with the rotation of transformers and with the kernel slot's:
python benchmarks/kernel_slot.py

The layer is bound to the models' function as the package kernels binds it. Both take turns in one process; the time is
the median of the rounds, the ratio the median and the quartiles of the rounds' ratios.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import transformers
from torch import nn

from torchrope.integrations.transformers_kernels import RotaryPosEmb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 128,
        vocab_size=1000,
    )
    model = transformers.LlamaForCausalLM(config).to(options.device, getattr(torch, options.dtype)).train()
    words = torch.randint(0, 1000, (1, options.tokens), device=options.device)
    seconds: dict[str, list[float]] = {"own function": [], "kernel slot": []}
    step(model, words)  # the first one allocates
    for _ in range(options.rounds):
        seconds["own function"].append(step(model, words))
        with slot_bound(model):
            seconds["kernel slot"].append(step(model, words))
    print(f"{'rotation':<16}{'step, ms':>10}  ratio (quartiles)")
    for name, times in seconds.items():
        ratios = [time / first for time, first in zip(times, seconds["own function"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:<16}{1e3 * statistics.median(times):>10.1f}  {middle:.3f} ({low:.3f} to {high:.3f})")


def step(model: Any, words: torch.Tensor) -> float:
    """Seconds of a forward and backward."""
    model.zero_grad()
    start = time.perf_counter()
    model(words, labels=words).loss.backward()
    if words.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def slot_bound(model: nn.Module, name: str = "apply_rotary_pos_emb") -> Iterator[nn.Module]:
    """Bind the slot's layer to the rotation of a model's module, and yield the module that is called."""
    modeling = sys.modules[type(model).__module__]
    before = getattr(modeling, name)
    slot = module_of(before) if isinstance(before, FunctionType) else before
    slot.forward = MethodType(RotaryPosEmb.forward, slot)
    setattr(modeling, name, slot)
    try:
        yield slot
    finally:
        del slot.forward
        setattr(modeling, name, before)


def module_of(function: Any) -> nn.Module:
    """Make a module of a function, as the decorator of the package kernels does."""

    class Function(nn.Module):
        def forward(self, *arguments: Any, **settings: Any) -> Any:
            return function(*arguments, **settings)

    return Function()


if __name__ == "__main__":
    main()
