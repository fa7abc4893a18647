"""The record of verified GPU kernels: which kernel computed right results on which architecture, with which Triton.

`python -m torchrope verify` writes the record of a user; a committed one, for all users, lies beside this file.
"""

import json
import os
import warnings
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

COMMITTED = Path(__file__).with_name("verified_kernels.json")


@dataclass(frozen=True)
class Verified:
    """A kernel that computed right results.

    Attributes:
        kernel: Name of its operator, as "rotate_planar".
        architecture: As `architecture` names it.
        triton: Major and minor version of Triton, as "3.8".
        source: Digest of the kernels' source; a changed kernel must be verified again.
        error: Largest error as a share of the allowed one, 1 at most.
        speedup: Time of the compiled reference divided by that of the kernel; None if not measured.
    """

    kernel: str
    architecture: str
    triton: str
    source: str
    error: float
    speedup: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What must be equal for a kernel to be the verified one."""
        return self.kernel, self.architecture, self.triton, self.source


def is_verified(kernel: str, device_index: int) -> bool:
    """Return whether the committed record or the user's lists a kernel for a GPU and the installed Triton."""
    return (kernel, architecture(torch.device("cuda", device_index)), triton_version(), source_digest()) in _verified()


# torch.compile must evaluate this while tracing, and need not trace the reading of files.
is_verified._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _verified() -> frozenset[tuple[str, str, str, str]]:
    return frozenset(entry.key for path in (COMMITTED, users()) if path is not None for entry in read(path))


def users() -> Path | None:
    """Return the path of the user's record; None without a home directory, as under any uid in a container."""
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home, ".cache", "torchrope", "verified_kernels.json")


def read(path: Path) -> list[Verified]:
    """Read a record; one that is not there, as in a zip, is empty, one that is no record is empty with a warning."""
    try:
        return [Verified(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["kernels"]]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"ignored {path}, which is no record of kernels ({reason}): verify them again", stacklevel=2)
        return []


def merged(path: Path, entries: Iterable[Verified], kernels: Collection[str], name: str) -> str:
    """Return the text of a record with entries in the place of those of kernels, an architecture and this Triton."""
    here = name, triton_version()
    kept = [x for x in read(path) if x.kernel not in kernels or (x.architecture, x.triton) != here]
    rows = [asdict(entry) for entry in sorted([*kept, *entries], key=lambda entry: entry.key)]
    return json.dumps({"kernels": rows}, indent=1) + "\n"


def forget() -> None:
    """Read the records anew when they are next needed."""
    _verified.cache_clear()


@cache
def architecture(device: torch.device) -> str:
    """Name the architecture of a device: "sm_90", "gfx942", or "interpreter" for a CPU."""
    if device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@cache
def triton_version() -> str:
    """Return the major and minor version of the installed Triton."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


@cache
def source_digest() -> str:
    """Compute a digest of the source of all GPU kernels."""
    digest = sha256()
    for path in sorted((Path(__file__).parent / "gpu").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
