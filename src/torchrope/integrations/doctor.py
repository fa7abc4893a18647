"""`diagnose` compares what a model, or a function that rotates, does with the rotation that its configuration gives."""

import inspect
import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec, module_from_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.integrations.detection import copied, relative_difference, tensors_in
from torchrope.integrations.family import OLDEST, adapters
from torchrope.integrations.own_rotation import OwnRotation, halves, interleaved
from torchrope.integrations.rotary import ATTRIBUTE, Replaced
from torchrope.integrations.sources import Arguments, with_argument
from torchrope.integrations.swap import install
from torchrope.ops.layouts import heads_first
from torchrope.rotating import rotate
from torchrope.rotations import Planar
from torchrope.testing import TOLERANCE

_CHANGED = 1e-3
"""Smallest relative change of a layer's output without its rotation for which a sample can tell faults."""
_NARROW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Finding:
    """A fault that `diagnose` found; `str` gives one line.

    Attributes:
        kind: "frequencies", "angles", "cache", "pairs", "axes", "sections", "positions", "direction", "gradient",
            "in place", "dtype", "setting", or "unknown".
        place: Name of the module, or of the function.
        problem: What it does.
        advice: What to do.
    """

    kind: str
    place: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}; {self.advice}"


def diagnose(
    target: Callable[..., Any],
    inputs: Any,
    *later: Any,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
    interleaved: bool = False,
    layout: str = "bhtd",
) -> list[Finding]:
    """Find faults in the rotation of queries and keys:  pair j of channels by the angle  φ_j = sum_a p_a f_aj.

    A model is compared with the rotation that its configuration gives, as `swap` continues it: frequencies and settings
    of its rotary embedding, then the output and gradient of each attention layer, each with the input that it receives
    in the model. A function is compared by the scores of its rotated q and k, and their gradients. Faults are named
    that reproduce the difference. What the sample does not contain is not checked: it needs several tokens along every
    axis, far enough apart for rounded angles to differ, and padding if the model supports it.

    Args:
        target: A model with RoPE that `swap` supports, or one that contains some; it is neither changed nor called,
            but a copy of it is, in eval mode. Or a function that rotates, if positions and frequencies are given.
        inputs: Arguments of the model: one tensor, a tuple, or a mapping of keyword arguments. Of a function a tuple,
            `(q, k, *others)` or `(q, *others)`: it rotates as many tensors as it returns, one or two.
        later: Inputs of further calls of the model, such as other sizes, which show caches that are not updated.
        positions: p, of the tokens of a function, `(tokens,)` or `([batch,] tokens, axes)`.
        frequencies: f, radians per unit of position, `(pairs,)`, `(axes, pairs)` or `(axes, heads or 1, pairs)`.
        interleaved: Whether pair j is channels 2j and 2j + 1; otherwise j and j + pairs, as in `rotate_half`.
        layout: Of q and k, as of `torchrope.rotate`.

    Returns:
        One finding per fault, empty for a healthy target.

    Raises:
        ValueError: a model that `swap` does not support, without RoPE, already swapped, or whose rotation cannot be
            read; a sample whose outputs do not depend on the rotation; positions without frequencies, or of shapes
            that do not fit.

    Example:
        >>> import torchrope as tr
        >>> def rotate_half(q, k, cos, sin):  # on the wrong pairs
        ...     q, k = (x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin for x in (q, k))
        ...     return q, k
        >>> q, k = torch.randn(2, 1, 2, 9, 8)
        >>> positions, frequencies = torch.arange(9.0), 100 ** -(torch.arange(4) / 4)
        >>> angles = (positions[:, None] * frequencies).repeat_interleave(2, dim=-1)
        >>> inputs = (q, k, angles.cos(), angles.sin())
        >>> for finding in tr.integrations.diagnose(rotate_half, inputs, positions=positions, frequencies=frequencies):
        ...     print(finding.kind)
        pairs
    """
    if positions is not None or frequencies is not None:
        if positions is None or frequencies is None or later:
            raise ValueError("a function needs positions and frequencies, and inputs of one call")
        return _diagnose_function(target, tuple(inputs), positions, frequencies, interleaved, layout)
    if not isinstance(target, nn.Module):
        raise ValueError(f"diagnose needs positions= and frequencies= for a function, got {_name(target)} without")
    with torch.random.fork_rng(devices=[]):
        return _diagnose_model(target, [inputs, *later])


# Faults by the rotations that they give


@dataclass(frozen=True)
class _Fault:
    """A rotation as a fault changes it; without change the rotation of the configuration."""

    kind: str
    problem: str
    advice: str
    rotation: OwnRotation
    move: Callable[[Tensor], Tensor] = lambda positions: positions
    angles: torch.dtype | None = None  # to which they are rounded
    table: torch.dtype | None = None  # to which cos and sin are rounded

    def at(self, positions: Tensor) -> Planar:
        planar = self.rotation.at(self.move(positions))
        planar = replace(planar, frequencies=planar.frequencies.to(positions))
        if self.angles is None and self.table is None:
            return planar
        angles = planar.angles()
        angles = angles if self.angles is None else angles.to(self.angles).to(angles.dtype)
        table = torch.stack([angles.cos(), angles.sin()], dim=-2)
        return replace(planar, table=table if self.table is None else table.to(self.table).to(table.dtype))


def _healthy(rotation: OwnRotation) -> _Fault:
    return _Fault("", "", "", rotation)


def _faults(own: OwnRotation) -> Iterator[_Fault]:
    """Yield known faults of a rotation; as many, in the same order, for rotations of the same shape."""
    f, exact = own.frequencies, "compute angles in float32, outside of autocast"
    yield _Fault("direction", "does not rotate q and k", "rotate them", replace(own, frequencies=f * 0))
    turned = "rotates in the opposite direction"
    yield _Fault("direction", turned, "negate sin", replace(own, frequencies=-f))
    for factor, problem in ((2.0, "rotates twice"), (0.5, "halves angles"), (2 * math.pi, "multiplies angles by 2π"),
                            (0.5 / math.pi, "divides angles by 2π")):  # fmt: skip
        yield _Fault("frequencies", problem, "rotate once, by radians", replace(own, frequencies=f * factor))
    rotated, rest = 2 * f.shape[-1], own.channels[2 * f.shape[-1] :]
    channels = sorted(own.channels[:rotated])
    for parts in (0, 1, len(f)):
        order = interleaved(rotated) if parts == 0 else halves(rotated, parts)
        if len(order) == rotated and rotated % (2 * max(parts, 1)) == 0:
            pairs = "adjacent channels" if parts == 0 else "channels across halves" + " of an axis" * (parts > 1)
            changed = replace(own, channels=(*(channels[index] for index in order), *rest))
            hint = "permute the channels of q and k, or use the other layout of pairs"
            yield _Fault("pairs", f"pairs {pairs}", hint, changed)
    for order in itertools.permutations(range(len(f))):
        problem = f"takes positions of axes in the order {order}"
        if order != tuple(range(len(f))):
            yield _Fault("axes", problem, "reorder the columns of positions", replace(own, frequencies=f[list(order)]))
    for problem, axes in _sections(f):
        masks = torch.stack([axes == axis for axis in range(len(f))]).unsqueeze(1)
        changed = replace(own, frequencies=f.sum(dim=0, keepdim=True) * masks)
        yield _Fault("sections", problem, "set the sections of the configuration", changed)
    for dtype, name in _NARROW.items():
        narrow = replace(own, frequencies=f.to(dtype).to(f.dtype))
        move = _rounding(dtype)
        yield _Fault("frequencies", f"rounds frequencies to {name}", "keep frequencies in float32", narrow)
        yield _Fault("positions", f"rounds positions to {name}", "keep positions in float32", own, move)
        yield _Fault("angles", f"rounds angles to {name}", exact, own, angles=dtype)
        yield _Fault("angles", f"computes angles in {name}", exact, narrow, move, dtype)
        yield _Fault("angles", f"computes angles from {name} frequencies in {name}", exact, narrow, angles=dtype)
        yield _Fault("cache", f"stores cos and sin in {name}", "store them in float32", own, table=dtype)
    for shift in sorted({1, -1, own.num_prefix, -own.num_prefix} - {0}):
        problem = f"rotates each token by the position {abs(shift)} {'before' if shift > 0 else 'after'} it"
        hint = "leave out the same prefix or padding tokens in positions and tokens"
        yield _Fault("positions", problem, hint, own, partial(torch.roll, shifts=shift, dims=-2))
    problem, hint = "rotates all samples by the positions of the first", "pass positions per sample"
    yield _Fault("positions", problem, hint, own, _of_first_sample)
    problem, hint = "rotates tokens by their index instead of their position", "pass positions"
    yield _Fault("positions", problem, hint, own, _indices)


def _rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda positions: positions.to(dtype).to(positions.dtype)


def _of_first_sample(positions: Tensor) -> Tensor:
    return positions[:1].expand_as(positions) if positions.ndim > 2 else positions


def _indices(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[-2]).to(positions).unsqueeze(-1).expand_as(positions)


def _sections(frequencies: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield other assignments of pairs to axes, `(pairs,)`, of frequencies with one axis per pair."""
    rotates = (frequencies != 0).any(dim=1)  # (axes, pairs)
    num_axes, pairs = rotates.shape
    if num_axes == 1 or (rotates.sum(dim=0) != 1).any():
        return
    for axis in range(num_axes):
        yield f"takes the positions of axis {axis} for all pairs", torch.full((pairs,), axis)
    yield "interleaves axes over pairs", torch.arange(pairs) % num_axes
    sizes = rotates.sum(dim=1)
    for order in itertools.permutations(range(num_axes)):
        sections = sizes[list(order)]
        yield f"has sections {tuple(sections.tolist())}", torch.arange(num_axes).repeat_interleave(sections)


# Models


class _Suspected(nn.Module):
    """In place of an encoding of a swapped model: rotates as a fault does, and records positions."""

    def __init__(self, rotation: OwnRotation) -> None:
        super().__init__()
        self.fault = _healthy(rotation)
        self.register_buffer("frequencies", rotation.frequencies.float(), persistent=False)
        self.positions: Tensor | None = None
        self.place: tuple[Any, int] = (None, 0)  # the `Rotary`, and the index in it

    def suspect(self, fault: _Fault) -> None:
        self.fault = fault
        rotary, index = self.place
        order = torch.tensor(fault.rotation.channels)
        setattr(rotary, f"channels{index}", order.to(next(self.buffers()).device))

    def forward(self, positions: Tensor) -> Planar:
        self.positions = positions
        return self.fault.at(positions)


def _diagnose_model(model: nn.Module, calls: Sequence[Any]) -> list[Finding]:
    with _as_shipped(model):
        found = [adapter for adapter in adapters(model) if adapter.rotates()]
        if not found or any(hasattr(adapter.tower, ATTRIBUTE) for adapter in found):
            rule = "diagnose needs a model with RoPE that swap supports and that is not swapped"
            raise ValueError(f"{rule}, got {_name(model)}")
        reference, examined = copied(model).eval(), copied(model).eval()
        findings = _configure(reference, examined)
        suspected: list[_Suspected] = []
        layers: list[str] = []
        names = {part: name for name, part in reference.named_modules()}
        for adapter in adapters(reference):
            if not adapter.rotates():
                continue
            try:
                own = adapter.own_rotations()
            except ValueError as error:
                raise ValueError(f"diagnose compares with the rotation that swap continues: {error}") from None
            parts: list[Any] = [_Suspected(rotation) for rotation in own]
            lattices, channels = [one.lattice for one in own], [one.channels for one in own]
            rotary = install(adapter, parts, lattices, channels, keep_position_tables=True, keep_rotation=False)
            for index, part in enumerate(parts):
                part.place = (rotary, index)
            suspected.extend(parts)
            layers.extend(names[layer] for layer in adapter.layers)
    for number, inputs in enumerate(calls):
        recorded = _run(examined, inputs, layers)
        findings.extend(_compare(reference, inputs, layers, suspected, recorded))
        wrong = [finding for finding in findings if finding.kind != "gradient" and finding.place in layers]
        if number and wrong:  # a copy that was not called before tells caches from other faults
            fresh = copied(model).eval()
            _configure(copied(model), fresh)
            if not _compare(reference, inputs, layers, suspected, _run(fresh, inputs, layers)):
                problem = "keeps tables of an earlier call, of other positions or dtype"
                hint = "compute them in each call, or key the cache by positions, dtype and device"
                findings = [one for one in findings if one not in wrong] + [Finding("cache", layers[0], problem, hint)]
        findings.extend(_padding(inputs, layers, suspected))
    return list(dict.fromkeys(findings))


def _compare(
    reference: nn.Module, inputs: Any, layers: list[str], suspected: list[_Suspected], recorded: "_Record"
) -> list[Finding]:
    """Return the faults that reproduce what the layers of a model did, at the first layer with each."""

    def errors(index: int | None) -> tuple[dict[str, float], dict[str, float]]:
        healthy = [one.fault for one in suspected]
        try:
            for one in suspected if index is not None else ():
                one.suspect(next(itertools.islice(_faults(one.fault.rotation), index, None), one.fault))
            return _run(reference, inputs, layers, recorded).errors
        finally:
            for one, fault in zip(suspected, healthy, strict=True):
                one.suspect(fault)

    values, gradients = errors(None)
    bounds = {name: max(TOLERANCE[recorded.dtypes[name]], 1e-4) for name in values}
    wrong = {name: error for name, error in values.items() if not error <= bounds[name]}
    if not wrong and max(errors(0)[0].values(), default=0.0) < _CHANGED:
        rule = "diagnose needs a sample whose outputs depend on the rotation"
        raise ValueError(f"{rule}: pass more tokens, to a model whose attention matters, got {_name(reference)}")
    best: dict[str, tuple[float, _Fault]] = {}
    for index, fault in enumerate(_faults(suspected[0].fault.rotation) if wrong else ()):
        for name, error in errors(index)[0].items():
            if name in wrong and error < best.get(name, (math.inf, fault))[0]:
                best[name] = (error, fault)
    findings: dict[tuple[str, str], Finding] = {}
    for name, error in wrong.items():
        reached, fault = best.get(name, (math.inf, _healthy(suspected[0].fault.rotation)))
        if not reached <= max(bounds[name], error / 30 if error == error else 0.0) or reached > error / 3:
            problem = f"rotates otherwise than its configuration says, outputs differ by {error:.1e}"
            hint = "look for cached tables of other tokens, or settings in code"
            fault = replace(fault, kind="unknown", problem=problem, advice=hint)
        key = (fault.kind, "" if fault.kind == "unknown" else fault.problem)
        findings.setdefault(key, Finding(fault.kind, name, fault.problem, fault.advice))
    wrong_gradients = [
        name for name, error in gradients.items() if name not in wrong and not error <= 10 * bounds[name]
    ]
    if wrong_gradients:
        findings["gradient", ""] = _wrong_gradient(wrong_gradients[0])
    return list(findings.values())


def _wrong_gradient(place: str) -> Finding:
    problem, hint = "gradients of q and k are not those of the rotation", "use a rotation with a backward pass"
    return Finding("gradient", place, problem, hint)


class _Record:
    """Outputs of attention layers and gradients to their inputs, or their differences from those of another run."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        self.gradients: dict[str, list[Tensor | None]] = defaultdict(list)
        self.dtypes: dict[str, torch.dtype] = {}
        self.errors: tuple[dict[str, float], dict[str, float]] = ({}, {})


def _run(model: nn.Module, inputs: Any, layers: list[str], earlier: _Record | None = None) -> _Record:
    """Call a model; each layer starts a graph of its own, and passes on the output of an earlier run, if any."""
    record = _Record()
    leaves: dict[str, Tensor] = {}

    def enter(name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        key = next((key for key, value in kwargs.items() if isinstance(value, Tensor)), "") if not args else ""
        x = args[0] if args else kwargs[key]
        leaves[name] = x.detach().requires_grad_()
        return with_argument(key, 0, args, kwargs, leaves[name])

    def leave(name: str, layer: Any, args: Any, kwargs: Any, output: Any) -> Any:
        mask = kwargs.get("attention_mask")
        tensors = _valid(output, mask)
        drawn = torch.Generator().manual_seed(0)
        total = sum((x.float() * torch.randn(x.shape, generator=drawn).to(x.device)).sum() for x in tensors[:1])
        try:
            gradient = torch.autograd.grad(total, leaves[name], allow_unused=True)[0]  # type: ignore[arg-type]
        except RuntimeError:  # of an operation without a gradient, or that overwrote what it needs
            gradient = None
        step = len(record.outputs[name])
        record.outputs[name].append(output if earlier is None else None)
        record.gradients[name].append(gradient)
        record.dtypes[name] = tensors[0].dtype
        if earlier is None:
            return None
        expected = _valid(earlier.outputs[name][step], mask)
        values, gradients = record.errors
        differences = [_error(x, other) for x, other in zip(tensors, expected, strict=True)]
        values[name] = max([values.get(name, 0.0), *differences])
        gradients[name] = max(gradients.get(name, 0.0), _error(gradient, earlier.gradients[name][step]))
        return earlier.outputs[name][step]

    handles: list[Any] = []
    for name in layers:
        layer = model.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(_bound(enter, name), with_kwargs=True))
        handles.append(layer.register_forward_hook(_bound(leave, name), with_kwargs=True))
    try:
        torch.manual_seed(0)
        with torch.enable_grad():
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*((inputs,) if isinstance(inputs, Tensor) else inputs))
    finally:
        for handle in handles:
            handle.remove()
    return record


def _valid(output: Any, mask: Any) -> list[Tensor]:
    """Return the tensors of a layer's output, zero at padding tokens, which some models do not rotate."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        fits = [x.ndim == 3 and mask.numel() == x.shape[0] * x.shape[1] for x in tensors]
        return [x * mask.reshape(*x.shape[:2], 1) if fit else x for x, fit in zip(tensors, fits, strict=True)]
    return tensors


def _bound(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda *args: hook(name, *args)


def _error(x: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, relative to the largest value; not-a-number in both is equal."""
    if x is None or expected is None:
        return 0.0 if x is expected else math.inf
    both = x.isnan() & expected.isnan() if x.shape == expected.shape else torch.tensor(False)
    x, expected = (tensor.detach().double() for tensor in (x, expected))
    if both.any():
        x, expected = x.masked_fill(both, 0), expected.masked_fill(both, 0)
    error = relative_difference(x, expected) if x.numel() else 0.0
    return math.inf if error != error else error


def _padding(inputs: Any, layers: list[str], suspected: list[_Suspected]) -> list[Finding]:
    """Return whether padding tokens move later tokens of a text model."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    positions = suspected[0].positions
    if not isinstance(mask, Tensor) or mask.ndim != 2 or positions is None or positions.shape[-2] != mask.shape[1]:
        return []
    rows = positions[..., 0].expand(mask.shape)
    for row, valid in zip(rows, mask.bool(), strict=True):
        steps = row[valid].diff()
        if ((steps > 1) & ((valid.cumsum(0)[valid].diff()) == 1)).any() and suspected[
            0
        ].fault.rotation.frequencies.shape[0] == 1:
            problem = "padding tokens between valid ones shift the positions after them"
            hint = "pass position_ids = attention_mask.cumsum(-1) - 1"
            return [Finding("positions", layers[0], problem, hint)]
    return []


# What the configuration says


def _configure(reference: nn.Module, examined: nn.Module) -> list[Finding]:
    """Build rotary embeddings anew in a reference; compare those examined, and give them the same frequencies."""
    findings: list[Finding] = []
    for name, part in list(reference.named_modules()):
        if next(part.parameters(), None) is not None or not re.search("rotary|rope|posembed", _name(part), re.I):
            continue
        twin = _rebuilt(part)
        if twin is None or not name:
            continue
        own = examined.get_submodule(name)
        for attribute, value in _state(twin).items():
            present = getattr(own, attribute, value)
            problem = _different(present, value)
            if problem:
                kind = "frequencies" if isinstance(value, Tensor) else "setting"
                kind = "sections" if "section" in attribute else "cache" if "is a table" in problem else kind
                hint = "build it anew from the configuration, and keep it in float32"
                findings.append(Finding(kind, f"{name}.{attribute}", problem, hint))
                setattr(own, attribute, value)
        reference.set_submodule(name, twin)
    return findings


def _rebuilt(part: nn.Module) -> nn.Module | None:
    """Return a module of the class as its library ships it, built from its configuration or arguments; or None."""
    kind = getattr(_shipped(type(part).__module__), type(part).__name__, type(part))
    names = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "device", "dtype")]
    try:
        twin: nn.Module = kind(**{name: getattr(part, name) for name in names if hasattr(part, name)})
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None
    device = next((buffer.device for buffer in part.buffers()), None)
    return twin.to(device).train(part.training)


def _state(module: nn.Module) -> dict[str, Any]:
    simple = (bool, int, float, str, tuple, list)
    state = {name: value for name, value in vars(module).items() if isinstance(value, simple)}
    kept = {name: value for name, value in state.items() if name[0] != "_" and "cached" not in name}
    plain = {
        name: value for name, value in kept.items() if name != "training" and next(tensors_in(value), None) is None
    }
    buffers = {name: value for name, value in module.named_buffers() if not name.startswith("original_")}  # copies
    return {**plain, **buffers}


def _different(present: Any, value: Any) -> str:
    """Return how an attribute differs from that of a module built anew, empty if it does not."""
    if not isinstance(value, Tensor) or not isinstance(present, Tensor):
        same = present == value or (isinstance(value, tuple | list) and list(present) == list(value))
        return "" if same else f"is {present}, but the configuration gives {value}"
    if present.is_meta or value.is_meta:
        return ""
    if present.is_complex() and value.is_complex():
        present, value = torch.view_as_real(present), torch.view_as_real(value)
    if present.shape != value.shape:
        return f"is a table {tuple(present.shape)}, but the configuration gives {tuple(value.shape)}"
    rounded = present.dtype if present.dtype in _NARROW else None
    bound = TOLERANCE[rounded] if rounded and value.ndim > 1 else 1e-6
    if relative_difference(present.double(), value.double()) <= bound:
        return ""
    name = next(
        (name for dtype, name in _NARROW.items() if torch.equal(value.to(dtype).double(), present.double())), ""
    )
    if name:
        return f"is rounded to {name}"
    return "is a table of other positions or frequencies" if value.ndim > 1 else "differs from the configuration's"


@cache
def _shipped(name: str) -> Any:
    """Return a module of a library as it is installed, without what programs have replaced in it; None of others."""
    known = name.partition(".")[0] in OLDEST and not name.startswith("timm.models")  # which would register models again
    spec = find_spec(name) if known else None
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _as_shipped(model: nn.Module) -> Iterator[None]:
    """Restore the rotation functions of transformers that a program has replaced, while rotations are read."""
    handles = []
    names = {type(part).__module__ for part in model.modules()}
    for name in names:
        if not name.startswith("transformers.models."):
            continue
        for function, value in vars(_shipped(name)).items():
            if isinstance(value, FunctionType) and value.__module__ == name and re.search("rot", function):
                handles.append(Replaced(sys.modules[name], function, value))
    try:
        yield
    finally:
        for handle in reversed(handles):
            handle.remove()


def _name(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__)


# Functions


def _diagnose_function(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    positions: Tensor,
    frequencies: Tensor,
    paired_adjacent: bool,
    layout: str,
) -> list[Finding]:
    q = inputs[0]
    f = frequencies.detach().double()
    f = f.reshape(1, 1, -1) if f.ndim == 1 else f.unsqueeze(1) if f.ndim == 2 else f
    p = positions.detach().double()
    p = p.unsqueeze(-1) if p.ndim == 1 else p
    rotated = 2 * f.shape[-1]
    order = interleaved(rotated) if paired_adjacent else halves(rotated)
    if p.shape[-1] != f.shape[0] or p.shape[-2] != heads_first("q", q, layout)[0].shape[-2] or rotated > q.shape[-1]:
        rule = "positions must be ([batch,] tokens of q, axes) and frequencies (axes, heads or 1, pairs)"
        raise ValueError(f"{rule}, got {tuple(p.shape)} and {tuple(f.shape)} for q {tuple(q.shape)}")
    own = OwnRotation(f, (*order, *range(rotated, q.shape[-1])))
    name, findings = _name(function), []

    def call(*tensors: Tensor) -> list[Tensor]:
        return list(tensors_in(function(*tensors, *inputs[len(tensors) :])))

    count = len(call(q.clone(), *(x.clone() for x in inputs[1:2] if isinstance(x, Tensor))))
    given = [x.detach() for x in inputs[: 1 if count == 1 else 2]]
    clones = [x.clone() for x in given]
    outputs = call(*clones)
    if any(not torch.equal(x, clone) for x, clone in zip(given, clones, strict=True)):
        findings.append(Finding("in place", name, "overwrites its inputs", "pass copies, or return new tensors"))
    if any(x.dtype != y.dtype for x, y in zip(given, outputs, strict=False)):
        findings.append(Finding("dtype", name, f"returns {outputs[0].dtype} for {q.dtype}", "convert the outputs back"))

    def scores(pair: Sequence[Tensor]) -> Tensor:
        first, second = (heads_first("q", x.double(), layout)[0] for x in (pair[0], pair[-1]))
        second = second.repeat_interleave(first.shape[-3] // second.shape[-3], dim=-3)
        return first @ second.mT

    def truth(fault: _Fault, pair: Sequence[Tensor]) -> Tensor:
        channels = list(fault.rotation.channels)
        first, second = (x.double()[..., channels] for x in (pair[0], pair[-1]))
        return scores(rotate(first, second, fault.at(p), layout=layout))

    bound = max(TOLERANCE[q.dtype], 1e-5)
    healthy, actual = _healthy(own), scores(outputs)
    expected = truth(healthy, given)
    faults = list(_faults(own))
    error = _error(actual, expected)
    if not error <= bound:
        reached, fault = min(((_error(actual, truth(fault, given)), fault) for fault in faults), key=lambda one: one[0])
        if reached > bound or reached > error / 3:
            problem = f"rotates otherwise than positions and frequencies say, scores differ by {error:.1e}"
            fault = replace(healthy, kind="unknown", problem=problem, advice="check the tables that it is given")
        return [*findings, Finding(fault.kind, name, fault.problem, fault.advice)]
    if _error(truth(faults[0], given), expected) < _CHANGED:
        raise ValueError(f"diagnose needs tokens at different positions, got positions {tuple(positions.shape)}")
    if _error(scores(call(*(x.clone() for x in given))), actual) > bound:
        return [*findings, Finding("cache", name, "rotates otherwise in a second call", "do not keep tables")]
    gradients: list[tuple[Tensor | None, ...]] = []
    for compute in (lambda *pair: scores(call(*pair)), lambda *pair: truth(healthy, pair)):
        leaves = [x.clone().requires_grad_() for x in given]
        try:
            total = (compute(*(x.clone() for x in leaves)) * expected.detach()).sum()
            gradients.append(torch.autograd.grad(total, leaves, allow_unused=True))
        except RuntimeError:
            gradients.append((None,) * len(leaves))
    if any(not _error(x, other) <= 10 * bound for x, other in zip(*gradients, strict=True)):
        findings.append(_wrong_gradient(name))
    return findings
