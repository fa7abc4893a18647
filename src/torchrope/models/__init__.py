"""Vision transformers (ViT, Swin) of any number of axes with their feature maps, and one of tokens at any positions."""

from torchrope.models.features import Features as Features
from torchrope.models.features import pad as pad
from torchrope.models.swin import SWIN_SIZES as SWIN_SIZES
from torchrope.models.swin import Swin as Swin
from torchrope.models.transformer import Transformer as Transformer
from torchrope.models.vit import SIZES as SIZES
from torchrope.models.vit import ViT as ViT
