"""`swap` for timm's models, and timm models that are built with an encoding."""

from functools import partial
from typing import Any

import timm
import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from timm.layers.attention import Attention, AttentionRope
from timm.models import get_model_args, is_model, model_entrypoint
from timm.models.eva import Eva, EvaAttention
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchrope.integrations import timm_models as timm_models
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
from torchrope.models.parts import encoding_parameters
from torchrope.ops import rotate, rotate_one
from torchrope.positions import grid
from torchrope.rotations import Rotation

# Attention layers that pass q and k through q_norm and k_norm, (batch, heads, tokens, head_dim), one after the other.
_NORMED = (Attention, AttentionRope, EvaAttention, ParallelScalingBlock)

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
    "attn_layer": WORD,
    "attn_only_layer_scale": FLAG,
    "attn_pool_mlp_ratio": NUMBER,
    "attn_pool_num_heads": WIDTH,
    "attn_type": WORD,
    "block_size": WIDTH,
    "class_token": FLAG,
    "depth": LAYERS,
    "depths": DEPTHS,
    "dynamic_img_pad": FLAG,
    "dynamic_img_size": FLAG,
    "embed_dim": WIDTH | each(WIDTH),
    "embed_norm_layer": WORD,
    "encoding": ENCODING,
    "fc_norm": FLAG,
    "final_norm": FLAG,
    "fix_init": FLAG,
    "head_dim": WIDTH | each(WIDTH | NOTHING),
    "head_init_scale": NUMBER,
    "init": WORD,
    "init_values": NUMBER,
    "keep_bias": FLAG,
    "mlp_ratio": NUMBERS,
    "no_embed_class": FLAG,
    "num_heads": WIDTHS,
    "num_kv_heads": WIDTH | each(WIDTH | NOTHING, most=1024),
    "num_reg_tokens": WIDTH,
    "patch_size": EXTENTS,
    "pool_include_prefix": FLAG,
    "pos_embed": WORD,
    "pre_norm": FLAG,
    "proj_bias": FLAG,
    "qk_norm": FLAG,
    "qkv_bias": FLAG,
    "qkv_fused": FLAG,
    "ref_feat_shape": EXTENTS,
    "reg_tokens": WIDTH,
    "rope_grid_indexing": WORD,
    "rope_grid_offset": NUMBER,
    "rope_jitter_coords": NUMBER,
    "rope_mrope_section": each(WIDTH, most=3),
    "rope_rescale_coords": NUMBER,
    "rope_rotate_half": FLAG,
    "rope_shift_coords": NUMBER,
    "rope_temperature": NUMBER,
    "rope_type": WORD,
    "scale_attn_inner": FLAG,
    "scale_attn_norm": FLAG,
    "scale_mlp": FLAG,
    "scale_mlp_norm": FLAG,
    "strict_img_size": FLAG,
    "swiglu_align_to": WIDTH,
    "swiglu_mlp": FLAG,
    "use_abs_pos_emb": FLAG,
    "use_fc_norm": FLAG,
    "use_post_norm": FLAG,
    "use_post_transformer_norm": FLAG,
    "use_pre_transformer_norm": FLAG,
    "use_rot_pos_emb": FLAG,
    "weight_init": WORD,
    "window_size": EXTENTS | each(EXTENTS),
}
_MODULES = ("deit", "eva", "swin_transformer", "vision_transformer", "vision_transformer_hybrid")


def adapters(model: nn.Module) -> list[Adapter]:
    """What swap needs for each model of timm inside a model."""
    found: list[Adapter] = []
    for module in model.modules():
        if isinstance(module, (VisionTransformer, Eva)):
            found.append(OfTokens(module))
        elif isinstance(module, SwinTransformer):
            found.append(OfWindows(module))
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


class OfTimm(Adapter):
    """A model of timm, whose optimisers ask it which parameters do not decay."""

    def attach(self, rotary: Rotary) -> None:
        rotary.handles.append(Replaced(self.tower, "no_weight_decay", partial(no_weight_decay, self.tower)))


class OfTokens(OfTimm):
    """VisionTransformer and Eva: every token attends to every other, rotated behind the norms of q and k."""

    def sites(self) -> list[Site]:
        lattice = tuple(self.tower.patch_embed.grid_size)
        return [
            Site(getattr(layer, "num_kv_heads", layer.num_heads), layer.head_dim, lattice) for layer in self._layers()
        ]

    def tables(self) -> list[nn.Parameter]:
        return [] if self.tower.pos_embed is None else [self.tower.pos_embed]

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        if getattr(self.tower, "rope", None) is not None and not rotary.keep_rotation:
            self._put_aside(rotary, "rope", None)
        dropout = self.tower.patch_drop
        if type(dropout) is PatchDropout:
            self._put_aside(
                rotary, "patch_drop", PatchDropoutWithIndices(dropout.prob, dropout.num_prefix_tokens, dropout.ordered)
            )
        places = Places(self.tower, rotary)
        hooks = [self.tower.patch_embed.register_forward_hook(places.enter)]
        if isinstance(self.tower.patch_drop, PatchDropoutWithIndices):
            hooks.append(self.tower.patch_drop.register_forward_hook(places.keep))
        hooks += [block.register_forward_pre_hook(places.recall) for block in self.tower.blocks]
        for index, layer in enumerate(self._layers()):
            turn = Turn(places, rotary.of_layer(index), tokens_first=isinstance(layer, ParallelScalingBlock))
            hooks.append(layer.q_norm.register_forward_hook(turn.queries))
            hooks.append(layer.k_norm.register_forward_hook(turn.keys))
        rotary.handles.extend(hooks)

    def detach(self, rotary: Rotary) -> None:
        super().detach(rotary)
        for name, module in rotary.put_aside.items():
            rotary.wake(name, list(module.parameters()))
            setattr(self.tower, name, module)

    def _put_aside(self, rotary: Rotary, name: str, successor: nn.Module | None) -> None:
        rotary.put_aside[name] = getattr(self.tower, name)
        rotary.silence(name, list(rotary.put_aside[name].parameters()))
        setattr(self.tower, name, successor)

    def _layers(self) -> list[Any]:
        layers = []
        for index, block in enumerate(self.tower.blocks):
            inside = [module for module in block.modules() if type(module) in _NORMED]
            if not inside:
                rule = "swap knows attention that norms q and k by themselves"
                raise ValueError(f"{rule}, got {type(block).__name__} as block {index}")
            layers.extend(inside)
        return layers


class OfWindows(OfTimm):
    """SwinTransformer: tokens attend within windows, rotated behind their projection by their place in the window."""

    def sites(self) -> list[Site]:
        return [Site(layer.num_heads, _head_dim(layer), tuple(layer.window_size)) for layer in self._layers()]

    def tables(self) -> list[nn.Parameter]:
        return [layer.relative_position_bias_table for layer in self._layers()]

    def attach(self, rotary: Rotary) -> None:
        super().attach(rotary)
        for index, layer in enumerate(self._layers()):
            turn = TurnInWindow(layer, rotary, rotary.of_layer(index))
            rotary.handles.append(layer.qkv.register_forward_hook(turn))

    def _layers(self) -> list[Any]:
        return [module for module in self.tower.modules() if isinstance(module, WindowAttention)]


def no_weight_decay(tower: Any) -> set[str]:
    """In place of a swapped tower's own: the names that it gives, and those of its encodings' parameters."""
    return {*type(tower).no_weight_decay(tower), *encoding_parameters(tower)}


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
        sizes = embed.dynamic_feat_size(tuple(args[0].shape[-2:]))
        self._place(self.rotary.positions(sizes, self.tower.num_prefix_tokens, device=tokens.device))

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
    """Rotate q, then k, of one layer."""

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

    def _turned(self, x: Tensor, rotation: Rotation) -> Tensor:
        if self.tokens_first:  # (batch, tokens, heads, head_dim)
            return rotate_one(x.transpose(1, 2), rotation, scores_only=True).transpose(1, 2)
        return rotate_one(x, rotation, scores_only=True)


class TurnInWindow:
    """Rotate q and k of a window's tokens in the output of their projection."""

    def __init__(self, layer: Any, rotary: Rotary, index: int) -> None:
        self.layer = layer
        self.rotary = rotary
        self.index = index

    def __call__(self, projection: nn.Module, args: tuple[Tensor, ...], qkv: Tensor) -> Tensor:
        """Turn `(windows, tokens, 3 heads head_dim)`."""
        positions = grid(*self.layer.window_size, **self.rotary.lattices[self.index], device=qkv.device)
        parts = qkv.unflatten(-1, (3, self.layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)  # (windows, heads, tokens, head_dim)
        q, k = rotate(q, k, self.rotary.encodings[self.index](positions), scores_only=True)
        return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).flatten(2)


def _of_features(model: Any) -> dict[str, Any]:
    """A feature model has no classes."""
    return {"num_classes": None, "global_pool": None} if model._model_args.get("features_only") else {}


def _head_dim(layer: Any) -> int:
    return layer.qkv.out_features // (3 * layer.num_heads)


def _gathered(positions: Tensor, front: int, kept: Tensor) -> Tensor:
    """Positions `(batch, tokens kept, axes)` of the first tokens and those kept `(batch, kept)` of the others."""
    first = positions[:front].expand(kept.shape[0], -1, -1)
    return torch.cat([first, positions[front:][kept]], dim=1)
