"""Encodings by name: "axial", "liere:8", "learned+mixed", "bias+mixed", and those that `register_encoding` adds."""

import difflib
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from torch import nn
from typing_extensions import get_type_hints, is_typeddict

from torchrope.encodings import baselines
from torchrope.encodings.absolute import AbsoluteEncoding, LearnedAPE, SinusoidalAPE
from torchrope.encodings.axial import AxialRoPE
from torchrope.encodings.base import Encoding
from torchrope.encodings.bias import RelativePositionBias, ScoreBias
from torchrope.encodings.comrope import ComRoPEAP, ComRoPELD
from torchrope.encodings.directional import DRoPE
from torchrope.encodings.distance import FIRE, ALiBi
from torchrope.encodings.golden import GoldenGateRoPE
from torchrope.encodings.liere import LieRE
from torchrope.encodings.lookhere import LookHere
from torchrope.encodings.mixed import MixedRoPE
from torchrope.encodings.mrope import MRoPE, MultiHeadRoPE
from torchrope.encodings.none import NoEncoding
from torchrope.encodings.simplex import SimplexRoPE
from torchrope.encodings.spiral import SpiralRoPE
from torchrope.encodings.string import STRING

ROTARY: dict[str, Callable[..., Encoding]] = {
    "none": NoEncoding,
    "axial": AxialRoPE,
    "mixed": MixedRoPE,
    "liere": LieRE,
    "comrope-ap": ComRoPEAP,
    "comrope-ld": ComRoPELD,
    "string": STRING,
    "golden": GoldenGateRoPE,
    "dinov3": baselines.dinov3,
    "mrope": MRoPE,
    "mrope-interleaved": baselines.mrope_interleaved,
    "mhrope": MultiHeadRoPE,
    "videorope": baselines.videorope,
    "nd": SimplexRoPE,
    "spiral": SpiralRoPE,
    "drope": DRoPE,
    "visionllama": baselines.visionllama,
    "comrope-rope": baselines.comrope_rope,
    "comrope-liere": baselines.comrope_liere,
}
ABSOLUTE: dict[str, Callable[..., AbsoluteEncoding]] = {
    "learned": LearnedAPE,
    "sinusoidal": SinusoidalAPE,
    "learned-jittered": baselines.learned_jittered,
}
BIAS: dict[str, Callable[..., ScoreBias]] = {
    "bias": RelativePositionBias,
    "lookhere": LookHere,
    "alibi": ALiBi,
    "fire": FIRE,
}
KINDS: tuple[tuple[type, dict[str, Any]], ...] = ((Encoding, ROTARY), (AbsoluteEncoding, ABSOLUTE), (ScoreBias, BIAS))
"""Base classes, with the encodings of each by name."""
BUILT_IN = frozenset((*ROTARY, *ABSOLUTE, *BIAS))
ALIASES = {"rope": "axial", "rope-axial": "axial", "rope-mixed": "mixed"}
"""Names of the literature, for the suggestion in an error."""


@dataclass(frozen=True)
class Choice:
    """The encodings of a model, as `parse_encoding` returns them: a rotary one, an absolute one, a score bias.

    Attributes:
        rotary: Builds the rotary encoding from num_axes, num_heads, head_dim, such as `partial(LieRE, block_size=8)`.
        absolute: Builds the absolute encoding from sizes and dim, such as `LearnedAPE`, or None.
        bias: Builds the score bias from sizes and num_heads, such as `RelativePositionBias`, or None.
        name: The name as written, such as "learned+liere:8"; empty if there is none.

    Raises:
        ValueError: a part that is neither a function nor a class of its kind, or a `functools.partial` of one.
    """

    rotary: Callable[..., Encoding] = NoEncoding
    absolute: Callable[..., AbsoluteEncoding] | None = None
    bias: Callable[..., ScoreBias] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for (base, _), (part, build) in zip(KINDS, vars(self).items(), strict=False):
            if not _builds(build, base) and (build is not None or base is Encoding):
                rule = f"the {part} encoding must be built by a subclass of {base.__name__} or a function"
                raise ValueError(f"{rule}, got {_shown(build)}")

    def build_rotary(self, **head: Any) -> Encoding:
        """Build the rotary encoding; ValueError if a function returns none."""
        encoding: object = self.rotary(**head)
        if not isinstance(encoding, Encoding):
            raise ValueError(
                f"a function that builds an encoding must return an Encoding, got {type(encoding).__name__}"
            )
        return encoding

    @property
    def parts(self) -> list[type[Encoding] | type[AbsoluteEncoding] | type[ScoreBias]]:
        """The named classes: absolute, bias, rotary; `Encoding` for a rotary one that a function builds."""
        parts: list[Any] = [built_class(part) for part in (self.absolute, self.bias) if part is not None]
        rotary = built_class(self.rotary) or Encoding
        return parts if parts and rotary is NoEncoding else [*parts, rotary]


def register_encoding(name: str, build: Callable[..., Any], *, exist_ok: bool = False) -> None:
    """Add an encoding of your own to those that a name builds:  `parse_encoding`, models, `swap`, saved files.

    Args:
        name: Letters, digits, `-`, `_`, `.` and `:`; not the name of a built-in encoding.
        build: A subclass of `Encoding`, `AbsoluteEncoding` or `ScoreBias`, or a `functools.partial` of one, of which
            `name:number` sets the block_size; or a function of num_axes, num_heads and head_dim, which returns an
            `Encoding`.
        exist_ok: Replace an encoding that was registered by this name.

    Raises:
        ValueError: a name that is in use or has other characters; a class that is not an encoding.

    Example:
        >>> register_encoding("liere-small", partial(LieRE, block_size=4, init_scale=0.1))
        >>> parse_encoding("learned+liere-small").rotary(num_axes=2, num_heads=4, head_dim=16)
        LieRE(num_axes=2, num_heads=4, head_dim=16, block_size=4)
    """
    if not re.fullmatch(r"\w[\w.:-]*", name):
        raise ValueError(f"name must be letters, digits, '-', '_', '.' and ':', got {name!r}")
    if name in BUILT_IN or (name in builders() and not exist_ok and builders()[name] is not build):
        raise ValueError(f"name must not be in use, got {name!r}, which builds {_shown(builders()[name])}")
    kind = next((named for base, named in KINDS if _builds(build, base)), None)
    if kind is None:
        rule = "build must be a subclass of Encoding, AbsoluteEncoding or ScoreBias, or a function that returns one"
        raise ValueError(f"{rule}, got {_shown(build)}")
    for _, named in KINDS:
        named.pop(name, None)
    kind[name] = build


def builders() -> dict[str, Callable[..., Any]]:
    """Return what builds each named encoding, of all kinds."""
    return {**ROTARY, **ABSOLUTE, **BIAS}


def parse_encoding(name: str) -> Choice:
    """Parse the name of an encoding: `name`, `name:number`, or an absolute, a bias and a rotary name joined by `+`.

    Args:
        name: The name, in upper or lower case; a number sets the block size, and "axial:base=50" the base of geometric
            frequencies.

    Raises:
        ValueError: an unknown name (the nearest one is suggested), an invalid number, or two encodings of one kind.

    Example:
        >>> parse_encoding("learned+liere:8").rotary(num_axes=2, num_heads=4, head_dim=16)
        LieRE(num_axes=2, num_heads=4, head_dim=16, block_size=8)
    """
    known = builders()
    typed_parts = [part.strip() for part in name.split("+")]
    parts = [part if _split(part, known)[0] in known else part.lower() for part in typed_parts]
    name = name if parts == typed_parts else "+".join(parts)
    chosen: dict[str, Any] = {}
    for part in parts:
        base, number = _split(part, known)
        kind = "absolute" if base in ABSOLUTE else "bias" if base in BIAS else "rotary"
        if base not in known or (number and kind != "rotary"):
            raise ValueError(_unknown(part))
        if kind in chosen:
            rule = "at most one absolute, one score bias and one rotary name"
            raise ValueError(f"an encoding must be {rule}, joined by '+', got {name!r}")
        chosen[kind] = _with_number(base, known[base], number)
    return Choice(**chosen, name=name)


def built_class(build: Callable[..., Any]) -> type | None:
    """Return the class that a class or `functools.partial` builds; None for a function."""
    while isinstance(build, partial):
        build = build.func
    return build if isinstance(build, type) else None


def _builds(build: Any, base: type) -> bool:
    """Whether build is a function, or a subclass of base or a `functools.partial` of one."""
    cls = built_class(build)
    return callable(build) and not isinstance(build, nn.Module) if cls is None else issubclass(cls, base)


def takes(build: Callable[..., Any], argument: str) -> bool:
    """Whether a callable accepts a keyword argument of this name."""
    cls = built_class(build)
    if cls is not None:
        return argument in arguments_of(cls)
    parameters = inspect.signature(build).parameters.values()
    return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)


def arguments_of(cls: type) -> list[str]:
    """Return the keyword arguments of an encoding's constructor, with those that it passes on to its base classes."""
    return [*annotations_of(cls)]


def built_as(part: Any, *without: str) -> partial[Any]:
    """Return the class of an encoding or bias with the arguments that it stores as attributes of the same name."""
    names = [name for name in arguments_of(type(part)) if name not in without and hasattr(part, name)]
    stored = {name: getattr(part, name) for name in names}
    nested = {name: built_as(value) for name, value in stored.items() if isinstance(value, Encoding)}
    cls: Any = type(part)
    return partial(cls, **stored | nested)


def annotations_of(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the named parameters of a function or constructor, `Any` for those that have none.

    `**shape: Unpack[HeadShape]` stands for the keys of `HeadShape`; `**settings` for the arguments of the base class.
    """
    annotations: dict[str, Any] = {}
    mro = build.__mro__ if isinstance(build, type) else ()
    for function in [vars(base)["__init__"] for base in mro if "__init__" in vars(base)] or [build]:
        hints = _hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1 if mro else 0 :]
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                annotations.setdefault(p.name, hints.get(p.name, Any))
        passed_on = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
        if passed_on is None:
            break
        (typed, *_) = get_args(hints.get(passed_on.name)) or (None,)
        if is_typeddict(typed):
            annotations = {**annotations, **_hints(typed), **annotations}
            break
    return annotations


def _hints(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (AttributeError, NameError, SyntaxError, TypeError):  # names for type checkers alone, text that is no type
        return {}


def _split(part: str, known: dict[str, Any]) -> tuple[str, str]:
    """Split a name into that of an encoding and a number, "" if none; registered names may contain colons."""
    if part in known:
        return part, ""
    base, _, number = part.rpartition(":")
    return (base, number) if base in known else tuple(part.partition(":")[::2])  # type: ignore[return-value]


def with_numbers() -> list[str]:
    """Return the names that accept a number behind a colon."""
    return [name for name, build in builders().items() if _takes_number(build)]


def _takes_number(build: Callable[..., Any]) -> bool:
    return built_class(build) is not None and takes(build, "block_size")


def _with_number(name: str, build: Callable[..., Encoding], number: str) -> Callable[..., Encoding]:
    if not number:
        return build
    if number.startswith("base="):
        return partial(build, base=_base(name, build, number.removeprefix("base=")))
    if not _takes_number(build) and name in BUILT_IN:
        raise ValueError(f"only {', '.join(with_numbers())} take a number, got '{name}:{number}'")
    if not _takes_number(build):
        raise ValueError(f"{name} must accept block_size to be named with a number, got '{name}:{number}'")
    if not number.isdecimal() or int(number) < 2 or number != str(int(number)):
        raise ValueError(f"block size must be a whole number of 2 or more, got '{name}:{number}'")
    return partial(build, block_size=int(number))


def _base(name: str, build: Callable[..., Encoding], text: str) -> float:
    """Return the base of geometric frequencies that a name sets, as in "axial:base=50"."""
    if not (built_class(build) and takes(build, "base")):
        bases = [known for known, builder in ROTARY.items() if built_class(builder) and takes(builder, "base")]
        raise ValueError(f"only {', '.join(bases)} take a base, got '{name}:base={text}'")
    try:
        base = float(text)
    except ValueError:
        base = math.nan
    if not 1 < base < math.inf:
        raise ValueError(f"base must be a number above 1, got '{name}:base={text}'")
    return base


def _shown(build: Any) -> str:
    kind = f"{build!r}" if build is None or isinstance(build, str) else f"an instance of {type(build).__name__}"
    return getattr(built_class(build) or build, "__name__", kind)


def _unknown(part: str) -> str:
    names = [*builders()]
    base, _, number = part.partition(":")
    if not number:  # "liere8"
        word = base.rstrip("0123456789")
        base, number = (word, base[len(word) :]) if word in with_numbers() else (base, "")
    close = ALIASES.get(base) or next(iter(difflib.get_close_matches(base, names, n=1, cutoff=0.5)), None)
    meant = f"{close}:{number}" if number and close in with_numbers() else close
    hint = f"; did you mean {meant!r}?" if meant else ""
    return f"an encoding must be one of {', '.join(names)}, got {part!r}{hint}"
