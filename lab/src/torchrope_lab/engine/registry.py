"""The studies: question, papers and data of each; `studies/<name>.py` computes it. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchrope_lab.data.data_config import DataConfig, settings_of
from torchrope_lab.data.sets import NAMES_DENSE
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import Findings

DEFAULT_ENCODINGS = ("none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ld")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question about encodings that can be studied on any data.

    Attributes:
        name: Name of the study, and of its results file.
        title: Title shown in the report.
        question: The question, in a sentence.
        sources: Papers with their tables and figures, separated by "; ", as "liere-2, table 1"; keys of papers are
            those of published.yaml.
        find: Trains the runs that it needs with `Lab.train`, and returns the findings: a `OneFactor`, or a function
            of a `Lab`. Built-in studies have none until `find_study` imports their module.
        encodings: Default encodings.
        tasks: The data must be for at least one of these; see `DataModule.tasks`.
        lattice: Whether it needs patches on a lattice.
        needs_data: False if it is computed from formulas.
        optional_settings: Settings that not every study takes, such as "reference", and "folds" if it trains in them.
    """

    name: str
    title: str
    question: str
    sources: str = ""
    find: Callable[[Any], Findings] | None = None
    encodings: Sequence[str] = DEFAULT_ENCODINGS
    tasks: Sequence[str] = ("classify",)
    lattice: bool = False
    needs_data: bool = True
    optional_settings: Sequence[str] = ()

    def suits(self, data: str) -> bool:
        """Return whether it is for a data set of this name."""
        dense = "classify" not in self.tasks
        return dense == (data in NAMES_DENSE) and (settings_of(data).lattice or not self.lattice)

    def supports(self, data: DataConfig) -> bool:
        """Return whether it trains in the folds of data, if these have any."""
        return not data.folds or not self.needs_data or "folds" in self.optional_settings


_ALL = (
    Study(
        name="accuracy",
        title="Accuracy",
        question="Which encoding gives the highest classification accuracy, all else equal?",
        sources="liere-1, tables 1 and 2; liere-2, tables 1 and 6; comrope, table 3",
        optional_settings=("reference", "folds"),
    ),
    Study(
        name="data-efficiency",
        title="Data efficiency",
        question="How much training data does each encoding need?",
        sources="liere-1, figure 2b; liere-2, figure 3b",
        encodings=("learned", "axial", "mixed", "liere:8"),
        optional_settings=("reference",),
    ),
    Study(
        name="training-efficiency",
        title="Training efficiency",
        question="How much training does each encoding need to reach the accuracy of a reference?",
        sources="liere-1, figure 3; liere-2, figure 4b",
        optional_settings=("reference",),
    ),
    Study(
        name="capacity",
        title="Capacity",
        question="Does accuracy improve with larger blocks, which represent more rotations?",
        sources="liere-1, figure 2a; liere-2, figure 4a",
        encodings=("liere", "comrope-ld"),
        optional_settings=("reference", "folds"),
    ),
    Study(
        name="sharing",
        title="Sharing",
        question="Does sharing an encoding across heads or layers change accuracy?",
        sources="liere-2, table 2",
        encodings=("mixed", "liere:8", "liere"),
        optional_settings=("folds",),
    ),
    Study(
        name="model-size",
        title="Model size",
        question="Does the lead of an encoding depend on the size of the model?",
        sources="liere-2, table 4 and figure 3a",
        encodings=("learned", "axial", "mixed", "liere:8", "liere"),
        optional_settings=("reference", "folds"),
    ),
    Study(
        name="shuffle",
        title="Shuffled patches",
        question="How much does each encoding's model depend on the positions of its patches or tokens?",
        sources="liere-1, tables 3 and 4; liere-2, table 3",
    ),
    Study(
        name="resolution",
        title="Input size",
        question="Which encodings keep their accuracy at other input sizes than in training, and which methods improve "
        "it?",
        sources="liere-2, figure 2; liere-reviews, resolutions; comrope, table 3; rope-vit, figures 4 to 6 and table "
        "5; Tian et al., ResFormer (CVPR 2023), for training across mixed sizes",
        encodings=(
            *("none", "learned", "axial", "mixed", "learned+axial", "learned+mixed", "bias", "bias+mixed"),
            *("liere:8", "liere", "comrope-ld"),
        ),
        lattice=True,
        optional_settings=("sizes",),
    ),
    Study(
        name="pooling",
        title="Pooling",
        question="Is a class token or the mean over all patches better for classification?",
        sources="liere-2, appendix B",
        lattice=True,
        optional_settings=("folds",),
    ),
    Study(
        name="complexity",
        title="Complexity",
        question="How many parameters and operations does each encoding add?",
        sources="liere-1, section 4.2.1; liere-2, tables 2 and 5; comrope, table 7; rope-vit, computation costs",
        encodings=("none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ap", "comrope-ld", "string"),
        needs_data=False,
    ),
    Study(
        name="finetune",
        title="Fine-tuning",
        question="Does adding a rotary encoding before fine-tuning improve a model that was trained without one?",
        sources="comrope, table 4",
        encodings=("axial", "mixed", "liere:8", "liere", "comrope-ap", "comrope-ld"),
        lattice=True,
    ),
    Study(
        name="generators",
        title="Learned generators",
        question="How are trained generators distributed, and do unconstrained ones become closer to commuting?",
        sources="comrope, table 8 and figure 8",
        encodings=(
            *("mixed", "liere:2", "comrope-ap:2", "comrope-ld:2", "liere:4", "comrope-ap:4", "comrope-ld:4"),
            *("liere:8", "comrope-ap", "comrope-ld", "liere"),
        ),
        optional_settings=("checkpoint",),
    ),
    Study(
        name="learning",
        title="Learning",
        question="Do learned generators improve over frozen ones?",
        sources="liere-reviews, additional parameters",
        encodings=("mixed", "liere:8", "comrope-ld"),
    ),
    Study(
        name="attention",
        title="Attention distance and entropy",
        question="What are the distance and the entropy of attention in each layer, with each encoding?",
        sources="rope-vit, figures 2 and 3",
        lattice=True,
        optional_settings=("reference", "checkpoint"),
    ),
    Study(
        name="fourier",
        title="Locating a point",
        question="How sharply can a point be reconstructed from an encoding's frequencies or blocks?",
        sources="rope-vit, figure 1",
        encodings=("axial", "mixed", "golden", "liere:8", "liere", "comrope-ap", "comrope-ld", "string"),
        needs_data=False,
        optional_settings=("checkpoint",),
    ),
    Study(
        name="probes",
        title="Probes",
        question="Which tokens can one layer of attention select with each encoding?",
        sources="In none of the papers; rope-vit, section 3.2 (claim tested); comrope, section 1 (claim tested)",
        needs_data=False,
        optional_settings=("seeds", "probes"),
    ),
    Study(
        name="dense",
        title="Segmentation and detection",
        question="Which encoding is best for segmentation and detection, also on images larger than in training?",
        sources="rope-vit, tables 1 to 4",
        encodings=("learned", "bias", "axial", "mixed", "learned+axial", "learned+mixed", "liere:8", "comrope-ld"),
        tasks=("segment", "detect"),
        optional_settings=("reference",),
    ),
)
STUDIES = {study.name: study for study in _ALL}
"""All studies by name, in the order of the report."""


def suitable(data: str) -> list[str]:
    """Return the names of the studies for a data set."""
    return [name for name, study in STUDIES.items() if study.suits(data)]


def check_supported(studies: Sequence[Study], setting: str, option: str | None = None) -> None:
    """Raise ValueError if none of some studies has a setting among its `optional_settings`."""
    if not any(setting in study.optional_settings for study in studies):
        supporting = [name for name, study in STUDIES.items() if setting in study.optional_settings]
        names = ", ".join(study.name for study in studies)
        raise Mistake(f"{option or setting} is for the studies {', '.join(supporting)}, got {names}")
