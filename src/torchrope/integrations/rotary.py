"""`Rotary`, the module that `swap` adds to a model of another library: its encodings and the positions they take."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torchrope.encodings import Encoding
from torchrope.inference import repeatable, rotates_pairs, would_repeat
from torchrope.integrations.own_rotation import halves
from torchrope.lattice import Lattice
from torchrope.ops.backends import is_plain
from torchrope.positions import grid, prefix
from torchrope.rotations import Rotation
from torchrope.tensors import wide_positions

ATTRIBUTE = "rotary"
"""Attribute of a swapped model that holds its encodings."""
_KEPT = 8


class Rotary(nn.Module):
    """The encodings of a swapped model, one per layer or one for all, with the positions and channels of each."""

    def __init__(
        self,
        encodings: Sequence[Encoding],
        *,
        lattices: Sequence[Lattice],
        channels: Sequence[tuple[int, ...] | None],
        keep_position_tables: bool,
        keep_rotation: bool,
    ) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self._per_layer = len(encodings) > 1
        self.keep_position_tables = keep_position_tables
        self.keep_rotation = keep_rotation
        self.lattices = list(lattices)
        self._first = [self.lattices.index(lattice) for lattice in lattices]  # here, as compilers compare none
        self.channels = [None if order == tuple(range(len(order or ()))) else order for order in channels]
        self.has_halves = [  # whether the n pairs of an encoding are channels (i, i + n)
            order is not None and order == (*halves(encoding.rotary_dim), *range(encoding.rotary_dim, len(order)))
            for order, encoding in zip(self.channels, encodings, strict=True)
        ]
        self.received: dict[str, Any] = {}  # the source of each layer's tables, if the family looks for it
        self._known: dict[Any, Tensor] = {}  # positions of all tokens of a lattice, by its sizes
        self._made: list[tuple[Tensor, Rotation]] = []  # the rotations of the last forward, with their positions
        self._compute_orders()

    def index(self, layer: int) -> int:
        """Return the index of the encoding of a layer."""
        return layer if self._per_layer else 0

    def _tensors(self) -> Iterator[Tensor]:
        return chain(self.encodings.parameters(), self.encodings.buffers())

    def lattice_of(self, layer: int) -> int:
        """Return the index of the first lattice that equals that of a layer."""
        return self._first[self.index(layer)]

    def orders(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the order in which an encoding takes the channels of a head, and the one back; None for their own."""
        orders = self._orders[self.index(layer)]
        if orders is None or orders[0].device == device:
            return orders
        orders = orders[0].to(device), orders[1].to(device)
        if not torch.compiler.is_compiling() and type(orders[0]) is Tensor:
            self._orders[self.index(layer)] = orders
        return orders

    def _compute_orders(self) -> None:
        """Compute `channels` as tensors, no buffers: loaders overwrite those with memory that no file restores."""
        first = next(self._tensors(), None)
        device = "cpu" if first is None or first.is_meta else first.device
        self._orders: list[tuple[Tensor, Tensor] | None] = []
        for channels in self.channels:
            order = None if channels is None else torch.tensor(channels, device=device)
            self._orders.append(None if order is None else (order, order.argsort()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        super()._apply(fn, recurse)
        self._compute_orders()
        self._known = {}
        return self

    def positions(
        self, indices: Tensor | torch.device, sizes: Sequence[int | Tensor] = (), before: int = 0, after: int = 0
    ) -> list[Tensor]:
        """Return the positions of tokens for each encoding, as `positions_of`."""
        each = {first: self.positions_of(first, indices, sizes, before, after) for first in dict.fromkeys(self._first)}
        return [each[first] for first in self._first]

    def positions_of(
        self,
        index: int,
        indices: Tensor | torch.device,
        sizes: Sequence[int | Tensor] = (),
        before: int = 0,
        after: int = 0,
    ) -> Tensor:
        """Return the positions of tokens for one encoding, with tokens at the origin before and after them.

        Their indices in a lattice are `(..., tokens, axes)`, or those of all its tokens on a device, kept for later.
        """
        if isinstance(indices, Tensor):
            return pad(prefix(self.at(index, indices, sizes), before), (0, 0, 0, after))
        first = self.encodings[0]
        own = first._parameters or first._buffers or dict(enumerate(self._tensors()))  # all: takes long
        dtype = next((tensor.dtype for tensor in own.values() if isinstance(tensor, Tensor)), None)
        keeps = not self.training and not torch.compiler.is_compiling() and all(type(size) is int for size in sizes)
        read = (dtype, torch.is_inference_mode_enabled()) if keeps else None
        key = (self._first[index], indices, *sizes, before, after, read)
        if keeps and key in self._known:
            return self._known[key]
        positions = self.positions_of(index, grid(*sizes, device=indices), sizes, before, after)  # type: ignore[arg-type]
        if keeps and type(positions) is Tensor:
            self._known = {**dict(list(self._known.items())[-_KEPT:]), key: positions}
        return positions

    def rotations(self, positions: Sequence[Tensor]) -> list[Rotation]:
        """Return the rotations of all layers, one if they share it; none if each layer must make its own."""
        if len(self.encodings) == 1:  # before layers that checkpointing may run again
            return [self.encodings[0](positions[0])]
        if torch.is_grad_enabled() or not is_plain(positions[0]):
            return []
        if (made := self._made) and all(map(would_repeat, self.encodings, positions, *zip(*made, strict=True))):
            return [rotation for _, rotation in made]
        if not all(map(rotates_pairs, self.encodings)):
            return []
        # Between layers, where caches hold other code, an encoding takes much longer.
        rotations = list(map(repeatable, self.encodings, positions))
        self._made = list(zip(positions, rotations, strict=True)) if positions[0].ndim == 2 else []
        return rotations

    def at(self, index: int, indices: Tensor, sizes: Sequence[int | Tensor] = ()) -> Tensor:
        """Return the positions of some tokens of a lattice for one encoding, `(..., tokens, axes)`."""
        lattice: Lattice = self.lattices[index]
        double = any(tensor.dtype == torch.float64 for tensor in islice(self._tensors(), 1))
        if not indices.is_floating_point():  # read only where that costs no synchronisation
            double |= wide_positions(indices, unread=torch.float32).dtype == torch.float64
        positions = lattice.at(indices.to(torch.float64 if double else torch.float32), sizes)
        return lattice.perturbed(positions) if self.training else positions


class Replaced:
    """Override an attribute of an object until `remove`."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner = owner
        self.name = name
        self.before = {name: vars(owner)[name]} if name in vars(owner) else {}  # empty if the class defines it
        vars(owner)[name] = value

    def remove(self) -> None:
        """Restore the previous value."""
        del vars(self.owner)[self.name]
        vars(self.owner).update(self.before)


class FrozenParameters:
    """Freeze parameters of a module until `remove`, which finds them by name: others may replace them meanwhile."""

    def __init__(self, owner: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        frozen = set(map(id, parameters))
        self.owner = owner
        self.learned = {name: p.requires_grad for name, p in owner.named_parameters() if id(p) in frozen}
        self.rest_learned = self._rest_learns()
        for parameter in parameters:
            parameter.requires_grad_(False)

    def remove(self) -> None:
        """Restore requires_grad, unless all other parameters were frozen meanwhile."""
        if self.rest_learned and not self._rest_learns():
            return
        for name, parameter in self.owner.named_parameters():
            parameter.requires_grad_(self.learned.get(name, parameter.requires_grad))

    def _rest_learns(self) -> bool:
        names = (*self.learned, f"{ATTRIBUTE}.")
        return any(p.requires_grad for name, p in self.owner.named_parameters() if not name.startswith(names))
