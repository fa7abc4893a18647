"""Convert Swin checkpoints (Liu et al.) of Microsoft, timm and rope-vit, the latter with frequencies, to `Swin`."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from torchrope.encodings import AxialRoPE, Encoding, MixedRoPE, NoEncoding, RelativePositionBias
from torchrope.encodings.base import planar
from torchrope.integrations.checkpoints.published.swin import BUFFERS, rename_swin
from torchrope.integrations.checkpoints.published.tensors import Tensors, allocate_zeros, build_on_meta, load_weights
from torchrope.models import Swin

FAMILY = "Swin"
_FREQUENCIES = re.compile(r"stages\.(\d+)\.encodings\.(\d+)\.frequencies")
_FIRST = "layers.0.blocks.0.attn"
_HEAD_DIM = 32  # of every published Swin
_MAX_STAGES = 16


@dataclass(frozen=True)
class Plan:
    """A Swin as described by its shapes."""

    dim: int
    patch_size: tuple[int, int]
    in_channels: int
    num_outputs: int
    depths: tuple[int, ...]
    num_heads: tuple[int, ...]
    window: int
    mlp_ratio: float
    qkv_bias: bool


def recognises(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict has the parameter names of a Swin."""
    return "patch_embed.proj.weight" in state and f"{_FIRST}.qkv.weight" in state


def convert(
    state: Mapping[str, Tensor],
    *,
    window_size: int | None = None,
    input_size: int | Sequence[int] | None = None,
) -> Swin:
    """Build a `Swin`: with `RelativePositionBias` for bias tables, with `MixedRoPE` or `AxialRoPE` for frequencies.

    Frequencies are RoPE-Axial's, which rope-vit stores but does not train, if all heads share them and each pair has
    one axis.

    Args:
        state: The checkpoint.
        window_size: Tokens along a window, if neither tables nor buffers determine it; 7 by default.
        input_size: Training size; by default the one whose last stage is one window, as published.

    Raises:
        ValueError: a tensor that is missing, unused or of a wrong shape.
    """
    tensors = Tensors(FAMILY, state)
    plan = _plan(tensors, state, window_size)
    for name in itertools.filterfalse(BUFFERS.fullmatch, state):
        tensors.check_floats(name)
        if name.endswith(".rope_freqs"):
            tensors.shape(name, 3)
    weights = {name: value.float() for name, value in rename_swin(state).items()}
    frequencies = {name: weights.pop(name) for name in list(weights) if _FREQUENCIES.fullmatch(name)}
    has_bias = f"{_FIRST}.relative_position_bias_table" in state
    model = build_on_meta(
        partial(
            Swin,
            _input_size(tensors, plan, input_size),
            patch_size=plan.patch_size,
            in_channels=plan.in_channels,
            num_outputs=plan.num_outputs,
            dim=plan.dim,
            depths=plan.depths,
            num_heads=plan.num_heads,
            window_size=plan.window,
            mlp_ratio=plan.mlp_ratio,
            encoding=_encoding(frequencies),
            bias=RelativePositionBias if has_bias else None,
            qkv_bias=plan.qkv_bias,
        )
    )
    _check_shapes(tensors, model, weights)
    load_weights(allocate_zeros(model), weights)
    for name, values in frequencies.items():
        encoding = model.get_submodule(name.removesuffix(".frequencies"))
        assert isinstance(encoding, Encoding)
        if values.ndim != 3 or values.shape[1:] != (encoding.num_heads, encoding.head_dim // 2):
            rule = (2, encoding.num_heads, encoding.head_dim // 2)
            raise tensors.error(
                f"the rope_freqs of {name.partition('.enc')[0]} must be {rule}, got {tuple(values.shape)}"
            )
        encoding.set_generators(planar(values))
    return model.eval()


def _plan(tensors: Tensors, state: Mapping[str, Tensor], window_size: int | None) -> Plan:
    dim, in_channels, height, width = tensors.shape("patch_embed.proj.weight", 4)
    window = _window(tensors, window_size)
    tensors.drop(*filter(BUFFERS.fullmatch, state))
    stages = tensors.depth("layers.")
    if stages > _MAX_STAGES:
        raise tensors.error(f"the number of stages must be at most {_MAX_STAGES}, got {stages}")
    classifier = next((name for name in ("head.fc.weight", "head.weight") if name in tensors), None)
    return Plan(
        dim=dim,
        patch_size=(height, width),
        in_channels=in_channels,
        num_outputs=tensors.shape(classifier, 2)[0] if classifier else 0,
        depths=tuple(tensors.depth(f"layers.{stage}.blocks.") for stage in range(stages)),
        num_heads=tuple(_heads(tensors, stage, dim * 2**stage) for stage in range(stages)),
        window=window,
        mlp_ratio=tensors.shape("layers.0.blocks.0.mlp.fc1.weight", 2)[0] / dim,
        qkv_bias=f"{_FIRST}.qkv.bias" in tensors,
    )


def _heads(tensors: Tensors, stage: int, dim: int) -> int:
    """Return the number of heads of a stage, from its bias table or frequencies, else one per 32 channels."""
    attention = f"layers.{stage}.blocks.0.attn"
    if f"{attention}.relative_position_bias_table" in tensors:
        return tensors.shape(f"{attention}.relative_position_bias_table", 2)[1]
    if f"{attention}.rope_freqs" in tensors:
        return tensors.shape(f"{attention}.rope_freqs", 3)[1]
    return max(dim // _HEAD_DIM, 1)


def _window(tensors: Tensors, window_size: int | None) -> int:
    """Return the window size w of the first stage, from its bias table of (2 w - 1)^2 entries or its w^2 positions."""
    stated = None
    if f"{_FIRST}.relative_position_bias_table" in tensors:
        stated = (math.isqrt(tensors.shape(f"{_FIRST}.relative_position_bias_table", 2)[0]) + 1) // 2
    elif f"{_FIRST}.rope_t_x" in tensors:
        stated = math.isqrt(tensors.shape(f"{_FIRST}.rope_t_x", 1)[0])
    if stated and window_size not in (None, stated):
        raise tensors.error(f"window_size must be {stated}, as in its tables, got {window_size}")
    return stated or window_size or 7


def _input_size(tensors: Tensors, plan: Plan, input_size: int | Sequence[int] | None) -> tuple[int, ...]:
    if input_size is None:
        last = plan.window * 2 ** (len(plan.depths) - 1)
        return (last * plan.patch_size[0], last * plan.patch_size[1])
    sizes = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
    if len(sizes) != 2 or any(size % patch for size, patch in zip(sizes, plan.patch_size, strict=True)):
        raise tensors.error(f"input_size must be two multiples of the patch {plan.patch_size}, got {sizes}")
    return sizes


def _encoding(frequencies: Mapping[str, Tensor]) -> Callable[..., Encoding]:
    if not frequencies:
        return NoEncoding
    return AxialRoPE if all(_is_axial(values) for values in frequencies.values()) else MixedRoPE


def _is_axial(frequencies: Tensor) -> bool:
    """Return whether all heads have equal frequencies and each pair one axis, up to 1e-6: zeros are cos(π / 2)."""
    shared = bool((frequencies - frequencies[:, :1]).abs().max() < 1e-6)
    return shared and bool((frequencies.abs().min(dim=0).values < 1e-6).all()) and frequencies.shape[2] % 2 == 0


def _check_shapes(tensors: Tensors, model: Swin, weights: Mapping[str, Tensor]) -> None:
    for name, own in model.state_dict().items():
        if name in weights and weights[name].shape != own.shape:
            raise tensors.error(f"{name} must be {tuple(own.shape)}, got {tuple(weights[name].shape)}")
