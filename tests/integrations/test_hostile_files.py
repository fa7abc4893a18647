"""Files that `load` must refuse, in one line, quickly, with nothing fetched, opened or executed on their behalf."""

import copy
import http.server
import json
import os
import pickle
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file
from swapped import made, stored
from torch import Tensor, nn

import torchrope as tr
from torchrope.checkpoints.settings import budget

Header = dict[str, Any]
Place = tuple[str | int, ...]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": lambda: tr.swap(made("vit"), "liere:4", keep_position_tables=False, init="paper"),
    "eva": lambda: tr.swap(made("rope_axial"), "golden", init="paper", keep_rotation=True),
    "torchrope": lambda: tr.ViT((16, 16), patch_size=4, dim=32, depth=2, num_heads=2, encoding="learned+liere:4"),
    "own-swin": lambda: tr.Swin(
        (32, 32), dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, encoding="bias+mixed"
    ),
    "features": lambda: tr.Features(
        tr.ViT((16, 16), patch_size=4, dim=32, depth=2, num_heads=2, pool="mean"), pyramid=True, out_channels=8
    ),
}
INTO: dict[str, Callable[[], nn.Module]] = {"timm": partial(made, "vit"), "eva": partial(made, "rope_axial")}
"""The plain models that files of other libraries' models are loaded into."""


class Case:
    """A file that loads, taken apart: its settings and its tensors; and what builds the model to load it into."""

    def __init__(self, header: Header, tensors: dict[str, Tensor], into: Callable[[], nn.Module] | None = None) -> None:
        self.header = header
        self.tensors = tensors
        self.into = into

    def write(self, path: Path, header: Any = None, tensors: dict[str, Tensor] | None = None) -> Path:
        text = header if isinstance(header, str) else json.dumps(self.header if header is None else header)
        save_file(self.tensors if tensors is None else tensors, path, metadata={"torchrope": text})
        return path

    def changed(self, place: Place, value: Any) -> Header:
        header = copy.deepcopy(self.header)
        _at(header, place[:-1])[place[-1]] = value
        return header


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*place, key)
        yield from _places(part, (*place, key))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("whole")
    found = {}
    for name, build in MODELS.items():
        tr.save(build(), folder / name)
        found[name] = Case(*stored(folder / name), INTO.get(name))
    return found


@contextmanager
def _little(seconds: float = 1) -> Iterator[None]:
    """So many seconds of the processor at most, and 200 MB of memory."""
    began, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 200_000  # kilobytes


def _loads(path: Path, into: Callable[[], nn.Module] | None = None) -> bool:
    """Whether a file loads; otherwise it must be refused in one line, either way with little."""
    model = None if into is None else into()
    try:
        with _little(seconds=2):
            tr.load(path, into=model)
    except ValueError as error:
        told = str(error)
    else:
        return True
    assert len(told.splitlines()) == 1, told
    return False


def _refused(path: Path, message: str = ".", into: Callable[[], nn.Module] | None = None) -> str:
    model = None if into is None else into()
    with pytest.raises(ValueError, match=message) as caught, _little():
        tr.load(path, into=model)
    told = str(caught.value)
    assert len(told.splitlines()) == 1
    assert len(told) < 1000
    assert "load needs a file that torchrope.save wrote" in told
    return told


ARGUMENTS = ("recipe", "arguments")
FEATURES = ("recipe", "features")


class Watched:
    """What was asked of a server on this machine, which addresses were called, which files opened."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[str] = []
        self.calls: list[Any] = []
        self.opened: list[str] = []


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.requests.append(self.path)
            self.send_error(404)

        do_HEAD = do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen = Watched(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", seen.url)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", seen.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, to: (seen.calls.append(to), connect(self, to))[1])
    for owner, name in (("builtins", "open"), ("io", "open"), ("os", "open")):
        plain = getattr(__import__(owner), name)
        spy = lambda file, *a, plain=plain, **k: (seen.opened.append(str(file)), plain(file, *a, **k))[1]  # noqa: E731
        monkeypatch.setattr(f"{owner}.{name}", spy)
    yield seen
    server.shutdown()
    thread.join()
    server.server_close()


def _reaching(url: str, path: str) -> dict[str, Any]:
    """Settings by which libraries find code and weights."""
    return {
        "pretrained": True,
        "pretrained_cfg": {"url": f"{url}/w.pth", "file": path, "hf_hub_id": "some/model"},
        "checkpoint_path": path,
        "cache_dir": path,
        "backbone": "some/model",
        "_name_or_path": path,
        "auto_map": {"AutoModel": "some/model--code.Model", "AutoConfig": "some/model--code.Config"},
        "trust_remote_code": True,
        "attn_implementation": "some/kernel",
        "activation": "os.system",
        "norm_layer": f"{path}:Norm",
        "attention": "builtins.print",
    }


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm", "torchrope"])
def test_load_fetches_and_opens_nothing_that_a_file_names(
    library: str, cases: dict[str, Case], watched: Watched, tmp_path: Path
) -> None:
    case, target = cases[library], tmp_path / "weights.pth"
    torch.save(case.tensors, target)
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    reaching = _reaching(watched.url, str(target))
    mappings = [place for place in _places(case.header) if isinstance(_at(case.header, place), dict)]
    texts = [place for place in _places(case.header) if isinstance(_at(case.header, place), str)]
    headers = [case.changed((*place, name), value) for place in mappings for name, value in reaching.items()]
    places = [f"{watched.url}/w.pth", str(target), "hf-hub:some/model", f"local-dir:{tmp_path}", "some/model"]
    headers += [case.changed(place, value) for place in texts for value in places]
    own = case.write(tmp_path / "case")
    del watched.opened[:]
    for header in headers:
        _loads(case.write(own, header), case.into)
    assert watched.requests == []
    assert watched.calls == []
    assert not [file for file in watched.opened if str(tmp_path) in file and not file.endswith("case")]


def test_load_refuses_arguments_that_reach_out(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["torchrope"]
    for name, value in _reaching("http://127.0.0.1:9", str(tmp_path)).items():
        header = case.changed((*ARGUMENTS, name), value)
        told = "activation .* must be" if name == "activation" else f"that a file may set, got '{name[:8]}"
        _refused(case.write(tmp_path / "case", header), told)


SWAP = ("swap", "")
ENCODING = (*SWAP, "encodings", 0, "arguments")
OF_VIT = ("recipe", "encodings", 0, "arguments")
TOO_LARGE: list[tuple[str, Place, Any, str]] = [
    ("timm", (*ENCODING, "head_dim"), 10**9, "head_dim .* must be 16, got 1000000000"),
    ("timm", (*ENCODING, "num_axes"), 10**9, "num_axes .* must be 2, got"),
    ("timm", (*ENCODING, "num_heads"), 10**9, "num_heads .* must be 1 or 2, got"),
    ("timm", (*ENCODING, "block_size"), 10**9, "block_size .* 65536"),
    ("timm", (*ENCODING, "rotary_dim"), 60_000, "rotary_dim must be an integer from 0 to head_dim = 16"),
    ("torchrope", (*ARGUMENTS, "depth"), 10**9, r"depth .* from 0 to 64, for 3\d tensors in the file, got 1000000000"),
    ("torchrope", (*ARGUMENTS, "dim"), 10**9, r"dim .* from -65536 to 65536, for tensors of up to 1000 in the file"),
    ("torchrope", (*ARGUMENTS, "input_size"), [10**9, 16], "16,777,216"),
    ("torchrope", (*ARGUMENTS, "input_size"), [2**24, 2**24], "sizes of the arguments of LearnedAPE must be"),
    ("torchrope", (*OF_VIT, "block_size"), 10**9, "block_size .* 65536"),
    ("torchrope", ("recipe", "absolute", "arguments", "sizes"), [2**12, 2**12], r"sizes .* must be \[4, 4\], got"),
    ("torchrope", (*ARGUMENTS, "num_registers"), 2**16, "prefix_tokens of"),
    ("own-swin", (*ARGUMENTS, "depths"), [64, 10**9], "depths .* add up to 67"),
    ("own-swin", (*ARGUMENTS, "window_size"), [2**24, 2**24], "."),
]


@pytest.mark.parametrize(("library", "place", "value", "message"), TOO_LARGE)
def test_load_refuses_sizes_that_its_tensors_do_not_explain(
    library: str, place: Place, value: Any, message: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases[library]
    _refused(case.write(tmp_path / "case", case.changed(place, value)), message, case.into)


def test_load_holds_encodings_against_the_layers_that_they_are_for(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["timm"]
    swap = _at(case.header, SWAP)
    for count in (0, 3, 60, 10**4):
        parts = {name: [swap[name][0]] * count for name in ("encodings", "lattices", "channels")}
        header = case.changed(SWAP, {**swap, **parts})
        _refused(case.write(tmp_path / "case", header), rf"up to 64|must be 1 or 2, got {count}", case.into)


def test_load_gives_a_file_no_more_than_its_bytes_by_empty_tensors(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["torchrope"]
    tensors = case.tensors | {"empty": torch.empty(0, 2**40)}
    _refused(case.write(tmp_path / "case", case.changed((*ARGUMENTS, "dim"), 10**9), tensors), "65536")


def test_load_limit_applies_per_thread() -> None:
    built: list[nn.Module] = []
    thread = threading.Thread(target=lambda: built.append(nn.Linear(20_000, 20_000, device="meta")))
    with budget({}):
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="must have at most 268,435,456 numbers in parameters"):
            nn.Linear(20_000, 20_000, device="meta")
    assert len(built) == 1
    assert nn.Linear(20_000, 20_000, device="meta").weight.numel() == 4 * 10**8


def _without(*place: str | int) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        del _at(header, place[:-1])[place[-1]]

    return change


def _with(value: Any, *place: str | int) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        _at(header, place[:-1])[place[-1]] = value

    return change


TEXTS = {
    "list": "[]",
    "number": "5",
    "string": '"settings"',
    "null": "null",
    "empty mapping": "{}",
    "nothing": "",
    "cut": '{"format": 1',
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep mappings": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "name twice": '{"format": 1, "format": 1}',
    "NaN": '{"format": NaN}',
    "infinity": '{"format": -Infinity}',
    "beyond floats": '{"format": 1e999}',
    "beyond integers": '{"format": ' + "9" * 10_000 + "}",
    "lone surrogate": '{"format": 1, "torchrope": "\\ud800", "model": "\\ud800"}',
    "much": json.dumps({"format": 1, "torchrope": "a" * 2**24}),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_load_refuses_metadata_that_is_not_its_own(kind: str, cases: dict[str, Case], tmp_path: Path) -> None:
    _refused(cases["torchrope"].write(tmp_path / "case", TEXTS[kind]), "its settings must")


MALFORMED: list[tuple[str, Callable[[Header], None], str]] = [
    *[("timm", _without(name), f"got no {name}|format None") for name in ("format", "torchrope", "model", "recipe")],
    ("timm", _without("swap"), "got no swap"),
    ("timm", _with(1, "more"), "got 'more'"),
    ("timm", _with(2, "format"), "of format 1, got format 2"),
    ("timm", _with(True, "format"), "of format 1, got format True"),
    ("timm", _with([], "torchrope"), r"torchrope of its settings must be text .*, got \[\]"),
    ("timm", _with("two\nlines", "model"), r"model of its settings must be the name of a class, got 'two\\nlines'"),
    ("timm", _with(5, *SWAP), "its swap must be settings by name, got 5"),
    ("timm", _without(*SWAP, "keep_position_tables"), "got no keep_position_tables"),
    ("timm", _with(1, *SWAP, "keep_position_tables"), "keep_position_tables of its swap must be true or false, got 1"),
    ("timm", _with(7, *SWAP, "encodings"), "encodings of its swap must be a list"),
    ("timm", _with(["LieRE"], *SWAP, "encodings"), "must be settings by name, got 'LieRE'"),
    ("timm", _with([], *SWAP, "lattices"), "one for each encoding, got 0 for 2"),
    ("timm", _with([1, 1], *SWAP, "lattices"), "must be settings by name, got 1"),
    ("timm", _with([1.0] * 3, *SWAP, "lattices", 0, "origin"), r"origin must be one number or one per axis \(2\)"),
    ("timm", _with("NoSuchClass", *SWAP, "encodings", 0, "class"), "classes=.*, got a model with NoSuchClass"),
    (
        "timm",
        _with("Encoding", *SWAP, "encodings", 0, "class"),
        "arguments of Encoding must be among those that a file may set",
    ),
    ("timm", _with("LearnedAPE", *SWAP, "encodings", 0, "class"), "classes="),
    ("timm", _with([], *ENCODING), "arguments .* must be settings by name"),
    ("timm", _with("zeros", *ENCODING, "init_scale"), "init_scale .* must be a number"),
    ("timm", _with(0.5, *ENCODING, "zero_fraction"), "that a file may set, got 'zero_fraction'"),
    ("timm", _with({"train_sizes": [2]}, *ENCODING, "lattice"), "LieRE rejects its settings: train_sizes needs per"),
    ("timm", _with("[0, 1)", *ENCODING, "lattice"), "lattice .* must be settings of a Lattice"),
    ("timm", _with(7, *ENCODING, "block_size"), "LieRE rejects its settings: head_dim must be div"),
    (
        "eva",
        _with([[0] * 16] * 2, *SWAP, "channels"),
        "channels of its swap must be each of the 16 of a head once, got",
    ),
    ("eva", _with([[-1]] * 2, *SWAP, "channels"), "channels of its swap must be a list of up to"),
    ("eva", _with([], *SWAP, "channels"), "channels of its swap must be one for each encoding, got 0 for 2"),
    ("torchrope", _with([], "recipe"), r"its recipe must be settings by name, got \[\]"),
    ("torchrope", _with(None, "recipe"), "its swap must map up to 64 names of submodules to swaps, got None"),
    ("torchrope", _without("recipe", "class"), "got no class"),
    ("torchrope", _with([1], *ARGUMENTS), "arguments of its recipe must be settings by name"),
    ("torchrope", _with("os.system", "recipe", "class"), "class of its recipe must be 'ViT' or 'Swin'"),
    ("torchrope", _with(1, *ARGUMENTS, "no_such_argument"), "that a file may set, got 'no_such_argument'"),
    ("torchrope", _with(True, *ARGUMENTS, "dim"), "dim .* must be a whole number"),
    ("torchrope", _with(2.0, *ARGUMENTS, "depth"), "depth .* must be a whole number"),
    ("torchrope", _with(0, *ARGUMENTS, "patch_size"), "patch_size .* from 1"),
    ("torchrope", _with("Features", "recipe", "class"), "class of its recipe must be 'ViT' or 'Swin'"),
    ("torchrope", _with("Linear", *ARGUMENTS, "activation"), "activation .* must be 'quick_gelu' or 'gelu' or 'relu'"),
    ("torchrope", _without(*ARGUMENTS, "patch_size"), "torchrope rejects its settings: TypeError: .*patch_size"),
    ("torchrope", _with("liere", *ARGUMENTS, "encoding"), "that a file may set, got 'encoding'"),
    ("torchrope", _with("LearnedAPE", "recipe", "encodings", 0, "class"), "classes=.*, got a model with LearnedAPE"),
    ("torchrope", _with("LieRE", "recipe", "absolute", "class"), "classes=.*, got a model with LieRE"),
    ("torchrope", _with([], "recipe", "encodings"), "torchrope rejects its settings: IndexError"),
    ("torchrope", _with(3, *ARGUMENTS, "num_heads"), "dim must be divisible by num_heads = 3"),
    ("torchrope", _with({}, "swap"), "swap of its settings must be null, got {}"),
    ("own-swin", _with([[2], 2], *ARGUMENTS, "depths"), "depths .* must be a list"),
    ("features", _with([10**9], *FEATURES, "indices"), "indices of the arguments of Features must be"),
    ("features", _with(10**9, *FEATURES, "out_channels"), "out_channels of the arguments of Features must be"),
    ("features", _with("other", *FEATURES, "model"), "the arguments of Features must be among those that a file may"),
    ("features", _with([], *FEATURES), "features of its recipe must be settings by name"),
]


@pytest.mark.parametrize(("library", "change", "message"), MALFORMED)
def test_load_refuses_malformed_settings(
    library: str, change: Callable[[Header], None], message: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    header = copy.deepcopy(cases[library].header)
    change(header)
    _refused(cases[library].write(tmp_path / "case", header), message, cases[library].into)


TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"norm.bias": None}, r"got no norm\.bias$"),
    ({"norm.bias": None, "norm.weight": None, "head.bias": None, "head.weight": None}, "; and 1 more$"),
    ({"more": torch.ones(2)}, "got more, which is not in the model$"),
    ({"norm.bias": torch.ones(31)}, r"got norm.bias of \(31,\) instead of \(32,\)$"),
    ({"norm.bias": torch.ones(32, dtype=torch.int64)}, "got norm.bias of torch.int64 instead of torch.float32$"),
    ({"norm.bias": torch.ones(32, dtype=torch.complex64)}, "norm.bias of torch.complex64 instead of torch.float32$"),
    ({"norm.bias": torch.ones(32).to(torch.float8_e4m3fn)}, "norm.bias of torch.float8_e4m3fn instead of"),
    ({"rotary.table0": torch.ones(1, 17, 31)}, r"rotary.table0 of \(1, 17, 31\) instead of \(1, 17, 32\)$"),
    ({"rotary.table0": torch.ones(17, 32)}, r"rotary.table0 of \(17, 32\) instead of"),
    ({"a\nb": torch.ones(2)}, r"names of tensors must be printable text .*, got 'a\\nb'$"),
    ({"a" * 1000: torch.ones(2)}, "of up to 500 characters"),
]


@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_load_refuses_tensors_that_are_not_the_models(
    change: dict[str, Tensor | None], message: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    changed = {**cases["timm"].tensors, **change}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    _refused(cases["timm"].write(tmp_path / "case", tensors=tensors), message, cases["timm"].into)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_load_takes_floats_of_any_precision(dtype: torch.dtype, cases: dict[str, Case], tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in cases["torchrope"].tensors.items()}
    model = tr.load(cases["torchrope"].write(tmp_path / "case", tensors=tensors))
    of_encodings = {parameter.dtype for name, parameter in model.named_parameters() if "encodings" in name}
    others = {parameter.dtype for name, parameter in model.named_parameters() if "encodings" not in name}
    assert (others, of_encodings) == ({dtype}, {torch.promote_types(dtype, torch.float32)})


def test_load_refuses_files_of_other_formats(cases: dict[str, Case], tmp_path: Path) -> None:
    whole = cases["torchrope"].write(tmp_path / "whole").read_bytes()
    huge = json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}).encode()
    contents = {
        "empty": b"",
        "text": b"hello",
        "pickle": pickle.dumps({"torchrope": "{}"}),
        "archive": b"PK\x03\x04" + bytes(100),
        "cut": whole[:-100],
        "longer": whole + b"more",
        "header alone": whole[:1000],
        "header of no end": (2**62).to_bytes(8, "little") + b"{}",
        "sizes that overflow": len(huge).to_bytes(8, "little") + huge + bytes(4),
        "header of a list": (2).to_bytes(8, "little") + b"[]",
        "deep header": (10**6).to_bytes(8, "little") + b"[" * 10**6,
    }
    for name, content in contents.items():
        (tmp_path / "case").write_bytes(content)
        assert "case: " in _refused(tmp_path / "case"), name
    (tmp_path / "folder").mkdir()
    _refused(tmp_path / "folder", r"got .*torchrope\.safetensors")
    _refused(tmp_path / "missing", "got .*missing")
    os.mkfifo(tmp_path / "pipe")
    _refused(tmp_path / "pipe", "got .*pipe: it must be a file")


def test_save_refuses_what_load_would(tmp_path: Path) -> None:
    quantized = MODELS["timm"]()
    quantized.head.weight = nn.Parameter(quantized.head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    lattices = MODELS["timm"]()
    lattices.rotary.lattices = [tr.Lattice(origin=float("nan"))] * 2
    for model, message in (
        (quantized, "tensors must be of torch.float64, .*, got head.weight of torch.float8_e4m3fn"),
        (lattices, "must hold finite numbers .*, got 'NaN'"),
        (tr.ViT((8, 8), patch_size=4, dim=32, depth=2, num_heads=2, layer_scale=float("nan")), "must hold finite"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            tr.save(model, tmp_path / "case")
        assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


class Weighted(tr.MixedRoPE):
    """An encoding of somebody's own, with an argument of its own."""

    def __init__(self, *, weights: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.weights = weights


def test_load_holds_encodings_of_ones_own_against_their_layers(tmp_path: Path) -> None:
    build: Any = partial(Weighted, weights={"a": [1, {"b": None}]})
    tr.save(tr.swap(made("vit"), build), tmp_path / "whole")
    case = Case(*stored(tmp_path / "whole"))
    again: Any = tr.load(tmp_path / "whole", into=made("vit"), classes=[Weighted])
    assert again.rotary.encodings[1].weights == {"a": (1, {"b": None})}
    for name, value in (("head_dim", 10**9), ("num_axes", 10**9), ("num_heads", 7), ("more", 1)):
        case.write(tmp_path / "case", case.changed((*ENCODING, name), value))
        with pytest.raises(ValueError, match=name) as caught, _little():
            tr.load(tmp_path / "case", into=made("vit"), classes=[Weighted])
        assert len(str(caught.value).splitlines()) == 1


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 64, 65_536, 2**24, 10**9, -(10**9), 2**62, 0.5, -2.0, 1e308, "", "x", "../x"),
    *("relu", "liere:4", "9" * 50, [], [1], [2, 2], [10**9] * 2, [2**16] * 16, ["a"], [[1]], {}, {"a": 1}),
]


def _changed_at_random(header: Header, draw: random.Random) -> Header:
    header = copy.deepcopy(header)
    for _ in range(draw.choice([1, 1, 2, 3])):
        places = list(_places(header))
        place = draw.choice(places)
        parent, key = _at(header, place[:-1]), place[-1]
        chance = draw.random()
        if chance < 0.7:
            number = type(parent[key]) is int and draw.random() < 0.5
            factor = draw.choice([-1, 2, 10, 10**3, 10**6])
            parent[key] = parent[key] * factor + 1 if number else copy.deepcopy(draw.choice(VALUES))
        elif chance < 0.8:
            del parent[key]
        elif chance < 0.9:
            parent[key] = copy.deepcopy(_at(header, draw.choice(places)))
        elif isinstance(parent, dict):
            parent[f"{key}x"] = parent.pop(key)
        else:
            parent.append(copy.deepcopy(parent[key]))
    return header


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of libraries, about what they then build or refuse
@pytest.mark.parametrize("library", MODELS)
def test_load_refuses_random_changes_in_one_line_or_loads(library: str, cases: dict[str, Case], tmp_path: Path) -> None:
    draw = random.Random(library)
    for _ in range(40):
        header = _changed_at_random(cases[library].header, draw)
        _loads(cases[library].write(tmp_path / "case", header), cases[library].into)
