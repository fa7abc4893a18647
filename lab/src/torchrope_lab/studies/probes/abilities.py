"""Target attention weights of each query, as functions of the offset or of the position.

Tokens hold random symbols. A query must output the share of each symbol among the tokens that it attends to, weighted
by a row of W `(queries, keys)`, whose rows sum to 1. Attention whose weights are W does so without error, so that the
best score of a probe is 1; uniform attention, all that is possible without positions, has the score 0. A query does
not ask for its own symbol.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Weights = Callable[[Tensor], Tensor]
"""Weights, of any sum, from steps `(..., axes)`: key minus query in tokens, or the place of the key."""


@dataclass(frozen=True)
class Ability:
    """Target attention weights."""

    name: str  # on the command line
    title: str
    weights: Weights  # of the keys
    of: Literal["offset", "place"] = "offset"  # whether they are functions of the offset, or of the place of the key
    axes: int = 1  # the least number with which it differs from other abilities
    marked: bool = False  # whether only marked tokens are attended to, of which each query looks for the nearest


def at(*offset: int) -> Weights:
    """Return the weights of one offset along the last axes; with fewer axes its last numbers."""

    def weights(steps: Tensor) -> Tensor:
        wanted = steps.new_zeros(steps.shape[-1])
        numbers = offset[-steps.shape[-1] :]
        wanted[-len(numbers) :] = wanted.new_tensor(numbers)
        return (steps == wanted).all(dim=-1).to(steps)

    return weights


def any_of(*parts: Weights) -> Weights:
    """Return the sum of weights."""
    return lambda steps: torch.stack([part(steps) for part in parts]).sum(dim=0)


def in_plane(weights: Callable[[Tensor, Tensor], Tensor]) -> Weights:
    """Return weights of steps (y, x) along the last two axes, 0 for steps along others."""
    return lambda steps: (weights(steps[..., -2], steps[..., -1]) * (steps[..., :-2] == 0).all(dim=-1)).to(steps)


def by_distance(weights: Weights, stretch: float = 1.0) -> Weights:
    """Return weights of the Euclidean distance, with the spacing of the first axis multiplied by a number."""

    def of_steps(steps: Tensor) -> Tensor:
        spacing = steps.new_ones(steps.shape[-1])
        spacing[0] = stretch
        return weights((steps * spacing).norm(dim=-1)).to(steps)

    return of_steps


ABILITIES = {
    ability.name: ability
    for ability in (
        Ability("next", "The next token", at(1)),
        Ability("far", "A token farther away", at(2, 3)),
        Ability("pair", "Two tokens", any_of(at(0, 3), at(-3, 0)), axes=2),
        Ability("row", "Along an axis", in_plane(lambda y, x: y == 0), axes=2),
        Ability("diagonal", "Along a diagonal", in_plane(lambda y, x: y == x), axes=2),
        Ability("slope", "Along an oblique line", in_plane(lambda y, x: (2 * y - x).abs() <= 1), axes=2),
        Ability("side", "One side", lambda steps: (steps[..., -1] > 0).to(steps)),
        Ability("oblique-side", "One side of a diagonal", in_plane(lambda y, x: y + x > 0), axes=2),
        Ability("disc", "Neighbours", by_distance(lambda distance: distance < 1.5)),
        Ability("ellipse", "Neighbours at unequal spacing", by_distance(lambda d: d < 2.5, stretch=2.0), axes=2),
        Ability("ring", "A ring", by_distance(lambda distance: (distance - 3).abs() < 0.5), axes=2),
        Ability("decay", "Decay with distance", by_distance(lambda distance: torch.exp(-distance / 1.5))),
        Ability("place", "A place", at(1, 2), of="place"),
        Ability("corner", "A corner of the lattice", lambda places: (places < 3).all(dim=-1).to(places), of="place"),
        Ability("nearest", "The nearest marked token", by_distance(lambda distance: distance), marked=True),
    )
}


def weights_of(ability: Ability, places: Tensor) -> Tensor:
    """Return W `(queries, keys)` in float64; rows of queries without such keys are 0. `places` are `(tokens, axes)`."""
    # Places are in tokens of the lattice that a probe is trained on.
    steps = places - places.unsqueeze(1) if ability.of == "offset" else places.expand(len(places), -1, -1)
    weights = ability.weights(steps)
    if ability.of == "offset":  # not of the query itself, whose symbol attention knows without positions
        weights = weights.fill_diagonal_(0.0)
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def nearest_weights(marked: Tensor, places: Tensor) -> Tensor:
    """Return W `(batch, queries, keys)` of the nearest token `marked` `(batch, tokens)`, shared equally by several."""
    distance = torch.cdist(places, places).fill_diagonal_(torch.inf).expand(len(marked), -1, -1)
    distance = distance.masked_fill(~marked.unsqueeze(1), torch.inf)
    nearest = (distance <= distance.amin(dim=2, keepdim=True) + 1e-9) & distance.isfinite()
    return nearest / nearest.sum(dim=2, keepdim=True).clamp(min=1).double()
