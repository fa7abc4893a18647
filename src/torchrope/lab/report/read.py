"""Read the results in a folder, `<study>[-<data>].json`, and refuse in one line what the report cannot show."""

from pathlib import Path
from typing import Any

from torchrope.lab.results import STUDIES, StudyResult

Study = dict[str, Any]
"""What `StudyResult.plain` gives."""

ORDER = ("compare", *STUDIES)
"""Of the report; a benchmark and studies of users come after these."""


def read_studies(folder: Path) -> list[Study]:
    """Read the comparison, every study and the benchmark of a folder, in the order of the report.

    Args:
        folder: Where `torchrope compare`, `torchrope study` and `torchrope bench` wrote.

    Raises:
        ValueError: there is none, or one is no JSON, of another schema, or lacks a part.
    """
    files = sorted(path for path in folder.glob("*.json") if path.is_file())
    if not files:
        raise ValueError(
            "a report needs the files that `torchrope compare`, `torchrope study` or `torchrope bench` wrote, got no "
            f"JSON file in {folder}"
        )
    studies = [StudyResult.read(file).plain() for file in files]
    _check_once(studies, files)
    return sorted(studies, key=_place)


def _check_once(studies: list[Study], files: list[Path]) -> None:
    seen: dict[tuple[str, str | None], Path] = {}
    for study, file in zip(studies, files, strict=True):
        key = (study["study"], (study.get("data") or {}).get("title"))
        if key in seen:
            raise ValueError(f"a study is there once for each data set, got {seen[key].name} and {file.name}")
        seen[key] = file


def _place(study: Study) -> tuple[int, str, str]:
    name = study["study"]
    return ORDER.index(name) if name in ORDER else len(ORDER), name, (study.get("data") or {}).get("title") or ""
