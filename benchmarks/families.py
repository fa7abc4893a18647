"""Check `swap` and `unswap` for every supported model family:  python benchmarks/families.py

Models are small with random weights large enough for outputs to depend on the rotation. Reported, relative to the
largest output: the change after `swap(model, "mixed", init="zeros")`, which removes the rotation, and after
`swap(model, "mixed")`, which keeps it; and whether `unswap` restores the outputs bit for bit.
"""

import copy
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import rotating
from every_family import Family, every_family

import torchrope as tr

BOUND = 2e-5
"""Largest difference where the rotation is continued, on any processor: 3.2e-6 was measured with AVX2, 8.7e-6 with
AVX-512."""


def main() -> int:
    torch.manual_seed(0)
    worst, all_same = 0.0, True
    print(f"{'library':<20}{'family':<22}{'left out':>10}{'continued':>12}  unswapped")
    for family in every_family():
        left_out, continued, same = measure(family)
        worst, all_same = max(worst, continued), all_same and same
        same_word = "bit-equal" if same else "NOT equal"
        print(f"{family.library:<20}{family.name:<22}{left_out:>9.1%}{continued:>12.1e}  {same_word}", flush=True)
    print(f"largest difference where the rotation is continued: {worst:.1e}, must be below {BOUND:.0e}")
    return 0 if worst < BOUND and all_same else 1


@torch.no_grad()
def measure(family: Family) -> tuple[float, float, bool]:
    """Measure the output change without and with the rotation, and whether `unswap` is exact."""
    model = family.build()
    given = family.inputs(model)[0]
    expected = family.call(model, given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        without = tr.swap(copy.deepcopy(model), "mixed", init="zeros")
    left_out = rotating.error(family.call(without, given), expected)
    continued = rotating.error(family.call(tr.swap(model, "mixed"), given), expected)
    return left_out, continued, torch.equal(family.call(tr.unswap(model), given), expected)


if __name__ == "__main__":
    sys.exit(main())
