"""Measure the norm of q and k in one pass with the rotation, relative to the norm of PyTorch before the rotation.

    python benchmarks/norms.py --threads 2

Operations: forward and backward pass of RMSNorm and RoPE-Mixed with gradients to all parameters. Training step: forward
and backward pass of timm's ViT-S/16 at 224 pixels with norms of q and k, swapped to RoPE-Mixed; for comparison every
norm gets a forward hook, which prevents fusion. Times are interleaved in one process. Writes
benchmarks/results/norms.json. Run it on an idle machine.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import torchrope as tr
from torchrope.files import write_whole
from torchrope_lab.timing import Quartiles, Work, interleaved_seconds, milliseconds, ratio, threads

SHAPES = ((8, 12, 65, 64), (1, 12, 197, 64), (8, 12, 197, 64), (1, 16, 1024, 64))
TARGET = Path(__file__).parent / "results" / "norms.json"


def operations(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Work]:
    """Return the fused and the unfused operation, forward and backward."""
    _, heads, tokens, head_dim = shape
    encoding = tr.MixedRoPE(num_axes=2, num_heads=heads, head_dim=head_dim)
    positions = tr.grid(tokens, 1)
    norms = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
    q, k = (torch.randn(shape).to(dtype).requires_grad_() for _ in "qk")
    gradients = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    inputs = (q, k, *encoding.parameters(), *(norm.weight for norm in norms))

    def step(rotate: Callable[[], tuple[Tensor, Tensor]]) -> Work:
        return lambda: torch.autograd.grad(rotate(), inputs, gradients)

    def fused() -> tuple[Tensor, Tensor]:
        return tr.rotate(q, k, encoding(positions), norm=norms, layout="bhtd")

    def unfused() -> tuple[Tensor, Tensor]:
        normed_q, normed_k = (norm(x.float()).to(dtype) for norm, x in zip(norms, (q, k), strict=True))
        return tr.rotate(normed_q, normed_k, encoding(positions), layout="bhtd")

    return {"fused": step(fused), "unfused": step(unfused)}


def training_steps(batch: int) -> dict[str, Work]:
    """Return a forward and backward pass of ViT-S/16, with fused norms and without."""
    images = torch.randn(batch, 3, 224, 224)

    def step(model: Any) -> Work:
        return lambda: model(images).square().mean().backward()

    def built() -> Any:
        return tr.swap(timm.create_model("vit_small_patch16_224", qk_norm=True), "mixed")

    unfused = built()
    for block in unfused.blocks:
        for norm in (block.attn.q_norm, block.attn.k_norm):
            norm.register_forward_hook(lambda module, args, output: output)
    return {"fused": step(built()), "unfused": step(unfused)}


def compare(name: str, works: dict[str, Work], rounds: int) -> dict[str, Any]:
    """Measure both works, print and return times and their ratio."""
    seconds = interleaved_seconds(works, rounds=rounds, device="cpu")
    times = {kind: milliseconds(seconds[kind]) for kind in works}
    gain = ratio(seconds["unfused"], seconds["fused"])
    print(f"{name:<44} {shown(times['fused'])} ms fused, {shown(gain)} times as fast", flush=True)
    return {"name": name, "milliseconds": {kind: vars(time) for kind, time in times.items()}, "speedup": vars(gain)}


def shown(value: Quartiles) -> str:
    """Return median and quartiles as text."""
    return f"{value.median:.3g} [{value.low:.3g}, {value.high:.3g}]"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=17, help="samples of each operation")
    parser.add_argument("--training-rounds", type=int, default=9, help="samples of each training step")
    parser.add_argument("--batch", type=int, default=8, help="images of a training step")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    options = parser.parse_args(arguments)
    with threads(options.threads):
        measured = [
            compare(f"{shape}, {str(dtype).removeprefix('torch.')}", operations(shape, dtype), options.rounds)
            for shape in SHAPES
            for dtype in (torch.float32, torch.bfloat16)
        ]
        name = f"training step of ViT-S/16, batch {options.batch}"
        measured.append(compare(name, training_steps(options.batch), options.training_rounds))
    setting = {"threads": options.threads, "torch": torch.__version__, "timm": timm.__version__}
    write_whole(TARGET, json.dumps({"setting": setting, "measured": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
