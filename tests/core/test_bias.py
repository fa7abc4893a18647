"""Relative position bias: Swin's table, other lattice sizes, names, and its use in a ViT."""

from itertools import product

import pytest
import torch
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table, resize_rel_pos_bias_table_simple
from timm.models.beit import Attention as BeitAttention
from timm.models.swin_transformer import get_relative_position_index
from torch.nn import functional

import torchrope as tr


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (3, 1), (2, 3, 2)])
def test_bias_depends_on_offsets_in_row_major_order(sizes: tuple[int, ...]) -> None:
    bias = tr.RelativePositionBias(sizes=sizes, num_heads=2)
    offsets = list(product(*(range(1 - size, size) for size in sizes)))
    places = list(product(*map(range, sizes)))
    values = bias(*sizes)
    for (i, query), (j, key) in product(enumerate(places), repeat=2):
        offset = tuple(a - b for a, b in zip(query, key, strict=True))
        assert torch.equal(values[:, i, j], bias.table[offsets.index(offset)])


@pytest.mark.parametrize("window", [(4, 5), (2, 3), (1, 5), (4, 1)])
def test_bias_of_a_window_is_a_part_of_the_lattice(window: tuple[int, ...]) -> None:
    bias = tr.RelativePositionBias(sizes=(4, 5), num_heads=2)
    inside = torch.zeros(4, 5, dtype=torch.bool)
    inside[: window[0], : window[1]] = True
    tokens = inside.flatten().nonzero().flatten()
    assert torch.equal(bias(4, 5, window=window), bias(4, 5)[:, tokens][:, :, tokens])


def test_bias_has_the_order_of_timm() -> None:
    bias = tr.RelativePositionBias(sizes=(3, 4), num_heads=5)
    theirs = bias.table[get_relative_position_index(3, 4).flatten()].unflatten(0, (12, 12)).permute(2, 0, 1)
    assert torch.equal(bias(3, 4), theirs)


def test_bias_table_is_enlarged_as_by_the_swin_authors() -> None:
    bias = tr.RelativePositionBias(sizes=(7, 7), num_heads=3).double()
    wide = tr.RelativePositionBias(sizes=(12, 12), num_heads=3).double()
    with torch.no_grad():
        wide.table.copy_(resize_rel_pos_bias_table_simple(bias.table, (12, 12), (23 * 23, 3)))
    assert torch.allclose(bias(12, 12), wide(12, 12), atol=1e-14)


def test_bias_of_smaller_lattices_keeps_each_offset() -> None:
    bias = tr.RelativePositionBias(sizes=(4, 5, 3), num_heads=2)
    tokens = torch.arange(60).reshape(4, 5, 3)[:2, :5, :1].flatten()
    assert torch.equal(bias(2, 5, 1), bias(4, 5, 3)[:, tokens][:, :, tokens])


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # timm's own
def test_bias_of_smaller_lattices_is_close_to_timm_and_beit() -> None:
    bias = tr.RelativePositionBias(sizes=(7, 7), num_heads=1)
    with torch.no_grad():
        bias.table.copy_(torch.cos(tr.grid(13, 13).sum(dim=-1, keepdim=True) / 4))
    small = tr.RelativePositionBias(sizes=(4, 4), num_heads=1)
    with torch.no_grad():
        small.table.copy_(resize_rel_pos_bias_table(bias.table, (4, 4), (49, 1)))
    assert (bias(4, 4) - small(4, 4)).abs().max() < 0.02
    stretched = functional.interpolate(bias.table.mT.reshape(1, 1, 13, 13), size=(7, 7), mode="bicubic")
    assert (stretched.flatten() - small.table.flatten()).abs().max() > 0.5


def test_bias_resizes_each_axis_separately() -> None:
    bias = tr.RelativePositionBias(sizes=(4, 4), num_heads=1).double()
    slope = tr.grid(7, 7).double()
    with torch.no_grad():
        bias.table.copy_(slope[:, :1])  # varies along axis 0 only
    other = bias(2, 9).unflatten(1, (2, 9)).unflatten(3, (2, 9))[0]
    rows = torch.arange(2.0).double()
    expected = (3 + rows.unsqueeze(1) - rows).reshape(2, 1, 2, 1).expand_as(other)
    assert torch.allclose(other, expected, atol=1e-12)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 5), (6, 6)])
def test_bias_gradients_reach_the_table_at_every_size(sizes: tuple[int, int]) -> None:
    bias = tr.RelativePositionBias(sizes=(3, 3), num_heads=2).double()
    bias(*sizes).sum().backward()
    tokens = sizes[0] * sizes[1]
    assert bias.table.grad.sum(dim=0).tolist() == pytest.approx([tokens**2] * 2)


def test_parse_encoding_accepts_a_bias_with_others() -> None:
    every = tr.encodings.parse_encoding("learned + bias + liere:8")
    assert every.parts == [tr.LearnedAPE, tr.RelativePositionBias, tr.LieRE]
    assert tr.encodings.parse_encoding("bias").parts == [tr.RelativePositionBias]
    assert tr.encodings.parse_encoding("bias").rotary is tr.NoEncoding
    assert tr.encodings.parse_encoding("mixed").bias is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tr.encodings.parse_encoding("bias+mixed+bias"),
            "one score bias and one rotary name, joined by '\\+', got 'bias\\+mixed\\+bias'",
        ),
        (lambda: tr.encodings.parse_encoding("bias:8"), "got 'bias:8'; did you mean 'bias'"),
        (lambda: tr.RelativePositionBias(sizes=(), num_heads=1), r"must be 1 or more, got sizes \(\), num_heads 1"),
        (lambda: tr.RelativePositionBias(sizes=(2, 0), num_heads=1), r"must be 1 or more, got sizes \(2, 0\)"),
        (lambda: tr.RelativePositionBias(sizes=(2,), num_heads=0), "must be 1 or more, got sizes .*, num_heads 0"),
        (
            lambda: tr.RelativePositionBias(sizes=(2, 2), num_heads=1)(2),
            "RelativePositionBias needs 2 sizes, one per axis, got 1",
        ),
    ],
)
def test_bias_refuses_invalid_arguments_in_one_line(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def _vit(**settings: object) -> tr.ViT:
    base = dict(patch_size=2, in_channels=1, num_outputs=5, dim=16, depth=2, num_heads=2, mlp_dim=16)
    return tr.ViT((6, 8), **{**base, **settings})


def test_vit_bias_is_zero_for_the_class_token_as_in_beit() -> None:
    model = _vit(encoding="bias+mixed")
    ours = model.score_biases((3, 4))
    for bias, values in zip(model.biases, ours, strict=True):
        theirs = BeitAttention(16, num_heads=2, window_size=(3, 4))
        with torch.no_grad():
            theirs.relative_position_bias_table.copy_(functional.pad(bias.table, (0, 0, 0, 3)))
        assert torch.equal(values, theirs._get_rel_pos_bias()[0])
    assert not torch.equal(*ours)


def test_vit_adds_its_bias_at_any_size() -> None:
    model = _vit(encoding="bias").eval()
    plain = _vit(encoding="none").eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "biases" not in name})
    x = torch.randn(3, 1, 6, 8)
    with torch.no_grad():
        for bias in model.biases:
            bias.table.zero_()
    assert torch.allclose(model(x), plain(x), atol=1e-5)
    with torch.no_grad():
        model.biases[0].table.normal_()
    assert not torch.allclose(model(x), plain(x), atol=1e-3)
    for size in ((6, 8), (4, 10)):
        model(torch.randn(1, 1, *size)).sum().backward()
        assert model.biases[0].table.grad.abs().sum() > 0


def test_vit_class_token_has_no_bias() -> None:
    model = _vit(encoding="bias", depth=1).eval()  # one layer: the class token has not yet attended to changed patches
    x = torch.randn(3, 1, 6, 8)
    before = model(x)
    with torch.no_grad():
        model.biases[0].table.normal_()
    assert torch.allclose(model(x), before, atol=1e-6)
