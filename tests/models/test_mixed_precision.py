"""Under policies that cast the inputs of modules to bfloat16, models err no more than without an encoding."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.utils import _cast_forward_inputs

import torchrope as tr
from torchrope.models.layers import Layer

ENCODINGS = ["axial", "mixed", "comrope-ld:4", "liere:8"]
KINDS = ("vit", "swin", "transformer", "own")
TOKENS = 512  # bfloat16 skips integers above 256


class OwnAttention(nn.Module):
    """Layers of one's own that are given a rotation, and samples packed into one sequence."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = tr.encodings.parse_encoding(encoding).rotary(num_axes=1, num_heads=2, head_dim=16)
        self.layer = Layer(32, 2, 32, dropout=0, drop_path=0, norm_eps=1e-6)
        self.inner = Placed()

    def forward(self, x: Tensor) -> Tensor:
        packed = tr.pack([tr.grid(TOKENS)])
        return self.layer(x, self.encoding(self.inner(packed)), None, packed.lengths)


class Placed(nn.Module):
    def forward(self, packed: tr.positions.Packed) -> Tensor:
        return packed.positions


def build(kind: str, encoding: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    small: dict[str, Any] = dict(num_outputs=3, dim=32, encoding=encoding)
    if kind == "vit":
        return tr.ViT((2, 2 * TOKENS), patch_size=2, depth=1, num_heads=2, **small), (torch.randn(1, 3, 2, 2 * TOKENS),)
    if kind == "swin":
        wide = dict(window_size=(2, 256), patch_size=2, depths=(1, 1), num_heads=(2, 4))
        return tr.Swin((4, 2 * TOKENS), **wide, **small), (torch.randn(1, 3, 4, 2 * TOKENS),)
    x = torch.randn(1, TOKENS, 32)
    if kind == "own":
        return OwnAttention(encoding), (x,)
    return tr.Transformer(32, num_axes=1, depth=1, num_heads=2, **small), (x, torch.arange(TOKENS)[:, None])


def encodes(module: nn.Module) -> bool:
    return isinstance(module, tr.Encoding) and next(module.parameters(), None) is not None


def fsdp1(model: nn.Module) -> nn.Module:
    narrow = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    own = [part for part in model.modules() if encodes(part)]
    for parameter in nn.ModuleList(own).parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: torch.distributed.all_reduce(p.grad.div_(2)))
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Layer}), mixed_precision=narrow, use_orig_params=True,
        device_id=torch.device("cpu"), ignored_modules=own,
    )  # fmt: skip


def fsdp2(model: nn.Module) -> nn.Module:
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for group in tr.integrations.shard_groups(model):
        fully_shard(group, mp_policy=MixedPrecisionPolicy())
    for part in model.modules():
        if isinstance(part, Layer):
            fully_shard(part, mp_policy=narrow)
    return fully_shard(model, mp_policy=narrow)


def hooks(model: nn.Module) -> nn.Module:
    """Cast parameters, and every tensor and dataclass that a module is given, as DeepSpeed, DDP and FSDP do."""

    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _cast_forward_inputs(torch.bfloat16, *args, **kwargs)

    for part in model.bfloat16().modules():
        if not isinstance(part, tr.Encoding):
            part.register_forward_pre_hook(cast, with_kwargs=True)
    return model


def errors(kind: str, encoding: str, wrap: Callable[[nn.Module], nn.Module]) -> tuple[float, float]:
    """Errors of outputs, relative to their deviation, of a wrapped model and one in bfloat16; checks gradients."""
    model, inputs = build(kind, encoding)
    exact = model.eval()(*inputs)
    wrapped = wrap(deepcopy(model))
    found = wrapped(*inputs).float()
    halved = deepcopy(model).bfloat16()(inputs[0].bfloat16(), *inputs[1:]).float()
    exact.square().mean().backward()
    found.square().mean().backward()
    whole = [part.grad for part in model.modules() if encodes(part) for part in part.parameters()]
    parts = [part.grad for part in wrapped.modules() if encodes(part) for part in part.parameters()]
    for one, other in zip(whole, parts, strict=True):
        assert other is not None
        assert other.dtype == torch.float32
        if other.shape == one.shape and type(other) is Tensor:
            assert (one - other).norm() < 0.3 * one.norm()
    one, other = ((outputs - exact).square().mean().sqrt() / exact.std() for outputs in (found, halved))
    return one.item(), other.item()


@pytest.mark.parametrize(
    ("kind", "encoding"), [*((kind, "mixed") for kind in KINDS), ("transformer", "axial"), ("transformer", "liere:8")]
)
def test_inputs_cast_by_hooks(kind: str, encoding: str) -> None:
    found, of_bfloat16 = errors(kind, encoding, hooks)
    assert found < 1.2 * of_bfloat16 + 1e-3


def measure(rank: int, folder: str, wrapper: str) -> None:
    """One of two processes; the first writes the errors."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    wrap = {"fsdp1": fsdp1, "fsdp2": fsdp2}[wrapper]
    cases = [(kind, name) for kind in KINDS for name in ENCODINGS]
    found = {case: errors(*case, wrap) for case in cases}
    if rank == 0:
        torch.save(found, Path(folder) / "errors.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_sharded_in_two_processes(wrapper: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(measure, (str(tmp_path), wrapper), nprocs=2)
    found = torch.load(tmp_path / "errors.pt", weights_only=False)
    assert {case: pair for case, pair in found.items() if not pair[0] < 1.2 * pair[1] + 1e-3} == {}


def test_positions_that_a_policy_has_rounded_are_refused() -> None:
    model, (x, positions) = build("transformer", "mixed")
    with pytest.raises(ValueError, match=r"^positions above 256 must be integers, float32 or float64.* got up to 512$"):
        hooks(model)(x, positions.float())
    model(x, positions.remainder(256).bfloat16())
