"""Measure how time and memory of attention grow with the number of tokens, forward and backward on the CPU.

    python benchmarks/linear.py --threads 2

Softmax attention and linear attention (causal, too), each with the rotation of its positions, of one sample. Peaks are
those of PyTorch's allocator. At the end the exponents of growth: 1 where twice the tokens take twice as much, 2 where
they take four times as much. Run it on a machine that does nothing else.
"""

import argparse

import torch
from measuring import peak_bytes, slope

import torchrope as tr
from torchrope_lab.training.timing import Work, interleaved_seconds, milliseconds, threads

AXES = 3


def steps(tokens: int, options: argparse.Namespace) -> dict[str, Work]:
    """Forward and backward pass of each kind, by name."""
    head = dict(num_heads=options.heads, head_dim=options.dim // options.heads)
    encoding = tr.encodings.parse_encoding(options.encoding).rotary(num_axes=AXES, **head)
    x, positions = torch.randn(1, tokens, options.dim), torch.rand(tokens, AXES) * tokens ** (1 / AXES)
    kinds: dict[str, torch.nn.Module] = {
        "softmax": tr.Attention(options.dim, options.heads),
        "linear": tr.LinearAttention(options.dim, options.heads),
        "linear, causal": tr.LinearAttention(options.dim, options.heads, causal=True),
    }
    if tokens > options.most_softmax:
        del kinds["softmax"]

    def trained(attention: torch.nn.Module) -> Work:
        return lambda: attention(x, encoding(positions)).square().mean().backward()

    return {kind: trained(attention) for kind, attention in kinds.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536], help="numbers of tokens")
    parser.add_argument("--most-softmax", type=int, default=16_384, help="maximum tokens of softmax attention")
    parser.add_argument("--dim", type=int, default=64, help="channels per token")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--encoding", default="mixed", help="name of the encoding")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each time")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch")
    options = parser.parse_args(arguments)
    measured: dict[str, list[tuple[int, float, int]]] = {}  # tokens, milliseconds and bytes of each kind
    with threads(options.threads):
        print(f"{options}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        for tokens in options.tokens:
            works = steps(tokens, options)
            seconds = interleaved_seconds(works, rounds=options.rounds, device="cpu")
            for kind, work in works.items():
                time, peak = milliseconds(seconds[kind]), peak_bytes(work, "cpu")
                measured.setdefault(kind, []).append((tokens, time.median, peak))
                shown = f"{time.median:10.1f} ms [{time.low:.1f}, {time.high:.1f}]"
                print(f"{kind:<16}{tokens:>9} tokens {shown:<36}{peak / 2**20:10.1f} MiB", flush=True)
    for kind, rows in measured.items():
        if len(rows) > 1:
            sizes, times, peaks = zip(*rows, strict=True)
            exponents = f"tokens^{slope(sizes, times):.2f}, memory as tokens^{slope(sizes, peaks):.2f}"
            print(f"{kind:<16}time grows as {exponents}")


if __name__ == "__main__":
    main()
