"""Sums of many two-valued weights: their moments by the handler, and its gradient."""

import itertools

import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.signed_bernoulli import EXACT, SHAPE, logits
from tyxe.distributions import SignedBernoulli, independent_moments
from tyxe.poutine import local_reparameterization

# --- sums of many weights -----------------------------------------------------------------------


def binary(net, scale=1.0, **rules):
    """A BNN with logits that all differ."""
    bnn = tyxe.VariationalBNN(
        net.double(),
        tyxe.priors.BinaryPrior(scale=scale, **rules),
        tyxe.likelihoods.HomoskedasticGaussian(10, scale=1.0),
        tyxe.guides.AutoBernoulli,
    )
    with torch.no_grad():
        for parameter in bnn.net_guide.parameters():
            parameter.copy_(logits(*parameter.shape))
    return bnn


def enumerated(bnn, x):
    """Every sign vector's outputs and probability."""
    posterior = bnn.net_guide.posterior()
    sizes = {name: q.event_shape.numel() for name, q in posterior.items()}
    outputs, log_probs = [], []
    for signs in itertools.product([-1.0, 1.0], repeat=sum(sizes.values())):
        parts = torch.tensor(signs).double().split(list(sizes.values()))
        values = {
            name: part.reshape(q.event_shape) * q.base_dist.scale
            for part, (name, q) in zip(parts, posterior.items(), strict=True)
        }
        outputs.append(bnn._run_net(values, x))
        log_probs.append(sum(q.log_prob(values[name]) for name, q in posterior.items()))
    probs = torch.stack(log_probs).exp()
    return torch.stack(outputs), probs


def handled(bnn, x, monkeypatch):
    """Mean and standard deviation that the handler samples from: its outputs at noise of 1, -1."""
    outputs = []
    for noise in (1.0, -1.0):
        with monkeypatch.context() as patch, local_reparameterization():
            patch.setattr(torch, "randn_like", lambda t, noise=noise: torch.full_like(t, noise))
            outputs.append(bnn.guided_forward(x))
    high, low = outputs
    return (high + low) / 2, (high - low) / 2


LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "linear, no bias": (lambda: nn.Linear(5, 2, bias=False), (4, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 1, 2, padding=1, stride=2), (2, 2, 4, 4)),
    "conv2d, groups": (lambda: nn.Conv2d(2, 2, 2, groups=2), (2, 2, 3, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(2, 1, 3, stride=2), (2, 2, 4)),
}


@pytest.mark.parametrize("scale", [1.0, "radford"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_handlers_moments_by_enumeration(layer, scale, monkeypatch):
    make, shape = LAYERS[layer]
    bnn, x = binary(make(), scale), torch.randn(*shape).double()
    outputs, probs = enumerated(bnn, x)
    assert probs.sum().item() == pytest.approx(1, abs=1e-10)
    weights = probs.reshape(-1, *[1] * (outputs.dim() - 1))
    mean = (weights * outputs).sum(0)
    variance = (weights * (outputs - mean) ** 2).sum(0)
    actual_mean, actual_sd = handled(bnn, x, monkeypatch)
    torch.testing.assert_close(actual_mean, mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(actual_sd**2, variance, rtol=1e-10, atol=1e-10)


def test_two_moments_are_registered():
    q = SignedBernoulli(logits(*SHAPE), 0.2).to_event(2)
    mean, variance = independent_moments(q)
    torch.testing.assert_close(mean, q.mean, **EXACT)
    torch.testing.assert_close(variance, q.variance, **EXACT)
    half = independent_moments(SignedBernoulli(torch.tensor(30.0, dtype=torch.float16)))[1]
    assert half.dtype == torch.float32
    assert half.item() > 0


# --- gradients ----------------------------------------------------------------------------------


def test_the_handlers_gradient_is_that_of_the_expected_log_likelihood(monkeypatch):
    # A Gaussian log-likelihood needs two moments only, so for one linear map the handler has to
    # be exact: noise of 1 and -1 integrates a quadratic.
    bnn = binary(nn.Linear(3, 2), 0.7)
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    parameters = list(bnn.net_guide.parameters())

    def expected():
        outputs, probs = enumerated(bnn, x)
        log_likelihood = torch.stack(
            [bnn.likelihood.log_likelihood(one, y, "sum") for one in outputs]
        )
        return (probs * log_likelihood).sum()

    total = 0
    for noise in (1.0, -1.0):
        with monkeypatch.context() as patch, local_reparameterization():
            patch.setattr(torch, "randn_like", lambda t, noise=noise: torch.full_like(t, noise))
            total = total + tyxe.bnn.elbo_terms(bnn.model, bnn.guide, x, y).data / 2
    scale = bnn.likelihood.dataset_size / len(x)
    torch.testing.assert_close(total, scale * expected(), rtol=1e-10, atol=1e-10)
    actual = torch.autograd.grad(total, parameters)
    by_enumeration = torch.autograd.grad(scale * expected(), parameters)
    torch.testing.assert_close(actual, by_enumeration, rtol=1e-9, atol=1e-9)
