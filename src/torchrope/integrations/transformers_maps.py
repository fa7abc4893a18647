"""Adapters of `swap` for the image encoders of SAM and SAM-HQ in transformers, with attention within windows."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.integrations.rotary import Adapter, OrderedRotation, Replaced, Rotary, Site
from torchrope.integrations.transformers_saving import own_saving

_TOWERS = ("SamVisionEncoder", "SamHQVisionEncoder")


def maps(model: nn.Module) -> list[Adapter]:
    """Return an adapter for each image encoder of SAM inside a model."""
    return [SamAdapter(module, model) for module in model.modules() if type(module).__name__ in _TOWERS]


class SamAdapter(Adapter):
    """Adapter for SAM's image encoder: tokens are rotated by their position in the window, or in the image."""

    def __init__(self, tower: nn.Module, model: nn.Module) -> None:
        super().__init__(tower)
        self.model = model

    def sites(self) -> list[Site]:
        config = self.tower.config
        head_dim, side = config.hidden_size // config.num_attention_heads, config.image_size // config.patch_size
        windows = [layer.window_size for layer in self.tower.layers]
        return [
            Site(config.num_attention_heads, head_dim, (window or side,) * 2, grows=not window) for window in windows
        ]

    def tables(self) -> list[nn.Parameter]:
        biases = [(layer.rel_pos_h, layer.rel_pos_w) for layer in self.attention_layers() if layer.use_rel_pos]
        tables = [] if self.tower.pos_embed is None else [self.tower.pos_embed]
        return [*tables, *(table for pair in biases for table in pair)]

    def attach(self, rotary: Rotary) -> None:
        for index, layer in enumerate(self.attention_layers()):
            attention = SamAttention(layer, rotary, rotary.of_layer(index))
            rotary.handles.append(Replaced(layer, "forward", attention))
        rotary.handles += own_saving(self.model, self.tower)

    def attention_layers(self) -> list[Any]:
        return [layer.attn for layer in self.tower.layers]


class SamAttention:
    """SAM's attention with rotated q and k; its bias is computed from q before the rotation."""

    def __init__(self, layer: Any, rotary: Rotary, index: int) -> None:
        self.layer = layer
        self.rotary = rotary
        self.index = index

    def __call__(self, hidden_states: Tensor, output_attentions: bool | None = None) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        sizes = tuple(hidden_states.shape[1:3])
        projected = layer.qkv(hidden_states).flatten(1, 2).unflatten(-1, (3, layer.num_attention_heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)  # (batch, heads, tokens, head_dim)
        bias = self._bias(query, sizes)
        # Contiguous, as in SAM: matrix products of tensors with other strides round differently.
        query, key = self._rotation(sizes, query.device)(query.contiguous(), key.contiguous())
        mixed, weights = self._attended(query, key, value, bias)
        return layer.proj(mixed.transpose(1, 2).flatten(2).unflatten(1, sizes)), weights

    def _rotation(self, sizes: tuple[int, ...], device: torch.device) -> OrderedRotation:
        positions = self.rotary.positions(sizes, device=device)[self.index]
        return self.rotary.ordered_rotation(self.index, positions)

    def _bias(self, query: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
        """Return the relative position bias for q, `(batch, heads, tokens, tokens)`, or None."""
        layer, tokens = self.layer, query.shape[-2]
        if not layer.use_rel_pos:
            return None
        bias = layer.get_decomposed_rel_pos(query.flatten(0, 1), layer.rel_pos_h, layer.rel_pos_w, sizes, sizes)
        biases: Tensor = bias.reshape(*query.shape[:2], tokens, tokens)
        return biases

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        if "Sdpa" in type(layer).__name__:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias), None
        scores = (query * layer.scale) @ key.transpose(-2, -1)
        if bias is not None:
            scores = scores + bias
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        dropped = functional.dropout(weights, p=layer.dropout, training=layer.training)
        return dropped @ value, weights.flatten(0, 1)
