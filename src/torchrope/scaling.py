"""Context extension: scaling of frequencies `(axes, heads or 1, pairs)` for inputs larger than in training.

A larger input has positions outside the training range. Each function lowers frequencies, axis by axis, so that the
angles over the larger input resemble those over the training size.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding
from torchrope.encodings.none import NoEncoding
from torchrope.positions import PerAxis, positive
from torchrope.tensors import wide_dtype

Scaling = Callable[[Tensor], Tensor]
"""A function from frequencies to frequencies of the same shape."""
Method = Literal["interpolate", "ntk", "yarn"] | Callable[[Tensor, PerAxis], Tensor]
"""The name of a scaling, or a function of frequencies and factor."""


_EQUAL = 1e-5
"""Logarithm of a ratio of frequencies up to which they differ by rounding only."""


def interpolate(frequencies: Tensor, factor: PerAxis) -> Tensor:
    """Divide all frequencies by the factor of their axis:  f_a / s_a,  which is position interpolation.

    Args:
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        factor: s, how many times longer the input is, one number or one per axis.

    Returns:
        Frequencies of the same shape.

    Raises:
        ValueError: a factor of 0 or less, or not one per axis.

    References:
        Chen et al., Extending Context Window of Large Language Models via Positional Interpolation, equation 4.

    Example:
        >>> interpolate(torch.tensor([[[1.0, 0.1]], [[1.0, 0.1]]]), (1, 2)).tolist()
        [[[1.0, 0.10000000149011612]], [[0.5, 0.05000000074505806]]]
    """
    return frequencies / _numbers(frequencies, "factor", factor)


def ntk(frequencies: Tensor, factor: PerAxis) -> Tensor:
    """Divide the lowest frequency per axis by s, keep the highest:  f s^-r,  r = log(f_max / f) / log(f_max / f_min).

    For a geometric sequence of n frequencies this changes the base b to b s^(n / (n - 1)). r is computed from the norm
    of a pair's frequencies over all axes: if all s are equal, pairs keep their directions.

    Args:
        frequencies: As of `interpolate`, which has the errors; zeros stay zero.
        factor: As of `interpolate`.

    References:
        bloc97, NTK-aware scaled RoPE, 2023; Peng et al., YaRN, section 3.1 and definition 1.

    Example:
        >>> ntk(torch.tensor([[[1.0, 0.1, 0.01]]]), 4).flatten().round(decimals=4).tolist()
        [1.0, 0.05000000074505806, 0.0024999999441206455]
    """
    if not frequencies.numel():
        return frequencies
    speed, used = _pair_norms(frequencies)
    counted = used | ~used.any(dim=-1, keepdim=True)  # an axis without frequencies counts as all ones
    fastest = speed.where(counted, 0.0).amax(dim=-1, keepdim=True)
    slowest = speed.where(counted, math.inf).amin(dim=-1, keepdim=True)
    span = (fastest / slowest).log()
    span = span.where(span > _EQUAL, math.inf)  # pairs of equal frequency, up to rounding, are not scaled
    exponent = ((fastest / speed).log() / span).where(used, 0.0)
    return frequencies * _numbers(frequencies, "factor", factor) ** -exponent


def yarn(
    frequencies: Tensor, factor: PerAxis, *, train_size: PerAxis, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> Tensor:
    """Divide frequencies with few turns over the training size by s and keep those with many:  f (1 - γ + γ / s).

    γ falls from 1 at beta_slow turns to 0 at beta_fast, linearly in the logarithm of the number of turns. Frequencies
    for images may be too low for beta_fast turns, so it is clamped to the turns of the axis' highest frequency.
    `yarn_temperature` is the other part of YaRN.

    Args:
        frequencies: As of `interpolate`.
        factor: As of `interpolate`.
        train_size: Extent of the training data in units of position, one number or one per axis.
        beta_fast: Number of turns over the training size from which a frequency is kept.
        beta_slow: Number of turns up to which a frequency is divided by s.

    Raises:
        ValueError: a factor or size of 0 or less, or not one per axis; beta_fast not above beta_slow.

    References:
        Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, section 3.2; the ramp is that of
        its code, and of transformers with truncate=False: linear in the index of a pair of a geometric sequence.

    Example:
        >>> yarn(torch.tensor([[[1.0, 0.1, 0.01]]]), 2, train_size=256).flatten().round(decimals=4).tolist()
        [1.0, 0.07029999792575836, 0.004999999888241291]
    """
    if not beta_fast > beta_slow > 0:
        raise ValueError(f"yarn needs beta_fast > beta_slow > 0, got {beta_fast} and {beta_slow}")
    if not frequencies.numel():
        return frequencies
    speed, used = _pair_norms(frequencies)
    turns = speed * _numbers(frequencies, "train_size", train_size) / (2 * math.pi)
    fast = turns.where(used, 0.0).amax(dim=-1, keepdim=True).clamp(max=beta_fast)
    ramp = (fast / turns).log() / (fast / beta_slow).log()
    gamma = torch.where(turns <= beta_slow, 1.0, torch.where(turns >= fast, 0.0, ramp)).clamp(0, 1)
    return frequencies * (1 - gamma + gamma / _numbers(frequencies, "factor", factor))


def yarn_temperature(factor: PerAxis) -> float:
    """Compute YaRN's factor on queries and keys:  t = 0.1 ln(s) + 1.  It offsets the higher entropy over more tokens.

    Rotations preserve norms, so attention must apply it: its scale becomes t² / √head_dim. With several axes s is the
    product of their factors, by which the number of tokens grows.

    Args:
        factor: How many times longer the input is, a number or one per axis.

    Returns:
        t; 1 if the input is not longer.

    References:
        Peng et al., YaRN, section 3.3, equation 22, where it is √(1 / t).

    Example:
        >>> round(yarn_temperature((2, 2)), 4)
        1.1386
    """
    growth = math.prod(factor) if isinstance(factor, Iterable) else factor
    return 0.1 * math.log(growth) + 1 if growth > 1 else 1.0


METHODS: dict[str, Callable[..., Tensor]] = {function.__name__: function for function in (interpolate, ntk, yarn)}


def scaling_of(
    method: Method, factor: PerAxis, *, train_size: PerAxis | None, extent: PerAxis | None = None
) -> Scaling:
    """Return the function on frequencies of a method, with its settings bound; `extent` is the default train_size."""
    if not callable(method) and method not in METHODS:
        *first, last = METHODS
        raise ValueError(f"method must be {', '.join(first)}, {last} or a function, got {method!r}")
    if train_size is not None and method != "yarn":
        raise ValueError(f"train_size must be None unless method is 'yarn', got {train_size} for {_name(method)}")
    if callable(method):
        return lambda frequencies: method(frequencies, factor)
    if method != "yarn":
        return lambda frequencies: METHODS[method](frequencies, factor)
    size = extent if train_size is None else train_size
    if size is None:
        raise ValueError("yarn requires train_size= (the extent of the training data in units of position)")
    return lambda frequencies: yarn(frequencies, factor, train_size=size)


@torch.no_grad()
def scale_frequencies(encoding: Encoding, scaling: Scaling, method: Method) -> None:
    """Scale the frequencies of an encoding in place; "interpolate" scales the entries of generators of any encoding."""
    if isinstance(encoding, NoEncoding) or not encoding.rotary_dim:
        return
    if encoding.has_frequencies:
        frequencies = encoding.frequencies_per_axis()
        encoding.set_frequencies(scaling(frequencies.to(wide_dtype(frequencies))))
        return
    generators = encoding.generators()  # raises if it is not a rotation
    generators = generators.to(wide_dtype(generators))
    if method != "interpolate":
        rule = f"{_name(method)} needs frequencies, which blocks of 2 and STRING have"
        raise ValueError(f"{rule}; interpolate supports any encoding, got {encoding}")
    encoding.set_generators(scaling(generators.flatten(2)).reshape(generators.shape))


def _name(method: object) -> str:
    """Return the name of a method; of a `functools.partial` that of its function."""
    return method if isinstance(method, str) else getattr(getattr(method, "func", method), "__name__", repr(method))


def _pair_norms(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of each pair's frequencies, 1 where a frequency is 0, and whether each frequency is nonzero."""
    used = frequencies != 0
    return torch.where(used, frequencies.norm(dim=0), 1.0), used


def _numbers(frequencies: Tensor, name: str, value: PerAxis) -> Tensor:
    """Return one positive number per axis, `(axes, 1, 1)`."""
    return frequencies.new_tensor(positive(name, value, len(frequencies))).reshape(-1, 1, 1)
