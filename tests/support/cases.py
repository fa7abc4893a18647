"""Encodings to test every property on: each family, one to four axes, small and full blocks, shared and partial."""

from collections.abc import Callable
from functools import partial

import torchrope as tr
from torchrope.encodings import Encoding, baselines


class Zero:
    """Start from zero generators."""

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        self.zero_()  # type: ignore[attr-defined]


class ZeroLieRE(Zero, tr.LieRE):
    pass


class ZeroSTRING(Zero, tr.STRING):
    pass


class ZeroComRoPELD(Zero, tr.ComRoPELD):
    pass


CASES: dict[str, Callable[[], Encoding]] = {
    "none-N2": partial(tr.NoEncoding, num_axes=2, num_heads=2, head_dim=8),
    "none-N3-odd-one-head": partial(tr.NoEncoding, num_axes=3, head_dim=7),
    "axial-N1": partial(tr.AxialRoPE, num_axes=1, num_heads=2, head_dim=8),
    "axial-N2": partial(tr.AxialRoPE, num_axes=2, num_heads=2, head_dim=8),
    "axial-N3-rest": partial(tr.AxialRoPE, num_axes=3, num_heads=2, head_dim=16, rotary_dim=12),
    "axial-N4-one-head": partial(tr.AxialRoPE, num_axes=4, head_dim=16),
    "mixed-N1": partial(tr.MixedRoPE, num_axes=1, num_heads=2, head_dim=8),
    "mixed-N2": partial(tr.MixedRoPE, num_axes=2, num_heads=2, head_dim=8),
    "mixed-N3-rest": partial(tr.MixedRoPE, num_axes=3, num_heads=2, head_dim=8, rotary_dim=6),
    "mixed-N4-shared": partial(tr.MixedRoPE, num_axes=4, num_heads=3, head_dim=8, shared_heads=True),
    "liere2-N2": partial(tr.LieRE, num_axes=2, num_heads=2, head_dim=8, block_size=2),
    "liere3-N3": partial(tr.LieRE, num_axes=3, num_heads=2, head_dim=9, block_size=3),
    "liere4-N1": partial(tr.LieRE, num_axes=1, num_heads=2, head_dim=8, block_size=4),
    "liere4-N2-rest": partial(tr.LieRE, num_axes=2, num_heads=2, head_dim=10, block_size=4, rotary_dim=8),
    "liere8-N4-shared": partial(tr.LieRE, num_axes=4, num_heads=2, head_dim=16, block_size=8, shared_heads=True),
    "liere-full-N2": partial(tr.LieRE, num_axes=2, num_heads=2, head_dim=16),
    "liere-zeros-N2": partial(ZeroLieRE, num_axes=2, num_heads=2, head_dim=8),
    "comrope-ap2-N2": partial(tr.ComRoPEAP, num_axes=2, num_heads=2, head_dim=8, block_size=2),
    "comrope-ap4-N1": partial(tr.ComRoPEAP, num_axes=1, num_heads=2, head_dim=8, block_size=4),
    "comrope-ap4-N3": partial(tr.ComRoPEAP, num_axes=3, num_heads=2, head_dim=12, block_size=4),
    "comrope-ap8-N2-shared": partial(tr.ComRoPEAP, num_axes=2, num_heads=2, head_dim=16, shared_heads=True),
    "comrope-ap3-N4-rest": partial(tr.ComRoPEAP, num_axes=4, num_heads=2, head_dim=16, block_size=3, rotary_dim=12),
    "comrope-ld2-N3": partial(tr.ComRoPELD, num_axes=3, num_heads=2, head_dim=8, block_size=2),
    "comrope-ld4-N1": partial(tr.ComRoPELD, num_axes=1, num_heads=2, head_dim=8, block_size=4),
    "comrope-ld8-N2": partial(tr.ComRoPELD, num_axes=2, num_heads=2, head_dim=16),
    "comrope-ld5-N4-rest": partial(tr.ComRoPELD, num_axes=4, num_heads=2, head_dim=16, block_size=5, rotary_dim=15),
    "comrope-ld4-N2-zeros-shared": partial(
        ZeroComRoPELD, num_axes=2, num_heads=2, head_dim=8, block_size=4, shared_heads=True
    ),
    "string-N2": partial(tr.STRING, num_axes=2, num_heads=2, head_dim=8),
    "string4-N3-rest": partial(tr.STRING, num_axes=3, num_heads=2, head_dim=10, block_size=4, rotary_dim=8),
    "string2-N1": partial(tr.STRING, num_axes=1, num_heads=2, head_dim=8, block_size=2),
    "string-N4-shared": partial(tr.STRING, num_axes=4, num_heads=3, head_dim=12, shared_heads=True),
    "string-zeros-N2": partial(ZeroSTRING, num_axes=2, num_heads=2, head_dim=8),
    "golden-N1": partial(tr.encodings.GoldenGateRoPE, num_axes=1, num_heads=2, head_dim=8),
    "golden-N2-zero_fraction": partial(
        tr.encodings.GoldenGateRoPE, num_axes=2, num_heads=2, head_dim=8, zero_fraction=0.25
    ),
    "golden-N3-rest": partial(tr.encodings.GoldenGateRoPE, num_axes=3, num_heads=2, head_dim=10, rotary_dim=8),
    "golden-N4-one-head": partial(tr.encodings.GoldenGateRoPE, num_axes=4, head_dim=8),
    "dinov3-N2": partial(baselines.dinov3, num_axes=2, num_heads=2, head_dim=8),
    "dinov3-N3-rest": partial(baselines.dinov3, num_axes=3, num_heads=2, head_dim=16, rotary_dim=12),
    "mrope-N1": partial(tr.encodings.MRoPE, num_axes=1, num_heads=2, head_dim=8),
    "mrope-N3": partial(tr.encodings.MRoPE, num_axes=3, num_heads=2, head_dim=16, sections=(2, 3, 3)),
    "mrope-N2-rest": partial(tr.encodings.MRoPE, num_axes=2, num_heads=2, head_dim=12, rotary_dim=10, sections=(5, 0)),
    "mrope-interleaved-N3": partial(
        baselines.mrope_interleaved, num_axes=3, num_heads=2, head_dim=16, sections=(4, 2, 2)
    ),
    "mrope-interleaved-N4": partial(baselines.mrope_interleaved, num_axes=4, num_heads=2, head_dim=12),
    "mhrope-N1": partial(tr.encodings.MultiHeadRoPE, num_axes=1, num_heads=2, head_dim=8),
    "mhrope-N2-rest": partial(
        tr.encodings.MultiHeadRoPE, num_axes=2, num_heads=3, head_dim=8, rotary_dim=6, sections=(1, 1)
    ),
    "videorope-N1": partial(baselines.videorope, num_axes=1, num_heads=2, head_dim=8),
    "videorope-N3": partial(baselines.videorope, num_axes=3, num_heads=2, head_dim=16, sections=(4, 2, 2)),
    "nd-N1": partial(tr.encodings.SimplexRoPE, num_axes=1, num_heads=2, head_dim=8),
    "nd-N2": partial(tr.encodings.SimplexRoPE, num_axes=2, num_heads=2, head_dim=12),
    "nd-N3-rest-one-head": partial(tr.encodings.SimplexRoPE, num_axes=3, head_dim=20, rotary_dim=16),
    "spiral-N2": partial(tr.encodings.SpiralRoPE, num_axes=2, num_heads=2, head_dim=16),
    "spiral-N2-rest": partial(
        tr.encodings.SpiralRoPE, num_axes=2, num_heads=2, head_dim=14, rotary_dim=12, num_directions=6
    ),
    "drope-N1": partial(tr.encodings.DRoPE, num_axes=1, num_heads=2, head_dim=8),
    "drope-N3-one-head": partial(tr.encodings.DRoPE, num_axes=3, head_dim=12),
    "visionllama-N2": partial(baselines.visionllama, num_axes=2, num_heads=2, head_dim=8),
    "visionllama-N3-rest": partial(baselines.visionllama, num_axes=3, num_heads=2, head_dim=16, rotary_dim=12),
    "comrope-rope-N2": partial(baselines.comrope_rope, num_axes=2, num_heads=2, head_dim=8),
    "comrope-liere4-N2": partial(baselines.comrope_liere, num_axes=2, num_heads=2, head_dim=8, block_size=4),
}
