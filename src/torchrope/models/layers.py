"""Modules shared by the backbones: patch embedding, pre-norm layer, stochastic depth; and encodings from names."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self

from torchrope.attention import Attention, pad_ends
from torchrope.encodings import AbsoluteEncoding, Choice, Encoding, LearnedAPE, ScoreBias, parse_encoding
from torchrope.encodings.names import built_as
from torchrope.lattice import Lattice
from torchrope.rotations import Rotation
from torchrope.tensors import counts_per_axis, shown

DropPathSchedule = Literal["linear", "constant"]
WeightInit = Literal["xavier", "truncated-normal", "torch"]
DRAW_TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier": functools.partial(nn.init.trunc_normal_, std=0.02, a=-0.04, b=0.04),
    "truncated-normal": functools.partial(nn.init.trunc_normal_, std=0.02),
    "torch": nn.init.normal_,
}


_Init = TypeVar("_Init", bound=Callable[..., None])


def keeps_arguments(*without: str) -> Callable[[_Init], _Init]:
    """Decorate `__init__` to keep its arguments, defaults too, as `self.arguments`, without those that are named."""

    def decorate(init: _Init) -> _Init:
        signature = inspect.signature(init)

        @functools.wraps(init)
        def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            _, *named = bound.arguments.items()
            self.arguments = {name: value for name, value in named if name not in without}

        return cast(_Init, keeping)

    return decorate


class Backbone(nn.Module):
    """Base class of the models: parameters by weight decay and by depth, as optimisers of timm request them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_place_anchors)

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters exempt from weight decay besides norms and biases: tokens and encodings."""
        return {name for name, _ in self.named_parameters(recurse=False)} | encoding_parameters(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return regular expressions that group parameters by depth, for timm's layer-wise learning-rate decay.

        The embedding comes first, then each layer with its encoding and bias, the first one of a stage with the
        merging before it; unmatched parameters, the last norm and the head, come last.

        Args:
            coarse: Whether to group by stages, if the model has any, instead of layers.
        """
        stem, layers = r"^(?:embed|absolute|prefix_tokens)", r"(?:layers|encodings|biases)\.(\d+)\."
        if not hasattr(self, "stages"):
            return {"stem": stem, "layers": rf"^{layers}"}
        of_stages = [(rf"^stages\.(\d+)\.{layers}", None), (r"^stages\.(\d+)\.merge\.", (0,))]
        return {"stem": stem, "layers": r"^stages\.(\d+)\." if coarse else of_stages}


def _place_anchors(model: nn.Module, _: Any) -> None:
    """Place empty buffers that are meta where `load_state_dict(state, assign=True)` placed the parameters."""
    parameter = next(model.parameters())
    for part in model.modules():
        anchor = part._buffers.get("_anchor")
        if anchor is not None and anchor.is_meta:
            part._buffers["_anchor"] = parameter.new_empty(0)


class Shareable:
    """Mixin with `save_pretrained`, `push_to_hub` and `from_pretrained`, which need huggingface_hub."""

    mixin: ClassVar[Any]
    """Function that returns the mixin of huggingface_hub; `torchrope.integrations`, above the models, sets it."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> str | None:
        """Save `torchrope.safetensors`, written by `torchrope.save`, and a model card in a folder.

        Args:
            save_directory: The folder, created if missing.
            options: Passed to `huggingface_hub.ModelHubMixin.save_pretrained`.

        Raises:
            ImportError: huggingface_hub or safetensors is not installed.
            ValueError: `torchrope.save` does not support the model.
        """
        return self.mixin()(self).save_pretrained(save_directory, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the files of `save_pretrained` to a repository of the Hugging Face Hub, and return its URL.

        Args:
            repo_id: The repository, such as "name/model".
            options: Passed to `huggingface_hub.ModelHubMixin.push_to_hub`.

        Raises:
            ImportError: huggingface_hub or safetensors is not installed.
            ValueError: `torchrope.save` does not support the model.
        """
        return self.mixin()(self).push_to_hub(repo_id, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """Load a model of this class, saved by `save_pretrained` or `push_to_hub`, on the CPU, in evaluation mode.

        Args:
            pretrained_model_name_or_path: The folder or the repository.
            options: Options of `huggingface_hub.ModelHubMixin.from_pretrained` and of `torchrope.load`.

        Raises:
            ImportError: huggingface_hub or safetensors is not installed.
            ValueError: `torchrope.load` cannot load the file, or the model is of another class.
        """
        return cls.mixin().from_pretrained(pretrained_model_name_or_path, kind=cls, **options)


class PatchEmbed(nn.Module):
    """Cut data into patches and project each:  x -> W patch + b,  patches row-major, the last axis fastest.

    A patch is flattened as (channel, *extent), so the weight is a convolution's weight, flattened.

    Args:
        patch_size: Extent along each axis, or one number for all.
        in_channels: Channels of the data.
        dim: Channels of a token.
        num_axes: Axes of the data.

    Raises:
        ValueError: neither one extent nor one per axis, or one below 1.
    """

    def __init__(self, patch_size: int | Sequence[int], in_channels: int, dim: int, *, num_axes: int) -> None:
        super().__init__()
        self.patch_size = counts_per_axis("patch_size", patch_size, num_axes)
        self.in_channels = in_channels
        self.proj = nn.Linear(in_channels * torch.Size(self.patch_size).numel(), dim)
        self.frozen_size: tuple[int, ...] | None = None  # the only size, if set by torchrope.freeze

    def lattice(self, input_size: Sequence[int]) -> tuple[int, ...]:
        """Return the number of patches along each axis for data of this size."""
        if self.frozen_size is not None and tuple(input_size) != self.frozen_size:
            raise ValueError(f"the model was frozen for input size {self.frozen_size}, got {tuple(input_size)}")
        if len(input_size) != len(self.patch_size):
            rule = f"data must be (batch, channels, *sizes) of {len(self.patch_size)} sizes"
            raise ValueError(f"{rule}, got {tuple(input_size)}")
        if any(size % patch for size, patch in zip(input_size, self.patch_size, strict=True)):
            raise ValueError(f"input sizes must be multiples of the patch {self.patch_size}, got {tuple(input_size)}")
        return tuple(size // patch for size, patch in zip(input_size, self.patch_size, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """Embed data `(batch, channels, *sizes)` as tokens `(batch, tokens, dim)`."""
        if x.shape[1] != self.in_channels:
            raise ValueError(f"data must have in_channels = {self.in_channels}, got {x.shape[1]}")
        axes = range(len(self.patch_size))
        for axis in reversed(axes):
            x = x.unflatten(2 + axis, (-1, self.patch_size[axis]))
        outer = [2 + 2 * axis for axis in axes]
        inner = [3 + 2 * axis for axis in axes]
        patches = x.permute(0, *outer, 1, *inner)  # (batch, *lattice, channels, *patch)
        return self.proj(patches.flatten(1, len(outer)).flatten(2))

    def extra_repr(self) -> str:
        """Return the extent of a patch."""
        return f"patch_size={self.patch_size}"


def axes_of(input_size: Sequence[int]) -> int:
    """Return the number of axes of the training data."""
    if not isinstance(input_size, Iterable):
        raise ValueError(f"input_size must be the extent of the data along each axis, got {input_size}")
    return len(input_size)


def encoding_parameters(model: nn.Module) -> set[str]:
    """Return the names of all parameters of position encodings in a model; they are exempt from weight decay."""
    kinds = (Encoding, AbsoluteEncoding, ScoreBias)
    learned = {
        parameter for module in model.modules() if isinstance(module, kinds) for parameter in module.parameters()
    }
    return {name for name, parameter in model.named_parameters() if parameter in learned}


def on_lattice(
    rows: Callable[..., Tensor], sizes: Sequence[int], extents: Sequence[tuple[int, ...]] | None = None
) -> Tensor:
    """Evaluate a function of sizes for each token of a lattice; in batches, of the `extents` that each sample fills."""
    if extents is None:
        return rows(*sizes)
    if not extents:
        return rows(*sizes).unsqueeze(0)[:0]
    parts = {part: pad_ends(rows(*part).unflatten(0, part).unsqueeze(0), sizes).flatten(1, -2) for part in set(extents)}
    return torch.cat([parts[part] for part in extents])


def token_positions(
    lattice: Lattice,
    *sizes: int,
    training: bool,
    device: torch.device | str | None = None,
    spacing: Tensor | None = None,
) -> Tensor:
    """Return the positions of a lattice of tokens, `([batch,] tokens, axes)`, which may vary in training."""
    positions = lattice(*sizes, device=device, spacing=spacing)
    return lattice.perturbed(positions) if training else positions


def lattice_of(positions: Lattice | None) -> Lattice:
    """Return the lattice of a model's argument `positions`."""
    lattice = Lattice() if positions is None else positions
    if type(lattice) is not Lattice:
        raise ValueError(f"positions must be a Lattice or None, got {shown(lattice)}")
    return lattice


def completed(positions: Lattice | None, encoding: Encoding, sizes: Sequence[int]) -> Lattice:
    """Return the lattice of a model's tokens, which gets what it lacks from the encoding's paper."""
    lattice = lattice_of(positions)
    if any(period is not None for period in lattice.periods or ()):
        rule = "periods of a Lattice need tr.Transformer; elsewhere encoding must build a tr.encodings.Periodic"
        raise ValueError(f"{rule}, got {lattice}")
    return lattice.completed(**encoding.lattice.spaced(*sizes))


def extents(valid_mask: Tensor) -> list[tuple[int, ...]]:
    """Return the extent of the valid tokens `(batch, *sizes)` along each axis in each sample, at least 1."""
    reach = [
        valid_mask.movedim(axis, 1)
        .flatten(1)
        .unflatten(1, (valid_mask.shape[axis], -1))
        .any(dim=2)
        .sum(dim=1)
        .clamp(min=1)
        for axis in range(1, valid_mask.ndim)
    ]
    return [tuple(sizes) for sizes in torch.stack(reach, dim=1).tolist()]


def initialize(module: nn.Module, weight_init: WeightInit) -> None:
    """Initialise the direct parameters of one module of a model, not those of its children."""
    if isinstance(module, nn.Linear):
        if weight_init == "torch":
            module.reset_parameters()
            return
        if weight_init == "xavier":
            nn.init.xavier_uniform_(module.weight)
        else:
            nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, LearnedAPE) and weight_init != "xavier":
        DRAW_TOKENS[weight_init](module.table)
    elif isinstance(module, nn.LayerNorm | AbsoluteEncoding | Encoding | ScoreBias | LayerScale):
        module.reset_parameters()


class DropPath(nn.Module):
    """Zero a sample's branch with probability p, scale the rest by 1/(1-p) (stochastic depth, arXiv:1603.09382)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Drop branches in training: of `(batch, ...)`, or of concatenated samples `(1, total, ...)`, by lengths."""
        if not self.training or self.p == 0:
            return x
        if lengths is None:
            keep = x.new_empty(len(x), *(1,) * (x.ndim - 1)).bernoulli_(1 - self.p)
        else:
            of_sample = x.new_empty(len(lengths), *(1,) * (x.ndim - 2)).bernoulli_(1 - self.p)
            keep = of_sample.repeat_interleave(torch.tensor(lengths, device=x.device), dim=0, output_size=x.shape[1])
        return x * keep / (1 - self.p)


def drop_path_rates(rate: float, depth: int, schedule: DropPathSchedule) -> list[float]:
    """Return the drop probability of each layer: "linear" from 0 in the first to `rate` in the last, or "constant"."""
    if not 0 <= rate < 1:
        raise ValueError(f"drop_path must be from 0 to below 1, got {rate}")
    if schedule not in ("linear", "constant"):
        raise ValueError(f"drop_path_schedule must be 'linear' or 'constant', got {schedule!r}")
    if schedule == "constant":
        return [rate] * depth
    return [rate * index / max(depth - 1, 1) for index in range(depth)]


def run_layer(
    layer: nn.Module, x: Tensor, rotations: Callable[[], dict[str, Rotation]], *, checkpointed: bool, **arguments: Any
) -> Tensor:
    """Run a layer with rotations that live as long as it runs; activation checkpointing computes them again."""

    def run(x: Tensor, **arguments: Any) -> Tensor:
        output: Tensor = layer(x, **rotations(), **arguments)
        return output

    arguments = {name: value for name, value in arguments.items() if value is not None}
    if checkpointed and torch.is_grad_enabled():
        return checkpoint(run, x, use_reentrant=False, **arguments)
    return run(x, **arguments)


def rotations_at(encoding: Any, **positions: Tensor) -> dict[str, Rotation]:
    """Return the rotations of a layer by the names of its arguments, from their positions."""
    return {name: encoding(at) for name, at in positions.items()}


class QuickGELU(nn.Module):
    """CLIP's nonlinearity:  x σ(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"quick_gelu": QuickGELU, "gelu": nn.GELU}
"""Activations of an MLP by their names in transformers."""


def mlp(dim: int, hidden_dim: int, dropout: float, activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Build the MLP of a layer:  W₂ σ(W₁ x + b₁) + b₂,  σ = gelu by default."""
    return nn.Sequential(
        nn.Linear(dim, hidden_dim), activation(), nn.Dropout(dropout), nn.Linear(hidden_dim, dim), nn.Dropout(dropout)
    )


def resolve(encoding: str | Callable[..., Encoding] | Choice) -> Choice:
    """Return the `Choice` of an encoding's name, or of a callable that builds a rotary one; raise if it is unknown."""
    if isinstance(encoding, Choice):
        return encoding
    return parse_encoding(encoding) if isinstance(encoding, str) else Choice(encoding)


def encodings_and_biases(
    choice: Choice, count: int, sizes: Sequence[int], dim: int, num_heads: int
) -> tuple[list[Encoding], list[ScoreBias]]:
    """Build the encodings and biases of layers on a lattice; no biases if the choice has none."""
    head = dict(num_axes=len(sizes), num_heads=num_heads, head_dim=dim // num_heads)
    encodings = [choice.build_rotary(**head) for _ in range(count)]
    biases = [] if choice.bias is None else [choice.bias(sizes=sizes, num_heads=num_heads) for _ in range(count)]
    return encodings, biases


def choice_of(model: Any) -> Choice:
    """Return the choice that builds the parts of a `ViT`: its encoding, absolute encoding and bias."""
    sizes = "num_axes", "num_heads", "head_dim", "sizes", "dim"
    optional = model.absolute, next(iter(model.biases), None)
    absolute, bias = (None if part is None else built_as(part, *sizes) for part in optional)
    return Choice(built_as(model.encodings[0], *sizes), absolute, bias)


class Layer(nn.Module):
    """One pre-norm layer:  x + attention(norm(x), R(p)),  then  x + mlp(norm(x)).

    Args:
        attention: The attention module, by default an `Attention` with `qkv_bias` and `attention_dropout`; another one
            must take the same arguments.
        cross: Whether it is cross-attention to a context, with a separate norm:
            x + attention(norm(x), norm(context)).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_dim: int,
        *,
        dropout: float,
        drop_path: float,
        norm_eps: float,
        qkv_bias: bool = True,
        attention_dropout: float = 0.0,
        layer_scale: float | None = None,
        activation: Callable[[], nn.Module] = nn.GELU,
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
        scale = nn.Identity if layer_scale is None else functools.partial(LayerScale, dim, layer_scale)
        self.scale1, self.scale2 = scale(), scale()
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        bias: Any = None,
        lengths: Sequence[int] | None = None,
        context: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Map tokens `(batch, tokens, dim)` to the same shape; the other arguments are passed to the attention."""
        if self.norm_context is not None:
            context = self.norm_context(context)
        mixed = self.attention(self.norm1(x), rotation, bias=bias, lengths=lengths, context=context, **arguments)
        x = x + self.drop_path(self.scale1(mixed), lengths)
        return x + self.drop_path(self.scale2(self.mlp(self.norm2(x))), lengths)


class LayerScale(nn.Module):
    """Scale each channel by a learned factor (Touvron et al., CaiT, arXiv:2103.17239, equation 12)."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.factor = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all factors to the initial value."""
        nn.init.constant_(self.factor, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        """Scale channels of `(..., dim)`."""
        return x * self.factor
