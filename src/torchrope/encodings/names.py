"""Encodings by name: "axial", "liere:8", "learned+mixed", "bias+mixed"."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchrope.encodings.absolute import AbsoluteEncoding, JitteredAPE, LearnedAPE, SinusoidalAPE
from torchrope.encodings.axial import AxialRoPE
from torchrope.encodings.base import Encoding
from torchrope.encodings.bias import RelativePositionBias, ScoreBias
from torchrope.encodings.comrope import ComRoPEAP, ComRoPELD
from torchrope.encodings.comrope_baselines import NormalLieRE, VanillaRoPE
from torchrope.encodings.dinov3 import DINOv3RoPE
from torchrope.encodings.directional import DRoPE
from torchrope.encodings.expanding import ExpandingEncoding
from torchrope.encodings.golden import GoldenGateRoPE
from torchrope.encodings.harope import HARoPE
from torchrope.encodings.liere import LieRE
from torchrope.encodings.lookhere import LookHere
from torchrope.encodings.mixed import MixedRoPE
from torchrope.encodings.mrope import InterleavedMRoPE, MRoPE, MultiHeadRoPE, VideoRoPE
from torchrope.encodings.none import NoEncoding
from torchrope.encodings.pape import PaPE, PaPERI
from torchrope.encodings.simplex import SimplexRoPE
from torchrope.encodings.sphere import SphereHarmonics
from torchrope.encodings.spiral import SpiralRoPE
from torchrope.encodings.string import STRING
from torchrope.encodings.visionllama import VisionLLaMARoPE

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
    "mhrope": MultiHeadRoPE,
    "videorope": VideoRoPE,
    "nd": SimplexRoPE,
    "spiral": SpiralRoPE,
    "drope": DRoPE,
    "visionllama": VisionLLaMARoPE,
    "comrope-rope": VanillaRoPE,
    "comrope-liere": NormalLieRE,
}
EXPANDING: dict[str, type[ExpandingEncoding]] = {
    "sphere": SphereHarmonics,
    "harope": HARoPE,
    "pape": PaPE,
    "pape-ri": PaPERI,
}
"""Encodings that stand where a rotary one does, and rotate nothing."""
ABSOLUTE: dict[str, type[AbsoluteEncoding]] = {
    "learned": LearnedAPE,
    "sinusoidal": SinusoidalAPE,
    "learned-jittered": JitteredAPE,
}
BIAS: dict[str, type[ScoreBias]] = {"bias": RelativePositionBias, "lookhere": LookHere}
WITH_BLOCKS = ("liere", "comrope-ap", "comrope-ld", "string", "comrope-liere")
WITH_NUMBER = {**dict.fromkeys(WITH_BLOCKS, "block_size"), "sphere": "max_degree"}
"""What a number behind the colon is of each encoding that takes one."""


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
    bias: Callable[..., ScoreBias] | None = None

    @property
    def parts(self) -> list[type[Encoding] | type[AbsoluteEncoding] | type[ScoreBias]]:
        """The named classes: absolute, bias, rotary."""
        rotary: Any = self.rotary.func if isinstance(self.rotary, partial) else self.rotary
        parts: list[Any] = [part for part in (self.absolute, self.bias) if part is not None]
        return parts if parts and rotary is NoEncoding else [*parts, rotary]


Own = type[Encoding] | type[AbsoluteEncoding] | type[ScoreBias]


def parse_encoding(name: str, own: Mapping[str, Own] | None = None) -> Choice:
    """Find encodings by name: one name, `name:number`, or an absolute one, "bias" and a rotary one joined by `+`.

    Args:
        name: The name; a number is the block size, of "sphere" the largest degree.
        own: Further classes by their names; a rotary one takes a block size where its `__init__` does.

    Raises:
        ValueError: an unknown name (the nearest one is suggested), a bad block size, or two of a kind.

    Example:
        >>> parse_encoding("learned+liere:8").rotary(num_axes=2, num_heads=4, head_dim=16)
        LieRE(num_axes=2, num_heads=4, head_dim=16, block_size=8)
    """
    absolute: list[Any] = []
    bias: list[Any] = []
    rotary: list[Any] = []
    classes: dict[str, Any] = {**ROTARY, **EXPANDING, **ABSOLUTE, **BIAS, **(own or {})}
    for part in (each.strip() for each in name.split("+")):
        base, block = _base_and_block(part, own or {})
        found: Any = classes.get(base)
        kind = next((kind for kind in (Encoding, AbsoluteEncoding, ScoreBias) if _is(found, kind)), None)
        if kind is Encoding:
            rotary.append(_with_number(base, found, block))
        elif kind is None or block:
            raise ValueError(_unknown(part))
        else:
            (absolute if kind is AbsoluteEncoding else bias).append(found)
    if max(len(absolute), len(bias), len(rotary)) > 1:
        rule = "at most one absolute and one rotary name and 'bias' once"
        raise ValueError(f"an encoding is {rule}, joined by '+', got {name!r}")
    return Choice(
        name,
        rotary[0] if rotary else NoEncoding,
        absolute[0] if absolute else None,
        bias[0] if bias else None,
    )


def takes(build: Callable[..., Any], argument: str) -> bool:
    """Whether what builds an encoding takes an argument of that name."""
    parameters = inspect.signature(build).parameters.values()
    return any(one.name == argument or one.kind is one.VAR_KEYWORD for one in parameters)


def _is(found: Any, kind: type) -> bool:
    return isinstance(found, type) and issubclass(found, kind)


def _base_and_block(part: str, own: Mapping[str, Own]) -> tuple[str, str]:
    """The name of a class, which may hold colons where it is one's own, and its block size, "" without one."""
    if part in own:
        return part, ""
    base, _, block = part.rpartition(":")
    if base in own:
        return base, block
    base, _, block = part.partition(":")
    return base, block


def _with_number(name: str, build: type[Encoding], number: str) -> Callable[..., Encoding]:
    if not number:
        return build
    if (name in ROTARY or name in EXPANDING) and name not in WITH_NUMBER:
        raise ValueError(f"only {', '.join(WITH_NUMBER)} take a number, got '{name}:{number}'")
    argument = WITH_NUMBER.get(name, "block_size")
    if not takes(build, argument):
        raise ValueError(f"{name} must take {argument} to be named with one, got '{name}:{number}'")
    if not number.isdecimal() or int(number) < 2 or number != str(int(number)):
        raise ValueError(f"{argument.replace('_', ' ')} must be a whole number of 2 or more, got '{name}:{number}'")
    given: dict[str, Any] = {argument: int(number)}
    return partial(build, **given)


def _unknown(part: str) -> str:
    known = [*ROTARY, *EXPANDING, *ABSOLUTE, *BIAS]
    near = difflib.get_close_matches(part.partition(":")[0].lower(), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"encodings are {', '.join(known)}, got {part!r}{hint}"
