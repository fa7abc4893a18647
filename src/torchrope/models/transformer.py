"""A transformer for tokens at arbitrary positions (points, events, strokes, sensors), with optional cross-attention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import NotRequired, TypedDict, Unpack

from torchrope.encodings import Choice, Encoding, Periodic, SinusoidalAPE
from torchrope.encodings.periodic import update_all_turns
from torchrope.lattice import Lattice
from torchrope.linear_attention import LinearAttention
from torchrope.models.layers import (
    Backbone,
    Layer,
    drop_path_rates,
    initialize,
    keeps_arguments,
    lattice_of,
    resolve,
    rotations_at,
    run_layer,
)
from torchrope.positions import PerAxis, Periods, check_periods, pack, positive, rescale
from torchrope.rotations import Rotation
from torchrope.tensors import can_read, require_counts, require_unrounded


class MaskAndContext(TypedDict):
    """Arguments of `Transformer.forward` besides tokens and positions, None by default.

    Attributes:
        mask: Valid tokens, boolean, `(batch, n)`; all by default. Padding tokens and their positions may have any
            values, including NaN.
        context: Context tokens `(batch, m, context_dim)`, or a list of samples as for x.
        context_positions: Positions of the context tokens, along the same axes.
        context_mask: Valid context tokens.
    """

    mask: NotRequired[Tensor | None]
    context: NotRequired[Tensor | Sequence[Tensor] | None]
    context_positions: NotRequired[Tensor | Sequence[Tensor] | None]
    context_mask: NotRequired[Tensor | None]


class Transformer(Backbone):
    """Transformer for point sets: map tokens and their positions to one output per sample or per token.

        tokens (+ APE) -> depth x [x + attention(norm(x), R(p)), x + mlp(norm(x))] -> norm -> mean, or per token -> head

    Positions are any floats: irregular, repeated, unordered. Outputs are equivariant to permutations of tokens. If the
    encoding is relative, outputs are invariant to a translation of all positions of a sample and its context.

    With a context, each layer is followed by a cross-attention layer to it.

    Args:
        in_channels: Channels of the input tokens.
        num_axes: Axes of a position, N.
        num_outputs: Channels of an output, such as classes; 0 returns features.
        output: "set" returns one output per sample, from the mean of its tokens; "tokens" one per token.
        dim: Channels of a token inside the model.
        depth: Layers.
        num_heads: Attention heads.
        mlp_dim: Channels inside the MLP; 4 dim by default.
        encoding: A name ("mixed", the default of all models; "liere:8", "none", "sinusoidal+axial"), a callable that
            builds an encoding from num_axes, num_heads and head_dim, or a `Choice`. The only supported encoding that is
            not rotary is `SinusoidalAPE`, a function of real positions.
        share_layers: Whether all layers share one encoding, its rotations computed once per forward.
        positions: A `Lattice` with any of these settings. `unit`: length of one unit of position, in the unit of the
            data, by which positions are divided; a good value is the typical distance between neighbours, for each
            axis if their units differ. `periods`: period of each axis, in the unit of the data; encodings with
            frequencies become `Periodic`, others, and `SinusoidalAPE`, get positions mapped by `to_circle`. `spacing`
            and `origin`: by default those of the encoding's paper for `input_size / unit` tokens along an axis
            (`Encoding.lattice`), without an input size 1 and 0.
        input_size: Length of the training data along each axis, in the unit of the data, one number or one per axis.
        attention: "softmax", or "linear" for `LinearAttention`, at a cost linear in the number of tokens.
        context_dim: Channels of the context tokens for cross-attention, whose positions have the same axes; None: no
            context.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping a channel after the embedding, attention projection and MLP.
        attention_dropout: Probability of dropping an attention weight; must be 0 for linear attention.
        drop_path: Probability of skipping a branch for a sample, growing linearly from 0 to this in the last layer.
        layer_scale: Initial factor on each branch, or None.
        activation: Class of the MLP's activation.
        norm_eps: Added to the variance in every norm.
        checkpoint_layers: Whether to recompute each layer and its rotation in the backward pass, to save memory.

    Raises:
        ValueError: a number out of range; an unknown name; an absolute table or a score bias; linear attention with
            attention_dropout; arguments for which the encoding raises.

    References:
        Vaswani et al., Attention Is All You Need: self- and cross-attention layers. LieRE, section 7: inputs of
        tokens and positions.

    Example:
        >>> model = Transformer(5, num_axes=3, num_outputs=10, dim=32, depth=2, num_heads=2, encoding="mixed")
        >>> model(torch.randn(4, 50, 5), torch.rand(4, 50, 3)).shape
        torch.Size([4, 10])
        >>> model([torch.randn(50, 5), torch.randn(7, 5)], [torch.rand(50, 3), torch.rand(7, 3)]).shape
        torch.Size([2, 10])
    """

    arguments: dict[str, Any]

    @keeps_arguments("encoding")
    def __init__(
        self,
        in_channels: int,
        *,
        num_axes: int,
        num_outputs: int = 0,
        output: Literal["set", "tokens"] = "set",
        dim: int = 256,
        depth: int = 6,
        num_heads: int = 8,
        mlp_dim: int | None = None,
        encoding: str | Callable[..., Encoding] | Choice = "mixed",
        share_layers: bool = False,
        positions: Lattice | None = None,
        input_size: PerAxis | None = None,
        attention: Literal["softmax", "linear"] = "softmax",
        context_dim: int | None = None,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        activation: Callable[[], nn.Module] = nn.GELU,
        norm_eps: float = 1e-6,
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        require_counts(in_channels=in_channels, num_axes=num_axes, depth=depth, num_heads=num_heads, dim=dim)
        if dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads = {num_heads}, got {dim}")
        if output not in ("set", "tokens"):
            raise ValueError(f"output must be 'set' or 'tokens', got {output!r}")
        if attention not in ("softmax", "linear"):
            raise ValueError(f"attention must be 'softmax' or 'linear', got {attention!r}")
        if attention == "linear" and attention_dropout:
            raise ValueError(f"attention_dropout must be 0 for linear attention, got {attention_dropout}")
        self.output = output
        self.checkpoint_layers = checkpoint_layers

        choice = resolve(encoding)
        lattice = _of_points(positions)
        self.unit = positive("unit", 1.0 if lattice.unit is None else lattice.unit, num_axes)
        units = None if lattice.periods is None else _in_units(lattice.periods, self.unit)
        sizes = None if input_size is None else _sizes(positive("input_size", input_size, num_axes), self.unit)
        head = dict(num_heads=num_heads, head_dim=dim // num_heads)
        self.keys = ("tokens",) * depth if context_dim is None else ("tokens", "context") * depth
        self.position_map, encodings = _encodings(
            choice, 1 if share_layers else len(self.keys), num_axes, head, replace(lattice, periods=units), sizes
        )
        self.encodings = nn.ModuleList(encodings)
        self.absolute_positions, self.absolute = _absolute(choice, num_axes, dim, units)

        self.embed = nn.Linear(in_channels, dim)
        self.embed_context = None if context_dim is None else nn.Linear(context_dim, dim)
        self.dropout = nn.Dropout(dropout)
        rates = drop_path_rates(drop_path, len(self.keys), "linear")
        linear = partial(LinearAttention, dim, num_heads, qkv_bias=qkv_bias, dropout=dropout)
        self.layers = nn.ModuleList(
            Layer(
                dim,
                num_heads,
                mlp_dim or 4 * dim,
                qkv_bias=qkv_bias,
                dropout=dropout,
                attention_dropout=attention_dropout,
                drop_path=rate,
                layer_scale=layer_scale,
                activation=activation,
                norm_eps=norm_eps,
                attention=linear() if attention == "linear" else None,
                cross=keys == "context",
            )
            for rate, keys in zip(rates, self.keys, strict=True)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, num_outputs) if num_outputs else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `ViT`: Xavier uniform weights, zero biases; encodings as in their papers."""
        for module in self.modules():
            initialize(module, "xavier")
        update_all_turns(self)

    def forward(
        self, x: Tensor | Sequence[Tensor], positions: Tensor | Sequence[Tensor], **inputs: Unpack[MaskAndContext]
    ) -> Tensor | list[Tensor]:
        """Compute the outputs: one per sample, or one per token (`output`).

        Args:
            x: Tokens `(batch, n, in_channels)`; or a list of samples of any lengths, each `(n, in_channels)`, which the
                layers process as one concatenated sequence.
            positions: Positions of the tokens, `(batch, n, axes)`, or `(n, axes)` for all samples; a list for a list of
                samples.
            inputs: `mask`, `context` and its positions and mask, as in `MaskAndContext`.

        Returns:
            `(batch, num_outputs)` for output "set". For "tokens" `(batch, n, num_outputs)`, 0 for padding
            tokens; for a list of samples, a list of `(n, num_outputs)`.

        Raises:
            ValueError: shapes that do not fit; a sample without a valid token; NaN or infinity in valid tokens or their
                positions. On a GPU, to avoid a synchronisation, and inside torch.compile values are not checked.
        """
        return self._outputs(self._states(x, positions, **inputs), self.head)

    def features(
        self, x: Tensor | Sequence[Tensor], positions: Tensor | Sequence[Tensor], **inputs: Unpack[MaskAndContext]
    ) -> Tensor | list[Tensor]:
        """Compute the input of the head, with dim channels; arguments and shapes as in `forward`."""
        return self._outputs(self._states(x, positions, **inputs), nn.Identity())

    def _outputs(self, states: "TokenSet", head: nn.Module) -> Tensor | list[Tensor]:
        if self.output == "set":
            return head(states.mean(states.tokens))
        answers = head(states.tokens)
        if states.lengths is not None:
            return list(answers[0].split(states.lengths))
        return answers if states.valid is None else answers.masked_fill(~states.valid.unsqueeze(-1), 0)

    def _states(
        self,
        x: Tensor | Sequence[Tensor],
        positions: Tensor | Sequence[Tensor],
        *,
        mask: Tensor | None = None,
        context: Tensor | Sequence[Tensor] | None = None,
        context_positions: Tensor | Sequence[Tensor] | None = None,
        context_mask: Tensor | None = None,
    ) -> "TokenSet":
        """Compute the tokens after the last layer and norm."""
        sets = {"tokens": self._embedded("tokens", self.embed, x, positions, mask)}
        if (context is None) != (self.embed_context is None) or (context is None) != (context_positions is None):
            rule = "context and context_positions must both be given to a model with context_dim, else be None"
            received = [name for name, x in (("context", context), ("positions", context_positions)) if x is not None]
            raise ValueError(f"{rule}, got {' and '.join(received) or 'none'}")
        if context is not None and context_positions is not None and self.embed_context is not None:
            contexts = self._embedded("context", self.embed_context, context, context_positions, context_mask)
            if (contexts.batch, contexts.lengths is None) != (sets["tokens"].batch, sets["tokens"].lengths is None):
                rule = "tokens and context must both be tensors or lists of as many samples"
                raise ValueError(f"{rule}, got {sets['tokens'].batch} and {contexts.batch} samples")
            sets["context"] = contexts
        return self._through_layers(sets)

    def _through_layers(self, sets: "dict[str, TokenSet]") -> "TokenSet":
        positions = {name: self.position_map.at(tokens.positions) for name, tokens in sets.items()}
        shared: dict[str, Rotation] = {}
        if len(self.encodings) < len(self.layers):
            shared = {name: self.encodings[0](at).tabulated() for name, at in positions.items()}
        for index, (layer, keys) in enumerate(zip(self.layers, self.keys, strict=True)):
            query_set, key_set = sets["tokens"], sets[keys]
            names = {"rotation": "tokens"}
            arguments: dict[str, Any] = dict(bias=key_set.key_mask, lengths=query_set.lengths)
            if keys == "context":
                names["key_rotation"] = keys
                arguments.update(context=key_set.tokens, key_lengths=key_set.lengths)
            sources: dict[str, Any] = {argument: (shared or positions)[name] for argument, name in names.items()}
            rotations = partial(dict, **sources) if shared else partial(rotations_at, self.encodings[index], **sources)
            tokens = run_layer(layer, query_set.tokens, rotations, checkpointed=self.checkpoint_layers, **arguments)
            sets["tokens"] = replace(query_set, tokens=tokens)
        last = sets["tokens"]
        return replace(last, tokens=self.norm(last.tokens))

    def _embedded(
        self,
        name: str,
        embed: nn.Linear,
        x: Tensor | Sequence[Tensor],
        positions: Tensor | Sequence[Tensor],
        mask: Tensor | None,
    ) -> "TokenSet":
        """Embed tokens for the first layer; convert positions to units."""
        checked = _as_set(name, x, positions, mask, embed.in_features, len(self.unit))
        require_unrounded(checked.positions)
        units = rescale(checked.positions, [1 / length for length in self.unit])
        tokens = embed(checked.tokens)
        if self.absolute is not None:
            tokens = tokens + self.absolute.at(self.absolute_positions.at(units))
        return replace(checked, tokens=self.dropout(tokens), positions=units)


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Tokens with positions: a padded batch, or concatenated samples.

    Attributes:
        tokens: `(batch, n, channels)`, or `(1, total, channels)` for concatenated samples.
        positions: `(n, axes)` of all samples, `(batch, n, axes)`, or `(total, axes)`.
        valid: Valid tokens, `(batch, n)`; None if all are.
        lengths: Number of tokens of each sample if samples are concatenated.
    """

    tokens: Tensor
    positions: Tensor
    valid: Tensor | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        """Return the number of samples."""
        return self.tokens.shape[0] if self.lengths is None else len(self.lengths)

    @property
    def key_mask(self) -> Tensor | None:
        """Return the mask of valid keys, `(batch, 1, 1, n)`; None if all are valid."""
        return None if self.valid is None else self.valid[:, None, None]

    def mean(self, values: Tensor) -> Tensor:
        """Average values, laid out as the tokens, over the valid tokens of each sample: `(batch, channels)`."""
        if self.lengths is not None:
            return torch.stack([part.mean(dim=0) for part in values[0].split(self.lengths)])
        if self.valid is None:
            return values.mean(dim=1)
        counts = self.valid.sum(dim=1, keepdim=True)
        return values.masked_fill(~self.valid.unsqueeze(-1), 0).sum(dim=1) / counts


def _as_set(
    name: str,
    x: Tensor | Sequence[Tensor],
    positions: Tensor | Sequence[Tensor],
    mask: Tensor | None,
    channels: int,
    axes: int,
) -> TokenSet:
    """Check tokens and positions of one set; padding is set to 0."""
    if isinstance(x, Tensor) and isinstance(positions, Tensor):
        checked = _as_batch(name, x, positions, mask, channels, axes)
    elif isinstance(x, Tensor) or isinstance(positions, Tensor):
        raise ValueError(f"{name} and their positions must both be tensors or both lists of samples, got one of each")
    else:
        checked = _as_concatenation(name, x, positions, mask, channels, axes)
    _require_finite(name, checked.tokens, checked.valid)
    _require_finite("positions" if name == "tokens" else f"positions of the {name}", checked.positions, checked.valid)
    return checked


def _as_batch(name: str, x: Tensor, positions: Tensor, mask: Tensor | None, channels: int, axes: int) -> TokenSet:
    if x.is_nested or positions.is_nested:
        raise ValueError(f"{name} and positions of several lengths must be lists of tensors, got a nested tensor")
    if x.ndim != 3 or x.shape[-1] != channels:
        raise ValueError(f"{name} must be (batch, n, {channels}), got {tuple(x.shape)}")
    batch, n = x.shape[:2]
    if tuple(positions.shape) not in ((n, axes), (batch, n, axes)):
        rule = f"positions of {batch} x {n} {name} must be ({batch}, {n}, {axes}) or ({n}, {axes})"
        raise ValueError(f"{rule}, got {tuple(positions.shape)}")
    if not n:
        raise ValueError(
            f"each sample must have 1 valid token or more, got {batch} of {batch} samples without ({name})"
        )
    if mask is None:
        return TokenSet(x, positions)
    if mask.dtype != torch.bool or mask.shape != (batch, n):
        rule = f"the mask of {batch} x {n} {name} must be boolean ({batch}, {n})"
        raise ValueError(f"{rule}, got {mask.dtype} {tuple(mask.shape)}")
    if can_read(mask) and not mask.any(dim=1).all():
        empty = int((~mask.any(dim=1)).sum())
        raise ValueError(
            f"each sample must have 1 valid token or more, got {empty} of {batch} samples without ({name})"
        )
    hidden = ~mask.unsqueeze(-1)
    return TokenSet(x.masked_fill(hidden, 0), positions.expand(batch, -1, -1).masked_fill(hidden, 0), valid=mask)


def _as_concatenation(
    name: str, x: Sequence[Tensor], positions: Sequence[Tensor], mask: Tensor | None, channels: int, axes: int
) -> TokenSet:
    if mask is not None:
        raise ValueError(f"mask must be None for a list of samples, got a mask of the {name}")
    if not x or len(x) != len(positions):
        rule = f"a list of {name} must hold one sample or more, and positions for each"
        raise ValueError(f"{rule}, got {len(x)} and {len(positions)}")
    for tokens, at in zip(x, positions, strict=True):
        if tokens.ndim != 2 or tokens.shape[1] != channels or at.shape != (len(tokens), axes):
            rule = f"samples of a list must be (n, {channels}) with positions (n, {axes})"
            raise ValueError(f"{rule}, got {tuple(tokens.shape)} with {tuple(at.shape)} ({name})")
    packed = pack(positions)
    empty = packed.lengths.count(0)
    if empty:
        raise ValueError(
            f"each sample must have 1 valid token or more, got {empty} of {len(x)} samples without ({name})"
        )
    return TokenSet(torch.cat(list(x)).unsqueeze(0), packed.positions, lengths=packed.lengths)


def _require_finite(name: str, x: Tensor, valid: Tensor | None) -> None:
    """Raise for NaN and infinity, with the number of tokens that have any; padding tokens are already 0."""
    if not can_read(x) or math.isfinite(x.detach().sum()):  # a finite sum implies finite values
        return
    bad = int((~torch.isfinite(x)).any(dim=-1).sum())
    if bad:
        total = x[..., 0].numel() if valid is None else int(valid.sum())
        hint = "leave such tokens out, or set their mask to False"
        raise ValueError(f"{name} must be finite, got NaN or infinity in {bad} of {total} valid tokens; {hint}")


def _of_points(positions: Lattice | None) -> Lattice:
    """Return the settings of positions, and check that points have these settings."""
    lattice = lattice_of(positions)
    if not {"spacing", "origin", "unit", "periods"}.issuperset(lattice.settings()):
        raise ValueError(f"positions of points have spacing, origin, unit and periods, got {lattice}")
    return lattice


def _encodings(
    choice: Choice, count: int, num_axes: int, head: dict[str, int], lattice: Lattice, sizes: tuple[int, ...] | None
) -> tuple[Lattice, list[Encoding]]:
    """Build the encodings, periodic along axes with a period, and the map from units to their positions."""

    def rest(axes: int) -> list[Encoding]:
        return [choice.build_rotary(num_axes=axes, **head) for _ in range(count - 1)]

    first = choice.build_rotary(num_axes=num_axes, **head)
    paper = {} if sizes is None else first.lattice.spaced(*sizes)
    position_map = replace(lattice.completed(**paper), unit=None)
    if lattice.periods is None:
        return position_map, [first, *rest(num_axes)]
    if first.has_frequencies:
        scaled = position_map.scaled_periods(num_axes)
        return replace(position_map, periods=None), [Periodic(part, scaled) for part in (first, *rest(num_axes))]
    axes = num_axes + sum(period is not None for period in lattice.periods)
    return position_map, [choice.build_rotary(num_axes=axes, **head), *rest(axes)]


def _absolute(choice: Choice, num_axes: int, dim: int, periods: Periods | None) -> tuple[Lattice, SinusoidalAPE | None]:
    """Build the absolute encoding, a function of positions in units, and the map to its positions."""
    position_map = Lattice(periods=periods)
    if choice.absolute is None and choice.bias is None:
        return position_map, None
    axes = num_axes + sum(period is not None for period in periods or ())
    built = None if choice.absolute is None else choice.absolute(sizes=(1,) * axes, dim=dim)
    if choice.bias is not None or not isinstance(built, SinusoidalAPE):
        rule = "encoding must not have a learned table or a score bias, which need a lattice"
        raise ValueError(f"{rule}; use 'sinusoidal' or a rotary encoding, got {choice.name!r}")
    return position_map, built


def _in_units(periods: Periods, units: tuple[float, ...]) -> Periods | None:
    check_periods(periods, len(units))
    scaled = tuple(None if period is None else period / unit for period, unit in zip(periods, units, strict=True))
    return None if all(period is None for period in scaled) else scaled


def _sizes(extent: tuple[float, ...], units: tuple[float, ...]) -> tuple[int, ...]:
    """Return the extent of the training data along each axis in units, rounded, at least 1."""
    return tuple(max(round(length / unit), 1) for length, unit in zip(extent, units, strict=True))
