"""Load trained models for studies: published checkpoints, files of `torchrope.save`, run folders."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchrope.encodings import Encoding, NoEncoding
from torchrope.integrations import Rotary, adapt
from torchrope.models import Swin, Transformer, ViT
from torchrope.positions import PerAxis
from torchrope_lab.engine.describe import label_of
from torchrope_lab.mistakes import Mistake
from torchrope_lab.settings.run_config import CONFIG
from torchrope_lab.training.checkpoints import CHECKPOINT, WEIGHTS
from torchrope_lab.training.initial import config_of_run, is_run, read_model


@dataclass(frozen=True)
class Site:
    """An encoding of a model, and the lattice that it is applied to."""

    encoding: Encoding  # of one layer, or of all layers that share it
    sizes: tuple[int, ...]  # tokens per axis at the training size; in a Swin of the stage's window; none off a lattice
    spacing: PerAxis
    origin: PerAxis


@dataclass(frozen=True)
class Checkpoint:
    """A trained model that was read from a file."""

    name: str  # of its file, without blanks, unique
    path: Path  # as the user gave it
    model: nn.Module  # on the CPU, in evaluation mode
    sites: list[Site]  # rotary encodings, the first layer first; empty if it has none

    @property
    def title(self) -> str:
        """Display name of its encodings, which are the same in all layers."""
        return label_of(self.model, self.sites[0].encoding if self.sites else None)


def read_checkpoints(paths: Sequence[str], others: Collection[str] = ()) -> list[Checkpoint]:
    """Load published checkpoints, files and folders of `torchrope.save`, and folders of runs, with unique names."""
    places = [_place(path) for path in paths]
    return [_read(place, name) for place, name in zip(places, _short_names(places, others), strict=True)]


def encodings_of_runs(paths: Sequence[str]) -> list[str]:
    """Return the names of the encodings of the run folders among some paths, whose modules may need importing."""
    places = [_place(path) for path in paths]
    return [config_of_run(place).encoding for place in places if is_run(place)]


def _place(path: str) -> Path:
    """Resolve a path: for a weights file of a run, return the run's folder."""
    place = Path(path).expanduser()
    if not place.exists():
        raise Mistake(f"--checkpoint must be an existing file or folder, got {path}")
    is_of_run = place.name in (WEIGHTS, CHECKPOINT) and (place.parent / CONFIG).exists()
    return place.parent if is_of_run else place


def _short_names(places: Sequence[Path], others: Collection[str]) -> list[str]:
    """Return the last parts of paths, as many as make the names distinct."""
    parts = [["-".join(part.split()) for part in place.resolve().parts] for place in places]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len({*names, *others}) == len(names) + len(set(others)):
            return names
    raise Mistake(f"--checkpoint must not name a model twice, got {', '.join(map(str, places))}")


def _read(place: Path, name: str) -> Checkpoint:
    try:
        model = read_model(place)
        sites = sites_of(model)
    except ValueError as error:
        raise Mistake(f"--checkpoint {place} cannot be read: {error}") from None
    if all(isinstance(site.encoding, NoEncoding) for site in sites):
        sites = []
    return Checkpoint(name, place, model.eval(), sites)


def sites_of(model: nn.Module) -> list[Site]:
    """Collect the encodings of a model's layers, the first layer first; of other libraries' models those of `swap`."""
    if isinstance(model, ViT):
        sizes = model.embed.lattice(model.arguments["input_size"])
        found = [Site(each, sizes, **model.position_map.spaced(*sizes)) for each in _encodings(model)]
    elif isinstance(model, Swin):
        stages: list[Any] = list(model.stages)
        found = [
            Site(each, part.window, **part.position_map.spaced(*part.window))
            for part in stages
            for each in _encodings(part)
        ]
    elif isinstance(model, Transformer):
        lattice: Any = model.position_map
        found = [Site(each, (), lattice.spacing, lattice.origin) for each in _encodings(model)]
    else:
        rotary = next((module for module in model.modules() if isinstance(module, Rotary)), None)
        sites = adapt(model).shapes() if rotary is not None else []
        pairs = zip(_encodings(rotary), sites, rotary.lattices, strict=False) if rotary is not None else ()
        found = [Site(each, site.lattice, **lattice.spaced(*site.lattice)) for each, site, lattice in pairs]
    return found


def _encodings(part: Any) -> list[Any]:
    return list(part.encodings)
