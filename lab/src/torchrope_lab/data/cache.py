"""Cache folder for downloaded files, drawn images and indices of shards."""

from pathlib import Path

import torch


def cache_folder() -> Path:
    """Return the cache folder, `torchrope` in the folder of `torch.hub`."""
    return Path(torch.hub.get_dir()) / "torchrope"
