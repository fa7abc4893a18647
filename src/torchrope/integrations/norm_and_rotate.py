"""Norms of q and k that swapped models compute in one pass with the rotation after them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchrope.integrations.rotary import Replaced
from torchrope.ops.norms import NO_NORM, is_called, is_plain, kind_of


class NormAndRotate:
    """Forward of a norm fused with the rotation in the hook after it; not fused if the norm has other hooks.

    Args:
        norm: The norm, with one forward hook, which rotates its output unless `with_norm` did.
        with_norm: Normalises and rotates its first argument by the norm, its second one, in one pass; returns None if
            the rotation does not support it.
        arguments: Further arguments of `with_norm`.
    """

    def __init__(self, norm: nn.Module, with_norm: Callable[..., Tensor | None], arguments: dict[str, Any]) -> None:
        self.norm = norm
        self.with_norm = with_norm
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm, and the rotation if both can be fused."""
        rotated = None
        if is_plain(self.norm) and not is_called(self.norm, own_hooks=1):
            rotated = self.with_norm(x, self.norm, **self.arguments)
        result: Tensor = type(self.norm).forward(self.norm, x) if rotated is None else rotated
        return result


def fused(norm: nn.Module, with_norm: Callable[..., Tensor | None], **arguments: Any) -> list[Any]:
    """Fuse a norm with the rotation in its forward hook, if its type allows; return the handles that undo it."""
    return (
        [Replaced(norm, "forward", NormAndRotate(norm, with_norm, arguments).forward)]
        if kind_of(norm) != NO_NORM
        else []
    )
