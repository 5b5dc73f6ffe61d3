"""Gradients of single weights, of whatever layers, against those of all weights."""

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.curvature.test_against_loops import NETS, made
from tests.oracles.laplace import laplace_bnn
from tyxe.curvature import jacobian
from tyxe.curvature.linearize import Linearization

NORMAL = tyxe.priors.IIDPrior(dist.Normal(*torch.tensor([0.0, 1.0]).double()))


def linearized(net, x, prior):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.5)
    bnn = laplace_bnn(net, prior, likelihood, structure="full").eval()
    bnn.net.eval()
    return bnn, bnn._linearize(x)


# All chosen weights of a branching net may be of the branch that is not taken, an error.
@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("name", [name for name in NETS if name != "branch"])
def test_they_are_columns_of_the_jacobian(name, share, monkeypatch):
    bnn, _, x, _ = made(name)
    net = bnn.to_module().eval()
    count = sum(p.numel() for p in net.parameters())
    by_point, plain = [], Linearization._per_point

    def looked(self, sites, cotangent):
        by_point.extend(sites)
        return plain(self, sites, cotangent)

    bnn, linear = linearized(
        net, x, tyxe.priors.SubnetworkPrior(NORMAL, max(1, int(share * count)), by="random")
    )
    _, whole = linearized(net, x, NORMAL)
    of_all = jacobian(whole).unbind(1)
    chosen, expected = dict(bnn.net_prior.elements.items()), []
    for rows in of_all:
        values = whole.blocks.unflatten(rows)
        sites = {}
        for block in linear.blocks:
            for site in block.sites:
                places = chosen.get(site.removeprefix("net."))
                each = values[site].flatten(1)
                each = each if places is None else each[:, places]
                sites[site] = each.view(len(x), *bnn._site_shapes()[site])
        points = [{site: each[n] for site, each in sites.items()} for n in range(len(x))]
        expected.append(torch.stack([linear.blocks.flatten(one) for one in points]))
    monkeypatch.setattr(Linearization, "_per_point", looked)
    found = jacobian(linear)
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-9, atol=1e-10)
    if name in ("mlp", "conv1d", "conv2d", "grouped", "depthwise", "sequence", "pixels"):
        assert not by_point, "they are taken from what layers have met"


def test_points_may_be_taken_in_pieces(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2)).double()
    x = torch.randn(5, 2, 7).double()
    prior = tyxe.priors.SubnetworkPrior(NORMAL, 20, by="random")
    expected = jacobian(linearized(net, x, prior)[1])
    for budget in (1, 40):
        monkeypatch.setattr("tyxe.curvature.gradients.BUDGET", budget)
        torch.testing.assert_close(jacobian(linearized(net, x, prior)[1]), expected)


def test_predictions_of_chosen_weights_take_no_gradient_for_each_point(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    prior = tyxe.priors.SubnetworkPrior(NORMAL, 9, by="magnitude")
    likelihood = tyxe.likelihoods.Categorical(6)
    bnn = laplace_bnn(net, prior, likelihood, structure="full")
    x = torch.randn(6, 3).double()
    monkeypatch.setattr(Linearization, "_per_point", None)
    bnn.fit_curvature([(x, torch.arange(6) % 2)])
    assert bnn.predict(x).isfinite().all()
    assert bnn.functional_variance(x[:1]).isfinite().all()
