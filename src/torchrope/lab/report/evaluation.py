"""The measures of one trained model as a table for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchrope.lab.report.tables import MISSING, aligned_table, percent, size

_TITLES = {"miou": "mIoU", "ap": "AP", "ap50": "AP50"}


def evaluation_table(measures: Mapping[str, Any], trained_at: Sequence[int]) -> str:
    """Lay out what `torchrope evaluate` measured, without a final newline.

    Args:
        measures: Of a classifier: top1, interval, val_loss, shuffled_top1, resolutions. Of others: miou, or ap and
            ap50, the interval of the first, and images, their number.
        trained_at: The input size of training.
    """
    return _of_classifier(measures, list(trained_at)) if "top1" in measures else _of_images(measures)


def _of_classifier(measures: Mapping[str, Any], trained_at: list[int]) -> str:
    rows = [
        [f"{size(trained_at)} (trained)", _with_interval(measures["top1"], measures), _told(measures["val_loss"])],
        [f"{size(trained_at)}, patches shuffled", percent(measures["shuffled_top1"]), MISSING],
    ]
    others = [at for at in measures["resolutions"] if at["size"] != trained_at]
    rows += [[size(at["size"]), percent(at["top1"]), MISSING] for at in others]
    return aligned_table(["input size", "top-1 % [95 %]", "loss"], rows, [False, False, True])


def _of_images(measures: Mapping[str, Any]) -> str:
    named = [name for name in _TITLES if name in measures]
    rows = [
        [_TITLES[name], _with_interval(measures[name], measures) if name == named[0] else percent(measures[name])]
        for name in named
    ]
    asked = {"crop": "windows of {} pixels", "scales": "sizes × {}", "flip": "mirrored too"}
    how = [words.format(_listed(measures[name])) for name, words in asked.items() if name in measures]
    table = aligned_table(["measure", "% [95 %]"], rows, [False, False])
    return f"{table}\n\n" + ", ".join([f"{measures['images']} images", *how])


def _with_interval(share: float, measures: Mapping[str, Any]) -> str:
    low, high = measures["interval"]
    return f"{percent(share)} [{percent(low)}, {percent(high)}]"


def _told(number: float | None) -> str:
    return MISSING if number is None else f"{number:.3f}"


def _listed(value: Any) -> str:
    return ", ".join(f"{one:g}" for one in value) if isinstance(value, list | tuple) else str(value)
