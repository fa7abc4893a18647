"""Draw images, segmentation maps and boxes as PNG files for the report."""

from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from colorsys import hsv_to_rgb
from io import BytesIO
from typing import NamedTuple

import torch
from PIL import Image, ImageColor, ImageDraw
from torch import Tensor
from torchvision.transforms.v2 import functional

from torchrope_lab.results import Picture

LARGEST = 192
"""Pixels of the longer side of images and maps; larger ones are downsampled."""
BOXES_SIDE = 256
"""Pixels of the longer side of overlays with boxes."""
MAP_ALPHA = 178
"""Opacity of maps, of 255."""
_SHADES = ((0.9, 0.9), (0.8, 0.55), (0.5, 0.95), (0.6, 0.75), (0.9, 0.4))
"""Saturation and value of successive classes; five, because hues of classes 8, 13, 21 or 34 apart are similar."""


class Overlay(NamedTuple):
    """A transparent drawing over an image: a PNG file in base64, and the indices of the classes drawn."""

    png: str
    classes: list[int]


def picture(title: str, image: Tensor, panels: Mapping[str, str]) -> Picture:
    """Encode an image `(1 or 3, height, width)` of any range, its minimum as black and its maximum as white."""
    shown = functional.resize(image.float(), _fitted(image.shape[-2:], LARGEST), antialias=True)
    low, high = shown.amin(), shown.amax()
    pixels = ((shown - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    return Picture(title, _png(functional.to_pil_image(pixels.cpu())), panels)


def map_overlay(labels: Tensor, nothing: Collection[int] = ()) -> Overlay:
    """Draw a map `(height, width)` of class indices; classes in `nothing` are not drawn."""
    size = _fitted(labels.shape, LARGEST)
    small = functional.resize(labels[None], size, functional.InterpolationMode.NEAREST_EXACT)[0].cpu()
    classes = [index for index in small.unique().tolist() if index not in nothing]
    colours = torch.zeros(int(small.max()) + 1, 4, dtype=torch.uint8)
    for index in classes:
        colours[index] = torch.tensor([*ImageColor.getrgb(colour(index)), MAP_ALPHA])
    return Overlay(_png(functional.to_pil_image(colours[small].permute(2, 0, 1))), classes)


def box_overlay(size: Sequence[int], boxes: Tensor, labels: Tensor, scores: Tensor | None = None) -> Overlay:
    """Draw boxes `(n, 4)`, xyxy in pixels of an image of a size (height, width), with their scores in percent."""
    height, width = _fitted(size, BOXES_SIDE, enlarge=True)
    image = Image.new("RGBA", (width, height))
    draw = ImageDraw.Draw(image)
    edges = boxes.float() * (height / size[0])
    edges[:, 2:] = edges[:, 2:].maximum(edges[:, :2])
    for outline in (4, 2):
        for edge, index in zip(edges.tolist(), labels.tolist(), strict=True):
            draw.rectangle(edge, outline="white" if outline == 4 else colour(index), width=outline)
    for (left, top, *_), score in zip(edges.tolist(), [] if scores is None else scores.tolist(), strict=False):
        draw.text((left + 5, top + 3), f"{100 * score:.0f}", "black", stroke_width=2, stroke_fill="white")
    return Overlay(_png(image), sorted(set(labels.tolist())))


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


def _png(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "png", optimize=True)
    return b64encode(file.getvalue()).decode()
