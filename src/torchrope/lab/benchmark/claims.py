"""Claims of the papers about which encoding is more accurate, beside what a benchmark measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchrope.lab.benchmark.conditions import TITLES, Condition, Contrast, contrasted, sets_with
from torchrope.lab.benchmark.entry import DataSetResults
from torchrope.lab.conclusion import Interval
from torchrope.lab.results import Column, Row, Table
from torchrope.lab.studies.engine.estimates import HOLM, VERDICT, cells, verdict_of, with_interval

_ROPE_VIT = "RoPE-ViT (Heo et al., arXiv:2403.13298)"
_LIERE = "LieRE (Ostmeier et al., arXiv:2406.10322)"
_COMROPE = "ComRoPE (arXiv:2506.03737), supplement"


@dataclass(frozen=True)
class Claim:
    """A paper's statement that one encoding is more accurate than another.

    Attributes:
        ahead, behind: Names of the two encodings.
        source: The paper, with its section or table.
        reported: The difference that it reports, in points; None if it is only in a figure.
        axes: Numbers of position axes of the data sets that the claim covers.
        condition: Condition under which the claim was made, a key of `TITLES`.
    """

    ahead: str
    behind: str
    source: str
    reported: float | None
    axes: Sequence[int] = (2,)
    condition: Condition = "trained"


CLAIMS = (
    Claim("mixed", "axial", f"{_ROPE_VIT}, section 4.1, figure 4", None),
    Claim("mixed", "learned", f"{_ROPE_VIT}, section 4.1, figure 4: larger than trained", None, condition="largest"),
    Claim("axial", "learned", f"{_ROPE_VIT}, section 4.1, figure 4: larger than trained", None, condition="largest"),
    Claim("liere", "learned", f"{_LIERE}, table 1, CIFAR-100", 5.5),
    Claim("liere", "visionllama", f"{_LIERE}, table 1, CIFAR-100", 3.6),
    Claim("liere", "mixed", f"{_LIERE}, table 1, CIFAR-100", 2.7),
    Claim("liere", "mixed", f"{_LIERE}, table 2, UCF101", 2.5, axes=(3,)),
    Claim("liere", "mixed", f"{_LIERE}, section 5.2: with 40 % of CIFAR-100", 4.47, condition="small"),
    Claim("liere", "liere:2", f"{_LIERE}, section 5.3, figure 2a: larger blocks", None),
    Claim("comrope-ld:8", "liere", f"{_COMROPE}, table 3, UCF101 at 256 pixels", 1.92, (3,), "largest"),
    Claim("comrope-ld:8", "comrope-ap:8", f"{_COMROPE}, table 3, UCF101 at 256 pixels", 1.0, (3,), "largest"),
)


def table_of_claims(sets: Sequence[DataSetResults]) -> list[Table]:
    """Build the table of claims that can be compared on these data sets; an empty list if there is none."""
    contrasts = {claim: each for claim in CLAIMS if (each := _contrast(claim, sets)).sets}
    if not contrasts:
        return []
    measured = contrasted(list(contrasts.values()))
    rows = [
        _row(claim, len(each.sets), difference)
        for (claim, each), difference in zip(contrasts.items(), measured, strict=True)
    ]
    columns = (
        Column("claim", "Claim"),
        Column("source", "Source"),
        Column("condition", "Condition"),
        Column("reported", "Reported", "points", 1),
        Column("sets", "Data sets", digits=0),
        with_interval("gain", "Measured", "points", 1),
        VERDICT,
    )
    note = (
        f"{HOLM} The papers trained larger models on other data. "
        "Confirmed: measurably ahead here too. Contradicted: measurably behind."
    )
    return [Table("Claims of the papers", columns, rows, note=note)]


def _contrast(claim: Claim, sets: Sequence[DataSetResults]) -> Contrast:
    """Select the data sets on which a claim can be compared."""
    about = [found for found in sets if len(found.data.axes) in claim.axes]
    measured = sets_with(about, (claim.ahead, claim.behind), claim.condition)
    return Contrast(claim.ahead, claim.behind, measured, claim.condition)


def _row(claim: Claim, sets: int, measured: Interval) -> Row:
    return {
        "claim": f"{claim.ahead} is ahead of {claim.behind}",
        "source": claim.source,
        "condition": TITLES[claim.condition],
        "reported": claim.reported,
        "sets": sets,
        **cells("gain", measured),
        "verdict": verdict_of(measured, "confirmed", "contradicted", "cannot tell"),
    }
