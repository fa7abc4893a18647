"""Shapes, strides and dtypes that nobody thought of: the kernels turn as the reference does."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import LAYOUTS, allowed_steps, assert_same_bits, build, error, make_inputs, outcome

from torchrope.encodings import Encoding
from torchrope.ops import native
from torchrope.testing import TOLERANCE

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")


@dataclass(frozen=True)
class Drawn:
    """An encoding and what its inputs look like."""

    family: str
    b: int
    axes: int
    rest: int
    shared_heads: bool
    inputs: dict[str, Any]
    tokens: int
    dtype: torch.dtype
    seed: int

    def encoding(self) -> Encoding:
        key_heads = self.inputs["heads"][1]
        whole = build(self.family, self.b, self.axes, heads=key_heads)
        size = {} if self.family in ("axial", "mixed") else {"block_size": self.b}
        return type(whole)(
            num_axes=self.axes,
            num_heads=key_heads,
            head_dim=whole.head_dim + self.rest,
            rotary_dim=whole.head_dim,
            shared_heads=self.shared_heads,
            **size,
        )


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    batch = draw(st.lists(st.integers(0, 3), max_size=2).map(tuple))
    key_heads = draw(st.integers(1, 3))
    inputs = dict(
        batch=batch,
        heads=(key_heads * draw(st.integers(1, 3)), key_heads),
        sets=batch[-1:] if draw(st.booleans()) else (),
        layout=draw(st.sampled_from(LAYOUTS)),
        upstream_layout=draw(st.sampled_from(LAYOUTS)),
        key_tokens=draw(st.none() | st.integers(0, 9)),
    )
    return Drawn(
        family=draw(st.sampled_from(["axial", "mixed", "liere", "ap", "ld"])),
        b=draw(st.integers(2, 17)),
        axes=draw(st.integers(1, 4)),
        rest=draw(st.integers(0, 3)),
        shared_heads=draw(st.booleans()),
        inputs=inputs,
        tokens=draw(st.integers(0, 40)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 5)),
    )


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(cases())
def test_kernels_turn_as_the_reference_does(drawn: Drawn) -> None:
    torch.manual_seed(drawn.seed)
    encoding = drawn.encoding()
    inputs = make_inputs(encoding, drawn.tokens, drawn.dtype, **drawn.inputs)
    fast, plain = (outcome(encoding, inputs, backend=name) for name in ("auto", "reference"))
    assert_same_bits(outcome(encoding, inputs, backend="auto"), fast)
    for name, expected in plain.items():
        assert fast[name].shape == expected.shape, name
        assert fast[name].dtype == expected.dtype, name
        largest = expected.abs().max().item() if expected.numel() else 0.0
        # Both round, and angles of up to a hundred radians lose two digits of float32.
        allowed = (allowed_steps(name) * torch.finfo(expected.dtype).eps + TOLERANCE[torch.float32]) * max(largest, 1.0)
        assert error(fast[name], expected) <= allowed, name
