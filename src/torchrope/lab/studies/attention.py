"""Where attention goes: mean distance and entropy by layer, at several input sizes (RoPE-ViT figures 2 and 3)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.attention import Attention
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.transforms import resize
from torchrope.lab.results import Axis, Check, Column, Figure, Findings, Table
from torchrope.lab.studies.describe import label
from torchrope.lab.studies.engine.estimates import by_encoding, caveat, mean_interval, told
from torchrope.lab.studies.engine.feasible import feasible
from torchrope.lab.studies.engine.published import ROPE_VIT
from torchrope.lab.studies.engine.runs import Trained
from torchrope.lab.studies.engine.study import Lab, Study
from torchrope.lab.training.evaluate import scaled_sizes
from torchrope.models import Swin, ViT
from torchrope.positions import grid

Size = tuple[int, ...]
Ends = tuple[float, float, float]  # mean, low, high

SCALES = (128 / 224, 384 / 224)
EXAMPLES = 512
SCORES = 2**25  # held at a time
UNIFORM = "uniform attention"
SLACK = 1e-3

COLUMNS = (
    Column("encoding", "Encoding"),
    Column("name", "Name"),
    Column("size", "Input size"),
    Column("distance", "Distance", "patches", 2, low="distance_low", high="distance_high"),
    Column("relative", "Over that of uniform attention", "%", 1, low="relative_low", high="relative_high"),
    Column("entropy", "Entropy", "nats", 2, low="entropy_low", high="entropy_high"),
    Column("share", "Over the largest entropy", "%", 1, low="share_low", high="share_high"),
    Column("front", "Weight on class and register tokens", "%", 1, low="front_low", high="front_high"),
)


def find(lab: Lab) -> Findings:
    """Measure the attention of the runs of the accuracy study."""
    if lab.config.model.backbone == "swin":
        return Findings("Not measured: a Swin attends within windows, whose size bounds distance and entropy.")
    runs, notes = feasible(lab, lab.runs(lab.encodings))
    if not runs:
        return Findings("No encoding named can be trained here.", notes=notes)
    trained = lab.train(runs)
    patch_size = lab.blueprint(runs[0]).embed.patch_size
    sizes = scaled_sizes(lab.data, patch_size, SCALES)
    lattices = {size: tuple(n // p for n, p in zip(size, patch_size, strict=True)) for size in sizes}
    found = {name: _pooled(each, sizes) for name, each in by_encoding(trained).items()}
    at = tuple(lab.data.input_size)
    rows = [_row(name, size, of_one[size], lattices[size]) for size in sizes for name, of_one in found.items()]
    return Findings(
        answer=_answer(found, at, lattices[at], len(lab.seeds)),
        tables=[Table("Attention by input size, mean over layers", COLUMNS, rows, note=_note(lab.data))],
        figures=[_figure(kind, found, lattices, at) for kind in ("distance", "entropy")],
        checks=_checks(found, lattices),
        notes=[*notes, *_NOTES],
    )


def measure(model: ViT, data: DataModule, *, sizes: Sequence[Size]) -> dict[str, Any]:
    """Distance and entropy of the attention among patches of some validation examples, at several input sizes.

    Args:
        model: Trained.
        data: Its data.
        sizes: Of the inputs.

    Returns:
        For each size `distance`, `entropy` and `front`, the weight on tokens without a place, lists of a list a layer
        of a number an example, means over heads and patches.
    """
    device = next(model.parameters()).device
    found: dict[str, Any] = {}
    for size in sizes:
        batches = [described(model, resize(inputs, size).to(device)) for inputs in _examples(model, data, size)]
        found[_told(size)] = {
            key: torch.cat([batch[key] for batch in batches], dim=1).tolist()
            for key in ("distance", "entropy", "front")
        }
    return found


@torch.no_grad()
def described(model: ViT, inputs: Tensor) -> dict[str, Tensor]:
    """Distance, entropy and weight on prefix tokens of what each layer attends to, `(layers, batch)` each.

    Among patches alone: weights on class and register tokens are left out, and the others made to add up to 1.

    Args:
        model: In evaluation mode.
        inputs: `(batch, channels, *sizes)`.
    """
    between = distances(model.embed.lattice(inputs.shape[2:])).to(inputs.device)
    front = model.num_prefix
    found: dict[str, list[Tensor]] = {"distance": [], "entropy": [], "front": []}
    with attended(model) as layers:
        model(inputs)
        for weights in layers():
            among = weights[:, :, front:, front:]
            inside = among.sum(dim=-1, keepdim=True)
            among = among / inside.clamp_min(torch.finfo(among.dtype).tiny)
            found["distance"].append((among * between).sum(dim=-1).mean(dim=(1, 2)).cpu())
            found["entropy"].append(torch.special.entr(among).sum(dim=-1).mean(dim=(1, 2)).cpu())
            found["front"].append((1 - inside).mean(dim=(1, 2, 3)).cpu())
    return {key: torch.stack(values) for key, values in found.items()}


@contextmanager
def attended(model: ViT) -> Iterator[Any]:
    """Note what every attention is given; what is yielded computes their weights, layer by layer, after a forward."""
    given: list[tuple[Attention, tuple[Any, ...], dict[str, Any]]] = []

    def note(module: Attention, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = {key: value for key, value in named.items() if key not in ("lengths", "within")}
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
    """Euclidean distances between the patches of a lattice, `(patches, patches)`, in patches."""
    places = grid(*lattice)
    return (places[:, None] - places).norm(dim=-1)


def _examples(model: ViT, data: DataModule, size: Size) -> Iterator[Tensor]:
    """Batches of validation inputs, EXAMPLES at most and evenly chosen, small enough for their scores."""
    _, count = data.counts
    step = _step(count)
    tokens = model.num_prefix + math.prod(model.embed.lattice(size))
    at_once = max(1, SCORES // (tokens**2 * _heads(model)))
    seen = 0
    for inputs, _ in data.val_dataloader():
        chosen = inputs[-seen % step :: step]
        seen += len(inputs)
        yield from chosen.split(at_once) if len(chosen) else ()


def _step(count: int) -> int:
    return -(-count // EXAMPLES)


def _heads(model: ViT) -> int:
    return max(module.num_heads for module in model.modules() if isinstance(module, Attention))


def _told(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _shown(size: Size) -> str:
    return " × ".join(map(str, size))


def _pooled(trained: Sequence[Trained], sizes: Sequence[Size]) -> dict[Size, dict[str, np.ndarray]]:
    """Measures at each size, `(layers, examples)`, means over seeds."""
    name = "-".join(["attention", str(EXAMPLES), *(_told(size) for size in sizes)])
    results = [each.measure(name, partial(_of_vit, sizes=sizes)) for each in trained]
    return {
        size: {
            key: np.mean([result[_told(size)][key] for result in results], axis=0)
            for key in ("distance", "entropy", "front")
        }
        for size in sizes
    }


def _of_vit(model: ViT | Swin, data: DataModule, *, sizes: Sequence[Size]) -> dict[str, Any]:
    assert isinstance(model, ViT)
    return measure(model, data, sizes=sizes)


def _ends(values: np.ndarray, factor: float = 1.0) -> Ends:
    """Mean with its 95 % interval over examples."""
    _, low, high = mean_interval(np.asarray(factor * values)[None])
    return float(factor * values.mean()), low, high


def _cells(key: str, ends: Ends) -> dict[str, float]:
    return dict(zip((key, f"{key}_low", f"{key}_high"), ends, strict=True))


def _farthest(lattice: Sequence[int]) -> float:
    """The mean distance of attention that is uniform."""
    return distances(lattice).mean().item()


def _row(name: str, size: Size, found: dict[str, np.ndarray], lattice: Sequence[int]) -> dict[str, Any]:
    distance, entropy, front = (found[key].mean(axis=0) for key in ("distance", "entropy", "front"))
    largest = math.log(math.prod(lattice)) or 1.0
    return {
        "encoding": label(name),
        "name": name,
        "size": _shown(size),
        **_cells("distance", _ends(distance)),
        **_cells("relative", _ends(distance, 100 / (_farthest(lattice) or 1.0))),
        **_cells("entropy", _ends(entropy)),
        **_cells("share", _ends(entropy, 100 / largest)),
        **_cells("front", _ends(front, 100)),
    }


def _note(data: DataModule) -> str:
    _, count = data.counts
    used = len(range(0, count, _step(count)))
    return (
        "Distance between a patch and those it attends to, weighted by attention, and entropy of that attention: means "
        f"over patches, heads and layers of {f'{used} of ' if used < count else ''}{count} validation examples, with "
        "95 % intervals over the examples."
    )


_NOTES = (
    "Attention among patches: weight on class and register tokens is told apart and left out, and these tokens are no "
    "queries. RoPE-ViT does not say what it did with them.",
    "Figures 2 and 3 of the paper print no numbers beside their axes.",
    "Inputs are resampled from the size trained on; sizes are the paper's 128, 224 and 384 over 224, in whole patches. "
    "The number of frames stays.",
)


def _answer(found: dict[str, dict[Size, dict[str, np.ndarray]]], at: Size, lattice: Sequence[int], seeds: int) -> str:
    here = {name: of_one[at] for name, of_one in found.items()}
    mean = {name: values["distance"].mean(axis=0) for name, values in here.items()}
    ordered = sorted(mean, key=lambda name: -mean[name].mean())
    far, near = ordered[0], ordered[-1]
    sentences = [
        f"At {_shown(at)}, as trained, attention of {far} reaches furthest, {_between(_ends(mean[far]))} patches on "
        f"average over layers, where uniform attention would reach {_farthest(lattice):.2f}."
    ]
    if near != far:
        apart = _ends(mean[far] - mean[near])
        sentences.append(
            f"It reaches least in {near}, {_between(_ends(mean[near]))}, {_between(apart)} less on the same examples."
        )
    base = "learned"
    if base in mean and len(mean) > 1:
        sentences.append(_beside(mean, base))
    sharpest = min(here, key=lambda name: here[name]["entropy"].mean())
    entropy = _between(_ends(here[sharpest]["entropy"].mean(axis=0)))
    sentences.append(f"Attention is sharpest in {sharpest}, with an entropy of {entropy} nats.")
    return " ".join(sentences) + caveat(seeds)


def _beside(mean: dict[str, np.ndarray], base: str) -> str:
    """The paper's comparison: who reaches further than a learned absolute encoding, and who less far."""
    ends = {name: _ends(values - mean[base]) for name, values in mean.items() if name != base}
    further = [name for name, (_, low, _) in ends.items() if low > 0]
    nearer = [name for name, (_, _, high) in ends.items() if high < 0]
    same = [name for name in ends if name not in further and name not in nearer]
    said = [f"{_verb(names, 'reach')} {how}" for names, how in ((further, "further"), (nearer, "less far")) if names]
    said += [f"{told(same)} cannot be told apart"] if same else []
    return f"Beside a learned absolute encoding, {', '.join(said)}."


def _verb(names: Sequence[str], verb: str) -> str:
    return f"{told(names)} {verb}{'' if len(names) > 1 else 'es'}"


def _between(ends: Ends) -> str:
    return f"{ends[0]:.2f} [{ends[1]:.2f}, {ends[2]:.2f}]"


def _figure(
    kind: str, found: dict[str, dict[Size, dict[str, np.ndarray]]], lattices: dict[Size, Size], at: Size
) -> Figure:
    rows: list[dict[str, Any]] = []
    for size, lattice in lattices.items():
        for name, of_one in found.items():
            for layer, values in enumerate(of_one[size][kind], start=1):
                rows.append({"name": name, "size": _shown(size), "layer": layer, **_cells(kind, _ends(values))})
        depth = len(next(iter(found.values()))[size][kind])
        uniform = _farthest(lattice) if kind == "distance" else math.log(math.prod(lattice))
        ends = _cells(kind, (uniform, uniform, uniform))
        rows += [{"name": UNIFORM, "size": _shown(size), "layer": layer, **ends} for layer in range(1, depth + 1)]
    trained = {name: of_one[at][kind].mean(axis=1) for name, of_one in found.items()}
    name = max(trained, key=lambda name: trained[name].max())
    unit = "patches" if kind == "distance" else "nats"
    title = "Attention distance" if kind == "distance" else "Entropy of attention"
    return Figure(
        name=f"attention-{kind}",
        kind="lines",
        title=f"{title} by layer",
        alt=f"{title} in {unit} by layer, one panel for each of {len(lattices)} input sizes, one line for each of "
        f"{len(found)} encodings and one for uniform attention; at the size trained on it is largest in {name}, "
        f"{trained[name].max():.2f} in layer {int(trained[name].argmax()) + 1}.",
        x=Axis("layer", "Layer"),
        y=Axis(kind, title, unit),
        rows=rows,
        series="name",
        panel="size",
        low=f"{kind}_low",
        high=f"{kind}_high",
        caption=f"Trained at {_shown(at)}. Bands are 95 % intervals over examples.",
    )


def _checks(found: dict[str, dict[Size, dict[str, np.ndarray]]], lattices: dict[Size, Size]) -> list[Check]:
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
    question="How far and how sharply do models with each encoding attend, layer by layer?",
    sources=(f"{ROPE_VIT}, figures 2 and 3",),
    find=find,
)
