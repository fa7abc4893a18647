"""Base class of the built-in sets of images in memory: a subclass reads examples, this class selects and normalises."""

from abc import abstractmethod

from torch import Tensor
from torch.utils.data import Dataset

from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.tensors import TensorSet, balanced_subset, image_sets
from torchrope_lab.data.transforms import resize, resize_bytes


class InMemory(DataModule):
    """Images in memory, floats from 0 to 1 or bytes. A subclass defines `examples`."""

    axes: tuple[str, ...] = ("height", "width")
    in_channels = 1

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.input_size = (config.size, config.size)

    @abstractmethod
    def examples(self, size: int, *parts: str) -> list[tuple[Tensor, Tensor]]:
        """Return inputs at `size`, not normalised, and labels of each of the parts "train" and "val"."""

    def datasets(self) -> tuple[Dataset, TensorSet]:
        """Read both parts and normalise them with the statistics of the training examples."""
        train, val = self.examples(self.config.size, "train", "val")
        return image_sets(*train, *val, getattr(self.config, "normalise", "measured"))

    def at_size(self, size: int) -> "InMemory | None":
        """Return the validation examples read at another size; None if `other_sizes` is "resampled"."""
        if self.other_sizes == "resampled":
            return None
        normalise = self._made_datasets()[1].normalise  # type: ignore[attr-defined]
        (val,) = self.examples(size, "val")
        return self._with_validation(size, TensorSet(*val, normalise))

    def select(self, images: Tensor, labels: Tensor, part: str, size: int) -> tuple[Tensor, Tensor]:
        """Select `train_size` or `val_size` images, and resample them to `size`."""
        name = f"{part}_size"
        chosen = balanced_subset(labels, getattr(self.config, name), self.config.split_seed, name)
        resample = resize if images.is_floating_point() else resize_bytes
        return resample(images[chosen], (size, size)), labels[chosen]
