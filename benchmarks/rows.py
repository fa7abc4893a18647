"""Targets for speed and memory, and the measurement that each is compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from operation import CALL, FORWARD, FORWARD_COMPLEX, LEARNED, SHAPES, SHARED, SHARED_TRAINING, in_attention
from peers import COMPLEX, MATRIX_EXP, TIMM
from suite_results import Growth, Operation, Peak, RowResult, SpeedResults, Training

from torchrope_lab.training.timing import Quartiles, quartiles

BENCH_ENCODINGS = ("axial", "mixed", "liere:8", "liere:64", "comrope-ap:8", "comrope-ld:8")
TRAINING_ENCODINGS = ("mixed", "comrope-ap:8", "comrope-ld:8", "liere:8", "liere:64")
GROWTH_ENCODINGS = ("mixed", "comrope-ld:8", "liere:8", "liere:64")
MEMORY_ENCODING = "liere:64"
SIZES = {"tokens": "number of tokens", "batch": "batch size"}

# "Linear" as a number: doubling the size may take 2^1.1 = 2.14 times as long.
_LINEAR = 1.1


@dataclass(frozen=True)
class Measurements:
    """Measurements from which rows take their values."""

    operations: tuple[Operation, ...]
    bench: SpeedResults
    training: Training
    memory: tuple[Peak, ...]
    growth: tuple[Growth, ...]


Measured = Quartiles | str
"""A value, or the reason why it could not be measured."""


@dataclass(frozen=True)
class Row:
    """A target.

    Attributes:
        name: Short name.
        what: Description of the measurement.
        must: Value that must be reached, None if there is none.
        reach: Value to aim for, None if there is none.
        find: Selects the value from the measurements.
        unit: "×", " %", " µs" or "".
        at_most: Whether smaller is better.
    """

    name: str
    what: str
    must: float | None
    reach: float | None
    find: Callable[[Measurements], Measured]
    unit: str = "×"
    at_most: bool = False

    def judge(self, measurements: Measurements) -> RowResult:
        """Return the row with its measured value."""
        measured = self.find(measurements)
        value, why_not = (None, measured) if isinstance(measured, str) else (measured, None)
        return RowResult(self.name, self.what, self.unit, self.at_most, self.must, self.reach, value, why_not)


def faster(encoding: str, peer: str, what: str, must: float, reach: float) -> Row:
    """Build the row: how many times as fast as a peer torchrope is."""

    def find(measured: Measurements) -> Measured:
        compared = measured.bench.of(encoding)
        timed = compared.of(peer)
        return f"{peer}: {compared.left_out[peer]}" if timed is None else timed.ratio

    return Row(f"{encoding} / {peer}", what, must, reach, find)


def call_takes(name: str, what: str, must: float, reach: float, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Row:
    """Build the row: time of a call over another's, the largest ratio over shapes and dtypes."""

    def find(measured: Measurements) -> Measured:
        return max((each.hot for each in _calls(measured, name, shapes)), key=lambda value: value.median)

    where = "" if shapes == SHAPES else f", batch × tokens {' and '.join(f'{b} × {n}' for b, _, n, _ in shapes)}"
    return Row(f"{name}{where}", f"{what}{where}", must, reach, find, at_most=True)


def call_is_faster(name: str, what: str, must: float, reach: float) -> Row:
    """Build the row: how many times as fast as another a call is, the smallest ratio over shapes and dtypes."""

    def find(measured: Measurements) -> Measured:
        slowest = max((each.hot for each in _calls(measured, name, SHAPES)), key=lambda value: value.median)
        return _inverse(slowest)

    return Row(name, what, must, reach, find)


def call_on_one_token(must: float, reach: float) -> Row:
    """Build the row: time of one call on one token."""

    def find(measured: Measurements) -> Measured:
        return next(each.microseconds for each in measured.operations if each.name == CALL)

    return Row(CALL, f"time of {CALL} without gradient", must, reach, find, " µs", at_most=True)


def _calls(measured: Measurements, name: str, shapes: Sequence[tuple[int, ...]]) -> list[Operation]:
    return [each for each in measured.operations if each.name == name and each.setting.shape in shapes]


def training_overhead(encoding: str, must: float, reach: float) -> Row:
    """Build the row: overhead of an encoding in a training step, in percent."""

    def find(measured: Measurements) -> Measured:
        share = next(o.share for o in measured.training.overheads if o.encoding == encoding)
        return Quartiles(100 * share.low, 100 * share.median, 100 * share.high)

    what = f"time that {encoding} adds to a training step of a ViT without encoding"
    return Row(f"training {encoding}", what, must, reach, find, " %", at_most=True)


def peak_memory(batch: int, training: bool, must: float) -> Row:
    """Build the row: peak memory without the outputs, which every path needs, as a multiple of the rotation's size."""

    def find(measured: Measurements) -> Measured:
        peak = next(p for p in measured.memory if (p.setting.batch, p.training) == (batch, training))
        return quartiles([(peak.peak_bytes - peak.output_bytes) / peak.rotation_bytes])

    when = "training" if training else "inference"
    what = (
        f"peak memory of building and applying {MEMORY_ENCODING} without its outputs, {when}, batch {batch}, relative "
        "to the rotation"
    )
    return Row(f"memory {when}, batch {batch}", what, must, None, find, at_most=True)


def growth(encoding: str, over: str) -> Row:
    """Build the row: exponent of the time as a power of tokens or batch."""

    def find(measured: Measurements) -> Measured:
        return quartiles([next(g.slope for g in measured.growth if (g.encoding, g.over) == (encoding, over))])

    what = f"exponent of the time of {encoding} in the {SIZES[over]}"
    return Row(f"growth of {encoding} over {over}", what, _LINEAR, None, find, unit="", at_most=True)


_PRECOMPUTED = "relative to a complex multiply with a precomputed table"
_PUBLISHED = "relative to torch.matrix_exp and dense block products with autograd"
_COPIES = "time of one call forward and backward with learned frequencies relative to five copies of q"

ROWS: tuple[Row, ...] = (
    faster("mixed", TIMM, "speed of mixed relative to timm's RotaryEmbeddingMixed + apply_rot_embed_cat", 5, 8),
    faster("mixed", COMPLEX, "speed of mixed relative to a complex multiply in PyTorch", 1, 1.3),
    faster("liere:8", MATRIX_EXP, f"speed of liere:8 {_PUBLISHED}", 5, 10),
    faster("liere:64", MATRIX_EXP, f"speed of liere:64 {_PUBLISHED}", 6, 12),
    faster("comrope-ld:8", MATRIX_EXP, f"speed of comrope-ld:8 {_PUBLISHED}", 20, 50),
    faster("comrope-ap:8", MATRIX_EXP, f"speed of comrope-ap:8 {_PUBLISHED}", 20, 50),
    call_takes(FORWARD, "time of one call without gradient relative to copying q and k", 2, 1.3),
    call_is_faster(FORWARD_COMPLEX, f"speed of one call without gradient {_PRECOMPUTED}", 1, 1.5),
    call_is_faster(SHARED, f"speed of one call without gradient, angles shared by heads, {_PRECOMPUTED}", 1, 1.5),
    call_is_faster(
        SHARED_TRAINING, f"speed of one call forward and backward, angles shared by heads, {_PRECOMPUTED}", 1, 1.5
    ),
    call_takes(LEARNED, _COPIES, 4, 2, SHAPES[2:]),
    call_takes(LEARNED, _COPIES, 8, 4, SHAPES[:2]),
    call_on_one_token(25, 15),
    call_takes(in_attention("comrope-ld:8"), "time of comrope-ld:8 with scores_only relative to mixed", 2, 1.3),
    call_takes(in_attention("comrope-ap:8"), "time of comrope-ap:8 with scores_only relative to mixed", 2, 1.3),
    call_takes(in_attention("string"), "time of string with scores_only relative to mixed", 3, 1.5),
    training_overhead("mixed", 4, 2),
    training_overhead("comrope-ap:8", 4, 2),
    training_overhead("comrope-ld:8", 4, 2),
    training_overhead("liere:8", 6, 3),
    training_overhead("liere:64", 60, 40),
    *(
        peak_memory(batch, training, must)
        for training, must in ((True, 1.5), (False, 1.1))
        for batch in (1, 8)
    ),
    *(growth(encoding, over) for over in ("tokens", "batch") for encoding in GROWTH_ENCODINGS),
)  # fmt: skip


def judge_all(measurements: Measurements) -> tuple[RowResult, ...]:
    """Return every row with its measured value."""
    return tuple(row.judge(measurements) for row in ROWS)


def _inverse(ratio: Quartiles) -> Quartiles:
    return Quartiles(1 / ratio.high, 1 / ratio.median, 1 / ratio.low)
