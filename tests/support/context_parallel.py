"""Run transformers of diffusers under their context-parallel plans; as a program, one process of the two.

python context_parallel.py FOLDER RANK
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusing import built, drawn, inputs
from torch.nn.functional import pad

import torchrope as tr

IMAGE, LABELS = tr.grid(4, 5).unsqueeze(0), torch.arange(4.0).reshape(1, 4, 1)
TEXT = {"encoder_hidden_states": drawn(1, 4, 8, seed=1)}  # numbers of tokens must be even
LONG = {"encoder_hidden_states": drawn(1, 24, 8, seed=1)}  # cross-attention under a plan: as many as there are patches
GIVEN: dict[str, dict[str, Any]] = {
    "flux": {**TEXT, "txt_ids": torch.zeros(4, 3)},
    "flux2": {**TEXT, "txt_ids": pad(LABELS, (3, 0)), "img_ids": pad(IMAGE, (1, 1))},
    "qwen": TEXT,
    "wan": {},
    "ltx": {**LONG, "encoder_attention_mask": None},
}


def parallel(model: Any) -> Any:
    """The model with its tokens split over the processes."""
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    return model


def stepped(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the gradients of the encodings."""
    output = model(**given, return_dict=False)[0]
    output.square().mean().backward()
    return output.detach(), [p.grad for p in model.rotary.parameters() if p.grad is not None]


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def differences(name: str) -> dict[str, Any]:
    """Differences of a swapped model from one process: of the output, and of gradients summed over the processes."""
    given = {**inputs(name), **GIVEN[name]}
    expected, expected_gradients = stepped(tr.swap(built(name), "mixed"), given)
    plain = parallel(built(name))(**given, return_dict=False)[0]
    output, gradients = stepped(parallel(tr.swap(built(name), "mixed")), given)
    for gradient in gradients:
        dist.all_reduce(gradient)
    return {
        "output": relative(output, expected),
        "plain": relative(output, plain.detach()),
        "gradients": [relative(*both) for both in zip(gradients, expected_gradients, strict=True)],
    }


def refusal(function: Any, *args: Any) -> str:
    """The message of the ValueError that a call raises."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, which is 0 on a CPU
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, Any] = {name: differences(name) for name in GIVEN}
    swapped = parallel(tr.swap(built("wan"), "mixed"))
    refused = [refusal(tr.swap, parallel(built("wan")), "mixed"), refusal(tr.unswap, swapped)]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({"found": found, "refused": refused}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
