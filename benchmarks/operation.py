"""Time single calls of `rotate`, relative to copies of q and k and to a complex multiply, at several shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from cold_timing import interleaved_cold_seconds
from peers import Pair, Rotate, Task, make_task, multiply_pairs, phases_of
from setting import Setting
from suite_results import Operation
from torch import Tensor

from torchrope.rotating import rotate
from torchrope_lab.training.timing import Quartiles, Work, interleaved_seconds, quartiles, ratio

SHAPES = ((8, 12, 65, 64), (1, 12, 197, 64), (8, 12, 197, 64), (1, 16, 1024, 64))
"""(batch, heads, tokens, head_dim)."""

DTYPES = ("float32", "bfloat16")
ONE_TOKEN = (1, 12, 1, 64)

FORWARD, FORWARD_COMPLEX = "forward / two copies", "forward / complex multiply"
SHARED, SHARED_TRAINING = "shared angles, forward / complex multiply", "shared angles, training / complex multiply"
LEARNED = "learned frequencies, training / five copies"
CALL = "one call on one token"
IN_ATTENTION = ("comrope-ld:8", "comrope-ap:8", "string")
"""Encodings that are timed with `scores_only=True`, relative to `mixed`."""

Call = Callable[[Tensor, Tensor], object]
Log = Callable[[str], None]
"""Takes lines of progress."""


@dataclass(frozen=True)
class Case:
    """A call of torchrope and the call to compare it with, on the same q and k.

    Attributes:
        name: Name of the comparison.
        ours: The rotation.
        other: The call by whose time that of the rotation is divided.
        training: Whether q and k require gradients.
    """

    name: str
    ours: Call
    other: Call
    training: bool = False


def in_attention(encoding: str) -> str:
    """Return the name of the comparison of an encoding with `mixed`, both with `scores_only=True`."""
    return f"{encoding} in attention / mixed"


def measure_operations(setting: Setting, rounds: int, log: Log) -> list[Operation]:
    """Measure all comparisons at all shapes and dtypes, and the time of one call on one token."""
    measured = []
    for shape in SHAPES:
        for dtype in DTYPES:
            at_shape = _with_shape(setting, shape, dtype)
            log(f"one call: {at_shape.describe()}")
            measured += _compare(at_shape, _cases(at_shape), rounds)
    at_shape = _with_shape(setting, SHAPES[0], "float32")
    log(f"in attention: {at_shape.describe()}")
    measured += _compare(at_shape, _cases_in_attention(at_shape), rounds)
    return [*measured, _one_token(_with_shape(setting, ONE_TOKEN, "float32"), rounds)]


def _with_shape(setting: Setting, shape: tuple[int, ...], dtype: str) -> Setting:
    batch, heads, tokens, head_dim = shape
    return replace(setting, batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, dtype=dtype)


def _cases(setting: Setting) -> list[Case]:
    mixed, axial = make_task("mixed", setting), make_task("axial", setting)
    with torch.no_grad():
        rotation, shared = mixed.encoding(mixed.positions), axial.encoding(axial.positions)
    multiply, multiply_shared = _precomputed_complex_multiply(mixed), _precomputed_complex_multiply(axial)

    def rotate_ours(q: Tensor, k: Tensor) -> Pair:
        return rotate(q, k, rotation, layout="bhtd")

    def rotate_shared(q: Tensor, k: Tensor) -> Pair:
        return rotate(q, k, shared, layout="bhtd")

    shared_steps = _with_backward(rotate_shared, axial), _with_backward(multiply_shared, axial)
    return [
        Case(FORWARD, rotate_ours, _two_copies),
        Case(FORWARD_COMPLEX, rotate_ours, multiply),
        Case(SHARED, rotate_shared, multiply_shared),
        Case(SHARED_TRAINING, *shared_steps, training=True),
        Case(LEARNED, _training_step(mixed), _five_copies(mixed), training=True),
    ]


def _precomputed_complex_multiply(task: Task) -> Rotate:
    """Multiply channel pairs by precomputed e^{i angle}, without a gradient of the frequencies."""
    with torch.no_grad():
        phases = phases_of(task)
    return lambda q, k: (multiply_pairs(q, phases), multiply_pairs(k, phases))


def _cases_in_attention(setting: Setting) -> list[Case]:
    mixed = _training_step(make_task("mixed", setting), scores_only=True)
    return [
        Case(in_attention(name), _training_step(make_task(name, setting), scores_only=True), mixed, training=True)
        for name in IN_ATTENTION
    ]


def _two_copies(q: Tensor, k: Tensor) -> Pair:
    return q.clone(), k.clone()


def _five_copies(task: Task) -> Call:
    """Return a call with the memory traffic of a step: it reads five tensors of q's size, and writes five."""
    # Forward reads q and k, and writes both rotated; backward reads q, k and two gradients, and writes two gradients.
    return lambda q, k: [x.detach().clone() for x in (q, k, *task.cotangents, q)]


def _with_backward(rotate_qk: Callable[[Tensor, Tensor], Pair], task: Task) -> Call:
    """Return a call that rotates q and k, and computes their gradients."""
    return lambda q, k: torch.autograd.grad(rotate_qk(q, k), (q, k), task.cotangents)


def _training_step(task: Task, scores_only: bool = False) -> Call:
    """Return a call that builds the rotation, rotates, and computes gradients of q, k and the encoding's parameters."""
    parameters = tuple(task.encoding.parameters())

    def step(q: Tensor, k: Tensor) -> object:
        rotated = rotate(q, k, task.encoding(task.positions), layout="bhtd", scores_only=scores_only)
        return torch.autograd.grad(rotated, (q, k, *parameters), task.cotangents)

    return step


def _compare(setting: Setting, cases: Sequence[Case], rounds: int) -> list[Operation]:
    task = make_task("mixed", setting)
    calls = {call: case.training for case in cases for call in (case.ours, case.other)}
    works = {call: _repeated(call, task, training) for call, training in calls.items()}
    hot = interleaved_seconds(works, rounds=rounds, device=setting.device)
    cold = interleaved_cold_seconds(
        {call: _fresh(call, task, training) for call, training in calls.items()}, rounds=rounds, device=setting.device
    )
    return [
        Operation(
            name=case.name,
            setting=setting,
            microseconds=_microseconds(hot[case.ours]),
            hot=ratio(hot[case.ours], hot[case.other]),
            cold=ratio(cold[case.ours], cold[case.other]),
        )
        for case in cases
    ]


def _repeated(call: Call, task: Task, training: bool) -> Work:
    q, k = (x.detach().requires_grad_(training) for x in (task.q, task.k))
    return lambda: call(q, k)


def _fresh(call: Call, task: Task, training: bool) -> Callable[[], Work]:
    """Return a function that copies q and k to memory that no call has used, and returns the call on the copies."""

    def prepare() -> Work:
        return _repeated(call, replace(task, q=task.q.detach().clone(), k=task.k.detach().clone()), training)

    return prepare


def _one_token(setting: Setting, rounds: int) -> Operation:
    task = make_task("mixed", setting)
    with torch.no_grad():
        rotation = task.encoding(task.positions)

    def rotate_ours(q: Tensor, k: Tensor) -> Pair:
        return rotate(q, k, rotation, layout="bhtd")

    [measured] = _compare(setting, [Case(CALL, rotate_ours, _two_copies)], rounds)
    return measured


def _microseconds(seconds: Sequence[float]) -> Quartiles:
    return quartiles([1e6 * value for value in seconds])
