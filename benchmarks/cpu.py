"""Run all CPU benchmarks, compare them with their targets, and write benchmarks/results/cpu.json and docs/ on speed.

    python benchmarks/cpu.py --threads 2

Parity comes first: where a fast path differs from the float64 reference, the differences are printed, nothing is
measured, and the status is 1. Run it on a machine that does nothing else: it trains six ViT-S for a few steps each.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from parity_gate import ParityError
from render import DOCS, RESULTS, render
from suite import Plan, run_suite, standard_plan
from suite_results import write_results


def main() -> int:
    options = _options()
    command = shlex.join(["python", "benchmarks/cpu.py", *sys.argv[1:]])
    try:
        suite = run_suite(_plan(options), num_threads=options.threads, command=command)
    except ParityError as error:
        print(f"no numbers, {error}:", *error.failures, sep="\n", file=sys.stderr)
        return 1
    write_results(options.out, suite)
    render(options.out, options.docs)
    print(f"{options.out} and {options.docs / 'speed.md'}")
    return 0


def _options() -> argparse.Namespace:
    plan = standard_plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=plan.rounds, help=f"rounds of layer steps (default: {plan.rounds})"
    )
    parser.add_argument(
        "--growth-rounds", type=int, default=plan.growth_rounds, help="rounds per size of the scaling measurements"
    )
    parser.add_argument("--training-rounds", type=int, default=plan.training.rounds, help="rounds of training steps")
    parser.add_argument("--training-batch", type=int, default=plan.training.batch, help="batch size of training steps")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of speed.md and results/speed.md")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> Plan:
    plan = standard_plan()
    training = replace(plan.training, rounds=options.training_rounds, batch=options.training_batch)
    return replace(plan, rounds=options.rounds, growth_rounds=options.growth_rounds, training=training)


if __name__ == "__main__":
    sys.exit(main())
