"""Settings of `torchrope study`. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrope_lab.data.data_config import DataConfig, data_config
from torchrope_lab.mistakes import Mistake
from torchrope_lab.schema import DISTINCT, PositiveInt, Settings
from torchrope_lab.settings.probes_config import ProbesConfig
from torchrope_lab.settings.run_config import ExecutionConfig, ModelConfig, OptimConfig

LEARNED, SINUSOIDAL = "learned", "sinusoidal"
"""The absolute encoding used as reference on a lattice, and without a lattice, where a learned table is impossible."""


def reference_for(data: DataConfig) -> str:
    """Return the absolute encoding that suits data: a learned table, or without a lattice a function of positions."""
    return LEARNED if data.lattice else SINUSOIDAL


def fitting(names: Sequence[str], data: DataConfig) -> list[str]:
    """Replace the learned absolute encoding in a list of encodings by the one that suits the data."""
    suitable = [
        "+".join(reference_for(data) if part == LEARNED else part for part in name.split("+")) for name in names
    ]
    return list(dict.fromkeys(suitable))


def parse_slurm(text: str) -> dict[str, Any]:
    """Parse options of sbatch, as in "partition=gpu,time=1440,gpus_per_node=8"."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not name or not value:
            raise Mistake(f"--slurm must be NAME=VALUE,..., got {text!r}")
        options[name.replace("-", "_")] = int(value) if value.isdecimal() else value
    return options


@dataclass
class LabConfig(Settings):
    """Settings that all studies have.

    Attributes:
        data: The data.
        model: The model around the encodings.
        optim: The optimiser.
        run: Precision, checkpoints and logs of runs; on_nan is "ignore" because divergence of an encoding is a
            result.
        encodings: Names as in learned,mixed,liere:8 (README, "The encodings"); default: the study's list.
        seeds: Number of seeds per encoding and setting, from 0. With fewer than three, conclusions are about the
            trained models, not about encodings.
        parallel: Runs that train at the same time, each on one device or its share of the CPU cores. By default one. As
            Slurm jobs by default all.
        slurm: Train as Slurm jobs, with options of sbatch as in partition=gpu,time=240 (time in minutes).
        out: Output folder; studies share the runs in it.
    """

    data: DataConfig = field(default_factory=data_config)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: ExecutionConfig = field(default_factory=lambda: ExecutionConfig(on_nan="ignore"))
    encodings: Annotated[list[str], DISTINCT] = field(default_factory=list)
    seeds: PositiveInt = 3
    parallel: PositiveInt | None = None
    slurm: str | None = None
    out: str = "torchrope-studies"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slurm is not None:
            parse_slurm(self.slurm)


@dataclass
class StudyConfig(LabConfig):
    """Settings of a study.

    Attributes:
        reference: Encoding that the others are compared with, trained if it is not among them; default: learned, or
            sinusoidal without a lattice.
        checkpoint: Trained models: published checkpoints, files of torchrope.save, run folders.
        probes: What the study "probes" trains.
        sizes: Input sizes in pixels per side at which "resolution" evaluates, in addition to the training size; by
            default 0.5 to 2 times the training size.
    """

    reference: str | None = None
    checkpoint: Annotated[list[str], DISTINCT] = field(default_factory=list)
    sizes: Annotated[list[PositiveInt], DISTINCT] = field(default_factory=list)
    probes: ProbesConfig = field(default_factory=ProbesConfig)
