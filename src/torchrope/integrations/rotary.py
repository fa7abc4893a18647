"""Modules that `swap` puts into a model of another library, and the description of that model that they need."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchrope.encodings import Encoding
from torchrope.positions import PerAxis, grid, prefix
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
    """

    num_heads: int
    head_dim: int
    lattice: tuple[int, ...]


class Rotary(nn.Module):
    """The encodings of a swapped model: one per attention layer, or one alone for all.

    Args:
        encodings: In the order of the layers.
        sites: Where they go, as many, or more for one alone.
        keep_ape: Whether the model's position tables stay.
        keep_rotation: Whether a rotation of the model's own stays beside.
        spacing: Distance between neighbouring tokens; by default the convention of each encoding's paper.
        origin: Position of the first token, likewise.
    """

    def __init__(
        self,
        encodings: Sequence[Encoding],
        sites: Sequence[Site],
        *,
        keep_ape: bool,
        keep_rotation: bool,
        spacing: PerAxis | None,
        origin: PerAxis | None,
    ) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self.keep_ape = keep_ape
        self.keep_rotation = keep_rotation
        chosen = {"spacing": spacing, "origin": origin}
        self.lattices = [_lattice(encoding, site, chosen) for encoding, site in zip(encodings, sites, strict=False)]
        self.handles: list[RemovableHandle | Replaced] = []
        self.put_aside = nn.ModuleDict()  # what stood in the tower before, by name
        self.learned: dict[str, bool] = {}  # whether what is silent now took gradients

    def of_layer(self, index: int) -> int:
        """Which encoding serves a layer."""
        return index if len(self.encodings) > 1 else 0

    def silence(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Take gradients from parameters, until `wake`."""
        self.learned[name] = any(parameter.requires_grad for parameter in parameters)
        for parameter in parameters:
            parameter.requires_grad_(False)

    def wake(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Undo `silence`."""
        for parameter in parameters:
            parameter.requires_grad_(self.learned[name])

    def positions(
        self, sizes: Sequence[int], num_prefix: int = 0, *, device: torch.device | str | None = None
    ) -> list[Tensor]:
        """Where each encoding finds the tokens of a lattice, `(num_prefix + prod(sizes), axes)`."""
        made: list[Tensor] = []
        for lattice in self.lattices:
            first = self.lattices.index(lattice)
            fresh = first == len(made)
            made.append(prefix(grid(*sizes, **lattice, device=device), num_prefix) if fresh else made[first])
        return made

    def rotations(
        self, sizes: Sequence[int], num_prefix: int = 0, *, device: torch.device | str | None = None
    ) -> list[Rotation]:
        """The rotation of each encoding for a lattice of tokens; `of_layer` says which serves which layer."""
        positions = self.positions(sizes, num_prefix, device=device)
        return [encoding(where) for encoding, where in zip(self.encodings, positions, strict=True)]


class Adapter(ABC):
    """What a swap must know of a model, and do to it; one subclass for each kind of attention.

    Attributes:
        tower: The module that holds the attention layers and the table, and gets `rotary`.
    """

    def __init__(self, tower: nn.Module) -> None:
        self.tower: Any = tower

    @abstractmethod
    def sites(self) -> list[Site]:
        """Each attention layer, in order."""

    @abstractmethod
    def tables(self) -> list[nn.Parameter]:
        """The parameters that say where tokens are and `keep_ape=False` silences: a table, or relative biases."""

    @abstractmethod
    def attach(self, rotary: Rotary) -> None:
        """Make the layers rotate; what is registered goes to `rotary.handles`."""

    def detach(self, rotary: Rotary) -> None:
        """Undo `attach`."""
        for handle in rotary.handles:
            handle.remove()
        rotary.handles.clear()


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


def _lattice(encoding: Encoding, site: Site, chosen: dict[str, PerAxis | None]) -> dict[str, Any]:
    paper = encoding.lattice(*site.lattice)
    return {name: paper[name] if value is None else value for name, value in chosen.items()}
