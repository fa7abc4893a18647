"""Interleaved timing: the order of the rounds, and ratios within a round."""

from dataclasses import asdict

import pytest

from torchrope_lab.training import timing
from torchrope_lab.training.timing import interleaved_seconds, quartiles, ratio


def test_rounds_interleave_and_rotate_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MOST_REPEATS", 1)
    calls: list[str] = []
    works = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = interleaved_seconds(works, rounds=3, device="cpu")
    assert "".join(calls[-9:]) == "abcbcacab"
    assert {name: len(own) for name, own in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_computed_per_round() -> None:
    slow_moment = ratio([2.0, 20.0, 2.0, 2.0, 2.0], [1.0, 10.0, 1.0, 1.0, 1.0])
    assert asdict(slow_moment) == {"low": 2, "median": 2, "high": 2}
    assert asdict(quartiles([1.0, 2.0, 3.0, 4.0, 5.0])) == {"low": 2, "median": 3, "high": 4}
