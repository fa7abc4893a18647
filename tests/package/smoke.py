"""Rotate with an installed torchrope and say which path computes: run by hand, or by cibuildwheel, without pytest."""

import sys

import torch

import torchrope as tr
from torchrope.ops import native
from torchrope.ops.backends import cpu_path


def main() -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16)
    rotation = encoding(tr.grid(5, 7))
    q, k = torch.randn(2, 3, 2, 35, 16)
    with tr.backend("reference"):
        expected = tr.rotate(q, k, rotation)
    for ours, theirs in zip(tr.rotate(q, k, rotation), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    print(f"torchrope {tr.__version__} from {tr.__file__}: CPU tensors are rotated by {cpu_path()}")
    if "--kernels" in sys.argv and native.LIBRARY is None:
        raise SystemExit("kernels must be installed, got none")


if __name__ == "__main__":
    main()
