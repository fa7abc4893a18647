"""Adapters of `swap` for timm's models."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.layers import PatchDropout, PatchDropoutWithIndices
from timm.layers.attention import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.deepseek_vit import DeepseekVitEncoder
from timm.models.eva import Eva, EvaAttention
from timm.models.gemma4_vit import Gemma4Attention, Gemma4VitEncoder
from timm.models.hiera import Hiera
from timm.models.hieradet_sam2 import HieraDet
from timm.models.naflexvit import NaFlexVit
from timm.models.qwen3_vit import Qwen3VitEncoder
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from torchrope.integrations.norm_and_rotate import fused
from torchrope.integrations.own_rotation import OwnRotation
from torchrope.integrations.rotary import ATTRIBUTE, Adapter, OneThread, Replaced, Rotary, Site
from torchrope.integrations.timm_attention import beit_attention, sam_attention, swin_v2_attention
from torchrope.integrations.timm_hooks import (
    NoAngle,
    NoTable,
    OfLayer,
    RotateInWindow,
    RotateOnLattice,
    RotateQK,
    TokenPositions,
)
from torchrope.integrations.timm_rotation import gemma_rotation, own_rotation
from torchrope.models.layers import encoding_parameters

# Attention layers that apply q_norm, then k_norm: to (batch, heads, tokens, head_dim), or for _TOKENS_FIRST to
# (batch, tokens, heads, head_dim).
_NORMED = (Attention, AttentionRope, EvaAttention, ParallelScalingBlock, Gemma4Attention)
_TOKENS_FIRST = (ParallelScalingBlock, Gemma4Attention)


def adapters(model: nn.Module) -> list[Adapter]:
    """Return an adapter for each supported timm model inside a model.

    Raises:
        ValueError: a model whose attention cannot be rotated, with the reason.
    """
    supported: dict[Any, type[Adapter]] = {
        (VisionTransformer, Eva, Beit): OfTokens,
        (Qwen3VitEncoder, DeepseekVitEncoder): OfEncoder,
        Gemma4VitEncoder: OfGemma,
        NaFlexVit: OfPatches,
        (SwinTransformer, SwinTransformerV2): OfWindows,
        VisionTransformerSAM: OfMaps,
    }
    found: list[Adapter] = []
    for module in model.modules():
        found.extend(adapter(module) for kind, adapter in supported.items() if isinstance(module, kind))
    return found


def refuse(model: nn.Module) -> None:
    """Raise an error for timm models that cannot be swapped for a known reason.

    Raises:
        ValueError: a model with pooled queries, which have no single position.
    """
    for module in model.modules():
        if isinstance(module, (Hiera, HieraDet)):
            rule = "swap needs one position per query (torchrope.rotate in a custom attention takes any)"
            raise ValueError(f"{rule}, got {type(module).__name__}, whose queries are max-pooled over several tokens")


class OfTimm(Adapter):
    """Adapter for timm models: extends `no_weight_decay` and `group_matcher`, which timm's optimisers call."""

    def attach(self, rotary: Rotary) -> None:
        rotary.handles.append(Replaced(self.tower, "no_weight_decay", partial(no_weight_decay, self.tower)))
        if hasattr(type(self.tower), "group_matcher"):
            names = {module: name for name, module in self.tower.named_modules()}
            layers = tuple(names[layer] for layer in self.attention_layers()[: len(rotary.encodings)])
            rotary.handles.append(Replaced(self.tower, "group_matcher", partial(group_matcher, self.tower, layers)))


class OfTokens(OfTimm):
    """VisionTransformer, Eva and Beit: global attention, rotated by positions in the image."""

    rope = "rope"
    """Attribute of the tower's rotary embedding."""

    def sites(self) -> list[Site]:
        lattice = self._trained_lattice()
        return [
            Site(getattr(layer, "num_kv_heads", layer.num_heads), _head_dim(layer), lattice)
            for layer in self.attention_layers()
        ]

    def tables(self) -> list[nn.Parameter]:
        layers = [layer for layer in self.attention_layers() if isinstance(layer, BeitAttention)]
        shared = getattr(self.tower, "rel_pos_bias", None)
        biases = [bias.relative_position_bias_table for bias in (shared, *layers) if bias is not None]
        return [table for table in (getattr(self.tower, "pos_embed", None), *biases) if table is not None]

    def rotates(self) -> bool:
        return getattr(self.tower, self.rope, None) is not None

    def own_rotations(self) -> list[OwnRotation]:
        rope, num_prefix = getattr(self.tower, self.rope), self.tower.num_prefix_tokens
        return [own_rotation(rope, layer, index, num_prefix) for index, layer in enumerate(self.attention_layers())]

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        if self.rotates() and not rotary.keep_rotation:
            self._put_aside(rotary, self.rope, self._without_rope())
        dropout = getattr(self.tower, "patch_drop", None)
        if type(dropout) is PatchDropout:
            self._put_aside(
                rotary, "patch_drop", PatchDropoutWithIndices(dropout.prob, dropout.num_prefix_tokens, dropout.ordered)
            )
        one_thread = OneThread("timm")
        positions = TokenPositions(self.tower, rotary, one_thread)
        hooks: list[Any] = [*one_thread.watch(self.tower), self._enter(positions)]
        if isinstance(getattr(self.tower, "patch_drop", None), PatchDropoutWithIndices):
            hooks.append(self.tower.patch_drop.register_forward_hook(positions.keep))
        for block in self.tower.blocks:
            hooks += [*one_thread.watch(block), block.register_forward_pre_hook(positions.recall)]
        for index, layer in enumerate(self.attention_layers()):
            rotation = RotateQK(positions, rotary.of_layer(index), tokens_first=isinstance(layer, _TOKENS_FIRST))
            if isinstance(layer, BeitAttention):
                hooks.append(Replaced(layer, "forward", OfLayer(layer, rotation, beit_attention).forward))
            else:
                hooks.append(layer.q_norm.register_forward_hook(rotation.queries))
                hooks.append(layer.k_norm.register_forward_hook(rotation.keys))
                for norm, keys in ((layer.q_norm, False), (layer.k_norm, True)):
                    hooks += fused(norm, rotation.with_norm, keys=keys)
        rotary.handles.extend(hooks)

    def detach(self, rotary: Rotary) -> None:
        super().detach(rotary)
        module: Any
        for name, module in rotary.original_modules.items():
            rotary.unfreeze(name, list(module.parameters()))
            setattr(self.tower, name, module)
            if hasattr(module, "update_feat_shape"):  # the input size may have changed since the swap
                module.update_feat_shape(self._trained_lattice())

    def _trained_lattice(self) -> tuple[int, ...]:
        return tuple(self.tower.patch_embed.grid_size)

    def _without_rope(self) -> nn.Module | None:
        """Return the replacement for the tower's rotary embedding."""
        return None

    def _enter(self, positions: TokenPositions) -> Any:
        """Hook `positions` into the module that determines the lattice of tokens."""
        return self.tower.patch_embed.register_forward_hook(positions.enter)

    def _put_aside(self, rotary: Rotary, name: str, successor: nn.Module | None) -> None:
        rotary.original_modules[name] = getattr(self.tower, name)
        rotary.freeze(name, list(rotary.original_modules[name].parameters()))
        setattr(self.tower, name, successor)

    def attention_layers(self) -> list[Any]:
        layers = []
        for index, block in enumerate(self.tower.blocks):
            inside = [module for module in block.modules() if type(module) in (*_NORMED, BeitAttention)]
            if not inside:
                rule = "swap needs attention with separate norms of q and k"
                raise ValueError(f"{rule}, got {type(block).__name__} as block {index}")
            layers.extend(inside)
        return layers


class OfEncoder(OfTokens):
    """Encoders of Qwen3 and DeepSeek, which call `get_embed` of their rotary embedding in every forward."""

    def _without_rope(self) -> nn.Module | None:
        return NoTable()


class OfGemma(OfTokens):
    """Encoder of Gemma 4, whose patches have coordinates (x, y)."""

    rope = "rotary_emb"

    def tables(self) -> list[nn.Parameter]:
        return [self.tower.patch_embed.position_embedding_table]

    def own_rotations(self) -> list[OwnRotation]:
        return [gemma_rotation(self.tower.rotary_emb, layer) for layer in self.attention_layers()]

    def _trained_lattice(self) -> tuple[int, ...]:
        size = (getattr(self.tower, "pretrained_cfg", None) or {}).get("input_size", (3, 768, 768))  # timm's default
        return tuple(extent // patch for extent, patch in zip(size[1:], self.tower.patch_size, strict=True))

    def _without_rope(self) -> nn.Module | None:
        return NoAngle(self.tower.blocks[0].attn.head_dim)

    def _enter(self, positions: TokenPositions) -> Any:
        return self.tower.rotary_emb.register_forward_hook(positions.enter_coordinates)


class OfPatches(OfTokens):
    """NaFlexVit: patches of images of one size, or of several sizes with coordinates (y, x)."""

    def tables(self) -> list[nn.Parameter]:
        embeds = self.tower.embeds
        found = (embeds.pos_embed, embeds.pos_embed_y, embeds.pos_embed_x)
        return [table for table in found if table is not None]

    def _trained_lattice(self) -> tuple[int, ...]:
        return tuple(self.tower.embeds.pos_embed_grid_size or (16, 16))  # timm's default

    def _enter(self, positions: TokenPositions) -> Any:
        return self.tower.embeds.register_forward_hook(positions.enter_patches, with_kwargs=True)


class OfWindows(OfTimm):
    """SwinTransformer and its V2: windowed attention, rotated by positions in the window."""

    def sites(self) -> list[Site]:
        return [Site(layer.num_heads, _head_dim(layer), tuple(layer.window_size)) for layer in self.attention_layers()]

    def tables(self) -> list[nn.Parameter]:
        return [_bias_of_window(layer) for layer in self.attention_layers()]

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        for index, layer in enumerate(self.attention_layers()):
            rotation = RotateOnLattice(rotary, rotary.of_layer(index))
            handle: Any
            if isinstance(layer, WindowAttentionV2):
                handle = Replaced(layer, "forward", OfLayer(layer, rotation, swin_v2_attention).forward)
            else:
                handle = layer.qkv.register_forward_hook(RotateInWindow(layer, rotation))
            rotary.handles.append(handle)

    def attention_layers(self) -> list[Any]:
        return [module for module in self.tower.modules() if isinstance(module, (WindowAttention, WindowAttentionV2))]


class OfMaps(OfTimm):
    """VisionTransformerSAM: windowed or global attention, rotated by positions in the window or image."""

    def sites(self) -> list[Site]:
        image = tuple(self.tower.patch_embed.grid_size)
        lattices = [(block.window_size,) * 2 if block.window_size else image for block in self.tower.blocks]
        layers = zip(self.attention_layers(), lattices, self.tower.blocks, strict=True)
        return [
            Site(layer.num_heads, layer.head_dim, lattice, grows=not block.window_size)
            for layer, lattice, block in layers
        ]

    def tables(self) -> list[nn.Parameter]:
        biases = [layer for layer in self.attention_layers() if layer.use_rel_pos]
        tables = [] if self.tower.pos_embed is None else [self.tower.pos_embed]
        return [*tables, *(table for layer in biases for table in (layer.rel_pos_h, layer.rel_pos_w))]

    def rotates(self) -> bool:
        return any(layer.rope is not None for layer in self.attention_layers())

    def own_rotations(self) -> list[OwnRotation]:
        return [own_rotation(layer.rope, layer, index, 0) for index, layer in enumerate(self.attention_layers())]

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        for index, layer in enumerate(self.attention_layers()):
            rotation = RotateOnLattice(rotary, rotary.of_layer(index))
            attention = partial(sam_attention, keep_rotation=rotary.keep_rotation)
            rotary.handles.append(Replaced(layer, "forward", OfLayer(layer, rotation, attention).forward))

    def attention_layers(self) -> list[Any]:
        return [block.attn for block in self.tower.blocks]


def no_weight_decay(tower: Any) -> set[str]:
    """Return the names without weight decay: those of the tower's class, if any, and parameters of encodings."""
    own = getattr(type(tower), "no_weight_decay", None)
    return {*(own(tower) if own is not None else ()), *encoding_parameters(tower)}


def group_matcher(tower: Any, layers: Sequence[str], coarse: bool = False) -> dict[str, Any]:
    """Return timm's regular expressions that group parameters by depth, with each encoding in the group of its layer.

    Args:
        tower: The swapped model.
        layers: Name of the attention layer of each encoding.
        coarse: Passed to the model's `group_matcher`.
    """
    groups: dict[str, Any] = {}
    for group, rules in type(tower).group_matcher(tower, coarse).items():
        groups[group] = [(rules, None)] if isinstance(rules, str) else list(rules or ())
        for index, layer in enumerate(layers):
            found = ((re.match(rule, f"{layer}."), suffix) for rule, suffix in groups[group])
            depth = next(((*match.groups(), *(suffix or ())) for match, suffix in found if match), None)
            if depth is not None:
                groups[group].append((rf"^{ATTRIBUTE}\.encodings\.{index}\.", tuple(map(int, depth))))
    return groups


def _bias_of_window(layer: Any) -> Any:
    """Return the parameter that disables the bias if zero; for V2, whose bias is then constant, of its last layer."""
    return layer.cpb_mlp[-1].weight if type(layer) is WindowAttentionV2 else layer.relative_position_bias_table


def _head_dim(layer: Any) -> int:
    return getattr(layer, "head_dim", None) or layer.qkv.out_features // (3 * layer.num_heads)
