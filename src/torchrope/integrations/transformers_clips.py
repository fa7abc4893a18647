"""Adapters of `swap` for transformers' video encoders: VideoMAE, and V-JEPA 2 with or without its own rotation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchrope.integrations.own_rotation import OwnRotation
from torchrope.integrations.rotary import Adapter, OrderedRotation, Replaced, Rotary, Site
from torchrope.integrations.transformers_saving import own_saving
from torchrope.positions import grid
from torchrope.rotating import apply
from torchrope.rotations import Rotation

_ARGUMENT = "torchrope_rotations"


def clips(model: nn.Module) -> list[Adapter]:
    """Return an adapter for each video encoder inside a model."""
    known: dict[str, Callable[[nn.Module, nn.Module], Adapter]] = {
        "VideoMAEModel": OfVideoMae,
        "VJEPA2Encoder": OfVjepa2,
    }
    return [known[type(module).__name__](module, model) for module in model.modules() if type(module).__name__ in known]


class VideoAdapter(Adapter):
    """Adapter for a video encoder with positions (time, row, column)."""

    def __init__(self, tower: nn.Module, model: nn.Module) -> None:
        super().__init__(tower)
        self.model = model

    def sites(self) -> list[Site]:
        heads = self.tower.config.num_attention_heads
        return [Site(heads, layer.attention_head_size, self._sizes()) for layer in self.attention_layers()]

    def _sizes(self) -> tuple[int, ...]:
        raise NotImplementedError


class OfVideoMae(VideoAdapter):
    """Adapter for VideoMAE: positions of the unmasked patches are passed from the embedding to the layers."""

    def tables(self) -> list[nn.Parameter]:
        return []

    def attach(self, rotary: Rotary) -> None:
        handles: list[Any] = rotary.handles
        tower, sizes = self.tower, self._sizes()
        if not rotary.keep_position_tables:  # the position table is a tensor, not a parameter
            table = tower.embeddings.position_embeddings
            handles.append(Replaced(tower.embeddings, "position_embeddings", torch.zeros_like(table)))
        handles.append(tower.embeddings.register_forward_hook(ReturnPositions(rotary, sizes), with_kwargs=True))
        handles.append(tower.encoder.register_forward_pre_hook(AddRotations(rotary), with_kwargs=True))
        for index, layer in enumerate(self.attention_layers()):
            handles.append(Replaced(layer, "forward", VideoMAEAttention(layer, rotary.of_layer(index))))
        handles += own_saving(self.model, tower)

    def attention_layers(self) -> list[Any]:
        return [layer.attention.attention for layer in self.tower.encoder.layer]

    def _sizes(self) -> tuple[int, ...]:
        config, patches = self.tower.config, self.tower.embeddings.patch_embeddings
        rows, columns = (size // step for size, step in zip(patches.image_size, patches.patch_size, strict=True))
        return (config.num_frames // config.tubelet_size, rows, columns)


class ReturnPositions:
    """Forward hook of the patch embedding: also return the positions of the unmasked patches for each encoding."""

    def __init__(self, rotary: Rotary, sizes: tuple[int, ...]) -> None:
        self.rotary = rotary
        self.sizes = sizes

    def __call__(
        self, embeddings: nn.Module, args: Any, kwargs: dict[str, Any], patches: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        masked = args[1] if len(args) > 1 else kwargs["bool_masked_pos"]
        indices = grid(*self.sizes, device=patches.device)
        if masked is not None:
            indices = indices.expand(len(patches), -1, -1)[~masked].reshape(len(patches), -1, len(self.sizes))
        return patches, self.rotary.positions_at(indices, self.sizes)


class AddRotations:
    """Forward pre-hook: add each layer's rotation of the patches to the arguments of every layer."""

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary

    def __call__(self, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        (patches, positions), *others = args
        rotations = [self.rotary.ordered_rotation(index, where) for index, where in enumerate(positions)]
        return (patches, *others), {**kwargs, _ARGUMENT: rotations}


class VideoMAEAttention:
    """VideoMAE's attention, whose forward takes no further argument, with rotated q and k."""

    def __init__(self, layer: Any, index: int) -> None:
        self.layer = layer
        self.index = index

    def __call__(
        self, hidden_states: Tensor, torchrope_rotations: list[OrderedRotation]
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        heads = (layer.num_attention_heads, layer.attention_head_size)
        query, key, value = (
            projection(hidden_states).unflatten(-1, heads).transpose(1, 2)
            for projection in (layer.query, layer.key, layer.value)
        )
        query, key = torchrope_rotations[self.index](query, key)
        eager: Any = type(layer).forward.__globals__["eager_attention_forward"]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, eager)
        dropout = layer.dropout_prob if layer.training else 0.0
        mixed, weights = attend(layer, query, key, value, None, is_causal=False, scaling=layer.scaling, dropout=dropout)
        return mixed.flatten(-2), weights


class OfVjepa2(VideoAdapter):
    """Adapter for V-JEPA 2's encoder: each layer computes its positions; its own rotation is kept or removed."""

    def tables(self) -> list[nn.Parameter]:
        return []

    def rotates(self) -> bool:
        return True

    def own_rotations(self) -> list[OwnRotation]:
        rule = "init must not be 'own' for V-JEPA 2, which rotates the two channels of a pair by different angles"
        hint = "init='zeros' or 'paper' replaces its rotation, keep_rotation=True keeps it"
        raise ValueError(f"{rule}; {hint}, got {type(self.model).__name__}")

    def attach(self, rotary: Rotary) -> None:
        for index, layer in enumerate(self.attention_layers()):
            replacement = VJEPA2Rotation(layer, rotary, rotary.of_layer(index), self._sizes())
            rotary.handles.append(Replaced(layer, "get_position_ids", replacement.place))
            rotary.handles.append(Replaced(layer, "apply_rotary_embeddings", replacement.rotate))
        rotary.handles += own_saving(self.model, self.tower)

    def attention_layers(self) -> list[Any]:
        return [layer.attention for layer in self.tower.layer]

    def _sizes(self) -> tuple[int, ...]:
        config = self.tower.config
        side = config.crop_size // config.patch_size
        return (config.frames_per_clip // config.tubelet_size, side, side)


class VJEPA2Rotation:
    """Replacements of two methods of V-JEPA 2's attention: positions of tokens, and rotation of q, then of k."""

    def __init__(self, layer: Any, rotary: Rotary, index: int, sizes: tuple[int, ...]) -> None:
        self.layer = layer
        self.rotary = rotary
        self.index = index
        self.sizes = sizes

    def place(self, x: Tensor, masks: Tensor | None = None) -> tuple[Any, Rotation]:
        """Return the layer's positions and the rotation of tokens x `(batch, tokens, dim)` at these."""
        own = type(self.layer).get_position_ids(self.layer, x, masks)
        positions = self.rotary.positions_at(torch.stack(own, dim=-1), self.sizes)[self.index]
        return own, self.rotary.encodings[self.index](positions)

    def rotate(self, x: Tensor, placed: tuple[Any, Rotation]) -> Tensor:
        """Rotate q or k `(batch, heads, tokens, head_dim)`."""
        own, rotation = placed
        if self.rotary.keep_rotation:
            x = type(self.layer).apply_rotary_embeddings(self.layer, x, own)
        return apply(x, rotation, layout="bhtd", scores_only=True)
