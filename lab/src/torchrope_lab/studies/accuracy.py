"""Classification accuracy and loss of each encoding (LieRE tables 1, 2 and 6; ComRoPE table 3)."""

from dataclasses import replace

from torchrope_lab.engine.comparison import accuracy_figures, compare_runs, main_table
from torchrope_lab.engine.grid import AgainstMixed, OneFactor, Results, Section
from torchrope_lab.engine.long_table import Cell
from torchrope_lab.engine.reference import described, with_reference


def _ranked(results: Results) -> Section:
    """Rank the encodings, and compare them with --reference and RoPE-Mixed."""
    reference = results.reference
    comparison = compare_runs([run for runs in results.runs.values() for run in runs])
    ordered = replace(results, runs={Cell(name): runs for name, runs in comparison.groups.items()})
    ahead = ordered.top1.changes(ordered.against(reference)) if reference else {}
    return Section(
        answer=comparison.conclusion.sentence(),
        tables=[
            main_table(comparison, "Top-1 and loss"),
            ordered.change_table(f"Ahead of {described(reference)}", ahead, "Ahead"),
            *AgainstMixed()(ordered).tables,
        ],
        figures=accuracy_figures(comparison),
    )


find = OneFactor(sections=[_ranked], arms=with_reference)
