"""Land and sea around locations on the earth: tokens whose positions are points on a sphere."""

import math
import zlib
from functools import lru_cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

from torchrope.files import write_whole
from torchrope.positions import Periods, latlon_to_unit, stereographic
from torchrope_lab.data.arrays import read_header
from torchrope_lab.data.cache import cache_folder
from torchrope_lab.data.config import GlobeConfig
from torchrope_lab.data.draws import Draws
from torchrope_lab.data.images import Sample
from torchrope_lab.data.tokens import Cloud, TokensModule

PACKAGE = "global_land_mask"
ATTRIBUTION = "the package global-land-mask 1.0.0, Todd Karin, MIT, from GLOBE of NOAA"
ROWS = 1800
"""Rows of the subsampled map from pole to pole: cells are a tenth of a degree high."""
TRIES = 256
"""Number of candidates drawn per query; the first one of the required class in a cell of the required split is used."""
CELL = 15.0
"""Degrees along both sides of a cell; a fifth of the cells is for validation."""
AXES = {"degrees": ("latitude", "longitude"), "vectors": ("x", "y", "z"), "plane": ("east", "north")}
PERIODS: dict[str, Periods] = {"degrees": (None, 360.0)}


class Globe(TokensModule):
    """Binary classification of a location on the earth as land or sea, from surrounding points with known labels.

    An example has `points` locations: the query first, then points drawn uniformly from a spherical cap of `radius`
    degrees whose centre is drawn within `radius` degrees of the query. Features: land (1 land, -1 sea, 0 for the query)
    and asked (1 for the query). Half of the queries are land. Validation queries lie in a fifth of the 15-degree cells,
    training queries in the others.

    Positions are latitude and longitude in degrees, with periodic longitude; unit vectors; or a stereographic
    projection, in degrees, around the centre of the cap.

    Raises:
        ValueError: the map file is missing or invalid.
    """

    name = "globe"
    generated = True
    title = "Land and sea"
    features = ("land", "asked")
    classes = ("sea", "land")

    config: GlobeConfig

    def __init__(self, config: GlobeConfig) -> None:
        super().__init__(config)
        self.axes = AXES[config.coordinates]
        self.periods = PERIODS.get(config.coordinates) if config.periodic_longitude else None
        self.description = f"Locations on the earth, labelled land or sea. Source: {ATTRIBUTION}."

    @property
    def slug(self) -> str:
        """Name and kind of positions."""
        still = self.config.coordinates == "degrees" and not self.config.periodic_longitude
        return f"{self.name}-{self.config.coordinates}{'-open' if still else ''}"

    @property
    def unit(self) -> list[float]:
        """Approximate distance between neighbouring points, in the unit of the positions, the same for all axes."""
        area = 2 * math.pi * (1 - math.cos(math.radians(self.config.radius)))
        apart = math.sqrt(area / self.config.points)
        return [apart if self.config.coordinates == "vectors" else math.degrees(apart)]

    def clouds(self) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Draw `train_size` and `val_size` examples."""
        config = self.config
        land = land_map(config.root)
        made, named = [], []
        for part, count in (("train", config.train_size or 4000), ("val", config.val_size or 1000)):
            draws = Draws(config.split_seed, range(count))
            asked = _asked(land, draws, part, config.split_seed)
            around, middle = _around(asked, draws, part, config)
            made.append([self._cloud(land, places, centre) for places, centre in zip(around, middle, strict=True)])
            labels = land_at(land, asked).long().tolist()
            named.append([(f"{part}/{index}", label) for index, label in enumerate(labels)])
        self.description = (
            f"{len(made[0]) + len(made[1]):,} locations on the earth, each with {config.points - 1} labelled "
            f"locations in a cap of {config.radius:g} degrees; the class is land or sea at the location. "
            f"Positions are {', '.join(self.axes)}. Source: {ATTRIBUTION}."
        )
        return made[0], named[0], made[1], named[1]

    def _cloud(self, land: Tensor, places: Tensor, centre: Tensor) -> Cloud:
        known = 2 * land_at(land, places).float() - 1
        known[0] = 0.0
        asked = torch.zeros_like(known)
        asked[0] = 1.0
        if self.config.coordinates == "vectors":
            positions = latlon_to_unit(places)
        elif self.config.coordinates == "plane":
            positions = stereographic(places, centre.tolist())
        else:
            positions = places
        return Cloud(positions.float(), torch.stack([known, asked], dim=1))


def land_at(land: Tensor, places: Tensor) -> Tensor:
    """Look up land (True) or sea at latitude and longitude in degrees `(..., 2)`, in a map of `land_map`."""
    rows, columns = land.shape
    row = ((90 - places[..., 0]) / 180 * rows).floor().long().clamp(0, rows - 1)
    column = ((places[..., 1] + 180) / 360 * columns).floor().long() % columns
    return land[row, column]


@lru_cache(maxsize=2)
def land_map(root: str | None = None) -> Tensor:
    """Load the land mask of the earth, bool `(rows, columns)`, from 90° N to 90° S and from 180° W to 180° E.

    Args:
        root: A .npz file with `mask` `(rows, columns)`, true at sea; that of the package by default, of which every
            twelfth row and column is kept, in torch's cache folder.

    Raises:
        ValueError: the package or the file is missing or invalid.
    """
    if root is not None:
        return _read(Path(root), 1)
    spec = find_spec(PACKAGE)
    file = Path(((spec and spec.submodule_search_locations) or [""])[0]) / "globe_combined_mask_compressed.npz"
    if not file.is_file():
        raise ValueError("--data globe requires the package global-land-mask (pip install global-land-mask)")
    kept = cache_folder() / "globe" / f"{zlib.crc32(file.read_bytes()):08x}.npy"
    if not kept.exists():
        packed = BytesIO()
        np.save(packed, np.packbits(_read(file).numpy(), axis=1))
        write_whole(kept, packed.getvalue())
    return torch.from_numpy(np.unpackbits(np.load(kept), axis=1).astype(bool))


def _read(file: Path, step: int = 0) -> Tensor:
    """Return every step-th row and column of a map, read row by row, because the full map takes a gigabyte.

    Args:
        file: A .npz file.
        step: Distance of kept rows and columns; 0 chooses the step that leaves about `ROWS` rows.
    """
    try:
        with ZipFile(file) as archive, archive.open("mask.npy") as stream:
            shape, columns_first, dtype = read_header(stream)
            if len(shape) != 2 or columns_first or dtype != np.dtype(bool):
                raise ValueError(f"mask must be boolean (rows, columns), got {dtype} {shape}")
            rows, columns = shape
            step = step or max(rows // ROWS, 1)
            kept = []
            for row in range(rows):
                values = np.frombuffer(stream.read(columns), bool)
                if len(values) < columns:
                    raise ValueError(f"mask must have {rows} rows, got {row}")
                if row % step == 0:
                    kept.append(~values[::step])
            return torch.from_numpy(np.stack(kept))
    except (OSError, KeyError, BadZipFile, ValueError) as error:
        rule = "--data.root must be a .npz file with a mask of the earth, true at sea"
        raise ValueError(f"{rule}, got {str(file)!r}: {error}") from None


def _asked(land: Tensor, draws: Draws, part: str, seed: int) -> Tensor:
    """Return the query of each example, `(examples, 2)` in degrees: land and sea alternately, in cells of its part."""
    tries = draws.uniform(f"{part}, place", 2 * TRIES).unflatten(1, (TRIES, 2))
    places = torch.stack([torch.rad2deg(torch.asin(2 * tries[..., 0] - 1)), 360 * tries[..., 1] - 180], dim=-1)
    wanted = torch.arange(len(places)) % 2 == 1
    fits = (land_at(land, places) == wanted.unsqueeze(1)) & (_held_out(places, seed) == (part == "val"))
    first = fits.int().argmax(dim=1)
    if not fits.any(dim=1).all():
        lacking = int((~fits.any(dim=1)).sum())
        received = f"got no match for {lacking} of {len(places)} queries in {TRIES} draws each"
        raise ValueError(f"the map must have land and sea in most cells of {CELL:g} degrees, {received}")
    return places[torch.arange(len(places)), first]


def _held_out(places: Tensor, seed: int) -> Tensor:
    """Return whether locations are in validation cells, a fifth of all."""
    rows, columns = int(180 / CELL), int(360 / CELL)
    row = ((90 - places[..., 0]) / CELL).floor().long().clamp(0, rows - 1)
    column = ((places[..., 1] + 180) / CELL).floor().long().clamp(0, columns - 1)
    of_cell = Draws(seed, range(rows * columns)).uniform("cells")[:, 0] < 0.2
    return of_cell[row * columns + column]


def _around(asked: Tensor, draws: Draws, part: str, config: GlobeConfig) -> tuple[Tensor, Tensor]:
    """Draw the locations of each example, `(examples, points, 2)` in degrees, query first, and the centres of caps.

    The centre lies within `radius` of the query, the others within `radius` of the centre, all uniformly distributed.
    """
    drawn = draws.uniform(f"{part}, around", 2 * config.points).unflatten(1, (config.points, 2))
    centre = latlon_to_unit(asked)
    middle = _within(centre.unsqueeze(1), drawn[:, :1], config.radius)[:, 0]
    others = _within(middle.unsqueeze(1), drawn[:, 1:], config.radius)
    return torch.cat([asked.unsqueeze(1), _degrees(others)], dim=1), _degrees(middle)


def _within(centre: Tensor, drawn: Tensor, radius: float) -> Tensor:
    """Map numbers in [0, 1) `(..., 2)` to unit vectors uniformly distributed in caps around centres."""
    z = 1 - drawn[..., :1] * (1 - math.cos(math.radians(radius)))
    around = 2 * math.pi * drawn[..., 1:]
    axis = torch.where(centre[..., 2:].abs() < 0.9, centre.new_tensor([0.0, 0.0, 1.0]), centre.new_tensor([1.0, 0, 0]))
    one = torch.nn.functional.normalize(torch.linalg.cross(axis.expand_as(centre), centre), dim=-1)
    other = torch.linalg.cross(centre, one)
    return z * centre + (1 - z.square()).clamp(min=0).sqrt() * (around.cos() * one + around.sin() * other)


def _degrees(vectors: Tensor) -> Tensor:
    """Convert unit vectors to latitude and longitude in degrees."""
    latitude = torch.asin(vectors[..., 2].clamp(-1, 1))
    return torch.rad2deg(torch.stack([latitude, torch.atan2(vectors[..., 1], vectors[..., 0])], dim=-1))
