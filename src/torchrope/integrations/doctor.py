"""`diagnose` compares what a model, or a function that rotates, does with the rotation that its configuration gives."""

import inspect
import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec, module_from_spec
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrope.integrations.detection import CHANGED, call, copied, relative_difference, tensors_in
from torchrope.integrations.family import OLDEST, adapters
from torchrope.integrations.own_rotation import OwnRotation, halves, interleaved
from torchrope.integrations.rotary import ATTRIBUTE, Replaced, Rotary
from torchrope.integrations.sources import with_argument
from torchrope.integrations.swap import install
from torchrope.integrations.tables import planar_from_tables
from torchrope.ops.layouts import heads_first
from torchrope.ops.reference import combine
from torchrope.rotating import rotate
from torchrope.rotations import Planar
from torchrope.testing import TOLERANCE

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
    in the model. A function is compared as such a layer, by the scores of its rotated q and k. Faults are named that
    reproduce the difference. What the sample does not contain is not checked: it needs several tokens along every axis,
    far enough apart for rounded angles to differ, and padding if the model supports it.

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
            read; inputs with a cache that holds keys; a sample whose outputs do not depend on the rotation; positions
            without frequencies, or of shapes that do not fit.

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
    calls: list[Any] = [inputs, *later]
    if positions is not None or frequencies is not None:
        if positions is None or frequencies is None or later:
            raise ValueError("a function needs positions and frequencies, and inputs of one call")
        findings, sample, calls = _function(target, inputs, positions, frequencies, interleaved, layout)
        calls = [] if any(finding.kind == "cache" for finding in findings) else calls
    elif isinstance(target, nn.Module):
        if tokens := max(map(_cached, calls)):
            rule = "diagnose needs inputs without keys of earlier tokens, which the model rotated itself"
            raise ValueError(f"{rule}, got a cache of {tokens}")
        findings, sample = _model(target)
    else:
        raise ValueError(f"diagnose needs positions= and frequencies= for a function, got {_name(target)} without")
    uncalled = copied(sample.examined) if later else sample.examined
    with torch.random.fork_rng(devices=[]):
        for number, arguments in enumerate(calls):
            compared = _compare(sample, arguments)
            wrong = number > 0 and any(finding.kind != "gradient" for finding in compared)
            # A copy that was not called before tells caches from other faults.
            if wrong and not _compare(sample._replace(examined=copied(uncalled)), arguments):
                problem = "keeps tables of an earlier call, of other positions or dtype"
                compared = [_finding("cache", compared[0].place, problem)]
            findings += compared
            if any(_shifted_by_padding(one.positions, arguments) for one in sample.suspected):
                problem = "padding tokens between valid ones shift the positions after them"
                findings.append(_finding("positions", next(iter(sample.layers)), problem))
    return list(dict.fromkeys(findings))


def _finding(kind: str, place: str, problem: str) -> Finding:
    return Finding(kind, place, problem, _ADVICE[kind])


def _name(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__)


# Faults

_ADVICE = {
    "frequencies": "compute them anew from the configuration, in radians, and keep them in float32",
    "angles": "compute angles in float32, outside of autocast",
    "cache": "compute cos and sin in each call in float32, or key the cache by positions, dtype and device",
    "pairs": "permute the channels of q and k, or use the other layout of pairs",
    "axes": "reorder the columns of positions",
    "sections": "set the sections of the configuration",
    "positions": "pass the positions of each sample in float32, without those of padding and prefix tokens",
    "direction": "rotate q and k counter-clockwise",
    "gradient": "use a rotation with a backward pass",
    "in place": "pass copies, or return new tensors",
    "dtype": "convert the outputs back",
    "setting": "build it anew from the configuration",
    "unknown": "look for tables of other tokens, or settings in code",
}
Changes = Mapping[str, Callable[[Tensor], Tensor]]
_UNROTATED = "does not rotate q and k"
_CHANGED_FREQUENCIES = (
    ("direction", _UNROTATED, 0.0),
    ("direction", "rotates in the opposite direction", -1.0),
    ("frequencies", "rotates twice", 2.0),
    ("frequencies", "halves angles", 0.5),
    ("frequencies", "multiplies angles by 2π", 2 * math.pi),
    ("frequencies", "divides angles by 2π", 0.5 / math.pi),
)  # and the factor
_ROUNDED = (
    ("frequencies", "rounds frequencies to {}", ("frequencies",)),
    ("positions", "rounds positions to {}", ("positions",)),
    ("angles", "rounds angles to {}", ("angles",)),
    ("angles", "computes angles in {}", ("frequencies", "positions", "angles")),
    ("angles", "computes angles from {0} frequencies in {0}", ("frequencies", "angles")),
    ("cache", "stores cos and sin in {}", ("table",)),
)  # with the name of the dtype, and what is rounded


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _of_first_sample(positions: Tensor) -> Tensor:
    return positions[:1].expand_as(positions) if positions.ndim > 2 else positions


def _indices(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[-2]).to(positions).unsqueeze(-1).expand_as(positions)


def _faults(own: OwnRotation) -> Iterator[tuple[str, str, Changes]]:
    """Yield kind, problem and changes of the known faults: functions of frequencies, positions, angles and others."""
    f, num_axes, rotated = own.frequencies, len(own.frequencies), 2 * own.frequencies.shape[-1]
    # `y.to` as a change replaces x by y, in the dtype and on the device of x.
    for kind, problem, factor in _CHANGED_FREQUENCIES:
        yield kind, problem, {"frequencies": partial(torch.mul, factor)}
    channels, rest = torch.tensor(sorted(own.channels[:rotated])), torch.tensor(own.channels[rotated:])
    orders = {"adjacent channels": interleaved(rotated), "channels across halves": halves(rotated)}
    if num_axes > 1 and rotated % (2 * num_axes) == 0:
        orders["channels across halves of an axis"] = halves(rotated, num_axes)
    for pairs, order in orders.items():
        changed = torch.cat([channels[list(order)], rest])
        yield "pairs", f"pairs {pairs}", {"channels": changed.to}
    for order in itertools.islice(itertools.permutations(range(num_axes)), 1, None):
        yield "axes", f"takes positions of axes in the order {order}", {"frequencies": itemgetter(list(order))}
    for problem, axes in _sections(f):
        masks = torch.stack([axes == axis for axis in range(num_axes)]).unsqueeze(1)
        yield "sections", problem, {"frequencies": (f.sum(dim=0, keepdim=True) * masks).to}
    for (dtype, name), (kind, problem, parts) in itertools.product(_NARROW.items(), _ROUNDED):
        yield kind, problem.format(name), dict.fromkeys(parts, partial(_rounded, dtype=dtype))
    for shift in sorted({1, -1, own.num_prefix, -own.num_prefix} - {0}):
        problem = f"rotates each token by the position {abs(shift)} {'before' if shift > 0 else 'after'} it"
        yield "positions", problem, {"positions": partial(torch.roll, shifts=shift, dims=-2)}
    yield "positions", "rotates all samples by the positions of the first", {"positions": _of_first_sample}
    yield "positions", "rotates tokens by their index instead of their position", {"positions": _indices}


def _sections(frequencies: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield other assignments of pairs to axes, `(pairs,)`, of frequencies with one axis per pair."""
    rotates = (frequencies != 0).any(dim=1)  # (axes, pairs)
    num_axes, pairs = rotates.shape
    if num_axes == 1 or (rotates.sum(dim=0) != 1).any():
        return
    for axis in range(num_axes):
        yield f"takes the positions of axis {axis} for all pairs", torch.full((pairs,), axis)
    yield "interleaves axes over pairs", torch.arange(pairs) % num_axes
    for sizes in itertools.permutations(rotates.sum(dim=1).tolist()):
        yield f"has sections {sizes}", torch.arange(num_axes).repeat_interleave(torch.tensor(sizes))


# Comparison


class _Suspected(nn.Module):
    """In place of an encoding of a swapped model: rotates as a fault does, and records positions."""

    positions = torch.empty(0, 0)

    def __init__(self, own: OwnRotation) -> None:
        super().__init__()
        self.own = own
        self.faults = {problem: (kind, changes) for kind, problem, changes in _faults(own)}
        self.changes: Changes = {}
        self.register_buffer("frequencies", own.frequencies.float(), persistent=False)  # its dtype is that of positions

    def changed(self, part: str, x: Tensor) -> Tensor:
        return self.changes[part](x) if part in self.changes else x

    def forward(self, positions: Tensor) -> Planar:
        self.positions = positions
        frequencies = self.changed("frequencies", self.own.frequencies.to(positions))
        angles = self.changed("angles", combine(self.changed("positions", positions), frequencies))
        cos, sin = (self.changed("table", x) for x in (angles.cos(), angles.sin()))
        return planar_from_tables(cos, sin, len(self.own.channels), interleaved=True)


class _Sample(NamedTuple):
    """A module to examine, one with the same layers rotated by `_Suspected`, these, and the places of the layers."""

    examined: nn.Module
    reference: nn.Module
    rotaries: list[Rotary]
    layers: dict[str, str]

    @property
    def suspected(self) -> list[Any]:
        return [one for rotary in self.rotaries for one in rotary.encodings]

    def suspect(self, problem: str) -> None:
        """Let the reference rotate as a fault does."""
        one: Any
        for rotary in self.rotaries:
            for index, one in enumerate(rotary.encodings):
                _, one.changes = one.faults.get(problem, ("", {}))
                order = one.changed("channels", torch.tensor(one.own.channels, device=one.frequencies.device))
                setattr(rotary, f"channels{index}", order)


_Run = dict[str, list[tuple[Any, list[Any]]]]
"""Of each layer the output of each call, and what is compared: the gradient to its input, and tensors of the output."""


def _compare(sample: _Sample, inputs: Any) -> list[Finding]:
    """Return the faults that reproduce what the examined layers do, at the first layer with each."""
    recorded = _run(sample.examined, inputs, sample.layers)

    def errors(problem: str) -> dict[str, tuple[float, float]]:
        """Return the largest differences of outputs and of gradients of each layer."""
        sample.suspect(problem)
        run = _run(sample.reference, inputs, sample.layers, recorded)
        result = {}
        for name, calls in recorded.items():
            compared = [list(map(relative_difference, x, y)) for (_, x), (_, y) in zip(calls, run[name], strict=True)]
            result[name] = max(max(outputs) for _, *outputs in compared), max(gradient for gradient, *_ in compared)
        return result

    healthy = errors("")
    bounds = {name: max(1e-4, TOLERANCE[calls[0][1][1].dtype]) for name, calls in recorded.items()}
    wrong = [name for name, (error, _) in healthy.items() if error > bounds[name]]
    if not wrong and max((error for error, _ in errors(_UNROTATED).values()), default=0.0) < CHANGED:
        rule = "diagnose needs a sample whose outputs depend on the rotation"
        raise ValueError(f"{rule}: pass more tokens at different positions, to a model with nonzero attention outputs")
    kinds = {problem: kind for one in sample.suspected for problem, (kind, _) in one.faults.items()}
    tried = {problem: errors(problem) for problem in kinds} if wrong else {}
    findings: dict[str, Finding] = {}
    for name, (error, gradient) in healthy.items():
        kind, problem = "gradient", "gradients of q and k are not those of the rotation"
        if name in wrong:
            problem = min(tried, key=lambda one: tried[one][name][0])
            limit = min(error / 3, max(bounds[name], error / 30))
            kind = kinds[problem] if tried[problem][name][0] <= limit < math.inf else "unknown"
            if kind == "unknown":
                problem = f"rotates otherwise than positions and frequencies say, outputs differ by {error:.1e}"
        if name in wrong or gradient > 10 * bounds[name]:
            findings.setdefault(kind if kind == "unknown" else problem, _finding(kind, sample.layers[name], problem))
    return list(findings.values())


def _run(model: nn.Module, inputs: Any, layers: Iterable[str], earlier: _Run | None = None) -> _Run:
    """Call a model; each layer starts a graph of its own, and passes on the output of an earlier run, if any."""
    calls: _Run = defaultdict(list)

    def forward(name: str, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = next((key for key, value in kwargs.items() if isinstance(value, Tensor)), "") if not args else ""
        leaf = (args[0] if args else kwargs[key]).detach().requires_grad_()
        args, kwargs = with_argument(key, 0, args, kwargs, leaf)
        output, mask = compute(*args, **kwargs), kwargs.get("attention_mask")
        tensors = [x for x in tensors_in(output) if x.is_floating_point()]
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:  # padding tokens, which some models do not rotate
            fits = [x.ndim == 3 and mask.numel() == x.shape[:2].numel() for x in tensors]
            tensors = [x * mask.reshape(*x.shape[:2], 1) if fit else x for x, fit in zip(tensors, fits, strict=True)]
        drawn = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(0)).to(tensors[0])
        gradient = None
        with suppress(RuntimeError):  # of an operation without a gradient, or that overwrote what it needs
            gradient = torch.autograd.grad(tensors[0], leaf, drawn, allow_unused=True)[0]
        calls[name].append((output, [gradient, *(x.detach() for x in tensors)]))
        return output if earlier is None else earlier[name][len(calls[name]) - 1][0]

    with ExitStack() as stack, torch.enable_grad():
        for name in layers:
            layer = model.get_submodule(name)
            stack.callback(Replaced(layer, "forward", partial(forward, name, layer.forward)).remove)
        torch.manual_seed(0)
        call(model, inputs)
    return calls


def _cached(inputs: Any) -> int:
    """Return the number of tokens in caches of keys among the inputs."""
    values = inputs.values() if isinstance(inputs, Mapping) else () if isinstance(inputs, Tensor) else inputs
    return max((int(one.get_seq_length()) for one in values if hasattr(one, "get_seq_length")), default=0)


# Models


def _model(model: nn.Module) -> tuple[list[Finding], _Sample]:
    """Return faults of settings, and what is compared of a model."""
    with _as_shipped(model):
        found = [adapter for adapter in adapters(model) if adapter.rotates()]
        if not found or any(hasattr(adapter.tower, ATTRIBUTE) for adapter in found):
            rule = "diagnose needs a model with RoPE that swap supports and that is not swapped"
            raise ValueError(f"{rule}, got {_name(model)}")
        sample = _Sample(copied(model).eval(), copied(model).eval(), [], {})
        findings = _configure(sample.reference, sample.examined)
        names = {part: name for name, part in sample.reference.named_modules()}
        for adapter in [adapter for adapter in adapters(sample.reference) if adapter.rotates()]:
            try:
                own = adapter.own_rotations()
            except ValueError as error:
                raise ValueError(f"diagnose compares with the rotation that swap continues: {error}") from None
            sample.rotaries.append(_rotary(partial(install, adapter), own))
            sample.layers.update({names[layer]: names[layer] for layer in adapter.layers})
    return findings, sample


def _rotary(build: Callable[..., Rotary], own: Sequence[OwnRotation]) -> Rotary:
    lattices, channels = [one.lattice for one in own], [one.channels for one in own]
    parts = [_Suspected(one) for one in own]
    return build(parts, lattices=lattices, channels=channels, keep_position_tables=True, keep_rotation=False)


def _shifted_by_padding(positions: Tensor, inputs: Any) -> bool:
    """Return whether padding tokens move later tokens of a text model."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or positions.shape[-2:] != (mask.shape[1], 1):
        return False
    rows = zip(positions[..., 0].expand(mask.shape), mask.bool(), strict=True)
    return any(((row[valid].diff() > 1) & (valid.nonzero()[:, 0].diff() > 1)).any() for row, valid in rows)


def _configure(reference: nn.Module, examined: nn.Module) -> list[Finding]:
    """Build rotary embeddings anew in a reference; compare those examined, and give them the same frequencies."""
    findings: list[Finding] = []
    for name, part in list(reference.named_modules()):
        rotary = name and re.search("rotary|rope|posembed", _name(part), re.I)
        twin = _rebuilt(part) if rotary and next(part.parameters(), None) is None else None
        if twin is None:
            continue
        own = examined.get_submodule(name)
        for attribute, value in {**vars(twin), **dict(twin.named_buffers())}.items():
            if re.match("_|training|original_|.*cached", attribute):  # caches and copies
                continue
            if problem := _difference(getattr(own, attribute, value), value):
                kind = "frequencies" if isinstance(value, Tensor) else "setting"
                kind = "sections" if "section" in attribute else "cache" if "is a table" in problem else kind
                findings.append(_finding(kind, f"{name}.{attribute}", problem))
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


def _difference(present: Any, value: Any) -> str:
    """Return how an attribute differs from that of a module built anew, empty if it does not."""
    if not isinstance(value, Tensor):
        compared = isinstance(value, bool | int | float | str | tuple | list) and next(tensors_in(value), None) is None
        if not compared or ([*present] == [*value] if isinstance(value, tuple | list) else present == value):
            return ""
        return f"is {present}, but the configuration gives {value}"
    if present.is_meta or value.is_meta:
        return ""
    if present.is_complex() and value.is_complex():
        present, value = torch.view_as_real(present), torch.view_as_real(value)
    if present.shape != value.shape:
        return f"is a table {tuple(present.shape)}, but the configuration gives {tuple(value.shape)}"
    bound = TOLERANCE[present.dtype] if present.dtype in _NARROW and value.ndim > 1 else 1e-6
    if relative_difference(present, value) <= bound:
        return ""
    for dtype, name in _NARROW.items():
        if torch.equal(value.to(dtype).double(), present.double()):
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


def _as_shipped(model: nn.Module) -> ExitStack:
    """Restore the rotation functions of transformers that a program has replaced, while rotations are read."""
    stack = ExitStack()
    names = {type(part).__module__ for part in model.modules()}
    for name in (name for name in names if name.startswith("transformers.models.")):
        for function, value in vars(_shipped(name)).items():
            if isinstance(value, FunctionType) and value.__module__ == name and re.search("rot", function):
                stack.callback(Replaced(sys.modules[name], function, value).remove)
    return stack


# Functions


class _Scores(nn.Module):
    """Scores of a function's rotated q and k: a layer, so that functions are compared as models are."""

    def __init__(self, rotated: Callable[..., Any], given: Sequence[Tensor], layout: str) -> None:
        super().__init__()
        self.rotated, self.given, self.layout = rotated, given, layout

    def forward(self, change: Tensor) -> Tensor:
        """Return the scores of q and k with a change, zeros of all their channels: gradients to it are theirs."""
        parts = zip(self.given, change.split([x.numel() for x in self.given]), strict=True)
        pair = [x + part.view(x.shape) for x, part in parts]
        try:
            outputs = self.rotated(*pair)
        except RuntimeError:  # of a function that refuses tensors with gradients
            outputs = self.rotated(*(x.detach() for x in pair))
        rotated = [heads_first("q", x.double(), self.layout)[0] for x in tensors_in(outputs)]
        q, k = rotated[0], rotated[-1]
        return (q @ k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3).mT).to(change.dtype)


def _function(
    function: Callable[..., Any], inputs: Any, positions: Tensor, frequencies: Tensor, adjacent: bool, layout: str
) -> tuple[list[Finding], _Sample, list[Tensor]]:
    """Return faults of calls, what is compared of a function, and the arguments."""
    if not isinstance(inputs, list | tuple) or not inputs or not isinstance(inputs[0], Tensor):
        received = [*map(_name, map(type, inputs))] if isinstance(inputs, list | tuple) else _name(type(inputs))
        raise ValueError(f"inputs of a function must be a tuple (q, k, *others) or (q, *others), got {received}")
    q, name = inputs[0], _name(function)
    f, p = frequencies.detach().double(), positions.detach().double()
    f = f.reshape(1, 1, -1) if f.ndim == 1 else f.unsqueeze(1) if f.ndim == 2 else f
    p = p.unsqueeze(-1) if p.ndim == 1 else p
    rotated = 2 * f.shape[-1]
    if p.shape[-1] != f.shape[0] or p.shape[-2] != heads_first("q", q, layout)[0].shape[-2] or rotated > q.shape[-1]:
        rule = "positions must be ([batch,] tokens of q, axes) and frequencies (axes, heads or 1, pairs)"
        raise ValueError(f"{rule}, got {tuple(p.shape)} and {tuple(f.shape)} for q {tuple(q.shape)}")
    order = interleaved(rotated) if adjacent else halves(rotated)
    rotary = _rotary(Rotary, [OwnRotation(f, (*order, *range(rotated, q.shape[-1])))])
    copies = [[x.detach().clone() if isinstance(x, Tensor) else x for x in inputs] for _ in range(2)]
    outputs, again = ([x.detach() for x in tensors_in(function(*arguments))] for arguments in copies)
    if not outputs:
        raise ValueError(f"a function must return q and k, or q, rotated, got no tensor from {name}")
    given = [x.detach() for x in inputs[: min(len(outputs), 2)]]
    observed = {
        ("in place", "overwrites its inputs"): not all(map(torch.equal, given, copies[0])),
        ("dtype", f"returns {outputs[0].dtype} for {q.dtype}"): any(x.dtype != q.dtype for x in outputs),
        ("cache", "rotates otherwise in a second call"): max(map(relative_difference, outputs, again)) > 1e-4,
    }
    findings = [_finding(kind, name, problem) for (kind, problem), is_so in observed.items() if is_so]

    def truth(*pair: Tensor) -> tuple[Tensor, Tensor]:
        channels = rotary.order(0)
        first, second = (x.double() if channels is None else x.double()[..., channels] for x in (pair[0], pair[-1]))
        return rotate(first, second, rotary.encodings[0](p), layout=layout)

    examined = _Scores(lambda *pair: function(*pair, *inputs[len(pair) :]), given, layout)
    sample = _Sample(examined, _Scores(truth, given, layout), [rotary], {"": name})
    return findings, sample, [q.new_zeros(sum(x.numel() for x in given))]
