"""Time swapped models relative to the same model without an encoding:  python benchmarks/inference.py

A ViT-Ti of timm at batch 1 (swapped, and frozen), torchrope's ViT of that size, a Llama of 30 layers that generates a
token with a cache, a training step of a ViT-S. Models take turns of five forwards, as a model in use has the caches to
itself; ratios are those of each round. "copied" is the model with q and k of each layer copied: no rotation that writes
both can cost less. Writes benchmarks/results/inference.json. Run it on an idle machine.
"""

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import transformers

import torchrope as tr
from torchrope.files import write_whole
from torchrope_lab.training.timing import interleaved, ratio, seconds_per_call

TARGET = Path(__file__).parent / "results" / "inference.json"
IMAGE = (3, 224, 224)


def swapped(model: Any, name: str, *, frozen: bool = False) -> Any:
    """Return a swapped copy of a model, with generators that are not zero."""
    torch.manual_seed(0)
    model = tr.swap(copy.deepcopy(model), name, init="paper")
    return tr.freeze(model, torch.zeros(1, *IMAGE)) if frozen else model


def copied(model: Any) -> Any:
    """Return a copy of a model of timm whose layers copy q and k where a swapped one rotates them."""
    model = copy.deepcopy(model)
    for norm in (norm for block in model.blocks for norm in (block.attn.q_norm, block.attn.k_norm)):
        norm.register_forward_hook(lambda norm, inputs, output: output.clone())
    return model


def images() -> dict[str, Callable[[], object]]:
    """A forward of one image in a ViT-Ti."""
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
    models = {"plain": plain, "copied": copied(plain), "mixed": swapped(plain, "mixed")}
    models |= {f"{name}, frozen": swapped(plain, name, frozen=True) for name in ("mixed", "comrope-ap:8", "liere:8")}
    return {name: partial(model, torch.randn(1, *IMAGE)) for name, model in models.items()}


def built() -> dict[str, Callable[[], object]]:
    """A forward of one image in torchrope's ViT of the same size, with each encoding."""
    x = torch.randn(1, *IMAGE)
    vit = partial(tr.ViT, IMAGE[1:], patch_size=16, num_outputs=10, dim=192, depth=12, num_heads=3)
    return {name: partial(vit(encoding=name).eval(), x) for name in ("none", "axial", "mixed", "liere:8")}


def tokens() -> dict[str, Callable[[], object]]:
    """One further token of a Llama after a prompt of 64, from a cache that is cropped again."""
    sizes: Any = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
    config = transformers.LlamaConfig(vocab_size=1000, num_hidden_layers=30, **sizes)
    plain = transformers.LlamaForCausalLM(config).eval()
    models = {"plain": plain, "mixed": tr.swap(copy.deepcopy(plain), "mixed")}
    prompt, token = torch.randint(1000, (1, 64)), torch.tensor([[7]])

    def generate(model: Any, cache: Any) -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    caches = {name: model(prompt, use_cache=True).past_key_values for name, model in models.items()}
    return {name: partial(generate, model, caches[name]) for name, model in models.items()}


def steps() -> dict[str, Callable[[], object]]:
    """A forward and backward pass of 8 images in a ViT-S."""
    plain = timm.create_model("vit_small_patch16_224", num_classes=10).train()
    models = {"plain": plain, "copied": copied(plain), **{name: swapped(plain, name) for name in ("axial", "mixed")}}
    return {name: partial(step, model, torch.randn(8, *IMAGE)) for name, model in models.items()}


def step(model: Any, x: torch.Tensor) -> None:
    """Compute gradients, which are not kept."""
    model(x).sum().backward()
    model.zero_grad()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    measured: dict[str, Any] = {"threads": given.threads, "rounds": given.rounds, "rows": []}
    titles = ("ViT-Ti, one image", "torchrope's ViT-Ti", "Llama, one token", "ViT-S, training step")
    for build, title in zip((images, built, tokens, steps), titles, strict=True):
        with torch.set_grad_enabled(build is steps):
            turns = {n: partial(seconds_per_call, f, 1 if build is steps else 5, "cpu") for n, f in build().items()}
            times = interleaved(turns, given.rounds)
        for name, own in times.items():
            cost, ms = ratio(own, next(iter(times.values()))), 1e3 * median(own)
            quartiles = [cost.low, cost.median, cost.high]
            measured["rows"].append({"model": title, "encoding": name, "ms": ms, "ratio": quartiles})
            shown = f"{ms:>8.2f} ms  {cost.median:.3f} ({cost.low:.3f} to {cost.high:.3f})"
            print(f"{title:<22}{name:<22}{shown}", flush=True)
    write_whole(given.out, json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
