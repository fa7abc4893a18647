"""Folder of downloaded files and indices."""

from pathlib import Path

import torch


def cache_folder() -> Path:
    """Folder for what is fetched or made once: beside what torch.hub keeps."""
    return Path(torch.hub.get_dir()) / "torchrope"
