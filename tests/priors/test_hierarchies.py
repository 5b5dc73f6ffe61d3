"""Hierarchies and priors beyond the Normal are fitted."""

import copy
import functools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from pyro.infer import autoguide
from pyro.infer.mcmc import HMC

import tyxe
from tests.oracles.bnns import mean_field
from tyxe.guides import PyroGuide
from tyxe.priors import IIDPrior, LambdaPrior
from tyxe.testing import check_prior
from tyxe.util import pyro_sample_sites


def horseshoe(name, module, param):
    def prior():
        local = dist.HalfCauchy(param.new_ones(param.shape)).to_event(param.dim())
        shared = pyro.sample(f"{name}_global", dist.HalfCauchy(param.new_ones(())))
        return dist.Normal(0.0, shared * pyro.sample(f"{name}_local", local))

    return prior


def test_hierarchies_keep_the_contract():
    for function in (horseshoe, named_below):
        check_prior(LambdaPrior(function, hide_parameters=["bias"]))
        check_prior(LambdaPrior(function), nn.Linear(3, 2))


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_a_horseshoe_is_fitted_end_to_end():
    x = torch.randn(40, 4)
    y = x[:, :1] * 3.0 + 0.1 * torch.randn(40, 1)
    bnn = tyxe.VariationalBNN(
        nn.Linear(4, 1, bias=False),
        LambdaPrior(horseshoe),
        tyxe.likelihoods.HomoskedasticGaussian(40, scale=0.1),
        functools.partial(tyxe.guides.AutoNormal, init_scale=0.05),
    )
    names = ["net.weight_global", "net.weight_local", "net.weight"]
    history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=0.1), 80)
    assert history.loss[-1] < history.loss[0]
    draws = [bnn.guide() for _ in range(20)]
    assert sorted(draws[0]) == sorted(names)
    assert all(bool((draw[name] > 0).all()) for draw in draws for name in names[:2])
    weight = bnn.net_guide.median()["net.weight"].squeeze()
    assert abs(weight[0] - 3) < 0.3
    assert bool((weight[1:].abs() < 0.3).all())
    assert pyro_sample_sites(bnn.net) == ["weight"]
    assert bnn.predict(x, num_predictions=2)[0].shape == (40, 1)
    assert copy.deepcopy(bnn)(x).shape == (40, 1)


def named_below(name, module, param):
    """A prior of which the variables' names begin with the weight's and a dot."""

    def prior():
        loc = pyro.sample(f"{name}.loc", dist.Normal(param.new_zeros(param.shape), 1.0).to_event())
        scale = dist.HalfCauchy(param.new_ones(param.shape)).to_event(param.dim())
        return dist.Normal(loc, pyro.sample(f"{name}.scale", scale))

    return prior


GUIDES = {
    kind.__name__: kind
    for kind in (
        autoguide.AutoDelta,
        autoguide.AutoNormal,
        autoguide.AutoStructured,
        autoguide.AutoGaussian,
        autoguide.AutoNormalMessenger,
        autoguide.AutoDiagonalNormal,
        autoguide.AutoMultivariateNormal,
        autoguide.AutoLowRankMultivariateNormal,
        tyxe.guides.AutoRadial,
    )
} | {"ours": tyxe.guides.AutoNormal}


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES)
def test_variables_may_be_named_below_their_weight(guide):
    def make():
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.5)
        net = nn.Linear(3, 1, bias=False)
        return tyxe.VariationalBNN(net, LambdaPrior(named_below), likelihood, guide)

    x = torch.randn(10, 3)
    bnn, other = make(), make()
    names = {"net.weight", "net.weight.loc", "net.weight.scale"}
    assert bnn.guide().keys() == names
    assert names <= {*poutine.trace(bnn.guide).get_trace().stochastic_nodes}
    before = [p.clone() for p in bnn.net_guide.parameters()]
    history = bnn.fit([(x, x[:, :1])], functools.partial(torch.optim.Adam, lr=1e-2), 3)
    assert all(map(math.isfinite, history.loss))
    after = bnn.net_guide.parameters()
    assert not all(map(torch.equal, before, after))
    other.load_state_dict(bnn.state_dict())
    found = []
    for one in (bnn, other):
        torch.manual_seed(1)
        found.append(one.predict(x, num_predictions=4, aggregate=False))
    assert torch.equal(*found)
    if isinstance(bnn.net_guide, PyroGuide) and guide is not autoguide.AutoNormalMessenger:
        assert bnn.net_guide.median().keys() == names
    if guide is autoguide.AutoNormal:
        found = bnn.net_guide.get_detached_distributions()
        assert found["weight.scale"].sample().min() > 0
        assert found.keys() == {name.removeprefix("net.") for name in names}


def test_samples_of_a_hierarchy_are_saved_with_its_own_variables(tmp_path):
    def make(prior):
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1)
        kernel = functools.partial(HMC, step_size=0.01, num_steps=2)
        return tyxe.MCMC_BNN(nn.Linear(4, 1, bias=False), prior, likelihood, kernel)

    bnn, fresh = make(LambdaPrior(horseshoe)), make(LambdaPrior(horseshoe))
    bnn.fit([(torch.randn(10, 4), torch.randn(10, 1))], 3, warmup_steps=1, disable_progbar=True)
    bnn.save(tmp_path / "file")
    fresh.load(tmp_path / "file")
    names = {"net.weight_global", "net.weight_local", "net.weight"}
    assert fresh.get_samples().keys() == bnn.get_samples().keys() == names
    with pytest.raises(RuntimeError, match="does not fit"):
        make(IIDPrior(dist.Normal(0, 1))).load(tmp_path / "file")


def test_the_density_of_a_hierarchy_is_that_of_its_parts():
    net = nn.Linear(2, 1, bias=False).double()
    bnn = mean_field(net, tyxe.likelihoods.Bernoulli(3), LambdaPrior(horseshoe))
    trace = poutine.trace(bnn.net_prior).get_trace()
    values = {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
    cauchy = td.HalfCauchy(torch.ones((), dtype=torch.float64))
    scale = values["net.weight_global"] * values["net.weight_local"]
    expected = cauchy.log_prob(values["net.weight_global"])
    expected += cauchy.log_prob(values["net.weight_local"]).sum()
    expected += td.Normal(0.0, scale).log_prob(values["net.weight"]).sum()
    torch.testing.assert_close(trace.log_prob_sum(), expected)
