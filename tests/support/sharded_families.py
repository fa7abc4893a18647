"""Train every family in two processes by DDP and FSDP2; as a program, one process of the two writes what it found.

python sharded_families.py FOLDER RANK
"""

import json
import sys
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from every_family import Family, every_family
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchrope as tr
from torchrope.integrations.family import adapters


def gradients(model: Any) -> list[torch.Tensor]:
    """Gradients of the encodings, whole."""
    found = [p.grad for name, p in model.named_parameters() if "rotary." in name and p.grad is not None]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


def step(model: Any, call: Any, given: Any) -> list[torch.Tensor]:
    """Gradients of one step."""
    call(model, given).float().square().mean().backward()
    return gradients(model)


def differences(family: Family, rank: int) -> dict[str, Any]:
    """Largest relative difference of gradients from those in one process, for each wrapper, or what it raised."""
    model = family.build()
    given = family.inputs(model)
    tr.swap(model, "mixed")
    alone = [step(deepcopy(model), family.call, one) for one in given[:2]]
    expected = [(first + second) / 2 for first, second in zip(*alone, strict=True)]
    found: dict[str, Any] = {}
    for name, wrap in (("ddp", partial(DistributedDataParallel, find_unused_parameters=True)), ("fsdp2", sharded)):
        try:
            wrapped: Any = wrap(deepcopy(model))
            own = step(wrapped, family.call, given[rank])
            dtypes = {str(p.dtype) for part, p in wrapped.named_parameters() if "rotary." in part}
            worst = [
                float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(own, expected, strict=True)
            ]
            found[name] = {"worst": max(worst), "count": len(worst), "dtypes": sorted(dtypes)}
        except Exception as failure:
            found[name] = {"error": f"{type(failure).__name__}: {failure}"}
        dist.barrier()
    try:
        found["rounding"] = rounding(family, model, given[rank])
    except Exception as failure:
        found["rounding"] = {"error": f"{type(failure).__name__}: {failure}"}
    dist.barrier()
    return found


@torch.no_grad()
def rounding(family: Family, swapped: Any, given: Any) -> dict[str, float]:
    """Errors of a plain and the swapped model under a policy that casts the inputs of blocks to bfloat16."""
    narrow, found = MixedPrecisionPolicy(param_dtype=torch.bfloat16), {}
    plain = tr.unswap(deepcopy(swapped))
    layers, kinds = set(adapters(plain)[0].layers), nn.ModuleList | nn.Sequential
    several = [(name, part) for name, part in plain.named_modules() if isinstance(part, kinds)]
    each = [(f"{name}.{one}".lstrip("."), block) for name, part in several for one, block in part.named_children()]
    blocks = [name for name, block in each if not layers.isdisjoint(block.modules())]
    for which, model in (("plain", plain), ("swapped", swapped)):
        torch.manual_seed(0)
        exact = family.call(model, given)
        for group in tr.integrations.shard_groups(model) if which == "swapped" else ():
            fully_shard(group, mp_policy=MixedPrecisionPolicy())
        for block in reversed(blocks):
            fully_shard(model.get_submodule(block), mp_policy=narrow)
        torch.manual_seed(0)
        actual = family.call(fully_shard(model, mp_policy=narrow), given).float()
        found[which] = float((actual - exact).norm() / exact.norm())
    return found


def sharded(model: Any) -> Any:
    """The model, its encodings and blocks sharded."""
    for group in tr.integrations.shard_groups(model):
        fully_shard(group, mp_policy=MixedPrecisionPolicy())
    return fully_shard(model)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for family in every_family():
        torch.manual_seed(0)
        found[f"{family.library} {family.name}"] = differences(family, rank)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
