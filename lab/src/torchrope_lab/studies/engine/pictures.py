"""Convert tensors to pictures for the report: images to PNG, segmentation maps to runs."""

from base64 import b64encode
from collections.abc import Collection, Sequence
from io import BytesIO

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from torchrope_lab.results import Box, Panel, Picture

LARGEST = 192
"""Pixels of the longer side; larger images are downsampled."""


def picture(title: str, image: Tensor, panels: Sequence[Panel]) -> Picture:
    """Encode an image `(1 or 3, height, width)` of any range, its minimum as black and its maximum as white."""
    height, width = _shown(image.shape[-2:])
    shown = functional.resize(image.float(), [height, width], antialias=True)
    low, high = shown.amin(), shown.amax()
    pixels = ((shown - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    file = BytesIO()
    functional.to_pil_image(pixels.cpu()).save(file, "png", optimize=True)
    return Picture(title, b64encode(file.getvalue()).decode(), width, height, panels)


def map_panel(name: str, labels: Tensor, nothing: Collection[int] = ()) -> Panel:
    """Encode a map `(height, width)` of class indices as runs; classes in `nothing` are not drawn.

    Example:
        >>> map_panel("truth", torch.tensor([[0, 0, 1], [1, 2, 255]]), nothing=(0, 255)).map
        '-:2 1:2 2:1 -:1'
    """
    small = functional.resize(labels[None], list(_shown(labels.shape)), functional.InterpolationMode.NEAREST_EXACT)
    kinds, lengths = torch.unique_consecutive(small.flatten(), return_counts=True)
    runs: list[tuple[str, int]] = []
    for kind, length in zip(kinds.tolist(), lengths.tolist(), strict=True):
        written = "-" if kind in nothing else str(kind)
        if runs and runs[-1][0] == written:
            length += runs.pop()[1]
        runs.append((written, length))
    return Panel(name, map=" ".join(f"{written}:{length}" for written, length in runs))


def box_panel(name: str, size: Sequence[int], boxes: Tensor, labels: Tensor, scores: Tensor | None = None) -> Panel:
    """Convert boxes `(n, 4)`, xyxy in pixels of an image of a size (height, width), and their class indices."""
    factor = _shown(size)[0] / size[0]
    edges = [[round(factor * edge, 2) for edge in box] for box in boxes.tolist()]
    confidence: list[float | None] = [None] * len(boxes) if scores is None else scores.tolist()
    return Panel(
        name,
        boxes=[
            Box(left, top, right, bottom, kind, None if score is None else round(score, 3))
            for (left, top, right, bottom), kind, score in zip(edges, labels.tolist(), confidence, strict=True)
        ],
    )


def _shown(size: Sequence[int]) -> tuple[int, int]:
    height, width = size
    factor = min(1.0, LARGEST / max(height, width))
    return max(1, round(factor * height)), max(1, round(factor * width))
