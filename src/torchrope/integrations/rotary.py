"""`Rotary`, the module that `swap` adds to a model of another library: its encodings and the positions they take."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torchrope.encodings import Encoding
from torchrope.lattice import Lattice
from torchrope.positions import prefix

ATTRIBUTE = "rotary"
"""Attribute of a swapped model that holds its encodings."""


class Rotary(nn.Module):
    """The encodings of a swapped model: one per attention layer, or one shared by all.

    Args:
        encodings: In the order of the layers.
        lattices: Token positions for each encoding.
        channels: Order in which each encoding takes the channels of a head, or None for their natural order.
        keep_position_tables: Whether the model's position tables are kept.
        keep_rotation: Whether the model's built-in rotation is kept.
    """

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
        self.channels = [order if order is None or _moves(order) else None for order in channels]
        for index, order in enumerate(self.channels):
            table = None if order is None else torch.tensor(order)
            self.register_buffer(f"channels{index}", table, persistent=False)
        self.original_modules = nn.ModuleDict()  # submodules of the model that are removed while it is swapped
        self.learned: dict[str, bool] = {}  # whether frozen parameters required gradients before

    def index(self, layer: int) -> int:
        """Return the index of the encoding of a layer."""
        return layer if len(self.encodings) > 1 else 0

    def keep_layers(self, count: int) -> None:
        """Drop the encodings of all but the first layers."""
        self.encodings = self.encodings[:count]
        del self.lattices[count:], self.channels[count:], self._first[count:]

    def freeze(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Freeze parameters until `unfreeze`."""
        parameters = list(parameters)
        self.learned[name] = any(parameter.requires_grad for parameter in parameters)
        for parameter in parameters:
            parameter.requires_grad_(False)

    def unfreeze(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Restore requires_grad as it was before `freeze`."""
        for parameter in parameters:
            parameter.requires_grad_(self.learned[name])

    def permute_channels(self, x: Tensor, index: int) -> Tensor:
        """Permute the channels of q or k `(..., head_dim)` to the order of one of the encodings."""
        order = getattr(self, f"channels{index}")
        return x if order is None else x.index_select(-1, order)

    def positions(
        self, indices: Tensor, sizes: Sequence[int | Tensor] = (), num_prefix: int = 0, num_suffix: int = 0
    ) -> list[Tensor]:
        """Return the positions of some tokens of a lattice for each encoding, `(..., tokens, axes)`.

        Args:
            indices: Their indices `(..., tokens, axes)`.
            sizes: Tokens along each axis, numbers, or tensors `(..., 1)` if sizes differ between samples.
            num_prefix: Leading tokens at the origin.
            num_suffix: Trailing tokens at the origin.
        """
        made: list[Tensor] = []
        for index, first in enumerate(self._first):
            if first < index:
                made.append(made[first])
            else:
                made.append(pad(prefix(self.at(index, indices, sizes), num_prefix), (0, 0, 0, num_suffix)))
        return made

    def at(self, index: int, indices: Tensor, sizes: Sequence[int | Tensor] = ()) -> Tensor:
        """Return the positions of some tokens of a lattice for one encoding, `(..., tokens, axes)`."""
        lattice: Lattice = self.lattices[index]
        positions = lattice.at(indices.to(self._dtype()), sizes)
        return lattice.perturbed(positions) if self.training else positions

    def _dtype(self) -> torch.dtype:
        """Return float64 if the encodings are float64, float32 otherwise."""
        tensors = chain(self.encodings.parameters(), self.encodings.buffers())
        double = any(tensor.dtype == torch.float64 for tensor in islice(tensors, 1))
        return torch.float64 if double else torch.float32


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


def _moves(order: tuple[int, ...]) -> bool:
    return list(order) != list(range(len(order)))
