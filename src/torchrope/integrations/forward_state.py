"""`ForwardState`: what a running forward of a swapped model knows, and `LayerEncoder`, which rotates q and k by it."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchrope.integrations.rotary import ATTRIBUTE, Rotary
from torchrope.ops.norms import describe, is_called, is_plain, shape_of
from torchrope.rotating import apply, rotate
from torchrope.rotations import Planar, Rotation
from torchrope.tensors import private

_backward_pass = private("_C._current_graph_task_id")


class _Running(threading.local):
    """The forward that runs in a thread.

    Attributes:
        positions: Of its tokens, one tensor for each encoding; None outside of a forward.
        shared: The rotation, if all layers share an encoding.
        learns: Whether a backward pass may recompute blocks.
        rotation: The rotation of the layer that runs, None if it does not rotate.
        other: The rotation of its second stream of tokens, if any.
    """

    def __init__(self) -> None:  # called in each thread
        self.positions: list[Tensor] | None = None
        self.shared: Rotation | None = None
        self.learns = False
        self.rotation: Rotation | None = None
        self.other: Rotation | None = None


class ForwardState:
    """The state of a running forward of a swapped model, separate in each thread.

    Encodings are looked up in the model at every call, so that wrappers that replace them (peft) and copies of the
    model are followed. A block that gradient checkpointing runs again in the backward pass, possibly in another thread
    and after other forwards, finds the positions of its forward by its input.

    Args:
        tower: The module that holds the attention layers and, as `rotary`, the encodings.

    Attributes:
        handles: Undo what `swap` attached, by `remove()`.
        running: The forward that runs in this thread.
    """

    def __init__(self, tower: nn.Module) -> None:
        self.tower: Any = tower
        self.handles: list[Any] = []
        self.running = _Running()
        self._of_inputs: dict[Any, tuple[StorageWeakRef, list[Tensor] | None, Rotation | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Exclude running forwards from copies."""
        return {"tower": self.tower, "handles": self.handles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ForwardState.__init__(self, state["tower"])
        self.handles = state["handles"]

    @property
    def rotary(self) -> Rotary:
        """The encodings of the model."""
        rotary: Rotary = getattr(self.tower, ATTRIBUTE)
        return rotary

    def enter(
        self, indices: Tensor, sizes: Sequence[int | Tensor] = (), num_prefix: int = 0, num_suffix: int = 0
    ) -> None:
        """Set the positions of the tokens of this forward; arguments of `Rotary.positions`."""
        self._place(self.rotary.positions(indices, sizes, num_prefix, num_suffix))

    def keep(self, kept: Tensor, num_prefix: int) -> None:
        """Select the positions of the prefix and of the patches that patch dropout kept, `(batch, n)` indices."""
        assert self.running.positions is not None
        prefix = torch.arange(num_prefix, device=kept.device).expand(len(kept), -1)
        index = torch.cat([prefix, kept + num_prefix], dim=1).unsqueeze(-1)
        self._place(
            [
                positions.expand(len(kept), *positions.shape[-2:]).gather(1, index.expand(-1, -1, positions.shape[-1]))
                for positions in self.running.positions
            ]
        )

    def leave(self, tower: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the tower: forget the forward."""
        self.running.positions = self.running.shared = None

    def remember(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a block: link its input to the positions, or find them if it is recomputed."""
        if not torch.compiler.is_compiling() and (self.running.learns or torch.is_grad_enabled()):
            self._link(args, kwargs)

    def recall(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the parts of a block, for libraries that recompute its forward without its hooks."""
        if torch.compiler.is_compiling():
            return
        if _is_backward() or (self.running.learns and not torch.is_grad_enabled()):
            self._link(args, kwargs)

    def begin(
        self,
        layer: int,
        indices: Tensor | None = None,
        sizes: Sequence[int | Tensor] = (),
        *,
        others: int = 0,
        exact: bool = False,
    ) -> None:
        """Compute the rotation of a layer that starts.

        Args:
            layer: Its index.
            indices: Lattice indices of its tokens, if the layer knows them; default: those of the forward.
            sizes: Tokens of that lattice along each axis.
            others: Leading tokens that belong to a second stream.
            exact: Whether cos and sin are computed by PyTorch, as in a model whose large angles round differently.

        Raises:
            ValueError: no forward of the model has set positions.
        """
        here, rotary = self.running, self.rotary
        index = rotary.index(layer)
        if indices is not None:
            rotation = rotary.encodings[index](rotary.at(index, indices, sizes))
        elif here.positions is None:
            rule = "layers of a swapped model must be called through the model, which computes their positions"
            raise ValueError(f"{rule}, got a layer of {type(self.tower).__name__} called alone")
        else:
            rotation = here.shared if here.shared is not None else rotary.encodings[index](here.positions[index])
        if exact and isinstance(rotation, Planar):
            rotation = replace(rotation, table=torch.stack(rotation.cos_sin(), dim=-2))
        here.rotation, here.other = (rotation[..., others:], rotation[..., :others]) if others else (rotation, None)

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a layer: forget its rotation."""
        self.running.rotation = self.running.other = None

    def _link(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        reference = None if tokens is None else _storage(tokens)
        if tokens is None or reference is None:
            return
        here, key = self.running, (reference.cdata, tokens.storage_offset(), tokens.shape)
        if _is_backward():
            if key in self._of_inputs:
                _, here.positions, here.shared = self._of_inputs[key]
            return
        # Without gradients this is reentrant checkpointing: each recomputed block needs a rotation of its own graph.
        self._of_inputs[key] = (reference, here.positions, here.shared if torch.is_grad_enabled() else None)

    def _place(self, positions: list[Tensor]) -> None:
        here = self.running
        here.positions, here.learns = positions, torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            for key, (storage, *_) in list(self._of_inputs.items()):
                if storage.expired():
                    self._of_inputs.pop(key, None)
        # Computed here, not in the first layer, to be outside of the region that gradient checkpointing recomputes.
        here.shared = self.rotary.encodings[0](positions[0]) if len(positions) == 1 else None


class LayerEncoder:
    """Rotates q and k of one layer by its encoding.

    Args:
        state: The state of the model's forward.
        layer: Index of the layer.
        num_heads: Number of key heads.
    """

    def __init__(self, state: ForwardState, layer: int, num_heads: int) -> None:
        self.state = state
        self.layer = layer
        self.num_heads = num_heads

    @property
    def keeps_rotation(self) -> bool:
        """Whether the model's built-in rotation is kept."""
        return self.state.rotary.keep_rotation

    def __call__(self, q: Tensor, k: Tensor, layout: str = "bhtd") -> tuple[Tensor, Tensor]:
        """Rotate q and k, in a layout of `torchrope.rotate`, up to a common basis, which scores do not contain."""
        rotation = self.state.running.rotation
        if rotation is None:
            return q, k
        order = self.state.rotary.order(self.layer)
        if order is not None:
            q, k = q.index_select(-1, order), k.index_select(-1, order)
        return rotate(q, k, rotation, layout=layout, scores_only=True)

    def after_norm(self, norm: Any, x: Tensor, *, other: bool, layout: str, exact: bool) -> Tensor:
        """Rotate what a norm returns for q or k, in one pass if the kernel computes the norm too.

        Args:
            norm: The norm, with a forward that calls this.
            x: Its input, in a layout of `torchrope.rotate` or `(batch, tokens, heads head_dim)`.
            other: Whether tokens are those of the second stream.
            layout: Of the input.
            exact: Whether the norm is computed by itself, because the rotation has cos and sin of PyTorch.
        """
        rotation = self.state.running.other if other else self.state.running.rotation
        if rotation is None:
            normed: Tensor = type(norm).forward(norm, x)
            return normed
        order = self.state.rotary.order(self.layer)
        fits = not exact and order is None and isinstance(rotation, Planar) and x.ndim == 4 and is_plain(norm)
        fused = fits and shape_of(norm) == x.shape[-1:] and not is_called(norm, own_forward=True)
        described = describe("q or k", x, norm) if fused else None
        if not fused:
            x = type(norm).forward(norm, x)
        packed = x.ndim == 3
        x = x.unflatten(-1, (-1, rotation.head_dim)) if packed else x
        x = x if order is None else x.index_select(-1, order)
        rotated = apply(x, rotation, norm=described, layout=layout, scores_only=True)
        return rotated.flatten(2) if packed else rotated


def _is_backward() -> bool:
    return _backward_pass is None or _backward_pass() != -1


def _storage(x: Tensor) -> StorageWeakRef | None:
    """Return a reference to a tensor's memory, which detached copies share; None for tensors without."""
    try:
        return StorageWeakRef(x.untyped_storage())
    except (NotImplementedError, RuntimeError):  # of a subclass of tensors
        return None
