"""Properties that every rotary encoding must have; `check` tests them on an encoding.

    >>> from functools import partial
    >>> import torchrope as tr
    >>> print(tr.testing.check(partial(tr.MixedRoPE, num_axes=2, num_heads=2, head_dim=8)))
    MixedRoPE(num_axes=2, num_heads=2, head_dim=8, block_size=2): 23 properties passed, 0 do not apply
    passed      tensors are parameters or buffers
    ...
    passed      rotations are orthogonal: error ..., allowed ...
    ...

A property is a function of a callable that builds the encoding. It raises AssertionError if the encoding does not have
the property, and returns the largest error measured. Reference values are the float64 `torch.linalg.matrix_exp` of the
dense generators.
"""

import copy
import functools
import pickle
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call
from torch.overrides import TorchFunctionMode, resolve_name

from torchrope.encodings import Encoding
from torchrope.encodings.base import in_basis
from torchrope.encodings.names import takes
from torchrope.positions import prefix
from torchrope.rotating import rotate
from torchrope.tensors import block_diagonal

Make = Callable[[], Encoding]

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}
"""Largest absolute error of a rotation, or of a rotated standard normal vector, against float64."""


class Measured(NamedTuple):
    """A measured error, the largest error allowed, and the dtype of the measured result."""

    error: float
    allowed: float
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        of = "" if self.dtype is None else f" in {str(self.dtype).removeprefix('torch.')}"
        return f"error {self.error:.2g}{of}, allowed {self.allowed:.2g}"


PROPERTIES: dict[str, Callable[[Make], Measured | None]] = {}
"""Properties by name, in the order of testing; a failure often causes those after it."""


@dataclass(frozen=True, repr=False)
class CheckResult:
    """Result of `check`; its repr is a table with one line per property.

    Attributes:
        encoding: Class and arguments of the encoding.
        passed: The largest measured error of each property; None if it measures none, as for equality.
        skipped: Why each skipped property does not apply.
    """

    encoding: str
    passed: Mapping[str, Measured | None]
    skipped: Mapping[str, str]

    def __repr__(self) -> str:
        title = f"{self.encoding}: {len(self.passed)} properties passed, {len(self.skipped)} do not apply"
        return "\n".join([title, *_lines({}, self.passed, self.skipped)])


def check(make: Make) -> CheckResult:
    """Test every property of an encoding.

    Args:
        make: Callable without arguments that builds a new encoding: `functools.partial(MyEncoding, num_axes=2, ...)`.

    Returns:
        The properties that passed, with the largest errors measured, and those that do not apply.

    Raises:
        AssertionError: the encoding cannot be built or has no generators; or properties fail. The message names each,
            with the usual cause or the measured error, and then those that passed. An exception in a property counts as
            its failure.
        TypeError: make is an encoding instead of a callable that builds one.
    """
    passed: dict[str, Measured | None] = {}
    failed: dict[str, Exception] = {}
    skipped: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = _built(make)
        for name, holds in PROPERTIES.items():
            try:
                passed[name] = holds(make)
            except DoesNotApply as reason:
                skipped[name] = str(reason)
            except Exception as error:
                failed[name] = error
    shown = f"{type(encoding).__name__}({encoding.extra_repr()})"
    if not failed:
        return CheckResult(shown, passed, skipped)
    title = f"{shown}: {len(failed)} of {len(PROPERTIES)} properties failed; the first usually explains the others"
    raise AssertionError("\n".join([title, *_lines(failed, passed, skipped)])) from next(iter(failed.values()))


class DoesNotApply(Exception):
    """Raised by a property that is not defined for this kind of encoding."""


def has_property(measure: Callable[[Make], Iterator[Measured] | None]) -> Callable[[Make], Measured | None]:
    """Register a function in `PROPERTIES` under its name with spaces; its result is its largest error / allowed."""

    @functools.wraps(measure)
    def holds(make: Make) -> Measured | None:
        return max(measure(make) or (), key=lambda measured: measured.error / measured.allowed, default=None)

    PROPERTIES[measure.__name__.replace("_", " ")] = holds
    return holds


def assert_close_to_scale(actual: Tensor, truth: Tensor, what: str) -> Measured:
    """Apply `assert_close` to both tensors divided by the largest magnitude of the truth, if that is above 1."""
    scale = max(truth.abs().max().item(), 1.0) if truth.numel() else 1.0
    return assert_close(actual / scale, truth / scale, what)


def assert_close(actual: Tensor, truth: Tensor, what: str, dtype: torch.dtype | None = None) -> Measured:
    """Assert that the largest absolute error is within the tolerance of a dtype, by default that of `actual`."""
    if actual.shape != truth.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(truth.shape)}")
    limit = TOLERANCE[dtype or actual.dtype]
    error = (actual.double() - truth.double()).abs().max().item() if actual.numel() else 0.0
    if not error <= limit:
        raise AssertionError(f"{what}: error {error:.3g} exceeds {limit:.3g} for {dtype or actual.dtype}")
    return Measured(error, limit, dtype or actual.dtype)


@has_property
def tensors_are_parameters_or_buffers(make: Make) -> None:
    """Every tensor of the module is an `nn.Parameter` or a buffer, so that the model saves, moves and trains it."""
    problems = []
    for prefix_, module in make().named_modules(prefix="self"):
        for name, value in vars(module).items():
            if name in vars(nn.Module()):
                continue
            where = f"`{prefix_}.{name}`"
            if isinstance(value, Tensor) and value.grad_fn is not None:
                problems.append(f"{where} was computed from a parameter; keep the parameter, compute in generators()")
            elif isinstance(value, Tensor):
                problems.append(f"{where} is a plain tensor; wrap it in nn.Parameter to learn it, or register_buffer")
            elif isinstance(value, list | tuple | dict):
                items = value.values() if isinstance(value, dict) else value
                if any(isinstance(item, Tensor | nn.Module) for item in items):
                    kind = type(value).__name__
                    problems.append(f"{where} is a {kind}, not registered; use nn.ParameterList or nn.ModuleList")
    _require(not problems, "tensors must be parameters or buffers, but " + "; ".join(problems))


@has_property
def generators_have_the_promised_shape(make: Make) -> None:
    """generators() returns finite numbers of shape `(num_axes, num_heads or 1, rotary_dim / b, b, b)`.

    frequencies_per_axis() and factors_and_base() return what `Encoding` promises of them.
    """
    encoding = make()
    generators, b = encoding.generators(), encoding.block_size
    promised = (encoding.num_axes, encoding.parameter_heads, encoding.num_blocks, b, b)
    shape, cause = tuple(generators.shape), ""
    if b == 2 and shape == promised[:3]:
        cause = "; these are frequencies, convert them with planar(frequencies)"
    elif sorted(shape) == sorted(promised):
        cause = "; the dimensions are in another order"
    elif shape[1:2] == (encoding.num_heads,) and encoding.shared_heads:
        cause = "; with shared_heads=True there is one head, self.parameter_heads"
    rule = f"(num_axes, {'1' if encoding.shared_heads else 'num_heads'}, rotary_dim / b, b, b) = {promised}"
    _require(shape == promised, f"generators() must return {rule}, got {shape}{cause}")
    _require(generators.is_floating_point(), f"generators() must return real floating point, got {generators.dtype}")
    _require(
        bool(generators.isfinite().all()),
        "generators() must be finite, got NaN or infinity; does __init__ end with self.reset_parameters()?",
    )
    try:
        encoding._checked_factors_and_base()
        if encoding.has_frequencies:
            encoding._checked_frequencies()
    except ValueError as error:
        raise AssertionError(_one_line(error).removeprefix("ValueError: ")) from error


@has_property
def generators_are_skew_symmetric(make: Make) -> None:
    """A^T = -A, exactly."""
    generators = make().generators()
    error = (generators + generators.mT).abs().max().item() if generators.numel() else 0.0
    fix = "return x - x.mT, or skew(upper, b) of the strict upper triangle"
    _require(error == 0, f"generators must be skew-symmetric, A^T = -A, got A + A^T of up to {error:.3g}; {fix}")


@has_property
def generators_follow_the_device_and_dtype(make: Make) -> None:
    """`.to(device)` and `.double()` of the module convert its generators; tested on the meta device, not a GPU."""
    cause = "a tensor in it is created without device= and dtype=, or is neither parameter nor buffer"
    dtype = make().double().generators().dtype
    _require(dtype == torch.float64, f"generators() of a float64 module must be float64, got {dtype}; {cause}")
    encoding = make().to("meta")
    try:
        device = encoding.generators().device
    except Exception as error:
        if "item()" in str(error):
            cause = "it reads values: no .item(), float() or `if` on tensors"
        raise AssertionError(f"generators() must run on the meta device, got {_one_line(error)}; {cause}") from error
    _require(device.type == "meta", f"generators() must be on the module's device, meta, got {device}; {cause}")


@has_property
def generators_depend_on_the_parameters_alone(make: Make) -> None:
    """generators() returns the same at each call, also after forward(), which does not change its positions."""
    encoding, positions = make(), _positions(make())
    first, state = encoding.generators().detach().clone(), torch.random.get_rng_state()
    same, drew = _same(encoding.generators(), first), not torch.equal(torch.random.get_rng_state(), state)
    draws = "it draws random numbers; draw them in reset_parameters()"
    cause = draws if drew else "it changes a tensor in place or keeps state"
    _require(same, f"generators() must return the same at each call, but {cause}")
    copied = positions.clone()
    encoding(copied)
    _require(torch.equal(copied, positions), "forward() must not change positions in place")
    _require(
        _same(encoding.generators(), first),
        "generators() must depend on parameters alone, but forward() changed them; store no positions in self",
    )


@has_property
def every_parameter_changes_the_generators(make: Make) -> None:
    """Each parameter that requires a gradient changes the generators and gets a gradient through them."""
    encoding = make()
    learned = {name: p for name, p in encoding.named_parameters() if p.requires_grad}
    if not learned:
        raise DoesNotApply("no parameter requires a gradient")
    with _Detaching() as calls:
        generators = encoding.generators()
    gradients: tuple[Tensor | None, ...] = (None,) * len(learned)
    if generators.requires_grad:
        some_sum = (generators * torch.randn_like(generators)).sum()
        gradients = torch.autograd.grad(some_sum, tuple(learned.values()), retain_graph=True, allow_unused=True)
    with torch.no_grad():  # away from zeros, where one parameter may cancel the effect of another
        for p in learned.values():
            p.add_(torch.randn_like(p), alpha=0.1)
    wrong = []
    for (name, p), gradient in zip(learned.items(), gradients, strict=True):
        before = encoding.generators().detach().clone()
        with torch.no_grad():
            p.add_(torch.randn_like(p), alpha=0.1)
        moved = not _same(encoding.generators(), before)
        if gradient is None and moved:
            cause = " and ".join(sorted(calls.names)) or ".detach(), .item(), .numpy() or a second nn.Parameter(...)"
            wrong.append(f"`{name}` gets no gradient, because of {cause} in generators()")
        elif gradient is None:
            wrong.append(f"`{name}` is not used in generators(); use it or remove it")
        elif gradient.any() and gradient.isfinite().all() and not moved:
            wrong.append(f"`{name}` is used once, before generators() is called; compute in generators()")
    _require(not wrong, "every parameter must change generators(), but " + "; ".join(wrong))


@has_property
def frequencies_and_factors_equal_the_generators(make: Make) -> Iterator[Measured]:
    """frequencies_per_axis() and factors_and_base(), if an encoding defines them, agree with its generators()."""
    encoding = make()
    generators = encoding.generators()
    overridden = {}
    if encoding.has_frequencies and type(encoding).frequencies_per_axis is not Encoding.frequencies_per_axis:
        overridden["planar(frequencies_per_axis())"] = in_basis(encoding.frequencies_per_axis(), encoding.basis())
    factored = encoding.factors_and_base()
    if factored is not None:
        factors, base = factored
        overridden["c B of factors_and_base()"] = factors[..., None, None] * base
    if not overridden:
        raise DoesNotApply("neither frequencies_per_axis nor factors_and_base is overridden")
    for what, value in overridden.items():
        yield assert_close_to_scale(value.expand_as(generators), generators, f"{what} - generators()")


@has_property
def reset_parameters_draws_every_parameter(make: Make) -> None:
    """reset_parameters() writes every parameter and buffer, with the same values as __init__ from the same seed."""
    torch.manual_seed(0)
    encoding = make()
    initial = encoding.generators().detach().clone()
    tensors = {name: x for name, x in _tensors(encoding).items() if x.numel() and x.dtype != torch.bool}
    if not tensors:
        raise DoesNotApply("it has neither parameters nor buffers")
    for x in tensors.values():
        x.detach().fill_(torch.nan if x.is_floating_point() or x.is_complex() else torch.iinfo(x.dtype).max)
    unwritten = {name: x.detach().clone() for name, x in tensors.items()}
    torch.manual_seed(0)
    encoding.reset_parameters()
    replaced = _replaced(encoding, tensors)
    _require(not replaced, f"reset_parameters() must write in place, but made a new {', '.join(replaced)}; use nn.init")
    unchanged = [f"`{name}`" for name, x in tensors.items() if bool((_equal(x, unwritten[name])).any())]
    defined = type(encoding).reset_parameters is not Encoding.reset_parameters
    does = "does not write" if defined else f"{type(encoding).__name__} does not define it to write"
    names = ", ".join(unchanged)
    _require(not unchanged, f"reset_parameters() must write every parameter and buffer, but {does} {names}")
    _require(
        _same(encoding.generators(), initial),
        "reset_parameters() must draw the same values as __init__ from the same seed; let __init__ allocate them by "
        "torch.empty and end with self.reset_parameters()",
    )


@has_property
def builds_on_the_meta_device(make: Make) -> None:
    """Built on the meta device, allocated and reset, the encoding equals one built directly from the same seed."""
    torch.manual_seed(0)
    encoding = make()
    try:
        with torch.device("meta"):
            empty = make()
    except Exception as error:
        rule = "__init__ must not read values of tensors, so that it runs on the meta device"
        raise AssertionError(f"{rule}: {_one_line(error)}") from error
    wrong_device = [f"`{name}`" for name, x in _tensors(empty).items() if not x.is_meta]
    _require(
        not wrong_device,
        f"__init__ must create tensors on torch's default device, here meta, but {', '.join(wrong_device)} came from "
        "NumPy, from a copy or with device=; create them by torch.empty",
    )
    built = empty.to_empty(device="cpu")
    torch.manual_seed(0)
    built.reset_parameters()
    _require(_same(built.generators(), encoding.generators()), "reset_parameters() gave other values after to_empty()")


@has_property
def rotations_are_orthogonal(make: Make) -> Iterator[Measured]:
    """R^T R = I and det R = 1."""
    for encoding in (make(), make().double()):
        matrix = encoding(_positions(encoding)).matrix()
        identity = torch.eye(encoding.head_dim, dtype=matrix.dtype).expand_as(matrix)
        yield assert_close(matrix.mT @ matrix, identity, "R^T R - I")
        yield assert_close(torch.linalg.det(matrix), torch.ones(matrix.shape[:-2]), "det R - 1")


@has_property
def rotations_at_the_origin_are_the_identity(make: Make) -> None:
    """R(0) = I, exactly, so that prefix tokens stay unchanged."""
    encoding = make()
    matrix = encoding(prefix(_positions(encoding), 2)).matrix()[..., :2, :, :]
    _require(torch.equal(matrix, torch.eye(encoding.head_dim).expand_as(matrix)), "R(0) must be I, exactly")


@has_property
def rotations_equal_the_matrix_exponential(make: Make) -> Iterator[Measured]:
    """R(p) equals the float64 matrix exponential of the dense sum_a p_a A_a."""
    for encoding in (make(), make().double()):
        positions = _positions(encoding)
        yield assert_close(encoding(positions).matrix(), _dense_truth(encoding, positions), "R - exp(sum p A)")


@has_property
def rotate_multiplies_by_the_matrix(make: Make) -> Iterator[Measured]:
    """rotate(q, k) is R q and R k, in each dtype, for shared and per-sample positions; R^-1 R q = q."""
    encoding = make()
    for positions in (_positions(encoding), torch.stack([_positions(encoding), -_positions(encoding)])):
        truth = _dense_truth(encoding, positions)
        rotation = encoding(positions)
        for dtype in TOLERANCE:
            q, k = _vectors(encoding, positions.shape[-2], dtype)
            for x, rotated in zip((q, k), rotate(q, k, rotation, layout="bhtd"), strict=True):
                _require(rotated.dtype == dtype, f"rotate must keep {dtype}, got {rotated.dtype}")
                expected = (truth @ x.double().unsqueeze(-1)).squeeze(-1)
                # float32 angles bound a float64 result too.
                yield assert_close(rotated, expected, "rotate(x) - R x", torch.float32 if dtype.itemsize > 4 else dtype)
        q, k = _vectors(encoding, positions.shape[-2], torch.float32)
        back, _ = rotate(*rotate(q, k, rotation, layout="bhtd"), rotation.inverse(), layout="bhtd")
        yield assert_close(back, q, "R^-1 R q - q")


@has_property
def scores_are_relative_where_claimed(make: Make) -> Iterator[Measured]:
    """R(p)^T R(p') depends on p' - p alone if `relative` is True, and measurably not if it is False."""
    encoding = make().double()
    claimed: object = encoding.relative
    if not isinstance(claimed, bool):
        raise AssertionError(f"relative must be True or False, got a {type(claimed).__name__}; is @property missing?")
    p = _positions(encoding).double()
    before, after = (encoding(x).matrix().mT @ encoding(x.flip(0)).matrix() for x in (p, p + 0.7))  # R(p)^T R(p')
    error = (before - after).abs().max().item()
    if claimed:
        fix = "let generators of different axes commute, or let `relative` return False"
        rule = "if `relative` is True, a common shift of positions must not change R(p)^T R(p')"
        _require(error <= 1e-9, f"{rule}, got a change of {error:.3g}; {fix}")
        yield Measured(error, 1e-9)
    elif not encoding.generators().any():
        raise DoesNotApply("`relative` is False, which cannot be measured with zero generators")
    else:
        rule = "if `relative` is False, a common shift of positions must change R(p)^T R(p') by 0.001 or more"
        _require(error >= 1e-3, f"{rule}, got {error:.3g}; if the generators commute, let `relative` return True")


@has_property
def tokens_permute_with_their_positions(make: Make) -> Iterator[Measured]:
    """A token's rotation depends on its own position alone, also in a batch of positions."""
    encoding = make()
    positions = _positions(encoding)
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))
    matrix = encoding(positions).matrix()
    yield assert_close(encoding(positions[order]).matrix(), matrix[:, order], "permuted R - R permuted")
    batch = encoding(torch.stack([positions, positions[order]])).matrix()
    yield assert_close(batch, torch.stack([matrix, matrix[:, order]]), "R of a batch - R of each sample")


@has_property
def gradients_are_exact(make: Make) -> None:
    """torch.autograd.gradcheck of q, k, positions and parameters passes; also at zero and at equal frequencies."""
    _gradcheck(make().double(), "as built")
    if takes_generators(make()):
        for where, change in (("at zero generators", torch.zeros_like), ("at equal frequencies", _equal_frequencies)):
            encoding = make().double()
            encoding.set_generators(change(encoding.generators().detach()))
            _gradcheck(encoding, where)


@has_property
def compiles_into_one_graph(make: Make) -> Iterator[Measured]:
    """torch.compile(fullgraph=True) gives the same outputs and gradients."""
    encoding = make()
    positions = _positions(encoding)
    q, k = (x.requires_grad_() for x in _vectors(encoding, len(positions), torch.float32))

    def score(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        rotated_q, rotated_k = rotate(q, k, encoding(positions), layout="bhtd")
        return rotated_q @ rotated_k.mT

    torch.compiler.reset()
    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    expected, actual = score(q, k, positions), compiled(q, k, positions)
    yield assert_close(actual / encoding.head_dim, expected / encoding.head_dim, "compiled - eager")
    leaves = (q, k, *(p for p in encoding.parameters() if p.requires_grad))
    outputs = (expected, actual)
    gradients = (torch.autograd.grad(x.square().mean(), leaves, materialize_grads=True) for x in outputs)
    for eager, traced in zip(*gradients, strict=True):
        yield assert_close_to_scale(traced, eager, "compiled gradient - eager gradient")


@has_property
def saving_and_copying_keep_the_generators(make: Make) -> None:
    """state_dict, deepcopy and pickle preserve the generators."""
    encoding, loaded = make(), make()
    state = encoding.state_dict()
    lost = [f"`{name}`" for name, x in _tensors(encoding).items() if x.numel() and name not in state]
    _require(not lost, f"no file restores {', '.join(lost)}; let buffers be persistent, or compute them at each use")
    loaded.load_state_dict(state)
    copies = {"state_dict": loaded, "deepcopy": copy.deepcopy(encoding), "pickle": pickle.loads(pickle.dumps(encoding))}
    for method, copied in copies.items():
        _require(torch.equal(copied.generators(), encoding.generators()), f"{method} must keep the generators")


@has_property
def set_generators_accepts_its_own_generators(make: Make) -> Iterator[Measured]:
    """set_generators(generators()) changes nothing; wrong shapes and symmetric blocks raise ValueError."""
    encoding, changed = make(), make()
    _require_takes_generators(encoding)
    generators = encoding.generators().detach()
    before = dict(changed.named_parameters())
    changed.set_generators(generators)
    replaced = _replaced(changed, before)
    rule = "load_generators() must write in place"
    _require(not replaced, f"{rule}, but made a new {', '.join(replaced)}, which no optimizer holds; use copy_")
    yield assert_close_to_scale(changed.generators(), generators, "generators after set_generators")
    invalid = [generators[1:], generators[0]]
    if generators.numel():
        invalid.append(generators[..., :-1])
        invalid.append(generators.abs() + torch.eye(encoding.block_size))
    for bad in invalid:
        rule = f"set_generators must raise ValueError for invalid generators, but accepted {tuple(bad.shape)}"
        _require(_raises_value_error(changed.set_generators, bad), rule)


@has_property
def zero_generators_change_nothing(make: Make) -> None:
    """With zero generators rotate returns q and k unchanged, bit for bit."""
    encoding = make()
    _require_takes_generators(encoding)
    encoding.set_generators(torch.zeros_like(encoding.generators()))
    positions = _positions(encoding)
    for dtype in TOLERANCE:
        q, k = _vectors(encoding, len(positions), dtype)
        for scores_only in (False, True):
            rotated_q, rotated_k = rotate(q, k, encoding(positions), layout="bhtd", scores_only=scores_only)
            unchanged = torch.equal(rotated_q, q) and torch.equal(rotated_k, k)
            _require(unchanged, f"zero generators must not change q and k, but {dtype} ones changed")


@has_property
def autocast_changes_nothing(make: Make) -> None:
    """Under torch.autocast the rotation is the same."""
    encoding = make()
    positions = _positions(encoding)
    exact = encoding(positions).matrix()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        error = (encoding(positions).matrix() - exact).abs().max().item()
    fix = "compute matrix products in generators() under torch.autocast(device_type, enabled=False)"
    _require(error == 0, f"autocast must not change the rotation, got a change of {error:.3g}; {fix}")


@has_property
def integer_positions_and_no_tokens_work(make: Make) -> None:
    """Integer positions give the same rotation as equal floats; zero tokens give an empty rotation."""
    encoding = make()
    rounded = _positions(encoding).round()
    same = torch.equal(encoding(rounded.long()).matrix(), encoding(rounded).matrix())
    _require(same, "integer positions must give the same rotation as equal floats")
    q, k = _vectors(encoding, 0, torch.float32)
    shape = tuple(rotate(q, k, encoding(rounded[:0]), layout="bhtd")[0].shape)
    _require(shape == q.shape, f"zero tokens must keep the shape {tuple(q.shape)}, got {shape}")


@has_property
def refuses_bad_positions(make: Make) -> None:
    """A wrong number of axes, NaN and infinity raise ValueError."""
    encoding = make()
    good = _positions(encoding)
    bad = {"one axis more": torch.cat([good, good[:, :1]], dim=-1), "one dimension": good[:, 0]}
    second = torch.arange(len(good))[:, None] == 1
    bad |= {str(value): torch.where(second, value, good) for value in (torch.nan, torch.inf)}
    fix = "an overridden forward() must begin with positions = self.check_positions(positions)"
    for what, positions in bad.items():
        refused = _raises_value_error(encoding, positions)
        _require(refused, f"positions with {what} must raise ValueError, but were accepted; {fix}")


def takes_generators(encoding: Encoding) -> bool:
    """Whether an encoding implements `load_generators`, from generators to its parameters."""
    return type(encoding).load_generators is not Encoding.load_generators


def _built(make: Make) -> Encoding:
    """Build an encoding whose generators() returns a tensor, or raise with the reason why nothing can be tested."""
    if isinstance(make, nn.Module):
        fix = f"pass functools.partial({type(make).__name__}, num_axes=...)"
        raise TypeError(f"make must be a callable that builds an encoding, got an encoding; {fix}")
    untested = "no property can be tested: "
    attributes = ("num_axes", "num_heads", "head_dim", "block_size", "rotary_dim", "shared_heads")
    call = "__init__ must begin with super().__init__(num_axes=..., num_heads=..., head_dim=..., block_size=...)"
    unset = [f"no attribute '{name}'" for name in (*attributes, "num_blocks", "parameter_heads")]
    try:
        encoding = make()
    except Exception as error:
        cause = "make() must build an encoding without arguments"
        if "missing" in str(error) and "argument" in str(error):
            name = getattr(make, "__name__", "MyEncoding")
            cause += f": pass functools.partial({name}, num_axes=2, num_heads=4, head_dim=16)"
        if "abstract class" in str(error):
            method = str(error).split()[-1].strip("'")
            cause = f"a subclass must define {method}()"
        elif isinstance(make, type) and takes(make, "num_axes"):
            pass
        elif any(words in str(error) for words in ("before Module.__init__()", "Encoding.__init__()", *unset)):
            cause = call
        raise AssertionError(f"{untested}{cause}, got {_one_line(error)}") from error
    name = type(encoding).__name__
    _require(isinstance(encoding, Encoding), f"{untested}make must build a torchrope.Encoding, got {name}")
    _require(encoding is not make(), f"{untested}make must build a new {name} at each call, got the same twice")
    missing = [attribute for attribute in ("_parameters", *attributes) if attribute not in vars(encoding)]
    _require(not missing, f"{untested}{call}, got a {name} without {', '.join(missing)}")
    try:
        generators: object = encoding.generators()
    except Exception as error:
        raise AssertionError(f"{untested}generators() must return a Tensor, got {_one_line(error)}") from error
    if not isinstance(generators, Tensor):
        cause = "is `return` missing?" if generators is None else "combine several with torch.stack"
        kind = type(generators).__name__
        raise AssertionError(f"{untested}generators() must return a Tensor, got {kind}; {cause}")
    return encoding


def _lines(
    failed: Mapping[str, Exception], passed: Mapping[str, Measured | None], skipped: Mapping[str, str]
) -> list[str]:
    """Return one line per property: first those that failed, then those that passed, then those that do not apply."""
    rows = [("failed", name, _one_line(error)) for name, error in failed.items()]
    rows += [("passed", name, str(measured or "")) for name, measured in passed.items()]
    rows += [("not tested", name, reason) for name, reason in skipped.items()]
    return [f"{what:<12}{name}{': ' if text else ''}{text}" for what, name, text in rows]


def _one_line(error: Exception) -> str:
    """Return the first line of an exception, with its type unless it is an AssertionError."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, AssertionError) and text:
        return text
    return textwrap.shorten(f"{type(error).__name__}{': ' if text else ''}{text}", 200)


class _Detaching(TorchFunctionMode):
    """Collect calls that return values detached from tensors that require a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, Tensor) and x.requires_grad for x in args):
            call = (resolve_name(func) or "").removeprefix("torch.Tensor.").removesuffix(".__get__")
            if call in ("detach", "item", "tolist", "numpy"):
                self.names.add(f".{call}()")
            elif call in ("data", "__float__", "torch.tensor"):
                self.names.add({"data": ".data", "__float__": "float()"}.get(call, "torch.tensor()"))
            elif not torch.is_grad_enabled():
                self.names.add("torch.no_grad()")
        return func(*args, **(kwargs or {}))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _raises_value_error(call: Callable[[Tensor], object], argument: Tensor) -> bool:
    try:
        call(argument)
    except ValueError:
        return True
    return False


def _require_takes_generators(encoding: Encoding) -> None:
    if not takes_generators(encoding):
        raise DoesNotApply("load_generators is not defined")


def _equal(x: Tensor, y: Tensor) -> Tensor:
    """Compare two tensors elementwise; NaN equals NaN."""
    return (x == y) | (x.isnan() & y.isnan())


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(_equal(x, y).all())


def _tensors(encoding: Encoding) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return dict([*encoding.named_parameters(), *encoding.named_buffers()])


def _replaced(encoding: Encoding, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return names of tensors that the encoding has replaced by other objects."""
    current = _tensors(encoding)
    return [f"`{name}`" for name, x in tensors.items() if current.get(name) is not x]


def _positions(encoding: Encoding, tokens: int = 5) -> Tensor:
    """Return a few non-integer positions in [-3, 3], in the dtype of the encoding."""
    generator = torch.Generator().manual_seed(encoding.num_axes)
    positions = torch.rand(tokens, encoding.num_axes, generator=generator, dtype=torch.float64) * 6 - 3
    dtypes = [x.dtype for x in _tensors(encoding).values() if x.is_floating_point()]
    return positions.to(dtypes[0] if dtypes else torch.float32)


def _vectors(encoding: Encoding, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw queries and keys `(2, heads, tokens, head_dim)`."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, 2, encoding.num_heads, tokens, encoding.head_dim)
    q, k = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).unbind(0)
    return q, k


def _dense_truth(encoding: Encoding, positions: Tensor) -> Tensor:
    """Compute the dense exp(sum_a p_a A_a) in float64."""
    blocks = encoding.generators().detach().double()
    dense = block_diagonal(blocks, encoding.head_dim)  # (axes, heads, head_dim, head_dim)
    dense = dense - torch.diag_embed(dense.diagonal(dim1=-2, dim2=-1))
    exponent = torch.einsum("...ta,ahij->...htij", positions.double(), dense).contiguous()
    matrix = torch.linalg.matrix_exp(exponent)  # (..., heads or 1, tokens, head_dim, head_dim)
    return matrix.expand(*matrix.shape[:-4], encoding.num_heads, *matrix.shape[-3:])


def _equal_frequencies(generators: Tensor) -> Tensor:
    """Give every plane of each block the frequency of the block's first plane."""
    b = generators.shape[-1]
    unit = torch.zeros(b, b, dtype=generators.dtype)
    even = torch.arange(0, b - 1, 2)
    unit[even + 1, even], unit[even, even + 1] = 1.0, -1.0
    return generators[..., 1:2, 0:1] * unit


def _gradcheck(encoding: Encoding, where: str) -> None:
    """Check gradients of q, k, positions and all parameters, for one sample of two tokens."""
    parameters = dict(encoding.named_parameters())
    positions = (_positions(encoding, tokens=2).double() / 3).requires_grad_()
    q, k = (x[:1].clone().requires_grad_() for x in _vectors(encoding, 2, torch.float64))

    def rotated(q: Tensor, k: Tensor, positions: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        rotation = functional_call(encoding, dict(zip(parameters, values, strict=True)), (positions,))
        return rotate(q, k, rotation, layout="bhtd")

    leaves = [p.detach().clone().requires_grad_() for p in parameters.values()]
    try:
        torch.autograd.gradcheck(rotated, (q, k, positions, *leaves), fast_mode=True, atol=1e-5, rtol=1e-4)
    except GradcheckError as error:
        number = r"(?:tensor\()?([^,)\s]+)\S*\s*"
        match = re.search(rf"input (\d+),\s*numerical:{number}analytical:{number}", str(error))
        if match is None:
            raise AssertionError(f"gradient {where}: {_one_line(error)}") from error
        name = ["q", "k", "positions", *parameters][int(match[1])]
        measured = f"{float(match[3]):.6g} instead of {float(match[2]):.6g} by finite differences"
        raise AssertionError(f"gradient to `{name}` {where} is {measured}") from error
