"""Give every encoding one colour, marker and dash on all pages: colours that colour-blind readers tell apart."""

from collections.abc import Iterable
from dataclasses import dataclass

# Okabe and Ito without yellow, then three darker hues from Tol's muted palette; the same hues, lighter, on dark paper.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#7A7A00", "#332288"]
DARK_COLOURS = ["#4BA6E0", "#F0813A", "#2FBF95", "#E09AC2", "#F0B63C", "#8ACBF2", "#D9709F", "#BDBD4A", "#9C8CF0"]
PLAIN, DARK_PLAIN = "#6b6b6b", "#a8a8a8"
DASHES = ["-", "--", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "p"]

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
)


@dataclass(frozen=True)
class Look:
    """How a name is drawn.

    Attributes:
        place: Of its colour in `COLOURS`; -1 is `PLAIN`.
        marker: A name of `plots.SHAPES`.
        linestyle: A name of `plots.SHAPES`.
    """

    place: int
    marker: str
    linestyle: str

    @property
    def colour(self) -> str:
        """On white paper."""
        return PLAIN if self.place < 0 else COLOURS[self.place]


def encoding_looks(names: Iterable[str]) -> dict[str, Look]:
    """Give every encoding its look: known ones theirs, others what is left, in their order; `none` is always grey."""
    others = [name for name in dict.fromkeys(names) if name != "none"]
    places = {name: ORDER.index(name) for name in others if name in ORDER}
    free = (place for place in range(len(ORDER) + len(others)) if place not in places.values())
    places |= {name: next(free) for name in others if name not in ORDER}
    return {**{name: numbered(places[name]) for name in others}, "none": Look(-1, "x", "--")}


def numbered(place: int) -> Look:
    """The look of a place: all are different for the first ninety."""
    return Look(
        place=place % len(COLOURS),
        marker=MARKERS[place % len(MARKERS)],
        linestyle=DASHES[place // len(COLOURS) % len(DASHES)],
    )
