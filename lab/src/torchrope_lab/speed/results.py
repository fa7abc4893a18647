"""Dataclasses of the results of `torchrope speed`."""

from dataclasses import dataclass

from torchrope_lab.speed.config import Setting
from torchrope_lab.timing import Quartiles


@dataclass(frozen=True)
class StepTime:
    """Time of a step in one implementation.

    Attributes:
        name: Name of the implementation.
        milliseconds: Time of a step.
        ratio: Its time over torchrope's in the same round: how many times as fast torchrope is.
    """

    name: str
    milliseconds: Quartiles
    ratio: Quartiles


@dataclass(frozen=True)
class EncodingTimes:
    """Comparison of implementations of one encoding.

    Attributes:
        encoding: Name of the encoding.
        backend: The backend that torchrope used; "reference" if no kernels support this device and dtype.
        timed: Every implementation that could be measured, torchrope first.
        left_out: Reasons why others could not be measured, by name.
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
    """Results of `torchrope speed`: for every encoding, time of building and applying the rotation, with gradients.

    Attributes:
        setting: Shape, dtype, device.
        rounds: Number of rounds of the medians.
        encodings: The comparison of each encoding.
        not_fitting: Reasons why encodings of the default list were not measured, by name.
        source: Machine, versions, commit.
        parity: Largest error as a share of the allowed one; None if not recorded.
    """

    setting: Setting
    rounds: int
    encodings: tuple[EncodingTimes, ...]
    not_fitting: dict[str, str]
    source: Source
    parity: float | None = None

    def of(self, encoding: str) -> EncodingTimes:
        """Return the comparison of an encoding."""
        return next(compared for compared in self.encodings if compared.encoding == encoding)
