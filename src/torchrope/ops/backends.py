"""Selection of the implementation: the reference, the CPU kernels ("native") or the GPU kernels ("triton")."""

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import index
from pathlib import Path

import torch
from torch import Tensor, nn

from torchrope.ops import native, record
from torchrope.tensors import in_forward_mode, private

BACKENDS = ("auto", "reference", "native", "triton")

_HAS_TRITON = find_spec("triton") is not None
_NOT_BUILT = "needs kernels that were not built when torchrope was installed"
_KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_PLAIN = (Tensor, nn.Parameter)
_interpreters = private("_C._functorch.get_interpreter_stack")
_OBSERVERS = [private(f"_C.{name}") for name in ("_len_torch_dispatch_stack", "_len_torch_function_stack")]
_OBSERVERS = [each or (lambda: True) for each in (*_OBSERVERS, _interpreters, private("_C._get_tracing_state"))]
_has_storage = private("_C._has_storage") or (lambda x: False)  # gradients of is_grads_batched have none


class _Choice(threading.local):
    """The backend of the innermost `backend` context of a thread."""

    def __init__(self) -> None:
        self.name = "auto"  # in each thread; the compiler of torch 2.6 would read an attribute of the class instead
        self.outer: list[str] = []  # of the blocks around it
        self.asked: set[record.Specialisation] | None = None  # what "triton" takes, for `verify`


_CHOICE = _Choice()


class backend:
    """Choose the implementation of the rotations that this thread computes inside a `with` block.

    The choice is read when `rotate`, `apply` or an encoding is called, and their backward passes use it, also after the
    block. Recomputation (`torch.utils.checkpoint`) calls them again: run its backward pass inside the same block,
    otherwise PyTorch raises a CheckpointError. Inner blocks win.

    Args:
        name: "reference" is plain PyTorch: any device, float64, differentiable any number of times. "native" is the
            CPU kernels, "triton" the GPU kernels, verified or not, also of CPU tensors where Triton's interpreter
            (TRITON_INTERPRET=1) is right: pairs of channels in float32. "auto", the default, is "native" on a CPU; on a
            GPU the kernels that `python -m torchrope verify` has verified there, and the reference for all else.

    Raises:
        ValueError: an unknown name; inside the block, inputs that the backend does not support.

    Example:
        >>> import torch, torchrope as tr
        >>> q = k = torch.randn(1, 2, 9, 8)
        >>> encoding = tr.AxialRoPE(num_axes=2, num_heads=2, head_dim=8)
        >>> with tr.backend("reference"):
        ...     rotated, _ = tr.rotate(q, k, encoding(tr.grid(3, 3)))
        >>> torch.allclose(rotated, tr.rotate(q, k, encoding(tr.grid(3, 3)))[0], atol=1e-6)
        True
    """

    def __init__(self, name: str) -> None:
        if name not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
        self.name = name

    def __enter__(self) -> None:
        _CHOICE.outer.append(_CHOICE.name)
        _CHOICE.name = self.name

    def __exit__(self, *error: object) -> None:
        _CHOICE.name = _CHOICE.outer.pop()


def current() -> str:
    """Return the name of the backend that this thread has chosen."""
    return _CHOICE.name


def runs_on_gpu(like: Tensor) -> bool:
    """Return whether kernels for the tensor's device are those for GPUs: also of a CPU in Triton's interpreter."""
    if like.is_cpu:
        return _CHOICE.name == "triton" and _HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
    return like.device.type == "cuda"


def is_plain(*tensors: Tensor) -> bool:
    """Return whether tensors hold their values, and no mode, transform, tracer or subclass has to see operators."""
    if torch.compiler.is_compiling() or in_forward_mode():
        return False
    for observer in _OBSERVERS:
        if observer():
            return False
    for x in tensors:  # no comprehension, which takes longer as it is called
        if type(x) not in _PLAIN or not _has_storage(x):
            return False
        if x.is_neg() or x._is_zerotensor() or x.is_nested:
            return False
    return True


def takes_kernels(kernel: str, *tensors: Tensor, halves: bool = False, plain: bool | None = None) -> bool:
    """Return whether a kernel computes the result, or the reference; ValueError if the chosen backend cannot.

    The inputs are those of `record.specialisation`, and whether they are plain, if that is known.
    """
    name = _CHOICE.name
    if name == "reference":
        return False
    in_memory = all([tensor.is_cpu and tensor.dtype in _KERNEL_DTYPES for tensor in tensors])  # noqa: C419
    plain = is_plain(*tensors) if plain is None else plain
    if plain and in_memory and name != "triton" and native.LIBRARY is not None:
        return True  # what follows, in less time
    if in_forward_mode():
        reason: str | None = "has no derivatives in forward mode"
    else:
        reason = "supports no torch.func transform" if _is_transformed() else _reason(kernel, name, tensors, halves)
    if reason is not None:
        refuse(reason)
    if reason == _NOT_BUILT and not torch.compiler.is_compiling():
        _warn_not_built()
    # An exported graph should run without torchrope installed.
    return reason is None and not (name == "auto" and is_exporting())


def check_not_onnx(what: object) -> None:
    """Raise ValueError during export to ONNX, which lacks the operators that compute this rotation."""
    if _is_exporting_to_onnx():
        rule = "ONNX has neither matrix exponential nor linear solver: export torchrope.freeze(model, input_size)"
        raise ValueError(f"{rule}, got {what} that is not frozen")


def refuse(reason: str) -> None:
    """Raise ValueError with the reason, unless the backend is "auto", which computes with the reference instead."""
    if _CHOICE.name != "auto":
        raise ValueError(f"backend {_CHOICE.name!r} {reason}")


def _reason(kernel: str, name: str, tensors: tuple[Tensor, ...], halves: bool) -> str | None:
    """Return why the kernel does not support the inputs, or None if it does."""
    kind = tensors[0].device.type
    on_gpu = runs_on_gpu(tensors[0])
    if name == ("native" if on_gpu else "triton") or (name != "auto" and kind not in ("cpu", "cuda")):
        return f"needs {'CPU' if name == 'native' else 'CUDA or ROCm'} tensors, got {kind}"
    if kind not in ("cpu", "cuda"):
        return f"has no kernels for {kind}"
    for tensor in tensors:
        if tensor.device.type != kind:
            return f"needs all tensors on one device, got {kind} and {tensor.device.type}"
        if tensor.dtype not in _KERNEL_DTYPES:
            return f"computes in float32, got {tensor.dtype}"
    if not on_gpu:
        return None if native.LIBRARY is not None else _NOT_BUILT
    if not _HAS_TRITON:
        return "needs the package triton"
    narrow = kernel != "rotate_planar" or any(tensor.dtype == torch.bfloat16 for tensor in tensors)
    if kind == "cpu" and narrow and not import_module("torchrope.ops.gpu.launch").interprets_bfloat16():
        return f"needs a GPU for {kernel}, as Triton's interpreter multiplies the bits of bfloat16 as integers"
    if name == "auto":
        return _unverified(kernel, tensors, halves)
    if _CHOICE.asked is not None:
        _CHOICE.asked.add(record.specialisation(kernel, tensors, halves))
    return None


def _unverified(kernel: str, tensors: tuple[Tensor, ...], halves: bool) -> str | None:
    asked = record.specialisation(kernel, tensors, halves)
    constants = [x if isinstance(x, str) else index(x) for x in asked]  # torch.compile may have symbols
    return None if record.is_verified(tensors[0].device.index or 0, *constants) else "has no verified kernel"


@contextmanager
def asking() -> Iterator[set[record.Specialisation]]:
    """Collect the specialisations that "triton" takes in this thread."""
    asked: set[record.Specialisation] = set()
    _CHOICE.asked = asked
    try:
        yield asked
    finally:
        _CHOICE.asked = None


def cpu_path() -> str:
    """Name the implementation that rotates CPU tensors in this process: the compiled kernels or plain PyTorch."""
    if native.LIBRARY is None:
        return "plain PyTorch (no kernels were built for this processor)"
    return f"compiled kernels ({Path(native.LIBRARY._name).name})"


@cache
def _warn_not_built() -> None:
    """Warn, once per process, that rotations on CPUs use the slow path."""
    warnings.warn(
        "torchrope computes with plain PyTorch on CPUs: its kernels were not built when it was installed; "
        "reinstall it with a C compiler available (GCC 12, Clang 15 or newer)",
        stacklevel=2,
    )


_exports = getattr(torch.compiler, "is_exporting", None)  # since torch 2.7


def is_exporting() -> bool:
    """Return whether a model is being exported, by torch.export or to ONNX."""
    if _exports is not None and _exports():
        return True
    # Outside of torch.export, torch.onnx traces; is_in_onnx_export alone takes longer than a small kernel.
    return (_exports is None or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export()


def _is_exporting_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


# torch.compile must evaluate it while tracing; the public torch.compiler.assume_constant_result imports slowly.
_is_exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_transformed() -> bool:
    """Return whether a torch.func transform is active, under which operators have neither gradients nor vmap rules."""
    if torch.compiler.is_compiling():
        return False
    return _interpreters is None or bool(_interpreters())
