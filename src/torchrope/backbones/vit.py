"""A vision transformer for any number of axes: sequences, images, video, volumes."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from torchrope.attention import Attention
from torchrope.encodings import AbsoluteEncoding, Encoding, choose
from torchrope.positions import PerAxis, grid, pack, prefix
from torchrope.rotations import Rotation

SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(dim=384, depth=12, num_heads=6, mlp_dim=768),
    "small": dict(dim=384, depth=12, num_heads=6, mlp_dim=1536),
    "base": dict(dim=768, depth=12, num_heads=12, mlp_dim=3072),
    "large": dict(dim=1024, depth=24, num_heads=16, mlp_dim=4096),
}
"""The papers' sizes: small, base, large are those of DeiT and RoPE-ViT; tiny is LieRE's, 384 wide."""

# The first ViT's; torch's default of 1e-5 drowns tokens that start near zero, and pretrained weights expect this.
_EPS = 1e-6


class ViT(nn.Module):
    """Classify data with any number of axes.

        patches -> tokens (+ APE) -> depth x [x + attention(norm(x), R(p)), x + mlp(norm(x))] -> norm -> pool -> class

    Args:
        input_size: Extent of the training data along each axis, such as (224, 224) or (8, 224, 224).
        patch_size: Extent of a patch along each axis, or one number for all.
        in_channels: Channels of the data.
        num_classes: Classes; 0 returns the pooled features.
        dim: Channels of a token.
        depth: Layers.
        num_heads: Attention heads.
        mlp_dim: Channels inside the MLP; 4 dim by default.
        encoding: A name ("mixed", "liere:8", "learned+axial"), or what builds an encoding from num_axes,
            num_heads and head_dim, such as `functools.partial(LieRE, block_size=8)`.
        absolute: What builds an absolute encoding from sizes and dim, such as `LearnedAPE`; a name brings its own.
        share_layers: One encoding for all layers, its rotation computed once per forward.
        spacing: Distance between neighbouring patches, one number or one per axis. By default the convention
            of the encoding's paper at the training size; it never changes with the input size.
        origin: Position of the first patch, likewise.
        positions: What places the patches of a lattice in spite of spacing and origin, from its sizes and `device=`,
            such as `torchrope.patch_centers`; a module, if it should know whether the model trains.
        pool: "cls" reads a class token that sits at the origin, "mean" averages the patches.
        num_registers: Extra tokens without a place, dropped before pooling.
        qkv_bias: Whether queries, keys and values have a bias; LieRE's code has none.
        dropout: Probability of dropping a channel after the embedding, attention projection and MLP (LieRE: 0.1).
        attention_dropout: Probability of dropping an attention weight.
        drop_path: Probability of skipping a branch for a sample, growing linearly from 0 to this in the last
            layer (RoPE-ViT follows DeiT III).
        layer_scale: Initial factor on each branch (DeiT III: 1e-4), or None.

    Raises:
        ValueError: sizes that patches do not fill, unknown names, and what the encoding refuses.

    Example:
        >>> model = ViT((8, 8), patch_size=2, in_channels=1, num_classes=10, dim=32, depth=2, num_heads=2,
        ...             encoding="liere:8")
        >>> model(torch.randn(5, 1, 8, 12)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        input_size: Sequence[int],
        *,
        patch_size: int | Sequence[int],
        in_channels: int = 3,
        num_classes: int = 1000,
        dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_dim: int | None = None,
        encoding: str | Callable[..., Encoding] = "none",
        absolute: Callable[..., AbsoluteEncoding] | None = None,
        share_layers: bool = False,
        spacing: PerAxis | None = None,
        origin: PerAxis | None = None,
        positions: Callable[..., Tensor] | None = None,
        pool: Literal["cls", "mean"] = "cls",
        num_registers: int = 0,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        if pool not in ("cls", "mean"):
            raise ValueError(f"pool must be 'cls' or 'mean', got {pool!r}")
        if depth < 1 or num_heads < 1:
            raise ValueError(f"depth and num_heads must be 1 or more, got {depth} and {num_heads}")
        if dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads = {num_heads}, got {dim}")
        self.pool = pool
        self.embed = PatchEmbed(patch_size, in_channels, dim, num_axes=len(input_size))
        sizes = self.embed.lattice(input_size)

        rotary, absolute = _resolve(encoding, absolute)
        self.absolute = None if absolute is None else absolute(sizes=sizes, dim=dim)
        head = dict(num_axes=len(sizes), num_heads=num_heads, head_dim=dim // num_heads)
        encodings = [rotary(**head) for _ in range(1 if share_layers else depth)]
        self.encodings = nn.ModuleList(encodings)
        paper = encodings[0].lattice(*sizes)
        self.spacing = paper["spacing"] if spacing is None else spacing
        self.origin = paper["origin"] if origin is None else origin
        self.place = positions

        self.num_prefix = num_registers + (pool == "cls")
        self.prefix_tokens = nn.Parameter(torch.empty(self.num_prefix, dim))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(
                dim,
                num_heads,
                mlp_dim or 4 * dim,
                qkv_bias=qkv_bias,
                dropout=dropout,
                attention_dropout=attention_dropout,
                drop_path=drop_path * index / max(depth - 1, 1),
                layer_scale=layer_scale,
            )
            for index in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self.head = nn.Linear(dim, num_classes) if num_classes else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the first ViT: Xavier uniform weights, zero biases; encodings as in their papers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | AbsoluteEncoding | Encoding | LayerScale):
                module.reset_parameters()
        nn.init.trunc_normal_(self.prefix_tokens, std=0.02, a=-0.04, b=0.04)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """Classify.

        Args:
            x: `(batch, in_channels, *sizes)`, sizes divisible by the patch; any size, not the training size alone. Or
                samples of several sizes, each `(in_channels, *sizes)`, which go through the layers as one sequence.

        Returns:
            Logits `(batch, num_classes)`.
        """
        return self.head(self.features(x))

    def features(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """The pooled features `(batch, dim)` of what `forward` takes."""
        tokens, positions, lengths = self._embedded(x) if isinstance(x, Tensor) else self._end_to_end(x)
        tokens = self.dropout(tokens)
        rotations = [encoding(positions) for encoding in self.encodings]
        for index, layer in enumerate(self.layers):
            tokens = layer(tokens, rotations[index % len(rotations)], lengths)
        samples = [self.norm(tokens)] if lengths is None else self.norm(tokens).split(lengths, dim=1)
        pooled = [each[:, 0] if self.pool == "cls" else each[:, self.num_prefix :].mean(dim=1) for each in samples]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled)

    def rotations(self, sizes: Sequence[int], *, device: torch.device | str | None = None) -> list[Rotation]:
        """The rotations of a lattice of patches, one per layer, or one alone where layers share it."""
        positions = self.positions(sizes, device=device)
        return [encoding(positions) for encoding in self.encodings]

    def positions(self, sizes: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
        """Where the tokens of a lattice of patches are, prefix tokens first, `(tokens, axes)`."""
        if self.place is not None:
            return prefix(self.place(*sizes, device=device), self.num_prefix)
        return prefix(grid(*sizes, spacing=self.spacing, origin=self.origin, device=device), self.num_prefix)

    def _embedded(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        """Tokens `(batch, tokens, dim)` of data of one size, prefix tokens first, and their positions."""
        sizes = self.embed.lattice(x.shape[2:])
        tokens = self.embed(x)
        if self.absolute is not None:
            tokens = tokens + self.absolute(*sizes)
        front = self.prefix_tokens.expand(x.shape[0], -1, -1)  # len would fix an exported batch
        return torch.cat([front.to(tokens.dtype), tokens], dim=1), self.positions(sizes, device=x.device), None

    def _end_to_end(self, samples: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Tokens `(1, total, dim)` of samples of any size, their positions, and how many are each sample's."""
        if not samples:
            raise ValueError("a list of samples must hold one or more, got none")
        parts = [self._embedded(_batch_of_one(x, len(self.embed.patch_size))) for x in samples]
        packed = pack([positions for _, positions, _ in parts])
        return torch.cat([tokens for tokens, _, _ in parts], dim=1), packed.positions, packed.lengths


class PatchEmbed(nn.Module):
    """Cut data into patches and project each:  x -> W patch + b,  patches row-major, the last axis fastest.

    The weight sees a patch as (channel, *extent), so it is a convolution's weight, flattened.

    Args:
        patch_size: Extent along each axis, or one number for all.
        in_channels: Channels of the data.
        dim: Channels of a token.
        num_axes: Axes of the data.
    """

    def __init__(self, patch_size: int | Sequence[int], in_channels: int, dim: int, *, num_axes: int) -> None:
        super().__init__()
        self.patch_size = (patch_size,) * num_axes if isinstance(patch_size, int) else tuple(patch_size)
        if len(self.patch_size) != num_axes:
            raise ValueError(f"patch_size must be one number or {num_axes}, got {len(self.patch_size)}")
        if min(self.patch_size) < 1:
            raise ValueError(f"patch_size must be 1 or more, got {self.patch_size}")
        self.in_channels = in_channels
        self.proj = nn.Linear(in_channels * torch.Size(self.patch_size).numel(), dim)

    def lattice(self, input_size: Sequence[int]) -> tuple[int, ...]:
        """Patches along each axis of data of this size."""
        fits = len(input_size) == len(self.patch_size) and all(
            size % patch == 0 for size, patch in zip(input_size, self.patch_size, strict=True)
        )
        if not fits:
            raise ValueError(f"input sizes must be multiples of the patch {self.patch_size}, got {tuple(input_size)}")
        return tuple(size // patch for size, patch in zip(input_size, self.patch_size, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """Data `(batch, channels, *sizes)` to tokens `(batch, tokens, dim)`."""
        if x.shape[1] != self.in_channels:
            raise ValueError(f"data must have in_channels = {self.in_channels}, got {x.shape[1]}")
        axes = range(len(self.patch_size))
        for axis in reversed(axes):
            x = x.unflatten(2 + axis, (-1, self.patch_size[axis]))
        outer = [2 + 2 * axis for axis in axes]
        inner = [3 + 2 * axis for axis in axes]
        patches = x.permute(0, *outer, 1, *inner)  # (batch, *lattice, channels, *patch)
        return self.proj(patches.flatten(1, len(outer)).flatten(2))


class Layer(nn.Module):
    """One pre-norm layer:  x + attention(norm(x), R(p)),  then  x + mlp(norm(x))."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_dim: int,
        *,
        qkv_bias: bool,
        dropout: float,
        attention_dropout: float,
        drop_path: float,
        layer_scale: float | None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=_EPS)
        self.attention = Attention(
            dim, num_heads, qkv_bias=qkv_bias, dropout=dropout, attention_dropout=attention_dropout
        )
        self.norm2 = nn.LayerNorm(dim, eps=_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_dim, dim),
            nn.Dropout(dropout),
        )
        self.scale1, self.scale2 = _layer_scales(dim, layer_scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rotation: Rotation, lengths: Sequence[int] | None = None) -> Tensor:
        """Tokens `(batch, tokens, dim)` to tokens of the same shape; samples may lie end to end, of these lengths."""
        x = x + self.drop_path(self.scale1(self.attention(self.norm1(x), rotation, lengths=lengths)), lengths)
        return x + self.drop_path(self.scale2(self.mlp(self.norm2(x))), lengths)


class LayerScale(nn.Module):
    """A learned factor per channel (Touvron et al., CaiT, equation 12)."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.factor = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all factors to the initial one."""
        nn.init.constant_(self.factor, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        """Scale channels of `(..., dim)`."""
        return x * self.factor


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): zero a sample's branch with probability p, scale the rest by 1/(1-p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Drop branches of `(batch, ...)` in training, or of `(1, total, ...)`, samples of these lengths end to end."""
        if not self.training or self.p == 0:
            return x
        if lengths is None:
            keep = x.new_empty(len(x), *(1,) * (x.ndim - 1)).bernoulli_(1 - self.p)
        else:
            of_sample = x.new_empty(len(lengths), *(1,) * (x.ndim - 2)).bernoulli_(1 - self.p)
            keep = of_sample.repeat_interleave(torch.tensor(lengths, device=x.device), dim=0, output_size=x.shape[1])
        return x * keep / (1 - self.p)


def _batch_of_one(x: Tensor, num_axes: int) -> Tensor:
    """A sample `(channels, *sizes)` as a batch; one that is a batch already stays."""
    alone = x.unsqueeze(0) if x.ndim == num_axes + 1 else x
    if alone.ndim != num_axes + 2 or len(alone) != 1:
        raise ValueError(f"samples of a list must be (in_channels, *sizes), {num_axes} sizes, got {tuple(x.shape)}")
    return alone


def _layer_scales(dim: int, initial: float | None) -> tuple[nn.Module, nn.Module]:
    if initial is None:
        return nn.Identity(), nn.Identity()
    return LayerScale(dim, initial), LayerScale(dim, initial)


def _resolve(
    encoding: str | Callable[..., Encoding], absolute: Callable[..., AbsoluteEncoding] | None
) -> tuple[Callable[..., Encoding], Callable[..., AbsoluteEncoding] | None]:
    """Turn a name into what builds the encodings; a name that brings an absolute one excludes another."""
    if not isinstance(encoding, str):
        return encoding, absolute
    choice = choose(encoding)
    if absolute is not None and choice.absolute is not None:
        raise ValueError(f"give one absolute encoding, got {encoding!r} and absolute={absolute}")
    return choice.rotary, choice.absolute or absolute
