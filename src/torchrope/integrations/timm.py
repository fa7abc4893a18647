"""`swap` for timm's models, and timm models that are built with an encoding."""

from collections.abc import Callable
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
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

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
from torchrope.integrations.timm_rotation import gemma_rotation, own_rotation
from torchrope.ops import rotate, rotate_one
from torchrope.rotations import Rotation

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
        if isinstance(module, (Hiera, HieraDet)):
            rule = "swap needs queries of one place each, to rotate by torchrope.rotate in an attention of your own"
            raise ValueError(f"{rule}, got {type(module).__name__}, whose queries are the largest of several places")
    return found


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


class OfTokens(Adapter):
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

    def _enter(self, places: "Places") -> Any:
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

    def _enter(self, places: "Places") -> Any:
        return self.tower.rotary_emb.register_forward_hook(places.enter_coordinates)


class OfPatches(OfTokens):
    """NaFlexVit: patches of one image, or of images of several sizes with their coordinates (y, x)."""

    def tables(self) -> list[nn.Parameter]:
        embeds = self.tower.embeds
        found = (embeds.pos_embed, embeds.pos_embed_y, embeds.pos_embed_x)
        return [table for table in found if table is not None]

    def _trained_lattice(self) -> tuple[int, ...]:
        return tuple(self.tower.embeds.pos_embed_grid_size or (16, 16))  # timm's default

    def _enter(self, places: "Places") -> Any:
        return self.tower.embeds.register_forward_hook(places.enter_patches, with_kwargs=True)


class OfWindows(Adapter):
    """SwinTransformer and its V2: tokens attend within windows, rotated by their place in the window."""

    def sites(self) -> list[Site]:
        return [Site(layer.num_heads, _head_dim(layer), tuple(layer.window_size)) for layer in self._layers()]

    def tables(self) -> list[nn.Parameter]:
        return [_bias_of_window(layer) for layer in self._layers()]

    def attach(self, rotary: Rotary) -> None:
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


class OfMaps(Adapter):
    """VisionTransformerSAM: tokens of windows, and of the image in some layers, rotated by their place in it."""

    def sites(self) -> list[Site]:
        image = tuple(self.tower.patch_embed.grid_size)
        lattices = [(block.window_size,) * 2 if block.window_size else image for block in self.tower.blocks]
        layers = zip(self._layers(), lattices, strict=True)
        return [Site(layer.num_heads, layer.head_dim, lattice) for layer, lattice in layers]

    def tables(self) -> list[nn.Parameter]:
        biases = [layer for layer in self._layers() if layer.use_rel_pos]
        tables = [] if self.tower.pos_embed is None else [self.tower.pos_embed]
        return [*tables, *(table for layer in biases for table in (layer.rel_pos_h, layer.rel_pos_w))]

    def rotates(self) -> bool:
        return any(layer.rope is not None for layer in self._layers())

    def own_rotations(self) -> list[OwnRotation]:
        return [own_rotation(layer.rope, layer, index, 0) for index, layer in enumerate(self._layers())]

    def attach(self, rotary: Rotary) -> None:
        for index, layer in enumerate(self._layers()):
            turn = TurnOnLattice(rotary, rotary.of_layer(index))
            attention = partial(sam_attention, keep_rotation=rotary.keep_rotation)
            rotary.handles.append(Replaced(layer, "forward", OfLayer(layer, turn, attention).forward))

    def _layers(self) -> list[Any]:
        return [block.attn for block in self.tower.blocks]


class NoTable(nn.Module):
    """In place of a rotary embedding: no table, and the layers do not rotate."""

    def get_embed(self, *args: Any, **kwargs: Any) -> None:
        """No table."""


class NoAngle(nn.Module):
    """In place of Gemma 4's rotary embedding: cos = 1 and sin = 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each `(1, 1, head_dim)`."""
        return x.new_ones(1, 1, self.head_dim), x.new_zeros(1, 1, self.head_dim)


class Places:
    """Where the tokens of the present forward are: written at the patch embedding, read by the layers behind it.

    A block that gradient checkpointing recomputes may belong to an earlier forward than the last one; it finds its
    own places by the tokens that it is given.
    """

    def __init__(self, tower: nn.Module, rotary: Rotary) -> None:
        self.tower: Any = tower
        self.rotary = rotary
        self.positions: list[Tensor] = []  # of each encoding
        self.shared: Rotation | None = None  # the one rotation, where one encoding serves all layers
        self.of_tokens: Any = WeakTensorKeyDictionary()

    def enter(self, embed: Any, args: tuple[Tensor, ...], tokens: Tensor) -> None:
        """Behind the patch embedding: place the tokens on their lattice."""
        self._enter_lattice(embed.dynamic_feat_size(tuple(args[0].shape[-2:])), tokens.device)

    def enter_patches(
        self, embeds: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]
    ) -> None:
        """Behind NaFlexVit's embedding: place the patches on the lattice of the image, or each by its coordinates."""
        tokens, sizes = output
        coordinates = kwargs.get("patch_coord")
        if coordinates is None:
            self._enter_lattice(tuple(sizes), tokens.device)
        else:
            self._enter_coordinates(coordinates)

    def enter_coordinates(self, rope: nn.Module, args: tuple[Tensor, Tensor], output: Any) -> None:
        """Behind Gemma 4's rotary embedding, which gets coordinates (x, y)."""
        self._enter_coordinates(args[1].flip(-1))

    def _enter_lattice(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self._place(self.rotary.positions(sizes, self.tower.num_prefix_tokens, device=device))

    def _enter_coordinates(self, coordinates: Tensor) -> None:
        sizes = [axis.amax(dim=-1, keepdim=True) + 1 for axis in coordinates.unbind(-1)]  # (batch, 1) each
        self._place(self.rotary.positions_at(coordinates, sizes, self.tower.num_prefix_tokens))

    def keep(self, dropout: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        """Behind patch dropout: the tokens that are left keep their places."""
        tokens, kept = output
        if kept is not None:
            front = self.tower.num_prefix_tokens
            self._place([_gathered(where, front, kept) for where in self.positions])
        return tokens if isinstance(self.tower, VisionTransformer) else output

    def recall(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Before a block: go back to the forward that these tokens belong to."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tokens = args[0]
        if tokens in self.of_tokens:
            self.positions, self.shared = self.of_tokens[tokens]
        else:
            self.of_tokens[tokens] = (self.positions, self.shared)

    def rotation(self, index: int) -> Rotation:
        """The rotation of one encoding for the present tokens."""
        if not self.positions:
            raise ValueError("a swapped model places its tokens at the patch embedding, got a block called by itself")
        return self.rotary.encodings[index](self.positions[index]) if self.shared is None else self.shared

    def _place(self, positions: list[Tensor]) -> None:
        self.positions = positions
        # Made here and not in the first layer: gradient checkpointing must find it outside of what it recomputes.
        self.shared = self.rotary.encodings[0](positions[0]) if len(positions) == 1 else None

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins with a forward of its own."""
        return {"tower": self.tower, "rotary": self.rotary}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Turn:
    """Rotate q, then k, of one layer, by where the tokens of the present forward are."""

    def __init__(self, places: Places, index: int, *, tokens_first: bool) -> None:
        self.places = places
        self.index = index
        self.tokens_first = tokens_first
        self.rotation: Rotation | None = None

    def queries(self, norm: nn.Module, args: tuple[Tensor, ...], q: Tensor) -> Tensor:
        """Behind the norm of q."""
        self.rotation = self.places.rotation(self.index)
        return self._turned(q, self.rotation)

    def keys(self, norm: nn.Module, args: tuple[Tensor, ...], k: Tensor) -> Tensor:
        """Behind the norm of k, which follows."""
        rotation, self.rotation = self.rotation, None
        assert rotation is not None
        return self._turned(k, rotation)

    def __call__(self, q: Tensor, k: Tensor, sizes: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Both at once."""
        rotation = self.places.rotation(self.index)
        return self._turned(q, rotation), self._turned(k, rotation)

    def _turned(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = self.places.rotary.in_pairs(x, self.index)
        if self.tokens_first:  # (batch, tokens, heads, head_dim)
            return rotate_one(x.transpose(1, 2), rotation, scores_only=True).transpose(1, 2)
        return rotate_one(x, rotation, scores_only=True)


class TurnOnLattice:
    """Rotate q and k of one layer, whose tokens are a lattice of their own."""

    def __init__(self, rotary: Rotary, index: int) -> None:
        self.rotary = rotary
        self.index = index

    def __call__(self, q: Tensor, k: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Turn `(windows, heads, tokens, head_dim)`."""
        rotation = self.rotary.rotation(self.index, sizes, device=q.device)
        q, k = self.rotary.in_pairs(q, self.index), self.rotary.in_pairs(k, self.index)
        return rotate(q, k, rotation, scores_only=True)


class TurnInWindow:
    """Rotate q and k of a window's tokens in the output of their projection."""

    def __init__(self, layer: Any, turn: TurnOnLattice) -> None:
        self.layer = layer
        self.turn = turn

    def __call__(self, projection: nn.Module, args: tuple[Tensor, ...], qkv: Tensor) -> Tensor:
        """Turn `(windows, tokens, 3 heads head_dim)`."""
        parts = qkv.unflatten(-1, (3, self.layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)  # (windows, heads, tokens, head_dim)
        q, k = self.turn(q, k, tuple(self.layer.window_size))
        return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).flatten(2)


class OfLayer:
    """The forward of an attention layer that has no place to hook a rotation in."""

    def __init__(self, layer: nn.Module, turn: Turn | TurnOnLattice, attention: Callable[..., Tensor]) -> None:
        self.layer = layer
        self.turn = turn
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's attention with rotated q and k."""
        return self.attention(self.layer, self.turn, *args, **kwargs)


def _of_features(model: Any) -> dict[str, Any]:
    """A feature model has no classes."""
    return {"num_classes": None, "global_pool": None} if model._model_args.get("features_only") else {}


def _bias_of_window(layer: Any) -> Any:
    """The parameter whose zeros leave no bias: of V2, the last of its network, which then adds the same everywhere."""
    return layer.cpb_mlp[-1].weight if type(layer) is WindowAttentionV2 else layer.relative_position_bias_table


def _head_dim(layer: Any) -> int:
    return getattr(layer, "head_dim", None) or layer.qkv.out_features // (3 * layer.num_heads)


def _gathered(positions: Tensor, front: int, kept: Tensor) -> Tensor:
    """Positions `(batch, tokens kept, axes)` of the first tokens and those kept `(batch, kept)` of the others."""
    of_samples = positions.expand(kept.shape[0], *positions.shape[-2:])
    index = kept.unsqueeze(-1).expand(-1, -1, positions.shape[-1])
    return torch.cat([of_samples[:, :front], of_samples[:, front:].gather(1, index)], dim=1)
