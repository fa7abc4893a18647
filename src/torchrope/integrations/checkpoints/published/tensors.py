"""Access to the tensors of a checkpoint; missing, unused and wrongly shaped ones raise ValueError with their name."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import count
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from torchrope.encodings import Encoding
from torchrope.integrations.checkpoints.layout import FLOATS
from torchrope.models import ViT

Model = TypeVar("Model", bound=nn.Module)


class Tensors:
    """The tensors of a checkpoint, each of which must be taken exactly once.

    Args:
        family: Name of the model family, for error messages.
        state: Tensors by name.
    """

    def __init__(self, family: str, state: Mapping[str, Tensor]) -> None:
        self.family = family
        self._left = dict(state)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def error(self, reason: str) -> ValueError:
        """Return a ValueError with a message that names the family and the reason."""
        return ValueError(f"checkpoint of {self.family}: {reason}")

    def shape(self, name: str, num_dimensions: int) -> tuple[int, ...]:
        """Return the shape of a tensor without taking it.

        Raises:
            ValueError: no such tensor, another number of dimensions, or an empty tensor.
        """
        shape = tuple(self._found(name).shape)
        if len(shape) != num_dimensions:
            raise self.error(f"{name} must have {num_dimensions} dimensions, got {shape}")
        if 0 in shape:
            raise self.error(f"{name} must not be empty, got {shape}")
        return shape

    def take(self, name: str, *shape: int) -> Tensor:
        """Remove a tensor and return it in float32.

        Raises:
            ValueError: no such tensor, another shape, or not floating point.
        """
        tensor = self._found(name)
        if tuple(tensor.shape) != shape:
            raise self.error(f"{name} must be {shape}, got {tuple(tensor.shape)}")
        self.check_floats(name)
        del self._left[name]
        return tensor.float()

    def check_floats(self, name: str) -> None:
        """Raise ValueError unless a tensor is floating point."""
        tensor = self._found(name)
        if tensor.dtype not in FLOATS:
            raise self.error(f"{name} must be floating point, got {tensor.dtype}")

    def drop(self, *names: str) -> None:
        """Remove tensors, if present, without using them."""
        for name in names:
            self._left.pop(name, None)

    def depth(self, before: str) -> int:
        """Return the number of layers: consecutive numbers from 0 after a name prefix.

        Raises:
            ValueError: a number is missing.
        """
        numbers = [name.removeprefix(before).partition(".")[0] for name in self._left if name.startswith(before)]
        found = {int(number) for number in numbers if number.isdecimal()}
        depth = without_gap(found)
        if depth < max(len(found), 1):
            raise self.error(f"{before}{depth} is missing")
        return depth

    def finish(self) -> None:
        """Raise ValueError if there are tensors that were not taken."""
        if self._left:
            first = sorted(self._left)
            more = f" and {len(first) - 3} more" if len(first) > 3 else ""
            raise self.error(f"all tensors must be used, got unused {', '.join(first[:3])}{more}")

    def _found(self, name: str) -> Tensor:
        if name not in self._left:
            raise self.error(f"{name} is missing")
        return self._left[name]


def without_gap(numbers: Container[int]) -> int:
    """Return the length of the longest run 0, 1, 2, ... in a set of numbers."""
    return next(number for number in count() if number not in numbers)


def build_on_meta(build: Callable[[], Model]) -> Model:
    """Build a model on the meta device, without memory and without changing the random state."""
    with torch.device("meta"):
        return build()


def allocate_zeros(model: Model) -> Model:
    """Allocate a model on the meta device as zeros on the CPU."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def build_and_load(build: Callable[[], ViT], weights: Mapping[str, Tensor], generators: Sequence[Tensor] = ()) -> ViT:
    """Build a ViT, load its weights and set the generators of each encoding; empty for encodings without parameters."""
    model = allocate_zeros(build_on_meta(build))
    load_weights(model, weights)
    encodings = cast(Iterable[Encoding], model.encodings)
    for encoding, values in zip(encodings, generators, strict=True) if generators else ():
        encoding.set_generators(values)
    return model.eval()


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the weights of a model except those of its encodings, which `set_generators` sets."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if "encodings." not in name]
    if missing or unexpected:
        raise AssertionError(f"a converter must give each weight, got {missing} missing and {unexpected} unexpected")
