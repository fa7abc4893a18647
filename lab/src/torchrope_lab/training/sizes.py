"""Input sizes other than that of the data, given as pixels along the last axis."""

from collections.abc import Sequence

from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.mistakes import Mistake
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig

Size = tuple[int, ...]

KEPT_AXES = ("time", "depth")
"""Axes along which every input size has the data's length: frames and slices keep their number."""


def size_name(size: Sequence[int]) -> str:
    """Return a size as in names of files and levels: "8x8"."""
    return "x".join(map(str, size))


def size_title(size: Sequence[int] | str) -> str:
    """Return a size, or one of `size_name`, as in tables: "8 × 8"."""
    return " × ".join(size.split("x") if isinstance(size, str) else map(str, size))


def training_sizes(optim: OptimConfig, model: ModelConfig, data: DataModule) -> tuple[Size, ...]:
    """Return the input sizes that training draws from; an empty tuple if all steps have the data's size."""
    if not optim.train_sizes:
        return ()
    if not data.lattice:
        rule = "--optim.train_sizes is for data on a lattice"
        raise Mistake(f"{rule}, got {', '.join(map(str, optim.train_sizes))} with --data {data.name}")
    patch_size = model.patch_size * data.num_axes if len(model.patch_size) == 1 else model.patch_size
    return tuple(size_of(pixels, data, patch_size, "--optim.train_sizes") for pixels in optim.train_sizes)


def size_of(pixels: int, data: DataModule, patch_size: Sequence[int], option: str) -> Size:
    """Return the input size with the given pixels along the last axis, and along axes of the same length."""
    # `KEPT_AXES` keep their length; axes of another length change in proportion, rounded to whole patches.
    if data.axes[-1] in KEPT_AXES:
        rule = f"{option} is for data whose last axis is not {data.axes[-1]}"
        raise Mistake(f"{rule}, got axes {', '.join(data.axes)}")
    last, size = data.input_size[-1], []
    for axis, length, patch in zip(data.axes, data.input_size, patch_size, strict=True):
        if axis in KEPT_AXES:
            size.append(length)
        elif length != last:
            size.append(patch * max(1, round(pixels * length / last / patch)))
        elif pixels % patch:
            raise Mistake(f"{option} must be multiples of the patch size, {patch} pixels, got {pixels}")
        else:
            size.append(pixels)
    return tuple(size)
