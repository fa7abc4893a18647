"""`swap` for the transformers of diffusers, which make images and videos and rotate by themselves.

A swapped model hands positions to its layers by the arguments that tables of cosines and sines took, so that gradient
checkpointing finds them where it recomputes a block. Each layer makes its rotation of them and turns q and k behind
their norms, which all of these models have; its attention processor then has nothing to rotate.
"""

from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from torchrope.integrations.diffusers_rotation import FAMILIES, Family, Streams, from_neighbours, heads_of
from torchrope.integrations.own_rotation import OwnRotation, exact, halves, interleaved
from torchrope.integrations.rotary import Adapter, Replaced, Rotary, Site
from torchrope.ops import rotate_one
from torchrope.rotations import Planar, Rotation
from torchrope.tensors import can_read

_ARGUMENT_INDEX = 3  # of tables without a name, in the attention of all families


def adapters(model: nn.Module) -> list[Adapter]:
    """What swap needs for each transformer of diffusers inside a model."""
    return [OfTransformer(module, family) for module in model.modules() if (family := _family(module)) is not None]


def refuse(model: nn.Module) -> None:
    """Say what to do with a transformer of diffusers that `swap` does not know.

    Raises:
        ValueError: a model that holds one.
    """
    for module in model.modules():
        if isinstance(module, ModelMixin):
            rule = f"swap knows the rotations of {', '.join(FAMILIES)}"
            by_hand = "in an attention processor of your own torchrope.rotate(q, k, rotation) takes any positions"
            raise ValueError(f"{rule}; {by_hand} (model.set_attn_processor), got {type(module).__name__}")


class OfTransformer(Adapter):
    """A transformer of diffusers; positions are its own, or its caller's."""

    keeps_rotation = False

    def __init__(self, tower: nn.Module, family: Family) -> None:
        super().__init__(tower)
        self.family = family

    def sites(self) -> list[Site]:
        heads, head_dim = heads_of(self.tower)
        unknown = (1,) * self.family.frequencies(self.tower).shape[0]
        return [Site(heads, head_dim, unknown, sized=False) for _ in self._layers()]

    def tables(self) -> list[nn.Parameter]:
        return []

    def rotates(self) -> bool:
        return True

    def own_rotations(self) -> list[OwnRotation]:
        _, head_dim = heads_of(self.tower)
        paired = halves if self.family.across_halves(self.tower) else interleaved
        rotation = OwnRotation(exact(self.family.frequencies(self.tower)), paired(head_dim))
        return [rotation for _ in self._layers()]

    def attach(self, rotary: Rotary) -> None:
        handles: list[Any] = rotary.handles
        places = Places(self.tower, self.family)
        if self.family.rope is None:
            handles.append(self.tower.register_forward_pre_hook(places.read_argument, with_kwargs=True))
        else:
            rope = getattr(self.tower, self.family.rope)
            handles.append(rope.register_forward_hook(places.hand_on))
        for index, layer in enumerate(self._layers()):
            turn = Turn(rotary, rotary.of_layer(index), self.family)
            handles.append(layer.register_forward_pre_hook(turn.begin, with_kwargs=True))
            handles.append(layer.register_forward_hook(turn.end))
            handles += [norm.register_forward_hook(turn.own) for norm in (layer.norm_q, layer.norm_k)]
            handles += [norm.register_forward_hook(turn.added) for norm in added_norms(layer)]
        handles.append(Replaced(self.tower, "save_pretrained", refuse_save_pretrained))
        handles.append(Replaced(self.tower, "push_to_hub", refuse_save_pretrained))

    def _layers(self) -> list[Any]:
        layers = [getattr(block, name) for blocks, name in self.family.layers for block in getattr(self.tower, blocks)]
        for layer in layers:
            for name in ("norm_q", "norm_k"):
                if getattr(layer, name, None) is None:
                    rule = "swap turns q and k behind their norms, in a model of diffusers with qk_norm"
                    raise ValueError(f"{rule}, got a {type(layer).__name__} without {name}")
        return layers


class Places:
    """Positions in the place of a model's tables."""

    def __init__(self, tower: Any, family: Family) -> None:
        self.family = family
        self.frequencies: list[list[float]] = family.frequencies(tower)[:, 0].tolist()  # of the first head

    def hand_on(self, rope: Any, args: tuple[Any, ...], table: Any) -> Any:
        """Behind the module that makes the tables."""
        return self.family.positions(rope, args, table, self.frequencies)

    def read_argument(
        self, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a model whose caller makes the table."""
        table = kwargs.get(self.family.argument)
        if table is None:
            rule = f"positions are read from {self.family.argument}=(cos, sin), as get_3d_rotary_pos_embed makes it"
            raise ValueError(f"a swapped {type(tower).__name__} needs it by name: {rule}, got none")
        positions = self.family.positions(None, (), table, self.frequencies)
        _check_read(positions, table, self.frequencies, tower)
        return args, {**kwargs, self.family.argument: positions}


class Turn:
    """Rotate q and k of one layer, by the positions that came with its call."""

    def __init__(self, rotary: Rotary, index: int, family: Family) -> None:
        self.rotary = rotary
        self.index = index
        self.family = family
        self.of_own: Rotation | None = None
        self.of_added: Rotation | None = None

    def begin(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the layer: take the positions from its arguments."""
        if kwargs.get("ip_hidden_states") is not None:
            rule = "an IP-Adapter compares images with q before its rotation, a swapped layer has it behind alone"
            raise ValueError(f"{rule}: unload the adapter, got ip_hidden_states")
        came, args, kwargs = _without_tables(self.family.argument, args, kwargs)
        if came is None:
            raise ValueError(f"positions come with the call of a swapped model, got a {type(layer).__name__} alone")
        other = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
        streams: Streams = self.family.streams(came, layer, other.shape[1] if isinstance(other, Tensor) else 0)
        self.of_own = self._rotation(streams.own)
        self.of_added = None if streams.added is None else self._rotation(streams.added)
        return args, kwargs

    def end(self, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        """Behind the layer."""
        self.of_own = self.of_added = None

    def own(self, norm: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor:
        """Behind the norm of q or k."""
        return x if self.of_own is None else self._turned(x, self.of_own)

    def added(self, norm: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor:
        """Behind the norm of q or k of the text, where it has one."""
        return x if self.of_added is None else self._turned(x, self.of_added)

    def _rotation(self, positions: Tensor) -> Rotation:
        rotation: Rotation = self.rotary.encodings[self.index](self.rotary.placed(self.index, positions))
        return rotation.tabulated() if self.family.coarse and isinstance(rotation, Planar) else rotation

    def _turned(self, x: Tensor, rotation: Rotation) -> Tensor:
        if x.ndim == 3:  # (batch, tokens, heads head_dim)
            return self._turned(x.unflatten(-1, (-1, rotation.head_dim)), rotation).flatten(2)
        layout = "bhtd" if self.family.heads_first else "bthd"
        return rotate_one(self.rotary.in_pairs(x, self.index), rotation, layout=layout, scores_only=True)


def added_norms(layer: Any) -> list[Any]:
    """The norms of q and k of the text, in a layer that has some."""
    found = [getattr(layer, name, None) for name in ("norm_added_q", "norm_added_k")]
    return [norm for norm in found if norm is not None]


def refuse_save_pretrained(*args: Any, **kwargs: Any) -> None:
    """In the place of save_pretrained and push_to_hub."""
    rule = "from_pretrained of diffusers would drop the encodings of a swapped model"
    raise ValueError(f"{rule}: write it by torchrope.save, and read it by torchrope.load(path, into=model)")


def _without_tables(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What came in place of tables, and the arguments with None there."""
    if name in kwargs:
        return kwargs[name], args, {**kwargs, name: None}
    if len(args) > _ARGUMENT_INDEX:
        before, came, behind = args[:_ARGUMENT_INDEX], args[_ARGUMENT_INDEX], args[_ARGUMENT_INDEX + 1 :]
        return came, (*before, None, *behind), kwargs
    return None, args, kwargs


def _check_read(positions: Tensor, table: Any, frequencies: list[list[float]], tower: Any) -> None:
    """Refuse a table of other frequencies than the model's, where its values can be read."""
    cos, _ = from_neighbours(table)
    if can_read(cos):
        again = torch.cos(positions @ positions.new_tensor(frequencies)).to(cos)
        if not torch.allclose(again, cos, atol=1e-2):
            rule = "image_rotary_emb must be a table as get_3d_rotary_pos_embed makes it, of theta 10000"
            raise ValueError(f"{rule}, got one of other frequencies for a {type(tower).__name__}")


def _family(module: nn.Module) -> Family | None:
    """How a module rotates, or None where it is no transformer that is known.

    Raises:
        ValueError: one of a class that is known, built without a rotation.
    """
    names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("diffusers.")]
    name = next((name for name in names if name in FAMILIES), None)
    if name is None:
        return None
    config: Any = module.config
    if config.get("use_rotary_positional_embeddings") is False:
        rule = "swap continues the rotation of CogVideoX; this one adds its positions to the tokens"
        raise ValueError(f"{rule}, got use_rotary_positional_embeddings=False")
    return FAMILIES[name]
