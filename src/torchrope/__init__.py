"""torchrope: rotary position encodings for data with any number of axes.

    p   = torchrope.grid(14, 14, spacing=1 / 14)                                   # positions (196, 2) in [0, 1)
    enc = torchrope.LieRE(num_axes=2, num_heads=12, head_dim=64, block_size=8)     # an encoding: parameters
    q, k = torchrope.rotate(q, k, enc(p))                                          # R(p) q, R(p) k

Importing it needs torch alone.
"""

from torchrope import encodings as encodings
from torchrope import integrations as integrations
from torchrope import models as models
from torchrope import ops as ops
from torchrope import positions as positions
from torchrope import rotations as rotations
from torchrope import scaling as scaling
from torchrope import testing as testing
from torchrope._version import __version__
from torchrope.attention import Attention
from torchrope.checkpoints.published import load_published
from torchrope.checkpoints.saving import load, save
from torchrope.encodings import (
    STRING,
    AxialRoPE,
    ComRoPEAP,
    ComRoPELD,
    Encoding,
    LearnedAPE,
    LieRE,
    MixedRoPE,
    NoEncoding,
    RelativePositionBias,
    SinusoidalAPE,
    register_encoding,
)
from torchrope.inference import absorb, freeze, rerotate
from torchrope.integrations.extend import extend
from torchrope.integrations.family import parameter_groups
from torchrope.integrations.inflate import inflate
from torchrope.integrations.swap import swap, unswap
from torchrope.lattice import Lattice
from torchrope.linear_attention import LinearAttention
from torchrope.models import Features, Swin, Transformer, ViT
from torchrope.ops import backend
from torchrope.positions import grid, pack, prefix
from torchrope.rotating import apply, rotate
from torchrope.rotations import Rotation

__all__ = [
    "STRING",
    "Attention",
    "AxialRoPE",
    "ComRoPEAP",
    "ComRoPELD",
    "Encoding",
    "Features",
    "Lattice",
    "LearnedAPE",
    "LieRE",
    "LinearAttention",
    "MixedRoPE",
    "NoEncoding",
    "RelativePositionBias",
    "Rotation",
    "SinusoidalAPE",
    "Swin",
    "Transformer",
    "ViT",
    "__version__",
    "absorb",
    "apply",
    "backend",
    "extend",
    "freeze",
    "grid",
    "inflate",
    "load",
    "load_published",
    "pack",
    "parameter_groups",
    "prefix",
    "register_encoding",
    "rerotate",
    "rotate",
    "save",
    "swap",
    "unswap",
]
