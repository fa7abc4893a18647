"""Check `swap` and `unswap` for every supported model family:  python benchmarks/families.py

Models are small with random weights large enough for outputs to depend on the rotation. Reported, relative to the
largest output: the change after `swap(model, "mixed", init="zeros")`, which removes the rotation, and after
`swap(model, "mixed")`, which keeps it; and whether `unswap` restores the outputs bit for bit.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import diffusing
import rotating
import swapped

import torchrope as tr

Call = Callable[[Any], Tensor]
BOUND = 2e-5
"""Largest difference where the rotation is continued, on any processor: 3.2e-6 was measured with AVX2, 8.7e-6 with
AVX-512."""


@dataclass(frozen=True)
class Family:
    """A model of a library and how it is called."""

    library: str
    name: str
    model: Any
    call: Call


def timms() -> Iterator[Family]:
    for name in swapped.ROTATING:
        model = swapped.strong(name)
        x = swapped.images(model)
        yield Family("timm", name, model, lambda model, x=x: model(x))


def towers() -> Iterator[Family]:
    for name in (*rotating.SHARED, *rotating.IMAGE_TOWERS):
        model, images = rotating.tower(name)
        yield Family("transformers", name, model, lambda model, images=images: rotating.outputs(model, images))
    x = {"pixel_values": torch.randn(2, 3, 32, 32)}
    yield Family("transformers", "dinov3_vit", rotating.dinov3(), lambda model: rotating.outputs(model, x))


def decoders() -> Iterator[Family]:
    words = rotating.tokens()
    for name in rotating.DECODERS:
        yield Family("transformers, text", name, rotating.decoder(name), lambda model: model(words).logits)


def diffusers() -> Iterator[Family]:
    for name in diffusing.CASES:
        given = diffusing.inputs(name)
        yield Family(
            "diffusers", name, diffusing.built(name), lambda model, given=given: diffusing.output(model, given)
        )


def main() -> int:
    torch.manual_seed(0)
    worst, all_same = 0.0, True
    print(f"{'library':<20}{'family':<22}{'left out':>10}{'continued':>12}  unswapped")
    for families in (timms, towers, decoders, diffusers):
        for family in families():
            left_out, continued, same = measure(family)
            worst, all_same = max(worst, continued), all_same and same
            same_word = "bit-equal" if same else "NOT equal"
            print(f"{family.library:<20}{family.name:<22}{left_out:>9.1%}{continued:>12.1e}  {same_word}", flush=True)
    print(f"largest difference where the rotation is continued: {worst:.1e}, must be below {BOUND:.0e}")
    return 0 if worst < BOUND and all_same else 1


@torch.no_grad()
def measure(family: Family) -> tuple[float, float, bool]:
    """Measure the output change without and with the rotation, and whether `unswap` is exact."""
    expected = family.call(family.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        without = tr.swap(copy.deepcopy(family.model), "mixed", init="zeros")
    left_out = rotating.error(family.call(without), expected)
    model = tr.swap(family.model, "mixed")
    continued = rotating.error(family.call(model), expected)
    return left_out, continued, torch.equal(family.call(tr.unswap(model)), expected)


if __name__ == "__main__":
    sys.exit(main())
