"""Measure how time and memory of attention grow with the number of tokens, forward and backward on the CPU.

    python benchmarks/linear.py --threads 2

Softmax attention and linear attention (causal, too), each with the rotation of its positions, of one sample. Peaks are
those of PyTorch's allocator. Run it on a machine that does nothing else.
"""

import argparse
from typing import Any

import torch
from measuring import peak_bytes

import torchrope as tr
from torchrope_lab.training.timing import Work, interleaved_seconds, milliseconds, threads

AXES, DIM, HEADS, ROUNDS = 3, 64, 4, 7
TOKENS, MOST_OF_SOFTMAX = (1024, 4096, 16_384, 65_536), 16_384


def steps(tokens: int) -> dict[str, Work]:
    """Forward and backward pass of each kind, by name."""
    encoding = tr.MixedRoPE(num_axes=AXES, num_heads=HEADS, head_dim=DIM // HEADS)
    x, positions = torch.randn(1, tokens, DIM), torch.rand(tokens, AXES) * tokens ** (1 / AXES)
    kinds: dict[str, Any] = {} if tokens > MOST_OF_SOFTMAX else {"softmax": tr.Attention(DIM, HEADS)}
    kinds["linear"] = tr.LinearAttention(DIM, HEADS)
    kinds["linear, causal"] = tr.LinearAttention(DIM, HEADS, causal=True)

    def trained(attention: Any) -> Work:
        return lambda: attention(x, encoding(positions)).square().mean().backward()

    return {kind: trained(attention) for kind, attention in kinds.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch")
    with threads(parser.parse_args(arguments).threads):
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
        for tokens in TOKENS:
            works = steps(tokens)
            seconds = interleaved_seconds(works, rounds=ROUNDS, device="cpu")
            for kind, work in works.items():
                time, peak = milliseconds(seconds[kind]), peak_bytes(work, "cpu")
                shown = f"{time.median:10.1f} ms [{time.low:.1f}, {time.high:.1f}]"
                print(f"{kind:<16}{tokens:>9} tokens {shown:<36}{peak / 2**20:10.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
