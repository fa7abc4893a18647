"""Context extension: scaling of frequencies `(axes, heads or 1, pairs)` for inputs larger than in training.

A larger input has positions outside the training range. Each function lowers frequencies, axis by axis, so that the
angles over the larger input resemble those over the training size.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding
from torchrope.encodings.none import NoEncoding
from torchrope.positions import PerAxis, positive
from torchrope.tensors import wide_dtype

Scaling = Callable[[Tensor], Tensor]
"""A function from frequencies to frequencies of the same shape."""
Method = Literal["interpolate", "ntk", "yarn", "riflex", "dype"] | Callable[[Tensor, PerAxis], Tensor]
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


def riflex(
    frequencies: Tensor, factor: PerAxis, *, train_size: PerAxis, period: PerAxis | None = None, turns: float = 1.0
) -> Tensor:
    """Lower the intrinsic frequency of each axis to one turn over the larger input:  f_k <- 2π / (s L).

    The output repeats if the input is longer than the period of the intrinsic frequency. Unchanged are all other
    frequencies, an intrinsic frequency that is already lower, and axes with a factor of 1 or less.

    Args:
        frequencies: As of `interpolate`. A pair of several axes is changed along the axis for which it is the
            intrinsic one.
        factor: As of `interpolate`.
        train_size: L, extent of the training data in units of position, one number or one per axis.
        period: Observed period of repetition in larger inputs, in units of position, one number or one per axis: the
            intrinsic pair is the one with the nearest period,  k = argmin_j |2π / f_j - period|. By default it is the
            one with the shortest period not below the training size, which repeats first, or else the longest period.
        turns: Number of turns of the pair over the larger input; 0.9 in the paper's code.

    Raises:
        ValueError: a factor or size of 0 or less, or not one per axis; turns of 0 or less.

    References:
        Zhao et al., RIFLEx: A Free Lunch for Length Extrapolation in Video Diffusion Transformers, equations 4, 7
        and 8.

    Example:
        >>> riflex(torch.tensor([[[1.0, 0.3, 0.03]]]), 2, train_size=13).flatten().round(decimals=4).tolist()
        [1.0, 0.24169999361038208, 0.029999999329447746]
    """
    if not turns > 0:
        raise ValueError(f"turns must be above 0, got {turns}")
    factors, sizes = _numbers(frequencies, "factor", factor), _numbers(frequencies, "train_size", train_size)
    periods = 2 * math.pi / frequencies.detach().abs()  # infinite for a frequency of 0
    if period is None:
        slowest = periods.where(periods < math.inf, 0.0).amax(dim=-1, keepdim=True)
        distance = periods.where(periods >= torch.minimum(sizes, slowest), math.inf)
    else:
        distance = (periods - _numbers(frequencies, "period", period)).abs()
    intrinsic = torch.zeros_like(periods, dtype=torch.bool)
    intrinsic = intrinsic.scatter(-1, distance.argmin(dim=-1, keepdim=True), True)
    limit = 2 * math.pi * turns / (factors * sizes)
    lowered = frequencies.sign() * torch.minimum(frequencies.abs(), limit)
    return torch.where(intrinsic & (factors > 1), lowered, frequencies)


def dype(frequencies: Tensor, factor: PerAxis, *, timestep: float, scale: float = 2.0, exponent: float = 2.0) -> Tensor:
    """Apply `ntk` with the factor s^κ(t):  κ(t) = λ_s t^λ_t  falls to 0 during denoising.

    Frequencies are lowered while coarse structure is generated and equal those of training for the last, finest
    details. The paper's other variants are `interpolate` with the factor s^κ(t), and `yarn` with beta_fast and
    beta_slow multiplied by t^λ_t, κ without λ_s.

    Args:
        frequencies: As of `interpolate`; zeros stay zero.
        factor: As of `interpolate`.
        timestep: t, from 1, noise, to 0, the image.
        scale: λ_s.
        exponent: λ_t.

    Raises:
        ValueError: a timestep that is not between 0 and 1; a factor of 0 or less, or not one per axis.

    References:
        Issachar et al., DyPE: Dynamic Position Extrapolation for Ultra High Resolution Diffusion, κ and DY-NTK;
        default values are those of its code, which states that the method is patent pending.

    Example:
        >>> dype(torch.tensor([[[1.0, 0.1, 0.01]]]), 4, timestep=0.5).flatten().round(decimals=4).tolist()
        [1.0, 0.07069999724626541, 0.004999999888241291]
    """
    if isinstance(timestep, str) or not 0 <= timestep <= 1:
        raise ValueError(f"timestep must be between 0, the image, and 1, noise, got {timestep}")
    strength = scale * timestep**exponent
    return ntk(frequencies, [s**strength for s in positive("factor", factor, len(frequencies))])


METHODS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (interpolate, ntk, yarn, riflex, dype)
}
REQUIRED_SETTING: dict[object, str] = {"yarn": "train_size", "riflex": "train_size", "dype": "timestep"}
"""The setting that a method requires; others take none."""
_MEANING = {
    "train_size": "the extent of the training data in units of position",
    "timestep": "from 1, noise, to 0, the image",
}


def scaling_of(
    method: Method,
    factor: PerAxis,
    *,
    train_size: PerAxis | None,
    timestep: float | None,
    extent: PerAxis | None = None,
) -> Scaling:
    """Return the function on frequencies of a method, with its settings bound.

    Args:
        method: Its name, or a function.
        factor: How many times longer the input is.
        train_size: Extent of the training data in units of position.
        timestep: From 1, noise, to 0, the image.
        extent: What `train_size` is by default.

    Raises:
        ValueError: an unknown method, a setting that is missing or not used.
    """
    if not callable(method) and method not in METHODS:
        *others, last = METHODS
        raise ValueError(f"method must be {', '.join(others)}, {last} or a function, got {method!r}")
    given = {"train_size": train_size, "timestep": timestep}
    for setting, value in given.items():
        users = [name for name, required in REQUIRED_SETTING.items() if required == setting]
        if value is not None and method not in users:
            rule = f"{setting} must be None unless method is {' or '.join(map(repr, users))}"
            raise ValueError(f"{rule}, got {value} for {_name(method)}")
    if callable(method):
        return lambda frequencies: method(frequencies, factor)
    settings: dict[str, Any] = {}
    if method in REQUIRED_SETTING:
        needed = REQUIRED_SETTING[method]
        settings[needed] = extent if needed == "train_size" and train_size is None else given[needed]
        if settings[needed] is None:
            raise ValueError(f"{method} requires {needed}= ({_MEANING[needed]})")
    return lambda frequencies: METHODS[method](frequencies, factor, **settings)


@torch.no_grad()
def scale_frequencies(encoding: Encoding, scaling: Scaling, method: Method) -> None:
    """Scale the frequencies of an encoding in place.

    Args:
        encoding: An encoding with frequencies; for "interpolate" any encoding.
        scaling: Function from frequencies to frequencies; "interpolate" applies it to the entries of generators.
        method: Name or function of the scaling.

    Raises:
        ValueError: an encoding without frequencies.
    """
    if isinstance(encoding, NoEncoding):
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
