"""What a checkpoint is wrapped in comes off; what is no checkpoint is refused, and nothing in it is executed."""

import argparse
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from published import randomised, refused, saved
from torch import nn

import torchrope as tr


def _small() -> nn.Module:
    settings = dict(img_size=64, embed_dim=48, depth=2, num_heads=2, num_classes=5)
    return timm.create_model("vit_small_patch16_rope_mixed_224", **settings).eval()


def _agree(mine: nn.Module, theirs: nn.Module) -> None:
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert (mine(x) - theirs(x)).abs().max() < 1e-4


@pytest.fixture(scope="module")
def timms() -> nn.Module:
    torch.manual_seed(1)
    return randomised(_small())


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
@pytest.mark.parametrize("wrapper", ["", "module.", "model.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_come_off(timms: nn.Module, key: str, wrapper: str, tmp_path: Path) -> None:
    state = {wrapper + name: value for name, value in timms.state_dict().items()}
    mine = tr.load_published(saved({"epoch": 3, key: state, "lr": [0.1]}, tmp_path))
    _agree(mine, timms)


def test_safetensors_load_and_damaged_ones_do_not(timms: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(timms.state_dict(), path)
    _agree(tr.load_published(path), timms)
    path.write_bytes(path.read_bytes()[:-100])
    refused(path, r"^model.safetensors is no whole safetensors file")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision_loads_as_float32(timms: nn.Module, dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: value.to(dtype) for name, value in timms.state_dict().items()}
    mine = tr.load_published(saved(state, tmp_path))
    assert {value.dtype for value in mine.state_dict().values()} == {torch.float32}
    reference = _small()
    reference.load_state_dict(state)
    _agree(mine, reference)


def test_loading_draws_no_random_numbers_and_the_model_saves(timms: nn.Module, tmp_path: Path) -> None:
    path = saved(timms.state_dict(), tmp_path)
    before = torch.random.get_rng_state()
    first, second = tr.load_published(path), tr.load_published(path)
    assert torch.equal(before, torch.random.get_rng_state())
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    second.load_state_dict(first.state_dict())
    _agree(second, first)


class Bomb:
    """A pickle of this writes a file when it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_foreign_objects_are_refused_by_name_and_not_executed(timms: nn.Module, legacy: bool, tmp_path: Path) -> None:
    save = partial(torch.save, _use_new_zipfile_serialization=not legacy)
    path, fired = tmp_path / "weights.pth", tmp_path / "fired"
    save({"model": timms.state_dict(), "args": argparse.Namespace(lr=1)}, path)
    refused(path, r"^torchrope reads pickles without running their code, got argparse.Namespace in weights.pth; save")
    save({"model": timms.state_dict(), "args": Bomb(fired)}, path)
    refused(path, r"without running their code, got (os|posix|nt)\.system in weights.pth")
    assert not fired.exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", pickle.dumps({"a": 1}), b"PK\x03\x04 and no more"])
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    refused(path, "weights.pth")


def test_a_truncated_file_is_refused_and_a_missing_one_missed(timms: nn.Module, tmp_path: Path) -> None:
    path = saved(timms.state_dict(), tmp_path)
    path.write_bytes(path.read_bytes()[:-2000])
    refused(path, r"^weights.pth is no whole file of torch.save: ")
    for ending in ("pth", "safetensors"):
        with pytest.raises(FileNotFoundError):
            tr.load_published(tmp_path / f"none.{ending}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(3), r"^a checkpoint must be a dictionary, got Tensor in weights.pth$"),
        ({}, r"or hold them under one of model, state_dict, model_state_dict, module, got nothing in weights.pth$"),
        ({"epoch": 3, "weight": torch.zeros(3)}, r"must be tensors by name, .* got epoch in weights.pth$"),
    ],
)
def test_what_holds_no_state_dict_is_refused(content: object, message: str, tmp_path: Path) -> None:
    refused(saved(content, tmp_path), message)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    state = timm.create_model("resnet10t").state_dict()
    rule = (
        r"^load_published knows checkpoints of rope-vit, timm's ViT, Swin, LieRE, ComRoPE, got \d+ tensors such as bn1"
    )
    refused(saved(state, tmp_path), rule)


def test_foreign_options_are_refused(timms: nn.Module, tmp_path: Path) -> None:
    rule = "^checkpoints of rope-vit take the options num_heads, input_size, encoding, got layers$"
    refused(saved(timms.state_dict(), tmp_path), rule, layers="per layer")
