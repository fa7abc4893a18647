"""torchrope: rotary position encodings for data with any number of axes.

    p   = torchrope.grid(14, 14, spacing=1 / 14)                                   # positions (196, 2) in [0, 1)
    enc = torchrope.LieRE(num_axes=2, num_heads=12, head_dim=64, block_size=8)     # an encoding: parameters
    q, k = torchrope.rotate(q, k, enc(p))                                          # R(p) q, R(p) k

Names are imported on first use, so that `torchrope --help` does not import torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from torchrope._version import __version__ as __version__

if TYPE_CHECKING:
    from torchrope import encodings as encodings
    from torchrope import integrations as integrations
    from torchrope import models as models
    from torchrope import ops as ops
    from torchrope import positions as positions
    from torchrope import rotations as rotations
    from torchrope import scaling as scaling
    from torchrope import testing as testing
    from torchrope.attention import Attention as Attention
    from torchrope.encodings import STRING as STRING
    from torchrope.encodings import AxialRoPE as AxialRoPE
    from torchrope.encodings import ComRoPEAP as ComRoPEAP
    from torchrope.encodings import ComRoPELD as ComRoPELD
    from torchrope.encodings import Encoding as Encoding
    from torchrope.encodings import LearnedAPE as LearnedAPE
    from torchrope.encodings import LieRE as LieRE
    from torchrope.encodings import MixedRoPE as MixedRoPE
    from torchrope.encodings import NoEncoding as NoEncoding
    from torchrope.encodings import RelativePositionBias as RelativePositionBias
    from torchrope.encodings import SinusoidalAPE as SinusoidalAPE
    from torchrope.encodings import parse_encoding as parse_encoding
    from torchrope.encodings import register_encoding as register_encoding
    from torchrope.inference import absorb as absorb
    from torchrope.inference import freeze as freeze
    from torchrope.inference import rerotate as rerotate
    from torchrope.integrations.checkpoints.published import load_published as load_published
    from torchrope.integrations.checkpoints.saving import load as load
    from torchrope.integrations.checkpoints.saving import save as save
    from torchrope.integrations.extend import extend as extend
    from torchrope.integrations.inflate import inflate as inflate
    from torchrope.integrations.swap import swap as swap
    from torchrope.integrations.swap import unswap as unswap
    from torchrope.lattice import Lattice as Lattice
    from torchrope.linear_attention import LinearAttention as LinearAttention
    from torchrope.models import Features as Features
    from torchrope.models import Swin as Swin
    from torchrope.models import Transformer as Transformer
    from torchrope.models import ViT as ViT
    from torchrope.ops import backend as backend
    from torchrope.positions import Packed as Packed
    from torchrope.positions import grid as grid
    from torchrope.positions import pack as pack
    from torchrope.positions import prefix as prefix
    from torchrope.rotating import apply as apply
    from torchrope.rotating import rotate as rotate
    from torchrope.rotations import Rotation as Rotation

_MOVED_TO = {
    "encodings": "AbsoluteEncoding DRoPE GoldenGateRoPE LookHere MRoPE MultiHeadRoPE Periodic "
    "ScoreBias SimplexRoPE SpiralRoPE",
    "models": "pad",
    "ops": "skew_exp",
    "positions": "jitter patch_centers random_shift rescale shift windows wrap",
    "rotations": "Block Commuting Planar PlanarInBasis",
    "scaling": "interpolate ntk yarn yarn_temperature",
}
_MOVED = {
    "DINOv3RoPE": "encodings.baselines.dinov3",
    "InterleavedMRoPE": "encodings.baselines.mrope_interleaved",
    "JitteredAPE": "encodings.baselines.learned_jittered",
    "NormalLieRE": "encodings.baselines.comrope_liere",
    "VanillaRoPE": "encodings.baselines.comrope_rope",
    "VideoRoPE": "encodings.baselines.videorope",
    "VisionLLaMARoPE": "encodings.baselines.visionllama",
    "anchor": "positions.rescale_to",
    "around_text": "positions.circle_rope",
    "diagonal": "positions.video_rope",
    "on_circles": "positions.to_circle",
    "random_rescale": "positions.random_scale",
    "random_stretch": "positions.random_scale",
    "rotate_one": "apply",
} | {name: f"{module}.{name}" for module, names in _MOVED_TO.items() for name in names.split()}
"""Former public names, with their place below torchrope."""
_MODULE_OF = {
    name.name: statement.module
    for block in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    for statement in (block.body if isinstance(block, ast.If) else [])
    if isinstance(statement, ast.ImportFrom) and statement.module
    for name in statement.names
}
"""The module of each public name, read from the imports above, which type checkers follow and Python skips."""
__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> object:
    """Import a public name from its module on first access (PEP 562)."""
    if name in _MOVED:
        raise AttributeError(f"torchrope.{name} is torchrope.{_MOVED[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'torchrope' has no attribute {name!r}")
    module = _MODULE_OF[name]
    value = import_module(f"torchrope.{name}") if module == "torchrope" else getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
