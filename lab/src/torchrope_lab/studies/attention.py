"""Mean distance and entropy of attention by layer, at several input sizes (RoPE-ViT figures 2 and 3)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrope.attention import Attention
from torchrope.models import ViT
from torchrope.positions import grid
from torchrope_lab.conclusion import caveat
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.transforms import resize
from torchrope_lab.engine.estimates import drawn_mean
from torchrope_lab.engine.figures import Point, line_figure
from torchrope_lab.engine.long_table import (
    NONE_POSSIBLE,
    Cell,
    Quantity,
    name_columns,
    ranking,
    table_of,
    with_interval,
)
from torchrope_lab.engine.reference import all_but, with_reference
from torchrope_lab.engine.runs import Measure
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.trained_models import Models, select_models
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import Axis, Column, Figure, Findings
from torchrope_lab.settings.study_config import LEARNED
from torchrope_lab.training.evaluate import data_at_size, resampled_spacing, scaled_sizes
from torchrope_lab.training.models import on_lattice
from torchrope_lab.training.sizes import Size, size_name, size_title

ByLayer = Mapping[Cell, np.ndarray]
"""Values `(seeds, layers, examples)` by encoding and input size, "8x8"."""
Lattices = Mapping[str, Sequence[int]]
"""Patches along each axis by input size."""

SCALES = (128 / 224, 384 / 224)
EXAMPLES = 512
SCORES = 2**25  # in memory at a time
UNIFORM = "uniform attention"
QUANTITIES = {
    "distance": with_interval("distance", "Distance", "patches", 2),
    "entropy": with_interval("entropy", "Entropy", "nats", 2),
    "front": with_interval("front", "Weight on class and register tokens", "%", 1),
}
KEYS = tuple(QUANTITIES)


def find(lab: Lab) -> Findings:
    """Measure the attention of the runs of the accuracy study, and of checkpoints."""
    reference = lab.reference or LEARNED
    if (lab.encodings or lab.reference) and lab.config.model.backbone == "swin":
        return Findings("Not measured: a Swin attends within windows, whose size bounds distance and entropy.")
    models = select_models(lab, with_reference(lab), lab.checkpoints)
    if not models.runs and not models.checkpoints:
        return Findings(NONE_POSSIBLE)
    patch_size = _patch_size(models)
    sizes = scaled_sizes(lab.data, patch_size, SCALES)
    lattices = {size_name(size): [n // p for n, p in zip(size, patch_size, strict=True)] for size in sizes}
    made = lab.data.other_sizes
    key = "-".join(["attention", str(EXAMPLES), *lattices, *([] if made == "resampled" else [made])])
    here = partial(measure, sizes=sizes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measured = models.measure(lambda _: Measure(key, here), lambda file: here(file.model.to(device), lab.data))
    if not measured:
        return Findings(models.unmeasured(NONE_POSSIBLE))
    layers = {kind: {each.at(size): each.stack(size, kind) for size in lattices for each in measured} for kind in KEYS}
    quantities = {
        kind: Quantity({cell: values.mean(axis=1) for cell, values in layers[kind].items()}, shown)
        for kind, shown in QUANTITIES.items()
    }
    distance, entropy, front = quantities.values()
    further = distance.changes_by_level(distance.against_arms(all_but(reference, [each.name for each in measured])))
    furthest = {size: distance.ranks(size) for size in lattices}
    sharpest = {size: entropy.ranks(size, lowest=True) for size in lattices}
    columns = (
        *name_columns({each.name: each.title for each in measured}),
        (Column("size", "Input size"), lambda cell: size_title(cell.level)),
        distance.column,
        (Column("furthest", "Distance, verdict"), lambda cell: furthest[cell.level][cell]),
        (with_interval("beside", f"Further than {reference}", "patches", 2), further.get),
        entropy.column,
        (Column("sharpest", "Least entropy, verdict"), lambda cell: sharpest[cell.level][cell]),
        front.column,
    )
    at, title = size_name(lab.data.input_size), "Attention by input size, mean over layers"
    claim = f"At {size_title(at)} attention distance is largest"
    return Findings(
        answer=f"{ranking(claim, furthest[at], distance.interval, ' patches', 2)}.{caveat(len(lab.seeds))}",
        tables=[table_of(title, columns, distance.values, _note(lab.data, reference))],
        figures=[_figure(kind, layers[kind], lattices, at) for kind in ("distance", "entropy")],
    )


def _patch_size(models: Models) -> Size:
    """Return the patch size of all models; raise ValueError for checkpoints that fit neither data nor each other."""
    data = models.lab.data
    given = (data.in_channels, *data.input_size)
    first = on_lattice(models.lab.blueprint(models.runs[0])) if models.runs else None
    for file in models.checkpoints:
        model, where = file.model, f"in {file.path}"
        if not isinstance(model, ViT):
            raise Mistake(f"--checkpoint must contain a ViT for attention, got a {type(model).__name__} {where}")
        takes = (model.embed.in_channels, *model.arguments["input_size"])
        if takes != given:
            rule = f"--checkpoint must have the input shape of --data {data.name}, {_inputs(given)}"
            raise Mistake(f"{rule}, got {_inputs(takes)} {where}")
        first = first or model
        if model.embed.patch_size != first.embed.patch_size:
            patches, received = (size_title(each.embed.patch_size) for each in (first, model))
            raise Mistake(f"models that are compared must have the same patches, {patches}, got {received} {where}")
    assert first is not None
    return first.embed.patch_size


def _inputs(shape: Sequence[int]) -> str:
    """Describe channels and sizes of inputs."""
    return f"{shape[0]} channel{'s' if shape[0] > 1 else ''} of {size_title(shape[1:])}"


def measure(model: nn.Module, data: DataModule, *, sizes: Sequence[Size]) -> dict[str, Any]:
    """Return `distance`, `entropy` and `front` by size, `(layers, examples)`, of attention to validation examples."""
    # Inputs of each size are drawn or read at that size if the data can be, else resampled.
    assert isinstance(model, ViT)
    device = next(model.parameters()).device
    found: dict[str, Any] = {}
    for size in sizes:
        batches = []
        at_size = (data_at_size(data, size) or data).val_dataloader()
        for inputs, *spacings in _examples(model, at_size, _step(data), size):
            changed = resize(inputs, size)
            extra = [resampled_spacing(spacing, inputs, changed).to(device) for spacing in spacings]
            batches.append(attention_statistics(model, changed.to(device), *extra))
        found[size_name(size)] = {key: torch.cat([batch[key] for batch in batches], dim=1).tolist() for key in KEYS}
    return found


@torch.no_grad()
def attention_statistics(model: ViT, inputs: Tensor, *spacing: Tensor) -> dict[str, Tensor]:
    """Compute distance and entropy of attention among patches, and its weight on prefix tokens, `(layers, batch)`."""
    # `spacing` is voxel spacing in mm, `(batch, axes)`, for a model whose positions depend on it.
    # Weights among patches are renormalised to sum to 1 without those on class and register tokens.
    between = distances(model.embed.lattice(inputs.shape[2:])).to(inputs.device)
    front = model.num_prefix
    found: dict[str, list[Tensor]] = {key: [] for key in KEYS}
    with record_attention(model) as layers:
        model(inputs, *spacing)
        for weights in layers():
            among = weights[:, :, front:, front:]
            inside = among.sum(dim=-1, keepdim=True)
            among = among / inside.clamp_min(torch.finfo(among.dtype).tiny)
            found["distance"].append((among * between).sum(dim=-1).mean(dim=(1, 2)).cpu())
            found["entropy"].append(torch.special.entr(among).sum(dim=-1).mean(dim=(1, 2)).cpu())
            found["front"].append((1 - inside).mean(dim=(1, 2, 3)).cpu())
    return {key: torch.stack(values) for key, values in found.items()}


@contextmanager
def record_attention(model: ViT) -> Iterator[Any]:
    """Record the inputs of every attention; yields a function that computes the weights of each layer after forward."""
    calls: list[Any] = []
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [each.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True) for each in attentions]
    lengths = ("lengths", "key_lengths", "within")  # of packed sequences
    try:
        yield lambda: (
            module.weights(*inputs, **{key: value for key, value in named.items() if key not in lengths})
            for module, inputs, named in calls
        )
    finally:
        for hook in hooks:
            hook.remove()


def distances(lattice: Sequence[int]) -> Tensor:
    """Compute Euclidean distances between the patches of a lattice, `(patches, patches)`, in patches."""
    positions = grid(*lattice)
    return (positions[:, None] - positions).norm(dim=-1)


def _examples(model: ViT, batches: Iterable[Sequence[Tensor]], step: int, size: Size) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of every step-th input, small enough for their scores, with voxel spacings if the data have any."""
    tokens = model.num_prefix + math.prod(model.embed.lattice(size))
    heads = max(module.num_heads for module in model.modules() if isinstance(module, Attention))
    at_once = max(1, SCORES // (tokens**2 * heads))
    seen = 0
    for inputs, _, *spacings in batches:
        chosen = [x[-seen % step :: step] for x in (inputs, *spacings)]
        seen += len(inputs)
        if len(chosen[0]):
            yield from zip(*(x.split(at_once) for x in chosen), strict=True)


def _step(data: DataModule) -> int:
    """Return the step between validation examples that leaves at most EXAMPLES of them."""
    return -(-data.counts[1] // EXAMPLES)


def _uniform(lattice: Sequence[int]) -> dict[str, float]:
    """Compute distance and entropy of uniform attention."""
    return {"distance": distances(lattice).mean().item(), "entropy": math.log(math.prod(lattice))}


def _note(data: DataModule, reference: str) -> str:
    _, count = data.counts
    used = len(range(0, count, _step(data)))
    return (
        "Distance between a patch and the patches it attends to, weighted by attention, and entropy of attention: "
        f"means over patches, heads and layers of {f'{used} of ' if used < count else ''}{count} validation examples. "
        "Verdicts are simultaneous over all pairs at a size; intervals of differences to "
        f"{reference} are simultaneous over all encodings."
    )


def _figure(kind: str, layers: ByLayer, lattices: Lattices, trained: str) -> Figure:
    points: list[Point] = []
    for size in lattices:
        values = {cell.arm: each.swapaxes(0, 1) for cell, each in layers.items() if cell.level == size}
        panel, uniform = size_title(size), (_uniform(lattices[size])[kind],) * 3
        for name, by_layer in values.items():
            points += [(name, panel, at, drawn_mean(layer).interval()) for at, layer in enumerate(by_layer, 1)]
        points += [(UNIFORM, panel, at + 1, uniform) for at in range(max(map(len, values.values())))]
    title, unit = {"distance": ("Attention distance", "patches"), "entropy": ("Entropy of attention", "nats")}[kind]
    return line_figure(
        Axis("layer", "Layer"),
        Axis(kind, title, unit),
        points,
        panel="size",
        name=f"attention-{kind}",
        title=f"{title} by layer",
        caption=f"Trained at {size_title(trained)}. Bands are 95 % intervals over examples.",
    )
