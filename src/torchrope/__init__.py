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
    from torchrope import testing as testing
    from torchrope.attention import Attention as Attention
    from torchrope.encodings import STRING as STRING
    from torchrope.encodings import AbsoluteEncoding as AbsoluteEncoding
    from torchrope.encodings import AxialRoPE as AxialRoPE
    from torchrope.encodings import ComRoPEAP as ComRoPEAP
    from torchrope.encodings import ComRoPELD as ComRoPELD
    from torchrope.encodings import DRoPE as DRoPE
    from torchrope.encodings import Encoding as Encoding
    from torchrope.encodings import GoldenGateRoPE as GoldenGateRoPE
    from torchrope.encodings import HARoPE as HARoPE
    from torchrope.encodings import LearnedAPE as LearnedAPE
    from torchrope.encodings import LieRE as LieRE
    from torchrope.encodings import LookHere as LookHere
    from torchrope.encodings import MixedRoPE as MixedRoPE
    from torchrope.encodings import MRoPE as MRoPE
    from torchrope.encodings import MultiHeadRoPE as MultiHeadRoPE
    from torchrope.encodings import NoEncoding as NoEncoding
    from torchrope.encodings import PaPE as PaPE
    from torchrope.encodings import PaPERI as PaPERI
    from torchrope.encodings import Periodic as Periodic
    from torchrope.encodings import PoseAction as PoseAction
    from torchrope.encodings import PoseEncoding as PoseEncoding
    from torchrope.encodings import Poses as Poses
    from torchrope.encodings import RayAction as RayAction
    from torchrope.encodings import RayEncoding as RayEncoding
    from torchrope.encodings import RelativePositionBias as RelativePositionBias
    from torchrope.encodings import ScoreBias as ScoreBias
    from torchrope.encodings import SimplexRoPE as SimplexRoPE
    from torchrope.encodings import SinusoidalAPE as SinusoidalAPE
    from torchrope.encodings import SphereHarmonics as SphereHarmonics
    from torchrope.encodings import SpiralRoPE as SpiralRoPE
    from torchrope.encodings import dype as dype
    from torchrope.encodings import interpolate as interpolate
    from torchrope.encodings import ntk as ntk
    from torchrope.encodings import parse_encoding as parse_encoding
    from torchrope.encodings import register_encoding as register_encoding
    from torchrope.encodings import riflex as riflex
    from torchrope.encodings import yarn as yarn
    from torchrope.encodings import yarn_temperature as yarn_temperature
    from torchrope.inference import absorb as absorb
    from torchrope.inference import freeze as freeze
    from torchrope.integrations.extend import extend as extend
    from torchrope.integrations.inflate import inflate as inflate
    from torchrope.integrations.pretrained import load_backbone as load_backbone
    from torchrope.integrations.published import load_published as load_published
    from torchrope.integrations.saving import load as load
    from torchrope.integrations.saving import save as save
    from torchrope.integrations.swap import swap as swap
    from torchrope.integrations.swap import unswap as unswap
    from torchrope.lattice import Lattice as Lattice
    from torchrope.linear_attention import LinearAttention as LinearAttention
    from torchrope.models import Features as Features
    from torchrope.models import Swin as Swin
    from torchrope.models import Transformer as Transformer
    from torchrope.models import ViT as ViT
    from torchrope.models import pad as pad
    from torchrope.ops import backend as backend
    from torchrope.ops import skew_exp as skew_exp
    from torchrope.positions import Packed as Packed
    from torchrope.positions import anchor as anchor
    from torchrope.positions import around_text as around_text
    from torchrope.positions import diagonal as diagonal
    from torchrope.positions import grid as grid
    from torchrope.positions import jitter as jitter
    from torchrope.positions import on_circles as on_circles
    from torchrope.positions import on_sphere as on_sphere
    from torchrope.positions import pack as pack
    from torchrope.positions import patch_centers as patch_centers
    from torchrope.positions import prefix as prefix
    from torchrope.positions import random_rescale as random_rescale
    from torchrope.positions import random_shift as random_shift
    from torchrope.positions import random_stretch as random_stretch
    from torchrope.positions import rescale as rescale
    from torchrope.positions import shift as shift
    from torchrope.positions import stereographic as stereographic
    from torchrope.positions import windows as windows
    from torchrope.positions import wrap as wrap
    from torchrope.rotating import rotate as rotate
    from torchrope.rotating import rotate_one as rotate_one
    from torchrope.rotations import Block as Block
    from torchrope.rotations import Commuting as Commuting
    from torchrope.rotations import Planar as Planar
    from torchrope.rotations import PlanarInBasis as PlanarInBasis
    from torchrope.rotations import Rotation as Rotation
    from torchrope.rotations import Transform as Transform

_FORMER = {
    "DINOv3RoPE": "dinov3",
    "InterleavedMRoPE": "mrope_interleaved",
    "JitteredAPE": "learned_jittered",
    "NormalLieRE": "comrope_liere",
    "VanillaRoPE": "comrope_rope",
    "VideoRoPE": "videorope",
    "VisionLLaMARoPE": "visionllama",
}
"""Classes that are settings of another family, by their names in `torchrope.encodings.baselines`."""
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
    if name in _FORMER:
        raise AttributeError(f"torchrope.{name} is torchrope.encodings.baselines.{_FORMER[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'torchrope' has no attribute {name!r}")
    module = _MODULE_OF[name]
    value = import_module(f"torchrope.{name}") if module == "torchrope" else getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
