"""Assign every encoding one colour, marker and dash pattern in all figures, from a colour-blind-safe palette."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrope_lab.results import StudyResult

# Okabe and Ito without yellow, then three darker hues from Tol's muted palette; the same hues, lighter, for dark mode.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#7A7A00", "#332288"]
DARK_COLOURS = ["#4BA6E0", "#F0813A", "#2FBF95", "#E09AC2", "#F0B63C", "#8ACBF2", "#D9709F", "#BDBD4A", "#9C8CF0"]
PLAIN, DARK_PLAIN = "#6b6b6b", "#a8a8a8"
DASHES = ((1, 0), (6, 3), (2, 3))
SHAPES = (
    "circle", "square", "triangle-up", "diamond", "triangle-down", "cross",
    "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z", "triangle-left", "triangle-right",
    "M0,-1L.95,-.31L.59,.81L-.59,.81L-.95,-.31Z",
)  # fmt: skip
PLAIN_SHAPE = "M-1,-.75L-.75,-1L0,-.25L.75,-1L1,-.75L.25,0L1,.75L.75,1L0,.25L-.75,1L-1,.75L-.25,0Z"

# Order in the palette: the first nine, which are compared most often, have different colours.
ORDER = (
    "learned",
    "axial",
    "mixed",
    "liere:8",
    "liere",
    "comrope-ap",
    "comrope-ld",
    "string",
    "golden",
    "sinusoidal",
    "dinov3",
    "bias",
    "mrope",
    "mrope-interleaved",
    "visionllama",
    "comrope-rope",
    "comrope-liere",
    "learned-jittered",
)


@dataclass(frozen=True)
class Look:
    """Style of an encoding in figures."""

    place: int  # index of its colour in `COLOURS`; -1 is `PLAIN`
    shape: str  # of a marker, a name of Vega or an SVG path
    dash: tuple[int, int]  # lengths of dashes and gaps of a line, in pixels

    @property
    def colour(self) -> str:
        """Colour in light mode."""
        return PLAIN if self.place < 0 else COLOURS[self.place]


def page_looks(studies: Sequence[StudyResult]) -> dict[str, Look]:
    """Assign a look to every encoding in the studies of a page, by name and by its label in tables."""
    names: list[str] = []
    labels: dict[str, str] = {}
    for study in studies:
        compared = (study.run.config or {}).get("encodings")
        names += [name for name in compared if isinstance(name, str)] if isinstance(compared, list) else []
        rows = [row for table in study.findings.tables for row in table.rows]
        named = [row for row in rows if isinstance(row.get("name"), str) and isinstance(row.get("encoding"), str)]
        labels |= {str(row["encoding"]): str(row["name"]) for row in named}
    looks = encoding_looks(names)
    return {**{label: looks[name] for label, name in labels.items() if name in looks}, **looks}


def encoding_looks(names: Iterable[str]) -> dict[str, Look]:
    """Assign looks: fixed ones to encodings in `ORDER`, the remaining ones to others; `none` is always grey."""
    others = [name for name in dict.fromkeys(names) if name != "none"]
    places = {name: ORDER.index(name) for name in others if name in ORDER}
    free = (place for place in range(len(ORDER) + len(others)) if place not in places.values())
    places |= {name: next(free) for name in others if name not in ORDER}
    return {**{name: numbered(places[name]) for name in others}, "none": Look(-1, PLAIN_SHAPE, DASHES[1])}


def numbered(place: int) -> Look:
    """Return the look with an index; the first ninety are different."""
    return Look(
        place=place % len(COLOURS),
        shape=SHAPES[place % len(SHAPES)],
        dash=DASHES[place // len(COLOURS) % len(DASHES)],
    )


def look_class(value: Any, looks: Mapping[str, Look]) -> str:
    """Return the CSS class of the colour of an encoding, an index in the palette; empty for any other value."""
    if not isinstance(value, str) or value not in looks:
        return ""
    return "plain" if looks[value].place < 0 else f"c{looks[value].place}"
