"""The rotations of diffusers' transformers: their frequencies, and where the tokens of a call are.

These models turn q and k by tables of cosines and sines that one module makes in each call, or that the caller gives.
A table says where its tokens are: `positions_in` reads positions from it, so that whatever that module does with frame
rates, offsets of the text or several images holds for a swapped model too.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Pairs of neighbouring steps in `positions_in` differ by no more than this: an angle of float32 tables, known to
# 1e-7, then predicts the next one to 1e-4, far less than half a turn.
_LARGEST_STEP = 1000.0

Ladders = Sequence[Sequence[float]]
"""Of each axis the frequencies of all pairs, 0 where a pair is another axis's."""


@dataclass(frozen=True)
class Streams:
    """Positions `(..., tokens, axes)` of the tokens that one attention layer rotates.

    Attributes:
        own: Those behind `norm_q` and `norm_k`.
        added: Those behind `norm_added_q` and `norm_added_k`, the text's where it has projections of its own.
    """

    own: Tensor
    added: Tensor | None = None


@dataclass(frozen=True)
class Family:
    """How the models of one class rotate.

    Attributes:
        layers: Attention layers that rotate, in order: the name of a list of blocks, and of the layer in each block.
        frequencies: From a model to `(axes, heads or 1, pairs)`, radians per unit of its positions.
        rope: Name of the module that makes the tables; None where the caller of the model gives them.
        positions: From that module, its arguments, its output and the frequencies to what is handed on in place of
            the output: positions where tables were.
        streams: From what a layer got in place of tables and the number of tokens of its `encoder_hidden_states`, 0
            without, to the positions of its tokens.
        argument: Name of the tables among a layer's arguments; the fourth where it has none.
        heads_first: Whether the norms get `(batch, heads, tokens, head_dim)`; otherwise tokens come before heads, or
            heads are not apart.
        across_halves: Whether pair j is channels j and j + head_dim / 2; neighbours otherwise.
        coarse: Whether angles are so large that float32 rounds them visibly: up to 15,708 radians to 5e-4 in LTX.
            Products in another order than the model's would then change its outputs by 4e-5 of their spread.
    """

    layers: tuple[tuple[str, str], ...]
    frequencies: Callable[[Any], Tensor]
    rope: str | None
    positions: Callable[[Any, tuple[Any, ...], Any, Ladders], Any]
    streams: Callable[[Any, Any, int], Streams]
    argument: str = "image_rotary_emb"
    heads_first: bool = False
    across_halves: Callable[[Any], bool] = lambda tower: False
    coarse: bool = False


def heads_of(tower: Any) -> tuple[int, int]:
    """Key heads of a model's attention layers, and the channels of a head."""
    config = tower.config
    if "hidden_size" in config:  # Lumina2
        return config.num_kv_heads, config.hidden_size // config.num_attention_heads
    return config.num_attention_heads, config.attention_head_dim


def positions_in(table: tuple[Tensor, Tensor], frequencies: Ladders) -> Tensor:
    """Positions of tokens, from the cosines and sines of their angles  a_j = p_axis f_j,  where f of an axis differ.

    An angle is known up to whole turns. The slowest pair of an axis is taken to stay within half a turn; it says
    about where a token is, each faster pair more exactly:  p = (a_j + 2 pi n) / f_j  with n nearest to the last p.

    Args:
        table: cos and sin, `(..., tokens, pairs)`.
        frequencies: Of each axis those of all pairs, 0 where a pair is another axis's.

    Returns:
        `(..., tokens, axes)`, exact to the rounding of the table over the largest frequency, for
        |p| < pi / (the smallest frequency of the axis).
    """
    cos, sin = table
    wide = torch.float32 if cos.device.type == "mps" else torch.float64
    angles = torch.atan2(sin.to(wide), cos.to(wide))
    return torch.stack([_along(angles, axis) for axis in frequencies], dim=-1)


def _along(angles: Tensor, frequencies: Sequence[float]) -> Tensor:
    """Positions `(..., tokens)` along one axis."""
    slowest, *faster = _ladder_up(frequencies)
    positions = angles[..., slowest] / frequencies[slowest]
    for pair in faster:
        turns = ((positions * frequencies[pair] - angles[..., pair]) / (2 * math.pi)).round()
        positions = (angles[..., pair] + 2 * math.pi * turns) / frequencies[pair]
    return positions


def _ladder_up(frequencies: Sequence[float]) -> list[int]:
    """Pairs from the slowest to the fastest, in steps as few as `_LARGEST_STEP` lets them be."""
    ordered = sorted((pair for pair, f in enumerate(frequencies) if f), key=lambda pair: frequencies[pair])
    chosen = ordered[:1]
    for pair, faster in itertools.pairwise(ordered[1:]):
        if frequencies[faster] > _LARGEST_STEP * frequencies[chosen[-1]]:
            chosen.append(pair)
    return [*chosen, *(pair for pair in ordered[-1:] if pair != chosen[-1])]


def from_neighbours(table: Any) -> tuple[Tensor, Tensor]:
    """cos and sin `(..., pairs)` of a table that repeats them for both channels of a pair."""
    cos, sin = table
    return cos[..., ::2], sin[..., ::2]


def from_halves(table: Any) -> tuple[Tensor, Tensor]:
    """cos and sin `(..., pairs)` of a table that repeats them for both halves of a head."""
    cos, sin = table
    return cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]


def from_complex(table: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of a table of complex numbers."""
    return table.real, table.imag


def _ladder(bases: Sequence[float], dims: Sequence[int]) -> Tensor:
    """Frequencies  base^(-2 j / dim)  of dim / 2 pairs for each axis, one axis behind the other: `(axes, 1, pairs)`."""
    bands = [
        1 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim) for base, dim in zip(bases, dims, strict=True)
    ]
    return torch.block_diag(*bands).unsqueeze(1)


def _of_rope(name: str, dims: str) -> Callable[[Any], Tensor]:
    """Frequencies by the base and the channels of each axis that a model's rotary embedding holds."""

    def frequencies(tower: Any) -> Tensor:
        rope = getattr(tower, name)
        channels = getattr(rope, dims)
        return _ladder([rope.theta] * len(channels), channels)

    return frequencies


def _of_wan(tower: Any) -> Tensor:
    rope = tower.rope  # built with the base of its default, which it does not keep
    return _ladder([10000.0] * 3, (rope.t_dim, rope.h_dim, rope.w_dim))


def _of_cosmos(tower: Any) -> Tensor:
    rope = tower.rope
    grown = (rope.t_ntk_factor, rope.h_ntk_factor, rope.w_ntk_factor)
    return _ladder([10000.0 * factor for factor in grown], (rope.dim_t, rope.dim_h, rope.dim_w))


def _of_cogvideox(tower: Any) -> Tensor:
    """As `get_3d_rotary_pos_embed` makes them, a quarter of the channels for time."""
    head_dim = tower.config.attention_head_dim
    return _ladder([10000.0] * 3, (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3))


def _of_ltx(tower: Any) -> Tensor:
    """A ladder through all heads, its axes in turn, behind pairs at rest: in float32, as the model computes angles."""
    rope, (heads, _) = tower.rope, heads_of(tower)
    steps = torch.linspace(0.0, 1.0, rope.dim // 6, dtype=_ltx_dtype(rope))
    band = (torch.pow(rope.theta, steps) * math.pi / 2).float()
    turning = torch.stack([torch.kron(band, one) for one in torch.eye(3)])  # (axes, 3 steps)
    resting = turning.new_zeros(3, rope.dim // 2 - turning.shape[-1])
    return torch.cat([resting, turning], dim=-1).unflatten(-1, (heads, -1))


def _ltx_dtype(rope: Any) -> torch.dtype:
    return torch.float64 if getattr(rope, "double_precision", False) else torch.float32


def _of_ids(rope: Any, args: tuple[Any, ...], table: Any, frequencies: Ladders) -> Any:
    """Flux: the module gets the positions themselves. Twice, for Flux 2 joins cosines and sines apart."""
    positions = args[0].float()
    return positions, positions


def _in_coordinates(rope: Any, args: tuple[Any, ...], table: Any, frequencies: Ladders) -> Tensor:
    """LTX-2: coordinates `(batch, axes, tokens)`, or both ends of each patch; the model has them from -1 to 1."""
    coordinates = args[0]
    if coordinates.ndim == 4:
        first, last = coordinates.chunk(2, dim=-1)
        coordinates = ((first + last) / 2.0).squeeze(-1)
    extents = (rope.base_num_frames, rope.base_height, rope.base_width)
    return torch.stack([coordinates[:, axis] / extent for axis, extent in enumerate(extents)], dim=-1) * 2 - 1


def _on_lattice(rope: Any, args: tuple[Any, ...], table: Any, frequencies: Ladders) -> Tensor:
    """LTX-Video: a lattice of frames, rows and columns with a scale for each, or coordinates as LTX-2's."""
    tokens, frames, height, width, scale, coordinates = args
    if coordinates is not None:
        return _in_coordinates(rope, (coordinates,), table, frequencies)
    places: Tensor = rope._prepare_video_coords(tokens.shape[0], frames, height, width, scale, tokens.device)
    return places * 2 - 1


def _read(
    take: Callable[[Any], tuple[Tensor, Tensor]],
) -> Callable[[Any, tuple[Any, ...], Any, Ladders], Tensor]:
    """Positions from the one table of a call."""
    return lambda rope, args, table, frequencies: positions_in(take(table), frequencies)


def _read_two(rope: Any, args: tuple[Any, ...], tables: Any, frequencies: Ladders) -> Any:
    """Qwen-Image: a table for the image and one for the text."""
    return tuple(positions_in(from_complex(table), frequencies) for table in tables)


def _read_wan(rope: Any, args: tuple[Any, ...], table: Any, frequencies: Ladders) -> Tensor:
    cos, sin = from_neighbours(table)  # (1, tokens, 1, pairs)
    return positions_in((cos.squeeze(2), sin.squeeze(2)), frequencies)


def _read_lumina(rope: Any, args: tuple[Any, ...], output: Any, frequencies: Ladders) -> Any:
    """Lumina 2: tables of the caption, of the image and of both, between other outputs."""
    tokens, *tables, captions, both = output
    return tokens, *(positions_in(from_complex(table), frequencies) for table in tables), captions, both


def _all_alike(came: Any, layer: Any, others: int) -> Streams:
    """Every token behind `norm_q` has its position."""
    return Streams(came)


def _text_first(came: Any, layer: Any, others: int) -> Streams:
    """Flux: positions of the text before those of the image; some layers have a norm for each."""
    positions = came[0]
    if others and getattr(layer, "norm_added_q", None) is not None:
        return Streams(positions[..., others:, :], positions[..., :others, :])
    return Streams(positions)


def _apart(came: Any, layer: Any, others: int) -> Streams:
    """Qwen-Image: positions of the image, and those of the text."""
    return Streams(*came)


def _text_behind_at_rest(came: Any, layer: Any, others: int) -> Streams:
    """HunyuanVideo: text does not turn; where it shares the norms of the image it comes behind."""
    at_rest = _at_rest(came, others)
    if getattr(layer, "norm_added_q", None) is None:
        return Streams(torch.cat([came, at_rest], dim=-2))
    return Streams(came, at_rest)


def _text_first_at_rest(came: Any, layer: Any, others: int) -> Streams:
    """CogVideoX: text does not turn, and comes first."""
    return Streams(torch.cat([_at_rest(came, others), came], dim=-2))


def _at_rest(positions: Tensor, tokens: int) -> Tensor:
    """Positions of tokens that do not turn, beside others."""
    return positions.new_zeros(*positions.shape[:-2], tokens, positions.shape[-1])


FAMILIES: dict[str, Family] = {
    "CogVideoXTransformer3DModel": Family(
        layers=(("transformer_blocks", "attn1"),),
        frequencies=_of_cogvideox,
        rope=None,
        positions=_read(from_neighbours),
        streams=_text_first_at_rest,
        heads_first=True,
    ),
    "CosmosTransformer3DModel": Family(
        layers=(("transformer_blocks", "attn1"),),
        frequencies=_of_cosmos,
        rope="rope",
        positions=_read(from_halves),
        streams=_all_alike,
        heads_first=True,
        across_halves=lambda tower: True,
    ),
    "Flux2Transformer2DModel": Family(
        layers=(("transformer_blocks", "attn"), ("single_transformer_blocks", "attn")),
        frequencies=_of_rope("pos_embed", "axes_dim"),
        rope="pos_embed",
        positions=_of_ids,
        streams=_text_first,
    ),
    "FluxTransformer2DModel": Family(
        layers=(("transformer_blocks", "attn"), ("single_transformer_blocks", "attn")),
        frequencies=_of_rope("pos_embed", "axes_dim"),
        rope="pos_embed",
        positions=_of_ids,
        streams=_text_first,
    ),
    "HunyuanVideoTransformer3DModel": Family(
        layers=(("transformer_blocks", "attn"), ("single_transformer_blocks", "attn")),
        frequencies=_of_rope("rope", "rope_dim"),
        rope="rope",
        positions=_read(from_neighbours),
        streams=_text_behind_at_rest,
    ),
    "LTX2VideoTransformer3DModel": Family(
        layers=(("transformer_blocks", "attn1"),),
        frequencies=_of_ltx,
        rope="rope",
        positions=_in_coordinates,
        streams=_all_alike,
        argument="query_rotary_emb",
        across_halves=lambda tower: tower.rope.rope_type == "split",
        coarse=True,
    ),
    "LTXVideoTransformer3DModel": Family(
        layers=(("transformer_blocks", "attn1"),),
        frequencies=_of_ltx,
        rope="rope",
        positions=_on_lattice,
        streams=_all_alike,
        coarse=True,
    ),
    "Lumina2Transformer2DModel": Family(
        layers=(("context_refiner", "attn"), ("noise_refiner", "attn"), ("layers", "attn")),
        frequencies=_of_rope("rope_embedder", "axes_dim"),
        rope="rope_embedder",
        positions=_read_lumina,
        streams=_all_alike,
    ),
    "QwenImageTransformer2DModel": Family(
        layers=(("transformer_blocks", "attn"),),
        frequencies=_of_rope("pos_embed", "axes_dim"),
        rope="pos_embed",
        positions=_read_two,
        streams=_apart,
    ),
    "WanTransformer3DModel": Family(
        layers=(("blocks", "attn1"),),
        frequencies=_of_wan,
        rope="rope",
        positions=_read_wan,
        streams=_all_alike,
        argument="rotary_emb",
    ),
}
"""By the names of the classes: importing them takes seconds."""
