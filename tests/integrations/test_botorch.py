"""tyxe.integrations.botorch: draws as samples of a model's posterior, and acquisitions of them."""

import functools

import pyro.distributions as dist
import pytest
import torch
from torch import nn

pytest.importorskip("botorch", reason="it is the extra 'botorch'")

from botorch.acquisition import LogExpectedImprovement, PosteriorMean, qLogExpectedImprovement
from botorch.optim import optimize_acqf

import tyxe
from tyxe.guides import AutoNormal
from tyxe.integrations.botorch import BoTorchBNN

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
ADAM = functools.partial(torch.optim.Adam, lr=3e-2)
NOISE = tyxe.likelihoods.HomoskedasticGaussian(200, scale=0.1)
BOUNDS = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)


def net(outputs=1):
    return nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, outputs))


def mean_field(likelihood=NOISE, outputs=1):
    return tyxe.VariationalBNN(net(outputs), NORMAL, likelihood, AutoNormal)


def dropout():
    return tyxe.DropoutBNN(nn.Sequential(net(), nn.Dropout(0.1)), NOISE)


@functools.cache
def laplace(steps=1, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.rand(200, 2, dtype=dtype) * 2 - 1
    bnn = tyxe.LaplaceBNN(net().to(dtype), NORMAL, NOISE)
    bnn.fit([(x, -(x - 0.4).square().sum(-1, keepdim=True))], ADAM, steps, progress=False)
    return bnn


MODELS = {
    "mean field": mean_field,
    "two columns": lambda: mean_field(tyxe.likelihoods.HeteroskedasticGaussian(40), 2),
    "numbers (n,)": lambda: tyxe.VariationalBNN(
        nn.Sequential(*net(), nn.Flatten(0)), NORMAL, NOISE, AutoNormal
    ),
    "linearised": laplace,
    "ensemble": lambda: tyxe.EnsembleBNN(lambda _: mean_field(), 2),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_samples_are_the_means_at_the_same_draws_in_each_call(make):
    bnn = make().train()
    model = BoTorchBNN(bnn, num_draws=4)
    x = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    before = torch.get_rng_state()
    posterior = model.posterior(x)
    members = 2 if isinstance(bnn, tyxe.EnsembleBNN) else 1
    assert posterior.values.shape == (5, 4 * members, 3, 1)
    assert posterior.values.dtype == torch.float64
    with tyxe.rng.torch_rng_kept(seed=0):
        draws = bnn.predict(
            x.detach().reshape(15, 2).float(), num_predictions=4, aggregate=False, joint=True
        )
    means, _ = bnn.likelihood.mean_and_scale(draws)
    expected = means.view(-1, 5, 3, 1).transpose(0, 1)
    torch.testing.assert_close(posterior.values.detach().float(), expected)
    assert torch.equal(model.posterior(x).values, posterior.values)
    first = model.posterior(x[:2]).values
    torch.testing.assert_close(first.float(), posterior.values[:2].float())
    (gradient,) = torch.autograd.grad(posterior.values.sum(), x)
    assert gradient.abs().min() > 0
    assert bnn.training
    assert torch.equal(torch.get_rng_state(), before)


def test_an_ensembles_weights_are_those_of_its_draws():
    bnn = tyxe.EnsembleBNN(lambda _: mean_field(), 2, weights=[0.75, 0.25])
    posterior = BoTorchBNN(bnn, num_draws=3).posterior(torch.zeros(1, 2))
    torch.testing.assert_close(posterior.weights, torch.tensor([0.25] * 3 + [0.25 / 3] * 3))
    expected = posterior.values.squeeze((-1, -2)) @ posterior.weights
    torch.testing.assert_close(posterior.mean.squeeze(), expected)


ACQUISITIONS = {
    "mean": PosteriorMean,
    "analytic": functools.partial(LogExpectedImprovement, best_f=-1.0),
    "samples": functools.partial(qLogExpectedImprovement, best_f=-1.0),
}


@pytest.mark.parametrize("make", ACQUISITIONS.values(), ids=ACQUISITIONS)
def test_an_acquisition_is_maximised_by_gradients(make):
    acquisition = make(BoTorchBNN(laplace(300, torch.float64), num_draws=32))
    best, value = optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=5, raw_samples=32)
    grid = torch.cartesian_prod(*torch.linspace(-1, 1, 21, dtype=torch.float64).expand(2, -1))
    assert value >= acquisition(grid.unsqueeze(1)).max() - 1e-3
    assert torch.autograd.gradcheck(acquisition, grid[:3].unsqueeze(1).requires_grad_())
    if make is PosteriorMean:
        assert (best - 0.4).norm() < 0.2  # where the data have their maximum


BAD = {
    "two outputs": (
        RuntimeError,
        "is invalid",
        lambda: BoTorchBNN(mean_field(outputs=2))(torch.zeros(1, 2)),
    ),
    "dropout": (TypeError, "has dropout", lambda: BoTorchBNN(dropout())),
    "an ensemble of dropout": (
        TypeError,
        "has dropout",
        lambda: BoTorchBNN(tyxe.EnsembleBNN(lambda _: dropout(), 2)),
    ),
    "no draws": (ValueError, "expected 1 or more", lambda: BoTorchBNN(mean_field(), num_draws=0)),
    "classes": (
        TypeError,
        "are classes",
        lambda: BoTorchBNN(mean_field(tyxe.likelihoods.Categorical(40), 3))(torch.zeros(1, 2)),
    ),
}


@pytest.mark.parametrize(("error", "match", "call"), BAD.values(), ids=BAD)
def test_bad_calls(error, match, call):
    with pytest.raises(error, match=match):
        call()
