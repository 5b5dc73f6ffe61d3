"""All wrappers where gradients are off and in inference mode, and that a difference is found."""

import pytest
import torch

from tests.soak import modes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", modes.MODES)
@pytest.mark.parametrize("name", modes.CASES)
def test_the_numbers_are_those_outside(name: str, mode: str) -> None:
    assert modes.differing(modes.CASES[name], mode) == []


def test_a_wrong_number_is_found() -> None:
    case = (lambda: None, lambda _: torch.tensor(float(torch.is_inference_mode_enabled())))
    assert modes.differing(case, "no_grad") == []
    assert modes.differing(case, "inference mode") == ["used", "both"]
