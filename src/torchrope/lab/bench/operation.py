"""The rotation as an operation: one call against copies of q and k and against a complex multiply, shape by shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrope.lab.bench.bench import Tell
from torchrope.lab.bench.config import Setting
from torchrope.lab.bench.peers import Pair, Task, make_task, ready_complex_multiply
from torchrope.lab.bench.results import Operation
from torchrope.lab.timing import (
    Quartiles,
    Work,
    freed_memory_kept,
    interleaved_cold_seconds,
    interleaved_seconds,
    quartiles,
    ratio,
)
from torchrope.ops import rotate

SHAPES = ((8, 12, 65, 64), (1, 12, 197, 64), (8, 12, 197, 64), (1, 16, 1024, 64))
"""(batch, heads, tokens, head_dim)."""

DTYPES = ("float32", "bfloat16")
ONE_TOKEN = (1, 12, 1, 64)

FORWARD, FORWARD_COMPLEX = "forward / two copies", "forward / complex multiply"
SHARED, SHARED_TRAINING = "shared angles, forward / complex multiply", "shared angles, training / complex multiply"
LEARNED = "learned frequencies, training / five copies"
CALL = "one call on one token"
IN_ATTENTION = ("comrope-ld:8", "comrope-ap:8", "string")
"""Encodings whose scores alone matter, against `mixed`."""

Call = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Case:
    """Two calls on the same q and k.

    Attributes:
        name: What is compared with what.
        ours: The rotation.
        other: What its time is divided by.
        learns: Whether q and k require gradients.
    """

    name: str
    ours: Call
    other: Call
    learns: bool = False


def in_attention(encoding: str) -> str:
    """Name of the comparison of an encoding with `mixed` where scores alone matter."""
    return f"{encoding} in attention / mixed"


def measure_operations(setting: Setting, rounds: int, tell: Tell) -> list[Operation]:
    """Measure all comparisons at all shapes and dtypes, and the time of one call."""
    measured = []
    for shape in SHAPES:
        for dtype in DTYPES:
            sized = _sized(setting, shape, dtype)
            tell(f"one call: {sized.describe()}")
            measured += _compare(sized, _cases(sized), rounds)
    sized = _sized(setting, SHAPES[0], "float32")
    tell(f"in attention: {sized.describe()}")
    measured += _compare(sized, _cases_in_attention(sized), rounds)
    return [*measured, _one_token(_sized(setting, ONE_TOKEN, "float32"), rounds)]


def _sized(setting: Setting, shape: tuple[int, ...], dtype: str) -> Setting:
    batch, heads, tokens, head_dim = shape
    return replace(setting, batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, dtype=dtype)


def _cases(setting: Setting) -> list[Case]:
    mixed, axial = make_task("mixed", setting), make_task("axial", setting)
    with torch.no_grad():
        rotation, shared = mixed.encoding(mixed.positions), axial.encoding(axial.positions)
    multiply, multiply_shared = ready_complex_multiply(mixed), ready_complex_multiply(axial)

    def turn(q: Tensor, k: Tensor) -> Pair:
        return rotate(q, k, rotation, layout="bhtd")

    def turn_shared(q: Tensor, k: Tensor) -> Pair:
        return rotate(q, k, shared, layout="bhtd")

    return [
        Case(FORWARD, turn, _two_copies),
        Case(FORWARD_COMPLEX, turn, multiply),
        Case(SHARED, turn_shared, multiply_shared),
        Case(SHARED_TRAINING, _trained(turn_shared, axial), _trained(multiply_shared, axial), learns=True),
        Case(LEARNED, _learned(mixed), _five_copies(mixed), learns=True),
    ]


def _cases_in_attention(setting: Setting) -> list[Case]:
    mixed = _learned(make_task("mixed", setting), scores_only=True)
    return [
        Case(in_attention(name), _learned(make_task(name, setting), scores_only=True), mixed, learns=True)
        for name in IN_ATTENTION
    ]


def _two_copies(q: Tensor, k: Tensor) -> Pair:
    return q.clone(), k.clone()


def _five_copies(task: Task) -> Call:
    """What a step must read and write: q and k, and two that are written; these, what comes back, and two more."""
    return lambda q, k: [x.detach().clone() for x in (q, k, *task.cotangents, q)]


def _trained(turn: Callable[[Tensor, Tensor], Pair], task: Task) -> Call:
    """Forward and backward, to q and k."""
    return lambda q, k: torch.autograd.grad(turn(q, k), (q, k), task.cotangents)


def _learned(task: Task, scores_only: bool = False) -> Call:
    """Forward and backward, to q, k and the parameters of the encoding, with its rotation built anew."""
    parameters = tuple(task.encoding.parameters())

    def step(q: Tensor, k: Tensor) -> object:
        turned = rotate(q, k, task.encoding(task.positions), layout="bhtd", scores_only=scores_only)
        return torch.autograd.grad(turned, (q, k, *parameters), task.cotangents)

    return step


def _compare(setting: Setting, cases: Sequence[Case], rounds: int) -> list[Operation]:
    task = make_task("mixed", setting)
    calls = {call: case.learns for case in cases for call in (case.ours, case.other)}
    works = {call: _repeated(call, task, learns) for call, learns in calls.items()}
    with freed_memory_kept():
        hot = interleaved_seconds(works, rounds=rounds, device=setting.device)
    cold = interleaved_cold_seconds(
        {call: _fresh(call, task, learns) for call, learns in calls.items()}, rounds=rounds, device=setting.device
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


def _repeated(call: Call, task: Task, learns: bool) -> Work:
    q, k = (x.detach().requires_grad_(learns) for x in (task.q, task.k))
    return lambda: call(q, k)


def _fresh(call: Call, task: Task, learns: bool) -> Callable[[], Work]:
    """What makes q and k anew, in memory that no call has touched, and gives the call on them."""

    def prepare() -> Work:
        return _repeated(call, replace(task, q=task.q.detach().clone(), k=task.k.detach().clone()), learns)

    return prepare


def _one_token(setting: Setting, rounds: int) -> Operation:
    task = make_task("mixed", setting)
    with torch.no_grad():
        rotation = task.encoding(task.positions)

    def turn(q: Tensor, k: Tensor) -> Pair:
        return rotate(q, k, rotation, layout="bhtd")

    [measured] = _compare(setting, [Case(CALL, turn, _two_copies)], rounds)
    return measured


def _microseconds(seconds: Sequence[float]) -> Quartiles:
    return quartiles([1e6 * value for value in seconds])
