"""Point sets as tokens at arbitrary positions: normalisation, padded batches and augmentation."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from torchrope_lab.data.data_config import AugmentConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.draws import Draws
from torchrope_lab.data.images import Sample, select_examples
from torchrope_lab.data.repeated import ReadInBatches, example_of
from torchrope_lab.mistakes import Mistake

VECTORS = ("n", "v")
"""Prefixes of the columns of vectors that rotate with the positions, normals (`nx`) and velocities (`vx`)."""
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Cloud:
    """The points of one example."""

    positions: Tensor  # float32 `(n, axes)`, in the unit of the data; in files relative to the minimum along each axis
    features: Tensor  # float32 `(n, features)`; NaN if missing

    @classmethod
    def of(cls, positions: Tensor, features: Tensor, relative: bool = True) -> "Cloud":
        """Check and convert points, float64; those without a position are left out."""
        placed = ~positions.isnan().any(dim=1)
        positions, features = positions[placed], features[placed]
        if not len(positions):
            raise Mistake(f"at least one point must have a position, got {len(placed)} with missing coordinates")
        if relative:
            positions = positions - positions.amin(dim=0)  # in float64: float32 has seven digits
        for name, values in (("positions", positions), ("features", features)):
            if (values.abs() > LARGEST).any() or (name == "positions" and values.isnan().any()):  # inf - inf is NaN
                raise Mistake(f"{name} must be finite in float32, or missing, got an infinite or larger value")
        return cls(positions.float(), features.float())


@dataclass(frozen=True)
class Tokens:
    """Convert points to tokens, with statistics of the training examples."""

    # A token is (x - mean) / std of each feature x, 0 if missing; with `missing`, an indicator per feature, 1 if
    # missing; and with `coordinates`, the position relative to the mean of the example's points, divided by extent / 2.

    mean: Tensor  # of each feature over the points where it is known
    std: Tensor
    missing: bool  # whether any feature of any point is missing
    coordinates: bool
    scale: tuple[float, ...]  # length of one unit of position along each axis
    extent: tuple[float, ...]  # mean of the examples along each axis; the unit if it is 0

    @property
    def channels(self) -> int:
        """Length of a token."""
        return (1 + self.missing) * len(self.mean) + self.coordinates * len(self.scale)

    def __call__(self, features: Tensor, positions: Tensor) -> Tensor:
        """Concatenate tokens and positions, `(batch, n, channels + axes)`; rows without a position are NaN."""
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
    """Measure the attributes of `Tokens` on the training examples, and `missing` on all examples."""
    features = torch.cat([cloud.features for cloud in train]).double()
    mean = features.nanmean(dim=0).nan_to_num(nan=0.0)
    std = (features - mean).square().nanmean(dim=0).sqrt().nan_to_num(nan=0.0)
    spans = torch.stack([(cloud.positions.amax(0) - cloud.positions.amin(0)).double() for cloud in train]).mean(dim=0)
    axes, points = len(spans), sum(len(cloud.positions) for cloud in train) / len(train)
    if scale is not None and len(scale) not in (1, axes):
        raise Mistake(f"--data.scale must be one number or one for each of {axes} axes, got {list(scale)}")
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


@dataclass(eq=False)
class CloudSet(ReadInBatches):
    """Point sets in memory; a batch is `(examples, n, channels + axes)`, padded to its largest number of points n."""

    clouds: Sequence[Cloud]
    samples: Sequence[Sample]  # name and label of each example
    tokens: Tokens
    size: int  # largest number of points per example; larger examples are subsampled at random
    seed: int  # of subsampling and augmentation
    augment: AugmentConfig | None = None
    plane: "RotationPlane | None" = None
    labels: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.labels = torch.tensor([label for _, label in self.samples])

    def __len__(self) -> int:
        return len(self.clouds)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        draws, examples = Draws(self.seed, indices), [example_of(index, len(self)) for index in indices]
        clouds = [self._subsampled(self.clouds[index], drawn) for index, drawn in zip(examples, indices, strict=True)]
        features = pad_sequence([cloud.features for cloud in clouds], batch_first=True, padding_value=math.nan)
        positions = pad_sequence([cloud.positions for cloud in clouds], batch_first=True, padding_value=math.nan)
        if self.augment is not None:
            features, positions = augment_points(
                features, positions, self.augment, self.plane, self.tokens.scale, draws
            )
        return self.tokens(features, positions), self.labels[torch.tensor(examples)]

    def stored(self, index: int) -> Iterator[bytes]:
        """Yield positions and features of an example."""
        cloud = self.clouds[index]
        yield from (tensor.contiguous().numpy().tobytes() for tensor in (cloud.positions, cloud.features))

    def with_examples(self, sets: Sequence["CloudSet"], indices: Tensor) -> "CloudSet":
        """Return examples of several sets, numbered consecutively."""
        pairs = [pair for part in sets for pair in zip(part.clouds, part.samples, strict=True)]
        clouds, samples = zip(*(pairs[index] for index in indices.tolist()), strict=True)
        return replace(self, clouds=clouds, samples=samples)

    def in_epoch(self, augment: AugmentConfig, plane: "RotationPlane | None", seed: int) -> "CloudSet":
        """Return the set with the augmentation of an epoch, a function of seed and index only."""
        return replace(self, augment=augment, plane=plane, seed=seed)

    def _subsampled(self, cloud: Cloud, index: int) -> Cloud:
        """Return the cloud, or `size` random points of it in their order."""
        if len(cloud.positions) <= self.size:
            return cloud
        keys = Draws(self.seed, [index]).uniform("points", len(cloud.positions))[0]
        chosen = keys.topk(self.size, largest=False).indices.sort().values
        return Cloud(cloud.positions[chosen], cloud.features[chosen])


@dataclass(frozen=True)
class RotationPlane:
    """The plane of random rotations: two columns of positions, and pairs of feature columns that rotate with them."""

    axes: tuple[int, int]
    vectors: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, augment: AugmentConfig, axes: Sequence[str], features: Sequence[str]) -> "RotationPlane | None":
        """Return the plane of `augment.rotate`; None if it is not set."""
        if augment.rotate is None:
            return None
        if not {*augment.rotate} <= {*axes}:
            rule = f"--data.augment.rotate must name two of the axes {', '.join(axes)}"
            raise Mistake(f"{rule}, got {','.join(augment.rotate)}")
        one, other = augment.rotate
        pairs = [(prefix + one, prefix + other) for prefix in VECTORS]
        vectors = tuple((features.index(a), features.index(b)) for a, b in pairs if a in features and b in features)
        return cls((axes.index(one), axes.index(other)), vectors)


def augment_points(
    features: Tensor,
    positions: Tensor,
    augment: AugmentConfig,
    plane: RotationPlane | None,
    scale: Sequence[float],
    draws: Draws,
) -> tuple[Tensor, Tensor]:
    """Rotate, shift, jitter and drop the points of a batch `(batch, n, axes)`, NaN if missing, in this order."""
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
    """Rotate two columns of `(batch, n, columns)` in their plane by an angle `(batch, 1)` per example."""
    one, other = x[..., pair[0]], x[..., pair[1]]
    rotated = x.clone()
    rotated[..., pair[0]] = angle.cos() * one - angle.sin() * other
    rotated[..., pair[1]] = angle.sin() * one + angle.cos() * other
    return rotated


def drop_points(positions: Tensor, largest: float, draws: Draws) -> Tensor:
    """Set a random share, at most `largest`, of the positions of each example to NaN; at least one point is kept."""
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
    """Base class of point data without a grid. A subclass implements `clouds`, which may set `axes` and `features`."""

    lattice = False
    input_size = ()
    features: tuple[str, ...]

    def clouds(self) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Return the training examples, their names and labels, then the same for validation."""
        raise NotImplementedError

    def select(
        self, clouds: Mapping[str, Cloud], train: Sequence[Sample], val: Sequence[Sample]
    ) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Select `train_size` and `val_size` examples, given all clouds by name; returns what `clouds` does."""
        config = self.config
        train = select_examples(train, config.train_size, config.split_seed, "train_size")
        val = select_examples(val, config.val_size, config.split_seed, "val_size")
        return [clouds[name] for name, _ in train], train, [clouds[name] for name, _ in val], val

    def datasets(self) -> tuple[CloudSet, CloudSet]:
        """Build both sets, with scale and statistics of the training examples."""
        config = self.config
        train, train_samples, val, val_samples = self.clouds()
        scale = self.unit if config.scale is None else config.scale
        tokens = measure_tokens(train, val, coordinates=self.with_coordinates, scale=scale)
        self.scale, self.extent, self.in_channels = tokens.scale, tokens.extent, tokens.channels
        RotationPlane.of(config.augment, self.axes, self.features)  # raises for an unknown axis
        parts = ((train, train_samples), (val, val_samples))
        train_set, val_set = (
            CloudSet(clouds, samples, tokens, config.size, config.split_seed) for clouds, samples in parts
        )
        return train_set, val_set

    @property
    def unit(self) -> list[float] | None:
        """Default of `scale`, the length of one unit of position; None measures it."""
        return None

    @property
    def with_coordinates(self) -> bool:
        """Whether tokens include coordinates."""
        return False

    def _augmented(self, train: Dataset, seed: int) -> Dataset:
        assert isinstance(train, CloudSet)
        augment = self.config.augment
        return train.in_epoch(augment, RotationPlane.of(augment, self.axes, self.features), seed)


def classes_of(labels: Iterable[str], source: str) -> tuple[str, ...]:
    """Return the different labels, numbers first in numerical order."""
    classes = sorted(
        {*labels}, key=lambda name: (float(name) if name.replace(".", "", 1).isdecimal() else math.inf, name)
    )
    if len(classes) < 2:
        raise Mistake(f"{source} must have at least two classes, got {', '.join(classes)}")
    return tuple(classes)


def point_counts(clouds: Sequence[Cloud]) -> str:
    """Describe the number of points per example.

    Example:
        >>> point_counts([Cloud(torch.zeros(n, 1), torch.zeros(n, 1)) for n in (3, 1200)])
        '3 to 1,200 points'
    """
    fewest, most = (pick(len(cloud.positions) for cloud in clouds) for pick in (min, max))
    return f"{fewest:,} to {most:,} points" if fewest < most else f"{most:,} point{'s' * (most > 1)}"
