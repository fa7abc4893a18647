"""Read the results in a folder, `<study>[-<data>].json`."""

from pathlib import Path

from torchrope_lab.mistakes import Mistake
from torchrope_lab.registry import STUDIES
from torchrope_lab.results import StudyResult

_OF_A_RUN = ("data.json", "evaluation.json", "skipped.json")
"""Files of a run of `torchrope train` that are no results."""

ORDER = ("compare", *STUDIES)
"""Order of the studies in the report; user-defined studies come after these."""


def read_studies(folder: Path) -> list[StudyResult]:
    """Read the comparison and every study of a folder, in the order of the report.

    Args:
        folder: Output folder of `torchrope compare` or `study`, or of a run after `write_run`.

    Raises:
        ValueError: there is none, or one is not JSON, has another schema, or lacks an entry.
    """
    files = sorted(path for path in folder.glob("*.json") if path.is_file() and path.name not in _OF_A_RUN)
    if not files:
        rule = "a report needs results of `torchrope compare`, `study` or `train`"
        raise Mistake(f"{rule}, but {folder} has no JSON file: run one of them with --out {folder} first")
    studies: dict[tuple[str, str], tuple[Path, StudyResult]] = {}
    for file in files:
        study = StudyResult.read(file)
        key = (study.study, study.data.title if study.data else "")
        if key in studies:
            raise Mistake(f"a study must occur once per data set, got {studies[key][0].name} and {file.name}")
        studies[key] = (file, study)
    place = {name: at for at, name in enumerate(ORDER)}
    return [studies[key][1] for key in sorted(studies, key=lambda key: (place.get(key[0], len(ORDER)), *key))]
