"""`ForwardState`: positions and rotations of a running forward of a swapped model; `LayerEncoder` rotates q and k."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchrope.integrations.rotary import ATTRIBUTE, Rotary
from torchrope.rotating import apply, rotate
from torchrope.rotations import Planar, Rotation
from torchrope.tensors import private

_backward_pass = private("_C._current_graph_task_id")


class _Running:
    """The forward that runs in a thread."""

    def __init__(self) -> None:
        self.positions: list[Tensor] | None = None  # of its tokens, one tensor for each encoding
        self.shared: Rotation | None = None  # the rotation, if all layers share an encoding
        self.learns = False  # whether a backward pass may recompute blocks
        self.rotation: Rotation | None = None  # of the layer that runs, None if it does not rotate
        self.other: Rotation | None = None  # of its second stream of tokens, if any


class ForwardState:
    """The state of a running forward of a swapped model, separate in each thread; `handles` undo what `swap` attached.

    Encodings are looked up in the model at every call, so that wrappers that replace them (peft) and copies of the
    model are followed. A block that gradient checkpointing runs again in the backward pass, possibly in another thread
    and after other forwards, finds the positions of its forward by its input.
    """

    def __init__(self, tower: nn.Module) -> None:
        self.tower: Any = tower
        self.handles: list[Any] = []
        self._threads = threading.local()
        self._threads.running = _Running()  # before a graph is compiled, which would be compiled again
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

    @property
    def running(self) -> _Running:
        """The forward that runs in this thread."""
        if not hasattr(self._threads, "running"):  # no subclass of local, of which a graph break loses attributes
            self._threads.running = _Running()
        running: _Running = self._threads.running
        return running

    def place(self, positions: list[Tensor]) -> None:
        """Set the positions of the tokens of this forward, `([batch,] tokens, axes)` for each encoding."""
        running = self.running
        running.positions, running.learns = positions, torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            for key, (storage, *_) in list(self._of_inputs.items()):
                if storage.expired():
                    self._of_inputs.pop(key, None)
        # Computed here, not in the first layer, to be outside of the region that gradient checkpointing recomputes.
        running.shared = self.rotary.encodings[0](positions[0]) if len(positions) == 1 else None

    def leave(self, tower: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the tower: forget the forward."""
        self.running.positions = self.running.shared = None

    def link(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, part: bool) -> None:
        """Pre-hook of a block or its parts: link its input to the positions, or find them if it is recomputed."""
        if torch.compiler.is_compiling():
            return
        running, learns = self.running, torch.is_grad_enabled()
        backward = _backward_pass is None or _backward_pass() != -1
        if not (backward or (running.learns and not learns) if part else running.learns or learns):
            return
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if tokens is None:
            return
        try:
            reference = StorageWeakRef(tokens.untyped_storage())  # of memory that detached copies share
        except (NotImplementedError, RuntimeError):  # a subclass of tensors without memory
            return
        key = (reference.cdata, tokens.storage_offset(), tokens.shape)
        if not backward:
            # Without gradients this is reentrant checkpointing: each block needs a rotation of its own graph.
            self._of_inputs[key] = (reference, running.positions, running.shared if learns else None)
        elif key in self._of_inputs:
            _, running.positions, running.shared = self._of_inputs[key]

    def begin(
        self,
        layer: int,
        indices: Tensor | None = None,
        sizes: Sequence[int | Tensor] = (),
        *,
        others: int = 0,
        exact: bool = False,
    ) -> None:
        """Compute the rotation of a layer that starts, at the lattice indices of its tokens or those of the forward.

        The first `others` tokens belong to a second stream. If `exact`, PyTorch computes cos and sin, as in a model
        whose large angles round differently.
        """
        running, rotary = self.running, self.rotary
        index = rotary.index(layer)
        if indices is not None:
            rotation = rotary.encodings[index](rotary.at(index, indices, sizes))
        elif running.positions is None:
            rule = "layers of a swapped model must be called through the model, which computes their positions"
            raise ValueError(f"{rule}, got a layer of {type(self.tower).__name__} called alone")
        else:
            shared = running.shared
            rotation = rotary.encodings[index](running.positions[index]) if shared is None else shared
        if exact and isinstance(rotation, Planar):
            rotation = rotation._with(_table=torch.stack(rotation.cos_sin(), dim=-2))
        running.rotation = rotation[..., others:] if others else rotation
        running.other = rotation[..., :others] if others else None

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a layer: forget its rotation."""
        self.running.rotation = self.running.other = None


@dataclass(eq=False)
class LayerEncoder:
    """Rotates q and k of one layer by its encoding."""

    state: ForwardState
    layer: int  # its index
    num_heads: int  # of keys
    module: nn.Module

    def __call__(self, q: Tensor, k: Tensor, layout: str = "bhtd") -> tuple[Tensor, Tensor]:
        """Rotate q and k, in a layout of `torchrope.rotate`, up to a common basis, which scores do not contain."""
        rotation = self.state.running.rotation
        if rotation is None:
            return q, k
        order = self.state.rotary.order(self.layer, q.device)
        if order is not None:
            q, k = q.index_select(-1, order), k.index_select(-1, order)
        heads = k.shape[-3 if layout == "bhtd" else -2]
        if heads < rotation.heads:
            held = slice(heads) if rotation.shape[-2] == 1 else self._heads_of_rank(heads, rotation.heads)
            rotation = rotation[..., held, :]
        return rotate(q, k, rotation, layout=layout, scores_only=True)

    def _heads_of_rank(self, heads: int, total: int) -> slice:
        """Return which heads a layer holds that tensor parallelism splits over the ranks of a mesh."""
        for parameter in self.module.parameters():
            mesh: Any = getattr(parameter, "device_mesh", None)
            for dim, placement in enumerate(getattr(parameter, "placements", ())):
                if placement.is_shard() and mesh.size(dim) * heads == total:
                    first = mesh.get_local_rank(dim) * heads
                    return slice(first, first + heads)
        rule = "a layer that holds a part of the heads must have DTensors as weights, which know their rank"
        hint = "or swap with an encoding that heads share, functools.partial(MixedRoPE, shared_heads=True)"
        raise ValueError(f"{rule}, {hint}; got {heads} of {total} heads in a {type(self.module).__name__}")

    def after_norm(self, norm: Any, x: Tensor, *, other: bool, layout: str) -> Tensor:
        """Forward of a norm of q or k, then the rotation of its output, also if that is (batch, tokens, channels)."""
        rotation = self.state.running.other if other else self.state.running.rotation
        x = type(norm).forward(norm, x)
        if rotation is None:
            return x
        order = self.state.rotary.order(self.layer, x.device)
        packed = x.ndim == 3
        x = x.unflatten(-1, (-1, rotation.head_dim)) if packed else x
        x = x if order is None else x.index_select(-1, order)
        rotated = apply(x, rotation, layout=layout, scores_only=True)
        return rotated.flatten(2) if packed else rotated
