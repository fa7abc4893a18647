"""What a study found, as plain values that JSON keeps: tables, figures as numbers, pictures, and sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Value = float | int | str | bool | None
Row = Mapping[str, Value]

SCHEMA = 1


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: Where a row keeps its value.
        title: For people.
        unit: Of the values, such as "%", "ms" or "rad"; empty for words and counts.
        digits: Decimals shown; None for words. Large counts get separators.
        low, high: Keys of the 95 % interval's ends, where there is one.
    """

    key: str
    title: str
    unit: str = ""
    digits: int | None = None
    low: str | None = None
    high: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows of named values.

    Attributes:
        title: What it shows.
        columns: Its columns, the first one names the row.
        rows: A value a column, None where there is none.
        source: Where published numbers are from, paper and table; empty for measured ones.
        note: What must be known to read it.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        keys = [key for column in self.columns for key in (column.key, column.low, column.high) if key]
        for row in self.rows:
            if missing := set(keys) - set(row):
                raise ValueError(f"rows of {self.title!r} must have {', '.join(keys)}, got one without {min(missing)}")


@dataclass(frozen=True)
class Axis:
    """What a direction, or the colour, of a figure means.

    Attributes:
        key: Where a row keeps its value.
        title: For people, without the unit.
        unit: Of the values.
        scale: "linear", "log", or "category" for names, in the order of the rows.
    """

    key: str
    title: str
    unit: str = ""
    scale: Literal["linear", "log", "category"] = "linear"


@dataclass(frozen=True)
class Figure:
    """The numbers of a figure, one row a mark; how it looks is the report's affair.

    Attributes:
        name: For files, unique within a study: "accuracy-by-size".
        kind: "lines" joins the points of a series; "points" does not; "bars" stand on zero; "cells" colours a cell at
            (x, y) by `colour`.
        title: What is drawn.
        alt: What a reader who does not see it should know: what is on the axes, and what comes out.
        x, y: The axes.
        rows: The numbers.
        series: Key of the name that colour and marker tell, an encoding's most of the time.
        panel: Key of the name that small figures side by side tell.
        low, high: Keys of the 95 % interval's ends of y.
        colour: For "cells": what the colour means; values around zero are drawn so.
        caption: How to read it.
    """

    name: str
    kind: Literal["lines", "points", "bars", "cells"]
    title: str
    alt: str
    x: Axis
    y: Axis
    rows: Sequence[Row]
    series: str | None = None
    panel: str | None = None
    low: str | None = None
    high: str | None = None
    colour: Axis | None = None
    caption: str = ""

    def __post_init__(self) -> None:
        if (self.kind == "cells") != (self.colour is not None):
            raise ValueError(f"colour is for cells, and cells need it, got kind {self.kind!r} of {self.name!r}")
        given = (self.x.key, self.y.key, self.series, self.panel, self.low, self.high, self.colour and self.colour.key)
        keys = [key for key in given if key]
        for row in self.rows:
            if missing := set(keys) - set(row):
                raise ValueError(f"rows of {self.name!r} must have {', '.join(keys)}, got one without {min(missing)}")


@dataclass(frozen=True)
class Box:
    """A rectangle on a picture.

    Attributes:
        left, top, right, bottom: In pixels of the picture, from its upper left corner.
        kind: Place of its class in `Pictures.classes`.
        score: The model's confidence, 0 to 1; None of a true one.
    """

    left: float
    top: float
    right: float
    bottom: float
    kind: int
    score: float | None = None


@dataclass(frozen=True)
class Panel:
    """What is laid over a picture: the truth, or what one model says.

    Attributes:
        name: "truth", or an encoding's.
        boxes: Drawn in their order.
        map: Class of every pixel in reading order, as runs "class:length" with blanks between, "-" for pixels without
            one: "-:40 3:12 -:12".
    """

    name: str
    boxes: Sequence[Box] = ()
    map: str = ""


@dataclass(frozen=True)
class Picture:
    """One image, and what is said of it.

    Attributes:
        title: What it is: "64 × 64, as in training".
        image: A PNG file in base64.
        width, height: Its pixels.
        panels: Shown side by side, the truth first.
    """

    title: str
    image: str
    width: int
    height: int
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Pictures:
    """Pictures with boxes or maps on them, predicted ones beside true ones; how they look is the report's affair.

    Attributes:
        name: For files, unique among the figures and pictures of a study.
        title: What is seen.
        alt: What a reader who does not see it should know.
        classes: Names that boxes and maps refer to.
        rows: One a picture.
        caption: How to read it.
    """

    name: str
    title: str
    alt: str
    classes: Sequence[str]
    rows: Sequence[Picture]
    caption: str = ""

    def __post_init__(self) -> None:
        kinds = {box.kind for row in self.rows for panel in row.panels for box in panel.boxes}
        if outside := sorted(kind for kind in kinds if not 0 <= kind < len(self.classes)):
            raise ValueError(f"boxes of {self.name!r} must be of {len(self.classes)} classes, got class {outside[0]}")


@dataclass(frozen=True)
class Check:
    """A law that the numbers must obey.

    Attributes:
        law: What must hold.
        holds: Whether it does.
        measured: The number it was decided by.
    """

    law: str
    holds: bool
    measured: str


@dataclass(frozen=True)
class Advice:
    """What to choose in a case, for the front page.

    Attributes:
        case: "small images, trained from scratch", "larger images than in training".
        encodings: Names, the first choice first; those not told apart from it follow.
        because: The measured reason, with its uncertainty.
    """

    case: str
    encodings: Sequence[str]
    because: str


@dataclass(frozen=True)
class Findings:
    """What a study found.

    Attributes:
        answer: The study's question answered in a sentence or two, from the numbers, with their uncertainty.
        tables: What was measured, the main table first.
        figures: The numbers to draw.
        pictures: Images with what is true and what is predicted on them.
        published: What papers report for the same question.
        checks: What must hold, and whether it does.
        notes: What a reader must know: what was left out, what differs from the papers.
        advice: For the front page.
    """

    answer: str
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    published: Sequence[Table] = ()
    checks: Sequence[Check] = ()
    notes: Sequence[str] = ()
    advice: Sequence[Advice] = ()
    pictures: Sequence[Pictures] = ()

    def plain(self) -> dict[str, Any]:
        """As dicts, lists, numbers and strings; NaN and infinity become None."""
        return _finite(asdict(self))


@dataclass(frozen=True)
class StudyResult:
    """A finished study, as `<study>[-<data>].json` keeps it.

    Attributes:
        study: Its name.
        title: For people.
        question: What it asks.
        sources: Papers and their tables or figures that ask it.
        findings: What it found.
        data: Name, title, sizes and counts of the data; None where none was needed.
        run: How to run it again, and where the numbers are from: command, date, config, versions, machine, seconds.
    """

    study: str
    title: str
    question: str
    sources: Sequence[str]
    findings: Findings
    data: Mapping[str, Any] | None
    run: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """What the report reads."""
        return {"schema": SCHEMA, **_finite(asdict(self))}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
