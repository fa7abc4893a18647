"""Settings of `torchrope compare`, as plain values: imports no torch."""

from dataclasses import dataclass, field

from torchrope.lab.data.config import DataConfig
from torchrope.lab.training.config import ModelConfig, OptimConfig, ScaleConfig

ENCODINGS = ["none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ap", "comrope-ld"]
SCALES = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0]


@dataclass
class CompareConfig:
    """The same model trained once per encoding and seed.

    Attributes:
        data: Which data.
        model: The model around the encodings.
        optim: The optimiser.
        scale: How runs are computed and watched; an encoding that diverges is a result, unless on_nan says otherwise.
        encodings: Names, see `torchrope.encodings.choose`.
        seeds: Number of runs of each encoding, seeds 0, 1, ...
        scales: Sizes to evaluate at, as multiples of the training size.
        out: Folder of everything that the comparison leaves.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    scale: ScaleConfig = field(default_factory=lambda: ScaleConfig(on_nan="ignore"))
    encodings: list[str] = field(default_factory=lambda: list(ENCODINGS))
    seeds: int = 1
    scales: list[float] = field(default_factory=lambda: list(SCALES))
    out: str = "torchrope-compare"

    def __post_init__(self) -> None:
        if self.model.task != "classify":
            raise ValueError(f"compare is for model.head classify (others: study dense), got {self.model.head!r}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be 1 or more, got {self.seeds}")
        if not self.encodings:
            raise ValueError("encodings must name at least one, got none")
        if len(set(self.encodings)) < len(self.encodings):
            raise ValueError(f"encodings must be named once each, got {','.join(self.encodings)}")
        if not all(scale > 0 for scale in self.scales):
            raise ValueError(f"scales must be above 0, got {self.scales}")
