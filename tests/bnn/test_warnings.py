"""Results that would be quietly wrong are announced, and good ones are not."""

import functools
import re
import warnings
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from pyro.infer.mcmc import HMC
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, mlp
from tyxe.guides import AutoNormal, AutoRadial
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

ADAM = functools.partial(torch.optim.Adam, lr=0.05)
FROZEN = functools.partial(torch.optim.SGD, lr=0.0)


def make(net=None, guide=AutoNormal, dataset_size=50, scale=0.5, prior=NORMAL):
    likelihood = HomoskedasticGaussian(dataset_size, scale=scale)
    return tyxe.VariationalBNN(net or nn.Linear(2, 1), prior, likelihood, guide)


def data():
    x = torch.randn(50, 2)
    return x, x.sum(-1, keepdim=True) + 0.5 * torch.randn(50, 1)


def messages(*calls, handler=nullcontext):
    """Return what calls inside of a handler warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with handler():
            for call in calls:
                call()
    assert all(issubclass(w.category, tyxe.TyxeWarning) for w in caught)
    return caught


# --------------------------------------------------------------------------- after a fit


GOOD = [
    *((guide, NORMAL) for guide in (AutoNormal, AutoRadial, AutoDiagonalNormal, AutoDelta)),
    # Without a variance, next to which scales might have collapsed.
    *(
        (AutoNormal, tyxe.priors.IIDPrior(prior))
        for prior in (dist.Cauchy(0, 1), dist.StudentT(2.0))
    ),
]


@pytest.mark.parametrize(("guide", "prior"), GOOD)
def test_a_good_fit_is_silent(guide, prior):
    bnn = make(guide=guide, prior=prior)
    assert messages(lambda: bnn.fit([data()], ADAM, 60)) == []


@pytest.mark.parametrize(
    ("scale", "what", "callback"),
    [(1e-9, "collapsed", None), (50.0, "exploded", None), (1e-9, "collapsed", lambda *_: True)],
)
def test_scales_that_left_all_bounds(scale, what, callback):
    bnn = make(guide=functools.partial(AutoNormal, init_scale=scale))
    caught = messages(lambda: bnn.fit([data()], FROZEN, 3, callback, beta=0.01))
    assert len(caught) == 2  # weight and bias
    text = str(caught[0].message)
    assert f"standard deviations of site 'net.weight' have {what}" in text
    assert "lr_multipliers" in text
    assert "max_guide_scale" in text
    assert caught[0].filename == __file__  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error", tyxe.TyxeWarning)
        with pytest.raises(tyxe.TyxeWarning, match=what):
            bnn.fit([data()], FROZEN, 1, beta=0.01)
    assert all(module.training for module in bnn.modules())


def tiny():
    """Tiny scales next to a tiny prior are a posterior like any other."""
    start = {"init_loc_fn": tyxe.guides.init_to_zero, "init_scale": 1e-9}
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1e-8))
    return make(guide=functools.partial(AutoNormal, **start), prior=prior)


def a_few_dead_weights():
    bnn = make(nn.Linear(2, 5), dataset_size=50)
    with torch.no_grad():
        bnn.net_guide.unconstrained_scales["weight"][0, :2] = -25.0
    return bnn


def large_map():
    """Minus the log-density of many weights is large whatever they are."""
    return make(mlp(2, 2_000, 1), AutoDelta, scale=1.0)


@pytest.mark.parametrize(
    ("kind", "beta"), [(tiny, 0.01), (a_few_dead_weights, 0.01), (large_map, 1)]
)
def test_plausible_scales_and_kls_are_silent(kind, beta):
    bnn, (x, y) = kind(), data()
    outputs = bnn.net(x).shape[1]
    assert messages(lambda: bnn.fit([(x, y.expand(-1, outputs))], FROZEN, 1, beta=beta)) == []


def test_kl_that_dwarfs_the_data():
    bnn = make(mlp(2, 200, 1), scale=2.0)
    (caught,) = messages(lambda: bnn.fit([data()], FROZEN, 1, beta=100.0))
    text = str(caught.message)
    assert "nats) dwarfs the data" in text
    assert "dataset_size" in text
    assert "beta < 1" in text
    assert caught.filename == __file__
    # Weighted down, it does not.
    assert messages(lambda: bnn.fit([data()], FROZEN, 1, beta=1e-3)) == []


# --------------------------------------------------------------------------- missed handlers


HANDLERS = [tyxe.poutine.local_reparameterization, tyxe.poutine.flipout]


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("handler", HANDLERS)
def test_linear_maps_alone_are_silent(handler):
    bnn = make()
    calls = lambda: bnn.fit([data()], ADAM, 60), lambda: bnn.predict(data()[0], num_predictions=3)
    assert messages(*calls, handler=handler) == []


def test_an_error_on_its_way_is_not_buried_under_warnings():
    bnn = tyxe.VariationalBNN(Embedded(), NORMAL, Categorical(6), AutoNormal)

    def call():
        with pytest.raises(ValueError, match="targets"), tyxe.poutine.local_reparameterization():
            bnn.evaluate(torch.arange(6) % 3, torch.zeros(5).long())

    assert messages(call) == []


# --------------------------------------------------------------------------- size of the data


def batches(*sizes):
    return [(torch.randn(size, 2), torch.randn(size, 1)) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        *((sizes, None) for sizes in ((50,), (30, 20), (40,), (2, 1))),
        ((30, 21), "an epoch had 51 points, but .* dataset_size=50, so the data count for too lit"),
        ((2,), "an epoch had 2 points, but .* dataset_size=50, so the data count for too much"),
    ],
)
def test_an_epoch_of_an_unlikely_size_is_told_once_a_fit(sizes, message):
    bnn = make()
    caught = messages(lambda: bnn.fit(batches(*sizes), FROZEN, 3, beta=0.01))
    assert len(caught) == (message is not None)
    for one in caught:
        assert re.search(message, str(one.message))
        assert one.filename == __file__


def test_only_points_that_count_are_counted():
    bnn, mask = make(), torch.arange(60) < 50
    with tyxe.poutine.selective_mask(mask=mask, expose=["likelihood.data"]):
        assert messages(lambda: bnn.fit(batches(60), FROZEN, 1, beta=0.01)) == []


def test_sums_of_weights_are_rounded():
    # The sum over 400 batches is 400.004 in single precision, and that of all points 399.99997.
    labels = (torch.arange(400) < 6).long()
    weights = (400 / (2 * labels.bincount().float()))[labels]
    data = [(x, y, w) for (x, y), w in zip(batches(*[1] * 400), weights.split(1), strict=True)]
    bnn = make()
    bnn.likelihood.dataset_size = 400
    assert messages(lambda: bnn.fit(data, FROZEN, 1, beta=0.01)) == []
    chain = mcmc(nn.Linear(2, 1), dataset_size=400)
    assert messages(lambda: chain.fit(data, 1, warmup_steps=1, disable_progbar=True)) == []


def mcmc(net, prior=NORMAL, dataset_size=50):
    kernel = functools.partial(HMC, step_size=0.01, num_steps=1)
    return tyxe.MCMC_BNN(net, prior, HomoskedasticGaussian(dataset_size, scale=0.5), kernel)


def sample(bnn, *sizes):
    return messages(lambda: bnn.fit(batches(*sizes), 1, warmup_steps=1, disable_progbar=True))


def test_mcmc_on_fewer_points_than_said():
    (caught,) = sample(mcmc(nn.Linear(2, 1)), 20, 5)
    assert "dataset_size=50, but there are 25 points: each counts 2 times" in str(caught.message)
    assert caught.filename == __file__
    assert sample(mcmc(nn.Linear(2, 1)), 30, 20) == []


def test_mcmc_does_not_fit_what_the_prior_hides():
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide=["bias"])
    (caught,) = sample(mcmc(nn.Linear(2, 1), prior), 50)
    assert str(caught.message).startswith("MCMC does not fit bias, which the prior hides")
    assert caught.filename == __file__
    frozen = nn.Linear(2, 1)
    frozen.bias.requires_grad_(False)
    assert sample(mcmc(frozen, prior), 50) == []


# --------------------------------------------------------------------------- around a constructor

PLATE = functools.partial(pyro.plate, "data", 7)
AROUND = [*HANDLERS, tyxe.poutine.variational_laplace, pyro.poutine.trace, PLATE]


@pytest.mark.parametrize("handler", AROUND)
@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal, AutoDelta, "laplace"])
def test_a_bnn_is_built_inside_of_a_handler_as_outside(handler, guide):
    def build():
        torch.manual_seed(0)
        if guide == "laplace":
            return tyxe.LaplaceBNN(nn.Linear(2, 1), NORMAL, HomoskedasticGaussian(50, scale=0.5))
        return make(guide=guide)

    built = []

    def inside():
        with handler() as entered:
            built.append(build())
        assert not isinstance(entered, pyro.poutine.trace_messenger.TraceMessenger) or (
            not entered.trace.nodes
        )

    assert messages(inside) == []
    expected = build().state_dict()
    for name, value in built[0].state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, expected[name])


def test_a_scale_that_is_met_by_the_constructor_alone_is_not_used():
    scaled = functools.partial(tyxe.poutine.selective_scale, scale=0.5, expose=["weight"])
    (warning,) = messages(make, handler=scaled)
    assert "exposed weight, but no site of that name was sampled" in str(warning.message)
