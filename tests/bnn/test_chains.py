"""Chains of tyxe's own samplers: exact posteriors, starts, interrupts, and what they tell.

Chains of nets agree in function space, with NumPyro's NUTS and from a deep ensemble's members.
"""

import functools
import math
import signal
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tests.oracles import two_units
from tests.oracles.bnns import NORMAL, mlp
from tests.oracles.chains import NOISE, PRIOR, N, assert_moments, data
from tests.oracles.nets import NetOf
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.samplers import HMC, MCLMC, NUTS, Run, warm_start

# Short runs get advice, which the tests of advice look at.
pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
FIXED = {"adapt_step_size": False, "adapt_mass_matrix": False}
ORACLES = Path(__file__).parents[1] / "oracles"


def make(kernel=None, net=None, likelihood=None, prior=PRIOR):
    kernel = HMC(num_steps=3) if kernel is None else kernel
    likelihood = likelihood or HomoskedasticGaussian(N, scale=NOISE)
    return tyxe.MCMC_BNN(net or nn.Linear(1, 1), prior, likelihood, kernel).double()


def quadrature(x, y, sigma):
    """Mean and covariance for `beta ~ N(0, 10^2)`, `sigma ~ HalfNormal(10)`: a sum over `sigma`."""
    n, d = x.shape
    logs, means, covariances = [], [], []
    for s in sigma:
        precision = x.T @ x / s**2 + torch.eye(d).double() / 100
        covariance = precision.inverse()
        mean = (covariance @ x.T @ y / s**2)[:, 0]
        marginal = -n * s.log() - 0.5 * precision.logdet() - 0.5 * d * math.log(100)
        marginal = marginal - 0.5 * (y.square().sum() / s**2 - mean @ precision @ mean)
        logs.append(marginal - s**2 / 200)
        means.append(torch.cat([mean, s[None]]))
        covariances.append(torch.block_diag(covariance, s[None] * 0))
    weights, rows = torch.stack(logs).softmax(0), torch.stack(means)
    mean = weights @ rows
    within = torch.einsum("s,sij->ij", weights, torch.stack(covariances))
    return [mean, within + (weights[:, None] * (rows - mean)).T @ (rows - mean)]


def rows_of(bnn, *sites):
    """Return samples of some sites as rows, `(S, P)`."""
    samples = bnn.get_samples()
    return torch.cat([samples[site].reshape(len(samples[site]), -1) for site in sites], 1)


def test_moments_of_a_regression_of_posteriordb():
    given = np.load(ORACLES / "sblrc.npz")
    x, y = (torch.from_numpy(given[key]) for key in ("X", "y"))
    likelihood = HomoskedasticGaussian(100, scale=dist.HalfNormal(10.0))
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 10))
    bnn = make(NUTS(), nn.Linear(5, 1, bias=False), likelihood, prior)
    run = bnn.fit([(x, y)], 1_000, warmup_steps=500, compile=True)
    assert not run.statistics["diverged"].any()
    found = rows_of(bnn, "net.weight", "likelihood.scale")
    assert_moments(found, *quadrature(x, y, torch.linspace(0.6, 1.6, 1001).double()))


# --- starts -------------------------------------------------------------------------------------


def starts(bnn, **options):
    return bnn.fit([data()], 1, warmup_steps=0, compile=False, **options).run.starts


def test_chains_start_where_they_are_told():
    bnn = make()
    weight, bias = (p.item() for p in bnn.net.parameters())
    at_net = starts(bnn, init="net", num_chains=2)
    assert at_net.tolist() == [[bias, weight]] * 2
    assert starts(bnn).shape == (4, 2)
    given = at(torch.randn(3, 1), torch.randn(3, 1, 1))
    expected = torch.cat([given["net.bias"], given["net.weight"][..., 0]], -1)
    torch.testing.assert_close(starts(bnn, init=given), expected.double())
    likelihood = HomoskedasticGaussian(N, scale=NOISE)
    guided = tyxe.VariationalBNN(nn.Linear(1, 1).double(), PRIOR, likelihood, AutoDelta)
    values = torch.cat([v.flatten() for _, v in sorted(guided._mean_values().items())])
    assert starts(bnn, init=guided, num_chains=2).tolist() == [values.tolist()] * 2


def at(bias, weight):
    return {"net.bias": bias, "net.weight": weight}


ONE, CUBE = torch.zeros(2, 1), torch.zeros(2, 1, 1)
POSITIVE = {"net": nn.Linear(1, 1), "prior": tyxe.priors.IIDPrior(dist.HalfNormal(1.0))}
nn.init.constant_(POSITIVE["net"].weight, -3.0)
BARE = NetOf(lambda self, x: self.gain * x, gain=nn.Parameter(torch.ones(1)))
OUTSIDE = r"'net\.\w+' is not finite, or not in its prior's supp"
BAD_STARTS = {
    "number": ({}, (at(ONE, CUBE), 3), r"'net.bias' has shape \(2, 1\); expected \(3, 1\), which"),
    "missing": ({}, ({"net.bias": ONE},), "no values for net.weight"),
    "shape": ({}, (at(ONE, ONE),), "'net.weight' has shape"),
    "not finite": ({}, (at(ONE / 0, CUBE),), "'net.bias' is not finite"),
    "site": ({}, ({"bias": ONE},), "site is 'bias'"),
    "init": ({}, (3,), "init is 3; expected"),
    "net outside": (POSITIVE, ("net",), OUTSIDE),
    "outside": (POSITIVE, (at(ONE + 0.5, CUBE - 3),), OUTSIDE),
    "bare": ({"net": BARE}, (warm_start(torch.optim.Adam, 1),), "'gain' has no reset_parameters"),
}


@pytest.mark.parametrize("case", BAD_STARTS)
def test_bad_starts(case):
    parts, given, message = BAD_STARTS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        make(**parts).starts([data()], *given)


# --- the run ------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_exactly(monkeypatch):
    options = {"warmup_steps": 20, "num_chains": 2, "compile": False}
    torch.manual_seed(5)
    whole = make(NUTS())
    whole.fit([data()], 30, **options)
    torch.manual_seed(5)
    bnn = make(NUTS())
    bnn.net.load_state_dict(whole.net.state_dict())
    advance, calls = Run._advance, []

    def stops(self, *arguments):
        calls.append(1)
        if int(self.transitions.min()) == 35 and len(calls) < 10_000:
            calls.extend([1] * 10_000)
            signal.raise_signal(signal.SIGINT)
        return advance(self, *arguments)

    monkeypatch.setattr(Run, "_advance", stops)
    kept = pytest.warns(tyxe.TyxeWarning, match=r"keeps 1[5-9] samples of each of 2 chains")
    with kept, pytest.raises(KeyboardInterrupt):
        bnn.fit([data()], 30, **options)
    kept = bnn.samples["net.weight"].clone()
    assert torch.equal(kept, whole.samples["net.weight"][:, : kept.shape[1]])
    bnn.fit([data()], 30, resume=True)
    for site, value in whole.samples.items():
        assert torch.equal(bnn.samples[site], value)


def test_summaries_are_of_predictions():
    bnn = make(HMC(step_size=0.15, num_steps=6, **FIXED))
    run = bnn.fit([data()], 100, warmup_steps=20, compile=False)
    assert run.potentials.shape == (4, 100)
    table = bnn.summary(torch.ones(3, 1).double())
    assert len(table) == 3
    assert float(table["r_hat"].max()) < 1.05
    assert {"ess_bulk", "ess_tail"} <= set(table.columns)
    assert len(bnn.summary()) == 2
    outputs = bnn.to_arviz(torch.ones(3, 1).double()).posterior["predictions"]
    assert outputs.shape == (4, 100, 3, 1)
    weight, bias = bnn.samples["net.weight"], bnn.samples["net.bias"]
    expected = (weight[..., 0] + bias)[:, :, None].expand(-1, -1, 3, -1)
    np.testing.assert_allclose(outputs.values, expected.numpy())


# --- functions of nets, which agree where weights do not -----------------------------------------


PROBES = torch.tensor(two_units.PROBES).double()[:, None]


def functions(kernel, hidden, samples, **options):
    """Return outputs at the probes, `(parts, samples of a part, probes)`, for standard errors."""
    bnn = make(kernel, mlp(1, hidden, 1), prior=NORMAL)
    bnn.fit([data()], samples, progress=False, **options)
    count = len(next(iter(bnn.get_samples().values())))
    outputs = bnn.predict(PROBES, num_predictions=count, aggregate=False)[..., 0]
    return outputs.unflatten(0, (20, -1))


def assert_same_moments(first, second):
    centre = torch.cat([first.flatten(0, 1), second.flatten(0, 1)]).mean(0)
    for power in (1, 2):
        parts = [((found - centre) ** power).mean(1) for found in (first, second)]
        error = sum(part.var(0) / len(part) for part in parts).sqrt()
        difference = (parts[0].mean(0) - parts[1].mean(0)).abs()
        assert bool((difference < 4 * error).all()), (power, difference, error)
        assert bool((error < 0.2).all()), "errors too large to tell"


def test_a_net_of_two_hidden_units_is_numpyros():
    # As many chains as parts, since a chain stays long where both units bend the same way.
    how = {"warmup_steps": 300, "num_chains": 20, "compile": True}
    found = functions(NUTS(), 2, 500, **how)
    expected = {name: torch.from_numpy(value) for name, value in np.load(two_units.PATH).items()}
    for name, values in (("mean", found), ("square", found.square())):
        parts = values.mean(1)
        error = (parts.var(0) / len(parts) + expected[f"{name}_error"] ** 2).sqrt()
        difference = (parts.mean(0) - expected[name]).abs()
        assert bool((difference < 4 * error).all()), (name, difference, error)
        assert bool((error < 0.2 * expected[name].abs()).all()), "errors too large to tell"


@pytest.mark.slow
def test_mile_is_nuts():
    nuts = functions(NUTS(), 8, 2_000, warmup_steps=500, compile=True)
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    kernel = MCLMC(energy_variance=(5e-2, 5e-4))
    members = warm_start(adam, 300, batch_size=4, validation=0.2)
    how = {"warmup_steps": 10_000, "thinning": 10, "num_chains": 10, "compile": True}
    mile = functions(kernel, 8, 1_000, init=members, **how)
    assert_same_moments(nuts, mile)
