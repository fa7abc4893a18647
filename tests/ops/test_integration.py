"""Kernels with torch.compile, export, checkpointing, several processes, copy and pickle."""

import copy
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torchrope as tr
from torchrope.ops import native
from torchrope.ops.library import OPS

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")

ENCODINGS = ["mixed", "comrope-ld", "liere:8"]
"""A planar rotation, a commuting one, one of free blocks."""


def small_vit(encoding: str) -> tr.ViT:
    return tr.ViT((8, 8), patch_size=2, in_channels=1, num_outputs=5, dim=32, depth=2, num_heads=2, encoding=encoding)


def images(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 8, 8), torch.arange(count) % 5


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def assert_alike(ones: dict[str, Tensor], others: dict[str, Tensor], rtol: float = 1e-4) -> None:
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        assert (others[name] - one).abs().max() <= rtol * one.abs().max() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_inductor_compiles_a_model_into_one_graph(encoding: str) -> None:
    model = small_vit(encoding)
    torch.compiler.reset()
    x, target = images()
    compiled, eager = (
        functional.cross_entropy(run(x), target) for run in (torch.compile(model, fullgraph=True), model)
    )
    assert torch.allclose(compiled, eager, atol=1e-5)
    assert_alike(gradients_of(model, eager), gradients_of(model, compiled))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_compiled_graph_accepts_any_batch_and_token_count(encoding: str) -> None:
    encoding_of = {"mixed": tr.MixedRoPE, "comrope-ld": tr.ComRoPELD, "liere:8": partial(tr.LieRE, block_size=8)}
    rotary = encoding_of[encoding](num_axes=2, num_heads=2, head_dim=16)

    def score(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        turned = tr.rotate(q, k, rotary(positions))
        return turned[0] @ turned[1].mT

    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(score, fullgraph=True, backend=graphs, dynamic=True)
    for batch, tokens in ((3, 9), (4, 5), (5, 17)):
        q, k, positions = torch.randn(batch, 2, tokens, 16), torch.randn(batch, 2, tokens, 16), torch.rand(tokens, 2)
        expected, actual = score(q, k, positions), compiled(q, k, positions)
        assert torch.allclose(actual, expected, atol=1e-4)
        assert_alike(*(gradients_of(rotary, out.square().mean()) for out in (actual, expected)))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_checkpoint_recomputes_encoding_and_rotation(encoding: str) -> None:
    model = small_vit(encoding)
    rotary = model.encodings[0]
    q, k, positions = torch.randn(2, 2, 9, 16, requires_grad=True), torch.randn(2, 2, 9, 16), torch.rand(9, 2)

    def score(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        turned = tr.rotate(q, k, rotary(positions))
        return (turned[0] @ turned[1].mT).tanh()

    expected = gradients_of(rotary, score(q, k, positions).sum())
    for reentrant in (False, True):
        rotary.zero_grad()
        checkpoint(score, q, k, positions, use_reentrant=reentrant).sum().backward()
        assert_alike(expected, {name: p.grad for name, p in rotary.named_parameters()})


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_models_copy_and_pickle_after_a_forward(encoding: str) -> None:
    model = small_vit(encoding)
    x, _ = images()
    out = model(x)
    out.sum().backward()
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(same(x), out)


def train_data_parallel(rank: int, folder: str, wrap: str) -> None:
    """One of two processes: half of the batch; the first writes loss and gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for encoding in ENCODINGS:
        torch.manual_seed(0)
        model = small_vit(encoding)
        x, target = (part.chunk(2)[rank] for part in images())
        run = _wrapped(model, wrap)
        loss = functional.cross_entropy(run(x), target)
        loss.backward()
        torch.distributed.all_reduce(total := loss.detach().clone())
        gradients = {name: _whole(p.grad) for name, p in model.named_parameters()}
        if rank == 0:
            torch.save({"loss": total / 2, "gradients": gradients}, Path(folder) / f"{encoding}.pt")
    torch.distributed.barrier()  # or one may leave while the other still speaks to it
    torch.distributed.destroy_process_group()
    os._exit(0)  # at the end of an interpreter one of PyTorch's threads may abort it


def _wrapped(model: tr.ViT, wrap: str) -> Callable[[Tensor], Tensor]:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layer in [*model.layers, *model.encodings]:  # what is sharded alone is freed after its forward
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_training_in_two_processes_equals_one(wrap: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_data_parallel, (str(tmp_path), wrap), nprocs=2)
    for encoding in ENCODINGS:
        torch.manual_seed(0)
        model = small_vit(encoding)
        x, target = images()
        loss = functional.cross_entropy(model(x), target)
        found = torch.load(tmp_path / f"{encoding}.pt")
        assert torch.allclose(found["loss"], loss, atol=1e-5)
        assert_alike(gradients_of(model, loss), found["gradients"])


def operator_calls() -> dict[str, tuple]:
    """Arguments of every operator, what may have a gradient with one."""

    def free(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    q, k, positions = free(2, 4, 5, 10), free(2, 2, 5, 10), free(1, 5, 2)
    generators = torch.randn(2, 2, 2, 4, 4)
    generators = (generators - generators.mT).requires_grad_()
    base = generators.detach()[0].requires_grad_()
    basis, angular = OPS.skew_eig(base.detach())
    table, tangent = (x.detach() for x in OPS.exp_generators(positions, generators))
    planar = (positions, free(2, 2, 4), None, True)
    commuting = (positions, free(2, 2, 2), base, basis, angular)
    upstream = torch.randn(q.shape), torch.randn(k.shape)
    vectors = q.detach(), k.detach()
    plain = [x.detach() if isinstance(x, Tensor) else x for x in (*planar, *commuting)]
    return {
        "rotate_planar": (q, k, *planar),
        "rotate_planar_backward": (*upstream, *vectors, *plain[:4], [True, True]),
        "rotate_basis": (q, k, *commuting, True),
        "rotate_basis_backward": (*upstream, *vectors, *plain[4:6], *plain[7:], False, [False, True, True]),
        "rotate_block": (q, k, table, tangent.requires_grad_()),
        "rotate_block_backward": (*upstream, *vectors, table, True),
        "exp_generators": (positions, generators),
        "exp_generators_backward": (positions.detach(), generators.detach(), torch.randn(tangent.shape), True),
        "skew_exp": (generators.detach()[0, 0].requires_grad_(),),
        "skew_exp_backward": (generators.detach()[0, 0], torch.randn(2, 6)),
        "skew_eig": (base.detach(),),
    }


# opcheck itself reads .grad of tensors that are no leaves.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", operator_calls() if native.LIBRARY is not None else [])
def test_operators_pass_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name), operator_calls()[name])


def test_operators_are_all_checked() -> None:
    schemas = torch._C._jit_get_all_schemas()
    defined = {s.name.removeprefix("torchrope::") for s in schemas if s.name.startswith("torchrope::")}
    assert defined == set(operator_calls())


@pytest.mark.parametrize("b", [4, 16])
def test_gradients_of_matrices_and_vectors_add_up(b: int) -> None:
    """A rotation that rotates, and whose matrices are looked at too: two ways from one loss to the generators."""
    encoding = tr.LieRE(num_axes=2, num_heads=2, head_dim=2 * b, block_size=b)
    positions, q = torch.rand(5, 2, requires_grad=True), torch.randn(1, 2, 5, 2 * b)
    weights, masks = torch.randn(1, 2, 5, 2 * b), torch.randn(2, 5, 2 * b, 2 * b)
    leaves = [encoding.upper, positions]

    def gradients(of_vectors: bool, of_matrices: bool) -> tuple[torch.Tensor, ...]:
        rotation = encoding(positions)
        loss = torch.zeros(())
        if of_vectors:
            loss = loss + (tr.rotate(q, q, rotation)[0] * weights).sum()
        if of_matrices:
            loss = loss + (rotation.matrix() * masks).sum()
        return torch.autograd.grad(loss, leaves)

    both, first, second = gradients(True, True), gradients(True, False), gradients(False, True)
    for whole, one, other in zip(both, first, second, strict=True):
        assert one.any()
        assert other.any()
        torch.testing.assert_close(whole, one + other, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_modes_and_tracers_see_the_operators(encoding: str) -> None:
    made = tr.encodings.parse_encoding(encoding).rotary(num_axes=2, num_heads=2, head_dim=16)
    (x, k), rotation = torch.randn(2, 1, 2, 9, 16), made(tr.grid(3, 3))
    for _ in range(4):  # from then on a call is repeated
        tr.rotate(x, k, rotation)
    traced = make_fx(lambda y: (tr.rotate(y, k, rotation), tr.apply(y, rotation)))(x)
    assert sum(str(node.target).startswith("torchrope.rotate_") for node in traced.graph.nodes) == 2
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert isinstance(tr.apply(fake.from_tensor(x), rotation), FakeTensor)
        assert isinstance(tr.rotate(fake.from_tensor(x), fake.from_tensor(k), rotation)[0], FakeTensor)


def test_tensors_whose_memory_holds_other_values_are_rotated_as_they_read() -> None:
    rotation = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16)(tr.grid(3, 3))
    lazy = torch.complex(*torch.randn(2, 1, 2, 9, 16)).conj().imag  # is_neg()
    assert torch.equal(tr.apply(lazy, rotation), tr.apply(lazy.resolve_neg(), rotation))
