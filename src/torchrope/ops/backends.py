"""Selection of the implementation: the reference, the CPU kernels ("native") or the GPU kernels ("triton")."""

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
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes_kernels(backend: str, *tensors: Tensor) -> bool:
    """Return whether kernels compute the result; otherwise the reference does.

    Args:
        backend: "auto" uses kernels if they support the inputs; any other backend raises if it does not support them.
        tensors: The inputs of the computation.

    Raises:
        ValueError: the backend is unknown, or does not support the inputs; the message gives the reason.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        return False
    reason = _reason(backend, tensors)
    if reason is not None and backend != "auto":
        raise ValueError(f"backend {backend!r} {reason}")
    if reason == _NOT_BUILT and not torch.compiler.is_compiling():
        _warn_not_built()
    # An exported graph should run without torchrope installed.
    return reason is None and not (backend == "auto" and (_is_exporting() or _is_transformed()))


def check_not_onnx(what: object) -> None:
    """Raise during export to ONNX: computing this rotation needs operators that ONNX lacks.

    Raises:
        ValueError: a model is being exported to ONNX.
    """
    if _is_exporting_to_onnx():
        rule = "ONNX has neither matrix exponential nor linear solver: export torchrope.freeze(model, input_size)"
        raise ValueError(f"{rule}, got {what} that is not frozen")


def _reason(backend: str, tensors: tuple[Tensor, ...]) -> str | None:
    """Return why the kernels do not support the inputs, or None if they do."""
    kind = tensors[0].device.type
    supported_backend = {"cpu": "native", "cuda": "triton"}.get(kind)
    if backend not in ("auto", supported_backend):
        return f"needs {'CPU' if backend == 'native' else 'CUDA or ROCm'} tensors, got {kind}"
    if supported_backend is None:
        return f"has no kernels for {kind}"
    for tensor in tensors:
        if tensor.device.type != kind:
            return f"needs all tensors on one device, got {kind} and {tensor.device.type}"
        if tensor.dtype not in _KERNEL_DTYPES:
            return f"computes in float32, got {tensor.dtype}"
    if supported_backend == "native":
        return None if LIBRARY is not None else _NOT_BUILT
    return None if _HAS_TRITON else "needs the package triton"


def cpu_path() -> str:
    """Name the implementation that rotates CPU tensors in this process: the compiled kernels or plain PyTorch."""
    if LIBRARY is None:
        return "plain PyTorch (no kernels were built for this processor)"
    return f"compiled kernels ({Path(LIBRARY._name).name})"


@cache
def _warn_not_built() -> None:
    """Warn, once per process, that rotations on CPUs use the slow path."""
    warnings.warn(
        "torchrope computes with plain PyTorch on CPUs: its kernels were not built when it was installed; "
        "reinstall it with a C compiler available (GCC 12, Clang 15 or newer)",
        stacklevel=2,
    )


def _is_exporting() -> bool:
    is_exporting = getattr(torch.compiler, "is_exporting", None)  # since torch 2.7
    return torch.onnx.is_in_onnx_export() if is_exporting is None else is_exporting() or torch.onnx.is_in_onnx_export()


def _is_exporting_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


# torch.compile must evaluate this while tracing; the public torch.compiler.assume_constant_result imports slowly.
_is_exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_transformed() -> bool:
    """Return whether a torch.func transform other than vmap is active; these reject operators with a gradient."""
    if torch.compiler.is_compiling():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in stack)
