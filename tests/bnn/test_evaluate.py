"""`evaluate` and aggregated predictions against the metrics by hand."""

import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.oracles.nets import Rounded
from tests.oracles.predictions import (
    GUIDE,
    LIKELIHOODS,
    NORMAL,
    N,
    S,
    inputs,
    log_mean_exp,
    make,
    net,
    seeded,
)
from tyxe.bnn.passes import ReplayedDraws
from tyxe.guides import AutoNormal
from tyxe.likelihoods import HomoskedasticGaussian


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("how", [{}, {"batch_size": 4}, {"vectorize": True}, "loader"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_evaluate_is_the_computation_by_hand(name, how, reduction):
    likelihood, outputs, y, by_hand = LIKELIHOODS[name]
    bnn, x = make(net(outputs), likelihood), inputs()
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    reduce = {"sum": torch.sum, "mean": torch.mean, "none": lambda t: t}[reduction]
    expected = tuple(reduce(values) for values in by_hand(raw, y))
    options = {"num_predictions": S, "reduction": reduction}
    if how == "loader":
        loader = DataLoader(TensorDataset(x, y), batch_size=4)
        found = seeded(bnn.evaluate, loader, **options)
    else:
        found = seeded(bnn.evaluate, x, y, **options, **how)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # scale 0.4 in float32


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_evaluate_without_aggregation_has_a_row_for_each_draw(name):
    likelihood, outputs, y, by_hand = LIKELIHOODS[name]
    bnn, x = make(net(outputs), likelihood), inputs()
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    options = {"num_predictions": S, "reduction": "none", "batch_size": 4}
    found = seeded(bnn.evaluate, x, y, aggregate=False, **options)
    each = [by_hand(raw[s : s + 1], y) for s in range(S)]
    expected = tuple(torch.stack(rows) for rows in zip(*each, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_inferred_noise_is_drawn_with_the_weights():
    likelihood = HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5))
    bnn = make(net(1), likelihood, likelihood_guide=GUIDE)
    x, y = inputs(), torch.arange(1.0 * N)[:, None].double() / N
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    draws = seeded(lambda: [*ReplayedDraws().over(bnn._draws(S))])
    scales = torch.stack([values["likelihood.scale"] for values in draws]).detach()
    assert len(set(scales.tolist())) == S
    mean, scale = seeded(bnn.predict, x, num_predictions=S, batch_size=4)
    expected = raw.var(0, correction=0) + scales.square().mean()
    torch.testing.assert_close(scale**2, expected)
    torch.testing.assert_close(mean, raw.mean(0))
    each = dist.Normal(raw, scales[:, None, None]).log_prob(y).sum(-1)
    _, log_likelihood = seeded(bnn.evaluate, x, y, num_predictions=S, reduction="none")
    torch.testing.assert_close(log_likelihood, log_mean_exp(each))


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_evaluation_of_half_predictions_does_not_overflow(dtype, aggregate):
    x, y = torch.randn(3000, 2), torch.full((3000, 1), 20.0)

    def evaluate(then):
        likelihood = HomoskedasticGaussian(3000, scale=0.5)
        module = Rounded(1, dtype, then)
        module.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        bnn = tyxe.VariationalBNN(module, NORMAL, likelihood, AutoNormal)
        return seeded(bnn.evaluate, x, y, num_predictions=4, aggregate=aggregate)

    found = evaluate(dtype)
    torch.testing.assert_close(found, evaluate(torch.float32), rtol=0, atol=0)
    assert all(bool((one.abs() > 1e6).all()) for one in found)
