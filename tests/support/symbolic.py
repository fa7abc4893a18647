"""Models for images of any size, and their compiled graphs and exported programs with symbolic sizes."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

import torchrope as tr

SIZES = [(4, 6), (2, 3), (3, 2), (4, 4), (5, 4), (6, 3), (6, 6), (7, 5), (8, 4), (3, 8), (9, 2), (8, 8)]


class Own(nn.Module):
    """A user's model: patches, one attention, rotated on the lattice of the patches."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.qkv = nn.Linear(16, 48)
        self.encoding = tr.encodings.parse_encoding(encoding).rotary(num_axes=2, num_heads=2, head_dim=8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        height, width = x.shape[-2:]
        q, k, v = self.qkv(x.flatten(2).mT).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k = tr.rotate(q, k, self.encoding(tr.grid(height, width)))
        return functional.scaled_dot_product_attention(q, k, v)


def ours(encoding: str) -> nn.Module:
    return tr.ViT((64, 64), patch_size=8, dim=32, depth=1, num_heads=2, num_outputs=5, encoding=encoding)


OWN: dict[str, Callable[[], nn.Module]] = {
    "own": partial(Own, "mixed"),
    "own liere:4": partial(Own, "liere:4"),
    "own string": partial(Own, "string"),
    "own comrope-ld:4": partial(Own, "comrope-ld:4"),
    "ViT": partial(ours, "mixed"),
    "ViT learned": partial(ours, "learned+mixed"),
    "ViT liere:4": partial(ours, "liere:4"),
}


def image(patch: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *(patch * extent for extent in size))


def graphs(model: nn.Module, patch: int, sizes: list[tuple[int, int]] = SIZES) -> int:
    """Compile a model, run it at all sizes, and return the number of graphs, each of the whole model."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model.eval(), fullgraph=True, dynamic=True, backend=counter)
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"  # torch 2.6
    with torch.no_grad(), torch._dynamo.config.patch({limit: len(sizes)}):
        for size in sizes:
            x = image(patch, size)
            torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    return counter.frame_count


def exported(model: nn.Module, patch: int) -> torch.export.ExportedProgram:
    height, width = torch.export.Dim("height", min=2, max=64), torch.export.Dim("width", min=2, max=64)
    shapes = ({2: patch * height, 3: patch * width},)
    return torch.export.export(model.eval(), (image(patch, (4, 6)),), dynamic_shapes=shapes)


def check_export(model: nn.Module, patch: int) -> None:
    """Export a model at one size and call the program at all sizes."""
    program = exported(model, patch).module()
    with torch.no_grad():
        for size in SIZES:
            x = image(patch, size)
            torch.testing.assert_close(program(x), model(x), atol=1e-4, rtol=1e-4)
