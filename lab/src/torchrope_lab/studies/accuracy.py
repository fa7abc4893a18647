"""Classification accuracy and loss of each encoding (LieRE tables 1, 2 and 6; ComRoPE table 3)."""

from dataclasses import replace

from torchrope_lab.engine.comparison import accuracy_figures, compare_runs, main_table
from torchrope_lab.engine.grid import ONLY, AgainstMixed, OneFactor, Results, Section, leads
from torchrope_lab.engine.reference import all_but, described, with_reference


def _ranked(results: Results) -> Section:
    """Rank the encodings, and compare them with --reference and RoPE-Mixed."""
    reference = results.reference
    comparison = compare_runs([run for cell in results.cells for run in cell.runs])
    ordered = replace(results, grid={name: {ONLY: list(runs)} for name, runs in comparison.groups.items()})
    ahead = leads(ordered, all_but(reference, ordered.grid)) if reference else {}
    return Section(
        answer=comparison.conclusion.sentence(),
        tables=[
            main_table(comparison, "Top-1 and loss"),
            *ordered.change_table(f"Ahead of {described(reference)}", ahead, "Ahead"),
            *AgainstMixed()(ordered).tables,
        ],
        figures=accuracy_figures(comparison),
    )


find = OneFactor(sections=[_ranked], arms=with_reference)
