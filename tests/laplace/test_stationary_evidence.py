"""The search of prior precisions ends where the evidence is flat."""

import itertools

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.curvature import laplace


@pytest.mark.parametrize(("per_site", "temperature"), [(False, 1.0), (True, 0.5)])
@pytest.mark.parametrize(
    ("structure", "damping"), [("kron", False), ("kron", True), ("diag", False), ("full", False)]
)
def test_from_anywhere_the_search_ends_where_the_evidence_is_flat(
    structure, damping, temperature, per_site
):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3)
    )
    x, y = torch.randn(6, 2, 3, 3).double(), torch.arange(6) % 3
    options = {"temperature": temperature, "damping": damping}
    torch.nn.init.normal_(net[3].bias)
    bnn = laplace(net, structure, points=6, **options)
    bnn.fit_curvature([(x, y)], progress=False)
    blocks = bnn.state.curvature.blocks
    owner = {site: g.name if per_site else "" for g in blocks for site in g.sites}
    ends = []
    for start in (1e-4, 1.0, 1e4):
        bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, start**-0.5)))
        found = bnn.optimize_prior_precision(per_site=per_site)
        numbers = {f"net.{key}": v for key, v in found.items()} if per_site else {"": found}
        logs = {name: value.log().requires_grad_() for name, value in numbers.items()}
        given = {site: logs[name].exp() for site, name in owner.items()}
        slopes = torch.autograd.grad(bnn.log_marginal_likelihood(given), list(logs.values()))
        assert all(abs(slope) < 1e-6 for slope in slopes)
        ends.append(numbers)
    assert all(number > 0 for number in ends[0].values())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-6, atol=0)


def test_a_search_that_cannot_end_says_so():
    bnn = laplace(nn.Linear(3, 2))
    data = [(torch.randn(5, 3).double(), torch.zeros(5).long())]
    bnn.fit_curvature(data, progress=False)
    with pytest.warns(tyxe.TyxeWarning, match=r"not converged in num_steps=2: its logarithm"):
        before = bnn.optimize_prior_precision(num_steps=2)
    with torch.no_grad():
        for loc in bnn.net_guide.parameters():
            loc.zero_()
    bnn.fit_curvature(data, progress=False)
    with pytest.warns(tyxe.TyxeWarning, match=r"the weights of the net are at the prior's mean"):
        found = bnn.optimize_prior_precision()
    torch.testing.assert_close(float(found), float(before))


def test_numbers_and_tensors_give_one_evidence():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for structure, number in itertools.product(("kron", "diag", "full"), (0.5, 3.0)):
        bnn = laplace(net, structure)
        bnn.fit_curvature([(torch.randn(5, 3).double(), torch.zeros(5).long())], progress=False)
        full = {n: torch.full_like(p, number) for n, p in net.named_parameters()}
        by_number = bnn.log_marginal_likelihood(number)
        torch.testing.assert_close(bnn.log_marginal_likelihood(full), by_number, rtol=1e-12, atol=0)
