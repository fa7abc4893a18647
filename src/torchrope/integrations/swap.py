"""`swap` adds an encoding to a model of timm, transformers or diffusers; `unswap` removes it."""

import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from torchrope.checkpoints.saving import describe, to_json
from torchrope.checkpoints.settings import Limits, check, settable
from torchrope.encodings import Encoding, NoEncoding
from torchrope.encodings.names import built_class, takes
from torchrope.integrations.families import refuse
from torchrope.integrations.families.shared import kind_of
from torchrope.integrations.family import Adapter, AttentionShape, adapters
from torchrope.integrations.proof import prove
from torchrope.integrations.rotary import ATTRIBUTE, Rotary
from torchrope.lattice import Lattice
from torchrope.models.layers import resolve
from torchrope.positions import PerAxis, per_axis
from torchrope.tensors import can_read, wide_dtype

Model = TypeVar("Model", bound=nn.Module)
Start = Literal["model", "zeros", "paper"]


def swap(
    model: Model,
    encoding: str | Encoding | Callable[..., Encoding],
    *,
    block_size: int | None = None,
    keep_position_tables: bool = True,
    keep_rotation: bool = False,
    init: Start | None = None,
    spacing: PerAxis | None = None,
    origin: PerAxis | None = None,
) -> Model:
    """Rotate the queries and keys of a model by an encoding:  softmax(q^T R(p)^T R(p') k / √d) v  in every layer.

    The model is changed in-place; its parameters keep their names, those of the encoding are added under `rotary`.
    Outputs are preserved for fine-tuning: with keep_position_tables=True those of a model without RoPE stay
    bit-identical (init="zeros"), up to rounding if q and k have norms over head_dim; a model with RoPE keeps its
    frequencies, positions and pairs of channels (init="model"), with outputs equal up to rounding.

    Args:
        model: One of those in docs/use-it-in-your-model.md, or a model that contains one; of a vision tower and a text
            model, the tower is swapped. A layer of each kind is run once and compared with its own code.
        encoding: A name ("mixed", "liere:8"); an `Encoding`, shared by all layers, its rotation computed once per
            forward; or a factory called for each layer with num_axes, num_heads and head_dim.
        block_size: b, if encoding is a name or a factory that takes one.
        keep_position_tables: Whether to keep the model's position table (a Swin's relative bias). False sets it to
            zero and freezes it; `unswap` restores it.
        keep_rotation: Whether to keep the model's built-in rotation in addition to the new one.
        init: "model", the default for a model with RoPE, starts from its built-in rotation, in its units of position;
            "zeros", the default otherwise, from no rotation; "paper" from the paper's initialisation. The last two
            change outputs of a model with RoPE, with a warning. An `Encoding`, or one built by a function, keeps its
            generators unless init is "model".
        spacing: Distance between neighbouring tokens, one number or one per axis, at every input size; by default the
            convention of the encoding's paper at the size the model was built for. With init="model" positions are the
            model's; in a model of diffusers they always are, multiplied by `spacing`.
        origin: Position of the first token, one number or one per axis; default as for `spacing`.

    Raises:
        ValueError: an unsupported or already swapped model, or one of diffusers after `enable_parallelism`; an encoding
            that does not fit its heads, or cannot represent the model's built-in rotation; a layer that then computes
            something else than its own code. The model is unchanged.
        ImportError: timm, transformers or diffusers is older than supported.
    """
    adapter = _before_parallelism(adapt(model))
    if getattr(adapter.tower, ATTRIBUTE, None) is not None:
        raise ValueError(f"swap needs a model that is not swapped, got a swapped {kind_of(model)}: call unswap first")
    rotation, rotates = adapter.family.rotation, adapter.rotates()
    if keep_rotation and rotation is not None and rotation.remove is None:
        rule = f"keep_rotation must be False for a {kind_of(adapter.tower)}, whose rotation can only be replaced"
        raise ValueError(f"{rule}, got keep_rotation=True")
    shapes = adapter.shapes()
    built_here = isinstance(encoding, str) or built_class(encoding) is not None  # not an Encoding, or by a function
    start = init or ("model" if built_here and rotates and not keep_rotation else "zeros")
    if start not in ("model", "paper", "zeros"):
        raise ValueError(f"init must be 'model', 'paper' or 'zeros', got {init!r}")
    arguments = {name: value for name, value in {"spacing": spacing, "origin": origin}.items() if value is not None}
    with torch.device("cpu"):  # not meta
        rotations = adapter.own_rotations() if start == "model" else []
    if rotations and keep_rotation:
        raise ValueError("keep_rotation must be False for init='model', got True")
    for name, value in arguments.items():
        per_axis(name, value, len(shapes[0].lattice))
        if rotations:
            rule = f"init='model' keeps the model's positions; init='zeros' and init='paper' take {name}"
            raise ValueError(f"{rule}, got {name}={value}")
    overwritten = built_here and start != "paper"
    with torch.device("cpu"), torch.random.fork_rng(devices=[], enabled=overwritten):
        encodings = _encodings(encoding, shapes, block_size)
    for made in encodings if start == "zeros" and built_here else ():
        if next(made.parameters(), None) is not None:  # fixed frequencies stay
            made.zero_()
    if rotations:
        if len(encodings) == 1 and any(not rotation.same_as(rotations[0]) for rotation in rotations):
            rule = "encoding must be a name or a function for init='model' if layers rotate differently"
            raise ValueError(f"{rule}, got one shared by all")
        dtype = wide_dtype(next(adapter.tower.parameters()))
        lattices = [rotation.lattice for rotation in rotations[: len(encodings)]]
        transfers = zip(rotations, encodings, strict=False)
        channels: list[Any] = [rotation.transfer_to(made.to(dtype)) for rotation, made in transfers]
    else:
        pairs = zip(encodings, shapes, strict=False)
        usual = [made.lattice.spaced(*shape.lattice) if shape.sized else {} for made, shape in pairs]
        lattices, channels = [Lattice(**{**settings, **arguments}) for settings in usual], [None] * len(encodings)
        moved = next((made for made in encodings if _has_zero_generators(made) is False), None)
        if rotates and not keep_rotation:
            rule = "outputs change, because the encoding replaces the model's rotation; init='model' preserves it"
            warnings.warn(f"{rule}, got {kind_of(model)}", stacklevel=2)
        elif init != "paper" and moved is not None:
            rule = "outputs change, because the encoding rotates from the start; init='paper' says that this is wanted"
            warnings.warn(f"{rule}, got {kind_of(moved)}", stacklevel=2)
    install(adapter, encodings, lattices, channels, keep_position_tables, keep_rotation)
    if not keep_position_tables and not keep_rotation and all(map(_has_zero_generators, encodings)):
        reason = "the position table and all generators are zero; init='paper' starts with a rotation"
        warnings.warn(f"{kind_of(model)} has no position information: {reason}", stacklevel=2)
    for made in {type(made): made for made in encodings}.values():
        try:
            arguments = json.loads(to_json(describe(made)["arguments"]))
            check("its arguments", arguments, settable(type(made)), Limits(), partly=True)
        except ValueError as error:
            warnings.warn(f"torchrope.save will reject this {kind_of(model)}: {error}", stacklevel=2)
    return model


def unswap(model: Model) -> Model:
    """Undo `swap`: remove the encodings and restore the position table and the built-in rotation.

    ValueError for a model that is not swapped, whose tables were resized since, or with `enable_parallelism`.
    """
    adapter = _before_parallelism(adapt(model))
    rotary = adapter.rotary
    if rotary is None:
        raise ValueError(f"unswap needs a swapped model, got {kind_of(model)}")
    remove(adapter, rotary)
    return model


def remove(adapter: Adapter, rotary: Rotary) -> None:
    """Detach encodings and copy the position tables back."""
    tables = [] if rotary.keep_position_tables else list(adapter.tables().values())
    originals = [getattr(rotary, f"table{index}") for index in range(len(tables))]
    for table, original in zip(tables, originals, strict=True):  # all, before any changes
        if table.shape != original.shape:
            received = f"{tuple(table.shape)} instead of {tuple(original.shape)}"
            raise ValueError(f"unswap needs the input size at the time of the swap, got a position table of {received}")
    with torch.no_grad():
        for table, original in zip(tables, originals, strict=True):
            table.copy_(original)
    adapter.detach()


def install(
    adapter: Adapter,
    encodings: list[Encoding],
    lattices: Sequence[Lattice],
    channels: Sequence[tuple[int, ...] | None],
    keep_position_tables: bool,
    keep_rotation: bool,
) -> Rotary:
    """Install encodings, already checked against the layers, in a model; in at least float32, as half rounds angles."""
    choices = {"keep_position_tables": keep_position_tables, "keep_rotation": keep_rotation}
    rotary = Rotary(encodings, lattices=lattices, channels=channels, **choices)
    parameter: nn.Parameter = next(adapter.tower.parameters())
    rotary.to(device=parameter.device, dtype=wide_dtype(parameter)).train(adapter.tower.training)
    with torch.no_grad():
        for index, table in enumerate([] if rotary.keep_position_tables else adapter.tables().values()):
            rotary.register_buffer(f"table{index}", table.clone())
            table.zero_()
    try:
        adapter.attach(rotary)
        prove(adapter, rotary)
    except Exception:  # as before the swap, which can then be repeated
        remove(adapter, rotary)
        raise
    return rotary


def adapt(model: nn.Module) -> Adapter:
    """Return the adapter of the one submodule that `swap` supports; ValueError if there is none, or several."""
    candidates = adapters(model)
    chosen = [adapter for adapter in candidates if not adapter.family.of_text] or candidates
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        refuse(model)
    rule = "swap supports the models in docs/use-it-in-your-model.md and those of register_family, one at a time"
    by_hand = "; in an attention of your own call tr.rotate(q, k, rotation), see docs/your-own-attention.md"
    raise ValueError(f"{rule}, got {kind_of(model)}{f', with {len(chosen)} of them' if chosen else by_hand}")


def _before_parallelism(adapter: Adapter) -> Adapter:
    """Return the adapter; raise if diffusers' hooks, which split positions, wrap the functions that swap replaces."""
    if getattr(adapter.tower, "_parallel_config", None) is not None:
        rule = "swap and unswap must be called before enable_parallelism"
        raise ValueError(f"{rule}, got a {kind_of(adapter.tower)} that is already parallel")
    return adapter


def _encodings(
    encoding: str | Encoding | Callable[..., Encoding], shapes: list[AttentionShape], block_size: int | None
) -> list[Encoding]:
    """Return one encoding for each layer, or a given one for all, checked against the layers."""
    further: dict[str, Any] = {} if block_size is None else {"block_size": block_size}
    if isinstance(encoding, Encoding):
        if further:
            raise ValueError(f"block_size must be None if encoding is an Encoding, got {block_size}")
        encodings = [encoding]
    else:
        choice = resolve(encoding)
        if choice.absolute is not None or choice.bias is not None:
            rule = "encoding must be rotary (keep_position_tables=True keeps the model's table)"
            raise ValueError(f"{rule}, got {encoding!r}")
        lacks_one = takes(choice.rotary, "block_size") and "block_size" not in getattr(choice.rotary, "keywords", ())
        if further and not lacks_one:
            rule = "block_size must be None unless encoding takes one and has none yet"
            raise ValueError(f"{rule}, got {encoding!r} and {block_size}")
        heads = [dict(num_axes=len(s.lattice), num_heads=s.num_heads, head_dim=s.head_dim) for s in shapes]
        encodings = [choice.build_rotary(**head, **further) for head in heads]
    for index, shape in enumerate(shapes):
        check_fit(encodings[index % len(encodings)], shape)
    return encodings


def _has_zero_generators(encoding: Encoding) -> bool | None:
    """Return whether generators are zero; None if their values cannot be read, or for no encoding."""
    generators = encoding.generators().detach()
    unknown = isinstance(encoding, NoEncoding) or not can_read(generators)
    return None if unknown else not generators.any()


def check_fit(encoding: Encoding, shape: AttentionShape) -> None:
    """Raise ValueError unless an encoding has the axes, heads and channels of an attention layer."""
    axes, heads = len(shape.lattice), encoding.num_heads
    if encoding.num_axes != axes or encoding.head_dim != shape.head_dim or heads not in (1, shape.num_heads):
        rule = f"num_axes={axes}, num_heads={shape.num_heads}, head_dim={shape.head_dim}"
        raise ValueError(f"the model needs an encoding of {rule}, got {encoding}")
