"""Costs of a model: parameters, floating-point operations, time and memory of a training step."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from torchrope.models import encoding_parameters
from torchrope_lab.training.timing import interleaved_seconds

# torch.linalg.matrix_exp evaluates a Taylor polynomial of degree 18 in five products (Bader, Blanes, Casas 2019);
# the squarings that large generators add depend on values and are not counted.
EXP_PRODUCTS = 5
ROUNDS = 15
"""Rounds in which each model is timed; the confidence interval of a median needs 6."""


@dataclass(frozen=True)
class Cost:
    """Costs of one model."""

    # Matrix products, attention and matrix exponentials count in `flops`. A batch shares its rotations.

    parameters: int
    encoding_parameters: int  # those of the position encoding
    flops: int  # of a forward pass per input; a multiply-add is two; without element-wise operations
    step_seconds: float  # median of `seconds`
    peak_memory_bytes: int  # of a step's tensors, without the optimiser's moments
    seconds: tuple[float, ...] = ()  # of a step in each round; models measured together have the same rounds


def measure_costs(
    builders: Mapping[str, Callable[[], nn.Module]],
    batch: tuple[Tensor, Tensor],
    *,
    rounds: int = ROUNDS,
    precision: str = "float32",
) -> dict[str, Cost]:
    """Measure models in one process, interleaved in short rounds, so that other load slows all of them equally."""
    inputs, labels = batch
    models = {name: build().to(inputs.device) for name, build in builders.items()}
    steps = {name: training_step(model, inputs, labels, precision) for name, model in models.items()}
    seconds = interleaved_seconds(steps, rounds=rounds, device=inputs.device.type)
    return {
        name: Cost(
            parameters=sum(p.numel() for p in model.parameters()),
            encoding_parameters=count_encoding_parameters(model),
            flops=count_flops(builders[name], inputs.shape) // len(inputs),
            step_seconds=statistics.median(seconds[name]),
            peak_memory_bytes=measure_peak_memory(model, steps[name], inputs.device),
            seconds=tuple(seconds[name]),
        )
        for name, model in models.items()
    }


def count_encoding_parameters(model: nn.Module) -> int:
    """Count the learned parameters of all position encodings; shared ones count once."""
    names = encoding_parameters(model)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if name in names)


def count_flops(build: Callable[[], nn.Module], input_shape: torch.Size) -> int:
    """Count the floating-point operations of one forward pass, on the meta device."""
    formulas = {torch.ops.aten.linalg_matrix_exp: _matrix_exp_flops}
    with torch.device("meta"):
        model = build().to("meta").eval().requires_grad_(False)
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            model(torch.empty(input_shape))
    return counter.get_total_flops()


def _matrix_exp_flops(shape: torch.Size, *_: object, out_shape: object = None, **__: object) -> int:
    return EXP_PRODUCTS * 2 * shape.numel() * shape[-1]


def training_step(model: nn.Module, inputs: Tensor, labels: Tensor, precision: str = "float32") -> Callable[[], None]:
    """Return a function that makes one training step of a classifier, in a precision of `run.precision`."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def measure_peak_memory(model: nn.Module, step: Callable[[], None], device: torch.device) -> int:
    """Measure the peak memory of tensors in a step of a model, in bytes."""
    if device.type == "cuda":
        model.zero_grad()
        other_bytes = torch.cuda.memory_allocated(device) - sum(p.nbytes for p in model.parameters())
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - other_bytes
    # torch records no peak for the CPU; its memory tracker records every tensor that a step allocates.
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    return max(int(kinds["Total"]) for kinds in tracker.get_tracker_snapshot("peak").values())
