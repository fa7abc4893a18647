"""Biases that depend on the distance of query and key: ALiBi and FIRE, on any number of axes."""

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.encodings.bias import OffsetBias
from torchrope.tensors import exact_matmul, require_counts, without_autocast


def offsets_of(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return the offsets of a lattice, `(2 n_1 - 1, ..., 2 n_N - 1, axes)`, in the dtype of another tensor."""
    along = [torch.arange(1 - size, size, device=like.device, dtype=like.dtype) for size in sizes]
    return torch.stack(torch.meshgrid(*along, indexing="ij"), dim=-1)


class DistanceBias(OffsetBias):
    """Base class of biases that are functions of the Euclidean distance, also of points."""

    @abstractmethod
    def of_distance(self, distance: Tensor) -> Tensor:
        """Return the bias of distances of any shape, `(num_heads, *distance.shape)`.

        For points `(n, axes)` these are `torch.cdist(points, points)`, in the unit in which neighbouring tokens of the
        training lattice are 1 apart.
        """

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor with the device and dtype of the bias."""

    def by_offset(self, *sizes: int) -> Tensor:
        self.check_axes(sizes)
        return self.of_distance(offsets_of(sizes, self.like).norm(dim=-1))


class ALiBi(DistanceBias):
    """Subtract a multiple of the distance from the scores:  softmax(q^T k / √d - m_h ‖p - p'‖) v.

    Slopes m_h are 2^(-8 h / H), h = 1 ... H, for H heads, H a power of 2; for other numbers of heads the slopes of the
    next lower power of 2, followed by every other one of the next higher. Nothing is learned; any size works.

    References:
        Press et al., Train Short, Test Long, ICLR 2022, arXiv:2108.12409, with one axis and causal attention; the
        Euclidean distance of patches of an image as in Fuller et al., CROMA, NeurIPS 2023, arXiv:2311.00566.

    Example:
        >>> ALiBi(sizes=(1, 3), num_heads=2)(1, 3)[0].tolist()  # in steps of 2^-4
        [[-0.0, -0.0625, -0.125], [-0.0625, -0.0, -0.0625], [-0.125, -0.0625, -0.0]]
    """

    _anchor: Tensor

    def __init__(self, *, sizes: Sequence[int], num_heads: int) -> None:
        super().__init__(sizes=sizes, num_heads=num_heads)
        # Empty; it follows the model to its device and dtype.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    @property
    def slopes(self) -> Tensor:
        """Slopes m_h `(num_heads,)`, computed at each use, so that no file or loader has to restore them."""
        power = 2 ** int(math.log2(self.num_heads))
        head = torch.arange(self.num_heads, device=self.like.device, dtype=self.like.dtype)
        return 2 ** (torch.where(head < power, head + 1, head - power + 0.5) * (-8 / power))

    @property
    def like(self) -> Tensor:
        return self._anchor

    def of_distance(self, distance: Tensor) -> Tensor:
        return -self.slopes.view(-1, *(1 for _ in distance.shape)) * distance


class FIRE(DistanceBias):
    """Add a learned function of the distance, relative to the largest one, to the scores:

        b_h(p, p') = f_h( log(c ‖p - p'‖ + 1) / log(c max(P, L) + 1) ),

    f an MLP of one number with `hidden_dim` units and a ReLU, c > 0 and L > 0 learned, P the largest distance in the
    input. Up to P = L the bias of an offset is the same at every size; beyond, the function is stretched.

    With one axis and causal attention P is the position of the query in the paper; here keys lie on all sides. c and L
    are positive as c = exp(`log_scale`) and L = `train_distance` exp(`log_threshold`).

    Args:
        sizes: As of `ScoreBias`.
        num_heads: As of `ScoreBias`.
        hidden_dim: Units of the MLP.

    Raises:
        ValueError: hidden_dim below 1.

    References:
        Li et al., Functional Interpolation for Relative Positions Improves Long Context Transformers, ICLR 2024,
        arXiv:2310.04418.

    Example:
        >>> FIRE(sizes=(7, 7), num_heads=3)(9, 9).shape
        torch.Size([3, 81, 81])
    """

    def __init__(self, *, sizes: Sequence[int], num_heads: int, hidden_dim: int = 32) -> None:
        super().__init__(sizes=sizes, num_heads=num_heads)
        require_counts(hidden_dim=hidden_dim)
        self.hidden_dim = hidden_dim
        self.train_distance = max(math.hypot(*(size - 1 for size in self.sizes)), 1.0)
        self.log_scale = nn.Parameter(torch.empty(()))
        self.log_threshold = nn.Parameter(torch.empty(()))
        self.inner = nn.Linear(1, hidden_dim)
        self.outer = nn.Linear(hidden_dim, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with c = 0.1, L the largest distance in training, and torch's initialisation of linear layers."""
        nn.init.constant_(self.log_scale, math.log(0.1))
        nn.init.zeros_(self.log_threshold)
        self.inner.reset_parameters()
        self.outer.reset_parameters()

    @property
    def like(self) -> Tensor:
        return self.log_scale

    def of_distance(self, distance: Tensor) -> Tensor:
        scale = self.log_scale.exp()
        threshold = self.train_distance * self.log_threshold.exp()
        largest = distance.detach().max() if distance.numel() else distance.new_zeros(())
        share = torch.log1p(scale * distance) / torch.log1p(scale * torch.maximum(largest, threshold))
        hidden = functional.relu(share.unsqueeze(-1) * self.inner.weight[:, 0] + self.inner.bias)
        with without_autocast(hidden):
            return (exact_matmul(hidden, self.outer.weight.mT) + self.outer.bias).movedim(-1, 0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden_dim={self.hidden_dim}"
