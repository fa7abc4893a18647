"""Layouts: bthd, packed projections and jagged tensors give the results of bhtd, sample by sample."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import torchrope as tr

SIZES: dict[str, Any] = dict(num_axes=2, num_heads=2, head_dim=8)
FAMILIES = {
    "mixed": tr.MixedRoPE,
    "liere:4": partial(tr.LieRE, block_size=4),
    "comrope-ld:4": partial(tr.ComRoPELD, block_size=4),
    "string": tr.STRING,
}
LENGTHS = (3, 5, 1)


def made(family: str, dtype: torch.dtype = torch.float64) -> tr.Encoding:
    return FAMILIES[family](**SIZES).to(dtype)


def jagged(samples: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bthd_layout_gives_the_same_values_and_gradients(family: str, dtype: torch.dtype) -> None:
    encoding = made(family, torch.promote_types(dtype, torch.float32))
    qkv = torch.randn(3, 7, 3, 2, 8, dtype=dtype, requires_grad=True)  # (batch, tokens, 3, heads, head_dim)
    q, k, _ = qkv.unbind(2)
    positions = torch.randn(3, 7, 2, dtype=encoding.generators().dtype)
    turned = tr.rotate(q, k, encoding(positions), layout="bthd")
    expected = tr.rotate(q.transpose(1, 2), k.transpose(1, 2), encoding(positions), layout="bhtd")
    alone = tr.apply(q, encoding(positions), layout="bthd")
    weight = torch.randn(2, 3, 7, 2, 8, dtype=dtype)
    gradients = []
    for pair in (turned, [x.transpose(1, 2) for x in expected]):
        loss = (torch.stack(list(pair)) * weight).sum()
        gradients.append(torch.autograd.grad(loss, [qkv, *encoding.parameters()]))
    for mine, other in zip(turned, expected, strict=True):
        assert torch.equal(mine, other.transpose(1, 2))
    assert torch.equal(alone, turned[0])
    assert all(map(torch.equal, *gradients))


def test_results_have_the_memory_order_of_their_inputs() -> None:
    rotation = made("mixed", torch.float32)(torch.randn(7, 2))
    q, k, _ = torch.randn(3, 7, 3, 2, 8).unbind(2)
    assert all(x.is_contiguous() for x in tr.rotate(q, k, rotation, layout="bthd"))
    across = torch.randn(3, 2, 8, 7).mT  # neighbouring channels are apart in memory
    assert torch.equal(tr.apply(across, rotation), tr.apply(across.contiguous(), rotation))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_jagged_tensors_rotate_as_their_samples(family: str, layout: str) -> None:
    encoding = made(family)
    positions = [torch.randn(n, 2, dtype=torch.float64) for n in LENGTHS]
    samples = [torch.randn(n, 2, 8, dtype=torch.float64) for n in LENGTHS]
    q = jagged(samples).requires_grad_()
    shown = q if layout == "bthd" else q.transpose(1, 2)
    turned, again = tr.rotate(shown, shown, encoding(jagged(positions)), layout=layout)
    own = turned if layout == "bthd" else turned.transpose(1, 2)
    for mine, x, p in zip(own.unbind(), samples, positions, strict=True):
        assert torch.allclose(mine, tr.apply(x, encoding(p), layout="bthd"), rtol=0, atol=1e-12)
    assert torch.equal(again.values(), turned.values())
    gradients = torch.autograd.grad(own.values().square().sum(), q)[0]
    assert torch.allclose(gradients.values(), 2 * q.values(), rtol=0, atol=1e-12)  # R^T R = 1


def test_jagged_outputs_work_in_attention_with_other_key_lengths() -> None:
    encoding = made("mixed")
    lengths = (2, 4, 6)
    q = [torch.randn(n, 2, 8, dtype=torch.float64) for n in LENGTHS]
    k = [torch.randn(n, 2, 8, dtype=torch.float64) for n in lengths]
    at = [torch.randn(n, 2, dtype=torch.float64) for n in LENGTHS]
    keys_at = [torch.randn(n, 2, dtype=torch.float64) for n in lengths]
    here, there = encoding(jagged(at)), encoding(jagged(keys_at))
    turned = tr.rotate(jagged(q), jagged(k), here, key_rotation=there, layout="bthd")
    for i, (of_q, of_k) in enumerate(zip(*(x.unbind() for x in turned), strict=True)):
        here, there = encoding(at[i]), encoding(keys_at[i])
        expected = tr.rotate(q[i], k[i], here, key_rotation=there, layout="bthd")
        assert (of_q.transpose(0, 1) @ of_k.permute(1, 2, 0)).allclose(
            expected[0].transpose(0, 1) @ expected[1].permute(1, 2, 0), rtol=0, atol=1e-12
        )


def test_jagged_keys_of_other_lengths_need_their_own_rotation() -> None:
    rule = r"^q and k must have the same number of tokens in each sample unless key_rotation is given, got "
    rotation = made("mixed")(torch.randn(9, 2))
    q, same, other, fewer = (
        jagged([torch.randn(n, 2, 8) for n in lengths]) for lengths in (LENGTHS, LENGTHS, (3, 1, 5), (4, 5))
    )
    rotate = partial(tr.rotate, layout="bthd")
    assert torch.equal(rotate(q, same, rotation)[1].values(), rotate(same, same, rotation)[0].values())
    for k, got in (
        (other, "5 and 1 in sample 1"),
        (fewer, "3 and 2 samples"),
        (torch.randn(1, 9, 2, 8), "a jagged q only"),
    ):
        with pytest.raises(ValueError, match=f"{rule}{got}$"):
            rotate(q, k, rotation)
        rotate(q, k, rotation, key_rotation=rotation)


def test_jagged_tokens_of_other_samples_than_the_positions_are_refused() -> None:
    encoding = made("mixed")
    rotation = encoding(jagged([torch.randn(n, 2) for n in LENGTHS]))
    same, other = (jagged([torch.randn(n, 2, 8) for n in lengths]) for lengths in (LENGTHS, (3, 1, 5)))
    rotate = partial(tr.rotate, layout="bthd")
    rotate(same, same, rotation, key_rotation=encoding(torch.randn(9, 2)))
    for call in (
        lambda: rotate(other, other, rotation),
        lambda: rotate(same, other, rotation, key_rotation=rotation),
        lambda: tr.apply(other, rotation, layout="bthd"),
    ):
        with pytest.raises(ValueError, match=r"positions and tokens must have the same .* got 5 and 1 in sample 1"):
            call()


@pytest.mark.slow
def test_jagged_tensors_compile_without_a_graph_break() -> None:
    encoding = made("mixed", torch.float32)

    def product(qk: Tensor, positions: Tensor) -> Tensor:
        q, k = tr.rotate(*qk.chunk(2, -1), encoding(positions), layout="bthd")
        return q * k

    compiled = torch.compile(product, fullgraph=True, dynamic=True, backend="eager")
    for lengths in (LENGTHS, (5, 3, 1), (4, 2, 9)):
        qk, positions = jagged([torch.randn(n, 2, 16) for n in lengths]), torch.randn(sum(lengths), 2)
        expected = product(qk, positions).values()
        torch.testing.assert_close(compiled(qk, positions).values(), expected, atol=1e-5, rtol=1e-5)


def test_bthd_layout_compiles_into_one_graph() -> None:
    encoding = made("mixed", torch.float32)

    def score(qkv: Tensor, positions: Tensor) -> Tensor:
        q, k = tr.rotate(*qkv.unbind(2)[:2], encoding(positions), layout="bthd")
        return (q * k).sum()

    qkv, positions = torch.randn(1, 2, 3, 2, 8), torch.randn(2, 2)  # as many heads as tokens
    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(qkv, positions), score(qkv, positions))


@pytest.mark.parametrize("family", FAMILIES)
def test_jagged_gradients_equal_those_of_single_samples(family: str) -> None:
    encoding = made(family)
    q, k = torch.randn(2, 4, 2, 7, 8, dtype=torch.float64)
    positions = torch.randn(4, 7, 2, dtype=torch.float64)
    parameters = dict(encoding.named_parameters())

    def score(positions: Tensor, q: Tensor, k: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        q, k = tr.rotate(q, k, functional_call(encoding, parameters, (positions,)))
        return (q @ k.mT).square().sum()

    to_each = grad(score, argnums=(0, 3))
    together = vmap(to_each, in_dims=(0, 0, 0, None))(positions, q, k, parameters)
    for i in range(4):
        alone = to_each(positions[i], q[i], k[i], parameters)
        assert torch.allclose(together[0][i], alone[0], rtol=1e-9, atol=1e-9)
        for name, expected in alone[1].items():
            assert torch.allclose(together[1][name][i], expected, rtol=1e-9, atol=1e-9)


def test_heads_come_first_by_default_also_if_both_layouts_fit() -> None:
    rotation = made("mixed", torch.float32)(torch.randn(2, 2))
    q = torch.randn(1, 2, 2, 8)
    heads_first, tokens_first = (tr.rotate(q, q, rotation, layout=layout)[0] for layout in ("bhtd", "bthd"))
    assert not torch.allclose(heads_first, tokens_first)
    assert torch.equal(tr.rotate(q, q, rotation)[0], heads_first)
    assert torch.equal(tr.apply(q, rotation), heads_first)


@pytest.mark.parametrize(
    ("x", "layout", "message"),
    [
        (torch.zeros(1, 5, 2, 8), "bshd", "layout must be one of bhtd, bthd, got 'bshd'"),
        (torch.zeros(5, 8), "bthd", r"x must be \(batch, tokens, heads, head_dim\) in layout bthd, got \(5, 8\)"),
        (torch.zeros(1, 2, 5, 8), "bthd", "x must have the rotation's 5 tokens, got 2"),
        (torch.zeros(1, 5, 2, 8), "bhtd", "x must have the rotation's 5 tokens, got 2"),
        (jagged([torch.zeros(5, 2, 8)]), "bhtd", "x must be jagged in its tokens, dimension 2 of layout bhtd, got 1"),
        (jagged([torch.zeros(4, 2, 8)]), "bthd", "x must have the rotation's 5 tokens, got 4"),
        (jagged([torch.zeros(5, 8)]), "bthd", "x must be jagged with 4 dimensions if it is nested, got 3"),
        (
            torch.nested.nested_tensor_from_jagged(torch.zeros(5, 2, 8), torch.tensor([0, 5]), torch.tensor([4])),
            "bthd",
            r"x must be a jagged tensor without gaps, got one with lengths; call contiguous\(\)",
        ),
    ],
)
def test_wrong_layout_raises_one_line_error(x: Tensor, layout: str, message: str) -> None:
    rotation = made("mixed", torch.float32)(torch.randn(5, 2))
    with pytest.raises(ValueError, match=message):
        tr.apply(x, rotation, layout=layout)
