"""Views of a cube with real digits on its faces; the class depends on the camera poses, not on any single view."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from torchrope.geometry import Poses, from_quaternions
from torchrope.positions import grid
from torchrope_lab.data.config import ViewsConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.digits import split_digits
from torchrope_lab.data.tensors import TensorSet

FACES = 6
CLASSES = FACES - 1
PATCH = 6
"""Pixels of a patch per side."""
FOCAL = 0.6
"""Focal length of all cameras, in widths of an image."""
SIZES = (2000, 600)
"""Number of cubes for training and validation if no sizes are given."""
WORLD = 5.0
"""Largest coordinate of a cube's centre in its world; a cube is 2 wide."""
POSE_NUMBERS = 12
"""Numbers of a pose: R in row-major order, then t."""


@dataclass(frozen=True, eq=False)
class Cubes:
    """Images, camera poses and labels of cubes.

    Attributes:
        images: Close-up image of each face of each cube, in random order, `(cubes, 6, size, size)` in [0, 1].
        poses: Camera poses, in a separate world frame per cube.
        digits: Digit on each face, `(cubes, 6)`.
        labels: The digit opposite the 0, less 1, `(cubes,)`.
    """

    images: Tensor
    poses: Poses
    digits: Tensor
    labels: Tensor


class Views(DataModule):
    """Cubes with one of the real digits 0 to 5 on each face, seen by six cameras whose poses are known.

    Each camera shows one face, from a random position with a random tilt. The class is the digit opposite the 0. Digits
    and cameras are drawn independently of the class, so images contain no information about it without the poses. Each
    cube has a random world frame and the views are shuffled, so a single pose contains none either.

    A token is a patch of 6x6 pixels; its position (y, x) is in patches, followed by 12 numbers, R in row-major order
    and t of its camera.

    Source of the digits: that of `digits`, with its split.
    """

    name = "views"
    generated = True
    title = "Views of cubes with digits"
    axes = ("y", "x")
    in_channels = PATCH * PATCH
    lattice = False
    input_size = ()
    classes = tuple(str(digit) for digit in range(1, FACES))
    pose_numbers = POSE_NUMBERS
    num_views = FACES

    config: ViewsConfig

    def __init__(self, config: ViewsConfig) -> None:
        super().__init__(config)
        side = config.size // PATCH
        self.scale, self.extent = (1.0, 1.0), (float(side), float(side))
        self.description = (
            "Cubes with the real digits 0 to 5 (UCI, from scikit-learn) on their faces, each seen by one camera at "
            f"{config.size}×{config.size} grey pixels; the class is the digit opposite the 0, which depends on "
            "the poses of the cameras."
        )

    @property
    def example_shape(self) -> tuple[int, ...]:
        """Shape of the tokens of all views, with positions and poses."""
        tokens = FACES * (self.config.size // PATCH) ** 2
        return (tokens, *super().example_shape[1:])

    def datasets(self) -> tuple[TensorSet, TensorSet]:
        """Draw cubes from the digits of each part; pixels are normalised as in training."""
        config = self.config
        train_images, train_labels, val_images, val_labels = split_digits(config.split_seed)
        counts = [
            SIZES[part] if size is None else size for part, size in enumerate((config.train_size, config.val_size))
        ]
        cubes = [
            draw_cubes(count, images[:, 0], labels, config.size, 2 * config.split_seed + part)
            for part, (count, images, labels) in enumerate(
                zip(counts, (train_images, val_images), (train_labels, val_labels), strict=True)
            )
        ]
        mean, std = cubes[0].images.mean(), cubes[0].images.std(correction=0)
        train, val = (TensorSet(tokens_of(each, mean, std), each.labels) for each in cubes)
        return train, val


def draw_cubes(count: int, images: Tensor, labels: Tensor, size: int, seed: int) -> Cubes:
    """Draw cubes, with classes as balanced as possible, and the images of six cameras of each.

    Args:
        count: Number of cubes.
        images: Digits `(digits, 8, 8)` in [0, 1].
        labels: Digit of each image, `(digits,)`.
        size: Pixels per side of a view.
        seed: Seed of all random numbers.

    Raises:
        ValueError: count is below the number of classes.
    """
    if count < CLASSES:
        raise ValueError(f"cubes must be {CLASSES} or more, one for each class, got {count}")
    generator = torch.Generator().manual_seed(seed)
    faces, digits = _draw_faces(count, images, labels, generator)
    rotation, centre = _draw_cameras(count, generator)  # in the frame of the visible face
    pictures = look_at_faces(faces.flatten(0, 1), rotation.flatten(0, 1), centre.flatten(0, 1), size)

    # everything above is independent of the class
    classes = (torch.arange(count) % CLASSES)[torch.randperm(count, generator=generator)]
    frames = _frames()[_places(digits, classes, generator)]  # (count, 6, 3, 3): columns right, up, normal
    onto = rotation @ frames.mT
    there = Poses(onto, -(onto @ (frames @ centre.unsqueeze(-1))).squeeze(-1))
    turn = from_quaternions(torch.randn(count, 4, generator=generator, dtype=torch.float64))
    move = WORLD * (2 * torch.rand(count, 3, generator=generator, dtype=torch.float64) - 1)
    return Cubes(pictures.view(count, FACES, size, size), there.moved(turn, move), digits, classes)


def tokens_of(cubes: Cubes, mean: Tensor, std: Tensor) -> Tensor:
    """Concatenate patches, positions and camera poses of all views, `(cubes, 6 · patches, 36 + 2 + 12)`."""
    count, views, size, _ = cubes.images.shape
    side = size // PATCH
    cells = ((cubes.images - mean) / std).view(count, views, side, PATCH, side, PATCH)
    patches = cells.transpose(3, 4).reshape(count, views, side * side, PATCH * PATCH)
    places = grid(side, side).expand(count, views, -1, -1)
    numbers = torch.cat([cubes.poses.rotation.flatten(-2), cubes.poses.translation], dim=-1).float()
    cameras = numbers.unsqueeze(2).expand(-1, -1, side * side, -1)
    return torch.cat([patches, places, cameras], dim=-1).flatten(1, 2)


def poses_of(numbers: Tensor) -> Poses:
    """Convert numbers `(batch, n, 12)` to poses `(batch, n)`."""
    return Poses(numbers[..., :9].unflatten(-1, (3, 3)), numbers[..., 9:])


def look_at_faces(faces: Tensor, rotation: Tensor, centre: Tensor, size: int) -> Tensor:
    """Render the images of a face at height 1, in [-1, 1] to the right and up, by rays through the centres of pixels.

    Args:
        faces: `(n, height, width)`; what is beside them is 0.
        rotation: Rotation from the face's axes (right, up, normal) to the camera's (right, down, forward), `(n, 3, 3)`.
        centre: Positions of the cameras, above the face, `(n, 3)`.
        size: Pixels of a picture per side.

    Returns:
        `(n, size, size)`, rows from the top, interpolated linearly between the faces' pixels.
    """
    pixels = (torch.arange(size, dtype=centre.dtype) + 0.5) / size - 0.5
    down, right = torch.meshgrid(pixels / FOCAL, pixels / FOCAL, indexing="ij")
    rays = torch.stack([right, down, torch.ones_like(right)], dim=-1).flatten(0, 1) @ rotation  # (n, pixels, 3)
    reach = (1 - centre[:, None, 2:]) / rays[..., 2:]
    hit = (centre[:, None] + reach * rays)[..., :2] * centre.new_tensor([1.0, -1.0])  # rows of a face from the top
    looked_up = hit.float().unflatten(1, (size, size))
    return functional.grid_sample(faces.unsqueeze(1), looked_up, align_corners=False).squeeze(1)


def _draw_faces(count: int, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the faces of each cube, an image of each digit in random order, and their digits."""
    digits = torch.rand(count, FACES, generator=generator).argsort(dim=1)
    chosen = torch.empty_like(digits)
    for digit in range(FACES):
        own = (labels == digit).nonzero().squeeze(1)
        where = digits == digit
        chosen[where] = own[torch.randint(len(own), (count,), generator=generator)]
    return images[chosen], digits


def _draw_cameras(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw cameras above a face, looking at a point near its middle: rotations `(count, 6, 3, 3)` and centres."""

    def drawn(largest: float, numbers: int) -> Tensor:
        uniform = torch.rand(count, FACES, numbers, generator=generator, dtype=torch.float64)
        return largest * (2 * uniform - 1)

    beside, target, tilt = drawn(0.25, 2), drawn(0.1, 2), drawn(math.radians(20), 1)
    centre = torch.cat([beside, 2.1 + drawn(0.2, 1)], dim=-1)
    forward = functional.normalize(torch.cat([target, torch.ones_like(tilt)], dim=-1) - centre, dim=-1)
    up = torch.cat([tilt.sin(), tilt.cos(), torch.zeros_like(tilt)], dim=-1)
    right = functional.normalize(torch.linalg.cross(forward, up), dim=-1)
    return torch.stack([right, torch.linalg.cross(forward, right), forward], dim=-2), centre


def _places(digits: Tensor, classes: Tensor, generator: torch.Generator) -> Tensor:
    """Assign each face one of `_frames`, so that the digit of the class is opposite the 0.

    Sides 2 i and 2 i + 1 are opposite; each has four frames, turned by quarters.
    """
    count = len(digits)
    others = torch.rand(count, FACES, generator=generator)
    others.scatter_(1, digits.argsort(dim=1)[:, :1], -2.0)  # where the 0 is, then the digit of the class
    others.scatter_(1, digits.argsort(dim=1).gather(1, classes[:, None] + 1), -1.0)
    order = others.argsort(dim=1).argsort(dim=1)  # (count, 6): 0 and 1 are opposite, 2 and 3, 4 and 5
    turned = torch.randint(4, (count, FACES), generator=generator)
    return 4 * order + turned  # the world is rotated at random, so the choice of axis and end is arbitrary


def _frames() -> Tensor:
    """Return the columns right, up and normal of the six sides of a cube in four rotations each, `(24, 3, 3)`."""
    quarter = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    cycle = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    flip = torch.diag(torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64))
    sides = [torch.matrix_power(cycle, axis) @ end for axis in range(3) for end in (torch.eye(3).double(), flip)]
    return torch.stack([side @ torch.matrix_power(quarter, turn) for side in sides for turn in range(4)])
