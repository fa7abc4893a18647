"""Rotations: values. Sign and layout are stated here, once.

A vector x of `head_dim` channels is cut into consecutive blocks. A planar rotation turns channels (2i, 2i+1)
by the angle a_i, counter-clockwise:

    [y_2i  ]   [cos a  -sin a] [x_2i  ]           [0  -a]
    [y_2i+1] = [sin a   cos a] [x_2i+1]  = exp(   [a   0]   ) x

A block rotation multiplies channels [i b, (i+1) b) by an orthogonal b x b matrix. Channels beyond the rotated
ones (`rotary_dim` < `head_dim`) pass unchanged. Tokens are second to last, heads before them, as in q and k.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation(ABC):
    """What an encoding returns for positions: one rotation a head and token. Immutable.

    Attributes:
        table: The numbers it is made of, `(*batch, heads or 1, tokens, ...)`, float32 or float64.
        head_dim: Channels of a head, rotated or not.
        num_heads: Heads that it was made for; those of the table by default. A table of one head serves them all.
    """

    table: Tensor
    head_dim: int
    num_heads: int | None = None

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Number of channels that turn."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """`(*batch, heads or 1, tokens)` of the table: no batch where positions are shared, 1 where heads share."""

    @property
    def heads(self) -> int:
        """Heads that it was made for."""
        return self.shape[-2] if self.num_heads is None else self.num_heads

    def matrix(self) -> Tensor:
        """The same rotation as a dense matrix `(*batch, heads, tokens, head_dim, head_dim)`."""
        dense = block_diagonal(self._blocks(), self.head_dim)
        return dense.expand(*self.shape[:-2], self.heads, *dense.shape[-3:])

    @abstractmethod
    def _blocks(self) -> Tensor:
        """The matrices on the diagonal, `(*batch, heads or 1, tokens, num_blocks, b, b)`."""

    @abstractmethod
    def inverse(self) -> "Rotation":
        """The rotation that undoes this one:  R(p)^-1 = R(p)^T."""

    def to(self, *args: Any, **kwargs: Any) -> "Rotation":
        """The same rotation elsewhere; takes what `torch.Tensor.to` takes, but never narrows below float32."""
        table = self.table.to(*args, **kwargs)
        if table.dtype not in (torch.float32, torch.float64):
            table = self.table.to(table.device)
        return type(self)(table, self.head_dim, self.num_heads)


class Planar(Rotation):
    """Rotation of channel pairs; the table holds angles in radians, `(*batch, heads or 1, tokens, rotary_dim / 2)`."""

    @property
    def rotary_dim(self) -> int:
        return 2 * self.table.shape[-1]

    @property
    def shape(self) -> torch.Size:
        return self.table.shape[:-1]

    def _blocks(self) -> Tensor:
        cos, sin = self.table.cos(), self.table.sin()
        rows = [torch.stack([cos, -sin], dim=-1), torch.stack([sin, cos], dim=-1)]
        return torch.stack(rows, dim=-2)

    def inverse(self) -> "Planar":
        return Planar(-self.table, self.head_dim, self.num_heads)


class Block(Rotation):
    """Rotation of channel blocks; the table holds orthogonal matrices `(*batch, heads or 1, tokens, blocks, b, b)`."""

    @property
    def rotary_dim(self) -> int:
        return self.table.shape[-3] * self.table.shape[-1]

    @property
    def shape(self) -> torch.Size:
        return self.table.shape[:-3]

    def _blocks(self) -> Tensor:
        return self.table

    def inverse(self) -> "Block":
        return Block(self.table.mT, self.head_dim, self.num_heads)


def block_diagonal(blocks: Tensor, size: int) -> Tensor:
    """Lay blocks `(..., n, b, b)` on the diagonal of a `size` square; the diagonal left over is 1."""
    *batch, n, b, _ = blocks.shape
    dense = torch.eye(size, dtype=blocks.dtype, device=blocks.device).repeat(*batch, 1, 1)
    cells = dense[..., : n * b, : n * b].unflatten(-1, (n, b)).unflatten(-3, (n, b))  # (..., n, b, n, b)
    cells.diagonal(dim1=-4, dim2=-2).copy_(blocks.movedim(-3, -1))  # (..., b, b, n)
    return dense
