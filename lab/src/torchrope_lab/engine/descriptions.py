"""Descriptions of data and encodings, as reports print them: titles, formulas, sources."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from torchrope.encodings import BUILT_IN, Encoding, builders, built_class, takes
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import DataFacts
from torchrope_lab.statistics import constant_accuracy


@dataclass(frozen=True)
class Description:
    """Description of an encoding."""

    title: str  # name in the literature
    formula: str = ""  # in one line of text
    summary: str = ""  # one sentence
    source: str = ""  # paper and equation


GENERAL = "R(p) = exp(Σₐ pₐ Aₐ)"
TITLES = {
    "none": "none",
    "axial": "RoPE-Axial",
    "mixed": "RoPE-Mixed",
    "liere": "LieRE",
    "comrope-ap": "ComRoPE-AP",
    "comrope-ld": "ComRoPE-LD",
    "string": "STRING",
    "golden": "RoPE, golden gate",
    "mrope": "M-RoPE",
    "mhrope": "MHRoPE",
    "nd": "nD-RoPE",
    "spiral": "Spiral RoPE",
    "drope": "DRoPE",
    "learned": "learned APE",
    "sinusoidal": "sinusoidal APE",
    "bias": "relative position bias",
    "lookhere": "LookHere",
    "alibi": "ALiBi",
    "fire": "FIRE",
}
"""Names in the literature of the encodings that are classes, whose docstrings describe them."""
VARIANTS = {
    "dinov3": Description(
        "RoPE, DINOv3",
        "angle of pair a·n + t = 2π pₐ / base^(t/n) fixed,  p in [−1, 1]",
        "RoPE-Axial parametrised by periods, on coordinates in [-1, 1] for every image; fixed frequencies.",
        "Siméoni et al., DINOv3, section 3.2",
    ),
    "mrope-interleaved": Description(
        "M-RoPE, interleaved",
        "angle of pair j = p_{axis(j)} · base^(−j/n) fixed,  axes interleaved",
        "M-RoPE with interleaved axes, so that each has high and low frequencies; fixed.",
        "Bai et al., Qwen3-VL technical report",
    ),
    "videorope": Description(
        "VideoRoPE",
        "angle of pair j = p_{axis(j)} · base^(−j/n) fixed,  space interleaved first, time last",
        "M-RoPE with the high frequencies interleaved among spatial axes, the lowest ones for time; fixed.",
        "Wei et al., VideoRoPE, arXiv:2502.05173",
    ),
    "visionllama": Description(
        "RoPE, VisionLLaMA",
        "angle of pair a·n + t = pₐ · e^(−4t/(n−1)) fixed,  p in [0, 1)",
        "Fixed frequencies on positions in [0, 1), each pair of channels along one axis: LieRE's baseline.",
        "LieRE, baseline VisionLlama RoPE; after Chu et al., VisionLLaMA",
    ),
    "comrope-rope": Description(
        "RoPE, ComRoPE's baseline",
        "angle of pair j = p_{j mod N} · 10000^(−(j div N)/n) fixed,  p in [0, 1]",
        "RoPE-Axial with base 10,000 on positions in [0, 1], the baseline of ComRoPE's tables; fixed frequencies.",
        "ComRoPE, supplement D.1",
    ),
    "comrope-liere": Description(
        "LieRE, ComRoPE's baseline",
        "R(p) = exp(Σₐ pₐ Aₐ),  Aₐ = Pₐ − Pₐᵀ free, block by block,  P from N(0, 1)",
        "LieRE initialised from a normal distribution on positions in [0, 1], the baseline of ComRoPE's tables.",
        "ComRoPE, supplement D.2",
    ),
    "learned-jittered": Description(
        "learned APE, jittered",
        "xₚ + T[p + noise] in training,  T learned",
        "A learned vector per position, in training looked up near it: ComRoPE's perturbed absolute encoding.",
        "ComRoPE, table 3",
    ),
}
"""Descriptions of classes with other settings."""


def description_of(part: str) -> Description:
    """Return the description of one part of an encoding's name; of a user-defined class from its attributes."""
    base = part.strip() if part.strip() in builders() else part.strip().rpartition(":")[0] or part.strip()
    base = base if base in builders() else base.lower()
    if base in VARIANTS:
        return VARIANTS[base]
    cls = built_class(builders()[base])
    if cls is None:
        return Description(base)
    return replace(_of_docstring(cls), title=TITLES[base]) if base in TITLES else _of_class(cls)


def _of_docstring(cls: type) -> Description:
    """Read "summary:  formula." of a docstring, whose formula may be the second paragraph, and its References."""
    text = inspect.getdoc(cls) or ""
    first, second, *_ = (" ".join(paragraph.split("\n")) for paragraph in [*text.split("\n\n"), ""])
    summary, _, formula = first.removesuffix(":").partition(":  ")
    formula, _, remark = (formula or (" ".join(second.split()) if first.endswith(":") else "")).partition(".  ")
    source = re.search(r"^References:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    summary = ". ".join(filter(None, [summary.removesuffix("."), remark.removesuffix(".")]))
    return Description("", formula.rstrip(".,"), f"{summary}.", " ".join(source[1].split()) if source else "")


def _of_class(cls: type) -> Description:
    """Return the description by a class's attributes; without them that of the nearest built-in base class."""
    bases = (base for base in cls.__mro__ for name, build in builders().items() if build is base and name in BUILT_IN)
    base = next(bases, None)
    nearest = Description("", GENERAL if issubclass(cls, Encoding) else "") if base is None else _of_docstring(base)
    others = {name: getattr(cls, name, getattr(nearest, name)) for name in ("formula", "summary", "source")}
    return Description(vars(cls).get("title") or cls.__name__, **others)


def title_of(encoding: nn.Module) -> str:
    """Return the title of an encoding by its class and settings."""
    cls = type(encoding)
    names = [name for name, build in builders().items() if name in BUILT_IN and _builds(build, encoding)]
    nearest = max(names, key=lambda name: len(_settings(builders()[name])), default=None)
    return _of_class(cls).title if nearest is None else description_of(nearest).title


def _builds(build: Any, encoding: nn.Module) -> bool:
    settings = _settings(build)
    return built_class(build) is type(encoding) and all(getattr(encoding, key) == settings[key] for key in settings)


def _settings(build: Any) -> dict[str, Any]:
    return build.keywords if isinstance(build, partial) else {}


def named_parts(name: str) -> list[str]:
    """Split an encoding's name into its parts: absolute, bias, rotary; "none" only if it is the only part."""
    parts = [part.strip() for part in name.split("+")]
    choices = {part: resolve_encoding(part) for part in parts}
    ordered = sorted(parts, key=lambda part: (choices[part].absolute is None, choices[part].bias is None))
    return [part for part in ordered if part.lower() != "none"] or ["none"]


def describe_data(data: DataModule) -> DataFacts:
    """Return name, sizes, counts and classes of data that is set up, and the files skipped."""
    train, val = data.counts
    return DataFacts(
        name=data.name,
        title=data.title,
        description=data.description,
        axes=list(data.axes),
        input_size=list(data.input_size),
        num_classes=data.num_classes,
        train=train,
        val=val,
        classes=[str(name) for name in data.classes],
        chance=constant_accuracy(data.val_labels) if "classify" in data.tasks else None,
        skipped=describe_skipped(dict(data.skipped)),
        unread=data.unread,
    )


def describe_skipped(faults: Mapping[str, str]) -> list[str]:
    """List files that could not be read, each with the reason."""
    return [f"{path} ({reason})" for path, reason in faults.items()]


def label(encoding: str) -> str:
    """Return the display name of an encoding."""
    block = encoding.rpartition(":")[2]
    sized = f", blocks of {block}" if block.isdecimal() else ""
    return " + ".join(description_of(part).title for part in named_parts(encoding)) + sized


def label_of(model: nn.Module, rotary: Encoding | None) -> str:
    """Return the display name of a model's rotary encoding, absolute encoding and bias; of other libraries' models too.

    Example:
        >>> import torchrope as tr
        >>> model = tr.ViT((8, 8), patch_size=2, dim=32, depth=1, num_heads=2, encoding="learned+liere:8")
        >>> label_of(model, model.encodings[0])
        'learned APE + LieRE, blocks of 8'
    """
    biases: Any = getattr(model, "biases", None) or [
        bias for stage in getattr(model, "stages", []) for bias in getattr(stage, "biases", [])
    ]
    parts = [getattr(model, "absolute", None), *biases[:1], rotary]
    titles = [title_of(part) for part in parts if part is not None] or [TITLES["none"]]
    sized = rotary is not None and takes(type(rotary), "block_size")
    return " + ".join(titles) + (f", blocks of {rotary.block_size}" if rotary is not None and sized else "")
