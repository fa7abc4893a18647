"""Rotate tokens that are split over processes, by plans of diffusers and by torch; as a program, one of two processes.

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
from rotating import decoder, learned
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


def sharded_by_torch(rank: int) -> float:
    """Largest difference of the queries of a rank, rotated by its share of positions or rotation, from all at once."""
    encoding, positions, q = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8), tr.grid(4, 4), drawn(1, 2, 16, 8)
    rotation = encoding(positions)
    whole = tr.apply(q, rotation).detach()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    head_and_tail = torch.arange(16).reshape(4, 4)[[rank, 3 - rank]].flatten()  # zig-zag: the load of a causal mask
    own, own_positions, index = q.clone(), positions.clone(), torch.arange(16)
    with context_parallel(mesh, buffers=[own, own_positions, whole, index], buffer_seq_dims=[2, 0, 2, 0]):
        assert torch.equal(index, head_and_tail)
        rotated = tr.apply(own, encoding(own_positions)), tr.apply(own, rotation[..., index])
        return max(relative(one, whole) for one in rotated)


def tensor_parallel() -> list[float]:
    """Differences of a Llama whose heads are split over the ranks: of the output, and of gradients summed over them."""
    model, words = tr.swap(decoder("llama", num_key_value_heads=2), "mixed"), torch.arange(9)[None]
    for index, parameter in enumerate(learned(model)):
        parameter.data.mul_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(index)) + 0.5)
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    found = []
    for split in (False, True):
        for layer in model.model.layers if split else ():
            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            parallelize_module(layer, mesh, {**plan, "self_attn.o_proj": RowwiseParallel()})
        model.zero_grad()
        output = model(words).logits
        output.square().mean().backward()
        gradients = [parameter.grad.clone() for parameter in learned(model)]
        for gradient in gradients if split else ():
            dist.all_reduce(gradient)
        found.append([output.detach(), *gradients])
    return [relative(*both) for both in zip(*found, strict=True)]


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
    torch_shards = sharded_by_torch(rank)
    report = {"found": found, "refused": refused, "sharded by torch": torch_shards, "heads": tensor_parallel()}
    (folder / f"found{rank}.json").write_text(json.dumps(report, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
