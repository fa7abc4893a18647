"""LAMB, Adam whose steps are scaled layer by layer to the size of the weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LAMB(torch.optim.Optimizer):
    """Step along  u = m̂ / (√v̂ + ε) + λ w,  w ← w - η (‖w‖ / ‖u‖) u,  m̂ and v̂ being Adam's averages.

    The ratio of norms, one for each tensor, is 1 where either is zero, and for tensors that do not decay (λ = 0), as in
    timm and in NVIDIA's FusedLAMB, with which DeiT III was trained. Both clip gradients to norm 1 inside; here the
    Trainer does.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate η.
        betas: Averaging of gradients and of their squares.
        eps: Added to the root of the second average.
        weight_decay: Decay λ, inside the step that is scaled.

    References:
        You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, algorithm 2.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LAMB([weight], lr=0.1, weight_decay=0.01)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> round((weight - torch.tensor([3.0, 4.0])).norm().item(), 4)  # lr · ‖w‖
        0.5
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; a parameter without a gradient stays as it is.

        Args:
            closure: Computes the loss anew, with its gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        update = mean / (1 - beta1 ** state["step"]) / root
        if group["weight_decay"]:
            update.add_(weight, alpha=group["weight_decay"])
            update.mul_(_trust(weight.norm(), update.norm()))
        weight.sub_(update * group["lr"])


def _trust(weight: Tensor, update: Tensor) -> Tensor:
    """‖w‖ / ‖u‖, 1 where either is zero; no value leaves the device."""
    return torch.where((weight > 0) & (update > 0), weight / update, 1.0)
