"""Position encodings, one file per family. `Encoding` has one method to write: `generators`."""

from torchrope.encodings.absolute import AbsoluteEncoding as AbsoluteEncoding
from torchrope.encodings.absolute import LearnedAPE as LearnedAPE
from torchrope.encodings.absolute import SinusoidalAPE as SinusoidalAPE
from torchrope.encodings.axial import AxialRoPE as AxialRoPE
from torchrope.encodings.base import Encoding as Encoding
from torchrope.encodings.base import planar as planar
from torchrope.encodings.base import skew as skew
from torchrope.encodings.bias import RelativePositionBias as RelativePositionBias
from torchrope.encodings.comrope import ComRoPEAP as ComRoPEAP
from torchrope.encodings.comrope import ComRoPELD as ComRoPELD
from torchrope.encodings.liere import LieRE as LieRE
from torchrope.encodings.mixed import MixedRoPE as MixedRoPE
from torchrope.encodings.names import ABSOLUTE as ABSOLUTE
from torchrope.encodings.names import BIAS as BIAS
from torchrope.encodings.names import ROTARY as ROTARY
from torchrope.encodings.names import Choice as Choice
from torchrope.encodings.names import choose as choose
from torchrope.encodings.none import NoEncoding as NoEncoding
