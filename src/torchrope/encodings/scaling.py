"""Frequencies for larger inputs than were trained on: functions on frequencies `(axes, heads or 1, pairs)`.

A larger input runs past the positions that a model has seen. Each function slows pairs of channels down, axis by axis,
so that what they do over the larger input resembles what they did over the training size.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding, planar
from torchrope.encodings.none import NoEncoding
from torchrope.encodings.string import STRING
from torchrope.positions import PerAxis, per_axis
from torchrope.tensors import wide_dtype

AnyEncoding = TypeVar("AnyEncoding", bound=Encoding)
Scaling = Callable[[Tensor], Tensor]
"""From frequencies to frequencies of the same shape."""
Method = Literal["interpolate", "ntk", "yarn", "riflex", "dype"] | Callable[[Tensor, PerAxis], Tensor]
"""A function on frequencies by its name, or one of one's own."""


def interpolate(frequencies: Tensor, factor: PerAxis) -> Tensor:
    """Slow all pairs down alike:  f_a / s_a,  which is to squeeze the positions.

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
    return frequencies / _factors(frequencies, factor)


def ntk(frequencies: Tensor, factor: PerAxis) -> Tensor:
    """Slow the slowest pair of each axis by s, keep the fastest:  f s^-r,  r = log(f_max / f) / log(f_max / f_min).

    For a geometric ladder of n frequencies this is the base b changed to b s^(n / (n - 1)). How fast a pair is, and
    so r, is the length of its frequencies over all axes: where all s are the same, pairs keep their directions.

    Args:
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position; zeros stay zero.
        factor: s, how many times longer the input is, one number or one per axis.

    Returns:
        Frequencies of the same shape.

    Raises:
        ValueError: a factor of 0 or less, or not one per axis.

    References:
        bloc97, NTK-aware scaled RoPE, 2023; Peng et al., YaRN, section 3.1 and definition 1.

    Example:
        >>> ntk(torch.tensor([[[1.0, 0.1, 0.01]]]), 4).flatten().round(decimals=4).tolist()
        [1.0, 0.05000000074505806, 0.0024999999441206455]
    """
    speed, used = _speed(frequencies)
    counted = used | ~used.any(dim=-1, keepdim=True)  # an axis that nothing turns with has a ladder of ones
    fastest = speed.where(counted, 0.0).amax(dim=-1, keepdim=True)
    slowest = speed.where(counted, math.inf).amin(dim=-1, keepdim=True)
    span = (fastest / slowest).log()
    share = (fastest / speed).log() / span.where(span > 0, 1.0)
    return frequencies * _factors(frequencies, factor) ** -share


def yarn(
    frequencies: Tensor, factor: PerAxis, *, train_size: PerAxis, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> Tensor:
    """Slow pairs down that turn little over the training size and keep those that turn often:  f (1 - γ + γ / s).

    γ falls from 1 at beta_slow turns to 0 at beta_fast, linear in the logarithm of the number of turns; no ladder of
    images may turn that often, so beta_fast is at most what the fastest pair of the axis does. `yarn_temperature` is
    the other half of YaRN.

    Args:
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        factor: s, how many times longer the input is, one number or one per axis.
        train_size: Extent of the training data in units of position, one number or one per axis.
        beta_fast: Turns over the training size from which a pair is kept.
        beta_slow: Turns up to which a pair is slowed down by s.

    Returns:
        Frequencies of the same shape.

    Raises:
        ValueError: a factor or size of 0 or less, or not one per axis; beta_fast not above beta_slow.

    References:
        Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, section 3.2; the ramp is that of
        its code, and of transformers with truncate=False, linear in the index of a pair of a geometric ladder.

    Example:
        >>> yarn(torch.tensor([[[1.0, 0.1, 0.01]]]), 2, train_size=256).flatten().round(decimals=4).tolist()
        [1.0, 0.07029999792575836, 0.004999999888241291]
    """
    if not beta_fast > beta_slow > 0:
        raise ValueError(f"yarn needs beta_fast > beta_slow > 0, got {beta_fast} and {beta_slow}")
    speed, used = _speed(frequencies)
    turns = speed * _numbers(frequencies, "train_size", train_size) / (2 * math.pi)
    fast = turns.where(used, 0.0).amax(dim=-1, keepdim=True).clamp(max=beta_fast)
    ramp = (fast / turns).log() / (fast / beta_slow).log()
    slowed = torch.where(turns <= beta_slow, 1.0, torch.where(turns >= fast, 0.0, ramp)).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / _factors(frequencies, factor))


def yarn_temperature(factor: PerAxis) -> float:
    """What YaRN multiplies queries and keys by, so that attention to more tokens stays as sharp:  0.1 ln(s) + 1.

    A rotation keeps lengths, so this is the attention's affair: its scale becomes t² / √head_dim. With several axes s
    is the product of their factors, the growth of the number of tokens.

    Args:
        factor: How many times longer the input is, a number or one per axis.

    Returns:
        t; 1 where the input is not longer.

    References:
        Peng et al., YaRN, section 3.3, equation 22:  √(1 / t) there is this t.

    Example:
        >>> round(yarn_temperature((2, 2)), 4)
        1.1386
    """
    growth = math.prod(factor) if not isinstance(factor, (int, float)) else factor
    return 0.1 * math.log(growth) + 1 if growth > 1 else 1.0


def riflex(
    frequencies: Tensor,
    factor: PerAxis,
    *,
    train_size: PerAxis,
    period: PerAxis | None = None,
    turns: float = 1.0,
) -> Tensor:
    """Slow one pair of each axis down, the intrinsic one, to one turn over the larger input:  f_k <- 2π / (s L).

    A larger input repeats with the period of that pair where it is longer than the period. All other pairs are kept,
    and so is the intrinsic one where it turns less than that already, and an axis that does not grow.

    Args:
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position. A pair of several axes is slowed down
            along the axis for which it is the intrinsic one.
        factor: s, how many times longer the input is, one number or one per axis.
        train_size: L, extent of the training data in units of position, one number or one per axis.
        period: Where larger inputs were seen to repeat, in units of position, one number or one per axis: the
            intrinsic pair is the one with the nearest period,  k = argmin_j |2π / f_j - period|. By default it is the
            one with the shortest period that the training data do not exceed, which repeats first, or the slowest.
        turns: How much of a turn the pair makes over the larger input; 0.9 in the paper's code.

    Returns:
        Frequencies of the same shape.

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
    factors, sizes = _factors(frequencies, factor), _numbers(frequencies, "train_size", train_size)
    periods = 2 * math.pi / frequencies.detach().abs()  # of a pair at rest, infinite
    if period is None:
        slowest = periods.where(periods < math.inf, 0.0).amax(dim=-1, keepdim=True)
        distance = periods.where(periods >= torch.minimum(sizes, slowest), math.inf)
    else:
        distance = (periods - _numbers(frequencies, "period", period)).abs()
    intrinsic = torch.zeros_like(periods, dtype=torch.bool)
    intrinsic = intrinsic.scatter(-1, distance.argmin(dim=-1, keepdim=True), True)
    most = 2 * math.pi * turns / (factors * sizes)
    slowed = frequencies.sign() * torch.minimum(frequencies.abs(), most)
    return torch.where(intrinsic & (factors > 1), slowed, frequencies)


def dype(frequencies: Tensor, factor: PerAxis, *, timestep: float, scale: float = 2.0, exponent: float = 2.0) -> Tensor:
    """Slow pairs down as `ntk` does, by s^κ(t):  κ(t) = λ_s t^λ_t  falls to 0 as an image takes shape.

    A diffusion model settles what is large first, with frequencies slowed down, and details last, with those that it
    was trained with. `interpolate` with the factor s^κ(t) is the paper's other variant, and `yarn` with beta_fast and
    beta_slow multiplied by t^λ_t, κ without λ_s.

    Args:
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position; zeros stay zero.
        factor: s, how many times longer the input is, one number or one per axis.
        timestep: t, from 1, noise, to 0, the image.
        scale: λ_s.
        exponent: λ_t.

    Returns:
        Frequencies of the same shape.

    Raises:
        ValueError: a timestep that is not between 0 and 1; a factor of 0 or less, or not one per axis.

    References:
        Issachar et al., DyPE: Dynamic Position Extrapolation for Ultra High Resolution Diffusion, κ and DY-NTK;
        the numbers are those of its code, which says that the method is patent pending.

    Example:
        >>> dype(torch.tensor([[[1.0, 0.1, 0.01]]]), 4, timestep=0.5).flatten().round(decimals=4).tolist()
        [1.0, 0.07069999724626541, 0.004999999888241291]
    """
    if not 0 <= timestep <= 1:
        raise ValueError(f"timestep must be between 0, the image, and 1, noise, got {timestep}")
    strength = scale * timestep**exponent
    return ntk(frequencies, [s**strength for s in positive("factor", factor, len(frequencies))])


def extend(
    encoding: AnyEncoding,
    factor: PerAxis,
    *,
    method: Method = "ntk",
    train_size: PerAxis | None = None,
    timestep: float | None = None,
) -> AnyEncoding:
    """Copy an encoding for inputs that are longer than those trained on, its frequencies scaled axis by axis.

    Args:
        encoding: Any; frequencies are what blocks of 2 and `STRING` have, and "interpolate" divides any generators.
        factor: How many times longer the input is, one number or one per axis.
        method: The function on frequencies of this name, or one that takes frequencies and factor.
        train_size: Extent of the training data in units of position, for "yarn" and "riflex".
        timestep: For "dype", and no other.

    Returns:
        The copy; the encoding is left as it is.

    Raises:
        ValueError: an unknown method, one without the setting that it needs, an encoding without frequencies, a bad
            factor.
    """
    scaling = scaling_of(method, factor, train_size=train_size, timestep=timestep)
    extended = copy.deepcopy(encoding)
    scale_frequencies(extended, scaling, method)
    return extended


METHODS: dict[str, Callable[..., Tensor]] = {
    "interpolate": interpolate,
    "ntk": ntk,
    "yarn": yarn,
    "riflex": riflex,
    "dype": dype,
}
_NEEDED = {"yarn": "train_size", "riflex": "train_size", "dype": "timestep"}
_MEANING = {
    "train_size": "the extent of the training data in units of position",
    "timestep": "from 1, noise, to 0, the image",
}


def scaling_of(method: Method, factor: PerAxis, *, train_size: PerAxis | None, timestep: float | None) -> Scaling:
    """The function on frequencies that a method is, with its settings.

    Raises:
        ValueError: an unknown method, a setting that is missing, or a timestep that is not used.
    """
    if not callable(method) and method not in METHODS:
        *others, last = METHODS
        raise ValueError(f"method must be {', '.join(others)}, {last} or a function, got {method!r}")
    if timestep is not None and method != "dype":
        raise ValueError(f"timestep is for dype, got {timestep} for {_name(method)}")
    if callable(method):
        return lambda frequencies: method(frequencies, factor)
    settings: dict[str, Any] = {}
    if method in _NEEDED:
        needed = _NEEDED[method]
        settings[needed] = {"train_size": train_size, "timestep": timestep}[needed]
        if settings[needed] is None:
            raise ValueError(f"{method} needs {needed}, {_MEANING[needed]}, got none")
    return lambda frequencies: METHODS[method](frequencies, factor, **settings)


@torch.no_grad()
def scale_frequencies(encoding: Encoding, scaling: Scaling, method: Method) -> None:
    """Scale the frequencies of an encoding in place.

    Args:
        encoding: Any for "interpolate", one with frequencies for other methods.
        scaling: From frequencies to frequencies; for "interpolate" from all numbers of generators alike.
        method: What the scaling is, or comes from.

    Raises:
        ValueError: an encoding without frequencies.
    """
    if isinstance(encoding, NoEncoding):
        return
    if isinstance(encoding, STRING):
        encoding.frequencies.copy_(scaling(_wide(encoding.frequencies)))
    elif encoding.block_size == 2:
        encoding.set_generators(planar(scaling(_wide(encoding.frequencies_per_axis()))))
    elif method == "interpolate":
        generators = _wide(encoding.generators())
        encoding.set_generators(scaling(generators.flatten(2)).reshape(generators.shape))
    else:
        rule = f"{_name(method)} scales frequencies, which blocks of 2 and STRING have"
        raise ValueError(f"{rule}; interpolate serves any encoding, got {encoding}")


def _name(method: object) -> str:
    """A method as it is written; a `functools.partial` is its function."""
    return method if isinstance(method, str) else getattr(getattr(method, "func", method), "__name__", repr(method))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor))


def _speed(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """How fast each pair turns, radians per unit along its direction, and whether it turns with an axis at all."""
    used = frequencies != 0
    return torch.where(used, frequencies.norm(dim=0), 1.0), used


def _factors(frequencies: Tensor, factor: PerAxis) -> Tensor:
    return _numbers(frequencies, "factor", factor)


def _numbers(frequencies: Tensor, name: str, value: PerAxis) -> Tensor:
    """One positive number per axis, `(axes, 1, 1)`."""
    return frequencies.new_tensor(positive(name, value, len(frequencies))).reshape(-1, 1, 1)


def positive(name: str, value: PerAxis, num_axes: int) -> tuple[float, ...]:
    """One number per axis, above 0 and finite; refuse others."""
    values = per_axis(name, value, num_axes)
    if not all(0 < each < math.inf for each in values):
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return values
