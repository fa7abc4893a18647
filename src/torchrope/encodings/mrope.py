"""M-RoPE and its variants: one sequence of frequencies, with pairs or heads divided among time, height and width."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrope.encodings.fixed import FixedFrequencies, OneAxisPerPair


class MRoPE(OneAxisPerPair):
    """Rotate each pair along one axis, one sequence of frequencies for all:  a_j = p_{axis(j)} base^(-2j / rotary_dim).

    Chunked: the first pairs belong to axis 0, the next ones to axis 1, and so on, so that the first axis has the
    highest frequencies. If all coordinates of a token are equal this is the RoPE of text.

    Args:
        num_axes: Number of axes of a position, N; (time, height, width) in the papers.
        num_heads: Number of attention heads.
        head_dim: Channels per head, even.
        sections: Number of pairs of each axis, such as (16, 24, 24); by default as even as possible.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Heads share fixed frequencies in any case; True returns `generators` for one head.
        base: Base of the geometric sequence of all frequencies.

    Raises:
        ValueError: not one section per axis; sections that do not sum to the number of pairs or do not fit the variant.

    References:
        Wang et al., Qwen2-VL, section 2.1 (multimodal rotary position embedding). There pair j is channels j and
        j + head_dim / 2, here 2j and 2j + 1.

    Example:
        >>> MRoPE(num_axes=3, num_heads=1, head_dim=16, sections=(2, 3, 3)).axis_of_pair().tolist()
        [0, 0, 1, 1, 1, 2, 2, 2]
    """

    title = "M-RoPE"
    formula = "angle of pair j = p_{axis(j)} · base^(−j/n) fixed,  axes in consecutive sections"
    summary = "RoPE of text with its frequencies split into sections, one per axis; fixed frequencies."
    source = "Wang et al., Qwen2-VL, section 2.1"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        sections: Sequence[int] | None = None,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        base: float = 10_000.0,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        pairs = self.num_blocks
        self.sections = self._even_sections() if sections is None else tuple(sections)
        if len(self.sections) != num_axes or sum(self.sections) != pairs or min(self.sections) < 0:
            rule = f"sections must be {num_axes} numbers of pairs with sum {pairs}"
            raise ValueError(f"{rule}, got {self.sections}")
        self.base = base
        self._check_sections()
        self.reset_parameters()

    def axis_of_pair(self) -> Tensor:
        """Return the axis of each pair, `(pairs)`."""
        return torch.arange(self.num_axes).repeat_interleave(torch.tensor(self.sections), output_size=self.num_blocks)

    def initial_frequencies(self) -> Tensor:
        pair = torch.arange(self.num_blocks)
        theta = self.base ** -(pair.double() / max(self.num_blocks, 1))
        own_axis = self.axis_of_pair() == torch.arange(self.num_axes).unsqueeze(1)
        return theta * own_axis

    def _even_sections(self) -> tuple[int, ...]:
        pairs = self.num_blocks
        return tuple(pairs // self.num_axes + (axis < pairs % self.num_axes) for axis in range(self.num_axes))

    def _check_sections(self) -> None:
        """Raise if the sections do not fit the variant."""


class InterleavedMRoPE(MRoPE):
    """Interleave the pairs of the axes of M-RoPE, so that every axis has high and low frequencies.

    Pair j belongs to axis a = j mod N while j < N sections_a, and to axis 0 beyond.

    Args:
        num_axes: Number of axes of a position, N; (time, height, width) in the papers.
        num_heads: Number of attention heads.
        head_dim: Channels per head, even.
        sections: Number of pairs of each axis, such as (24, 20, 20); by default as even as possible.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Heads share fixed frequencies in any case; True returns `generators` for one head.
        base: Base of the geometric sequence of all frequencies.

    Raises:
        ValueError: not one section per axis; sections that do not sum to the number of pairs, or with more
            pairs than interleaving gives their axis.

    References:
        Bai et al., Qwen3-VL technical report, section 2 (interleaved MRoPE); transformers' `qwen3_vl`.

    Example:
        >>> InterleavedMRoPE(num_axes=3, num_heads=1, head_dim=16, sections=(4, 2, 2)).axis_of_pair().tolist()
        [0, 1, 2, 0, 1, 2, 0, 0]
    """

    title = "M-RoPE, interleaved"
    formula = "angle of pair j = p_{axis(j)} · base^(−j/n) fixed,  axes interleaved"
    summary = "M-RoPE with interleaved axes, so that each has high and low frequencies; fixed."
    source = "Bai et al., Qwen3-VL technical report"

    def axis_of_pair(self) -> Tensor:
        pair = torch.arange(self.num_blocks)
        axis = pair % self.num_axes
        within = pair < self.num_axes * torch.tensor(self.sections)[axis]
        return torch.where(within, axis, 0)

    def _check_sections(self) -> None:
        for axis in range(1, self.num_axes):
            most = len(range(axis, self.num_blocks, self.num_axes))
            if self.sections[axis] > most:
                rule = f"sections[{axis}] must be {most} or less to be interleaved"
                raise ValueError(f"{rule}, got sections {self.sections}")


class VideoRoPE(MRoPE):
    """Assign the high frequencies of M-RoPE to the spatial axes, interleaved, and the lowest ones to time.

    The first pairs belong to axes 1 ... N - 1, interleaved, the last sections[0] pairs to axis 0, whose angles stay
    below one period over a video. `torchrope.diagonal` returns the positions that the paper combines it with.

    Args:
        num_axes: Number of axes of a position, N; (time, height, width) in the paper.
        num_heads: Number of attention heads.
        head_dim: Channels per head, even.
        sections: Number of pairs of each axis, such as (16, 24, 24), equal for all spatial axes; by default as even as
            possible.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Heads share fixed frequencies in any case; True returns `generators` for one head.
        base: Base of the geometric sequence of all frequencies.

    Raises:
        ValueError: not one section per axis; sections that do not sum to the number of pairs or differ in space.

    References:
        Wei et al., VideoRoPE: What Makes for Good Video Rotary Position Embedding?, arXiv:2502.05173: low-frequency
        temporal allocation.

    Example:
        >>> VideoRoPE(num_axes=3, num_heads=1, head_dim=16, sections=(4, 2, 2)).axis_of_pair().tolist()
        [1, 2, 1, 2, 0, 0, 0, 0]
    """

    title = "VideoRoPE"
    formula = "angle of pair j = p_{axis(j)} · base^(−j/n) fixed,  space interleaved first, time last"
    summary = "M-RoPE with the high frequencies interleaved among spatial axes, the lowest ones for time; fixed."
    source = "Wei et al., VideoRoPE, arXiv:2502.05173"

    def _even_sections(self) -> tuple[int, ...]:
        spatial, num_spatial = self.num_blocks // self.num_axes, self.num_axes - 1
        return (self.num_blocks - spatial * num_spatial, *(spatial for _ in range(num_spatial)))

    def axis_of_pair(self) -> Tensor:
        pair, space = torch.arange(self.num_blocks), max(self.num_axes - 1, 1)
        return torch.where(pair < self.num_blocks - self.sections[0], 1 + pair % space, 0)

    def _check_sections(self) -> None:
        if len({*self.sections[1:]}) > 1:
            raise ValueError(f"spatial axes must have equal numbers of pairs, got sections {self.sections}")


class MultiHeadRoPE(FixedFrequencies):
    """Rotate each head along one axis, with all frequencies:  a_hj = p_{axis(h)} base^(-2j / rotary_dim).

    M-RoPE divides the frequencies among the axes; here every axis has all of them, in separate heads.

    Args:
        num_axes: Number of axes of a position, N; (time, height, width) in the paper.
        num_heads: Attention heads, N or more.
        head_dim: Channels per head, even.
        sections: Number of heads of each axis, such as (2, 3, 3), in order; by default as even as possible. Further
            heads are not rotated.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        base: Base of the geometric sequence of frequencies.

    Raises:
        ValueError: fewer heads than axes; not one section per axis; sections that sum to more than num_heads.

    References:
        Huang et al., Revisiting Multimodal Positional Encoding in Vision-Language Models, arXiv:2510.23095: Multi-Head
        RoPE. For grouped queries num_heads is the number of key heads.

    Example:
        >>> MultiHeadRoPE(num_axes=2, num_heads=3, head_dim=4).frequencies[0, :, 0].tolist()
        [1.0, 1.0, 0.0]
    """

    title = "MHRoPE"
    formula = "angle of pair j, head h = p_{axis(h)} · base^(−j/n) fixed"
    summary = "Each head rotates along one axis, with all frequencies; fixed."
    source = "Huang et al., Revisiting Multimodal Positional Encoding, arXiv:2510.23095"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        sections: Sequence[int] | None = None,
        rotary_dim: int | None = None,
        base: float = 10_000.0,
    ) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, rotary_dim=rotary_dim)
        if num_heads < num_axes:
            raise ValueError(f"num_heads of MHRoPE must be num_axes = {num_axes} or more, got {num_heads}")
        even = tuple(num_heads // num_axes + (axis < num_heads % num_axes) for axis in range(num_axes))
        self.sections = even if sections is None else tuple(sections)
        if len(self.sections) != num_axes or sum(self.sections) > num_heads or min(self.sections) < 0:
            rule = f"sections must be {num_axes} numbers of heads with sum {num_heads} or less"
            raise ValueError(f"{rule}, got {self.sections}")
        self.base = base
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        theta = self.base ** -(torch.arange(self.num_blocks).double() / max(self.num_blocks, 1))
        frequencies = torch.zeros(self._buffer_shape, dtype=torch.float64)
        first = 0
        for axis, heads in enumerate(self.sections):
            frequencies[axis, first : first + heads] = theta
            first += heads
        return frequencies
