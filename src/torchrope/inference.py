"""Inference: `absorb` folds bases into projections, `freeze` precomputes rotations, `rerotate` moves cached keys."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.attention import Attention
from torchrope.encodings import AbsoluteEncoding, Encoding, MixedRoPE
from torchrope.encodings.base import Positions
from torchrope.encodings.names import built_as
from torchrope.encodings.skew_matrices import invariant_planes
from torchrope.models import Swin, ViT
from torchrope.models.layers import axes_of, choice_of
from torchrope.ops.backends import is_exporting, takes_kernels
from torchrope.ops.layouts import heads_first
from torchrope.rotating import apply
from torchrope.rotations import Block, Commuting, Planar, Rotation, equal
from torchrope.tensors import Float32Module, as_numbers, block_diagonal, can_read, require_module, shown, wide_dtype


def freeze(model: nn.Module, input_size: Sequence[int] | Tensor | tuple[Tensor, ...]) -> nn.Module:
    """Copy a model for inference at one input size:  every encoding's R(p) becomes a constant.

    The copy is in evaluation mode and gives the same outputs. Planar rotations store cos and sin, those in a basis the
    basis too, LieRE its matrices, which take b numbers per channel, token and layer; in float32 or float64 even if the
    model is cast later. Absolute encodings store their vectors. What is stored does not depend on device or backend.

    Args:
        model: A `ViT`, a `Swin`, or any model that calls encodings; an encoding itself becomes a `Frozen` one.
        input_size: Extent of the data along each axis, for a `ViT` or `Swin`. For other models an example of their
            input, or a tuple of examples of several, as of tokens and positions. The model runs once, to record the
            positions.

    Returns:
        The copy; the model is left as it is.

    Raises:
        ValueError: input_size is not an example if the model needs one; no encoding is called, or one is called at
            several sets of positions. The copy raises it for another input size.

    Example:
        >>> model = ViT((8, 8), patch_size=2, in_channels=1, num_outputs=3, dim=16, depth=1, num_heads=2,
        ...             encoding="liere:4")
        >>> frozen = freeze(model, (8, 12))
        >>> x = torch.randn(5, 1, 8, 12)
        >>> torch.allclose(frozen(x), model.eval()(x), atol=1e-5)
        True
    """
    require_unfrozen("freeze", model)
    frozen = copy.deepcopy(model).eval()
    examples: tuple[Any, ...]
    if isinstance(frozen, ViT | Swin):
        embed = frozen.embed
        sizes: Any = input_size.shape[2:] if isinstance(input_size, Tensor) else input_size
        axes_of(sizes)
        embed.frozen_size = tuple(sizes)
        examples = (embed.proj.weight.new_zeros(1, embed.in_channels, *embed.frozen_size),)
    elif isinstance(input_size, tuple) and input_size and all(isinstance(each, Tensor) for each in input_size):
        examples = input_size
    elif isinstance(input_size, Tensor):
        examples = (input_size,)
    else:
        rule = f"{type(model).__name__} needs an example of its input, or a tuple of examples, to be frozen"
        raise ValueError(f"{rule}, got {shown(input_size)}")
    constants = _record_constants(frozen, examples)
    if not constants:
        raise ValueError(f"freeze needs a model that calls encodings, got {type(model).__name__}, which calls none")
    return _replace(frozen, constants)


def absorb(model: ViT) -> ViT:
    """Convert commuting generators to RoPE-Mixed:  R(p) = U rot(φ(p)) U^T,  W_q <- U^T W_q,  W_k <- U^T W_k.

    Scores are (U^T q)^T rot(φ(p' - p)) (U^T k), so the basis U of each head is folded into the projections and the
    frequencies become those of `MixedRoPE`. Outputs stay the same, at the cost of RoPE. The basis is computed in
    float64. A block of odd size has one channel that does not rotate; these channels move behind the rotated ones and
    form pairs of frequency zero. Channels beyond `rotary_dim` are unchanged.

    Args:
        model: A `ViT` with `ComRoPEAP`, `ComRoPELD`, `STRING`, `LieRE` of one axis, any family with blocks of 2, or
            any encoding whose blocks are multiples of one base each (`Encoding.factors_and_base`).

    Returns:
        The copy; its state is that of a `ViT` with encoding="mixed" and the model's `spacing` and `origin`.

    Raises:
        ValueError: a model that is not a `ViT`; generators that do not commute, or whose `factors_and_base` is None for
            blocks larger than 2 on several axes; attention other than `Attention`, or with a norm of q and k between
            projection and rotation; layers that share a projection but not the encoding.

    References:
        ComRoPE, sections on axial partition and linear dependence: conditions under which generators commute.
        Su et al., RoFormer, section 3.2.2, where the rotation is multiplied with W_q and W_k.
    """
    if not isinstance(model, ViT):
        raise ValueError(f"absorb needs a ViT, got {type(model).__name__}")
    require_unfrozen("absorb", model)
    plain = copy.deepcopy(model)
    split = {encoding: _as_mixed(encoding) for encoding in plain.encodings}
    folded: dict[nn.Parameter, nn.Module] = {}  # a projection that layers share takes one basis
    for index, layer in enumerate(plain.layers):
        encoding = plain.encodings[index % len(plain.encodings)]
        basis = split[encoding][1]
        if basis is None:
            continue
        attention = _plain_attention(index, layer.get_submodule("attention"))
        for parameter in attention.qkv.parameters():
            if parameter not in folded:
                _fold(parameter, basis, attention.num_heads)
            if folded.setdefault(parameter, encoding) is not encoding:
                rule = "absorb needs layers that share a projection to share the encoding"
                raise ValueError(f"{rule}, got layer {index}")
    plain.encodings = nn.ModuleList(split[encoding][0] for encoding in plain.encodings)
    plain.arguments |= {"positions": plain.position_map, "encoding": choice_of(plain)}
    return plain


def rerotate(
    keys: Tensor, encoding: Encoding, delta: float | Sequence[float] | Tensor, *, layout: str = "bhtd"
) -> Tensor:
    """Move cached keys, which are already rotated, to other positions:  R(p + δ) k = R(δ) R(p) k.

    For caches from which tokens were evicted, and windows that move over a video: the keys that stay get the positions
    that they would have in a new sequence. Neither p nor the keys before their rotation are needed. Each call rounds
    to the dtype of the keys once more.

    Args:
        keys: Keys as `rotate` or `apply` returned them, `(batch, heads, tokens, head_dim)`, any number of leading
            dimensions. Those of a swapped model are in its order of channels: index them by
            `order, back = model.rotary.orders(layer, keys.device)`, and the result by `back`.
        encoding: The encoding that rotated them, with the same frequencies; one whose scores depend on differences of
            positions alone.
        delta: δ, in the unit of the positions: one number per axis (a number for one axis), or one row per token,
            `([batch,] tokens, axes)`, with zeros for tokens that stay.
        layout: As of `rotate`.

    Returns:
        The rotated keys, in the layout and dtype of the input.

    Raises:
        ValueError: an encoding that is not relative (`Encoding.relative`), or not one of torchrope, such as a rotary
            embedding whose frequencies depend on the length; a delta of another shape, not finite, or on another
            device; keys that do not fit the encoding.

    References:
        Xiao et al., Efficient Streaming Language Models with Attention Sinks, section 3.2: positions within the cache.

    Example:
        >>> import torchrope as tr
        >>> encoding = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)
        >>> k = torch.randn(1, 2, 5, 8)
        >>> moved = rerotate(tr.apply(k, encoding(tr.grid(5) + 3)), encoding, -3)
        >>> torch.allclose(moved, tr.apply(k, encoding(tr.grid(5))), atol=1e-5)
        True
    """
    if not isinstance(encoding, Encoding):
        rule = "encoding must be the torchrope.Encoding that rotated the keys; for a model of another library call swap"
        raise ValueError(f"{rule}, got {type(encoding).__name__}")
    if not encoding.relative:
        rule = "rerotate needs an encoding with R(p + δ) = R(δ) R(p): cache the keys before they are rotated"
        raise ValueError(f"{rule}, got {type(encoding).__name__} with relative=False")
    tokens = heads_first("keys", keys, layout).shape[-2:-1] or (1,)
    moved = delta if isinstance(delta, Tensor) else as_numbers(delta, wide_dtype(keys)).to(keys.device)
    if moved.ndim < 2:
        moved = moved.reshape(1, -1).expand(*tokens, -1)
    return apply(keys, encoding(moved), layout=layout)


class Frozen(Float32Module):
    """An encoding, built by `build`, at fixed positions `frozen_at`: the fields of its precomputed rotation.

    Tables of a `Block` are transposed, as kernels read them; `plain_table` is that of a `Commuting` without kernels.
    """

    frozen_at: Tensor
    plain_table: Tensor
    table: Tensor

    def __init__(
        self, build: partial[Encoding], kind: type[Rotation], settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.build = build
        self.kind = kind
        self.settings = dict(settings)
        self.head_dim, self.num_heads = self.settings["head_dim"], self.settings["num_heads"]
        self._fields = [name for name in tensors if name not in ("frozen_at", "plain_table")]
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._known: tuple[list[tuple[str, Tensor]], Rotation] | None = None  # the rotation of these buffers
        # Positions that were found equal to `frozen_at`, and the versions of both.
        self._accepted: tuple[Tensor | None, Tensor | None, tuple[int, int] | None] = None, None, None

    def forward(self, positions: Positions) -> Rotation:
        """Return the rotation; ValueError for other positions, on a GPU or in a graph for another number only."""
        self._check(positions if isinstance(positions, Tensor) else as_numbers(positions).to(self.frozen_at.device))
        return self.rotation()

    def rotation(self) -> Rotation:
        """Return the precomputed rotation, without a check of positions."""
        known, compiling = self._known, torch.compiler.is_compiling()
        if compiling or known is None or any([self._buffers[name] is not x for name, x in known[0]]):  # noqa: C419
            tensors = {name: getattr(self, name) for name in self._fields}
            transposed = {"table": self.table.mT} if self.kind is Block else {}
            known = list(tensors.items()), self.kind(**{**tensors, **transposed}, **self.settings)
            if not compiling:
                self._known = known
        rotation = known[1]
        if isinstance(rotation, Commuting):
            of_kernel = rotation.positions, rotation.factors, rotation.base
            fused = not is_exporting() and takes_kernels("rotate_basis", *of_kernel)
            return rotation if fused else rotation.for_export()._with(_table=self.plain_table)
        return rotation.for_export() if is_exporting() else rotation

    def extra_repr(self) -> str:
        """Return the frozen shape to show in `repr`."""
        return f"positions={tuple(self.frozen_at.shape)}, num_heads={self.num_heads}, head_dim={self.head_dim}"

    def _check(self, positions: Tensor) -> None:
        frozen_at: Tensor = self.frozen_at
        if positions.shape != frozen_at.shape:
            frozen, received = tuple(frozen_at.shape), tuple(positions.shape)
            raise ValueError(f"positions must be the frozen ones of shape {frozen}, got shape {received}")
        if torch.compiler.is_compiling() or not (positions.is_cpu and frozen_at.is_cpu):
            return
        inference = positions.is_inference() or frozen_at.is_inference()
        versions = (-1, -1) if inference else (positions._version, frozen_at._version)
        accepted = self._accepted
        if not inference and accepted[0] is positions and accepted[1] is frozen_at and accepted[2] == versions:
            return
        if not torch.equal(positions.to(frozen_at.dtype), frozen_at):
            raise ValueError(f"positions must be the frozen ones, got others of shape {tuple(positions.shape)}")
        self._accepted = positions, frozen_at, versions

    def __getstate__(self) -> dict[str, Any]:
        """Exclude what is computed from buffers, of which copies have others."""
        return {**vars(self), "_known": None, "_accepted": (None, None, None)}


def _frozen(encoding: Encoding, positions: Tensor, rotation: Rotation) -> Frozen:
    """Return the constant that replaces an encoding, from its rotation of these positions."""
    constant = rotation.detach().tabulated()
    values = {name: value for name, value in constant._values().items() if name != "_tangent"}
    tensors: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    settings = {name: value for name, value in values.items() if name not in tensors} | {"num_heads": rotation.heads}
    if isinstance(constant, Commuting):
        tensors["plain_table"] = constant.for_export().tabulated()._table
    elif isinstance(constant, Block):
        tensors["table"] = constant.table.mT
    tensors["frozen_at"] = positions.to(wide_dtype(positions))
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return Frozen(built_as(encoding), type(constant), settings, copies)


def repeatable(encoding: Any, positions: Tensor) -> Any:
    """Return the rotation of an encoding that `rotates_pairs`; it reads the frequencies in place, if they are so."""
    rotation = encoding(positions)
    in_place = type(rotation) is Planar and not isinstance(encoding, Frozen)
    in_place = in_place and equal(encoding.frequencies_per_axis(), rotation.frequencies)
    return rotation._with(frequencies=encoding.frequencies_per_axis()) if in_place else rotation


def would_repeat(encoding: Any, positions: Tensor, before: Tensor, rotation: Rotation) -> bool:
    """Return whether an encoding would return a rotation of pairs, or a frozen one, that it made before."""
    if positions is not before or encoding._forward_hooks or encoding._forward_pre_hooks:
        return False
    if isinstance(encoding, Frozen):
        return encoding.rotation() is rotation
    if type(rotation) is not Planar or type(encoding).forward is not Encoding.forward:
        return False
    frequencies = encoding.frequencies_per_axis()  # compared by values, as changes through `.data` leave no trace
    return frequencies.dtype == rotation.positions.dtype and equal(frequencies, rotation.frequencies)


def rotates_pairs(encoding: nn.Module) -> bool:
    """Return whether an encoding is frozen, or rotates pairs of channels, whose rotations hold no tables."""
    if not isinstance(encoding, Encoding) or not encoding.has_frequencies or type(encoding).basis is not Encoding.basis:
        return isinstance(encoding, Frozen)
    frequencies = encoding.frequencies_per_axis()
    return can_read(frequencies) and frequencies.ndim == 3  # not those that FSDP gathers before a block


class FrozenAbsolute(Float32Module):
    """An absolute encoding at fixed lattice sizes: its precomputed vectors `(tokens, dim)`."""

    table: Tensor
    _anchor: Tensor

    def __init__(self, build: partial[AbsoluteEncoding], sizes: Sequence[int], vectors: Tensor) -> None:
        super().__init__()
        self.build = build
        self.sizes = tuple(sizes)
        self.register_buffer("table", vectors.detach().to(wide_dtype(vectors)).clone())
        # Empty buffer that follows the model's dtype, also into a file.
        self.register_buffer("_anchor", vectors.new_empty(0))

    def forward(self, *sizes: int) -> Tensor:
        """Return the vectors `(tokens, dim)` in the model's dtype."""
        if sizes != self.sizes:
            raise ValueError(f"sizes must be the frozen {self.sizes}, got {sizes}")
        return self.table.to(self._anchor.dtype)

    def extra_repr(self) -> str:
        """Return the frozen shape to show in `repr`."""
        return f"sizes={self.sizes}, dim={self.table.shape[-1]}"


def require_unfrozen(name: str, model: nn.Module) -> None:
    """Raise ValueError if a function, by its name, is called with a model that `freeze` returned."""
    require_module(name, model)
    if any(isinstance(part, Frozen | FrozenAbsolute) for part in model.modules()):
        raise ValueError(f"{name} needs a model that is not frozen, got a frozen {type(model).__name__}")


def _record_constants(model: nn.Module, examples: Sequence[Tensor]) -> dict[nn.Module, Any]:
    """Run a model, and return the constant replacement of every encoding that it called."""
    constants: dict[nn.Module, Any] = {}

    def record(encoding: Encoding | AbsoluteEncoding, args: tuple, kwargs: dict, output: Any) -> None:
        if isinstance(encoding, AbsoluteEncoding):
            constant = constants.setdefault(encoding, FrozenAbsolute(built_as(encoding), args, output))
            same = constant.sizes == args
        else:
            positions = encoding.check_positions(args[0] if args else kwargs["positions"])
            if encoding not in constants:
                constants[encoding] = _frozen(encoding, positions, _by_planes(encoding, output, positions))
                return
            before = constants[encoding].frozen_at
            same = before.shape == positions.shape and (positions.is_meta or before.equal(positions))
        if not same:
            raise ValueError(f"an encoding can be frozen at one set of positions, got another for {encoding}")

    candidates = [module for module in model.modules() if isinstance(module, Encoding | AbsoluteEncoding)]
    within = {part for module in candidates for part in module.modules() if part is not module}  # as of `Periodic`
    encodings = [module for module in candidates if module not in within]
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in encodings]
    try:
        with torch.no_grad():
            model(*examples)
    finally:
        for hook in hooks:
            hook.remove()
    return constants


def _by_planes(encoding: Encoding, rotation: Rotation, positions: Tensor) -> Rotation:
    """Return the rotation of an encoding, that of multiples of one base by its planes also where no kernel does so."""
    if not isinstance(rotation, Block) or encoding.block_size % 2:
        return rotation
    factored = encoding._checked_factors_and_base()
    if factored is None:
        return rotation
    inputs = encoding.check_positions(positions), *factored
    positions, factors, base = (x.to(rotation.table, copy=True) for x in inputs)
    basis, angular = (x.to(base) for x in _blockwise_planes(base))
    return Commuting(
        positions=positions, factors=factors, base=base, basis=basis, angular=angular, head_dim=rotation.head_dim,
        num_heads=rotation.num_heads,
    )  # fmt: skip


def _replace(model: nn.Module, constants: dict[nn.Module, Any]) -> nn.Module:
    """Replace encodings by their constants, in all submodules."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in constants:
                parent._modules[name] = constants[child].eval()
    return constants.get(model, model)


def _as_mixed(encoding: Any) -> tuple[nn.Module, Tensor | None]:
    """Return an encoding as RoPE-Mixed and its basis `(heads or 1, rotary_dim, rotary_dim)`, None for the identity."""
    if not encoding.relative:
        raise ValueError(f"absorb needs generators that commute, got {encoding}")
    if isinstance(encoding, MixedRoPE):
        return encoding, None
    with torch.no_grad():
        if not encoding.rotary_dim:
            frequencies, basis = encoding.generators().flatten(2), None
        elif encoding.has_frequencies:
            frequencies, basis = encoding.frequencies_per_axis(), encoding.basis()
        else:
            frequencies, basis = _decompose(*_factors_and_base(encoding))
        dense = None if basis is None else block_diagonal(basis.cpu().double(), encoding.rotary_dim)
    return _mixed(encoding, frequencies), dense


def _factors_and_base(encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Return factors and base of commuting generators; one axis is its own base with factor 1."""
    factored = encoding.factors_and_base()
    if factored is not None:
        return factored
    generators = encoding.generators()  # (axes, heads, blocks, b, b)
    if len(generators) > 1:
        raise ValueError(
            f"absorb requires factors_and_base() of encodings with blocks above 2: define it in {encoding}"
        )
    return generators.new_ones(generators.shape[:3]), generators[0]


def _mixed(encoding: Encoding, frequencies: Tensor) -> MixedRoPE:
    """Build RoPE-Mixed with frequencies `(axes, heads or 1, pairs)`; remaining pairs have frequency zero."""
    mixed = MixedRoPE(
        num_axes=encoding.num_axes,
        num_heads=encoding.num_heads,
        head_dim=encoding.head_dim,
        rotary_dim=encoding.rotary_dim - encoding.rotary_dim % 2,
        shared_heads=encoding.shared_heads,
    ).zero_()
    tensors = [*encoding.parameters(), *encoding.buffers()]
    mixed.to(device=tensors[0].device if tensors else None, dtype=wide_dtype(*tensors)).train(encoding.training)
    with torch.no_grad():
        mixed.frequencies[..., : frequencies.shape[-1]] = frequencies
    return mixed


def _decompose(factors: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose  A_a = c_a B  into frequencies `(axes, heads or 1, pairs)` and a basis U, unrotated channels last."""
    _, blocks, b, _ = base.shape
    bases, angular = _blockwise_planes(base)
    frequencies = factors.cpu().double().unsqueeze(-1) * angular  # (axes, heads, blocks, b div 2)
    channels = torch.arange(blocks * b).unflatten(0, (blocks, b))
    rotated, unrotated = channels[:, : b - b % 2], channels[:, b - b % 2 :]
    order = torch.cat([rotated.flatten(), unrotated.flatten()])
    return frequencies.flatten(2), block_diagonal(bases, blocks * b)[..., order].unsqueeze(-3)


def _blockwise_planes(base: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose blocks B `(heads, blocks, b, b)` in float64 on the CPU, on the meta device shapes only."""
    if base.is_meta:
        return base.clone(), base[..., 0, : base.shape[-1] // 2].clone()
    blocks = base.cpu().double().flatten(0, 1)  # not every device has float64
    decomposed = [invariant_planes(block) for block in blocks]
    bases, angular = (torch.stack(parts).unflatten(0, base.shape[:2]) for parts in zip(*decomposed, strict=True))
    return bases, angular


def _plain_attention(index: int, attention: nn.Module) -> Attention:
    """Return attention if its projection is directly followed by the rotation; raise ValueError otherwise."""
    for name, child in attention.named_children():
        if "norm" in name and not isinstance(child, nn.Identity):
            raise ValueError(f"absorb needs q and k to be rotated as projected, got {name} in layer {index}")
    if type(attention) is not Attention or type(attention.qkv) is not nn.Linear:
        projection = type(getattr(attention, "qkv", None)).__name__
        raise ValueError(f"absorb needs Attention with a Linear qkv, got {type(attention).__name__} with {projection}")
    return attention


def _fold(parameter: nn.Parameter, basis: Tensor, num_heads: int) -> None:
    """Compute W_q <- U^T W_q and W_k <- U^T W_k in place, for the weight or bias of a projection to q, k and v."""
    with torch.no_grad():
        rows = parameter.view(3, num_heads, -1, *parameter.shape[1:])[:2, :, : basis.shape[-1]]
        rows.copy_(torch.einsum("hcd,phc...->phd...", basis.expand(num_heads, -1, -1), rows.cpu().double()))
