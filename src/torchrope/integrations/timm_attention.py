"""Forward functions of timm's attention layers with no module between the projection of q, k and the scores.

Each computes the layer's forward with its parameters, with q and k rotated by `rotation`. Biases are unchanged.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias
from torch import Tensor
from torch.nn import functional

Rotate = Callable[..., tuple[Tensor, Tensor]]


def beit_attention(layer: Any, rotation: Rotate, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
    """Attention of Beit, with the biases of the layer and of the model added to the scores.

    Args:
        layer: Its attention layer.
        rotation: Rotates q and k.
        x: `(batch, tokens, dim)`.
        shared_rel_pos_bias: The bias that all layers share, `(heads, tokens, tokens)`.
    """
    q, k, v = _projected(layer, x)
    q, k = rotation(q, k)
    own = None if layer.relative_position_bias_table is None else layer._get_rel_pos_bias()
    bias = own if shared_rel_pos_bias is None or own is None else own + shared_rel_pos_bias
    return _attended(layer, q, k, v, shared_rel_pos_bias if own is None else bias)


def swin_v2_attention(layer: Any, rotation: Rotate, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cosine attention of SwinTransformerV2 in windows; rotations preserve norms and may precede it.

    Args:
        layer: Its attention layer.
        rotation: Rotates q and k by positions in the window.
        x: `(batch · windows, tokens, dim)`.
        mask: Added to the scores of each window of an image, `(windows, tokens, tokens)`.
    """
    q, k, v = _projected(layer, x)
    q, k = rotation(q, k, tuple(layer.window_size))
    cosines = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)
    scores = cosines * layer.logit_scale.clamp(max=math.log(1 / 0.01)).exp() + _continuous_bias(layer)
    if mask is not None:
        of_images = scores.unflatten(0, (-1, mask.shape[0]))  # (batch, windows, heads, tokens, tokens)
        scores = (of_images + mask.unsqueeze(1)).flatten(0, 1)
    weights = layer.attn_drop(scores.softmax(dim=-1))
    return _mixed(layer, weights @ v)


def sam_attention(layer: Any, rotation: Rotate, x: Tensor, *, keep_rotation: bool = False) -> Tensor:
    """Attention of VisionTransformerSAM over a map; its bias is computed from q before the rotation.

    Args:
        layer: Its attention layer.
        rotation: Rotates q and k by positions in the map.
        x: `(batch, height, width, dim)`, of windows if the layer has windowed attention.
        keep_rotation: Whether to apply the layer's built-in rotation too.
    """
    sizes = (x.shape[1], x.shape[2])
    projected = layer.qkv(x.flatten(1, 2)).unflatten(-1, (3, layer.num_heads, -1))
    q, k, v = projected.permute(2, 0, 3, 1, 4).unbind(0)  # (batch, heads, tokens, head_dim)
    q, k = layer.q_norm(q), layer.k_norm(k)
    bias = None
    if layer.use_rel_pos:
        bias = get_decomposed_rel_pos_bias(q.flatten(0, 1), layer.rel_pos_h, layer.rel_pos_w, sizes, sizes)
        bias = bias.unflatten(0, (-1, layer.num_heads))
    if layer.rope is not None and keep_rotation:
        table = layer.rope.get_embed()
        q, k = (apply_rot_embed_cat(one, table).type_as(v) for one in (q, k))
    q, k = rotation(q, k, sizes)
    return _attended(layer, q, k, v, bias).unflatten(1, sizes)


def _projected(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """q, k and v `(batch, heads, tokens, head_dim)` of a layer that stores the biases of its projection separately."""
    qkv = functional.linear(x, layer.qkv.weight, _bias_of_projection(layer))
    return qkv.unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _bias_of_projection(layer: Any) -> Tensor | None:
    return None if layer.q_bias is None else torch.cat([layer.q_bias, layer.k_bias, layer.v_bias])


def _continuous_bias(layer: Any) -> Tensor:
    """Compute SwinTransformerV2's score bias from log-spaced offsets, `(heads, tokens, tokens)`."""
    table = layer.cpb_mlp(layer.relative_coords_table).reshape(-1, layer.num_heads)
    return 16 * torch.sigmoid(table[layer.relative_position_index].movedim(-1, 0))


def _attended(layer: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    dropout = layer.attn_drop.p if layer.training else 0.0
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
    return _mixed(layer, attended)


def _mixed(layer: Any, heads: Tensor) -> Tensor:
    """Apply the output projection to heads `(batch, heads, tokens, head_dim)`; returns `(batch, tokens, dim)`."""
    projected: Tensor = layer.proj_drop(layer.proj(heads.transpose(1, 2).flatten(2)))
    return projected
