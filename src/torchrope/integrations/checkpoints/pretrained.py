"""`load_backbone`: load the weights of a pre-trained model into a backbone and report mismatches."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.attention import Attention
from torchrope.encodings import RelativePositionBias
from torchrope.integrations.checkpoints.published import convert, family_of, load_published, options_of
from torchrope.integrations.checkpoints.saving import FILE, load
from torchrope.lattice import Lattice
from torchrope.models import Features, Swin, ViT
from torchrope.models.layers import PatchEmbed

_TIMM = "timm:"
_NUMBERED = re.compile(r"(?:layers|encodings|biases|stages)\.(\d+)\.")
_LEFT = ("head", "norm", "position_map")  # not used by a backbone, or without weights


def load_backbone(features: Features, source: nn.Module | str | os.PathLike[str], **options: Any) -> None:
    """Load the weights of a pre-trained model into a backbone.

    Positions keep the spacing of pre-training, so larger images extend beyond its lattice. A learned position table or
    relative position bias is resampled if the backbone was built for another lattice. The head, the last norm and later
    layers are skipped, as are the class token and registers if the backbone attends in windows.

    Args:
        features: The backbone, of the architecture and encoding of the source.
        source: The file of a published checkpoint; a model or folder that `torchrope.save` wrote; "timm:NAME", which
            timm downloads; a `ViT`, a `Swin`, or a model of timm.
        options: Options of `load_published`, for checkpoints and models of timm.

    Raises:
        FileNotFoundError: no such file.
        ValueError: mismatched parts, or a source that cannot be read.

    Example:
        >>> from torchrope import Features, ViT, load_backbone
        >>> settings = dict(patch_size=8, dim=32, depth=4, num_heads=2, encoding="mixed")
        >>> trained, backbone = ViT((32, 32), **settings), Features(ViT((64, 64), **settings), pyramid=True)
        >>> load_backbone(backbone, trained)
        >>> load_backbone(backbone, ViT((32, 32), **settings | {"encoding": "axial"}))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: source must have the architecture and encoding of the backbone, got encodings.0: ... and 1 more
    """
    whole = as_own(source, **options) if isinstance(source, nn.Module) else as_own(_read(source, options))
    transfer(features.model, whole)


def _read(source: str | os.PathLike[str], options: dict[str, Any]) -> nn.Module:
    if str(source).startswith(_TIMM):
        return from_timm(str(source).removeprefix(_TIMM), **options)
    path = Path(source).expanduser()
    if path.name == FILE or (path / FILE).exists():
        return load(path)
    return load_published(path, **options)


def as_own(source: nn.Module, **options: Any) -> ViT | Swin:
    """Convert a model of timm to a `ViT` or `Swin` by its parameter names; a `ViT` or `Swin` is returned unchanged.

    Args:
        source: The model.
        options: Options of `load_published`; heads, training size and encoding default to the model's.

    Raises:
        ValueError: a model whose parameter names `load_published` does not support.
    """
    if isinstance(source, ViT | Swin):
        return source
    state = {name.removeprefix("model."): value.detach().cpu() for name, value in source.state_dict().items()}
    accepted = options_of(family_of(state))
    defaults = {name: value for name, value in _inferred_options(source, state).items() if name in accepted}
    converted = convert(state, **{**defaults, **options})
    assert isinstance(converted, ViT | Swin)
    return converted


def from_timm(name: str, **options: Any) -> ViT | Swin:
    """Download a pre-trained model of timm and convert it to a `ViT` or `Swin`.

    Raises:
        ValueError: an architecture that `load_published` does not support.
    """
    import timm

    return as_own(timm.create_model(name, pretrained=True), **options)


def transfer(model: ViT | Swin, source: ViT | Swin) -> None:
    """Copy the weights of a model, and its spacing and origin of positions, to a backbone.

    Parts that the backbone does not use are skipped: the head, the last norm, later layers, and prefix tokens if it has
    none. A position table or relative position bias of another lattice is resampled.

    Args:
        model: The backbone, a `ViT` or `Swin`.
        source: A model of the same architecture and encoding.

    Raises:
        ValueError: the first three mismatches.
    """
    mismatches = _other_parts(model, source)
    state = {} if mismatches else _fitted(model, source)
    mismatches = mismatches or _other_shapes(model, state) or _other_positions(model, source)
    if mismatches:
        more = f"; and {len(mismatches) - 3} more" if len(mismatches) > 3 else ""
        received = f"{'; '.join(mismatches[:3])}{more}"
        raise ValueError(f"source must have the architecture and encoding of the backbone, got {received}")
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    for mine, theirs in zip(getattr(model, "stages", [model]), getattr(source, "stages", [source]), strict=False):
        if _is_plain(mine.position_map) and _is_plain(theirs.position_map):
            mine.position_map = theirs.position_map


def _inferred_options(source: nn.Module, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return the options of `load_published` that attributes of a model of timm determine."""
    tower: Any = getattr(source, "model", source)  # the wrapped model of timm's feature extractors
    inferred: dict[str, Any] = {}
    size = getattr(getattr(tower, "patch_embed", None), "img_size", None)
    if size is not None:
        inferred["input_size"] = tuple(size)
    heads = [part.num_heads for part in source.modules() if hasattr(part, "qkv") and hasattr(part, "num_heads")]
    if heads:
        inferred["num_heads"] = heads[0]
    if not any(name.endswith("freqs") for name in state):
        inferred["encoding"] = "none" if getattr(tower, "rope", None) is None else "axial"
    return inferred


def _differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return [f"{name}: {theirs.get(name, 'nothing')} instead of {mine.get(name, 'nothing')}" for name in names]


def _other_parts(model: ViT | Swin, source: ViT | Swin) -> list[str]:
    """Return the submodules of the backbone whose class or settings differ from the source's."""
    if type(model) is not type(source):
        return [f"a {type(source).__name__} for a {type(model).__name__}"]
    mine, theirs = dict(model.named_modules()), dict(source.named_modules())
    names = [name for name in {**mine, "absolute": None} if name.partition(".")[0] not in _LEFT]
    return _differences(
        {name: _described(mine.get(name)) for name in names},
        {name: _described(theirs.get(_shared(name, source))) for name in names},
    )


def _other_shapes(model: ViT | Swin, state: dict[str, Tensor]) -> list[str]:
    """Return the weights that the backbone uses whose shapes differ, or that only one of the two has."""
    mine = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in state.items() if name in mine or _useful(name, model)}
    return _differences(mine, theirs)


def _other_positions(model: ViT | Swin, source: ViT | Swin) -> list[str]:
    """Return a mismatch if backbone and source compute different positions, apart from spacing, origin and jitter."""
    parts = zip(getattr(model, "stages", [model]), getattr(source, "stages", [source]), strict=False)
    for mine, theirs in ((mine.position_map, theirs.position_map) for mine, theirs in parts):
        plain, axes = _is_plain(mine) and _is_plain(theirs), len(model.embed.patch_size)
        if not plain and not torch.allclose(_evaluated(mine, axes), _evaluated(theirs, axes)):
            return ["positions: others on the same lattice"]
    return []


def _is_plain(position_map: Any) -> bool:
    """Return whether positions are those of a lattice whose spacing is the same at all sizes."""
    return isinstance(position_map, Lattice) and {"spacing", "origin"}.issuperset(position_map.settings())


def _evaluated(position_map: Any, axes: int) -> Tensor:
    """Compute positions of a sample lattice in evaluation mode."""
    if isinstance(position_map, nn.Module):
        position_map = copy.deepcopy(position_map).eval()
    in_units = isinstance(position_map, Lattice) and position_map.unit is not None
    return position_map(*range(3, 3 + axes), **({"spacing": torch.ones(1, axes)} if in_units else {}))


def _fitted(model: ViT | Swin, source: ViT | Swin) -> dict[str, Tensor]:
    """Return the source's weights with tables resampled and without prefix tokens that the backbone lacks."""
    state = dict(source.state_dict())
    state |= {name: state[from_] for name in model.state_dict() if (from_ := _shared(name, source)) in state}
    if isinstance(model, ViT) and not model.num_prefix:
        state["prefix_tokens"] = state["prefix_tokens"][:0]
    parts: dict[str, Any] = dict(source.named_modules())
    own: Any
    for name, own in model.named_modules():
        table, other = f"{name}.table", parts.get(_shared(name, source), own)
        if table not in state or own.sizes == other.sizes:
            continue
        with torch.no_grad():
            resampled = other.resampled(*own.sizes) if isinstance(other, RelativePositionBias) else other(*own.sizes)
        state[table] = resampled.reshape(own.table.shape)
    return state


def _shared(name: str, source: ViT | Swin) -> str:
    """Return the source's name of a part of the backbone; one encoding or bias may be shared by all layers."""
    kind, _, rest = name.partition(".")
    if kind in ("encodings", "biases") and rest and len(getattr(source, kind)) == 1:
        return ".".join([kind, "0", *rest.split(".")[1:]])
    return name


def _useful(name: str, model: ViT | Swin) -> bool:
    """Return whether a weight of this name belongs to a part that the backbone uses."""
    layers = model.layers if isinstance(model, ViT) else model.stages
    number = _NUMBERED.match(name)
    return name.partition(".")[0] not in _LEFT and (number is None or int(number[1]) < len(layers))


def _described(part: nn.Module | None) -> str:
    """Return the class of a part, with settings that do not affect the shapes of its weights."""
    name = "nothing" if part is None else type(part).__name__
    match part:
        case Attention():
            return f"{name} of {part.num_heads} heads"
        case nn.LayerNorm():
            return f"{name} of eps {part.eps}"
        case PatchEmbed():
            return f"{name} of patches {part.patch_size}"
    return name
