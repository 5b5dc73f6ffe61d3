"""Optimisers in every spelling: rates by kind, clipping, schedules and their state."""

import copy
import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from pyro.infer.autoguide import AutoNormal as PyroAutoNormal
from torch import nn

import tyxe
from tests.oracles.fits import PRIOR, X, Y, assert_equal, fitted, make, trainable
from tyxe.bnn import elbo_terms
from tyxe.guides import AutoNormal
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.optim.groups import make_optimizer

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")

SAME_ADAM = {
    "class with defaults": lambda bnn: torch.optim.Adam,
    "partial": lambda bnn: functools.partial(torch.optim.Adam, lr=1e-3),
    "function": lambda bnn: lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "instance": lambda bnn: torch.optim.Adam(bnn.parameters(), lr=1e-3),
    "pyro, a dictionary": lambda bnn: pyro.optim.Adam({"lr": 1e-3}),
    "pyro, a function of the name": lambda bnn: pyro.optim.Adam(lambda name: {"lr": 1e-3}),
    "pyro, of module and name": lambda bnn: pyro.optim.Adam(lambda module, name: {"lr": 1e-3}),
    "pyro, any class": lambda bnn: pyro.optim.PyroOptim(torch.optim.Adam, {"lr": 1e-3}),
    "pyro, a constant schedule": lambda bnn: pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 1e-3}, "gamma": 0.5}
    ),
}


@pytest.mark.parametrize("optim", SAME_ADAM)
def test_every_spelling_of_adam_is_adam(optim):
    bnn = make()
    start = trainable(bnn)
    pyro.set_rng_seed(7)
    optimizer = torch.optim.Adam([p for p in bnn.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        for rows in (slice(0, 6), slice(6, 10)):
            optimizer.zero_grad()
            terms = elbo_terms(bnn.model, bnn.guide, X[rows], Y[rows])
            ((terms.kl - terms.data) / 10).backward()
            optimizer.step()
    by_hand = trainable(bnn)
    found = fitted(SAME_ADAM[optim])
    assert_equal(found, by_hand, rtol=1e-5, atol=1e-7)
    assert all(not torch.equal(found[name], start[name]) for name in start)


def test_pyro_function_of_the_name_sets_rates():
    def rates(name):
        return {"lr": 0.0 if name.startswith("net.") else 0.1}

    start, end = trainable(make()), fitted(lambda bnn: pyro.optim.Adam(rates))
    for name in start:
        assert torch.equal(start[name], end[name]) == name.startswith("net."), name


ADAMW = {"lr": 0.0, "weight_decay": 0.1}
DECAYING = {
    "class": functools.partial(torch.optim.AdamW, **ADAMW),
    "sgd": functools.partial(torch.optim.SGD, **ADAMW),
    "pyro": pyro.optim.AdamW({**ADAMW}),
    "pyro, a function": pyro.optim.AdamW(lambda name: {**ADAMW}),
}


@pytest.mark.parametrize("optim", DECAYING)
def test_weights_decay_only_where_they_have_no_posterior(optim):
    bnn = make()
    bnn.fit([(X, Y)], DECAYING[optim], 1)
    names = {id(p): name for name, p in bnn.named_parameters()}
    found = {
        names[id(p)]: group["weight_decay"]
        for group in bnn.optimizer.param_groups
        for p in group["params"]
    }
    expected = {name: 0.1 if name.startswith("net.") else 0.0 for name in trainable(bnn)}
    assert found == expected
    assert set(expected.values()) == {0.0, 0.1}


def test_weight_decay_of_an_instance_is_warned_of():
    bnn = make()
    with pytest.warns(tyxe.TyxeWarning, match="widens the posterior"):
        bnn.fit([(X, Y)], torch.optim.AdamW(bnn.parameters(), lr=1e-3), 1)


def test_second_fit_with_a_pyro_optimiser_goes_on_with_its_state():
    optim, bnn = pyro.optim.ClippedAdam({"lr": 0.01, "clip_norm": 1.0, "lrd": 0.9}), make()
    bnn.fit([(X, Y)], optim, 2)
    first = bnn.optimizer
    assert isinstance(first, pyro.optim.clipped_adam.ClippedAdam)
    bnn.fit([(X, Y)], optim, 3)
    assert bnn.optimizer is first
    assert {state["step"] for state in first.state.values()} == {5}
    assert first.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**5)


def test_one_pyro_optimiser_serves_two_bnns():
    optim, left, right = pyro.optim.Adam({"lr": 0.01}), make(), make()
    left.fit([(X, Y)], optim, 1)
    before = trainable(left)
    right.fit([(X, Y)], optim, 1)
    assert left.optimizer is not right.optimizer
    assert_equal(trainable(left), before)


def rates_of(bnn):
    """The learning rate of each parameter by name."""
    rates = {id(p): group["lr"] for group in bnn.optimizer.param_groups for p in group["params"]}
    return {n: rates[id(p)] for n, p in bnn.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
@pytest.mark.parametrize(
    "optim",
    [
        functools.partial(torch.optim.SGD, lr=0.1),
        pyro.optim.SGD({"lr": 0.1}),
        pyro.optim.SGD(lambda name: {"lr": 0.1}),
    ],
)
def test_rates_by_kind(optim, guide):
    bnn = make(guide=guide)
    bnn.fit([(X, Y)], optim, 1, lr_multipliers={"loc": 0.5, "scale": 10, "deterministic": 2})
    for name, rate in (rates := rates_of(bnn)).items():
        kind = 0.2 if name.startswith("net.") else 1.0 if "scale" in name else 0.05
        assert rate == pytest.approx(kind), name
    assert len({round(rate, 9) for rate in rates.values()}) == 3


def test_likelihoods_variables_have_kinds_too():
    likelihood = HomoskedasticGaussian(10, scale=dist.LogNormal(0.0, 1.0))
    bnn = tyxe.VariationalBNN(nn.Linear(2, 1), PRIOR, likelihood, AutoNormal, AutoNormal)
    optim = functools.partial(torch.optim.SGD, lr=0.01)
    bnn.fit([(X, X[:, :1])], optim, 1, lr_multipliers={"scale": 10})
    rates = rates_of(bnn)
    assert rates["likelihood_guide.locs.scale"] == pytest.approx(0.01)
    assert rates["likelihood_guide.unconstrained_scales.scale"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "optim",
    [
        lambda: pyro.optim.Adam({"lr": 0.01}),
        lambda: pyro.optim.Adam(lambda name: {"lr": 0.01}),
        lambda: pyro.optim.ExponentialLR(
            {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.01}, "gamma": 0.9}
        ),
    ],
)
@pytest.mark.parametrize("layer", [0, 3])
def test_a_pyro_optimiser_trains_parameters_set_free_since(optim, layer):
    hide = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_modules=["0", "1"])
    bnn, optim = make(prior=hide), optim()
    held = bnn.net[0] if layer == 0 else bnn.net_guide.locs
    for parameter in held.parameters():
        parameter.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in held.parameters()]
    bnn.fit([(X, Y)], optim, 1)
    assert all(map(torch.equal, held.parameters(), before))
    for parameter in held.parameters():
        parameter.requires_grad_(True)
    start = trainable(bnn)
    bnn.fit([(X, Y)], optim, 1)
    assert not any(torch.equal(value, start[name]) for name, value in trainable(bnn).items())


VALUES = torch.zeros(6)
OWN_MEMORY = {
    "own": [torch.zeros(6), torch.zeros(2, 3).T],
    "parts of one": [VALUES[:3], VALUES[3:]],
    "channels last": [torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)],
    "empty": [torch.zeros(0), VALUES],
}
SHARED_MEMORY = {
    "expanded": [torch.zeros(1).expand(6)],
    "expanded rows": [torch.zeros(3).expand(2, 3)],
    "with gaps": [VALUES[::2]],
    "overlapping": [VALUES[:4], VALUES[2:]],
    "twice": [VALUES, VALUES.view(2, 3)],
}


@pytest.mark.parametrize("optim", [torch.optim.Adam, pyro.optim.Adam({})])
@pytest.mark.parametrize("kind", [*OWN_MEMORY, *SHARED_MEMORY])
def test_fused_kernels_are_for_parameters_with_memory_of_their_own(kind, optim):
    parts = (OWN_MEMORY | SHARED_MEMORY)[kind]
    parameters = {str(index): nn.Parameter(part) for index, part in enumerate(parts)}
    optimizer = make_optimizer(optim, parameters, dict.fromkeys(parameters, "loc"))
    assert bool(optimizer.param_groups[0]["fused"]) == (kind in OWN_MEMORY)


STARTS = {
    "mean": pyro.infer.autoguide.init_to_mean,
    "one tensor for all": lambda site: ONE.expand(site["fn"].shape()),
    "a tensor of the user's": lambda site: GIVEN[site["name"]],
}
ONE, GIVEN = torch.tensor(0.5), {"net.weight": torch.ones(3, 5)[:, :2], "net.bias": torch.ones(3)}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("guide", [PyroAutoNormal, AutoDelta, AutoNormal])
def test_parameters_of_guides_have_memory_of_their_own(guide, start):
    given = [ONE.clone(), *(value.clone() for value in GIVEN.values())]
    guide = functools.partial(guide, init_loc_fn=STARTS[start])
    bnn = tyxe.VariationalBNN(nn.Linear(2, 3), PRIOR, tyxe.likelihoods.Categorical(6), guide)
    for parameter in bnn.net_guide.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    plain = copy.deepcopy(bnn)
    batch = torch.ones(6, 2), torch.arange(6) % 3
    for own, fused in ((bnn, True), (plain, False)):
        torch.manual_seed(0)
        own.fit([batch], functools.partial(torch.optim.Adam, lr=0.1, fused=fused), 3)
    torch.testing.assert_close(bnn.state_dict(), plain.state_dict())
    assert all(map(torch.equal, given, [ONE, *GIVEN.values()]))  # nothing of the user's is trained
