"""Measure how the time of LieRE's rotations with large blocks grows with the number of tokens, on the CPU.

    python benchmarks/exponentials.py

Positions: a lattice from the origin, one around it, on which more tokens are multiples of others, and random ones.
Writes benchmarks/results/exponentials.json. Run it on an idle machine of 4 GB.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchrope as tr
from torchrope.files import write_whole
from torchrope_lab.training.timing import Work, interleaved_seconds, milliseconds, threads

TARGET = Path(__file__).parent / "results" / "exponentials.json"
POSITIONS: dict[str, Callable[[int], Tensor]] = {
    "lattice": lambda side: tr.grid(side, side, spacing=1 / side),
    "lattice around the origin": lambda side: tr.grid(side, side, spacing=2 / side, origin=-1.0),
    "random": lambda side: torch.rand(side * side, 2),
}


def passes(block: int, positions: Tensor) -> dict[str, Work]:
    """Return the forward pass of one head of 64 channels, and both passes."""
    encoding: Any = tr.LieRE(num_axes=2, num_heads=1, head_dim=64, block_size=block)

    def both() -> None:
        tangent = encoding(positions)._tangent
        torch.autograd.grad(tangent, encoding.upper, torch.ones_like(tangent))

    return {"forward": torch.no_grad()(lambda: encoding(positions)), "forward and backward": both}


def measure(kind: str, tokens: int, block: int, rounds: int) -> list[dict[str, Any]]:
    """Measure, print and return the times of both passes."""
    works = passes(block, POSITIONS[kind](math.isqrt(tokens)))
    seconds = interleaved_seconds(works, rounds=rounds, device="cpu")
    rows = []
    for each in works:
        rows.append({"block": block, "positions": kind, "pass": each, "tokens": tokens,
                     "milliseconds": vars(milliseconds(seconds[each]))})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536], help="square numbers")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64], help="sizes of blocks")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each time")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    options = parser.parse_args(arguments)
    with threads(options.threads):
        measured = [
            row
            for block in options.blocks
            for kind in POSITIONS
            for tokens in options.tokens
            for row in measure(kind, tokens, block, options.rounds)
        ]
    setting = {"threads": options.threads, "torch": torch.__version__}
    write_whole(TARGET, json.dumps({"setting": setting, "measured": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
