"""Claims of the papers about which encoding is more accurate, beside what a leaderboard measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchrope_lab.conclusion import Interval, signed
from torchrope_lab.leaderboard.conditions import HOLM, TITLES, Condition, Contrast, accuracies, contrasted, sets_with
from torchrope_lab.leaderboard.entry import DataSetResults
from torchrope_lab.results import Column, Row, Table
from torchrope_lab.studies.engine.estimates import VERDICT, cells, with_interval

_ROPE_VIT = "RoPE-ViT (Heo et al., arXiv:2403.13298)"
_LIERE = "LieRE (Ostmeier et al., arXiv:2406.10322)"
_COMROPE = "ComRoPE (arXiv:2506.03737), supplement"


SAME, OPPOSITE, INCONCLUSIVE = "same sign here", "opposite sign here", "inconclusive"
_SMALL = "no: small models, trained from scratch for a few epochs on small sets"


@dataclass(frozen=True)
class Claim:
    """A paper's statement that one encoding is more accurate than another.

    Attributes:
        ahead, behind: Names of the two encodings, those that are the paper's.
        source: The paper, with its section or table.
        reported: The difference that it reports, in points; None if it is only in a figure.
        axes: Numbers of position axes of the data sets that the claim covers.
        condition: Condition under which the claim was made, a key of `TITLES`.
        comparable: Whether the sizes of differences can be compared with the paper's, and why not.
    """

    ahead: str
    behind: str
    source: str
    reported: float | None
    axes: Sequence[int] = (2,)
    condition: Condition = "trained"
    comparable: str = _SMALL


_RESAMPLED = f"{_SMALL}, never cropped; digits of 8×8 pixels are resampled, without more detail"
_FIXED = f"{_SMALL}; the baseline has fixed angles of at most 1 radian"
_CLIPS = f"{_SMALL}: synthetic clips of a moving digit and strokes of characters"

CLAIMS = (
    Claim("mixed", "axial", f"{_ROPE_VIT}, section 4.1, figure 4", None),
    Claim(
        "mixed",
        "learned",
        f"{_ROPE_VIT}, section 4.1, figure 4: larger than trained",
        None,
        condition="largest",
        comparable=_RESAMPLED,
    ),
    Claim(
        "axial",
        "learned",
        f"{_ROPE_VIT}, section 4.1, figure 4: larger than trained",
        None,
        condition="largest",
        comparable=_RESAMPLED,
    ),
    Claim("liere", "learned", f"{_LIERE}, table 1, CIFAR-100", 5.5),
    Claim("liere", "visionllama", f"{_LIERE}, table 1, CIFAR-100", 3.6, comparable=_FIXED),
    Claim(
        "liere", "liere:2", f"{_LIERE}, table 1, CIFAR-100, whose RoPE-Mixed is liere:2; section 5.3, figure 2a", 2.7
    ),
    Claim("liere", "liere:2", f"{_LIERE}, table 2, UCF101", 2.5, axes=(3,), comparable=_CLIPS),
    Claim("liere", "liere:2", f"{_LIERE}, section 5.2: with 40 % of CIFAR-100", 4.47, condition="small"),
    Claim(
        "comrope-ld:8", "liere", f"{_COMROPE}, table 3, UCF101 at 256 pixels", 1.92, (3,), "largest", comparable=_CLIPS
    ),
    Claim(
        "comrope-ld:8",
        "comrope-ap:8",
        f"{_COMROPE}, table 3, UCF101 at 256 pixels",
        1.0,
        (3,),
        "largest",
        comparable=_CLIPS,
    ),
)


def table_of_claims(sets: Sequence[DataSetResults]) -> list[Table]:
    """Build the table of claims that can be compared on these data sets; an empty list if there is none."""
    contrasts = {claim: each for claim in CLAIMS if (each := _contrast(claim, sets)).sets}
    if not contrasts:
        return []
    measured = contrasted(list(contrasts.values()))
    rows = [
        _row(claim, each, difference) for (claim, each), difference in zip(contrasts.items(), measured, strict=True)
    ]
    columns = (
        Column("claim", "Claim"),
        Column("source", "Source"),
        Column("condition", "Condition"),
        Column("reported", "Reported", "points", 1),
        with_interval("gain", "Measured, mean over sets", "points", 1),
        Column("by_set", "On each data set, points"),
        VERDICT,
        Column("comparable", "Comparable?"),
    )
    note = (
        f"{HOLM} {SAME.capitalize()}, {OPPOSITE}: the mean is significantly above or below 0, and the estimates on all "
        "data sets have one sign. No claim is confirmed or refuted by this."
    )
    return [Table("Claims of the papers", columns, rows, note=note)]


def _contrast(claim: Claim, sets: Sequence[DataSetResults]) -> Contrast:
    """Select the data sets on which a claim can be compared."""
    about = [found for found in sets if len(found.data.axes) in claim.axes]
    measured = sets_with(about, (claim.ahead, claim.behind), claim.condition)
    return Contrast(claim.ahead, claim.behind, measured, claim.condition)


def _row(claim: Claim, contrast: Contrast, measured: Interval) -> Row:
    by_set = {found.name: _difference(contrast, found) for found in contrast.sets}
    return {
        "claim": f"{claim.ahead} is ahead of {claim.behind}",
        "source": claim.source,
        "condition": TITLES[claim.condition],
        "reported": claim.reported,
        **cells("gain", measured),
        "by_set": ", ".join(f"{name} {signed(each)}" for name, each in by_set.items()),
        "verdict": verdict_on_sign(measured, list(by_set.values())),
        "comparable": claim.comparable,
    }


def _difference(contrast: Contrast, found: DataSetResults) -> float:
    """Compute top-1 of the first encoding minus that of the second on one data set, in points."""
    rights = accuracies(found, contrast.condition)
    return 100 * float(rights[contrast.one].mean() - rights[contrast.other].mean())


def verdict_on_sign(measured: Interval, by_set: Sequence[float]) -> str:
    """Return whether a difference has the sign that a paper reports: `SAME`, `OPPOSITE` or `INCONCLUSIVE`.

    Args:
        measured: Mean over data sets, with its interval.
        by_set: Estimates on each of them; where their signs differ, the mean is inconclusive.
    """
    if measured.low > 0 and min(by_set) > 0:
        return SAME
    return OPPOSITE if measured.high < 0 and max(by_set) < 0 else INCONCLUSIVE
