"""Adapter for models that pass tables of cosines and sines to their attention layers as arguments.

Such a model computes the tables once per call, in a module or in its caller. A swapped model passes positions as the
same arguments, so gradient checkpointing, compilation and patch dropout still work. A layer computes its rotation from
them and rotates q and k after their norms; the rest of the layer is unchanged and receives no table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.integrations.norm_and_rotate import fused
from torchrope.integrations.own_rotation import OwnRotation, exact, halves, interleaved
from torchrope.integrations.rotary import Adapter, OneThread, Rotary, Site
from torchrope.ops.norms import Norm, describe, shape_of
from torchrope.rotating import apply
from torchrope.rotations import Planar, Rotation

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """Description of the rotation in one family of models.

    Attributes:
        layers: Attention layers with rotation, in order: the name of a list of blocks, and of the layer in a block.
        heads: Returns the key heads of a tower and head_dim.
        frequencies: Returns those of a tower, `(axes, heads or 1, pairs)`, radians per unit of its positions.
        replace_tables: Makes a tower pass positions in place of tables; returns handles that undo it.
        tokens: Returns the positions of all tokens of a layer `(..., tokens, axes)`, from the argument that replaces
            its tables, the layer, and the number of tokens in the other (text) stream. A stream with separate norms
            comes first.
        argument: Name of the tables among the arguments of a layer, and their index as a positional argument.
        norms: Names of the norms of q and k, and of those of the other stream, if any.
        heads_first: Whether norms get `(batch, heads, tokens, head_dim)` or `(batch, tokens, heads, head_dim)`.
        across_halves: Whether a tower pairs channels j and j + head_dim / 2 rather than adjacent ones.
        lattice: Returns tokens along each axis at the size that a tower was built for; None if unknown.
        tables: Returns the position tables of a tower.
        coarse: Whether angles are so large (LTX: up to 15,708 radians) that float32 rounding changes outputs. Layers
            then use cos and sin computed by PyTorch, as in the model, because kernels round differently.
    """

    layers: tuple[tuple[str, str], ...]
    heads: Callable[[Any], tuple[int, int]]
    frequencies: Callable[[Any], Tensor]
    replace_tables: Callable[[Any], Sequence[Any]]
    tokens: Callable[[Any, Any, int], Tensor]
    argument: tuple[str, int]
    norms: tuple[str, ...] = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    heads_first: bool = False
    across_halves: Callable[[Any], bool] = lambda tower: False
    lattice: Callable[[Any], tuple[int, ...]] | None = None
    tables: Callable[[Any], list[nn.Parameter]] = lambda tower: []
    coarse: bool = False


class OfTables(Adapter):
    """Adapter that passes positions to attention layers in place of tables."""

    keeps_rotation = False
    library = "diffusers"

    def __init__(self, tower: nn.Module, family: Family) -> None:
        super().__init__(tower)
        self.family = family

    def sites(self) -> list[Site]:
        heads, head_dim = self.family.heads(self.tower)
        lattice = None if self.family.lattice is None else self.family.lattice(self.tower)
        unknown = (1,) * len(self.family.frequencies(self.tower))
        return [Site(heads, head_dim, lattice or unknown, sized=lattice is not None) for _ in self.attention_layers()]

    def tables(self) -> list[nn.Parameter]:
        return self.family.tables(self.tower)

    def rotates(self) -> bool:
        return True

    def own_rotations(self) -> list[OwnRotation]:
        _, head_dim = self.family.heads(self.tower)
        order = halves(head_dim) if self.family.across_halves(self.tower) else interleaved(head_dim)
        rotation = OwnRotation(exact(self.family.frequencies(self.tower)), order)
        return [rotation for _ in self.attention_layers()]

    def attach(self, rotary: Rotary) -> None:
        handles: list[Any] = rotary.handles
        one_thread = OneThread(self.library)
        handles.extend(one_thread.watch(self.tower))
        handles.extend(self.family.replace_tables(self.tower))
        for index, layer in enumerate(self.attention_layers()):
            layer_rotation = LayerRotation(rotary, rotary.of_layer(index), self.family)
            handles.extend(one_thread.watch(layer))
            handles.append(layer.register_forward_pre_hook(layer_rotation.begin, with_kwargs=True))
            handles.append(layer.register_forward_hook(layer_rotation.end, prepend=True))  # before it leaves
            own, others = _norms(layer, self.family)
            handles.extend(norm.register_forward_hook(layer_rotation.rotate_stream) for norm in own)
            handles.extend(norm.register_forward_hook(layer_rotation.rotate_other_stream) for norm in others)
            for norm in own:
                handles.extend(fused(norm, layer_rotation.with_norm, of_other_stream=False))
            for norm in others:
                handles.extend(fused(norm, layer_rotation.with_norm, of_other_stream=True))

    def attention_layers(self) -> list[Any]:
        layers = [getattr(block, name) for blocks, name in self.family.layers for block in getattr(self.tower, blocks)]
        for layer in layers:
            _check_can_rotate(layer, self.family)
        return layers


class LayerRotation:
    """Rotate q and k of one layer by the positions passed in place of its tables."""

    def __init__(self, rotary: Rotary, index: int, family: Family) -> None:
        self.rotary = rotary
        self.index = index
        self.family = family
        self.rotation: Rotation | None = None  # of the tokens of the current call
        self.of_other_stream: Rotation | None = None  # if it has separate norms
        self.has_rotated = False  # whether the fused norm being called has rotated

    def begin(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Forward pre-hook of the layer: compute its rotation and replace the argument by None."""
        received = argument(*self.family.argument, args, kwargs)
        self.rotation = self.of_other_stream = None  # an earlier call may have raised before its end
        if received is None:
            return args, kwargs
        _check_can_rotate(layer, self.family)
        other = argument("encoder_hidden_states", 1, args, kwargs)
        others = other.shape[1] if isinstance(other, Tensor) else 0
        positions = self.rotary.placed(self.index, self.family.tokens(received, layer, others))
        # One rotation for both streams: their q and k share scores, in which a common basis may be omitted.
        rotation = self.rotary.encodings[self.index](positions)
        if self.family.coarse and isinstance(rotation, Planar):
            rotation = replace(rotation, table=torch.stack(rotation.cos_sin(), dim=-2))
        _, of_others = _norms(layer, self.family)
        self.rotation, self.of_other_stream = rotation, None
        if of_others:
            self.rotation, self.of_other_stream = rotation[..., others:], rotation[..., :others]
        return with_argument(*self.family.argument, args, kwargs, None)

    def end(self, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the layer: release the rotation of this call."""
        self.rotation = self.of_other_stream = None

    def rotate_stream(self, norm: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor:
        """Forward hook of the norms of q and k."""
        return x if self._was_rotated() else self._rotated(x, self.rotation)

    def rotate_other_stream(self, norm: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor:
        """Forward hook of the norms of q and k of the other stream."""
        return x if self._was_rotated() else self._rotated(x, self.of_other_stream)

    def with_norm(self, x: Tensor, norm: nn.Module, *, of_other_stream: bool) -> Tensor | None:
        """Normalise and rotate q or k in one pass; returns None if the rotation or the norm does not support it."""
        rotation = self.of_other_stream if of_other_stream else self.rotation
        over_heads = shape_of(norm) == x.shape[-1:] and x.ndim == 4
        reordered = getattr(self.rotary, f"channels{self.index}") is not None
        if not isinstance(rotation, Planar) or not over_heads or reordered or self.family.coarse:
            return None
        rotated = self._rotated(x, rotation, describe("q or k", x, norm))
        self.has_rotated = True
        return rotated

    def _was_rotated(self) -> bool:
        rotated, self.has_rotated = self.has_rotated, False
        return rotated

    def _rotated(self, x: Tensor, rotation: Rotation | None, norm: Norm | None = None) -> Tensor:
        if rotation is None:
            return x
        if x.ndim == 3:  # (batch, tokens, heads head_dim)
            return self._rotated(x.unflatten(-1, (-1, rotation.head_dim)), rotation).flatten(2)
        layout = "bhtd" if self.family.heads_first else "bthd"
        x = self.rotary.permute_channels(x, self.index)
        return apply(x, rotation, norm=norm, layout=layout, scores_only=True)


def argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an argument by keyword or position; None if absent."""
    return kwargs[name] if name in kwargs else args[place] if len(args) > place else None


def with_argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
    """Return the arguments with one value replaced."""
    if name not in kwargs and len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _norms(layer: Any, family: Family) -> tuple[list[Any], list[Any]]:
    """Return the norms of q and k, and those of the other stream, if any."""
    norms = [getattr(layer, name, None) for name in family.norms]
    return norms[:2], [norm for norm in norms[2:] if norm is not None]


def _check_can_rotate(layer: Any, family: Family) -> None:
    for name in family.norms[:2]:
        if getattr(layer, name, None) is None:
            raise ValueError(f"swap rotates q and k after their norms, got a {type(layer).__name__} without {name}")
    processor = getattr(layer, "processor", None)
    if hasattr(processor, "to_k_ip"):
        rule = "swap rotates q after its norm, but an IP-Adapter needs it unrotated: unload the adapter"
        raise ValueError(f"{rule}, got {type(processor).__name__}")
