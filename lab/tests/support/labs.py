"""Labs and commands of tiny models on a few digits, and findings as the report reads them."""

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.study import Lab
from torchrope_lab.results import Findings
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig
from torchrope_lab.settings.study_config import StudyConfig

SMALL: dict[str, Any] = dict(dim=16, depth=1, num_heads=2, mlp_dim=16)
QUIET = Console(file=StringIO())
OPTIONS = [
    *("--epochs=1", "--optim.warmup_epochs=0", "--data.train_size=80", "--data.val_size=40", "--model.patch_size=[2]"),
    *("--model.dim=16", "--model.depth=1", "--model.num_heads=1", "--model.mlp_dim=16"),
]
Run = Callable[..., tuple[int, str, str]]


def settings(out: Path, *encodings: str, **changes: Any) -> StudyConfig:
    """Settings of one seed and one epoch, with some replaced."""
    given = {
        "data": data_config(train_size=60, val_size=40),
        "model": ModelConfig(patch_size=[2], **SMALL),
        "optim": OptimConfig(epochs=1, warmup_epochs=0),
        "encodings": list(encodings),
        "seeds": 1,
        "out": str(out),
    }
    return StudyConfig(**{**given, **changes})


def lab(out: Path, *encodings: str, **changes: Any) -> Lab:
    """A lab with these settings."""
    return Lab(settings(out, *encodings, **changes), (), QUIET)


def kept(findings: Findings) -> dict[str, Any]:
    """Findings as the report reads them: JSON keeps everything."""
    return json.loads(json.dumps(findings.plain(), allow_nan=False))


def rows_of(findings: dict[str, Any], title: str = "", key: str = "name") -> dict[str, dict[str, Any]]:
    """The rows of the first table whose title begins so, by name."""
    table = next(table for table in findings["tables"] if table["title"].startswith(title))
    return {row[key]: row for row in table["rows"]}
