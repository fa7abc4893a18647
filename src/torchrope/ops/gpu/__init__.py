"""GPU kernels for CUDA and ROCm in Triton, with the arguments and results of the operators, as `native`.

Only this package imports triton, and it is imported only if triton is installed.
"""

from torchrope.ops.gpu.basis import rotate_basis, rotate_basis_backward
from torchrope.ops.gpu.block import rotate_block, rotate_block_backward
from torchrope.ops.gpu.decomposition import skew_eig
from torchrope.ops.gpu.exponential import exp_generators, exp_generators_backward, skew_exp, skew_exp_backward
from torchrope.ops.gpu.planar import rotate_planar, rotate_planar_backward

__all__ = [
    "exp_generators",
    "exp_generators_backward",
    "rotate_basis",
    "rotate_basis_backward",
    "rotate_block",
    "rotate_block_backward",
    "rotate_planar",
    "rotate_planar_backward",
    "skew_eig",
    "skew_exp",
    "skew_exp_backward",
]
