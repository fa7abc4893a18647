"""Key maps: which tensors of a foreign checkpoint fill which parameters of a model, whose shapes they must have."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torchrope.checkpoints.settings import FLOATS
from torchrope.encodings import Encoding

Model = TypeVar("Model", bound=nn.Module)
State = Mapping[str, Tensor]
Size = Sequence[int]
Extents = int | Sequence[int] | None
"""One number, one number per axis, or None for those that a checkpoint determines."""

MAX_LAYERS = 256  # far above published models; bounds what a file of many small tensors may build

FLAT_PATCHES = partial(torch.flatten, start_dim=1)  # of the weight of a convolution
UNBATCHED = partial(torch.squeeze, dim=0)  # of tokens with a batch axis
BATCHED = partial(torch.unsqueeze, dim=0)  # of one token


class Row(NamedTuple):
    """One row of a key map: a tensor of the file and the parameter of the model that it fills."""

    theirs: str  # name in the file; empty for a parameter that stays zero
    ours: str  # name in the model; a {} is any part of a name, the same in both names
    convert: Callable[[Tensor], Tensor] = Tensor.detach  # from the tensor to the values
    split: int | tuple[int, ...] = 1  # parts of the parameter along its first axis, or indices between them
    part: int = 0  # that the tensor fills; an empty one needs no tensor


def rows_of_layers(layer: str, attention: str, output: str) -> list[Row]:
    """Return the rows of layers of transformers, with separate projections of queries, keys and values."""
    names = [f"{layer}{attention}.{letter}_proj.{{}}" for letter in "qkv"]
    return [
        *(Row(name, "layers.{}.attention.qkv.{}", split=3, part=part) for part, name in enumerate(names)),
        Row(f"{layer}{attention}.{output}.{{}}", "layers.{}.attention.proj.{}"),
        Row(layer + "layer_scale{}.lambda1", "layers.{}.scale{}.factor"),
        Row(layer + "mlp.fc1.{}", "layers.{}.mlp.0.{}"),
        Row(layer + "mlp.fc2.{}", "layers.{}.mlp.3.{}"),
    ]


def rows_of_clip(before: str, table: str, head: str) -> list[Row]:
    """Return the key map of CLIP's vision tower in transformers; registers and layer scales are for other towers."""
    layer = before + "encoder.layers.{}."
    return [
        Row(before + "embeddings.patch_embedding.weight", "embed.proj.weight", FLAT_PATCHES),
        Row("", "embed.proj.bias"),  # CLIP has none
        Row(before + "embeddings.class_embedding", "prefix_tokens", BATCHED, split=(1,), part=0),
        Row(before + "embeddings.register_tokens", "prefix_tokens", UNBATCHED, split=(1,), part=1),
        Row(before + table, "absolute.table"),
        Row(before + "pre_layrnorm.{}", "embedding_norm.{}"),
        Row(layer + "layer_norm{}.{}", "layers.{}.norm{}.{}"),
        *rows_of_layers(layer, "self_attn", "out_proj"),
        Row(before + "post_layernorm.{}", "norm.{}"),
        Row(head + ".{}", "head.{}"),
    ]


class Checkpoint:
    """The tensors of a checkpoint, each of which must be used exactly once; all errors are ValueErrors of one line."""

    def __init__(self, family: str, state: State, keys: Sequence[Row]) -> None:
        self.family = family
        self.keys = keys
        self.state = dict(state)

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def require(self, holds: object, rule: str) -> None:
        """Raise ValueError with the family and a rule unless the rule holds."""
        if not holds:
            raise ValueError(f"checkpoint of {self.family}: {rule}")

    def shape(self, name: str, num_dimensions: int) -> tuple[int, ...]:
        """Return the shape of a tensor, which must have so many dimensions and not be empty."""
        shape = tuple(self._tensor(name).shape)
        self.require(len(shape) == num_dimensions, f"{name} must have {num_dimensions} dimensions, got {shape}")
        self.require(0 not in shape, f"{name} must not be empty, got {shape}")
        return shape

    def take(self, name: str, size: Size, convert: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
        """Remove a tensor, which must be floating point, and return its values, which must have this size."""
        tensor = self._tensor(name)
        values = convert(tensor)
        before = "" if values.shape == tensor.shape else f" from {tuple(tensor.shape)}"
        rule = f"{name} must be {tuple(size)}, got {tuple(values.shape)}{before}"
        self.require(tuple(values.shape) == tuple(size), rule)
        self.require(tensor.dtype in FLOATS, f"{name} must be floating point, got {tensor.dtype}")
        del self.state[name]
        return values

    def drop(self, pattern: str) -> None:
        """Remove the tensors whose names match, without using them."""
        self.state = {name: value for name, value in self.state.items() if not re.fullmatch(pattern, name)}

    def count(self, before: str, limit: int = MAX_LAYERS) -> int:
        """Return how many numbers follow a name prefix: all from 0 to one below the limit or less."""
        matches = (re.match(rf"{re.escape(before)}(\d+)\.", name) for name in self.state)
        numbers = {match[1] for match in matches if match}
        self.require(len(numbers) <= limit, f"{before} must be followed by at most {limit} numbers, got {len(numbers)}")
        for number in range(max(len(numbers), 1)):
            self.require(str(number) in numbers, f"{before}{number} is missing")
        return len(numbers)

    def names(self, ours: str) -> list[str]:
        """Return the names in the file of the tensors that fill a parameter."""
        return [theirs for _, theirs in self._rows(ours)]

    def sizes(self, input_size: Iterable[int], patch_size: Size, in_channels: int, dim: int, num_heads: int) -> Any:
        """Return the arguments of `ViT` that are sizes: these, the number of layers, and widths of the MLP and head."""
        layers = next(row.theirs for row in self.keys if row.ours.startswith("layers.{}"))
        (head,), (mlp,) = self.names("head.weight"), self.names("layers.0.mlp.0.weight")
        sizes = {"input_size": tuple(input_size), "patch_size": tuple(patch_size), "in_channels": in_channels}
        widths = {"dim": dim, "num_heads": num_heads, "mlp_dim": self.shape(mlp, 2)[0]}
        outputs = self.shape(head, 2)[0] if head in self else 0
        return {**sizes, **widths, "depth": self.count(layers.partition("{}")[0]), "num_outputs": outputs}

    def training_size(
        self, patch: Size, input_size: Extents, table: str = "", prefix_entries: Size = (0,)
    ) -> tuple[int, ...]:
        """Return the training size: as given, or a square of as many patches as a position table has entries."""
        entries = self.shape(table, 3)[1] if table in self else 0
        counts = [entries - extra for extra in prefix_entries]  # of patches
        if input_size is None:
            sides = [math.isqrt(count) for count in counts if count > 0 and math.isqrt(count) ** 2 == count]
            rule = f"input_size= is required: the {entries} entries of {table} are not a square of patches"
            self.require(len(patch) == 2 and sides, rule)
            return sides[0] * patch[0], sides[0] * patch[1]
        sizes = (input_size,) * len(patch) if isinstance(input_size, int) else tuple(input_size)
        fits = len(sizes) == len(patch) and not any(map(operator.mod, sizes, patch))
        self.require(fits, f"input_size must be {len(patch)} multiples of the patch {tuple(patch)}, got {sizes}")
        rule = f"input_size must give {' or '.join(map(str, counts))} patches of {tuple(patch)}, as in {table}"
        fits = table not in self or math.prod(sizes) in [count * math.prod(patch) for count in counts]
        self.require(fits, f"{rule}, got {sizes}")
        return sizes

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Take the weights of a model, except those of its encodings, by their names in the model."""
        weights = {}
        for name, tensor in model.state_dict().items():
            if "encodings." in name:
                continue  # set_generators sets them
            values = []
            for row, theirs in self._rows(name):
                size = tensor.tensor_split(row.split)[row.part].shape
                if size.numel():
                    values.append(self.take(theirs, size, row.convert) if theirs else torch.zeros(size))
            weights[name] = values[0] if len(values) == 1 else torch.cat(values)
        more = f" and {len(self.state) - 3} more" if len(self.state) > 3 else ""
        first = ", ".join(sorted(self.state)[:3])
        self.require(not self.state, f"all tensors must be used, got unused {first}{more}")
        return weights

    def load(self, build: Callable[..., Model], generators: Sequence[Tensor] = (), **arguments: Any) -> Model:
        """Build a model, load weights and set the generators of its encodings, `(axes, heads, blocks, b, b)` each."""
        with torch.device("meta"):  # memory is allocated only if the checkpoint fits
            model = build(**arguments)
        tokens = self._split_table(model)
        weights = self.weights(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
            model.load_state_dict(weights, strict=False)
            if tokens is not None:
                model.get_parameter("prefix_tokens")[: len(tokens)].add_(tokens)
        encodings = [part for part in model.modules() if isinstance(part, Encoding)]
        for encoding, values in zip(encodings, generators, strict=True) if generators else ():
            encoding.set_generators(values)
        return model.eval()

    def _split_table(self, model: nn.Module) -> Tensor | None:
        """Leave the entries of patches in a position table, and return those of prefix tokens, which suit any size."""
        name, absolute = next(iter(self.names("absolute.table")), ""), getattr(model, "absolute", None)
        if name not in self or absolute is None:
            return None
        table = self.state[name].squeeze(0)
        prefix = self.shape(name, 3)[1] - math.prod(absolute.sizes)
        self.state[name] = table[prefix:].unflatten(0, absolute.sizes) if table.ndim == 2 else table
        return table[:prefix]

    def _rows(self, ours: str) -> list[tuple[Row, str]]:
        """Return the rows of a parameter, with the names in the file."""
        matches = ((row, re.fullmatch(re.escape(row.ours).replace(r"\{\}", r"(\w+)"), ours)) for row in self.keys)
        return [(row, row.theirs.format(*match.groups())) for row, match in matches if match]

    def _tensor(self, name: str) -> Tensor:
        self.require(name in self.state, f"{name} is missing")
        return self.state[name]
