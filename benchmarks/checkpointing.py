"""Measure the memory of LieRE's rotations in a ViT-B, and what checkpointed training costs to compute them again.

    python benchmarks/checkpointing.py

At 224 pixels, with blocks of 64, on the CPU. Memory is how far one pass of one image raises the high-water mark of a
fresh process (VmHWM of Linux) above that of the model and its gradients. Times are of training steps that alternate in
one process, so that other load affects all equally. "rotations kept" is a checkpointed step that keeps the rotations of
all layers. Writes benchmarks/results/checkpointing.json, which benchmarks/render.py renders.
"""

import argparse
import json
import re
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import torchrope as tr
from torchrope.files import write_whole
from torchrope.models import vit
from torchrope.models.layers import run_layer
from torchrope_lab.training.timing import interleaved_seconds, milliseconds, ratio, threads

TARGET = Path(__file__).parent / "results" / "checkpointing.json"
ENCODING, INPUT_SIZE = "liere:64", (224, 224)
CASES = ("inference", "training", "checkpointed", "rotations kept")


def passed(case: str, encoding: str, batch: int, **sizes: int) -> Callable[[], None]:
    """Return a pass of a ViT: forward, or forward and backward."""
    model = tr.ViT(INPUT_SIZE, patch_size=16, encoding=encoding, checkpoint_layers=case in CASES[2:], **sizes)
    images = torch.randn(batch, 3, *INPUT_SIZE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def work() -> None:
        with torch.set_grad_enabled(case != "inference"), patch.object(vit, "run_layer", run):
            output = model(images).sum()
            if case != "inference":
                output.backward()

    def run(layer: Any, x: Any, rotations: Any, **others: Any) -> Any:
        made = rotations() if case == "rotations kept" else None
        return run_layer(layer, x, rotations if made is None else lambda: made, **others)

    return work


def high_water() -> int:
    """Return the most bytes of memory that this process has held."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def peak(case: str, encoding: str, count: int) -> int:
    """Return by how many bytes a pass raises the high-water mark, in a process that measures nothing else."""
    with threads(count):
        passed(case, encoding, 1, dim=64, depth=1, num_heads=1)()  # loads code
        work = passed(case, encoding, 1, **vit.SIZES["base"])
        before = high_water()
        work()
        return high_water() - before


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=17, help="samples of each time")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="images of a timed step")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    options = parser.parse_args(arguments)
    with get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:  # a process for each case
        cases = [(case, encoding, options.threads) for case in CASES for encoding in ("none", ENCODING)]
        peaks = iter(fresh.starmap(peak, cases, chunksize=1))
    memory = []
    for case in CASES:
        none, whole = next(peaks), next(peaks)
        memory.append({"case": case, "none": none, "encoding": whole, "rotations": whole - none})
        print(memory[-1], flush=True)
    time = []
    for batch in options.batches:
        with threads(options.threads):
            works = {case: passed(case, ENCODING, batch, **vit.SIZES["base"]) for case in CASES[1:]}
            seconds = interleaved_seconds(works, rounds=options.rounds, device="cpu")
        again = seconds["checkpointed"]
        over = {case: vars(ratio(again, seconds[case])) for case in ("training", "rotations kept")}
        time.append({"batch": batch, "milliseconds": vars(milliseconds(again)), "over": over})
        print(time[-1], flush=True)
    setting = {"threads": options.threads, "rounds": options.rounds, "torch": torch.__version__}
    write_whole(TARGET, json.dumps({"setting": setting, "memory": memory, "time": time}, indent=1) + "\n")


if __name__ == "__main__":
    main()
