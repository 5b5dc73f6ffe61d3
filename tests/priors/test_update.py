"""update_ replaces the priors of the same sites."""

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.blocks import HEAD, Net
from tests.oracles.bnns import mean_field
from tests.oracles.programs import NORMAL
from tyxe.priors import DictPrior, IIDPrior
from tyxe.util import named_pyro_samples


def test_update_keeps_the_sites_and_replaces_their_priors():
    net = Net()
    IIDPrior(NORMAL, expose_modules=["head"]).apply_(net)
    IIDPrior(dist.Normal(1.0, 2.0), hide_all=True).update_(net)
    found = dict(named_pyro_samples(net))
    assert list(found) == HEAD
    assert found["head.bias"].mean.item() == 1.0


def test_an_update_that_does_not_fit_changes_nothing():
    net = Net()
    with pytest.raises(ValueError, match=r"call prior\.apply_"):
        IIDPrior(NORMAL).update_(net)
    IIDPrior(NORMAL, expose_modules=["head"]).apply_(net)
    bad = {"head.weight": dist.Normal(1.0, 1.0).expand([1, 3]), "head.bias": NORMAL}
    with pytest.raises(ValueError, match=r"'head\.bias' has shape"):
        DictPrior(bad).update_(net)
    assert dict(named_pyro_samples(net))["head.weight"].mean.unique() == 0.0


POINT = dist.Delta(torch.zeros(1, 2))


@pytest.mark.parametrize(
    "point", [POINT, POINT.to_event(1), POINT.to_event(2), dist.Delta(torch.zeros(1, 2), 0.0, 1)]
)
def test_a_point_is_no_prior(point):
    message = r"prior of 'weight' is a point.*AutoNormal, or tyxe\.LaplaceBNN; or hide"
    with pytest.raises(ValueError, match=message):
        DictPrior({"weight": point}, hide=["bias"]).sites(nn.Linear(2, 1))


def test_entries_for_what_is_not_there_are_refused():
    entries = {"weight": NORMAL.expand([1, 2]), "net.bias": NORMAL.expand([1])}
    net, prior = nn.Linear(2, 1), DictPrior(entries, hide=["bias"])
    assert list(prior.sites(net)) == ["weight"]
    message = r"an entry for '1\.weight', but the sites of the net are weight, bias: take"
    with pytest.raises(ValueError, match=message):
        DictPrior({**entries, "1.weight": NORMAL.expand([2, 2])}).sites(net)
    prior.apply_(net)
    before = dict(named_pyro_samples(net))
    with pytest.raises(ValueError, match=r"entry for 'net\.bias', but the sites .* are weight:"):
        DictPrior(entries).update_(net)
    assert dict(named_pyro_samples(net))["weight"] is before["weight"]
    DictPrior({"net.weight": entries["weight"]}).update_(net)
    prior.update_(net)  # its own rules leave the bias aside


def test_an_entry_may_have_either_name_of_a_tied_parameter():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    prior = NORMAL.expand([2, 2])
    entries = {"0.weight": prior, "1.weight": prior}
    assert list(DictPrior(entries, hide_parameters=["bias"]).sites(net)) == ["0.weight"]


def test_priors_move_with_the_bnn_and_survive_updates():
    bnn = mean_field(nn.Linear(2, 1), tyxe.likelihoods.Bernoulli(3))
    bnn.double()
    bnn.update_prior(DictPrior(bnn.net_guide.get_detached_distributions()))
    assert all(v.dtype == torch.float64 for v in bnn.net_prior().values())
    bnn.float()
    assert all(v.dtype == torch.float32 for v in bnn.net_prior().values())
