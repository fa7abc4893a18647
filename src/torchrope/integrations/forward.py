"""`ForwardState`: the positions of a running forward of a swapped model, also where checkpointing runs blocks again."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrope.integrations.rebound import Rebound, names_in
from torchrope.integrations.rotary import ATTRIBUTE, Replaced, Rotary
from torchrope.rotations import Rotation
from torchrope.tensors import private

_current_backward_pass = private("_C._current_graph_task_id")
_CHECKPOINTING = ("checkpoint", "checkpoint_seq", "checkpoint_sequential")
"""Functions of torch and timm for gradient checkpointing, which models import by name."""
_CHECKPOINTING_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes with such a function of blocks of transformers, and of those wrapped by torch.distributed."""


@dataclass(frozen=True)
class Placed:
    """The tokens of a forward.

    Attributes:
        positions: One tensor for each encoding.
        rotations: Those of all layers, one if they share an encoding; empty if each layer makes its own.
        learned: Whether gradients reach the encodings from `rotations`.
        backward: The backward pass in which the forward began, -1 outside of one; None for blocks that are run again.
    """

    positions: list[Tensor]
    rotations: list[Rotation]
    learned: bool
    backward: int | None


class Running:
    """What runs in a thread."""

    def __init__(self) -> None:
        self.placed: Placed | None = None  # the tokens of the forward
        self.within = False  # whether a method of the model runs, at whose end positions end
        self.received: Any = None  # the tables that layers received, and what was read from them
        self.rotation: Rotation | None = None  # of the layer that runs, None if it does not rotate
        self.text_rotation: Rotation | None = None  # of its text tokens, if they are a second stream


class ForwardState:
    """The state of a running forward of a swapped model, separate in each thread; `handles` undo what `swap` attached.

    Encodings are looked up at every call, to follow wrappers that replace them (peft) and copies of the model.
    """

    def __init__(self, tower: nn.Module) -> None:
        self.tower: Any = tower
        self.handles: list[Any] = []
        self._threads = threading.local()
        self._threads.running = Running()  # before a graph is compiled, which would be compiled again

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
    def running(self) -> Running:
        """The forward that runs in this thread."""
        running: Running | None = getattr(self._threads, "running", None)
        if running is None:  # no subclass of local, of which a graph break loses attributes
            running = self._threads.running = Running()
        return running

    def enter(self, tower: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model."""
        self.running.within = True

    def leave(self, *_: Any) -> None:
        """Forward hook of the model, also after an error: positions end."""
        running = self.running
        running.within, running.placed, running.received = False, None, None

    def set_positions(self, positions: list[Tensor]) -> None:
        """Set the positions of the tokens of this forward, `([batch,] tokens, axes)` for each encoding."""
        rotations, learned = self.rotary.rotations(positions), torch.is_grad_enabled()
        self.running.placed = Placed(positions, rotations, learned, _backward_pass())
        if learned:
            self._wrap_checkpointing()

    def rotation(self, running: Running, layer: int) -> Rotation:
        """Return the rotation of a layer at the positions of the forward that runs.

        Raises:
            ValueError: a layer outside of a forward, or recomputed by a function that does not know its forward.
        """
        placed, learned = running.placed, torch.is_grad_enabled()
        if placed is None or (learned and placed.backward not in (None, _backward_pass())):
            kind = type(self.tower).__name__
            if _backward_pass() != -1:
                rule = "blocks of a swapped model are recomputed by `checkpoint`, imported by name in its module"
                raise ValueError(f"{rule}, which keeps their positions; got a {kind} with another checkpointing")
            rule = "layers of a swapped model must be called through the model, which computes their positions"
            raise ValueError(f"{rule}, got a layer of {kind} called alone")
        if placed.rotations and (placed.learned or not learned):
            return placed.rotations[layer % len(placed.rotations)]
        index = self.rotary.index(layer)
        return cast(Rotation, self.rotary.encodings[index](placed.positions[index]))

    def attach(self, blocks: list[nn.Module]) -> list[Any]:
        """Make positions end with each method of the model, and recomputed blocks find them; return handles."""
        handles: list[Any] = [
            self.tower.register_forward_pre_hook(self.enter),
            self.tower.register_forward_hook(self.leave, always_call=True),
        ]
        inside = set(blocks)
        for owner in self.tower.modules():
            if owner in inside or (owner is not self.tower and inside.isdisjoint(owner.modules())):
                continue
            for name in dict.fromkeys(name for kind in type(owner).__mro__ for name in vars(kind)):
                if isinstance(getattr(type(owner), name, None), FunctionType):
                    handles.extend(self._replace_method(owner, name))
        return [*handles, _Unwrapped(self.tower)]

    def _replace_method(self, owner: Any, name: str) -> list[Replaced]:
        """Replace a method that calls a checkpointing function, or of the model one at whose end positions end."""
        function = getattr(type(owner), name)
        called = [] if hasattr(function, "__wrapped__") else names_in(owner, name)
        checkpointing = {used: _Checkpointing(self) for used in called if used in _CHECKPOINTING}
        method: Any = Rebound(owner, name, checkpointing) if checkpointing else partial(function, owner)
        if owner is self.tower and name.startswith("forward_"):
            return [Replaced(owner, name, _Ending(self, method))]
        return [Replaced(owner, name, method)] if checkpointing else []

    def _wrap_checkpointing(self) -> None:
        """Wrap the checkpointing functions that blocks have as attributes; users set them at any time."""
        for module in self.tower.modules():
            for name in _CHECKPOINTING_ATTRIBUTES:
                compiles = torch.compiler.is_compiling()  # which reads no `vars`
                function = getattr(module, name, None) if compiles else vars(module).get(name)
                if function is not None and not isinstance(function, _Checkpointing):
                    setattr(module, name, _Checkpointing(self, function))


def _backward_pass() -> int:
    """Return the number of the backward pass that runs, -1 for none or where it is unknown."""
    known = _current_backward_pass is not None and not torch.compiler.is_compiling()
    return int(_current_backward_pass()) if known else -1


@dataclass(eq=False)
class _Ending:
    """A method of a model, other than its forward, at whose end positions end if it was called alone."""

    state: ForwardState
    method: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.running.within:
            return self.method(*args, **kwargs)
        self.state.enter(self.state.tower, args)
        try:
            return self.method(*args, **kwargs)
        finally:
            self.state.leave()


@dataclass(eq=False)
class _Checkpointing:
    """A checkpointing function that recomputes at the positions of the forward in which it was called."""

    state: ForwardState
    replaced: Any = None  # set by Rebound

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        placed = self.state.running.placed
        if placed is None:
            return self.replaced(function, *args, **kwargs)
        if isinstance(function, list | tuple | nn.Sequential | nn.ModuleList):
            bound: Any = [_Bound(self.state, placed, part) for part in function]
        else:
            bound = _Bound(self.state, placed, function)
        return self.replaced(bound, *args, **kwargs)


class _Bound:
    """A block at the positions of its forward. They are no arguments, which checkpointing copies."""

    def __init__(self, state: ForwardState, placed: Placed, block: Callable[..., Any]) -> None:
        self.state = state
        self.placed = Placed(placed.positions, placed.rotations, placed.learned, None)
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # reentrant checkpointing, where each block needs a rotation of its own graph
            self.placed = Placed(self.placed.positions, [], False, None)
        running = self.state.running
        outer, running.placed = running.placed, self.placed
        try:
            return self.block(*args, **kwargs)
        finally:
            running.placed = outer


class _Unwrapped:
    """Restores the checkpointing functions that blocks have as attributes."""

    def __init__(self, tower: nn.Module) -> None:
        self.tower = tower

    def remove(self) -> None:
        for module in self.tower.modules():
            for name in _CHECKPOINTING_ATTRIBUTES:
                if isinstance(vars(module).get(name), _Checkpointing):
                    vars(module)[name] = vars(module)[name].replaced
