"""Error messages for transformers' models that `swap` does not support."""

import inspect

from torch import nn

# Attention layers by the names of their classes, and why `swap` refuses a model that has no others.
_REASONS = {
    "EdgeTamVideoRoPECrossAttention": "EdgeTAM's memory mixes keys with and without rotation",
    "EdgeTamVideoRoPESelfAttention": "EdgeTAM's memory mixes keys with and without rotation",
    "HieraMaskUnitAttention": "Hiera's queries are max-pooled over several tokens",
    "Sam2MultiScaleAttention": "the queries of SAM 2's Hiera are max-pooled over several tokens",
    "Sam2VideoRoPEAttention": "SAM 2's memory mixes keys with and without rotation",
    "Sam3TrackerVideoRoPEAttention": "SAM 3's memory mixes keys with and without rotation",
}


def refuse(model: nn.Module) -> None:
    """Raise ValueError for a model that `swap` does not support, if the reason is known.

    Raises:
        ValueError: a model whose attention rotates or pools q and k in another way.
    """
    for module in model.modules():
        layer = type(module).__name__
        reason = _REASONS.get(layer)
        if reason is None and _rotates(module):
            reason = f"{layer} does not rotate q and k by one function of q, k, cos and sin"
        if reason is not None:
            rule = f"swap needs attention that rotates q and k by positions, but {reason}"
            raise ValueError(f"{rule}; {by_hand(layer)}, got {type(model).__name__}")


def by_hand(layer: str) -> str:
    """Return the hint how to rotate q and k in a custom attention layer."""
    return f"torchrope.rotate(q, k, rotation, key_rotation=...) in a {layer} of your own takes any positions"


def _rotates(module: nn.Module) -> bool:
    """Return whether a module is attention of transformers that calls a rotation function."""
    forward = inspect.unwrap(type(module).forward)
    if not inspect.isfunction(forward) or not type(module).__module__.startswith("transformers."):
        return False
    called = [name for name in forward.__code__.co_names if name in forward.__globals__]
    return "Attention" in type(module).__name__ and any("rotary" in name for name in called)
