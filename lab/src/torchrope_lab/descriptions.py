"""Titles, formulas and sources of encodings, as reports print them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from torchrope.encodings import BUILT_IN, Encoding, builders, built_class
from torchrope_lab.encodings import resolve_encoding


@dataclass(frozen=True)
class Description:
    """Description of an encoding.

    Attributes:
        title: Name in the literature.
        formula: Formula in one line of text.
        summary: One sentence.
        source: Paper and equation.
    """

    title: str
    formula: str = ""
    summary: str = ""
    source: str = ""


GENERAL = "R(p) = exp(Σₐ pₐ Aₐ)"
DESCRIPTIONS = {
    "none": Description(
        "none",
        "R(p) = I",
        "No positions: the model is invariant to the order of tokens. The baseline.",
        "Vaswani et al. 2017, without section 3.5",
    ),
    "axial": Description(
        "RoPE-Axial",
        "angle of pair j = p_{j mod N} · θ_{j div N},  θₜ = base^(−t/n) fixed",
        "RoPE with each pair of channels assigned to one axis; fixed frequencies, nothing learned.",
        "Heo et al., RoPE for Vision Transformer, eq. 12-13; one axis: Su et al., RoFormer, eq. 15",
    ),
    "mixed": Description(
        "RoPE-Mixed",
        "angle of pair j = Σₐ pₐ θₐⱼ,  θ learned",
        "RoPE with learned frequencies: each pair of channels rotates along its own learned direction.",
        "Heo et al., RoPE for Vision Transformer, eq. 14",
    ),
    "liere": Description(
        "LieRE",
        "R(p) = exp(Σₐ pₐ Aₐ),  Aₐ = Uₐ − Uₐᵀ unconstrained, block by block",
        "A learned generator per axis, unconstrained within blocks: more general than RoPE, not exactly relative.",
        "LieRE, ICLR 2025 submission, algorithm 1",
    ),
    "comrope-ap": Description(
        "ComRoPE-AP",
        "Aₐ = diagⱼ(Pⱼ − Pⱼᵀ if j mod N = a else 0)",
        "Learned blocks, each assigned to one axis, so that the generators commute and scores are relative.",
        "ComRoPE, axial partition; supplement E.2.3",
    ),
    "comrope-ld": Description(
        "ComRoPE-LD",
        "Aₐ = θₐ (P − Pᵀ) in each block,  θ and P learned",
        "One learned block for all axes, times a factor per axis: the generators commute, scores are relative.",
        "ComRoPE, linear dependence; supplement E.2.4",
    ),
    "string": Description(
        "STRING",
        "R(p) = P rot(Σₐ pₐ θₐ) Pᵀ,  P = (I − S)(I + S)⁻¹,  θ and S learned",
        "RoPE-Mixed in a learned orthogonal basis: the most general rotation whose scores are relative.",
        "Schenck et al., Learning the RoPEs (STRING), eq. 9-10",
    ),
    "golden": Description(
        "RoPE, golden gate",
        "angle of pair j, head h = ωⱼ ⟨uₕⱼ, p⟩,  uₕⱼ spread evenly, ωⱼ geometric, both fixed",
        "Fixed frequencies, each pair of channels along its own direction; directions are evenly distributed.",
        "J. Xiong, On N-dimensional Rotary Positional Embeddings, July 2025",
    ),
    "dinov3": Description(
        "RoPE, DINOv3",
        "angle of pair a·n + t = 2π pₐ / base^(t/n) fixed,  p in [−1, 1]",
        "RoPE-Axial parametrised by periods, on coordinates in [-1, 1] for every image; fixed frequencies.",
        "Siméoni et al., DINOv3, section 3.2",
    ),
    "mrope": Description(
        "M-RoPE",
        "angle of pair j = p_{axis(j)} · base^(−j/n) fixed,  axes in consecutive sections",
        "RoPE of text with its frequencies split into sections, one per axis; fixed frequencies.",
        "Wang et al., Qwen2-VL, section 2.1",
    ),
    "mrope-interleaved": Description(
        "M-RoPE, interleaved",
        "angle of pair j = p_{axis(j)} · base^(−j/n) fixed,  axes interleaved",
        "M-RoPE with interleaved axes, so that each has high and low frequencies; fixed.",
        "Bai et al., Qwen3-VL technical report",
    ),
    "mhrope": Description(
        "MHRoPE",
        "angle of pair j, head h = p_{axis(h)} · base^(−j/n) fixed",
        "Each head rotates along one axis, with all frequencies; fixed.",
        "Huang et al., Revisiting Multimodal Positional Encoding, arXiv:2510.23095",
    ),
    "videorope": Description(
        "VideoRoPE",
        "angle of pair j = p_{axis(j)} · base^(−j/n) fixed,  space interleaved first, time last",
        "M-RoPE with the high frequencies interleaved among spatial axes, the lowest ones for time; fixed.",
        "Wei et al., VideoRoPE, arXiv:2502.05173",
    ),
    "nd": Description(
        "nD-RoPE",
        "angle of pair (s, i) = base^(−s/S) ⟨Q uᵢ, p⟩,  uᵢ the vertices of a regular simplex, fixed",
        "Fixed frequencies along N + 1 directions that form a regular simplex, at several scales.",
        "Li et al., nD-RoPE, arXiv:2606.12146",
    ),
    "spiral": Description(
        "Spiral RoPE",
        "angle of a pair of group k = θₜ ⟨(cos kπ/K, sin kπ/K), p⟩ fixed",
        "Fixed frequencies along K directions evenly spaced over 180 degrees, a group of channels for each.",
        "Liu et al., Spiral RoPE, arXiv:2602.03227",
    ),
    "drope": Description(
        "DRoPE",
        "angle of pair j = ψ, the heading; other pairs as RoPE-Axial",
        "RoPE-Axial for the position, and pairs that rotate by the heading angle, periodic in 2π; fixed.",
        "Zhao et al., DRoPE, arXiv:2503.15029, sections III and IV",
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
    "sphere": Description(
        "spherical harmonics",
        "q′ᵀk′ = Σ_c q_c k_c P_{l(c)}(cos γ),  γ the angle between two positions",
        "No rotation: each channel's product is weighted by a Legendre polynomial of the great-circle angle.",
        "the addition theorem: Müller, Spherical Harmonics, theorem 2",
    ),
    "harope": Description(
        "HARoPE",
        "q′ = R(p) M q,  k′ = R(p) M⁻ᵀ k,  M = U diag(s) Vᵀ learned",
        "RoPE-Axial after a learned invertible map per head; scores stay relative.",
        "Li et al., Head-wise Adaptive Rotary Positional Encoding, arXiv:2510.10489",
    ),
    "pape": Description(
        "PaPE",
        "qᵀk + Σᵢ −aᵢ (uᵢ − u′ᵢ)² + bᵢ (uᵢ − u′ᵢ),  uᵢ = ⟨wᵢ, p⟩,  a and b of the query's token",
        "Parabolas of the offset, with coefficients from the query, added to the scores by extra channels.",
        "Øhrstrøm et al., Parabolic Position Encoding, arXiv:2602.01418",
    ),
    "pape-ri": Description(
        "PaPE-RI",
        "qᵀk − a sₕ² |p − p′|²,  a of the query's token",
        "A parabola of the distance, with a curvature from the query, added to the scores by extra channels.",
        "Øhrstrøm et al., Parabolic Position Encoding, arXiv:2602.01418",
    ),
    "learned": Description(
        "learned APE",
        "xₚ + T[p],  T learned",
        "A learned vector per position, added to the token; resampled at other sizes. The encoding of ViT.",
        "Dosovitskiy et al., An Image is Worth 16x16 Words, section 3.1",
    ),
    "sinusoidal": Description(
        "sinusoidal APE",
        "xₚ + (sin pₐωₜ, cos pₐωₜ),  ωₜ = base^(−t/n) fixed",
        "Fixed sines and cosines of the position, added to the token; nothing learned.",
        "Vaswani et al., Attention Is All You Need, section 3.5",
    ),
    "learned-jittered": Description(
        "learned APE, jittered",
        "xₚ + T[p + noise] in training,  T learned",
        "A learned vector per position, in training looked up near it: ComRoPE's perturbed absolute encoding.",
        "ComRoPE, table 3",
    ),
    "bias": Description(
        "relative position bias",
        "softmax(qᵀk/√d + T[p − p′]) v,  T learned",
        "A learned number per head and offset, added to the scores. The encoding of Swin.",
        "Liu et al., Swin Transformer, equation 4",
    ),
    "lookhere": Description(
        "LookHere",
        "softmax(qᵀk/√d − sₕ |p − p′|), masked beyond the field of view of head h",
        "Each head attends to a half space or a quarter, with a penalty on distance; fixed.",
        "Fuller et al., LookHere, NeurIPS 2024, arXiv:2405.13985",
    ),
    "alibi": Description(
        "ALiBi",
        "softmax(qᵀk/√d − mₕ ‖p − p′‖) v,  mₕ = 2^(−8h/H)",
        "A fixed penalty on distance, different for each head.",
        "Press et al., ALiBi, ICLR 2022, arXiv:2108.12409; Fuller et al., CROMA, arXiv:2311.00566",
    ),
    "fire": Description(
        "FIRE",
        "softmax(qᵀk/√d + fₕ(log(c ‖p − p′‖ + 1) / log(c max(P, L) + 1))) v,  f, c, L learned",
        "A learned function of the distance relative to the largest one, added to the scores.",
        "Li et al., FIRE, ICLR 2024, arXiv:2310.04418",
    ),
    "pose": Description(
        "poses",
        "A(g) = diag(P⁻¹, …, P⁻¹, R(p))",
        "The pose of each view is applied to queries, keys, values and outputs; only relative poses matter.",
        "Li et al., arXiv:2507.10496, section 3.3; Miyato et al. (GTA), arXiv:2310.10375, section 3.1",
    ),
    "camera-numbers": Description("numbers of cameras"),
}
"""Descriptions by the name of an encoding without its number."""


def description_of(part: str) -> Description:
    """Return the description of one part of an encoding's name; of a user-defined class from its attributes."""
    base = part.strip() if part.strip() in builders() else part.strip().rpartition(":")[0] or part.strip()
    base = base if base in builders() else base.lower()
    if base in DESCRIPTIONS:
        return DESCRIPTIONS[base]
    build = builders()[base]
    cls = built_class(build)
    return Description(base) if cls is None else _of_class(cls)


def _of_class(cls: type) -> Description:
    """Return the description by a class's attributes; without them that of the nearest built-in base class."""
    bases = (name for base in cls.__mro__ for name, build in builders().items() if build is base and name in BUILT_IN)
    nearest = DESCRIPTIONS.get(next(bases, ""), Description("", GENERAL if issubclass(cls, Encoding) else ""))
    others = {name: getattr(cls, name, getattr(nearest, name)) for name in ("formula", "summary", "source")}
    return Description(vars(cls).get("title") or cls.__name__, **others)


def title_of(encoding: nn.Module) -> str:
    """Return the title of an encoding by its class and settings."""
    cls = type(encoding)
    names = [name for name, build in builders().items() if name in BUILT_IN and _builds(build, encoding)]
    nearest = max(names, key=lambda name: len(_settings(builders()[name])), default=None)
    return _of_class(cls).title if nearest is None else DESCRIPTIONS[nearest].title


def _builds(build: Any, encoding: nn.Module) -> bool:
    settings = _settings(build)
    return built_class(build) is type(encoding) and all(getattr(encoding, key) == settings[key] for key in settings)


def _settings(build: Any) -> dict[str, Any]:
    return build.keywords if isinstance(build, partial) else {}


def named_parts(name: str) -> list[str]:
    """Split an encoding's name into its parts: absolute, bias, rotary; "none" only if it is the only part.

    Raises:
        ValueError: a part that `resolve_encoding` rejects.
    """
    parts = [part.strip() for part in name.split("+")]
    choices = {part: resolve_encoding(part) for part in parts}
    ordered = sorted(parts, key=lambda part: (choices[part].absolute is None, choices[part].bias is None))
    return [part for part in ordered if part.lower() != "none"] or ["none"]
