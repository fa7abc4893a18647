"""A transformer for tokens at any positions: points, events, strokes, sensors, and sets that it reads beside them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchrope.encodings import Choice, Encoding, Periodic, SinusoidalAPE
from torchrope.encodings.periodic import close_axes, has_frequencies
from torchrope.encodings.poses import PoseAction, Poses, act, check_pose_dim, with_pixels
from torchrope.linear_attention import LinearAttention
from torchrope.models.layers import Layer, LayerScale, encoding_parameters, resolve, run_layer
from torchrope.positions import PerAxis, Periods, check_periods, on_circles, per_axis, rescale, shift
from torchrope.rotations import Action, Rotation
from torchrope.tensors import can_read


class Transformer(nn.Module):
    """Map tokens and their positions to one answer, or to one for each token.

        tokens (+ APE) -> depth x [x + attention(norm(x), R(p)), x + mlp(norm(x))] -> norm -> mean, or each -> head

    Positions are any floats: irregular, repeated, in no order. Tokens permute with their positions. Where the encoding
    is relative, moving all positions of a sample, and of its context, alike changes nothing.

    With a context, each layer is followed by one of the same form that attends to the other set. With latents, large
    sets are read at a cost linear in their size: the latents attend to the tokens once, then to one another; where each
    token gets an answer, tokens attend to the latents at the end. Attention "linear" is the other way to a linear cost.

    Args:
        dim_in: Channels of the tokens that are given.
        num_axes: Length of a position, N.
        num_outputs: Numbers of an answer, such as classes; 0 returns features.
        output: "set" gives one answer a sample, the mean of its tokens (or latents); "tokens" one for each token.
        dim: Channels of a token inside.
        depth: Layers.
        num_heads: Attention heads.
        mlp_dim: Channels inside the MLP; 4 dim by default.
        encoding: A name ("mixed", "liere:8", "none", "sinusoidal+axial"), what builds an encoding from num_axes,
            num_heads and head_dim, or a `Choice` of such. Of what is not rotary it must be a function of real
            positions: `SinusoidalAPE`.
        share_layers: One encoding for all layers, its rotations computed once per forward.
        scale: Length that counts as one unit of position, in the unit of the data, one number or one per axis:
            positions are divided by it. About the distance of neighbours; axes in metres and seconds need one each.
        extent: Length of the training data along each axis, in the unit of the data, one number or one per axis. With
            it encodings start in the convention of their papers for `extent / scale` tokens along an axis
            (`Encoding.lattice`); by default a unit of position is what `scale` says for all of them.
        periods: Period of each axis that closes, in the unit of the data, None for one that does not. Encodings that
            have frequencies become `Periodic`; others, and `SinusoidalAPE`, see places `on_circles`. `SphereHarmonics`
            takes places as they are, without scale, extent and periods.
        attention: "softmax", or "linear" for `LinearAttention`, at a cost linear in the number of tokens.
        poses: How tokens of several views know the poses of their cameras, which `forward` then takes: "action" lets
            them act as `PoseEncoding` has it, "numbers" adds a learned linear map of the 12 numbers of K [R t], about
            the mean of the cameras. None has no views.
        pose_dim: Channels of a head that poses act on; by default half of them, rounded down to a multiple of 4.
            `encoding` rotates the others by positions, which then are places in the images.
        pose_unit: Length that counts as one between cameras, in the unit of translations.
        latents: How many learned latents read the tokens, at learned positions about the mean of each sample's (along
            axes that close, about 0); or positions `(latents, axes)` where they stay, in the unit of the data. 0: none.
        context_dim: Channels of the tokens of another set that every layer attends to, with positions along the same
            axes; None where there is none.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping a channel after the embedding, attention projection and MLP.
        attention_dropout: Probability of dropping an attention weight, which linear attention does not have.
        drop_path: Probability of skipping a branch for a sample, growing linearly from 0 to this in the last layer.
        layer_scale: Initial factor on each branch, or None.
        activation: What builds the nonlinearity of the MLP.
        norm_eps: Added to the variance in every norm.
        checkpoint_layers: Whether each layer is computed again for its gradient, so that less memory is needed.

    Raises:
        ValueError: a number out of range, an unknown name, tables of vectors or biases, which need a lattice, and what
            the encoding refuses.

    References:
        Vaswani et al., Attention Is All You Need: layers with and without a context. Jaegle et al., Perceiver IO,
        section 3.1: latents that read and are read. LieRE, section 7: tokens and positions alone.

    Example:
        >>> model = Transformer(5, num_axes=3, num_outputs=10, dim=32, depth=2, num_heads=2, encoding="mixed")
        >>> model(torch.randn(4, 50, 5), torch.rand(4, 50, 3)).shape
        torch.Size([4, 10])
        >>> model([torch.randn(50, 5), torch.randn(7, 5)], [torch.rand(50, 3), torch.rand(7, 3)]).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        dim_in: int,
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
        scale: PerAxis = 1.0,
        extent: PerAxis | None = None,
        periods: Periods | None = None,
        attention: Literal["softmax", "linear"] = "softmax",
        poses: Literal["action", "numbers"] | None = None,
        pose_dim: int | None = None,
        pose_unit: float = 1.0,
        latents: int | Tensor = 0,
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
        for name, number in dict(dim_in=dim_in, num_axes=num_axes, depth=depth, num_heads=num_heads).items():
            if number < 1:
                raise ValueError(f"{name} must be 1 or more, got {number}")
        if dim < 1 or dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads = {num_heads}, got {dim}")
        if output not in ("set", "tokens"):
            raise ValueError(f"output must be 'set' or 'tokens', got {output!r}")
        if attention not in ("softmax", "linear"):
            raise ValueError(f"attention must be 'softmax' or 'linear', got {attention!r}")
        if attention == "linear" and attention_dropout:
            raise ValueError(f"linear attention has no weights to drop, got attention_dropout = {attention_dropout}")
        count = len(latents) if isinstance(latents, Tensor) else latents
        if count < 0:
            raise ValueError(f"latents must be 0 or more, got {count}")
        self.output = output
        self.checkpoint_layers = checkpoint_layers

        choice = resolve(encoding, None, None)
        self.scale = _positive("scale", scale, num_axes)
        units = None if periods is None else _in_units(periods, self.scale)
        sizes = None if extent is None else _sizes(_positive("extent", extent, num_axes), self.scale)
        self.poses, self.pose_unit = poses, pose_unit
        self.pose_dim = _pose_channels(poses, pose_dim, dim // num_heads)
        self.head_dim = dim // num_heads
        if poses is not None and (count or context_dim is not None or attention == "linear"):
            raise ValueError("poses are for softmax attention among tokens, got latents, a context or linear attention")
        if not 0 < pose_unit < math.inf:
            raise ValueError(f"pose_unit must be a length above 0, got {pose_unit}")
        head = dict(num_heads=num_heads, head_dim=self.head_dim - self.pose_dim)
        self.steps = _steps(depth, reads=count > 0, context=context_dim is not None, output=output)
        self.places, encodings = _encodings(
            choice, 1 if share_layers else len(self.steps), num_axes, head, units, sizes, self.scale
        )
        if attention == "linear" and encodings[0].adds_to_scores:
            raise ValueError(f"linear attention has no scores to add to, got {type(encodings[0]).__name__}")
        if encodings[0].reads_places and count and not isinstance(latents, Tensor):
            rule = f"latents of {type(encodings[0]).__name__} must be places, for it has no learned ones"
            raise ValueError(f"{rule}, got the number {count}")
        self.encodings = nn.ModuleList(encodings)
        self.absolute_places, self.absolute = _absolute(choice, num_axes, dim, units)

        self.embed = nn.Linear(dim_in, dim)
        self.embed_context = None if context_dim is None else nn.Linear(context_dim, dim)
        self.embed_poses = nn.Linear(_POSE_NUMBERS, dim) if poses == "numbers" else None
        self.dropout = nn.Dropout(dropout)
        self.latents = nn.Parameter(torch.empty(count, dim)) if count else None
        self.latent_places = _given_places(latents, num_axes) if isinstance(latents, Tensor) else None
        learned = count and self.latent_places is None
        self.latent_positions = nn.Parameter(torch.empty(count, num_axes)) if learned else None
        self.latent_spread = sizes
        self.centred = tuple(period is None for period in units or (None,) * num_axes)
        self.layers = nn.ModuleList(
            Layer(
                dim,
                num_heads,
                mlp_dim or 4 * dim,
                qkv_bias=qkv_bias,
                dropout=dropout,
                attention_dropout=attention_dropout,
                drop_path=drop_path * index / max(len(self.steps) - 1, 1),
                layer_scale=layer_scale,
                activation=activation,
                norm_eps=norm_eps,
                attention=_linear(dim, num_heads, qkv_bias, dropout) if attention == "linear" else None,
                cross=queries != keys,
            )
            for index, (queries, keys) in enumerate(self.steps)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, num_outputs) if num_outputs else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `ViT`: Xavier uniform weights, zero biases; encodings as in their papers.

        Learned positions of latents are spread over the extent of the data, or by a deviation of one unit without it.
        """
        for module in list(self.modules())[1:]:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | Encoding | LayerScale):
                module.reset_parameters()
        close_axes(self)
        if self.latents is not None:
            nn.init.trunc_normal_(self.latents, std=0.02, a=-0.04, b=0.04)
        if self.latent_positions is not None:
            with torch.no_grad():
                if self.latent_spread is None:
                    self.latent_positions.normal_()
                else:
                    for places, size in zip(self.latent_positions.unbind(-1), self.latent_spread, strict=True):
                        places.uniform_(-size / 2, size / 2)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay must leave alone beside norms and biases: latents and encodings."""
        latents = {name for name, _ in self.named_parameters(recurse=False)}
        return latents | encoding_parameters(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that group parameters by depth, as timm's layer-wise learning rates read them.

        The embedding comes first, then each layer with its encoding; what none matches, the last norm and the head, is
        last.

        Args:
            coarse: Groups of several layers, of which there are none.
        """
        return {"stem": r"^(?:embed|absolute|latent)", "layers": r"^(?:layers|encodings)\.(\d+)\."}

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        positions: Tensor | Sequence[Tensor],
        *,
        mask: Tensor | None = None,
        context: Tensor | Sequence[Tensor] | None = None,
        context_positions: Tensor | Sequence[Tensor] | None = None,
        context_mask: Tensor | None = None,
        poses: Poses | None = None,
    ) -> Tensor | list[Tensor]:
        """Answer for each sample, or for each of its tokens.

        Args:
            x: Tokens `(batch, n, dim_in)`. Or samples of several lengths, each `(n, dim_in)`, which go through the
                layers as one sequence.
            positions: Those of the tokens, `(batch, n, axes)`, or `(n, axes)` for all samples; of a list one for each.
            mask: Which tokens are valid, boolean, `(batch, n)`; all by default. Others and their positions may hold
                anything, NaN too.
            context: Tokens of another set `(batch, m, context_dim)`, or a list, as x.
            context_positions: Theirs, as positions, along the same axes.
            context_mask: Which of them are valid.
            poses: Those of `(views)` or `(batch, views)`: tokens are those of the first view, then those of the second,
                as many in each. Poses of views without a valid token count for nothing.

        Returns:
            `(batch, num_outputs)` for output "set". For "tokens" `(batch, n, num_outputs)`, 0 for tokens that are not
            valid; of a list one `(n, num_outputs)` for each sample.

        Raises:
            ValueError: shapes that do not fit; a sample without a valid token; NaN or infinity in valid tokens or their
                positions. On a GPU, which would have to be waited for, and inside torch.compile, values are not looked
                at.
        """
        states = self._states(x, positions, mask, context, context_positions, context_mask, poses)
        return self._answers(states, self.head)

    def features(
        self,
        x: Tensor | Sequence[Tensor],
        positions: Tensor | Sequence[Tensor],
        *,
        mask: Tensor | None = None,
        context: Tensor | Sequence[Tensor] | None = None,
        context_positions: Tensor | Sequence[Tensor] | None = None,
        context_mask: Tensor | None = None,
        poses: Poses | None = None,
    ) -> Tensor | list[Tensor]:
        """What the head takes, of dim channels: everything as `forward`."""
        states = self._states(x, positions, mask, context, context_positions, context_mask, poses)
        return self._answers(states, nn.Identity())

    def _answers(self, states: "_Set", head: nn.Module) -> Tensor | list[Tensor]:
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
        mask: Tensor | None,
        context: Tensor | Sequence[Tensor] | None,
        context_positions: Tensor | Sequence[Tensor] | None,
        context_mask: Tensor | None,
        poses: Poses | None,
    ) -> "_Set":
        """What is pooled or answered for, behind the last layer and the norm."""
        sets = {"tokens": self._embedded("tokens", self.embed, x, positions, mask)}
        if (context is None) != (self.embed_context is None) or (context is None) != (context_positions is None):
            rule = "context and its positions are for a model with context_dim, and are needed there"
            given = [name for name, one in (("context", context), ("positions", context_positions)) if one is not None]
            raise ValueError(f"{rule}, got {' and '.join(given) or 'none'}")
        if context is not None and context_positions is not None and self.embed_context is not None:
            other = self._embedded("context", self.embed_context, context, context_positions, context_mask)
            if (other.batch, other.lengths is None) != (sets["tokens"].batch, sets["tokens"].lengths is None):
                rule = "tokens and context must both be tensors or lists of as many samples"
                raise ValueError(f"{rule}, got {sets['tokens'].batch} and {other.batch} samples")
            sets["context"] = other
        if self.latents is not None:
            sets["latents"] = self._latents(self.latents, sets["tokens"])
        action = self._action(sets["tokens"], poses)
        if action is not None and self.embed_poses is not None:
            sets["tokens"] = _with_numbers(sets["tokens"], self.embed_poses, action)
            action = None
        return self._through_layers(sets, action)

    def _action(self, tokens: "_Set", poses: Poses | None) -> PoseAction | None:
        """What the poses of the views do, about the mean of those that have a valid token."""
        if (poses is None) != (self.poses is None):
            rule = "poses are for a model that was built with poses=, and are needed there"
            raise ValueError(f"{rule}, got {'none' if poses is None else 'some'}")
        if poses is None:
            return None
        count, views = tokens.tokens.shape[1], poses.shape[-1]
        if tokens.lengths is not None:
            raise ValueError("poses are for tokens (batch, n, dim_in) with as many in each view, got a list of samples")
        if poses.shape not in ((views,), (tokens.batch, views)) or not views or count % views:
            rule = f"poses must be (views) or ({tokens.batch}, views), where views divide {count} tokens"
            raise ValueError(f"{rule}, got {poses.shape}")
        origin = None
        if tokens.valid is not None:
            seen = tokens.valid.unflatten(1, (views, -1)).any(dim=-1)  # (batch, views)
            first = seen.int().argmax(dim=1, keepdim=True)
            poses = poses.of_views(torch.where(seen, torch.arange(views, device=seen.device), first))
            centres = poses.centres().masked_fill(~seen.unsqueeze(-1), 0)
            origin = (centres.sum(dim=1, keepdim=True) / seen.sum(dim=1)[:, None, None]).detach()
        return act(poses, count // views, max(self.pose_dim, 4), self.head_dim, self.pose_unit, origin)

    def _through_layers(self, sets: "dict[str, _Set]", action: PoseAction | None) -> "_Set":
        rotations: dict[tuple[int, str], Rotation | Action] = {}  # what layers share is made once
        for index, (layer, (queries, keys)) in enumerate(zip(self.layers, self.steps, strict=True)):
            encoding = index % len(self.encodings)
            for name in (queries, keys):
                if (encoding, name) not in rotations:
                    rotation = self.encodings[encoding](self.places(sets[name].positions))
                    rotations[encoding, name] = rotation if action is None else with_pixels(action, rotation)
            own, other = sets[queries], sets[keys]
            across = (None, None, None) if queries == keys else (other.tokens, rotations[encoding, keys], other.lengths)
            tokens = run_layer(
                layer,
                own.tokens,
                rotations[encoding, queries],
                other.key_mask,
                own.lengths,
                None,
                *across,
                checkpointed=self.checkpoint_layers,
            )
            sets[queries] = replace(own, tokens=tokens)
        last = sets[self.steps[-1][0]]
        return replace(last, tokens=self.norm(last.tokens))

    def _embedded(
        self,
        name: str,
        embed: nn.Linear,
        x: Tensor | Sequence[Tensor],
        positions: Tensor | Sequence[Tensor],
        mask: Tensor | None,
    ) -> "_Set":
        """Tokens as the first layer sees them, and their positions in units."""
        made = _as_set(name, x, positions, mask, embed.in_features, len(self.scale))
        units = rescale(made.positions, [1 / each for each in self.scale])
        return replace(made, tokens=self.dropout(self._placed(embed(made.tokens), units)), positions=units)

    def _placed(self, tokens: Tensor, units: Tensor) -> Tensor:
        """Tokens and the vectors of their positions, where there are any."""
        return tokens if self.absolute is None else tokens + self.absolute.at(self.absolute_places(units))

    def _latents(self, latents: Tensor, tokens: "_Set") -> "_Set":
        """Latents for each sample, about the mean of its valid positions or where they were told to be."""
        if self.latent_positions is not None:
            centre = tokens.mean(tokens.positions if tokens.positions.ndim == 3 else tokens.positions.unsqueeze(0))
            along = [
                mean if centred else torch.zeros_like(mean)
                for mean, centred in zip(centre.unbind(-1), self.centred, strict=True)
            ]
            units = torch.stack(along, dim=-1).unsqueeze(-2) + self.latent_positions  # (batch or 1, latents, axes)
        else:
            given = torch.tensor(self.latent_places, dtype=tokens.positions.dtype, device=tokens.positions.device)
            units = rescale(given, [1 / each for each in self.scale]).unsqueeze(0)
        vectors = self._placed(latents, units).expand(tokens.batch, -1, -1)  # (batch, latents, dim)
        if tokens.lengths is None:
            return _Set(vectors, units)
        together = units.expand(tokens.batch, -1, -1).flatten(0, 1)
        return _Set(vectors.reshape(1, -1, vectors.shape[-1]), together, lengths=(len(latents),) * tokens.batch)


@dataclass(frozen=True, eq=False)
class _Set:
    """Tokens with positions: samples of a batch, of whose tokens some may be padding, or samples end to end.

    Attributes:
        tokens: `(batch, n, channels)`, or `(1, total, channels)` where samples lie end to end.
        positions: `(n, axes)` of all samples, `(batch, n, axes)`, or `(total, axes)`.
        valid: Which tokens are no padding, `(batch, n)`; None where all are.
        lengths: Tokens of each sample where they lie end to end.
    """

    tokens: Tensor
    positions: Tensor
    valid: Tensor | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        """Samples."""
        return self.tokens.shape[0] if self.lengths is None else len(self.lengths)

    @property
    def key_mask(self) -> Tensor | None:
        """Which keys are seen, `(batch, 1, 1, n)`; None where all are."""
        return None if self.valid is None else self.valid[:, None, None]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the valid tokens of each sample, `(batch, channels)`, of values that lie like the tokens."""
        if self.lengths is not None:
            return torch.stack([part.mean(dim=0) for part in values[0].split(self.lengths)])
        if self.valid is None:
            return values.mean(dim=1)
        counts = self.valid.sum(dim=1, keepdim=True)
        return values.masked_fill(~self.valid.unsqueeze(-1), 0).sum(dim=1) / counts


@dataclass(frozen=True)
class _Places:
    """From positions in units to those of an encoding:  origin + spacing * p,  then on circles where there are any."""

    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    circles: Periods | None = None

    def __call__(self, units: Tensor) -> Tensor:
        places = shift(rescale(units, self.spacing), self.origin)
        return places if self.circles is None else on_circles(places, self.circles)


def _as_set(
    name: str,
    x: Tensor | Sequence[Tensor],
    positions: Tensor | Sequence[Tensor],
    mask: Tensor | None,
    channels: int,
    axes: int,
) -> _Set:
    """Tokens and positions of one set, checked; what is not valid is 0."""
    if isinstance(x, Tensor) and isinstance(positions, Tensor):
        made = _as_batch(name, x, positions, mask, channels, axes)
    elif isinstance(x, Tensor) or isinstance(positions, Tensor):
        raise ValueError(f"{name} and their positions must both be tensors or both lists of samples, got one of each")
    else:
        made = _end_to_end(name, x, positions, mask, channels, axes)
    _require_finite(name, made.tokens, made.valid)
    _require_finite("positions" if name == "tokens" else f"positions of the {name}", made.positions, made.valid)
    return made


def _as_batch(name: str, x: Tensor, positions: Tensor, mask: Tensor | None, channels: int, axes: int) -> _Set:
    if x.ndim != 3 or x.shape[-1] != channels:
        raise ValueError(f"{name} must be (batch, n, {channels}), got {tuple(x.shape)}")
    batch, n = x.shape[:2]
    if tuple(positions.shape) not in ((n, axes), (batch, n, axes)):
        rule = f"positions of {batch} x {n} {name} must be ({batch}, {n}, {axes}) or ({n}, {axes})"
        raise ValueError(f"{rule}, got {tuple(positions.shape)}")
    if not n:
        raise ValueError(f"each sample must have 1 valid token or more, got none in {batch} of {batch} ({name})")
    if mask is None:
        return _Set(x, positions)
    if mask.dtype != torch.bool or mask.shape != (batch, n):
        rule = f"the mask of {batch} x {n} {name} must be boolean ({batch}, {n})"
        raise ValueError(f"{rule}, got {mask.dtype} {tuple(mask.shape)}")
    if can_read(mask) and not mask.any(dim=1).all():
        empty = int((~mask.any(dim=1)).sum())
        raise ValueError(f"each sample must have 1 valid token or more, got none in {empty} of {batch} ({name})")
    hidden = ~mask.unsqueeze(-1)
    return _Set(x.masked_fill(hidden, 0), positions.expand(batch, -1, -1).masked_fill(hidden, 0), valid=mask)


def _end_to_end(
    name: str, x: Sequence[Tensor], positions: Sequence[Tensor], mask: Tensor | None, channels: int, axes: int
) -> _Set:
    if mask is not None:
        raise ValueError(f"a list of samples has no padding and no mask, got one of {name}")
    if not x or len(x) != len(positions):
        rule = f"a list of {name} must hold one sample or more, and positions for each"
        raise ValueError(f"{rule}, got {len(x)} and {len(positions)}")
    for tokens, places in zip(x, positions, strict=True):
        if tokens.ndim != 2 or tokens.shape[1] != channels or places.shape != (len(tokens), axes):
            rule = f"samples of a list must be (n, {channels}) with positions (n, {axes})"
            raise ValueError(f"{rule}, got {tuple(tokens.shape)} with {tuple(places.shape)} ({name})")
    lengths = tuple(len(tokens) for tokens in x)
    if min(lengths) < 1:
        empty = lengths.count(0)
        raise ValueError(f"each sample must have 1 valid token or more, got none in {empty} of {len(x)} ({name})")
    return _Set(torch.cat(list(x)).unsqueeze(0), torch.cat(list(positions)), lengths=lengths)


def _require_finite(name: str, x: Tensor, valid: Tensor | None) -> None:
    """Refuse NaN and infinity, counted by token; those that are not valid are 0 and count as none."""
    if not can_read(x) or math.isfinite(x.detach().sum()):  # the sum is the quick look
        return
    bad = int((~torch.isfinite(x)).any(dim=-1).sum())
    if bad:
        total = x[..., 0].numel() if valid is None else int(valid.sum())
        hint = "leave such tokens out, or set their mask to False"
        raise ValueError(f"{name} must be finite, got NaN or infinity in {bad} of {total} valid tokens; {hint}")


def _steps(depth: int, *, reads: bool, context: bool, output: str) -> tuple[tuple[str, str], ...]:
    """Which set attends to which in each layer: queries and keys."""
    main = "latents" if reads else "tokens"
    layer = ((main, main), (main, "context")) if context else ((main, main),)
    first = (("latents", "tokens"),) if reads else ()
    last = (("tokens", "latents"),) if reads and output == "tokens" else ()
    return (*first, *(layer * depth), *last)


def _encodings(
    choice: Choice,
    count: int,
    num_axes: int,
    head: dict[str, int],
    periods: Periods | None,
    sizes: tuple[int, ...] | None,
    scale: tuple[float, ...],
) -> tuple[_Places, list[Encoding]]:
    """Encodings, closed along axes that have a period in units, and the positions that they take."""
    first = choice.rotary(num_axes=num_axes, **head)
    if first.reads_places:
        others = [choice.rotary(num_axes=num_axes, **head) for _ in range(count - 1)]
        return _Places(scale, (0.0,) * num_axes), [first, *others]
    paper: dict[str, Any] = {"spacing": 1.0, "origin": 0.0} if sizes is None else first.lattice(*sizes)
    spacing = per_axis("spacing", paper["spacing"], num_axes)
    origin = per_axis("origin", paper["origin"], num_axes)
    if periods is None:
        others = [choice.rotary(num_axes=num_axes, **head) for _ in range(count - 1)]
        return _Places(spacing, origin), [first, *others]
    own = [None if period is None else period * step for period, step in zip(periods, spacing, strict=True)]
    if has_frequencies(first):
        others = [choice.rotary(num_axes=num_axes, **head) for _ in range(count - 1)]
        return _Places(spacing, origin), [Periodic(encoding, own) for encoding in (first, *others)]
    on_plane = num_axes + sum(period is not None for period in own)
    return _Places(spacing, origin, own), [choice.rotary(num_axes=on_plane, **head) for _ in range(count)]


def _absolute(choice: Choice, num_axes: int, dim: int, periods: Periods | None) -> tuple[_Places, SinusoidalAPE | None]:
    """What is added to tokens, a function of positions in units, and the positions that it takes."""
    places = _Places((1.0,) * num_axes, (0.0,) * num_axes, periods)
    if choice.absolute is None and choice.bias is None:
        return places, None
    axes = num_axes + sum(period is not None for period in periods or ())
    built = None if choice.absolute is None else choice.absolute(sizes=(1,) * axes, dim=dim)
    if choice.bias is not None or not isinstance(built, SinusoidalAPE):
        rule = "tables of vectors and biases need a lattice, and tokens at any positions have none"
        raise ValueError(f"{rule}; 'sinusoidal' and rotary encodings have values there, got {choice.name!r}")
    return places, built


_POSE_NUMBERS = 12
"""Of the upper three rows of a pose."""


def _with_numbers(tokens: _Set, embed: nn.Linear, action: PoseAction) -> _Set:
    """Tokens with the numbers of their poses added, linearly mapped."""
    numbers = action.to_camera[..., :3, :].flatten(-2).to(embed.weight.dtype)  # (*batch, views, 12)
    vectors = embed(numbers).repeat_interleave(action.tokens_per_view, dim=-2)
    return replace(tokens, tokens=tokens.tokens + vectors)


def _pose_channels(poses: str | None, pose_dim: int | None, head_dim: int) -> int:
    """Channels of a head that poses act on."""
    if poses not in (None, "action", "numbers"):
        raise ValueError(f"poses must be 'action', 'numbers' or None, got {poses!r}")
    if poses != "action":
        if pose_dim is not None:
            raise ValueError(f"pose_dim is for poses='action', got {pose_dim} with {poses!r}")
        return 0
    channels = head_dim // 8 * 4 if pose_dim is None else pose_dim
    check_pose_dim(channels, head_dim)
    if channels == head_dim:
        raise ValueError(f"pose_dim must leave channels of head_dim = {head_dim} to the encoding, got {channels}")
    return channels


def _linear(dim: int, num_heads: int, qkv_bias: bool, dropout: float) -> LinearAttention:
    return LinearAttention(dim, num_heads, qkv_bias=qkv_bias, dropout=dropout)


def _positive(name: str, value: PerAxis, num_axes: int) -> tuple[float, ...]:
    values = per_axis(name, value, num_axes)
    if not all(0 < each < math.inf for each in values):
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return values


def _in_units(periods: Periods, scale: tuple[float, ...]) -> Periods | None:
    check_periods(periods, len(scale))
    units = tuple(None if period is None else period / unit for period, unit in zip(periods, scale, strict=True))
    return None if all(period is None for period in units) else units


def _sizes(extent: tuple[float, ...], scale: tuple[float, ...]) -> tuple[int, ...]:
    """Units that the training data is long along each axis, 1 at least."""
    return tuple(max(round(length / unit), 1) for length, unit in zip(extent, scale, strict=True))


def _given_places(latents: Tensor, num_axes: int) -> list[list[float]]:
    """Positions of latents as numbers, which no cast of the model rounds."""
    if latents.ndim != 2 or latents.shape[1] != num_axes or not len(latents) or not latents.isfinite().all():
        rule = f"latents must be a number, or finite positions (latents, {num_axes})"
        raise ValueError(f"{rule}, got a tensor {tuple(latents.shape)}")
    return latents.double().tolist()
