"""What `--dry-run` prints instead of training: the runs, the estimated minutes, and warnings."""

from collections.abc import Iterator, Sequence
from math import ceil, sqrt
from typing import TYPE_CHECKING

import torch

from torchrope_lab.conclusion import ENOUGH_SEEDS
from torchrope_lab.engine.runs import Job
from torchrope_lab.engine.study_progress import StudyProgress, Workload
from torchrope_lab.training.cost import training_step
from torchrope_lab.training.models import build_for_costs
from torchrope_lab.training.progress import Part
from torchrope_lab.training.timing import interleaved_seconds
from torchrope_lab.training.watch import BACKWARD_AND_FORWARD

if TYPE_CHECKING:
    from torchrope_lab.engine.study import Lab

EXAMPLES = 1000
"""Number of validation examples below which there is a warning."""


class NotTrained(Exception):
    """Raised by `Lab.train` in place of training."""


def print_plan(lab: "Lab", jobs: Sequence[Job], unfinished: Sequence[Job], work: Workload, further: bool) -> None:
    """Print runs with what is finished, the minutes that the others will take, and warnings."""
    for job in jobs:
        done, epochs = lab.store.epochs(job.run), job.run.config.optim.epochs
        begun = f"{done} of {epochs} epochs done" if done < epochs else "trained, to be measured"
        lab.console.print(f"{job.run} ({job.run.key}): {begun if job in unfinished else 'finished'}", highlight=False)
    seconds = _seconds_left(lab, jobs, unfinished, work)
    minutes = "time unknown" if seconds is None else f"about {ceil(seconds / 60)} minutes {work.left}"
    lab.console.print(f"runs to train or measure: {len(unfinished)} of {len(jobs)}, {minutes}", highlight=False)
    if further and unfinished:
        lab.console.print("further runs follow these and are not estimated", highlight=False)
    for warning in _warnings(lab):
        lab.console.print(f"warning: {warning}", highlight=False, soft_wrap=True)


def _seconds_left(lab: "Lab", jobs: Sequence[Job], unfinished: Sequence[Job], work: Workload) -> float | None:
    """Estimate the time from earlier epochs, or a few steps of each kind of run; None on a cluster, for dense tasks."""
    if not unfinished:
        return 0.0
    begun = [(job.run, lab.store.epochs(job.run)) for job in unfinished]
    progress = StudyProgress(begun, len(jobs) - len(unfinished), work, lab.console)
    for job in jobs:
        for row in lab.store.curve(job.run):
            progress.epochs.setdefault(job.run.kind, Part()).add(work.epoch, row["seconds"])
    if progress.seconds_left() is None and not lab.config.slurm and lab.config.model.task == "classify":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        inputs, labels, *_ = next(iter(lab.data.train_dataloader()))
        for run in {run.kind: run for run, _ in begun}.values():
            model = build_for_costs(run.encoding, run.config.model, lab.data).to(device)
            step = training_step(model, inputs.to(device), labels.to(device), lab.config.run.precision)
            [seconds] = interleaved_seconds({"step": step}, rounds=1, device=device)["step"]
            progress.epochs[run.kind].add(BACKWARD_AND_FORWARD * len(labels), seconds)
    return progress.seconds_left()


def _warnings(lab: "Lab") -> Iterator[str]:
    yield from lab.left_out
    if len(lab.seeds) < ENOUGH_SEEDS:
        yield f"--seeds {len(lab.seeds)}: verdicts are provisional below {ENOUGH_SEEDS} seeds"
    examples = lab.data.counts[1]
    if examples < EXAMPLES:
        points = 100 * 1.96 * sqrt(0.25 / examples)
        yield f"{examples} validation examples: intervals of an accuracy reach up to ± {points:.1f} points"
