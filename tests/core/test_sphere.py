"""Positions on a sphere: spherical harmonics, and stereographic coordinates for other encodings."""

import math

import pytest
import torch
from torch import Tensor
from torch.special import legendre_polynomial_p

import torchrope as tr
from torchrope.encodings.sphere import spherical_harmonics

WIDE = dict(dtype=torch.float64)


def rotations(count: int) -> Tensor:
    """Return rotations of the sphere, `(count, 3, 3)`, including rotations about the poles and by 180 degrees."""
    q, _ = torch.linalg.qr(torch.randn(count, 3, 3, generator=torch.Generator().manual_seed(3), **WIDE))
    q = q * torch.linalg.det(q)[:, None, None]
    return torch.cat([q, torch.diag(torch.tensor([-1.0, -1.0, 1.0], **WIDE)).unsqueeze(0)])


def places(n: int = 9) -> Tensor:
    """Return unit vectors, with both poles, two equal and two opposite ones."""
    drawn = tr.positions.latlon_to_unit(torch.randn(n, 3, generator=torch.Generator().manual_seed(1), **WIDE))
    poles = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]], **WIDE)
    return torch.cat([drawn, poles, drawn[:1], -drawn[1:2]])


def scores(encoding: tr.Encoding, positions: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, positions.shape[-2], encoding.head_dim, generator=generator, **WIDE).to(dtype)
    q, k = tr.rotate(q, k, encoding(positions), layout="bhtd")
    return q @ k.mT


@pytest.mark.parametrize("degree", [0, 1, 2, 7, 40])
def test_spherical_harmonics_satisfy_the_addition_theorem(degree: int) -> None:
    p = places()
    values = spherical_harmonics(p, degree)
    for each in range(degree + 1):
        own = values[:, each**2 : (each + 1) ** 2]
        truth = legendre_polynomial_p((p @ p.T).clamp(-1, 1), each)
        assert (own @ own.T - truth).abs().max() < 1e-10


@pytest.mark.parametrize("head_dim", [1, 2, 8, 13])
def test_sphere_scores_depend_on_the_angle_only(head_dim: int) -> None:
    encoding = tr.encodings.SphereHarmonics(num_axes=3, num_heads=2, head_dim=head_dim, max_degree=9)
    p = places()
    expected = scores(encoding, p)
    for turn in rotations(5):
        assert (scores(encoding, p @ turn.T) - expected).abs().max() < 1e-10


def test_sphere_scores_match_the_formula() -> None:
    encoding = tr.encodings.SphereHarmonics(num_axes=3, num_heads=2, head_dim=8, max_degree=5)
    assert encoding.degrees() == [0, 1, 1, 2, 3, 4, 4, 5]
    p = places()
    q, k = torch.randn(2, 1, 2, len(p), 8, generator=torch.Generator().manual_seed(0), **WIDE)
    cosines = (p @ p.T).clamp(-1, 1)
    weights = torch.stack([legendre_polynomial_p(cosines, each) for each in encoding.degrees()])
    assert torch.allclose(scores(encoding, p), torch.einsum("bhic,bhjc,cij->bhij", q, k, weights), atol=1e-10)


def test_sphere_rotations_of_the_pole_are_not_invariant() -> None:
    """Blocks of 3 that rotate the pole to p, as in papers: scores depend on more than the angle."""

    def section(p: Tensor) -> Tensor:
        lam, phi = torch.atan2(p[:, 1], p[:, 0]), torch.asin(p[:, 2].clamp(-1, 1))
        rows = [[-lam.sin(), lam.cos(), torch.zeros_like(lam)]]
        rows.append([-phi.sin() * lam.cos(), -phi.sin() * lam.sin(), phi.cos()])
        rows.append([phi.cos() * lam.cos(), phi.cos() * lam.sin(), phi.sin()])
        return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)

    p, turn = places(), rotations(1)[0]
    of, rotated = section(p), section(p @ turn.T)
    assert (torch.einsum("iab,jcb->ijac", of, of) - torch.einsum("iab,jcb->ijac", rotated, rotated)).abs().max() > 0.5


def test_sphere_accepts_latitude_and_longitude() -> None:
    angle_weight = tr.encodings.SphereHarmonics(num_axes=2, num_heads=2, head_dim=8)
    by_vector = tr.encodings.SphereHarmonics(num_axes=3, num_heads=2, head_dim=8)
    degrees = torch.tensor([[0.0, 0.0], [90.0, 17.0], [90.0, -80.0], [-33.0, 151.0], [-33.0, 151.0 - 360]], **WIDE)
    vectors = 6371 * tr.positions.latlon_to_unit(degrees)
    assert torch.allclose(scores(angle_weight, degrees), scores(by_vector, vectors), atol=1e-10)
    moved = degrees + torch.tensor([0.0, 360.0], **WIDE)
    assert (scores(angle_weight, moved.float(), torch.float32) - scores(angle_weight, degrees)).abs().max() < 1e-4


def test_sphere_values_and_gradients_are_finite_at_the_centre() -> None:
    encoding = tr.encodings.SphereHarmonics(num_axes=3, num_heads=2, head_dim=8)
    p = torch.cat([places(), torch.zeros(1, 3, **WIDE)]).requires_grad_()
    values = scores(encoding, p)
    values.sum().backward()
    assert p.grad.isfinite().all()
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, len(p), 8, generator=generator, **WIDE)
    assert torch.allclose(values[..., -1, :-1], q[..., -1:, 0] * k[..., :-1, 0])  # only degree 0
    assert torch.autograd.gradcheck(lambda x: scores(encoding, x), (places(3).requires_grad_(),))
    assert scores(encoding, torch.zeros(0, 3, **WIDE)).shape == (1, 2, 0, 0)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_transformer_on_a_sphere_is_rotation_invariant(attention: str) -> None:
    settings = dict(
        num_axes=3,
        num_outputs=3,
        dim=16,
        depth=2,
        num_heads=2,
        attention=attention,
        positions=tr.Lattice(unit=0.3),
        input_size=2.0,
    )
    model = tr.Transformer(5, encoding="sphere:3", **settings).double()
    x, p = torch.randn(2, 13, 5, **WIDE), places()
    expected = model(x, p)
    assert (model(x, p @ rotations(1)[0].T) - expected).abs().max() < 1e-10
    assert (model(x, p.roll(1, 0)) - expected).abs().max() > 1e-4
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[:, 9:] = False
    assert torch.allclose(model(x, p, mask=mask), model(x[:, :9], p[:9]), atol=1e-12)
    assert torch.allclose(model(list(x), [p, p])[0], expected[0], atol=1e-12)
    weights = tr.Attention(16, 2).double().weights(torch.randn(1, 13, 16, **WIDE), model.encodings[0](p))
    assert torch.allclose(weights.sum(dim=-1), torch.ones((), **WIDE))


def test_stereographic_is_conformal_and_near_isometric() -> None:
    centre = (40.0, -30.0)
    at_centre = torch.tensor(centre, **WIDE)
    steps = torch.tensor([[0.0, 0.0], [1e-3, 0.0], [0.0, 1e-3]], **WIDE)
    flat = tr.positions.stereographic(at_centre + steps, centre)
    expected = [[0, 0], [0, 1e-3], [1e-3 * math.cos(math.radians(40)), 0]]
    assert torch.allclose(flat, torch.tensor(expected, **WIDE), atol=1e-8)
    p = tr.positions.latlon_to_unit(at_centre)
    for q in places():
        gamma = math.acos(min(max(float(p @ q), -1), 1))
        far = tr.positions.stereographic(q.unsqueeze(0), centre).norm().item()
        assert far == pytest.approx(math.degrees(2 * math.tan(gamma / 2)), rel=1e-6)
    rotated = tr.positions.stereographic(
        at_centre + torch.tensor([[20.0, 30.0], [20.001, 30.0], [20.0, 30.001]], **WIDE), centre
    )
    one, other = rotated[1] - rotated[0], rotated[2] - rotated[0]
    assert abs(one @ other / (one.norm() * other.norm())) < 1e-4  # meridian and parallel cross at right angles


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tr.encodings.SphereHarmonics(num_axes=4, num_heads=1, head_dim=4), "num_axes must be 2, .* got 4"),
        (
            lambda: tr.encodings.SphereHarmonics(num_axes=2, num_heads=1, head_dim=4, max_degree=-1),
            "max_degree must be 0 .* -1",
        ),
        (
            lambda: tr.positions.latlon_to_unit(torch.tensor([[91.0, 0.0]])),
            "latitudes must be -90 to 90 degrees, got one of 91",
        ),
        (lambda: tr.positions.latlon_to_unit(torch.zeros(3, 1)), r"points must be latitude .* got \(3, 1\)"),
        (lambda: tr.positions.stereographic(torch.tensor([[-90.0, 0.0]])), "must not be opposite the centre"),
        (
            lambda: tr.encodings.SphereHarmonics(num_axes=2, num_heads=1, head_dim=4).generators(),
            "generators need a rotation",
        ),
        (lambda: tr.parse_encoding("sphere:01"), "max degree must be a whole number of 0 or more, got 'sphere:01'"),
        (lambda: tr.parse_encoding("axial:4"), "only liere, .* sphere take a number, got 'axial:4'"),
        (
            lambda: tr.Transformer(3, num_axes=2, latents=4, encoding="sphere"),
            "latents must be positions, .*SphereHarmonics.*got the number 4",
        ),
        (
            lambda: tr.apply(
                torch.zeros(1, 1, 1, 4),
                tr.encodings.SphereHarmonics(num_axes=2, num_heads=1, head_dim=4)([[0, 0]]),
                layout="bhtd",
            ),
            "one tensor needs a rotation, got Harmonics, which is not one",
        ),
        (
            lambda: tr.encodings.SphereHarmonics(num_axes=2, num_heads=1, head_dim=4)([[0.0, math.nan]]),
            "positions must be finite",
        ),
    ],
)
def test_sphere_refuses_invalid_positions_in_one_line(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_vectors_of_any_length_have_a_direction() -> None:
    lengths = torch.tensor([1e-38, 1e-23, 1e-22, 1.0, 3e19, 3e38]).unsqueeze(-1)
    found = tr.positions.latlon_to_unit(lengths * torch.tensor([0.6, 0.0, -0.8]))
    torch.testing.assert_close(found, torch.tensor([0.6, 0.0, -0.8]).expand(6, 3))
    points = torch.randn(4, 3, **WIDE, requires_grad=True)
    assert torch.autograd.gradcheck(tr.positions.latlon_to_unit, points)


def test_compiles_into_one_graph() -> None:
    encoding, q = tr.encodings.SphereHarmonics(num_axes=2, num_heads=2, head_dim=8), torch.randn(1, 2, 12, 8)

    def turn(q: Tensor) -> Tensor:
        return tr.rotate(q, q, encoding(tr.grid(3, 4)), layout="bhtd")[0]

    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), turn(q))
