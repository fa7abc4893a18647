"""What a checkpoint is wrapped in comes off; what is no checkpoint is refused, and nothing in it is executed."""

import argparse
import io
import json
import os
import pickle
import random
import re
import resource
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from published import randomised, refused, saved
from test_published_comrope import _comrope_state as comrope
from test_published_liere import _liere_state as liere
from test_published_swin import _rope_vits
from torch import nn

import torchrope as tr

SMALL: dict[str, Any] = dict(img_size=64, embed_dim=48, depth=2, num_heads=2, num_classes=5)
swin = partial(_rope_vits, "mixed", with_bias=True, with_buffers=True)


def _small() -> nn.Module:
    return timm.create_model("vit_small_patch16_rope_mixed_224", **SMALL).eval()


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
    refused(path, r"^a checkpoint must be a complete safetensors file, got model.safetensors: ")


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


def test_truncated_file_is_refused_and_a_missing_one_missed(timms: nn.Module, tmp_path: Path) -> None:
    path = saved(timms.state_dict(), tmp_path)
    path.write_bytes(path.read_bytes()[:-2000])
    refused(path, r"^a checkpoint must be a complete file of torch.save, got weights.pth: ")
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
def test_file_without_a_state_dict_is_refused(content: object, message: str, tmp_path: Path) -> None:
    refused(saved(content, tmp_path), message)


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    state = timm.create_model("resnet10t").state_dict()
    rule = (
        r"^load_published supports checkpoints of rope-vit, timm's ViT, Swin, LieRE, ComRoPE, got \d+ tensors such as"
    )
    refused(saved(state, tmp_path), rule)


def test_foreign_options_are_refused(timms: nn.Module, tmp_path: Path) -> None:
    rule = "^options of rope-vit must be among num_heads, input_size, encoding, got layers$"
    refused(saved(timms.state_dict(), tmp_path), rule, layers="per layer")


def _within_itself() -> Any:
    content: dict[str, Any] = {}
    content["model"] = content
    return content


def _nested(depth: int) -> Any:
    content: dict[str, Any] = {"weight": torch.zeros(3)}
    for _ in range(depth):
        content = {"model": content}
    return content


def _quickly_refused(path: Path, message: str, **options: Any) -> None:
    began, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(path, message, **options)
    assert time.process_time() - began < 10  # of what they claim, reading alone would take longer
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 200_000  # kilobytes


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_within_itself, "must hold its tensors within 8 dictionaries, got more in weights.pth$"),
        (partial(_nested, 100), "must hold its tensors within 8 dictionaries, got more in weights.pth$"),
        (lambda: {"a\nb": torch.ones(2)}, r"names of tensors must be printable text .*, got 'a\\nb'$"),
        (lambda: {"a" * 501: torch.ones(2)}, "names of tensors must be printable text of up to 500 characters"),
        (lambda: {("a", "b"): torch.ones(2)}, r"names of tensors must be printable text .*, got \('a', 'b'\)$"),
        (lambda: {3: torch.ones(2)}, "names of tensors must be printable text .*, got 3$"),
        (lambda: {3: 4, "a\nb": [], "c": 1}, r"must be tensors by name, .* got 'a\\nb', 3, c in weights.pth$"),
    ],
)
def test_load_published_refuses_what_holds_no_tensors_by_name(
    content: Callable[[], Any], message: str, legacy: bool, tmp_path: Path
) -> None:
    torch.save(content(), tmp_path / "weights.pth", _use_new_zipfile_serialization=not legacy)
    _quickly_refused(tmp_path / "weights.pth", message)


@pytest.mark.filterwarnings("ignore")  # torch's, of tensors that it may leave behind
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.to("meta"), "must be dense, .* got norm.weight of meta, torch.float32 in weights.pth$"),
        (lambda x: x.to_sparse(), "got norm.weight of torch.sparse_coo, torch.float32"),
        (lambda x: x.expand(2, -1).to_sparse_csr(), "got norm.weight of torch.sparse_csr, torch.float32"),
        (lambda x: torch.nested.nested_tensor([x, x[:3]]), "got norm.weight of nested, torch.float32"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "got norm.weight of .*, torch.qint8"),
        (lambda x: x.to(torch.complex64), "got norm.weight of torch.strided, torch.complex64"),
        (lambda x: x.to(torch.float8_e4m3fn), "got norm.weight of torch.strided, torch.float8_e4m3fn"),
        (lambda x: x.to(torch.int64), "norm.weight must be floating point, got torch.int64"),
        (lambda x: x.to(torch.bool), "norm.weight must be floating point, got torch.bool"),
        (lambda x: x[:0], r"norm.weight must be \(48,\), got \(0,\)"),
        (lambda x: x[:1].expand(10**9, 48), r"no more than 4 times the .* bytes of their file, got 192,000,"),
    ],
)
def test_load_published_refuses_tensors_without_plain_numbers(
    timms: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    state = timms.state_dict()
    path = saved(state | {"norm.weight": change(state["norm.weight"])}, tmp_path)
    _quickly_refused(path, message)


def test_load_published_refuses_archives_that_claim_more_than_they_are(timms: nn.Module, tmp_path: Path) -> None:
    plain = zipfile.ZipFile(saved(timms.state_dict(), tmp_path, "plain.pth"))
    for bomb in ("data.pkl", "data/0"):
        with zipfile.ZipFile(tmp_path / "weights.pth", "w", zipfile.ZIP_DEFLATED) as archive:
            for record in plain.infolist():
                grows = record.filename.endswith(bomb)
                archive.writestr(record.filename, plain.read(record) + bytes(2**24 if grows else 0))
        _quickly_refused(tmp_path / "weights.pth", r"its records must fit its [\d,]+ bytes, got 1[67],")


class Storage:
    """Pickled, a storage that claims to be of many numbers."""


def _with_storage_of(numbers: int) -> bytes:
    """A file of torch.save, as before archives, of one tensor whose storage says how long it is."""

    class Claim:
        def __reduce__(self) -> Any:
            rebuild = torch._utils._rebuild_tensor_v2
            return rebuild, (Storage(), 0, (numbers,), (1,), False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numbers, None) if isinstance(part, Storage) else None

    file = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(part, file, 2)
    Pickler(file, 2).dump({"norm.weight": Claim()})
    pickle.dump(["0"], file, 2)
    return file.getvalue() + struct.pack("<q", numbers) + bytes(100)


@pytest.mark.parametrize(
    "content",
    [
        *(_with_storage_of(numbers) for numbers in (10**3, 10**9, 10**13, 2**62)),
        b"\x80\x02X" + struct.pack("<I", 2**31) + b"text",
        b"\x80\x02\x8d" + struct.pack("<Q", 2**50) + b"text",
        b"\x80\x02U\xff",
        b"\x80\x02r" + struct.pack("<I", 2**32 - 1),
        b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
    ],
)
def test_load_published_refuses_pickles_that_claim_more_than_they_are(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(content)
    _quickly_refused(tmp_path / "weights.pth", "weights.pth")


def test_load_published_refuses_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe.pth", "folder.safetensors"):
        _quickly_refused(tmp_path / name, f"a checkpoint must be a file, got .*{name}$")


def test_load_published_refuses_safetensors_that_claim_more_than_they_are(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    for shape in ([2**40, 2**40], [2**20], [-1], ["4"], [2**64]):
        header = json.dumps({"norm.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}})
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4))
        _quickly_refused(path, "^a checkpoint must be a complete safetensors file, got w")
    for content in (b"", b"x", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 10**5) + b"[" * 10**5):
        path.write_bytes(content)
        _quickly_refused(path, "^a checkpoint must be a complete safetensors file, got w")


FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "rope-vit": (lambda: _small().state_dict(), {}),
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", **SMALL).state_dict(), {"num_heads": 2}),
    "swin": (lambda: swin()[1], {}),
    "liere": (lambda: liere(), {"layers": "per layer"}),
    "comrope": (lambda: comrope("ld"), {}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_load_published_counts_no_layers_that_a_file_does_not_hold(family: str, tmp_path: Path) -> None:
    build, options = FAMILIES[family]
    state = build()
    first = next(name for name in state if re.search(r"layers\.0\.|blocks\.0\.", name) and state[name].ndim)
    for number in ("1" + "0" * 9, "9" * 100):
        for part in (r"(?<=layers\.)0\b", r"(?<=blocks\.)0\b"):
            name = re.sub(part, number, first, count=1)
            if name != first:
                path = saved(state | {name: state[first]}, tmp_path)
                _quickly_refused(path, "missing", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_load_published_builds_no_model_of_thousands_of_small_layers(family: str, tmp_path: Path) -> None:
    build, options = FAMILIES[family]
    state = build()
    first = next(name for name in state if re.search(r"layers\.0\.|blocks\.0\.", name) and state[name].ndim)
    for stage, layer in product(range(16), range(300)):
        name = re.sub(r"(layers|blocks)\.0\.(?!blocks)", rf"\1.{layer}.", first)
        state.setdefault(name.replace("layers.0.blocks", f"layers.{stage}.blocks"), torch.ones(1))
    _quickly_refused(saved(state, tmp_path), r"must be followed by at most \d+ numbers, got 300$", **options)


def test_load_published_reads_no_swin_of_whole_numbers_or_other_frequencies(tmp_path: Path) -> None:
    state = swin()[1]
    for name, tensor, message in (
        (
            "layers.0.blocks.0.mlp.fc1.bias",
            torch.ones(64, dtype=torch.int64),
            "must be floating point, got torch.int64",
        ),
        ("layers.1.blocks.1.attn.rope_freqs", torch.ones(4), "must have 3 dimensions"),
        ("layers.1.blocks.1.attn.rope_freqs", torch.ones(2, 4, 0), "must not be empty"),
        ("layers.0.blocks.5.attn.rope_t_x", torch.ones(16), "."),
        ("patch_embed.proj.weight", torch.ones(16, 3, 0, 4), "must not be empty"),
    ):
        if message == ".":
            assert tr.load_published(saved(state | {name: tensor}, tmp_path)).stages[0].window == (4, 4)
        else:
            _quickly_refused(saved(state | {name: tensor}, tmp_path), f"{name} {message}")


def test_load_published_builds_no_swin_that_is_wider_than_its_file(tmp_path: Path) -> None:
    state = swin()[1]
    state |= {"patch_embed.proj.weight": torch.ones(20_000, 1, 1, 1), "patch_embed.proj.bias": torch.ones(20_000)}
    _quickly_refused(saved(state, tmp_path), r"checkpoint of Swin: \S+ must be")


def _spoiled(state: dict[str, torch.Tensor], draw: random.Random) -> dict[str, torch.Tensor]:
    state = dict(state)
    for _ in range(draw.choice([1, 1, 2, 4])):
        name = draw.choice(list(state))
        shape = list(state[name].shape)
        chance = draw.random()
        if chance < 0.6:
            change = draw.choice(["longer", "shorter", "drawn", "other"])
            if change == "longer":
                shape.append(draw.choice([0, 1, 2]))
            elif change == "shorter" and shape:
                shape.pop(draw.randrange(len(shape)))
            elif change == "drawn":
                shape = [draw.choice([0, 1, 2, 3, 4, 16]) for _ in range(draw.randrange(6))]
            elif shape:
                place = draw.randrange(len(shape))
                shape[place] = draw.choice([0, 1, 2, shape[place] + 1, shape[place] * 2, 64])
            state[name] = torch.rand(shape)
        elif chance < 0.7:
            state[name] = state[name].to(draw.choice([torch.float16, torch.int64, torch.complex64, torch.bool]))
        elif chance < 0.8:
            del state[name]
        else:
            other = re.sub(r"\d+", lambda number: draw.choice([number[0], "0", "1", "7", "9" * 20]), name)
            state[other] = state.pop(name)
    return state


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of files that leave open which model they are
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow if family == "swin" else ()) for family in FAMILIES]
)
def test_load_published_refuses_random_changes_in_one_line_or_loads(family: str, tmp_path: Path) -> None:
    build, options = FAMILIES[family]
    state, draw = build(), random.Random(family)
    for _ in range(60):
        path = saved(_spoiled(state, draw), tmp_path)
        try:
            tr.load_published(path, **options)
        except ValueError as error:
            told = str(error)
        else:
            continue
        assert len(told.splitlines()) == 1, told
