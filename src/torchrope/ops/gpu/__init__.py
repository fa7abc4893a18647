"""Triton kernels for CUDA and ROCm devices; the only files that import triton, and imported only where it is."""
