"""Files that an earlier version has written load, and hold the same BNNs.

They were written once, at the commit before `Gaussian`, by `python -m tests.test_former_files`.
"""

import functools
import json
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch import nn

import tyxe

FOLDER = Path(__file__).parent / "former"
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
X, Y = torch.linspace(-1, 1, 16).reshape(8, 2), torch.arange(8) % 3


def parts():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    return net, NORMAL, tyxe.likelihoods.Categorical(8)


def handed_on(bnn):
    """Let the posterior be the next prior."""
    prior = tyxe.priors.DictPrior(bnn.net_guide.get_detached_distributions())
    bnn.update_prior(prior)
    return bnn


def fitted_twice(build):
    """Return what makes a BNN, or one that has been fitted to two tasks."""

    def make(is_fitted):
        bnn = build()
        for _ in range(2 * is_fitted):
            bnn.fit([(X, Y)], ADAM, 3)
            handed_on(bnn)
        return bnn

    return make


def laplace(**options):
    return fitted_twice(lambda: tyxe.LaplaceBNN(*parts(), **options))


def variational(guide):
    return fitted_twice(lambda: tyxe.VariationalBNN(*parts(), guide))


def swag(is_fitted):
    bnn = tyxe.SWAG_BNN(*parts(), rank=3)
    if is_fitted:
        bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=1e-2), 12)
        handed_on(bnn)
    return bnn


CASES = {
    "kron": laplace(structure="kron"),
    "kron-per-task": laplace(options=tyxe.LaplaceOptions(accumulate="per_task")),
    "full": laplace(structure="full"),
    "diag": laplace(structure="diag"),
    "mean-field": variational(tyxe.guides.AutoNormal),
    "low-rank": variational(functools.partial(AutoLowRankMultivariateNormal, rank=2)),
    "swag": swag,
}


def numbers(bnn):
    """Return outputs at the mean, and the prior's log-density of zeros."""
    outputs = bnn.predict(X, num_predictions=0)
    priors = dict(bnn.net_prior.priors())
    joints = bnn.net_prior.joints()
    zeros = {name: torch.zeros_like(bnn.net.get_parameter(name)) for name in priors}
    named = {bnn.net_prior.prefix + name: zero for name, zero in zeros.items()}
    densities = [joint.log_prob(joint.flatten(named)) for joint in joints]
    if not joints:
        densities = [prior.log_prob(zeros[name]) for name, prior in priors.items()]
    return [*outputs.flatten().tolist(), float(sum(densities))]


@pytest.mark.parametrize("name", CASES)
def test_a_former_file_loads(name):
    bnn = CASES[name](False)
    bnn.load(FOLDER / f"{name}.tyxe")
    expected = json.loads((FOLDER / "numbers.json").read_text())[name]
    assert numbers(bnn) == pytest.approx(expected, rel=1e-5, abs=1e-5)


if __name__ == "__main__":
    found = {}
    for name, make in CASES.items():
        bnn = make(True)
        bnn.save(FOLDER / f"{name}.tyxe")
        found[name] = numbers(bnn)
    (FOLDER / "numbers.json").write_text(json.dumps(found) + "\n")
