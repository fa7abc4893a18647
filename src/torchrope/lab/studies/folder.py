"""The folder of a study: who it belongs to, and what is finished in it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from torchrope.files import holds_files, read_mapping, write_whole
from torchrope.lab.studies.config import CompareConfig
from torchrope.lab.training.config import MAY_CHANGE, differences, plain

MAY_GROW = ("encodings", "seeds", "out")
MEASURES = {"seed", "top1", "val_loss", "shuffled_top1", "resolutions", "curve", "seconds", "labels", "predicted"}


@dataclass(frozen=True)
class Run:
    """One encoding trained with one seed."""

    encoding: str
    seed: int

    def __str__(self) -> str:
        return f"{self.encoding} seed {self.seed}"


class StudyFolder:
    """`config.yaml`, `runs/<encoding>-seed<n>/`, `costs.json`, `results.json`, and the report beside them.

    Args:
        path: The folder; made when it is claimed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.data_file = path / "data.json"
        self.costs_file = path / "costs.json"
        self.results_file = path / "results.json"
        self.runs = path / "runs"

    def claim(self, config: CompareConfig, fingerprint: str) -> CompareConfig:
        """Make the folder this configuration's; encodings and seeds may be added to those already there.

        Args:
            config: What is asked for now.
            fingerprint: Of the data; runs over other examples cannot be compared.

        Returns:
            The configuration with all encodings and seeds that the folder was ever asked for.

        Raises:
            ValueError: it belongs to another configuration, or holds files that no comparison wrote.
        """
        mine = plain(config)
        if self.config_file.exists():
            theirs = self._stored_config()
            different = differences(theirs, mine, but=(*MAY_GROW, *MAY_CHANGE))
            if different:
                rule = "--out must be a new folder or one of the same configuration"
                raise ValueError(f"{rule}, got {self.path} with {different}")
            self._check_data(fingerprint)
            mine["encodings"] = list(dict.fromkeys([*theirs["encodings"], *mine["encodings"]]))
            mine["seeds"] = max(theirs["seeds"], mine["seeds"])
        elif self.path.is_file() or holds_files(self.path):
            raise ValueError(f"--out must be a new folder, an empty one, or one of torchrope compare, got {self.path}")
        write_whole(self.config_file, yaml.safe_dump(mine, sort_keys=False))  # first: it makes the folder this one's
        write_json(self.data_file, {"fingerprint": fingerprint})
        return replace(config, encodings=mine["encodings"], seeds=mine["seeds"])

    def _check_data(self, fingerprint: str) -> None:
        if not self.data_file.exists() and not self.runs.exists():
            return  # ended between the two files of a claim, with nothing trained
        if read_mapping(self.data_file, "data.json").get("fingerprint") != fingerprint:
            raise ValueError(f"the data must be what it was, got other examples than {self.path} was trained on")

    def run_folder(self, run: Run) -> Path:
        """Where a run keeps its files."""
        return self.runs / f"{run.encoding.replace(':', '-')}-seed{run.seed}"

    def result(self, run: Run) -> dict[str, Any] | None:
        """The measures of a finished run, None where it is not finished."""
        file = self.run_folder(run) / "result.json"
        if not file.exists():
            return None
        result = read_mapping(file, "a result")
        if not set(result) >= MEASURES:
            raise ValueError(f"a result must hold {', '.join(sorted(MEASURES))}, got {file} without; delete it")
        return result

    def write_result(self, run: Run, result: dict[str, Any]) -> None:
        """Finish a run."""
        write_json(self.run_folder(run) / "result.json", result)

    def _stored_config(self) -> dict[str, Any]:
        stored = read_mapping(self.config_file, "config.yaml")
        if not {"encodings", "seeds", "data", "model", "optim"} <= set(stored):
            raise ValueError(f"{self.config_file} must be a configuration of torchrope compare, got something else")
        defaults = plain(CompareConfig())  # settings that are younger than the folder
        return {**defaults, **{key: _over(defaults.get(key), value) for key, value in stored.items()}}


def _over(defaults: Any, stored: Any) -> Any:
    return {**defaults, **stored} if isinstance(defaults, dict) and isinstance(stored, dict) else stored


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all; NaN and infinity become null."""
    write_whole(path, json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
