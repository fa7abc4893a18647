"""Modules that `swap` puts into a model of another library, and the description of that model that they need."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchrope.encodings import Encoding
from torchrope.integrations.own_rotation import Lattice, OwnRotation
from torchrope.ops import rotate
from torchrope.positions import grid, prefix
from torchrope.rotations import Rotation

ATTRIBUTE = "rotary"
"""Where a swapped model keeps its encodings."""


@dataclass(frozen=True)
class Site:
    """One attention layer, as an encoding for it must be built.

    Attributes:
        num_heads: Its key heads.
        head_dim: Channels of a head.
        lattice: Tokens along each axis at the size the model was built for; of one window where windows attend.
        grows: Whether a larger input can have a larger lattice there.
        sized: Whether that size is known; where the model was built for no one size the lattice is 1 along each axis.
    """

    num_heads: int
    head_dim: int
    lattice: tuple[int, ...]
    grows: bool = True
    sized: bool = True


class Turn(NamedTuple):
    """A rotation, and the channels of a head in the order that it takes them, or None where they are in order."""

    rotation: Rotation
    channels: Tensor | None

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k `(batch, heads, tokens, head_dim)`, or of one sample, as far as scores see."""
        if query.ndim == 3:
            query, key = self(query.unsqueeze(0), key.unsqueeze(0))
            return query.squeeze(0), key.squeeze(0)
        if self.channels is not None:
            query, key = query.index_select(-1, self.channels), key.index_select(-1, self.channels)
        return rotate(query, key, self.rotation, layout="bhtd", scores_only=True)


class Rotary(nn.Module):
    """The encodings of a swapped model: one per attention layer, or one alone for all.

    Args:
        encodings: In the order of the layers.
        lattices: Where each of them finds the tokens.
        channels: The order in which each of them takes the channels of a head, or None where they are in order.
        keep_ape: Whether the model's position tables stay.
        keep_rotation: Whether a rotation of the model's own stays beside.
    """

    def __init__(
        self,
        encodings: Sequence[Encoding],
        *,
        lattices: Sequence[Lattice],
        channels: Sequence[tuple[int, ...] | None],
        keep_ape: bool,
        keep_rotation: bool,
    ) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self.keep_ape = keep_ape
        self.keep_rotation = keep_rotation
        self.lattices = list(lattices)
        self.alike = [self.lattices.index(lattice) for lattice in lattices]  # the first encoding with the same one
        self.channels = [order if order is None or _moves(order) else None for order in channels]
        for index, order in enumerate(self.channels):
            table = None if order is None else torch.tensor(order)
            self.register_buffer(f"channels{index}", table, persistent=False)
        self.handles: list[RemovableHandle | Replaced] = []
        self.put_aside = nn.ModuleDict()  # what stood in the tower before, by name
        self.learned: dict[str, bool] = {}  # whether what is silent now took gradients

    def of_layer(self, index: int) -> int:
        """Which encoding serves a layer."""
        return index if len(self.encodings) > 1 else 0

    def keep_layers(self, count: int) -> None:
        """Drop the encodings of all but the first layers."""
        self.encodings = self.encodings[:count]
        del self.lattices[count:], self.alike[count:], self.channels[count:]

    def silence(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Take gradients from parameters, until `wake`."""
        self.learned[name] = any(parameter.requires_grad for parameter in parameters)
        for parameter in parameters:
            parameter.requires_grad_(False)

    def wake(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Undo `silence`."""
        for parameter in parameters:
            parameter.requires_grad_(self.learned[name])

    def in_pairs(self, x: Tensor, index: int) -> Tensor:
        """q or k with the channels of a head `(..., head_dim)` in the order that one of the encodings takes them."""
        order = getattr(self, f"channels{index}")
        return x if order is None else x.index_select(-1, order)

    def turn(self, index: int, positions: Tensor) -> Turn:
        """How one of the encodings turns tokens at its positions `(tokens, axes)` or `(batch, tokens, axes)`."""
        return Turn(self.encodings[index](positions), getattr(self, f"channels{index}"))

    def positions(
        self, sizes: Sequence[int], num_prefix: int = 0, *, device: torch.device | str | None = None
    ) -> list[Tensor]:
        """Where each encoding finds the tokens of a lattice, `(num_prefix + prod(sizes), axes)`."""
        return self.positions_at(grid(*sizes, device=device, dtype=self._dtype()), sizes, num_prefix)

    def positions_at(self, indices: Tensor, sizes: Sequence[int | Tensor], num_prefix: int = 0) -> list[Tensor]:
        """Where each encoding finds tokens of a lattice, `(..., num_prefix + tokens, axes)`.

        Args:
            indices: Their indices `(..., tokens, axes)`.
            sizes: Tokens along each axis, numbers, or tensors `(..., 1)` where samples have sizes of their own.
            num_prefix: Tokens in front, at the origin.
        """
        indices = indices.to(self._dtype())
        made: list[Tensor] = []
        for lattice, first in zip(self.lattices, self.alike, strict=True):
            made.append(made[first] if first < len(made) else self._placed(lattice, indices, sizes, num_prefix))
        return made

    def placed(self, index: int, positions: Tensor) -> Tensor:
        """Where one encoding finds tokens `(..., tokens, axes)` whose positions the model knows itself."""
        lattice: Lattice = self.lattices[index]
        return self._placed(lattice, positions.to(self._dtype()), (1,) * positions.shape[-1], 0)

    def rotation(self, index: int, sizes: Sequence[int], *, device: torch.device | str | None = None) -> Rotation:
        """The rotation of one encoding for a lattice of tokens."""
        indices = grid(*sizes, device=device, dtype=self._dtype())
        encoding: Rotation = self.encodings[index](self._placed(self.lattices[index], indices, sizes, 0))
        return encoding

    def rotations(
        self, sizes: Sequence[int], num_prefix: int = 0, *, device: torch.device | str | None = None
    ) -> list[Rotation]:
        """The rotation of each encoding for a lattice of tokens; `of_layer` says which serves which layer."""
        positions = self.positions(sizes, num_prefix, device=device)
        return [encoding(where) for encoding, where in zip(self.encodings, positions, strict=True)]

    def _placed(self, lattice: Lattice, indices: Tensor, sizes: Sequence[int | Tensor], num_prefix: int) -> Tensor:
        positions = lattice.place(indices, sizes)
        return prefix(lattice.perturbed(positions) if self.training else positions, num_prefix)

    def _dtype(self) -> torch.dtype:
        """float64 where the encodings are, float32 otherwise."""
        tensors = chain(self.encodings.parameters(), self.encodings.buffers())
        double = any(tensor.dtype == torch.float64 for tensor in islice(tensors, 1))
        return torch.float64 if double else torch.float32


class Replaced:
    """Something of an object in another's place, until it is removed."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner = owner
        self.name = name
        self.before = {name: vars(owner)[name]} if name in vars(owner) else {}  # otherwise its class's
        vars(owner)[name] = value

    def remove(self) -> None:
        """Restore the previous value."""
        del vars(self.owner)[self.name]
        vars(self.owner).update(self.before)


class Adapter(ABC):
    """What a swap must know of a model, and do to it; one subclass for each kind of attention.

    Attributes:
        tower: The module that holds the attention layers and the table, and gets `rotary`.
        keeps_rotation: Whether the model's own rotation can stay beside the encodings.
        of_text: Whether it is of text; where a model has a vision tower too, `swap` takes that.
    """

    keeps_rotation = True
    of_text = False

    def __init__(self, tower: nn.Module) -> None:
        self.tower: Any = tower

    @abstractmethod
    def sites(self) -> list[Site]:
        """Each attention layer, in order."""

    def attention_layers(self) -> list[Any]:
        """Each attention layer itself, in order."""
        return self._layers()

    def _layers(self) -> list[Any]:
        raise NotImplementedError

    def growth(self, factors: Sequence[float]) -> float:
        """How many times more tokens there are where axes are longer by these factors."""
        return math.prod(factors)

    @abstractmethod
    def tables(self) -> list[nn.Parameter]:
        """The parameters that say where tokens are and `keep_ape=False` silences: a table, or relative biases."""

    def rotates(self) -> bool:
        """Whether the model rotates q and k by itself."""
        return False

    def own_rotations(self) -> list[OwnRotation]:
        """What each attention layer of a model that rotates turns q and k by, in order.

        Raises:
            ValueError: what cannot be read.
        """
        raise NotImplementedError

    @abstractmethod
    def attach(self, rotary: Rotary) -> None:
        """Make the layers rotate; what is registered goes to `rotary.handles`."""

    def detach(self, rotary: Rotary) -> None:
        """Undo `attach`."""
        for handle in rotary.handles:
            handle.remove()
        rotary.handles.clear()


def _moves(order: tuple[int, ...]) -> bool:
    return list(order) != list(range(len(order)))
