"""Run all benchmarks of one machine: layer steps, single calls, training steps, memory and scaling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

import torch
from cold_timing import interleaved_cold_seconds
from measuring import peak_bytes, slope
from operation import Log, measure_operations
from parity_gate import require_parity
from peers import OURS, available_peers, make_step, make_task, ours, serving_backend
from rows import BENCH_ENCODINGS, GROWTH_ENCODINGS, MEMORY_ENCODING, TRAINING_ENCODINGS, Measurements, judge_all
from setting import Setting
from suite_results import (
    VERSION,
    EncodingTimes,
    Growth,
    Overhead,
    Peak,
    Source,
    SpeedResults,
    StepTime,
    Suite,
    Training,
)
from torch.nn import functional

from torchrope.models import ViT
from torchrope_lab.engine.provenance import provenance
from torchrope_lab.training.timing import Quartiles, interleaved_seconds, milliseconds, ratio, threads

PACKAGES = ("torch", "triton", "timm", "rotary-embedding-torch", "numpy")
_NO_ENCODING = "none"


@dataclass(frozen=True)
class Plan:
    """Sizes and rounds of all measurements.

    Attributes:
        setting: Shape, dtype and device of the layer steps; the other measurements change some of them.
        training: Settings of the training steps, as a `Training` without results.
        rounds: Rounds of the layer steps.
        call_rounds: Rounds of the single calls.
        memory_tokens: Number of tokens at which memory is measured.
        memory_batches: Batch sizes at which memory is measured.
        growth_tokens: Numbers of tokens at which time is measured.
        growth_batches: Batch sizes at which time is measured, with the tokens of the setting.
        growth_rounds: Rounds at each of these sizes.
    """

    setting: Setting
    training: Training
    rounds: int = 21
    call_rounds: int = 21
    memory_tokens: int = 785
    memory_batches: tuple[int, ...] = (1, 8)
    growth_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    growth_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    growth_rounds: int = 3


def standard_plan() -> Plan:
    """Return the sizes of the targets: ViT-S on images of 224x224, and layer steps with the tokens of 32x32 images."""
    vit_s = Training(input_size=224, patch_size=16, batch=8, dim=384, depth=12, num_heads=6, rounds=9, overheads=())
    return Plan(Setting(), vit_s)


def run_suite(plan: Plan, *, num_threads: int | None = None, command: str = "", log: Log = print) -> Suite:
    """Check parity, run all measurements, and compare them with the targets.

    Raises:
        ParityError: a fast path differs from the float64 reference; nothing is measured then.
    """
    with threads(num_threads):
        bench = measure_layer_steps(plan.setting, plan.rounds, command, log)
        measurements = Measurements(
            operations=tuple(measure_operations(plan.setting, plan.call_rounds, log)),
            bench=bench,
            memory=_memory(plan, log),
            growth=(*_growth(plan, "tokens", log), *_growth(plan, "batch", log)),
            training=measure_training(plan.training, plan.setting.device, log),
        )
    return Suite(VERSION, judge_all(measurements), **vars(measurements))


def measure_layer_steps(setting: Setting, rounds: int, command: str, log: Log) -> SpeedResults:
    """Check parity, then time a step of every encoding, its implementations interleaved in every round.

    A step builds the rotation, applies it to q and k, and computes the gradients of q, k and the parameters.
    """
    log(f"parity against float64: {', '.join(BENCH_ENCODINGS)}")
    largest = require_parity(BENCH_ENCODINGS, setting)
    compared = []
    for index, name in enumerate(BENCH_ENCODINGS, 1):
        log(f"measuring {index} of {len(BENCH_ENCODINGS)}: {name}")
        compared.append(_compare(name, setting, rounds))
    today = date.today().isoformat()
    source = Source(command=command, date=today, threads=torch.get_num_threads(), **provenance(PACKAGES))
    return SpeedResults(setting, rounds, tuple(compared), source, largest)


def measure_training(plan: Training, device: str, log: Log) -> Training:
    """Time training steps of a ViT with AdamW in float32, with encodings interleaved in every round."""
    names = (_NO_ENCODING, *TRAINING_ENCODINGS)
    log(f"training steps of {plan.dim} channels, batch {plan.batch}: {', '.join(names)}")
    steps = {name: _training_step(plan, name, device) for name in names}
    hot = interleaved_seconds(steps, rounds=plan.rounds, device=device)
    prepared = {name: lambda step=step: step for name, step in steps.items()}
    cold = interleaved_cold_seconds(prepared, rounds=plan.rounds, device=device)
    overheads = (Overhead(name, milliseconds(hot[name]), _share(hot, name), _share(cold, name)) for name in names)
    return replace(plan, overheads=tuple(overheads))


def measure_peak(encoding: str, setting: Setting, *, training: bool) -> Peak:
    """Measure the peak memory of one step, without q, k, their upstream gradients and the parameters."""
    task = make_task(encoding, setting)
    peer = ours(task)
    step = make_step(task, peer)

    def infer() -> object:
        with torch.no_grad():
            return peer.rotate(task.q, task.k)

    b, wide = task.encoding.block_size, max(4, task.positions.element_size())
    numbers = task.encoding.rotary_dim // 2 if b == 2 else task.encoding.rotary_dim * b
    return Peak(
        encoding=encoding,
        setting=setting,
        training=training,
        peak_bytes=peak_bytes(step if training else infer, setting.device),
        rotation_bytes=task.encoding.parameter_heads * setting.tokens * numbers * wide,
        output_bytes=(4 if training else 2) * task.q.nbytes,
    )


def measure_growth(encoding: str, over: str, sizes: tuple[int, ...], setting: Setting, rounds: int) -> Growth:
    """Time a step at several sizes, and fit the exponent."""
    times = []
    for size in sizes:
        # One sample: malloc requests blocks above 32 MiB from the system at every call, which would add to the time.
        at_size = replace(setting, tokens=size, batch=1) if over == "tokens" else replace(setting, batch=size)
        task = make_task(encoding, at_size)
        works = {encoding: make_step(task, ours(task))}
        times.append(milliseconds(interleaved_seconds(works, rounds=rounds, device=setting.device)[encoding]))
    return Growth(encoding, over, sizes, tuple(times), slope(sizes, [time.median for time in times]))


def _compare(name: str, setting: Setting, rounds: int) -> EncodingTimes:
    task = make_task(name, setting)
    peers, left_out = available_peers(task)
    steps = {peer.name: make_step(task, peer) for peer in peers}
    seconds = interleaved_seconds(steps, rounds=rounds, device=setting.device)
    timed = (StepTime(peer, milliseconds(times), ratio(times, seconds[OURS])) for peer, times in seconds.items())
    return EncodingTimes(name, serving_backend(task), tuple(timed), left_out)


def _memory(plan: Plan, log: Log) -> tuple[Peak, ...]:
    log(f"memory of {MEMORY_ENCODING} at {plan.memory_tokens} tokens")
    settings = [replace(plan.setting, tokens=plan.memory_tokens, batch=batch) for batch in plan.memory_batches]
    return tuple(
        measure_peak(MEMORY_ENCODING, setting, training=training) for training in (True, False) for setting in settings
    )


def _growth(plan: Plan, over: str, log: Log) -> list[Growth]:
    sizes = plan.growth_tokens if over == "tokens" else plan.growth_batches
    growths = []
    for encoding in GROWTH_ENCODINGS:
        log(f"time over {over}, {sizes[0]} to {sizes[-1]}: {encoding}")
        growths.append(measure_growth(encoding, over, sizes, plan.setting, plan.growth_rounds))
    return growths


def _share(seconds: Mapping[str, Sequence[float]], name: str) -> Quartiles:
    over = ratio(seconds[name], seconds[_NO_ENCODING])
    return Quartiles(over.low - 1, over.median - 1, over.high - 1)


def _training_step(plan: Training, encoding: str, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = ViT(
        (plan.input_size, plan.input_size),
        patch_size=plan.patch_size,
        num_outputs=100,
        dim=plan.dim,
        depth=plan.depth,
        num_heads=plan.num_heads,
        encoding=encoding,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(plan.batch, 3, plan.input_size, plan.input_size, device=device)
    labels = torch.randint(100, (plan.batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step
