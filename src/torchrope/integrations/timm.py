"""`swap` for timm's models, and timm models that are built with an encoding."""

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
from torchrope.integrations.own_rotation import OwnRotation
from torchrope.integrations.rotary import Adapter, Replaced, Rotary, Site
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
    check,
    each,
    one_of,
    shown,
)
from torchrope.integrations.timm_attention import beit_attention, sam_attention, swin_v2_attention
from torchrope.integrations.timm_hooks import (
    NoAngle,
    NormAndTurn,
    NoTable,
    OfLayer,
    Places,
    Turn,
    TurnInWindow,
    TurnOnLattice,
)
from torchrope.integrations.timm_rotation import gemma_rotation, own_rotation
from torchrope.models.layers import encoding_parameters
from torchrope.ops.norms import PLAIN

# Attention layers that pass q and k through q_norm and k_norm, one after the other: (batch, heads, tokens, head_dim),
# or with tokens before heads.
_NORMED = (Attention, AttentionRope, EvaAttention, ParallelScalingBlock, Gemma4Attention)
_TOKENS_FIRST = (ParallelScalingBlock, Gemma4Attention)

# What a file may say to any model of timm: nothing that names weights, files, caches or a hub.
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
# What those take that swap knows. Others of timm's may loop over such sizes.
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
    """What swap needs for each model of timm inside a model.

    Raises:
        ValueError: a model whose attention has no place for a rotation, and why.
    """
    known: dict[Any, type[Adapter]] = {
        (VisionTransformer, Eva, Beit): OfTokens,
        (Qwen3VitEncoder, DeepseekVitEncoder): OfEncoder,
        Gemma4VitEncoder: OfGemma,
        NaFlexVit: OfPatches,
        (SwinTransformer, SwinTransformerV2): OfWindows,
        VisionTransformerSAM: OfMaps,
    }
    found: list[Adapter] = []
    for module in model.modules():
        found.extend(adapter(module) for kind, adapter in known.items() if isinstance(module, kind))
    return found


def refuse(model: nn.Module) -> None:
    """Say why a model without such parts cannot be swapped, where the reason is known.

    Raises:
        ValueError: a model whose queries have no one place.
    """
    for module in model.modules():
        if isinstance(module, (Hiera, HieraDet)):
            rule = "swap needs queries of one place each, to rotate by torchrope.rotate in an attention of your own"
            raise ValueError(f"{rule}, got {type(module).__name__}, whose queries are the largest of several places")


def recipe(model: Any) -> dict[str, Any]:
    """What timm.create_model builds a model again from: its architecture and arguments."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if architecture is None or not hasattr(model, "_model_args"):
        raise ValueError(f"save needs a model that timm.create_model made, got {type(model).__name__} made otherwise")
    # Left out by timm, which thinks of inference; training goes on from a saved model.
    dropped = {name: value for name, value in model._model_args.items() if "drop" in name}
    arguments = get_model_args(model, dropped)
    return {"architecture": architecture, "arguments": {**arguments, **_of_features(model)}}


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Refuse a recipe of a file that names more than an architecture of timm's and the data which builds it.

    Raises:
        ValueError: the first setting that is wrong.
    """
    check("its recipe", recipe, {"architecture": WORD, "arguments": MAPPING}, limits)
    architecture = recipe["architecture"]
    if not is_model(architecture):
        raise ValueError(f"architecture of its recipe must be one that timm has, got {shown(architecture)}")
    module = model_entrypoint(architecture).__module__
    whole = not module.startswith("timm.") or module.rpartition(".")[2] in _MODULES
    kinds = {name: kind | NOTHING for name, kind in (_OF_TRANSFORMERS if whole else _OF_ANY).items()}
    check(f"the arguments of {architecture}", recipe["arguments"], kinds, limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """The model of a recipe, its weights initialised at random."""
    with torch.device(device):  # timm computes some of its buffers on the default device first
        model: nn.Module = timm.create_model(
            recipe["architecture"], pretrained=False, **recipe["arguments"], device=device
        )
    return model


class OfTimm(Adapter):
    """A model of timm, whose optimisers ask it which parameters do not decay."""

    def attach(self, rotary: Rotary) -> None:
        rotary.handles.append(Replaced(self.tower, "no_weight_decay", partial(no_weight_decay, self.tower)))


class OfTokens(OfTimm):
    """VisionTransformer, Eva and Beit: every token attends to every other, rotated by its place in the image."""

    rope = "rope"
    """The name of the tower's rotary embedding."""

    def sites(self) -> list[Site]:
        lattice = self._trained_lattice()
        return [
            Site(getattr(layer, "num_kv_heads", layer.num_heads), _head_dim(layer), lattice) for layer in self._layers()
        ]

    def tables(self) -> list[nn.Parameter]:
        layers = [layer for layer in self._layers() if isinstance(layer, BeitAttention)]
        shared = getattr(self.tower, "rel_pos_bias", None)
        biases = [bias.relative_position_bias_table for bias in (shared, *layers) if bias is not None]
        return [table for table in (getattr(self.tower, "pos_embed", None), *biases) if table is not None]

    def rotates(self) -> bool:
        return getattr(self.tower, self.rope, None) is not None

    def own_rotations(self) -> list[OwnRotation]:
        rope, num_prefix = getattr(self.tower, self.rope), self.tower.num_prefix_tokens
        return [own_rotation(rope, layer, index, num_prefix) for index, layer in enumerate(self._layers())]

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        if self.rotates() and not rotary.keep_rotation:
            self._put_aside(rotary, self.rope, self._without_rope())
        dropout = getattr(self.tower, "patch_drop", None)
        if type(dropout) is PatchDropout:
            self._put_aside(
                rotary, "patch_drop", PatchDropoutWithIndices(dropout.prob, dropout.num_prefix_tokens, dropout.ordered)
            )
        places = Places(self.tower, rotary)
        hooks: list[Any] = [self._enter(places)]
        if isinstance(getattr(self.tower, "patch_drop", None), PatchDropoutWithIndices):
            hooks.append(self.tower.patch_drop.register_forward_hook(places.keep))
        hooks += [block.register_forward_pre_hook(places.recall) for block in self.tower.blocks]
        for index, layer in enumerate(self._layers()):
            turn = Turn(places, rotary.of_layer(index), tokens_first=isinstance(layer, _TOKENS_FIRST))
            if isinstance(layer, BeitAttention):
                hooks.append(Replaced(layer, "forward", OfLayer(layer, turn, beit_attention).forward))
            else:
                hooks.append(layer.q_norm.register_forward_hook(turn.queries))
                hooks.append(layer.k_norm.register_forward_hook(turn.keys))
                for norm, keys in ((layer.q_norm, False), (layer.k_norm, True)):
                    if type(norm) in PLAIN:
                        hooks.append(Replaced(norm, "forward", NormAndTurn(norm, turn, keys=keys).forward))
        rotary.handles.extend(hooks)

    def detach(self, rotary: Rotary) -> None:
        super().detach(rotary)
        module: Any
        for name, module in rotary.put_aside.items():
            rotary.wake(name, list(module.parameters()))
            setattr(self.tower, name, module)
            if hasattr(module, "update_feat_shape"):  # the input size may have been set in the meantime
                module.update_feat_shape(self._trained_lattice())

    def _trained_lattice(self) -> tuple[int, ...]:
        return tuple(self.tower.patch_embed.grid_size)

    def _without_rope(self) -> nn.Module | None:
        """What stands in the tower in place of its rotary embedding."""
        return None

    def _enter(self, places: Places) -> Any:
        """Hook `places` in where the tower knows the lattice of its tokens."""
        return self.tower.patch_embed.register_forward_hook(places.enter)

    def _put_aside(self, rotary: Rotary, name: str, successor: nn.Module | None) -> None:
        rotary.put_aside[name] = getattr(self.tower, name)
        rotary.silence(name, list(rotary.put_aside[name].parameters()))
        setattr(self.tower, name, successor)

    def _layers(self) -> list[Any]:
        layers = []
        for index, block in enumerate(self.tower.blocks):
            inside = [module for module in block.modules() if type(module) in (*_NORMED, BeitAttention)]
            if not inside:
                rule = "swap knows attention that norms q and k by themselves"
                raise ValueError(f"{rule}, got {type(block).__name__} as block {index}")
            layers.extend(inside)
        return layers


class OfEncoder(OfTokens):
    """The encoders of Qwen3 and DeepSeek, which ask their rotary embedding for a table in every forward."""

    def _without_rope(self) -> nn.Module | None:
        return NoTable()


class OfGemma(OfTokens):
    """The encoder of Gemma 4, which places patches by coordinates (x, y)."""

    rope = "rotary_emb"

    def tables(self) -> list[nn.Parameter]:
        return [self.tower.patch_embed.position_embedding_table]

    def own_rotations(self) -> list[OwnRotation]:
        return [gemma_rotation(self.tower.rotary_emb, layer) for layer in self._layers()]

    def _trained_lattice(self) -> tuple[int, ...]:
        size = (getattr(self.tower, "pretrained_cfg", None) or {}).get("input_size", (3, 768, 768))  # timm's default
        return tuple(extent // patch for extent, patch in zip(size[1:], self.tower.patch_size, strict=True))

    def _without_rope(self) -> nn.Module | None:
        return NoAngle(self.tower.blocks[0].attn.head_dim)

    def _enter(self, places: Places) -> Any:
        return self.tower.rotary_emb.register_forward_hook(places.enter_coordinates)


class OfPatches(OfTokens):
    """NaFlexVit: patches of one image, or of images of several sizes with their coordinates (y, x)."""

    def tables(self) -> list[nn.Parameter]:
        embeds = self.tower.embeds
        found = (embeds.pos_embed, embeds.pos_embed_y, embeds.pos_embed_x)
        return [table for table in found if table is not None]

    def _trained_lattice(self) -> tuple[int, ...]:
        return tuple(self.tower.embeds.pos_embed_grid_size or (16, 16))  # timm's default

    def _enter(self, places: Places) -> Any:
        return self.tower.embeds.register_forward_hook(places.enter_patches, with_kwargs=True)


class OfWindows(OfTimm):
    """SwinTransformer and its V2: tokens attend within windows, rotated by their place in the window."""

    def sites(self) -> list[Site]:
        return [Site(layer.num_heads, _head_dim(layer), tuple(layer.window_size)) for layer in self._layers()]

    def tables(self) -> list[nn.Parameter]:
        return [_bias_of_window(layer) for layer in self._layers()]

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        for index, layer in enumerate(self._layers()):
            turn = TurnOnLattice(rotary, rotary.of_layer(index))
            handle: Any
            if isinstance(layer, WindowAttentionV2):
                handle = Replaced(layer, "forward", OfLayer(layer, turn, swin_v2_attention).forward)
            else:
                handle = layer.qkv.register_forward_hook(TurnInWindow(layer, turn))
            rotary.handles.append(handle)

    def _layers(self) -> list[Any]:
        return [module for module in self.tower.modules() if isinstance(module, (WindowAttention, WindowAttentionV2))]


class OfMaps(OfTimm):
    """VisionTransformerSAM: tokens of windows, and of the image in some layers, rotated by their place in it."""

    def sites(self) -> list[Site]:
        image = tuple(self.tower.patch_embed.grid_size)
        lattices = [(block.window_size,) * 2 if block.window_size else image for block in self.tower.blocks]
        layers = zip(self._layers(), lattices, self.tower.blocks, strict=True)
        return [
            Site(layer.num_heads, layer.head_dim, lattice, grows=not block.window_size)
            for layer, lattice, block in layers
        ]

    def tables(self) -> list[nn.Parameter]:
        biases = [layer for layer in self._layers() if layer.use_rel_pos]
        tables = [] if self.tower.pos_embed is None else [self.tower.pos_embed]
        return [*tables, *(table for layer in biases for table in (layer.rel_pos_h, layer.rel_pos_w))]

    def rotates(self) -> bool:
        return any(layer.rope is not None for layer in self._layers())

    def own_rotations(self) -> list[OwnRotation]:
        return [own_rotation(layer.rope, layer, index, 0) for index, layer in enumerate(self._layers())]

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        for index, layer in enumerate(self._layers()):
            turn = TurnOnLattice(rotary, rotary.of_layer(index))
            attention = partial(sam_attention, keep_rotation=rotary.keep_rotation)
            rotary.handles.append(Replaced(layer, "forward", OfLayer(layer, turn, attention).forward))

    def _layers(self) -> list[Any]:
        return [block.attn for block in self.tower.blocks]


def no_weight_decay(tower: Any) -> set[str]:
    """In place of a swapped tower's own: the names that it gives, if any, and those of its encodings' parameters."""
    own = getattr(type(tower), "no_weight_decay", None)
    return {*(own(tower) if own is not None else ()), *encoding_parameters(tower)}


def _of_features(model: Any) -> dict[str, Any]:
    """A feature model has no classes."""
    return {"num_classes": None, "global_pool": None} if model._model_args.get("features_only") else {}


def _bias_of_window(layer: Any) -> Any:
    """The parameter whose zeros leave no bias: of V2, the last of its network, which then adds the same everywhere."""
    return layer.cpb_mlp[-1].weight if type(layer) is WindowAttentionV2 else layer.relative_position_bias_table


def _head_dim(layer: Any) -> int:
    return getattr(layer, "head_dim", None) or layer.qkv.out_features // (3 * layer.num_heads)
