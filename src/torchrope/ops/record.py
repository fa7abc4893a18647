"""The record of verified GPU kernels: which specialisation computed right results on which architecture and Triton.

`python -m torchrope verify` writes the record of a user; one for all lies here, empty until the kernels ran on a GPU.
"""

import json
import os
import re
import warnings
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

COMMITTED = Path(__file__).with_name("verified_kernels.json")

MODULES = {
    "rotate_planar": "planar",
    "rotate_basis": "basis",
    "skew_eig": "decomposition",
    "rotate_block": "block",
    "exp_generators": "exponential",
    "skew_exp": "exponential",
}
"""The module of `torchrope.ops.gpu` with the kernels of an operator and of its gradient."""


class Specialisation(NamedTuple):
    """What fixes the binaries that an operator and its gradient launch, for any number of samples, heads and tokens.

    Attributes:
        kernel: Name of the operator.
        dtype: dtype of q and k; "" for operators without them, and for an encoding, which does not know them.
        channels: head_dim of q and k, or 0.
        blocks: Number of blocks that are rotated; of pairs.
        b: Size of a block; 2 for pairs.
        axes: Axes of the positions; 0 for angles and for matrices.
        halves: Whether the channels of a pair are in two halves of those rotated.
        wanted: Names of what else than q and k gets a gradient, joined by "+".
    """

    kernel: str
    dtype: str = ""
    channels: int = 0
    blocks: int = 0
    b: int = 2
    axes: int = 0
    halves: bool = False
    wanted: str = ""

    def __str__(self) -> str:
        """Return what `--shape` takes: the fields that are not the default."""
        fields = [(name, x) for name, x in self._asdict().items() if x != self._field_defaults.get(name)]
        return ",".join(f"{name}={x:d}" if isinstance(x, int) else f"{name}={x}" for name, x in fields)

    @classmethod
    def parse(cls, text: str) -> "Specialisation":
        """Read what `str` returns; ValueError with the rule for anything else."""
        kinds: dict[str, Any] = {"kernel": str, "dtype": str, "halves": lambda x: x == "1", "wanted": str}
        try:
            fields = dict(field.split("=") for field in text.split(","))
            return cls(**{name: kinds.get(name, int)(value) for name, value in fields.items()})
        except (ValueError, TypeError):
            rule = f"a shape must be kernel=NAME and some of {', '.join(f'{name}=' for name in cls._fields[1:])}"
            raise ValueError(
                f"{rule} as kernel=rotate_planar,dtype=float32,channels=64,blocks=32, got {text}"
            ) from None


_NAMES = {"rotate_planar": ("positions", "frequencies"), "rotate_basis": ("positions",), "rotate_block": ("table",)}


def specialisation(kernel: str, tensors: Sequence[Tensor], halves: bool = False) -> Specialisation:
    """Return the specialisation of an operator for q, k (unless an encoding chooses it) and what they are rotated by.

    That is positions, or angles, and frequencies; positions, factors and base; a table; positions and generators. The
    launches of kernels, `torchrope.backend("auto")` and `verify` take it from here.
    """
    q, last, b = tensors[0], tensors[-1], tensors[-1].shape[-1]
    if kernel == "skew_exp":
        return Specialisation(kernel, b=b)
    of_axis = {"rotate_planar": 3, "rotate_basis": -2, "skew_eig": -2, "exp_generators": 1}.get(kernel)
    axes = 0 if of_axis is None else tensors[of_axis].shape[0]  # none for angles
    blocks, b = (b, 2) if kernel == "rotate_planar" else (last.shape[-3], b)
    if kernel != "rotate_planar" and len(tensors) != {"rotate_basis": 5, "rotate_block": 3}.get(kernel):
        return Specialisation(kernel, "", 0, blocks, b, axes)
    named = zip(_NAMES[kernel], tensors[2:], strict=False)
    wanted = "+".join([name for name, x in named if x.requires_grad])
    return Specialisation(kernel, str(q.dtype).removeprefix("torch."), q.shape[-1], blocks, b, axes, halves, wanted)


class Verified(NamedTuple):
    """A specialisation that computed right results.

    Attributes:
        specialisation: As `str` of a `Specialisation` writes it.
        architecture: As `architecture` names it.
        triton: Major and minor version of Triton, as "3.8".
        source: `digest` of the kernel; a changed one must be verified again.
        error: Largest error as a share of the allowed one, 1 at most.
    """

    specialisation: str
    architecture: str
    triton: str
    source: str
    error: float


def is_verified(device_index: int, *fields: str | int | bool) -> bool:
    """Return whether a record lists a specialisation for a GPU and the installed Triton; if not, say so once."""
    wanted = Specialisation(*fields)  # type: ignore[arg-type]
    name = architecture(torch.device("cuda", device_index))
    if wanted in _verified(name):
        return True
    _tell_unverified(name, wanted)
    return False


# torch.compile must evaluate this while tracing, and need not trace the reading of files.
is_verified._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _verified(name: str) -> frozenset[Specialisation]:
    """Read what is verified on an architecture, also without what an encoding does not know of q and k."""
    listed = [entry for path in (COMMITTED, user_record()) if path is not None for entry in read(path)]
    exact = [Specialisation.parse(x.specialisation) for x in listed if x.architecture == name and is_current(x)]
    return frozenset(exact + [x._replace(dtype="", channels=0, wanted="") for x in exact if x.dtype])


def is_current(entry: Verified) -> bool:
    """Return whether an entry is of the installed Triton and kernels."""
    source = digest(Specialisation.parse(entry.specialisation).kernel)
    return (entry.triton, entry.source) == (triton_version(), source)


_TOLD: list[Specialisation] = []


def _tell_unverified(name: str, wanted: Specialisation) -> None:
    """Warn, once per process, which implementation a GPU uses and how to change it."""
    if not _TOLD:
        _TOLD.append(wanted)
        used = f"torchrope rotates in plain PyTorch on this GPU ({name}), for which no Triton kernel is verified"
        warnings.warn(f"{used}: python -m torchrope verify --shape {wanted}", stacklevel=2)


def user_record() -> Path | None:
    """Return the path of the user's record; None without a home directory, as under any uid in a container."""
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home, ".cache", "torchrope", "verified_kernels.json")


def read(path: Path) -> list[Verified]:
    """Read a record; one that is not there, as in a zip, is empty, one that is no record is empty with a warning."""
    try:
        entries = [Verified(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["kernels"]]
        return [entry for entry in entries if Specialisation.parse(entry.specialisation).kernel in MODULES]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"ignored {path}, which is no record of kernels ({reason}): verify them again", stacklevel=2)
        return []


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
def digest(kernel: str) -> str:
    """Compute a digest of the source of a kernel and of the modules of `torchrope.ops.gpu` that it imports."""
    return sha256("".join(text for _, text in sorted(sources(MODULES[kernel]).items())).encode()).hexdigest()[:16]


def sources(module: str) -> dict[str, str]:
    """Return the texts of a module of `torchrope.ops.gpu` and of those that it imports, by name."""
    texts = {module: (Path(__file__).parent / "gpu" / f"{module}.py").read_text(encoding="utf-8")}
    for imported in re.findall(r"^from torchrope\.ops\.gpu\.(\w+) import", texts[module], re.MULTILINE):
        texts |= sources(imported)
    return texts
