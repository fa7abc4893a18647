"""Measure what `extend` does for a model of timm on inputs twice as large as those it was trained on; render the docs.

    python benchmarks/extend.py --threads 2

A small ViT of timm with axial RoPE and no position table learns the radicals of characters at 32 pixels per side, and
is evaluated at 64, where the same characters are drawn again from their strokes: as it is, and copied by each method of
`extend`, without further training. Several seeds, the same held-out characters. Then docs/use-it-in-your-model.md gets
the table. It needs kanjivg, the laboratory and the extra `integrations`.
"""

import argparse
import json
import runpy
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import timm
import torch
from markers import insert_between_markers
from suite_results import VERSION, Source
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import torchrope as tr
from torchrope.files import write_whole
from torchrope_lab.conclusion import Interval
from torchrope_lab.engine.provenance import provenance
from torchrope_lab.statistics import accuracy_interval, differences

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "extend.json"
PAGE = ROOT / "docs" / "use-it-in-your-model.md"
METHODS = ("interpolate", "ntk", "yarn")
TRAINED, AS_IT_IS = "trained size", "as it is"
ARCHITECTURE = "vit_small_patch16_rope_224"


def measure(plan: Namespace, command: str) -> dict[str, Any]:
    """Train each seed and evaluate it at every size, print each result, and return all with their source."""
    torch.set_num_threads(plan.threads)
    radicals = runpy.run_path(str(ROOT / "examples/sources.py"))["radicals"]
    data = radicals(plan.size)
    train, small, large = data["train"], data["val"], radicals(plan.factor * plan.size)["val"]
    begun = time.perf_counter()
    right: dict[str, list[Tensor]] = {}
    for seed in range(plan.seeds):
        model = trained(plan, train, len(data["classes"]), seed)
        for method, correct in evaluated(model, plan, small, large).items():
            right.setdefault(method, []).append(correct)
            print(f"seed {seed}  {method:<14}{correct.float().mean():.1%}", flush=True)
    seconds = time.perf_counter() - begun
    source = Source(
        command=command, date=date.today().isoformat(), threads=plan.threads, **provenance(("torch", "timm", "kanjivg"))
    )
    counts = {"examples": len(small), "classes": len(data["classes"]), "seconds": round(seconds)}
    return {"schema": VERSION, "plan": vars(plan), **counts, "rows": rows(right), "source": asdict(source)}


def trained(plan: Namespace, data: TensorDataset, classes: int, seed: int) -> nn.Module:
    """Train a model with AdamW and a one-cycle learning rate."""
    torch.manual_seed(seed)
    model: nn.Module = timm.create_model(
        ARCHITECTURE,
        img_size=plan.size,
        patch_size=4,
        in_chans=1,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2.0,
        num_classes=classes,
        global_pool="avg",
        dynamic_img_size=True,
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.05)
    steps = plan.epochs * -(-len(data) // plan.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, plan.lr, total_steps=steps, pct_start=1 / 6)
    for _ in range(plan.epochs):
        for chosen in torch.randperm(len(data)).split(plan.batch_size):
            inputs, labels = data[chosen]
            loss = functional.cross_entropy(model(inputs), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def evaluated(model: nn.Module, plan: Namespace, small: TensorDataset, large: TensorDataset) -> dict[str, Tensor]:
    """Evaluate every method; return correct answers `(examples,)` by method."""
    ways = {TRAINED: correct(model, small), AS_IT_IS: correct(model, large)}
    return ways | {method: correct(tr.extend(model, plan.factor, method=method), large) for method in METHODS}


@torch.no_grad()
def correct(model: nn.Module, data: TensorDataset) -> Tensor:
    parts = [data[chosen] for chosen in torch.arange(len(data)).split(128)]
    return torch.cat([model(inputs).argmax(dim=-1) == labels for inputs, labels in parts])


def rows(right: dict[str, list[Tensor]]) -> list[dict[str, Any]]:
    """Return accuracies with 95 % intervals over characters and seeds, and gains of methods over `AS_IT_IS`, paired."""
    by_name = {name: torch.stack(seeds).int().numpy() for name, seeds in right.items()}
    gains = dict(zip(METHODS, differences(by_name, [(method, AS_IT_IS) for method in METHODS]), strict=True))
    return [
        {"method": name, "accuracy": accuracy_interval(values), "gain": gains.get(name)}
        for name, values in by_name.items()
    ]


def render(results: dict[str, Any], page: Path) -> None:
    """Put the table between the markers of the page."""
    plan, source = Namespace(**results["plan"]), results["source"]
    head = [
        f"| | accuracy, {results['classes']} radicals | gain over `{AS_IT_IS}` |",
        "|---|---:|---:|",
    ]
    body = [
        f"| {_shown(row['method'], plan)} | {_share(row['accuracy'])} | {_points(row['gain'])} |"
        for row in results["rows"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    note = (
        f"timm's `{ARCHITECTURE}`, 64 wide, 4 layers, patches of 4; {plan.seeds} seeds, {plan.epochs} epochs at "
        f"{plan.size}×{plan.size} pixels; {results['examples']} held-out characters. 95 % intervals over characters "
        f"and seeds, those of the gains together. {versions}, {source['date']}, by `{source['command']}`."
    )
    text = insert_between_markers(page.read_text(encoding="utf-8"), "extend", "\n".join([*head, *body]) + "\n\n" + note)
    write_whole(page, text)


def _shown(method: str, plan: Namespace) -> str:
    if method == TRAINED:
        return f"{plan.size} pixels, the {TRAINED}"
    name = method if method == AS_IT_IS else f"`{method}`"
    return f"{plan.factor * plan.size} pixels, {name}"


def _share(interval: Interval) -> str:
    estimate, low, high = (100 * value for value in interval)
    return f"{estimate:.1f} % [{low:.1f}, {high:.1f}]"


def _points(interval: Interval | None) -> str:
    if interval is None:
        return ""
    estimate, low, high = (100 * value for value in interval)
    return f"{estimate:+.1f} [{low:+.1f}, {high:+.1f}]"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32, help="pixels per side in training")
    parser.add_argument("--factor", type=int, default=2, help="evaluation size over training size")
    parser.add_argument("--seeds", type=int, default=3, help="training runs")
    parser.add_argument("--epochs", type=int, default=8, help="epochs per run")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="maximum learning rate")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to render")
    options = vars(parser.parse_args(arguments))
    out, page = options.pop("out"), options.pop("page")
    given = sys.argv[1:] if arguments is None else arguments
    results = measure(Namespace(**options), shlex.join(["python", "benchmarks/extend.py", *given]))
    write_whole(out, json.dumps(results, indent=1, allow_nan=False) + "\n")
    render(results, page)
    print(f"{out} and {page}, {results['seconds']} s")


if __name__ == "__main__":
    main()
