"""HMC and NUTS over weights: exact moments, chains, thinning, ArviZ, and their potential."""

import copy
import functools
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc import HMC
from pyro.infer.mcmc.util import initialize_model
from torch import nn

import tyxe
from tests.oracles.bnns import HIDE_NORMS, mlp, two_layers
from tests.oracles.chains import (
    KERNELS,
    NOISE,
    PRIOR,
    N,
    assert_samples,
    data,
    fitted,
    layered,
    make,
    posterior,
    value_and_gradient,
)
from tyxe.bnn.potential import Potential
from tyxe.likelihoods import Categorical, HeteroskedasticGaussian, HomoskedasticGaussian, Poisson
from tyxe.samplers import batched


@pytest.mark.parametrize("kernel", KERNELS)
def test_moments_are_those_of_the_exact_posterior(kernel):
    x, y = data()
    bnn = make(KERNELS[kernel])
    mcmc = bnn.fit([(x[:7], y[:7]), (x[7:], y[7:])], 500, warmup_steps=50, disable_progbar=True)
    assert_samples(mcmc.get_samples(), *posterior())


def test_predictions_are_the_net_at_samples_spread_evenly():
    bnn, (x, _) = fitted(40), data()
    samples = bnn.get_samples()

    def at(index):
        return x @ samples["net.weight"][index].T + samples["net.bias"][index]

    # Four of forty: the middles of four blocks of ten.
    outputs = bnn.predict(x, num_predictions=4, aggregate=False)
    torch.testing.assert_close(outputs, torch.stack([at(i) for i in (5, 15, 25, 35)]))
    everything = bnn.predict(x, num_predictions=40, aggregate=False)
    torch.testing.assert_close(everything, torch.stack([at(i) for i in range(40)]))
    mean, scale = bnn.predict(x, num_predictions=40, batch_size=5)
    torch.testing.assert_close(mean, everything.mean(0))
    torch.testing.assert_close(
        scale.square(), everything.var(0, correction=0) + NOISE**2, rtol=1e-7, atol=0
    )
    vmapped = bnn.predict(x, num_predictions=40, aggregate=False, vectorize=True)
    torch.testing.assert_close(vmapped, everything)


def test_mean_and_exported_nets():
    bnn = fitted(10)
    first = bnn.get_samples()["net.weight"]
    bnn.fit(data(), 6, batch_data=True, warmup_steps=2, disable_progbar=True)  # replaces them
    samples, exported = bnn.get_samples(), bnn.to_module()
    assert (len(first), len(samples["net.weight"])) == (10, 6)
    assert type(exported) is nn.Linear
    torch.testing.assert_close(exported.weight.detach(), samples["net.weight"].mean(0))
    drawn = bnn.to_module(sample=True).weight.detach()
    assert (samples["net.weight"] == drawn).flatten(1).all(1).any()


def test_likelihoods_variables_are_sampled_and_used():
    bnn = fitted(20, likelihood=HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5)))
    (x, _), samples = data(), bnn.get_samples()
    assert samples.keys() == {"net.weight", "net.bias", "likelihood.scale"}
    assert bool((samples["likelihood.scale"] > 0).all())
    outputs = bnn.predict(x, num_predictions=20, aggregate=False)
    _, scale = bnn.predict(x, num_predictions=20)
    expected = outputs.var(0, correction=0) + samples["likelihood.scale"].square().mean()
    torch.testing.assert_close(scale.square(), expected)


# Pyro warns where there are no more processors than chains.
@pytest.mark.filterwarnings("ignore:num_chains:UserWarning")
@pytest.mark.parametrize("context", ["spawn", pytest.param("fork", marks=pytest.mark.forks)])
def test_several_chains(context):
    bnn = make()
    mcmc = bnn.fit(
        [data()], 25, warmup_steps=5, num_chains=2, mp_context=context, disable_progbar=True
    )
    for found in (mcmc, bnn):
        assert found.get_samples()["net.weight"].shape == (50, 1, 1)
    assert bnn.samples["net.weight"].shape == (2, 25, 1, 1)
    first, second = bnn.samples["net.weight"]
    assert not torch.equal(first, second)
    # A thinned subset takes from both.
    middle = bnn.predict(torch.zeros(1, 1).double(), num_predictions=2, aggregate=False)
    biases = bnn.samples["net.bias"]
    torch.testing.assert_close(middle.flatten(), biases[:, 12].flatten())


def test_hidden_parameters_stay_and_batchnorm_is_out_of_it():
    net = two_layers(2, 3, 3, nn.BatchNorm1d(3), nn.Tanh())
    kernel = functools.partial(HMC, step_size=0.02, num_steps=2)
    bnn = tyxe.MCMC_BNN(net, HIDE_NORMS, Categorical(N), kernel)
    before = {name: value.clone() for name, value in bnn.net.state_dict().items()}
    x, y = torch.randn(N, 2), torch.arange(N) % 3
    with pytest.warns(tyxe.TyxeWarning, match=r"MCMC does not fit 1.weight, 1.bias"):
        mcmc = bnn.fit([(x, y)], 5, warmup_steps=2, disable_progbar=True)
    assert mcmc.get_samples().keys() == {"net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"}
    assert all(torch.equal(value, before[n]) for n, value in bnn.net.state_dict().items())
    assert all(module.training for module in bnn.modules())


def test_an_interrupted_fit_keeps_the_old_samples_and_modes():
    bnn = fitted(5)
    before = bnn.get_samples()["net.weight"].clone()

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bnn.fit([data()], 5, warmup_steps=1, disable_progbar=True, hook_fn=interrupt)
    assert torch.equal(bnn.get_samples()["net.weight"], before)
    assert all(module.training for module in bnn.modules())
    assert all(isinstance(p, nn.Parameter) for p in bnn.net._parameters.values())


def test_forward_draws_from_the_samples():
    bnn, (x, _) = fitted(40), data()
    everything = bnn.predict(x, num_predictions=40, aggregate=False)
    drawn = torch.stack([bnn(x) for _ in range(30)])
    distances = (drawn[:, None] - everything).abs().amax((2, 3))
    assert bool((distances.min(1).values < 1e-12).all())
    # Thirty times the same one of forty samples is no draw.
    assert len(distances.argmin(1).unique()) > 5
    nets = {bnn.to_module(sample=True).weight.item() for _ in range(30)}
    assert nets <= set(bnn.get_samples()["net.weight"].flatten().tolist())
    assert len(nets) > 5
    with pytest.raises(RuntimeError, match="no samples yet"):
        make()(x)


# --- potentials -----------------------------------------------------------------------------------


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


def test_the_loss_is_the_likelihoods():
    bnn, (x, y) = case("inferred scale")
    potential = Potential(bnn, x, y)
    flat = torch.randn(potential.blocks.size, dtype=torch.float64)
    values = potential.unflatten(flat)
    scale = next(v for name, v in values.items() if name.startswith(bnn.likelihood.prefix))
    expected = -dist.Normal(bnn._run_net(values, x[:4]), scale).log_prob(y[:4]).sum()
    torch.testing.assert_close(potential.loss(values, x[:4], y[:4]), expected)


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
