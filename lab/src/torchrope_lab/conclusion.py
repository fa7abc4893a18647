"""Conclusion of a comparison of encodings: its kind, its numbers, its sentence, and its JSON form.

`torchrope_lab.statistics.conclude` computes conclusions; its docstring gives the rules.
"""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["best", "tied", "cheaper", "position-irrelevant", "nothing-learned", "cannot-tell"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BASELINE = "none"
"""The name of the model without positions."""
NOT_DIFFERENT = "not significantly different"
"""The verdict on encodings that are tied."""
ERROR_RATE = 0.05
"""Bound on the error rate: family-wise over all claims "behind" of one conclusion, and of each other claim."""


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
        behind: The encoding with the lowest accuracy, whose answers and those of the best tell how much they vary.
        examples: Additional validation examples, with the same number of seeds; None if no number is enough.
        seeds: Additional seeds, on the same examples; None if 100 are not enough, or this run has one seed.
    """

    gap: float
    behind: str
    examples: int | None
    seeds: int | None


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
        gaps: Accuracy of the best minus that of each other name, with an interval that excludes 0 if and only if that
            name is behind. Its level is that of the last test of Holm's procedure, 95 % or more; the intervals are not
            simultaneous ones.
        detectable: The smallest gap to the best that this run shows with a power of 80 %, the median over the tied, or
            over all if none is tied; None if it shows no gap.
        needed: For "cannot-tell", the sample size with which a run shows a gap worth having; None if this run does.
        examples: Number of validation examples.
        seeds: Training runs per encoding.
        chance: Accuracy of the best constant prediction.
        margin: Differences within it count as irrelevant.

    Raises:
        ValueError: a value is of another type or kind, or contradicts another.
    """

    kind: Kind
    best: str | None
    tied: tuple[str, ...]
    behind: tuple[str, ...]
    cheapest: str | None
    intervals: dict[str, tuple[float, float]]
    gains: dict[str, Interval]
    gaps: dict[str, Interval]
    detectable: float | None
    needed: Needed | None
    examples: int
    seeds: int
    chance: float
    margin: float

    def __post_init__(self) -> None:
        _check(self)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary that `from_dict` reads and JSON can represent."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Any) -> "Conclusion":
        """Build a conclusion from the dictionary that `as_dict` returned.

        Raises:
            ValueError: an entry is missing, unknown, or of the wrong type; in one line.
        """
        given = _entries(values, "conclusion", [field.name for field in fields(cls)])
        intervals = _mapping(given["intervals"], "intervals")
        needed = given["needed"]
        if needed is not None:
            needed = Needed(**_entries(needed, "needed", [field.name for field in fields(Needed)]))
        return cls(
            **given
            | {
                "tied": _names(given["tied"], "tied"),
                "behind": _names(given["behind"], "behind"),
                "intervals": {name: _numbers(pair, 2, f"intervals of {name!r}") for name, pair in intervals.items()},
                "gains": _read_intervals(given["gains"], "gains"),
                "gaps": _read_intervals(given["gaps"], "gaps"),
                "needed": needed,
            }
        )

    def sentence(self, curves: "Curves | None" = None, balanced: float | None = None) -> str:
        """Describe the conclusion in at most two sentences and 60 words, if names are single words.

        With one seed the sentence is about the trained models, not about encodings.

        Args:
            curves: How many accuracies still rise at the end of training, and after how many epochs.
            balanced: Mean over classes of the accuracy of the best, for classes of unequal size.
        """
        said = _SENTENCES[self.kind](self, _gain(self, balanced))
        compared = self.kind != "nothing-learned" and can_show_learning(self.examples, len(self.intervals), self.chance)
        where = _where(self.seeds, curves) if compared and len(self.intervals) > 1 else ""
        if where:
            return f"{where}, {said}"
        return f"{said[0].upper()}{said[1:]}" if self.kind in ("position-irrelevant", "cannot-tell") else said


class Curves(NamedTuple):
    """How many of the learning curves of a comparison still rise when training ends."""

    rising: int
    compared: int
    epochs: int


# ---- sentences


def _where(seeds: int, curves: Curves | None) -> str:
    """Say which trainings a sentence is about: one of each encoding, or the first epochs; empty without limits."""
    rising = f" ({curves.rising} of {curves.compared} curves still rise)" if curves and curves.rising else ""
    if seeds == 1:
        return f"In this training{f' of {curves.epochs} epochs{rising}' if curves and rising else ''}"
    return f"In the first {curves.epochs} epochs{rising}" if curves and rising else ""


def _say_best(it: Conclusion, gain: str) -> str:
    next_one = it.behind[0]
    ahead = f"by {_interval(it.gaps[next_one])} over {next_one}"
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
        return "A single encoding cannot be compared."
    if not can_show_learning(it.examples, len(it.intervals), it.chance):
        return (
            f"this run cannot tell whether anything was learned: with {_count(it.examples, 'example')}, even an "
            "accuracy of 100 % is not significantly better than always predicting the most frequent class "
            f"({100 * it.chance:.1f} %)."
        )
    compared = "these models" if it.seeds == 1 else "the encodings"
    return f"{compared} are {NOT_DIFFERENT}: with {_limits(it, '')}{gain}.{_need(it)}"


def _limits(it: Conclusion, between: str = " between these models") -> str:
    runs = f"{_count(it.examples, 'example')}{'' if it.seeds == 1 else f' and {it.seeds} seeds'}"
    unseen = "any difference" if it.detectable is None else f"differences below {_points(it.detectable)}"
    return f"{runs}, {unseen}{between if it.seeds == 1 else ''} may go unnoticed"


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


def _gain(it: Conclusion, balanced: float | None) -> str:
    """Format the lead of the best over "none" and its balanced accuracy; empty without both."""
    gap = it.gaps.get(BASELINE)
    share = "" if balanced is None else f"balanced accuracy {100 * balanced:.1f} %"
    if gap is None:
        return f"; {it.best} has a {share}" if it.best and share else ""
    visible = f"{it.best} gains {_interval(gap)} over none"
    if it.kind == "cannot-tell":
        visible = f"no gain of {it.best} over none is visible, {_interval(gap)}"
    return f"; {visible}{f' ({share})' if share else ''}"


def one_seed(seeds: int) -> str:
    """Return the caveat that ends an answer from one seed; empty for several seeds."""
    return " With one training each, this is about these models, not encodings." if seeds == 1 else ""


def _interval(shares: Interval) -> str:
    estimate, low, high = (signed(100 * each) for each in shares)
    return f"{estimate} points [{low}, {high}]"


def signed(value: float, digits: int = 1) -> str:
    """Format a number with a minus sign as in the tables: −6.6."""
    return f"{value:.{digits}f}".replace("-", "−")


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


# ---- a conclusion as a dictionary


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _entries(values: Any, what: str, names: Sequence[str]) -> dict[str, Any]:
    given = _mapping(values, what)
    if set(given) != set(names):
        odd = sorted(set(given) ^ set(names))
        raise ValueError(f"{what} must have the entries {', '.join(names)}, got missing or unknown {short(odd)}")
    return given


def _mapping(values: Any, what: str) -> dict[str, Any]:
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{what} must be a mapping of names, got {short(values)}")
    return values


def _names(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{what} must be a list of names, got {short(values)}")
    return tuple(values)


def _numbers(values: Any, count: int, what: str) -> Any:
    if not isinstance(values, list | tuple) or len(values) != count:
        raise ValueError(f"{what} must be {count} numbers, got {short(values)}")
    return tuple(values)


def _read_intervals(values: Any, what: str) -> dict[str, Interval]:
    return {name: Interval(*_numbers(each, 3, f"{what} of {name!r}")) for name, each in _mapping(values, what).items()}


def _check(it: Conclusion) -> None:
    def require(holds: bool, rule: str, got: Any) -> None:
        if not holds:
            raise ValueError(f"{rule}, got {short(got)}")

    require(isinstance(it.kind, str) and it.kind in KINDS, f"kind must be one of {', '.join(KINDS)}", it.kind)
    _mapping(it.intervals, "intervals")
    for name, ends in it.intervals.items():
        ordered = all(map(is_number, _numbers(ends, 2, f"intervals of {name!r}"))) and 0 <= ends[0] <= ends[1] <= 1
        require(ordered, f"intervals of {name!r} must be two numbers from 0 to 1, the lower first", ends)
    for what in ("gains", "gaps"):
        differences = _mapping(getattr(it, what), what)
        for name, each in differences.items():
            require(name in it.intervals, f"{what} must be of names that have intervals", name)
            low_first = all(map(is_number, each)) and -1 <= each[1] <= each[2] <= 1 and -1 <= each[0] <= 1
            require(low_first, f"{what} of {name!r} must be an estimate and the ends, from -1 to 1", each)
    for what in ("best", "cheapest"):
        name = getattr(it, what)
        require(name is None or isinstance(name, str), f"{what} must be a name or None", name)
    named = ([] if it.best is None else [it.best]) + [*_names(it.tied, "tied"), *_names(it.behind, "behind")]
    require(sorted(named) == sorted(it.intervals), "best, tied and behind must be the names of intervals", named)
    for what in ("examples", "seeds"):
        count = getattr(it, what)
        require(_is_count(count) and count > 0, f"{what} must be a whole number above 0", count)
    share(it.chance, "chance")
    share(it.margin, "margin")
    require(
        it.detectable is None or (is_number(it.detectable) and 0 < it.detectable <= 1),
        "detectable must be None or above 0 and at most 1",
        it.detectable,
    )
    if it.needed is not None:
        need = it.needed
        require(isinstance(need, Needed), "needed must be None or an instance of Needed", need)
        require(is_number(need.gap) and 0 < need.gap <= 1, "gap must be above 0 and at most 1", need.gap)
        require(isinstance(need.behind, str) and need.behind in it.intervals, "behind must be a name", need.behind)
        for what in ("examples", "seeds"):
            count = getattr(need, what)
            require(count is None or (_is_count(count) and count > 0), f"{what} must be None or above 0", count)
    require(
        _CONSISTENT[it.kind](it),
        f"best, tied, behind, cheapest, gains and gaps must fit the kind {it.kind}",
        (it.best, it.tied, it.behind, it.cheapest),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _has_gaps(it: Conclusion) -> bool:
    return it.best is not None and set(it.gaps) == set(it.intervals) - {it.best} and it.cheapest is None


_CONSISTENT: dict[str, Callable[[Conclusion], bool]] = {  # conditions on the fields of each kind
    "best": lambda it: _has_gaps(it) and bool(it.behind) and not it.tied,
    "tied": lambda it: _has_gaps(it) and bool(it.tied),
    "cheaper": lambda it: (
        it.cheapest is not None
        and it.cheapest in (it.best, *it.tied)
        and bool(it.tied)
        and set(it.gaps) == set(it.intervals) - {it.best}
    ),
    "position-irrelevant": lambda it: _has_gaps(it) and bool(it.gains) and BASELINE in it.intervals,
    "nothing-learned": lambda it: it.best is None and not it.behind and it.cheapest is None and not it.gaps,
    "cannot-tell": lambda it: _has_gaps(it) and not it.behind,
}


# ---- rules


def rise(accuracies: Sequence[float]) -> float | None:
    """Compute by how much accuracy rose at the end of training: the mean of the last fifth of epochs minus that of the
    fifth before; None for fewer than three epochs.

    Example:
        >>> rise([0.2, 0.4, 0.6, 0.7, 0.9]).__round__(3)
        0.2
    """
    last = max(1, len(accuracies) // 5)
    if len(accuracies) < 2 * last + 1:
        return None
    return fmean(accuracies[-last:]) - fmean(accuracies[-2 * last : -last])


def can_show_learning(examples: int, names: int, chance: float) -> bool:
    """Return whether a model that is right on all examples is significantly above chance.

    The lower bound of its accuracy is (5 % / names)^(1 / examples).
    """
    return bool((ERROR_RATE / names) ** (1 / examples) > chance)


def share(value: Any, what: str) -> float:
    """Return a number from 0 to 1, or raise a ValueError that begins with `what`."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{what} must be a number from 0 to 1, got {short(value)}")
    return float(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number; booleans are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def short(value: Any) -> str:
    """Format a value for an error message: one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
