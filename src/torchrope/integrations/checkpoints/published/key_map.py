"""Key maps: which tensors of a foreign checkpoint fill which parameters of a model, whose shapes they must have."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torchrope.encodings import Encoding
from torchrope.integrations.checkpoints.layout import FLOATS

Model = TypeVar("Model", bound=nn.Module)
Size = Sequence[int]

_MAX_LAYERS = 256  # far above published models; bounds what a file of many small tensors may build


def _unchanged(tensor: Tensor, size: Size = ()) -> Tensor:
    return tensor


def flat_patches(tensor: Tensor, size: Size) -> Tensor:
    """Convert the weight of a convolution to that of a linear map of patches."""
    return tensor.flatten(1)


def without_batch(tensor: Tensor, size: Size) -> Tensor:
    """Remove a first axis of length 1."""
    return tensor.squeeze(0)


def patch_entries(tensor: Tensor, size: Size) -> Tensor:
    """Convert a position table `(1, prefix + patches, dim)` to `(*lattice, dim)`, without entries of prefix tokens."""
    return tensor.squeeze(0)[-math.prod(size[:-1]) :].unflatten(0, size[:-1])


class Row(NamedTuple):
    """One row of a key map: a tensor of the file and the parameter of the model that it fills.

    A `{}` is a number or another part of a name, the same in both names. Tensors of several rows with one parameter are
    concatenated in the order of the rows.

    Attributes:
        theirs: Name in the file; empty for a parameter that stays zero.
        ours: Name in the model.
        convert: Function from the tensor and the size of the part to the values.
        part: Function from the parameter to the part that the tensor fills; no tensor is needed for an empty part.
    """

    theirs: str
    ours: str
    convert: Callable[[Tensor, Size], Tensor] = _unchanged
    part: Callable[[Tensor], Tensor] = _unchanged


def _third(index: int, own: Tensor) -> Tensor:
    return own.chunk(3)[index]


def separate_qkv(theirs: str) -> list[Row]:
    """Return rows for separate projections of queries, keys and values, with `?` for q, k or v."""
    return [
        Row(theirs.replace("?", one), "layers.{}.attention.qkv.{}", part=partial(_third, index))
        for index, one in enumerate("qkv")
    ]


class Checkpoint:
    """The tensors of a checkpoint, each of which must be used exactly once.

    Args:
        family: Name of the model family, for error messages.
        state: Tensors by name.
        keys: The key map.
    """

    def __init__(self, family: str, state: Mapping[str, Tensor], keys: Sequence[Row]) -> None:
        self.family = family
        self.keys = keys
        self.state = dict(state)

    def __contains__(self, name: str) -> bool:
        return name in self.state

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

    def take(self, name: str, size: Size, convert: Callable[[Tensor, Size], Tensor] = _unchanged) -> Tensor:
        """Remove a tensor and return its values.

        Raises:
            ValueError: no such tensor, values of another size, or not floating point.
        """
        tensor = self._found(name)
        try:
            values = convert(tensor, size)
        except (IndexError, RuntimeError):
            values = torch.empty(0)
        if tuple(values.shape) != tuple(size):
            verb = "be" if convert is _unchanged else "fit"
            raise self.error(f"{name} must {verb} {tuple(size)}, got {tuple(tensor.shape)}")
        if tensor.dtype not in FLOATS:
            raise self.error(f"{name} must be floating point, got {tensor.dtype}")
        del self.state[name]
        return values

    def drop(self, pattern: str) -> None:
        """Remove the tensors whose names match, without using them."""
        self.state = {name: value for name, value in self.state.items() if not re.fullmatch(pattern, name)}

    def count(self, before: str, limit: int = _MAX_LAYERS) -> int:
        """Return how many numbers from 0 follow a name prefix.

        Raises:
            ValueError: none, more than the limit, or a number is missing.
        """
        found = (re.match(rf"{re.escape(before)}(\d+)\.", name) for name in self.state)
        numbers = {match[1] for match in found if match}
        if len(numbers) > limit:
            raise self.error(f"{before} must be followed by at most {limit} numbers, got {len(numbers)}")
        for number in range(max(len(numbers), 1)):
            if str(number) not in numbers:
                raise self.error(f"{before}{number} is missing")
        return len(numbers)

    def names(self, ours: str) -> list[str]:
        """Return the names in the file of the tensors that fill a parameter."""
        return [theirs for _, theirs in self._rows(ours)]

    def depth_and_widths(self) -> dict[str, Any]:
        """Return the arguments of `ViT` that depend on the number of layers and on the width of the MLP and head."""
        layers = next(row.theirs for row in self.keys if row.ours.startswith("layers.{}"))
        (head,) = self.names("head.weight")
        return {
            "depth": self.count(layers.partition("{}")[0]),
            "mlp_dim": self.shape(self.names("layers.0.mlp.0.weight")[0], 2)[0],
            "num_outputs": self.shape(head, 2)[0] if head in self else 0,
        }

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Take the weights of a model, except those of its encodings, by their names in the model.

        Raises:
            ValueError: a tensor that is missing, unused, of another shape or not floating point.
        """
        weights = {}
        for name, own in model.state_dict().items():
            if "encodings." in name:
                continue  # set_generators sets them
            parts = [(row, theirs, row.part(own)) for row, theirs in self._rows(name)]
            if sum(part.numel() for _, _, part in parts) != own.numel():
                raise AssertionError(f"a key map must fill each parameter, got one that does not fill {name}")
            values = [
                self.take(theirs, part.shape, row.convert) if theirs else torch.zeros(part.shape)
                for row, theirs, part in parts
                if part.numel()
            ]
            weights[name] = values[0] if len(values) == 1 else torch.cat(values)
        if self.state:
            first = sorted(self.state)
            more = f" and {len(first) - 3} more" if len(first) > 3 else ""
            raise self.error(f"all tensors must be used, got unused {', '.join(first[:3])}{more}")
        return weights

    def load(self, build: Callable[[], Model], generators: Sequence[Tensor] = ()) -> Model:
        """Build a model, load all weights and set the generators of each encoding.

        The model is built on the meta device, and allocated only if the checkpoint fits it.

        Args:
            build: Builds the model.
            generators: `(axes, heads, blocks, b, b)` for each encoding; empty for encodings without parameters.

        Raises:
            ValueError: as of `weights`.
        """
        with torch.device("meta"):
            model = build()
        tables = [self.state[name].squeeze(0) for name in self.names("absolute.table") if name in self]
        weights = self.weights(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
            model.load_state_dict(weights, strict=False)
            for table in tables:  # entries of prefix tokens do not depend on the input size
                own: Any = model
                prefix = table[: len(table) - math.prod(own.absolute.sizes)]
                own.prefix_tokens[: len(prefix)] += prefix
        encodings = [part for part in model.modules() if isinstance(part, Encoding)]
        for encoding, values in zip(encodings, generators, strict=True) if generators else ():
            encoding.set_generators(values)
        return model.eval()

    def _rows(self, ours: str) -> list[tuple[Row, str]]:
        """Return the rows of a parameter, with the names in the file."""
        found = ((row, re.fullmatch(re.escape(row.ours).replace(r"\{\}", r"(\w+)"), ours)) for row in self.keys)
        return [(row, row.theirs.format(*match.groups())) for row, match in found if match]

    def _found(self, name: str) -> Tensor:
        if name not in self.state:
            raise self.error(f"{name} is missing")
        return self.state[name]


def pixels(source: Checkpoint, input_size: int | Size, patch: Size) -> tuple[int, int]:
    """Return the height and width of an image.

    Raises:
        ValueError: not two multiples of the patch.
    """
    sizes = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
    if len(sizes) != 2 or any(size % extent for size, extent in zip(sizes, patch, strict=True)):
        raise source.error(f"input_size must be two multiples of the patch {tuple(patch)}, got {sizes}")
    return sizes[0], sizes[1]
