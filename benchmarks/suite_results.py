"""Dataclasses of the results in benchmarks/results, and their JSON files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from setting import Setting

from torchrope.files import write_whole
from torchrope_lab.files import read_mapping
from torchrope_lab.schema import build
from torchrope_lab.training.timing import Quartiles

VERSION = 1

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class StepTime:
    """Time of a layer step in one implementation, and its ratio to torchrope's in the same round."""

    name: str
    milliseconds: Quartiles
    ratio: Quartiles


@dataclass(frozen=True)
class EncodingTimes:
    """Comparison of implementations of one encoding, torchrope first; `left_out` has reasons why others are absent.

    `backend` is that of torchrope, "reference" if no kernels support this device and dtype.
    """

    encoding: str
    backend: str
    timed: tuple[StepTime, ...]
    left_out: dict[str, str]

    def of(self, name: str) -> StepTime | None:
        """Return the result of an implementation, None if it was not measured."""
        return next((timed for timed in self.timed if timed.name == name), None)


@dataclass(frozen=True)
class Source:
    """Provenance of results: command, date, commit, versions, machine and threads."""

    command: str
    date: str
    commit: str | None
    torchrope: str
    versions: dict[str, str]
    machine: dict[str, str | int]
    threads: int


@dataclass(frozen=True)
class SpeedResults:
    """Layer steps: for every encoding, time of building and applying the rotation, with gradients.

    `parity` is the largest error as a share of the allowed one; None if not recorded.
    """

    setting: Setting
    rounds: int
    encodings: tuple[EncodingTimes, ...]
    source: Source
    parity: float | None = None

    def of(self, encoding: str) -> EncodingTimes:
        """Return the comparison of an encoding."""
        return next(compared for compared in self.encodings if compared.encoding == encoding)


@dataclass(frozen=True)
class Overhead:
    """Time of a training step with an encoding.

    Attributes:
        encoding: Name of the encoding.
        milliseconds: Time of a step, freed memory used again.
        share: Overhead as a share of the step without encoding.
        cold: The share of single steps on new memory, after flushing the caches.
    """

    encoding: str
    milliseconds: Quartiles
    share: Quartiles
    cold: Quartiles


@dataclass(frozen=True)
class Training:
    """Training steps of a vision transformer, with encodings interleaved in every round."""

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
    """Peak memory of building and applying a rotation, without q, k and parameters.

    Attributes:
        encoding: Name of the encoding.
        setting: Shape, dtype, device.
        training: Whether the backward pass is included; otherwise forward without gradients.
        peak_bytes: Largest number of bytes allocated at once.
        rotation_bytes: Size of the rotation's table.
        output_bytes: Size of rotated q and k, in training of their gradients too; part of the peak.
    """

    encoding: str
    setting: Setting
    training: bool
    peak_bytes: int
    rotation_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Growth:
    """Time of a step as a function of tokens or batch.

    Attributes:
        encoding: Name of the encoding.
        over: "tokens" or "batch".
        sizes: Numbers of tokens or samples.
        milliseconds: Time of a step at each size.
        slope: Slope of log time over log size, by least squares; 1 is linear.
    """

    encoding: str
    over: str
    sizes: tuple[int, ...]
    milliseconds: tuple[Quartiles, ...]
    slope: float


@dataclass(frozen=True)
class Operation:
    """Time of one call on q and k relative to another.

    Attributes:
        name: Name of the comparison.
        setting: Shape, dtype, device.
        microseconds: Time of the call, repeated on the same memory.
        hot: Its time over the other's, both repeated on the same memory.
        cold: Its time over the other's, of single calls on new memory after flushing the caches.
    """

    name: str
    setting: Setting
    microseconds: Quartiles
    hot: Quartiles
    cold: Quartiles


@dataclass(frozen=True)
class RowResult:
    """A target and its measured value.

    Attributes:
        name: Short name of the row.
        what: Description of the measurement.
        unit: Unit after the number: "×", " %", " µs" or "".
        at_most: Whether smaller is better.
        must: Required value, None if there is none.
        reach: Desired value, None if there is none.
        value: Measured value; None if it could not be measured.
        why_not: Reason why it could not be measured.
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
    """All measurements of one machine.

    Attributes:
        schema: Version of the schema.
        rows: Targets with the measured values.
        operations: Times of single calls.
        bench: Times of layer steps.
        training: Times of training steps.
        memory: Peak memory.
        growth: Times by tokens and by batch size.
    """

    schema: int
    rows: tuple[RowResult, ...]
    operations: tuple[Operation, ...]
    bench: SpeedResults
    training: Training
    memory: tuple[Peak, ...]
    growth: tuple[Growth, ...]


@dataclass(frozen=True)
class Loading:
    """Throughput of loading one kind of data, on the CPU.

    Attributes:
        data: Description of the data.
        shape: Shape of an example: channels and sizes.
        augment: Description of the augmentation.
        batch: Examples of a batch.
        workers: Number of loading processes.
        examples_per_second: Examples loaded per second, over full epochs.
        gflops: Floating-point operations of the model's forward pass on an example, in 10⁹.
        taken_per_second: Estimated training throughput of one GPU, from gflops, its peak and utilisation.
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
    """Loading throughput of every kind of data on one machine.

    Attributes:
        schema: Version of the schema.
        rounds: Number of epochs of the quartiles.
        peak_tflops: Peak of the GPU that `taken_per_second` is for, in 10¹² operations per second.
        utilisation: Share of the peak that the model reaches.
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
    """Read the results of a suite.

    Raises:
        ValueError: the file is not JSON, has another schema version, or a field is missing or of the wrong type.
    """
    plain = read_mapping(path, "benchmark results")
    if plain.get("schema") != VERSION:
        raise ValueError(f"benchmark results must have schema {VERSION}, got {path} with {plain.get('schema')!r}")
    return build(kind, plain, path.name)
