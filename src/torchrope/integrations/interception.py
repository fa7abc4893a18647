"""Rotate q and k inside the attention layers of other libraries' models, one class for each way to reach them.

The method `attach` makes a layer rotate q and k by a `LayerEncoder` and returns the handles that undo it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from torchrope.integrations.forward_state import LayerEncoder
from torchrope.integrations.rotary import Replaced


@dataclass(frozen=True)
class OwnForward:
    """Replaces the forward of a layer by a function of the layer, its `LayerEncoder` and the forward's arguments."""

    forward: Callable[..., Any]

    def attach(self, layer: Any, encode: LayerEncoder) -> list[Any]:
        return [Replaced(layer, "forward", partial(self.forward, layer, encode))]


@dataclass(frozen=True)
class AfterNorms:
    """Rotates what the norms of q and k return, which may be `nn.Identity`."""

    norms: tuple[str, str] = ("q_norm", "k_norm")
    others: tuple[str, ...] = ()  # those of a second stream of tokens, if the layer has them
    layout: str = "bhtd"  # of their input, or "bthd"; (batch, tokens, heads head_dim) is supported too

    def attach(self, layer: Any, encode: LayerEncoder) -> list[Any]:
        norms = {name: getattr(layer, name, None) for name in (*self.norms, *self.others)}
        missing = next((name for name in self.norms if norms[name] is None), None)
        if missing is not None:
            raise ValueError(f"swap rotates q and k after their norms, got a {type(layer).__name__} without {missing}")
        return [
            Replaced(norm, "forward", partial(encode.after_norm, norm, other=name in self.others, layout=self.layout))
            for name, norm in norms.items()
            if norm is not None
        ]


class AfterSplit(OwnForward):
    """Rotates q and k of a packed projection `(3, batch, heads, tokens, head_dim)` where `unbind(0)` splits it."""

    def __init__(self) -> None:
        super().__init__(partial(_watched, _AtSplit))


class Sdpa(OwnForward):
    """Rotates q and k of the call of scaled_dot_product_attention inside a layer."""

    def __init__(self) -> None:
        super().__init__(partial(_watched, _AtSdpa))

    def attach(self, layer: Any, encode: LayerEncoder) -> list[Any]:
        fused = [Replaced(layer, "fused_attn", True)] if hasattr(layer, "fused_attn") else []  # timm's switch
        return [*fused, *super().attach(layer, encode)]


@dataclass(frozen=True)
class InFunction:
    """Rotates q and k, "bhtd" or "bthd", in a function `(q, k, *tables) -> (q, k)` of the layer's module."""

    name: str
    layout: str = "bhtd"

    def attach(self, layer: Any, encode: LayerEncoder) -> list[Any]:
        rebound = _Rebound(layer, encode, self.name, self.layout)
        return [Replaced(layer, "forward", partial(_Rebound.forward, rebound))]


class InAttentionInterface(InFunction):
    """Rotates q and k `(batch, heads, tokens, head_dim)` before the attention function of transformers' layers."""

    def __init__(self) -> None:
        super().__init__("ALL_ATTENTION_FUNCTIONS")


Meets = OwnForward | AfterNorms | InFunction
"""What makes a layer rotate q and k; others are their subclasses."""


def _watched(watch: type["_Watch"], layer: Any, encode: LayerEncoder, *args: Any, **kwargs: Any) -> Any:
    """Forward of a layer that calls the watched function of torch once; ValueError if it does not."""
    calls: list[bool] = []
    with watch(encode, calls):
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

    def __init__(self, encode: LayerEncoder, calls: list[bool]) -> None:
        self.encode = encode
        self.calls = calls


class _AtSplit(_Watch):
    call = "q, k, v = qkv.unbind(0)"

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
        if function is Tensor.unbind and len(output) == 3 and output[0].ndim == 4 and dim in (0, -5):
            q, k, v = output
            self.calls.append(True)
            return (*self.encode(q, k), v)
        return output


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # by place


class _AtSdpa(_Watch):
    call = "scaled_dot_product_attention"

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.calls.append(True)
        named = {**{_SDPA[place]: value for place, value in enumerate(args)}, **(kwargs or {})}
        q, k = named["query"], named["key"]
        if q.ndim == 3:  # (batch heads, tokens, head_dim)
            heads = self.encode.num_heads
            q, k = (x.flatten(0, 1) for x in self.encode(q.unflatten(0, (-1, heads)), k.unflatten(0, (-1, heads))))
        else:
            q, k = self.encode(q, k)
        return function(**{**named, "query": q, "key": k})


@dataclass(eq=False, repr=False)
class _Rebound:
    """What a global name refers to in the forward of a layer: a rotation function, or transformers' attention table."""

    layer: Any
    encode: LayerEncoder
    name: str
    layout: str

    def __post_init__(self) -> None:
        forward = forward_of(self.layer)
        if self.name not in forward.__code__.co_names or self.name not in forward.__globals__:
            raise ValueError(
                f"swap rotates q and k in {self.name}, got a {type(self.layer).__name__} that does not call it"
            )
        self.module_names = forward.__globals__
        self.replaced = self.module_names[self.name]
        self.function = with_global(forward, self.name, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the layer's class, in which the name refers to this object."""
        if not torch.compiler.is_compiling():  # others may have replaced functions in the layer's module since
            names = self.function.__globals__
            for name in self.function.__code__.co_names:
                now = self.module_names.get(name)
                if name == self.name:
                    self.replaced = now
                elif names.get(name) is not now:
                    names[name] = now
        return self.function(self.layer, *args, **kwargs)

    def __call__(self, q: Tensor, k: Tensor, *tables: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rotate q and k."""
        if self.encode.state.rotary.keep_rotation:
            q, k = self.replaced(q, k, *tables, **kwargs)
        if q.ndim > 3:
            return self.encode(q, k, self.layout)
        q, k = self.encode(q.unsqueeze(0), k.unsqueeze(0), self.layout)
        return q.squeeze(0), k.squeeze(0)

    def get_interface(self, name: str, default: Any) -> Callable[..., Any]:
        """Return an attention function that rotates q and k first."""
        attend = self.replaced.get_interface(name, default)
        return lambda layer, query, key, *args, **kwargs: attend(layer, *self.encode(query, key), *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Rebound.__init__(self, **state)


def with_global(forward: FunctionType, name: str, value: Any) -> FunctionType:
    """Return a copy of a function for which a global name refers to another value."""
    names = {**forward.__globals__, name: value}
    del names["__name__"]  # a compiler would look the names up in the module of that name
    code = forward.__code__.replace()  # compilers keep graphs by code, and this has names of its own
    copied = FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def kind_of_layer(layer: Any) -> tuple[Any, ...]:
    """Return what layers whose forwards take the same branches have in common: flags, and which attributes are None."""
    flags = ((name, value) for name, value in vars(layer).items() if not name.startswith("_") and name != "forward")
    return (type(layer), *((name, value if isinstance(value, bool | str) else value is None) for name, value in flags))


def inputs_of(layer: Any, tokens: Tensor) -> dict[str, Any]:
    """Return arguments of the forward of a layer alone: tokens, tables that rotate none, otherwise None or defaults."""
    hidden, *others = list(inspect.signature(type(layer).forward).parameters.values())[1:]
    inputs: dict[str, Any] = {hidden.name: tokens}
    for other in others:
        if other.name == "position_embeddings":
            inputs[other.name] = (tokens.new_ones(0, 1), tokens.new_zeros(0, 1))
        elif other.name in ("rope_cos", "rope_sin"):  # timm's Gemma 4
            inputs[other.name] = tokens.new_full((1, 1, layer.head_dim), other.name == "rope_cos")
        elif other.name == "encoder_hidden_states" and getattr(layer, "add_q_proj", None) is not None:
            inputs[other.name] = tokens  # diffusers' layers of two streams
        elif other.name == "cu_seqlens":
            inputs[other.name] = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)
        elif other.default is other.empty and other.kind not in (other.VAR_POSITIONAL, other.VAR_KEYWORD):
            inputs[other.name] = None
    return inputs


def forward_of(layer: Any) -> FunctionType:
    """Return the forward of a layer's class, without its decorators."""
    forward = inspect.unwrap(type(layer).forward)
    if not isinstance(forward, FunctionType):
        raise ValueError(f"swap needs an attention layer whose forward is a function, got a {type(layer).__name__}")
    return forward
