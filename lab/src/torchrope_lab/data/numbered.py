"""Detection and segmentation data in memory, with the objects stored as their numbers per pixel."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision import tv_tensors

from torchrope_lab.data.dense import DenseSet, Target, Transform, to_boxes
from torchrope_lab.data.tensors import InMemorySet, Normalise


class NumberedSet(DenseSet, InMemorySet):
    """Images in memory, as bytes, with boxes and a map of their objects.

    Args:
        inputs: Images, uint8 `(images, 1, side, side)`.
        numbers: uint8 `(images, side, side)`: 0 is background, k the k-th object of the image.
        objects: Class and box of every object, int64 `(objects, 5)` for each image.
        names: Names of the images.
        normalise: Converts bytes to float32.
        transform: Transform of image and target.
    """

    def __init__(
        self,
        inputs: Tensor,
        numbers: Tensor,
        objects: Sequence[Tensor],
        names: Sequence[str],
        normalise: Normalise,
        transform: Transform | None = None,
    ) -> None:
        super().__init__(normalise, transform)
        self.inputs = inputs
        self.numbers = numbers
        self.objects = objects
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> tuple[Tensor, Target]:
        """Return an image as bytes and its target."""
        numbers, objects = self.numbers[index], self.objects[index]
        labels, side = objects[:, 0], self.inputs.shape[-1]
        class_of = torch.zeros(256, dtype=torch.uint8, device=labels.device)
        class_of[1 : len(labels) + 1] = (labels + 1).to(torch.uint8)
        return tv_tensors.Image(self.inputs[index]), {
            "boxes": to_boxes(objects[:, 1:], side, side),
            "labels": labels,
            "crowd": torch.zeros_like(labels, dtype=torch.bool),
            "map": tv_tensors.Mask(class_of[numbers.long()]),
            "name": self.names[index],
        }

    @property
    def samples(self) -> list[tuple[str, list]]:
        """Name of every image, with class and box of its objects."""
        return [(name, objects.tolist()) for name, objects in zip(self.names, self.objects, strict=True)]

    @property
    def nbytes(self) -> int:
        """Memory size in bytes."""
        return self.inputs.nbytes + self.numbers.nbytes + sum(objects.nbytes for objects in self.objects)

    def to(self, device: torch.device) -> "NumberedSet":
        """Copy all examples to a device."""
        objects = [rows.to(device) for rows in self.objects]
        inputs, numbers = self.inputs.to(device), self.numbers.to(device)
        return NumberedSet(inputs, numbers, objects, self.names, self.normalise, self.transform)
