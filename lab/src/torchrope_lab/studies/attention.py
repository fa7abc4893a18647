"""Mean distance and entropy of attention by layer, at several input sizes (RoPE-ViT figures 2 and 3)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrope.attention import Attention
from torchrope.models import ViT
from torchrope.positions import grid
from torchrope_lab.conclusion import NOT_DIFFERENT, caveat
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.transforms import resize
from torchrope_lab.engine.estimates import (
    NONE_POSSIBLE,
    Columns,
    drawn_mean,
    estimate_in,
    format_interval,
    mean_column,
    rank,
    simultaneous_intervals,
    table_of,
    tied_with,
    with_interval,
)
from torchrope_lab.engine.figures import Point, line_figure
from torchrope_lab.engine.reference import with_reference
from torchrope_lab.engine.runs import Measure
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.trained_models import NAME_COLUMNS, Measures, Models, select_models
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import Axis, Column, Figure, Findings
from torchrope_lab.settings.study_config import LEARNED
from torchrope_lab.training.evaluate import data_at_size, resampled_spacing, scaled_sizes
from torchrope_lab.training.models import on_lattice

Size = tuple[int, ...]
AtSizes = Mapping[str, Sequence[Measures]]
"""Measures by input size, "8x8"."""
Lattices = Mapping[str, Sequence[int]]
"""Patches along each axis by input size."""

SCALES = (128 / 224, 384 / 224)
EXAMPLES = 512
SCORES = 2**25  # in memory at a time
UNIFORM = "uniform attention"
KEYS = ("distance", "entropy", "front")


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
    lattices = {_name(size): [n // p for n, p in zip(size, patch_size, strict=True)] for size in sizes}
    made = lab.data.other_sizes
    key = "-".join(["attention", str(EXAMPLES), *lattices, *([] if made == "resampled" else [made])])
    here = partial(measure, sizes=sizes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measured = models.measure(lambda _: Measure(key, here), lambda file: here(file.model.to(device), lab.data))
    if not measured:
        return Findings(models.unmeasured(NONE_POSSIBLE))
    found = {size: [each.at(size) for each in measured] for size in lattices}
    items = [each for at in found.values() for each in at]
    columns = _columns(found, lattices, reference)
    table = table_of("Attention by input size, mean over layers", columns, items, _note(lab.data, reference))
    at = _name(lab.data.input_size)
    return Findings(
        answer=_answer(at, [row for row in table.rows if row["size"] == _shown(at)], len(lab.seeds)),
        tables=[table],
        figures=[_figure(kind, found, lattices, at) for kind in ("distance", "entropy")],
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
            patches, received = (_shown(_name(each.embed.patch_size)) for each in (first, model))
            raise Mistake(f"models that are compared must have the same patches, {patches}, got {received} {where}")
    assert first is not None
    return first.embed.patch_size


def _inputs(shape: Sequence[int]) -> str:
    """Describe channels and sizes of inputs."""
    return f"{shape[0]} channel{'s' if shape[0] > 1 else ''} of {_shown(_name(shape[1:]))}"


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
        found[_name(size)] = {key: torch.cat([batch[key] for batch in batches], dim=1).tolist() for key in KEYS}
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


def _name(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _shown(size: str) -> str:
    return size.replace("x", " × ")


def _over_layers(found: Measures, key: str, factor: float = 1.0) -> np.ndarray:
    """Compute the mean over layers, times a factor, `(seeds, examples)`."""
    return factor * found.stack(key).mean(axis=1)


def _uniform(lattice: Sequence[int]) -> dict[str, float]:
    """Compute distance and entropy of uniform attention."""
    return {"distance": distances(lattice).mean().item(), "entropy": math.log(math.prod(lattice))}


def _columns(found: AtSizes, lattices: Lattices, reference: str) -> Columns:
    furthest, sharpest, further = {}, {}, {}
    for size, at in found.items():
        distance = {each.name: drawn_mean(_over_layers(each, "distance")) for each in at}
        furthest[size] = rank(distance)
        sharpest[size] = rank({each.name: drawn_mean(_over_layers(each, "entropy", -1)) for each in at})
        base = distance.pop(reference, None)
        further[size] = simultaneous_intervals({name: own - base for name, own in distance.items() if base})

    def of_uniform(key: str) -> Callable[[Measures], np.ndarray]:
        uniform = {size: 100 / (_uniform(lattice)[key] or 1.0) for size, lattice in lattices.items()}
        return lambda at: _over_layers(at, key, uniform[at.part])

    in_front = "Weight on class and register tokens"
    return (
        *NAME_COLUMNS,
        (Column("size", "Input size"), lambda at: _shown(at.part)),
        mean_column("distance", "Distance", "patches", 2, lambda at: _over_layers(at, "distance")),
        (Column("furthest", "Distance, verdict"), lambda at: furthest[at.part][at.name]),
        (with_interval("beside", f"Further than {reference}", "patches", 2), lambda at: further[at.part].get(at.name)),
        mean_column("relative", "Over that of uniform attention", "%", 1, of_uniform("distance")),
        mean_column("entropy", "Entropy", "nats", 2, lambda at: _over_layers(at, "entropy")),
        (Column("sharpest", "Least entropy, verdict"), lambda at: sharpest[at.part][at.name]),
        mean_column("share", "Over the largest entropy", "%", 1, of_uniform("entropy")),
        mean_column("front", in_front, "%", 1, lambda at: _over_layers(at, "front", 100)),
    )


def _note(data: DataModule, reference: str) -> str:
    _, count = data.counts
    used = len(range(0, count, _step(data)))
    return (
        "Distance between a patch and the patches it attends to, weighted by attention, and entropy of attention: "
        f"means over patches, heads and layers of {f'{used} of ' if used < count else ''}{count} validation examples. "
        "Verdicts are simultaneous over all pairs at a size; intervals of differences to "
        f"{reference} are simultaneous over all encodings."
    )


def _answer(at: str, rows: Sequence[Mapping[str, Any]], seeds: int) -> str:
    far, sharp = max(rows, key=lambda row: row["distance"]), min(rows, key=lambda row: row["entropy"])
    ties = tied_with([row["name"] for row in rows if row["furthest"] == NOT_DIFFERENT and row is not far])
    others = sum(row["sharpest"] == NOT_DIFFERENT and row is not sharp for row in rows)
    tied = f" ({others} {NOT_DIFFERENT})" if others else ""
    patches, nats = (format_interval(estimate_in(*each), digits=2) for each in ((far, "distance"), (sharp, "entropy")))
    longest = f"At {_shown(at)} attention distance is largest in {far['name']}, {patches} patches{ties}"
    return f"{longest}; entropy is lowest in {sharp['name']}, {nats} nats{tied}.{caveat(seeds)}"


def _figure(kind: str, found: AtSizes, lattices: Lattices, trained: str) -> Figure:
    points: list[Point] = []
    for size, at in found.items():
        layers = {each.name: each.stack(kind).swapaxes(0, 1) for each in at}
        uniform = (_uniform(lattices[size])[kind],) * 3
        for name, values in layers.items():
            points += [(name, _shown(size), at, drawn_mean(layer).interval()) for at, layer in enumerate(values, 1)]
        points += [(UNIFORM, _shown(size), at + 1, uniform) for at in range(max(map(len, layers.values())))]
    title, unit = {"distance": ("Attention distance", "patches"), "entropy": ("Entropy of attention", "nats")}[kind]
    return line_figure(
        Axis("layer", "Layer"),
        Axis(kind, title, unit),
        points,
        panel="size",
        name=f"attention-{kind}",
        title=f"{title} by layer",
        caption=f"Trained at {_shown(trained)}. Bands are 95 % intervals over examples.",
    )
