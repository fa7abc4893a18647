"""freeze and absorb keep the outputs of models, and their results export."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchrope as tr
from torchrope.encodings import Encoding, Periodic
from torchrope.inference import Frozen, FrozenAbsolute
from torchrope.rotations import from_angles

NAMES = [
    "none",
    "axial",
    "mixed",
    "liere:8",
    "comrope-ap:4",
    "comrope-ap:3",
    "comrope-ld:8",
    "learned",
    "sinusoidal+mixed",
]
COMMUTING = [name for name, make in CASES.items() if make().relative]
EXPENSIVE = re.compile(r"\b(cos|sin|exp|\w*_exp|exp_\w+|\w*eigh?|\w*upsample\w*)\b")

tiny = partial(tr.ViT, in_channels=1, num_outputs=5, dim=48, depth=2, num_heads=2, mlp_dim=32)
image = partial(tiny, (8, 12), patch_size=2)


class OperatorRecorder(TorchDispatchMode):
    """Record the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def expensive(operators: list[str]) -> list[str]:
    return [name for name in operators if EXPENSIVE.search(name)]


def expensive_operators(run: Callable[[], object]) -> list[str]:
    with OperatorRecorder() as recorder, torch.no_grad():
        run()
    return expensive(recorder.names)


def vit_of(make: Callable[[], Encoding], **settings: object) -> tr.ViT:
    """Build a ViT with the encodings of a case and nonzero biases."""
    one = make()
    sizes = {1: (6,), 2: (3, 4), 3: (2, 3, 2), 4: (2, 2, 2, 2)}[one.num_axes]
    model = tr.ViT(
        sizes,
        patch_size=1,
        in_channels=2,
        num_outputs=5,
        dim=one.num_heads * one.head_dim,
        depth=2,
        num_heads=one.num_heads,
        encoding=lambda **_: make(),
        **settings,
    )
    for layer in model.layers:
        nn.init.normal_(layer.attention.qkv.bias)
    return model.eval()


def data_for(model: tr.ViT) -> Tensor:
    sizes = {1: (6,), 2: (3, 4), 3: (2, 3, 2), 4: (2, 2, 2, 2)}[len(model.embed.patch_size)]
    return torch.randn(3, 2, *sizes, dtype=model.prefix_tokens.dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return (actual.double() - expected.double()).abs().max().item()


class OfAngles(tr.MixedRoPE):
    """Angles that are no multiples of the positions."""

    def forward(self, positions: Any) -> Any:
        return from_angles(super().forward(positions).angles().tanh(), head_dim=self.head_dim)


FREEZABLE: dict[str, Callable[[], Encoding]] = {
    **CASES,
    "given-angles": partial(OfAngles, num_axes=2, num_heads=2, head_dim=8),
    "periodic": lambda: Periodic(tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8), (1.5, None)),
    "periodic-string": lambda: Periodic(tr.STRING(num_axes=2, num_heads=2, head_dim=8), (None, 0.5)),
}


@pytest.mark.parametrize("name", FREEZABLE)
def test_freeze_returns_the_same_rotation_from_constants(name: str) -> None:
    encoding = FREEZABLE[name]()
    for positions in (torch.randn(7, encoding.num_axes), torch.randn(3, 5, encoding.num_axes)):
        frozen = tr.freeze(encoding, positions)
        assert isinstance(frozen, Frozen)
        expected = encoding(positions)
        rotation = frozen(positions)
        assert (rotation.shape, rotation.heads) == (expected.shape, expected.heads)
        assert error(rotation.matrix(), expected.matrix()) < 1e-5
        q = torch.randn(3, encoding.num_heads, positions.shape[-2], encoding.head_dim)
        assert error(tr.rotate(q, q, rotation)[0], tr.rotate(q, q, expected)[0]) < 1e-5
        assert not any(value.requires_grad for value in frozen.state_dict(keep_vars=True).values())
        assert expensive_operators(partial(_rotate, q, frozen, positions)) == []


def _rotate(q: Tensor, frozen: nn.Module, positions: Tensor) -> None:
    tr.rotate(q, q, frozen(positions))


@pytest.mark.parametrize("share_layers", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_freeze_keeps_outputs_without_exponentials(name: str, share_layers: bool) -> None:
    model = image(encoding=name, share_layers=share_layers, num_registers=2).eval()
    before = copy.deepcopy(model.state_dict())
    frozen = tr.freeze(model, (8, 12))
    x = torch.randn(3, 1, 8, 12)
    assert error(frozen(x), model(x)) < 1e-5
    assert expensive_operators(lambda: frozen(x)) == []
    assert not any(isinstance(module, Encoding | tr.encodings.AbsoluteEncoding) for module in frozen.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert len({id(module) for module in frozen.encodings}) == (1 if share_layers else 2)


@pytest.mark.parametrize("name", CASES)
def test_freeze_supports_any_number_of_axes(name: str) -> None:
    model = vit_of(CASES[name], pool="mean")
    x = data_for(model)
    assert error(tr.freeze(model, x.shape[2:])(x), model(x)) < 1e-5


@pytest.mark.parametrize("name", ["comrope-ld:8", "comrope-ap:4", "string"])
def test_commuting_rotations_keep_a_basis_without_kernels_too(name: str) -> None:
    model, x = image(encoding=name).eval(), torch.randn(3, 1, 8, 12)
    with tr.backend("reference"):
        frozen = tr.freeze(model, (8, 12))
        assert error(frozen(x), model(x)) < 1e-5
        assert expensive_operators(lambda: frozen(x)) == []
    assert error(frozen(x), model(x)) < 1e-5
    assert {key: value.shape for key, value in frozen.state_dict().items()} == {
        key: value.shape for key, value in tr.freeze(model, (8, 12)).state_dict().items()
    }
    assert "encodings.0.basis" in frozen.state_dict()


def test_freeze_takes_examples_of_several_inputs() -> None:
    model = tr.Transformer(3, num_axes=2, dim=32, depth=1, num_heads=2, encoding="liere:4").eval()
    x, positions = torch.randn(2, 5, 3), torch.randn(5, 2)
    frozen = tr.freeze(model, (x, positions))
    assert expensive_operators(lambda: frozen(x, positions)) == []
    rule = r"an example of its input, or a tuple of examples, to be frozen, got \(\(2, 5, 3\), 3\)$"
    with pytest.raises(ValueError, match=rule):
        tr.freeze(model, (x, 3))


def test_freeze_sets_evaluation_mode_and_the_input_size() -> None:
    model = image(encoding="learned+liere:4", dropout=0.5).train()
    frozen = tr.freeze(model, (12, 12))
    x = torch.randn(2, 1, 12, 12)
    assert model.training
    assert torch.equal(frozen(x), frozen(x))
    assert error(frozen(x), model.eval()(x)) < 1e-5


@pytest.mark.parametrize("other", [(12, 8), (8, 8), (16, 12)])
@pytest.mark.parametrize("name", ["mixed", "learned"])
def test_frozen_model_refuses_other_sizes_in_one_line(other: tuple[int, int], name: str) -> None:
    frozen = tr.freeze(image(encoding=name), (8, 12))
    x = torch.randn(1, 1, *other)
    message = rf"^the model was frozen for input size \(8, 12\), got \({other[0]}, {other[1]}\)$"
    for call in (frozen, frozen.features, pickle.loads(pickle.dumps(frozen))):
        with pytest.raises(ValueError, match=message):
            call(x)


def test_frozen_encoding_refuses_other_positions() -> None:
    frozen = tr.freeze(CASES["liere4-N2-rest"](), tr.grid(2, 3))
    with pytest.raises(ValueError, match=r"the frozen ones of shape \(6, 2\), got shape \(8, 2\)"):
        frozen(tr.grid(2, 4))
    absolute = tr.freeze(image(encoding="learned"), (8, 12)).absolute
    with pytest.raises(ValueError, match=r"sizes must be the frozen \(4, 6\), got \(6, 4\)"):
        absolute(6, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["mixed", "liere:8", "sinusoidal"])
def test_frozen_constants_are_not_rounded_by_casts(name: str, dtype: torch.dtype) -> None:
    model = image(encoding=name).eval()
    frozen = tr.freeze(model, (8, 12))
    held = {key: value.clone() for key, value in frozen.state_dict().items() if "table" in key}
    cast = copy.deepcopy(frozen).to(dtype)
    state = cast.state_dict()
    assert held
    assert all(torch.equal(state[key].float(), value) for key, value in held.items())
    x = torch.randn(2, 1, 8, 12, dtype=dtype)
    out = cast(x)
    assert out.dtype == dtype
    assert error(out, model(x.float())) < 8e-2
    back = cast.to(torch.float32).state_dict()
    assert all(torch.equal(back[key], value) for key, value in held.items())


def test_frozen_constants_follow_the_device() -> None:
    frozen = tr.freeze(image(encoding="learned+liere:8"), (8, 12)).to("meta", torch.bfloat16)
    assert {buffer.device.type for buffer in frozen.buffers()} == {"meta"}
    tables = [module.table for module in frozen.modules() if isinstance(module, Frozen | FrozenAbsolute)]
    assert {table.dtype for table in tables} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["mixed", "liere:8", "learned+comrope-ld:8"])
def test_frozen_and_absorbed_models_move_to_a_gpu(name: str) -> None:
    model = image(encoding=name).eval()
    x = torch.randn(2, 1, 8, 12)
    expected = model(x)
    assert error(tr.freeze(model, (8, 12)).cuda()(x.cuda()).cpu(), expected) < 1e-3
    assert error(tr.freeze(model.cuda(), (8, 12))(x.cuda()).cpu(), expected) < 1e-3
    if model.encodings[0].relative:
        assert error(tr.absorb(model)(x.cuda()).cpu(), expected) < 1e-3


@pytest.mark.parametrize("name", ["axial", "learned+liere:8"])
def test_frozen_models_save_copy_and_load(name: str) -> None:
    frozen = tr.freeze(image(encoding=name), (8, 12))
    x = torch.randn(2, 1, 8, 12)
    file = io.BytesIO()
    torch.save(frozen, file)
    file.seek(0)
    for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), frozen(x))
    other = tr.freeze(image(encoding=name), (8, 12))
    assert not torch.equal(other(x), frozen(x))
    other.load_state_dict(frozen.state_dict())
    assert torch.equal(other(x), frozen(x))


@pytest.mark.slow
def test_frozen_models_compile_and_check_the_size_there_too() -> None:
    frozen = tr.freeze(image(encoding="learned+liere:8"), (8, 12))
    torch.compiler.reset()
    compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 1, 8, 12)
    assert error(compiled(x), frozen(x)) < 1e-5
    torch.compiler.reset()
    with pytest.raises(Exception, match="frozen for input size"):
        torch.compile(frozen, backend="aot_eager")(torch.randn(2, 1, 12, 8))


class Points(nn.Module):
    """A model that is not a ViT: attention over fixed points, with one encoding called twice and registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("points", torch.randn(6, 3))
        self.encoding = tr.ComRoPELD(num_axes=3, num_heads=2, head_dim=8, block_size=4)
        self.again = nn.ModuleDict({"same": self.encoding})
        self.places = tr.LearnedAPE(sizes=(6,), dim=16)
        self.attention = tr.Attention(16, 2)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        x = self.attention(x + self.places(6), self.encoding(self.points))
        return self.attention(x, self.again["same"](positions=self.points + shift))


def test_freeze_accepts_other_models_with_an_example() -> None:
    model = Points().eval()
    x = torch.randn(2, 6, 16)
    frozen = tr.freeze(model, torch.randn(1, 6, 16))
    assert error(frozen(x), model(x)) < 1e-5
    assert expensive_operators(lambda: frozen(x)) == []
    assert frozen.encoding is frozen.again["same"]
    assert isinstance(frozen.places, FrozenAbsolute)
    with pytest.raises(ValueError, match="must be the frozen ones"):
        frozen(x, shift=1.0)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: tr.freeze(Points(), (6,)), r"Points needs an example of its input, .* to be frozen, got \(6\)$"),
        (lambda: tr.freeze(image(), None), "input_size must be the extent of the data along each axis, got None$"),  # type: ignore[arg-type]
        (lambda: tr.freeze(nn.Linear(3, 3), torch.zeros(3)), "needs a model that calls encodings, got Linear"),
        (lambda: tr.freeze(image(encoding="mixed"), (9, 8)), "multiples of the patch"),
        (lambda: tr.freeze(_Moving(), torch.zeros(1, 6, 16)), "frozen at one set of positions, got another"),
    ],
)
def test_freeze_refuses_unsupported_models_in_one_line(run: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)


class _Moving(Points):
    def forward(self, x: Tensor, shift: float = 1.0) -> Tensor:
        return super().forward(x, shift)


@pytest.mark.parametrize("share_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMMUTING)
def test_absorb_converts_to_mixed_with_equal_outputs(name: str, share_layers: bool) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model = vit_of(CASES[name], share_layers=share_layers).to(dtype)
        before = copy.deepcopy(model.state_dict())
        plain = tr.absorb(model)
        x = data_for(model)
        assert error(plain(x), model(x)) < tolerance
        assert {type(encoding) for encoding in plain.encodings} == {tr.MixedRoPE}
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["axial", "mixed", "liere:2", "comrope-ap:4", "comrope-ap:3", "comrope-ld:8"])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_absorb_returns_the_state_of_a_mixed_model(name: str, qkv_bias: bool) -> None:
    model = image(encoding=name, qkv_bias=qkv_bias).eval()
    mixed = image(encoding="mixed", qkv_bias=qkv_bias, positions=model.position_map).eval()
    mixed.load_state_dict(tr.absorb(model).state_dict())
    for size in ((8, 12), (12, 12)):
        x = torch.randn(2, 1, *size)
        assert error(mixed(x), model(x)) < 1e-5
        assert error(tr.freeze(mixed, size)(x), model(x)) < 1e-5


def test_absorb_supports_liere_of_one_axis_for_any_block() -> None:
    for block_size in (3, 4, 24):
        model = tiny((16,), patch_size=2, encoding=f"liere:{block_size}").double().eval()
        x = torch.randn(2, 1, 16, dtype=torch.float64)
        assert error(tr.absorb(model)(x), model(x)) < 1e-10


FREQUENCIES = {
    "zero": [0.0] * 6,
    "equal": [3.0] * 6,
    "some equal, some zero": [5.0, 5.0, 2.0, 2.0, 0.0, 0.0],
    "nearly equal": [1.0, 1.0 + 1e-9, 1.0 + 1e-14, 2.0, 2.0 + 1e-7, 3.0],
    "far apart": [1e2, 1.0, 1e-3, 1e-6, 1e-9, 1e-13],
    "tiny alone": [1e-150, 2e-150, 3e-150, 0.0, 0.0, 1e-150],
}


@pytest.mark.parametrize("spectrum", FREQUENCIES)
@pytest.mark.parametrize("block_size", [12, 13])
def test_absorb_finds_an_orthogonal_basis_for_any_spectrum(spectrum: str, block_size: int) -> None:
    frequencies = torch.tensor(FREQUENCIES[spectrum], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(block_size, block_size, dtype=torch.float64)).Q
    rot = torch.block_diag(*(f * torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double() for f in frequencies))
    dense = nn.functional.pad(rot, (0, block_size - 12, 0, block_size - 12))
    block = basis @ dense @ basis.mT
    block = ((block - block.mT) / 2).expand(1, 1, 1, -1, -1)

    make = partial(tr.LieRE, num_axes=1, num_heads=1, head_dim=block_size)
    model = vit_of(make).double()
    for encoding in model.encodings:
        encoding.set_generators(block)
    plain = tr.absorb(model)
    actual = plain.encodings[0].frequencies.detach().flatten()
    assert error(actual.sort().values, frequencies.sort().values) < 1e-12 * max(frequencies.max().item(), 1e-12)
    x = data_for(model)
    assert error(plain(x), model(x)) < 1e-10
    old, new = (m.layers[0].attention.qkv.weight.detach()[:block_size] for m in (model, plain))
    assert error(new.mT @ new, old.mT @ old) < 1e-12


def test_absorb_computes_the_basis_exactly_in_half_precision() -> None:
    model = image(encoding="comrope-ld:8").to(torch.bfloat16)
    wide = tr.absorb(copy.deepcopy(model).double())
    plain = tr.absorb(model)
    assert plain.layers[0].attention.qkv.weight.dtype == torch.bfloat16
    assert plain.encodings[0].frequencies.dtype == torch.float32
    assert error(plain.encodings[0].frequencies, wide.encodings[0].frequencies) < 1e-5
    folded = wide.layers[0].attention.qkv.weight
    assert error(plain.layers[0].attention.qkv.weight, folded) <= folded.abs().max().item() * 2**-8


def test_absorb_keeps_values_and_unrotated_channels() -> None:
    model = vit_of(CASES["comrope-ld5-N4-rest"])
    plain = tr.absorb(model)
    for old, new in zip(model.layers, plain.layers, strict=True):
        old, new = (x.attention.qkv.weight.detach().unflatten(0, (3, 2, 16)) for x in (old, new))
        assert torch.equal(old[2], new[2])
        assert torch.equal(old[:, :, 15:], new[:, :, 15:])
        assert not torch.equal(old[:2, :, :15], new[:2, :, :15])


def test_absorb_needs_shared_projections_to_share_encodings() -> None:
    shared = image(encoding="comrope-ld:8", share_layers=True).double().eval()
    shared.layers[1].attention.qkv = shared.layers[0].attention.qkv
    x = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    assert error(tr.absorb(shared)(x), shared(x)) < 1e-10
    own = image(encoding="comrope-ld:8")
    own.layers[1].attention.qkv.weight = own.layers[0].attention.qkv.weight
    with pytest.raises(ValueError, match="layers that share a projection to share the encoding, got layer 1"):
        tr.absorb(own)
    planar = image(encoding="liere:2")
    planar.layers[1].attention.qkv = planar.layers[0].attention.qkv
    assert error(tr.absorb(planar)(x.float()), planar(x.float())) < 1e-5


class NormedAttention(tr.Attention):
    """Attention with a norm between projection and rotation."""

    def __init__(self) -> None:
        super().__init__(48, 2)
        self.q_norm = nn.LayerNorm(24)


class _OtherAttention(tr.Attention):
    pass


class _Unfactored(tr.LieRE):
    """A LieRE that claims to be relative without factors_and_base()."""

    relative = True


def _with_attention(attention: nn.Module) -> tr.ViT:
    model = image(encoding="comrope-ld:8")
    model.layers[1].attention = attention
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: image(encoding="liere:8"), "absorb needs generators that commute, got LieRE"),
        (lambda: image(encoding=_Unfactored), r"requires factors_and_base\(\) of encodings with blocks above 2"),
        (lambda: _with_attention(NormedAttention()), "rotated as projected, got q_norm in layer 1"),
        (lambda: _with_attention(_OtherAttention(48, 2)), "Attention with a Linear qkv, got _OtherAttention"),
        (
            lambda: tr.freeze(image(encoding="comrope-ld:8"), (8, 12)),
            "absorb needs a model that is not frozen, got a frozen ViT",
        ),
        (lambda: nn.Linear(3, 3), "absorb needs a ViT, got Linear"),
    ],
)
def test_absorb_refuses_unsupported_models(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tr.absorb(build())
    assert "\n" not in str(caught.value)


EXPORTED = {
    **{name: partial(image, encoding=name) for name in NAMES},
    **{f"frozen {name}": (lambda n=name: tr.freeze(image(encoding=n), (8, 12))) for name in NAMES},
    "absorbed": lambda: tr.absorb(image(encoding="comrope-ld:8")),
    "absorbed and frozen": lambda: tr.freeze(tr.absorb(image(encoding="comrope-ap:3")), (8, 12)),
}


ALWAYS = ("mixed", "frozen comrope-ap:3", "absorbed and frozen")


def exported(*names: str) -> list[Any]:
    """Mark all but the named models as slow: an export takes seconds."""
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", exported(*EXPORTED))
def test_exported_programs_match_the_model(name: str) -> None:
    model = EXPORTED[name]().eval()
    program = torch.export.export(model, (torch.randn(2, 1, 8, 12),))
    x = torch.randn(2, 1, 8, 12)
    assert error(program.module()(x), model(x)) < 1e-5
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    calls = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert not any("torchrope" in call for call in calls)
    if "frozen" in name:
        assert expensive(calls) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", exported("frozen learned", "absorbed", "absorbed and frozen"))
def test_exported_programs_run_without_the_library(name: str) -> None:
    model = EXPORTED[name]().eval()
    x = torch.randn(2, 1, 8, 12)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    assert error(torch.export.load(file).module()(x), model(x)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", exported("frozen axial", "frozen liere:8", "frozen comrope-ap:3", "frozen sinusoidal+mixed", "absorbed")
)
def test_onnx_models_match_in_onnxruntime(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = EXPORTED[name]().eval()
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (torch.randn(2, 1, 8, 12),), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = torch.randn(2, 1, 8, 12)
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert error(torch.from_numpy(out), model(x)) < 1e-4


class InHalves(tr.MixedRoPE):
    def forward(self, positions: Any) -> Any:
        return super().forward(positions).in_halves()


class OfList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoding = InHalves(num_axes=1, num_heads=2, head_dim=8)

    def forward(self, x: Tensor) -> Tensor:
        return tr.apply(x, self.encoding([[float(place)] for place in range(x.shape[-2])]), layout="bhtd")


def test_frozen_encoding_keeps_its_layout_and_takes_positions_as_a_list() -> None:
    model, x = OfList().eval(), torch.randn(1, 2, 5, 8)
    torch.testing.assert_close(tr.freeze(model, x)(x), model(x))


@pytest.mark.parametrize(("family", "table"), [(tr.MixedRoPE, "_table"), (tr.LieRE, "table")])
def test_a_frozen_encoding_sees_positions_and_tables_that_change_in_place(family: Any, table: str) -> None:
    positions = tr.grid(2, 2)
    frozen = tr.freeze(family(num_axes=2, num_heads=1, head_dim=4), positions)
    copied = copy.deepcopy(frozen)
    before = frozen(positions).matrix()
    getattr(frozen, table).mul_(2)
    assert not torch.equal(frozen(positions).matrix(), before)
    assert torch.equal(copied(positions).matrix(), before)
    for changed in (positions, frozen.frozen_at):
        changed.add_(1)
        with pytest.raises(ValueError, match=r"^positions must be the frozen ones, got others of shape \(4, 2\)$"):
            frozen(positions)
        changed.sub_(1)
