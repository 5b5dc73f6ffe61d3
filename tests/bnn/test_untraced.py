"""Steps without Pyro's traces have the terms and gradients of traced steps, for the same draws."""

import copy
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import autoguide
from torch import nn

import tyxe
from tyxe.bnn.parallel import Objective
from tyxe.data import Targets
from tyxe.guides import AutoNormal

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
POINTS = 12
BETA = 0.3
HANDLERS = {
    "none": nullcontext,
    "local": tyxe.poutine.local_reparameterization,
    "flipout": tyxe.poutine.flipout,
}


def inducing(family, **options):
    sizes = {"inducing_rows": 2, "inducing_cols": 2, "everywhere": True}
    return functools.partial(tyxe.guides.AutoInducing, q_inducing=family, **sizes, **options)


GUIDES = {
    "normal": AutoNormal,
    "capped": functools.partial(AutoNormal, max_guide_scale=0.5),
    "radial": tyxe.guides.AutoRadial,
    "inducing, diagonal": inducing("diagonal"),
    "inducing, full": inducing("full"),
    "inducing, matrix": inducing("matrix", max_lambda=0.5, max_scale_u=0.5),
    "inducing, ensemble": inducing("ensemble"),
    "inducing, hierarchical": inducing("full", hierarchical=(2, 2)),
    "binary": tyxe.guides.AutoBernoulli,
    "binary, relaxed": functools.partial(tyxe.guides.AutoBernoulli, relaxed=0.5),
    "delta": autoguide.AutoDelta,
    "Pyro's normal": autoguide.AutoNormal,
    "Pyro's diagonal": autoguide.AutoDiagonalNormal,
    "multivariate": autoguide.AutoMultivariateNormal,
    "low rank": autoguide.AutoLowRankMultivariateNormal,
}
# They sample other variables than their sites.
TRACED = {"Pyro's normal", "Pyro's diagonal"}


class Likely(NamedTuple):
    """A likelihood, how many outputs it takes, and its targets."""

    build: Callable[[], tyxe.likelihoods.Likelihood]
    outputs: int
    targets: Callable[[], torch.Tensor]


def numbers():
    return torch.randn(POINTS, 2)


LIKELIHOODS = {
    "categorical": Likely(
        lambda: tyxe.likelihoods.Categorical(60), 3, lambda: torch.arange(POINTS) % 3
    ),
    "Bernoulli": Likely(
        lambda: tyxe.likelihoods.Bernoulli(60, event_dim=1), 2, lambda: (numbers() > 0).float()
    ),
    "Poisson": Likely(
        lambda: tyxe.likelihoods.Poisson(60, event_dim=1), 2, lambda: numbers().abs().round()
    ),
    "Gaussian": Likely(lambda: tyxe.likelihoods.HomoskedasticGaussian(60, scale=0.5), 2, numbers),
    "Gaussian, learned": Likely(
        lambda: tyxe.likelihoods.HomoskedasticGaussian(60, scale=0.5, learn_scale=True), 2, numbers
    ),
    "Gaussian, inferred": Likely(
        lambda: tyxe.likelihoods.HomoskedasticGaussian(60, scale=dist.LogNormal(0.0, 0.3)),
        2,
        numbers,
    ),
    "heteroskedastic": Likely(lambda: tyxe.likelihoods.HeteroskedasticGaussian(60), 4, numbers),
}


def gradients(objective, state, inputs, targets, **options):
    """Return terms and gradients of one forward, whose draws are the same in each call."""
    bnn = objective.bnn
    bnn.load_state_dict(state)  # some guides take turns
    for parameter in bnn.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    loss = objective(inputs, targets, BETA, **options)
    terms, was_added = objective.take_terms(), objective.added is not None
    loss.backward()
    objective.add_gradients(BETA)
    found = {n: p.grad for n, p in bnn.named_parameters() if p.requires_grad}
    return terms, found, was_added


def assert_equal_steps(bnn, inputs, targets, closed_form_kl=True):
    """Compare a traced step with the second of an objective, and say if that was untraced."""
    objective = Objective(bnn, closed_form_kl, 2)
    state = copy.deepcopy(bnn.state_dict())
    traced, expected, _ = gradients(objective, state, inputs, targets)
    first, found, was_added = gradients(objective, state, inputs, targets, untraced=True)
    assert not was_added
    second, found, was_added = gradients(objective, state, inputs, targets, untraced=True)
    for term in ("data", "kl"):
        torch.testing.assert_close(getattr(second, term), getattr(traced, term), rtol=2e-5, atol=0)
    assert float(second.points) == float(traced.points) == float(first.points)
    assert {n for n, g in found.items() if g is None} == {
        n for n, g in expected.items() if g is None
    }
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    return was_added


def small(likely, guide, prior=NORMAL):
    torch.manual_seed(0)
    outputs = likely.outputs
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))
    likelihood = likely.build()
    own = AutoNormal if likelihood.latent_priors() else None
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide, own)
    return bnn, torch.randn(POINTS, 4), likely.targets()


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("guide", GUIDES)
def test_guides_and_handlers(guide, handler):
    if guide == "binary" and handler != "local":
        pytest.skip("binary weights have gradients by local reparameterisation alone")
    prior = tyxe.priors.BinaryPrior() if guide.startswith("binary") else NORMAL
    bnn, x, y = small(LIKELIHOODS["categorical"], GUIDES[guide], prior)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tyxe.TyxeWarning)  # of handlers without effect
        with HANDLERS[handler]():
            assert assert_equal_steps(bnn, x, y) == (guide not in TRACED)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods(name):
    bnn, x, y = small(LIKELIHOODS[name], AutoNormal)
    assert assert_equal_steps(bnn, x, y)


@pytest.mark.parametrize("kind", ["weights", "mask", "all masked"])
def test_weights_and_masks(kind):
    bnn, x, y = small(LIKELIHOODS["Gaussian"], AutoNormal)
    counts = torch.arange(POINTS) % 3
    given = (
        {"weights": counts.float()}
        if kind == "weights"
        else {"mask": (counts > 0)[:, None].expand(-1, 2)}
    )
    if kind == "all masked":
        given = {"mask": torch.zeros(POINTS, 2, dtype=torch.bool)}
    assert assert_equal_steps(bnn, x, Targets(y, **given))


def test_a_sampled_kl():
    bnn, x, y = small(LIKELIHOODS["categorical"], AutoNormal)
    assert assert_equal_steps(bnn, x, y, closed_form_kl=False)


@pytest.mark.parametrize(
    "prior",
    [dist.Normal(0.5, 2.0), dist.Laplace(0.0, 1.0), dist.Cauchy(0.0, 1.0)],
    ids=["shifted", "Laplace", "Cauchy"],
)
@pytest.mark.parametrize("guide", ["normal", "delta"])
def test_priors(guide, prior):
    bnn, x, y = small(LIKELIHOODS["categorical"], GUIDES[guide], tyxe.priors.IIDPrior(prior))
    assert assert_equal_steps(bnn, x, y)


def test_parts_that_are_not_trained():
    guide = functools.partial(AutoNormal, train_loc=False)
    bnn, x, y = small(LIKELIHOODS["categorical"], guide)
    assert assert_equal_steps(bnn, x, y)
    assert all(loc.grad is None for loc in bnn.net_guide.locs.parameters())


def test_a_watched_parameter_sees_its_whole_gradient():
    bnn, x, y = small(LIKELIHOODS["categorical"], AutoNormal)
    seen = []
    loc = bnn.net_guide.get_loc("0.weight")
    loc.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    assert assert_equal_steps(bnn, x, y)
    traced, _, untraced = seen
    torch.testing.assert_close(untraced, traced)


class Replaced(tyxe.VariationalBNN):
    """A BNN with a model of its own."""

    def model(self, inputs, obs=None):
        with poutine.scale(scale=0.5):
            return super().model(inputs, obs)


class Sampling(nn.Module):
    """A net with a factor of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        out = self.inner(x)
        pyro.factor("roughness", -out.square().sum())
        return out


def test_what_others_look_at_is_traced():
    likely = LIKELIHOODS["categorical"]
    bnn, x, y = small(likely, AutoNormal)
    with poutine.scale(scale=0.5):
        assert not assert_equal_steps(bnn, x, y)
    for build in (
        lambda: Replaced(nn.Linear(4, 3), NORMAL, likely.build(), AutoNormal),
        lambda: tyxe.VariationalBNN(Sampling(), NORMAL, likely.build(), AutoNormal),
    ):
        assert not assert_equal_steps(build(), x, y)
    bnn.guide = bnn.guide
    assert not assert_equal_steps(bnn, x, y)


def horseshoe(name, module, parameter):
    def prior():
        ones = parameter.new_ones(parameter.shape)
        local = pyro.sample(f"{name}_local", dist.HalfCauchy(ones).to_event(parameter.dim()))
        return dist.Normal(torch.zeros_like(local), local)

    return prior


def test_a_hierarchical_prior_is_traced():
    prior = tyxe.priors.LambdaPrior(horseshoe)
    bnn, x, y = small(LIKELIHOODS["categorical"], AutoNormal, prior)
    assert not assert_equal_steps(bnn, x, y)


def test_map_of_a_laplace_approximation():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    bnn = tyxe.LaplaceBNN(net, NORMAL, LIKELIHOODS["categorical"].build())
    x, y = torch.randn(POINTS, 4), LIKELIHOODS["categorical"].targets()
    assert assert_equal_steps(bnn, x, y)
    bnn.fit_curvature([(x, y)])
    assert assert_equal_steps(bnn, x, y)


# --------------------------------------------------------------------------- programs that change


class Later(nn.Linear):
    """Makes a statement from its third forward on."""

    forwards = 0

    def forward(self, x):
        self.forwards += 1
        if self.forwards > 2:
            pyro.factor("later", torch.tensor(-100.0))
        return super().forward(x)


def likelihoods_of_steps(bnn, prepare=lambda bnn: None, steps=4, context=nullcontext):
    """The log-likelihood of each step that changes nothing."""
    prepare(bnn)
    x, y = torch.zeros(POINTS, 3), torch.arange(POINTS) % 3
    sgd = functools.partial(torch.optim.SGD, lr=0.0)
    with warnings.catch_warnings(), context():
        warnings.simplefilter("ignore", tyxe.TyxeWarning)
        return bnn.fit([(x, y)] * steps, sgd, 1)


def narrow(net=None):
    torch.manual_seed(0)
    guide = functools.partial(AutoNormal, init_scale=1e-6)
    return tyxe.VariationalBNN(
        net or nn.Linear(3, 3), NORMAL, tyxe.likelihoods.Categorical(POINTS), guide
    )


def test_statements_that_come_later_count():
    plain = likelihoods_of_steps(narrow()).log_likelihood[0]
    found = likelihoods_of_steps(narrow(Later(3, 3)), steps=7).log_likelihood[0]
    # The check of the first batch is a forward, too: six of seven steps have the statement.
    assert found == pytest.approx(plain - 100 * 6 / 7, abs=1.0)


def scaled(bnn):
    forward = bnn.likelihood.forward

    def new(*given):
        with poutine.scale(scale=0.01):
            return forward(*given)

    bnn.likelihood.forward = new


def test_a_forward_of_an_instance_is_run_in_each_step():
    plain = likelihoods_of_steps(narrow()).log_likelihood[0]
    found = likelihoods_of_steps(narrow(), scaled).log_likelihood[0]
    assert found == pytest.approx(0.01 * plain, rel=1e-3)


@pytest.mark.parametrize("part", ["net_guide", "likelihood", "net_prior"])
def test_hooks_of_parts_fire_in_each_step(part):
    calls = []

    def watch(bnn):
        getattr(bnn, part).register_forward_hook(lambda *_: calls.append(part))

    likelihoods_of_steps(narrow(), watch, steps=5)
    assert len(calls) >= 5


def test_handlers_that_look_at_samples_see_those_of_each_step():
    seen = []

    class Watching(type(tyxe.poutine.local_reparameterization())):
        def _pyro_post_sample(self, msg):
            seen.append(msg["name"])

    likelihoods_of_steps(narrow(), steps=5, context=Watching)
    assert seen.count("likelihood.data") == 5


def test_a_step_tells_all_draws():
    keys = []

    class Keep(tyxe.Callback):
        def on_batch(self, bnn, epoch, batch, terms):
            keys.append(set(terms.values))

    bnn = tyxe.VariationalBNN(
        nn.Linear(3, 3),
        NORMAL,
        tyxe.likelihoods.Categorical(POINTS),
        autoguide.AutoMultivariateNormal,
    )
    x, y = torch.zeros(POINTS, 3), torch.arange(POINTS) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tyxe.TyxeWarning)
        bnn.fit([(x, y)] * 3, torch.optim.Adam, 1, Keep())
    assert keys[0] == keys[1] == keys[2]


def test_points_are_drawn_within_plates():
    bnn = tyxe.VariationalBNN(
        nn.Linear(3, 3), NORMAL, tyxe.likelihoods.Categorical(POINTS), autoguide.AutoDelta
    )
    with pyro.plate("draws", 4, dim=-3):
        values = bnn.guide(torch.zeros(2, 3))
    assert values["net.weight"].shape == (4, 1, 1, 3, 3)


def test_sparse_gradients():
    x, y = torch.arange(8).view(4, 2) % 5, torch.arange(4) % 3
    found = []
    for is_sparse in (True, False):
        torch.manual_seed(0)
        body = nn.Embedding(5, 3, sparse=is_sparse)
        net = nn.Sequential(body, nn.Flatten(), nn.Linear(6, 3))
        likelihood = tyxe.likelihoods.Categorical(POINTS)
        bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, autoguide.AutoDelta)
        bnn.fit([(x, y)] * 3, functools.partial(torch.optim.SGD, lr=0.1), 1)
        found.append([p.detach() for p in bnn.parameters()])
    torch.testing.assert_close(*found)
