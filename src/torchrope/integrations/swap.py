"""Put an encoding into a model of timm, transformers or diffusers, and take it out again."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from torchrope.encodings import Encoding, NoEncoding, choose
from torchrope.encodings.base import Init
from torchrope.integrations.describing import describe, written
from torchrope.integrations.own_rotation import Lattice, OwnRotation
from torchrope.integrations.rotary import ATTRIBUTE, Adapter, Rotary, Site
from torchrope.positions import PerAxis
from torchrope.tensors import can_read

Model = TypeVar("Model", bound=nn.Module)
Start = Literal["own", "zeros", "paper"]

# The library that a model comes from, and the module of ours that knows it.
LIBRARIES = {
    "dynamic_network_architectures": "torchrope.integrations.dynamic_network_architectures",
    "timm": "torchrope.integrations.timm",
    "transformers": "torchrope.integrations.transformers",
    "diffusers": "torchrope.integrations.diffusers",
}


def swap(
    model: Model,
    encoding: str | Encoding | Callable[..., Encoding],
    *,
    block_size: int | None = None,
    keep_ape: bool = True,
    keep_rotation: bool = False,
    init: Start | None = None,
    spacing: PerAxis | None = None,
    origin: PerAxis | None = None,
) -> Model:
    """Rotate the queries and keys of a model by an encoding:  softmax(q^T R(p)^T R(p') k / √d) v  in every layer.

    The model is changed in place; its parameters keep their names, those of the encoding come under `rotary`.
    Fine-tuning starts where training ended: with keep_ape=True the outputs of a model that does not rotate stay the
    same bit for bit (init="zeros"), and a model that rotates goes on from its own frequencies, positions and pairs of
    channels (init="own"), its outputs the same up to rounding. A model of timm with norms of q and k is the same up to
    rounding too: a planar rotation and the norm before it are computed in one pass and rounded once.

    Args:
        model: Of timm: VisionTransformer (ViT, DeiT, DINOv2, CLIP and SigLIP towers), Eva (EVA-02, rope ViTs, PE,
            DINOv3), NaFlexVit, Beit, SwinTransformer and its V2, VisionTransformerSAM, and the vision encoders of
            Qwen3, DeepSeek and Gemma 4. Of transformers: the vision models of ViT, DeiT, BEiT, DINOv2, DINOv3, I-JEPA,
            ViTMAE, DPT, CLIP, SigLIP, BLIP-2, SAM, VideoMAE and V-JEPA 2; vision towers that rotate (Qwen-VL, Pixtral,
            Llama 4, SAM 3 and others) and text models (Llama, Qwen, Gemma and others); and what is built around them.
            Of diffusers: the transformers of Flux, Flux 2, Qwen-Image, Lumina 2, Wan, HunyuanVideo, CogVideoX,
            LTX-Video, LTX-2 and Cosmos. nnU-Net's Primus. Also a model of your own that holds one of these; of a vision
            tower and a text model, the tower is taken.
        encoding: A name ("mixed", "liere:8"); an `Encoding`, which all layers share, its rotation computed once per
            forward; or what builds one for each layer from num_axes, num_heads and head_dim.
        block_size: b, for a name or a factory that takes one.
        keep_ape: Whether the model's own position table (a Swin's relative bias) stays. False sets it to zero and
            freezes it; `unswap` brings it back.
        keep_rotation: Whether a rotation that the model has already stays beside the new one.
        init: "own" continues the model's own rotation, in the model's units of position. "zeros" starts without a
            rotation, "paper" as the paper chose; a model that rotates changes its outputs by both, with a warning. By
            default "own" for a model that rotates, "zeros" otherwise. An encoding that is given, and what a
            function builds, keeps its generators unless "own" is asked for.
        spacing: Distance between neighbouring tokens, one number or one per axis; by default the convention of the
            encoding's paper at the size the model was built for. It never changes with the input size. With
            init="own" positions are the model's; in a model of diffusers they are in any case, times `spacing`.
        origin: Position of the first token, likewise.

    Returns:
        The same model.

    Raises:
        ValueError: a model that is not known, or swapped already; an encoding that does not fit its heads, or cannot
            represent the model's own rotation.

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
    if keep_rotation and not adapter.keeps_rotation:
        rule = f"a {_name(adapter.tower)} takes one rotation, in whose place swap puts an encoding"
        raise ValueError(f"{rule}, got keep_rotation=True")
    sites = adapter.sites()
    start = _start(adapter, encoding, init, keep_rotation)
    if start == "own":
        _check_own(adapter, keep_rotation, spacing, origin)
    encodings = _encodings(encoding, sites, block_size, "zeros" if start == "own" else start)
    if start == "own":
        lattices, channels = _continue(adapter, encodings)
    else:
        lattices = [_lattice(made, site, spacing, origin) for made, site in zip(encodings, sites, strict=False)]
        channels = [None for _ in encodings]
        if adapter.rotates() and not keep_rotation:
            rule = "outputs change, for the encoding replaces the model's rotation; init='own' continues it"
            warnings.warn(f"{rule}, got {_name(model)}", stacklevel=2)
    install(adapter, encodings, lattices, channels, keep_ape=keep_ape, keep_rotation=keep_rotation)
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


def install(
    adapter: Adapter,
    encodings: list[Encoding],
    lattices: Sequence[Lattice],
    channels: Sequence[tuple[int, ...] | None],
    **choices: bool,
) -> Rotary:
    """Put encodings that fit into a model.

    Args:
        adapter: The model's.
        encodings: One per layer, or one alone.
        lattices: Where each finds the tokens.
        channels: The order in which each takes the channels of a head, or None.
        choices: What else `Rotary` takes.
    """
    rotary = Rotary(encodings, lattices=lattices, channels=channels, **choices)
    own = next(adapter.tower.parameters())
    rotary.to(device=own.device, dtype=_dtype(adapter)).train(adapter.tower.training)
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
    chosen = [adapter for adapter in found if not adapter.of_text] or found
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        for library in _libraries(model):
            library.refuse(model)
    rule = (
        "swap knows timm's VisionTransformer, Eva, NaFlexVit, Beit, SwinTransformer and its V2, VisionTransformerSAM, "
        "the vision encoders of Qwen3, DeepSeek and Gemma 4, transformers' ViT, DeiT, BEiT, DINOv2, DINOv3, "
        "I-JEPA, ViTMAE, DPT, CLIP, SigLIP, BLIP-2, SAM, VideoMAE and V-JEPA 2, its towers and text models that "
        "rotate by tables of positions, diffusers' transformers of Flux, Flux 2, Qwen-Image, Lumina 2, Wan, "
        "HunyuanVideo, CogVideoX, LTX-Video, LTX-2 and Cosmos, and nnU-Net's Primus"
    )
    held = f", with {len(chosen)} of them" if chosen else ""
    raise ValueError(f"{rule}, one in a model, got {_name(model)}{held}")


def adapters(model: nn.Module) -> list[Adapter]:
    """Find all parts of a model that `swap` knows."""
    found: list[Adapter] = []
    for library in LIBRARIES:
        within = {part for adapter in found for part in adapter.tower.modules()}  # whose blocks may be timm's
        if library in origins(*(type(part) for part in model.modules() if part not in within)):
            found.extend(import_module(LIBRARIES[library]).adapters(model))
    return found


def _libraries(model: nn.Module) -> list[Any]:
    """Our modules that know the libraries which parts of a model come from."""
    return [import_module(LIBRARIES[library]) for library in origins(*map(type, model.modules()))]


def origins(*classes: type) -> list[str]:
    """The libraries that classes come from, or are made of, among those that are known."""
    roots = {base.__module__.partition(".")[0] for one in set(classes) for base in one.__mro__}
    return [library for library in LIBRARIES if library in roots]


def _start(adapter: Adapter, encoding: Any, init: str | None, keep_rotation: bool) -> Start:
    """What was asked for, or else the start that keeps the outputs."""
    if init is not None:
        if init not in ("own", "paper", "zeros"):
            raise ValueError(f"init must be 'own', 'paper' or 'zeros', got {init!r}")
        return cast(Start, init)
    built_here = isinstance(encoding, str) or _is_class(encoding)
    return "own" if built_here and adapter.rotates() and not keep_rotation else "zeros"


def _is_class(encoding: Any) -> bool:
    return isinstance(encoding.func if isinstance(encoding, partial) else encoding, type)


def _check_own(adapter: Adapter, keep_rotation: bool, spacing: PerAxis | None, origin: PerAxis | None) -> None:
    if not adapter.rotates():
        rule = "init='own' continues the rotation of a model that rotates"
        raise ValueError(f"{rule}, got {_name(adapter.tower)}")
    if keep_rotation:
        raise ValueError("init='own' puts the encoding in the place of the model's rotation, got keep_rotation=True")
    for name, value in {"spacing": spacing, "origin": origin}.items():
        if value is not None:
            rule = f"init='own' keeps the model's positions; init='zeros' and init='paper' take {name}"
            raise ValueError(f"{rule}, got {name}={value}")


def _continue(adapter: Adapter, encodings: list[Encoding]) -> tuple[list[Lattice], list[tuple[int, ...] | None]]:
    """Give each layer's own rotation to its encoding; where it finds the tokens, and how it takes the channels."""
    rotations = adapter.own_rotations()
    if len(encodings) == 1 and any(not rotation.same_as(rotations[0]) for rotation in rotations):
        raise ValueError("init='own' needs an encoding for each layer where layers differ, got one for all of them")
    pairs: list[tuple[OwnRotation, Encoding]] = list(zip(rotations, encodings, strict=False))
    channels = [rotation.taken_by(encoding.to(_dtype(adapter))) for rotation, encoding in pairs]
    return [rotation.lattice for rotation, _ in pairs], list(channels)


def _lattice(encoding: Encoding, site: Site, spacing: PerAxis | None, origin: PerAxis | None) -> Lattice:
    """Where an encoding finds the tokens: as was chosen, or by the convention of its paper."""
    chosen = {name: value for name, value in {"spacing": spacing, "origin": origin}.items() if value is not None}
    usual = encoding.lattice(*site.lattice) if site.sized else {}
    return Lattice(**{**usual, **chosen})


def _dtype(adapter: Adapter) -> torch.dtype:
    """Generators stay float32 in a model of half precision: angles of many radians would be rounded."""
    own: nn.Parameter = next(adapter.tower.parameters())
    return torch.promote_types(own.dtype, torch.float32)


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
