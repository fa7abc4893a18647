"""Encoding of camera and body poses: rigid motions and projections applied to queries, keys, values and outputs."""

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrope.encodings.base import Encoding, Positions, require_all, require_finite
from torchrope.ops.pairs import Pair
from torchrope.rotating import apply
from torchrope.rotations import Block, Rotation, Transform
from torchrope.tensors import can_read, wide_dtype, without_autocast

ORTHOGONAL = 1e-3
"""Largest allowed error of R^T R - I: float16 rotations are accepted and made orthogonal."""
SINGULAR = 1e-12
"""Smallest allowed determinant of intrinsics, relative to the product of their row norms."""


@dataclass(frozen=True, eq=False)
class Poses:
    """Poses of views, cameras or bodies:  x_camera = R x_world + t,  and pixels  u ~ K x_camera.

    Args:
        rotation: R, `(*batch, views, 3, 3)`, or quaternions (w, x, y, z), `(*batch, views, 4)`, of any nonzero length.
            Without a translation, matrices [R t; 0 1], `(*batch, views, 4, 4)`.
        translation: t in the unit of the data, `(*batch, views, 3)`.
        intrinsics: K, `(*batch, views, 3, 3)`, or `(3, 3)` shared by all views; None for bodies or identical cameras.
        image_size: Height and width of an image in pixels. If given, K is rescaled to map to [-1/2, 1/2] instead of
            pixels, so that its entries are about 1 (PRoPE, section 3.3).
        camera_to_world: Whether the given R and t are of the inverse, x_world = R x_camera + t, as in NeRF's files.

    Attributes:
        rotation: R, `(*batch, views, 3, 3)`, float64 (float32 on MPS), orthogonal.
        translation: t, `(*batch, views, 3)`.
        intrinsics: K, `(*batch, views, 3, 3)`, in units of the image if image_size was given, or None.

    Raises:
        ValueError: wrong shapes; matrices that are not rotations; a zero quaternion; NaN or infinity; singular
            intrinsics. Values are not checked on a GPU, which would have to synchronise, nor inside torch.compile.

    Example:
        >>> import torch
        >>> Poses(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.zeros(1, 3)).rotation[0].diagonal().tolist()
        [1.0, 1.0, 1.0]
    """

    rotation: Tensor
    translation: Tensor = None  # type: ignore[assignment]  # part of a matrix (4, 4)
    intrinsics: Tensor | None = None
    image_size: InitVar[tuple[int, int] | None] = None
    camera_to_world: InitVar[bool] = False

    def __post_init__(self, image_size: tuple[int, int] | None, camera_to_world: bool) -> None:
        rotation, translation = self.rotation, self.translation
        if translation is None:
            rotation, translation = _split(rotation)
        views = translation.shape[:-1]
        if not views or translation.shape[-1] != 3 or rotation.shape not in ((*views, 3, 3), (*views, 4)):
            rule = "rotations must be matrices (*batch, views, 3, 3) or quaternions (*batch, views, 4)"
            shapes = f"{tuple(rotation.shape)} and {tuple(translation.shape)}"
            raise ValueError(f"{rule} with translations (*batch, views, 3), got {shapes}")
        require_finite("translations", translation)
        orthogonal = from_quaternions if rotation.shape[-1] == 4 else _orthogonal
        rotation, translation = orthogonal(_double(rotation)), _double(translation)
        if camera_to_world:
            rotation, translation = rotation.mT, -times(rotation.mT, translation)
        object.__setattr__(self, "rotation", rotation)
        object.__setattr__(self, "translation", translation)
        if self.intrinsics is not None:
            object.__setattr__(self, "intrinsics", self._check_intrinsics(_double(self.intrinsics), image_size))

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch and views, `(*batch, views)`."""
        return tuple(self.translation.shape[:-1])

    def centres(self) -> Tensor:
        """Return the camera centres in world coordinates, c = -R^T t, `(*batch, views, 3)`."""
        return -times(self.rotation.mT, self.translation)

    def moved(self, rotation: Tensor, translation: Tensor) -> "Poses":
        """Apply a rigid motion x_world -> G x_world + h to the world,  G `(*batch, 3, 3)`,  h `(*batch, 3)`.

        Scores and outputs are invariant to it.
        """
        moved_rotation = self.rotation @ _double(rotation).mT.unsqueeze(-3)
        moved_translation = self.translation - times(moved_rotation, _double(translation).unsqueeze(-2))
        return replace(self, rotation=moved_rotation, translation=moved_translation)

    def of_views(self, index: Tensor) -> "Poses":
        """Select views of each sample by indices `(batch, views)`, possibly repeated."""
        samples = torch.arange(len(index), device=index.device).unsqueeze(-1)

        def select(x: Tensor, ndim: int) -> Tensor:
            return x.expand(len(index), *x.shape[-ndim - 1 :])[samples, index]

        intrinsics = None if self.intrinsics is None else select(self.intrinsics, 2)
        return Poses(select(self.rotation, 2), select(self.translation, 1), intrinsics)

    def matrices(self, origin: Tensor, unit: float = 1.0) -> tuple[Tensor, Tensor]:
        """Compute `P = [K 0; 0 1] [R (R o + t) / unit; 0 1]`, from world coordinates about o to a camera, and P^-1.

        Args:
            origin: o, `(*batch, 1, 3)`.
            unit: Unit of length.

        Returns:
            Two tensors `(*batch, views, 4, 4)`.
        """
        shift = (times(self.rotation, origin) + self.translation) / unit
        to_camera, to_world = _affine(self.rotation, shift), _affine(self.rotation.mT, -times(self.rotation.mT, shift))
        if self.intrinsics is None:
            return to_camera, to_world
        zero = torch.zeros_like(shift)
        project, unproject = _affine(self.intrinsics, zero), _affine(torch.linalg.inv(self.intrinsics), zero)
        return project @ to_camera, to_world @ unproject

    def _check_intrinsics(self, intrinsics: Tensor, image_size: tuple[int, int] | None) -> Tensor:
        """Return K of every view, in units of the image; raise if it is not invertible."""
        if intrinsics.shape not in ((*self.shape, 3, 3), (3, 3)):
            rule = f"intrinsics must be {(*self.shape, 3, 3)} or (3, 3)"
            raise ValueError(f"{rule}, got {tuple(intrinsics.shape)}")
        require_finite("intrinsics", intrinsics)
        if image_size is not None:
            height, width = image_size
            if min(height, width) < 1:
                raise ValueError(f"image_size must be a height and a width of 1 or more, got {image_size}")
            to_units = [[1 / width, 0, -0.5], [0, 1 / height, -0.5], [0, 0, 1]]
            intrinsics = intrinsics.new_tensor(to_units) @ intrinsics
        volume = torch.linalg.det(intrinsics).abs()
        row_norms = torch.linalg.vector_norm(intrinsics, dim=-1).prod(dim=-1)
        require_all(volume > SINGULAR * row_norms, "intrinsics must be invertible, got singular ones in {}")
        return intrinsics.expand(*self.shape, 3, 3)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PoseAction(Transform):
    """Action returned by `PoseEncoding`:  A = diag(P^-1, ..., P^-1, R(p)),  P a token's pose, p its image position.

    q' = A_m^-T q,  k' = A_n k,  so that  q'^T k' = q^T A_m^-1 A_n k,  and  y = A_m^-1 sum_n w_mn A_n v.

    Attributes:
        to_camera: P, `(*batch, views, 4, 4)`, shared by the tokens of a view.
        to_world: P^-1, `(*batch, views, 4, 4)`.
        origin: Origin of the world coordinates, `(*batch, 1, 3)`; that of queries and keys must be equal.
        tokens_per_view: Number of consecutive tokens per view.
        pose_dim: Number of channels multiplied by P in groups of 4, the first ones.
        pixels: The rotation of the other channels; None leaves them unchanged.
    """

    acts_on_values: ClassVar[bool] = True

    to_camera: Tensor
    to_world: Tensor
    origin: Tensor
    tokens_per_view: int
    pose_dim: int
    pixels: Rotation | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, views, _, _ = self.to_camera.shape
        return (*batch, 1, views * self.tokens_per_view)

    def encode(self, x: Pair) -> tuple[Tensor, Tensor]:
        return x.separately(
            lambda q: self._apply(q, self.to_camera.mT, self.pixels),
            lambda k: self._apply(k, self.to_world, self.pixels),
        )

    def values(self, v: Tensor, *, layout: str = "bhtd") -> Tensor:
        return self._apply(v, self.to_world, self.pixels, layout)

    def outputs(self, y: Tensor, *, layout: str = "bhtd") -> Tensor:
        return self._apply(y, self.to_camera, None if self.pixels is None else self.pixels.inverse(), layout)

    def match(self, keys: Transform, x: Pair) -> bool:
        super().match(keys, x)
        assert isinstance(keys, PoseAction)
        same = keys.origin is self.origin or not can_read(self.origin) or torch.equal(keys.origin, self.origin)
        if not same or (keys.head_dim, keys.pose_dim) != (self.head_dim, self.pose_dim):
            rule = "keys must have the sizes and the origin of queries: call the encoding with origin=action.origin"
            received = f"{keys.head_dim} and {keys.pose_dim} channels{'' if same else ' with another origin'}"
            raise ValueError(f"{rule}, got {received}")
        return False

    def _apply(self, x: Tensor, views: Tensor, pixels: Rotation | None, layout: str = "bhtd") -> Tensor:
        if x.ndim < 3 or x.shape[-1] != self.head_dim:
            raise ValueError(f"x must be (batch, heads, tokens, {self.head_dim}), got {tuple(x.shape)}")
        # The kernels of `Block` apply any matrix, not only orthogonal ones; 16 numbers per token cost little memory.
        table = views.to(wide_dtype(x)).repeat_interleave(self.tokens_per_view, dim=-3)
        blocks = table.unsqueeze(-4).unsqueeze(-3).expand(*table.shape[:-3], 1, -1, self.pose_dim // 4, 4, 4)
        pose = Block(table=blocks, head_dim=self.pose_dim, num_heads=1)
        if self.pose_dim == self.head_dim:
            return apply(x, pose, layout=layout)
        first, rest = x.split([self.pose_dim, self.head_dim - self.pose_dim], dim=-1)
        rotated = rest if pixels is None else apply(rest, pixels, layout=layout)
        return torch.cat([apply(first, pose, layout=layout), rotated], dim=-1)


class PoseEncoding(nn.Module):
    """Apply the pose of each token to queries, keys, values and outputs; scores depend on relative poses only.

        A = diag(P^-1, ..., P^-1, R(p)),   P = [K 0; 0 1] [R t / unit; 0 1]
        q' = A^-T q,   k' = A k,   v' = A v,   y = A^-1 y'        scores  q_m^T P_m P_n^-1 k_n + ...

    The first `pose_dim` channels of a head are vectors of 4, which P maps from the world to a camera; the others are
    rotated by an encoding of the token's position in its image. Scores and outputs are invariant to rigid motions of
    the world. P is computed in float64 relative to the mean camera centre of a sample, which does not affect scores or
    outputs, and applied in float32, so that coordinates far from zero keep their precision; pass them in float64.

    Args:
        num_heads: Number of attention heads.
        head_dim: Channels per head.
        pixels: Encoding of image positions with `num_heads` heads of `head_dim - pose_dim` channels; None leaves these
            channels unchanged.
        pose_dim: Number of channels for the pose, a multiple of 4; by default those that `pixels` does not use.
        unit: Unit of length, in the unit of translations: about the distance between cameras.

    Raises:
        ValueError: numbers out of range; channels or heads of `pixels` that do not fit.

    References:
        Miyato et al., GTA (arXiv:2310.10375), section 3.1: A also for values and outputs. Li et al., Cameras as
        Relative Positional Encoding (arXiv:2507.10496), section 3.3: P with intrinsics on half of the channels, RoPE of
        x and y on a quarter each.

    Example:
        >>> import torch, torchrope as tr
        >>> pixels = tr.AxialRoPE(num_axes=2, num_heads=2, head_dim=8)
        >>> encoding = tr.geometry.PoseEncoding(num_heads=2, head_dim=16, pixels=pixels)
        >>> cameras = tr.geometry.Poses(torch.eye(3).expand(5, 3, 3), torch.randn(5, 3))  # 5 views of 4 tokens
        >>> action = encoding(cameras, tr.grid(2, 2).repeat(5, 1))
        >>> q, k, v = torch.randn(3, 1, 2, 20, 16)
        >>> rotated_q, rotated_k = tr.rotate(q, k, action)
        >>> weights = (rotated_q @ rotated_k.mT / 4).softmax(dim=-1)
        >>> action.outputs(weights @ action.values(v)).shape
        torch.Size([1, 2, 20, 16])
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        pixels: Encoding | None = None,
        pose_dim: int | None = None,
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads must be 1 or more, got {num_heads}")
        remaining = head_dim - (0 if pixels is None else pixels.head_dim)
        pose_dim = remaining if pose_dim is None else pose_dim
        check_pose_dim(pose_dim, head_dim)
        if pixels is not None and (pixels.num_heads, pixels.head_dim) != (num_heads, head_dim - pose_dim):
            rule = f"pixels must be an encoding of {num_heads} heads of {head_dim - pose_dim} channels"
            raise ValueError(f"{rule}, got {pixels.num_heads} of {pixels.head_dim}")
        if not 0 < unit < math.inf:
            raise ValueError(f"unit must be above 0 and finite, got {unit}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.pose_dim = pose_dim
        self.pixels = pixels
        self.unit = unit

    def forward(
        self,
        poses: Poses,
        pixels: Positions | None = None,
        *,
        tokens_per_view: int = 1,
        origin: Tensor | None = None,
    ) -> PoseAction:
        """Compute the action of tokens.

        Args:
            poses: Poses `(*batch, views)`; tokens are ordered by view.
            pixels: Positions of all tokens in their images, `(tokens, axes)` or `(batch, tokens, axes)`; they determine
                the number of tokens per view.
            tokens_per_view: Number of tokens per view, used if pixels is None.
            origin: Origin of another action whose queries or keys are compared with those of this one.

        Raises:
            ValueError: image positions without an encoding of them, or vice versa; a number of tokens that is not
                divisible by the number of views.
        """
        if (pixels is None) != (self.pixels is None):
            given = "None" if pixels is None else "positions"
            raise ValueError(
                f"pixels must be given if, and only if, the encoding has an encoding of pixels, got {given}"
            )
        rotation = None if self.pixels is None or pixels is None else self.pixels(pixels)
        action = act(poses, tokens_per_view, self.pose_dim, self.head_dim, self.unit, origin)
        return action if rotation is None else with_pixels(action, rotation)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, pose_dim={self.pose_dim}, unit={self.unit:g}"


def act(
    poses: Poses, tokens_per_view: int, pose_dim: int, head_dim: int, unit: float, origin: Tensor | None = None
) -> PoseAction:
    """Build the action of poses without image positions, relative to the mean camera centre or a given origin."""
    if tokens_per_view < 1:
        raise ValueError(f"tokens_per_view must be 1 or more, got {tokens_per_view}")
    if not poses.shape[-1]:
        raise ValueError(f"poses must be (*batch, views) with 1 view or more, got {poses.shape}")
    origin = poses.centres().mean(dim=-2, keepdim=True).detach() if origin is None else origin
    to_camera, to_world = poses.matrices(origin, unit)
    return PoseAction(
        to_camera=to_camera,
        to_world=to_world,
        origin=origin,
        tokens_per_view=tokens_per_view,
        pose_dim=pose_dim,
        head_dim=head_dim,
    )


def with_pixels(action: PoseAction, pixels: Rotation) -> PoseAction:
    """Add the rotation of image positions to an action; every view must have equally many."""
    views, tokens = action.to_camera.shape[-3], pixels.shape[-1]
    if tokens % views:
        raise ValueError(f"tokens must be divisible among {views} views, got {tokens}")
    return replace(action, pixels=pixels, tokens_per_view=tokens // views)


def check_pose_dim(pose_dim: int, head_dim: int) -> None:
    """Raise if the channels are not a multiple of 4 or more than a head has."""
    if pose_dim < 4 or pose_dim % 4 or pose_dim > head_dim:
        raise ValueError(f"pose_dim must be a multiple of 4 from 4 to head_dim = {head_dim}, got {pose_dim}")


def _split(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return R and t of matrices [R t; 0 1], `(*batch, views, 4, 4)`."""
    if matrices.ndim < 3 or matrices.shape[-2:] != (4, 4):
        rule = "poses without a translation must be matrices (*batch, views, 4, 4)"
        raise ValueError(f"{rule}, got {tuple(matrices.shape)}")
    last = matrices[..., 3, :]
    # An inverse has it up to rounding.
    if can_read(last) and not torch.allclose(last, last.new_tensor([0, 0, 0, 1]), atol=1e-5):
        raise ValueError("the last row of matrices (4, 4) must be 0, 0, 0, 1, got other numbers")
    return matrices[..., :3, :3], matrices[..., :3, 3]


def from_quaternions(quaternions: Tensor) -> Tensor:
    """Convert quaternions (w, x, y, z) `(..., 4)` of any nonzero length to rotation matrices `(..., 3, 3)`.

    R = I + 2 (w [n]x + [n]x [n]x) / |q|^2,  n = (x, y, z).
    """
    require_finite("quaternions", quaternions)
    largest = quaternions.detach().abs().amax(dim=-1, keepdim=True)
    require_all(largest > 0, "quaternions must not be zero, got {}")
    scaled = quaternions / largest  # avoids underflow and overflow of squares
    w, x, y, z = (scaled / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)).unbind(-1)
    rows: Sequence[tuple[Tensor, ...]] = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def _orthogonal(rotation: Tensor) -> Tensor:
    """Validate rotations and make them orthogonal; each Newton step squares the error."""
    require_finite("rotations", rotation)
    identity = torch.eye(3, dtype=rotation.dtype, device=rotation.device)
    with without_autocast(rotation):
        error = (rotation.mT @ rotation - identity).detach().abs().flatten(-2).amax(dim=-1)
        valid = (error <= ORTHOGONAL) & (torch.linalg.det(rotation.detach()) > 0)
        if can_read(valid) and not valid.all():
            bad, most = int((~valid).sum()), error.max().item()
            rule = f"rotations must be orthogonal with determinant 1, R^T R = I within {ORTHOGONAL:g}"
            raise ValueError(f"{rule}, got {bad} of {valid.numel()} that are not, with errors up to {most:.3g}")
        for _ in range(3):
            rotation = rotation - rotation @ (rotation.mT @ rotation - identity) / 2
    return rotation


def _double(x: Tensor) -> Tensor:
    """Copy to float64, or float32 on MPS; copied because poses are immutable."""
    if x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"poses must be real numbers, got {x.dtype}")
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64, copy=True)


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Compute M v for M `(..., 3, 3)` and v `(..., 3)`."""
    return (matrices * vectors.unsqueeze(-2)).sum(dim=-1)  # not a matmul, which autocast and TensorFloat-32 round


def _affine(linear: Tensor, translation: Tensor) -> Tensor:
    """Return the matrices [L t; 0 1]."""
    top = torch.cat([linear, translation.unsqueeze(-1)], dim=-1)
    last = top.new_tensor([0.0, 0.0, 0.0, 1.0]).expand(*top.shape[:-2], 1, 4)
    return torch.cat([top, last], dim=-2)
