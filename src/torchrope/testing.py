"""The laws that every rotary encoding keeps, for your own encodings too.

    >>> from functools import partial
    >>> import torchrope as tr
    >>> tr.testing.check(partial(tr.MixedRoPE, num_axes=2, num_heads=2, head_dim=8))

A law takes what builds the encoding, without arguments, and raises AssertionError where it is broken. Reference
values are float64 `torch.linalg.matrix_exp` of the dense generator.
"""

import copy
import pickle
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from torchrope.encodings import Encoding
from torchrope.ops import rotate
from torchrope.positions import prefix
from torchrope.rotations import block_diagonal

Make = Callable[[], Encoding]

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}
"""Largest absolute error of a rotation, or of a rotated standard normal vector, against float64."""

LAWS: dict[str, Callable[[Make], None]] = {}
"""Every law by name; `check` runs them all."""


def check(make: Make) -> None:
    """Run every law over an encoding.

    Args:
        make: Builds the encoding, without arguments.

    Raises:
        AssertionError: a law is broken; the message names it.
    """
    for name, holds in LAWS.items():
        try:
            holds(make)
        except AssertionError as broken:
            raise AssertionError(f"{make()} breaks the law {name!r}: {broken}") from broken


def law(holds: Callable[[Make], None]) -> Callable[[Make], None]:
    """Add a function to `LAWS` under its own name, with spaces."""
    LAWS[holds.__name__.replace("_", " ")] = holds
    return holds


def assert_close(actual: Tensor, truth: Tensor, what: str, dtype: torch.dtype | None = None) -> None:
    """Assert that the error against the truth is within the tolerance of a dtype, the actual one's by default."""
    if actual.shape != truth.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(truth.shape)}")
    limit = TOLERANCE[dtype or actual.dtype]
    error = (actual.double() - truth.double()).abs().max().item() if actual.numel() else 0.0
    if not error <= limit:
        raise AssertionError(f"{what}: error {error:.3g} exceeds {limit:.3g} for {dtype or actual.dtype}")


@law
def generators_are_skew_blocks(make: Make) -> None:
    """A^T = -A exactly, of the shape that the encoding promises, inside the rotated channels."""
    encoding = make()
    generators = encoding.generators()
    b = encoding.block_size
    heads = encoding.parameter_heads
    promised = (encoding.num_axes, heads, encoding.rotary_dim // b, b, b)
    _require(tuple(generators.shape) == promised, f"generators {tuple(generators.shape)}, promised {promised}")
    _require(torch.equal(generators, -generators.mT), "A^T = -A fails")


@law
def rotations_are_orthogonal(make: Make) -> None:
    """R^T R = I and det R = 1."""
    for encoding in _both_precisions(make):
        matrix = encoding(_positions(encoding)).matrix()
        identity = torch.eye(encoding.head_dim, dtype=matrix.dtype).expand_as(matrix)
        assert_close(matrix.mT @ matrix, identity, "R^T R - I")
        assert_close(torch.linalg.det(matrix), torch.ones(matrix.shape[:-2]), "det R - 1")


@law
def the_origin_does_not_turn(make: Make) -> None:
    """R(0) = I, exactly: prefix tokens are left alone."""
    encoding = make()
    matrix = encoding(prefix(_positions(encoding), 2)).matrix()[..., :2, :, :]
    _require(torch.equal(matrix, torch.eye(encoding.head_dim).expand_as(matrix)), "R(0) is not I")


@law
def rotations_equal_the_matrix_exponential(make: Make) -> None:
    """R(p) is the float64 matrix exponential of the dense sum_a p_a A_a."""
    for encoding in _both_precisions(make):
        positions = _positions(encoding)
        assert_close(encoding(positions).matrix(), _dense_truth(encoding, positions), "R - exp(sum p A)")


@law
def rotate_multiplies_by_the_matrix(make: Make) -> None:
    """rotate(q, k) is R q and R k, in each dtype, for shared and for per-sample positions; inverse undoes it."""
    encoding = make()
    for positions in (_positions(encoding), torch.stack([_positions(encoding), -_positions(encoding)])):
        truth = _dense_truth(encoding, positions)
        rotation = encoding(positions)
        for dtype in TOLERANCE:
            q, k = _vectors(encoding, positions.shape[-2], dtype)
            for x, turned in zip((q, k), rotate(q, k, rotation), strict=True):
                _require(turned.dtype == dtype, f"{dtype} came back as {turned.dtype}")
                expected = (truth @ x.double().unsqueeze(-1)).squeeze(-1)
                # float32 angles bound a float64 result too.
                assert_close(turned, expected, "rotate(x) - R x", torch.float32 if dtype.itemsize > 4 else dtype)
        q, k = _vectors(encoding, positions.shape[-2], torch.float32)
        back, _ = rotate(*rotate(q, k, rotation), rotation.inverse())
        assert_close(back, q, "R^-1 R q - q")


@law
def scores_are_relative_where_claimed(make: Make) -> None:
    """R(p)^T R(p') depends on p' - p alone where `relative`, and demonstrably not where it is False."""
    encoding = make().double()
    here, there = _positions(encoding), _positions(encoding).flip(0)
    moved = torch.full((encoding.num_axes,), 0.7, dtype=torch.float64)
    error = (_relation(encoding, here, there) - _relation(encoding, here + moved, there + moved)).abs().max().item()
    if encoding.relative:
        _require(error <= 1e-9, f"claims to be relative, but a common shift changes R(p)^T R(p') by {error:.3g}")
    elif encoding.generators().any():
        _require(
            error >= 1e-3,
            f"claims not to be relative, but a common shift changes R(p)^T R(p') by {error:.3g}",
        )


@law
def tokens_permute_with_their_positions(make: Make) -> None:
    """A token's rotation depends on its own position alone, also in a batch of positions."""
    encoding = make()
    positions = _positions(encoding)
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))
    matrix = encoding(positions).matrix()
    assert_close(encoding(positions[order]).matrix(), matrix[:, order], "permuted R - R permuted")
    batch = encoding(torch.stack([positions, positions[order]])).matrix()
    assert_close(batch, torch.stack([matrix, matrix[:, order]]), "R of a batch - R of each sample")


@law
def gradients_are_exact(make: Make) -> None:
    """torch.autograd.gradcheck to q, k, positions and parameters; at zero and at equal frequencies too."""
    _gradcheck(make().double(), "as built")
    if takes_generators(make()):
        for where, change in (
            ("at zero generators", torch.zeros_like),
            ("at equal frequencies", _equal_frequencies),
        ):
            encoding = make().double()
            encoding.set_generators(change(encoding.generators().detach()))
            _gradcheck(encoding, where)


@law
def compiles_into_one_graph(make: Make) -> None:
    """torch.compile(fullgraph=True) gives the same outputs and gradients."""
    encoding = make()
    positions = _positions(encoding)
    q, k = _vectors(encoding, len(positions), torch.float32)

    def score(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        turned_q, turned_k = rotate(q, k, encoding(positions))
        return turned_q @ turned_k.mT

    torch.compiler.reset()
    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    expected, actual = score(q, k, positions), compiled(q, k, positions)
    assert_close(actual / encoding.head_dim, expected / encoding.head_dim, "compiled - eager")
    for one, other in zip(_gradients(encoding, expected), _gradients(encoding, actual), strict=True):
        scale = max(one.abs().max().item(), 1.0) if one.numel() else 1.0
        assert_close(other / scale, one / scale, "compiled gradient - eager gradient")


@law
def survives_saving_and_copying(make: Make) -> None:
    """state_dict, deepcopy and pickle give the same generators back."""
    encoding, other = make(), make()
    other.load_state_dict(encoding.state_dict())
    copies = {
        "state_dict": other,
        "deepcopy": copy.deepcopy(encoding),
        "pickle": pickle.loads(pickle.dumps(encoding)),
    }
    for road, same in copies.items():
        _require(torch.equal(same.generators(), encoding.generators()), f"{road} changed the generators")


@law
def builds_on_the_meta_device(make: Make) -> None:
    """Built on meta, given storage and reset, it holds the numbers that it would have been built with."""
    torch.manual_seed(0)
    encoding = make()
    with torch.device("meta"):
        empty = make()
    _require(all(p.is_meta for p in empty.parameters()), "a parameter was not built on the meta device")
    built = empty.to_empty(device="cpu")
    torch.manual_seed(0)
    built.reset_parameters()
    _require(torch.equal(built.generators(), encoding.generators()), "reset_parameters gave other numbers")


@law
def takes_its_own_generators(make: Make) -> None:
    """set_generators(generators()) changes nothing; wrong shapes and symmetric blocks are refused."""
    if not takes_generators(make()):
        return
    encoding, other = make(), make()
    generators = encoding.generators().detach()
    other.set_generators(generators)
    scale = max(generators.abs().max().item(), 1.0) if generators.numel() else 1.0
    assert_close(other.generators() / scale, generators / scale, "generators after set_generators")
    refused = [generators[1:], generators[0]]
    if generators.numel():
        refused.append(generators[..., :-1])
        refused.append(generators.abs() + torch.eye(encoding.block_size))
    for bad in refused:
        try:
            other.set_generators(bad)
        except ValueError:
            continue
        raise AssertionError(f"set_generators took {tuple(bad.shape)} that are not its generators")


@law
def zero_generators_leave_attention_alone(make: Make) -> None:
    """With zero generators q and k come back bit for bit."""
    encoding = make()
    if not takes_generators(encoding):
        return
    encoding.set_generators(torch.zeros_like(encoding.generators()))
    positions = _positions(encoding)
    for dtype in TOLERANCE:
        q, k = _vectors(encoding, len(positions), dtype)
        for scores_only in (False, True):
            turned_q, turned_k = rotate(q, k, encoding(positions), scores_only=scores_only)
            _require(torch.equal(turned_q, q) and torch.equal(turned_k, k), f"{dtype} vectors changed")


@law
def precision_is_the_librarys_own_affair(make: Make) -> None:
    """Autocast does not touch the angles, integer positions and zero tokens simply work."""
    encoding = make()
    whole = _positions(encoding).round()
    exact = encoding(whole).matrix()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _require(torch.equal(encoding(whole).matrix(), exact), "autocast changed the rotation")
    _require(torch.equal(encoding(whole.long()).matrix(), exact), "integer positions differ from float ones")
    q, k = _vectors(encoding, 0, torch.float32)
    _require(rotate(q, k, encoding(whole[:0]))[0].shape == q.shape, "zero tokens changed the shape")


@law
def refuses_bad_positions(make: Make) -> None:
    """A wrong number of axes, NaN and infinity raise ValueError."""
    encoding = make()
    good = _positions(encoding)
    bad = {"one axis more": torch.cat([good, good[:, :1]], dim=-1), "one dimension": good[:, 0]}
    bad |= {
        str(value): torch.where(torch.arange(len(good))[:, None] == 1, value, good) for value in (torch.nan, torch.inf)
    }
    for what, positions in bad.items():
        try:
            encoding(positions)
        except ValueError:
            continue
        raise AssertionError(f"positions with {what} were taken")


def takes_generators(encoding: Encoding) -> bool:
    """Whether the family has written the way back from generators to its parameters."""
    return type(encoding)._take_generators is not Encoding._take_generators


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _positions(encoding: Encoding, tokens: int = 5) -> Tensor:
    """A few places off the lattice, within three units of the origin, in the encoding's own precision."""
    generator = torch.Generator().manual_seed(encoding.num_axes)
    places = torch.rand(tokens, encoding.num_axes, generator=generator, dtype=torch.float64) * 6 - 3
    parameters = [*encoding.parameters(), *encoding.buffers()]
    return places.to(parameters[0].dtype if parameters else torch.float32)


def _both_precisions(make: Make) -> tuple[Encoding, Encoding]:
    return make(), make().double()


def _vectors(encoding: Encoding, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and keys `(2, heads, tokens, head_dim)`."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, 2, encoding.num_heads, tokens, encoding.head_dim)
    q, k = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).unbind(0)
    return q, k


def _dense_truth(encoding: Encoding, positions: Tensor) -> Tensor:
    """exp(sum_a p_a A_a) in float64, dense."""
    blocks = encoding.generators().detach().double()
    dense = block_diagonal(blocks, encoding.head_dim)  # (axes, heads, head_dim, head_dim)
    dense = dense - torch.diag_embed(dense.diagonal(dim1=-2, dim2=-1))
    exponent = torch.einsum("...ta,ahij->...htij", positions.double(), dense).contiguous()
    matrix = torch.linalg.matrix_exp(exponent)  # (..., heads or 1, tokens, head_dim, head_dim)
    return matrix.expand(*matrix.shape[:-4], encoding.num_heads, *matrix.shape[-3:])


def _relation(encoding: Encoding, here: Tensor, there: Tensor) -> Tensor:
    return encoding(here).matrix().mT @ encoding(there).matrix()


def _equal_frequencies(generators: Tensor) -> Tensor:
    """Replace each block by a multiple of the one whose planes all turn alike, keeping its size and sign."""
    b = generators.shape[-1]
    turn = torch.zeros(b, b, dtype=generators.dtype)
    even = torch.arange(0, b - 1, 2)
    turn[even + 1, even], turn[even, even + 1] = 1.0, -1.0
    along = generators[..., 1:2, 0:1]
    return along * turn


def _gradcheck(encoding: Encoding, where: str) -> None:
    """Check derivatives to everything that has them, over two tokens and one sample."""
    parameters = dict(encoding.named_parameters())
    positions = (_positions(encoding, tokens=2) / 3).requires_grad_()
    q, k = (x[:1].clone().requires_grad_() for x in _vectors(encoding, 2, torch.float64))

    def turned(q: Tensor, k: Tensor, positions: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        rotation = functional_call(encoding, dict(zip(parameters, values, strict=True)), (positions,))
        return rotate(q, k, rotation)

    free = [p.detach().clone().requires_grad_() for p in parameters.values()]
    try:
        torch.autograd.gradcheck(turned, (q, k, positions, *free), fast_mode=True, atol=1e-5, rtol=1e-4)
    except GradcheckError as error:
        raise AssertionError(f"gradient {where}: {str(error).splitlines()[0]}") from error


def _gradients(encoding: Encoding, output: Tensor) -> tuple[Tensor, ...]:
    parameters = tuple(encoding.parameters())
    return torch.autograd.grad(output.square().mean(), parameters) if parameters else ()
