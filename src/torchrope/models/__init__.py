"""Vision transformers (ViT, Swin) for any number of axes, their feature maps, and a transformer for point sets.

Their common arguments have one name, `in_channels`, `num_outputs`, `positions`, and one default encoding, "mixed".
"""

from torchrope.models.features import Features as Features
from torchrope.models.features import LayerNorm2d as LayerNorm2d
from torchrope.models.features import pad as pad
from torchrope.models.layers import ACTIVATIONS as ACTIVATIONS
from torchrope.models.layers import QuickGELU as QuickGELU
from torchrope.models.layers import encoding_parameters as encoding_parameters
from torchrope.models.swin import SWIN_SIZES as SWIN_SIZES
from torchrope.models.swin import Swin as Swin
from torchrope.models.transformer import Transformer as Transformer
from torchrope.models.vit import SIZES as SIZES
from torchrope.models.vit import ViT as ViT
