"""Layers that the backbones share: patch embedding, one transformer layer and its parts, and encodings by name."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchrope.attention import Attention, Windows, pad_ends
from torchrope.encodings import AbsoluteEncoding, Choice, Encoding, ScoreBias, choose
from torchrope.rotations import Rotation

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11

DropPathSchedule = Literal["linear", "constant"]


class Shareable:
    """`save_pretrained`, `push_to_hub` and `from_pretrained` for a model, where huggingface_hub is installed."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> str | None:
        """Write `torchrope.safetensors`, as `torchrope.save` does, and a card into a folder.

        Args:
            save_directory: The folder, made if missing.
            options: As `huggingface_hub.ModelHubMixin.save_pretrained` takes them.

        Raises:
            ImportError: huggingface_hub or safetensors is not installed.
            ValueError: what `torchrope.save` refuses.
        """
        return _hub()(self).save_pretrained(save_directory, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the same to a repository of the Hugging Face Hub, and return its address.

        Args:
            repo_id: Such as "name/model".
            options: As `huggingface_hub.ModelHubMixin.push_to_hub` takes them.

        Raises:
            ImportError: huggingface_hub or safetensors is not installed.
            ValueError: what `torchrope.save` refuses.
        """
        return _hub()(self).push_to_hub(repo_id, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> "Self":
        """Read a model of this class from such a folder or repository, on the CPU, in evaluation mode.

        Args:
            pretrained_model_name_or_path: The folder or the repository.
            options: As `huggingface_hub.ModelHubMixin.from_pretrained` takes them, and as `torchrope.load` does.

        Raises:
            ImportError: huggingface_hub or safetensors is not installed.
            ValueError: what `torchrope.load` refuses, or a model of another class.
        """
        return _hub().from_pretrained(pretrained_model_name_or_path, kind=cls, **options)


def _hub() -> Any:
    """The class that keeps models on the Hub; it stands above this module, which works without it."""
    try:
        return import_module("torchrope.integrations.hub").Hub
    except ModuleNotFoundError as error:
        raise ImportError(f"models are shared by huggingface_hub and safetensors, got no {error.name}") from None


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


def encoding_parameters(model: nn.Module) -> set[str]:
    """The names of the parameters of a model's position encodings of every kind, which weight decay leaves alone."""
    kinds = (Encoding, AbsoluteEncoding, ScoreBias)
    learned = {each for module in model.modules() if isinstance(module, kinds) for each in module.parameters()}
    return {name for name, parameter in model.named_parameters() if parameter in learned}


def on_lattice(
    rows: Callable[..., Tensor], sizes: Sequence[int], extents: Sequence[tuple[int, ...]] | None = None
) -> Tensor:
    """What a function of sizes gives each token of a lattice, and where samples fill a part of it, of that part.

    Args:
        rows: From sizes to `(prod(sizes), n)`.
        sizes: Those of the lattice.
        extents: The part that each sample fills, from the first token on; by default all fill all.

    Returns:
        `(prod(sizes), n)`, or `(batch, prod(sizes), n)` with zeros outside of the extents.
    """
    if extents is None:
        return rows(*sizes)
    parts = {own: pad_ends(rows(*own).unflatten(0, own).unsqueeze(0), sizes).flatten(1, -2) for own in set(extents)}
    return torch.cat([parts[own] for own in extents])


def extents(valid_mask: Tensor) -> list[tuple[int, ...]]:
    """How far the valid tokens, `(batch, *sizes)`, reach along each axis in each sample, 1 at least."""
    reach = [
        valid_mask.movedim(axis, 1)
        .flatten(1)
        .unflatten(1, (valid_mask.shape[axis], -1))
        .any(dim=2)
        .sum(dim=1)
        .clamp(min=1)
        for axis in range(1, valid_mask.ndim)
    ]
    return [tuple(each) for each in torch.stack(reach, dim=1).tolist()]


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


def drop_path_rates(rate: float, depth: int, schedule: DropPathSchedule) -> list[float]:
    """The stochastic depth of each layer: "linear" from 0 in the first to `rate` in the last, or "constant"."""
    if schedule not in ("linear", "constant"):
        raise ValueError(f"drop_path_schedule must be 'linear' or 'constant', got {schedule!r}")
    if schedule == "constant":
        return [rate] * depth
    return [rate * index / max(depth - 1, 1) for index in range(depth)]


def run_layer(layer: nn.Module, *inputs: object, checkpointed: bool) -> Tensor:
    """What a layer gives; checkpointed, it is computed again for its gradient, dropout included."""
    if checkpointed and torch.is_grad_enabled():
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)


def mlp(dim: int, hidden_dim: int, dropout: float, activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Mix the channels of each token:  W₂ σ(W₁ x + b₁) + b₂,  σ = gelu by default."""
    return nn.Sequential(
        nn.Linear(dim, hidden_dim),
        activation(),
        nn.Dropout(dropout),
        nn.Linear(hidden_dim, dim),
        nn.Dropout(dropout),
    )


def resolve(
    encoding: str | Callable[..., Encoding] | Choice,
    absolute: Callable[..., AbsoluteEncoding] | None,
    bias: Callable[..., ScoreBias] | None,
) -> Choice:
    """Turn a name into what builds the encodings, unless that is given; a name's excludes another of its kind.

    Raises:
        ValueError: an unknown name, or two absolute encodings or biases.
    """
    if isinstance(encoding, Choice):
        return encoding
    if not isinstance(encoding, str):
        return Choice("", encoding, absolute, bias)
    choice = choose(encoding)
    if absolute is not None and choice.absolute is not None:
        raise ValueError(f"give one absolute encoding, got {encoding!r} and absolute={absolute}")
    if bias is not None and choice.bias is not None:
        raise ValueError(f"give one bias, got {encoding!r} and bias={bias}")
    return Choice(encoding, choice.rotary, choice.absolute or absolute, choice.bias or bias)


class Layer(nn.Module):
    """One pre-norm layer:  x + attention(norm(x), R(p)),  then  x + mlp(norm(x)).

    Args:
        attention: What attends, `Attention` by default; another takes what is given to it here.
        cross: Whether it attends to another set of tokens, which has a norm of its own:
            x + attention(norm(x), norm(context)).
    """

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
        activation: Callable[[], nn.Module] = nn.GELU,
        norm_eps: float,
        attention: nn.Module | None = None,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.norm_context = nn.LayerNorm(dim, eps=norm_eps) if cross else None
        self.attention = attention or Attention(
            dim, num_heads, qkv_bias=qkv_bias, dropout=dropout, attention_dropout=attention_dropout
        )
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = mlp(dim, mlp_dim, dropout, activation)
        self.scale1, self.scale2 = _layer_scales(dim, layer_scale)
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        bias: Tensor | Sequence[Tensor | None] | None = None,
        lengths: Sequence[int] | None = None,
        within: Windows | None = None,
        context: Tensor | None = None,
        key_rotation: Rotation | None = None,
        key_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Tokens `(batch, tokens, dim)` to tokens of the same shape; the rest is what `Attention` takes."""
        if self.norm_context is not None:
            context = self.norm_context(context)
        mixed = self.attention(
            self.norm1(x),
            rotation,
            context=context,
            key_rotation=key_rotation,
            bias=bias,
            lengths=lengths,
            key_lengths=key_lengths,
            within=within,
        )
        x = x + self.drop_path(self.scale1(mixed), lengths)
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


def _layer_scales(dim: int, initial: float | None) -> tuple[nn.Module, nn.Module]:
    if initial is None:
        return nn.Identity(), nn.Identity()
    return LayerScale(dim, initial), LayerScale(dim, initial)
