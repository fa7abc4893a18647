"""The transformer for point sets: permutations, translations, padding, concatenated samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from measuring import peak_bytes, slope
from torch import Tensor
from torch.func import functional_call

import torchrope as tr
from torchrope.encodings import ROTARY

WIDE = dict(dtype=torch.float64)
SMALL = dict(num_axes=2, num_outputs=3, dim=48, depth=2, num_heads=2, mlp_dim=32, context_dim=4)
build = partial(tr.Transformer, 5, **SMALL)
NAMES = [*ROTARY, "liere:8", "string:4", "sinusoidal", "sinusoidal+mixed"]
NAMES = [{"comrope-ap": "comrope-ap:4"}.get(name, name) for name in NAMES]
KINDS: dict[str, dict[str, Any]] = {"softmax": dict(), "linear": dict(attention="linear")}
NAMES_AND_KINDS = [*((name, "softmax") for name in NAMES), *(("string:4", kind) for kind in KINDS)]
NAMES_AND_KINDS += [("liere:8", "linear"), ("comrope-ld", "linear"), ("sinusoidal", "linear")]

Data = dict[str, Tensor]


def data(n: int = 7, m: int = 4, batch: int = 2) -> Data:
    return dict(
        x=torch.randn(batch, n, 5, **WIDE),
        positions=4 * torch.rand(batch, n, 2, **WIDE),
        context=torch.randn(batch, m, 4, **WIDE),
        context_positions=4 * torch.rand(batch, m, 2, **WIDE),
    )


def moved(given: Data, offset: Tensor) -> Data:
    return {name: x + offset if "positions" in name else x for name, x in given.items()}


def answers(model: tr.Transformer, given: Data, **others: Tensor) -> Tensor:
    return model(**given, **others)


@pytest.mark.parametrize("output", ["set", "tokens"])
@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS)
def test_outputs_permute_with_tokens_and_positions(name: str, output: str, kind: str) -> None:
    model, given = build(encoding=name, output=output, **KINDS[kind]).double(), data()
    order, other = torch.randperm(7), torch.randperm(4)
    permuted = {each: x[:, other if "context" in each else order] for each, x in given.items()}
    expected = answers(model, given)
    assert expected.shape == ((2, 3) if output == "set" else (2, 7, 3))
    expected = expected if output == "set" else expected[:, order]
    assert (answers(model, permuted) - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS)
def test_relative_encodings_are_translation_invariant(name: str, kind: str) -> None:
    given = data()
    there = moved(given, torch.tensor([[[0.7, -1.9]], [[30.0, 5.0]]], **WIDE))  # each sample elsewhere
    for output in ("set", "tokens"):
        model = build(encoding=name, output=output, **KINDS[kind]).double()
        change = (answers(model, there) - answers(model, given)).abs().max()
        if model.encodings[0].relative and model.absolute is None:
            assert change < 1e-12
        else:
            assert change > 1e-6


def test_relative_encodings_depend_on_positions() -> None:
    given = data()
    stretched = {name: 1.3 * x if "positions" in name else x for name, x in given.items()}
    for name in NAMES:
        model = build(encoding=name).double()
        change = (answers(model, stretched) - answers(model, given)).abs().max()
        assert (change == 0) == (name == "none"), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", ["set", "tokens"])
def test_padding_does_not_change_outputs(output: str, kind: str) -> None:
    model, given = build(output=output, **KINDS[kind]).double(), data()
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0, 0]]).bool()
    context_mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    masks = dict(mask=mask, context_mask=context_mask)
    padded = answers(model, given, **masks)
    for sample in range(2):
        alone = {
            name: x[sample, (context_mask if "context" in name else mask)[sample]].unsqueeze(0)
            for name, x in given.items()
        }
        own = padded[sample] if output == "set" else padded[sample, mask[sample]]
        assert (answers(model, alone)[0] - own).abs().max() < 1e-12
    if output == "tokens":
        assert not padded[~mask].any()
    learned = dict(model.named_parameters())
    expected = torch.autograd.grad(padded.square().sum(), learned.values())
    for what in (torch.nan, torch.inf, 1e30):
        spoiled = {
            name: x.masked_fill(~(context_mask if "context" in name else mask).unsqueeze(-1), what)
            for name, x in given.items()
        }
        found = answers(model, spoiled, **masks)
        assert torch.equal(found, padded)
        gradients = torch.autograd.grad(found.square().sum(), learned.values())
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS[-8:])
def test_lists_padded_batches_and_single_samples_are_equal(name: str, kind: str) -> None:
    lengths, others = (4, 1, 6), (2, 5, 1)
    given = data(n=6, m=5, batch=3)
    mask, context_mask = (torch.arange(n) < torch.tensor(own)[:, None] for n, own in ((6, lengths), (5, others)))
    cut = {each: [x[i, : (others if "context" in each else lengths)[i]] for i in range(3)] for each, x in given.items()}
    for output in ("set", "tokens"):
        model = build(encoding=name, output=output, **KINDS[kind]).double()
        packed = model(**cut)
        padded = answers(model, given, mask=mask, context_mask=context_mask)
        for i in range(3):
            alone = answers(model, {each: x[i].unsqueeze(0) for each, x in cut.items()})[0]
            own = padded[i] if output == "set" else padded[i, : lengths[i]]
            assert packed[i].shape == alone.shape
            assert (packed[i] - alone).abs().max() < 1e-12
            assert (own - alone).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_single_token_is_a_valid_sample(kind: str) -> None:
    model = build(**KINDS[kind], output="tokens").double()
    given = data(n=1, m=1)
    assert answers(model, given).isfinite().all()
    here = answers(model, given)
    given["positions"], given["context_positions"] = given["positions"] + 9, given["context_positions"] + 9
    assert (answers(model, given) - here).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mixed", "liere:8", "sinusoidal"])
def test_scale_normalises_units_per_axis(name: str, kind: str) -> None:
    units, given = torch.tensor([0.001, 3600.0], **WIDE), data()
    in_metres_and_seconds = {name: x * units if "positions" in name else x for name, x in given.items()}
    plain = build(encoding=name, **KINDS[kind]).double()
    scaled = build(encoding=name, positions=tr.Lattice(unit=units.tolist()), **KINDS[kind]).double()
    scaled.load_state_dict(plain.state_dict())
    assert (answers(scaled, in_metres_and_seconds) - answers(plain, given)).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["mixed", "liere:8", "comrope-ld", "golden"])
def test_extent_selects_the_lattice_convention_of_the_paper(name: str) -> None:
    """Tokens of a lattice 6 x 4 in millimetres are where a ViT of that lattice has its patches."""
    vit = tr.ViT((6, 4), patch_size=1, dim=48, depth=1, num_heads=2, encoding=name, pool="mean")
    model = build(encoding=name, positions=tr.Lattice(unit=(5.0, 0.5)), input_size=(30.0, 2.0))
    expected = tr.grid(6, 4, spacing=vit.position_map.spacing, origin=vit.position_map.origin)
    units = tr.positions.rescale(tr.grid(6, 4, spacing=(5.0, 0.5)), [1 / 5.0, 1 / 0.5])
    assert torch.allclose(model.position_map.at(units), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixed", "softmax"),
        ("axial", "linear"),
        ("string:4", "linear"),
        ("liere:8", "linear"),
        ("comrope-ld", "linear"),
        ("sinusoidal", "softmax"),
        ("sinusoidal+golden", "linear"),
    ],
)
def test_translation_by_a_period_changes_nothing(name: str, kind: str) -> None:
    hours = dict(positions=tr.Lattice(unit=(0.5, 2.0), periods=(24.0, None)))
    model, given = build(encoding=name, **hours, **KINDS[kind]).double(), data()
    given["positions"][..., 0] *= 5
    days = {each: x.clone() for each, x in given.items()}
    days["positions"][:, ::2, 0] += 24  # some of the tokens, a day later
    days["context_positions"][:, 1, 0] -= 48
    assert (answers(model, days) - answers(model, given)).abs().max() < 1e-9
    days["positions"][:, 0, 1] += 24
    assert (answers(model, days) - answers(model, given)).abs().max() > 1e-6


def test_periods_have_data_units_for_any_extent() -> None:
    golden = build(
        encoding="golden", positions=tr.Lattice(unit=(0.5, 2.0), periods=(24.0, None)), input_size=(24.0, 100.0)
    )
    assert golden.encodings[0].periods == pytest.approx((2.0, None))  # 48 tokens, [-1, 1] long
    assert isinstance(golden.encodings[0], tr.encodings.Periodic)
    assert build(encoding="liere:8", positions=tr.Lattice(periods=(24.0, None))).encodings[0].num_axes == 3
    assert build(encoding="liere:8", positions=tr.Lattice(periods=(None, None))).encodings[0].num_axes == 2


def test_shared_encoding_computes_each_rotation_once() -> None:
    model, calls = build(share_layers=True, output="tokens").double(), []
    assert len(model.encodings) == 1
    model.encodings[0].register_forward_hook(lambda *_: calls.append(1))
    answers(model, data())
    assert len(calls) == 2  # of tokens and context
    own = build(output="tokens")
    assert len(own.encodings) == len(own.layers) == 2 * 2


def test_positions_may_be_shared_by_all_samples() -> None:
    for kind, settings in KINDS.items():
        model, given = build(**settings).double(), data()
        shared = {name: x[0] if "positions" in name else x for name, x in given.items()}
        repeated = {name: x[:1].expand_as(x) if "positions" in name else x for name, x in given.items()}
        assert torch.allclose(answers(model, shared), answers(model, repeated), atol=1e-12), kind
        mask = torch.rand(2, 7) > 0.3
        mask[:, 0] = True
        found = answers(model, shared, mask=mask) - answers(model, repeated, mask=mask)
        assert found.abs().max() < 1e-12, kind


def test_gradients_of_all_parameters_are_exact() -> None:
    model, given = build(output="tokens", dim=8, mlp_dim=8, depth=1).double(), data(n=3, m=2, batch=1)
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def answer(*values: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, values, strict=True)), kwargs=given)

    assert torch.autograd.gradcheck(answer, values, fast_mode=True)
    assert all(gradient.any() for gradient in torch.autograd.grad(answer(*values).square().sum(), values))


def test_dropout_and_drop_path_act_only_in_training() -> None:
    model, given = build(dropout=0.2, attention_dropout=0.2, drop_path=0.5, layer_scale=0.1).double(), data()
    assert not torch.equal(answers(model, given), answers(model, given))
    assert [layer.drop_path.p for layer in model.layers] == pytest.approx([0, 0.5 / 3, 1 / 3, 0.5])
    model.eval()
    assert torch.equal(answers(model, given), answers(model, given))


@pytest.mark.slow
def test_transformer_compiles_into_one_graph() -> None:
    model = build(depth=1, positions=tr.Lattice(periods=(24.0, None)), attention="linear")
    given = {name: x.float() for name, x in data().items()}
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0]]).bool()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(**given, mask=mask), model(**given, mask=mask), atol=1e-5)


def test_transformer_checkpoints_and_builds_on_meta() -> None:
    model = build(encoding="mixed", positions=tr.Lattice(periods=(24.0, None)))
    given = {name: x.float() for name, x in data().items()}
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0]]).bool()
    again = build(encoding="mixed", positions=tr.Lattice(periods=(24.0, None)), checkpoint_layers=True)
    again.load_state_dict(model.state_dict())
    for each in (model, again):
        each(**given, mask=mask).square().sum().backward()
    gradients, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (again, model))
    assert all(torch.allclose(gradients[name], expected[name], atol=1e-6) for name in expected)


def test_features_are_the_input_of_the_head() -> None:
    for output in ("set", "tokens"):
        model, given = build(output=output).double(), data()
        assert torch.equal(model.head(model.features(**given)), answers(model, given))
    samples = [torch.randn(2, 5), torch.randn(3, 5)]
    model = tr.Transformer(5, num_axes=1, dim=16, depth=1, num_heads=2, output="tokens")
    assert [tuple(x.shape) for x in model(samples, [torch.rand(2, 1), torch.rand(3, 1)])] == [(2, 16), (3, 16)]


NO_TOKENS = torch.tensor([[True, False], [False, False]])
HOLES = torch.tensor([[[0.0, 0.0], [torch.nan, 0.0]], [[0.0, torch.inf], [torch.nan, 1.0]]])
plain = partial(tr.Transformer, 5, num_axes=2, dim=16, depth=1, num_heads=2)
X, P = torch.zeros(2, 2, 5), torch.zeros(2, 2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plain(encoding="learned"), "must not have a learned table or a score bias.* got 'learned'"),
        (lambda: plain(encoding="bias+mixed"), r"need a lattice.* got 'bias\+mixed'"),
        (lambda: plain(encoding="mxed"), "did you mean 'mixed'"),
        (lambda: plain(output="all"), "output must be 'set' or 'tokens', got 'all'"),
        (lambda: plain(attention="flash"), "attention must be 'softmax' or 'linear', got 'flash'"),
        (
            lambda: plain(attention="linear", attention_dropout=0.1),
            "attention_dropout must be 0 for linear attention, got 0.1",
        ),
        (lambda: tr.Transformer(0, num_axes=2), "in_channels must be 1 or more, got 0"),
        (lambda: tr.Transformer(5, num_axes=2, dim=10, num_heads=4), "dim must be divisible by num_heads = 4, got 10"),
        (lambda: plain(positions=tr.Lattice(unit=(1.0, 0.0))), r"unit must be above 0 and finite, got \(1.0, 0.0\)"),
        (lambda: plain(positions=tr.Lattice(unit=(1.0,))), r"unit must be one number or one per axis \(2\), got 1"),
        (lambda: plain(input_size=-1.0), "input_size must be above 0 and finite, got -1.0"),
        (lambda: plain(positions=tr.Lattice(periods=(24.0,))), r"periods must be one per axis \(2\)"),
        (lambda: plain()(X[..., :4], P), r"tokens must be \(batch, n, 5\), got \(2, 2, 4\)"),
        (lambda: plain()(X, P[..., :1]), r"must be \(2, 2, 2\) or \(2, 2\), got \(2, 2, 1\)"),
        (lambda: plain()(X, P, mask=torch.ones(2, 2)), r"must be boolean \(2, 2\), got torch.float32 \(2, 2\)"),
        (lambda: plain()(X, P, mask=NO_TOKENS), r"1 valid token or more, got 1 of 2 samples without \(tokens\)"),
        (lambda: plain()(X[:, :0], P[:, :0]), r"1 valid token or more, got 2 of 2 samples without \(tokens\)"),
        (lambda: plain()([X[0], X[0, :0]], [P[0], P[0, :0]]), "1 valid token or more, got 1 of 2 samples without"),
        (lambda: plain()(X, HOLES), "positions must be finite, got NaN or infinity in 3 of 4 valid tokens"),
        (
            lambda: plain()(X, HOLES, mask=torch.tensor([[True, False], [True, True]])),
            "positions must be finite, got NaN or infinity in 2 of 3 valid tokens; leave such tokens out",
        ),
        (lambda: plain()(X / 0, P), "tokens must be finite, got NaN or infinity in 4 of 4 valid tokens"),
        (lambda: plain()([], []), "a list of tokens must hold one sample or more, and positions for each, got 0 and 0"),
        (lambda: plain()([X[0]], [P[0]] * 2), "and positions for each, got 1 and 2"),
        (lambda: plain()([X[0]], P), "must both be tensors or both lists of samples, got one of each"),
        (lambda: plain()([X[0]], [P[0, :1]]), r"positions \(n, 2\), got \(2, 5\) with \(1, 2\)"),
        (
            lambda: plain()([X[0]], [P[0]], mask=NO_TOKENS),
            "mask must be None for a list of samples, got a mask of the tokens",
        ),
        (lambda: plain()(X, P, context=X, context_positions=P), "got context and positions"),
        (lambda: plain(context_dim=5)(X, P), "model with context_dim, else be None, got none"),
        (lambda: plain(context_dim=5)(X, P, context=X), "else be None, got context"),
        (
            lambda: plain(context_dim=5)(X, P, context=X, context_positions=HOLES),
            "positions of the context must be finite, got NaN or infinity in 3 of 4",
        ),
        (
            lambda: plain(context_dim=5)(X, P, context=X[:1], context_positions=P[:1]),
            "tensors or lists of as many samples, got 2 and 1 samples",
        ),
    ],
)
def test_bad_input_raises_one_line_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        call()
    assert "\n" not in str(told.value)


@pytest.mark.slow
def test_memory_of_100000_tokens_is_a_few_hundred_megabytes() -> None:
    model = tr.Transformer(
        6, num_axes=3, num_outputs=4, dim=32, depth=2, num_heads=2, attention="linear", checkpoint_layers=True
    )

    def step(n: int) -> None:
        mask = torch.rand(1, n) > 0.1
        model(torch.randn(1, n, 6), torch.rand(1, n, 3), mask=mask).square().sum().backward()

    sizes = (25_000, 100_000)
    peaks = [peak_bytes(partial(step, n), "cpu") for n in sizes]
    assert peaks[1] < 0.4e9  # the scores of all pairs would be 40 GB a head and layer
    assert slope(sizes, peaks) < 1.05
