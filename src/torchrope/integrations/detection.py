"""`detect_family` finds by trial which family of diffusers describes a transformer that `swap` does not know."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchrope.integrations.families import diffusers
from torchrope.integrations.family import ModelFamily, adapters, register_family, unregister_family
from torchrope.integrations.swap import swap

_SAME, _CHANGED = 1e-5, 1e-3
_UNTOLD = "its outputs are the same without rotation"


def detect_family(model: nn.Module, inputs: Mapping[str, Any]) -> ModelFamily:
    """Find how `swap` can continue the rotation of a transformer of diffusers that has no family, and register it.

    Each family of diffusers is tried on copies of the model, which share its parameters. The first is accepted that
    reproduces the outputs on a sample to 1e-5 of the largest, if they change by more than 1e-3 without rotation. What
    the sample does not contain is not checked: let it have several frames, rows, columns and tokens of text, and the
    optional inputs that are used later.

    Args:
        model: The transformer, in eval mode and float32; it is not changed.
        inputs: Keyword arguments of its forward. Its output is the first tensor that forward returns.

    Returns:
        The family, now registered for the class of the model in this process; that of the model if it has one.

    Raises:
        ValueError: no family reproduces the outputs, or the sample cannot tell; nothing is registered. Also a model in
            training mode.

    Example:
        >>> from diffusers import WanVACETransformer3DModel
        >>> model = WanVACETransformer3DModel(
        ...     num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
        ...     ffn_dim=32, num_layers=2, vace_layers=[0, 1], vace_in_channels=4).eval()
        >>> video, text = torch.randn(1, 4, 3, 6, 8), torch.randn(1, 3, 8)
        >>> inputs = dict(hidden_states=video, control_hidden_states=video, timestep=torch.tensor([0.5]))
        >>> family = detect_family(model, {**inputs, "encoder_hidden_states": text})
        >>> model = swap(model, "mixed")  # and others of the class
    """
    known = adapters(model)
    if known:
        return known[0].family
    name = type(model).__name__
    if model.training:
        raise ValueError(f"detect_family needs a model in eval mode, got a {name} in training mode")
    expected = _output(model, inputs)
    if expected.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"detect_family needs a model in float32 to compare outputs, got a {name} in {expected.dtype}")
    misfits: dict[str, list[str]] = {}
    for row in diffusers.FAMILIES:
        family = replace(row, model=f"{type(model).__module__}.{type(model).__qualname__}")
        try:
            misfit = _misfit(family, model, inputs, expected)
        except AttributeError:
            misfit = "other parts"
        except (TypeError, ValueError, RuntimeError, LookupError) as error:
            misfit = f"{type(error).__name__} ({str(error).partition(chr(10))[0][:60]})"
        if misfit is None:
            register_family(family)
            return family
        misfits.setdefault(misfit, []).append(row.model.rpartition(".")[2])
    if _UNTOLD in misfits:
        more = "pass more tokens, to a model whose attention matters"
        raise ValueError(f"detect_family cannot tell from this sample: {_UNTOLD}; {more}, got a {name}")
    tried = "; ".join(f"{', '.join(rows)}: {misfit}" for misfit, rows in misfits.items())
    by_hand = "write a ModelFamily for register_family, or call torchrope.rotate in an attention processor"
    raise ValueError(f"detect_family found no family that reproduces {name}: {by_hand}; tried {tried}")


def _misfit(family: ModelFamily, model: nn.Module, inputs: Mapping[str, Any], expected: Tensor) -> str | None:
    """Return why a family does not describe a model, None if it does."""
    if not family.attention_layers(model):
        return "other parts"
    error = _difference(_swapped_output(family, model, inputs, "model"), expected)
    if not error <= _SAME:
        return f"outputs differ by {error:.1e}"
    change = _difference(_swapped_output(family, model, inputs, "zeros"), expected)
    return None if change > _CHANGED else _UNTOLD


def _swapped_output(
    family: ModelFamily, model: nn.Module, inputs: Mapping[str, Any], init: Literal["model", "zeros"]
) -> Tensor:
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    with _registered(family), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # without rotation outputs change
        swap(copied, "mixed", init=init)
    return _output(copied, inputs)


@contextmanager
def _registered(family: ModelFamily) -> Iterator[None]:
    register_family(family)
    try:
        yield
    finally:
        unregister_family(family)


def _output(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the first tensor of what a model returns."""
    with torch.no_grad():
        output = model(**inputs)
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def _difference(came: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest output."""
    if came.shape != expected.shape:
        return float("inf")
    error = (came - expected).abs().max()
    return float(error / expected.abs().max()) if error != 0 else 0.0
