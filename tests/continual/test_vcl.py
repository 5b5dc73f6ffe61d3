"""Variational continual learning on linear streams, and the hand-over of every guide."""

import functools

import pytest
import torch
import torch.nn as nn
from pyro.infer import autoguide

from tests.oracles.fits import minimise
from tests.oracles.joints import INDUCING, NOISE, SCALE, SPREAD, four_lines, guide_joint, vcl
from tyxe.bnn.elbo import elbo_terms
from tyxe.distributions import JointMarginal
from tyxe.testing import GUIDES

pytestmark = pytest.mark.usefixtures("double")

FULL = [
    (autoguide.AutoMultivariateNormal, 1),
    (functools.partial(autoguide.AutoLowRankMultivariateNormal, rank=3), -1),
]


def maximize_elbo(bnn, x, y):
    """Follow the ELBO with its data term exact: the log-likelihood is quadratic in the weights."""
    bnn.likelihood.dataset_size = len(x)

    def loss():
        q = guide_joint(bnn)
        kl = elbo_terms(bnn.net_prior, bnn.net_guide).kl
        root = q.precision.inverse_sqrt(torch.eye(3)) * 3**0.5
        data = 0.0
        for point in torch.cat([q.loc + root, q.loc - root]):
            output = bnn._run_net(q.unflatten(point), x)
            data = data + bnn.likelihood.log_likelihood(output, y, "sum") / 6
        return kl - data

    minimise(bnn.net_guide.parameters(), loss, max_iter=2000, max_eval=4000, tolerance_grad=1e-13)


@pytest.mark.parametrize(("guide", "order"), FULL)
def test_full_covariance_vcl_of_a_linear_stream_is_the_batch_posterior(guide, order):
    torch.manual_seed(0)
    x = torch.randn(8, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]) + 0.3 + NOISE * torch.randn(8, 1)
    bnn = vcl(guide)
    for part_x, part_y in list(zip(x.split([2, 1, 5]), y.split([2, 1, 5]), strict=True))[::order]:
        maximize_elbo(bnn, part_x, part_y)
        four_lines(bnn)
    design = torch.cat([x, torch.ones(8, 1)], 1)
    precision = design.mT @ design / NOISE**2 + torch.eye(3) / SCALE**2
    mean = torch.linalg.solve(precision, design.mT @ y[:, 0] / NOISE**2)
    (joint,) = bnn.net_prior.joints()
    torch.testing.assert_close(joint.loc, mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(joint.precision.to_dense(), precision, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("closed_form_kl", [True, False])
@pytest.mark.parametrize("guide", [*SPREAD, *INDUCING])
def test_four_lines_leave_the_kl_at_zero(guide, closed_form_kl):
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))
    bnn = vcl((GUIDES | INDUCING)[guide], net)
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    four_lines(bnn)
    for _ in range(3):
        kl = elbo_terms(bnn.net_prior, bnn.net_guide, closed_form_kl=closed_form_kl).kl
        # Radial: the entropy is known, the cross-entropy drawn. On average over draws it is zero.
        if guide == "AutoRadial" and closed_form_kl:
            continue
        assert abs(kl.item()) < 1e-7
    before = {name: p.detach().clone() for name, p in bnn.net_guide.named_parameters()}
    bnn.fit([(torch.randn(5, 4), torch.randn(5, 4))], torch.optim.Adam, 1, progress=False)
    assert any(not torch.equal(p, before[n]) for n, p in bnn.net_guide.named_parameters())


def test_the_marginals_of_one_posterior_know_one_copy():
    bnn = vcl()
    posterior = bnn.net_guide.get_detached_distributions()
    (joint,) = {id(q.joint): q.joint for q in posterior.values()}.values()
    assert all(isinstance(q, JointMarginal) for q in posterior.values())
    storages = {p.untyped_storage().data_ptr() for p in bnn.parameters()}
    state = [joint.loc, joint.precision.operator.lower]
    assert not any(t.untyped_storage().data_ptr() in storages or t.requires_grad for t in state)
    assert (
        bnn.net_guide.get_detached_distributions(["net.weight"])["net.weight"].site == "net.weight"
    )
