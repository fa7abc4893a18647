"""The one verb, `rotate`, and the exponential beneath it.

`reference.py` is the truth in plain PyTorch. The kernels answer to it: `native` for CPUs, `gpu` for CUDA and ROCm;
`library.py` makes them operators of PyTorch, `backends.py` says which path serves.
"""

from torchrope.ops.backends import BACKENDS as BACKENDS
from torchrope.ops.rotate import rotate as rotate
from torchrope.ops.rotate import rotate_one as rotate_one
from torchrope.ops.skew_exp import skew_exp as skew_exp
