"""Swin transformer for any number of axes: shifted-window attention in four stages with patch merging."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchrope.attention import Attention, Windows, fit_window, mask_bias, pad_ends
from torchrope.encodings import Choice, Encoding, LearnedAPE, ScoreBias
from torchrope.encodings.periodic import update_all_turns
from torchrope.lattice import Lattice
from torchrope.models.layers import (
    Backbone,
    DropPathSchedule,
    Layer,
    PatchEmbed,
    Shareable,
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
from torchrope.rotations import Rotation
from torchrope.tensors import counts_per_axis

SWIN_SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
    "small": dict(dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24)),
    "base": dict(dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32)),
    "large": dict(dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48)),
}
"""The paper's sizes, section 3.3."""


class Swin(Shareable, Backbone):
    """Swin transformer: classify data with any number of axes by attention within shifted windows.

        patches -> tokens (+ APE) -> stages of [merge 2^N neighbours, layers in windows (+ bias, R(p))]
                -> norm -> mean -> class

    The published model has encoding="bias"; a rotary name replaces the bias, and "bias+mixed" has both.

    Args:
        input_size: Extent of the training data along each axis, such as (224, 224) or (8, 224, 224).
        patch_size: Extent of a patch along each axis, or one number for all.
        in_channels: Channels of the data.
        num_outputs: Channels of the output, such as classes; 0 returns the pooled features.
        dim: Channels of a token in the first stage; each merging doubles them.
        depths: Layers of each stage.
        num_heads: Attention heads of each stage.
        window_size: Tokens of a window along each axis, or one number for all. If the training lattice is
            smaller, the window is the lattice.
        mlp_ratio: Channels inside the MLP over those outside.
        encoding: A name ("mixed", the default of all models; "bias", "bias+liere:8", "none"), or a callable that builds
            a rotary encoding from num_axes, num_heads and head_dim; or an `encodings.Choice` of such a callable, of an
            absolute encoding and of a bias of the scores. Each layer has a separate encoding.
        positions: Positions of the tokens of a window, in every stage: a `Lattice` without a `unit`. By default the
            convention of the encoding's paper for a lattice like the stage's window, which never changes with input or
            window size.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping a channel after the embedding, attention projection and MLP.
        attention_dropout: Probability of dropping an attention weight.
        drop_path: Probability of skipping a branch for a sample (the paper: 0.2 for tiny, 0.3 for small, 0.5 for base).
        drop_path_schedule: "linear" grows from 0 in the first layer to drop_path in the last one, as in the paper;
            "constant" is the same in all.
        checkpoint_layers: Whether to recompute each layer and its rotation in the backward pass, to save memory.

    Raises:
        ValueError: sizes not divisible by the patch, depths and num_heads of different length, unknown names, or
            sizes that the encoding does not support.

    References:
        Liu et al., Swin Transformer: Hierarchical Vision Transformer using Shifted Windows. Heo et al., Rotary
        Position Embedding for Vision Transformer, section 3.3, for RoPE in the windows.

    Example:
        >>> import torch
        >>> model = Swin((32, 32), num_outputs=10, dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4,
        ...              encoding="bias+mixed")
        >>> model(torch.randn(5, 3, 40, 48)).shape
        torch.Size([5, 10])
        >>> [tuple(stage.shape) for stage in model.feature_maps(torch.randn(5, 3, 32, 32))]
        [(5, 16, 8, 8), (5, 32, 4, 4)]
    """

    arguments: dict[str, Any]

    @keeps_arguments()
    def __init__(
        self,
        input_size: Sequence[int],
        *,
        patch_size: int | Sequence[int] = 4,
        in_channels: int = 3,
        num_outputs: int = 1000,
        dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int | Sequence[int] = 7,
        mlp_ratio: float = 4.0,
        encoding: str | Callable[..., Encoding] | Choice = "mixed",
        positions: Lattice | None = None,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.1,
        drop_path_schedule: DropPathSchedule = "linear",
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        if len(depths) != len(num_heads) or min([*depths, *num_heads], default=0) < 1:
            received = f"{tuple(depths)} and {tuple(num_heads)}"
            raise ValueError(f"depths and num_heads must be 1 or more, one of each per stage, got {received}")
        self.embed = PatchEmbed(patch_size, in_channels, dim, num_axes=axes_of(input_size))
        self.embed_norm = nn.LayerNorm(dim)
        sizes = self.embed.lattice(input_size)
        choice = resolve(encoding)
        self.absolute = None if choice.absolute is None else choice.absolute(sizes=sizes, dim=dim)
        self.dropout = nn.Dropout(dropout)

        window = counts_per_axis("window_size", window_size, len(sizes))
        rates = drop_path_rates(drop_path, sum(depths), drop_path_schedule)
        self.stages = nn.ModuleList()
        for index, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
            width, earlier = dim * 2**index, sum(depths[:index])
            if index:
                sizes = tuple(math.ceil(size / 2) for size in sizes)
            inside = fit_window(window, sizes)
            merge = PatchMerging(width // 2, num_axes=len(sizes)) if index else nn.Identity()
            attention = partial(
                WindowAttention, width, heads, qkv_bias=qkv_bias, dropout=dropout, attention_dropout=attention_dropout
            )
            sized = partial(Layer, width, heads, int(width * mlp_ratio), dropout=dropout, norm_eps=1e-5)
            layers = [sized(drop_path=rate, attention=attention()) for rate in rates[earlier : earlier + depth]]
            encodings, biases = encodings_and_biases(choice, depth, inside, width, heads)
            position_map = completed(positions, encodings[0], inside)
            self.stages.append(Stage(merge, layers, encodings, biases, inside, position_map, checkpoint_layers))
        features = dim * 2 ** (len(depths) - 1)
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, num_outputs) if num_outputs else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as Swin: weights with standard deviation 0.02, zero biases; the embedding as a convolution."""
        for module in self.modules():
            as_convolution, table = module is self.embed.proj, isinstance(module, LearnedAPE)
            initialize(module, "torch" if as_convolution else "xavier" if table else "truncated-normal")
        update_all_turns(self)

    def forward(self, x: Tensor, *, window_size: int | Sequence[int] | None = None) -> Tensor:
        """Compute the logits of the classes.

        Args:
            x: `(batch, in_channels, *sizes)`, sizes divisible by the patch; any size, not the training size alone.
            window_size: Tokens of a window along each axis in every stage; by default as in training. A bias is
                resampled, rotary positions extend at the training spacing.

        Returns:
            Logits `(batch, num_outputs)`.
        """
        return self.head(self.features(x, window_size=window_size))

    def features(self, x: Tensor, *, window_size: int | Sequence[int] | None = None) -> Tensor:
        """Compute the pooled features `(batch, dim of the last stage)` of data `(batch, in_channels, *sizes)`."""
        last = self._stages(x, window_size)[-1]
        return self.norm(last).flatten(1, -2).mean(dim=1)

    def feature_maps(
        self, x: Tensor, *, window_size: int | Sequence[int] | None = None, valid_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Return the output of each stage, `(batch, dim of the stage, *sizes of the stage)`, without the last norm.

        Args:
            x: As in `forward`.
            window_size: As in `forward`.
            valid_mask: Valid patches, `(batch or 1, *lattice)`. No token attends to padding of the images or of the
                windows, and windows are padded before the shift. By default tokens attend to the zeros that pad
                windows, and the shift comes first, as in timm; both are equal if all patches are valid and whole
                windows cover the lattice.
        """
        return [stage.movedim(-1, 1) for stage in self._stages(x, window_size, valid_mask)]

    def _stages(
        self, x: Tensor, window_size: int | Sequence[int] | None, valid_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Return the outputs of the stages, `(batch, *sizes, dim)`."""
        sizes = self.embed.lattice(x.shape[2:])
        tokens = self.embed_norm(self.embed(x))  # (batch, tokens, dim)
        if self.absolute is not None:
            tokens = tokens + on_lattice(self.absolute, sizes, None if valid_mask is None else extents(valid_mask))
        lattice = self.dropout(tokens).unflatten(1, sizes)
        window = None if window_size is None else counts_per_axis("window_size", window_size, len(sizes))
        lattices = []
        for index, stage in enumerate(self.stages):
            if valid_mask is not None and index:
                lattice = lattice * valid_mask.unsqueeze(-1)  # padding is merged as zeros
                valid_mask = valid_mask[(slice(None), *(slice(None, None, 2) for _ in sizes))]
            lattice = stage(lattice, window, valid_mask)
            lattices.append(lattice)
        return lattices


class Stage(nn.Module):
    """Merge neighbours, except in the first stage; then apply layers in windows, every second one shifted by half."""

    def __init__(
        self,
        merge: nn.Module,
        layers: Sequence[Layer],
        encodings: Sequence[Encoding],
        biases: Sequence[ScoreBias],
        window: tuple[int, ...],
        position_map: Lattice,
        checkpoint_layers: bool,
    ) -> None:
        super().__init__()
        self.checkpoint_layers = checkpoint_layers
        self.window = window
        self.merge = merge
        self.layers = nn.ModuleList(layers)
        self.encodings = nn.ModuleList(encodings)
        self.biases = nn.ModuleList(biases)
        self.position_map = position_map

    def forward(self, x: Tensor, window: tuple[int, ...] | None = None, valid_mask: Tensor | None = None) -> Tensor:
        """Map a lattice `(batch, *sizes, dim of the previous stage)` to `(batch, *sizes of the stage, dim)`.

        Args:
            x: The lattice.
            window: Tokens of a window along each axis; by default as in training.
            valid_mask: Valid tokens, `(batch or 1, *sizes of the stage)`; see `feature_maps`.
        """
        x = self.merge(x)
        sizes = x.shape[1:-1]
        plain = Windows.fit(sizes, window or self.window)
        if valid_mask is not None:
            x = pad_ends(x, plain.padded)
            valid_mask = pad_ends(valid_mask.unsqueeze(-1), plain.padded).squeeze(-1)
            plain = Windows.fit(plain.padded, plain.window)
        cuts = [(cut, cut.attends(x.shape[0], valid_mask, device=x.device)) for cut in (plain, plain.shifted())]
        positions = token_positions(self.position_map, *plain.window, training=self.training, device=x.device)
        for index, layer in enumerate(self.layers):
            cut, mask = cuts[index % 2]
            bias = self.biases[index](*plain.window) if len(self.biases) else None
            rotations = partial(rotations_at, self.encodings[index], rotation=positions)
            x = run_layer(layer, x, rotations, bias=(bias, mask), within=cut, checkpointed=self.checkpoint_layers)
        for axis, size in enumerate(sizes, 1):
            x = x.narrow(axis, 0, size)
        return x


class WindowAttention(Attention):
    """Attention within the windows of a lattice; the rotation is that of the positions in a window."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation, *, bias: tuple[Tensor | None, Tensor | None], within: Windows, **_: None
    ) -> Tensor:
        """Map a lattice `(batch, *sizes, dim)` to the same shape.

        Args:
            x: The lattice.
            rotation: The rotation of the positions in a window.
            bias: Added to the scores of every window, `(heads, tokens, tokens)`; and which tokens attend to which,
                `(batch · windows, 1, tokens, tokens)`, None if all attend to all.
            within: The partition into windows.
        """
        return within.join(super().forward(within.cut(x), rotation, bias=mask_bias(*bias)))


class PatchMerging(nn.Module):
    """Halve a lattice along each axis:  x -> W norm(2^N neighbours),  twice the channels; odd sizes padded with zeros.

    Args:
        dim: Channels of a token.
        num_axes: Axes of the lattice, N.
    """

    def __init__(self, dim: int, *, num_axes: int) -> None:
        super().__init__()
        self.num_axes = num_axes
        self.norm = nn.LayerNorm(2**num_axes * dim)
        self.proj = nn.Linear(2**num_axes * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map a lattice `(batch, *sizes, dim)` to `(batch, *half the sizes, 2 dim)`."""
        x = pad_ends(x, [size + size % 2 for size in x.shape[1:-1]])
        for axis in reversed(range(1, self.num_axes + 1)):
            x = x.unflatten(axis, (x.shape[axis] // 2, 2))
        outer = range(1, 2 * self.num_axes, 2)
        inner = range(2 * self.num_axes, 0, -2)  # the first axis fastest, as in Swin's weights
        neighbours = x.permute(0, *outer, *inner, -1).flatten(self.num_axes + 1)
        return self.proj(self.norm(neighbours))
