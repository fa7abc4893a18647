"""Norms of queries and keys over head_dim, in front of their rotation."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.tensors import wide_dtype, without_autocast

Norms = tuple[nn.Module | None, nn.Module | None]


def normalise(name: str, x: Tensor, norm: nn.Module | None) -> Tensor:
    """The norm of x over its last dimension, not rounded to the dtype of x where the norm is a plain one.

    RMSNorm:  x / sqrt(mean(x²) + eps) · weight;  LayerNorm:  (x - mean) / sqrt(var + eps) · weight + bias.

    Args:
        name: What x is called in an error.
        x: `(..., head_dim)`.
        norm: `nn.RMSNorm` or `nn.LayerNorm` over head_dim; any other module, or one with hooks, is called.

    Returns:
        In the wider dtype of x, the weights and float32; or what the module returned.

    Raises:
        ValueError: a norm over another shape, or a module that returned one.
    """
    if norm is None:
        return x
    if type(norm) not in (nn.RMSNorm, nn.LayerNorm) or _has_hooks(norm):
        called: Tensor = norm(x)
        if called.shape != x.shape:
            raise ValueError(f"norm of {name} must keep the shape {tuple(x.shape)}, got {tuple(called.shape)}")
        return called
    assert isinstance(norm, (nn.RMSNorm, nn.LayerNorm))
    shape = tuple(norm.normalized_shape)
    if shape != x.shape[-1:]:
        raise ValueError(f"norm of {name} must be over its head_dim {x.shape[-1]}, got one over {shape}")
    with without_autocast(x):
        wide = wide_dtype(x) if norm.weight is None else torch.promote_types(wide_dtype(x), norm.weight.dtype)
        weight = None if norm.weight is None else norm.weight.to(wide)
        if isinstance(norm, nn.RMSNorm):
            return functional.rms_norm(x.to(wide), shape, weight, norm.eps)
        bias = None if norm.bias is None else norm.bias.to(wide)
        return functional.layer_norm(x.to(wide), shape, weight, bias, norm.eps)


def _has_hooks(module: nn.Module) -> bool:
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or "forward" in module.__dict__
