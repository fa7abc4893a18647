"""Read `results.json` and refuse, in one line, what the report cannot show."""

from pathlib import Path
from typing import Any

from torchrope.files import parse_json
from torchrope.lab.report.shape import check, check_kind, short

Results = dict[str, Any]

VERSION = 1
STUDY = "compare"

_MEAN = {"mean?": float, "spread?": float}

_SHAPE: dict[str, Any] = {
    "data": {
        "name": str,
        "title": str,
        "description?": str,
        "axes?": [str],
        "input_size": [int],
        "patch_size?": [int],
        "tokens": int,
        "num_classes": int,
        "train": int,
        "val": int,
        "chance": float,
        "skipped?": [object],
    },
    "encodings": [
        {
            "name": str,
            "label": str,
            "summary?": str,
            "formula?": str,
            "source?": str,
            "rotary?": bool,
            "relative?": bool,
            "seeds?": [
                {"seed": int, "curve?": [{"epoch": int, "val_top1?": float, "val_loss?": float}]},
            ],
            "top1": {"mean": float, "spread?": float, "interval?": (float, float)},
            "val_loss?": _MEAN,
            "shuffled_top1?": _MEAN,
            "resolutions?": [{"size": [int], **_MEAN}],
            "cost?": {
                "parameters?": int,
                "encoding_parameters?": int,
                "flops?": float,
                "step_seconds?": float,
                "peak_memory_bytes?": float,
            },
        },
    ],
    "ranking": [{"name": str, "rank": int, "gap?": float, "verdict": str, "why?": str}],
    "answer": str,
    "run": {
        "command?": str,
        "commit?": str,
        "torchrope?": str,
        "versions?": dict,
        "machine?": dict,
        "seeds?": [int],
        "date?": str,
        "seconds?": float,
        "config?": dict,
    },
    "unfinished?": [object],
}


def read_results(path: Path) -> Results:
    """Read a `results.json` and check that the report can show it.

    Args:
        path: The file that `torchrope compare` wrote.

    Raises:
        ValueError: no such file, not JSON, another schema, or a part that is missing or of the wrong kind.
    """
    if not path.is_file():
        raise ValueError(f"a report needs the results.json of `torchrope {STUDY}`, got no file at {path}")
    try:
        # NaN and Infinity are no JSON: a loss that diverged reads as missing.
        results = parse_json(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except ValueError as error:
        raise ValueError(f"results must be JSON, got {path}: {error}") from None
    try:
        check_results(results)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return results


def check_results(results: Any) -> None:
    """Raise ValueError, naming the place, unless `results` has the shape this report reads."""
    check_kind(results, dict, "results")
    for key, wanted in (("schema", VERSION), ("study", STUDY)):
        if results.get(key) != wanted:
            raise ValueError(f"{key} must be {wanted!r}, got {short(results.get(key))}")
    check(results, _SHAPE, "results")
    _check_names(results)


def ranked(results: Results) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair every ranking entry with its encoding, best first."""
    by_name = {encoding["name"]: encoding for encoding in results["encodings"]}
    return [(entry, by_name[entry["name"]]) for entry in sorted(results["ranking"], key=lambda e: e["rank"])]


def _check_names(results: Results) -> None:
    names = [encoding["name"] for encoding in results["encodings"]]
    if not names:
        raise ValueError("results.encodings must hold at least one encoding, got none")
    placed = [entry["name"] for entry in results["ranking"]]
    if len(set(names)) != len(names) or sorted(placed) != sorted(names):
        raise ValueError(f"results.ranking must place every encoding once, got {placed} for {names}")
