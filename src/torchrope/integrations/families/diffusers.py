"""Transformers of diffusers that `swap` supports: diffusion models of images and videos with built-in RoPE."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.integrations.family import AttentionShape, BuiltInRotation, ModelFamily
from torchrope.integrations.interception import AfterNorms
from torchrope.integrations.own_rotation import OwnRotation, exact, halves, interleaved
from torchrope.integrations.rotary import Replaced, Rotary
from torchrope.integrations.sources import Arguments, FromArgument, argument, with_argument
from torchrope.positions import grid, prefix

_NORMS, _OTHER_NORMS = ("norm_q", "norm_k"), ("norm_added_q", "norm_added_k")


def _heads(tower: Any) -> tuple[int, int]:
    config = tower.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "attention_head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    return key_heads, head_dim


def _geometric(dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return frequencies theta^(-2 j / dim) `(dim / 2,)`, computed in the dtype that the model uses."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype, device="cpu") / dim)


def _one_axis_per_pair(dims: Sequence[int], thetas: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return frequencies `(axes, 1, pairs)`; the first pairs rotate along the first axis, and so on."""
    ladders = [_geometric(dim, theta, dtype).unsqueeze(0) for dim, theta in zip(dims, thetas, strict=True)]
    return torch.block_diag(*ladders).unsqueeze(1)


def _first(received: Any, layer: Any, others: int) -> tuple[Tensor, None]:
    """Return positions stored in place of a pair of tables."""
    return received[0], None


def _identity(received: Tensor, layer: Any, others: int) -> tuple[Tensor, None]:
    return received, None


def _pair(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions in place of both the cosine table and the sine table."""
    return positions, positions


# Flux and Flux2: coordinates of text and image tokens come from the caller.


def _flux_rope(tower: Any) -> Any:
    return tower.pos_embed if hasattr(tower, "pos_embed") else tower.rotary_emb  # of Krea 2


def _flux_frequencies(tower: Any) -> Tensor:
    rope = _flux_rope(tower)
    return _one_axis_per_pair(rope.axes_dim, [rope.theta] * len(rope.axes_dim))


def _flux_replace_tables(tower: Any) -> list[Replaced]:
    return [Replaced(_flux_rope(tower), "forward", _flux_coordinates)]


def _flux_coordinates(ids: Tensor) -> tuple[Tensor, Tensor]:
    return _pair(ids.float())


# Qwen-Image: a table of positions replaces that of angles; the model's own code slices it the same way.


def _qwen_frequencies(tower: Any) -> Tensor:
    rope = tower.pos_embed
    return _one_axis_per_pair(rope.axes_dim, [rope.theta] * len(rope.axes_dim), torch.float32)


def _qwen_replace_tables(tower: Any) -> list[Replaced]:
    rope = tower.pos_embed
    axes, length = len(rope.axes_dim), len(rope.pos_freqs)
    index = torch.arange(length, dtype=torch.float32, device="cpu").unsqueeze(-1).repeat(1, axes)
    replacement = copy.copy(rope)  # a copy, so that the cache of the model's module is unchanged
    replacement.axes_dim = [2] * axes
    replacement.pos_freqs, replacement.neg_freqs = index, index - length
    return [Replaced(rope, "forward", replacement.forward)]


def _qwen_tokens(received: Any, layer: Any, others: int) -> tuple[Tensor, None]:
    image, text = received
    return torch.cat([text, image]), None


# Wan, HunyuanVideo and Cosmos: indices of patches of the latent video.


def _wan_frequencies(tower: Any) -> Tensor:
    rope = tower.rope  # does not store its theta
    head_dim = rope.attention_head_dim
    of_space = head_dim // 6 * 2
    frequencies = _one_axis_per_pair([head_dim - 2 * of_space, of_space, of_space], [10000.0] * 3)
    if not rope.freqs_sin.is_meta:
        at_one = rope.freqs_sin[1, ::2].cpu().double()
        if not torch.allclose(at_one, frequencies.sum(dim=(0, 1)).sin(), atol=1e-2):  # a model in bfloat16 rounds it
            raise ValueError("init='model' needs a Wan whose theta is 10000, got a table of other frequencies")
    return frequencies


def _wan_replace_tables(tower: Any) -> list[Replaced]:
    rope = tower.rope
    patches = Patches(rope.patch_size, skipped=getattr(rope, "temporal_skip_len", None))
    return [Replaced(rope, "forward", patches.forward)]


def _hunyuan_frequencies(tower: Any) -> Tensor:
    rope = tower.rope
    return _one_axis_per_pair(rope.rope_dim, [rope.theta] * len(rope.rope_dim), torch.float32)


def _hunyuan_replace_tables(tower: Any) -> list[Replaced]:
    rope = tower.rope
    of_video = isinstance(rope.patch_size, int)  # HunyuanImage has one size per axis
    sizes = (rope.patch_size_t, rope.patch_size, rope.patch_size) if of_video else rope.patch_size
    return [Replaced(rope, "forward", Patches(sizes).forward)]


def _hunyuan_tokens(received: Any, layer: Any, others: int) -> tuple[Tensor, None]:
    """Return positions; text, which is not rotated, is first if it has separate projections, otherwise last."""
    positions: Tensor = received[0]
    if layer.add_q_proj is not None:
        return prefix(positions, others), None
    return torch.cat([positions, positions.new_zeros(others, positions.shape[-1])]), None


def _cosmos_frequencies(tower: Any) -> Tensor:
    rope = tower.rope
    factors = (rope.t_ntk_factor, rope.h_ntk_factor, rope.w_ntk_factor)
    thetas = [10000.0 * factor for factor in factors]
    return _one_axis_per_pair([rope.dim_t, rope.dim_h, rope.dim_w], thetas, torch.float32)


def _cosmos_replace_tables(tower: Any) -> list[Replaced]:
    rope = tower.rope
    return [Replaced(rope, "forward", Patches(rope.patch_size, rope.base_fps).forward)]


@dataclass(frozen=True)
class Patches:
    """Replace a module that computes tables by one that returns positions of the patches of a latent video.

    Attributes:
        patch: Latent extents of a patch.
        base_fps: Frames per second at which positions in time equal frame indices; None if the model takes no fps.
        skipped: Frames from the first to the last of a ChronoEdit, which keeps only those two.
    """

    patch: Sequence[int]
    base_fps: float | None = None
    skipped: int | None = None

    def forward(self, hidden_states: Tensor, fps: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the positions of `(batch, channels, frames, height, width)`."""
        sizes = [extent // size for extent, size in zip(hidden_states.shape[2:], self.patch, strict=True)]
        positions = grid(*sizes, device=hidden_states.device)  # (time, height, width)
        if fps is not None and self.base_fps is not None:
            time, rest = positions.split([1, 2], dim=-1)
            positions = torch.cat([time / fps * self.base_fps, rest], dim=-1)
        if self.skipped is not None and sizes[0] == 2:
            positions = positions * positions.new_tensor([self.skipped - 1, 1, 1])
        return _pair(positions)


# CogVideoX: its pipeline computes the tables; positions are recovered from them.


def _cogvideox_dims(head_dim: int) -> tuple[int, int, int]:
    return head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3


def _cogvideox_frequencies(tower: Any) -> Tensor:
    _, head_dim = _heads(tower)
    if not tower.config.use_rotary_positional_embeddings:
        raise ValueError("swap needs a CogVideoX with rotary embeddings, got use_rotary_positional_embeddings=False")
    if head_dim < 16:
        raise ValueError(
            f"head_dim of a CogVideoX must be 16 or more to recover positions from its tables, got {head_dim}"
        )
    return _one_axis_per_pair(_cogvideox_dims(head_dim), [10000.0] * 3, torch.float32)


def _cogvideox_replace_tables(tower: Any) -> list[Any]:
    return [tower.register_forward_pre_hook(_read_tables, with_kwargs=True)]


def _read_tables(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Forward pre-hook of CogVideoX: replace the tables that its caller passes by positions."""
    received = argument("image_rotary_emb", 5, args, kwargs)
    if received is None:
        raise ValueError("image_rotary_emb must be the tables of the pipeline in a swapped CogVideoX, got None")
    return with_argument("image_rotary_emb", 5, args, kwargs, _pair(positions_of(*received)))


def positions_of(cos: Tensor, sin: Tensor) -> Tensor:
    """Recover positions from CogVideoX's tables.

    The slowest pair of an axis gives a rough position, refined by each faster pair:
    p <- (a_j + 2 pi round((p f_j - a_j) / 2 pi)) / f_j,  a_j = atan2(sin, cos).  Valid while the angle of the
    slowest pair is within half a period.

    Args:
        cos: Cosines `(tokens, head_dim)`, each repeated twice.
        sin: Sines, laid out like the cosines.

    Returns:
        Positions (time, height, width) `(tokens, 3)`, to about 1e-6.
    """
    angles = torch.atan2(sin.double(), cos.double())[:, ::2]
    columns = []
    dims = _cogvideox_dims(cos.shape[-1])
    for dim, axis_angles in zip(dims, angles.split([dim // 2 for dim in dims], dim=-1), strict=True):
        frequencies = [10000.0 ** (-2 * j / dim) for j in range(dim // 2)]
        position = axis_angles[:, -1] / frequencies[-1]
        for frequency, angle in list(zip(frequencies, axis_angles.unbind(-1), strict=True))[-2::-1]:
            periods = ((position * frequency - angle) / (2 * math.pi)).round()
            position = (angle + 2 * math.pi * periods) / frequency
        columns.append(position)
    return torch.stack(columns, dim=-1).float()


def _text_in_front(received: Any, layer: Any, others: int) -> tuple[Tensor, None]:
    return prefix(received[0], others), None


# LTX-Video and LTX-2: one sequence of frequencies spans the channels of all heads; positions in [-1, 1].


def _ltx_frequencies(tower: Any) -> Tensor:
    """Return theta^(j / (n - 1)) pi / 2, for each j the pairs of time, height and width; unrotated pairs first."""
    rope = tower.rope
    heads, _ = _heads(tower)
    number = rope.dim // 6
    if hasattr(rope, "double_precision"):  # LTX-2
        dtype = torch.float64 if rope.double_precision else torch.float32
        steps = torch.linspace(0.0, 1.0, number, dtype=dtype, device="cpu")
        ladder = (torch.pow(rope.theta, steps) * torch.pi / 2.0).float()
    else:
        steps = torch.linspace(0.0, 1.0, number, dtype=torch.float32, device="cpu")
        ladder = rope.theta**steps * math.pi / 2.0
    of_axes = torch.diag_embed(ladder.unsqueeze(-1).expand(-1, 3)).permute(1, 0, 2).flatten(1)  # (axes, 3 number)
    zero_fraction = of_axes.new_zeros(3, rope.dim // 2 - of_axes.shape[-1])
    return torch.cat([zero_fraction, of_axes], dim=-1).unflatten(-1, (heads, -1))


def _ltx_replace_tables(tower: Any) -> list[Replaced]:
    return [Replaced(tower.rope, "forward", OfVideo(tower.rope).forward)]


class OfVideo:
    """Replace LTX-Video's table module: return coordinates normalised by the base sizes."""

    def __init__(self, rope: Any) -> None:
        self.rope = rope

    def forward(
        self,
        hidden_states: Tensor,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        rope_interpolation_scale: Any = None,
        video_coords: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return positions `(batch, tokens, 3)` in [-1, 1]."""
        rope = self.rope
        if video_coords is None:
            extents = (num_frames, height, width, rope_interpolation_scale)
            fractions = rope._prepare_video_coords(hidden_states.shape[0], *extents, device=hidden_states.device)
        else:
            fractions = video_coords.movedim(1, -1) / _base_sizes(rope, video_coords)
        return _pair(fractions * 2 - 1)


def _ltx2_replace_tables(tower: Any) -> list[Replaced]:
    return [Replaced(tower.rope, "forward", OfBounds(tower.rope).forward)]


class OfBounds:
    """Replace LTX-2's table module of video: return the midpoints of patches."""

    def __init__(self, rope: Any) -> None:
        self.rope = rope

    def forward(self, coords: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Return positions `(batch, tokens, 3)` from bounds `(batch, 3, tokens, 2)` or centres `(batch, 3, tokens)`."""
        middles = coords.mean(dim=-1) if coords.ndim == 4 else coords
        fractions = middles.movedim(1, -1).to(device or coords.device)
        return _pair(fractions / _base_sizes(self.rope, fractions) * 2 - 1)


def _base_sizes(rope: Any, like: Tensor) -> Tensor:
    return torch.tensor([rope.base_num_frames, rope.base_height, rope.base_width], device=like.device)


# Lumina2: the model's own code concatenates text and image tokens per sample, positions in the same way as angles.


def _lumina_frequencies(tower: Any) -> Tensor:
    rope = tower.rope_embedder
    return _one_axis_per_pair(rope.axes_dim, [rope.theta] * len(rope.axes_dim))


def _lumina_replace_tables(tower: Any) -> list[Replaced]:
    return [Replaced(tower.rope_embedder, "_get_freqs_cis", _as_numbers)]


def _as_numbers(ids: Tensor) -> Tensor:
    return ids.float()


# Families


def _layers(names: Sequence[str], tower: Any) -> list[Any]:
    """Return the attention layers of lists of blocks, "blocks.attn"; a model may lack some of the lists."""
    pairs = (name.rpartition(".") for name in names)
    layers = [getattr(block, layer) for blocks, _, layer in pairs for block in _part(tower, blocks)]
    for layer in layers:
        _check_processor(layer)
    return layers


def _part(tower: Any, path: str) -> Any:
    return reduce(lambda part, name: getattr(part, name, ()), path.split("."), tower)


def _check_processor(layer: Any) -> None:
    processor = getattr(layer, "processor", None)
    if hasattr(processor, "to_k_ip"):
        rule = "swap rotates q after its norm, but an IP-Adapter needs it unrotated: unload the adapter"
        raise ValueError(f"{rule}, got {type(processor).__name__}")


def _shape(frequencies: Callable[[Any], Tensor], tower: Any, layer: Any) -> AttentionShape:
    return AttentionShape(*_heads(tower), (1,) * len(frequencies(tower)), sized=False)


def _rotations(
    frequencies: Callable[[Any], Tensor], across_halves: Callable[[Any], bool] | None, tower: Any, layers: Sequence[Any]
) -> list[OwnRotation]:
    head_dim = _heads(tower)[1]
    order = halves(head_dim) if across_halves is not None and across_halves(tower) else interleaved(head_dim)
    return [OwnRotation(exact(frequencies(tower)), order)] * len(layers)


def _two_streams(layer: Any) -> bool:
    return getattr(layer, "norm_added_q", None) is not None


def _in_halves(tower: Any) -> bool:
    return True


def _ltx2_in_halves(tower: Any) -> bool:
    return bool(tower.rope.rope_type == "split")


def refuse_save_pretrained(*args: Any, **kwargs: Any) -> None:
    """Raise an error; replaces save_pretrained, which would lose the encodings."""
    rule = "a swapped model must be saved by torchrope.save and loaded by torchrope.load(path, into=model)"
    raise ValueError(f"{rule}, got save_pretrained")


def _without_saving(tower: Any, model: nn.Module, rotary: Rotary) -> list[Replaced]:
    return [Replaced(tower, "save_pretrained", refuse_save_pretrained)]


def _family(
    name: str,
    layers: Sequence[str],
    frequencies: Callable[[Any], Tensor],
    replace_tables: Callable[[Any], Sequence[Any]],
    read: Callable[[Any, Any, int], tuple[Tensor, None]] = _first,
    *,
    argument: str = "image_rotary_emb",
    layout: str = "bthd",
    across_halves: Callable[[Any], bool] | None = None,
    exact: bool = False,
) -> ModelFamily:
    """Return a family whose layers take tables.

    Args:
        name: Class of the models.
        layers: Lists of blocks, and the name of the attention layer in a block.
        frequencies: Returns those of a model, `(axes, heads or 1, pairs)`, radians per unit of its positions.
        replace_tables: As of `FromArgument`.
        read: As of `FromArgument`.
        argument: Name of the tables.
        layout: Of q and k.
        across_halves: Whether a model pairs channels j and j + head_dim / 2 rather than adjacent ones.
        exact: As of `FromArgument`: LTX has angles of up to 15,708 radians.
    """
    source = FromArgument(
        argument, replace_tables, read, "encoder_hidden_states", _two_streams, exact=exact, check=_check_processor
    )
    return ModelFamily(
        f"diffusers.*.{name}",
        layers=partial(_layers, layers),
        shape=partial(_shape, frequencies),
        positions=source,
        meets=AfterNorms(_NORMS, _OTHER_NORMS, layout, exact=exact),
        rotation=BuiltInRotation(partial(_rotations, frequencies, across_halves)),
        attach=_without_saving,
    )


_DOUBLE_AND_SINGLE = ("transformer_blocks.attn", "single_transformer_blocks.attn")
_OF_FLUX_3 = ("txt_mode_blocks.attn", "mode_blocks.image.attn", "mode_blocks.image_cond.attn")
_ATTN1 = ("transformer_blocks.attn1",)
_OF_WAN = ("blocks.attn1", "vace_blocks.attn1")
_REFINED = ("context_refiner.attn", "noise_refiner.attn", "layers.attn")
FAMILIES = (
    _family("FluxTransformer2DModel", _DOUBLE_AND_SINGLE + _OF_FLUX_3, _flux_frequencies, _flux_replace_tables),
    _family("Flux2Transformer2DModel", _DOUBLE_AND_SINGLE, _flux_frequencies, _flux_replace_tables),
    _family(
        "QwenImageTransformer2DModel",
        ("transformer_blocks.attn",),
        _qwen_frequencies,
        _qwen_replace_tables,
        _qwen_tokens,
    ),
    _family("WanTransformer3DModel", _OF_WAN, _wan_frequencies, _wan_replace_tables, argument="rotary_emb"),
    _family(
        "HunyuanVideoTransformer3DModel",
        _DOUBLE_AND_SINGLE,
        _hunyuan_frequencies,
        _hunyuan_replace_tables,
        _hunyuan_tokens,
    ),
    _family(
        "CogVideoXTransformer3DModel",
        _ATTN1,
        _cogvideox_frequencies,
        _cogvideox_replace_tables,
        _text_in_front,
        layout="bhtd",
    ),
    _family("LTXVideoTransformer3DModel", _ATTN1, _ltx_frequencies, _ltx_replace_tables, exact=True),
    _family(
        "LTX2VideoTransformer3DModel",
        _ATTN1,
        _ltx_frequencies,
        _ltx2_replace_tables,
        argument="query_rotary_emb",
        across_halves=_ltx2_in_halves,
        exact=True,
    ),
    _family("Lumina2Transformer2DModel", _REFINED, _lumina_frequencies, _lumina_replace_tables, _identity),
    _family(
        "CosmosTransformer3DModel",
        _ATTN1,
        _cosmos_frequencies,
        _cosmos_replace_tables,
        layout="bhtd",
        across_halves=_in_halves,
    ),
)
"""Families by the classes of their models; diffusers is not imported."""
