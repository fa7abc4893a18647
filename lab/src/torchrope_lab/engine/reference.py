"""Accuracy differences to a reference encoding, and of families with learned generators to RoPE-Mixed."""

from collections.abc import Iterable
from typing import Any

from torchrope.encodings import STRING, ComRoPEAP, ComRoPELD, LieRE
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.study import Lab
from torchrope_lab.mistakes import Mistake
from torchrope_lab.settings.study_config import LEARNED, reference_for

MIXED = "mixed"
BEYOND_FREQUENCIES = (LieRE, ComRoPEAP, ComRoPELD, STRING)
"""Families that learn more than the frequencies of RoPE-Mixed."""
AHEAD_OF_MIXED = "Ahead of RoPE-Mixed"
WITH_SAME = (
    "RoPE-Mixed is mixed, as RoPE-ViT has it; what LieRE's tables call RoPE-Mixed is liere:2. A combination such as "
    "learned+liere is compared with the same combination of mixed, learned+mixed."
)


def reference_of(lab: Lab) -> str:
    """Return the encoding that a study compares with: --reference, or an absolute encoding that suits the data."""
    name = lab.reference or reference_for(lab.config.data)
    check_reference(lab, name)
    return name


def check_reference(lab: Lab, name: str, **settings: Any) -> None:
    """Raise ValueError if the model does not support an encoding; settings as in `Lab.run`."""
    try:
        lab.blueprint(lab.run(name, **settings))
    except ValueError as error:
        raise Mistake(f"--reference must be an encoding that the model supports, got {name}: {error}") from None


def with_reference(lab: Lab, **settings: Any) -> list[str]:
    """Return the encodings of a study, and --reference if the user named one; raises as `check_reference`."""
    if lab.reference:
        check_reference(lab, lab.reference, **settings)
    return list(dict.fromkeys([*lab.encodings, *([lab.reference] if lab.reference else [])]))


def described(reference: str, article: str = "a") -> str:
    """Name a reference within a sentence.

    Example:
        >>> described("learned"), described("learned", "the"), described("mixed")
        ('a learned absolute encoding', 'the learned absolute encoding', 'mixed')
    """
    return f"{article} learned absolute encoding" if reference == LEARNED else reference


def all_but(reference: str, names: Iterable[str]) -> dict[str, str]:
    """Map every other name to the reference."""
    return {name: reference for name in names if name != reference}


def mixed_counterparts(names: Iterable[str], reference: str | None = None) -> dict[str, str]:
    """Map encodings that learn more than frequencies to the same with RoPE-Mixed, if it is among the names."""
    # `reference` needs no counterpart: others are compared with it anyway.
    by_parts = {frozenset(part.strip() for part in name.split("+")): name for name in names}
    counterparts = {}
    for parts, name in by_parts.items():
        other = by_parts.get(frozenset(MIXED if _learns_beyond_frequencies(part) else part for part in parts))
        if other not in (None, name, reference):
            counterparts[name] = other
    return counterparts


def _learns_beyond_frequencies(part: str) -> bool:
    return issubclass(resolve_encoding(part).parts[-1], BEYOND_FREQUENCIES)
