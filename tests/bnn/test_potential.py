"""The potential of a chain, by sites and as one vector, against Pyro's."""

import copy
import functools
import os
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.mcmc import HMC, NUTS
from pyro.infer.mcmc.util import initialize_model
from torch import nn

import tyxe
from tests.oracles.chains import (
    NOISE,
    PRIOR,
    N,
    data,
    fitted_chain,
    layered,
    make,
    value_and_gradient,
)
from tyxe.bnn.potential import Potential, functional_kernel
from tyxe.likelihoods import Categorical, HeteroskedasticGaussian, HomoskedasticGaussian, Poisson

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


# One compiled program, of every transform and an inferred noise: compiling is checked against the
# eager potential each time that it is done.
@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in FLAT_CASES), ("mixed", True)]
)
def test_potential_of_one_vector_is_pyros(name, compiled):
    bnn, batch = flat_case(name)
    initial, pyros, _, _ = initialize_model(bnn.model, batch)
    kernel, _ = functional_kernel(HMC, bnn, batch, 1, compiled)
    flat_potential = kernel.kernel.potential_fn
    for _ in range(3):
        at = {key: torch.randn_like(value, requires_grad=True) for key, value in initial.items()}
        expected, gradient = value_and_gradient(pyros, at)
        flat = kernel.blocks.flatten(at).detach().requires_grad_()
        found, found_gradient = value_and_gradient(flat_potential, {"flat": flat})
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
        by_site = kernel.blocks.unflatten(found_gradient[0])
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


# Kernels do not know whether the potential is compiled.
@pytest.mark.parametrize(
    ("kernel", "compiled"), [*((kernel, False) for kernel in CHAINS), ("NUTS", True)]
)
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


def test_a_kernel_on_one_vector_pickles():
    """And compiles again: a program does not pickle."""
    bnn, batch = flat_case("mixed")
    kernel, initial = functional_kernel(HMC, bnn, batch, 1, compiled=True)
    expected = kernel.kernel.potential_fn({"flat": kernel.blocks.flatten(initial)})
    again = pickle.loads(pickle.dumps(kernel))
    found = again.kernel.potential_fn({"flat": again.blocks.flatten(initial)})
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


# Torch forks from a process with threads, in which some versions of Python see a danger.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("context", "compiled"),
    [
        ("spawn", False),
        ("spawn", True),
    ],
)
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


def test_compiled_chains_are_not_forked():
    """A forked process may wait for ever for the compiler's threads, which it has not."""
    bnn = make(functools.partial(HMC, num_steps=2))
    options = {"num_chains": 2, "mp_context": "fork", "disable_progbar": True, "compile": True}
    with pytest.raises(ValueError, match='compile=True does not go with mp_context="fork"'):
        bnn.fit([data()], 2, **options)
    assert not len(bnn.samples)


@pytest.mark.forks
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
