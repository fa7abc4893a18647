"""Vision transformers that take any encoding, each file read top to bottom."""

from torchrope.backbones.features import Features as Features
from torchrope.backbones.features import pad as pad
from torchrope.backbones.swin import SWIN_SIZES as SWIN_SIZES
from torchrope.backbones.swin import Swin as Swin
from torchrope.backbones.vit import SIZES as SIZES
from torchrope.backbones.vit import ViT as ViT
