"""Frequencies for larger inputs than were trained on: functions on frequencies `(axes, heads or 1, pairs)`.

A larger input runs past the positions that a model has seen. Each function slows pairs of channels down, axis by axis,
so that what they do over the larger input resembles what they did over the training size.
"""

import copy
import math
from typing import Literal, TypeVar

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding, planar
from torchrope.encodings.string import STRING
from torchrope.positions import PerAxis, per_axis

AnyEncoding = TypeVar("AnyEncoding", bound=Encoding)


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


def extend(
    encoding: AnyEncoding,
    factor: PerAxis,
    *,
    method: Literal["interpolate", "ntk", "yarn"] = "ntk",
    train_size: PerAxis | None = None,
) -> AnyEncoding:
    """Copy an encoding for inputs that are longer than those trained on, its frequencies scaled axis by axis.

    Args:
        encoding: Any; "ntk" and "yarn" need frequencies, which blocks of 2 and `STRING` have, and "interpolate" divides
            any generators.
        factor: How many times longer the input is, one number or one per axis.
        method: The function on frequencies of this name.
        train_size: Extent of the training data in units of position, for "yarn".

    Returns:
        The copy; the encoding is left as it is.

    Raises:
        ValueError: an unknown method, "yarn" without train_size, an encoding without frequencies, a bad factor.

    Example:
        >>> import torchrope as tr
        >>> encoding = tr.AxialRoPE(num_axes=2, num_heads=4, head_dim=16)
        >>> extend(encoding, (1, 2)).frequencies[:, -2:].mul(1000).round().tolist()  # the slowest pairs
        [[32.0, 0.0], [0.0, 16.0]]
    """
    if method not in ("interpolate", "ntk", "yarn"):
        raise ValueError(f"method must be interpolate, ntk or yarn, got {method!r}")
    if method == "yarn" and train_size is None:
        raise ValueError("yarn needs train_size, the extent of the training data in units of position, got none")

    def scaled(frequencies: Tensor) -> Tensor:
        if method == "yarn":
            assert train_size is not None
            return yarn(frequencies, factor, train_size=train_size)
        return (interpolate if method == "interpolate" else ntk)(frequencies, factor)

    extended = copy.deepcopy(encoding)
    with torch.no_grad():
        if isinstance(extended, STRING):
            extended.frequencies.copy_(scaled(extended.frequencies))
        elif extended.block_size == 2:
            extended.set_generators(planar(scaled(extended.frequencies_per_axis())))
        elif method == "interpolate":
            flat = extended.generators().flatten(2)
            extended.set_generators(scaled(flat).reshape(extended.generators().shape))
        else:
            hint = "interpolate serves any encoding"
            raise ValueError(f"{method} scales frequencies, which blocks of 2 and STRING have; {hint}, got {encoding}")
    return extended


def _speed(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """How fast each pair turns, radians per unit along its direction, and whether it turns with an axis at all."""
    used = frequencies != 0
    return torch.where(used, frequencies.norm(dim=0), 1.0), used


def _factors(frequencies: Tensor, factor: PerAxis) -> Tensor:
    return _numbers(frequencies, "factor", factor)


def _numbers(frequencies: Tensor, name: str, value: PerAxis) -> Tensor:
    """One positive number per axis, `(axes, 1, 1)`."""
    values = per_axis(name, value, len(frequencies))
    if min(values) <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return frequencies.new_tensor(values).reshape(-1, 1, 1)
