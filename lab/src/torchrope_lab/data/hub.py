"""Images by name: `--data hf:NAME` of the Hugging Face Hub or of a folder, `--data webdataset:FOLDER` of tar shards."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from torch import Tensor

from torchrope_lab.data.crops import CropTransform
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.imagenet import ImageNet
from torchrope_lab.data.images import CroppedImages, ImageSet, Sample, select_examples, split_parts
from torchrope_lab.data.tokens import classes_of
from torchrope_lab.files import LONGEST, as_file_name
from torchrope_lab.mistakes import Mistake

VALIDATION = ("validation", "val", "valid", "test")
"""Splits to validate on, the first that exists and is not trained on."""


Rows = TypeVar("Rows", bound="HubSet")


class HubSet(ImageSet):
    """Images in rows of the package datasets, whose column of images is not decoded."""

    def __init__(
        self, rows: Any, image: str, samples: Sequence[Sample], view: CropTransform, max_skipped: int, *, fast: bool
    ) -> None:
        super().__init__(Path(), samples, view, max_skipped, fast=fast)
        self.rows = rows
        self.image = image

    def with_examples(self: Rows, sets: Sequence[Any], indices: Tensor) -> Rows:
        """Return images of several sets, numbered consecutively, with the crop of this one."""
        from datasets import concatenate_datasets

        chosen = super().with_examples(sets, indices)
        chosen.rows = concatenate_datasets([part.rows for part in sets]).select(indices.tolist())
        return chosen

    def open(self, index: int) -> Path | BinaryIO:
        """Return the path or the bytes of an image."""
        stored = self.rows[index][self.image]
        return Path(stored["path"]) if stored["bytes"] is None else BytesIO(stored["bytes"])


class HubImages(CroppedImages):
    """Images of a data set of the Hugging Face Hub, or of a folder that the package datasets reads, as `imagenet`."""

    # A folder is one of `save_to_disk`, or of images or tables as on the Hub. Code of data sets is not run. Without a
    # validation split, a fifth of each class is held out, by a hash of the row and `split_seed`.

    crop_scale = ImageNet.crop_scale

    def __init__(self, config: DataConfig) -> None:
        import_module("datasets")  # raises before training if it is missing
        super().__init__(config)
        self.name = self.title = config.name
        self.description = f"Images of {config.name}."

    @property
    def slug(self) -> str:
        """Name used in result file names."""
        return as_file_name(self.name, LONGEST)

    def datasets(self) -> tuple[ImageSet, ImageSet]:
        """Read the labels, split, and select `train_size` and `val_size` images."""
        from datasets import ClassLabel, Image

        config = self.config
        splits = load_splits(config)
        others = (name for name in VALIDATION if name in splits and name != config.train_split)
        held_out = config.val_split or next(others, None)
        if held_out == config.train_split:
            raise Mistake(f"--data.val_split must differ from train_split, got {held_out!r} for both")
        names = {"train": config.train_split} | ({"val": held_out} if held_out else {})
        if unknown := [name for name in names.values() if name not in splits]:
            raise Mistake(f"splits of {self.name} are {', '.join(splits)}, got {unknown[0]!r}")
        features = splits[config.train_split].features
        image = find_column(features, config.image, Image, "image", self.name)
        label = find_column(features, config.label, ClassLabel, "label", self.name)
        values = {part: list(splits[name][label]) for part, name in names.items()}
        for part, name in names.items():
            if strange := [value for value in values[part] if not isinstance(value, int | float | str)]:
                rule = f"column {label} of {name} of {self.name} must have one class in each row"
                raise Mistake(f"{rule}, got {strange[0]!r}")
        if isinstance(features[label], ClassLabel):
            self.classes = tuple(features[label].names)
            index = {number: number for number in range(len(self.classes))}
        else:
            self.classes = classes_of(map(str, values["train"]), f"column {label} of {self.name}")
            index = {value: self.classes.index(str(value)) for value in {*values["train"]}}
        for part, name in names.items():
            if unknown := [value for value in values[part] if value not in index]:
                rule = f"column {label} of {name} of {self.name} must have the {len(index)} classes of {names['train']}"
                raise Mistake(f"{rule}, got {unknown[0]!r}")
        samples = {
            part: [(f"{names[part]}/{row}", index[value]) for row, value in enumerate(values[part])] for part in names
        }
        if "val" in samples:
            train, val = samples["train"], samples["val"]
        else:
            train, val = split_parts({"": samples["train"]}, self.classes, config.split_seed, "images")
        self.contents = [splits[name]._fingerprint for name in names.values()]  # kept by datasets, without decoding
        rows = {name: splits[name].cast_column(image, Image(decode=False)) for name in names.values()}

        def select(part: list[Sample], setting: str) -> HubSet:
            chosen = select_examples(part, getattr(config, setting), config.split_seed, setting)
            split = rows[chosen[0][0].rpartition("/")[0]].select([int(name.rpartition("/")[2]) for name, _ in chosen])
            view, fast = self._view(train=setting == "train_size")
            return HubSet(split, image, chosen, view, config.max_skipped, fast=fast)

        return self._normalised(select(train, "train_size"), select(val, "val_size"))


class WebDataset(ImageNet):
    """Images in tar shards of webdataset's format, in a folder as for `imagenet`."""

    # Shards are read at random by offset, from files: the order of a stream could not be resumed exactly.

    def __init__(self, config: DataConfig) -> None:
        if "://" in config.name:
            rule = f"--data {config.name} must be a folder of shards, *train*.tar and *val*.tar"
            raise Mistake(f"{rule}; download them first, since training reads them in random order")
        super().__init__(config)
        self.name = config.name
        self.title = f"Images in {self.root.name}"
        self.description = f"Images in shards of the folder {self.root.name}."

    slug = HubImages.slug


def load_splits(config: DataConfig) -> Mapping[str, Any]:
    """Load a data set of the Hub, or a folder, with the package datasets; its rows by name of the split."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = config.name.partition(":")[2]
    saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        loaded = load_from_disk(path) if saved else load_dataset(path, config.subset)
    except Exception as error:  # the package raises many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Mistake(f"--data {config.name} cannot be loaded: {lines[0]}") from error
    return loaded if isinstance(loaded, DatasetDict) else {config.train_split: loaded}


def find_column(features: Mapping[str, Any], name: str | None, kind: type, setting: str, data: str) -> str:
    """Return the column that a setting names, or the only one of a type."""
    fitting = [column for column, feature in features.items() if isinstance(feature, kind)]
    if name in features or (name is None and len(fitting) == 1):
        return name or fitting[0]
    rule = f"--data.{setting} must be one of the columns {', '.join(features)} of {data}"
    raise Mistake(f"{rule}, got {name!r}" + (f" with {len(fitting)} of type {kind.__name__}" if name is None else ""))
