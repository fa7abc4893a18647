"""Plans of the leaderboard: encodings, data sets, number of seeds and learning rates."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from torchrope_lab.files import read_mapping
from torchrope_lab.options import parse
from torchrope_lab.schema import DISTINCT, NOT_EMPTY, PositiveInt, Probability, Rule, build, require
from torchrope_lab.studies.engine.config import LabConfig, StudyConfig, fitting

FOLDER = Path(__file__).parent / "plans"
PLAN_SETTINGS = ("encodings", "seeds", "out", "parallel", "slurm", "reference", "checkpoint", "sizes", "data.tuning")
"""Settings that the plan or the command line sets for all data sets; a data set must not set them."""


Factors = Annotated[
    Sequence[Annotated[float, Rule("above 0 and below 100", lambda factor: 0 < factor < 100)]],
    DISTINCT,
    Rule("numbers of which one is 1", lambda factors: 1 in factors),
]


@dataclass(frozen=True)
class Plan:
    """Settings of a leaderboard.

    Attributes:
        title: Title shown in the report: purpose and machine.
        encodings: Encodings, compared on every data set that they apply to.
        sets: Options of `torchrope compare` for data, model and schedule, by name of the data set.
        seeds: Training runs of each encoding on each set.
        rates: Factors on each set's learning rate, of which one is chosen.
        tuned: Encodings whose mean accuracy selects that factor, also trained at their own best rate; empty for all.
        small: Share of the training examples for an additional run of every encoding; 0 for none.
        scales: Input sizes to evaluate at, as multiples of the training size, for data on a lattice.

    Raises:
        ValueError: a number is out of range, or a name occurs twice.
    """

    title: str
    encodings: Annotated[Sequence[str], NOT_EMPTY, DISTINCT]
    sets: Annotated[Mapping[str, str], NOT_EMPTY]
    seeds: PositiveInt = 3
    rates: Factors = (1.0,)
    tuned: Sequence[str] = ()
    small: Probability = 0.3
    scales: Factors = (0.5, 1.0, 1.5, 2.0)

    def __post_init__(self) -> None:
        unknown = ", ".join(name for name in self.tuned if name not in self.encodings)
        require(not unknown, "tuned must be among the encodings", unknown)

    def config(
        self, name: str, *, out: Path, parallel: int = 1, slurm: str | None = None, allow: Sequence[str] = ()
    ) -> LabConfig:
        """Return the settings of one data set.

        Args:
            name: Name of a data set of `sets`.
            out: Folder of the leaderboard, whose runs all data sets share.
            parallel, slurm: See `LabConfig`.
            allow: Modules and packages from which sources of data may be imported.

        Raises:
            ValueError: an option is unknown, or is for the plan; the message names the data set.
        """
        try:
            parsed = parse("leaderboard", "", StudyConfig, shlex.split(self.sets[name]), allow=allow)
            taken = ", ".join(parsed.name(setting) for setting in PLAN_SETTINGS if setting in parsed.given)
            require(not taken, "options of a data set must not be those of the plan", taken)
        except ValueError as error:
            raise ValueError(f"sets.{name} of the plan: {error}") from None
        config = parsed.config
        return LabConfig(
            data=config.data,
            model=config.model,
            optim=config.optim,
            run=config.run,
            encodings=fitting(self.encodings, config.data),
            seeds=self.seeds,
            parallel=parallel,
            slurm=slurm,
            out=str(out),
        )

    def only(self, names: Sequence[str]) -> "Plan":
        """Return the plan with some of its data sets.

        Raises:
            ValueError: it has no such set.
        """
        unknown = ", ".join(name for name in names if name not in self.sets)
        require(not unknown, f"--only must name sets of the plan, {', '.join(self.sets)}", unknown)
        return replace(self, sets={name: self.sets[name] for name in names})

    def with_encodings(self, encodings: Sequence[str]) -> "Plan":
        """Return the plan with other encodings; `tuned` keeps those among them."""
        return replace(self, encodings=encodings, tuned=[name for name in self.tuned if name in encodings])


def plans() -> list[str]:
    """Return the names of the included plans."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_plan(name: str) -> Plan:
    """Read an included plan by name, or a plan from a YAML file.

    Raises:
        ValueError: there is none, or it is invalid.
    """
    path = Path(name)
    file = path if path.suffix in (".yaml", ".yml") else FOLDER / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(f"plans are {', '.join(plans())}, or a YAML file, got {name!r}")
    return build(Plan, read_mapping(file, "plan"), "plan")
