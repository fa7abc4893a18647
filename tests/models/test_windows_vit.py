"""Windows in a ViT: positions of the whole image, masks against dense attention, lattices not divisible by windows."""

import math
from functools import partial

import pytest
import torch
from published import exp_dense
from torch import Tensor

import torchrope as tr
from torchrope.attention import Attention, Windows

tiny = partial(tr.ViT, (32, 32), patch_size=4, dim=32, depth=3, num_heads=2, pool="mean", num_outputs=0)
NAMES = ["none", "axial", "mixed", "liere:8", "comrope-ld:4", "string", "learned+mixed", "bias", "bias+mixed"]


def _drawn(name: str, **settings: object) -> tr.ViT:
    """A model in float64, none of whose parameters is at a start that hides something."""
    model = tiny(encoding=name, **settings).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def _images(height: int, width: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, height, width, dtype=torch.float64)


def _window_of(sizes: tuple[int, int], window: tuple[int, int]) -> Tensor:
    """The number of the window that each token of a lattice is in."""
    rows, columns = torch.arange(sizes[0]) // window[0], torch.arange(sizes[1]) // window[1]
    return (rows.unsqueeze(1) * sizes[1] + columns).flatten()


def _dense(model: tr.ViT, x: Tensor, window: tuple[int, int], global_layers: tuple[int, ...]) -> Tensor:
    """The last map by attention among all tokens with a block-diagonal mask and dense rotations of all places."""
    sizes = model.embed.lattice(x.shape[2:])
    tokens = model.embedded(x)
    number = _window_of(sizes, window)
    together = number.unsqueeze(1) == number
    for index, layer in enumerate(model.layers):
        q, k, v = layer.attention.qkv(layer.norm1(tokens)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).double()
        turn = exp_dense(model.encodings[index].generators(), model.positions(sizes).double(), q.shape[-1])
        turn = turn.expand(2, -1, -1, -1)  # (heads, tokens, channels, channels)
        q, k = (torch.einsum("htij,bhtj->bhti", turn, each) for each in (q, k))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if len(model.biases):
            scores = scores + model.biases[index](*sizes)
        if index + 1 not in global_layers:
            scores = scores.masked_fill(~together, -math.inf)
        mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        tokens = tokens + layer.attention.proj(mixed)
        tokens = tokens + layer.mlp(layer.norm2(tokens))
    return tokens.mT.unflatten(2, sizes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [8, (9, 12), 100])
def test_window_as_large_as_the_lattice_is_global_attention(name: str, window: int | tuple[int, int]) -> None:
    model, x = _drawn(name), _images(32, 24)
    windowed = model.feature_maps(x, [1, -1], window_size=window)
    for ours, everywhere in zip(windowed, model.feature_maps(x, [1, -1]), strict=True):
        assert (ours - everywhere).abs().max() < 1e-10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "window", [(4, 2), (3, 5), *(pytest.param(window, marks=pytest.mark.slow) for window in ((1, 1), (8, 3)))]
)
@pytest.mark.parametrize("global_layers", [(), (2,), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_windows_equal_masked_global_attention(
    name: str, window: tuple[int, int], global_layers: tuple[int, ...]
) -> None:
    model, x = _drawn(name), _images(32, 40)  # a lattice of 8 x 10, past the training's 8 x 8
    ours = model.feature_maps(x, [-1], norm=False, window_size=window, global_layers=global_layers)[0]
    expected = _dense(model, x, window, global_layers)
    assert (ours - expected).abs().max() < 1e-10 * expected.abs().max()


def test_windows_with_noncommuting_generators_see_their_position() -> None:
    """LieRE's scores depend on absolute places: the same patches in another window attend otherwise."""
    x = _images(32, 32)
    x[:, :, 16:] = x[:, :, :16]
    for name, alike in (("liere:8", False), ("mixed", True)):
        model = _drawn(name)
        first = model.feature_maps(x, [1], norm=False, window_size=4)[0]
        assert torch.allclose(first[:, :, :4], first[:, :, 4:], atol=1e-4) == alike, name


@pytest.mark.parametrize("sizes", [(5, 7), (8, 8), (3, 9)])
def test_windowed_attention_keeps_the_order_of_tokens(sizes: tuple[int, int]) -> None:
    attention = Attention(16, 2).double()
    x = torch.randn(2, math.prod(sizes), 16, dtype=torch.float64)
    alone = attention(x, within=Windows.fit(sizes, (1, 1)))
    values = attention.qkv(x)[..., 32:]
    assert torch.allclose(alone, attention.proj(values))


def test_padding_is_masked_and_windows_of_padding_are_finite() -> None:
    model = _drawn("mixed", checkpoint_layers=True).train()
    x = _images(32, 32).requires_grad_()
    valid = torch.zeros(2, 8, 8, dtype=torch.bool)
    valid[0, :3, :5], valid[1, :8, :2] = True, True
    maps = model.feature_maps(x, [-1], valid_mask=valid, window_size=4, global_layers=(2,))[0]
    assert maps.isfinite().all()
    maps.movedim(1, -1)[valid].square().sum().backward()
    pixels = valid.repeat_interleave(4, 1).repeat_interleave(4, 2).unsqueeze(1)
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad * ~pixels).abs().max() == 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_window_tokens_attend_to_valid_tokens_and_themselves() -> None:
    window = Windows.fit((3, 4), (2, 3))  # filled up to 4 x 6
    there = torch.rand(2, 3, 4) > 0.5
    there[0, :2, :3] = False
    seen = window.seen(there)
    assert seen.shape == (2, 4, 6, 6)
    assert seen.diagonal(dim1=-2, dim2=-1).all()
    filled = torch.zeros(2, 4, 6, dtype=torch.bool)
    filled[:, :3, :4] = there
    for index, (row, column) in enumerate(((0, 0), (0, 3), (2, 0), (2, 3))):
        keys = filled[:, row : row + 2, column : column + 3].flatten(1)
        others = ~torch.eye(6, dtype=torch.bool)
        assert torch.equal(seen[:, index] & others, keys.unsqueeze(1).expand(-1, 6, -1) & others)


def test_windows_reject_prefix_tokens() -> None:
    model = tiny(encoding="mixed", num_registers=2).eval()
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match="windows must be None for a model with prefix tokens, got 2 of them"):
        model.feature_maps(x, [-1], window_size=4)
    model.drop_prefix()
    assert model.feature_maps(x, [-1], window_size=4)[0].shape == (1, 32, 8, 8)
    with pytest.raises(ValueError, match=r"window_size must be 1 or more, one integer or .*, got 0"):
        model.feature_maps(x, [-1], window_size=0)


@pytest.mark.parametrize("sizes", [(4, 4), (6, 3), (9, 10)])
def test_bias_of_a_window_is_part_of_the_lattice_bias(sizes: tuple[int, int]) -> None:
    bias = tr.RelativePositionBias(sizes=(5, 5), num_heads=2)
    places = tr.positions.windows(torch.arange(math.prod(sizes)).unsqueeze(1), sizes, sizes).flatten()
    rows, columns = places // sizes[1], places % sizes[1]
    inside = places[(rows < 2) & (columns < 3)]
    assert torch.equal(bias(*sizes, window=(2, 3)), bias(*sizes)[:, inside][:, :, inside])
