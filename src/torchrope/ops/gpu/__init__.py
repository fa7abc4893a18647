"""GPU kernels for CUDA and ROCm in Triton, with the arguments and results of the operators, as `native`.

Only this package imports triton, and it is imported only if triton is installed.
"""

from torchrope.ops.gpu.basis import rotate_basis as rotate_basis
from torchrope.ops.gpu.basis import rotate_basis_backward as rotate_basis_backward
from torchrope.ops.gpu.block import rotate_block as rotate_block
from torchrope.ops.gpu.block import rotate_block_backward as rotate_block_backward
from torchrope.ops.gpu.decomposition import skew_eig as skew_eig
from torchrope.ops.gpu.exponential import exp_generators as exp_generators
from torchrope.ops.gpu.exponential import exp_generators_backward as exp_generators_backward
from torchrope.ops.gpu.exponential import skew_exp as skew_exp
from torchrope.ops.gpu.exponential import skew_exp_backward as skew_exp_backward
from torchrope.ops.gpu.planar import rotate_planar as rotate_planar
from torchrope.ops.gpu.planar import rotate_planar_backward as rotate_planar_backward
