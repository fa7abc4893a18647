"""`SwappedLayer`: the forward of another library's attention layer that rotates q and k, and ways to reach them.

Of each way the method `forward` returns the layer's own forward, in which q and k are rotated by the `SwappedLayer`;
`attach` changes parts of the layer and returns the handles that undo it.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from torchrope.integrations.forward import ForwardState
from torchrope.integrations.positions import FromArgument, FromLayer, FromPatches
from torchrope.integrations.rebound import Rebound, names_in
from torchrope.integrations.rotary import Replaced
from torchrope.rotating import apply, rotate
from torchrope.rotations import Planar, Rotation


class SwappedLayer:
    """Forward of an attention layer that rotates q and k by its encoding; called with q and k, it rotates them.

    Attributes:
        state: Of the model's forward.
        num_heads: Of keys.
        intercepted_forward: Its own forward, in which q and k are rotated.
        scores_only: Whether rotated q and k are used for scores alone: no cache keeps keys, no rotation follows.
    """

    def __init__(
        self,
        state: ForwardState,
        index: int,
        num_heads: int,
        module: nn.Module,
        positions: FromPatches | FromLayer | FromArgument,
        intercept: "Interception",
    ) -> None:
        self.state = state
        self.index = index
        self.num_heads = num_heads
        self.module = module
        self._begin = positions.begin
        self._arguments = list(inspect.signature(type(module).forward).parameters)[1:]
        keeps_keys = any("past" in name or "cache" in name for name in self._arguments)  # in the model's basis
        self.scores_only = not (keeps_keys or (intercept.precedes_rotation and state.rotary.keep_rotation))
        self._has_halves = state.rotary.has_halves[state.rotary.index(index)]
        self._in_own_order = state.rotary.channels[state.rotary.index(index)] is None
        self.intercepted_forward = intercept.forward(module, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the layer: begin with its rotation, which ends with it, also after an error."""
        running = self.state.running
        try:
            args, kwargs = self._begin(self, running, args, kwargs)
            return self.intercepted_forward(*args, **kwargs)
        finally:
            running.rotation = running.text_rotation = None

    def index_of(self, argument: str) -> int:
        """Return the index of an argument of the layer's forward, behind all if it has none of this name."""
        return self._arguments.index(argument) if argument in self._arguments else len(self._arguments)

    def __call__(self, q: Tensor, k: Tensor, layout: str = "bhtd") -> tuple[Tensor, Tensor]:
        """Rotate q and k in a layout of `torchrope.rotate`; the model's order of channels is kept."""
        rotation = self.state.running.rotation
        if rotation is None:
            return q, k
        heads = k.shape[-3 if layout == "bhtd" else -2]
        if heads != self.num_heads and heads < rotation.heads:
            held = slice(heads) if rotation.shape[-2] == 1 else self._heads_of_rank(heads, rotation.heads)
            rotation = rotation[..., held, :]
        rotation, orders = (rotation, None) if self._in_own_order else self._in_order(rotation, q.device)
        if orders is None:
            return rotate(q, k, rotation, layout=layout, scores_only=self.scores_only)
        order, back = orders
        q, k = q.index_select(-1, order), k.index_select(-1, order)
        q, k = rotate(q, k, rotation, layout=layout, scores_only=self.scores_only)
        return q.index_select(-1, back), k.index_select(-1, back)

    def after_norm(self, norm: Any, of_text: bool, layout: str, x: Tensor) -> Tensor:
        """Forward of a norm of q or k, then the rotation of its output, also if that is (batch, tokens, channels)."""
        x = x if type(norm) is nn.Identity else type(norm).forward(norm, x)
        if isinstance(self.intercepted_forward, Rebound) and self.module.fused_attn:
            return x  # q and k are rotated together, in the call of scaled_dot_product_attention
        running = self.state.running
        rotation = running.text_rotation if of_text else running.rotation
        if rotation is None:
            return x
        rotation, orders = self._in_order(rotation, x.device)
        packed = x.ndim == 3
        x = x.unflatten(-1, (-1, rotation.head_dim)) if packed else x
        x = x if orders is None else x.index_select(-1, orders[0])
        rotated = apply(x, rotation, layout=layout, scores_only=self.scores_only)
        rotated = rotated if orders is None else rotated.index_select(-1, orders[1])
        return rotated.flatten(2) if packed else rotated

    def _in_order(self, rotation: Rotation, device: torch.device) -> tuple[Rotation, tuple[Tensor, Tensor] | None]:
        """Return the rotation for the model's order of channels, or the order that it takes and the one back."""
        if self._has_halves and isinstance(rotation, Planar):
            return rotation.in_halves(), None
        return rotation, None if self._in_own_order else self.state.rotary.orders(self.index, device)

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


class Interception(ABC):
    """How a layer is made to rotate q and k, `ModelFamily.intercept`, by the methods that the module describes."""

    precedes_rotation = False

    @abstractmethod
    def forward(self, layer: Any, swapped: SwappedLayer) -> Callable[..., Any]: ...

    def attach(self, layer: Any, swapped: SwappedLayer) -> list[Any]:
        return []


@dataclass(frozen=True)
class CustomForward(Interception):
    """Replaces the forward of a layer by a function of the layer, its `SwappedLayer` and the forward's arguments."""

    function: Callable[..., Any]

    def forward(self, layer: Any, swapped: SwappedLayer) -> Callable[..., Any]:
        return partial(self.function, layer, swapped)


@dataclass(frozen=True)
class AfterNorms(Interception):
    """Rotates what the norms of q and k return, which may be `nn.Identity`.

    If they return (batch, heads, tokens, head_dim) for a call `F.scaled_dot_product_attention(q, k, ...)` that the
    layer makes where its `fused_attn` is True, q and k are rotated together, in that call.
    """

    norms: tuple[str, str] = ("q_norm", "k_norm")
    text_norms: tuple[str, ...] = ()  # those of a second stream, of text tokens, if the layer has them
    layout: str = "bhtd"  # of their input, or "bthd"; (batch, tokens, heads head_dim) is supported too
    precedes_rotation = True

    def forward(self, layer: Any, swapped: SwappedLayer) -> Callable[..., Any]:
        grouped = getattr(layer, "num_kv_heads", None) not in (None, getattr(layer, "num_heads", None))
        if swapped.scores_only and hasattr(layer, "fused_attn") and not grouped and "F" in names_in(layer):
            return Rebound(layer, "forward", {"F": _Functional(swapped)})
        return partial(type(layer).forward, layer)

    def attach(self, layer: Any, swapped: SwappedLayer) -> list[Any]:
        norms = {name: getattr(layer, name, None) for name in (*self.norms, *self.text_norms)}
        missing = next((name for name in self.norms if norms[name] is None), None)
        if missing is not None:
            raise ValueError(f"swap rotates q and k after their norms, got a {type(layer).__name__} without {missing}")
        return [
            Replaced(norm, "forward", partial(swapped.after_norm, norm, name in self.text_norms, self.layout))
            for name, norm in norms.items()
            if norm is not None
        ]


@dataclass(eq=False)
class _StandIn:
    """What a global name refers to in the forward of a layer."""

    swapped: SwappedLayer
    layout: str = "bhtd"
    replaced: Any = None  # set by Rebound

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "replaced"}  # may be set before


class _Functional(_StandIn):
    """torch.nn.functional, as a layer's forward calls it."""

    def scaled_dot_product_attention(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Rotate q and k first."""
        attended: Tensor = self.replaced.scaled_dot_product_attention(*self.swapped(query, key), *args, **kwargs)
        return attended

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


class AfterSplit(CustomForward):
    """Rotates q and k of a packed projection `(3, batch, heads, tokens, head_dim)` where `unbind(0)` splits it."""

    def __init__(self) -> None:
        super().__init__(partial(_watched, _AtSplit))


class Sdpa(CustomForward):
    """Rotates q and k of the call of scaled_dot_product_attention inside a layer."""

    def __init__(self) -> None:
        super().__init__(partial(_watched, _AtSdpa))

    def attach(self, layer: Any, swapped: SwappedLayer) -> list[Any]:
        return [Replaced(layer, "fused_attn", True)] if hasattr(layer, "fused_attn") else []  # timm's switch


@dataclass(frozen=True)
class InFunction(Interception):
    """Rotates q and k, "bhtd" or "bthd", in a function `(q, k, *tables) -> (q, k)` of the layer's module."""

    name: str
    layout: str = "bhtd"

    def forward(self, layer: Any, swapped: SwappedLayer) -> Callable[..., Any]:
        if self.name not in names_in(layer):
            rule = f"swap rotates q and k in {self.name}"
            raise ValueError(f"{rule}, got a {type(layer).__name__} that does not call it")
        return Rebound(layer, "forward", {self.name: _Rotating(swapped, self.layout)})


class InAttentionInterface(InFunction):
    """Rotates q and k `(batch, heads, tokens, head_dim)` before the attention function of transformers' layers."""

    def __init__(self) -> None:
        super().__init__("ALL_ATTENTION_FUNCTIONS")


class _Rotating(_StandIn):
    """A rotation function, or transformers' attention table."""

    def __call__(self, q: Tensor, k: Tensor, *tables: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rotate q and k."""
        if self.swapped.state.rotary.keep_rotation:
            q, k = self.replaced(q, k, *tables, **kwargs)
        if q.ndim > 3:
            return self.swapped(q, k, self.layout)
        q, k = self.swapped(q.unsqueeze(0), k.unsqueeze(0), self.layout)
        return q.squeeze(0), k.squeeze(0)

    def get_interface(self, name: str, default: Any) -> Callable[..., Any]:
        """Return an attention function that rotates q and k first."""
        attend = self.replaced.get_interface(name, default)
        return lambda layer, query, key, *args, **kwargs: attend(layer, *self.swapped(query, key), *args, **kwargs)


def _watched(watch: type["_Watch"], layer: Any, swapped: SwappedLayer, *args: Any, **kwargs: Any) -> Any:
    """Forward of a layer that calls the watched function of torch once; ValueError if it does not."""
    calls: list[bool] = []
    with watch(swapped, calls):
        output = type(layer).forward(layer, *args, **kwargs)
    if len(calls) != 1:
        rule = f"swap rotates q and k at {watch.call}, which the forward must call once"
        by_hand = "torchrope.rotate(q, k, rotation) in an attention of your own needs no swap"
        raise NotReached(f"{rule}; {by_hand}, got a {type(layer).__name__} that calls it {len(calls)} times")
    return output


class NotReached(ValueError):
    """The forward of a layer does not call the function in which q and k are rotated, or calls it more than once."""


class _Watch(TorchFunctionMode):
    """Sees the functions of torch that a layer calls; a subclass rotates q and k in one of them and notes its calls."""

    call: str

    def __init__(self, swapped: SwappedLayer, calls: list[bool]) -> None:
        self.swapped = swapped
        self.calls = calls


class _AtSplit(_Watch):
    call = "q, k, v = qkv.unbind(0)"

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
        if function is Tensor.unbind and len(output) == 3 and output[0].ndim == 4 and dim in (0, -5):
            q, k, v = output
            self.calls.append(True)
            return (*self.swapped(q, k), v)
        return output


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # by index


class _AtSdpa(_Watch):
    call = "scaled_dot_product_attention"

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.calls.append(True)
        named = {**{_SDPA[index]: value for index, value in enumerate(args)}, **(kwargs or {})}
        q, k = named["query"], named["key"]
        if q.ndim == 3:  # (batch heads, tokens, head_dim)
            heads = self.swapped.num_heads
            q, k = (x.flatten(0, 1) for x in self.swapped(q.unflatten(0, (-1, heads)), k.unflatten(0, (-1, heads))))
        else:
            q, k = self.swapped(q, k)
        return function(**{**named, "query": q, "key": k})


def kind_of_layer(layer: Any) -> tuple[Any, ...]:
    """Return what layers whose forwards take the same branches have in common: flags, and which attributes are None."""
    flags = ((name, value) for name, value in vars(layer).items() if not name.startswith("_") and name != "forward")
    return (type(layer), *((name, value if isinstance(value, bool | str) else value is None) for name, value in flags))


def inputs_of(layer: Any, tokens: Tensor) -> dict[str, Any]:
    """Return arguments of the forward of a layer alone: tokens, tables that rotate none, otherwise None or defaults."""
    hidden, *parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
    inputs: dict[str, Any] = {hidden.name: tokens}
    for p in parameters:
        if p.name == "position_embeddings":
            inputs[p.name] = (tokens.new_ones(0, 1), tokens.new_zeros(0, 1))
        elif p.name in ("rope_cos", "rope_sin"):  # timm's Gemma 4
            inputs[p.name] = tokens.new_full((1, 1, layer.head_dim), p.name == "rope_cos")
        elif p.name == "encoder_hidden_states" and getattr(layer, "add_q_proj", None) is not None:
            inputs[p.name] = tokens  # diffusers' layers of two streams
        elif p.name == "cu_seqlens":
            inputs[p.name] = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)
        elif p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            inputs[p.name] = None
    return inputs
