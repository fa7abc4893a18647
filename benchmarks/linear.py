"""Measure how time and memory of attention grow with the number of tokens, forward and backward on the CPU.

    python benchmarks/linear.py --threads 2

Softmax attention and linear attention (causal, too), each with the rotation of its positions, of one sample. Peaks are
those of PyTorch's allocator. At the end the exponents of growth: 1 where twice the tokens take twice as much, 2 where
they take four times as much. Run it on a machine that does nothing else.
"""

import argparse
from dataclasses import dataclass

import torch
from measuring import peak_bytes, slope

import torchrope as tr
from torchrope_lab.timing import Quartiles, Work, interleaved_seconds, milliseconds, threads

AXES = 3


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurements.

    Attributes:
        tokens: Numbers of tokens, growing.
        most_softmax: Tokens beyond which softmax attention is left out, for its time.
        dim: Channels of a token.
        heads: Attention heads.
        encoding: Name of the encoding.
        rounds: Samples of each time.
    """

    tokens: tuple[int, ...]
    most_softmax: int
    dim: int
    heads: int
    encoding: str
    rounds: int


@dataclass(frozen=True)
class Row:
    """One kind of attention at one number of tokens."""

    kind: str
    tokens: int
    time: Quartiles
    peak: int


def steps(plan: Plan, tokens: int) -> dict[str, Work]:
    """Forward and backward pass of each kind, by name."""
    head_dim = plan.dim // plan.heads
    encoding = tr.parse_encoding(plan.encoding).rotary(num_axes=AXES, num_heads=plan.heads, head_dim=head_dim)
    x, positions = torch.randn(1, tokens, plan.dim), torch.rand(tokens, AXES) * tokens ** (1 / AXES)

    def trained(attention: torch.nn.Module) -> Work:
        return lambda: attention(x, encoding(positions)).square().mean().backward()

    works = {
        "softmax": trained(tr.Attention(plan.dim, plan.heads)),
        "linear": trained(tr.LinearAttention(plan.dim, plan.heads)),
        "linear, causal": trained(tr.LinearAttention(plan.dim, plan.heads, causal=True)),
    }
    if tokens > plan.most_softmax:
        del works["softmax"]
    return works


def measure(plan: Plan) -> list[Row]:
    """Measure all kinds at all numbers of tokens."""
    rows = []
    for tokens in plan.tokens:
        works = steps(plan, tokens)
        seconds = interleaved_seconds(works, rounds=plan.rounds, device="cpu")
        for kind, work in works.items():
            rows.append(Row(kind, tokens, milliseconds(seconds[kind]), peak_bytes(work, "cpu")))
            print(describe(rows[-1]), flush=True)
    return rows


def describe(row: Row) -> str:
    time = f"{row.time.median:10.1f} ms [{row.time.low:.1f}, {row.time.high:.1f}]"
    return f"{row.kind:<16}{row.tokens:>9} tokens {time:<36}{row.peak / 2**20:10.1f} MiB"


def growth(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Exponents of time and memory over the number of tokens, of each kind that was measured at two or more."""
    kinds = dict.fromkeys(row.kind for row in rows)
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in kinds}
    return {
        kind: (
            slope([row.tokens for row in own], [row.time.median for row in own]),
            slope([row.tokens for row in own], [row.peak for row in own]),
        )
        for kind, own in by_kind.items()
        if len(own) > 1
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536], help="numbers of tokens")
    parser.add_argument("--most-softmax", type=int, default=16_384, help="maximum tokens of softmax attention")
    parser.add_argument("--dim", type=int, default=64, help="channels per token")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--encoding", default="mixed", help="name of the encoding")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each time")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch")
    options = vars(parser.parse_args(arguments))
    count = options.pop("threads")
    plan = Plan(**{**options, "tokens": tuple(sorted(options["tokens"]))})
    with threads(count):
        print(f"{plan}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        rows = measure(plan)
    for kind, (time, memory) in growth(rows).items():
        print(f"{kind:<16}time grows as tokens^{time:.2f}, memory as tokens^{memory:.2f}")


if __name__ == "__main__":
    main()
