"""Conclusion of a comparison of encodings: its kind, its numbers, its sentence, and its JSON form.

`torchrope_lab.statistics.conclude` computes conclusions; its docstring gives the rules.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from torchrope_lab.schema import ClosedUnit, PositiveInt, build

Kind = Literal["best", "tied", "cheaper", "position-irrelevant", "nothing-learned", "cannot-tell"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Scope = Literal["encodings", "models"]
"""What a conclusion is about."""
BASELINE = "none"
"""The name of the model without positions."""
NOT_DIFFERENT = "not significantly different"
"""The verdict on encodings that are tied."""
ERROR_RATE = 0.05
"""Nominal error rate: over all claims "behind" of one conclusion, and of each other claim."""
_BETTER_THAN_CHANCE = "significantly better than always predicting the most frequent class"
ENOUGH_SEEDS = 5
"""Seeds below which a verdict is provisional."""


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Conclusion:
    """Conclusion of a comparison. `best`, `tied` and `behind` together contain every name once.

    Attributes:
        kind: One of `KINDS`; `conclude` gives the rules.
        best: The name with the highest accuracy; None for "nothing-learned".
        tied: Names not significantly different from the best, by decreasing accuracy.
        behind: Names significantly behind the best, by decreasing accuracy.
        cheapest: The encoding among the best and `tied` that costs at least 5 % less than every other of them; None
            unless "cheaper".
        intervals: 95 % interval of each accuracy separately, `(low, high)`.
        gains: Difference of each accuracy over that of "none" with its interval; empty without "none".
        gaps: Accuracy of the best minus that of each other name, with its interval; empty without a best. Intervals of
            gains and gaps are simultaneous over all pairs, nominally of 95 %.
        examples: Number of validation examples.
        seeds: Training runs per encoding.
        chance: Accuracy of the best constant prediction.
        margin: Differences within it count as irrelevant.
    """

    kind: Kind
    best: str | None
    tied: tuple[str, ...]
    behind: tuple[str, ...]
    cheapest: str | None
    intervals: dict[str, tuple[float, float]]
    gains: dict[str, Interval]
    gaps: dict[str, Interval]
    examples: PositiveInt
    seeds: PositiveInt
    chance: ClosedUnit
    margin: ClosedUnit

    @property
    def scope(self) -> Scope:
        """What it is about: "models" with one seed, which shows no variation between runs, else "encodings"."""
        return "models" if self.seeds == 1 else "encodings"

    @property
    def provisional(self) -> bool:
        """Whether it has fewer than five seeds."""
        return self.seeds < ENOUGH_SEEDS

    @property
    def condition(self) -> str:
        """The limit of its verdicts for a table: " (provisional)", or empty."""
        return " (provisional)" if self.provisional else ""

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary that `from_dict` reads and JSON can represent; it has scope and provisional too."""
        more = {"scope": self.scope, "provisional": self.provisional}
        plain: dict[str, Any] = json.loads(json.dumps({**asdict(self), **more}))
        return plain

    @classmethod
    def from_dict(cls, values: Any) -> "Conclusion":
        """Build a conclusion from the dictionary that `as_dict` returned."""
        return build(cls, values, "conclusion")

    def sentence(self) -> str:
        """Describe the conclusion in at most two sentences and 60 words, if names are single words."""
        compared = self.best is not None and len(self.intervals) > 1
        said = f"{_claim(self)}.{caveat(self.seeds) if compared else ''}"
        return f"{said[0].upper()}{said[1:]}" if self.kind in ("position-irrelevant", "cannot-tell") else said


# ---- sentences


def _claim(it: Conclusion) -> str:
    """Say what was shown, without a full stop."""
    tied = [it.best or "", *it.tied]
    match it.kind:
        case "best":
            next_one, others = it.behind[0], " of all others" if it.behind[1:] else ""
            lead = f"{it.best} is significantly ahead{others}, by {_interval(it.gaps[next_one])} over {next_one}"
            return f"{lead}{_gain(it) if next_one != BASELINE else ''}"
        case "tied":
            rest = f", and no difference is above {_points(it.margin)}"
            if it.behind:
                rest = f"; significantly behind: {join_names(it.behind)}"
            return f"{join_names(tied)} are {NOT_DIFFERENT}{rest}{_gain_or_difference(it)}"
        case "cheaper":
            others = join_names([name for name in tied if name != it.cheapest])
            less = "costs at least 5 % less per training step"
            return f"{it.cheapest} is {NOT_DIFFERENT} from {others} and {less}{_gain_or_difference(it)}"
        case "position-irrelevant":
            name = max(it.gains, key=lambda name: it.gains[name].estimate)
            rule = f"position does not matter: no encoding differs from none by more than {_points(it.margin)}"
            return f"{rule}; {name} gains {_interval(it.gains[name])} over none"
        case "nothing-learned":
            return f"No model is {_BETTER_THAN_CHANCE} ({100 * it.chance:.1f} %)"
    if len(it.intervals) == 1:
        return "A single encoding cannot be compared, nor several that are the same function on these data"
    examples = _count(it.examples, "example")
    if not can_show_learning(it.examples, len(it.intervals), it.chance):
        rule = "this run cannot tell whether anything was learned"
        return f"{rule}: with {examples}, even 100 % is not {_BETTER_THAN_CHANCE} ({100 * it.chance:.1f} %)"
    uncertain = _points(max((gap.high - gap.low) / 2 for gap in it.gaps.values()))
    uncertainty = f"with {examples} and {_count(it.seeds, 'seed')}, differences are uncertain by up to ± {uncertain}"
    return f"the encodings are {NOT_DIFFERENT}: {uncertainty}{_gain(it)}"


def _gain(it: Conclusion) -> str:
    """Format the lead of the best over "none"; empty without it."""
    if BASELINE not in it.gaps:
        return ""
    gap = _interval(it.gaps[BASELINE])
    if BASELINE in it.tied:
        return f"; no gain of {it.best} over none is visible, {gap}"
    return f"; {it.best} gains {gap} over none"


def _gain_or_difference(it: Conclusion) -> str:
    """Format the lead of the best over "none", or the largest difference if "none" is absent or the best."""
    if BASELINE in it.gaps:
        return _gain(it)
    name, gap = max(it.gaps.items(), key=lambda item: item[1].estimate)
    return f"; the largest difference, {it.best} over {name}, is {_interval(gap)}"


def caveat(seeds: int) -> str:
    """Return the sentence that ends an answer from fewer than five seeds; empty for five and more."""
    if seeds == 1:
        return " With one training each, this is provisional and about these models, not encodings."
    return f" With {seeds} seeds, this is provisional." if seeds < ENOUGH_SEEDS else ""


def _interval(shares: Interval) -> str:
    estimate, low, high = (signed(100 * each) for each in shares)
    return f"{estimate} points [{low}, {high}]"


def signed(value: float, digits: int = 1) -> str:
    """Format a number with a minus sign as in the tables: −6.6."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # 0.0, never -0.0


def _points(share: float) -> str:
    text = f"{100 * share:.1f}".removesuffix(".0") if share >= 0.0005 else f"{100 * share:.2g}"
    return f"{text} point{'' if text == '1' else 's'}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def join_names(names: Sequence[str]) -> str:
    """Join names for a sentence: "a", "a and b", "a, b and c", "a, b, c and 4 others"."""
    shown = [*names] if len(names) <= 4 else [*names[:3], f"{len(names) - 3} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


# ---- rules


def can_show_learning(examples: int, names: int, chance: float) -> bool:
    """Return whether a model that is right on all examples is significantly above chance."""
    # The lower bound of its accuracy is (5 % / names)^(1 / examples).
    return bool((ERROR_RATE / names) ** (1 / examples) > chance)
