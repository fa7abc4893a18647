"""Measure single calls with a fresh and with a shared rotation, relative to another version of the library.

    python benchmarks/calls.py --against OTHER/src

A fresh rotation is made by the encoding in each call, a shared one once before, with cos and sin tabulated where there
are any. "step" is forward and backward with gradients to q, k and the parameters. Each round runs both versions, one
after the other, in processes of their own; the difference of a round is that of its medians. Writes
benchmarks/results/calls.json. Run it on an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

import torchrope as tr
from torchrope.files import write_whole

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "benchmarks" / "results" / "calls.json"
SHAPES = (
    ((1, 4, 1, 64), "float32"), ((1, 12, 197, 64), "float32"), ((1, 12, 197, 64), "bfloat16"),
    ((8, 12, 197, 64), "float32"), ((1, 16, 1024, 64), "bfloat16"),
)  # fmt: skip
ENCODINGS = ("mixed", "comrope-ap:8", "liere:8", "string")


def measure(seconds: float) -> list[dict[str, Any]]:
    """Return the median time in microseconds of each call in this process."""
    rows = []
    for name in ENCODINGS:
        for shape, dtype in SHAPES if name == "mixed" else SHAPES[:2]:
            _, heads, tokens, head_dim = shape
            encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=heads, head_dim=head_dim)
            positions = tr.grid(tokens, 1)
            q, k, of_q, of_k = torch.randn(4, *shape).to(getattr(torch, dtype))
            with torch.no_grad():
                rotation = encoding(positions)
                rotation = getattr(rotation, "tabulated", lambda made=rotation: made)()
                fresh = _median(lambda: tr.rotate(q, k, encoding(positions), layout="bhtd"), seconds)  # noqa: B023
                shared = _median(lambda: tr.rotate(q, k, rotation, layout="bhtd"), seconds)  # noqa: B023
            inputs = q.requires_grad_(), k.requires_grad_(), *encoding.parameters()

            def step() -> None:
                rotated = tr.rotate(q, k, encoding(positions), layout="bhtd")  # noqa: B023
                torch.autograd.grad(rotated, inputs, (of_q, of_k))  # noqa: B023

            times = {"fresh": fresh, "shared": shared, "step": _median(step, seconds)}
            rows += [
                {"encoding": name, "shape": shape, "dtype": dtype, "call": call, "us": us} for call, us in times.items()
            ]
    return rows


def _median(work: Any, seconds: float) -> float:
    for _ in range(20):
        work()
    times, end = [], perf_counter() + seconds
    while perf_counter() < end or len(times) < 20:
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return 1e6 * median(times)


def compare(other: Path, rounds: int, seconds: float, threads: int) -> list[dict[str, Any]]:
    """Run both versions in turn; return the times of each call, and the quartiles of the differences."""
    found: dict[str, list[list[dict[str, Any]]]] = {"this": [], "other": []}
    for done in range(rounds):
        for name, source in (("other", other), ("this", ROOT / "src")):
            command = [sys.executable, __file__, "--worker", str(seconds)]
            environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads)}
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            found[name].append(json.loads(output))
        print(f"round {done + 1} of {rounds}", flush=True)
    rows = []
    for mine, others in zip(zip(*found["this"], strict=True), zip(*found["other"], strict=True), strict=True):
        difference = [one["us"] - two["us"] for one, two in zip(mine, others, strict=True)]
        low, middle, high = quantiles(difference, n=4)
        times = {"us": median(row["us"] for row in mine), "other_us": median(row["us"] for row in others)}
        rows.append({**mine[0], **times, "difference": [low, middle, high]})
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="folder src of the other version, with built kernels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="per call and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        print(json.dumps(measure(given.worker)))
        return
    rows = compare(given.against, given.rounds, given.seconds, given.threads)
    write_whole(TARGET, json.dumps({"threads": given.threads, "rounds": given.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
