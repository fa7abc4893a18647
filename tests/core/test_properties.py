"""Every property for every encoding, and the messages of `testing.check` for common mistakes."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import CASES
from torch import Tensor, nn

import torchrope as tr
from torchrope import testing
from torchrope.encodings import planar, skew
from torchrope.rotations import Rotation


def slow_if_compiled(case: str, name: str) -> Any:
    """Mark compilation as slow: it takes longer than all other properties."""
    return pytest.param(case, name, marks=pytest.mark.slow if name == "compiles into one graph" else ())


@pytest.mark.parametrize(
    ("case", "name"), [slow_if_compiled(case, name) for case in CASES for name in testing.PROPERTIES]
)
def test_property_holds(case: str, name: str) -> None:
    try:
        testing.PROPERTIES[name](CASES[case])
    except testing.DoesNotApply as reason:
        pytest.skip(str(reason))


SIZES = dict(num_axes=2, num_heads=2, head_dim=8)


class Correct(tr.Encoding):
    """A correct encoding with blocks of 2; each wrong one below changes one thing."""

    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int, block_size: int = 2) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=block_size)
        self.frequencies = nn.Parameter(torch.ones(num_axes, num_heads, self.num_blocks))
        self.add()
        self.reset_parameters()

    def add(self) -> None:
        """Add what a wrong encoding has in addition."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.frequencies)

    def generators(self) -> Tensor:
        return planar(self.frequencies)


class CorrectBlocks(tr.Encoding):
    """A correct encoding with free blocks of 4."""

    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=4)
        self.upper = nn.Parameter(torch.empty(num_axes, num_heads, self.num_blocks, 6))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.upper)

    def generators(self) -> Tensor:
        return skew(self.upper, 4)

    def load_generators(self, generators: Tensor) -> None:
        rows, columns = torch.triu_indices(4, 4, 1)
        self.upper.copy_(generators[..., rows, columns])


class PlainTensor(Correct):
    def add(self) -> None:
        del self.frequencies
        self.frequencies = torch.empty(self.num_axes, self.num_heads, self.num_blocks)


class ComputedFromParameter(Correct):
    def add(self) -> None:
        self.scaled = self.frequencies * 2

    def generators(self) -> Tensor:
        return planar(self.scaled)


class ListOfParameters(Correct):
    def add(self) -> None:
        self.factors = [nn.Parameter(torch.ones(1))]

    def generators(self) -> Tensor:
        return super().generators() * self.factors[0]


class Detach(Correct):
    def generators(self) -> Tensor:
        return planar(self.frequencies.detach())


class Data(Correct):
    def generators(self) -> Tensor:
        return planar(self.frequencies.data)


class NoGrad(Correct):
    def generators(self) -> Tensor:
        with torch.no_grad():
            return planar(self.frequencies)


class SecondParameter(Correct):
    def generators(self) -> Tensor:
        return nn.Parameter(planar(self.frequencies))


class Item(Correct):
    def generators(self) -> Tensor:
        first = self.frequencies[0, 0, 0].item()
        return planar(torch.full_like(self.frequencies, first, requires_grad=False))


class Branch(Correct):
    def generators(self) -> Tensor:
        return super().generators() if self.frequencies.sum() > -1e9 else -super().generators()


class Unused(Correct):
    def add(self) -> None:
        self.phase = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.phase)


class ComputedInInit(Correct):
    def add(self) -> None:
        self.register_buffer("made", planar(self.frequencies), persistent=False)

    def generators(self) -> Tensor:
        return self.made


class NoReturn(Correct):
    def generators(self) -> Tensor:
        planar(self.frequencies)


class List(Correct):
    def generators(self) -> Tensor:
        return list(planar(self.frequencies))


class Raises(Correct):
    def generators(self) -> Tensor:
        return planar(self.frequency)


class NoSuper(Correct):
    def __init__(self, **sizes: int) -> None:
        self.frequencies = nn.Parameter(torch.empty(2, 2, 4))


class NoSuperPlain(Correct):
    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int) -> None:
        self.num_axes = num_axes


class LateSuper(Correct):
    def __init__(self, **sizes: int) -> None:
        blocks = self.num_blocks
        super().__init__(**sizes)
        self.blocks = blocks


class SuperOfModule(Correct):
    def __init__(self, **sizes: int) -> None:
        nn.Module.__init__(self)


class SuperWithoutSizes(Correct):
    def __init__(self, **sizes: int) -> None:
        tr.Encoding.__init__(self)


class NoGenerators(tr.Encoding):
    pass


class Frequencies(Correct):
    def generators(self) -> Tensor:
        return self.frequencies


class HeadsFirst(Correct):
    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads + 1, head_dim=head_dim)  # heads and axes must differ

    def generators(self) -> Tensor:
        return super().generators().transpose(0, 1)


class AllHeads(Correct):
    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.shared_heads = True


class Complex(Correct):
    def generators(self) -> Tensor:
        return super().generators() * torch.ones((), dtype=torch.complex64, device=self.frequencies.device)


class NotFinite(Correct):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.frequencies, torch.nan)


class Symmetric(Correct):
    def generators(self) -> Tensor:
        return super().generators().abs()


class SymmetricBlocks(CorrectBlocks):
    def generators(self) -> Tensor:
        return super().generators().abs()


class Float32(Correct):
    def generators(self) -> Tensor:
        generators = torch.zeros(*self.frequencies.shape, 2, 2, device=self.frequencies.device)
        generators[..., 1, 0], generators[..., 0, 1] = self.frequencies, -self.frequencies
        return generators


class OnTheCPU(Correct):
    def generators(self) -> Tensor:
        return super().generators() * torch.arange(1.0, 3.0).view(2, 1, 1, 1, 1)


class CreatedInGenerators(tr.Encoding):
    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes, block_size=2)

    def generators(self) -> Tensor:
        return planar(torch.ones(self.num_axes, self.num_heads, self.num_blocks, dtype=torch.float64))


class Random(Correct):
    def generators(self) -> Tensor:
        return super().generators() * (1 + torch.rand(()).to(self.frequencies.device))


class InPlace(Correct):
    def generators(self) -> Tensor:
        self.frequencies.data.mul_(2)
        return super().generators()


class KeepsPositions(Correct):
    longest = 1.0

    def forward(self, positions: Tensor) -> Rotation:
        self.longest = 1.0 + len(positions)
        return super().forward(positions)

    def generators(self) -> Tensor:
        return super().generators() / self.longest


class MovesPositions(Correct):
    def forward(self, positions: Tensor) -> Rotation:
        self.check_positions(positions)
        positions *= 2
        return super().forward(positions)


class OtherFrequencies(Correct):
    def frequencies_per_axis(self) -> Tensor:
        return -self.frequencies


class NoReset(Correct):
    def add(self) -> None:
        nn.init.ones_(self.frequencies)

    reset_parameters = tr.Encoding.reset_parameters


class ResetOfSome(Correct):
    def add(self) -> None:
        self.phase = nn.Parameter(torch.ones(1))

    def generators(self) -> Tensor:
        return super().generators() * self.phase


class ResetToOthers(Correct):
    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        nn.init.ones_(self.frequencies)


class ResetMakesNew(Correct):
    def reset_parameters(self) -> None:
        self.frequencies = nn.Parameter(torch.randn_like(self.frequencies))


class DeviceInInit(Correct):
    def add(self) -> None:
        self.frequencies = nn.Parameter(torch.empty(self.frequencies.shape, device="cpu"))


class ValuesInInit(Correct):
    def add(self) -> None:
        self.largest = self.frequencies.abs().max().item()


class ClaimsToBeRelative(CorrectBlocks):
    relative = True


class ClaimsNotToBeRelative(Correct):
    relative = False


class RelativeMethod(Correct):
    def relative(self) -> bool:
        return True


class TakesNew(CorrectBlocks):
    def load_generators(self, generators: Tensor) -> None:
        rows, columns = torch.triu_indices(4, 4, 1)
        self.upper = nn.Parameter(generators[..., rows, columns].clone())


class TakesOthers(CorrectBlocks):
    def load_generators(self, generators: Tensor) -> None:
        super().load_generators(generators.mT + 1)


class MatrixProduct(Correct):
    def generators(self) -> Tensor:
        return super().generators() @ torch.eye(2, dtype=self.frequencies.dtype, device=self.frequencies.device)


class WrongGradient(Correct):
    def generators(self) -> Tensor:
        return planar(self.frequencies.detach() * 2 - self.frequencies)


class Shifted(Correct):
    def forward(self, positions: Tensor) -> Rotation:
        return super().forward(positions + 0.5)


class Backwards(Correct):
    def forward(self, positions: Tensor) -> Rotation:
        return super().forward(-positions)


class Centred(Correct):
    def forward(self, positions: Tensor) -> Rotation:
        self.check_positions(positions)
        return super().forward(positions - positions.flatten(0, -2)[0])


class FloatsOnly(Correct):
    def forward(self, positions: Tensor) -> Rotation:
        return super().forward(positions if positions.is_floating_point() else 2 * positions)


class TakesAnyPositions(Correct):
    def forward(self, positions: Tensor) -> Rotation:
        return super().forward(positions.nan_to_num(posinf=0.0))


# A wrong encoding, a property that it fails (in its first row the first one), and a part of the message.
TENSORS, SHAPE = "tensors are parameters or buffers", "generators have the promised shape"
DEVICE, ALONE = "generators follow the device and dtype", "generators depend on the parameters alone"
EVERY, RESET = "every parameter changes the generators", "reset parameters draws every parameter"
RELATIVE, TAKES = "scores are relative where claimed", "set generators accepts its own generators"
MISTAKES: list[tuple[type[tr.Encoding], str, str]] = [
    (PlainTensor, TENSORS, r"`self.frequencies` is a plain tensor; wrap it in nn.Parameter"),
    (ComputedFromParameter, TENSORS, r"`self.scaled` was computed from a parameter; keep the parameter"),
    (ListOfParameters, TENSORS, r"`self.factors` is a list, not registered; use nn.ParameterList"),
    (Frequencies, SHAPE, r"b, b\) = \(2, 2, 4, 2, 2\), got \(2, 2, 4\); these are frequencies.*planar"),
    (HeadsFirst, SHAPE, r"got \(3, 2, 4, 2, 2\); the dimensions are in another order"),
    (AllHeads, SHAPE, r"= \(2, 1, 4, 2, 2\), got \(2, 2, 4, 2, 2\); with shared_heads=True there is one head"),
    (Complex, SHAPE, r"real floating point, got torch.complex64"),
    (NotFinite, SHAPE, r"must be finite, got NaN or infinity; does __init__ end with self.reset_parameters\(\)\?"),
    (Symmetric, "generators are skew symmetric", r"got A \+ A\^T of up to \d.*; return x - x.mT, or skew\(upper, b\)"),
    (SymmetricBlocks, "generators are skew symmetric", r"got A \+ A\^T of up to \d"),
    (Float32, DEVICE, r"float64, got torch.float32; a tensor in it is created without device= and dtype="),
    (OnTheCPU, DEVICE, r"a tensor in it is created without device= and dtype="),
    (
        CreatedInGenerators,
        DEVICE,
        r"must be on the module's device, meta, got cpu; a tensor in it is created without device=",
    ),
    (Branch, DEVICE, r"reads values: no .item\(\), float\(\) or `if` on tensors"),
    (Item, DEVICE, r"reads values: no .item\(\), float\(\) or `if` on tensors"),
    (Item, EVERY, r"`frequencies` gets no gradient, because of .item\(\) in generators"),
    (Random, ALONE, r"draws random numbers; draw them in reset_parameters"),
    (InPlace, ALONE, r"changes a tensor in place or keeps state"),
    (KeepsPositions, ALONE, r"forward\(\) changed them; store no positions in self"),
    (MovesPositions, ALONE, r"must not change positions in place"),
    (Detach, EVERY, r"`frequencies` gets no gradient, because of .detach\(\) in generators"),
    (Data, EVERY, r"`frequencies` gets no gradient, because of .data in generators"),
    (NoGrad, EVERY, r"`frequencies` gets no gradient, because of torch.no_grad\(\) in generators"),
    (SecondParameter, EVERY, r"`frequencies` gets no gradient, because of .* a second nn.Parameter"),
    (Unused, EVERY, r"`phase` is not used in generators\(\); use it or remove it"),
    (ComputedInInit, EVERY, r"`frequencies` is used once, before generators\(\) is called"),
    (OtherFrequencies, "frequencies and factors equal the generators", r"frequencies_per_axis.*error 2 exceeds"),
    (NoReset, RESET, r"NoReset does not define it to write `frequencies`"),
    (ResetOfSome, RESET, r"does not write `phase`"),
    (ResetToOthers, RESET, r"must draw the same values as __init__.*end with self.reset_parameters"),
    (ResetMakesNew, RESET, r"made a new `frequencies`; use nn.init"),
    (DeviceInInit, "builds on the meta device", r"`frequencies` came from NumPy, from a copy or with device="),
    (ValuesInInit, "builds on the meta device", r"__init__ must not read values of tensors.*item\(\)"),
    (WrongGradient, "gradients are exact", r"to `frequencies` as built is -0\.0\d+ instead of 0\.0\d+"),
    (ClaimsToBeRelative, RELATIVE, r"got a change of 0\.\d+; let generators.*commute, or let `relative` return False"),
    (ClaimsNotToBeRelative, RELATIVE, r"got [\d.e-]+; if the generators commute, let `relative` return True"),
    (RelativeMethod, RELATIVE, r"got a method; is @property missing\?"),
    (TakesNew, TAKES, r"made a new `upper`, which no optimizer holds; use copy_"),
    (TakesOthers, TAKES, r"generators after set_generators: error [\d.]+ exceeds 0.0001"),
    (MatrixProduct, "autocast changes nothing", r": compute matrix products in generators\(\) under"),
    (SymmetricBlocks, "rotations are orthogonal", r"R\^T R - I: error [\d.e+]+ exceeds 0.0001"),
    (Shifted, "rotations at the origin are the identity", r"R\(0\) must be I, exactly"),
    (Backwards, "rotations equal the matrix exponential", r"R - exp\(sum p A\): error [\d.]+ exceeds 0.0001"),
    (Backwards, "rotate multiplies by the matrix", r"rotate\(x\) - R x: error [\d.]+ exceeds 0.0001"),
    (Centred, "rotations equal the matrix exponential", r"error [\d.]+ exceeds 0.0001"),
    (Centred, "tokens permute with their positions", r"permuted R - R permuted: error [\d.]+ exceeds"),
    (Branch, "compiles into one graph", r"Unsupported: Data-dependent branching"),
    (ComputedFromParameter, "saving and copying keep the generators", r"RuntimeError: Only Tensors created explicitly"),
    (FloatsOnly, "integer positions and no tokens work", r"must give the same rotation as equal floats"),
    (TakesOthers, "zero generators change nothing", r"zero generators must not change q and k, but torch.float64 ones"),
    (TakesAnyPositions, "refuses bad positions", r"positions with nan must raise ValueError.*check_positions"),
]
ONE = Correct(**SIZES)
UNTESTABLE: list[tuple[Callable[[], object], str]] = [
    (partial(NoReturn, **SIZES), r"generators\(\) must return a Tensor, got NoneType; is `return` missing\?"),
    (partial(List, **SIZES), r"generators\(\) must return a Tensor, got list; combine several with torch.stack"),
    (partial(Raises, **SIZES), r"generators\(\) must return a Tensor, got AttributeError.*'frequency'"),
    (partial(NoSuper, **SIZES), r"must begin with super\(\).__init__\(num_axes=.*cannot assign parameters"),
    (partial(NoSuperPlain, **SIZES), r"must begin with super\(\).__init__\(num_axes=.*without _parameters, num_heads"),
    (partial(LateSuper, **SIZES), r"must begin with super\(\).__init__\(num_axes=.*'num_blocks'"),
    (partial(SuperOfModule, **SIZES), r"must begin with super\(\).__init__\(num_axes=.*without num_axes"),
    (partial(SuperWithoutSizes, **SIZES), r"must begin with super\(\).__init__\(num_axes=.*missing 4 required"),
    (partial(NoGenerators, **SIZES, block_size=2), r"must define generators\(\), got TypeError"),
    (
        Correct,
        r"make\(\) must build an encoding without arguments: pass functools.partial\(Correct, num_axes=2, .*, got",
    ),
    (partial(nn.Linear, 2, 2), r"make must build a torchrope.Encoding, got Linear"),
    (lambda: ONE, r"make must build a new Correct at each call"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize(("wrong", "name", "cause"), [pytest.param(*row, id=row[0].__name__) for row in MISTAKES])
def test_check_names_common_mistakes(wrong: type[tr.Encoding], name: str, cause: str) -> None:
    with pytest.raises(AssertionError) as caught:
        testing.check(partial(wrong, **SIZES))
    title, *lines = str(caught.value).splitlines()
    failed = [line.removeprefix("failed      ") for line in lines if line.startswith("failed ")]
    assert f"{len(failed)} of {len(testing.PROPERTIES)} properties failed" in title
    assert len(lines) == len(testing.PROPERTIES)
    assert any(line.startswith("passed      ") for line in lines)
    message = next(line for line in failed if line.startswith(f"{name}: "))
    assert re.search(cause, message), message
    if name == next(first for one, first, _ in MISTAKES if one is wrong):
        assert message == failed[0]


def test_properties_each_fail_for_some_encoding() -> None:
    assert {name for _, name, _ in MISTAKES} == set(testing.PROPERTIES)


@pytest.mark.parametrize(("make", "cause"), UNTESTABLE)
def test_check_fails_early_without_generators(make: Callable[[], tr.Encoding], cause: str) -> None:
    with pytest.raises(AssertionError, match=rf"^no property can be tested: .*{cause}.*$"):
        testing.check(make)


def test_check_refuses_an_instance() -> None:
    with pytest.raises(TypeError, match=r"pass functools.partial\(Correct, num_axes="):
        testing.check(Correct(**SIZES))


def test_check_reports_all_failures_and_exceptions() -> None:
    class Several(Detach, ClaimsNotToBeRelative):
        def forward(self, positions: Tensor) -> Rotation:
            if positions.dtype == torch.long:
                raise RuntimeError("no integers\nsecond line")
            return super().forward(positions)

    with pytest.raises(AssertionError) as caught:
        testing.check(partial(Several, **SIZES))
    lines = str(caught.value).splitlines()
    failed = [line[12:].partition(": ") for line in lines if line.startswith("failed ")]
    assert [name for name, _, _ in failed] == [
        EVERY,
        RELATIVE,
        "gradients are exact",
        "saving and copying keep the generators",  # a class within a function cannot be pickled
        "integer positions and no tokens work",
    ]
    assert failed[-1][2] == "RuntimeError: no integers"
    assert "passed      rotations at the origin are the identity" in lines
    assert any(line.startswith("passed      rotations are orthogonal: error ") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Correct, CorrectBlocks])
def test_check_returns_measured_errors(cls: type[tr.Encoding]) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    result = testing.check(partial(cls, **SIZES))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(result.passed) == [name for name in testing.PROPERTIES if name not in result.skipped]
    assert 0 < result.passed["rotations are orthogonal"].error <= 1e-4
    assert result.passed["rotations at the origin are the identity"] is None
    takes = {TAKES, "zero generators change nothing"}
    assert takes <= set(result.passed if cls is CorrectBlocks else result.skipped)
    title, *lines = str(result).splitlines()
    assert title == f"{cls(**SIZES)}: {len(result.passed)} properties passed, {len(result.skipped)} do not apply"
    assert [line.split(": ")[0][12:] for line in lines] == [*result.passed, *result.skipped]
    shown = r"^passed      rotations are orthogonal: error \S+ in float32, allowed \S+$"
    assert re.search(shown, str(result), re.MULTILINE)
    assert cls is CorrectBlocks or lines[-1].startswith("not tested  zero generators change nothing: load_generators")
