"""Answer of a leaderboard, and all that its page shows, from its entry."""

from collections.abc import Callable, Sequence

from torchrope_lab.conclusion import join_names, one_seed
from torchrope_lab.leaderboard.answers import DIFFERENT, Answers, Comparison, compare_on, compare_over
from torchrope_lab.leaderboard.entry import DataSetResults, Entry
from torchrope_lab.leaderboard.tables import (
    figure_of_gaps,
    limits_of_tuning,
    table_of_claims,
    table_of_data,
    table_of_means,
    table_of_predictions,
    table_of_set,
    table_of_training,
)
from torchrope_lab.results import Findings
from torchrope_lab.studies.engine.estimates import points


def find(entry: Entry, own: Sequence[str] = ()) -> Findings:
    """Build the findings of an entry.

    Args:
        entry: The entry.
        own: Encodings that the user added to the entries of others; the answer is about these.
    """
    answers = Answers(entry.sets)
    on_sets = {name: compare_on(answers, name) for name in answers.sets}
    over = compare_over(answers)
    added = [name for name in own if name in answers.names]
    tables = [
        *(table_of_set(answers, comparison, name) for name, comparison in on_sets.items()),
        *([table_of_means(over, len(answers.sets))] if over else []),
        table_of_predictions(answers),
        table_of_claims(answers),
        table_of_training(answers),
        table_of_data(answers),
    ]
    figures = [figure_of_gaps(answers, [*on_sets.values()])]
    return Findings(
        answer=_about_own(added, answers, on_sets) if added else _answer(answers, on_sets, over),
        tables=[table for table in tables if table.rows],
        figures=[figure for figure in figures if figure.rows],
    )


def cost_of(sets: Sequence[DataSetResults]) -> str:
    """Say how many trainings there were and what they cost; empty if it is unknown."""
    trainings, hours = sum(results.trainings for results in sets), sum(results.core_seconds for results in sets) / 3600
    return f"{trainings:,} trainings took {hours:.1f} core-hours." if trainings else ""


def _answer(answers: Answers, on_sets: dict[str, Comparison], over: Comparison | None) -> str:
    """Say which encodings are not behind on any data set, which are behind on all, and what holds over sets."""
    count, end = len(on_sets), one_seed(answers.seeds)
    limits = limits_of_tuning(answers)
    never = _named(on_sets, lambda comparison, name: name in comparison.tied)
    always = _named(on_sets, lambda comparison, name: name not in comparison.tied)
    on = f"on all {count} data sets" if count > 1 else "on one data set"
    said = f"in the highest group {on}: {join_names(never) if never else 'none of the encodings'}"
    behind = f"; behind it {on}: {join_names(always)}" if always else ""
    mean = ""
    if over is not None:
        differ = sum(compared.verdict == DIFFERENT for compared in over.pairs.values())
        mean = f" With data sets as a random sample, {differ} of {len(over.pairs)} pairs differ on average."
    return f"{limits[0].upper()}{limits[1:]}; {said}{behind}.{mean}{end}"


def _named(on_sets: dict[str, Comparison], holds: Callable[[Comparison, str], bool]) -> list[str]:
    """Return the encodings of which something holds on all sets; one of those that are the same function on all."""
    together = set.intersection(*({name for name in c.same if holds(c, c.same[name])} for c in on_sets.values()))
    first = next(iter(on_sets.values()))
    ordered = sorted(together, key=lambda name: (first.order.index(first.same[name]), name != first.same[name], name))
    functions = {tuple(c.same[name] for c in on_sets.values()): name for name in reversed(ordered)}
    return [name for name in ordered if name in functions.values()]


def _about_own(added: Sequence[str], answers: Answers, on_sets: dict[str, Comparison]) -> str:
    """Compare the first encoding that the user added with the highest of the others on each data set."""
    name = added[0]
    others = f" (and {len(added) - 1} more)" if added[1:] else ""
    measured = {at: comparison for at, comparison in on_sets.items() if name in comparison.same}
    shown = [_against_best(comparison, name, at) for at, comparison in measured.items()]
    more = f"; {len(shown) - 3} more in the tables" if shown[3:] else ""
    where = f"{name}{others} on {len(measured)} of {len(on_sets)} data sets, against the highest of the others"
    return f"{where}: {'; '.join(shown[:3])}{more}.{one_seed(answers.seeds)}"


def _against_best(comparison: Comparison, name: str, data_set: str) -> str:
    same = comparison.same[name]
    rest = [other for other in comparison.order if other != same]
    if not rest:
        return f"alone on {data_set}"
    compared = comparison.between(same, rest[0])
    return f"{compared.verdict}, {points(compared.gap)} to {rest[0]} on {data_set}"
