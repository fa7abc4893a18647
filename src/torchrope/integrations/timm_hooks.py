"""Hooks that rotate q and k in layers of timm's models, and replacements for built-in rotary embeddings."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchrope.integrations.rotary import OneThread, Rotary
from torchrope.ops.norms import Norm, describe
from torchrope.rotating import apply, rotate
from torchrope.rotations import Planar, Rotation


class TokenPositions:
    """Positions of the tokens of the current forward: set at the patch embedding, read by the following layers.

    A block recomputed by gradient checkpointing may belong to an earlier forward than the last one; its positions are
    looked up by its input tokens.
    """

    def __init__(self, tower: nn.Module, rotary: Rotary, one_thread: OneThread) -> None:
        self.tower: Any = tower
        self.rotary = rotary
        self.one_thread = one_thread
        self.thread: int | None = None  # that computed the positions; None in a compiled graph
        self.positions: list[Tensor] = []  # one per encoding
        self.shared: Rotation | None = None  # the rotation, if one encoding is shared by all layers
        self.of_tokens: Any = WeakTensorKeyDictionary()

    def enter(self, embed: Any, args: tuple[Tensor, ...], tokens: Tensor) -> None:
        """Forward hook of the patch embedding: compute the positions of the lattice of tokens."""
        self._enter_lattice(embed.dynamic_feat_size(tuple(args[0].shape[-2:])), tokens.device)

    def enter_patches(
        self, embeds: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]
    ) -> None:
        """Forward hook of NaFlexVit's embedding: compute positions from the image's lattice or patch coordinates."""
        tokens, sizes = output
        coordinates = kwargs.get("patch_coord")
        if coordinates is None:
            self._enter_lattice(tuple(sizes), tokens.device)
        else:
            self._enter_coordinates(coordinates)

    def enter_coordinates(self, rope: nn.Module, args: tuple[Tensor, Tensor], output: Any) -> None:
        """Forward hook of Gemma 4's rotary embedding, whose input is coordinates (x, y)."""
        self._enter_coordinates(args[1].flip(-1))

    def _enter_lattice(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self._place(lambda: self.rotary.positions(sizes, self.tower.num_prefix_tokens, device=device))

    def _enter_coordinates(self, coordinates: Tensor) -> None:
        sizes = [axis.amax(dim=-1, keepdim=True) + 1 for axis in coordinates.unbind(-1)]  # (batch, 1) each
        self._place(lambda: self.rotary.positions_at(coordinates, sizes, self.tower.num_prefix_tokens))

    def keep(self, dropout: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        """Forward hook of patch dropout: select the positions of the remaining tokens."""
        tokens, kept = output
        if kept is not None:
            front = self.tower.num_prefix_tokens
            self._place(lambda: [_gathered(positions, front, kept) for positions in self._current()])
        return tokens if isinstance(self.tower, VisionTransformer) else output

    def recall(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of a block: restore the positions of the forward that the tokens belong to."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tokens = args[0]
        if tokens in self.of_tokens:
            self.positions, self.shared = self.of_tokens[tokens]
        else:
            self.of_tokens[tokens] = (self.positions, self.shared)

    def rotation(self, index: int) -> Rotation:
        """Return the rotation of one encoding for the current tokens."""
        positions = self._current()
        if not positions:
            raise ValueError(
                "blocks of a swapped model must be called through its patch embedding, got a block called alone"
            )
        return self.rotary.encodings[index](positions[index]) if self.shared is None else self.shared

    def _place(self, positions: Callable[[], list[Tensor]]) -> None:
        self.one_thread.enter(self.tower, None)  # raises if another thread is inside
        try:
            self.positions = positions()
            self.thread = None if torch.compiler.is_compiling() else threading.get_ident()
            # Computed here, not in the first layer, to be outside of the region that gradient checkpointing recomputes.
            self.shared = self.rotary.encodings[0](self.positions[0]) if len(self.positions) == 1 else None
        finally:
            self.one_thread.leave(self.tower, None, None)

    def _current(self) -> list[Tensor]:
        """Return the positions, if another thread has not replaced them; backward passes may run in another thread."""
        if torch.compiler.is_compiling() or self.thread in (None, threading.get_ident()):
            return self.positions
        if torch._C._current_graph_task_id() == -1:
            raise self.one_thread.error()
        return self.positions

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the state of the current forward from copies."""
        return {"tower": self.tower, "rotary": self.rotary, "one_thread": self.one_thread}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class RotateQK:
    """Rotate q, then k, of one layer by the positions of the current forward."""

    def __init__(self, positions: TokenPositions, index: int, *, tokens_first: bool) -> None:
        self.positions = positions
        self.index = index
        self.tokens_first = tokens_first
        self.rotation: Rotation | None = None
        self.has_rotated = False  # whether the fused norm being called has rotated

    def queries(self, norm: nn.Module, args: tuple[Tensor, ...], q: Tensor) -> Tensor:
        """Forward hook of the norm of q."""
        if self._was_rotated():
            return q
        self.rotation = self.positions.rotation(self.index)
        return self._rotated(q, self.rotation)

    def keys(self, norm: nn.Module, args: tuple[Tensor, ...], k: Tensor) -> Tensor:
        """Forward hook of the norm of k, which is called after that of q."""
        rotation, self.rotation = self.rotation, None
        if self._was_rotated():
            return k
        assert rotation is not None
        return self._rotated(k, rotation)

    def with_norm(self, x: Tensor, norm: nn.Module, *, keys: bool) -> Tensor | None:
        """Normalise and rotate q or k in one pass; returns None if the rotation does not support it."""
        if getattr(self.positions.rotary, f"channels{self.index}") is not None:
            return None
        rotation = self.rotation if keys else self.positions.rotation(self.index)
        if not isinstance(rotation, Planar):
            return None
        self.rotation = rotation
        rotated = self._rotated(x, rotation, describe("k" if keys else "q", x, norm))
        self.has_rotated = True
        return rotated

    def _was_rotated(self) -> bool:
        rotated, self.has_rotated = self.has_rotated, False
        return rotated

    def __call__(self, q: Tensor, k: Tensor, sizes: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Rotate q and k."""
        rotation = self.positions.rotation(self.index)
        return self._rotated(q, rotation), self._rotated(k, rotation)

    def _rotated(self, x: Tensor, rotation: Rotation, norm: Norm | None = None) -> Tensor:
        x = self.positions.rotary.permute_channels(x, self.index)
        return apply(x, rotation, norm=norm, layout="bthd" if self.tokens_first else "bhtd", scores_only=True)


class RotateOnLattice:
    """Rotate q and k of one layer whose tokens form a lattice."""

    def __init__(self, rotary: Rotary, index: int) -> None:
        self.rotary = rotary
        self.index = index

    def __call__(self, q: Tensor, k: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Rotate `(windows, heads, tokens, head_dim)`."""
        rotation = self.rotary.rotation(self.index, sizes, device=q.device)
        q, k = self.rotary.permute_channels(q, self.index), self.rotary.permute_channels(k, self.index)
        # Contiguous, as for SAM's bias: matrix products of other strides round differently.
        return rotate(q.contiguous(), k.contiguous(), rotation, layout="bhtd", scores_only=True)


class RotateInWindow:
    """Rotate q and k of a window's tokens in the output of the qkv projection."""

    def __init__(self, layer: Any, rotation: RotateOnLattice) -> None:
        self.layer = layer
        self.rotation = rotation

    def __call__(self, projection: nn.Module, args: tuple[Tensor, ...], qkv: Tensor) -> Tensor:
        """Rotate q and k in `(windows, tokens, 3 heads head_dim)`."""
        parts = qkv.unflatten(-1, (3, self.layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)  # (windows, heads, tokens, head_dim)
        q, k = self.rotation(q, k, tuple(self.layer.window_size))
        return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).flatten(2)


class OfLayer:
    """Forward of an attention layer that has no module to hook a rotation into."""

    def __init__(
        self, layer: nn.Module, rotation: RotateQK | RotateOnLattice, attention: Callable[..., Tensor]
    ) -> None:
        self.layer = layer
        self.rotation = rotation
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's attention with rotated q and k."""
        return self.attention(self.layer, self.rotation, *args, **kwargs)


class NoTable(nn.Module):
    """Replacement for a rotary embedding that returns no table, so layers apply no built-in rotation."""

    def get_embed(self, *args: Any, **kwargs: Any) -> None:
        """Return None."""


class NoAngle(nn.Module):
    """Replacement for Gemma 4's rotary embedding: cos = 1 and sin = 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each `(1, 1, head_dim)`."""
        return x.new_ones(1, 1, self.head_dim), x.new_zeros(1, 1, self.head_dim)


def _gathered(positions: Tensor, front: int, kept: Tensor) -> Tensor:
    """Select the first `front` positions, then those at `kept` `(batch, n)`: `(batch, front + n, axes)`."""
    of_samples = positions.expand(kept.shape[0], *positions.shape[-2:])
    index = kept.unsqueeze(-1).expand(-1, -1, positions.shape[-1])
    return torch.cat([of_samples[:, :front], of_samples[:, front:].gather(1, index)], dim=1)
