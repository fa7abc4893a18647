"""Put an encoding into a model of timm or transformers, and take it out again."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn

from torchrope.encodings import Encoding, NoEncoding, choose
from torchrope.encodings.base import Init, check_init
from torchrope.integrations.describing import describe, written
from torchrope.integrations.rotary import ATTRIBUTE, Adapter, Rotary, Site
from torchrope.positions import PerAxis
from torchrope.tensors import can_read

Model = TypeVar("Model", bound=nn.Module)

# The library that a model comes from, and the module of ours that knows it.
LIBRARIES = {"timm": "torchrope.integrations.timm", "transformers": "torchrope.integrations.transformers"}


def swap(
    model: Model,
    encoding: str | Encoding | Callable[..., Encoding],
    *,
    block_size: int | None = None,
    keep_ape: bool = True,
    keep_rotation: bool = False,
    init: Init = "zeros",
    spacing: PerAxis | None = None,
    origin: PerAxis | None = None,
) -> Model:
    """Rotate the queries and keys of a model by an encoding:  softmax(q^T R(p)^T R(p') k / √d) v  in every layer.

    The model is changed in place; its parameters keep their names, those of the encoding come under `rotary`. With
    init="zeros" and keep_ape=True its outputs stay the same bit for bit, so that fine-tuning starts where training
    ended. A rotation that the model has already is replaced.

    Args:
        model: Of timm: VisionTransformer (ViT, DeiT, DINOv2, CLIP and SigLIP towers), Eva (EVA-02, rope ViTs, DINOv3),
            SwinTransformer. Of transformers: CLIP, ViT, DINOv2, DINOv3 and SigLIP vision models, and what is built
            around them. Also a model of your own that holds one of these.
        encoding: A name ("mixed", "liere:8"); an `Encoding`, which all layers share, its rotation computed once per
            forward; or what builds one for each layer from num_axes, num_heads and head_dim.
        block_size: b, for a name or a factory that takes one.
        keep_ape: Whether the model's own position table (a Swin's relative bias) stays. False sets it to zero and
            freezes it; `unswap` brings it back.
        keep_rotation: Whether a rotation that the model has already stays beside the new one.
        init: "zeros", or "paper" for the start that the paper chose; for encodings that are built here and learn.
        spacing: Distance between neighbouring tokens, one number or one per axis; by default the convention of the
            encoding's paper at the size the model was built for. It never changes with the input size.
        origin: Position of the first token, likewise.

    Returns:
        The same model.

    Raises:
        ValueError: a model that is not known, or swapped already; an encoding that does not fit its heads.

    Warns:
        UserWarning: the model knows no positions, for keep_ape=False silences its table and generators start at zero;
            an encoding that `save` cannot describe.

    References:
        ComRoPE, supplement B.2: with zero generators rotary attention is plain attention.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10).eval()
        >>> image = torch.randn(1, 3, 224, 224)
        >>> before = model(image)
        >>> torch.equal(swap(model, "liere", block_size=8)(image), before)
        True
    """
    adapter = adapt(model)
    if getattr(adapter.tower, ATTRIBUTE, None) is not None:
        raise ValueError(f"swap needs a model that is not swapped, got {_name(model)} that is: unswap it first")
    sites = adapter.sites()
    encodings = _encodings(encoding, sites, block_size, check_init(init))
    install(adapter, encodings, keep_ape=keep_ape, keep_rotation=keep_rotation, spacing=spacing, origin=origin)
    if not keep_ape and not keep_rotation and all(map(_rests, encodings)):
        told = "the table is silent and all generators are zero; init='paper' starts with a rotation"
        warnings.warn(f"{_name(model)} knows no positions for now: {told}", stacklevel=2)
    for error in filter(None, map(_not_saved, {type(encoding): encoding for encoding in encodings}.values())):
        warnings.warn(f"torchrope.save will refuse this {_name(model)}: {error}", stacklevel=2)
    return model


def unswap(model: Model) -> Model:
    """Take out what `swap` put into a model, and give it back as it was: its table, its own rotation.

    Args:
        model: A swapped model; it is changed in place. What was trained since stays trained.

    Returns:
        The same model.

    Raises:
        ValueError: a model that is not swapped, or whose tables have another size now.
    """
    adapter = adapt(model)
    rotary = getattr(adapter.tower, ATTRIBUTE, None)
    if rotary is None:
        raise ValueError(f"unswap needs a swapped model, got {_name(model)}")
    _restore(adapter.tables(), rotary)
    adapter.detach(rotary)
    delattr(adapter.tower, ATTRIBUTE)
    return model


def install(adapter: Adapter, encodings: list[Encoding], **choices: Any) -> Rotary:
    """Put encodings that fit into a model.

    Args:
        adapter: The model's.
        encodings: One per layer, or one alone.
        choices: What `Rotary` takes.
    """
    rotary = Rotary(encodings, adapter.sites(), **choices)
    own = next(adapter.tower.parameters())
    # Generators stay float32 in a model of half precision: angles of many radians would be rounded.
    rotary.to(device=own.device, dtype=torch.promote_types(own.dtype, torch.float32)).train(adapter.tower.training)
    if not rotary.keep_ape:
        _silence(adapter.tables(), rotary)
    setattr(adapter.tower, ATTRIBUTE, rotary)
    adapter.attach(rotary)
    return rotary


def adapt(model: nn.Module) -> Adapter:
    """Find the one part of a model that `swap` knows.

    Raises:
        ValueError: none, or several.
    """
    found = adapters(model)
    if len(found) == 1:
        return found[0]
    rule = (
        "swap knows timm's VisionTransformer, Eva and SwinTransformer, and transformers' CLIP, ViT, DINOv2, DINOv3 and "
        "SigLIP vision models"
    )
    held = f", with {len(found)} of them" if found else ""
    raise ValueError(f"{rule}, one in a model, got {_name(model)}{held}")


def adapters(model: nn.Module) -> list[Adapter]:
    """Find all parts of a model that `swap` knows."""
    known = [import_module(LIBRARIES[library]) for library in origins(*map(type, model.modules()))]
    return [adapter for library in known for adapter in library.adapters(model)]


def origins(*classes: type) -> list[str]:
    """The libraries that classes come from, or are made of, among those that are known."""
    roots = {base.__module__.partition(".")[0] for one in set(classes) for base in one.__mro__}
    return [library for library in LIBRARIES if library in roots]


def _encodings(
    encoding: str | Encoding | Callable[..., Encoding], sites: list[Site], block_size: int | None, init: Init
) -> list[Encoding]:
    if isinstance(encoding, Encoding):
        if block_size is not None:
            raise ValueError(f"block_size is for a name or a factory, got {block_size} beside an encoding")
        for site in sites:
            check_fit(encoding, site)
        return [encoding]
    factory = _named(encoding) if isinstance(encoding, str) else encoding
    wanted: dict[str, Any] = {} if block_size is None else {"block_size": block_size}
    if _takes(factory, "init"):
        wanted["init"] = init
    built = [
        factory(num_axes=len(site.lattice), num_heads=site.num_heads, head_dim=site.head_dim, **wanted)
        for site in sites
    ]
    for made, site in zip(built, sites, strict=True):
        check_fit(made, site)
    return built


def _rests(encoding: Encoding) -> bool:
    """Whether an encoding that can turn does not, as far as its values can be read."""
    generators = encoding.generators().detach()
    return not isinstance(encoding, NoEncoding) and can_read(generators) and not generators.any()


def _not_saved(encoding: Encoding) -> ValueError | None:
    """Why `save` would refuse an encoding."""
    try:
        written(describe(encoding))
    except ValueError as error:
        return error
    return None


def _named(name: str) -> Callable[..., Encoding]:
    choice = choose(name)
    others = [part for part in choice.parts if not issubclass(part, Encoding)]
    if others:
        raise ValueError(f"swap puts in rotary encodings, keep_ape=True keeps the model's table, got {name!r}")
    return choice.rotary


def _takes(factory: Callable[..., Encoding], argument: str) -> bool:
    """Whether what builds an encoding can be told something that was not settled already."""
    if isinstance(factory, partial):
        return argument not in factory.keywords and _takes(factory.func, argument)
    if isinstance(factory, type):
        return any(
            argument in inspect.signature(vars(base)["__init__"]).parameters
            for base in factory.__mro__
            if "__init__" in vars(base)
        )
    return argument in inspect.signature(factory).parameters


def check_fit(encoding: Encoding, site: Site) -> None:
    """Refuse an encoding that does not rotate the heads of an attention layer.

    Raises:
        ValueError: other axes, heads or channels, or no encoding at all.
    """
    if not isinstance(encoding, Encoding):
        raise ValueError(f"swap needs a factory of encodings, got one of {type(encoding).__name__}")
    axes, heads = len(site.lattice), encoding.num_heads
    if encoding.num_axes != axes or encoding.head_dim != site.head_dim or heads not in (1, site.num_heads):
        rule = f"num_axes={axes}, num_heads={site.num_heads}, head_dim={site.head_dim}"
        raise ValueError(f"the model needs an encoding of {rule}, got {encoding}")


def _silence(tables: list[nn.Parameter], rotary: Rotary) -> None:
    """Set tables to zero and keep what they were."""
    for index, table in enumerate(tables):
        rotary.register_buffer(f"table{index}", table.detach().clone())
        rotary.silence(f"table{index}", [table])
        with torch.no_grad():
            table.zero_()


def _restore(tables: list[nn.Parameter], rotary: Rotary) -> None:
    if rotary.keep_ape:
        return
    originals = [getattr(rotary, f"table{index}") for index in range(len(tables))]
    for table, original in zip(tables, originals, strict=True):
        if table.shape != original.shape:
            came = f"{tuple(table.shape)} instead of {tuple(original.shape)}"
            raise ValueError(f"unswap needs the input size that was swapped, got a position table of {came}")
    for index, (table, original) in enumerate(zip(tables, originals, strict=True)):
        with torch.no_grad():
            table.copy_(original)
        rotary.wake(f"table{index}", [table])


def _name(model: nn.Module) -> str:
    return type(model).__name__
