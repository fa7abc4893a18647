"""Where the positions of tokens come from in a model of another library: once per forward, or for each layer.

The method `attach` hooks the functions that compute positions into a model and returns the handles that undo it;
`begin` sets the rotation of a layer before its forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchrope.integrations.forward import ForwardState, Running
from torchrope.integrations.rotary import Replaced
from torchrope.ops.backends import is_exporting
from torchrope.rotations import Planar, Rotation
from torchrope.tensors import is_narrow, wide_dtype

if TYPE_CHECKING:
    from torchrope.integrations.layer import SwappedLayer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
OnLattice = tuple[Tensor | torch.device, Sequence[int | Tensor]]
"""Lattice indices `([batch,] tokens, axes)`, or the device for all of a lattice, and the tokens along each axis."""


@dataclass(frozen=True)
class FromPatches:
    """Positions of the patches of a lattice, computed once in a forward.

    Attributes:
        module: Name of the submodule that makes tokens of patches; "" is the model, before its forward.
        prefix: Leading tokens without position (class token, registers): their number, the name of the model's
            attribute with it, or a function of the model. They are at the origin.
        suffix: Number of trailing tokens without position.
        drop: Name of a submodule of timm that drops patches, if any.
        locate: Function of the model, arguments and keyword arguments of the module and its output (None for "") that
            returns the patches `OnLattice`; by default those of an image or volume, from an output
            `(batch, channels, *lattice)` or `(batch, tokens, channels)`, a token for each square patch or stride.
    """

    module: str = ""
    prefix: int | str | Callable[[Any], int] = 0
    suffix: int = 0
    drop: str = ""
    locate: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], OnLattice | None] | None = None

    def attach(self, state: ForwardState, layers: Sequence[Any]) -> list[Any]:
        tower, enter = state.tower, partial(self._enter, state)
        handles = state.attach(blocks_of(tower, layers))
        if self.module:
            handles.append(tower.get_submodule(self.module).register_forward_hook(enter, with_kwargs=True))
        else:
            handles.append(tower.register_forward_pre_hook(enter, with_kwargs=True))
        dropout = getattr(tower, self.drop, None) if self.drop else None
        if type(dropout).__name__ in ("PatchDropout", "PatchDropoutWithIndices"):
            handles.append(Replaced(dropout, "forward", partial(_dropped, dropout, state, self._num_prefix(tower))))
        return handles

    def begin(self, layer: "SwappedLayer", running: Running, args: Any, kwargs: Any) -> Arguments:
        running.rotation = layer.state.rotation(running, layer.index)
        return args, kwargs

    def _enter(self, state: ForwardState, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Forward hook of the submodule, or forward pre-hook of the model: set the positions of a forward."""
        locate = self.locate or partial(_patches_of_image, self.module)
        patches = locate(state.tower, args, kwargs, output)
        if patches is not None:
            state.set_positions(state.rotary.positions(*patches, self._num_prefix(state.tower), self.suffix))

    def _num_prefix(self, tower: Any) -> int:
        if isinstance(self.prefix, str):
            return int(getattr(tower, self.prefix))
        return self.prefix(tower) if callable(self.prefix) else self.prefix


class FromCoordinates(FromPatches):
    """Positions `([batch,] tokens, axes)` that the caller passes to the model by an argument's name or index."""

    def __init__(self, name: str, index: int, prefix: int | str | Callable[[Any], int] = 0) -> None:
        super().__init__(prefix=prefix, locate=partial(_coordinates, name, index))


@dataclass(frozen=True)
class FromLayer:
    """Tokens `OnLattice`, such as those of a window, by a function of a layer, its arguments and keyword arguments."""

    locate: Callable[[Any, tuple[Any, ...], dict[str, Any]], OnLattice]

    def attach(self, state: ForwardState, layers: Sequence[Any]) -> list[Any]:
        return []

    def begin(self, layer: "SwappedLayer", running: Running, args: Any, kwargs: Any) -> Arguments:
        rotary, index = layer.state.rotary, layer.state.rotary.index(layer.index)
        positions = rotary.positions_of(index, *self.locate(layer.module, args, kwargs))
        running.rotation = rotary.encodings[index](positions)
        return args, kwargs


@dataclass(frozen=True)
class FromArgument:
    """Positions passed to each layer as an argument, in place of tables of cosines and sines.

    The model's own code selects, reorders and repeats them like the tables. They travel as integers, see `to_bits`.

    Attributes:
        name: Name of the tables among the arguments of a layer.
        replace_tables: Makes a model pass positions in place of tables; returns handles that undo it.
        read: Returns the indices of a layer's tokens `(..., tokens, axes)` and the argument for it, from the argument
            received, the layer, and the number of tokens in the stream of text.
        text: Name of a layer's argument with the tokens of a second stream, of text, if any.
        streams: Returns whether a layer has separate norms for the text, whose tokens come first.
        exact: Whether cos and sin are computed by PyTorch, because angles are so large that kernels round differently.
        check: Raises ValueError for a layer that cannot rotate; called before each of its forwards.
        alike: Whether all layers read the same from the same argument, which is then read once per forward.
    """

    name: str
    replace_tables: Callable[[Any], Sequence[Any]]
    read: Callable[[Any, Any, int], tuple[Tensor, Any]]
    text: str = ""
    streams: Callable[[Any], bool] | None = None
    exact: bool = False
    check: Callable[[Any], None] | None = None
    alike: bool = False

    def attach(self, state: ForwardState, layers: Sequence[Any]) -> list[Any]:
        handles = [*self.replace_tables(state.tower)]
        return [*handles, state.tower.register_forward_hook(state.leave, always_call=True)] if self.alike else handles

    def begin(self, layer: "SwappedLayer", running: Running, args: Any, kwargs: Any) -> Arguments:
        index = layer.index_of(self.name)
        received = argument(self.name, index, args, kwargs)
        if received is None:
            return args, kwargs
        if self.check is not None:
            self.check(layer.module)
        text = argument(self.text, layer.index_of(self.text), args, kwargs) if self.text else None
        num_text = text.shape[1] if isinstance(text, Tensor) else 0
        rotation, passed = self._rotation(layer, running, received, num_text)
        if self.exact and isinstance(rotation, Planar):
            rotation = rotation._with(_table=torch.stack(rotation.cos_sin(), dim=-2))
        has_streams = num_text and self.streams is not None and self.streams(layer.module)
        running.rotation = rotation[..., num_text:] if has_streams else rotation
        running.text_rotation = rotation[..., :num_text] if has_streams else None
        return with_argument(self.name, index, args, kwargs, passed)

    def _rotation(self, layer: "SwappedLayer", running: Running, received: Any, num_text: int) -> tuple[Rotation, Any]:
        """Read positions and return their rotation; if all layers read the same, once from the first one on."""
        rotary, learned, known = layer.state.rotary, torch.is_grad_enabled(), running.received
        index, lattice = rotary.index(layer.index), rotary.lattice_of(layer.index)
        if not layer.index or known is None or known[0] is not received or known[1] != lattice:
            indices, passed = self.read(received, layer.module, num_text)
            positions = rotary.at(index, from_bits(indices))
            keeps = self.alike and not positions.requires_grad and not torch.compiler.is_compiling()
            together = keeps and not (layer.index or learned) and all(x == rotary.lattices[0] for x in rotary.lattices)
            rotations = rotary.rotations([positions] * len(rotary.encodings)) if together else []
            known = received, lattice, positions, passed, rotations
            if keeps:
                running.received = known
        _, _, positions, passed, rotations = known
        return rotations[index] if rotations and not learned else rotary.encodings[index](positions), passed


def to_bits(positions: Tensor) -> Tensor:
    """Return the bits of floating-point positions as integers, which policies of mixed precision do not cast.

    Models index, repeat and concatenate them as before. Positions that need gradients stay floating point.
    """
    if positions.requires_grad or is_exporting():  # ONNX has no view of other dtypes
        return positions
    wide = positions.to(wide_dtype(positions))
    return wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)


def from_bits(received: Tensor) -> Tensor:
    """Return the positions of `to_bits`; raise ValueError if they were cast."""
    if is_narrow(received):
        rule = "positions of a swapped model must reach its layers in float32: switch off the cast of inputs of blocks"
        raise ValueError(f"{rule} (FSDP: cast_forward_inputs=False), got {received.dtype}")
    if received.is_floating_point():
        return received
    return received.view(torch.float64 if received.dtype == torch.int64 else torch.float32)


def argument(name: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an argument by keyword or position; None if absent."""
    return kwargs[name] if name in kwargs else args[index] if len(args) > index else None


def with_argument(name: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
    """Return the arguments with one value replaced."""
    if name not in kwargs and len(args) > index:
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _dropped(dropout: Any, state: ForwardState, num_prefix: int, tokens: Tensor) -> Any:
    """Forward of timm's patch dropout that also selects the positions of the prefix and of the patches kept."""
    from timm.layers import PatchDropout, PatchDropoutWithIndices

    tokens, kept = PatchDropoutWithIndices.forward(dropout, tokens)
    placed = state.running.placed
    if kept is not None and placed is not None:  # (batch, n) indices after the prefix
        prefix = torch.arange(num_prefix, device=kept.device).expand(len(kept), -1)
        index = torch.cat([prefix, kept + num_prefix], dim=1).unsqueeze(-1)
        positions = [every.expand(len(kept), *every.shape[-2:]) for every in placed.positions]
        state.set_positions([every.gather(1, index.expand(-1, -1, every.shape[-1])) for every in positions])
    return tokens if isinstance(dropout, PatchDropout) else (tokens, kept)


def blocks_of(tower: nn.Module, layers: Sequence[Any]) -> list[nn.Module]:
    """Return the elements of lists of modules that contain layers: gradient checkpointing runs them again."""
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    parts = dict.fromkeys(part for module in tower.modules() if isinstance(module, lists) for part in module.children())
    attention = set(layers)
    return [part for part in parts if not attention.isdisjoint(part.modules())]


def _patches_of_image(name: str, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OnLattice:
    """Locate the patches of an image, from the output of the module that made tokens of them."""
    image = args[0] if args else next(iter(kwargs.values()))
    sizes = image.shape[2:]
    if image.ndim == 3:
        rule = f"FromPatches({name!r}) needs locate= for data of one axis"
        raise ValueError(f"{rule}, got {tuple(image.shape)}, of which the output may be a lattice or tokens")
    if output.ndim == image.ndim:  # (batch, channels, *lattice)
        lattice = output.shape[2:]
    else:  # (batch, tokens, channels)
        patch = (round((sizes.numel() / output.shape[1]) ** (1 / len(sizes))),) * len(sizes)
        for part in tower.get_submodule(name).modules():
            if isinstance(part, nn.Conv2d | nn.Conv3d) and len({*part.stride}) > 1:
                patch = part.stride
        lattice = [size // extent for size, extent in zip(sizes, patch, strict=True)]
        if torch.Size(lattice).numel() != output.shape[1]:
            rule = f"the output of {name!r} must be (batch, channels, *lattice), or a token for each square patch, or"
            raise ValueError(f"{rule} FromPatches needs locate=, got {tuple(output.shape)} for {tuple(image.shape)}")
    return output.device, tuple(lattice)


def _coordinates(name: str, index: int, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> OnLattice:
    coordinates: Tensor = argument(name, index, args, kwargs)
    return coordinates, (1,) * coordinates.shape[-1]
