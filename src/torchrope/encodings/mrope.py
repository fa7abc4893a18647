"""M-RoPE and its variants: one sequence of frequencies, with pairs or heads divided among time, height and width."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchrope.encodings.base import FixedShape
from torchrope.encodings.fixed import FixedFrequencies, OneAxisPerPair, geometric_sequence

Order = Literal["chunked", "interleaved", "video"]


class MRoPE(OneAxisPerPair):
    """Rotate each pair along one axis, one sequence of frequencies for all:  φ_j = p_{axis(j)} base^(-2j / rotary_dim).

    If all coordinates of a token are equal this is the RoPE of text. The axis of a pair depends on the order:

    - "chunked": the first pairs belong to axis 0, the next ones to axis 1, and so on, so that the first axis has the
      highest frequencies.
    - "interleaved": pair j belongs to axis a = j mod N while j < N sections_a, and to axis 0 beyond, so that every axis
      has high and low frequencies.
    - "video": the first pairs belong to axes 1 ... N - 1, interleaved, the last sections[0] pairs to axis 0, time,
      whose angles stay below one period over a video.

    Args:
        sections: Number of pairs of each axis, (time, height, width) in the papers, such as (16, 24, 24); by default as
            even as possible.
        order: Order in which the axes take the pairs; for "video" all spatial axes have equally many.
        base: Base of the geometric sequence of all frequencies.
        shape: Arguments of `FixedFrequencies`.

    Raises:
        ValueError: not one section per axis; sections that do not sum to the number of pairs or do not fit the order.

    References:
        Wang et al., Qwen2-VL, section 2.1 (chunked). Bai et al., Qwen3-VL technical report, section 2 (interleaved).
        There pair j is channels j and j + head_dim / 2, here 2j and 2j + 1. Wei et al., VideoRoPE: What Makes for Good
        Video Rotary Position Embedding?, arXiv:2502.05173 (video).

    Example:
        >>> for order in ("chunked", "interleaved", "video"):
        ...     MRoPE(num_axes=3, head_dim=16, sections=(4, 2, 2), order=order).axis_of_pair().tolist()
        [0, 0, 0, 0, 1, 1, 2, 2]
        [0, 1, 2, 0, 1, 2, 0, 0]
        [1, 2, 1, 2, 0, 0, 0, 0]
    """

    def __init__(
        self,
        *,
        sections: Sequence[int] | None = None,
        order: Order = "chunked",
        base: float = 10_000.0,
        **shape: Unpack[FixedShape],
    ) -> None:
        super().__init__(**shape)
        if order not in ("chunked", "interleaved", "video"):
            raise ValueError(f"order must be 'chunked', 'interleaved' or 'video', got {order!r}")
        self.order = order
        if sections is None:
            fewest, rest = divmod(self.num_blocks, self.num_axes)
            spatial = (fewest,) * (self.num_axes - 1)
            sections = (fewest + rest, *spatial) if order == "video" else even_sections(self.num_blocks, self.num_axes)
        self.sections = tuple(sections)
        if len(self.sections) != self.num_axes or sum(self.sections) != self.num_blocks or min(self.sections) < 0:
            rule = f"sections must be {self.num_axes} numbers of pairs with sum {self.num_blocks}"
            raise ValueError(f"{rule}, got {self.sections}")
        self._check_order()
        self.base = base
        self.reset_parameters()

    def axis_of_pair(self) -> Tensor:
        """Return the axis of each pair, `(pairs)`."""
        pair, axes, sections = torch.arange(self.num_blocks), torch.arange(self.num_axes), torch.tensor(self.sections)
        if self.order == "chunked":
            return axes.repeat_interleave(sections, output_size=self.num_blocks)
        if self.order == "interleaved":
            axis = pair % self.num_axes
            return torch.where(pair < self.num_axes * sections[axis], axis, 0)
        return torch.where(pair < self.num_blocks - self.sections[0], 1 + pair % max(self.num_axes - 1, 1), 0)

    def initial_frequencies(self) -> Tensor:
        theta = geometric_sequence(self.num_blocks, self.base)
        return theta * (self.axis_of_pair() == torch.arange(self.num_axes).unsqueeze(1))

    def _check_order(self) -> None:
        """Raise if the sections do not fit the order."""
        if self.order == "video" and len({*self.sections[1:]}) > 1:
            raise ValueError(f"spatial axes must have equal numbers of pairs, got sections {self.sections}")
        for axis in range(1, self.num_axes if self.order == "interleaved" else 0):
            most = len(range(axis, self.num_blocks, self.num_axes))
            if self.sections[axis] > most:
                rule = f"sections[{axis}] must be {most} or less to be interleaved"
                raise ValueError(f"{rule}, got sections {self.sections}")


def even_sections(total: int, num_axes: int) -> tuple[int, ...]:
    """Divide a number of pairs or heads among the axes, as evenly as possible."""
    return tuple(total // num_axes + (axis < total % num_axes) for axis in range(num_axes))


class MultiHeadRoPE(FixedFrequencies):
    """Rotate each head along one axis, with all frequencies:  φ_hj = p_{axis(h)} base^(-2j / rotary_dim).

    M-RoPE divides the frequencies among the axes; here every axis has all of them, in separate heads.

    Args:
        sections: Number of heads of each axis, (time, height, width) in the paper, such as (2, 3, 3), in order; by
            default as even as possible. Further heads are not rotated.
        base: Base of the geometric sequence of frequencies.
        shape: Arguments of `FixedFrequencies`; num_heads of N or more.

    Raises:
        ValueError: fewer heads than axes; not one section per axis; sections that sum to more than num_heads.

    References:
        Huang et al., Revisiting Multimodal Positional Encoding in Vision-Language Models, arXiv:2510.23095: Multi-Head
        RoPE. For grouped queries num_heads is the number of key heads.

    Example:
        >>> MultiHeadRoPE(num_axes=2, num_heads=3, head_dim=4).frequencies[0, :, 0].tolist()
        [1.0, 1.0, 0.0]
    """

    def __init__(
        self, *, sections: Sequence[int] | None = None, base: float = 10_000.0, **shape: Unpack[FixedShape]
    ) -> None:
        super().__init__(**shape)
        axes, heads = self.num_axes, self.num_heads
        if heads < axes:
            raise ValueError(f"num_heads of MHRoPE must be num_axes = {axes} or more, got {heads}")
        self.sections = even_sections(heads, axes) if sections is None else tuple(sections)
        if len(self.sections) != axes or sum(self.sections) > heads or min(self.sections) < 0:
            raise ValueError(f"sections must be {axes} numbers of heads with sum {heads} or less, got {self.sections}")
        self.base = base
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        ends = torch.tensor(self.sections).cumsum(0)
        axis_of_head = torch.searchsorted(ends, torch.arange(self.num_heads), right=True)  # num_axes for further heads
        turned = axis_of_head == torch.arange(self.num_axes).unsqueeze(1)  # (axes, heads)
        return geometric_sequence(self.num_blocks, self.base) * turned.unsqueeze(-1)
