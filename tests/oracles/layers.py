"""Layers with random weights, and the exact moments of their outputs."""

import torch

from tests.oracles.maps import MAPS, jacobian_moments
from tests.oracles.nets import bnn_of, posterior_moments
from tyxe.testing.asserts import assert_within

COUNT = 400
WHICH = {
    "both": {},
    "weight": {"hide_parameters": ["bias"]},
    "bias": {"hide_parameters": ["weight"]},
}


BIASED = [name for name, make in MAPS.items() if getattr(make()[0], "bias", None) is not None]
CASES = [(name, "both") for name in MAPS]
CASES += [(name, which) for name in BIASED for which in ("weight", "bias")]


def case_of(name, which):
    layer, shape = MAPS[name]()
    return bnn_of(layer, **WHICH[which]), torch.randn(shape, dtype=torch.float64)


def layer_moments(bnn, x):
    """Moments of the layer's output by the Jacobian of its own forward."""

    def function(x, weight, bias):
        values = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        if bias is None and getattr(bnn.net, "bias", None) is not None:
            values["bias"] = torch.zeros_like(bnn.net.bias)
        return torch.func.functional_call(bnn.net, values, x)

    weight, bias = posterior_moments(bnn, "weight"), posterior_moments(bnn, "bias")
    return jacobian_moments(function, x, weight, bias)


def assert_moments(outputs, mean, variance):
    """Compare the moments of draws with exact ones, to within the errors of these."""
    count = len(outputs)
    assert_within(outputs.mean(0), mean, (variance / count).sqrt(), "mean")
    squares = (outputs - mean).square()
    assert_within(squares.mean(0), variance, squares.std(0) / count**0.5, "variance")
