"""`prove`: run one attention layer of each kind after `swap` and compare it with what its own code computes."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.integrations.family import Adapter, AttentionShape
from torchrope.integrations.layer import NotReached, inputs_of, kind_of_layer
from torchrope.integrations.rotary import Rotary
from torchrope.rotations import Planar


@torch.no_grad()
def prove(adapter: Adapter, rotary: Rotary) -> None:
    """Raise ValueError unless the layers of a swapped model rotate q and k, and nothing else.

    A layer of each kind runs on a few random tokens: by its own code without rotation, and with the same random
    rotation R of all tokens, which leaves scores  (R q)^T R k = q^T k  and therefore outputs unchanged. On the meta
    device, which has no values, shapes alone are checked; layers that cannot run alone are not.
    """
    proven: set[Any] = set()
    for layer, shape in zip(adapter.layers, adapter.shapes(), strict=True):
        kind = (kind_of_layer(layer), shape)
        if kind not in proven:
            proven.add(kind)
            modes = {part: part.training for part in layer.modules()}
            layer.eval()
            try:
                reason = _failure(layer, shape, rotary.encodings[0], adapter.tower._rotary_state.running)
            finally:
                for part, training in modes.items():
                    part.training = training
            if reason is not None:
                rule = "swap rotates q and k alike, and nothing else, in a layer of each kind that it runs once"
                name, tower = type(layer).__name__, type(adapter.tower).__name__
                raise ValueError(f"{rule}; {reason}, got a {name} of a {tower}")


def _failure(layer: Any, shape: AttentionShape, encoding: Any, running: Any) -> str | None:
    """Return how a layer differs from its own code; None if it does not, or cannot be run alone."""
    heads = 1 if encoding.shared_heads or encoding.num_heads == 1 else shape.num_heads
    for inputs, count in _samples(layer, shape):
        try:
            expected = _first(_intercepted_forward(layer)(**inputs))
        except NotReached:
            raise
        except Exception:  # it takes other inputs
            continue
        frequencies = _random(1, heads, shape.head_dim // 2)
        reason = _difference(layer, inputs, count, expected, frequencies, shape.head_dim, running)
        shared = None if reason is None or heads == 1 else frequencies[:, :1]
        if shared is not None and not _difference(layer, inputs, count, expected, shared, shape.head_dim, running):
            return "each head needs the same rotation: functools.partial(MixedRoPE, shared_heads=True)"
        return reason
    return None


def _difference(
    layer: Any, inputs: Any, count: int, expected: Tensor, frequencies: Tensor, head_dim: int, running: Any
) -> str | None:
    """Return how the outputs of a layer differ from those expected if all tokens are at the same position."""
    calls: list[Any] = []
    positions = torch.ones(count, 1, device=expected.device)
    rotation = _Counted(positions=positions, frequencies=frequencies.to(positions), head_dim=head_dim, calls=calls)
    running.rotation = running.text_rotation = rotation
    try:
        outputs = _first(_intercepted_forward(layer)(**inputs))
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        running.rotation = running.text_rotation = None
    if not calls:
        return "its forward does not rotate them"
    if outputs.is_meta or type(outputs) is not Tensor:
        return None
    differs = (outputs - expected).abs().max() > torch.finfo(outputs.dtype).eps ** 0.5 * expected.abs().max()
    return "its outputs change if all tokens rotate alike" if differs else None


class _Counted(Planar):
    """A rotation that notes its calls."""

    calls: list[Any]

    def rotate_vectors(self, x: Any) -> tuple[Tensor, Tensor]:
        self.calls.append(x)
        return super().rotate_vectors(x)


def _intercepted_forward(layer: Any) -> Any:
    """Return the forward of a layer that rotates q and k, without the computation of its rotation."""
    return vars(layer)["forward"].__self__.intercepted_forward


def _samples(layer: Any, shape: AttentionShape) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield random inputs of a layer in the forms that layers take, and their numbers of tokens."""
    few, whole = shape.num_heads + 1, torch.Size(shape.lattice).numel()
    is_packed = "cu_seqlens" in inspect.signature(type(layer).forward).parameters
    forms: list[tuple[int, ...]] = [(few,) if is_packed else (1, few)]
    forms += [(1, whole), (1, whole + 1), (1, *shape.lattice)] if whole < 4096 else []
    for linear in [part for part in layer.modules() if isinstance(part, nn.Linear)][:1]:
        for form in forms:
            yield inputs_of(layer, _random(*form, linear.in_features).to(linear.weight)), torch.Size(form).numel()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _first(output: Any) -> Tensor:
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor
