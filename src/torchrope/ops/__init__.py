"""`rotate`, which applies rotations to queries and keys, and `skew_exp`, the matrix exponential that it needs.

`reference.py` defines the results in plain PyTorch. Kernels must agree with it: `native` for CPUs,
`gpu` for CUDA and ROCm; `library.py` makes them operators of PyTorch, `backends.py` chooses among them.
"""

from torchrope.ops.backends import BACKENDS as BACKENDS
from torchrope.ops.rotate import rotate as rotate
from torchrope.ops.rotate import rotate_one as rotate_one
from torchrope.ops.skew_exp import skew_exp as skew_exp
