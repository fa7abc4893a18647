"""Encodings by name: "axial", "liere:8", "learned+mixed", "bias+mixed"."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchrope.encodings.absolute import AbsoluteEncoding, LearnedAPE, SinusoidalAPE
from torchrope.encodings.axial import AxialRoPE
from torchrope.encodings.base import Encoding
from torchrope.encodings.bias import RelativePositionBias
from torchrope.encodings.comrope import ComRoPEAP, ComRoPELD
from torchrope.encodings.dinov3 import DINOv3RoPE
from torchrope.encodings.golden import GoldenGateRoPE
from torchrope.encodings.liere import LieRE
from torchrope.encodings.mixed import MixedRoPE
from torchrope.encodings.mrope import InterleavedMRoPE, MRoPE
from torchrope.encodings.none import NoEncoding
from torchrope.encodings.string import STRING

ROTARY: dict[str, type[Encoding]] = {
    "none": NoEncoding,
    "axial": AxialRoPE,
    "mixed": MixedRoPE,
    "liere": LieRE,
    "comrope-ap": ComRoPEAP,
    "comrope-ld": ComRoPELD,
    "string": STRING,
    "golden": GoldenGateRoPE,
    "dinov3": DINOv3RoPE,
    "mrope": MRoPE,
    "mrope-interleaved": InterleavedMRoPE,
}
ABSOLUTE: dict[str, type[AbsoluteEncoding]] = {"learned": LearnedAPE, "sinusoidal": SinusoidalAPE}
BIAS: dict[str, type[RelativePositionBias]] = {"bias": RelativePositionBias}
WITH_BLOCKS = ("liere", "comrope-ap", "comrope-ld", "string")


@dataclass(frozen=True)
class Choice:
    """What a name stands for: a rotary encoding, an absolute one, a bias, or several of them.

    Attributes:
        name: The name as written, such as "learned+liere:8".
        rotary: Builds the rotary encoding from num_axes, num_heads, head_dim; `NoEncoding` where none was named.
        absolute: Builds the absolute encoding from sizes and dim, or None.
        bias: Builds the bias of the scores from sizes and num_heads, or None.
    """

    name: str
    rotary: Callable[..., Encoding]
    absolute: Callable[..., AbsoluteEncoding] | None = None
    bias: Callable[..., RelativePositionBias] | None = None

    @property
    def parts(self) -> list[type[Encoding] | type[AbsoluteEncoding] | type[RelativePositionBias]]:
        """The named classes: absolute, bias, rotary."""
        rotary: Any = self.rotary.func if isinstance(self.rotary, partial) else self.rotary
        parts: list[Any] = [part for part in (self.absolute, self.bias) if part is not None]
        return parts if parts and rotary is NoEncoding else [*parts, rotary]


def choose(name: str) -> Choice:
    """Find encodings by name: one name, `name:block_size`, or an absolute one, "bias" and a rotary one joined by `+`.

    Raises:
        ValueError: an unknown name (the nearest one is suggested), a bad block size, or two of a kind.

    Example:
        >>> choose("learned+liere:8").rotary(num_axes=2, num_heads=4, head_dim=16)
        LieRE(num_axes=2, num_heads=4, head_dim=16, block_size=8)
    """
    absolute, bias, rotary = [], [], []
    for part in name.split("+"):
        base, _, block = part.strip().partition(":")
        if base in ABSOLUTE and not block:
            absolute.append(ABSOLUTE[base])
        elif base in BIAS and not block:
            bias.append(BIAS[base])
        elif base in ROTARY:
            rotary.append(_with_block_size(base, block))
        else:
            raise ValueError(_unknown(part.strip()))
    if max(len(absolute), len(bias), len(rotary)) > 1:
        rule = "at most one absolute and one rotary name and 'bias' once"
        raise ValueError(f"an encoding is {rule}, joined by '+', got {name!r}")
    return Choice(
        name,
        rotary[0] if rotary else NoEncoding,
        absolute[0] if absolute else None,
        bias[0] if bias else None,
    )


def _with_block_size(name: str, block: str) -> Callable[..., Encoding]:
    if not block:
        return ROTARY[name]
    if name not in WITH_BLOCKS:
        raise ValueError(f"only {', '.join(WITH_BLOCKS)} take a block size, got '{name}:{block}'")
    if not block.isdecimal() or int(block) < 2 or block != str(int(block)):
        raise ValueError(f"block size must be a whole number of 2 or more, got '{name}:{block}'")
    return partial(ROTARY[name], block_size=int(block))


def _unknown(part: str) -> str:
    known = [*ROTARY, *ABSOLUTE, *BIAS]
    near = difflib.get_close_matches(part.partition(":")[0].lower(), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"encodings are {', '.join(known)}, got {part!r}{hint}"
