"""Baselines of the papers against their formulas; the scale of random initialisation."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torchrope as tr
from torchrope.encodings import baselines
from torchrope.encodings.base import upper_triangle
from torchrope.encodings.resample import sample_table

SIZES = dict(num_axes=2, num_heads=64, head_dim=64)
RANDOM = {
    "mixed": tr.MixedRoPE,
    "liere": partial(tr.LieRE, block_size=8),
    "liere, normal": partial(baselines.comrope_liere, block_size=8),
    "comrope-ap": tr.ComRoPEAP,
    "comrope-ld": tr.ComRoPELD,
    "string": tr.STRING,
}


def angles_across_image(sizes: tuple[int, ...], encoding: tr.Encoding) -> Tensor:
    """Return the angle of each pair across the training image, along its axis."""
    generators, positions = encoding.generators(), encoding.lattice(*sizes)
    width = positions.amax(dim=0) - positions.amin(dim=0)
    return (generators[:, 0, :, 1, 0] * width.unsqueeze(1)).amax(dim=0)


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_vanilla_rope_matches_comrope_equation_33(num_axes: int) -> None:
    n = 64 // (2 * num_axes)
    encoding = baselines.comrope_rope(num_axes=num_axes, num_heads=1, head_dim=2 * n * num_axes)
    theta = 10_000.0 ** (-torch.arange(n, dtype=torch.float64) / n)
    for pair in range(n * num_axes):  # ComRoPE-AP's partition: block j belongs to axis j mod N
        expected = torch.zeros(num_axes, dtype=torch.float64)
        expected[pair % num_axes] = theta[pair // num_axes]
        assert torch.allclose(encoding.frequencies[:, pair].double(), expected)


def test_vanilla_rope_and_axial_angles_across_the_image() -> None:
    sizes = (14, 14)
    vanilla = angles_across_image(sizes, baselines.comrope_rope(**SIZES))
    axial = angles_across_image(sizes, tr.AxialRoPE(**SIZES))
    assert vanilla.max().item() == pytest.approx(13 / 14, rel=1e-3)  # between the centres of the outer patches
    assert vanilla.min().item() == pytest.approx(13 / 14 * 10_000 ** (-15 / 16), rel=1e-3)
    assert axial.max().item() == pytest.approx(13, rel=1e-3)
    assert axial.min().item() == pytest.approx(13 * 100 ** (-15 / 16), rel=1e-3)


@pytest.mark.parametrize("family", [baselines.comrope_rope, baselines.comrope_liere])
def test_comrope_baselines_share_its_lattice(family: Callable[..., tr.Encoding]) -> None:
    lattice = family(num_axes=2, num_heads=1, head_dim=8).lattice
    assert lattice == tr.ComRoPELD(num_axes=2, num_heads=1, head_dim=8).lattice
    positions = lattice(4, 8)
    assert torch.allclose(positions[0], torch.tensor([1 / 8, 1 / 16]))
    assert torch.allclose(positions + positions.flip(0), torch.ones(1))


def test_normal_liere_is_initialised_as_p_minus_its_transpose() -> None:
    values = upper_triangle(baselines.comrope_liere(**SIZES, block_size=8).generators()).detach()
    matrices = torch.randn(values.shape[0] * 64 * 8, 8, 8)
    expected = upper_triangle(matrices - matrices.mT)
    assert values.mean().abs() < 0.05
    assert values.std().item() == pytest.approx(expected.std().item(), rel=0.03)
    within = (values.abs() < 1).double().mean().item()
    assert within == pytest.approx(math.erf(0.5), abs=0.02)  # erf(1 / (√2 σ)) of a normal distribution


def test_visionllama_matches_the_baseline_of_the_liere_code() -> None:
    encoding = baselines.visionllama(num_axes=3, num_heads=2, head_dim=64, rotary_dim=60)
    theta = torch.exp(-4 * torch.linspace(0, 1, 10, dtype=torch.float64))
    for axis in range(3):
        own = slice(10 * axis, 10 * (axis + 1))
        assert torch.allclose(encoding.frequencies[axis, own].double(), theta)
    assert encoding.frequencies.count_nonzero() == 30
    assert baselines.visionllama(num_axes=2, num_heads=1, head_dim=4).frequencies.tolist() == [[1, 0], [0, 1]]
    assert encoding.lattice == tr.LieRE(num_axes=3, num_heads=2, head_dim=6).lattice == tr.Lattice(per="size")
    with pytest.raises(ValueError, match=r"divisible by 2·num_axes = 6, got 64; rotary_dim=60 would leave the rest"):
        baselines.visionllama(num_axes=3, num_heads=2, head_dim=64)


@pytest.mark.parametrize("name", RANDOM)
def test_init_scale_multiplies_the_initial_generators(name: str) -> None:
    drawn = []
    for scale in (1.0, 0.25):
        torch.manual_seed(0)
        drawn.append(RANDOM[name](**SIZES, init_scale=scale).generators().detach())
    assert drawn[0].abs().max() > 0.5
    torch.testing.assert_close(drawn[1], 0.25 * drawn[0])
    torch.manual_seed(0)
    assert torch.equal(RANDOM[name](**SIZES).generators(), drawn[0])


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", RANDOM)
def test_init_scale_must_be_positive_and_finite(name: str, scale: float) -> None:
    with pytest.raises(ValueError, match=r"^init_scale must be above 0 and finite, got \S+; zero_\(\) .*$"):
        RANDOM[name](**SIZES, init_scale=scale)


@pytest.mark.parametrize("sizes", [(5,), (4, 6), (3, 4, 5), (1, 6), (2, 3, 2, 3)])
def test_sample_table_is_multilinear(sizes: tuple[int, ...]) -> None:
    table = torch.randn(*sizes, 3, dtype=torch.float64)
    last = torch.tensor(sizes, dtype=torch.float64) - 1
    places = torch.rand(50, len(sizes), dtype=torch.float64) * (last + 2) - 1  # up to one index outside
    places[: table[..., 0].numel()] = tr.grid(*sizes, dtype=torch.float64)[:50]
    mine = sample_table(table, places)
    whole = table[..., 0].numel()
    assert torch.equal(mine[:whole], table.flatten(0, -2)[:50])
    if len(sizes) in (2, 3):
        volume = table.movedim(-1, 0).unsqueeze(0)
        shares = (2 * places / last.clamp(min=1) - 1).flip(-1)  # grid_sample expects the last axis first
        shaped = shares.reshape(*(1,) * len(sizes), 50, len(sizes))
        theirs = functional.grid_sample(volume, shaped, align_corners=True, padding_mode="border")
        assert torch.allclose(mine, theirs.reshape(3, 50).T)


def test_jittered_ape_jitters_within_its_cell_in_training_only() -> None:
    table = baselines.learned_jittered(sizes=(5, 7), dim=2)
    with torch.no_grad():
        table.table.copy_(tr.grid(5, 7).unflatten(0, (5, 7)))  # each entry is its own index
    lattice = tr.grid(5, 7)
    assert torch.equal(table.eval()(5, 7), lattice)
    seen = torch.stack([table.train()(5, 7) for _ in range(200)]).detach()
    off = seen - lattice
    assert off.abs().max() <= 0.5 + 1e-6
    inner = off.unflatten(1, (5, 7))[:, 1:-1, 1:-1]
    assert inner.mean().abs() < 0.02
    assert (inner.abs() > 0.499).double().mean().item() == pytest.approx(2 * (1 - 0.8413), abs=0.03)  # |n| > 1
    assert seen.amin() == 0  # clamped at the edge
    assert seen.flatten(0, 1).amax(dim=0).tolist() == pytest.approx([4, 6])


def test_jittered_ape_without_cell_or_intensity_is_learned_ape() -> None:
    video = baselines.learned_jittered(sizes=(3, 4), dim=6, cell=(0.0, 1.0))
    with torch.no_grad():
        video.table.copy_(torch.arange(3.0).reshape(3, 1, 1).expand(3, 4, 6))  # constant along the second axis
    torch.testing.assert_close(video.train()(3, 4), video.eval()(3, 4))
    still = tr.LearnedAPE(sizes=(3, 4), dim=6, intensity=0.0).train()
    plain = tr.LearnedAPE(sizes=(3, 4), dim=6)
    plain.load_state_dict(still.state_dict())
    for sizes in ((3, 4), (6, 5)):
        torch.testing.assert_close(still(*sizes), plain(*sizes))
    with pytest.raises(ValueError, match=r"^intensity must be 0 or more, got -1$"):
        tr.LearnedAPE(sizes=(3, 4), dim=6, intensity=-1)


def test_jittered_ape_gradients_reach_neighbouring_entries() -> None:
    encoding = baselines.learned_jittered(sizes=(4, 4), dim=3).train()
    encoding(4, 4).sum().backward()
    assert encoding.table.grad is not None
    assert encoding.table.grad.sum().item() == pytest.approx(48)  # interpolation weights of a token sum to 1
    assert (encoding.table.grad >= 0).all()
