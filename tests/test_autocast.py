"""Autocast is turned off and on again, and is no error on devices that have none."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tyxe.autocast import autocast_like, full_precision, rounding_of_maps
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


def test_maps_of_a_gpu_may_round_to_tf32():
    with FakeTensorMode():
        weight = torch.ones(1, 1, device="cuda")
        assert rounding_of_maps(weight) == 2**-10
        assert rounding_of_maps(weight.double()) == torch.finfo(torch.float64).eps
        assert rounding_of_maps(weight.bfloat16()) == torch.finfo(torch.bfloat16).eps
    assert rounding_of_maps(ONE) == torch.finfo(torch.float32).eps
    with torch.autocast("cpu", torch.bfloat16):
        assert rounding_of_maps(ONE) == torch.finfo(torch.bfloat16).eps
