"""Plans of the leaderboard: encodings, data sets, seeds, and what is tried for each encoding."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from torchrope_lab.files import read_mapping
from torchrope_lab.options import parse
from torchrope_lab.schema import DISTINCT, NOT_EMPTY, PositiveInt, Rule, build, require
from torchrope_lab.studies.engine.config import LabConfig, StudyConfig, fitting

FOLDER = Path(__file__).parent / "plans"
PLAN_SETTINGS = ("encodings", "seeds", "out", "parallel", "slurm", "reference", "checkpoint", "sizes", "data.tuning")
"""Settings that the plan or the command line sets for all data sets; a data set must not set them."""


Factor = Annotated[float, Rule("above 0 and at most 1000", lambda factor: 0 < factor <= 1000)]
Factors = Annotated[
    Sequence[Factor],
    DISTINCT,
    Rule("increasing numbers of which one is 1", lambda factors: 1 in factors and [*factors] == sorted(factors)),
]
Scales = Annotated[Factors, Rule("1, or numbers that end above 1", lambda scales: len(scales) == 1 or scales[-1] > 1)]


@dataclass(frozen=True)
class Plan:
    """Settings of a leaderboard.

    Attributes:
        title: Title shown in the report: purpose and machine.
        encodings: Encodings, compared on every data set that they apply to.
        sets: Options of `torchrope compare` for data, model and schedule, by name of the data set.
        seeds: Training runs of each encoding on each set.
        rates: Factors on each set's learning rate. For each encoding 1 and its neighbours are tried, then the
            neighbours of the best until it is inside or at an end of the list.
        encoding_rates: Factors on `optim.encoding_lr`, tried in the same way for encodings that have parameters.
        longest: Limit of the epochs, as a multiple of each set's.
        scales: Input sizes to evaluate at, as multiples of the training size, for data on a lattice.

    Raises:
        ValueError: a number is out of range, or a name occurs twice.
    """

    title: str
    encodings: Annotated[Sequence[str], NOT_EMPTY, DISTINCT]
    sets: Annotated[Mapping[str, str], NOT_EMPTY]
    seeds: PositiveInt = 5
    rates: Factors = (0.1, 0.3, 1.0, 3.0, 10.0)
    encoding_rates: Factors = (0.1, 1.0, 10.0, 100.0)
    longest: PositiveInt = 4
    scales: Scales = (1.0, 2.0)

    @property
    def protocol(self) -> str:
        """What is tried and trained for each encoding, in words."""
        rates, encoding_rates, scales = (
            ", ".join(f"{each:g}" for each in of) for of in (self.rates, self.encoding_rates, self.scales)
        )
        return f"rates × {rates}; encoding rates × {encoding_rates}; epochs up to × {self.longest}; sizes × {scales}"

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
    return build(Plan, read_mapping(file, "plan"), "plan", strict=True)
