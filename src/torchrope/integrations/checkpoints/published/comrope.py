"""Convert ComRoPE's checkpoints (Yu et al.), CLIP vision towers with commuting generators, to `ViT`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.encodings import ComRoPEAP, ComRoPELD, Encoding, LearnedAPE
from torchrope.integrations.checkpoints.published.tensors import Tensors, build_and_load
from torchrope.lattice import Lattice
from torchrope.models import ViT
from torchrope.positions import grid, prefix

FAMILY = "ComRoPE"
_TOWER = "vision_model."
_TABLE = "vision_model.embeddings.position_embedding"
_CENTRE = 0.5  # position of the class token along every axis in ComRoPE's code


class QuickGELU(nn.Module):
    """CLIP's nonlinearity:  x σ(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return x * torch.sigmoid(1.702 * x)


POSITIONS = ("spacing", "range")
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"quick_gelu": QuickGELU, "gelu": nn.GELU}

_LAYER = {"layer_norm1": "norm1", "layer_norm2": "norm2", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3"}


@dataclass(frozen=True)
class Plan:
    """A model as described by its shapes; sizes are those of training."""

    dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch: int
    in_channels: int
    num_outputs: int
    lattice: tuple[int, ...]

    @property
    def side(self) -> int:
        """Patches along a side of an image: the unit of all axes, frames included."""
        return self.lattice[-1]

    @property
    def input_size(self) -> tuple[int, ...]:
        """Frames, if any, and pixels."""
        frames = self.lattice[:-2]
        return (*frames, *(patches * self.patch for patches in self.lattice[-2:]))


def recognises(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict has the names of CLIP's vision tower and ComRoPE's attention or position table."""
    ours = _freqs(0) in state or _TABLE in state
    return ours and "vision_model.embeddings.class_embedding" in state


def convert(
    state: Mapping[str, Tensor],
    *,
    num_axes: int | None = None,
    input_size: int | Sequence[int] | None = None,
    activation: str = "quick_gelu",
    positions: str = "spacing",
) -> ViT:
    """Build a `ViT` with `ComRoPELD` if the file has multipliers, with `ComRoPEAP` otherwise.

    In ComRoPE the class token is at 0.5 along every axis, here at the origin. All positions are therefore shifted by
    -0.5, which does not change scores, because the generators commute.

    Args:
        state: The checkpoint.
        num_axes: 2 or 3, for ComRoPE-AP, whose tensors do not determine it; by default 3 if the position table has
            frames, else 2.
        input_size: Training size, if there is no position table: pixels, after frames if there are.
        activation: "quick_gelu", the default of CLIP's configuration, or "gelu".
        positions: "spacing" keeps the distance between patches at other input sizes, so that larger images extend
            beyond 1; "range" keeps the interval [0, 1], as ComRoPE's code does.

    Raises:
        ValueError: a tensor that is missing, unused or of a wrong shape; no parameters of the encoding.
    """
    tensors = Tensors(FAMILY, state)
    if activation not in ACTIVATIONS:
        raise tensors.error(f"activation must be {' or '.join(ACTIVATIONS)}, got {activation!r}")
    if positions not in POSITIONS:
        raise tensors.error(f"positions must be {' or '.join(POSITIONS)}, got {positions!r}")
    plan = _plan(tensors, num_axes, input_size)
    encoding, generators = _take_generators(tensors, plan)
    weights = _take_weights(tensors, plan)
    has_table = _TABLE in tensors
    if has_table:
        weights |= _take_table(tensors, plan, weights["prefix_tokens"])
    tensors.finish()
    spacing, origin = 1 / plan.side, 0.5 / plan.side - _CENTRE
    ranged: dict[str, Any] = dict(per=-1, train_sizes=plan.lattice) if positions == "range" else {}
    build = partial(
        ViT,
        plan.input_size,
        patch_size=(1,) * (len(plan.lattice) - 2) + (plan.patch,) * 2,
        in_channels=plan.in_channels,
        num_outputs=plan.num_outputs,
        dim=plan.dim,
        depth=plan.depth,
        num_heads=plan.num_heads,
        mlp_dim=plan.mlp_dim,
        encoding=encoding,
        absolute=LearnedAPE if has_table else None,
        positions=Lattice(spacing, origin, **ranged),
        activation=ACTIVATIONS[activation],
        norm_eps=1e-5,
        embedding_norm=True,
    )
    return build_and_load(build, weights, generators)


def _plan(tensors: Tensors, num_axes: int | None, input_size: int | Sequence[int] | None) -> Plan:
    if _freqs(0) not in tensors:
        raise tensors.error(f"{_freqs(0)} must be present, got none (ComRoPE's raw, none or vanilla-rope)")
    dim, in_channels, patch, _ = tensors.shape("vision_model.embeddings.patch_embedding.weight", 4)
    heads = tensors.shape(_freqs(0), 5)[0]
    if dim % heads:
        raise tensors.error(f"its {dim} channels must be divisible by the heads of {_freqs(0)}, got {heads}")
    return Plan(
        dim=dim,
        depth=tensors.depth("vision_model.encoder.layers."),
        num_heads=heads,
        mlp_dim=tensors.shape("vision_model.encoder.layers.0.mlp.fc1.weight", 2)[0],
        patch=patch,
        in_channels=in_channels,
        num_outputs=tensors.shape("classification_head.weight", 2)[0] if "classification_head.weight" in tensors else 0,
        lattice=_lattice(tensors, patch, num_axes, input_size),
    )


def _lattice(
    tensors: Tensors, patch: int, num_axes: int | None, input_size: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Patches along each axis at the training size; an image is square, since all axes share its unit."""
    frames, side = _frames_and_side(tensors, patch, input_size)
    stated = tensors.shape(_multiplier(0), 5)[1] if _multiplier(0) in tensors else None
    axes = stated or num_axes or (2 if frames is None else 3)
    if axes not in (2, 3) or num_axes not in (None, axes):
        raise tensors.error(f"num_axes must be {stated or '2 or 3'}, got {num_axes or axes}")
    if axes == 2:
        if frames is not None:
            raise tensors.error(f"it must have no frames on 2 axes, got {frames}")
        return (side, side)
    if frames is None and _TABLE not in tensors:
        rule = "input_size must be (frames, height, width), because the file does not determine the frames"
        raise tensors.error(f"{rule}, got {input_size}")
    return (frames or 1, side, side)


def _frames_and_side(tensors: Tensors, patch: int, input_size: int | Sequence[int] | None) -> tuple[int | None, int]:
    if _TABLE in tensors:
        frames, height, width, _ = tensors.shape(_TABLE, 4)
        if height != width:
            raise tensors.error(f"{_TABLE} must be square, got {height} x {width}")
        if input_size is not None:
            raise tensors.error(f"input_size must be None, because {_TABLE} determines it, got {input_size}")
        return (frames if frames > 1 else None), height
    if input_size is None:
        raise tensors.error("input_size must be given, because the file has no position table, got None")
    sizes = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
    *before, height, width = sizes if len(sizes) in (2, 3) else (0, 1)
    if height != width or height % patch:
        raise tensors.error(f"input_size must be square pixels in patches of {patch}, after frames if any, got {sizes}")
    return (before[0] if before else None), height // patch


def _take_generators(tensors: Tensors, plan: Plan) -> tuple[Callable[..., Encoding], list[Tensor]]:
    """Return a function that builds an encoding, and the generators `(axes, heads, blocks, b, b)` of each layer."""
    heads, per_axis, blocks, b, _ = tensors.shape(_freqs(0), 5)
    axes, head_dim = len(plan.lattice), plan.dim // plan.num_heads
    linear = _multiplier(0) in tensors
    if per_axis > 1:
        raise tensors.error(f"its freqs are LieRE's, of {per_axis} axes: their scale_factor is not in the file")
    if blocks * b != head_dim:
        raise tensors.error(f"{_freqs(0)} must fill heads of {head_dim} channels, got {blocks} blocks of {b}")
    if not linear and blocks % axes:
        raise tensors.error(f"ComRoPE-AP shares {blocks} blocks among {axes} axes evenly; give num_axes=")
    own_axis = (torch.arange(blocks) % axes == torch.arange(axes).unsqueeze(1)).double()  # (axes, blocks)
    generators = []
    for layer in range(plan.depth):
        free = tensors.take(_freqs(layer), heads, 1, blocks, b, b).double().movedim(0, 1)  # (1, heads, blocks, b, b)
        if linear:
            factors = tensors.take(_multiplier(layer), 1, axes, blocks, 1, 1).double().movedim(0, 1)
        else:
            factors = own_axis.reshape(axes, 1, blocks, 1, 1)
        generators.append(factors * (free - free.mT))
    return partial(ComRoPELD if linear else ComRoPEAP, block_size=b), generators


def _take_weights(tensors: Tensors, plan: Plan) -> dict[str, Tensor]:
    dim = plan.dim
    patches = tensors.take(
        "vision_model.embeddings.patch_embedding.weight", dim, plan.in_channels, plan.patch, plan.patch
    )
    weights = {
        "embed.proj.weight": patches.flatten(1),
        "embed.proj.bias": torch.zeros(dim),
        "prefix_tokens": tensors.take("vision_model.embeddings.class_embedding", dim).unsqueeze(0),
        **_take(tensors, "vision_model.pre_layrnorm", "embedding_norm", (dim,)),
        **_take(tensors, "vision_model.post_layernorm", "norm", (dim,)),
    }
    if plan.num_outputs:
        weights |= _take(tensors, "classification_head", "head", (plan.num_outputs, dim))
    shapes = {
        "layer_norm1": (dim,),
        "layer_norm2": (dim,),
        "mlp.fc1": (plan.mlp_dim, dim),
        "mlp.fc2": (dim, plan.mlp_dim),
    }
    for layer in range(plan.depth):
        theirs, ours = f"vision_model.encoder.layers.{layer}", f"layers.{layer}"
        for name, shape in shapes.items():
            weights |= _take(tensors, f"{theirs}.{name}", f"{ours}.{_LAYER[name]}", shape)
        weights |= _take(tensors, f"{theirs}.self_attn.out_proj", f"{ours}.attention.proj", (dim, dim))
        parts = [_take(tensors, f"{theirs}.self_attn.{part}_proj", part, (dim, dim)) for part in "qkv"]
        for kind in ("weight", "bias"):
            joined = [part[f"{name}.{kind}"] for name, part in zip("qkv", parts, strict=True)]
            weights[f"{ours}.attention.qkv.{kind}"] = torch.cat(joined)
    return weights


def _take_table(tensors: Tensors, plan: Plan, class_token: Tensor) -> dict[str, Tensor]:
    """Evaluate the published table look-up at the training size, and add the class token's vector to that token.

    ComRoPE's code passes (0, row, column) to grid_sample, which expects the last axis first. A two-dimensional table is
    therefore always sampled at its middle column. This is reproduced, because the checkpoints were trained with it.
    """
    frames = tensors.shape(_TABLE, 4)[0]
    table = tensors.take(_TABLE, frames, plan.side, plan.side, plan.dim).double()
    positions = grid(*plan.lattice, spacing=1 / plan.side, origin=0.5 / plan.side - _CENTRE, dtype=torch.float64)
    coordinates = 2 * prefix(positions, 1)  # the image spans [-1, 1]
    coordinates = functional.pad(coordinates, (3 - len(plan.lattice), 0))
    volume = table.permute(3, 0, 1, 2).unsqueeze(0)  # (1, dim, frames, side, side)
    found = functional.grid_sample(
        volume, coordinates.reshape(1, 1, 1, -1, 3), align_corners=True, padding_mode="border"
    )
    vectors = found.reshape(plan.dim, -1).T.float()  # (1 + patches, dim)
    return {
        "prefix_tokens": class_token + vectors[:1],
        "absolute.table": vectors[1:].reshape(*plan.lattice, plan.dim),
    }


def _take(tensors: Tensors, theirs: str, ours: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        f"{ours}.weight": tensors.take(f"{theirs}.weight", *shape),
        f"{ours}.bias": tensors.take(f"{theirs}.bias", shape[0]),
    }


def _freqs(layer: int) -> str:
    return f"{_TOWER}encoder.layers.{layer}.self_attn.freqs"


def _multiplier(layer: int) -> str:
    return f"{_TOWER}encoder.layers.{layer}.self_attn.multiplier"
