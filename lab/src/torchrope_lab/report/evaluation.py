"""Format the measures of one trained model as a table for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchrope_lab.report.tables import MISSING, aligned_table, percent, size

_TITLES = {"miou": "mIoU", "ap": "AP", "ap50": "AP50"}
_ASKED = {
    "crop_ratio": "{} of the shorter side",
    "window_size": "window size at other sizes: {}",
    "positions": "positions: same {} as in training",
    "normalise": "normalised: {}",
}
"""Formats of the options of a classifier's evaluation."""


def evaluation_table(measures: Mapping[str, Any], trained_at: Sequence[int]) -> str:
    """Format the measures of `torchrope evaluate` as a table, without a final newline.

    Args:
        measures: For a classifier top1, interval, val_loss, shuffled_top1, resolutions, and the options given
            (crop_ratio, window_size, positions, normalise). For others miou, or ap and ap50, the interval of the first,
            and images, their number.
        trained_at: The training input size; () for tokens at any positions.
    """
    return _of_classifier(measures, list(trained_at)) if "top1" in measures else _of_images(measures)


def _of_classifier(measures: Mapping[str, Any], trained_at: list[int]) -> str:
    rows = [
        [
            f"{size(trained_at)} (trained)" if trained_at else "as trained",
            MISSING,
            _with_interval(measures["top1"], measures),
            _loss(measures["val_loss"]),
        ],
        [
            f"{size(trained_at)}, patches shuffled" if trained_at else "positions shuffled",
            MISSING,
            percent(measures["shuffled_top1"]),
            MISSING,
        ],
    ]
    others = [at for at in measures["resolutions"] if at["size"] != trained_at]
    rows += [[size(at["size"]), _inputs(at), _with_interval(at["top1"], at), MISSING] for at in others]
    table = aligned_table(["input size", "inputs", "top-1 % [95 %]", "loss"], rows, [False, False, False, True])
    how = [words.format(measures[name]) for name, words in _ASKED.items() if name in measures]
    return f"{table}\n\n" + ", ".join(how) if how else table


def _inputs(at: Mapping[str, Any]) -> str:
    """Describe whether inputs were rendered, read or resampled, and how many are of smaller originals."""
    return f"{at['inputs']}, {at['enlarged']} enlarged" if at["enlarged"] else str(at["inputs"])


def _of_images(measures: Mapping[str, Any]) -> str:
    named = [name for name in _TITLES if name in measures]
    rows = [
        [_TITLES[name], _with_interval(measures[name], measures) if name == named[0] else percent(measures[name])]
        for name in named
    ]
    options = {"crop": "windows of {} pixels", "scales": "sizes × {}", "flip": "horizontal-flip augmentation"}
    how = [words.format(_listed(measures[name])) for name, words in options.items() if name in measures]
    table = aligned_table(["measure", "% [95 %]"], rows, [False, False])
    return f"{table}\n\n" + ", ".join([f"{measures['images']} images", *how])


def _with_interval(share: float, measures: Mapping[str, Any]) -> str:
    low, high = measures["interval"]
    return f"{percent(share)} [{percent(low)}, {percent(high)}]"


def _loss(number: float | None) -> str:
    return MISSING if number is None else f"{number:.3f}"


def _listed(value: Any) -> str:
    return ", ".join(f"{one:g}" for one in value) if isinstance(value, list | tuple) else str(value)
