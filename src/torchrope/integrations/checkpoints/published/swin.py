"""Rename the keys of published Swin state dicts to those of `torchrope.Swin`."""

import re
from collections.abc import Mapping

from torch import Tensor

from torchrope.integrations.checkpoints.published.tensors import without_gap

BUFFERS = re.compile(r"layers\.\d+\.blocks\.\d+\.(attn_mask|attn\.(relative_position_index|rope_t_[xy]))")
"""Names of buffers that are computed from sizes."""

_LAYER = {
    "norm1.weight": "layers.{}.norm1.weight",
    "norm1.bias": "layers.{}.norm1.bias",
    "attn.qkv.weight": "layers.{}.attention.qkv.weight",
    "attn.qkv.bias": "layers.{}.attention.qkv.bias",
    "attn.proj.weight": "layers.{}.attention.proj.weight",
    "attn.proj.bias": "layers.{}.attention.proj.bias",
    "attn.relative_position_bias_table": "biases.{}.table",
    "attn.rope_freqs": "encodings.{}.frequencies",
    "norm2.weight": "layers.{}.norm2.weight",
    "norm2.bias": "layers.{}.norm2.bias",
    "mlp.fc1.weight": "layers.{}.mlp.0.weight",
    "mlp.fc1.bias": "layers.{}.mlp.0.bias",
    "mlp.fc2.weight": "layers.{}.mlp.3.weight",
    "mlp.fc2.bias": "layers.{}.mlp.3.bias",
}
# Present in all layers or in none.
_OPTIONAL = {"attn.qkv.bias", "attn.relative_position_bias_table", "attn.rope_freqs"}
_MERGE = {
    "norm.weight": "merge.norm.weight",
    "norm.bias": "merge.norm.bias",
    "reduction.weight": "merge.proj.weight",
}
_OUTSIDE = {
    "patch_embed.proj.weight": "embed.proj.weight",
    "patch_embed.proj.bias": "embed.proj.bias",
    "patch_embed.norm.weight": "embed_norm.weight",
    "patch_embed.norm.bias": "embed_norm.bias",
    "norm.weight": "norm.weight",
    "norm.bias": "norm.bias",
}


def rename_swin(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of a Swin state dict of timm, Microsoft or RoPE-ViT to those of `torchrope.Swin`.

    Stages and layers are counted from the names. Microsoft's code merges patches at the end of a stage, timm's at the
    beginning of the next, as `Swin` does; its classifier is `head`, timm's is `head.fc`, and both may be missing.
    RoPE-ViT's frequencies become those of `encoding="mixed"`, with the axes in the order (y, x) instead of (x, y).

    Args:
        state: Names to tensors.

    Returns:
        A state dict for `Swin.load_state_dict`.

    Raises:
        ValueError: unknown or missing keys.

    References:
        timm, models/swin_transformer.py; microsoft/Swin-Transformer, models/swin_transformer.py; naver-ai/rope-vit,
        models/swin_transformer_rope.py.

    Example:
        >>> from timm.models.swin_transformer import SwinTransformer
        >>> from torchrope import Swin
        >>> theirs = SwinTransformer(img_size=32, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4)
        >>> model = Swin((32, 32), dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, encoding="bias")
        >>> model.load_state_dict(rename_swin(theirs.state_dict()))
        <All keys matched successfully>
    """
    state = {name: value for name, value in state.items() if not BUFFERS.fullmatch(name)}
    names = _names(state)
    unknown = sorted(state.keys() - names.keys())
    if unknown:
        raise ValueError(f"a Swin state dict must have known keys only, got {_listed(unknown)}")
    missing = sorted(names.keys() - state.keys())
    if missing:
        raise ValueError(f"a Swin state dict must have {_listed(missing)}, got {len(state)} other keys")
    renamed = {names[name]: value for name, value in state.items()}
    for name, value in renamed.items():
        if name == "embed.proj.weight":
            renamed[name] = value.flatten(1)  # weights of a convolution
        elif name.endswith(".frequencies"):
            renamed[name] = value.flip(0)
    return renamed


def _names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a dict from published names to torchrope's, for all parameters of a Swin of these depths."""
    names = dict(_OUTSIDE)
    depths = _depths(state)
    used = {name for name in _LAYER if name not in _OPTIONAL or any(key.endswith(name) for key in state)}
    merged_early = not any(key.startswith("layers.0.downsample.") for key in state)
    for stage, depth in enumerate(depths):
        for layer in range(depth):
            for theirs in _LAYER:
                if theirs in used:
                    names[f"layers.{stage}.blocks.{layer}.{theirs}"] = f"stages.{stage}.{_LAYER[theirs].format(layer)}"
        for theirs, ours in _MERGE.items():
            if stage:
                names[f"layers.{stage - (not merged_early)}.downsample.{theirs}"] = f"stages.{stage}.{ours}"
    head = next((prefix for prefix in ("head.fc", "head") if f"{prefix}.weight" in state), None)
    if head is not None:
        names |= {f"{head}.weight": "head.weight", f"{head}.bias": "head.bias"}
    return names


def _depths(state: Mapping[str, Tensor]) -> list[int]:
    """Return the number of layers of each stage, at least 1, counted up to the first gap in the numbers."""
    found = [re.match(r"layers\.(\d+)\.(?:blocks\.(\d+)\.)?", name) for name in state]
    layers: dict[int, set[int]] = {0: {0}}
    for match in filter(None, found):
        layers.setdefault(int(match[1]), {0}).add(int(match[2] or 0))
    return [without_gap(layers[stage]) for stage in range(without_gap(layers))]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
