"""Convert between layouts of queries and keys as views: heads before tokens, tokens before heads."""

from torch import Tensor

from torchrope.tensors import require_tensor

LAYOUTS = ("bhtd", "bthd")
"""Heads before tokens `(batch, heads, tokens, head_dim)`, as scaled_dot_product_attention takes them, and tokens before
heads `(batch, tokens, heads, head_dim)`, as a projection leaves them and FlashAttention takes them."""


def heads_first(name: str, x: Tensor, layout: str) -> Tensor:
    """View x as `(..., heads, tokens, head_dim)`; ValueError if it does not have this layout or is nested."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    require_dense(name, x)
    if layout == "bthd" and x.ndim < 3:
        raise ValueError(f"{name} must be (batch, tokens, heads, head_dim) in layout bthd, got {tuple(x.shape)}")
    return in_layout(x, layout)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """View `(..., heads, tokens, head_dim)` in a layout."""
    return x.transpose(-3, -2) if layout == "bthd" else x


def require_dense(name: str, x: Tensor) -> None:
    """Raise ValueError for a nested tensor, or none."""
    require_tensor(name, x)
    if x.is_nested:
        raise ValueError(f"{name} of several lengths must be concatenated (torchrope.pack), got a nested tensor")
