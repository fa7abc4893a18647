"""Rays of cameras: tokens of several views rotate by what each view sees of them, in that view's own frame."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrope.encodings.base import Encoding
from torchrope.encodings.poses import Poses, times
from torchrope.ops import rotate_one
from torchrope.ops.layouts import heads_first
from torchrope.rotations import Action, Rotation
from torchrope.tensors import can_read

NUMBERS = 6
"""Of a ray as a view sees it: a place (3), a direction (2) and a depth."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RayAction(Action):
    """What `RayEncoding` returns: rotations of tokens by their rays, as each view sees them.

    Queries, keys and values come back with views in the batch, so that each view's queries meet all keys as that view
    sees them; `outputs` undoes it.

    Attributes:
        own: The rotation of the tokens of each view as it sees them itself, of `(batch · views)` samples.
        seen: That of all tokens, as each view sees them, likewise.
        views: How many.
    """

    own: Rotation
    seen: Rotation
    views: int

    def __repr__(self) -> str:
        return f"RayAction(views={self.views}, own={self.own}, seen={self.seen})"

    def queries(self, q: Tensor, *, layout: str | None = None, backend: str = "auto") -> Tensor:
        x, restore = heads_first("q", q, layout)
        by_view = self._checked(x).unflatten(-2, (self.views, -1)).transpose(1, 2).flatten(0, 1)
        return restore(rotate_one(by_view, self.own, layout="bhtd", backend=backend))

    def keys(self, k: Tensor, *, layout: str | None = None, backend: str = "auto") -> Tensor:
        x, restore = heads_first("k", k, layout)
        everywhere = self._checked(x).repeat_interleave(self.views, dim=0)
        return restore(rotate_one(everywhere, self.seen, layout="bhtd", backend=backend))

    def values(self, v: Tensor, *, layout: str | None = None, backend: str = "auto") -> Tensor:
        return self.keys(v, layout=layout, backend=backend)

    def outputs(self, y: Tensor, *, layout: str | None = None, backend: str = "auto") -> Tensor:
        x, restore = heads_first("y", y, layout)
        turned = rotate_one(x, self.own.inverse(), layout="bhtd", backend=backend)
        return restore(self.join(turned))

    def bias(self, bias: Tensor) -> Tensor:
        if bias.shape[-2] == 1:
            return bias if bias.shape[0] == 1 else bias.repeat_interleave(self.views, dim=0)
        by_view = bias.unflatten(-2, (self.views, -1)).movedim(-3, 1)  # (batch or 1, views, heads or 1, own, keys)
        return by_view.expand(self.own.shape[0] // self.views, *by_view.shape[1:]).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.views)).transpose(1, 2).flatten(2, 3)

    def require_same_frame(self, other: Rotation | Action) -> None:
        if other is not self:
            raise ValueError("queries and keys must have the rays of one call, for each view sees them its own way")

    def _checked(self, x: Tensor) -> Tensor:
        batch, tokens = self.seen.shape[0] // self.views, self.seen.shape[-1]
        if x.ndim != 4 or (x.shape[0], x.shape[-2]) != (batch, tokens):
            rule = f"tokens of rays must be ({batch}, heads, {tokens}, head_dim)"
            raise ValueError(f"{rule}, got {tuple(x.shape)}")
        return x


class RayEncoding(nn.Module):
    """Rotate tokens of several views by their rays, each as the view of the query sees it.

        x_n  = c_n + d_n R_n^T K_n^-1 (u_n, 1)        at depth d on the ray of token n, c its camera's place
        s_vn = (R_v c_n + t_v) / unit,  p_xy / (|p| angle),  p_z / unit       with  p = K_v (R_v x_n + t_v)
        q'_m = R(s_vm) q_m,   k'_n = R(s_vn) k_n,   v'_n = R(s_vn) v_n,   y_m = R(s_vm)^-1 y'_m    v: the view of m

    The 6 numbers s are positions for any encoding of this package. They are the same in any world that was turned and
    moved, and with them scores and outputs. Keys and values are rotated once for each view: attention costs as much as
    without, rotating as often as there are views. Unlike the paper's, a depth is one number without an uncertainty,
    behind a camera it is below 0, and a token has one ray.

    Args:
        encoding: Of 6 axes, such as `MixedRoPE(num_axes=6, ...)`.
        unit: Length that counts as one, in the unit of translations: about the distance of cameras.
        angle: Difference of directions that counts as one, about that of neighbouring tokens, where the width of the
            image of a focal length of one is one.
        farthest: Largest depth in units; points further away, such as those at infinity, are as far as it.

    Raises:
        ValueError: an encoding of another number of axes; numbers out of range.

    References:
        Wu et al., RayRoPE (arXiv:2601.15275): coordinates in the frame of the query, values and outputs too.

    Example:
        >>> import torch, torchrope as tr
        >>> encoding = tr.RayEncoding(tr.MixedRoPE(num_axes=6, num_heads=2, head_dim=16))
        >>> cameras = tr.Poses(torch.eye(3).expand(1, 5, 3, 3), torch.randn(1, 5, 3))  # 5 views of 4 tokens
        >>> u = torch.tensor([[-0.25, -0.25], [0.25, -0.25], [-0.25, 0.25], [0.25, 0.25]]).repeat(5, 1)
        >>> action = encoding(cameras, u, torch.full((1, 20), 2.0))
        >>> q, k, v = torch.randn(3, 1, 2, 20, 16)
        >>> turned_q, turned_k = tr.rotate(q, k, action)
        >>> mixed = torch.nn.functional.scaled_dot_product_attention(turned_q, turned_k, action.values(v))
        >>> action.outputs(mixed).shape
        torch.Size([1, 2, 20, 16])
    """

    title = "rays"
    formula = "R(s_vn),  s_vn = (c, p_xy / |p|, p_z) in the frame of the query's view v"
    summary = "Rays of tokens as the view of the query sees them; only relative poses matter."
    source = "Wu et al. 2026 (RayRoPE)"

    def __init__(self, encoding: Encoding, *, unit: float = 1.0, angle: float = 0.125, farthest: float = 10.0) -> None:
        super().__init__()
        if encoding.num_axes != NUMBERS:
            raise ValueError(f"the encoding of rays must have {NUMBERS} axes, got {encoding.num_axes}")
        for name, number in dict(unit=unit, angle=angle, farthest=farthest).items():
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {number}")
        self.encoding = encoding
        self.unit, self.angle, self.farthest = unit, angle, farthest

    def forward(self, poses: Poses, places: Tensor, depth: Tensor, *, backend: str = "auto") -> RayAction:
        """Make the rotations of tokens.

        Args:
            poses: Of `(views)` or `(batch, views)`: tokens are those of the first view, then those of the second, as
                many in each.
            places: (x, y) of tokens in their images, `(tokens, 2)` or `(batch, tokens, 2)`, in the unit that the
                intrinsics map to: [-1/2, 1/2] where `Poses` was given the image's size. Positions have their dtype.
            depth: Of the point on each ray that counts, along the optical axis, `(batch, tokens)` or `(tokens)`, in the
                unit of translations, above 0; infinity is the direction alone. It may be predicted: it has gradients.
            backend: As the encoding's.

        Raises:
            ValueError: shapes that do not fit; depths that are not above 0, which is looked at on a CPU alone.
        """
        positions = self.positions(poses, places, depth)  # (batch, views, tokens, 6)
        views = positions.shape[1]
        index = torch.arange(views, device=positions.device)
        own = positions.unflatten(2, (views, -1))[:, index, index]  # (batch, views, own tokens, 6)
        return RayAction(
            own=self.encoding(own.flatten(0, 1), backend=backend),
            seen=self.encoding(positions.flatten(0, 1), backend=backend),
            views=views,
        )

    def positions(self, poses: Poses, places: Tensor, depth: Tensor) -> Tensor:
        """s of all tokens as each view sees them, `(batch, views, tokens, 6)`; arguments as of `forward`."""
        tokens = _check(poses, places, depth)
        views = poses.shape[-1]
        nearness = depth.to(poses.translation).clamp(min=0).reciprocal()
        of_camera = _lift(places.to(poses.translation), poses, tokens // views)  # (batch, tokens, 3)
        rotation = poses.rotation.repeat_interleave(tokens // views, dim=-3)
        centres = poses.centres().repeat_interleave(tokens // views, dim=-2)  # (batch, tokens, 3)
        along = times(rotation.mT, of_camera)
        # In the frame of each view: (batch, views, tokens, 3).
        turn, there = poses.rotation.unsqueeze(-3), poses.translation.unsqueeze(-2)
        seen_centres = times(turn, centres.unsqueeze(-3)) + there
        scaled = times(turn, along.unsqueeze(-3)) + nearness[..., None, :, None] * seen_centres  # p / depth
        if poses.intrinsics is not None:
            scaled = times(poses.intrinsics.unsqueeze(-3), scaled)
        length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).clamp(min=torch.finfo(scaled.dtype).tiny)
        most = self.farthest * self.unit
        z = scaled[..., 2]
        near = nearness.unsqueeze(-2)
        # |z / nearness| up to `most`, without a division by 0 for points at infinity.
        far = z.abs() >= most * near
        depths = torch.where(far, most * z.sign(), z / torch.where(far, 1.0, near))
        parts = [seen_centres / self.unit, scaled[..., :2] / (length * self.angle), depths.unsqueeze(-1) / self.unit]
        return (
            torch.cat([part.expand(*depths.shape, -1) for part in parts], dim=-1)
            .to(places.dtype)
            .reshape(-1, views, tokens, NUMBERS)
        )

    def extra_repr(self) -> str:
        """Return the arguments of the module."""
        return f"unit={self.unit:g}, angle={self.angle:g}, farthest={self.farthest:g}"


def _check(poses: Poses, places: Tensor, depth: Tensor) -> int:
    """The number of tokens, where shapes fit and depths are above 0."""
    batch, views = poses.shape[:-1], poses.shape[-1]
    if len(batch) > 1 or not views:
        raise ValueError(f"poses must be of (views) or (batch, views), 1 view or more, got {poses.shape}")
    if places.ndim not in (2, 3) or places.shape[-1] != 2 or not places.is_floating_point():
        rule = "places must be (x, y) of tokens in floats, (tokens, 2) or (batch, tokens, 2)"
        raise ValueError(f"{rule}, got {places.dtype} {tuple(places.shape)}")
    tokens = places.shape[-2]
    if tokens % views or not tokens:
        raise ValueError(f"tokens must be as many in each of {views} views, got {tokens}")
    if depth.ndim not in (1, 2) or depth.shape[-1] != tokens:
        raise ValueError(f"depth must be ({tokens}) or (batch, {tokens}), got {tuple(depth.shape)}")
    samples = {*batch, *places.shape[:-2], *depth.shape[:-1]} - {1}
    if len(samples) > 1:
        raise ValueError(f"poses, places and depth must have one batch, got {', '.join(map(str, sorted(samples)))}")
    if can_read(depth) and not (depth > 0).all():
        bad = int((~(depth > 0)).sum())
        raise ValueError(f"depth must be above 0, got {bad} of {depth.numel()} that are not")
    return tokens


def _lift(places: Tensor, poses: Poses, each: int) -> Tensor:
    """K^-1 (x, y, 1), directions of rays in the frame of their own cameras, `(batch, tokens, 3)`."""
    flat = torch.cat([places, torch.ones_like(places[..., :1])], dim=-1)
    if poses.intrinsics is None:
        return flat
    return times(torch.linalg.inv(poses.intrinsics).repeat_interleave(each, dim=-3), flat)
