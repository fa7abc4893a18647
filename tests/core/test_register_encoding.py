"""Encodings of users by name: everywhere that a name is taken, with errors in one line."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings import FixedFrequencies, planar
from torchrope.encodings.names import annotations_of, arguments_of, takes


class Diagonal(FixedFrequencies):
    """Frequencies of a user along the sum of the coordinates."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        return 0.5 ** torch.arange(self.num_blocks).expand(self.num_axes, self.num_heads, -1)


class Blocks(tr.LieRE):
    """A class without a constructor of its own."""


class Isotropic(tr.Encoding):
    """A class with the constructor of docs/own-encoding.md."""

    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=2)
        self.frequencies = torch.nn.Parameter(torch.empty(num_heads, self.num_blocks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.frequencies)

    def generators(self) -> Tensor:
        return planar(self.frequencies.expand(self.num_axes, -1, -1))


def build(num_axes: int, num_heads: int, head_dim: int) -> tr.Encoding:
    """A function of a user."""
    return tr.LieRE(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=4)


@pytest.mark.parametrize(
    ("added", "kind"),
    [(Diagonal, "Diagonal"), (Isotropic, "Isotropic"), (build, "LieRE"), (partial(Blocks, block_size=4), "Blocks")],
)
def test_registered_name_builds_models_alone_and_in_combinations(added: Callable[..., Any], kind: str) -> None:
    tr.register_encoding("mine", added)
    for name in ("mine", "learned+Mine"):
        model = tr.ViT((8, 8), patch_size=2, in_channels=1, num_outputs=3, dim=32, depth=1, num_heads=2, encoding=name)
        assert type(model.encodings[0]).__name__ == kind
        assert (model.absolute is not None) == name.startswith("learned")
        assert model(torch.randn(2, 1, 8, 8)).shape == (2, 3)


def test_registered_name_takes_a_block_size_if_its_class_does() -> None:
    tr.register_encoding("blocks", Blocks)
    tr.register_encoding("package.module:Blocks", Blocks)
    for name in ("blocks:4", "BLOCKS:4", "package.module:Blocks:4"):
        assert tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=8).block_size == 4
    tr.register_encoding("diagonal", Diagonal)
    with pytest.raises(
        ValueError, match=r"^diagonal must accept block_size to be named with a number, got 'diagonal:4'$"
    ):
        tr.encodings.parse_encoding("diagonal:4")
    with pytest.raises(ValueError, match=r"one of none, .*, blocks, .*, got 'block'; did you mean 'blocks'\?$"):
        tr.encodings.parse_encoding("block")


def test_registered_tables_and_biases_join_their_kind() -> None:
    tr.register_encoding("jitter-more", partial(tr.LearnedAPE, intensity=2.0))
    tr.register_encoding("offsets", tr.RelativePositionBias)
    choice = tr.encodings.parse_encoding("offsets+jitter-more+mixed")
    assert choice.parts == [tr.LearnedAPE, tr.RelativePositionBias, tr.MixedRoPE]
    assert choice.absolute is not None
    assert choice.absolute(sizes=(2, 2), dim=4).intensity == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "added", "message"),
    [
        ("mixed", Blocks, r"name must not be in use, got 'mixed', which builds MixedRoPE"),
        ("mine", Diagonal, r"name must not be in use, got 'mine', which builds Blocks"),
        ("a+b", Blocks, r"name must be letters, digits, '-', '_', '\.' and ':', got 'a\+b'"),
        ("", Blocks, r"name must be letters, digits, .*, got ''"),
        ("other", dict, r"build must be a subclass of Encoding, AbsoluteEncoding or ScoreBias, .*, got dict"),
        ("other", "mixed", r"build must be a subclass of .*, got 'mixed'"),
    ],
)
def test_invalid_registration_is_refused_in_one_line(name: str, added: Any, message: str) -> None:
    tr.register_encoding("mine", Blocks)
    with pytest.raises(ValueError, match=f"^{message}$"):
        tr.register_encoding(name, added)


def test_registering_again_replaces_only_if_asked_to() -> None:
    tr.register_encoding("mine", Blocks)
    tr.register_encoding("mine", Blocks)
    tr.register_encoding("mine", tr.LearnedAPE, exist_ok=True)
    assert tr.encodings.parse_encoding("mine").absolute is tr.LearnedAPE
    with pytest.raises(ValueError, match="name must not be in use, got 'axial'"):
        tr.register_encoding("axial", Blocks, exist_ok=True)


def test_fixed_frequencies_are_a_base_class_for_users() -> None:
    tr.testing.check(partial(Diagonal, num_axes=2, num_heads=3, head_dim=8))
    one = Diagonal(num_axes=2, head_dim=8)
    q, k = torch.randn(2, 1, 6, 4, 8)
    assert tr.rotate(q, k, one(tr.grid(2, 2)))[0].shape == q.shape


class Odd(Diagonal):
    """An encoding whose annotations are no types."""

    def __init__(self, shape: "batch heads", other: "Missing") -> None:  # type: ignore  # noqa: F722, F821
        super().__init__(num_axes=shape, head_dim=other)


def test_arguments_are_those_of_the_constructor_and_what_it_passes_on() -> None:
    shape = ["num_axes", "head_dim", "num_heads", "rotary_dim"]
    assert arguments_of(tr.encodings.MRoPE) == ["sections", "order", "base", *shape]
    assert arguments_of(Diagonal) == shape
    assert "shared_heads" not in arguments_of(tr.AxialRoPE)
    assert {"block_size", "init_scale", "shared_heads"} <= {*arguments_of(tr.ComRoPELD)}
    assert annotations_of(tr.AxialRoPE)["rotary_dim"] == int | None
    assert annotations_of(tr.AxialRoPE)["grouped"] is bool
    assert [*annotations_of(tr.positions.circle_rope)][2:] == ["radius", "angle_weight", "device", "dtype"]
    assert annotations_of(Odd) == {"shape": Any, "other": Any}
    assert takes(Blocks, "block_size")
    assert not takes(Isotropic, "block_size")
    assert not takes(build, "rotary_dim")
