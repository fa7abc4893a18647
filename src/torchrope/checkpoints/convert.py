"""Convert pre-trained models to `ViT` and `Swin`, and load their weights into a backbone; report mismatches."""

import copy
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.checkpoints import saving
from torchrope.checkpoints.published import convert, family_of, load_published, options_of, timm_vit
from torchrope.checkpoints.settings import check_fits, described, differences, shortened
from torchrope.encodings import RelativePositionBias
from torchrope.lattice import Lattice
from torchrope.models import Features, Swin, ViT

HUBS = ("timm:", "hf:")
"""Prefixes of models that timm and transformers load by name."""
_WRAPPER = re.compile(r"^(?:model|vit|vision_model)\.")  # of timm's feature extractors and transformers' classifiers
_UNUSED = re.compile(r"(?:^|\.)(?:rotary|pooler)\.|embeddings\.mask_token$")


def load_backbone(features: Features, source: nn.Module) -> None:
    """Load the weights and spacing of a `ViT`, `Swin` or model that `to_torchrope` converts into a backbone like it."""
    model, trained = features.model, to_torchrope(source)
    rule = "source must have the architecture and encoding of the backbone"
    if type(model) is not type(trained):
        raise ValueError(f"{rule}, got a {type(trained).__name__} for a {type(model).__name__}")
    trained = _with_layers_of(model, trained)
    mine = {name: described(part) for name, part in model.named_modules() if not _is_left(name)}
    theirs = {name: described(part) for name, part in trained.named_modules(remove_duplicate=False)}
    differing = differences({name: theirs[name] for name in [*mine, "absolute"] if name in theirs}, mine)
    if differing:
        raise ValueError(f"{rule}, got {shortened(differing)}")
    state, own = fitted_state(model, trained), model.state_dict()
    check_fits(model, {name: value for name, value in state.items() if name in own or not _is_left(name)}, rule)
    plain = []  # stages with the same spacing at all sizes
    for pair in zip(getattr(model, "stages", [model]), getattr(trained, "stages", [trained]), strict=False):
        lattices = [stage.position_map for stage in pair]
        few = range(3, 3 + len(model.embed.patch_size))
        at, expected = (x(*few, spacing=None if x.unit is None else torch.ones(1, len(few))) for x in lattices)
        if all({"spacing", "origin"}.issuperset(lattice.settings()) for lattice in lattices):
            plain.append(pair)
        elif not torch.allclose(at, expected):
            raise ValueError(f"{rule}, got other positions on the same lattice")
    model.load_state_dict({name: state[name] for name in own})
    for stage, of_source in plain:
        stage.position_map = of_source.position_map


def _is_left(name: str) -> bool:
    """Return whether a part, or a weight, is none of a backbone's."""
    return name.partition(".")[0] in ("head", "norm")


def read_model(source: str | os.PathLike[str]) -> Any:
    """Load a model from a published checkpoint, what `torchrope.save` wrote, or "timm:NAME" and "hf:FOLDER_OR_NAME"."""
    if str(source).startswith(HUBS):
        return to_torchrope(load_named(str(source)))
    path = Path(os.path.expanduser(source))
    return saving.load(path) if path.is_dir() or _is_saved(path) else load_published(path)


def _is_saved(file: Path) -> bool:
    """Return whether `torchrope.save` wrote a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(file), "pt") as opened:
            return "torchrope" in (opened.metadata() or {})
    except SafetensorError:
        return False


def load_named(source: str) -> nn.Module:
    """Load "timm:NAME", or "hf:FOLDER_OR_NAME", a vision tower of transformers; no code other than theirs runs."""
    hub, _, name = source.partition(":")
    try:
        if hub == "timm":
            import timm

            return timm.create_model(name, pretrained=True)
        from transformers import AutoConfig, AutoModel, CLIPVisionModel

        folder = os.path.expanduser(name)
        kind = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
        build: Any = CLIPVisionModel if kind in ("clip", "clip_vision_model") else AutoModel
        return build.from_pretrained(folder, trust_remote_code=False)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error


def to_torchrope(source: nn.Module) -> ViT | Swin:
    """Convert a model of timm, or a ViT, DINOv2 or CLIP's vision tower of transformers, by its parameter names."""
    if isinstance(source, ViT | Swin):
        return source
    swap = next(iter(saving.swaps.describe_swaps(source).values()), None)
    tensors = {name: value for name, value in source.state_dict().items() if not _UNUSED.search(name)}
    state = {_WRAPPER.sub("", name): value.detach().cpu() for name, value in tensors.items()}
    if "embeddings.cls_token" in state or timm_vit.CLIP_TABLE in state:  # names of transformers
        config: Any = source.config
        converted: Any = timm_vit.convert(
            state, num_heads=config.num_attention_heads, input_size=config.image_size, activation=config.hidden_act
        )
    else:
        accepted = options_of(family_of(state))
        options = {name: value for name, value in _inferred_options(source, state).items() if name in accepted}
        converted = convert(state, **options)
    if isinstance(converted, ViT):  # that of a Swin is fixed
        eps = next(part.eps for part in source.modules() if isinstance(part, nn.LayerNorm))
        converted.arguments["norm_eps"] = eps
        for part in converted.modules():
            if isinstance(part, nn.LayerNorm):
                part.eps = eps
    if swap is not None:
        _take_encodings(converted, swap)
    return converted


def _take_encodings(model: ViT | Swin, swap: dict[str, Any]) -> None:
    """Copy the encodings of a swapped model into its conversion to a ViT."""
    first, *later = swap["lattices"]
    if swap["keep_rotation"]:
        raise ValueError("a swapped model must have a single rotation, got one swapped with keep_rotation=True")
    if isinstance(model, Swin) or any(lattice != first for lattice in later):
        raise ValueError("a swapped model must have equal token positions in all layers, got one whose lattices differ")
    model.encodings = nn.ModuleList(copy.deepcopy(encoding) for encoding in swap["encodings"]).eval()
    if first.per == "one":
        model.position_map = Lattice(**first.spaced(*model.embed.lattice(model.arguments["input_size"])))
    else:  # its spacing depends on the size of the input
        model.position_map = replace(first, shift=0.0, stretch=1.0, rescale=1.0)
    model.arguments["share_layers"] = len(swap["encodings"]) == 1
    layer: Any
    for index, layer in enumerate(model.layers):
        order = swap["channels"][index % len(swap["channels"])]
        if order is not None:  # in which channels of a pair are adjacent
            for parameter in layer.attention.qkv.parameters():
                qk = parameter.detach().unflatten(0, (3, layer.attention.num_heads, -1))[:2]
                qk.copy_(qk[:, :, list(order)])


def _inferred_options(source: nn.Module, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return the options of `load_published` that attributes of a model of timm determine."""
    tower: Any = getattr(source, "model", source)  # the wrapped model of timm's feature extractors
    size = getattr(getattr(tower, "patch_embed", None), "img_size", None)
    heads = [part.num_heads for part in source.modules() if hasattr(part, "qkv") and hasattr(part, "num_heads")]
    inferred: dict[str, Any] = {"num_heads": next(iter(heads), None), "input_size": size and tuple(size)}
    if any(type(part).__name__ == "QuickGELU" for part in source.modules()):
        inferred["activation"] = "quick_gelu"
    if not any(name.endswith("freqs") for name in state):
        inferred["encoding"] = "none" if getattr(tower, "rope", None) is None else "axial"
    return {name: value for name, value in inferred.items() if value is not None}


def fitted_state(model: ViT | Swin, source: ViT | Swin) -> dict[str, Tensor]:
    """Return the source's weights with tables resampled and without prefix tokens that the model lacks."""
    state = dict(source.state_dict())
    if isinstance(model, ViT) and not model.num_prefix:
        state["prefix_tokens"] = state["prefix_tokens"][:0]
    parts: dict[str, Any] = dict(source.named_modules(remove_duplicate=False))
    part: Any
    for name, part in model.named_modules():
        table, source_part = f"{name}.table", parts.get(name, part)
        if table in state and part.sizes != source_part.sizes:
            with torch.no_grad():
                to_sizes = source_part.resampled if isinstance(source_part, RelativePositionBias) else source_part
                state[table] = to_sizes(*part.sizes).reshape(part.table.shape)
    return state


def _with_layers_of(model: ViT | Swin, source: Any) -> Any:
    """Return the source without layers after those of a backbone, and with an encoding and bias for each if it has."""
    like, depth = copy.copy(source), len(model.layers if isinstance(model, ViT) else model.stages)
    like._modules = dict(source._modules)
    for kind, parts in source._modules.items():
        if isinstance(parts, nn.ModuleList):
            count = len(getattr(model, kind)) if kind in ("encodings", "biases") and len(parts) == 1 else 1
            like._modules[kind] = nn.ModuleList([*parts] * count if count > 1 else parts[:depth])
    return like
