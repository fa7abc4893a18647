"""Classification accuracy and loss of each encoding (LieRE tables 1, 2 and 6; ComRoPE table 3)."""

from torchrope_lab.results import Findings
from torchrope_lab.studies.engine.comparison import accuracy_figures, advice_from, compare_runs, main_table, notes_on
from torchrope_lab.studies.engine.reference import (
    AHEAD_OF_MIXED,
    WITH_SAME,
    all_but,
    check_reference,
    described,
    difference_tables,
    differences_from,
    mixed_counterparts,
    mixed_notes,
)
from torchrope_lab.studies.engine.study import Lab


def find(lab: Lab) -> Findings:
    """Train every encoding with every seed and rank them."""
    reference = lab.reference
    if reference:
        check_reference(lab, reference)
    names = list(dict.fromkeys([*lab.encodings, *([reference] if reference else [])]))
    comparison = compare_runs(lab.train(lab.runs(names)))
    rights = comparison.rights
    over_mixed = differences_from(
        rights, {name: other for name, other in mixed_counterparts(rights).items() if other != reference}
    )
    ahead = differences_from(rights, all_but(reference, rights)) if reference else {}
    case = f"Classification over {' × '.join(lab.data.axes)}, at the training size"
    return Findings(
        answer=comparison.conclusion.sentence(),
        tables=[
            main_table(comparison, "Top-1 and loss"),
            *difference_tables(f"Ahead of {described(reference or '')}", ahead),
            *difference_tables(AHEAD_OF_MIXED, over_mixed, WITH_SAME),
        ],
        figures=accuracy_figures(comparison),
        notes=[*notes_on(comparison, lab.data.classes), *mixed_notes(over_mixed.values())],
        advice=advice_from(comparison, case, f" on {lab.data.title}"),
    )
