"""Encodings of papers that are another family with other settings; `parse_encoding` has them by name.

Each is called like its family, with num_axes, num_heads and head_dim.
"""

import math
from functools import partial

from torchrope.encodings.absolute import LearnedAPE
from torchrope.encodings.axial import AxialRoPE
from torchrope.encodings.comrope import CENTRES
from torchrope.encodings.golden import GoldenGateRoPE
from torchrope.encodings.liere import CORNERS, LieRE
from torchrope.encodings.mrope import MRoPE

dinov3 = partial(AxialRoPE, base=100.0, max_frequency=2 * math.pi, grouped=True, lattice=GoldenGateRoPE.lattice)
"""RoPE-Axial parametrised by periods:  φ_(a n + t) = 2π p_a / base^(t / n)  (Siméoni et al., DINOv3, section 3.2, and
its code, where pair j is channels j and j + head_dim / 2); `random_shift`, `random_scale` augment positions."""

visionllama = partial(AxialRoPE, min_frequency=math.exp(-4), grouped=True, lattice=CORNERS)
"""The baseline "VisionLlama RoPE" of LieRE's tables (arXiv:2406.10322), from its code ("inverse_exp"):
φ_(a n + t) = p_a e^(-4 t / (n - 1)), with 60 of 64 channels for three axes. VisionLLaMA (Chu et al., section 3.3) has
positions in patches and RoPE's base: `AxialRoPE(base=10_000.0)` on positions of `Lattice(spacing=n, per="size")`, n the
training size."""

comrope_rope = partial(AxialRoPE, base=10_000.0, lattice=CENTRES)
"""The baseline "vanilla RoPE" of ComRoPE's tables 3 and 4 (arXiv:2506.03737, supplement D.1, equation 33): pairs rotate
by 1 to 0.0002 radians across the image, those of RoPE-Axial by 13 to 0.17 across 14 patches. The published code groups
pairs by axis (the same scores for permuted channels) and has other frequencies, theta_base^n: 1, 0, 0, ... by default,
1, 1e-4, 1e-8, ... for 1e-4. Which of both made the tables is not known."""

comrope_liere = partial(LieRE, distribution="normal", lattice=CENTRES)
"""The baseline "LieRE" of ComRoPE's tables 3 and 4 (supplement D.2, equation 34). N(0, 1) for P is the default of the
published code (`init_std`), the supplement does not give it. There P is stored times `scale_factor`, whose default of
1e100 overflows float32, and another divides P's learning rate with Adam."""

mrope_interleaved = partial(MRoPE, order="interleaved")
"""M-RoPE of Bai et al., Qwen3-VL technical report, section 2 (interleaved MRoPE); transformers' `qwen3_vl`."""

videorope = partial(MRoPE, order="video")
"""Low-frequency temporal allocation of Wei et al., VideoRoPE, arXiv:2502.05173; its positions are `video_rope`."""

learned_jittered = partial(LearnedAPE, intensity=1.0)
"""ComRoPE's perturbed absolute encoding (table 3). Its code (`get_positions`) samples the table with aligned corners,
at (i + 1/2) (n - 1) / n for token i, also in evaluation, on two axes in the middle column only; here at each token."""
