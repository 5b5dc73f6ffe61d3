"""A slice of the damaged files, and that the suite finds what it looks for."""

import io
import random

import pytest
import torch

import tyxe
from tests.soak import corruption
from tests.soak.corruption import DAMAGES, SEAL, damaged


def test_damaged_files_are_refused_and_change_nothing() -> None:
    found = corruption.run(count=44, seed=1)
    assert found == {"accepted": 0, "damaged files": 44}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("size", [53, 600, 5000])
def test_damage_is_damage(name: str, size: int) -> None:
    chance = random.Random(size)
    content = chance.randbytes(size)
    found = {damaged(content, name, chance) for _ in range(20)}
    assert content not in found


def test_a_load_without_a_check_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(path):
        return torch.load(io.BytesIO(path.read_bytes()[:-SEAL]), weights_only=True)

    monkeypatch.setattr(tyxe.files, "read", unchecked)
    assert corruption.run(count=22, seed=1)["accepted"] > 0
