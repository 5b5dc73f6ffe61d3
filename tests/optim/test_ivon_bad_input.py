"""What IVON does not serve is an error that says what it needs, and changes nothing."""

import functools
from contextlib import nullcontext

import pyro.distributions as dist
import pyro.poutine
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tyxe
from tests.oracles.rejections import PRIOR, N, X, Y, make, rejects
from tyxe.guides import AutoNormal, AutoRadial, init_to_median
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.optim import IVON
from tyxe.priors import IIDPrior

# A mask that no site has met, because the fit has not begun.
pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
OPTIM = functools.partial(IVON, lr=0.1)
PARTS = nn.Linear(2, 1), PRIOR, HomoskedasticGaussian(N, scale=0.5)


def pruned():
    bnn = make()
    tyxe.guides.prune_(bnn.net_guide, keep=0.5)
    return bnn


def own_likelihood():
    likelihood = HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5))
    return tyxe.VariationalBNN(nn.Linear(2, 1), PRIOR, likelihood, AutoNormal, AutoNormal)


def likelihood_only():
    net, _, likelihood = PARTS
    return tyxe.VariationalBNN(net, IIDPrior(dist.Normal(0, 1), hide_all=True), likelihood)


def hierarchical():
    def prior(name, module, param):
        return lambda: dist.Normal(
            torch.zeros_like(param), pyro.sample(f"{name}.tau", dist.LogNormal(0.0, 1.0))
        )

    return make(prior=tyxe.priors.LambdaPrior(prior))


def of_normal(prior=PRIOR, **options):
    return make(prior=prior, guide=functools.partial(AutoNormal, **options))


MEDIAN = {"init_loc_fn": init_to_median}
POSITIVE = IIDPrior(dist.LogNormal(0.0, 1.0), expose=["2.bias"])
LAPLACE = IIDPrior(dist.Laplace(0, 1))
BNNS = {
    "another guide": (lambda: make(guide=AutoRadial), "AutoRadial"),
    "Pyro's guide": (lambda: make(guide=AutoDiagonalNormal), "the guide a PyroGuide"),
    "no guide": (likelihood_only, "the guide None"),
    "another wrapper": (lambda: tyxe.LaplaceBNN(*PARTS), "the guide a LaplaceGuide"),
    "a cap": (lambda: of_normal(max_guide_scale=1.0), "0.weight"),
    "fixed means": (lambda: of_normal(train_loc=False), "0.weight"),
    "fixed scales": (lambda: of_normal(train_scale=False), "0.weight"),
    "pruned weights": (pruned, "net.0.weight' with the posterior a PrunedNormal"),
    "a constrained support": (lambda: of_normal(POSITIVE, **MEDIAN), "net.2.bias"),
    "another prior": (lambda: make(prior=LAPLACE), "net.0.weight.* and the prior a Laplace"),
    "a hierarchical prior": (hierarchical, "net.0.weight"),
    "half precision": (lambda: make().bfloat16(), "0.weight"),
    "a guide of the likelihood": (own_likelihood, "a guide of the likelihood"),
}


@pytest.mark.parametrize("case", BNNS)
def test_what_is_not_served_is_named(case):
    make_bnn, message = BNNS[case]
    bnn = make_bnn()
    message = f"IVON does not serve .*{message}.*"
    rejects(bnn, ValueError, message, lambda: bnn.fit([(X, Y)], OPTIM, 1))


SCALED = functools.partial(pyro.poutine.scale, scale=2.0)


@pytest.mark.parametrize(
    ("options", "handler", "message"),
    [
        ({}, tyxe.poutine.local_reparameterization, "an active handler"),
        ({}, SCALED, "an active handler"),
        ({"parallel": DistributedDataParallel}, nullcontext, "parallel"),
        ({"closed_form_kl": False}, nullcontext, "closed_form_kl=False"),
        ({"lr_multipliers": {"scale": 10.0}}, nullcontext, "lr_multipliers of scales"),
        ({"beta": 0.0}, nullcontext, "beta is 0.0; expected"),
    ],
)
def test_options_and_handlers_are_refused(options, handler, message):
    bnn = make()
    with handler():
        rejects(bnn, ValueError, message, lambda: bnn.fit([(X, Y)], OPTIM, 1, **options))


def test_rates_of_means_may_have_factors():
    bnn = make()
    bnn.fit([(X, Y)], OPTIM, 1, lr_multipliers={"loc": 0.5, "scale": 1.0})
    assert {group["lr"] for group in bnn.optimizer.param_groups} == {0.05, 0.1}


def test_groups_may_have_curvatures_of_their_own():
    bnn = make()
    guide = bnn.net_guide
    first = guide.locs["0.weight"]
    rest = [p for p in bnn.parameters() if p is not first]
    groups = [{"params": [first], "hess_init": 1e4}, {"params": rest}]
    bnn.fit([(X, Y)], IVON(groups, lr=1e-9, hess_init=1.0), 1)
    expected = pytest.approx((bnn.likelihood.dataset_size * 1e4) ** -0.5, rel=1e-2)
    assert guide.get_scale("0.weight").detach().numpy() == expected
    assert (guide.get_scale("0.bias") > 10 * guide.get_scale("0.weight").max()).all()


def test_an_instance_has_to_hold_all_of_the_guide():
    bnn = make()
    optimizer = IVON([bnn.net_guide.locs["0.weight"]], lr=0.1)
    rejects(bnn, ValueError, "net.0.weight", lambda: bnn.fit([(X, Y)], optimizer, 1))


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.0), ("lr", "fast"), ("hess_init", -1.0), ("betas", (0.9, 1.0))]
)
def test_arguments_are_checked(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name} is "):
        IVON([torch.zeros(1)], **{"lr": 0.1, name: value})


def test_a_loop_of_ones_own_is_an_error():
    net, bnn = nn.Linear(2, 1), make()
    before = net.weight.detach().clone()
    net(X).sum().backward()
    bnn.fit([(X, Y)], OPTIM, 1)  # whose optimiser has no step left
    for optimizer in (IVON(net.parameters(), lr=0.1), bnn.optimizer):
        with pytest.raises(RuntimeError, match=r"VariationalBNN\.fit"):
            optimizer.step()
    assert torch.equal(net.weight, before)
