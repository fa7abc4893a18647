"""Load the weights of a whole model into a backbone: shared ones are copied, what does not fit is reported."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.attention import Attention
from torchrope.encodings import LearnedAPE, RelativePositionBias
from torchrope.integrations.published import convert, family_of, load_published, options_of
from torchrope.integrations.saving import FILE, load
from torchrope.models import Features, Swin, ViT
from torchrope.models.layers import PatchEmbed
from torchrope.positions import grid

_TIMM = "timm:"
_NUMBERED = re.compile(r"(?:layers|encodings|biases|stages)\.(\d+)\.")
_LEFT = ("head", "norm", "place")  # of no use to a backbone, or with weights of none


def load_backbone(features: Features, source: nn.Module | str | os.PathLike[str], **options: Any) -> None:
    """Give a backbone the weights of a pre-trained model.

    Positions keep the distance of pre-training, so that larger images run past its lattice; a learned table of them,
    or of offsets, is resampled where the backbone was built for another lattice. Head, last norm, later layers stay
    behind, and the class token and registers where the backbone attends in windows.

    Args:
        features: The backbone, of the architecture and encoding of the source.
        source: The file of a published checkpoint; a model or folder that `torchrope.save` wrote; "timm:NAME", which
            timm fetches; a `ViT`, a `Swin`, or a model of timm.
        options: For checkpoints and models of timm, as `load_published` takes them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: what does not fit, in one line, or what cannot be read.

    Example:
        >>> from torchrope import Features, ViT, load_backbone
        >>> settings = dict(patch_size=8, dim=32, depth=4, num_heads=2, encoding="mixed")
        >>> trained, backbone = ViT((32, 32), **settings), Features(ViT((64, 64), **settings), pyramid=True)
        >>> load_backbone(backbone, trained)
        >>> load_backbone(backbone, ViT((32, 32), **settings | {"encoding": "axial"}))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: a backbone takes the weights of a model built like it, got encodings.0: AxialRoPE ... and 1 more
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
    """A model as one of ours: a `ViT` or `Swin` itself, a model of timm by the names of its weights.

    Args:
        source: The model.
        options: As `load_published` takes them; heads, training size and encoding are what the model says by default.

    Raises:
        ValueError: a model whose weights `load_published` would not know.
    """
    if isinstance(source, ViT | Swin):
        return source
    state = {name.removeprefix("model."): value.detach().cpu() for name, value in source.state_dict().items()}
    takes = options_of(family_of(state))
    told = {name: value for name, value in _told(source, state).items() if name in takes}
    converted = convert(state, **{**told, **options})
    assert isinstance(converted, ViT | Swin)
    return converted


def from_timm(name: str, **options: Any) -> ViT | Swin:
    """A pre-trained model of timm as one of ours; timm fetches its weights."""
    import timm

    return as_own(timm.create_model(name, pretrained=True), **options)


def transfer(model: ViT | Swin, source: ViT | Swin) -> None:
    """Give a backbone the weights of a whole model, and the distance of its positions.

    What the backbone has no use for stays behind: the head, the last norm, later layers, and tokens without a place
    where it has none. A table of vectors or of offsets for another lattice is resampled.

    Args:
        model: The backbone, a `ViT` or `Swin`.
        source: A model of the same architecture and encoding.

    Raises:
        ValueError: what does not fit, the first three of it.
    """
    wrong = _other_parts(model, source)
    state = {} if wrong else _fitted(model, source)
    wrong = wrong or _other_shapes(model, state) or _other_places(model, source)
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"a backbone takes the weights of a model built like it, got {'; '.join(wrong[:3])}{more}")
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    for mine, theirs in zip(getattr(model, "stages", [model]), getattr(source, "stages", [source]), strict=False):
        mine.spacing, mine.origin = theirs.spacing, theirs.origin


def _told(source: nn.Module, state: dict[str, Tensor]) -> dict[str, Any]:
    """What a model of timm says of itself beyond its tensors."""
    tower: Any = getattr(source, "model", source)  # that of a model of features alone
    told: dict[str, Any] = {}
    size = getattr(getattr(tower, "patch_embed", None), "img_size", None)
    if size is not None:
        told["input_size"] = tuple(size)
    heads = [part.num_heads for part in source.modules() if hasattr(part, "qkv") and hasattr(part, "num_heads")]
    if heads:
        told["num_heads"] = heads[0]
    if not any(name.endswith("freqs") for name in state):
        told["encoding"] = "none" if getattr(tower, "rope", None) is None else "axial"
    return told


def _other_parts(model: ViT | Swin, source: ViT | Swin) -> list[str]:
    """Parts of the backbone that the source has not, or has of another kind or built otherwise."""
    if type(model) is not type(source):
        return [f"a {type(source).__name__} for a {type(model).__name__}"]
    mine, theirs = dict(model.named_modules()), dict(source.named_modules())
    names = [name for name in {**mine, "absolute": None} if name.partition(".")[0] not in _LEFT]
    told = []
    for name in names:
        own, other = mine.get(name), theirs.get(_shared(name, source))
        if _kind(own) != _kind(other):
            told.append(f"{name}: {_kind(other)} instead of {_kind(own)}")
        elif _built(own) != _built(other):
            told.append(f"{name}: {_built(other)} instead of {_built(own)}")
    return told


def _other_shapes(model: ViT | Swin, state: dict[str, Tensor]) -> list[str]:
    """Weights of other shapes, or that only one of the two has, among those that the backbone has a use for."""
    mine = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in state.items() if name in mine or _useful(name, model)}
    return [
        f"{name}: {theirs.get(name, 'nothing')} instead of {mine.get(name, 'nothing')}"
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]


def _other_places(model: ViT | Swin, source: ViT | Swin) -> list[str]:
    """Positions that a backbone would not find where the source does, jitter apart."""
    if not isinstance(model, ViT) or not isinstance(source, ViT) or (model.place is None and source.place is None):
        return []
    mine, theirs = (_at_rest(one.place, source) for one in (model, source))
    return [] if torch.allclose(mine, theirs) else ["positions: others on the same lattice"]


def _at_rest(place: Any, source: ViT) -> Tensor:
    """Positions of some lattice, by what places them in evaluation or by the source's spacing."""
    sizes = (3, 5)
    if place is None:
        return grid(*sizes, spacing=source.spacing, origin=source.origin)
    training = getattr(place, "training", None)
    if training:
        place.eval()
    positions = place(*sizes)
    if training:
        place.train()
    return positions


def _fitted(model: ViT | Swin, source: ViT | Swin) -> dict[str, Tensor]:
    """The source's weights, its tables of the backbone's sizes, without tokens that the backbone left out."""
    state = dict(source.state_dict())
    state |= {name: state[from_] for name in model.state_dict() if (from_ := _shared(name, source)) in state}
    if isinstance(model, ViT) and not model.num_prefix:
        state["prefix_tokens"] = state["prefix_tokens"][:0]
    parts = dict(source.named_modules())
    for name, own in model.named_modules():
        other, table = parts.get(_shared(name, source)), f"{name}.table"
        if table not in state or own.sizes == other.sizes:  # type: ignore[union-attr]
            continue
        assert isinstance(own, LearnedAPE | RelativePositionBias)
        assert isinstance(other, LearnedAPE | RelativePositionBias)
        with torch.no_grad():
            resampled = other.resampled(*own.sizes) if isinstance(other, RelativePositionBias) else other(*own.sizes)
        state[table] = resampled.reshape(own.table.shape)
    return state


def _shared(name: str, source: ViT | Swin) -> str:
    """What the source calls a part of the backbone: one encoding or bias may serve all of its layers."""
    kind, _, rest = name.partition(".")
    if kind in ("encodings", "biases") and rest and len(getattr(source, kind)) == 1:
        return ".".join([kind, "0", *rest.split(".")[1:]])
    return name


def _useful(name: str, model: ViT | Swin) -> bool:
    """Whether a backbone that takes a model over whole would have a use for a weight of this name."""
    layers = model.layers if isinstance(model, ViT) else model.stages
    number = _NUMBERED.match(name)
    return name.partition(".")[0] not in _LEFT and (number is None or int(number[1]) < len(layers))


def _kind(part: nn.Module | None) -> str:
    return "nothing" if part is None else type(part).__name__


def _built(part: nn.Module | None) -> str:
    """What a part was built with that its weights do not tell."""
    match part:
        case Attention():
            return f"{part.num_heads} heads"
        case nn.LayerNorm():
            return f"eps {part.eps}"
        case PatchEmbed():
            return f"patches of {part.patch_size}"
    return ""
