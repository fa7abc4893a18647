"""Settings of `torchrope compare`. Does not import torch."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torchrope_lab.mistakes import Mistake
from torchrope_lab.schema import DISTINCT, OpenUnit, PositiveFloat
from torchrope_lab.settings.study_config import LabConfig, fitting

ENCODINGS = ["none", "learned", "axial", "golden", "mixed", "string", "comrope-ld", "liere:8"]
SCALES = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0]


@dataclass
class CompareConfig(LabConfig):
    """Settings of a comparison, which trains the same model once per encoding and seed.

    Attributes:
        encodings: Names as in learned,mixed,liere:8; by default those of the leaderboard, with sinusoidal instead of
            learned for data without a lattice.
        scales: Input sizes to evaluate at, as multiples of the training size.
        margin: Accuracy differences up to this fraction count as irrelevant; 0.01 is one percentage point.
        out: Output folder; studies share its runs.
    """

    not_options: ClassVar[tuple[str, ...]] = (  # of segmentation, detection and pretrained weights, or set by studies
        *(f"model.{name}" for name in ("head", "head_channels", "head_dropout", "num_queries", "global_layers")),
        *("model.depths", "model.stage_heads"),
        *("optim.backbone_lr", "optim.layer_decay", "data.fold"),
    )
    encodings: Annotated[list[str], DISTINCT] = field(default_factory=lambda: list(ENCODINGS))
    scales: list[PositiveFloat] = field(default_factory=lambda: list(SCALES))
    margin: OpenUnit = 0.01
    out: str = "torchrope-compare"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.task != "classify":
            raise Mistake(f"compare needs model.head classify (for others: study dense), got {self.model.head!r}")
        if self.encodings == ENCODINGS:
            self.encodings = fitting(ENCODINGS, self.data)
        if not self.encodings:
            raise Mistake("encodings must name 1 or more, got an empty list")
