"""NaN, infinity, empty tensors and failed allocations: errors are contained, and no process crashes."""

import ctypes
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from building import COMPILER, build
from parity import under
from torch import Tensor

import torchrope as tr
from torchrope.encodings import Encoding
from torchrope.ops import backends, native

FAMILIES: dict[str, Callable[[], Encoding]] = {
    name: lambda name=name, dim=dim: tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=dim)
    for name, dim in (
        ("axial", 8),
        ("mixed", 8),
        ("golden", 8),
        ("comrope-ld:6", 12),
        ("comrope-ld:8", 16),
        ("comrope-ap:4", 16),
        ("comrope-ap:3", 12),
        ("string:4", 8),
        ("liere:3", 9),
        ("liere:8", 16),
        ("liere:12", 24),
        ("liere", 64),
    )
}
KERNELS = ("auto", "reference")
needs_kernels = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the check of position values, as on a GPU or in a graph."""
    monkeypatch.setattr("torchrope.encodings.base.can_read", lambda x: False)


def rotation_of(encoding: Encoding, backend: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    def apply(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return under(backend, tr.rotate, q, k, under(backend, encoding, positions), layout="bhtd")

    return apply


def vectors(encoding: Encoding, tokens: int = 20, batch: int = 2) -> Tensor:
    return torch.randn(batch, encoding.num_heads, tokens, encoding.head_dim)


def assert_nonfinite_only(dirty: Tensor, clean: Tensor, where: tuple[slice | int, ...]) -> None:
    """Assert non-finite values in one region, and equality everywhere else."""
    assert not dirty[where].isfinite().all()
    mask = torch.ones(clean.shape, dtype=torch.bool)
    mask[where] = False
    assert_near(dirty[mask], clean[mask])


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Assert equality up to rounding, which depends on the batch."""
    largest = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_nonfinite_positions_affect_only_their_token(family: str, backend: str, value: float, unchecked: None) -> None:
    encoding = FAMILIES[family]()
    apply, q = rotation_of(encoding, backend), vectors(FAMILIES[family]())
    lattice = tr.grid(4, 5, spacing=0.25)
    for positions, where in (
        (lattice.clone(), (slice(None), slice(None), 7)),
        (lattice.repeat(2, 1, 1), (1, slice(None), 7)),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, positions)]
        clean = apply(leaves[0], leaves[0], leaves[1])[0]
        gradient = torch.autograd.grad(clean.square().cumsum(-1).sum(), leaves)
        positions[(1, 7, 0) if positions.ndim == 3 else (7, 0)] = value
        dirty_leaves = [x.clone().requires_grad_() for x in (q, positions)]
        dirty = apply(dirty_leaves[0], dirty_leaves[0], dirty_leaves[1])[0]
        assert_nonfinite_only(dirty.detach(), clean.detach(), where)
        actual = torch.autograd.grad(dirty.square().cumsum(-1).sum(), dirty_leaves)
        assert_nonfinite_only(actual[0], gradient[0], where)
        at = (1, 7) if positions.ndim == 3 else (7,)
        mask = torch.ones(positions.shape[:-1], dtype=torch.bool)
        mask[at] = False
        assert_near(actual[1][mask], gradient[1][mask])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "mixed",
        "comrope-ld:6",
        "liere:8",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("string:4", "liere:12", "liere")),
    ],
)
def test_nan_positions_run_in_compiled_and_exported_graphs(family: str) -> None:
    encoding = FAMILIES[family]()
    q, clean = vectors(encoding), tr.grid(4, 5, spacing=0.25)
    dirty = clean.clone()
    dirty[7, 1] = math.nan

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoding = encoding

        def forward(self, q: Tensor, positions: Tensor) -> Tensor:
            return tr.rotate(q, q, self.encoding(positions))[0]

    module = Module()
    expected = module(q, clean).detach()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(module, (q, clean)).module()
    for graph in (compiled, exported):
        assert_nonfinite_only(graph(q, dirty).detach(), expected, (slice(None), slice(None), 7))


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_positions_under_vmap_affect_only_their_token(family: str) -> None:
    encoding = FAMILIES[family]()
    apply, q = rotation_of(encoding, "auto"), vectors(encoding, batch=3)
    positions = tr.grid(4, 5, spacing=0.25).repeat(3, 1, 1) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    clean = apply(q, q, positions)[0]
    positions[1, 7, 0] = math.nan
    mapped = torch.vmap(lambda q, p: apply(q, q, p)[0])(q, positions)
    assert_nonfinite_only(mapped.detach(), clean.detach(), (1, slice(None), 7))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_nonfinite_channels_affect_only_their_block(family: str, backend: str, value: float) -> None:
    encoding = FAMILIES[family]()
    apply, positions = rotation_of(encoding, backend), tr.grid(4, 5, spacing=0.25)
    b = encoding.block_size
    for channel in (0, encoding.head_dim - 1):
        q = vectors(encoding).requires_grad_()
        block = slice(channel // b * b, channel // b * b + b)
        clean = apply(q, q, positions)[0].detach()
        spoiled = q.detach().clone()
        spoiled[1, 0, 7, channel] = value
        assert_nonfinite_only(apply(spoiled, spoiled, positions)[0].detach(), clean, (1, 0, 7, block))
        upstream = torch.randn_like(clean)
        (expected,) = torch.autograd.grad(apply(q, q, positions)[0], q, upstream)
        upstream[1, 0, 7, channel] = value
        (actual,) = torch.autograd.grad(apply(q, q, positions)[0], q, upstream)
        assert_nonfinite_only(actual, expected, (1, 0, 7, block))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("axial", "golden", "liere")])
def test_nonfinite_parameters_affect_only_their_block(family: str, backend: str, value: float) -> None:
    encoding = FAMILIES[family]()
    apply, positions, q = rotation_of(encoding, backend), tr.grid(4, 5, spacing=0.25), vectors(encoding)
    clean = apply(q, q, positions)[0].detach()
    upper = getattr(encoding, "upper", None)
    with torch.no_grad():
        if upper is None:
            encoding.frequencies[0, 1, 0] = value
        else:
            upper[..., 1, 0, 0] = value  # head 1, block 0
    b = encoding.block_size
    dirty = apply(q, q, positions)[0].detach()
    moved = positions.any(dim=-1)
    mask = torch.ones_like(dirty, dtype=torch.bool)
    mask[:, 1, :, :b] = False
    assert_near(dirty[mask], clean[mask])
    assert not dirty[:, 1, moved, :b].isfinite().any(dim=-1).all()


EMPTY = [0, 2]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rotate_accepts_empty_dimensions(family: str, backend: str) -> None:
    """With 0 samples, heads or tokens of q, k and positions, shapes are kept and gradients are finite."""
    for batch, heads, tokens, sets in itertools.product(EMPTY, EMPTY, EMPTY, (None, 0, 2)):
        for keys in ("alike", "full"):
            encoding = FAMILIES[family]()
            q = torch.randn(batch, heads, tokens, encoding.head_dim, requires_grad=True)
            of_k = (batch, heads, tokens) if keys == "alike" else (batch, 2, tokens)
            k = torch.randn(*of_k, encoding.head_dim, requires_grad=True)
            shape = (tokens, 2) if sets is None else (sets, tokens, 2)
            try:
                rotated = under(backend, tr.rotate, q, k, under(backend, encoding, torch.zeros(shape)), layout="bhtd")
            except ValueError as error:
                assert "\n" not in str(error)  # noqa: PT017
                continue
            assert [x.shape for x in rotated] == [q.shape, k.shape]
            leaves = [q, k, *encoding.parameters()]
            gradients = torch.autograd.grad(rotated, leaves, [torch.ones_like(x) for x in rotated], allow_unused=True)
            assert all(g is None or g.isfinite().all() for g in gradients)


@pytest.fixture(scope="module")
def without_memory(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Build the kernels with allocations that fail after a given number."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "limit.c").write_text(
        "#include <stdint.h>\n#include <stdlib.h>\n"
        '__attribute__((visibility("default"))) int64_t allocations_left = -1;\n'
        "int limited(void **memory, size_t alignment, size_t size) {\n"
        "    if (allocations_left == 0) return 12;\n"
        "    if (allocations_left > 0) allocations_left--;\n"
        "    return (posix_memalign)(memory, alignment, size);\n"
        "}\n"
    )
    (folder / "limit.h").write_text(
        "#include <stdlib.h>\nint limited(void **, size_t, size_t);\n"
        "#define posix_memalign(memory, alignment, size) limited(memory, alignment, size)\n"
    )
    library = build(folder / "limited.so", "-O0", "-include", str(folder / "limit.h"), sources=[folder / "limit.c"])
    return ctypes.CDLL(str(library))


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_failed_allocations_raise_errors(
    family: str, without_memory: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = FAMILIES[family]()
    q, positions = vectors(encoding).requires_grad_(), tr.grid(4, 5, spacing=0.25).requires_grad_()
    leaves = [q, positions, *encoding.parameters()]

    def step() -> tuple[Tensor, ...]:
        rotated, _ = tr.rotate(q, q, encoding(positions))
        return (rotated, *torch.autograd.grad(rotated.square().cumsum(-1).sum(), leaves))

    expected = step()
    monkeypatch.setattr(native, "LIBRARY", without_memory)
    left = ctypes.c_int64.in_dll(without_memory, "allocations_left")
    failures = 0
    for allowed in itertools.count():
        left.value = allowed
        try:
            actual = step()
        except MemoryError as error:
            assert str(error).startswith("torchrope_")  # noqa: PT017
            failures += 1
            continue
        finally:
            left.value = -1
        break
    assert failures >= (1 if family in ("axial", "golden") else 2)
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other)


@needs_kernels
def test_missing_kernels_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, q = FAMILIES["mixed"](), vectors(FAMILIES["mixed"]())
    monkeypatch.setattr(native, "LIBRARY", None)
    backends._warn_not_built.cache_clear()
    with pytest.warns(UserWarning, match=r"^torchrope computes with plain PyTorch on CPUs: .*$") as warned:
        tr.rotate(q, q, encoding(tr.grid(4, 5)))
    assert len(warned) == 1
    tr.rotate(q, q, encoding(tr.grid(4, 5)))  # a second warning would be an error
