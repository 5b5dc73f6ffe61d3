"""Chains of nets agree in function space: with Pyro's NUTS, and from a deep ensemble's members."""

import functools

import numpy as np
import pyro
import pyro.infer.mcmc
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles import two_units
from tests.oracles.chains import NOISE, N, data
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.samplers import MCLMC, NUTS, warm_start

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
PROBES = torch.tensor(two_units.PROBES).double()[:, None]
PRIOR = tyxe.priors.IIDPrior(pyro.distributions.Normal(0.0, 1.0))


def functions(kernel, hidden: int, samples: int, **options) -> torch.Tensor:
    """Return outputs at the probes, `(parts, samples of a part, probes)`, for standard errors."""
    net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()
    bnn = tyxe.MCMC_BNN(net, PRIOR, HomoskedasticGaussian(N, scale=NOISE), kernel).double()
    bnn.fit([data()], samples, progress=False, **options)
    count = len(next(iter(bnn.get_samples().values())))
    outputs = bnn.predict(PROBES, num_predictions=count, aggregate=False)[..., 0]
    return outputs.unflatten(0, (20, -1))


def assert_same_moments(first: torch.Tensor, second: torch.Tensor) -> None:
    centre = torch.cat([first.flatten(0, 1), second.flatten(0, 1)]).mean(0)
    for power in (1, 2):
        parts = [((found - centre) ** power).mean(1) for found in (first, second)]
        error = sum(part.var(0) / len(part) for part in parts).sqrt()
        difference = (parts[0].mean(0) - parts[1].mean(0)).abs()
        assert bool((difference < 4 * error).all()), (power, difference, error)
        assert bool((error < 0.2).all()), "errors too large to tell"


def test_a_net_of_two_hidden_units_is_numpyros() -> None:
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
def test_mile_is_nuts() -> None:
    nuts = functions(NUTS(), 8, 2_000, warmup_steps=500, compile=True)
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    kernel = MCLMC(energy_variance=(5e-2, 5e-4))
    members = warm_start(adam, 300, batch_size=4, validation=0.2)
    how = {"warmup_steps": 10_000, "thinning": 10, "num_chains": 10, "compile": True}
    mile = functions(kernel, 8, 1_000, init=members, **how)
    assert_same_moments(nuts, mile)
