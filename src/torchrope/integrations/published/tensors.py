"""The tensors of a checkpoint, each used once: what is missing, misshapen or left over is refused by name."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import count
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from torchrope.encodings import Encoding
from torchrope.integrations.layout import FLOATS
from torchrope.models import ViT

Model = TypeVar("Model", bound=nn.Module)


class Tensors:
    """Hand the tensors of a checkpoint out, each once.

    Args:
        family: What the checkpoint looks like, for messages.
        state: Tensors by name.
    """

    def __init__(self, family: str, state: Mapping[str, Tensor]) -> None:
        self.family = family
        self._left = dict(state)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def refusal(self, reason: str) -> ValueError:
        """The error that says why this checkpoint cannot be loaded."""
        return ValueError(f"this looks like a checkpoint of {self.family}, but {reason}")

    def shape(self, name: str, num_dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor that is yet to be taken."""
        shape = tuple(self._found(name).shape)
        if len(shape) != num_dimensions:
            raise self.refusal(f"{name} must have {num_dimensions} dimensions, got {shape}")
        if 0 in shape:
            raise self.refusal(f"{name} must hold numbers, got {shape}")
        return shape

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, in float32, for the one time that it is used."""
        tensor = self._found(name)
        if tuple(tensor.shape) != shape:
            raise self.refusal(f"{name} must be {shape}, got {tuple(tensor.shape)}")
        self.check_floats(name)
        del self._left[name]
        return tensor.float()

    def check_floats(self, name: str) -> None:
        """Refuse a weight that is not made of floating point numbers."""
        tensor = self._found(name)
        if tensor.dtype not in FLOATS:
            raise self.refusal(f"{name} must be floating point, got {tensor.dtype}")

    def drop(self, *names: str) -> None:
        """Leave out what can be recomputed or was never read."""
        for name in names:
            self._left.pop(name, None)

    def depth(self, before: str) -> int:
        """Layers: the numbers from 0 on that follow this prefix in a name."""
        numbers = [name.removeprefix(before).partition(".")[0] for name in self._left if name.startswith(before)]
        found = {int(number) for number in numbers if number.isdecimal()}
        depth = without_gap(found)
        if depth < max(len(found), 1):
            raise self.refusal(f"{before}{depth} is missing")
        return depth

    def finish(self) -> None:
        """Refuse what nothing has used."""
        if self._left:
            first = sorted(self._left)
            more = f" and {len(first) - 3} more" if len(first) > 3 else ""
            raise self.refusal(f"nothing here uses {', '.join(first[:3])}{more}")

    def _found(self, name: str) -> Tensor:
        if name not in self._left:
            raise self.refusal(f"{name} is missing")
        return self._left[name]


def without_gap(numbers: Container[int]) -> int:
    """How many numbers there are from 0 on, without a gap."""
    return next(number for number in count() if number not in numbers)


def outlined(build: Callable[[], Model]) -> Model:
    """Build a model without memory, and without a draw from the random state."""
    with torch.device("meta"):
        return build()


def emptied(model: Model) -> Model:
    """Give a model that has no memory zeros on the CPU."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def assembled(build: Callable[[], ViT], weights: Mapping[str, Tensor], generators: Sequence[Tensor] = ()) -> ViT:
    """Build a ViT and write its weights and the generators of each of its encodings, none if those have none."""
    model = emptied(outlined(build))
    fill(model, weights)
    encodings = cast(Iterable[Encoding], model.encodings)
    for encoding, its in zip(encodings, generators, strict=True) if generators else ():
        encoding.set_generators(its)
    return model.eval()


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write the weights of a model; its encodings have their own road."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if "encodings." not in name]
    if missing or unexpected:
        raise AssertionError(f"a converter must give each weight, it left {missing} and made {unexpected}")
