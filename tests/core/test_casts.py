"""Encodings in models that are cast to less precision: frequencies, and therefore angles, stay exact."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES
from torch import Tensor, nn

import torchrope as tr
from torchrope.tensors import warn_once

NARROW = (torch.bfloat16, torch.float16)


def _to_bfloat16(part: nn.Module) -> None:
    part.to(torch.bfloat16)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "to dtype": lambda model: model.to(torch.bfloat16),
    "to device and dtype": lambda model: model.to("cpu", torch.float16),
    "to a tensor's": lambda model: model.to(torch.zeros(1, dtype=torch.bfloat16)),
    "each part": lambda model: model.apply(_to_bfloat16),
}


@pytest.fixture(autouse=True)
def _nothing_warned_of() -> None:
    warn_once.cache_clear()


def floating(module: nn.Module) -> dict[str, Tensor]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()}


@pytest.mark.parametrize("cast", CASTS)
def test_tensors_of_encodings_survive_casts_of_the_model_around_them(cast: str) -> None:
    encodings = nn.ModuleDict({name: make() for name, make in CASES.items()})
    model = nn.ModuleDict({"linear": nn.Linear(2, 2), "inner": nn.ModuleDict({"encodings": encodings})})
    before = {name: tensor.clone() for name, tensor in floating(encodings).items()}
    tensors = floating(encodings)
    CASTS[cast](model)
    assert model["linear"].weight.dtype in NARROW
    after = floating(encodings)
    assert all(torch.equal(after[name], exact) for name, exact in before.items())
    assert all(after[name] is tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter))


def test_double_widens_and_other_dtypes_and_devices_follow() -> None:
    encoding = tr.LieRE(num_axes=2, num_heads=2, head_dim=8)
    upper = encoding.upper
    assert encoding.double().upper.dtype == torch.float64
    assert encoding.bfloat16().upper.dtype == torch.float64
    assert encoding.float().upper.dtype == torch.float32
    assert encoding.upper is upper
    moved = encoding.to("meta", torch.bfloat16).upper
    assert (moved.device.type, moved.dtype) == ("meta", torch.float32)


def test_optimizer_gradients_copies_and_state_of_a_cast_encoding() -> None:
    encoding = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=4)
    optimizer = torch.optim.SGD(encoding.parameters(), lr=1.0)
    encoding(tr.grid(3)).matrix().sum().backward()
    encoding.bfloat16()
    assert encoding.frequencies.grad is not None
    assert encoding.frequencies.grad.dtype == torch.float32
    before = encoding.frequencies.detach().clone()
    optimizer.step()
    assert not torch.equal(encoding.frequencies, before)
    file = io.BytesIO()
    torch.save(encoding.state_dict(), file)
    file.seek(0)
    again = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=4).half()
    again.load_state_dict(torch.load(file))
    for same in (again, copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert torch.equal(same.frequencies, encoding.frequencies)
        assert same.frequencies.dtype == torch.float32


def test_parameters_assigned_or_built_in_half_precision_become_float32() -> None:
    encoding: Any = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=4)
    state = {name: tensor.bfloat16() for name, tensor in encoding.state_dict().items()}
    encoding.load_state_dict(state, assign=True)
    assert encoding.frequencies.dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = {name: make() for name, make in CASES.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for encoding in built.values() for tensor in floating(encoding).values()} == {torch.float32}


def test_absolute_encodings_and_biases_follow_the_model() -> None:
    table = tr.LearnedAPE(sizes=(2, 2), dim=4).bfloat16()
    assert table(2, 2).dtype == table.table.dtype == torch.bfloat16


def test_model_cast_to_half_precision_learns_and_keeps_its_dtype() -> None:
    model: Any = tr.ViT(
        (8, 8), patch_size=2, in_channels=1, num_outputs=3, dim=16, depth=1, num_heads=2, encoding="liere:4"
    )
    exact = model.encodings[0].generators().detach()
    scores = model.bfloat16()(torch.randn(2, 1, 8, 8, dtype=torch.bfloat16))
    assert scores.dtype == torch.bfloat16
    scores.float().sum().backward()
    assert torch.equal(model.encodings[0].generators(), exact)
    assert all(parameter.grad is not None for parameter in model.encodings.parameters())


@pytest.mark.parametrize("name", ["mixed", "liere:4", "comrope-ld:4", "string"])
def test_frequencies_that_arrive_in_half_precision_give_one_warning(name: str) -> None:
    """As in FSDP with mixed precision, which puts cast parameters into the module for a forward."""
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=8)
    rounded = {key: tensor.detach().bfloat16() for key, tensor in encoding.named_parameters()}
    with pytest.warns(UserWarning, match="angles need frequencies in float32, got torch.bfloat16 from") as warned:
        rotations = [torch.func.functional_call(encoding, rounded, (tr.grid(2, 2),)) for _ in range(2)]
    assert len(warned) == 1
    assert {rotation.dtype for rotation in rotations} == {torch.float32}
