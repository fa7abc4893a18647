"""The choice of implementation: the reference, the kernels for CPUs ("native") or those for GPUs ("triton")."""

import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from torchrope.ops.native import LIBRARY

BACKENDS = ("auto", "reference", "native", "triton")

_HAS_TRITON = find_spec("triton") is not None
_NOT_BUILT = "needs kernels that were not built when torchrope was installed"
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def takes_kernels(backend: str, *tensors: Tensor) -> bool:
    """Whether kernels compute, or the reference.

    Args:
        backend: "auto" uses kernels where they support the inputs; the others are used, or raise where they do not.
        tensors: What they are asked to compute with.

    Raises:
        ValueError: an unknown backend, or one that cannot serve, with the reason.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        return False
    hindrance = _hindrance(backend, tensors)
    if hindrance is not None and backend != "auto":
        raise ValueError(f"backend {backend!r} {hindrance}")
    if hindrance == _NOT_BUILT and not torch.compiler.is_compiling():
        _tell_not_built()
    # A graph that is exported should run where torchrope is not.
    return hindrance is None and not (backend == "auto" and (_is_exporting() or _is_transformed()))


def check_not_onnx(what: object) -> None:
    """Refuse, while a model is exported to ONNX, a rotation whose making ONNX has no operators for.

    Raises:
        ValueError: it is being exported.
    """
    if _is_exporting_to_onnx():
        rule = "ONNX has neither matrix exponential nor linear solver: export torchrope.freeze(model, input_size)"
        raise ValueError(f"{rule}, got {what} that is not frozen")


def _hindrance(backend: str, tensors: tuple[Tensor, ...]) -> str | None:
    """Why kernels cannot serve, or None."""
    kind = tensors[0].device.type
    serving = {"cpu": "native", "cuda": "triton"}.get(kind)
    if backend not in ("auto", serving):
        return f"needs {'CPU' if backend == 'native' else 'CUDA or ROCm'} tensors, got {kind}"
    if serving is None:
        return f"has no kernels for {kind}"
    for tensor in tensors:
        if tensor.device.type != kind:
            return f"needs all tensors on one device, got {kind} and {tensor.device.type}"
        if tensor.dtype not in _NARROW:
            return f"computes in float32, got {tensor.dtype}"
    if serving == "native":
        return None if LIBRARY is not None else _NOT_BUILT
    return None if _HAS_TRITON else "needs the package triton"


def cpu_path() -> str:
    """What computes rotations of CPU tensors on this machine: the compiled kernels, or plain PyTorch."""
    if LIBRARY is None:
        return "plain PyTorch (no kernels were built for this processor)"
    return f"compiled kernels ({Path(LIBRARY._name).name})"


@cache
def _tell_not_built() -> None:
    """Warn, once a process, that the slow path computes."""
    warnings.warn(
        "torchrope computes with plain PyTorch on CPUs: its kernels were not built when it was installed; "
        "install it again where a C compiler is, GCC 12 or Clang 15 or newer",
        stacklevel=2,
    )


def _is_exporting() -> bool:
    asked = getattr(torch.compiler, "is_exporting", None)  # since torch 2.7
    return torch.onnx.is_in_onnx_export() if asked is None else asked() or torch.onnx.is_in_onnx_export()


def _is_exporting_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


# A graph would be told that nothing is exported. torch.compiler.assume_constant_result does the same and imports a lot.
_is_exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_transformed() -> bool:
    """Whether torch.func differentiates, which refuses operators that bring their own gradient; vmap alone may."""
    if torch.compiler.is_compiling():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in stack)
