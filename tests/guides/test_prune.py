"""Pruned guides: the largest entries stay, the others are zero for good."""

import copy
import functools
import pickle

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.inducing import data, make, program, wide_net
from tyxe.bnn.elbo import elbo_terms
from tyxe.testing import check_guide

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def both_maps(tensors_of_sides):
    return torch.cat([tensors["0.weight"].flatten() for tensors in tensors_of_sides])


def test_pruned_maps_stay_pruned():
    x, y = data(inputs=20, outputs=2)
    builder = functools.partial(tyxe.guides.AutoInducing, inducing_rows=4, inducing_cols=5)
    bnn, other = (make(builder, wide_net().double()) for _ in range(2))
    guide = bnn.net_guide
    before, size = tyxe.guides.parameter_count(guide), 4 * 30 + 5 * 21
    entries = both_maps([guide.row_maps, guide.column_maps])
    tyxe.guides.prune_inducing_(guide, keep=0.4)
    assert before - tyxe.guides.parameter_count(guide) == size - round(0.4 * size)
    kept = both_maps([guide.kept_rows, guide.kept_columns])
    assert entries[kept].abs().min() >= entries[~kept].abs().max()
    history = bnn.fit([(x, y)], ADAM, 10)
    assert history.loss[-1] < history.loss[0]
    maps = torch.cat([guide.map("0.weight", side).flatten() for side in range(2)])
    assert torch.equal(maps != 0, kept)
    tyxe.guides.prune_inducing_(other.net_guide, keep=1.0)
    other.load_state_dict(bnn.state_dict())
    found = []
    for one in (bnn, other):
        torch.manual_seed(0)
        found.append(one.predict(x, num_predictions=2, aggregate=False))
    assert torch.equal(*found)
    tyxe.guides.prune_inducing_(guide, keep=0.2)
    assert before - tyxe.guides.parameter_count(guide) == size - round(0.2 * size)
    with pytest.raises(ValueError, match="the elements that are left of"):
        tyxe.guides.prune_inducing_(guide, keep=0.3)


def test_a_guide_of_biases_has_nothing_to_prune():
    biases = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, expose=["bias"])
    net, likelihood = nn.Linear(2, 1), tyxe.likelihoods.HomoskedasticGaussian(4, scale=1.0)
    guide = tyxe.VariationalBNN(net, biases, likelihood, tyxe.guides.AutoNormal).net_guide
    with pytest.raises(ValueError, match="no weights of two dimensions or more"):
        tyxe.guides.prune_(guide, keep=0.5)


def test_a_sampled_kl_leaves_out_what_is_pruned():
    torch.manual_seed(0)
    x, y, num_draws = torch.randn(5, 4), torch.randn(5, 3), 400
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.3)
    prior = tyxe.priors.IIDPrior(dist.Normal(0.2, 1.5))
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=1.0)
    bnn = tyxe.VariationalBNN(nn.Linear(4, 3), prior, likelihood, guide)
    tyxe.guides.prune_(bnn.net_guide, keep=0.5)

    def kl(closed):
        return elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=closed).kl.detach()

    sampled = torch.stack([kl(False) for _ in range(num_draws)])
    assert abs(sampled.mean() - kl(True)) < 4 * sampled.std() / num_draws**0.5


def test_rows_of_which_nothing_is_left():
    guide = tyxe.guides.AutoInducing(program(wide_net()), 4, 5)
    with torch.no_grad():
        guide.row_maps["0.weight"][1] = 1e-9
    tyxe.guides.prune_inducing_(guide, keep=0.8)
    assert not guide.kept_rows["0.weight"][1].any()
    assert bool(guide()["net.0.weight"].isfinite().all())


def test_pruned_mean_fields():
    x, y = data(inputs=20, outputs=2)
    bnn = make(functools.partial(tyxe.guides.AutoNormal, init_scale=0.1), wide_net().double())
    guide = bnn.net_guide
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(torch.randn_like(parameter))
    ratios = torch.cat(
        [(guide.get_loc(n).abs() / guide.get_scale(n)).flatten() for n in ("0.weight", "2.weight")]
    )
    before = tyxe.guides.parameter_count(guide)
    tyxe.guides.prune_(guide, keep=0.1)
    assert before - tyxe.guides.parameter_count(guide) == 2 * (660 - 66)
    kept = torch.cat([guide.kept[n].flatten() for n in ("0.weight", "2.weight")])
    assert ratios[kept].min() >= ratios[~kept].max()
    assert "0.bias" not in guide.kept
    for handler in (tyxe.poutine.local_reparameterization, tyxe.poutine.flipout):
        with tyxe.poutine.report() as report, handler():
            history = bnn.fit([(x, y)], ADAM, 10)
        assert history.loss[-1] < history.loss[0]
        assert "drawn" not in report.treatments("0.weight")
    assert bool((guide()["net.0.weight"][~guide.kept["0.weight"]] == 0).all())
    check_guide(pruned_mean_field)


def test_a_pruned_net_linearised():
    bnn = make(pruned_mean_field, nn.Linear(3, 2).double())
    x = torch.randn(4, 3).double()
    _, scale = bnn.predict(x, predictive="glm")
    variances = {n: q.variance for n, q in bnn.net_guide.posterior().items()}
    assert int((variances["net.weight"] == 0).sum()) == 3
    expected = x.square() @ variances["net.weight"].mT + variances["net.bias"] + 0.5**2
    torch.testing.assert_close(scale.square(), expected.detach())


def pruned_mean_field(module):
    guide = tyxe.guides.AutoNormal(module)
    with torch.no_grad():
        for _, loc in guide.locs.items():
            loc.add_(torch.linspace(1, 2, loc.numel()).to(loc).view(loc.shape))
    tyxe.guides.prune_(guide, keep=0.5)
    return guide


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bnn: pickle.loads(pickle.dumps(bnn))])
def test_copies_are_pruned_and_fitted_on(copied):
    """A copy's supports are other objects; and a site of which nothing is left has not exploded."""
    net = nn.Sequential(nn.Linear(20, 3, bias=False), nn.Linear(3, 1, bias=False)).double()
    x, y = data(inputs=20)
    bnn = copied(make(functools.partial(tyxe.guides.AutoNormal, init_scale=0.1), net))
    with torch.no_grad():
        bnn.net_guide.locs["0.weight"].fill_(1.0)
    tyxe.guides.prune_(bnn.net_guide, keep=0.5)
    assert not bool(bnn.net_guide.kept["1.weight"].any())
    bnn.fit([(x, y)], ADAM, 2)
