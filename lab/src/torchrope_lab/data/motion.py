"""Synthetic video clips of moving digits: the class cannot be inferred from single frames or unordered patches."""

import torch
from torch import Tensor

from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.digits import DIGIT_SIZE, split_digits
from torchrope_lab.data.in_memory import InMemory
from torchrope_lab.mistakes import Mistake

FRAMES = 5

# (down, right) in pixels per frame: multiples of the patch side, all different modulo 20.
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


class Motion(InMemory):
    """Handwritten digits that move on a torus; the class is the direction and the speed."""

    # A digit starts at a random pixel and moves 4 or 8 pixels per frame, with periodic boundaries. Each frame is the
    # previous one rolled by whole patches of (1, 4, 4), so all frames of a clip have the same multiset of patches.
    # Digit and start are independent of the class, so a bag of patches contains no information about it: an accuracy
    # above 1/8 requires positions. Training and validation use different digits.

    name = "motion"
    generated = True
    title = "Moving digits"
    axes = ("time", "height", "width")
    classes = tuple(VELOCITIES)

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        side = config.size
        self.input_size = (FRAMES, side, side)
        self.sizes = {"train": config.train_size or 2400, "val": config.val_size or 600}
        if (count := min(self.sizes.values())) < len(VELOCITIES):
            rule = f"--data.train_size and --data.val_size must be at least {len(VELOCITIES)} (one per class)"
            raise Mistake(f"{rule}, got {count}")
        self.description = (
            f"{sum(self.sizes.values()):,} synthetic clips of {FRAMES} frames, {side}×{side} grey pixels, "
            "of a handwritten digit that moves on a torus; the class is its direction and speed."
        )

    def examples(self, size: int, *parts: str) -> list[tuple[Tensor, Tensor]]:
        """Split the digits, and render the clips of each part."""
        train_digits, _, val_digits, _ = split_digits(self.config.split_seed)
        clips = []
        for part in parts:
            # a generator for each part, so that the validation clips do not depend on train_size
            generator = torch.Generator().manual_seed(2 * self.config.split_seed + (part == "val"))
            digits = train_digits if part == "train" else val_digits
            clips.append(make_clips(digits, self.sizes[part], size, generator))
        return clips


def make_clips(digits: Tensor, count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Render random clips `(count, 1, 5, side, side)` and labels, with numbers per class as equal as possible."""
    drawn = torch.randint(len(digits), (count,), generator=generator)
    starts = torch.randint(side, (count, 2), generator=generator)
    labels = torch.randperm(count, generator=generator) % len(VELOCITIES)
    return render_clips(digits[drawn], starts, labels, side), labels


def render_clips(digits: Tensor, starts: Tensor, labels: Tensor, side: int) -> Tensor:
    """Place digit n `(1, 8, 8)` at (start + t · velocity) mod side in frame t of clip n, on black."""
    # `starts` are (row, column) of the digit's top left pixel in the first frame, `(clips, 2)`.
    velocities = torch.tensor(list(VELOCITIES.values()))[labels]  # [n, 2]
    corners = starts[:, None] + torch.arange(FRAMES)[:, None] * velocities[:, None]  # [n, t, 2]
    pixels = (corners[..., None] + torch.arange(DIGIT_SIZE)) % side  # [n, t, 2, 8]
    rows, columns = pixels[:, :, 0, :, None], pixels[:, :, 1, None, :]
    clips = torch.zeros(len(digits), FRAMES, side, side)
    clip = torch.arange(len(digits))[:, None, None, None]
    frame = torch.arange(FRAMES)[:, None, None]
    clips[clip, frame, rows, columns] = digits
    return clips[:, None]
