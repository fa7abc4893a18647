"""Every named encoding has the numbers of `golden_encodings.json`: a change of the code must not change results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings import AbsoluteEncoding, Encoding

FILE = Path(__file__).with_name("golden_encodings.json")
GOLDEN: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
BLOCKS = ("liere:8", "comrope-ap:8", "comrope-ld:8", "string:8", "comrope-liere:8")
NAMES = (
    *("none", "axial", "mixed", "liere", *BLOCKS, "string", "golden", "dinov3", "visionllama", "comrope-rope"),
    *("mrope", "mrope-interleaved", "mhrope", "videorope", "nd", "spiral", "drope"),
    *("learned", "sinusoidal", "learned-jittered"),
)


def summary(values: Tensor) -> list[float]:
    """Return a few numbers that change if an entry changes or two are exchanged."""
    flat = values.detach().double().flatten()
    index = torch.arange(1, len(flat) + 1, dtype=torch.float64)
    return [flat.sum().item(), flat.square().sum().item(), (flat * index.sqrt()).sum().item()]


def numbers(name: str, num_axes: int) -> dict[str, Any]:
    """Return the numbers of an encoding, drawn from seed 0."""
    torch.manual_seed(0)
    choice = tr.encodings.parse_encoding(name)
    sizes = (4, 6, 5)[:num_axes]
    if choice.absolute is not None:
        absolute: AbsoluteEncoding = choice.absolute(sizes=sizes, dim=16)
        return {"training": summary(absolute.train()(*sizes)), "evaluation": summary(absolute.eval()(*sizes))}
    encoding: Encoding = choice.rotary(num_axes=num_axes, num_heads=4, head_dim=48)
    positions = tr.grid(*sizes, **encoding.lattice.spaced(*sizes))
    return {
        "generators": summary(encoding.generators()),
        "rotation": summary(encoding(positions).matrix()),
        "lattice": summary(positions),
        "state": {key: list(value.shape) for key, value in encoding.state_dict().items()},
    }


def cases() -> list[tuple[str, int]]:
    return [(name, axes) for name in NAMES for axes in (1, 2, 3) if axes == 2 or name != "spiral"]


def close(found: Any, golden: Any) -> bool:
    """Compare numbers up to rounding, which differs between machines, and all else exactly."""
    if isinstance(golden, dict):
        return found.keys() == golden.keys() and all(close(found[key], golden[key]) for key in golden)
    return found == pytest.approx(golden, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize(("name", "num_axes"), cases())
def test_encoding_has_its_golden_numbers(name: str, num_axes: int) -> None:
    found, golden = numbers(name, num_axes), GOLDEN[f"{name}, {num_axes} axes"]
    assert close(found, golden), f"{name}: {found} instead of {golden}"


if __name__ == "__main__":
    golden = {f"{name}, {axes} axes": numbers(name, axes) for name, axes in cases()}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")
