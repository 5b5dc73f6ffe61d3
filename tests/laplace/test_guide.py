"""The Laplace posterior as a guide: its draws, damping, marginals and sites."""

import math

import pyro.distributions as dist
import pytest
import torch

import tyxe
from tests.oracles.laplace import classifier, fitted

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(
    ("structure", "damping"), [("full", False), ("kron", False), ("kron", True), ("diag", False)]
)
def test_draws_have_the_posteriors_covariance(structure, damping):
    bnn, *_ = fitted(structure, damping=damping)
    blocks = bnn.state.curvature.blocks
    centre = blocks.flatten(bnn._mean_values())
    draws = torch.stack([blocks.flatten(v) - centre for v in bnn._draws(1000)])
    covariance = torch.linalg.inv(bnn.net_guide.precision.to_dense())
    # Whitened draws are standard normal.
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), draws.mT, upper=False)
    moments = white @ white.mT / 1000
    assert bool(((moments - torch.eye(len(centre))).abs() < 6 * math.sqrt(2 / 1000)).all())


def test_a_diagonal_posterior_becomes_a_prior():
    bnn, *_ = fitted("diag")
    posterior = bnn.net_guide.get_detached_distributions()
    variances = bnn.state.blocks.flatten({f"net.{n}": q.variance for n, q in posterior.items()})
    torch.testing.assert_close(variances, bnn.net_guide.precision.inverse_diagonal())
    bnn.update_prior(tyxe.priors.DictPrior(posterior))
    kron, *_ = fitted("kron")
    coupled = kron.net_guide.get_detached_distributions()
    assert len({id(q.joint) for q in coupled.values()}) == 1


def test_a_prior_that_the_structure_does_not_take_changes_nothing():
    bnn, x, y = fitted()
    before = bnn.log_marginal_likelihood()
    priors = {
        name: dist.Normal(0.0, 2.0 if name.endswith("bias") else 1.0).expand(p.shape).to_event()
        for name, p in bnn.net.named_parameters()
    }
    with pytest.raises(ValueError, match=r"different prior precisions"):
        bnn.update_prior(tyxe.priors.DictPrior(priors))
    assert bnn.log_marginal_likelihood() == before
    fresh, x, y = classifier(prior=tyxe.priors.DictPrior(priors))
    with pytest.raises(ValueError, match=r"different prior precisions"):
        fresh.fit_curvature([(x, y)])
    assert fresh.net_guide.state is None


def test_priors_that_are_not_gaussian():
    prior = tyxe.priors.IIDPrior(dist.Laplace(0.0, 1.0))
    with pytest.raises(ValueError, match=r"'net.0.weight' is Laplace; use"):
        classifier(prior=prior)
    bnn, *_ = fitted()
    before = bnn.log_marginal_likelihood()
    with pytest.raises(ValueError, match=r"needs Gaussian priors"):
        bnn.update_prior(prior)
    assert bnn.log_marginal_likelihood() == before


def test_sites_by_either_name_of_a_named_bnn():
    bnn, *_ = fitted("diag", name="first")
    own = bnn.net_guide.get_detached_distributions(["0.weight"])["0.weight"]
    joint = bnn.net_guide.get_detached_distributions(["first.net.0.weight"])
    torch.testing.assert_close(joint["first.net.0.weight"].mean, own.mean)
    with pytest.raises(ValueError, match=r"weigth"):
        bnn.net_guide.get_detached_distributions(["0.weigth"])
