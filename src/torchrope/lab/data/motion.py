"""Clips whose class is a motion, which neither a single frame nor an unordered set of patches determines."""

import torch
from torch import Tensor

from torchrope.lab.data.config import MotionConfig
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.digits import DIGIT_SIZE, split_digits
from torchrope.lab.data.tensors import TensorSet, normalised_sets

FRAMES = 5
FRAME_SIZE = 20
PATCH_SIZE = (1, 4, 4)
TRAIN_SIZE = 2400
VAL_SIZE = 600

# Pixels per frame, (down, right): multiples of the patch side, all different modulo 20.
VELOCITIES = {
    "right slow": (0, 4),
    "right fast": (0, 8),
    "left slow": (0, -4),
    "left fast": (0, -8),
    "down slow": (4, 0),
    "down fast": (8, 0),
    "up slow": (-4, 0),
    "up fast": (-8, 0),
}


class Motion(DataModule):
    """Real digits that move over a torus; the class is the direction and the speed.

    A digit starts at any pixel and moves 4 or 8 pixels a frame, leaving at one edge and entering at the
    opposite one. A frame is the frame before, rolled by whole patches of (1, 4, 4), so every frame of a clip
    holds the same multiset of patches. Digit and start are drawn without regard to the class, so a bag of
    patches knows nothing of it: to do better than 1 in 8 a model must use positions. No digit is in both
    sets.

    Raises:
        ValueError: size is no multiple of 4, or below 20, where two of the motions would be one.
    """

    name = "motion"
    title = "Moving digits"
    axes = ("time", "height", "width")
    in_channels = 1
    classes = tuple(VELOCITIES)

    config: MotionConfig

    def __init__(self, config: MotionConfig) -> None:
        super().__init__(config)
        side = config.size
        if side % PATCH_SIZE[-1] or side < FRAME_SIZE:
            raise ValueError(f"--data.size must be a multiple of {PATCH_SIZE[-1]} from {FRAME_SIZE} up, got {side}")
        self.input_size = (FRAMES, side, side)
        self.train_size = clip_count(config.train_size, TRAIN_SIZE, "train_size")
        self.val_size = clip_count(config.val_size, VAL_SIZE, "val_size")
        self.description = (
            f"{self.train_size + self.val_size:,} made clips of {FRAMES} frames, {side}×{side} grey pixels, "
            "of a real handwritten digit that moves over a torus; the class is its direction and speed."
        )

    def datasets(self) -> tuple[TensorSet, TensorSet]:
        """Split the digits, make the clips of each part, normalise."""
        train_digits, _, val_digits, _ = split_digits(self.config.split_seed)
        side = self.input_size[-1]
        # Two generators, so that the validation clips stay the same whatever train_size is.
        train_generator = torch.Generator().manual_seed(2 * self.config.split_seed)
        val_generator = torch.Generator().manual_seed(2 * self.config.split_seed + 1)
        return normalised_sets(
            *make_clips(train_digits, self.train_size, side, train_generator),
            *make_clips(val_digits, self.val_size, side, val_generator),
        )


def clip_count(size: int | None, default: int, name: str) -> int:
    """Number of clips to make: at least one of each class."""
    count = default if size is None else size
    if count < len(VELOCITIES):
        raise ValueError(f"--data.{name} must be at least {len(VELOCITIES)} (one per class), got {count}")
    return count


def make_clips(digits: Tensor, count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` clips, as equal in number among the classes as they can be.

    Args:
        digits: Digits to draw from, `(digits, 1, 8, 8)`.
        count: Number of clips.
        side: Pixels per side of a frame.
        generator: Decides digit, start and class of every clip.

    Returns:
        Clips `(count, 1, 5, side, side)` and labels `(count,)`.
    """
    drawn = torch.randint(len(digits), (count,), generator=generator)
    starts = torch.randint(side, (count, 2), generator=generator)
    labels = torch.randperm(count, generator=generator) % len(VELOCITIES)
    return render_clips(digits[drawn], starts, labels, side), labels


def render_clips(digits: Tensor, starts: Tensor, labels: Tensor, side: int) -> Tensor:
    """Draw digit n of clip n at (start + t · velocity) mod side in frame t, on black.

    Args:
        digits: `(clips, 1, 8, 8)`.
        starts: (row, column) of the digit's top left pixel in the first frame, `(clips, 2)`.
        labels: Class of each clip, `(clips,)`.
        side: Pixels per side of a frame.

    Returns:
        Clips `(clips, 1, 5, side, side)`.
    """
    velocities = torch.tensor(list(VELOCITIES.values()))[labels]  # [n, 2]
    corners = starts[:, None] + torch.arange(FRAMES)[:, None] * velocities[:, None]  # [n, t, 2]
    pixels = (corners[..., None] + torch.arange(DIGIT_SIZE)) % side  # [n, t, 2, 8]
    rows, columns = pixels[:, :, 0, :, None], pixels[:, :, 1, None, :]
    clips = torch.zeros(len(digits), FRAMES, side, side)
    clip = torch.arange(len(digits))[:, None, None, None]
    frame = torch.arange(FRAMES)[:, None, None]
    clips[clip, frame, rows, columns] = digits
    return clips[:, None]
