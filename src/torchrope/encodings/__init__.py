"""Position encodings, one file per family. `Encoding` has one method to write: `generators`."""

from torchrope.encodings.absolute import AbsoluteEncoding as AbsoluteEncoding
from torchrope.encodings.absolute import LearnedAPE as LearnedAPE
from torchrope.encodings.absolute import SinusoidalAPE as SinusoidalAPE
from torchrope.encodings.axial import AxialRoPE as AxialRoPE
from torchrope.encodings.base import Encoding as Encoding
from torchrope.encodings.base import planar as planar
from torchrope.encodings.base import skew as skew
from torchrope.encodings.comrope import ComRoPEAP as ComRoPEAP
from torchrope.encodings.comrope import ComRoPELD as ComRoPELD
from torchrope.encodings.dinov3 import DINOv3RoPE as DINOv3RoPE
from torchrope.encodings.golden import GoldenGateRoPE as GoldenGateRoPE
from torchrope.encodings.liere import LieRE as LieRE
from torchrope.encodings.mixed import MixedRoPE as MixedRoPE
from torchrope.encodings.mrope import InterleavedMRoPE as InterleavedMRoPE
from torchrope.encodings.mrope import MRoPE as MRoPE
from torchrope.encodings.names import ABSOLUTE as ABSOLUTE
from torchrope.encodings.names import ROTARY as ROTARY
from torchrope.encodings.names import Choice as Choice
from torchrope.encodings.names import choose as choose
from torchrope.encodings.none import NoEncoding as NoEncoding
from torchrope.encodings.scaling import extend as extend
from torchrope.encodings.scaling import interpolate as interpolate
from torchrope.encodings.scaling import ntk as ntk
from torchrope.encodings.scaling import yarn as yarn
from torchrope.encodings.scaling import yarn_temperature as yarn_temperature
from torchrope.encodings.string import STRING as STRING
