"""Numbers added to the attention scores: the base classes, and a learned number per head and offset."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.encodings.resample import resample_axis


class ScoreBias(nn.Module, ABC):
    """Base class of biases that are added to the attention scores of a lattice, per head.

    Args:
        sizes: Number of tokens along each axis at the training size.
        num_heads: Number of attention heads.

    Raises:
        ValueError: a size or num_heads below 1.
    """

    def __init__(self, *, sizes: Sequence[int], num_heads: int) -> None:
        super().__init__()
        if not sizes or min(sizes) < 1 or num_heads < 1:
            raise ValueError(f"sizes and num_heads must be 1 or more, got sizes {tuple(sizes)}, num_heads {num_heads}")
        self.sizes = tuple(sizes)
        self.num_heads = num_heads

    def reset_parameters(self) -> None:
        """Initialise the parameters, if any."""

    @abstractmethod
    def forward(self, *sizes: int, window: Sequence[int] | None = None) -> Tensor:
        """Return the bias of all pairs of tokens of a lattice, row-major like `torchrope.grid`.

        Args:
            sizes: Number of tokens along each axis.
            window: Number of tokens along each axis of a window, whose pairs are returned; the lattice by default.

        Returns:
            `(num_heads, prod(window), prod(window))`, queries before keys.

        Raises:
            ValueError: not one size per axis.
        """

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}, num_heads={self.num_heads}"

    def check_axes(self, sizes: Sequence[int]) -> None:
        """Raise ValueError unless there is one size per axis."""
        if len(sizes) != len(self.sizes):
            raise ValueError(f"{type(self).__name__} needs {len(self.sizes)} sizes, one per axis, got {len(sizes)}")


class OffsetBias(ScoreBias):
    """Base class of biases that depend on the offset of query and key alone."""

    @abstractmethod
    def by_offset(self, *sizes: int) -> Tensor:
        """Return the bias of each offset, query minus key, `(num_heads, 2 n_1 - 1, ..., 2 n_N - 1)` for sizes n.

        Index n_a - 1 of axis a is the offset 0.

        Raises:
            ValueError: not one size per axis.
        """

    def forward(self, *sizes: int, window: Sequence[int] | None = None) -> Tensor:
        table = self.by_offset(*sizes)
        part = tuple(sizes if window is None else window)
        for axis, (size, within) in enumerate(zip(sizes, part, strict=True), start=1):
            table = table.narrow(axis, size - within, 2 * within - 1)
        row = _row(part, table.device)
        return table.flatten(1)[:, row.unsqueeze(1) - row + table[0].numel() // 2]

    def score_mod(self, *sizes: int, prefix: int = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the bias as `score_mod` of FlexAttention, which stores a number per offset and none per pair.

        Args:
            sizes: Number of tokens along each axis.
            prefix: Class or register tokens in front, whose scores stay as they are.

        Returns:
            A function of (score, batch, head, query, key), as `torch.nn.attention.flex_attention` takes it.

        Raises:
            ValueError: not one size per axis.

        Example:
            >>> bias = RelativePositionBias(sizes=(4, 4), num_heads=2)
            >>> score, index = torch.zeros(()), torch.tensor
            >>> torch.equal(bias.score_mod(4, 4)(score, index(0), index(1), index(3), index(7)), bias(4, 4)[1, 3, 7])
            True
        """
        table = self.by_offset(*sizes).flatten(1)
        row = functional.pad(_row(sizes, table.device), (prefix, 0))
        centre = table.shape[1] // 2

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            biased = score + table[head, row[query] - row[key] + centre]
            return torch.where((query < prefix) | (key < prefix), score, biased) if prefix else biased

        return score_mod


class RelativePositionBias(OffsetBias):
    """Add a learned number per head and offset to the scores:  softmax(q^T k / √d + T[p - p']) v.

    At another lattice size, along each axis: with fewer tokens the biases of the remaining offsets are unchanged; with
    more the table is enlarged by cubic interpolation, as in Swin's code.

    References:
        Liu et al., Swin Transformer, equation 4. The table is flat as in their code: offsets p - p' of query and key,
        row-major from the most negative one.

    Example:
        >>> bias = RelativePositionBias(sizes=(7, 7), num_heads=3)
        >>> bias.table.shape, bias(7, 7).shape
        (torch.Size([169, 3]), torch.Size([3, 49, 49]))
    """

    def __init__(self, *, sizes: Sequence[int], num_heads: int) -> None:
        super().__init__(sizes=sizes, num_heads=num_heads)
        self.table = nn.Parameter(torch.empty(torch.Size(_spans(self.sizes)).numel(), num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from a normal distribution of standard deviation 0.02."""
        nn.init.trunc_normal_(self.table, std=0.02)

    def by_offset(self, *sizes: int) -> Tensor:
        return self.resampled(*sizes).unflatten(0, _spans(sizes)).movedim(-1, 0)

    def resampled(self, *sizes: int) -> Tensor:
        """Resample the table to a lattice of these sizes, `(offsets, num_heads)`."""
        self.check_axes(sizes)
        table = self.table.unflatten(0, _spans(self.sizes))
        for axis, (trained, size) in enumerate(zip(self.sizes, sizes, strict=True)):
            if size < trained:
                table = table.narrow(axis, trained - size, 2 * size - 1)
            elif size > trained:
                table = resample_axis(table, axis, 2 * size - 1, antialias=False)
        return table.flatten(0, -2)


def _spans(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of offsets -(s - 1) ... s - 1 along each axis."""
    return tuple(2 * size - 1 for size in sizes)


def _row(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers `(tokens,)` whose differences are flat indices of offsets, counted from the offset 0."""
    row = torch.zeros(tuple(sizes), dtype=torch.long, device=device)
    for axis, (size, span) in enumerate(zip(sizes, _spans(sizes), strict=True)):
        index = torch.arange(size, device=device)
        row = row * span + index.view([-1 if dim == axis else 1 for dim in range(len(sizes))])
    return row.flatten()
