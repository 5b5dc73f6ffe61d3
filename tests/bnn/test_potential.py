"""The potential of a chain as a function of one vector, against Pyro's, and all chains at once."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc import HMC
from pyro.infer.mcmc.util import initialize_model
from torch import nn

import tyxe
from tests.oracles.bnns import mlp
from tests.oracles.chains import NOISE, PRIOR, N, data, layered, value_and_gradient
from tyxe.bnn.potential import Potential
from tyxe.likelihoods import Categorical, HeteroskedasticGaussian, HomoskedasticGaussian, Poisson
from tyxe.samplers import batched

CLASSIFIER, TWO_OUTPUTS = mlp(1, 4, 3), mlp(1, 3, 2)
MIXED = {
    "0.weight": dist.HalfNormal(torch.tensor(1.3)).expand([3, 1]).to_event(2),
    "0.bias": dist.Normal(torch.randn(3), torch.rand(3) + 0.5).to_event(1),
    "2.weight": dist.StudentT(3.0).expand([1, 3]).to_event(2),
    "2.bias": dist.Normal(torch.tensor([0.2]), 1.0).to_event(1),
}
HALF = tyxe.priors.IIDPrior(dist.HalfNormal(1.0), hide_parameters=["bias"])
KNOWN = HomoskedasticGaussian(N, scale=NOISE)
INFERRED = HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5))
OF_EACH = HomoskedasticGaussian(N, scale=torch.tensor([0.3, 0.6]))
CASES = {
    "iid normal": (layered(), PRIOR, KNOWN),
    "more data than given": (layered(), PRIOR, HomoskedasticGaussian(5 * N, scale=NOISE)),
    "iid laplace": (layered(), tyxe.priors.IIDPrior(dist.Laplace(0.3, 0.7)), KNOWN),
    "inferred scale": (layered(), PRIOR, INFERRED),
    "layerwise": (layered(), tyxe.priors.LayerwiseNormalPrior("radford"), KNOWN),
    "positive, and some hidden": (layered(), HALF, KNOWN),
    "means": (layered(), tyxe.priors.IIDPrior(dist.Normal(0.4, 0.7)), KNOWN),
    "mixed": (
        layered(),
        tyxe.priors.DictPrior(MIXED),
        HomoskedasticGaussian(N, precision=dist.Gamma(3.0, 1.0)),
    ),
    "noise of each output": (TWO_OUTPUTS, PRIOR, OF_EACH),
    "predicted noise": (TWO_OUTPUTS, PRIOR, HeteroskedasticGaussian(N)),
    "classes": (CLASSIFIER, PRIOR, Categorical(N)),
    "counts": (layered(), PRIOR, Poisson(N, event_dim=1)),
}


def case(name):
    net, prior, likelihood = CASES[name]
    x, y = data()
    targets = {
        "noise of each output": torch.cat([y, -y], 1),
        "classes": torch.arange(N) % 3,
        "counts": y.abs().round(),
    }
    bnn = tyxe.MCMC_BNN(copy.deepcopy(net).double(), prior, likelihood, HMC).double().eval()
    return bnn, (x, targets.get(name, y))


@pytest.mark.parametrize("name", CASES)
def test_the_potential_is_pyros(name):
    bnn, batch = case(name)
    initial, pyros, _, _ = initialize_model(bnn.model, batch)
    ours = Potential(bnn, *batch)
    for potential in (ours, pickle.loads(pickle.dumps(ours))):
        at = {key: torch.randn_like(value, requires_grad=True) for key, value in initial.items()}
        expected, gradient = value_and_gradient(pyros, at)
        flat = ours.blocks.flatten(at).detach().requires_grad_()
        found = potential.at(flat)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
        (found_gradient,) = torch.autograd.grad(found, flat)
        by_site = ours.blocks.unflatten(found_gradient)
        for site, expected_gradient in zip(at, gradient, strict=True):
            torch.testing.assert_close(by_site[site], expected_gradient, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_the_potential_of_all_chains_is_that_of_each(name):
    bnn, batch = case(name)
    potential = Potential(bnn, *batch)
    flat = torch.randn(3, potential.blocks.size, dtype=torch.float64)
    with pyro.validation_enabled(False):
        values, gradients = batched(potential.at, flat)(flat)
    for row, value, gradient in zip(flat, values, gradients, strict=True):
        alone = row.clone().requires_grad_()
        expected = potential.at(alone)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-10)
        (expected,) = torch.autograd.grad(expected, alone)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_a_vector_has_the_values_of_its_sites(name):
    bnn, batch = case(name)
    potential = Potential(bnn, *batch)
    flat = torch.randn(potential.blocks.size, dtype=torch.float64)
    values = potential.unflatten(flat)
    for site, value in values.items():
        assert bool(potential.priors[site].support.check(value).all())
    torch.testing.assert_close(potential.flatten(values), flat)


def test_the_mean_loss_is_the_likelihoods():
    bnn, (x, y) = case("inferred scale")
    potential = Potential(bnn, x, y)
    flat = torch.randn(potential.blocks.size, dtype=torch.float64)
    values = potential.unflatten(flat)
    scale = next(v for name, v in values.items() if name.startswith(bnn.likelihood.prefix))
    expected = -dist.Normal(bnn._run_net(values, x[:4]), scale).log_prob(y[:4]).mean()
    torch.testing.assert_close(potential.mean_loss(values, x[:4], y[:4]), expected)


def scaled_prior(name, module, param):
    def statements():
        scale = pyro.sample(f"{name}.scale", dist.LogNormal(torch.zeros(()).double(), 1.0))
        return dist.Normal(0.0, scale).expand(param.shape)

    return statements


@pytest.mark.filterwarnings("ignore:warmup_steps=1:tyxe.TyxeWarning")
def test_a_hierarchical_prior_is_for_pyros_kernels():
    prior = tyxe.priors.LambdaPrior(scaled_prior)
    net, likelihood = nn.Linear(1, 1).double(), HomoskedasticGaussian(N, scale=NOISE)
    bnn = tyxe.MCMC_BNN(net, prior, likelihood, tyxe.samplers.NUTS)
    with pytest.raises(ValueError, match=r"'net\.weight' is hierarchical.*pyro\.infer\.mcmc"):
        bnn.fit([data()], 2, warmup_steps=1)
    assert not len(bnn.samples)
