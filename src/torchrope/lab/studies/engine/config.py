"""Settings of `torchrope study`, as plain values: imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchrope.lab.data.config import NAMES_WITHOUT_LATTICE, DataConfig, DigitsConfig
from torchrope.lab.studies.slurm import parse_slurm
from torchrope.lab.training.config import ModelConfig, OptimConfig, ScaleConfig

TABLE, FUNCTION = "learned", "sinusoidal"
"""The absolute encoding that things are compared with on a lattice, and where there is none to have a table for."""


def reference_for(data: DataConfig) -> str:
    """The absolute encoding that data can have: a learned table, or a function of real positions."""
    return FUNCTION if data.name in NAMES_WITHOUT_LATTICE else TABLE


def fitting(names: Sequence[str], data: DataConfig) -> list[str]:
    """A list of encodings of ours, with the absolute one that data can have."""
    own = ["+".join(reference_for(data) if part == TABLE else part for part in name.split("+")) for name in names]
    return list(dict.fromkeys(own))


@dataclass
class LabConfig:
    """What is trained, and where its runs are kept.

    Attributes:
        data: Which data.
        model: The model around the encodings.
        optim: The optimiser.
        scale: How runs are computed; an encoding that diverges is a result, so that on_nan is "ignore".
        encodings: Names, see `torchrope.encodings.choose`; none is the study's own list.
        seeds: Runs of each kind, seeds 0, 1, ...
        parallel: Runs that train at the same time, each on a device or on its share of the processor's cores.
        slurm: Train on a Slurm cluster in place of here: "partition=gpu,time=240", options of sbatch;
            "cluster=local" takes processes of this machine.
        out: Folder of results; runs are shared in it.
    """

    data: DataConfig = field(default_factory=DigitsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    scale: ScaleConfig = field(default_factory=lambda: ScaleConfig(on_nan="ignore"))
    encodings: list[str] = field(default_factory=list)
    seeds: int = 1
    parallel: int = 1
    slurm: str | None = None
    out: str = "torchrope-studies"

    def __post_init__(self) -> None:
        for name in ("seeds", "parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if len(set(self.encodings)) < len(self.encodings):
            raise ValueError(f"encodings must be named once each, got {','.join(self.encodings)}")
        if self.slurm is not None:
            parse_slurm(self.slurm)


@dataclass
class StudyConfig(LabConfig):
    """A study on data of your choice.

    Attributes:
        reference: Encoding that the others are compared with, trained too where it is not among them; by default
            learned, or sinusoidal without a lattice, in studies that need one.
        checkpoint: Trained models that "fourier", "generators" and "attention" read, beside the runs of the encodings
            named, or in their place: files of published checkpoints or of torchrope.save, folders of runs.
        sizes: Input sizes that "resolution" evaluates at, in pixels per side, beside that of the training; by default
            0.5 to 2 times as large.
    """

    reference: str | None = None
    checkpoint: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.checkpoint)) < len(self.checkpoint):
            raise ValueError(f"checkpoint must name each once, got {','.join(self.checkpoint)}")
        if any(size < 1 for size in self.sizes) or len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"sizes must be 1 or more, each named once, got {', '.join(map(str, self.sizes))}")
