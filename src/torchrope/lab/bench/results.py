"""What measuring gives: dataclasses, and the JSON files of the suites."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from torchrope.files import read_mapping, write_whole
from torchrope.lab.bench.config import Setting
from torchrope.lab.schema import build
from torchrope.lab.timing import Quartiles

VERSION = 1

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Timed:
    """One implementation of a step.

    Attributes:
        name: Of the implementation.
        milliseconds: Time of a step.
        ratio: Its time over torchrope's in the same round: how many times as fast torchrope is.
    """

    name: str
    milliseconds: Quartiles
    ratio: Quartiles


@dataclass(frozen=True)
class Compared:
    """One encoding, torchrope first.

    Attributes:
        encoding: Its name.
        backend: The kernels that torchrope took; "reference" where it has none for this device and dtype.
        timed: Every implementation that could be measured.
        left_out: Why others could not, by name.
    """

    encoding: str
    backend: str
    timed: tuple[Timed, ...]
    left_out: dict[str, str]

    def of(self, name: str) -> Timed | None:
        """What was measured of an implementation, None where nothing was."""
        return next((timed for timed in self.timed if timed.name == name), None)


@dataclass(frozen=True)
class Source:
    """Where numbers come from."""

    command: str
    date: str
    commit: str | None
    torchrope: str
    versions: dict[str, str]
    machine: dict[str, str | int]
    threads: int


@dataclass(frozen=True)
class Bench:
    """What `torchrope bench` measures: rotation built and applied, forward and backward, every encoding.

    Attributes:
        setting: Shape, dtype, device.
        rounds: Rounds that medians are over.
        encodings: The comparison of each encoding.
        not_fitting: Why encodings of the default list were not measured, by name.
        source: Machine, versions, commit.
        parity: Largest error as a share of the allowed one; None where it was not recorded.
    """

    setting: Setting
    rounds: int
    encodings: tuple[Compared, ...]
    not_fitting: dict[str, str]
    source: Source
    parity: float | None = None

    def of(self, encoding: str) -> Compared:
        """The comparison of an encoding."""
        return next(compared for compared in self.encodings if compared.encoding == encoding)


@dataclass(frozen=True)
class Overhead:
    """What an encoding adds to a training step, as a share of the step without one."""

    encoding: str
    milliseconds: Quartiles
    share: Quartiles


@dataclass(frozen=True)
class Training:
    """Whole training steps of a vision transformer, one of each encoding in turn."""

    input_size: int
    patch_size: int
    batch: int
    dim: int
    depth: int
    num_heads: int
    rounds: int
    overheads: tuple[Overhead, ...]


@dataclass(frozen=True)
class Peak:
    """Peak memory of building and applying a rotation, beyond q, k and parameters.

    Attributes:
        encoding: Its name.
        setting: Shape, dtype, device.
        training: With backward, or forward without gradients.
        peak_bytes: Most that was allocated at once.
        rotation_bytes: The table of the rotation alone.
        output_bytes: Rotated q and k, in training their gradients too; part of the peak.
    """

    encoding: str
    setting: Setting
    training: bool
    peak_bytes: int
    rotation_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Growth:
    """Time of a step over tokens or batch.

    Attributes:
        encoding: Its name.
        over: "tokens" or "batch".
        sizes: Where it was measured.
        milliseconds: Time of a step at each.
        slope: Of log time over log size, by least squares; 1 is linear.
    """

    encoding: str
    over: str
    sizes: tuple[int, ...]
    milliseconds: tuple[Quartiles, ...]
    slope: float


@dataclass(frozen=True)
class Operation:
    """One call on q and k over another.

    Attributes:
        name: What is compared with what.
        setting: Shape, dtype, device.
        microseconds: Time of the call, repeated.
        hot: Its time over the other's, both repeated.
        cold: Likewise of single calls on new memory, after the caches were filled with something else.
    """

    name: str
    setting: Setting
    microseconds: Quartiles
    hot: Quartiles
    cold: Quartiles


@dataclass(frozen=True)
class Judged:
    """One target and what was measured.

    Attributes:
        name: Short name of the row.
        what: What is compared with what.
        unit: What follows the number: "×", " %" or nothing.
        at_most: Whether smaller is better.
        must: What must be reached, None where nothing must.
        reach: What to reach for.
        value: What was measured; None where it could not be.
        why_not: Why it could not be measured.
    """

    name: str
    what: str
    unit: str
    at_most: bool
    must: float | None
    reach: float | None
    value: Quartiles | None
    why_not: str | None


@dataclass(frozen=True)
class Suite:
    """All rows of one machine."""

    schema: int
    rows: tuple[Judged, ...]
    operations: tuple[Operation, ...]
    bench: Bench
    training: Training
    memory: tuple[Peak, ...]
    growth: tuple[Growth, ...]


@dataclass(frozen=True)
class Loading:
    """How fast one kind of data comes on the CPU alone.

    Attributes:
        data: What is read.
        shape: Of an example: channels and sizes.
        augment: What is changed at random.
        batch: Examples of a batch.
        workers: Loading processes.
        examples_per_second: Measured, over whole epochs.
        gflops: 10⁹ operations of the model's forward pass on an example.
        taken_per_second: Examples that a GPU would take, computed from these, its peak and its utilisation.
    """

    data: str
    shape: tuple[int, ...]
    augment: str
    batch: int
    workers: int
    examples_per_second: Quartiles
    gflops: float
    taken_per_second: float


@dataclass(frozen=True)
class DataSuite:
    """Data of every kind on one machine.

    Attributes:
        schema: Version of this layout.
        rounds: Epochs that quartiles are over.
        peak_tflops: Of the GPU that examples are counted for, 10¹² operations a second.
        utilisation: The share of it that the model reaches.
        rows: The measurements.
        source: Machine, versions, commit.
    """

    schema: int
    rounds: int
    peak_tflops: float
    utilisation: float
    rows: tuple[Loading, ...]
    source: Source


def write_results(path: Path, results: Suite | DataSuite) -> None:
    """Write the results of a suite as JSON."""
    write_whole(path, json.dumps(asdict(results), indent=1, allow_nan=False) + "\n")


def read_results(path: Path, kind: type[Kind]) -> Kind:
    """Read the results of a suite back.

    Raises:
        ValueError: not JSON, another version, or a part that is missing or of the wrong kind.
    """
    plain = read_mapping(path, "benchmark results")
    if plain.get("schema") != VERSION:
        raise ValueError(f"benchmark results must have schema {VERSION}, got {path} with {plain.get('schema')!r}")
    return build(kind, plain, path.name)
