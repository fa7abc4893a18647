"""Vision transformers that take any encoding, each file read top to bottom."""

from torchrope.backbones.vit import SIZES as SIZES
from torchrope.backbones.vit import ViT as ViT
