"""Schema of the results of comparisons and studies: dataclasses that are stored as JSON.

`StudyResult.write` writes them and `StudyResult.read` reads them. A file is checked against the dataclasses when it is
read, so that a damaged file raises an error of one line that names the entry.
"""

import json
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torchrope_lab.conclusion import Conclusion
from torchrope_lab.files import read_mapping
from torchrope_lab.mistakes import Mistake
from torchrope_lab.schema import PositiveInt, build, require, short

Value = float | int | str | bool | None
Row = Mapping[str, Value]

SCHEMA = 1
_NOT_ALLOWED_IN_HTML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_LARGEST = 1e300  # larger values overflow in plots


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str  # of its value in a row
    title: str
    unit: str = ""  # such as "%", "ms" or "rad"; empty for words and counts
    digits: int | None = None  # decimals; None for words; large counts get separators
    low: str | None = None  # key of the lower end of the 95 % interval; None without one
    high: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows of named values."""

    title: str
    columns: Sequence[Column]  # the first one names the row
    rows: Sequence[Row]  # a value per column, None if missing
    source: str = ""  # paper and table of published numbers; empty for measured ones
    note: str = ""  # explanation for the reader


@dataclass(frozen=True)
class Axis:
    """The x axis, the y axis or the colour scale of a figure."""

    key: str  # of its value in a row
    title: str  # without the unit
    unit: str = ""
    scale: Literal["linear", "log", "category"] = "linear"  # "category" for names, in the order of the rows
    zero: bool = False  # whether 0 is shown, so that lengths are in proportion


@dataclass(frozen=True)
class Figure:
    """The numbers of a figure, one row per mark; the report chooses its style."""

    # "lines" joins the points of a series; "points" does not; "bars" stand on zero; "cells" colours a cell at (x, y).

    name: str  # of its file, unique within a study: "accuracy-by-size"
    kind: Literal["lines", "points", "bars", "cells"]
    title: str
    alt: str  # alternative text: what is on the axes, and the result
    x: Axis
    y: Axis
    rows: Sequence[Row]
    series: str | None = None  # key of the name that colour and marker show, most often an encoding's
    panel: str | None = None  # key of the name of each of several small figures
    low: str | None = None  # key of the lower end of the 95 % interval of y
    high: str | None = None
    colour: Axis | None = None  # scale of "cells"; diverging if values lie on both sides of zero
    caption: str = ""  # explanation for the reader


@dataclass(frozen=True)
class Picture:
    """One image with its overlays, as PNG files in base64."""

    title: str  # "64 × 64, as in training"
    image: str
    panels: Mapping[str, str]  # transparent overlay by name: "truth", or an encoding's; empty for the image alone

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image in pixels."""
        header = b64decode(self.image[:32])
        return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


@dataclass(frozen=True)
class Pictures:
    """Pictures with predicted and ground-truth boxes or maps."""

    name: str  # for files, unique among the figures and pictures of a study
    title: str
    alt: str
    rows: Sequence[Picture]
    caption: str = ""
    legend: Mapping[str, str] = field(default_factory=dict)  # colour of each class, "#0072b2", by its name


@dataclass(frozen=True)
class Findings:
    """Findings of a study.

    Attributes:
        answer: The study's question answered in a sentence or two: one claim with its uncertainty.
        tables: Measurements, the main table first; those without rows are left out.
        figures: The numbers to draw; those without rows are left out.
        pictures: Images with ground truth and predictions.
        published: Results of papers for the same question.

    Raises:
        ValueError: two figures have the same name.
    """

    answer: str
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    published: Sequence[Table] = ()
    pictures: Sequence[Pictures] = ()

    def __post_init__(self) -> None:
        for kind in ("tables", "figures"):
            object.__setattr__(self, kind, [part for part in getattr(self, kind) if part.rows])
        names = [*(figure.name for figure in self.figures), *(pictures.name for pictures in self.pictures)]
        if len(set(names)) < len(names):
            raise Mistake(f"figures must have different names, got {short(names)}")

    def plain(self) -> dict[str, Any]:
        """Return dicts, lists, numbers and strings; NaN and infinity become None."""
        return clean(asdict(self))


@dataclass(frozen=True)
class DataFacts:
    """Description of the data that was used."""

    name: str  # as in `--data`
    title: str
    description: str | None = None  # in one sentence
    axes: Sequence[str] = ()
    input_size: Sequence[int] = ()
    num_classes: int | None = None
    train: int | None = None
    val: int | None = None
    classes: Sequence[str] = ()
    chance: float | None = None  # accuracy of the best constant prediction
    skipped: Sequence[str] = ()  # files that could not be read, each with the reason
    unread: str = ""  # files of other types, in a sentence


@dataclass(frozen=True)
class TrainedFacts:
    """Provenance of training runs of one machine and state of the code, values of `provenance`."""

    runs: PositiveInt
    date: str | None = None  # or the first and the last
    torchrope: str | None = None
    commit: str | None = None
    versions: Row | None = None
    machine: Row | None = None


@dataclass(frozen=True)
class RunFacts:
    """Command of a run, and values of `provenance` of the process that wrote the results."""

    command: str | None = None
    date: str | None = None  # of completion, ISO 8601
    seconds: float | None = None  # sum over all training runs
    config: Mapping[str, Any] | None = None
    torchrope: str | None = None
    commit: str | None = None
    versions: Row | None = None
    machine: Row | None = None
    trained: Sequence[TrainedFacts] = ()  # for each machine and state of the code


@dataclass(frozen=True)
class StudyResult:
    """A finished study, stored in `<study>[-<data>].json`, or a comparison, stored in `results.json`.

    Attributes:
        study: Name of the study.
        title: Title shown in the report.
        question: Question of the study.
        sources: Papers with the tables or figures that address the question.
        findings: Findings.
        data: The data used; None if no data is needed.
        run: Command and provenance of the numbers.
        conclusion: For a comparison, the dictionary of `Conclusion.as_dict`, whose sentence replaces the answer of the
            findings; None for other studies.
        unfinished: Requested runs that are missing.
        left_out: What else was asked for and is missing, with the reason.

    Raises:
        ValueError: the conclusion cannot be read.
    """

    study: str
    title: str
    question: str
    sources: Sequence[str]
    findings: Findings
    data: DataFacts | None
    run: RunFacts = field(default_factory=RunFacts)
    conclusion: Mapping[str, Any] | None = None
    unfinished: Sequence[str] = ()
    left_out: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.conclusion is not None:
            answer = Conclusion.from_dict(self.conclusion).sentence()
            object.__setattr__(self, "findings", replace(self.findings, answer=answer))

    def plain(self) -> dict[str, Any]:
        """Return the dictionary that is stored as JSON."""
        return {"schema": SCHEMA, **clean(asdict(self))}

    def write(self, path: Path) -> None:
        """Write JSON atomically; NaN and infinity become null."""
        write_json(path, self.plain())

    @staticmethod
    def read(path: Path | str) -> "StudyResult":
        """Read what `write` wrote."""
        stored = clean(read_mapping(Path(path), "a result"))
        try:
            require(stored.get("schema") == SCHEMA, f"schema must be {SCHEMA!r}", repr(stored.get("schema")))
            return build(StudyResult, stored, "study")
        except ValueError as error:
            raise Mistake(f"{path}: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN and infinity become null."""
    from torchrope.files import write_whole

    text = json.dumps(clean(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_whole(path, text + "\n")


def clean(value: Any) -> Any:
    """Replace numbers that are not finite or overflow in plots by None, and characters that HTML forbids by U+FFFD."""
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, str):
        return _NOT_ALLOWED_IN_HTML.sub("\ufffd", value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and not abs(value) <= _LARGEST else value
