"""Targets of speed and memory, row by row, and the measurement that each is compared with."""

from collections.abc import Callable
from dataclasses import dataclass

from torchrope.lab.bench.peers import COMPLEX, MATRIX_EXP, TIMM
from torchrope.lab.bench.results import Bench, Growth, Judged, Peak, Training
from torchrope.lab.timing import Quartiles, quartiles

BENCH_ENCODINGS = ("axial", "mixed", "liere:8", "liere:64", "comrope-ap:8", "comrope-ld:8")
TRAINING_ENCODINGS = ("mixed", "comrope-ap:8", "comrope-ld:8", "liere:8", "liere:64")
GROWTH_ENCODINGS = ("mixed", "comrope-ld:8", "liere:8", "liere:64")
MEMORY_ENCODING = "liere:64"

# "Linear" as a number: doubling the size may take 2^1.1 = 2.14 times as long.
_LINEAR = 1.1


@dataclass(frozen=True)
class Measurements:
    """All that rows are judged by."""

    bench: Bench
    training: Training
    memory: tuple[Peak, ...]
    growth: tuple[Growth, ...]


Measured = Quartiles | str
"""A value, or why there is none."""


@dataclass(frozen=True)
class Row:
    """One target.

    Attributes:
        name: Short name.
        what: What is compared with what.
        must: What must be reached, None where nothing must.
        reach: What to reach for.
        find: The value among the measurements.
        unit: "×", " %" or nothing.
        at_most: Whether smaller is better.
    """

    name: str
    what: str
    must: float | None
    reach: float | None
    find: Callable[[Measurements], Measured]
    unit: str = "×"
    at_most: bool = False

    def judge(self, measurements: Measurements) -> Judged:
        """The row with its value."""
        found = self.find(measurements)
        value, why_not = (None, found) if isinstance(found, str) else (found, None)
        return Judged(self.name, self.what, self.unit, self.at_most, self.must, self.reach, value, why_not)


def faster(encoding: str, peer: str, what: str, must: float, reach: float) -> Row:
    """How many times as fast as a peer."""

    def find(measured: Measurements) -> Measured:
        compared = measured.bench.of(encoding)
        timed = compared.of(peer)
        return f"{peer}: {compared.left_out[peer]}" if timed is None else timed.ratio

    return Row(f"{encoding} / {peer}", what, must, reach, find)


def at_most_the_time_of(encoding: str, other: str, what: str, reach: float) -> Row:
    """How many times as long as another encoding of torchrope."""

    def find(measured: Measurements) -> Measured:
        timed = measured.bench.of(encoding).of(other)
        return f"{other} was not measured" if timed is None else _inverse(timed.ratio)

    return Row(f"{encoding} / {other}", what, None, reach, find, at_most=True)


def training_overhead(encoding: str, must: float, reach: float) -> Row:
    """What an encoding adds to a training step, in percent."""

    def find(measured: Measurements) -> Measured:
        share = next(o.share for o in measured.training.overheads if o.encoding == encoding)
        return Quartiles(100 * share.low, 100 * share.median, 100 * share.high)

    what = f"training step of a ViT with {encoding}: what it adds to one without encoding"
    return Row(f"training {encoding}", what, must, reach, find, " %", at_most=True)


def peak_memory(batch: int, training: bool, must: float) -> Row:
    """Peak memory beyond the outputs, which no path can do without, as a multiple of the rotation itself."""

    def find(measured: Measurements) -> Measured:
        peak = next(p for p in measured.memory if (p.setting.batch, p.training) == (batch, training))
        return quartiles([(peak.peak_bytes - peak.output_bytes) / peak.rotation_bytes])

    when = "training" if training else "inference"
    what = (
        f"peak memory of building and applying LieRE_64 beyond its outputs, {when}, batch {batch}, against the rotation"
    )
    return Row(f"memory {when}, batch {batch}", what, must, None, find, at_most=True)


def growth(encoding: str, over: str) -> Row:
    """The exponent with which time grows."""

    def find(measured: Measurements) -> Measured:
        return quartiles([next(g.slope for g in measured.growth if (g.encoding, g.over) == (encoding, over))])

    what = f"time of {encoding} ~ {over} to the power of"
    return Row(f"growth of {encoding} over {over}", what, _LINEAR, None, find, unit="", at_most=True)


_PUBLISHED = "torch.matrix_exp and dense block products with autograd"

ROWS: tuple[Row, ...] = (
    faster("mixed", TIMM, "RoPE-Mixed against timm's RotaryEmbeddingMixed + apply_rot_embed_cat", 5, 8),
    faster("mixed", COMPLEX, "RoPE-Mixed against a plain complex multiply in PyTorch", 1, 1.3),
    faster("liere:8", MATRIX_EXP, f"LieRE_8 against {_PUBLISHED}", 5, 10),
    faster("liere:64", MATRIX_EXP, f"LieRE_64 against {_PUBLISHED}", 6, 12),
    faster("comrope-ld:8", MATRIX_EXP, f"ComRoPE-LD_8 against {_PUBLISHED}", 20, 50),
    faster("comrope-ap:8", MATRIX_EXP, f"ComRoPE-AP_8 against {_PUBLISHED}", 20, 50),
    at_most_the_time_of("comrope-ld:8", "mixed", "ComRoPE-LD_8: its time over RoPE-Mixed's", 1.5),
    at_most_the_time_of("comrope-ap:8", "mixed", "ComRoPE-AP_8: its time over RoPE-Mixed's", 1.5),
    training_overhead("mixed", 4, 2),
    training_overhead("comrope-ap:8", 4, 2),
    training_overhead("comrope-ld:8", 4, 2),
    training_overhead("liere:8", 8, 4),
    training_overhead("liere:64", 15, 8),
    *(
        peak_memory(batch, training, must)
        for training, must in ((True, 1.5), (False, 1.1))
        for batch in (1, 8)
    ),
    *(growth(encoding, over) for over in ("tokens", "batch") for encoding in GROWTH_ENCODINGS),
)  # fmt: skip


def judge_all(measurements: Measurements) -> tuple[Judged, ...]:
    """Every row with its value."""
    return tuple(row.judge(measurements) for row in ROWS)


def _inverse(ratio: Quartiles) -> Quartiles:
    return Quartiles(1 / ratio.high, 1 / ratio.median, 1 / ratio.low)
