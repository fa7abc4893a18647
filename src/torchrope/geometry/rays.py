"""Encoding of camera rays: rotations by the rays of tokens, in the camera frame of the query's view."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.encodings.base import Encoding, require_all
from torchrope.geometry.poses import Poses, times
from torchrope.ops.layouts import heads_first
from torchrope.ops.pairs import Pair
from torchrope.rotating import apply
from torchrope.rotations import Rotation, Transform

NUM_AXES = 6
"""Coordinates of a ray in the frame of a view: camera centre (3), direction (2) and depth."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class RayAction(Transform):
    """Action returned by `RayEncoding`: rotations of tokens by their rays, in the frame of each view.

    Queries, keys and values are returned with the views folded into the batch, so that the queries of a view attend to
    all keys in the frame of that view; `outputs` undoes it.

    Attributes:
        own: Rotation of the tokens of each view in its own frame, `(batch · views)` samples.
        seen: Rotation of all tokens in the frame of each view, `(batch · views)` samples.
        views: Number of views.
    """

    acts_on_values: ClassVar[bool] = True

    own: Rotation
    seen: Rotation
    views: int

    @property
    def shape(self) -> tuple[int, ...]:
        samples, heads, tokens = self.seen.shape
        return samples // self.views, heads, tokens

    def encode(self, x: Pair) -> tuple[Tensor, Tensor]:
        return x.separately(self._queries, self._keys)

    def _queries(self, q: Tensor) -> Tensor:
        by_view = q.unflatten(-2, (self.views, -1)).transpose(1, 2).flatten(0, 1)
        return apply(by_view, self.own)

    def _keys(self, k: Tensor) -> Tensor:
        return apply(k.repeat_interleave(self.views, dim=0), self.seen)

    def values(self, v: Tensor, *, layout: str = "bhtd") -> Tensor:
        x, restore = heads_first("v", v, layout)
        self.check("v", x, None)
        return restore(self._keys(x))

    def outputs(self, y: Tensor, *, layout: str = "bhtd") -> Tensor:
        x, restore = heads_first("y", y, layout)
        return restore(self.join(apply(x, self.own.inverse())))

    def bias(self, bias: Tensor) -> Tensor:
        bias = bias[(None,) * (4 - bias.ndim)]
        if bias.shape[-2] == 1:
            return bias if bias.shape[0] == 1 else bias.repeat_interleave(self.views, dim=0)
        by_view = bias.unflatten(-2, (self.views, -1)).movedim(-3, 1)  # (batch or 1, views, heads or 1, own, keys)
        return by_view.expand(self.own.shape[0] // self.views, *by_view.shape[1:]).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.views)).transpose(1, 2).flatten(2, 3)

    def match(self, keys: Transform, x: Pair) -> bool:
        if keys is not self:
            raise ValueError(f"keys must have the RayAction of the queries, got another {type(keys).__name__}")
        return False

    def check(self, name: str, x: Tensor, other: Tensor | None) -> None:
        batch, _, tokens = self.shape
        if x.ndim != 4 or (x.shape[0], x.shape[-2]) != (batch, tokens):
            rule = f"tokens of rays must be ({batch}, heads, {tokens}, head_dim)"
            raise ValueError(f"{rule}, got {tuple(x.shape)}")
        super().check(name, x, other)


class RayEncoding(nn.Module):
    """Rotate tokens of several views by their rays, in the camera frame of the query's view.

        x_n  = c_n + d_n R_n^T K_n^-1 (u_n, 1)        at depth d on the ray of token n, c its camera centre
        s_vn = (R_v c_n + t_v) / unit,  p_xy / (|p| angle),  p_z / unit       with  p = K_v (R_v x_n + t_v)
        q'_m = R(s_vm) q_m,   k'_n = R(s_vn) k_n,   v'_n = R(s_vn) v_n,   y_m = R(s_vm)^-1 y'_m    v: the view of m

    The 6 numbers s are positions for any encoding of this package. They are invariant to rigid motions of the
    world coordinates; so are scores and outputs. Keys and values are rotated once for each view: the cost of attention
    is unchanged, that of rotations is multiplied by the number of views. Unlike in the paper, depth is
    one number without uncertainty, negative behind a camera, and a token has one ray.

    Args:
        encoding: Encoding with 6 axes, such as `MixedRoPE(num_axes=6, ...)`.
        length_unit: Unit of length, in the unit of translations: about the distance between cameras.
        angle_unit: Unit of directions, in the unit of p_xy / |p|: about the difference between neighbouring tokens.
        max_depth: Largest depth, in units of `length_unit`; larger depths, including infinity, are clamped to it.

    Raises:
        ValueError: an encoding of another number of axes; numbers out of range.

    References:
        Wu et al., RayRoPE (arXiv:2601.15275): coordinates in the frame of the query, values and outputs too.

    Example:
        >>> import torch, torchrope as tr
        >>> encoding = tr.geometry.RayEncoding(tr.MixedRoPE(num_axes=6, num_heads=2, head_dim=16))
        >>> cameras = tr.geometry.Poses(torch.eye(3).expand(1, 5, 3, 3), torch.randn(1, 5, 3))  # 5 views of 4 tokens
        >>> u = torch.tensor([[-0.25, -0.25], [0.25, -0.25], [-0.25, 0.25], [0.25, 0.25]]).repeat(5, 1)
        >>> action = encoding(cameras, u, torch.full((1, 20), 2.0))
        >>> q, k, v = torch.randn(3, 1, 2, 20, 16)
        >>> rotated_q, rotated_k = tr.rotate(q, k, action)
        >>> y = torch.nn.functional.scaled_dot_product_attention(rotated_q, rotated_k, action.values(v))
        >>> action.outputs(y).shape
        torch.Size([1, 2, 20, 16])
    """

    def __init__(
        self, encoding: Encoding, *, length_unit: float = 1.0, angle_unit: float = 0.125, max_depth: float = 10.0
    ) -> None:
        super().__init__()
        if encoding.num_axes != NUM_AXES:
            raise ValueError(f"the encoding of rays must have {NUM_AXES} axes, got {encoding.num_axes}")
        for name, number in dict(length_unit=length_unit, angle_unit=angle_unit, max_depth=max_depth).items():
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {number}")
        self.encoding = encoding
        self.length_unit, self.angle_unit, self.max_depth = length_unit, angle_unit, max_depth

    def forward(self, poses: Poses, pixels: Tensor, depth: Tensor) -> RayAction:
        """Compute the rotations of tokens.

        Args:
            poses: Poses `(views)` or `(batch, views)`; tokens are ordered by view, equally many per view.
            pixels: Image positions (x, y) of tokens, `(tokens, 2)` or `(batch, tokens, 2)`, in the unit that the
                intrinsics map to: [-1/2, 1/2] if `Poses` was given image_size. Their dtype is that of the rotations.
            depth: Depth of a point on each ray, along the optical axis, `(batch, tokens)` or `(tokens)`, in the unit of
                translations, above 0; infinity for the direction only. Differentiable, so it may be predicted.

        Raises:
            ValueError: shapes that do not fit; depths that are not above 0 (checked on CPU only).
        """
        positions = self.positions(poses, pixels, depth)  # (batch, views, tokens, 6)
        views = positions.shape[1]
        index = torch.arange(views, device=positions.device)
        own = positions.unflatten(2, (views, -1))[:, index, index]  # (batch, views, own tokens, 6)
        rotations = dict(own=self.encoding(own.flatten(0, 1)), seen=self.encoding(positions.flatten(0, 1)))
        return RayAction(**rotations, views=views, **self.encoding.head_sizes)

    def positions(self, poses: Poses, pixels: Tensor, depth: Tensor) -> Tensor:
        """Compute s of all tokens in the frame of each view, `(batch, views, tokens, 6)`; arguments as of `forward`."""
        tokens = _check(poses, pixels, depth)
        views = poses.shape[-1]
        inverse_depth = depth.to(poses.translation).clamp(min=0).reciprocal()
        # K^-1 (x, y, 1), directions of rays in the frames of their cameras: (batch, tokens, 3).
        of_camera = functional.pad(pixels.to(poses.translation), (0, 1), value=1.0)
        if poses.intrinsics is not None:
            unproject = torch.linalg.inv(poses.intrinsics).repeat_interleave(tokens // views, dim=-3)
            of_camera = times(unproject, of_camera)
        rotation = poses.rotation.repeat_interleave(tokens // views, dim=-3)
        centres = poses.centres().repeat_interleave(tokens // views, dim=-2)  # (batch, tokens, 3)
        along = times(rotation.mT, of_camera)
        # In the frame of each view: (batch, views, tokens, 3).
        r, t = poses.rotation.unsqueeze(-3), poses.translation.unsqueeze(-2)
        seen_centres = times(r, centres.unsqueeze(-3)) + t
        scaled = times(r, along.unsqueeze(-3)) + inverse_depth[..., None, :, None] * seen_centres  # p / depth
        if poses.intrinsics is not None:
            scaled = times(poses.intrinsics.unsqueeze(-3), scaled)
        length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).clamp(min=torch.finfo(scaled.dtype).tiny)
        most = self.max_depth * self.length_unit
        z = scaled[..., 2]
        near = inverse_depth.unsqueeze(-2)
        # |z / inverse_depth| up to `most`, without a division by 0 for points at infinity.
        far = z.abs() >= most * near
        depths = torch.where(far, most * z.sign(), z / torch.where(far, 1.0, near))
        parts = [
            seen_centres / self.length_unit,
            scaled[..., :2] / (length * self.angle_unit),
            depths.unsqueeze(-1) / self.length_unit,
        ]
        return (
            torch.cat([part.expand(*depths.shape, -1) for part in parts], dim=-1)
            .to(pixels.dtype)
            .reshape(-1, views, tokens, NUM_AXES)
        )

    def extra_repr(self) -> str:
        return f"length_unit={self.length_unit:g}, angle_unit={self.angle_unit:g}, max_depth={self.max_depth:g}"


def _check(poses: Poses, pixels: Tensor, depth: Tensor) -> int:
    """Return the number of tokens; raise if shapes do not fit or depths are not above 0."""
    batch, views = poses.shape[:-1], poses.shape[-1]
    if len(batch) > 1 or not views:
        raise ValueError(f"poses must be (views) or (batch, views), 1 view or more, got {poses.shape}")
    if pixels.ndim not in (2, 3) or pixels.shape[-1] != 2 or not pixels.is_floating_point():
        rule = "pixels must be floating point (x, y) of tokens, (tokens, 2) or (batch, tokens, 2)"
        raise ValueError(f"{rule}, got {pixels.dtype} {tuple(pixels.shape)}")
    tokens = pixels.shape[-2]
    if tokens % views or not tokens:
        raise ValueError(f"tokens must be divisible among {views} views, got {tokens}")
    if depth.ndim not in (1, 2) or depth.shape[-1] != tokens:
        raise ValueError(f"depth must be ({tokens}) or (batch, {tokens}), got {tuple(depth.shape)}")
    samples = {*batch, *pixels.shape[:-2], *depth.shape[:-1]} - {1}
    if len(samples) > 1:
        raise ValueError(
            f"poses, pixels and depth must have the same batch size, got {', '.join(map(str, sorted(samples)))}"
        )
    require_all(depth > 0, "depth must be above 0, got {} that are not")
    return tokens
