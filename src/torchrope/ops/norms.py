"""Norms of queries and keys over head_dim, applied before their rotation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.ops import reference
from torchrope.tensors import private, wide_dtype, without_autocast

NO_NORM, RMS_NORM, LAYER_NORM = 0, 1, 2
"""Codes of the kinds of norms in the kernels."""

_KINDS = {
    "torch.nn.modules.normalization.RMSNorm": RMS_NORM,
    "torch.nn.modules.normalization.LayerNorm": LAYER_NORM,
    "timm.layers.norm.LayerNorm": LAYER_NORM,
    "timm.layers.norm.LayerNormFp32": LAYER_NORM,
    "timm.layers.norm.RmsNorm": RMS_NORM,
    "timm.layers.norm.RmsNormFp32": RMS_NORM,
    "diffusers.models.normalization.RMSNorm": RMS_NORM,
}
"""Kind of norm by class: they have `weight`, `bias`, `eps` and `normalized_shape` (or `dim`)."""

_EPS_OF_FLOAT32 = torch.__version__ >= "2.7"
"""Whether RMSNorm uses float32's eps for half precision; older releases use that of the dtype."""


def kind_of(module: object) -> int:
    """Return RMS_NORM or LAYER_NORM for a module of a known class, no subclass; NO_NORM for any other."""
    return _KINDS.get(f"{type(module).__module__}.{type(module).__qualname__}", NO_NORM)


@dataclass(frozen=True)
class Norm:
    """RMSNorm:  x / sqrt(mean(x²) + eps) · weight;  LayerNorm:  (x - mean) / sqrt(var + eps) · weight + bias.

    Attributes:
        kind: RMS_NORM or LAYER_NORM.
        weight: `(head_dim,)`, or None for ones.
        bias: `(head_dim,)` of a LayerNorm, or None for zeros.
        eps: Added to the mean of squares or the variance.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv:1910.07467), equation 4. Ba et al., Layer
        Normalization (arXiv:1607.06450), equation 4.
    """

    kind: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def wide(self, x: Tensor) -> Tensor:
        """Normalise x `(..., head_dim)` in the widest dtype of x, the weights and float32."""
        parameters = [parameter for parameter in (self.weight, self.bias) if parameter is not None]
        dtype = wide_dtype(x, *parameters)
        weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in (self.weight, self.bias))
        with without_autocast(x):
            return reference.normalise(x.to(dtype), self.kind == LAYER_NORM, weight, bias, self.eps)


Norms = tuple[nn.Module | Norm | None, nn.Module | Norm | None]


def as_arguments(q_norm: Norm | None, k_norm: Norm | None) -> tuple[Any, ...] | None:
    """Return the last arguments of `rotate_planar_normed`: weights, biases, kinds, eps; None without norms."""
    if q_norm is None and k_norm is None:
        return None
    weights = [x for norm in (q_norm, k_norm) for x in ((None, None) if norm is None else (norm.weight, norm.bias))]
    kinds = [NO_NORM if norm is None else norm.kind for norm in (q_norm, k_norm)]
    return (*weights, kinds, [0.0 if norm is None else norm.eps for norm in (q_norm, k_norm)])


def read(name: str, x: Tensor, module: nn.Module | Norm | None) -> Norm | None:
    """Return the norm that a plain RMSNorm or LayerNorm computes; None for any other module and for one with hooks.

    Raises:
        ValueError: a norm over another shape.
    """
    if isinstance(module, Norm):
        return module
    return None if module is None or not is_plain(module) or is_called(module) else describe(name, x, module)


def is_plain(module: nn.Module) -> bool:
    """Return whether a module computes the formula of `Norm`: its type is known, and an RMSNorm has no bias."""
    kind = kind_of(module)
    return kind == LAYER_NORM or (kind == RMS_NORM and getattr(module, "bias", None) is None)


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """Return the shape that a plain norm is over."""
    plain: Any = module
    return tuple(plain.normalized_shape if hasattr(plain, "normalized_shape") else plain.dim)


def describe(name: str, x: Tensor, module: nn.Module) -> Norm:
    """Return the norm that a module of a known class (`kind_of`) computes.

    Raises:
        ValueError: a norm over another shape.
    """
    plain: Any = module
    shape = shape_of(module)
    if shape != x.shape[-1:]:
        raise ValueError(f"norm of {name} must be over its head_dim {x.shape[-1]}, got one over {shape}")
    kind = kind_of(module)
    eps = torch.finfo(wide_dtype(x) if _EPS_OF_FLOAT32 else x.dtype).eps if plain.eps is None else plain.eps
    return Norm(kind, plain.weight, plain.bias if kind == LAYER_NORM else None, eps)


def called(name: str, x: Tensor, module: nn.Module | Norm | None) -> Tensor:
    """Call a module that is not a plain norm; return x if it is None.

    Raises:
        ValueError: the module returned another shape.
    """
    if module is None:
        return x
    assert isinstance(module, nn.Module)
    result: Tensor = module(x)
    if result.shape != x.shape:
        raise ValueError(f"norm of {name} must keep the shape {tuple(x.shape)}, got {tuple(result.shape)}")
    return result


def normalise(name: str, x: Tensor, module: nn.Module | Norm | None) -> Tensor:
    """Normalise x over its last dimension; a plain norm is not rounded to the dtype of x.

    Args:
        name: Name of x in error messages.
        x: `(..., head_dim)`.
        module: `nn.RMSNorm` or `nn.LayerNorm` over head_dim; any other module, or one with hooks, is called.

    Returns:
        The normalised x, in the widest dtype of x, the weights and float32; or the module's output.

    Raises:
        ValueError: a norm over another shape, or a module that returned another shape.
    """
    norm = read(name, x, module)
    return called(name, x, module) if norm is None else norm.wide(x)


_OF_ALL_MODULES = tuple(
    private(f"nn.modules.module._global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def is_called(module: Any, *, own_forward: bool = False) -> bool:
    """Return whether a call of a module runs more than its class's forward: hooks, or a forward set on the instance.

    Args:
        module: Any `nn.Module`.
        own_forward: Whether the caller set the instance's forward.
    """
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooked = any(some is None or len(some) > 0 for some in (*hooks, *_OF_ALL_MODULES))  # None: hidden by this torch
    return hooked or ("forward" in module.__dict__ and not own_forward)
