"""Examples of weights, masks and missing targets, and that the suite finds what it looks for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.soak import weights
from tests.soak.weights import HOW, KINDS, USES, drawn
from tyxe.data import Targets


@settings(max_examples=50)
@given(st.integers(0, 2**31))
def test_what_counts_twice_or_not_at_all_is_repeated_or_left_out(seed: int) -> None:
    assert weights.run(1, seed)["found"] == []


def test_all_that_there_is_is_drawn() -> None:
    chance = random.Random(0)
    examples = [drawn(chance) for _ in range(1500)]
    assert {example.name for example in examples} == set(KINDS)
    assert {example.how for example in examples} == set(HOW)
    assert {example.use for example in examples} == set(USES)


@pytest.mark.parametrize("broken", ["counts", "counts_within"])
def test_points_that_all_count_once_are_found_out(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(Targets, broken, lambda *_: None)
    assert weights.run(60, 0)["different"] > 10
