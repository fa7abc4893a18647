"""Mean distance and entropy of attention by layer, at several input sizes (RoPE-ViT figures 2 and 3)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.attention import Attention
from torchrope.models import Swin, ViT
from torchrope.positions import grid
from torchrope_lab.conclusion import NOT_DIFFERENT, Interval, one_seed
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.transforms import resize
from torchrope_lab.results import Axis, Check, Column, Figure, Findings, Table
from torchrope_lab.statistics import BootstrapEstimate
from torchrope_lab.studies.describe import label
from torchrope_lab.studies.engine.checkpoints import Checkpoint, read_checkpoints, warned
from torchrope_lab.studies.engine.config import LEARNED
from torchrope_lab.studies.engine.estimates import (
    NAMES,
    NONE_POSSIBLE,
    by_encoding,
    cells,
    drawn_mean,
    format_interval,
    named_holm_intervals,
    rank,
    tied_with,
    with_interval,
)
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.published import ROPE_VIT
from torchrope_lab.studies.engine.reference import check_reference
from torchrope_lab.studies.engine.runs import Trained
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.training.evaluate import resampled_spacing, scaled_sizes
from torchrope_lab.training.models import on_lattice

Size = tuple[int, ...]
Measured = dict[str, dict[Size, dict[str, np.ndarray]]]
"""By encoding, size and measure, `(seeds, layers, examples)`."""

SCALES = (128 / 224, 384 / 224)
EXAMPLES = 512
SCORES = 2**25  # in memory at a time
UNIFORM = "uniform attention"
SLACK = 1e-3


def find(lab: Lab) -> Findings:
    """Measure the attention of the runs of the accuracy study, and of checkpoints."""
    reference = lab.reference or LEARNED
    names = list(dict.fromkeys([*lab.encodings, *([lab.reference] if lab.reference else [])]))
    if names and lab.config.model.backbone == "swin":
        return Findings("Not measured: a Swin attends within windows, whose size bounds distance and entropy.")
    if lab.reference:
        check_reference(lab, reference)
    runs, notes = feasible(lab, lab.runs(names))
    checkpoints = read_checkpoints(lab.checkpoints, names)
    if not runs and not checkpoints:
        return Findings(NONE_POSSIBLE, notes=notes)
    models = [_fitting(each, lab.data) for each in checkpoints]
    patch_size = on_lattice(lab.blueprint(runs[0])).embed.patch_size if runs else models[0].embed.patch_size
    for each, model in zip(checkpoints, models, strict=True):
        _check_patches(each, model, patch_size)
    trained = lab.train(runs) if runs else []
    sizes = scaled_sizes(lab.data, patch_size, SCALES)
    lattices = {size: tuple(n // p for n, p in zip(size, patch_size, strict=True)) for size in sizes}
    found = {name: _pooled(each, sizes) for name, each in by_encoding(trained).items()}
    for each, model in zip(checkpoints, models, strict=True):
        found[each.name] = _arrays([measure(model, lab.data, sizes=sizes)], sizes)
    titles = {**{name: label(name) for name in names}, **{each.name: each.title for each in checkpoints}}
    at = tuple(lab.data.input_size)
    rows = {size: _rows(found, titles, reference, size, lattices[size]) for size in sizes}
    all_rows = [row for of_size in rows.values() for row in of_size]
    note = _note(lab.data, reference)
    return Findings(
        answer=_answer(at, rows[at], len(lab.seeds)),
        tables=[Table("Attention by input size, mean over layers", _columns(reference), all_rows, note=note)],
        figures=[_figure(kind, found, lattices, at) for kind in ("distance", "entropy")],
        checks=_checks(found, lattices),
        notes=[*notes, *warned(checkpoints), *_NOTES, *([_ABOUT_CHECKPOINTS] if checkpoints else [])],
    )


def _fitting(checkpoint: Checkpoint, data: DataModule) -> ViT:
    """Return the model of a checkpoint, on the device, after checking that it fits the data.

    Raises:
        ValueError: it is not a ViT, or has another input size or number of channels.
    """
    model = checkpoint.model
    if not isinstance(model, ViT):
        raise ValueError(
            f"--checkpoint must contain a ViT for attention, got a {type(model).__name__} in {checkpoint.path}"
        )
    takes, given = (model.embed.in_channels, *model.arguments["input_size"]), (data.in_channels, *data.input_size)
    if takes != given:
        rule = f"--checkpoint must have the input shape of --data {data.name}, {_inputs(given)}"
        raise ValueError(f"{rule}, got {_inputs(takes)} in {checkpoint.path}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _inputs(shape: Sequence[int]) -> str:
    """Describe channels and sizes of inputs."""
    channels, *sizes = shape
    return f"{channels} channel{'s' if channels > 1 else ''} of {_shown(tuple(sizes))}"


def _check_patches(checkpoint: Checkpoint, model: ViT, patch_size: Sequence[int]) -> None:
    """Raise ValueError if a model has another patch size than the other models."""
    if model.embed.patch_size != tuple(patch_size):
        rule = f"models that are compared must have the same patches, {_shown(tuple(patch_size))}"
        raise ValueError(f"{rule}, got {_shown(model.embed.patch_size)} in {checkpoint.path}")


def measure(model: ViT, data: DataModule, *, sizes: Sequence[Size]) -> dict[str, Any]:
    """Measure distance and entropy of the attention among patches on validation examples, at several input sizes.

    Args:
        model: Trained model.
        data: Its data.
        sizes: Sizes of the inputs.

    Returns:
        For each size `distance`, `entropy` and `front`, the weight on class and register tokens: nested lists
        `(layers, examples)`, means over heads and patches.
    """
    device = next(model.parameters()).device
    found: dict[str, Any] = {}
    for size in sizes:
        batches = [_statistics_at(model, size, device, *batch) for batch in _examples(model, data, size)]
        found[_name(size)] = {
            key: torch.cat([batch[key] for batch in batches], dim=1).tolist()
            for key in ("distance", "entropy", "front")
        }
    return found


def _statistics_at(
    model: ViT, size: Size, device: torch.device, inputs: Tensor, *spacings: Tensor
) -> dict[str, Tensor]:
    changed = resize(inputs, size)
    extra = [resampled_spacing(spacing, inputs, changed).to(device) for spacing in spacings]
    return attention_statistics(model, changed.to(device), *extra)


@torch.no_grad()
def attention_statistics(model: ViT, inputs: Tensor, *spacing: Tensor) -> dict[str, Tensor]:
    """Compute distance and entropy of each layer's attention, and its weight on prefix tokens, `(layers, batch)` each.

    Distance and entropy are among patches: weights on class and register tokens are left out, and the others
    renormalised to sum to 1.

    Args:
        model: Model in evaluation mode.
        inputs: `(batch, channels, *sizes)`.
        spacing: Voxel spacing in mm `(batch, axes)`, if the model's positions depend on it.
    """
    between = distances(model.embed.lattice(inputs.shape[2:])).to(inputs.device)
    front = model.num_prefix
    found: dict[str, list[Tensor]] = {"distance": [], "entropy": [], "front": []}
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
    given: list[tuple[Attention, tuple[Any, ...], dict[str, Any]]] = []

    def note(module: Attention, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = {key: value for key, value in named.items() if key not in ("lengths", "key_lengths", "within")}
        given.append((module, inputs, named))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    try:
        yield lambda: (module.weights(*inputs, **named) for module, inputs, named in given)
    finally:
        for hook in hooks:
            hook.remove()


def distances(lattice: Sequence[int]) -> Tensor:
    """Compute Euclidean distances between the patches of a lattice, `(patches, patches)`, in patches."""
    positions = grid(*lattice)
    return (positions[:, None] - positions).norm(dim=-1)


def _examples(model: ViT, data: DataModule, size: Size) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of at most EXAMPLES evenly spaced validation inputs, small enough for their scores.

    A batch is the inputs, and their voxel spacings if the data contain these.
    """
    _, count = data.counts
    step = _step(count)
    tokens = model.num_prefix + math.prod(model.embed.lattice(size))
    at_once = max(1, SCORES // (tokens**2 * _heads(model)))
    seen = 0
    for inputs, _, *spacings in data.val_dataloader():
        chosen = [x[-seen % step :: step] for x in (inputs, *spacings)]
        seen += len(inputs)
        if len(chosen[0]):
            yield from zip(*(x.split(at_once) for x in chosen), strict=True)


def _step(count: int) -> int:
    return -(-count // EXAMPLES)


def _heads(model: ViT) -> int:
    return max(module.num_heads for module in model.modules() if isinstance(module, Attention))


def _name(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _shown(size: Size) -> str:
    return " × ".join(map(str, size))


def _pooled(trained: Sequence[Trained], sizes: Sequence[Size]) -> dict[Size, dict[str, np.ndarray]]:
    """Return the measures at each size, `(seeds, layers, examples)`."""
    name = "-".join(["attention", str(EXAMPLES), *(_name(size) for size in sizes)])
    return _arrays([each.measure(name, partial(_of_vit, sizes=sizes)) for each in trained], sizes)


def _arrays(results: Sequence[dict[str, Any]], sizes: Sequence[Size]) -> dict[Size, dict[str, np.ndarray]]:
    """Convert the results of `measure` for each seed to arrays."""
    return {
        size: {
            key: np.array([result[_name(size)][key] for result in results]) for key in ("distance", "entropy", "front")
        }
        for size in sizes
    }


def _of_vit(model: ViT | Swin, data: DataModule, *, sizes: Sequence[Size]) -> dict[str, Any]:
    assert isinstance(model, ViT)
    return measure(model, data, sizes=sizes)


def _mean(values: np.ndarray, factor: float = 1.0) -> BootstrapEstimate:
    """Compute the mean over layers of `(seeds, layers, examples)`."""
    return drawn_mean(factor * values.mean(axis=1))


def _uniform_distance(lattice: Sequence[int]) -> float:
    """Compute the mean distance of uniform attention."""
    return distances(lattice).mean().item()


def _columns(reference: str) -> list[Column]:
    return [
        *NAMES,
        Column("size", "Input size"),
        with_interval("distance", "Distance", "patches", 2),
        Column("furthest", "Distance, verdict"),
        with_interval("beside", f"Further than {reference}", "patches", 2),
        with_interval("relative", "Over that of uniform attention", "%", 1),
        with_interval("entropy", "Entropy", "nats", 2),
        Column("sharpest", "Least entropy, verdict"),
        with_interval("share", "Over the largest entropy", "%", 1),
        with_interval("front", "Weight on class and register tokens", "%", 1),
    ]


def _rows(
    found: Measured, titles: Mapping[str, str], reference: str, size: Size, lattice: Sequence[int]
) -> list[dict[str, Any]]:
    distance = {name: _mean(of_one[size]["distance"]) for name, of_one in found.items()}
    entropy = {name: _mean(of_one[size]["entropy"]) for name, of_one in found.items()}
    base = distance.get(reference)
    beside = {} if base is None else {name: (own - base).interval for name, own in distance.items() if own is not base}
    further = named_holm_intervals(beside)
    furthest = rank(distance)
    sharpest = rank({name: _mean(of_one[size]["entropy"], -1) for name, of_one in found.items()})
    relative, share = 100 / (_uniform_distance(lattice) or 1.0), 100 / (math.log(math.prod(lattice)) or 1.0)
    return [
        {
            "encoding": titles[name],
            "name": name,
            "size": _shown(size),
            **cells("distance", distance[name].interval()),
            "furthest": furthest[name],
            **cells("beside", further.get(name)),
            **cells("relative", _mean(of_one[size]["distance"], relative).interval()),
            **cells("entropy", entropy[name].interval()),
            "sharpest": sharpest[name],
            **cells("share", _mean(of_one[size]["entropy"], share).interval()),
            **cells("front", _mean(of_one[size]["front"], 100).interval()),
        }
        for name, of_one in found.items()
    ]


def _note(data: DataModule, reference: str) -> str:
    _, count = data.counts
    used = len(range(0, count, _step(count)))
    return (
        "Distance between a patch and the patches it attends to, weighted by attention, and entropy of attention: "
        f"means over patches, heads and layers of {f'{used} of ' if used < count else ''}{count} validation examples. "
        f"Verdicts are at 5 % over all pairs at a size, differences to {reference} over all encodings (Holm)."
    )


_NOTES = (
    "Attention among patches: weight on class and register tokens is reported separately, and these tokens are not "
    "used as queries. RoPE-ViT does not describe how it treats them.",
    "Figures 2 and 3 of the paper print no numbers except on their axes.",
    "Inputs are resampled from the training size; sizes are the paper's 128, 224 and 384 over 224, in whole patches. "
    "The number of frames is unchanged.",
)


_ABOUT_CHECKPOINTS = (
    "Checkpoints get the validation inputs with the normalisation of the data, which may differ from that of their "
    "training. These inputs may be in their training data."
)


def _answer(at: Size, rows: Sequence[dict[str, Any]], seeds: int) -> str:
    far, sharp = max(rows, key=lambda row: row["distance"]), min(rows, key=lambda row: row["entropy"])
    ties = tied_with([row["name"] for row in rows if row["furthest"] == NOT_DIFFERENT and row is not far])
    others = sum(row["sharpest"] == NOT_DIFFERENT and row is not sharp for row in rows)
    nats = f"{sharp['name']}, {_written(sharp, 'entropy')} nats" + (f" ({others} {NOT_DIFFERENT})" if others else "")
    longest = (
        f"At {_shown(at)} attention distance is largest in {far['name']}, {_written(far, 'distance')} patches{ties}"
    )
    return f"{longest}; entropy is lowest in {nats}.{one_seed(seeds)}"


def _written(row: dict[str, Any], key: str) -> str:
    return format_interval([row[key], row[f"{key}_low"], row[f"{key}_high"]], digits=2)


def _figure(kind: str, found: Measured, lattices: dict[Size, Size], at: Size) -> Figure:
    rows: list[dict[str, Any]] = []
    for size, lattice in lattices.items():
        for name, of_one in found.items():
            for layer, values in enumerate(of_one[size][kind].swapaxes(0, 1), start=1):
                ends = cells(kind, drawn_mean(values).interval())
                rows.append({"name": name, "size": _shown(size), "layer": layer, **ends})
        depth = max(of_one[size][kind].shape[1] for of_one in found.values())
        uniform = _uniform_distance(lattice) if kind == "distance" else math.log(math.prod(lattice))
        ends = cells(kind, Interval(uniform, uniform, uniform))
        rows += [{"name": UNIFORM, "size": _shown(size), "layer": layer, **ends} for layer in range(1, depth + 1)]
    unit = "patches" if kind == "distance" else "nats"
    title = "Attention distance" if kind == "distance" else "Entropy of attention"
    return Figure(
        name=f"attention-{kind}",
        kind="lines",
        title=f"{title} by layer",
        alt=f"{title} in {unit} by layer, one panel for each of {len(lattices)} input sizes, one line for each of "
        f"{len(found)} encodings and one for uniform attention.",
        x=Axis("layer", "Layer"),
        y=Axis(kind, title, unit),
        rows=rows,
        series="name",
        panel="size",
        low=f"{kind}_low",
        high=f"{kind}_high",
        caption=f"Trained at {_shown(at)}. Bands are 95 % intervals over examples.",
    )


def _checks(found: Measured, lattices: dict[Size, Size]) -> list[Check]:
    entropy = max(
        float(of_one[size]["entropy"].max()) / (math.log(math.prod(lattice)) or 1.0)
        for of_one in found.values()
        for size, lattice in lattices.items()
    )
    distance = max(
        float(of_one[size]["distance"].max()) / (distances(lattice).max().item() or 1.0)
        for of_one in found.values()
        for size, lattice in lattices.items()
    )
    return [
        Check(
            "Entropy is at most that of uniform attention, the logarithm of the number of patches",
            entropy <= 1 + SLACK,
            f"at most {entropy:.3f} of it",
        ),
        Check(
            "No mean distance is longer than the diagonal",
            distance <= 1 + SLACK,
            f"at most {distance:.3f} of it",
        ),
    ]


STUDY = Study(
    title="Attention distance and entropy",
    question="What are the distance and the entropy of attention in each layer, with each encoding?",
    sources=(f"{ROPE_VIT}, figures 2 and 3",),
    find=find,
    needs_lattice=True,
    optional_settings=("reference", "checkpoint"),
)
