"""Files that an earlier version has written load, and hold the same BNNs.

They were written once, at the commit before `Gaussian`, after fits to two tasks whose posteriors
became priors.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL

FOLDER = Path(__file__).parent / "former"
X = torch.linspace(-1, 1, 16).reshape(8, 2)
CASES = {
    "kron": functools.partial(tyxe.LaplaceBNN, structure="kron"),
    "kron-per-task": functools.partial(
        tyxe.LaplaceBNN, options=tyxe.LaplaceOptions(accumulate="per_task")
    ),
    "full": functools.partial(tyxe.LaplaceBNN, structure="full"),
    "diag": functools.partial(tyxe.LaplaceBNN, structure="diag"),
    "mean-field": functools.partial(tyxe.VariationalBNN, net_guide_builder=tyxe.guides.AutoNormal),
    "low-rank": functools.partial(
        tyxe.VariationalBNN,
        net_guide_builder=functools.partial(AutoLowRankMultivariateNormal, rank=2),
    ),
    "swag": functools.partial(tyxe.SWAG_BNN, rank=3),
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
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    bnn = CASES[name](net, NORMAL, tyxe.likelihoods.Categorical(8))
    bnn.load(FOLDER / f"{name}.tyxe")
    expected = json.loads((FOLDER / "numbers.json").read_text())[name]
    assert numbers(bnn) == pytest.approx(expected, rel=1e-5, abs=1e-5)
