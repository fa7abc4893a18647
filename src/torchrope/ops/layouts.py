"""Convert between layouts of queries and keys as views: heads before tokens, tokens before heads."""

from torch import Tensor

LAYOUTS = ("bhtd", "bthd")
"""Heads before tokens `(batch, heads, tokens, head_dim)`, as scaled_dot_product_attention takes them, and tokens before
heads `(batch, tokens, heads, head_dim)`, as a projection leaves them and FlashAttention takes them."""


def heads_first(name: str, x: Tensor, layout: str) -> Tensor:
    """View x as `(..., heads, tokens, head_dim)`.

    Args:
        name: Name of x in error messages.
        x: In one of the `LAYOUTS`, with any number of leading dimensions.
        layout: One of `LAYOUTS`.

    Raises:
        ValueError: an unknown layout; fewer than 3 dimensions in layout "bthd"; a nested tensor.
    """
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
    """Raise ValueError for a nested tensor."""
    if x.is_nested:
        raise ValueError(f"{name} of several lengths must be concatenated (torchrope.pack), got a nested tensor")
