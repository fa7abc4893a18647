"""RSNA 2019: CT of the head, with and without intracranial haemorrhage."""

import logging
from pathlib import Path

from torchrope_lab.data.dicom import index_headers, read_head_ct
from torchrope_lab.data.faults import name_some, warn_skipped
from torchrope_lab.data.folders import files_below
from torchrope_lab.data.images import existing_folder
from torchrope_lab.data.volumes import Volume, Volumes, read_columns, series_volumes
from torchrope_lab.mistakes import Mistake

logger = logging.getLogger(__name__)

TABLE = "stage_2_train.csv"
SLICES_FOLDER = "stage_2_train"
LAYOUT = (
    f"root/{SLICES_FOLDER}/*.dcm and root/{TABLE}; accept the rules at "
    "https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection and unzip what "
    "`kaggle competitions download -c rsna-intracranial-hemorrhage-detection` fetches"
)
EXPECTED = f"the RSNA haemorrhage set ({LAYOUT})"


class RSNA(Volumes):
    """The 21,744 labelled studies of the RSNA 2019 challenge; the class is whether any slice shows a haemorrhage."""

    # Source: A. Flanders et al., Construction of a Machine Learning Dataset through Collaboration: The RSNA 2019 Brain
    # CT Hemorrhage Challenge, Radiology: Artificial Intelligence 2(3), 2020. Slices are grouped into studies by
    # StudyInstanceUID, sorted by position and converted to Hounsfield units. The channels are the windows brain (centre
    # 40, width 80), subdural (80, 200) and soft tissue (40, 380) of the challenge's team NoBrainer
    # (github.com/darraghdog/rsna, scripts/prepare_meta_dicom.py); LieRE does not state its windows. LieRE's split is
    # not published: a fifth of the patients of each class is held out.

    name = "rsna"
    title = "RSNA intracranial haemorrhage"
    classes = ("no haemorrhage", "haemorrhage")
    read_slice = staticmethod(read_head_ct)

    def find_root(self) -> Path:
        """Return the folder of the slices."""
        root = existing_folder(self.config.root, "the RSNA haemorrhage set", LAYOUT)
        self.table = Path(self.config.labels) if self.config.labels else root / TABLE
        return root / SLICES_FOLDER if (root / SLICES_FOLDER).is_dir() else root

    def labelled(self) -> list[tuple[Volume, int, str]]:
        """Index the headers, keep the labelled slices, group them into studies."""
        bleeding = read_haemorrhages(self.table)
        paths = files_below(self.root, self.root, (".dcm",))
        headers, faults = index_headers(self.root, paths)
        # Slices without a label, such as those of the challenge's test set, are excluded.
        labelled = {path: header for path, header in headers.items() if header.instance in bleeding}
        if 0 < len(labelled) < len(headers):
            count = f"{len(headers) - len(labelled)} of {len(headers)}"
            logger.warning("%s slices have no label in %s: left out", count, self.table.name)
        headers = {path: header._replace(series="") for path, header in labelled.items()}  # one volume a study
        if not headers:
            named = f": {name_some(faults)}" if faults else ""
            raise Mistake(f"--data.root must hold {EXPECTED}, found 0 labelled slices in {str(self.root)!r}{named}")
        volumes, disordered = series_volumes(headers)
        self.skipped = faults + disordered
        warn_skipped(self.skipped, len(paths), self.config.max_skipped, "slices and studies")
        return [(volume, int(any(bleeding[headers[path].instance] for path in volume.paths)), "") for volume in volumes]

    def describe(self, count: int) -> None:
        """Set `description` from the number of studies."""
        slices, side, _ = self.input_size
        self.description = (
            f"{count:,} CT studies of the head (RSNA 2019), resampled to {slices} slices of {side}×{side} "
            f"voxels, {self.in_channels} windows as channels; the class is whether there is any haemorrhage."
        )


def read_haemorrhages(path: Path) -> dict[str, bool]:
    """Read stage_2_train.csv, lines of ID_<slice>_<kind> and 0 or 1: whether any kind is in the slice."""
    table = read_columns(path, EXPECTED)
    if missing := {"ID", "Label"} - {*table}:
        raise Mistake(f"labels must have the columns ID and Label, got {path} without {min(missing)}")
    bleeding: dict[str, bool] = {}
    for kind, label in zip(table["ID"].tolist(), table["Label"].tolist(), strict=True):
        name, _, _ = kind.rpartition("_")
        if not name or label not in ("0", "1"):
            raise Mistake(f"{path} must have lines of ID_<slice>_<kind>,0 or 1, got {kind},{label}")
        bleeding[name] = bleeding.get(name, False) or label == "1"
    return bleeding
