"""`torchrope.backend` chooses the implementation, and nothing else does."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError, checkpoint

import torchrope as tr
from torchrope.ops import native
from torchrope.ops.backends import current

needs_kernels = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")


def rotate(encoding: tr.Encoding, q: Tensor) -> Tensor:
    return tr.rotate(q, q, encoding(tr.grid(3, 3)))[0]


def liere() -> tr.Encoding:
    return tr.LieRE(num_axes=2, num_heads=2, head_dim=8, block_size=4)


def test_inner_contexts_win_and_end_also_by_an_exception() -> None:
    assert current() == "auto"
    with tr.backend("reference"):
        with pytest.raises(RuntimeError, match="native"), tr.backend("native"):
            raise RuntimeError(current())
        assert current() == "reference"
    assert current() == "auto"


def test_one_context_may_be_entered_again() -> None:
    twice = tr.backend("reference")
    with twice, tr.backend("native"), twice:
        assert current() == "reference"
    assert current() == "auto"


def test_unknown_names_raise_one_line() -> None:
    with pytest.raises(ValueError, match=r"^backend must be one of .*native, triton, got 'cuda-graph'"):
        tr.backend("cuda-graph")


def test_other_threads_keep_their_choice() -> None:
    names = []
    with tr.backend("reference"):
        thread = threading.Thread(target=lambda: names.append(current()))
        thread.start()
        thread.join()
    assert names == ["auto"]


@needs_kernels
@pytest.mark.parametrize("build", [liere, lambda: tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)])
def test_reference_calls_no_kernel_and_its_gradients_have_gradients(
    build: Callable[[], tr.Encoding], called: list[str]
) -> None:
    encoding, q = build(), torch.randn(1, 2, 9, 8, requires_grad=True)
    with tr.backend("reference"):
        rotated = rotate(encoding, q)
    (gradient,) = torch.autograd.grad(rotated.square().sum(), q, create_graph=True)
    gradient.square().sum().backward()
    assert "torchrope_block" not in called
    assert "torchrope_skew_exp" not in called
    assert not any("planar" in name for name in called)


@needs_kernels
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_inside_the_block_uses_its_choice(use_reentrant: bool, called: list[str]) -> None:
    encoding, q = liere(), torch.randn(1, 2, 9, 8, requires_grad=True)
    with tr.backend("reference"):
        checkpoint(lambda x: rotate(encoding, x).square(), q, use_reentrant=use_reentrant).sum().backward()
    assert called == []


@needs_kernels
def test_recomputation_after_the_block_is_pytorchs_error() -> None:
    encoding, q = liere(), torch.randn(1, 2, 9, 8, requires_grad=True)
    with tr.backend("reference"):
        out = checkpoint(lambda x: rotate(encoding, x).square(), q, use_reentrant=False)
    with pytest.raises(CheckpointError):
        out.sum().backward()


def test_encodings_and_rotations_do_not_hold_the_choice() -> None:
    encoding, q = liere(), torch.randn(1, 2, 9, 8)
    rotation = encoding(tr.grid(3, 3))
    before = [{**vars(owner)} for owner in (encoding, rotation)]
    with tr.backend("reference"):
        encoding(tr.grid(3, 3))
        tr.rotate(q, q, rotation)
    assert [{**vars(owner)} for owner in (encoding, rotation)] == before


@pytest.mark.slow
def test_choice_is_read_inside_and_around_compiled_functions() -> None:
    encoding, q = liere(), torch.randn(1, 2, 9, 8)

    def inside(q: Tensor) -> Tensor:
        with tr.backend("reference"):
            return rotate(encoding, q)

    # The compiler of torch 2.6 leaves the graph at a context of a user.
    compiled = torch.compile(inside, fullgraph=torch.__version__ >= "2.7", backend="aot_eager")
    assert torch.allclose(compiled(q), rotate(encoding, q), atol=1e-6)
    assert current() == "auto"
    graphs: list[str] = []

    def collect(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    around = torch.compile(lambda q: rotate(encoding, q), fullgraph=True, backend=collect)
    around(q)
    with tr.backend("reference"):
        around(q)
    assert len(graphs) == 2
    assert ["torchrope.rotate_block" in graph for graph in graphs] == [native.LIBRARY is not None, False]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, of forward_ad
@pytest.mark.parametrize("encoding", [tr.AxialRoPE, tr.MixedRoPE, tr.LieRE])
def test_forward_mode_derivatives_are_those_of_the_reference(encoding: type[tr.Encoding]) -> None:
    rotation_of = encoding(num_axes=2, num_heads=2, head_dim=8)
    q, tangent = torch.randn(2, 1, 2, 9, 8)

    def turn(q: Tensor) -> Tensor:
        return tr.rotate(q, q, rotation_of(tr.grid(3, 3)), layout="bhtd")[0]

    expected = turn(tangent)  # linear in q
    with forward_ad.dual_level(), torch.no_grad():
        found = forward_ad.unpack_dual(turn(forward_ad.make_dual(q, tangent))).tangent
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    refused = pytest.raises(ValueError, match="'native' has no derivatives in forward mode")
    with tr.backend("native"), forward_ad.dual_level(), refused:
        turn(forward_ad.make_dual(q, tangent))


@pytest.mark.parametrize("build", [liere, lambda: tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)])
def test_transforms_of_torch_func_take_the_reference(build: Callable[[], tr.Encoding], called: list[str]) -> None:
    encoding, q = build(), torch.randn(3, 1, 2, 9, 8)
    expected = rotate(encoding, q)
    called.clear()
    mapped = torch.vmap(lambda q: rotate(encoding, q))(q)
    torch.func.grad(lambda q: rotate(encoding, q).square().sum())(q)
    assert called == []
    torch.testing.assert_close(mapped, expected, atol=1e-5, rtol=1e-5)
    for name in ("native", "triton"):
        with tr.backend(name), pytest.raises(ValueError, match=f"^backend '{name}' supports no torch.func transform"):
            torch.vmap(lambda q: rotate(encoding, q))(q)


def test_one_context_in_two_threads() -> None:
    shared, first, second, left = tr.backend("reference"), *[threading.Event() for _ in range(3)]
    seen = []

    def other() -> None:
        with tr.backend("native"):
            first.wait()
            with shared:
                second.set()
                left.wait()
            seen.append(current())
        seen.append(current())

    thread = threading.Thread(target=other)
    thread.start()
    with shared:
        first.set()
        second.wait()
    left.set()
    thread.join()
    assert (current(), seen) == ("auto", ["native", "auto"])
