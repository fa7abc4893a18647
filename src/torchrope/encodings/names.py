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
"""Encodings that take the place of a rotary one but map queries and keys without a rotation."""
ABSOLUTE: dict[str, type[AbsoluteEncoding]] = {
    "learned": LearnedAPE,
    "sinusoidal": SinusoidalAPE,
    "learned-jittered": JitteredAPE,
}
BIAS: dict[str, type[ScoreBias]] = {"bias": RelativePositionBias, "lookhere": LookHere}
WITH_BLOCKS = ("liere", "comrope-ap", "comrope-ld", "string", "comrope-liere")
WITH_NUMBER = {**dict.fromkeys(WITH_BLOCKS, "block_size"), "sphere": "max_degree"}
"""The argument that a number behind the colon sets, for each encoding that accepts one."""
ALIASES = {"rope": "axial", "rope-axial": "axial", "rope-mixed": "mixed"}
"""Names of the literature, for the suggestion in an error."""


@dataclass(frozen=True)
class Choice:
    """Parsed name of an encoding: a rotary encoding, an absolute one, a score bias, or a combination.

    Attributes:
        name: The name as written, such as "learned+liere:8".
        rotary: Builds the rotary encoding from num_axes, num_heads, head_dim; `NoEncoding` if the name has none.
        absolute: Builds the absolute encoding from sizes and dim, or None.
        bias: Builds the score bias from sizes and num_heads, or None.
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


EncodingClass = type[Encoding] | type[AbsoluteEncoding] | type[ScoreBias]


def parse_encoding(name: str, own: Mapping[str, EncodingClass] | None = None) -> Choice:
    """Parse the name of an encoding: `name`, `name:number`, or an absolute, a bias and a rotary name joined by `+`.

    Args:
        name: The name, in upper or lower case; a number sets the block size, for "sphere" the largest degree.
        own: Additional classes by name; a rotary one accepts a block size if its `__init__` does.

    Raises:
        ValueError: an unknown name (the nearest one is suggested), an invalid number, or two encodings of one kind.

    Example:
        >>> parse_encoding("learned+liere:8").rotary(num_axes=2, num_heads=4, head_dim=16)
        LieRE(num_axes=2, num_heads=4, head_dim=16, block_size=8)
    """
    absolute: list[Any] = []
    bias: list[Any] = []
    rotary: list[Any] = []
    classes: dict[str, Any] = {**ROTARY, **EXPANDING, **ABSOLUTE, **BIAS, **(own or {})}
    given = [part.strip() for part in name.split("+")]
    parts = [part if _base_and_block(part, own or {})[0] in (own or {}) else part.lower() for part in given]
    name = name if parts == given else "+".join(parts)
    for part in parts:
        base, block = _base_and_block(part, own or {})
        cls: Any = classes.get(base)
        kind = next((kind for kind in (Encoding, AbsoluteEncoding, ScoreBias) if _is_subclass(cls, kind)), None)
        if kind is Encoding:
            rotary.append(_with_number(base, cls, block))
        elif kind is None or block:
            raise ValueError(_unknown(part))
        else:
            (absolute if kind is AbsoluteEncoding else bias).append(cls)
    if max(len(absolute), len(bias), len(rotary)) > 1:
        rule = "at most one absolute, one score bias and one rotary name"
        raise ValueError(f"an encoding must be {rule}, joined by '+', got {name!r}")
    return Choice(
        name,
        rotary[0] if rotary else NoEncoding,
        absolute[0] if absolute else None,
        bias[0] if bias else None,
    )


def takes(build: Callable[..., Any], argument: str) -> bool:
    """Whether a callable accepts a keyword argument of this name."""
    parameters = inspect.signature(build).parameters.values()
    return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)


def _is_subclass(cls: Any, kind: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, kind)


def _base_and_block(part: str, own: Mapping[str, EncodingClass]) -> tuple[str, str]:
    """Split a name into class name and number, "" if none; names in `own` may contain colons."""
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
        raise ValueError(f"{name} must accept {argument} to be named with a number, got '{name}:{number}'")
    least = 0 if argument == "max_degree" else 2
    if not number.isdecimal() or int(number) < least or number != str(int(number)):
        rule = f"{argument.replace('_', ' ')} must be a whole number of {least} or more"
        raise ValueError(f"{rule}, got '{name}:{number}'")
    keywords: dict[str, Any] = {argument: int(number)}
    return partial(build, **keywords)


def _unknown(part: str) -> str:
    names = [*ROTARY, *EXPANDING, *ABSOLUTE, *BIAS]
    base, _, number = part.partition(":")
    if not number:  # "liere8"
        word = base.rstrip("0123456789")
        base, number = (word, base[len(word) :]) if word in WITH_NUMBER else (base, "")
    close = ALIASES.get(base) or next(iter(difflib.get_close_matches(base, names, n=1, cutoff=0.5)), None)
    meant = f"{close}:{number}" if number and close in WITH_NUMBER else close
    hint = f"; did you mean {meant!r}?" if meant else ""
    return f"an encoding must be one of {', '.join(names)}, got {part!r}{hint}"
