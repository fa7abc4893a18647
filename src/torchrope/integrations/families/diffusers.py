"""Transformers of diffusers that `swap` supports: diffusion models of images and videos with built-in RoPE."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrope.integrations.family import AttentionShape, BuiltInRotation, ModelFamily
from torchrope.integrations.layer import AfterNorms
from torchrope.integrations.own_rotation import OwnRotation, exact, geometric, halves, interleaved
from torchrope.integrations.positions import Arguments, FromArgument, argument, to_bits, with_argument
from torchrope.integrations.rotary import Replaced
from torchrope.positions import grid, prefix


def _heads(tower: Any) -> tuple[int, int]:
    config = tower.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "attention_head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_kv_heads", None) or heads, head_dim


def _rope(tower: Any) -> Any:
    """Return the module that makes the tables, None without one."""
    names = ("rope", "rope_embedder", "pos_embed")
    return next((getattr(tower, name) for name in names if hasattr(tower, name)), None)


def _frequencies(tower: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the frequencies of axes with one theta."""
    rope = _rope(tower)
    dims = rope.axes_dim if hasattr(rope, "axes_dim") else rope.rope_dim
    return geometric(dims, [rope.theta] * len(dims), dtype)


def _replace(function: Callable[..., Any], tower: Any, method: str = "forward") -> list[Replaced]:
    """Make a rotary embedding return positions by a function of itself and its arguments."""
    rope = _rope(tower)
    return [Replaced(rope, method, partial(function, rope))]


def _positions(received: Any, layer: Any, num_text: int) -> tuple[Tensor, None]:
    """Return positions, which may be stored in place of a pair of tables."""
    return (received[0] if isinstance(received, tuple) else received), None


def _coordinates(rope: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates of text and image tokens that the caller of Flux or Flux2 passes."""
    positions = to_bits(ids.float())
    return positions, positions


def _lumina_coordinates(rope: Any, ids: Tensor) -> Tensor:
    """Return the caller's coordinates; Lumina2 concatenates those of text and image per sample, as it does angles."""
    return to_bits(ids.float())


def _qwen_replace_tables(tower: Any) -> list[Replaced]:
    """Replace the table of angles of Qwen-Image by one of positions, which the model slices the same way."""
    rope = tower.pos_embed
    axes, length = len(rope.axes_dim), len(rope.pos_freqs)
    index = torch.arange(length, dtype=torch.float32, device="cpu").unsqueeze(-1).repeat(1, axes)
    replacement = copy.copy(rope)  # a copy, so that the cache of the model's module is unchanged
    replacement.axes_dim = [2] * axes
    replacement.pos_freqs, replacement.neg_freqs = to_bits(index), to_bits(index - length)
    return [Replaced(rope, "forward", replacement.forward)]


def _qwen_positions(received: Any, layer: Any, num_text: int) -> tuple[Tensor, None]:
    image, text = received
    return torch.cat([text, image]), None


def _wan_frequencies(tower: Any) -> Tensor:
    rope = tower.rope  # does not store its theta
    frequencies = geometric([rope.t_dim, rope.h_dim, rope.w_dim], [10000.0] * 3)
    if not rope.freqs_sin.is_meta:
        at_one = rope.freqs_sin[1, ::2].cpu().double()
        if not torch.allclose(at_one, frequencies.sum(dim=(0, 1)).sin(), atol=1e-2):  # a model in bfloat16 rounds it
            raise ValueError("init='model' needs a Wan whose theta is 10000, got a table of other frequencies")
    return frequencies


def _cosmos_frequencies(tower: Any) -> Tensor:
    rope = tower.rope
    thetas = [10000.0 * factor for factor in (rope.t_ntk_factor, rope.h_ntk_factor, rope.w_ntk_factor)]
    return geometric([rope.dim_t, rope.dim_h, rope.dim_w], thetas, torch.float32)


def _patches(rope: Any, hidden_states: Tensor, fps: int | None = None) -> tuple[Tensor, Tensor]:
    """Return positions (time, height, width) of the patches of `(batch, channels, frames, height, width)`."""
    patch = rope.patch_size
    if isinstance(patch, int):  # HunyuanVideo; others have one size per axis
        patch = (rope.patch_size_t, patch, patch)
    sizes = [extent // size for extent, size in zip(hidden_states.shape[2:], patch, strict=True)]
    positions = grid(*sizes, device=hidden_states.device)
    if fps is not None and rope.base_fps is not None:  # Cosmos
        time, rest = positions.split([1, 2], dim=-1)
        positions = torch.cat([time / fps * rope.base_fps, rest], dim=-1)
    return (to_bits(positions),) * 2


def _wan_tables(rope: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions `(1, tokens, 1, axes)`, which context parallelism splits along the tokens as it does tables."""
    positions, _ = _patches(rope, hidden_states)
    return (positions[None, :, None],) * 2


def _wan_positions(received: Any, layer: Any, num_text: int) -> tuple[Tensor, None]:
    return received[0][0, :, 0], None


def _hunyuan_positions(received: Any, layer: Any, num_text: int) -> tuple[Tensor, None]:
    """Return positions; text, which is not rotated, is first if it has separate projections, otherwise last."""
    positions: Tensor = received[0]
    if layer.add_q_proj is not None:
        return prefix(positions, num_text), None
    return torch.cat([positions, positions.new_zeros(num_text, positions.shape[-1])]), None


def _cogvideox_dims(head_dim: int) -> tuple[int, int, int]:
    return head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3


def _cogvideox_frequencies(tower: Any) -> Tensor:
    _, head_dim = _heads(tower)
    if not tower.config.use_rotary_positional_embeddings:
        raise ValueError("swap needs a CogVideoX with rotary embeddings, got use_rotary_positional_embeddings=False")
    if head_dim < 16:
        rule = "head_dim of a CogVideoX must be 16 or more to recover positions from its tables"
        raise ValueError(f"{rule}, got {head_dim}")
    return geometric(_cogvideox_dims(head_dim), [10000.0] * 3, torch.float32)


def _cogvideox_hook(tower: Any) -> list[Any]:
    return [tower.register_forward_pre_hook(_read_tables, with_kwargs=True)]


def _read_tables(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Forward pre-hook of CogVideoX: replace the tables, which its pipeline computes, by positions."""
    received = argument("image_rotary_emb", 5, args, kwargs)
    if received is None:
        raise ValueError("image_rotary_emb must be the tables of the pipeline in a swapped CogVideoX, got None")
    return with_argument("image_rotary_emb", 5, args, kwargs, (to_bits(positions_of(*received)),) * 2)


def positions_of(cos: Tensor, sin: Tensor) -> Tensor:
    """Recover positions (time, height, width) `(tokens, 3)`, to about 1e-6, from CogVideoX's `(tokens, head_dim)`.

    The slowest pair of an axis gives a rough position, refined by each faster pair:
    p <- (a_j + 2 pi round((p f_j - a_j) / 2 pi)) / f_j,  a_j = atan2(sin, cos).
    """
    angles = torch.atan2(sin.double(), cos.double())[:, ::2]
    columns, dims = [], _cogvideox_dims(cos.shape[-1])
    for dim, axis_angles in zip(dims, angles.split([dim // 2 for dim in dims], dim=-1), strict=True):
        frequencies = [10000.0 ** (-2 * j / dim) for j in range(dim // 2)]
        position = axis_angles[:, -1] / frequencies[-1]
        for frequency, angle in list(zip(frequencies, axis_angles.unbind(-1), strict=True))[-2::-1]:
            periods = ((position * frequency - angle) / (2 * math.pi)).round()
            position = (angle + 2 * math.pi * periods) / frequency
        columns.append(position)
    return torch.stack(columns, dim=-1).float()


def _text_in_front(received: Any, layer: Any, num_text: int) -> tuple[Tensor, None]:
    return prefix(received[0], num_text), None


def _ltx_frequencies(tower: Any) -> Tensor:
    """Return theta^(j / (n - 1)) pi / 2 across heads, for each j time, height and width; unrotated pairs first."""
    rope = tower.rope
    dtype = torch.float64 if getattr(rope, "double_precision", False) else torch.float32
    ladder = rope.theta ** torch.linspace(0.0, 1.0, rope.dim // 6, dtype=dtype, device="cpu") * math.pi / 2.0
    per_axis = torch.kron(ladder.float(), torch.eye(3, device="cpu"))  # (axes, 3 n)
    return pad(per_axis, (rope.dim // 2 - per_axis.shape[-1], 0)).unflatten(-1, (_heads(tower)[0], -1))


def _ltx_positions(
    rope: Any,
    hidden_states: Tensor,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    rope_interpolation_scale: Any = None,
    video_coords: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return coordinates `(batch, tokens, 3)` in [-1, 1], normalised by the base sizes."""
    if video_coords is not None:
        return _normalized(rope, video_coords.movedim(1, -1))
    extents = (num_frames, height, width, rope_interpolation_scale)
    positions = rope._prepare_video_coords(hidden_states.shape[0], *extents, device=hidden_states.device) * 2 - 1
    return (to_bits(positions),) * 2


def _ltx2_positions(rope: Any, coords: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return midpoints `(batch, tokens, 3)` from bounds `(batch, 3, tokens, 2)` or centres `(batch, 3, tokens)`."""
    middles = coords.mean(dim=-1) if coords.ndim == 4 else coords
    return _normalized(rope, middles.movedim(1, -1).to(device or coords.device))


def _normalized(rope: Any, points: Tensor) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([rope.base_num_frames, rope.base_height, rope.base_width], device=points.device)
    return (to_bits(points / sizes * 2 - 1),) * 2


def _layers(names: Sequence[str], tower: Any) -> list[Any]:
    """Return the attention layers of lists of blocks, "blocks.attn"."""
    pairs = (name.split(".") for name in names)
    layers = [getattr(block, layer) for blocks, layer in pairs for block in getattr(tower, blocks)]
    for layer in layers:
        _check_processor(layer)
    return layers


def _check_processor(layer: Any) -> None:
    processor = getattr(layer, "processor", None)
    if hasattr(processor, "to_k_ip"):
        rule = "swap rotates q after its norm, but an IP-Adapter needs it unrotated: unload the adapter"
        raise ValueError(f"{rule}, got {type(processor).__name__}")


def _rotations(
    frequencies: Callable[[Any], Tensor], across_halves: bool, tower: Any, layers: Sequence[Any]
) -> list[OwnRotation]:
    across_halves = across_halves or getattr(_rope(tower), "rope_type", None) == "split"  # of LTX-2
    paired = halves if across_halves else interleaved
    return [OwnRotation(exact(frequencies(tower)), paired(_heads(tower)[1]))] * len(layers)


def _two_streams(layer: Any) -> bool:
    return getattr(layer, "norm_added_q", None) is not None


def refuse_save_pretrained(*args: Any, **kwargs: Any) -> None:
    """Raise an error; replaces save_pretrained, which would lose the encodings."""
    rule = "a swapped model must be saved by torchrope.save and loaded by torchrope.load(path, into=model)"
    raise ValueError(f"{rule}, got save_pretrained")


def _family(
    name: str,
    layers: Sequence[str],
    frequencies: Callable[[Any], Tensor],
    replace_tables: Callable[[Any], Sequence[Any]],
    read: Callable[[Any, Any, int], tuple[Tensor, None]] = _positions,
    *,
    argument: str = "image_rotary_emb",
    layout: str = "bthd",
    across_halves: bool = False,
    exact: bool = False,  # angles of LTX, of up to 15,708 radians, as exactly as its own
) -> ModelFamily:
    """Return a family whose layers take tables; `layers` are lists of blocks, with the attention layer in a block."""
    source = FromArgument(
        argument, replace_tables, read, "encoder_hidden_states", _two_streams, exact=exact, check=_check_processor
    )
    return ModelFamily(
        f"diffusers.*.{name}",
        layers=partial(_layers, layers),
        shape=lambda tower, _: AttentionShape(*_heads(tower), (1,) * len(frequencies(tower)), sized=False),
        positions=source,
        intercept=AfterNorms(("norm_q", "norm_k"), ("norm_added_q", "norm_added_k"), layout),
        rotation=BuiltInRotation(partial(_rotations, frequencies, across_halves)),
        attach=lambda tower, model, rotary: [Replaced(tower, "save_pretrained", refuse_save_pretrained)],
    )


_IN_FLOAT32 = partial(_frequencies, dtype=torch.float32)
_FROM_IDS, _FROM_VIDEO = partial(_replace, _coordinates), partial(_replace, _patches)
_AS_TABLES = partial(_replace, _wan_tables)
_FROM_EXTENTS, _FROM_BOUNDS = partial(_replace, _ltx_positions), partial(_replace, _ltx2_positions)
_FROM_IDS_ALONE = partial(_replace, _lumina_coordinates, method="_get_freqs_cis")
_ONE_STREAM, _VIDEO = ("transformer_blocks.attn",), ("transformer_blocks.attn1",)
_BOTH_STREAMS = ("transformer_blocks.attn", "single_transformer_blocks.attn")
_REFINED = ("context_refiner.attn", "noise_refiner.attn", "layers.attn")
FAMILIES = (
    _family("FluxTransformer2DModel", _BOTH_STREAMS, _frequencies, _FROM_IDS),
    _family("Flux2Transformer2DModel", _BOTH_STREAMS, _frequencies, _FROM_IDS),
    _family("QwenImageTransformer2DModel", _ONE_STREAM, _IN_FLOAT32, _qwen_replace_tables, _qwen_positions),
    _family(
        "WanTransformer3DModel", ("blocks.attn1",), _wan_frequencies, _AS_TABLES, _wan_positions, argument="rotary_emb"
    ),
    _family("HunyuanVideoTransformer3DModel", _BOTH_STREAMS, _IN_FLOAT32, _FROM_VIDEO, _hunyuan_positions),
    _family(
        "CogVideoXTransformer3DModel", _VIDEO, _cogvideox_frequencies, _cogvideox_hook, _text_in_front, layout="bhtd"
    ),
    _family("LTXVideoTransformer3DModel", _VIDEO, _ltx_frequencies, _FROM_EXTENTS, exact=True),
    _family(
        "LTX2VideoTransformer3DModel", _VIDEO, _ltx_frequencies, _FROM_BOUNDS, argument="query_rotary_emb", exact=True
    ),
    _family("Lumina2Transformer2DModel", _REFINED, _frequencies, _FROM_IDS_ALONE),
    _family("CosmosTransformer3DModel", _VIDEO, _cosmos_frequencies, _FROM_VIDEO, layout="bhtd", across_halves=True),
)
