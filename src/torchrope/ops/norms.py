"""Norms of queries and keys over head_dim, in front of their rotation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _of_all

from torchrope.ops import reference
from torchrope.tensors import wide_dtype, without_autocast

NO_NORM, RMS_NORM, LAYER_NORM = 0, 1, 2
"""Kinds of norms, as the kernels number them."""

PLAIN: dict[type, int] = {nn.RMSNorm: RMS_NORM, nn.LayerNorm: LAYER_NORM}
"""Modules that compute one of them from `weight`, `bias`, `eps` and `normalized_shape`; not what inherits from them."""


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
        """The norm of x `(..., head_dim)` in the wider dtype of x, the weights and float32."""
        given = [each for each in (self.weight, self.bias) if each is not None]
        dtype = wide_dtype(x, *given)
        weight, bias = (None if each is None else each.to(dtype) for each in (self.weight, self.bias))
        with without_autocast(x):
            return reference.normalise(x.to(dtype), self.kind == LAYER_NORM, weight, bias, self.eps)


Norms = tuple[nn.Module | Norm | None, nn.Module | Norm | None]


def as_arguments(norms: tuple[Norm | None, Norm | None]) -> tuple[list[Tensor | None], list[int], list[float]]:
    """What the kernels take of the norms of q and k: weight and bias of each, their kinds, their eps."""
    weights = [x for norm in norms for x in ((None, None) if norm is None else (norm.weight, norm.bias))]
    kinds = [NO_NORM if norm is None else norm.kind for norm in norms]
    return weights, kinds, [0.0 if norm is None else norm.eps for norm in norms]


def read(name: str, x: Tensor, module: nn.Module | Norm | None) -> Norm | None:
    """What a module computes that is a plain norm of x over head_dim; None for any other, and for one with hooks.

    Raises:
        ValueError: a norm over another shape.
    """
    if isinstance(module, Norm):
        return module
    return None if module is None or type(module) not in PLAIN or is_called(module) else describe(name, x, module)


def describe(name: str, x: Tensor, module: nn.Module) -> Norm:
    """What a module of one of the types `PLAIN` computes of x.

    Raises:
        ValueError: a norm over another shape.
    """
    plain: Any = module
    shape = tuple(plain.normalized_shape)
    if shape != x.shape[-1:]:
        raise ValueError(f"norm of {name} must be over its head_dim {x.shape[-1]}, got one over {shape}")
    kind = PLAIN[type(module)]
    eps = torch.finfo(wide_dtype(x)).eps if plain.eps is None else plain.eps
    return Norm(kind, plain.weight, plain.bias if kind == LAYER_NORM else None, eps)


def called(name: str, x: Tensor, module: nn.Module | Norm | None) -> Tensor:
    """What a module that is no plain norm returns; x for None.

    Raises:
        ValueError: it returned another shape.
    """
    if module is None:
        return x
    assert isinstance(module, nn.Module)
    result: Tensor = module(x)
    if result.shape != x.shape:
        raise ValueError(f"norm of {name} must keep the shape {tuple(x.shape)}, got {tuple(result.shape)}")
    return result


def normalise(name: str, x: Tensor, module: nn.Module | Norm | None) -> Tensor:
    """The norm of x over its last dimension, not rounded to the dtype of x where the norm is a plain one.

    Args:
        name: What x is called in an error.
        x: `(..., head_dim)`.
        module: `nn.RMSNorm` or `nn.LayerNorm` over head_dim; any other module, or one with hooks, is called.

    Returns:
        In the wider dtype of x, the weights and float32; or what the module returned.

    Raises:
        ValueError: a norm over another shape, or a module that returned one.
    """
    norm = read(name, x, module)
    return called(name, x, module) if norm is None else norm.wide(x)


def is_called(module: Any, own_hooks: int = 0) -> bool:
    """Whether somebody takes part in a call of a module: by a hook, or by a forward of this instance.

    Args:
        module: Any.
        own_hooks: Forward hooks of the caller's on it; with one of these the instance's forward is the caller's too.
    """
    others = (
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        _of_all._global_forward_hooks,
        _of_all._global_forward_pre_hooks,
        _of_all._global_backward_hooks,
        _of_all._global_backward_pre_hooks,
    )
    own_forward = "forward" in module.__dict__ and not own_hooks
    return any(others) or len(module._forward_hooks) > own_hooks or own_forward
