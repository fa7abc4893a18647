"""Read the results in a folder, `<study>[-<data>].json`."""

import logging
from pathlib import Path

from torchrope_lab.engine.registry import STUDIES
from torchrope_lab.files import RESULTS
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import StudyResult

logger = logging.getLogger(__name__)

_OF_A_RUN = ("data.json", "evaluation.json", "skipped.json")
"""Files of a run of `torchrope train` that are no results."""

ORDER = ("compare", *STUDIES)
"""Order of the studies in the report; user-defined studies come after these."""


def read_studies(folder: Path) -> list[StudyResult]:
    """Read the comparison and every study of a folder, in the order of the report; warn of other JSON files."""
    files = [path for path in folder.glob("*.json") if path.is_file() and path.name not in _OF_A_RUN]
    read: list[tuple[bool, int, Path, StudyResult]] = []
    others: list[str] = []
    for file in sorted(files):
        try:
            study = StudyResult.read(file)
            read.append((not file.name.startswith((RESULTS, study.study)), len(file.name), file, study))
        except Mistake as error:
            others.append(str(error))
    studies: dict[tuple[str, str], tuple[Path, StudyResult]] = {}
    for _, _, file, study in sorted(read, key=lambda each: each[:3]):  # before its copies
        first, _ = studies.setdefault((study.study, study.data.title if study.data else ""), (file, study))
        if first != file:
            others.append(f"{file}: it is of the same study and data as {first.name}")
    if not studies:
        rule = "a report needs results of `torchrope compare`, `study` or `train`"
        nothing = f"but {folder} has no JSON file: run one of them with --out {folder} first"
        raise Mistake(f"{rule}, " + (f"got {'; '.join(others)}" if others else nothing))
    if others:
        logger.warning("not in the report: %s", "; ".join(others))
    place = {name: at for at, name in enumerate(ORDER)}
    return [studies[key][1] for key in sorted(studies, key=lambda key: (place.get(key[0], len(ORDER)), *key))]
