"""Conclusion of a comparison of encodings: its kind, its numbers, its sentence, and its JSON form.

`torchrope_lab.statistics.conclude` computes conclusions; its docstring gives the rules.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from torchrope_lab.schema import ClosedUnit, Fraction, PositiveInt, build

Kind = Literal["best", "tied", "cheaper", "position-irrelevant", "nothing-learned", "cannot-tell"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Scope = Literal["encodings", "models", "epochs"]
"""What a conclusion is about."""
BASELINE = "none"
"""The name of the model without positions."""
NOT_DIFFERENT = "not significantly different"
"""The verdict on encodings that are tied."""
ERROR_RATE = 0.05
"""Bound on the error rate: family-wise over all claims "behind" of one conclusion, and of each other claim."""
ENOUGH_SEEDS = 3
"""Seeds from which a conclusion is about encodings; with fewer it is about the trained models."""
STILL_RISING = 0.01
"""Rise over the last fifth of training above which an accuracy still rises."""


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Needed:
    """Additional examples or seeds with which a run shows a gap worth having, if it is real, with a power of 80 %.

    Attributes:
        gap: Twice the margin, or 2 points without one; not the observed gap, which may be due to chance.
        examples: Additional validation examples, with the same number of seeds; None if no number is enough.
        seeds: Additional seeds, on the same examples; None if 100 are not enough, or this run has one seed.
    """

    gap: Fraction
    examples: PositiveInt | None
    seeds: PositiveInt | None


@dataclass(frozen=True)
class Conclusion:
    """Conclusion of a comparison. `best`, `tied` and `behind` together contain every name once.

    Attributes:
        kind: One of `KINDS`; `conclude` gives the rules.
        best: The name with the highest accuracy; None for "nothing-learned".
        tied: Names not significantly different from the best, by decreasing accuracy.
        behind: Names significantly behind the best, by decreasing accuracy.
        cheapest: The encoding among the best and `tied` that costs significantly less than every other of them; None
            unless "cheaper".
        intervals: 95 % interval of each accuracy separately, `(low, high)`.
        gains: Difference of each accuracy over that of "none" with its 95 % interval; empty without "none".
        gaps: Accuracy of the best minus that of each other name, with simultaneous 95 % intervals (Bonferroni, over all
            pairs). `behind` is decided by Holm's procedure, which may reject where such an interval contains 0.
        detectable: The smallest gap to the best that this run shows with a power of 80 %, the median over the tied, or
            over all if none is tied; None if it shows no gap.
        needed: For "cannot-tell", the sample size with which a run shows a gap worth having; None if this run does.
        examples: Number of validation examples.
        seeds: Training runs per encoding.
        chance: Accuracy of the best constant prediction.
        margin: Differences within it count as irrelevant.
        converged: Whether the accuracy has stopped rising at the end of training, by name; without names whose
            learning curve is unknown or has fewer than three epochs.
        epochs: Epochs of training; None without learning curves.
        balanced: Mean over classes of the accuracy on each, by name; empty if classes have about equal sizes.
        tested: As `gaps`, with intervals of the level at which Holm's procedure ends: one excludes 0 if and only if its
            difference is significant. The sentence quotes them; empty for conclusions stored without them.
    """

    kind: Kind
    best: str | None
    tied: tuple[str, ...]
    behind: tuple[str, ...]
    cheapest: str | None
    intervals: dict[str, tuple[float, float]]
    gains: dict[str, Interval]
    gaps: dict[str, Interval]
    detectable: Fraction | None
    needed: Needed | None
    examples: PositiveInt
    seeds: PositiveInt
    chance: ClosedUnit
    margin: ClosedUnit
    converged: dict[str, bool] = field(default_factory=dict)
    epochs: PositiveInt | None = None
    balanced: dict[str, ClosedUnit] = field(default_factory=dict)
    tested: dict[str, Interval] = field(default_factory=dict)

    @property
    def rising(self) -> list[str]:
        """Names whose accuracy still rises at the end of training."""
        return [name for name, flat in self.converged.items() if not flat]

    @property
    def scope(self) -> Scope:
        """What it is about: "epochs" if an accuracy still rises, "models" with one or two seeds, else "encodings"."""
        return "epochs" if self.rising else "models" if self.seeds < ENOUGH_SEEDS else "encodings"

    @property
    def condition(self) -> str:
        """The limit of its verdicts for a table: " (these trainings)"; empty if it is about encodings."""
        conditions = {"epochs": f" (after {self.epochs} epochs)", "models": " (these trainings)", "encodings": ""}
        return conditions[self.scope]

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary that `from_dict` reads and JSON can represent; it has the scope too."""
        plain: dict[str, Any] = json.loads(json.dumps({**asdict(self), "scope": self.scope}))
        return plain

    @classmethod
    def from_dict(cls, values: Any) -> "Conclusion":
        """Build a conclusion from the dictionary that `as_dict` returned."""
        return build(cls, values, "conclusion")

    def sentence(self) -> str:
        """Describe the conclusion in at most two sentences and 60 words, if names are single words."""
        # With one or two seeds the sentence is about the trained models, not about encodings; if accuracies still rise,
        # it begins with that and is about the first epochs.
        said = _SENTENCES[self.kind](self, _gain(self))
        compared = self.kind != "nothing-learned" and can_show_learning(self.examples, len(self.intervals), self.chance)
        where = _where(self) if compared and len(self.intervals) > 1 else ""
        if where:
            return f"{where}, {said}"
        return f"{said[0].upper()}{said[1:]}" if self.kind in ("position-irrelevant", "cannot-tell") else said


# ---- sentences


def _where(it: Conclusion) -> str:
    """Say which trainings a sentence is about: one or two of each encoding, or the first epochs; empty otherwise."""
    few = {1: "In this training", 2: "In these two trainings"}.get(it.seeds, "")
    if not it.rising:
        return few
    of = f"{few} of" if few else "In the first"
    return f"{of} {it.epochs} epochs ({len(it.rising)} of {len(it.converged)} curves still rise)"


def _say_best(it: Conclusion, gain: str) -> str:
    next_one = it.behind[0]
    gap = (it.tested or it.gaps)[next_one]
    significant = gap.low > 0 or bool(it.tested)
    ahead = f"by {_interval(gap) if significant else _points(gap.estimate)} over {next_one}"
    others = " of all others" if it.behind[1:] else ""
    over_none = gain if next_one != BASELINE else ""
    return f"{it.best} is significantly ahead{others}, {ahead}{over_none}.{one_seed(it.seeds)}"


def _say_tied(it: Conclusion, gain: str) -> str:
    tied = f"{join_names([it.best or '', *it.tied])} are {NOT_DIFFERENT}"
    if it.behind:
        return f"{tied}; significantly behind: {join_names(it.behind)}{gain}. With {_limits(it)}."
    return f"{tied}, and no difference is above {_points(it.margin)}{gain}.{one_seed(it.seeds)}"


def _say_cheaper(it: Conclusion, gain: str) -> str:
    others = [name for name in (it.best, *it.tied) if name is not None and name != it.cheapest]
    equal = f"{it.cheapest} is {NOT_DIFFERENT} from {join_names(others)}"
    return f"{equal} and costs significantly less{gain}. With {_limits(it)}."


def _say_irrelevant(it: Conclusion, gain: str) -> str:
    name = max(it.gains, key=lambda name: it.gains[name].estimate)
    rule = f"position does not matter: no encoding differs from none by more than {_points(it.margin)}"
    return f"{rule}; {name} gains {_interval(it.gains[name])} over none.{one_seed(it.seeds)}"


def _say_nothing(it: Conclusion, gain: str) -> str:
    return (
        f"No model is significantly better than always predicting the most frequent class ({100 * it.chance:.1f} %). "
        "Train longer, or hold out more examples, before comparing encodings."
    )


def _say_unknown(it: Conclusion, gain: str) -> str:
    if len(it.intervals) == 1:
        return "A single encoding cannot be compared, nor several that are the same function on these data."
    if not can_show_learning(it.examples, len(it.intervals), it.chance):
        return (
            f"this run cannot tell whether anything was learned: with {_count(it.examples, 'example')}, even an "
            "accuracy of 100 % is not significantly better than always predicting the most frequent class "
            f"({100 * it.chance:.1f} %)."
        )
    compared = "these models" if it.seeds < ENOUGH_SEEDS else "the encodings"
    return f"{compared} are {NOT_DIFFERENT}: with {_limits(it, '')}{gain}.{_need(it)}"


def _limits(it: Conclusion, between: str = " between these models") -> str:
    runs = f"{_count(it.examples, 'example')}{'' if it.seeds == 1 else f' and {it.seeds} seeds'}"
    unseen = "any difference" if it.detectable is None else f"differences below {_points(it.detectable)}"
    return f"{runs}, {unseen}{between if it.seeds < ENOUGH_SEEDS else ''} may go unnoticed"


def _need(it: Conclusion) -> str:
    if it.needed is None:
        return ""
    need = it.needed
    ways = [_count(_rounded(need.examples), "more example")] if need.examples is not None else []
    ways += [_count(need.seeds, "more seed")] if need.seeds is not None else []
    if not ways:
        return f" A real difference of {_points(need.gap)} needs more examples and more seeds."
    return f" A real difference of {_points(need.gap)} needs about {' or '.join(ways)}."


def _rounded(number: int) -> int:
    """Round to two significant digits."""
    return round(number, 2 - len(str(number)))


def _gain(it: Conclusion) -> str:
    """Format the lead of the best over "none" and its balanced accuracy; empty without both."""
    gap, balanced = (it.tested or it.gaps).get(BASELINE), it.balanced.get(it.best or "")
    mean = "" if balanced is None else f"balanced accuracy {100 * balanced:.1f} %"
    if gap is None:
        return f"; {it.best} has a {mean}" if mean else ""
    visible = f"{it.best} gains {_interval(gap)} over none"
    if BASELINE in it.tied:
        visible = f"no gain of {it.best} over none is visible, {_interval(gap)}"
    return f"; {visible}{f' ({mean})' if mean else ''}"


def one_seed(seeds: int) -> str:
    """Return the caveat that ends an answer from one or two seeds; empty for three and more."""
    if seeds >= ENOUGH_SEEDS:
        return ""
    return f" With {'one training' if seeds == 1 else 'two trainings'} each, this is about these models, not encodings."


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


_SENTENCES: dict[str, Callable[[Conclusion, str], str]] = {
    "best": _say_best,
    "tied": _say_tied,
    "cheaper": _say_cheaper,
    "position-irrelevant": _say_irrelevant,
    "nothing-learned": _say_nothing,
    "cannot-tell": _say_unknown,
}


# ---- rules


def rise(accuracies: Sequence[float]) -> float | None:
    """Compute the mean accuracy of the last fifth of epochs minus that of the fifth before; None below three epochs."""
    last = max(1, len(accuracies) // 5)
    if len(accuracies) < 2 * last + 1:
        return None
    return fmean(accuracies[-last:]) - fmean(accuracies[-2 * last : -last])


def can_show_learning(examples: int, names: int, chance: float) -> bool:
    """Return whether a model that is right on all examples is significantly above chance."""
    # The lower bound of its accuracy is (5 % / names)^(1 / examples).
    return bool((ERROR_RATE / names) ** (1 / examples) > chance)
