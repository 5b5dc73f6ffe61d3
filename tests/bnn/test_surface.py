"""What tab completion shows of a wrapper."""

import pyro.distributions as dist
import pytest
from torch import nn

import tyxe
from tests.oracles.bnns import mean_field

PARTS = {"net", "prior", "likelihood", "net_prior", "net_guide", "likelihood_guide", "optimizer"}
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
NOISE = tyxe.likelihoods.HomoskedasticGaussian(4, scale=0.5)
NET = nn.Sequential(nn.Dropout(0.1), nn.Linear(1, 1))


def variational(index=0):
    return mean_field(nn.Linear(1, 1, bias=bool(index)), NOISE)


@pytest.mark.parametrize(
    "make",
    [
        variational,
        lambda: tyxe.LaplaceBNN(NET, NORMAL, NOISE),
        lambda: tyxe.MCMC_BNN(NET, NORMAL, NOISE, tyxe.samplers.NUTS),
        lambda: tyxe.SWAG_BNN(NET, NORMAL, NOISE),
        lambda: tyxe.DropoutBNN(NET, NOISE),
        lambda: tyxe.EnsembleBNN(variational, 2),
        lambda: tyxe.PytorchBNN(NET, NORMAL, tyxe.guides.AutoNormal),
    ],
)
def test_a_wrapper_has_few_names_beside_its_parts_and_those_of_modules(make):
    bnn = make()
    own = {name for name in dir(bnn) if not name.startswith("_")}
    own -= PARTS | set(dir(nn.Module()))
    assert len(own) <= 26, sorted(own)
