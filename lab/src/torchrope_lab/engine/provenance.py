"""Provenance of results: versions, commit and machine."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("torch", "torchvision", "pytorch-lightning", "torchmetrics", "scikit-learn", "numpy")


def provenance(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return versions, commit and machine of this process."""
    torchrope = importlib.metadata.version("torchrope")
    return {"torchrope": torchrope, "commit": commit(), "versions": versions(packages), "machine": machine()}


def commit() -> str | None:
    """Return the commit of the running source, with "-dirty" after local changes; None outside a repository."""
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        return _git(here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    installed = {"python": platform.python_version()}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def machine() -> dict[str, Any]:
    """Return processor, cores, memory, and the accelerator if there is one."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),  # GiB; the key is that of stored results
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "os": platform.system(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
