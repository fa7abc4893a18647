"""Sizes of inputs other than that of the data, given as pixels along the last axis."""

from collections.abc import Sequence

from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.training.config import ModelConfig, OptimConfig

Size = tuple[int, ...]


def training_sizes(optim: OptimConfig, model: ModelConfig, data: DataModule) -> tuple[Size, ...]:
    """The input sizes that training draws from; none where it keeps to that of the data.

    Raises:
        ValueError: the patch does not divide them, or the data have no axis but time.
    """
    if not optim.sizes:
        return ()
    if not data.lattice:
        rule = "--optim.sizes is for data on a lattice"
        raise ValueError(f"{rule}, got {', '.join(map(str, optim.sizes))} with --data {data.name}")
    patch_size = model.patch_size * data.num_axes if len(model.patch_size) == 1 else model.patch_size
    return tuple(size_of(pixels, data, patch_size, "--optim.sizes") for pixels in optim.sizes)


def size_of(pixels: int, data: DataModule, patch_size: Sequence[int], option: str) -> Size:
    """The input size with so many pixels along the last axis, and along those that are as long.

    Time keeps its length; axes of another length change in proportion, to whole patches.

    Args:
        pixels: Along the last axis.
        data: Tells the axes and their lengths.
        patch_size: Extent of a patch along each axis.
        option: What the caller calls the number, for the error.

    Raises:
        ValueError: the patch does not divide it, or the last axis is time.
    """
    if data.axes[-1] == "time":
        raise ValueError(f"{option} must be of data with another axis than time last, got {', '.join(data.axes)}")
    last, size = data.input_size[-1], []
    for axis, length, patch in zip(data.axes, data.input_size, patch_size, strict=True):
        if axis == "time":
            size.append(length)
        elif length != last:
            size.append(patch * max(1, round(pixels * length / last / patch)))
        elif pixels % patch:
            raise ValueError(f"{option} must be multiples of --model.patch_size {patch}, got {pixels}")
        else:
            size.append(pixels)
    return tuple(size)
