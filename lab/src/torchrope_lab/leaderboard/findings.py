"""Answer, notes and advice of a leaderboard, and all that its page shows, from its entry."""

from collections.abc import Sequence

from torchrope_lab.conclusion import BASELINE, NOT_DIFFERENT, join_names, one_seed, signed
from torchrope_lab.leaderboard.answers import Answers, Contrast, Ranking, rank
from torchrope_lab.leaderboard.entry import Condition, Entry
from torchrope_lab.leaderboard.tables import (
    RULE,
    edge_of,
    figure_of_costs,
    figure_of_gains,
    figure_of_ranks,
    rising,
    step_of,
    table_of_claims,
    table_of_conditions,
    table_of_data,
    table_of_gains,
    table_of_own_rates,
    table_of_ranks,
    table_of_sets,
)
from torchrope_lab.results import Advice, Findings
from torchrope_lab.studies.engine.estimates import points, verdict_of

_NOT_SHOWN = (
    "Not shown: models of millions of parameters, pre-training, and training on more than thousands of examples.",
    "Not shown: photographs. The data sets are time series, drawn or handwritten characters and synthetic clips.",
    "Not shown: settings tuned for each encoding. Only the learning rate was chosen, the same for all encodings of a "
    "set, on examples held out for it.",
)


def find(entry: Entry, own: Sequence[str] = ()) -> Findings:
    """Build the findings of an entry.

    Args:
        entry: The entry.
        own: Encodings that the user added to the entries of others; the answer is about these.
    """
    answers = Answers(entry.sets)
    ranking = rank(answers)
    added = [name for name in own if name in answers.names]
    data = [table_of_data(answers), table_of_sets(answers)]
    if ranking is None:
        none = "Fewer than two different encodings were trained on every data set, so that none can be ranked."
        said = answer_on_own(answers, None, added) if added else none
        return Findings(answer=said, tables=data, notes=notes_of(answers))
    names = list(dict.fromkeys([*ranking.order, *answers.names]))
    others = [name for name in names if name != BASELINE]
    tables = [
        table_of_ranks(answers, ranking),
        *data,
        table_of_conditions(answers, ranking.order),
        table_of_gains(answers, others),
        table_of_claims(answers),
        table_of_own_rates(answers),
    ]
    figures = [figure_of_ranks(ranking), figure_of_gains(answers, others), figure_of_costs(answers, ranking)]
    return Findings(
        answer=answer_on_own(answers, ranking, added) if added else answer(answers, ranking),
        tables=[table for table in tables if table.rows],
        figures=[figure for figure in figures if figure.rows],
        notes=[RULE, *order_notes(answers, ranking), *_NOT_SHOWN, *notes_of(answers)],
        advice=advice(answers, ranking),
    )


def answer(answers: Answers, ranking: Ranking) -> str:
    """Write the answer: how many encodings are not significantly different from the highest, and their gains."""
    best, tied, behind = ranking.best, ranking.tied, ranking.worse(ranking.best)
    one = one_seed(answers.seeds)
    over = f"over {len(ranking.sets)} data sets" if len(ranking.sets) > 1 else "on one data set"
    over = ", ".join(filter(None, [trained_for(answers), over]))
    over = f"{over[0].upper()}{over[1:]}"
    if not behind:
        return f"{over} the {len(tied)} encodings are {NOT_DIFFERENT} on average.{one}"
    if len(tied) == 1:
        lead = points(ranking.pairs[best, ranking.order[1]])
        ahead = f"{best} is significantly ahead of all others on average"
        return f"{over} {ahead}, {lead} over {ranking.order[1]}.{one}"
    gained = ""
    if BASELINE in behind:
        gains = sorted(ranking.pairs[name, BASELINE].estimate for name in tied)
        ends = dict.fromkeys(signed(gain, 0) for gain in (gains[0], gains[-1]))
        gained = f", {' to '.join(ends)} points over {BASELINE}"
    first = f"{over} {len(tied)} of {len(ranking.order)} encodings are {NOT_DIFFERENT} on average{gained}"
    return f"{first}; the order among them is unknown.{one}"


def trained_for(answers: Answers) -> str:
    """Return "after 5 to 24 epochs (200 of 232 curves still rise)"; empty if the options of a data set name none."""
    epochs = {results.epochs or 0 for results in answers.sets.values()}
    if 0 in epochs:
        return ""
    count = rising(answers.sets.values())
    still = f" ({count} curves still rise)" if count else ""
    return f"after {' to '.join(map(str, sorted({min(epochs), max(epochs)})))} epoch{'s' * (epochs != {1})}{still}"


def answer_on_own(answers: Answers, ranking: Ranking | None, added: Sequence[str]) -> str:
    """Write the answer about the first encoding that the user added: its gap in the ranking, or on its data sets."""
    name = added[0]
    others = f" (and {len(added) - 1} more)" if added[1:] else ""
    if ranking is not None and name in ranking.same:
        same = ranking.same[name]
        equal = f", the same function as {same}" if same != name else ""
        other = ranking.order[1] if same == ranking.best else ranking.best
        gap = ranking.pairs[same, other]
        verdict = verdict_of(gap, "significantly ahead of", "significantly behind", f"{NOT_DIFFERENT} from")
        place = "second" if same == ranking.best else "highest"
        return (
            f"{name}{others}{equal}: {ranking.means[same]:.1f} % on average over {len(ranking.sets)} data sets; "
            f"{len(ranking.better(same))} of {len(ranking.order) - 1} others are significantly better and "
            f"{len(ranking.worse(same))} worse. It is {verdict} {other}, the {place}: {points(gap)}."
        )
    measured = answers.on("trained", name)
    shown = "; ".join(_on_set(answers, each, name) for each in measured[:3])
    shown += f"; {len(measured) - 3} more in the tables" if measured[3:] else ""
    missing = [each for each in answers.sets if each not in measured]
    because = f"not on {join_names(missing)}" if missing else "no other encoding is on all data sets"
    where = f"{name}{others} on {len(measured)} of {len(answers.sets)} data sets, against the best of the others"
    return f"{where}: {shown}. No rank: {because}."


def _on_set(answers: Answers, data_set: str, name: str) -> str:
    """Compare an encoding with the best of the others on one data set."""
    means = {other: answers.mean(other, [data_set]) or 0.0 for other in answers.right[data_set, "trained"]}
    del means[name]
    if not means:
        return f"alone on {data_set}"
    best = max(means, key=lambda other: means[other])
    [gap] = answers.differences([Contrast(name, best, [data_set])])
    return f"{points(gap)} to {best} on {data_set}"


def advice(answers: Answers, ranking: Ranking) -> list[Advice]:
    """Recommend encodings: overall, cheapest, for larger inputs, for few examples, and for three axes."""
    three = [name for name, results in answers.sets.items() if len(results.data.axes) >= 3]
    rankings = {
        f"Any data: the mean of {len(ranking.sets)} data sets": ranking,
        "Inputs larger than in training": rank(answers, "largest"),
        "A share of the examples": rank(answers, "small"),
        "Three axes": rank(answers, sets=three),
    }
    cases = []
    for case, chosen in rankings.items():
        if chosen is not None:
            of = f"{len(chosen.tied)} of {len(chosen.order)} encodings are {NOT_DIFFERENT}; the order is unknown"
            ahead = f"significantly ahead of all {len(chosen.order) - 1} others"
            cases.append(Advice(case, chosen.tied, of if len(chosen.tied) > 1 else ahead))
    steps = {name: step for name in ranking.tied if (step := step_of(answers, name)) is not None}
    if len(steps) > 1:
        least = min(steps, key=lambda name: steps[name])
        because = f"{steps[least]:.2f} times the step of {BASELINE}, and {NOT_DIFFERENT} from {ranking.best}"
        cases.insert(1, Advice("The least cost", [least], because))
    return cases


def order_notes(answers: Answers, ranking: Ranking) -> list[str]:
    """Write what the order of the means depends on: the data sets, learning rates at an edge and of their own."""

    def order(names: Sequence[str], sets: Sequence[str], condition: Condition = "trained") -> list[str]:
        return sorted(names, key=lambda name: (-(answers.mean(name, sets, condition) or 0.0), name))

    notes = []
    moves = []
    for left_out in ranking.sets if len(ranking.sets) > 2 else ():
        without = order(ranking.order, [each for each in ranking.sets if each != left_out])
        moves += [
            (abs(without.index(name) - at), left_out, name, without.index(name) + 1, at + 1)
            for at, name in enumerate(ranking.order)
        ]
    if any(distance for distance, *_ in moves):
        _, left_out, name, now, before = max(moves)
        notes.append(f"The order depends on the data sets: without {left_out}, {name} is number {now}, not {before}.")
    edges = [f"{name} ({edge})" for name, results in answers.sets.items() if (edge := edge_of(results)) != "no"]
    if edges:
        rule = "a better one may lie outside"
        notes.append(f"The learning rate is at the edge of those tried on {', '.join(edges)}: {rule}.")
    tuned = [name for name in answers.names if answers.on("own", name) == [*answers.sets]]
    common, own = (", ".join(order(tuned, [*answers.sets], condition)) for condition in ("trained", "own"))
    if len(tuned) > 1:
        kept = f"With learning rates of their own the {len(tuned)} tuned encodings keep their order: {own}."
        changed = f"At the common learning rate the order is {common}; at rates of their own {own}."
        notes.append(kept if common == own else changed)
    return notes


def notes_of(answers: Answers) -> list[str]:
    """Write the notes: equal functions, number and time of training runs, provenance of each data set, omissions."""
    same: dict[str, list[str]] = {}
    for data_set, names in answers.same.items():
        for first in dict.fromkeys(names.values()):
            group = sorted(name for name in names if names[name] == first)
            if len(group) > 1:
                same.setdefault(", ".join(group), []).append(data_set)
    equal = [
        f"The same function on {join_names(where)}, with the same answers under every condition and the same losses: "
        f"{names}. They count once there."
        for names, where in same.items()
    ]
    sets = answers.sets.values()
    trainings, hours = sum(results.trainings for results in sets), sum(results.seconds for results in sets) / 3600
    trained = [f"{trainings:,} training runs took {hours:.1f} hours in total."] if trainings else []
    from_where = [
        f"{results.name}: {results.arguments}; rate × {results.rate:g}; {results.date}, "
        f"commit {results.commit or 'unknown'}, {results.machine.get('cpu', 'unknown processor')}."
        for results in sets
    ]
    return [*equal, *trained, *from_where, *(f"{results.name}: {note}" for results in sets for note in results.notes)]
