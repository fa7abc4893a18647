"""Draw images, segmentation maps and boxes as PNG files for the report."""

from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from colorsys import hsv_to_rgb
from io import BytesIO
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from torchrope_lab.results import Picture

LARGEST = 192
"""Pixels of the longer side of images and maps; larger ones are downsampled."""
BOXES_SIDE = 256
"""Pixels of the longer side of overlays with boxes."""
_SHADES = ((0.9, 0.9), (0.8, 0.55), (0.5, 0.95), (0.6, 0.75), (0.9, 0.4))
"""Saturation and value of successive classes; five, because hues of classes 8, 13, 21 or 34 apart are similar."""


class Overlay(NamedTuple):
    """A transparent drawing over an image.

    Attributes:
        png: A PNG file in base64.
        classes: Indices of the classes drawn.
    """

    png: str
    classes: list[int]


def picture(title: str, image: Tensor, panels: Mapping[str, str]) -> Picture:
    """Encode an image `(1 or 3, height, width)` of any range, its minimum as black and its maximum as white."""
    shown = functional.resize(image.float(), _fitted(image.shape[-2:], LARGEST), antialias=True)
    low, high = shown.amin(), shown.amax()
    return Picture(title, _png(((shown - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)), panels)


def map_overlay(labels: Tensor, nothing: Collection[int] = ()) -> Overlay:
    """Draw a map `(height, width)` of class indices; classes in `nothing` are not drawn."""
    size = _fitted(labels.shape, LARGEST)
    small = functional.resize(labels[None], size, functional.InterpolationMode.NEAREST_EXACT)
    classes = [index for index in small.unique().tolist() if index not in nothing]
    paper = torch.zeros(3, *size, dtype=torch.uint8)
    masks, colours = small == torch.tensor(classes)[:, None, None], [colour(index) for index in classes]
    drawn = draw_segmentation_masks(paper, masks, 1.0, colours) if classes else paper
    return Overlay(_png(torch.cat([drawn, 178 * drawn.any(0, keepdim=True)])), classes)  # 70 % opaque


def box_overlay(size: Sequence[int], boxes: Tensor, labels: Tensor, scores: Tensor | None = None) -> Overlay:
    """Draw boxes `(n, 4)`, xyxy in pixels of an image of a size (height, width), with their scores in percent."""
    shown = _fitted(size, BOXES_SIDE, enlarge=True)
    edges = boxes.float() * (shown[0] / size[0])
    edges[:, 2:] = torch.maximum(edges[:, :2], edges[:, 2:])
    percent = None if scores is None else [f"{100 * score:.0f}" for score in scores.tolist()]
    paper = torch.zeros(3, *shown, dtype=torch.uint8)
    if len(edges):
        paper = draw_bounding_boxes(paper, edges, colors="white", width=4)
        colours = [colour(index) for index in labels.tolist()]
        paper = draw_bounding_boxes(paper, edges, percent, colours, width=2, label_background_colors="white")
    return Overlay(_png(torch.cat([paper, 255 * paper.any(0, keepdim=True)])), sorted(set(labels.tolist())))


def colour(index: int) -> str:
    """Return the colour of a class as "#rrggbb"; hues of successive classes are a golden angle apart."""
    saturation, value = _SHADES[index % len(_SHADES)]
    red, green, blue = hsv_to_rgb((0.58 + 0.618034 * index) % 1, saturation, value)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def legend(names: Sequence[str], overlays: Iterable[Overlay]) -> dict[str, str]:
    """Return the colour of every class that is drawn, by its name."""
    drawn = sorted({index for overlay in overlays for index in overlay.classes})
    return {str(names[index]): colour(index) for index in drawn}


def _fitted(size: Sequence[int], longest: int, enlarge: bool = False) -> list[int]:
    """Return (height, width) with the longer side at most `longest`, or equal to it."""
    factor = longest / max(size)
    return [max(1, round((factor if enlarge else min(1.0, factor)) * side)) for side in size]


def _png(pixels: Tensor) -> str:
    """Encode `(1, 3 or 4, height, width)` of bytes."""
    file = BytesIO()
    functional.to_pil_image(pixels.cpu().to(torch.uint8)).save(file, "png", optimize=True)
    return b64encode(file.getvalue()).decode()
