"""Autocast is turned off and on again, and is no error on devices that have none."""

import pytest
import torch

from tyxe.autocast import autocast_like, full_precision
from tyxe.poutine import LinearMap, local_reparameterization_moments

ONE = torch.ones(1, 1)


def product() -> torch.dtype:
    return (ONE @ ONE).dtype


def test_settings_are_taken_along():
    with torch.autocast("cpu", torch.float16):
        again = autocast_like(ONE)
        with full_precision(ONE):
            assert product() == torch.float32
            with again():
                assert product() == torch.float16
    with torch.autocast("cpu"), autocast_like(ONE.clone())(), full_precision(ONE):
        assert product() == torch.float32


@pytest.mark.parametrize("turn", [full_precision, lambda tensor: autocast_like(tensor)()])
def test_a_device_without_autocast_is_left_alone(turn):
    with turn(ONE.to("meta")), torch.autocast("cpu", torch.bfloat16):
        assert product() == torch.bfloat16


def test_moments_are_formed_on_a_device_without_autocast():
    x = torch.ones(4, 3, device="meta")
    weight = torch.ones(2, 3, device="meta")
    event = LinearMap("linear", torch.nn.functional.linear, x, weight, None, 0, 0)
    mean, variance = local_reparameterization_moments(event, (weight, weight), None)
    assert mean.shape == variance.shape == (4, 2)
