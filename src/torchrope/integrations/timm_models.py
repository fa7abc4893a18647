"""timm models that are built with an encoding:  timm.create_model("torchrope_vit_base_patch16_224", encoding="liere").

Registered when this module is imported.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    swin_transformer,
    vision_transformer,
)
from torch import Tensor, nn

from torchrope.encodings import Encoding
from torchrope.integrations.family import adapters
from torchrope.integrations.swap import Start, swap

__all__: list[str] = []  # timm appends the registered names


class _WithEncoding(nn.Module):
    """Base class of a model that is swapped when it is built."""

    def __init__(
        self,
        *,
        encoding: str | Encoding | Callable[..., Encoding] = "mixed",
        block_size: int | None = None,
        init: Start = "paper",
        keep_position_tables: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        swap(self, encoding, block_size=block_size, init=init, keep_position_tables=keep_position_tables)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> list[int]:
        """Drop layers after the last feature, with their encodings and the tables stored for `unswap`."""
        kept: list[int] = super().prune_intermediate_layers(*args, **kwargs)  # type: ignore[misc]
        (adapter,) = adapters(self)
        rotary, count = adapter.tower.rotary, len(adapter.layers)
        if len(rotary.encodings) > 1:
            rotary.keep_layers(count)
        for name in [name for name in rotary._buffers if name.startswith("table")]:
            if int(name.removeprefix("table")) >= count:
                delattr(rotary, name)
        return kept


class VisionTransformer(_WithEncoding, vision_transformer.VisionTransformer):
    """timm's vision transformer with an encoding in place of the position table.

    Args:
        pos_embed: "none", or "learn" for a table in addition to the encoding (RoPE+APE).
        settings: `encoding`, `block_size` and `init` of `torchrope.swap`, by default "mixed", None and "paper", for
            training from scratch; arguments of timm's class.
    """

    def __init__(self, *, pos_embed: str = "none", **settings: Any) -> None:
        super().__init__(pos_embed=pos_embed, **settings)


class SwinTransformer(_WithEncoding, swin_transformer.SwinTransformer):
    """timm's Swin with an encoding in its windows.

    Args:
        keep_bias: Whether to keep the relative position bias in addition to the encoding (RoPE+RPB).
        settings: As of `VisionTransformer`.
    """

    def __init__(self, *, keep_bias: bool = False, **settings: Any) -> None:
        super().__init__(keep_position_tables=keep_bias, **settings)


def _weights(read: Callable[..., Any], state: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Read a checkpoint of a model without encodings by timm's filter; encodings keep their initial values."""
    if getattr(model, "pos_embed", None) is None:
        state = {name: value for name, value in state.items() if name != "pos_embed"}
    initial = {name: value for name, value in model.state_dict().items() if name.startswith("rotary.")}
    return {**initial, **read(state, model)}


_VIT: dict[str, dict[str, Any]] = {
    "torchrope_vit_tiny_patch16_224": dict(embed_dim=192, depth=12, num_heads=3),
    "torchrope_vit_small_patch16_224": dict(embed_dim=384, depth=12, num_heads=6),
    "torchrope_vit_base_patch16_224": dict(embed_dim=768, depth=12, num_heads=12),
    "torchrope_vit_large_patch16_224": dict(embed_dim=1024, depth=24, num_heads=16),
}
_SWIN: dict[str, dict[str, Any]] = {
    "torchrope_swin_tiny_patch4_window7_224": dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
    "torchrope_swin_small_patch4_window7_224": dict(embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24)),
    "torchrope_swin_base_patch4_window7_224": dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32)),
    "torchrope_swin_large_patch4_window7_224": dict(embed_dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48)),
}
_DEFAULTS: dict[str, Any] = dict(
    num_classes=1000,
    input_size=(3, 224, 224),
    fixed_input_size=True,
    crop_pct=0.9,
    interpolation="bicubic",
    mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD,
    first_conv="patch_embed.proj",
)
_heads: dict[str, Any] = {**dict.fromkeys(_VIT, "head"), **dict.fromkeys(_SWIN, "head.fc")}
default_cfgs = generate_default_cfgs({name: {**_DEFAULTS, "classifier": head} for name, head in _heads.items()})


def _register(name: str, family: type[nn.Module], library: Any, features: Any, sizes: dict[str, Any]) -> None:
    """Register a model in timm; `features` is the default of out_indices."""

    def entry(pretrained: bool = False, **settings: Any) -> nn.Module:
        model: nn.Module = build_model_with_cfg(
            family,
            name,
            pretrained,
            pretrained_filter_fn=partial(_weights, library.checkpoint_filter_fn),
            feature_cfg=dict(out_indices=settings.pop("out_indices", features), feature_cls="getter"),
            **{**sizes, **settings},
        )
        return model

    entry.__name__ = name
    register_model(entry)


for _name, _sizes in _VIT.items():
    _register(_name, VisionTransformer, vision_transformer, 3, _sizes)
for _name, _sizes in _SWIN.items():
    _register(_name, SwinTransformer, swin_transformer, (0, 1, 2, 3), _sizes)
