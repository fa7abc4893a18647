"""`detect_family`: find the family of diffusers that reproduces a transformer without a row in the registry."""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchrope.integrations.families import diffusers
from torchrope.integrations.family import ModelFamily, adapters, register_family, unregister_family
from torchrope.integrations.swap import swap
from torchrope.tensors import wide_dtype

_SAME = 1e-5
CHANGED = 1e-3
"""Smallest relative change of outputs without rotation for which a sample can tell rotations."""
_UNTOLD = "its outputs are the same without rotation"


def detect_family(model: nn.Module, inputs: Mapping[str, Any]) -> ModelFamily:
    """Find how `swap` can continue the rotation of a transformer of diffusers that has no family, and register it.

    Each family of diffusers is tried on a copy of the model. The first is accepted that reproduces the outputs on a
    sample to 1e-5 of the largest, if they change by more than 1e-3 without rotation. What the sample does not contain
    is not checked: it needs several frames, rows, columns and tokens of text, and the optional inputs used later. A
    small random model of the class is enough, with fewer heads and layers but the other settings of the large one.

    Args:
        model: The transformer, in eval mode and float32; it is not changed.
        inputs: Keyword arguments of its forward. Its output is the first tensor that forward returns.

    Returns:
        The family, now registered for the class of the model in this process; that of the model if it has one.

    Raises:
        ValueError: no family reproduces the outputs, or the sample cannot tell; a model in training mode or in half
            precision. Then nothing is registered.
    """
    known = adapters(model)
    if known:
        return known[0].family
    name = type(model).__name__
    if model.training:
        raise ValueError(f"detect_family needs a model in eval mode, got a {name} in training mode")
    expected = _output(copied(model), inputs)
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
        more = "pass more tokens, to a model with nonzero attention outputs"
        raise ValueError(f"detect_family cannot tell from this sample: {_UNTOLD}; {more}, got a {name}")
    tried = "; ".join(f"{', '.join(rows)}: {misfit}" for misfit, rows in misfits.items())
    by_hand = "write a ModelFamily for register_family, or call torchrope.rotate in an attention processor"
    raise ValueError(f"detect_family found no family that reproduces {name}: {by_hand}; tried {tried}")


def _misfit(family: ModelFamily, model: nn.Module, inputs: Mapping[str, Any], expected: Tensor) -> str | None:
    """Return why a family does not describe a model, None if it does."""
    if not family.attention_layers(model):
        return "other parts"
    error = relative_difference(_swapped_output(family, model, inputs, "model"), expected)
    if not error <= _SAME:
        return f"outputs differ by {error:.1e}"
    change = relative_difference(_swapped_output(family, model, inputs, "zeros"), expected)
    return None if change > CHANGED else _UNTOLD


def _swapped_output(
    family: ModelFamily, model: nn.Module, inputs: Mapping[str, Any], init: Literal["model", "zeros"]
) -> Tensor:
    swapped = copied(model)
    register_family(family)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # without rotation outputs change
            swap(swapped, "mixed", init=init)
    finally:
        unregister_family(family)
    return _output(swapped, inputs)


def copied(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters share the memory of the model's, so that a large model fits twice."""
    # Those of other classes, such as quantised ones, are the model's own: a copy would be of another class.
    own = {id(one): copy.copy(one) if type(one) is nn.Parameter else one for one in model.parameters()}
    return copy.deepcopy(model, own)


class _Detached(TorchFunctionMode):
    """Copies tensors without their graph, which deepcopy refuses."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__deepcopy__:
            return args[0].detach().clone()
        return function(*args, **(kwargs or {}))


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with copies of one tensor, of arguments, or of keyword arguments: it may extend a cache of keys."""
    with _Detached():
        given: Any = copy.deepcopy(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    if isinstance(given, dict):
        return model(**given)
    return model(*((given,) if isinstance(given, Tensor) else given))


def _output(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    with torch.no_grad():
        returned = call(model, inputs)
    output = next(tensors_in(returned), None)
    if output is None:
        raise ValueError(f"detect_family needs a model that returns a tensor, got {type(returned).__name__}")
    return output


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested mappings and sequences."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(part)


def relative_difference(output: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, relative to the largest value; infinity for other shapes and NaN in one alone."""
    if output is None or expected is None or output.shape != expected.shape:
        return 0.0 if output is expected else math.inf
    both = output.isnan() & expected.isnan()
    output, expected = (x.detach().to(wide_dtype(x)).masked_fill(both, 0) for x in (output, expected))
    error = (output - expected).abs().amax() if output.numel() else 0.0
    relative = float(error / expected.abs().max()) if error != 0 else 0.0
    return math.inf if math.isnan(relative) else relative
