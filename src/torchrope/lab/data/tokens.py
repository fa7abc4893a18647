"""Tokens at arbitrary positions: examples of any number of points, their batches and augmentation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from torchrope.lab.data.config import PointAugment, TokensConfig
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.draws import Draws

VECTORS = ("n", "v")
"""Prefixes, before an axis's name, of the columns of vectors that rotate with positions: normals, velocities."""
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Cloud:
    """The points of an example.

    Attributes:
        positions: From the least one along each axis, in the unit of the data, float32 `(n, axes)`.
        features: What is known at each point, float32 `(n, features)`; NaN where it is missing.
    """

    positions: Tensor
    features: Tensor

    @classmethod
    def of(cls, positions: Tensor, features: Tensor) -> "Cloud":
        """Check and convert what a file holds; points without a position are left out.

        Args:
            positions: float64 `(n, axes)`.
            features: float64 `(n, features)`.

        Raises:
            ValueError: no point has a position, or a number is infinite or beyond float32.
        """
        placed = ~positions.isnan().any(dim=1)
        positions, features = positions[placed], features[placed]
        if not len(positions):
            raise ValueError(f"one point or more must have a position, got none of {len(placed)}")
        positions = positions - positions.amin(dim=0)  # before float32, which has seven digits
        for name, values in (("positions", positions), ("features", features)):
            if (values.abs() > LARGEST).any() or (name == "positions" and values.isnan().any()):  # inf - inf is NaN
                raise ValueError(f"{name} must be numbers within float32, or missing, got an infinite or larger one")
        return cls(positions.float(), features.float())


@dataclass(frozen=True)
class Tokens:
    """How points become tokens: measured on the training examples.

    A token holds (x - mean) / std of each feature x, 0 where it is missing; which features are missing, where some are;
    and its coordinates from the mean of the example's points in halves of the extent, where they are asked for.

    Attributes:
        mean, std: Of each feature, over all points that have it.
        missing: Whether some features of some points are missing.
        coordinates: Whether tokens hold coordinates.
        scale: Length that counts as one unit of position along each axis.
        extent: Mean length of the examples along each axis; that of a unit where it is 0.
    """

    mean: Tensor
    std: Tensor
    missing: bool
    coordinates: bool
    scale: tuple[float, ...]
    extent: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Numbers of a token."""
        return (1 + self.missing) * len(self.mean) + self.coordinates * len(self.scale)

    def __call__(self, features: Tensor, positions: Tensor) -> Tensor:
        """Tokens and their positions side by side, `(batch, n, channels + axes)`; rows without a position are NaN."""
        parts = [((features - self.mean) / self.std).nan_to_num(nan=0.0)]
        if self.missing:
            parts.append(features.isnan().float())
        if self.coordinates:
            halves = positions.new_tensor(self.extent) / 2
            parts.append((positions - positions.nanmean(dim=1, keepdim=True)) / halves)
        padding = positions.isnan().any(dim=-1, keepdim=True)
        return torch.cat([*parts, positions], dim=-1).masked_fill(padding, math.nan)


def measure_tokens(
    train: Sequence[Cloud], val: Sequence[Cloud], *, coordinates: bool, scale: Sequence[float] | None
) -> Tokens:
    """Measure what `Tokens` needs on the training examples; whether features are missing, on all.

    Raises:
        ValueError: scale has neither one number nor one for each axis.
    """
    features = torch.cat([cloud.features for cloud in train]).double()
    mean = features.nanmean(dim=0).nan_to_num(nan=0.0)
    std = (features - mean).square().nanmean(dim=0).sqrt().nan_to_num(nan=0.0)
    spans = torch.stack([(cloud.positions.amax(0) - cloud.positions.amin(0)).double() for cloud in train]).mean(dim=0)
    axes, points = len(spans), sum(len(cloud.positions) for cloud in train) / len(train)
    if scale is not None and len(scale) not in (1, axes):
        raise ValueError(f"--data.scale must be one number or one for each of {axes} axes, got {list(scale)}")
    given = None if scale is None else list(scale) * (axes if len(scale) == 1 else 1)
    units = max(points - 1 if axes == 1 else math.sqrt(points), 1.0)
    lengths = [span / units if span > 0 else 1.0 for span in spans.tolist()] if given is None else given
    return Tokens(
        mean=mean.float(),
        std=torch.where(std > 0, std, 1.0).float(),
        missing=any(bool(cloud.features.isnan().any()) for cloud in (*train, *val)),
        coordinates=coordinates,
        scale=tuple(lengths),
        extent=tuple(span if span > 0 else unit for span, unit in zip(spans.tolist(), lengths, strict=True)),
    )


class CloudSet(Dataset):
    """Examples in memory; a batch is `(examples, n, channels + axes)`, n the largest number of points in it.

    Args:
        clouds: The examples.
        samples: Name and label of each.
        tokens: Makes tokens of points.
        size: Most points that are shown of an example.
        seed: Decides which ones, and the changes.
        augment: What changes the examples; None leaves them.
        plane: Columns of features that rotate with positions, by the plane of `augment`.
    """

    def __init__(
        self,
        clouds: Sequence[Cloud],
        samples: Sequence[tuple[str, int]],
        tokens: Tokens,
        size: int,
        seed: int,
        augment: PointAugment | None = None,
        plane: "RotationPlane | None" = None,
    ) -> None:
        self.clouds = clouds
        self.samples = samples
        self.labels = torch.tensor([label for _, label in samples])
        self.tokens = tokens
        self.size = size
        self.seed = seed
        self.augment = augment
        self.plane = plane

    def __len__(self) -> int:
        return len(self.clouds)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):  # where a loop over the set ends; repeats come in batches alone
            raise IndexError(f"an example must be between 0 and {len(self) - 1}, got {index}")
        inputs, labels = self.__getitems__([index])
        return inputs[0], int(labels[0])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        draws, own = Draws(self.seed, indices), [index % len(self) for index in indices]  # beyond the end: a repeat
        shown = [self._shown(self.clouds[index], drawn) for index, drawn in zip(own, indices, strict=True)]
        features = pad_sequence([cloud.features for cloud in shown], batch_first=True, padding_value=math.nan)
        positions = pad_sequence([cloud.positions for cloud in shown], batch_first=True, padding_value=math.nan)
        if self.augment is not None:
            features, positions = change(features, positions, self.augment, self.plane, self.tokens.scale, draws)
        return self.tokens(features, positions), self.labels[torch.tensor(own)]

    def part(self, chosen: Tensor) -> "CloudSet":
        """Some of the examples, by their indices."""
        clouds, samples = ([each[index] for index in chosen.tolist()] for each in (self.clouds, self.samples))
        return CloudSet(clouds, samples, self.tokens, self.size, self.seed, self.augment, self.plane)

    def in_epoch(self, augment: PointAugment, plane: "RotationPlane | None", seed: int) -> "CloudSet":
        """The examples of an epoch: each a function of seed and index alone."""
        return CloudSet(self.clouds, self.samples, self.tokens, self.size, seed, augment, plane)

    def _shown(self, cloud: Cloud, index: int) -> Cloud:
        """All points, or `size` of them in their order."""
        if len(cloud.positions) <= self.size:
            return cloud
        keys = Draws(self.seed, [index]).uniform("points", len(cloud.positions))[0]
        chosen = keys.topk(self.size, largest=False).indices.sort().values
        return Cloud(cloud.positions[chosen], cloud.features[chosen])


@dataclass(frozen=True)
class RotationPlane:
    """A plane of rotation.

    Attributes:
        axes: Two columns of positions.
        vectors: Pairs of columns of features that rotate with them.
    """

    axes: tuple[int, int]
    vectors: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, augment: PointAugment, axes: Sequence[str], features: Sequence[str]) -> "RotationPlane | None":
        """The plane that an augmentation names; None where it names none.

        Raises:
            ValueError: it names what is no axis.
        """
        if augment.rotate is None:
            return None
        if not {*augment.rotate} <= {*axes}:
            rule = f"--data.augment.rotate must name two of the axes {', '.join(axes)}"
            raise ValueError(f"{rule}, got {','.join(augment.rotate)}")
        one, other = augment.rotate
        pairs = [(prefix + one, prefix + other) for prefix in VECTORS]
        vectors = tuple((features.index(a), features.index(b)) for a, b in pairs if a in features and b in features)
        return cls((axes.index(one), axes.index(other)), vectors)


def change(
    features: Tensor,
    positions: Tensor,
    augment: PointAugment,
    plane: RotationPlane | None,
    scale: Sequence[float],
    draws: Draws,
) -> tuple[Tensor, Tensor]:
    """Turn, move, jitter and drop points of a batch, in this order.

    Args:
        features: `(batch, n, features)`.
        positions: `(batch, n, axes)`, NaN for missing points.
        augment: What is changed, by how much.
        plane: The plane of rotation; None for no rotation.
        scale: Length of a unit along each axis.
        draws: The random numbers of the batch.
    """
    _, n, axes = positions.shape
    unit = positions.new_tensor(scale)
    if plane is not None:
        angle = math.radians(augment.degrees) * (2 * draws.uniform("rotate") - 1).float()  # [b, 1]
        centre = positions.nanmean(dim=1, keepdim=True)
        positions = rotate_columns(positions - centre, plane.axes, angle) + centre
        for pair in plane.vectors:
            features = rotate_columns(features, pair, angle)
    if augment.shift:
        positions = positions + augment.shift * unit * (2 * draws.uniform("shift", axes) - 1).float().unsqueeze(1)
    if augment.jitter:
        positions = positions + augment.jitter * unit * normal(draws, "jitter", n * axes).view_as(positions)
    if augment.drop_points:
        positions = drop_points(positions, augment.drop_points, draws)
    return features, positions


def rotate_columns(x: Tensor, pair: tuple[int, int], angle: Tensor) -> Tensor:
    """Turn two columns of `(batch, n, columns)` in their plane, by an angle `(batch, 1)` for each example."""
    one, other = x[..., pair[0]], x[..., pair[1]]
    turned = x.clone()
    turned[..., pair[0]] = angle.cos() * one - angle.sin() * other
    turned[..., pair[1]] = angle.sin() * one + angle.cos() * other
    return turned


def drop_points(positions: Tensor, largest: float, draws: Draws) -> Tensor:
    """Make a random share of the points of each example, at most `largest`, points without a position, all but one."""
    n = positions.shape[1]
    share, keys = largest * draws.uniform("dropped share"), draws.uniform("dropped", n)
    keys = keys.masked_fill(positions.isnan().any(dim=-1), -1.0)
    dropped = (keys < share) & (keys < keys.amax(dim=1, keepdim=True))
    return positions.masked_fill(dropped.unsqueeze(-1), math.nan)


def normal(draws: Draws, purpose: str, count: int) -> Tensor:
    """Draw from the standard normal distribution, float32 `(examples, count)` (Box and Muller 1958)."""
    radius = (-2 * torch.log1p(-draws.uniform(f"{purpose}, radius", count))).sqrt()
    return (radius * (2 * math.pi * draws.uniform(f"{purpose}, angle", count)).cos()).float()


class TokensModule(DataModule):
    """Data without a lattice. A subclass writes `clouds`, and sets `axes` and `features` there at the latest.

    Attributes:
        features: Names of what is known at each point.
    """

    lattice = False
    input_size = ()
    features: tuple[str, ...]

    config: TokensConfig

    def clouds(self) -> tuple[list[Cloud], list[tuple[str, int]], list[Cloud], list[tuple[str, int]]]:
        """Training examples with name and label of each, then those held out.

        Raises:
            ValueError: the data is missing or cannot be used; the message is one line.
        """
        raise NotImplementedError

    def datasets(self) -> tuple[CloudSet, CloudSet]:
        """Measure scale and statistics on the training examples."""
        config = self.config
        train, train_samples, val, val_samples = self.clouds()
        scale = self.unit if config.scale is None else config.scale
        tokens = measure_tokens(train, val, coordinates=self.with_coordinates, scale=scale)
        self.scale, self.extent, self.in_channels = tokens.scale, tokens.extent, tokens.channels
        RotationPlane.of(config.augment, self.axes, self.features)  # refuses what is no axis
        parts = ((train, train_samples), (val, val_samples))
        made = [CloudSet(clouds, samples, tokens, config.size, config.split_seed) for clouds, samples in parts]
        return made[0], made[1]

    @property
    def unit(self) -> list[float] | None:
        """The length that counts as one unit of position where no scale is given; None measures it."""
        return None

    @property
    def with_coordinates(self) -> bool:
        """Whether tokens hold their own coordinates."""
        return False

    def _augmented(self, train: Dataset, seed: int) -> Dataset:
        assert isinstance(train, CloudSet)
        augment: Any = self.config.augment
        return train.in_epoch(augment, RotationPlane.of(augment, self.axes, self.features), seed)


def point_counts(clouds: Sequence[Cloud]) -> str:
    """How many points examples have, in words.

    Example:
        >>> point_counts([Cloud(torch.zeros(n, 1), torch.zeros(n, 1)) for n in (3, 1200)])
        '3 to 1,200 points'
    """
    fewest, most = (pick(len(cloud.positions) for cloud in clouds) for pick in (min, max))
    return f"{fewest:,} to {most:,} points" if fewest < most else f"{most:,} point{'s' * (most > 1)}"
