"""A small model of every family that `swap` supports and has built-in RoPE, with inputs of several sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusing
import rotating
import swapped
import torch
from torch import Tensor


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        library: Library of its class.
        name: Name in the module that builds it.
        build: Builds a model whose outputs depend on its rotation.
        inputs: Draws three inputs of different sizes, or batches if the model has one size.
        call: Returns the first output of a model for an input.
    """

    library: str
    name: str
    build: Callable[[], Any]
    inputs: Callable[[Any], list[Any]]
    call: Callable[[Any, Any], Tensor]

    def __str__(self) -> str:
        return self.name


def _timm(name: str) -> Family:
    def inputs(model: Any) -> list[Any]:
        sizes = [swapped.images(model), swapped.images(model, by=(1, 2)), swapped.images(model, by=(2, 1))]
        try:
            with torch.no_grad():
                model(sizes[1])
        except (AssertionError, RuntimeError):  # a model of one size
            return [swapped.images(model, batch) for batch in (2, 1, 3)]
        return sizes

    return Family("timm", name, lambda: swapped.strong(name), inputs, lambda model, x: model(x))


def _tower(name: str) -> Family:
    def inputs(model: Any) -> list[Any]:
        if name in rotating.SHARED and name not in ("step3p7", "paddleocr_vl"):
            sizes: Any = ((), ((1, 8, 4),), ((1, 4, 12),))
            return [rotating.packed(name, *size) for size in sizes]
        return [rotating.tower(name)[1] for _ in range(3)]

    return Family("transformers", name, lambda: rotating.tower(name)[0], inputs, rotating.outputs)


def _dinov3_images(model: Any) -> list[Any]:
    return [{"pixel_values": torch.randn(2, 3, *size)} for size in ((32, 32), (48, 32), (32, 64))]


def _decoder(name: str) -> Family:
    def inputs(model: Any) -> list[Any]:
        return [rotating.tokens(*size) for size in ((2, 9), (1, 14), (3, 5))]

    return Family(
        "transformers, text", name, lambda: rotating.decoder(name), inputs, lambda model, words: model(words).logits
    )


def _diffusers(name: str) -> Family:
    def inputs(model: Any) -> list[Any]:
        usual = diffusing.inputs(name)
        if name in ("flux", "flux2", "qwen"):
            sizes: Any = ((5, 4), (3, 6))
        elif name == "lumina2":
            sizes = ((8, 6), (4, 8))
        elif name.startswith("ltx"):
            sizes = ((2, 4, 3), (3, 2, 4))
        else:
            sizes = ((3, 8, 6), (3, 4, 8))
        return [usual, *(diffusing.inputs(name, *size) for size in sizes)]

    return Family("diffusers", name, lambda: diffusing.built(name), inputs, diffusing.output)


def every_family() -> Iterator[Family]:
    """Yield all families."""
    yield from map(_timm, swapped.ROTATING)
    yield from map(_tower, (*rotating.SHARED, *rotating.IMAGE_TOWERS))
    yield Family("transformers", "dinov3_vit", rotating.dinov3, _dinov3_images, rotating.outputs)
    yield from map(_decoder, rotating.DECODERS)
    yield from map(_diffusers, diffusing.CASES)
