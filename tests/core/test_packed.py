"""Packed samples of several sizes: outputs equal those of single samples, and samples are independent."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torchrope as tr
from torchrope.encodings import ABSOLUTE, ROTARY

SIZES = [(8, 8), (4, 12), (6, 2)]
NAMES = [*ROTARY, *ABSOLUTE, "liere:8", "learned+mixed", "bias", "bias+string"]

image = partial(tr.ViT, (8, 8), patch_size=2, in_channels=2, num_outputs=5, dim=32, depth=2, num_heads=2, mlp_dim=32)


def samples(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, *size, dtype=dtype) for size in SIZES]


def one_at_a_time(model: tr.ViT, xs: list[Tensor]) -> Tensor:
    return torch.cat([model(x.unsqueeze(0)) for x in xs])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", NAMES)
def test_packed_logits_and_gradients_match_single_samples(name: str, dtype: torch.dtype, tolerance: float) -> None:
    dim = 24 if name == "nd" else 32  # divisible by three directions
    model = image(encoding=name, dim=dim, num_registers=1, embedding_norm=True).to(dtype)
    model.eval()  # tables may be jittered in training
    xs = samples(dtype)
    packed, alone = model(xs), one_at_a_time(model, xs)
    assert packed.shape == (3, 5)
    assert (packed - alone).abs().max() < tolerance
    weight = torch.randn_like(alone)
    gradients = (torch.autograd.grad((logits * weight).sum(), list(model.parameters())) for logits in (packed, alone))
    for mine, expected in zip(*gradients, strict=True):
        assert (mine - expected).abs().max() <= tolerance * max(10 * expected.abs().max().item(), 1.0)


@pytest.mark.parametrize("settings", [dict(pool="mean"), dict(pool="mean", num_registers=2), dict(num_outputs=0)])
def test_packed_samples_pool_their_own_tokens(settings: dict) -> None:
    model = image(encoding="string", **settings).eval()
    xs = samples()
    assert (model(xs) - one_at_a_time(model, xs)).abs().max() < 1e-5


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_packed_pooling_uses_the_class_token_or_patches_only(pool: str) -> None:
    model = image(encoding="axial", num_outputs=0, num_registers=2, pool=pool).eval()
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    features = model(samples())
    front = 2 + (pool == "cls")
    parts = seen[0][0].split([front + h * w // 4 for h, w in SIZES])
    expected = [tokens[0] if pool == "cls" else tokens[front:].mean(dim=0) for tokens in parts]
    assert torch.allclose(features, torch.stack(expected), atol=1e-6)


def test_packed_samples_are_independent() -> None:
    model = image(encoding="mixed").eval()
    xs = samples()
    before = model(xs)
    xs[1] = xs[1] + 10
    after = model(xs)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.allclose(after[1], before[1], atol=1e-3)
    first = samples()[0].requires_grad_()
    (leak,) = torch.autograd.grad(model([first, *xs[1:]])[1:].sum(), first)
    assert not leak.any()


def test_packed_model_accepts_batches_of_one_and_three_axes() -> None:
    model = image(encoding="axial").eval()
    xs = samples()
    assert torch.equal(model([x.unsqueeze(0) for x in xs]), model(xs))
    video = tr.ViT(
        (4, 4, 4), patch_size=2, in_channels=1, num_outputs=3, dim=48, depth=1, num_heads=2, encoding="mrope"
    )
    clips = [torch.randn(1, 2, 4, 6), torch.randn(1, 4, 4, 2)]
    assert (video(clips) - one_at_a_time(video, clips)).abs().max() < 1e-5


@pytest.mark.slow
def test_packed_model_compiles_into_one_graph() -> None:
    model = image(encoding="mixed").eval()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    xs = samples()
    assert (compiled(xs) - model(xs)).abs().max() < 1e-5


def test_packed_drop_path_is_drawn_per_sample() -> None:
    drop = tr.models.layers.DropPath(0.5)
    outputs = drop(torch.ones(1, 600, 4), lengths=[1, 2] * 200)[0]
    firsts, pairs = outputs[0::3], torch.stack([outputs[1::3], outputs[2::3]])
    assert torch.equal(pairs[0], pairs[1])
    assert torch.equal(outputs, outputs[:, :1].expand(-1, 4))
    for part in (firsts, pairs[0]):
        assert sorted(part.unique().tolist()) == [0, 2]
        assert part.mean().item() == pytest.approx(1, abs=0.2)


def lattices() -> list[Tensor]:
    return [tr.prefix(tr.grid(*size), 1) for size in ((2, 3), (4, 1), (3, 3))]


def test_packed_positions_hold_sample_offsets() -> None:
    packed = tr.pack(lattices())
    assert packed.lengths == (7, 5, 10)
    assert torch.equal(packed.positions, torch.cat(lattices()))
    assert packed.cu_seqlens.tolist() == [0, 7, 12, 22]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.samples.tolist() == [0] * 7 + [1] * 5 + [2] * 10
    blocks = torch.block_diag(*(torch.ones(n, n) for n in packed.lengths))
    assert torch.equal(packed.mask(), blocks.bool())


@pytest.mark.parametrize("family", [tr.MixedRoPE, tr.LieRE, tr.STRING, tr.ComRoPELD])
def test_packed_mask_is_accepted_by_any_attention(family: type[tr.Encoding]) -> None:
    encoding = family(num_axes=2, num_heads=2, head_dim=8)
    packed = tr.pack(lattices())
    q, k, v = torch.randn(3, 1, 2, 22, 8).unbind(0)
    together = functional.scaled_dot_product_attention(
        *tr.rotate(q, k, encoding(packed.positions)), v, attn_mask=packed.mask()
    )
    parts = zip(lattices(), *(x.split(packed.lengths, dim=-2) for x in (q, k, v, together)), strict=True)
    for positions, of_q, of_k, of_v, mixed in parts:
        alone = functional.scaled_dot_product_attention(*tr.rotate(of_q, of_k, encoding(positions)), of_v)
        assert (mixed - alone).abs().max() < 1e-5


def test_packed_attention_equals_masked_attention() -> None:
    attention = tr.Attention(16, 2)
    packed = tr.pack(lattices())
    rotation = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)(packed.positions)
    x = torch.randn(1, 22, 16)
    masked = attention(x, rotation, bias=packed.mask())
    assert (attention(x, rotation, lengths=packed.lengths) - masked).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tr.pack([]), r"pack needs one or more positions \(tokens, axes\) of the same axes, got \[\]"),
        (lambda: tr.pack(tr.grid(2)), r"of the same axes, got \[\(1,\), \(1,\)\]"),  # type: ignore[arg-type]
        (lambda: tr.pack([tr.grid(2), tr.grid(2, 2)]), r"of the same axes, got \[\(2, 1\), \(4, 2\)\]"),
        (lambda: image()([]), "a list of samples must hold one or more, got an empty list"),
        (
            lambda: image()([torch.zeros(3, 2, 8, 8)]),
            r"samples of a list must be \(in_channels, \*sizes\), 2 sizes, got \(3, 2, 8, 8\)",
        ),
        (lambda: image()([torch.zeros(2, 8, 7)]), r"multiples of the patch \(2, 2\), got \(8, 7\)"),
        (
            lambda: tr.Attention(16, 2)(torch.zeros(1, 5, 16), lengths=(2, 2)),
            "lengths must add up to the 5 tokens, got 4 of 2 samples",
        ),
        (
            lambda: tr.Attention(16, 2)(torch.zeros(1, 8, 16), lengths=(9, -1)),
            r"lengths must be 0 or more, got \[9, -1\]",
        ),
        (
            lambda: tr.Attention(16, 2)(torch.zeros(1, 4, 16), lengths=(2, 2), bias=torch.zeros(4, 4)),
            "packed samples need one bias each, 2 in all, got one for all",
        ),
    ],
)
def test_pack_refuses_invalid_samples_in_one_line(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
