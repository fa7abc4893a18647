"""Format the measures of one trained model as a table for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchrope_lab.report.tables import format_table, size
from torchrope_lab.results import Column, Row, Table

_INTERVAL = "% [95 %]"
_TITLES = {"miou": "mIoU", "ap": "AP", "ap50": "AP50"}
MAX_CLASSES = 20
"""Largest number of classes whose sensitivities are printed."""
_OPTIONS = {
    "crop_ratio": "crop ratio: {}",
    "window_size": "window size at other sizes: {}",
    "positions": "positions: same {} as in training",
    "normalise": "normalised: {}",
    "images": "{} images",
    "crop": "windows of {} pixels",
    "scales": "sizes × {}",
    "flip": "horizontal-flip augmentation",
}
"""Formats of what an evaluation was made with."""


def evaluation_table(measures: Mapping[str, Any], trained_at: Sequence[int]) -> str:
    """Format the measures of `torchrope evaluate` as a table, without a final newline."""
    # For a classifier top1, interval, val_loss, shuffled_top1, resolutions, auroc and sensitivity (by class), and the
    # options given (crop_ratio, window_size, positions, normalise). For others miou, or ap and ap50, the interval of
    # the first, and images, their number. `trained_at` is () for tokens at any positions.
    table = _of_classifier(measures, list(trained_at)) if "top1" in measures else _of_images(measures)
    options = [text.format(_listed(measures[name])) for name, text in _OPTIONS.items() if name in measures]
    return "\n\n".join(filter(None, [format_table(table).aligned(), _of_classes(measures), ", ".join(options)]))


def _of_classes(measures: Mapping[str, Any]) -> str:
    """Format AUROC, and the sensitivity of each class if they are few."""
    sensitivity, auroc = measures.get("sensitivity", {}), measures.get("auroc")
    columns = [Column("name", "class"), Column("share", "sensitivity %", digits=1)]
    table = Table("", columns, [{"name": name, "share": 100 * share} for name, share in sensitivity.items()])
    text = "" if auroc is None else f"AUROC, one class against the others, mean over classes: {auroc:.3f}"
    listed = format_table(table).aligned() if 0 < len(sensitivity) <= MAX_CLASSES else ""
    return "\n\n".join(filter(None, [text, listed]))


def _of_classifier(measures: Mapping[str, Any], trained_at: list[int]) -> Table:
    columns = [
        Column("size", "input size"),
        Column("inputs", "inputs"),
        Column("share", f"top-1 {_INTERVAL}", digits=1, low="low", high="high"),
        Column("loss", "loss", digits=3),
    ]
    trained = {"size": f"{size(trained_at)} (trained)" if trained_at else "as trained", "inputs": None}
    shuffled = {"size": f"{size(trained_at)}, patches shuffled" if trained_at else "positions shuffled", "inputs": None}
    rows: list[Row] = [
        {**trained, **_percent(measures["top1"], measures["interval"]), "loss": measures["val_loss"]},
        {**shuffled, **_percent(measures["shuffled_top1"]), "loss": None},
    ]
    for at in measures["resolutions"]:
        if at["size"] != trained_at:
            inputs = f"{at['inputs']}, {at['enlarged']} enlarged" if at["enlarged"] else at["inputs"]
            share = _percent(at["top1"], at["interval"])
            rows.append({"size": size(at["size"]), "inputs": inputs, **share, "loss": None})
    return Table("", columns, rows)


def _of_images(measures: Mapping[str, Any]) -> Table:
    columns = [Column("measure", "measure"), Column("share", _INTERVAL, digits=1, low="low", high="high")]
    first, *others = [name for name in _TITLES if name in measures]
    rows: list[Row] = [{"measure": _TITLES[first], **_percent(measures[first], measures["interval"])}]
    rows += [{"measure": _TITLES[name], **_percent(measures[name])} for name in others]
    return Table("", columns, rows)


def _percent(share: float, interval: Sequence[float] = ()) -> Row:
    low, high = (100 * end for end in interval) if interval else (None, None)
    return {"share": 100 * share, "low": low, "high": high}


def _listed(value: Any) -> str:
    return ", ".join(f"{number:g}" for number in value) if isinstance(value, list | tuple) else str(value)
