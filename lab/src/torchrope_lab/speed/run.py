"""Run `torchrope speed`: check parity, then time every encoding in torchrope and in other implementations."""

from collections.abc import Callable, Sequence
from datetime import date

import torch

from torchrope_lab.provenance import provenance
from torchrope_lab.speed.config import ENCODINGS, Setting
from torchrope_lab.speed.parity import require_parity
from torchrope_lab.speed.peers import OURS, available_peers, make_encoding, make_step, make_task, serving_backend
from torchrope_lab.speed.results import EncodingTimes, Source, SpeedResults, StepTime
from torchrope_lab.timing import interleaved_seconds, milliseconds, ratio, threads

PACKAGES = ("torch", "triton", "timm", "rotary-embedding-torch", "numpy")

Log = Callable[[str], None]


def measure_speed(
    setting: Setting,
    *,
    encodings: Sequence[str] | None = None,
    rounds: int = 21,
    num_threads: int | None = None,
    command: str = "",
    log: Log = print,
) -> SpeedResults:
    """Check parity, then time a step of every encoding, its implementations interleaved in every round.

    A step builds the rotation from its parameters, applies it to q and k, and computes the gradients of q, k and the
    parameters.

    Args:
        setting: Shape, dtype, device.
        encodings: Names; by default those of `ENCODINGS` that fit the shape.
        rounds: Number of rounds; results are medians and quartiles over them.
        num_threads: Number of threads; None does not change it.
        command: The command line, stored in the results.
        log: Called with lines of progress.

    Raises:
        ParityError: a fast path differs from the float64 reference; nothing is measured then.
        ValueError: rounds or threads below 1, no CUDA device, an encoding named twice or one that does not fit.
    """
    _check(setting, encodings, rounds, num_threads)
    names, not_fitting = _fitting(setting) if encodings is None else (list(encodings), {})
    for name in names:
        make_encoding(name, setting)
    with threads(num_threads):
        log(f"parity against float64: {', '.join(names)}")
        largest = require_parity(names, setting)
        compared = []
        for index, name in enumerate(names, 1):
            log(f"measuring {index} of {len(names)}: {name}")
            compared.append(_compare(name, setting, rounds))
        today = date.today().isoformat()
        source = Source(command=command, date=today, threads=torch.get_num_threads(), **provenance(PACKAGES))
    return SpeedResults(setting, rounds, tuple(compared), not_fitting, source, largest)


def _check(setting: Setting, encodings: Sequence[str] | None, rounds: int, num_threads: int | None) -> None:
    for name, value in (("rounds", rounds), ("threads", num_threads)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    if setting.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda requires a GPU that PyTorch can use: torch.cuda.is_available() is False; use --device cpu"
        )
    if encodings is not None and (not encodings or len(set(encodings)) != len(encodings)):
        raise ValueError(f"encodings must be named once each, got {','.join(encodings) or 'none'}")


def _fitting(setting: Setting) -> tuple[list[str], dict[str, str]]:
    names, not_fitting = [], {}
    for name in ENCODINGS:
        try:
            make_encoding(name, setting)
        except ValueError as error:
            not_fitting[name] = str(error)
        else:
            names.append(name)
    if not names:
        raise ValueError(f"the shape must fit an encoding, got {next(iter(not_fitting.values()))}")
    return names, not_fitting


def _compare(name: str, setting: Setting, rounds: int) -> EncodingTimes:
    task = make_task(name, setting)
    peers, left_out = available_peers(task)
    steps = {peer.name: make_step(task, peer) for peer in peers}
    seconds = interleaved_seconds(steps, rounds=rounds, device=setting.device)
    timed = (StepTime(peer, milliseconds(times), ratio(times, seconds[OURS])) for peer, times in seconds.items())
    return EncodingTimes(name, serving_backend(task), tuple(timed), left_out)
