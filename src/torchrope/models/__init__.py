"""Vision transformers (ViT, Swin) for any encoding and any number of axes, and their feature maps."""

from torchrope.models.features import Features as Features
from torchrope.models.features import pad as pad
from torchrope.models.swin import SWIN_SIZES as SWIN_SIZES
from torchrope.models.swin import Swin as Swin
from torchrope.models.vit import SIZES as SIZES
from torchrope.models.vit import ViT as ViT
