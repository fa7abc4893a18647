"""`Rotary`, the module that `swap` adds to a model of another library: its encodings and the positions they take."""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torchrope.encodings import Encoding
from torchrope.lattice import Lattice
from torchrope.positions import prefix
from torchrope.tensors import wide_positions

ATTRIBUTE = "rotary"
"""Attribute of a swapped model that holds its encodings."""


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
        self.keep_position_tables = keep_position_tables
        self.keep_rotation = keep_rotation
        self.lattices = list(lattices)
        self._first = [self.lattices.index(lattice) for lattice in lattices]  # here, as compilers compare none
        self.channels = [None if order == tuple(range(len(order or ()))) else order for order in channels]
        self.received: dict[str, Any] = {}  # the source of each layer's tables, if the family looks for it
        self.original_modules = nn.ModuleDict()  # submodules of the model that are removed while it is swapped
        self._place_orders()

    def requires_grad_(self, requires_grad: bool = True) -> "Rotary":
        """Apply to the encodings alone, since forwards use no parameter of `original_modules`."""
        self.encodings.requires_grad_(requires_grad)
        return self

    def index(self, layer: int) -> int:
        """Return the index of the encoding of a layer."""
        return layer if len(self.encodings) > 1 else 0

    def order(self, layer: int, device: torch.device) -> Tensor | None:
        """Return the order in which the encoding of a layer takes the channels of a head, None for their own."""
        order = self._orders[self.index(layer)]
        if order is None or order.device == device:
            return order
        order = order.to(device)
        if not torch.compiler.is_compiling() and type(order) is Tensor:
            self._orders[self.index(layer)] = order
        return order

    def _place_orders(self) -> None:
        """Compute `channels` as tensors, no buffers: loaders overwrite those with memory that no file restores."""
        first = next(chain(self.encodings.parameters(), self.encodings.buffers()), None)
        device = "cpu" if first is None or first.is_meta else first.device
        self._orders = [None if order is None else torch.tensor(order, device=device) for order in self.channels]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        super()._apply(fn, recurse)
        self._place_orders()
        return self

    def positions(
        self, indices: Tensor, sizes: Sequence[int | Tensor] = (), num_prefix: int = 0, num_suffix: int = 0
    ) -> list[Tensor]:
        """Return the positions of tokens, by their indices `(..., tokens, axes)` in a lattice, for each encoding."""
        different = {
            first: pad(prefix(self.at(first, indices, sizes), num_prefix), (0, 0, 0, num_suffix))
            for first in dict.fromkeys(self._first)
        }
        return [different[first] for first in self._first]

    def at(self, index: int, indices: Tensor, sizes: Sequence[int | Tensor] = ()) -> Tensor:
        """Return the positions of some tokens of a lattice for one encoding, `(..., tokens, axes)`."""
        lattice: Lattice = self.lattices[index]
        first = islice(chain(self.encodings.parameters(), self.encodings.buffers()), 1)
        double = any(tensor.dtype == torch.float64 for tensor in first)
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
        self.learned = {name: one.requires_grad for name, one in owner.named_parameters() if id(one) in frozen}
        self.others_learned = self._others_learn()
        for parameter in parameters:
            parameter.requires_grad_(False)

    def remove(self) -> None:
        """Restore requires_grad, unless all other parameters were frozen meanwhile."""
        if self.others_learned and not self._others_learn():
            return
        for name, parameter in self.owner.named_parameters():
            parameter.requires_grad_(self.learned.get(name, parameter.requires_grad))

    def _others_learn(self) -> bool:
        names = (*self.learned, f"{ATTRIBUTE}.")
        return any(one.requires_grad for name, one in self.owner.named_parameters() if not name.startswith(names))
