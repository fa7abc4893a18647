"""`Rotary`, the module that `swap` adds to a model of another library, and `Adapter`, which describes that model."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchrope.encodings import Encoding
from torchrope.integrations.own_rotation import OwnRotation
from torchrope.lattice import Lattice
from torchrope.positions import grid, prefix
from torchrope.rotating import rotate
from torchrope.rotations import Rotation

ATTRIBUTE = "rotary"
"""Attribute of a swapped model that holds its encodings."""


@dataclass(frozen=True)
class Site:
    """Shape of one attention layer, from which an encoding for it is built.

    Attributes:
        num_heads: Number of key heads.
        head_dim: Channels of a head.
        lattice: Tokens along each axis at the size the model was built for; of one window for windowed attention.
        grows: Whether a larger input gives a larger lattice.
        sized: Whether that size is known; if the model was built for no particular size, the lattice is all ones.
    """

    num_heads: int
    head_dim: int
    lattice: tuple[int, ...]
    grows: bool = True
    sized: bool = True


class OrderedRotation(NamedTuple):
    """A rotation, and the order in which it takes the channels of a head, or None for their natural order."""

    rotation: Rotation
    channels: Tensor | None

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k `([batch,] heads, tokens, head_dim)` up to a common basis, which scores do not contain."""
        if query.ndim == 3:
            query, key = self(query.unsqueeze(0), key.unsqueeze(0))
            return query.squeeze(0), key.squeeze(0)
        if self.channels is not None:
            query, key = query.index_select(-1, self.channels), key.index_select(-1, self.channels)
        return rotate(query, key, self.rotation, layout="bhtd", scores_only=True)


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
        self.first_with_lattice = [self.lattices.index(lattice) for lattice in lattices]
        self.channels = [order if order is None or _moves(order) else None for order in channels]
        for index, order in enumerate(self.channels):
            table = None if order is None else torch.tensor(order)
            self.register_buffer(f"channels{index}", table, persistent=False)
        self.handles: list[RemovableHandle | Replaced] = []
        self.original_modules = nn.ModuleDict()  # replaced submodules of the tower, by name
        self.learned: dict[str, bool] = {}  # whether frozen parameters required gradients before

    def of_layer(self, index: int) -> int:
        """Return the index of the encoding of a layer."""
        return index if len(self.encodings) > 1 else 0

    def keep_layers(self, count: int) -> None:
        """Drop the encodings of all but the first layers."""
        self.encodings = self.encodings[:count]
        del self.lattices[count:], self.first_with_lattice[count:], self.channels[count:]

    def freeze(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Freeze parameters until `unfreeze`."""
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

    def ordered_rotation(self, index: int, positions: Tensor) -> OrderedRotation:
        """Return the rotation of one encoding at positions `([batch,] tokens, axes)`, with its channel order."""
        return OrderedRotation(self.encodings[index](positions), getattr(self, f"channels{index}"))

    def positions(
        self, sizes: Sequence[int], num_prefix: int = 0, *, device: torch.device | str | None = None
    ) -> list[Tensor]:
        """Return the positions of a lattice of tokens for each encoding, `(num_prefix + prod(sizes), axes)`."""
        return self.positions_at(grid(*sizes, device=device, dtype=self._dtype()), sizes, num_prefix)

    def positions_at(self, indices: Tensor, sizes: Sequence[int | Tensor], num_prefix: int = 0) -> list[Tensor]:
        """Return the positions of some tokens of a lattice for each encoding, `(..., num_prefix + tokens, axes)`.

        Args:
            indices: Their indices `(..., tokens, axes)`.
            sizes: Tokens along each axis, numbers, or tensors `(..., 1)` if sizes differ between samples.
            num_prefix: Leading tokens at the origin.
        """
        indices = indices.to(self._dtype())
        made: list[Tensor] = []
        for lattice, first in zip(self.lattices, self.first_with_lattice, strict=True):
            made.append(made[first] if first < len(made) else self._placed(lattice, indices, sizes, num_prefix))
        return made

    def placed(self, index: int, positions: Tensor) -> Tensor:
        """Convert positions computed by the model, `(..., tokens, axes)`, to those of one encoding."""
        lattice: Lattice = self.lattices[index]
        return self._placed(lattice, positions.to(self._dtype()), (1,) * positions.shape[-1], 0)

    def rotation(self, index: int, sizes: Sequence[int], *, device: torch.device | str | None = None) -> Rotation:
        """Return the rotation of one encoding for a lattice of tokens."""
        indices = grid(*sizes, device=device, dtype=self._dtype())
        rotation: Rotation = self.encodings[index](self._placed(self.lattices[index], indices, sizes, 0))
        return rotation

    def _placed(self, lattice: Lattice, indices: Tensor, sizes: Sequence[int | Tensor], num_prefix: int) -> Tensor:
        positions = lattice.at(indices, sizes)
        return prefix(lattice.perturbed(positions) if self.training else positions, num_prefix)

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


class OneThread:
    """Refuse a second thread while one is inside a model, whose hooks keep the rotation of the current forward.

    Args:
        library: The library of the model, for the error.
    """

    def __init__(self, library: str) -> None:
        self.library = library
        self.lock = threading.RLock()

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Hook `enter` before and `leave` after the forward of a module, also one that raises."""
        before = module.register_forward_pre_hook(self.enter)
        return [before, module.register_forward_hook(self.leave, always_call=True)]

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook; layers inside the model enter again, those recomputed in a backward pass for themselves."""
        if not torch.compiler.is_compiling() and not self.lock.acquire(blocking=False):
            raise self.error()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook."""
        if not torch.compiler.is_compiling():
            with suppress(RuntimeError):  # of a thread that was refused
                self.lock.release()

    def error(self) -> RuntimeError:
        """Return the error for a second thread."""
        rule = f"a swapped {self.library} model runs in one thread at a time"
        return RuntimeError(f"{rule}; use one copy per thread (copy.deepcopy)")

    def __reduce__(self) -> tuple[type["OneThread"], tuple[str]]:
        return OneThread, (self.library,)  # locks are not copied


def check_installed(tower: nn.Module, rotary: Rotary, layer: nn.Module, args: Any) -> None:
    """Forward pre-hook of an attention layer: raise ValueError if another module has taken the place of `rotary`."""
    present = getattr(tower, ATTRIBUTE, None)
    if not torch.compiler.is_compiling() and present is not rotary:
        rule = f"{ATTRIBUTE} must be the module that swap installed, got {type(present).__name__}"
        line = 'modules_to_save=[f"encodings.{i}" for i in range(depth)]'
        raise ValueError(f"{rule}; peft trains encodings by {line} with depth = {len(rotary.encodings)}")


class Adapter(ABC):
    """Describe a model to `swap` and attach encodings to it; one subclass for each kind of attention.

    Attributes:
        tower: The module that holds the attention layers and the table, and gets `rotary`.
        keeps_rotation: Whether the model's built-in rotation can be kept beside the encodings.
        of_text: Whether it is a text model; `swap` prefers a vision tower if a model has both.
    """

    keeps_rotation = True
    of_text = False

    def __init__(self, tower: nn.Module) -> None:
        self.tower: Any = tower

    @abstractmethod
    def sites(self) -> list[Site]:
        """Return the shape of each attention layer, in order."""

    @abstractmethod
    def attention_layers(self) -> list[Any]:
        """Return the attention layers, in order."""

    def growth(self, factors: Sequence[float]) -> float:
        """Return the growth of the number of tokens if axes are longer by these factors."""
        return math.prod(factors)

    @abstractmethod
    def tables(self) -> list[nn.Parameter]:
        """Return the parameters that `keep_position_tables=False` sets to zero: position tables or biases."""

    def rotates(self) -> bool:
        """Return whether the model has a built-in rotation of q and k."""
        return False

    def own_rotations(self) -> list[OwnRotation]:
        """Return the built-in rotation of each attention layer, in order.

        Raises:
            ValueError: a rotation that cannot be read.
        """
        raise NotImplementedError

    @abstractmethod
    def attach(self, rotary: Rotary) -> None:
        """Make the layers rotate q and k; handles of hooks and overrides are appended to `rotary.handles`."""

    def detach(self, rotary: Rotary) -> None:
        """Undo `attach`."""
        for handle in rotary.handles:
            handle.remove()
        rotary.handles.clear()


def _moves(order: tuple[int, ...]) -> bool:
    return list(order) != list(range(len(order)))
