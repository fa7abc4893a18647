"""Hooks by which layers of timm's models rotate q and k, and modules that stand in for a rotation of their own."""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import LayerNorm, LayerNormFp32, RmsNorm, RmsNormFp32
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchrope.integrations.rotary import Rotary
from torchrope.ops import rotate, rotate_one
from torchrope.ops.norms import LAYER_NORM, PLAIN, RMS_NORM, Norm, describe, is_called
from torchrope.rotations import Planar, Rotation

PLAIN.update({LayerNorm: LAYER_NORM, LayerNormFp32: LAYER_NORM, RmsNorm: RMS_NORM, RmsNormFp32: RMS_NORM})


class Places:
    """Where the tokens of the present forward are: written at the patch embedding, read by the layers behind it.

    A block that gradient checkpointing recomputes may belong to an earlier forward than the last one; it finds its
    own places by the tokens that it is given.
    """

    def __init__(self, tower: nn.Module, rotary: Rotary) -> None:
        self.tower: Any = tower
        self.rotary = rotary
        self.positions: list[Tensor] = []  # of each encoding
        self.shared: Rotation | None = None  # the one rotation, where one encoding serves all layers
        self.of_tokens: Any = WeakTensorKeyDictionary()

    def enter(self, embed: Any, args: tuple[Tensor, ...], tokens: Tensor) -> None:
        """Behind the patch embedding: place the tokens on their lattice."""
        self._enter_lattice(embed.dynamic_feat_size(tuple(args[0].shape[-2:])), tokens.device)

    def enter_patches(
        self, embeds: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]
    ) -> None:
        """Behind NaFlexVit's embedding: place the patches on the lattice of the image, or each by its coordinates."""
        tokens, sizes = output
        coordinates = kwargs.get("patch_coord")
        if coordinates is None:
            self._enter_lattice(tuple(sizes), tokens.device)
        else:
            self._enter_coordinates(coordinates)

    def enter_coordinates(self, rope: nn.Module, args: tuple[Tensor, Tensor], output: Any) -> None:
        """Behind Gemma 4's rotary embedding, which gets coordinates (x, y)."""
        self._enter_coordinates(args[1].flip(-1))

    def _enter_lattice(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self._place(self.rotary.positions(sizes, self.tower.num_prefix_tokens, device=device))

    def _enter_coordinates(self, coordinates: Tensor) -> None:
        sizes = [axis.amax(dim=-1, keepdim=True) + 1 for axis in coordinates.unbind(-1)]  # (batch, 1) each
        self._place(self.rotary.positions_at(coordinates, sizes, self.tower.num_prefix_tokens))

    def keep(self, dropout: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        """Behind patch dropout: the tokens that are left keep their places."""
        tokens, kept = output
        if kept is not None:
            front = self.tower.num_prefix_tokens
            self._place([_gathered(where, front, kept) for where in self.positions])
        return tokens if isinstance(self.tower, VisionTransformer) else output

    def recall(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Before a block: go back to the forward that these tokens belong to."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tokens = args[0]
        if tokens in self.of_tokens:
            self.positions, self.shared = self.of_tokens[tokens]
        else:
            self.of_tokens[tokens] = (self.positions, self.shared)

    def rotation(self, index: int) -> Rotation:
        """The rotation of one encoding for the present tokens."""
        if not self.positions:
            raise ValueError("a swapped model places its tokens at the patch embedding, got a block called by itself")
        return self.rotary.encodings[index](self.positions[index]) if self.shared is None else self.shared

    def _place(self, positions: list[Tensor]) -> None:
        self.positions = positions
        # Made here and not in the first layer: gradient checkpointing must find it outside of what it recomputes.
        self.shared = self.rotary.encodings[0](positions[0]) if len(positions) == 1 else None

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins with a forward of its own."""
        return {"tower": self.tower, "rotary": self.rotary}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Turn:
    """Rotate q, then k, of one layer, by where the tokens of the present forward are."""

    def __init__(self, places: Places, index: int, *, tokens_first: bool) -> None:
        self.places = places
        self.index = index
        self.tokens_first = tokens_first
        self.rotation: Rotation | None = None
        self.has_turned = False  # whether the norm that is being called has rotated

    def queries(self, norm: nn.Module, args: tuple[Tensor, ...], q: Tensor) -> Tensor:
        """Behind the norm of q."""
        if self._was_turned():
            return q
        self.rotation = self.places.rotation(self.index)
        return self._turned(q, self.rotation)

    def keys(self, norm: nn.Module, args: tuple[Tensor, ...], k: Tensor) -> Tensor:
        """Behind the norm of k, which follows."""
        rotation, self.rotation = self.rotation, None
        if self._was_turned():
            return k
        assert rotation is not None
        return self._turned(k, rotation)

    def with_norm(self, x: Tensor, norm: nn.Module, *, keys: bool) -> Tensor | None:
        """Normalise and rotate q or k in one pass; None where the rotation needs more than one."""
        if getattr(self.places.rotary, f"channels{self.index}") is not None:
            return None
        rotation = self.rotation if keys else self.places.rotation(self.index)
        if not isinstance(rotation, Planar):
            return None
        self.rotation = rotation
        turned = self._turned(x, rotation, describe("k" if keys else "q", x, norm))
        self.has_turned = True
        return turned

    def _was_turned(self) -> bool:
        turned, self.has_turned = self.has_turned, False
        return turned

    def __call__(self, q: Tensor, k: Tensor, sizes: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Both at once."""
        rotation = self.places.rotation(self.index)
        return self._turned(q, rotation), self._turned(k, rotation)

    def _turned(self, x: Tensor, rotation: Rotation, norm: Norm | None = None) -> Tensor:
        x = self.places.rotary.in_pairs(x, self.index)
        return rotate_one(x, rotation, norm=norm, layout="bthd" if self.tokens_first else "bhtd", scores_only=True)


class NormAndTurn:
    """The forward of a norm of q or k that a `Turn` stands behind: both in one pass, unless others look at the norm."""

    def __init__(self, norm: nn.Module, turn: Turn, *, keys: bool) -> None:
        self.norm = norm
        self.turn = turn
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        """The norm, rotated where it can be."""
        turned = None if is_called(self.norm, own_hooks=1) else self.turn.with_norm(x, self.norm, keys=self.keys)
        result: Tensor = type(self.norm).forward(self.norm, x) if turned is None else turned
        return result


class TurnOnLattice:
    """Rotate q and k of one layer, whose tokens are a lattice of their own."""

    def __init__(self, rotary: Rotary, index: int) -> None:
        self.rotary = rotary
        self.index = index

    def __call__(self, q: Tensor, k: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Turn `(windows, heads, tokens, head_dim)`."""
        rotation = self.rotary.rotation(self.index, sizes, device=q.device)
        q, k = self.rotary.in_pairs(q, self.index), self.rotary.in_pairs(k, self.index)
        # Contiguous, as SAM's bias takes them: products of other strides end in other last bits.
        return rotate(q.contiguous(), k.contiguous(), rotation, layout="bhtd", scores_only=True)


class TurnInWindow:
    """Rotate q and k of a window's tokens in the output of their projection."""

    def __init__(self, layer: Any, turn: TurnOnLattice) -> None:
        self.layer = layer
        self.turn = turn

    def __call__(self, projection: nn.Module, args: tuple[Tensor, ...], qkv: Tensor) -> Tensor:
        """Turn `(windows, tokens, 3 heads head_dim)`."""
        parts = qkv.unflatten(-1, (3, self.layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)  # (windows, heads, tokens, head_dim)
        q, k = self.turn(q, k, tuple(self.layer.window_size))
        return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).flatten(2)


class OfLayer:
    """The forward of an attention layer that has no place to hook a rotation in."""

    def __init__(self, layer: nn.Module, turn: Turn | TurnOnLattice, attention: Callable[..., Tensor]) -> None:
        self.layer = layer
        self.turn = turn
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's attention with rotated q and k."""
        return self.attention(self.layer, self.turn, *args, **kwargs)


class NoTable(nn.Module):
    """In place of a rotary embedding: no table, and the layers do not rotate."""

    def get_embed(self, *args: Any, **kwargs: Any) -> None:
        """No table."""


class NoAngle(nn.Module):
    """In place of Gemma 4's rotary embedding: cos = 1 and sin = 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each `(1, 1, head_dim)`."""
        return x.new_ones(1, 1, self.head_dim), x.new_zeros(1, 1, self.head_dim)


def _gathered(positions: Tensor, front: int, kept: Tensor) -> Tensor:
    """Positions `(batch, tokens kept, axes)` of the first tokens and those kept `(batch, kept)` of the others."""
    of_samples = positions.expand(kept.shape[0], *positions.shape[-2:])
    index = kept.unsqueeze(-1).expand(-1, -1, positions.shape[-1])
    return torch.cat([of_samples[:, :front], of_samples[:, front:].gather(1, index)], dim=1)
