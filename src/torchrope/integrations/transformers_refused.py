"""Models of transformers whose attention has no place for a rotation of q and k by positions, and the way by hand."""

import inspect

from torch import nn

# Attention layers by the names of their classes, and why `swap` refuses a model that has no others.
_REASONS = {
    "EdgeTamVideoRoPECrossAttention": "EdgeTAM's memory mixes keys with and without rotation",
    "EdgeTamVideoRoPESelfAttention": "EdgeTAM's memory mixes keys with and without rotation",
    "HieraMaskUnitAttention": "Hiera's queries are the largest of several places",
    "Sam2MultiScaleAttention": "the queries of SAM 2's Hiera are the largest of several places",
    "Sam2VideoRoPEAttention": "SAM 2's memory mixes keys with and without rotation",
    "Sam3TrackerVideoRoPEAttention": "SAM 3's memory mixes keys with and without rotation",
}


def refuse(model: nn.Module) -> None:
    """Say why a model without parts that `swap` knows cannot be swapped, where the reason is known.

    Raises:
        ValueError: a model whose attention rotates or pools q and k in another way.
    """
    for module in model.modules():
        layer = type(module).__name__
        reason = _REASONS.get(layer)
        if reason is None and _turns(module):
            reason = f"{layer} does not hand whole q and k with cosines and sines to one function"
        if reason is not None:
            rule = f"swap puts in rotations of q and k by positions, and {reason}"
            raise ValueError(f"{rule}; {by_hand(layer)}, got {type(model).__name__}")


def by_hand(layer: str) -> str:
    """What to do instead, in one's own attention."""
    return f"torchrope.rotate(q, k, rotation, key_rotation=...) in a {layer} of your own takes any positions"


def _turns(module: nn.Module) -> bool:
    """Whether a module is attention of transformers that calls a function which rotates."""
    forward = inspect.unwrap(type(module).forward)
    if not inspect.isfunction(forward) or not type(module).__module__.startswith("transformers."):
        return False
    called = [name for name in forward.__code__.co_names if name in forward.__globals__]
    return "Attention" in type(module).__name__ and any("rotary" in name for name in called)
