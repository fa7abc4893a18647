"""Give every encoding one colour, marker and dash on all pages: colours that colour-blind readers tell apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito without yellow, then three darker hues from Tol's muted palette; the same hues, lighter, on dark paper.
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

# Places in the palette: what is compared most often comes first and never shares a colour.
ORDER = (
    "learned",
    "axial",
    "mixed",
    "liere:8",
    "liere",
    "comrope-ap",
    "comrope-ld",
    "string",
    "sinusoidal",
    "golden",
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
    """How a name is drawn.

    Attributes:
        place: Of its colour in `COLOURS`; -1 is `PLAIN`.
        shape: Of a marker: a name that Vega knows, or an SVG path.
        dash: Lengths of dashes and gaps of a line, in pixels.
    """

    place: int
    shape: str
    dash: tuple[int, int]

    @property
    def colour(self) -> str:
        """On white paper."""
        return PLAIN if self.place < 0 else COLOURS[self.place]


def page_looks(studies: Sequence[dict[str, Any]]) -> dict[str, Look]:
    """One look for every encoding that any study of a page names, also under the label that a table gives it."""
    names: list[str] = []
    labels: dict[str, str] = {}
    for study in studies:
        names += [name for name in (study["run"].get("config") or {}).get("encodings") or [] if isinstance(name, str)]
        names += [name for advice in study["findings"]["advice"] for name in advice["encodings"]]
        for table in study["findings"]["tables"]:
            for row in table["rows"]:
                if isinstance(row.get("name"), str) and isinstance(row.get("encoding"), str):
                    labels[row["encoding"]] = row["name"]
    looks = encoding_looks(names)
    return {**{label: looks[name] for label, name in labels.items() if name in looks}, **looks}


def encoding_looks(names: Iterable[str]) -> dict[str, Look]:
    """Give every encoding its look: known ones theirs, others what is left, in their order; `none` is always grey."""
    others = [name for name in dict.fromkeys(names) if name != "none"]
    places = {name: ORDER.index(name) for name in others if name in ORDER}
    free = (place for place in range(len(ORDER) + len(others)) if place not in places.values())
    places |= {name: next(free) for name in others if name not in ORDER}
    return {**{name: numbered(places[name]) for name in others}, "none": Look(-1, PLAIN_SHAPE, DASHES[1])}


def numbered(place: int) -> Look:
    """The look of a place: all are different for the first ninety."""
    return Look(
        place=place % len(COLOURS),
        shape=SHAPES[place % len(SHAPES)],
        dash=DASHES[place // len(COLOURS) % len(DASHES)],
    )


def look_class(value: Any, looks: dict[str, Look]) -> str:
    """Class of the colour of an encoding in the page's style; empty for any other value."""
    return colour_class(looks[value].place) if isinstance(value, str) and value in looks else ""


def colour_class(place: int) -> str:
    """Of the page's style, for a place in the palette."""
    return "plain" if place < 0 else f"c{place}"
