"""Convert LieRE's checkpoints (Ostmeier et al.) with LieRE, RoPE-Mixed, VisionLLaMA's or an absolute encoding."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from torchrope.encodings import LearnedAPE, LieRE, NoEncoding, baselines
from torchrope.integrations.checkpoints.published.tensors import Tensors, build_and_load
from torchrope.lattice import Lattice
from torchrope.models import ViT
from torchrope.positions import PerAxis

FAMILY = "LieRE"
_HEAD_DIM = 64  # of all models of LieRE's code
_PARAMETERS = "position_encoder.generator_raw_params"
_VIDEO = ((8, 224, 224), (2, 16, 16))  # input and patch of LieRE's configuration for UCF101

_LAYER = {
    "0.norm": "norm1",
    "0.fn.to_out.0": "attention.proj",
    "1.norm": "norm2",
    "1.fn.net.0": "mlp.0",
    "1.fn.net.3": "mlp.3",
}


@dataclass(frozen=True)
class Plan:
    """A model as described by its shapes; sizes are those of training."""

    dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: tuple[int, ...]
    in_channels: int
    lattice: tuple[int, ...]


def recognises(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict has the parameter names of vit-pytorch's ViT, which LieRE's code uses."""
    return "to_patch_embedding.1.weight" in state and "transformer.layers.0.0.fn.to_qkv.weight" in state


def convert(
    state: Mapping[str, Tensor],
    *,
    layers: str | None = None,
    input_size: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] | None = None,
    spacing: PerAxis | None = None,
) -> ViT:
    """Build a `ViT`: with `LieRE` for generators, `LearnedAPE` for a table that is not zero, else VisionLLaMA's RoPE.

    Args:
        state: The checkpoint.
        layers: "as published": all layers use the generators of layer 0, as in LieRE's code. "per layer": each layer
            uses its own. Default: "as published", with a warning if the file has several.
        input_size: Training size, if the patches are not a square; 8 x 224 x 224 for published videos.
        patch_size: Size of a patch, if it is not a square of three channels; 2 x 16 x 16 for published videos.
        spacing: Distance between patches; by default 1 / (n - 1), so that the n patches of the training size span
            [0, 1]. For an input with m patches along an axis LieRE's code uses (m / n) / (m - 1).

    Raises:
        ValueError: a tensor that is missing, unused or of a wrong shape.
    """
    tensors = Tensors(FAMILY, state)
    plan = _plan(tensors, input_size, patch_size)
    weights = _take_weights(tensors, plan)
    table = tensors.take("pos_embedding", 1, 1 + math.prod(plan.lattice), plan.dim)[0]
    settings: dict[str, Any] = dict(
        patch_size=plan.patch_size,
        in_channels=plan.in_channels,
        num_outputs=len(weights["head.bias"]),
        dim=plan.dim,
        depth=plan.depth,
        num_heads=plan.num_heads,
        mlp_dim=plan.mlp_dim,
        qkv_bias=False,
        dropout=0.1,
        norm_eps=1e-5,
        positions=Lattice(
            tuple(1 / max(patches - 1, 1) for patches in plan.lattice) if spacing is None else spacing, origin=0.0
        ),
    )
    generators: list[Tensor] = []
    if _PARAMETERS in tensors:
        if table.any():
            raise tensors.error("pos_embedding must be zero in a file with generators, got other values")
        generators, settings["encoding"] = _take_generators(tensors, plan, layers)
    elif layers is not None:
        raise tensors.error(f"layers must be None for a file without generators, got {layers!r}")
    elif table.any():
        weights["prefix_tokens"] = weights["prefix_tokens"] + table[:1]
        weights["absolute.table"] = table[1:].reshape(*plan.lattice, plan.dim)
        settings |= dict(encoding=NoEncoding, absolute=LearnedAPE)
    else:
        axes = len(plan.lattice)
        settings["encoding"] = partial(baselines.visionllama, rotary_dim=_HEAD_DIM // (2 * axes) * 2 * axes)
        generators = [settings["encoding"](num_axes=axes, num_heads=1, head_dim=_HEAD_DIM).generators()]
    tensors.finish()
    sizes = [patches * extent for patches, extent in zip(plan.lattice, plan.patch_size, strict=True)]
    return build_and_load(partial(ViT, sizes, share_layers=len(generators) < 2, **settings), weights, generators)


def _plan(tensors: Tensors, input_size: int | Sequence[int] | None, patch_size: int | Sequence[int] | None) -> Plan:
    dim, entries = tensors.shape("to_patch_embedding.1.weight", 2)
    width = tensors.shape("transformer.layers.0.0.fn.to_qkv.weight", 2)[0] // 3
    if width != dim or dim % _HEAD_DIM:
        raise tensors.error(f"dim must equal the width of q and be divisible by {_HEAD_DIM}, got {dim} and {width}")
    num_axes = _num_axes(tensors, input_size)
    patches = tensors.shape("pos_embedding", 3)[1] - 1
    patch = _patch(tensors, entries, num_axes, patch_size)
    return Plan(
        dim=dim,
        depth=tensors.depth("transformer.layers."),
        num_heads=dim // _HEAD_DIM,
        mlp_dim=tensors.shape("transformer.layers.0.1.fn.net.0.weight", 2)[0],
        patch_size=patch,
        in_channels=entries // math.prod(patch),
        lattice=_lattice(tensors, patches, patch, input_size),
    )


def _num_axes(tensors: Tensors, input_size: int | Sequence[int] | None) -> int:
    if _PARAMETERS in tensors:
        return tensors.shape(_PARAMETERS, 5)[0]
    return 2 if input_size is None or isinstance(input_size, int) else len(input_size)


def _patch(tensors: Tensors, entries: int, num_axes: int, patch_size: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the size of a patch: as given, as published for videos, or a square of three channels."""
    side = math.isqrt(entries // 3)
    if patch_size is not None:
        patch = (patch_size,) * num_axes if isinstance(patch_size, int) else tuple(patch_size)
    elif num_axes == 3 and entries == 3 * math.prod(_VIDEO[1]):
        patch = _VIDEO[1]
    elif num_axes == 2 and entries == 3 * side * side:
        patch = (side, side)
    else:
        rule = f"patch_size must be given, because {entries} numbers per patch do not determine it"
        raise tensors.error(f"{rule}, got None")
    if len(patch) != num_axes or entries % math.prod(patch):
        raise tensors.error(f"patch_size must be {num_axes} numbers that divide {entries}, got {patch}")
    return patch


def _lattice(
    tensors: Tensors, patches: int, patch: tuple[int, ...], input_size: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the patches along each axis: as given, as published for videos, or a square."""
    side = math.isqrt(patches)
    if input_size is None and patch == _VIDEO[1]:
        input_size = _VIDEO[0]
    elif input_size is None and len(patch) == 2 and side * side == patches:
        return (side, side)
    elif input_size is None:
        rule = f"input_size must be given, because the number of patches, {patches}, does not determine it"
        raise tensors.error(f"{rule}, got None")
    sizes = (input_size,) * len(patch) if isinstance(input_size, int) else tuple(input_size)
    fits = len(sizes) == len(patch) and not any(size % extent for size, extent in zip(sizes, patch, strict=True))
    if not fits or math.prod(sizes) != patches * math.prod(patch):
        raise tensors.error(f"input_size must give the {patches} patches of pos_embedding, of {patch}, got {sizes}")
    return tuple(size // extent for size, extent in zip(sizes, patch, strict=True))


def _take_weights(tensors: Tensors, plan: Plan) -> dict[str, Tensor]:
    dim, channels = plan.dim, plan.in_channels
    entries = channels * math.prod(plan.patch_size)
    patches = tensors.take("to_patch_embedding.1.weight", dim, entries)
    patches = patches.reshape(dim, *plan.patch_size, channels).movedim(-1, 1)  # channels are last in its patches
    num_outputs = tensors.shape("mlp_head.1.weight", 2)[0]
    weights = {
        "embed.proj.weight": patches.flatten(1),
        "embed.proj.bias": tensors.take("to_patch_embedding.1.bias", dim),
        "prefix_tokens": tensors.take("cls_token", 1, 1, dim)[0],
        "norm.weight": tensors.take("mlp_head.0.weight", dim),
        "norm.bias": tensors.take("mlp_head.0.bias", dim),
        "head.weight": tensors.take("mlp_head.1.weight", num_outputs, dim),
        "head.bias": tensors.take("mlp_head.1.bias", num_outputs),
    }
    shapes = {
        "0.norm": (dim,),
        "0.fn.to_out.0": (dim, dim),
        "1.norm": (dim,),
        "1.fn.net.0": (plan.mlp_dim, dim),
        "1.fn.net.3": (dim, plan.mlp_dim),
    }
    for layer in range(plan.depth):
        theirs, ours = f"transformer.layers.{layer}", f"layers.{layer}"
        weights[f"{ours}.attention.qkv.weight"] = tensors.take(f"{theirs}.0.fn.to_qkv.weight", 3 * dim, dim)
        for name, shape in shapes.items():
            weights[f"{ours}.{_LAYER[name]}.weight"] = tensors.take(f"{theirs}.{name}.weight", *shape)
            weights[f"{ours}.{_LAYER[name]}.bias"] = tensors.take(f"{theirs}.{name}.bias", shape[0])
    return weights


def _take_generators(tensors: Tensors, plan: Plan, layers: str | None) -> tuple[list[Tensor], Any]:
    """Return the generators of each encoding, of which there is one as published, and a function that builds it."""
    if layers not in (None, "as published", "per layer"):
        raise tensors.error(f"layers must be 'as published' or 'per layer', got {layers!r}")
    axes, stored, count, b, columns = tensors.shape(_PARAMETERS, 5)
    blocks = _HEAD_DIM // max(b, 1)
    fits = columns == b >= 2 and blocks and stored in (1, plan.depth) and count in (blocks, blocks * plan.num_heads)
    if not fits:
        rule = f"{_PARAMETERS} must be (axes, 1 or {plan.depth}, blocks or blocks x {plan.num_heads} heads, b, b)"
        raise tensors.error(f"{rule}, got {(axes, stored, count, b, columns)}")
    upper = tensors.take(_PARAMETERS, axes, stored, count, b, b).triu(1)
    by_layer = (upper - upper.mT).unflatten(2, (-1, blocks)).unbind(1)  # heads before blocks
    if stored > 1 and layers is None:
        warnings.warn(
            f"the file has generators for {stored} layers, but LieRE's code uses those of layer 0 in all layers, as is "
            "done here; pass layers='as published' to silence this, layers='per layer' to use them all",
            stacklevel=5,
        )
    shared = count == blocks
    build = partial(LieRE, block_size=b, rotary_dim=blocks * b, shared_heads=shared)
    return list(by_layer if layers == "per layer" else by_layer[:1]), build
