"""Settings of probes; imports no torch."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from torchrope_lab.schema import DISTINCT, PositiveFloat, PositiveInt, Settings, at_least

AbilityName = Literal[
    "next", "far", "pair", "row", "diagonal", "slope", "side", "oblique-side", "disc", "ellipse", "ring", "decay",
    "place", "corner", "nearest",
]  # fmt: skip
SIDES = {1: 32, 2: 8, 3: 5, 4: 4}
"""Tokens along each axis, by the number of axes."""


@dataclass
class ProbesConfig(Settings):
    """Settings of the study "probes".

    Attributes:
        abilities: What attention is asked to gather, see docs/probes.md; default: six of them, or those that the number
            of axes allows.
        axes: Number of axes of the lattice; it has 32, 8, 5 or 4 tokens along each of 1, 2, 3 or 4 axes.
        head_dims: Channels of a head; default: 32, with three axes 48. With several values the first is that of the
            main tables, and the others show how many channels an ability needs.
        num_heads: Heads of the layer.
        frozen: Train with the initial parameters of the encodings.
        steps: Optimiser steps.
        batch_size: Lattices in a step.
        lr: Learning rate.
        encoding_lr: Learning rate of the encoding's parameters.
        examples: Lattices on which a probe is scored.
    """

    prefix: ClassVar[str] = "--probes."
    abilities: Annotated[list[AbilityName], DISTINCT] = field(default_factory=list)
    axes: Annotated[int, at_least(1, 4)] = 2
    head_dims: Annotated[list[PositiveInt], DISTINCT] = field(default_factory=list)
    num_heads: PositiveInt = 2
    frozen: bool = False
    steps: PositiveInt = 500
    batch_size: PositiveInt = 32
    lr: PositiveFloat = 3e-3
    encoding_lr: PositiveFloat = 3e-2
    examples: PositiveInt = 256

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens along each axis."""
        return (SIDES[self.axes],) * self.axes

    @property
    def channels(self) -> list[int]:
        """Channels of a head, by default those that every encoding can divide by the axes."""
        return self.head_dims or [48 if self.axes == 3 else 32]
