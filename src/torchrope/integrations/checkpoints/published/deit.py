"""Convert checkpoints with timm's ViT parameter names (DeiT, DeiT III, rope-vit, timm's ViT) to `ViT`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrope.encodings import Encoding, LearnedAPE
from torchrope.integrations.checkpoints.published.tensors import Tensors, build_and_load
from torchrope.models import ViT

InputSize = int | Sequence[int]

# Number of heads by dim, for published models whose heads are not 64 wide: timm's so400m, huge, giant and gigantic.
_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}

_LAYER = {
    "norm1": "norm1",
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.proj",
    "norm2": "norm2",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
}
_SCALES = (("gamma_1", "gamma_2"), ("ls1.gamma", "ls2.gamma"))


@dataclass(frozen=True)
class Plan:
    """A ViT as described by the shapes of its checkpoint.

    Attributes:
        scales: Names of the two layer scales within a block, or None.
        has_class_token: Whether the first of the prefix tokens is a class token.
        lattice: Patches along height and width at the training size.
        table_prefix: Number of entries of the position table for prefix tokens; None without a table.
    """

    dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: tuple[int, int]
    in_channels: int
    num_outputs: int
    num_registers: int
    qkv_bias: bool
    scales: tuple[str, str] | None
    lattice: tuple[int, int]
    table_prefix: int | None


def plan(tensors: Tensors, *, num_heads: int | None, input_size: InputSize | None) -> Plan:
    """Infer the architecture from shapes; num_heads and input_size override the values of the published models.

    Raises:
        ValueError: an unsupported shape, or a number that neither shapes nor options determine.
    """
    dim, in_channels, *patch = tensors.shape("patch_embed.proj.weight", 4)
    if "cls_token" not in tensors:
        raise tensors.error("cls_token must be present, because pooling cannot be inferred without it, got none")
    if "dist_token" in tensors:
        raise tensors.error("dist_token must be absent, because models with two classifiers are not supported, got one")
    registers = tensors.shape("reg_token", 3)[1] if "reg_token" in tensors else 0
    patch_size = (patch[0], patch[1])
    lattice, table_prefix = _lattice(tensors, patch_size, 1 + registers, input_size)
    return Plan(
        dim=dim,
        depth=tensors.depth("blocks."),
        num_heads=heads_of(tensors, dim, num_heads),
        mlp_dim=tensors.shape("blocks.0.mlp.fc1.weight", 2)[0],
        patch_size=patch_size,
        in_channels=in_channels,
        num_outputs=tensors.shape("head.weight", 2)[0] if "head.weight" in tensors else 0,
        num_registers=registers,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        scales=next((names for names in _SCALES if f"blocks.0.{names[0]}" in tensors), None),
        lattice=lattice,
        table_prefix=table_prefix,
    )


def load(
    tensors: Tensors,
    plan: Plan,
    *,
    encoding: Callable[..., Encoding],
    generators: Sequence[Tensor] = (),
    share_layers: bool = False,
) -> ViT:
    """Build the model and load all weights of the checkpoint.

    Args:
        tensors: The checkpoint.
        plan: Its architecture.
        encoding: Builds a rotary encoding from num_axes, num_heads and head_dim.
        generators: `(axes, heads, blocks, b, b)` for each encoding.
        share_layers: Whether all layers share one encoding.
    """
    weights = take_weights(tensors, plan)
    tensors.finish()
    settings: dict[str, Any] = dict(
        patch_size=plan.patch_size,
        in_channels=plan.in_channels,
        num_outputs=plan.num_outputs,
        dim=plan.dim,
        depth=plan.depth,
        num_heads=plan.num_heads,
        mlp_dim=plan.mlp_dim,
        num_registers=plan.num_registers,
        qkv_bias=plan.qkv_bias,
        layer_scale=None if plan.scales is None else 1.0,
        absolute=None if plan.table_prefix is None else LearnedAPE,
    )
    sizes = [patches * extent for patches, extent in zip(plan.lattice, plan.patch_size, strict=True)]
    build = partial(ViT, sizes, encoding=encoding, share_layers=share_layers, **settings)
    return build_and_load(build, weights, generators)


def take_weights(tensors: Tensors, plan: Plan) -> dict[str, Tensor]:
    """Return all weights except those of rotary encodings, by their names in `ViT`."""
    dim = plan.dim
    weights = {
        "embed.proj.weight": tensors.take("patch_embed.proj.weight", dim, plan.in_channels, *plan.patch_size).flatten(
            1
        ),
        "embed.proj.bias": tensors.take("patch_embed.proj.bias", dim),
        **_take_linear(tensors, "norm", "norm", (dim,)),
    }
    prefix = [tensors.take("cls_token", 1, 1, dim)[0]]
    if plan.num_registers:
        prefix.append(tensors.take("reg_token", 1, plan.num_registers, dim)[0])
    weights["prefix_tokens"] = torch.cat(prefix)
    if plan.table_prefix is not None:
        patches = math.prod(plan.lattice)
        table = tensors.take("pos_embed", 1, plan.table_prefix + patches, dim)[0]
        # Entries of prefix tokens do not depend on the input size, so they are added to the tokens.
        weights["prefix_tokens"][: plan.table_prefix] += table[: plan.table_prefix]
        weights["absolute.table"] = table[plan.table_prefix :].reshape(*plan.lattice, dim)
    for layer in range(plan.depth):
        weights |= _take_layer(tensors, plan, layer)
    if plan.num_outputs:
        weights |= _take_linear(tensors, "head", "head", (plan.num_outputs, dim))
    return weights


def heads_of(tensors: Tensors, dim: int, num_heads: int | None, *, stated: int | None = None, by: str = "") -> int:
    """Return the number of heads: as stated by a tensor, as given, or as published.

    Raises:
        ValueError: num_heads contradicts the tensor, or does not divide dim.
    """
    heads = next(filter(None, (stated, num_heads, _HEADS.get(dim))), None)
    if heads is None:
        if dim % 64:
            raise tensors.error(f"num_heads must be given for {dim} channels, got None")
        heads = dim // 64
    if num_heads not in (None, heads):
        raise tensors.error(f"num_heads must be {heads}, as in {by}, got {num_heads}")
    if heads < 1 or dim % heads:
        raise tensors.error(f"num_heads must divide the {dim} channels of its tokens, got {heads}")
    return heads


def _take_layer(tensors: Tensors, plan: Plan, layer: int) -> dict[str, Tensor]:
    dim, mlp_dim = plan.dim, plan.mlp_dim
    shapes = {
        "norm1": (dim,),
        "attn.qkv": (3 * dim, dim),
        "attn.proj": (dim, dim),
        "norm2": (dim,),
        "mlp.fc1": (mlp_dim, dim),
        "mlp.fc2": (dim, mlp_dim),
    }
    weights: dict[str, Tensor] = {}
    for theirs, ours in _LAYER.items():
        bias = theirs != "attn.qkv" or plan.qkv_bias
        weights |= _take_linear(
            tensors, f"blocks.{layer}.{theirs}", f"layers.{layer}.{ours}", shapes[theirs], bias=bias
        )
    for index, name in enumerate(plan.scales or (), 1):
        weights[f"layers.{layer}.scale{index}.factor"] = tensors.take(f"blocks.{layer}.{name}", dim)
    return weights


def _take_linear(
    tensors: Tensors, theirs: str, ours: str, shape: tuple[int, ...], *, bias: bool = True
) -> dict[str, Tensor]:
    weights = {f"{ours}.weight": tensors.take(f"{theirs}.weight", *shape)}
    if bias:
        weights[f"{ours}.bias"] = tensors.take(f"{theirs}.bias", shape[0])
    return weights


def _lattice(
    tensors: Tensors, patch_size: tuple[int, int], num_prefix: int, input_size: InputSize | None
) -> tuple[tuple[int, int], int | None]:
    """Return the patches along both axes at the training size, and the table's number of entries for prefix tokens."""
    entries = tensors.shape("pos_embed", 3)[1] if "pos_embed" in tensors else None
    if input_size is not None:
        lattice = _patches(tensors, input_size, patch_size)
        if entries is None:
            return lattice, None
        extra = entries - math.prod(lattice)
        if extra not in (0, num_prefix):
            rule = f"input_size must give {entries} patches, or {entries - num_prefix} without prefix tokens"
            raise tensors.error(f"{rule}, as in pos_embed, got {lattice[0]} x {lattice[1]}")
        return lattice, extra
    if entries is None:
        side = _square(tensors.shape("freqs_t_x", 1)[0]) if "freqs_t_x" in tensors else None
        return (side, side) if side else (224 // patch_size[0], 224 // patch_size[1]), None
    for extra in (0, num_prefix):
        side = _square(entries - extra)
        if side:
            return (side, side), extra
    rule = f"input_size must be given, because the {entries} entries of pos_embed are not a square of patches"
    raise tensors.error(f"{rule}, got None")


def _patches(tensors: Tensors, input_size: InputSize, patch_size: tuple[int, int]) -> tuple[int, int]:
    sizes = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
    if len(sizes) != 2 or sizes[0] % patch_size[0] or sizes[1] % patch_size[1]:
        raise tensors.error(f"input_size must be two multiples of the patch {patch_size}, got {sizes}")
    return sizes[0] // patch_size[0], sizes[1] // patch_size[1]


def _square(count: int) -> int | None:
    side = math.isqrt(max(count, 0))
    return side if side and side * side == count else None
