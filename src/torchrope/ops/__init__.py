"""The one verb, `rotate`, and the exponential beneath it.

`reference.py` is the truth in plain PyTorch; a fast path stands beside it and answers to it.
"""

from torchrope.ops.rotate import rotate as rotate
from torchrope.ops.skew_exp import skew_exp as skew_exp
