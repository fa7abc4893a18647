"""Handwritten digits of scikit-learn, a small data set for training within seconds to minutes."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from torchrope_lab.data.in_memory import InMemory

DIGIT_SIZE = 8
VAL_FRACTION = 0.2


class Digits(InMemory):
    """1,797 digits of 8x8 grey pixels; a fifth of each class is held out with `split_seed`."""

    # Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
    # 1998; read with `sklearn.datasets.load_digits`.

    name = "digits"
    title = "Handwritten digits"
    description = "1,797 handwritten digits of 8×8 grey pixels (UCI, from scikit-learn); the class is the digit."
    classes = tuple("0123456789")

    def examples(self, size: int, *parts: str) -> list[tuple[Tensor, Tensor]]:
        """Split the digits, and select and resample those of each part."""
        train_images, train_labels, val_images, val_labels = split_digits(self.config.split_seed)
        digits = {"train": (train_images, train_labels), "val": (val_images, val_labels)}
        return [self.select(*digits[part], part, size) for part in parts]


def split_digits(split_seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images `(1437, 1, 8, 8)` in [0, 1] and labels, validation images `(360, 1, 8, 8)` and labels."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16  # [1797, 1, 8, 8]
    labels = torch.from_numpy(digits.target).long()
    train, val = train_test_split(
        range(len(labels)), test_size=VAL_FRACTION, stratify=digits.target, random_state=split_seed
    )
    return images[train], labels[train], images[val], labels[val]
