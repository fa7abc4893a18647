"""One layer of attention that gathers symbols, its training, and its score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.attention import Attention
from torchrope.positions import grid
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.probes.abilities import Ability, nearest_weights, weights_of

SYMBOLS = 8
MARKED = 0.25
"""Share of tokens that are marked."""


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of a probe.

    Attributes:
        sizes: Tokens along each axis.
        dim: Channels.
        num_heads: Heads.
        steps: Optimiser steps.
        batch_size: Lattices in a step.
        lr: Learning rate.
        encoding_lr: Learning rate of the encoding's parameters.
        test_size: Lattices on which the score is measured.
    """

    sizes: tuple[int, ...] = (8, 8)
    dim: int = 64
    num_heads: int = 2
    steps: int = 500
    batch_size: int = 32
    lr: float = 3e-3
    encoding_lr: float = 3e-2
    test_size: int = 256


class Probe(nn.Module):
    """One layer of attention between an embedding of symbols and a linear map to their shares.

    Args:
        encoding: Name of the encoding.
        config: Settings.
        marks: Whether tokens are marked or not.
    """

    def __init__(self, encoding: str, config: ProbeConfig, marks: bool = False) -> None:
        super().__init__()
        choice, sizes = resolve_encoding(encoding), config.sizes
        self.embed = nn.Embedding(SYMBOLS, config.dim)
        self.marks = nn.Embedding(2, config.dim) if marks else None
        self.norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config.dim, config.num_heads)
        self.head = nn.Linear(config.dim, SYMBOLS)
        head_dim = config.dim // config.num_heads
        self.rotary = choice.rotary(num_axes=len(sizes), num_heads=config.num_heads, head_dim=head_dim)
        self.absolute = choice.absolute(sizes=sizes, dim=config.dim) if choice.absolute else None
        self.bias = choice.bias(sizes=sizes, num_heads=config.num_heads) if choice.bias else None
        self.spacing = self.rotary.lattice(*sizes)

    def encoding_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the encoding."""
        parts = (self.rotary, self.absolute, self.bias)
        return [parameter for part in parts if part is not None for parameter in part.parameters()]

    def forward(self, symbols: Tensor, marked: Tensor | None, sizes: Sequence[int]) -> Tensor:
        """Compute the shares of symbols `(batch, tokens, SYMBOLS)` from symbols `(batch, tokens)` on a lattice."""
        x = self.embed(symbols)
        if self.marks is not None and marked is not None:
            x = x + self.marks(marked.long())
        if self.absolute is not None:
            x = x + self.absolute(*sizes)
        rotation = self.rotary(grid(*sizes, **self.spacing))
        bias = None if self.bias is None else self.bias(*sizes)
        return self.head(self.attention(self.norm(x), rotation, bias=bias))


def train_probe(encoding: str, ability: Ability, config: ProbeConfig, seed: int) -> Probe:
    """Train a probe; the same seed draws the same lattices for every encoding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = Probe(encoding, config, ability.marked)
    draw = torch.Generator().manual_seed(seed)
    own = {id(parameter) for parameter in probe.encoding_parameters()}
    groups = [
        {"params": [parameter for parameter in probe.parameters() if (id(parameter) in own) == is_own], "lr": lr}
        for is_own, lr in ((False, config.lr), (True, config.encoding_lr))
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=config.steps)
    for _ in range(config.steps):
        error, ignorance = _errors(probe, ability, config.sizes, config.batch_size, draw)
        optimizer.zero_grad()
        (error / ignorance).backward()
        optimizer.step()
        schedule.step()
    return probe.eval()


@torch.no_grad()
def score(probe: Probe, ability: Ability, sizes: Sequence[int], config: ProbeConfig) -> float:
    """Return how much of the variance that uniform attention leaves is explained: 1 at best, 0 without positions."""
    draw = torch.Generator().manual_seed(2**31)
    error, ignorance = _errors(probe, ability, sizes, config.test_size, draw)
    return float(1 - error / ignorance)


def _errors(
    probe: Probe, ability: Ability, sizes: Sequence[int], batch_size: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compute the squared errors of a probe, and of the shares of symbols in each lattice, on random lattices."""
    tokens = math.prod(sizes)
    symbols = torch.randint(SYMBOLS, (batch_size, tokens), generator=draw)
    marked = torch.rand(batch_size, tokens, generator=draw) < MARKED if ability.marked else None
    weights = weights_of(ability, sizes) if marked is None else nearest_weights(marked, sizes)
    shown = functional.one_hot(symbols, SYMBOLS).double()
    target, asked = weights @ shown, weights.sum(dim=-1, keepdim=True)
    error = (probe(symbols, marked, sizes) - target).square() * asked
    return error.sum(), ((shown.mean(dim=1, keepdim=True) - target).square() * asked).sum()
