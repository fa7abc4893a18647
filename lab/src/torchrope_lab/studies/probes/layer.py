"""A layer of attention that learns one ability, and what it has learned: its score under several conditions."""

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope import extend
from torchrope.attention import Attention
from torchrope.encodings import NoEncoding
from torchrope.positions import grid
from torchrope.scaling import Method, yarn_temperature
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.settings.probes_config import ProbesConfig
from torchrope_lab.studies.probes.abilities import Ability, nearest_weights, weights_of

SYMBOLS = 8
MARKED = 0.25
"""Share of tokens that are marked."""
TEST_SEED = 2**31
MOST_TOKENS = 2048
"""Conditions with more tokens do not apply: weights are of all pairs."""


@dataclass(frozen=True)
class Condition:
    """What differs from training when a probe is scored."""

    name: str
    title: str
    factor: float = 1.0  # tokens along each axis, in those of training
    spacing: float = 1.0  # distance of neighbours, in that of training
    shift: float = 0.0  # added to all positions, in tokens; infinity for the size of the lattice
    jitter: float = 0.0  # standard deviation of noise on positions, in tokens
    method: Method | None = None  # how frequencies are scaled, see `torchrope.extend`
    half: bool = False  # compute in bfloat16


TRAINED = Condition("trained", "As in training")
CONDITIONS = (
    TRAINED,
    Condition("larger-1.5", "1.5 times the size", factor=1.5),
    Condition("larger-2", "Twice the size", factor=2),
    Condition("larger-4", "4 times the size", factor=4),
    *(
        Condition(f"larger-2-{method}", f"Twice the size, {method}", factor=2, method=method)
        for method in ("interpolate", "ntk", "yarn")
    ),
    Condition("finer", "Half the spacing", factor=2, spacing=0.5),
    Condition("shifted", "Shifted by the size of the lattice", shift=math.inf),
    Condition("jittered", "Positions with noise of 0.1", jitter=0.1),
    Condition("bfloat16", "In bfloat16", half=True),
    Condition("bfloat16-far", "In bfloat16, shifted by 1,000", shift=1000, half=True),
)


class Probe(nn.Module):
    """One layer of attention between an embedding of symbols and a linear map to their shares."""

    def __init__(self, encoding: str, sizes: Sequence[int], head_dim: int, num_heads: int) -> None:
        super().__init__()
        choice, dim = resolve_encoding(encoding), num_heads * head_dim
        self.sizes = tuple(sizes)
        self.embed = nn.Embedding(2 * SYMBOLS, dim)  # symbols, and marked ones
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, qkv_bias=True, dropout=0.0)
        self.head = nn.Linear(dim, SYMBOLS)
        self.rotary = choice.rotary(num_axes=len(sizes), num_heads=num_heads, head_dim=head_dim)
        self.absolute = choice.absolute(sizes=sizes, dim=dim) if choice.absolute else None
        self.bias = choice.bias(sizes=sizes, num_heads=num_heads) if choice.bias else None

    @property
    def moves(self) -> bool:
        """Whether positions are arguments, so that they may be shifted, unlike tables and biases."""
        return self.absolute is None and self.bias is None

    def encoding_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the encoding."""
        parts = (self.rotary, self.absolute, self.bias)
        return [parameter for part in parts if part is not None for parameter in part.parameters()]

    def forward(self, symbols: Tensor, sizes: Sequence[int], places: Tensor) -> Tensor:
        """Compute the shares of symbols, `(batch, tokens, SYMBOLS)`; a marked symbol is the symbol plus `SYMBOLS`."""
        # `places` are `(tokens, axes)`, in tokens of the training lattice.
        x = self.embed(symbols)
        if self.absolute is not None:
            x = x + self.absolute(*sizes)
        lattice = {name: torch.tensor(value) for name, value in self.rotary.lattice.spaced(*self.sizes).items()}
        rotation = self.rotary((lattice["origin"] + lattice["spacing"] * places).to(x.dtype))
        bias = None if self.bias is None else self.bias(*sizes)
        return self.head(self.attention(self.norm(x), rotation, bias=bias))


def train_probe(encoding: str, ability: Ability, config: ProbesConfig, head_dim: int, seed: int) -> Probe:
    """Train a probe; the same seed draws the same lattices for every encoding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = Probe(encoding, config.sizes, head_dim, config.num_heads)
    draw = torch.Generator().manual_seed(seed)
    own = probe.encoding_parameters()
    for parameter in own:
        parameter.requires_grad_(not config.frozen)
    others = [parameter for parameter in probe.parameters() if not any(parameter is each for each in own)]
    groups: list[dict[str, Any]] = [{"params": others, "lr": config.lr}]
    if own and not config.frozen:
        groups.append({"params": own, "lr": config.encoding_lr})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=config.steps)
    for _ in range(config.steps):
        error, ignorance = _errors(probe, ability, TRAINED, config.batch_size, draw)
        optimizer.zero_grad()
        (error / ignorance).backward()
        optimizer.step()
        schedule.step()
    return probe.eval()


@torch.no_grad()
def score(probe: Probe, ability: Ability, condition: Condition, examples: int) -> float | None:
    """Return how much of the error of uniform attention is explained: 1 at best, 0 without positions."""
    # None if the condition does not apply to the encoding, or has more than `MOST_TOKENS` tokens. `examples` is the
    # number of lattices of the training size; there are fewer of larger ones, with as many tokens in all.
    tokens = math.prod(round(condition.factor * size) for size in probe.sizes)
    if tokens > MOST_TOKENS or (not probe.moves and (condition.shift or condition.jitter)):
        return None
    if condition.method is not None and isinstance(probe.rotary, NoEncoding):
        return None
    if condition.method is not None:
        try:
            size = max(probe.sizes) if condition.method == "yarn" else None
            extended = extend(probe.rotary, condition.factor, method=condition.method, train_size=size)
        except ValueError:
            return None
        probe = copy.deepcopy(probe)
        probe.rotary = extended
        if condition.method == "yarn":
            keys = slice(probe.head.in_features, 2 * probe.head.in_features)
            for part in (probe.attention.qkv.weight, probe.attention.qkv.bias):
                part[keys] *= yarn_temperature(condition.factor) ** 2
    number = max(1, round(examples / condition.factor ** len(probe.sizes)))
    draw = torch.Generator().manual_seed(TEST_SEED)
    with torch.autocast("cpu", torch.bfloat16) if condition.half else nullcontext():
        error, ignorance = _errors(probe, ability, condition, number, draw)
    return float(1 - error / ignorance)


@cache
def _lattice(ability: Ability, sizes: tuple[int, ...], spacing: float) -> tuple[Tensor, Tensor | None]:
    """Return the places of a lattice, and the weights of an ability that are those of every example."""
    places = spacing * grid(*sizes, dtype=torch.float64)
    return places, None if ability.marked else weights_of(ability, places)


def _errors(
    probe: Probe, ability: Ability, condition: Condition, batch_size: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compute the squared errors of a probe, and of the shares of symbols in each lattice, on random lattices."""
    sizes = tuple(round(condition.factor * size) for size in probe.sizes)
    places, weights = _lattice(ability, sizes, condition.spacing)
    symbols = torch.randint(SYMBOLS, (batch_size, len(places)), generator=draw)
    shown = functional.one_hot(symbols, SYMBOLS).double()
    if weights is None:
        marked = torch.rand(symbols.shape, generator=draw) < MARKED
        weights, symbols = nearest_weights(marked, places), symbols + SYMBOLS * marked
    moved = places + (max(probe.sizes) if math.isinf(condition.shift) else condition.shift)
    if condition.jitter:
        moved = moved + condition.jitter * torch.randn(places.shape, generator=draw, dtype=places.dtype)
    target, asked = weights @ shown, weights.sum(dim=-1, keepdim=True)
    error = (probe(symbols, sizes, moved.float()) - target).square() * asked
    return error.sum(), ((shown.mean(dim=1, keepdim=True) - target).square() * asked).sum()
