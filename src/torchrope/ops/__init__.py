"""Operations on tensors: rotation of pairs of queries and keys, and the exponential of skew-symmetric matrices.

`reference.py` defines the results in plain PyTorch, which the kernels must reproduce: `native` for CPUs,
`gpu` for CUDA and ROCm; `library.py` registers them as PyTorch operators, `backends.py` selects the implementation.
"""

from torchrope.ops.backends import BACKENDS as BACKENDS
from torchrope.ops.backends import backend as backend
from torchrope.ops.skew_exp import skew_exp as skew_exp
