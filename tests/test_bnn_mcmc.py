"""HMC and NUTS over weights: exact moments, chains, thinning, ArviZ."""

import copy
import functools
import math
import os
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.mcmc import HMC, NUTS
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.stats import effective_sample_size
from torch import nn

import tyxe
from tyxe.bnn.compiled import CompiledFunction
from tyxe.bnn.potential import Potential, functional_kernel
from tyxe.likelihoods import (
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)

N, NOISE = 12, 0.5
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.5))


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 1, generator=generator).double()
    y = 0.8 * x - 0.3 + NOISE * torch.randn(N, 1, generator=generator).double()
    return x, y


def make(kernel=None, likelihood=None, net=None):
    likelihood = likelihood or HomoskedasticGaussian(N, scale=NOISE)
    kernel = kernel or functools.partial(HMC, step_size=0.15, num_steps=6)
    return tyxe.MCMC_BNN(net or nn.Linear(1, 1).double(), PRIOR, likelihood, kernel).double()


def fitted(num_samples=40, **options):
    bnn = make(**options)
    bnn.fit([data()], num_samples, warmup_steps=10, disable_progbar=True)
    return bnn


def assert_moments(samples, mean, covariance):
    """Compare `(S, P)` samples of one chain with exact moments, in standard errors by their ESS."""

    def close(values, expected):
        ess = effective_sample_size(values[None], chain_dim=0, sample_dim=1)
        assert ess > 50
        error = values.std() / math.sqrt(ess)
        assert abs(values.mean() - expected) < 4 * error

    centred = samples - mean
    for i in range(samples.shape[1]):
        close(samples[:, i], mean[i])
        for j in range(i + 1):
            close(centred[:, i] * centred[:, j], covariance[i, j])


KERNELS = {
    "HMC": functools.partial(HMC, step_size=0.15, num_steps=6),
    "NUTS": functools.partial(NUTS, step_size=0.15),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_moments_are_those_of_the_exact_posterior(kernel):
    x, y = data()
    design = torch.cat([x, torch.ones(N, 1).double()], 1)
    precision = design.T @ design / NOISE**2 + torch.eye(2).double() / 1.5**2
    mean = torch.linalg.solve(precision, design.T @ y / NOISE**2).squeeze(-1)
    bnn = make(KERNELS[kernel])
    mcmc = bnn.fit([(x[:7], y[:7]), (x[7:], y[7:])], 500, warmup_steps=50, disable_progbar=True)
    samples = mcmc.get_samples()
    assert samples.keys() == {"net.weight", "net.bias"}
    stacked = torch.cat([samples["net.weight"].flatten(1), samples["net.bias"]], 1)
    assert_moments(stacked, mean, torch.linalg.inv(precision))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_inferred_noise_has_the_exact_posterior(kernel):
    # Weights integrated out in closed form; the noise's marginal by quadrature over its logarithm.
    x, y = data()
    design = torch.cat([x, torch.ones(N, 1).double()], 1)
    prior = dist.LogNormal(-1.0, 0.5)
    grid = torch.linspace(-3.5, 2.0, 2001).double()
    log_density = torch.stack(
        [
            torch.distributions.MultivariateNormal(
                torch.zeros(N).double(),
                torch.exp(2 * s) * torch.eye(N).double() + 1.5**2 * design @ design.T,
            ).log_prob(y.squeeze(-1))
            for s in grid
        ]
    ) + dist.Normal(-1.0, 0.5).log_prob(grid)
    weights = log_density.softmax(0)
    mean = (weights * grid).sum()
    variance = (weights * (grid - mean).square()).sum()
    bnn = make(KERNELS[kernel], HomoskedasticGaussian(N, scale=prior))
    mcmc = bnn.fit([data()], 1500, warmup_steps=200, disable_progbar=True)
    samples = mcmc.get_samples()["likelihood.scale"].log()[:, None]
    assert_moments(samples, mean[None], variance.reshape(1, 1))


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
    bnn, (x, _) = fitted(40), data()
    samples = bnn.get_samples()
    exported = bnn.to_module()
    assert type(exported) is nn.Linear
    torch.testing.assert_close(exported.weight.detach(), samples["net.weight"].mean(0))
    torch.testing.assert_close(
        bnn.predict(x, num_predictions=0, aggregate=False)[0], exported(x).detach()
    )
    drawn = bnn.to_module(sample=True).weight.detach()
    assert (samples["net.weight"] == drawn).flatten(1).all(1).any()


def test_evaluate_is_the_mixture_over_samples():
    bnn, (x, y) = fitted(30), data()
    outputs = bnn.predict(x, num_predictions=10, aggregate=False)
    error, log_likelihood = bnn.evaluate(x, y, num_predictions=10)
    each = dist.Normal(outputs, NOISE).log_prob(y).sum(-1)
    torch.testing.assert_close(log_likelihood, (each.logsumexp(0) - math.log(10)).sum())
    torch.testing.assert_close(error, (outputs.mean(0) - y).square().sum())


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
@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_several_chains(context):
    bnn = make()
    mcmc = bnn.fit(
        [data()], 25, warmup_steps=5, num_chains=2, mp_context=context, disable_progbar=True
    )
    assert mcmc.get_samples()["net.weight"].shape == (50, 1, 1)
    assert bnn.get_samples()["net.weight"].shape == (50, 1, 1)
    assert bnn.samples["net.weight"].shape == (2, 25, 1, 1)
    first, second = bnn.samples["net.weight"]
    assert not torch.equal(first, second)
    # A thinned subset takes from both.
    middle = bnn.predict(torch.zeros(1, 1).double(), num_predictions=2, aggregate=False)
    biases = bnn.samples["net.bias"]
    torch.testing.assert_close(
        middle.flatten(), torch.stack([biases[0, 12], biases[1, 12]]).flatten()
    )


def test_chains_stay_apart_for_arviz():
    arviz = pytest.importorskip("arviz", reason="needs the extra `mcmc`")
    kernel = functools.partial(HMC, step_size=0.1, num_steps=8, adapt_step_size=False)
    bnn = make(kernel, HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5)))
    # Two chains as fit stores them, without the processes of a parallel run.
    chains = []
    for seed in (1, 2):
        pyro.set_rng_seed(seed)
        bnn.fit([data()], 100, warmup_steps=30, disable_progbar=True)
        chains.append({name: value[0].clone() for name, value in bnn.samples.items()})
    bnn.samples.replace({name: torch.stack([c[name] for c in chains]) for name in chains[0]})
    inference = bnn.to_arviz()
    assert dict(inference.posterior.sizes)["chain"] == 2
    assert dict(inference.posterior.sizes)["draw"] == 100
    summary = arviz.summary(inference)
    assert len(summary) == 3
    assert {"net.weight[0, 0]", "net.bias[0]", "likelihood.scale"} == set(summary.index)
    assert bool((summary["ess_bulk"] > 1).all())
    assert bool(((summary["r_hat"] > 0.9) & (summary["r_hat"] < 1.2)).all())
    flat = bnn.get_samples()["net.weight"].flatten()
    assert summary.loc["net.weight[0, 0]", "mean"] == pytest.approx(flat.mean().item(), abs=1e-3)
    # What r-hat is for: chains at different places (by ranks it stays below 2 for two chains).
    bnn.samples.replace(
        {"net.bias": torch.randn(2, 100, 1) + torch.tensor([0.0, 9.0])[:, None, None]}
    )
    assert arviz.summary(bnn.to_arviz())["r_hat"].item() > 1.5


def test_hidden_parameters_stay_and_batchnorm_is_out_of_it():
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3))
    bnn = tyxe.MCMC_BNN(
        net, prior, Categorical(N), functools.partial(HMC, step_size=0.02, num_steps=2)
    )
    before = {name: value.clone() for name, value in bnn.net.state_dict().items()}
    x, y = torch.randn(N, 2), torch.arange(N) % 3
    with pytest.warns(tyxe.TyxeWarning, match=r"MCMC does not fit 1.weight, 1.bias"):
        mcmc = bnn.fit([(x, y)], 5, warmup_steps=2, disable_progbar=True)
    assert mcmc.get_samples().keys() == {"net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"}
    assert all(torch.equal(value, before[n]) for n, value in bnn.net.state_dict().items())
    assert all(module.training for module in bnn.modules())


def test_a_hierarchical_prior_is_sampled_with_its_hyperparameters():
    def prior(name, module, param):
        def statements():
            scale = pyro.sample(f"{name}.scale", dist.LogNormal(torch.zeros(()).double(), 1.0))
            return dist.Normal(0.0, scale).expand(param.shape)

        return statements

    bnn = tyxe.MCMC_BNN(
        nn.Linear(1, 1).double(),
        tyxe.priors.LambdaPrior(prior),
        HomoskedasticGaussian(N, scale=NOISE),
        functools.partial(HMC, step_size=0.05, num_steps=3),
    )
    bnn.fit([data()], 8, warmup_steps=2, disable_progbar=True)
    assert bnn.get_samples().keys() == {
        "net.weight.scale",
        "net.weight",
        "net.bias.scale",
        "net.bias",
    }
    assert bnn.predict(data()[0], num_predictions=3, aggregate=False).shape == (3, N, 1)


def test_a_second_fit_replaces_the_samples():
    bnn = fitted(10)
    first = bnn.get_samples()["net.weight"]
    bnn.fit([data()], 6, warmup_steps=2, disable_progbar=True)
    assert len(first) == 10
    assert len(bnn.get_samples()["net.weight"]) == 6


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


def test_one_batch_instead_of_a_loader():
    bnn, (x, y) = make(), data()
    bnn.fit((x, y), 3, batch_data=True, warmup_steps=1, disable_progbar=True)
    assert len(bnn.get_samples()["net.weight"]) == 3


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


# --------------------------------------------------------------------------- the plain potential


def layered():
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()


POTENTIALS = {
    "iid normal": (PRIOR, {"scale": NOISE}),
    "iid laplace": (tyxe.priors.IIDPrior(dist.Laplace(0.3, 0.7)), {"scale": NOISE}),
    "inferred scale": (PRIOR, {"scale": dist.LogNormal(-1.0, 0.5)}),
    "inferred precision": (PRIOR, {"precision": dist.Gamma(3.0, 1.0)}),
    "layerwise": (tyxe.priors.LayerwiseNormalPrior("radford"), {"scale": NOISE}),
    "positive": (
        tyxe.priors.IIDPrior(dist.HalfNormal(1.0), hide_parameters=["bias"]),
        {"scale": NOISE},
    ),
}


def potentials(name, dataset_size=N):
    """Ours and Pyro's, and a function that draws unconstrained values."""
    prior, noise = POTENTIALS[name]
    likelihood = HomoskedasticGaussian(dataset_size, **noise)
    bnn = tyxe.MCMC_BNN(layered(), prior, likelihood, HMC).double().eval()
    batch = data()
    initial, pyros, transforms, _ = initialize_model(bnn.model, batch)
    kernel, starts = functional_kernel(HMC, bnn, batch, 1)
    assert starts.keys() == initial.keys()
    assert kernel.model is None

    def point():
        return {key: torch.randn_like(value, requires_grad=True) for key, value in initial.items()}

    return Potential(bnn, *batch, transforms), kernel.potential_fn, pyros, point


def value_and_gradient(potential, point):
    value = potential(point)
    return value.detach(), torch.autograd.grad(value, list(point.values()))


@pytest.mark.parametrize("dataset_size", [N, 5 * N])
@pytest.mark.parametrize("name", POTENTIALS)
def test_plain_potential_is_pyros(name, dataset_size):
    ours, kernels, pyros, point = potentials(name, dataset_size)
    again = pickle.loads(pickle.dumps(ours))
    for _ in range(5):
        at = point()
        expected, gradient = value_and_gradient(pyros, at)
        for potential in (ours, kernels, again):
            found, found_gradient = value_and_gradient(potential, at)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
            torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-10)


def scaled_prior(name, module, param):
    def statements():
        scale = pyro.sample(f"{name}.scale", dist.LogNormal(torch.zeros(()).double(), 1.0))
        return dist.Normal(0.0, scale).expand(param.shape)

    return statements


@pytest.mark.parametrize("kernel", [HMC, NUTS, functools.partial(NUTS, step_size=0.1)])
def test_hierarchies_and_handlers_go_through_the_model(kernel):
    bnn = make(kernel)
    assert functional_kernel(kernel, bnn, data(), 1) is not None
    with poutine.scale(scale=0.5):
        assert functional_kernel(kernel, bnn, data(), 1) is None
    with poutine.scale(scale=0.5), pytest.warns(tyxe.TyxeWarning, match="those around fit"):
        mcmc = bnn.fit([data()], 2, warmup_steps=1, disable_progbar=True)
    assert mcmc.kernel.model is not None
    assert bnn.fit([data()], 2, warmup_steps=1, disable_progbar=True).kernel.model is None

    prior = tyxe.priors.LambdaPrior(scaled_prior)
    net, likelihood = nn.Linear(1, 1).double(), HomoskedasticGaussian(N, scale=NOISE)
    hierarchical = tyxe.MCMC_BNN(net, prior, likelihood, kernel)
    assert functional_kernel(kernel, hierarchical, data(), 1) is None


@pytest.mark.parametrize(
    "kernel",
    [
        functools.partial(NUTS, jit_compile=True, ignore_jit_warnings=True),
        functools.partial(NUTS, max_plate_nesting=1),
        lambda model: NUTS(model),
    ],
)
def test_kernels_that_need_a_model_get_it(kernel):
    assert functional_kernel(kernel, make(kernel), data(), 1) is None


# --------------------------------------------------------------------------- one vector

CLASSIFIER = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 3))
TWO_OUTPUTS = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2))
FLAT_CASES = {
    "means": (
        layered(),
        tyxe.priors.IIDPrior(dist.Normal(0.4, 0.7)),
        HomoskedasticGaussian(N, scale=NOISE),
    ),
    "mixed": (
        layered(),
        tyxe.priors.DictPrior(
            {
                "0.weight": dist.HalfNormal(torch.tensor(1.3)).expand([3, 1]).to_event(2),
                "0.bias": dist.Normal(torch.randn(3), torch.rand(3) + 0.5).to_event(1),
                "2.weight": dist.StudentT(3.0).expand([1, 3]).to_event(2),
                "2.bias": dist.Normal(torch.tensor([0.2]), 1.0).to_event(1),
            }
        ),
        HomoskedasticGaussian(N, precision=dist.Gamma(3.0, 1.0)),
    ),
    "noise of each output": (
        TWO_OUTPUTS,
        PRIOR,
        HomoskedasticGaussian(N, scale=torch.tensor([0.3, 0.6])),
    ),
    "predicted noise": (TWO_OUTPUTS, PRIOR, HeteroskedasticGaussian(N)),
    "classes": (CLASSIFIER, PRIOR, Categorical(N)),
    "counts": (layered(), PRIOR, Poisson(N, event_dim=1)),
}


def flat_case(name):
    net, prior, likelihood = FLAT_CASES[name]
    x, y = data()
    targets = {
        "noise of each output": torch.cat([y, -y], 1),
        "classes": torch.arange(N) % 3,
        "counts": y.abs().round(),
    }
    bnn = tyxe.MCMC_BNN(copy.deepcopy(net).double(), prior, likelihood, HMC).double().eval()
    return bnn, (x, targets.get(name, y))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", FLAT_CASES)
def test_potential_of_one_vector_is_pyros(name, compiled):
    bnn, batch = flat_case(name)
    initial, pyros, _, _ = initialize_model(bnn.model, batch)
    kernel, _ = functional_kernel(HMC, bnn, batch, 1, compiled)
    flat_potential = kernel.kernel.potential_fn
    for _ in range(3):
        at = {key: torch.randn_like(value, requires_grad=True) for key, value in initial.items()}
        expected, gradient = value_and_gradient(pyros, at)
        flat = kernel.layout.flatten(at).detach().requires_grad_()
        found, found_gradient = value_and_gradient(flat_potential, {"flat": flat})
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
        by_site = kernel.layout.split(found_gradient[0])
        for site, expected_gradient in zip(at, gradient, strict=True):
            torch.testing.assert_close(by_site[site], expected_gradient, rtol=1e-12, atol=1e-10)


CHAINS = {
    "HMC": functools.partial(HMC, step_size=0.1, num_steps=4),
    "NUTS": NUTS,
    "dense mass": functools.partial(NUTS, full_mass=True),
    "dense block": functools.partial(HMC, num_steps=3, full_mass=[("net.weight", "net.bias")]),
    "slices": functools.partial(NUTS, use_multinomial_sampling=False),
}


def seeded_chain(kernel, **options):
    pyro.set_rng_seed(3)
    bnn = make(kernel, HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5)))
    return bnn.fit([data()], 15, warmup_steps=30, disable_progbar=True, **options)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kernel", CHAINS)
def test_chains_are_pyros_own(kernel, compiled):
    # Same random numbers, adaptation included; the potential differs by rounding.
    ours = seeded_chain(CHAINS[kernel], compile=compiled)
    pyros = seeded_chain(lambda model: CHAINS[kernel](model))
    assert pyros.kernel.model is not None
    assert ours.kernel.model is None
    assert ours.get_samples().keys() == pyros.get_samples().keys()
    for site, expected in pyros.get_samples(group_by_chain=True).items():
        found = ours.get_samples(group_by_chain=True)[site]
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    found, expected = ours.diagnostics(), pyros.diagnostics()
    assert found.keys() == expected.keys()
    assert found["divergences"] == expected["divergences"]
    assert found["acceptance rate"] == expected["acceptance rate"]


def test_kernels_of_other_classes_see_sites():
    class Own(HMC):
        def sample(self, params):
            assert set(params) == {"net.weight", "net.bias"}
            return super().sample(params)

    mcmc = fitted_chain(functools.partial(Own, step_size=0.1, num_steps=2))
    assert isinstance(mcmc.kernel, Own)
    assert mcmc.kernel.model is None


def fitted_chain(kernel, num_samples=6, **options):
    return make(kernel).fit([data()], num_samples, warmup_steps=4, disable_progbar=True, **options)


@pytest.mark.parametrize("full_mass", [False, True])
def test_a_kernel_on_one_vector_shows_sites(full_mass):
    seen = []

    def hook(kernel, params, stage, index):
        seen.append((stage, index, {name: value.shape for name, value in params.items()}))
        assert kernel.step_size > 0
        assert kernel.num_steps == 3

    kernel = functools.partial(HMC, num_steps=3, full_mass=full_mass, adapt_step_size=False)
    mcmc = fitted_chain(kernel, hook_fn=hook)
    assert len(seen) == 4 + 6
    assert all(s == {"net.weight": (1, 1), "net.bias": (1,)} for _, _, s in seen)
    assert [stage for stage, _, _ in seen] == ["Warmup"] * 4 + ["Sample"] * 6
    blocks = mcmc.kernel.inverse_mass_matrix
    assert {names: matrix.shape for names, matrix in blocks.items()} == {
        ("net.bias", "net.weight"): (2, 2) if full_mass else (2,)
    }
    assert mcmc.get_samples()["net.weight"].shape == (6, 1, 1)
    assert mcmc.get_samples(group_by_chain=True)["net.bias"].shape == (1, 6, 1)
    assert mcmc.get_samples(num_samples=2)["net.bias"].shape == (2, 1)
    assert {"net.weight", "net.bias", "divergences"} <= set(mcmc.diagnostics())
    with pytest.raises(AttributeError, match="no_such"):
        mcmc.kernel.no_such  # noqa: B018


def test_only_some_sites_are_saved():
    mcmc = fitted_chain(functools.partial(HMC, num_steps=2), save_params=["net.bias"])
    assert mcmc.get_samples().keys() == {"net.bias"}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_on_one_vector_pickles(compiled):
    bnn, batch = flat_case("mixed")
    kernel, initial = functional_kernel(HMC, bnn, batch, 1, compiled)
    expected = kernel.kernel.potential_fn({"flat": kernel.layout.flatten(initial)})
    again = pickle.loads(pickle.dumps(kernel))
    found = again.kernel.potential_fn({"flat": again.layout.flatten(initial)})
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


# Torch forks from a process with threads, in which some versions of Python see a danger.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_chains_run_in_processes_of_their_own(context, compiled, monkeypatch):
    # Pyro keeps a processor for itself, and runs one chain after the other on a small machine.
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 3)
    pyro.set_rng_seed(0)
    bnn = make(functools.partial(HMC, step_size=0.15, num_steps=6))
    mcmc = bnn.fit(
        [data()],
        20,
        warmup_steps=5,
        num_chains=2,
        mp_context=context,
        disable_progbar=True,
        compile=compiled,
    )
    workers = {worker.pid for worker in mcmc.sampler.workers}
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert mcmc.kernel.model is None
    first, second = bnn.samples["net.weight"]
    assert first.shape == (20, 1, 1)
    assert not torch.equal(first, second)
    assert {"chain 0", "chain 1"} == set(mcmc.diagnostics()["divergences"])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_calls_in_a_chain_s_process_pass_through_no_mode(monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 3)

    def hook(*_):
        # Raised in the process, and again in this one.
        modes = torch.overrides._get_current_function_mode_stack()
        if modes:
            raise RuntimeError(f"in the way: {modes}")

    kernel = functools.partial(HMC, step_size=0.15, num_steps=2)
    options = {"num_chains": 2, "mp_context": "fork", "hook_fn": hook}
    assert fitted_chain(kernel, 3, **options).get_samples()["net.bias"].shape == (6, 1)
    # Pyro puts one there, or this would be no test.
    with pytest.raises(RuntimeError, match=r"in the way: .*DeviceContext"):
        fitted_chain(lambda model: kernel(model), 3, **options)


# --------------------------------------------------------------------------- compiled


class Forward(nn.Linear):
    """A linear layer, with something before it that a subclass fills in."""

    def __init__(self):
        super().__init__(1, 1)
        self.calls = 0


class BranchesOnValues(Forward):
    def forward(self, x):
        out = super().forward(x)
        return out if out.sum() > 0 else 2 * out


class DrawsNoise(Forward):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


class ChoosesRows(Forward):
    def forward(self, x):
        out = super().forward(x)
        return out + out[out > out.mean()].mean()


class Counts(Forward):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) + self.calls


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (BranchesOnValues, "cannot follow this net"),
        (DrawsNoise, "nondeterministic_seeded"),
        (ChoosesRows, "dynamic_output_shape"),
        (Counts, "gives another potential than this net"),
    ],
)
def test_nets_that_a_program_cannot_follow_are_refused(net, message):
    bnn = make(functools.partial(HMC, num_steps=2), net=net().double())
    with pytest.raises(RuntimeError, match=message):
        bnn.fit([data()], 2, warmup_steps=1, disable_progbar=True, compile=True)


def test_what_needs_the_model_is_not_compiled():
    bnn = make(lambda model: HMC(model))
    with pytest.raises(ValueError, match="compile=True needs priors that are distributions"):
        bnn.fit([data()], 2, warmup_steps=1, disable_progbar=True, compile=True)
    start = {"net.weight": torch.zeros(1, 1).double(), "net.bias": torch.zeros(1).double()}
    with pytest.raises(ValueError, match="leave compile or initial_params"):
        make(HMC).fit([data()], 2, initial_params=start, disable_progbar=True, compile=True)


def test_a_compiled_function_is_differentiable_once():
    function = CompiledFunction(lambda x: x.exp().sum())
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(3 * function(x), x)
        torch.testing.assert_close(gradient, 3 * x.exp().detach(), rtol=1e-14, atol=0)
    with torch.no_grad():
        assert not function(x).requires_grad
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_a_hook_changes_the_kernel_that_runs():
    def hook(kernel, samples, stage, i):
        kernel.trajectory_length = 0.25

    kernel = functools.partial(HMC, step_size=0.05, adapt_step_size=False, num_steps=1)
    chain = fitted_chain(kernel, 3, hook_fn=hook)
    assert chain.kernel.kernel.trajectory_length == 0.25
