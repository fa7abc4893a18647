"""Read what studies found, `<study>[-<data>].json`, and refuse in one line what the report cannot show."""

import re
from pathlib import Path
from typing import Any

from torchrope.files import parse_json
from torchrope.lab.report.pictures import runs
from torchrope.lab.report.shape import check, check_kind, short

Study = dict[str, Any]

VERSION = 1
COMPARISON = "results.json"

# The order of the report; a study of somebody's own comes after these.
ORDER = (
    "accuracy",
    "data-efficiency",
    "training-efficiency",
    "capacity",
    "sharing",
    "model-size",
    "shuffle",
    "resolution",
    "pooling",
    "complexity",
    "finetune",
    "generators",
    "attention",
    "fourier",
    "kernel",
    "dense",
)

_AXIS = {"key": str, "title": str, "unit?": str, "scale": str}
_TABLE = {
    "title": str,
    "columns": [{"key": str, "title": str, "unit?": str, "digits?": int, "low?": str, "high?": str}],
    "rows": [dict],
    "source?": str,
    "note?": str,
}
_BOX = {**dict.fromkeys(("left", "top", "right", "bottom"), float), "kind": int, "score?": float}
_PANEL = {"name": str, "boxes": [_BOX], "map": str}
_SHAPE: dict[str, Any] = {
    "study": str,
    "title": str,
    "question": str,
    "sources": [str],
    "findings": {
        "answer": str,
        "tables": [_TABLE],
        "figures": [
            {
                "name": str,
                "kind": str,
                "title": str,
                "alt": str,
                "x": _AXIS,
                "y": _AXIS,
                "rows": [dict],
                "series?": str,
                "panel?": str,
                "low?": str,
                "high?": str,
                "colour?": _AXIS,
                "caption?": str,
            }
        ],
        "pictures?": [
            {
                "name": str,
                "title": str,
                "alt": str,
                "classes": [str],
                "rows": [{"title": str, "image": str, "width": int, "height": int, "panels": [_PANEL]}],
                "caption?": str,
            }
        ],
        "published": [_TABLE],
        "checks": [{"law": str, "holds": bool, "measured": str}],
        "notes": [str],
        "advice": [{"case": str, "encodings": [str], "because": str}],
    },
    "data?": {
        "name": str,
        "title": str,
        "description?": str,
        "axes?": [str],
        "input_size?": [int],
        "num_classes?": int,
        "train?": int,
        "val?": int,
        "chance?": float,
        "skipped?": [object],
    },
    "run": {
        "command?": str,
        "commit?": str,
        "torchrope?": str,
        "versions?": dict,
        "machine?": dict,
        "date?": str,
        "seconds?": float,
        "config?": dict,
    },
}
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_PNG = re.compile("iVBORw0KGgo[A-Za-z0-9+/]+={0,2}")
_LARGEST = 4096  # pixels of a picture's side
_KINDS = ("lines", "points", "bars", "cells")
_SCALES = ("linear", "log", "category")


def study_files(folder: Path) -> list[Path]:
    """The files of a folder that studies left, by name."""
    return sorted(path for path in folder.glob("*.json") if path.is_file() and path.name != COMPARISON)


def read_studies(folder: Path) -> list[Study]:
    """Read every study of a folder, in the order of the report.

    Args:
        folder: Where `torchrope study` wrote.

    Raises:
        ValueError: there is none, or one is no JSON, of another schema, or lacks a part.
    """
    files = study_files(folder)
    if not files:
        raise ValueError(
            f"a report needs the {COMPARISON} of `torchrope compare` or the files of `torchrope study`, got no file at "
            f"{folder / COMPARISON} and no other"
        )
    studies = [read_study(file) for file in files]
    _check_once(studies, files)
    return sorted(studies, key=_place)


def read_study(file: Path) -> Study:
    """Read one study and check that the report can show it.

    Raises:
        ValueError: it is no JSON, of another schema, or lacks a part; the message names the file and the place.
    """
    try:
        study = _showable(parse_json(file.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        raise ValueError(f"a study must be JSON, got {file}: {error}") from None
    try:
        check_study(study)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return study


def check_study(study: Any) -> None:
    """Raise ValueError, naming the place, unless a study has the shape this report reads."""
    check_kind(study, dict, "study")
    if study.get("schema") != VERSION:
        raise ValueError(f"schema must be {VERSION!r}, got {short(study.get('schema'))}")
    check(study, _SHAPE, "study")
    findings = study["findings"]
    for part in ("tables", "published"):
        for index, table in enumerate(findings[part]):
            _check_table(table, f"study.findings.{part}[{index}]")
    for index, figure in enumerate(findings["figures"]):
        _check_figure(figure, f"study.findings.figures[{index}]")
    for index, pictures in enumerate(findings.get("pictures") or []):
        _check_pictures(pictures, f"study.findings.pictures[{index}]")
    names = [each["name"] for each in [*findings["figures"], *(findings.get("pictures") or [])]]
    if len(set(names)) < len(names):
        raise ValueError(f"study.findings.figures must have different names, got {short(names)}")


def _showable(value: Any) -> Any:
    """Numbers that are not finite become None; characters that no page may hold become the sign for that."""
    if isinstance(value, dict):
        return {_showable(key): _showable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_showable(item) for item in value]
    if isinstance(value, str):
        return _UNFIT.sub("\ufffd", value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and not abs(value) <= 1e300 else value


def _check_table(table: dict[str, Any], where: str) -> None:
    if not table["columns"]:
        raise ValueError(f"{where} must have a column, got none")
    keys = [column[part] for column in table["columns"] for part in ("key", "low", "high") if column.get(part)]
    _check_rows(table["rows"], keys, where)
    for column in table["columns"]:
        for part in ("low", "high"):
            if column.get(part):
                _check_numbers(table["rows"], column[part], where)


def _check_figure(figure: dict[str, Any], where: str) -> None:
    if figure["kind"] not in _KINDS:
        raise ValueError(f"{where}.kind must be one of {', '.join(_KINDS)}, got {short(figure['kind'])}")
    if (figure["kind"] == "cells") != (figure.get("colour") is not None):
        raise ValueError(f"{where}.colour must be there for cells alone, got kind {figure['kind']}")
    axes = [(part, figure[part]) for part in ("x", "y", "colour") if figure.get(part)]
    for part, axis in axes:
        if axis["scale"] not in _SCALES:
            raise ValueError(f"{where}.{part}.scale must be one of {', '.join(_SCALES)}, got {short(axis['scale'])}")
    others = [figure[part] for part in ("series", "panel", "low", "high") if figure.get(part)]
    _check_rows(figure["rows"], [axis["key"] for _, axis in axes] + others, where)
    numeric = [axis["key"] for _, axis in axes if axis["scale"] != "category"]
    for key in [*numeric, *(figure[part] for part in ("low", "high") if figure.get(part))]:
        _check_numbers(figure["rows"], key, where)


def _check_pictures(pictures: dict[str, Any], where: str) -> None:
    for index, row in enumerate(pictures["rows"]):
        at = f"{where}.rows[{index}]"
        for side in ("width", "height"):
            if not 1 <= row[side] <= _LARGEST:
                raise ValueError(f"{at}.{side} must be 1 to {_LARGEST} pixels, got {short(row[side])}")
        if not _PNG.fullmatch(row["image"]):
            raise ValueError(f"{at}.image must be PNG in base64, got {short(row['image'])}")
        for place, panel in enumerate(row["panels"]):
            _check_panel(panel, row["width"] * row["height"], len(pictures["classes"]), f"{at}.panels[{place}]")


def _check_panel(panel: dict[str, Any], pixels: int, classes: int, where: str) -> None:
    try:
        found = list(runs(panel["map"]))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    covered = sum(length for _, length in found)
    if found and covered != pixels:
        raise ValueError(f"{where}.map must cover {pixels} pixels, got {covered}")
    for kind in [kind for kind, _ in found if kind is not None] + [box["kind"] for box in panel["boxes"]]:
        if not 0 <= kind < classes:
            raise ValueError(f"{where} must be of {classes} classes, got class {short(kind)}")


def _check_rows(rows: list[dict[str, Any]], keys: list[str], where: str) -> None:
    for index, row in enumerate(rows):
        for key in keys:
            if key not in row:
                raise ValueError(f"{where}.rows[{index}] must have {key!r}, got {short(sorted(row))}")
        for key, value in row.items():
            if not isinstance(value, int | float | str | bool | None):
                raise ValueError(f"{where}.rows[{index}].{key} must be a number, text, true, false or null, got "
                                 f"{short(value)}")  # fmt: skip


def _check_numbers(rows: list[dict[str, Any]], key: str, where: str) -> None:
    for index, row in enumerate(rows):
        if row[key] is not None:
            check_kind(row[key], float, f"{where}.rows[{index}].{key}")


def _check_once(studies: list[Study], files: list[Path]) -> None:
    seen: dict[tuple[str, str | None], Path] = {}
    for study, file in zip(studies, files, strict=True):
        key = (study["study"], (study.get("data") or {}).get("name"))
        if key in seen:
            raise ValueError(f"a study is there once for each data set, got {seen[key].name} and {file.name}")
        seen[key] = file


def _place(study: Study) -> tuple[int, str, str]:
    name = study["study"]
    return ORDER.index(name) if name in ORDER else len(ORDER), name, (study.get("data") or {}).get("name") or ""
