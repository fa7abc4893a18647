"""Adapters of `swap` for timm's models, and recipes from which `load` rebuilds them."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from timm.layers.attention import Attention, AttentionRope
from timm.models import get_model_args, is_model, model_entrypoint
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

from torchrope.integrations import timm_models as timm_models
from torchrope.integrations.norm_and_rotate import fused
from torchrope.integrations.own_rotation import OwnRotation
from torchrope.integrations.rotary import ATTRIBUTE, Adapter, OneThread, Replaced, Rotary, Site
from torchrope.integrations.settings import (
    DEPTHS,
    ENCODING,
    EXTENTS,
    FLAG,
    LAYER,
    LAYERS,
    MAPPING,
    NOTHING,
    NUMBER,
    NUMBERS,
    SHARE,
    WIDTH,
    WIDTHS,
    WORD,
    Kind,
    Limits,
    UnknownModel,
    check,
    each,
    one_of,
    shown,
)
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

# Arguments of any timm model that a file may set: none names weights, files, caches or a hub.
_OF_ANY: dict[str, Kind] = {
    "num_classes": WIDTH,
    "in_chans": WIDTH,
    "global_pool": WORD,
    "img_size": EXTENTS,
    "features_only": FLAG,
    "out_indices": LAYER | each(LAYER, most=64),
    "output_stride": one_of(8, 16, 32),
    "act_layer": WORD,
    "norm_layer": WORD,
    "drop_rate": SHARE,
    "drop_path_rate": SHARE,
    "pos_drop_rate": SHARE,
    "patch_drop_rate": SHARE,
    "proj_drop_rate": SHARE,
    "attn_drop_rate": SHARE,
}
# Arguments of the models that swap supports. Other timm models may loop over such sizes.
_OF_TRANSFORMERS: dict[str, Kind] = _OF_ANY | {
    "always_partition": FLAG,
    "attn_gated": FLAG,
    "attn_layer": WORD,
    "attn_only_layer_scale": FLAG,
    "attn_pool_mlp_ratio": NUMBER,
    "attn_pool_num_heads": WIDTH,
    "attn_type": WORD,
    "block_size": WIDTH,
    "class_token": FLAG,
    "depth": LAYERS,
    "depths": DEPTHS,
    "downsample_ratio": WIDTH,
    "dynamic_img_pad": FLAG,
    "dynamic_img_size": FLAG,
    "embed_dim": WIDTH | each(WIDTH),
    "embed_norm_layer": WORD,
    "embed_proj_type": WORD,
    "enable_patch_interpolator": FLAG,
    "encoder_pool": WORD,
    "encoding": ENCODING,
    "fc_norm": FLAG,
    "final_norm": FLAG,
    "fix_init": FLAG,
    "global_attn_indexes": each(LAYER, most=1024),
    "head_dim": WIDTH | each(WIDTH | NOTHING),
    "head_init_scale": NUMBER,
    "head_hidden_size": WIDTH,
    "init": WORD,
    "init_values": NUMBER,
    "input_norm_layer": WORD,
    "intermediate_size": WIDTH,
    "keep_bias": FLAG,
    "merge_size": WIDTH,
    "mlp_ratio": NUMBERS,
    "neck_chans": WIDTH,
    "no_embed_class": FLAG,
    "norm_eps": NUMBER,
    "num_heads": WIDTHS,
    "num_kv_heads": WIDTH | each(WIDTH | NOTHING, most=1024),
    "num_reg_tokens": WIDTH,
    "out_features": WIDTH,
    "patchify_channels_last": FLAG,
    "patch_size": EXTENTS,
    "pool_include_prefix": FLAG,
    "pooling_kernel_size": WIDTH,
    "pos_embed": WORD,
    "pos_embed_align_corners": FLAG,
    "pos_embed_antialias": FLAG,
    "pos_embed_ar_preserving": FLAG,
    "pos_embed_grid_size": EXTENTS,
    "pos_embed_interp_mode": WORD,
    "pos_embed_use_grid_sample": FLAG,
    "position_embedding_size": WIDTH,
    "pre_norm": FLAG,
    "pretrained_window_sizes": each(WIDTH | each(WIDTH)),
    "proj_bias": FLAG,
    "qk_norm": FLAG,
    "qkv_bias": FLAG,
    "qkv_fused": FLAG,
    "ref_feat_shape": EXTENTS | each(EXTENTS, most=2),
    "reg_tokens": WIDTH,
    "rope_grid_indexing": WORD,
    "rope_grid_offset": NUMBER,
    "rope_jitter_coords": NUMBER,
    "rope_mrope_section": each(WIDTH, most=3),
    "rope_ref_feat_shape": EXTENTS,
    "rope_rescale_coords": NUMBER,
    "rope_rotate_half": FLAG,
    "rope_shift_coords": NUMBER,
    "rope_temperature": NUMBER,
    "rope_theta": NUMBER,
    "rope_type": WORD,
    "scale_attn_inner": FLAG,
    "scale_attn_inner_norm": FLAG,
    "scale_attn_norm": FLAG,
    "scale_mlp": FLAG,
    "scale_mlp_norm": FLAG,
    "standardize": FLAG,
    "strict_img_size": FLAG,
    "swiglu_align_to": WIDTH,
    "swiglu_mlp": FLAG,
    "use_abs_pos": FLAG,
    "use_abs_pos_emb": FLAG,
    "use_clipped_linears": FLAG,
    "use_fc_norm": FLAG,
    "use_key_only_attn_mask": FLAG,
    "use_post_norm": FLAG,
    "use_post_transformer_norm": FLAG,
    "use_pre_transformer_norm": FLAG,
    "use_rel_pos": FLAG,
    "use_rel_pos_bias": FLAG,
    "use_rope": FLAG,
    "use_rot_pos_emb": FLAG,
    "use_shared_rel_pos_bias": FLAG,
    "weight_init": WORD,
    "window_size": EXTENTS | each(EXTENTS),
}
_MODULES = (
    "beit",
    "deepseek_vit",
    "deit",
    "eva",
    "gemma4_vit",
    "naflexvit",
    "qwen3_vit",
    "swin_transformer",
    "swin_transformer_v2",
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_sam",
)


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


def recipe(model: Any) -> dict[str, Any]:
    """Return the architecture and arguments from which timm.create_model rebuilds a model."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if architecture is None or not hasattr(model, "_model_args"):
        raise UnknownModel(f"model must be built by timm.create_model, got {type(model).__name__} built otherwise")
    # timm omits these because inference does not need them; resuming training does.
    dropped = {name: value for name, value in model._model_args.items() if "drop" in name}
    arguments = get_model_args(model, dropped)
    return {"architecture": architecture, "arguments": {**arguments, **_of_features(model)}}


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Check that a recipe of a file holds only an architecture of timm and valid arguments.

    Raises:
        ValueError: the first invalid setting.
    """
    check("its recipe", recipe, {"architecture": WORD, "arguments": MAPPING}, limits)
    architecture = recipe["architecture"]
    if not is_model(architecture):
        raise ValueError(f"architecture of its recipe must be registered in timm, got {shown(architecture)}")
    module = model_entrypoint(architecture).__module__
    transformer = not module.startswith("timm.") or module.rpartition(".")[2] in _MODULES
    kinds = {name: kind | NOTHING for name, kind in (_OF_TRANSFORMERS if transformer else _OF_ANY).items()}
    check(f"the arguments of {architecture}", recipe["arguments"], kinds, limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """Build the model of a recipe with randomly initialised weights."""
    with torch.device(device):  # timm computes some of its buffers on the default device first
        model: nn.Module = timm.create_model(
            recipe["architecture"], pretrained=False, **recipe["arguments"], device=device
        )
    return model


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


def _of_features(model: Any) -> dict[str, Any]:
    """Return arguments without a classifier for a model built with features_only."""
    return {"num_classes": None, "global_pool": None} if model._model_args.get("features_only") else {}


def _bias_of_window(layer: Any) -> Any:
    """Return the parameter that disables the bias if zero; for V2, whose bias is then constant, of its last layer."""
    return layer.cpb_mlp[-1].weight if type(layer) is WindowAttentionV2 else layer.relative_position_bias_table


def _head_dim(layer: Any) -> int:
    return getattr(layer, "head_dim", None) or layer.qkv.out_features // (3 * layer.num_heads)
