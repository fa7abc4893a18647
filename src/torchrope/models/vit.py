"""A vision transformer for any number of axes: sequences, images, video, volumes."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.attention import Windows, mask_bias
from torchrope.encodings import Choice, Encoding
from torchrope.encodings.periodic import update_all_turns
from torchrope.lattice import Lattice
from torchrope.models.layers import (
    DRAW_TOKENS,
    Backbone,
    DropPathSchedule,
    Layer,
    PatchEmbed,
    Shareable,
    WeightInit,
    axes_of,
    completed,
    drop_path_rates,
    encodings_and_biases,
    extents,
    initialize,
    keeps_arguments,
    on_lattice,
    resolve,
    rotations_at,
    run_layer,
    token_positions,
)
from torchrope.positions import prefix
from torchrope.tensors import counts_per_axis, require_counts, shown

SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(dim=384, depth=12, num_heads=6, mlp_dim=768),
    "small": dict(dim=384, depth=12, num_heads=6, mlp_dim=1536),
    "base": dict(dim=768, depth=12, num_heads=12, mlp_dim=3072),
    "large": dict(dim=1024, depth=24, num_heads=16, mlp_dim=4096),
}
"""Sizes by name: small, base and large of DeiT and RoPE-ViT; tiny of LieRE (dim 384, unlike DeiT-Ti's 192)."""

# As in the original ViT: PyTorch's default 1e-5 dominates the variance of tokens near zero, and pretrained weights
# expect this value.
_EPS = 1e-6


class ViT(Shareable, Backbone):
    """Vision transformer: classify data with any number of axes.

        patches -> tokens (+ APE) -> depth x [x + attention(norm(x), R(p)), x + mlp(norm(x))] -> norm -> pool -> class

    Args:
        input_size: Extent of the training data along each axis, such as (224, 224) or (8, 224, 224).
        patch_size: Extent of a patch along each axis, or one number for all.
        in_channels: Channels of the data.
        num_outputs: Channels of the output, such as classes; 0 returns the pooled features.
        dim: Channels of a token.
        depth: Layers.
        num_heads: Attention heads.
        mlp_dim: Channels inside the MLP; 4 dim by default.
        encoding: A name ("mixed", the default of all models; "liere:8", "learned+axial", "none"), or a callable that
            builds an encoding from num_axes, num_heads and head_dim, such as `functools.partial(LieRE, block_size=8)`;
            or an `encodings.Choice` of such a callable, of an absolute encoding and of a bias of the scores.
        share_layers: Whether all layers share one encoding or bias, computed once per forward.
        positions: Positions of the patches, by default the convention of the encoding's paper at the training size,
            which never changes with the input size. A `Lattice` changes spacing, origin or convention; one with a
            `unit`, such as mm, needs `spacing` in each forward call.
        pool: "cls" uses a class token at the origin, "mean" averages the patches.
        num_registers: Register tokens at the origin, where R = I, dropped before pooling.
        qkv_bias: Whether queries, keys and values have a bias; LieRE's code has none.
        dropout: Probability of dropping a channel after the embedding, attention projection and MLP (LieRE: 0.1).
        attention_dropout: Probability of dropping an attention weight.
        drop_path: Probability of skipping a branch for a sample.
        drop_path_schedule: "linear" grows from 0 in the first layer to drop_path in the last one (DeiT, BEiT, ViTDet);
            "constant" is the same in all (DeiT III, and RoPE-ViT after it).
        layer_scale: Initial factor on each branch (DeiT III: 1e-4), or None.
        activation: Class of the MLP's activation.
        norm_eps: Added to the variance in every norm; CLIP and LieRE use PyTorch's default, 1e-5.
        weight_init: Initialisation. "xavier": Xavier uniform, biases zero, as in the first ViT. "truncated-normal":
            deviation 0.02, biases zero, the embedding as a convolution, as in DeiT. "torch": the default of
            `torch.nn.Linear`, tokens and a `LearnedAPE` from N(0, 1), as in LieRE's code, whose norm_eps is 1e-5. In
            the first two, tokens and table have deviation 0.02, in "xavier" truncated at two deviations.
        embedding_norm: Whether all tokens are normalised before the first layer, as CLIP's are.
        checkpoint_layers: Whether to recompute each layer and its rotation in the backward pass, to save memory.

    Raises:
        ValueError: sizes not divisible by the patch; dim not divisible by num_heads; an unknown encoding, pool or
            weight_init; arguments for which the encoding raises.

    Example:
        >>> model = ViT((8, 8), patch_size=2, in_channels=1, num_outputs=10, dim=32, depth=2, num_heads=2,
        ...             encoding="liere:8")
        >>> model(torch.randn(5, 1, 8, 12)).shape
        torch.Size([5, 10])
    """

    arguments: dict[str, Any]

    @keeps_arguments()
    def __init__(
        self,
        input_size: Sequence[int],
        *,
        patch_size: int | Sequence[int],
        in_channels: int = 3,
        num_outputs: int = 1000,
        dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_dim: int | None = None,
        encoding: str | Callable[..., Encoding] | Choice = "mixed",
        share_layers: bool = False,
        positions: Lattice | None = None,
        pool: Literal["cls", "mean"] = "cls",
        num_registers: int = 0,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        drop_path_schedule: DropPathSchedule = "linear",
        layer_scale: float | None = None,
        activation: Callable[[], nn.Module] = nn.GELU,
        norm_eps: float = _EPS,
        weight_init: WeightInit = "xavier",
        embedding_norm: bool = False,
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        if pool not in ("cls", "mean"):
            raise ValueError(f"pool must be 'cls' or 'mean', got {pool!r}")
        require_counts(depth=depth, num_heads=num_heads, dim=dim)
        if dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads = {num_heads}, got {dim}")
        if weight_init not in DRAW_TOKENS:
            raise ValueError(f"weight_init must be one of {', '.join(DRAW_TOKENS)}, got {weight_init!r}")
        self.pool = pool
        self.weight_init = weight_init
        self.checkpoint_layers = checkpoint_layers
        self.embed = PatchEmbed(patch_size, in_channels, dim, num_axes=axes_of(input_size))
        sizes = self.embed.lattice(input_size)

        choice = resolve(encoding)
        self.absolute = None if choice.absolute is None else choice.absolute(sizes=sizes, dim=dim)
        encodings, biases = encodings_and_biases(choice, 1 if share_layers else depth, sizes, dim, num_heads)
        self.encodings, self.biases = nn.ModuleList(encodings), nn.ModuleList(biases)
        self.position_map = completed(positions, encodings[0], sizes)

        self.num_prefix = num_registers + (pool == "cls")
        self.prefix_tokens = nn.Parameter(torch.empty(self.num_prefix, dim))
        self.dropout = nn.Dropout(dropout)
        self.embedding_norm = nn.LayerNorm(dim, eps=norm_eps) if embedding_norm else nn.Identity()
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
            )
            for rate in drop_path_rates(drop_path, depth, drop_path_schedule)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, num_outputs) if num_outputs else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise by `weight_init`; encodings as in their papers."""
        for module in self.modules():
            as_convolution = module is self.embed.proj and self.weight_init == "truncated-normal"
            initialize(module, "torch" if as_convolution else self.weight_init)
        DRAW_TOKENS[self.weight_init](self.prefix_tokens)
        update_all_turns(self)

    def forward(self, x: Tensor | Sequence[Tensor], spacing: Tensor | None = None) -> Tensor:
        """Compute the logits of the classes.

        Args:
            x: `(batch, in_channels, *sizes)`, sizes divisible by the patch; any size, not the training size alone. Or
                samples of several sizes, each `(in_channels, *sizes)`, which the layers process as one sequence.
            spacing: Distances between voxels in each sample, `(batch, axes)`, for `positions` with a `unit`.

        Returns:
            Logits `(batch, num_outputs)`.
        """
        return self.head(self.features(x, spacing))

    def features(self, x: Tensor | Sequence[Tensor], spacing: Tensor | None = None) -> Tensor:
        """Compute the pooled features `(batch, dim)`; arguments as in `forward`."""
        tokens = self.norm(self.hidden_states(x, [-1], spacing)[0])
        samples = [tokens] if isinstance(x, Tensor) else tokens.split(self._lengths(self._parts(x)), dim=1)
        pooled = [each[:, 0] if self.pool == "cls" else each[:, self.num_prefix :].mean(dim=1) for each in samples]
        return pooled[0] if isinstance(x, Tensor) else torch.cat(pooled)

    def feature_maps(
        self,
        x: Tensor,
        indices: Sequence[int],
        *,
        norm: bool = True,
        valid_mask: Tensor | None = None,
        window_size: int | Sequence[int] | None = None,
        global_layers: Collection[int] = (),
    ) -> list[Tensor]:
        """Return the tokens of the given depths as maps on the lattice of patches, without prefix tokens.

        With a window size, layers attend within windows, but positions are those of the whole lattice, also of a bias:
        queries and keys are rotated before they are partitioned into windows.

        Args:
            x: `(batch, in_channels, *sizes)`, as in `forward`.
            indices: Depths: 0 is the embedded patches, i the output of layer i counted from 1, -1 that of the last.
            norm: Whether to apply the final norm to each.
            valid_mask: Valid patches, `(batch, *lattice)`; no token attends to padding. An absolute encoding is
                resampled to the extent of each sample, a bias to the lattice of the batch.
            window_size: Tokens of a window along each axis, or one number for all; by default all attend to all.
            global_layers: Layers that attend globally in spite of a window size, counted from 1.

        Returns:
            One `(batch, dim, *lattice)` per index.

        Raises:
            ValueError: an index beyond the depth, or windows in a model with prefix tokens.

        References:
            Li et al., Exploring Plain Vision Transformer Backbones for Object Detection, section 3.

        Example:
            >>> model = ViT((8, 8), patch_size=2, dim=32, depth=2, num_heads=2)
            >>> [tuple(map.shape) for map in model.feature_maps(torch.randn(5, 3, 8, 12), [1, 2])]
            [(5, 32, 4, 6), (5, 32, 4, 6)]
        """
        sizes = self.embed.lattice(x.shape[2:])
        sized = self.absolute is not None or self.position_map.per != "one"
        filled = extents(valid_mask) if valid_mask is not None and sized else None  # of each sample
        tokens = self.embedded(x, filled)
        patch_positions = on_lattice(partial(self._patch_positions, device=tokens.device), sizes, filled)
        window = None
        if window_size is not None:
            window = Windows.fit(sizes, counts_per_axis("window_size", window_size, len(sizes)))
        biases = self._biases_and_windows(x.shape[0], sizes, valid_mask, window, global_layers)
        states = self._through_layers(tokens, prefix(patch_positions, self.num_prefix), biases, indices)
        normed = [self.norm(tokens) if norm else tokens for tokens in states]
        return [tokens[:, self.num_prefix :].mT.unflatten(2, tuple(sizes)) for tokens in normed]

    def hidden_states(
        self, x: Tensor | Sequence[Tensor], indices: Sequence[int], spacing: Tensor | None = None
    ) -> list[Tensor]:
        """Return the tokens of the given depths, without the final norm.

        Args:
            x: As in `forward`.
            indices: Depths, numbered as in `feature_maps`.
            spacing: As in `forward`.

        Returns:
            One `(batch, prefix + patches, dim)` per index; `(1, tokens of all samples, dim)` for a list of samples.
        """
        parts = self._parts(x)
        lattices = [self.embed.lattice(part.shape[2:]) for part in parts]
        lengths = None if isinstance(x, Tensor) else self._lengths(parts)
        tokens = _concatenated([self.embedded(part) for part in parts])
        spacings = [None] * len(parts) if spacing is None else [spacing] if lengths is None else spacing.split(1)
        pairs = zip(lattices, spacings, strict=True)
        patch_positions = [self.positions(sizes, device=tokens.device, spacing=step) for sizes, step in pairs]
        biases = [self.score_biases(sizes) for sizes in lattices]
        layer_biases = biases[0] if lengths is None else list(zip(*biases, strict=True))
        of_layers = ((layer_biases[index % len(layer_biases)], None) for index in range(len(self.layers)))
        return self._through_layers(tokens, _concatenated(patch_positions, dim=-2), of_layers, indices, lengths)

    def _through_layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        biases: Iterable[tuple[Any, Windows | None]],
        indices: Sequence[int],
        lengths: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Return the tokens of the given depths; of each layer, its biases (per sample, if packed) and windows."""
        depths = range(len(self.layers) + 1)
        if any(index not in range(-len(depths), len(depths)) for index in indices):
            raise ValueError(f"indices must be between {-len(depths)} and {len(depths) - 1}, got {tuple(indices)}")
        wanted = [depths[index] for index in indices]
        shares = len(self.encodings) < len(self.layers)
        shared = [encoding(positions).tabulated() for encoding in self.encodings] if shares else []
        states = {0: tokens} if 0 in wanted else {}
        for depth, (layer, (bias, within)) in enumerate(zip(self.layers, biases, strict=True), 1):
            index = (depth - 1) % len(self.encodings)
            computed = partial(rotations_at, self.encodings[index], rotation=positions)
            rotations = partial(dict, rotation=shared[index]) if shared else computed
            arguments: Any = dict(bias=bias, lengths=lengths, within=within, checkpointed=self.checkpoint_layers)
            tokens = run_layer(layer, tokens, rotations, **arguments)
            if depth in wanted:
                states[depth] = tokens
        return [states[depth] for depth in wanted]

    def _biases_and_windows(
        self,
        batch: int,
        sizes: tuple[int, ...],
        valid_mask: Tensor | None,
        window: Windows | None,
        global_layers: Collection[int],
    ) -> Iterator[tuple[Tensor | None, Windows | None]]:
        """Yield for each layer its score bias or mask, and its windows (None for global attention)."""
        if window is not None and self.num_prefix:
            raise ValueError(f"windows must be None for a model with prefix tokens, got {self.num_prefix} of them")
        everywhere = within = None  # masks of keys; None if all keys are valid
        if valid_mask is not None:
            everywhere = functional.pad(valid_mask.flatten(1), (self.num_prefix, 0), value=True)[:, None, None]
        if window is not None and (valid_mask is not None or window.padded != window.sizes):
            all_valid = self.prefix_tokens.new_ones(1, *sizes, dtype=torch.bool)
            within = window.attends(batch, all_valid if valid_mask is None else valid_mask)
        for index in range(len(self.layers)):
            bias = self.biases[index % len(self.biases)] if len(self.biases) else None
            if window is None or index + 1 in global_layers:
                yield mask_bias(None if bias is None else self._with_prefix(bias(*sizes)), everywhere), None
            else:
                yield mask_bias(None if bias is None else bias(*sizes, window=window.window), within), window

    def embedded(self, x: Tensor, filled: Sequence[tuple[int, ...]] | None = None) -> Tensor:
        """Embed data `(batch, in_channels, *sizes)` as the tokens of the first layer, prefix tokens first.

        Args:
            x: The data.
            filled: Number of patches along each axis that each sample fills, from the first on; all by default.
        """
        tokens = self.embed(x)
        if self.absolute is not None:
            tokens = tokens + on_lattice(self.absolute, self.embed.lattice(x.shape[2:]), filled)
        front = self.prefix_tokens.expand(x.shape[0], -1, -1)  # len() would be constant in an exported graph
        return self.embedding_norm(self.dropout(torch.cat([front.to(tokens.dtype), tokens], dim=1)))

    def positions(
        self, sizes: Sequence[int], *, device: torch.device | str | None = None, spacing: Tensor | None = None
    ) -> Tensor:
        """Return the positions of a lattice of patches, prefix tokens first, `([batch,] tokens, axes)`."""
        return prefix(self._patch_positions(*sizes, device=device, spacing=spacing), self.num_prefix)

    def _patch_positions(
        self, *sizes: int, device: torch.device | str | None = None, spacing: Tensor | None = None
    ) -> Tensor:
        """Return the positions of a lattice of patches, without prefix tokens."""
        return token_positions(self.position_map, *sizes, training=self.training, device=device, spacing=spacing)

    def _parts(self, x: Tensor | Sequence[Tensor]) -> list[Tensor]:
        return [x] if isinstance(x, Tensor) else _batches_of_one(x, len(self.embed.patch_size))

    def _lengths(self, parts: list[Tensor]) -> list[int]:
        """Return the number of tokens of each sample."""
        return [self.num_prefix + math.prod(self.embed.lattice(part.shape[2:])) for part in parts]

    def score_biases(self, sizes: Sequence[int]) -> list[Tensor | None]:
        """Compute the biases of the scores, 0 for prefix tokens: one per layer, or a single one if layers share it."""
        return [self._with_prefix(bias(*sizes)) for bias in self.biases] or [None]

    def _with_prefix(self, bias: Tensor) -> Tensor:
        return functional.pad(bias, (self.num_prefix, 0, self.num_prefix, 0))

    def drop_prefix(self) -> None:
        """Remove class token and registers, as windows require; with pool="cls" the model can no longer classify."""
        self.num_prefix = 0
        self.prefix_tokens = nn.Parameter(self.prefix_tokens.detach()[:0].clone())


def _batches_of_one(samples: Sequence[Tensor], num_axes: int) -> list[Tensor]:
    """Convert samples `(channels, *sizes)` to batches of one; batches of one are unchanged."""
    if not isinstance(samples, Sequence):
        raise ValueError(f"data must be a tensor, or a list of samples, got {shown(samples)}")
    if not samples:
        raise ValueError("a list of samples must hold one or more, got an empty list")
    alone = [x.unsqueeze(0) if x.ndim == num_axes + 1 else x for x in samples]
    for x in alone:
        if x.ndim != num_axes + 2 or len(x) != 1:
            raise ValueError(f"samples of a list must be (in_channels, *sizes), {num_axes} sizes, got {tuple(x.shape)}")
    return alone


def _concatenated(parts: list[Tensor], dim: int = 1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
