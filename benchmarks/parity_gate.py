"""Parity check: compare fast paths with the reference in float64 before they are timed."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

from peers import Task, make_step, make_task, ours
from setting import Setting
from torch import Tensor

from torchrope.verify import share_of_allowed_error

# Errors do not grow with batch or tokens, and float64 exponentials for all of them would take minutes.
_LARGEST = {"batch": 2, "tokens": 257}


class ParityError(Exception):
    """A fast path differs from the reference in float64; `failures` has a line for each difference."""

    def __init__(self, failures: Sequence[str]) -> None:
        super().__init__(f"{len(failures)} results differ from the float64 reference")
        self.failures = list(failures)


def require_parity(names: Sequence[str], setting: Setting) -> float:
    """Compare the values and all gradients of every encoding's fast path with the reference in float64.

    The largest error may be twice that of the reference in the same dtype, plus eight rounding steps of the largest
    value. At most 2 samples and 257 tokens are compared.

    Returns:
        The largest error as a share of the allowed one.

    Raises:
        ParityError: an error exceeds the allowed one.
    """
    smaller = replace(setting, **{name: min(getattr(setting, name), limit) for name, limit in _LARGEST.items()})
    compared = [(f"{name}: {line}", share) for name in names for line, share in _compare(name, smaller)]
    if failures := [line for line, share in compared if not share <= 1]:
        raise ParityError(failures)
    return max(share for _, share in compared)


def _compare(name: str, setting: Setting) -> list[tuple[str, float]]:
    """Describe every compared tensor, with its error as a share of the allowed one; NaN if it cannot be compared."""
    task = make_task(name, setting)
    truth, plain = _results(_in_float64(task), "reference"), _results(task, "reference")
    try:
        fast = _results(task, "auto")
    except (RuntimeError, NotImplementedError) as error:
        return [(f"auto raised {type(error).__name__}: {' '.join(str(error).split())}", math.nan)]
    differences = {what: share_of_allowed_error(fast[what], plain[what], truth[what]) for what in truth}
    return [(f"{what}: {line}", share) for what, (line, share) in differences.items()]


def _in_float64(task: Task) -> Task:
    q, k = (x.detach().double().requires_grad_() for x in (task.q, task.k))
    upstream = (task.cotangents[0].double(), task.cotangents[1].double())
    encoding = copy.deepcopy(task.encoding).double()
    return replace(task, encoding=encoding, positions=task.positions.double(), q=q, k=k, cotangents=upstream)


def _results(task: Task, backend: str) -> dict[str, Tensor]:
    rotated, gradients = make_step(task, ours(task, backend))()
    parameters = [name for name, _ in task.encoding.named_parameters()]
    named = zip(("q", "k", *parameters), gradients, strict=True)
    return {"rotated q": rotated[0], "rotated k": rotated[1], **{f"gradient of {name}": grad for name, grad in named}}
