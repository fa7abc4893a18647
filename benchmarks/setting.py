"""Shape, dtype and device of queries and keys, and the positions of their tokens. Does not import torch."""

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True)
class Setting:
    """Shape, dtype and device of queries and keys `(batch, heads, tokens, head_dim)`, and their positions.

    Tokens are on the lattice whose sizes are closest to equal, after one token at the origin if the lattice of the
    other tokens is then closer to a cube: 65 tokens with two axes are one token and 8x8, 64 are 8x8.

    `dtype` is that of q and k; parameters and angles stay float32 or wider.
    """

    batch: int = 8
    heads: int = 12
    tokens: int = 65
    head_dim: int = 64
    axes: int = 2
    dtype: Dtype = "float32"
    device: Device = "cpu"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of q and k."""
        return self.batch, self.heads, self.tokens, self.head_dim

    @property
    def lattice(self) -> tuple[int, ...]:
        """Tokens along each axis, without the prefix."""
        return nearest_to_cube(self.tokens - self.prefix, self.axes)

    @property
    def prefix(self) -> int:
        """Number of tokens at the origin before those of the lattice, 0 or 1."""
        return min(range(min(2, self.tokens)), key=lambda count: _elongation(self.tokens - count, self.axes))

    def describe(self) -> str:
        """Describe the setting in words."""
        lattice = "×".join(map(str, self.lattice)) + (" and one at the origin in front" if self.prefix else "")
        shape = f"batch {self.batch}, {self.heads} heads of {self.head_dim}, {self.tokens} tokens"
        return f"{shape} with {self.axes} axes, {self.dtype}, {self.device}, tokens on a lattice of {lattice}"


def nearest_to_cube(tokens: int, axes: int) -> tuple[int, ...]:
    """Factor a number of tokens into one size per axis, as nearly equal as they can be: 24 on three axes is 2x3x4."""
    if axes == 1:
        return (tokens,)
    divisors = (size for size in range(1, tokens + 1) if tokens % size == 0)
    factorings = ((size, *nearest_to_cube(tokens // size, axes - 1)) for size in divisors)
    return min(factorings, key=lambda sizes: max(sizes) / min(sizes))


def _elongation(tokens: int, axes: int) -> float:
    """Compute the ratio of the largest to the smallest size of the lattice closest to a cube; 1 for a cube."""
    sizes = nearest_to_cube(tokens, axes)
    return max(sizes) / min(sizes)
